/* test_liveness.c - liveness connections while strangers connect first and send nothing or
 * something else, and members that close with or without notice. */
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/dist/ring_members.h"

enum { MEMBERS = 3, MAX_FDS = 256, KINDS = 4 };

static one members[MEMBERS];
static atomic_bool strangers_connected;

/* No message arrives before the strangers are connected to all listeners. */
static int test_late(void *self, lt_request *r)
{
    return atomic_load(&strangers_connected) ? fake_test(self, r) : 0;
}

static lt_status open_connections(one *m) { return lt__liveness_open(&m->ring, &m->liveness); }

/* The ring calls this while it waits. The result is not visible before all connections are open: a
 * connection that ends earlier is not the loss of a member. */
static lt_status check_not_open(void *ud, const lt_ring *ring, int rank, const char *what)
{
    (void)ring, (void)rank;
    return ((one *)ud)->liveness ? lt_fail(LT_EINVAL, "the liveness is set within %s", what)
                                 : LT_OK;
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
    struct sockaddr_in door[MAX_FDS];
    pthread_t thread[MEMBERS];
    fake_hub *hub = open_members(MEMBERS, members, open_connections);
    for (int i = 0; i < MEMBERS; i++) {
        members[i].net.test = test_late;
        members[i].ring.check = check_not_open;
        members[i].ring.ud = &members[i];
        pthread_create(&thread[i], NULL, run_one, &members[i]);
    }
    while (find_listeners(door) < MEMBERS)
        pause_ms(1);
    for (int i = 0; i < MEMBERS * KINDS; i++)
        stranger[i] = connect_stranger(&door[i % MEMBERS], i / MEMBERS);
    atomic_store(&strangers_connected, true);
    for (int i = 0; i < MEMBERS; i++)
        pthread_join(thread[i], NULL);
    close_members(MEMBERS, members, hub);
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
