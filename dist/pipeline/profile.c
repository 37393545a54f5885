/* profile.c - finds the units of a net, and measures them; see dist/plan.h.
 *
 * Here the net is a pipeline of one stage. In a dry profile, this stage is on another rank, so that
 * no op runs, and no parameter has memory. In both cases each op is recorded, with its inputs and
 * outputs. Only tensors of the stage are looked up, by address: the outputs of recorded ops. An
 * address that is used again is an output again.
 */
#include <stdlib.h>
#include <string.h>

#include "autograd/stages.h"
#include "core/tensor.h"
#include "dist/plan.h"

typedef struct leaf {           /* a parameter or buffer */
    const struct lt_leaf *leaf; /* its leaf, only compared; its half copy has the same leaf */
    double bytes;
} leaf;

typedef struct value {
    int unit, latest; /* the unit that makes the value; the last unit that used it so far */
    int64_t bytes;
    bool requires_grad;
    int *uses; /* (n) units, ascending */
    int n;
    size_t room;
} value;

typedef struct place { /* place of a tensor in the table */
    const lt_tensor *x;
    int value;
} place;

struct lt_profile {
    lt_ctx *ctx;
    bool is_dry;
    int passes, done; /* backward passes until the end; done so far */
    lt_pipe_net net;  /* units and parameters. Times are sums over the passes, at the first size */
    leaf *leaves;     /* (net.n_params) */
    value *values;
    place *table; /* a hash table of `slots` places, a power of two; at most half are in use */
    int *unit_of; /* (n_calls) unit of each forward call of the current pass, or -1 */
    int n_values, n_calls, n_places;
    int n_first; /* values of the first pass, which have uses */
    size_t params_room, leaves_room, units_room, values_room, calls_room;
    int slots;
    uint64_t first_call; /* number of the first call of the pass; 0 before it */
    uint64_t last_call;
    double last_seconds;
    bool in_weights; /* the second half of backward runs */
    bool failed;     /* out of memory */
    double began;    /* start of the pass */
    struct {
        double forward, inputs, weights;
    } totals; /* seconds of the timed passes, including time outside of ops */
};

/* ==== Lists =================================================================================== */

/* Makes room for one more item of a list. Returns false, and records the failure, if there is no
 * memory. */
#define GROW(p, list, n, room)                                                                     \
    (LT_RESERVE(list, (n) + 1, room, "for a profile of the net") == LT_OK || !((p)->failed = true))

static place *find_place(const lt_profile *p, const lt_tensor *x)
{
    size_t i = ((uintptr_t)x >> 4) * 0x9e3779b97f4a7c15u >> 20;
    for (;; i++) {
        place *at = &p->table[i & (size_t)(p->slots - 1)];
        if (at->x == x || !at->x)
            return at;
    }
}

/* Makes room for one more tensor in the table. */
static bool grow_table(lt_profile *p)
{
    if (2 * p->n_places < p->slots)
        return true;
    place *old = p->table;
    int n = p->slots;
    place *table = calloc((size_t)(n > 0 ? 2 * n : 1024), sizeof *table);
    if (!table) {
        p->failed = true;
        return false;
    }
    p->table = table;
    p->slots = n > 0 ? 2 * n : 1024;
    for (int i = 0; i < n; i++)
        if (old[i].x)
            *find_place(p, old[i].x) = old[i];
    free(old);
    return true;
}

static lt_pipe_param *find_param(const lt_profile *p, const lt_tensor *x)
{
    for (int i = 0; i < p->net.n_params && x->leaf; i++)
        if (p->leaves[i].leaf == x->leaf)
            return &p->net.params[i];
    return NULL;
}

/* ==== Units =================================================================================== */

/* The value of a tensor that an op of the net has made. NULL for any other tensor, and for NULL. */
static value *value_of(const lt_profile *p, const lt_tensor *x)
{
    bool may_be = x && p->slots > 0 && lt_stage_of(x) != LT_NO_STAGE && !find_param(p, x);
    const place *at = may_be ? find_place(p, x) : NULL;
    return at && at->x ? &p->values[at->value] : NULL;
}

