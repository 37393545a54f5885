/* stand_in_cudnn_run.c - the second half of the stand-in for cuDNN: which attributes go together,
 * and what a graph computes.
 */
#include "tests/cuda/stand_in_cudnn.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/cuda/stand_in_float.h"

/* ==== Tensors ================================================================================= */

enum { N, C, H, W, AXES };
enum { X_OF, W_OF, Y_OF, PARTS }; /* of a convolution */

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

static int64_t element_bytes(int type)
{
    return type == CUDNN_DATA_FLOAT ? 4 : type == CUDNN_DATA_INT8 ? 1 : 2;
}

static cudnnStatus_t check_tensor(const descriptor *t)
{
    const int64_t *d = dims(t), *s = values(t, CUDNN_ATTR_TENSOR_STRIDES);
    const int type = word(t, CUDNN_ATTR_TENSOR_DATA_TYPE);
    const int64_t alignment = integer(t, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
    for (int i = 0; i < AXES; i++)
        if (d[i] < 1)
            return refuse(CUDNN_STATUS_BAD_PARAM, "dims of a tensor");
    if (s[C] != 1 || s[W] != d[C] || s[H] != d[W] * d[C] || s[N] != d[H] * s[H])
        return refuse(CUDNN_STATUS_NOT_SUPPORTED_LAYOUT, "strides of a tensor");
    if (type != CUDNN_DATA_FLOAT && type != CUDNN_DATA_HALF && type != CUDNN_DATA_BFLOAT16 &&
        type != CUDNN_DATA_INT8)
        return refuse(CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE, "type of a tensor");
    if (alignment < element_bytes(type) || (alignment & (alignment - 1)) != 0)
        return refuse(CUDNN_STATUS_BAD_PARAM, "alignment of a tensor");
    return CUDNN_STATUS_SUCCESS;
}

static double element(const void *at, int type, int64_t i)
{
    return type == CUDNN_DATA_FLOAT  ? ((const float *)at)[i]
           : type == CUDNN_DATA_HALF ? of_f16(((const uint16_t *)at)[i])
           : type == CUDNN_DATA_INT8 ? ((const int8_t *)at)[i]
                                     : of_bf16(((const uint16_t *)at)[i]);
}

static void set_element(void *at, int type, int64_t i, double value)
{
    if (type == CUDNN_DATA_FLOAT)
        ((float *)at)[i] = (float)value;
    else if (type == CUDNN_DATA_INT8)
        ((int8_t *)at)[i] = (int8_t)value;
    else
        ((uint16_t *)at)[i] = (type == CUDNN_DATA_HALF ? to_f16 : to_bf16)((float)value);
}

/* ==== Operations ============================================================================== */

static const struct {
    int type, conv, part[PARTS], alpha, beta, result;
} conv_ops[] = {
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
     {CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
      CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y},
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
     Y_OF},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
     {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY},
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA, X_OF},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
     {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY},
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA, W_OF},
};

static int conv_op(const descriptor *d)
{
    for (int i = 0; i < 3; i++)
        if (conv_ops[i].type == d->type)
            return i;
    return -1;
}

/* Where output o and tap k of an axis meet, and how many outputs there are. */
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

static void whole(const descriptor *r, int name, int64_t to[2])
{
    const cudnnFraction_t *f = values(r, name);
    for (int i = 0; i < 2; i++)
        to[i] = f[i].denominator == 1 ? f[i].numerator : -1;
}

static window pool_window(const descriptor *r, int64_t kernel[2])
{
    window w = {.dilation = {1, 1}};
    whole(r, CUDNN_ATTR_RESAMPLE_PRE_PADDINGS, w.before);
    whole(r, CUDNN_ATTR_RESAMPLE_POST_PADDINGS, w.after);
    whole(r, CUDNN_ATTR_RESAMPLE_STRIDES, w.stride);
    whole(r, CUDNN_ATTR_RESAMPLE_WINDOW_DIMS, kernel);
    return w;
}

