/* pipeline.c - training in a pipeline, for the embedded Lua files. */
#include <stdlib.h>
#include <string.h>

#include "autograd/stages.h"
#include "core/tensor.h"
#include "lua/bind/bind.h"

/* ==== The stage of each parameter ============================================================= */

struct lt_lua_plan {
    const lt_lua_pipeline *of; /* borrowed */
    int next; /* index of the parameter after the last placed one, in the net's list */
    struct {
        uint32_t count;
        char at[64];         /* the script's line of the last write */
    } writes[LT_MAX_STAGES]; /* writes of this rank's script to tensors of each stage */
};

/* The stage of entry i of the net's parameters. Stage 0 gets the unused ones. */
static int stage_at(const struct lt_lua_plan *p, int i)
{
    const lt_pipe_plan *plan = p->of->plan;
    int stage = 0, unit = p->of->net->params[i].unit;
    while (stage + 1 < plan->stages && unit >= plan->stage[stage + 1].first)
        stage++;
    return stage;
}

/* A script usually places the same parameters in the same order as in the profile. A parameter
 * that the profile does not have goes to the stage of the one before it. */
static int stage_of(void *ud, const char *name, const lt_tensor *x)
{
    struct lt_lua_plan *p = ud;
    const lt_pipe_net *net = p->of->net;
    (void)x;
    for (int i = 0; i < net->n_params; i++) {
        int at = (p->next + i) % net->n_params;
        if (strcmp(net->params[at].name, name) != 0)
            continue;
        p->next = at + 1;
        return stage_at(p, at);
    }
    return p->next > 0 ? stage_at(p, p->next - 1) : 0;
}

/* ==== Functions =============================================================================== */

