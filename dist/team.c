/* team.c - collectives over shared memory; see team.h.
 *
 * A collective has two phases. In the first each rank posts its wish and waits for those of all;
 * then the data of all may be read and written. In the second each says that it is through, and
 * waits for that of all; then its own data is its own again. In between the ranks share the work:
 * each sums one part of the elements for all, which reads and writes every element once per rank.
 */
#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core/tensor.h"
#include "dist/sum.h"
#include "dist/team.h"

enum { WHAT_BYTES = 48, WHERE_WORDS = 8, TEXT_BYTES = 1024 };
enum { SPINS = 4000 };                  /* looks before a wait sleeps, some tens of microseconds */
enum { SLICE_NS = 100 * 1000 * 1000 };  /* of sleep, between looks for those who cannot ring */

typedef enum kind { NOTHING, SUM, BROADCAST, BARRIER } kind;

typedef struct wish { /* what a rank wants of the others */
    kind kind;
    int root;
    lt_dtype dtype, wire;
    int64_t count;
    double scale;
    uint64_t place;   /* of its data */
    char what[WHAT_BYTES];
} wish;

typedef struct box { /* for what one rank sends to one other */
    _Alignas(64) atomic_uint sent, taken;
    size_t bytes;
    uint64_t place;
} box;

typedef enum state { HERE, LEFT } state;

typedef struct seat {
    _Alignas(128) atomic_uint posted, through; /* wishes, since the beginning */
    atomic_int state;
    wish wish;
    _Atomic int64_t step;
    _Atomic uint64_t where[WHERE_WORDS]; /* text: others may read it at any moment */
} seat;

typedef enum failing { FINE, WRITING, FAILED } failing;

struct lt_board {
    _Alignas(128) atomic_uint bell; /* counts changes */
    atomic_uint sleepers;
    _Alignas(128) atomic_int failing;
    int size, failed_rank;
    lt_status failed_code;
    char failed_text[TEXT_BYTES];
    seat seat[];          /* and behind them the boxes, by sender and receiver */
};

size_t lt__board_bytes(int size)
{
    return sizeof(lt_board) + (size_t)size * sizeof(seat) +
           (size_t)size * (size_t)size * sizeof(box);
}

void lt__board_init(lt_board *board, int size) { board->size = size; }

/* ==== The bell ================================================================================ */

