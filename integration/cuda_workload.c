/* The container of the GPU tests: holds memory on every GPU, counts there, and says a checksum of all of it.
 *
 * cuda_workload MIB [WORD]...   prints `count N checksum H` every 50 ms; one thread meanwhile maps, checks and unmaps
 *                               plain memory, and ends the program if it ever finds there what it did not write
 *   children=N   N more CUDA processes, which print `child K count N checksum H`
 *   managed      with managed memory
 *   fork         with a child that was forked after CUDA was initialised
 *   nccl         with a socket as NCCL has one for each communicator
 *   ghost=KIB    with a deleted file of so many KiB in /dev/shm, mapped, as NCCL has them
 *   renamed      with a deleted file in /dev/shm that has another name
 *   pool[=kept]  with a thread that allocates from a pool (cudaMallocAsync) and frees; the pool keeps the memory
 *   watch        with a thread that asks for an event again and again, as NCCL's watchdog does
 *   own-code     with its own copy of the first page of all code, as CRIU makes of one before it reads memory
 *   uffd, uring  with a descriptor that CRIU cannot dump
 *   p2p, busy=S  only with the stand-in for libcuda: memory of a neighbour; kernels that end S seconds after a lock is
 *                asked for
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define PIECE (1u << 20)
#define MAX_GPUS 16

int cuInit(unsigned), cuDeviceGetCount(int *), cuDeviceGet(int *, int), cuDevicePrimaryCtxRetain(void **, int),
    cuCtxSetCurrent(void *), cuMemAlloc_v2(uint64_t *, size_t), cuMemAllocManaged(uint64_t *, size_t, unsigned),
    cuMemcpyHtoD_v2(uint64_t, const void *, size_t), cuMemcpyDtoH_v2(void *, uint64_t, size_t), cuCtxSynchronize(void),
    cuDeviceGetDefaultMemPool(void **, int), cuMemPoolSetAttribute(void *, int, uint64_t *),
    cuMemAllocAsync(uint64_t *, size_t, void *), cuMemFreeAsync(uint64_t, void *),
    cuEventCreate(void **, unsigned), cuEventRecord(void *, void *), cuEventQuery(void *);

#define CHECK(call) do { int code_ = (call); if (code_) { printf("%s: %d\n", #call, code_); fflush(stdout); _exit(1); } } while (0)

static void call_stand_in(const char *name, int argument)
{
    int (*function)(int) = (int (*)(int))dlsym(RTLD_DEFAULT, name);
    if (function)
        function(argument);
}

static void *disturb(void *unused)
{
    (void)unused;
    for (uint64_t round = 1;; round++) {
        size_t words = PIECE;
        volatile uint64_t *memory = mmap(NULL, words * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (size_t i = 0; i < words; i += 512)
            memory[i] = round + i;
        usleep(3000);
        for (size_t i = 0; i < words; i += 512)
            if (memory[i] != round + i) {
                printf("plain memory is wrong\n");
                fflush(stdout);
                _exit(2);
            }
        munmap((void *)memory, words * 8);
    }
    return NULL;
}

static void map_ghost(size_t size)
{
    int fd = open("/dev/shm/ghost", O_RDWR | O_CREAT | O_EXCL, 0600);
    CHECK(fd < 0 || ftruncate(fd, (off_t)size) || unlink("/dev/shm/ghost"));
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(memory == MAP_FAILED || close(fd));
    memset(memory, 7, size);
}

static void keep_renamed(void)
{
    CHECK(open("/dev/shm/first", O_RDWR | O_CREAT | O_EXCL, 0600) < 0);
    CHECK(link("/dev/shm/first", "/dev/shm/second") || unlink("/dev/shm/first"));
}

static int kernel_s;

static void *kernels(void *unused)
{
    (void)unused;
    for (;; usleep(1000))
        call_stand_in("ocihook_fake_cuda_kernel", 1000 * kernel_s);
    return NULL;
}

static void *use_pool(void *context)
{
    CHECK(cuCtxSetCurrent(context));
    for (;; usleep(1000)) {
        uint64_t memory;
        CHECK(cuMemAllocAsync(&memory, PIECE, NULL));
        CHECK(cuMemFreeAsync(memory, NULL));
    }
    return NULL;
}

static void keep_in_pool(void)
{
    void *pool;
    CHECK(cuDeviceGetDefaultMemPool(&pool, 0));
    CHECK(cuMemPoolSetAttribute(pool, 4 /* release threshold */, &(uint64_t){ UINT64_MAX }));
}

static void *watch(void *context)
{
    void *event;
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuEventCreate(&event, 0));
    CHECK(cuEventRecord(event, NULL));
    for (;; usleep(200))
        cuEventQuery(event);
    return NULL;
}

static void fill(uint64_t *piece, uint64_t seed) /* by pages: 2 of 8 zero, 3 random, 3 repetitive */
{
    for (size_t i = 0; i < PIECE / 8; i++) {
        seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
        size_t kind = (i >> 9) & 7;
        piece[i] = kind < 2 ? 0 : kind < 5 ? seed : i & 0xfff;
    }
}

