/* mpi_transport.c - the transport of ranks that are processes. The ranks of a node form a
 * shared-memory communicator (shm.h). The first ranks of all nodes form a ring (ring.h). A
 * collective runs within each node, then between the nodes, then within each node again.
 *
 * The control block of each node contains the first failure. The first rank of a node reports it to
 * the first ranks of the other nodes, and detects nodes that end without a notice.
 *
 * Two threads may be in collectives at once, each in its own channel. A channel consists of an
 * lt_shm, an lt_ring and a channel of the network.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core/tensor.h"
#include "dist/mpi_transport.h"
#include "dist/sum.h"

enum { STAGING_BYTES = 256 << 10 }; /* small enough for the cache */
enum { POLL_NS = 2000 * 1000 };     /* between checks while leaving */
/* Seconds after a connection was lost until it is reported: LOST by a rank that waits for the other
 * one, LIVENESS by any other. The waiting rank comes first because its message says more. */
static const double LOST_SECONDS = 0.1, LIVENESS_SECONDS = 0.4;

/* ==== Failure ================================================================================= */

static bool is_first(const mpi_transport *c) { return c->at.shm[0].rank == 0; }
static int previous(const lt_nodes *nodes) { return (nodes->own + nodes->n - 1) % nodes->n; }

/* Records the loss of the first rank of a node as the failure of the job. */
static void report_lost_node(mpi_transport *c, int node)
{
    char text[32 + LT_SEEN_BYTES];
    int rank = c->nodes.first[node];
    bool is_before = node == previous(&c->nodes);
    pthread_mutex_lock(&c->lock);
    snprintf(text, sizeof text, "rank %d was lost%s", rank, is_before ? c->before : "");
    pthread_mutex_unlock(&c->lock);
    lt__shm_fail(&c->at.shm[0], rank, LT_EPEER, text);
}

/* Returns whether a connection is lost, even if that is too recent to report it. */
static bool report_lost_nodes(mpi_transport *c)
{
    bool cut = false;
    for (int node = 0; c->liveness && node < c->nodes.n; node++) {
        cut |= lt__liveness_is_lost(c->liveness, node, 0);
        if (lt__liveness_is_lost(c->liveness, node, LIVENESS_SECONDS))
            report_lost_node(c, node);
    }
    return cut;
}

/* Reports lost nodes and exchanges notices, even if no rank waits for another node. Does not call
 * MPI when a connection is lost: MPI over TCP may then wait for mpirun, which is about to kill this
 * process and does not answer. */
static void check_nodes(mpi_transport *c)
{
    if (report_lost_nodes(c))
        return;
    lt__notices_receive(c->notices);
    if (lt__shm_has_failed(&c->at.shm[0]))
        lt__notices_send(c->notices);
}

/* The ring calls this while it waits for a rank of another node. */
static lt_status check_peer(void *ud, const lt_ring *ring, int rank, const char *what)
{
    mpi_transport *c = ((mpi_transport *)ud)->job;
    if (c->at.shm[0].control) { /* NULL while the transport opens */
        lt__notices_receive(c->notices);
        report_lost_nodes(c);
        lt__shm_check_liveness(&c->at.shm[0]);
        LT_TRY(lt__shm_check(&c->at.shm[0]));
    }
    if (c->nodes.n == 0) /* likewise */
        return LT_OK;
    lt__shm_set_awaited(&c->at.shm[0], (int)(ring - ((mpi_transport *)ud)->ring), rank);
    if (lt__notices_has_left(&c->nodes, lt__node_of(&c->nodes, rank)))
        return lt_fail(LT_EPEER, "rank %d exited while rank %d was waiting for it in %s%s", rank,
                       c->net.rank, what, lt__ring_last_seen(ring, rank));
    bool is_watched = c->liveness && c->nodes.first_of[rank] == rank; /* it has a connection */
    if (is_watched && lt__liveness_is_lost(c->liveness, lt__node_of(&c->nodes, rank), LOST_SECONDS))
        return lt__ring_fail_peer(ring, rank, what);
    return LT_OK;
}

/* Called while this rank waits within its node. */
static void look_around(void *ud)
{
    mpi_transport *c = ud;
    lt__shm_check_liveness(&c->at.shm[0]);
    check_nodes(c);
}

