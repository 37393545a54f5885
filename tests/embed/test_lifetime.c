/* test_lifetime.c - objects may outlive their context: see lt_ctx_free(). Each kind of object is
 * used and freed after its context was closed, on the CPU and on an accelerator. The memory of the
 * context must be freed with the last of them, which AddressSanitizer checks.
 */
#include "amp/amp.h"
#include "autograd/tape.h"
#include "data/data.h"
#include "dist/dist.h"
#include "tests/autograd/train.h"
#include "tests/embed/lifetime.h"

/* ==== Tensors ================================================================================= */

TEST_BOTH(a_tensor_with_its_history)
{
    lt_tensor *x = leaf(ctx, 4, 3), *y = lt_run(ctx, "mul", NULL, x, x, NULL);
    lt_tensor *z = lt_run(ctx, "sum", NULL, y, NULL);
    lt_ctx_free(ctx);
    CHECK_NEAR(sum_of(y), 36, 0);
    CHECK_FAILS(lt_backward(z, NULL), LT_EINVAL, "context");
    CHECK_NULL(lt_run(lt_tensor_ctx(y), "neg", NULL, y, NULL), LT_EINVAL,
               "neg: the context was closed by lt_ctx_free()");
    RELEASE(z, y, x);
}

TEST_BOTH(a_deep_graph_by_its_end_alone)
{
    lt_tensor *x = leaf(ctx, 4, 3);
    for (int i = 0; i < 1000; i++) {
        lt_tensor *y = lt_run(ctx, "neg", NULL, x, NULL);
        lt_release(x);
        x = y;
    }
    lt_ctx_free(ctx);
    CHECK_NEAR(sum_of(x), 12, 0);
    lt_release(x);
}

TEST_BOTH(several_outputs_of_one_op)
{
    int64_t n = 3;
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 2, (int64_t[]){4, n}, 1), *out[LT_MAX_OUT] = {NULL};
    lt_tensor *w = leaf(ctx, n, 1), *b = leaf(ctx, n, 0);
    lt_tensor *mean = lt_tensor_full(ctx, LT_F32, 1, &n, 0);
    lt_tensor *var = lt_tensor_full(ctx, LT_F32, 1, &n, 1);
    lt_tensor *in[] = {x, w, b, mean, var};
    lt_opt opts[LT_MAX_OPT];
    const lt_def *def = lt_op_find(ctx, "batch_norm");
    CHECK_OK(lt_opts_parse(&def->schema, "train=true", opts));
    CHECK_OK(lt_apply(ctx, def, in, 5, opts, out));
    lt_ctx_free(ctx); /* with statistics that no optimizer has committed */
    for (int i = 0; i < LT_MAX_OUT; i++)
        lt_release(out[i]);
    for (int i = 0; i < 5; i++)
        lt_release(in[i]);
}

TEST_BOTH(views_and_their_copies)
{
    lt_tensor *x = leaf(ctx, 6, 2), *rows = lt_rows(x, 1, 2);
    lt_tensor *flat = lt_view(x, 2, (int64_t[]){2, 3}), *detached = lt_detach(x);
    lt_tensor *back = lt_run(ctx, "reshape", "shape=3,2", x, NULL);
    lt_ctx_free(ctx);
    lt_release(x);
    CHECK_OK(lt_fill(rows, 5));
    CHECK_NEAR(sum_of(flat), 18, 0);
    CHECK_OK(lt_copy(detached, back));
    lt_tensor *more = lt_rows(flat, 1, 1), *here = lt_to(flat, "cpu");
    CHECK_NEAR(sum_of(more), 6, 0);
    CHECK_NEAR(sum_of(here), 18, 0);
    RELEASE(more, here, flat, back, rows, detached);
}

TEST_BOTH(a_leaf_with_a_gradient_and_hooks)
{
    lt_tensor *x = leaf(ctx, 4, 3), *y = lt_run(ctx, "sum", NULL, x, NULL);
    CHECK_OK(lt_backward(y, NULL));
    lt_tensor *grad = lt_retain(lt_grad(x)), *saved = lt_run(ctx, "mul", NULL, x, x, NULL);
    lt_tensor *kept = lt_retain(lt_saved(saved, 0));
    lt_release(saved);
    lt_ctx_free(ctx);
    CHECK(lt_grad(x) == grad);
    CHECK(lt_requires_grad(x));
    CHECK_NEAR(sum_of(kept), 12, 0);
    lt_zero_grad(x);
    CHECK(lt_grad(x) == NULL);
    CHECK_OK(lt_set_requires_grad(x, false));
    RELEASE(x, y, kept);
    CHECK_NEAR(sum_of(grad), 4, 0);
    lt_release(grad);
}

