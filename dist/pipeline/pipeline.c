/* pipeline.c - runs the stage of a pipeline that this rank has; see pipeline.h. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/group.h"
#include "dist/mail/mail.h"
#include "dist/pipeline/pipeline.h"

enum { VALUES, GRAD };                  /* kinds of messages */
enum { NUMBER, TRACKED, RUN };          /* numbers of a message */
static const double LOOK_SECONDS = 0.2; /* until the next look whether the job has failed */

typedef struct sent { /* values that were sent, and whose gradient returns */
    lt_tensor *x;     /* with its history */
    int to;
    int64_t number;
    bool arrived;     /* the gradient, or that there is none */
    lt_message *grad; /* NULL if there is none */
} sent;

typedef struct received { /* values that have arrived, and whose gradient is returned */
    lt_tensor *x;
    int from;
    int64_t number;
    bool returned;
} received;

typedef struct pass { /* a micro-batch, from its forward pass until its backward pass is done */
    struct pass *next;
    sent *sent;
    received *received;
    int n_sent, n_received, sent_capacity, received_capacity;
    lt_tensor *loss, *grad; /* if this stage has the loss; grad: its gradient, or NULL */
    bool noted;             /* its forward pass is complete */
    lt_scope *scope;        /* its tensors; NULL while the program is in the scope */
    lt_weights *weights;    /* if its backward pass is split, and half done */
} pass;

struct lt_pipeline {
    lt_ctx *ctx;
    lt_group *group; /* borrowed, like mail */
    lt_mail *mail;
    int64_t run;
    lt_pipeline_config config;
    lt_schedule schedule;
    lt_stage_state state;
    pass *first, **end;    /* oldest first; the last one may not be noted */
    pass *back;            /* whose backward pass runs; or NULL */
    uint64_t lost;         /* stages that have failed or ended, as bits */
    lt_message **values;   /* (ranks) lists of values that have arrived, oldest first */
    int64_t *sent, *taken; /* (ranks) numbers of values sent to, and received from, each rank */
    lt_pipeline_times times;
};

/* ==== Passes ================================================================================== */

/* The newest pass, or NULL. */
static pass *last_pass(const lt_pipeline *p)
{
    pass *last = NULL;
    for (pass *q = p->first; q; q = q->next)
        last = q;
    return last;
}

/* The newest pass; a new one if that is noted. Borrowed. NULL with LT_ENOMEM. */
static pass *current(lt_pipeline *p)
{
    pass *last = last_pass(p);
    if (last && !last->noted)
        return last;
    pass *fresh = calloc(1, sizeof *fresh);
    if (!fresh) {
        lt_fail(LT_ENOMEM, "out of memory for a micro-batch");
        return NULL;
    }
    *p->end = fresh;
    p->end = &fresh->next;
    return fresh;
}

static void free_pass(lt_pipeline *p, pass *q)
{
    lt_weights_free(q->weights);
    for (int i = 0; i < q->n_sent; i++) {
        lt_release(q->sent[i].x);
        lt__message_free(q->sent[i].grad);
    }
    for (int i = 0; i < q->n_received; i++)
        lt_release(q->received[i].x);
    lt_release(q->loss);
    lt_release(q->grad);
    lt__scope_end(p->ctx, q->scope);
    free(q->sent);
    free(q->received);
    free(q);
}

static void drop_first(lt_pipeline *p)
{
    pass *q = p->first;
    p->first = q->next;
    if (!p->first)
        p->end = &p->first;
    free_pass(p, q);
}

/* Makes room for one more item of `size` bytes in a list. */
static lt_status grow(void **list, int n, int *capacity, size_t size)
{
    if (n < *capacity)
        return LT_OK;
    int more = *capacity > 0 ? 2 * *capacity : 4;
    void *larger = realloc(*list, (size_t)more * size);
    if (!larger)
        return lt_fail(LT_ENOMEM, "out of memory for a micro-batch");
    *list = larger;
    *capacity = more;
    return LT_OK;
}

/* ==== Messages ================================================================================ */

static size_t bytes_of(const lt_tensor *x)
{
    return (size_t)x->count * lt_dtype_bytes((lt_dtype)x->dtype);
}

/* Sends the elements of x, or none if it is NULL. */
static lt_status send(lt_pipeline *p, int to, int kind, int64_t number, bool tracked, lt_tensor *x)
{
    lt_message *m = lt__message_new(kind, x ? bytes_of(x) : 0);
    lt_status status = m ? LT_OK : LT_ENOMEM;
    if (m && x)
        status = lt_read(x, m->data);
    if (status != LT_OK) {
        lt__message_free(m);
        return status;
    }
    m->number[NUMBER] = number;
    m->number[TRACKED] = tracked;
    m->number[RUN] = p->run;
    p->times.bytes += (int64_t)m->bytes;
    lt__mail_send(p->mail, to, m);
    return LT_OK;
}

