/* test_launches.c - counts the kernels, copies, fills and calls of libraries in a training step of
 * ResNet-50. They do nothing here, because the counts do not depend on values or sizes. docs/gpu.md
 * shows these counts.
 */
#include "tests/lt_test.h"

#ifdef LT_WITH_CUDNN
#include "tests/cuda/reference.h"
#include "tests/device/emu.h"

/* script(precision, accumulate) returns a function that runs a step. */
static const char script[] =
    "package.path = 'models/?.lua;' .. package.path\n"
    "local lt, precision, accumulate = require 'luatrain', ...\n"
    "local net = require('resnet').resnet50{}\n"
    "local sgd = lt.optim.sgd(net, {lr = 0.1, momentum = 0.9, weight_decay = 1e-4})\n"
    "local scaler = precision == 'fp16' and lt.amp.scaler{}\n"
    "local x, y = lt.zeros{2, 32, 32, 3}, lt.tensor({0, 1}, {dtype = 'i64'})\n"
    "local function forward() return lt.cross_entropy(net(x), y) end\n"
    "return function()\n"
    "  lt.step(function()\n"
    "    for _ = 1, accumulate do lt.autocast(precision, forward):backward() end\n"
    "    sgd:step()\n"
    "  end)\n"
    "end\n";

typedef struct counts { /* what one step submits */
    int64_t kernels, copies, fills, calls;
} counts;

static counts count_now(void)
{
    return (counts){counted(SHIM_KERNELS), counted(SHIM_COPIES), counted(SHIM_FILLS),
                    counted(SHIM_CALLS)};
}

/* Counts the fourth step: the first ones make plans and allocate memory. */
static counts count_step(const char *precision, int accumulate)
{
    counts before = {0};
    SHIM(shim_set_null)(1);
    use_libraries(true);
    use_shim();
    lt_ctx *ctx = lt_open(&(lt_config){.device = "cuda", .threads = 1});
    lua_State *L = load_script(ctx, script);
    lua_pushstring(L, precision);
    lua_pushinteger(L, accumulate);
    CHECK_OK(lt_lua_call(L, 2, 1));
    for (int i = 0; i < 4; i++) {
        before = count_now();
        lua_pushvalue(L, -1);
        CHECK_OK(lt_lua_call(L, 0, 0));
    }
    counts now = count_now();
    lt_lua_close(L);
    lt_ctx_free(ctx);
    return (counts){now.kernels - before.kernels, now.copies - before.copies,
                    now.fills - before.fills, now.calls - before.calls};
}

static void check_step(const char *precision, int accumulate, counts want)
{
    counts got = count_step(precision, accumulate);
    if (memcmp(&got, &want, sizeof got) != 0)
        FAIL("%s: %lld kernels, %lld copies, %lld fills, %lld calls of libraries", precision,
             (long long)got.kernels, (long long)got.copies, (long long)got.fills,
             (long long)got.calls);
}

TEST(a_step_in_fp16) { check_step("fp16", 1, (counts){500, 2, 1, 161}); }
TEST(a_step_in_f32) { check_step("off", 1, (counts){331, 1, 1, 161}); }
TEST(a_step_of_two_micro_batches_in_fp16) { check_step("fp16", 2, (counts){1314, 109, 1, 322}); }
#else
TEST(launches) { SKIP("cuDNN's headers are not installed"); }
#endif
