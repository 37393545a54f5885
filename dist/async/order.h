/* order.h - the order of events in asynchronous training: which worker computes which batch, and
 * which gradients are applied. Private to dist.
 *
 * Batches are numbered by tickets, in the order of the data. A worker pulls: it gets a ticket and
 * reads the weights. It computes a gradient and pushes it; the server applies it, which makes a new
 * version of the weights. The delay of a push is the number of versions made since its pull.
 *
 * This is a state machine: its state depends only on the sequence of calls. It has no floats,
 * clocks or threads, so the same code orders live and simulated training. The caller serializes
 * calls. These invariants hold after every call:
 * - Each ticket below the limit is applied or skipped exactly once, however often it is given back,
 *   its worker is lost, or its push is dropped or repeated.
 * - The version grows by 1 with each applied push and never otherwise changes.
 * - Each worker's pushes are accepted in the order of their numbers, each one once.
 * - With a staleness bound S, no applied push has a delay above S: pulls wait if they might break
 *   this. With S = 0, one worker at a time computes.
 * - With a drop limit R, no applied push has a delay of R or more.
 * - With a window W, each issued ticket is less than W above the lowest unfinished one: pulls wait
 *   for this one.
 */
#ifndef LT_DIST_ASYNC_ORDER_H
#define LT_DIST_ASYNC_ORDER_H

#include "core/core.h"

enum {
    LT_MAX_WORKERS = 4096,
    LT_MAX_PREFETCH = 4, /* tickets of one worker */
    LT_UNBOUNDED = -1
};
enum { LT_NO_TICKET = -1 };

typedef struct lt_order lt_order;

typedef struct lt_order_config {
    int workers;  /* 1 to LT_MAX_WORKERS */
    int prefetch; /* 1 to LT_MAX_PREFETCH: the tickets that a worker holds at a time, so that it
                        * can prepare the data of the next ones */
    int64_t staleness; /* bound S >= 0, or LT_UNBOUNDED */
    int64_t drop;      /* limit R >= 1, or LT_UNBOUNDED */
    int64_t max_lead;  /* W >= 1, or LT_UNBOUNDED */
    int64_t limit;     /* tickets [0, limit) exist */
} lt_order_config;

typedef struct lt_grant { /* the answer to a pull */
    int worker;
    int64_t version;                 /* version of the weights that the worker must read now */
    int n;                           /* number of tickets; 0: every ticket is applied or skipped */
    int64_t ticket[LT_MAX_PREFETCH]; /* ticket[0] is to be computed now, the others are reserved */
} lt_grant;

typedef enum lt_push_kind {
    LT_PUSH_APPLIED,   /* the caller must apply the gradient */
    LT_PUSH_SKIPPED,   /* the worker skipped the batch, as after an overflow in f16 */
    LT_PUSH_DROPPED,   /* too old; its ticket is issued again */
    LT_PUSH_DUPLICATE, /* this push was accepted before */
    LT_PUSH_FENCED     /* the worker was declared lost before */
} lt_push_kind;

typedef struct lt_push {
    lt_push_kind kind;
    int64_t ticket;  /* LT_NO_TICKET if DUPLICATE or FENCED */
    int64_t delay;   /* 0 if DUPLICATE or FENCED */
    int64_t version; /* the version that it makes, if APPLIED; otherwise 0 */
} lt_push;

/* New. NULL with LT_EINVAL if a number is out of range, or with LT_ENOMEM. */
lt_order *lt__order_new(const lt_order_config *config);
void lt__order_free(lt_order *order); /* NULL is allowed */
/* Changes the limit. LT_EINVAL if it is negative or decreases. */
LT_NODISCARD lt_status lt__order_set_limit(lt_order *order, int64_t limit);

/* The worker asks for a ticket. lt__order_grant() answers, perhaps after further events. A pull of
 * a lost worker is ignored. LT_EINVAL if the worker does not exist, has not pushed the ticket of
 * its last pull, or waits already; LT_ENOMEM. */
LT_NODISCARD lt_status lt__order_pull(lt_order *order, int worker);
/* Answers the oldest pull that can be answered. Returns false if there is none. After each event,
 * call it until it returns false. */
bool lt__order_grant(lt_order *order, lt_grant *grant);
/* The worker pushes the ticket of its last pull. number counts its accepted pushes, from 0. skip:
 * it has no gradient. LT_EINVAL if the worker does not exist; LT_EDESYNC if pushes are missing
 * before this one or the worker computes no ticket. */
LT_NODISCARD lt_status lt__order_push(lt_order *order, int worker, int64_t number, bool skip,
                                      lt_push *push);
/* LT_EDESYNC or LT_EINVAL if lt__order_push() would fail with it. */
LT_NODISCARD lt_status lt__order_check_push(const lt_order *order, int worker, int64_t number);
/* Worker i gives its tickets back, to be issued again, and withdraws its pull. It may pull again.
 * Nothing happens if it is lost or does not exist. */
void lt__order_release(lt_order *order, int i);
/* Declares worker i lost: its tickets are issued again, to others. Returns how many it held.
 * Nothing happens if it was lost before or does not exist. */
int lt__order_lose(lt_order *order, int i);
/* Worker i, which was lost, is back: a new worker with this number, whose pushes count from 0.
 * Nothing happens if it is not lost or does not exist. */
void lt__order_join(lt_order *order, int i);

lt_order_config lt__order_config(const lt_order *order);
int64_t lt__order_version(const lt_order *order); /* number of applied pushes */
int64_t lt__order_limit(const lt_order *order);
int64_t lt__order_issued(const lt_order *order); /* all issued tickets are below this one */
/* Every ticket below this one is applied or skipped. */
int64_t lt__order_done_below(const lt_order *order);
bool lt__order_is_done(const lt_order *order, int64_t ticket);
bool lt__order_is_lost(const lt_order *order, int worker);

/* The state as numbers (*n), for a checkpoint. New; release it with free(). NULL with LT_ENOMEM. */
int64_t *lt__order_save(const lt_order *order, size_t *n);
/* The number of issued tickets in a saved state of n numbers. -1 if there are too few. */
int64_t lt__order_saved_issued(const int64_t *state, size_t n);
/* Restores a saved state exactly, workers and waiting pulls included. New. NULL with LT_EINVAL if
 * the numbers are not a valid state, or with LT_ENOMEM. */
lt_order *lt__order_load(const int64_t *state, size_t n);
/* Continues with new workers, none of which is lost or has pulled: tickets that the old ones held
 * are issued again. The other settings are replaced too; the limit must not be below the tickets
 * issued so far. LT_EINVAL, as for lt__order_new(); LT_ENOMEM. On failure nothing changes. */
LT_NODISCARD lt_status lt__order_restart(lt_order *order, const lt_order_config *config);

#endif
