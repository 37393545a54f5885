/* dist.h - public header of dist: data-parallel training. Each rank computes a part of every
 * batch.
 *
 * A rank is a thread or a process with its own context. A group connects it to the other ranks: it
 * provides collectives, a thread that communicates while the rank computes, and failure notices.
 * The reducer works on top of a group and averages the gradients of all ranks during backward. The
 * optimizers of all ranks then take the same step, so the weights stay bit-identical on all ranks
 * without being sent.
 *
 * Threads. A group and a reducer belong to the thread of their rank. A task started with
 * lt_group_start() may also call collectives. Functions that any thread may call say so.
 */
#ifndef LUATRAIN_DIST_H
#define LUATRAIN_DIST_H

#include "autograd/autograd.h"
#include "dist/async.h"
#include "dist/pipeline.h"
#include "dist/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ==== Groups ================================================================================== */

typedef struct lt_group lt_group;

enum { LT_DEFAULT_TIMEOUT = 120 }; /* seconds */

typedef struct lt_group_config { /* zero means default */
    double timeout; /* seconds to wait for another rank; the default is LT_DEFAULT_TIMEOUT */
    /* For ranks that are processes. MPI_Init and MPI_Finalize return only when all ranks have
     * called them, and they have no timeout. The thread that opens or closes the group calls
     * in_mpi(ud, "MPI_Init") or in_mpi(ud, "MPI_Finalize") before such a call and in_mpi(ud, NULL)
     * after it, so that another thread can watch it. That thread cannot interrupt the MPI call; it
     * can only end the process. NULL for no callback. */
    void (*in_mpi)(void *ud, const char *call);
    void *ud; /* borrowed until the group is closed */
} lt_group_config;

/* The timeout in seconds. config must not be NULL. */
static inline double lt_group_timeout(const lt_group_config *config)
{
    return config->timeout > 0 ? config->timeout : (double)LT_DEFAULT_TIMEOUT;
}

/* Opens n groups, for ranks that are threads of this process: group (n), all new. Only the thread
 * of rank r may use group[r]. config is copied and may be NULL. LT_ENOMEM, or LT_EUSAGE if n is not
 * 1 to 256. On failure no group is open. */
LT_MUST lt_status lt_local_open(int n, const lt_group_config *config, lt_group **group);
/* Whether the environment variables of mpirun or srun say that this process is one of several. */
LT_API bool lt_mpi_is_launched(void);
/* LT_EENV if the MPI plugin is not installed. Ranks that are processes need it. */
LT_MUST lt_status lt_mpi_check(void);
/* Opens the group of the processes that mpirun or srun has started. Each process is a rank, and all
 * must call this. Processes on one node use shared memory. Between nodes, MPI carries the bytes.
 * MPI is used through the plugin libluatrain-mpi.so, which is searched for first in the folder that
 * LUATRAIN_PLUGINS names, then where it was built or installed. config is copied and may be NULL.
 * New. LT_EENV if the plugin is missing, has another version, or sees a different number of
 * processes than were started, or if MPI cannot be initialized or does not support
 * MPI_THREAD_SERIALIZED; LT_EUSAGE for more than 256 ranks on a node; LT_EPEER or LT_ENOMEM. */
LT_MUST lt_status lt_mpi_open(const lt_group_config *config, lt_group **group);

/* An elastic job, for asynchronous training: workers are processes that join a server, leave it or
 * are lost, and come back, at any time. The server is rank 0 and a worker itself. A worker gets the
 * lowest free rank. The group has LT_MAX_JOINED ranks, most of which are usually absent.
 *
 * Workers cannot take part in collectives that need all ranks at once: sums, sends and splits fail
 * with LT_EUSAGE. A barrier returns at once. A broadcast by rank 0 does not wait for the workers:
 * its bytes are kept, and each worker gets all of them in their order, even if it joins later. So
 * lt_group_compare() compares a worker with rank 0, and fails on that worker only.
 *
 * Messages go over ZeroMQ, through the plugin libluatrain-zmq.so, encrypted and only between
 * holders of the job's key. */
enum { LT_MAX_JOINED = 256 };

