/* ranks.h - runs a function of deferred.lua on several ranks, which are threads, on the CPU or on
 * emulated accelerators, with the stand-in for NCCL. */
#ifndef TESTS_DEVICE_RANKS_H
#define TESTS_DEVICE_RANKS_H

#include <limits.h>
#include <pthread.h>

#include "core/tensor.h"
#include "dist/dist.h"
#include "tests/device/deferred.h"

enum { MAX_RANKS = 4 };

typedef enum where { ON_CPU, ON_ONE, ON_OWN } where; /* ON_ONE: all ranks share an accelerator */

typedef struct job { /* a function of deferred.lua that all ranks call */
    int ranks;
    where at;
    const char *name, *options, *fault;
    const char *hidden; /* for SHIM_HIDES, or NULL */
    double timeout;     /* seconds; 0: a minute */
    bool idle;          /* rank 1 has no rows */
    bool cuda;          /* with CUDA kernels, and the hazard of ranks that are threads */
    lt_reducer_config config;
} job;

typedef struct rank {
    const job *job;
    int number;
    lt_group *group;
    pthread_t thread;
    lt_status status;
    char text[TEXT]; /* the result of the function, or the error message */
    char note[256];  /* the log line that says where gradients are summed */
    lt_log_level level;
    waits waits;
    int sent, inspected; /* for a reducer in C: buckets sent, and gradients inspected by the host */
} rank;

/* So small that almost every parameter has its own bucket. */
static const lt_reducer_config small = {.first_bucket = 64, .bucket = 64};

/* A job that calls loop(). */
static inline job loop_of(int ranks, where at, const char *options)
{
    return (job){.ranks = ranks, .at = at, .name = "loop", .options = options, .config = small};
}

/* ==== Ranks =================================================================================== */

static inline lt_status call(rank *r, lua_State *L)
{
    char options[1024];
    LT_TRY(lt_lua_join(L, r->group, &r->job->config));
    snprintf(options, sizeof options, "rank = %d, %s", r->number, r->job->options);
    return call_lua(L, r->job->name, options, &r->waits, r->text);
}

/* An lt_log_fn that keeps the line that says where gradients are summed. */
static inline void note(void *ud, lt_log_level level, const char *text)
{
    rank *r = ud;
    if (!strstr(text, "buckets are summed"))
        return;
    snprintf(r->note, sizeof r->note, "%s", text);
    r->level = level;
}

static inline void *run(void *ud)
{
    rank *r = ud;
    char device[16];
    snprintf(device, sizeof device, r->job->at == ON_CPU ? "cpu" : "cuda:%d",
             r->job->at == ON_OWN ? r->number : 0);
    lt_ctx *ctx = lt_open(&(lt_config){
        .device = device, .threads = 1, .poison = true, .reference = true, .fault = r->job->fault});
    lua_State *L = ctx ? lt_lua_new(ctx) : NULL;
    if (ctx)
        lt_set_log(ctx, note, r);
    r->status = L ? call(r, L) : lt_errcode();
    if (r->status != LT_OK) {
        snprintf(r->text, sizeof r->text, "%s", lt_errmsg());
        lt_group_fail(r->group);
    }
    if (L)
        lt_lua_close(L);
    lt_ctx_free(ctx);
    lt_group_close(r->group);
    return NULL;
}

static inline void run_all(const job *j, rank ranks[MAX_RANKS])
{
    lt_group *group[MAX_RANKS];
    j->cuda ? use_shim() : use_emu();
    setenv("SHIM_HIDES", j->hidden ? j->hidden : j->cuda ? "cuDNN cuBLASLt" : "", 1);
    CHECK_OK(lt_local_open(j->ranks,
                           &(lt_group_config){.timeout = j->timeout > 0 ? j->timeout : 60}, group));
    for (int i = 0; i < j->ranks; i++) {
        memset(&ranks[i], 0, sizeof ranks[i]);
        ranks[i].job = j;
        ranks[i].number = i;
        ranks[i].group = group[i];
        ranks[i].waits.most = INT_MAX;
        CHECK_EQ(pthread_create(&ranks[i].thread, NULL, run, &ranks[i]), 0);
    }
    for (int i = 0; i < j->ranks; i++)
        pthread_join(ranks[i].thread, NULL);
}

#endif
