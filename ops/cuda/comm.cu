/* comm.cu - allreduce between the CUDA devices of several ranks with NCCL: see core/device_comm.h.
 *
 * All work is enqueued in a separate stream of the highest priority: an allreduce has few blocks,
 * and blocks of compute kernels should make room for them. Our own kernels multiply by the rank's
 * share, in f32, before the allreduce. So a gradient that travels as f16 or bf16 is rounded once
 * before it is sent, and NCCL only adds.
 */
#include <stdio.h>
#include <stdlib.h>

#include "ops/cuda/map.h"

static const double CLOSE_SECONDS = 10; /* NCCL usually needs less than one second */

struct comm {
    lt_device_comm base; /* keep this first: the pointer is cast */
    lt_cuda *cuda;
    lt_cuda side; /* launches kernels in its own stream; has only host, name, index and stream */
    lt_nccl nccl;
    lt_nccl_table calls; /* NCCL's functions; a copy, as close_all() may outlive lt_nvidia */
    cudaEvent_t event;   /* recorded after the latest operation */
    bool begun;          /* whether event is pending */
    bool summing;        /* an allreduce has begun that may not be in the stream yet */
    int n_tail;          /* length of its tail */
    char *on_device;     /* on the device: statistics, the tail, statistics in parts */
    struct {
        lt_grad_stats found;
        float tail[LT_COMM_TAIL];
    } * on_host; /* pinned host memory */
};

static comm *enter(lt_device_comm *p)
{
    comm *own = (comm *)p;
    (void)cudaSetDevice(own->cuda->index);
    return own;
}

static lt_grad_stats *stats_on_device(const comm *p) { return (lt_grad_stats *)p->on_device; }
static float *tail_on_device(const comm *p)
{
    return (float *)(p->on_device + sizeof(lt_grad_stats));
}
static lt_grad_row *row_on_device(const comm *p)
{
    return (lt_grad_row *)(p->on_device + LT_CUDA_ALIGN + LT_COMM_TAIL * sizeof(float));
}

static cudaError_t copy(comm *p, void *to, const void *from, size_t bytes)
{
    return bytes == 0 ? cudaSuccess
                      : cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, p->side.stream);
}

/* Records the event that the next poll() queries, after all work in the stream. */
static lt_status record_event(comm *p, cudaError_t error)
{
    if (error == cudaSuccess)
        error = cudaEventRecord(p->event, p->side.stream);
    p->begun = true;
    return lt__cuda_status(p->cuda, error);
}

/* ==== Opening and closing ===================================================================== */

static lt_status identify(lt_device *device, char name[LT_COMM_NAME_BYTES],
                          char library[LT_COMM_NAME_BYTES])
{
    const lt_cuda *cuda = (lt_cuda *)device;
    const char *text;
    cudaDeviceProp prop;
    LT_TRY(lt__cuda_status(cuda, cudaGetDeviceProperties(&prop, cuda->index)));
    int at = snprintf(name, LT_COMM_NAME_BYTES, "GPU-");
    for (size_t i = 0; i < sizeof prop.uuid.bytes; i++)
        at += snprintf(name + at, LT_COMM_NAME_BYTES - (size_t)at, "%02x",
                       (unsigned char)prop.uuid.bytes[i]);
    if (!lt__nvidia_nccl(cuda->nvidia, &text))
        return cuda->host->fail(LT_EENV, "%s", text);
    snprintf(library, LT_COMM_NAME_BYTES, "NCCL %s", text);
    return LT_OK;
}

static lt_nccl nccl_of(const lt_cuda *cuda)
{
    const char *text;
    lt_nccl n = {lt__nvidia_nccl(cuda->nvidia, &text), &cuda->env, NULL, false, false};
    return n;
}

static lt_status make_id(lt_device *device, char id[LT_COMM_ID_BYTES])
{
    lt_nccl n = nccl_of((lt_cuda *)device);
    (void)cudaSetDevice(((lt_cuda *)device)->index);
    return lt__nccl_make_id(&n, id);
}

/* Frees everything. Uses neither p->cuda nor anything else that the device owns. */
static void close_all(void *ud)
{
    comm *p = (comm *)ud;
    (void)cudaSetDevice(p->side.index);
    lt__nccl_destroy(&p->nccl);
    if (p->side.stream) {
        (void)cudaStreamSynchronize(p->side.stream);
        (void)cudaStreamDestroy(p->side.stream);
    }
    if (p->event)
        (void)cudaEventDestroy(p->event);
    (void)cudaFree(p->on_device);
    (void)cudaFreeHost(p->on_host);
    free(p);
}

static void comm_close(lt_device_comm *given)
{
    (void)lt__nccl_close(close_all, given, CLOSE_SECONDS);
}

static cudaError_t make(comm *p)
{
    int least, greatest;
    size_t bytes = LT_CUDA_ALIGN + LT_COMM_TAIL * sizeof(float) + sizeof(lt_grad_row);
    LT_CUDA_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    LT_CUDA_TRY(cudaStreamCreateWithPriority(&p->side.stream, cudaStreamNonBlocking, greatest));
    LT_CUDA_TRY(cudaEventCreateWithFlags(&p->event, cudaEventDisableTiming));
    LT_CUDA_TRY(cudaMalloc((void **)&p->on_device, bytes));
    return cudaMallocHost((void **)&p->on_host, sizeof *p->on_host);
}