static void own_code(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512], mode[5];
    unsigned long start;
    while (maps && fgets(line, sizeof(line), maps))
        if (sscanf(line, "%lx-%*x %4s", &start, mode) == 2 && !strcmp(mode, "r-xp") && !strstr(line, "[")) {
            CHECK(mprotect((void *)start, 4096, PROT_READ | PROT_WRITE | PROT_EXEC));
            *(volatile char *)start = *(volatile char *)start;
            CHECK(mprotect((void *)start, 4096, PROT_READ | PROT_EXEC));
        }
    if (maps)
        fclose(maps);
}

int main(int argc, char **argv)
{
    size_t mib = argc > 1 ? (size_t)atoi(argv[1]) : 16;
    int is_managed = 0, is_forked = 0, child = 0, gpus;
    pthread_t thread;
    for (int i = 2; i < argc; i++) {
        is_managed |= !strcmp(argv[i], "managed"), is_forked |= !strcmp(argv[i], "fork");
        if (!strncmp(argv[i], "busy=", 5))
            kernel_s = atoi(argv[i] + 5);
        if (!strncmp(argv[i], "child=", 6))
            child = atoi(argv[i] + 6);
        if (!strncmp(argv[i], "ghost=", 6))
            map_ghost((size_t)atoi(argv[i] + 6) << 10);
        if (!strcmp(argv[i], "renamed"))
            keep_renamed();
        if (!strcmp(argv[i], "own-code"))
            own_code();
        if (!strcmp(argv[i], "uffd"))
            CHECK(syscall(SYS_userfaultfd, 1 /* user mode only */) < 0);
        if (!strcmp(argv[i], "uring"))
            CHECK(syscall(SYS_io_uring_setup, 4, (char[120]){ 0 }) < 0);
        if (!strcmp(argv[i], "nccl")) {
            struct sockaddr_un name = { .sun_family = AF_UNIX, .sun_path = "\0tmp/nccl-socket-0-1234567" };
            CHECK(bind(socket(AF_UNIX, SOCK_DGRAM, 0), (struct sockaddr *)&name, sizeof name));
        }
        if (!strncmp(argv[i], "children=", 9))
            for (int number = 1; number <= atoi(argv[i] + 9); number++) {
                char word[32];
                snprintf(word, sizeof word, "child=%d", number);
                if (!fork())
                    execl(argv[0], argv[0], argv[1], word, NULL);
            }
    }
    CHECK(cuInit(0));
    CHECK(cuDeviceGetCount(&gpus));
    uint64_t memory[MAX_GPUS], *piece = malloc(PIECE);
    void *contexts[MAX_GPUS];
    for (int gpu = 0; gpu < gpus; gpu++) {
        int device;
        CHECK(cuDeviceGet(&device, gpu));
        CHECK(cuDevicePrimaryCtxRetain(&contexts[gpu], device));
        CHECK(cuCtxSetCurrent(contexts[gpu]));
        CHECK(is_managed ? cuMemAllocManaged(&memory[gpu], mib * PIECE, 1) : cuMemAlloc_v2(&memory[gpu], mib * PIECE));
        for (size_t i = 0; i < mib; i++) {
            fill(piece, (uint64_t)(getpid() + 1) * 2654435761u + (uint64_t)gpu * 977 + i + 1);
            CHECK(cuMemcpyHtoD_v2(memory[gpu] + i * PIECE, piece, PIECE));
        }
    }
    uint64_t count = 0;
    CHECK(cuCtxSetCurrent(contexts[0]));
    CHECK(cuMemcpyHtoD_v2(memory[0], &count, sizeof count));
    for (int i = 2; i < argc; i++)
        if (!strcmp(argv[i], "p2p"))
            call_stand_in("ocihook_fake_cuda_use_p2p", 0);
    if (is_forked && !fork())
        for (;;)
            pause();
    CHECK(pthread_create(&thread, NULL, disturb, NULL));
    for (int i = 2; i < argc; i++)
        if (!strncmp(argv[i], "pool", 4)) {
            if (!strcmp(argv[i], "pool=kept"))
                keep_in_pool();
            CHECK(pthread_create(&thread, NULL, use_pool, contexts[0]));
        } else if (!strcmp(argv[i], "watch"))
            CHECK(pthread_create(&thread, NULL, watch, contexts[0]));
    if (kernel_s)
        CHECK(pthread_create(&thread, NULL, kernels, NULL));
    for (;; usleep(50000)) {
        uint64_t sum = 0;
        CHECK(cuCtxSetCurrent(contexts[0]));
        CHECK(cuMemcpyDtoH_v2(&count, memory[0], sizeof count));
        count++;
        CHECK(cuMemcpyHtoD_v2(memory[0], &count, sizeof count));
        for (int gpu = 0; gpu < gpus; gpu++) {
            CHECK(cuCtxSetCurrent(contexts[gpu]));
            for (size_t i = 0; i < mib; i++) {
                CHECK(cuMemcpyDtoH_v2(piece, memory[gpu] + i * PIECE, PIECE));
                for (size_t word = i || gpu ? 0 : 1; word < PIECE / 8; word++)
                    sum = sum * 0x100000001b3 + piece[word];
            }
        }
        if (child)
            printf("child %d ", child);
        printf("count %llu checksum %016llx\n", (unsigned long long)count, (unsigned long long)sum);
        fflush(stdout);
    }
}
