/* A stand-in for NVIDIA's libcuda.so.1 and libnvidia-ml.so.1 where there is no GPU: the checkpoint calls, the little that
 * a program needs, and what NVML tells of the GPUs.
 *
 * It answers as driver 580 was seen to (integration/gpu/results/driver-contract-580.json, driver-limits-580.json,
 *   probes-580.json; tests compare them):
 * - a process is running, locked, checkpointed; any other order of calls is CUDA_ERROR_ILLEGAL_STATE;
 * - one thread of the process itself does the work: a call on a stopped process never returns, one on a process whose
 *   other threads are stopped does. Which thread that is can be asked at any time, as CRIU's CUDA plugin does;
 * - a checkpoint moves all device memory into one new private anonymous mapping and closes the device files, a restore
 *   moves it back to the same addresses; API calls wait while the process is not running;
 * - /dev/nvidia-uvm is mapped once by the driver, at a low address; each piece of managed memory is another mapping of
 *   it, in full size (only where there is /dev/nvidia0, and nvidia-uvm is no device: in a container of the tests);
 * - memory given back to a pool that does not keep it, while others work: the checkpoint is NOT_SUPPORTED, then UNKNOWN;
 * - managed memory: the checkpoint is NOT_SUPPORTED. P2P: it succeeds, and the restore is NOT_SUPPORTED for ever;
 * - no memory for the mapping: OUT_OF_MEMORY, then UNKNOWN, and it can be unlocked. No memory on the GPU for a restore:
 *   OUT_OF_MEMORY, then OPERATING_SYSTEM: the process is lost;
 * - a GPU map must name every GPU that the process has open;
 * - cuEventQuery waits for nothing, and ends a process that is checkpointed;
 * - NVML counts whole pages of 2 MiB: each piece above 1 MiB has its own, smaller ones share them. So does the mapping
 *   of a checkpoint, except that pieces above 2 MiB are there as they are (integration/gpu/results/odd-sizes-580.json).
 *
 * Device memory is a memfd that is mapped. The caller and that thread talk through a block in the process's memory
 * (process_vm_readv and _writev), which needs no file and so survives CRIU. A GPU is known by the minor of its device
 * file /dev/nvidiaN, which is a node that exists everywhere: /dev/null is minor 3, /dev/zero 5, /dev/full 7.
 *
 * /run/ocihook-fake-cuda (or the file that OCIHOOK_FAKE_CUDA names), read by whoever calls the driver, is what a test wants to go wrong: lines `verb result [delay
 * in ms]` (result -1: do it; one that fails does nothing; the delay ends with the line), `gpus MINOR...`, `total BYTES` of each GPU, `taken BYTES`
 * by somebody unknown, `running BYTES`, which NVML says that each process holds before it is locked, `driver VERSION`,
 * `mps`, `mig`.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, ILLEGAL_STATE = 401, OPERATING_SYSTEM = 304,
       NOT_FOUND = 500, NOT_READY = 600, NOT_SUPPORTED = 801, UNKNOWN = 999 };
enum { RUNNING, LOCKED, CHECKPOINTED };
enum verb { GET_STATE, GET_THREAD, LOCK, CHECKPOINT, RESTORE, UNLOCK };
static const char *const verbs[] = { "state", "thread", "lock", "checkpoint", "restore", "unlock" };

#define SCRIPT "/run/ocihook-fake-cuda"
#define MAGIC 0x6f63696875646132ull
#define MAX_ALLOCATIONS 64
#define MAX_GPUS 4
#define UVM "/dev/nvidia-uvm"
#define OWN_UVM ((char *)0x204a00000)
#define OWN_UVM_SIZE (2u << 20)
#define PAGE_OF_GPU (2ul << 20)
#define MAPPING_EXTRA (2u << 20) /* the real driver keeps more than the program's memory there, too */

