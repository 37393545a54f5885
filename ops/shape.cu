/* shape.cu - the CUDA side of shape.c: ops that move elements, and cast. Views need no kernel. */
#include "ops/cuda/map.h"
#include "ops/shape.h"

/* dst (+)= src along a merged walk over dst and src. Elements of any dtype are moved; only
 * gradients are added. */
template <class E> struct same : lt_types<1, E> {
    typedef lt_wide<E> T;
    __device__ T operator()(T x, T, T) const { return x; }
};

static lt_status put(const lt_cuda *cuda, const lt_walk *w, int dtype, void *dst, const void *src,
                     bool add)
{
    if (add)
        LT_CUDA_FLOATS(cuda, dtype, E, return lt__map(cuda, *w, same<E>(), true, dst, src);)
    LT_CUDA_SIZES(dtype, E, return lt__map(cuda, *w, same<E>(), false, dst, src);)
}

/* ==== transpose and permute =================================================================== */

/* side of a tile; rows that a block moves at once */
enum { SIDE = 32, SLICES = LT_THREADS / SIDE };

/* The two axes of a tile, and a walk over all other axes. */
typedef struct tile_plan {
    lt_walk others;
    int64_t rows, from_row;     /* the axis that is contiguous in dst, and its step in src */
    int64_t columns, to_column; /* the axis that is contiguous in src, and its step in dst */
} tile_plan;

/* Moves tiles through shared memory, so that both reads and writes are coalesced. The extra column
 * avoids bank conflicts. */
template <class E, bool ADD>
LT_KERNEL move_tiles(const __grid_constant__ tile_plan t, E *dst, const E *src)
{
    __shared__ E tile[SIDE][SIDE + 1];
    int64_t across = (t.columns + SIDE - 1) / SIDE, down = (t.rows + SIDE - 1) / SIDE;
    int64_t column = blockIdx.x % across * SIDE, row = blockIdx.x / across % down * SIDE, at[2];
    int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    lt__offsets_of(t.others, blockIdx.x / across / down, at);
    for (int k = y; k < SIDE; k += SLICES)
        if (row + k < t.rows && column + x < t.columns)
            tile[k][x] = src[at[1] + (row + k) * t.from_row + column + x];
    __syncthreads();
    for (int k = y; k < SIDE; k += SLICES) {
        if (row + x >= t.rows || column + k >= t.columns)
            continue;
        E *to = dst + at[0] + (column + k) * t.to_column + row + x, e = tile[x][k];
        *to = ADD ? lt_element<E>::of(lt__value(*to) + lt__value(e)) : e;
    }
}

template <class E, bool ADD>
static lt_status launch_tiles(const lt_cuda *cuda, const tile_plan *t, void *dst, const void *src)
{
    int64_t tiles = lt__ceil_div(t->columns, SIDE) * lt__ceil_div(t->rows, SIDE) * t->others.count;
    return lt__launch(cuda, tiles, move_tiles<E, ADD>, *t, (E *)dst, (const E *)src);
}

/* w: a merged walk over dst. Its axis 0 is contiguous in dst, its axis `other` in src. */
static lt_status move_by_tiles(const lt_cuda *cuda, const lt_walk *w, int other, int dtype,
                               void *dst, const void *src, bool add)
{
    tile_plan t = {};
    t.rows = w->dims[0];
    t.from_row = w->step[1][0];
    t.columns = w->dims[other];
    t.to_column = w->step[0][other];
    t.others.count = 1;
    for (int i = 1; i < w->ndim; i++) {
        if (i == other)
            continue;
        int n = t.others.ndim++;
        t.others.dims[n] = w->dims[i];
        t.others.step[0][n] = w->step[0][i];
        t.others.step[1][n] = w->step[1][i];
        t.others.count *= w->dims[i];
    }
    if (t.others.ndim == 0)
        t.others.ndim = 1;
    if (add)
        LT_CUDA_FLOATS(cuda, dtype, E, return (launch_tiles<E, true>(cuda, &t, dst, src));)
    LT_CUDA_SIZES(dtype, E, return (launch_tiles<E, false>(cuda, &t, dst, src));)
}

/* dims: the dims of src. axes[i]: the axis of src that is axis i of dst. */
static lt_status move(const lt_cuda *cuda, int dtype, int ndim, const int64_t *dims,
                      const int *axes, void *dst, const void *src, bool add)
{
    int64_t step[LT_MAX_DIMS], moved[LT_MAX_DIMS] = {0}, stride = 1;
    lt_walk w;
    for (int i = ndim - 1; i >= 0; i--) {
        step[i] = stride;
        stride *= dims[i];
    }
    for (int i = 0; i < ndim; i++)
        moved[i] = dims[axes[i]];
    lt__walk_over(&w, ndim, moved);
    for (int i = 0; i < ndim; i++)
        w.step[1][i] = step[axes[i]];
    lt__walk_merge(&w, 2);
    int other = 0;
    while (other < w.ndim && w.step[1][other] != 1)
        other++;
    bool tiles = w.count > 0 && other > 0 && other < w.ndim;
    return tiles ? move_by_tiles(cuda, &w, other, dtype, dst, src, add)
                 : put(cuda, &w, dtype, dst, src, add);
}

