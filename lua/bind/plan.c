/* plan.c - profiles and plans of pipelines, for the embedded Lua files, in which units count from
 * 1. */
#include "lua/bind/bind.h"
#include "lua/bind/field.h"

/* ==== Profiles ================================================================================ */

/* profile(): returns the units of the profile if it is complete, else nil: a list of {name =,
 * may_begin_stage =}; and a list of {name =, unit =} with the parameters and buffers. A parameter
 * that is not used has unit 0. */
static int profile(lua_State *L)
{
    const lt_profile *p = lt__lua(L)->profile;
    const lt_pipe_net *net = lt_profile_net(p);
    if (!lt_profile_is_complete(p))
        return 0;
    lua_createtable(L, net->n_units, 0);
    for (int i = 0; i < net->n_units; i++) {
        lua_createtable(L, 0, 2);
        lt__set_string(L, "name", net->units[i].name);
        lt__set_boolean(L, "may_begin_stage", net->units[i].may_begin_stage);
        lua_rawseti(L, -2, i + 1);
    }
    lua_createtable(L, net->n_params, 0);
    for (int i = 0; i < net->n_params; i++) {
        lua_createtable(L, 0, 2);
        lt__set_string(L, "name", net->params[i].name);
        lt__set_integer(L, "unit", net->params[i].unit + 1);
        lua_rawseti(L, -2, i + 1);
    }
    return 2;
}

/* profile_unit(tensor): returns the unit of a parameter or buffer; 0 if it is not used. */
static int profile_unit(lua_State *L)
{
    return lt__return_integer(L,
                              lt_profile_unit_of(lt__lua(L)->profile, lt__self(L, "profile")) + 1);
}

/* profile_rename(unit, name): replaces the name of a unit. */
static int profile_rename(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    int unit = (int)luaL_checkinteger(L, 1) - 1;
    return lt__done(L, lt_profile_rename(s->profile, unit, luaL_checkstring(L, 2)));
}

void lt_lua_join_profile(lua_State *L, lt_profile *profile, lt_group *group, int rank, int ranks)
{
    lt_lua *s = lt__lua_of(L);
    s->profile = profile;
    s->job_group = group;
    s->profile_rank = rank;
    s->profile_ranks = ranks;
}

/* ==== A plan ================================================================================== */

static void push_stage(lua_State *L, const lt_pipe_plan_stage *s, bool is_predicted)
{
    lua_createtable(L, 0, 9);
    lt__set_integer(L, "first", s->first + 1);
    if (!is_predicted)
        return;
    lt__set_number(L, "busy", s->busy);
    lt__set_number(L, "idle", s->idle);
    lt__set_number(L, "exchange", s->exchange);
    lt__set_number(L, "exposed", s->exposed);
    lt__set_number(L, "peak_bytes", s->peak_bytes);
    lt__set_number(L, "sent_bytes", s->sent_bytes);
    lt__set_number(L, "exchanged_bytes", s->exchanged_bytes);
    lt__set_integer(L, "in_memory", s->in_memory);
}

/* Pushes {stages =, replicas =, micro =, lag =, schedule =, delay = 0 or 1, cuts = list of the
 * names of the stages after the first one, stage = list of stages}, for a plan that was predicted
 * also seconds and images_per_s. */
static void push_plan(lua_State *L, const lt_pipe_plan *p, const lt_pipe_job *job)
{
    bool is_predicted = p->seconds > 0;
    lua_createtable(L, 0, 10);
    lt__set_integer(L, "stages", p->stages);
    lt__set_integer(L, "replicas", p->replicas);
    lt__set_integer(L, "micro", p->micro);
    lt__set_integer(L, "lag", p->lag);
    lt__set_string(L, "schedule", lt_schedule_name(p->kind));
    lt__set_integer(L, "delay", job->delay);
    if (is_predicted) {
        lt__set_number(L, "seconds", p->seconds);
        lt__set_number(L, "images_per_s", (double)job->batch / p->seconds);
    }
    lua_createtable(L, p->stages, 0);
    for (int i = 0; i < p->stages; i++) {
        push_stage(L, &p->stage[i], is_predicted);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "stage");
    lua_createtable(L, p->stages, 0);
    for (int i = 1; i < p->stages; i++) {
        lua_pushstring(L, p->stage[i].name);
        lua_rawseti(L, -2, i);
    }
    lua_setfield(L, -2, "cuts");
}

/* pipeline_plan(): returns the plan by which the ranks train, and a warning or nil. Raises an
 * error without a plan. */