static void ring(lt_board *b)
{
    atomic_fetch_add(&b->bell, 1);
    if (atomic_load(&b->sleepers) > 0)
        syscall(SYS_futex, &b->bell, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* Until the bell has rung since it was at `heard`, or a slice of time is over. */
static void sleep_until_bell(lt_board *b, unsigned heard)
{
    struct timespec slice = {.tv_nsec = SLICE_NS};
    atomic_fetch_add(&b->sleepers, 1);
    syscall(SYS_futex, &b->bell, FUTEX_WAIT, heard, &slice, NULL, 0);
    atomic_fetch_sub(&b->sleepers, 1);
}

/* ==== Failure ================================================================================= */

void lt__team_fail(lt_team *t, int rank, lt_status code, const char *text)
{
    lt_board *b = t->board;
    int fine = FINE;
    if (!atomic_compare_exchange_strong(&b->failing, &fine, WRITING))
        return;
    b->failed_rank = rank;
    b->failed_code = code;
    snprintf(b->failed_text, sizeof b->failed_text, "%s", text);
    atomic_store(&b->failing, FAILED);
    ring(b);
}

bool lt__team_failure(const lt_team *t, int *rank, lt_status *code, char *text, size_t bytes)
{
    const lt_board *b = t->board;
    if (atomic_load(&b->failing) != FAILED)
        return false;
    *rank = b->failed_rank;
    *code = b->failed_code;
    snprintf(text, bytes, "%s", b->failed_text);
    return true;
}

/* LT_OK while nobody has failed. */
static lt_status check(const lt_team *t)
{
    char text[TEXT_BYTES];
    lt_status code;
    int rank;
    if (!lt__team_failure(t, &rank, &code, text, sizeof text))
        return LT_OK;
    if (code == LT_EDESYNC)
        return lt_fail(code, "%s", text);
    return lt_fail(LT_EPEER, "rank %d failed: %s", rank, text);
}

/* This rank has found out what is wrong: everybody is to know. */
static lt_status blame(lt_team *t, int rank, lt_status code)
{
    lt__team_fail(t, rank, code, lt_errmsg());
    return code;
}

void lt__team_at(lt_team *t, const char *where, int64_t step)
{
    seat *s = &t->board->seat[t->rank];
    uint64_t words[WHERE_WORDS] = {0};
    size_t bytes = strlen(where);
    memcpy(words, where, bytes < sizeof words ? bytes : sizeof words - 1);
    for (int i = 0; i < WHERE_WORDS; i++)
        atomic_store_explicit(&s->where[i], words[i], memory_order_relaxed);
    atomic_store_explicit(&s->step, step, memory_order_relaxed);
}

/* "it was last seen at train.lua:31, step 7", or "". */
static const char *last_seen(const lt_team *t, int rank, char *text, size_t bytes)
{
    seat *s = &t->board->seat[rank];
    uint64_t words[WHERE_WORDS + 1] = {0};
    for (int i = 0; i < WHERE_WORDS; i++)
        words[i] = atomic_load_explicit(&s->where[i], memory_order_relaxed);
    text[0] = 0;
    if (words[0])
        snprintf(text, bytes, "; it was last seen at %s, step %lld", (const char *)words,
                 (long long)atomic_load_explicit(&s->step, memory_order_relaxed));
    return text;
}

void lt__team_leave(lt_team *t)
{
    atomic_store(&t->board->seat[t->rank].state, LEFT);
    ring(t->board);
}

/* ==== Waiting ================================================================================= */

/* Until a counter has come to a number: that of a rank, or one of each seat. */
typedef struct wait {
    const char *what;
    unsigned number;
    const atomic_uint *counter;    /* NULL: of each seat, posted or through */
    int rank;                      /* whose turn it is; of each seat: its own */
    bool through;
} wait;

static bool has_come(const lt_team *t, const wait *w, int rank)
{
    const seat *s = &t->board->seat[rank];
    const atomic_uint *counter = w->counter ? w->counter : w->through ? &s->through : &s->posted;
    return (int)(atomic_load(counter) - w->number) >= 0;
}

/* One that has not come; -1 when all have. */
static int missing(const lt_team *t, const wait *w)
{
    if (w->counter)
        return has_come(t, w, w->rank) ? -1 : w->rank;
    for (int rank = 0; rank < t->size; rank++)
        if (!has_come(t, w, rank))
            return rank;
    return -1;
}

/* Why there is no use in waiting for a rank any longer; LT_OK while there is. Between threads
 * nothing ends the second phase but its end: a rank that reads our data is still at it. */
static lt_status look_around(lt_team *t, const wait *w, int rank, double deadline)
{
    char seen[160];
    if (w->through && !t->lives)
        return LT_OK;
    LT_TRY(check(t));
    bool left = atomic_load(&t->board->seat[rank].state) == LEFT && !has_come(t, w, rank);
    bool lost = t->lives && !t->lives(t->ud, rank) && !has_come(t, w, rank);
    if (!left && !lost && lt__seconds() < deadline)
        return LT_OK;
    if (left)
        lt_fail(LT_EPEER, "rank %d has left, but rank %d waits for it in %s", rank, t->rank,
                w->what);
    else if (lost)
        lt_fail(LT_EPEER, "rank %d is gone, while rank %d waits for it in %s%s", rank, t->rank,
                w->what, last_seen(t, rank, seen, sizeof seen));
    else
        lt_fail(LT_EPEER, "rank %d did not come to %s within %g s%s", rank, w->what, t->timeout,
                last_seen(t, rank, seen, sizeof seen));
    return blame(t, rank, LT_EPEER);
}

static lt_status wait_for(lt_team *t, const wait *w)
{
    double deadline = lt__seconds() + t->timeout;
    int spins = t->spin ? SPINS : 0, rank;
    for (;;) {
        unsigned heard = atomic_load(&t->board->bell);
        if ((rank = missing(t, w)) < 0)
            return LT_OK;
        if (spins-- > 0)
            continue;
        LT_TRY(look_around(t, w, rank, deadline));
        sleep_until_bell(t->board, heard);
    }
}

/* ==== Wishes ================================================================================== */

static const char *describe(const wish *w, char *text, size_t bytes)
{
    char wire[32] = "";
    if (w->kind == SUM && w->wire != w->dtype)
        snprintf(wire, sizeof wire, " as %s", lt_dtype_name(w->wire));
    if (w->kind == SUM)
        snprintf(text, bytes, "the sum of %s (%lld %s%s)", w->what, (long long)w->count,
                 lt_dtype_name(w->dtype), wire);
    else if (w->kind == BROADCAST)
        snprintf(text, bytes, "a broadcast of %s (%lld bytes from rank %d)", w->what,
                 (long long)w->count, w->root);
    else
        snprintf(text, bytes, "a barrier, %s", w->what);
    return text;
}

static bool agree(const wish *a, const wish *b)
{
    return a->kind == b->kind && a->root == b->root && a->dtype == b->dtype &&
           a->wire == b->wire && a->count == b->count && strcmp(a->what, b->what) == 0;
}

/* All ranks find the same two that differ. */
static lt_status compare(lt_team *t)
{
    char first[160], other[160];
    const wish *w = &t->board->seat[0].wish;
    for (int rank = 1; rank < t->size; rank++) {
        const wish *v = &t->board->seat[rank].wish;
        if (agree(w, v))
            continue;
        lt_fail(LT_EDESYNC, "the ranks disagree: rank 0 wants %s, rank %d %s",
                describe(w, first, sizeof first), rank, describe(v, other, sizeof other));
        return blame(t, rank, LT_EDESYNC);
    }
    return LT_OK;
}

/* This rank is through with the data of others, and says so. */
static void pass(lt_team *t)
{
    atomic_store(&t->board->seat[t->rank].through, t->wishes);
    ring(t->board);
}

/* Posts a wish; then waits for those of all, which must be equal. */
static lt_status meet(lt_team *t, const wish *mine, const char *what)
{
    seat *s = &t->board->seat[t->rank];
    LT_TRY(check(t));
    s->wish = *mine;
    snprintf(s->wish.what, sizeof s->wish.what, "%s", what);
    atomic_store(&s->posted, ++t->wishes);
    ring(t->board);
    wait w = {.what = s->wish.what, .number = t->wishes};
    lt_status status = wait_for(t, &w);
    if (status == LT_OK)
        status = compare(t);
    if (status != LT_OK)
        pass(t);
    return status;
}

/* Waits until all are through. One of them may have failed after all had met: then it has not done
 * its part. */
static lt_status part(lt_team *t)
{
    pass(t);
    wait w = {.what = t->board->seat[t->rank].wish.what, .number = t->wishes, .through = true};
    LT_TRY(wait_for(t, &w));
    return check(t);
}

static void *data_of(const lt_team *t, int rank, uint64_t place)
{
    return t->find ? t->find(t->ud, rank, place) : (void *)(uintptr_t)place;
}

/* ==== Collectives ============================================================================= */

/* Where part `rank` of `count` elements begins; parts begin at cache lines. */
static int64_t part_begin(const lt_team *t, int rank, int64_t count, lt_dtype dtype)
{
    int64_t line = 64 / (int64_t)lt_dtype_bytes(dtype), lines = (count + line - 1) / line;
    int64_t at = lines * rank / t->size * line;
    return at < count ? at : count;
}

lt_status lt__team_allreduce(lt_team *t, const lt_sum *sum)
{
    lt_share share[LT_MOST_SHARES];
    wish mine = {.kind = SUM, .dtype = sum->dtype, .wire = sum->wire, .count = sum->count,
                 .scale = sum->scale, .place = (uintptr_t)sum->data};
    LT_TRY(meet(t, &mine, sum->what));
    for (int rank = 0; rank < t->size; rank++) {
        const wish *w = &t->board->seat[rank].wish;
        share[rank] = (lt_share){data_of(t, rank, w->place), w->scale};
    }
    int64_t first = part_begin(t, t->rank, sum->count, sum->dtype);
    int64_t end = part_begin(t, t->rank + 1, sum->count, sum->dtype);
    lt__sum_shares(share, t->size, sum->dtype, sum->wire, first, end - first);
    t->bytes += 2 * (uint64_t)sum->count * lt_dtype_bytes(sum->wire) * (uint64_t)(t->size - 1) /
                (uint64_t)t->size;
    return part(t);
}

lt_status lt__team_broadcast(lt_team *t, const char *what, void *data, size_t bytes, int root)
{
    wish mine = {.kind = BROADCAST, .root = root, .count = (int64_t)bytes,
                 .place = (uintptr_t)data};
    LT_TRY(meet(t, &mine, what));
    if (t->rank != root && bytes > 0) {
        memcpy(data, data_of(t, root, t->board->seat[root].wish.place), bytes);
        t->bytes += bytes;
    }
    return part(t);
}

lt_status lt__team_barrier(lt_team *t, const char *what)
{
    wish mine = {.kind = BARRIER};
    LT_TRY(meet(t, &mine, what));
    return part(t);
}

/* ==== From one to another ===================================================================== */

static box *box_of(const lt_team *t, int from, int to)
{
    return (box *)&t->board->seat[t->size] + from * t->size + to;
}

/* The other takes the bytes from where they lie. */
lt_status lt__team_send(lt_team *t, int to, const void *data, size_t bytes)
{
    char what[WHAT_BYTES];
    box *b = box_of(t, t->rank, to);
    unsigned number = atomic_load(&b->sent) + 1;
    b->bytes = bytes;
    b->place = (uintptr_t)data;
    atomic_store(&b->sent, number);
    ring(t->board);
    t->bytes += bytes;
    snprintf(what, sizeof what, "a receive from rank %d", t->rank);
    wait w = {.what = what, .number = number, .counter = &b->taken, .rank = to};
    return wait_for(t, &w);
}

lt_status lt__team_receive(lt_team *t, int from, void *data, size_t bytes)
{
    char what[WHAT_BYTES];
    box *b = box_of(t, from, t->rank);
    unsigned number = atomic_load(&b->taken) + 1;
    snprintf(what, sizeof what, "a send to rank %d", t->rank);
    wait w = {.what = what, .number = number, .counter = &b->sent, .rank = from};
    LT_TRY(wait_for(t, &w));
    if (b->bytes != bytes) {
        lt_fail(LT_EDESYNC, "the ranks disagree: rank %d sends %zu bytes, rank %d wants %zu", from,
                b->bytes, t->rank, bytes);
        return blame(t, t->rank, LT_EDESYNC);
    }
    memcpy(data, data_of(t, from, b->place), bytes);
    atomic_store(&b->taken, number);
    ring(t->board);
    return LT_OK;
}
