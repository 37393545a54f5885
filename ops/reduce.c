/* reduce.c - sums, means, norms, maxima, minima and argmax, over any set of axes.
 *
 * The reduced axes are reduced from the last to the first, with one pass each (reduce.h). A pass
 * treats its data as (outer, rows, width) and reduces the rows: acc[j] += x[r][j]. Floats are
 * summed in double, integers in 64 bits.
 *
 * Several narrow rows are treated as one long row, to fill SIMD registers; its lanes are reduced
 * last. So a sum over the last axis, whose width is 1, is as fast as any other. If that axis is
 * short, many outer positions are reduced in parallel, as columns. A pass over few but long columns
 * is divided into parts that threads can share, and an additional pass reduces the parts. The
 * division depends only on the shape, so the bits do not depend on the number of threads.
 */
#include "ops/cpu/loops.h"
#include "ops/reduce.h"

enum { AXIS, KEEP }; /* options of every op here */

typedef enum { SUM, MEAN, NORM, MAX, MIN } reduction_kind;

enum {
    LANES = 64,    /* maximum length of a row made of narrow rows end to end */
    COLUMNS = 256, /* columns of a block, which one task reduces with results on the stack */
    PART = 16384,  /* minimum number of elements of a part */
    MAX_PARTS = 64,
    ENOUGH_TASKS = 32,       /* with this many blocks, no parts are needed */
    MAX_PASSES = LT_MAX_DIMS /* every other merged axis is reduced, in one or two passes */
};

/* A reduction of the rows of (outer, rows, width) to (outer, width). Steps are in elements. */
typedef struct {
    int64_t outer, rows, width;
    int64_t part;         /* rows that one task reduces */
    int64_t down, across; /* steps to the next row, and to the next column */
} reduction_pass;

typedef struct {
    int n;
    reduction_pass pass[MAX_PASSES];
} reduction_plan;

typedef struct {
    reduction_kind kind;
    lt_dtype in, acc, out;
    char start[8];  /* start value of a reduction, of type acc */
    double divisor; /* divisor of float results: the count for a mean, else 1 */
    bool add;       /* add to the output instead of overwriting it */
} reduction;

/* ==== Planning ================================================================================ */

static int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
/* Pieces that n elements are divided into. */
static int64_t cuts(int64_t n, int64_t piece) { return (n + piece - 1) / piece; }

static int64_t parts_of(const reduction_pass *p)
{
    return p->rows > p->part ? cuts(p->rows, p->part) : 1;
}

/* Appends a pass, and a second one if the first is divided into parts. */
static void plan_pass(reduction_plan *p, int64_t outer, int64_t rows, int64_t width)
{
    reduction_pass *first = &p->pass[p->n++];
    *first = (reduction_pass){outer, rows, width, rows, width, 1};
    if (width == 1 && rows < LANES)
        *first = (reduction_pass){1, rows, outer, rows, 1, rows};
    if (outer * cuts(width, COLUMNS) >= ENOUGH_TASKS || rows * width < 2 * PART)
        return;
    first->part = max(cuts(PART, width), cuts(rows, MAX_PARTS));
    int64_t parts = parts_of(first);
    if (parts > 1)
        p->pass[p->n++] = (reduction_pass){outer, parts, width, parts, width, 1};
}

/* Plans the reduction of dims[0..ndim). Bit i of mask: axis i is reduced. */
static void plan_for(reduction_plan *p, int ndim, const int64_t *dims, uint32_t mask)
{
    lt_row_reduction rows[LT_MAX_DIMS];
    int n = lt__plan_rows(rows, ndim, dims, mask);
    p->n = 0;
    for (int i = 0; i < n; i++)
        plan_pass(p, rows[i].outer, rows[i].rows, rows[i].width);
}

/* Bytes of the results that a pass leaves for the next pass. */
static size_t left_by(const reduction_pass *p)
{
    return lt__aligned((size_t)(p->outer * parts_of(p) * p->width) * 8);
}

static size_t plan_scratch(const reduction_plan *p)
{
    size_t bytes = 0;
    for (int i = 0; i < p->n - 1; i++)
        bytes += left_by(&p->pass[i]);
    return bytes;
}

/* ==== Running a plan ========================================================================== */

