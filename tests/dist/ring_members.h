/* ring_members.h - members of a ring over a fake network, in threads. Include it in one file of a
 * test. */
#ifndef LT_TESTS_DIST_RING_MEMBERS_H
#define LT_TESTS_DIST_RING_MEMBERS_H

#include "dist/liveness.h"
#include "tests/dist/fake_net.h"
#include "tests/dist/threads.h"

enum { MOST = 7 };

typedef struct one { /* a member of the ring; its index is the network's rank */
    lt_ring ring;
    lt_net net;
    lt_liveness *liveness; /* for the test, like what follows */
    uint64_t bits;
    void *ud;
    lt_status (*body)(struct one *m);
    lt_status status;
    char text[256];
} one;

static lt_status check_nothing(void *ud, const lt_ring *ring, int rank, const char *what)
{
    (void)ud, (void)ring, (void)rank, (void)what;
    return LT_OK;
}

static inline void *run_one(void *ud)
{
    one *m = ud;
    m->status = m->body(m);
    snprintf(m->text, sizeof m->text, "%s", m->status == LT_OK ? "" : lt_errmsg());
    return NULL;
}

static inline fake_hub *open_members(int n, one *members, lt_status (*body)(one *m))
{
    static const int ranks[MOST] = {0, 1, 2, 3, 4, 5, 6};
    fake_hub *hub = fake_hub_new();
    for (int i = 0; i < n; i++) {
        one *m = &members[i];
        *m = (one){.net = fake_net_new(hub, i, n, ranks), .body = body};
        m->ring = (lt_ring){.net = &m->net,
                            .rank = ranks,
                            .index = i,
                            .size = n,
                            .timeout = 30,
                            .check = check_nothing};
        CHECK_OK(lt__ring_open(&m->ring));
    }
    return hub;
}

static inline void close_members(int n, one *members, fake_hub *hub)
{
    for (int i = 0; i < n; i++) {
        lt__ring_close(&members[i].ring);
        members[i].net.close(members[i].net.self);
    }
    fake_hub_free(hub);
}

#endif
