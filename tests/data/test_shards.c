/* test_shards.c - the part of every batch that each rank gets. */
#include <limits.h>

#include "data/data.h"
#include "tests/lt_test.h"

enum { N = 10, MOST = 7 };

static lt_source *some_images(lt_ctx *ctx)
{
    uint8_t values[N];
    for (int i = 0; i < N; i++)
        values[i] = (uint8_t)i;
    lt_tensor *images = lt_tensor_from(ctx, LT_U8, 3, (int64_t[]){N, 1, 1}, values);
    lt_tensor *labels = lt_tensor_from(ctx, LT_U8, 1, (int64_t[]){N}, values);
    lt_source *source = lt_source_tensors(ctx, images, labels);
    RELEASE(images, labels);
    return source;
}

static int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

/* Checks that the next batch of a pass is the shard of rank `rank` of `ranks`. The whole batch has
 * `rows` rows, starting at row `done`. */
static void check_shard(lt_batches *batches, int64_t done, int64_t rows, int64_t grain, int rank,
                        int ranks)
{
    int64_t first, count;
    lt_tensor *x, *y;
    int64_t grains = (rows + grain - 1) / grain, end;
    lt_shard(rows, grain, rank, ranks, &first, &count);
    end = (grains * (rank + 1) + ranks - 1) / ranks * grain;
    CHECK_EQ(first, lesser((grains * rank + ranks - 1) / ranks * grain, rows));
    CHECK_EQ(first + count, lesser(end, rows));
    CHECK_OK(lt_batches_next(batches, &x, &y));
    CHECK_EQ(lt_dim(x, 0), count > 0 ? count : 1);
    for (int64_t i = 0; i < lt_dim(x, 0); i++)
        CHECK_EQ(((int64_t *)lt_data(y))[i], count > 0 ? done + first + i : done);
    RELEASE(x, y);
}

/* Checks that the next batches of a pass are the shard of rank `rank` in up to `micro` parts. */
static void check_micro_batches(lt_batches *batches, int64_t done, int64_t rows, int64_t grain,
                                int rank, int ranks, int micro)
{
    int64_t first, count, at = 0;
    lt_tensor *x, *y;
    lt_shard(rows, grain, rank, ranks, &first, &count);
    int64_t grains = (count + grain - 1) / grain, least = micro;
    for (int i = 0; i < ranks; i++) {
        int64_t of_rank, before;
        lt_shard(rows, grain, i, ranks, &before, &of_rank);
        least = lesser(least, (of_rank + grain - 1) / grain);
    }
    int64_t n = least < 1 ? 1 : least;
    for (int64_t i = 0; i < n; i++) {
        int64_t end = count == 0 ? 1 : lesser((grains * (i + 1) + n - 1) / n * grain, count);
        CHECK_OK(lt_batches_next(batches, &x, &y));
        CHECK_EQ(lt_dim(x, 0), end - at);
        for (int64_t k = 0; at < end; k++, at++)
            CHECK_EQ(((int64_t *)lt_data(y))[k], count > 0 ? done + first + at : done);
        RELEASE(x, y);
    }
}

/* Counts the batches of a pass until its end. */
static int64_t count_batches(lt_batches *batches)
{
    int64_t n = 0;
    for (lt_tensor *x, *y;; n++) {
        CHECK_OK(lt_batches_next(batches, &x, &y));
        if (!x)
            return n;
        RELEASE(x, y);
    }
}

/* Checks all batches of rank `rank`, which has `shards` of the `ranks * shards` shards. */
static void check_pass(lt_ctx *ctx, lt_source *source, int64_t batch, int64_t grain, int rank,
                       int ranks, int shards)
{
    lt_tensor *x, *y;
    lt_batch_options options = {.batch = batch,
                                .rank = rank * shards,
                                .ranks = ranks * shards,
                                .shards = shards,
                                .grain = grain,
                                .workers = rank % 2 ? 2 : -1};
    lt_batches *batches = lt_batches_new(ctx, source, &options);
    CHECK_EQ(lt_batches_count(batches), (N + batch - 1) / batch * shards);
    for (int64_t done = 0; done < N; done += batch)
        for (int i = 0; i < shards; i++)
            check_shard(batches, done, lesser(N - done, batch), grain, rank * shards + i,
                        ranks * shards);
    CHECK_OK(lt_batches_next(batches, &x, &y));
    CHECK(!x && !y);
    lt_batches_free(batches);
}

TEST_CTX(each_rank_has_its_shards_of_every_batch)
{
    lt_source *source = some_images(ctx);
    for (int64_t batch = 1; batch <= N; batch++)
        for (int64_t grain = 1; grain <= 3; grain++)
            for (int ranks = 1; ranks <= MOST; ranks++)
                for (int rank = 0; rank < ranks; rank++)
                    for (int shards = 1; shards <= 4; shards += shards)
                        check_pass(ctx, source, batch, grain, rank, ranks, shards);
    lt_source_release(source);
}

