/* messages.c - the values and gradients that the stages of a pipeline send to each other. */
#include <stdlib.h>

#include "dist/pipeline/internal.h"

enum { MAX_UNREAD = 4 }; /* largest number of values that a stage has not acknowledged yet */

/* Sends a message, taken, to a stage. If x is not NULL, its elements become the data. */
static lt_status send(lt_pipeline *p, int to, lt_message *m, lt_tensor *x)
{
    int rank = lt__stage_rank(p, to);
    p->bytes += m->bytes;
    if (p->transfer)
        return lt__transfer_send(p->transfer, rank, m, x);
    lt_status status = x ? lt_read(x, m->data) : LT_OK;
    if (status == LT_OK)
        lt__mail_send(p->mail, rank, m);
    else
        lt__message_free(m);
    return status;
}

/* Sends the elements of x, or none if it is NULL. */
static lt_status send_tensor(lt_pipeline *p, int to, lt_message_kind kind, int64_t number,
                             bool acknowledged, lt_tensor *x)
{
    lt_message *m = lt__message_new(kind, x ? lt__tensor_bytes(x) : 0);
    if (!m)
        return LT_ENOMEM;
    m->as.transfer.number = number;
    m->as.transfer.acknowledged = acknowledged;
    m->as.transfer.forwards = p->forwards;
    return send(p, to, m, x);
}

/* Writes the elements of a message to x, which has memory. */
static lt_status write(lt_pipeline *p, lt_tensor *x, const lt_message *m)
{
    return x->storage->device->is_host ? lt_write(x, m->data)
                                       : lt__transfer_receive(p->transfer, x, m);
}

static lt_status desync(const lt_pipeline *p, int other, const char *what)
{
    return lt_fail(LT_EDESYNC, "stages %d and %d of the pipeline run different programs: %s",
                   p->schedule.stage, other, what);
}

/* ==== Arrived messages ======================================================================== */

/* The values to which a gradient belongs, or NULL. *micro: their micro-batch. */
static lt_sent *find_sent(const lt_pipeline *p, int from, int64_t number, int *micro)
{
    *micro = p->state.weights;
    for (lt_micro_batch *q = p->first; q; q = q->next, ++*micro)
        for (int i = 0; i < q->n_sent; i++) {
            lt_sent *s = &q->sent[i];
            if (s->to == from && s->number == number && !s->arrived)
                return s;
        }
    return NULL;
}

/* Stores a gradient that has arrived, m, which is taken. A message without bytes says that there is
 * no gradient. */
static lt_status take_grad(lt_pipeline *p, int from, lt_message *m)
{
    int micro;
    lt_sent *s = find_sent(p, from, m->as.transfer.number, &micro);
    bool fits = s && (m->bytes == 0 || m->bytes == lt__tensor_bytes(s->x));
    if (fits) {
        s->arrived = true;
        lt__pipe_log(p, LT_PIPE_GRAD, micro);
    }
    if (fits && m->bytes == lt__tensor_bytes(s->x)) {
        s->grad = m;
        return LT_OK;
    }
    lt__message_free(m);
    return fits ? LT_OK
                : desync(p, from,
                         s ? "a gradient has arrived in another size than its value"
                           : "a gradient has arrived for a value that was not sent");
}

/* Whether a message is from a stage of this replica. */
static bool is_of_replica(const lt_pipeline *p, const lt_message *m)
{
    return m->from == lt__stage_rank(p, m->from / p->replicas);
}

/* Stores a message, taken. */
static lt_status store(lt_pipeline *p, lt_message *m)
{
    int from = m->from / p->replicas;
    bool is_here = is_of_replica(p, m);
    if (is_here && m->kind == LT_MSG_GRAD)
        return take_grad(p, from, m);
    if (is_here && m->kind == LT_MSG_VALUES) {
        lt__messages_put(&p->values[from], m);
        return LT_OK;
    }
    if (is_here && m->kind == LT_MAIL_LOST) {
        p->first_lost = p->lost ? p->first_lost : from;
        p->lost |= 1ull << from;
    }
    p->unread[from] -= is_here && m->kind == LT_MSG_READ;
    lt__message_free(m);
    return LT_OK;
}

