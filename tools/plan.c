/* plan.c - see plan.h. */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <lauxlib.h>

#include "tools/plan.h"
#include "tools/script.h"

/* ==== The flags of luatrain plan ============================================================== */

static const char plan_help[] =
    "usage: luatrain [options] plan [-n RANKS] [--link GBIT] script.lua [script options]\n"
    "\n"
    "Profiles the net of a script, and predicts the time of a step for each way to divide it into\n"
    "pipeline stages, the fastest first. With --out DIR, writes the plans to DIR/plans.json.\n"
    "\n"
    "  -n RANKS     number of ranks to plan for (default: one per CPU, or the ranks of mpirun)\n"
    "  --link GBIT  rate of the link between ranks, with a latency of 50 us; without it, the link\n"
    "               is measured\n"
    "  --help       print this help\n";

enum { MOST_RANKS = 1024 };

/* Reads a flag other than --help, and its value. */
static lt_status read_flag(settings *s, const char *flag, const char *value)
{
    bool is_ranks = strcmp(flag, "-n") == 0;
    if (!is_ranks && strcmp(flag, "--link") != 0)
        return lt_fail(LT_EUSAGE, "plan: unknown option '%s'; see luatrain plan --help", flag);
    if (!value)
        return lt_fail(LT_EUSAGE, "plan: %s requires a value", flag);
    if (is_ranks)
        return parse_int("plan: -n", value, MOST_RANKS, &s->plan_ranks);
    char *end;
    s->plan_link = strtod(value, &end);
    if (*end == '\0' && s->plan_link > 0 && isfinite(s->plan_link))
        return LT_OK;
    return lt_fail(LT_EUSAGE, "plan: --link must be a rate in Gbit/s, but is '%s'", value);
}

lt_status read_plan(settings *s, bool *is_help)
{
    int i = 1;
    for (; i < s->argc && s->argv[i][0] == '-'; i += 2) {
        *is_help = strcmp(s->argv[i], "--help") == 0;
        if (*is_help) {
            fputs(plan_help, stdout);
            return LT_OK;
        }
        LT_TRY(read_flag(s, s->argv[i], s->argv[i + 1]));
    }
    if (i >= s->argc)
        return lt_fail(LT_EUSAGE, "plan: the script is missing: luatrain plan -n 2 train.lua");
    int cpus = lt_cpu_count();
    if (s->ranks == 0 && !lt_mpi_is_launched())
        s->ranks = s->plan_ranks > 0 && s->plan_ranks < cpus ? s->plan_ranks : cpus;
    s->argv += i;
    s->argc -= i;
    s->n_options += i;
    s->plans = true;
    s->parallel = IN_PIPELINE;
    return LT_OK;
}

/* ==== Profiles ================================================================================ */

/* Timed passes for each size of a micro-batch; least images of a micro-batch with batch norm. */
enum { PASSES = 2, NORM_IMAGES = 8, NUMBERS = 3 };

/* Returns a field of the table on top. */
static double number(lua_State *L, const char *key, double otherwise)
{
    lua_getfield(L, -1, key);
    double value = lua_isnil(L, -1) ? otherwise : lua_tonumber(L, -1);
    lua_pop(L, 1);
    return value;
}

static int choice(lua_State *L, const char *key) { return (int)number(L, key, LT_PIPE_ANY); }

/* Reads the options; the planner chooses those that are not given. */
static void read_job(planner *p, lua_State *L)
{
    p->job.stages = choice(L, "pipe");
    p->job.replicas = choice(L, "data");
    p->job.micro = choice(L, "micro");
    p->job.lag = choice(L, "lag");
    p->job.kind = LT_PIPE_ANY;
    p->job.memory = number(L, "memory", 0);
    p->job.delay = number(L, "delay", 0) > 0;
    p->job.batch = (int64_t)number(L, "batch", 0);
    lua_getfield(L, -1, "schedule");
    for (int i = 0; i < LT_SCHEDULE_KINDS && !lua_isnil(L, -1); i++)
        if (strcmp(lua_tostring(L, -1), lt_schedule_name((lt_schedule_kind)i)) == 0)
            p->job.kind = i;
    lua_getfield(L, -2, "given");
    p->given = lua_toboolean(L, -1);
    lua_pop(L, 2);
}

