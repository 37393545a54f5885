/* test_train.c - trains a small net on the emulated CUDA device, with stand-ins for NVIDIA's
 * libraries and with our own kernels only. The losses must be near those of the CPU, and equal
 * between two runs, which compute gradients in different ways.
 */
#include "tests/cuda/reference.h"
#include "tests/device/emu.h"

/* script(precision, twice) returns a function that takes a step with autocast and returns its loss.
 * In fp16 there is a loss scale. twice: each step has a backward before, with zero gradients. */
static const char script[] =
    "local lt = require 'luatrain'\n"
    "local nn, precision, twice = lt.nn, ...\n"
    "local scaler = precision == 'fp16' and lt.amp.scaler{}\n"
    "local net = nn.sequential{\n"
    "  nn.conv2d{3, 8, 3, pad = 1}, nn.relu(), nn.max_pool2d{3, stride = 2, pad = 1},\n"
    "  nn.conv2d{8, 8, 3, pad = 1, stride = 2, groups = 8}, nn.conv2d{8, 12, 1}, nn.relu(),\n"
    "  nn.avg_pool2d{2}, nn.flatten(), nn.linear{48, 5}}\n"
    "local sgd = lt.optim.sgd(net, {lr = 0.05, momentum = 0.9})\n"
    "local x, target = lt.randn{6, 15, 14, 3}, lt.randn{6, 5}\n"
    "local function loss()\n"
    "  local off = net(x):cast 'f32' - target\n"
    "  return (off * off):mean()\n"
    "end\n"
    "return function()\n"
    "  return lt.step(lt.autocast, precision, function()\n"
    "    if twice then (loss() * 0):backward() end\n"
    "    local last = loss()\n"
    "    last:backward()\n"
    "    sgd:step()\n"
    "    assert(not scaler or scaler.skipped == 0)\n"
    "    return last:item()\n"
    "  end)\n"
    "end\n";

enum { STEPS = 5 };

/* faulty(when, fault) trains and calls fault() at point number `when` of the training. */
static const char faulty[] =
    "local lt = require 'luatrain'\n"
    "local nn, when, fault = lt.nn, ...\n"
    "local front = nn.sequential{nn.conv2d{3, 8, 3, pad = 1}, nn.batch_norm{8}, nn.relu(),\n"
    "  nn.avg_pool2d{2}, nn.flatten()}\n"
    "local head = nn.linear{8 * 16, 5}\n"
    "local sgd = lt.optim.sgd(nn.sequential{front, head}, {lr = 0.05, momentum = 0.9})\n"
    "local x, target, n = lt.randn{6, 8, 8, 3}, lt.randn{6, 5}, 0\n"
    "local function may_fail()\n"
    "  n = n + 1\n"
    "  if n == when then fault() end\n"
    "end\n"
    "for i = 1, 5 do\n"
    "  lt.step(function()\n"
    "    may_fail()\n"
    "    local features = front(x)\n"
    "    may_fail()\n"
    "    local off = head(features) - target\n"
    "    may_fail()\n"
    "    local loss = (off * off):mean()\n"
    "    may_fail()\n"
    "    loss:backward()\n"
    "    may_fail()\n"
    "    sgd:step()\n"
    "    may_fail()\n"
    "    loss:item()\n"
    "  end)\n"
    "end\n";

/* Trains in n contexts, step by step in turn. */
static void train(lt_ctx *const *ctx, int n, const char *precision, bool twice,
                  double loss[][STEPS])
{
    lua_State *L[2];
    for (int k = 0; k < n; k++) {
        L[k] = load_script(ctx[k], script);
        lua_pushstring(L[k], precision);
        lua_pushboolean(L[k], twice);
        CHECK_OK(lt_lua_call(L[k], 2, 1));
    }
    for (int i = 0; i < STEPS; i++)
        for (int k = 0; k < n; k++) {
            lua_pushvalue(L[k], -1);
            CHECK_OK(lt_lua_call(L[k], 0, 1));
            loss[k][i] = lua_tonumber(L[k], -1);
            lua_pop(L[k], 1);
        }
    for (int k = 0; k < n; k++) {
        lt_lua_close(L[k]);
        lt_ctx_free(ctx[k]);
    }
}

