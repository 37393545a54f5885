/* luatrain.c - the command line: reads options, opens a context and a Lua state, runs a script and
 * turns the status into the exit code. The library never prints or exits; this program does both.
 *
 * A value comes from the flag, else from the variable LUATRAIN_NAME, else it is the library's.
 */
#include <ctype.h>
#include <errno.h>
#include <libgen.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <lauxlib.h>

#include "lua/luatrain.h"

/* ==== Options ================================================================================= */

typedef struct settings {
    lt_config config;
    lt_log_level level;       /* the least that is shown */
} settings;

/* Takes the value given by who: "--seed" or "LUATRAIN_SEED". */
typedef lt_status (*setter)(settings *s, const char *who, const char *value);

static lt_status set_device(settings *s, const char *who, const char *value)
{
    (void)who; /* the context checks it */
    s->config.device = value;
    return LT_OK;
}

static lt_status parse_number(const char *who, const char *value, uint64_t low, uint64_t high,
                              uint64_t *number)
{
    char *end;
    errno = 0;
    *number = strtoull(value, &end, 10);
    if (value[0] < '0' || value[0] > '9' || *end || errno || *number < low || *number > high)
        return lt_fail(LT_EUSAGE, "%s wants a whole number from %llu to %llu, it is '%s'", who,
                       (unsigned long long)low, (unsigned long long)high, value);
    return LT_OK;
}

static lt_status set_threads(settings *s, const char *who, const char *value)
{
    uint64_t n;
    LT_TRY(parse_number(who, value, 1, 1024, &n));
    s->config.threads = (int)n;
    return LT_OK;
}

static lt_status set_seed(settings *s, const char *who, const char *value)
{
    LT_TRY(
        parse_number(who, value, 0, INT64_MAX, &s->config.seed)); /* integers of Lua are signed */
    return setenv("LUATRAIN_SEED", value, 1) == 0 ? LT_OK : LT_ENOMEM; /* lt.seed() yields to it */
}

/* Switches have no value on the command line; as variables they are 1 or 0. */
static lt_status set_level(settings *s, const char *who, const char *value, lt_log_level level)
{
    if (strcmp(value, "1") == 0)
        s->level = level;
    else if (strcmp(value, "0") != 0)
        return lt_fail(LT_EUSAGE, "%s wants 1 or 0, it is '%s'", who, value);
    return LT_OK;
}

static lt_status set_quiet(settings *s, const char *who, const char *value)
{
    return set_level(s, who, value, LT_LOG_WARN);
}

static lt_status set_verbose(settings *s, const char *who, const char *value)
{
    return set_level(s, who, value, LT_LOG_DEBUG);
}

static const struct option {
    const char *name, *value; /* value: what it is called in the help; NULL for a switch */
    const char *help;
    setter set;               /* NULL: asks for a text instead of a run */
} options[] = {
    {"device", "auto|cpu", "what computes (auto: the best there is)", set_device},
    {"threads", "N", "threads of the kernels (the CPUs this process may use)", set_threads},
    {"seed", "S", "of all random numbers (0)", set_seed},
    {"quiet", NULL, "warnings and errors only", set_quiet},
    {"verbose", NULL, "more notes, and tracebacks of script errors", set_verbose},
    {"help", NULL, "this text; after a script: the script's own options", NULL},
    {"version", NULL, "versions, and what computes here", NULL},
};
enum { N_OPTIONS = sizeof options / sizeof *options };

static void print_help(FILE *to)
{
    fprintf(to, "usage: luatrain [options] script.lua [options of the script]\n"
                "       luatrain [options] bench dispatch\n\n");
    for (int i = 0; i < N_OPTIONS; i++) {
        const struct option *o = &options[i];
        int n = fprintf(to, "  --%s %s", o->name, o->value ? o->value : "");
        fprintf(to, "%*s%s\n", 24 - n, "", o->help);
    }
    fprintf(to,
            "\nAll but help and version are variables too: LUATRAIN_SEED=7 is --seed 7.\n"
            "A script that is not here is looked for among the models that came with luatrain.\n");
}

static void print_version(const settings *s)
{
    char backend[64];
    printf("luatrain %s\n%s\n%s\n%d threads\n", LT_VERSION,
           lt_backend(backend, sizeof backend), LUA_RELEASE,
           s->config.threads ? s->config.threads : lt_cpu_count());
}

