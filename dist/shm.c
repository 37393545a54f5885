/* shm.c - collectives over shared memory; see shm.h.
 *
 * A collective has two phases. In the first, each rank posts its signature and waits until all have
 * posted. Then each rank may read and write the data of all. In the second, each rank reports that
 * it is done and waits until all are done. Then its data is its own again. Between the phases the
 * ranks share the work: each sums one part of the elements, for all ranks. Each element is thus
 * read and written once per rank. Data that other ranks cannot see is processed in chunks that fit
 * in the staging buffer. Each chunk goes through both phases.
 */
#include <stdio.h>
#include <string.h>

#include "dist/deadline.h"
#include "dist/shm_control.h"
#include "dist/sum.h"

enum { SPINS = 4000 }; /* checks before a wait sleeps; some tens of microseconds */

size_t lt__shm_control_bytes(int size)
{
    return sizeof(lt_shm_control) + (size_t)size * sizeof(slot) +
           (size_t)size * (size_t)size * sizeof(mailbox);
}

void lt__shm_control_init(lt_shm_control *control, int size) { control->size = size; }

static post *post_of(const lt_shm *shm, int who)
{
    return &shm->control->slot[who].channel[shm->channel];
}

/* ==== Waiting ================================================================================= */

/* What to wait for: a single counter, or one counter of each slot, to reach a number. */
typedef struct wait {
    const char *what;
    unsigned number;
    const atomic_uint *counter; /* NULL: the counter `posted` or `done` of each slot */
    int rank;                   /* the slot that advances the single counter */
    bool until_done;            /* wait for `done`, not `posted` */
} wait;

static bool has_arrived(const lt_shm *shm, const wait *w, int rank)
{
    const post *p = post_of(shm, rank);
    const atomic_uint *counter = w->counter ? w->counter : w->until_done ? &p->done : &p->posted;
    return (int)(atomic_load(counter) - w->number) >= 0;
}

/* The slot of a rank that has not arrived, or -1 if all have. */
static int missing(const lt_shm *shm, const wait *w)
{
    if (w->counter)
        return has_arrived(shm, w, w->rank) ? -1 : w->rank;
    for (int rank = 0; rank < shm->size; rank++)
        if (!has_arrived(shm, w, rank))
            return rank;
    return -1;
}

/* LT_OK to keep waiting for the rank in slot `who`, or the error that ends the wait. Threads never
 * give up the second phase, because another rank may still be reading this rank's data. */
static lt_status check_wait(lt_shm *shm, const wait *w, int who, lt_deadline *deadline)
{
    char seen[LT_SEEN_BYTES];
    if (w->until_done && !shm->is_alive)
        return LT_OK;
    LT_TRY(lt__shm_check(shm));
    bool left = has_left(shm, who) && !has_arrived(shm, w, who);
    bool lost = is_lost(shm, who) && !has_arrived(shm, w, who);
    int rank = rank_of(shm, who), own = rank_of(shm, shm->rank);
    if (!left && !lost && !lt__deadline_is_over(deadline))
        return LT_OK;
    int hung = left || lost ? rank : lt__shm_find_hung(shm, rank, seen);
    if (left || lost)
        lt_fail(LT_EPEER, "rank %d %s while rank %d was waiting for it in %s%s", rank,
                left ? "exited" : "was lost", own, w->what, lt__shm_last_seen(shm, rank, seen));
    else if (hung == rank)
        lt_fail(LT_EPEER, "rank %d did not reach %s within %g s%s", rank, w->what, shm->timeout,
                seen);
    else
        lt_fail(LT_EPEER, "rank %d did not reach %s within %g s, because it waits for rank %d%s",
                rank, w->what, shm->timeout, hung, seen);
    lt__shm_fail(shm, hung, LT_EPEER, lt_errmsg());
    return LT_EPEER;
}

/* After a failure, `awaited` stays: other ranks may be about to read it. */
static lt_status wait_for(lt_shm *shm, const wait *w)
{
    double now = lt__seconds();
    lt_deadline deadline = {now + shm->timeout + shm->grace, now};
    int spins = shm->spin ? SPINS : 0, rank;
    bool idle = false, is_told = false;
    for (;;) {
        unsigned seen_value = atomic_load(&shm->control->futex);
        if ((rank = missing(shm, w)) < 0)
            break;
        if (spins-- > 0)
            continue;
        is_told = true;
        lt__shm_set_awaited(shm, shm->channel, rank_of(shm, rank));
        LT_TRY(check_wait(shm, w, rank, &deadline));
        if (idle && shm->poll)
            shm->poll(shm->ud);
        idle = sleep_on_futex(shm->control, seen_value);
    }
    if (is_told)
        lt__shm_set_awaited(shm, shm->channel, -1);
    return LT_OK;
}

/* ==== Signatures ============================================================================== */