/* acc[j] = value for all rows r and columns j. value is a formula of a, which is acc[j], and of x,
 * the element in row r and column j. The inner loop runs over contiguous memory. */
#define REDUCE(A, T, value)                                                                        \
    do {                                                                                           \
        A *restrict accs = acc;                                                                    \
        const T *restrict xs = data;                                                               \
        if (across == 1) {                                                                         \
            for (int64_t r = 0; r < rows; r++)                                                     \
                for (int64_t j = 0; j < width; j++) {                                              \
                    const A a = accs[j];                                                           \
                    const T x = xs[r * down + j];                                                  \
                    accs[j] = value;                                                               \
                }                                                                                  \
        } else {                                                                                   \
            for (int64_t j = 0; j < width; j++) {                                                  \
                A a = accs[j];                                                                     \
                for (int64_t r = 0; r < rows; r++) {                                               \
                    const T x = xs[r + j * across];                                                \
                    a = value;                                                                     \
                }                                                                                  \
                accs[j] = a;                                                                       \
            }                                                                                      \
        }                                                                                          \
    } while (0)

/* Reduces `rows` rows of `width` columns into acc. down: step to the next row; across: step to the
 * next column. One of the two is 1. */
LT_SIMD static void reduce_block(reduction_kind kind, lt_dtype dtype, void *acc, const void *data,
                                 int64_t rows, int64_t width, int64_t down, int64_t across)
{
    if (kind == MAX)
        LT_NUMERICS(dtype, T, REDUCE(T, T, x > a || x != x ? x : a););
    else if (kind == MIN)
        LT_NUMERICS(dtype, T, REDUCE(T, T, x < a || x != x ? x : a););
    else if (kind == NORM)
        LT_FLOATS(dtype, T, REDUCE(double, T, a + (double)x * (double)x););
    else if (lt__is_float(dtype))
        LT_FLOATS(dtype, T, REDUCE(double, T, a + (double)x););
    else
        LT_INTEGERS(dtype, T, REDUCE(uint64_t, T, a + (uint64_t)x););
}

/* Sets n accumulators to the start value. */
static void set_start(const reduction *r, void *acc, int64_t n)
{
    LT_SIZES(lt_dtype_bytes(r->acc), T, {
        T start, *to = acc;
        memcpy(&start, r->start, sizeof start);
        for (int64_t i = 0; i < n; i++)
            to[i] = start;
    });
}

/* Converts n accumulators to results. */
static void finish(const reduction *r, void *out, const void *acc, int64_t n)
{
    if (!lt__is_float(r->out) || r->kind == MAX || r->kind == MIN) {
        memcpy(out, acc, (size_t)n * lt_dtype_bytes(r->out));
        return;
    }
    LT_FLOATS(r->out, T, {
        T *to = out;
        for (int64_t i = 0; i < n; i++) {
            double a = r->acc == LT_I64 ? (double)((const int64_t *)acc)[i]
                                        : ((const double *)acc)[i];
            LT_PUT(r->add, to[i], (T)(r->kind == NORM ? sqrt(a) : a / r->divisor));
        }
    });
}

/* Reduces one block of columns of one part. first, last: whether p is the first or last pass of its
 * plan. */
static void run_task(const reduction *r, const reduction_pass *p, bool first, bool last,
                     const void *src, void *dst, int64_t task)
{
    _Alignas(64) char acc[COLUMNS * 8];
    int64_t blocks = cuts(p->width, COLUMNS), parts = parts_of(p);
    int64_t block = task % blocks, part = task / blocks % parts, o = task / blocks / parts;
    int64_t row = part * p->part, rows = lt__min(p->part, p->rows - row);
    int64_t column = block * COLUMNS, n = lt__min(COLUMNS, p->width - column);
    lt_dtype dtype = first ? r->in : r->acc;
    reduction_kind later = r->kind == MAX || r->kind == MIN ? r->kind : SUM;
    reduction_kind now = first ? r->kind : later;
    const void *x = lt__at(src, dtype, o * p->rows * p->width + row * p->down + column * p->across);

    int64_t together = 1; /* rows laid end to end */
    if (p->across == 1 && n == p->down)
        together = max(1, lt__min(LANES / n, rows));
    int64_t left = rows % together;
    set_start(r, acc, together * n);
    reduce_block(now, dtype, acc, x, rows / together, together * n, together * p->down, p->across);
    if (left > 0)
        reduce_block(now, dtype, acc, lt__at(x, dtype, (rows - left) * n), left, n, n, 1);
    while (together > 1) { /* reduces the last half into the first */
        int64_t half = together / 2;
        together -= half;
        reduce_block(later, r->acc, acc, lt__at(acc, r->acc, together * n), 1, half * n, 0, 1);
    }
    int64_t to = (o * parts + part) * p->width + column;
    if (last)
        finish(r, lt__at(dst, r->out, to), acc, n);
    else
        memcpy(lt__at(dst, r->acc, to), acc, (size_t)n * lt_dtype_bytes(r->acc));
}

