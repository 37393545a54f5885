/* The library in a program that has called setlocale(): numbers have decimal points, and the locale
 * of the program does not change. */
#include <pthread.h>

#include "lua/luatrain.h"
#include "tests/autograd/train.h"
#include "tests/locale.h"

/* Checks that the thread has no locale of its own, and that the program's has commas. */
static void check_host(void)
{
    char text[16];
    snprintf(text, sizeof text, "%.1f", 1.5);
    CHECK_STR(text, "1,5");
    CHECK(uselocale((locale_t)0) == LC_GLOBAL_LOCALE);
    CHECK_STR(setlocale(LC_ALL, NULL), "de_DE.UTF-8");
}

/* A test that runs in a program with commas. */
#define TEST_WITH_COMMAS(title)                                                                    \
    static void body_##title(void);                                                                \
    TEST(title)                                                                                    \
    {                                                                                              \
        use_commas();                                                                              \
        body_##title();                                                                            \
        check_host();                                                                              \
        use_c_locale();                                                                            \
    }                                                                                              \
    static void body_##title(void)

static double default_of(lt_ctx *ctx, const char *op, const char *option)
{
    const lt_def *def = lt_op_find(ctx, op);
    CHECK(def);
    int k = lt_schema_find(&def->schema, option);
    CHECK(k >= 0);
    return def->schema.opt[k].value.f;
}

TEST_WITH_COMMAS(a_context_opens_and_options_are_read)
{
    lt_ctx *ctx = lt_open(NULL);
    lt_opt opts[LT_MAX_OPT];
    if (!ctx)
        FAIL("lt_open() failed: %s", lt_errmsg());
    check_host();
    CHECK_NEAR(default_of(ctx, "dropout", "p"), 0.5, 0);
    CHECK_NEAR(default_of(ctx, "layer_norm", "eps"), 1e-5, 0);
    const lt_schema *schema = &lt_op_find(ctx, "dropout")->schema;
    CHECK_OK(lt_opts_parse(schema, "p=0.25", opts));
    CHECK_NEAR(opts[0].f, 0.25, 0);
    lt_ctx_free(ctx);
}

static lt_status take_any(void *ud, lt_ctx *ctx, lt_step_status *step_status)
{
    (void)ud, (void)ctx, (void)step_status;
    return LT_OK;
}

/* Ranks compare this text. */
TEST_WITH_COMMAS(settings_of_an_optimizer_have_points)
{
    lt_ctx *ctx = lt_open(NULL);
    CHECK(ctx);
    CHECK_OK(lt_set_part(ctx, LT_PART_EXCHANGE, &(lt_step_part){.reduce = take_any}));
    trained t = trained_new(ctx, 1, "sgd_step");
    lt_tensor *y = lt_run(ctx, "exp", NULL, t.w, NULL);
    CHECK_OK(lt_backward(y, NULL));
    CHECK_OK(step_with(t.optim, "lr=0.05", NULL));
    char *text = lt_settings_text(ctx);
    CHECK(text);
    if (!strstr(text, "optimizer 1: lr = 0.05\n"))
        FAIL("the settings are: %s", text);
    free(text);
    lt_release(y);
    trained_free(&t);
    lt_ctx_free(ctx);
}

static void keep_line(void *ud, lt_log_level level, const char *line)
{
    (void)level;
    snprintf(ud, 64, "%s", line);
}

TEST_WITH_COMMAS(messages_have_points)
{
    char line[64] = "";
    lt_ctx *ctx = lt_open(NULL);
    CHECK(ctx);
    CHECK_EQ(lt_fail(LT_EINVAL, "%g and %.2f", 0.5, 1.25), LT_EINVAL);
    CHECK_STR(lt_errmsg(), "0.5 and 1.25");
    lt_fail_prefix("at %g", 2.5);
    CHECK_STR(lt_errmsg(), "at 2.5: 0.5 and 1.25");
    lt_set_log(ctx, keep_line, line);
    lt_log(ctx, LT_LOG_INFO, "%.1f s", 3.5);
    CHECK_STR(line, "3.5 s");
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 0, NULL, 1);
    CHECK_NULL(lt_run(ctx, "dropout", "p=1.5", x, NULL), LT_EINVAL, "but is 1.5");
    lt_release(x);
    lt_ctx_free(ctx);
}