typedef struct lt_join_config {
    const char *address; /* of the server, "HOST:PORT". On the server, without HOST it listens on
                          * all interfaces, and port 0 is a free one. Borrowed for the call */
    const char *key;     /* file of the key, which only its owner may read. The server makes it if
                          * it does not exist; NULL: the key is new and in no file. Required on a
                          * worker. Borrowed for the call */
    double timeout;      /* seconds of silence after which a process is lost; 0 means the default */
} lt_join_config;

/* Opens the group of an elastic job on its server. New. LT_EUSAGE for a malformed address; LT_EENV
 * if the plugin is missing, the address is in use or the key cannot be read; LT_ENOMEM. */
LT_MUST lt_status lt_serve_open(const lt_join_config *config, lt_group **group);
/* Joins an elastic job. Waits for the server at most config->timeout seconds. New. LT_EUSAGE as
 * above, or if the server refuses the worker; LT_EENV as above, or if the server has another key;
 * LT_EDONE if the job is over; LT_EPEER if the server does not answer; LT_ENOMEM. */
LT_MUST lt_status lt_join_open(const lt_join_config *config, lt_group **group);
/* On the server, writes the key to a file that only its owner can read, if it is in no file yet.
 * LT_EENV. */
LT_MUST lt_status lt_serve_write_key(lt_group *group, const char *path);
/* The server's address, "HOST:PORT". NULL if the job is not elastic. Borrowed. */
LT_API const char *lt_serve_address(const lt_group *group);
LT_API bool lt_group_is_elastic(const lt_group *group); /* whether the job is elastic */

/* Waits for all started tasks. If one has failed, returns its failure and does nothing else. If
 * ranks are processes, the function then declares that this rank makes no more calls, and waits
 * without a timeout until all ranks of this node have left or one has failed. Later collectives
 * with this rank fail. Returns the failure of the job, if there is one. */
LT_MUST lt_status lt_group_leave(lt_group *group);
/* Waits for all started tasks, leaves and frees the group. NULL is allowed. If ranks are processes,
 * all must call it: it waits for the ranks of all nodes, and finalizes MPI if lt_mpi_open()
 * initialized it. After a failure it does not finalize MPI or free memory that MPI may still
 * access, and the process should end. */
LT_API void lt_group_close(lt_group *group);

LT_API int lt_group_rank(const lt_group *group); /* number of this rank, from 0 */
LT_API int lt_group_size(const lt_group *group); /* number of ranks */
/* The number of this rank among the ranks of its machine, from 0. */
LT_API int lt_group_local_rank(const lt_group *group);
/* The number of CPUs of this rank, at least 1. A CPU that n ranks may use counts as 1/n for each of
 * them. */
LT_API int lt_group_cpus(const lt_group *group);
/* Sets the number of threads that this rank computes with. A wait then spins for tens of
 * microseconds before it sleeps, unless that would take a CPU from one of these threads. Before
 * this call, waits do not spin. */
LT_API void lt_group_set_threads(lt_group *group, int threads);

/* ==== Collectives ============================================================================= */

/* All ranks must call the same collectives in the same order, with the same `what`, count or bytes,
 * dtype, wire and root. If they do not, the result is LT_EDESYNC, and the message names two ranks
 * and their calls. A collective waits for the other ranks. It returns LT_EPEER if one of them does
 * not arrive before the timeout, has failed or has left; and LT_EENV if memory of another rank
 * cannot be mapped. After a failure the contents of data are undefined, and all further collectives
 * fail with the same cause. For invalid arguments, a call returns LT_EINVAL at once and has no
 * other effect. All data is in CPU memory. */

typedef struct lt_sum { /* data = sum over all ranks of scale * data, bit-identical on all ranks */
    const char *what;   /* name for messages, such as "bucket 3"; borrowed for the call */
    void *data;         /* (count) */
    int64_t count;      /* elements */
    lt_dtype dtype;     /* a float dtype, or i64 with scale 1 */
    /* dtype in which data travels. f32 data may travel in f32, f16 or bf16, and is rounded to that
     * dtype before it is sent. All other data travels in its own dtype. f64 and i64 are added in
     * their own dtype, all other dtypes in f32. Overflow in f16 becomes inf, and i64 wraps */
    lt_dtype wire;
    double scale; /* applied before rounding; may differ between ranks */
} lt_sum;