TEST_CTX(each_shard_is_returned_as_micro_batches)
{
    lt_source *source = some_images(ctx);
    for (int64_t batch = 1; batch <= N; batch++)
        for (int grain = 1; grain <= 3; grain++)
            for (int micro = 1; micro <= 4; micro++)
                for (int rank = 0; rank < 3; rank++) {
                    lt_batch_options options = {
                        .batch = batch, .rank = rank, .ranks = 3, .grain = grain, .micro = micro};
                    lt_batches *batches = lt_batches_new(ctx, source, &options);
                    for (int64_t done = 0; done < N; done += batch)
                        check_micro_batches(batches, done, lesser(N - done, batch), grain, rank, 3,
                                            micro);
                    CHECK_EQ(count_batches(batches), 0);
                    lt_batches_free(batches);
                    batches = lt_batches_new(ctx, source, &options);
                    int64_t n = lt_batches_count(batches);
                    CHECK_EQ(count_batches(batches), n);
                    lt_batches_free(batches);
                }
    lt_source_release(source);
}

TEST_CTX(unequal_shards_are_several_parts_of_a_batch)
{
    static const int parts[] = {1, 5, 2}; /* of each rank */
    enum { RANKS = 3, ALL = 8 };
    lt_source *source = some_images(ctx);
    for (int64_t batch = 1; batch <= N; batch++)
        for (int64_t grain = 1; grain <= 3; grain++)
            for (int rank = 0, before = 0; rank < RANKS; before += parts[rank++]) {
                lt_batch_options options = {.batch = batch,
                                            .rank = before,
                                            .ranks = ALL,
                                            .parts = parts[rank],
                                            .grain = grain};
                lt_batches *batches = lt_batches_new(ctx, source, &options);
                CHECK_EQ(lt_batches_count(batches), (N + batch - 1) / batch);
                for (int64_t done = 0; done < N; done += batch) {
                    int64_t rows = lesser(N - done, batch), first, count, start, end = 0, n;
                    lt_shard_parts(rows, grain, before, parts[rank], ALL, &first, &count);
                    for (int i = 0; i < before + parts[rank]; i++) {
                        lt_shard(rows, grain, i, ALL, &start, &n); /* the shards of equal ranks */
                        end = start + n;
                        if (i == before)
                            CHECK_EQ(first, start);
                    }
                    CHECK_EQ(first + count, end);
                    lt_tensor *x, *y;
                    CHECK_OK(lt_batches_next(batches, &x, &y));
                    CHECK_EQ(lt_dim(x, 0), count > 0 ? count : 1);
                    CHECK_EQ(((int64_t *)lt_data(y))[0], done + (count > 0 ? first : 0));
                    RELEASE(x, y);
                }
                CHECK_EQ(count_batches(batches), 0);
                lt_batches_free(batches);
            }
    lt_batch_options options = {.batch = 4, .rank = 6, .ranks = ALL, .parts = 3};
    CHECK_NULL(lt_batches_new(ctx, source, &options), LT_EINVAL,
               "batches: rank 8 is out of range for 8 ranks");
    options.parts = -1;
    CHECK_NULL(lt_batches_new(ctx, source, &options), LT_EINVAL,
               "batches: parts must be at least 1, but is -1");
    lt_source_release(source);
}

TEST(shards_of_very_many_rows)
{
    int64_t first, count;
    lt_shard(INT64_MAX - 1, 1, 254, 255, &first, &count); /* rows * ranks would overflow */
    CHECK_EQ(first + count, INT64_MAX - 1);
    CHECK_EQ(count, (INT64_MAX - 1) / 255);
    lt_shard_parts(INT64_MAX, 1, INT_MAX - 3, 3, INT_MAX, &first, &count);
    CHECK_EQ(first + count, INT64_MAX);
    lt_shard(INT64_MAX, 2, 2, 3, &first, &count); /* rounding up to whole grains would overflow */
    CHECK_EQ(first + count, INT64_MAX);
}

TEST_CTX(ranks_out_of_range_are_refused)
{
    static const struct {
        int rank, ranks, shards;
        const char *text;
    } cases[] = {{2, 2, 0, "rank 2 is out of range for 2 ranks"},
                 {1, 0, 0, "rank 1 is out of range for 0 ranks"},
                 {-1, 2, 0, "rank -1 is out of range for 2 ranks"},
                 {0, -1, 0, "rank 0 is out of range for -1 ranks"},
                 {2, 4, 3, "rank 4 is out of range for 4 ranks"},
                 {0, 0, 2, "rank 1 is out of range for 0 ranks"},
                 {INT_MAX, 4, 2, "rank 2147483648 is out of range for 4 ranks"}};
    lt_source *source = some_images(ctx);
    CHECK_NULL(lt_batches_new(ctx, source, &(lt_batch_options){.batch = 1, .grain = -1}), LT_EINVAL,
               "grain must be at least 1, but is -1");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lt_batch_options options = {
            .batch = 1, .rank = cases[i].rank, .ranks = cases[i].ranks, .shards = cases[i].shards};
        CHECK_NULL(lt_batches_new(ctx, source, &options), LT_EINVAL, cases[i].text);
    }
    lt_source_release(source);
}

TEST_CTX(more_batches_than_an_integer_holds)
{
    lt_source *source = lt_source_synthetic(ctx, 0, INT64_MAX, 2, 2, 1, 2);
    lt_batch_options options = {.batch = 1, .ranks = 4, .shards = 4};
    lt_batches *b = lt_batches_new(ctx, source, &options);
    CHECK(b != NULL);
    CHECK_EQ(lt_batches_count(b), INT64_MAX);
    lt_batches_free(b);
    lt_source_release(source);
}
