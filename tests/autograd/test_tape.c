/* The tape, backward and hooks, on the real ops. */
#include "tests/autograd/graph.h"

TEST_GRAPH(gradients_accumulate)
{
    lt_tensor *x = leaf(ctx, 3, 2);
    for (int pass = 1; pass <= 3; pass++) {
        lt_tensor *loss =
            take1("sum", lt_run(ctx, "mul", NULL, x, x, NULL)); /* one tensor twice in one op */
        CHECK_OK(lt_backward(loss, NULL));
        lt_release(loss);
        CHECK_NEAR(grad_at(x, 2), 4 * pass, 0);
    }
    lt_zero_grad(x);
    CHECK(!lt_grad(x));
    lt_release(x);
}

TEST_GRAPH(a_tensor_used_in_several_places)
{
    lt_tensor *x = leaf(ctx, 2, 3);
    lt_tensor *h = lt_run(ctx, "mul", NULL, x, x, NULL); /* 9 */
    lt_tensor *a =
        lt_run(ctx, "add", NULL, h, h, NULL); /* 2h: passes the same gradient to both inputs */
    lt_tensor *b = lt_run(ctx, "mul", NULL, h, x, NULL); /* hx */
    lt_tensor *loss = take1("sum", take2("add", a, b));  /* 2x^2 + x^3 */
    CHECK_OK(lt_backward(loss, NULL));
    CHECK_NEAR(grad_at(x, 0), 4 * 3 + 3 * 9, 0);
    RELEASE(h, loss, x);
}

TEST_GRAPH(grad_off_records_nothing)
{
    lt_tensor *x = leaf(ctx, 2, 3);
    lt_grad_off(ctx);
    lt_tensor *y = lt_run(ctx, "mul", NULL, x, x, NULL);
    lt_grad_on(ctx);
    CHECK(!lt_requires_grad(y));
    CHECK_FAILS(lt_backward(y, NULL), LT_EINVAL,
                "was not computed from anything that requires a gradient");
    RELEASE(y, x);
}

TEST_GRAPH(misuse_is_reported)
{
    lt_tensor *x = leaf(ctx, 2, 3), *y = lt_run(ctx, "mul", NULL, x, x, NULL),
              *loss = lt_run(ctx, "sum", NULL, y, NULL);
    CHECK_FAILS(lt_backward(y, NULL), LT_EINVAL,
                "the loss must have one element, but is 2 f64; take its mean or sum");
    CHECK_FAILS(lt_backward(loss, x), LT_EINVAL, "the gradient must be scalar f64, but is 2 f64");
    CHECK_FAILS(lt_set_requires_grad(y, true), LT_EINVAL, "detach()");
    CHECK_OK(lt_backward(loss, NULL));
    CHECK_FAILS(lt_backward(loss, NULL), LT_EINVAL, "freed by an earlier backward");
    int64_t n = 2;
    lt_tensor *ids = lt_tensor_full(ctx, LT_I64, 1, &n, 0);
    CHECK_FAILS(lt_set_requires_grad(ids, true), LT_EINVAL,
                "only float tensors can have gradients, but this one is i64");
    CHECK_NULL(lt_run(ctx, "ad", NULL, x, x, NULL), LT_EINVAL,
               "unknown op 'ad' (did you mean 'add'?)");
    CHECK_NULL(lt_run(ctx, "add", NULL, x, NULL), LT_EINVAL, "add: tensor y is missing");
    CHECK_NULL(lt_run(ctx, "add", NULL, x, x, x, NULL), LT_EINVAL,
               "add: expected at most 2 tensors, got 3");
    lt_ctx *other = lt_open(NULL);
    CHECK_NULL(lt_run(other, "add", NULL, x, x, NULL), LT_EINVAL,
               "add: x belongs to another context");
    lt_ctx_free(other);
    RELEASE(ids, x, y, loss);
}

TEST_GRAPH(a_changed_saved_tensor_is_detected)
{
    lt_tensor *x = leaf(ctx, 2, 3), *loss = take1("sum", lt_run(ctx, "mul", NULL, x, x, NULL));
    CHECK_OK(lt_fill(x, 5));
    CHECK_FAILS(lt_backward(loss, NULL), LT_EINVAL,
                "backward of mul: its input 1 was changed in place");
    CHECK(!lt_grad(x));
    RELEASE(loss, x);
}

