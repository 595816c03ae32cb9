/* The container of the table of states: `states NAME...` has a process for each name, which makes that state and then
 * checks again and again whether it still has it. The file /said has a line `NAME CHECKS ok|lost` of each. A process that
 * cannot make its state says `NAME 0 REASON`, and ends. `states pause` does nothing: a child runs it, or a command of `exec`.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <linux/aio_abi.h>
#include <linux/bpf.h>
#include <linux/capability.h>
#include <linux/errqueue.h>
#include <linux/io_uring.h>
#include <linux/perf_event.h>
#include <linux/securebits.h>
#include <mqueue.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/fanotify.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, LONG = 100000, PERIOD_US = 50000, MOST = 300, FAR_S = 1000000 };

typedef int (*Look)(void); /* whether the state is still there */

static pid_t child;
static char *memory;
static int fd = -1, other = -1, *told;
static char here[64]; /* a directory of the state's own */
static struct { unsigned checks; int is_kept; char why[80]; } *results, *mine;

/* ---- what states are made of ---- */

static void need(int is_good, const char *what)
{
    if (is_good)
        return;
    snprintf(mine->why, sizeof mine->why, "%s: %s", what, strerror(errno));
    _exit(1);
}

static void stay(void)
{
    for (;;)
        pause();
}

static void ready(void) { __atomic_store_n(told, 1, __ATOMIC_SEQ_CST); }
static void wait_until_ready(void)
{
    while (!__atomic_load_n(told, __ATOMIC_SEQ_CST))
        usleep(1000);
}

static pid_t start(void (*run)(void))
{
    pid_t pid = fork();
    if (!pid) {
        run();
        _exit(0);
    }
    return pid;
}

static void ready_and_stay(void)
{
    ready();
    stay();
}

static char *below(const char *name) /* a path in the state's own directory; four at a time */
{
    static char paths[4][128];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof *paths, "%s/%s", here, name);
    return path;
}

static int make_file(const char *path, const char *text)
{
    int made = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    need(made >= 0 && write(made, text, strlen(text)) == (ssize_t)strlen(text), path);
    return made;
}

static void make_tmpfs(const char *path)
{
    mkdir(path, 0755);
    need(!mount("tmpfs", path, "tmpfs", 0, "size=4m"), path);
}

static void write_word(const char *path, const char *word)
{
    int to = open(path, O_WRONLY | O_CLOEXEC);
    need(to >= 0 && write(to, word, strlen(word)) > 0, path);
    close(to);
}

static int yes(void) { return 1; }
static int child_lives(void) { return waitpid(child, NULL, WNOHANG) == 0; }
static int child_of_another_lives(void) { return !kill(child, 0); }
static int is_open(void) { return fcntl(fd, F_GETFD) >= 0; }
static int has_x(void)
{
    char c = 0;
    return pread(fd, &c, 1, 0) == 1 && c == 'x';
}
static int memory_has_x(void) { return *memory == 'x'; }

static void *run_thread(void *tid)
{
    *(pid_t *)tid = gettid();
    stay();
    return NULL;
}

static pid_t start_thread(void)
{
    static pthread_t thread;
    static volatile pid_t tid;
    need(!pthread_create(&thread, NULL, run_thread, (void *)&tid), "pthread_create");
    while (!tid)
        usleep(1000);
    return tid;
}

static void copy_program(const char *to)
{
    int source = open("/proc/self/exe", O_RDONLY), target = open(to, O_WRONLY | O_CREAT, 0755);
    struct stat status;
    need(source >= 0 && target >= 0 && !fstat(source, &status), to);
    char *text = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, source, 0);
    need(text != MAP_FAILED && write(target, text, (size_t)status.st_size) == status.st_size, to);
    munmap(text, (size_t)status.st_size), close(source), close(target);
}

static void wait_for_program(const char *name) /* until the child has become it */
{
    char path[40], is[PATH_MAX];
    snprintf(path, sizeof path, "/proc/%d/exe", child);
    for (ssize_t got = 0;;) {
        got = readlink(path, is, sizeof is - 1);
        need(got > 0, path);
        is[got] = 0;
        if (strstr(is, name))
            return;
        usleep(1000);
    }
}

static void run_program(const char *path)
{
    char *words[] = {"states", "pause", NULL}, *none[] = {NULL};
    child = fork();
    if (!child) {
        execve(path, words, none);
        _exit(1);
    }
    wait_for_program(path);
}

static pid_t stranger(void) /* the first process of `exec`: no child of ours */
{
    for (;; usleep(10000))
        for (pid_t pid = 2; pid < 4000; pid++) {
            char path[40], words[40] = "";
            snprintf(path, sizeof path, "/proc/%d/cmdline", pid);
            int from = open(path, O_RDONLY | O_CLOEXEC);
            if (from < 0)
                continue;
            ssize_t got = read(from, words, sizeof words - 1);
            close(from);
            if (got == 19 && !strcmp(words + strlen(words) + 1, "pause") && !strcmp(words + strlen(words) + 7, "exec"))
                return pid;
        }
}

/* ---- programs and processes ---- */

static Look nothing(void) { return yes; }

static Look program_of_memfd(void)
{
    char path[40];
    fd = memfd_create("program", 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    copy_program(path);
    char *words[] = {"states", "pause", NULL}, *none[] = {NULL};
    child = fork();
    if (!child) {
        int readable = open(path, O_RDONLY | O_CLOEXEC);
        close(fd);
        syscall(SYS_execveat, readable, "", words, none, AT_EMPTY_PATH);
        _exit(1);
    }
    wait_for_program("memfd:program");
    close(fd);
    return child_lives;
}

static Look program_that_is_deleted(void)
{
    copy_program(below("program"));
    run_program(below("program"));
    need(!unlink(below("program")), "unlink");
    return child_lives;
}

static Look program_without_execute_bit(void)
{
    copy_program(below("program"));
    run_program(below("program"));
    need(!chmod(below("program"), 0644), "chmod");
    return child_lives;
}

static Look program_on_noexec(void)
{
    make_tmpfs(here);
    copy_program(below("program"));
    run_program(below("program"));
    need(!mount(NULL, here, NULL, MS_REMOUNT | MS_BIND | MS_NOEXEC, NULL), "remount");
    return child_lives;
}

static int stay_in_shared(void *unused)
{
    (void)unused;
    ready_and_stay();
    return 0;
}

static Look cloned(int flags)
{
    char *stack = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    child = clone(stay_in_shared, stack + (1 << 20), flags | SIGCHLD, NULL);
    need(child > 0, "clone");
    wait_until_ready();
    return child_lives;
}

static Look shared_memory_space(void) { return cloned(CLONE_VM); }
static Look shared_directory(void) { return cloned(CLONE_FS); }
static Look shared_handlers(void) { return cloned(CLONE_VM | CLONE_SIGHAND); }
static Look shared_descriptors(void) { return cloned(CLONE_FILES); }
static Look shared_io_context(void) { return cloned((int)CLONE_IO); }
static Look shared_undo(void) { return cloned(CLONE_SYSVSEM); }

static void share_with_sibling(void)
{
    cloned(CLONE_FILES | CLONE_PARENT);
    _exit(0);
}
static Look shared_descriptors_of_siblings(void) /* of a child, and of one whose parent is not that child */
{
    pid_t first = start(share_with_sibling);
    need(first > 0, "fork");
    wait_until_ready();
    return yes;
}

static void wait_for_vfork(void)
{
    if (!vfork()) {
        ready();
        for (;;)
            pause();
    }
    _exit(0);
}
static Look waits_for_vfork(void)
{
    child = start(wait_for_vfork);
    wait_until_ready();
    return child_lives;
}

static void wait_in_poll(void) /* as `script` does, which takes EINTR for the end */
{
    ready();
    poll(NULL, 0, -1);
}
static Look waits_in_poll(void)
{
    child = start(wait_in_poll);
    wait_until_ready();
    return child_lives;
}

static void end_first_thread(void)
{
    start_thread();
    ready();
    syscall(SYS_exit, 0);
}
static Look first_thread_ended(void)
{
    char path[40], state[PAGE];
    child = start(end_first_thread);
    wait_until_ready();
    snprintf(path, sizeof path, "/proc/%d/stat", child);
    do {
        int from = open(path, O_RDONLY);
        need(from >= 0 && read(from, state, sizeof state) > 0, path);
        close(from);
    } while (!strstr(state, ") Z "));
    return child_lives;
}

static Look stopped(int number)
{
    int status;
    child = start(stay);
    setpgid(child, child); /* no terminal stops an orphaned group */
    need(!kill(child, number) && waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status), "stop");
    return yes;
}
static Look stopped_by_terminal(void) { return stopped(SIGTTIN); }
static Look stopped_by_signal(void) { return stopped(SIGSTOP); }