LT_MUST lt_status lt_group_allreduce(lt_group *group, const lt_sum *sum);
/* Copies `bytes` bytes of data from rank `root` to data on all other ranks. */
LT_MUST lt_status lt_group_broadcast(lt_group *group, const char *what, void *data, size_t bytes,
                                     int root);
/* Waits until all ranks have called it. */
LT_MUST lt_status lt_group_barrier(lt_group *group, const char *what);
/* Sends data to rank `to`, or receives data from rank `from`. Other ranks take no part. Messages
 * between two ranks arrive in the order of sending. lt_group_send() may block until the receiver
 * calls lt_group_receive(). After it returns, data may be reused. LT_EDESYNC if the numbers of
 * bytes differ, LT_EINVAL if `to` or `from` is this rank; other errors as for collectives. */
LT_MUST lt_status lt_group_send(lt_group *group, int to, const void *data, size_t bytes);
LT_MUST lt_status lt_group_receive(lt_group *group, int from, void *data, size_t bytes);

/* For benchmarks: times n allreduces of `count` f32 elements, in the same kind of memory as
 * gradients on the CPU. seconds (n) receives the time of each allreduce on this rank, in seconds.
 * If by_mpi is true, uses MPI_Allreduce instead, always in f32. A collective. LT_EENV for by_mpi if
 * the ranks are threads or the plugin has no allreduce; LT_ENOMEM. */
LT_MUST lt_status lt_group_time_allreduce(lt_group *group, int64_t count, lt_dtype wire,
                                          bool by_mpi, double *seconds, int n);

/* Sets *seconds to the shortest of five measured times of a message of `bytes` bytes from the first
 * rank to the last rank; 0 for one rank. A collective. For the planner of pipelines. */
LT_MUST lt_status lt_group_time_message(lt_group *group, size_t bytes, double *seconds);

/* Total bytes that this rank has sent to other ranks or exchanged with them in shared memory, not
 * counting sums on accelerators. Call it when no task runs. */
LT_API uint64_t lt_group_bytes(const lt_group *group);

/* ==== In the background ======================================================================= */

/* Starts a task: fn(ud) runs on the group's own thread, after all tasks started before. fn may call
 * collectives. If the rank's thread calls a collective, that call waits until all started tasks are
 * done, and returns their failure. ud must stay valid until the task is done. Blocks while 64 tasks
 * are queued. LT_ENOMEM. */
LT_MUST lt_status lt_group_start(lt_group *group, lt_status (*fn)(void *ud), void *ud);
/* Waits until all started tasks are done. Returns the failure of the first task that ever failed in
 * this group, with its message. Must not be called in a task. */
LT_MUST lt_status lt_group_wait(lt_group *group);
/* An allreduce that is independent of started tasks: neither waits for the other. All ranks must
 * call it, and it matches only other calls of lt_group_allreduce_side(), in their order. */
LT_MUST lt_status lt_group_allreduce_side(lt_group *group, const lt_sum *sum);

/* ==== Failure ================================================================================= */

/* Declares that this rank has failed, with the error code and message of this thread. Soon
 * afterwards the waits of the other ranks fail: with LT_EDESYNC if this rank's code is LT_EDESYNC,
 * otherwise with LT_EPEER. Does nothing if the job has already failed. Any thread may call it. */
LT_API void lt_group_fail(lt_group *group);
/* Gets the rank, code and message of the first failure that this node knows of, which may be on
 * another node. All ranks of a node get the same failure. The message is cut off to fit in text,
 * which has `bytes` bytes. Returns false, and sets nothing, if there is no failure. Any thread may
 * call it. */
LT_API bool lt_group_failure(const lt_group *group, int *rank, lt_status *code, char *text,
                             size_t bytes);
/* After a failure: whether this rank reports it to the user. One rank of each node does. On that
 * rank, the function waits until every other rank of the node has called it, has left its group or
 * is lost. On the other ranks, it waits until the reporting rank has left its group. In both cases
 * it returns after `seconds` at the latest. Any thread may call it. */
