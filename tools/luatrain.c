/* luatrain.c - the command line program. It opens a context and a Lua state for each rank, runs a
 * script, and converts the status to an exit code. The library never prints or exits; this program
 * does both.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <lauxlib.h>

#include "tools/launch.h"
#include "tools/options.h"
#include "tools/outcome.h"
#include "tools/plan.h"
#include "tools/ranks.h"
#include "tools/script.h"
#include "tools/serve.h"
#include "tools/warnings.h"
#include "tools/watchdog.h"

/* ==== Running a script ======================================================================== */

typedef struct speaker {
    lt_log_level level; /* lowest level that is shown */
    int rank;
} speaker;

static void show_log(void *ud, lt_log_level level, const char *line)
{
    const speaker *who = ud;
    if (level >= who->level && who->rank == 0)
        fprintf(stderr, "luatrain: %s\n", line);
    else if (level >= who->level)
        fprintf(stderr, "luatrain: rank %d: %s\n", who->rank, line);
}

/* Called when the script has ended: warns of options that it did not use. */
static void warn_of_unused(lua_State *L)
{
    static const char text[] = "require('luatrain.api.unused_options').warn()";
    bool is_loaded = luaL_loadbuffer(L, text, sizeof text - 1, "=unused_options") == LUA_OK;
    lt_status status = is_loaded ? lt_lua_call(L, 0, 0) : LT_ENOMEM;
    (void)status; /* ignored: a script may have replaced require() */
}

/* Ends the last loop over batches, if the script did not: see luatrain/train/async_loop.lua. Not
 * with require(), which a script may have replaced. */
static int end_script(lua_State *L)
{
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    if (lua_getfield(L, -1, "luatrain.train.async_loop") == LUA_TTABLE) {
        lua_getfield(L, -1, "end_script");
        lua_call(L, 0, 0);
    }
    return 0;
}

/* ==== bench dispatch ========================================================================== */

/* Measures the overhead of one op: add of two tensors of one element, in nanoseconds of CPU time,
 * the minimum over ROUNDS rounds of OPS ops. */
enum { ROUNDS = 7, OPS = 100000 };

static lt_status run_adds(lt_ctx *ctx, const lt_def *add, lt_tensor *const *in, double *min)
{
    *min = INFINITY;
    for (int round = 0; round < ROUNDS; round++) {
        clock_t start = clock();
        for (int i = 0; i < OPS; i++) {
            lt_tensor *y;
            LT_TRY(lt_apply(ctx, add, in, 2, NULL, &y));
            lt_release(y);
        }
        *min = fmin(*min, 1e9 * (double)(clock() - start) / CLOCKS_PER_SEC / OPS);
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
        printf("C    %7.0f ns per op on the tape, %7.0f without\n", taped, plain);
    lt_release(in[0]);
    lt_release(in[1]);
    return status;
}

static const char lua_bench[] = "require 'luatrain.commands.bench'.dispatch(...)";

static lt_status bench_lua(lua_State *L)
{
    if (luaL_loadbuffer(L, lua_bench, sizeof lua_bench - 1, "=bench") != LUA_OK)
        return lt_fail(LT_ENOMEM, "out of memory for a Lua state"); /* not a syntax error */
    lua_pushinteger(L, ROUNDS);
    lua_pushinteger(L, OPS);
    return lt_lua_call(L, 2, 0);
}

static lt_status bench(lt_ctx *ctx, lua_State *L, int argc, char **argv)
{
    if (argc > 0 && strcmp(argv[0], "dist") == 0)
        return run_attached(L, "bench_dist", argc - 1, argv + 1);
    if (argc != 1 || strcmp(argv[0], "dispatch") != 0)
        return run_attached(L, "bench", argc, argv);
    LT_TRY(bench_c(ctx));
    return bench_lua(L);
}

/* Returns the status of a command that prints; LT_EFILE if stdout could not be written, as on a
 * full disk. */
static lt_status shown(const char *name, lt_status status)
{
    if (status == LT_OK && (fflush(stdout) != 0 || ferror(stdout)))
        return lt_fail(LT_EFILE, "%s: cannot write the whole output to stdout", name);
    return status;
}

/* ==== Signals ================================================================================= */

/* The context that stop() stops. It is static because a signal handler gets no user data. */
static lt_ctx *volatile signalled;

static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGPIPE};
enum { N_SIGNALS = sizeof signals / sizeof *signals };

