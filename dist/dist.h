/* dist.h - the door of dist: ranks that train one net together, each with its share of every batch.
 *
 * A rank is a thread or a process with a context of its own. What ties it to the others is its
 * group: the collectives, a thread that communicates while the rank computes, and the notice of a
 * rank that fails. On a group stands the reducer, which makes the gradients of all ranks one, while
 * backward goes on; the optimizers of the ranks then all do the same, so that their weights stay
 * the same bits without being sent.
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
    double timeout; /* seconds to wait for another rank; LT_GROUP_TIMEOUT */
    /* For ranks that are processes. MPI_Init and MPI_Finalize return only when all ranks have
     * called them, and have no timeout. in_mpi(ud, "MPI_Init") is called before such a call and
     * in_mpi(ud, NULL) after it, so that another thread can watch the call. That thread cannot
     * interrupt it; it can only end the process. NULL: no callback. */
    void (*in_mpi)(void *ud, const char *call);
    void *ud;
} lt_group_config;

static inline double lt_group_timeout(const lt_group_config *config)
{
    return config->timeout > 0 ? config->timeout : (double)LT_GROUP_TIMEOUT;
}

/* Groups for n ranks that are threads of this process: group[r] is for the thread of rank r, and
 * for no other. config may be NULL. New, n of them. */
LT_MUST lt_status lt_local_open(int n, const lt_group_config *config, lt_group **group);
/* Whether mpirun or srun has started this process as one of several, by its variables. */
LT_API bool lt_mpi_is_launched(void);
/* LT_EENV unless the plugin is installed that such processes need. */
LT_MUST lt_status lt_mpi_check(void);
/* The group of the processes that mpirun or srun has started, each a rank: all of them open it.
 * Those of a node work in shared memory; between nodes MPI carries the bytes, through the plugin
 * libluatrain-mpi.so: in the folder that the variable LUATRAIN_PLUGINS names, or where it was built
 * or installed. config may be NULL. New. LT_EENV without the plugin, or when it is of another
 * version. */
LT_MUST lt_status lt_mpi_open(const lt_group_config *config, lt_group **group);
/* This rank wants nothing more: LT_OK when the others have left too, those that are processes of
 * this node. Who still wants something of this rank fails, which then is the status here. */
LT_MUST lt_status lt_group_leave(lt_group *group);
/* Leaves and frees. NULL is fine. */
LT_API void lt_group_close(lt_group *group);

LT_API int lt_group_rank(const lt_group *group);
LT_API int lt_group_size(const lt_group *group);
/* Its number among those of its machine, from 0 on. */
LT_API int lt_group_local_rank(const lt_group *group);
/* The CPUs that are this rank's part of those it shares with other ranks; 1 or more. */
LT_API int lt_group_cpus(const lt_group *group);
/* The rank computes with so many threads. A wait may then burn a CPU that none of them needs, for
 * some microseconds, before it sleeps; until this is said it does not. */
LT_API void lt_group_set_threads(lt_group *group, int threads);

/* ==== Collectives ============================================================================= */

/* All ranks call the same ones in the same order, with equal counts and types: if not, LT_EDESYNC
 * tells which rank wanted what. Each waits until the others have come, for LT_EPEER when one does
 * not come in time, has failed or has left. After a failure all further ones fail alike. */

typedef struct lt_sum {  /* data = the sum over all ranks of scale * data, the same bits on all */
    const char *what;    /* "bucket 3": for messages. Borrowed */
    void *data;
    int64_t count;       /* elements */
    lt_dtype dtype;      /* a float dtype, or i64, whose scale is 1 */
    lt_dtype wire;       /* what f32 is rounded to before it travels: f32, f16 or bf16. Sums are in
                          * f32; what is beyond f16 becomes inf and stays so */
    double scale;        /* of this rank; applied before the rounding */
} lt_sum;

LT_MUST lt_status lt_group_allreduce(lt_group *group, const lt_sum *sum);
/* data of rank `root` to all. */
LT_MUST lt_status lt_group_broadcast(lt_group *group, const char *what, void *data, size_t bytes,
                                     int root);
LT_MUST lt_status lt_group_barrier(lt_group *group, const char *what);
/* From one rank to another, in order of sending; equal bytes. Others take no part. send() returns
 * once data may be changed. */
