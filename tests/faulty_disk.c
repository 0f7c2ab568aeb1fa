/* Preloaded by save_faults.py: after arm(k, mode), the k-th write, fsync, rename or removal of this process goes wrong.

   mode 0: count alone. mode 1: the process is killed there (a write is half done by then). mode 2: the disk is full from there on,
   for writes, fsyncs and renames; removals work. Writes count where they go to a regular file. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE, FSYNC, RENAME, REMOVE, KINDS };
static int armed, mode, at;
static int seen, of_kind[KINDS];

void arm(int k, int how) {
    armed = 1, at = k, mode = how, seen = 0;
    for (int i = 0; i < KINDS; i++) of_kind[i] = 0;
}
void disarm(void) { armed = 0; }
int count(int kind) { return kind < 0 ? seen : of_kind[kind]; }

/* 0: go on. 1: fail for want of room. 2: die. */
static int verdict(int kind) {
    if (!armed) return 0;
    seen++, of_kind[kind]++;
    if (mode == 1 && seen == at) return 2;
    return mode == 2 && seen >= at && kind != REMOVE;
}
static int to_file(int fd) {
    struct stat info;
    return fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
}
static void die(void) { kill(getpid(), SIGKILL); pause(); }
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define GUARD(kind, before)                        \
    switch (verdict(kind)) {                       \
        case 1: errno = ENOSPC; return -1;         \
        case 2: before; die();                     \
    }

ssize_t write(int fd, const void *data, size_t size) {
    if (armed && to_file(fd)) GUARD(WRITE, NEXT(write)(fd, data, size / 2))
    return NEXT(write)(fd, data, size);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t where) {
    if (armed) GUARD(WRITE, NEXT(pwrite)(fd, data, size / 2, where))
    return NEXT(pwrite)(fd, data, size, where);
}
ssize_t writev(int fd, const struct iovec *parts, int n) {
    if (armed && to_file(fd)) GUARD(WRITE, NEXT(writev)(fd, parts, 1))
    return NEXT(writev)(fd, parts, n);
}
int ftruncate(int fd, off_t size) {
    if (armed) GUARD(WRITE, )
    return NEXT(ftruncate)(fd, size);
}
int ftruncate64(int fd, off_t size) {
    if (armed) GUARD(WRITE, )
    return NEXT(ftruncate64)(fd, size);
}
int fsync(int fd) {
    GUARD(FSYNC, )
    return NEXT(fsync)(fd);
}
int rename(const char *from, const char *to) {
    GUARD(RENAME, )
    return NEXT(rename)(from, to);
}
int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    GUARD(RENAME, )
    return NEXT(renameat2)(from_folder, from, to_folder, to, flags);
}
int unlink(const char *path) {
    GUARD(REMOVE, )
    return NEXT(unlink)(path);
}
int unlinkat(int folder, const char *path, int flags) {
    GUARD(REMOVE, )
    return NEXT(unlinkat)(folder, path, flags);
}
int rmdir(const char *path) {
    GUARD(REMOVE, )
    return NEXT(rmdir)(path);
}