static lt_status unknown_option(const char *arg)
{
    const char *names[N_OPTIONS];
    char word[32];
    for (int i = 0; i < N_OPTIONS; i++)
        names[i] = options[i].name;
    const char *start = arg + strspn(arg, "-");
    snprintf(word, sizeof word, "%.*s", (int)strcspn(start, "="), start);
    int nearest = lt_nearest(word, names, N_OPTIONS);
    if (nearest < 0)
        return lt_fail(LT_EUSAGE, "unknown option '%s' (luatrain --help lists them)", arg);
    return lt_fail(LT_EUSAGE, "unknown option '%s' (did you mean '--%s'?)", arg, names[nearest]);
}

/* The option that arg names, "--seed" or "--seed=7"; NULL if there is none. */
static const struct option *find_option(const char *arg)
{
    if (strncmp(arg, "--", 2) != 0)
        return NULL;
    size_t length = strcspn(arg + 2, "=");
    for (int i = 0; i < N_OPTIONS; i++)
        if (strlen(options[i].name) == length && memcmp(options[i].name, arg + 2, length) == 0)
            return &options[i];
    return NULL;
}

static lt_status read_variables(settings *s)
{
    for (int i = 0; i < N_OPTIONS; i++) {
        char name[32];
        snprintf(name, sizeof name, "LUATRAIN_%s", options[i].name);
        for (char *p = name; *p; p++)
            *p = (char)toupper((unsigned char)*p);
        const char *value = getenv(name);
        if (options[i].set && value && *value)
            LT_TRY(options[i].set(s, name, value));
    }
    return LT_OK;
}

/* Reads the flags before the script; *used is the place of the script in argv. *text is the option
 * that asks for a text, or NULL. */
static lt_status read_flags(settings *s, int argc, char **argv, int *used,
                            const struct option **text)
{
    *text = NULL;
    for (*used = 1; *used < argc && argv[*used][0] == '-' && !*text; ++*used) {
        const char *arg = argv[*used], *equals = strchr(arg, '=');
        const struct option *o = find_option(arg);
        if (!o)
            return unknown_option(arg);
        if (!o->value && equals)
            return lt_fail(LT_EUSAGE, "--%s takes no value", o->name);
        if (!o->set) {
            *text = o;
            continue;
        }
        const char *value = !o->value ? "1" : equals ? equals + 1 : argv[++*used];
        char who[32];
        snprintf(who, sizeof who, "--%s", o->name);
        if (!value)
            return lt_fail(LT_EUSAGE, "%s wants a value: %s %s", who, who, o->value);
        LT_TRY(o->set(s, who, value));
    }
    return LT_OK;
}

/* ==== Running a script ======================================================================== */

static void show_log(void *ud, lt_log_level level, const char *line)
{
    const settings *s = ud;
    if (level >= s->level)
        fprintf(stderr, "luatrain: %s\n", line);
}

/* The script is where the user says, or among the models beside this program: installed in share/,
 * or in the repository whose build folder this is. */
static lt_status find_script(const char *name, char path[PATH_MAX])
{
    static const char *const models[] = {"../share/luatrain/models", "../models"};
    char program[PATH_MAX] = "", found[PATH_MAX];
    if (access(name, F_OK) == 0 && strlen(name) < PATH_MAX) {
        strcpy(path, name);
        return LT_OK;
    }
    bool known = readlink("/proc/self/exe", program, sizeof program - 1) > 0;
    const char *folder = dirname(program);
    for (int i = 0; known && i < 2 && name[0] != '/'; i++) {
        int n = snprintf(found, PATH_MAX, "%s/%s/%s", folder, models[i], name);
        if (n < PATH_MAX && realpath(found, path))
            return LT_OK;
    }
    return lt_fail(LT_EUSAGE,
                   "there is no script '%s', neither here nor among the models of luatrain", name);
}

/* require() looks into the script's folder first. */
static void add_to_package_path(lua_State *L, const char *script)
{
    char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%s", script);
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "path");
    const char *path = lua_tostring(L, -1);
    lua_pushfstring(L, "%s/?.lua;%s", dirname(folder), path ? path : "");
    lua_setfield(L, -3, "path");
    lua_pop(L, 2);
}

static lt_status run_script(lt_ctx *ctx, int argc, char **argv)
{
    char path[PATH_MAX];
    LT_TRY(find_script(argv[0], path));
    lua_State *L = lt_lua_new(ctx);
    if (!L)
        return lt_errcode();
    add_to_package_path(L, path);
    lt_status status = lt_lua_dofile(L, path, argc - 1, argv + 1);
    lua_close(L);
    return status;
}

/* ==== bench dispatch ========================================================================== */

/* What one op costs beside its arithmetic: add of two tensors of one element, the least of some
 * rounds, in nanoseconds of processor time. */
enum { ROUNDS = 7, OPS = 100000 };

