/* A container that is in some of many states, and looks again and again whether it still is: `states NAME...`.
 * It prints `count N checksum ok`, or `count N checksum lost` after a line `lost NAME...`. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

static void need(int is_good, const char *what) { if (!is_good) { perror(what); exit(1); } }

/* A thread that does as it is told: states of one thread that the others do not have. */
struct worker { int (*act)(void); int result; pthread_mutex_t lock; pthread_cond_t told; };

static void *work(void *given)
{
    struct worker *worker = given;
    pthread_mutex_lock(&worker->lock);
    for (;;) {
        while (!worker->act)
            pthread_cond_wait(&worker->told, &worker->lock);
        worker->result = worker->act();
        worker->act = NULL;
        pthread_cond_broadcast(&worker->told);
    }
    return NULL;
}

static struct worker *new_worker(void)
{
    struct worker *worker = calloc(1, sizeof *worker);
    pthread_t thread;
    pthread_mutex_init(&worker->lock, NULL), pthread_cond_init(&worker->told, NULL);
    need(!pthread_create(&thread, NULL, work, worker), "thread");
    return worker;
}

static int tell(struct worker *worker, int (*act)(void))
{
    pthread_mutex_lock(&worker->lock);
    worker->act = act;
    pthread_cond_broadcast(&worker->told);
    while (worker->act)
        pthread_cond_wait(&worker->told, &worker->lock);
    int result = worker->result;
    pthread_mutex_unlock(&worker->lock);
    return result;
}

static int write_text(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY);
    int is_done = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    close(fd);
    return is_done;
}

static long read_number(const char *path, int base)
{
    char text[64] = "";
    int fd = open(path, O_RDONLY);
    need(fd >= 0 && read(fd, text, sizeof text - 1) > 0, path), close(fd);
    return strtol(text, NULL, base);
}

/* sched_setattr(2); the C library of Debian 13 declares it, older ones do not. */
struct attributes { uint32_t size, policy; uint64_t flags; int32_t nice; uint32_t priority; uint64_t runtime, deadline, period; uint32_t least, most; };
static int set_attributes(struct attributes *a) { a->size = sizeof *a; return !syscall(SYS_sched_setattr, 0, a, 0); }
static struct attributes attributes(void) { struct attributes a; need(!syscall(SYS_sched_getattr, 0, &a, sizeof a, 0), "sched_getattr"); return a; }

#define DO(name, ...) static int do_##name(void) { __VA_ARGS__; }
#define LOOK(name, ...) static int look_##name(void) { return __VA_ARGS__; }

/* Scheduling */
static int on_one_cpu(void) { cpu_set_t set; CPU_ZERO(&set); sched_getaffinity(0, sizeof set, &set); return CPU_COUNT(&set) == 1; }
static int pin(void) { cpu_set_t set; CPU_ZERO(&set); CPU_SET(sched_getcpu(), &set); return !sched_setaffinity(0, sizeof set, &set); }
DO(affinity, return pin()) LOOK(affinity, on_one_cpu())
DO(nice, return !setpriority(PRIO_PROCESS, 0, 5)) LOOK(nice, getpriority(PRIO_PROCESS, 0) == 5)
DO(batch, struct attributes a = { .policy = SCHED_BATCH, .nice = 3 }; return set_attributes(&a)) LOOK(batch, sched_getscheduler(0) == SCHED_BATCH)
DO(idle, struct attributes a = { .policy = SCHED_IDLE }; return set_attributes(&a)) LOOK(idle, sched_getscheduler(0) == SCHED_IDLE)
DO(reset_on_fork, struct attributes a = { .flags = 1 }; return set_attributes(&a)) LOOK(reset_on_fork, attributes().flags == 1)
DO(slice, struct attributes a = { .runtime = 7000000 }; return set_attributes(&a)) LOOK(slice, attributes().runtime == 7000000)
DO(io_priority, return !syscall(SYS_ioprio_set, 1, 0, 2 << 13 | 6)) LOOK(io_priority, syscall(SYS_ioprio_get, 1, 0) == (2 << 13 | 6))
DO(timer_slack, return !prctl(PR_SET_TIMERSLACK, 1234567)) LOOK(timer_slack, prctl(PR_GET_TIMERSLACK) == 1234567)

