/* order.c - the order of events in asynchronous training; see order.h. */
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/async/order.h"

typedef struct worker {
    bool lost, computing, waiting;
    int prefetch;                    /* number of tickets */
    int64_t ticket[LT_MAX_PREFETCH]; /* order of issue; if `computing`, the first is computed */
    int64_t read;                    /* version that it read at its last grant */
    int64_t pushes;                  /* number of accepted pushes */
    int64_t pull;                    /* number of its last pull among all pulls */
} worker;

struct lt_order {
    lt_order_config config;
    worker *workers;
    int64_t version, next; /* next: the first ticket that was never issued */
    int64_t pulls;         /* number of pulls so far */
    int computing;         /* number of workers that compute */
    /* Tickets to issue again, ascending. Has space for all tickets that workers hold. */
    int64_t *again;
    int n_again;
    /* Ticket t is done if t < done, or if bit t - base of bits is set; base is a multiple of 64. */
    int64_t done, base;
    uint64_t *bits;
    size_t n_bits; /* words */
};

enum { WORD = 64 };

/* ==== Done tickets ============================================================================ */

bool lt__order_is_done(const lt_order *o, int64_t ticket)
{
    if (ticket < o->done)
        return true;
    size_t i = (size_t)(ticket - o->base);
    return i / WORD < o->n_bits && (o->bits[i / WORD] >> i % WORD & 1);
}

/* Makes bits large enough for a ticket. */
static lt_status reserve_bits(lt_order *o, int64_t ticket)
{
    size_t past = (size_t)((o->done - o->base) / WORD); /* words that are no longer needed */
    if (past > 0 && past >= o->n_bits / 2) {
        size_t left = past < o->n_bits ? o->n_bits - past : 0;
        memmove(o->bits, o->bits + o->n_bits - left, left * sizeof *o->bits);
        memset(o->bits + left, 0, (o->n_bits - left) * sizeof *o->bits);
        o->base += (int64_t)past * WORD;
    }
    size_t needed = (size_t)(ticket - o->base) / WORD + 1;
    if (needed <= o->n_bits)
        return LT_OK;
    size_t had = o->n_bits;
    LT_TRY(LT_RESERVE(o->bits, needed, &o->n_bits, "for the tickets of asynchronous training"));
    memset(o->bits + had, 0, (o->n_bits - had) * sizeof *o->bits);
    return LT_OK;
}

/* Needs space from reserve_bits(). */
static void mark_done(lt_order *o, int64_t ticket)
{
    size_t i = (size_t)(ticket - o->base);
    o->bits[i / WORD] |= (uint64_t)1 << i % WORD;
    while (lt__order_is_done(o, o->done))
        o->done++;
}

/* ==== Tickets ================================================================================= */

/* Adds a ticket to `again`, which has space. */
static void put_back(lt_order *o, int64_t ticket)
{
    int i = o->n_again++;
    for (; i > 0 && o->again[i - 1] > ticket; i--)
        o->again[i] = o->again[i - 1];
    o->again[i] = ticket;
}

/* Takes the ticket to issue next: the lowest one that is neither held nor done. LT_NO_TICKET if all
 * tickets are held or done, or if this one is beyond the window. */
static int64_t take_ticket(lt_order *o)
{
    if (o->n_again > 0) {
        int64_t ticket = o->again[0];
        memmove(o->again, o->again + 1, (size_t)--o->n_again * sizeof *o->again);
        return ticket;
    }
    bool is_beyond = o->config.max_lead != LT_UNBOUNDED && o->next - o->done >= o->config.max_lead;
    return o->next < o->config.limit && !is_beyond ? o->next++ : LT_NO_TICKET;
}

static void hold_tickets(lt_order *o, worker *w)
{
    int64_t ticket;
    while (w->prefetch < o->config.prefetch && (ticket = take_ticket(o)) != LT_NO_TICKET)
        w->ticket[w->prefetch++] = ticket;
}

static void drop_first(worker *w)
{
    w->prefetch--;
    memmove(w->ticket, w->ticket + 1, (size_t)w->prefetch * sizeof *w->ticket);
}

/* ==== Opening ================================================================================= */

static const int64_t MAX_LIMIT = INT64_MAX / 2;

static lt_status check_limit(int64_t limit)
{
    if (limit < 0 || limit > MAX_LIMIT)
        return lt_fail(LT_EINVAL, "the number of tickets must be from 0 to %lld, but is %lld",
                       (long long)MAX_LIMIT, (long long)limit);
    return LT_OK;
}

