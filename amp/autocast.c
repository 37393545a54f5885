/* autocast.c - the cast policy: the dtype to which each input of an op is converted before it runs.
 *
 * An f32 parameter is read through its half copy, which is made once per step for the whole arena.
 * Other tensors go through the op `cast`, which is recorded, so that their gradients come back in
 * their own dtype. A call with an f64 tensor is left alone: f64 is deliberate, as in a gradient
 * check.
 */
#include "amp/amp.h"

static bool is_half(lt_dtype dtype) { return dtype == LT_F16 || dtype == LT_BF16; }

/* The dtype for the float inputs of a call; LT_DTYPE_COUNT to leave them as they are. */
static lt_dtype wanted(lt_cast_policy policy, lt_dtype half, lt_tensor *const *in, int n_in)
{
    lt_dtype widest = LT_DTYPE_COUNT;
    for (int i = 0; i < n_in; i++) {
        lt_dtype dtype = in[i] ? lt_tensor_dtype(in[i]) : LT_DTYPE_COUNT;
        if (dtype == LT_F64)
            return LT_DTYPE_COUNT;
        if (dtype == LT_F32 || is_half(dtype)) /* only f32 can represent both */
            widest = widest == LT_DTYPE_COUNT || widest == dtype ? dtype : LT_F32;
    }
    return policy == LT_CAST_HALF ? half : policy == LT_CAST_F32 ? LT_F32 : widest;
}

/* x in dtype. New. NULL on failure. */
static lt_tensor *cast_to(lt_tensor *x, lt_dtype dtype)
{
    if (lt_is_param(x) && lt_tensor_dtype(x) == LT_F32)
        return lt_retain(lt_half(x, dtype));
    lt_ctx *ctx = lt_tensor_ctx(x);
    const lt_def *cast = lt_op_find(ctx, "cast");
    lt_opt option = {.kind = LT_KIND_DTYPE, .n = 1, .i = {dtype}};
    lt_tensor *y;
    return cast && lt_apply(ctx, cast, &x, 1, &option, &y) == LT_OK ? y : NULL;
}

static lt_status cast_inputs(void *ud, const lt_def *def, lt_tensor **in, int n_in)
{
    lt_cast_policy policy = def->op->cast;
    if (policy == LT_CAST_ANY || def->op->in_place) /* an in-place op would write to the copy */
        return LT_OK;
    lt_dtype dtype = wanted(policy, *(const lt_dtype *)ud, in, n_in);
    for (int i = 0; i < n_in && dtype != LT_DTYPE_COUNT; i++) {
        lt_dtype is = in[i] ? lt_tensor_dtype(in[i]) : dtype;
        if (is == dtype || !(is == LT_F32 || is_half(is)))
            continue;
        lt_tensor *y = cast_to(in[i], dtype);
        if (!y)
            return lt_errcode();
        lt_release(in[i]);
        in[i] = y;
    }
    return LT_OK;
}

void lt_set_autocast(lt_ctx *ctx, lt_dtype dtype)
{
    static const lt_dtype halves[] = {LT_F16, LT_BF16};
    if (is_half(dtype))
        lt_set_cast(ctx, cast_inputs, (void *)&halves[dtype == LT_BF16]);
    else
        lt_set_cast(ctx, NULL, NULL);
}

lt_dtype lt_autocast(const lt_ctx *ctx)
{
    void *ud;
    return lt_get_cast(ctx, &ud) == cast_inputs ? *(const lt_dtype *)ud : LT_F32;
}