static int hooks_freed;
static lt_status do_nothing(void *ud, lt_tensor *x, lt_tensor *grad)
{
    (void)ud;
    (void)x;
    (void)grad;
    return LT_OK;
}
static void count_freed(void *ud) { ++*(int *)ud; }

TEST_BOTH(a_hook_goes_with_its_leaf)
{
    hooks_freed = 0;
    lt_tensor *x = leaf(ctx, 4, 3);
    CHECK_OK(lt_on_grad(x, do_nothing, &hooks_freed, count_freed));
    lt_ctx_free(ctx);
    CHECK_EQ(hooks_freed, 0);
    CHECK_OK(lt_on_grad(x, do_nothing, &hooks_freed, count_freed));
    lt_release(x);
    CHECK_EQ(hooks_freed, 2);
}

TEST_BOTH(tensors_of_scopes_that_were_open)
{
    lt_tensor *x = leaf(ctx, 4, 3);
    CHECK_OK(lt_scope_push(ctx));
    lt_tensor *y = lt_run(ctx, "mul", NULL, x, x, NULL), *z = lt_run(ctx, "neg", NULL, y, NULL);
    lt_keep(z);
    lt_ctx_free(ctx);
    CHECK(lt_is_dead(y));
    CHECK_NEAR(sum_of(z), -36, 0);
    CHECK_FAILS(lt_scope_push(lt_tensor_ctx(x)), LT_EINVAL, "closed by lt_ctx_free()");
    RELEASE(x, y, z);
}

TEST_BOTH(deferred_scalars)
{
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 0, NULL, 7);
    lt_deferred *a = lt_item_deferred(x), *b = lt_item_deferred(x);
    double value = 0;
    lt_ctx_free(ctx);
    lt_release(x);
    CHECK_OK(lt_deferred_item(a, &value));
    CHECK_NEAR(value, 7, 0);
    lt_deferred_free(a);
    lt_deferred_free(b);
}

TEST_BOTH(tensors_of_a_context_beside_it)
{
    lt_ctx *other = lt_open(&(lt_config){.threads = 1});
    int64_t n = 4;
    lt_tensor *x = leaf(ctx, n, 3), *far = lt_tensor_full(other, LT_F32, 1, &n, 2);
    lt_tensor *y = lt_run(ctx, "mul", NULL, x, x, NULL);
    CHECK_NULL(lt_run(ctx, "mul", NULL, y, far, NULL), LT_EINVAL,
               "mul: y belongs to another context");
    CHECK_FAILS(lt_backward(y, far), LT_EINVAL,
                "backward: the gradient and the loss belong to different contexts");
    lt_ctx_free(other);
    CHECK_OK(lt_copy(x, far));
    CHECK_NEAR(sum_of(x), 8, 0);
    lt_ctx_free(ctx);
    CHECK_OK(lt_copy(far, y));
    CHECK_NEAR(sum_of(far), 36, 0);
    RELEASE(y, far, x);
}

/* ==== Tapes and dry runs ==================================================================== */

TEST_BOTH(a_tape_of_ones_own)
{
    lt_tape *tape = lt_tape_new(ctx), *unused = lt_tape_new(ctx);
    lt_tape_use(ctx, tape);
    lt_tensor *x = leaf(ctx, 4, 3), *y = lt_run(ctx, "mul", NULL, x, x, NULL);
    lt_tensor *z = lt_run(ctx, "sum", NULL, y, NULL);
    lt_ctx_free(ctx);
    CHECK_EQ(lt_tape_nodes(tape), 2);
    CHECK_FAILS(lt_backward(z, NULL), LT_EINVAL, "closed by lt_ctx_free()");
    lt_release(z);
    lt_tape_free(tape);
    lt_tape_free(unused);
    RELEASE(y, x);
}

TEST_BOTH(a_dry_run_that_was_on)
{
    CHECK_OK(lt_dry_run_begin(ctx, NULL, NULL, NULL));
    lt_tensor *x = leaf(ctx, 4, 3), *y = lt_run(ctx, "mul", NULL, x, x, NULL);
    lt_ctx_free(ctx);
    RELEASE(x, y);
}

TEST_BOTH(a_precision_check)
{
    lt_precision_check *check = lt_precision_check_new(ctx);
    CHECK_OK(lt_precision_check_begin(check, 0, false));
    lt_tensor *x = leaf(ctx, 4, 3), *y = lt_run(ctx, "mul", NULL, x, x, NULL);
    lt_ctx_free(ctx);
    CHECK_OK(lt_precision_check_end(check));
    lt_precision_check_free(check);
    RELEASE(x, y);
}

/* ==== Training ================================================================================ */