LT_API bool lt_group_is_reporter(lt_group *group, double seconds);
/* Sets the location of this rank, such as "train.lua:31", and its step, from 1. Other ranks show
 * them in messages when this rank is missing. `where` is copied, up to 63 bytes. The call is cheap,
 * and any thread may make it. */
LT_API void lt_group_set_location(lt_group *group, const char *where, int64_t step);

/* Checks that all ranks have the same text. If they do not, fails with LT_EDESYNC and the first
 * line that differs from rank 0. A collective; `what` names the text in messages. LT_ENOMEM. */
LT_MUST lt_status lt_group_compare(lt_group *group, const char *what, const char *text);
/* Like lt_group_compare(), for numbers (n); n must be equal on all ranks. Numbers may differ by
 * `tolerance` times the largest finite magnitude on rank 0, because the last bits of computed
 * numbers depend on the CPU. NaN equals NaN. */
LT_MUST lt_status lt_group_compare_numbers(lt_group *group, const char *what, const double *numbers,
                                           int n, double tolerance);
/* LT_EDESYNC unless all ranks have taken the last optimizer step with the same settings; LT_ENOMEM.
 * A collective. With a reducer, call it after the final step: the settings of every other step are
 * compared in the next step. */
LT_MUST lt_status lt_group_compare_settings(lt_group *group, lt_ctx *ctx);

/* ==== The reducer ============================================================================= */

/* Averages the gradients of all ranks, as the exchange of a context (autograd/step.h). The result
 * is the gradient of the mean loss over the global batch, of which each rank computes a part.
 *
 * Gradients travel in buckets, which are spans of the gradient arena. Backward produces the
 * gradients of the last parameters first, so their buckets are sent first, while backward still
 * runs. The step record is sent before the buckets. It contains a few numbers of each rank: the
 * parameters it uses, its loss, the sums of its batch-norm statistics and its stop request.
 *
 * A step may have several backward passes, whose gradients add up. The exchange starts in the last
 * pass. A pipeline knows which one that is. Otherwise, lt_reducer_expect_backwards() sets the
 * number of passes. By default, the reducer expects the largest number of passes that any rank has
 * run in a step so far; in the first step, the exchange starts when an optimizer needs the
 * gradients. If only some ranks have used a parameter, its gradient counts as zero on the others. A
 * parameter that no rank has used is not updated, and a bucket of only such parameters is not sent.
 *
 * The ranks must agree on the following, or the step fails with LT_EDESYNC:
 * - They run each batch norm for the first time in the same step and in the same order.
 * - They create the same optimizers in the same order and take the same steps with the same
 *   settings. Settings are compared in the record of the next step.
 * - Their global batches have the same number of rows and come from the same data
 *   (lt_reducer_set_data()).
 * - The same parameters are frozen at the first backward of a step.
 * If some ranks have written to parameters or running statistics more often than others since the
 * last record, all ranks compare the values. lt_fill(), for example, is counted; a write through
 * lt_data() is not. For these checks the record contains only digests, so the checks need no
 * further communication while the ranks agree.
 *
 * Gradients on accelerators are summed there if each rank has its own accelerator and a library
 * such as NCCL connects them; for NCCL, ranks must be processes. Such a library adds in the wire
 * dtype. Otherwise each bucket is copied to the CPU when it is complete, summed there and copied
 * back, while the accelerator continues. Backward does not wait for buckets, except that a backward
 * pass beyond the expected number first waits for the exchange. The optimizer step waits for the
 * last bucket, because all ranks must make the same decision on whether to apply the step.
 *
 * Between backward and the optimizer step, a gradient that has been sent is the average of all
 * ranks, and a gradient that has not been sent is this rank's own. lt_grad() and lt_zero_grad()
 * wait for a running exchange. If one rank discards gradients between backward and the step, all
 * ranks must discard the same gradients, or their weights diverge. This is not checked. */
typedef struct lt_reducer lt_reducer;

/* where gradients on accelerators are summed */
typedef enum lt_sum_backend {
    /* on accelerators if possible. If every rank computes on an accelerator, but gradients are not
     * summed there, rank 0 logs why */
    LT_SUM_BACKEND_AUTO,
    LT_SUM_BACKEND_HOST, /* on the CPU */
    /* on accelerators; LT_EENV if that is not possible. NCCL can deadlock between ranks that are
     * threads, so they also need CUDA_MODULE_LOADING=EAGER in the environment. They may still
     * deadlock if memory is allocated or freed while another rank has begun a sum */
    LT_SUM_BACKEND_NCCL
} lt_sum_backend;

