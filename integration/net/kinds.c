/* A process with a socket of each kind, and the stranger to whom they are connected.
 *
 * The stranger's ports: 9000 echoes, 9001 closes at once, 9002 never reads, 9003 sends 200,000 bytes, 9004 closes when its
 * peer does, 9005 has no room for one connection more, 9006 sends 100 bytes, an urgent one, and 100 more; a datagram to
 * 9000 is echoed, one to 9005 says to which of the sender's ports to connect. `kinds` prints `ready` when it holds them all; on USR1 it uses each and prints `kind NAME: ...`
 * with what every call returned, and then `used`.
 */
#include "peer.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_packet.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netinet/ip_icmp.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { ECHO = 9000, CLOSES, DEAF, SENDS, PATIENT, FULL, URGES, OWN_PORT = 9100, QUEUED = 200000, WAIT_MS = 20000, AWHILE_MS = 200, URGED = 100 };

/* ---- the stranger ---- */

struct service {
    const char *address;
    int port;
};

static void *converse(void *argument)
{
    struct service *one = argument;
    static char buffer[QUEUED];
    char echoed[4096];
    ssize_t got;
    int fd = (int)(one->port >> 16), port = one->port & 0xffff;
    if (port == SENDS && send(fd, buffer, sizeof buffer, MSG_NOSIGNAL) < 0)
        fail("send");
    if (port == URGES && (send(fd, buffer, URGED, 0) < 0 || send(fd, "!", 1, MSG_OOB) < 0 || send(fd, buffer, URGED, 0) < 0))
        fail("urge");
    if (port != CLOSES)
        while ((got = recv(fd, echoed, sizeof echoed, 0)) > 0)
            if (port == ECHO && send(fd, echoed, (size_t)got, MSG_NOSIGNAL) < 0)
                break;
    close(fd);
    free(one);
    return NULL;
}

static void start(void *(*run)(void *), const char *address, int port)
{
    pthread_t thread;
    struct service *service = malloc(sizeof *service);
    if (!service)
        fail("malloc");
    *service = (struct service){address, port};
    if (pthread_create(&thread, NULL, run, service))
        fail("pthread_create");
}

static void *listen_at(void *argument)
{
    struct service *service = argument;
    int port = service->port, fd = make_socket(service->address, port, SOCK_STREAM, BIND | LISTEN);
    if (port == FULL) {
        listen(fd, 0);
        make_socket(service->address, port, SOCK_STREAM, CONNECT);
    }
    while (port != FULL) {
        int one = accept(fd, NULL, NULL);
        if (one >= 0 && port != DEAF)
            start(converse, NULL, one << 16 | port);
    }
    return NULL;
}

static void *datagrams_at(void *argument)
{
    struct service *service = argument;
    int fd = make_socket(service->address, service->port, SOCK_DGRAM, BIND);
    for (;;) {
        char buffer[64] = "", name[INET6_ADDRSTRLEN];
        struct sockaddr_storage from;
        socklen_t length = sizeof from;
        if (recvfrom(fd, buffer, sizeof buffer - 1, 0, (void *)&from, &length) < 0)
            continue;
        if (service->port == ECHO) {
            sendto(fd, buffer, strlen(buffer), 0, (void *)&from, length);
        } else {
            inet_ntop(AF_INET, &((struct sockaddr_in *)(void *)&from)->sin_addr, name, sizeof name);
            make_socket(name, atoi(buffer), SOCK_STREAM, CONNECT);
        }
    }
    return NULL;
}

void stranger(char **addresses)
{
    for (; *addresses; addresses++) {
        for (int port = ECHO; port <= URGES; port++)
            start(listen_at, *addresses, port);
        if (!strchr(*addresses, ':')) {
            start(datagrams_at, *addresses, ECHO);
            start(datagrams_at, *addresses, FULL);
        }
    }
    say("ready");
    for (;;)
        pause();
}

/* ---- how each kind is made ---- */

static const char *own, *peer, *own6, *peer6;
static int beside; /* the other end of those that have both ends here */

static int tcp_state(int fd)
{
    struct tcp_info info;
    socklen_t length = sizeof info;
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) ? -1 : info.tcpi_state;
}

static int waiting(int fd, unsigned long what)
{
    int bytes = -1;
    ioctl(fd, what, &bytes);
    return bytes;
}

static void until(int fd, int state)
{
    while (tcp_state(fd) != state)
        usleep(10000);
}

