/* cuda_stream.cu - marks in the stream of a CUDA device, pinned memory of the host, and copies from
 * it beside the stream.
 *
 * A mark is an event. There are LT_MARKS of them, used in turn. An older mark has none any more; in
 * its place stands all that there is by now.
 */
#include "ops/cuda.h"

static lt_cuda *enter(lt_device *device)
{
    lt_cuda *cuda = (lt_cuda *)device;
    (void)cudaSetDevice(cuda->index);
    return cuda;
}

/* What goes wrong here, a later call says too. */
static uint64_t mark_in(lt_cuda *cuda, cudaStream_t stream)
{
    uint64_t mark = ++cuda->marks;
    (void)cudaEventRecord(cuda->event[mark % LT_MARKS], stream);
    return mark;
}

static bool is_old(const lt_cuda *cuda, uint64_t mark) { return mark + LT_MARKS <= cuda->marks; }

static uint64_t cuda_mark(lt_device *device)
{
    lt_cuda *cuda = enter(device);
    return mark_in(cuda, cuda->stream);
}

static lt_status cuda_wait(lt_device *device, uint64_t mark)
{
    lt_cuda *cuda = enter(device);
    if (is_old(cuda, mark)) {
        LT_TRY(lt__cuda_status(cuda, cudaStreamSynchronize(cuda->uploads)));
        LT_TRY(lt__cuda_status(cuda, cudaStreamSynchronize(cuda->stream)));
    } else {
        LT_TRY(lt__cuda_status(cuda, cudaEventSynchronize(cuda->event[mark % LT_MARKS])));
    }
    return lt__cuda_say_bad_id(cuda);
}

static void *cuda_alloc_host(lt_device *device, size_t bytes)
{
    void *p = NULL;
    enter(device);
    if (cudaMallocHost(&p, bytes) == cudaSuccess)
        return p;
    (void)cudaGetLastError();
    return NULL;
}

static void cuda_free_host(lt_device *device, void *p)
{
    enter(device);
    (void)cudaFreeHost(p);
}

static lt_status cuda_upload(lt_device *device, void *dst, const void *src, size_t bytes,
                             uint64_t *mark)
{
    lt_cuda *cuda = enter(device);
    uint64_t before = mark_in(cuda, cuda->stream);
    cudaError_t error = cudaStreamWaitEvent(cuda->uploads, cuda->event[before % LT_MARKS], 0);
    if (error == cudaSuccess && bytes > 0)
        error = cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, cuda->uploads);
    *mark = mark_in(cuda, cuda->uploads);
    return lt__cuda_status(cuda, error);
}

static lt_status cuda_follow(lt_device *device, uint64_t mark)
{
    lt_cuda *cuda = enter(device);
    mark = is_old(cuda, mark) ? mark_in(cuda, cuda->uploads) : mark;
    return lt__cuda_status(cuda, cudaStreamWaitEvent(cuda->stream, cuda->event[mark % LT_MARKS],
                                                     0));
}

cudaError_t lt__cuda_stream_open(lt_cuda *cuda)
{
    lt_device *device = &cuda->device;
    cudaError_t error = cudaStreamCreateWithFlags(&cuda->uploads, cudaStreamNonBlocking);
    for (int i = 0; i < LT_MARKS && error == cudaSuccess; i++)
        error = cudaEventCreateWithFlags(&cuda->event[i], cudaEventDisableTiming);
    device->mark = cuda_mark;
    device->wait = cuda_wait;
    device->alloc_host = cuda_alloc_host;
    device->free_host = cuda_free_host;
    device->upload = cuda_upload;
    device->follow = cuda_follow;
    return error;
}

void lt__cuda_stream_close(lt_cuda *cuda)
{
    for (int i = 0; i < LT_MARKS; i++)
        if (cuda->event[i])
            (void)cudaEventDestroy(cuda->event[i]);
    if (cuda->uploads)
        (void)cudaStreamDestroy(cuda->uploads);
}