static int pipeline_plan(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    const lt_lua_pipeline *p = s->joined_pipeline;
    if (!p->plan)
        lt__error(L, s, p->status, "%s", p->text);
    push_plan(L, p->plan, p->job);
    lua_pushstring(L, p->text);
    return 2;
}

/* ==== All plans =============================================================================== */

static void set_numbers(lua_State *L, const char *key, const double *list, int n)
{
    lt__push_number_list(L, list, n);
    lua_setfield(L, -2, key);
}

static void push_unit(lua_State *L, const lt_pipe_unit *u, int n_sizes)
{
    lua_createtable(L, 0, 11);
    lt__set_string(L, "name", u->name);
    lt__set_boolean(L, "may_begin_stage", u->may_begin_stage);
    set_numbers(L, "forward", u->forward, n_sizes);
    set_numbers(L, "inputs", u->inputs, n_sizes);
    set_numbers(L, "weights", u->weights, n_sizes);
    lt__set_number(L, "update", u->update);
    lt__set_integer(L, "grad_bytes", (lua_Integer)u->grad_bytes);
    lt__set_number(L, "state_bytes", u->state_bytes);
    lt__set_number(L, "saved_bytes", u->saved_bytes);
    lt__set_number(L, "back_bytes", u->back_bytes);
    lt__set_integer(L, "work_bytes", (lua_Integer)u->work_bytes);
}

static void push_value(lua_State *L, const lt_pipe_value *v)
{
    lua_createtable(L, 0, 4);
    lt__set_integer(L, "unit", v->unit + 1);
    lt__set_number(L, "bytes", v->bytes);
    lt__set_boolean(L, "tracked", v->requires_grad);
    lua_createtable(L, v->n, 0);
    for (int i = 0; i < v->n; i++) {
        lua_pushinteger(L, v->uses[i] + 1);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "uses");
}

static void push_net(lua_State *L, const lt_pipe_net *net)
{
    lua_createtable(L, 0, 4);
    lt__set_integer(L, "n_sizes", net->n_sizes);
    lua_createtable(L, net->n_sizes, 0);
    for (int i = 0; i < net->n_sizes; i++) {
        lua_pushinteger(L, (lua_Integer)net->sizes[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "sizes");
    lua_createtable(L, net->n_units, 0);
    for (int i = 0; i < net->n_units; i++) {
        push_unit(L, &net->units[i], net->n_sizes);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "units");
    lua_createtable(L, net->n_values, 0);
    for (int i = 0; i < net->n_values; i++) {
        push_value(L, &net->values[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "values");
}

static void set_link(lua_State *L, const char *key, const lt_pipe_link *link)
{
    lua_createtable(L, 0, 2);
    lt__set_number(L, "latency", link->latency);
    lt__set_number(L, "bytes_per_s", link->bytes_per_s);
    lua_setfield(L, -2, key);
}

static void set_choice(lua_State *L, const char *key, int choice)
{
    if (choice != LT_PIPE_ANY)
        lt__set_integer(L, key, choice);
}

static void push_job(lua_State *L, const lt_pipe_job *job)
{
    lua_createtable(L, 0, 13);
    lt__set_integer(L, "ranks", job->ranks);
    lt__set_integer(L, "batch", job->batch);
    set_link(L, "link", &job->link);
    set_link(L, "exchange", &job->exchange);
    lt__set_integer(L, "wire_bytes", job->wire_bytes);
    lt__set_integer(L, "delay", job->delay);
    lt__set_integer(L, "least_micro", job->least_micro);
    set_choice(L, "stages", job->stages);
    set_choice(L, "replicas", job->replicas);
    set_choice(L, "micro", job->micro);
    set_choice(L, "lag", job->lag);
    if (job->kind != LT_PIPE_ANY)
        lt__set_string(L, "schedule", lt_schedule_name((lt_schedule_kind)job->kind));
    if (job->memory > 0)
        lt__set_number(L, "memory", job->memory);
}

void lt_lua_push_plans(lua_State *L, const lt_pipe_net *net, const lt_pipe_job *job,
                       const lt_pipe_plans *plans)
{
    luaL_checkstack(L, 8, NULL);
    lua_createtable(L, 0, 3);
    push_net(L, net);
    lua_setfield(L, -2, "net");
    push_job(L, job);
    lua_setfield(L, -2, "job");
    lua_createtable(L, plans->n, 0);
    for (int i = 0; i < plans->n; i++) {
        push_plan(L, &plans->plan[i], job);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "plans");
}

static const luaL_Reg functions[] = {
    LT_FN(profile), LT_FN(profile_unit), LT_FN(profile_rename), LT_FN(pipeline_plan), {NULL, NULL}};

void lt__open_plan(lua_State *L) { lt__register(L, functions); }
