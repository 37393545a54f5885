/* liveness.c - TCP connections between the first ranks of all nodes; see liveness.h.
 *
 * Each member listens, connects to the members before it and accepts those after it. A machine may
 * have several addresses. Some may not be reachable from everywhere, and some may lead to another
 * machine. So all are tried at once, and the member that answers must prove its identity with a
 * random token.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <math.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/tensor.h"
#include "dist/liveness.h"

enum { MAX_ADDRESSES = 16 };
static const double OPEN_SECONDS = 2;

typedef struct offer { /* each member broadcasts one */
    uint64_t token;    /* random */
    int n;             /* number of addresses; 0 if the member cannot listen */
    struct sockaddr_in address[MAX_ADDRESSES];
} offer;

typedef struct hello { /* a member sends it to a listening member, which returns it */
    uint64_t token;    /* token in the offer of the listening member */
    uint64_t member;   /* the member that connects */
} hello;

typedef struct connection {
    int fd;              /* -1 if there is no connection */
    _Atomic double lost; /* lt__seconds() when it was lost, or 0 */
} connection;

struct lt_liveness {
    int n;
    connection connection[];
};

static void drop(connection *l)
{
    if (l->fd >= 0)
        close(l->fd);
    l->fd = -1;
}

/* ==== Listening =============================================================================== */

/* Writes the IPv4 addresses of this machine, with a port, to `to`. Returns how many. */
static int find_addresses(struct sockaddr_in *to, in_port_t port)
{
    struct ifaddrs *all;
    int n = 0;
    if (getifaddrs(&all) != 0)
        return 0;
    for (const struct ifaddrs *i = all; i && n < MAX_ADDRESSES; i = i->ifa_next)
        if (i->ifa_addr && i->ifa_addr->sa_family == AF_INET) {
            to[n] = *(const struct sockaddr_in *)(const void *)i->ifa_addr;
            to[n++].sin_port = port;
        }
    freeifaddrs(all);
    return n;
}

/* Starts to listen and fills the offer. Returns the socket, or -1. TCP_DEFER_ACCEPT keeps out
 * clients that connect but send nothing, so that they do not hold up the members. */
static int begin_to_listen(offer *o)
{
    struct sockaddr_in any = {.sin_family = AF_INET};
    socklen_t bytes = sizeof any;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), seconds = 60;
    bool good = fd >= 0 && bind(fd, (struct sockaddr *)&any, sizeof any) == 0 &&
                setsockopt(fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, &seconds, sizeof seconds) == 0 &&
                listen(fd, SOMAXCONN) == 0 &&
                getsockname(fd, (struct sockaddr *)&any, &bytes) == 0 &&
                getrandom(&o->token, sizeof o->token, 0) == sizeof o->token;
    o->n = good ? find_addresses(o->address, any.sin_port) : 0;
    return fd;
}

static int milliseconds_until(double deadline)
{
    double left = deadline - lt__seconds();
    return left > 0 ? (int)(1e3 * left) + 1 : 0;
}

static bool is_readable(int fd, double deadline)
{
    struct pollfd one = {.fd = fd, .events = POLLIN};
    return poll(&one, 1, milliseconds_until(deadline)) > 0;
}

static bool receive_hello(int fd, hello *h)
{
    return recv(fd, h, sizeof *h, MSG_DONTWAIT) == sizeof *h;
}

static bool send_hello(int fd, const hello *h)
{
    return send(fd, h, sizeof *h, MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof *h;
}

/* Accepts connections until all members after this one are connected, or until the deadline. */
static void accept_all(lt_liveness *liveness, int own, int listener, uint64_t token,
                       double deadline)
{
    int missing = liveness->n - 1 - own;
    while (missing > 0 && is_readable(listener, deadline)) {
        hello h;
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0)
            continue;
        bool good = is_readable(fd, deadline) && receive_hello(fd, &h) && h.token == token &&
                    h.member > (uint64_t)own && h.member < (uint64_t)liveness->n &&
                    liveness->connection[h.member].fd < 0 && send_hello(fd, &h);
        if (!good) { /* this is not one of the members */
            close(fd);
            continue;
        }
        liveness->connection[h.member].fd = fd;
        missing--;
    }
}

/* ==== Connecting ============================================================================== */

static int begin_to_connect(const struct sockaddr_in *to)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, (const struct sockaddr *)to, sizeof *to) != 0 &&
        errno != EINPROGRESS) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* Handles an event of an attempt: it is connected, has an answer, or has failed. Returns whether it
 * has reached the right member. */
static bool advance(struct pollfd *attempt, const hello *h)
{
    hello back;
    bool answers = attempt->events == POLLIN && receive_hello(attempt->fd, &back);
    if (answers && back.token == h->token)
        return true;
    if (attempt->events == POLLIN || !send_hello(attempt->fd, h)) {
        close(attempt->fd);
        attempt->fd = -1;
    }
    attempt->events = POLLIN;
    return false;
}

static int open_attempts(const struct pollfd *attempts, int n)
{
    int open = 0;
    for (int i = 0; i < n; i++)
        open += attempts[i].fd >= 0;
    return open;
}

