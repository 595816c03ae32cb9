/* What peer.c, kinds.c and rank.c share. */
#include <sys/socket.h>

enum { BIND = 1, LISTEN = 2, CONNECT = 4 };

void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void fail(const char *what) __attribute__((noreturn));
socklen_t address_of(const char *text, int port, struct sockaddr_storage *address);
int make_socket(const char *text, int port, int type, int flags);
void stranger(char **addresses);
void hold_kinds(char **arguments);
void train(char **words) __attribute__((noreturn));
