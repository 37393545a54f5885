/* test_tree_sum.c - shards summed one after the other give the same bits as shards on several
 * ranks. */
#include "dist/tree_sum.h"
#include "dist/sum.h"
#include "tests/lt_test.h"

enum { MOST = 16, N = 1000 };

static void fill(float *x, int shard)
{
    for (int i = 0; i < N; i++)
        x[i] = sinf((float)(i * 37 + shard * 1009)) * (float)(1 << (i + shard) % 20);
}

TEST(a_tree_sum_equals_the_sum_over_ranks)
{
    static float all[MOST][N], one[N];
    for (int shards = 1; shards <= MOST; shards *= 2) {
        lt_summand share[MOST];
        lt_tree_sum sum = {0};
        for (int k = 0; k < shards; k++) {
            fill(all[k], k);
            share[k] = (lt_summand){all[k], 0.1 * (k + 1)};
        }
        lt__sum_arrays(share, shards, LT_F32, LT_F32, 0, N);
        for (int step = 0; step < 2; step++) { /* levels are reused */
            for (int k = 0; k < shards; k++) {
                fill(one, k);
                CHECK_OK(lt__tree_sum_add(&sum, k, shards, one, N, LT_F32, 0.1 * (k + 1)));
            }
            CHECK_EQ(memcmp(one, all[0], sizeof one), 0);
        }
        lt__tree_sum_free(&sum);
    }
}

/* Every way to divide 8 shards: each rank adds its own, then the ranks are summed. */
TEST(tree_sums_of_ranks_give_the_same_bits)
{
    static float part[8][N], want[N];
    for (int ranks = 8; ranks >= 1; ranks /= 2) {
        lt_summand share[8];
        for (int r = 0; r < ranks; r++) {
            lt_tree_sum sum = {0};
            for (int k = 0; k < 8 / ranks; k++) {
                fill(part[r], r * (8 / ranks) + k);
                CHECK_OK(lt__tree_sum_add(&sum, k, 8 / ranks, part[r], N, LT_F32, 1.0 / 3));
            }
            share[r] = (lt_summand){part[r], 1};
            lt__tree_sum_free(&sum);
        }
        lt__sum_arrays(share, ranks, LT_F32, LT_F32, 0, N);
        if (ranks == 8)
            memcpy(want, part[0], sizeof want);
        CHECK_EQ(memcmp(part[0], want, sizeof want), 0);
    }
}

TEST(added_elements_start_at_zero)
{
    lt_tree_sum sum = {0};
    double x[4] = {1, 2, 3, 4};
    CHECK_OK(lt__tree_sum_add(&sum, 0, 4, x, 1, LT_F64, 1));
    CHECK_OK(lt__tree_sum_add(&sum, 1, 4, x, 2, LT_F64, 1)); /* x[0] + x[0] */
    CHECK_OK(lt__tree_sum_add(&sum, 2, 4, (double[]){10, 20, 30}, 3, LT_F64, 1));
    double last[4] = {100, 200, 300, 400};
    CHECK_OK(lt__tree_sum_add(&sum, 3, 4, last, 4, LT_F64, 1));
    CHECK_NEAR(last[0], 112, 0);
    CHECK_NEAR(last[1], 222, 0);
    CHECK_NEAR(last[2], 330, 0);
    CHECK_NEAR(last[3], 400, 0);
    CHECK_OK(lt__tree_sum_add(&sum, 0, 1, last, 0, LT_F64, 1));
    lt__tree_sum_free(&sum);
}
