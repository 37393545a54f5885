/* test_device_ops.c - every case of ops/cases.txt on the emulated accelerator: outputs, gradients
 * and inputs have the bits that the same kernels give on the CPU. So what is between them is right:
 * where tensors are made, which kernel runs, what is copied, converted and added. */
#include "tests/device/reference.h"

/* Bits of the values; a NaN is any NaN. */
static bool same(const block *a, const block *b)
{
    bool equal = !a->at == !b->at;
    if (equal && a->at)
        equal = a->dtype == b->dtype && same_dims(a, b);
    for (int64_t i = 0; equal && a->at && i < a->count; i++)
        equal = memcmp(&a->at[i], &b->at[i], sizeof *a->at) == 0 ||
                (isnan(a->at[i]) && isnan(b->at[i]));
    return equal;
}

static void walk_op(const char *op)
{
    walk_cases(op, (lt_ctx *[]){open_emu(), open_reference()}, same);
}

#define X(name)                                                                                    \
    TEST(name) { walk_op(#name); }
#include "ops/list.h"
LT_OP_LIST(X)
#undef X
