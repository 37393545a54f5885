/* stream.cu - marks in the stream of a CUDA device, pinned host memory, and copies in streams of
 * their own.
 *
 * A mark is an event. There are LT_MAX_MARKS events, used in turn. A mark whose event was reused is
 * old; waiting for it means waiting for everything enqueued so far.
 */
#include "ops/cuda/cuda.h"

/* Locks for a scope: several threads record marks and query them. */
struct guard {
    lt_cuda *cuda;
    explicit guard(lt_cuda *c) : cuda(c) { pthread_mutex_lock(&c->lock); }
    ~guard() { pthread_mutex_unlock(&cuda->lock); }
};

/* Records a mark. If that fails, a later call reports the error. */
static uint64_t mark_in(lt_cuda *cuda, cudaStream_t stream)
{
    uint64_t mark = ++cuda->marks;
    (void)cudaEventRecord(cuda->event[mark % LT_MAX_MARKS], stream);
    return mark;
}

static bool is_old(const lt_cuda *cuda, uint64_t mark)
{
    return mark + LT_MAX_MARKS <= cuda->marks;
}

static uint64_t cuda_mark(lt_device *device)
{
    lt_cuda *cuda = lt__cuda_enter(device);
    guard g(cuda);
    return mark_in(cuda, cuda->stream);
}

static bool has_become_old(lt_cuda *cuda, uint64_t mark)
{
    guard g(cuda);
    return is_old(cuda, mark);
}

cudaError_t lt__cuda_wait_for_all(const lt_cuda *cuda)
{
    cudaStream_t all[] = {cuda->uploads, cuda->downloads, cuda->stream};
    for (int i = 0; i < 3; i++)
        LT_CUDA_TRY(cudaStreamSynchronize(all[i]));
    return cudaSuccess;
}

/* The event may be reused for another mark, perhaps in another stream, while this waits. Then it
 * waits for all streams. */
static cudaError_t wait_for(lt_cuda *cuda, uint64_t mark)
{
    if (!has_become_old(cuda, mark)) {
        LT_CUDA_TRY(cudaEventSynchronize(cuda->event[mark % LT_MAX_MARKS]));
        if (!has_become_old(cuda, mark))
            return cudaSuccess;
    }
    return lt__cuda_wait_for_all(cuda);
}

static lt_status cuda_wait(lt_device *device, uint64_t mark)
{
    lt_cuda *cuda = lt__cuda_enter(device);
    LT_TRY(lt__cuda_status(cuda, wait_for(cuda, mark)));
    guard g(cuda);
    return lt__cuda_report_bad_id(cuda);
}

static void *cuda_alloc_host(lt_device *device, size_t bytes)
{
    void *p = NULL;
    lt__cuda_enter(device);
    if (cudaMallocHost(&p, bytes) == cudaSuccess)
        return p;
    (void)cudaGetLastError();
    return NULL;
}

/* CUDA does not document that cudaFreeHost() waits for copies. */
static void cuda_free_host(lt_device *device, void *p)
{
    lt_cuda *cuda = lt__cuda_enter(device);
    (void)lt__cuda_wait_for_all(cuda); /* a later call reports the error */
    (void)cudaFreeHost(p);
}

/* The caller holds the lock. */
static cudaError_t stream_wait_mark(lt_cuda *cuda, cudaStream_t stream, uint64_t mark)
{
    mark = is_old(cuda, mark) ? mark_in(cuda, cuda->stream) : mark;
    return cudaStreamWaitEvent(stream, cuda->event[mark % LT_MAX_MARKS], 0);
}

cudaError_t lt__cuda_stream_wait_mark(lt_cuda *cuda, cudaStream_t stream, uint64_t mark)
{
    guard g(cuda);
    return stream_wait_mark(cuda, stream, mark);
}

static cudaError_t copy_beside(lt_cuda *cuda, cudaStream_t beside, void *dst, const void *src,
                               size_t bytes, uint64_t after, uint64_t *mark)
{
    guard g(cuda);
    cudaError_t error = stream_wait_mark(cuda, beside, after);
    if (error == cudaSuccess && bytes > 0)
        error = cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, beside);
    if (mark)
        *mark = mark_in(cuda, beside);
    return error;
}

static lt_status cuda_upload(lt_device *device, void *dst, const void *src, size_t bytes,
                             uint64_t after, uint64_t *mark)
{
    lt_cuda *cuda = lt__cuda_enter(device);
    return lt__cuda_status(cuda, copy_beside(cuda, cuda->uploads, dst, src, bytes, after, mark));
}

static lt_status cuda_download(lt_device *device, void *dst, const void *src, size_t bytes,
                               uint64_t after, uint64_t *mark)
{
    lt_cuda *cuda = lt__cuda_enter(device);
    return lt__cuda_status(cuda, copy_beside(cuda, cuda->downloads, dst, src, bytes, after, mark));
}

static lt_status cuda_stream_wait(lt_device *device, uint64_t mark)
{
    lt_cuda *cuda = lt__cuda_enter(device);
    guard g(cuda);
    mark = is_old(cuda, mark) ? mark_in(cuda, cuda->uploads) : mark;
    return lt__cuda_status(cuda,
                           cudaStreamWaitEvent(cuda->stream, cuda->event[mark % LT_MAX_MARKS], 0));
}

cudaError_t lt__cuda_stream_open(lt_cuda *cuda)
{
    lt_device *device = &cuda->device;
    device->mark = cuda_mark;
    device->wait = cuda_wait;
    device->alloc_host = cuda_alloc_host;
    device->free_host = cuda_free_host;
    device->upload = cuda_upload;
    device->download = cuda_download;
    device->stream_wait = cuda_stream_wait;
    LT_CUDA_TRY(cudaStreamCreateWithFlags(&cuda->uploads, cudaStreamNonBlocking));
    LT_CUDA_TRY(cudaStreamCreateWithFlags(&cuda->downloads, cudaStreamNonBlocking));
    for (int i = 0; i < LT_MAX_MARKS; i++)
        LT_CUDA_TRY(cudaEventCreateWithFlags(&cuda->event[i], cudaEventDisableTiming));
    return cudaSuccess;
}

void lt__cuda_stream_close(lt_cuda *cuda)
{
    for (int i = 0; i < LT_MAX_MARKS; i++)
        if (cuda->event[i])
            (void)cudaEventDestroy(cuda->event[i]);
    if (cuda->uploads)
        (void)cudaStreamDestroy(cuda->uploads);
    if (cuda->downloads)
        (void)cudaStreamDestroy(cuda->downloads);
}
