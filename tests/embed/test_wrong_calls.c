/* test_wrong_calls.c - public functions get negative, huge, missing and repeated arguments, and are
 * called in the wrong order: core, parameters, autograd, optimizers, ops, amp, data and Lua. Each
 * call must fail with a message, or do nothing where its header says so. The test also runs under
 * AddressSanitizer. test_wrong_calls_dist.c has the functions of dist, tests/ops/test_arguments.c
 * the options of ops, tests/data/test_batches.c and test_shards.c the options of batches.
 */
#include "lua/luatrain.h"
#include "tests/embed/wrong_calls.h"

#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

static const int64_t one[] = {3}, two[] = {2, 3}, huge[] = {INT64_MAX, 2}, negative[] = {2, -1},
                     wide[] = {1, 1, 1, 1, 1, 1, 1, 1, 1};

static lt_ctx *open_ctx(void)
{
    lt_ctx *ctx = lt_open(&(lt_config){.threads = 1, .device = "cpu"});
    CHECK(ctx != NULL);
    return ctx;
}

#define TEST_CALLS(title) TEST_WITH(title, lt_ctx *ctx, open_ctx(), lt_ctx_free)

/* ==== Core ==================================================================================== */

TEST(configs)
{
    NONE(LT_EUSAGE, lt_open(&(lt_config){.threads = -1}), "threads");
    NONE(LT_EUSAGE, lt_open(&(lt_config){.threads = INT_MAX}), "threads");
    NONE(LT_EUSAGE, lt_open(&(lt_config){.device = "tpu"}), "tpu");
    NONE(LT_EUSAGE, lt_open(&(lt_config){.device = ""}), "device");
    NONE(LT_EUSAGE, lt_open(&(lt_config){.device = "cpu", .fault = "alloc:n=-1"}), "fault");
    NONE(LT_EUSAGE, lt_open(&(lt_config){.device = "cpu", .fault = "x:y=z"}), "fault");
}

TEST_CALLS(steps)
{
    lt_set_step(ctx, INT64_MIN);
    lt_set_seed(ctx, 1);
    lt_set_step(ctx, INT64_MAX);
    QUIET(lt_random_step(ctx) == -1);
    lt_set_random_step(ctx, INT64_MIN);
    QUIET(lt_random_step(ctx) == INT64_MIN);
}

TEST_CALLS(tensors)
{
    double v[6] = {0};
    int64_t n;
    NONE(LT_EINVAL, lt_tensor_new(ctx, LT_F32, -1, one), "-1");
    NONE(LT_EINVAL, lt_tensor_new(ctx, LT_F32, 9, wide), "9");
    NONE(LT_EINVAL, lt_tensor_new(ctx, LT_F32, 2, negative), "-1");
    NONE(LT_EINVAL, lt_tensor_new(ctx, LT_F32, 2, huge), "too large");
    NONE(LT_EINVAL, lt_tensor_full(ctx, LT_U8, 1, one, -1), "-1");
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 2, two, 1),
              *i = lt_tensor_full(ctx, LT_I64, 1, one, 1);
    NONE(LT_EINVAL, lt_view(x, 1, one), "element");
    NONE(LT_EINVAL, lt_view(x, -1, one), "-1");
    NONE(LT_EINVAL, lt_view(x, 2, negative), "-1");
    NONE(LT_EINVAL, lt_rows(x, -1, 1), "row");
    NONE(LT_EINVAL, lt_rows(x, 0, 3), "row");
    NONE(LT_EINVAL, lt_rows(x, INT64_MAX, INT64_MAX), "row");
    NONE(LT_EINVAL, lt_rows(x, 1, -1), "row");
    REFUSES(LT_EINVAL, lt_item(x, -1, v), "out of range");
    REFUSES(LT_EINVAL, lt_item(x, 6, v), "out of range");
    REFUSES(LT_EINVAL, lt_item_integer(x, INT64_MAX, &n), "out of range");
    NONE(LT_EINVAL, lt_item_deferred(x), "element");
    REFUSES(LT_EINVAL, lt_copy(x, i), "element");
    REFUSES(LT_EINVAL, lt_fill(i, 0.5), "0.5");
    REFUSES(LT_EINVAL, lt_fill(i, NAN), "nan");
    REFUSES(LT_EINVAL, lt_fill_uniform(i, LT_RNG_USER, 0, 0, 0, 1), "i64");
    REFUSES(LT_EINVAL, lt_fill_uniform(x, LT_RNG_USER, 0, 0, 1, 0), "low");
    REFUSES(LT_EINVAL, lt_fill_uniform(x, LT_RNG_USER, 0, 0, -INFINITY, 1), "finite");
    REFUSES(LT_EINVAL, lt_fill_normal(x, LT_RNG_USER, 0, 0, NAN, 1), "finite");
    REFUSES(LT_EINVAL, lt_fill_normal(x, LT_RNG_USER, 0, 0, 0, -1), "deviation");
    NONE(LT_EENV, lt_to(x, "cuda:7"), "cuda:7");
    NONE(LT_EENV, lt_to(x, "tpu"), "tpu");
    QUIET((lt_release(NULL), lt_retain(NULL) == NULL));
    QUIET((lt_deferred_free(NULL), lt_scope_pop(ctx), lt_keep_outer(x), true));
    RELEASE(x, i);
}

