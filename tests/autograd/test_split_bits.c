/* test_split_bits.c - a split backward leaves the bits of a whole one. */
#include "tests/autograd/split.h"

static lt_ctx *open_fast(void)
{
    return lt_open(&(lt_config){.seed = 3, .threads = 2, .poison = true});
}

static lt_ctx *open_plain(void)
{
    return lt_open(&(lt_config){.seed = 3, .threads = 1, .poison = true, .reference = true});
}

/* The fast kernels of some CPUs support only one of the gradients in bf16, so it may be whole. */
TEST(fast_f32) { compare_all(open_fast, LT_F32, LT_F32, true); }
TEST(fast_f64) { compare_all(open_fast, LT_F64, LT_F32, true); }
TEST(fast_bf16) { compare_all(open_fast, LT_BF16, LT_F32, false); }
TEST(fast_f16) { compare_all(open_fast, LT_F16, LT_F32, true); }
TEST(fast_autocast_bf16) { compare_all(open_fast, LT_F32, LT_BF16, false); }
TEST(fast_autocast_f16) { compare_all(open_fast, LT_F32, LT_F16, true); }
TEST(reference_f32) { compare_all(open_plain, LT_F32, LT_F32, true); }
TEST(reference_f64) { compare_all(open_plain, LT_F64, LT_F32, true); }
TEST(reference_bf16) { compare_all(open_plain, LT_BF16, LT_F32, true); }
TEST(reference_f16) { compare_all(open_plain, LT_F16, LT_F32, true); }
TEST(reference_autocast_bf16) { compare_all(open_plain, LT_F32, LT_BF16, true); }
TEST(reference_autocast_f16) { compare_all(open_plain, LT_F32, LT_F16, true); }
