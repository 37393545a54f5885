/* Arenas, spans, optimizers and running statistics. */
#include "autograd/tape.h"
#include "ops/ops.h"
#include "tests/autograd/train.h"

static double at(lt_tensor *x, int64_t i)
{
    double v;
    CHECK_OK(lt_item(x, i, &v));
    return v;
}

/* Runs backward of sum(x) * slope. */
static void give_grad(lt_tensor *x, double slope)
{
    lt_ctx *ctx = lt_tensor_ctx(x);
    lt_tensor *k = lt_tensor_full(ctx, lt_tensor_dtype(x), 0, NULL, slope),
              *y = lt_run(ctx, "mul", NULL, x, k, NULL);
    lt_tensor *loss = lt_run(ctx, "sum", NULL, y, NULL);
    CHECK_OK(lt_backward(loss, NULL));
    RELEASE(k, y, loss);
}

TEST_OPEN(one_arena_in_order_of_addition)
{
    lt_params *p = lt_params_new(ctx);
    lt_tensor *a = param(ctx, LT_F32, 5, 1), *b = param(ctx, LT_F32, 16, 2),
              *d = param(ctx, LT_F64, 3, 4);
    int64_t n = 2;
    lt_tensor *mean = lt_buffer_new(ctx, LT_F32, 1, &n, (lt_init){LT_INIT_CONSTANT, 9, 0});
    CHECK_NULL(lt_data(a), LT_EINVAL, "this parameter has no memory yet");
    CHECK_NULL(lt_run(ctx, "neg", NULL, a, NULL), LT_EINVAL,
               "neg: x: this parameter has no memory yet");
    CHECK_OK(lt_params_add(p, "a", a));
    CHECK_OK(lt_params_add(p, "b", b));
    CHECK_OK(lt_params_add(p, "mean", mean));
    CHECK_OK(lt_params_add(p, "d", d));
    CHECK_OK(lt_params_add(p, "tied", a));
    CHECK_FAILS(lt_params_add(p, "b", d), LT_EINVAL, "the name b is given twice");
    CHECK_OK(lt_params_place(p));
    CHECK_EQ(lt_params_count(p), 4);
    const lt_span *sa = lt_params_find(p, "tied"), *sb = lt_params_find(p, "b"),
                  *sd = lt_params_find(p, "d");
    CHECK_STR(sa->name, "a");
    CHECK_EQ(sa->aliases, 1);
    CHECK_EQ(sa->segment, sb->segment);
    CHECK_EQ(sb->offset, 16);
    CHECK(sd->segment != sa->segment && lt_params_find(p, "mean")->segment != sa->segment);
    CHECK((uintptr_t)lt_data(b) % 64 == 0);
    CHECK_EQ((float *)lt_data(b) - (float *)lt_data(a), 16);
    for (int i = 5; i < 16; i++)
        CHECK_NEAR(((float *)lt_data(a))[i], 0, 0); /* padding */
    CHECK_NEAR(at(mean, 1), 9, 0);
    CHECK(!lt_params_find(p, "c"));

    void *where = lt_data(a);
    lt_tensor *late = param(ctx, LT_F32, 5, 7);
    CHECK_OK(lt_params_add(p, "late", late));
    CHECK_OK(lt_params_place(p));
    CHECK(lt_data(a) == where);
    CHECK(lt_params_find(p, "late")->segment != sa->segment);
    CHECK_FAILS(lt_param_set_dtype(late, LT_F64), LT_EINVAL,
                "cannot change once it has memory (it is f32)");
    lt_params_free(p);
    CHECK_NEAR(at(late, 4), 7, 0);
    RELEASE(a, b, d, mean, late);
}

typedef struct lender {
    double memory[8 + LT_GRAD_SPARE_BYTES / sizeof(double)];
    int lent, came_back;
} lender;

static void release(void *ud, void *data)
{
    lender *l = ud;
    l->came_back += data == l->memory;
}

static bool alloc_once(void *ud, size_t bytes, lt_external_memory *memory)
{
    lender *l = ud;
    *memory = (lt_external_memory){l->memory, release, l};
    return bytes <= sizeof l->memory && l->lent++ == 0;
}