static bool fits(const window *w, const int64_t *x, const int64_t *kernel, const int64_t *y)
{
    for (int i = 0; i < 2; i++) {
        if (w->before[i] < 0 || w->after[i] != w->before[i] || w->stride[i] < 1)
            return false;
        int64_t room = x[H + i] + w->before[i] + w->after[i] - (kernel[i] - 1) * w->dilation[i] - 1;
        if (room < 0 || y[H + i] != room / w->stride[i] + 1)
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
        return refuse(CUDNN_STATUS_NOT_SUPPORTED, "a convolution of another kind");
    if (dim[X_OF][N] != dim[Y_OF][N] || dim[W_OF][N] != dim[Y_OF][C] || groups < 1 ||
        dim[X_OF][C] != groups * dim[W_OF][C] || dim[Y_OF][C] % groups != 0)
        return refuse(CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH, "images or channels differ");
    if (!fits(&w, dim[X_OF], &dim[W_OF][H], dim[Y_OF]))
        return refuse(CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH, "the window does not fit");
    for (int i = 0; i < PARTS; i++) {
        int type = word(part[i], CUDNN_ATTR_TENSOR_DATA_TYPE);
        if (is_virtual(part[i]) ? i != Y_OF || type != CUDNN_DATA_FLOAT
                                : type != word(part[W_OF], CUDNN_ATTR_TENSOR_DATA_TYPE))
            return refuse(CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE, "operands of two types");
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
        return refuse(CUDNN_STATUS_NOT_SUPPORTED, "something else than a bias");
    if (memcmp(dims(x), dims(y), AXES * sizeof(int64_t)) != 0 || of[N] != 1 || of[H] != 1 ||
        of[W] != 1 || of[C] != dims(y)[C])
        return refuse(CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH, "the bias does not fit");
    return CUDNN_STATUS_SUCCESS;
}

/* The parts of a pooling in either direction. */
typedef struct pooling {
    const descriptor *how, *x, *y, *index;
    bool back, max;
} pooling;

static pooling pooling_of(const descriptor *d)
{
    const bool back = d->type == CUDNN_BACKEND_OPERATION_RESAMPLE_BWD_DESCRIPTOR;
    pooling p = {.back = back};
    p.how = linked(d, back ? CUDNN_ATTR_OPERATION_RESAMPLE_BWD_DESC
                           : CUDNN_ATTR_OPERATION_RESAMPLE_FWD_DESC);
    p.x = linked(d, back ? CUDNN_ATTR_OPERATION_RESAMPLE_BWD_DXDESC
                         : CUDNN_ATTR_OPERATION_RESAMPLE_FWD_XDESC);
    p.y = linked(d, back ? CUDNN_ATTR_OPERATION_RESAMPLE_BWD_DYDESC
                         : CUDNN_ATTR_OPERATION_RESAMPLE_FWD_YDESC);
    p.index = linked(d, back ? CUDNN_ATTR_OPERATION_RESAMPLE_BWD_IDXDESC
                             : CUDNN_ATTR_OPERATION_RESAMPLE_FWD_IDXDESC);
    p.max = word(p.how, CUDNN_ATTR_RESAMPLE_MODE) == CUDNN_RESAMPLE_MAXPOOL;
    return p;
}

static cudnnStatus_t check_pool(const descriptor *d)
{
    const pooling p = pooling_of(d);
    const int64_t *x = dims(p.x), *y = dims(p.y);
    int64_t kernel[2];
    const window w = pool_window(p.how, kernel);
    const int padding = word(p.how, CUDNN_ATTR_RESAMPLE_PADDING_MODE);
    if (word(p.how, CUDNN_ATTR_RESAMPLE_COMP_TYPE) != CUDNN_DATA_FLOAT ||
        (!p.max &&
         word(p.how, CUDNN_ATTR_RESAMPLE_MODE) != CUDNN_RESAMPLE_AVGPOOL_INCLUDE_PADDING))
        return refuse(CUDNN_STATUS_NOT_SUPPORTED, "a pool of another kind");
    if (p.max ? padding != CUDNN_NEG_INF_PAD || !p.index
              : padding != CUDNN_ZERO_PAD || p.index != NULL)
        return refuse(CUDNN_STATUS_NOT_SUPPORTED_PADDING, "padding or index of a pool");
    if (x[N] != y[N] || x[C] != y[C] || !fits(&w, x, kernel, y))
        return refuse(CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH, "the window does not fit");
    if (p.index && (memcmp(dims(p.index), y, AXES * sizeof *y) != 0 ||
                    word(p.index, CUDNN_ATTR_TENSOR_DATA_TYPE) != CUDNN_DATA_INT8))
        return refuse(CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH, "the index does not fit");
    return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t check_pack(const descriptor *d)
{
    const attribute *numbers = find(d, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    if (numbers->n != find(d, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS)->n)
        return refuse(CUDNN_STATUS_BAD_PARAM, "numbers and pointers of a pack");
    return CUDNN_STATUS_SUCCESS;
}

/* Two operations are a convolution into a virtual tensor, and a bias on that. */
static cudnnStatus_t check_graph(const descriptor *d)
{
    const attribute *ops = find(d, CUDNN_ATTR_OPERATIONGRAPH_OPS);
    const descriptor *const *op = ops->values;
    const int conv = conv_op(op[0]);
    const descriptor *y = conv >= 0 ? linked(op[0], conv_ops[conv].part[Y_OF]) : NULL;
    if (op[0]->type == stand_in_state.refused)
        return refuse(CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN, "as was asked for");
    if (ops->n == 1)
        return y && is_virtual(y) ? refuse(CUDNN_STATUS_BAD_PARAM, "a graph without result")
                                  : CUDNN_STATUS_SUCCESS;
    if (!y || !is_virtual(y) || linked(op[1], CUDNN_ATTR_OPERATION_POINTWISE_XDESC) != y)
        return refuse(CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN, "the operations do not meet");
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t check(const descriptor *d)
{
    switch (d->type) {
    case CUDNN_BACKEND_TENSOR_DESCRIPTOR: return check_tensor(d);
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR: return check_bias(d);
    case CUDNN_BACKEND_OPERATION_RESAMPLE_FWD_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_RESAMPLE_BWD_DESCRIPTOR: return check_pool(d);
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR: return check_graph(d);
    case CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR: return check_pack(d);
    default: return conv_op(d) >= 0 ? check_conv(d, conv_op(d)) : CUDNN_STATUS_SUCCESS;
    }
}

/* ==== Running ================================================================================= */

/* Where a tensor's elements are. NULL: it has no place, or one less aligned than was said. */
static void *place(const descriptor *pack, const descriptor *t)
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

/* The elements in double, times factor. New. */
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

/* All products of a convolution, added up in the part that is the result. */
static void multiply(const descriptor *const part[PARTS], const window *w, int result, double alpha,
                     double *const v[PARTS])
{
    const int64_t *x = dims(part[X_OF]), *k = dims(part[W_OF]), *y = dims(part[Y_OF]);
    const int64_t each = y[C] / (x[C] / k[C]); /* outputs of a group */
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

static cudnnStatus_t run_conv(const descriptor *graph, const descriptor *pack)
{
    const attribute *ops = find(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS);
    const descriptor *d = ((descriptor **)ops->values)[0];
    const descriptor *with = ops->n > 1 ? ((descriptor **)ops->values)[1] : NULL;
    const int op = conv_op(d), result = conv_ops[op].result;
    const window w = conv_window(linked(d, conv_ops[op].conv));
    const float *alpha = values(d, conv_ops[op].alpha), *beta = values(d, conv_ops[op].beta);
    const descriptor *part[PARTS], *to, *bias = NULL;
    void *place_of[PARTS];
    for (int i = 0; i < PARTS; i++) {
        part[i] = linked(d, conv_ops[op].part[i]);
        place_of[i] = place(pack, part[i]);
    }
    to = with ? linked(with, CUDNN_ATTR_OPERATION_POINTWISE_YDESC) : part[result];
    void *target = place(pack, to), *bias_at = NULL;
    if (with)
        bias_at = place(pack, bias = linked(with, CUDNN_ATTR_OPERATION_POINTWISE_BDESC));
    for (int i = 0; i < PARTS; i++)
        if ((i != result && !place_of[i]) || !target || (bias && !bias_at))
            return refuse(CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER, "operand %d has no place", i);
    double *v[PARTS];
    for (int i = 0; i < PARTS; i++)
        v[i] = widened(part[i], place_of[i], i == result ? *beta : 1);
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

/* Element i of y, forward: from its window, and where the most was. Backward: its gradient goes to
 * the window, or to where the most was. */
static void pool_one(const pooling *p, int64_t i, double *x, double *y, double *index)
{
    const int64_t *big = dims(p->x), *small = dims(p->y);
    int64_t kernel[2], best = -1;
    const window w = pool_window(p->how, kernel);
    const bool nan = word(p->how, CUDNN_ATTR_RESAMPLE_NAN_PROPAGATION) == CUDNN_PROPAGATE_NAN;
    const double share = 1.0 / (double)(kernel[0] * kernel[1]);
    int64_t c = i % small[C], ow = i / small[C] % small[W], oh = i / small[C] / small[W] % small[H];
    double sum = 0, most = -INFINITY;
    for (int64_t tap = 0; tap < kernel[0] * kernel[1]; tap++) {
        int64_t h = oh * w.stride[0] - w.before[0] + tap / kernel[1];
        int64_t l = ow * w.stride[1] - w.before[1] + tap % kernel[1];
        if (h < 0 || h >= big[H] || l < 0 || l >= big[W])
            continue;
        double *v = &x[at(p->x, i / small[C] / small[W] / small[H], c, h, l)];
        if (p->back && (!p->max || -1 - tap == (int64_t)index[i]))
            *v += p->max ? y[i] : share * y[i];
        sum += *v;
        if (best < 0 || *v > most || (nan && *v != *v && most == most)) {
            most = *v;
            best = tap;
        }
    }
    if (!p->back) {
        y[i] = p->max ? most : share * sum;
        if (index)
            index[i] = (double)(-1 - best); /* nobody else's way to count them */
    }
}

static cudnnStatus_t run_pool(const descriptor *d, const descriptor *pack)
{
    const pooling p = pooling_of(d);
    const descriptor *to = p.back ? p.x : p.y;
    void *x = place(pack, p.x), *y = place(pack, p.y), *i = p.index ? place(pack, p.index) : NULL;
    if (!x || !y || (p.index && !i))
        return refuse(CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER, "an operand has no place");
    double *from_x = widened(p.x, x, !p.back), *from_y = widened(p.y, y, p.back);
    double *index = p.index ? widened(p.index, i, p.back) : NULL;
    for (int64_t k = 0; k < count(p.y); k++)
        pool_one(&p, k, from_x, from_y, index);
    for (int64_t k = 0; k < count(to); k++)
        set_element(p.back ? x : y, word(to, CUDNN_ATTR_TENSOR_DATA_TYPE), k,
                    p.back ? from_x[k] : from_y[k]);
    for (int64_t k = 0; index && !p.back && k < count(p.index); k++)
        set_element(i, CUDNN_DATA_INT8, k, index[k]);
    free(from_x);
    free(from_y);
    free(index);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t run_graph(const descriptor *graph, const descriptor *pack)
{
    const descriptor *const *op = values(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS);
    return conv_op(op[0]) >= 0 ? run_conv(graph, pack) : run_pool(op[0], pack);
}
