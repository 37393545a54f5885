/* cudnn_engine.c - chooses the cuDNN engine and knobs for a task.
 *
 * cuDNN's heuristics propose engines, best first: mode A, then mode B, then the fallback. We use
 * the first engine that the configuration allows, that can be built, and whose workspace is within
 * the limit. Engines whose sums have no fixed order are used only if there is no other, and never
 * in a deterministic run.
 */
#include <stdio.h>
#include <stdlib.h>

#include "ops/cuda/cudnn_plan.h"

enum { MAX_KNOBS = 64, MAX_CONFIGS = 60, MAX_NOTES = 16 };
/* The search has its own descriptor list. A plan's list contains graph, engine, knobs and plan. */
_Static_assert((int)MAX_CONFIGS + 1 < (int)LT_MAX_MADE, "a list is long enough");
_Static_assert((int)MAX_KNOBS + 32 < (int)LT_MAX_MADE, "a list is long enough");

/* Whether the configuration allows an engine with this numerical note. in_order: its sums must have
 * a fixed order. */
static bool allowed(const lt_cudnn *d, const lt_cudnn_task *task, cudnnBackendNumericalNote_t note,
                    bool in_order)
{
    const bool f32 = task->dtype == LT_F32, strict = d->config.deterministic;
    switch (note) {
    case CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC: return !in_order;
    case CUDNN_NUMERICAL_NOTE_TENSOR_CORE: return !f32 || d->config.tf32;
    case CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS: return !f32 && !strict;
    case CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION: return false; /* sums must be in f32 */
    case CUDNN_NUMERICAL_NOTE_FFT:
    case CUDNN_NUMERICAL_NOTE_WINOGRAD:
    case CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4:
    case CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6:
    case CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13: return !strict;
    default: return true;
    }
}

