/* pool2d.c - max_pool2d, avg_pool2d and global_avg_pool2d.
 *
 * There is one path for all builds, of plain loops along the channels. oneDNN's pooling is faster,
 * up to four times inside the caches and less beyond them; but its maximum drops NaN, so that
 * training would go on blindly. Here NaN comes through, as in PyTorch.
 *
 * max_pool2d keeps as an extra output which tap of its window each maximum came from. Backward asks
 * for each row of x which windows chose it, so that each row is written by one thread.
 */
#include "ops/loops.h"
#include "ops/product.h"
#include "ops/window.h"

enum { KERNEL, STRIDE, PAD };

/* ==== Shape =================================================================================== */

static lt_status want_pixels(const lt_call *c)
{
    const lt_tensor *x = c->in[0];
    LT_TRY(lt__same_float(c, 1));
    LT_TRY(lt__want_ndim(c, 0, 4, "(n, h, w, c)"));
    if (x->dims[1] == 0 || x->dims[2] == 0)
        return lt_fail(LT_EINVAL, "x wants at least one pixel, it is %s", LT_TEXT(x));
    return LT_OK;
}

/* The window over x, or over a gradient of the same dims. */
static lt_status describe(const lt_call *c, const lt_tensor *x, lt_window *w)
{
    LT_TRY(lt__pair(c, KERNEL, 1, w->kernel));
    LT_TRY(lt__pair(c, STRIDE, 1, w->stride));
    LT_TRY(lt__pair(c, PAD, 0, w->pad));
    w->dilation[0] = w->dilation[1] = 1;
    for (int i = 0; i < 2; i++)
        if (w->pad[i] > w->kernel[i] / 2)
            return lt_fail(LT_EINVAL, "pad wants at most half the kernel, here %lldx%lld, it is "
                           "%lldx%lld", (lt_ll)(w->kernel[0] / 2), (lt_ll)(w->kernel[1] / 2),
                           (lt_ll)w->pad[0], (lt_ll)w->pad[1]);
    return lt__window_fit(w, x);
}

static lt_status pool_shape(lt_call *c)
{
    lt_window w;
    const lt_tensor *x = c->in[0];
    LT_TRY(want_pixels(c));
    LT_TRY(describe(c, x, &w));
    int64_t dims[4] = {x->dims[0], w.out[0], w.out[1], x->dims[3]};
    lt__spec(c, 0, (lt_dtype)x->dtype, 4, dims);
    if (c->op->n_aux == 0)
        return LT_OK;
    lt__spec(c, 1, LT_I32, 4, dims);
    if (w.kernel[0] * w.kernel[1] > INT32_MAX)
        return lt_fail(LT_EINVAL, "kernel wants at most %d pixels, it is %lldx%lld", INT32_MAX,
                       (lt_ll)w.kernel[0], (lt_ll)w.kernel[1]);
    return LT_OK;
}

/* ==== One tap over one row ==================================================================== */

/* Where tap (kh, kw) meets row oh of image n. Offsets are in elements, to the first pixel. */
typedef struct {
    int64_t pixels, channels;
    int64_t x, y;                 /* into x and y */
    int64_t x_pixel;              /* from one pixel of x to the next; of y: channels */
    int32_t id;                   /* the tap's number in its window */
} tap;

static tap tap_at(const lt_window *w, int64_t channels, int64_t n, int64_t ih, int64_t oh,
                  int64_t kh, int64_t kw)
{
    int64_t first, end;
    lt__window_range(w, 1, kw, &first, &end);
    return (tap){
        .pixels = end - first,
        .channels = channels,
        .x = ((n * w->in[0] + ih) * w->in[1] + lt__window_in(w, 1, first, kw)) * channels,
        .y = ((n * w->out[0] + oh) * w->out[1] + first) * channels,
        .x_pixel = w->stride[1] * channels,
        .id = (int32_t)(kh * w->kernel[1] + kw),
    };
}

/* y = max(y, x), and from = the tap that it came from: the first of equal ones, the first NaN. */
LT_SIMD static void max_tap(lt_dtype dtype, tap t, const void *restrict in,
                            void *restrict out, int32_t *restrict from)
{
    LT_FLOATS(dtype, T,
        for (int64_t i = 0; i < t.pixels; i++) {
            const T *x = (const T *)in + t.x + i * t.x_pixel;
            T *y = (T *)out + t.y + i * t.channels;
            int32_t *id = from + t.y + i * t.channels;
            for (int64_t j = 0; j < t.channels; j++) {
                int take = (id[j] < 0) | (!(x[j] <= y[j]) & (y[j] == y[j]));
                y[j] = take ? x[j] : y[j];
                id[j] = take ? t.id : id[j];
            }
        }
    );
}