TEST_CALLS(dtypes)
{
    static const int wrong[] = {-1, LT_DTYPE_COUNT, 99};
    lt_init init = {LT_INIT_CONSTANT, 1, 0};
    double v[3] = {0};
    for (int i = 0; i < 3; i++) {
        lt_dtype dtype = (lt_dtype)wrong[i];
        char text[64];
        snprintf(text, sizeof text, "%d is not a dtype; see lt_dtype", wrong[i]);
        NONE(LT_EINVAL, lt_tensor_new(ctx, dtype, 1, one), text);
        NONE(LT_EINVAL, lt_tensor_full(ctx, dtype, 1, one, 1), text);
        NONE(LT_EINVAL, lt_tensor_from(ctx, dtype, 1, one, v), text);
        NONE(LT_EINVAL, lt_param_new(ctx, dtype, 1, one, init), text);
        NONE(LT_EINVAL, lt_buffer_new(ctx, dtype, 1, one, init), text);
        QUIET(lt_dtype_bytes(dtype) == 0 && strcmp(lt_dtype_name(dtype), "unknown") == 0);
    }
}

TEST_CALLS(dead_tensors)
{
    double v[6];
    CHECK_OK(lt_scope_push(ctx));
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 2, two, 1);
    lt_scope_pop(ctx);
    lt_scope_pop(ctx);
    QUIET(lt_is_dead(x));
    NONE(LT_EINVAL, lt_data(x), "keep");
    REFUSES(LT_EINVAL, lt_read(x, v), "keep");
    REFUSES(LT_EINVAL, lt_fill(x, 1), "keep");
    REFUSES(LT_EINVAL, lt_item(x, 0, v), "keep");
    NONE(LT_EINVAL, lt_view(x, 2, two), "keep");
    NONE(LT_EINVAL, lt_rows(x, 0, 1), "keep");
    NONE(LT_EINVAL, lt_detach(x), "keep");
    NONE(LT_EINVAL, lt_run(ctx, "relu", NULL, x, NULL), "keep");
    REFUSES(LT_EINVAL, lt_set_requires_grad(x, true), "keep");
    REFUSES(LT_EINVAL, lt_file_save("dead.safetensors", 1, (const char *[]){"x"}, &x, 0, NULL),
            "keep");
    lt_release(x);
}