static lt_status check_config(const lt_order_config *c)
{
    if (c->workers < 1 || c->workers > LT_MAX_WORKERS)
        return lt_fail(LT_EINVAL, "the number of workers must be from 1 to %d, but is %d",
                       LT_MAX_WORKERS, c->workers);
    if (c->prefetch < 1 || c->prefetch > LT_MAX_PREFETCH)
        return lt_fail(LT_EINVAL, "a worker must hold 1 to %d tickets, not %d", LT_MAX_PREFETCH,
                       c->prefetch);
    if (c->staleness < 0 && c->staleness != LT_UNBOUNDED)
        return lt_fail(LT_EINVAL, "staleness must be at least 0, but is %lld",
                       (long long)c->staleness);
    if (c->drop < 1 && c->drop != LT_UNBOUNDED)
        return lt_fail(LT_EINVAL, "drop must be at least 1, but is %lld", (long long)c->drop);
    if (c->max_lead < 1 && c->max_lead != LT_UNBOUNDED)
        return lt_fail(LT_EINVAL, "window must be at least 1, but is %lld", (long long)c->max_lead);
    return check_limit(c->limit);
}

/* Replaces the workers of o by idle ones. `again` gets space for their tickets and for `more`. */
static lt_status set_workers(lt_order *o, const lt_order_config *config, size_t more)
{
    size_t n = (size_t)config->workers;
    worker *workers = calloc(n, sizeof *workers);
    int64_t *again = malloc((n * LT_MAX_PREFETCH + more) * sizeof *again);
    if (!workers || !again) {
        free(workers);
        free(again);
        return lt_fail(LT_ENOMEM, "out of memory for %zu asynchronous workers", n);
    }
    if (o->n_again > 0)
        memcpy(again, o->again, (size_t)o->n_again * sizeof *again);
    free(o->workers);
    free(o->again);
    o->config = *config;
    o->workers = workers;
    o->again = again;
    return LT_OK;
}

lt_order *lt__order_new(const lt_order_config *config)
{
    if (check_config(config) != LT_OK)
        return NULL;
    lt_order *o = lt__calloc(1, sizeof *o, "for asynchronous training");
    if (!o)
        return NULL;
    if (set_workers(o, config, 0) == LT_OK)
        return o;
    lt__order_free(o);
    return NULL;
}

void lt__order_free(lt_order *o)
{
    if (!o)
        return;
    free(o->workers);
    free(o->again);
    free(o->bits);
    free(o);
}

lt_status lt__order_set_limit(lt_order *o, int64_t limit)
{
    if (limit < o->config.limit)
        return lt_fail(LT_EINVAL, "the number of tickets cannot decrease from %lld to %lld",
                       (long long)o->config.limit, (long long)limit);
    LT_TRY(check_limit(limit));
    o->config.limit = limit;
    return LT_OK;
}

/* ==== Events ================================================================================== */

static worker *find_worker(const lt_order *o, int i)
{
    if (i >= 0 && i < o->config.workers)
        return &o->workers[i];
    lt_fail(LT_EINVAL, "worker %d does not exist", i);
    return NULL;
}

lt_status lt__order_pull(lt_order *o, int i)
{
    worker *w = find_worker(o, i);
    if (!w)
        return LT_EINVAL;
    if (w->lost)
        return LT_OK;
    if (w->computing || w->waiting)
        return lt_fail(LT_EINVAL, "worker %d pulls twice without a push", i);
    LT_TRY(reserve_bits(o, o->next + (int64_t)o->config.workers * LT_MAX_PREFETCH));
    w->waiting = true;
    w->pull = o->pulls++;
    return LT_OK;
}

/* Whether one more worker can compute within the staleness bound. In the worst case, the pushes of
 * all others are applied before the push of the worker with the oldest version. */
static bool is_fresh_enough(const lt_order *o)
{
    int64_t oldest = o->version;
    if (o->config.staleness == LT_UNBOUNDED)
        return true;
    for (int i = 0; i < o->config.workers; i++)
        if (o->workers[i].computing && o->workers[i].read < oldest)
            oldest = o->workers[i].read;
    return o->version - oldest + o->computing <= o->config.staleness;
}

/* The worker with the oldest pull after number `after`, or NULL. */
static worker *next_waiting(const lt_order *o, int64_t after)
{
    worker *first = NULL;
    for (int i = 0; i < o->config.workers; i++) {
        worker *w = &o->workers[i];
        if (w->waiting && w->pull > after && (!first || w->pull < first->pull))
            first = w;
    }
    return first;
}

static bool is_over(const lt_order *o) { return o->done >= o->config.limit; }

