/* pipeline.c - runs the stage of a pipeline that this rank has; see dist/pipeline.h. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "dist/fault.h"
#include "dist/pipeline/internal.h"

/* ==== Backward passes ========================================================================= */

/* The stages whose gradients a micro-batch waits for, as bits. */
static uint64_t awaited(const lt_micro_batch *q)
{
    uint64_t stages = 0;
    for (int i = 0; i < q->n_sent; i++)
        stages |= (uint64_t)!q->sent[i].arrived << q->sent[i].to;
    return stages;
}

static bool has_all_grads(const lt_micro_batch *q) { return q->forward_done && awaited(q) == 0; }

/* The oldest micro-batch whose backward pass has not begun. */
static lt_micro_batch *next_back(const lt_pipeline *p)
{
    lt_micro_batch *q = p->first;
    for (int i = p->state.weights; i < p->state.backward; i++)
        q = q->next;
    return q;
}

/* Fills the roots of a micro-batch: the loss, and the values that were sent, the last ones first.
 * In one process, too, gradients of later uses are added first. *n: the number of roots. */
static lt_status fill_roots(lt_pipeline *p, const lt_micro_batch *q, lt_tensor **roots,
                            lt_tensor **grads, int *n)
{
    *n = 0;
    if (q->loss) {
        roots[*n] = q->loss;
        grads[(*n)++] = lt_retain(q->grad);
    }
    for (int i = q->n_sent - 1; i >= 0; i--) {
        if (!q->sent[i].grad)
            continue;
        roots[*n] = q->sent[i].x;
        if (!(grads[*n] = lt__pipe_unpack(p, q->sent[i].x, q->sent[i].grad)))
            return lt_errcode();
        (*n)++;
    }
    return LT_OK;
}

static lt_status run_roots(lt_pipeline *p, lt_micro_batch *q, lt_tensor **roots, lt_tensor **grads)
{
    int n;
    bool split = p->schedule.kind == LT_ZERO_BUBBLE;
    lt_status status = fill_roots(p, q, roots, grads, &n);
    if (status == LT_OK)
        status = lt_backward_from(p->ctx, roots, grads, n, split ? &q->weights : NULL);
    for (int i = 0; i < n; i++)
        lt_release(grads[i]);
    return status;
}

/* On some CPUs, whether a backward pass in half precision can be split depends on its rows. A whole
 * pass must not run before the second halves of earlier passes. */
static lt_status complete_others(lt_pipeline *p, const lt_micro_batch *q)
{
    while (q->in_half && p->state.weights < p->state.backward && p->first->share != q->share)
        LT_TRY(lt__micro_run_weights(p));
    return LT_OK;
}

static lt_status run_backward(lt_pipeline *p)
{
    lt_micro_batch *q = next_back(p);
    LT_TRY(complete_others(p, q));
    double began = lt__seconds();
    lt_tensor **roots;
    LT_TRY(LT_CALLOC(roots, 2 * ((size_t)q->n_sent + 1), "for a micro-batch"));
    p->back = q;
    lt_status status = run_roots(p, q, roots, roots + q->n_sent + 1);
    if (status == LT_OK)
        status = lt__pipe_return_nothing(p, q);
    p->back = NULL;
    free(roots);
    LT_TRY(status);
    lt__pipe_log(p, LT_BACKWARD, p->state.backward);
    p->state.backward++;
    if (p->schedule.kind != LT_ZERO_BUBBLE) {
        p->state.weights++;
        lt__micro_drop_first(p);
    }
    p->times.backward += lt__seconds() - began;
    lt_trace(p->ctx, LT_TRACK_STEP, "backward pass", began, lt__seconds() - began);
    return LT_OK;
}

/* The next action. The program itself waits for the inputs of a forward pass. */
static lt_action next_action(lt_pipeline *p)
{
    lt_stage_state *s = &p->state;
    s->inputs = s->forward + 1;
    s->grads = s->backward + (s->forward > s->backward && has_all_grads(next_back(p)));
    return lt__schedule_next(&p->schedule, s);
}