LT_MUST lt_status lt_group_send(lt_group *group, int to, const void *data, size_t bytes);
LT_MUST lt_status lt_group_receive(lt_group *group, int from, void *data, size_t bytes);

/* For benchmarks: the seconds that each of n allreduces of `count` f32 elements takes this rank, in
 * memory like that of gradients. by_mpi: MPI_Allreduce does them; LT_EENV when the ranks are
 * threads of one process. A collective. */
LT_MUST lt_status lt_group_time(lt_group *group, int64_t count, lt_dtype wire, bool by_mpi,
                                double *seconds, int n);

/* Bytes that this rank has sent to others, or that they have read from it, so far. */
LT_API uint64_t lt_group_bytes(const lt_group *group);

/* ==== In the background ======================================================================= */

/* Runs fn(ud) on the group's own thread, after what was started before; it may call collectives.
 * Those that the rank's thread calls wait until all that was started is done. */
LT_MUST lt_status lt_group_start(lt_group *group, lt_status (*fn)(void *ud), void *ud);
/* Until all is done. The first failure, with its message. */
LT_MUST lt_status lt_group_wait(lt_group *group);
/* A sum that does not wait for what was started, nor that for it: those of the rank's thread are in
 * step with those of the other ranks' threads alone. */
LT_MUST lt_status lt_group_allreduce_side(lt_group *group, const lt_sum *sum);

/* ==== Failure ================================================================================= */

/* This rank ends with this thread's message and code: the others fail with LT_EPEER, soon. */
LT_API void lt_group_fail(lt_group *group);
/* The first failure of the job: its rank, code and message; false when there is none. Every rank
 * has the same answer. text holds `bytes`. */
LT_API bool lt_group_failure(const lt_group *group, int *rank, lt_status *code, char *text,
                             size_t bytes);
/* After a failure, of ranks that are processes: whether this one is to tell the user. It returns
 * when the others have no more to say, and they when that one has closed its group; or after so
 * many seconds. */
LT_API bool lt_group_is_reporter(lt_group *group, double seconds);
/* Where the rank is, for messages of others that miss it: "train.lua:31", and the step. Cheap. */
LT_API void lt_group_set_location(lt_group *group, const char *where, int64_t step);

/* LT_EDESYNC with the first line that a rank has otherwise than rank 0, unless all have the same
 * text. */
LT_MUST lt_status lt_group_compare(lt_group *group, const char *what, const char *text);
/* The same for n numbers; n must be equal on all ranks. Numbers may differ by `tolerance` times the
 * largest of rank 0, since the last bits of computed numbers depend on the CPU. */
LT_MUST lt_status lt_group_compare_numbers(lt_group *group, const char *what,
                                           const double *numbers, int n, double tolerance);

/* ==== The reducer ============================================================================= */

/* Makes the gradients of all ranks one, on the hooks of a context's backward: the mean over the
 * global batch, of which each rank has gone through its share. Parameters are sent in buckets,
 * spans of the gradient arena; the last ones, whose gradients come first, go first, and while
 * backward goes on. In front of them goes the record of the step, a few numbers of each rank: which
 * parameters it uses, its loss, the sums of its batch norm statistics, its signature to stop.
 *
 * A step may have several backwards, which add up. The last one sends. If nobody says which one
 * that is (lt_reducer_expect_backwards()), it is taken to be as in the steps before; the first step
 * sends when an optimizer wants the gradients. A parameter that only some ranks have used counts as
 * zero on the others; one that none has used is not sent, and not updated. Ranks come to a batch
 * norm for the first time in the same step and the same order, make the same optimizers in one
 * order, and take the same steps of them; or it is LT_EDESYNC.
 *
 * It is also LT_EDESYNC when ranks take a step of an optimizer with different settings, which the
 * record of the next step shows; when they have batches of different rows or of different data
 * (lt_reducer_set_data()); and when different parameters are frozen at the first backward of a
 * step. If only some ranks have written to parameters since the last record (as lt_fill() does;
 * writes through lt_data() are not seen), all ranks compare the values. The record has digests of
 * all this, so it costs nothing while the ranks agree.
 *
 * Gradients on an accelerator stay there, if each rank has one of its own and there is a library
 * by which they reach each other, as NCCL: it adds in the dtype that travels. If not, they are
 * summed on the CPU: each bucket is brought over when it is complete and sent back, while the
 * accelerator goes on. Nobody waits in backward; the optimizer's step waits until the last bucket
 * was summed, for all ranks decide alike whether it is applied.
 *
 * Between backward and the optimizer a gradient is this rank's own, or that of all if it was sent:
 * lt_grad() and lt_zero_grad() wait for that. To forget one then is for all ranks to do, or their
 * weights part: that is not compared. */