static lt_status run_adds(lt_ctx *ctx, const lt_def *add, lt_tensor *const *in, double *least)
{
    *least = INFINITY;
    for (int round = 0; round < ROUNDS; round++) {
        clock_t start = clock();
        for (int i = 0; i < OPS; i++) {
            lt_tensor *y;
            LT_TRY(lt_apply(ctx, add, in, 2, NULL, &y));
            lt_release(y);
        }
        *least = fmin(*least, 1e9 * (double)(clock() - start) / CLOCKS_PER_SEC / OPS);
    }
    return LT_OK;
}

static lt_status bench_c(lt_ctx *ctx)
{
    double plain, taped;
    int64_t one = 1;
    lt_tensor *in[2] = {lt_tensor_full(ctx, LT_F32, 1, &one, 1),
                        lt_tensor_full(ctx, LT_F32, 1, &one, 2)};
    const lt_def *add = lt_op_find(ctx, "add");
    lt_status status = in[0] && in[1] && add ? LT_OK : lt_errcode();
    if (status == LT_OK && (status = run_adds(ctx, add, in, &plain)) == LT_OK &&
        (status = lt_set_requires_grad(in[0], true)) == LT_OK &&
        (status = run_adds(ctx, add, in, &taped)) == LT_OK)
        printf("C    %7.0f ns an op on the tape, %7.0f without\n", taped, plain);
    lt_release(in[0]);
    lt_release(in[1]);
    return status;
}

static const char lua_bench[] =
    "local rounds, ops = ...\n"
    "local lt = require 'luatrain'\n"
    "local a, b = lt.ones({1}), lt.ones({1})\n"
    "local function run_adds()\n"
    "  local least = math.huge\n"
    "  for _ = 1, rounds do\n"
    "    local start = os.clock()\n"
    "    for _ = 1, ops do local _ = a + b end\n"
    "    least = math.min(least, 1e9 * (os.clock() - start) / ops)\n"
    "  end\n"
    "  return least\n"
    "end\n"
    "local plain = run_adds()\n"
    "a:requires_grad()\n"
    "local taped = run_adds()\n"
    "print(string.format('Lua  %7.0f ns an op on the tape, %7.0f without', taped, plain))\n";

static lt_status bench_lua(lt_ctx *ctx)
{
    lua_State *L = lt_lua_new(ctx);
    if (!L)
        return lt_errcode();
    lt_status status = LT_ENOMEM; /* the text itself is right */
    if (luaL_loadbuffer(L, lua_bench, sizeof lua_bench - 1, "=bench") == LUA_OK) {
        lua_pushinteger(L, ROUNDS);
        lua_pushinteger(L, OPS);
        status = lt_lua_call(L, 2, 0);
    }
    lua_close(L);
    return status;
}

static lt_status bench(lt_ctx *ctx, int argc, char **argv)
{
    if (argc != 1 || strcmp(argv[0], "dispatch") != 0)
        return lt_fail(LT_EUSAGE, "bench wants one name: luatrain bench dispatch");
    LT_TRY(bench_c(ctx));
    return bench_lua(ctx);
}

/* ==== main ==================================================================================== */

static lt_status run(settings *s, int argc, char **argv)
{
    lt_ctx *ctx = lt_open(&s->config);
    if (!ctx)
        return lt_errcode();
    lt_log_to(ctx, show_log, s);
    lt_status status;
    if (strcmp(argv[0], "bench") == 0)
        status = bench(ctx, argc - 1, argv + 1);
    else
        status = run_script(ctx, argc, argv);
    lt_ctx_free(ctx);
    return status;
}

/* OpenMP's threads spin while they wait, which on a machine with other work takes the time from
 * those that are waited for: a step becomes several times slower. How long they spin is read when
 * the library is loaded, so the program starts again with its own choice, unless there is one. */
static void spin_little(char **argv)
{
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT"))
        return;
    if (setenv("GOMP_SPINCOUNT", "1000", 1) == 0)
        execv("/proc/self/exe", argv); /* if it returns, training is only slower */
}

int main(int argc, char **argv)
{
    spin_little(argv);
    settings s = {.level = LT_LOG_INFO};
    const struct option *text;
    int used;
    lt_status status = read_variables(&s);
    if (status == LT_OK)
        status = read_flags(&s, argc, argv, &used, &text);
    if (status == LT_OK && text) {
        if (strcmp(text->name, "help") == 0)
            print_help(stdout);
        else
            print_version(&s);
        return 0;
    }
    if (status == LT_OK && used >= argc) {
        print_help(stderr);
        return lt_exit_code(LT_EUSAGE);
    }
    if (status == LT_OK)
        status = run(&s, argc - used, argv + used);
    if (status != LT_OK)
        fprintf(stderr, "luatrain: %s\n", lt_errmsg());
    return lt_exit_code(status);
}
