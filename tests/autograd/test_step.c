/* The parts of a step are called at all its events, in their order. */
#include <stdio.h>
#include <string.h>

#include "ops/ops.h"
#include "tests/autograd/train.h"

/* A part notes each call in a log that all parts share: its letter and the event. */
typedef struct part {
    char *log, letter;
    lt_status begin;    /* the result of begin */
    bool defers;        /* prepare accumulates */
    lt_step_status set; /* the status that reduce and decide set */
} part;

static lt_status note(part *p, const char *event)
{
    snprintf(p->log + strlen(p->log), 200 - strlen(p->log), "%c.%s ", p->letter, event);
    return LT_OK;
}

static lt_status begin(void *ud, lt_ctx *ctx, lt_tensor *loss, lt_tensor *grad)
{
    part *p = ud;
    (void)ctx, (void)loss, (void)grad;
    note(p, "begin");
    return p->begin == LT_OK ? LT_OK : lt_fail(p->begin, "no pass");
}

static lt_status grad_begin(void *ud, lt_tensor *x, lt_tensor *grad)
{
    (void)x, (void)grad;
    return note(ud, "again");
}

static lt_status grad_complete(void *ud, lt_tensor *x, lt_tensor *grad, lt_tensor *from)
{
    (void)x, (void)grad, (void)from;
    return note(ud, "complete");
}

static lt_status grad_ready(void *ud, lt_tensor *x, lt_tensor *grad)
{
    (void)x, (void)grad;
    return note(ud, "ready");
}

static lt_status end(void *ud, lt_ctx *ctx, lt_status status)
{
    (void)ctx;
    note(ud, "end");
    return status;
}

static void synchronize(void *ud) { note(ud, "sync"); }

static lt_status prepare(void *ud, lt_step_status *status)
{
    *status = ((part *)ud)->defers ? LT_ACCUMULATING : *status;
    return note(ud, "prepare");
}

static lt_status reduce(void *ud, lt_ctx *ctx, lt_step_status *status)
{
    (void)ctx;
    *status = ((part *)ud)->set == LT_ACCUMULATING ? LT_ACCUMULATING : *status;
    return note(ud, "reduce");
}

static lt_status decide(void *ud, lt_step_status *status)
{
    *status = ((part *)ud)->set == LT_SKIPPED ? LT_SKIPPED : *status;
    return note(ud, "decide");
}

static lt_status apply(void *ud, lt_optim *optim, const lt_opt *const *options,
                       lt_step_status status, double factor)
{
    (void)optim, (void)options, (void)factor;
    return note(ud, status == LT_APPLIED ? "apply" : "skip");
}

static lt_status hook(void *ud, lt_tensor *x, lt_tensor *grad)
{
    (void)x, (void)grad;
    strcat(ud, "hook ");
    return LT_OK;
}

typedef struct net {
    lt_ctx *ctx;
    lt_params *params;
    lt_tensor *w;
    lt_optim *optim;
    char log[200];
    part parts[LT_PART_KINDS];
} net;

static void open_net(net *n)
{
    *n = (net){.ctx = lt_open(&(lt_config){.poison = true, .device = "cpu"})};
    n->w = lt_param_new(n->ctx, LT_F32, 0, NULL, (lt_init){LT_INIT_CONSTANT, 1, 0});
    n->params = placed(n->ctx, &n->w, 1);
    CHECK((n->optim = lt_optim_new(n->ctx, "sgd_step", &n->w, 1)) != NULL);
    for (int kind = 0; kind < LT_PART_KINDS; kind++) {
        part *p = &n->parts[kind];
        *p = (part){.log = n->log, .letter = "abc"[kind]};
        CHECK_OK(lt_set_part(n->ctx, (lt_part_kind)kind,
                             &(lt_step_part){.ud = p,
                                             .begin = begin,
                                             .grad_begin = grad_begin,
                                             .grad_complete = grad_complete,
                                             .grad_ready = grad_ready,
                                             .end = end,
                                             .synchronize = synchronize,
                                             .prepare = prepare,
                                             .reduce = reduce,
                                             .decide = decide}));
    }
}

static void close_net(net *n)
{
    lt_optim_free(n->optim);
    lt_params_free(n->params);
    lt_ctx_free(n->ctx);
}

