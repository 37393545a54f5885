/* stand_in_cudnn_run.c - the second part of the stand-in for cuDNN: checks that attributes are
 * consistent, and computes graphs.
 */
#include "tests/cuda/stand_in_cudnn.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/cuda/stand_in_float.h"

/* ==== Tensors ================================================================================= */

enum { N, C, H, W, AXES };
enum { X_OF, W_OF, Y_OF, PARTS }; /* tensors of a convolution */

static const int64_t *dims(const descriptor *t) { return values(t, CUDNN_ATTR_TENSOR_DIMENSIONS); }

static bool is_virtual(const descriptor *t)
{
    const bool *yes = values(t, CUDNN_ATTR_TENSOR_IS_VIRTUAL);
    return yes && *yes;
}

static int64_t count(const descriptor *t)
{
    const int64_t *d = dims(t);
    return d[N] * d[C] * d[H] * d[W];
}

static int64_t element_bytes(int type) { return type == CUDNN_DATA_FLOAT ? 4 : 2; }

static cudnnStatus_t check_tensor(const descriptor *t)
{
    const int64_t *d = dims(t), *s = values(t, CUDNN_ATTR_TENSOR_STRIDES);
    const int type = word(t, CUDNN_ATTR_TENSOR_DATA_TYPE);
    const int64_t alignment = integer(t, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
    for (int i = 0; i < AXES; i++)
        if (d[i] < 1)
            return refuse(CUDNN_STATUS_BAD_PARAM, "a dim of a tensor is less than 1");
    if (s[C] != 1 || s[W] != d[C] || s[H] != d[W] * d[C] || s[N] != d[H] * s[H])
        return refuse(CUDNN_STATUS_NOT_SUPPORTED_LAYOUT, "the strides of a tensor are not NHWC");
    if (type != CUDNN_DATA_FLOAT && type != CUDNN_DATA_HALF && type != CUDNN_DATA_BFLOAT16)
        return refuse(CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE, "unsupported type of a tensor");
    if (alignment < element_bytes(type) || (alignment & (alignment - 1)) != 0)
        return refuse(CUDNN_STATUS_BAD_PARAM, "invalid alignment of a tensor");
    return CUDNN_STATUS_SUCCESS;
}

static double element(const void *at, int type, int64_t i)
{
    return type == CUDNN_DATA_FLOAT  ? ((const float *)at)[i]
           : type == CUDNN_DATA_HALF ? of_f16(((const uint16_t *)at)[i])
                                     : of_bf16(((const uint16_t *)at)[i]);
}

static void set_element(void *at, int type, int64_t i, double value)
{
    if (type == CUDNN_DATA_FLOAT)
        ((float *)at)[i] = (float)value;
    else
        ((uint16_t *)at)[i] = (type == CUDNN_DATA_HALF ? to_f16 : to_bf16)((float)value);
}

/* ==== Operations ============================================================================== */

static const struct {
    int type, conv, part[PARTS], alpha, beta, result;
} conv_ops[] = {
#define CONV_OP(type, prefix, x, w, y, result)                                                     \
    {CONV_TYPE(type),                                                                              \
     CONV_ATTR(prefix, CONV_DESC),                                                                 \
     {CONV_ATTR(prefix, x), CONV_ATTR(prefix, w), CONV_ATTR(prefix, y)},                           \
     CONV_ATTR(prefix, ALPHA),                                                                     \
     CONV_ATTR(prefix, BETA),                                                                      \
     result},
    CONV_OPS(CONV_OP)};

static int conv_op(const descriptor *d)
{
    for (int i = 0; i < 3; i++)
        if (conv_ops[i].type == d->type)
            return i;
    return -1;
}

/* Padding, stride and dilation of a convolution, for h and w. */
typedef struct window {
    int64_t before[2], after[2], stride[2], dilation[2];
} window;

static window conv_window(const descriptor *c)
{
    window w;
    memcpy(w.before, values(c, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS), sizeof w.before);
    memcpy(w.after, values(c, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS), sizeof w.after);
    memcpy(w.stride, values(c, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES), sizeof w.stride);
    memcpy(w.dilation, values(c, CUDNN_ATTR_CONVOLUTION_DILATIONS), sizeof w.dilation);
    return w;
}

static bool fits(const window *w, const int64_t *x, const int64_t *kernel, const int64_t *y)
{
    for (int i = 0; i < 2; i++) {
        if (w->before[i] < 0 || w->after[i] != w->before[i] || w->stride[i] < 1)
            return false;
        int64_t last = x[H + i] + w->before[i] + w->after[i] - (kernel[i] - 1) * w->dilation[i] - 1;
        if (last < 0 || y[H + i] != last / w->stride[i] + 1)
            return false;
    }
    return true;
}

static cudnnStatus_t check_conv(const descriptor *d, int op)
{
    const descriptor *conv = linked(d, conv_ops[op].conv), *part[PARTS];
    const int64_t *dim[PARTS];
    for (int i = 0; i < PARTS; i++)
        dim[i] = dims(part[i] = linked(d, conv_ops[op].part[i]));
    const window w = conv_window(conv);
    const int64_t groups = dim[W_OF][C] > 0 ? dim[X_OF][C] / dim[W_OF][C] : 0;
    if (word(conv, CUDNN_ATTR_CONVOLUTION_COMP_TYPE) != CUDNN_DATA_FLOAT ||
        word(conv, CUDNN_ATTR_CONVOLUTION_CONV_MODE) != CUDNN_CROSS_CORRELATION)
        return refuse(CUDNN_STATUS_NOT_SUPPORTED, "the mode or compute type is not supported");
    if (dim[X_OF][N] != dim[Y_OF][N] || dim[W_OF][N] != dim[Y_OF][C] || groups < 1 ||
        dim[X_OF][C] != groups * dim[W_OF][C] || dim[Y_OF][C] % groups != 0)
        return refuse(CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH, "batch sizes or channels differ");
    if (!fits(&w, dim[X_OF], &dim[W_OF][H], dim[Y_OF]))
        return refuse(CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH, "the window does not fit");
    for (int i = 0; i < PARTS; i++) {
        int type = word(part[i], CUDNN_ATTR_TENSOR_DATA_TYPE);
        if (is_virtual(part[i]) ? i != Y_OF || type != CUDNN_DATA_FLOAT
                                : type != word(part[W_OF], CUDNN_ATTR_TENSOR_DATA_TYPE))
            return refuse(CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE, "operands have different types");
    }
    return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t check_bias(const descriptor *d)
{
    const descriptor *how = linked(d, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    const descriptor *x = linked(d, CUDNN_ATTR_OPERATION_POINTWISE_XDESC);
    const descriptor *b = linked(d, CUDNN_ATTR_OPERATION_POINTWISE_BDESC);
    const descriptor *y = linked(d, CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
    const int64_t *of = dims(b);
    if (word(how, CUDNN_ATTR_POINTWISE_MODE) != CUDNN_POINTWISE_ADD ||
        word(how, CUDNN_ATTR_POINTWISE_MATH_PREC) != CUDNN_DATA_FLOAT)
        return refuse(CUDNN_STATUS_NOT_SUPPORTED, "the pointwise operation is not an addition");
    if (memcmp(dims(x), dims(y), AXES * sizeof(int64_t)) != 0 || of[N] != 1 || of[H] != 1 ||
        of[W] != 1 || of[C] != dims(y)[C])
        return refuse(CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH, "the bias does not fit");
    return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t check_pack(const descriptor *d)
{
    const attribute *numbers = find(d, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    if (numbers->n != find(d, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS)->n)
        return refuse(CUDNN_STATUS_BAD_PARAM, "a pack has more ids or more pointers");
    return CUDNN_STATUS_SUCCESS;
}

/* A graph of two operations must be a convolution into a virtual tensor, and a bias added to it. */
static cudnnStatus_t check_graph(const descriptor *d)
{
    const attribute *ops = find(d, CUDNN_ATTR_OPERATIONGRAPH_OPS);
    const descriptor *const *op = ops->values;
    const int conv = conv_op(op[0]);
    const descriptor *y = conv >= 0 ? linked(op[0], conv_ops[conv].part[Y_OF]) : NULL;
    if (op[0]->type == stand_in_state.unsupported)
        return refuse(CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN, "failure set by the test");
    if (ops->n == 1)
        return y && is_virtual(y) ? refuse(CUDNN_STATUS_BAD_PARAM, "the graph has no output")
                                  : CUDNN_STATUS_SUCCESS;
    if (!y || !is_virtual(y) || linked(op[1], CUDNN_ATTR_OPERATION_POINTWISE_XDESC) != y)
        return refuse(CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN, "the operations are not linked");
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t check(const descriptor *d)
{
    switch (d->type) {
    case CUDNN_BACKEND_TENSOR_DESCRIPTOR: return check_tensor(d);
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR: return check_bias(d);
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR: return check_graph(d);
    case CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR: return check_pack(d);
    default: return conv_op(d) >= 0 ? check_conv(d, conv_op(d)) : CUDNN_STATUS_SUCCESS;
    }
}

/* ==== Running ================================================================================= */

/* The data of a tensor, or NULL if the pack has none or its alignment is less than declared. */
static void *data_of(const descriptor *pack, const descriptor *t)
{
    const attribute *numbers = find(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    void *const *at = values(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    for (int64_t i = 0; i < numbers->n; i++)
        if (((const int64_t *)numbers->values)[i] == integer(t, CUDNN_ATTR_TENSOR_UNIQUE_ID))
            return (uintptr_t)at[i] % (uintptr_t)integer(t, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT) == 0
                       ? at[i]
                       : NULL;
    return NULL;
}

/* The elements as doubles, times factor. New, by malloc. */
static double *widened(const descriptor *t, const void *at, double factor)
{
    const int type = word(t, CUDNN_ATTR_TENSOR_DATA_TYPE);
    double *wide = malloc((size_t)count(t) * sizeof *wide);
    if (!wide)
        abort();
    for (int64_t i = 0; i < count(t); i++)
        wide[i] = at && factor != 0 ? factor * element(at, type, i) : 0;
    return wide;
}

static int64_t at(const descriptor *t, int64_t n, int64_t c, int64_t h, int64_t w)
{
    const int64_t *d = dims(t);
    return ((n * d[H] + h) * d[W] + w) * d[C] + c;
}

/* Adds all products of a convolution to the result, which is one of its three tensors. */
static void multiply(const descriptor *const part[PARTS], const window *w, int result, double alpha,
                     double *const v[PARTS])
{
    const int64_t *x = dims(part[X_OF]), *k = dims(part[W_OF]), *y = dims(part[Y_OF]);
    const int64_t each = y[C] / (x[C] / k[C]); /* output channels of a group */
    for (int64_t i = 0; i < count(part[Y_OF]); i++) {
        int64_t o = i % y[C], ow = i / y[C] % y[W], oh = i / y[C] / y[W] % y[H];
        int64_t n = i / y[C] / y[W] / y[H];
        for (int64_t j = 0; j < k[C] * k[H] * k[W]; j++) {
            int64_t c = j % k[C], kw = j / k[C] % k[W], kh = j / k[C] / k[W];
            int64_t h = oh * w->stride[0] - w->before[0] + kh * w->dilation[0];
            int64_t l = ow * w->stride[1] - w->before[1] + kw * w->dilation[1];
            if (h < 0 || h >= x[H] || l < 0 || l >= x[W])
                continue;
            double *a = &v[X_OF][at(part[X_OF], n, o / each * k[C] + c, h, l)];
            double *b = &v[W_OF][at(part[W_OF], o, c, kh, kw)], *s = &v[Y_OF][i];
            if (result == Y_OF)
                *s += alpha * *a * *b;
            else if (result == X_OF)
                *a += alpha * *s * *b;
            else
                *b += alpha * *s * *a;
        }
    }
}

cudnnStatus_t run_graph(const descriptor *graph, const descriptor *pack)
{
    const attribute *ops = find(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS);
    const descriptor *d = ((descriptor **)ops->values)[0];
    const descriptor *with = ops->n > 1 ? ((descriptor **)ops->values)[1] : NULL;
    const int op = conv_op(d), result = conv_ops[op].result;
    const window w = conv_window(linked(d, conv_ops[op].conv));
    const float *alpha = values(d, conv_ops[op].alpha), *beta = values(d, conv_ops[op].beta);
    const descriptor *part[PARTS], *to, *bias = NULL;
    void *data[PARTS];
    for (int i = 0; i < PARTS; i++) {
        part[i] = linked(d, conv_ops[op].part[i]);
        data[i] = data_of(pack, part[i]);
    }
    to = with ? linked(with, CUDNN_ATTR_OPERATION_POINTWISE_YDESC) : part[result];
    void *target = data_of(pack, to), *bias_at = NULL;
    if (with)
        bias_at = data_of(pack, bias = linked(with, CUDNN_ATTR_OPERATION_POINTWISE_BDESC));
    for (int i = 0; i < PARTS; i++)
        if ((i != result && !data[i]) || !target || (bias && !bias_at))
            return refuse(CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER,
                          "operand %d is missing or misaligned", i);
    double *v[PARTS];
    for (int i = 0; i < PARTS; i++)
        v[i] = widened(part[i], data[i], i == result ? *beta : 1);
    multiply(part, &w, result, *alpha, v);
    for (int64_t i = 0; i < count(to); i++) {
        double b = bias ? element(bias_at, word(bias, CUDNN_ATTR_TENSOR_DATA_TYPE), i % dims(to)[C])
                        : 0;
        set_element(target, word(to, CUDNN_ATTR_TENSOR_DATA_TYPE), i, v[result][i] + b);
    }
    for (int i = 0; i < PARTS; i++)
        free(v[i]);
    return CUDNN_STATUS_SUCCESS;
}