/* dx += dy where y came from this tap */
LT_SIMD static void max_tap_back(lt_dtype dtype, tap t, const void *restrict in,
                                 const int32_t *restrict from, void *restrict out)
{
    LT_FLOATS(dtype, T,
        for (int64_t i = 0; i < t.pixels; i++) {
            const T *dy = (const T *)in + t.y + i * t.channels;
            const int32_t *id = from + t.y + i * t.channels;
            T *dx = (T *)out + t.x + i * t.x_pixel;
            for (int64_t j = 0; j < t.channels; j++)
                dx[j] += id[j] == t.id ? dy[j] : 0;
        }
    );
}

/* out += scale * in, over pixels that are out_pixel and in_pixel elements apart */
LT_SIMD static void add_pixels(lt_dtype dtype, int64_t pixels, int64_t channels, double scale,
                               const void *restrict in, int64_t in_pixel, void *restrict out,
                               int64_t out_pixel)
{
    LT_FLOATS(dtype, T,
        T factor = (T)scale;
        for (int64_t i = 0; i < pixels; i++) {
            const T *a = (const T *)in + i * in_pixel;
            T *b = (T *)out + i * out_pixel;
            for (int64_t j = 0; j < channels; j++)
                b[j] += factor * a[j];
        }
    );
}

LT_SIMD static void divide(lt_dtype dtype, int64_t n, double by, void *out)
{
    LT_FLOATS(dtype, T,
        T *y = out;
        for (int64_t i = 0; i < n; i++)
            y[i] /= (T)by;
    );
}

/* ==== max_pool2d and avg_pool2d =============================================================== */

/* Row oh of image n of y. from is NULL for the mean. */
static void output_row(lt_dtype dtype, const lt_window *w, int64_t channels, int64_t n, int64_t oh,
                       const void *x, void *y, int32_t *from)
{
    int64_t count = w->out[1] * channels, begin = (n * w->out[0] + oh) * count;
    if (from)
        LT_FLOATS(dtype, T,
            for (int64_t i = begin; i < begin + count; i++) {
                ((T *)y)[i] = -(T)INFINITY;
                from[i] = -1;
            }
        );
    else
        memset(lt__at(y, dtype, begin), 0, (size_t)count * lt_dtype_bytes(dtype));
    for (int64_t kh = 0; kh < w->kernel[0]; kh++) {
        int64_t ih = lt__window_in(w, 0, oh, kh);
        if (ih < 0 || ih >= w->in[0])
            continue;
        for (int64_t kw = 0; kw < w->kernel[1]; kw++) {
            tap t = tap_at(w, channels, n, ih, oh, kh, kw);
            if (from)
                max_tap(dtype, t, x, y, from);
            else
                add_pixels(dtype, t.pixels, channels, 1, lt__at(x, dtype, t.x), t.x_pixel,
                           lt__at(y, dtype, t.y), channels);
        }
    }
    if (!from)
        divide(dtype, count, (double)(w->kernel[0] * w->kernel[1]), lt__at(y, dtype, begin));
}

/* Row ih of image n of dx, which holds zero or what is added to. */
static void input_row(lt_dtype dtype, const lt_window *w, int64_t channels, int64_t n, int64_t ih,
                      const void *dy, const int32_t *from, void *dx)
{
    double share = 1.0 / (double)(w->kernel[0] * w->kernel[1]);
    for (int64_t kh = 0; kh < w->kernel[0]; kh++) {
        int64_t oh = lt__window_out(w, 0, ih, kh);
        if (oh < 0)
            continue;
        for (int64_t kw = 0; kw < w->kernel[1]; kw++) {
            tap t = tap_at(w, channels, n, ih, oh, kh, kw);
            if (from)
                max_tap_back(dtype, t, dy, from, dx);
            else
                add_pixels(dtype, t.pixels, channels, share, lt__at(dy, dtype, t.y), channels,
                           lt__at(dx, dtype, t.x), t.x_pixel);
        }
    }
}