/* Whether more micro-batches of the batch follow. */
static bool more_follow(const lt_pipeline *p) { return p->micro + 1 < p->n_micro; }

/* Chooses the next action. This stage computes gradients of weights only while it waits for a
 * message. With an accelerator, it waits only when the accelerator has no more work. */
static lt_status choose(lt_pipeline *p, lt_action *action)
{
    LT_TRY(lt__pipe_poll(p));
    *action = next_action(p);
    if (*action != LT_WEIGHTS || !p->transfer || p->state.backward == p->state.forward)
        return LT_OK;
    LT_TRY(lt__pipe_catch_up(p));
    *action = next_action(p);
    return LT_OK;
}

/* Whether the backward pass of micro-batch k is the last one before an optimizer step, so that the
 * exchange of the replicas begins with it. */
static bool is_last_pass(const lt_pipeline *p, int k)
{
    return p->peers && p->stepping && k + 1 == p->state.micro;
}

/* Whether the next backward pass must wait for an optimizer step: it may be the last one of the
 * step, but only the optimizer step knows that no other follows. */
static bool awaits_step(const lt_pipeline *p)
{
    bool is_newest = p->state.backward + 1 == p->state.forward;
    return p->peers && is_newest && !more_follow(p) && p->state.micro == INT_MAX;
}

/* Completes gradients of weights: of all micro-batches if no backward pass follows. */
static lt_status run_weights(lt_pipeline *p)
{
    return is_last_pass(p, p->state.backward - 1) ? lt__micro_run_all_weights(p)
                                                  : lt__micro_run_weights(p);
}

/* Runs passes until the next forward pass is due, or all are done. */
static lt_status run_due(lt_pipeline *p)
{
    lt_action action;
    LT_TRY(lt__pipe_check(p));
    for (;;) {
        LT_TRY(choose(p, &action));
        if (action == LT_BACKWARD && awaits_step(p))
            return LT_OK;
        switch (action) {
        case LT_BACKWARD: LT_TRY(lt__pipe_store_error(p, run_backward(p))); break;
        case LT_WEIGHTS: LT_TRY(run_weights(p)); break;
        case LT_WAIT: LT_TRY(lt__pipe_wait(p, awaited(next_back(p)))); break;
        default: return LT_OK;
        }
    }
}

lt_status lt_pipeline_drain(lt_pipeline *p)
{
    if (p->state.forward == 0)
        return LT_OK;
    double began = lt__seconds();
    p->state.micro = p->state.forward;
    lt__pipe_log(p, LT_DONE, p->state.micro);
    LT_TRY(run_due(p));
    p->state = (lt_stage_state){.micro = INT_MAX};
    p->times.drained += lt__seconds() - began;
    return LT_OK;
}

int lt_pipeline_forwards(const lt_pipeline *p) { return p->state.forward; }

/* ==== The functions of lt_stage_hooks and lt_step_part ======================================== */

static int stage_of(void *ud, const char *name, const lt_tensor *x)
{
    const lt_pipeline *p = ud;
    return p->config.stage_of(p->config.ud, name, x);
}

/* The loss times the share of its micro-batch. New. NULL with LT_ENOMEM. */
static lt_tensor *weighted(const lt_pipeline *p, lt_tensor *loss)
{
    if (p->share == 1)
        return lt_retain(loss);
    lt_tensor *share =
        lt__tensor_new(p->ctx, loss->storage->device, (lt_dtype)loss->dtype, 0, NULL, false);
    lt_tensor *scaled = NULL;
    if (share && lt_fill(share, p->share) == LT_OK)
        scaled = lt_run(p->ctx, "mul", NULL, loss, share, NULL);
    lt_release(share);
    return scaled;
}

