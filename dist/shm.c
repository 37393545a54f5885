/* shm.c - collectives over shared memory; see shm.h.
 *
 * A collective has two phases. In the first, each rank posts its signature and waits until all have
 * posted. Then each rank may read and write the data of all. In the second, each rank reports that
 * it is done and waits until all are done. Then its data is its own again. Between the phases the
 * ranks share the work: each sums one part of the elements, for all ranks. Each element is thus
 * read and written once per rank. Data that other ranks cannot see is processed in chunks that fit
 * in the staging buffer. Each chunk goes through both phases.
 */
#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "dist/deadline.h"
#include "dist/sum.h"
#include "dist/shm.h"

enum { WHERE_WORDS = 8, TEXT_BYTES = 1024 };
enum { SPINS = 4000 };                 /* checks before a wait sleeps; some tens of microseconds */
enum { SLICE_NS = 100 * 1000 * 1000 }; /* longest sleep: a rank that has died does not wake us */

typedef struct view { /* how other ranks see a rank's data */
    uint64_t handle;
    bool staged; /* it is a copy in the staging buffer, as much as fits */
} view;

typedef struct mailbox {                  /* for messages from one rank to another */
    _Alignas(64) atomic_uint sent, taken; /* number of chunks so far */
    size_t bytes;                         /* of the whole message */
    view view;
} mailbox;

typedef enum state { PRESENT, QUIET, LEFT } state;

typedef struct post {                       /* of one rank in one channel */
    _Alignas(128) atomic_uint posted, done; /* number of collectives so far */
    lt_coll_sig sig;
    double scale;
    view view;
} post;

typedef struct slot {
    post channel[LT_SHM_CHANNELS];
    _Alignas(128) atomic_int state;
    _Atomic int64_t step;
    _Atomic uint64_t where[WHERE_WORDS]; /* text; other ranks may read it at any time */
} slot;

typedef enum failing { FINE, FAILED, WRITING /* + the slot that writes */ } failing;

struct lt_shm_control {
    _Alignas(128) atomic_uint futex; /* number of changes so far */
    atomic_uint sleepers;
    atomic_int reporter;              /* 1 + its slot, or 0 */
    _Alignas(128) atomic_int failing; /* see enum failing */
    int size, failed_rank;
    lt_status failed_code;
    char failed_text[TEXT_BYTES];
    slot slot[]; /* (size), followed by mailboxes (sender, receiver) */
};

size_t lt__shm_control_bytes(int size)
{
    return sizeof(lt_shm_control) + (size_t)size * sizeof(slot) +
           (size_t)size * (size_t)size * sizeof(mailbox);
}

void lt__shm_control_init(lt_shm_control *control, int size) { control->size = size; }

/* ==== The futex =============================================================================== */