static lt_status fwd(lt_call *c)
{
    lt_window w;
    const lt_tensor *x = c->in[0];
    lt_tensor *y = c->out[0];
    LT_TRY(describe(c, x, &w));
    int32_t *from = c->op->n_aux > 0 ? c->out[1]->data : NULL;
    LT_PARALLEL_FOR(c, (double)y->count * (double)(w.kernel[0] * w.kernel[1]))
    for (int64_t row = 0; row < x->dims[0] * w.out[0]; row++)
        output_row((lt_dtype)x->dtype, &w, x->dims[3], row / w.out[0], row % w.out[0], x->data,
                   y->data, from);
    return LT_OK;
}

static lt_status bwd(lt_call *c)
{
    lt_window w;
    lt_tensor *dx = c->d_in[0];
    const lt_tensor *dy = c->d_out[0];
    lt_dtype dtype = (lt_dtype)dx->dtype;
    LT_TRY(describe(c, dx, &w));
    const int32_t *from = c->op->n_aux > 0 ? c->out[1]->data : NULL;
    int64_t length = dx->dims[2] * dx->dims[3];
    LT_PARALLEL_FOR(c, (double)dy->count * (double)(w.kernel[0] * w.kernel[1]))
    for (int64_t row = 0; row < dx->dims[0] * w.in[0]; row++) {
        if (!lt__adds(c, 0))
            memset(lt__at(dx->data, dtype, row * length), 0,
                   (size_t)length * lt_dtype_bytes(dtype));
        input_row(dtype, &w, dx->dims[3], row / w.in[0], row % w.in[0], dy->data, from, dx->data);
    }
    return LT_OK;
}

const lt_op lt__op_max_pool2d = {
    .sig = "max_pool2d(x; kernel, stride=kernel, pad=0)",
    .doc = "Maximum over windows of x (n, h, w, c); padding counts as -inf, the gradient goes to "
           "the first maximum of a window.",
    .cast = LT_CAST_ANY,
    .n_out = 1,
    .n_aux = 1,
    .save = LT_SAVE_OUT(1),
    .shape = pool_shape,
    .fwd = fwd, .bwd = bwd,
};

const lt_op lt__op_avg_pool2d = {
    .sig = "avg_pool2d(x; kernel, stride=kernel, pad=0)",
    .doc = "Mean over windows of x (n, h, w, c); padding counts as zeros in the mean, as in "
           "PyTorch's default.",
    .cast = LT_CAST_ANY,
    .shape = pool_shape,
    .fwd = fwd, .bwd = bwd,
};

/* ==== global_avg_pool2d ======================================================================= */

static lt_status global_shape(lt_call *c)
{
    const lt_tensor *x = c->in[0];
    LT_TRY(want_pixels(c));
    int64_t dims[2] = {x->dims[0], x->dims[3]};
    lt__spec(c, 0, (lt_dtype)x->dtype, 2, dims);
    return LT_OK;
}

static lt_status global_fwd(lt_call *c)
{
    const lt_tensor *x = c->in[0];
    int64_t pixels = x->dims[1] * x->dims[2];
    lt__sum_rows(c, (lt_dtype)x->dtype, x->dims[0], pixels, x->dims[3], 1.0 / (double)pixels,
                 x->data, c->out[0]->data, false);
    return LT_OK;
}

static lt_status global_bwd(lt_call *c)
{
    lt_tensor *dx = c->d_in[0];
    lt_dtype dtype = (lt_dtype)dx->dtype;
    int64_t channels = dx->dims[3], pixels = dx->dims[1] * dx->dims[2];
    const void *dy = c->d_out[0]->data;
    LT_PARALLEL_FOR(c, dx->count)
    for (int64_t n = 0; n < dx->dims[0]; n++) {
        void *image = lt__at(dx->data, dtype, n * pixels * channels);
        if (!lt__adds(c, 0))
            memset(image, 0, (size_t)(pixels * channels) * lt_dtype_bytes(dtype));
        add_pixels(dtype, pixels, channels, 1.0 / (double)pixels, lt__at(dy, dtype, n * channels),
                   0, image, channels);
    }
    return LT_OK;
}

const lt_op lt__op_global_avg_pool2d = {
    .sig = "global_avg_pool2d(x)",
    .doc = "Mean over the pixels of each image: x (n, h, w, c) to (n, c).",
    .cast = LT_CAST_ANY,
    .shape = global_shape,
    .fwd = global_fwd, .bwd = global_bwd,
};
