/* The first process of a container: brings up lo, starts a test of CRIU's suite, reaps, and ends when nothing is left.
 *
 *     init LOG STATUS TEST ARGUMENTS...
 *
 * STATUS gets the exit status of the process that was started, which ends once the test itself runs in the background.
 */
#include <fcntl.h>
#include <net/if.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void bring_up_loopback(void)
{
    struct ifreq request = {.ifr_name = "lo"};
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    if (ioctl(fd, SIOCGIFFLAGS, &request) == 0) {
        request.ifr_flags |= IFF_UP | IFF_RUNNING;
        ioctl(fd, SIOCSIFFLAGS, &request);
    }
    close(fd);
}

/* The test's own descriptors begin at 3, as where zdtm's driver starts it. */
static void redirect(const char *log_path)
{
    int null = open("/dev/null", O_RDONLY), log = open(log_path, O_WRONLY | O_CREAT | O_APPEND, 0666);
    dup2(null, 0);
    dup2(log, 1);
    dup2(log, 2);
    if (null > 2)
        close(null);
    if (log > 2)
        close(log);
}

int main(int argc, char **argv)
{
    int status = -1;
    if (argc < 4)
        return 2;
    redirect(argv[1]);
    signal(SIGTERM, SIG_IGN);
    umask(0);
    bring_up_loopback();
    pid_t starter = fork();
    if (starter == 0) {
        signal(SIGTERM, SIG_DFL);
        execv(argv[3], argv + 3);
        perror("execv");
        _exit(127);
    }
    waitpid(starter, &status, 0);
    int fd = open(argv[2], O_WRONLY | O_CREAT, 0666);
    dprintf(fd, "%d\n", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    close(fd);
    while (wait(&status) > 0) {
    }
    return 0;
}
