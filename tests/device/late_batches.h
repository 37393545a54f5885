/* late_batches.h - for tests of accelerators: that batches come to one as they are on the CPU. */
#ifndef TESTS_DEVICE_LATE_BATCHES_H
#define TESTS_DEVICE_LATE_BATCHES_H

#include "core/tensor.h"
#include "data/data.h"
#include "tests/device/emu.h"

/* All batches of a pass are taken before anything is waited for, and looked at then. */
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
    lt_batches *batches = lt_batches_new(ctx, source, &(lt_batch_options){.batch = BATCH,
                                                                          .workers = workers});
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

/* A pass that is given up while batches are on their way. */
static inline void check_batches_left(void)
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
