/* context.h - the state of a context. Included by tensor.h. */
#ifndef LT_CORE_CONTEXT_H
#define LT_CORE_CONTEXT_H

#include <pthread.h>

#include "core/alloc.h"
#include "core/device.h"

/* CUDA sources are C++, which lacks _Atomic and stdatomic.h. They only read these structs. */
#ifdef __cplusplus
typedef int lt_atomic_int;
typedef unsigned lt_atomic_uint;
#define LT_ATOMIC
#else
#include <stdatomic.h>
typedef atomic_int lt_atomic_int;
typedef atomic_uint lt_atomic_uint;
#define LT_ATOMIC _Atomic
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lt_scope lt_scope; /* see tensor.h */

/* Callbacks and state of the modules above core. Each pointer is set once, by the module named
 * here. */
typedef struct lt_slots {
    void (*forget)(lt_tensor *x,
                   bool gone); /* autograd: drops x's history; if gone, also its gradient */
    /* autograd: gives y, a view or copy of x, the home of x. LT_ENOMEM */
    lt_status (*inherit)(lt_tensor *y, const lt_tensor *x);
    /* autograd: LT_EINVAL: x, a meta tensor with a home, has no values here */
    lt_status (*refuse_meta)(const lt_tensor *x);
    void (*closed)(lt_ctx *ctx);    /* autograd: ends all graphs; called by lt_ctx_free() */
    void (*ctx_freed)(lt_ctx *ctx); /* autograd: frees its state; called with the last reference */
    void (*seeded)(lt_ctx *ctx);    /* autograd: restarts its count of random calls; called by
                                     * lt_set_seed() */
    struct lt_autograd *autograd;
    void (*ops_freed)(lt_ctx *ctx); /* ops: the same */
    struct lt_ops *ops;
} lt_slots;

typedef enum lt_fault_kind {
    LT_FAULT_NONE,
    LT_FAULT_KILL,
    LT_FAULT_LEAVE,
    LT_FAULT_HANG,
    LT_FAULT_DELAY,
    LT_FAULT_LATENCY
} lt_fault_kind;

typedef struct lt_fault { /* fault of a rank, for tests; dist triggers it */
    lt_fault_kind kind;
    int rank;
    int64_t number; /* step, from 1; for a delay, milliseconds; for a latency, microseconds */
} lt_fault;

typedef struct lt_inf_fault { /* inf in a gradient, for tests; autograd injects it */
    int rank;
    int64_t step; /* step of the fault, from 1; 0 for no fault */
    char param[96];
    bool armed;    /* lt_grad_fault() was called */
    bool injected; /* the inf has been injected */
} lt_inf_fault;

struct lt_ctx {
    lt_atomic_int refs; /* one for the owner, one for each object made in the context */
    bool closed;        /* the owner has called lt_ctx_free(); objects may still exist */
    lt_config config;
    int threads;
    int64_t step;
    int64_t seeded_at; /* `step` when the seed was set; see lt_random_step() */
    uint64_t draws;
    uint64_t trees; /* parameter trees that were initialised since the seed was set */
    lt_atomic_int listeners, stop_reason; /* lock-free, for signal handlers */
    lt_scope *LT_ATOMIC scope;  /* innermost, or NULL; written only by the owner's thread */
    lt_atomic_int taken_scopes; /* see lt__scope_take() */
    lt_slots slots;
    lt_device *devices[LT_MAX_DEVICES]; /* [0] is the CPU; [1] the accelerator or NULL */
    lt_device *device;                  /* device of new tensors */
    lt_log_fn log;
    void *log_ud;
    char note[256]; /* logged when a log callback is set */
    lt_log_level note_level;
    struct lt_trace *trace;               /* or NULL */
    struct lt_pinned_slots *pinned_slots; /* see pinned.c; or NULL */
    lt_fault fault;
    lt_inf_fault inf;

    pthread_mutex_t lock; /* guards the fields below, the pools and scope links */
    lt_memory memory;
    uint64_t fail_at; /* number of the allocation that fails; 0 if none */
};

void lt__trace_close(lt_ctx *ctx);
lt_ctx *lt__ctx_retain(lt_ctx *ctx);
void lt__ctx_release(lt_ctx *ctx);
/* LT_EINVAL after lt_ctx_free(). With who = "backward" the message is "backward: the context was
 * closed by lt_ctx_free()". */
lt_status lt__check_open(const lt_ctx *ctx, const char *who);
/* For public functions: if ctx is NULL, usually because the caller did not check the result of
 * lt_open(), fails with LT_EINVAL and returns the value that follows, if any. */
#define LT_NEED_CTX(ctx, ...)                                                                      \
    do {                                                                                           \
        if (!(ctx)) {                                                                              \
            lt_fail(LT_EINVAL, "%s: the context is NULL; check the result of lt_open()",           \
                    __func__);                                                                     \
            return __VA_ARGS__;                                                                    \
        }                                                                                          \
    } while (0)
/* The name of a status without LT_, such as "EINVAL". status must be less than LT_STATUS_COUNT. */
const char *lt__status_name(lt_status status);
/* The monotonic clock, in seconds. */
double lt__seconds(void);

#ifdef __cplusplus
}
#endif
#endif
