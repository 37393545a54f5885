/* shape.c - ops that only move elements: reshape, transpose, permute, slice, pad, cat; and cast.
 *
 * slice, pad and cat share one implementation: a dense tensor, the part, is a box inside another
 * tensor, the whole (shape.h). Forward and backward copy or add from one to the other. Elements of
 * any dtype are moved unchanged. Gradients are added by the device, which can add all float dtypes.
 */
#include "ops/cpu/loops.h"
#include "ops/shape.h"

/* dst (+)= src, for n elements. */
static void put(const lt_call *c, lt_dtype dtype, void *dst, const void *src, int64_t n, bool add)
{
    lt_device *cpu = c->ctx->devices[0];
    if (add)
        (void)cpu->add(cpu, dst, src, dtype, (size_t)n); /* cannot fail: gradients are floats */
    else
        memcpy(dst, src, (size_t)n * lt_dtype_bytes(dtype));
}

/* ==== reshape ================================================================================= */

static lt_status reshape_shape(lt_call *c)
{
    const lt_tensor *x = c->in[0];
    const lt_opt *shape = &c->opt[0];
    int64_t dims[LT_MAX_DIMS] = {0}, count;
    int open = -1;
    for (int i = 0; i < shape->n; i++) {
        dims[i] = shape->i[i];
        if (dims[i] == -1 && open < 0) {
            open = i;
            dims[i] = 1;
        } else if (dims[i] < 0) {
            return lt_fail(LT_EINVAL,
                           "shape must contain counts and at most one -1, but axis %d is %lld",
                           i + 1, (lt_ll)dims[i]);
        }
    }
    LT_TRY(lt__count_dims(shape->n, dims, &count));
    if (open < 0 ? count != x->count : count == 0 || x->count % count != 0)
        return lt_fail(LT_EINVAL, "x (%s) has %lld elements, which do not fill a shape of %lld%s",
                       LT_TEXT(x), (lt_ll)x->count, (lt_ll)count,
                       open < 0 ? "" : " times the axis that is -1");
    if (open >= 0)
        dims[open] = x->count / count;
    lt__spec(c, 0, (lt_dtype)x->dtype, shape->n, dims);
    c->spec[0].view = 1;
    return LT_OK;
}

const lt_op lt__op_reshape = {
    .sig = "reshape(x; shape)",
    .doc = "The elements of x in another shape, in which one axis may be -1 to be inferred; the "
           "result is a view.",
    .any_dtype = true,
    .same_grad = 1,
    .shape = reshape_shape,
};

/* ==== transpose and permute =================================================================== */

/* A copy that reorders axes. The axes are in the order of dst. Axes of size 1 are left out, and
 * neighbours that remain neighbours are merged into one axis. */
typedef struct {
    int ndim;
    int64_t dims[LT_MAX_DIMS];
    int64_t from[LT_MAX_DIMS], to[LT_MAX_DIMS]; /* strides of src and dst, in elements */
} moves;

/* Fills *m. axes[i]: the axis of src that becomes axis i of dst. */
static void plan_moves(moves *m, int ndim, const int64_t *src_dims, const int *axes)
{
    int64_t from[LT_MAX_DIMS], step = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        from[i] = step;
        step *= src_dims[i];
    }
    m->ndim = 0;
    for (int i = 0; i < ndim; i++) {
        int64_t dim = src_dims[axes[i]];
        int last = m->ndim - 1;
        if (dim == 1)
            continue;
        if (last >= 0 && m->from[last] == dim * from[axes[i]]) {
            m->dims[last] *= dim;
            m->from[last] = from[axes[i]];
        } else {
            m->dims[m->ndim] = dim;
            m->from[m->ndim++] = from[axes[i]];
        }
    }
    if (m->ndim == 0) {
        m->dims[0] = m->from[0] = 1;
        m->ndim = 1;
    }
    step = 1;
    for (int i = m->ndim - 1; i >= 0; i--) {
        m->to[i] = step;
        step *= m->dims[i];
    }
}

enum { TILE = 1024, LINE = 16 }; /* elements of a tile, and of its side along dst's last axis */

/* dst[r][j] (+)= src[j][r] for r < rows and j < n. `to` and `from` are the row strides of dst and
 * src, in elements. */