/* The state of the rank whose channel this is. */
static mpi_transport *transport_of(lt_shm *shm) { return (mpi_transport *)(shm - shm->channel); }

/* The ring of the same channel. */
static lt_ring *ring_of(lt_shm *shm)
{
    lt_ring *ring = &transport_of(shm)->ring[shm->channel];
    ring->spin = shm->spin;
    return ring;
}

/* After an operation between nodes: passes a failure on to this node and to all others. */
static lt_status share_failure(lt_shm *shm, lt_status status)
{
    lt_ring *ring = ring_of(shm);
    shm->bytes += ring->bytes;
    ring->bytes = 0;
    if (status != LT_OK) {
        lt__shm_fail(shm, ring->missing, status, lt_errmsg());
        lt__notices_send(transport_of(shm)->notices);
    } else {
        lt__shm_set_awaited(shm, shm->channel, -1);
    }
    return status;
}

/* After an operation within the node: passes a failure on to the other nodes. */
static lt_status pass_failure(mpi_transport *c, lt_status status)
{
    if (status != LT_OK)
        lt__notices_send(c->notices);
    return status;
}

/* ==== Collectives ============================================================================= */

/* Checks that all nodes have the same signature, and exchanges locations. */
static lt_status match(mpi_transport *c, lt_ring *ring, const lt_coll_sig *sig)
{
    ring->grace = LT_GRACE_SECONDS;
    lt__shm_last_seen(&c->at.shm[0], c->net.rank, ring->seen);
    LT_TRY(lt__ring_match(ring, sig));
    mpi_transport *job = c->job;
    if (c->nodes.first[previous(&c->nodes)] != job->nodes.first[previous(&job->nodes)])
        return LT_OK; /* the location of another rank */
    pthread_mutex_lock(&job->lock);
    memcpy(job->before, ring->before, sizeof job->before);
    pthread_mutex_unlock(&job->lock);
    return LT_OK;
}

static lt_status sum_between(mpi_transport *c, lt_ring *ring, const lt_sum *sum)
{
    lt_coll_sig sig = lt__coll_sig_of_sum(sum);
    LT_TRY(match(c, ring, &sig));
    return lt__ring_allreduce(ring, sum);
}

static lt_status allreduce(lt_shm *shm, const lt_sum *sum)
{
    mpi_transport *c = transport_of(shm);
    shm->grace = 0;
    LT_TRY(pass_failure(c, lt__shm_allreduce(shm, sum)));
    if (c->nodes.n == 1)
        return LT_OK;
    if (is_first(c))
        LT_TRY(share_failure(shm, sum_between(c, ring_of(shm), sum)));
    shm->grace = 2 * LT_GRACE_SECONDS;
    return pass_failure(c, lt__shm_broadcast(shm, sum->what, sum->data,
                                             (size_t)sum->count * lt_dtype_bytes(sum->dtype), 0));
}

static lt_status broadcast_between(mpi_transport *c, lt_ring *ring, const lt_coll_sig *sig,
                                   void *data)
{
    LT_TRY(match(c, ring, sig));
    return lt__ring_broadcast(ring, sig->what, data, (size_t)sig->count,
                              lt__node_of(&c->nodes, sig->root));
}

static int slot_of(const mpi_transport *c, int rank)
{
    int slot = 0;
    while (slot < c->at.shm[0].size && c->nodes.rank_of[slot] != rank)
        slot++;
    return slot;
}

/* The rank in the job of a rank of this group. Nodes and rings know only ranks in the job. */
static int in_job(const mpi_transport *c, int rank) { return c->member ? c->member[rank] : rank; }

/* Broadcasts within the node of the root, then between the nodes, then within the other nodes. */
static lt_status broadcast(lt_shm *shm, const char *what, void *data, size_t bytes, int root)
{
    mpi_transport *c = transport_of(shm);
    root = in_job(c, root);
    bool is_here = c->nodes.first_of[root] == c->nodes.first_of[c->net.rank];
    lt_coll_sig sig = lt__coll_sig(LT_COLL_BROADCAST, what, (int64_t)bytes);
    sig.root = root;
    shm->grace = 0;
    LT_TRY(pass_failure(c, is_here ? lt__shm_broadcast(shm, what, data, bytes, slot_of(c, root))
                                   : lt__shm_match(shm, &sig)));
    if (is_first(c) && c->nodes.n > 1)
        LT_TRY(share_failure(shm, broadcast_between(c, ring_of(shm), &sig, data)));
    shm->grace = 2 * LT_GRACE_SECONDS;
    return is_here ? LT_OK : pass_failure(c, lt__shm_broadcast(shm, what, data, bytes, 0));
}

