/* deferred_batches.h - checks that batches on an accelerator equal those on the CPU. */
#ifndef TESTS_DEVICE_DEFERRED_BATCHES_H
#define TESTS_DEVICE_DEFERRED_BATCHES_H

#include "core/tensor.h"
#include "data/data.h"
#include "tests/device/emu.h"

/* Takes all batches of an epoch before it waits for any of them, then checks their contents. */
static inline void check_batches(int workers)
{
    enum { IMAGES = 100, BATCH = 7, BATCHES = 15 };
    lt_ctx *ctx = open_device();
    float all[IMAGES * 4], got[BATCH * 4];
    int64_t label[IMAGES], label_got[BATCH];
    lt_tensor *x[BATCHES], *y[BATCHES];
    for (int i = 0; i < IMAGES * 4; i++)
        all[i] = (float)i / 3;
    for (int i = 0; i < IMAGES; i++)
        label[i] = i * 5 % 13;
    lt_tensor *images = lt_tensor_from(ctx, LT_F32, 4, (int64_t[]){IMAGES, 2, 2, 1}, all);
    lt_tensor *labels = lt_tensor_from(ctx, LT_I64, 1, (int64_t[]){IMAGES}, label);
    lt_tensor *set[] = {lt_to(images, "cpu"), lt_to(labels, "cpu")};
    lt_source *source = lt_source_tensors(ctx, set[0], set[1]);
    lt_batches *batches =
        lt_batches_new(ctx, source, &(lt_batch_options){.batch = BATCH, .workers = workers});
    CHECK(batches != NULL);
    for (int i = 0; i < BATCHES; i++)
        CHECK_OK(lt_batches_next(batches, &x[i], &y[i]));
    for (int i = 0; i < BATCHES; i++) {
        int64_t n = lt_count(y[i]);
        CHECK_EQ(n, i < BATCHES - 1 ? BATCH : IMAGES % BATCH);
        CHECK_OK(lt_read(x[i], got));
        CHECK_OK(lt_read(y[i], label_got));
        CHECK(memcmp(got, all + i * BATCH * 4, (size_t)n * 4 * sizeof *got) == 0);
        CHECK(memcmp(label_got, label + i * BATCH, (size_t)n * sizeof *label_got) == 0);
        lt_release(x[i]);
        lt_release(y[i]);
    }
    lt_tensor *rest[] = {set[0], set[1], images, labels};
    for (int i = 0; i < 4; i++)
        lt_release(rest[i]);
    lt_batches_free(batches);
    lt_source_release(source);
    lt_ctx_free(ctx);
}

/* A source of 100 images of (2, 2, 1) f32: image i has values 4 i + 0..3 and label i. New. */
static inline lt_source *open_quads(lt_ctx *ctx)
{
    float all[400];
    int64_t label[100];
    for (int i = 0; i < 400; i++)
        all[i] = (float)i;
    for (int i = 0; i < 100; i++)
        label[i] = i;
    lt_tensor *images = lt_tensor_from(ctx, LT_F32, 4, (int64_t[]){100, 2, 2, 1}, all);
    lt_tensor *labels = lt_tensor_from(ctx, LT_I64, 1, (int64_t[]){100}, label);
    lt_source *source = lt_source_tensors(ctx, images, labels);
    lt_release(images);
    lt_release(labels);
    return source;
}

/* Requests batches in another order than the epoch's, and takes all of them before it waits for any
 * of them. The memory of a slot is reused for a smaller and a larger batch. */
static inline void check_requested_batches(int workers)
{
    enum { BATCHES = 40, BATCH = 7 };
    lt_ctx *ctx = open_device();
    lt_tensor *x[BATCHES], *y[BATCHES];
    lt_source *source = open_quads(ctx);
    lt_batch_options options = {.batch = BATCH, .workers = workers, .on_request = true};
    lt_batches *batches = lt_batches_new(ctx, source, &options);
    CHECK(batches != NULL);
    for (int i = 0; i < BATCHES + LT_MAX_REQUESTS; i++) {
        if (i >= LT_MAX_REQUESTS)
            CHECK_OK(lt_batches_next(batches, &x[i - LT_MAX_REQUESTS], &y[i - LT_MAX_REQUESTS]));
        if (i < BATCHES)
            CHECK_OK(lt_batches_request(batches, i * 37 % 100));
    }
    for (int i = 0; i < BATCHES; i++) {
        float got[BATCH * 4];
        int64_t label[BATCH], first = i * 37 % 100, n = 100 - first;
        CHECK_EQ(lt_count(y[i]), n < BATCH ? n : BATCH);
        CHECK_OK(lt_read(x[i], got));
        CHECK_OK(lt_read(y[i], label));
        for (int64_t k = 0; k < lt_count(x[i]); k++)
            CHECK(got[k] == (float)(4 * first + k));
        for (int64_t k = 0; k < lt_count(y[i]); k++)
            CHECK_EQ(label[k], first + k);
        lt_release(x[i]);
        lt_release(y[i]);
    }
    lt_batches_free(batches);
    lt_source_release(source);
    lt_ctx_free(ctx);
}

