/* test_split.c - a split backward on the emulated accelerator leaves the bits of a whole one. */
#include "tests/autograd/split.h"
#include "tests/device/emu.h"

TEST(f32) { compare_all(open_emu, LT_F32, LT_F32, true); }
TEST(bf16) { compare_all(open_emu, LT_BF16, LT_F32, true); }
TEST(autocast_bf16) { compare_all(open_emu, LT_F32, LT_BF16, true); }
TEST(autocast_f16) { compare_all(open_emu, LT_F32, LT_F16, true); }