TEST_GRAPH(a_changed_result_is_detected)
{
    lt_tensor *x = leaf(ctx, 2, 3), *y = lt_run(ctx, "exp", NULL, x, NULL);
    lt_tensor *loss = lt_run(ctx, "sum", NULL, y, NULL);
    CHECK_OK(lt_fill(y, 0));
    CHECK_FAILS(lt_backward(loss, NULL), LT_EINVAL, "backward of exp: its result was changed");
    RELEASE(y, loss, x);
}

TEST_GRAPH(a_partly_freed_graph_is_rejected)
{
    lt_tensor *x = leaf(ctx, 2, 3), *h = lt_run(ctx, "mul", NULL, x, x, NULL);
    lt_tensor *a = lt_run(ctx, "sum", NULL, h, NULL);
    lt_tensor *b = take1("sum", lt_run(ctx, "exp", NULL, h, NULL));
    lt_tensor *c = lt_run(ctx, "sum", NULL, x, NULL);
    CHECK_OK(lt_backward(a, NULL));
    CHECK_FAILS(lt_backward(b, NULL), LT_EINVAL, "was freed by an earlier backward");
    CHECK_NEAR(grad_at(x, 0), 6, 0);
    CHECK_OK(lt_backward(c, NULL)); /* the rejected backward left no marks */
    CHECK_NEAR(grad_at(x, 0), 7, 0);
    RELEASE(h, a, b, c, x);
}

TEST_GRAPH(masks_differ_within_a_step)
{
    lt_tensor *x = leaf(ctx, 64, 1), *y[3];
    for (int i = 0; i < 3; i++) { /* accumulation: the step number does not change */
        y[i] = lt_run(ctx, "dropout", NULL, x, NULL);
        lt_tensor *loss = lt_run(ctx, "sum", NULL, y[i], NULL);
        CHECK_OK(lt_backward(loss, NULL));
        lt_release(loss);
    }
    CHECK(memcmp(lt_data(y[0]), lt_data(y[1]), 64 * sizeof(double)) != 0);
    CHECK(memcmp(lt_data(y[1]), lt_data(y[2]), 64 * sizeof(double)) != 0);
    for (int i = 0; i < 3; i++)
        lt_release(y[i]);
    lt_release(x);
}

enum { ROWS = 32, WIDE = 5 };

#define TEST_SEED_7(title) TEST_WITH(title, lt_ctx *ctx, lt_open(&(lt_config){.seed = 7}), finish)

/* Writes the gradient of two dropouts of ones, for rows [first, first + n) of a batch, to grad. */
static void drop_rows(lt_ctx *ctx, int64_t first, int64_t n, double *grad)
{
    int64_t dims[] = {n, WIDE};
    lt_tensor *x = lt_tensor_full(ctx, LT_F64, 2, dims, 1);
    CHECK_OK(lt_set_requires_grad(x, true));
    lt_tensor *y = lt_run(ctx, "dropout", "p=0.3", x, NULL);
    y = take1("dropout", y);
    y = take1("sum", y);
    CHECK_OK(lt_backward(y, NULL));
    for (int64_t i = 0; i < n * WIDE; i++)
        grad[first * WIDE + i] = grad_at(x, i);
    RELEASE(x, y);
}

TEST_SEED_7(micro_batches_draw_the_same_numbers_as_the_batch)
{
    double whole[ROWS * WIDE], pieces[ROWS * WIDE], next[ROWS * WIDE];
    lt_tape *tape = lt_tape_current(ctx);
    drop_rows(ctx, 0, ROWS, whole);
    for (int64_t first = 0; first < ROWS; first += 8) {
        lt_tape_set_first_row(tape, first);
        drop_rows(ctx, first, 8, pieces);
    }
    CHECK_EQ(memcmp(whole, pieces, sizeof whole), 0);
    lt_optim *o = lt_optim_new(ctx, "sgd_step", NULL, 0);
    CHECK_OK(lt_optim_step(o, NULL, 0, NULL));
    drop_rows(ctx, 0, ROWS, next);
    CHECK(memcmp(whole, next, sizeof whole) != 0);
    lt_tape_set_first_row(tape, 16);
    CHECK_OK(lt_optim_step(o, NULL, 0, NULL));
    lt_set_step(ctx, 0); /* the step reset the row and the draw to 0 */
    drop_rows(ctx, 0, ROWS, next);
    CHECK_EQ(memcmp(whole, next, sizeof whole), 0);
    lt_optim_free(o);
}

