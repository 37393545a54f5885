/* loops.c - lt__map(): elementwise loops in blocks, with broadcasting. */
#include "ops/cpu/loops.h"

enum { TASK = 16 * LT_BLOCK }; /* cheap elements per task of a thread */

/* ==== Stretched inputs ======================================================================== */

/* The traversal of an input along z's dims; a step of 0 repeats elements. Neighbouring axes that
 * are contiguous in the input are merged, and axes of size 1 are dropped. */
typedef struct {
    int ndim;       /* 0 if the input is not broadcast */
    int64_t period; /* elements until the input repeats; 0 if not within a block */
    int64_t dims[LT_MAX_DIMS], step[LT_MAX_DIMS]; /* innermost axis first */
} walk;

static void walk_over(walk *w, const lt_array *x, const lt_array *z)
{
    int64_t stride = 1;
    w->ndim = 0;
    for (int i = 1; i <= z->ndim; i++) {
        int64_t dim = z->dims[z->ndim - i], own = i <= x->ndim ? x->dims[x->ndim - i] : 1;
        int64_t step = own == 1 ? 0 : stride;
        int last = w->ndim - 1;
        stride *= own;
        if (dim == 1)
            continue;
        if (last >= 0 && step == w->step[last] * w->dims[last]) {
            w->dims[last] *= dim;
        } else {
            w->dims[w->ndim] = dim;
            w->step[w->ndim++] = step;
        }
    }
    bool scalar = w->ndim == 1;
    bool row = w->ndim == 2 && w->step[0] == 1 && w->dims[0] <= LT_BLOCK;
    w->period = scalar ? 1 : row ? w->dims[0] : 0;
}

/* Copies elements first, first + 1, ... of the walk over src to dst. The innermost step is 0 or
 * 1. */
static void gather(const walk *w, size_t bytes, const char *src, int64_t first, char *dst,
                   int64_t n)
{
    int64_t index[LT_MAX_DIMS], at = 0;
    for (int a = 0; a < w->ndim; a++) {
        index[a] = first % w->dims[a];
        first /= w->dims[a];
        at += index[a] * w->step[a];
    }
    while (n > 0) {
        int64_t run = lt__min(n, w->dims[0] - index[0]);
        LT_SIZES(bytes, T,
            T *to = (T *)dst;
            const T *from = (const T *)src + at;
            if (w->step[0] == 0)
                for (int64_t i = 0; i < run; i++)
                    to[i] = *from;
            else
                for (int64_t i = 0; i < run; i++)
                    to[i] = from[i];
        );
        dst += run * (int64_t)bytes;
        n -= run;
        index[0] += run;
        at += run * w->step[0];
        for (int a = 0; a < w->ndim - 1 && index[a] == w->dims[a]; a++) {
            at += w->step[a + 1] - w->dims[a] * w->step[a];
            index[a] = 0;
            index[a + 1]++;
        }
    }
}

/* ==== Maps ==================================================================================== */

/* Returns the dense elements of input x for elements i to i + n - 1 of z, in place or in the
 * buffer. widen: convert halves to f32. fresh: the buffer does not contain them yet. */
static const void *take(const lt_array *x, const walk *w, int64_t i, int64_t n, bool widen,
                        bool fresh, char *buffer)
{
    const void *from = lt__at(x->data, x->dtype, i);
    bool half = widen && lt__is_half(x->dtype);
    if (w->ndim == 0 && !half)
        return from;
    if (fresh) {
        uint16_t stretched[LT_BLOCK];
        void *to = half ? (void *)stretched : buffer;
        if (w->ndim > 0) {
            gather(w, lt_dtype_bytes(x->dtype), x->data, i, to, n);
            from = to;
        }
        if (half)
            lt_convert(buffer, LT_F32, from, x->dtype, (size_t)n);
    }
    return buffer;
}

/* Whether fn reads and writes bf16 itself. */
static bool is_direct(const lt_map *m)
{
    bool direct = m->bf16 && m->z.dtype == LT_BF16;
    for (int k = 0; k < m->n_in; k++)
        direct &= m->in[k].dtype == LT_BF16;
    return direct;
}

/* Computes elements [first, last). Where possible, a block is a multiple of the inputs' periods, so
 * that a repeated scalar or row is copied only once. */
static void map_range(const lt_call *c, const lt_map *m, const walk *walks, int64_t first,
                      int64_t last)
{
    bool widen = !is_direct(m), half = widen && lt__is_half(m->z.dtype);
    _Alignas(64) char buffer[3][LT_BLOCK * 8];
    _Alignas(64) float wide[LT_BLOCK];
    lt_block b = {.dtype = widen ? lt__widened(m->dtype) : LT_BF16, .add = m->add, .c = c};
    int64_t block = LT_BLOCK;
    for (int k = 0; k < m->n_in; k++)
        if (walks[k].ndim > 0 && walks[k].period > 0)
            block -= block % walks[k].period;
    for (b.first = first; b.first < last; b.first += block) {
        b.n = lt__min(block, last - b.first);
        for (int k = 0; k < m->n_in; k++) {
            const walk *w = &walks[k];
            bool repeats = w->ndim > 0 && w->period > 0 && block % w->period == 0;
            b.in[k] =
                take(&m->in[k], w, b.first, b.n, widen, b.first == first || !repeats, buffer[k]);
        }
        void *z = lt__at(m->z.data, m->z.dtype, b.first);
        b.z = half ? wide : z;
        if (half && m->add)
            lt_convert(wide, LT_F32, z, m->z.dtype, (size_t)b.n);
        m->fn(&b);
        if (half)
            lt_convert(z, m->z.dtype, wide, LT_F32, (size_t)b.n);
    }
}

void lt__map(const lt_call *c, const lt_map *m)
{
    walk walks[3];
    int64_t count = m->z.count, task = TASK / m->cost;
    for (int k = 0; k < m->n_in; k++) {
        walks[k].ndim = 0;
        if (m->in[k].count != count)
            walk_over(&walks[k], &m->in[k], &m->z);
    }
    if (count <= task) {
        map_range(c, m, walks, 0, count);
        return;
    }
    LT_PARALLEL_FOR(c, count * m->cost)
    for (int64_t first = 0; first < count; first += task)
        map_range(c, m, walks, first, lt__min(first + task, count));
}