/* Files of /proc, limits */
DO(coredump_filter, return write_text("/proc/self/coredump_filter", "0x7f")) LOOK(coredump_filter, read_number("/proc/self/coredump_filter", 16) == 0x7f)
DO(oom_score_adj, return write_text("/proc/self/oom_score_adj", "321")) LOOK(oom_score_adj, read_number("/proc/self/oom_score_adj", 10) == 321)
static int limit(int kind, rlim_t soft) { struct rlimit l; getrlimit(kind, &l); l.rlim_cur = soft; return !setrlimit(kind, &l); }
static int limited(int kind, rlim_t soft) { struct rlimit l; getrlimit(kind, &l); return l.rlim_cur == soft; }
DO(open_files_limit, return limit(RLIMIT_NOFILE, 222)) LOOK(open_files_limit, limited(RLIMIT_NOFILE, 222))
DO(core_limit, return limit(RLIMIT_CORE, 0)) LOOK(core_limit, limited(RLIMIT_CORE, 0))
DO(stack_limit, return limit(RLIMIT_STACK, 1 << 20)) LOOK(stack_limit, limited(RLIMIT_STACK, 1 << 20))
DO(cpu_limit, return limit(RLIMIT_CPU, 4000)) LOOK(cpu_limit, limited(RLIMIT_CPU, 4000))

/* Of a process */
DO(personality, return personality(personality(0xffffffff) | ADDR_NO_RANDOMIZE) >= 0) LOOK(personality, (personality(0xffffffff) & ADDR_NO_RANDOMIZE) != 0)
DO(umask, umask(027); return 1) LOOK(umask, ({ mode_t m = umask(027); umask(m); m == 027; }))
DO(ignored_signal, return signal(SIGWINCH, SIG_IGN) != SIG_ERR) LOOK(ignored_signal, ({ struct sigaction a; sigaction(SIGWINCH, NULL, &a); a.sa_handler == SIG_IGN; }))
DO(blocked_signal, sigset_t s; sigemptyset(&s); sigaddset(&s, SIGURG); return !pthread_sigmask(SIG_BLOCK, &s, NULL))
LOOK(blocked_signal, ({ sigset_t s; pthread_sigmask(SIG_BLOCK, NULL, &s); sigismember(&s, SIGURG); }))
DO(no_new_privs, return !prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) LOOK(no_new_privs, prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1)
DO(not_dumpable, return !prctl(PR_SET_DUMPABLE, 0)) LOOK(not_dumpable, prctl(PR_GET_DUMPABLE) == 0)
DO(subreaper, return !prctl(PR_SET_CHILD_SUBREAPER, 1)) LOOK(subreaper, ({ int is = 0; prctl(PR_GET_CHILD_SUBREAPER, &is); is; }))
DO(death_signal, return !prctl(PR_SET_PDEATHSIG, SIGUSR2)) LOOK(death_signal, ({ int number = 0; prctl(PR_GET_PDEATHSIG, &number); number == SIGUSR2; }))
DO(no_huge_pages, return !prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)) LOOK(no_huge_pages, prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) == 1)
DO(keep_capabilities, return !prctl(PR_SET_KEEPCAPS, 1)) LOOK(keep_capabilities, prctl(PR_GET_KEEPCAPS) == 1)
DO(thread_name, return !prctl(PR_SET_NAME, "renamed")) LOOK(thread_name, ({ char n[16]; prctl(PR_GET_NAME, n); !strcmp(n, "renamed"); }))
DO(groups, gid_t g[] = { 7, 9 }; return !syscall(SYS_setgroups, 2, g)) LOOK(groups, ({ gid_t g[9]; getgroups(9, g) == 2 && g[0] == 7; }))
DO(no_groups, return !syscall(SYS_setgroups, 0, NULL)) LOOK(no_groups, getgroups(0, NULL) == 0)

