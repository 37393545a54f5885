/* rule.c - the rules of asynchronous training; see rule.h. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/async/rule.h"

enum { MOMENTUM_SLOT = LT_OPTIM_FIRST_SLOT };

/* What a rule needs besides the optimizer. */
enum { BACKUP = 1, SQUARES = 2, VELOCITY = 4, PLAIN_MOMENTUM = 8, OWN_STEP = 16 };

static const struct {
    const char *name;
    int needs;
    double lam, rho; /* defaults */
} rules[LT_RULES] = {
    [LT_RULE_ASGD] = {"asgd", 0, 0, 0},
    [LT_RULE_SA] = {"sa", 0, 0, 0},
    [LT_RULE_DC_C] = {"dc-c", BACKUP, 0.04, 0},
    [LT_RULE_DC_A] = {"dc-a", BACKUP | SQUARES, 2, 0.95},
    [LT_RULE_DC_M] = {"dc-m", BACKUP | SQUARES, 2, 0.95},
    [LT_RULE_GAP] = {"gap", BACKUP | SQUARES | PLAIN_MOMENTUM, 0, 0.999},
    [LT_RULE_DANA] = {"dana", VELOCITY | PLAIN_MOMENTUM | OWN_STEP, 0, 0},
    [LT_RULE_ORMO] = {"ormo", PLAIN_MOMENTUM | OWN_STEP, 0, 0},
    [LT_RULE_DDC] = {"ddc", BACKUP | SQUARES | VELOCITY | PLAIN_MOMENTUM | OWN_STEP, 20, 0.95},
};

struct lt_rule_state {
    lt_optim *optim;
    lt_rule_config config;
    int needs;
    bool has_momentum;            /* the update op is momentum_step */
    lt_flat_buffers values, slot; /* values of the optimizer; its velocity, or one of our own */
    lt_flat_buffers squares;
    lt_flat_buffers *backup, *velocity; /* (workers) */
    bool *all;                          /* (parameters) true */
    lt_tensor **stats;                  /* (n_groups), each f64 (3): strength, capped, n */
    int n_groups;
    double mean_delay; /* moving mean; negative before the first push */
    double pushes;     /* number of squares averaged so far */
};

const char *lt__rule_name(lt_rule rule) { return rules[rule].name; }

lt_status lt__rule_find(const char *name, lt_rule *rule)
{
    const char *names[LT_RULES];
    char list[128] = "";
    for (int i = 0; i < LT_RULES; i++) {
        if (strcmp(name, rules[i].name) == 0) {
            *rule = (lt_rule)i;
            return LT_OK;
        }
        names[i] = rules[i].name;
        size_t n = strlen(list);
        snprintf(list + n, sizeof list - n, "%s%s",
                 i == 0             ? ""
                 : i < LT_RULES - 1 ? ", "
                                    : " or ",
                 rules[i].name);
    }
    int near = lt_nearest(name, names, LT_RULES);
    return lt_fail(LT_EUSAGE,
                   near >= 0 ? "the rule must be %s, but is '%s' (did you mean '%s'?)"
                             : "the rule must be %s, but is '%s'",
                   list, name, near >= 0 ? names[near] : "");
}

/* ==== Opening ================================================================================= */

static lt_status check_config(const lt_optim *optim, const lt_rule_config *config)
{
    const char *op = lt_optim_def(optim)->schema.name;
    if (!(config->lam >= 0 && isfinite(config->lam)))
        return lt_fail(LT_EUSAGE, "lam must be at least 0, but is %g", config->lam);
    if (!(rules[config->rule].needs & PLAIN_MOMENTUM) || strcmp(op, "momentum_step") == 0 ||
        strcmp(op, "sgd_step") == 0)
        return LT_OK;
    return lt_fail(LT_EUSAGE, "the rule %s works with optim.sgd, not with %.*s",
                   rules[config->rule].name, (int)strcspn(op, "_"), op);
}

