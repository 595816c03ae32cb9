/* A container of several processes: `family STATE` makes some, then counts as the workload does; on TERM it ends.
 *
 * STATEs: zombie N (children that have ended, not waited for), children N (that sleep), ends N (children that end and
 * are replaced all the time), stopped (a child in SIGSTOP), daemon (a child in a session of its own), criu (a child with
 * the name of CRIU)
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int replaces;

static void on_term(int unused)
{
    (void)unused;
    _exit(0);
}

static void nap(long ms)
{
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

static void sleeps(void)
{
    for (;;)
        pause();
}

static void counts(void)
{
    for (unsigned long count = 1;; count++) {
        printf("count %lu checksum ok\n", count);
        nap(50);
        for (int status; replaces && waitpid(-1, &status, WNOHANG) > 0;)
            if (!fork()) {
                nap(30);
                _exit(0);
            }
    }
}

static void child(const char *state)
{
    pid_t pid = fork();
    if (pid < 0)
        exit(1);
    if (pid)
        return;
    if (!strcmp(state, "zombie"))
        _exit(7);
    if (!strcmp(state, "ends")) {
        nap(30);
        _exit(0);
    }
    if (!strcmp(state, "stopped"))
        raise(SIGSTOP);
    if (!strcmp(state, "daemon"))
        setsid();
    if (!strcmp(state, "criu"))
        execl("/proc/self/exe", "criu", "pause", NULL);
    sleeps();
}

int main(int argc, char **argv)
{
    const char *state = argc > 1 ? argv[1] : "children";
    signal(SIGTERM, on_term);
    if (!strcmp(state, "pause"))
        sleeps();
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int at = 0; at < (argc > 2 ? atoi(argv[2]) : 1); at++)
        child(state);
    replaces = !strcmp(state, "ends");
    counts();
}
