/* test_misuse.c - a program does not check the result of lt_open(), or has no free descriptor. The
 * library returns an error with a message. test_wrong_calls.c has wrong arguments. */
#include <stdlib.h>
#include <sys/resource.h>

#include "amp/amp.h"
#include "data/data.h"
#include "dist/dist.h"
#include "lua/luatrain.h"
#include "ops/ops.h"
#include "tests/lt_test.h"

/* ==== No context ============================================================================== */

static const char missing[] = ": the context is NULL; check the result of lt_open()";

static void check_message(const char *call)
{
    if (lt_errcode() != LT_EINVAL || !strstr(lt_errmsg(), missing))
        FAIL("%s: %d, %s", call, lt_errcode(), lt_errmsg());
    lt_status status = lt_fail(LT_OK, "%s", "");
    (void)status;
}

#define IS_NULL(call) (CHECK(!(call)), check_message(#call))
#define FAILS(call) (CHECK((call) == LT_EINVAL), check_message(#call))
#define ENDS(call) ((call), check_message(#call))

TEST(functions_of_core_without_a_context)
{
    IS_NULL(lt_seed(NULL));
    ENDS(lt_set_seed(NULL, 1));
    IS_NULL(lt_threads(NULL));
    IS_NULL(lt_device_name(NULL));
    IS_NULL(lt_step(NULL));
    ENDS(lt_set_step(NULL, 1));
    IS_NULL(lt_random_step(NULL));
    ENDS(lt_set_random_step(NULL, 1));
    CHECK(!lt_stop(NULL, 15)); /* for signal handlers, so without a message */
    ENDS(lt_stop_listen(NULL, true));
    IS_NULL(lt_stop_reason(NULL));
    IS_NULL(lt_memory_stats(NULL).live);
    IS_NULL(lt_device_memory_stats(NULL).live);
    ENDS(lt_memory_trim(NULL));
    ENDS(lt_set_log(NULL, NULL, NULL));
    ENDS(lt_log(NULL, LT_LOG_INFO, "a line"));
    FAILS(lt_trace_open(NULL, "trace", 0));
    ENDS(lt_trace(NULL, LT_TRACK_STEP, "a span", 0, 1));
    IS_NULL(lt_tensor_new(NULL, LT_F32, 0, NULL));
    IS_NULL(lt_tensor_full(NULL, LT_F32, 0, NULL, 1));
    IS_NULL(lt_tensor_from(NULL, LT_F32, 0, NULL, &(float){1}));
    FAILS(lt_scope_push(NULL));
    ENDS(lt_scope_pop(NULL));
    IS_NULL(lt_next_draw(NULL));
    ENDS(lt_set_next_draw(NULL, 1));
    IS_NULL(lt_file_open(NULL, "a file"));
    lt_ctx_free(NULL);
}

static void check_steps(void)
{
    FAILS(lt_set_part(NULL, LT_PART_SCALE, NULL));
    IS_NULL(lt_step_check_of(NULL));
    FAILS(lt_dry_run_begin(NULL, NULL, NULL, NULL));
    ENDS(lt_dry_run_end(NULL));
    FAILS(lt_bn_stats_add(NULL, NULL, NULL, NULL, NULL, 1, 0.1));
    FAILS(lt_bn_stats_commit(NULL));
    FAILS(lt_bn_stats_synchronize(NULL));
    IS_NULL(lt_bn_stats_pending(NULL));
    IS_NULL(lt_bn_stats_at(NULL, 0, &(lt_bn_stats){0}));
    ENDS(lt_bn_stats_clear(NULL));
    IS_NULL(lt_optim_new(NULL, "sgd_step", NULL, 0));
    IS_NULL(lt_steps_digest(NULL));
    IS_NULL(lt_settings_digest(NULL));
    IS_NULL(lt_optims_made(NULL));
    IS_NULL(lt_settings_text(NULL));
    IS_NULL(lt_param_new(NULL, LT_F32, 0, NULL, (lt_init){LT_INIT_CONSTANT, 1, 0}));
    IS_NULL(lt_buffer_new(NULL, LT_F32, 0, NULL, (lt_init){LT_INIT_CONSTANT, 1, 0}));
    IS_NULL(lt_params_new(NULL));
}

TEST(functions_of_autograd_without_a_context)
{
    void *ud;
    char where[LT_WHERE_BYTES];
    lt_tensor *x = NULL, *none = NULL;
    FAILS(lt_op_register(NULL, NULL));
    IS_NULL(lt_op_find(NULL, "relu"));
    IS_NULL(lt_op_at(NULL, 0));
    ENDS(lt_set_kernels(NULL, NULL, 0, NULL, NULL));
    FAILS(lt_apply(NULL, NULL, &x, 1, NULL, &none));
    IS_NULL(lt_run(NULL, "relu", NULL, x, NULL));
    IS_NULL(lt_runv(NULL, "relu", NULL, &x, 1));
    ENDS(lt_grad_off(NULL));
    ENDS(lt_grad_on(NULL));
    IS_NULL(lt_grad_enabled(NULL));
    FAILS(lt_backward_from(NULL, &x, &none, 1, NULL));
    FAILS(lt_backward_weights_all(NULL));
    FAILS(lt_synchronize(NULL));
    ENDS(lt_synchronize_quiet(NULL));
    IS_NULL(lt_tape_new(NULL));
    IS_NULL(lt_tape_use(NULL, NULL));
    IS_NULL(lt_tape_current(NULL));
    FAILS(lt_set_part(NULL, LT_PART_EXCHANGE, NULL));
    FAILS(lt_check_no_part(NULL, LT_PART_EXCHANGE, "x"));
    IS_NULL(lt_net_is_divided(NULL));
    IS_NULL(lt_pass_is_last(NULL, true));
    FAILS(lt_sum_over_net(NULL, NULL, 0));
    ENDS(lt_set_cast(NULL, NULL, NULL));
    IS_NULL(lt_get_cast(NULL, &ud));
    ENDS(lt_set_allreduce(NULL, NULL, NULL));
    ENDS(lt_set_timer(NULL, NULL, NULL));
    ENDS(lt_set_op_hook(NULL, NULL, NULL));
    ENDS(lt_set_where(NULL, NULL, NULL));
    ENDS(lt_where(NULL, where));
    check_steps();
}