/* Descriptors */
static int event_fd, semaphore_fd, timer_fd, watch_fd, once_fd, pipe_fds[2], socket_fd, datagram_fd;
static timer_t posix_timer;
DO(event_counter, return (event_fd = eventfd(5, EFD_NONBLOCK)) >= 0) LOOK(event_counter, ({ uint64_t n = 0; read(event_fd, &n, 8) == 8 && n == 5 && write(event_fd, &n, 8) == 8; }))
DO(semaphore, return (semaphore_fd = eventfd(5, EFD_SEMAPHORE | EFD_NONBLOCK)) >= 0) LOOK(semaphore, ({ uint64_t n = 0; read(semaphore_fd, &n, 8) == 8 && n == 1 && write(semaphore_fd, &n, 8) == 8; }))
DO(timer_descriptor, struct itimerspec t = { { 500, 0 }, { 900, 0 } }; return (timer_fd = timerfd_create(CLOCK_MONOTONIC, 0)) >= 0 && !timerfd_settime(timer_fd, 0, &t, NULL))
LOOK(timer_descriptor, ({ struct itimerspec t; !timerfd_gettime(timer_fd, &t) && t.it_interval.tv_sec == 500 && t.it_value.tv_sec > 500; }))
DO(posix_timer, struct sigevent e = { .sigev_notify = SIGEV_NONE }; struct itimerspec t = { { 0, 0 }, { 900, 0 } }; return !timer_create(CLOCK_REALTIME, &e, &posix_timer) && !timer_settime(posix_timer, 0, &t, NULL))
LOOK(posix_timer, ({ struct itimerspec t; !timer_gettime(posix_timer, &t) && t.it_value.tv_sec > 300; }))
DO(interval_timer, struct itimerval t = { { 0, 0 }, { 900, 0 } }; return !setitimer(ITIMER_REAL, &t, NULL)) LOOK(interval_timer, ({ struct itimerval t; !getitimer(ITIMER_REAL, &t) && t.it_value.tv_sec > 300; }))
DO(watch, return (watch_fd = inotify_init1(IN_NONBLOCK)) >= 0 && inotify_add_watch(watch_fd, "/", IN_CREATE) >= 0)
LOOK(watch, ({ char b[4096]; close(creat("/made", 0600)); int n = read(watch_fd, b, sizeof b); unlink("/made"); n > 0; }))
DO(watch_once, return (once_fd = inotify_init1(IN_NONBLOCK)) >= 0 && inotify_add_watch(once_fd, "/", IN_DELETE_SELF | IN_ONESHOT | IN_EXCL_UNLINK) >= 0)
LOOK(watch_once, ({ char p[40], b[400] = ""; snprintf(p, sizeof p, "/proc/self/fdinfo/%d", once_fd); int f = open(p, O_RDONLY); need(read(f, b, 399) > 0, p); close(f); strstr(b, "mask:84000400") != NULL; }))
DO(pipe_size, return !pipe(pipe_fds) && fcntl(pipe_fds[1], F_SETPIPE_SZ, 1 << 18) > 0) LOOK(pipe_size, fcntl(pipe_fds[0], F_GETPIPE_SZ) == 1 << 18)
static int option(int fd, int level, int name, int value) { return !setsockopt(fd, level, name, &value, sizeof value); }
static int has_option(int fd, int level, int name, int value) { int found = -1; socklen_t size = sizeof found; return !getsockopt(fd, level, name, &found, &size) && found == value; }
DO(stream_options, socket_fd = socket(AF_INET, SOCK_STREAM, 0); struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
   return !bind(socket_fd, (struct sockaddr *)&a, sizeof a) && !listen(socket_fd, 5) && option(socket_fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, 7) && option(socket_fd, IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
       && option(socket_fd, IPPROTO_TCP, TCP_SYNCNT, 3) && option(socket_fd, SOL_SOCKET, SO_BUSY_POLL, 0) && option(socket_fd, IPPROTO_TCP, TCP_LINGER2, 9))
LOOK(stream_options, has_option(socket_fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, 7) && has_option(socket_fd, IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO) && has_option(socket_fd, IPPROTO_TCP, TCP_SYNCNT, 3) && has_option(socket_fd, IPPROTO_TCP, TCP_LINGER2, 9))
DO(datagram_options, datagram_fd = socket(AF_INET, SOCK_DGRAM, 0); return option(datagram_fd, SOL_SOCKET, SO_TIMESTAMP, 1) && option(datagram_fd, IPPROTO_IP, IP_MULTICAST_TTL, 9) && option(datagram_fd, IPPROTO_IP, IP_RECVTTL, 1))
LOOK(datagram_options, has_option(datagram_fd, SOL_SOCKET, SO_TIMESTAMP, 1) && has_option(datagram_fd, IPPROTO_IP, IP_MULTICAST_TTL, 9) && has_option(datagram_fd, IPPROTO_IP, IP_RECVTTL, 1))

static int kept_file(const char *path, int flags) { return open(path, O_RDWR | O_CREAT | flags, 0600); }
static int appended_fd, closed_fd, signal_fds[2], sealed_fd, copied_fd, large_fd, late_fd, epoll_fd, watched_fd, once_epoll_fd;
DO(append_mode, return (appended_fd = kept_file("/appended", O_APPEND | O_NONBLOCK)) >= 0) LOOK(append_mode, (fcntl(appended_fd, F_GETFL) & (O_APPEND | O_NONBLOCK)) == (O_APPEND | O_NONBLOCK))
DO(close_on_exec, return (closed_fd = kept_file("/closed", O_CLOEXEC)) >= 0) LOOK(close_on_exec, fcntl(closed_fd, F_GETFD) == FD_CLOEXEC)
DO(input_signal, return !pipe(signal_fds) && !fcntl(signal_fds[0], F_SETOWN, getpid()) && !fcntl(signal_fds[0], F_SETSIG, SIGURG)) LOOK(input_signal, fcntl(signal_fds[0], F_GETOWN) == getpid() && fcntl(signal_fds[0], F_GETSIG) == SIGURG)
DO(seals, return (sealed_fd = memfd_create("sealed", MFD_ALLOW_SEALING)) >= 0 && !ftruncate(sealed_fd, 4096) && !fcntl(sealed_fd, F_ADD_SEALS, F_SEAL_GROW)) LOOK(seals, fcntl(sealed_fd, F_GET_SEALS) == F_SEAL_GROW)
DO(shared_file, int fd = kept_file("/shared", 0); return (copied_fd = dup(fd)) >= 0) LOOK(shared_file, ({ off_t at = lseek(copied_fd - 1, 5, SEEK_CUR); at == lseek(copied_fd, 0, SEEK_CUR); }))
DO(large_counter, uint64_t n = 5ULL << 33; return (large_fd = eventfd(0, EFD_NONBLOCK)) >= 0 && write(large_fd, &n, 8) == 8) LOOK(large_counter, ({ uint64_t n = 0; read(large_fd, &n, 8) == 8 && n == 5ULL << 33 && write(large_fd, &n, 8) == 8; }))
DO(expired_timer, struct itimerspec t = { { 0, 0 }, { 1, 0 } }; uint64_t n; return (late_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK)) >= 0 && !timerfd_settime(late_fd, TFD_TIMER_ABSTIME, &t, NULL) && usleep(10000) == 0 && read(late_fd, &n, 8) == 8)
LOOK(expired_timer, ({ uint64_t n; read(late_fd, &n, 8) < 0 && errno == EAGAIN; }))
static int watched(int events) { int fd = epoll_create1(0); struct epoll_event e = { events, { .u64 = 77 } }; watched_fd = eventfd(1, 0); return epoll_ctl(fd, EPOLL_CTL_ADD, watched_fd, &e) ? -1 : fd; }
DO(epoll, return (epoll_fd = watched(EPOLLIN)) >= 0) LOOK(epoll, ({ struct epoll_event e; epoll_wait(epoll_fd, &e, 1, 0) == 1 && e.data.u64 == 77; }))
DO(epoll_once, struct epoll_event e; return (once_epoll_fd = watched(EPOLLIN | EPOLLONESHOT)) >= 0 && epoll_wait(once_epoll_fd, &e, 1, 0) == 1)
LOOK(epoll_once, ({ char p[40], b[400] = ""; snprintf(p, sizeof p, "/proc/self/fdinfo/%d", once_epoll_fd); int f = open(p, O_RDONLY); need(read(f, b, 399) > 0, p); close(f); strstr(b, "events: 40000000") != NULL; }))

