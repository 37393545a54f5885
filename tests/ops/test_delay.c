/* test_delay.c - the update ops of asynchronous training (ops/delay.c): their formulas against
 * plain loops in double, the cases in which bits must not change, and values at which a norm or a
 * divisor is 0. cases.txt has more formulas, checked against PyTorch. */
#include "autograd/tape.h"
#include "tests/ops/cases.h"

enum { N = 40007, MAX_N = 100003 }; /* elements: several blocks, and a part of one */
enum { G, W, BACKUP, V, MS };       /* inputs of dc_grad (without v) and gap_grad */
enum { DDC_W, DDC_G, DDC_V, DDC_S, DDC_BACKUP, DDC_STATS, DDC_IN };

/* ==== Helpers ================================================================================= */

static lt_ctx *open_threads(int threads)
{
    return ctx_with((lt_config){.threads = threads, .poison = true});
}

/* n random numbers with mean 0, or their absolute values. New. */
static block numbers(lt_dtype dtype, int64_t n, int seed, bool positive)
{
    block b = block_new(LT_F64, 1, &n);
    for (int64_t i = 0; i < n; i++) {
        double x = normal((uint64_t)seed * 1000003, (uint64_t)i);
        b.at[i] = positive ? fabs(x) : x;
    }
    block_round(&b, dtype);
    return b;
}

static block constants(lt_dtype dtype, int64_t n, double value)
{
    block b = block_new(dtype, 1, &n);
    for (int64_t i = 0; i < n; i++)
        b.at[i] = value;
    return b;
}

/* The inputs of a call. */
typedef struct call {
    const char *op, *options;
    int n_in;
    block in[LT_MAX_IN];
} call;

/* Random inputs; state that must not be negative is not. */
static call call_of(const char *op, const char *options, lt_dtype dtype, int64_t n)
{
    bool ddc = strcmp(op, "ddc_step") == 0, gap = strcmp(op, "gap_grad") == 0;
    bool ordered = strcmp(op, "ordered_step") == 0;
    call c = {op, options, ddc ? DDC_IN : gap ? 5 : ordered ? 3 : 4, {{0}}};
    for (int i = 0; i < c.n_in; i++) {
        bool square = ddc ? i == DDC_S : gap ? i == MS : !ordered && i == 3;
        c.in[i] = numbers(dtype, n, i + 1, square);
    }
    if (ddc) {
        block_free(&c.in[DDC_STATS]);
        c.in[DDC_STATS] = constants(LT_F64, 3, 0);
    }
    return c;
}

static void call_free(call *c)
{
    for (int i = 0; i < c->n_in; i++)
        block_free(&c->in[i]);
}

static call call_copy(const call *c)
{
    call copy = *c;
    for (int i = 0; i < c->n_in; i++)
        copy.in[i] = block_copy(&c->in[i]);
    return copy;
}

/* Runs the op and replaces c->in with the inputs after it. Input `same` is the same tensor as the
 * earlier input `as`, unless it is -1. */
static void run_shared(lt_ctx *ctx, call *c, int same, int as, const double *factor)
{
    const lt_def *def = lt_op_find(ctx, c->op);
    lt_tensor *in[LT_MAX_IN] = {NULL};
    lt_opt opts[LT_MAX_OPT];
    CHECK_OK(lt_opts_parse(&def->schema, c->options, opts));
    for (int i = 0; i < c->n_in; i++)
        in[i] = i == same ? lt_retain(in[as]) : block_tensor(ctx, &c->in[i], c->in[i].dtype);
    lt_call direct = {.ctx = ctx,
                      .device = ctx->devices[0],
                      .op = def->op,
                      .schema = &def->schema,
                      .opt = opts,
                      .n_in = c->n_in,
                      .in = in,
                      .factor = factor};
    CHECK_OK(factor ? lt__run_kernel(&direct, def, false)
                    : lt_apply(ctx, def, in, c->n_in, opts, NULL));
    for (int i = 0; i < c->n_in; i++) {
        block_free(&c->in[i]);
        c->in[i] = block_of(in[i]);
        lt_release(in[i]);
    }
}

static void run(lt_ctx *ctx, call *c) { run_shared(ctx, c, -1, -1, NULL); }

static void check_bits(const char *what, const block *got, const block *want)
{
    CHECK_EQ(got->count, want->count);
    for (int64_t i = 0; i < got->count; i++)
        if (memcmp(&got->at[i], &want->at[i], sizeof *got->at) != 0)
            FAIL("%s[%lld] is %a, not %a", what, (long long)i, got->at[i], want->at[i]);
}

