/* test_liveness.c - liveness connections while strangers connect first and send nothing or
 * something else, and members that close with or without notice. */
#include <arpa/inet.h>
#include <pthread.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "dist/liveness.h"
#include "tests/dist/fake_net.h"
#include "tests/lt_test.h"

enum { MEMBERS = 3, MAX_FDS = 256, KINDS = 4 };

typedef struct one { /* a member; its index is the network's rank */
    lt_ring ring;
    lt_net net;
    lt_liveness *liveness;
    lt_status status;
    pthread_t thread;
} one;

static one members[MEMBERS];
static atomic_bool strangers_connected;

static void pause_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

static lt_status check_nothing(void *ud, const lt_ring *ring, int rank, const char *what)
{
    (void)ud, (void)ring, (void)rank, (void)what;
    return LT_OK;
}

/* No message arrives before the strangers are connected to all listeners. */
static int test_late(void *self, lt_request *r)
{
    return atomic_load(&strangers_connected) ? fake_test(self, r) : 0;
}

static void *open_connections(void *ud)
{
    one *m = ud;
    m->status = lt__liveness_open(&m->ring, &m->liveness);
    return NULL;
}

/* Finds the addresses at which this process listens. Returns their number. */
static int find_listeners(struct sockaddr_in door[MAX_FDS])
{
    int n = 0;
    for (int fd = 0; fd < MAX_FDS; fd++) {
        int listens = 0;
        socklen_t bytes = sizeof listens, capacity = sizeof *door;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) == 0 && listens &&
            getsockname(fd, (struct sockaddr *)&door[n], &capacity) == 0)
            n++;
    }
    return n;
}

/* Connects a stranger: 0 sends nothing, 1 sends one byte, 2 and 3 send a member's greeting. */
static int connect_stranger(const struct sockaddr_in *door, int kind)
{
    static const uint64_t hello[] = {1, 1, 1, 2};
    struct sockaddr_in to = *door;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(fd, (struct sockaddr *)&to, sizeof to) == 0);
    if (kind > 0)
        CHECK(send(fd, kind == 3 ? hello + 2 : hello, kind == 1 ? 1 : 16, 0) > 0);
    return fd;
}

static void open_among_strangers(int stranger[MEMBERS * KINDS])
{
    static const int ranks[MEMBERS] = {0, 1, 2};
    struct sockaddr_in door[MAX_FDS];
    fake_hub *hub = fake_hub_new();
    for (int i = 0; i < MEMBERS; i++) {
        one *m = &members[i];
        m->net = fake_net_new(hub, i, MEMBERS, ranks);
        m->net.test = test_late;
        m->ring = (lt_ring){.net = &m->net,
                            .rank = ranks,
                            .index = i,
                            .size = MEMBERS,
                            .timeout = 30,
                            .check = check_nothing};
        CHECK_OK(lt__ring_open(&m->ring));
        pthread_create(&m->thread, NULL, open_connections, m);
    }
    while (find_listeners(door) < MEMBERS)
        pause_ms(1);
    for (int i = 0; i < MEMBERS * KINDS; i++)
        stranger[i] = connect_stranger(&door[i % MEMBERS], i / MEMBERS);
    atomic_store(&strangers_connected, true);
    for (int i = 0; i < MEMBERS; i++) {
        pthread_join(members[i].thread, NULL);
        lt__ring_close(&members[i].ring);
        members[i].net.close(members[i].net.self);
    }
    fake_hub_free(hub);
}

/* Whether a connection is lost within 200 ms. */
static bool is_lost_soon(int from, int to)
{
    for (int i = 0; i < 200; i++) {
        if (lt__liveness_is_lost(members[from].liveness, to, 0))
            return true;
        pause_ms(1);
    }
    return false;
}

TEST(strangers_do_not_block_connections)
{
    int stranger[MEMBERS * KINDS];
    open_among_strangers(stranger);
    for (int i = 0; i < MEMBERS; i++) {
        CHECK_OK(members[i].status);
        for (int k = 0; k < MEMBERS; k++)
            CHECK_EQ(lt__liveness_is_connected(members[i].liveness, k), k != i);
    }
    lt__liveness_leave(members[1].liveness);
    lt__liveness_close(members[1].liveness);
    CHECK(!is_lost_soon(0, 1) && lt__liveness_is_connected(members[0].liveness, 1));
    lt__liveness_close(members[2].liveness);
    CHECK(is_lost_soon(0, 2) && !lt__liveness_is_connected(members[0].liveness, 2));
    CHECK(!lt__liveness_is_lost(members[0].liveness, 2, 10));
    lt__liveness_close(members[0].liveness);
    for (int i = 0; i < MEMBERS * KINDS; i++)
        close(stranger[i]);
}
