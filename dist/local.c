/* local.c - the transport of ranks that are threads of one process. It is always available. The
 * control block is in ordinary memory, and ranks see each other's data by its address.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "dist/group.h"
#include "dist/sum.h"
#include "dist/shm.h"

typedef struct shared { /* one for all ranks of the job, and one for each part */
    atomic_int refs;
    _Atomic(struct shared *) parts; /* parts of the job, linked by `next`; freed with it */
    struct shared *next;
    _Alignas(128) char control[];
} shared;

typedef struct local { /* the state of one rank */
    lt_shm shm, side;  /* one for each channel */
    shared *shared;
    lt_mail *mail;
    int cpus;
} local;

static lt_shm *shm_of(void *self) { return &((local *)self)->shm; }

static lt_status allreduce(void *self, const lt_sum *sum)
{
    return lt__shm_allreduce(shm_of(self), sum);
}

static lt_status allreduce_side(void *self, const lt_sum *sum, bool spin)
{
    local *l = self;
    l->side.spin = spin;
    return lt__shm_allreduce(&l->side, sum);
}

static lt_status broadcast(void *self, const char *what, void *data, size_t bytes, int root)
{
    return lt__shm_broadcast(shm_of(self), what, data, bytes, root);
}

static lt_status barrier(void *self, const char *what)
{
    lt_coll_sig sig = lt__coll_sig(LT_COLL_BARRIER, what, 0);
    return lt__shm_match(shm_of(self), &sig);
}

static lt_status send(void *self, int to, const void *data, size_t bytes)
{
    return lt__shm_send(shm_of(self), to, data, bytes);
}

static lt_status receive(void *self, int from, void *data, size_t bytes)
{
    return lt__shm_receive(shm_of(self), from, data, bytes);
}

static uint64_t bytes_so_far(const void *self)
{
    const local *l = self;
    return l->shm.bytes + l->side.bytes;
}

static bool failure(const void *self, int *rank, lt_status *code, char *text, size_t bytes)
{
    return lt__shm_failure(&((const local *)self)->shm, rank, code, text, bytes);
}

static void set_spin(void *self, bool spin) { shm_of(self)->spin = spin; }

static int cpus(const void *self) { return ((const local *)self)->cpus; }

static int local_rank(const void *self) { return ((const local *)self)->shm.rank; }

static void release(shared *s)
{
    if (atomic_fetch_sub(&s->refs, 1) != 1)
        return;
    for (shared *part = atomic_load(&s->parts), *next; part; part = next) {
        next = part->next;
        free(part);
    }
    free(s);
}

static lt_mail *mail(void *self) { return ((local *)self)->mail; }

static void leave(void *self)
{
    local *l = self;
    if (!l->shm.job) { /* else it is a part */
        lt__mail_close(l->mail, 0);
        lt__shm_leave(&l->shm);
        release(l->shared);
    }
    free(l);
}

/* ==== Parts =================================================================================== */

static shared *shared_new(int size)
{
    size_t bytes = (sizeof(shared) + lt__shm_control_bytes(size) + 127) & ~(size_t)127;
    shared *s = aligned_alloc(128, bytes);
    if (!s)
        return NULL;
    memset(s, 0, bytes);
    atomic_init(&s->refs, 1);
    lt__shm_control_init((lt_shm_control *)s->control, size);
    return s;
}

/* The first rank of the part allocates the control block. */
static lt_status offer(void *self, const lt_part *part, int64_t *handle)
{
    local *l = self;
    if (part->index > 0)
        return LT_OK;
    shared *s = shared_new(part->size);
    if (!s)
        return lt_fail(LT_ENOMEM, "out of memory for %d ranks", part->size);
    s->next = atomic_load(&l->shared->parts);
    while (!atomic_compare_exchange_weak(&l->shared->parts, &s->next, s))
        ;
    *handle = (intptr_t)s->control;
    return LT_OK;
}

static lt_status join(void *self, const lt_part *part, const int64_t *handles, void **of_part)
{
    const local *job = self;
    local *l = calloc(1, sizeof *l);
    if (!l)
        return lt_fail(LT_ENOMEM, "out of memory for a part of the ranks");
    l->shm = (lt_shm){.control = (lt_shm_control *)(intptr_t)handles[part->rank[0]],
                      .job = job->shm.control,
                      .rank = part->index,
                      .size = part->size,
                      .rank_of = part->rank,
                      .slot_of = part->rank,
                      .timeout = job->shm.timeout};
    l->side = l->shm;
    l->side.channel = 1;
    *of_part = l;
    return LT_OK;
}

static const lt_transport transport = {
    .name = "local",
    .allreduce = allreduce,
    .allreduce_side = allreduce_side,
    .broadcast = broadcast,
    .barrier = barrier,
    .send = send,
    .receive = receive,
    .bytes = bytes_so_far,
    .shm = shm_of,
    .failure = failure,
    .mail = mail,
    .offer = offer,
    .join = join,
    .set_spin = set_spin,
    .cpus = cpus,
    .local_rank = local_rank,
    .close = leave,
};

/* ==== Open ==================================================================================== */

/* box is taken. */
static lt_group *member(shared *s, lt_mail *box, int rank, int size, const lt_group_config *config)
{
    local *l = calloc(1, sizeof *l);
    if (!l) {
        lt__mail_close(box, 0);
        return NULL;
    }
    l->mail = box;
    l->cpus = lt_cpu_count() / size;
    atomic_fetch_add(&s->refs, 1);
    l->shared = s;
    l->shm = (lt_shm){.control = (lt_shm_control *)s->control,
                      .rank = rank,
                      .size = size,
                      .timeout = lt_group_timeout(config)};
    l->side = l->shm;
    l->side.channel = 1;
    return lt__group_new(&transport, l, rank, size, l->shm.timeout);
}

lt_status lt_local_open(int n, const lt_group_config *config, lt_group **group)
{
    static const lt_group_config defaults;
    if (n < 1 || n > LT_MAX_SUMMANDS)
        return lt_fail(LT_EUSAGE, "a process must have 1 to %d ranks, not %d", LT_MAX_SUMMANDS, n);
    lt_mail *box[LT_MAX_SUMMANDS];
    LT_TRY(lt__mail_open_local(n, box));
    shared *s = shared_new(n);
    lt_status status = s ? LT_OK : lt_fail(LT_ENOMEM, "out of memory for %d ranks", n);
    int made = 0, taken = 0;
    while (status == LT_OK && made < n) {
        group[made] = member(s, box[taken++], made, n, config ? config : &defaults);
        status = group[made] ? LT_OK : lt_fail(LT_ENOMEM, "out of memory for %d ranks", n);
        made += status == LT_OK;
    }
    while (taken < n)
        lt__mail_close(box[taken++], 0);
    while (status != LT_OK && made > 0)
        lt_group_close(group[--made]);
    if (s)
        release(s);
    return status;
}