/* A thread may use several devices in turn. */
TEST(two_devices)
{
    for (int libraries = 0; libraries < 2; libraries++) {
        double loss[2][STEPS];
        lt_ctx *ctx[2] = {open_shim(libraries)};
        ctx[1] = lt_open(&(lt_config){.device = "cuda:1", .threads = 1, .poison = true});
        CHECK(ctx[1] != NULL);
        train(ctx, 2, "fp16", false, loss);
        for (int i = 0; i < STEPS; i++)
            CHECK_NEAR(loss[1][i], loss[0][i], 0);
    }
}

/* A gradient that is added to zeros is converted, unscaled and measured by other kernels than one
 * that overwrites them, but has the same bits. */
static void check_training(const char *precision, double allowed)
{
    double all[1][STEPS], on_cuda[2][STEPS], *on_cpu = all[0];
    train((lt_ctx *[]){open_reference()}, 1, precision, false, all);
    CHECK(on_cpu[STEPS - 1] < on_cpu[0] * 0.9); /* the loss decreases */
    for (int libraries = 0; libraries < 2; libraries++) {
        for (int k = 0; k < 2; k++)
            train((lt_ctx *[]){open_shim(libraries)}, 1, precision, k, &on_cuda[k]);
        for (int i = 0; i < STEPS; i++) {
            CHECK(on_cuda[0][i] == on_cuda[1][i]);
            if (!(fabs(on_cuda[0][i] - on_cpu[i]) <= allowed * on_cpu[i]))
                FAIL("%s: loss %d is %.9g, but %.9g on the CPU", precision, i, on_cuda[0][i],
                     on_cpu[i]);
        }
    }
}

/* An overflow that the host does not know yet changes neither weights nor running statistics. */
TEST(a_pending_step_that_is_skipped)
{
    static const char skipped[] =
        "local lt = require 'luatrain'\n"
        "local net = lt.nn.sequential{lt.nn.linear{3, 4}, lt.nn.batch_norm{4}}\n"
        "local scaler <close> = lt.amp.scaler{scale = 2^24}\n"
        "local sgd, before, x = lt.optim.sgd(net, {lr = 1}), net:sha256(), lt.randn{8, 3}\n"
        "lt.step(lt.autocast, 'fp16', function()\n"
        "  (net(x):cast 'f32' * 1000):sum():backward()\n"
        "  assert(sgd:step() == 'pending')\n"
        "end)\n"
        "assert(scaler.skipped == 1 and net:sha256() == before)\n";
    lt_ctx *ctx = open_shim(true);
    lua_State *L = load_script(ctx, skipped);
    CHECK_OK(lt_lua_call(L, 0, 0));
    lt_lua_close(L);
    lt_ctx_free(ctx);
}

static int fail_now(lua_State *L)
{
    (void)L;
    SHIM(shim_fault)("an illegal memory access was encountered");
    return 0;
}

/* After a fault of a kernel every CUDA call fails. Wherever the fault occurs, the training ends
 * with its message, and all memory is freed. */
TEST(a_kernel_that_fails)
{
    for (int i = 0; i < 2 * 12; i++) {
        lt_ctx *ctx = open_shim(i % 2);
        lua_State *L = load_script(ctx, faulty);
        lua_pushinteger(L, 1 + i / 2);
        lua_pushcfunction(L, fail_now);
        CHECK_FAILS(lt_lua_call(L, 2, 0), LT_EENV,
                    "cuda:0: an illegal memory access was encountered");
        lt_lua_close(L);
        lt_ctx_free(ctx);
        SHIM(shim_reset)();
    }
}

TEST(in_f32) { check_training("off", 1e-5); }
TEST(in_bf16) { check_training("bf16", 2e-2); }
TEST(in_fp16) { check_training("fp16", 2e-3); }
