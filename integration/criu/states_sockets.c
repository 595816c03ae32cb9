/* The states of sockets, pipes and terminals; a part of states.c. */

static void lo_up(void)
{
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int sock = socket(AF_INET, SOCK_DGRAM, 0);
    ioctl(sock, SIOCSIFFLAGS, &request);
    close(sock);
}
static Look bound_elsewhere(int option)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(7001), .sin_addr.s_addr = inet_addr("10.1.2.3")};
    lo_up();
    fd = socket(AF_INET, SOCK_STREAM, 0);
    need(!setsockopt(fd, IPPROTO_IP, option, &(int){1}, sizeof(int)), "option");
    need(!bind(fd, (struct sockaddr *)&to, sizeof to) && !listen(fd, 1), "bind");
    return is_open;
}
static Look bound_freely(void) { return bound_elsewhere(15 /* IP_FREEBIND */); }
static Look bound_transparently(void) { return bound_elsewhere(19 /* IP_TRANSPARENT */); }
static Look bound_freely_6(void)
{
    struct sockaddr_in6 to = {.sin6_family = AF_INET6, .sin6_port = htons(7001)};
    inet_pton(AF_INET6, "fd77::9", &to.sin6_addr);
    lo_up();
    fd = socket(AF_INET6, SOCK_STREAM, 0);
    need(!setsockopt(fd, IPPROTO_IPV6, 78 /* IPV6_FREEBIND */, &(int){1}, sizeof(int)), "option");
    need(!bind(fd, (struct sockaddr *)&to, sizeof to) && !listen(fd, 1), "bind");
    return is_open;
}
static Look sends_to_all(void)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(7002), .sin_addr.s_addr = inet_addr("127.255.255.255")};
    lo_up();
    fd = socket(AF_INET, SOCK_DGRAM, 0);
    need(!setsockopt(fd, SOL_SOCKET, SO_BROADCAST, &(int){1}, sizeof(int)), "SO_BROADCAST");
    need(!connect(fd, (struct sockaddr *)&to, sizeof to), "connect");
    return is_open;
}
static Look link_local(int is_connected)
{
    struct sockaddr_in6 to = {.sin6_family = AF_INET6, .sin6_port = htons(7003), .sin6_scope_id = if_nametoindex("eth0")};
    inet_pton(AF_INET6, is_connected ? "fe80::1234" : "fe80::77", &to.sin6_addr);
    lo_up();
    fd = socket(AF_INET6, SOCK_DGRAM, 0);
    need(!(is_connected ? connect : bind)(fd, (struct sockaddr *)&to, sizeof to), "fe80::");
    return is_open;
}
static Look sends_to_link_local(void) { return link_local(1); }
static Look bound_to_link_local(void) { return link_local(0); }
static Look unix_at(const char *path)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    snprintf(at.sun_path, sizeof at.sun_path, "%s", path);
    fd = socket(AF_UNIX, SOCK_STREAM, 0);
    need(!bind(fd, (struct sockaddr *)&at, sizeof at) && !listen(fd, 1), path);
    return is_open;
}
static Look socket_of_a_file(void) { return unix_at(below("socket")); }
static Look socket_of_a_deleted_file(void)
{
    unix_at(below("socket"));
    need(!unlink(below("socket")), "unlink");
    return is_open;
}
static Look socket_of_a_deleted_directory(void)
{
    need(!mkdir(below("inner"), 0700), "mkdir");
    unix_at(below("inner/socket"));
    need(!unlink(below("inner/socket")) && !rmdir(below("inner")), "rmdir");
    return is_open;
}
static Look socket_on_read_only(int flags)
{
    make_tmpfs(here);
    unix_at(below("socket"));
    need(!mount(NULL, here, NULL, MS_REMOUNT | (unsigned long)flags | MS_RDONLY, NULL), "remount");
    return is_open;
}
static Look socket_on_read_only_mount(void) { return socket_on_read_only(MS_BIND); }
static Look socket_on_read_only_file_system(void) { return socket_on_read_only(0); }
static Look socket_of_a_lost_network(void) /* in which no process is any longer */
{
    int own = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    need(own >= 0 && !unshare(CLONE_NEWNET), "unshare");
    fd = socket(AF_UNIX, SOCK_STREAM, 0);
    need(fd >= 0 && !setns(own, CLONE_NEWNET), "setns");
    close(own);
    return is_open;
}
static int datagram_waits(void)
{
    char c = 0;
    return recv(fd, &c, 1, MSG_PEEK | MSG_DONTWAIT) == 1 && c == 'x';
}
static Look unread_datagram(void)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(7004), .sin_addr.s_addr = inet_addr("127.0.0.1")};
    lo_up();
    fd = socket(AF_INET, SOCK_DGRAM, 0);
    need(!bind(fd, (struct sockaddr *)&to, sizeof to), "bind");
    need(sendto(fd, "x", 1, 0, (struct sockaddr *)&to, sizeof to) == 1, "sendto");
    return datagram_waits;
}
static Look unbound_netlink(void)
{
    fd = socket(AF_NETLINK, SOCK_RAW, 0);
    return is_open;
}
static Look groups_without_port(void)
{
    fd = socket(AF_NETLINK, SOCK_RAW, 0);
    need(!setsockopt(fd, 270, 1 /* NETLINK_ADD_MEMBERSHIP */, &(int){1}, sizeof(int)), "membership");
    return is_open;
}
static Look packet_socket(void)
{
    fd = socket(AF_PACKET, SOCK_RAW, 0);
    need(fd >= 0, "AF_PACKET");
    return is_open;
}
static Look raw_socket(void)
{
    fd = socket(AF_INET, SOCK_RAW, IPPROTO_ICMP);
    need(fd >= 0, "SOCK_RAW");
    return is_open;
}
static void connect_both(int port) /* fd and other are the ends */
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = inet_addr("127.0.0.1")};
    lo_up();
    int listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    need(!bind(listening, (struct sockaddr *)&to, sizeof to) && !listen(listening, 1), "listen");
    fd = socket(AF_INET, SOCK_STREAM, 0);
    need(!connect(fd, (struct sockaddr *)&to, sizeof to) && (other = accept(listening, NULL, NULL)) >= 0, "connect");
    close(listening);
}
static int is_notified_in_order(void) /* of sends without a copy: they are numbered */
{
    static uint32_t number;
    char space[256];
    struct msghdr message = {.msg_control = space, .msg_controllen = sizeof space};
    if (send(fd, "x", 1, 0x4000000 /* MSG_ZEROCOPY */) != 1 || recvmsg(fd, &message, MSG_ERRQUEUE) < 0)
        return 0;
    struct sock_extended_err error;
    memcpy(&error, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof error);
    return error.ee_data == number++;
}
static Look zero_copy(void)
{
    connect_both(7005);
    need(!setsockopt(fd, SOL_SOCKET, 60 /* SO_ZEROCOPY */, &(int){1}, sizeof(int)), "SO_ZEROCOPY");
    return is_notified_in_order;
}
static int urgent_waits(void)
{
    char c = 0;
    return recv(other, &c, 1, MSG_OOB | MSG_PEEK) == 1 && c == 'x';
}
static Look urgent_byte(void)
{
    connect_both(7006);
    need(send(fd, "x", 1, MSG_OOB) == 1, "MSG_OOB");
    return urgent_waits;
}
static int other_says_x(void)
{
    char c = 0;
    return send(other, "x", 1, MSG_NOSIGNAL) == 1 && recv(fd, &c, 1, 0) == 1 && c == 'x';
}
static Look half_open_connection(void)
{
    connect_both(7007);
    need(!shutdown(fd, SHUT_WR), "shutdown");
    return other_says_x;
}
static int both_wait(void)
{
    static int are_lost;
    char c = 0;
    if (recv(other, &c, 1, MSG_DONTWAIT) != 0 || recv(other, &c, 1, MSG_DONTWAIT) != 1 || c != 'x')
        are_lost = 1;
    send(fd, "", 0, 0), send(fd, "x", 1, 0);
    return !are_lost;
}
static Look zero_length_datagram(void) /* before another one */
{
    int ends[2];
    need(!socketpair(AF_UNIX, SOCK_DGRAM, 0, ends), "socketpair");
    fd = ends[0], other = ends[1];
    send(fd, "", 0, 0), send(fd, "x", 1, 0);
    return both_wait;
}
static Look abstract_socket(void)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX, .sun_path = "\0abstract"};
    fd = socket(AF_UNIX, SOCK_STREAM, 0);
    need(!bind(fd, (struct sockaddr *)&at, sizeof(sa_family_t) + 9) && !listen(fd, 1), "bind");
    return is_open;
}