DO(attributes, close(creat("/scratch/named", 0600)); return !setxattr("/scratch/named", "user.state", "kept", 4, 0) && !setxattr("/scratch", "user.state", "kept", 4, 0))
LOOK(attributes, ({ char v[9]; getxattr("/scratch/named", "user.state", v, 9) == 4 && getxattr("/scratch", "user.state", v, 9) == 4; }))

/* Processes and signals */
static int ended_child, unusual_child;
DO(waiting_signal, sigset_t s; sigemptyset(&s); sigaddset(&s, SIGUSR1); return !pthread_sigmask(SIG_BLOCK, &s, NULL) && !raise(SIGUSR1)) LOOK(waiting_signal, ({ sigset_t s; sigpending(&s); sigismember(&s, SIGUSR1); }))
DO(ended_child, ended_child = fork(); if (!ended_child) _exit(200); usleep(20000); return ended_child > 0)
LOOK(ended_child, ({ siginfo_t i = { 0 }; !waitid(P_PID, ended_child, &i, WEXITED | WNOHANG | WNOWAIT) && i.si_status == 200; }))
DO(unusual_child, unusual_child = syscall(SYS_clone, SIGURG, 0, 0, 0, 0); if (!unusual_child) for (;;) pause(); return unusual_child > 0)
LOOK(unusual_child, ({ char p[40], b[600] = "", *w; snprintf(p, sizeof p, "/proc/%d/stat", unusual_child); int f = open(p, O_RDONLY); need(read(f, b, 599) > 0, p); close(f); w = strrchr(b, ')'); for (int i = 2; i < 38 && w; i++) w = strchr(w + 1, ' '); w && atoi(w) == SIGURG; }))
DO(memory_policy, unsigned long nodes = 1; return !syscall(SYS_set_mempolicy, 1, &nodes, 64)) LOOK(memory_policy, ({ int mode = 0; syscall(SYS_get_mempolicy, &mode, NULL, 0, NULL, 0); mode == 1; }))