typedef void (*axes_fn)(const lt_call *c, int ndim, int *axes);

static lt_status reorder(lt_call *c, axes_fn axes_of)
{
    const lt_tensor *x = c->in[0];
    int axes[LT_MAX_DIMS];
    axes_of(c, x->ndim, axes);
    return move(lt__cuda(c->ctx), x->dtype, x->ndim, x->dims, axes, c->out[0]->data, x->data,
                false);
}

static lt_status reorder_back(lt_call *c, axes_fn axes_of)
{
    const lt_tensor *dy = c->d_out[0];
    int axes[LT_MAX_DIMS], back[LT_MAX_DIMS];
    axes_of(c, dy->ndim, axes);
    for (int i = 0; i < dy->ndim; i++)
        back[axes[i]] = i;
    return move(lt__cuda(c->ctx), dy->dtype, dy->ndim, dy->dims, back, c->d_in[0]->data, dy->data,
                c->add & 1);
}

static lt_status transpose_fwd(lt_call *c) { return reorder(c, axes_of_transpose); }
static lt_status transpose_bwd(lt_call *c) { return reorder_back(c, axes_of_transpose); }
static lt_status permute_fwd(lt_call *c) { return reorder(c, axes_of_permute); }
static lt_status permute_bwd(lt_call *c) { return reorder_back(c, axes_of_permute); }

/* ==== Boxes: slice, pad, cat ================================================================== */

/* Box in the whole (+)= part if to_whole, else part (+)= box in the whole. */
static lt_status copy_box(const lt_cuda *cuda, const box *b, int dtype, void *whole, void *part,
                          bool to_whole, bool add)
{
    int64_t first = 0, step = 1;
    int side = to_whole ? 0 : 1;
    lt_walk w;
    lt__walk_over(&w, b->ndim, b->part);
    for (int i = b->ndim - 1; i >= 0; i--) {
        first += b->first[i] * step;
        w.step[side][i] = step;
        step *= b->whole[i];
    }
    lt__walk_merge(&w, 2);
    whole = lt__cuda_at(whole, dtype, first);
    return put(cuda, &w, dtype, to_whole ? whole : part, to_whole ? part : whole, add);
}

static lt_status slice_fwd(lt_call *c)
{
    lt_tensor *x = c->in[0];
    box b = slice_box(c, x);
    return copy_box(lt__cuda(c->ctx), &b, x->dtype, x->data, c->out[0]->data, false, false);
}

static lt_status slice_bwd(lt_call *c)
{
    lt_tensor *dx = c->d_in[0];
    lt_cuda *cuda = lt__cuda(c->ctx);
    box b = slice_box(c, dx);
    if (!(c->add & 1))
        LT_TRY(
            cuda->device.fill(&cuda->device, dx->data, (lt_dtype)dx->dtype, (size_t)dx->count, 0));
    return copy_box(cuda, &b, dx->dtype, dx->data, c->d_out[0]->data, true, c->add & 1);
}

static lt_status pad_fwd(lt_call *c)
{
    lt_tensor *x = c->in[0], *y = c->out[0];
    lt_cuda *cuda = lt__cuda(c->ctx);
    box b = pad_box(c, y);
    LT_TRY(cuda->device.fill(&cuda->device, y->data, (lt_dtype)y->dtype, (size_t)y->count,
                             lt__number(c, VALUE)));
    return copy_box(cuda, &b, x->dtype, y->data, x->data, true, false);
}

static lt_status pad_bwd(lt_call *c)
{
    lt_tensor *dx = c->d_in[0], *dy = c->d_out[0];
    box b = pad_box(c, dy);
    return copy_box(lt__cuda(c->ctx), &b, dx->dtype, dy->data, dx->data, false, c->add & 1);
}

/* ==== cat ===================================================================================== */

enum { SIZES = 1 }; /* the extra output: each input's size along the axis, for backward */

typedef struct size_list {
    int64_t at[LT_MAX_LIST];
} size_list;

static __global__ void write_sizes(const __grid_constant__ size_list sizes, int n, int64_t *to)
{
    if ((int)threadIdx.x < n)
        to[threadIdx.x] = sizes.at[threadIdx.x];
}