/* Reads the cuts: the names and the first units of the stages after stage 0. */
static lt_status read_cuts(planner *p, lua_State *L)
{
    lua_getfield(L, -1, "cut");
    lua_getfield(L, -2, "first");
    p->n_cuts = (int)lua_rawlen(L, -2);
    if (p->n_cuts >= LT_MAX_STAGES)
        return lt_fail(LT_EUSAGE, "a pipeline has 1 to %d stages, not %d", LT_MAX_STAGES,
                       p->n_cuts + 1);
    for (int i = 1; i <= p->n_cuts; i++) {
        lua_rawgeti(L, -2, i);
        lua_rawgeti(L, -2, i);
        p->stage[i].first = (int)lua_tointeger(L, -1) - 1;
        if (!(p->cuts[i] = strdup(lua_tostring(L, -2))))
            return lt_fail(LT_ENOMEM, "out of memory for a profile");
        lua_pop(L, 2);
    }
    lua_pop(L, 2);
    return LT_OK;
}

/* Reads the result of a profile of `passes` passes, and takes its net or adds its times. */
static lt_status read_profile(planner *p, lua_State *L, lt_profile *profile, int passes)
{
    p->exit = (int)number(L, "exit", -1);
    lua_getfield(L, -1, "text");
    const char *text = lua_tostring(L, -1);
    if (text) { /* else a warning of the first profile stays */
        free(p->text);
        if (!(p->text = strdup(text)))
            return lt_fail(LT_ENOMEM, "out of memory for a profile");
    }
    lua_pop(L, 1);
    p->slot_bytes = number(L, "slot_bytes", -1);
    p->optimizer = number(L, "optimizer", 0);
    if (p->exit >= 0)
        return LT_OK;
    double rows = number(L, "rows", 0);
    if (passes > 0 && lt_profile_add_times(profile, rows, &p->net) != LT_OK)
        return lt_fail(LT_EUSAGE, "--parallel pipe=P: the script makes another net each time; use "
                                  "cut=NAME");
    if (passes > 0)
        return LT_OK;
    read_job(p, L);
    LT_TRY(read_cuts(p, L));
    return lt_profile_take_net(profile, rows, &p->net);
}

/* Runs the script in L until its profile is complete. The result of profile.lua is then on top. */
static lt_status run_profile(const planner *p, lua_State *L, int passes, int64_t rows)
{
    const settings *s = p->s;
    const long long numbers[NUMBERS] = {passes, rows, !s->plans};
    char **words = calloc((size_t)s->argc + NUMBERS + 1, sizeof *words), text[NUMBERS][24];
    if (!words)
        return lt_fail(LT_ENOMEM, "out of memory for a profile");
    for (int i = 0; i < NUMBERS; i++)
        snprintf(words[i] = text[i], sizeof text[i], "%lld", numbers[i]);
    memcpy(words + NUMBERS, s->argv, (size_t)s->argc * sizeof *words);
    lt_status status = pass_command_line(L, s);
    if (status == LT_OK)
        status = run_attached(L, "profile", s->argc + NUMBERS, words);
    free(words);
    if (status == LT_OK && lua_gettop(L) == 0) /* it has shown the help of bench */
        status = lt_fail(LT_EDONE, "%s", "");
    if (status == LT_ESCRIPT || status == LT_EINVAL || status == LT_ENUMERIC)
        lt_fail(status, "%s (while the script was profiled for --parallel pipe=P)", lt_errmsg());
    return status;
}

/* Profiles the script in a context and a Lua state of its own: each run of it needs new ones. */
static lt_status profile_script(planner *p, int passes, int64_t rows)
{
    lt_ctx *ctx = lt_open(p->config);
    if (!ctx)
        return lt_errcode();
    lt_set_autocast(ctx, p->s->amp);
    lua_State *L = lt_lua_new(ctx);
    lt_profile *profile = L ? lt_profile_new(ctx, passes) : NULL;
    lt_status status = profile ? LT_OK : lt_errcode();
    if (profile) {
        int n = p->job.ranks;
        lt_lua_join_profile(L, profile, p->group, lt_group_rank(p->group) % n, n);
        status = run_profile(p, L, passes, rows);
    }
    if (status == LT_OK)
        status = read_profile(p, L, profile, passes);
    lt_lua_close(L);
    lt_profile_free(profile);
    lt_ctx_free(ctx);
    return status;
}

/* The script called os.exit() in a profile. With code 0 that is an error, because the training that
 * the script does before its os.exit() has not been done. */
static lt_status leave(const planner *p, const char *why)
{
    lt_status status = p->exit > 0 ? (lt_status)(LT_EXIT + p->exit) : LT_EUSAGE;
    return lt_fail(status, "%s in the profile for --parallel pipe=P, %s", p->text, why);
}

/* Reads the options, and finds the units of the net. If the script leaves before its first backward
 * pass on all ranks, p->exit is its code. */
