/* conv2d.cu - the CUDA side of conv2d.c. A convolution runs in depthwise.cu if that supports it,
 * otherwise in cuDNN if that is present and supports it, otherwise here. Here it is a matrix
 * product whose factors are matrices, and images seen through a window:
 *
 *     y (pixels, out)    = windows of x (pixels, taps) by w^T
 *     dx (pixels, in)    = the pixels of dy that use a pixel of x (pixels, taps) by w, with its
 *                          axes in and out exchanged
 *     dw (out, taps)     = dy^T by windows of x
 *
 * for each group. A tap is a position in the kernel and a channel of the group. The channel is
 * innermost, as in w.
 */
#include "ops/cuda/conv.h"
#include "ops/cuda/tile.h"

enum { X, W, B };

/* ==== Images seen through a window ============================================================ */

/* One axis of a window in ints. Larger values are clamped; they lead out of any image anyway. */
typedef struct axis {
    int in, out, kernel, stride, pad, dilation;
} axis;

typedef struct frame {
    axis h, w;
    int channels, each; /* channels per image; per group */
} frame;

/* The start of an output's window, or the position of an input. `base` is the offset of its image
 * and group. */
typedef struct spot {
    int64_t base;
    int h, w;
} spot;
typedef struct tap {
    int h, w, channel;
} tap;

/* Pixel i of images of the given size, in a group. */
static __device__ spot spot_of(const frame &f, int group, int i, int height, int width)
{
    int line = i / width, image = line / height;
    int64_t pixels = (int64_t)image * f.h.in * f.w.in;
    return spot{pixels * f.channels + (int64_t)group * f.each, line - image * height,
                i - line * width};
}

static __device__ tap tap_of(const frame &f, int k)
{
    int at = k / f.each, row = at / f.w.kernel;
    return tap{row, at - row * f.w.kernel, k - at * f.each};
}

/* The element of an image at (h, w), or 0 outside the image. */
template <class E>
__device__ float inside(const frame &f, const E *image, int64_t base, int h, int w, int channel)
{
    if (h < 0 || h >= f.h.in || w < 0 || w >= f.w.in)
        return 0;
    return lt__value(image[base + ((int64_t)h * f.w.in + w) * f.channels + channel]);
}

/* Factor: a row is an output pixel, a term is a tap. */
template <class E> struct windows {
    typedef spot Row;
    typedef tap Term;
    static constexpr bool along = true;
    const E *x;
    frame f;

    __device__ spot row(int group, int i) const
    {
        spot s = spot_of(f, group, i, f.h.out, f.w.out);
        s.h = s.h * f.h.stride - f.h.pad;
        s.w = s.w * f.w.stride - f.w.pad;
        return s;
    }
    __device__ tap term(int k) const
    {
        tap t = tap_of(f, k);
        t.h *= f.h.dilation;
        t.w *= f.w.dilation;
        return t;
    }
    __device__ float at(const spot &s, const tap &t) const
    {
        return inside(f, x, s.base, s.h + t.h, s.w + t.w, t.channel);
    }
};

/* The transposed factor: a row is a tap, a term is an output pixel. */
template <class E> struct turned_windows {
    struct Row {
        tap at;
        int group;
    };
    typedef spot Term;
    static constexpr bool along = false;
    windows<E> of;

    __device__ Row row(int group, int i) const { return Row{of.term(i), group}; }
    __device__ spot term(int k) const { return of.row(0, k); }
    __device__ float at(const Row &r, const spot &s) const
    {
        return of.at(s, tap{r.at.h, r.at.w, r.at.channel + r.group * of.f.each});
    }
};

/* Returns the output whose tap k reads input i, or -1. */
static __device__ int met(const axis &a, int i, int k)
{
    int at = i + a.pad - k * a.dilation, o = at / a.stride;
    return at >= 0 && o * a.stride == at ? o : -1;
}

/* Factor: a row is an input pixel, a term is a tap of the outputs that read it. The images of the
 * frame are outputs. */
template <class E> struct reached {
    typedef spot Row;
    typedef tap Term;
    static constexpr bool along = true;
    const E *dy;
    frame f; /* `in` and `out` are exchanged */

    __device__ spot row(int group, int i) const { return spot_of(f, group, i, f.h.out, f.w.out); }
    __device__ tap term(int k) const { return tap_of(f, k); }
    __device__ float at(const spot &s, const tap &t) const
    {
        return inside(f, dy, s.base, met(f.h, s.h, t.h), met(f.w, s.w, t.w), t.channel);
    }
};