static lt_status barrier_between(mpi_transport *c, lt_ring *ring, const lt_coll_sig *sig)
{
    int64_t nothing = 0;
    lt_sum sum = {sig->what, &nothing, 1, LT_I64, LT_I64, 1};
    LT_TRY(match(c, ring, sig));
    return lt__ring_allreduce(ring, &sum);
}

static lt_status barrier(lt_shm *shm, const char *what)
{
    mpi_transport *c = transport_of(shm);
    lt_coll_sig sig = lt__coll_sig(LT_COLL_BARRIER, what, 0);
    shm->grace = 0;
    LT_TRY(pass_failure(c, lt__shm_match(shm, &sig)));
    if (c->nodes.n == 1)
        return LT_OK;
    if (is_first(c))
        LT_TRY(share_failure(shm, barrier_between(c, ring_of(shm), &sig)));
    shm->grace = 2 * LT_GRACE_SECONDS;
    return pass_failure(c, lt__shm_match(shm, &sig));
}

static lt_status send(lt_shm *shm, int to, const void *data, size_t bytes)
{
    mpi_transport *c = transport_of(shm);
    int slot = slot_of(c, to = in_job(c, to));
    if (slot < shm->size)
        return pass_failure(c, lt__shm_send(shm, slot, data, bytes));
    return share_failure(shm, lt__ring_send(ring_of(shm), to, data, bytes));
}

static lt_status receive(lt_shm *shm, int from, void *data, size_t bytes)
{
    mpi_transport *c = transport_of(shm);
    int slot = slot_of(c, from = in_job(c, from));
    if (slot < shm->size)
        return pass_failure(c, lt__shm_receive(shm, slot, data, bytes));
    return share_failure(shm, lt__ring_receive(ring_of(shm), from, data, bytes));
}

static lt_status add_as_tree(void *self)
{
    mpi_transport *c = self;
    int each = c->size / c->nodes.n;
    for (int rank = 0; rank < c->size; rank++)
        if (c->nodes.first_of[in_job(c, rank)] != in_job(c, rank - rank % each))
            return lt_fail(
                LT_EUSAGE,
                "vranks requires the same number of consecutive ranks on each machine, as with -H "
                "one:2,other:2");
    c->ring[0].tree = c->ring[1].tree = true;
    return LT_OK;
}

static lt_status mpi_allreduce(void *self, const float *from, float *to, size_t count)
{
    mpi_transport *c = self;
    if (!c->net.sum)
        return lt_fail(LT_EENV, "%s has no allreduce of its own", c->net.name);
    if (c->net.sum(c->net.self, from, to, count) != 0)
        return share_failure(&c->at.shm[0],
                             lt_fail(LT_EPEER, "the allreduce of %s failed", c->net.name));
    return LT_OK;
}

/* ==== The rest of a transport ================================================================= */

static bool rank_has_left(const void *self, int rank)
{
    const mpi_transport *c = self;
    return lt__shm_rank_has_left(&c->at.shm[0], rank) ||
           lt__notices_has_left(&c->nodes, lt__node_of(&c->nodes, rank));
}

static lt_mail *open_mail(void *self) { return lt__mail_open_net(&((mpi_transport *)self)->net); }

static void free_mapping(void *ud, void *data) { lt__mapping_free(ud, data); }

static bool alloc_shared(void *self, size_t bytes, lt_external_memory *memory)
{
    mpi_transport *c = self;
    void *data = c->at.shm[0].size > 1 ? lt__mapping_new(c->mappings, bytes) : NULL;
    *memory = (lt_external_memory){data, free_mapping, c->mappings};
    return data != NULL;
}

/* ==== Leave and close ========================================================================= */

static void free_transport(mpi_transport *c)
{
    for (int slot = 0; c->pidfd && slot < c->at.shm[0].size; slot++)
        if (c->pidfd[slot] >= 0)
            close(c->pidfd[slot]);
    lt__mpi_close_channels(c);
    for (int i = 0; i < c->n_offered; i++)
        lt__mapping_free(c->mappings, c->offered[i]);
    free(c->offered);
    lt__nodes_free(&c->nodes, c->mappings);
    lt__mappings_free(c->mappings);
    free(c->pidfd);
    pthread_mutex_destroy(&c->lock);
    lt__liveness_close(c->liveness);
    lt__notices_free(c->notices);
    free(c);
}

