/* runtime.cpp - memory, streams and events of the emulated CUDA devices. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "enter.h"
#include "shim.h"
#include "tests/cuda/shim.h"

struct shim_stream {
    std::deque<std::function<void()>> queue;
    uint64_t queued, done;
    int device;
    bool has_kernels;
};

struct shim_event {
    shim_stream *stream; /* NULL: never recorded */
    uint64_t position;
    int device;
};

namespace {

struct block { /* a block of memory */
    size_t bytes;
    int device; /* the device that owns it */
};
struct transfer { /* a copy between pinned memory and a device that has not run yet */
    shim_stream *stream;
    uint64_t position;
    char *start; /* in pinned memory */
    size_t bytes;
    bool ordered; /* another stream waits for it */
};

const size_t ARENA = (size_t)8 << 30, ALIGN = 256, GUARD = 512, PAGE = 4096;
const unsigned char POISON = 0xff; /* a NaN in every float type */

std::recursive_mutex lock;
char *arena;
size_t used;    /* bytes of the arena in use, whole pages: the part that is opened */
int open_count; /* how many callers have opened the memory */
bool has_run;   /* work has run since the last check of the guards */
std::map<char *, block> blocks; /* allocations; GUARD bytes before and after each */
std::map<char *, block> pinned; /* host allocations */
std::list<transfer> transfers;
std::vector<shim_stream *> streams;
shim_stream null_stream;
const int *unfinished;                   /* see shim_watch_sums() */
std::set<std::pair<int, void *>> loaded; /* kernels launched since then, by device */
int64_t counts[SHIM_COUNTS];
char fault_text[400];

typedef std::lock_guard<std::recursive_mutex> guard;

/* ==== Device memory =========================================================================== */

void open_memory()
{
    open_count++; /* opens it again even if it is open: `used` may have grown since */
    if (used)
        mprotect(arena, used, PROT_READ | PROT_WRITE);
}

void close_memory()
{
    if (--open_count == 0 && used)
        mprotect(arena, used, PROT_NONE);
}

struct opened {
    opened() { open_memory(); }
    ~opened() { close_memory(); }
};

bool is_device(const void *p) { return (char *)p >= arena && (char *)p < arena + ARENA; }

/* The block that contains these bytes, or NULL. */
const block *find(const std::map<char *, block> &all, const void *p, size_t bytes)
{
    auto at = all.upper_bound((char *)p);
    if (at == all.begin())
        return NULL;
    --at;
    return (char *)p + bytes <= at->first + at->second.bytes ? &at->second : NULL;
}

/* Records a fault if work on a device uses memory of another one. CUDA allows some of this, but we
 * have no use for it. */
void check_owner(const void *p, int device)
{
    const block *b = is_device(p) ? find(blocks, p, 1) : NULL;
    if (b && b->device != device)
        shim_fault("work on device %d uses memory of device %d", device, b->device);
}

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

bool is_poison(const char *from, const char *to)
{
    return from == to ||
           ((unsigned char)*from == POISON && memcmp(from, from + 1, (size_t)(to - from) - 1) == 0);
}

void check_guards()
{
    if (!has_run)
        return;
    opened memory;
    has_run = false;
    for (auto &b : blocks) {
        size_t bytes = b.second.bytes;
        char *end = b.first + bytes;
        if (is_poison(b.first - GUARD, b.first) &&
            is_poison(end, b.first + rounded(bytes, ALIGN) + GUARD))
            continue;
        shim_fault("a kernel or copy wrote outside the block of %zu bytes at %p", bytes,
                   (void *)b.first);
        memset(b.first - GUARD, POISON, GUARD);
        memset(end, POISON, rounded(bytes, ALIGN) + GUARD - bytes);
    }
}

/* The first gap that is large enough, or NULL. */
char *find_gap(size_t bytes)
{
    char *at = arena + GUARD;
    for (auto &b : blocks) {
        if (at + bytes + GUARD <= b.first - GUARD)
            break;
        at = b.first + rounded(b.second.bytes, ALIGN) + 2 * GUARD;
    }
    return at + bytes + GUARD <= arena + ARENA ? at : NULL;
}

/* The offset in the arena at which the last page of a block ends. */
size_t end_of(const char *at, size_t bytes)
{
    return rounded((size_t)(at - arena) + rounded(bytes, ALIGN) + GUARD, PAGE);
}

/* Such a call may wait for everything that runs on the devices of the process, while it holds a
 * lock that all other CUDA calls need. */
void wait_for_sums(const char *call)
{
    if (unfinished && __atomic_load_n(unfinished, __ATOMIC_SEQ_CST) > 0)
        shim_fault("%s waits for a sum that the other ranks cannot begin before it returns", call);
}

/* ==== Streams ================================================================================= */

shim_stream *of(cudaStream_t stream) { return stream ? stream : &null_stream; }
int device_of(cudaStream_t stream) { return stream ? stream->device : shim_device(); }

/* Runs the work of s up to position `to`. */
void drain(shim_stream *s, uint64_t to)
{
    if (s->done >= to)
        return;
    opened memory;
    has_run = true;
    while (s->done < to && !s->queue.empty()) {
        std::function<void()> run = std::move(s->queue.front());
        s->queue.pop_front();
        s->done++; /* before run(), which may drain other streams, but never needs this position */
        if (!fault_text[0])
            run();
    }
}

/* What every call returns: an error once a fault is recorded. */
cudaError_t state() { return fault_text[0] ? cudaErrorLaunchFailure : cudaSuccess; }

/* Runs work before the host waits for it. */
void run_early(shim_stream *s)
{
    if (shim_when == SHIM_EAGER)
        drain(s, s->queued);
    if (shim_when != SHIM_RANDOM)
        return;
    size_t k = shim_draw(streams.size() + 1);
    s = k < streams.size() ? streams[k] : &null_stream;
    drain(s, s->done + shim_draw(s->queued - s->done + 1));
}

cudaError_t add(cudaStream_t stream, std::function<void()> run)
{
    of(stream)->queue.push_back(std::move(run));
    of(stream)->queued++;
    run_early(of(stream));
    return state();
}

void drain_all()
{
    for (shim_stream *s : streams)
        drain(s, s->queued);
    drain(&null_stream, null_stream.queued);
}

/* What a call that has waited returns: also checks the guard bytes. */
cudaError_t checked_state()
{
    check_guards();
    return state();
}

cudaError_t waited(shim_stream *s, uint64_t to)
{
    shim_own_counts()[SHIM_WAITS] += s->done < to;
    shim_own_counts()[SHIM_DRAINS] += s->done < to && to >= s->queued && s->has_kernels;
    drain(s, to);
    return checked_state();
}

/* Until a copy to the host has run, its target contains NaNs, unless another copy still needs it.
 * It is a fault if two copies that have not run use the same pinned memory. Allowed are two copies
 * in a stream with kernels, and a copy after one that another stream waits for. */
cudaError_t add_transfer(cudaStream_t stream, void *dst, const void *src, size_t bytes)
{
    char *start = is_device(dst) ? (char *)src : (char *)dst;
    shim_stream *s = of(stream);
    bool in_use = false;
    for (const transfer &t : transfers) {
        bool overlaps = t.start < start + bytes && start < t.start + t.bytes;
        in_use |= overlaps;
        if (overlaps && !t.ordered && !(t.stream == s && s->has_kernels))
            shim_fault("two copies that have not run use the pinned memory at %p", (void *)start);
    }
    if (start == dst && !in_use)
        memset(dst, POISON, bytes);
    auto at = transfers.insert(transfers.end(), transfer{s, s->queued + 1, start, bytes, false});
    return add(stream, [=] {
        memcpy(dst, src, bytes);
        transfers.erase(at);
    });
}

} // namespace

