/* shard.c - divides the rows of a batch among ranks, and those of a rank into micro-batches. */
#include "data/data.h"

/* The index of the first row of a rank: its first grain is grains * rank / ranks, rounded up. */
static int64_t rows_before(int64_t rows, int64_t grain, int rank, int ranks)
{
    int64_t grains = rows / grain + (rows % grain != 0), rest = grains % ranks;
    int64_t before = grains / ranks * rank + (rest * rank + ranks - 1) / ranks;
    return before <= rows / grain ? before * grain : rows;
}

void lt_shard(int64_t rows, int64_t grain, int rank, int ranks, int64_t *first, int64_t *count)
{
    *first = rows_before(rows, grain, rank, ranks);
    *count = rows_before(rows, grain, rank + 1, ranks) - *first;
}

int lt_micro_batches(int64_t rows, int64_t grain, int ranks, int max)
{
    int64_t grains = rows / grain + (rows % grain != 0), min = grains / ranks;
    return min < 1 ? 1 : min < max ? (int)min : max;
}
