/* simulate.c - simulates an optimizer step of a pipeline; see simulate.h. */
#include <math.h>
#include <stdlib.h>

#include "dist/pipeline/simulate.h"

static const double SLACK = 1 - 1e-9; /* margin for rounding errors */

typedef struct stage {
    lt_stage_state state;
    lt_action doing;           /* a pass; or LT_WAIT or LT_DONE */
    double until;              /* end of the pass */
    double left;               /* least seconds from the next pass to the end of the step */
    int together;              /* passes for weights after the last backward pass */
    double sending, receiving; /* times at which all messages so far are sent and received */
    int sent_to, arrived;      /* numbers of messages sent to it, and arrived */
} stage;

typedef struct message {
    double arrives;
    int micro;
    bool backward; /* the message has a gradient */
} message;

typedef struct simulation {
    const lt_pipe *pipe;
    lt_pipe_log *log;
    void *ud;
    lt_pipe_result *result;
    stage *stage;      /* (stages) */
    int *missing[2];   /* (stages, micro) messages with inputs, and with gradients, to arrive */
    message *messages; /* (stages, stages * micro) to each stage, which arrive in this order */
} simulation;

/* The bytes of values from stage i to stage j > i, or of their gradients. */
static double bytes_between(const simulation *s, bool backward, int i, int j)
{
    const double *bytes = backward && s->pipe->grads ? s->pipe->grads : s->pipe->bytes;
    return bytes[(ptrdiff_t)i * s->pipe->stages + j];
}

/* ==== Messages ================================================================================ */

/* Message k among the messages that were sent to a stage. */
static message *message_to(const simulation *s, int to, int k)
{
    return &s->messages[(ptrdiff_t)to * s->pipe->stages * s->pipe->micro + k];
}

static void post(simulation *s, int from, int to, bool backward, int micro, double now)
{
    stage *a = &s->stage[from], *b = &s->stage[to];
    const lt_pipe_link *link = &s->pipe->link;
    double bytes = backward ? bytes_between(s, true, to, from) : bytes_between(s, false, from, to);
    double begin = now;
    if (bytes == 0)
        return;
    if (a->sending > begin)
        begin = a->sending;
    if (b->receiving > begin)
        begin = b->receiving;
    a->sending = b->receiving = begin + bytes / link->bytes_per_s;
    *message_to(s, to, b->sent_to++) = (message){a->sending + link->latency, micro, backward};
}

/* Counts the micro-batches all of whose messages have arrived. */
static int count_complete(const simulation *s, int to, bool backward, int from)
{
    const int *missing = s->missing[backward] + (ptrdiff_t)to * s->pipe->micro;
    while (from < s->pipe->micro && missing[from] == 0)
        from++;
    return from;
}

static void update_arrivals(simulation *s, int i)
{
    lt_stage_state *t = &s->stage[i].state;
    t->inputs = count_complete(s, i, false, t->inputs);
    t->grads = count_complete(s, i, true, t->grads);
}

/* The next message of a stage arrives. */
static void arrive(simulation *s, int to)
{
    const message *m = message_to(s, to, s->stage[to].arrived++);
    s->missing[m->backward][(ptrdiff_t)to * s->pipe->micro + m->micro]--;
    update_arrivals(s, to);
}

/* ==== Passes ================================================================================== */

static void begin_pass(simulation *s, int i, double now)
{
    stage *a = &s->stage[i];
    const lt_pipe_stage *cost = &s->pipe->stage[i];
    lt_schedule schedule = {s->pipe->kind, s->pipe->stages, i, s->pipe->lag};
    bool split = s->pipe->kind == LT_ZERO_BUBBLE;
    double seconds = 0;
    int micro = 0;
    a->doing = lt__schedule_next(&schedule, &a->state);
    switch (a->doing) {
    case LT_FORWARD: seconds = cost->forward, micro = a->state.forward; break;
    case LT_BACKWARD:
        seconds = cost->inputs + (split ? 0 : cost->weights);
        micro = a->state.backward;
        break;
    case LT_WEIGHTS: seconds = cost->weights, micro = a->state.weights; break;
    default: return;
    }
    if (s->pipe->limit > 0 && (now + a->left) * SLACK > s->pipe->limit)
        s->result->seconds = INFINITY;
    a->left -= seconds;
    a->until = now + seconds;
    s->result->busy[i] += seconds;
    if (s->log)
        s->log(s->ud, i, a->doing, micro, now);
}

/* After a pass of a stage that ends at `now`: ends the step of the stage if it was the last one. */
static void end_stage(simulation *s, int i, double now)
{
    const lt_pipe *p = s->pipe;
    const lt_stage_state *t = &s->stage[i].state;
    bool is_over = (p->kind == LT_ZERO_BUBBLE ? t->weights : t->backward) == p->micro;
    double reduce = p->stage[i].reduce;
    if (is_over && p->reduce)
        reduce = p->reduce(p->ud, i, s->stage[i].together);
    double end = now + (is_over ? reduce + p->stage[i].update : 0);
    s->result->reduce[i] = reduce;
    if (end > s->result->seconds)
        s->result->seconds = end;
}