/* Stores the loss of a micro-batch, if this stage has it, and its gradient. */
static lt_status store_loss(const lt_pipeline *p, lt_micro_batch *q, lt_tensor *loss,
                            lt_tensor *grad)
{
    if (lt_is_meta(loss))
        return LT_OK;
    lt_tensor *scaled = weighted(p, loss);
    if (!scaled || !(q->loss = lt__tensor_with_history(scaled))) {
        lt_release(scaled);
        return lt_errcode();
    }
    lt_release(scaled);
    q->grad = lt_retain(grad);
    return LT_OK;
}

static bool is_half(const lt_tensor *x) { return x->dtype == LT_F16 || x->dtype == LT_BF16; }

/* Whether a micro-batch is computed in half precision: under a cast policy, or with such values. */
static bool is_in_half(const lt_pipeline *p, const lt_micro_batch *q)
{
    void *ud;
    bool is = lt_get_cast(p->ctx, &ud) != NULL;
    for (int i = 0; i < q->n_sent; i++)
        is |= is_half(q->sent[i].x);
    for (int i = 0; i < q->n_received; i++)
        is |= is_half(q->received[i].x);
    return is;
}

/* LT_EUSAGE if a backward pass would add to gradients that an optimizer step should have used. */
static lt_status check_place(const lt_pipeline *p)
{
    if (p->ended)
        return lt_fail(LT_EUSAGE,
                       "in a pipeline, this backward pass runs between two micro-batches of a "
                       "batch; use --parallel with micro=1");
    if (p->stepped)
        return lt_fail(LT_EUSAGE,
                       "in a pipeline, all backward passes of a micro-batch must run before its "
                       "optimizer steps, but this one follows a step; use --parallel with micro=1");
    return LT_OK;
}

/* Ends the forward pass of a micro-batch, and runs the passes that are due. */
static lt_status end_forward(void *ud, lt_tensor *loss, lt_tensor *grad)
{
    lt_pipeline *p = ud;
    LT_TRY(check_place(p));
    if (p->begun_step != p->ctx->step + 1) {
        p->begun_step = p->ctx->step + 1;
        LT_TRY(lt__fault_trigger(p->ctx, lt_group_rank(p->group), p->begun_step));
    }
    lt_micro_batch *q = lt__micro_current(p);
    if (!q)
        return LT_ENOMEM;
    LT_TRY(store_loss(p, q, loss, grad));
    q->in_half = is_in_half(p, q);
    q->share = p->share;
    q->forward_done = true;
    p->began = true;
    p->forwards++;
    lt__pipe_log(p, LT_FORWARD, p->state.forward);
    p->state.forward++;
    return run_due(p);
}

static void synchronize(void *ud)
{
    lt_status status = lt_pipeline_drain(ud);
    (void)status; /* the optimizer step fails with the same error */
}

static lt_status prepare(void *ud, lt_step_status *step_status)
{
    lt_pipeline *p = ud;
    p->stepped = more_follow(p);
    if (p->stepped) {
        *step_status = LT_ACCUMULATING;
        return LT_OK;
    }
    p->stepping = true;
    lt_status status = lt__pipe_store_error(p, lt_pipeline_drain(p));
    p->stepping = false;
    if (status != LT_OK) /* the other replicas must not wait for them */
        lt__micro_discard_weights(p);
    return status;
}

static bool is_last(void *ud)
{
    const lt_pipeline *p = ud;
    return is_last_pass(p, p->state.backward);
}

/* Each replica has the same numbers, so only the first one contributes. */
static lt_status sum(void *ud, double *numbers, int64_t n)
{
    lt_pipeline *p = ud;
    lt_sum all = {.what = "the numbers of the pipeline's stages",
                  .data = numbers,
                  .count = n,
                  .dtype = LT_F64,
                  .wire = LT_F64,
                  .scale = 1};
    if (p->replica > 0)
        memset(numbers, 0, (size_t)n * sizeof *numbers);
    return lt_group_allreduce(p->group, &all);
}