/* How a caller in another process asks the thread below; `asked` differs from `answered` while it works. */
struct request {
    uint64_t magic; /* set by cuInit */
    uint32_t asked, answered;
    uint32_t verb, argument;
    uint32_t has_room, pairs, old_minors[MAX_GPUS], new_minors[MAX_GPUS];
    int32_t result, value, thread;
    uint32_t gpus, minors[MAX_GPUS]; /* that it has open */
    uint32_t is_running;
    uint64_t held[MAX_GPUS];         /* bytes on each of them, as NVML counts them; 0 while checkpointed */
    uint64_t saved[MAX_GPUS];        /* bytes that a restore will take, likewise */
};
__attribute__((visibility("default"))) volatile struct request ocihook_fake_cuda_control;
#define control ocihook_fake_cuda_control

static struct { char *address; size_t size; int fd, gpu; } allocations[MAX_ALLOCATIONS];
static int state = RUNNING, calls_inside;
static int is_managed, is_p2p, is_broken, is_lost;
static uint64_t pool_threshold; /* bytes that the pool keeps */
static volatile int64_t released_ms; /* when the pool gave memory back to the driver; 0: never */
static int is_releasing;             /* a lock came in the middle of that */
static int device_files[2 * MAX_GPUS + 2], files;
static __thread int current_gpu;
static char *own_uvm = MAP_FAILED;
static volatile char *events; /* memory that the device writes to: mapped while there is a device */
static char *saved; /* the mapping that holds device memory while checkpointed */
static size_t saved_size;
static pthread_mutex_t allocating = PTHREAD_MUTEX_INITIALIZER; /* never taken by the thread that serves */

#define RELEASE_MS 10000 /* so that a lock that comes while threads allocate and free always does */

static uint64_t whole_pages(uint64_t size) { return (size + PAGE_OF_GPU - 1) & ~(PAGE_OF_GPU - 1); }

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void sleep_ms(long ms) { nanosleep(&(struct timespec){ .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000 }, NULL); }

/* --- in the process that is checkpointed */

/* No lock is held here: threads may be stopped anywhere while the one that serves works. */
static void enter(void)
{
    for (;; sleep_ms(1)) {
        __atomic_add_fetch(&calls_inside, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&state, __ATOMIC_SEQ_CST) == RUNNING)
            return;
        __atomic_sub_fetch(&calls_inside, 1, __ATOMIC_SEQ_CST);
    }
}

static void leave(void) { __atomic_sub_fetch(&calls_inside, 1, __ATOMIC_SEQ_CST); }

static int lock(uint32_t timeout_ms)
{
    if (state != RUNNING)
        return ILLEGAL_STATE;
    __atomic_store_n(&state, LOCKED, __ATOMIC_SEQ_CST);
    control.is_running = 0;
    is_releasing = released_ms && now_ms() - released_ms < RELEASE_MS;
    for (uint32_t waited = 0; __atomic_load_n(&calls_inside, __ATOMIC_SEQ_CST); waited++, sleep_ms(1))
        if (timeout_ms && waited >= timeout_ms) {
            control.is_running = 1;
            __atomic_store_n(&state, RUNNING, __ATOMIC_SEQ_CST);
            return NOT_READY;
        }
    return SUCCESS;
}

static void close_devices(void)
{
    while (files)
        close(device_files[--files]);
}

/* Open /dev/nvidiactl and every GPU there is in /dev, or those with the minors that are known already. */
static int open_devices(void)
{
    int known = (int)control.gpus, found = 0;
    int fd = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
    if (fd >= 0)
        device_files[files++] = fd;
    for (int n = 0; n < 2 * MAX_GPUS && found < MAX_GPUS; n++) {
        char path[32];
        struct stat status;
        snprintf(path, sizeof path, "/dev/nvidia%d", n);
        if (stat(path, &status))
            continue;
        int is_wanted = !known;
        for (int i = 0; i < known; i++)
            is_wanted |= control.minors[i] == minor(status.st_rdev);
        if (!is_wanted || (fd = open(path, O_RDWR | O_CLOEXEC)) < 0)
            continue;
        device_files[files++] = fd;
        if (!known)
            control.minors[found] = minor(status.st_rdev);
        found++;
    }
    if (!known && !found) { /* outside containers: a GPU without a device file */
        control.minors[0] = 3;
        control.gpus = 1;
    } else if (!known)
        control.gpus = (uint32_t)found;
    return found >= known || (known == 1 && control.minors[0] == 3 && access("/dev/nvidia0", F_OK)) ? SUCCESS : NOT_SUPPORTED;
}

