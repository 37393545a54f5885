/* nodes.c - groups ranks into nodes; see nodes.h. The first rank on a machine offers the others a
 * control block in a mapping of its own. Either all ranks of the machine use it, or each makes one
 * for itself alone.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/tensor.h"
#include "dist/nodes.h"

/* A unique token precedes the control block and identifies the mapping. It has this much space, so
 * that the control block is aligned. */
enum { MARK_BYTES = 128 };

static lt_status allocate(lt_nodes *nodes, int size)
{
    LT_TRY(LT_CALLOC(nodes->rank_of, size, "for %d ranks", size));
    LT_TRY(LT_CALLOC(nodes->pid, size, "for %d ranks", size));
    LT_TRY(LT_CALLOC(nodes->first_of, size, "for %d ranks", size));
    return LT_CALLOC(nodes->first, size, "for %d ranks", size);
}

void lt__nodes_free(lt_nodes *nodes, lt_mappings *mappings)
{
    if (nodes->own_mapping)
        lt__mapping_free(mappings, nodes->own_mapping);
    free(nodes->rank_of);
    free(nodes->pid);
    free(nodes->first_of);
    free(nodes->first);
}

int lt__node_of(const lt_nodes *nodes, int rank)
{
    int n = 0;
    while (nodes->first[n] != nodes->first_of[rank])
        n++;
    return n;
}

/* ==== On this machine ========================================================================= */

/* The times of the notices follow the control block, which is for n ranks. */
static void set_control(lt_nodes *nodes, int n, void *window)
{
    char *at = (char *)window + MARK_BYTES;
    nodes->control = (lt_shm_control *)at;
    nodes->noticed = (_Atomic double *)(at + lt__shm_control_bytes(n));
}

/* Makes a control block for n ranks, of `size` in the job. */
static lt_status make_control(lt_nodes *nodes, int n, int size, lt_mappings *mappings)
{
    size_t bytes = lt__shm_control_bytes(n) + (size_t)size * sizeof *nodes->noticed;
    uint64_t mark = (uint64_t)getpid() << 32 ^ (uint64_t)(1e6 * lt__seconds());
    nodes->own_mapping = lt__mapping_new(mappings, MARK_BYTES + bytes);
    if (!nodes->own_mapping)
        return LT_ENOMEM;
    memcpy(nodes->own_mapping, &mark, sizeof mark);
    set_control(nodes, n, nodes->own_mapping);
    lt__shm_control_init(nodes->control, n);
    return LT_OK;
}

/* Receives from a rank that may itself wait for another one, and so on. waits: the number of ranks
 * in this chain. The last one times out first, and its message names the missing rank. */
static lt_status receive(lt_ring *ring, int from, void *data, size_t bytes, int waits)
{
    ring->grace = waits * LT_GRACE_SECONDS;
    lt_status status = lt__ring_receive(ring, from, data, bytes);
    ring->grace = 0;
    return status;
}

typedef struct offer { /* sent by the first rank on a machine to the others there */
    uint64_t handle, mark;
    int pid;
} offer;

/* On the first rank: makes the control block and offers it. Sets nodes->pid on all ranks of the
 * machine to their process ids if all of them can map it, or else to zeros. */
static lt_status offer_control(lt_nodes *nodes, lt_ring *ring, lt_mappings *mappings)
{
    const lt_net *w = ring->net;
    size_t bytes = (size_t)w->n_node * sizeof *nodes->pid;
    offer mine = {.pid = getpid()};
    LT_TRY(make_control(nodes, w->n_node, w->size, mappings));
    mine.handle = lt__mapping_handle(mappings, nodes->own_mapping);
    memcpy(&mine.mark, nodes->own_mapping, sizeof mine.mark);
    bool together = true;
    for (int i = 1; i < w->n_node; i++)
        LT_TRY(lt__ring_send(ring, w->node[i], &mine, sizeof mine));
    for (int i = 1; i < w->n_node; i++) {
        LT_TRY(lt__ring_receive(ring, w->node[i], &nodes->pid[i], sizeof *nodes->pid));
        together &= nodes->pid[i] != 0;
    }
    nodes->pid[0] = mine.pid;
    if (!together)
        memset(nodes->pid, 0, bytes);
    for (int i = 1; i < w->n_node; i++)
        LT_TRY(lt__ring_send(ring, w->node[i], nodes->pid, bytes));
    return LT_OK;
}

