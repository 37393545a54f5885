/* dist.h - the door of dist: data-parallel training. Each rank computes its share of every batch.
 *
 * A rank is a thread or a process with its own context. A group connects it to the other ranks: it
 * provides collectives, a thread that communicates while the rank computes, and failure notices.
 * The reducer works on top of a group and averages the gradients of all ranks during backward. The
 * optimizers of all ranks then take the same step, so the weights stay bit-identical on all ranks
 * without being sent.
 */
#ifndef LUATRAIN_DIST_H
#define LUATRAIN_DIST_H

#include "autograd/autograd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ==== Groups ================================================================================== */

typedef struct lt_group lt_group;

enum { LT_GROUP_TIMEOUT = 120 }; /* seconds */

typedef struct lt_group_config { /* zero means default */
    double timeout; /* seconds to wait for another rank; the default is LT_GROUP_TIMEOUT */
    /* For ranks that are processes. MPI_Init and MPI_Finalize return only when all ranks have
     * called them, and they have no timeout. in_mpi(ud, "MPI_Init") is called before such a call
     * and in_mpi(ud, NULL) after it, so that another thread can watch the call. That thread cannot
     * interrupt it; it can only end the process. NULL for no callback. */
    void (*in_mpi)(void *ud, const char *call);
    void *ud;
} lt_group_config;

static inline double lt_group_timeout(const lt_group_config *config)
{
    return config->timeout > 0 ? config->timeout : (double)LT_GROUP_TIMEOUT;
}

/* Opens groups for n ranks that are threads of this process. Only the thread of rank r may use
 * group[r]. config may be NULL. New, all n of them. LT_EUSAGE if n is out of range, LT_ENOMEM. */
LT_MUST lt_status lt_local_open(int n, const lt_group_config *config, lt_group **group);
/* Whether the environment variables of mpirun or srun say that this process is one of several. */
LT_API bool lt_mpi_is_launched(void);
/* LT_EENV unless the MPI plugin, which ranks that are processes need, is installed. */
LT_MUST lt_status lt_mpi_check(void);
/* Opens the group of the processes that mpirun or srun has started. Each process is a rank, and all
 * must call this. Processes on one node use shared memory. Between nodes, MPI carries the bytes.
 * MPI is used through the plugin libluatrain-mpi.so, which is searched for in the folder that
 * LUATRAIN_PLUGINS names and where it was built or installed. config may be NULL. New. LT_EENV if
 * the plugin is missing or has another version. */
LT_MUST lt_status lt_mpi_open(const lt_group_config *config, lt_group **group);
/* Declares that this rank makes no more calls. If ranks are processes, waits until all ranks of
 * this node have left. If one of them still needs this rank, it fails, and that failure is the
 * status here. */
LT_MUST lt_status lt_group_leave(lt_group *group);
/* Leaves and frees. NULL is fine. */
LT_API void lt_group_close(lt_group *group);

LT_API int lt_group_rank(const lt_group *group);
LT_API int lt_group_size(const lt_group *group);
/* The number of this rank among the ranks of its machine, from 0. */
LT_API int lt_group_local_rank(const lt_group *group);
/* This rank's part of the CPUs that it shares with other ranks; at least 1. */
LT_API int lt_group_cpus(const lt_group *group);
/* Sets the number of threads that this rank computes with. If that leaves a CPU free, a wait spins
 * on it for some microseconds before it sleeps. Before this call, waits do not spin. */
LT_API void lt_group_set_threads(lt_group *group, int threads);

/* ==== Collectives ============================================================================= */

/* All ranks must call the same collectives in the same order, with equal counts and dtypes. If they
 * do not, the result is LT_EDESYNC, with a message that says which rank called what. A collective
 * waits for the other ranks. It returns LT_EPEER if one of them does not arrive before the timeout,
 * has failed or has left, and LT_EINVAL for invalid arguments. After a failure, all further
 * collectives fail with the same cause. */

