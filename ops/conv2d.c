/* conv2d.c - two-dimensional convolution, including grouped and depthwise.
 *
 *     y[n, oh, ow, o] = b[o] + sum over kh, kw, i of x[n, ih, iw, i] w[o, kh, kw, i]
 *
 * with ih = oh * stride - pad + kh * dilation, and i in the group of o. The portable kernels work
 * on rows of images. One tap of the kernel over one row is a small matrix product of (pixels,
 * channels) by (channels, channels), or a product channel by channel if the convolution is
 * depthwise. Each part of a result is computed by one thread. linear() computes pointwise
 * convolutions.
 *
 * A call makes one task for each result. The fast kernels run it with the first implementation of
 * the list `implementations` that accepts it, the reference kernels with the portable one.
 */
#include "ops/cpu/dnnl.h"
#include "ops/cpu/loops.h"

enum { X, W, B };
enum { BLOCK = 32 }; /* output channels of a task of the weight gradient */

extern const lt_op lt__op_linear; /* in matmul.c */

/* ==== Shape =================================================================================== */

/* Fills *v from the inputs and options of the call. LT_EINVAL if they do not fit together. The
 * kernels use lt__conv_of(), which does not check them again. */
static lt_status describe(const lt_call *c, lt_conv *v)
{
    const lt_tensor *x = c->in[X], *w = c->in[W];
    LT_TRY(lt__require_ndim(c, X, 4, "(n, h, w, c)"));
    LT_TRY(lt__require_ndim(c, W, 4, "(out, kh, kw, in/groups)"));
    LT_TRY(lt__pair(c, LT_CONV_STRIDE, 1, v->window.stride));
    LT_TRY(lt__pair(c, LT_CONV_PAD, 0, v->window.pad));
    LT_TRY(lt__pair(c, LT_CONV_DILATION, 1, v->window.dilation));
    LT_TRY(lt__int(c, LT_CONV_GROUPS, 1, &v->groups));
    v->n = x->dims[0];
    v->in = x->dims[3];
    v->out = w->dims[0];
    if (v->in % v->groups != 0 || v->out % v->groups != 0)
        return lt_fail(LT_EINVAL,
                       "groups %lld must divide the %lld channels of x and the %lld "
                       "output channels of w (x %s, w %s)",
                       (lt_ll)v->groups, (lt_ll)v->in, (lt_ll)v->out, LT_TEXT(x), LT_TEXT(w));
    if (w->dims[3] != v->in / v->groups && v->groups > 1)
        return lt_fail(LT_EINVAL,
                       "w has %lld input channels in each of %lld groups, but x has %lld (x %s, w "
                       "%s)",
                       (lt_ll)w->dims[3], (lt_ll)v->groups, (lt_ll)(v->in / v->groups), LT_TEXT(x),
                       LT_TEXT(w));
    if (w->dims[3] != v->in / v->groups)
        return lt_fail(LT_EINVAL, "w has %lld input channels, but x has %lld (x %s, w %s)",
                       (lt_ll)w->dims[3], (lt_ll)v->in, LT_TEXT(x), LT_TEXT(w));
    for (int i = 0; i < 2; i++)
        if ((v->window.kernel[i] = w->dims[1 + i]) < 1)
            return lt_fail(LT_EINVAL,
                           "w must have a kernel of at least 1x1, but is %s (out, kh, kw, "
                           "in/groups)",
                           LT_TEXT(w));
    return lt__window_fit(&v->window, x);
}

static lt_status shape(lt_call *c)
{
    lt_conv v;
    LT_TRY(lt__same_float(c, 3));
    LT_TRY(describe(c, &v));
    if (lt__optional(c, c->in, B))
        LT_TRY(lt__require_dims(c, B, 1, &v.out, "one value per output channel"));
    int64_t dims[4] = {v.n, v.window.out[0], v.window.out[1], v.out};
    lt__spec(c, 0, (lt_dtype)c->in[X]->dtype, 4, dims);
    return LT_OK;
}

/* Whether the kernel is 1x1 over every pixel. linear() computes this, without a copy of the weights
 * in another layout. */
static bool pointwise(const lt_conv *v)
{
    const lt_window *w = &v->window;
    bool yes = v->groups == 1;
    for (int i = 0; i < 2; i++)
        yes = yes && w->kernel[i] == 1 && w->stride[i] == 1 && w->pad[i] == 0;
    return yes;
}

/* Whether each channel is a separate group. */
static bool depthwise(const lt_conv *v) { return v->groups == v->in && v->groups == v->out; }

/* ==== One tap over one row ==================================================================== */

