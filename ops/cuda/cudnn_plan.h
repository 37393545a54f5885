/* cudnn_plan.h - declarations shared by the three files that call cuDNN: cudnn.c, cudnn_graph.c and
 * cudnn_engine.c. */
#ifndef LT_OPS_CUDA_CUDNN_PLAN_H
#define LT_OPS_CUDA_CUDNN_PLAN_H

#include "ops/cuda/plan_file.h"
#include "ops/cuda/cudnn.h"
#include "ops/backend/plan_cache.h"

typedef cudnnBackendDescriptor_t lt_desc;
typedef cudnnBackendAttributeName_t lt_attribute;

enum { LT_MAX_MADE = 128, LT_CHOICE_BYTES = 1024 };

typedef struct lt_desc_list { /* descriptors in the order of their creation */
    lt_desc at[LT_MAX_MADE];
    int n;
} lt_desc_list;

typedef struct lt_cudnn_plan {
    lt_plan cached;
    lt_cudnn_task task;
    lt_desc_list made;   /* all descriptors of the plan, including its own */
    lt_desc graph, plan; /* both in `made`; plan is NULL if no engine supports the task */
    int n_graph;         /* number of descriptors of the graph, which are first in `made` */
    int next;     /* number of the heuristics' first proposal to try; see lt__cudnn_choose() */
    int refusals; /* number of engines that cuDNN has refused to run */
    lt_desc pack; /* variant pack for the addresses below, or NULL */
    void *operand[LT_CUDNN_OPERANDS], *workspace;
    int64_t bytes; /* size of the workspace */
    char choice[LT_CHOICE_BYTES];
} lt_cudnn_plan;

struct lt_cudnn {
    lt_cudnn_table t;
    const lt_cuda_env *env;
    lt_cudnn_config config;
    cudnnHandle_t handle; /* NULL if the device is absent */
    lt_desc_list made;
    lt_desc device;       /* device properties, if the device is absent */
    cudnnStatus_t status; /* first failure of the current plan; later calls are skipped */
    cudnnStatus_t worst;  /* failure because of which there may be no plan, and its text */
    char why[256];
    bool warned;        /* a refusal has been logged as a warning */
    lt_plan_file *file; /* NULL without a file, or before it is read */
    bool read;          /* the plan file has been read, or reading it has failed */
    lt_plan_cache plans;
};

/* ==== Descriptors (cudnn_graph.c) ============================================================= */

/* Once d->status is a failure, all but lt__desc_truncate() do nothing. */

/* Creates a descriptor that the list owns. Borrowed. NULL on failure. */
lt_desc lt__desc_new(lt_cudnn *d, lt_desc_list *list, cudnnBackendDescriptorType_t type);
/* Destroys all but the first `left` descriptors of the list. */
void lt__desc_truncate(lt_cudnn *d, lt_desc_list *list, int left);
void lt__desc_set(lt_cudnn *d, lt_desc to, lt_attribute name, cudnnBackendAttributeType_t type,
                  int64_t n, const void *values);
void lt__desc_link(lt_cudnn *d, lt_desc to, lt_attribute name, lt_desc value);
void lt__desc_ints(lt_cudnn *d, lt_desc to, lt_attribute name, int64_t n, const int64_t *values);
void lt__desc_finalize(lt_cudnn *d, lt_desc made); /* finalizes it, once all attributes are set */
/* Returns how many values the attribute has, and copies up to n of them to values. 0 on failure. */
int64_t lt__desc_get(lt_cudnn *d, lt_desc from, lt_attribute name, cudnnBackendAttributeType_t type,
                     int64_t n, void *values);

/* ==== Making a plan =========================================================================== */

/* Whether memory is short. */
static inline bool lt__cudnn_is_memory(cudnnStatus_t status)
{
    return status == CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED ||
           status == CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED;
}

/* Sets d->status to success, so that the search for an engine continues. Keeps the failure in
 * d->worst if it explains more than the failure that d->worst has. */
void lt__cudnn_forgive(lt_cudnn *d);
/* Whether the status means that cuDNN, as it is installed, does not support a task. */
bool lt__cudnn_is_unsupported(cudnnStatus_t status);
/* Builds p->graph for p->task. */
void lt__cudnn_graph(lt_cudnn *d, lt_cudnn_plan *p);
/* Builds p->plan with the first engine that the configuration allows, that can be built, and whose
 * workspace is within the limit. Sets p->choice. p->plan stays NULL if there is no such engine. The
 * heuristics' proposals count from 0 over all modes; those before p->next are skipped. Sets p->next
 * to the one after the engine. */
void lt__cudnn_choose(lt_cudnn *d, lt_cudnn_plan *p);
/* Builds p->plan from the choice of an earlier run, and sets p->choice. Returns false if the plan
 * cannot be built. */
bool lt__cudnn_restore(lt_cudnn *d, lt_cudnn_plan *p, const char *choice);

#endif
