/* test_rule.c - the rules of asynchronous training: each one against its formula in plain loops,
 * and the cases in which one rule is the same as another. */
#include <stdlib.h>

#include "core/tensor.h"
#include "dist/async/rule.h"
#include "ops/ops.h"
#include "tests/lt_test.h"

enum { PARAMS = 3, COUNT = 7, WORKERS = 4, PUSHES = 60 };

/* ==== A server ================================================================================ */

typedef struct setting { /* of a server */
    const char *op, *options;
    double weight_decay; /* of group 0 */
    int workers;
    lt_rule_config rule; /* without the number of workers */
} setting;

typedef struct server {
    const setting *set;
    lt_ctx *ctx;
    lt_params *params;
    lt_tensor *param[PARAMS];
    lt_optim *optim;
    lt_opt opt[2][LT_MAX_OPT];
    lt_rule_state *rule;
    lt_flat_buffers values;
    lt_image net;
    lt_gradient gradient;
    lt_optim_range range[PARAMS];
    int64_t version, read_version[WORKERS];
    double read[WORKERS][PARAMS][COUNT]; /* the weights that each worker has read */
} server;

static double *elements(const lt_flat_buffers *flat, const lt_optim_range *r)
{
    return (double *)lt_data(flat->arena[r->arena]) + r->offset;
}

static void pull(server *s, int worker)
{
    CHECK_OK(lt__rule_pull(s->rule, worker));
    s->read_version[worker] = s->version;
    for (int i = 0; i < PARAMS; i++)
        memcpy(s->read[worker][i], elements(&s->values, &s->range[i]), sizeof s->read[0][0]);
}

static void open_params(server *s)
{
    static const char *const names[PARAMS] = {"a", "b", "c"};
    bool all[PARAMS] = {true, true, true};
    lt_init init = {LT_INIT_UNIFORM, -1, 1};
    for (int i = 0; i < PARAMS; i++) {
        s->param[i] = lt_param_new(s->ctx, LT_F64, 1, &(int64_t){COUNT}, init);
        CHECK_OK(lt_params_add(s->params, names[i], s->param[i]));
    }
    CHECK_OK(lt_params_place(s->params));
    s->optim = lt_optim_new(s->ctx, s->set->op, s->param, PARAMS);
    CHECK(s->optim != NULL);
    CHECK_OK(lt_optim_set_group(s->optim, s->param[2], 1)); /* the others are adjacent */
    lt_optim_range r = {0};
    for (int i = 0; lt_optim_next_range(s->optim, NULL, all, true, &r); i++)
        s->range[i] = r;
}

static server *open_server(const setting *set)
{
    server *s = calloc(1, sizeof *s);
    s->set = set;
    s->ctx = lt_open(&(lt_config){.seed = 5, .device = "cpu"});
    s->params = lt_params_new(s->ctx);
    open_params(s);
    const lt_schema *schema = &lt_optim_def(s->optim)->schema;
    for (int g = 0; g < 2; g++)
        CHECK_OK(lt_opts_parse(schema, set->options, s->opt[g]));
    s->opt[0][lt_schema_find(schema, "weight_decay")].f = set->weight_decay;
    lt_rule_config config = set->rule;
    config.workers = set->workers;
    s->rule = lt__rule_new(s->optim, &config);
    if (!s->rule)
        FAIL("%s", lt_errmsg());
    CHECK_OK(lt__flat_open(s->optim, LT_OPTIM_VALUES, &s->values));
    CHECK_OK(lt__image_open(&s->net, s->ctx, s->optim, NULL, 0));
    CHECK_OK(lt__gradient_open(&s->gradient, &s->net, false));
    CHECK_OK(lt__gradient_reserve(&s->gradient, 2, 0));
    memcpy(s->gradient.opt, s->opt, sizeof s->opt);
    for (int w = 0; w < set->workers; w++)
        pull(s, w);
    return s;
}

static void close_server(server *s)
{
    lt__rule_free(s->rule);
    lt__flat_buffers_free(&s->values);
    lt__gradient_close(&s->gradient);
    lt__image_close(&s->net);
    lt_optim_free(s->optim);
    for (int i = 0; i < PARAMS; i++)
        lt_release(s->param[i]);
    lt_params_free(s->params);
    lt_ctx_free(s->ctx);
    free(s);
}

