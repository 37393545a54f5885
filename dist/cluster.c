/* cluster.c - the transport of ranks that are processes. Those of a node are a communicator around a control block
 * in shared memory; the first ranks of all nodes are a ring. A collective is done within each node,
 * then between the nodes, then handed on within each node.
 *
 * A failure is on the control block of each node, whose first rank tells those of the others of it, and
 * misses those that end without a word.
 *
 * Two threads may be in collectives at once, each in its channel: a communicator, a ring, a channel of a wire.
 */
#define _GNU_SOURCE
#include <errno.h>
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
#include "dist/group.h"
#include "dist/lifeline.h"
#include "dist/news.h"
#include "dist/nodes.h"
#include "dist/ring.h"
#include "dist/sum.h"

enum { STAGE_BYTES = 256 << 10 }; /* stays in the cache */
enum { LOOK_NS = 2000 * 1000 }; /* between looks for who has left */
enum { LATER = 1 };             /* seconds more for those who wait for one that waits for others */
/* Until one that has ended without a word is missed; one that waits for it is first, and says for
 * what. */
static const double LOST_SECONDS = 0.1, WATCH_SECONDS = 0.4;

typedef struct cluster {
    lt_wire wire;
    lt_mappings *mappings;
    lt_shm team, team_aside;   /* in either channel */
    lt_ring ring, ring_aside;
    lt_nodes nodes;
    int *pidfd;                 /* of each slot; -1: there are no pidfds here */
    int cpus;
    lt_news *news;              /* of the other nodes, for the first rank; else NULL */
    lt_lifelines *lines;        /* to these */
    lt_group_config config;
    pthread_mutex_t lock;       /* guards what follows */
    char before[LT_SEEN_BYTES]; /* of the node before this one: see lt__ring_last_seen() */
} cluster;

/* ==== Failure ================================================================================= */

static bool is_first(const cluster *c) { return c->team.rank == 0; }

/* The ring asks while it waits for a rank of another node. */
static lt_status look(void *ud, const lt_ring *ring, int rank, const char *what)
{
    cluster *c = ud;
    if (c->team.control) { /* not at the very beginning */
        lt__news_hear(c->news);
        lt__shm_check_liveness(&c->team);
        LT_TRY(lt__shm_check(&c->team));
    }
    if (c->news && lt__news_has_left(c->news, lt__node_of(&c->nodes, rank)))
        return lt_fail(LT_EPEER, "rank %d has left, but rank %d waits for it in %s%s", rank,
                       c->wire.rank, what, lt__ring_last_seen(ring, rank));
    if (c->lines && lt__lifeline_is_cut(c->lines, lt__node_of(&c->nodes, rank), LOST_SECONDS))
        return lt__ring_fail_peer(ring, rank, what);
    return LT_OK;
}

static void say_is_gone(cluster *c, int node)
{
    char text[32 + LT_SEEN_BYTES];
    int rank = c->nodes.first[node];
    bool is_before = node == (c->nodes.own + c->nodes.n - 1) % c->nodes.n;
    pthread_mutex_lock(&c->lock);
    snprintf(text, sizeof text, "rank %d is gone%s", rank, is_before ? c->before : "");
    pthread_mutex_unlock(&c->lock);
    lt__shm_fail(&c->team, rank, LT_EPEER, text);
}

/* What nodes tell each other though nobody waits. But when one is lost, MPI over TCP may wait for
 * mpirun, which is about to kill us and does not answer. */
static void watch_nodes(cluster *c)
{
    bool cut = false;
    for (int node = 0; c->lines && node < c->nodes.n; node++) {
        cut |= lt__lifeline_is_cut(c->lines, node, 0);
        if (lt__lifeline_is_cut(c->lines, node, WATCH_SECONDS))
            say_is_gone(c, node);
    }
    if (cut)
        return;
    lt__news_hear(c->news);
    if (lt__shm_has_failed(&c->team))
        lt__news_say(c->news);
}

/* How something between nodes has ended: a failure is everybody's. */
static lt_status share(cluster *c, const lt_ring *ring, lt_status status)
{
    if (status != LT_OK) {
        lt__shm_fail(&c->team, ring->missing, status, lt_errmsg());
        lt__news_say(c->news);
    }
    return status;
}