/* Whether the op uses a parameter that no earlier op has used. */
static bool has_new_param(const lt_profile *p, lt_tensor *const *in, int n_in)
{
    bool is_new = false;
    for (int i = 0; i < n_in; i++) {
        const lt_pipe_param *w = in[i] ? find_param(p, in[i]) : NULL;
        is_new |= w && w->unit < 0;
    }
    return is_new;
}

/* Adds a unit that begins with the op, which is the first to use some of its inputs. */
static void begin_unit(lt_profile *p, lt_tensor *const *in, int n_in)
{
    if (!GROW(p, p->net.units, p->net.n_units, &p->units_room))
        return;
    lt_pipe_unit *u = &p->net.units[p->net.n_units];
    const char *name = NULL;
    *u = (lt_pipe_unit){.may_begin_stage = true};
    for (int i = 0; i < n_in; i++) {
        lt_pipe_param *w = in[i] ? find_param(p, in[i]) : NULL;
        if (!w || w->unit >= 0)
            continue;
        double bytes = p->leaves[w - p->net.params].bytes;
        name = name ? name : w->name;
        u->state_bytes += bytes;
        u->grad_bytes += lt_requires_grad(in[i]) ? bytes : 0;
        w->unit = p->net.n_units;
    }
    p->net.n_units++;
    p->failed |= !(u->name = strdup(name));
}

/* The unit of an op: the latest unit to which one of its inputs belongs. If it has no parameters,
 * the latest unit that has made or used one of its inputs, as in lt_stage_hooks. -1 if there is
 * none. *first: the earliest unit of its parameters; n_units if it has none. */
static int find_unit(const lt_profile *p, lt_tensor *const *in, int n_in, int *first)
{
    int unit = -1, latest = -1;
    *first = p->net.n_units;
    for (int i = 0; i < n_in; i++) {
        const lt_pipe_param *w = in[i] ? find_param(p, in[i]) : NULL;
        const value *v = value_of(p, in[i]);
        int of = w ? w->unit : v ? v->unit : -1;
        unit = LT_MAX(of, unit);
        latest = v && v->latest > latest ? v->latest : latest;
        *first = w && of < *first ? of : *first;
    }
    return *first == p->net.n_units && latest > unit ? latest : unit;
}

static void note_use(lt_profile *p, value *v, int unit)
{
    if (unit <= v->unit || (v->n > 0 && v->uses[v->n - 1] >= unit))
        return;
    if (GROW(p, v->uses, v->n, &v->room))
        v->uses[v->n++] = unit;
}

/* Adds the bytes of inputs that backward keeps and no op of the net has made, such as images. */
static void note_saved(lt_profile *p, const lt_def *def, lt_tensor *const *in, int n_in, int unit)
{
    for (int i = 0; i < n_in; i++)
        if (in[i] && !find_param(p, in[i]) && !value_of(p, in[i]) &&
            (def->op->save & LT_SAVE_IN(LT_MIN(i, 7))))
            p->net.units[unit].saved_bytes += (double)lt__tensor_bytes(in[i]);
}

/* Keeps the largest number of bytes of gradients of results that an op of the unit reads and writes
 * in its backward pass. */
static void note_grads(lt_profile *p, const lt_def *def, lt_tensor *const *in, int n_in,
                       lt_tensor *const *out, int unit)
{
    int n_out = lt_op_outputs(def->op);
    double bytes = 0;
    for (int i = 0; i < n_in; i++)
        if (in[i] && lt_requires_grad(in[i]) && !find_param(p, in[i]))
            bytes += (double)lt__tensor_bytes(in[i]);
    for (int i = 0; i < n_out; i++)
        if (lt_requires_grad(out[i]))
            bytes += (double)lt__tensor_bytes(out[i]);
    if (bytes > p->net.units[unit].back_bytes)
        p->net.units[unit].back_bytes = bytes;
}

