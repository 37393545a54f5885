/* mpi_part.c - parts of a job whose ranks are processes; see lt__group_split(). The first rank of
 * the part on each node makes the control block, and the first ranks form the ring.
 *
 * A control block lives until the job's group is closed. Other ranks find its mapping by a file
 * descriptor, and drop their view of it when the descriptor belongs to another mapping.
 */
#include <stdlib.h>

#include "core/tensor.h"
#include "dist/mpi_transport.h"

/* ==== The control block ======================================================================= */

static lt_status keep_offered(mpi_transport *job, void *mapping)
{
    lt_status status = LT_RESIZE(job->offered, job->n_offered + 1, "for a part of the ranks");
    if (status == LT_OK)
        job->offered[job->n_offered++] = mapping;
    else
        lt__mapping_free(job->mappings, mapping);
    return status;
}

/* Sets *n to the number of the part's ranks on this node. Returns the first of them. */
static int first_here(const mpi_transport *job, const lt_part *part, int *n)
{
    const int *first_of = job->nodes.first_of;
    int first = -1;
    *n = 0;
    for (int i = 0; i < part->size; i++)
        if (first_of[part->rank[i]] == first_of[job->net.rank]) {
            first = *n == 0 ? part->rank[i] : first;
            ++*n;
        }
    return first;
}

lt_status lt__mpi_offer(void *self, const lt_part *part, int64_t *handle)
{
    mpi_transport *job = self;
    int n;
    if (first_here(job, part, &n) != job->net.rank)
        return LT_OK;
    void *mapping = lt__mapping_new(job->mappings, lt__shm_control_bytes(n));
    if (!mapping)
        return LT_ENOMEM;
    lt__shm_control_init(mapping, n);
    *handle = (int64_t)lt__mapping_handle(job->mappings, mapping);
    return keep_offered(job, mapping);
}

/* ==== Join ==================================================================================== */

static int slot_in_job(const mpi_transport *job, int rank)
{
    int slot = 0;
    while (job->nodes.rank_of[slot] != rank)
        slot++;
    return slot;
}

/* Maps the control block of this node. */
static lt_status join_shm(mpi_transport *c, const int64_t *handles)
{
    const mpi_transport *job = c->job;
    int first = c->nodes.rank_of[0];
    lt_shm *shm = &c->at.shm[0];
    *shm = job->at.shm[0]; /* for the callbacks */
    shm->job = job->at.shm[0].control;
    shm->size = c->nodes.n_here;
    shm->rank_of = c->nodes.rank_of;
    shm->slot_of = c->slot_of;
    shm->staging = NULL;
    shm->collectives = 0;
    shm->bytes = 0;
    for (int slot = 0; slot < shm->size; slot++) {
        c->slot_of[slot] = slot_in_job(job, c->nodes.rank_of[slot]);
        if (c->nodes.rank_of[slot] == c->net.rank)
            shm->rank = slot;
    }
    shm->control = shm->rank == 0 ? job->offered[job->n_offered - 1]
                                  : lt__mapping_find(c->mappings, job->nodes.pid[c->slot_of[0]],
                                                     (uint64_t)handles[first]);
    if (!shm->control)
        return lt_errcode();
    if (shm->size == 1) { /* no other rank reads its data */
        shm->handle_of = NULL;
        shm->map = NULL;
        return LT_OK;
    }
    shm->staging = lt__mapping_new(c->mappings, shm->staging_bytes);
    return shm->staging ? LT_OK : LT_ENOMEM;
}

/* Each split has its own channels of the network. */
static lt_status join_ring(mpi_transport *c)
{
    const mpi_transport *job = c->job;
    int base = LT_NET_PARTS + LT_NET_OF_GROUP * job->splits;
    c->ring[0] = (lt_ring){.net = &job->net,
                           .rank = c->nodes.first,
                           .index = c->nodes.own,
                           .size = c->nodes.n,
                           .channel = base + LT_NET_DATA,
                           .base = base,
                           .timeout = job->ring[0].timeout,
                           .check = job->ring[0].check,
                           .ud = c};
    return lt__ring_open(&c->ring[0]);
}

lt_status lt__mpi_open_side(mpi_transport *c)
{
    lt_shm *shm = c->at.shm, *side = shm + 1;
    lt_ring *ring = c->ring;
    *side = *shm;
    side->channel = 1;
    side->collectives = 0;
    if (shm->staging && !(side->staging = lt__mapping_new(c->mappings, shm->staging_bytes)))
        return LT_ENOMEM;
    ring[1] = ring[0];
    ring[1].channel = ring->base + LT_NET_SIDE;
    ring[1].slots = NULL;
    ring[1].bytes = 0;
    return shm->rank == 0 && c->nodes.n > 1 ? lt__ring_open(&ring[1]) : LT_OK;
}

static lt_status begin(mpi_transport *c, const lt_part *part, const int64_t *handles)
{
    const lt_net *net = &c->net;
    LT_TRY(LT_CALLOC(c->slot_of, part->size, "for %d ranks", part->size));
    LT_TRY(
        lt__nodes_select(&c->nodes, &c->job->nodes, part->rank, part->size, net->size, net->rank));
    LT_TRY(join_shm(c, handles));
    LT_TRY(join_ring(c));
    return lt__mpi_open_side(c);
}

void lt__mpi_close_channels(mpi_transport *c)
{
    for (int i = 0; i < LT_SHM_CHANNELS; i++) {
        lt__ring_close(&c->ring[i]);
        if (c->at.shm[i].staging)
            lt__mapping_free(c->mappings, c->at.shm[i].staging);
    }
}

static void free_part(mpi_transport *c)
{
    lt__mpi_close_channels(c);
    lt__nodes_free(&c->nodes, c->mappings);
    free(c->slot_of);
    free(c);
}

lt_status lt__mpi_join(void *self, const lt_part *part, const int64_t *handles,
                       lt_endpoint **of_part)
{
    mpi_transport *job = self, *c;
    LT_TRY(LT_CALLOC(c, 1, "for a part of the ranks"));
    c->job = job;
    c->member = part->rank;
    c->size = part->size;
    c->net = job->net;
    c->mappings = job->mappings;
    c->notices = job->notices;
    c->liveness = job->liveness;
    lt_status status = begin(c, part, handles);
    job->splits++;
    if (status == LT_OK)
        *of_part = &c->at;
    else
        free_part(c);
    return status;
}

/* After a failure, requests may be pending that point into the part, so it is not freed. */
void lt__mpi_close_part(mpi_transport *c)
{
    if (!lt__shm_has_failed(&c->at.shm[0]))
        free_part(c);
}