enum { IN, OUT }; /* the two sides of a tap: x and y, or their gradients */

/* One tap (kh, kw) of the kernel over row oh of image n. Offsets and steps are in elements. Entry
 * IN of an array is for x, entry OUT for y. */
typedef struct {
    int64_t pixels;          /* output pixels of the row whose tap is inside the image */
    int64_t at[2], pixel[2]; /* offset of the first pixel; step to the next pixel */
    int64_t depth[2];        /* channels of a group */
    int64_t w, w_out;        /* offset of the tap in w; step to the next output channel */
} tap;

static tap tap_at(const lt_conv *v, int64_t n, int64_t ih, int64_t oh, int64_t kh, int64_t kw)
{
    const lt_window *w = &v->window;
    int64_t first, end, depth = v->in / v->groups;
    lt__window_range(w, 1, kw, &first, &end);
    return (tap){
        .pixels = end - first,
        .at = {((n * w->in[0] + ih) * w->in[1] + lt__window_in(w, 1, first, kw)) * v->in,
               ((n * w->out[0] + oh) * w->out[1] + first) * v->out},
        .pixel = {w->stride[1] * v->in, v->out},
        .depth = {depth, v->out / v->groups},
        .w = (kh * w->kernel[1] + kw) * depth,
        .w_out = w->kernel[0] * w->kernel[1] * depth,
    };
}

/* out[i, ch] += a[i, ch] factor[ch * step] for all pixels i and channels ch. a_pixel and out_pixel:
 * elements from one pixel to the next. */
LT_SIMD static void scale_channels(lt_dtype dtype, int64_t pixels, int64_t channels,
                                   const void *restrict a, int64_t a_pixel, const void *factor,
                                   int64_t step, void *restrict out, int64_t out_pixel)
{
    LT_FLOATS(dtype, T,
        enum { MOST = 64 };
        T dense[MOST];
        for (int64_t first = 0; first < channels; first += MOST) {
            int64_t n = channels - first < MOST ? channels - first : MOST;
            for (int64_t j = 0; j < n; j++)
                dense[j] = ((const T *)factor)[(first + j) * step];
            for (int64_t i = 0; i < pixels; i++) {
                const T *from = (const T *)a + i * a_pixel + first;
                T *to = (T *)out + i * out_pixel + first;
                for (int64_t j = 0; j < n; j++)
                    to[j] += from[j] * dense[j];
            }
        }
    );
}

/* out[ch * step] += sum over pixels i of a[i, ch] b[i, ch], for n <= BLOCK channels. */
LT_SIMD static void dot_channels(lt_dtype dtype, int64_t pixels, int64_t n, const void *a,
                                 int64_t a_pixel, const void *b, int64_t b_pixel, void *out,
                                 int64_t step)
{
    LT_FLOATS(dtype, T,
        T sum[BLOCK] = {0};
        for (int64_t i = 0; i < pixels; i++) {
            const T *from = (const T *)a + i * a_pixel;
            const T *with = (const T *)b + i * b_pixel;
            for (int64_t j = 0; j < n; j++)
                sum[j] += from[j] * with[j];
        }
        for (int64_t j = 0; j < n; j++)
            ((T *)out)[j * step] += sum[j];
    );
}

/* Applies one tap: y += x w if `from` is IN, dx += dy w^T if it is OUT. */
static void apply_tap(const lt_conv *v, lt_dtype dtype, const tap *t, int from, const void *source,
                      const void *w, void *result)
{
    int to = 1 - from;
    if (depthwise(v)) {
        scale_channels(dtype, t->pixels, v->in, lt__at(source, dtype, t->at[from]), t->pixel[from],
                       lt__at(w, dtype, t->w), t->w_out, lt__at(result, dtype, t->at[to]),
                       t->pixel[to]);
        return;
    }
    lt_product p = {.m = t->pixels,
                    .n = t->depth[to],
                    .k = t->depth[from],
                    .a_row = t->pixel[from],
                    .a_col = 1,
                    .b_row = from == IN ? 1 : t->w_out,
                    .b_col = from == IN ? t->w_out : 1,
                    .out_row = t->pixel[to],
                    .out_col = 1};
    for (int64_t g = 0; g < v->groups; g++)
        lt__product_add(dtype, &p, lt__at(source, dtype, t->at[from] + g * t->depth[from]),
                        lt__at(w, dtype, t->w + g * t->depth[OUT] * t->w_out),
                        lt__at(result, dtype, t->at[to] + g * t->depth[to]));
}

/* ==== Portable kernels ======================================================================== */