static void move_tile(const lt_call *c, lt_dtype dtype, void *dst, int64_t to, const void *src,
                      int64_t from, int64_t rows, int64_t n, bool add)
{
    uint64_t buffer[TILE];
    LT_SIZES(lt_dtype_bytes(dtype), T, {
        const T *x = src;
        T *y = add ? (T *)buffer : dst;
        int64_t step = add ? n : to;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < n; j++)
                y[r * step + j] = x[j * from + r];
    });
    for (int64_t r = 0; add && r < rows; r++)
        put(c, dtype, lt__at(dst, dtype, r * to), lt__at(buffer, dtype, r * n), n, true);
}

/* dst (+)= src with its axes reordered; count: elements of either. */
static void move(const lt_call *c, lt_dtype dtype, const moves *m, void *dst, const void *src,
                 int64_t count, bool add)
{
    int inner = m->ndim - 1, other = inner; /* the contiguous axes of dst and src */
    int64_t piece[LT_MAX_DIMS], cuts[LT_MAX_DIMS], tasks = 1;
    if (count == 0)
        return;
    while (m->from[other] != 1)
        other--;
    for (int i = 0; i <= inner; i++)
        piece[i] = 1;
    piece[inner] = lt__min(m->dims[inner], inner == other ? m->dims[inner] : LINE);
    if (inner != other) { /* if one axis is short, the tile extends along the other */
        piece[other] = lt__min(m->dims[other], TILE / piece[inner]);
        piece[inner] = lt__min(m->dims[inner], TILE / piece[other]);
    }
    for (int i = 0; i <= inner; i++) {
        cuts[i] = (m->dims[i] + piece[i] - 1) / piece[i];
        tasks *= cuts[i];
    }
    LT_PARALLEL_FOR(c, count)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t left = task, from = 0, to = 0, size[LT_MAX_DIMS];
        for (int i = inner; i >= 0; i--) {
            int64_t at = left % cuts[i] * piece[i];
            left /= cuts[i];
            from += at * m->from[i];
            to += at * m->to[i];
            size[i] = lt__min(piece[i], m->dims[i] - at);
        }
        void *y = lt__at(dst, dtype, to), *x = lt__at(src, dtype, from);
        if (inner == other)
            put(c, dtype, y, x, size[inner], add);
        else
            move_tile(c, dtype, y, m->to[other], x, m->from[inner], size[other], size[inner], add);
    }
}

/* axes[i] = the axis of x that becomes axis i of y; both have ndim axes. Fails only in a shape
 * rule, with LT_EINVAL. */
typedef lt_status (*axes_fn)(const lt_call *c, int ndim, int axes[LT_MAX_DIMS]);

static lt_status permute_axes(const lt_call *c, int ndim, int axes[LT_MAX_DIMS])
{
    uint32_t mask;
    LT_TRY(lt__axes(c, 0, ndim, &mask));
    if (c->opt[0].n != ndim)
        return lt_fail(LT_EINVAL,
                       "axes must list all %d axes of x (%s) in their new order, but got %d", ndim,
                       LT_TEXT(c->in[0]), c->opt[0].n);
    axes_of_permute(c, ndim, axes);
    return LT_OK;
}

static lt_status transpose_axes(const lt_call *c, int ndim, int axes[LT_MAX_DIMS])
{
    uint32_t mask;
    LT_TRY(lt__axes(c, 0, ndim, &mask));
    if (lt__given(c, 0) && c->opt[0].n != 2)
        return lt_fail(LT_EINVAL, "axes must be two axes, but got %d; use permute for more",
                       c->opt[0].n);
    if (ndim < 2)
        return lt_fail(LT_EINVAL, "x must have at least 2 axes, but is %s", LT_TEXT(c->in[0]));
    axes_of_transpose(c, ndim, axes);
    return LT_OK;
}

static lt_status reorder_shape(lt_call *c, axes_fn axes_of)
{
    const lt_tensor *x = c->in[0];
    int axes[LT_MAX_DIMS];
    int64_t dims[LT_MAX_DIMS];
    LT_TRY(axes_of(c, x->ndim, axes));
    for (int i = 0; i < x->ndim; i++)
        dims[i] = x->dims[axes[i]];
    lt__spec(c, 0, (lt_dtype)x->dtype, x->ndim, dims);
    return LT_OK;
}