/* Map the file that stands for nvidia-uvm; MAP_FAILED where there is none. */
static char *map_uvm(void *address, size_t size)
{
    struct stat status;
    int fd = access("/dev/nvidia0", F_OK) ? -1 : open(UVM, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    char *mapped = MAP_FAILED;
    if (fd >= 0 && !fstat(fd, &status) && S_ISREG(status.st_mode) &&
        (status.st_size >= (off_t)size || !ftruncate(fd, (off_t)size)))
        mapped = mmap(address, size, PROT_READ | PROT_WRITE, MAP_SHARED | (address ? MAP_FIXED_NOREPLACE : 0), fd, 0);
    if (fd >= 0)
        close(fd);
    return mapped;
}

static int checkpoint(void)
{
    if (state != LOCKED)
        return ILLEGAL_STATE;
    if (is_managed)
        return NOT_SUPPORTED;
    if (is_broken)
        return UNKNOWN;
    if (is_releasing) {
        is_broken = 1;
        return NOT_SUPPORTED;
    }
    saved_size = MAPPING_EXTRA;
    uint64_t small = 0;
    for (int i = 0; i < MAX_ALLOCATIONS; i++)
        if (allocations[i].size <= PAGE_OF_GPU / 2)
            small += allocations[i].size;
        else
            saved_size += allocations[i].size < PAGE_OF_GPU ? PAGE_OF_GPU : allocations[i].size;
    saved_size = (saved_size + whole_pages(small) + 4095) & ~4095ul;
    saved = mmap(NULL, saved_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (saved == MAP_FAILED) {
        is_broken = 1;
        return OUT_OF_MEMORY;
    }
    size_t at = 0;
    for (int i = 0; i < MAX_ALLOCATIONS; at += allocations[i++].size)
        if (allocations[i].size) {
            memcpy(saved + at, allocations[i].address, allocations[i].size);
            /* the addresses stay taken, the memory and its file go */
            mmap(allocations[i].address, allocations[i].size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
            close(allocations[i].fd);
        }
    mmap((void *)events, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    close_devices();
    if (own_uvm != MAP_FAILED)
        munmap(own_uvm, OWN_UVM_SIZE);
    for (int i = 0; i < MAX_GPUS; i++)
        control.saved[i] = control.held[i], control.held[i] = 0;
    state = CHECKPOINTED;
    return SUCCESS;
}

static int device_memory(size_t size)
{
    int fd = memfd_create("nvidia-fake", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)size)) {
        close(fd);
        return -1;
    }
    return fd;
}

static int restore(void)
{
    if (state != CHECKPOINTED)
        return ILLEGAL_STATE;
    if (is_lost)
        return OPERATING_SYSTEM;
    if (is_p2p)
        return NOT_SUPPORTED;
    if (control.pairs) {
        uint32_t minors[MAX_GPUS], named = 0;
        for (uint32_t i = 0; i < control.gpus; i++)
            for (uint32_t pair = 0; pair < control.pairs; pair++)
                if (control.old_minors[pair] == control.minors[i])
                    minors[i] = control.new_minors[pair], named++;
        if (named != control.gpus || control.pairs != control.gpus)
            return INVALID_VALUE;
        for (uint32_t i = 0; i < control.gpus; i++)
            control.minors[i] = minors[i];
    }
    if (!control.has_room) { /* final */
        is_lost = 1;
        return OUT_OF_MEMORY;
    }
    if (open_devices()) {
        close_devices();
        return NOT_SUPPORTED;
    }
    size_t at = 0;
    for (int i = 0; i < MAX_ALLOCATIONS; at += allocations[i++].size)
        if (allocations[i].size) {
            allocations[i].fd = device_memory(allocations[i].size);
            if (allocations[i].fd < 0)
                return OUT_OF_MEMORY;
            mmap(allocations[i].address, allocations[i].size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, allocations[i].fd, 0);
            memcpy(allocations[i].address, saved + at, allocations[i].size);
        }
    mmap((void *)events, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    munmap(saved, saved_size);
    saved = NULL;
    own_uvm = map_uvm(OWN_UVM, OWN_UVM_SIZE);
    for (int i = 0; i < MAX_GPUS; i++)
        control.held[i] = control.saved[i];
    state = LOCKED;
    return SUCCESS;
}

static int unlock(void)
{
    if (state != LOCKED)
        return ILLEGAL_STATE;
    control.is_running = 1;
    __atomic_store_n(&state, RUNNING, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

static void *serve(void *unused)
{
    (void)unused;
    control.thread = (int32_t)syscall(SYS_gettid);
    for (;; sleep_ms(1)) {
        uint32_t asked = __atomic_load_n(&control.asked, __ATOMIC_ACQUIRE);
        if (asked == control.answered)
            continue;
        int result = SUCCESS;
        switch (control.verb) {
        case GET_STATE: control.value = state; break;
        case LOCK: result = lock(control.argument); break;
        case CHECKPOINT: result = checkpoint(); break;
        case RESTORE: result = restore(); break;
        case UNLOCK: result = unlock(); break;
        }
        control.result = result;
        __atomic_store_n(&control.answered, asked, __ATOMIC_RELEASE);
    }
    return NULL;
}

/* A fork has the memory and the device files, but not the thread: for the driver it has nothing to do with CUDA. */
static void forget(void) { control.magic = 0, control.thread = 0; }

int cuInit(unsigned flags)
{
    (void)flags;
    pthread_mutex_lock(&allocating);
    pthread_t thread;
    if (own_uvm == MAP_FAILED)
        own_uvm = map_uvm(OWN_UVM, OWN_UVM_SIZE);
    if (!events)
        events = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!control.magic && !open_devices() && !pthread_create(&thread, NULL, serve, NULL)) {
        pthread_atfork(NULL, NULL, forget);
        while (!control.thread)
            sleep_ms(1);
        control.is_running = 1;
        control.magic = MAGIC;
    }
    pthread_mutex_unlock(&allocating);
    return control.magic ? SUCCESS : OUT_OF_MEMORY;
}

int cuDeviceGetCount(int *count) { *count = control.gpus ? (int)control.gpus : 1; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { int n; cuDeviceGetCount(&n); *device = ordinal; return ordinal < n ? SUCCESS : INVALID_VALUE; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (char *)&allocations + device; return SUCCESS; }
int cuCtxSetCurrent(void *context) { current_gpu = (int)((char *)context - (char *)&allocations); return SUCCESS; }
int cuCtxSynchronize(void) { enter(); leave(); return SUCCESS; }
int cuEventCreate(void **event, unsigned flags) { (void)flags; *event = (void *)events; return SUCCESS; }
int cuEventRecord(void *event, void *stream) { (void)event, (void)stream; enter(); leave(); return SUCCESS; }
int cuEventQuery(void *event) { (void)event; return events[0]; }
/* What no real program calls: a kernel that runs until a lock has waited for so long, memory of a neighbour that is mapped. */
int ocihook_fake_cuda_kernel(int ms)
{
    enter();
    while (__atomic_load_n(&state, __ATOMIC_SEQ_CST) == RUNNING)
        sleep_ms(1);
    sleep_ms(ms);
    leave();
    return SUCCESS;
}
int ocihook_fake_cuda_use_p2p(void) { is_p2p = 1; return SUCCESS; }

/* Count anew what is held on a GPU. */
static void count_held(int gpu)
{
    uint64_t large = 0, small = 0;
    for (int i = 0; i < MAX_ALLOCATIONS; i++)
        if (allocations[i].size && allocations[i].gpu == gpu) {
            if (allocations[i].size > PAGE_OF_GPU / 2)
                large += whole_pages(allocations[i].size);
            else
                small += allocations[i].size;
        }
    control.held[gpu] = large + whole_pages(small);
}

int cuMemAlloc_v2(uint64_t *pointer, size_t size)
{
    enter();
    pthread_mutex_lock(&allocating);
    int result = OUT_OF_MEMORY;
    for (int i = 0; i < MAX_ALLOCATIONS && size; i++)
        if (!allocations[i].size) {
            int fd = device_memory(size);
            char *address = fd < 0 ? MAP_FAILED : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            if (address != MAP_FAILED) {
                allocations[i].address = address, allocations[i].size = size, allocations[i].fd = fd;
                allocations[i].gpu = current_gpu;
                count_held(current_gpu);
                *pointer = (uint64_t)(uintptr_t)address;
                result = SUCCESS;
            }
            break;
        }
    pthread_mutex_unlock(&allocating);
    leave();
    return result;
}

int cuMemAllocManaged(uint64_t *pointer, size_t size, unsigned flags)
{
    (void)flags;
    is_managed = 1;
    map_uvm(NULL, size); /* beside the memory, which is as any other here */
    return cuMemAlloc_v2(pointer, size);
}

int cuMemFree_v2(uint64_t pointer)
{
    enter();
    pthread_mutex_lock(&allocating);
    int result = INVALID_VALUE;
    for (int i = 0; i < MAX_ALLOCATIONS; i++)
        if (allocations[i].size && (uint64_t)(uintptr_t)allocations[i].address == pointer) {
            munmap(allocations[i].address, allocations[i].size);
            close(allocations[i].fd);
            allocations[i].size = 0;
            count_held(allocations[i].gpu);
            result = SUCCESS;
        }
    pthread_mutex_unlock(&allocating);
    leave();
    return result;
}

/* One pool, which keeps nothing unless it is told to. */
int cuDeviceGetDefaultMemPool(void **pool, int device) { (void)device; *pool = &pool_threshold; return SUCCESS; }
int cuMemPoolSetAttribute(void *pool, int attribute, const uint64_t *value)
{
    (void)pool;
    if (attribute == 4) /* CU_MEMPOOL_ATTR_RELEASE_THRESHOLD */
        pool_threshold = *value;
    return SUCCESS;
}

int cuMemAllocAsync(uint64_t *pointer, size_t size, void *stream) { (void)stream; return cuMemAlloc_v2(pointer, size); }

int cuMemFreeAsync(uint64_t pointer, void *stream)
{
    (void)stream;
    if (!pool_threshold)
        released_ms = now_ms();
    return cuMemFree_v2(pointer);
}

int cuMemsetD8_v2(uint64_t to, unsigned char byte, size_t size) { enter(); memset((void *)(uintptr_t)to, byte, size); leave(); return SUCCESS; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) { enter(); memcpy(to, (void *)(uintptr_t)from, size); leave(); return SUCCESS; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) { enter(); memcpy((void *)(uintptr_t)to, from, size); leave(); return SUCCESS; }

/* --- in the process that calls */

/* Find a line of the script that begins with a word; return what follows the word. */
static int scripted(const char *word, char *rest, size_t size)
{
    char line[256];
    const char *path = getenv("OCIHOOK_FAKE_CUDA");
    FILE *script = fopen(path ? path : SCRIPT, "re");
    int found = 0;
    while (script && !found && fgets(line, sizeof line, script))
        if (!strncmp(line, word, strlen(word)) && strchr(" \n", line[strlen(word)])) {
            snprintf(rest, size, "%s", line + strlen(word));
            found = 1;
        }
    if (script)
        fclose(script);
    return found;
}

static uint64_t scripted_number(const char *word, uint64_t otherwise)
{
    char rest[256];
    return scripted(word, rest, sizeof rest) ? strtoull(rest, NULL, 10) : otherwise;
}

/* Return where the process has its `control`, 0 if it has not loaded this library; `error` if there is no process. */
static uint64_t find_control(int pid, int *error)
{
    char path[64], line[4096];
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *maps = fopen(path, "re");
    *error = maps ? NOT_INITIALIZED : OPERATING_SYSTEM;
    if (!maps)
        return 0;
    Dl_info here;
    dladdr((void *)&control, &here);
    uint64_t found = 0, start, offset;
    while (!found && fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%*x %*s %lx", &start, &offset) == 2 && !offset && strstr(line, "/libcuda.so"))
            found = start + ((uint64_t)(uintptr_t)&control - (uint64_t)(uintptr_t)here.dli_fbase);
    fclose(maps);
    return found;
}

static int transfer(int pid, uint64_t remote, void *local, size_t size, int is_write)
{
    struct iovec ours = { local, size }, theirs = { (void *)(uintptr_t)remote, size };
    ssize_t done = is_write ? process_vm_writev(pid, &ours, 1, &theirs, 1, 0) : process_vm_readv(pid, &ours, 1, &theirs, 1, 0);
    return done == (ssize_t)size ? 0 : -1;
}

/* Return how much of a GPU's memory is held, by whom: `pids` and `bytes` have room for 64. */
static uint64_t held_on(uint32_t minor_number, uint32_t *pids, uint64_t *bytes, unsigned *count)
{
    uint64_t sum = 0;
    DIR *proc = opendir("/proc");
    struct dirent *entry;
    *count = 0;
    while (proc && (entry = readdir(proc))) {
        int pid = atoi(entry->d_name), error;
        uint64_t address = pid ? find_control(pid, &error) : 0;
        struct request theirs;
        if (!address || transfer(pid, address, &theirs, sizeof theirs, 0) || theirs.magic != MAGIC)
            continue;
        for (uint32_t i = 0; i < theirs.gpus; i++)
            if (theirs.minors[i] == minor_number && theirs.held[i] && *count < 64) {
                uint64_t held = theirs.is_running ? scripted_number("running", theirs.held[i]) : theirs.held[i];
                pids[*count] = (uint32_t)pid, bytes[(*count)++] = held;
                sum += held;
            }
    }
    if (proc)
        closedir(proc);
    return sum;
}

static uint64_t total_bytes(void) { return scripted_number("total", 16ull << 30); }

static uint64_t free_bytes(uint32_t minor_number)
{
    uint32_t pids[64];
    uint64_t bytes[64], used;
    unsigned count;
    used = held_on(minor_number, pids, bytes, &count) + scripted_number("taken", 0);
    return used < total_bytes() ? total_bytes() - used : 0;
}

struct uuid { unsigned char bytes[16]; };
struct pair { struct uuid old, new; };
struct restore_arguments { const struct pair *pairs; unsigned count; };

static int ask(int pid, enum verb verb, uint32_t argument, const struct restore_arguments *map, int32_t *value)
{
    int error, code = -1;
    char rest[256];
    struct request theirs;
    uint64_t address = find_control(pid, &error);
    if (!address)
        return error;
    if (transfer(pid, address, &theirs, sizeof theirs, 0))
        return OPERATING_SYSTEM;
    if (theirs.magic != MAGIC)
        return NOT_INITIALIZED;
    if (scripted(verbs[verb], rest, sizeof rest)) {
        int delay_ms = 0;
        sscanf(rest, "%d %d", &code, &delay_ms);
        for (; delay_ms > 0 && scripted(verbs[verb], rest, sizeof rest); delay_ms -= 5)
            sleep_ms(5);
    }
    if (code >= 0)
        return code;
    if (verb == GET_THREAD)
        return *value = theirs.thread, SUCCESS;
    /* what somebody asked for who was killed meanwhile is done first */
    for (; theirs.asked != theirs.answered; sleep_ms(1))
        if (transfer(pid, address, &theirs, sizeof theirs, 0))
            return OPERATING_SYSTEM;
    theirs.verb = verb, theirs.argument = argument;
    theirs.pairs = map ? map->count : 0;
    for (uint32_t i = 0; i < theirs.pairs && i < MAX_GPUS; i++) {
        theirs.old_minors[i] = map->pairs[i].old.bytes[15];
        theirs.new_minors[i] = map->pairs[i].new.bytes[15];
    }
    theirs.has_room = 1;
    for (uint32_t i = 0; verb == RESTORE && i < theirs.gpus; i++) {
        uint32_t target = theirs.minors[i];
        for (uint32_t pair = 0; pair < theirs.pairs; pair++)
            if (theirs.old_minors[pair] == target)
                target = theirs.new_minors[pair];
        theirs.has_room &= free_bytes(target) >= theirs.saved[i];
    }
    size_t from = offsetof(struct request, verb), to = offsetof(struct request, result);
    if (transfer(pid, address + from, (char *)&theirs + from, to - from, 1))
        return OPERATING_SYSTEM;
    uint32_t asked = theirs.answered + 1;
    if (transfer(pid, address + offsetof(struct request, asked), &asked, sizeof asked, 1))
        return OPERATING_SYSTEM;
    do {
        sleep_ms(1);
        if (transfer(pid, address, &theirs, sizeof theirs, 0))
            return OPERATING_SYSTEM;
    } while (theirs.answered != asked);
    if (value)
        *value = theirs.value;
    return theirs.result;
}

/* Return the caller's number for a thread that knows itself by another one, in a pid namespace of its own. */
static int translate(int pid, int inner)
{
    char path[64], line[256];
    int found = inner;
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    struct dirent *entry;
    while (tasks && (entry = readdir(tasks))) {
        snprintf(path, sizeof path, "/proc/%d/task/%.20s/status", pid, entry->d_name);
        FILE *status = fopen(path, "re");
        while (status && fgets(line, sizeof line, status))
            if (!strncmp(line, "NSpid:", 6) && atoi(strrchr(line, '\t') + 1) == inner)
                found = atoi(entry->d_name);
        if (status)
            fclose(status);
    }
    if (tasks)
        closedir(tasks);
    return found;
}

int cuCheckpointProcessGetState(int pid, int *value) { return ask(pid, GET_STATE, 0, NULL, value); }

int cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
    int result = ask(pid, GET_THREAD, 0, NULL, tid);
    if (result == SUCCESS)
        *tid = translate(pid, *tid);
    return result;
}

int cuCheckpointProcessLock(int pid, const uint32_t *arguments) { return ask(pid, LOCK, arguments ? arguments[0] : 0, NULL, NULL); }
int cuCheckpointProcessCheckpoint(int pid, const void *arguments) { (void)arguments; return ask(pid, CHECKPOINT, 0, NULL, NULL); }
int cuCheckpointProcessRestore(int pid, const struct restore_arguments *arguments) { return ask(pid, RESTORE, 0, arguments, NULL); }
int cuCheckpointProcessUnlock(int pid, const void *arguments) { (void)arguments; return ask(pid, UNLOCK, 0, NULL, NULL); }

/* --- what any caller needs */

int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }

int cuGetErrorName(int code, const char **name)
{
    static const struct { int code; const char *name; } names[] = {
        { SUCCESS, "CUDA_SUCCESS" }, { INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE" },
        { OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY" }, { NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED" },
        { OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM" }, { ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE" },
        { NOT_FOUND, "CUDA_ERROR_NOT_FOUND" }, { NOT_READY, "CUDA_ERROR_NOT_READY" },
        { NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED" }, { UNKNOWN, "CUDA_ERROR_UNKNOWN" },
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code)
            return *name = names[i].name, SUCCESS;
    return INVALID_VALUE;
}

/* cuda-bindings looks everything up through this; what is not here is not found. Status: CU_GET_PROC_ADDRESS_*. */
int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
    (void)version, (void)flags;
    static void *self;
    Dl_info here;
    if (!self && dladdr((void *)&control, &here))
        self = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", symbol);
    *function = dlsym(self, symbol);
    if (!*function)
        *function = dlsym(self, versioned);
    if (status)
        *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}

/* --- NVML, nvml.h. A device's handle is its minor, and one; that of its one MIG instance has a bit more. */

struct nvml_memory { unsigned version; unsigned long long total, reserved, free, used; };
struct nvml_process { unsigned pid; unsigned long long used; unsigned instance, compute_instance; };
enum { NVML_INVALID = 2, NVML_TOO_SMALL = 7 };

static unsigned node_gpus(unsigned *minors)
{
    char rest[256] = " 3 5";
    unsigned count = 0;
    scripted("gpus", rest, sizeof rest);
    for (char *word = strtok(rest, " \n"); word && count < MAX_GPUS; word = strtok(NULL, " \n"))
        minors[count++] = (unsigned)atoi(word);
    return count;
}

#define MIG 0x1000u
#define MINOR(device) (((unsigned)(uintptr_t)(device) & ~MIG) - 1)
#define IS_MIG(device) ((unsigned)(uintptr_t)(device) & MIG)
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code ? "an error of the stand-in" : "no error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { unsigned minors[MAX_GPUS]; *count = node_gpus(minors); return SUCCESS; }
int nvmlDeviceGetMinorNumber(void *device, unsigned *number) { *number = MINOR(device); return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    unsigned minors[MAX_GPUS], count = node_gpus(minors);
    if (index >= count)
        return NVML_INVALID;
    *device = (void *)(uintptr_t)(minors[index] + 1);
    return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    char rest[256] = " 580.159.04";
    scripted("driver", rest, sizeof rest);
    rest[strcspn(rest, "\n")] = 0;
    snprintf(version, length, "%s", rest + 1);
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length)
{
    snprintf(uuid, length, "%s-00000000-0000-0000-0000-0000000000%02x", IS_MIG(device) ? "MIG" : "GPU", MINOR(device));
    return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *name, unsigned length)
{
    snprintf(name, length, "%s%s", MINOR(device) == 7 ? "Another stand-in" : "Stand-in", IS_MIG(device) ? " MIG 1g.10gb" : "");
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, struct nvml_memory *memory)
{
    memory->total = total_bytes();
    memory->free = free_bytes(MINOR(device));
    memory->used = memory->total - memory->free;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *pending)
{
    char rest[8];
    (void)device;
    *now = *pending = (unsigned)scripted("mig", rest, sizeof rest);
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) { (void)device; *count = 2; return SUCCESS; }

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **instance)
{
    *instance = (void *)((uintptr_t)device | MIG);
    return index == 1 ? SUCCESS : 6; /* NVML_ERROR_NOT_FOUND */
}

static int processes(void *device, unsigned *count, struct nvml_process *infos)
{
    uint32_t pids[64];
    uint64_t bytes[64];
    unsigned found, room = *count;
    held_on(MINOR(device), pids, bytes, &found);
    *count = found;
    if (found > room)
        return NVML_TOO_SMALL;
    for (unsigned i = 0; i < found; i++)
        infos[i] = (struct nvml_process){ pids[i], bytes[i], ~0u, ~0u };
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct nvml_process *infos) { return processes(device, count, infos); }

int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned *count, struct nvml_process *infos)
{
    char rest[8];
    if (!scripted("mps", rest, sizeof rest)) {
        *count = 0;
        return SUCCESS;
    }
    return processes(device, count, infos);
}