/* schedules(): returns the list of names of schedules. */
static int schedules(lua_State *L)
{
    lua_createtable(L, LT_SCHEDULE_KINDS, 0);
    for (int i = 0; i < LT_SCHEDULE_KINDS; i++) {
        lua_pushstring(L, lt_schedule_name((lt_schedule_kind)i));
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

/* The lt_allreduce_fn of a pipeline with several micro-batches.
 * NOLINTNEXTLINE(readability-non-const-parameter) */
static lt_status refuse_sum(void *ud, double *numbers, int64_t n, bool backward)
{
    const lt_lua *s = ud;
    (void)numbers, (void)n, (void)backward;
    return lt_fail(LT_EUSAGE,
                   "sync_batch_norm requires the whole batch at once, but the pipeline computes it "
                   "in %d micro-batches; use batch_norm, or micro=1",
                   s->micro);
}

/* Makes the reducer of the replicas of this stage. */
static lt_status open_reducer(lt_lua *s)
{
    lt_group *replicas = lt_pipeline_group(s->pipeline);
    s->reducer_config.delay = s->joined_pipeline->job->delay;
    return replicas ? lt__use_reducer(s, replicas) : LT_OK;
}

/* Makes the state a stage of the pipeline that it has joined. */
static lt_status open_pipeline(lt_lua *s)
{
    const lt_pipe_plan *plan = s->joined_pipeline->plan;
    if (!(s->plan = calloc(1, sizeof *s->plan)))
        return lt_fail(LT_ENOMEM, "out of memory for a pipeline");
    s->plan->of = s->joined_pipeline;
    const lt_pipeline_config config = {.stages = plan->stages,
                                       .kind = plan->kind,
                                       .lag = plan->lag,
                                       .stage_of = stage_of,
                                       .ud = s->plan};
    s->micro = plan->micro;
    if (!(s->pipeline = lt_pipeline_new(s->ctx, s->group, &config)))
        return lt_errcode();
    LT_TRY(open_reducer(s));
    if (s->micro > 1)
        lt_set_allreduce(s->ctx, refuse_sum, s);
    return LT_OK;
}

lt_status lt_lua_join_pipeline(lua_State *L, lt_group *group, const lt_reducer_config *config,
                               const lt_lua_pipeline *pipeline)
{
    lt_lua *s = lt__lua_of(L);
    if (config)
        s->reducer_config = *config;
    s->group = group;
    s->joined_pipeline = pipeline;
    LT_TRY(lt__begin_rank(L));
    if (!pipeline->plan)
        return LT_OK;
    return pipeline->only_replicas ? lt__use_reducer(s, group) : open_pipeline(s);
}

void lt__close_pipeline(lt_lua *s)
{
    lt_pipeline_free(s->pipeline);
    free(s->plan);
    s->pipeline = NULL;
    s->plan = NULL;
}

/* joins_pipeline(): whether the ranks train in a pipeline. */
static int joins_pipeline(lua_State *L)
{
    return lt__return_boolean(L, lt__lua(L)->joined_pipeline != NULL);
}

/* pipeline(): returns this rank's stage, from 0, the number of stages, its replica, from 0, and the
 * number of replicas. Returns nothing if there is no pipeline. */
static int pipeline(lua_State *L)
{
    const lt_pipeline *p = lt__lua(L)->pipeline;
    if (!p)
        return 0;
    return lt__return_integers(L, lt_pipeline_stage(p), lt_pipeline_stages(p),
                               lt_pipeline_replica(p), lt_pipeline_replicas(p));
}

/* owns(tensor): whether this rank owns the tensor for a sum over all ranks. In a pipeline, one
 * stage of each replica does. */
static int owns(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    return lt__return_boolean(L,
                              !s->pipeline || lt_pipeline_owns(s->pipeline, lt__self(L, "owns")));
}

/* own_item(tensor): returns the only element of a tensor that this rank has. Unlike item(), it does
 * not send it to the other stages. */
static int own_item(lua_State *L)
{
    double value;
    lt__check(L, lt__lua(L), lt_item(lt__self(L, "item"), 0, &value));
    lt__push_number(L, value);
    return 1;
}

/* is_meta(tensor): whether only another stage of the pipeline has its values. */
static int is_meta(lua_State *L)
{
    return lt__return_boolean(L, lt_is_meta(lt__self(L, "is_meta")));
}

/* pipeline_times(): returns the fields of lt_pipeline_times: seconds, since the last call, of
 * backward passes, of their second halves, of waiting for messages, and in lt_pipeline_drain(). */
static int pipeline_times(lua_State *L)
{
    lt_pipeline_times times = lt_pipeline_take_times(lt__lua(L)->pipeline);
    lua_pushnumber(L, times.backward);
    lua_pushnumber(L, times.weights);
    lua_pushnumber(L, times.waited);
    lua_pushnumber(L, times.drained);
    return 4;
}

lt_tensor *lt__here(lua_State *L, lt_lua *s, lt_tensor *x)
{
    if (!lt_has_stages(s->ctx) || lt_stage_of(x) == LT_NO_STAGE)
        return x;
    if (s->on_root)
        lt__refuse(L, s,
                   "in a pipeline, reading a tensor of the net requires all ranks, but "
                   "lt.on_root runs on rank 0 only");
    lt__group_set_location(L);
    lt_tensor **box = lt__push_box(L, s);
    *box = lt_fetch(x);
    if (!*box)
        lt__raise(L, s);
    return *box;
}

bool lt__begin_write(lua_State *L, lt_lua *s, const lt_tensor *x)
{
    int stage = lt_stage_of(x);
    if (!s->pipeline || stage == LT_NO_STAGE)
        return !lt_is_meta(x); /* false in a profile */
    if (s->on_root)
        lt__refuse(L, s,
                   "in a pipeline, writing to a tensor of the net requires all ranks, but "
                   "lt.on_root runs on rank 0 only");
    s->plan->writes[stage].count++;
    lt__where(s, s->plan->writes[stage].at, sizeof s->plan->writes[stage].at);
    return !lt_is_meta(x);
}

/* writes(stage): returns the number of writes of this rank's script to tensors of a stage, from 0,
 * and the place of the last one, "train.lua:7: ". */
static int writes(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    lua_Integer stage = luaL_checkinteger(L, 1);
    luaL_argcheck(L, s->plan && stage >= 0 && stage < LT_MAX_STAGES, 1, "no such stage");
    lua_pushinteger(L, s->plan->writes[stage].count);
    lua_pushstring(L, s->plan->writes[stage].at);
    return 2;
}

static const luaL_Reg functions[] = {LT_FN(schedules), LT_FN(joins_pipeline), LT_FN(pipeline),
                                     LT_FN(owns),      LT_FN(own_item),       LT_FN(is_meta),
                                     LT_FN(writes),    LT_FN(pipeline_times), {NULL, NULL}};

void lt__open_pipeline(lua_State *L) { lt__register(L, functions); }