static lt_status profile_net(planner *p)
{
    LT_TRY(profile_script(p, 0, 0));
    double exits = p->exit >= 0;
    const lt_sum sum = {"the profile", &exits, 1, LT_F64, LT_F64, 1};
    LT_TRY(lt_group_allreduce(p->group, &sum));
    if (p->exit < 0 || exits >= lt_group_size(p->group))
        return LT_OK;
    char why[48];
    snprintf(why, sizeof why, "but only on rank %d", lt_group_rank(p->group));
    return leave(p, why);
}

/* Divides the time and the memory of the optimizer among the units. */
static void share_optimizer(planner *p)
{
    double all = 0;
    for (int i = 0; i < p->net.n_units; i++)
        all += p->net.units[i].grad_bytes;
    for (int i = 0; i < p->net.n_units; i++) {
        lt_pipe_unit *u = &p->net.units[i];
        double share = all > 0 ? u->grad_bytes / all : 0;
        u->update = p->optimizer * share;
        u->state_bytes += u->grad_bytes + (p->slot_bytes >= 0 ? p->slot_bytes : all) * share;
    }
}

/* Times micro-batches of the least size, of twice and of four times it, up to the batch. */
static lt_status time_net(planner *p)
{
    int64_t min = p->job.least_micro < p->job.batch ? p->job.least_micro : p->job.batch;
    for (int k = 1; k <= 4; k *= 2) {
        if (k * min > p->job.batch)
            break;
        LT_TRY(profile_script(p, PASSES, k * min));
        if (p->exit >= 0)
            return leave(p, "which takes several steps; use cut=NAME to train without it");
    }
    share_optimizer(p);
    return LT_OK;
}

/* ==== The link ================================================================================ */

enum { SMALL = 1, LARGE = 1 << 20, SMALL_SUMS = 9, LARGE_SUMS = 7, MESSAGE_BYTES = 4 << 20 };

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Measures messages and sums between the ranks. A rank that begins a small sum late measures too
 * short a time, so the latency is from the median. */
static lt_status measure_links(planner *p)
{
    int ranks = lt_group_size(p->group);
    lt_dtype wire = p->s->reducer.wire;
    double small, large, small_sums[SMALL_SUMS], large_sums[LARGE_SUMS];
    p->job.link = p->job.exchange = (lt_pipe_link){1e-6, 1e9};
    if (ranks == 1)
        return LT_OK;
    LT_TRY(lt_group_time_message(p->group, 0, &small));
    LT_TRY(lt_group_time_message(p->group, MESSAGE_BYTES, &large));
    p->job.link = (lt_pipe_link){small, MESSAGE_BYTES / fmax(large - small, 1e-9)};
    LT_TRY(lt_group_time_allreduce(p->group, SMALL, wire, false, small_sums, SMALL_SUMS));
    LT_TRY(lt_group_time_allreduce(p->group, LARGE, wire, false, large_sums, LARGE_SUMS));
    qsort(small_sums, SMALL_SUMS, sizeof *small_sums, compare);
    qsort(large_sums, LARGE_SUMS, sizeof *large_sums, compare);
    small = small_sums[SMALL_SUMS / 2];
    large = large_sums[0];
    double bytes = 2. * (ranks - 1) / ranks * LARGE * (double)lt_dtype_bytes(wire);
    p->job.exchange = (lt_pipe_link){small / (2 * ranks - 1), bytes / fmax(large - small, 1e-9)};
    return LT_OK;
}

/* ==== Plans =================================================================================== */

/* Sets what the planner needs of the job and the net. */
static lt_status prepare(planner *p)
{
    lt_pipe_job *j = &p->job;
    if (j->batch == 0)
        return lt_fail(LT_EUSAGE, "--parallel pipe=P: the planner cannot find the batch size; name "
                                  "the cuts with cut=NAME");
    int replicas = j->replicas != LT_PIPE_ANY ? j->replicas : 1;
    int64_t images = j->batch > replicas ? j->batch / replicas : 1; /* images of a replica */
    j->wire_bytes = (int)lt_dtype_bytes(p->s->reducer.wire);
    j->least_micro = !p->net.has_batch_norm ? 1 : images < NORM_IMAGES ? (int)images : NORM_IMAGES;
    j->micro = j->micro > images ? (int)images : j->micro;
    if (p->s->plan_link > 0)
        j->link = j->exchange = (lt_pipe_link){50e-6, p->s->plan_link * 1e9 / 8};
    else
        LT_TRY(measure_links(p));
    LT_TRY(time_net(p));
    for (int i = 0; i < p->net.n_units && p->n_cuts > 0; i++)
        p->net.units[i].may_begin_stage = false;
    for (int i = 1; i <= p->n_cuts; i++)
        p->net.units[p->stage[i].first].may_begin_stage = true;
    return LT_OK;
}