/* ---- descriptors on their way ---- */

static void send_descriptor(int sent)
{
    int ends[2];
    char space[CMSG_SPACE(sizeof(int))];
    struct iovec data = {"x", 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET, head->cmsg_type = SCM_RIGHTS, head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &sent, sizeof sent);
    need(sent >= 0 && !socketpair(AF_UNIX, SOCK_STREAM, 0, ends) && sendmsg(ends[1], &message, 0) == 1, "SCM_RIGHTS");
    close(sent);
    fd = ends[0], other = ends[1];
}
static int descriptor_waits(void)
{
    char space[CMSG_SPACE(sizeof(int))], c = 0;
    struct iovec data = {&c, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    if (recvmsg(fd, &message, MSG_PEEK | MSG_DONTWAIT) != 1 || !CMSG_FIRSTHDR(&message))
        return 0;
    int got;
    memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof got);
    close(got);
    return 1;
}
static Look file_on_its_way(void)
{
    send_descriptor(make_file(below("file"), "x"));
    return descriptor_waits;
}
static Look memfd_on_its_way(void)
{
    send_descriptor(memfd_create("way", 0));
    return descriptor_waits;
}
static Look user_faults_on_their_way(void)
{
    send_descriptor((int)syscall(SYS_userfaultfd, O_NONBLOCK));
    return descriptor_waits;
}
static Look terminal_on_its_way(void)
{
    terminal_pair();
    int master = fd;
    send_descriptor(other);
    other = master;
    return descriptor_waits;
}
static Look pidfd_on_its_way(void)
{
    send_descriptor((int)syscall(SYS_pidfd_open, getpid(), 0));
    return descriptor_waits;
}