static lt_status desync(const lt_pipeline *p, int other, const char *what)
{
    return lt_fail(LT_EDESYNC, "stages %d and %d of the pipeline run different programs: %s",
                   p->schedule.stage, other, what);
}

/* The values to which a gradient belongs, or NULL. */
static sent *find_sent(const lt_pipeline *p, const lt_message *grad)
{
    for (pass *q = p->first; q; q = q->next)
        for (int i = 0; i < q->n_sent; i++) {
            sent *s = &q->sent[i];
            if (s->to == grad->from && s->number == grad->number[NUMBER] && !s->arrived)
                return s;
        }
    return NULL;
}

/* Stores a gradient that has arrived, m, which is taken. Without bytes, there is none. */
static lt_status take_grad(lt_pipeline *p, lt_message *m)
{
    int from = m->from;
    sent *s = find_sent(p, m);
    bool fits = s && (m->bytes == 0 || m->bytes == bytes_of(s->x));
    if (fits)
        s->arrived = true;
    if (fits && m->bytes == bytes_of(s->x)) {
        s->grad = m;
        return LT_OK;
    }
    lt__message_free(m);
    return fits ? LT_OK : desync(p, from, "a gradient belongs to no value that was sent");
}

/* Stores a message, taken. */
static lt_status store(lt_pipeline *p, lt_message *m)
{
    bool is_lost = m->kind == LT_MAIL_LOST;
    p->lost |= (uint64_t)is_lost << m->from;
    if (is_lost || m->number[RUN] != p->run) {
        lt__message_free(m);
        return LT_OK;
    }
    if (m->kind == GRAD)
        return take_grad(p, m);
    lt_message **end = &p->values[m->from];
    while (*end)
        end = &(*end)->next;
    m->next = NULL;
    *end = m;
    return LT_OK;
}

/* LT_EPEER if another rank has failed, or if one of these stages has ended. */
static lt_status check_job(const lt_pipeline *p, uint64_t stages)
{
    char text[512];
    int rank;
    lt_status code;
    if (lt_group_failure(p->group, &rank, &code, text, sizeof text) && rank != p->schedule.stage)
        return lt_fail(LT_EPEER, "stage %d of the pipeline has failed: %s", rank, text);
    if (p->lost & stages)
        return lt_fail(LT_EPEER, "stage %d of the pipeline has ended, but stage %d waits for it",
                       __builtin_ctzll(p->lost & stages), p->schedule.stage);
    return LT_OK;
}

/* Waits for a message and stores it. stages: those that must send one, as bits. */
static lt_status wait(lt_pipeline *p, uint64_t stages)
{
    double began = lt__seconds(), limit = lt__group_timeout(p->group);
    lt_message *m = lt__mail_take(p->mail, 0);
    while (!m) {
        LT_TRY(check_job(p, stages));
        if (lt__seconds() - began > limit)
            return lt_fail(LT_EPEER, "stage %d of the pipeline got no message for %g s",
                           p->schedule.stage, limit);
        m = lt__mail_take(p->mail, LOOK_SECONDS);
    }
    p->times.waited += lt__seconds() - began;
    return store(p, m);
}

/* Stores the messages that have arrived. */
static lt_status look(lt_pipeline *p)
{
    for (lt_message *m; (m = lt__mail_take(p->mail, 0));)
        LT_TRY(store(p, m));
    return LT_OK;
}

/* ==== Backward passes ========================================================================= */

static bool has_all_grads(const pass *q)
{
    bool all = q->noted;
    for (int i = 0; i < q->n_sent; i++)
        all &= q->sent[i].arrived;
    return all;
}

/* The stages whose gradients a pass waits for, as bits. */
static uint64_t awaited(const pass *q)
{
    uint64_t stages = 0;
    for (int i = 0; i < q->n_sent; i++)
        stages |= (uint64_t)!q->sent[i].arrived << q->sent[i].to;
    return stages;
}

/* The first pass whose backward pass has not begun. */
static pass *next_back(const lt_pipeline *p)
{
    pass *q = p->first;
    for (int i = p->state.weights; i < p->state.backward; i++)
        q = q->next;
    return q;
}

/* A tensor with the elements of a message. New. */
static lt_tensor *unpack(const lt_tensor *like, const lt_message *m)
{
    lt_tensor *x = lt__tensor_new(like->ctx, like->storage->device, (lt_dtype)like->dtype,
                                  like->ndim, like->dims, true);
    if (x && lt_write(x, m->data) == LT_OK)
        return x;
    lt_release(x);
    return NULL;
}