/* Adds an output of an op. */
static void add_value(lt_profile *p, const lt_tensor *x, int unit)
{
    if (!GROW(p, p->values, p->n_values, &p->values_room) || !grow_table(p))
        return;
    p->values[p->n_values] = (value){.unit = unit,
                                     .latest = unit,
                                     .bytes = (int64_t)lt__tensor_bytes(x),
                                     .requires_grad = lt_requires_grad(x)};
    place *at = find_place(p, x);
    p->n_places += !at->x;
    *at = (place){x, p->n_values++};
}

/* Adds the seconds of the forward call that has just run to its unit. */
static void add_forward(lt_profile *p, int unit)
{
    if (p->last_call == 0)
        return;
    if (p->first_call == 0) {
        p->first_call = p->last_call;
        p->began = lt__seconds() - p->last_seconds;
    }
    for (uint64_t i = (uint64_t)p->n_calls; i <= p->last_call - p->first_call; i++) {
        if (!GROW(p, p->unit_of, p->n_calls, &p->calls_room))
            return;
        p->unit_of[p->n_calls++] = -1;
    }
    p->unit_of[p->last_call - p->first_call] = unit;
    if (p->done > 0 && unit >= 0)
        p->net.units[unit].forward[0] += p->last_seconds;
    p->last_call = 0;
}

/* Notes what only the first pass shows: where stages may begin, and which values are used and
 * saved. If an op uses a value that a later unit has already used, no stage may begin between its
 * parameters and that unit: the gradients of the value would be added in another order than in one
 * process. */
static void note_first(lt_profile *p, const lt_def *def, lt_tensor *const *in, int n_in, int first,
                       int unit)
{
    int end = unit;
    for (int i = 0; i < n_in; i++) {
        value *v = value_of(p, in[i]);
        if (v)
            note_use(p, v, unit);
        end = v && v->requires_grad && v->latest > end ? v->latest : end;
    }
    for (int i = first + 1; i <= end; i++)
        p->net.units[i].may_begin_stage = false; /* see lt_pipe_unit */
    note_saved(p, def, in, n_in, unit);
}

/* The first pass finds the units, and later ones repeat it. */
static void note(void *ud, const lt_def *def, lt_tensor *const *in, int n_in, lt_tensor *const *out)
{
    lt_profile *p = ud;
    int first, n_out = lt_op_outputs(def->op);
    bool is_first = p->done == 0;
    if (is_first && !p->failed && has_new_param(p, in, n_in))
        begin_unit(p, in, n_in);
    int unit = p->failed ? -1 : find_unit(p, in, n_in, &first);
    add_forward(p, unit);
    if (unit < 0)
        return;
    if (is_first) {
        note_first(p, def, in, n_in, first, unit);
        note_grads(p, def, in, n_in, out, unit);
    }
    for (int i = 0; i < n_in; i++) {
        value *v = value_of(p, in[i]);
        if (v && v->latest < unit)
            v->latest = unit;
    }
    for (int i = 0; i < n_out; i++) {
        add_value(p, out[i], unit);
        p->net.units[unit].saved_bytes += is_first ? (double)lt__tensor_bytes(out[i]) : 0;
    }
    p->n_first = is_first ? p->n_values : p->n_first;
    p->net.has_batch_norm |= strcmp(def->schema.name, "batch_norm") == 0;
}

/* ==== Times =================================================================================== */

static void time_call(void *ud, const lt_call *call, bool backward, double seconds)
{
    lt_profile *p = ud;
    uint64_t at = call->number - p->first_call;
    if (!backward) {
        p->last_call = call->number;
        p->last_seconds = seconds;
        return;
    }
    int unit = p->first_call && at < (uint64_t)p->n_calls ? p->unit_of[at] : -1;
    if (p->done == 0 || unit < 0)
        return;
    if (p->in_weights)
        p->net.units[unit].weights[0] += seconds;
    else
        p->net.units[unit].inputs[0] += seconds;
}

