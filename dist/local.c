/* local.c - the transport of ranks that are threads of one process. It is always available. The
 * control block is in ordinary memory, and ranks see each other's data by its address.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/group.h"
#include "dist/sum.h"

typedef struct shared { /* one for all ranks of the job, and one for each part */
    atomic_int refs;
    _Atomic(struct shared *) parts; /* parts of the job, linked by `next`; freed with it */
    struct shared *next;
    _Alignas(128) char control[];
} shared;

typedef struct local { /* the state of one rank */
    lt_endpoint at;
    shared *shared;
} local;

static lt_status barrier(lt_shm *shm, const char *what)
{
    lt_coll_sig sig = lt__coll_sig(LT_COLL_BARRIER, what, 0);
    return lt__shm_match(shm, &sig);
}

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

static void leave(void *self)
{
    local *l = self;
    if (l->shared) { /* else it is a part */
        lt__mail_close(l->at.mail, 0);
        lt__shm_leave(&l->at.shm[0]);
        release(l->shared);
    }
    free(l);
}

/* ==== Parts =================================================================================== */

static shared *shared_new(int size)
{
    size_t bytes = (sizeof(shared) + lt__shm_control_bytes(size) + 127) & ~(size_t)127;
    shared *s = aligned_alloc(128, bytes);
    if (!s) {
        lt_fail(LT_ENOMEM, "out of memory for %d ranks", size);
        return NULL;
    }
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
        return LT_ENOMEM;
    s->next = atomic_load(&l->shared->parts);
    while (!atomic_compare_exchange_weak(&l->shared->parts, &s->next, s))
        ;
    *handle = (intptr_t)s->control;
    return LT_OK;
}

static void set_channels(local *l, lt_shm shm)
{
    l->at.shm[0] = l->at.shm[1] = shm;
    l->at.shm[1].channel = 1;
}

static lt_status join(void *self, const lt_part *part, const int64_t *handles,
                      lt_endpoint **of_part)
{
    const lt_shm *job = ((const lt_endpoint *)self)->shm;
    local *l;
    LT_TRY(LT_CALLOC(l, 1, "for a part of the ranks"));
    set_channels(l, (lt_shm){.control = (lt_shm_control *)(intptr_t)handles[part->rank[0]],
                             .job = job->control,
                             .rank = part->index,
                             .size = part->size,
                             .rank_of = part->rank,
                             .slot_of = part->rank,
                             .timeout = job->timeout});
    *of_part = &l->at;
    return LT_OK;
}

static const lt_transport transport = {
    .allreduce = lt__shm_allreduce,
    .broadcast = lt__shm_broadcast,
    .barrier = barrier,
    .send = lt__shm_send,
    .receive = lt__shm_receive,
    .offer = offer,
    .join = join,
    .close = leave,
};

/* ==== Open ==================================================================================== */

/* box is taken. */
static lt_group *member(shared *s, lt_mail *box, int rank, int size, const lt_group_config *config)
{
    local *l = lt__calloc(1, sizeof *l, "for %d ranks", size);
    if (!l) {
        lt__mail_close(box, 0);
        return NULL;
    }
    atomic_fetch_add(&s->refs, 1);
    *l = (local){{.mail = box, .cpus = lt_cpu_count() / size, .local_rank = rank}, s};
    set_channels(l, (lt_shm){.control = (lt_shm_control *)s->control,
                             .rank = rank,
                             .size = size,
                             .timeout = lt_group_timeout(config)});
    return lt__group_new(&transport, &l->at, rank, size);
}

lt_status lt_local_open(int n, const lt_group_config *config, lt_group **group)
{
    static const lt_group_config defaults;
    if (n < 1 || n > LT_MAX_SUMMANDS)
        return lt_fail(LT_EUSAGE, "a process must have 1 to %d ranks, not %d", LT_MAX_SUMMANDS, n);
    lt_mail *box[LT_MAX_SUMMANDS];
    LT_TRY(lt__mail_open_local(n, box));
    shared *s = shared_new(n);
    lt_status status = s ? LT_OK : LT_ENOMEM;
    int made = 0, taken = 0;
    while (status == LT_OK && made < n) {
        group[made] = member(s, box[taken++], made, n, config ? config : &defaults);
        status = group[made] ? LT_OK : LT_ENOMEM;
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