static void wake_all(lt_shm_control *b)
{
    atomic_fetch_add(&b->futex, 1);
    if (atomic_load(&b->sleepers) > 0)
        syscall(SYS_futex, &b->futex, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* Sleeps until the futex is no longer at `seen_value`, at most SLICE_NS. */
static void sleep_on_futex(lt_shm_control *b, unsigned seen_value)
{
    struct timespec slice = {.tv_nsec = SLICE_NS};
    atomic_fetch_add(&b->sleepers, 1);
    syscall(SYS_futex, &b->futex, FUTEX_WAIT, seen_value, &slice, NULL, 0);
    atomic_fetch_sub(&b->sleepers, 1);
}

static post *post_of(const lt_shm *shm, int who)
{
    return &shm->control->slot[who].channel[shm->channel];
}

/* ==== Failure ================================================================================= */

static int rank_of(const lt_shm *shm, int who) { return shm->rank_of ? shm->rank_of[who] : who; }

static bool is_lost(const lt_shm *shm, int who)
{
    return shm->is_alive && !shm->is_alive(shm->ud, who);
}

/* Gets the right to write the failure in the control block. False if there is a failure already. If
 * another rank is writing, waits for it; if that rank has died, takes over. */
static bool claim_failure(lt_shm *shm)
{
    lt_shm_control *b = shm->control;
    int was = FINE;
    for (;;) {
        unsigned seen_value = atomic_load(&b->futex);
        if (atomic_compare_exchange_strong(&b->failing, &was, WRITING + shm->rank))
            return true;
        if (was == FAILED)
            return false;
        if (is_lost(shm, was - WRITING))
            continue;
        sleep_on_futex(b, seen_value);
        was = FINE;
    }
}

void lt__shm_fail(lt_shm *shm, int rank, lt_status code, const char *text)
{
    lt_shm_control *b = shm->control;
    if (!claim_failure(shm))
        return;
    b->failed_rank = rank;
    b->failed_code = code;
    snprintf(b->failed_text, sizeof b->failed_text, "%s", text);
    atomic_store(&b->failing, FAILED);
    wake_all(b);
}

bool lt__shm_has_failed(const lt_shm *shm) { return atomic_load(&shm->control->failing) == FAILED; }

bool lt__shm_failure(const lt_shm *shm, int *rank, lt_status *code, char *text, size_t bytes)
{
    const lt_shm_control *b = shm->control;
    if (!lt__shm_has_failed(shm))
        return false;
    *rank = b->failed_rank;
    *code = b->failed_code;
    snprintf(text, bytes, "%s", b->failed_text);
    return true;
}

lt_status lt__shm_check(const lt_shm *shm)
{
    char text[TEXT_BYTES];
    lt_status code;
    int rank;
    if (!lt__shm_failure(shm, &rank, &code, text, sizeof text))
        return LT_OK;
    if (code == LT_EDESYNC)
        return lt_fail(code, "%s", text);
    return lt_fail(LT_EPEER, "rank %d failed: %s", rank, text);
}

/* Records this thread's error as the failure of the job, caused by the rank in slot `who`. */
static lt_status fail_with(lt_shm *shm, int who, lt_status code)
{
    lt__shm_fail(shm, rank_of(shm, who), code, lt_errmsg());
    return code;
}

void lt__shm_set_location(lt_shm *shm, const char *where, int64_t step)
{
    slot *s = &shm->control->slot[shm->rank];
    uint64_t words[WHERE_WORDS] = {0};
    size_t bytes = strlen(where);
    memcpy(words, where, bytes < sizeof words ? bytes : sizeof words - 1);
    for (int i = 0; i < WHERE_WORDS; i++)
        atomic_store_explicit(&s->where[i], words[i], memory_order_relaxed);
    atomic_store_explicit(&s->step, step, memory_order_relaxed);
}

const char *lt__shm_last_seen(const lt_shm *shm, int who, char text[LT_SEEN_BYTES])
{
    slot *s = &shm->control->slot[who];
    uint64_t words[WHERE_WORDS + 1] = {0};
    for (int i = 0; i < WHERE_WORDS; i++)
        words[i] = atomic_load_explicit(&s->where[i], memory_order_relaxed);
    text[0] = 0;
    if (words[0])
        snprintf(text, LT_SEEN_BYTES, "; it was last seen at %s, step %lld", (const char *)words,
                 (long long)atomic_load_explicit(&s->step, memory_order_relaxed));
    return text;
}

static bool has_left(const lt_shm *shm, int who)
{
    return atomic_load(&shm->control->slot[who].state) == LEFT;
}

void lt__shm_check_liveness(lt_shm *shm)
{
    char seen[LT_SEEN_BYTES];
    for (int who = 0; who < shm->size; who++)
        if (is_lost(shm, who) && !has_left(shm, who)) {
            lt_fail(LT_EPEER, "rank %d was lost%s", rank_of(shm, who),
                    lt__shm_last_seen(shm, who, seen));
            fail_with(shm, who, LT_EPEER);
        }
}

static void set_state(lt_shm *shm, state next)
{
    atomic_store(&shm->control->slot[shm->rank].state, next);
    wake_all(shm->control);
}

void lt__shm_leave(lt_shm *shm) { set_state(shm, LEFT); }

bool lt__shm_has_left(const lt_shm *shm)
{
    for (int who = 0; who < shm->size; who++)
        if (!has_left(shm, who))
            return false;
    return true;
}

static bool is_quiet(const lt_shm *shm, int who, state least)
{
    return atomic_load(&shm->control->slot[who].state) >= (int)least || is_lost(shm, who);
}

/* Whether all ranks are quiet. Ignores the rank whose loss is the failure: it may never become
 * quiet. */
static bool all_are_quiet(const lt_shm *shm)
{
    const lt_shm_control *b = shm->control;
    bool misses = lt__shm_has_failed(shm) && b->failed_code == LT_EPEER;
    for (int who = 0; who < shm->size; who++)
        if (!is_quiet(shm, who, QUIET) && !(misses && rank_of(shm, who) == b->failed_rank))
            return false;
    return true;
}

bool lt__shm_is_reporter(lt_shm *shm, double seconds)
{
    double deadline = lt__seconds() + seconds;
    int reporter = 0;
    bool reports =
        atomic_compare_exchange_strong(&shm->control->reporter, &reporter, shm->rank + 1);
    set_state(shm, QUIET);
    while (lt__seconds() < deadline) {
        unsigned seen_value = atomic_load(&shm->control->futex);
        if (reports ? all_are_quiet(shm) : is_quiet(shm, reporter - 1, LEFT))
            break;
        sleep_on_futex(shm->control, seen_value);
    }
    return reports;
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
    lt__shm_last_seen(shm, who, seen);
    if (left)
        lt_fail(LT_EPEER, "rank %d exited while rank %d was waiting for it in %s%s", rank, own,
                w->what, seen);
    else if (lost)
        lt_fail(LT_EPEER, "rank %d was lost while rank %d was waiting for it in %s%s", rank, own,
                w->what, seen);
    else
        lt_fail(LT_EPEER, "rank %d did not reach %s within %g s%s", rank, w->what, shm->timeout,
                seen);
    return fail_with(shm, who, LT_EPEER);
}

static lt_status wait_for(lt_shm *shm, const wait *w)
{
    double now = lt__seconds();
    lt_deadline deadline = {now + shm->timeout + shm->grace, now};
    int spins = shm->spin ? SPINS : 0, rank;
    for (;;) {
        unsigned seen_value = atomic_load(&shm->control->futex);
        if ((rank = missing(shm, w)) < 0)
            return LT_OK;
        if (spins-- > 0)
            continue;
        LT_TRY(check_wait(shm, w, rank, &deadline));
        sleep_on_futex(shm->control, seen_value);
    }
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
    memcpy(shm->staging, data, bytes < shm->staging_bytes ? bytes : shm->staging_bytes);
    return (view){shm->handle_of(shm->ud, shm->staging), true};
}

static void *map_view(const lt_shm *shm, int who, const view *s)
{
    return shm->map ? shm->map(shm->ud, who, s->handle) : (void *)(uintptr_t)s->handle;
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
    return at < count ? at : count;
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

/* Broadcasts the next *bytes, or fewer if fewer are visible at once, and sets *bytes to that
 * number. */
static lt_status broadcast_chunk(lt_shm *shm, const lt_coll_sig *sig, char *data, size_t *bytes,
                                 int root)
{
    const view *from = &post_of(shm, root)->view;
    view shown = {0};
    if (shm->rank == root)
        shown = expose(shm, data, *bytes);
    LT_TRY(post_and_wait(shm, sig, 1, shown));
    *bytes = visible_bytes(shm, from, *bytes);
    if (shm->rank != root && *bytes > 0) {
        const void *seen = map_view(shm, root, from);
        if (!seen)
            return give_up(shm);
        memcpy(data, seen, *bytes);
        shm->bytes += *bytes;
    }
    return finish(shm);
}

lt_status lt__shm_broadcast(lt_shm *shm, const char *what, void *data, size_t bytes, int root)
{
    lt_coll_sig sig = lt__coll_sig(LT_COLL_BROADCAST, what, (int64_t)bytes);
    sig.root = rank_of(shm, root);
    size_t done = 0, some;
    do {
        some = bytes - done;
        LT_TRY(broadcast_chunk(shm, &sig, (char *)data + done, &some, root));
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

/* The receiver copies the bytes from this rank's memory. Sets *bytes to the number that it sees. */
static lt_status send_chunk(lt_shm *shm, int to, const char *data, size_t all, size_t *bytes)
{
    char what[LT_WHAT_BYTES];
    mailbox *b = mailbox_of(shm, shm->rank, to);
    unsigned number = atomic_load(&b->sent) + 1;
    b->bytes = all;
    b->view = expose(shm, data, *bytes);
    *bytes = visible_bytes(shm, &b->view, *bytes);
    atomic_store(&b->sent, number);
    wake_all(shm->control);
    shm->bytes += *bytes;
    snprintf(what, sizeof what, "a receive from rank %d", rank_of(shm, shm->rank));
    wait w = {.what = what, .number = number, .counter = &b->taken, .rank = to};
    return wait_for(shm, &w);
}

lt_status lt__shm_send(lt_shm *shm, int to, const void *data, size_t bytes)
{
    size_t done = 0, some;
    do {
        some = bytes - done;
        LT_TRY(send_chunk(shm, to, (const char *)data + done, bytes, &some));
        done += some;
    } while (done < bytes);
    return LT_OK;
}

static lt_status receive_chunk(lt_shm *shm, int from, char *data, size_t all, size_t *bytes)
{
    char what[LT_WHAT_BYTES];
    mailbox *b = mailbox_of(shm, from, shm->rank);
    unsigned number = atomic_load(&b->taken) + 1;
    snprintf(what, sizeof what, "a send to rank %d", rank_of(shm, shm->rank));
    wait w = {.what = what, .number = number, .counter = &b->sent, .rank = from};
    LT_TRY(wait_for(shm, &w));
    if (b->bytes != all) {
        lt_fail(LT_EDESYNC, "the ranks disagree: rank %d sends %zu bytes, but rank %d expects %zu",
                rank_of(shm, from), b->bytes, rank_of(shm, shm->rank), all);
        return fail_with(shm, shm->rank, LT_EDESYNC);
    }
    *bytes = visible_bytes(shm, &b->view, *bytes);
    if (*bytes > 0) {
        const void *seen = map_view(shm, from, &b->view);
        if (!seen)
            return fail_with(shm, shm->rank, lt_errcode());
        memcpy(data, seen, *bytes);
    }
    atomic_store(&b->taken, number);
    wake_all(shm->control);
    return LT_OK;
}

lt_status lt__shm_receive(lt_shm *shm, int from, void *data, size_t bytes)
{
    size_t done = 0, some;
    do {
        some = bytes - done;
        LT_TRY(receive_chunk(shm, from, (char *)data + done, bytes, &some));
        done += some;
    } while (done < bytes);
    return LT_OK;
}
