/* A program that notices whatever is done to its threads: each sits in a system call of another kind, or computes, and
 * counts its rounds and what was not as it must be. For each line on stdin it says, by name, rounds and errors; last the
 * calls of its handler of SIGTRAP. Argument: bytes that the mapper maps.
 */
#define _GNU_SOURCE
#ifdef __x86_64__
#include <cpuid.h>
#endif
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { WAIT_MS = 10, PAGE = 4096 };
static struct counts { const char *name; volatile unsigned long rounds, errors; volatile int thread; } all[16];
static int number_of_threads, numbers[2];
static volatile sig_atomic_t traps;
static size_t mapped_bytes;

static void on_trap(int number) { (void)number, traps++; }

static double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static int sleeps(void)
{
    double start = now_ms();
    int result = clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){ .tv_nsec = WAIT_MS * 1000000 }, NULL);
    return !result && now_ms() - start >= WAIT_MS;
}

static int polls(void)
{
    double start = now_ms();
    return !poll(NULL, 0, WAIT_MS) && now_ms() - start >= WAIT_MS - 1;
}

static int waits(void)
{
    static int word;
    return syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, &(struct timespec){ .tv_nsec = WAIT_MS * 1000000 }, NULL, 0) == -1 && errno == ETIMEDOUT;
}

static int writes(void)
{
    static unsigned next;
    poll(NULL, 0, WAIT_MS);
    next++;
    return write(numbers[1], &next, sizeof next) == sizeof next;
}

static int reads(void)
{
    static unsigned expected;
    unsigned found = 0;
    expected++;
    return read(numbers[0], &found, sizeof found) == sizeof found && found == expected;
}