static lt_status open_groups(lt_rule_state *s)
{
    lt_optim_range r = {0};
    int n = lt_optim_count(s->optim);
    LT_TRY(LT_CALLOC(s->all, n, "for asynchronous training"));
    memset(s->all, true, (size_t)n);
    while (lt_optim_next_range(s->optim, NULL, s->all, false, &r))
        if (r.group >= s->n_groups)
            s->n_groups = r.group + 1;
    LT_TRY(LT_CALLOC(s->stats, s->n_groups, "for asynchronous training"));
    lt_tensor *like = s->values.n > 0 ? s->values.arena[0] : NULL;
    for (int g = 0; g < s->n_groups && s->config.rule == LT_RULE_DDC; g++) {
        s->stats[g] =
            lt__tensor_new(like->ctx, like->storage->device, LT_F64, 1, &(int64_t){3}, true);
        if (!s->stats[g])
            return LT_ENOMEM;
        LT_TRY(lt_fill(s->stats[g], 0));
    }
    return LT_OK;
}

static void free_workers(lt_rule_state *s)
{
    for (int i = 0; i < s->config.workers; i++) {
        if (s->backup)
            lt__flat_buffers_free(&s->backup[i]);
        if (s->velocity)
            lt__flat_buffers_free(&s->velocity[i]);
    }
    free(s->backup);
    free(s->velocity);
    s->backup = s->velocity = NULL;
}

lt_status lt__rule_open_worker(lt_rule_state *s, int i)
{
    if (s->needs & BACKUP && !s->backup[i].arena) {
        LT_TRY(lt__flat_open(s->optim, LT_FLAT_NEW, &s->backup[i]));
        LT_TRY(lt__flat_buffers_copy(&s->backup[i], &s->values));
    }
    return s->needs & VELOCITY && !s->velocity[i].arena
               ? lt__flat_open(s->optim, LT_FLAT_NEW, &s->velocity[i])
               : LT_OK;
}

/* Allocates the flats of each worker, or with config.late their lists only. */
static lt_status open_workers(lt_rule_state *s, int workers)
{
    s->config.workers = workers;
    LT_TRY(LT_CALLOC(s->backup, workers, "for asynchronous training"));
    LT_TRY(LT_CALLOC(s->velocity, workers, "for asynchronous training"));
    for (int i = 0; i < workers && !s->config.late; i++)
        LT_TRY(lt__rule_open_worker(s, i));
    return LT_OK;
}

static lt_status open_state(lt_rule_state *s)
{
    LT_TRY(lt__flat_open(s->optim, LT_OPTIM_VALUES, &s->values));
    if (s->has_momentum)
        LT_TRY(lt__flat_open(s->optim, MOMENTUM_SLOT, &s->slot));
    else if (s->config.rule == LT_RULE_ORMO)
        LT_TRY(lt__flat_open(s->optim, LT_FLAT_NEW, &s->slot));
    if (s->needs & SQUARES)
        LT_TRY(lt__flat_open(s->optim, LT_FLAT_NEW, &s->squares));
    LT_TRY(open_groups(s));
    return open_workers(s, s->config.workers);
}

lt_rule_state *lt__rule_new(lt_optim *optim, const lt_rule_config *config)
{
    if (check_config(optim, config) != LT_OK)
        return NULL;
    lt_rule_state *s = lt__calloc(1, sizeof *s, "for asynchronous training");
    if (!s)
        return NULL;
    s->optim = optim;
    s->config = *config;
    s->needs = rules[config->rule].needs;
    s->has_momentum = strcmp(lt_optim_def(optim)->schema.name, "momentum_step") == 0;
    s->mean_delay = -1;
    if (config->lam == 0)
        s->config.lam = rules[config->rule].lam;
    if (config->rho == 0)
        s->config.rho = rules[config->rule].rho;
    if (config->cap == 0)
        s->config.cap = 1;
    if (open_state(s) == LT_OK)
        return s;
    lt__rule_free(s);
    return NULL;
}

void lt__rule_free(lt_rule_state *s)
{
    if (!s)
        return;
    free_workers(s);
    for (int g = 0; s->stats && g < s->n_groups; g++)
        lt_release(s->stats[g]);
    lt__flat_buffers_free(&s->values);
    lt__flat_buffers_free(&s->slot);
    lt__flat_buffers_free(&s->squares);
    free(s->stats);
    free(s->all);
    free(s);
}

size_t lt__rule_bytes_per_worker(const lt_rule_state *s)
{
    size_t n = (s->needs & BACKUP ? 1 : 0) + (s->needs & VELOCITY ? 1 : 0);
    return n * lt__flat_buffers_bytes(&s->values);
}

/* ==== Options ================================================================================= */

