/* A library with the functions of NCCL that vLLM's weight transfer calls, on memory of the CPU.

Rank 0 listens on a port of 127.0.0.1, which the unique id holds, and talks with every other rank over
a socket. A message begins with its bytes, which both sides must expect. A call waits until its data
has arrived; ncclCommAbort ends calls of other threads. */
#include <arpa/inet.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MOST_RANKS 16
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_USAGE = 5 };

typedef struct { char internal[128]; } UniqueId;
typedef struct { int rank, size, sockets[MOST_RANKS]; } Comm;
typedef struct { int port, listener, process; } IdContent;

static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};  /* by ncclDataType_t */

static int transfer(int fd, void *data, size_t size, int sends) {
    for (char *at = data; size > 0;) {
        ssize_t done = sends ? send(fd, at, size, MSG_NOSIGNAL) : recv(fd, at, size, 0);
        if (done <= 0) return SYSTEM_ERROR;
        at += done, size -= done;
    }
    return SUCCESS;
}

static int exchange(int fd, void *data, size_t size, int sends) {
    uint64_t bytes = size;
    if (transfer(fd, &bytes, sizeof bytes, sends)) return SYSTEM_ERROR;
    if (bytes != size) return INVALID_USAGE;
    return transfer(fd, data, size, sends);
}

const char *ncclGetErrorString(int result) {
    return result == SUCCESS ? "no error" : result == SYSTEM_ERROR ? "a peer has gone" : "sizes differ";
}

int ncclGetVersion(int *version) { *version = 22900; return SUCCESS; }

int ncclGetUniqueId(UniqueId *id) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof address;
    IdContent content = {.listener = socket(AF_INET, SOCK_STREAM, 0), .process = getpid()};
    if (bind(content.listener, (struct sockaddr *)&address, length)) return SYSTEM_ERROR;
    if (listen(content.listener, MOST_RANKS)) return SYSTEM_ERROR;
    getsockname(content.listener, (struct sockaddr *)&address, &length);
    content.port = ntohs(address.sin_port);
    memset(id, 0, sizeof *id);
    memcpy(id, &content, sizeof content);
    return SUCCESS;
}

int ncclCommInitRank(Comm **result, int size, UniqueId id, int rank) {
    IdContent content;
    memcpy(&content, &id, sizeof content);
    if (size > MOST_RANKS) return INVALID_USAGE;
    Comm *comm = calloc(1, sizeof *comm);
    comm->rank = rank, comm->size = size;
    if (rank == 0) {
        for (int i = 1; i < size; i++) {
            int32_t other, fd = accept(content.listener, NULL, NULL);
            if (fd < 0 || exchange(fd, &other, sizeof other, 0)) return SYSTEM_ERROR;
            if (other < 1 || other >= size || comm->sockets[other]) return INVALID_USAGE;
            comm->sockets[other] = fd;
        }
        close(content.listener);
    } else {
        struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(content.port),
                                      .sin_addr = {htonl(INADDR_LOOPBACK)}};
        int32_t mine = rank;
        comm->sockets[0] = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(comm->sockets[0], (struct sockaddr *)&address, sizeof address)) return SYSTEM_ERROR;
        if (exchange(comm->sockets[0], &mine, sizeof mine, 1)) return SYSTEM_ERROR;
    }
    *result = comm;
    return SUCCESS;
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, void *stream) {
    if (root != 0) return INVALID_USAGE;
    if (comm->rank) return exchange(comm->sockets[0], to, count * SIZES[type], 0);
    for (int i = 1; i < comm->size; i++) {
        int result = exchange(comm->sockets[i], (void *)from, count * SIZES[type], 1);
        if (result) return result;
    }
    if (to != from) memcpy(to, from, count * SIZES[type]);
    return SUCCESS;
}

/* Sums of fp32. */
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, Comm *comm, void *stream) {
    if (type != 7 || op != 0) return INVALID_USAGE;
    if (comm->rank) {
        int result = exchange(comm->sockets[0], (void *)from, count * 4, 1);
        if (result) return result;
    } else {
        float *part = malloc(count * 4);
        memmove(to, from, count * 4);
        for (int i = 1; i < comm->size; i++) {
            int result = exchange(comm->sockets[i], part, count * 4, 0);
            if (result) return result;
            for (size_t j = 0; j < count; j++) ((float *)to)[j] += part[j];
        }
        free(part);
    }
    return ncclBroadcast(to, to, count, 7, 0, comm, stream);
}

int ncclCommAbort(Comm *comm) {
    for (int i = 0; i < comm->size; i++)
        if (comm->sockets[i]) shutdown(comm->sockets[i], SHUT_RDWR);
    return SUCCESS;
}

/* vLLM looks for these, and the transfer of weights does not call them. */
#define UNUSED(name) int name(void) { return INVALID_USAGE; }
UNUSED(ncclReduce) UNUSED(ncclAllGather) UNUSED(ncclReduceScatter) UNUSED(ncclSend) UNUSED(ncclRecv)
UNUSED(ncclCommDestroy) UNUSED(ncclCommSuspend) UNUSED(ncclCommResume) UNUSED(ncclGroupStart)
UNUSED(ncclGroupEnd) UNUSED(ncclCommWindowRegister) UNUSED(ncclCommWindowDeregister)
UNUSED(ncclCommQueryProperties)