static void end(void) {}
static Look zombie(void)
{
    siginfo_t info;
    child = start(end);
    need(!waitid(P_PID, (id_t)child, &info, WEXITED | WNOWAIT), "waitid");
    return child_of_another_lives;
}

static void lead_session(void) /* and end, when there is a member of it */
{
    setsid();
    if (!fork())
        ready_and_stay();
    wait_until_ready();
}
static pid_t orphan(void)
{
    pid_t leader = start(lead_session);
    waitpid(leader, NULL, 0);
    return leader;
}
static Look session_of_dead_leader(void) /* its member is a child of the first process */
{
    orphan();
    return yes;
}
static Look session_below_subreaper(void) /* its member is a child of ours, who are of another session */
{
    need(!prctl(PR_SET_CHILD_SUBREAPER, 1), "subreaper");
    orphan();
    return yes;
}
static void be_subreaper_of_own_session(void)
{
    setsid();
    session_below_subreaper();
    stay();
}
static Look session_below_leader(void) /* its member's parent leads another one */
{
    child = start(be_subreaper_of_own_session);
    wait_until_ready();
    usleep(PERIOD_US);
    return child_lives;
}
static void keep_double_fork(void) /* a member of a session whose leader is its grandparent, after setsid of its parent */
{
    if (!fork()) {
        if (!fork())
            ready_and_stay();
        wait_until_ready();
        setsid();
        stay();
    }
    stay();
}
static Look session_of_grandparent(void)
{
    child = start(keep_double_fork);
    wait_until_ready();
    return child_lives;
}

static Look set_policy(uint32_t policy, uint64_t runtime)
{
    struct { uint32_t size, policy; uint64_t flags; int32_t nice; uint32_t priority; uint64_t runtime, deadline, period; } wanted
        = {sizeof wanted, policy, 0, 0, 0, runtime, runtime * 10, runtime * 10};
    need(!syscall(SYS_sched_setattr, 0, &wanted, 0), "sched_setattr");
    return yes;
}
static int is_deadline(void) { return sched_getscheduler(0) == 6; }
static Look deadline(void)
{
    set_policy(6, 10000000);
    return is_deadline;
}

static Look many_signals(void) /* that wait, more than the limit allows now */
{
    sigset_t set;
    sigemptyset(&set), sigaddset(&set, SIGRTMIN), sigprocmask(SIG_BLOCK, &set, NULL);
    for (int i = 0; i < 20; i++)
        need(!sigqueue(getpid(), SIGRTMIN, (union sigval){.sival_int = i}), "sigqueue");
    need(!setrlimit(RLIMIT_SIGPENDING, &(struct rlimit){5, 5}), "setrlimit");
    return yes;
}

static Look blocked_trap(void)
{
    sigset_t set;
    sigemptyset(&set), sigaddset(&set, SIGTRAP), sigprocmask(SIG_BLOCK, &set, NULL);
    raise(SIGTRAP);
    return yes;
}

static void change_capabilities(uint64_t inheritable, uint64_t gone)
{
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    need(!syscall(SYS_capget, &head, data), "capget");
    for (int i = 0; i < 2; i++) {
        data[i].inheritable |= (uint32_t)(inheritable >> 32 * i);
        data[i].permitted &= ~(uint32_t)(gone >> 32 * i), data[i].effective &= ~(uint32_t)(gone >> 32 * i);
    }
    need(!syscall(SYS_capset, &head, data), "capset");
}
static Look inheritable_beyond_bounds(void)
{
    change_capabilities(1 << CAP_CHOWN, 0);
    need(!prctl(PR_CAPBSET_DROP, CAP_CHOWN), "drop");
    return yes;
}
static int is_ambient(void) { return prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, CAP_CHOWN, 0, 0) == 1; }
static Look ambient(void)
{
    change_capabilities(1 << CAP_CHOWN, 0);
    need(!prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_CHOWN, 0, 0), "raise");
    return is_ambient;
}
static Look ambient_without_raise(void)
{
    ambient();
    need(!prctl(PR_SET_SECUREBITS, SECBIT_NO_CAP_AMBIENT_RAISE), "securebits");
    return is_ambient;
}
static Look many_groups(void)
{
    static gid_t groups[2000];
    for (gid_t i = 0; i < 2000; i++)
        groups[i] = i;
    need(!setgroups(2000, groups), "setgroups");
    return yes;
}

static Look nested(int kind)
{
    child = fork();
    if (!child) {
        need(!unshare(kind), "unshare");
        ready_and_stay();
    }
    wait_until_ready();
    return child_lives;
}
static Look nested_mounts(void) { return nested(CLONE_NEWNS); }
static Look nested_ipc(void) { return nested(CLONE_NEWIPC); }
static Look nested_uts(void) { return nested(CLONE_NEWUTS); }
static Look nested_user(void) { return nested(CLONE_NEWUSER); }
static Look nested_cgroup(void) { return nested(CLONE_NEWCGROUP); }
static Look nested_net(void) { return nested(CLONE_NEWNET); }
static void be_nested(void) { ready_and_stay(); }
static Look nested_pid(void)
{
    if (!(child = fork())) {
        need(!unshare(CLONE_NEWPID), "unshare");
        start(be_nested);
        stay();
    }
    wait_until_ready();
    return child_lives;
}
static Look nested_time(void)
{
    if (!(child = fork())) {
        need(!unshare(CLONE_NEWTIME), "unshare");
        start(be_nested);
        stay();
    }
    wait_until_ready();
    return child_lives;
}
static Look root_elsewhere(void) /* chroot */
{
    need(!mkdir(below("root"), 0755), "mkdir");
    if (!(child = fork())) {
        need(!chroot(below("root")) && !chdir("/"), "chroot");
        ready_and_stay();
    }
    wait_until_ready();
    return child_lives;
}
static Look exec_runs(void) /* a process of `exec` */
{
    child = stranger();
    return child_of_another_lives;
}
static int is_on_one_cpu(void)
{
    cpu_set_t set;
    return !sched_getaffinity(0, sizeof set, &set) && CPU_COUNT(&set) == 1;
}
static Look affinity(void)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(sched_getcpu(), &set);
    need(!sched_setaffinity(0, sizeof set, &set), "affinity");
    return is_on_one_cpu;
}

static void lead_group(void) /* and end, when there is a member of it */
{
    setpgid(0, 0);
    if (!fork())
        ready_and_stay();
    wait_until_ready();
}
static Look group_of_dead_leader(void)
{
    need(!prctl(PR_SET_CHILD_SUBREAPER, 1), "subreaper");
    waitpid(start(lead_group), NULL, 0);
    return yes;
}
static Look next_pid_namespace(void) /* for children, of which there are none yet */
{
    if (!(child = fork())) {
        need(!unshare(CLONE_NEWPID), "unshare");
        ready_and_stay();
    }
    wait_until_ready();
    return child_lives;
}
static Look limited(int resource, rlim_t value)
{
    need(!setrlimit(resource, &(struct rlimit){value, value}), "setrlimit");
    return yes;
}
static Look limit_of_memory(void) { return limited(RLIMIT_AS, PAGE); }
static Look limit_of_data(void) { return limited(RLIMIT_DATA, PAGE); }
static Look limit_of_files(void)
{
    fd = fcntl(open("/dev/null", O_RDONLY), F_DUPFD, 500);
    limited(RLIMIT_NOFILE, 10);
    return is_open;
}
static Look limit_of_processes(void)
{
    start_thread();
    limited(RLIMIT_NPROC, 1);
    need(!setuid(1000), "setuid");
    return yes;
}
static Look limit_of_locked(void)
{
    memory = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED, -1, 0);
    need(memory != MAP_FAILED, "mmap"), *memory = 'x';
    limited(RLIMIT_MEMLOCK, PAGE);
    return memory_has_x;
}
static Look limit_of_stack(void) { return limited(RLIMIT_STACK, PAGE); }
static Look user_without_rights(void) /* who may not open what it has open */
{
    need(!mkdir(below("inner"), 0700) && (fd = make_file(below("inner/file"), "x")) >= 0, "mkdir");
    need(!setgroups(0, NULL) && !setgid(1000) && !setuid(1000), "setuid");
    prctl(PR_SET_DUMPABLE, 0);
    return has_x;
}

/* ---- files ---- */