/* How something within the node has ended. */
static lt_status told(cluster *c, lt_status status)
{
    if (status != LT_OK)
        lt__news_say(c->news);
    return status;
}

/* ==== Collectives ============================================================================= */

/* Between the first ranks: all want the same. */
static lt_status agree(cluster *c, lt_ring *ring, const lt_coll_sig *sig)
{
    ring->grace = LATER;
    lt__shm_last_seen(&c->team, c->team.rank, ring->seen);
    LT_TRY(lt__ring_match(ring, sig));
    pthread_mutex_lock(&c->lock);
    memcpy(c->before, ring->before, sizeof c->before);
    pthread_mutex_unlock(&c->lock);
    return LT_OK;
}

static lt_status sum_between(cluster *c, lt_ring *ring, const lt_sum *sum)
{
    lt_coll_sig sig = lt__coll_sig_of_sum(sum);
    LT_TRY(agree(c, ring, &sig));
    return lt__ring_allreduce(ring, sum);
}

static lt_status sum_in(cluster *c, lt_shm *shm, lt_ring *ring, const lt_sum *sum)
{
    shm->grace = 0;
    LT_TRY(told(c, lt__shm_allreduce(shm, sum)));
    if (c->nodes.n == 1)
        return LT_OK;
    if (is_first(c))
        LT_TRY(share(c, ring, sum_between(c, ring, sum)));
    shm->grace = 2 * LATER;
    return told(c, lt__shm_broadcast(shm, sum->what, sum->data,
                                      (size_t)sum->count * lt_dtype_bytes(sum->dtype), 0));
}

static lt_status allreduce(void *self, const lt_sum *sum)
{
    cluster *c = self;
    return sum_in(c, &c->team, &c->ring, sum);
}

static lt_status allreduce_aside(void *self, const lt_sum *sum, bool spin)
{
    cluster *c = self;
    c->team_aside.spin = c->ring_aside.spin = spin;
    return sum_in(c, &c->team_aside, &c->ring_aside, sum);
}

static lt_status broadcast_between(cluster *c, const lt_coll_sig *sig, void *data)
{
    LT_TRY(agree(c, &c->ring, sig));
    return lt__ring_broadcast(&c->ring, sig->what, data, (size_t)sig->count,
                              lt__node_of(&c->nodes, sig->root));
}

static int seat_of(const cluster *c, int rank)
{
    int seat = 0;
    while (seat < c->team.size && c->nodes.rank_of[seat] != rank)
        seat++;
    return seat;
}

/* Within the node of the root first; in the others last. */
static lt_status broadcast(void *self, const char *what, void *data, size_t bytes, int root)
{
    cluster *c = self;
    bool is_here = c->nodes.first_of[root] == c->nodes.first_of[c->wire.rank];
    lt_coll_sig sig = lt__coll_sig(LT_COLL_BROADCAST, what, (int64_t)bytes);
    sig.root = root;
    c->team.grace = 0;
    LT_TRY(told(c, is_here ? lt__shm_broadcast(&c->team, what, data, bytes, seat_of(c, root))
                           : lt__shm_match(&c->team, &sig)));
    if (is_first(c) && c->nodes.n > 1)
        LT_TRY(share(c, &c->ring, broadcast_between(c, &sig, data)));
    c->team.grace = 2 * LATER;
    return is_here ? LT_OK : told(c, lt__shm_broadcast(&c->team, what, data, bytes, 0));
}

static lt_status barrier_between(cluster *c, const lt_coll_sig *sig)
{
    int64_t nothing = 0;
    lt_sum sum = {sig->what, &nothing, 1, LT_I64, LT_I64, 1};
    LT_TRY(agree(c, &c->ring, sig));
    return lt__ring_allreduce(&c->ring, &sum);
}

static lt_status barrier(void *self, const char *what)
{
    cluster *c = self;
    lt_coll_sig sig = lt__coll_sig(LT_COLL_BARRIER, what, 0);
    c->team.grace = 0;
    LT_TRY(told(c, lt__shm_match(&c->team, &sig)));
    if (c->nodes.n == 1)
        return LT_OK;
    if (is_first(c))
        LT_TRY(share(c, &c->ring, barrier_between(c, &sig)));
    c->team.grace = 2 * LATER;
    return told(c, lt__shm_match(&c->team, &sig));
}