typedef struct lt_reducer lt_reducer;

typedef enum lt_sum_backend {      /* where the gradients of accelerators are summed */
    LT_SUM_BACKEND_AUTO,             /* on them, if that can be; rank 0 logs why not */
    LT_SUM_BACKEND_HOST,             /* on the CPU */
    LT_SUM_BACKEND_NCCL              /* on them, or it is an error */
} lt_sum_backend;

typedef struct lt_reducer_config { /* zero means default */
    size_t first_bucket, bucket;   /* bytes; 1 MiB for the first, at most 8 for others */
    lt_dtype wire;                 /* of f32 gradients; the same on all ranks */
    lt_sum_backend sum_backend;                  /* the same on all ranks */
    bool blocking;                 /* nothing is sent before the optimizer wants it */
    bool no_sync; /* nothing is sent at all, and weights go apart: to measure what
                   * it costs to be together */
    int vranks;                    /* a step has so many shards, a power of two: each rank goes
                                    * through its part of them one after the other, with its share
                                    * set, backward and the optimizer's step for each, of which only
                                    * the last is one. Weights are then the same bits for any number
                                    * of ranks. LT_EUSAGE when a backward follows that step.
                                    * 0: each rank has one, overlapping with backward */
} lt_reducer_config;

/* Takes the slots of ctx's backward. The group is used from now on, and outlives the reducer.
 * config may be NULL. New. NULL with LT_ENOMEM, or LT_EUSAGE for vranks that the ranks cannot
 * share, that are to travel in halves, or where not each node has as many ranks, in a row; and for
 * a fault of a rank that is not among them. LT_EUNSUPPORTED for vranks where ctx is not on the
 * CPU. */
LT_API lt_reducer *lt_reducer_new(lt_ctx *ctx, lt_group *group, const lt_reducer_config *config);
LT_API void lt_reducer_free(lt_reducer *reducer);
/* From the next step on, with other buckets and at other times, on all ranks alike. wire, sums
 * and vranks stay as they are. */
LT_MUST lt_status lt_reducer_configure(lt_reducer *reducer, const lt_reducer_config *config);
/* The gradients of these parameters, which are placed, are to be made one. A collective: they get
 * the values of rank 0. Those that it has already are passed over. LT_EUSAGE for others between
 * the shards of a step. The first time the ranks find out where gradients are summed: LT_EENV if
 * that cannot be as config.sums wants it, LT_EDESYNC if wire or sums differ between ranks. */
LT_MUST lt_status lt_reducer_add(lt_reducer *reducer, lt_tensor *const *params, int n);
/* What this rank, or its shard, has of the batch from now on: rows of so many. Before the first
 * call each rank has an equal share. A rank with 0 rows must still go through some, for nothing. */
LT_API void lt_reducer_set_share(lt_reducer *reducer, int64_t rows, int64_t total);

/* A digest of the data that this rank's batches are from. It must be the same on all ranks. 0: not
 * known. */
LT_API void lt_reducer_set_data(lt_reducer *reducer, uint32_t digest);
/* LT_EDESYNC unless all ranks have taken the last step with the same settings. A collective, for
 * after the last step: the settings of every other step are compared in the step that follows. */
LT_MUST lt_status lt_reducer_compare(lt_reducer *reducer);

/* For lt_set_allreduce(), with the reducer as ud. All ranks must go through as many such sums in
 * each step. LT_EUSAGE with vranks, unless each rank has one: the others have not come yet. */
LT_MUST lt_status lt_reducer_sum(void *reducer, double *numbers, int64_t n, bool backward);

/* Each step has so many backwards from now on. 0, as in the beginning: to be found out; then a step
 * with more of them than any before must have them on all ranks. */
LT_API void lt_reducer_expect_backwards(lt_reducer *reducer, int backwards);