TEST(gradients_can_use_external_memory)
{
    lt_ctx *ctx = lt_open(NULL);
    lender l = {{0}, 0, 0};
    CHECK_OK(
        lt_set_part(ctx, LT_PART_EXCHANGE, &(lt_step_part){.ud = &l, .alloc_arena = alloc_once}));
    lt_tensor *x[2];
    for (int i = 0; i < 2; i++) { /* the second one's arena is not external */
        x[i] = param(ctx, LT_F64, 3, 1);
        lt_params *p = placed(ctx, (lt_tensor *[]){lt_retain(x[i])}, 1);
        give_grad(x[i], 2 + i);
        CHECK_NEAR(at(lt_grad(x[i]), 2), 2 + i, 0);
        lt_params_free(p);
    }
    CHECK(l.memory[0] == 2 && l.memory[2] == 2 && l.memory[3] == 0);
    CHECK_OK(lt_set_part(ctx, LT_PART_EXCHANGE, NULL));
    CHECK_EQ(l.came_back, 0);
    lt_release(x[0]);
    CHECK_EQ(l.came_back, 1);
    lt_release(x[1]);
    lt_ctx_free(ctx);
    CHECK(l.lent == 2 && l.came_back == 1);
}

TEST(initial_values_depend_on_seed_tree_and_name)
{
    char sha[4][65];
    for (int run = 0; run < 2; run++) {
        lt_ctx *ctx = lt_open(&(lt_config){.seed = 3});
        for (int tree = 0; tree < 2; tree++) {
            int64_t n = 10;
            lt_tensor *w = lt_param_new(ctx, LT_F32, 1, &n, (lt_init){LT_INIT_UNIFORM, -1, 1});
            lt_params *p = placed(ctx, &w, 1);
            CHECK_OK(lt_params_sha256(p, sha[2 * run + tree]));
            lt_params_free(p);
        }
        lt_ctx_free(ctx);
    }
    CHECK_STR(sha[0], sha[2]);
    CHECK_STR(sha[1], sha[3]);
    CHECK(strcmp(sha[0], sha[1]) != 0);
}

TEST_OPEN(a_step_updates_parameters_with_gradients)
{
    lt_tensor *x[4];
    for (int i = 0; i < 4; i++)
        x[i] = param(ctx, LT_F64, 3 + i, 1);
    lt_params *p = placed(ctx, x, 4);
    lt_optim *o = lt_optim_new(ctx, "momentum_step", x, 4);
    CHECK(o != NULL);
    CHECK_STR(lt_optim_slot_name(o, 0), "v");
    CHECK(!lt_optim_slot_name(o, 1));
    give_grad(x[0], 1);
    give_grad(x[1], 2);
    give_grad(x[3], 3); /* c has no gradient */
    CHECK_OK(step_with(o, "lr=0.1", NULL));
    CHECK_NEAR(at(x[0], 2), 0.9, 1e-15);
    CHECK_NEAR(at(x[1], 3), 0.8, 1e-15);
    CHECK_NEAR(at(x[2], 4), 1, 0);
    CHECK_NEAR(at(x[3], 5), 0.7, 1e-15);
    CHECK(!lt_grad(x[0]));
    CHECK_EQ(lt_step(ctx), 1);
    lt_tensor *v = lt_optim_slot(o, 0, x[3]);
    CHECK_NEAR(at(v, 5), 3, 0);
    lt_release(v);
    CHECK_OK(lt_params_freeze(p, 0, true));
    CHECK(lt_params_span(p, 0)->frozen);
    give_grad(x[1], 1);
    CHECK_OK(step_with(o, "lr=0.1", NULL));
    CHECK_NEAR(at(x[0], 0), 0.9, 1e-15);
    CHECK_NEAR(at(x[1], 0), 0.8 - 0.1 * (0.9 * 2 + 1), 1e-15);
    CHECK_FAILS(lt_optim_set_group(o, x[1], -3), LT_EINVAL,
                "the group must be at least 0, but is -3");
    double before = at(x[1], 0);
    CHECK_OK(lt_optim_set_group(o, x[3], 1));
    give_grad(x[1], 1);
    CHECK_FAILS(step_with(o, "lr=0.1", NULL), LT_EINVAL,
                "a parameter is in group 1, but options were given for 1 groups");
    CHECK_NEAR(at(x[1], 0), before, 0);
    CHECK_NULL(lt_optim_new(ctx, "add", x, 4), LT_EINVAL, "add is not an update op");
    CHECK_NULL(lt_optim_new(ctx, "sgd_step", (lt_tensor *[]){x[0], x[1], x[0]}, 3), LT_EINVAL,
               "the same parameter twice");
    lt_optim_free(o);
    lt_params_free(p);
}