/* Checks that the values differ by a few roundoffs of `size`, or of the value. */
static void check_near(const char *what, const block *got, const block *want, double size)
{
    double by = 16 * (got->dtype == LT_F64 ? 0x1p-53 : 0x1p-24);
    for (int64_t i = 0; i < got->count; i++)
        if (!(fabs(got->at[i] - want->at[i]) <= by * (size + fabs(want->at[i]))))
            FAIL("%s[%lld] is %.17g, not %.17g", what, (long long)i, got->at[i], want->at[i]);
}

static const lt_dtype dtypes[] = {LT_F64, LT_F32};

/* ==== Formulas ================================================================================ */

static void check_dc(lt_ctx *ctx, lt_dtype dtype, bool adaptive)
{
    call c = call_of("dc_grad",
                     adaptive ? "lam=2 rho=0.75 adaptive=true weight_decay=0.25"
                              : "lam=2 weight_decay=0.25",
                     dtype, N);
    call want = call_copy(&c);
    for (int64_t i = 0; i < N; i++) {
        double w = want.in[W].at[i], d = want.in[G].at[i] + 0.25 * w, lam = 2;
        if (adaptive) {
            want.in[3].at[i] = 0.75 * want.in[3].at[i] + 0.25 * d * d;
            lam /= sqrt(want.in[3].at[i] + 1e-7);
        }
        want.in[G].at[i] += lam * d * d * (w - want.in[BACKUP].at[i]);
    }
    run(ctx, &c);
    check_near("g", &c.in[G], &want.in[G], 16);
    check_near("ms", &c.in[3], &want.in[3], 0);
    check_bits("w", &c.in[W], &want.in[W]);
    check_bits("backup", &c.in[BACKUP], &want.in[BACKUP]);
    call_free(&c);
    call_free(&want);
}

TEST(dc_grad_follows_its_formula)
{
    lt_ctx *ctx = open_threads(2);
    for (int k = 0; k < 2; k++) {
        check_dc(ctx, dtypes[k], false);
        check_dc(ctx, dtypes[k], true);
    }
    lt_ctx_free(ctx);
}

TEST(gap_grad_follows_its_formula)
{
    lt_ctx *ctx = open_threads(2);
    for (int k = 0; k < 2; k++) {
        call c =
            call_of("gap_grad", "lr=0.5 correction=0.25 rho=0.75 weight_decay=0.125", dtypes[k], N);
        call want = call_copy(&c);
        for (int64_t i = 0; i < N; i++) {
            double w = want.in[W].at[i], v = want.in[V].at[i];
            double ms = want.in[MS].at[i] = 0.75 * want.in[MS].at[i] + 0.25 * v * v;
            double penalty = 1 + fabs(w - want.in[BACKUP].at[i]) / (0.5 * sqrt(ms / 0.25) + 1e-8);
            want.in[G].at[i] = (want.in[G].at[i] + 0.125 * w) / penalty - 0.125 * w;
        }
        run(ctx, &c);
        check_near("g", &c.in[G], &want.in[G], 1);
        check_near("ms", &c.in[MS], &want.in[MS], 0);
        check_bits("v", &c.in[V], &want.in[V]);
        call_free(&c);
        call_free(&want);
    }
    lt_ctx_free(ctx);
}

/* The step of DDC-ASGD in double. */
static void ddc_in_double(call *c, double lam, double cap)
{
    const double lr = 0.5, momentum = 0.75, weight_decay = 0.125, r = 0.25, q = 0.5, rho = 0.75;
    double squares_c = 0, squares_g = 0, factor;
    block *in = c->in, compensation = block_copy(&in[DDC_G]);
    for (int64_t i = 0; i < compensation.count; i++) {
        double g = in[DDC_G].at[i], D = in[DDC_W].at[i] - in[DDC_BACKUP].at[i];
        double s = in[DDC_S].at[i] = rho * in[DDC_S].at[i] + (1 - rho) * g * g;
        compensation.at[i] = lam * g * g * D / sqrt(s + 1e-7);
        squares_c += compensation.at[i] * compensation.at[i];
        squares_g += g * g;
    }
    factor = fmin(1, cap * sqrt(squares_g) / (sqrt(squares_c) + 1e-7));
    for (int64_t i = 0; i < compensation.count; i++) {
        double w = in[DDC_W].at[i], v = in[DDC_V].at[i];
        double d = q * (in[DDC_G].at[i] + factor * compensation.at[i] + weight_decay * w);
        in[DDC_W].at[i] = w - lr * (momentum * v + d);
        in[DDC_V].at[i] = momentum * v + r * d;
    }
    in[DDC_STATS].at[0] += factor * sqrt(squares_c) / sqrt(squares_g);
    in[DDC_STATS].at[1] += factor < 1;
    in[DDC_STATS].at[2] += 1;
    block_free(&compensation);
}

