/* team.c - collectives over shared memory; see team.h.
 *
 * A collective has two phases. In the first each rank posts its wish and waits for those of all;
 * then the data of all may be read and written. In the second each says that it is through, and
 * waits for that of all; then its own data is its own again. In between the ranks share the work:
 * each sums one part of the elements for all, which reads and writes every element once per rank.
 * What cannot be seen by others is done in pieces that fit on the stage, each in its two phases.
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
#include "dist/team.h"

enum { WHERE_WORDS = 8, TEXT_BYTES = 1024 };
enum { SPINS = 4000 };                  /* looks before a wait sleeps, some tens of microseconds */
enum { SLICE_NS = 100 * 1000 * 1000 };  /* of sleep, between looks for those who cannot ring */

typedef struct sight { /* what others can see of a rank's data */
    uint64_t place;
    bool staged;         /* a copy, of as much as the stage holds */
} sight;

typedef struct box { /* for what one rank sends to one other */
    _Alignas(64) atomic_uint sent, taken;
    size_t bytes;
    sight sight;
} box;

typedef enum state { HERE, QUIET, LEFT } state;

typedef struct post { /* of a rank in one lane */
    _Alignas(128) atomic_uint posted, through; /* wishes, since the beginning */
    lt_wish wish;
    double scale;
    sight sight;
} post;

typedef struct seat {
    post lane[LT_LANES];
    _Alignas(128) atomic_int state;
    _Atomic int64_t step;
    _Atomic uint64_t where[WHERE_WORDS]; /* text: others may read it at any moment */
} seat;

typedef enum failing { FINE, FAILED, WRITING /* and the seat that does */ } failing;