/* The norm covers two arenas, two groups and a gap. Parameters without a gradient, or frozen ones,
 * do not count. */
TEST(the_norm_of_all_gradients)
{
    double norms[2];
    for (int threads = 1; threads <= 2; threads++) {
        lt_ctx *ctx = lt_open(&(lt_config){.poison = true, .threads = threads});
        static const int64_t counts[] = {100001, 3, 5, 40000, 7};
        lt_tensor *x[5];
        lt_optim *o;
        double norm;
        for (int i = 0; i < 5; i++)
            x[i] = param(ctx, i == 4 ? LT_F64 : LT_F32, counts[i], 1);
        lt_params *p = placed(ctx, x, 5);
        CHECK((o = lt_optim_new(ctx, "sgd_step", x, 5)) != NULL);
        CHECK_OK(lt_optim_set_group(o, x[1], 1));
        CHECK_OK(lt_optim_grad_norm(o, &norm));
        CHECK_NEAR(norm, 0, 0);
        for (int i = 0; i < 5; i++)
            if (i != 2)
                give_grad(x[i], 0.1 * (i + 1));
        CHECK_OK(lt_optim_grad_norm(o, &norms[threads - 1]));
        double a = (float)0.1, b = (float)0.2, d = (float)0.4;
        CHECK_NEAR(norms[threads - 1], sqrt(100001 * a * a + 3 * b * b + 40000 * d * d + 7 * 0.25),
                   1e-11);
        CHECK_OK(lt_params_freeze(p, 0, true));
        CHECK_OK(lt_optim_grad_norm(o, &norm));
        CHECK_NEAR(norm, sqrt(3 * b * b + 40000 * d * d + 7 * 0.25), 1e-12);
        lt_set_step(ctx, 11);
        ((float *)lt_data(lt_grad(x[1])))[2] = -INFINITY;
        CHECK_FAILS(lt_optim_grad_norm(o, &norm), LT_ENUMERIC,
                    "the norm of the gradients is inf at step 12; check the learning rate and "
                    "the data");
        ((float *)lt_data(lt_grad(x[1])))[2] = NAN;
        CHECK_FAILS(lt_optim_grad_norm(o, &norm), LT_ENUMERIC,
                    "the norm of the gradients is nan at step 12");
        lt_optim_free(o);
        lt_params_free(p);
        lt_ctx_free(ctx);
    }
    CHECK_NEAR(norms[0], norms[1], 0);
}

static lt_status norm_in_hook(void *ud, lt_tensor *x, lt_tensor *grad)
{
    double norm;
    (void)x;
    (void)grad;
    return lt_optim_grad_norm(ud, &norm);
}

TEST_OPEN(no_norm_during_backward)
{
    lt_tensor *a = param(ctx, LT_F32, 3, 1);
    lt_params *p = placed(ctx, &a, 1);
    lt_optim *o = lt_optim_new(ctx, "sgd_step", &a, 1);
    CHECK_OK(lt_on_grad(a, norm_in_hook, o, NULL));
    lt_tensor *loss = lt_run(ctx, "sum", NULL, a, NULL);
    CHECK_FAILS(lt_backward(loss, NULL), LT_EINVAL,
                "a gradient norm cannot run within backward: some gradients are not ready yet");
    lt_release(loss);
    lt_optim_free(o);
    lt_params_free(p);
}

TEST_OPEN(an_update_invalidates_only_the_graphs_that_read_it)
{
    lt_tensor *a = param(ctx, LT_F64, 3, 1), *b = param(ctx, LT_F64, 3, 2);
    lt_params *p = placed(ctx, (lt_tensor *[]){a, b}, 2); /* one arena */
    lt_optim *o = lt_optim_new(ctx, "sgd_step", &a, 1);
    lt_tensor *ya = lt_run(ctx, "mul", NULL, a, a, NULL),
              *yb = lt_run(ctx, "mul", NULL, b, b, NULL);
    lt_tensor *la = lt_run(ctx, "sum", NULL, ya, NULL), *lb = lt_run(ctx, "sum", NULL, yb, NULL);
    give_grad(a, 1);
    CHECK_OK(step_with(o, "lr=0.5", NULL));
    CHECK_OK(lt_backward(lb, NULL));
    CHECK_FAILS(lt_backward(la, NULL), LT_EINVAL, "changed in place");
    RELEASE(ya, yb, la, lb);
    lt_optim_free(o);
    lt_params_free(p);
}

