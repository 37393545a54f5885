/* test_deferred.c - deferred checks: what the CUDA backend decides in the stream before the host
 * learns of it. The emulated stream runs nothing until the host waits. */
#include "amp/amp.h"
#include "tests/cuda/reference.h"
#include "tests/device/emu.h"

#define COUNT(list) ((int)(sizeof(list) / sizeof *(list)))

static const lt_dtype all[] = {LT_F32, LT_F16, LT_BF16, LT_F64};

/* Copies bytes to new device memory. New. */
static void *put(machine *m, const void *from, size_t bytes)
{
    lt_device *d = m->cuda.device;
    void *p = d->alloc(d, bytes);
    CHECK(p != NULL);
    must(d->copy(d, p, from, bytes));
    return p;
}

static void get(machine *m, void *to, const void *from, size_t bytes)
{
    must(m->cuda.device->copy(m->cuda.device, to, from, bytes));
    must(m->cuda.device->sync(m->cuda.device));
}

/* ==== Step checks ============================================================================= */

/* n rows of gradient statistics; row `odd`, if any, has values that are not finite. */
static void test_check_grads(machine *m, int n, int odd)
{
    lt_grad_stats *rows = calloc((size_t)n + 1, sizeof *rows), want = {0};
    lt_step_check v = {.loss = 3};
    for (int i = 0; i < n; i++)
        rows[i] = (lt_grad_stats){i == n / 3 ? 7.5 : 0.25, i == odd ? 5 : 0};
    if (n > 0)
        want = (lt_grad_stats){7.5, odd >= 0 ? 5 : 0};
    void *there = put(m, rows, (size_t)(n + 1) * sizeof *rows), *to = put(m, &v, sizeof v);
    must(m->cuda.check_grads(m->cuda.device, there, n, to));
    get(m, &v, to, sizeof v);
    CHECK_EQ(v.skip, odd >= 0);
    CHECK(v.loss == 3 && v.grads.largest == want.largest);
    CHECK_EQ(v.grads.not_finite, want.not_finite);
    m->cuda.device->free(m->cuda.device, there, (size_t)(n + 1) * sizeof *rows);
    m->cuda.device->free(m->cuda.device, to, sizeof v);
    free(rows);
}

TEST(step_checks)
{
    static const int counts[] = {1, 2, 31, 256, 257, 1000};
    machine m = machine_open();
    test_check_grads(&m, 0, -1);
    for (int i = 0; i < COUNT(counts); i++)
        for (int k = 0; k < 4; k++)
            test_check_grads(&m, counts[i],
                             k == 0   ? -1
                             : k == 1 ? 0
                             : k == 2 ? counts[i] / 2
                                      : counts[i] - 1);
    lt_ctx_free(m.ctx);
}

/* A skip flag stays set, and the first loss that is not finite is kept. */
TEST(losses)
{
    static const double value[] = {1, INFINITY, NAN, -2};
    machine m = machine_open();
    for (int d = 0; d < COUNT(all); d++) {
        lt_step_check v = {0};
        void *to = put(&m, &v, sizeof v);
        for (int i = 0; i < COUNT(value); i++) {
            lt_tensor *x = lt_tensor_full(m.ctx, all[d], 0, NULL, value[i]);
            mirror t = mirror_of(&m, x, 1);
            must(m.cuda.check_loss(on_device(&t), to));
            get(&m, &v, to, sizeof v);
            CHECK_EQ(v.skip, i > 0);
            CHECK(v.loss == (i > 0 ? INFINITY : 0));
            mirror_free(&m, &t);
        }
        m.cuda.device->free(m.cuda.device, to, sizeof v);
    }
    lt_ctx_free(m.ctx);
}

/* Here, too, a skip flag stays set. */
TEST(norms)
{
    static const double squares[] = {0, 1, 4, 4.000001, 1e300, INFINITY, NAN};
    machine m = machine_open();
    lt_step_check v = {0};
    void *to = put(&m, &v, sizeof v);
    for (int i = 0; i < COUNT(squares); i++) {
        double norm = sqrt(squares[i]);
        mirror t = mirror_of(&m, lt_tensor_full(m.ctx, LT_F64, 0, NULL, squares[i]), 0);
        must(m.cuda.clip(on_device(&t), 2, to));
        get(&m, &v, to, sizeof v);
        CHECK_EQ(v.skip, i > 4);
        CHECK(i == 6 ? isnan(v.norm) : v.norm == (i == 5 ? INFINITY : 0));
        if (i < 5)
            CHECK(v.factor == (norm > 2 ? 2 / norm : 1));
        mirror_free(&m, &t);
    }
    m.cuda.device->free(m.cuda.device, to, sizeof v);
    lt_ctx_free(m.ctx);
}