struct lt_board {
    _Alignas(128) atomic_uint bell; /* counts changes */
    atomic_uint sleepers;
    atomic_int speaker;   /* 1 + its seat */
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

static post *post_of(const lt_team *t, int who) { return &t->board->seat[who].lane[t->lane]; }

/* ==== Failure ================================================================================= */

static int name_of(const lt_team *t, int who) { return t->name ? t->name[who] : who; }

static bool is_lost(const lt_team *t, int who) { return t->lives && !t->lives(t->ud, who); }

/* The board is this rank's to write a failure on; false: there is one. What another writes is
 * waited for, but who has died over it is taken over from. */
static bool may_write(lt_team *t)
{
    lt_board *b = t->board;
    int was = FINE;
    for (;;) {
        unsigned heard = atomic_load(&b->bell);
        if (atomic_compare_exchange_strong(&b->failing, &was, WRITING + t->rank))
            return true;
        if (was == FAILED)
            return false;
        if (is_lost(t, was - WRITING))
            continue;
        sleep_until_bell(b, heard);
        was = FINE;
    }
}

void lt__team_fail(lt_team *t, int rank, lt_status code, const char *text)
{
    lt_board *b = t->board;
    if (!may_write(t))
        return;
    b->failed_rank = rank;
    b->failed_code = code;
    snprintf(b->failed_text, sizeof b->failed_text, "%s", text);
    atomic_store(&b->failing, FAILED);
    ring(b);
}

bool lt__team_is_failing(const lt_team *t) { return atomic_load(&t->board->failing) == FAILED; }

bool lt__team_failure(const lt_team *t, int *rank, lt_status *code, char *text, size_t bytes)
{
    const lt_board *b = t->board;
    if (!lt__team_is_failing(t))
        return false;
    *rank = b->failed_rank;
    *code = b->failed_code;
    snprintf(text, bytes, "%s", b->failed_text);
    return true;
}

lt_status lt__team_check(const lt_team *t)
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
static lt_status blame(lt_team *t, int who, lt_status code)
{
    lt__team_fail(t, name_of(t, who), code, lt_errmsg());
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

const char *lt__team_last_seen(const lt_team *t, int who, char text[LT_SEEN_BYTES])
{
    seat *s = &t->board->seat[who];
    uint64_t words[WHERE_WORDS + 1] = {0};
    for (int i = 0; i < WHERE_WORDS; i++)
        words[i] = atomic_load_explicit(&s->where[i], memory_order_relaxed);
    text[0] = 0;
    if (words[0])
        snprintf(text, LT_SEEN_BYTES, "; it was last seen at %s, step %lld", (const char *)words,
                 (long long)atomic_load_explicit(&s->step, memory_order_relaxed));
    return text;
}

static bool has_left(const lt_team *t, int who)
{
    return atomic_load(&t->board->seat[who].state) == LEFT;
}

void lt__team_watch(lt_team *t)
{
    char seen[LT_SEEN_BYTES];
    for (int who = 0; who < t->size; who++)
        if (is_lost(t, who) && !has_left(t, who)) {
            lt_fail(LT_EPEER, "rank %d is gone%s", name_of(t, who),
                    lt__team_last_seen(t, who, seen));
            blame(t, who, LT_EPEER);
        }
}

static void enter(lt_team *t, state next)
{
    atomic_store(&t->board->seat[t->rank].state, next);
    ring(t->board);
}

void lt__team_leave(lt_team *t) { enter(t, LEFT); }

bool lt__team_has_left(const lt_team *t)
{
    for (int who = 0; who < t->size; who++)
        if (!has_left(t, who))
            return false;
    return true;
}

static bool is_quiet(const lt_team *t, int who, state least)
{
    return atomic_load(&t->board->seat[who].state) >= (int)least || is_lost(t, who);
}

/* But for the one that is missed: it may never be. */
static bool all_are_quiet(const lt_team *t)
{
    const lt_board *b = t->board;
    bool misses = lt__team_is_failing(t) && b->failed_code == LT_EPEER;
    for (int who = 0; who < t->size; who++)
        if (!is_quiet(t, who, QUIET) && !(misses && name_of(t, who) == b->failed_rank))
            return false;
    return true;
}

bool lt__team_speaks(lt_team *t, double seconds)
{
    double deadline = lt__seconds() + seconds;
    int speaker = 0;
    bool speaks = atomic_compare_exchange_strong(&t->board->speaker, &speaker, t->rank + 1);
    enter(t, QUIET);
    while (lt__seconds() < deadline) {
        unsigned heard = atomic_load(&t->board->bell);
        if (speaks ? all_are_quiet(t) : is_quiet(t, speaker - 1, LEFT))
            break;
        sleep_until_bell(t->board, heard);
    }
    return speaks;
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
    const post *p = post_of(t, rank);
    const atomic_uint *counter = w->counter ? w->counter : w->through ? &p->through : &p->posted;
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
static lt_status look_around(lt_team *t, const wait *w, int who, lt_deadline *deadline)
{
    char seen[LT_SEEN_BYTES];
    if (w->through && !t->lives)
        return LT_OK;
    LT_TRY(lt__team_check(t));
    bool left = has_left(t, who) && !has_come(t, w, who);
    bool lost = is_lost(t, who) && !has_come(t, w, who);
    int rank = name_of(t, who), own = name_of(t, t->rank);
    if (!left && !lost && !lt__deadline_is_over(deadline))
        return LT_OK;
    lt__team_last_seen(t, who, seen);
    if (left)
        lt_fail(LT_EPEER, "rank %d has left, but rank %d waits for it in %s%s", rank, own, w->what,
                seen);
    else if (lost)
        lt_fail(LT_EPEER, "rank %d is gone, while rank %d waits for it in %s%s", rank, own,
                w->what, seen);
    else
        lt_fail(LT_EPEER, "rank %d did not come to %s within %g s%s", rank, w->what, t->timeout,
                seen);
    return blame(t, who, LT_EPEER);
}

static lt_status wait_for(lt_team *t, const wait *w)
{
    double now = lt__seconds();
    lt_deadline deadline = {now + t->timeout + t->grace, now};
    int spins = t->spin ? SPINS : 0, rank;
    for (;;) {
        unsigned heard = atomic_load(&t->board->bell);
        if ((rank = missing(t, w)) < 0)
            return LT_OK;
        if (spins-- > 0)
            continue;
        LT_TRY(look_around(t, w, rank, &deadline));
        sleep_until_bell(t->board, heard);
    }
}

/* ==== Wishes ================================================================================== */

/* All ranks find the same two that differ. */
static lt_status compare(lt_team *t)
{
    const lt_wish *w = &post_of(t, 0)->wish;
    for (int rank = 1; rank < t->size; rank++) {
        const lt_wish *v = &post_of(t, rank)->wish;
        if (!lt__wishes_agree(w, v))
            return blame(t, rank, lt__wishes_differ(w, name_of(t, 0), v, name_of(t, rank)));
    }
    return LT_OK;
}

/* This rank is through with the data of others, and says so. */
static void pass(lt_team *t)
{
    atomic_store(&post_of(t, t->rank)->through, t->wishes);
    ring(t->board);
}

/* This rank has failed. Another thread that had all posts before it knew of that is at the data of
 * all, and waited for. One that posts only now looks for a failure after that, and turns back. */
static lt_status withdraw(lt_team *t, lt_status status)
{
    pass(t);
    for (int who = 0; who < t->size && !t->lives; who++)
        for (;;) {
            const post *p = post_of(t, who);
            unsigned heard = atomic_load(&t->board->bell);
            if (atomic_load(&p->posted) == atomic_load(&p->through))
                break;
            sleep_until_bell(t->board, heard);
        }
    return status;
}

/* Posts a wish; then waits for those of all, which must be equal. */
static lt_status meet(lt_team *t, const lt_wish *mine, double scale, sight shown)
{
    post *p = post_of(t, t->rank);
    LT_TRY(lt__team_check(t));
    p->wish = *mine;
    p->scale = scale;
    p->sight = shown;
    atomic_store(&p->posted, ++t->wishes);
    ring(t->board);
    wait w = {.what = p->wish.what, .number = t->wishes};
    lt_status status = lt__team_check(t);
    if (status == LT_OK)
        status = wait_for(t, &w);
    if (status == LT_OK)
        status = compare(t);
    return status == LT_OK ? LT_OK : withdraw(t, status);
}

/* Waits until all are through. One of them may have failed after all had met: then it has not done
 * its part. */
static lt_status part(lt_team *t)
{
    pass(t);
    wait w = {.what = post_of(t, t->rank)->wish.what, .number = t->wishes, .through = true};
    LT_TRY(wait_for(t, &w));
    return lt__team_check(t);
}

/* ==== What others can see ===================================================================== */

static sight show(lt_team *t, const void *data, size_t bytes)
{
    uint64_t place = t->place ? t->place(t->ud, data) : (uintptr_t)data;
    if (place != 0 || bytes == 0)
        return (sight){place, false};
    memcpy(t->stage, data, bytes < t->stage_bytes ? bytes : t->stage_bytes);
    return (sight){t->place(t->ud, t->stage), true};
}

static void *look_at(const lt_team *t, int who, const sight *s)
{
    return t->find ? t->find(t->ud, who, s->place) : (void *)(uintptr_t)s->place;
}

/* How much of so many bytes is to be seen at once. */
static size_t in_sight(const lt_team *t, const sight *s, size_t bytes)
{
    return s->staged && bytes > t->stage_bytes ? t->stage_bytes : bytes;
}

/* This rank cannot do its part. */
static lt_status give_up(lt_team *t)
{
    lt_status status = blame(t, t->rank, lt_errcode());
    pass(t);
    return status;
}

/* ==== Collectives ============================================================================= */

/* Where part `rank` of `count` elements begins; parts begin at cache lines. */
static int64_t part_begin(const lt_team *t, int rank, int64_t count, lt_dtype dtype)
{
    int64_t line = 64 / (int64_t)lt_dtype_bytes(dtype), lines = (count + line - 1) / line;
    int64_t at = lines * rank / t->size * line;
    return at < count ? at : count;
}

/* The shares of all in what is to be seen of the next *bytes, which may become fewer. */
static lt_status find_shares(const lt_team *t, void *own, lt_share *share, size_t *bytes)
{
    for (int who = 0; who < t->size; who++) {
        const post *p = post_of(t, who);
        void *data = who == t->rank ? own : look_at(t, who, &p->sight);
        if (!data && *bytes > 0)
            return lt_errcode();
        share[who] = (lt_share){data, p->scale};
        *bytes = in_sight(t, &p->sight, *bytes);
    }
    return LT_OK;
}

/* The sum of what is to be seen of the next *bytes, which become so many. */
static lt_status sum_some(lt_team *t, const lt_sum *sum, const lt_wish *wish, char *data,
                          size_t *bytes)
{
    lt_share share[LT_MOST_SHARES];
    sight shown = show(t, data, *bytes);
    LT_TRY(meet(t, wish, sum->scale, shown));
    if (find_shares(t, shown.staged ? t->stage : data, share, bytes) != LT_OK)
        return give_up(t);
    int64_t count = (int64_t)(*bytes / lt_dtype_bytes(sum->dtype));
    int64_t first = part_begin(t, t->rank, count, sum->dtype);
    int64_t end = part_begin(t, t->rank + 1, count, sum->dtype);
    lt__sum_shares(share, t->size, sum->dtype, sum->wire, first, end - first);
    t->bytes += 2 * (uint64_t)count * lt_dtype_bytes(sum->wire) * (uint64_t)(t->size - 1) /
                (uint64_t)t->size;
    LT_TRY(part(t));
    if (shown.staged)
        memcpy(data, t->stage, *bytes);
    return LT_OK;
}

lt_status lt__team_allreduce(lt_team *t, const lt_sum *sum)
{
    lt_wish wish = lt__wish_of_sum(sum);
    size_t all = (size_t)sum->count * lt_dtype_bytes(sum->dtype), done = 0, bytes;
    do {
        bytes = all - done;
        LT_TRY(sum_some(t, sum, &wish, (char *)sum->data + done, &bytes));
        done += bytes;
    } while (done < all);
    return LT_OK;
}

/* Of the next *bytes as many as are to be seen. */
static lt_status broadcast_some(lt_team *t, const lt_wish *wish, char *data, size_t *bytes,
                                int root)
{
    const sight *from = &post_of(t, root)->sight;
    sight shown = {0};
    if (t->rank == root)
        shown = show(t, data, *bytes);
    LT_TRY(meet(t, wish, 1, shown));
    *bytes = in_sight(t, from, *bytes);
    if (t->rank != root && *bytes > 0) {
        const void *seen = look_at(t, root, from);
        if (!seen)
            return give_up(t);
        memcpy(data, seen, *bytes);
        t->bytes += *bytes;
    }
    return part(t);
}

lt_status lt__team_broadcast(lt_team *t, const char *what, void *data, size_t bytes, int root)
{
    lt_wish wish = lt__wish(LT_BROADCAST, what, (int64_t)bytes);
    wish.root = name_of(t, root);
    size_t done = 0, some;
    do {
        some = bytes - done;
        LT_TRY(broadcast_some(t, &wish, (char *)data + done, &some, root));
        done += some;
    } while (done < bytes);
    return LT_OK;
}

lt_status lt__team_agree(lt_team *t, const lt_wish *wish)
{
    LT_TRY(meet(t, wish, 1, (sight){0}));
    return part(t);
}

/* ==== From one to another ===================================================================== */

static box *box_of(const lt_team *t, int from, int to)
{
    return (box *)&t->board->seat[t->size] + from * t->size + to;
}

/* The other takes the bytes from where they lie, as many of them as it sees. */
static lt_status send_some(lt_team *t, int to, const char *data, size_t all, size_t *bytes)
{
    char what[LT_WHAT_BYTES];
    box *b = box_of(t, t->rank, to);
    unsigned number = atomic_load(&b->sent) + 1;
    b->bytes = all;
    b->sight = show(t, data, *bytes);
    *bytes = in_sight(t, &b->sight, *bytes);
    atomic_store(&b->sent, number);
    ring(t->board);
    t->bytes += *bytes;
    snprintf(what, sizeof what, "a receive from rank %d", name_of(t, t->rank));
    wait w = {.what = what, .number = number, .counter = &b->taken, .rank = to};
    return wait_for(t, &w);
}

lt_status lt__team_send(lt_team *t, int to, const void *data, size_t bytes)
{
    size_t done = 0, some;
    do {
        some = bytes - done;
        LT_TRY(send_some(t, to, (const char *)data + done, bytes, &some));
        done += some;
    } while (done < bytes);
    return LT_OK;
}

static lt_status receive_some(lt_team *t, int from, char *data, size_t all, size_t *bytes)
{
    char what[LT_WHAT_BYTES];
    box *b = box_of(t, from, t->rank);
    unsigned number = atomic_load(&b->taken) + 1;
    snprintf(what, sizeof what, "a send to rank %d", name_of(t, t->rank));
    wait w = {.what = what, .number = number, .counter = &b->sent, .rank = from};
    LT_TRY(wait_for(t, &w));
    if (b->bytes != all) {
        lt_fail(LT_EDESYNC, "the ranks disagree: rank %d sends %zu bytes, rank %d wants %zu",
                name_of(t, from), b->bytes, name_of(t, t->rank), all);
        return blame(t, t->rank, LT_EDESYNC);
    }
    *bytes = in_sight(t, &b->sight, *bytes);
    if (*bytes > 0) {
        const void *seen = look_at(t, from, &b->sight);
        if (!seen)
            return blame(t, t->rank, lt_errcode());
        memcpy(data, seen, *bytes);
    }
    atomic_store(&b->taken, number);
    ring(t->board);
    return LT_OK;
}

lt_status lt__team_receive(lt_team *t, int from, void *data, size_t bytes)
{
    size_t done = 0, some;
    do {
        some = bytes - done;
        LT_TRY(receive_some(t, from, (char *)data + done, bytes, &some));
        done += some;
    } while (done < bytes);
    return LT_OK;
}