static bool config_allowed(lt_cudnn *d, lt_cudnn_plan *p, lt_desc config, bool in_order)
{
    int before = p->made.n;
    bool yes = true;
    cudnnBackendNumericalNote_t notes[MAX_NOTES];
    lt_desc engine = lt__desc_new(d, &p->made, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    lt__desc_get(d, config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &engine);
    int64_t n = lt__desc_get(d, engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                             MAX_NOTES, notes);
    for (int64_t i = 0; i < n && i < MAX_NOTES; i++)
        yes = yes && allowed(d, &p->task, notes[i], in_order);
    yes = yes && d->status == CUDNN_STATUS_SUCCESS;
    lt__desc_truncate(d, &p->made, before);
    return yes;
}

bool lt__cudnn_is_unsupported(cudnnStatus_t status)
{
    switch (status) { /* these are about the installation, not about the task */
    case CUDNN_STATUS_NOT_SUPPORTED_INCOMPATIBLE_CUDA_DRIVER:
    case CUDNN_STATUS_NOT_SUPPORTED_INCOMPATIBLE_CUDART:
    case CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING:
    case CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE: return false;
    default:
        return CUDNN_STATUS_CATEGORY(status) == CUDNN_STATUS_NOT_SUPPORTED ||
               CUDNN_STATUS_CATEGORY(status) == CUDNN_STATUS_BAD_PARAM;
    }
}

/* How much a failure explains. */
static int weight(cudnnStatus_t status)
{
    return status == CUDNN_STATUS_SUCCESS     ? 0
           : lt__cudnn_is_unsupported(status) ? 1
           : lt__cudnn_is_memory(status)      ? 3
                                              : 2;
}

void lt__cudnn_forgive(lt_cudnn *d)
{
    if (weight(d->status) > weight(d->worst)) {
        d->worst = d->status;
        d->t.cudnnGetLastErrorString(d->why, sizeof d->why);
    }
    d->status = CUDNN_STATUS_SUCCESS;
}

/* Builds p->plan from the configuration. Returns false if that fails or if the workspace would
 * exceed the limit. */
static bool build(lt_cudnn *d, lt_cudnn_plan *p, lt_desc config)
{
    int64_t bytes = 0;
    lt_desc built = lt__desc_new(d, &p->made, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    lt__desc_link(d, built, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
    if (d->handle)
        lt__desc_set(d, built, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &d->handle);
    else
        lt__desc_link(d, built, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, d->device);
    lt__desc_finalize(d, built);
    lt__desc_get(d, built, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &bytes);
    if (d->status != CUDNN_STATUS_SUCCESS || bytes > (int64_t)d->config.workspace)
        return false;
    p->plan = built;
    p->bytes = bytes;
    return true;
}

/* Writes p's engine and knobs to p->choice. */
static void note_choice(lt_cudnn *d, lt_cudnn_plan *p, lt_desc config)
{
    int before = p->made.n;
    int64_t number = 0, value = 0;
    cudnnBackendKnobType_t type;
    lt_desc knobs[MAX_KNOBS], engine = lt__desc_new(d, &p->made, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    lt__desc_get(d, config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &engine);
    lt__desc_get(d, engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &number);
    for (int i = 0; i < MAX_KNOBS; i++)
        knobs[i] = lt__desc_new(d, &p->made, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
    int64_t n = lt__desc_get(d, config, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES,
                             CUDNN_TYPE_BACKEND_DESCRIPTOR, MAX_KNOBS, knobs);
    int at =
        snprintf(p->choice, LT_CHOICE_BYTES, "%lld %lld", (long long)number, (long long)p->bytes);
    for (int64_t i = 0; i < n && i < MAX_KNOBS && at < LT_CHOICE_BYTES; i++) {
        lt__desc_get(d, knobs[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1, &type);
        lt__desc_get(d, knobs[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, 1, &value);
        at += snprintf(p->choice + at, (size_t)(LT_CHOICE_BYTES - at), " %d=%lld", (int)type,
                       (long long)value);
    }
    if (d->status != CUDNN_STATUS_SUCCESS || at >= LT_CHOICE_BYTES)
        p->choice[0] = 0; /* do not store it in the plan file */
    lt__desc_truncate(d, &p->made, before);
    lt__cudnn_forgive(d);
}

/* Tries to build proposal i. Its descriptor moves from the list of proposals to p. If not in_order,
 * skips those that were tried before, in order. */
static bool try_proposed(lt_cudnn *d, lt_cudnn_plan *p, lt_desc_list *proposed, int i,
                         bool in_order)
{
    int before = p->made.n;
    lt_desc config = proposed->at[i];
    if (config_allowed(d, p, config, true) != in_order ||
        (!in_order && !config_allowed(d, p, config, false))) {
        lt__cudnn_forgive(d);
        return false;
    }
    proposed->at[i] = NULL;
    p->made.at[p->made.n++] = config;
    if (build(d, p, config)) {
        note_choice(d, p, config);
        return true;
    }
    lt__desc_truncate(d, &p->made, before);
    lt__cudnn_forgive(d);
    return false;
}

/* Builds the first proposal of a heuristic mode that is allowed and can be built. *seen: how many
 * proposals there were before; counts them. */
static void choose(lt_cudnn *d, lt_cudnn_plan *p, cudnnBackendHeurMode_t mode, bool in_order,
                   int *seen)
{
    lt_desc_list proposed = {.n = 0};
    lt_desc heuristics = lt__desc_new(d, &proposed, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    lt__desc_link(d, heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, p->graph);
    lt__desc_set(d, heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    if (!d->handle)
        lt__desc_link(d, heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, d->device);
    lt__desc_finalize(d, heuristics);
    for (int i = 0; i < MAX_CONFIGS; i++)
        (void)lt__desc_new(d, &proposed, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    int64_t n = lt__desc_get(d, heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                             CUDNN_TYPE_BACKEND_DESCRIPTOR, MAX_CONFIGS, &proposed.at[1]);
    lt__cudnn_forgive(d);
    for (int i = 1; i <= n && i < proposed.n && !p->plan; i++)
        if ((*seen)++ >= p->next && try_proposed(d, p, &proposed, i, in_order))
            p->next = *seen;
    lt__desc_truncate(d, &proposed, 0);
}

void lt__cudnn_choose(lt_cudnn *d, lt_cudnn_plan *p)
{
    static const cudnnBackendHeurMode_t modes[] = {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_B,
                                                   CUDNN_HEUR_MODE_FALLBACK};
    const int tries = d->config.deterministic ? 3 : 6;
    int seen = 0;
    snprintf(p->choice, sizeof p->choice, "none");
    for (int i = 0; i < tries && !p->plan && d->status == CUDNN_STATUS_SUCCESS; i++)
        choose(d, p, modes[i % 3], i < 3, &seen);
}

/* Creates the engine configuration from a text written by note_choice(). */
static lt_desc config_of(lt_cudnn *d, lt_cudnn_plan *p, const char *text)
{
    lt_desc knobs[MAX_KNOBS];
    int n = 0;
    char *at;
    int64_t number = strtoll(text, &at, 10);
    (void)strtoll(at, &at, 10); /* skip the workspace size; the plan returns it */
    lt_desc engine = lt__desc_new(d, &p->made, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    lt__desc_link(d, engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH, p->graph);
    lt__desc_ints(d, engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, 1, &number);
    if (!d->handle)
        lt__desc_link(d, engine, CUDNN_ATTR_ENGINE_DEVICEPROP, d->device);
    lt__desc_finalize(d, engine);
    for (; *at == ' ' && n < MAX_KNOBS; n++) {
        cudnnBackendKnobType_t type = (cudnnBackendKnobType_t)strtoll(at, &at, 10);
        int64_t value = *at == '=' ? strtoll(at + 1, &at, 10) : 0;
        knobs[n] = lt__desc_new(d, &p->made, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
        lt__desc_set(d, knobs[n], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1, &type);
        lt__desc_ints(d, knobs[n], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, 1, &value);
        lt__desc_finalize(d, knobs[n]);
    }
    lt_desc config = lt__desc_new(d, &p->made, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    lt__desc_link(d, config, CUDNN_ATTR_ENGINECFG_ENGINE, engine);
    if (n > 0)
        lt__desc_set(d, config, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_TYPE_BACKEND_DESCRIPTOR, n,
                     knobs);
    lt__desc_finalize(d, config);
    return config;
}

bool lt__cudnn_restore(lt_cudnn *d, lt_cudnn_plan *p, const char *choice)
{
    int before = p->made.n;
    if (build(d, p, config_of(d, p, choice))) {
        snprintf(p->choice, sizeof p->choice, "%s", choice);
        return true;
    }
    lt__desc_truncate(d, &p->made, before);
    lt__cudnn_forgive(d);
    return false;
}