typedef struct lt_sum { /* data = the sum over all ranks of scale * data, bit-identical on all */
    const char *what;   /* name for messages, such as "bucket 3". Borrowed */
    void *data;         /* (count) */
    int64_t count;      /* elements */
    lt_dtype dtype;     /* a float dtype, or i64 with scale 1 */
    /* f32, f16 or bf16: f32 data is rounded to it before it is sent; for other dtypes, dtype
     * itself. f64 and i64 are added as they are, all others in f32. Overflow in f16 becomes inf */
    lt_dtype wire;
    double scale; /* of this rank; applied before rounding */
} lt_sum;

LT_MUST lt_status lt_group_allreduce(lt_group *group, const lt_sum *sum);
/* Copies data of rank `root` to all ranks. */
LT_MUST lt_status lt_group_broadcast(lt_group *group, const char *what, void *data, size_t bytes,
                                     int root);
LT_MUST lt_status lt_group_barrier(lt_group *group, const char *what);
/* Sends from one rank to another; other ranks take no part. Messages arrive in the order of
 * sending, and both sides must give the same number of bytes, or it is LT_EDESYNC.
 * lt_group_send() returns when data may be changed. */
LT_MUST lt_status lt_group_send(lt_group *group, int to, const void *data, size_t bytes);
LT_MUST lt_status lt_group_receive(lt_group *group, int from, void *data, size_t bytes);

/* For benchmarks: times n allreduces of `count` f32 elements, in the same kind of memory as
 * gradients. seconds[i] is the time of number i on this rank. by_mpi uses MPI_Allreduce instead;
 * LT_EENV if the ranks are threads of one process. A collective. */
LT_MUST lt_status lt_group_time(lt_group *group, int64_t count, lt_dtype wire, bool by_mpi,
                                double *seconds, int n);

/* Total bytes that this rank has sent to other ranks or exchanged with them in shared memory. */
LT_API uint64_t lt_group_bytes(const lt_group *group);

/* ==== In the background ======================================================================= */

/* Runs fn(ud) on the group's own thread, after all tasks started before. fn may call collectives. A
 * collective that the rank's thread calls waits until all started tasks are done. LT_ENOMEM. */
LT_MUST lt_status lt_group_start(lt_group *group, lt_status (*fn)(void *ud), void *ud);
/* Waits until all started tasks are done. Returns the first failure so far, with its message. */
LT_MUST lt_status lt_group_wait(lt_group *group);
/* An allreduce that is independent of started tasks: neither waits for the other. It matches only
 * other calls of lt_group_allreduce_side(), in their order. */
LT_MUST lt_status lt_group_allreduce_side(lt_group *group, const lt_sum *sum);

/* ==== Failure ================================================================================= */

/* Declares that this rank has failed, with the error code and message of this thread. The other
 * ranks fail with LT_EPEER soon after. */
LT_API void lt_group_fail(lt_group *group);
/* The first failure of the job: rank, code and message, the same on every rank. text has room for
 * `bytes`. Returns false if there is no failure. */
LT_API bool lt_group_failure(const lt_group *group, int *rank, lt_status *code, char *text,
                             size_t bytes);
/* After a failure: whether this rank reports it to the user. One rank of each node does. On that
 * rank the call returns when the other ranks of the node have no more to say. On the others it
 * returns when the reporter has left its group. Either way it returns after `seconds` at the
 * latest. */
LT_API bool lt_group_is_reporter(lt_group *group, double seconds);
/* Sets the location, such as "train.lua:31", and the step of this rank. Other ranks show them in
 * messages when this rank is missing. Cheap. */
LT_API void lt_group_set_location(lt_group *group, const char *where, int64_t step);

/* Checks that all ranks have the same text. If not, LT_EDESYNC with the first line that differs
 * from rank 0. A collective; `what` names the text in messages. */