typedef struct trainer {
    lt_tensor *w, *frozen, *buffer;
    lt_params *params;
    lt_optim *optim;
} trainer;

static trainer trainer_new(lt_ctx *ctx)
{
    lt_init one = {LT_INIT_CONSTANT, 1, 0};
    trainer t = {.w = param(ctx, LT_F32, 4, 1),
                 .frozen = param(ctx, LT_F32, 4, 1),
                 .buffer = lt_buffer_new(ctx, LT_F32, 1, (int64_t[]){4}, one)};
    lt_tensor *all[] = {lt_retain(t.w), lt_retain(t.frozen), lt_retain(t.buffer)};
    t.params = placed(ctx, all, 3);
    t.optim = lt_optim_new(ctx, "momentum_step", &t.w, 1);
    CHECK(t.optim != NULL);
    return t;
}

/* w - 0.5 d sum(w^2) / dw */
static void go_back(lt_ctx *ctx, const trainer *t)
{
    lt_tensor *y = lt_run(ctx, "mul", NULL, t->w, t->w, NULL);
    lt_tensor *loss = lt_run(ctx, "sum", NULL, y, NULL);
    CHECK_OK(lt_backward(loss, NULL));
    RELEASE(y, loss);
}

static lt_status take_step(lt_optim *optim) { return step_with(optim, "lr=0.25", NULL); }

static void trainer_free(trainer *t)
{
    lt_optim_free(t->optim);
    lt_params_free(t->params);
    RELEASE(t->buffer, t->frozen, t->w);
}

TEST_BOTH(parameters_their_tree_and_an_optimizer)
{
    trainer t = trainer_new(ctx);
    char before[65], after[65];
    double norm;
    go_back(ctx, &t);
    CHECK_OK(take_step(t.optim)); /* its outcome is pending on an accelerator */
    CHECK_OK(lt_params_sha256(t.params, before));
    go_back(ctx, &t);
    lt_tensor *slot = lt_optim_slot(t.optim, 0, t.w), *half = lt_half(t.w, LT_BF16);
    CHECK_NEAR(sum_of(half), 2, 0);
    lt_ctx_free(ctx);
    CHECK_EQ(lt_optim_step_status(t.optim), LT_APPLIED);
    CHECK_OK(lt_params_sha256(t.params, after));
    CHECK_STR(after, before);
    CHECK_FAILS(take_step(t.optim), LT_EINVAL, "closed by lt_ctx_free()");
    CHECK_FAILS(lt_optim_grad_norm(t.optim, &norm), LT_EINVAL, "closed by lt_ctx_free()");
    CHECK_NEAR(sum_of(slot), 8, 0);
    CHECK_NEAR(sum_of(lt_grad(t.w)), 4, 0);
    lt_release(slot);
    trainer_free(&t);
}

TEST_BOTH(parameters_in_any_order)
{
    trainer t = trainer_new(ctx);
    go_back(ctx, &t);
    CHECK_OK(take_step(t.optim));
    lt_ctx_free(ctx);
    RELEASE(t.w, t.frozen);
    lt_params_free(t.params);
    lt_optim_free(t.optim);
    CHECK_NEAR(sum_of(t.buffer), 4, 0);
    lt_release(t.buffer);
}

TEST_BOTH(parameters_without_memory_yet)
{
    lt_params *params = lt_params_new(ctx);
    lt_tensor *w = param(ctx, LT_F32, 4, 1);
    CHECK_OK(lt_params_add(params, "w", w));
    lt_ctx_free(ctx);
    CHECK_OK(lt_params_place(params));
    CHECK_NEAR(sum_of(w), 4, 0);
    lt_params_free(params);
    lt_release(w);
}

TEST_BOTH(a_loss_scale_in_use)
{
    lt_scaler scaler = lt_scaler_init(LT_SCALE_ADAPTIVE, 8, 0);
    lt_loss_scale *scale = lt_loss_scale_new(ctx, &scaler);
    trainer t = trainer_new(ctx);
    CHECK_OK(lt_use_loss_scale(ctx, scale));
    go_back(ctx, &t);
    CHECK_OK(take_step(t.optim));
    go_back(ctx, &t);
    lt_ctx_free(ctx);
    CHECK_EQ(lt_loss_scale_scaler(scale)->steps, 1);
    CHECK_EQ(lt_loss_scale_step(scale).skipped, 0);
    lt_loss_scale_free(scale);
    trainer_free(&t);
}