/* ==== Other functions ========================================================================= */

int lt_pipeline_stage(const lt_pipeline *p) { return p->schedule.stage; }
int lt_pipeline_stages(const lt_pipeline *p) { return p->schedule.stages; }
int lt_pipeline_replica(const lt_pipeline *p) { return p->replica; }
int lt_pipeline_replicas(const lt_pipeline *p) { return p->replicas; }
lt_group *lt_pipeline_group(const lt_pipeline *p) { return p->peers; }

bool lt_pipeline_owns(const lt_pipeline *p, const lt_tensor *x)
{
    return lt__sender_of(x) == p->schedule.stage;
}

static void enter(lt_pipeline *p, int i, int n, double share)
{
    p->micro = i;
    p->n_micro = n;
    p->share = share;
    p->began &= i > 0;
    p->stepped = p->ended = false;
}

lt_status lt_pipeline_set_micro_batch(lt_pipeline *p, int i, int n, double share)
{
    if (n < 1 || i < 0 || i >= n || !(share >= 0 && share <= 1))
        return lt_fail(
            LT_EINVAL,
            "lt_pipeline_set_micro_batch: n must be at least 1, i from 0 to n - 1 and share from 0 "
            "to 1, but n is %d, i is %d and share is %g",
            n, i, share);
    if (i == 0 && p->began && more_follow(p))
        return lt_fail(LT_EUSAGE,
                       "in a pipeline, a batch begins after %d of %d micro-batches of the one "
                       "before; do not leave a loop over batches within a batch",
                       p->micro + 1, p->n_micro);
    enter(p, i, n, share);
    return LT_OK;
}

void lt_pipeline_end_micro_batch(lt_pipeline *p)
{
    if (more_follow(p))
        p->ended = true;
    else
        enter(p, 0, 1, 1);
}

void lt_pipeline_pop_scope(lt_pipeline *p)
{
    if (p->ctx->scope && !p->ctx->scope->outer)
        lt__micro_drop_current(p);
    lt_micro_batch *last = lt__micro_last(p);
    if (!last) {
        lt_scope_pop(p->ctx);
        return;
    }
    lt_scope *scope = lt__scope_take(p->ctx);
    if (scope) {
        scope->outer = last->scope;
        last->scope = scope;
    }
}

lt_pipeline_times lt_pipeline_take_times(lt_pipeline *p)
{
    lt_pipeline_times times = p->times;
    p->times = (lt_pipeline_times){0};
    return times;
}

uint64_t lt_pipeline_bytes(const lt_pipeline *p)
{
    return p->bytes + (p->peers ? lt_group_bytes(p->peers) : 0);
}

static lt_status set_parts(lt_ctx *ctx, const lt_stage_hooks *stages, const lt_step_part *schedule)
{
    LT_TRY(lt_set_stage_hooks(ctx, stages));
    return lt_set_part(ctx, LT_PART_SCHEDULE, schedule);
}

void lt_pipeline_free(lt_pipeline *p)
{
    if (!p)
        return;
    while (p->first)
        lt__micro_drop_first(p);
    for (int i = 0; p->values && i < p->schedule.stages; i++)
        lt__messages_free(&p->values[i]);
    lt_status status = set_parts(p->ctx, NULL, NULL);
    (void)status; /* it fails only within backward */
    lt__transfer_close(p->transfer);
    lt_group_close(p->peers);
    lt__ctx_release(p->ctx);
    free(p->values);
    free(p->sent);
    free(p->taken);
    free(p->unread);
    free(p->waits_for);
    free(p);
}