/* The gradient of a quadratic function at the weights that were read, plus noise. */
static double grad_of(int64_t push, int param, int i, double read)
{
    return 0.6 * read + sin((double)(push * 37 + param * 11 + i * 5));
}

static int64_t delay_of(const server *s, int worker)
{
    return s->version - s->read_version[worker];
}

static void push(server *s, int worker)
{
    memset(s->gradient.present, true, PARAMS);
    CHECK_OK(lt__gradient_place(&s->gradient));
    for (int p = 0; p < PARAMS; p++) {
        lt_tensor *grad = lt__gradient_range(&s->gradient, &s->range[p]);
        for (int i = 0; i < COUNT; i++)
            ((double *)lt_data(grad))[i] = grad_of(s->version, p, i, s->read[worker][p][i]);
        lt_release(grad);
    }
    CHECK_OK(lt__rule_apply(s->rule, &(lt_rule_push){.worker = worker,
                                                     .version = s->version,
                                                     .delay = delay_of(s, worker),
                                                     .gradient = &s->gradient}));
    s->version++;
}

/* The worker that pushes next. Two workers push in turn; of more, some push more often. */
static int worker_of(int push, int workers)
{
    static const int order[] = {0, 1, 0, 2, 1, 0, 3, 2, 0, 1, 3, 0, 0, 1, 2};
    return workers > 2 ? order[push % 15] : push % workers;
}

/* ==== The formulas ============================================================================ */

typedef struct model { /* the state of a rule, with arrays in place of arenas */
    lt_rule rule;
    double lr, momentum, weight_decay[PARAMS];
    double mean_delay;
    double w[PARAMS][COUNT], v[PARAMS][COUNT], s[PARAMS][COUNT];
    double velocity[WORKERS][PARAMS][COUNT];
} model;

typedef struct place { /* a parameter in a push */
    model *m;
    double *w, *v, *s, *velocity;
    const double *backup;
    double *g;
    double weight_decay, delay;
    int64_t version, pushes;
} place;

static void correct(const place *p)
{
    const model *m = p->m;
    for (int i = 0; i < COUNT; i++) {
        double w = p->w[i], d = w - p->backup[i], *g = &p->g[i];
        double full = *g + p->weight_decay * w;
        switch (m->rule) {
        case LT_RULE_SA: *g /= p->delay > 1 ? p->delay : 1; break;
        case LT_RULE_DC_C: *g += 0.04 * *g * *g * d; break;
        case LT_RULE_DC_A:
            p->s[i] = 0.95 * p->s[i] + 0.05 * *g * *g;
            *g += 2 / sqrt(p->s[i] + 1e-7) * *g * *g * d;
            break;
        case LT_RULE_DC_M:
            p->s[i] = 0.95 * p->s[i] + 0.05 * full * full;
            *g += 2 / sqrt(p->s[i] + 1e-7) * full * full * d;
            break;
        case LT_RULE_GAP: {
            double v = m->momentum > 0 ? p->v[i] : *g;
            p->s[i] = 0.999 * p->s[i] + 0.001 * v * v;
            double mean = sqrt(p->s[i] / (1 - pow(0.999, (double)p->pushes)));
            *g = full / (1 + fabs(d) / (m->lr * mean + 1e-8)) - p->weight_decay * w;
            break;
        }
        default: break;
        }
    }
}

static void momentum_step(const place *p, double *v, bool nesterov)
{
    const model *m = p->m;
    for (int i = 0; i < COUNT; i++) {
        double d = p->g[i] + p->weight_decay * p->w[i];
        v[i] = m->momentum * v[i] + d;
        p->w[i] -= m->lr * (nesterov ? d + m->momentum * v[i] : v[i]);
    }
}

/* The bucket of a gradient by its version. Only gradients of version 0 are in the first bucket. */
static int64_t bucket(int64_t version) { return (version + WORKERS - 1) / WORKERS; }