typedef struct lt_reducer_config { /* the same on all ranks; zero means default */
    /* maximum size in bytes of the first bucket that is sent, and of all others; defaults: 1 MiB
     * and 8 MiB. A larger parameter gets a bucket of its own */
    size_t first_bucket, bucket;
    lt_dtype wire; /* dtype in which f32 gradients travel: f32, f16 or bf16 */
    lt_sum_backend sum_backend;
    bool server;   /* rank 0 sums each bucket, as a synchronous parameter server: the others send it
                    * their gradients and get the sum back, with the bits of an allreduce on one
                    * node. A baseline; not with LT_SUM_BACKEND_NCCL */
    bool blocking; /* send nothing before the optimizer step */
    /* the optimizer step applies the sums of the step before, while those of this step are on their
     * way until the next one. Only the record is summed at once. The first step has nothing to
     * apply: it changes no parameter. A parameter that was frozen since is not updated. The sums of
     * the last step are not applied, unless the program saves them with lt_reducer_delayed() and
     * continues later. They need as much memory as the gradients. A step fails with LT_EUSAGE if
     * the context has had several optimizers. Not with a loss scale. blocking has no effect */
    bool delay;
    /* send nothing at all, so the weights of the ranks diverge. For measuring the cost of
     * synchronization */
    bool no_sync;
    /* number of shards of a step, a power of two up to 256 and a multiple of the number of ranks;
     * or 0. A rank computes its shards one after the other: for each it sets the share, runs
     * backward and calls the optimizer step. Only the call for the last shard takes a step; before
     * that, the step status is LT_ACCUMULATING. Weights are then bit-identical for any number of
     * ranks. After the optimizer step of a shard, another backward of this shard fails with
     * LT_EUSAGE. 0 means one shard for each rank; sending then overlaps with backward */
    int vranks;
} lt_reducer_config;

/* Makes a reducer, which becomes the exchange of ctx (lt_set_part()). All ranks must make one, but
 * do not wait for each other. ctx is kept; group is borrowed and must outlive the reducer. config
 * is copied and may be NULL. New. NULL with LT_ENOMEM, LT_EINVAL if ctx has an exchange, or with
 * LT_EUSAGE in these cases: vranks is not a valid number of shards; vranks is used with a wire
 * other than f32, on an accelerator, or on nodes that do not have the same number of consecutive
 * ranks; server is used with LT_SUM_BACKEND_NCCL or more than 256 ranks; delay is used with one
 * rank, server or vranks, or on an accelerator; the injected fault of ctx is a latency, or names a
 * rank that does not exist. */
LT_API lt_reducer *lt_reducer_new(lt_ctx *ctx, lt_group *group, const lt_reducer_config *config);
/* Waits for the running gradient exchange, removes the reducer from ctx and frees it. If gradients
 * are summed on accelerators, all ranks must call it: it waits at most 10 s until they have all
 * disconnected. NULL is allowed. */
LT_API void lt_reducer_free(lt_reducer *reducer);
LT_API lt_ctx *lt_reducer_ctx(const lt_reducer *reducer);   /* borrowed */
LT_API lt_dtype lt_reducer_wire(const lt_reducer *reducer); /* the wire dtype of its config */
LT_API bool lt_reducer_has_delay(const lt_reducer *reducer);
/* Changes the bucket sizes, blocking, delay and no_sync from the next step on. Call it between
 * steps; all ranks must make the same change. wire, sum_backend, server and vranks keep their
 * values. Without delay, sums that no step has applied are discarded. Waits for a running exchange
 * and returns its failure, LT_EUSAGE as above for delay, or LT_ENOMEM. */