/* Compares the signatures of all ranks. All ranks find the same pair that differs. */
static lt_status compare(lt_shm *shm)
{
    const lt_coll_sig *w = &post_of(shm, 0)->sig;
    for (int rank = 1; rank < shm->size; rank++) {
        const lt_coll_sig *v = &post_of(shm, rank)->sig;
        if (!lt__coll_sigs_match(w, v))
            return fail_with(shm, rank,
                             lt__coll_sigs_fail(w, rank_of(shm, 0), v, rank_of(shm, rank)));
    }
    return LT_OK;
}

/* Reports that this rank is done with the data of other ranks. */
static void set_done(lt_shm *shm)
{
    atomic_store(&post_of(shm, shm->rank)->done, shm->collectives);
    wake_all(shm->control);
}

/* Gives up a collective on this rank. If ranks are threads, another one may have seen all posts
 * before it learned of the failure, and may be working on the data of all ranks; this waits until
 * it is done. A thread that posts later checks for a failure after its post and does not touch the
 * data. */
static lt_status abort_collective(lt_shm *shm, lt_status status)
{
    set_done(shm);
    for (int who = 0; who < shm->size && !shm->is_alive; who++)
        for (;;) {
            const post *p = post_of(shm, who);
            unsigned seen_value = atomic_load(&shm->control->futex);
            if (atomic_load(&p->posted) == atomic_load(&p->done))
                break;
            sleep_on_futex(shm->control, seen_value);
        }
    return status;
}

/* Posts a signature, waits until all ranks have posted, and checks that all signatures match. */
static lt_status post_and_wait(lt_shm *shm, const lt_coll_sig *mine, double scale, view shown)
{
    post *p = post_of(shm, shm->rank);
    LT_TRY(lt__shm_check(shm));
    p->sig = *mine;
    p->scale = scale;
    p->view = shown;
    atomic_store(&p->posted, ++shm->collectives);
    wake_all(shm->control);
    wait w = {.what = p->sig.what, .number = shm->collectives};
    lt_status status = lt__shm_check(shm);
    if (status == LT_OK)
        status = wait_for(shm, &w);
    if (status == LT_OK)
        status = compare(shm);
    return status == LT_OK ? LT_OK : abort_collective(shm, status);
}

/* Waits until all ranks are done. A rank may have failed after all had posted. Its part is then
 * missing, so this checks for a failure at the end. */
static lt_status finish(lt_shm *shm)
{
    set_done(shm);
    wait w = {
        .what = post_of(shm, shm->rank)->sig.what, .number = shm->collectives, .until_done = true};
    LT_TRY(wait_for(shm, &w));
    return lt__shm_check(shm);
}

/* ==== What others can see ===================================================================== */

static view expose(lt_shm *shm, const void *data, size_t bytes)
{
    uint64_t place = shm->handle_of ? shm->handle_of(shm->ud, data) : (uintptr_t)data;
    if (place != 0 || bytes == 0)
        return (view){place, false};
    memcpy(shm->staging, data, LT_MIN(bytes, shm->staging_bytes));
    return (view){shm->handle_of(shm->ud, shm->staging), true};
}

static void *map_view(const lt_shm *shm, int who, const view *s)
{
    return shm->map ? shm->map(shm->ud, slot_of(shm, who), s->handle)
                    : (void *)(uintptr_t)s->handle;
}

/* How many of `bytes` are visible at once. */
static size_t visible_bytes(const lt_shm *shm, const view *s, size_t bytes)
{
    return s->staged && bytes > shm->staging_bytes ? shm->staging_bytes : bytes;
}

/* This rank cannot do its part of the work: records a failure. */
static lt_status give_up(lt_shm *shm)
{
    lt_status status = fail_with(shm, shm->rank, lt_errcode());
    set_done(shm);
    return status;
}

/* ==== Collectives ============================================================================= */

/* The beginning of part `rank` of `count` elements. Parts begin at cache lines. */
static int64_t part_begin(const lt_shm *shm, int rank, int64_t count, lt_dtype dtype)
{
    int64_t line = 64 / (int64_t)lt_dtype_bytes(dtype), lines = (count + line - 1) / line;
    int64_t at = lines * rank / shm->size * line;
    return LT_MIN(at, count);
}

/* Finds the data of all ranks for the next *bytes. Reduces *bytes to the number that is visible on
 * every rank. */
static lt_status find_shares(const lt_shm *shm, void *own, lt_summand *share, size_t *bytes)
{
    for (int who = 0; who < shm->size; who++) {
        const post *p = post_of(shm, who);
        void *data = who == shm->rank ? own : map_view(shm, who, &p->view);
        if (!data && *bytes > 0)
            return lt_errcode();
        share[who] = (lt_summand){data, p->scale};
        *bytes = visible_bytes(shm, &p->view, *bytes);
    }
    return LT_OK;
}