LT_MUST lt_status lt_group_compare(lt_group *group, const char *what, const char *text);
/* As lt_group_compare(), for n numbers; n must be equal on all ranks. Numbers may differ by
 * `tolerance` times the largest finite magnitude on rank 0, because the last bits of computed
 * numbers depend on the CPU. */
LT_MUST lt_status lt_group_compare_numbers(lt_group *group, const char *what, const double *numbers,
                                           int n, double tolerance);

/* ==== The reducer ============================================================================= */

/* Averages the gradients of all ranks, using the hooks of a context's backward. The result is the
 * gradient of the mean loss over the global batch, of which each rank computes its share.
 *
 * Gradients travel in buckets, which are spans of the gradient arena. Backward produces the
 * gradients of the last parameters first, so the last buckets are sent first, while backward still
 * runs. The step record is sent before the buckets. It holds a few numbers of each rank: the
 * parameters it uses, its loss, the sums of its batch-norm statistics and its stop request.
 *
 * A step may have several backwards, whose gradients add up. The last one sends.
 * lt_reducer_expect_backwards() sets how many there are. Without it, the reducer expects as many as
 * in earlier steps, and the first step sends when an optimizer needs the gradients. If only some
 * ranks have used a parameter, its gradient counts as zero on the others. A parameter that no rank
 * has used is neither sent nor updated.
 *
 * The ranks must agree in the following, or the step fails with LT_EDESYNC:
 * - They run each batch norm for the first time in the same step and in the same order.
 * - They make the same optimizers in the same order and take the same steps of them, with the same
 *   settings. Settings are compared in the record of the next step.
 * - Their global batches have the same number of rows and come from the same data
 *   (lt_reducer_set_data()).
 * - The same parameters are frozen at the first backward of a step.
 * If only some ranks have written to parameters since the last record, all ranks compare the
 * values. lt_fill(), for example, is noticed; a write through lt_data() is not. The record only
 * holds digests of all this, so the checks cost nothing while the ranks agree.
 *
 * Gradients on accelerators are summed there if each rank has its own accelerator and a library
 * such as NCCL connects them. That library adds in the wire dtype. Otherwise each bucket is copied
 * to the CPU when it is complete, summed there and copied back, while the accelerator continues.
 * Backward never waits. The optimizer step waits for the last bucket, because all ranks must make
 * the same decision whether to apply the step.
 *
 * Between backward and the optimizer step, a gradient is this rank's own if it has not been sent,
 * and the average of all ranks if it has; lt_grad() and lt_zero_grad() wait for an exchange under
 * way. If gradients are forgotten at that point, all ranks must forget them, or their weights
 * diverge. This is not checked. */
typedef struct lt_reducer lt_reducer;

/* where gradients on accelerators are summed */
typedef enum lt_sum_backend {
    LT_SUM_BACKEND_AUTO, /* on accelerators if possible; if not, rank 0 logs why */
    LT_SUM_BACKEND_HOST, /* on the CPU */
    LT_SUM_BACKEND_NCCL  /* on accelerators; an error if that is not possible */
} lt_sum_backend;

typedef struct lt_reducer_config { /* zero means default */
    size_t first_bucket, bucket;   /* bytes at most; defaults: 1 MiB for the first, 8 for others */
    lt_dtype wire;                 /* dtype in which f32 gradients travel; same on all ranks */
    lt_sum_backend sum_backend;    /* the same on all ranks */
    bool blocking;                 /* send nothing before the optimizer step */
    /* send nothing at all, so the weights of the ranks diverge. For measuring the cost of
     * synchronization */
    bool no_sync;
    /* number of shards of a step, a power of two, or 0. A rank computes its shards one after the
     * other: for each it sets the share, runs backward and calls the optimizer step, and only the
     * call for the last shard takes a step. Weights are then bit-identical for any number of ranks.
     * Another backward of a shard after its optimizer step is LT_EUSAGE. 0: one shard for each
     * rank, and sending overlaps with backward */
    int vranks;
} lt_reducer_config;