LT_MUST lt_status lt_reducer_configure(lt_reducer *reducer, const lt_reducer_config *config);
/* Adds params (n), which must be placed, to the reducer and broadcasts their values from rank 0.
 * Parameters that the reducer already has are skipped. New ones are kept. A collective: all ranks
 * must add the same parameters in the same order. LT_EINVAL for a parameter that is not placed,
 * LT_EUSAGE for new parameters between the shards of a step, LT_ENOMEM. The first call also decides
 * where gradients are summed: LT_EENV if config.sum_backend is not possible, LT_EDESYNC if ranks
 * differ in wire, sum_backend, server, delay or vranks. */
LT_MUST lt_status lt_reducer_add(lt_reducer *reducer, lt_tensor *const *params, int n);
/* Sets the share of the next batches: this rank, or with vranks its next shard, has `rows` of the
 * `total` rows of the global batch. total must be greater than 0, or the gradients are undefined.
 * total must be the same on all ranks, which compare it in the next step. The rows of all ranks and
 * shards, each 0 or more, must add up to total; this is not checked. Call this function before
 * backward; with vranks, call it for each shard. Before the first call, all ranks have equal
 * shares. A rank with 0 rows must still run backward on some rows, which do not count. */
LT_API void lt_reducer_set_share(lt_reducer *reducer, int64_t rows, int64_t total);

/* Sets a digest of the data that this rank trains on, or 0 if the digest is unknown. It must be the
 * same on all ranks. */
LT_API void lt_reducer_set_data(lt_reducer *reducer, uint32_t digest);

/* A function for lt_set_allreduce(), with the reducer as ud: replaces numbers (n) with their sums
 * over all ranks; see lt_allreduce_fn. A collective, independent of a running exchange: all ranks
 * must make the same calls in the same order. With no_sync, returns LT_OK and changes nothing.
 * LT_EUSAGE if vranks gives a rank more than one shard, because the later shards have not been
 * computed yet. */
LT_MUST lt_status lt_reducer_allreduce(void *reducer, double *numbers, int64_t n, bool backward);

/* Sets the number of backward passes of this rank in each step from now on; it may differ between
 * ranks. 0, the default, means the largest number of passes that any rank has run in a step so far.
 * With 0, if one rank runs more passes than this number in a step, all ranks must do so. */
LT_API void lt_reducer_expect_backwards(lt_reducer *reducer, int backwards);

typedef struct lt_reduced_step { /* the last step whose gradients were exchanged */
    double loss;     /* mean over the global batch, summed over the backward passes of the step */
    int stop_reason; /* stop reason of the first rank that has one, or 0; see lt_stop() */
    int buckets;     /* number of buckets sent in its last exchange */
    double waited;   /* seconds that the optimizer step waited for the exchange */
    /* seconds that all optimizer steps so far have waited for exchanges, and their passes in
     * lt_reducer_allreduce() */
    double total_waited;
} lt_reduced_step;
/* The last step; all zeros before the first step. Call it between steps. */
LT_API lt_reduced_step lt_reducer_last(const lt_reducer *reducer);

/* With a delay, for checkpoints: the sum of a parameter's gradient in the last step, which the next
 * step will apply. Waits for the exchange. *is_set: whether there is a sum; if not, the next step
 * does not update the parameter. A program that continues writes the sum into the tensor, and calls
 * lt_reducer_set_delayed(). The sum is equal on all ranks. New: a tensor over the memory of the
 * reducer, which is only valid until the next step. NULL with LT_EINVAL if the reducer has no delay
 * or does not have the parameter, LT_ENOMEM, or the failure of the exchange. */
LT_API lt_tensor *lt_reducer_delayed(lt_reducer *reducer, lt_tensor *param, bool *is_set);
LT_MUST lt_status lt_reducer_set_delayed(lt_reducer *reducer, lt_tensor *param, bool is_set);

/* A bucket of the last step. Times are in seconds since the last backward of the step began. */
typedef struct lt_bucket {
    size_t bytes;        /* bytes of gradients that were summed; if 0, the times have no meaning */
    double ready;        /* when backward completed the bucket or, on an accelerator, queued it */
    double began, ended; /* when the allreduce began and ended */
} lt_bucket;
/* Describes bucket i, from 0, in the order of sending. False if there is no such bucket. Call it
 * between steps, and not with a delay. */
LT_API bool lt_reducer_bucket(const lt_reducer *reducer, int i, lt_bucket *bucket);

/* ==== The bucket filter ======================================================================= */