static int connected(int port) { return make_socket(peer, port, SOCK_STREAM, CONNECT); }
static int listening(const char *address, int port) { return make_socket(address, port, SOCK_STREAM, BIND | LISTEN); }

static int to_here(const char *address, int port)
{
    int listener = listening(address, port), fd = make_socket(address, port, SOCK_STREAM, CONNECT);
    beside = accept(listener, NULL, NULL);
    return fd;
}

static int make_listen(void) { return listening(own, OWN_PORT); }
static int make_listen_any(void) { return listening("0.0.0.0", OWN_PORT + 1); }
static int make_listen6(void) { return listening(own6, OWN_PORT); }
static int make_established(void) { return connected(ECHO); }
static int make_established6(void) { return make_socket(peer6, ECHO, SOCK_STREAM, CONNECT); }
static int make_loopback(void) { return to_here("127.0.0.1", OWN_PORT + 2); }
static int make_own_address(void) { return to_here(own, OWN_PORT + 3); }
static int make_bound(void) { return make_socket(own, OWN_PORT + 4, SOCK_STREAM, BIND); }
static int make_unbound(void) { return socket(AF_INET, SOCK_STREAM, 0); }
static int make_udp(void) { return make_socket(own, OWN_PORT, SOCK_DGRAM, BIND); }
static int make_udp_connected(void) { return make_socket(peer, ECHO, SOCK_DGRAM, CONNECT); }
static int make_mptcp(void) { return socket(AF_INET, SOCK_STREAM, IPPROTO_MPTCP); }
static int make_raw_multipath(void) { return socket(AF_INET, SOCK_RAW, IPPROTO_MPTCP); } /* any protocol has raw sockets */
static int make_raw_tcp(void) { return socket(AF_INET, SOCK_RAW, IPPROTO_TCP); }
static int make_raw_udp(void) { return socket(AF_INET, SOCK_RAW, IPPROTO_UDP); }
static int make_raw_icmp(void) { return socket(AF_INET, SOCK_RAW, IPPROTO_ICMP); }

static int make_ping(void) { return socket(AF_INET, SOCK_DGRAM, IPPROTO_ICMP); }

static int make_mapped(void)
{
    char name[64];
    snprintf(name, sizeof name, "::ffff:%s", peer);
    return make_socket(name, ECHO, SOCK_STREAM, CONNECT);
}

static int make_listen_device(void)
{
    struct sockaddr_storage address;
    socklen_t length = address_of(own, OWN_PORT + 5, &address);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, "eth0", 4) || bind(fd, (void *)&address, length) || listen(fd, 8))
        fail("listen-device");
    return fd;
}

static int make_bound_device(void)
{
    struct sockaddr_storage address;
    socklen_t length = address_of(peer, ECHO, &address);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, "eth0", 4) || connect(fd, (void *)&address, length))
        fail("bound-device");
    return fd;
}

static int make_accept_queue(void)
{
    int fd = listening(own, OWN_PORT + 6), caller = make_socket(peer, FULL, SOCK_DGRAM, CONNECT);
    struct pollfd polled = {fd, POLLIN, 0};
    char port[8];
    snprintf(port, sizeof port, "%d", OWN_PORT + 6);
    if (send(caller, port, strlen(port), 0) < 0 || poll(&polled, 1, 30000) != 1)
        fail("accept-queue");
    close(caller);
    return fd;
}

static int make_close_wait(void)
{
    int fd = connected(CLOSES);
    until(fd, TCP_CLOSE_WAIT);
    return fd;
}

static int fill(int fd)
{
    static char buffer[65536];
    while (send(fd, buffer, sizeof buffer, MSG_DONTWAIT) > 0) {
    }
    return fd;
}

static int make_send_queue(void) { return fill(connected(DEAF)); }

static int make_fin_wait1(void)
{
    int fd = fill(connected(DEAF)); /* the end of its data finds no window */
    shutdown(fd, SHUT_WR);
    until(fd, TCP_FIN_WAIT1);
    return fd;
}

static int make_fin_wait2(void)
{
    int fd = connected(DEAF);
    shutdown(fd, SHUT_WR);
    until(fd, TCP_FIN_WAIT2);
    return fd;
}

static int make_syn_sent(void)
{
    struct sockaddr_storage address;
    socklen_t length = address_of(peer, FULL, &address);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (!connect(fd, (void *)&address, length) || errno != EINPROGRESS)
        fail("syn-sent");
    return fd;
}