static void check_zero_leftover(machine *m, lt_dtype dtype, int64_t left, int n, int odd)
{
    lt_grad_stats rows[301] = {{left > 0 ? 0 : 2, left}};
    int64_t count = 1001;
    for (int i = 1; i <= n; i++)
        rows[i] = (lt_grad_stats){1, i - 1 == odd};
    lt_grad_stats *there = put(m, rows, sizeof rows);
    lt_tensor *x = values(m, dtype, 1, &count, 5, true);
    mirror t = mirror_of(m, x, 1);
    must(m->cuda.zero_leftover(on_device(&t), there, there + 1, n));
    if (left > 0 && odd < 0)
        must(lt_fill(x, 0));
    compare(m, lt_dtype_name(dtype), &t, 0);
    mirror_free(m, &t);
    m->cuda.device->free(m->cuda.device, there, sizeof rows);
}

TEST(leftovers_are_zeroed)
{
    machine m = machine_open();
    for (int d = 0; d < COUNT(all); d++)
        for (int64_t left = 0; left < 3; left += 2) {
            check_zero_leftover(&m, all[d], left, 0, -1);
            check_zero_leftover(&m, all[d], left, 300, -1);
            check_zero_leftover(&m, all[d], left, 300, 0);
            check_zero_leftover(&m, all[d], left, 300, 299);
        }
    lt_ctx_free(m.ctx);
}

/* ==== Skipped steps =========================================================================== */

/* Checks that an in-place op leaves its tensors unchanged if skip is set, and only then. */
static void check_skip(machine *m, const char *op, const char *options, int n, int32_t skip)
{
    int64_t count = 1001;
    lt_opt opts[LT_MAX_OPT];
    mirror t[4];
    lt_tensor *in[4];
    const lt_def *def = lt_op_find(m->ctx, op);
    int32_t *there = put(m, &skip, sizeof skip);
    CHECK_OK(lt_opts_parse(&def->schema, options, opts));
    for (int i = 0; i < n; i++) {
        t[i] = mirror_of(m, values(m, LT_F32, 1, &count, (uint32_t)i + 1, false), 0);
        in[i] = on_device(&t[i]);
    }
    lt_call c = {.ctx = m->ctx,
                 .op = def->op,
                 .schema = &def->schema,
                 .opt = opts,
                 .n_in = n,
                 .in = in,
                 .skip = there,
                 .device = m->cuda.device};
    run_on_device(m, def, &c, false);
    if (skip)
        for (int i = 0; i < n; i++)
            compare(m, op, &t[i], 0);
    float first, was = *(float *)t[0].host->data;
    get(m, &first, t[0].tensor.data, sizeof first);
    CHECK_EQ(first == was, skip != 0);
    for (int i = 0; i < n; i++)
        mirror_free(m, &t[i]);
    m->cuda.device->free(m->cuda.device, there, sizeof skip);
}

TEST(skipped_updates)
{
    machine m = machine_open();
    for (int32_t skip = 0; skip < 2; skip++) {
        check_skip(&m, "sgd_step", "lr=0.1", 2, skip);
        check_skip(&m, "momentum_step", "lr=0.1", 3, skip);
        check_skip(&m, "lars_step", "lr=0.1", 3, skip);
        check_skip(&m, "adam_step", "lr=0.1 step=1", 4, skip);
        check_skip(&m, "dc_grad", "lam=0.1", 3, skip);
        check_skip(&m, "ordered_step", "lr=0.1 late=1", 3, skip);
        check_skip(&m, "batch_norm_update", "count=8 momentum=0.1", 4, skip);
    }
    lt_ctx_free(m.ctx);
}

/* ==== Factors ================================================================================= */

enum { COUNT_W = 1001 };
typedef float update_values[LT_MAX_IN][COUNT_W]; /* weights, gradients and state */

/* Runs an update on the device, with the gradients multiplied by `by`, and copies its n tensors to
 * out. */