/* The value of an option of an update op; 0 if it does not have that option. */
static double option_of(const lt_def *def, const lt_opt *options, const char *name)
{
    int k = lt_schema_index(&def->schema, name);
    return k < 0 ? 0 : options[k].kind == LT_KIND_NUMBER ? options[k].f : (double)options[k].i[0];
}

lt_status lt__rule_check(lt_rule rule, const lt_def *def, const lt_opt *const *options,
                         int n_groups)
{
    if (!(rules[rule].needs & OWN_STEP))
        return LT_OK;
    for (int g = 0; g < n_groups; g++) {
        double momentum = option_of(def, options[g], "momentum");
        if (option_of(def, options[g], "nesterov") != 0)
            return lt_fail(LT_EUSAGE, "the rule %s cannot be used with nesterov = true",
                           rules[rule].name);
        if (momentum >= 1)
            return lt_fail(LT_EUSAGE, "the rule %s requires a momentum below 1, but it is %g",
                           rules[rule].name, momentum);
    }
    return LT_OK;
}

typedef struct call { /* a call of an op on a range */
    const lt_def *def;
    lt_opt opt[LT_MAX_OPT];
    lt_tensor *in[LT_MAX_IN];
    int n_in;
    lt_status status;
} call;

static call call_of(const lt_rule_state *s, const char *op)
{
    call c = {.def = lt_op_find(s->values.arena[0]->ctx, op)};
    if (!c.def)
        c.status = lt_errcode();
    for (int k = 0; c.def && k < c.def->schema.n_opt; k++)
        c.opt[k] = c.def->schema.opt[k].value;
    return c;
}

static void set_at(call *c, int k, double value)
{
    c->opt[k].n = 1;
    c->opt[k].kind = c->def->schema.opt[k].value.kind;
    if (c->opt[k].kind == LT_KIND_NUMBER)
        c->opt[k].f = value;
    else
        c->opt[k].i[0] = (int64_t)value;
}

static void set(call *c, const char *option, double value)
{
    int k = c->def ? lt_schema_find(&c->def->schema, option) : -1;
    if (k >= 0)
        set_at(c, k, value);
    else if (c->status == LT_OK)
        c->status = LT_EINVAL;
}

/* Appends x, which is taken, to the inputs. NULL means that its allocation has failed. */
static void add_tensor(call *c, lt_tensor *x)
{
    if (!x)
        c->status = LT_ENOMEM;
    c->in[c->n_in++] = x;
}

/* Appends the range of a flat to the inputs. */
static void add(call *c, const lt_flat_buffers *flat, const lt_optim_range *r)
{
    add_tensor(c, lt__flat_buffers_range(flat, r));
}

/* Runs the call and releases its inputs. */
static lt_status run(call *c)
{
    lt_status status = c->status;
    if (status == LT_OK)
        status = lt_apply(c->in[0]->ctx, c->def, c->in, c->n_in, c->opt, NULL);
    for (int i = 0; i < c->n_in; i++)
        lt_release(c->in[i]);
    return status;
}

/* ==== Applying ================================================================================ */

typedef struct place { /* a range in one push */
    const lt_rule_push *push;
    const lt_optim_range *range;
    const lt_opt *opt; /* options of its group */
    double lr, momentum, weight_decay;
} place;

static void add_gradient(call *c, const place *p)
{
    add_tensor(c, lt__gradient_range(p->push->gradient, p->range));
}

/* Changes the gradient by delay compensation. */
static lt_status compensate(lt_rule_state *s, const place *p)
{
    call c = call_of(s, "dc_grad");
    set(&c, "lam", s->config.lam);
    set(&c, "adaptive", s->needs & SQUARES ? 1 : 0);
    if (s->config.rule == LT_RULE_DC_M)
        set(&c, "weight_decay", p->weight_decay);
    add_gradient(&c, p);
    add(&c, &s->values, p->range);
    add(&c, &s->backup[p->push->worker], p->range);
    if (s->needs & SQUARES) {
        set(&c, "rho", s->config.rho);
        add(&c, &s->squares, p->range);
    }
    return run(&c);
}

static lt_status divide_by_gap(lt_rule_state *s, const place *p)
{
    call c = call_of(s, "gap_grad");
    set(&c, "lr", p->lr);
    set(&c, "rho", s->config.rho);
    set(&c, "correction", 1 - pow(s->config.rho, s->pushes));
    set(&c, "weight_decay", p->weight_decay);
    add_gradient(&c, p);
    add(&c, &s->values, p->range);
    add(&c, &s->backup[p->push->worker], p->range);
    if (s->has_momentum)
        add(&c, &s->slot, p->range);
    else
        add_gradient(&c, p);
    add(&c, &s->squares, p->range);
    return run(&c);
}