static int has_both(void)
{
    struct stat status;
    char c = 0;
    return !fstat(fd, &status) && S_ISDIR(status.st_mode) && pread(other, &c, 1, 0) == 1 && c == 'x';
}
static Look file_of_a_deleted_directory(void)
{
    need(!mkdir(below("inner"), 0700), "mkdir");
    fd = open(below("inner"), O_RDONLY | O_DIRECTORY), other = make_file(below("inner/file"), "x");
    need(fd >= 0 && !unlink(below("inner/file")) && !rmdir(below("inner")), "rmdir");
    return has_both;
}
static Look only_file_of_a_deleted_directory(void)
{
    need(!mkdir(below("inner"), 0700), "mkdir");
    fd = make_file(below("inner/file"), "x");
    need(!unlink(below("inner/file")) && !rmdir(below("inner")), "rmdir");
    return has_x;
}
static int is_in_deleted(void)
{
    struct stat status;
    return !stat(".", &status) && !status.st_nlink;
}
static void go_into_deleted(void)
{
    need(!mkdir(below("inner"), 0700) && !chdir(below("inner")) && !rmdir(below("inner")), "chdir");
}
static Look deleted_directory(void)
{
    go_into_deleted();
    return is_in_deleted;
}
static int is_in_deleted_and_another_is_there(void)
{
    struct stat status;
    return is_in_deleted() && !stat(below("inner"), &status) && (status.st_mode & 0777) == 0711;
}
static Look deleted_directory_made_anew(void)
{
    go_into_deleted();
    need(!mkdir(below("inner"), 0711), "mkdir");
    return is_in_deleted_and_another_is_there;
}
static Look deleted_directory_filled_anew(void)
{
    go_into_deleted();
    need(!mkdir(below("inner"), 0711), "mkdir");
    close(make_file(below("inner/file"), "y"));
    return is_in_deleted_and_another_is_there;
}
static Look deleted_directory_of_a_deleted_one(void)
{
    need(!mkdir(below("outer"), 0700) && !mkdir(below("outer/inner"), 0700) && !chdir(below("outer/inner")), "chdir");
    need(!rmdir(below("outer/inner")) && !rmdir(below("outer")), "rmdir");
    return is_in_deleted;
}
static Look deleted_file(void)
{
    fd = make_file(below("file"), "x");
    need(!unlink(below("file")), "unlink");
    return has_x;
}
static int has_x_and_another_is_there(void)
{
    char c = 0;
    int again = open(below("file"), O_RDONLY | O_CLOEXEC);
    ssize_t got = again < 0 ? 0 : read(again, &c, 1);
    close(again);
    return has_x() && got == 1 && c == 'y';
}
static Look deleted_file_made_anew(void)
{
    deleted_file();
    close(make_file(below("file"), "y"));
    return has_x_and_another_is_there;
}
static Look deleted_large_file(void)
{
    static char much[3 << 20];
    fd = make_file(below("file"), "x");
    need(write(fd, much, sizeof much) == sizeof much && !unlink(below("file")), "unlink");
    return has_x;
}
static Look deleted_mapped_file(void)
{
    fd = make_file(below("file"), "x");
    need(!ftruncate(fd, PAGE), "truncate");
    memory = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    need(memory != MAP_FAILED && !close(fd) && !unlink(below("file")), "mmap");
    return memory_has_x;
}
static Look file_without_name(void) /* O_TMPFILE */
{
    fd = open(here, O_TMPFILE | O_RDWR, 0600);
    need(fd >= 0 && write(fd, "x", 1) == 1, "O_TMPFILE");
    return has_x;
}
static Look file_of_another_name(void)
{
    fd = make_file(below("file"), "x");
    need(!link(below("file"), below("other")) && !unlink(below("file")), "link");
    return has_x;
}
static Look renamed_file(void)
{
    fd = make_file(below("file"), "x");
    need(!rename(below("file"), below("other")), "rename");
    return has_x;
}
static Look replaced_file(void) /* of the image, as an upgrade of a package does it */
{
    fd = open("/library", O_RDONLY);
    need(fd >= 0, "/library");
    int made = make_file("/library.new", "y");
    need(!rename("/library.new", "/library"), "rename");
    close(made);
    return has_x;
}
static Look replaced_mapped_file(void)
{
    fd = open("/library", O_RDONLY);
    memory = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
    need(memory != MAP_FAILED && !close(fd), "/library");
    int made = make_file("/library.new", "y");
    need(!rename("/library.new", "/library"), "rename");
    close(made);
    return memory_has_x;
}
static Look changed_file_of_the_image(void) /* open for reading since before it was changed: that is the lower file */
{
    fd = open("/library", O_RDONLY);
    int written = open("/library", O_WRONLY | O_APPEND);
    need(fd >= 0 && written >= 0 && write(written, "y", 1) == 1, "/library");
    close(written);
    return has_x;
}
static Look deleted_and_overmounted(void)
{
    make_tmpfs(here);
    fd = make_file(below("file"), "x");
    need(!unlink(below("file")), "unlink");
    make_tmpfs(here);
    return has_x;
}
static Look overmounted(void)
{
    fd = make_file(below("file"), "x");
    make_tmpfs(here);
    return has_x;
}
static Look lazily_unmounted(void)
{
    make_tmpfs(here);
    fd = make_file(below("file"), "x");
    need(!umount2(here, MNT_DETACH), "umount");
    return has_x;
}
static Look proc_of_a_dead_child(void)
{
    char path[40];
    child = start(stay);
    snprintf(path, sizeof path, "/proc/%d", child);
    need((fd = open(path, O_RDONLY | O_DIRECTORY)) >= 0, path);
    kill(child, SIGKILL), waitpid(child, NULL, 0);
    return is_open;
}
static Look file_of_a_dead_child(void)
{
    char path[40];
    child = start(stay);
    snprintf(path, sizeof path, "/proc/%d/status", child);
    need((fd = open(path, O_RDONLY)) >= 0, path);
    kill(child, SIGKILL), waitpid(child, NULL, 0);
    return is_open;
}
static Look proc_of_itself(void)
{
    char path[40];
    snprintf(path, sizeof path, "/proc/%d/status", getpid());
    need((fd = open(path, O_RDONLY)) >= 0, path);
    return is_open;
}
static Look proc_of_a_thread(void)
{
    char path[60];
    snprintf(path, sizeof path, "/proc/self/task/%d/status", start_thread());
    need((fd = open(path, O_RDONLY)) >= 0, path);
    return is_open;
}
static Look proc_of_the_first_thread(void)
{
    char path[60];
    snprintf(path, sizeof path, "/proc/self/task/%d/status", getpid());
    need((fd = open(path, O_RDONLY)) >= 0, path);
    return is_open;
}
static Look directory_of_a_thread(void)
{
    char path[60];
    snprintf(path, sizeof path, "/proc/self/task/%d", start_thread());
    need((fd = open(path, O_RDONLY)) >= 0, path);
    return is_open;
}
static Look proc_of_exec(void)
{
    char path[40];
    snprintf(path, sizeof path, "/proc/%d/status", stranger());
    need((fd = open(path, O_RDONLY)) >= 0, path);
    return is_open;
}
static Look path_only(void) /* O_PATH, of a symbolic link */
{
    need(!symlink("nowhere", below("link")) && (fd = open(below("link"), O_PATH | O_NOFOLLOW)) >= 0, "link");
    return is_open;
}
static Look fifo(void)
{
    need(!mkfifo(below("fifo"), 0600) && (fd = open(below("fifo"), O_RDWR)) >= 0 && write(fd, "x", 1) == 1, "fifo");
    return is_open;
}
static Look deleted_fifo(void)
{
    fifo();
    need(!unlink(below("fifo")), "unlink");
    return is_open;
}
static Look device_of_its_own(void)
{
    need(!mknod(below("null"), S_IFCHR | 0666, (dev_t)0x103) && (fd = open(below("null"), O_RDWR)) >= 0, "mknod");
    return is_open;
}
static Look namespace_file(void)
{
    need((fd = open("/proc/self/ns/uts", O_RDONLY)) >= 0, "ns");
    return is_open;
}
static Look namespace_without_process(void)
{
    nested(CLONE_NEWNET);
    char path[40];
    snprintf(path, sizeof path, "/proc/%d/ns/net", child);
    need((fd = open(path, O_RDONLY)) >= 0, path);
    kill(child, SIGKILL), waitpid(child, NULL, 0);
    return is_open;
}
static Look locked_by(int command, void *lock)
{
    fd = make_file(below("file"), "x");
    need(!fcntl(fd, command, lock), "fcntl");
    return is_open;
}
static Look file_lock(void) { return locked_by(F_SETLK, &(struct flock){.l_type = F_WRLCK}); }
static Look open_file_lock(void) { return locked_by(F_OFD_SETLK, &(struct flock){.l_type = F_WRLCK}); }
static Look locked_directory(void)
{
    need((fd = open(here, O_RDONLY | O_DIRECTORY)) >= 0 && !flock(fd, LOCK_EX), "flock");
    return is_open;
}
static Look lease(void)
{
    close(make_file(below("file"), "x"));
    need((fd = open(below("file"), O_RDONLY)) >= 0 && !fcntl(fd, F_SETLEASE, F_RDLCK), "lease");
    return is_open;
}
static Look owner_outside(void)
{
    int ends[2];
    need(!pipe2(ends, O_CLOEXEC) && !fcntl(ends[0], F_SETOWN, stranger()), "F_SETOWN");
    fd = ends[0];
    return is_open;
}
static Look owner_dead(void)
{
    int ends[2];
    child = start(stay);
    need(!pipe2(ends, O_CLOEXEC) && !fcntl(ends[0], F_SETOWN, child), "F_SETOWN");
    kill(child, SIGKILL), waitpid(child, NULL, 0);
    fd = ends[0];
    return is_open;
}
static Look packet_pipe(void)
{
    int ends[2];
    need(!pipe2(ends, O_DIRECT), "pipe2");
    fd = ends[0];
    return is_open;
}
static Look many_pipes(void)
{
    int ends[2];
    need(!setrlimit(RLIMIT_NOFILE, &(struct rlimit){4096, 4096}), "setrlimit");
    for (int i = 0; i < 1100; i++)
        need(!pipe(ends), "pipe");
    fd = ends[0];
    return is_open;
}
static Look epoll_of_closed(void) /* what is watched stays open under another number */
{
    int ends[2];
    struct epoll_event event = {.events = EPOLLIN};
    need((fd = epoll_create1(0)) >= 0 && !pipe(ends) && dup(ends[0]) >= 0, "epoll");
    need(!epoll_ctl(fd, EPOLL_CTL_ADD, ends[0], &event) && !close(ends[0]), "epoll_ctl");
    return is_open;
}
static Look epoll_of_replaced(void) /* its number is another file's now */
{
    epoll_of_closed();
    need(dup2(open("/dev/null", O_RDONLY), fd + 1) >= 0, "dup2");
    return is_open;
}