static void run_update(machine *m, const char *op, const char *options, int n, float by,
                       const double *factor, update_values out)
{
    lt_opt opts[LT_MAX_OPT];
    mirror t[LT_MAX_IN];
    lt_tensor *in[LT_MAX_IN];
    const lt_def *def = lt_op_find(m->ctx, op);
    CHECK_OK(lt_opts_parse(&def->schema, options, opts));
    for (int i = 0; i < n; i++) {
        int64_t count = i == 5 ? 3 : COUNT_W; /* input 5 is the statistics of ddc_step */
        lt_tensor *x = values(m, LT_F32, 1, &count, (uint32_t)i + 1, false);
        adjust(x, 0, n == 6 && i == 3, 0); /* its mean squares */
        for (int64_t k = 0; i == 1 && k < count; k++)
            ((float *)x->data)[k] *= by;
        t[i] = mirror_of(m, x, 0);
        in[i] = on_device(&t[i]);
    }
    lt_call c = {.ctx = m->ctx,
                 .op = def->op,
                 .schema = &def->schema,
                 .opt = opts,
                 .n_in = n,
                 .in = in,
                 .factor = factor,
                 .device = m->cuda.device};
    run_on_device(m, def, &c, false);
    for (int i = 0; i < n; i++) {
        get(m, out[i], t[i].tensor.data, (size_t)t[i].tensor.count * sizeof(float));
        mirror_free(m, &t[i]);
    }
}

/* A factor in device memory has the same effect as the option "scale". */
TEST(updates_with_a_factor)
{
    static const struct {
        const char *op, *options;
        int n;
    } cases[] = {{"sgd_step", "lr=0.1 weight_decay=0.01", 2},
                 {"momentum_step", "lr=0.1 weight_decay=0.01", 3},
                 {"lars_step", "lr=0.1 weight_decay=0.01", 3},
                 {"adam_step", "lr=0.1 step=1 weight_decay=0.01", 4}};
    static update_values got, want;
    machine m = machine_open();
    double factor = 0.3;
    void *there = put(&m, &factor, sizeof factor);
    for (int i = 0; i < COUNT(cases); i++) {
        char scaled[64];
        snprintf(scaled, sizeof scaled, "%s scale=0.3", cases[i].options);
        run_update(&m, cases[i].op, scaled, cases[i].n, 1, NULL, want);
        run_update(&m, cases[i].op, cases[i].options, cases[i].n, 1, there, got);
        CHECK(memcmp(got, want, (size_t)cases[i].n * sizeof *got) == 0);
    }
    m.cuda.device->free(m.cuda.device, there, sizeof factor);
    lt_ctx_free(m.ctx);
}

/* For ops without that option: a factor has the same effect as smaller gradients. */
TEST(updates_with_delayed_gradients_and_a_factor)
{
    static const struct {
        const char *op, *options;
        int n;
    } cases[] = {{"ddc_step", "lr=0.1 r=0.5 q=0.75 weight_decay=0.01", 6},
                 {"ddc_step", "lr=0.1 r=0.5 q=0.75 lam=0.01", 6},
                 {"ordered_step", "lr=0.1 weight_decay=0.01 late=2 opens=true", 3}};
    static update_values got, want;
    machine m = machine_open();
    double factor = 0.25;
    void *there = put(&m, &factor, sizeof factor);
    for (int i = 0; i < COUNT(cases); i++) {
        run_update(&m, cases[i].op, cases[i].options, cases[i].n, 0.25f, NULL, want);
        run_update(&m, cases[i].op, cases[i].options, cases[i].n, 1, there, got);
        for (int k = 0; k < cases[i].n; k++)
            CHECK((memcmp(got[k], want[k], sizeof *got) == 0) == (k != 1));
    }
    m.cuda.device->free(m.cuda.device, there, sizeof factor);
    lt_ctx_free(m.ctx);
}

/* ==== Steps =================================================================================== */

enum { STEPS = 8, COUNT_P = 5000 };

typedef struct training {
    lt_ctx *ctx;
    lt_tensor *p, *x;
    lt_params *params;
    lt_optim *optim;
    lt_loss_scale *scale; /* or NULL */
    lt_opt opts[LT_MAX_OPT];
} training;

static training training_new(bool on_device, bool scaled)
{
    training t = {.ctx = on_device ? open_device() : open_reference()};
    lt_scaler scaler = lt_scaler_init(LT_SCALE_DYNAMIC, 8, 2);
    t.p = lt_param_new(t.ctx, LT_F32, 1, (int64_t[]){COUNT_P}, (lt_init){LT_INIT_NORMAL, 0, 1});
    t.x = lt_tensor_new(t.ctx, LT_F32, 1, (int64_t[]){COUNT_P});
    CHECK_OK(lt_fill_normal(t.x, LT_RNG_USER, 1, 0, 1, 1));
    t.params = lt_params_new(t.ctx);
    CHECK_OK(lt_params_add(t.params, "p", t.p));
    CHECK_OK(lt_params_place(t.params));
    t.optim = lt_optim_new(t.ctx, "momentum_step", &t.p, 1);
    CHECK_OK(lt_opts_parse(&lt_optim_def(t.optim)->schema, "lr=0.25", t.opts));
    if (scaled) {
        t.scale = lt_loss_scale_new(t.ctx, &scaler);
        CHECK_OK(lt_use_loss_scale(t.ctx, t.scale));
    }
    return t;
}