/* Dropout of n rows of ones without recording, from the tape's current row. */
static void drop_plain(lt_ctx *ctx, int64_t n, double *y)
{
    lt_tensor *x = lt_tensor_full(ctx, LT_F64, 2, (int64_t[]){n, WIDE}, 1);
    lt_tensor *out = lt_run(ctx, "dropout", "p=0.3", x, NULL);
    CHECK(out && !lt_requires_grad(out));
    memcpy(y, lt_data(out), (size_t)(n * WIDE) * sizeof *y);
    RELEASE(out, x);
}

static void drop_pieces(lt_ctx *ctx, double *y)
{
    for (int64_t row = 0; row < ROWS; row += 8) {
        lt_tape_set_first_row(lt_tape_current(ctx), row);
        drop_plain(ctx, 8, y + row * WIDE);
    }
}

TEST_SEED_7(a_call_draws_the_same_numbers_recorded_or_not)
{
    double first[ROWS * WIDE], second[ROWS * WIDE], y[ROWS * WIDE];
    drop_plain(ctx, ROWS, first);
    drop_plain(ctx, ROWS, second);
    CHECK(memcmp(first, second, sizeof first) != 0);
    lt_tape_set_first_row(lt_tape_current(ctx), 0);
    lt_tensor *x = lt_tensor_full(ctx, LT_F64, 2, (int64_t[]){ROWS, WIDE}, 1);
    CHECK_OK(lt_set_requires_grad(x, true));
    for (int k = 0; k < 2; k++) {
        lt_tensor *out = lt_run(ctx, "dropout", "p=0.3", x, NULL);
        CHECK(out && lt_requires_grad(out));
        CHECK_EQ(memcmp(lt_data(out), k == 0 ? first : second, sizeof first), 0);
        lt_release(out);
    }
    drop_pieces(ctx, y);
    CHECK_EQ(memcmp(y, first, sizeof y), 0);
    lt_release(x);
}

TEST_SEED_7(calls_with_gradients_off_draw_different_numbers)
{
    double on[ROWS * WIDE], off[ROWS * WIDE], y[ROWS * WIDE];
    lt_optim *o = lt_optim_new(ctx, "sgd_step", NULL, 0);
    drop_plain(ctx, ROWS, on);
    CHECK_OK(lt_optim_step(o, NULL, 0, NULL)); /* begins a new pass */
    lt_set_step(ctx, 0);
    lt_grad_off(ctx);
    drop_plain(ctx, ROWS, off);
    drop_plain(ctx, ROWS, y);
    CHECK(memcmp(on, off, sizeof on) != 0);
    CHECK(memcmp(off, y, sizeof y) != 0);
    lt_grad_on(ctx);
    drop_plain(ctx, ROWS, y); /* the draws are not shifted */
    CHECK_EQ(memcmp(on, y, sizeof y), 0);
    lt_grad_off(ctx);
    drop_pieces(ctx, y);
    CHECK_EQ(memcmp(off, y, sizeof y), 0);
    CHECK_OK(lt_optim_step(o, NULL, 0, NULL));
    drop_plain(ctx, ROWS, y); /* another step draws different numbers */
    CHECK(memcmp(off, y, sizeof y) != 0);
    lt_set_step(ctx, 0);
    CHECK_OK(lt_optim_step(o, NULL, 0, NULL));
    lt_set_step(ctx, 0);
    drop_plain(ctx, ROWS, y);
    CHECK_EQ(memcmp(off, y, sizeof y), 0);
    lt_optim_free(o);
}

TEST_GRAPH(a_nan_loss_is_an_error_that_names_the_step)
{
    lt_set_step(ctx, 41);
    lt_tensor *x = leaf(ctx, 1, NAN), *loss = lt_run(ctx, "sum", NULL, x, NULL);
    CHECK_FAILS(lt_backward(loss, NULL), LT_ENUMERIC, "the loss is nan at step 42");
    RELEASE(x, loss);
}