static void reduce(const lt_call *c, const reduction *r, const reduction_plan *plan,
                   const void *src, void *dst, void *scratch)
{
    for (int i = 0; i < plan->n; i++) {
        const reduction_pass *p = &plan->pass[i];
        bool first = i == 0, last = i == plan->n - 1;
        /* scratch is NULL if no pass leaves results for the next */
        void *to = last || !scratch ? dst : scratch;
        int64_t tasks = p->width > 0 ? p->outer * parts_of(p) * cuts(p->width, COLUMNS) : 0;
        if (tasks == 1) {
            run_task(r, p, first, last, src, to, 0);
        } else {
            LT_PARALLEL_FOR(c, p->outer * p->rows * p->width)
            for (int64_t t = 0; t < tasks; t++)
                run_task(r, p, first, last, src, to, t);
        }
        src = to;
        if (scratch && !last)
            scratch = (char *)scratch + left_by(p);
    }
}

/* The reduction of a kind, with its accumulator's dtype and start value. */
static reduction reduction_of(reduction_kind kind, lt_dtype in, lt_dtype out, double divisor,
                              bool add)
{
    bool extreme = kind == MAX || kind == MIN;
    reduction r = {.kind = kind, .in = in, .out = out, .divisor = divisor, .add = add};
    r.acc = extreme ? in : lt__is_float(in) ? LT_F64 : LT_I64;
    double start = kind == MAX ? -INFINITY : kind == MIN ? INFINITY : 0;
    lt_convert(r.start, r.acc, &start, LT_F64, 1);
    return r;
}

/* ==== Sums for broadcasting ops =============================================================== */

void lt__sum_to(const lt_call *c, lt_array dst, lt_array src, bool add, void *scratch)
{
    reduction_plan plan;
    plan_for(&plan, src.ndim, src.dims, lt__stretched_axes(dst.ndim, dst.dims, src.ndim));
    reduction r = reduction_of(SUM, src.dtype, dst.dtype, 1, add);
    reduce(c, &r, &plan, src.data, dst.data, scratch);
}

size_t lt__sum_to_scratch(const lt_tensor *dst, const lt_tensor *src)
{
    reduction_plan plan;
    plan_for(&plan, src->ndim, src->dims, lt__stretched_axes(dst->ndim, dst->dims, src->ndim));
    return plan_scratch(&plan);
}

/* ==== Forward ================================================================================= */

static lt_status shape_as(lt_call *c, lt_dtype dtype)
{
    const lt_tensor *x = c->in[0];
    uint32_t mask;
    int ndim = 0;
    int64_t dims[LT_MAX_DIMS];
    LT_TRY(lt__axes(c, AXIS, x->ndim, &mask));
    for (int i = 0; i < x->ndim; i++)
        if (!(mask >> i & 1))
            dims[ndim++] = x->dims[i];
        else if (lt__flag(c, KEEP))
            dims[ndim++] = 1;
    lt__spec(c, 0, dtype, ndim, dims);
    return LT_OK;
}

static lt_status sum_shape(lt_call *c)
{
    lt_dtype dtype = (lt_dtype)c->in[0]->dtype;
    return shape_as(c, lt__is_float(dtype) ? dtype : LT_I64);
}

static lt_status mean_shape(lt_call *c)
{
    lt_dtype dtype = (lt_dtype)c->in[0]->dtype;
    return shape_as(c, lt__is_float(dtype) ? dtype : LT_F32);
}