/* Factor: a row is a channel of x in a group, a term is a position in the kernel and a channel of y
 * in the group. */
template <class E> struct turned_weights {
    typedef int64_t Row, Term;
    static constexpr bool along = false;
    const E *w;
    int in_each, out_each;
    int64_t places;

    __device__ int64_t row(int group, int i) const
    {
        return group * out_each * places * in_each + i;
    }
    __device__ int64_t term(int k) const
    {
        int place = k / out_each;
        return ((k - place * out_each) * places + place) * in_each;
    }
    __device__ float at(int64_t row, int64_t term) const { return lt__value(w[row + term]); }
};

/* ==== The sizes of a call ===================================================================== */

static lt_conv conv_of(const lt_call *c, bool backward)
{
    const lt_tensor *x = c->in[X] ? c->in[X] : c->d_in[X], *w = c->in[W] ? c->in[W] : c->d_in[W];
    const lt_tensor *y = backward ? c->d_out[0] : c->out[0];
    return lt__conv_of(c, x, w, y);
}

static int64_t places_of(const lt_conv *v) { return v->window.kernel[0] * v->window.kernel[1]; }

/* The tiles of y, dx and dw: results (groups, m, n), each the sum of k terms. */
static lt_tiles tiles_of_y(const lt_conv *v)
{
    return lt__tiles_of(v->groups, v->n * v->window.out[0] * v->window.out[1], v->out / v->groups,
                        places_of(v) * v->in / v->groups, false);
}

static lt_tiles tiles_of_dx(const lt_conv *v)
{
    return lt__tiles_of(v->groups, v->n * v->window.in[0] * v->window.in[1], v->in / v->groups,
                        places_of(v) * v->out / v->groups, false);
}

static lt_tiles tiles_of_dw(const lt_conv *v)
{
    return lt__tiles_of(v->groups, v->out / v->groups, places_of(v) * v->in / v->groups,
                        v->n * v->window.out[0] * v->window.out[1], true);
}

enum { MOST = INT32_MAX / 4 };

static int as_int(int64_t i) { return i < MOST ? (int)i : (int)MOST; }

/* back: the images of the frame are outputs, and its pixels are inputs. A step of MOST or more
 * leads out of any image. */
static axis axis_of(const lt_window *w, int i, bool back)
{
    return axis{as_int(back ? w->out[i] : w->in[i]),
                as_int(back ? w->in[i] : w->out[i]),
                as_int(w->kernel[i]),
                as_int(w->stride[i]),
                as_int(w->pad[i]),
                as_int(w->dilation[i])};
}

static frame frame_of(const lt_conv *v, bool back)
{
    return frame{axis_of(&v->window, 0, back), axis_of(&v->window, 1, back),
                 as_int(back ? v->out : v->in),
                 as_int(back ? v->out / v->groups : v->in / v->groups)};
}

/* ==== Our own kernels ========================================================================= */

static lt_status own_fwd(const lt_conv *v, lt_call *c)
{
    const lt_tensor *bias = lt__optional(c, c->in, B);
    lt_cuda *cuda = lt__cuda(c->ctx);
    lt_tiles t = tiles_of_y(v);
    LT_CUDA_FLOATS(
        cuda, c->in[X]->dtype, E, windows<E> a = {(const E *)c->in[X]->data, frame_of(v, false)};
        lt_matrices<E> b =
            lt__matrices_of<E>(c->in[W]->data, t.k, 1, t.batch, v->out / v->groups * (int64_t)t.k);
        lt_results<E> r =
            lt__results_of<E>(c->out[0]->data, c->out[0]->dtype, v->out / v->groups, v->out, false);
        r.bias = (const E *)lt__data(bias); return lt__tile_product(cuda, &t, a, b, r, NULL);)
}

/* E is the dtype of the factors, O that of the gradient. */
template <class E, class O> static lt_status own_dx(const lt_conv *v, lt_call *c)
{
    lt_tiles t = tiles_of_dx(v);
    reached<E> a = {(const E *)c->d_out[0]->data, frame_of(v, true)};
    turned_weights<E> b = {(const E *)c->in[W]->data, as_int(v->in / v->groups),
                           as_int(v->out / v->groups), places_of(v)};
    return lt__tile_product(lt__cuda(c->ctx), &t, a, b,
                            lt__results_of<O>(c->d_in[X]->data, c->d_in[X]->dtype,
                                              v->in / v->groups, v->in, c->add >> X & 1),
                            NULL);
}

