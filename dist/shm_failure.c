/* shm_failure.c - failures, states and locations of ranks that share memory; see shm.h. They are in
 * the control block of the job, also for the parts of a split.
 */
#include <stdio.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/shm_control.h"

/* Gets the right to write the failure in the control block. False if there is a failure already. If
 * another rank is writing, waits for it; if that rank has died, takes over. */
static bool claim_failure(lt_shm *shm)
{
    lt_shm_control *b = job_of(shm);
    int was = FINE;
    for (;;) {
        unsigned seen_value = atomic_load(&b->futex);
        if (atomic_compare_exchange_strong(&b->failing, &was, WRITING + slot_of(shm, shm->rank)))
            return true;
        if (was == FAILED)
            return false;
        if (has_died(shm, was - WRITING))
            continue;
        sleep_on_futex(b, seen_value);
        was = FINE;
    }
}

void lt__shm_fail(lt_shm *shm, int rank, lt_status code, const char *text)
{
    lt_shm_control *b = job_of(shm);
    if (!claim_failure(shm))
        return;
    b->failed_rank = rank;
    b->failed_code = code;
    snprintf(b->failed_text, sizeof b->failed_text, "%s", text);
    atomic_store(&b->failing, FAILED);
    wake_all(b);
}

bool lt__shm_has_failed(const lt_shm *shm) { return atomic_load(&job_of(shm)->failing) == FAILED; }

bool lt__shm_failure(const lt_shm *shm, int *rank, lt_status *code, char *text, size_t bytes)
{
    const lt_shm_control *b = job_of(shm);
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

void lt__shm_set_location(lt_shm *shm, const char *where, int64_t step)
{
    slot *s = in_job(shm, shm->rank);
    uint64_t words[WHERE_WORDS] = {0};
    atomic_store(&s->owner, 1 + rank_of(shm, shm->rank));
    size_t bytes = strlen(where);
    memcpy(words, where, bytes < sizeof words ? bytes : sizeof words - 1);
    for (int i = 0; i < WHERE_WORDS; i++)
        atomic_store_explicit(&s->where[i], words[i], memory_order_relaxed);
    atomic_store_explicit(&s->step, step, memory_order_relaxed);
}

/* The slot of a rank of the job. NULL if the rank is on another node, or has neither waited nor set
 * a location yet. */
static const slot *find_owned(const lt_shm *shm, int rank)
{
    const lt_shm_control *b = job_of(shm);
    for (int i = 0; i < b->size; i++)
        if (atomic_load(&b->slot[i].owner) == 1 + rank)
            return &b->slot[i];
    return NULL;
}

const char *lt__shm_last_seen(const lt_shm *shm, int rank, char text[LT_SEEN_BYTES])
{
    const slot *s = find_owned(shm, rank);
    uint64_t words[WHERE_WORDS + 1] = {0};
    for (int i = 0; s && i < WHERE_WORDS; i++)
        words[i] = atomic_load_explicit(&s->where[i], memory_order_relaxed);
    text[0] = 0;
    if (words[0])
        snprintf(text, LT_SEEN_BYTES, "; it was last seen at %s, step %lld", (const char *)words,
                 (long long)atomic_load_explicit(&s->step, memory_order_relaxed));
    return text;
}

void lt__shm_set_awaited(lt_shm *shm, int channel, int rank)
{
    slot *s = in_job(shm, shm->rank);
    atomic_store(&s->owner, 1 + rank_of(shm, shm->rank));
    atomic_store(&s->awaited[channel], 1 + rank);
}

/* The rank that `rank` waits for, or -1. If its own thread waits for a message while its group's
 * thread is in a collective, the message counts, because only that holds up the rank. */
static int awaited_by(const lt_shm *shm, int rank)
{
    const slot *s = find_owned(shm, rank);
    int awaited = 0;
    for (int channel = LT_SHM_CHANNELS; s && channel >= 0 && !awaited; channel--)
        awaited = atomic_load(&s->awaited[channel]);
    return awaited - 1;
}

int lt__shm_find_hung(const lt_shm *shm, int rank, char seen[LT_SEEN_BYTES])
{
    int hung = rank, next, left = job_of(shm)->size;
    while (left >= 0 && (next = awaited_by(shm, hung)) >= 0) {
        hung = next;
        left--;
    }
    hung = left < 0 ? rank : hung; /* they wait for each other */
    lt__shm_last_seen(shm, hung, seen);
    return hung;
}

void lt__shm_check_liveness(lt_shm *shm)
{
    char seen[LT_SEEN_BYTES];
    for (int who = 0; who < shm->size; who++)
        if (is_lost(shm, who) && !has_left(shm, who)) {
            lt_fail(LT_EPEER, "rank %d was lost%s", rank_of(shm, who),
                    lt__shm_last_seen(shm, rank_of(shm, who), seen));
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

bool lt__shm_rank_has_left(const lt_shm *shm, int rank)
{
    for (int who = 0; who < shm->size; who++)
        if (rank_of(shm, who) == rank)
            return has_left(shm, who);
    return false;
}

static bool is_quiet(const lt_shm *shm, int who, state min)
{
    return atomic_load(&shm->control->slot[who].state) >= (int)min || is_lost(shm, who);
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