/* Memory */
static int has_flag(const char *area, const char *flag)
{
    char line[400], range[40], words[10];
    int is_area = 0, found = 0;
    snprintf(range, sizeof range, "%lx-", (long)area), snprintf(words, sizeof words, " %s", flag);
    FILE *smaps = fopen("/proc/self/smaps", "r");
    while (fgets(line, sizeof line, smaps)) {
        if (line[0] < 'A' || line[0] > 'Z')
            is_area = !strncmp(line, range, strlen(range));
        if (is_area && !strncmp(line, "VmFlags:", 8))
            found = strstr(line, words) != NULL;
    }
    fclose(smaps);
    return found;
}
/* Pages around each are of another kind, so none is joined with a neighbour. */
static char *area(int flags)
{
    char *around = mmap(NULL, 3 << 16, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return mmap(around + (1 << 16), 1 << 16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | flags, -1, 0);
}
#define MAPPED(name, flag, flags, ...) static char *area_##name; \
    static int do_##name(void) { char *a = area_##name = area(flags); return a != MAP_FAILED && memset(a, 1, 1 << 16) && !(__VA_ARGS__); } \
    static int look_##name(void) { return has_flag(area_##name, flag); }
MAPPED(locked, "lo", 0, mlock(a, 1 << 16)) MAPPED(locked_on_use, "lf", 0, mlock2(a, 1 << 16, MLOCK_ONFAULT))
MAPPED(not_forked, "dc", 0, madvise(a, 1 << 16, MADV_DONTFORK)) MAPPED(not_dumped, "dd", 0, madvise(a, 1 << 16, MADV_DONTDUMP))
MAPPED(wiped_on_fork, "wf", 0, madvise(a, 1 << 16, MADV_WIPEONFORK)) MAPPED(huge, "hg", 0, madvise(a, 1 << 16, MADV_HUGEPAGE))
MAPPED(not_huge, "nh", 0, madvise(a, 1 << 16, MADV_NOHUGEPAGE)) MAPPED(in_order, "sr", 0, madvise(a, 1 << 16, MADV_SEQUENTIAL))
MAPPED(in_no_order, "rr", 0, madvise(a, 1 << 16, MADV_RANDOM)) MAPPED(merged, "mg", 0, madvise(a, 1 << 16, MADV_MERGEABLE))
MAPPED(grows_down, "gd", MAP_GROWSDOWN, 0) MAPPED(not_reserved, "nr", MAP_NORESERVE, 0)
MAPPED(sealed, "sl", 0, syscall(462, a, 1 << 16, 0))

/* Children that are in a call which no signal ends, and which ends them */
static pid_t waiting[4];
static void wait_in(int number)
{
    struct timespec far = { .tv_sec = 1000000 };
    int word = 0;
    switch (number) {
    case 0: poll(NULL, 0, -1); break;
    case 1: poll(NULL, 0, 1000000000); break;
    case 2: syscall(SYS_nanosleep, &far, NULL); break;
    case 3: syscall(SYS_futex, &word, FUTEX_WAIT, 0, &far); break;
    }
    _exit(1);
}
static int do_waits(void)
{
    for (int i = 0; i < 4; i++)
        if (!(waiting[i] = fork()))
            wait_in(i);
    return waiting[3] > 0;
}
static int look_waits(void)
{
    for (int i = 0; i < 4; i++)
        if (waitpid(waiting[i], NULL, WNOHANG))
            return 0;
    return 1;
}

/* Of one thread alone: the same, in a thread */
#define THREAD(name) static struct worker *worker_##name; \
    static int do_thread_##name(void) { worker_##name = new_worker(); return tell(worker_##name, do_##name); } \
    static int look_thread_##name(void) { return tell(worker_##name, look_##name); }
THREAD(affinity) THREAD(batch) THREAD(nice) THREAD(slice) THREAD(timer_slack) THREAD(io_priority) THREAD(blocked_signal) THREAD(idle)
DO(own_directory, return !unshare(CLONE_FS) && !chdir("/proc")) LOOK(own_directory, ({ char d[99]; getcwd(d, 99) && !strcmp(d, "/proc"); }))
DO(own_files, return !unshare(CLONE_FILES) && dup2(1, 77) == 77) LOOK(own_files, fcntl(77, F_GETFD) >= 0)
THREAD(own_directory) THREAD(own_files) THREAD(personality) THREAD(waiting_signal)

#define STATE(name) { #name, do_##name, look_##name }
static const struct { const char *name; int (*make)(void), (*look)(void); } STATES[] = {
    STATE(affinity), STATE(nice), STATE(batch), STATE(idle), STATE(reset_on_fork), STATE(slice), STATE(io_priority), STATE(timer_slack),
    STATE(coredump_filter), STATE(oom_score_adj), STATE(open_files_limit), STATE(core_limit), STATE(stack_limit), STATE(cpu_limit),
    STATE(personality), STATE(umask), STATE(ignored_signal), STATE(blocked_signal), STATE(no_new_privs), STATE(not_dumpable),
    STATE(subreaper), STATE(death_signal), STATE(no_huge_pages), STATE(keep_capabilities), STATE(thread_name), STATE(groups), STATE(no_groups),
    STATE(event_counter), STATE(semaphore), STATE(timer_descriptor), STATE(posix_timer), STATE(interval_timer), STATE(watch), STATE(watch_once),
    STATE(pipe_size), STATE(stream_options), STATE(datagram_options), STATE(locked), STATE(not_forked), STATE(not_dumped),
    STATE(append_mode), STATE(close_on_exec), STATE(input_signal), STATE(seals), STATE(shared_file), STATE(large_counter),
    STATE(expired_timer), STATE(epoll), STATE(epoll_once), STATE(attributes), STATE(waiting_signal), STATE(waits), STATE(ended_child), STATE(unusual_child), STATE(memory_policy),
    STATE(locked_on_use), STATE(wiped_on_fork), STATE(huge), STATE(not_huge), STATE(in_order), STATE(in_no_order), STATE(merged), STATE(grows_down),
    STATE(not_reserved), STATE(sealed), STATE(thread_personality), STATE(thread_waiting_signal),
    STATE(thread_affinity), STATE(thread_batch), STATE(thread_nice), STATE(thread_slice), STATE(thread_timer_slack), STATE(thread_io_priority),
    STATE(thread_blocked_signal), STATE(thread_idle), STATE(thread_own_directory), STATE(thread_own_files),
};
#define COUNT (sizeof STATES / sizeof *STATES)

int main(int argc, char **argv)
{
    int is_in[COUNT] = { 0 };
    if (argc == 2 && !strcmp(argv[1], "list")) {
        for (size_t i = 0; i < COUNT; i++)
            puts(STATES[i].name);
        return 0;
    }
    for (int word = 1; word < argc; word++)
        for (size_t i = 0; i < COUNT; i++)
            if (!strcmp(argv[word], STATES[i].name))
                is_in[i] = 1, need(STATES[i].make(), STATES[i].name);
    for (unsigned count = 1;; count++, usleep(200000)) {
        int is_good = 1;
        for (size_t i = 0; i < COUNT; i++)
            if (is_in[i] && !STATES[i].look())
                printf("lost %s\n", STATES[i].name), is_good = 0;
        printf("count %u checksum %s\n", count, is_good ? "ok" : "lost");
        fflush(stdout);
    }
}