static Look proc_of(const char *name)
{
    char path[60];
    snprintf(path, sizeof path, "/proc/self/%s", name);
    need((fd = open(path, O_RDONLY)) >= 0, path);
    return is_open;
}
static Look proc_of_descriptors(void) { return proc_of("fd"); }
static Look proc_of_a_descriptor(void)
{
    char name[40];
    snprintf(name, sizeof name, "fdinfo/%d", dup2(open("/dev/null", O_RDONLY), 50));
    return proc_of(name);
}
static Look proc_of_an_early_descriptor(void)
{
    fd = open("/dev/null", O_RDONLY);
    char name[40];
    snprintf(name, sizeof name, "fdinfo/%d", fd);
    proc_of(name);
    fd = dup2(fd, 50);
    return is_open;
}
static Look proc_of_memory(void) { return proc_of("mem"); }
static Look proc_of_maps(void) { return proc_of("maps"); }
static Look proc_of_the_network(void) { return proc_of("net/dev"); }
static Look proc_of_a_closed_descriptor(void)
{
    int closed = dup2(open("/dev/null", O_RDONLY), 50);
    proc_of("fdinfo/50"), close(closed);
    return is_open;
}
static Look proc_of_a_zombie(void)
{
    char path[40];
    zombie();
    snprintf(path, sizeof path, "/proc/%d/status", child);
    need((fd = open(path, O_RDONLY)) >= 0, path);
    return is_open;
}
static Look proc_of_a_child(void)
{
    char path[40];
    child = start(stay);
    snprintf(path, sizeof path, "/proc/%d/task/%d/status", child, child);
    need((fd = open(path, O_RDONLY)) >= 0, path);
    return is_open;
}
static Look flagged(int flags, int mode)
{
    int on = 0;
    close(make_file(below("file"), "x"));
    need((fd = open(below("file"), mode)) >= 0 && !ioctl(fd, 0x80086601 /* FS_IOC_GETFLAGS */, &on), "flags");
    on |= flags;
    need(!ioctl(fd, 0x40086602 /* FS_IOC_SETFLAGS */, &on), "flags");
    return is_open;
}
static Look immutable_file(void) { return flagged(0x10, O_RDWR); }
static Look immutable_file_for_reading(void) { return flagged(0x10, O_RDONLY); }
static Look append_only_file(void) { return flagged(0x20, O_RDWR); }
static Look deep_directory(void) /* with a path that is longer than a path may be */
{
    char name[201];
    memset(name, 'd', 200), name[200] = 0;
    need(!chdir(here), "chdir");
    for (int i = 0; i < 25; i++)
        need(!mkdir(name, 0700) && !chdir(name), "mkdir");
    fd = make_file("file", "x");
    return has_x;
}
static Look odd_name(void)
{
    fd = make_file(below("a b\n(deleted)"), "x");
    return has_x;
}
static Look called_deleted(void)
{
    fd = make_file(below("file (deleted)"), "x");
    return has_x;
}
static Look overmounted_directory(void)
{
    need(!chdir(here), "chdir");
    make_tmpfs(here);
    return yes;
}
static Look unmounted_directory(void)
{
    make_tmpfs(here);
    need(!chdir(here) && !umount2(here, MNT_DETACH), "umount");
    return yes;
}
static Look overmounted_program(void)
{
    copy_program(below("program"));
    run_program(below("program"));
    make_tmpfs(here);
    return child_lives;
}
static Look unmounted_program(void)
{
    make_tmpfs(here);
    copy_program(below("program"));
    run_program(below("program"));
    need(!umount2(here, MNT_DETACH), "umount");
    return child_lives;
}
static Look replaced_program(void)
{
    copy_program(below("program")), copy_program(below("new"));
    run_program(below("program"));
    need(!rename(below("new"), below("program")), "rename");
    return child_lives;
}
static Look deleted_device(void)
{
    device_of_its_own();
    need(!unlink(below("null")), "unlink");
    return is_open;
}
static Look deleted_link(void)
{
    path_only();
    need(!unlink(below("link")), "unlink");
    return is_open;
}
static Look path_of_a_socket(void)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    snprintf(at.sun_path, sizeof at.sun_path, "%s", below("socket"));
    int sock = socket(AF_UNIX, SOCK_STREAM, 0);
    need(!bind(sock, (struct sockaddr *)&at, sizeof at) && (fd = open(at.sun_path, O_PATH)) >= 0, "socket");
    return is_open;
}
static Look own_mount_of_a_child(void) /* with a file, in a mount namespace of its own */
{
    if (!(child = fork())) {
        need(!unshare(CLONE_NEWNS), "unshare");
        make_tmpfs(here);
        make_file(below("file"), "x");
        ready_and_stay();
    }
    wait_until_ready();
    return child_lives;
}
static Look terminal_pair(void)
{
    int on = 0, number = 0;
    need((fd = open("/dev/pts/ptmx", O_RDWR | O_NOCTTY)) >= 0 && !ioctl(fd, 0x40045431 /* TIOCSPTLCK */, &on), "ptmx");
    need(!ioctl(fd, 0x80045430 /* TIOCGPTN */, &number), "number");
    char path[40];
    snprintf(path, sizeof path, "/dev/pts/%d", number);
    need((other = open(path, O_RDWR | O_NOCTTY)) >= 0, path);
    return is_open;
}
static void hold_for_epoll(void) { ready_and_stay(); }
static Look epoll_of_a_childs(void) /* what is watched is open in a child only */
{
    int ends[2];
    struct epoll_event event = {.events = EPOLLIN};
    need(!pipe(ends), "pipe");
    child = start(hold_for_epoll);
    wait_until_ready();
    need((fd = epoll_create1(0)) >= 0 && !epoll_ctl(fd, EPOLL_CTL_ADD, ends[0], &event) && !close(ends[0]), "epoll");
    return is_open;
}

/* ---- watches ---- */