/* ---- pipes ---- */

static int is_not_at_its_end(void) /* a pipe whose writer is elsewhere */
{
    char c;
    return read(fd, &c, 1) < 0 && errno == EAGAIN;
}
static Look pipe_of_exec(void)
{
    char path[40];
    snprintf(path, sizeof path, "/proc/%d/fd/3", stranger());
    need((fd = open(path, O_RDONLY | O_NONBLOCK)) >= 0, path);
    return is_not_at_its_end;
}
static Look ended_pipe(void) /* with data, and without a writer */
{
    int ends[2];
    need(!pipe(ends) && write(ends[1], "x", 1) == 1, "pipe");
    close(ends[1]);
    fd = ends[0];
    return is_open;
}
static int is_broken(void)
{
    signal(SIGPIPE, SIG_IGN);
    return write(fd, "x", 1) < 0 && errno == EPIPE;
}
static Look broken_pipe(void)
{
    int ends[2];
    need(!pipe(ends), "pipe");
    close(ends[0]);
    fd = ends[1];
    return is_broken;
}
static int holds_a_mebibyte(void)
{
    int size = 0;
    return fcntl(fd, F_GETPIPE_SZ) == 1 << 20 && !ioctl(fd, FIONREAD, &size) && size == 1 << 20;
}
static Look large_pipe(void)
{
    int ends[2];
    need(!pipe(ends) && fcntl(ends[1], F_SETPIPE_SZ, 1 << 20) > 0, "F_SETPIPE_SZ");
    for (int i = 0; i < 256; i++)
        need(write(ends[1], memory = calloc(1, PAGE), PAGE) == PAGE, "write");
    fd = ends[0], other = ends[1];
    return holds_a_mebibyte;
}
static Look full_pipe(void) /* of many small writes, which take a page each */
{
    int ends[2];
    need(!pipe2(ends, O_NONBLOCK), "pipe");
    while (write(ends[1], "x", 1) == 1 && fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0)
        ;
    fd = ends[0], other = ends[1];
    return is_open;
}