/* The number of multiplications, as a measure of work. In double, so that it does not overflow. */
static double multiplications(const lt_conv *v)
{
    const lt_window *w = &v->window;
    return (double)(v->n * w->out[0] * w->out[1] * v->out) *
           (double)(w->kernel[0] * w->kernel[1] * (v->in / v->groups));
}

/* Adds to one row of image n of the result, which contains the bias, zero or another gradient: to
 * row oh of y if `from` is IN, to row ih of dx if it is OUT. */
static void add_row(const lt_conv *v, lt_dtype dtype, int from, int64_t n, int64_t row,
                    const void *source, const void *w, void *result)
{
    for (int64_t kh = 0; kh < v->window.kernel[0]; kh++) {
        int64_t ih = from == IN ? lt__window_in(&v->window, 0, row, kh) : row;
        int64_t oh = from == IN ? row : lt__window_out(&v->window, 0, row, kh);
        if (ih < 0 || ih >= v->window.in[0] || oh < 0)
            continue;
        for (int64_t kw = 0; kw < v->window.kernel[1]; kw++) {
            tap t = tap_at(v, n, ih, oh, kh, kw);
            apply_tap(v, dtype, &t, from, source, w, result);
        }
    }
}

/* Adds the gradient to tap (kh, kw) of dw, for output channels [first, first + n). They are all in
 * one group, or the convolution is depthwise. */
static void weight_block(const lt_conv *v, lt_dtype dtype, int64_t kh, int64_t kw, int64_t first,
                         int64_t n, const void *x, const void *dy, void *dw)
{
    int64_t from, end;
    tap t = tap_at(v, 0, 0, 0, kh, kw);
    int64_t in = t.depth[IN], channel = first / t.depth[OUT] * in;
    bool turned = in <
                  n; /* vectorise along the longer side: dw^T = x^T dy instead of dw = dy^T x */
    int a = turned ? IN : OUT, b = 1 - a;
    lt_product p = {.m = turned ? in : n,
                    .n = turned ? n : in,
                    .k = t.pixels,
                    .a_row = 1,
                    .a_col = t.pixel[a],
                    .b_row = t.pixel[b],
                    .b_col = 1,
                    .out_row = turned ? 1 : t.w_out,
                    .out_col = turned ? t.w_out : 1};
    void *to = lt__at(dw, dtype, t.w + first * t.w_out);
    lt__window_range(&v->window, 0, kh, &from, &end);
    for (int64_t image = 0; image < v->n; image++)
        for (int64_t oh = from; oh < end; oh++) {
            t = tap_at(v, image, lt__window_in(&v->window, 0, oh, kh), oh, kh, kw);
            const void *xs = lt__at(x, dtype, t.at[IN] + channel);
            const void *dys = lt__at(dy, dtype, t.at[OUT] + first);
            if (depthwise(v))
                dot_channels(dtype, t.pixels, n, xs, t.pixel[IN], dys, t.pixel[OUT], to, t.w_out);
            else
                lt__product_add(dtype, &p, turned ? xs : dys, turned ? dys : xs, to);
        }
}

static void portable_outputs(const lt_call *c, const lt_conv_task *task)
{
    const lt_conv *v = task->conv;
    lt_dtype dtype = task->y.dtype;
    void *y = task->y.data;
    int64_t height = v->window.out[0], width = v->window.out[1];
    size_t bytes = (size_t)v->out * lt_dtype_bytes(dtype);
    LT_PARALLEL_FOR(c, multiplications(v))
    for (int64_t row = 0; row < v->n * height; row++) {
        for (int64_t i = row * width; i < (row + 1) * width; i++)
            if (task->bias.data)
                memcpy(lt__at(y, dtype, i * v->out), task->bias.data, bytes);
            else
                memset(lt__at(y, dtype, i * v->out), 0, bytes);
        add_row(v, dtype, IN, row / height, row % height, task->x.data, task->w.data, y);
    }
}

static void portable_data_gradient(const lt_call *c, const lt_conv_task *task)
{
    const lt_conv *v = task->conv;
    lt_dtype dtype = task->x.dtype;
    void *dx = task->x.data;
    int64_t height = v->window.in[0], length = v->window.in[1] * v->in;
    LT_PARALLEL_FOR(c, multiplications(v))
    for (int64_t row = 0; row < v->n * height; row++) {
        if (!task->add)
            memset(lt__at(dx, dtype, row * length), 0, (size_t)length * lt_dtype_bytes(dtype));
        add_row(v, dtype, OUT, row / height, row % height, task->y.data, task->w.data, dx);
    }
}