/* Stores whether the sender of a message waits, and which rank it waits for. Returns whether the
 * message says only this. */
static bool store_waiting(lt_pipeline *p, const lt_message *m)
{
    if (!is_of_replica(p, m) || m->kind == LT_MAIL_LOST)
        return false;
    bool waits = m->kind == LT_MSG_WAITING;
    p->waits_for[m->from / p->replicas] = waits ? 1 + m->as.waiting.rank : 0;
    return waits;
}

/* Returns the next message for store(), or NULL if no message arrives for `seconds`. */
static lt_message *take(lt_pipeline *p, double seconds)
{
    lt_message *m;
    while ((m = lt__mail_take(p->mail, seconds)) && store_waiting(p, m))
        lt__message_free(m);
    return m;
}

static lt_status fail_ended(const lt_pipeline *p, int stage)
{
    return lt_fail(LT_EPEER,
                   "rank %d, stage %d of the pipeline, has ended, but stage %d waits for it",
                   lt__stage_rank(p, stage), stage, p->schedule.stage);
}

/* LT_EPEER if another rank has failed, or if one of these stages has ended. The error of a message
 * that this stage could not send. */
static lt_status check_job(const lt_pipeline *p, uint64_t stages)
{
    char text[512];
    int rank;
    lt_status code;
    if (lt_group_failure(p->group, &rank, &code, text, sizeof text) &&
        rank != lt_group_rank(p->group))
        return lt_fail(LT_EPEER, "rank %d, stage %d of the pipeline, has failed: %s", rank,
                       rank / p->replicas, text);
    if (p->lost & stages) /* the awaited stage may have failed because another one was lost */
        return fail_ended(p, p->first_lost);
    return p->transfer ? lt__transfer_check(p->transfer) : LT_OK;
}

/* The first of these stages, given as bits; this stage if no bit is set. */
static int first_of(const lt_pipeline *p, uint64_t stages)
{
    return stages ? __builtin_ctzll(stages) : p->schedule.stage;
}

/* The rank that `rank` waits for, or -1 if it is not known: ranks of this node announce it in
 * shared memory, and stages of this replica in messages. */
static int next_awaited(const lt_pipeline *p, int rank, char seen[LT_SEEN_BYTES])
{
    int next = lt__group_find_hung(p->group, rank, seen), stage = rank / p->replicas;
    if (next != rank)
        return next;
    return rank == lt__stage_rank(p, stage) ? p->waits_for[stage] - 1 : -1;
}

/* The rank that holds up `rank`, which this stage waits for. */
static int find_hung(const lt_pipeline *p, int rank, char seen[LT_SEEN_BYTES])
{
    int hung = rank, own = lt_group_rank(p->group);
    for (int i = 0; i < lt_group_size(p->group); i++) {
        int next = next_awaited(p, hung, seen);
        if (next < 0 || next == own)
            break;
        hung = next;
    }
    return hung;
}

static lt_status tell_waiting(lt_pipeline *p, int rank)
{
    char seen[LT_SEEN_BYTES];
    int hung = find_hung(p, rank, seen);
    for (int to = 0; to < p->config.stages; to++) {
        if (to == p->schedule.stage)
            continue;
        lt_message *m = lt__message_new(LT_MSG_WAITING, 0);
        if (!m)
            return LT_ENOMEM;
        m->as.waiting.rank = hung;
        LT_TRY(send(p, to, m, NULL));
    }
    return LT_OK;
}