static void tell(const lt_group_config *config, const char *call)
{
    if (config->in_mpi)
        config->in_mpi(config->ud, call);
}

static lt_status leave(void *self)
{
    mpi_transport *c = self;
    lt__shm_leave(&c->at.shm[0]);
    while (!lt__shm_has_failed(&c->at.shm[0]) && !lt__shm_has_left(&c->at.shm[0])) {
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
        look_around(c);
    }
    return lt__shm_check(&c->at.shm[0]);
}

/* After a failure, requests may be pending that point into the transport, so it is not freed. The
 * network is not closed either: closing waits for all ranks, and mpirun may crash when it kills
 * ranks that wait there. */
static void close_transport(void *self)
{
    mpi_transport *c = self;
    if (c->job != c) {
        lt__mpi_close_part(c);
        return;
    }
    bool failed = leave(c) != LT_OK;
    lt__mail_close(c->at.mail, failed ? 0 : 1);
    if (!lt__notices_finish(c->notices, c->at.shm[0].timeout) || failed)
        return;
    tell(&c->config, "MPI_Finalize");
    c->net.close(c->net.self);
    lt__mail_free_net(c->at.mail);
    tell(&c->config, NULL);
    free_transport(c);
}

static const lt_transport transport = {
    .has_processes = true,
    .allreduce = allreduce,
    .broadcast = broadcast,
    .barrier = barrier,
    .send = send,
    .receive = receive,
    .add_as_tree = add_as_tree,
    .has_left = rank_has_left,
    .open_mail = open_mail,
    .alloc_shared = alloc_shared,
    .mpi_allreduce = mpi_allreduce,
    .offer = lt__mpi_offer,
    .join = lt__mpi_join,
    .leave = leave,
    .close = close_transport,
};

/* ==== Open ==================================================================================== */

static uint64_t handle_of(void *ud, const void *data)
{
    return lt__mapping_handle(((mpi_transport *)ud)->mappings, data);
}

static void *map_handle(void *ud, int slot, uint64_t name)
{
    mpi_transport *c = ud;
    return lt__mapping_find(c->mappings, c->nodes.pid[slot], name);
}

static bool is_alive(void *ud, int slot)
{
    const mpi_transport *c = ud;
    struct pollfd fd = {.fd = c->pidfd[slot], .events = POLLIN};
    if (fd.fd >= 0)
        return poll(&fd, 1, 0) <= 0; /* readable if the process has ended; -1 for a signal */
    return kill(c->nodes.pid[slot], 0) == 0 || errno != ESRCH;
}

static lt_status join_shm(mpi_transport *c)
{
    c->at.shm[0] = (lt_shm){.control = c->nodes.control,
                            .size = c->nodes.n_here,
                            .rank_of = c->nodes.rank_of,
                            .timeout = c->ring[0].timeout,
                            .poll = look_around,
                            .ud = c};
    while (c->nodes.rank_of[c->at.shm[0].rank] != c->net.rank)
        c->at.shm[0].rank++;
    if (c->at.shm[0].size == 1) /* no other rank reads its data */
        return LT_OK;
    c->at.shm[0].handle_of = handle_of;
    c->at.shm[0].map = map_handle;
    c->at.shm[0].is_alive = is_alive;
    c->at.shm[0].staging_bytes = STAGING_BYTES;
    c->at.shm[0].staging = lt__mapping_new(c->mappings, STAGING_BYTES);
    for (int slot = 0; slot < c->at.shm[0].size; slot++)
        c->pidfd[slot] = (int)syscall(SYS_pidfd_open, c->nodes.pid[slot], 0);
    return c->at.shm[0].staging ? LT_OK : LT_ENOMEM;
}

/* The first ranks of all nodes form a ring and open liveness and notices. */
static lt_status join_ring(mpi_transport *c)
{
    c->ring[0].rank = c->nodes.first;
    c->ring[0].size = c->nodes.n;
    c->ring[0].index = c->nodes.own;
    if (!is_first(c) || c->nodes.n == 1)
        return LT_OK;
    LT_TRY(lt__liveness_open(&c->ring[0], &c->liveness));
    c->notices = lt__notices_open(&c->net, &c->at.shm[0], &c->nodes, c->liveness);
    return c->notices ? LT_OK : lt_errcode();
}