TEST_WITH_COMMAS(a_trace_is_json)
{
    char text[4096], path[] = "/tmp/lt_test_locale.XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0);
    lt_ctx *ctx = lt_open(NULL);
    CHECK(ctx);
    CHECK_OK(lt_trace_create(path));
    CHECK_OK(lt_trace_open(ctx, path, 0));
    lt_trace(ctx, LT_TRACK_STEP, "span", 0, 2.5e-6);
    lt_ctx_free(ctx);
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    unlink(path);
    CHECK(n > 0);
    text[n] = '\0';
    if (!strstr(text, ",\"dur\":2.5}"))
        FAIL("the trace is %s", text);
}

static const char script[] =
    "local lt = require 'luatrain'\n"
    "assert(tostring(0.5) == '0.5' and 1.5 .. '' == '1.5' and ('%.1f'):format(2.5) == '2.5')\n"
    "assert(tonumber '0,5' == nil and 'a' > 'B')\n" /* bytes; in German a comes before B */
    "assert(os.setlocale 'de_DE.UTF-8')\n"
    "assert(tostring(0.5) == '0.5' and tostring(lt.tensor(0.5)) == '0.5000  scalar f32')\n"
    "local late <const> = setmetatable({}, {__gc = function() at_end = tostring(0.5) end})\n"
    "local x = lt.ones({2}):requires_grad()\n"
    "x:on_grad(function(g) assert(tostring(g:get(1)) == '0.5') end);\n"
    "(x * 0.5):sum():backward()\n"
    "return function(x) return x * (tostring(0.25) == '0.25' and 2 or 3) end\n";

static void run_script(void)
{
    char path[] = "/tmp/lt_test_locale.XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0);
    CHECK_EQ(write(fd, script, sizeof script - 1), sizeof script - 1);
    close(fd);
    lt_ctx *ctx = lt_open(NULL);
    CHECK(ctx);
    lua_State *L = lt_lua_new(ctx);
    CHECK(L);
    lt_status status = lt_lua_dofile(L, path, 0, NULL);
    unlink(path);
    CHECK_OK(status);
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 0, NULL, 4), *y;
    double value;
    CHECK_OK(lt_lua_run(L, &x, 1, &y, 1));
    CHECK_OK(lt_item(y, 0, &value));
    CHECK_NEAR(value, 8, 0);
    CHECK_FAILS(lt_lua_dofile(L, "/nowhere.lua", 0, NULL), LT_ESCRIPT, "nowhere");
    RELEASE(x, y);
    lt_lua_close(L);
    lt_ctx_free(ctx);
}

TEST_WITH_COMMAS(scripts_run_in_the_c_locale) { run_script(); }

/* A thread with a locale of its own keeps it. */
static void *run_in_thread(void *ud)
{
    char text[16];
    locale_t own = duplocale(LC_GLOBAL_LOCALE); /* newlocale() leaks with LOCPATH */
    (void)ud;
    CHECK(own);
    uselocale(own);
    run_script();
    CHECK(uselocale((locale_t)0) == own);
    snprintf(text, sizeof text, "%.1f", 1.5);
    CHECK_STR(text, "1,5");
    uselocale(LC_GLOBAL_LOCALE);
    freelocale(own);
    return NULL;
}

TEST_WITH_COMMAS(a_thread_keeps_its_own_locale)
{
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, run_in_thread, NULL), 0);
    run_script();
    CHECK_EQ(pthread_join(thread, NULL), 0);
}
