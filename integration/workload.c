/* The container of the integration tests: holds mixed memory, counts, and says a checksum of all of it.
 *
 * workload pause   just waits (a pod's sandbox)
 * workload say WORD  prints a word and ends
 * workload FILE    the same with a file's content as its memory (FILE begins with /)
 * workload beat FILE  holds a file's content and prints `gap N ms` when it was not run for more than 30 ms
 * workload MIB     prints `count N checksum H` every 50 ms; on USR1 it touches /run/ocihook-quiesced and prints
 *                  `quiesced`, on USR2 it prints `resumed`, on TERM it ends.
 * workload MIB PATH...  keeps files open, too, and writes each count into them
 * workload hold DIR MIB  counts, and has DIR/config open, mapped and watched, and DIR/token open, if there is one
 * workload hold-open DIR MIB  the same, without watches
 * workload hold-in DIR MIB  the same as hold, in the directory that DIR/..data leads to
 * workload stream MIB [PATH...]  writes numbered lines to stderr, too, more at once than a pipe takes in one piece
 */
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t quiesce, resume;

static void on_usr1(int s) { (void)s; quiesce = 1; }
static void on_usr2(int s) { (void)s; resume = 1; }
static void on_term(int s) { (void)s; _exit(0); }

static int hold(const char *volume, int watches_it)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/token", volume);
    open(path, O_RDONLY); /* stays open */
    snprintf(path, sizeof path, "%s/config", volume);
    int file = open(path, O_RDONLY), watches = inotify_init1(IN_NONBLOCK);
    void *mapped = mmap(NULL, 1, PROT_READ, MAP_PRIVATE, file, 0);
    if (file < 0 || mapped == MAP_FAILED || !watches_it)
        return file < 0 || mapped == MAP_FAILED;
    return inotify_add_watch(watches, path, IN_ALL_EVENTS) < 0 || inotify_add_watch(watches, volume, IN_ALL_EVENTS) < 0;
}

static int stream_some(void)
{
    static unsigned line;
    static char text[33 * 128 + 1]; /* more than PIPE_BUF: pipe(7) */
    size_t done = 0, size = 33 * 128;
    for (size_t at = 0; at < size; at += 128)
        snprintf(text + at, 129, "%0127u\n", line++);
    while (done < size) {
        ssize_t wrote = write(2, text + done, size - done);
        if (wrote < 0)
            return 0;
        done += (size_t)wrote;
    }
    return 1;
}

int main(int argc, char **argv)
{
    signal(SIGTERM, on_term);
    signal(SIGINT, on_term);
    if (argc < 2 || !strcmp(argv[1], "pause"))
        for (;;)
            pause();
    if (!strcmp(argv[1], "say"))
        return argc < 3 || puts(argv[2]) < 0;
    signal(SIGUSR1, on_usr1);
    signal(SIGUSR2, on_usr2);
    if (!strncmp(argv[1], "hold", 4)) {
        int is_in = !strcmp(argv[1], "hold-in"), watches_it = strcmp(argv[1], "hold-open");
        if (argc < 4 || hold(argv[2], watches_it) || (is_in && (chdir(argv[2]) || chdir("..data"))))
            return 4;
        argv += 2, argc -= 2;
    }
    int beats = !strcmp(argv[1], "beat"), streams = !strcmp(argv[1], "stream");
    argv += beats + streams, argc -= beats + streams;
    int file = argv[1][0] == '/' ? open(argv[1], O_RDONLY) : -1;
    size_t bytes = file >= 0 ? (size_t)lseek(file, 0, SEEK_END) : (size_t)atoi(argv[1]) << 20;
    size_t words = bytes / sizeof(uint64_t);
    uint64_t *memory = mmap(NULL, words * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint64_t seed = (uint64_t)time(NULL) * 2654435761u + (uint64_t)getpid() + (uint64_t)(uintptr_t)memory;
    for (size_t at = 0; file >= 0 && at < bytes;) {
        ssize_t got = pread(file, (char *)memory + at, bytes - at, (off_t)at);
        if (got <= 0)
            return 1;
        at += (size_t)got;
    }
    for (size_t i = 0; file < 0 && i < words; i++) { /* by MiB: 2 of 8 zero, 3 random, 3 repetitive */
        seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
        size_t kind = (i >> 17) & 7;
        memory[i] = kind < 2 ? 0 : kind < 5 ? seed : i & 0xfff;
    }
    struct timespec last, now;
    clock_gettime(CLOCK_MONOTONIC, &last);
    for (unsigned beat = 0; beats; beat++) {
        usleep(2000);
        clock_gettime(CLOCK_MONOTONIC, &now);
        long gap_ms = (now.tv_sec - last.tv_sec) * 1000 + (now.tv_nsec - last.tv_nsec) / 1000000;
        if (gap_ms > 30 || beat == 0)
            printf("gap %ld ms\n", gap_ms);
        fflush(stdout);
        last = now;
    }
    int open_files[8], files = 0;
    for (int i = 2; i < argc && files < 8 && argv[i][0] == '/'; i++)
        open_files[files++] = open(argv[i], O_CREAT | O_RDWR, 0600);
    for (unsigned count = 1;; count++) {
        for (int i = 0; i < files; i++)
            if (pwrite(open_files[i], &count, sizeof count, 0) != sizeof count)
                return 2;
        if (streams && !stream_some())
            return 3;
        if (quiesce) {
            quiesce = 0;
            close(open("/run/ocihook-quiesced", O_CREAT | O_TRUNC | O_WRONLY, 0600));
            puts("quiesced");
        }
        if (resume) {
            resume = 0;
            puts("resumed");
        }
        uint64_t sum = 0;
        for (size_t i = 0; i < words; i++)
            sum = (sum << 1 | sum >> 63) ^ memory[i];
        printf("count %u checksum %016llx\n", count, (unsigned long long)sum);
        fflush(stdout);
        usleep(50000);
    }
}
