/* luatrain.c - the command line: reads options, opens a context and a Lua state, runs a script and
 * turns the status into the exit code. The library never prints or exits; this program does both.
 *
 * A value comes from the flag, else from the variable LUATRAIN_NAME, else it is the library's. A
 * flag is checked here and becomes the variable: there the embedded Lua finds it.
 */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <lauxlib.h>

#include "lua/luatrain.h"

extern char **environ;

/* ==== Options ================================================================================= */

typedef struct settings {
    lt_config config;
    lt_log_level level;       /* the least that is shown */
    lt_dtype amp;             /* for loops that are no run; a run looks up the variable */
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
    return parse_number(who, value, 0, INT64_MAX, &s->config.seed); /* Lua's integers are signed */
}

static lt_status set_path(settings *s, const char *who, const char *value)
{
    (void)s;
    return *value ? LT_OK : lt_fail(LT_EUSAGE, "%s wants a path, it is ''", who);
}

static lt_status set_count(settings *s, const char *who, const char *value)
{
    uint64_t n;
    (void)s;
    return parse_number(who, value, 1, INT64_MAX, &n);
}

static lt_status set_amp(settings *s, const char *who, const char *value)
{
    s->amp = strcmp(value, "bf16") == 0 ? LT_BF16 : LT_F32;
    if (s->amp == LT_BF16 || strcmp(value, "off") == 0)
        return LT_OK;
    bool later = strcmp(value, "fp16") == 0 || strcmp(value, "auto") == 0;
    return lt_fail(LT_EUSAGE, "%s wants off or bf16, it is '%s'%s", who, value,
                   later ? ", which is still to come" : "");
}

static lt_status set_log(settings *s, const char *who, const char *value)
{
    (void)s;
    if (strcmp(value, "text") == 0 || strcmp(value, "json") == 0)
        return LT_OK;
    return lt_fail(LT_EUSAGE, "%s wants text or json, it is '%s'", who, value);
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
    {"amp", "off|bf16", "bf16: compute in mixed precision (what the script says, or off)",
     set_amp},
    {"out", "DIR", "the folder of the run (a new one, runs/SCRIPT-N)", set_path},
    {"resume", "auto|PATH|never", "auto: goes on where the run in DIR was (if --out is given)",
     set_path},
    {"save-every", "N", "a checkpoint each N steps too, not only each epoch and 10 minutes",
     set_count},
    {"max-steps", "N", "stops after step N of the run and saves", set_count},
    {"log", "text|json", "json: the lines of metrics.jsonl instead of text", set_log},
    {"quiet", NULL, "warnings and errors only", set_quiet},
    {"verbose", NULL, "more notes, and tracebacks of script errors", set_verbose},
    {"help", NULL, "this text; after a script: the script's own options", NULL},
    {"version", NULL, "versions, and what computes here", NULL},
};
enum { N_OPTIONS = sizeof options / sizeof *options };

static void print_help(FILE *to)
{
    fprintf(to, "usage: luatrain [options] script.lua [options of the script]\n"
                "       luatrain [options] summary script.lua [options of the script]\n"
                "       luatrain [options] bench [options of bench] script.lua [options of the "
                "script]\n"
                "       luatrain bench dispatch\n\n");
    for (int i = 0; i < N_OPTIONS; i++) {
        const struct option *o = &options[i];
        int n = fprintf(to, "  --%s %s", o->name, o->value ? o->value : "");
        fprintf(to, "%*s%s\n", 28 - n, "", o->help);
    }
    fprintf(to,
            "\nAll but help and version are variables too: LUATRAIN_SEED=7 is --seed 7.\n"
            "A script that is not here is looked for among the models that came with luatrain.\n");
}

static void print_version(const settings *s)
{
    char backend[64];
    int threads = s->config.threads ? s->config.threads : lt_cpu_count();
    printf("luatrain %s\n%s\n%s\n%d thread%s\n", LT_VERSION, lt_backend(backend, sizeof backend),
           LUA_RELEASE, threads, threads == 1 ? "" : "s");
}