/* Makes a reducer, which sets the gradient slots of ctx (lt_set_grad_slots()). ctx is kept; the
 * group must outlive the reducer. config may be NULL. New. NULL with LT_ENOMEM, or with LT_EUSAGE
 * in these cases: the ranks cannot share `vranks` shards evenly; vranks is used with a half wire,
 * on an accelerator, or on nodes that do not have the same number of consecutive ranks; the
 * injected fault of ctx names a rank that does not exist. */
LT_API lt_reducer *lt_reducer_new(lt_ctx *ctx, lt_group *group, const lt_reducer_config *config);
LT_API void lt_reducer_free(lt_reducer *reducer);
LT_API lt_ctx *lt_reducer_ctx(const lt_reducer *reducer);   /* borrowed */
LT_API lt_dtype lt_reducer_wire(const lt_reducer *reducer); /* as in its config */
/* Changes the bucket sizes, blocking and no_sync from the next step on. All ranks must make the
 * same change. wire, sum_backend and vranks keep their values. */
LT_MUST lt_status lt_reducer_configure(lt_reducer *reducer, const lt_reducer_config *config);
/* Adds n parameters, which must be placed, to the reducer and broadcasts their values from rank 0.
 * Parameters that the reducer already has are skipped. A collective. LT_EUSAGE for new parameters
 * between the shards of a step. The first call also decides where gradients are summed: LT_EENV if
 * config.sum_backend is not possible, LT_EDESYNC if ranks differ in wire, sum_backend or vranks.
 * Parameters are kept. */
LT_MUST lt_status lt_reducer_add(lt_reducer *reducer, lt_tensor *const *params, int n);
/* Sets the share of the next batches: this rank, or its current shard, has `rows` of `total` rows.
 * Before the first call, all ranks have equal shares. A rank with 0 rows must still run backward on
 * some rows, which do not count. */
LT_API void lt_reducer_set_share(lt_reducer *reducer, int64_t rows, int64_t total);

/* Sets a digest of the data from which this rank's batches come. It must be the same on all ranks.
 * 0 if it is not known. */
LT_API void lt_reducer_set_data(lt_reducer *reducer, uint32_t digest);
/* LT_EDESYNC unless all ranks have taken the last step with the same settings. A collective. Call
 * it after the final step: the settings of every other step are compared in the next step. */
LT_MUST lt_status lt_reducer_compare(lt_reducer *reducer);

/* A function for lt_set_allreduce(), with the reducer as ud. All ranks must make the same number of
 * these calls in each step. LT_EUSAGE if vranks gives a rank more than one shard, because the later
 * shards have not been computed yet. */
LT_MUST lt_status lt_reducer_sum(void *reducer, double *numbers, int64_t n, bool backward);

/* Sets the number of backwards in each step from now on. 0, the default, means as many as in
 * earlier steps. A step with more backwards than any step before must then have them on all
 * ranks. */
LT_API void lt_reducer_expect_backwards(lt_reducer *reducer, int backwards);

typedef struct lt_reduced_step { /* the last step whose gradients were exchanged */
    double loss;     /* mean over the global batch, added over the backwards of the step */
    int stop_reason; /* of the first rank with a stop request, or 0; see lt_stop() */
    int buckets;     /* number of buckets sent */
    double waited;   /* seconds that the optimizer step waited for the exchange */
} lt_reduced_step;
LT_API lt_reduced_step lt_reducer_last(const lt_reducer *reducer);

typedef struct lt_bucket { /* of the last step; times are seconds since its last backward began */
    size_t bytes;          /* of gradients that were summed; if 0, the times have no meaning */
    double ready;          /* backward completed the bucket (on an accelerator: enqueued it) */
    double began, ended;   /* of the allreduce */
} lt_bucket;
/* Bucket i, counted from 0 in the order of sending. False if there are not that many. */
LT_API bool lt_reducer_bucket(const lt_reducer *reducer, int i, lt_bucket *bucket);

