/* test_large_blocks.c - large blocks are split off regions, merged again, and returned to the
 * system. */
#include <stdlib.h>

#include "core/pool.h"
#include "tests/lt_test.h"

enum { MB = 1 << 20, MOST = 64 };

/* A size that rounds up to n MB of whole pages, with or without the guard for AddressSanitizer. */
#define ABOUT(n) ((size_t)(n)*MB - 100)

/* A context whose device counts its requests to the system and can be made to refuse them. */
static struct {
    void *(*alloc)(lt_device *device, size_t bytes);
    size_t asked, most; /* number of requests; maximum bytes of one */
} of_system;

static void *counted(lt_device *device, size_t bytes)
{
    of_system.asked++;
    return bytes > of_system.most ? NULL : of_system.alloc(device, bytes);
}

static lt_ctx *counting_ctx(void)
{
    lt_ctx *ctx = lt_ctx_new(NULL);
    of_system.alloc = ctx->device->alloc;
    of_system.asked = 0;
    of_system.most = SIZE_MAX;
    ctx->device->alloc = counted;
    return ctx;
}

#define TEST_COUNTED(title) TEST_WITH(title, lt_ctx *ctx, counting_ctx(), lt_ctx_free)

static size_t held(lt_ctx *ctx)
{
    lt_memory m = lt_memory_stats(ctx);
    return m.live + m.cached;
}

/* Allocates n blocks of this many bytes, then frees them all, from the first or from the last. */
static void use(lt_ctx *ctx, int n, size_t bytes, bool last_first)
{
    void *p[MOST];
    for (int i = 0; i < n; i++)
        CHECK((p[i] = lt__alloc(ctx, bytes)) != NULL);
    for (int i = 0; i < n; i++)
        lt__free(ctx, p[last_first ? n - 1 - i : i], bytes);
}

TEST_COUNTED(adjacent_free_blocks_are_merged)
{
    use(ctx, 30, ABOUT(1), true);
    CHECK_EQ(of_system.asked, 1);
    use(ctx, 1, ABOUT(30), true);
    use(ctx, 30, ABOUT(1), false);
    use(ctx, 1, ABOUT(30), true);
    CHECK_EQ(of_system.asked, 1);
    CHECK_EQ(lt_memory_stats(ctx).live, 0);
    CHECK_EQ(lt_memory_stats(ctx).peak, (size_t)30 * MB);
}

/* The last batch of an epoch is smaller; its tensors reuse the memory of the others. */
TEST_COUNTED(a_smaller_batch_needs_no_new_memory)
{
    use(ctx, 40, ABOUT(5), true);
    size_t before = held(ctx), asked = of_system.asked;
    use(ctx, 40, ABOUT(3), true);
    use(ctx, 40, ABOUT(5), false);
    CHECK_EQ(held(ctx), before);
    CHECK_EQ(of_system.asked, asked);
    CHECK(before < (size_t)300 * MB);
}

TEST(the_best_fit_is_split)
{
    lt_ctx *ctx = counting_ctx();
    char *a = lt__alloc(ctx, ABOUT(4)), *b = lt__alloc(ctx, ABOUT(1));
    char *c = lt__alloc(ctx, ABOUT(2)), *d = lt__alloc(ctx, ABOUT(1));
    lt__free(ctx, a, ABOUT(4));
    lt__free(ctx, c, ABOUT(2));
    CHECK(lt__alloc(ctx, ABOUT(2)) == c);
    CHECK(lt__alloc(ctx, ABOUT(2)) == a);
    lt__free(ctx, a, ABOUT(2));
    lt__free(ctx, b, ABOUT(1));
    lt__free(ctx, c, ABOUT(2));
    lt__free(ctx, d, ABOUT(1));
    CLOSE_CTX(ctx);
}

TEST_COUNTED(free_regions_are_returned)
{
    void *small = lt__alloc(ctx, ABOUT(1)), *large = lt__alloc(ctx, ABOUT(50));
    CHECK_EQ(of_system.asked, 2);
    lt__free(ctx, large, ABOUT(50));
    lt_memory_trim(ctx);
    CHECK_EQ(held(ctx), (size_t)32 * MB);
    use(ctx, 1, ABOUT(50), true);
    CHECK_EQ(of_system.asked, 3);
    lt__free(ctx, small, ABOUT(1));
    lt_memory_trim(ctx);
    CHECK_EQ(held(ctx), 0);
}

/* Allocates adjacent regions, as a device may do. */
static char *next_region;
static void *next_to_it(lt_device *device, size_t bytes)
{
    (void)device;
    next_region += bytes;
    return next_region - bytes;
}
static void note(lt_device *device, void *p, size_t bytes)
{
    (void)device;
    CHECK((char *)p + bytes == next_region);
    next_region = p;
}

TEST_CTX(adjacent_regions_are_returned_separately)
{
    lt_device own = *ctx->device;
    char *all = next_region = own.alloc(&own, 128 * MB);
    ctx->device->alloc = next_to_it;
    ctx->device->free = note;
    void *a = lt__alloc(ctx, ABOUT(32)), *b = lt__alloc(ctx, ABOUT(32));
    lt__free(ctx, b, ABOUT(32));
    lt__free(ctx, a, ABOUT(32));
    CHECK_EQ(next_region - all, 64 * MB);
    lt_memory_trim(ctx);
    CHECK(next_region == all);
    a = lt__alloc(ctx, ABOUT(32));
    b = lt__alloc(ctx, ABOUT(32));
    lt__free(ctx, a, ABOUT(32));
    lt__free(ctx, b, ABOUT(32));
    lt_memory_trim(ctx);
    CHECK_EQ(held(ctx), 0);
    CHECK(next_region == all);
    ctx->device->alloc = own.alloc;
    ctx->device->free = own.free;
    own.free(&own, all, 128 * MB);
}