static void ordered_step(const place *p)
{
    const model *m = p->m;
    int64_t late = bucket(p->version) - bucket(p->version - (int64_t)p->delay);
    bool opens = p->version % WORKERS == 1;
    for (int i = 0; i < COUNT; i++) {
        double d = p->g[i] + p->weight_decay * p->w[i], sum = 0;
        if (opens) {
            p->v[i] *= m->momentum;
            p->w[i] -= m->lr * p->v[i];
        }
        for (int64_t k = 0; k <= late; k++)
            sum += pow(m->momentum, (double)k);
        p->w[i] -= m->lr * sum * d;
        p->v[i] += pow(m->momentum, (double)late) * d;
    }
}

static void ddc_step(const place *p)
{
    const model *m = p->m;
    double lag = m->momentum / (1 - m->momentum), c[COUNT], norm_c = 0, norm_g = 0;
    double r = p->delay > 0 ? lag / (lag + p->delay) : 1;
    double q = (1 + fmax(lag, m->mean_delay)) / (1 + p->delay);
    for (int i = 0; i < COUNT; i++) {
        double g = p->g[i];
        p->s[i] = 0.95 * p->s[i] + 0.05 * g * g;
        c[i] = 20 * g * g * (p->w[i] - p->backup[i]) / sqrt(p->s[i] + 1e-7);
        norm_c += c[i] * c[i];
        norm_g += g * g;
    }
    double limit = fmin(1, sqrt(norm_g) / (sqrt(norm_c) + 1e-7));
    for (int i = 0; i < COUNT; i++) {
        double d = fmin(1, q) * (p->g[i] + limit * c[i] + p->weight_decay * p->w[i]);
        p->w[i] -= m->lr * (m->momentum * p->velocity[i] + d);
        p->velocity[i] = m->momentum * p->velocity[i] + r * d;
    }
}

/* Applies the push that the server applies next. */
static void model_push(model *m, const server *s, int worker)
{
    double delay = (double)delay_of(s, worker);
    m->mean_delay = s->version == 0 ? delay : 0.99 * m->mean_delay + 0.01 * delay;
    for (int i = 0; i < PARAMS; i++) {
        double g[COUNT];
        for (int k = 0; k < COUNT; k++)
            g[k] = grad_of(s->version, i, k, s->read[worker][i][k]);
        const place p = {.m = m,
                         .w = m->w[i],
                         .v = m->v[i],
                         .s = m->s[i],
                         .velocity = m->velocity[worker][i],
                         .backup = s->read[worker][i],
                         .g = g,
                         .weight_decay = m->weight_decay[i],
                         .delay = delay,
                         .version = s->version,
                         .pushes = s->version + 1};
        correct(&p);
        if (m->rule == LT_RULE_DDC)
            ddc_step(&p);
        else if (m->rule == LT_RULE_ORMO)
            ordered_step(&p);
        else
            momentum_step(&p, m->rule == LT_RULE_DANA ? p.velocity : p.v, m->rule == LT_RULE_DANA);
    }
}

static void check_formula(lt_rule rule, bool has_momentum)
{
    const setting set = {.op = has_momentum ? "momentum_step" : "sgd_step",
                         .options = has_momentum ? "lr=0.05 momentum=0.5" : "lr=0.05",
                         .weight_decay = 0.1,
                         .workers = WORKERS,
                         .rule = {.rule = rule, .follow = true}};
    server *s = open_server(&set);
    model m = {.rule = rule, .lr = 0.05, .momentum = has_momentum ? 0.5 : 0};
    for (int i = 0; i < PARAMS; i++) {
        memcpy(m.w[i], s->read[0][i], sizeof m.w[i]);
        m.weight_decay[i] = s->range[i].group == 1 ? 0 : 0.1;
    }
    for (int k = 0; k < PUSHES; k++) {
        int worker = worker_of(k, WORKERS);
        model_push(&m, s, worker);
        push(s, worker);
        pull(s, worker);
        for (int i = 0; i < PARAMS; i++)
            for (int e = 0; e < COUNT; e++)
                if (fabs(s->read[worker][i][e] - m.w[i][e]) > 1e-10)
                    FAIL("%s, push %d, parameter %d, element %d: %.17g, not %.17g",
                         lt__rule_name(rule), k, i, e, s->read[worker][i][e], m.w[i][e]);
    }
    close_server(s);
}