/* Fills the roots of a pass: the loss, and the values that were sent, the last ones first. In one
 * process, too, gradients of later uses are added first. *n: their number. */
static lt_status fill_roots(const pass *q, lt_tensor **roots, lt_tensor **grads, int *n)
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
        if (!(grads[*n] = unpack(q->sent[i].x, q->sent[i].grad)))
            return lt_errcode();
        (*n)++;
    }
    return LT_OK;
}

static lt_status run_roots(lt_pipeline *p, pass *q, lt_tensor **roots, lt_tensor **grads)
{
    int n;
    bool split = p->schedule.kind == LT_ZERO_BUBBLE;
    lt_status status = fill_roots(q, roots, grads, &n);
    if (status == LT_OK)
        status = lt_backward_from(p->ctx, roots, grads, n, split ? &q->weights : NULL);
    for (int i = 0; i < n; i++)
        lt_release(grads[i]);
    return status;
}

/* Tells the senders of values that these have no gradient. */
static lt_status return_nothing(lt_pipeline *p, pass *q)
{
    for (int i = 0; i < q->n_received; i++) {
        received *r = &q->received[i];
        if (!r->returned)
            LT_TRY(send(p, r->from, GRAD, r->number, false, NULL));
        r->returned = true;
    }
    return LT_OK;
}

static lt_status run_backward(lt_pipeline *p)
{
    double began = lt__seconds();
    pass *q = next_back(p);
    lt_tensor **roots = malloc(2 * ((size_t)q->n_sent + 1) * sizeof *roots);
    if (!roots)
        return lt_fail(LT_ENOMEM, "out of memory for a micro-batch");
    p->back = q;
    lt_status status = run_roots(p, q, roots, roots + q->n_sent + 1);
    if (status == LT_OK)
        status = return_nothing(p, q);
    p->back = NULL;
    free(roots);
    LT_TRY(status);
    p->state.backward++;
    if (p->schedule.kind != LT_ZERO_BUBBLE) {
        p->state.weights++;
        drop_first(p);
    }
    p->times.backward += lt__seconds() - began;
    return LT_OK;
}

