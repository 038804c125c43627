/* CPU seconds of a gigabyte that is sent 400 KB at a time over a TCP connection, at both ends; the receiver reads into
 * one buffer. The ways: 0 send, 1 send with MSG_ZEROCOPY, 2 io_uring, 3 io_uring's zero-copy send.
 *
 *     cc -O2 sending.c -o sending && ./sending 0 [ADDRESS]
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/errqueue.h>
#include <linux/io_uring.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum way { PLAIN, ZEROCOPY, URING, URING_ZEROCOPY };
enum { BYTES = 400000, COUNT = 6000, BUFFERS = 16, ENTRIES = 8 };

/* Of zero-copy sends: those that the kernel told about, and those that it copied all the same. */
static unsigned notified, copied;

static struct {
    int file;
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
} ring;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static double cpu_s(int who) {
    struct rusage usage;
    getrusage(who, &usage);
    return usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

static void *mapped(size_t size, off_t offset) {
    void *found = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring.file, offset);
    if (found == MAP_FAILED) fail("mmap");
    return found;
}

static void open_ring(void) {
    struct io_uring_params made = {0};
    ring.file = syscall(__NR_io_uring_setup, ENTRIES, &made);
    if (ring.file < 0) fail("io_uring_setup");
    char *sq = mapped(made.sq_off.array + made.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    char *cq = mapped(made.cq_off.cqes + made.cq_entries * sizeof(struct io_uring_cqe), IORING_OFF_CQ_RING);
    ring.sqes = mapped(made.sq_entries * sizeof(struct io_uring_sqe), IORING_OFF_SQES);
    ring.sq_tail = (unsigned *)(sq + made.sq_off.tail);
    ring.sq_mask = (unsigned *)(sq + made.sq_off.ring_mask);
    ring.sq_array = (unsigned *)(sq + made.sq_off.array);
    ring.cq_head = (unsigned *)(cq + made.cq_off.head);
    ring.cq_tail = (unsigned *)(cq + made.cq_off.tail);
    ring.cq_mask = (unsigned *)(cq + made.cq_off.ring_mask);
    ring.cqes = (struct io_uring_cqe *)(cq + made.cq_off.cqes);
}

static ssize_t send_by_ring(int connection, const char *start, size_t left, int opcode) {
    unsigned tail = *ring.sq_tail, slot = tail & *ring.sq_mask;
    ring.sqes[slot] = (struct io_uring_sqe){
        .opcode = opcode, .fd = connection, .addr = (unsigned long)start, .len = left, .msg_flags = MSG_WAITALL};
    ring.sq_array[slot] = slot;
    __atomic_store_n(ring.sq_tail, tail + 1, __ATOMIC_RELEASE);
    for (int submitted = 1;; submitted = 0) {
        if (syscall(__NR_io_uring_enter, ring.file, submitted, 1, IORING_ENTER_GETEVENTS, 0, 0) < 0) fail("enter");
        while (*ring.cq_head != __atomic_load_n(ring.cq_tail, __ATOMIC_ACQUIRE)) {
            struct io_uring_cqe done = ring.cqes[*ring.cq_head & *ring.cq_mask];
            __atomic_store_n(ring.cq_head, *ring.cq_head + 1, __ATOMIC_RELEASE);
            if (!(done.flags & IORING_CQE_F_NOTIF)) return done.res;
        }
    }
}

static void read_notifications(int connection) {
    char control[128];
    struct msghdr message = {.msg_control = control, .msg_controllen = sizeof control};
    for (; recvmsg(connection, &message, MSG_ERRQUEUE) >= 0; message.msg_controllen = sizeof control)
        for (struct cmsghdr *one = CMSG_FIRSTHDR(&message); one; one = CMSG_NXTHDR(&message, one)) {
            struct sock_extended_err *told = (void *)CMSG_DATA(one);
            if (told->ee_origin != SO_EE_ORIGIN_ZEROCOPY) continue;
            unsigned sends = told->ee_data - told->ee_info + 1;
            notified += sends;
            if (told->ee_code & SO_EE_CODE_ZEROCOPY_COPIED) copied += sends;
        }
}

static ssize_t send_some(int connection, const char *start, size_t left, enum way way) {
    if (way >= URING) return send_by_ring(connection, start, left, way == URING ? IORING_OP_SEND : IORING_OP_SEND_ZC);
    ssize_t count = send(connection, start, left, way == ZEROCOPY ? MSG_ZEROCOPY : 0);
    if (way == ZEROCOPY) read_notifications(connection);
    return count < 0 && errno == ENOBUFS ? 0 : count;
}

static void receive(struct sockaddr_in address) {
    int connection = socket(AF_INET, SOCK_STREAM, 0);
    char *buffer = malloc(BYTES);
    if (connect(connection, (void *)&address, sizeof address)) fail("connect");
    for (long left = (long)BYTES * COUNT; left > 0;) {
        ssize_t count = recv(connection, buffer, BYTES, MSG_WAITALL);
        if (count <= 0) fail("recv");
        left -= count;
    }
    exit(0);
}

int main(int argc, char **argv) {
    if (argc < 2) return fprintf(stderr, "usage: sending WAY [ADDRESS]\n"), 2;
    enum way way = atoi(argv[1]);
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t length = sizeof address;
    int on = 1, status, listener = socket(AF_INET, SOCK_STREAM, 0);
    inet_aton(argc > 2 ? argv[2] : "127.0.0.1", &address.sin_addr);
    if (bind(listener, (void *)&address, length) || listen(listener, 1)) fail("listen");
    getsockname(listener, (void *)&address, &length);
    pid_t receiver = fork();
    if (receiver == 0) receive(address);
    int connection = accept(listener, 0, 0);
    setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (way == ZEROCOPY && setsockopt(connection, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on)) fail("SO_ZEROCOPY");
    if (way >= URING) open_ring();
    char *buffers[BUFFERS];
    for (int i = 0; i < BUFFERS; i++) memset(buffers[i] = malloc(BYTES), i, BYTES);
    double before = cpu_s(RUSAGE_SELF);
    for (int i = 0; i < COUNT; i++)
        for (size_t done = 0; done < BYTES;) {
            ssize_t count = send_some(connection, buffers[i % BUFFERS] + done, BYTES - done, way);
            if (count < 0) fail("send");
            done += count;
        }
    double sender = cpu_s(RUSAGE_SELF) - before, gigabytes = (double)BYTES * COUNT / 1e9;
    waitpid(receiver, &status, 0);
    if (way == ZEROCOPY) read_notifications(connection);
    printf("way %d: sender %.3f and receiver %.3f CPU-s for a gigabyte; %u of %u zero-copy sends were copied\n", way,
           sender / gigabytes, cpu_s(RUSAGE_CHILDREN) / gigabytes, copied, notified);
    return status != 0;
}