/* A call of the optimizer's op, without its inputs. steps: of the parameters before. */
static call own_call(const lt_rule_state *s, const lt_opt *options, double scale, int64_t steps)
{
    const lt_schema *schema = &lt_optim_def(s->optim)->schema;
    call c = {.def = lt_optim_def(s->optim)};
    memcpy(c.opt, options, (size_t)schema->n_opt * sizeof *c.opt);
    set(&c, "scale", scale);
    int step = lt_schema_index(schema, "step");
    if (step >= 0)
        set_at(&c, step, (double)(steps + 1));
    return c;
}

/* The optimizer's own step, with the gradient multiplied by `scale`. */
static lt_status own_step(lt_rule_state *s, const place *p, double scale)
{
    call c = own_call(s, p->opt, scale, p->range->steps);
    add(&c, &s->values, p->range);
    add_gradient(&c, p);
    for (int k = 0; k < c.def->schema.n_in - 2; k++)
        add_tensor(&c, lt__optim_range(s->optim, LT_OPTIM_FIRST_SLOT + k, p->range));
    return run(&c);
}

/* The options and the first two inputs that the steps of rules have in common. */
static call step_of(lt_rule_state *s, const place *p, const char *op)
{
    call c = call_of(s, op);
    set(&c, "lr", p->lr);
    set(&c, "momentum", p->momentum);
    set(&c, "weight_decay", p->weight_decay);
    add(&c, &s->values, p->range);
    add_gradient(&c, p);
    return c;
}

static lt_status dana_step(lt_rule_state *s, const place *p)
{
    call c = step_of(s, p, "momentum_step");
    set(&c, "nesterov", 1);
    add(&c, &s->velocity[p->push->worker], p->range);
    return run(&c);
}

/* The bucket of a gradient that was computed from this version. The first bucket has the gradients
 * of version 0, and each later bucket has the gradients of `workers` versions. */
static int64_t bucket_of(int64_t version, int workers) { return (version + workers - 1) / workers; }

static lt_status ordered_step(lt_rule_state *s, const place *p)
{
    int64_t version = p->push->version, read = version - p->push->delay;
    int64_t open = bucket_of(version, s->config.workers);
    bool opens = version > 0 && open != bucket_of(version - 1, s->config.workers);
    call c = step_of(s, p, "ordered_step");
    set(&c, "late", (double)(open - bucket_of(read, s->config.workers)));
    set(&c, "opens", opens);
    add(&c, &s->slot, p->range);
    return run(&c);
}

/* The weights of the momentum term and of the delayed gradient, r and q. lag: the number of steps
 * by which momentum delays a gradient on average. Both are 1 if there is no delay. */
static lt_status ddc_step(lt_rule_state *s, const place *p)
{
    double delay = (double)p->push->delay, lag = p->momentum / (1 - p->momentum), r = 1, q = 1;
    if (s->config.follow) {
        r = delay == 0 ? 1 : lag / (lag + delay);
        q = fmin(1, (1 + fmax(lag, s->mean_delay)) / (1 + delay));
    }
    call c = step_of(s, p, "ddc_step");
    set(&c, "r", r);
    set(&c, "q", q);
    set(&c, "lam", s->config.lam);
    set(&c, "cap", s->config.cap);
    set(&c, "rho", s->config.rho);
    add(&c, &s->velocity[p->push->worker], p->range);
    add(&c, &s->squares, p->range);
    add(&c, &s->backup[p->push->worker], p->range);
    c.in[c.n_in++] = lt_retain(s->stats[p->range->group]);
    return run(&c);
}

static lt_status apply_to(lt_rule_state *s, const place *p)
{
    double delay = (double)p->push->delay;
    switch (s->config.rule) {
    case LT_RULE_DC_C:
    case LT_RULE_DC_A:
    case LT_RULE_DC_M: LT_TRY(compensate(s, p)); break;
    case LT_RULE_GAP: LT_TRY(divide_by_gap(s, p)); break;
    case LT_RULE_DANA: return dana_step(s, p);
    case LT_RULE_ORMO: return ordered_step(s, p);
    case LT_RULE_DDC: return ddc_step(s, p);
    default: break;
    }
    return own_step(s, p, s->config.rule == LT_RULE_SA && delay > 1 ? 1 / delay : 1);
}