/* Connects to the member with this offer. Returns the socket, or -1. */
static int connect_to(const offer *o, int own, double deadline)
{
    struct pollfd attempts[MAX_ADDRESSES];
    hello h = {.token = o->token, .member = (uint64_t)own};
    int found = -1;
    for (int i = 0; i < o->n; i++)
        attempts[i] = (struct pollfd){.fd = begin_to_connect(&o->address[i]), .events = POLLOUT};
    while (found < 0 && open_attempts(attempts, o->n) > 0 &&
           poll(attempts, (nfds_t)o->n, milliseconds_until(deadline)) > 0)
        for (int i = 0; i < o->n && found < 0; i++)
            if (attempts[i].fd >= 0 && attempts[i].revents && advance(&attempts[i], &h))
                found = i;
    for (int i = 0; i < o->n; i++)
        if (i != found && attempts[i].fd >= 0)
            close(attempts[i].fd);
    return found < 0 ? -1 : attempts[found].fd;
}

/* ==== All members ============================================================================= */

/* The index of the connection between members a and b of n. */
static int64_t place(int64_t n, int64_t a, int64_t b) { return a < b ? a * n + b : b * n + a; }

/* Drops connections that only one end regards as open, because the other end has timed out. */
static lt_status drop_half_connections(lt_ring *ring, lt_liveness *liveness)
{
    int64_t n = liveness->n, own = ring->index;
    int64_t *ends;
    LT_TRY(LT_CALLOC(ends, n * n, "for %d nodes", liveness->n));
    lt_sum sum = {"the connections between nodes", ends, n * n, LT_I64, LT_I64, 1};
    for (int64_t i = 0; i < n; i++)
        ends[place(n, i, own)] = liveness->connection[i].fd >= 0;
    lt_status status = lt__ring_allreduce(ring, &sum);
    for (int64_t i = 0; i < n; i++)
        if (ends[place(n, i, own)] < 2)
            drop(&liveness->connection[i]);
    free(ends);
    return status;
}

static lt_status open_all(lt_ring *ring, lt_liveness *liveness, offer *offers, int *listener)
{
    int own = ring->index;
    *listener = begin_to_listen(&offers[own]);
    for (int i = 0; i < liveness->n; i++)
        LT_TRY(
            lt__ring_broadcast(ring, "the addresses of the nodes", &offers[i], sizeof *offers, i));
    double deadline = lt__seconds() + fmin(OPEN_SECONDS, ring->timeout / 2);
    for (int i = 0; i < own; i++)
        liveness->connection[i].fd = connect_to(&offers[i], own, deadline);
    if (offers[own].n > 0)
        accept_all(liveness, own, *listener, offers[own].token, deadline);
    return drop_half_connections(ring, liveness);
}

lt_status lt__liveness_open(lt_ring *ring, lt_liveness **to)
{
    size_t n = (size_t)ring->size;
    int listener = -1;
    offer *offers;
    LT_TRY(LT_CALLOC(offers, n, "for %d nodes", ring->size));
    lt_liveness *liveness = lt__calloc(1, sizeof *liveness + n * sizeof *liveness->connection,
                                       "for %d nodes", ring->size);
    lt_status status = liveness ? LT_OK : LT_ENOMEM;
    if (liveness) {
        liveness->n = ring->size;
        for (size_t i = 0; i < n; i++)
            liveness->connection[i].fd = -1;
        status = open_all(ring, liveness, offers, &listener);
    }
    if (listener >= 0)
        close(listener);
    free(offers);
    *to = liveness; /* not before: while it opens, the end of a connection is not a loss */
    return status;
}

void lt__liveness_close(lt_liveness *liveness)
{
    for (int i = 0; liveness && i < liveness->n; i++)
        drop(&liveness->connection[i]);
    free(liveness);
}

void lt__liveness_leave(lt_liveness *liveness)
{
    for (int i = 0; i < liveness->n; i++)
        if (liveness->connection[i].fd >= 0) {
            ssize_t sent = send(liveness->connection[i].fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
            (void)sent; /* if this fails, the other process is gone and needs no notice */
        }
}

/* Whether the other process has ended without leaving. Peeks only: the byte of a member that has
 * left stays in the socket, so the connection does not look closed. */
static bool has_ended(int fd)
{
    char byte;
    ssize_t n = recv(fd, &byte, sizeof byte, MSG_DONTWAIT | MSG_PEEK);
    return n == 0 || (n < 0 && errno == ECONNRESET);
}

bool lt__liveness_is_lost(lt_liveness *liveness, int member, double seconds)
{
    connection *l = &liveness->connection[member];
    if (l->fd >= 0 && atomic_load(&l->lost) == 0 && has_ended(l->fd))
        atomic_store(&l->lost, lt__seconds());
    double when = atomic_load(&l->lost);
    return when != 0 && lt__seconds() >= when + seconds;
}

bool lt__liveness_is_connected(lt_liveness *liveness, int member)
{
    return liveness->connection[member].fd >= 0 && !lt__liveness_is_lost(liveness, member, 0);
}