static lt_status send(void *self, int to, const void *data, size_t bytes)
{
    cluster *c = self;
    int seat = seat_of(c, to);
    if (seat < c->team.size)
        return told(c, lt__shm_send(&c->team, seat, data, bytes));
    return share(c, &c->ring, lt__ring_send(&c->ring, to, data, bytes));
}

static lt_status receive(void *self, int from, void *data, size_t bytes)
{
    cluster *c = self;
    int seat = seat_of(c, from);
    if (seat < c->team.size)
        return told(c, lt__shm_receive(&c->team, seat, data, bytes));
    return share(c, &c->ring, lt__ring_receive(&c->ring, from, data, bytes));
}

static lt_status add_as_tree(void *self)
{
    cluster *c = self;
    int each = c->wire.size / c->nodes.n;
    for (int rank = 0; rank < c->wire.size; rank++)
        if (c->nodes.first_of[rank] != rank - rank % each)
            return lt_fail(LT_EUSAGE, "vranks wants as many ranks on each machine, in a row, as "
                           "with -H one:2,other:2");
    c->ring.tree = c->ring_aside.tree = true;
    return LT_OK;
}

static lt_status mpi_allreduce(void *self, const float *from, float *to, size_t count)
{
    cluster *c = self;
    if (!c->wire.sum)
        return lt_fail(LT_EENV, "%s has no allreduce of its own", c->wire.name);
    if (c->wire.sum(c->wire.self, from, to, count) != 0)
        return share(c, &c->ring, lt_fail(LT_EPEER, "%s: its allreduce failed", c->wire.name));
    return LT_OK;
}

/* ==== The rest of a transport ================================================================= */

static uint64_t bytes_so_far(const void *self)
{
    const cluster *c = self;
    return c->team.bytes + c->ring.bytes + c->team_aside.bytes + c->ring_aside.bytes;
}

static void fail(void *self, lt_status code, const char *text)
{
    cluster *c = self;
    lt__shm_fail(&c->team, c->wire.rank, code, text);
}

static bool failure(const void *self, int *rank, lt_status *code, char *text, size_t bytes)
{
    cluster *c = (cluster *)self; /* to look whether the others live changes nothing of it */
    lt__shm_check_liveness(&c->team);
    watch_nodes(c);
    return lt__shm_failure(&c->team, rank, code, text, bytes);
}

static void at(void *self, const char *where, int64_t step)
{
    lt__shm_set_location(&((cluster *)self)->team, where, step);
}

static void give_window(void *ud, void *data) { lt__mapping_free(ud, data); }

static bool lend(void *self, size_t bytes, lt_loan *loan)
{
    cluster *c = self;
    void *data = c->team.size > 1 ? lt__mapping_new(c->mappings, bytes) : NULL;
    *loan = (lt_loan){data, give_window, c->mappings};
    return data != NULL;
}

static bool speaks(void *self, double seconds)
{
    return lt__shm_is_reporter(&((cluster *)self)->team, seconds);
}

static void set_spin(void *self, bool spin)
{
    cluster *c = self;
    c->team.spin = c->ring.spin = spin;
}

static int cpus(const void *self) { return ((const cluster *)self)->cpus; }

/* A slot would not do: ranks of a machine that share no memory are nodes of their own. */
static int local_rank(const void *self)
{
    const lt_wire *w = &((const cluster *)self)->wire;
    int i = 0;
    while (w->node[i] != w->rank)
        i++;
    return i;
}

/* ==== The end ================================================================================= */

static void free_cluster(cluster *c)
{
    for (int seat = 0; c->pidfd && seat < c->team.size; seat++)
        if (c->pidfd[seat] >= 0)
            close(c->pidfd[seat]);
    lt__ring_close(&c->ring);
    lt__ring_close(&c->ring_aside);
    if (c->team.staging)
        lt__mapping_free(c->mappings, c->team.staging);
    if (c->team_aside.staging)
        lt__mapping_free(c->mappings, c->team_aside.staging);
    lt__nodes_free(&c->nodes, c->mappings);
    lt__mappings_free(c->mappings);
    free(c->pidfd);
    pthread_mutex_destroy(&c->lock);
    lt__lifelines_close(c->lines);
    lt__news_free(c->news);
    free(c);
}