static void handle(int signal, void (*handler)(int))
{
    struct sigaction next = {.sa_handler = handler, .sa_flags = SA_RESTART};
    for (int i = 0; i < N_SIGNALS; i++)
        sigaddset(&next.sa_mask, signals[i]);
    sigaction(signal, &next, NULL);
}

/* Installs a handler for all signals above, except those that are ignored because of nohup or a
 * shell. */
static void handle_signals(void (*handler)(int))
{
    struct sigaction now;
    for (int i = 0; i < N_SIGNALS; i++)
        if (sigaction(signals[i], NULL, &now) == 0 && now.sa_handler != SIG_IGN)
            handle(signals[i], handler);
}

/* The signal handler. The first signal requests that the run save and stop at its next step. A
 * second signal kills the process, and so does the first if there is no run. A repeated SIGHUP or
 * SIGPIPE is ignored: a closed terminal may send SIGHUP twice, and a closed pipe causes SIGPIPE at
 * each line. */
static void stop(int signal)
{
    bool again = lt_stop_reason(signalled) != 0;
    if (again ? signal == SIGHUP || signal == SIGPIPE : lt_stop(signalled, signal)) {
        if (signal == SIGPIPE)
            handle(SIGPIPE, SIG_IGN); /* output after the run is lost too */
        return;
    }
    handle(signal, SIG_DFL);
    raise(signal);
}

/* ==== main ==================================================================================== */

/* Whether name is a subcommand that does not train. */
static bool looks(const char *name)
{
    return strcmp(name, "summary") == 0 || strcmp(name, "report") == 0;
}

static lt_status run_command(const settings *s, lt_ctx *ctx, lua_State *L)
{
    int argc = s->argc;
    char **argv = s->argv;
    if (strcmp(argv[0], "bench") == 0)
        return shown("bench", bench(ctx, L, argc - 1, argv + 1));
    if (looks(argv[0]))
        return shown(argv[0], run_attached(L, argv[0], argc - 1, argv + 1));
    LT_TRY(run_script(L, argc, argv));
    lua_pushcfunction(L, end_script);
    LT_TRY(lt_lua_call(L, 0, 0));
    warn_of_unused(L);
    return LT_OK;
}

/* ==== Ranks =================================================================================== */

/* Whether this process is one rank of a job of several. */
static bool is_one_of_several(const settings *s) { return s->under_mpi || s->serve || s->join; }

/* Whether the ranks train asynchronously. */
static bool is_async(const settings *s) { return s->parallel == ASYNCHRONOUS && !s->simulates; }

/* Whether the other ranks continue if this one fails with this status: it is a thread of
 * asynchronous training. */
static bool is_expendable(const settings *s, const lt_group *group, lt_status status)
{
    return is_async(s) && !is_one_of_several(s) && lt_group_rank(group) > 0 && !is_of_all(status);
}

/* Finds the plan of a pipeline and makes L a stage of it, or shows all plans. */
static lt_status plan_and_join(planner *p, const settings *s, const lt_config *config, lua_State *L,
                               lt_group *group)
{
    LT_TRY(plan_pipeline(p, s, config, group, L));
    return p->is_shown ? LT_OK : lt_lua_join_pipeline(L, group, &s->reducer, &p->pipeline);
}

/* Runs the command as one rank of group, or alone if group is NULL. config: of ctx. */
static lt_status run_in(const settings *s, const lt_config *config, lt_ctx *ctx, lt_group *group)
{
    planner p = {0};
    lua_State *L = lt_lua_new(ctx);
    if (!L)
        return lt_errcode();
    lt_status status = pass_command_line(L, s);
    if (status == LT_OK && s->under_mpi)
        status = warn_of_shared_gpus(s, ctx, group);
    if (status == LT_OK && group) {
        lt_group_set_threads(group, lt_threads(ctx));
        status = is_async(s)                  ? lt_lua_join_async(L, group)
                 : s->parallel == IN_PIPELINE ? plan_and_join(&p, s, config, L, group)
                                              : lt_lua_join(L, group, &s->reducer);
    }
    if (status == LT_OK && !p.is_shown)
        status = run_command(s, ctx, L);
    if (s->plans && status == LT_EDONE)
        status = LT_OK; /* there is no plan: the script has only shown its help, for example */
    if (status == LT_ESTOPPED && is_one_of_several(s))
        signal(SIGUSR1, SIG_IGN); /* it may still arrive here if another rank got it first */
    if (status == LT_OK)
        status = lt_synchronize(ctx); /* the last step's deferred check may fail */
    if (group && is_failure(status) && !is_expendable(s, group, status))
        lt_group_fail(group); /* before lt_lua_close() waits for collectives in flight */
    lt_lua_close(L);
    plan_free(&p);
    return status;
}