static void end_pass(simulation *s, int i)
{
    stage *a = &s->stage[i];
    lt_stage_state *t = &a->state;
    bool split = s->pipe->kind == LT_ZERO_BUBBLE;
    double now = a->until;
    int kept;
    switch (a->doing) {
    case LT_FORWARD:
        for (int j = i + 1; j < s->pipe->stages; j++)
            post(s, i, j, false, t->forward, now);
        t->forward++;
        kept = t->forward - (split ? t->weights : t->backward);
        if (kept > s->result->in_memory[i])
            s->result->in_memory[i] = kept;
        break;
    case LT_BACKWARD:
        for (int j = 0; j < i; j++)
            post(s, i, j, true, t->backward, now);
        t->backward++;
        a->together = t->backward - t->weights;
        break;
    default: t->weights++; break;
    }
    a->doing = LT_WAIT;
    end_stage(s, i, now);
}

static bool is_busy(const stage *a) { return a->doing != LT_WAIT && a->doing != LT_DONE; }

/* The stage whose pass ends first, at *until, or -1. */
static int next_end(const simulation *s, double *until)
{
    int first = -1;
    *until = INFINITY;
    for (int i = 0; i < s->pipe->stages; i++)
        if (is_busy(&s->stage[i]) && s->stage[i].until < *until)
            *until = s->stage[first = i].until;
    return first;
}

/* The stage at which the next message arrives, at *arrives, or -1. */
static int next_arrival(const simulation *s, double *arrives)
{
    int first = -1;
    *arrives = INFINITY;
    for (int i = 0; i < s->pipe->stages; i++) {
        const stage *a = &s->stage[i];
        if (a->arrived < a->sent_to && message_to(s, i, a->arrived)->arrives < *arrives)
            *arrives = message_to(s, first = i, a->arrived)->arrives;
    }
    return first;
}

/* Handles the next end of a pass or arrival of a message. Returns false if there is none. */
static bool step(simulation *s)
{
    double until, arrives;
    int ending = next_end(s, &until), receiver = next_arrival(s, &arrives);
    bool is_arrival = arrives < until;
    int changed = is_arrival ? receiver : ending;
    if (changed < 0)
        return false;
    if (is_arrival)
        arrive(s, receiver);
    else
        end_pass(s, ending);
    if (!is_busy(&s->stage[changed])) /* the others still wait for the same message */
        begin_pass(s, changed, is_arrival ? arrives : until);
    return true;
}

/* ==== Opening ================================================================================= */

static lt_status check(const lt_pipe *p)
{
    bool ok = p->stages >= 1 && p->stages <= LT_MAX_STAGES && p->micro >= 1 && p->lag >= 0 &&
              p->kind >= 0 && p->kind < LT_SCHEDULE_KINDS && p->link.latency >= 0 &&
              p->link.bytes_per_s > 0;
    return ok ? LT_OK : lt_fail(LT_EINVAL, "a simulated pipeline has invalid numbers");
}

/* Counts the messages that will arrive. */
static void open_stages(simulation *s)
{
    int n = s->pipe->stages, micro = s->pipe->micro;
    for (int i = 0; i < n; i++) {
        for (int j = i + 1; j < n; j++)
            for (int m = 0; m < micro; m++) {
                s->missing[0][(ptrdiff_t)j * micro + m] += bytes_between(s, false, i, j) > 0;
                s->missing[1][(ptrdiff_t)i * micro + m] += bytes_between(s, true, i, j) > 0;
            }
        const lt_pipe_stage *c = &s->pipe->stage[i];
        s->stage[i] = (stage){.state.micro = micro, .doing = LT_WAIT};
        s->stage[i].left = micro * (c->forward + c->inputs + c->weights) + c->reduce + c->update;
    }
    for (int i = 0; i < n; i++)
        update_arrivals(s, i);
}

lt_status lt__pipe_simulate(const lt_pipe *pipe, lt_pipe_log *log, void *ud, lt_pipe_result *result)
{
    LT_TRY(check(pipe));
    size_t n = (size_t)pipe->stages, micro = (size_t)pipe->micro;
    *result = (lt_pipe_result){0};
    simulation s = {pipe,
                    log,
                    ud,
                    result,
                    calloc(n, sizeof *s.stage),
                    {calloc(n * micro, sizeof(int)), calloc(n * micro, sizeof(int))},
                    malloc(n * n * micro * sizeof *s.messages)};
    lt_status status = LT_OK;
    if (!s.stage || !s.missing[0] || !s.missing[1] || !s.messages) {
        status = lt_fail(LT_ENOMEM, "out of memory for a simulated pipeline");
    } else {
        open_stages(&s);
        for (int i = 0; i < pipe->stages; i++)
            begin_pass(&s, i, 0);
        while (result->seconds < INFINITY && step(&s))
            ;
    }
    free(s.stage);
    free(s.missing[0]);
    free(s.missing[1]);
    free(s.messages);
    return status;
}
