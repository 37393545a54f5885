/* test_conv_choice.c - which implementation conv2d uses for which task, on a machine with fast
 * products of f32 and bf16. The choices were measured; a change of the list must not move them. */
#include "tests/ops/conv.h"

typedef struct row {
    lt_conv_task_kind kind;
    lt_dtype dtype, of_w; /* of x and y; of w */
    int64_t n, side, in, out, groups, kernel, stride;
    const char *name; /* NULL: no implementation accepts the task */
} row;

static const row rows[] = {
    /* images of few channels */
    {LT_CONV, LT_F32, LT_F32, 64, 28, 1, 32, 1, 5, 1, "thin"},
    {LT_CONV, LT_F32, LT_F32, 64, 32, 3, 32, 1, 3, 1, "oneDNN"},
    {LT_CONV_WEIGHTS, LT_F32, LT_F32, 64, 32, 3, 32, 1, 3, 1, "thin"},
    /* 3x3 with stride 1 */
    {LT_CONV, LT_F32, LT_F32, 32, 32, 16, 16, 1, 3, 1, "oneDNN"},
    {LT_CONV, LT_F32, LT_F32, 32, 16, 32, 32, 1, 3, 1, "winograd"},
    {LT_CONV_DATA, LT_F32, LT_F32, 32, 16, 32, 32, 1, 3, 1, "winograd"},
    {LT_CONV_WEIGHTS, LT_F32, LT_F32, 32, 16, 32, 32, 1, 3, 1, "winograd"},
    {LT_CONV, LT_BF16, LT_BF16, 32, 16, 32, 32, 1, 3, 1, "winograd"},
    {LT_CONV_WEIGHTS, LT_BF16, LT_F32, 64, 32, 16, 16, 1, 3, 1, "winograd"},
    {LT_CONV_WEIGHTS, LT_BF16, LT_F32, 64, 32, 32, 32, 1, 3, 1, "winograd"},
    /* 3x3 with stride 2 */
    {LT_CONV, LT_F32, LT_F32, 128, 32, 16, 32, 1, 3, 2, "oneDNN"},
    {LT_CONV_DATA, LT_F32, LT_F32, 128, 32, 16, 32, 1, 3, 2, "oneDNN"},
    {LT_CONV_WEIGHTS, LT_F32, LT_F32, 128, 32, 16, 32, 1, 3, 2, "weights"},
    {LT_CONV_WEIGHTS, LT_BF16, LT_F32, 128, 32, 16, 32, 1, 3, 2, "weights"},
    {LT_CONV_WEIGHTS, LT_F32, LT_F32, 2, 32, 16, 32, 1, 3, 2, "oneDNN"},
    /* depthwise */
    {LT_CONV, LT_F32, LT_F32, 4, 14, 64, 64, 64, 3, 1, "depthwise"},
    {LT_CONV_DATA, LT_BF16, LT_BF16, 4, 14, 64, 64, 64, 3, 2, "depthwise"},
    {LT_CONV_WEIGHTS, LT_BF16, LT_F32, 4, 14, 64, 64, 64, 3, 1, "depthwise"},
    {LT_CONV, LT_F32, LT_F32, 4, 14, 64, 64, 64, 5, 1, "oneDNN"},
    /* no images, which oneDNN is not asked for, and dtypes that only the reference takes */
    {LT_CONV, LT_F32, LT_F32, 0, 16, 8, 8, 1, 3, 1, "portable"},
    {LT_CONV, LT_BF16, LT_BF16, 0, 16, 8, 8, 1, 3, 1, NULL},
    {LT_CONV_WEIGHTS, LT_F64, LT_F64, 32, 16, 32, 32, 1, 3, 1, "portable"},
    {LT_CONV, LT_F16, LT_F16, 32, 16, 32, 32, 1, 3, 1, NULL},
};

/* Without oneDNN, the portable code computes what is f32. */
static const char *name_wanted(const row *r, bool has_onednn)
{
    if (has_onednn || !r->name || strcmp(r->name, "oneDNN") != 0)
        return r->name;
    return r->dtype == LT_F32 ? "portable" : NULL;
}

TEST(each_task_has_its_implementation)
{
    char backend[96];
    if (!has_fast_products(true))
        SKIP("no instructions for products of bf16 here");
    bool has_onednn = strncmp(lt_backend(NULL, backend, sizeof backend), "oneDNN", 6) == 0;
    lt_ctx *ctx = ctx_with((lt_config){.threads = 2});
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const row *r = &rows[i];
        lt_conv v = conv_with(r->n, (int64_t[]){r->side, r->side}, r->in, r->out, r->groups,
                              r->kernel, r->stride, (int64_t[]){r->kernel / 2, r->kernel / 2});
        lt_operand of = {&v, r->dtype}; /* is not read */
        lt_conv_task task = {.kind = r->kind, .conv = &v, .x = of, .w = {&v, r->of_w}, .y = of};
        lt_call call = {.ctx = ctx, .threads = 2};
        const lt_conv_impl *impl;
        lt_status status = lt__conv_choose(&call, &task, &impl);
        const char *want = name_wanted(r, has_onednn);
        CHECK_EQ(status, want ? LT_OK : LT_EUNSUPPORTED);
        if (want && strcmp(impl->name, want) != 0)
            FAIL("row %zu runs with %s, not with %s", i, impl->name, want);
    }
    lt_ctx_free(ctx);
}