/* The option whose name is nearest to word, or NULL. */
static const struct option *nearest_option(const char *word)
{
    const char *names[N_OPTIONS];
    for (int i = 0; i < N_OPTIONS; i++)
        names[i] = options[i].name;
    int nearest = lt_nearest(word, names, N_OPTIONS);
    return nearest < 0 ? NULL : &options[nearest];
}

static lt_status unknown_option(const char *arg)
{
    char word[32];
    const char *start = arg + strspn(arg, "-");
    snprintf(word, sizeof word, "%.*s", (int)strcspn(start, "="), start);
    const struct option *near = nearest_option(word);
    static const char other[] = "; the script's own options stand after it";
    if (!near)
        return lt_fail(LT_EUSAGE, "unknown option '%s' (luatrain --help lists them)%s", arg, other);
    return lt_fail(LT_EUSAGE, "unknown option '%s' (did you mean '--%s'?)%s", arg, near->name,
                   other);
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

/* "save-every" as "LUATRAIN_SAVE_EVERY". */
static const char *variable_of(const struct option *o, char name[32])
{
    snprintf(name, 32, "LUATRAIN_%s", o->name);
    for (char *p = name; *p; p++)
        *p = *p == '-' ? '_' : (char)toupper((unsigned char)*p);
    return name;
}

static lt_status read_variables(settings *s)
{
    for (int i = 0; i < N_OPTIONS; i++) {
        char name[32];
        const char *value = getenv(variable_of(&options[i], name));
        if (options[i].set && value && *value)
            LT_TRY(options[i].set(s, name, value));
    }
    return LT_OK;
}

/* A variable that looks like one of ours is most likely a slip. */
static void warn_of_variables(void)
{
    static const char prefix[] = "LUATRAIN_";
    for (char **entry = environ; *entry; entry++) {
        char word[32] = "", name[32];
        if (strncmp(*entry, prefix, sizeof prefix - 1) != 0)
            continue;
        const char *rest = *entry + sizeof prefix - 1;
        for (size_t i = 0; i < sizeof word - 1 && rest[i] && rest[i] != '='; i++)
            word[i] = rest[i] == '_' ? '-' : (char)tolower((unsigned char)rest[i]);
        const struct option *near = nearest_option(word);
        if (!near || !near->set || strcmp(near->name, word) == 0)
            continue;
        fprintf(stderr, "luatrain: warning: unknown variable %.*s (did you mean %s?)\n",
                (int)strcspn(*entry, "="), *entry, variable_of(near, name));
    }
}

static lt_status set_option(settings *s, const struct option *o, const char *value)
{
    char name[32];
    snprintf(name, sizeof name, "--%s", o->name);
    if (!value)
        return lt_fail(LT_EUSAGE, "%s wants a value: %s %s", name, name, o->value);
    LT_TRY(o->set(s, name, value));
    if (setenv(variable_of(o, name), value, 1) != 0)
        return lt_fail(LT_ENOMEM, "out of memory for the environment");
    return LT_OK;
}

/* Reads the flags before the script; *used is the place of the script in argv. *text is the option
 * that asks for a text, or NULL. */
static lt_status read_flags(settings *s, int argc, char **argv, int *used,
                            const struct option **text)
{
    *text = NULL;
    for (*used = 1; *used < argc && argv[*used][0] == '-'; ++*used) {
        const char *arg = argv[*used], *equals = strchr(arg, '=');
        const struct option *o = find_option(arg);
        if (!o)
            return unknown_option(arg);
        if (!o->value && equals)
            return lt_fail(LT_EUSAGE, "--%s takes no value", o->name);
        if (!o->set)
            *text = *text ? *text : o;
        else
            LT_TRY(set_option(s, o, !o->value ? "1" : equals ? equals + 1 : argv[++*used]));
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

static bool is_file(const char *path)
{
    struct stat now;
    return stat(path, &now) == 0 && !S_ISDIR(now.st_mode);
}

/* Where the models are, seen from this program: installed in share/, or in the repository whose
 * build folder this is. */
static const char *const models[] = {"../share/luatrain/models", "../models"};
enum { N_MODELS = sizeof models / sizeof *models };

static bool find_program(char path[PATH_MAX])
{
    ssize_t n = readlink("/proc/self/exe", path, PATH_MAX - 1);
    path[n > 0 ? n : 0] = '\0';
    return n > 0;
}

/* The script is where the user says, or among the models. */
static lt_status find_script(const char *name, char path[PATH_MAX])
{
    char program[PATH_MAX], found[PATH_MAX];
    if (is_file(name) && strlen(name) < PATH_MAX) {
        strcpy(path, name);
        return LT_OK;
    }
    const char *folder = find_program(program) ? dirname(program) : NULL;
    for (int i = 0; folder && i < N_MODELS && name[0] != '/'; i++) {
        int n = snprintf(found, PATH_MAX, "%s/%s/%s", folder, models[i], name);
        if (n < PATH_MAX && is_file(found) && realpath(found, path))
            return LT_OK;
    }
    return lt_fail(LT_EUSAGE,
                   "there is no script '%s', neither here nor among the models of luatrain", name);
}

/* require() looks into the script's folder first, and last among the models. */
static void add_to_package_path(lua_State *L, const char *script)
{
    char folder[PATH_MAX], program[PATH_MAX];
    snprintf(folder, sizeof folder, "%s", script);
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "path");
    const char *path = lua_tostring(L, -1);
    lua_pushfstring(L, "%s/?.lua;%s", dirname(folder), path ? path : "");
    const char *beside = find_program(program) ? dirname(program) : NULL;
    for (int i = 0; beside && i < N_MODELS; i++) {
        lua_pushfstring(L, ";%s/%s/?.lua", beside, models[i]);
        lua_concat(L, 2);
    }
    lua_setfield(L, -3, "path");
    lua_pop(L, 2);
}

static lt_status run_script(lua_State *L, int argc, char **argv)
{
    char path[PATH_MAX];
    LT_TRY(find_script(argv[0], path));
    add_to_package_path(L, path);
    return lt_lua_dofile(L, path, argc - 1, argv + 1);
}

/* The subcommands that look at how a script trains: watch() of luatrain/NAME.lua takes what follows
 * the name and returns which of it is the script, and a function. The script runs until it is told
 * that all was seen, as LT_EDONE; then the function is called. */
static const char watch_script[] = "return require('luatrain.' .. ...).watch(select(2, ...))";

static lt_status watch(lua_State *L, const char *name, int argc, char **argv)
{
    if (!lua_checkstack(L, argc + 3) ||
        luaL_loadbuffer(L, watch_script, sizeof watch_script - 1, "=watch") != LUA_OK)
        return lt_fail(LT_ENOMEM, "out of memory for a Lua state"); /* the text itself is right */
    lua_pushstring(L, name);
    for (int i = 0; i < argc; i++)
        lua_pushstring(L, argv[i]);
    lt_status status = lt_lua_call(L, 1 + argc, 2);
    if (status != LT_OK)
        return status == LT_EDONE ? LT_OK : status;
    int script = (int)lua_tointeger(L, 1) - 1;
    status = run_script(L, argc - script, argv + script);
    if (status != LT_OK && status != LT_EDONE)
        return status;
    lua_settop(L, 2);
    return lt_lua_call(L, 0, 0);
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

static const char lua_bench[] = "require 'luatrain.bench'.dispatch(...)";

static lt_status bench_lua(lua_State *L)
{
    if (luaL_loadbuffer(L, lua_bench, sizeof lua_bench - 1, "=bench") != LUA_OK)
        return lt_fail(LT_ENOMEM, "out of memory for a Lua state"); /* the text itself is right */
    lua_pushinteger(L, ROUNDS);
    lua_pushinteger(L, OPS);
    return lt_lua_call(L, 2, 0);
}

static lt_status bench(lt_ctx *ctx, lua_State *L, int argc, char **argv)
{
    if (argc != 1 || strcmp(argv[0], "dispatch") != 0)
        return watch(L, "bench", argc, argv);
    LT_TRY(bench_c(ctx));
    return bench_lua(L);
}

/* ==== Signals ================================================================================= */

/* The one that a signal is for: a handler has no other way to know. */
static lt_ctx *volatile signalled;

static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE};
enum { N_SIGNALS = sizeof signals / sizeof *signals };

static void handle(int signal, void (*handler)(int))
{
    struct sigaction next = {.sa_handler = handler, .sa_flags = SA_RESTART};
    for (int i = 0; i < N_SIGNALS; i++)
        sigaddset(&next.sa_mask, signals[i]);
    sigaction(signal, &next, NULL);
}

/* Those that are ignored stay so: nohup and shells mean it. */
static void handle_signals(void (*handler)(int))
{
    struct sigaction now;
    for (int i = 0; i < N_SIGNALS; i++)
        if (sigaction(signals[i], NULL, &now) == 0 && now.sa_handler != SIG_IGN)
            handle(signals[i], handler);
}

/* A run saves and stops at its next step. A second signal kills, and so does the first one when
 * there is no run. But a terminal that has gone may say so twice, and a reader that has gone does
 * with each line: they are not in a hurry. */
static void stop(int signal)
{
    bool again = lt_stop_reason(signalled) != 0;
    if (again ? signal == SIGHUP || signal == SIGPIPE : lt_stop(signalled, signal)) {
        if (signal == SIGPIPE)
            handle(SIGPIPE, SIG_IGN); /* what is said after the run is lost too */
        return;
    }
    handle(signal, SIG_DFL);
    raise(signal);
}

/* ==== main ==================================================================================== */

static lt_status run_in(lt_ctx *ctx, int argc, char **argv)
{
    lua_State *L = lt_lua_new(ctx);
    if (!L)
        return lt_errcode();
    signalled = ctx;
    handle_signals(stop);
    lt_status status;
    if (strcmp(argv[0], "bench") == 0)
        status = bench(ctx, L, argc - 1, argv + 1);
    else if (strcmp(argv[0], "summary") == 0)
        status = watch(L, "summary", argc - 1, argv + 1);
    else
        status = run_script(L, argc, argv);
    lua_close(L);
    handle_signals(SIG_DFL);
    return status;
}

static lt_status run(settings *s, int argc, char **argv)
{
    lt_ctx *ctx = lt_open(&s->config);
    if (!ctx)
        return lt_errcode();
    lt_log_to(ctx, show_log, s);
    lt_set_autocast(ctx, s->amp);
    lt_status status = run_in(ctx, argc, argv);
    lt_ctx_free(ctx);
    return status;
}

/* A closed stdin, stdout or stderr would be the next file that is opened, and what is printed would
 * go into it. */
static void fill_descriptors(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) == -1 && open("/dev/null", O_RDWR) == -1)
            return; /* no /dev: there is nothing to be done */
}

