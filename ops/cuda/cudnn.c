/* cudnn.c - makes plans for tasks and runs them. Only this file, cudnn_graph.c and cudnn_engine.c
 * call cuDNN. They use its graph API, version 9.8 or later.
 *
 * A plan is what cuDNN built for one task: a graph of one or two operations, an engine with its
 * knobs, and compiled code. Plans are cached by task, and so is the result that no engine supports
 * it. The plan file keeps engine and knobs between runs. The descriptors used to build a plan live
 * as long as the plan. cuDNN may refuse to run a plan that it has built. Then the next proposal of
 * its heuristics is built and runs; after some refusals, our own kernel runs.
 *
 * The engine itself adds to an existing gradient (beta = 1). cuDNN 9.19 proposes about as many
 * engines for that as without.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/cuda/cudnn_plan.h"

enum { X = LT_CUDNN_X, W, Y, B, OPERANDS };
enum { MAX_REFUSALS = 4 }; /* plans that cuDNN refuses for a task. Building one can take a second */

/* ==== Failures ================================================================================ */

/* Fails with the failure in d->worst. */
static lt_status failed(const lt_cudnn *d, const char *doing)
{
    char version[24];
    if (lt__cudnn_is_memory(d->worst))
        return d->env->host->fail(LT_ENOMEM, "out of memory in cuDNN; try a smaller batch");
    return d->env->host->fail(LT_EENV, "cuDNN %s failed %s: %s%s%s",
                              lt__version_text(d->t.cudnnGetVersion(), version), doing,
                              d->t.cudnnGetErrorString(d->worst), d->why[0] ? ": " : "", d->why);
}

/* Logs that cuDNN refuses a task, because of the failure in d->worst: a warning the first time.
 * Fails if the cause is an earlier kernel that failed, or if `added`: a part of the task's result
 * may already be added to the gradient. Also fails if memory is short: our own kernel could run,
 * but all later tasks would be slow too, and a smaller batch mends that. */
static lt_status refused(lt_cudnn *d, lt_ctx *ctx, const lt_cudnn_task *task, const char *doing,
                         bool added)
{
    static const char *const results[] = {"y", "dx", "dw"};
    const lt_cuda_env *env = d->env;
    char version[24];
    if (d->handle)
        LT_TRY(env->device->sync(env->device));
    if (added || lt__cudnn_is_memory(d->worst))
        return failed(d, doing);
    env->host->log(
        ctx, d->warned ? LT_LOG_DEBUG : LT_LOG_WARN,
        "%s: cuDNN %s refuses a convolution (%s in %s, x %lldx%lldx%lldx%lld, w "
        "%lldx%lldx%lldx%lld): %s%s%s; luatrain tries other algorithms, then its own kernel, which "
        "is slow",
        d->handle ? env->device->name : env->model,
        lt__version_text(d->t.cudnnGetVersion(), version), results[task->kind],
        lt__cuda_dtype_name((int)task->dtype), (long long)task->n, (long long)task->size[0],
        (long long)task->size[1], (long long)task->in, (long long)task->out,
        (long long)task->kernel[0], (long long)task->kernel[1],
        (long long)(task->in / task->groups), d->t.cudnnGetErrorString(d->worst),
        d->why[0] ? ": " : "", d->why);
    d->warned = true;
    return LT_OK;
}

/* ==== The plan file =========================================================================== */

static void key_text(const lt_cudnn *d, const lt_cudnn_task *task, char text[LT_CHOICE_BYTES])
{
    int64_t words[sizeof *task / sizeof(int64_t)];
    memcpy(words, task, sizeof words);
    int at = snprintf(text, LT_CHOICE_BYTES, "%d %d %zu", d->config.deterministic, d->config.tf32,
                      d->config.workspace);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        at += snprintf(text + at, (size_t)(LT_CHOICE_BYTES - at), " %lld", (long long)words[i]);
}