TEST(running_statistics_of_shards_equal_those_of_the_batch)
{
    /* Two shards of 2 and 6 rows, then one of 8: the same running values. */
    double values[8] = {1, 2, 4, 8, 16, 32, 64, 128}, running[2][2];
    for (int split = 0; split < 2; split++) {
        lt_ctx *ctx = lt_open(NULL);
        int64_t one = 1;
        lt_tensor *scale = param(ctx, LT_F64, 1, 1), *shift = param(ctx, LT_F64, 1, 0);
        lt_tensor *mean = lt_buffer_new(ctx, LT_F64, 1, &one, (lt_init){LT_INIT_CONSTANT, 0, 0});
        lt_tensor *var = lt_buffer_new(ctx, LT_F64, 1, &one, (lt_init){LT_INIT_CONSTANT, 1, 0});
        lt_params *p = placed(ctx, (lt_tensor *[]){scale, shift, mean, var}, 4);
        int64_t cut[2][3] = {{0, 8, 8}, {0, 2, 8}};
        for (int part = 0; part < 1 + split; part++) {
            lt_tensor *x = lt_tensor_from(ctx, LT_F64, 2,
                                          (int64_t[]){cut[split][part + 1] - cut[split][part], 1},
                                          values + cut[split][part]);
            lt_tensor *y =
                lt_run(ctx, "batch_norm", "train=true", x, scale, shift, mean, var, NULL);
            CHECK(y != NULL);
            RELEASE(x, y);
        }
        CHECK_NEAR(at(mean, 0), 0, 0); /* not before the step */
        CHECK_EQ(lt_bn_stats_pending(ctx), 1);
        CHECK_OK(lt_bn_stats_commit(ctx));
        CHECK_EQ(lt_bn_stats_pending(ctx), 0);
        running[split][0] = at(mean, 0);
        running[split][1] = at(var, 0);
        lt_params_free(p);
        lt_ctx_free(ctx);
    }
    CHECK_NEAR(running[0][0], 0.1 * 255 / 8, 1e-15);
    CHECK_NEAR(running[1][0], running[0][0], 1e-14);
    CHECK_NEAR(running[1][1], running[0][1], 1e-12);
}

/* ==== Half copies ============================================================================= */

/* Two f32 parameters in one arena, 5 and 16 elements, all x; an optimizer for the first alone. */
typedef struct pair {
    lt_ctx *ctx;
    lt_params *p;
    lt_tensor *a, *b;
    lt_optim *o;
} pair;

static pair pair_new(double x)
{
    pair q = {.ctx = lt_open(&(lt_config){.poison = true})};
    q.a = param(q.ctx, LT_F32, 5, x);
    q.b = param(q.ctx, LT_F32, 16, x);
    q.p = placed(q.ctx, (lt_tensor *[]){q.a, q.b}, 2);
    CHECK_OK(lt_params_add(q.p, "tied", q.a));
    q.o = lt_optim_new(q.ctx, "sgd_step", &q.a, 1);
    CHECK(q.o != NULL);
    return q;
}

static void pair_end(pair *q)
{
    lt_optim_free(q->o);
    lt_params_free(q->p);
    lt_ctx_free(q->ctx);
}

/* The sum of x^2, as a scalar. */
static lt_tensor *sum_of_squares(lt_tensor *x)
{
    lt_tensor *y = lt_run(lt_tensor_ctx(x), "mul", NULL, x, x, NULL);
    lt_tensor *sum = lt_run(lt_tensor_ctx(x), "sum", NULL, y, NULL);
    lt_release(y);
    return sum;
}

static lt_status go_back(lt_tensor *loss)
{
    lt_status status = lt_backward(loss, NULL);
    lt_release(loss);
    return status;
}