TEST(functions_of_other_directories_without_a_context)
{
    lt_tensor *x = NULL, *y = NULL;
    char text[64];
    CHECK(lt_backend(NULL, text, sizeof text) != NULL); /* the one for CPUs */
    IS_NULL(lt_grad_table_new(NULL));
    ENDS(lt_set_autocast(NULL, LT_BF16));
    ENDS(lt_autocast(NULL));
    IS_NULL(lt_loss_scale_new(NULL, NULL));
    FAILS(lt_use_loss_scale(NULL, NULL));
    IS_NULL(lt_precision_check_new(NULL));
    FAILS(lt_group_compare_settings(NULL, NULL));
    IS_NULL(lt_reducer_new(NULL, NULL, NULL));
    IS_NULL(lt_async_new(NULL, NULL, NULL));
    IS_NULL(lt_server_clock_new(NULL, NULL, 0, 0));
    IS_NULL(lt_pipeline_new(NULL, NULL, NULL));
    IS_NULL(lt_profile_new(NULL, 0));
    IS_NULL(lt_idx_read(NULL, "a file"));
    FAILS(lt_cifar10_read(NULL, 0, NULL, &x, &y));
    IS_NULL(lt_image_read(NULL, "a file", 3));
    IS_NULL(lt_source_tensors(NULL, NULL, NULL));
    IS_NULL(lt_source_folder(NULL, "a folder", 8, 8, 3));
    IS_NULL(lt_source_synthetic(NULL, 0, 8, 8, 8, 3, 10));
    IS_NULL(lt_batches_new(NULL, NULL, NULL));
    IS_NULL(lt_lua_new(NULL));
}

/* Reads a file of the repository. The caller frees it. */
static char *read_text(const char *path)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        FAIL("%s cannot be read", path);
    enum { MOST = 1 << 17 };
    char *text = calloc(1, MOST);
    CHECK(text && fread(text, 1, MOST - 1, f) > 0);
    fclose(f);
    return text;
}

/* Checks that this file calls each function of a header that has a context. Returns
 * their number. */
static int check_header(const char *path, const char *own)
{
    char *text = read_text(path), name[64], call[80];
    int n = 0;
    for (char *at = text; (at = strstr(at, "lt_ctx *ctx")); at++) {
        char *begin = at;
        while (begin > text && !strchr(";}/", *begin)) /* the end of what precedes it */
            begin--;
        char *open = strchr(begin, '('), *first = open;
        bool is_public = false;
        for (const char *p = begin; open && p < open; p++)
            is_public |= strncmp(p, "LT_API", 6) == 0 || strncmp(p, "LT_MUST", 7) == 0;
        if (!is_public || open > at)
            continue;
        while (first > begin && !strchr(" *", first[-1]))
            first--;
        snprintf(name, sizeof name, "%.*s", (int)(open - first), first);
        snprintf(call, sizeof call, "%s(NULL", name);
        if (!strstr(own, call))
            FAIL("%s: no test calls %s)", path, call);
        n++;
    }
    free(text);
    return n;
}

TEST(every_function_with_a_context_is_tested)
{
    static const char *const headers[] = {
        "core/core.h",     "autograd/autograd.h",  "autograd/optim.h", "autograd/params.h",
        "autograd/step.h", "autograd/callbacks.h", "ops/ops.h",        "amp/amp.h",
        "dist/dist.h",     "dist/async.h",         "dist/pipeline.h",  "data/data.h",
        "lua/luatrain.h"};
    char *own = read_text("tests/embed/test_misuse.c");
    int n = 0;
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++)
        n += check_header(headers[i], own);
    free(own);
    CHECK(n > 80);
}

/* ==== No free descriptor ====================================================================== */

TEST(a_script_without_a_free_descriptor)
{
    lt_ctx *ctx = lt_open(&(lt_config){.device = "cpu", .threads = 1});
    lua_State *L = lt_lua_new(ctx);
    struct rlimit before, none;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = (struct rlimit){0, before.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    lt_status status = lt_lua_dofile(L, "tests/embed/model.lua", 0, NULL);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    CHECK_EQ(status, LT_ENOMEM);
    CHECK_STR(lt_errmsg(), "cannot open tests/embed/model.lua: Too many open files");
    lt_lua_close(L);
    lt_ctx_free(ctx);
}

/* ==== No error ================================================================================ */

TEST(what_succeeds_leaves_no_message)
{
    lt_status status = lt_fail(LT_OK, "%s", "");
    (void)status;
    lt_ctx *ctx = lt_open(&(lt_config){.device = "cpu", .threads = 1});
    lua_State *L = lt_lua_new(ctx);
    CHECK(ctx && L);
    CHECK_STR(lt_errmsg(), "");
    CHECK_EQ(lt_errcode(), LT_OK);
    lt_lua_close(L);
    lt_ctx_free(ctx);
}