static void read_file(lt_cudnn *d, lt_ctx *ctx)
{
    char stamp[256], note[512];
    if (d->read || !d->config.plans)
        return;
    d->read = true;
    snprintf(stamp, sizeof stamp, "cuDNN %zu, CUDA %zu, %s", d->t.cudnnGetVersion(),
             d->t.cudnnGetCudartVersion(), d->env->model);
    d->file = lt__plan_file_read(d->config.plans, stamp, note, sizeof note);
    if (note[0])
        d->env->host->log(ctx, LT_LOG_WARN, "%s", note);
}

/* ==== Plans =================================================================================== */

static void drop_pack(lt_cudnn *d, lt_cudnn_plan *p)
{
    if (p->pack)
        d->t.cudnnBackendDestroyDescriptor(p->pack);
    p->pack = NULL;
}

static void plan_free(lt_cudnn *d, lt_cudnn_plan *p)
{
    drop_pack(d, p);
    lt__desc_truncate(d, &p->made, 0);
    free(p);
}

static void plans_free(lt_cudnn *d)
{
    for (lt_plan *p; (p = lt__plan_pop(&d->plans));)
        plan_free(d, (lt_cudnn_plan *)p);
}

/* Logs why there is no plan. Fails as refused() does. */
static lt_status explain(lt_cudnn *d, lt_ctx *ctx, const lt_cudnn_task *task, const char *key)
{
    if (d->worst != CUDNN_STATUS_SUCCESS && !lt__cudnn_is_unsupported(d->worst))
        LT_TRY(refused(d, ctx, task, "to make a plan", false));
    d->env->host->log(ctx, LT_LOG_DEBUG, "no cuDNN engine supports task %s%s%s", key,
                      d->why[0] ? ": " : "", d->why);
    return LT_OK;
}

/* Fills p for its task. p->plan stays NULL if no engine supports it. This is not written to the
 * plan file, because what is missing on this machine may be installed later. */
static lt_status complete(lt_cudnn *d, lt_ctx *ctx, lt_cudnn_plan *p)
{
    char key[LT_CHOICE_BYTES];
    d->status = d->worst = CUDNN_STATUS_SUCCESS;
    d->why[0] = 0;
    read_file(d, ctx);
    key_text(d, &p->task, key);
    if (p->refusals == 0)
        lt__cudnn_graph(d, p);
    p->n_graph = p->made.n;
    const char *known = d->file && p->refusals == 0 ? lt__plan_file_find(d->file, key) : NULL;
    if (known && lt__cudnn_restore(d, p, known))
        return LT_OK;
    lt__cudnn_choose(d, p);
    lt__cudnn_forgive(d);
    if (!p->plan)
        return explain(d, ctx, &p->task, key);
    if (d->file && p->choice[0] && !lt__plan_file_put(d->file, key, p->choice))
        return d->env->host->fail(LT_ENOMEM, "out of memory for cuDNN plans");
    return LT_OK;
}

/* Replaces a plan that cuDNN refuses to run by the next one, if there is one. */
static lt_status replace(lt_cudnn *d, lt_ctx *ctx, lt_cudnn_plan *p)
{
    drop_pack(d, p);
    lt__desc_truncate(d, &p->made, p->n_graph);
    p->plan = NULL;
    p->bytes = 0;
    snprintf(p->choice, sizeof p->choice, "none");
    return ++p->refusals < MAX_REFUSALS ? complete(d, ctx, p) : LT_OK;
}

/* Sets *found to the plan of a task, which is made if needed. Borrowed until the next call. */
static lt_status plan_for(lt_cudnn *d, lt_ctx *ctx, const lt_cudnn_task *task,
                          lt_cudnn_plan **found)
{
    lt_cudnn_plan *p = (lt_cudnn_plan *)lt__plan_find(&d->plans, task);
    if ((*found = p))
        return LT_OK;
    if (lt__plan_cache_is_full(&d->plans)) {
        LT_TRY(d->env->device->sync(d->env->device)); /* running plans must not be freed */
        plans_free(d);
    }
    if (!(p = calloc(1, sizeof *p)))
        return d->env->host->fail(LT_ENOMEM, "out of memory for cuDNN plans");
    p->task = *task;
    lt_status status = complete(d, ctx, p);
    if (status != LT_OK) {
        plan_free(d, p);
        return status;
    }
    lt__plan_add(&d->plans, &p->cached, &p->task);
    *found = p;
    return LT_OK;
}

