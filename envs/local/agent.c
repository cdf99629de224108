/* The first process of a box: runs commands, writes and reads files, all on behalf of the host.
 *
 * Invariant: it holds one channel to the host and ends, with everything in the box, when that channel ends.
 * Every command descends from it, so each inherits bubblewrap's namespaces, empty capabilities and seccomp filter.
 * The channel is a socket (fd 3); with the argument --stdio, as in a container, it is what stdin and stdout were.
 * Compiled by envs/local/staging.py; spoken to by envs/local/wire.py, which documents the frames.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { HOST = 3, HOST_OUT = 4, MAX_JOBS = 64, MAX_FRAME = 16 << 20, PIPE = 1 << 16, MAX_WORDS = 512 };
enum { OP_READY, OP_EXEC, OP_PUT, OP_GET, OP_KILL, OP_FILL };
enum { PUT_DIR, PUT_FILE, PUT_APPEND, PUT_LINK, PUT_TIME };
enum { EXIT_HOST_GONE = 0, EXIT_PROTOCOL = 90, EXIT_MEMORY = 91 };

typedef struct { char *data; uint32_t len, size; } Buffer;
typedef struct { const char *at, *end; } Reader;
typedef struct {
    pid_t pid;        /* 0: this slot is free */
    uint32_t id, cap; /* cap: bytes kept of each stream */
    int fd[2];        /* read ends of stdout and stderr, -1 when closed */
    Buffer out[2];
    int64_t deadline_ms;
    int timed_out;
} Job;

static Job jobs[MAX_JOBS];
static int killing; /* a kill_all waits for the last process to be reaped */
static uint32_t kill_id;
static int given = -1; /* the open file that came with the last request */

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void append(Buffer *b, const void *data, uint32_t n) {
    if (b->size - b->len < n) {
        uint32_t size = b->size ? b->size : 4096;
        while (size - b->len < n) size *= 2;
        if (!(b->data = realloc(b->data, size))) _exit(EXIT_MEMORY);
        b->size = size;
    }
    memcpy(b->data + b->len, data, n);
    b->len += n;
}

/* --- frames ------------------------------------------------------------------------------------------------- */

static uint32_t take_u32(Reader *r) {
    uint32_t v;
    if (r->end - r->at < 4) _exit(EXIT_PROTOCOL);
    memcpy(&v, r->at, 4);
    r->at += 4;
    return v;
}

/* A length and that many bytes; strings carry their NUL inside. */
static const char *take_blob(Reader *r, uint32_t *len) {
    uint32_t n = take_u32(r);
    if ((uint32_t)(r->end - r->at) < n) _exit(EXIT_PROTOCOL);
    const char *data = r->at;
    r->at += n;
    if (len) *len = n;
    return data;
}

static void send_all(const char *data, size_t n) {
    while (n) {
        ssize_t done = write(HOST_OUT, data, n);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) _exit(EXIT_HOST_GONE);
        data += done, n -= done;
    }
}

static void reply(uint32_t op, uint32_t id, int32_t status, const Buffer *a, const Buffer *b) {
    static const Buffer none;
    Buffer frame = {0};
    if (!a) a = &none;
    if (!b) b = &none;
    uint32_t head[6] = {5 * 4 + a->len + b->len, op, id, (uint32_t)status, a->len, b->len};
    append(&frame, head, sizeof head);
    if (a->len) append(&frame, a->data, a->len);
    if (b->len) append(&frame, b->data, b->len);
    send_all(frame.data, frame.len);
    free(frame.data);
}

/* --- files -------------------------------------------------------------------------------------------------- */

/* Makes `path` a directory that we may write to, whatever a command has put there. */
static int make_dir(const char *path) {
    struct stat s;
    if (mkdir(path, 0755) == 0) return 0;
    if (errno != EEXIST) return -1;
    if (stat(path, &s) != 0 || !S_ISDIR(s.st_mode)) return unlink(path) || mkdir(path, 0755) ? -1 : 0;
    return access(path, W_OK | X_OK) ? chmod(path, s.st_mode | 0700) : 0;
}