/* ---- terminals ---- */

static Look with_own_terminal(int keeps_pair)
{
    setsid();
    terminal_pair();
    need(!ioctl(other, TIOCSCTTY, 0), "TIOCSCTTY");
    int named = open("/dev/tty", O_RDWR);
    if (named < 0) {
        need(!mknod("/dev/tty", S_IFCHR | 0666, 5 << 8), "mknod");
        named = open("/dev/tty", O_RDWR);
    }
    need(named >= 0, "/dev/tty");
    if (!keeps_pair)
        close(other);
    return is_open;
}
static Look terminal_of_its_own(void) { return with_own_terminal(1); }
static Look terminal_by_name_only(void) { return with_own_terminal(0); }

/* ---- limits of descriptors ---- */

static Look descriptors_left(pid_t pid, rlim_t number)
{
    int next = dup(0);
    close(next);
    struct rlimit limit = {pid ? 3 + number : (rlim_t)next + number, 4096};
    need(!prlimit(pid, RLIMIT_NOFILE, &limit, NULL), "prlimit");
    return yes;
}
static Look no_descriptor_left(void) { return descriptors_left(0, 0); }
static Look one_descriptor_left(void) { return descriptors_left(0, 1); }
static Look two_descriptors_left(void) { return descriptors_left(0, 2); }
static Look three_descriptors_left(void) { return descriptors_left(0, 3); }
static Look first_process_with_one_descriptor(void) { return descriptors_left(1, 1); }
static Look first_process_with_two_descriptors(void) { return descriptors_left(1, 2); }

static Look first_process_with_three_descriptors(void) { return descriptors_left(1, 3); }
static Look first_process_with_four_descriptors(void) { return descriptors_left(1, 4); }

/* ---- others ---- */

static aio_context_t context;
static uint64_t polls;
static void poll_asynchronously(void)
{
    static struct iocb block, *blocks[] = {&block};
    block = (struct iocb){.aio_lio_opcode = 5 /* IOCB_CMD_POLL */, .aio_fildes = (uint32_t)fd, .aio_buf = 1 /* POLLIN */};
    block.aio_data = ++polls;
    need(syscall(SYS_io_submit, context, 1L, blocks) == 1, "io_submit");
}
static int is_told(void)
{
    struct io_event event;
    struct timespec second = {.tv_sec = 1};
    char c;
    if (write(other, "x", 1) != 1 || syscall(SYS_io_getevents, context, 1L, 1L, &event, &second) != 1 ||
        event.data != polls || read(fd, &c, 1) != 1)
        return 0;
    poll_asynchronously();
    return 1;
}
static Look polling_asynchronously(void) /* a pipe: it waits until something is written */
{
    int ends[2];
    need(!pipe(ends) && !syscall(SYS_io_setup, 8, &context), "io_setup");
    fd = ends[0], other = ends[1];
    poll_asynchronously();
    return is_told;
}
static int is_large(void)
{
    uint64_t value = 0;
    if (read(fd, &value, 8) != 8)
        return 0;
    need(write(fd, &value, 8) == 8, "write");
    return value == 5000000000;
}
static Look large_eventfd(void)
{
    uint64_t value = 5000000000;
    need((fd = eventfd(0, EFD_NONBLOCK)) >= 0 && write(fd, &value, 8) == 8, "eventfd");
    return is_large;
}
static void *go_elsewhere(void *unused)
{
    need(!unshare(CLONE_FS) && !chdir("/proc"), "unshare");
    ready();
    stay();
    return unused;
}
static Look thread_elsewhere(void)
{
    static pthread_t thread;
    need(!pthread_create(&thread, NULL, go_elsewhere, NULL), "pthread_create");
    wait_until_ready();
    return yes;
}
static void *leave_network(void *unused)
{
    need(!unshare(CLONE_NEWNET), "unshare");
    ready();
    stay();
    return unused;
}
static Look network_of_a_thread(void)
{
    static pthread_t thread;
    need(!pthread_create(&thread, NULL, leave_network, NULL), "pthread_create");
    wait_until_ready();
    return yes;
}