#define DDC_OPTIONS "lr=0.5 momentum=0.75 weight_decay=0.125 r=0.25 q=0.5 rho=0.75"

TEST(ddc_step_follows_its_formula)
{
    static const struct {
        const char *options;
        double lam, cap;
    } with[] = {{DDC_OPTIONS, 20, 1},
                {DDC_OPTIONS " lam=0.03125", 0.03125, 1},
                {DDC_OPTIONS " lam=2 cap=0.5", 2, 0.5},
                {DDC_OPTIONS " cap=0", 20, 0}};
    lt_ctx *ctx = open_threads(2);
    for (int k = 0; k < 2; k++) {
        call c = call_of("ddc_step", NULL, dtypes[k], N), want = call_copy(&c);
        for (int j = 0; j < 4; j++) { /* stats add up over the calls */
            c.options = with[j].options;
            ddc_in_double(&want, with[j].lam, with[j].cap);
            run(ctx, &c);
            check_near("w", &c.in[DDC_W], &want.in[DDC_W], 16);
            check_near("v", &c.in[DDC_V], &want.in[DDC_V], 16);
            check_near("s", &c.in[DDC_S], &want.in[DDC_S], 0);
            CHECK_NEAR(c.in[DDC_STATS].at[0], want.in[DDC_STATS].at[0], k ? 1e-5 : 1e-12);
            CHECK_NEAR(c.in[DDC_STATS].at[1], want.in[DDC_STATS].at[1], 0);
            CHECK_NEAR(c.in[DDC_STATS].at[2], j + 1, 0);
            for (int i = 0; i < DDC_STATS; i++) { /* continue with the same values */
                block_free(&want.in[i]);
                want.in[i] = block_copy(&c.in[i]);
            }
        }
        CHECK_NEAR(c.in[DDC_STATS].at[1], 3, 0);
        call_free(&c);
        call_free(&want);
    }
    lt_ctx_free(ctx);
}

TEST(ordered_step_follows_its_formula)
{
    static const char *const options[] = {
        "lr=0.5 momentum=0.75 weight_decay=0.125 late=0",
        "lr=0.5 momentum=0.75 weight_decay=0.125 late=0 opens=true",
        "lr=0.5 momentum=0.75 weight_decay=0.125 late=3",
        "lr=0.5 momentum=0.75 weight_decay=0.125 late=3 opens=true"};
    lt_ctx *ctx = open_threads(2);
    for (int k = 0; k < 8; k++) {
        call c = call_of("ordered_step", options[k / 2], dtypes[k % 2], N), want = call_copy(&c);
        for (int64_t i = 0; i < N; i++) {
            double *w = &want.in[0].at[i], *v = &want.in[2].at[i];
            double d = want.in[1].at[i] + 0.125 * *w, steps = k / 2 < 2 ? 1 : 2.734375;
            if (k / 2 % 2) {
                *v *= 0.75;
                *w -= 0.5 * *v;
            }
            *v += (k / 2 < 2 ? 1 : 0.421875) * d; /* 0.75^3 */
            *w -= 0.5 * steps * d;                /* 1 + 0.75 + 0.75^2 + 0.75^3 */
        }
        run(ctx, &c);
        check_near("w", &c.in[0], &want.in[0], 4);
        check_near("v", &c.in[2], &want.in[2], 4);
        check_bits("g", &c.in[1], &want.in[1]);
        call_free(&c);
        call_free(&want);
    }
    lt_ctx_free(ctx);
}

/* Replaces the gradient of a call with random numbers, or with zeros. */
static void set_grad(call *c, int seed)
{
    block_free(&c->in[1]);
    c->in[1] = seed ? numbers(LT_F64, N, seed, false) : constants(LT_F64, N, 0);
}

/* Ordered momentum gives the result of momentum SGD with the gradients in the order of their
 * buckets, in whatever order they arrive. */
