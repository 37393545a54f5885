/* micro.c - the micro-batches that a stage of a pipeline has in flight. */
#include <stdio.h>
#include <stdlib.h>

#include "dist/pipeline/internal.h"

lt_micro_batch *lt__micro_last(const lt_pipeline *p)
{
    lt_micro_batch *last = NULL;
    for (lt_micro_batch *q = p->first; q; q = q->next)
        last = q;
    return last;
}

lt_micro_batch *lt__micro_current(lt_pipeline *p)
{
    lt_micro_batch *last = lt__micro_last(p);
    if (last && !last->forward_done)
        return last;
    lt_micro_batch *fresh = lt__calloc(1, sizeof *fresh, "for a micro-batch");
    if (!fresh)
        return NULL;
    fresh->in_scope = p->ctx->scope != NULL;
    *p->end = fresh;
    p->end = &fresh->next;
    return fresh;
}

static void free_micro(lt_pipeline *p, lt_micro_batch *q)
{
    lt_deferred_wgrad_free(q->weights);
    for (int i = 0; i < q->n_sent; i++) {
        lt_release(q->sent[i].x);
        lt__message_free(q->sent[i].grad);
    }
    for (int i = 0; i < q->n_received; i++)
        lt_release(q->received[i].x);
    lt_release(q->loss);
    lt_release(q->grad);
    for (lt_scope *scope = q->scope, *outer; scope; scope = outer) {
        outer = scope->outer;
        lt__scope_end(p->ctx, scope);
    }
    free(q->sent);
    free(q->received);
    free(q);
}

void lt__micro_drop_first(lt_pipeline *p)
{
    lt_micro_batch *q = p->first;
    p->first = q->next;
    if (!p->first)
        p->end = &p->first;
    free_micro(p, q);
}

void lt__micro_drop_current(lt_pipeline *p)
{
    lt_micro_batch **link = &p->first;
    while (*link && (*link)->next)
        link = &(*link)->next;
    lt_micro_batch *last = *link;
    if (!last || last->forward_done || !last->in_scope)
        return;
    *link = NULL;
    p->end = link;
    free_micro(p, last);
}

lt_status lt__pipe_check(const lt_pipeline *p)
{
    return p->failure == LT_OK ? LT_OK : lt_fail(p->failure, "%s", p->failure_text);
}

lt_status lt__pipe_store_error(lt_pipeline *p, lt_status status)
{
    if (status != LT_OK && p->failure == LT_OK) {
        p->failure = status;
        snprintf(p->failure_text, sizeof p->failure_text, "%s", lt_errmsg());
    }
    return status;
}

void lt__micro_discard_weights(lt_pipeline *p)
{
    for (lt_micro_batch *q = p->first; q; q = q->next) {
        lt_deferred_wgrad_free(q->weights);
        q->weights = NULL;
    }
}

/* Counts the pending gradients of the oldest micro-batch as complete. */
static void end_weights(lt_pipeline *p)
{
    lt__pipe_log(p, LT_WEIGHTS, p->state.weights);
    p->state.weights++;
    lt__micro_drop_first(p);
}

static void note_time(lt_pipeline *p, double began)
{
    double seconds = lt__seconds() - began;
    p->times.weights += seconds;
    lt_trace(p->ctx, LT_TRACK_STEP, "gradients of weights", began, seconds);
}

lt_status lt__micro_run_weights(lt_pipeline *p)
{
    LT_TRY(lt__pipe_check(p));
    double began = lt__seconds();
    lt_deferred_wgrad *weights = p->first->weights;
    p->first->weights = NULL;
    LT_TRY(lt__pipe_store_error(p, lt_backward_weights(weights)));
    end_weights(p);
    note_time(p, began);
    return LT_OK;
}

lt_status lt__micro_run_all_weights(lt_pipeline *p)
{
    LT_TRY(lt__pipe_check(p));
    double began = lt__seconds();
    LT_TRY(lt__pipe_store_error(p, lt_backward_weights_all(p->ctx)));
    while (p->state.weights < p->state.backward)
        end_weights(p);
    note_time(p, began);
    return LT_OK;
}