static int make_receive_queue(void)
{
    int fd = connected(SENDS);
    for (int last = -1, now = 0; !now || now != last; last = now, now = waiting(fd, SIOCINQ))
        usleep(200000);
    return fd;
}

static int urged(int is_inline)
{
    int fd = connected(URGES);
    if (setsockopt(fd, SOL_SOCKET, SO_OOBINLINE, &is_inline, sizeof is_inline))
        fail("urged");
    while (waiting(fd, SIOCINQ) < URGED)
        usleep(20000);
    usleep(AWHILE_MS * 1000); /* for the rest */
    return fd;
}

static int make_urgent(void) { return urged(0); }
static int make_urgent_inline(void) { return urged(1); }

static int make_time_wait(void)
{
    int fd = connected(PATIENT);
    char byte;
    shutdown(fd, SHUT_WR);
    while (recv(fd, &byte, 1, 0) > 0) {
    }
    close(fd);
    return -1;
}

static int make_udp_queue(void)
{
    int fd = make_socket(own, OWN_PORT + 1, SOCK_DGRAM, BIND), sender = make_socket(own, OWN_PORT + 1, SOCK_DGRAM, CONNECT);
    send(sender, "x", 1, 0);
    close(sender);
    return fd;
}

static int make_pair(void)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends))
        fail("socketpair");
    beside = ends[1];
    return ends[0];
}

static int netlink(unsigned groups)
{
    struct sockaddr_nl address = {.nl_family = AF_NETLINK, .nl_groups = groups};
    int fd = socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE);
    if (bind(fd, (void *)&address, sizeof address))
        fail("netlink");
    return fd;
}

static int make_netlink(void) { return netlink(0); }
static int make_netlink_groups(void) { return netlink(RTMGRP_LINK); }

static int make_packet(void)
{
    struct sockaddr_ll address = {.sll_family = AF_PACKET, .sll_protocol = htons(3), .sll_ifindex = (int)if_nametoindex("eth0")};
    int fd = socket(AF_PACKET, SOCK_RAW, htons(3));
    if (bind(fd, (void *)&address, sizeof address))
        fail("packet");
    return fd;
}

static int make_multicast(void)
{
    struct ip_mreq group = {.imr_multiaddr.s_addr = inet_addr("239.1.2.3"), .imr_interface.s_addr = inet_addr(own)};
    int fd = make_socket("0.0.0.0", OWN_PORT + 2, SOCK_DGRAM, BIND);
    if (setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &group, sizeof group))
        fail("multicast");
    return fd;
}

static int make_options(void)
{
    int fd = connected(ECHO), timeout_ms = 30000, lowat = 65536, one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms);
    setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &lowat, sizeof lowat);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4))
        fail("options");
    return fd;
}

static int segment_bytes(int fd)
{
    struct tcp_info info;
    socklen_t length = sizeof info;
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) ? -1 : (int)info.tcpi_snd_mss;
}

static int segments_were, segments6_were;

static int make_segments(void)
{
    int fd = connected(ECHO);
    segments_were = segment_bytes(fd);
    return fd;
}

static int make_segments6(void)
{
    int fd = make_established6();
    segments6_were = segment_bytes(fd);
    return fd;
}

/* ---- how each is used ---- */

static void tell(const char *what, ssize_t result)
{
    if (result >= 0)
        printf(" %s=%zd", what, result);
    else
        printf(" %s=%s", what, errno == EAGAIN ? "nothing" : strerrorname_np(errno));
}

static void tell_name(const char *what, int fd, int (*get)(int, struct sockaddr *, socklen_t *))
{
    struct sockaddr_storage address = {0};
    socklen_t length = sizeof address;
    char name[INET6_ADDRSTRLEN];
    if (get(fd, (void *)&address, &length)) {
        tell(what, -1);
        return;
    }
    if (address.ss_family == AF_UNIX) {
        printf(" %s=-", what);
        return;
    }
    int is_six = address.ss_family == AF_INET6;
    struct sockaddr_in *four = (void *)&address;
    struct sockaddr_in6 *six = (void *)&address;
    inet_ntop(address.ss_family, is_six ? (void *)&six->sin6_addr : (void *)&four->sin_addr, name, sizeof name);
    printf(" %s=%s/%d", what, name, ntohs(four->sin_port));
}