/* Sums the next *bytes, or fewer if fewer are visible at once, and sets *bytes to that number. */
static lt_status sum_chunk(lt_shm *shm, const lt_sum *sum, const lt_coll_sig *sig, char *data,
                           size_t *bytes)
{
    lt_summand share[LT_MAX_SUMMANDS];
    view shown = expose(shm, data, *bytes);
    LT_TRY(post_and_wait(shm, sig, sum->scale, shown));
    if (find_shares(shm, shown.staged ? shm->staging : data, share, bytes) != LT_OK)
        return give_up(shm);
    int64_t count = (int64_t)(*bytes / lt_dtype_bytes(sum->dtype));
    int64_t first = part_begin(shm, shm->rank, count, sum->dtype);
    int64_t end = part_begin(shm, shm->rank + 1, count, sum->dtype);
    lt__sum_arrays(share, shm->size, sum->dtype, sum->wire, first, end - first);
    shm->bytes += 2 * (uint64_t)count * lt_dtype_bytes(sum->wire) * (uint64_t)(shm->size - 1) /
                  (uint64_t)shm->size;
    LT_TRY(finish(shm));
    if (shown.staged)
        memcpy(data, shm->staging, *bytes);
    return LT_OK;
}

lt_status lt__shm_allreduce(lt_shm *shm, const lt_sum *sum)
{
    lt_coll_sig sig = lt__coll_sig_of_sum(sum);
    size_t all = (size_t)sum->count * lt_dtype_bytes(sum->dtype), done = 0, bytes;
    do {
        bytes = all - done;
        LT_TRY(sum_chunk(shm, sum, &sig, (char *)sum->data + done, &bytes));
        done += bytes;
    } while (done < all);
    return LT_OK;
}

/* In chunks: as many bytes as are visible at once. */
lt_status lt__shm_broadcast(lt_shm *shm, const char *what, void *data, size_t bytes, int root)
{
    const view *from = &post_of(shm, root)->view;
    lt_coll_sig sig = lt__coll_sig(LT_COLL_BROADCAST, what, (int64_t)bytes);
    sig.root = rank_of(shm, root);
    size_t done = 0;
    do {
        char *at = (char *)data + done;
        view shown = {0};
        if (shm->rank == root)
            shown = expose(shm, at, bytes - done);
        LT_TRY(post_and_wait(shm, &sig, 1, shown));
        size_t some = visible_bytes(shm, from, bytes - done);
        if (shm->rank != root && some > 0) {
            const void *seen = map_view(shm, root, from);
            if (!seen)
                return give_up(shm);
            memcpy(at, seen, some);
            shm->bytes += some;
        }
        LT_TRY(finish(shm));
        done += some;
    } while (done < bytes);
    return LT_OK;
}

lt_status lt__shm_match(lt_shm *shm, const lt_coll_sig *sig)
{
    LT_TRY(post_and_wait(shm, sig, 1, (view){0}));
    return finish(shm);
}

/* ==== Point to point ========================================================================== */

static mailbox *mailbox_of(const lt_shm *shm, int from, int to)
{
    return (mailbox *)&shm->control->slot[shm->size] + from * shm->size + to;
}

/* In chunks: the receiver copies the bytes that it sees from this rank's memory. */
lt_status lt__shm_send(lt_shm *shm, int to, const void *data, size_t bytes)
{
    char what[LT_WHAT_BYTES];
    mailbox *b = mailbox_of(shm, shm->rank, to);
    size_t done = 0;
    snprintf(what, sizeof what, "a receive from rank %d", rank_of(shm, shm->rank));
    do {
        unsigned number = atomic_load(&b->sent) + 1;
        b->bytes = bytes;
        b->view = expose(shm, (const char *)data + done, bytes - done);
        size_t some = visible_bytes(shm, &b->view, bytes - done);
        atomic_store(&b->sent, number);
        wake_all(shm->control);
        shm->bytes += some;
        wait w = {.what = what, .number = number, .counter = &b->taken, .rank = to};
        LT_TRY(wait_for(shm, &w));
        done += some;
    } while (done < bytes);
    return LT_OK;
}

lt_status lt__shm_receive(lt_shm *shm, int from, void *data, size_t bytes)
{
    char what[LT_WHAT_BYTES];
    mailbox *b = mailbox_of(shm, from, shm->rank);
    size_t done = 0;
    snprintf(what, sizeof what, "a send to rank %d", rank_of(shm, shm->rank));
    do {
        unsigned number = atomic_load(&b->taken) + 1;
        wait w = {.what = what, .number = number, .counter = &b->sent, .rank = from};
        LT_TRY(wait_for(shm, &w));
        if (b->bytes != bytes) {
            lt_fail(LT_EDESYNC,
                    "the ranks disagree: rank %d sends %zu bytes, but rank %d expects %zu",
                    rank_of(shm, from), b->bytes, rank_of(shm, shm->rank), bytes);
            return fail_with(shm, shm->rank, LT_EDESYNC);
        }
        size_t some = visible_bytes(shm, &b->view, bytes - done);
        const void *seen = some > 0 ? map_view(shm, from, &b->view) : NULL;
        if (some > 0 && !seen)
            return fail_with(shm, shm->rank, lt_errcode());
        if (some > 0)
            memcpy((char *)data + done, seen, some);
        atomic_store(&b->taken, number);
        wake_all(shm->control);
        done += some;
    } while (done < bytes);
    return LT_OK;
}