TEST(late_gradients_end_up_in_their_place)
{
    static const struct {
        int seed; /* of the gradient; 0: the bucket opens with a gradient of zero */
        const char *options;
    } arrivals[] = {{71, "lr=0.5 late=0 opens=true"},
                    {0, "lr=0.5 late=0 opens=true"},
                    {73, "lr=0.5 late=0 opens=true"},
                    {72, "lr=0.5 late=1"},
                    {0, "lr=0.5 late=0 opens=true"},
                    {75, "lr=0.5 late=0 opens=true"},
                    {74, "lr=0.5 late=1"}};
    lt_ctx *ctx = open_threads(2);
    call in_order = call_of("momentum_step", "lr=0.5", LT_F64, N);
    in_order.n_in = 3;
    block_free(&in_order.in[3]);
    call late = call_copy(&in_order);
    late.op = "ordered_step";
    for (int seed = 71; seed <= 75; seed++) {
        set_grad(&in_order, seed);
        run(ctx, &in_order);
    }
    for (size_t i = 0; i < sizeof arrivals / sizeof *arrivals; i++) {
        late.options = arrivals[i].options;
        set_grad(&late, arrivals[i].seed);
        run(ctx, &late);
    }
    check_near("w", &late.in[0], &in_order.in[0], 16);
    check_near("v", &late.in[2], &in_order.in[2], 16);
    call_free(&in_order);
    call_free(&late);
    lt_ctx_free(ctx);
}

/* ==== Exact bits ============================================================================== */

/* Sets some elements to values that arithmetic could change. */
static void add_odd_values(block *b)
{
    static const double odd[] = {-0.0, 0, INFINITY, -INFINITY, 0x1p-149, -0x1p-149, 1e30, -1e30};
    for (int64_t i = 0; i < b->count; i += 5)
        b->at[i] = odd[i / 5 % 8];
    block_round(b, b->dtype);
}

TEST(gradients_without_delay_keep_their_bits)
{
    static const struct {
        const char *op, *options;
    } with[] = {{"dc_grad", "lam=2 weight_decay=0.1"},
                {"dc_grad", "lam=2 adaptive=true weight_decay=0.1"},
                {"gap_grad", "lr=0.1 correction=0.5 weight_decay=0.1"},
                {"gap_grad", "lr=0 correction=0.5 weight_decay=0.1"}};
    lt_ctx *ctx = open_threads(2);
    for (int k = 0; k < 8; k++) {
        call c = call_of(with[k / 2].op, with[k / 2].options, dtypes[k % 2], N);
        add_odd_values(&c.in[G]);
        for (int64_t i = 0; i < N; i++)
            if (i % 7 != 1)
                c.in[BACKUP].at[i] = c.in[W].at[i];
        block before = block_copy(&c.in[G]);
        run(ctx, &c);
        int64_t changed = 0;
        for (int64_t i = 0; i < N; i++) {
            bool same = memcmp(&c.in[G].at[i], &before.at[i], sizeof *before.at) == 0;
            if (i % 7 != 1 && !same)
                FAIL("%s: element %lld was %a, is %a", c.op, (long long)i, before.at[i],
                     c.in[G].at[i]);
            changed += !same;
        }
        CHECK(changed > N / 10); /* of the N / 7 with a delay */
        block_free(&before);
        call_free(&c);
    }
    lt_ctx_free(ctx);
}

/* Compares steps of ddc_step with steps of momentum_step. */
static void check_momentum(lt_ctx *ctx, lt_dtype dtype, bool shared, const double *factor)
{
    call c = call_of("ddc_step", "lr=0.1 momentum=0.9 weight_decay=0.01 r=1 q=1", dtype, N);
    for (int64_t i = 0; i < N; i += 5) { /* signed zeros */
        c.in[DDC_W].at[i] = i % 2 ? 0 : -0.0;
        c.in[DDC_G].at[i] = i % 3 ? 0 : -0.0;
        c.in[DDC_V].at[i] = i % 4 ? 0 : -0.0;
    }
    call plain = {"momentum_step", "lr=0.1 momentum=0.9 weight_decay=0.01", 3, {{0}}};
    for (int i = 0; i < 3; i++)
        plain.in[i] = block_copy(&c.in[i]);
    for (int step = 0; step < 3; step++) {
        block_free(&c.in[DDC_BACKUP]);
        c.in[DDC_BACKUP] = block_copy(&c.in[DDC_W]);
        run_shared(ctx, &c, shared ? DDC_BACKUP : -1, DDC_W, factor);
        run_shared(ctx, &plain, -1, -1, factor);
        check_bits("w", &c.in[DDC_W], &plain.in[0]);
        check_bits("v", &c.in[DDC_V], &plain.in[2]);
    }
    CHECK(c.in[DDC_STATS].at[0] == 0);
    CHECK(c.in[DDC_STATS].at[1] == 0);
    CHECK(c.in[DDC_STATS].at[2] == 3);
    call_free(&c);
    call_free(&plain);
}