static void training_free(training *t)
{
    CHECK_OK(lt_use_loss_scale(t->ctx, NULL));
    lt_loss_scale_free(t->scale);
    lt_optim_free(t->optim);
    lt_params_free(t->params);
    lt_release(t->p);
    lt_release(t->x);
    lt_ctx_free(t->ctx);
}

/* Backward of by * mean(p x). Each element of the gradient has the bits of the CPU's. */
static lt_status backward(training *t, double by)
{
    lt_tensor *a = lt_run(t->ctx, "mul", NULL, t->p, t->x, NULL);
    lt_tensor *factor = lt_tensor_full(t->ctx, LT_F32, 0, NULL, by);
    lt_tensor *b = lt_run(t->ctx, "mean", NULL, a, NULL);
    lt_tensor *loss = lt_run(t->ctx, "mul", NULL, b, factor, NULL);
    lt_status status = lt_backward(loss, NULL);
    lt_tensor *temporaries[] = {loss, b, factor, a};
    for (int i = 0; i < 4; i++)
        lt_release(temporaries[i]);
    return status;
}

static lt_status update(training *t, lt_step_status *step_status)
{
    return lt_optim_step(t->optim, (const lt_opt *[]){t->opts}, 1, step_status);
}

static lt_status step(training *t, double by)
{
    LT_TRY(backward(t, by));
    return update(t, NULL);
}

/* Updates with gradients clipped to a norm of 0.01. */
static lt_status clipped_update(training *t)
{
    return lt_optim_step_clipped(t->optim, (const lt_opt *[]){t->opts}, 1, 0.01, NULL, NULL);
}

static lt_status clipped_step(training *t, double by)
{
    LT_TRY(backward(t, by));
    return clipped_update(t);
}

/* Whether the weights have this SHA-256. */
static bool has_weights(training *t, const char *hex)
{
    char now[65];
    CHECK_OK(lt_params_sha256(t->params, now));
    return strcmp(now, hex) == 0;
}

/* Checks that the last step was skipped, and that the next one is applied. */
static void check_continues(training *t, lt_status (*run_step)(training *, double),
                            const char *before)
{
    CHECK(has_weights(t, before));
    CHECK_EQ(lt_optim_step_status(t->optim), LT_SKIPPED);
    CHECK_OK(run_step(t, 1));
    CHECK_OK(lt_synchronize(t->ctx));
    CHECK_EQ(lt_optim_step_status(t->optim), LT_APPLIED);
    CHECK(!has_weights(t, before));
}

static int64_t counted(int what)
{
    int64_t (*count)(int);
    *(void **)&count = from_plugin("shim_count");
    return count(what);
}

/* Two consecutive steps overflow, and a single one. Each step waits at most once, for the one
 * before. */
TEST(steps_that_overflow)
{
    char hex[2][65];
    lt_scaler scaler[2];
    use_plugins("");
    for (int i = 0; i < 2; i++) {
        training t = training_new(i == 1, true);
        for (int k = 0; k < STEPS; k++) {
            int64_t waits = counted(SHIM_WAITS), drains = counted(SHIM_DRAINS);
            bool spike = k == 2 || k == 3 || k == STEPS - 1;
            CHECK_OK(step(&t, spike ? 0x1p125 : 1));
            CHECK(k < 2 || counted(SHIM_WAITS) - waits <= 1);
            CHECK(k < 2 || counted(SHIM_DRAINS) == drains);
        }
        scaler[i] = *lt_loss_scale_scaler(t.scale);
        CHECK_OK(lt_params_sha256(t.params, hex[i]));
        training_free(&t);
    }
    CHECK_EQ(scaler[0].skipped, 3);
    CHECK(memcmp(&scaler[0], &scaler[1], sizeof scaler[0]) == 0);
    CHECK_STR(hex[1], hex[0]);
}

