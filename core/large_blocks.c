/* large_blocks.c - allocates large blocks from a few regions of a device's memory.
 *
 * A training step allocates blocks of many sizes and frees them in roughly the reverse order:
 * backward frees what forward saved. Adjacent free ranges are merged. So memory of late layers is
 * reused for the gradients of early ones, a smaller last batch fits where full batches were, and
 * the memory touched is hardly more than the peak in use. Best fit: a block is cut from the low end
 * of the smallest free range that can hold it. Untouched memory therefore stays in one piece and is
 * used last; on a CPU it is not resident.
 *
 * The allocator stores nothing in the blocks, since the CPU may be unable to write there. The
 * number of free ranges is at most the number of regions plus the number of blocks in use. Room for
 * all of them, and for the range about to be merged, is reserved on allocation, so freeing cannot
 * fail.
 */
#include <stdlib.h>
#include <string.h>

#include "core/pool.h"

enum { MIN_REGION = 32 << 20, HEADROOM = 256 << 20 };

/* ==== Ranges in the order of their addresses ================================================== */

static bool reserve(lt_ranges *r, size_t n)
{
    return LT_RESERVE(r->at, n, &r->capacity, "for a list of blocks") == LT_OK;
}

/* The index of the first range that starts at or after p. */
static size_t place_of(const lt_ranges *r, const char *p)
{
    size_t low = 0, high = r->n;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (r->at[middle].start < p)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool has_start(const lt_ranges *r, const char *p)
{
    size_t i = place_of(r, p);
    return i < r->n && r->at[i].start == p;
}

static void insert(lt_ranges *r, lt_range range)
{
    size_t i = place_of(r, range.start);
    memmove(&r->at[i + 1], &r->at[i], (r->n++ - i) * sizeof range);
    r->at[i] = range;
}

static void drop(lt_ranges *r, size_t i)
{
    memmove(&r->at[i], &r->at[i + 1], (--r->n - i) * sizeof *r->at);
}

/* The smallest range of at least this many bytes (the first one of that size), or NULL. */
static lt_range *best_fit(const lt_ranges *r, size_t bytes)
{
    lt_range *best = NULL;
    for (lt_range *at = r->at; at < r->at + r->n; at++)
        if (at->bytes >= bytes && (!best || at->bytes < best->bytes))
            best = at;
    return best;
}

/* ==== Allocating and freeing ================================================================= */

/* Allocates a region that is larger than the request. The extra size only serves to keep the number
 * of regions small, so it must not use up an accelerator's memory: other users of that memory
 * (libraries, kernels loaded at first use) fail without a clear error. Returns NULL if less than
 * HEADROOM would be left for them. */
static char *allocate_more(lt_device *device, size_t size)
{
    char *p = device->alloc(device, size);
    if (!p || device->is_host || size <= MIN_REGION)
        return p;
    void *rest = device->alloc(device, HEADROOM);
    if (rest)
        device->free(device, rest, HEADROOM);
    else
        device->free(device, p, size);
    return rest ? p : NULL;
}

/* Adds a region of at least this many bytes. Its size is normally half of the current total, so
 * that there are few regions. Returns false if the system is out of memory. */
static bool grow(lt_device *device, size_t bytes)
{
    lt_large_blocks *large = &device->pool.large;
    size_t size = LT_MAX(large->bytes / 2, MIN_REGION);
    char *p = size > bytes ? allocate_more(device, size) : NULL;
    if (!p)
        p = device->alloc(device, size = bytes);
    if (!p)
        return false;
    if (device->is_host)
        LT_FORBID(p, size);
    insert(&large->all, (lt_range){p, size});
    insert(&large->free, (lt_range){p, size});
    large->bytes += size;
    return true;
}

void *lt__large_block_alloc(lt_device *device, size_t bytes)
{
    lt_large_blocks *large = &device->pool.large;
    if (!reserve(&large->all, large->all.n + 1) ||
        !reserve(&large->free, large->all.n + large->taken + 3))
        return NULL;
    lt_range *from = best_fit(&large->free, bytes);
    if (!from && grow(device, bytes))
        from = best_fit(&large->free, bytes);
    if (!from)
        return NULL;
    char *p = from->start;
    from->start += bytes;
    from->bytes -= bytes;
    if (from->bytes == 0)
        drop(&large->free, (size_t)(from - large->free.at));
    large->taken++;
    return p;
}

/* Adjacent regions are not merged, since each must be returned to the system as it was
 * allocated. */
void lt__large_block_free(lt_device *device, void *p, size_t bytes)
{
    lt_large_blocks *large = &device->pool.large;
    lt_ranges *free = &large->free;
    char *start = p, *end = start + bytes;
    large->taken--;
    insert(free, (lt_range){start, bytes});
    size_t i = place_of(free, start);
    lt_range *at = &free->at[i];
    if (i + 1 < free->n && at[1].start == end && !has_start(&large->all, end)) {
        at->bytes += at[1].bytes;
        drop(free, i + 1);
    }
    if (i > 0 && at[-1].start + at[-1].bytes == start && !has_start(&large->all, start)) {
        at[-1].bytes += at->bytes;
        drop(free, i);
    }
}

size_t lt__large_block_trim(lt_device *device)
{
    lt_large_blocks *large = &device->pool.large;
    size_t before = large->bytes;
    for (size_t i = large->all.n; i-- > 0;) {
        lt_range region = large->all.at[i];
        size_t k = place_of(&large->free, region.start);
        if (k == large->free.n || large->free.at[k].start != region.start ||
            large->free.at[k].bytes != region.bytes)
            continue;
        device->free(device, region.start, region.bytes);
        drop(&large->free, k);
        drop(&large->all, i);
        large->bytes -= region.bytes;
    }
    return before - large->bytes;
}