static lt_status reorder(lt_call *c, axes_fn axes_of)
{
    const lt_tensor *x = c->in[0];
    int axes[LT_MAX_DIMS];
    moves m;
    LT_TRY(axes_of(c, x->ndim, axes));
    plan_moves(&m, x->ndim, x->dims, axes);
    move(c, (lt_dtype)x->dtype, &m, c->out[0]->data, x->data, x->count, false);
    return LT_OK;
}

static lt_status reorder_back(lt_call *c, axes_fn axes_of)
{
    const lt_tensor *dy = c->d_out[0];
    int axes[LT_MAX_DIMS], back[LT_MAX_DIMS];
    moves m;
    LT_TRY(axes_of(c, dy->ndim, axes));
    for (int i = 0; i < dy->ndim; i++)
        back[axes[i]] = i;
    plan_moves(&m, dy->ndim, dy->dims, back);
    move(c, (lt_dtype)dy->dtype, &m, c->d_in[0]->data, dy->data, dy->count, lt__adds(c, 0));
    return LT_OK;
}

#define REORDERING(name, signature, text)                                                          \
    static lt_status name##_shape(lt_call *c) { return reorder_shape(c, name##_axes); }            \
    static lt_status name##_fwd(lt_call *c) { return reorder(c, name##_axes); }                    \
    static lt_status name##_bwd(lt_call *c) { return reorder_back(c, name##_axes); }               \
    const lt_op lt__op_##name = {                                                                  \
        .sig = signature,                                                                          \
        .doc = text,                                                                               \
        .any_dtype = true,                                                                         \
        .shape = name##_shape,                                                                     \
        .fwd = name##_fwd,                                                                         \
        .bwd = name##_bwd,                                                                         \
    };
REORDERING(transpose, "transpose(x; axes?)",
           "x with two axes swapped, by default the last two; the result is a copy.")
REORDERING(permute, "permute(x; axes)", "x with axis axes[i] as its axis i; the result is a copy.")

/* ==== Boxes: slice, pad, cat ================================================================== */

/* Box in the whole (+)= part if to_whole, else part (+)= box in the whole. */
static void copy_box(const lt_call *c, const box *b, lt_dtype dtype, void *whole, void *part,
                     bool to_whole, bool add)
{
    int last = b->ndim - 1;
    int64_t rows = 1, run = b->part[last];
    for (int i = 0; i < last; i++)
        rows *= b->part[i];
    if (run == 0)
        return;
    LT_PARALLEL_FOR(c, rows * run)
    for (int64_t row = 0; row < rows; row++) {
        int64_t left = row, step = b->whole[last], at = b->first[last];
        for (int i = last - 1; i >= 0; i--) {
            at += (left % b->part[i] + b->first[i]) * step;
            left /= b->part[i];
            step *= b->whole[i];
        }
        void *in_whole = lt__at(whole, dtype, at), *in_part = lt__at(part, dtype, row * run);
        if (to_whole)
            put(c, dtype, in_whole, in_part, run, add);
        else
            put(c, dtype, in_part, in_whole, run, add);
    }
}

/* ==== slice =================================================================================== */

/* A position as a script writes it, counted from 1, for messages. */
static lt_ll shown(const lt_call *c, int k)
{
    int64_t p = c->opt[k].i[0];
    return p >= 0 && p < INT64_MAX ? p + 1 : p;
}

static lt_status slice_shape(lt_call *c)
{
    const lt_tensor *x = c->in[0];
    int axis;
    LT_TRY(lt__axis(c, AXIS, x->ndim, &axis));
    if (c->opt[FIRST].n != 1 || c->opt[LAST].n != 1)
        return lt_fail(LT_EINVAL, "first and last must be one position each");
    int64_t dim = x->dims[axis], first = position(c, FIRST, dim), last = position(c, LAST, dim);
    if (first < 0 || last >= dim || last < first - 1)
        return lt_fail(LT_EINVAL,
                       "%lld to %lld is not a range of axis %d of x (%s), which has %lld",
                       shown(c, FIRST), shown(c, LAST), axis + 1, LT_TEXT(x), (lt_ll)dim);
    lt__spec_like(c, 0, x);
    c->spec[0].dims[axis] = last - first + 1;
    if (axis == 0) {
        c->spec[0].view = 1;
        c->spec[0].offset = dim > 0 ? first * (x->count / dim) : 0;
    }
    return LT_OK;
}