TEST(ddc_step_without_delay_is_momentum_step)
{
    static const lt_dtype all[] = {LT_F64, LT_F32, LT_F16, LT_BF16};
    for (int threads = 1; threads < 3; threads++) {
        lt_ctx *ctx = open_threads(threads);
        for (int k = 0; k < 4; k++)
            check_momentum(ctx, all[k], false, NULL);
        check_momentum(ctx, LT_F32, true, NULL);
        check_momentum(ctx, LT_F32, false, &(double){0.3});
        lt_ctx_free(ctx);
    }
}

/* Clipping multiplies the gradient. */
TEST(steps_with_a_factor)
{
    static const char *const ops[] = {"ddc_step", "ordered_step"};
    static const char *const options[] = {"lr=0.1 r=0.5 q=0.5", "lr=0.1 late=2 opens=true"};
    lt_ctx *ctx = open_threads(2);
    for (int k = 0; k < 4; k++) {
        call c = call_of(ops[k / 2], options[k / 2], dtypes[k % 2], N), want = call_copy(&c);
        for (int64_t i = 0; i < N; i++)
            want.in[DDC_G].at[i] *= 0.25;
        run(ctx, &want);
        run_shared(ctx, &c, -1, -1, &(double){0.25});
        for (int i = 0; i < c.n_in; i++)
            if (i != DDC_G)
                check_bits(ops[k / 2], &c.in[i], &want.in[i]);
        call_free(&c);
        call_free(&want);
    }
    lt_ctx_free(ctx);
}

/* One call of each kind. */
static const struct {
    const char *op, *options;
} kinds[] = {{"dc_grad", "lam=2 weight_decay=0.1"},
             {"dc_grad", "lam=2 adaptive=true weight_decay=0.1"},
             {"gap_grad", "lr=0.1 correction=0.5 weight_decay=0.1"},
             {"ddc_step", "lr=0.1 r=0.5 q=0.75 weight_decay=0.1"},
             {"ordered_step", "lr=0.1 late=2 opens=true weight_decay=0.1"}};
enum { KINDS = sizeof kinds / sizeof *kinds };

TEST(any_number_of_threads_gives_the_same_bits)
{
    lt_ctx *one = open_threads(1);
    for (int threads = 2; threads <= 4; threads++) {
        lt_ctx *many = open_threads(threads);
        for (int k = 0; k < 2 * KINDS; k++) {
            call a = call_of(kinds[k / 2].op, kinds[k / 2].options, dtypes[k % 2], MAX_N);
            call b = call_copy(&a);
            run(one, &a);
            run(many, &b);
            for (int i = 0; i < a.n_in; i++)
                check_bits(a.op, &b.in[i], &a.in[i]);
            call_free(&a);
            call_free(&b);
        }
        lt_ctx_free(many);
    }
    lt_ctx_free(one);
}

/* gap_grad may get the gradient as v. */
TEST(the_gradient_as_its_own_momentum)
{
    lt_ctx *ctx = open_threads(2);
    for (int k = 0; k < 2; k++) {
        call c = call_of("gap_grad", "lr=0.1 correction=0.5 weight_decay=0.1", dtypes[k], N);
        block_free(&c.in[V]);
        c.in[V] = block_copy(&c.in[G]);
        call want = call_copy(&c);
        run(ctx, &want);
        run_shared(ctx, &c, V, G, NULL);
        check_bits("g", &c.in[G], &want.in[G]);
        check_bits("ms", &c.in[MS], &want.in[MS]);
        call_free(&c);
        call_free(&want);
    }
    lt_ctx_free(ctx);
}

/* ==== Zeros =================================================================================== */

/* Arenas have zeros between the parameters. */
TEST(padding_stays_zero)
{
    lt_ctx *ctx = open_threads(2);
    for (int k = 0; k < 2 * KINDS; k++) {
        call c = call_of(kinds[k / 2].op, kinds[k / 2].options, dtypes[k % 2], N);
        for (int i = 0; i < c.n_in; i++)
            for (int64_t j = 0; c.in[i].count == N && j < N; j++)
                if (j % 64 >= 48)
                    c.in[i].at[j] = 0;
        for (int step = 0; step < 2; step++)
            run(ctx, &c);
        for (int i = 0; i < c.n_in; i++)
            for (int64_t j = 0; c.in[i].count == N && j < N; j++)
                if (j % 64 >= 48 && (c.in[i].at[j] != 0 || signbit(c.in[i].at[j])))
                    FAIL("%s: input %d, element %lld is %a", c.op, i, (long long)j, c.in[i].at[j]);
        call_free(&c);
    }
    lt_ctx_free(ctx);
}

