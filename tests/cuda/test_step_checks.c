/* test_step_checks.c - kernels of deferred checks: what the CUDA backend decides in the stream
 * before the host learns of it. tests/device/test_deferred.c runs whole steps. */
#include "tests/cuda/reference.h"

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

TEST_CUDA(step_checks)
{
    static const int counts[] = {1, 2, 31, 256, 257, 1000};
    test_check_grads(m, 0, -1);
    for (int i = 0; i < COUNT(counts); i++)
        for (int k = 0; k < 4; k++)
            test_check_grads(m, counts[i],
                             k == 0   ? -1
                             : k == 1 ? 0
                             : k == 2 ? counts[i] / 2
                                      : counts[i] - 1);
}

/* A skip flag stays set, and the first loss that is not finite is kept. */
TEST_CUDA(losses)
{
    static const double value[] = {1, INFINITY, NAN, -2};
    for (int d = 0; d < COUNT(all); d++) {
        lt_step_check v = {0};
        void *to = put(m, &v, sizeof v);
        for (int i = 0; i < COUNT(value); i++) {
            lt_tensor *x = lt_tensor_full(m->ctx, all[d], 0, NULL, value[i]);
            mirror t = mirror_of(m, x, 1);
            must(m->cuda.check_loss(on_device(&t), to));
            get(m, &v, to, sizeof v);
            CHECK_EQ(v.skip, i > 0);
            CHECK(v.loss == (i > 0 ? INFINITY : 0));
            mirror_free(m, &t);
        }
        m->cuda.device->free(m->cuda.device, to, sizeof v);
    }
}

/* Here, too, a skip flag stays set. */
TEST_CUDA(norms)
{
    static const double squares[] = {0, 1, 4, 4.000001, 1e300, INFINITY, NAN};
    lt_step_check v = {0};
    void *to = put(m, &v, sizeof v);
    for (int i = 0; i < COUNT(squares); i++) {
        double norm = sqrt(squares[i]);
        mirror t = mirror_of(m, lt_tensor_full(m->ctx, LT_F64, 0, NULL, squares[i]), 0);
        must(m->cuda.clip(on_device(&t), 2, to));
        get(m, &v, to, sizeof v);
        CHECK_EQ(v.skip, i > 4);
        CHECK(i == 6 ? isnan(v.norm) : v.norm == (i == 5 ? INFINITY : 0));
        if (i < 5)
            CHECK(v.factor == (norm > 2 ? 2 / norm : 1));
        mirror_free(m, &t);
    }
    m->cuda.device->free(m->cuda.device, to, sizeof v);
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

TEST_CUDA(leftovers_are_zeroed)
{
    for (int d = 0; d < COUNT(all); d++)
        for (int64_t left = 0; left < 3; left += 2) {
            check_zero_leftover(m, all[d], left, 0, -1);
            check_zero_leftover(m, all[d], left, 300, -1);
            check_zero_leftover(m, all[d], left, 300, 0);
            check_zero_leftover(m, all[d], left, 300, 299);
        }
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

/* A factor in device memory has the same effect as the option "scale" or, for ops without that
 * option, as smaller gradients. */
TEST_CUDA(updates_with_a_factor)
{
    static const struct {
        const char *op, *options;
        int n;
    } cases[] = {{"sgd_step", "lr=0.1 weight_decay=0.01", 2},
                 {"momentum_step", "lr=0.1 weight_decay=0.01", 3},
                 {"lars_step", "lr=0.1 weight_decay=0.01", 3},
                 {"adam_step", "lr=0.1 step=1 weight_decay=0.01", 4},
                 {"ddc_step", "lr=0.1 r=0.5 q=0.75 weight_decay=0.01", 6},
                 {"ddc_step", "lr=0.1 r=0.5 q=0.75 lam=0.01", 6},
                 {"ordered_step", "lr=0.1 weight_decay=0.01 late=2 opens=true", 3}};
    static update_values got, want;
    for (int i = 0; i < COUNT(cases); i++) {
        char options[64];
        const char *op = cases[i].op;
        bool scales = lt_schema_index(&lt_op_find(m->ctx, op)->schema, "scale") >= 0;
        double factor = scales ? 0.3 : 0.25; /* a power of two does not round gradients */
        void *there = put(m, &factor, sizeof factor);
        snprintf(options, sizeof options, "%s%s", cases[i].options, scales ? " scale=0.3" : "");
        run_update(m, op, options, cases[i].n, scales ? 1 : 0.25f, NULL, want);
        run_update(m, op, cases[i].options, cases[i].n, 1, there, got);
        for (int k = 0; k < cases[i].n; k++)
            CHECK((memcmp(got[k], want[k], sizeof *got) == 0) == (scales || k != 1));
        m->cuda.device->free(m->cuda.device, there, sizeof factor);
    }
}