static lt_status run_rank(void *ud, lt_group *group)
{
    const settings *s = ud;
    speaker who = {.level = s->level, .rank = group ? lt_group_rank(group) : 0};
    lt_config config = s->config;
    config.local_rank = group ? lt_group_local_rank(group) : 0;
    lt_ctx *ctx = lt_open(&config);
    if (!ctx)
        return lt_errcode();
    lt_set_log(ctx, show_log, &who);
    lt_set_autocast(ctx, s->amp);
    if (s->trace && lt_trace_open(ctx, s->trace, who.rank) != LT_OK) {
        lt_ctx_free(ctx);
        return lt_errcode();
    }
    bool is_first_here = who.rank == 0 || is_one_of_several(s);
    if (is_first_here) {
        signalled = ctx;
        handle_signals(stop);
    }
    lt_status status = run_in(s, &config, ctx, group);
    if (is_first_here)
        handle_signals(SIG_DFL);
    lt_ctx_free(ctx);
    return status;
}

/* Chooses the settings that depend on the number n of ranks and on the CPUs of each. The bits of a
 * deterministic run depend on the threads of a rank, so it uses one thread per rank for any number
 * of ranks. It runs on the CPU unless the user names a device. A single rank on an accelerator
 * needs no vranks. */
static lt_status choose_threads(settings *s, int n, int cpus)
{
    if (!s->config.deterministic && s->reducer.vranks > 0)
        return lt_fail(LT_EUSAGE, "--vranks requires --deterministic");
    bool is_there = strncmp(s->config.device, "cuda", 4) == 0;
    if (s->config.deterministic && s->reducer.vranks == 0 && !(is_there && n == 1))
        s->reducer.vranks = n;
    if (s->config.threads == 0 && (n > 1 || s->config.deterministic))
        s->config.threads = s->config.deterministic ? 1 : cpus;
    if (s->config.deterministic && strcmp(s->config.device, "auto") == 0)
        s->config.device = "cpu";
    return LT_OK;
}

/* LT_EUSAGE if --share does not apply to a job of n ranks. */
static lt_status check_share(const settings *s, int n)
{
    if (!s->has_share || (n > 1 && !s->config.deterministic))
        return LT_OK;
    if (n == 1)
        return lt_fail(LT_EUSAGE, "--share divides each batch among several ranks, but there is 1; "
                                  "start them with --ranks or mpirun");
    return lt_fail(LT_EUSAGE, "--share cannot be combined with --deterministic, which divides "
                              "batches in the same way for any number of ranks");
}

/* Runs this process as one rank of an MPI job. The ranks on a node share its CPUs. */
static lt_status run_process(void *ud, lt_group *group)
{
    settings *s = ud;
    int cpus = lt_group_cpus(group);
    outcome_note_rank(lt_group_rank(group));
    warn_of_cpus(s, group, cpus);
    if (lt_group_rank(group) == 0)
        warn_of_limit(s);
    LT_TRY(compare_options(group));
    LT_TRY(check_share(s, lt_group_size(group)));
    LT_TRY(choose_threads(s, lt_group_size(group), cpus));
    if (s->trace && lt_group_rank(group) == 0)
        LT_TRY(lt_trace_create(s->trace));
    if (s->trace)
        LT_TRY(lt_group_barrier(group, "the trace"));
    return run_rank(s, group);
}

static lt_status run_under_mpi(settings *s)
{
    lt_group *group;
    watchdog dog;
    if (s->ranks > 0)
        return lt_fail(LT_EUSAGE, "--ranks is for ranks in one process, but mpirun or srun "
                                  "started several; let it start all ranks");
    LT_TRY(watchdog_start(&dog, lt_group_timeout(&s->group)));
    s->group.in_mpi = watchdog_on_mpi_call;
    s->group.ud = &dog;
    s->under_mpi = true;
    lt_status status = lt_mpi_open(&s->group, &group);
    if (status == LT_OK)
        status = run_ranks(&(ranks){.n = 1, .own_group = group, .run = run_process, .ud = s});
    watchdog_stop(&dog);
    return status;
}

