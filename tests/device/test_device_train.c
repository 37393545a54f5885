/* test_device_train.c - complete training runs on the emulated accelerator, by lt.fit and by Lua
 * scripts. Weights, losses and accuracies must have the bits of the CPU's reference kernels, and
 * the CPU must not access device memory. */
#include "tests/device/emu.h"

/* Arguments: arch, options, data, batch, amp, out, max_steps. Returns a line with the results. */
static const char fit_script[] =
    "local lt = require 'luatrain'\n"
    "local arch, options, data, batch, amp, out, max_steps = ...\n"
    "local train, test = lt.data.open(data)\n"
    "local o = load('return ' .. options)()\n"
    "o.classes, o.channels = train.classes, train.channels\n"
    "local net = lt.models[arch](o)\n"
    "local optim = arch == 'lenet' and lt.optim.adam(net, {lr = 0.001})\n"
    "              or lt.optim.sgd(net, {lr = 0.01, momentum = 0.9, weight_decay = 1e-4, clip = "
    "1.0})\n"
    "local r = lt.fit{net = net, train = train, test = test, epochs = 1, batch = batch,\n"
    "                 optim = optim, amp = amp, out = out, resume = 'auto', save_every = 1,\n"
    "                 augment = {flip = true, crop = 1}, max_steps = max_steps}\n"
    "return ('%s loss %a %a top1 %a'):format(net:sha256(), r.train_loss, r.loss, r.top1)\n";

typedef struct training {
    const char *arch, *options, *data, *amp;
    int batch;
} training;

static int push_training(lua_State *L, const training *t, const char *out, int max_steps)
{
    lua_pushstring(L, t->arch);
    lua_pushstring(L, t->options);
    lua_pushstring(L, t->data);
    lua_pushinteger(L, t->batch);
    lua_pushstring(L, t->amp);
    lua_pushstring(L, out);
    if (max_steps > 0)
        lua_pushinteger(L, max_steps);
    else
        lua_pushnil(L);
    return 7;
}

/* Runs a training in ctx, up to max_steps if that is not 0. Takes ctx. */
static void train(lt_ctx *ctx, const training *t, const char *out, int max_steps, char text[256])
{
    lua_State *L = load_script(ctx, fit_script);
    lt_status status = lt_lua_call(L, push_training(L, t, out, max_steps), 1);
    if (status != (max_steps > 0 ? LT_EDONE : LT_OK))
        FAIL("%s %s: %s", t->arch, t->amp, lt_errmsg());
    if (status == LT_OK)
        snprintf(text, 256, "%s", lua_tostring(L, -1));
    lt_lua_close(L);
    lt_ctx_free(ctx);
}

/* Checks that the first event of the run names the device. */
static void check_start(const char *out, const char *device)
{
    char path[64], line[4096] = "", want[64];
    snprintf(path, sizeof path, "%s/metrics.jsonl", out);
    snprintf(want, sizeof want, "\"device\":\"%s\"", device);
    FILE *f = fopen(path, "r");
    CHECK(f && fgets(line, sizeof line, f));
    fclose(f);
    CHECK(strstr(line, "\"event\":\"start\"") && strstr(line, want));
}

static void check_training(const training *t)
{
    char text[2][256] = {"", ""}, out[2][32];
    for (int i = 0; i < 2; i++) {
        make_folder(out[i]);
        train(i == 0 ? open_emu() : open_reference(), t, out[i], 0, text[i]);
        check_start(out[i], i == 0 ? "cuda:0" : "cpu");
    }
    if (strcmp(text[0], text[1]) != 0)
        FAIL("%s %s: %s, but on the CPU %s", t->arch, t->amp, text[0], text[1]);
    remove_folder(out[0]);
    remove_folder(out[1]);
}

static void check_precisions(training t)
{
    static const char *const amp[] = {"off", "bf16", "fp16"};
    for (int i = test_stride(3) - 1; i < 3; i += test_stride(3)) {
        t.amp = amp[i];
        check_training(&t);
    }
}

TEST(lenet)
{
    check_precisions((training){"lenet", "{size = 12}", "synthetic:12x12x1/4/40", NULL, 12});
}

TEST(resnet20) { check_precisions((training){"resnet20", "{}", "synthetic:8x8x3/4/8", NULL, 3}); }

TEST(mobilenet)
{
    check_precisions(
        (training){"mobilenet_v1", "{width = 0.25}", "synthetic:32x32x3/4/8", NULL, 3});
}