bool lt__order_grant(lt_order *o, lt_grant *grant)
{
    worker *w = NULL;
    bool may_compute = is_fresh_enough(o);
    *grant = (lt_grant){.version = o->version};
    for (int64_t after = -1; (w = next_waiting(o, after)); after = w->pull) {
        if (is_over(o))
            break;
        if (!may_compute)
            return false;
        hold_tickets(o, w);
        if (w->prefetch > 0)
            break;
    }
    if (!w)
        return false;
    grant->worker = (int)(w - o->workers);
    grant->n = w->prefetch;
    memcpy(grant->ticket, w->ticket, (size_t)w->prefetch * sizeof *w->ticket);
    w->waiting = false;
    if (w->prefetch > 0) {
        w->computing = true;
        w->read = o->version;
        o->computing++;
    }
    return true;
}

lt_status lt__order_check_push(const lt_order *o, int i, int64_t number)
{
    const worker *w = find_worker(o, i);
    if (!w)
        return LT_EINVAL;
    if (w->lost || number < w->pushes || (number == w->pushes && w->computing))
        return LT_OK;
    return lt_fail(LT_EDESYNC, "worker %d sent push %lld, but has sent %lld before and %s a ticket",
                   i, (long long)number, (long long)w->pushes,
                   w->computing ? "computes" : "does not compute");
}

lt_status lt__order_push(lt_order *o, int i, int64_t number, bool skip, lt_push *push)
{
    LT_TRY(lt__order_check_push(o, i, number));
    worker *w = &o->workers[i];
    *push = (lt_push){.kind = w->lost ? LT_PUSH_FENCED : LT_PUSH_DUPLICATE, .ticket = LT_NO_TICKET};
    if (w->lost || number < w->pushes)
        return LT_OK;
    *push = (lt_push){LT_PUSH_APPLIED, w->ticket[0], o->version - w->read, 0};
    w->pushes++;
    w->computing = false;
    o->computing--;
    drop_first(w);
    if (skip) {
        push->kind = LT_PUSH_SKIPPED;
    } else if (o->config.drop != LT_UNBOUNDED && push->delay >= o->config.drop) {
        push->kind = LT_PUSH_DROPPED;
        put_back(o, push->ticket);
        return LT_OK;
    } else {
        push->version = ++o->version;
    }
    mark_done(o, push->ticket);
    return LT_OK;
}

void lt__order_release(lt_order *o, int i)
{
    if (lt__order_is_lost(o, i))
        return;
    worker *w = &o->workers[i];
    for (int k = 0; k < w->prefetch; k++)
        put_back(o, w->ticket[k]);
    o->computing -= w->computing;
    *w = (worker){.read = w->read, .pushes = w->pushes, .pull = w->pull};
}

int lt__order_lose(lt_order *o, int i)
{
    if (lt__order_is_lost(o, i))
        return 0;
    int prefetch = o->workers[i].prefetch;
    lt__order_release(o, i);
    o->workers[i].lost = true;
    return prefetch;
}

void lt__order_join(lt_order *o, int i)
{
    if (i >= 0 && i < o->config.workers && o->workers[i].lost)
        o->workers[i] = (worker){.read = o->workers[i].read};
}

lt_order_config lt__order_config(const lt_order *o) { return o->config; }
int64_t lt__order_version(const lt_order *o) { return o->version; }
int64_t lt__order_limit(const lt_order *o) { return o->config.limit; }
int64_t lt__order_issued(const lt_order *o) { return o->next; }
int64_t lt__order_done_below(const lt_order *o) { return o->done; }

bool lt__order_is_lost(const lt_order *o, int i)
{
    return i < 0 || i >= o->config.workers || o->workers[i].lost;
}

/* ==== Saving ================================================================================== */

/* The state consists of HEAD numbers, the tickets of `again`, the tickets above `done` that are
 * done, and OF_WORKER numbers for each worker. */
enum {
    FORMAT,
    WORKERS,
    PREFETCH,
    STALENESS,
    DROP,
    LIMIT,
    VERSION,
    NEXT,
    PULLS,
    DONE,
    N_AGAIN,
    N_DONE,
    MAX_LEAD,
    HEAD
};
enum { FLAGS, READ, PUSHES, PULL, N_HELD, TICKETS, OF_WORKER = TICKETS + LT_MAX_PREFETCH };
enum { IS_LOST = 1, IS_COMPUTING = 2, IS_WAITING = 4 };
enum { CURRENT_FORMAT = 2 };

int64_t lt__order_saved_issued(const int64_t *state, size_t n)
{
    return n > NEXT ? state[NEXT] : -1;
}