/* ==== Jobs that workers join ================================================================== */

/* Runs this process as the server of an elastic job, or as a worker. */
static lt_status run_elastic_rank(void *ud, lt_group *group)
{
    settings *s = ud;
    LT_TRY(share_options(s, group));
    if (lt_group_rank(group) > 0)
        serve_note_worker(lt_group_rank(group));
    if (lt_group_rank(group) > 0 && s->level <= LT_LOG_INFO)
        fprintf(stderr, "luatrain: this is worker %d of the job at %s\n", lt_group_rank(group),
                lt_serve_address(group));
    LT_TRY(choose_threads(s, 1, lt_cpu_count()));
    if (s->trace)
        LT_TRY(lt_trace_create(s->trace));
    return run_rank(s, group);
}

/* Whether mpirun has started several processes, and ends all of them if one is lost. Each process
 * that srun has started may join a job as a worker of its own. */
static bool is_under_mpirun(void)
{
    return lt_mpi_is_launched() &&
           (getenv("OMPI_COMM_WORLD_SIZE") || !getenv("SLURM_STEP_NUM_TASKS"));
}

static lt_status check_elastic(const settings *s)
{
    const char *own = s->serve ? "--serve" : "--join";
    const char *other = s->serve && s->join                ? "--join"
                        : s->ranks > 0                     ? "--ranks"
                        : s->simulates                     ? "--simulate"
                        : s->plans                         ? "plan"
                        : s->join && is_under_mpirun()     ? "mpirun"
                        : looks(s->argv[0])                ? s->argv[0]
                        : strcmp(s->argv[0], "bench") == 0 ? "bench"
                                                           : NULL;
    if (other)
        return lt_fail(LT_EUSAGE, "%s cannot be combined with %s", own, other);
    if (s->serve && lt_mpi_is_launched())
        return lt_fail(LT_EUSAGE,
                       "--serve is for one process, but mpirun or srun has started several; start "
                       "the server with srun -n 1 luatrain --serve, and N workers with srun -n N "
                       "luatrain --join HOST:PORT --key FILE");
    if (s->serve && s->parallel != ASYNCHRONOUS)
        return lt_fail(LT_EUSAGE,
                       "--serve requires --parallel async=RULE: workers can join only asynchronous "
                       "training");
    return LT_OK;
}

/* Returns the key file: the file of --key, or else join.key in the folder of --out. NULL without
 * either. `path` is memory for its name. */
static const char *find_key(const settings *s, char path[PATH_MAX])
{
    const char *out = getenv("LUATRAIN_OUT");
    if (s->key || !out || !*out)
        return s->key;
    int n = snprintf(path, PATH_MAX, "%s/join.key", out);
    return n < PATH_MAX && access(path, F_OK) == 0 ? path : NULL;
}

static lt_status run_elastic(settings *s)
{
    char path[PATH_MAX];
    lt_group *group;
    lt_join_config config = {.address = s->serve ? s->serve : s->join,
                             .key = find_key(s, path),
                             .timeout = s->group.timeout};
    LT_TRY(check_elastic(s));
    warn_of_limit(s);
    LT_TRY(s->serve ? lt_serve_open(&config, &group) : lt_join_open(&config, &group));
    return run_ranks(&(ranks){.n = 1, .own_group = group, .run = run_elastic_rank, .ud = s});
}

/* LT_EUSAGE for options that cannot be combined with --parallel. */
static lt_status check_parallel(const settings *s)
{
    bool in_half = s->reducer.wire == LT_F16 || s->reducer.wire == LT_BF16;
    bool by_nccl = s->reducer.sum_backend == LT_SUM_BACKEND_NCCL, syncs = s->reducer.server;
    const char *name = s->config.deterministic && !syncs            ? "--deterministic"
                       : s->reducer.vranks > 0 && !syncs            ? "--vranks"
                       : in_half && s->parallel == ASYNCHRONOUS     ? "--wire"
                       : by_nccl && s->parallel != IN_PIPELINE      ? "--sums nccl"
                       : s->has_share                               ? "--share"
                       : s->simulates && s->parallel == IN_PIPELINE ? "--simulate"
                                                                    : NULL;
    if (s->parallel == UNKNOWN_MODE)
        return lt_fail(
            LT_EUSAGE,
            "--parallel must begin with async=RULE or pipe=P, or be sync-server, but is '%s'",
            getenv("LUATRAIN_PARALLEL"));
    if (s->parallel == SYNCHRONOUS || !name)
        return LT_OK;
    return lt_fail(LT_EUSAGE, "%s cannot be combined with --parallel", name);
}