/* On the other ranks: the counterpart of offer_control(). */
static lt_status accept_control(lt_nodes *nodes, lt_ring *ring, lt_mappings *mappings)
{
    const lt_net *w = ring->net;
    offer o;
    LT_TRY(lt__ring_receive(ring, w->node[0], &o, sizeof o));
    void *window = lt__mapping_find(mappings, o.pid, o.handle);
    bool good = window && memcmp(window, &o.mark, sizeof o.mark) == 0;
    int pid = good ? getpid() : 0;
    if (good)
        set_control(nodes, w->n_node, window);
    LT_TRY(lt__ring_send(ring, w->node[0], &pid, sizeof pid));
    return receive(ring, w->node[0], nodes->pid, (size_t)w->n_node * sizeof *nodes->pid, 1);
}

lt_status lt__nodes_share_memory(lt_nodes *nodes, lt_ring *ring, lt_mappings *mappings)
{
    const lt_net *w = ring->net;
    LT_TRY(allocate(nodes, w->size));
    LT_TRY(w->node[0] == w->rank ? offer_control(nodes, ring, mappings)
                                 : accept_control(nodes, ring, mappings));
    if (nodes->pid[0] != 0) {
        nodes->n_here = w->n_node;
        memcpy(nodes->rank_of, w->node, (size_t)w->n_node * sizeof *nodes->rank_of);
        return LT_OK;
    }
    nodes->n_here = 1;
    nodes->rank_of[0] = w->rank;
    return nodes->own_mapping ? LT_OK : make_control(nodes, 1, w->size, mappings);
}

/* ==== On all machines ========================================================================= */

/* Rank 0 gathers the first rank of each rank's node, and sends the result to all. */
lt_status lt__nodes_find(lt_nodes *nodes, lt_ring *ring)
{
    int rank = ring->net->rank, size = ring->net->size;
    size_t bytes = (size_t)size * sizeof *nodes->first_of;
    nodes->first_of[rank] = nodes->rank_of[0];
    for (int r = 1; r < size && rank == 0; r++)
        LT_TRY(receive(ring, r, &nodes->first_of[r], sizeof *nodes->first_of, 2));
    for (int r = 1; r < size && rank == 0; r++)
        LT_TRY(lt__ring_send(ring, r, nodes->first_of, bytes));
    if (rank > 0) {
        LT_TRY(lt__ring_send(ring, 0, &nodes->first_of[rank], sizeof *nodes->first_of));
        LT_TRY(receive(ring, 0, nodes->first_of, bytes, 3));
    }
    for (int r = 0; r < size; r++)
        if (nodes->first_of[r] == r)
            nodes->first[nodes->n++] = r;
    nodes->own = lt__node_of(nodes, rank);
    return LT_OK;
}

/* ==== Some of the ranks ======================================================================= */

lt_status lt__nodes_select(lt_nodes *nodes, const lt_nodes *job, const int *rank, int n, int size,
                           int own)
{
    LT_TRY(allocate(nodes, size));
    for (int i = 0; i < n; i++) {
        int first = 0; /* index of the first of these ranks on the node of rank[i] */
        while (job->first_of[rank[first]] != job->first_of[rank[i]])
            first++;
        nodes->first_of[rank[i]] = rank[first];
        if (first == i)
            nodes->first[nodes->n++] = rank[i];
        if (job->first_of[rank[i]] == job->first_of[own])
            nodes->rank_of[nodes->n_here++] = rank[i];
    }
    nodes->own = lt__node_of(nodes, own);
    return LT_OK;
}
