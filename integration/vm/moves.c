/* The container of the test of pre-copy: it maps, unmaps, merges and rewrites memory all the time, and knows what is in it.
 *
 * moves [mremap]  prints `count N checksum right`, or `torn` where any page is not what it was filled with; with `mremap`
 *                 it moves memory, too, by whole page tables and by pages.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define PAGE 4096
#define SLOTS 12
#define SLOT (2 * MIB)     /* what a page table maps */
#define STILL (56 * MIB)
#define BASE ((char *)0x200000000000)

static uint64_t filled[SLOTS]; /* with what; each page has that, and its number in the slot */
static uint64_t seed = 88172645463325252u, next_fill;

static uint64_t chance(uint64_t most)
{
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return seed % most;
}

static char *slot(int n) { return BASE + (size_t)n * SLOT; }

static void map(char *place, size_t bytes)
{
    mmap(place, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    madvise(place, bytes, MADV_NOHUGEPAGE);
}

static void write_page(int n, size_t at)
{
    uint64_t *words = (uint64_t *)(slot(n) + at);
    words[0] = words[PAGE / 8 - 1] = filled[n] << 20 | at / PAGE;
}

static void fill(int n)
{
    filled[n] = ++next_fill;
    for (size_t at = 0; at < SLOT; at += PAGE)
        write_page(n, at);
}

static int is_right(void)
{
    for (int n = 0; n < SLOTS; n++)
        for (size_t at = 0; at < SLOT; at += PAGE) {
            uint64_t *words = (uint64_t *)(slot(n) + at), right = filled[n] << 20 | at / PAGE;
            if (words[0] != right || words[PAGE / 8 - 1] != right)
                return 0;
        }
    for (size_t at = 0; at < STILL; at += PAGE)
        if (*(uint64_t *)(slot(2 * SLOTS) + at) != at)
            return 0;
    return 1;
}

static void move(int n, int m) /* exchange two slots by way of a free place; the pages of one need not be a whole table */
{
    char *free_place = slot(SLOTS + 2) + chance(2) * PAGE;
    const int how = MREMAP_MAYMOVE | MREMAP_FIXED;
    uint64_t was = filled[n];
    mremap(slot(n), SLOT, SLOT, how, free_place);
    mremap(slot(m), SLOT, SLOT, how, slot(n));
    mremap(free_place, SLOT, SLOT, how, slot(m));
    filled[n] = filled[m], filled[m] = was;
}

int main(int argc, char **argv)
{
    const int moves = argc > 1 && !strcmp(argv[1], "mremap");
    map(slot(0), SLOTS * SLOT);
    map(slot(2 * SLOTS), STILL);
    for (size_t at = 0; at < STILL; at += PAGE)
        *(uint64_t *)(slot(2 * SLOTS) + at) = at;
    for (int n = 0; n < SLOTS; n++)
        fill(n);
    for (unsigned count = 1;; count++) {
        for (int i = 0; i < 4; i++) {
            int n = (int)chance(SLOTS), m = (int)chance(SLOTS);
            switch (chance(moves ? 6 : 4)) {
            case 0: /* another mapping at the same place, which is merged with its neighbours */
                munmap(slot(n), SLOT), map(slot(n), SLOT), fill(n);
                break;
            case 1: /* split, written to through nothing, merged again */
                mprotect(slot(n) + SLOT / 2, SLOT / 2, PROT_READ);
                mprotect(slot(n) + SLOT / 2, SLOT / 2, PROT_READ | PROT_WRITE);
                break;
            case 2:
                madvise(slot(n) + SLOT / 4, SLOT / 2, MADV_DONTNEED), fill(n);
                break;
            case 3:
                fill(n);
                break;
            default:
                if (n != m)
                    move(n, m);
            }
            usleep(5000);
        }
        printf("count %u checksum %s\n", count, is_right() ? "right" : "torn");
        fflush(stdout);
    }
}
