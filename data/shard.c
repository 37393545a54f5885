/* shard.c - divides the rows of a batch among ranks, and those of a rank into micro-batches. */
#include "data/data.h"

/* The index of the first row of part i of n: its first grain is grains * i / n, rounded up. */
static int64_t rows_before(int64_t rows, int64_t grain, int64_t i, int64_t n)
{
    int64_t grains = rows / grain + (rows % grain != 0), rest = grains % n;
    int64_t before = grains / n * i + (rest * i + n - 1) / n;
    return before <= rows / grain ? before * grain : rows;
}

void lt_shard_parts(int64_t rows, int64_t grain, int part, int parts, int n, int64_t *first,
                    int64_t *count)
{
    *first = rows_before(rows, grain, part, n);
    *count = rows_before(rows, grain, (int64_t)part + parts, n) - *first;
}

void lt_shard(int64_t rows, int64_t grain, int rank, int ranks, int64_t *first, int64_t *count)
{
    lt_shard_parts(rows, grain, rank, 1, ranks, first, count);
}

int lt_micro_batches(int64_t rows, int64_t grain, int ranks, int max)
{
    int64_t grains = rows / grain + (rows % grain != 0), min = grains / ranks;
    return min < 1 ? 1 : min < max ? (int)min : max;
}
