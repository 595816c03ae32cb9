/* A container of several processes: `family STATE` makes some, then counts as the workload does; on TERM it ends.
 *
 * STATEs: zombie (a child that has ended, not waited for), children N (that sleep), ends N (children that end and are
 * replaced all the time), stopped (a child in SIGSTOP), headless (a child whose first thread has ended),
 * led (the first thread of the first process has ended, another one counts), daemon (a process of its own session)
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int replaces;

static void nap(long ms)
{
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

static void *sleeps(void *unused)
{
    for (;;)
        pause();
    return unused;
}

static void *counts(void *unused)
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
    return unused;
}

static void child(const char *state)
{
    pthread_t thread;
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
    if (!strcmp(state, "headless")) {
        pthread_create(&thread, NULL, sleeps, NULL);
        syscall(SYS_exit, 0);
    }
    sleeps(NULL);
}

int main(int argc, char **argv)
{
    pthread_t thread;
    const char *state = argc > 1 ? argv[1] : "children";
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (strcmp(state, "led") && strcmp(state, "alone"))
        for (int at = 0; at < (argc > 2 ? atoi(argv[2]) : 1); at++)
            child(state);
    replaces = !strcmp(state, "ends");
    if (!strcmp(state, "led")) {
        pthread_create(&thread, NULL, counts, NULL);
        syscall(SYS_exit, 0);
    }
    counts(NULL);
}