static lt_status norm_shape(lt_call *c)
{
    LT_TRY(lt__same_float(c, 1));
    return sum_shape(c);
}

static lt_status extreme_shape(lt_call *c)
{
    const lt_tensor *x = c->in[0];
    LT_TRY(shape_as(c, (lt_dtype)x->dtype));
    uint32_t mask = lt__reduced_axes(c, x->ndim);
    for (int i = 0; i < x->ndim; i++)
        if ((mask >> i & 1) && x->dims[i] == 0)
            return lt_fail(LT_EINVAL, "axis %d of x (%s) must not be empty", i + 1, LT_TEXT(x));
    return LT_OK;
}

static size_t forward_scratch(const lt_call *c, bool backward)
{
    const lt_tensor *x = c->in[0];
    if (backward)
        return 0;
    reduction_plan plan;
    plan_for(&plan, x->ndim, x->dims, lt__reduced_axes(c, x->ndim));
    return plan_scratch(&plan);
}

static lt_status forward(lt_call *c, reduction_kind kind)
{
    reduction_plan plan;
    const lt_tensor *x = c->in[0], *y = c->out[0];
    plan_for(&plan, x->ndim, x->dims, lt__reduced_axes(c, x->ndim));
    double divisor = kind == MEAN ? (double)x->count / (double)y->count : 1;
    reduction r = reduction_of(kind, (lt_dtype)x->dtype, (lt_dtype)y->dtype, divisor, false);
    reduce(c, &r, &plan, x->data, y->data, c->scratch);
    return LT_OK;
}

static lt_status sum_fwd(lt_call *c) { return forward(c, SUM); }
static lt_status mean_fwd(lt_call *c) { return forward(c, MEAN); }
static lt_status norm_fwd(lt_call *c) { return forward(c, NORM); }
static lt_status max_fwd(lt_call *c) { return forward(c, MAX); }
static lt_status min_fwd(lt_call *c) { return forward(c, MIN); }

/* ==== Backward ================================================================================ */

/* The elements of y with the reduced axes kept as size 1, so that they broadcast to x. dims:
 * memory of LT_MAX_DIMS entries for the result, which borrows it. */
static lt_array kept(const lt_call *c, const lt_tensor *y, int64_t *dims)
{
    const lt_tensor *dx = c->d_in[0];
    uint32_t mask = lt__reduced_axes(c, dx->ndim);
    for (int i = 0; i < dx->ndim; i++)
        dims[i] = mask >> i & 1 ? 1 : dx->dims[i];
    return (lt_array){y->data, dims, y->count, dx->ndim, (lt_dtype)y->dtype};
}

/* dx (+)= d_of, a formula of dy and n, and of x and y if `inputs` is 3. n is the number of elements
 * reduced to one. */
/* clang-format off */
#define GRADIENT_BLOCK(name, inputs, d_of)                                                         \
    LT_SIMD static void name(const lt_block *b)                                                    \
    {                                                                                              \
        LT_FLOATS(b->dtype, T, {                                                                   \
            const T *restrict dys = b->in[0];                                                      \
            const T *restrict xs = b->in[(inputs) > 1 ? 1 : 0];                                    \
            const T *restrict ys = b->in[(inputs) > 1 ? 2 : 0];                                    \
            const T n = (T)(b->c->d_in[0]->count / b->c->d_out[0]->count);                         \
            T *restrict dxs = b->z;                                                                \
            const bool add = b->add;                                                               \
            for (int64_t i = 0; i < b->n; i++) {                                                   \
                const T dy = dys[i], x = xs[i], y = ys[i];                                         \
                (void)x, (void)y, (void)n;                                                         \
                LT_PUT(add, dxs[i], d_of);                                                         \
            }                                                                                      \
        });                                                                                        \
    }
/* clang-format on */
GRADIENT_BLOCK(sum_dx, 1, dy)
GRADIENT_BLOCK(mean_dx, 1, dy / n)
GRADIENT_BLOCK(norm_dx, 3, y == 0 ? 0 : dy * (x / y))
GRADIENT_BLOCK(extreme_dx, 3, x != 0 ? dy / y : 0) /* x: 1 at extremes; y: their number */