TEST_CALLS(files)
{
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 2, two, 1),
              *y = lt_tensor_full(ctx, LT_F32, 1, one, 1);
    const char *names[] = {"x", "x"}, *text = "\xff", *reserved = "__metadata__";
    lt_tensor *tensors[] = {x, y};
    REFUSES(LT_EINVAL, lt_file_save("m.safetensors", 2, names, tensors, 0, NULL), "x");
    REFUSES(LT_EINVAL, lt_file_save("m.safetensors", 1, &text, tensors, 0, NULL), "UTF-8");
    REFUSES(LT_EINVAL, lt_file_save("m.safetensors", 1, &reserved, tensors, 0, NULL),
            "__metadata__");
    REFUSES(LT_EFILE, lt_file_save("no/m.safetensors", 1, names, tensors, 0, NULL), "no/m");
    REFUSES(LT_EFILE, lt_file_replace("/", "x", 1), "/");
    NONE(LT_EFILE, lt_file_open(ctx, "none.safetensors"), "none.safetensors");
    NONE(LT_EFILE, lt_file_open(ctx, "/"), "/");
    char path[] = "/tmp/misuse-XXXXXX";
    close(mkstemp(path));
    CHECK_OK(lt_file_save(path, 1, names, tensors, 0, NULL));
    lt_file *file = lt_file_open(ctx, path);
    CHECK(file != NULL);
    const char *key, *value;
    NONE(LT_EINVAL, lt_file_read(file, -1), "-1");
    NONE(LT_EINVAL, lt_file_read(file, 1), "1");
    NONE(LT_EINVAL, lt_file_read(file, INT_MAX), "2147483647");
    REFUSES(LT_EINVAL, lt_file_read_into(file, -1, x), "-1");
    REFUSES(LT_EFILE, lt_file_read_into(file, 0, y), "x");
    QUIET(lt_file_find(file, "y") == -1 && !lt_file_meta(file, "y"));
    QUIET(!lt_file_meta_at(file, 99, &key, &value) && !lt_file_meta_at(file, -1, &key, &value));
    lt_file_close(file);
    lt_file_close(NULL);
    remove(path);
    RELEASE(x, y);
}

/* ==== Parameters and autograd ================================================================= */

TEST(parameters)
{
    lt_ctx *ctx = open_ctx(), *other = open_ctx();
    lt_init init = {LT_INIT_CONSTANT, 0, 0};
    char hex[65];
    const char *name;
    lt_tensor *x;
    NONE(LT_EINVAL, lt_param_new(ctx, LT_I64, 1, one, init), "float");
    NONE(LT_EINVAL, lt_param_new(ctx, LT_F32, -1, one, init), "-1");
    NONE(LT_EINVAL, lt_param_new(ctx, LT_F32, 2, negative, init), "-1");
    NONE(LT_EINVAL, lt_buffer_new(ctx, LT_U8, 1, one, init), "float");
    lt_params *params = lt_params_new(ctx);
    lt_tensor *w = lt_param_new(ctx, LT_F32, 1, one, init),
              *b = lt_buffer_new(ctx, LT_F32, 1, one, init);
    lt_tensor *far = lt_param_new(other, LT_F32, 1, one, init),
              *t = lt_tensor_full(ctx, LT_F32, 1, one, 1);
    NONE(LT_EINVAL, lt_data(w), "memory");
    NONE(LT_EINVAL, lt_half(w, LT_BF16), "parameter");
    REFUSES(LT_EINVAL, lt_params_add(params, "t", t), "t");
    REFUSES(LT_EINVAL, lt_params_add(params, "far", far), "context");
    CHECK_OK(lt_params_add(params, "w", w));
    CHECK_OK(lt_params_add(params, "b", b));
    REFUSES(LT_EINVAL, lt_params_add(params, "w", b), "w");
    REFUSES(LT_EINVAL, lt_params_sha256(params, hex), "memory");
    REFUSES(LT_EINVAL, lt_param_set_dtype(w, LT_I32), "float");
    CHECK_OK(lt_params_place(params));
    CHECK_OK(lt_params_place(params));
    REFUSES(LT_EINVAL, lt_param_set_dtype(w, LT_F64), "memory");
    REFUSES(LT_EINVAL, lt_params_freeze(params, 1, true), "1");
    REFUSES(LT_EINVAL, lt_params_freeze(params, 2, true), "2");
    REFUSES(LT_EINVAL, lt_params_freeze(params, -1, true), "-1");
    NONE(LT_EINVAL, lt_half(w, LT_F64), "f64");
    NONE(LT_EINVAL, lt_half(b, LT_BF16), "parameter");
    NONE(LT_EINVAL, lt_half(t, LT_BF16), "parameter");
    QUIET(!lt_params_span(params, 2) && !lt_params_span(params, -1) &&
          !lt_params_find(params, "x"));
    QUIET(!lt_params_name(params, 2, &name, &x) && !lt_params_name(params, -1, &name, &x));
    lt_params *wrong = lt_params_new(ctx);
    lt_tensor *u = lt_param_new(ctx, LT_F32, 1, one, (lt_init){LT_INIT_UNIFORM, 1, -1});
    CHECK_OK(lt_params_add(wrong, "u", u));
    REFUSES(LT_EINVAL, lt_params_place(wrong), "u");
    lt_params_free(wrong);
    lt_params_free(params);
    lt_params_free(NULL);
    RELEASE(w, b, far, t, u);
    lt_ctx_free(other);
    lt_ctx_free(ctx);
}