static void make_parents(char *path) {
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (make_dir(path)) {} /* e.g. /usr, read-only: the open below says what is wrong */
        *slash = '/';
    }
}

/* Never follows a link and never blocks on a FIFO: what stands in the way is replaced. */
static int open_new(const char *path, int flags) {
    int fd = open(path, O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | flags, 0600);
    struct stat s;
    if (fd >= 0 && fstat(fd, &s) == 0 && S_ISREG(s.st_mode)) return fd;
    if (fd >= 0) close(fd);
    if (fd < 0 && errno == ENOENT) return -1;
    if (unlink(path)) return -1;
    return open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
}

static int put_file(const char *path, int flags, mode_t mode, const char *data, uint32_t n) {
    int fd = open_new(path, flags), failed = 0;
    if (fd < 0) return -1;
    while (n && !failed) {
        ssize_t done = write(fd, data, n);
        if (done < 0 && errno != EINTR) failed = errno;
        if (done > 0) data += done, n -= done;
    }
    if (fchmod(fd, mode)) failed = errno;
    close(fd);
    errno = failed;
    return failed ? -1 : 0;
}

static int set_time(const char *path, const char *seconds, uint32_t n) {
    int64_t at;
    if (n != sizeof at) _exit(EXIT_PROTOCOL);
    memcpy(&at, seconds, n);
    struct timespec both[2] = {{.tv_sec = at}, {.tv_sec = at}};
    return utimensat(AT_FDCWD, path, both, AT_SYMLINK_NOFOLLOW);
}

static int put_entry(Reader *r, char **path_out) {
    uint32_t kind = take_u32(r), mode = take_u32(r), n;
    char *path = (char *)take_blob(r, NULL);
    const char *data = take_blob(r, &n);
    *path_out = path;
    make_parents(path);
    if (kind == PUT_DIR) return make_dir(path) || chmod(path, mode) ? -1 : 0;
    if (kind == PUT_FILE) return put_file(path, O_TRUNC, mode, data, n);
    if (kind == PUT_APPEND) return put_file(path, O_APPEND, mode, data, n);
    if (kind == PUT_TIME) return set_time(path, data, n);
    unlink(path);
    return symlink(data, path);
}

/* Writes every entry, and answers; the first that fails ends it and is named. */
static void put(uint32_t op, uint32_t id, Reader *r) {
    Buffer why = {0};
    char *path = "";
    while (r->at < r->end)
        if (put_entry(r, &path)) {
            int failed = errno;
            append(&why, path, strlen(path));
            reply(op, id, -failed, &why, NULL);
            free(why.data);
            return;
        }
    reply(op, id, 0, NULL, NULL);
}

/* The entries of the file that came with the request: nothing of them passes through the socket or the heap. Paths are
 * cut in place while parents are made, hence the private, writable mapping. */
static void fill(uint32_t id) {
    struct stat s = {0};
    char *data = "";
    int failed = given < 0 || fstat(given, &s) ? EBADF : 0;
    if (!failed && s.st_size) data = mmap(NULL, s.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, given, 0);
    if (data == MAP_FAILED) failed = errno;
    close(given), given = -1;
    if (failed) return reply(OP_FILL, id, -failed, NULL, NULL);
    put(OP_FILL, id, &(Reader){data, data + s.st_size});
    if (s.st_size) munmap(data, s.st_size);
}

static int read_file(const char *path, uint32_t max, Buffer *content) {
    char chunk[PIPE];
    struct stat s;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY), status = 0;
    if (fd < 0) return -errno;
    if (fstat(fd, &s) || !S_ISREG(s.st_mode)) status = -ENOENT;
    while (!status) {
        ssize_t n = read(fd, chunk, sizeof chunk);
        if (n < 0) status = -errno;
        if (n <= 0) break;
        append(content, chunk, n);
        if (content->len > max) status = -EFBIG;
    }
    close(fd);
    return status;
}