/* If a large region is refused, one of the exact size is requested; then free regions are returned
 * to the system. */
TEST_COUNTED(a_system_with_little_memory)
{
    of_system.most = 5 * MB;
    void *p = lt__alloc(ctx, ABOUT(3));
    CHECK(p != NULL);
    CHECK_EQ(of_system.asked, 2);
    CHECK_EQ(held(ctx), (size_t)3 * MB);
    CHECK(!lt__alloc(ctx, ABOUT(6)));
    CHECK_EQ(lt_errcode(), LT_ENOMEM);
    CHECK_MSG("out of memory on cpu: 6.0 MiB requested, 3.0 MiB in use; try a smaller batch");
    lt__free(ctx, p, ABOUT(3));
    CHECK(!lt__alloc(ctx, ABOUT(6)));
    CHECK_EQ(held(ctx), 0);
}

/* A fake accelerator with `left` bytes, at addresses that are not mapped. */
static size_t left;
static char *next_block;

static void *from_what_is_left(lt_device *device, size_t bytes)
{
    (void)device;
    if (bytes > left)
        return NULL;
    left -= bytes;
    next_block += bytes + 4096;
    return next_block - bytes;
}

static void give_back(lt_device *device, void *p, size_t bytes)
{
    (void)device;
    CHECK(p != NULL);
    left += bytes;
}

/* Allocates a block that is never freed. Returns the memory left, in MB. */
static size_t after(lt_device *device, size_t bytes)
{
    CHECK(lt__large_block_alloc(device, bytes) != NULL);
    return left / MB;
}

/* Some memory of an accelerator is left for other users until a block needs it. */
TEST(an_accelerator_keeps_headroom)
{
    lt_device d = {.alloc = from_what_is_left, .free = give_back};
    left = (size_t)1000 * MB;
    next_block = (char *)(uintptr_t)MB;
    CHECK_EQ(after(&d, (size_t)300 * MB), 700);
    CHECK_EQ(after(&d, (size_t)150 * MB), 550);
    CHECK_EQ(after(&d, (size_t)50 * MB), 325); /* half of 450 */
    CHECK_EQ(after(&d, (size_t)175 * MB), 325);
    left = (size_t)400 * MB;
    CHECK_EQ(after(&d, (size_t)50 * MB), 350); /* half of 675 would leave too little */
    CHECK_EQ(after(&d, (size_t)340 * MB), 10);
    CHECK(!lt__large_block_alloc(&d, (size_t)20 * MB));
    CHECK_EQ(left / MB, 10);
    free(d.pool.large.all.at);
    free(d.pool.large.free.at);
}

TEST_COUNTED(a_host_keeps_no_headroom)
{
    void *first = lt__alloc(ctx, ABOUT(100)), *second = lt__alloc(ctx, ABOUT(40));
    CHECK(first && second);
    CHECK_EQ(of_system.asked, 2);
    lt__free(ctx, first, ABOUT(100));
    lt__free(ctx, second, ABOUT(40));
}

/* Random sizes in random order: blocks keep their content, so none overlap. When all are free, they
 * merge and can be returned. */
TEST_COUNTED(blocks_do_not_overlap)
{
    struct {
        unsigned char *p;
        size_t bytes;
    } held_by[MOST] = {{0}};
    size_t asked = 0;
    for (uint32_t i = 0; i < 4000; i++) {
        uint32_t word[4];
        lt_random(1, LT_RNG_USER, 0, i, word);
        int k = (int)(word[0] % MOST);
        unsigned char mark = (unsigned char)(k + 1);
        if (held_by[k].p) {
            size_t bytes = held_by[k].bytes;
            CHECK(held_by[k].p[0] == mark && held_by[k].p[bytes / 2] == mark &&
                  held_by[k].p[bytes - 1] == mark);
            lt__free(ctx, held_by[k].p, bytes);
            held_by[k].p = NULL;
        } else {
            size_t bytes = 200000 + word[1] % (i % 16 ? 800000 : 8000000);
            unsigned char *p = lt__alloc(ctx, bytes);
            CHECK(p && (uintptr_t)p % 64 == 0);
            p[0] = p[bytes / 2] = p[bytes - 1] = mark;
            held_by[k].p = p;
            held_by[k].bytes = bytes;
        }
        if (i == 2000)
            asked = of_system.asked;
    }
    CHECK(of_system.asked <= asked + 4);
    for (int k = 0; k < MOST; k++)
        lt__free(ctx, held_by[k].p, held_by[k].bytes);
    CHECK_EQ(lt_memory_stats(ctx).live, 0);
    lt_memory_trim(ctx);
    CHECK_EQ(held(ctx), 0);
}

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>

TEST_CTX(free_memory_and_ends_are_poisoned)
{
    char *a = lt__alloc(ctx, MB), *b = lt__alloc(ctx, MB - 100), *small = lt__alloc(ctx, 1000);
    CHECK(!__asan_region_is_poisoned(small, 1000) && __asan_address_is_poisoned(small + 1000));
    lt__free(ctx, small, 1000);
    CHECK(!__asan_region_is_poisoned(a, MB));
    CHECK(!__asan_region_is_poisoned(b, MB - 100));
    CHECK(__asan_address_is_poisoned(a + MB));
    CHECK(__asan_address_is_poisoned(b - 1));
    CHECK(__asan_address_is_poisoned(b + MB - 96));
    lt__free(ctx, a, MB);
    CHECK(__asan_address_is_poisoned(a) && __asan_address_is_poisoned(a + MB - 1));
    lt__free(ctx, b, MB - 100);
}
#endif