/* Counts the CPUs of this rank. A CPU that n ranks may use counts as 1/n for each of them. */
static lt_status count_cpus(mpi_transport *c)
{
    int64_t users[CPU_SETSIZE] = {0};
    lt_sum sum = {"the count of CPUs", users, CPU_SETSIZE, LT_I64, LT_I64, 1};
    cpu_set_t mine;
    double all = 0;
    if (sched_getaffinity(0, sizeof mine, &mine) != 0)
        CPU_ZERO(&mine);
    for (int i = 0; i < CPU_SETSIZE; i++)
        users[i] = CPU_ISSET(i, &mine) != 0;
    LT_TRY(lt__shm_allreduce(&c->at.shm[0], &sum));
    for (int i = 0; i < CPU_SETSIZE; i++)
        all += CPU_ISSET(i, &mine) ? 1.0 / (double)users[i] : 0;
    if (lt_cpu_count() < CPU_COUNT(&mine)) /* the ranks here share a quota */
        all = fmin(all, (double)lt_cpu_count() / c->net.n_node);
    c->at.cpus = (int)(all + 1e-6);
    return LT_OK;
}

static lt_status begin(mpi_transport *c)
{
    size_t size = (size_t)c->net.size;
    if (c->net.n_node > LT_MAX_SUMMANDS)
        return lt_fail(LT_EUSAGE, "a node must have 1 to %d ranks, not %d", LT_MAX_SUMMANDS,
                       c->net.n_node);
    c->ring[0] = (lt_ring){.net = &c->net,
                           .channel = LT_NET_DATA,
                           .timeout = lt_group_timeout(&c->config),
                           .check = check_peer,
                           .ud = c};
    LT_TRY(lt__ring_open(&c->ring[0]));
    LT_TRY(LT_CALLOC(c->pidfd, size, "for %d ranks", c->net.size));
    if (!(c->mappings = lt__mappings_new()))
        return LT_ENOMEM;
    memset(c->pidfd, -1, size * sizeof *c->pidfd);
    LT_TRY(lt__nodes_share_memory(&c->nodes, &c->ring[0], c->mappings));
    LT_TRY(join_shm(c));
    LT_TRY(lt__nodes_find(&c->nodes, &c->ring[0]));
    LT_TRY(join_ring(c));
    LT_TRY(lt__mpi_open_side(c));
    c->at.shm[0].bytes = c->ring[0].bytes;
    c->ring[0].bytes = 0;
    while (c->net.node[c->at.local_rank] != c->net.rank)
        c->at.local_rank++;
    return count_cpus(c);
}

/* Opening has failed. Reports the first failure, which may come from another rank. */
static lt_status report_open_failure(mpi_transport *c, lt_status status)
{
    char text[1024];
    int rank;
    if (!c->at.shm[0].control)
        return status;
    lt__shm_fail(&c->at.shm[0], c->net.rank, status, lt_errmsg());
    lt__shm_failure(&c->at.shm[0], &rank, &status, text, sizeof text);
    return lt_fail(status, "%s", text);
}

/* If opening fails, nothing is freed, as after any other failure: see close_transport(). */
lt_status lt__mpi_open_over(const lt_net *net, const lt_group_config *config, lt_group **group)
{
    mpi_transport *c;
    LT_TRY(LT_CALLOC(c, 1, "for a group"));
    c->job = c;
    c->net = *net;
    c->size = net->size;
    c->config = config ? *config : (lt_group_config){0};
    pthread_mutex_init(&c->lock, NULL);
    lt_status status = begin(c);
    if (status != LT_OK)
        return report_open_failure(c, status);
    *group = lt__group_new(&transport, &c->at, net->rank, net->size);
    return *group ? LT_OK : LT_ENOMEM;
}

lt_status lt_mpi_open(const lt_group_config *config, lt_group **group)
{
    lt_net net;
    lt_group_config given = config ? *config : (lt_group_config){0};
    tell(&given, "MPI_Init");
    lt_status status = lt__net_open(&net);
    tell(&given, NULL);
    return status == LT_OK ? lt__mpi_open_over(&net, &given, group) : status;
}