static void get(uint32_t id, Reader *r) {
    Buffer content = {0};
    uint32_t max = take_u32(r);
    int status = read_file(take_blob(r, NULL), max, &content);
    reply(OP_GET, id, status, status ? NULL : &content, NULL);
    free(content.data);
}

/* --- commands ----------------------------------------------------------------------------------------------- */

/* Runs a command of plain words without a shell, as bash would find it; returns when that fails, for bash to say why. */
static void run_plain(char **argv, char **env) {
    char path[4096];
    const char *dir = "";
    if (!argv[0]) return;
    if (strchr(argv[0], '/')) execve(argv[0], argv, env);
    for (int i = 0; env[i] && !strchr(argv[0], '/'); i++)
        if (strncmp(env[i], "PATH=", 5) == 0) dir = env[i] + 5;
    while (*dir) {
        int n = strcspn(dir, ":");
        if (snprintf(path, sizeof path, "%.*s/%s", n, dir, argv[0]) < (int)sizeof path) execve(path, argv, env);
        dir += n + (dir[n] == ':');
    }
}

/* The child's half: never returns. No command can trace it before its exec, since it is not dumpable, as we are. */
static void become_command(const int *fds, const char *cwd, const char *command, char **argv, char **env) {
    sigset_t none;
    setsid();
    for (int i = 0; i < 3; i++) dup2(fds[i], i); /* all are above 2, and close on exec */
    syscall(SYS_close_range, 3, ~0u, 0);
    int oom = open("/proc/self/oom_score_adj", O_WRONLY); /* commands die of memory before this agent does */
    if (oom >= 0) {
        if (write(oom, "1000", 4) < 0) {}
        close(oom);
    }
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    if (chdir(cwd)) {
        dprintf(2, "cannot enter %s: %s\n", cwd, strerror(errno));
        _exit(126);
    }
    run_plain(argv, env);
    execve("/bin/bash", (char *[]){"bash", "-c", (char *)command, NULL}, env);
    dprintf(2, "cannot run /bin/bash: %s\n", strerror(errno));
    _exit(127);
}

static int open_stdin(const char *data, uint32_t n) {
    if (!n) return open("/dev/null", O_RDONLY | O_CLOEXEC);
    int fd = memfd_create("stdin", MFD_CLOEXEC);
    while (fd >= 0 && n) {
        ssize_t done = write(fd, data, n);
        if (done < 0) return close(fd), -1;
        data += done, n -= done;
    }
    if (fd >= 0) lseek(fd, 0, SEEK_SET);
    return fd;
}

static void close_fds(const int *fds, int n) {
    for (int i = 0; i < n; i++)
        if (fds[i] >= 0) close(fds[i]);
}

static void start_job(uint32_t id, Reader *r) {
    char *env[MAX_WORDS + 1], *argv[MAX_WORDS + 1];
    uint32_t timeout_ms = take_u32(r), cap = take_u32(r), num_argv = take_u32(r), num_env = take_u32(r), stdin_len;
    const char *cwd = take_blob(r, NULL), *command = take_blob(r, NULL), *input = take_blob(r, &stdin_len);
    Job *job = NULL;
    for (int i = 0; i < MAX_JOBS && !job; i++)
        if (!jobs[i].pid) job = &jobs[i];
    if (num_env > MAX_WORDS || num_argv > MAX_WORDS) return reply(OP_EXEC, id, -E2BIG, NULL, NULL);
    if (!job) return reply(OP_EXEC, id, -EBUSY, NULL, NULL);
    for (uint32_t i = 0; i < num_argv; i++) argv[i] = (char *)take_blob(r, NULL);
    for (uint32_t i = 0; i < num_env; i++) env[i] = (char *)take_blob(r, NULL);
    argv[num_argv] = env[num_env] = NULL;
    int fds[5] = {open_stdin(input, stdin_len), -1, -1, -1, -1}, pair[2]; /* child's 0, 1, 2; our ends of 1 and 2 */
    for (int i = 0; i < 2 && pipe2(pair, O_CLOEXEC) == 0; i++) fds[1 + i] = pair[1], fds[3 + i] = pair[0];
    pid_t pid = fds[0] >= 0 && fds[4] >= 0 ? fork() : -1;
    if (pid == 0) become_command(fds, cwd, command, argv, env);
    int failed = errno;
    close_fds(fds, 3);
    if (pid < 0) {
        close_fds(fds + 3, 2);
        return reply(OP_EXEC, id, -failed, NULL, NULL);
    }
    *job = (Job){.pid = pid, .id = id, .cap = cap, .deadline_ms = now_ms() + timeout_ms};
    for (int i = 0; i < 2; i++) {
        job->fd[i] = fds[3 + i];
        fcntl(job->fd[i], F_SETFL, O_NONBLOCK);
    }
}

