/* ring.h - collectives over a network, between processes that share no memory: the first ranks of
 * all nodes. Private to dist.
 *
 * Large data goes around a ring in chunks, several of which are in transit at once. An allreduce is
 * a reduce-scatter followed by an allgather. Data goes around once, and each member adds its own
 * values to what arrives, so that each ends up with the sum of one part. Then the parts go around.
 * f16 and bf16 values are added in f32 and rounded for each hop. The last member to add keeps the
 * rounded value as well, so the results are bit-identical. Small sums use recursive doubling:
 * members exchange them in pairs, in log2(n) steps.
 *
 * A wait tests its requests and sleeps in between, longer each time, up to 1 ms.
 */
#ifndef LT_DIST_RING_H
#define LT_DIST_RING_H

#include "dist/net.h"
#include "dist/coll_sig.h"

enum { LT_GRACE_SECONDS = 1 }; /* for lt_ring.grace and lt_shm.grace */

typedef struct lt_ring { /* one member's view */
    const lt_net *net;   /* borrowed */
    const int *rank;     /* (size) the rank of each member, ascending. Borrowed */
    int index, size;     /* index of this member; number of members */
    int channel;         /* channel of the network, for collectives */
    int base;            /* added to LT_NET_CONTROL for messages between two ranks */
    double timeout;      /* seconds without progress until a wait fails */
    double grace;        /* extra seconds, for a peer that may itself be waiting for others */
    bool spin;           /* waits may spin before they sleep */
    bool tree;           /* use recursive doubling for all sums, which makes them tree sums */
    /* Called while this member waits for `rank` in collective `what`. Returns LT_OK to keep
     * waiting, or the error that ends the wait. */
    lt_status (*check)(void *ud, const struct lt_ring *ring, int rank, const char *what);
    void *ud;
    char *slots;                /* memory for chunks in transit */
    uint64_t bytes;             /* bytes sent so far */
    char seen[LT_SEEN_BYTES];   /* location of this member, from lt__shm_last_seen() */
    char before[LT_SEEN_BYTES]; /* location of the previous member at the last lt__ring_match() */
    int missing;                /* after a failure, the rank that probably caused it */
} lt_ring;

/* Allocates the slots of *ring, whose other fields are set. LT_ENOMEM. */
lt_status lt__ring_open(lt_ring *ring);
/* Frees the slots. Not while requests are pending, because the network still uses the slots. */
void lt__ring_close(lt_ring *ring);

/* The last known location of a rank, as text for the end of a message; "" if it is not known, as
 * for all ranks but the previous member. Borrowed. */
const char *lt__ring_last_seen(const lt_ring *ring, int rank);

/* Checks the signature of a collective, and exchanges locations. A collective of the ring, like
 * lt__ring_allreduce() and lt__ring_broadcast(). LT_EDESYNC if the previous member's signature
 * differs, or LT_EPEER. */
lt_status lt__ring_match(lt_ring *ring, const lt_coll_sig *sig);
/* Fails with LT_EPEER and a message that this member was waiting for a rank that was lost. */
lt_status lt__ring_fail_peer(const lt_ring *ring, int rank, const char *what);
/* sum->data = the sum over the members. sum->scale is ignored: data must already be scaled, and
 * rounded to sum->wire. */
lt_status lt__ring_allreduce(lt_ring *ring, const lt_sum *sum);
/* root: the index of a member in the ring. */
lt_status lt__ring_broadcast(lt_ring *ring, const char *what, void *data, size_t bytes, int root);
/* Between any two ranks of the network, members or not. LT_EPEER; lt__ring_receive() also fails
 * with LT_EDESYNC if the numbers of bytes differ. */
lt_status lt__ring_send(lt_ring *ring, int to, const void *data, size_t bytes);
lt_status lt__ring_receive(lt_ring *ring, int from, void *data, size_t bytes);

#endif