TEST(signatures_and_options)
{
    lt_schema s;
    lt_opt opts[LT_MAX_OPT];
    REFUSES(LT_EINVAL, lt_schema_parse("", &s), "parse");
    REFUSES(LT_EINVAL, lt_schema_parse("f", &s), "f");
    REFUSES(LT_EINVAL, lt_schema_parse("f(", &s), "f");
    REFUSES(LT_EINVAL, lt_schema_parse("f(x; a=)", &s), "f");
    REFUSES(LT_EINVAL, lt_schema_parse("f(a, b, c, d, e, f, g)", &s), "f");
    REFUSES(LT_EINVAL, lt_schema_parse("f(x; a=b)", &s), "b");
    CHECK_OK(lt_schema_parse("f(x; stride=1, lr#, act=none|relu)", &s));
    QUIET(lt_schema_find(&s, "lr") == 1);
    QUIET(lt_schema_index(&s, "lr") == 1);
    QUIET(lt_schema_index(&s, "step") == -1);
    REFUSES(LT_EINVAL, lt_opts_parse(&s, NULL, opts), "lr");
    REFUSES(LT_EINVAL, lt_opts_parse(&s, "lr=x", opts), "lr");
    REFUSES(LT_EINVAL, lt_opts_parse(&s, "lr=1 lr=2", opts), "lr");
    REFUSES(LT_EINVAL, lt_opts_parse(&s, "lr=1 stride=1,2,3,4,5,6,7,8,9", opts), "stride");
    REFUSES(LT_EINVAL, lt_opts_parse(&s, "lr=1 stride=99999999999999999999", opts), "stride");
    REFUSES(LT_EINVAL, lt_opts_parse(&s, "lr=1 act=rellu", opts), "relu");
    REFUSES(LT_EINVAL, lt_opts_parse(&s, "lr=1 =", opts), "=");
    lt_opts_clear(&s, opts);
    REFUSES(LT_EINVAL, lt_opts_complete(&s, opts), "lr");
    REFUSES(LT_EINVAL, lt_schema_word(&s, 2, "") < 0 ? lt_errcode() : LT_OK, "act");
}

TEST(ops)
{
    lt_ctx *ctx = open_ctx(), *other = open_ctx();
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 2, two, 1),
              *far = lt_tensor_full(other, LT_F32, 2, two, 1);
    lt_tensor *out = NULL, *none = NULL, *many[100];
    const lt_def *relu = lt_op_find(ctx, "relu"), *cat = lt_op_find(ctx, "cat");
    for (int i = 0; i < 100; i++)
        many[i] = x;
    lt_opt zero[LT_MAX_OPT] = {{0}};
    NONE(LT_EINVAL, lt_op_find(ctx, "rellu"), "relu");
    NONE(LT_EINVAL, lt_op_find(ctx, ""), "op");
    NONE(LT_EINVAL, lt_op_find(ctx, NULL), "op");
    QUIET(!lt_op_at(ctx, -1) && !lt_op_at(ctx, INT_MAX));
    NONE(LT_EINVAL, lt_run(ctx, "rellu", NULL, x, NULL), "relu");
    NONE(LT_EINVAL, lt_run(ctx, "relu", NULL, NULL), "relu");
    NONE(LT_EINVAL, lt_run(ctx, "relu", NULL, x, x, NULL), "relu");
    NONE(LT_EINVAL, lt_run(ctx, "relu", "a=1", x, NULL), "a");
    NONE(LT_EINVAL, lt_run(ctx, "add", NULL, x, far, NULL), "context");
    NONE(LT_EINVAL, lt_runv(ctx, "relu", NULL, &x, -1), "relu");
    NONE(LT_EINVAL, lt_runv(ctx, "relu", NULL, &none, 1), "relu");
    NONE(LT_EINVAL, lt_runv(ctx, "cat", "axis=0", many, 100), "cat");
    REFUSES(LT_EINVAL, lt_apply(ctx, relu, &x, -1, NULL, &out), "relu");
    REFUSES(LT_EINVAL, lt_apply(ctx, relu, &x, INT_MAX, NULL, &out), "relu");
    REFUSES(LT_EINVAL, lt_apply(ctx, relu, NULL, 0, NULL, &out), "relu");
    REFUSES(LT_EINVAL, lt_apply(ctx, cat, many, 2, NULL, &out), "axis");
    REFUSES(LT_EINVAL, lt_apply(ctx, cat, many, 2, zero, &out), "axis");
    CHECK(out == NULL);
    REFUSES(LT_EINVAL, lt_op_register(ctx, relu->op), "relu");
    lt_op bare = {.sig = "bare(x)"};
    REFUSES(LT_EINVAL, lt_op_register(ctx, &bare), "bare");
    RELEASE(x, far);
    lt_ctx_free(other);
    lt_ctx_free(ctx);
}