static lt_status cat_fwd(lt_call *c)
{
    lt_tensor *y = c->out[0];
    lt_cuda *cuda = lt__cuda(c->ctx);
    int axis = axis_at(c, 0, y->ndim);
    int64_t first = 0;
    size_list sizes = {};
    for (int i = 0; i < c->n_in; i++) {
        lt_tensor *x = c->in[i];
        sizes.at[i] = x->dims[axis];
        box b = box_along(y->ndim, y->dims, axis, first, sizes.at[i]);
        LT_TRY(copy_box(cuda, &b, y->dtype, y->data, x->data, true, false));
        first += sizes.at[i];
    }
    return lt__launch(cuda, 1, write_sizes, sizes, c->n_in, (int64_t *)c->out[SIZES]->data);
}

/* Only the device knows where a part begins: the host would have to wait for the sizes of inputs
 * that need no gradient. */
template <class E, bool ADD>
LT_KERNEL take_part(E *part, const E *whole, const int64_t *sizes, int number, int64_t count,
                    int64_t run, int64_t whole_run, int64_t inner)
{
    int64_t i = (int64_t)blockIdx.x * LT_THREADS + threadIdx.x, first = 0;
    if (i >= count)
        return;
    for (int k = 0; k < number; k++)
        first += sizes[k];
    E e = whole[i / run * whole_run + first * inner + i % run];
    part[i] = ADD ? lt_element<E>::of(lt__value(part[i]) + lt__value(e)) : e;
}

template <class E, bool ADD> static lt_status part_back(lt_call *c, int number)
{
    lt_tensor *d = c->d_in[number];
    const lt_tensor *dy = c->d_out[0];
    int axis = axis_at(c, 0, dy->ndim);
    int64_t inner = 1;
    for (int i = axis + 1; i < dy->ndim; i++)
        inner *= dy->dims[i];
    return lt__launch(lt__cuda(c->ctx), lt__ceil_div(d->count, LT_THREADS), take_part<E, ADD>,
                      (E *)d->data, (const E *)dy->data, (const int64_t *)c->out[SIZES]->data,
                      number, d->count, d->dims[axis] * inner, dy->dims[axis] * inner, inner);
}

static lt_status put_part(lt_call *c, int i)
{
    if (c->add >> i & 1)
        LT_CUDA_FLOATS(lt__cuda(c->ctx), c->d_in[i]->dtype, E, return (part_back<E, true>(c, i));)
    LT_CUDA_SIZES(c->d_in[i]->dtype, E, return (part_back<E, false>(c, i));)
}

static lt_status cat_bwd(lt_call *c)
{
    for (int i = 0; i < c->n_in; i++)
        if (c->d_in[i])
            LT_TRY(put_part(c, i));
    return LT_OK;
}

/* ==== cast ==================================================================================== */

static lt_status cast_fwd(lt_call *c)
{
    lt_cuda *cuda = lt__cuda(c->ctx);
    lt_tensor *x = c->in[0], *y = c->out[0];
    return cuda->device.convert(&cuda->device, y->data, (lt_dtype)y->dtype, x->data,
                                (lt_dtype)x->dtype, (size_t)x->count);
}

/* The gradient is rounded before it is added, as on the CPU. */
template <class Z, class A> struct rounded : lt_types<1, Z, A> {
    __device__ float operator()(lt_wide<A> x, float, float) const
    {
        return lt__value(lt_element<Z>::of((float)x));
    }
};

template <class Z> static lt_status cast_back(lt_call *c)
{
    lt_tensor *dx = c->d_in[0];
    const lt_tensor *dy = c->d_out[0];
    lt_walk w;
    lt_cuda *cuda = lt__cuda(c->ctx);
    lt__walk_inputs(&w, dx, 1, &dy);
    LT_CUDA_ANY_FLOAT(cuda, dy->dtype, A,
                      return lt__map(cuda, w, rounded<Z, A>(), true, dx->data, dy->data);)
}

static lt_status cast_bwd(lt_call *c)
{
    lt_cuda *cuda = lt__cuda(c->ctx);
    lt_tensor *dx = c->d_in[0], *dy = c->d_out[0];
    if (!(c->add & 1))
        return cuda->device.convert(&cuda->device, dx->data, (lt_dtype)dx->dtype, dy->data,
                                    (lt_dtype)dy->dtype, (size_t)dy->count);
    LT_CUDA_FLOATS(cuda, dx->dtype, Z, return cast_back<Z>(c);)
}

void lt__cuda_shape(lt_kernels *op)
{
    lt__set_kernels(&op[LT_OP_transpose], NULL, transpose_fwd, transpose_bwd);
    lt__set_kernels(&op[LT_OP_permute], NULL, permute_fwd, permute_bwd);
    lt__set_kernels(&op[LT_OP_slice], NULL, slice_fwd, slice_bwd);
    lt__set_kernels(&op[LT_OP_pad], NULL, pad_fwd, pad_bwd);
    lt__set_kernels(&op[LT_OP_cat], NULL, cat_fwd, cat_bwd);
    lt__set_kernels(&op[LT_OP_cast], NULL, cast_fwd, cast_bwd);
}