static ssize_t receive_within(int ms, int fd, void *buffer, size_t size)
{
    struct pollfd polled = {fd, POLLIN, 0};
    poll(&polled, 1, ms);
    return recv(fd, buffer, size, MSG_DONTWAIT);
}

static ssize_t receive_soon(int fd, void *buffer, size_t size) { return receive_within(WAIT_MS, fd, buffer, size); }

static void use_stream(int fd)
{
    char buffer[16];
    tell_name("name", fd, getsockname);
    tell_name("peer", fd, getpeername);
    tell("send", send(fd, "hello", 5, MSG_NOSIGNAL | MSG_DONTWAIT));
    tell("recv", receive_soon(fd, buffer, sizeof buffer));
    tell("again", send(fd, "x", 1, MSG_NOSIGNAL | MSG_DONTWAIT));
}

/* One that has said that it sends no more, to a peer that says nothing. */
static void use_ended(int fd)
{
    char buffer[16];
    tell_name("name", fd, getsockname);
    tell("recv", receive_within(AWHILE_MS, fd, buffer, sizeof buffer));
    printf(" state=%d", tcp_state(fd));
}

static void use_both(int fd)
{
    char buffer[16];
    tell_name("name", fd, getsockname);
    tell("send", send(fd, "hello", 5, MSG_NOSIGNAL));
    tell("recv", receive_soon(beside, buffer, sizeof buffer));
    tell("back", send(beside, "hi", 2, MSG_NOSIGNAL));
    tell("recv", receive_soon(fd, buffer, sizeof buffer));
}

static void use_listener(int fd)
{
    struct pollfd polled = {fd, POLLIN, 0};
    tell_name("name", fd, getsockname);
    printf(" listens=%d waits=%d", tcp_state(fd) == TCP_LISTEN, poll(&polled, 1, 0));
}

static void use_name(int fd) { tell_name("name", fd, getsockname); }

static void use_queue(int fd)
{
    static char buffer[QUEUED];
    size_t all = 0;
    ssize_t got = 0;
    while (all < QUEUED && (got = receive_soon(fd, buffer, sizeof buffer)) > 0)
        all += (size_t)got;
    printf(" received=%zu", all);
    tell("then", all < QUEUED ? got : 0);
}

static void use_urgent(int fd)
{
    char buffer[3 * URGED];
    int all = 0;
    ssize_t got;
    while (all < 2 * URGED && (got = receive_soon(fd, buffer, sizeof buffer)) > 0)
        all += (int)got;
    printf(" received=%d", all);
}

static void use_unsent(int fd)
{
    printf(" unsent=%d", waiting(fd, SIOCOUTQ) > 0);
    tell("send", send(fd, "x", 1, MSG_NOSIGNAL | MSG_DONTWAIT));
}

static void use_datagrams(int fd)
{
    struct sockaddr_storage address;
    socklen_t length = address_of(peer, ECHO, &address);
    char buffer[16];
    tell_name("name", fd, getsockname);
    tell("queued", recv(fd, buffer, sizeof buffer, MSG_DONTWAIT));
    tell("send", sendto(fd, "hello", 5, 0, (void *)&address, length));
    tell("recv", receive_soon(fd, buffer, sizeof buffer));
}

static void use_connecting(int fd)
{
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    printf(" state=%d error=%s", tcp_state(fd), error ? strerrorname_np(error) : "0");
}

static void use_netlink(int fd)
{
    struct { struct nlmsghdr header; struct rtgenmsg body; } ask = {
        {sizeof ask, RTM_GETLINK, NLM_F_REQUEST | NLM_F_DUMP, 1, 0}, {AF_UNSPEC}};
    char buffer[8192];
    tell("send", send(fd, &ask, sizeof ask, 0));
    printf(" recv=%d", receive_soon(fd, buffer, sizeof buffer) > 0);
}

static void use_multicast(int fd)
{
    char line[256];
    int member = 0;
    FILE *file = fopen("/proc/self/net/igmp", "r");
    while (file && fgets(line, sizeof line, file))
        member |= strstr(line, "030201EF") != NULL;
    if (file)
        fclose(file);
    tell_name("name", fd, getsockname);
    printf(" member=%d", member);
}

static void use_options(int fd)
{
    int timeout_ms = -1, lowat = -1, no_delay = -1;
    char congestion[16] = "";
    socklen_t length = sizeof timeout_ms;
    getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, &length);
    getsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &lowat, &length);
    getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &no_delay, &length);
    length = sizeof congestion;
    getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, congestion, &length);
    printf(" user_timeout=%d notsent_lowat=%d congestion=%s nodelay=%d", timeout_ms, lowat, congestion, no_delay);
}