template <class E, class O> static lt_status own_dw(const lt_conv *v, lt_call *c)
{
    lt_tiles t = tiles_of_dw(v);
    lt_matrices<E> a =
        lt__matrices_of<E>(c->d_out[0]->data, 1, v->out, t.batch, v->out / v->groups);
    turned_windows<E> b = {{(const E *)c->in[X]->data, frame_of(v, false)}};
    return lt__tile_product(lt__cuda(c->ctx), &t, a, b,
                            lt__results_of<O>(c->d_in[W]->data, c->d_in[W]->dtype,
                                              (int64_t)t.m * t.n, t.n, c->add >> W & 1),
                            c->scratch);
}

static lt_status own_grad(const lt_conv *v, lt_call *c, int i)
{
    LT_CUDA_FLOATS(lt__cuda(c->ctx), c->d_out[0]->dtype, E,
                   if (c->d_in[i]->dtype == LT_F32) return i == X ? own_dx<E, float>(v, c)
                                                                  : own_dw<E, float>(v, c);
                   return i == X ? own_dx<E, E>(v, c) : own_dw<E, E>(v, c);)
}

/* ==== Calls =================================================================================== */

static lt_status check(const lt_conv *v, const lt_call *c)
{
    const lt_cuda *cuda = lt__cuda(c->ctx);
    return v->window.pad[0] <= MOST && v->window.pad[1] <= MOST
               ? LT_OK
               : cuda->host->fail(LT_EUNSUPPORTED, "%s supports a pad of at most %d", cuda->name,
                                  (int)MOST);
}

static lt_status fwd(lt_call *c)
{
    lt_conv v = conv_of(c, false);
    LT_TRY(check(&v, c));
    if (lt__cuda_is_depthwise(&v))
        return lt__cuda_depthwise_fwd(&v, c);
    lt_status status = lt__nvidia_conv2d_fwd(lt__cuda(c->ctx)->nvidia, c);
    return status == LT_EUNSUPPORTED ? own_fwd(&v, c) : status;
}

/* depthwise.cu computes dx only in the dtype of dy; dw may have another dtype. */
static lt_status put_grad(const lt_conv *v, lt_call *c, int i)
{
    if (lt__cuda_is_depthwise(v))
        return i == W || c->d_in[i]->dtype == c->d_out[0]->dtype ? lt__cuda_depthwise_grad(v, c, i)
                                                                 : own_grad(v, c, i);
    lt_status status = lt__nvidia_conv2d_grad(lt__cuda(c->ctx)->nvidia, c, i);
    return status == LT_EUNSUPPORTED ? own_grad(v, c, i) : status;
}

static lt_status bwd(lt_call *c)
{
    lt_conv v = conv_of(c, true);
    const lt_tensor *dy = c->d_out[0];
    lt_tensor *db = lt__optional(c, c->d_in, B);
    LT_TRY(check(&v, c));
    for (int i = X; i <= W; i++)
        if (c->d_in[i])
            LT_TRY(put_grad(&v, c, i));
    if (!db)
        return LT_OK;
    return lt__cuda_sum_rows(lt__cuda(c->ctx), db->data, db->dtype, dy->data, dy->dtype,
                             v.n * v.window.out[0] * v.window.out[1], v.out, c->add >> B & 1);
}

static size_t scratch(const lt_call *c, bool backward)
{
    lt_conv v = conv_of(c, backward);
    lt_tiles t = tiles_of_dw(&v);
    if (lt__cuda_is_depthwise(&v))
        return backward && c->d_in[W] ? lt__cuda_depthwise_scratch(&v) : 0;
    size_t bytes = lt__nvidia_conv2d_scratch(lt__cuda(c->ctx)->nvidia, c, backward);
    size_t own = backward && c->d_in[W] ? lt__tile_scratch(&t) : 0;
    return bytes > own ? bytes : own;
}

/* cuDNN computes gradients in the dtype of its factors. */
static bool f32_grad(const lt_call *c, int i)
{
    lt_conv v = conv_of(c, true);
    return i == B || lt__cuda_is_depthwise(&v) ||
           !lt__nvidia_conv2d_computes(lt__cuda(c->ctx)->nvidia, c, i);
}

void lt__cuda_conv2d(lt_kernels *op)
{
    lt__set_kernels(&op[LT_OP_conv2d], scratch, fwd, bwd);
    op[LT_OP_conv2d].f32_grad = f32_grad;
}