/* ==== The bucket filter ======================================================================= */

/* Callbacks that measure, pack and unpack each bucket; amp uses them. A bucket carries a tail of
 * numbers in its allreduce, and each rank gets their sums. This lets all ranks make the same
 * decision about a step, in lt_scaling.decide(), without a further collective. If gradients travel
 * in f16, the filter may multiply a bucket by a power of two, so that its values fit f16. If the
 * sum overflows all the same, the filter can have the bucket sent again. */
enum {
    LT_MAX_TAIL = 256, /* numbers in a tail */
    LT_MAX_RESENDS = 4 /* of one bucket in one exchange */
};

typedef struct lt_packet { /* a bucket in an allreduce */
    lt_ctx *ctx;           /* of this rank. Borrowed */
    int bucket;            /* index, in the order of sending */
    lt_tensor *const *x;   /* (n) parameters with a gradient of this rank in it. Borrowed */
    int n;
    /* of the gradients of x that decide about the step: an optimizer has the parameter, and some
     * rank has added to its gradient */
    lt_grad_stats stats;
    double largest; /* if in_f16: largest finite magnitude in all gradients of x */
    /* (count) gradients of this rank; in unpack(), the sums over all ranks. NULL if they stay on an
     * accelerator */
    const void *data;
    int64_t count;
    lt_dtype dtype;
    bool in_f16; /* the bucket travels in f16, which overflows at 2^16 */
    int sent;    /* number of times it has been sent before */
    /* pack() may set it if in_f16, to the same value on all ranks: the bucket is multiplied by
     * 2^exponent while it travels */
    int exponent;
    /* pack() writes it; in unpack() it holds the sums. Whole numbers: sums are exact up to 256 in
     * bf16 and up to 2048 in f16 */
    float tail[LT_MAX_TAIL];
} lt_packet;

typedef struct lt_bucket_filter {
    void *ud;
    int tail; /* how many numbers of lt_packet.tail are used */
    /* Returns the statistics of a gradient. Called on the rank's thread when backward has completed
     * the gradient of x and its hooks have run. grad is on the CPU and includes the gradients of
     * earlier backwards. Not called for a rank or shard without rows. May be NULL. */
    lt_grad_stats (*measure)(void *ud, lt_tensor *x, lt_tensor *grad);
    /* As measure(), for gradients that measure() was not called for: they were on an accelerator or
     * are left over from an earlier step. grad is on the CPU, may be a copy, and is borrowed for
     * this call. Called on the group's thread before pack(), or with vranks on the rank's thread.
     * A bucket that is summed on accelerators is measured there, without these two calls, if look
     * is set. NULL if nothing needs to be measured. */
    lt_grad_stats (*look)(void *ud, const lt_tensor *grad);
    /* Called on the group's thread before the first bucket of an exchange. A step has a second
     * exchange if gradients were added after the first. May be NULL. */
    void (*start)(void *ud);
    /* Called on the group's thread for each bucket, in the order of sending. On a rank without rows
     * n is 0 and data is all zeros. If pack is NULL, buckets have no tail and unpack() is not
     * called; the other callbacks still are. */
    void (*pack)(void *ud, lt_packet *packet);
    /* Called after the allreduce. Returns true to send the bucket again, beginning with pack();
     * this applies to f16 only. All ranks must return the same value. */
    bool (*unpack)(void *ud, const lt_packet *packet);
} lt_bucket_filter;

/* Sets the filter from the next exchange on; all ranks must make the same change. Waits for an
 * exchange under way, after which the old filter is not called again. filter is copied; NULL
 * removes it. LT_EINVAL if filter->tail is negative or above LT_MAX_TAIL. */
LT_MUST lt_status lt_reducer_set_filter(lt_reducer *reducer, const lt_bucket_filter *filter);

#ifdef __cplusplus
}
#endif
#endif