/* One read; what is past the cap is read and dropped, so that a flood cannot block or fill anything. */
static ssize_t pump(Job *job, int i) {
    char chunk[PIPE];
    ssize_t n = read(job->fd[i], chunk, sizeof chunk);
    if (n > 0) {
        uint32_t room = job->cap - job->out[i].len;
        append(&job->out[i], chunk, (uint32_t)n < room ? (uint32_t)n : room);
    }
    if (n == 0) close(job->fd[i]), job->fd[i] = -1;
    return n;
}

/* The command ended: keep what is still in its pipes, leave behind what holds them open. */
static void finish(Job *job, int wait_status) {
    int code = WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
    for (int i = 0; i < 2; i++) {
        if (job->fd[i] >= 0) pump(job, i);
        if (job->fd[i] >= 0) close(job->fd[i]);
    }
    reply(OP_EXEC, job->id, job->timed_out ? 124 : code, &job->out[0], &job->out[1]);
    free(job->out[0].data), free(job->out[1].data);
    job->pid = 0;
}

static void reap(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (int i = 0; i < MAX_JOBS; i++)
            if (jobs[i].pid == pid) finish(&jobs[i], status);
    if (pid < 0 && errno == ECHILD && killing) {
        killing = 0;
        reply(OP_KILL, kill_id, 0, NULL, NULL);
    }
}

