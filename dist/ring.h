/* ring.h - collectives between processes that share no memory, over a wire: the first ranks of all
 * nodes. Private to this room.
 *
 * Large data goes around a ring in chunks, several of them under way. A sum goes around twice: the
 * first time each member adds its own to what comes, so that everyone ends up with the sum of one
 * part of the data; the second time these parts are handed on. Halves are added in f32 and rounded
 * for each hop; the last one to add takes the rounded value too, so that all have the same bits.
 * Small sums are exchanged by pairs, in log2(n) steps.
 *
 * A wait looks at the request, then sleeps a little, longer each time. What travels is copied in
 * and out: the wire never holds on to data of others.
 */
#ifndef LT_DIST_RING_H
#define LT_DIST_RING_H

#include "dist/net.h"
#include "dist/coll_sig.h"

typedef struct lt_ring { /* one member's view */
    const lt_net *net;
    const int *rank;     /* of each member, ascending. Borrowed */
    int index, size;     /* this member, and how many there are */
    int channel;         /* of the wire, for collectives */
    double timeout;      /* seconds in which something must move, */
    double grace;        /* and a few more, for who waits for one that waits for others */
    bool spin;           /* there is a CPU to burn */
    bool tree;           /* all sums are exchanged by pairs, as a balanced tree adds */
    /* Asked while it waits: LT_OK, or why there is no use in it. rank: whom it waits for. */
    lt_status (*check)(void *ud, const struct lt_ring *ring, int rank, const char *what);
    void *ud;
    char *slots;         /* for chunks under way */
    uint64_t bytes;      /* sent */
    char seen[LT_SEEN_BYTES];   /* where this member is, for others: see lt__shm_last_seen(); */
    char before[LT_SEEN_BYTES]; /* and where the one before was when they agreed last */
    int missing;         /* after a failure: whose it is, as far as one can tell */
} lt_ring;

/* Room for the chunks of *ring, whose other fields are set. LT_ENOMEM. */
lt_status lt__ring_open(lt_ring *ring);
/* Only when nothing is under way: the wire would still write. */
void lt__ring_close(lt_ring *ring);

/* The same of a rank, as far as this member knows. */
const char *lt__ring_last_seen(const lt_ring *ring, int rank);

/* All members want the same: LT_EDESYNC if the one in front of this one does not. */
lt_status lt__ring_match(lt_ring *ring, const lt_coll_sig *sig);
/* Whom this member waits for is gone: LT_EPEER. */
lt_status lt__ring_fail_peer(const lt_ring *ring, int rank, const char *what);
/* data = the sum over the members; sum->scale is 1 here, data is what the wire can hold. */
lt_status lt__ring_allreduce(lt_ring *ring, const lt_sum *sum);
/* root: a member. */
lt_status lt__ring_broadcast(lt_ring *ring, const char *what, void *data, size_t bytes, int root);
/* From any rank of the wire to another. */
lt_status lt__ring_send(lt_ring *ring, int to, const void *data, size_t bytes);
lt_status lt__ring_receive(lt_ring *ring, int from, void *data, size_t bytes);

#endif