TEST_GRAPH(deep_graphs_do_not_need_a_deep_stack)
{
    size_t before = lt_memory_stats(ctx).live;
    for (int backward = 0; backward < 2; backward++) {
        lt_tensor *x = leaf(ctx, 1, 1), *y = lt_retain(x);
        for (int i = 0; i < 200000; i++) {
            lt_tensor *next = lt_run(ctx, i % 2 ? "neg" : "sigmoid", NULL, y, NULL);
            lt_release(y);
            y = next;
        }
        if (backward)
            CHECK_OK(lt_backward(y, NULL));
        lt_release(y); /* without backward, this frees the whole graph */
        CHECK_EQ(lt_tape_nodes(lt_tape_current(ctx)), 0);
        lt_release(x);
    }
    CHECK_EQ(lt_memory_stats(ctx).live, before);
}

TEST_GRAPH(backward_frees_memory_as_it_goes)
{
    lt_tensor *x = leaf(ctx, 100000, 0.5), *y = lt_retain(x);
    for (int i = 0; i < 20; i++) {
        lt_tensor *next = lt_run(ctx, "sigmoid", NULL, y, NULL);
        lt_release(y);
        y = next;
    }
    y = take1("sum", y);
    size_t peak = lt_memory_stats(ctx).peak;
    CHECK_OK(lt_backward(y, NULL));
    CHECK(lt_memory_stats(ctx).peak <
          peak + 4 * 1000000); /* frees 20 outputs of 0.8 MB one by one; 2 gradients live */
    RELEASE(y, x);
}

/* ==== Hooks =================================================================================== */

typedef struct log_of {
    char text[256];
    lt_status fail;
} log_of;
typedef struct named {
    log_of *log;
    const char *name;
} named;

static lt_status note(void *ud, lt_tensor *x, lt_tensor *grad)
{
    named *n = ud;
    double v = 0;
    CHECK(!lt_grad_enabled(lt_tensor_ctx(x)));
    CHECK_OK(lt_item(grad, 0, &v));
    snprintf(n->log->text + strlen(n->log->text), sizeof n->log->text - strlen(n->log->text),
             "%s=%g ", n->name, v);
    return n->log->fail ? lt_fail(n->log->fail, "hook says no") : LT_OK;
}

static lt_status note_begin(void *ud, lt_ctx *ctx, lt_tensor *loss, lt_tensor *grad)
{
    CHECK(grad != NULL);
    CHECK(!lt_grad_enabled(ctx));
    CHECK(lt_requires_grad(loss));
    strcat(((named *)ud)->log->text, "begin ");
    return LT_OK;
}

static lt_status note_end(void *ud, lt_ctx *ctx, lt_status status)
{
    (void)ctx;
    strcat(((named *)ud)->log->text, status == LT_OK ? "end " : "broken end ");
    return status;
}

TEST_GRAPH(hooks_run_once_in_order_when_the_gradient_is_complete)
{
    log_of log = {"", LT_OK};
    named na = {&log, "a"}, nb = {&log, "b"}, nc = {&log, "c"}, slot = {&log, "slot"};
    lt_tensor *a = leaf(ctx, 1, 2), *b = leaf(ctx, 1, 3), *c = leaf(ctx, 1, 5),
              *unused = leaf(ctx, 1, 7);
    CHECK_OK(lt_on_grad(a, note, &na, NULL));
    CHECK_OK(lt_on_grad(b, note, &nb, NULL));
    CHECK_OK(lt_on_grad(c, note, &nc, NULL));
    CHECK_OK(lt_on_grad(c, note, &na, NULL));
    CHECK_OK(lt_on_grad(unused, note, &na, NULL));
    CHECK_OK(lt_set_part(
        ctx, LT_PART_EXCHANGE,
        &(lt_step_part){.ud = &slot, .begin = note_begin, .grad_ready = note, .end = note_end}));
    /* a is used first and last, so its hook runs after the use that backward reaches last. loss =
     * (ab + c) a */
    lt_tensor *loss = lt_run(ctx, "mul", NULL, a, b, NULL);
    loss = take2("add", loss, lt_retain(c));
    loss = take2("mul", loss, lt_retain(a));
    CHECK_OK(lt_backward(loss, NULL));
    CHECK_STR(log.text, "begin c=2 a=2 slot=2 a=17 slot=17 b=4 slot=4 end ");
    CHECK(!lt_grad(unused));
    lt_release(loss);

    log.text[0] = 0;
    CHECK_OK(lt_backward(c, NULL)); /* the loss is a leaf */
    CHECK_STR(log.text, "begin c=3 a=3 slot=3 end ");
    CHECK(lt_grad_enabled(ctx));

    log.text[0] = 0;
    log.fail = LT_EPEER;
    loss = lt_run(ctx, "mul", NULL, a, b, NULL);
    CHECK_FAILS(lt_backward(loss, NULL), LT_EPEER, "hook says no");
    CHECK_STR(log.text, "begin a=20 broken end "); /* 17 + 3, then no more */
    lt_release(loss);
    CHECK_OK(lt_set_part(ctx, LT_PART_EXCHANGE, NULL));
    RELEASE(a, b, c, unused);
}