/* The gradient of an op that needs only dy. */
static lt_status spread(lt_call *c, lt_block_fn fn)
{
    int64_t dims[LT_MAX_DIMS];
    bool add = lt__adds(c, 0);
    lt_array dx = lt__array(c->d_in[0]), dy = kept(c, c->d_out[0], dims);
    lt__map(c, &(lt_map){fn, dx.dtype, LT_CHEAP, add, .n_in = 1, .z = dx, .in = {dy}});
    return LT_OK;
}

static lt_status sum_bwd(lt_call *c) { return spread(c, sum_dx); }
static lt_status mean_bwd(lt_call *c) { return spread(c, mean_dx); }

static lt_status norm_bwd(lt_call *c)
{
    int64_t dims[LT_MAX_DIMS];
    bool add = lt__adds(c, 0);
    lt_array x = lt__array(c->in[0]), y = kept(c, c->out[0], dims);
    lt_array dx = lt__array(c->d_in[0]), dy = kept(c, c->d_out[0], dims);
    lt__map(c, &(lt_map){norm_dx, dx.dtype, LT_CHEAP, add, .n_in = 3, .z = dx, .in = {dy, x, y}});
    return LT_OK;
}

/* z = 1 where x equals y, the extreme of its group, else 0. If y is NaN, each NaN in x counts. */
LT_SIMD static void at_extreme(const lt_block *b)
{
    LT_FLOATS(b->dtype, T, {
        const T *restrict x = b->in[0], *restrict y = b->in[1];
        T *restrict z = b->z;
        for (int64_t i = 0; i < b->n; i++)
            z[i] = x[i] == y[i] || (x[i] != x[i] && y[i] != y[i]);
    });
}

/* The layout of the scratch of extreme_bwd(): a mark for each element of x, a count of marks for
 * each element of y, and the scratch of the plan that counts them. */
typedef struct {
    reduction_plan plan;
    size_t counts, partials, bytes; /* offsets of the last two; total */
} tally;

static tally tally_for(const lt_call *c)
{
    const lt_tensor *dx = c->d_in[0], *dy = c->d_out[0];
    size_t size = lt_dtype_bytes((lt_dtype)dx->dtype);
    tally t;
    plan_for(&t.plan, dx->ndim, dx->dims, lt__reduced_axes(c, dx->ndim));
    t.counts = lt__aligned((size_t)dx->count * size);
    t.partials = t.counts + lt__aligned((size_t)dy->count * size);
    t.bytes = t.partials + plan_scratch(&t.plan);
    return t;
}

static size_t extreme_scratch(const lt_call *c, bool backward)
{
    return backward ? tally_for(c).bytes : forward_scratch(c, false);
}

static lt_status extreme_bwd(lt_call *c)
{
    int64_t dims[LT_MAX_DIMS];
    bool add = lt__adds(c, 0);
    tally t = tally_for(c);
    if (c->d_in[0]->count == 0)
        return LT_OK;
    lt_array x = lt__array(c->in[0]), y = kept(c, c->out[0], dims);
    lt_array dx = lt__array(c->d_in[0]), dy = kept(c, c->d_out[0], dims);
    lt_array marks = x, counts = y;
    marks.data = c->scratch;
    counts.data = (char *)c->scratch + t.counts;
    lt__map(c, &(lt_map){at_extreme, x.dtype, LT_CHEAP, .n_in = 2, .z = marks, .in = {x, y}});
    reduction r = reduction_of(SUM, x.dtype, x.dtype, 1, false);
    reduce(c, &r, &t.plan, marks.data, counts.data, (char *)c->scratch + t.partials);
    lt__map(c, &(lt_map){extreme_dx, x.dtype, LT_CHEAP, add, .n_in = 3, .z = dx,
                         .in = {dy, marks, counts}});
    return LT_OK;
}

/* ==== argmax ================================================================================== */

/* x as (outer, rows, width), where rows is the given axis, or all elements if none is given. */
static reduction_pass argmax_pass(const lt_call *c)
{
    const lt_tensor *x = c->in[0];
    int axis = 0;
    if (!lt__given(c, AXIS))
        return (reduction_pass){.outer = 1, .rows = x->count, .width = 1};
    lt__axis(c, AXIS, x->ndim, &axis);
    reduction_pass p = {.outer = 1, .rows = x->dims[axis], .width = 1};
    for (int i = 0; i < x->ndim; i++)
        if (i != axis)
            *(i < axis ? &p.outer : &p.width) *= x->dims[i];
    return p;
}