static lt_status slice_fwd(lt_call *c)
{
    lt_tensor *x = c->in[0];
    box b = slice_box(c, x);
    copy_box(c, &b, (lt_dtype)x->dtype, x->data, c->out[0]->data, false, false);
    return LT_OK;
}

static lt_status slice_bwd(lt_call *c)
{
    lt_tensor *dx = c->d_in[0];
    box b = slice_box(c, dx);
    if (!lt__adds(c, 0))
        memset(dx->data, 0, (size_t)dx->count * lt_dtype_bytes((lt_dtype)dx->dtype));
    copy_box(c, &b, (lt_dtype)dx->dtype, dx->data, c->d_out[0]->data, true, lt__adds(c, 0));
    return LT_OK;
}

const lt_op lt__op_slice = {
    .sig = "slice(x; axis, first, last)",
    .doc = "The part of x from position first to last, both included, along an axis; the result "
           "is a view if it is the first axis.",
    .any_dtype = true,
    .shape = slice_shape,
    .fwd = slice_fwd,
    .bwd = slice_bwd,
};

/* ==== pad ===================================================================================== */

static lt_status pad_shape(lt_call *c)
{
    const lt_tensor *x = c->in[0];
    lt__spec_like(c, 0, x);
    if (!lt__dtype_can_represent((lt_dtype)x->dtype, lt__number(c, VALUE)))
        return lt_fail(LT_EINVAL, "value must fit into %s, but is %g",
                       lt_dtype_name((lt_dtype)x->dtype), lt__number(c, VALUE));
    for (int k = BEFORE; k <= AFTER; k++) {
        const char *name = c->schema->opt[k].name;
        if (c->opt[k].n != 1 && c->opt[k].n != x->ndim)
            return lt_fail(LT_EINVAL, "%s must be one count or one per axis of x (%s), but got %d",
                           name, LT_TEXT(x), c->opt[k].n);
        for (int i = 0; i < x->ndim; i++) {
            int64_t n = amount(c, k, i), *dim = &c->spec[0].dims[i];
            if (n < 0)
                return lt_fail(LT_EINVAL,
                               "%s must not be negative, but has %lld; use slice to remove "
                               "elements",
                               name, (lt_ll)n);
            if (__builtin_add_overflow(*dim, n, dim))
                return lt_fail(LT_EINVAL, "%s %lld makes axis %d too long", name, (lt_ll)n, i + 1);
        }
    }
    return LT_OK;
}

static lt_status pad_fwd(lt_call *c)
{
    lt_tensor *x = c->in[0], *y = c->out[0];
    lt_device *cpu = c->ctx->devices[0];
    box b = pad_box(c, y);
    LT_TRY(cpu->fill(cpu, y->data, (lt_dtype)y->dtype, (size_t)y->count, lt__number(c, VALUE)));
    copy_box(c, &b, (lt_dtype)x->dtype, y->data, x->data, true, false);
    return LT_OK;
}

static lt_status pad_bwd(lt_call *c)
{
    lt_tensor *dx = c->d_in[0], *dy = c->d_out[0];
    box b = pad_box(c, dy);
    copy_box(c, &b, (lt_dtype)dx->dtype, dy->data, dx->data, false, lt__adds(c, 0));
    return LT_OK;
}

const lt_op lt__op_pad = {
    .sig = "pad(x; before, after, value=0.0)",
    .doc = "x with `before` and `after` elements of one value added at the ends of each axis; "
           "each is one count, or one per axis.",
    .any_dtype = true,
    .shape = pad_shape,
    .fwd = pad_fwd,
    .bwd = pad_bwd,
};

/* ==== cat ===================================================================================== */

enum { SIZES = 1 }; /* the extra output: size of each input along the axis, for backward */