TEST_GRAPH(a_leaf_frozen_after_forward_gets_no_gradient)
{
    lt_tensor *a = leaf(ctx, 1, 2), *b = leaf(ctx, 1, 3),
              *loss = lt_run(ctx, "mul", NULL, a, b, NULL);
    CHECK_OK(lt_set_requires_grad(a, false));
    CHECK_OK(lt_backward(loss, NULL));
    CHECK(!lt_grad(a));
    CHECK_NEAR(grad_at(b, 0), 2, 0);
    RELEASE(loss, a, b);
}

TEST_GRAPH(a_released_input_is_skipped)
{
    lt_tensor *a = leaf(ctx, 1, 2), *b = leaf(ctx, 1, 3),
              *loss = lt_run(ctx, "add", NULL, a, b, NULL);
    lt_release(a); /* add saves nothing, so this frees a */
    CHECK_OK(lt_backward(loss, NULL));
    CHECK_NEAR(grad_at(b, 0), 1, 0);
    RELEASE(loss, b);
}

/* ==== Tapes and scopes ======================================================================== */

TEST_GRAPH(several_tapes_coexist)
{
    lt_tape *tape = lt_tape_new(ctx);
    lt_tensor *x = leaf(ctx, 1, 2), *one = lt_run(ctx, "mul", NULL, x, x, NULL);
    CHECK(lt_tape_use(ctx, tape) != tape);
    lt_tensor *two = lt_run(ctx, "exp", NULL, x, NULL);
    CHECK_EQ(lt_tape_nodes(tape), 1);
    CHECK_NULL(lt_run(ctx, "add", NULL, one, two, NULL), LT_EINVAL, "was recorded on another tape");
    CHECK_OK(lt_backward(two, NULL));
    CHECK_OK(lt_backward(one, NULL));
    CHECK_NEAR(grad_at(x, 0), 4 + exp(2), 1e-15);
    RELEASE(one, two);
    lt_tape_free(tape);
    CHECK(lt_tape_current(ctx) != tape);
    lt_release(x);
}

TEST_GRAPH(a_scope_ends_its_graph)
{
    lt_tensor *x = leaf(ctx, 1, 2), *kept = NULL;
    for (int i = 0; i < 3; i++) {
        CHECK_OK(lt_scope_push(ctx));
        lt_tensor *h = lt_run(ctx, "exp", NULL, x, NULL);
        lt_release(kept);
        kept = take1("exp", h);
        lt_keep(kept);
        lt_scope_pop(ctx);
        CHECK(!lt_is_dead(kept));
        CHECK(!lt_requires_grad(kept)); /* the scope freed its history */
        CHECK_EQ(lt_tape_nodes(lt_tape_current(ctx)), 0);
    }
    RELEASE(kept, x);
    CHECK(lt_memory_stats(ctx).live > 0); /* the registry */
}

TEST_GRAPH(halves_are_widened_and_rounded_once)
{
    int64_t n = 3;
    lt_tensor *x = lt_tensor_full(ctx, LT_F16, 1, &n, 1.0009765625),
              *y = lt_tensor_full(ctx, LT_F16, 1, &n, 3);
    CHECK_OK(lt_set_requires_grad(x, true));
    lt_tensor *z = lt_run(ctx, "mul", NULL, x, y, NULL);
    double v;
    CHECK_EQ(lt_tensor_dtype(z), LT_F16);
    CHECK_OK(lt_item(z, 1, &v));
    CHECK_NEAR(v, 3.00390625, 0); /* 3.0029296875 is halfway and rounds to even */
    lt_tensor *loss = take1("sum", z);
    CHECK_OK(lt_backward(loss, NULL));
    CHECK_EQ(lt_tensor_dtype(lt_grad(x)), LT_F16);
    CHECK_NEAR(grad_at(x, 0), 3, 0);
    RELEASE(loss, x, y);
}