static lt_status run_weights(lt_pipeline *p)
{
    double began = lt__seconds();
    lt_weights *weights = p->first->weights;
    p->first->weights = NULL;
    LT_TRY(lt_backward_weights(weights));
    p->state.weights++;
    drop_first(p);
    p->times.weights += lt__seconds() - began;
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

/* Runs passes until the next forward pass is due, or all are done. */
static lt_status run_due(lt_pipeline *p)
{
    for (;;) {
        LT_TRY(look(p));
        switch (next_action(p)) {
        case LT_BACKWARD: LT_TRY(run_backward(p)); break;
        case LT_WEIGHTS: LT_TRY(run_weights(p)); break;
        case LT_WAIT: LT_TRY(wait(p, awaited(next_back(p)))); break;
        default: return LT_OK;
        }
    }
}

/* ==== The functions of lt_stages ============================================================== */

static int stage_of(void *ud, const char *name, const lt_tensor *x)
{
    const lt_pipeline *p = ud;
    return p->config.stage_of(p->config.ud, name, x);
}

static lt_status send_values(void *ud, lt_tensor *x, int to, bool tracked)
{
    lt_pipeline *p = ud;
    if (tracked) {
        pass *q = current(p);
        if (!q)
            return LT_ENOMEM;
        LT_TRY(grow((void **)&q->sent, q->n_sent, &q->sent_capacity, sizeof *q->sent));
        sent s = {.x = lt__tensor_with_history(x), .to = to, .number = p->sent[to]};
        if (!s.x)
            return LT_ENOMEM;
        q->sent[q->n_sent++] = s;
    }
    return send(p, to, VALUES, p->sent[to]++, tracked, x);
}

/* Waits for values of a rank. Meanwhile, gradients of weights are computed. */
static lt_status wait_for_values(lt_pipeline *p, int from)
{
    LT_TRY(look(p));
    while (!p->values[from]) {
        bool has_weights = p->state.weights < p->state.backward;
        LT_TRY(has_weights ? run_weights(p) : wait(p, 1ull << from));
        LT_TRY(look(p));
    }
    return LT_OK;
}

static lt_status receive_values(void *ud, lt_tensor *x, int from, bool tracked)
{
    lt_pipeline *p = ud;
    LT_TRY(wait_for_values(p, from));
    lt_message *m = p->values[from];
    p->values[from] = m->next;
    int64_t number = p->taken[from]++;
    bool fits = m->number[NUMBER] == number && m->number[TRACKED] == tracked &&
                m->bytes == bytes_of(x);
    lt_status status = fits ? lt_write(x, m->data) : desync(p, from, "other values have arrived");
    lt__message_free(m);
    if (status != LT_OK || !tracked)
        return status;
    pass *q = current(p);
    if (!q)
        return LT_ENOMEM;
    LT_TRY(grow((void **)&q->received, q->n_received, &q->received_capacity, sizeof *q->received));
    q->received[q->n_received++] = (received){.x = lt_retain(x), .from = from, .number = number};
    return LT_OK;
}

static lt_status return_grad(void *ud, lt_tensor *x, lt_tensor *grad)
{
    lt_pipeline *p = ud;
    for (int i = 0; i < p->back->n_received; i++) {
        received *r = &p->back->received[i];
        if (r->x != x)
            continue;
        r->returned = true;
        return send(p, r->from, GRAD, r->number, false, grad);
    }
    return lt_fail(LT_EINVAL, "a gradient of another micro-batch is complete");
}

/* Notes that the forward pass of a micro-batch is complete. */
static lt_status note_backward(void *ud, lt_tensor *loss, lt_tensor *grad)
{
    lt_pipeline *p = ud;
    pass *q = current(p);
    if (!q)
        return LT_ENOMEM;
    if (!lt_is_remote(loss) && !(q->loss = lt__tensor_with_history(loss)))
        return LT_ENOMEM;
    q->grad = q->loss ? lt_retain(grad) : NULL;
    q->noted = true;
    p->state.forward++;
    return run_due(p);
}

/* ==== Other functions ========================================================================= */

void lt__pipeline_pop_scope(lt_pipeline *p)
{
    pass *last = last_pass(p);
    if (last && !last->scope)
        last->scope = lt__scope_take(p->ctx);
    else
        lt_scope_pop(p->ctx);
}

lt_status lt__pipeline_drain(lt_pipeline *p)
{
    p->state.micro = p->state.forward;
    LT_TRY(run_due(p));
    p->state = (lt_stage_state){.micro = INT_MAX};
    return LT_OK;
}

int lt__pipeline_forwards(const lt_pipeline *p) { return p->state.forward; }

lt_pipeline_times lt__pipeline_times(lt_pipeline *p)
{
    lt_pipeline_times times = p->times;
    p->times = (lt_pipeline_times){0};
    return times;
}

void lt__pipeline_free(lt_pipeline *p)
{
    if (!p)
        return;
    while (p->first)
        drop_first(p);
    for (int i = 0; p->values && i < p->schedule.stages; i++)
        for (lt_message *m; (m = p->values[i]);) {
            p->values[i] = m->next;
            lt__message_free(m);
        }
    lt_status status = lt_set_stages(p->ctx, NULL);
    (void)status; /* it fails only within backward */
    lt__ctx_release(p->ctx);
    free(p->values);
    free(p->sent);
    free(p->taken);
    free(p);
}

static lt_status open_pipeline(lt_pipeline *p)
{
    size_t n = (size_t)p->schedule.stages;
    if (n > LT_MAX_STAGES)
        return lt_fail(LT_EUSAGE, "a pipeline has at most %d stages, but there are %zu ranks",
                       LT_MAX_STAGES, n);
    p->values = calloc(n, sizeof *p->values);
    p->sent = calloc(n, sizeof *p->sent);
    p->taken = calloc(n, sizeof *p->taken);
    if (!p->values || !p->sent || !p->taken)
        return lt_fail(LT_ENOMEM, "out of memory for a pipeline");
    if (!(p->mail = lt__group_mail(p->group)))
        return lt_errcode();
    p->run = lt__mail_next_run(p->mail);
    return lt_set_stages(p->ctx, &(lt_stages){.ud = p,
                                              .own = p->schedule.stage,
                                              .stage_of = stage_of,
                                              .send = send_values,
                                              .receive = receive_values,
                                              .return_grad = return_grad,
                                              .backward = note_backward});
}

lt_pipeline *lt__pipeline_new(lt_ctx *ctx, const lt_pipeline_config *config)
{
    lt_pipeline *p = calloc(1, sizeof *p);
    if (!p) {
        lt_fail(LT_ENOMEM, "out of memory for a pipeline");
        return NULL;
    }
    p->ctx = lt__ctx_retain(ctx);
    p->group = config->group;
    p->config = *config;
    p->end = &p->first;
    p->state.micro = INT_MAX;
    p->schedule = (lt_schedule){.kind = config->kind,
                                .stages = lt_group_size(config->group),
                                .stage = lt_group_rank(config->group),
                                .lag = config->lag};
    if (open_pipeline(p) == LT_OK)
        return p;
    lt__pipeline_free(p);
    return NULL;
}