/* With and without a loss scale. */
TEST(steps_that_are_clipped)
{
    char hex[2][65];
    use_plugins("");
    for (int scaled = 0; scaled < 2; scaled++) {
        for (int i = 0; i < 2; i++) {
            training t = training_new(i == 1, scaled);
            for (int k = 0; k < STEPS; k++) {
                int64_t waits = counted(SHIM_WAITS), drains = counted(SHIM_DRAINS);
                CHECK_OK(clipped_step(&t, k == 3 ? 0.01 : scaled && k == 5 ? 0x1p125 : 1));
                CHECK(k < 2 || counted(SHIM_WAITS) - waits <= 1);
                CHECK(k < 2 || counted(SHIM_DRAINS) == drains);
            }
            CHECK_OK(lt_params_sha256(t.params, hex[i]));
            training_free(&t);
        }
        CHECK_STR(hex[1], hex[0]);
    }
}

/* The device finds it, and it fails like a loss that is not finite. */
TEST(a_norm_that_is_not_finite)
{
    char before[65];
    use_plugins("");
    training t = training_new(true, false);
    CHECK_OK(clipped_step(&t, 1));
    CHECK_OK(lt_params_sha256(t.params, before));
    CHECK_OK(backward(&t, 1));
    CHECK_OK(lt_fill(lt_grad(t.p), INFINITY));
    CHECK_OK(clipped_update(&t));
    CHECK_FAILS(clipped_step(&t, 1), LT_ENUMERIC,
                "the norm of the gradients is inf at step 2; "
                "check the learning rate and the data");
    check_continues(&t, clipped_step, before);
    training_free(&t);
}

/* The second optimizer of a step clips without a wait. A step before the first backward is an
 * error. */
TEST(two_optimizers_that_clip)
{
    use_plugins("");
    training t = training_new(true, false);
    lt_optim *other = lt_optim_new(t.ctx, "momentum_step", &t.p, 1);
    CHECK_FAILS(clipped_update(&t), LT_EINVAL,
                "an optimizer step has no gradients: no backward has run since the last step; call "
                "backward on the loss first");
    for (int k = 0; k < 4; k++) {
        CHECK_OK(clipped_step(&t, 1));
        int64_t waits = counted(SHIM_WAITS);
        CHECK_OK(lt_optim_step_clipped(other, (const lt_opt *[]){t.opts}, 1, 1, NULL, NULL));
        CHECK_EQ(counted(SHIM_WAITS), waits);
    }
    char before[65];
    CHECK_OK(lt_synchronize(t.ctx));
    CHECK_OK(lt_params_sha256(t.params, before));
    CHECK_OK(backward(&t, NAN));
    CHECK_OK(update(&t, NULL));
    CHECK_OK(lt_optim_step_clipped(other, (const lt_opt *[]){t.opts}, 1, 1, NULL, NULL));
    CHECK_FAILS(lt_synchronize(t.ctx), LT_ENUMERIC, "the loss is nan at step 9");
    CHECK(has_weights(&t, before));
    lt_optim_free(other);
    training_free(&t);
}

/* The error comes from the next step or from lt_synchronize(). The weights do not change. */
TEST(a_loss_that_is_not_finite)
{
    char before[65];
    use_plugins("");
    for (int synchronize = 0; synchronize < 2; synchronize++) {
        training t = training_new(true, false);
        CHECK_OK(step(&t, 1));
        CHECK_OK(lt_params_sha256(t.params, before));
        CHECK_OK(step(&t, NAN));
        CHECK_FAILS(synchronize ? lt_synchronize(t.ctx) : step(&t, 1), LT_ENUMERIC,
                    "the loss is nan at step 2; check the learning rate and the data");
        check_continues(&t, step, before);
        training_free(&t);
    }
}

/* One of several backwards of a step has such a loss. The error is reported once, and no step uses
 * the gradients of that step. */
TEST(a_micro_batch_whose_loss_is_not_finite)
{
    char before[65];
    lt_step_status step_status;
    use_plugins("");
    training t = training_new(true, false);
    CHECK_OK(lt_params_sha256(t.params, before));
    CHECK_OK(backward(&t, -INFINITY));
    CHECK_FAILS(backward(&t, 1), LT_ENUMERIC,
                "the loss is inf at step 1; check the learning rate and the data");
    CHECK_OK(backward(&t, 1));
    CHECK_OK(backward(&t, 1));
    CHECK_OK(lt_synchronize(t.ctx));
    CHECK_OK(update(&t, &step_status));
    CHECK_EQ(step_status, LT_SKIPPED);
    CHECK(has_weights(&t, before));
    CHECK_OK(backward(&t, 1));
    CHECK_OK(update(&t, &step_status));
    CHECK_EQ(step_status, LT_PENDING);
    CHECK_EQ(lt_optim_step_status(t.optim), LT_APPLIED);
    training_free(&t);
}