TEST(half_copies_follow_their_parameters)
{
    static const struct {
        lt_dtype dtype;
        double tenth, fifth;
    } halves[] = {{LT_BF16, 0.10009765625, 0.2001953125},
                  {LT_F16, 0.0999755859375, 0.199951171875}};
    for (int i = 0; i < 2; i++) {
        pair q = pair_new(0.1);
        lt_dtype dtype = halves[i].dtype;
        lt_tensor *a = lt_half(q.a, dtype), *b = lt_half(q.b, dtype);
        CHECK(a && b);
        CHECK_EQ(lt_tensor_dtype(a), dtype);
        CHECK_EQ(lt_count(a), 5);
        CHECK((uint16_t *)lt_data(b) - (uint16_t *)lt_data(a) == 16); /* one arena, one layout */
        for (int k = 5; k < 16; k++)
            CHECK_EQ(((uint16_t *)lt_data(a))[k], 0); /* padding */
        CHECK_NEAR(at(a, 4), halves[i].tenth, 0);
        CHECK_NEAR(at(b, 15), halves[i].tenth, 0);
        CHECK_OK(lt_fill(q.b, 0.2));
        CHECK_NEAR(at(b, 15), halves[i].tenth, 0); /* until the next lt_half() */
        CHECK(lt_half(q.a, dtype) == a && lt_half(q.b, dtype) == b);
        CHECK_NEAR(at(b, 15), halves[i].fifth, 0);
        give_grad(q.a, -1);
        CHECK_OK(step_with(q.o, "lr=0.1", NULL));
        CHECK(lt_half(lt_params_find(q.p, "tied")->value, dtype) == a);
        CHECK_NEAR(at(a, 0), halves[i].fifth, 0);
        lt_tensor *other = lt_half(q.a, halves[!i].dtype);
        CHECK_NEAR(at(other, 0), halves[!i].fifth, 0);
        CHECK_NEAR(at(lt_half(q.a, dtype), 0), halves[i].fifth, 0);
        CHECK_OK(go_back(sum_of_squares(lt_half(q.a, dtype)))); /* through a third copy */
        CHECK_NEAR(at(lt_grad(q.a), 4), 2 * halves[i].fifth, 0);
        pair_end(&q);
    }
}

TEST(half_copies_require_placed_f32_parameters)
{
    pair q = pair_new(1);
    int64_t n = 3;
    lt_tensor *pending = param(q.ctx, LT_F32, 3, 1), *wide = param(q.ctx, LT_F64, 3, 1);
    lt_tensor *plain = lt_tensor_full(q.ctx, LT_F32, 1, &n, 1);
    CHECK_OK(lt_params_add(q.p, "wide", wide));
    CHECK_OK(lt_params_place(q.p));
    CHECK_NULL(lt_half(pending, LT_BF16), LT_EINVAL, "this parameter has no memory yet");
    CHECK_NULL(
        lt_half(wide, LT_BF16), LT_EINVAL,
        "a half copy must be f16 or bf16 of an f32 parameter, but is bf16 of a parameter 3 f64");
    CHECK_NULL(lt_half(plain, LT_F16), LT_EINVAL, "but is f16 of a tensor 3 f32");
    CHECK_NULL(lt_half(q.a, LT_F64), LT_EINVAL, "but is f64 of a parameter 5 f32");
    RELEASE(pending, wide, plain);
    pair_end(&q);
}

static lt_status note_dtypes(void *ud, lt_tensor *x, lt_tensor *grad)
{
    lt_dtype *seen = ud;
    seen[0] = lt_tensor_dtype(x);
    seen[1] = lt_tensor_dtype(grad);
    return LT_OK;
}

TEST(gradients_of_half_copies_go_to_the_parameter)
{
    pair q = pair_new(0.1);
    lt_dtype seen[2];
    double tenth = 0.10009765625;
    CHECK_OK(lt_on_grad(q.a, note_dtypes, seen, NULL));
    CHECK_OK(go_back(sum_of_squares(lt_half(q.a, LT_BF16))));
    CHECK(seen[0] == LT_F32 && seen[1] == LT_F32);
    CHECK_EQ(lt_tensor_dtype(lt_grad(q.a)), LT_F32);
    CHECK_NEAR(at(lt_grad(q.a), 4), 2 * tenth, 0);
    CHECK_OK(go_back(sum_of_squares(q.a))); /* uses the parameter itself */
    CHECK_NEAR(at(lt_grad(q.a), 4), 2 * tenth + 0.2, 1e-7);
    CHECK_OK(go_back(sum_of_squares(lt_half(q.a, LT_BF16)))); /* adds in f32 */
    CHECK_NEAR(at(lt_grad(q.a), 4), 4 * tenth + 0.2, 1e-7);
    lt_zero_grad(q.a);

    /* Ops that pass gradients on, or only move bytes. */
    lt_tensor *a = lt_half(q.a, LT_BF16), *b = lt_half(q.b, LT_BF16);
    for (int pass = 1; pass <= 2; pass++) {
        lt_tensor *sum = lt_run(q.ctx, "add", NULL, a, a, NULL);
        CHECK_OK(go_back(lt_run(q.ctx, "sum", NULL, sum, NULL)));
        lt_tensor *joined = lt_run(q.ctx, "cat", "axis=0", a, b, a, NULL);
        CHECK_OK(go_back(lt_run(q.ctx, "sum", NULL, joined, NULL)));
        lt_tensor *flat = lt_run(q.ctx, "reshape", "shape=5,1", a, NULL);
        CHECK_OK(go_back(lt_run(q.ctx, "sum", NULL, flat, NULL)));
        CHECK_NEAR(at(lt_grad(q.a), 0), 5 * pass, 0);
        CHECK_NEAR(at(lt_grad(q.a), 4), 5 * pass, 0);
        CHECK_NEAR(at(lt_grad(q.b), 15), pass, 0);
        RELEASE(sum, joined, flat);
    }
    CHECK_OK(lt_params_freeze(q.p, 0, true));
    CHECK(!lt_requires_grad(lt_half(q.a, LT_BF16)));
    pair_end(&q);
}

