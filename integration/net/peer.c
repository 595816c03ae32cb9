/* The containers of the network tests: traffic that knows what it must be, and a process with a socket of each kind.
 *
 * peer pause                         just waits (a pod's sandbox)
 * peer server [-r KB] ADDRESS/PORT...  takes connections at each, and answers datagrams there
 * peer client [-k KEY] [-r KB] ADDRESS/PORT...  connects to each, with a key of its own from KEY on, and sends datagrams
 *      Both ends send without end, at random times and in random amounts, from an eighth of KB a millisecond to eight times
 *      that: each connection changes its pace now and then. Each byte is given by the key, the direction and its offset, so
 *      one that is lost, doubled, changed or moved is known at once. A socket that is not to block must not begin to.
 *      Prints every 100 ms (with more than 64 sockets, less often) `connection KEY sent N received N` and `datagrams N`, and `connection KEY silent N ms until S`
 *      (in s since 1970) after a longer wait than that for a byte of the peer's. What breaks is said once: `broken KEY: ...`.
 * peer asks ADDRESS/PORT             asks there and waits for the answer, over and over; prints what a client does
 * peer member [-k KEY] [-r KB] [-m MB] [-o FILE] OWN/PORT ADDRESS/PORT...  is a server at the first address, and a client
 *      of the others; holds so many MB of memory. With FILE it says nothing but writes that anew each time: a log that
 *      grows while podman archives it makes an archive that ends early (podman < 6, `--leave-running`).
 * peer stranger ADDRESS...           what `kinds` connects to (kinds.c)
 * peer kinds OWN PEER OWN6 PEER6 [KIND...]   holds sockets (kinds.c)
 * peer many COUNT ADDRESS            holds COUNT bound datagram sockets, then prints `ready`
 * peer rank RANK SIZE STEPS PAUSE_MS OWN PORT NEXT PORT  trains (rank.c)
 * peer beside PROGRAM WORD ROLE...   runs a program with one word, and is what ROLE says at the same time
 */
#include "peer.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 4096, FEW = 64, CHUNK = 16384, REPORT_MS = 100, BURSTS = 16 /* at one pace */, ASKED = 1000 };

struct connection {
    int fd;
    unsigned key;        /* 0: not told yet */
    int is_server;
    uint64_t sent, received;
    double heard_ms;     /* when its last byte came */
    double next_ms;      /* when to send again */
    double pace;         /* times `kb_per_ms` */
    size_t left;         /* how much then */
    const char *broken;  /* why */
};

static struct pollfd polled[MOST];
static struct connection connections[MOST]; /* fd of `polled`; those that listen and datagrams have none */
static enum { LISTENS, ANSWERS, ASKS, CONNECTED } kinds[MOST];
static int count;
static unsigned long datagrams;
static double kb_per_ms = 1;
static const char *file; /* that reports are written to */