/* ==== The functions of lt_stage_hooks and lt_step_part ======================================== */

/* Notes a parameter or buffer. */
static int stage_of(void *ud, const char *name, const lt_tensor *x)
{
    lt_profile *p = ud;
    lt_pipe_net *net = &p->net;
    if (!GROW(p, net->params, net->n_params, &p->params_room) ||
        !GROW(p, p->leaves, net->n_params, &p->leaves_room))
        return 0;
    p->leaves[net->n_params] = (leaf){x->leaf, (double)lt__tensor_bytes(x)};
    net->params[net->n_params] = (lt_pipe_param){strdup(name), LT_PIPE_UNUSED};
    p->failed |= !net->params[net->n_params++].name;
    return 0;
}

/* In a dry profile, values that the script reads are 0. */
static lt_status receive(void *ud, lt_tensor *x, int from, int returns_to)
{
    (void)ud, (void)from, (void)returns_to;
    return lt_fill(x, 0);
}

/* Both halves of a split backward, timed. */
static lt_status run_backward(lt_profile *p, lt_tensor *loss, lt_tensor *grad)
{
    lt_deferred_wgrad *weights;
    double begun = lt__seconds();
    LT_TRY(lt_backward_from(p->ctx, &loss, &grad, 1, &weights));
    double half = lt__seconds();
    p->in_weights = true;
    lt_status status = lt_backward_weights(weights);
    p->in_weights = false;
    if (p->done > 0) {
        p->totals.forward += begun - p->began;
        p->totals.inputs += half - begun;
        p->totals.weights += lt__seconds() - half;
    }
    return status;
}

/* Ends a pass. LT_EDONE after the last one. */
static lt_status backward(void *ud, lt_tensor *loss, lt_tensor *grad)
{
    lt_profile *p = ud;
    if (!p->is_dry)
        LT_TRY(run_backward(p, loss, grad));
    if (p->failed)
        return lt_fail(LT_ENOMEM, "out of memory for a profile of the net");
    p->first_call = 0;
    p->n_calls = 0;
    if (++p->done > p->passes)
        return lt_fail(LT_EDONE, "the profile of the net is complete");
    return LT_OK;
}

/* ==== Opening and closing ===================================================================== */

lt_profile *lt_profile_new(lt_ctx *ctx, int passes)
{
    LT_NEED_CTX(ctx, NULL);
    if (passes < 0) {
        lt_fail(LT_EINVAL, "the number of timed passes must be at least 0, but is %d", passes);
        return NULL;
    }
    if (lt_check_no_part(ctx, LT_PART_SCHEDULE, NULL) != LT_OK)
        return NULL;
    lt_profile *p = lt__calloc(1, sizeof *p, "for a profile of the net");
    if (!p)
        return NULL;
    p->ctx = lt__ctx_retain(ctx);
    p->is_dry = passes == 0;
    p->passes = passes;
    const lt_stage_hooks stages = {.ud = p,
                                   .own = p->is_dry ? 1 : 0,
                                   .stages = p->is_dry ? 2 : 1,
                                   .stage_of = stage_of,
                                   .receive = receive,
                                   .note = note};
    const lt_step_part schedule = {.ud = p, .backward = backward};
    if (lt_set_stage_hooks(ctx, &stages) != LT_OK ||
        lt_set_part(ctx, LT_PART_SCHEDULE, &schedule) != LT_OK) {
        lt_profile_free(p);
        return NULL;
    }
    if (!p->is_dry)
        lt_set_timer(ctx, time_call, p);
    return p;
}

void lt_profile_free(lt_profile *p)
{
    if (!p)
        return;
    lt_status status = lt_set_stage_hooks(p->ctx, NULL);
    if (status == LT_OK)
        status = lt_set_part(p->ctx, LT_PART_SCHEDULE, NULL);
    (void)status; /* it fails only within backward */
    lt_set_timer(p->ctx, NULL, NULL);
    lt__ctx_release(p->ctx);
    for (int i = 0; i < p->n_values; i++)
        free(p->values[i].uses);
    lt_pipe_net_free(&p->net);
    free(p->leaves);
    free(p->values);
    free(p->table);
    free(p->unit_of);
    free(p);
}