static lt_status end_pass(void *ud, lt_tensor *x, lt_tensor *grad)
{
    (void)ud, (void)grad;
    return lt_backward(x, NULL);
}

TEST_CALLS(backward)
{
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 2, two, 1),
              *i = lt_tensor_full(ctx, LT_I64, 1, one, 1);
    REFUSES(LT_EINVAL, lt_set_requires_grad(i, true), "float");
    REFUSES(LT_EINVAL, lt_backward(x, NULL), "gradient");
    CHECK_OK(lt_set_requires_grad(x, true));
    lt_tensor *y = lt_run(ctx, "mul", NULL, x, x, NULL), *z = lt_run(ctx, "sum", NULL, y, NULL);
    REFUSES(LT_EINVAL, lt_backward(y, NULL), "element");
    REFUSES(LT_EINVAL, lt_backward(y, z), "2x3");
    REFUSES(LT_EINVAL, lt_set_requires_grad(y, false), "result");
    REFUSES(LT_EINVAL, lt_on_grad(y, end_pass, NULL, NULL), "leaves");
    REFUSES(LT_EINVAL, lt_set_part(ctx, LT_PART_KINDS, NULL), "lt_part_kind");
    REFUSES(LT_EINVAL, lt_set_part(ctx, (lt_part_kind)-1, &(lt_step_part){0}), "lt_part_kind");
    REFUSES(LT_EINVAL, lt_check_no_part(ctx, LT_PART_KINDS, NULL), "lt_part_kind");
    NONE(LT_EINVAL, lt_run(ctx, "momentum_step", NULL, x, x, x, NULL), "momentum_step");
    CHECK_OK(lt_backward(z, NULL));
    REFUSES(LT_EINVAL, lt_backward(z, NULL), "freed");
    RELEASE(z, y);
    CHECK_OK(lt_on_grad(x, end_pass, NULL, NULL));
    y = lt_run(ctx, "mul", NULL, x, x, NULL), z = lt_run(ctx, "sum", NULL, y, NULL);
    REFUSES(LT_EINVAL, lt_backward(z, NULL), "backward");
    lt_deferred_wgrad *weights = NULL;
    REFUSES(LT_EINVAL,
            lt_backward_from(ctx, (lt_tensor *[]){z, z}, (lt_tensor *[]){NULL, NULL}, 2, &weights),
            "freed");
    REFUSES(LT_EINVAL, lt_backward_from(ctx, &z, (lt_tensor *[]){NULL}, -1, &weights),
            "at least 0, but is -1");
    QUIET((lt_deferred_wgrad_free(NULL), weights == NULL));
    CHECK_OK(lt_dry_run_begin(ctx, NULL, NULL, NULL));
    REFUSES(LT_EINVAL, lt_dry_run_begin(ctx, NULL, NULL, NULL), "dry run");
    REFUSES(LT_EINVAL, lt_set_part(ctx, LT_PART_SCALE, NULL), "dry run");
    lt_dry_run_end(ctx);
    QUIET((lt_dry_run_end(ctx), lt_grad_on(ctx), lt_grad_enabled(ctx)));
    QUIET((lt_tape_free(NULL), lt_saved(x, 0) == NULL && lt_saved(x, -1) == NULL));
    lt_grad_place place;
    REFUSES(LT_EINVAL, lt_grad_find(i, &place), "parameter");
    REFUSES(LT_EINVAL, lt_bn_stats_add(ctx, x, x, x, x, -1, 0.1), "-1");
    lt_bn_stats stats;
    QUIET(!lt_bn_stats_at(ctx, 0, &stats) && !lt_bn_stats_at(ctx, -1, &stats));
    RELEASE(z, y, x, i);
}