/* Steps of single elements show what the ops would refuse. */
lt_status lt__rule_check_push(lt_rule_state *s, const lt_gradient *g)
{
    static const int64_t one = 1;
    lt_ctx *ctx = s->values.arena[0]->ctx;
    LT_TRY(lt__rule_check(s->config.rule, lt_optim_def(s->optim), g->options, g->n_groups));
    for (int i = 0; i < g->n_groups; i++) {
        call c = own_call(s, g->options[i], 1, 0);
        for (int k = 0; k < c.def->schema.n_in; k++)
            add_tensor(&c, lt_tensor_full(ctx, LT_F32, 1, &one, 0));
        LT_TRY(run(&c));
    }
    return LT_OK;
}

lt_status lt__rule_pull(lt_rule_state *s, int worker)
{
    LT_TRY(lt__rule_open_worker(s, worker));
    return s->needs & BACKUP ? lt__flat_buffers_copy(&s->backup[worker], &s->values) : LT_OK;
}

lt_status lt__rule_apply(lt_rule_state *s, const lt_rule_push *push)
{
    lt_optim_range r = {0};
    const lt_def *def = lt_optim_def(s->optim);
    double delay = (double)push->delay;
    s->mean_delay = s->mean_delay < 0 ? delay : 0.99 * s->mean_delay + 0.01 * delay;
    s->pushes++;
    while (lt_optim_next_range(
        s->optim, push->gradient->options, push->gradient->present,
        s->config.rule == LT_RULE_DDC || lt_optim_def(s->optim)->op->whole_params, &r)) {
        const lt_opt *opt = push->gradient->options[r.group];
        const place p = {.push = push,
                         .range = &r,
                         .opt = opt,
                         .lr = option_of(def, opt, "lr"),
                         .momentum = option_of(def, opt, "momentum"),
                         .weight_decay = option_of(def, opt, "weight_decay")};
        LT_TRY(apply_to(s, &p));
        lt_optim_updated(s->optim, &r);
        lt_optim_count_step(s->optim, &r);
    }
    return LT_OK;
}

/* ==== Statistics and checkpoints ============================================================== */

lt_status lt__rule_stats(lt_rule_state *s, int group, lt_rule_stats *stats)
{
    double value[3] = {0};
    *stats = (lt_rule_stats){0};
    if (group >= s->n_groups || !s->stats[group])
        return LT_OK;
    for (int i = 0; i < 3; i++)
        LT_TRY(lt_item(s->stats[group], i, &value[i]));
    *stats = (lt_rule_stats){value[0], value[1], value[2]};
    return lt_fill(s->stats[group], 0);
}

bool lt__rule_flat(const lt_rule_state *s, int i, char name[32], const lt_flat_buffers **flat)
{
    bool own_slot = s->slot.n > 0 && !s->has_momentum;
    int workers = s->config.workers;
    const struct {
        const char *name;
        const lt_flat_buffers *flat;
        int n;
        bool per_worker;
    } lists[] = {{"squares", &s->squares, s->needs & SQUARES ? 1 : 0, false},
                 {"velocity", &s->slot, own_slot, false},
                 {"backup", s->backup, s->needs & BACKUP ? workers : 0, true},
                 {"velocity", s->velocity, s->needs & VELOCITY ? workers : 0, true}};
    size_t k = 0;
    while (k < sizeof lists / sizeof *lists && i >= lists[k].n)
        i -= lists[k++].n;
    if (k == sizeof lists / sizeof *lists)
        return false;
    if (lists[k].per_worker)
        snprintf(name, 32, "%s.%d", lists[k].name, i);
    else
        snprintf(name, 32, "%s", lists[k].name);
    *flat = &lists[k].flat[i];
    return true;
}

void lt__rule_save(const lt_rule_state *s, double numbers[LT_RULE_NUMBERS])
{
    numbers[0] = s->mean_delay;
    numbers[1] = s->pushes;
}

void lt__rule_load(lt_rule_state *s, const double numbers[LT_RULE_NUMBERS])
{
    s->mean_delay = numbers[0];
    s->pushes = numbers[1];
}