static double clock_ms(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static double now_ms(void)
{
    return clock_ms(CLOCK_MONOTONIC);
}

void say(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
    fflush(stdout);
}

void fail(const char *what)
{
    say("failed: %s: %s", what, strerror(errno));
    exit(1);
}

socklen_t address_of(const char *text, int port, struct sockaddr_storage *address)
{
    struct sockaddr_in *four = (void *)address;
    struct sockaddr_in6 *six = (void *)address;
    memset(address, 0, sizeof *address);
    if (inet_pton(AF_INET, text, &four->sin_addr) == 1) {
        four->sin_family = AF_INET;
        four->sin_port = htons((uint16_t)port);
        return sizeof *four;
    }
    if (inet_pton(AF_INET6, text, &six->sin6_addr) != 1)
        fail(text);
    six->sin6_family = AF_INET6;
    six->sin6_port = htons((uint16_t)port);
    return sizeof *six;
}

int make_socket(const char *text, int port, int type, int flags)
{
    struct sockaddr_storage address;
    socklen_t length = address_of(text, port, &address);
    int one = 1, fd = socket(address.ss_family, type | SOCK_CLOEXEC, 0);
    if (fd < 0)
        fail("socket");
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (flags & BIND && bind(fd, (void *)&address, length))
        fail("bind");
    if (flags & LISTEN && listen(fd, MOST))
        fail("listen");
    for (int tries = 0; flags & CONNECT && connect(fd, (void *)&address, length); tries++) {
        if (tries == 200)
            fail("connect");
        usleep(50000);
    }
    return fd;
}

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static uint8_t byte_at(unsigned key, int from_server, uint64_t offset)
{
    return (uint8_t)(mix((offset >> 3) * 0x9e3779b97f4a7c15u + key * 2 + (unsigned)from_server) >> (offset & 7) * 8);
}

static void add(int fd, int kind, unsigned key, int is_server)
{
    if (count == MOST)
        fail("too many sockets");
    if (kind == CONNECTED && fcntl(fd, F_SETFL, O_NONBLOCK))
        fail("fcntl");
    kinds[count] = kind;
    polled[count] = (struct pollfd){fd, POLLIN, 0};
    connections[count++] = (struct connection){fd, key, is_server, 0, 0, now_ms(), 0, 1, 0, NULL};
}

static void broken(int at, const char *what)
{
    struct connection *c = &connections[at];
    say("broken %u: %s after sent %llu received %llu", c->key, what, (unsigned long long)c->sent,
        (unsigned long long)c->received);
    close(c->fd);
    polled[at].fd = -1;
    c->broken = what;
}

static void receive(int at)
{
    struct connection *c = &connections[at];
    uint8_t buffer[CHUNK], *next = buffer;
    if (!c->key && recv(c->fd, buffer, 2, MSG_PEEK | MSG_DONTWAIT) == 1)
        return;
    ssize_t got = recv(c->fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN)
        return;
    if (got <= 0) {
        broken(at, got ? strerror(errno) : "end of file");
        return;
    }
    double now = now_ms();
    if (c->key && !file && now - c->heard_ms > REPORT_MS)
        say("connection %u silent %.0f ms until %.6f", c->key, now - c->heard_ms, clock_ms(CLOCK_REALTIME) / 1e3);
    c->heard_ms = now;
    if (!c->key)
        c->key = next[0] | (unsigned)next[1] << 8, next += 2, got -= 2;
    for (ssize_t i = 0; i < got; i++, c->received++)
        if (next[i] != byte_at(c->key, !c->is_server, c->received)) {
            broken(at, "wrong byte");
            return;
        }
}

static void transmit(int at, double now)
{
    struct connection *c = &connections[at];
    if (!c->key || now < c->next_ms)
        return;
    if (!c->left) {
        c->left = 1 + (size_t)random() % (2 * CHUNK);
        if (random() % BURSTS == 0)
            c->pace = (double)(1 << random() % 7) / 8;
    }
    uint8_t buffer[CHUNK];
    size_t size = c->left < CHUNK ? c->left : CHUNK;
    for (size_t i = 0; i < size; i++)
        buffer[i] = byte_at(c->key, c->is_server, c->sent + i);
    ssize_t gone = send(c->fd, buffer, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (gone < 0 && errno != EAGAIN) {
        broken(at, strerror(errno));
        return;
    }
    c->sent += gone > 0 ? (uint64_t)gone : 0;
    c->left -= gone > 0 ? (size_t)gone : 0;
    if (gone < 0)
        c->next_ms = now + 2;
    else if (!c->left)
        c->next_ms = now + (double)(random() % (2 * CHUNK)) / 1024 / kb_per_ms / c->pace;
}

static void answer(int at)
{
    uint8_t buffer[64];
    struct sockaddr_storage from;
    socklen_t length = sizeof from;
    ssize_t got = recvfrom(polled[at].fd, buffer, sizeof buffer, MSG_DONTWAIT, (void *)&from, &length);
    if (got > 0 && kinds[at] == ASKS)
        datagrams++;
    else if (got > 0)
        sendto(polled[at].fd, buffer, (size_t)got, MSG_DONTWAIT, (void *)&from, length);
}

static void write_report(void)
{
    char written[PATH_MAX];
    snprintf(written, sizeof written, "%s.new", file);
    FILE *out = fopen(written, "w");
    if (!out)
        return;
    for (int i = 0; i < count; i++) {
        struct connection *c = &connections[i];
        if (c->broken)
            fprintf(out, "broken %u: %s\n", c->key, c->broken);
        else if (kinds[i] == CONNECTED && c->key)
            fprintf(out, "connection %u sent %llu received %llu\n", c->key, (unsigned long long)c->sent,
                    (unsigned long long)c->received);
    }
    fclose(out);
    rename(written, file);
}

static void report(void)
{
    for (int i = 0; i < count; i++)
        if (kinds[i] == CONNECTED && polled[i].fd >= 0 && !(fcntl(polled[i].fd, F_GETFL) & O_NONBLOCK))
            broken(i, "it blocks now");
    if (file) {
        write_report();
        return;
    }
    for (int i = 0; i < count; i++) {
        struct connection *c = &connections[i];
        if (kinds[i] == CONNECTED && polled[i].fd >= 0 && c->key)
            say("connection %u sent %llu received %llu", c->key, (unsigned long long)c->sent,
                (unsigned long long)c->received);
        if (kinds[i] == ASKS && send(polled[i].fd, "question", 8, MSG_DONTWAIT | MSG_NOSIGNAL) > 0 && datagrams)
            say("datagrams %lu", datagrams);
    }
}

static void traffic(void)
{
    double reported = now_ms();
    for (;;) {
        poll(polled, (nfds_t)count, 2);
        double now = now_ms();
        for (int i = 0, all = count; i < all; i++) {
            if (polled[i].fd < 0)
                continue;
            if (kinds[i] == CONNECTED) {
                if (polled[i].revents)
                    receive(i);
                if (polled[i].fd >= 0)
                    transmit(i, now);
            } else if (polled[i].revents && kinds[i] == LISTENS) {
                int fd = accept(polled[i].fd, NULL, NULL);
                if (fd >= 0)
                    add(fd, CONNECTED, 0, 1);
            } else if (polled[i].revents) {
                answer(i);
            }
        }
        if (now - reported >= REPORT_MS * (1 + count / FEW)) {
            report();
            reported = now;
        }
    }
}

/* ADDRESS/PORT */
static int port_of(char *text)
{
    char *slash = strchr(text, '/');
    if (!slash)
        fail(text);
    *slash = 0;
    return atoi(slash + 1);
}

static void hold_memory(size_t bytes)
{
    uint64_t *words = malloc(bytes + 1), number = 0;
    if (!words)
        fail("malloc");
    for (size_t i = 0; i < bytes / sizeof *words; i++)
        words[i] = number = mix(number + i);
}

/* -k, -r, -m and -o; returns what follows them */
static char **options(char **arguments, unsigned *key)
{
    for (; *arguments && **arguments == '-'; arguments += 2)
        if (arguments[0][1] == 'k')
            *key = (unsigned)atoi(arguments[1]);
        else if (arguments[0][1] == 'm')
            hold_memory((size_t)atoi(arguments[1]) << 20);
        else if (arguments[0][1] == 'o')
            file = arguments[1];
        else
            kb_per_ms = atof(arguments[1]);
    return arguments;
}

static void listen_at(char *endpoint)
{
    int port = port_of(endpoint);
    add(make_socket(endpoint, port, SOCK_STREAM, BIND | LISTEN), LISTENS, 0, 1);
    add(make_socket(endpoint, port, SOCK_DGRAM, BIND), ANSWERS, 0, 1);
}

static void connect_to(char *endpoint, unsigned key)
{
    int one = 1, port = port_of(endpoint);
    int fd = make_socket(endpoint, port, SOCK_STREAM, CONNECT);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    uint8_t hello[2] = {(uint8_t)key, (uint8_t)(key >> 8)};
    if (send(fd, hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello)
        fail("send");
    add(fd, CONNECTED, key, 0);
    add(make_socket(endpoint, port, SOCK_DGRAM, CONNECT), ASKS, 0, 0);
}

/* Listens at the first so many endpoints, and connects to the rest. */
static void take_part(char **arguments, int listeners)
{
    unsigned key = 1;
    for (arguments = options(arguments, &key); *arguments; arguments++, listeners--)
        if (listeners > 0)
            listen_at(*arguments);
        else
            connect_to(*arguments, key++);
    say("ready");
    traffic();
}

/* What is asked is sent at once, and nothing else until it is answered. */
static void ask_and_wait(char *endpoint)
{
    char buffer[ASKED] = {0};
    int port = port_of(endpoint), fd = make_socket(endpoint, port, SOCK_STREAM, CONNECT);
    unsigned long long asked = 0;
    say("ready");
    for (double before = now_ms(), reported = before;; asked++) {
        if (send(fd, buffer, sizeof buffer, MSG_NOSIGNAL) != ASKED || recv(fd, buffer, sizeof buffer, MSG_WAITALL) != ASKED)
            fail("asks");
        double now = now_ms();
        if (now - before > REPORT_MS)
            say("connection 1 silent %.0f ms until %.6f", now - before, clock_ms(CLOCK_REALTIME) / 1e3);
        if (now - reported >= REPORT_MS) {
            say("connection 1 sent %llu received %llu", asked * ASKED, asked * ASKED);
            reported = now;
        }
        before = now;
    }
}

static void hold_many(int number, const char *address)
{
    struct rlimit limit = {(rlim_t)number + 64, (rlim_t)number + 64};
    if (setrlimit(RLIMIT_NOFILE, &limit))
        fail("setrlimit");
    for (int i = 0; i < number; i++)
        make_socket(address, 10000 + i, SOCK_DGRAM, BIND);
    say("ready");
    for (;;)
        pause();
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN);
    signal(SIGTERM, SIG_DFL);
    srandom((unsigned)(now_ms() * 1e3) ^ (unsigned)getpid());
    if (argc > 4 && !strcmp(argv[1], "beside")) {
        if (!fork())
            execl(argv[2], argv[2], argv[3], (char *)NULL);
        argv += 3, argc -= 3;
    }
    const char *role = argc > 1 ? argv[1] : "pause";
    if (!strcmp(role, "server"))
        take_part(argv + 2, argc);
    else if (!strcmp(role, "client"))
        take_part(argv + 2, 0);
    else if (!strcmp(role, "member"))
        take_part(argv + 2, 1);
    else if (!strcmp(role, "asks") && argc > 2)
        ask_and_wait(argv[2]);
    else if (!strcmp(role, "stranger"))
        stranger(argv + 2);
    else if (!strcmp(role, "kinds") && argc > 5)
        hold_kinds(argv + 2);
    else if (!strcmp(role, "rank") && argc > 9)
        train(argv + 2);
    else if (!strcmp(role, "many") && argc > 3)
        hold_many(atoi(argv[2]), argv[3]);
    else
        for (;;)
            pause();
    return 1;
}