static void tell(const lt_group_config *config, const char *call)
{
    if (config->in_mpi)
        config->in_mpi(config->ud, call);
}

static lt_status leave(void *self)
{
    cluster *c = self;
    lt__shm_leave(&c->team);
    while (!lt__shm_has_failed(&c->team) && !lt__shm_has_left(&c->team)) {
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
        lt__shm_check_liveness(&c->team);
        watch_nodes(c);
    }
    return lt__shm_check(&c->team);
}

/* After a failure requests may be open that point into all this, so it stays; and so does the wire:
 * all would have to come to its end, and mpirun may crash when it ends ranks that wait there. */
static void end(void *self)
{
    cluster *c = self;
    bool failed = leave(c) != LT_OK;
    if (!lt__news_part(c->news, c->team.timeout) || failed)
        return;
    tell(&c->config, "MPI_Finalize");
    c->wire.close(c->wire.self);
    tell(&c->config, NULL);
    free_cluster(c);
}

static const lt_transport transport = {
    .name = "cluster", .allreduce = allreduce, .allreduce_side = allreduce_aside,
    .broadcast = broadcast, .barrier = barrier, .send = send, .receive = receive,
    .add_as_tree = add_as_tree, .bytes = bytes_so_far, .fail = fail, .failure = failure, .set_location = at,
    .lend = lend, .mpi_allreduce = mpi_allreduce, .is_reporter = speaks, .set_spin = set_spin,
    .cpus = cpus, .local_rank = local_rank, .leave = leave, .close = end,
};

/* ==== The beginning =========================================================================== */

static uint64_t place(void *ud, const void *data)
{
    return lt__mapping_handle(((cluster *)ud)->mappings, data);
}

static void *find(void *ud, int seat, uint64_t name)
{
    cluster *c = ud;
    return lt__mapping_find(c->mappings, c->nodes.pid[seat], name);
}

static bool lives(void *ud, int seat)
{
    const cluster *c = ud;
    struct pollfd fd = {.fd = c->pidfd[seat], .events = POLLIN};
    if (fd.fd >= 0)
        return poll(&fd, 1, 0) <= 0; /* -1: a signal came */
    return kill(c->nodes.pid[seat], 0) == 0 || errno != ESRCH;
}

static lt_status enter_team(cluster *c)
{
    c->team = (lt_shm){.control = c->nodes.control, .size = c->nodes.n_here, .rank_of = c->nodes.rank_of,
                        .timeout = c->ring.timeout};
    while (c->nodes.rank_of[c->team.rank] != c->wire.rank)
        c->team.rank++;
    if (c->team.size == 1) /* nobody else looks at its data */
        return LT_OK;
    c->team.handle_of = place;
    c->team.map = find;
    c->team.is_alive = lives;
    c->team.ud = c;
    c->team.staging_bytes = STAGE_BYTES;
    c->team.staging = lt__mapping_new(c->mappings, STAGE_BYTES);
    for (int seat = 0; seat < c->team.size; seat++)
        c->pidfd[seat] = (int)syscall(SYS_pidfd_open, c->nodes.pid[seat], 0);
    return c->team.staging ? LT_OK : LT_ENOMEM;
}

/* The first ranks of all nodes are a ring, and hear of each other. */
static lt_status enter_ring(cluster *c)
{
    c->ring.rank = c->nodes.first;
    c->ring.size = c->nodes.n;
    c->ring.index = c->nodes.own;
    if (!is_first(c) || c->nodes.n == 1)
        return LT_OK;
    LT_TRY(lt__lifelines_open(&c->ring, &c->lines));
    c->news = lt__news_open(&c->wire, &c->team, c->nodes.first, c->nodes.n, c->nodes.own,
                            c->lines);
    return c->news ? LT_OK : lt_errcode();
}