static int is_watched_at(const char *path)
{
    char events[PAGE];
    close(creat(path, 0600)), unlink(path);
    return read(fd, events, sizeof events) > 0;
}
static Look watch(const char *path)
{
    need((fd = inotify_init1(IN_NONBLOCK)) >= 0 && inotify_add_watch(fd, path, IN_CREATE | IN_DELETE) >= 0, path);
    return is_open;
}
static const char SERVICES[] = "/usr/share/dbus-1/services";
static int services_are_watched(void) { return is_watched_at("/usr/share/dbus-1/services/x"); }
static Look watch_of_services(void) /* as dbus-daemon has it */
{
    mkdir("/usr", 0755), mkdir("/usr/share", 0755), mkdir("/usr/share/dbus-1", 0755), mkdir(SERVICES, 0755);
    watch(SERVICES);
    return services_are_watched;
}
static int etc_is_watched(void) { return is_watched_at("/etc/x"); }
static Look watch_of_etc(void)
{
    mkdir("/etc", 0755);
    watch("/etc");
    return etc_is_watched;
}
static int here_is_watched(void) { return is_watched_at(below("x")); }
static Look watch_of_overlay(void)
{
    watch(here);
    return here_is_watched;
}
static Look watch_of_tmpfs(void)
{
    make_tmpfs(here);
    watch(here);
    return here_is_watched;
}
static Look watch_of_deleted(void)
{
    make_tmpfs(here);
    other = make_file(below("file"), "x");
    watch(below("file"));
    need(!unlink(below("file")), "unlink");
    return is_open;
}
static Look watch_of_deleted_on_overlay(void)
{
    other = make_file(below("file"), "x");
    watch(below("file"));
    need(!unlink(below("file")), "unlink");
    return is_open;
}
static Look fanotify(void)
{
    make_tmpfs(here);
    need((fd = fanotify_init(FAN_CLASS_NOTIF, O_RDONLY)) >= 0, "fanotify_init");
    need(!fanotify_mark(fd, FAN_MARK_ADD | FAN_MARK_MOUNT, FAN_OPEN, AT_FDCWD, here), "fanotify_mark");
    return is_open;
}

/* ---- mounts ---- */

static int is_bound(void)
{
    struct stat a, b;
    return !stat(below("from/file"), &a) && !stat(below("to/file"), &b) && a.st_ino == b.st_ino;
}
static Look bind_mount(void)
{
    need(!mkdir(below("from"), 0700) && !mkdir(below("to"), 0700), "mkdir");
    close(make_file(below("from/file"), "x"));
    need(!mount(below("from"), below("to"), NULL, MS_BIND, NULL), "mount");
    return is_bound;
}
static int files_are_bound(void)
{
    struct stat a, b;
    return !stat(below("from"), &a) && !stat(below("to"), &b) && a.st_ino == b.st_ino;
}
static Look bind_mount_of_a_file(void)
{
    close(make_file(below("from"), "x")), close(make_file(below("to"), "y"));
    need(!mount(below("from"), below("to"), NULL, MS_BIND, NULL), "mount");
    return files_are_bound;
}
static Look bind_mount_of_a_deleted_directory(void)
{
    bind_mount();
    need(!unlink(below("from/file")) && !rmdir(below("from")), "rmdir");
    return yes;
}
static Look bind_mount_of_tmpfs(void)
{
    need(!mkdir(below("from"), 0700) && !mkdir(below("to"), 0700), "mkdir");
    make_tmpfs(below("from"));
    close(make_file(below("from/file"), "x"));
    need(!mount(below("from"), below("to"), NULL, MS_BIND, NULL), "mount");
    return is_bound;
}
static int has_kind(const char *path)
{
    struct stat inside, outside;
    return !stat(path, &inside) && !stat("/", &outside) && inside.st_dev != outside.st_dev;
}
static int is_mounted(void) { return has_kind(below("place")); }
static Look mounted(const char *kind, const char *options)
{
    need(!mkdir(below("place"), 0755) && !mount(kind, below("place"), kind, 0, options), kind);
    return is_mounted;
}
static Look mounted_tmpfs(void) { return mounted("tmpfs", "size=1m"); }
static Look mounted_proc(void) { return mounted("proc", NULL); }
static Look mounted_sysfs(void) { return mounted("sysfs", NULL); }
static Look mounted_queues(void) { return mounted("mqueue", NULL); }
static Look mounted_ramfs(void) { return mounted("ramfs", NULL); }
static Look mounted_terminals(void) { return mounted("devpts", "newinstance"); }
static Look mounted_debug(void) { return mounted("debugfs", NULL); }
static Look mounted_tracing(void) { return mounted("tracefs", NULL); }
static Look mounted_huge(void) { return mounted("hugetlbfs", NULL); }
static Look mounted_overlay(void)
{
    char options[600];
    make_tmpfs(here);
    for (int i = 0; i < 3; i++)
        need(!mkdir(below((const char *[]){"lower", "upper", "work"}[i]), 0755), "mkdir");
    snprintf(options, sizeof options, "lowerdir=%s/lower,upperdir=%s/upper,workdir=%s/work", here, here, here);
    return mounted("overlay", options);
}
static Look mounted_fuse(void)
{
    char options[100];
    mknod(below("fuse"), S_IFCHR | 0600, (dev_t)(10 << 8 | 229));
    need((fd = open(below("fuse"), O_RDWR)) >= 0, "fuse");
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0", fd);
    need(!mkdir(below("place"), 0755) && !mount("fuse", below("place"), "fuse", 0, options), "mount");
    close(fd); /* its server has ended */
    return yes;
}
static int is_there(void)
{
    struct stat status;
    return !fstat(fd, &status);
}
static Look detached_mount(void) /* never mounted anywhere */
{
    int context = (int)syscall(430 /* fsopen */, "tmpfs", 0);
    need(context >= 0 && !syscall(431 /* fsconfig */, context, 6 /* CMD_CREATE */, NULL, NULL, 0), "fsopen");
    need((fd = (int)syscall(432 /* fsmount */, context, 0, 0)) >= 0, "fsmount");
    close(context);
    return is_there;
}
static Look mapped_from_detached_mount(void)
{
    detached_mount();
    other = openat(fd, "file", O_RDWR | O_CREAT, 0600);
    need(other >= 0 && write(other, "x", 1) == 1, "file");
    memory = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, other, 0);
    need(memory != MAP_FAILED, "mmap"), close(other), close(fd);
    return memory_has_x;
}
static Look directory_on_detached_mount(void)
{
    detached_mount();
    need(!fchdir(fd), "fchdir"), close(fd);
    return yes;
}

static int holds_full(void)
{
    struct stat status;
    return is_mounted() && !stat(below("place/file"), &status);
}
static Look read_only_tmpfs(void)
{
    mounted_tmpfs();
    close(make_file(below("place/file"), "x"));
    need(!mount(NULL, below("place"), NULL, MS_REMOUNT | MS_RDONLY, NULL), "remount");
    return holds_full;
}
static Look full_tmpfs(void)
{
    static char much[1 << 20];
    mounted_tmpfs();
    int file = make_file(below("place/file"), "x");
    while (write(file, much, sizeof much) > 0) {}
    close(file);
    return holds_full;
}
static Look tmpfs_of_few_files(void)
{
    mounted("tmpfs", "nr_inodes=3");
    close(make_file(below("place/file"), "x"));
    return holds_full;
}
static Look immutable_in_tmpfs(void)
{
    int on = 0x10;
    mounted_tmpfs();
    int file = make_file(below("place/file"), "x");
    need(!ioctl(file, 0x40086602, &on), "flags"), close(file);
    return holds_full;
}
static Look shared_mount(void)
{
    mounted_tmpfs();
    need(!mount(NULL, below("place"), NULL, MS_SHARED, NULL), "shared");
    return is_mounted;
}
static Look mounted_twice(void)
{
    mounted_tmpfs();
    need(!mount("tmpfs", below("place"), "tmpfs", 0, NULL), "again");
    return is_mounted;
}
static Look bind_mount_of_a_deleted_file(void)
{
    bind_mount_of_a_file();
    need(!unlink(below("from")), "unlink");
    return yes;
}
static Look bind_mount_of_a_namespace(void) /* as `ip netns add` makes it */
{
    close(make_file(below("net"), "x"));
    need(!mount("/proc/self/ns/net", below("net"), NULL, MS_BIND, NULL), "mount");
    return yes;
}
static Look mounted_cgroups(void) { return mounted("cgroup2", NULL); }
static Look mounted_bpf(void) { return mounted("bpf", NULL); }
static Look mounted_security(void) { return mounted("securityfs", NULL); }
static Look mounted_binfmt(void) { return mounted("binfmt_misc", NULL); }
static Look mounted_devices(void) { return mounted("devtmpfs", NULL); }
static Look proc_mounted_over(void)
{
    need(!mount("tmpfs", "/proc", "tmpfs", 0, NULL), "mount");
    return yes;
}
static Look proc_unmounted(void)
{
    need(!umount2("/proc", MNT_DETACH), "umount");
    return yes;
}
static Look mounted_overlay_of_the_root(void) /* of directories of the container's own root; its changes in a tmpfs */
{
    char options[600];
    need(!mkdir(below("lower"), 0755), "lower");
    make_tmpfs(below("change"));
    need(!mkdir(below("change/upper"), 0755) && !mkdir(below("change/work"), 0755), "mkdir");
    snprintf(options, sizeof options, "lowerdir=%s/lower,upperdir=%s/change/upper,workdir=%s/change/work", here, here, here);
    return mounted("overlay", options);
}
static Look watch_of_proc(void) { return watch("/proc/self/status"); }
static Look fanotify_of_a_file(void)
{
    make_tmpfs(here);
    close(make_file(below("file"), "x"));
    need((fd = fanotify_init(FAN_CLASS_NOTIF | FAN_REPORT_FID, O_RDONLY)) >= 0, "fanotify_init");
    need(!fanotify_mark(fd, FAN_MARK_ADD, FAN_OPEN, AT_FDCWD, below("file")), "fanotify_mark");
    return is_open;
}