/* Finds the plans on rank 0. */
static lt_status find_plans(planner *p)
{
    static const char prefix[] = "planning: ";
    if (lt_group_rank(p->group) > 0)
        return LT_OK;
    lt_status status = lt_pipe_plans_find(&p->net, &p->job, &p->plans);
    if (status != LT_EINVAL)
        return status;
    const char *why = lt_errmsg();
    bool has_prefix = strncmp(why, prefix, sizeof prefix - 1) == 0;
    return lt_fail(LT_EUSAGE, "--parallel: %s", why + (has_prefix ? sizeof prefix - 1 : 0));
}

static int show(lua_State *L)
{
    const planner *p = lua_touserdata(L, 1);
    lua_getglobal(L, "require");
    lua_pushstring(L, "luatrain.commands.plan");
    lua_call(L, 1, 1);
    lt_lua_push_plans(L, &p->net, &p->job, &p->plans);
    lua_pushinteger(L, lt_group_size(p->group));
    lua_call(L, 2, 0);
    return 0;
}

/* Gives all ranks the plan of rank 0, which alone has read the plan of a run that resumes. */
static lt_status share_plan(planner *p)
{
    static const char what[] = "the plan of the pipeline";
    LT_TRY(lt_group_broadcast(p->group, what, &p->plan, sizeof p->plan, 0));
    LT_TRY(lt_group_broadcast(p->group, what, p->stage, sizeof p->stage, 0));
    p->plan.stage = p->stage;
    p->stage[0].name = NULL; /* a net without parameters has no units */
    for (int i = 1; i < p->plan.stages; i++)
        p->stage[i].name = p->given ? p->cuts[i] : p->net.units[p->stage[i].first].name;
    return LT_OK;
}

/* Finds the plan of a training run. */
static lt_status choose_plan(planner *p)
{
    const lt_pipe_job *j = &p->job;
    if (p->given) {
        p->plan = (lt_pipe_plan){.stages = j->stages,
                                 .replicas = j->replicas,
                                 .micro = j->micro,
                                 .lag = j->lag,
                                 .kind = (lt_schedule_kind)j->kind};
    } else {
        LT_TRY(prepare(p));
        LT_TRY(find_plans(p));
        if (p->plans.n > 0) {
            p->plan = p->plans.plan[0];
            memcpy(p->stage, p->plan.stage, (size_t)p->plan.stages * sizeof *p->stage);
        }
    }
    LT_TRY(share_plan(p));
    p->pipeline.plan = &p->plan;
    p->pipeline.text = p->text;
    p->pipeline.only_replicas = p->plan.stages == 1 && p->plan.micro == 1 &&
                                j->stages == LT_PIPE_ANY;
    return LT_OK;
}

lt_status plan_pipeline(planner *p, const settings *s, const lt_config *config, lt_group *group,
                        lua_State *L)
{
    int ranks = lt_group_size(group);
    *p = (planner){
        .pipeline = {.net = &p->net, .job = &p->job}, .s = s, .config = config, .group = group};
    p->job.ranks = s->plan_ranks > 0 ? s->plan_ranks : ranks;
    if (ranks == 1 && p->job.ranks > 1 && s->plan_link == 0)
        return lt_fail(LT_EUSAGE, "plan: one rank cannot measure a link; start more with --ranks, "
                                  "or give --link GBIT");
    LT_TRY(profile_net(p));
    if (p->exit >= 0) { /* a run that begins nevertheless fails with this error */
        p->pipeline.status = leave(p, "before its first backward pass, so there is no plan");
        free(p->text);
        p->pipeline.text = p->text = strdup(lt_errmsg());
        return p->text ? LT_OK : lt_fail(LT_ENOMEM, "out of memory for a profile");
    }
    if (!s->plans)
        return choose_plan(p);
    LT_TRY(prepare(p));
    LT_TRY(find_plans(p));
    p->is_shown = true;
    if (lt_group_rank(group) > 0)
        return LT_OK;
    lua_pushcfunction(L, show);
    lua_pushlightuserdata(L, p);
    return lt_lua_call(L, 1, 0);
}

void plan_free(planner *p)
{
    lt_pipe_plans_free(&p->plans);
    lt_pipe_net_free(&p->net);
    for (int i = 1; i <= p->n_cuts && i < LT_MAX_STAGES; i++)
        free(p->cuts[i]);
    free(p->text);
}
