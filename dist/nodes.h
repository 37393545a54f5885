/* nodes.h - who is on which node: the network tells which ranks are on one machine, and those of
 * them that can map each other's memory are a node. Private to this room.
 */
#ifndef LT_DIST_NODES_H
#define LT_DIST_NODES_H

#include "dist/ring.h"
#include "dist/shm.h"
#include "dist/mapping.h"

typedef struct lt_nodes {
    int *rank_of, *pid, n_here; /* of each slot of this node: the rank, and its process */
    lt_shm_control *control;         /* of this node */
    void *own_mapping;              /* the window in which this rank has made one; or NULL */
    int *first_of;           /* of each rank: the first rank of its node */
    int *first, n;           /* the first rank of each node; */
    int own;                 /* this one's place among them */
} lt_nodes;

/* Both are collectives, of letters over the network of ring, and fail as those do, or with
 * LT_ENOMEM. First who is on this node, of *nodes that is zero; then who is on others. */
lt_status lt__nodes_share_memory(lt_nodes *nodes, lt_ring *ring, lt_mappings *mappings);
lt_status lt__nodes_find(lt_nodes *nodes, lt_ring *ring);
void lt__nodes_free(lt_nodes *nodes, lt_mappings *mappings);

/* The node of a rank. */
int lt__node_of(const lt_nodes *nodes, int rank);

#endif
