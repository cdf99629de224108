/* Carries TCP connections of a box's own loopback to a unix socket that was mounted into it.
 *
 * Invariant: it listens on 127.0.0.1 alone and reaches that one socket alone; it reads nothing of what it carries.
 * Compiled by envs/local/staging.py; put into a sandbox and started by envs/agent_command.py.
 *
 * argv: PORT SOCKET. Returns 0 once it listens, and goes on in the background; 1 with a line on stderr if it cannot.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { CHUNK = 1 << 16, BACKLOG = 128 };

static int fail(const char *step) {
    fprintf(stderr, "relay: %s: %s\n", step, strerror(errno));
    return 1;
}

static int write_all(int fd, const char *data, ssize_t n) {
    while (n > 0) {
        ssize_t done = write(fd, data, n);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return -1;
        data += done, n -= done;
    }
    return 0;
}

/* Both ways until both ends have closed; the end of one way is passed on, since the other may still answer. */
static void carry(int a, int b) {
    static char chunk[CHUNK];
    int fds[2] = {a, b}, open_ways = 2;
    struct pollfd polled[2] = {{a, POLLIN, 0}, {b, POLLIN, 0}};
    while (open_ways) {
        if (poll(polled, 2, -1) < 0 && errno != EINTR) return;
        for (int i = 0; i < 2; i++) {
            if (polled[i].fd < 0 || !polled[i].revents) continue;
            ssize_t n = read(fds[i], chunk, sizeof chunk);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0 || (n > 0 && write_all(fds[!i], chunk, n))) return;
            if (n == 0) shutdown(fds[!i], SHUT_WR), polled[i].fd = -1, open_ways--;
        }
    }
}

static void serve(int client, const struct sockaddr_un *door) {
    int one = 1, server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (server >= 0 && connect(server, (const struct sockaddr *)door, sizeof *door) == 0) carry(client, server);
}

static void go_to_background(void) {
    setsid();
    int null = open("/dev/null", O_RDWR);
    for (int i = 0; i < 3; i++) dup2(null, i);
    if (null > 2) close(null);
    signal(SIGCHLD, SIG_IGN); /* children are reaped by the kernel */
    signal(SIGPIPE, SIG_IGN);
}

int main(int argc, char **argv) {
    struct sockaddr_un door = {.sun_family = AF_UNIX};
    if (argc != 3 || strlen(argv[2]) >= sizeof door.sun_path) return fprintf(stderr, "relay: PORT SOCKET\n"), 1;
    strcpy(door.sun_path, argv[2]);
    struct sockaddr_in here = {
        .sin_family = AF_INET, .sin_port = htons(atoi(argv[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0) return fail("socket");
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&here, sizeof here)) return fail("bind");
    if (listen(listener, BACKLOG)) return fail("listen");
    pid_t pid = fork();
    if (pid < 0) return fail("fork");
    if (pid > 0) return 0;
    go_to_background();
    for (;;) {
        int client = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (client < 0) {
            usleep(10000); /* out of descriptors or memory: the box's, so let it go on */
            continue;
        }
        pid = fork();
        if (pid == 0) {
            close(listener);
            serve(client, &door);
            _exit(0);
        }
        close(client);
    }
}
