/* Starts the boxes of one slot, one after the other, with bubblewrap.
 *
 * Invariant: it is unprivileged and inside the slot's cgroups before it starts anything, so a box is never outside them.
 * It stays parked between boxes, since entering a memory cgroup costs about 10 ms (a grace period of the kernel).
 * Compiled by envs/local/staging.py; spawned and spoken to by envs/local/slots.py over fd 3 (SOCK_SEQPACKET).
 *
 * argv: its label, which bubblewrap inherits as argv[0]; UID (-1: keep) OOM_SCORE_ADJ NOFILE NPROC (0: keep) BWRAP SECCOMP_FILE CGROUP_PROCS_FILE...
 * in:   one packet a box: bytes of address space (0: unlimited) and bwrap's arguments, each ended by NUL,
 *       with two descriptors: the box's control socket and its stderr
 * out:  'R' when parked; 'E' step errno when it cannot; 'X' wait status when a box has ended
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HOST = 3, SECCOMP = 4, STATUS_FAILED = 125, MAX_PACKET = 1 << 16, MAX_ARGS = 1024 };

static long nofile, nproc;
static const char *bwrap;
static char *label;

static void fail(const char *step, const char *detail) {
    char text[512];
    int n = snprintf(text, sizeof text, "E%s %s: %d", step, detail, errno);
    if (send(HOST, text, n, MSG_NOSIGNAL) < 0) {}
    _exit(STATUS_FAILED);
}

static void write_text(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) < 0) fail("write", path);
    close(fd);
}

/* Never lower than it is, which only root may: a driver that is itself to be killed first stays so. */
static void raise_oom_score(const char *wanted) {
    char text[16] = "";
    int fd = open("/proc/self/oom_score_adj", O_RDONLY | O_CLOEXEC);
    if (fd < 0 || read(fd, text, sizeof text - 1) < 0) fail("read", "/proc/self/oom_score_adj");
    close(fd);
    if (atoi(text) < atoi(wanted)) write_text("/proc/self/oom_score_adj", wanted);
}

static int limit(int resource, rlim_t value) {
    struct rlimit r;
    if (getrlimit(resource, &r)) return -1;
    if (r.rlim_max != RLIM_INFINITY && value > r.rlim_max) value = r.rlim_max;
    return setrlimit(resource, &(struct rlimit){value, value});
}

static void drop_to(uid_t uid) {
    if (setgroups(0, NULL)) fail("setgroups", "");
    if (setresgid(uid, uid, uid)) fail("setresgid", "");
    if (setresuid(uid, uid, uid)) fail("setresuid", "");
}

/* The child's half: in the right cgroups and unprivileged already; whatever fails here, nothing is run. */
static void become_bwrap(const int *fds, char **args, rlim_t address_space) {
    const char *step = "descriptors";
    int control = fcntl(fds[0], F_DUPFD, 10), errors = fcntl(fds[1], F_DUPFD, 10);
    if (control < 0 || errors < 0 || dup2(errors, 2) < 0 || dup2(control, HOST) < 0) goto failed;
    if (lseek(SECCOMP, 0, SEEK_SET) < 0 || fcntl(SECCOMP, F_SETFD, 0) < 0) goto failed;
    if (syscall(SYS_close_range, SECCOMP + 1, ~0u, 0)) goto failed;
    step = "limits";
    if (limit(RLIMIT_CORE, 0) || limit(RLIMIT_NOFILE, nofile)) goto failed;
    if (nproc && limit(RLIMIT_NPROC, nproc)) goto failed;
    if (address_space && limit(RLIMIT_AS, address_space)) goto failed;
    step = "parent death signal";
    if (prctl(PR_SET_PDEATHSIG, SIGKILL)) goto failed;
    execve(bwrap, args, (char *[]){NULL});
    step = bwrap;
failed:
    dprintf(2, "launcher: %s: errno %d\n", step, errno);
    _exit(STATUS_FAILED);
}

static ssize_t receive(char *packet, int *fds) {
    char control[CMSG_SPACE(2 * sizeof(int))];
    struct iovec data = {packet, MAX_PACKET};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t n;
    do n = recvmsg(HOST, &message, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    struct cmsghdr *rights = n > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (n > 0 && (!rights || rights->cmsg_len != CMSG_LEN(2 * sizeof(int)))) fail("packet", "descriptors");
    if (n > 0 && packet[n - 1]) fail("packet", "not ended by NUL");
    if (n > 0) memcpy(fds, CMSG_DATA(rights), 2 * sizeof(int));
    return n;
}

/* A bubblewrap that is killed before it has released its child leaves it waiting for ever: it is ours now, end it. */
static void end_orphans(void) {
    char path[64], text[256];
    snprintf(path, sizeof path, "/proc/self/task/%d/children", getpid());
    while (waitpid(-1, NULL, WNOHANG) >= 0) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
        if (fd >= 0) close(fd);
        if (n <= 0) break;
        text[n] = 0;
        pid_t child = atoi(text);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
    }
}

static void run_box(char *packet, ssize_t n, const int *fds) {
    char *args[MAX_ARGS + 2] = {label};
    int num = 1, status = 0;
    for (char *at = packet + strlen(packet) + 1; at < packet + n; at += strlen(at) + 1) {
        if (num > MAX_ARGS) fail("packet", "too many arguments");
        args[num++] = at;
    }
    pid_t pid = fork();
    if (pid == 0) become_bwrap(fds, args, strtoull(packet, NULL, 10));
    int failed = errno;
    close(fds[0]), close(fds[1]);
    if (pid < 0) errno = failed, fail("fork", "");
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
    end_orphans();
    char ended[1 + sizeof status] = "X";
    memcpy(ended + 1, &status, sizeof status);
    if (send(HOST, ended, sizeof ended, MSG_NOSIGNAL) < 0) _exit(0);
}

int main(int argc, char **argv) {
    static char packet[MAX_PACKET];
    int fds[2];
    ssize_t n;
    if (argc < 7) return STATUS_FAILED;
    long uid = atol(argv[1]);
    label = argv[0];
    nofile = atol(argv[3]), nproc = atol(argv[4]), bwrap = argv[5];
    setsid();
    fcntl(HOST, F_SETFD, FD_CLOEXEC);
    if (syscall(SYS_close_range, HOST + 1, ~0u, 0)) fail("close_range", "");
    if (open(argv[6], O_RDONLY) != SECCOMP) fail("open", argv[6]);
    for (int i = 7; i < argc; i++) write_text(argv[i], "0");
    raise_oom_score(argv[2]);
    if (chdir("/")) fail("chdir", "/");
    if (uid >= 0) drop_to(uid);
    if (prctl(PR_SET_PDEATHSIG, SIGKILL)) fail("prctl", "PDEATHSIG"); /* after the drop, which clears it */
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) fail("prctl", "NO_NEW_PRIVS");
    if (prctl(PR_SET_CHILD_SUBREAPER, 1)) fail("prctl", "CHILD_SUBREAPER");
    if (send(HOST, "R", 1, MSG_NOSIGNAL) < 0) return 0;
    while ((n = receive(packet, fds)) > 0) run_box(packet, n, fds);
    return 0;
}
