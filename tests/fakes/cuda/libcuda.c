/* A stand-in for NVIDIA's libcuda.so.1 where there is no GPU: the checkpoint calls and the little that a program needs.
 *
 * It answers as driver 580 was seen to (integration/gpu/results/driver-contract-580.json; a test compares them):
 * - a process is running, locked, checkpointed; any other order of calls is CUDA_ERROR_ILLEGAL_STATE;
 * - a thread of the process itself does the work, so that a call on a stopped process never returns;
 * - a checkpoint moves all device memory into one new private anonymous mapping and closes the device files, a
 *   restore moves it back to the same addresses; API calls wait while the process is not running.
 *
 * Device memory is a memfd that is mapped. The caller and that thread talk through a block in the process's memory
 * (process_vm_readv and _writev), which needs no file and so survives CRIU.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, ILLEGAL_STATE = 401,
       OPERATING_SYSTEM = 304, NOT_FOUND = 500, NOT_READY = 600 };
enum { RUNNING, LOCKED, CHECKPOINTED };
enum verb { GET_STATE, GET_THREAD, LOCK, CHECKPOINT, RESTORE, UNLOCK };

#define MAGIC 0x6f63696875646121ull
#define MAX_ALLOCATIONS 64
#define MAPPING_EXTRA (2u << 20) /* the real driver keeps more than the program's memory there, too */

/* How a caller in another process asks the thread below; `asked` differs from `answered` while it works. */
struct request {
    uint64_t magic; /* set by cuInit */
    uint32_t asked, answered;
    uint32_t verb, argument;
    int32_t result, value;
};
__attribute__((visibility("default"))) volatile struct request ocihook_fake_cuda_control;
#define control ocihook_fake_cuda_control

static struct { char *address; size_t size; int fd; } allocations[MAX_ALLOCATIONS];
static int state = RUNNING, calls_inside;
static char *saved; /* the mapping that holds device memory while checkpointed */
static size_t saved_size;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static void sleep_ms(long ms) { nanosleep(&(struct timespec){ .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000 }, NULL); }

/* --- in the process that is checkpointed */

static void enter(void)
{
    pthread_mutex_lock(&mutex);
    while (state != RUNNING)
        pthread_cond_wait(&changed, &mutex);
    calls_inside++;
    pthread_mutex_unlock(&mutex);
}

static void leave(void)
{
    pthread_mutex_lock(&mutex);
    calls_inside--;
    pthread_mutex_unlock(&mutex);
}

static int lock(uint32_t timeout_ms)
{
    if (state != RUNNING)
        return ILLEGAL_STATE;
    state = LOCKED;
    for (uint32_t waited = 0; calls_inside; waited++) {
        if (timeout_ms && waited >= timeout_ms) {
            state = RUNNING;
            pthread_cond_broadcast(&changed);
            return NOT_READY;
        }
        pthread_mutex_unlock(&mutex);
        sleep_ms(1);
        pthread_mutex_lock(&mutex);
    }
    return SUCCESS;
}

static int checkpoint(void)
{
    if (state != LOCKED)
        return ILLEGAL_STATE;
    saved_size = MAPPING_EXTRA;
    for (int i = 0; i < MAX_ALLOCATIONS; i++)
        saved_size += allocations[i].size;
    saved = mmap(NULL, saved_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (saved == MAP_FAILED)
        return OUT_OF_MEMORY;
    size_t at = 0;
    for (int i = 0; i < MAX_ALLOCATIONS; at += allocations[i++].size)
        if (allocations[i].size) {
            memcpy(saved + at, allocations[i].address, allocations[i].size);
            /* the addresses stay taken, the memory and its file go */
            mmap(allocations[i].address, allocations[i].size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
            close(allocations[i].fd);
        }
    state = CHECKPOINTED;
    return SUCCESS;
}

static int device_file(size_t size)
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
    size_t at = 0;
    for (int i = 0; i < MAX_ALLOCATIONS; at += allocations[i++].size)
        if (allocations[i].size) {
            allocations[i].fd = device_file(allocations[i].size);
            if (allocations[i].fd < 0)
                return OUT_OF_MEMORY;
            mmap(allocations[i].address, allocations[i].size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, allocations[i].fd, 0);
            memcpy(allocations[i].address, saved + at, allocations[i].size);
        }
    munmap(saved, saved_size);
    saved = NULL;
    state = LOCKED;
    return SUCCESS;
}

static int unlock(void)
{
    if (state != LOCKED)
        return ILLEGAL_STATE;
    state = RUNNING;
    pthread_cond_broadcast(&changed);
    return SUCCESS;
}

static void *serve(void *unused)
{
    (void)unused;
    for (;; sleep_ms(1)) {
        uint32_t asked = __atomic_load_n(&control.asked, __ATOMIC_ACQUIRE);
        if (asked == control.answered)
            continue;
        pthread_mutex_lock(&mutex);
        int result = SUCCESS;
        switch (control.verb) {
        case GET_STATE: control.value = state; break;
        case GET_THREAD: control.value = (int32_t)syscall(SYS_gettid); break;
        case LOCK: result = lock(control.argument); break;
        case CHECKPOINT: result = checkpoint(); break;
        case RESTORE: result = restore(); break;
        case UNLOCK: result = unlock(); break;
        }
        pthread_mutex_unlock(&mutex);
        control.result = result;
        __atomic_store_n(&control.answered, asked, __ATOMIC_RELEASE);
    }
    return NULL;
}

int cuInit(unsigned flags)
{
    (void)flags;
    pthread_mutex_lock(&mutex);
    pthread_t thread;
    if (!control.magic && !pthread_create(&thread, NULL, serve, NULL))
        control.magic = MAGIC;
    pthread_mutex_unlock(&mutex);
    return control.magic ? SUCCESS : OUT_OF_MEMORY;
}

int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)&control; return device ? INVALID_VALUE : SUCCESS; }
int cuCtxSetCurrent(void *context) { (void)context; return SUCCESS; }
int cuCtxSynchronize(void) { enter(); leave(); return SUCCESS; }