bool shim_is_null;

extern "C" void shim_set_null(int on) { shim_is_null = on; }

void shim_fault(const char *fmt, ...)
{
    guard g(lock);
    va_list args;
    if (fault_text[0])
        return;
    va_start(args, fmt);
    vsnprintf(fault_text, sizeof fault_text, fmt, args);
    va_end(args);
}

void shim_enter_after(void *stream)
{
    guard g(lock);
    shim_stream *s = (shim_stream *)stream;
    if (s && s->device != shim_device())
        shim_fault("a library on device %d uses a stream of device %d", shim_device(), s->device);
    if (s)
        drain(s, s->queued);
    open_memory();
}

void shim_check_memory(const void *p)
{
    guard g(lock);
    check_owner(p, shim_device());
}

bool shim_owns(const void *p, size_t bytes)
{
    guard g(lock);
    const block *b = find(blocks, p, bytes);
    return bytes == 0 || (b && b->device == shim_device());
}

bool shim_skips_call(void)
{
    guard g(lock);
    counts[SHIM_CALLS]++;
    return shim_is_null;
}

void shim_leave(void)
{
    guard g(lock);
    has_run = true;
    close_memory();
}

void shim_reset(void)
{
    guard g(lock);
    drain_all();
    check_guards();
    transfers.clear();
    fault_text[0] = 0;
    shim_set_machine(CUDART_VERSION, 4, 9);
}