/* ==== Optimizers ============================================================================== */

TEST_CALLS(optimizers)
{
    lt_params *params = lt_params_new(ctx);
    lt_init init = {LT_INIT_CONSTANT, 1, 0};
    lt_tensor *w = lt_param_new(ctx, LT_F32, 1, one, init),
              *b = lt_param_new(ctx, LT_F32, 1, one, init);
    lt_tensor *t = lt_tensor_full(ctx, LT_F32, 1, one, 1), *pair[] = {w, w}, *no_tensor = NULL;
    const lt_opt *null = NULL;
    lt_opt zero[LT_MAX_OPT] = {{0}}, right[LT_MAX_OPT];
    const lt_opt *zeros[] = {zero}, *rights[] = {right};
    double norm;
    NONE(LT_EINVAL, lt_optim_new(ctx, "momentum_step", &w, 1), "memory");
    CHECK_OK(lt_params_add(params, "w", w));
    CHECK_OK(lt_params_add(params, "b", b));
    CHECK_OK(lt_params_place(params));
    NONE(LT_EINVAL, lt_optim_new(ctx, "relu", &w, 1), "relu");
    NONE(LT_EINVAL, lt_optim_new(ctx, "momentum", &w, 1), "momentum");
    NONE(LT_EINVAL, lt_optim_new(ctx, NULL, &w, 1), "op");
    NONE(LT_EINVAL, lt_optim_new(ctx, "momentum_step", pair, 2), "twice");
    NONE(LT_EINVAL, lt_optim_new(ctx, "momentum_step", &t, 1), "parameter");
    NONE(LT_EINVAL, lt_optim_new(ctx, "momentum_step", &no_tensor, 1), "parameter");
    REFUSES(LT_EINVAL, lt_params_add(params, "x", NULL), "neither");
    NONE(LT_EINVAL, lt_optim_new(ctx, "momentum_step", &w, -1), "at least 0, but is -1");
    lt_optim *optim = lt_optim_new(ctx, "momentum_step", &w, 1);
    CHECK(optim != NULL);
    CHECK_OK(lt_opts_parse(&lt_optim_def(optim)->schema, "lr=0.1", right));
    REFUSES(LT_EINVAL, lt_optim_set_group(optim, w, -1), "-1");
    REFUSES(LT_EINVAL, lt_optim_set_group(optim, b, 0), "parameter");
    REFUSES(LT_EINVAL, lt_optim_step(optim, rights, 1, NULL), "backward");
    lt_tensor *y = lt_run(ctx, "sum", NULL, w, NULL);
    CHECK_OK(lt_backward(y, NULL));
    REFUSES(LT_EINVAL, lt_optim_step(optim, rights, 0, NULL), "group");
    REFUSES(LT_EINVAL, lt_optim_step(optim, rights, -1, NULL), "group");
    REFUSES(LT_EINVAL, lt_optim_step(optim, &null, 1, NULL), "option");
    REFUSES(LT_EINVAL, lt_optim_step(optim, zeros, 1, NULL), "option");
    REFUSES(LT_EINVAL, lt_optim_step_clipped(optim, rights, 1, -1, NULL, NULL),
            "the norm to clip to must be at least 0, but is -1");
    REFUSES(LT_EINVAL, lt_optim_step_clipped(optim, rights, 1, NAN, NULL, NULL), "nan");
    CHECK_OK(lt_optim_grad_norm(optim, &norm));
    CHECK_NEAR(norm, sqrt(3), 1e-6); /* the gradient is still there */
    CHECK_OK(lt_optim_step(optim, rights, 1, NULL));
    REFUSES(LT_EINVAL, lt_optim_step(optim, rights, 1, NULL), "backward");
    QUIET(!lt_optim_slot(optim, 99, w) && !lt_optim_slot(optim, -1, w));
    NONE(LT_EINVAL, lt_optim_slot(optim, 0, b), "parameter");
    QUIET(!lt_optim_slot_name(optim, 99) && !lt_optim_slot_name(optim, -1));
    QUIET(!lt_optim_param(optim, 1) && !lt_optim_param(optim, -1));
    QUIET(!lt_optim_arena(optim, 99, LT_OPTIM_VALUES) && !lt_optim_arena(optim, 0, 99) &&
          !lt_optim_arena(optim, -1, 0) && !lt_optim_arena(optim, 0, -1));
    RELEASE(y, t);
    lt_optim_free(optim);
    lt_optim_free(NULL);
    lt_params_free(params);
    RELEASE(w, b);
}