static void use_segments(int fd) { printf(" same=%d", segment_bytes(fd) == segments_were); }
static void use_segments6(int fd) { printf(" same=%d", segment_bytes(fd) == segments6_were); }

static void use_ping(int fd)
{
    struct sockaddr_storage address;
    socklen_t length = address_of(peer, 0, &address);
    struct icmphdr echo = {.type = ICMP_ECHO};
    char buffer[64];
    tell("send", sendto(fd, &echo, sizeof echo, 0, (void *)&address, length));
    tell("recv", receive_soon(fd, buffer, sizeof buffer));
}

static void use_nothing(int fd) { (void)fd; }

static const struct {
    const char *name;
    int (*make)(void);
    void (*use)(int);
} table[] = {
    {"listen", make_listen, use_listener},
    {"listen6", make_listen6, use_listener},
    {"listen-any", make_listen_any, use_listener},
    {"listen-device", make_listen_device, use_listener},
    {"accept-queue", make_accept_queue, use_listener},
    {"established", make_established, use_stream},
    {"established6", make_established6, use_stream},
    {"mapped", make_mapped, use_stream},
    {"loopback", make_loopback, use_both},
    {"own-address", make_own_address, use_both},
    {"bound-device", make_bound_device, use_stream},
    {"close-wait", make_close_wait, use_stream},
    {"fin-wait1", make_fin_wait1, use_ended},
    {"fin-wait2", make_fin_wait2, use_ended},
    {"syn-sent", make_syn_sent, use_connecting},
    {"time-wait", make_time_wait, use_nothing},
    {"receive-queue", make_receive_queue, use_queue},
    {"send-queue", make_send_queue, use_unsent},
    {"bound", make_bound, use_name},
    {"unbound", make_unbound, use_name},
    {"udp", make_udp, use_datagrams},
    {"udp-connected", make_udp_connected, use_datagrams},
    {"udp-queue", make_udp_queue, use_datagrams},
    {"unix-pair", make_pair, use_both},
    {"netlink", make_netlink, use_netlink},
    {"netlink-groups", make_netlink_groups, use_nothing},
    {"raw-icmp", make_raw_icmp, use_name},
    {"raw-tcp", make_raw_tcp, use_name},
    {"raw-udp", make_raw_udp, use_name},
    {"raw-multipath", make_raw_multipath, use_name},
    {"packet", make_packet, use_nothing},
    {"ping", make_ping, use_ping}, /* only if it is asked for: not everybody may have one */
    {"multicast", make_multicast, use_multicast},
    {"options", make_options, use_options},
    {"segments", make_segments, use_segments},
    {"segments6", make_segments6, use_segments6},
    {"urgent", make_urgent, use_urgent}, /* only if they are asked for: they are refused */
    {"urgent-inline", make_urgent_inline, use_urgent},
    {"mptcp", make_mptcp, use_nothing}, /* only if it is asked for: it cannot be dumped */
};
enum { ALL = sizeof table / sizeof *table };

static volatile sig_atomic_t asked;
static void on_usr1(int signal_number) { (void)signal_number; asked = 1; }

static int is_wanted(const char *name, char **names)
{
    if (!*names)
        return strcmp(name, "mptcp") && strcmp(name, "ping") && strncmp(name, "urgent", 6);
    while (*names && strcmp(name, *names))
        names++;
    return *names != NULL;
}

void hold_kinds(char **arguments)
{
    int fds[ALL], ends[ALL], held[ALL];
    own = arguments[0], peer = arguments[1], own6 = arguments[2], peer6 = arguments[3];
    signal(SIGUSR1, on_usr1);
    for (int i = 0; i < ALL; i++) {
        held[i] = is_wanted(table[i].name, arguments + 4);
        if (held[i])
            fds[i] = table[i].make(), ends[i] = beside;
        if (held[i] && fds[i] < 0 && table[i].make != make_time_wait)
            fail(table[i].name);
    }
    say("ready");
    for (;;) {
        while (!asked)
            usleep(20000);
        asked = 0;
        for (int i = 0; i < ALL; i++) {
            if (!held[i])
                continue;
            printf("kind %s:", table[i].name);
            beside = ends[i];
            table[i].use(fds[i]);
            say("%s", "");
        }
        say("used");
    }
}
