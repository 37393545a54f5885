/* tree_sum.c - sums of shards that are added one after the other; see tree_sum.h. */
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/tree_sum.h"
#include "dist/sum.h"

lt_status lt__tree_sum_check(int shards, int n, lt_dtype wire)
{
    bool fits = shards > 0 && shards <= 1 << LT_TREE_SUM_LEVELS && (shards & (shards - 1)) == 0 &&
                shards % n == 0;
    if (shards != 0 && !fits)
        return lt_fail(LT_EUSAGE,
                       "vranks must be a power of two up to %d that %d rank%s can share, but is %d",
                       1 << LT_TREE_SUM_LEVELS, n, n == 1 ? "" : "s", shards);
    if (shards != 0 && wire != LT_F32)
        return lt_fail(
            LT_EUSAGE,
            "with vranks, gradients must travel in f32, not %s, or their bits would depend on the "
            "number of ranks",
            lt_dtype_name(wire));
    return LT_OK;
}

/* Grows every level to at least `bytes`. New memory is zero. */
static lt_status reserve(lt_tree_sum *sum, int levels, size_t bytes)
{
    for (int i = 0; i < levels; i++) {
        if (sum->level[i] && sum->bytes >= bytes)
            continue;
        size_t had = sum->level[i] ? sum->bytes : 0;
        LT_TRY(LT_RESIZE(sum->level[i], bytes, "for the sum of %d shards", 1 << levels));
        memset(sum->level[i] + had, 0, bytes - had);
    }
    sum->bytes = LT_MAX(bytes, sum->bytes);
    return LT_OK;
}

static int levels_of(int shards)
{
    int levels = 0;
    while (1 << levels < shards)
        levels++;
    return levels;
}

lt_status lt__tree_sum_add(lt_tree_sum *sum, int shard, int shards, void *data, int64_t count,
                           lt_dtype dtype, double scale)
{
    size_t bytes = (size_t)count * lt_dtype_bytes(dtype);
    int level = 0;
    LT_TRY(reserve(sum, levels_of(shards), bytes));
    lt__sum_arrays(&(lt_summand){data, scale}, 1, dtype, dtype, 0, count);
    for (; shard >> level & 1; level++) {
        lt_summand both[2] = {{sum->level[level], 1}, {data, 1}};
        lt__sum_arrays(both, 2, dtype, dtype, 0, count);
    }
    if (shard < shards - 1)
        memcpy(sum->level[level], data, bytes);
    return LT_OK;
}

void lt__tree_sum_free(lt_tree_sum *sum)
{
    for (int i = 0; i < LT_TREE_SUM_LEVELS; i++)
        free(sum->level[i]);
}