/* Whether cuDNN may be asked for the task. It cannot describe an empty tensor. */
static bool is_asked(const lt_cudnn_task *task)
{
    if (task->dtype != LT_F32 && task->dtype != LT_F16 && task->dtype != LT_BF16)
        return false;
    return task->n > 0 && task->in > 0 && task->out > 0 && task->size[0] > 0 && task->size[1] > 0;
}

lt_status lt__cudnn_plan(lt_cudnn *d, lt_ctx *ctx, const lt_cudnn_task *task, size_t *workspace)
{
    lt_cudnn_plan *p;
    *workspace = 0;
    if (!is_asked(task))
        return LT_EUNSUPPORTED;
    LT_TRY(plan_for(d, ctx, task, &p));
    *workspace = (size_t)p->bytes;
    return p->plan ? LT_OK : LT_EUNSUPPORTED;
}

const char *lt__cudnn_choice(const lt_cudnn *d, const lt_cudnn_task *task)
{
    const lt_cudnn_plan *p = (lt_cudnn_plan *)lt__plan_find(&d->plans, task);
    return p ? p->choice : NULL;
}

/* ==== Running ================================================================================= */

/* Sets p->pack for these addresses. Reuses the one of the last run if they are unchanged. */
static void pack(lt_cudnn *d, lt_cudnn_plan *p, void *const operand[OPERANDS], void *workspace)
{
    static const int64_t numbers[OPERANDS] = {X, W, Y, B};
    const int64_t n = p->task.bias ? OPERANDS : B; /* the bias is the last operand */
    lt_desc_list made = {.n = 0};
    if (p->pack && p->workspace == workspace && memcmp(p->operand, operand, sizeof p->operand) == 0)
        return;
    drop_pack(d, p);
    p->pack = lt__desc_new(d, &made, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    lt__desc_ints(d, p->pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, n, numbers);
    lt__desc_set(d, p->pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, n,
                 operand);
    lt__desc_set(d, p->pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    lt__desc_finalize(d, p->pack);
    if (d->status != CUDNN_STATUS_SUCCESS) {
        drop_pack(d, p);
        return;
    }
    memcpy(p->operand, operand, sizeof p->operand);
    p->workspace = workspace;
}

/* Whether the status shows that a run has enqueued no kernel. After other failures a part of the
 * result may be written, which is harmless unless the task adds to the result. */
static bool has_run_nothing(cudnnStatus_t status)
{
    const int category = CUDNN_STATUS_CATEGORY(status);
    return category == CUDNN_STATUS_NOT_SUPPORTED || category == CUDNN_STATUS_BAD_PARAM ||
           (category < CUDNN_STATUS_BAD_PARAM && status != CUDNN_STATUS_RUNTIME_IN_PROGRESS &&
            status != CUDNN_STATUS_RUNTIME_FP_OVERFLOW);
}

lt_status lt__cudnn_run(lt_cudnn *d, lt_ctx *ctx, const lt_cudnn_task *task,
                        void *const operand[LT_CUDNN_OPERANDS], void *workspace, size_t bytes)
{
    lt_cudnn_plan *p;
    if (!is_asked(task))
        return LT_EUNSUPPORTED;
    LT_TRY(plan_for(d, ctx, task, &p));
    while (p->plan && d->handle && (size_t)p->bytes <= bytes) {
        d->status = d->worst = CUDNN_STATUS_SUCCESS;
        pack(d, p, operand, p->bytes > 0 ? workspace : NULL);
        if (d->status == CUDNN_STATUS_SUCCESS)
            d->status = d->t.cudnnBackendExecute(d->handle, p->plan, p->pack);
        if (d->status == CUDNN_STATUS_SUCCESS)
            return LT_OK;
        lt__cudnn_forgive(d);
        bool added = task->add && !has_run_nothing(d->worst);
        LT_TRY(refused(d, ctx, task, "to run a plan", added));
        LT_TRY(replace(d, ctx, p));
    }
    return LT_EUNSUPPORTED;
}

/* ==== Creation and release ==================================================================== */

/* Creates the properties of the device that json describes, or of this machine's if it is NULL. */
static lt_desc properties(lt_cudnn *d, lt_desc_list *list, const char *json)
{
    const int32_t index = d->env->index;
    lt_desc device = lt__desc_new(d, list, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
    if (json)
        lt__desc_set(d, device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
                     (int64_t)strlen(json), json);
    else
        lt__desc_set(d, device, CUDNN_ATTR_DEVICEPROP_DEVICE_ID, CUDNN_TYPE_INT32, 1, &index);
    lt__desc_finalize(d, device);
    return device;
}

char *lt__cudnn_properties(lt_cudnn *d)
{
    const cudnnBackendAttributeName_t name = CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION;
    lt_desc_list made = {.n = 0};
    d->status = CUDNN_STATUS_SUCCESS;
    lt_desc device = properties(d, &made, d->config.json);
    int64_t n = lt__desc_get(d, device, name, CUDNN_TYPE_CHAR, 0, NULL);
    char *text = calloc(1, (size_t)n + 1);
    if (text)
        (void)lt__desc_get(d, device, name, CUDNN_TYPE_CHAR, n, text);
    if (d->status != CUDNN_STATUS_SUCCESS) {
        free(text);
        text = NULL;
    }
    lt__desc_truncate(d, &made, 0);
    return text;
}

static void begin(lt_cudnn *d)
{
    lt__cudnn_load_parts(&d->t);
    if (d->config.json) {
        d->device = properties(d, &d->made, d->config.json);
        return;
    }
    d->status = d->t.cudnnCreate(&d->handle);
    if (d->status == CUDNN_STATUS_SUCCESS)
        d->status = d->t.cudnnSetStream(d->handle, (cudaStream_t)d->env->stream);
}

lt_cudnn *lt__cudnn_new(const lt_cudnn_table *table, const lt_cuda_env *env,
                        const lt_cudnn_config *config, char *text, size_t bytes)
{
    char version[24], why[256] = "";
    lt_cudnn *d = calloc(1, sizeof *d);
    if (!d) {
        snprintf(text, bytes, "out of memory for cuDNN");
        return NULL;
    }
    d->t = *table;
    d->env = env;
    d->config = *config;
    d->plans.key_bytes = sizeof(lt_cudnn_task);
    if (d->config.workspace == 0)
        d->config.workspace = lt__cudnn_workspace(env->memory);
    begin(d);
    if (d->status == CUDNN_STATUS_SUCCESS)
        return d;
    d->t.cudnnGetLastErrorString(why, sizeof why);
    snprintf(text, bytes, "cuDNN %s cannot be used: %s%s%s",
             lt__version_text(d->t.cudnnGetVersion(), version), d->t.cudnnGetErrorString(d->status),
             why[0] ? ": " : "", why);
    lt__cudnn_free(d);
    return NULL;
}

void lt__cudnn_free(lt_cudnn *d)
{
    char note[512];
    if (!d)
        return;
    if (d->file)
        (void)lt__plan_file_write(d->file, note,
                                  sizeof note); /* there is no context left to log to */
    lt__plan_file_free(d->file);
    plans_free(d);
    lt__desc_truncate(d, &d->made, 0);
    if (d->handle)
        d->t.cudnnDestroy(d->handle);
    free(d);
}