TEST_BOTH(a_grad_table)
{
    lt_grad_table *table = lt_grad_table_new(ctx);
    lt_tensor *x = leaf(ctx, 4, 3);
    lt_grad_stats stats;
    CHECK_OK(lt_grad_table_measure(table, 0, x, 1));
    lt_ctx_free(ctx);
    CHECK_OK(lt_grad_table_read(table, 0, 1, &stats));
    CHECK_NEAR(stats.largest, 3, 0);
    CHECK_OK(lt_grad_table_rescale(table, 1, x, x, 2));
    CHECK_OK(lt_grad_table_clear(table, 0));
    lt_release(x);
    lt_grad_table_free(table);
}

TEST_BOTH(a_reducer)
{
    lt_group *group;
    CHECK_OK(lt_local_open(1, NULL, &group));
    lt_reducer *reducer = lt_reducer_new(ctx, group, NULL);
    trainer t = trainer_new(ctx);
    CHECK_OK(lt_reducer_add(reducer, &t.w, 1));
    go_back(ctx, &t);
    CHECK_OK(take_step(t.optim));
    go_back(ctx, &t);
    lt_ctx_free(ctx);
    CHECK_NEAR(sum_of(lt_grad(t.w)), 4, 0);
    lt_reducer_free(reducer);
    lt_group_close(group);
    CHECK_NEAR(sum_of(lt_grad(t.w)), 4, 0);
    trainer_free(&t);
}

/* ==== Data and files ========================================================================== */

TEST_BOTH(sources_and_batches)
{
    lt_source *source = lt_source_synthetic(ctx, 0, 64, 8, 8, 3, 4);
    lt_source *sized = lt_source_resized(source, 6, 6);
    lt_tensor *x, *y, *x2, *y2;
    lt_batches *b = lt_batches_new(ctx, sized, &(lt_batch_options){.batch = 8, .workers = 2});
    CHECK(b != NULL);
    CHECK_OK(lt_batches_next(b, &x, &y));
    lt_ctx_free(ctx); /* while threads of b make batches */
    lt_source_release(source);
    lt_source_release(sized);
    CHECK_OK(lt_batches_next(b, &x2, &y2));
    CHECK_NEAR(sum_of(y2), 12, 0);
    lt_batches_free(b);
    CHECK(isfinite(sum_of(x2)));
    RELEASE(x, y, x2, y2);
}

TEST_BOTH(sources_of_tensors_of_another_context)
{
    lt_ctx *other = lt_open(&(lt_config){.threads = 1});
    lt_tensor *images = lt_tensor_full(ctx, LT_F32, 4, (int64_t[]){4, 2, 2, 1}, 1), *x, *y;
    lt_tensor *labels = lt_tensor_full(ctx, LT_I64, 1, (int64_t[]){4}, 1);
    lt_source *source = lt_source_tensors(ctx, images, labels);
    RELEASE(images, labels);
    lt_batches *b = lt_batches_new(other, source, &(lt_batch_options){.batch = 4});
    lt_source_release(source);
    lt_ctx_free(ctx);
    lt_ctx_free(other);
    CHECK_OK(lt_batches_next(b, &x, &y));
    lt_batches_free(b);
    CHECK_NEAR(sum_of(x), 16, 0);
    RELEASE(x, y);
}

TEST_BOTH(a_file)
{
    char folder[32], path[64];
    make_folder(folder);
    snprintf(path, sizeof path, "%s/x.safetensors", folder);
    lt_tensor *x = leaf(ctx, 4, 3);
    CHECK_OK(lt_file_save(path, 1, (const char *const[]){"x"}, &x, 0, NULL));
    lt_release(x);
    lt_file *file = lt_file_open(ctx, path);
    lt_ctx_free(ctx);
    CHECK_OK(lt_file_verify(file));
    x = lt_file_read(file, 0);
    CHECK_NEAR(sum_of(x), 12, 0);
    lt_file_close(file);
    lt_release(x);
    remove_folder(folder);
}

/* ==== Checks and traces ======================================================================= */

static void note_nothing(void *ud, const lt_call *call, bool backward, double seconds)
{
    (void)ud;
    (void)call;
    (void)backward;
    (void)seconds;
}

TEST_BOTH(timers_traces_and_autocast)
{
    char folder[32], path[64];
    make_folder(folder);
    snprintf(path, sizeof path, "%s/trace.json", folder);
    CHECK_OK(lt_trace_create(path));
    CHECK_OK(lt_trace_open(ctx, path, 0));
    CHECK_OK(lt_trace_open(ctx, path, 1)); /* closes the first one */
    lt_set_timer(ctx, note_nothing, NULL);
    lt_set_autocast(ctx, LT_BF16);
    lt_grad_off(ctx);
    lt_tensor *x = leaf(ctx, 4, 3), *y = lt_run(ctx, "mul", NULL, x, x, NULL);
    lt_ctx_free(ctx);
    CHECK_NEAR(sum_of(y), 36, 0);
    RELEASE(x, y);
    remove_folder(folder);
}