static lt_status run_all(settings *s)
{
    if (strcmp(s->argv[0], "plan") == 0) {
        bool is_help = false;
        LT_TRY(read_plan(s, &is_help));
        if (is_help)
            return LT_OK;
    }
    LT_TRY(check_parallel(s));
    if (s->serve || s->join)
        return run_elastic(s);
    bool several = s->ranks > 1 || lt_mpi_is_launched();
    if (several && looks(s->argv[0]))
        return lt_fail(LT_EUSAGE, "%s works on one rank, not on several", s->argv[0]);
    if (several && s->simulates)
        return lt_fail(LT_EUSAGE, "--simulate is for one process, not for several ranks");
    if (lt_mpi_is_launched())
        return run_under_mpi(s);
    int n = s->ranks > 0 ? s->ranks : 1, cpus = lt_cpu_count();
    warn_of_limit(s);
    warn_if_bound("this process", 1, cpus);
    warn_of_shared_gpu(s, n);
    LT_TRY(check_share(s, n));
    LT_TRY(choose_threads(s, n, cpus > n ? cpus / n : 1));
    if (s->trace)
        LT_TRY(lt_trace_create(s->trace));
    if (n == 1 && s->reducer.vranks == 0 && s->reducer.sum_backend != LT_SUM_BACKEND_NCCL &&
        !(is_async(s) && s->ranks == 1) && s->parallel != IN_PIPELINE)
        return run_rank(s, NULL);
    return run_ranks(&(ranks){
        .n = n, .group = s->group, .first_decides = is_async(s), .run = run_rank, .ud = s});
}

/* Opens /dev/null as stdin, stdout and stderr if they are closed. Otherwise the next opened file
 * would get such a descriptor, and printed text would go into it. */
static void fill_descriptors(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) == -1 && open("/dev/null", O_RDWR) == -1)
            return; /* there is no /dev */
}

/* Limits the spinning of OpenMP's threads. Waiting threads spin, which on a busy machine takes CPU
 * time from the threads they wait for and makes a step several times slower. libgomp reads the
 * limit when it is loaded, so this sets the variable and executes the program again, unless the
 * user set one. */
static void spin_little(char **argv)
{
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT"))
        return;
    char program[PATH_MAX];
    if (find_program(program) && setenv("GOMP_SPINCOUNT", "1000", 1) == 0)
        execv(program, argv); /* if it returns, training is only slower */
}

/* Whether to print the help: for --help, and for "summary --help", which has no help of its own. */
static bool asks_for_help(const settings *s)
{
    bool summary = s->argc > 1 && strcmp(s->argv[0], "summary") == 0;
    return (s->text && strcmp(s->text, "help") == 0) ||
           (summary && strcmp(s->argv[1], "--help") == 0);
}

/* Prints the message of a failure. Returns the exit code: code if status is LT_OK. */
static int finish(lt_status status, int code)
{
    if (status != LT_OK && *lt_errmsg())
        fprintf(stderr, "luatrain: %s\n", lt_errmsg());
    return status == LT_OK ? code : lt_exit_code(status);
}

int main(int argc, char **argv)
{
    fill_descriptors();
    signal(SIGXFSZ, SIG_IGN); /* so that a write beyond the file size limit fails with EFBIG */
    spin_little(argv);
    settings s = {.level = LT_LOG_INFO, .config = {.device = "auto"}};
    lt_status status = argc > 0 ? read_options(&s, argv) : LT_OK;
    if (status == LT_OK && asks_for_help(&s)) {
        print_help(stdout);
        return 0;
    }
    if (status == LT_OK && s.text)
        return finish(print_version(&s), 0);
    if (status == LT_OK && s.argc <= 0) {
        print_help(stderr);
        return lt_exit_code(LT_EUSAGE);
    }
    char program[PATH_MAX];
    int code = 0;
    if (status == LT_OK && s.launches)
        status = launch(&s, find_program(program) ? program : argv[0], argv + 1, &code);
    else if (status == LT_OK)
        status = run_all(&s);
    return finish(status, code);
}