bool lt_profile_is_complete(const lt_profile *p) { return p->done > p->passes; }

/* ==== The net ================================================================================= */

const lt_pipe_net *lt_profile_net(const lt_profile *p) { return &p->net; }

int lt_profile_unit_of(const lt_profile *p, const lt_tensor *x)
{
    const lt_pipe_param *w = find_param(p, x);
    return w ? w->unit : LT_PIPE_UNUSED;
}

lt_status lt_profile_rename(lt_profile *p, int unit, const char *name)
{
    if (unit < 0 || unit >= p->net.n_units)
        return lt_fail(LT_EINVAL, "a profile of %d units has no unit %d", p->net.n_units, unit);
    char *copy = strdup(name);
    if (!copy)
        return lt_fail(LT_ENOMEM, "out of memory for a profile of the net");
    free(p->net.units[unit].name);
    p->net.units[unit].name = copy;
    return LT_OK;
}

lt_status lt_profile_take_net(lt_profile *p, double images, lt_pipe_net *net)
{
    bool on_cpu = strcmp(lt_device_name(p->ctx), "cpu") == 0;
    lt_pipe_value *values;
    LT_TRY(LT_CALLOC(values, p->n_first + 1, "for the net of a profile"));
    *net = p->net;
    p->net = (lt_pipe_net){0};
    net->values = values;
    for (value *v = p->values; v < p->values + p->n_first; v++)
        if (v->n > 0) {
            values[net->n_values++] = (lt_pipe_value){v->unit, v->uses, v->n,
                                                      (double)v->bytes / images, v->requires_grad};
            v->uses = NULL;
        }
    for (lt_pipe_unit *u = net->units; u < net->units + net->n_units; u++) {
        u->saved_bytes /= images;
        u->back_bytes /= images;
        u->work_bytes = on_cpu ? u->grad_bytes : 0; /* oneDNN cannot add to gradients of weights */
    }
    return LT_OK;
}

void lt_pipe_net_free(lt_pipe_net *net)
{
    for (int i = 0; i < net->n_units; i++)
        free(net->units[i].name);
    for (int i = 0; i < net->n_params; i++)
        free(net->params[i].name);
    for (int i = 0; i < net->n_values; i++)
        free(net->values[i].uses);
    free(net->units);
    free(net->params);
    free(net->values);
    *net = (lt_pipe_net){0};
}

/* The seconds of a pass, divided by the seconds of its ops in all passes. */
static double scale(const lt_profile *p, double total, double ops)
{
    return ops > 0 ? total / ops / p->passes : 0;
}

lt_status lt_profile_add_times(const lt_profile *p, double images, lt_pipe_net *net)
{
    double forward = 0, inputs = 0, weights = 0;
    int k = net->n_sizes;
    if (p->net.n_units != net->n_units || k >= LT_PIPE_SIZES)
        return lt_fail(LT_EINVAL,
                       "a profile of %d units cannot be added to a net of %d units, which was "
                       "measured at %d sizes",
                       p->net.n_units, net->n_units, k);
    for (const lt_pipe_unit *u = p->net.units; u < p->net.units + p->net.n_units; u++) {
        forward += u->forward[0];
        inputs += u->inputs[0];
        weights += u->weights[0];
    }
    for (int i = 0; i < p->net.n_units; i++) {
        const lt_pipe_unit *from = &p->net.units[i];
        lt_pipe_unit *to = &net->units[i];
        to->forward[k] = from->forward[0] * scale(p, p->totals.forward, forward);
        to->inputs[k] = from->inputs[0] * scale(p, p->totals.inputs, inputs);
        to->weights[k] = from->weights[0] * scale(p, p->totals.weights, weights);
    }
    net->sizes[net->n_sizes++] = images;
    return LT_OK;
}
