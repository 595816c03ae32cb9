/* The container of the tests of direct restore: memory of every kind, and a cut through it that is consistent or not.
 *
 * mappings MIB[+IDLE][!]
 *                      holds MIB in small pages, as much in huge ones, and as much again that it shares with two children
 *                      since they were forked; and beside it what a restore must leave to CRIU. It has IDLE other
 *                      children. With `!` one child's filter allows no system call, and no pages become huge later,
 *                      which counts as new memory. Like workload.c it prints `count N checksum H`, of what does not change; H is `torn`
 *                      if what changes is not from one instant. A handler of SIGUSR1 changes memory at any time, and
 *                      `signals N` is printed with the number of times.
 * mappings pause       does nothing, as the first container of a pod.
 * A child that gets SIGUSR2 becomes another program, with as much memory at the same place; it prints `torn` if that is
 * not as it has filled it.
 *
 * The first page of its code is its own, and not its file's: CRIU makes it so where it puts its first call, and a kernel
 * that only seems to mark what is written (integration/soft_dirty.py) would not tell CRIU.
 */
#define _GNU_SOURCE
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define PAGE 4096
#define WORDS (PAGE / 8)
#define CHILDREN 2

static size_t size;
static uint64_t *small, *huge, *common, *odd, *locked, *unforked, *wiped, *memfd, *sysv, *large;
static volatile uint64_t *answers;
static const char *amount;
static volatile sig_atomic_t signals; /* in memory that CRIU restores; each is noted in `odd`, too, which goes past it */

static void end(int s) { (void)s; kill(0, SIGKILL); }
static void become(int s) { (void)s; execl("/proc/self/exe", "mappings", "other", amount, (char *)NULL); }
static void note(int s) { (void)s; odd[1]++, signals++; }
static void *idle(void *x) { for (;;) pause(); return x; }

static uint64_t mix(uint64_t x)
{
    x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ x >> 33;
}

/* Between guards, and these behind a gap: the kernel joins nothing, and what a child has alike stays alike. */
static void *map(size_t bytes, int flags, int fd)
{
    char *place = mmap(NULL, bytes + 6 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(place + bytes + 5 * MIB, MIB);
    place = (char *)(((uintptr_t)place + 4 * MIB - 1) & ~(2 * MIB - 1));
    void *made = mmap(place, bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, 0);
    return made == MAP_FAILED ? NULL : made;
}

static uint64_t *fill(void *memory, size_t bytes, uint64_t seed)
{
    uint64_t *words = memory;
    for (size_t i = 0; i < bytes / 8; i++)
        words[i] = i % WORDS == 1 ? 0 : mix(seed * 1000003 + i); /* word 1 of a page changes */
    return words;
}

static uint64_t sum(const uint64_t *words, size_t bytes)
{
    uint64_t found = 0;
    for (size_t i = 0; words && i < bytes / 8; i++)
        if (i % WORDS != 1)
            found = (found << 1 | found >> 63) ^ words[i];
    return found;
}

static uint64_t versions(const uint64_t *words)
{
    uint64_t found = 0;
    for (size_t i = 1; i < size / 8; i += WORDS)
        found += words[i];
    return found;
}

static void own_code(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512], mode[5];
    unsigned long start;
    while (maps && fgets(line, sizeof(line), maps))
        if (sscanf(line, "%lx-%*x %4s", &start, mode) == 2 && !strcmp(mode, "r-xp") && !strstr(line, "[")) {
            mprotect((void *)start, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC);
            *(volatile char *)start = *(volatile char *)start;
            mprotect((void *)start, PAGE, PROT_READ | PROT_EXEC);
        }
    if (maps)
        fclose(maps);
}