TEST(empty_spans)
{
    lt_ctx *ctx = open_threads(2);
    for (int k = 0; k < KINDS; k++) {
        call c = call_of(kinds[k].op, kinds[k].options, LT_F32, 0);
        run(ctx, &c);
        if (strcmp(c.op, "ddc_step") == 0) {
            CHECK(c.in[DDC_STATS].at[0] == 0);
            CHECK(c.in[DDC_STATS].at[1] == 0);
            CHECK(c.in[DDC_STATS].at[2] == 1);
        }
        call_free(&c);
    }
    lt_ctx_free(ctx);
}

static void set_all(block *b, double value)
{
    for (int64_t i = 0; i < b->count; i++)
        b->at[i] = value;
}

TEST(no_momentum_and_no_learning_rate_give_no_nan)
{
    static const char *const options[] = {"lr=0.1 correction=0.001 weight_decay=0.125",
                                          "lr=0 correction=1 weight_decay=0.125"};
    lt_ctx *ctx = open_threads(2);
    for (int k = 0; k < 8; k++) { /* dtype; v and ms are zero; options */
        call c = call_of("gap_grad", options[k / 4], dtypes[k % 2], N);
        if (k / 2 % 2 == 0 || k < 4) {
            set_all(&c.in[V], 0);
            set_all(&c.in[MS], 0);
        }
        call want = call_copy(&c);
        for (int64_t i = 0; i < N; i++) { /* the penalty leaves almost nothing */
            double w = c.in[W].at[i], gap = fabs(w - c.in[BACKUP].at[i]);
            want.in[G].at[i] = (c.in[G].at[i] + 0.125 * w) / (1 + gap / 1e-8) - 0.125 * w;
        }
        run(ctx, &c);
        check_near("g", &c.in[G], &want.in[G], 1);
        call_free(&c);
        call_free(&want);
    }
    lt_ctx_free(ctx);
}

TEST(a_gradient_of_zero)
{
    lt_ctx *ctx = open_threads(2);
    for (int k = 0; k < 2; k++) {
        call c = call_of("dc_grad", "lam=2 adaptive=true", dtypes[k], N);
        set_all(&c.in[G], 0);
        set_all(&c.in[3], 0);
        call want = call_copy(&c);
        run(ctx, &c);
        for (int i = 0; i < 4; i++)
            check_bits("dc_grad", &c.in[i], &want.in[i]);
        call_free(&c);
        call_free(&want);

        c = call_of("ddc_step", "lr=0.5 momentum=0.5 r=0.5 q=0.5", dtypes[k], N);
        set_all(&c.in[DDC_G], 0);
        set_all(&c.in[DDC_S], 0);
        want = call_copy(&c);
        for (int64_t i = 0; i < N; i++) {
            want.in[DDC_V].at[i] *= 0.5;
            want.in[DDC_W].at[i] -= 0.5 * want.in[DDC_V].at[i];
        }
        want.in[DDC_STATS].at[2] = 1;
        run(ctx, &c);
        check_near("w", &c.in[DDC_W], &want.in[DDC_W], 0);
        check_near("v", &c.in[DDC_V], &want.in[DDC_V], 0);
        check_bits("s", &c.in[DDC_S], &want.in[DDC_S]);
        check_bits("stats", &c.in[DDC_STATS], &want.in[DDC_STATS]);
        call_free(&c);
        call_free(&want);
    }
    lt_ctx_free(ctx);
}

/* Without compensation nothing is limited, however small the gradient is. */
TEST(a_tiny_gradient_without_delay_is_not_limited)
{
    lt_ctx *ctx = open_threads(1);
    call c = call_of("ddc_step", "lr=0.5 r=1 q=1", LT_F32, 3);
    set_all(&c.in[DDC_G], 0x1p-40);
    memcpy(c.in[DDC_BACKUP].at, c.in[DDC_W].at, 3 * sizeof(double));
    run(ctx, &c);
    CHECK(c.in[DDC_STATS].at[1] == 0);
    call_free(&c);
    lt_ctx_free(ctx);
}