TEST(each_rule_follows_its_formula)
{
    for (int rule = 0; rule < LT_RULES; rule++) {
        check_formula((lt_rule)rule, true);
        check_formula((lt_rule)rule, false);
    }
}

/* ==== Rules that are the same ================================================================= */

/* When a worker reads the weights. */
typedef enum reading {
    AFTER_ITS_PUSH,
    BEFORE_ITS_PUSH /* so that its gradient has no delay */
} reading;

/* Gives both servers the same pushes. Their weights may differ by `tolerance`. */
static void check_equal(const setting *one, const setting *other, reading when, double tolerance)
{
    server *s[] = {open_server(one), open_server(other)};
    for (int k = 0; k < PUSHES; k++) {
        int worker = worker_of(k, one->workers);
        for (int j = 0; j < 2; j++) {
            if (when == BEFORE_ITS_PUSH)
                pull(s[j], worker);
            push(s[j], worker);
            pull(s[j], worker);
        }
        for (int i = 0; i < PARAMS; i++)
            for (int e = 0; e < COUNT; e++) {
                double a = s[0]->read[worker][i][e], b = s[1]->read[worker][i][e];
                if (!(fabs(a - b) <= tolerance))
                    FAIL("%s (%s) and %s (%s), push %d: %.17g and %.17g",
                         lt__rule_name(one->rule.rule), one->options,
                         lt__rule_name(other->rule.rule), other->options, k, a, b);
            }
    }
    close_server(s[0]);
    close_server(s[1]);
}

static const double TINY = 1e-300; /* as lam: too small to change a gradient */

static setting setting_of(lt_rule rule, const char *options)
{
    return (setting){.op = "momentum_step",
                     .options = options,
                     .weight_decay = 0.1,
                     .workers = WORKERS,
                     .rule = {.rule = rule, .lam = TINY, .follow = true}};
}

static const char with_momentum[] = "lr=0.05 momentum=0.8", without[] = "lr=0.05 momentum=0";

TEST(without_compensation_delay_compensation_is_asgd)
{
    static const lt_rule rules[] = {LT_RULE_DC_C, LT_RULE_DC_A, LT_RULE_DC_M};
    setting asgd = setting_of(LT_RULE_ASGD, with_momentum);
    for (int i = 0; i < 3; i++) {
        setting other = setting_of(rules[i], with_momentum);
        check_equal(&other, &asgd, AFTER_ITS_PUSH, 0);
    }
}

TEST(without_momentum_compensation_and_weights_ddc_is_asgd)
{
    setting asgd = setting_of(LT_RULE_ASGD, without), ddc = setting_of(LT_RULE_DDC, without);
    ddc.rule.follow = false;
    check_equal(&ddc, &asgd, AFTER_ITS_PUSH, 0);
    ddc.op = asgd.op = "sgd_step";
    ddc.options = asgd.options = "lr=0.05";
    check_equal(&ddc, &asgd, AFTER_ITS_PUSH, 0);
}

/* ddc compensates like dc-a, but with a limit. */
TEST(without_momentum_limit_and_weights_ddc_is_dc_a)
{
    setting dc_a = setting_of(LT_RULE_DC_A, without), ddc = setting_of(LT_RULE_DDC, without);
    dc_a.rule.lam = ddc.rule.lam = 8;
    ddc.rule.follow = false;
    ddc.rule.cap = INFINITY;
    check_equal(&ddc, &dc_a, AFTER_ITS_PUSH, 1e-12);
}

TEST(without_weight_decay_dc_m_is_dc_a)
{
    setting dc_a = setting_of(LT_RULE_DC_A, with_momentum);
    setting dc_m = setting_of(LT_RULE_DC_M, with_momentum);
    dc_a.rule.lam = dc_m.rule.lam = 0; /* the default */
    dc_a.weight_decay = dc_m.weight_decay = 0;
    check_equal(&dc_m, &dc_a, AFTER_ITS_PUSH, 0);
}