const char *shim_fault_text(void) { return fault_text; }

bool shim_has_failed(void)
{
    guard g(lock);
    return state() != cudaSuccess;
}

extern "C" int64_t shim_count(int what)
{
    return what == SHIM_WAITS || what == SHIM_DRAINS ? shim_own_counts()[what] : counts[what];
}

extern "C" void shim_watch_sums(const int *the_unfinished)
{
    guard g(lock);
    unfinished = the_unfinished;
    loaded.clear();
}

/* ==== Memory ================================================================================== */

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    guard g(lock);
    *p = NULL;
    wait_for_sums("cudaMalloc()");
    if (state() != cudaSuccess)
        return state();
    if (!arena) {
        arena = (char *)mmap(NULL, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                             -1, 0);
        (void)madvise(arena, ARENA, MADV_HUGEPAGE); // mprotect() takes time for each page
    }
    size_t room = rounded(bytes, ALIGN);
    char *at = find_gap(room);
    if (!at)
        return cudaErrorMemoryAllocation;
    size_t end = end_of(at, bytes);
    used = end > used ? end : used;
    if (!shim_is_null) {
        opened memory;
        memset(at - GUARD, POISON, room + 2 * GUARD);
    }
    blocks[at] = block{bytes, shim_device()};
    *p = at;
    return cudaSuccess;
}

/* CUDA's cudaFree() and cudaFreeHost() may wait for the device. These do not, as callers must not
 * rely on that. */
cudaError_t cudaFree(void *p)
{
    guard g(lock);
    if (p)
        wait_for_sums("cudaFree()");
    cudaError_t error = checked_state();
    if (p && !blocks.erase((char *)p))
        return cudaErrorInvalidValue;
    used = blocks.empty() ? 0 : end_of(blocks.rbegin()->first, blocks.rbegin()->second.bytes);
    return error;
}

cudaError_t cudaMallocHost(void **p, size_t bytes)
{
    guard g(lock);
    *p = NULL;
    wait_for_sums("cudaMallocHost()");
    if (state() != cudaSuccess)
        return state();
    *p = shim_hides("pinned") ? NULL : malloc(bytes);
    if (!*p)
        return cudaErrorMemoryAllocation;
    memset(*p, POISON, bytes);
    pinned[(char *)*p] = block{bytes, shim_device()};
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *p)
{
    guard g(lock);
    if (p)
        wait_for_sums("cudaFreeHost()");
    pinned.erase((char *)p);
    free(p);
    return state();
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream)
{
    guard g(lock);
    bool to_device = is_device(dst), from_device = is_device(src);
    if ((to_device && !find(blocks, dst, bytes)) || (from_device && !find(blocks, src, bytes)))
        return cudaErrorInvalidValue;
    bool to_pageable = !to_device && !find(pinned, dst, bytes);
    bool from_pageable = !from_device && !find(pinned, src, bytes);
    check_owner(dst, device_of(stream));
    check_owner(src, device_of(stream));
    counts[SHIM_COPIES]++;
    if (shim_is_null) {
        if (!to_device)
            memset(dst, 0, bytes);
        return state();
    }
    if (to_device && from_pageable) {
        std::vector<char> staged((const char *)src, (const char *)src + bytes);
        return add(stream, [=] { memcpy(dst, staged.data(), bytes); });
    }
    if (to_device != from_device && !to_pageable && !from_pageable)
        return add_transfer(stream, dst, src, bytes);
    cudaError_t error = add(stream, [=] { memmove(dst, src, bytes); });
    return to_pageable || from_pageable ? waited(of(stream), of(stream)->queued) : error;
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    guard g(lock);
    if (!find(blocks, dst, bytes))
        return cudaErrorInvalidValue;
    if (device_of(stream) != shim_device())
        return cudaErrorInvalidResourceHandle;
    check_owner(dst, shim_device());
    counts[SHIM_FILLS]++;
    return shim_is_null ? state() : add(stream, [=] { memset(dst, value, bytes); });
}