static lt_status open_pipeline(lt_pipeline *p)
{
    int n = p->schedule.stages;
    LT_TRY(LT_CALLOC(p->values, n, "for a pipeline"));
    LT_TRY(LT_CALLOC(p->sent, n, "for a pipeline"));
    LT_TRY(LT_CALLOC(p->taken, n, "for a pipeline"));
    LT_TRY(LT_CALLOC(p->unread, n, "for a pipeline"));
    LT_TRY(LT_CALLOC(p->waits_for, n, "for a pipeline"));
    if (!(p->mail = lt__group_mail(p->group)))
        return lt_errcode();
    lt_device *accelerator = p->ctx->devices[1];
    if (accelerator && !(p->transfer = lt__transfer_open(accelerator, p->mail)))
        return lt_errcode();
    /* A rank drops messages of other pipelines, so all ranks must have left an earlier one. */
    LT_TRY(p->replicas > 1 ? lt__group_split(p->group, p->schedule.stage, &p->peers)
                           : lt_group_barrier(p->group, "a pipeline"));
    lt__mail_begin_run(p->mail);
    lt__fault_add_latency(p->ctx, p->mail);
    return set_parts(p->ctx,
                     &(lt_stage_hooks){.ud = p,
                                       .own = p->schedule.stage,
                                       .stages = p->schedule.stages,
                                       .stage_of = stage_of,
                                       .send = lt__pipe_send,
                                       .receive = lt__pipe_receive,
                                       .return_grad = lt__pipe_return_grad,
                                       .expect = lt__pipe_expect},
                     &(lt_step_part){.ud = p,
                                     .backward = end_forward,
                                     .is_last = is_last,
                                     .synchronize = synchronize,
                                     .prepare = prepare,
                                     .sum = sum});
}

/* LT_EINVAL if the schedule is invalid; LT_EUSAGE if the ranks cannot be divided into stages. */
static lt_status check_config(int ranks, const lt_pipeline_config *config)
{
    enum { MOST_LAG = 1 << 20 };
    int stages = config->stages;
    if (config->kind < 0 || config->kind >= LT_SCHEDULE_KINDS)
        return lt_fail(LT_EINVAL, "the kind of a pipeline's schedule is 0 to %d, not %d",
                       LT_SCHEDULE_KINDS - 1, (int)config->kind);
    if (config->lag < 0 || config->lag > MOST_LAG)
        return lt_fail(LT_EINVAL, "the lag of a pipeline is 0 to %d, not %d", MOST_LAG,
                       config->lag);
    if (stages < 1 || stages > LT_MAX_STAGES)
        return lt_fail(LT_EUSAGE, "a pipeline has 1 to %d stages, not %d", LT_MAX_STAGES, stages);
    if (ranks % stages != 0)
        return lt_fail(LT_EUSAGE,
                       "a pipeline of %d stages requires a multiple of %d ranks, but there are %d",
                       stages, stages, ranks);
    return LT_OK;
}

lt_pipeline *lt_pipeline_new(lt_ctx *ctx, lt_group *group, const lt_pipeline_config *config)
{
    LT_NEED_CTX(ctx, NULL);
    int ranks = lt_group_size(group), rank = lt_group_rank(group);
    if (check_config(ranks, config) != LT_OK || lt__fault_check(ctx, ranks) != LT_OK ||
        lt_check_no_part(ctx, LT_PART_SCHEDULE, NULL) != LT_OK)
        return NULL;
    lt_pipeline *p = lt__calloc(1, sizeof *p, "for a pipeline");
    if (!p)
        return NULL;
    p->ctx = lt__ctx_retain(ctx);
    p->group = group;
    p->config = *config;
    p->replicas = ranks / config->stages;
    p->replica = rank % p->replicas;
    p->end = &p->first;
    p->state.micro = INT_MAX;
    enter(p, 0, 1, 1);
    p->schedule = (lt_schedule){.kind = config->kind,
                                .stages = config->stages,
                                .stage = rank / p->replicas,
                                .lag = config->lag};
    if (open_pipeline(p) == LT_OK)
        return p;
    lt_pipeline_free(p);
    return NULL;
}