TEST(without_momentum_dana_and_ormo_are_asgd)
{
    setting asgd = setting_of(LT_RULE_ASGD, without);
    setting dana = setting_of(LT_RULE_DANA, without), ormo = setting_of(LT_RULE_ORMO, without);
    check_equal(&dana, &asgd, AFTER_ITS_PUSH, 0);
    check_equal(&ormo, &asgd, AFTER_ITS_PUSH, 0);
}

TEST(with_delays_of_at_most_1_sa_is_asgd)
{
    setting asgd = setting_of(LT_RULE_ASGD, with_momentum);
    setting sa = setting_of(LT_RULE_SA, with_momentum);
    sa.workers = asgd.workers = 2;
    check_equal(&sa, &asgd, AFTER_ITS_PUSH, 0);
}

/* Several workers, but none pushes between the pull and the push of another. */
TEST(without_delay_most_rules_are_asgd)
{
    static const lt_rule rules[] = {LT_RULE_SA, LT_RULE_DC_C, LT_RULE_DC_A, LT_RULE_DC_M,
                                    LT_RULE_GAP};
    setting asgd = setting_of(LT_RULE_ASGD, with_momentum);
    for (int i = 0; i < 5; i++) {
        setting other = setting_of(rules[i], with_momentum);
        other.rule.lam = 0;
        check_equal(&other, &asgd, BEFORE_ITS_PUSH, 0);
    }
    setting ddc = setting_of(LT_RULE_DDC, without); /* with momentum, each worker has a velocity */
    asgd.options = without;
    ddc.rule.lam = 0;
    check_equal(&ddc, &asgd, BEFORE_ITS_PUSH, 0);
}

TEST(one_worker_takes_the_step_of_the_optimizer)
{
    static const lt_rule rules[] = {LT_RULE_SA,   LT_RULE_DC_C, LT_RULE_DC_A,
                                    LT_RULE_DC_M, LT_RULE_GAP,  LT_RULE_DDC};
    setting asgd = setting_of(LT_RULE_ASGD, with_momentum);
    asgd.workers = 1;
    for (int i = 0; i < 6; i++) {
        setting other = setting_of(rules[i], with_momentum);
        other.workers = 1;
        other.rule.lam = 0;
        check_equal(&other, &asgd, AFTER_ITS_PUSH, 0);
    }
    setting ormo = setting_of(LT_RULE_ORMO, with_momentum);
    ormo.workers = 1;
    check_equal(&ormo, &asgd, AFTER_ITS_PUSH, 1e-12);
    setting dana = setting_of(LT_RULE_DANA, with_momentum);
    dana.workers = 1;
    asgd.options = "lr=0.05 momentum=0.8 nesterov=true";
    check_equal(&dana, &asgd, AFTER_ITS_PUSH, 0);
}

/* ==== Statistics ============================================================================== */

TEST(statistics_of_ddc)
{
    setting set = setting_of(LT_RULE_DDC, with_momentum);
    lt_rule_stats stats;
    set.rule.lam = 0;
    server *s = open_server(&set);
    for (int k = 0; k < 10; k++) {
        push(s, worker_of(k, WORKERS));
        pull(s, worker_of(k, WORKERS));
    }
    CHECK_OK(lt__rule_stats(s->rule, 0, &stats));
    CHECK_NEAR(stats.n, 20, 0); /* two parameters */
    CHECK(stats.strength > 0.1 && stats.strength <= 20 && stats.capped > 0 && stats.capped < 20);
    CHECK_OK(lt__rule_stats(s->rule, 1, &stats));
    CHECK_NEAR(stats.n, 10, 0);
    CHECK_OK(lt__rule_stats(s->rule, 1, &stats));
    CHECK(stats.n == 0 && stats.strength == 0 && stats.capped == 0); /* cleared */
    CHECK_OK(lt__rule_stats(s->rule, 2, &stats));
    CHECK_NEAR(stats.n, 0, 0);
    close_server(s);
    set.rule.rule = LT_RULE_DC_A;
    s = open_server(&set);
    push(s, 0);
    CHECK_OK(lt__rule_stats(s->rule, 0, &stats));
    CHECK_NEAR(stats.n, 0, 0);
    close_server(s);
}