/* ---- memory ---- */

static Look secret_memory(void)
{
    int secret = (int)syscall(SYS_memfd_secret, 0);
    need(secret >= 0 && !ftruncate(secret, PAGE), "memfd_secret");
    memory = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, secret, 0);
    need(memory != MAP_FAILED, "mmap"), *memory = 'x', close(secret);
    return memory_has_x;
}
static char *pages(size_t count)
{
    char *made = mmap(NULL, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(made != MAP_FAILED, "mmap");
    memset(made, 'x', count * PAGE);
    return made;
}
static Look guard_pages(void)
{
    memory = pages(8);
    need(!madvise(memory + 4 * PAGE, PAGE, 102 /* MADV_GUARD_INSTALL */), "madvise");
    return memory_has_x;
}
static Look sealed_memory(void)
{
    memory = pages(2);
    need(!syscall(462 /* mseal */, memory, PAGE, 0), "mseal");
    return memory_has_x;
}
static Look sealed_unreadable_memory(void)
{
    memory = pages(2);
    need(!mprotect(memory + PAGE, PAGE, PROT_NONE) && !syscall(462, memory + PAGE, PAGE, 0), "mseal");
    return memory_has_x;
}
static Look memory_with_key(void)
{
    int key = pkey_alloc(0, 0);
    memory = pages(1);
    need(key > 0 && !pkey_mprotect(memory, PAGE, PROT_READ | PROT_WRITE, key), "pkey");
    return memory_has_x;
}
static Look droppable_memory(void)
{
    memory = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, 0x08 /* MAP_DROPPABLE */ | MAP_ANONYMOUS, -1, 0);
    need(memory != MAP_FAILED, "mmap");
    return yes;
}
static int child_has_none(void)
{
    int status;
    pid_t pid = fork();
    if (!pid)
        _exit(*memory == 'x');
    return memory_has_x() && waitpid(pid, &status, 0) == pid && !status;
}
static Look wiped_memory(void)
{
    memory = pages(1);
    need(!madvise(memory, PAGE, MADV_WIPEONFORK), "madvise");
    return child_has_none;
}
static Look huge_pages(void)
{
    memory = mmap(NULL, 2 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
    need(memory != MAP_FAILED, "mmap"), *memory = 'x';
    return memory_has_x;
}
static Look asynchronous_io(void)
{
    aio_context_t context = 0;
    need(!syscall(SYS_io_setup, 8, &context), "io_setup");
    return yes;
}
static Look user_faults(void)
{
    need((fd = (int)syscall(SYS_userfaultfd, O_NONBLOCK)) >= 0, "userfaultfd");
    return is_open;
}
static Look uring(void)
{
    static struct io_uring_params parameters;
    need((fd = (int)syscall(SYS_io_uring_setup, 4, &parameters)) >= 0, "io_uring");
    return is_open;
}
static Look perf_event(void)
{
    struct perf_event_attr attributes = {.type = PERF_TYPE_SOFTWARE, .size = sizeof attributes};
    need((fd = (int)syscall(SYS_perf_event_open, &attributes, 0, -1, -1, 0)) >= 0, "perf_event_open");
    return is_open;
}
static Look perf_mapping(void)
{
    perf_event();
    memory = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    need(memory != MAP_FAILED, "mmap"), close(fd);
    return yes;
}
static Look local_descriptors(void) /* LDT */
{
    struct { unsigned entry, base, limit, flags; } one = {0, 0, 0xfffff, 0x51};
    need(!syscall(SYS_modify_ldt, 1, &one, sizeof one), "modify_ldt");
    return yes;
}
static Look memfd_with_seals(void)
{
    fd = memfd_create("x", MFD_ALLOW_SEALING);
    need(write(fd, "x", 1) == 1 && !fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW), "memfd");
    return has_x;
}
static Look shared_anonymous(void)
{
    memory = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    *memory = 'x';
    return memory_has_x;
}
static Look zero_device(void)
{
    fd = open("/dev/zero", O_RDWR);
    memory = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    need(memory != MAP_FAILED, "mmap"), *memory = 'x', close(fd);
    return memory_has_x;
}