int cuMemAlloc_v2(uint64_t *pointer, size_t size)
{
    enter();
    int result = OUT_OF_MEMORY;
    for (int i = 0; i < MAX_ALLOCATIONS && size; i++)
        if (!allocations[i].size) {
            int fd = device_file(size);
            char *address = fd < 0 ? MAP_FAILED : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            if (address != MAP_FAILED) {
                allocations[i].address = address, allocations[i].size = size, allocations[i].fd = fd;
                *pointer = (uint64_t)(uintptr_t)address;
                result = SUCCESS;
            }
            break;
        }
    leave();
    return result;
}

int cuMemFree_v2(uint64_t pointer)
{
    enter();
    int result = INVALID_VALUE;
    for (int i = 0; i < MAX_ALLOCATIONS; i++)
        if (allocations[i].size && (uint64_t)(uintptr_t)allocations[i].address == pointer) {
            munmap(allocations[i].address, allocations[i].size);
            close(allocations[i].fd);
            allocations[i].size = 0;
            result = SUCCESS;
        }
    leave();
    return result;
}

int cuMemsetD8_v2(uint64_t to, unsigned char byte, size_t size) { enter(); memset((void *)(uintptr_t)to, byte, size); leave(); return SUCCESS; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) { enter(); memcpy(to, (void *)(uintptr_t)from, size); leave(); return SUCCESS; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) { enter(); memcpy((void *)(uintptr_t)to, from, size); leave(); return SUCCESS; }

/* --- in the process that calls */

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

static int ask(int pid, enum verb verb, uint32_t argument, int32_t *value)
{
    int error;
    struct request theirs;
    uint64_t address = find_control(pid, &error);
    if (!address)
        return error;
    if (transfer(pid, address, &theirs, sizeof theirs, 0))
        return OPERATING_SYSTEM;
    if (theirs.magic != MAGIC)
        return NOT_INITIALIZED;
    theirs.verb = verb, theirs.argument = argument;
    if (transfer(pid, address + offsetof(struct request, verb), &theirs.verb, 2 * sizeof(uint32_t), 1))
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

int cuCheckpointProcessGetState(int pid, int *value) { return ask(pid, GET_STATE, 0, value); }
int cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) { return ask(pid, GET_THREAD, 0, tid); }
int cuCheckpointProcessLock(int pid, const uint32_t *arguments) { return ask(pid, LOCK, arguments ? arguments[0] : 0, NULL); }
int cuCheckpointProcessCheckpoint(int pid, const void *arguments) { (void)arguments; return ask(pid, CHECKPOINT, 0, NULL); }
int cuCheckpointProcessRestore(int pid, const void *arguments) { (void)arguments; return ask(pid, RESTORE, 0, NULL); }
int cuCheckpointProcessUnlock(int pid, const void *arguments) { (void)arguments; return ask(pid, UNLOCK, 0, NULL); }

/* --- what any caller needs */

int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? INVALID_VALUE : SUCCESS; }

int cuGetErrorName(int code, const char **name)
{
    static const struct { int code; const char *name; } names[] = {
        { SUCCESS, "CUDA_SUCCESS" }, { INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE" },
        { OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY" }, { NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED" },
        { OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM" }, { ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE" },
        { NOT_FOUND, "CUDA_ERROR_NOT_FOUND" }, { NOT_READY, "CUDA_ERROR_NOT_READY" },
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