/* Everything that a processor has for a thread holds something of its own while a loop runs. */
static int computes(void)
{
#ifdef __x86_64__
    struct { uint8_t vectors[32][64]; uint64_t general[8], masks[4], red[16], rounds; long double pi; uint32_t control; } in, out;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    for (size_t i = 0; i < sizeof in; i++)
        ((uint8_t *)&in)[i] = (uint8_t)(i * 7 + (size_t)now.tv_nsec / 64);
    memset(&out, 0, sizeof out);
    in.rounds = 5000000;
    in.control = 0x7f80; /* round to zero */
    uint32_t usual;
    __asm__("stmxcsr %0" : "=m"(usual));
    unsigned a, b = 0, c, d;
    __get_cpuid_count(7, 0, &a, &b, &c, &d);
    int has_wide = __builtin_cpu_supports("avx512f") && b >> 30 & 1, has_avx = __builtin_cpu_supports("avx");
    size_t vectors = has_wide ? sizeof in.vectors : has_avx ? 16 * 64 : 0;
#define WIDE(n) "vmovdqu64 " #n "*64(%[from]), %%zmm" #n "\n"
#define WIDE_BACK(n) "vmovdqu64 %%zmm" #n ", " #n "*64(%[to])\n"
#define AVX(n) "vmovdqu " #n "*64(%[from]), %%ymm" #n "\n"
#define AVX_BACK(n) "vmovdqu %%ymm" #n ", " #n "*64(%[to])\n"
#define LOW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define HIGH(X) X(16) X(17) X(18) X(19) X(20) X(21) X(22) X(23) X(24) X(25) X(26) X(27) X(28) X(29) X(30) X(31)
    const uint8_t *from = (const uint8_t *)&in;
    uint8_t *to = (uint8_t *)&out;
    __asm__ volatile( /* the addresses of both and what the processor has lie in rbx, r12 and r13 */
        "ldmxcsr %c[control](%[from])\n fldpi\n"
        "test $2, %[wide]\n jz 1f\n" LOW(WIDE) HIGH(WIDE)
        "kmovq %c[masks](%[from]), %%k1\n kmovq %c[masks]+8(%[from]), %%k2\n kmovq %c[masks]+16(%[from]), %%k6\n kmovq %c[masks]+24(%[from]), %%k7\n jmp 2f\n"
        "1: test $1, %[wide]\n jz 2f\n" LOW(AVX)
        "2: xor %%ecx, %%ecx\n"
        "3: mov %c[red](%[from],%%rcx,8), %%rax\n mov %%rax, -128(%%rsp,%%rcx,8)\n inc %%ecx\n cmp $16, %%ecx\n jne 3b\n"
        "mov %c[general](%[from]), %%rax\n mov %c[general]+8(%[from]), %%rdx\n mov %c[general]+16(%[from]), %%rsi\n"
        "mov %c[general]+24(%[from]), %%rdi\n mov %c[general]+32(%[from]), %%r8\n mov %c[general]+40(%[from]), %%r9\n"
        "mov %c[general]+48(%[from]), %%r10\n mov %c[general]+56(%[from]), %%r14\n"
        "mov %c[rounds](%[from]), %%rcx\n xor %%r11d, %%r11d\n"
        "4: inc %%r11\n dec %%rcx\n jnz 4b\n"
        "mov %%rax, %c[general](%[to])\n mov %%rdx, %c[general]+8(%[to])\n mov %%rsi, %c[general]+16(%[to])\n"
        "mov %%rdi, %c[general]+24(%[to])\n mov %%r8, %c[general]+32(%[to])\n mov %%r9, %c[general]+40(%[to])\n"
        "mov %%r10, %c[general]+48(%[to])\n mov %%r14, %c[general]+56(%[to])\n mov %%r11, %c[rounds](%[to])\n"
        "xor %%ecx, %%ecx\n"
        "5: mov -128(%%rsp,%%rcx,8), %%rax\n mov %%rax, %c[red](%[to],%%rcx,8)\n inc %%ecx\n cmp $16, %%ecx\n jne 5b\n"
        "test $2, %[wide]\n jz 6f\n" LOW(WIDE_BACK) HIGH(WIDE_BACK)
        "kmovq %%k1, %c[masks](%[to])\n kmovq %%k2, %c[masks]+8(%[to])\n kmovq %%k6, %c[masks]+16(%[to])\n kmovq %%k7, %c[masks]+24(%[to])\n jmp 7f\n"
        "6: test $1, %[wide]\n jz 8f\n" LOW(AVX_BACK)
        "7: vzeroupper\n"
        "8: stmxcsr %c[control](%[to])\n fstpt %c[pi](%[to])\n"
        : : [from] "b"(from), [to] "r"(to), [wide] "r"(has_wide * 2 + has_avx),
          [control] "i"(offsetof(__typeof__(in), control)), [masks] "i"(offsetof(__typeof__(in), masks)),
          [red] "i"(offsetof(__typeof__(in), red)), [general] "i"(offsetof(__typeof__(in), general)),
          [rounds] "i"(offsetof(__typeof__(in), rounds)), [pi] "i"(offsetof(__typeof__(in), pi))
        : "rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "r14", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5",
          "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "memory", "cc");
    __asm__ volatile("ldmxcsr %0" : : "m"(usual));
    int is_right = in.rounds == out.rounds && in.control == out.control && out.pi == 3.14159265358979323851L;
    is_right &= !memcmp(in.general, out.general, sizeof in.general) && !memcmp(in.red, out.red, sizeof in.red);
    is_right &= !has_wide || !memcmp(in.masks, out.masks, sizeof in.masks);
    for (size_t at = 0; at < vectors; at += 64)
        is_right &= !memcmp((uint8_t *)in.vectors + at, (uint8_t *)out.vectors + at, has_wide ? 64 : 32);
    return is_right;
#else
    volatile double sum = 0;
    for (int i = 1; i <= 5000000; i++)
        sum += 1;
    return sum == 5000000;
#endif
}

/* What CUDA's driver does: one large mapping, filled as it is made, then written to. */
static int maps(void)
{
    char *start = mmap(NULL, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (start == MAP_FAILED)
        return 0;
    for (size_t at = 0; at < mapped_bytes; at += PAGE)
        *(size_t *)(start + at) = ~at;
    int is_right = 1;
    for (int times = 0; times < 3; times++, poll(NULL, 0, 1))
        for (size_t at = 0; at < mapped_bytes; at += PAGE)
            is_right &= *(size_t *)(start + at) == ~at;
    munmap(start, mapped_bytes);
    return is_right;
}

#ifdef __x86_64__
enum { REQUEST_PERMISSION = 0x1023, TILES = 18 }; /* arch_prctl(2) */

static int has_tiles(void)
{
    unsigned a, b, c, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 24 & 1 && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILES);
}

/* All tiles of Intel's AMX hold something, in a loop and in a system call; they are free in between. */
static int keeps_tiles(void)
{
    static _Alignas(64) uint8_t in[8][1024], out[8][1024];
    struct { uint8_t palette, row, unused[14]; uint16_t columns[16]; uint8_t rows[16]; } config = { .palette = 1 }, found;
    static uint8_t round;
    round++;
    for (size_t i = 0; i < sizeof in; i++)
        ((uint8_t *)in)[i] = (uint8_t)(i * 7 + i / 1024 + round);
    for (int i = 0; i < 8; i++)
        config.columns[i] = 64, config.rows[i] = 16;
    memset(out, 0, sizeof out);
#define TILE(n) "tileloadd " #n "*1024(%[at],%[row]), %%tmm" #n "\n"
#define TILE_BACK(n) "tilestored %%tmm" #n ", " #n "*1024(%[at],%[row])\n"
#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
    __asm__ volatile("ldtilecfg %[config]\n" EACH(TILE) : : [config] "m"(config), [at] "r"(in), [row] "r"(64L) : "memory");
    for (volatile int i = 0; i < 2000000; i++)
        ;
    int is_right = !poll(NULL, 0, WAIT_MS);
    __asm__ volatile("sttilecfg %[found]\n" EACH(TILE_BACK) "tilerelease\n"
        : [found] "=m"(found) : [at] "r"(out), [row] "r"(64L) : "memory");
    return is_right && !memcmp(in, out, sizeof in) && !memcmp(&config, &found, sizeof found);
}
#else
static int has_tiles(void) { return 0; }
static int keeps_tiles(void) { return 1; }
#endif

static int (*const what[])(void) = { sleeps, polls, waits, reads, writes, computes, maps, keeps_tiles };
static const char *const names[] = { "sleeps", "polls", "waits", "reads", "writes", "computes", "maps", "keeps_tiles" };

static void *run(void *argument)
{
    struct counts *mine = argument;
    sigset_t blocked;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGRTMIN + (int)(mine - all)); /* a mask of its own */
    pthread_sigmask(SIG_BLOCK, &blocked, NULL);
    mine->thread = (int)syscall(SYS_gettid);
    for (;;) {
        mine->errors += !what[mine - all]();
        mine->rounds++;
    }
    return NULL;
}

int main(int count, char **words)
{
    mapped_bytes = count > 1 ? strtoul(words[1], NULL, 10) : 33 << 20;
    sigaction(SIGTRAP, &(struct sigaction){ .sa_handler = on_trap }, NULL);
    char *scratch = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (scratch == MAP_FAILED || pipe(numbers))
        return 1;
    for (size_t i = 0; i < sizeof what / sizeof *what - !has_tiles(); i++) {
        pthread_t thread;
        all[i].name = names[i];
        if (pthread_create(&thread, NULL, run, &all[i]))
            return 1;
        while (!all[i].thread)
            poll(NULL, 0, 1);
        number_of_threads++;
    }
    printf("scratch %lu", (unsigned long)scratch);
    for (int i = 0; i < number_of_threads; i++)
        printf(" %s %d", all[i].name, all[i].thread);
    char line[16];
    for (puts(""), fflush(stdout); fgets(line, sizeof line, stdin); printf("SIGTRAP %d 0\n", (int)traps), fflush(stdout))
        for (int i = 0; i < number_of_threads; i++)
            printf("%s %lu %lu ", all[i].name, all[i].rounds, all[i].errors);
    return 0;
}