/* Whether process `pid` is of session `leader`, or its direct child. */
static int belongs(const char *pid, pid_t leader) {
    char path[280], text[512];
    snprintf(path, sizeof path, "/proc/%s/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return 0;
    text[n] = 0;
    char *at = strrchr(text, ')'); /* the name before it may hold anything: ") S ppid pgrp session ..." */
    if (!at || strlen(at) < 4) return 0;
    long parent = strtol(at + 4, &at, 10);
    strtol(at, &at, 10);
    return parent == leader || strtol(at, NULL, 10) == leader;
}

static void kill_session(pid_t leader) {
    DIR *proc = opendir("/proc");
    struct dirent *entry;
    while (proc && (entry = readdir(proc)))
        if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9' && belongs(entry->d_name, leader))
            kill(atoi(entry->d_name), SIGKILL);
    if (proc) closedir(proc);
    kill(-leader, SIGKILL);
    kill(leader, SIGKILL);
}

/* Milliseconds until the next deadline, -1 for none; kills what is past its own. */
static int enforce_deadlines(void) {
    int64_t now = now_ms(), next = -1;
    for (int i = 0; i < MAX_JOBS; i++) {
        if (!jobs[i].pid || jobs[i].timed_out) continue;
        int64_t left = jobs[i].deadline_ms - now;
        if (left <= 0) {
            jobs[i].timed_out = 1;
            kill_session(jobs[i].pid);
        } else if (next < 0 || left < next) {
            next = left;
        }
    }
    return next > 1000000 ? 1000000 : (int)next;
}

/* --- the loop ----------------------------------------------------------------------------------------------- */

static void kill_all(uint32_t id) {
    killing = 1, kill_id = id;
    kill(-1, SIGKILL); /* everyone in this process namespace but us; atomic against forks */
    reap();
}

static void dispatch(const char *frame, uint32_t len) {
    Reader r = {frame, frame + len};
    uint32_t op = take_u32(&r), id = take_u32(&r);
    if (op == OP_EXEC) start_job(id, &r);
    else if (op == OP_PUT) put(OP_PUT, id, &r);
    else if (op == OP_GET) get(id, &r);
    else if (op == OP_KILL) kill_all(id);
    else if (op == OP_FILL) fill(id);
    else _exit(EXIT_PROTOCOL);
}

/* One read, and the descriptor that came with it; a container's pipe brings none. */
static ssize_t read_host(char *chunk, size_t size) {
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec data = {chunk, size};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t n = recvmsg(HOST, &message, MSG_CMSG_CLOEXEC);
    if (n < 0 && errno == ENOTSOCK) return read(HOST, chunk, size);
    struct cmsghdr *rights = n > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (!rights || rights->cmsg_type != SCM_RIGHTS || rights->cmsg_len != CMSG_LEN(sizeof(int))) return n;
    if (given >= 0) close(given);
    memcpy(&given, CMSG_DATA(rights), sizeof(int));
    return n;
}

/* Reads what has come and runs every whole frame of it. */
static void receive(void) {
    static Buffer in;
    static char chunk[PIPE];
    ssize_t n = read_host(chunk, sizeof chunk); /* poll said that something is there */
    if (n == 0 || (n < 0 && errno != EINTR)) _exit(EXIT_HOST_GONE);
    if (n < 0) return;
    append(&in, chunk, n);
    uint32_t at = 0, len;
    while (in.len - at >= 4) {
        memcpy(&len, in.data + at, 4);
        if (len > MAX_FRAME) _exit(EXIT_PROTOCOL);
        if (in.len - at - 4 < len) break;
        dispatch(in.data + at + 4, len);
        at += 4 + len;
    }
    memmove(in.data, in.data + at, in.len -= at);
    if (in.size > 4 * PIPE && in.len < PIPE) in.data = realloc(in.data, in.size = PIPE);
}

int main(int argc, char **argv) {
    struct pollfd polled[2 + 2 * MAX_JOBS];
    int owner[2 + 2 * MAX_JOBS];
    struct signalfd_siginfo info;
    sigset_t child;
    prctl(PR_SET_DUMPABLE, 0); /* no command may trace it or read its memory */
    int is_stdio = argc > 1 && strcmp(argv[1], "--stdio") == 0;
    if (is_stdio && dup2(0, HOST) != HOST) _exit(EXIT_PROTOCOL);
    if (dup2(is_stdio ? 1 : HOST, HOST_OUT) != HOST_OUT) _exit(EXIT_PROTOCOL);
    syscall(SYS_close_range, HOST_OUT + 1, ~0u, 0);
    fcntl(HOST, F_SETFD, FD_CLOEXEC);
    fcntl(HOST_OUT, F_SETFD, FD_CLOEXEC);
    for (int i = 0; i < 3; i++) { /* commands are given descriptors above 2 */
        close(i);
        if (open("/dev/null", O_RDWR) != i) _exit(EXIT_PROTOCOL);
    }
    umask(022);
    signal(SIGPIPE, SIG_IGN);
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    int signals = signalfd(-1, &child, SFD_NONBLOCK | SFD_CLOEXEC);
    reply(OP_READY, 0, getpid() == 1 ? 0 : -ESRCH, NULL, NULL);
    for (;;) {
        int n = 2, wait_ms = enforce_deadlines();
        polled[0] = (struct pollfd){HOST, POLLIN, 0};
        polled[1] = (struct pollfd){signals, POLLIN, 0};
        for (int i = 0; i < 2 * MAX_JOBS; i++)
            if (jobs[i / 2].pid && jobs[i / 2].fd[i % 2] >= 0)
                polled[n] = (struct pollfd){jobs[i / 2].fd[i % 2], POLLIN, 0}, owner[n++] = i;
        if (poll(polled, n, wait_ms) < 0) continue;
        for (int k = 2; k < n; k++)
            if (polled[k].revents) pump(&jobs[owner[k] / 2], owner[k] % 2);
        if (polled[1].revents) {
            while (read(signals, &info, sizeof info) > 0) {}
            reap();
        }
        if (polled[0].revents) receive();
    }
}