/* A request uploads earlier requested batches that are complete. */
static inline void check_uploads_at_requests(void)
{
    lt_ctx *ctx = open_device();
    lt_source *source = open_quads(ctx);
    lt_batch_options options = {.batch = 7, .workers = 1, .on_request = true};
    lt_batches *batches = lt_batches_new(ctx, source, &options);
    CHECK(batches != NULL);
    size_t before = lt_device_memory_stats(ctx).live;
    for (int i = 0; i < LT_MAX_REQUESTS && lt_device_memory_stats(ctx).live == before; i++) {
        CHECK_OK(lt_batches_request(batches, i));
        usleep(20000 * (unsigned)(i + 1)); /* up to 2.7 s in all */
    }
    CHECK(lt_device_memory_stats(ctx).live > before);
    lt_batches_free(batches);
    lt_source_release(source);
    CHECK_EQ(lt_device_memory_stats(ctx).live, before);
    lt_ctx_free(ctx);
}

/* Makes an epoch of normalized and augmented batches in ctx, from a data set of bytes, and copies
 * them to x. */
static inline void read_batches(lt_ctx *ctx, lt_dtype dtype, int64_t channels, int workers, char *x)
{
    enum { IMAGES = 20, H = 5, W = 3 };
    uint8_t bytes[IMAGES * H * W * 4], label[IMAGES] = {0};
    lt_tensor *batch, *labels;
    for (int i = 0; i < IMAGES * H * W * 4; i++)
        bytes[i] = (uint8_t)(i * 37);
    lt_tensor *set[] = {lt_tensor_from(ctx, LT_U8, 4, (int64_t[]){IMAGES, H, W, channels}, bytes),
                        lt_tensor_from(ctx, LT_U8, 1, (int64_t[]){IMAGES}, label)};
    lt_source *source = lt_source_tensors(ctx, set[0], set[1]);
    lt_batch_options options = {.batch = 7,
                                .shuffle = true,
                                .crop = 1,
                                .flip = true,
                                .dtype = dtype,
                                .workers = workers,
                                .mean = {0.5, 0.4, 0.3},
                                .std = {0.1, 0.2, 0.3, 0.4}};
    lt_batches *batches = lt_batches_new(ctx, source, &options);
    CHECK(batches != NULL);
    for (int i = 0; i < 3; i++) { /* the last one is smaller */
        CHECK_OK(lt_batches_next(batches, &batch, &labels));
        CHECK_EQ(lt_tensor_dtype(batch), dtype);
        CHECK(strcmp(lt_device_of(batch), lt_device_name(ctx)) == 0);
        CHECK_OK(lt_read(batch, x));
        x += (size_t)lt_count(batch) * lt_dtype_bytes(dtype);
        lt_release(batch);
        lt_release(labels);
    }
    lt_release(set[0]);
    lt_release(set[1]);
    lt_batches_free(batches);
    lt_source_release(source);
}

static inline void check_batches_of_bytes(void)
{
    static const lt_dtype dtypes[] = {LT_F32, LT_F64, LT_F16, LT_BF16, LT_U8};
    static char here[20 * 5 * 3 * 4 * 8], there[sizeof here];
    lt_ctx *cpu = lt_open(NULL), *ctx = open_device();
    for (int i = 0; i < 5; i++)
        for (int channels = 1; channels <= 4; channels++)
            for (int workers = -1; workers <= 2; workers += 3) {
                size_t bytes = (size_t)(20 * 5 * 3 * channels) * lt_dtype_bytes(dtypes[i]);
                read_batches(cpu, dtypes[i], channels, workers, here);
                read_batches(ctx, dtypes[i], channels, workers, there);
                if (memcmp(here, there, bytes) != 0)
                    FAIL("images of %d channels in %s differ", channels, lt_dtype_name(dtypes[i]));
            }
    lt_ctx_free(ctx);
    lt_ctx_free(cpu);
}

/* Abandons an epoch while batches are in progress. */
static inline void check_abandoned_batches(void)
{
    lt_ctx *ctx = open_device();
    lt_tensor *images = lt_tensor_full(ctx, LT_F32, 4, (int64_t[]){100, 2, 2, 1}, 1), *x, *y;
    lt_tensor *labels = lt_tensor_full(ctx, LT_I64, 1, (int64_t[]){100}, 1);
    for (int taken = 0; taken < 3; taken++) {
        lt_source *source = lt_source_tensors(ctx, images, labels);
        lt_batches *batches = lt_batches_new(ctx, source, &(lt_batch_options){.batch = 7});
        for (int i = 0; i < taken; i++) {
            CHECK_OK(lt_batches_next(batches, &x, &y));
            lt_release(x);
            lt_release(y);
        }
        lt_batches_free(batches);
        lt_source_release(source);
    }
    lt_release(images);
    lt_release(labels);
    lt_ctx_free(ctx);
}

#endif
