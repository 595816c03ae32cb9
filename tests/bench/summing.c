/* A process at work on all its memory, which knows when it stood still.
 *
 * summing FILE MIB 4k|huge CONTROL
 *
 * It holds the content of FILE, again and again. Each step sums the next MiB of its memory and writes a word to some
 * pages of a tenth of it, so that in each pass every page is read and those of that tenth are written. CONTROL is a file
 * that it maps, with four words: steps done; the longest time from one to the next in ns, which others set to 0; the
 * address of the memory; and, set by others, whether it is to have its huge pages back, which it then sets to 0.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* asm-generic/mman-common.h, since Linux 6.1 */
#endif

enum { PAGE = 4096, STEP = 1 << 20, HUGE_PAGE = 2 << 20, A_TENTH = STEP / PAGE / 10 };

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int main(int argc, char **argv)
{
    if (argc != 5 || prctl(PR_SET_PDEATHSIG, SIGKILL))
        return 2;
    int file = open(argv[1], O_RDONLY), control_file = open(argv[4], O_RDWR);
    size_t size = (size_t)atoi(argv[2]) << 20, content = (size_t)lseek(file, 0, SEEK_END);
    volatile uint64_t *control = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, control_file, 0);
    char *mapped = mmap(NULL, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (file < 0 || content == 0 || control == MAP_FAILED || mapped == MAP_FAILED)
        return 3;
    char *memory = (char *)(((uintptr_t)mapped + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    if (madvise(memory, size, strcmp(argv[3], "huge") ? MADV_NOHUGEPAGE : MADV_HUGEPAGE))
        return 4;
    for (size_t at = 0; at < size;) {
        size_t offset = at % content, left = size - at < content - offset ? size - at : content - offset;
        ssize_t got = pread(file, memory + at, left, (off_t)offset);
        if (got <= 0)
            return 5;
        at += (size_t)got;
    }
    control[2] = (uint64_t)(uintptr_t)memory;
    size_t steps = size / STEP;
    uint64_t last = now_ns(), sum = 0;
    for (uint64_t step = 0;; step++) {
        const uint64_t *words = (const uint64_t *)(memory + step % steps * STEP);
        for (size_t i = 0; i < STEP / sizeof *words; i++)
            sum += words[i];
        for (size_t page = step % steps * A_TENTH, end = page + A_TENTH; page < end; page++)
            *(volatile uint64_t *)(memory + page * PAGE) = sum;
        if (control[3]) {
            if (!strcmp(argv[3], "huge") && madvise(memory, size, MADV_COLLAPSE))
                return 6;
            control[3] = 0;
        }
        uint64_t now = now_ns();
        if (now - last > control[1])
            control[1] = now - last;
        last = now;
        control[0] = step + 1;
    }
}
