/* cudnn_plan.h - what the three files that call cuDNN share: cudnn.c, cudnn_graph.c and
 * cudnn_engine.c. */
#ifndef LT_OPS_CUDA_CUDNN_PLAN_H
#define LT_OPS_CUDA_CUDNN_PLAN_H

#include "ops/cuda/plan_file.h"
#include "ops/cuda/cudnn.h"

typedef cudnnBackendDescriptor_t lt_desc;
typedef cudnnBackendAttributeName_t lt_attribute;

enum { LT_MAX_MADE = 128, LT_CHOICE_BYTES = 1024, LT_PLAN_BUCKETS = 256 };

typedef struct lt_desc_list { /* of descriptors, in the order in which they were made */
    lt_desc at[LT_MAX_MADE];
    int n;
} lt_desc_list;

typedef struct lt_cudnn_plan {
    struct lt_cudnn_plan *next; /* in its bucket */
    lt_cudnn_task task;
    lt_desc_list made;         /* what the plan was made of, and itself */
    lt_desc graph, plan;  /* of these; plan NULL: no engine takes the task */
    lt_desc pack;         /* of operands and workspace, as below; NULL: none yet */
    void *operand[LT_CUDNN_OPERANDS], *workspace;
    int64_t bytes;        /* of workspace */
    char choice[LT_CHOICE_BYTES];
} lt_cudnn_plan;

struct lt_cudnn {
    lt_cudnn_table t;
    const lt_cuda_env *env;
    lt_cudnn_config config;
    cudnnHandle_t handle; /* NULL: the device is not here */
    lt_desc_list made;
    lt_desc device;       /* its properties, when it is not here */
    cudnnStatus_t status; /* the first failure of what is being made: the rest is not tried */
    lt_plan_file *file;       /* NULL: none, or not read yet */
    bool read;
    int n_plans;
    lt_cudnn_plan *bucket[LT_PLAN_BUCKETS];
};

/* ==== Descriptors: cudnn_graph.c. Nothing happens after a failure, which d->status has ======== */

/* Borrowed from the pile. */
lt_desc lt__desc_new(lt_cudnn *d, lt_desc_list *pile, cudnnBackendDescriptorType_t type);
/* Back to the first `left` ones. */
void lt__desc_cut(lt_cudnn *d, lt_desc_list *pile, int left);
void lt__desc_set(lt_cudnn *d, lt_desc to, lt_attribute name, cudnnBackendAttributeType_t type,
                  int64_t n, const void *values);
void lt__desc_link(lt_cudnn *d, lt_desc to, lt_attribute name, lt_desc value);
void lt__desc_ints(lt_cudnn *d, lt_desc to, lt_attribute name, int64_t n, const int64_t *values);
void lt__desc_end(lt_cudnn *d, lt_desc made); /* all attributes are set */
/* How many values there are; up to n of them in values. */
int64_t lt__desc_get(lt_cudnn *d, lt_desc from, lt_attribute name,
                     cudnnBackendAttributeType_t type, int64_t n, void *values);

/* ==== Making a plan =========================================================================== */

static inline bool lt__cudnn_is_memory(cudnnStatus_t status)
{
    return status == CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED ||
           status == CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED;
}

/* p->graph for p->task. */
void lt__cudnn_graph(lt_cudnn *d, lt_cudnn_plan *p);
/* p->plan by the first engine that the configuration allows; p->choice says which. */
void lt__cudnn_choose(lt_cudnn *d, lt_cudnn_plan *p);
/* p->plan by what an earlier p->choice says. False: it cannot be built. */
bool lt__cudnn_restore(lt_cudnn *d, lt_cudnn_plan *p, const char *choice);

#endif
