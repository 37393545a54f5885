/* nodes.h - groups ranks into nodes. The network knows which ranks are on one machine. They are one
 * node if all of them can map shared memory of the first; otherwise each is a node of its own.
 * Private to dist.
 */
#ifndef LT_DIST_NODES_H
#define LT_DIST_NODES_H

#include <stdatomic.h>

#include "dist/ring.h"
#include "dist/shm.h"
#include "dist/mapping.h"

typedef struct lt_nodes {
    int *rank_of, *pid, n_here; /* (n_here) rank and process id of each slot of this node */
    lt_shm_control *control;    /* control block of this node, in a mapping */
    void *own_mapping;          /* if this rank made a control block, its mapping; or NULL */
    /* (ranks) when the notice of each node arrived here, as lt__seconds(), or 0; see notices.h.
     * Common to the ranks of this node */
    _Atomic double *noticed;
    int *first_of; /* (ranks) for each rank, the first rank of its node */
    int *first, n; /* (n) the first rank of each node */
    int own;       /* the index of this node */
} lt_nodes;

/* The first two functions are collectives over the network of ring. LT_ENOMEM, or an error of
 * lt__ring_send() or lt__ring_receive(). */
/* Sets up this node. *nodes must be all zeros. */
lt_status lt__nodes_share_memory(lt_nodes *nodes, lt_ring *ring, lt_mappings *mappings);
/* Finds the other nodes. Call it after lt__nodes_share_memory(). */
lt_status lt__nodes_find(lt_nodes *nodes, lt_ring *ring);
/* Sets *nodes, all zeros, to the nodes that contain some of the ranks: rank (n), ascending. `own`
 * is one of them. job: all nodes, with `size` ranks. The slots of *nodes are only these ranks. Does
 * not set pid, control and noticed. LT_ENOMEM. */
lt_status lt__nodes_select(lt_nodes *nodes, const lt_nodes *job, const int *rank, int n, int size,
                           int own);
void lt__nodes_free(lt_nodes *nodes, lt_mappings *mappings);

/* The index of the node of a rank. */
int lt__node_of(const lt_nodes *nodes, int rank);

#endif