static void portable_weight_gradient(const lt_call *c, const lt_conv_task *task)
{
    const lt_conv *v = task->conv;
    lt_dtype dtype = task->w.dtype;
    int64_t width = v->window.kernel[1], taps = v->window.kernel[0] * width;
    int64_t run = depthwise(v) ? v->out : v->out / v->groups; /* a block stays in one run */
    int64_t blocks = (run + BLOCK - 1) / BLOCK, count = v->out * taps * (v->in / v->groups);
    if (!task->add)
        memset(task->w.data, 0, (size_t)count * lt_dtype_bytes(dtype));
    if (run == 0)
        return;
    LT_PARALLEL_FOR(c, multiplications(v))
    for (int64_t i = 0; i < v->out / run * blocks * taps; i++) {
        int64_t at = i / taps % blocks * BLOCK, first = i / taps / blocks * run + at;
        weight_block(v, dtype, i % taps / width, i % width, first,
                     run - at < BLOCK ? run - at : BLOCK, task->x.data, task->y.data, task->w.data);
    }
}

static lt_status portable_accepts(const lt_call *c, const lt_conv_task *task)
{
    lt_dtype dtype = task->y.dtype;
    bool yes = (dtype == LT_F32 || dtype == LT_F64) && task->x.dtype == dtype &&
               task->w.dtype == dtype;
    (void)c;
    return yes ? LT_OK : LT_EUNSUPPORTED;
}

static lt_status portable_run(const lt_call *c, const lt_conv_task *task)
{
    (task->kind == LT_CONV        ? portable_outputs
     : task->kind == LT_CONV_DATA ? portable_data_gradient
                                  : portable_weight_gradient)(c, task);
    return LT_OK;
}

/* ==== Implementations ========================================================================= */

static const lt_conv_impl onednn = {"oneDNN", lt__dnnl_ready, NULL, lt__dnnl_run};
static const lt_conv_impl portable = {"portable", portable_accepts, NULL, portable_run};

/* The first one that accepts a task runs it. */
static const lt_conv_impl *const implementations[] = {
    &lt__depthwise, &lt__winograd, &lt__conv_thin, &lt__conv_weights, &onednn, &portable};
enum { IMPLEMENTATIONS = sizeof implementations / sizeof *implementations };

lt_status lt__conv_choose(const lt_call *c, const lt_conv_task *task, const lt_conv_impl **impl)
{
    lt_status status = LT_EUNSUPPORTED;
    for (int i = 0; i < IMPLEMENTATIONS && status == LT_EUNSUPPORTED; i++) {
        *impl = implementations[i];
        status = (*impl)->accepts(c, task);
    }
    return status;
}

static size_t scratch(const lt_call *c, bool backward)
{
    const lt_tensor *y = backward ? c->d_out[0] : c->out[0];
    lt_conv v = lt__conv_of(c, c->in[X], c->in[W], y);
    size_t max = 0;
    for (int i = 0; i < IMPLEMENTATIONS; i++)
        if (implementations[i]->scratch) {
            size_t bytes = implementations[i]->scratch(c, &v, (lt_dtype)y->dtype, backward);
            max = bytes > max ? bytes : max;
        }
    return max;
}

/* ==== Kernels ================================================================================= */

static lt_operand bias_of(const lt_call *c, lt_tensor *const *of)
{
    return lt__operand(lt__optional(c, of, B), 0);
}

static lt_conv_task output_task(const lt_call *c, const lt_conv *v)
{
    return (lt_conv_task){.kind = LT_CONV,
                          .conv = v,
                          .x = lt__operand(c->in[X], 0),
                          .w = lt__operand(c->in[W], 0),
                          .bias = bias_of(c, c->in),
                          .y = lt__operand(c->out[0], 0)};
}

/* The task of the gradient of input i, which is X or W. */
static lt_conv_task gradient_task(const lt_call *c, const lt_conv *v, int i)
{
    return (lt_conv_task){.kind = i == X ? LT_CONV_DATA : LT_CONV_WEIGHTS,
                          .conv = v,
                          .x = lt__operand((i == X ? c->d_in : c->in)[X], 0),
                          .w = lt__operand((i == W ? c->d_in : c->in)[W], 0),
                          .y = lt__operand(c->d_out[0], 0),
                          .add = lt__adds(c, i)};
}

static void bias_gradient(const lt_call *c, const lt_conv *v)
{
    lt_operand db = bias_of(c, c->d_in);
    if (db.data)
        lt__sum_rows(c, v->n * v->window.out[0] * v->window.out[1], v->out,
                     lt__operand(c->d_out[0], 0), db, lt__adds(c, B));
}