TEST(half_copies_invalidate_the_same_graphs_as_their_parameters)
{
    pair q = pair_new(1);
    lt_tensor *a = lt_half(q.a, LT_BF16), *b = lt_half(q.b, LT_BF16);
    lt_tensor *la = sum_of_squares(a), *lb = sum_of_squares(b);
    give_grad(q.a, 1);
    CHECK_OK(step_with(q.o, "lr=0.5", NULL));
    CHECK_FAILS(go_back(la), LT_EINVAL, "changed in place");
    la = sum_of_squares(
        lt_half(q.a, LT_BF16)); /* updates the whole arena: b's half is written, too */
    CHECK_OK(go_back(lb));
    CHECK_NEAR(at(lt_grad(q.b), 15), 2, 0);
    CHECK_OK(go_back(la));
    CHECK_NEAR(at(lt_grad(q.a), 0), 1, 0);

    lb = sum_of_squares(lt_half(q.b, LT_BF16));
    CHECK_OK(lt_fill(q.b, 3));
    CHECK_OK(go_back(lb)); /* it read values that have not changed */
    CHECK_NEAR(at(lt_grad(q.b), 15), 4, 0);
    lb = sum_of_squares(lt_half(q.b, LT_BF16));
    CHECK_OK(lt_fill(q.b, 4));
    CHECK(lt_half(q.b, LT_BF16) != NULL);
    CHECK_FAILS(go_back(lb), LT_EINVAL, "changed in place");
    pair_end(&q);
}

TEST_OPEN(half_copies_are_freed_with_their_parameters)
{
    size_t live = 0;
    for (int i = 0; i < 3; i++) {
        lt_tensor *x = param(ctx, LT_F32, 1000, 1);
        lt_params_free(placed(ctx, (lt_tensor *[]){lt_retain(x)}, 1));
        CHECK_OK(lt_scope_push(ctx));
        lt_tensor *half = lt_retain(lt_half(x, LT_BF16)), *loss = sum_of_squares(half);
        lt_scope_pop(ctx);
        CHECK_NEAR(at(half, 999), 1, 0); /* the end of the scope does not free it */
        RELEASE(loss, x);
        CHECK(!lt_grad(half)); /* its parameter is freed, so it has no gradient */
        lt_release(half);
        if (i == 0) /* the context keeps some memory of its own */
            live = lt_memory_stats(ctx).live;
        CHECK_EQ(lt_memory_stats(ctx).live, live);
    }
}

/* The size of an arena would overflow: 16 times 2^58 elements of 4 bytes are 2^64 bytes. */
TEST_OPEN(too_many_elements_to_count)
{
    lt_params *params = lt_params_new(ctx);
    int64_t n = 1LL << 58;
    for (int i = 0; i < 40; i++) {
        char name[8];
        snprintf(name, sizeof name, "w%d", i);
        lt_tensor *w = param(ctx, LT_F32, n, 1);
        CHECK_OK(lt_params_add(params, name, w));
        lt_release(w);
        if (i == 0)
            CHECK_FAILS(lt_params_place(params), LT_ENOMEM, "more than any machine has");
        if (i == 15 || i == 39)
            CHECK_FAILS(lt_params_place(params), LT_EINVAL,
                        "the parameters of dtype f32 have too many elements");
    }
    lt_params_free(params);
}