/* At the lowest priority, since it can wait for nothing. */
static void allow_nothing(void)
{
    struct sock_filter kill = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    struct sock_fprog program = { 1, &kill };
    if (nice(19) < 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        _exit(1);
}

static void other(uint64_t *place)
{
    fill(place, size, 12);
    for (uint64_t right = sum(place, size);; usleep(50000))
        if (sum(place, size) != right) {
            puts("torn");
            fflush(stdout);
        }
}

int main(int argc, char **argv)
{
    const int own = MAP_PRIVATE | MAP_ANONYMOUS;
    signal(SIGTERM, end);
    if (argc > 1 && !strcmp(argv[1], "pause"))
        idle(NULL);
    own_code();
    if (argc > 2) {
        sigset_t none;
        sigemptyset(&none), sigprocmask(SIG_SETMASK, &none, NULL);
        size = (size_t)atoi(argv[2]) * MIB;
        other(map(size, own, -1));
    }
    amount = argc > 1 ? argv[1] : "72";
    size = (argc > 1 ? (size_t)atoi(argv[1]) : 72) * MIB;
    answers = map(PAGE, MAP_SHARED | MAP_ANONYMOUS, -1);
    const char *more = argc > 1 ? strchr(argv[1], '+') : NULL;
    for (int child = more ? atoi(more) : 0; child > 0; child--)
        if (fork() == 0)
            idle(NULL);
    common = fill(map(size, own, -1), size, 1);
    for (int child = 0; child < CHILDREN; child++)
        if (fork() == 0) {
            int is_sealed = child == CHILDREN - 1 && argc > 1 && strchr(argv[1], '!');
            signal(SIGUSR2, become);
            if (is_sealed)
                allow_nothing();
            for (;; is_sealed ? 0 : usleep(50000))
                answers[child] = sum(common, size);
        }
    small = map(size, own, -1), huge = map(size, own, -1);
    madvise(small, size, MADV_NOHUGEPAGE), madvise(huge, size, MADV_HUGEPAGE);
    fill(small, size, 2), fill(huge, size, 3);
    if (argc > 1 && strchr(argv[1], '!'))
        madvise(huge, size, MADV_NOHUGEPAGE);
    madvise((char *)small + 8 * MIB, MIB, MADV_DONTNEED); /* reads as zeros ever after */
    mprotect((char *)small + 16 * MIB, MIB, PROT_NONE);
    mprotect((char *)small + 24 * MIB, 2 * MIB, PROT_READ);
    odd = fill(map(MIB + PAGE, own, -1), MIB + PAGE, 4);
    locked = fill(map(2 * MIB, own, -1), 2 * MIB, 5), mlock(locked, 2 * MIB);
    unforked = fill(map(4 * MIB, own, -1), 4 * MIB, 6), madvise(unforked, 4 * MIB, MADV_DONTFORK);
    wiped = fill(map(4 * MIB, own, -1), 4 * MIB, 10), madvise(wiped, 4 * MIB, MADV_WIPEONFORK);
    int fd = memfd_create("beside", 0);
    if (ftruncate(fd, 2 * (off_t)MIB))
        return 1;
    memfd = fill(map(2 * MIB, MAP_SHARED, fd), 2 * MIB, 7);
    sysv = fill(shmat(shmget(IPC_PRIVATE, 2 * MIB, IPC_CREAT | 0600), NULL, 0), 2 * MIB, 8);
    if ((large = map(2 * MIB, own | MAP_HUGETLB, -1))) /* where the machine has such pages */
        fill(large, 2 * MIB, 9);
    pthread_t thread;
    sigset_t noted;
    sigemptyset(&noted), sigaddset(&noted, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &noted, NULL); /* the main thread alone gets it */
    for (int i = 0; i < 3; i++)
        pthread_create(&thread, NULL, idle, NULL);
    signal(SIGUSR1, note);
    pthread_sigmask(SIG_UNBLOCK, &noted, NULL);
    for (int child = 0; child < CHILDREN; child++)
        while (!answers[child]) /* of the lowest priority, on a loaded machine */
            usleep(20000);
    uint64_t seed = 42, total = 0, word = 0;
    for (unsigned count = 1;; count++) {
        for (int i = 0; i < 20000; i++) {
            uint64_t page = mix(seed++) % (size / PAGE);
            if (page * PAGE - 16 * MIB >= 10 * MIB || page < 16 * MIB / PAGE) { /* not where it may not write */
                ((i & 1 ? small : huge) + page * WORDS)[1]++;
                total++;
            }
        }
        mprotect((char *)small + 16 * MIB, MIB, PROT_READ);
        uint64_t changed = versions(small) + versions(huge);
        word = sum(small, size) ^ sum(huge, size) * 3 ^ sum(odd, MIB + PAGE) * 5 ^ sum(locked, 2 * MIB) * 7
            ^ sum(unforked, 4 * MIB) * 11 ^ sum(memfd, 2 * MIB) * 13 ^ sum(sysv, 2 * MIB) * 17 ^ sum(large, 2 * MIB) * 19
            ^ sum(wiped, 4 * MIB) * 29;
        mprotect((char *)small + 16 * MIB, MIB, PROT_NONE);
        for (int child = 0; child < CHILDREN; child++)
            word ^= answers[child] * (23 + (uint64_t)child) ^ sum(common, size);
        pthread_sigmask(SIG_BLOCK, &noted, NULL);
        printf("signals %d\n", (int)signals);
        if (changed == total && odd[1] == (uint64_t)signals)
            printf("count %u checksum %016llx\n", count, (unsigned long long)word);
        else
            printf("count %u checksum torn\n", count);
        fflush(stdout);
        pthread_sigmask(SIG_UNBLOCK, &noted, NULL);
        usleep(20000);
    }
}