/* ==== Streams and events ====================================================================== */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned)
{
    guard g(lock);
    *stream = NULL;
    if (state() != cudaSuccess)
        return state();
    *stream = new shim_stream();
    (*stream)->device = shim_device();
    streams.push_back(*stream);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int)
{
    return cudaStreamCreateWithFlags(stream, flags);
}

/* Like CUDA's, it does not wait for queued work. Here that work never runs. */
cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    guard g(lock);
    if (!stream)
        return cudaErrorInvalidValue;
    for (size_t i = 0; i < streams.size(); i++)
        if (streams[i] == stream)
            streams.erase(streams.begin() + (long)i);
    transfers.remove_if([=](const transfer &t) { return t.stream == stream; });
    delete stream;
    return checked_state();
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    guard g(lock);
    return waited(of(stream), of(stream)->queued);
}

cudaError_t cudaDeviceSynchronize(void)
{
    guard g(lock);
    drain_all();
    return waited(&null_stream, 0);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    *event = NULL;
    if (state() != cudaSuccess)
        return state();
    *event = new shim_event();
    (*event)->device = shim_device();
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    guard g(lock);
    if (stream && stream->device != event->device)
        return cudaErrorInvalidResourceHandle;
    event->stream = of(stream);
    event->position = of(stream)->queued;
    return state();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    guard g(lock);
    shim_event e = *event; /* a copy, as the event may be recorded again */
    for (transfer &t : transfers)
        t.ordered |= t.stream == e.stream && t.position <= e.position;
    auto wait = [=] { /* a stream that has been destroyed runs nothing */
                      if (std::count(streams.begin(), streams.end(), e.stream) ||
                          e.stream == &null_stream)
                          drain(e.stream, e.position);
    };
    return e.stream ? add(stream, wait) : state();
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    guard g(lock);
    if (!event->stream || event->stream->done >= event->position)
        return checked_state();
    drain(event->stream, event->position);
    return state() == cudaSuccess ? cudaErrorNotReady : state();
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    guard g(lock);
    return event->stream ? waited(event->stream, event->position) : state();
}

/* ==== Launches ================================================================================ */

/* On 64-bit machines host addresses fit this pattern, and hardly any other number does and is a
 * mapped address as well. One exception: a bool followed by struct padding that still holds the
 * rest of an old address. */
void shim_check_argument(const void *argument, size_t bytes)
{
    guard g(lock);
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        uint64_t word;
        unsigned char there;
        memcpy(&word, (const char *)argument + i, 8);
        void *page = (void *)(word / PAGE * PAGE);
        bool may_be_bool = (word & 0xff) <= 1;
        check_owner((void *)word, shim_device());
        if (may_be_bool || word >> 48 || word >> 32 < 0x1000 || is_device((void *)word) ||
            find(pinned, (void *)word, 1) || mincore(page, PAGE, &there) != 0)
            continue;
        shim_fault("a kernel argument contains the host address %p", (void *)word);
    }
}

cudaError_t shim_enqueue(cudaStream_t stream, std::function<void()> run)
{
    guard g(lock);
    of(stream)->has_kernels = true;
    return add(stream, std::move(run));
}

cudaError_t shim_launch(const cudaLaunchConfig_t *config, void *kernel,
                        std::function<void()> thread)
{
    guard g(lock);
    dim3 grid = config->gridDim, threads = config->blockDim;
    if (device_of(config->stream) != shim_device())
        return cudaErrorInvalidResourceHandle;
    if (grid.x == 0 || grid.x > INT32_MAX || threads.x == 0 || threads.x > 1024)
        return cudaErrorInvalidValue;
    if (unfinished && loaded.insert({shim_device(), kernel}).second)
        wait_for_sums("the first launch of a kernel");
    counts[SHIM_KERNELS]++;
    if (shim_is_null)
        return state();
    return shim_enqueue(config->stream, [=] {
        counts[SHIM_LAUNCHES]++;
        shim_run_grid(grid, threads, thread);
    });
}