/* ==== Ops and amp ============================================================================= */

TEST_CALLS(tables_of_gradients)
{
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 1, one, 1),
              *i = lt_tensor_full(ctx, LT_I64, 1, one, 1);
    lt_grad_stats stats;
    REFUSES(LT_EINVAL, lt_rescale(x, 3, NULL), "power of two");
    REFUSES(LT_EINVAL, lt_rescale(x, 0, NULL), "power of two");
    REFUSES(LT_EINVAL, lt_rescale(x, NAN, NULL), "power of two");
    REFUSES(LT_EINVAL, lt_rescale(i, 2, NULL), "float");
    lt_grad_table *table = lt_grad_table_new(ctx);
    REFUSES(LT_EINVAL, lt_grad_table_rescale(table, 0, x, x, 3), "power of two");
    CHECK_OK(lt_grad_table_clear(table, 0));
    CHECK_OK(lt_grad_table_read(table, 0, 1, &stats));
    lt_grad_table_free(table);
    lt_grad_table_free(NULL);
    RELEASE(x, i);
}

TEST_CALLS(mixed_precision)
{
    lt_scaler scaler = lt_scaler_init(LT_SCALE_DYNAMIC, INT_MAX, -5), wrong = scaler;
    CHECK_OK(lt_scaler_check(&scaler));
    CHECK_EQ(scaler.k, LT_SCALE_MAX);
    wrong.k = 1000;
    REFUSES(LT_EINVAL, lt_scaler_check(&wrong), "k");
    wrong = scaler, wrong.policy = (lt_scale_policy)9;
    REFUSES(LT_EINVAL, lt_scaler_check(&wrong), "policy");
    wrong = scaler, wrong.interval = -1;
    REFUSES(LT_EINVAL, lt_scaler_check(&wrong), "interval");
    QUIET((lt_set_autocast(ctx, (lt_dtype)99), lt_autocast(ctx) == LT_F32));
    lt_loss_scale *scale = lt_loss_scale_new(ctx, &scaler);
    QUIET(lt_loss_scale_step(scale).number == 0 && lt_loss_scale_step_at(scale, -9).number == 0);
    lt_loss_scale_free(scale);
    lt_loss_scale_free(NULL);
    lt_precision_check *check = lt_precision_check_new(ctx);
    lt_precision row;
    QUIET(!lt_precision_check_row(check, 0, &row) && !lt_precision_check_row(check, -1, &row));
    CHECK_OK(lt_precision_check_begin(check, 0, false));
    REFUSES(LT_EINVAL, lt_precision_check_begin(check, 0, false), "dry run");
    CHECK_OK(lt_precision_check_end(check));
    lt_precision_check_free(check);
    lt_precision_check_free(NULL);
}

/* ==== Data ==================================================================================== */