static lt_status go_back(net *n)
{
    lt_tensor *y = lt_run(n->ctx, "exp", NULL, n->w, NULL);
    n->log[0] = '\0';
    lt_status status = lt_backward(y, NULL);
    lt_release(y);
    return status;
}

static lt_step_status step(net *n)
{
    lt_step_status status;
    n->log[0] = '\0';
    CHECK_OK(step_with(n->optim, "lr=0.1", &status));
    return status;
}

TEST(parts_are_called_in_the_order_of_their_kinds)
{
    static net n;
    open_net(&n);
    CHECK_OK(lt_on_grad(n.w, hook, n.log, NULL));
    CHECK_OK(go_back(&n));
    CHECK_STR(n.log, "a.begin b.begin c.begin b.complete hook a.ready b.ready c.ready "
                     "a.end b.end c.end ");
    CHECK_OK(go_back(&n));
    CHECK(strstr(n.log, "c.begin a.again b.again c.again b.complete hook "));
    CHECK_EQ(step(&n), LT_APPLIED);
    CHECK_STR(n.log, "a.prepare b.prepare c.prepare a.reduce b.reduce c.reduce "
                     "a.decide b.decide c.decide a.sync b.sync c.sync ");
    close_net(&n);
}

TEST(a_part_can_accumulate_skip_or_apply_a_step)
{
    static net n;
    double w;
    open_net(&n);
    CHECK_OK(go_back(&n));
    n.parts[LT_PART_SCHEDULE].defers = true;
    CHECK_EQ(step(&n), LT_ACCUMULATING);
    CHECK_STR(n.log, "a.prepare b.prepare c.prepare ");
    lt_zero_grad(n.w);
    CHECK(lt_grad(n.w) != NULL); /* the passes that follow add to it */
    n.parts[LT_PART_SCHEDULE].defers = false;
    n.parts[LT_PART_EXCHANGE].set = LT_ACCUMULATING;
    CHECK_OK(go_back(&n));
    CHECK_EQ(step(&n), LT_ACCUMULATING);
    CHECK(strstr(n.log, "c.reduce ") && !strstr(n.log, "decide"));
    n.parts[LT_PART_EXCHANGE].set = LT_APPLIED;
    n.parts[LT_PART_SCALE].set = LT_SKIPPED;
    CHECK_OK(go_back(&n));
    CHECK_EQ(step(&n), LT_SKIPPED);
    n.parts[LT_PART_SCALE].set = LT_APPLIED;
    CHECK_OK(lt_set_part(n.ctx, LT_PART_EXCHANGE,
                         &(lt_step_part){.ud = &n.parts[LT_PART_EXCHANGE], .apply = apply}));
    CHECK_OK(go_back(&n));
    CHECK_EQ(step(&n), LT_APPLIED);
    CHECK(strstr(n.log, "b.decide c.apply "));
    CHECK_OK(lt_item(n.w, 0, &w));
    CHECK(w == 1); /* another one would have applied it */
    close_net(&n);
}

TEST(a_backward_ends_for_the_parts_that_have_begun)
{
    static net n;
    open_net(&n);
    n.parts[LT_PART_SCALE].begin = LT_EPEER;
    CHECK_FAILS(go_back(&n), LT_EPEER, "no pass");
    CHECK_STR(n.log, "a.begin b.begin a.end b.end ");
    close_net(&n);
}

TEST(a_dry_run_calls_no_part_of_the_training)
{
    static net n;
    open_net(&n);
    CHECK_OK(lt_dry_run_begin(n.ctx, NULL, NULL, NULL));
    CHECK_OK(go_back(&n));
    CHECK_STR(n.log, "");
    CHECK_FAILS(lt_check_no_part(n.ctx, LT_PART_SCALE, "x"), LT_EINVAL,
                "x: this context already has a loss scale; free it first");
    lt_dry_run_end(n.ctx);
    CHECK_OK(go_back(&n));
    CHECK(strstr(n.log, "a.begin b.begin c.begin "));
    for (int kind = 0; kind < LT_PART_KINDS; kind++) {
        CHECK_OK(lt_set_part(n.ctx, (lt_part_kind)kind, NULL));
        CHECK_OK(lt_check_no_part(n.ctx, (lt_part_kind)kind, NULL));
    }
    CHECK_OK(go_back(&n));
    CHECK_STR(n.log, "");
    close_net(&n);
}