/* A CPU that n ranks may use is the n-th part of one to each of them. */
static lt_status count_cpus(cluster *c)
{
    int64_t users[CPU_SETSIZE] = {0};
    lt_sum sum = {"the CPUs", users, CPU_SETSIZE, LT_I64, LT_I64, 1};
    cpu_set_t mine;
    double all = 0;
    if (sched_getaffinity(0, sizeof mine, &mine) != 0)
        CPU_ZERO(&mine);
    for (int i = 0; i < CPU_SETSIZE; i++)
        users[i] = CPU_ISSET(i, &mine) != 0;
    LT_TRY(lt__shm_allreduce(&c->team, &sum));
    for (int i = 0; i < CPU_SETSIZE; i++)
        all += CPU_ISSET(i, &mine) ? 1.0 / (double)users[i] : 0;
    c->cpus = (int)(all + 1e-6);
    return LT_OK;
}

/* The first lane is complete. */
static lt_status open_aside(cluster *c)
{
    c->team_aside = c->team;
    c->team_aside.channel = 1;
    c->team_aside.collectives = 0;
    if (c->team.staging && !(c->team_aside.staging = lt__mapping_new(c->mappings, STAGE_BYTES)))
        return LT_ENOMEM;
    c->ring_aside = c->ring;
    c->ring_aside.channel = LT_WIRE_ASIDE;
    c->ring_aside.slots = NULL;
    return c->news ? lt__ring_open(&c->ring_aside) : LT_OK;
}

static lt_status begin(cluster *c)
{
    size_t size = (size_t)c->wire.size;
    if (c->wire.n_node > LT_MOST_SHARES)
        return lt_fail(LT_EUSAGE, "there can be 1 to %d ranks on a node, not %d", LT_MOST_SHARES,
                       c->wire.n_node);
    c->ring = (lt_ring){.wire = &c->wire, .channel = LT_WIRE_DATA,
                        .timeout = lt_group_timeout(&c->config), .check = look, .ud = c};
    LT_TRY(lt__ring_open(&c->ring));
    c->pidfd = malloc(size * sizeof *c->pidfd);
    c->mappings = lt__mappings_new();
    if (!c->pidfd || !c->mappings)
        return lt_fail(LT_ENOMEM, "out of memory for %d ranks", c->wire.size);
    memset(c->pidfd, -1, size * sizeof *c->pidfd);
    LT_TRY(lt__nodes_share_memory(&c->nodes, &c->ring, c->mappings));
    LT_TRY(enter_team(c));
    LT_TRY(lt__nodes_find(&c->nodes, &c->ring));
    LT_TRY(enter_ring(c));
    LT_TRY(open_aside(c));
    return count_cpus(c);
}

/* The beginning has failed. The first cause may be another rank that is further on. */
static lt_status say_why(cluster *c, lt_status status)
{
    char text[1024];
    int rank;
    if (!c->team.control)
        return status;
    lt__shm_fail(&c->team, c->wire.rank, status, lt_errmsg());
    lt__shm_failure(&c->team, &rank, &status, text, sizeof text);
    return lt_fail(status, "%s", text);
}

/* When the beginning fails nothing is given back, as at any other failure: see end(). */
lt_status lt__cluster_over(const lt_wire *wire, const lt_group_config *config, lt_group **group)
{
    cluster *c = calloc(1, sizeof *c);
    if (!c)
        return lt_fail(LT_ENOMEM, "out of memory for a group");
    c->wire = *wire;
    c->config = config ? *config : (lt_group_config){0};
    pthread_mutex_init(&c->lock, NULL);
    lt_status status = begin(c);
    if (status != LT_OK)
        return say_why(c, status);
    *group = lt__group_new(&transport, c, wire->rank, wire->size, c->team.timeout);
    return *group ? LT_OK : LT_ENOMEM;
}

lt_status lt_cluster_open(const lt_group_config *config, lt_group **group)
{
    lt_wire wire;
    lt_group_config given = config ? *config : (lt_group_config){0};
    tell(&given, "MPI_Init");
    lt_status status = lt__wire_open(&wire);
    tell(&given, NULL);
    return status == LT_OK ? lt__cluster_over(&wire, &given, group) : status;
}