static void save_worker(const worker *w, int64_t *to)
{
    to[FLAGS] = (w->lost ? IS_LOST : 0) | (w->computing ? IS_COMPUTING : 0) |
                (w->waiting ? IS_WAITING : 0);
    to[READ] = w->read;
    to[PUSHES] = w->pushes;
    to[PULL] = w->pull;
    to[N_HELD] = w->prefetch;
    for (int k = 0; k < LT_MAX_PREFETCH; k++)
        to[TICKETS + k] = k < w->prefetch ? w->ticket[k] : LT_NO_TICKET;
}

int64_t *lt__order_save(const lt_order *o, size_t *n)
{
    const lt_order_config *c = &o->config;
    int64_t done = 0;
    for (int64_t t = o->done; t < o->next; t++)
        done += lt__order_is_done(o, t);
    *n = HEAD + (size_t)o->n_again + (size_t)done + OF_WORKER * (size_t)c->workers;
    int64_t *state = lt__calloc(*n, sizeof *state, "for a checkpoint");
    if (!state)
        return NULL;
    int64_t *to = state + HEAD;
    const int64_t head[HEAD] = {CURRENT_FORMAT, c->workers, c->prefetch, c->staleness, c->drop,
                                c->limit,       o->version, o->next,     o->pulls,     o->done,
                                o->n_again,     done,       c->max_lead};
    memcpy(state, head, sizeof head);
    for (int i = 0; i < o->n_again; i++)
        *to++ = o->again[i];
    for (int64_t t = o->done; t < o->next; t++)
        if (lt__order_is_done(o, t))
            *to++ = t;
    for (int i = 0; i < c->workers; i++, to += OF_WORKER)
        save_worker(&o->workers[i], to);
    return state;
}

/* Marks a ticket that is done, held or to be issued again. False if it is out of range or was
 * marked before. seen (next - done). */
static bool see(const int64_t *state, bool *seen, int64_t ticket)
{
    if (ticket < state[DONE] || ticket >= state[NEXT] || seen[ticket - state[DONE]])
        return false;
    return seen[ticket - state[DONE]] = true;
}

static bool is_valid_worker(const int64_t *state, const int64_t *w, bool *seen)
{
    bool computing = w[FLAGS] & IS_COMPUTING;
    bool ok =
        w[FLAGS] >= 0 && w[N_HELD] >= computing && w[N_HELD] <= LT_MAX_PREFETCH &&
        (w[FLAGS] == 0 || w[FLAGS] == IS_COMPUTING || w[FLAGS] == IS_WAITING ||
         (w[FLAGS] == IS_LOST && w[N_HELD] == 0)) &&
        w[READ] >= 0 && w[READ] <= state[VERSION] && w[PUSHES] >= 0 && w[PULL] >= 0 &&
        (w[PULL] < state[PULLS] || (w[PULL] == 0 && !(w[FLAGS] & (IS_COMPUTING | IS_WAITING))));
    for (int k = 0; ok && k < w[N_HELD]; k++)
        ok = see(state, seen, w[TICKETS + k]);
    return ok;
}

/* Whether every ticket in [done, next) is in exactly one place, and the workers are possible. */
static bool is_valid(const int64_t *state, bool *seen)
{
    const int64_t *at = state + HEAD, *workers = at + state[N_AGAIN] + state[N_DONE];
    int64_t n_seen = state[N_AGAIN] + state[N_DONE], computing = 0, oldest = state[VERSION];
    bool ok = true;
    for (int64_t i = 0; ok && i < n_seen; i++)
        ok = see(state, seen, at[i]) && (i == 0 || i == state[N_AGAIN] || at[i] > at[i - 1]);
    ok = ok && (state[N_DONE] == 0 || at[state[N_AGAIN]] > state[DONE]);
    for (int64_t i = 0; ok && i < state[WORKERS]; i++) {
        const int64_t *w = workers + i * OF_WORKER;
        if (!is_valid_worker(state, w, seen))
            return false;
        n_seen += w[N_HELD];
        if (w[FLAGS] == IS_COMPUTING) {
            computing++;
            oldest = LT_MIN(w[READ], oldest);
        }
    }
    return ok && n_seen == state[NEXT] - state[DONE] &&
           (state[STALENESS] == LT_UNBOUNDED || computing == 0 ||
            state[VERSION] - oldest + computing - 1 <= state[STALENESS]);
}