static lt_status argmax_shape(lt_call *c)
{
    if (c->opt[AXIS].n > 1)
        return lt_fail(LT_EINVAL, "axis must be one axis, or none for all elements, but got %d",
                       c->opt[AXIS].n);
    LT_TRY(extreme_shape(c));
    c->spec[0].dtype = LT_I64;
    return LT_OK;
}

/* index[j] = the row of the largest x[row * width + j], for j < n <= COLUMNS. The first of equals
 * wins, and the first NaN wins over all numbers. */
LT_SIMD static void argmax_columns(lt_dtype dtype, const void *data, int64_t rows, int64_t width,
                                   int64_t n, int64_t *index)
{
    LT_NUMERICS(dtype, T, {
        const T *x = data;
        T best[COLUMNS];
        for (int64_t j = 0; j < n; j++) {
            best[j] = x[j];
            index[j] = 0;
        }
        for (int64_t r = 1; r < rows; r++)
            for (int64_t j = 0; j < n; j++) {
                const T v = x[r * width + j];
                if (v > best[j] || (v != v && best[j] == best[j])) {
                    best[j] = v;
                    index[j] = r;
                }
            }
    });
}

static lt_status argmax_fwd(lt_call *c)
{
    const lt_tensor *x = c->in[0];
    lt_dtype dtype = (lt_dtype)x->dtype;
    int64_t *index = c->out[0]->data;
    reduction_pass p = argmax_pass(c);
    int64_t blocks = cuts(p.width, COLUMNS);
    LT_PARALLEL_FOR(c, x->count)
    for (int64_t t = 0; t < p.outer * blocks; t++) {
        int64_t o = t / blocks, j = t % blocks * COLUMNS;
        argmax_columns(dtype, lt__at(x->data, dtype, o * p.rows * p.width + j), p.rows, p.width,
                       lt__min(COLUMNS, p.width - j), index + o * p.width + j);
    }
    return LT_OK;
}

/* ==== The ops ================================================================================= */

#define SUMMING(name, saves, text)                                                                 \
    const lt_op lt__op_##name = {                                                                  \
        .sig = #name "(x; axis?, keep=false)",                                                     \
        .doc = text,                                                                               \
        .cast = LT_CAST_F32,                                                                       \
        .save = saves,                                                                             \
        .shape = name##_shape,                                                                     \
        .scratch = forward_scratch,                                                                \
        .fwd = name##_fwd,                                                                         \
        .bwd = name##_bwd,                                                                         \
    };
SUMMING(sum, 0,
        "Sum of x over one axis, several or all (the default); keep=true keeps them with size 1, "
        "and integers give i64.")
SUMMING(mean, 0,
        "Mean of x over one axis, several or all (the default); keep=true keeps them with size 1, "
        "and integers give f32.")
SUMMING(norm, LT_SAVE_IN(0) | LT_SAVE_OUT(0),
        "Square root of the sum of x^2 over one axis, several or all (the default); the gradient "
        "at 0 is 0.")

#define EXTREME(name, text)                                                                        \
    const lt_op lt__op_##name = {                                                                  \
        .sig = #name "(x; axis?, keep=false)",                                                     \
        .doc = text                                                                                \
        " over one axis, several or all (the default); nan if any is nan, and equal elements "     \
        "share the gradient evenly.",                                                              \
        .save = LT_SAVE_IN(0) | LT_SAVE_OUT(0),                                                    \
        .shape = extreme_shape,                                                                    \
        .scratch = extreme_scratch,                                                                \
        .fwd = name##_fwd,                                                                         \
        .bwd = extreme_bwd,                                                                        \
    };
EXTREME(max, "Largest element of x")
EXTREME(min, "Smallest element of x")

const lt_op lt__op_argmax = {
    .sig = "argmax(x; axis?, keep=false)",
    .doc = "Index, from 0, of the largest element of x along an axis or of all elements; the "
           "first of equal ones, and a nan counts as largest.",
    .shape = argmax_shape,
    .fwd = argmax_fwd,
};