/* OpenMP's threads spin while they wait, which on a machine with other work takes the time from
 * those that are waited for: a step becomes several times slower. How long they spin is read when
 * the library is loaded, so the program starts again with its own choice, unless there is one. */
static void spin_little(char **argv)
{
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT"))
        return;
    char program[PATH_MAX];
    if (find_program(program) && setenv("GOMP_SPINCOUNT", "1000", 1) == 0)
        execv(program, argv); /* if it returns, training is only slower */
}

/* "summary --help": it has no help of its own. */
static bool asks_for_help(int argc, char **argv)
{
    return argc > 1 && strcmp(argv[0], "summary") == 0 && strcmp(argv[1], "--help") == 0;
}

int main(int argc, char **argv)
{
    fill_descriptors();
    signal(SIGXFSZ, SIG_IGN); /* a file that grows too large is a disk that is full */
    spin_little(argv);
    settings s = {.level = LT_LOG_INFO};
    const struct option *text;
    int used;
    lt_status status = read_variables(&s);
    warn_of_variables();
    if (status == LT_OK)
        status = read_flags(&s, argc, argv, &used, &text);
    if (status == LT_OK && (text || asks_for_help(argc - used, argv + used))) {
        if (text && strcmp(text->name, "version") == 0)
            print_version(&s);
        else
            print_help(stdout);
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