/* Whether the numbers before the lists are possible, and the lists end with the state. */
static bool is_valid_head(const int64_t *state, size_t n)
{
    const int64_t max = (int64_t)n;
    return n >= HEAD && state[FORMAT] == CURRENT_FORMAT && state[WORKERS] >= 1 &&
           state[WORKERS] <= LT_MAX_WORKERS && state[PREFETCH] >= 1 &&
           state[PREFETCH] <= LT_MAX_PREFETCH && state[PULLS] >= 0 && state[DONE] >= 0 &&
           state[NEXT] >= state[DONE] && state[NEXT] <= state[LIMIT] && state[LIMIT] <= MAX_LIMIT &&
           state[NEXT] - state[DONE] <= max && state[N_AGAIN] >= 0 && state[N_AGAIN] <= max &&
           state[N_DONE] >= 0 && state[N_DONE] <= max && state[VERSION] >= 0 &&
           state[VERSION] - state[N_DONE] <= state[DONE] &&
           (state[STALENESS] >= 0 || state[STALENESS] == LT_UNBOUNDED) &&
           (state[DROP] >= 1 || state[DROP] == LT_UNBOUNDED) &&
           (state[MAX_LEAD] >= 1 || state[MAX_LEAD] == LT_UNBOUNDED) &&
           HEAD + state[N_AGAIN] + state[N_DONE] + OF_WORKER * state[WORKERS] == max;
}

static worker load_worker(const int64_t *from)
{
    worker w = {.lost = from[FLAGS] & IS_LOST,
                .computing = from[FLAGS] & IS_COMPUTING,
                .waiting = from[FLAGS] & IS_WAITING,
                .prefetch = (int)from[N_HELD],
                .read = from[READ],
                .pushes = from[PUSHES],
                .pull = from[PULL]};
    memcpy(w.ticket, from + TICKETS, sizeof w.ticket);
    return w;
}

/* Fills o, which is new, from a valid state. */
static lt_status load(lt_order *o, const lt_order_config *config, const int64_t *state)
{
    const int64_t *at = state + HEAD;
    LT_TRY(set_workers(o, config, (size_t)state[N_AGAIN]));
    o->version = state[VERSION];
    o->next = state[NEXT];
    o->pulls = state[PULLS];
    o->done = state[DONE];
    o->base = o->done / WORD * WORD;
    LT_TRY(reserve_bits(o, o->next + (int64_t)config->workers * LT_MAX_PREFETCH));
    for (int64_t i = 0; i < state[N_AGAIN]; i++)
        o->again[o->n_again++] = *at++;
    for (int64_t i = 0; i < state[N_DONE]; i++)
        mark_done(o, *at++);
    for (int i = 0; i < config->workers; i++, at += OF_WORKER) {
        o->workers[i] = load_worker(at);
        o->computing += o->workers[i].computing;
    }
    return LT_OK;
}

/* A new order from a state whose head is valid. *damaged is set if the rest is not. */
static lt_order *load_checked(const int64_t *state, bool *damaged)
{
    lt_order_config config = {.workers = (int)state[WORKERS],
                              .prefetch = (int)state[PREFETCH],
                              .staleness = state[STALENESS],
                              .drop = state[DROP],
                              .max_lead = state[MAX_LEAD],
                              .limit = state[LIMIT]};
    bool *seen =
        lt__calloc((size_t)(state[NEXT] - state[DONE]) + 1, sizeof *seen, "for a checkpoint");
    if (!seen)
        return NULL;
    *damaged = !is_valid(state, seen);
    free(seen);
    lt_order *o = *damaged ? NULL : lt__order_new(&config);
    if (o && load(o, &config, state) == LT_OK)
        return o;
    lt__order_free(o);
    return NULL;
}

lt_order *lt__order_load(const int64_t *state, size_t n)
{
    bool damaged = !is_valid_head(state, n);
    lt_order *o = damaged ? NULL : load_checked(state, &damaged);
    if (damaged)
        lt_fail(LT_EINVAL, "the state of the asynchronous workers is damaged");
    return o;
}

lt_status lt__order_restart(lt_order *o, const lt_order_config *config)
{
    worker *old = o->workers;
    int n = o->config.workers, outstanding = o->n_again;
    LT_TRY(check_config(config));
    if (config->limit < o->next)
        return lt_fail(LT_EINVAL, "%lld tickets were issued, but the limit is %lld",
                       (long long)o->next, (long long)config->limit);
    for (int i = 0; i < n; i++)
        outstanding += old[i].prefetch;
    o->workers = NULL;
    lt_status status = set_workers(o, config, (size_t)outstanding);
    if (status != LT_OK) {
        o->workers = old;
        return status;
    }
    for (int i = 0; i < n; i++)
        for (int k = 0; k < old[i].prefetch; k++)
            put_back(o, old[i].ticket[k]);
    o->computing = 0;
    o->pulls = 0;
    free(old);
    return LT_OK;
}
