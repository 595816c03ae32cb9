/* A process that knows whether a copy of its memory is of one instant, and that does what a copy of it could disturb.
 *
 * versions MIB 4k|huge
 *
 * It has three mappings: plain, kept out of forks (MADV_DONTFORK), wiped in forks (MADV_WIPEONFORK); the latter of 1 MiB.
 * Page i of all holds i, a version, and a filler made of i. A thread adds 1 to the version of some page, then 1 to the
 * total, which is the third word of the first page: in every instant the sum of versions is the total, or one more.
 * It prints `ready PORT ADDRESS SIZE ADDRESS SIZE ADDRESS SIZE`: it listens on that port. Commands, each answered:
 *   check: `ok TOTAL` or what is wrong; filter: no system call but a few, or it ends; limit: it may have no child;
 *   unshare: its children are in a new PID namespace; child: one that sends no signal, `PID`; fork: one that ends at once;
 *   map: 64 MiB of new memory and 100 GiB of hardly any, and the half of the plain mapping unmapped; exec: sleep(1); exit;
 *   huge: pages of hugetlbfs, none of which is reserved for a copy; write: to all of these again.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, MAPPINGS = 3, SMALL = 1 << 20 };
static struct { uint64_t *start; size_t size; } mapped[MAPPINGS];
static size_t pages;
static int started; /* threads */
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;

static uint64_t mix(uint64_t x)
{
    x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33;
    return x * 0xc4ceb9fe1a85ec53ull;
}

static volatile uint64_t *page(size_t i)
{
    for (int n = 0;; i -= mapped[n++].size / PAGE)
        if (i < mapped[n].size / PAGE)
            return mapped[n].start + i * WORDS;
}

static void *write_versions(void *unused)
{
    (void)unused;
    __atomic_add_fetch(&started, 1, __ATOMIC_SEQ_CST);
    for (uint64_t seed = 1;; seed++) {
        pthread_mutex_lock(&writing);
        page(1 + mix(seed) % (pages - 1))[1]++;
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
        page(0)[2]++;
        pthread_mutex_unlock(&writing);
        if (seed % 64 == 0)
            clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){ .tv_nsec = 200000 }, NULL);
    }
    return NULL;
}

static void *wait_for_ever(void *unused)
{
    __atomic_add_fetch(&started, 1, __ATOMIC_SEQ_CST);
    for (;;)
        clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){ .tv_sec = 1 }, unused);
    return NULL;
}

static void check(void)
{
    uint64_t sum = 0, bad = 0;
    pthread_mutex_lock(&writing);
    for (size_t i = 1; i < pages; i++) {
        volatile uint64_t *words = page(i);
        sum += words[1];
        bad += words[0] != i || words[3] != mix(i) || words[WORDS - 1] != mix(i + 1);
    }
    printf(sum == page(0)[2] && !bad ? "ok %lu\n" : "wrong: %lu, sum %lu, %lu bad\n", page(0)[2], sum, bad);
    pthread_mutex_unlock(&writing);
}

#define ALLOW(call) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##call, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
static long filter(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0), /* the number: struct seccomp_data */
        ALLOW(read), ALLOW(write), ALLOW(clock_nanosleep), ALLOW(restart_syscall), ALLOW(futex), ALLOW(exit_group),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog program = { sizeof code / sizeof *code, code };
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
}

#define VAST (100ul << 30)
enum { HUGE = 2 << 20, HUGE_PAGES = 2 };
static char *huge;

static long act(const char *command)
{
    if (!strcmp(command, "huge")) {
        huge = mmap(NULL, HUGE_PAGES * HUGE, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_NORESERVE, -1, 0);
        if (huge == MAP_FAILED)
            return 1;
    }
    if (!strcmp(command, "huge") || !strcmp(command, "write")) {
        for (int n = 0; n < HUGE_PAGES; n++)
            huge[n * HUGE]++;
        return huge[0] != huge[HUGE];
    }
    size_t half = mapped[0].size / 2;
    if (!strcmp(command, "filter"))
        return filter();
    if (!strcmp(command, "limit"))
        return setrlimit(RLIMIT_NPROC, &(struct rlimit){ 1, 1 }) || setuid(54321);
    if (!strcmp(command, "unshare"))
        return unshare(CLONE_NEWPID);
    if (!strcmp(command, "fork")) {
        pid_t pid = fork();
        if (!pid)
            _exit(0);
        return pid < 0 || waitpid(-1, NULL, 0) != pid;
    }
    if (!strcmp(command, "map")) {
        char *more = mmap(NULL, 64 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        char *vast = mmap(NULL, VAST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (vast == MAP_FAILED)
            return 1;
        vast[0] = vast[VAST - 1] = 1;
        pthread_mutex_lock(&writing); /* for ever */
        return more == MAP_FAILED || munmap((char *)mapped[0].start + half, half);
    }
    return 1;
}

int main(int count, char **arguments)
{
    (void)count;
    for (int n = 0; n < MAPPINGS; n++) {
        mapped[n].size = n ? SMALL : (size_t)atol(arguments[1]) << 20;
        mapped[n].start = mmap(NULL, mapped[n].size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        madvise(mapped[n].start, mapped[n].size, strcmp(arguments[2], "huge") ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
        pages += mapped[n].size / PAGE;
    }
    madvise(mapped[1].start, SMALL, MADV_DONTFORK);
    madvise(mapped[2].start, SMALL, MADV_WIPEONFORK);
    for (size_t i = 0; i < pages; i++) {
        volatile uint64_t *words = page(i);
        for (size_t k = 0; k < WORDS; k++)
            words[k] = mix(i * WORDS + k);
        words[0] = i, words[1] = words[2] = 0, words[3] = mix(i), words[WORDS - 1] = mix(i + 1);
    }
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t size = sizeof address;
    int port = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bind(port, (struct sockaddr *)&address, size);
    listen(port, 1);
    getsockname(port, (struct sockaddr *)&address, &size);
    pthread_t thread;
    pthread_create(&thread, NULL, write_versions, NULL);
    for (int n = 0; n < 3; n++)
        pthread_create(&thread, NULL, wait_for_ever, NULL);
    while (__atomic_load_n(&started, __ATOMIC_SEQ_CST) < 4) /* what a thread calls first is not in the filter */
        usleep(1000);
    setvbuf(stdout, NULL, _IOLBF, 1 << 12);
    printf("ready %d", ntohs(address.sin_port));
    for (int n = 0; n < MAPPINGS; n++)
        printf(" %lu %zu", (unsigned long)mapped[n].start, mapped[n].size);
    puts("");
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (!strcmp(line, "check"))
            check();
        else if (!strcmp(line, "child")) {
            long pid = syscall(SYS_clone, 0, 0, 0, 0, 0);
            if (!pid)
                wait_for_ever(NULL);
            printf("%ld\n", pid);
        } else if (!strcmp(line, "exec"))
            execlp("sh", "sh", "-c", "echo done; exec sleep 600", NULL);
        else if (!strcmp(line, "exit"))
            return 0;
        else
            puts(act(line) ? "failed" : "done");
    }
    return 0;
}
