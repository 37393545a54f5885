/* internal.h - the state of a pipeline, shared by the files that implement it. Private to
 * dist/pipeline.
 *
 * The k-th value that a stage sends to another one has the number k; its gradient returns with the
 * same number. A value that needs no gradient is acknowledged when the receiver uses it, so that a
 * stage that only runs forward passes does not run far ahead.
 */
#ifndef LT_DIST_PIPELINE_INTERNAL_H
#define LT_DIST_PIPELINE_INTERNAL_H

#include "core/tensor.h"
#include "dist/group.h"
#include "dist/pipeline/schedule.h"
#include "dist/pipeline/transfer.h"

typedef struct lt_sent { /* values that another stage uses, and whose gradient it returns */
    lt_tensor *x;        /* the values, with their history or received */
    int to;
    int64_t number;
    bool arrived;     /* the other stage has answered */
    lt_message *grad; /* the gradient; NULL if there is none */
} lt_sent;

typedef struct lt_received { /* values that have arrived, and need a gradient */
    lt_tensor *x;
    int to; /* the stage to which the gradient is returned */
    int64_t number;
    bool returned;
} lt_received;

typedef struct lt_micro_batch { /* exists until its backward pass is done */
    struct lt_micro_batch *next;
    lt_sent *sent;
    lt_received *received;
    int n_sent, n_received;
    size_t sent_room, received_room;
    lt_tensor *loss, *grad; /* the loss, if this stage has it; its gradient, or NULL */
    bool in_scope;          /* it began within a scope */
    bool forward_done;
    bool in_half;    /* it was computed in half precision */
    double share;    /* its share of the rows */
    lt_scope *scope; /* scopes of its tensors that the program has left, linked by outer */
    lt_deferred_wgrad *weights; /* pending gradients of a split backward pass, or NULL */
} lt_micro_batch;

/* Events that a pipeline logs besides its actions: the arrival of a value that a forward pass
 * needs, or of a gradient that a backward pass needs. */
enum { LT_PIPE_INPUT = LT_DONE + 1, LT_PIPE_GRAD };

struct lt_pipeline {
    lt_ctx *ctx;
    lt_group *group; /* group of the job; borrowed, like mail */
    lt_group *peers; /* the replicas of this stage; NULL if there is only one */
    lt_mail *mail;
    lt_transfer *transfer; /* NULL without an accelerator */
    lt_pipeline_config config;
    int replica, replicas;
    lt_schedule schedule;
    lt_stage_state state;
    int micro, n_micro; /* see lt_pipeline_set_micro_batch(), also share */
    double share;
    bool began;                   /* a forward pass of this batch is complete */
    bool stepped;                 /* an optimizer step of this micro-batch was deferred */
    bool ended;                   /* this micro-batch has ended, and the next one has not begun */
    bool stepping;                /* an optimizer step runs the remaining passes */
    int64_t begun_step;           /* the last step whose first forward pass is complete */
    int64_t forwards;             /* number of forward passes that are complete, of all steps */
    lt_micro_batch *first, **end; /* oldest first; the forward pass of the last one may run */
    lt_micro_batch *back;         /* micro-batch whose backward pass runs, or NULL */
    uint64_t lost;                /* stages that have failed or ended, as bits */
    int first_lost;               /* the first of them */
    /* (stages) for each stage: the values that have arrived; the numbers of values sent to it and
     * taken from it; and the number of values sent to it that it has not acknowledged yet */
    lt_messages *values;
    int64_t *sent, *taken, *unread;
    int *waits_for; /* (stages) 1 + the rank for which each stage waits; 0: no rank is known */
    uint64_t bytes; /* bytes of the messages sent */
    lt_pipeline_times times;
    /* The first error of a backward pass. That micro-batch stays incomplete, so all later passes
     * fail with this error. LT_OK: no error */
    lt_status failure;
    char failure_text[512];
    /* For tests; may be NULL. what: an action that is done; LT_WAIT when a wait begins; LT_DONE
     * when the number of micro-batches is known; or one of the events above. micro: the number of
     * the micro-batch in the step */
    void (*log)(void *ud, int what, int micro);
    void *log_ud;
};

static inline void lt__pipe_log(const lt_pipeline *p, int what, int micro)
{
    if (p->log)
        p->log(p->log_ud, what, micro);
}

/* The stage that sends x. Stage 0 is responsible for tensors that all ranks have. */
static inline int lt__sender_of(const lt_tensor *x)
{
    int stage = lt_stage_of(x);
    return stage == LT_NO_STAGE ? 0 : stage;
}

/* The rank of a stage, for this replica. */
static inline int lt__stage_rank(const lt_pipeline *p, int stage)
{
    return stage * p->replicas + p->replica;
}

/* micro.c */
lt_micro_batch *lt__micro_last(const lt_pipeline *p); /* the newest one, or NULL; borrowed */
/* The newest one, or a new one if the forward pass of the newest is complete. Borrowed. NULL with
 * LT_ENOMEM. */
lt_micro_batch *lt__micro_current(lt_pipeline *p);
void lt__micro_drop_first(lt_pipeline *p); /* frees the oldest one */
/* When the outermost scope ends: frees the newest one if it began in the scope and its forward pass
 * is not complete, since no backward can follow. */
void lt__micro_drop_current(lt_pipeline *p);
LT_NODISCARD lt_status
lt__pipe_check(const lt_pipeline *p); /* the first error of a backward pass */
/* Stores status if it is the first error of a backward pass. Returns status. */
LT_NODISCARD lt_status lt__pipe_store_error(lt_pipeline *p, lt_status status);
/* Completes the gradients of the weights of the oldest one, which lacks only these gradients. */
LT_NODISCARD lt_status lt__micro_run_weights(lt_pipeline *p);
/* The same for all, layer by layer, so that the replicas can sum the gradients of the last layers
 * while this stage computes the gradients of earlier layers. */
LT_NODISCARD lt_status lt__micro_run_all_weights(lt_pipeline *p);
/* After a failure: discards the pending gradients. */
void lt__micro_discard_weights(lt_pipeline *p);

/* messages.c: the functions of lt_stage_hooks, with the pipeline as ud. */
lt_status lt__pipe_send(void *ud, lt_tensor *x, int to, bool requires_grad, bool returns);
lt_status lt__pipe_receive(void *ud, lt_tensor *x, int from, int returns_to);
lt_status lt__pipe_expect(void *ud, lt_tensor *x, int from);
lt_status lt__pipe_return_grad(void *ud, lt_tensor *x, lt_tensor *grad);
/* Tells the senders of a micro-batch's values that these have no gradient, except for values whose
 * gradient was returned. */
LT_NODISCARD lt_status lt__pipe_return_nothing(lt_pipeline *p, lt_micro_batch *q);
/* Waits for a message and stores it. stages: the stages that must send one, as bits. */
LT_NODISCARD lt_status lt__pipe_wait(lt_pipeline *p, uint64_t stages);
/* Stores the messages that have arrived. */
LT_NODISCARD lt_status lt__pipe_poll(lt_pipeline *p);
/* Waits for the accelerator, if there is one, and then stores the messages that have arrived. The
 * host is ahead of an accelerator, so polling alone would be too early. */
LT_NODISCARD lt_status lt__pipe_catch_up(lt_pipeline *p);
/* A tensor with the elements of a message. New. */
lt_tensor *lt__pipe_unpack(lt_pipeline *p, const lt_tensor *like, const lt_message *m);

#endif