static lt_status cat_shape(lt_call *c)
{
    const lt_tensor *x = c->in[0];
    int axis;
    LT_TRY(lt__axis(c, 0, x->ndim, &axis));
    lt__spec_like(c, 0, x);
    for (int k = 1; k < c->n_in; k++) {
        const lt_tensor *y = c->in[k];
        bool fits = y->dtype == x->dtype && y->ndim == x->ndim;
        for (int i = 0; fits && i < x->ndim; i++)
            fits = i == axis || y->dims[i] == x->dims[i];
        if (!fits)
            return lt_fail(LT_EINVAL,
                           "tensor %d is %s, but the first is %s; only axis %d may differ", k + 1,
                           LT_TEXT(y), LT_TEXT(x), axis + 1);
        if (__builtin_add_overflow(c->spec[0].dims[axis], y->dims[axis], &c->spec[0].dims[axis]))
            return lt_fail(LT_EINVAL, "the sum of the lengths along axis %d is too large",
                           axis + 1);
    }
    lt__spec(c, SIZES, LT_I64, 1, (const int64_t[]){c->n_in});
    return LT_OK;
}

/* Copies all parts to the whole, or the whole to its parts. sizes[i]: the size of part i along the
 * axis. Skips parts that are NULL. */
static void copy_parts(const lt_call *c, lt_tensor *whole, lt_tensor **parts, const int64_t *sizes,
                       bool to_whole)
{
    int axis = axis_at(c, 0, whole->ndim);
    int64_t first = 0;
    for (int i = 0; i < c->n_in; first += sizes[i++]) {
        if (!parts[i])
            continue;
        box b = box_along(whole->ndim, whole->dims, axis, first, sizes[i]);
        copy_box(c, &b, (lt_dtype)whole->dtype, whole->data, parts[i]->data, to_whole,
                 !to_whole && lt__adds(c, i));
    }
}

static lt_status cat_fwd(lt_call *c)
{
    lt_tensor *y = c->out[0];
    int64_t *sizes = c->out[SIZES]->data;
    for (int i = 0; i < c->n_in; i++)
        sizes[i] = c->in[i]->dims[axis_at(c, 0, y->ndim)];
    copy_parts(c, y, c->in, sizes, true);
    return LT_OK;
}

static lt_status cat_bwd(lt_call *c)
{
    copy_parts(c, c->d_out[0], c->d_in, c->out[SIZES]->data, false);
    return LT_OK;
}

const lt_op lt__op_cat = {
    .sig = "cat(x...; axis)",
    .doc =
        "Tensors concatenated along one axis; their shapes may differ only in that axis. In Lua, "
        "cat({a, b}, axis).",
    .n_aux = 1,
    .save = LT_SAVE_OUT(SIZES),
    .cast = LT_CAST_WIDEST,
    .any_dtype = true,
    .shape = cat_shape,
    .fwd = cat_fwd,
    .bwd = cat_bwd,
};

/* ==== cast ==================================================================================== */

static lt_status cast_shape(lt_call *c)
{
    lt__spec_like(c, 0, c->in[0]);
    c->spec[0].dtype = (lt_dtype)c->opt[0].i[0];
    c->spec[0].view = c->spec[0].dtype == (lt_dtype)c->in[0]->dtype;
    return LT_OK;
}

/* dst (+)= src, converted to the dtype of dst. */
static lt_status convert(const lt_call *c, lt_tensor *dst, const lt_tensor *src, bool add)
{
    lt_dtype from = (lt_dtype)src->dtype, to = (lt_dtype)dst->dtype;
    LT_PARALLEL_FOR(c, src->count)
    for (int64_t i = 0; i < src->count; i += LT_BLOCK) {
        uint64_t buffer[LT_BLOCK];
        int64_t n = lt__min(LT_BLOCK, src->count - i);
        lt_convert(buffer, to, lt__at(src->data, from, i), from, (size_t)n);
        put(c, to, lt__at(dst->data, to, i), buffer, n, add);
    }
    return LT_OK;
}

static lt_status cast_fwd(lt_call *c) { return convert(c, c->out[0], c->in[0], false); }

static lt_status cast_bwd(lt_call *c)
{
    return convert(c, c->d_in[0], c->d_out[0], lt__adds(c, 0));
}

const lt_op lt__op_cast = {
    .sig = "cast(x; dtype=f32)",
    .doc = "x converted to another dtype, rounded to nearest even; floats become integers by "
           "truncation and saturate.",
    .any_dtype = true,
    .same_grad = 1,
    .shape = cast_shape,
    .fwd = cast_fwd,
    .bwd = cast_bwd,
};