static Look many_mappings(void) /* as many as a process may have, almost */
{
    for (int i = 0; i < 32700; i++)
        need(mmap(NULL, PAGE, i % 2 ? PROT_READ : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED, "mmap");
    for (int i = 0; i < 32700; i++)
        if (mmap(NULL, PAGE, i % 2 ? PROT_READ : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED)
            break;
    return yes;
}
static Look future_sealed_memfd(void) /* that is mapped for writing since before */
{
    fd = memfd_create("x", MFD_ALLOW_SEALING);
    need(!ftruncate(fd, PAGE), "truncate");
    memory = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    need(memory != MAP_FAILED && !fcntl(fd, F_ADD_SEALS, 0x10 /* F_SEAL_FUTURE_WRITE */), "seal"), *memory = 'x';
    return memory_has_x;
}
static Look executable_memfd(void)
{
    fd = memfd_create("x", 0x10 /* MFD_EXEC */);
    need(!ftruncate(fd, PAGE), "truncate");
    memory = mmap(NULL, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_SHARED, fd, 0);
    need(memory != MAP_FAILED, "mmap"), *memory = 'x';
    return memory_has_x;
}
static Look no_exec_memfd(void)
{
    fd = memfd_create("x", 0x8 /* MFD_NOEXEC_SEAL */);
    need(write(fd, "x", 1) == 1, "write");
    return has_x;
}
static Look library_on_noexec(void)
{
    make_tmpfs(here);
    fd = make_file(below("file"), "x");
    need(!ftruncate(fd, PAGE), "truncate");
    memory = mmap(NULL, PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0);
    need(memory != MAP_FAILED && !close(fd) && !mount(NULL, here, NULL, MS_REMOUNT | MS_BIND | MS_NOEXEC, NULL), "remount");
    return memory_has_x;
}
static Look beyond_the_end(void) /* a mapping of a file that was cut */
{
    fd = make_file(below("file"), "x");
    need(!ftruncate(fd, 4 * PAGE), "truncate");
    memory = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    need(memory != MAP_FAILED && !ftruncate(fd, 1), "mmap"), close(fd);
    return memory_has_x;
}
static Look without_vdso(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[300];
    unsigned long from, to;
    while (fgets(line, sizeof line, maps))
        if (strstr(line, "[vdso]") && sscanf(line, "%lx-%lx", &from, &to) == 2)
            need(!munmap((void *)from, to - from), "munmap");
    fclose(maps);
    return yes;
}
static Look much_reserved(void)
{
    memory = mmap(NULL, 1L << 40, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    need(memory != MAP_FAILED, "mmap"), *memory = 'x';
    return memory_has_x;
}
static Look growing_down(void)
{
    memory = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN, -1, 0);
    need(memory != MAP_FAILED, "mmap"), *memory = 'x';
    return memory_has_x;
}

/* ---- timers and clocks ---- */

static Look timer_of(clockid_t clock, int flags)
{
    need((fd = timerfd_create(clock, TFD_CLOEXEC)) >= 0, "timerfd");
    need(!timerfd_settime(fd, flags, &(struct itimerspec){.it_value.tv_sec = FAR_S}, NULL), "settime");
    return is_open;
}
static Look timer_of_monotonic(void) { return timer_of(CLOCK_MONOTONIC, 0); }
static Look timer_of_boottime(void) { return timer_of(CLOCK_BOOTTIME, 0); }
static Look timer_of_alarm(void) { return timer_of(CLOCK_BOOTTIME_ALARM, 0); }
static Look timer_of_real_alarm(void) { return timer_of(CLOCK_REALTIME_ALARM, 0); }
static timer_t make_timer(clockid_t clock)
{
    struct sigevent none = {.sigev_notify = SIGEV_NONE};
    int made = -1;
    need(!syscall(SYS_timer_create, clock, &none, &made), "timer_create");
    return (timer_t)(intptr_t)made;
}
static int last_timer = -1;
static int timer_is_armed(void)
{
    struct itimerspec left;
    return !syscall(SYS_timer_gettime, last_timer, &left) && left.it_value.tv_sec > 0;
}
static Look timer_of_id(int id) /* all before it are deleted */
{
    while ((last_timer = (int)(intptr_t)make_timer(CLOCK_MONOTONIC)) < id)
        syscall(SYS_timer_delete, last_timer);
    need(!syscall(SYS_timer_settime, last_timer, 0, &(struct itimerspec){.it_value.tv_sec = FAR_S}, NULL), "timer_settime");
    return timer_is_armed;
}
static Look timer(void) { return timer_of_id(0); }
static Look timer_of_large_id(void) { return timer_of_id(LONG); }
static Look timers_of_process_clocks(void)
{
    last_timer = (int)(intptr_t)make_timer(CLOCK_PROCESS_CPUTIME_ID);
    need(!syscall(SYS_timer_settime, last_timer, 0, &(struct itimerspec){.it_value.tv_sec = FAR_S}, NULL), "timer_settime");
    return timer_is_armed;
}
static Look timer_of_tai(void)
{
    last_timer = (int)(intptr_t)make_timer(CLOCK_TAI);
    need(!syscall(SYS_timer_settime, last_timer, 0, &(struct itimerspec){.it_value.tv_sec = FAR_S}, NULL), "timer_settime");
    return timer_is_armed;
}
static Look timer_of_alarm_clock(void)
{
    last_timer = (int)(intptr_t)make_timer(CLOCK_BOOTTIME_ALARM);
    need(!syscall(SYS_timer_settime, last_timer, 0, &(struct itimerspec){.it_value.tv_sec = FAR_S}, NULL), "timer_settime");
    return timer_is_armed;
}
static Look timer_of_another_process(void) /* on its CPU clock */
{
    clockid_t clock;
    need(!clock_getcpuclockid(getppid(), &clock), "clock");
    last_timer = (int)(intptr_t)make_timer(clock);
    need(!syscall(SYS_timer_settime, last_timer, 0, &(struct itimerspec){.it_value.tv_sec = FAR_S}, NULL), "timer_settime");
    return timer_is_armed;
}

static Look timer_for(pid_t tid)
{
    struct sigevent to = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR1};
    ((int *)&to)[4] = tid; /* sigev_notify_thread_id */
    need(!syscall(SYS_timer_create, CLOCK_MONOTONIC, &to, &last_timer), "timer_create");
    need(!syscall(SYS_timer_settime, last_timer, 0, &(struct itimerspec){.it_value.tv_sec = FAR_S}, NULL), "timer_settime");
    return timer_is_armed;
}
static Look timer_for_a_thread(void) { return timer_for(start_thread()); }
static void end_thread(int number)
{
    (void)number;
    syscall(SYS_exit, 0);
}
static Look timer_for_a_dead_thread(void)
{
    pid_t tid = start_thread();
    timer_for(tid);
    signal(SIGRTMIN + 9, end_thread);
    need(!syscall(SYS_tgkill, getpid(), tid, SIGRTMIN + 9), "tgkill");
    while (!syscall(SYS_tgkill, getpid(), tid, 0))
        usleep(1000);
    return timer_is_armed;
}

/* ---- pidfds and maps of BPF ---- */

static Look pidfd(pid_t pid, unsigned flags)
{
    need((fd = (int)syscall(SYS_pidfd_open, pid, flags)) >= 0, "pidfd_open");
    return is_open;
}
static Look pidfd_of_itself(void) { return pidfd(getpid(), 0); }
static Look pidfd_of_a_thread(void) { return pidfd(start_thread(), O_EXCL /* PIDFD_THREAD */); }
static Look pidfd_of_exec(void) { return pidfd(stranger(), 0); }
static Look pidfd_of_a_dead_child(void)
{
    child = start(stay);
    pidfd(child, 0);
    kill(child, SIGKILL), waitpid(child, NULL, 0);
    return is_open;
}
static Look pidfd_of_a_zombie(void)
{
    zombie();
    return pidfd(child, 0);
}
static Look map_of(int type, unsigned key, unsigned value)
{
    union bpf_attr attributes = {.map_type = (unsigned)type, .key_size = key, .value_size = value, .max_entries = PAGE};
    need((fd = (int)syscall(SYS_bpf, BPF_MAP_CREATE, &attributes, sizeof attributes)) >= 0, "bpf");
    return is_open;
}
static Look bpf_hash(void) { return map_of(BPF_MAP_TYPE_HASH, 4, 4); }
static Look bpf_lru(void) { return map_of(BPF_MAP_TYPE_LRU_HASH, 4, 4); }
static Look bpf_ring(void) { return map_of(BPF_MAP_TYPE_RINGBUF, 0, 0); }
static Look landlock_rules(void)
{
    uint64_t handled = 1;
    need((fd = (int)syscall(444 /* landlock_create_ruleset */, &handled, sizeof handled, 0)) >= 0, "landlock");
    return is_open;
}

/* ---- System V and POSIX queues, memory, semaphores ---- */

struct message { long type; char text[9000]; };
static int queue = -1;
static void send_message(size_t size)
{
    static struct message message = {.type = 1};
    need(!msgsnd(queue, &message, size, IPC_NOWAIT), "msgsnd");
}
static int has_message(void)
{
    struct msqid_ds state;
    return !msgctl(queue, IPC_STAT, &state) && state.msg_qnum > 0;
}
static Look message(void)
{
    need((queue = msgget(1, IPC_CREAT | 0600)) >= 0, "msgget");
    send_message(100);
    return has_message;
}
static Look long_message(void)
{
    write_word("/proc/sys/kernel/msgmax", "65536");
    need((queue = msgget(2, IPC_CREAT | 0600)) >= 0, "msgget");
    send_message(9000);
    return has_message;
}
static Look full_queue(void) /* of more than a queue that is made now may have */
{
    write_word("/proc/sys/kernel/msgmnb", "65536");
    need((queue = msgget(3, IPC_CREAT | 0600)) >= 0, "msgget");
    for (int i = 0; i < 4; i++)
        send_message(8000);
    write_word("/proc/sys/kernel/msgmnb", "16384");
    return has_message;
}
static Look shared_segment(void)
{
    int id = shmget(4, PAGE, IPC_CREAT | 0600);
    need(id >= 0 && (memory = shmat(id, NULL, 0)) != (char *)-1, "shm");
    *memory = 'x';
    return memory_has_x;
}
static Look removed_segment(void)
{
    int id = shmget(IPC_PRIVATE, PAGE, 0600);
    need(id >= 0 && (memory = shmat(id, NULL, 0)) != (char *)-1 && !shmctl(id, IPC_RMID, NULL), "shm");
    *memory = 'x';
    return memory_has_x;
}
static int segment_is_removed(void)
{
    static int id = -1;
    struct shmid_ds state;
    if (id < 0)
        id = other;
    return !shmctl(id, IPC_STAT, &state) && (state.shm_perm.mode & SHM_DEST);
}
static Look mark_of_removed_segment(void)
{
    other = shmget(IPC_PRIVATE, PAGE, 0600);
    need(other >= 0 && (memory = shmat(other, NULL, 0)) != (char *)-1 && !shmctl(other, IPC_RMID, NULL), "shm");
    return segment_is_removed;
}
static int set = -1;
static int semaphore_is_down(void) { return semctl(set, 0, GETVAL) == 3; }
static Look semaphore(void)
{
    need((set = semget(5, 1, IPC_CREAT | 0600)) >= 0 && !semctl(set, 0, SETVAL, 3), "sem");
    return semaphore_is_down;
}
static mqd_t posix_queue(const char *name)
{
    mqd_t made = mq_open(name, O_CREAT | O_RDWR, 0600, NULL);
    need(made >= 0, "mq_open");
    return made;
}
static Look open_queue(void)
{
    fd = (int)posix_queue("/open");
    return is_open;
}
static Look closed_queue(void) /* not open in any process, but there */
{
    mq_close(posix_queue("/closed"));
    return yes;
}

#include "states_sockets.c"

static const struct { const char *name; Look (*make)(void); } STATES[] = {
#define ROW(name) {#name, name}
    ROW(nothing), ROW(program_of_memfd), ROW(program_that_is_deleted), ROW(program_without_execute_bit),
    ROW(program_on_noexec), ROW(shared_memory_space), ROW(shared_directory), ROW(shared_handlers), ROW(shared_descriptors),
    ROW(shared_io_context), ROW(shared_undo), ROW(shared_descriptors_of_siblings), ROW(waits_for_vfork), ROW(waits_in_poll),
    ROW(first_thread_ended), ROW(stopped_by_terminal), ROW(stopped_by_signal), ROW(zombie), ROW(session_of_dead_leader),
    ROW(session_below_subreaper), ROW(session_below_leader), ROW(session_of_grandparent), ROW(deadline), ROW(many_signals),
    ROW(blocked_trap), ROW(inheritable_beyond_bounds), ROW(ambient), ROW(ambient_without_raise), ROW(many_groups),
    ROW(nested_mounts), ROW(nested_ipc), ROW(nested_uts), ROW(nested_user), ROW(nested_cgroup), ROW(nested_net),
    ROW(nested_pid), ROW(nested_time), ROW(root_elsewhere), ROW(exec_runs), ROW(affinity), ROW(group_of_dead_leader),
    ROW(next_pid_namespace), ROW(limit_of_memory), ROW(limit_of_data), ROW(limit_of_files), ROW(limit_of_processes),
    ROW(limit_of_locked), ROW(limit_of_stack), ROW(user_without_rights), ROW(file_of_a_deleted_directory),
    ROW(only_file_of_a_deleted_directory), ROW(deleted_directory), ROW(deleted_directory_made_anew),
    ROW(deleted_directory_filled_anew), ROW(deleted_directory_of_a_deleted_one), ROW(deleted_file),
    ROW(deleted_file_made_anew), ROW(deleted_large_file), ROW(deleted_mapped_file), ROW(file_without_name),
    ROW(file_of_another_name), ROW(renamed_file), ROW(replaced_file), ROW(replaced_mapped_file),
    ROW(changed_file_of_the_image), ROW(deleted_and_overmounted), ROW(overmounted),
    ROW(lazily_unmounted), ROW(proc_of_a_dead_child), ROW(file_of_a_dead_child), ROW(proc_of_itself), ROW(proc_of_a_thread),
    ROW(proc_of_the_first_thread), ROW(directory_of_a_thread), ROW(proc_of_exec), ROW(path_only), ROW(fifo),
    ROW(deleted_fifo), ROW(device_of_its_own), ROW(namespace_file), ROW(namespace_without_process), ROW(file_lock),
    ROW(open_file_lock), ROW(locked_directory), ROW(lease), ROW(owner_outside), ROW(owner_dead), ROW(packet_pipe),
    ROW(many_pipes), ROW(epoll_of_closed), ROW(epoll_of_replaced), ROW(proc_of_descriptors), ROW(proc_of_a_descriptor),
    ROW(proc_of_an_early_descriptor), ROW(proc_of_memory), ROW(proc_of_maps), ROW(proc_of_the_network),
    ROW(proc_of_a_closed_descriptor), ROW(proc_of_a_zombie), ROW(proc_of_a_child), ROW(immutable_file),
    ROW(immutable_file_for_reading), ROW(append_only_file), ROW(deep_directory), ROW(odd_name), ROW(called_deleted),
    ROW(overmounted_directory), ROW(unmounted_directory), ROW(overmounted_program), ROW(unmounted_program),
    ROW(replaced_program), ROW(deleted_device), ROW(deleted_link), ROW(path_of_a_socket), ROW(own_mount_of_a_child),
    ROW(terminal_pair), ROW(epoll_of_a_childs), ROW(watch_of_services), ROW(watch_of_etc), ROW(watch_of_overlay),
    ROW(watch_of_tmpfs), ROW(watch_of_deleted), ROW(watch_of_deleted_on_overlay), ROW(fanotify), ROW(bind_mount),
    ROW(bind_mount_of_a_file), ROW(bind_mount_of_a_deleted_directory), ROW(bind_mount_of_tmpfs), ROW(mounted_tmpfs),
    ROW(mounted_proc), ROW(mounted_sysfs), ROW(mounted_queues), ROW(mounted_ramfs), ROW(mounted_terminals),
    ROW(mounted_debug), ROW(mounted_tracing), ROW(mounted_huge), ROW(mounted_overlay), ROW(mounted_fuse),
    ROW(detached_mount), ROW(mapped_from_detached_mount), ROW(directory_on_detached_mount), ROW(read_only_tmpfs),
    ROW(full_tmpfs), ROW(tmpfs_of_few_files), ROW(immutable_in_tmpfs), ROW(shared_mount), ROW(mounted_twice),
    ROW(bind_mount_of_a_deleted_file), ROW(bind_mount_of_a_namespace), ROW(mounted_cgroups), ROW(mounted_bpf),
    ROW(mounted_security), ROW(mounted_binfmt), ROW(mounted_devices), ROW(proc_mounted_over), ROW(proc_unmounted),
    ROW(mounted_overlay_of_the_root), ROW(watch_of_proc), ROW(fanotify_of_a_file), ROW(secret_memory), ROW(guard_pages),
    ROW(sealed_memory), ROW(sealed_unreadable_memory), ROW(memory_with_key), ROW(droppable_memory), ROW(wiped_memory),
    ROW(huge_pages), ROW(asynchronous_io), ROW(user_faults), ROW(uring), ROW(perf_event), ROW(perf_mapping),
    ROW(local_descriptors), ROW(memfd_with_seals), ROW(shared_anonymous), ROW(zero_device), ROW(many_mappings),
    ROW(future_sealed_memfd), ROW(executable_memfd), ROW(no_exec_memfd), ROW(library_on_noexec), ROW(beyond_the_end),
    ROW(without_vdso), ROW(much_reserved), ROW(growing_down), ROW(timer_of_monotonic), ROW(timer_of_boottime),
    ROW(timer_of_alarm), ROW(timer_of_real_alarm), ROW(timer), ROW(timer_of_large_id), ROW(timers_of_process_clocks),
    ROW(timer_of_tai), ROW(timer_of_alarm_clock), ROW(timer_of_another_process), ROW(timer_for_a_thread),
    ROW(timer_for_a_dead_thread), ROW(pidfd_of_itself), ROW(pidfd_of_a_thread), ROW(pidfd_of_exec),
    ROW(pidfd_of_a_dead_child), ROW(pidfd_of_a_zombie), ROW(bpf_hash), ROW(bpf_lru), ROW(bpf_ring), ROW(landlock_rules),
    ROW(message), ROW(long_message), ROW(full_queue), ROW(shared_segment), ROW(removed_segment),
    ROW(mark_of_removed_segment), ROW(semaphore), ROW(open_queue), ROW(closed_queue), ROW(bound_freely),
    ROW(bound_transparently), ROW(bound_freely_6), ROW(sends_to_all), ROW(sends_to_link_local), ROW(bound_to_link_local),
    ROW(socket_of_a_file), ROW(socket_of_a_deleted_file), ROW(socket_of_a_deleted_directory),
    ROW(socket_on_read_only_mount), ROW(socket_on_read_only_file_system), ROW(socket_of_a_lost_network),
    ROW(unread_datagram), ROW(groups_without_port), ROW(zero_copy), ROW(file_on_its_way), ROW(memfd_on_its_way),
    ROW(user_faults_on_their_way), ROW(terminal_on_its_way), ROW(pidfd_on_its_way), ROW(pipe_of_exec), ROW(ended_pipe), ROW(broken_pipe),
    ROW(large_pipe), ROW(full_pipe), ROW(terminal_of_its_own), ROW(terminal_by_name_only), ROW(no_descriptor_left), ROW(one_descriptor_left),
    ROW(first_process_with_one_descriptor), ROW(first_process_with_two_descriptors), ROW(polling_asynchronously), ROW(two_descriptors_left), ROW(three_descriptors_left), ROW(first_process_with_three_descriptors), ROW(first_process_with_four_descriptors),
    ROW(half_open_connection), ROW(urgent_byte), ROW(zero_length_datagram), ROW(unbound_netlink), ROW(packet_socket), ROW(raw_socket), ROW(abstract_socket), ROW(large_eventfd), ROW(thread_elsewhere), ROW(network_of_a_thread),
};

static void keep(const char *name)
{
    snprintf(here, sizeof here, "/made/%s", name);
    need(!mkdir(here, 0755), here);
    for (size_t i = 0; i < sizeof STATES / sizeof *STATES; i++)
        if (!strcmp(name, STATES[i].name))
            for (Look look = STATES[i].make();; usleep(PERIOD_US)) {
                mine->is_kept = look();
                mine->checks++;
            }
    need(0, "no such state");
}

static void say(int count, char **names)
{
    FILE *said = fopen("/said.new", "w");
    if (!said)
        return;
    for (int i = 0; i < count; i++)
        fprintf(said, "%s %u %s\n", names[i], results[i].checks,
                *results[i].why ? results[i].why : results[i].is_kept ? "ok" : "lost");
    fclose(said);
    rename("/said.new", "/said");
}

int main(int argc, char **argv)
{
    int ends[2];
    if (argc > 1 && !strcmp(argv[1], "pause")) {
        if (argc > 2)
            pipe(ends); /* descriptors 3 and 4, which states open */
        stay();
    }
    results = mmap(NULL, sizeof *results * MOST, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int *all_told = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    mkdir("/made", 0755);
    for (int i = 1; i < argc && i <= MOST; i++) {
        mine = &results[i - 1], told = &all_told[i];
        if (!fork())
            keep(argv[i]);
    }
    for (;; usleep(PERIOD_US))
        say(argc - 1, argv + 1);
}
