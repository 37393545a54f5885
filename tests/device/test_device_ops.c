/* test_device_ops.c - every case of ops/cases.txt on an emulated accelerator with the reference
 * kernels. Outputs, gradients and inputs must have the bits of the same kernels on the CPU. So this
 * tests everything around the kernels: where tensors are created, which kernel runs, what is
 * copied, converted and added. */
#include "tests/device/reference.h"

/* Whether the values have the same bits; any NaN equals any NaN. */
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