/* Fails because no message of `rank` has arrived. The cause is the rank that holds it up. */
static lt_status fail_silent(const lt_pipeline *p, int rank, double seconds)
{
    char seen[LT_SEEN_BYTES];
    int hung = find_hung(p, rank, seen);
    lt_fail(LT_EPEER,
            "stage %d of the pipeline waits for rank %d, stage %d, and has received no message for "
            "%g s%s",
            p->schedule.stage, hung, hung / p->replicas, seconds, seen);
    lt__group_blame(p->group, hung);
    return LT_EPEER;
}

/* Fails if a stage that must send a message left so long ago that its last messages have arrived.
 * *seen: when this was first noticed; initially 0. */
static lt_status check_left(const lt_pipeline *p, uint64_t stages, double *seen)
{
    static const double ARRIVAL_SECONDS = 1;
    for (int stage = 0; stage < p->config.stages; stage++)
        if (stages >> stage & 1 && lt__group_has_left(p->group, lt__stage_rank(p, stage))) {
            *seen = *seen > 0 ? *seen : lt__seconds();
            return lt__seconds() - *seen < ARRIVAL_SECONDS ? LT_OK : fail_ended(p, stage);
        }
    return LT_OK;
}

lt_status lt__pipe_wait(lt_pipeline *p, uint64_t stages)
{
    double began = lt__seconds(), limit = lt__group_timeout(p->group), left = 0;
    bool is_told = false;
    int rank = lt__stage_rank(p, first_of(p, stages));
    lt_message *m = take(p, 0);
    bool waits = !m;
    if (waits) {
        lt__pipe_log(p, LT_WAIT, p->state.forward);
        lt__group_set_awaited(p->group, rank);
    }
    while (!m) {
        LT_TRY(check_job(p, stages));
        LT_TRY(check_left(p, stages, &left));
        double waited = lt__seconds() - began;
        if (waited > limit)
            return fail_silent(p, rank, limit);
        if (!is_told && waited > limit / 2) {
            is_told = true;
            LT_TRY(tell_waiting(p, rank));
        }
        m = take(p, LT_CHECK_SECONDS);
    }
    if (waits)
        lt__group_set_awaited(p->group, -1);
    p->times.waited += lt__seconds() - began;
    lt_trace(p->ctx, LT_TRACK_STEP, "wait for a stage", began, lt__seconds() - began);
    return store(p, m);
}

lt_status lt__pipe_poll(lt_pipeline *p)
{
    for (lt_message *m; (m = take(p, 0));)
        LT_TRY(store(p, m));
    return LT_OK;
}

lt_status lt__pipe_catch_up(lt_pipeline *p)
{
    lt_device *accelerator = p->ctx->devices[1];
    if (p->transfer)
        LT_TRY(accelerator->sync(accelerator));
    return lt__pipe_poll(p);
}

lt_tensor *lt__pipe_unpack(lt_pipeline *p, const lt_tensor *like, const lt_message *m)
{
    lt_tensor *x = lt__tensor_new(like->ctx, like->storage->device, (lt_dtype)like->dtype,
                                  like->ndim, like->dims, true);
    if (x && write(p, x, m) == LT_OK)
        return x;
    lt_release(x);
    return NULL;
}

/* ==== The functions of lt_stage_hooks ========================================================= */

/* Adds x to the current micro-batch: stage `from` will return its gradient. x is taken. */
static lt_status expect_grad(lt_pipeline *p, lt_tensor *x, int from)
{
    lt_micro_batch *q = x ? lt__micro_current(p) : NULL;
    lt_status status = q ? LT_RESERVE(q->sent, q->n_sent + 1, &q->sent_room, "for a micro-batch")
                         : LT_ENOMEM;
    if (status == LT_OK)
        q->sent[q->n_sent++] = (lt_sent){.x = x, .to = from, .number = p->sent[from]};
    else
        lt_release(x);
    return status;
}

/* Waits until stage `to` has read enough of the values that need no gradient. */
static lt_status wait_for_reader(lt_pipeline *p, int to)
{
    LT_TRY(lt__pipe_poll(p));
    while (p->unread[to] >= MAX_UNREAD)
        LT_TRY(lt__pipe_wait(p, 1ull << to));
    p->unread[to]++;
    return LT_OK;
}