TEST_CALLS(sources_and_batches)
{
    int64_t image[] = {4, 2, 2, 1}, four[] = {4}, dims[] = {2, 2};
    lt_tensor *x = lt_tensor_full(ctx, LT_U8, 4, image, 1),
              *y = lt_tensor_full(ctx, LT_I64, 1, four, 0);
    lt_tensor *i = lt_tensor_full(ctx, LT_I64, 2, dims, 1), *a = NULL, *b = NULL;
    const char *paths[] = {"none"};
    NONE(LT_EDATA, lt_idx_read(ctx, "none"), "none");
    NONE(LT_EDATA, lt_image_read(ctx, "none", 3), "none");
    NONE(LT_EINVAL, lt_image_read(ctx, "none", 0), "channels");
    NONE(LT_EINVAL, lt_image_read(ctx, "none", INT_MAX), "channels");
    REFUSES(LT_EDATA, lt_cifar10_read(ctx, 1, paths, &a, &b), "none");
    REFUSES(LT_EINVAL, lt_cifar10_read(ctx, -1, paths, &a, &b), "-1");
    NONE(LT_EINVAL, lt_source_tensors(ctx, i, y), "images");
    NONE(LT_EINVAL, lt_source_tensors(ctx, x, x), "labels");
    NONE(LT_EDATA, lt_source_folder(ctx, "none", 2, 2, 3), "none");
    NONE(LT_EINVAL, lt_source_folder(ctx, "tests", -1, 2, 3), "-1");
    NONE(LT_EINVAL, lt_source_synthetic(ctx, 0, 0, 2, 2, 1, 1), "0");
    NONE(LT_EINVAL, lt_source_synthetic(ctx, 0, INT64_MAX, 2, 2, 1, INT64_MAX), "classes");
    NONE(LT_EINVAL, lt_source_synthetic(ctx, UINT64_MAX, 1, 2, 2, 1, 1), "part");
    NONE(LT_EINVAL, lt_source_synthetic(ctx, 0, 1, -1, 2, 1, 1), "-1");
    lt_source *source = lt_source_tensors(ctx, x, y);
    CHECK(source != NULL);
    QUIET(!lt_source_class_name(source, -1) && !lt_source_class_name(source, INT64_MAX));
    NONE(LT_EINVAL, lt_source_resized(source, 0, 2), "0");
    NONE(LT_EINVAL, lt_source_resized(source, INT64_MAX, 2), "16384");
    lt_batches *batches = lt_batches_new(ctx, source, &(lt_batch_options){.batch = INT64_MAX});
    CHECK(batches != NULL);
    REFUSES(LT_EINVAL, lt_batches_request(batches, 0), "on_request");
    CHECK_OK(lt_batches_next(batches, &a, &b));
    RELEASE(a, b);
    CHECK_OK(lt_batches_next(batches, &a, &b));
    CHECK_OK(lt_batches_next(batches, &a, &b));
    CHECK(!a && !b);
    lt_batches_free(batches);
    batches = lt_batches_new(ctx, source, &(lt_batch_options){.batch = 2, .on_request = true});
    REFUSES(LT_EINVAL, lt_batches_request(batches, -1), "-1");
    REFUSES(LT_EINVAL, lt_batches_request(batches, 4), "4");
    lt_batches_free(batches);
    lt_batches_free(NULL);
    lt_source_release(source);
    lt_source_release(NULL);
    RELEASE(x, y, i);
}

/* ==== Lua ===================================================================================== */

TEST_CALLS(lua_states)
{
    lt_tensor *out[2];
    lt_lua_close(NULL);
    lua_State *L = lt_lua_new(ctx);
    CHECK(L != NULL);
    REFUSES(LT_ESCRIPT, lt_lua_dofile(L, "none.lua", 0, NULL), "none.lua");
    REFUSES(LT_EINVAL, lt_lua_run(L, NULL, 0, out, 1), "function");
    REFUSES(LT_EINVAL, lt_lua_run(L, NULL, -1, out, 1), "function");
    NONE(LT_EINVAL, lt_lua_tensor(L, 1), "tensor");
    NONE(LT_EINVAL, lt_lua_tensor(L, -1), "tensor");
    CHECK_OK(lt_lua_push(L, NULL));
    NONE(LT_EINVAL, lt_lua_tensor(L, -1), "tensor");
    lt_lua_close(L);
}