static lt_status comm_open(lt_device *device, const char id[LT_COMM_ID_BYTES], int rank, int size,
                           lt_device_comm **out)
{
    lt_cuda *cuda = (lt_cuda *)device;
    comm *p = (comm *)calloc(1, sizeof *p);
    if (!p)
        return cuda->host->fail(LT_ENOMEM, "out of memory for a device communicator");
    p->cuda = cuda;
    p->base.calls = &lt__cuda_comm_calls;
    p->side.host = cuda->host;
    p->side.index = cuda->index;
    p->nccl = nccl_of(cuda);
    p->calls = *p->nccl.calls;
    p->nccl.calls = &p->calls;
    snprintf(p->side.name, sizeof p->side.name, "%s", cuda->name);
    (void)enter(&p->base);
    lt_status status = lt__cuda_status(cuda, make(p));
    if (status == LT_OK)
        status = lt__nccl_init(&p->nccl, id, rank, size);
    if (status != LT_OK) {
        comm_close(&p->base);
        return status;
    }
    p->base.tail = p->on_host->tail;
    *out = &p->base;
    return LT_OK;
}

static lt_status finalize(lt_device_comm *given) { return lt__nccl_finalize(&enter(given)->nccl); }

/* ==== Allreduce =============================================================================== */

/* NCCL may enqueue the allreduce after the call returns, so the copy of the tail is enqueued only
 * when NCCL is ready. */
static lt_status comm_poll(lt_device_comm *given, bool *done)
{
    comm *p = enter(given);
    *done = false;
    LT_TRY(lt__nccl_is_ready(&p->nccl, done));
    if (*done && p->summing) {
        p->summing = false;
        LT_TRY(record_event(
            p, copy(p, p->on_host->tail, tail_on_device(p), (size_t)p->n_tail * sizeof(float))));
    }
    if (!*done || !p->begun)
        return LT_OK;
    cudaError_t error = cudaEventQuery(p->event);
    *done = error == cudaSuccess;
    p->begun = !*done;
    p->base.largest = p->on_host->found.largest;
    p->base.not_finite = p->on_host->found.not_finite;
    return error == cudaErrorNotReady ? LT_OK : lt__cuda_status(p->cuda, error);
}

static lt_status prepare(lt_device_comm *given, void *data, int64_t count, lt_dtype dtype,
                         const lt_bucket_range *zeros, int n, bool finds, uint64_t after)
{
    comm *p = enter(given);
    lt_cuda *cuda = p->cuda;
    cudaError_t error = lt__cuda_stream_wait_mark(cuda, p->side.stream, after);
    for (int i = 0; i < n && error == cudaSuccess; i++) {
        char *at = lt__cuda_at(data, dtype, zeros[i].at);
        size_t bytes = (size_t)zeros[i].count * lt__cuda_dtype_bytes(dtype);
        error = cudaMemsetAsync(at, 0, bytes, p->side.stream);
    }
    if (error == cudaSuccess && finds) {
        LT_TRY(
            lt__cuda_measure(&p->side, data, count, dtype, row_on_device(p), stats_on_device(p)));
        error = copy(p, &p->on_host->found, stats_on_device(p), sizeof(lt_grad_stats));
    }
    return record_event(p, error);
}

template <class Z, class A> struct scaled : lt_types<1, Z, A> {
    lt_wide<A> by;
    __device__ lt_wide<Z> operator()(lt_wide<A> x, lt_wide<Z>, lt_wide<Z>) const { return x * by; }
};

template <class Z, class A>
static lt_status scale(const comm *p, void *to, const void *from, int64_t count, double by)
{
    scaled<Z, A> f;
    lt_walk w;
    f.by = (lt_wide<A>)by;
    lt__walk_over(&w, 1, &count);
    lt__walk_merge(&w, 2);
    return lt__map(&p->side, w, f, false, to, from);
}

/* Scales the data, and puts it where NCCL reads it. */
static lt_status scale_for_sum(const comm *p, const lt_device_sum *s)
{
    if (s->on_wire && s->wire == LT_F16)
        return scale<__half, float>(p, s->on_wire, s->data, s->count, s->scale);
    if (s->on_wire)
        return scale<__nv_bfloat16, float>(p, s->on_wire, s->data, s->count, s->scale);
    if (s->scale == 1)
        return LT_OK;
    LT_CUDA_ANY_FLOAT(p->cuda, s->dtype, E,
                      return scale<E, E>(p, s->data, s->data, s->count, s->scale);)
}

static lt_status allreduce(lt_device_comm *given, const lt_device_sum *s)
{
    comm *p = enter(given);
    size_t bytes = (size_t)s->n_tail * sizeof(float);
    LT_TRY(scale_for_sum(p, s));
    LT_TRY(lt__cuda_status(p->cuda, copy(p, tail_on_device(p), p->on_host->tail, bytes)));
    p->n_tail = s->n_tail;
    p->summing = true;
    return lt__nccl_allreduce(&p->nccl, s->on_wire ? s->on_wire : s->data, s->count,
                              s->on_wire ? s->wire : s->dtype, tail_on_device(p), s->n_tail,
                              p->side.stream);
}

static lt_status unpack(lt_device_comm *given, const lt_device_sum *s, double factor)
{
    comm *p = enter(given);
    lt_status status = s->wire == LT_F16
                           ? scale<float, __half>(p, s->data, s->on_wire, s->count, factor)
                           : scale<float, __nv_bfloat16>(p, s->data, s->on_wire, s->count, factor);
    return status == LT_OK ? record_event(p, cudaSuccess) : status;
}

/* A sum on one GPU runs until the others begin theirs. But allocating or freeing memory, or loading
 * a kernel, may wait for it while holding a lock that the other ranks need to begin. [CUDA
 * Programming Guide: Lazy Loading, Potential Hazards] */
static const char hazard[] = "NCCL can deadlock between ranks that are threads";

const lt_device_comm_calls lt__cuda_comm_calls = {identify,   make_id,   comm_open, comm_poll,
                                                  prepare,    allreduce, unpack,    finalize,
                                                  comm_close, hazard};