static lt_status fwd(lt_call *c)
{
    lt_conv v = lt__conv_of(c, c->in[X], c->in[W], c->out[0]);
    if (pointwise(&v))
        return lt__op_linear.fwd(c);
    lt_conv_task task = output_task(c, &v);
    return portable_run(c, &task);
}

static lt_status fast_fwd(lt_call *c)
{
    lt_conv v = lt__conv_of(c, c->in[X], c->in[W], c->out[0]);
    const lt_conv_impl *impl;
    if (pointwise(&v))
        return lt__op_linear.fast_fwd(c);
    lt_conv_task task = output_task(c, &v);
    LT_TRY(lt__conv_choose(c, &task, &impl));
    return impl->run(c, &task);
}

static lt_status bwd(lt_call *c)
{
    lt_conv v = lt__conv_of(c, c->in[X], c->in[W], c->d_out[0]);
    if (pointwise(&v))
        return lt__op_linear.bwd(c);
    for (int i = X; i <= W; i++)
        if (c->d_in[i]) {
            lt_conv_task task = gradient_task(c, &v, i);
            LT_TRY(portable_run(c, &task));
        }
    bias_gradient(c, &v);
    return LT_OK;
}

/* Backward of a pointwise convolution. linear() computes the gradients, except the gradient of w if
 * conv_weights.c accepts it. */
static lt_status pointwise_bwd(lt_call *c, const lt_conv_task *weights)
{
    if (!c->d_in[W] || lt__conv_weights.accepts(c, weights) != LT_OK)
        return lt__op_linear.fast_bwd(c);
    lt_tensor *d_in[] = {c->d_in[X], NULL, lt__optional(c, c->d_in, B)};
    lt_call others = *c;
    others.d_in = d_in;
    LT_TRY(lt__op_linear.fast_bwd(&others));
    return lt__conv_weights.run(c, weights);
}

/* Chooses the implementations of both gradients before computing the first: if one gradient is not
 * supported, nothing may be written, because the call is then repeated in f32. */
static lt_status fast_bwd(lt_call *c)
{
    lt_conv v = lt__conv_of(c, c->in[X], c->in[W], c->d_out[0]);
    const lt_conv_impl *impl[2];
    const lt_conv_task task[2] = {gradient_task(c, &v, X), gradient_task(c, &v, W)};
    if (pointwise(&v))
        return pointwise_bwd(c, &task[W]);
    for (int i = X; i <= W; i++)
        if (c->d_in[i])
            LT_TRY(lt__conv_choose(c, &task[i], &impl[i]));
    for (int i = X; i <= W; i++)
        if (c->d_in[i])
            LT_TRY(impl[i]->run(c, &task[i]));
    bias_gradient(c, &v);
    return LT_OK;
}

/* Whether the fast kernels can compute gradient i of a bf16 call. */
static bool is_fast(const lt_call *c, const lt_conv *v, int i)
{
    const lt_conv_task task = gradient_task(c, v, i);
    const lt_conv_impl *impl;
    if (!pointwise(v))
        return lt__conv_choose(c, &task, &impl) == LT_OK;
    return (i == W && lt__conv_weights.accepts(c, &task) == LT_OK) ||
           lt__linear_ready(c, i) == LT_OK;
}

/* A bf16 call is repeated in f32 if the fast kernels cannot compute one of its gradients. So two
 * calls give the same bits only if the fast kernels can compute both gradients, or neither. */
static bool can_split(const lt_call *c)
{
    if (c->d_out[0]->dtype != LT_BF16 || c->ctx->config.reference)
        return true;
    lt_conv v = lt__conv_of(c, c->in[X], c->in[W], c->d_out[0]);
    return !c->d_in[X] || is_fast(c, &v, X) == (!c->d_in[W] || is_fast(c, &v, W));
}

const lt_op lt__op_conv2d = {
    .sig = "conv2d(x, w, b?; stride=1, pad=0, dilation=1, groups=1)",
    .doc = "Cross-correlation of x (n, h, w, in), padded with zeros, with w (out, kh, kw, "
           "in/groups), plus b (out); the result has shape (n, oh, ow, out).",
    .cast = LT_CAST_HALF,
    .save = LT_SAVE_IN(X) | LT_SAVE_IN(W),
    .weights = 1 << W | 1 << B,
    .can_split = can_split,
    .shape = shape,
    .scratch = scratch,
    .fwd = fwd,
    .bwd = bwd,
    .fast_bf16 = true,
    .fast_fwd = fast_fwd,
    .fast_bwd = fast_bwd,
};