typedef struct lt_reduced_step { /* the last step that was made one */
    double loss;            /* of the global batch, all backwards of the step added */
    int stop_reason;        /* of a rank that is to stop, or 0; see lt_stop() */
    int buckets;            /* sent */
    double waited;          /* seconds that the optimizer had to wait for */
} lt_reduced_step;
LT_API lt_reduced_step lt_reducer_last(const lt_reducer *reducer);

typedef struct lt_bucket { /* in the last step; seconds since its last backward began */
    size_t bytes;          /* of gradients that were summed; 0: none were, and no time counts */
    double ready;          /* this rank had the last of them; an accelerator was given it */
    double began, ended;   /* the allreduce */
} lt_bucket;
/* One of them, from 0 on in the order of sending. False: there are not so many. */
LT_API bool lt_reducer_bucket(const lt_reducer *reducer, int i, lt_bucket *bucket);

/* ==== The bucket filter ======================================================================= */

/* What amp lays over the buckets. With each of them some numbers go to all ranks and come back as
 * their sums, in the same allreduce: a decision that all ranks take alike costs no collective of
 * its own. Where gradients travel in f16, a bucket may be multiplied by a power of two for its
 * way, so that its values are such as f16 holds well; and if the sum shows that this was too
 * much, it is sent again. */
enum {
    LT_MAX_TAIL = 256,  /* numbers */
    LT_MAX_RESENDS = 4  /* of a bucket in a step */
};

typedef struct lt_packet {      /* a bucket on its way */
    int bucket;
    lt_tensor *const *x;        /* n parameters whose gradients this rank has in it. Borrowed */
    int n;
    lt_grad_stats stats; /* in theirs, as far as it decides about the step: if an optimizer
                          * has the parameter, and some rank has added to it */
    double largest;             /* in_f16: magnitude of what is finite in all of theirs */
    const void *data;           /* (count) elements: its gradients; for unpack() those of all. NULL:
                                 * they stay on an accelerator */
    int64_t count;
    lt_dtype dtype;
    bool in_f16;                /* it travels in that, which overflows at 2^16 */
    int sent;                   /* times, before this one */
    int exponent;               /* of two: pack() may set it, for f16; the same on all ranks */
    float tail[LT_MAX_TAIL];   /* pack() writes, unpack() finds the sums: whole numbers, of which
                                 * bf16 holds the sums up to 256 and f16 up to 2048 */
} lt_packet;

typedef struct lt_bucket_filter {
    void *ud;
    int tail;                   /* numbers that are used of it */
    /* What is in a gradient. On the rank's thread, when x's gradient of a backward is complete, its
     * hooks have been called and all that earlier backwards have left is in grad, which is on the
     * CPU; not on a rank, nor in a shard, without rows. May be NULL. */
    lt_grad_stats (*measure)(void *ud, lt_tensor *x, lt_tensor *grad);
    /* The same of one that it was not called for, being on an accelerator or left by an earlier
     * step. grad is borrowed for this call, on the CPU, and may be a copy. On the group's thread
     * before pack(), with vranks on the rank's. A bucket that stays on an accelerator is looked at
     * there instead of this and of measure(). NULL: nothing is found. */
    lt_grad_stats (*look)(void *ud, const lt_tensor *grad);
    /* On the group's thread, before the first bucket of a step; once more when all are sent again,
     * as more was added to them. May be NULL. */
    void (*start)(void *ud);
    /* On the group's thread, in the order of sending. A rank without rows has n = 0, and zeros.
     * Without pack() the filter only measures, and does what done() does. */
    void (*pack)(void *ud, lt_packet *packet);
    /* True: once more, from pack() on. The same on all ranks. */
    bool (*unpack)(void *ud, const lt_packet *packet);
    /* On the rank's thread, when an optimizer wants gradients and all buckets have come. The same
     * on all ranks. Not between shards of a step, of which vranks has several. NULL: LT_APPLIED. */
    lt_step_status (*done)(void *ud, lt_ctx *ctx);
} lt_bucket_filter;

/* From the next sum of buckets on, on all ranks alike; copied. NULL: none. The old one is not
 * called any more. LT_EINVAL: tail is too much. */
LT_MUST lt_status lt_reducer_set_filter(lt_reducer *reducer, const lt_bucket_filter *filter);

#ifdef __cplusplus
}
#endif
#endif