/* 9 million parameters, and the ops of LeNet with dropout. */
TEST(vgg11)
{
    if (test_stride(2) == 1)
        check_precisions(
            (training){"vgg11", "{size = 8, hidden = 16}", "synthetic:8x8x3/4/5", NULL, 2});
}

/* A run that stops and is resumed on the other device equals one that does not stop: checkpoints do
 * not depend on the device. */
TEST(resume)
{
    const training t = {"resnet20", "{}", "synthetic:8x8x3/4/14", "fp16", 4};
    char whole[256] = "", parts[256] = "", out[32];
    make_folder(out);
    train(open_reference(), &t, out, 0, whole);
    remove_folder(out);
    for (int first = 0; first < 2; first++) {
        make_folder(out);
        train(first == 0 ? open_emu() : open_reference(), &t, out, 2, parts);
        train(first == 0 ? open_reference() : open_emu(), &t, out, 0, parts);
        CHECK_STR(parts, whole);
        remove_folder(out);
    }
}

/* ==== Scripts ================================================================================= */

/* What depends on the device in the Lua API of tensors. */
static const char tensor_script[] =
    "local lt = require 'luatrain'\n"
    "local function equal(got, want)\n"
    "  if got ~= want then error(got .. ' is not ' .. want, 2) end\n"
    "end\n"
    "local function fails(f, want)\n"
    "  local ok, why = pcall(f)\n"
    "  equal(ok, false)\n"
    "  equal(tostring(why):gsub('^[^:]*:%d+: ', ''), want)\n"
    "end\n"
    "local x = lt.tensor({{1, 2}, {3, 4}})\n"
    "equal(x.device, 'cuda:0')\n"
    "equal(tostring(x), '{{1, 2},\\n {3, 4}}  2x2 f32 on cuda:0')\n"
    "equal(x:get(2, 1), 3.0)\n"
    "equal(x:totable()[2][2], 4.0)\n"
    "equal(x:sum():item(), 10.0)\n"
    "local here = x:to 'cpu'\n"
    "equal(here.device, 'cpu')\n"
    "equal((here * 2 + 1).device, 'cpu')\n"
    "equal((2 - x).device, 'cuda:0')\n"
    "equal((x + here:to 'cuda'):sum():item(), 20.0)\n"
    "for _, make in ipairs{'zeros', 'ones', 'rand', 'randn'} do\n"
    "  equal(lt[make]({2}).device, 'cuda:0')\n"
    "  equal(lt[make]({2}, {device = 'cpu'}).device, 'cpu')\n"
    "end\n"
    "equal(lt.full({2}, 3, {device = 'cuda'}).device, 'cuda:0')\n"
    "equal(lt.arange(3, {device = 'cpu', dtype = 'i64'}).device, 'cpu')\n"
    "equal(lt.tensor(1, {device = 'cpu'}).device, 'cpu')\n"
    "equal(lt.nn.linear{2, 2}.w.device, 'cuda:0')\n"
    "equal(lt.zeros({2}, {device = 'cpu'}):copy(lt.ones{2}):sum():item(), 2.0)\n"
    "fails(function() return lt.zeros({2}, {device = 'cuda:1'}) end,\n"
    "      \"lt.zeros: device 'cuda:1' is not available; this context has 'cpu' and "
    "'cuda:0'\")\n"
    "fails(function() return x:to(1) end, \"to: device must be a name such as 'cpu', but is 1\")\n"
    "fails(function() return x + here end,\n"
    "      \"add: x is on cuda:0, but y is on cpu; copy one to the device of the other, e.g. "
    "y:to('cuda:0')\")\n"
    "local memory = lt.memory()\n"
    "assert(memory.device.live > 0 and memory.device.live < memory.live)\n"
    "assert(lt.grad_check(lt.mul, {x, lt.randn{2, 2}}))\n"
    "local images = lt.randn{6, 4, 4, 1}\n"
    "local labels = lt.tensor({0, 1, 2, 0, 1, 2}, {dtype = 'i64'})\n"
    "local set = lt.data.set{images = images, labels = labels}\n"
    "equal(set.classes, 3)\n"
    "for a, b in set:batches{batch = 6} do\n"
    "  equal(a.device .. b.device, 'cuda:0cuda:0')\n"
    "  equal((a - images):abs():max():item(), 0.0)\n"
    "end\n";

TEST_EMU(tensors_in_lua)
{
    lua_State *L = load_script(ctx, tensor_script);
    CHECK_OK(lt_lua_call(L, 0, 0));
    lt_lua_close(L);
}