/* Callbacks that measure, pack and unpack each bucket; amp uses them. A bucket carries a tail of
 * numbers in its allreduce, and each rank gets their sums. This lets all ranks make the same
 * decision about a step, in lt_step_part.decide, without a further collective. If gradients travel
 * in f16, the filter may multiply a bucket by a power of two, so that its values fit f16. If the
 * sum still overflows, the filter can have the bucket sent again. */
enum {
    LT_MAX_TAIL = 256, /* numbers in a tail */
    LT_MAX_RESENDS = 4 /* times that one bucket is sent again in an exchange */
};

typedef struct lt_packet { /* a bucket in an allreduce */
    lt_ctx *ctx;           /* the context of this rank. Borrowed */
    int bucket;            /* index, in the order of sending */
    lt_tensor *const *x;   /* (n) its parameters that have a gradient on this rank. Borrowed */
    int n;
    /* statistics of the gradients that decide whether the step is applied. These are the gradients
     * whose parameter belongs to an optimizer and to which some rank has added in this step */
    lt_grad_stats stats;
    double largest; /* if in_f16: largest finite magnitude in all gradients of x */
    /* (count) gradients of this rank; in unpack(), the sums over all ranks, after division by
     * 2^exponent. NULL if they stay on an accelerator */
    const void *data;
    int64_t count; /* elements, including padding between parameters */
    lt_dtype dtype;
    bool in_f16; /* f32 gradients travel in f16, which overflows at 2^16 */
    int sent;    /* number of times that the bucket has been sent before */
    /* the bucket is multiplied by 2^exponent before it is sent. If in_f16, pack() may set exponent,
     * to the same value on all ranks */
    int exponent;
    /* pack() writes whole numbers; in unpack(), tail contains their sums over all ranks. Sums are
     * exact up to 256 in bf16 and up to 2048 in f16 */
    float tail[LT_MAX_TAIL];
} lt_packet;

typedef struct lt_bucket_filter {
    void *ud; /* borrowed until another filter is set or the reducer is freed */
    int tail; /* how many numbers of lt_packet.tail are used; the same on all ranks */
    /* Returns the statistics of a gradient. Called on the rank's thread when backward has completed
     * the gradient of x and its hooks have run. grad is on the CPU and includes the gradients of
     * earlier backward passes. x and grad are borrowed. Not called for a rank or shard without
     * rows. May be NULL. */
    lt_grad_stats (*measure)(void *ud, lt_tensor *x, lt_tensor *grad);
    /* Like measure(), for gradients that measure() has not measured: gradients that were on an
     * accelerator, gradients left over from an earlier step, or all gradients if measure is NULL.
     * grad is on the CPU, may be a copy, and is borrowed for this call. Called on the group's
     * thread before pack(), or with vranks on the rank's thread. If measure_late is set, a bucket
     * that is summed on accelerators is measured there, and neither measure() nor measure_late() is
     * called for it. NULL if nothing needs to be measured. */
    lt_grad_stats (*measure_late)(void *ud, const lt_tensor *grad);
    /* Called on the group's thread before the first bucket of an exchange. A step has a second
     * exchange if gradients were added after the first. May be NULL. */
    void (*start)(void *ud);
    /* Called on the group's thread for each bucket, in the order of sending. On a rank without
     * rows, n is 0 and data is all zeros. If pack is NULL, buckets have no tail and unpack() is not
     * called, but the other callbacks are. */
    void (*pack)(void *ud, lt_packet *packet);
    /* Called on the group's thread after the allreduce; required with pack. Returns true to send
     * the bucket again, beginning with pack(), up to LT_MAX_RESENDS times. The result is ignored
     * unless in_f16. All ranks must return the same value. */
    bool (*unpack)(void *ud, const lt_packet *packet);
} lt_bucket_filter;

/* Sets the filter from the next exchange on; all ranks must make the same change. Waits for a
 * running exchange, after which the old filter is not called again. filter is copied; NULL removes
 * it. LT_EINVAL if filter->tail is negative or above LT_MAX_TAIL. */
LT_MUST lt_status lt_reducer_set_filter(lt_reducer *reducer, const lt_bucket_filter *filter);

#ifdef __cplusplus
}
#endif
#endif