lt_status lt__pipe_send(void *ud, lt_tensor *x, int to, bool requires_grad, bool returns)
{
    lt_pipeline *p = ud;
    if (returns)
        LT_TRY(expect_grad(p, lt__tensor_with_history(x), to));
    if (!requires_grad)
        LT_TRY(wait_for_reader(p, to));
    return send_tensor(p, to, LT_MSG_VALUES, p->sent[to]++, !requires_grad, x);
}

/* No message is sent, but the gradient returns with a number as if one had been sent. */
lt_status lt__pipe_expect(void *ud, lt_tensor *x, int from)
{
    lt_pipeline *p = ud;
    LT_TRY(expect_grad(p, lt_retain(x), from));
    p->sent[from]++;
    return LT_OK;
}

/* Waits for values of a stage. Meanwhile, gradients of weights are computed. */
static lt_status wait_for_values(lt_pipeline *p, int from)
{
    LT_TRY(lt__pipe_poll(p));
    while (!p->values[from].first) {
        bool has_weights = p->state.weights < p->state.backward;
        LT_TRY(has_weights ? lt__pipe_catch_up(p) : lt__pipe_wait(p, 1ull << from));
        if (has_weights && !p->values[from].first)
            LT_TRY(lt__micro_run_weights(p));
    }
    return LT_OK;
}

/* Adds values that have arrived to the current micro-batch. to: the stage to which their gradient
 * is returned. */
static lt_status owe_grad(lt_pipeline *p, lt_tensor *x, int to, int64_t number)
{
    lt_micro_batch *q = lt__micro_current(p);
    if (!q)
        return LT_ENOMEM;
    LT_TRY(LT_RESERVE(q->received, q->n_received + 1, &q->received_room, "for a micro-batch"));
    q->received[q->n_received++] = (lt_received){.x = lt_retain(x), .to = to, .number = number};
    return LT_OK;
}

lt_status lt__pipe_receive(void *ud, lt_tensor *x, int from, int returns_to)
{
    lt_pipeline *p = ud;
    LT_TRY(wait_for_values(p, from));
    lt__pipe_log(p, LT_PIPE_INPUT, p->state.forward);
    lt_message *m = lt__messages_take(&p->values[from]);
    int64_t number = p->taken[from]++;
    bool acknowledged = m->as.transfer.acknowledged;
    bool fits = m->as.transfer.number == number && m->as.transfer.forwards == p->forwards &&
                acknowledged == (returns_to < 0) && m->bytes == lt__tensor_bytes(x);
    lt_status status = fits ? write(p, x, m) : desync(p, from, "other values have arrived");
    lt__message_free(m);
    LT_TRY(status);
    if (acknowledged)
        return send_tensor(p, from, LT_MSG_READ, number, false, NULL);
    return owe_grad(p, x, returns_to, returns_to == from ? number : p->taken[returns_to]++);
}

lt_status lt__pipe_return_grad(void *ud, lt_tensor *x, lt_tensor *grad)
{
    lt_pipeline *p = ud;
    for (int i = 0; i < p->back->n_received; i++) {
        lt_received *r = &p->back->received[i];
        if (r->x != x)
            continue;
        r->returned = true;
        return send_tensor(p, r->to, LT_MSG_GRAD, r->number, false, grad);
    }
    return lt_fail(LT_EINVAL, "a gradient of another micro-batch is complete");
}

lt_status lt__pipe_return_nothing(lt_pipeline *p, lt_micro_batch *q)
{
    for (int i = 0; i < q->n_received; i++) {
        lt_received *r = &q->received[i];
        if (!r->returned)
            LT_TRY(send_tensor(p, r->to, LT_MSG_GRAD, r->number, false, NULL));
        r->returned = true;
    }
    return LT_OK;
}
