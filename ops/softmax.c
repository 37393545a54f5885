/* softmax.c - softmax and log_softmax along an axis, and cross_entropy over the last axis.
 *
 * All of them work on rows, the n elements along the axis. The largest element of the row is
 * subtracted before exp, so that nothing overflows. Along the last axis a row is contiguous; along
 * any other axis it is copied to scratch and back. Sums along a row have 16 lanes, which are added
 * in order at the end: the loops vectorise, and the bits do not depend on the instruction set or on
 * the number of threads.
 *
 * cross_entropy saves two numbers for each row, the largest element and 1 / sum exp(x - largest).
 * Backward computes the probabilities again from x, which takes less memory traffic than saving
 * them.
 */
#include "ops/loss.h"

enum { LANES = 16 };
enum { ROWS = 64 }; /* rows of a block of cross_entropy; each block has its own sum */

/* ==== Rows ==================================================================================== */

#define EXP(x) _Generic((x), float : lt__exp_f32, double : exp)(x)

typedef struct {
    double largest; /* element of the row */
    double exps;    /* sum of exp(x - largest) */
    double offsets; /* sum of x - largest */
} row_sums;

/* The sums of a row of n >= 1 elements. */
LT_SIMD static row_sums sum_row(lt_dtype dtype, const void *in, int64_t n)
{
    row_sums sums = {0};
    LT_FLOATS(dtype, T,
        const T *restrict x = in;
        T lane[LANES];
        int64_t lanes = lt__min(n, LANES);
        for (int64_t k = 0; k < LANES; k++)
            lane[k] = x[0];
        for (int64_t i = 0; i < n; i += LANES) {
            int64_t m = lt__min(LANES, n - i);
            for (int64_t k = 0; k < m; k++)
                lane[k] = x[i + k] > lane[k] ? x[i + k] : lane[k];
        }
        T max = lane[0];
        for (int64_t k = 1; k < lanes; k++)
            max = lane[k] > max ? lane[k] : max;
        T offset[LANES] = {0};
        memset(lane, 0, sizeof lane);
        for (int64_t i = 0; i < n; i += LANES) {
            int64_t m = lt__min(LANES, n - i);
            for (int64_t k = 0; k < m; k++) {
                offset[k] += x[i + k] - max;
                lane[k] += EXP(x[i + k] - max);
            }
        }
        sums.largest = max;
        for (int64_t k = 0; k < lanes; k++) {
            sums.exps += lane[k];
            sums.offsets += offset[k];
        }
    );
    return sums;
}

/* y (+)= exp(x - largest) factor + shift */
LT_SIMD static void exp_row(lt_dtype dtype, void *out, const void *in, int64_t n, double largest,
                            double factor, double shift, bool add)
{
    LT_FLOATS(dtype, T,
        T *restrict y = out;
        const T *restrict x = in;
        T max = (T)largest;
        T a = (T)factor;
        T b = (T)shift;
        if (add) /* two loops, as compilers do not vectorise a long body with a branch */
            for (int64_t i = 0; i < n; i++)
                y[i] += EXP(x[i] - max) * a + b;
        else
            for (int64_t i = 0; i < n; i++)
                y[i] = EXP(x[i] - max) * a + b;
    );
}

/* ==== softmax and log_softmax ================================================================= */

typedef struct {
    int64_t rows, n; /* n: elements of a row */
    int64_t stride;  /* distance between adjacent elements of a row */
} plan;

static plan plan_for(const lt_call *c, const lt_tensor *x)
{
    int axis = (int)c->opt[0].i[0];
    plan p = {.stride = 1};
    axis += axis < 0 ? x->ndim : 0;
    p.n = x->dims[axis];
    for (int i = axis + 1; i < x->ndim; i++)
        p.stride *= x->dims[i];
    p.rows = p.n > 0 ? x->count / p.n : 0;
    return p;
}

static lt_status shape(lt_call *c)
{
    int axis;
    LT_TRY(lt__same_float(c, 1));
    LT_TRY(lt__axis(c, 0, c->in[0]->ndim, &axis));
    lt__spec_like(c, 0, c->in[0]);
    return LT_OK;
}

/* Buffers for three rows for each thread if rows are not contiguous, else nothing. */
static size_t scratch(const lt_call *c, bool backward)
{
    const lt_tensor *x = backward ? c->out[0] : c->in[0];
    plan p = plan_for(c, x);
    return p.stride == 1 || x->count == 0
               ? 0
               : (size_t)(c->threads * 3 * p.n) * lt_dtype_bytes((lt_dtype)x->dtype);
}

/* Row r of x: in place if rows are contiguous, else copied into buffer. */
static void *take_row(const lt_tensor *x, const plan *p, int64_t r, void *buffer)
{
    if (p->stride == 1)
        return lt__address(x, r * p->n);
    LT_FLOATS(x->dtype, T,
        const T *from = (const T *)x->data + r / p->stride * p->n * p->stride + r % p->stride;
        T *to = buffer;
        for (int64_t i = 0; i < p->n; i++)
            to[i] = from[i * p->stride];
    );
    return buffer;
}

/* Copies row r back to x, unless take_row() returned it in place. */
static void give_row(lt_tensor *x, const plan *p, int64_t r, const void *buffer)
{
    if (p->stride == 1)
        return;
    LT_FLOATS(x->dtype, T,
        const T *from = buffer;
        T *to = (T *)x->data + r / p->stride * p->n * p->stride + r % p->stride;
        for (int64_t i = 0; i < p->n; i++)
            to[i * p->stride] = from[i];
    );
}

/* y = x - largest - log_sum */
LT_SIMD static void log_row(lt_dtype dtype, void *out, const void *in, int64_t n, double largest,
                            double log_sum)
{
    LT_FLOATS(dtype, T,
        T *restrict y = out;
        const T *restrict x = in;
        T max = (T)largest;
        T log_total = (T)log_sum;
        for (int64_t i = 0; i < n; i++)
            y[i] = LT_LOG_SOFTMAX(x[i], max, log_total);
    );
}

/* Buffer k, of three, of thread t in scratch; NULL if rows are contiguous. */
static void *buffer_of(const lt_call *c, const plan *p, lt_dtype dtype, int t, int k)
{
    int64_t row = (int64_t)t * 3 + k;
    return c->scratch ? (char *)c->scratch + (size_t)(row * p->n) * lt_dtype_bytes(dtype) : NULL;
}

static lt_status run_forward(lt_call *c, bool as_log)
{
    lt_tensor *x = c->in[0], *y = c->out[0];
    lt_dtype dtype = (lt_dtype)x->dtype;
    plan p = plan_for(c, x);
    LT_PARALLEL_FOR(c, x->count * 8)
    for (int t = 0; t < c->threads; t++) {
        void *x_row = buffer_of(c, &p, dtype, t, 0), *y_row = buffer_of(c, &p, dtype, t, 1);
        for (int64_t r = p.rows * t / c->threads; r < p.rows * (t + 1) / c->threads; r++) {
            void *in = take_row(x, &p, r, x_row), *out = take_row(y, &p, r, y_row);
            row_sums sums = sum_row(dtype, in, p.n);
            if (as_log)
                log_row(dtype, out, in, p.n, sums.largest, log(sums.exps));
            else
                exp_row(dtype, out, in, p.n, sums.largest, 1 / sums.exps, 0, false);
            give_row(y, &p, r, out);
        }
    }
    return LT_OK;
}

/* softmax: dx (+)= y (dy - sum dy y);  log_softmax: dx (+)= dy - exp(y) sum dy */
LT_SIMD static void row_backward(lt_dtype dtype, void *d_in, const void *d_out, const void *out,
                                 int64_t n, bool as_log, bool add)
{
    LT_FLOATS(dtype, T,
        T *restrict dx = d_in;
        const T *restrict dy = d_out;
        const T *restrict y = out;
        T lane[LANES] = {0};
        for (int64_t i = 0; i < n; i += LANES) {
            int64_t m = lt__min(LANES, n - i);
            for (int64_t k = 0; k < m; k++)
                lane[k] += as_log ? dy[i + k] : dy[i + k] * y[i + k];
        }
        T sum = 0;
        for (int64_t k = 0; k < lt__min(n, LANES); k++)
            sum += lane[k];
        if (as_log)
            for (int64_t i = 0; i < n; i++)
                LT_PUT(add, dx[i], LT_LOG_SOFTMAX_BACK(dy[i], EXP(y[i]), sum));
        else
            for (int64_t i = 0; i < n; i++)
                LT_PUT(add, dx[i], LT_SOFTMAX_BACK(dy[i], y[i], sum));
    );
}

static lt_status run_backward(lt_call *c, bool as_log)
{
    lt_tensor *y = c->out[0], *dx = c->d_in[0];
    lt_dtype dtype = (lt_dtype)y->dtype;
    plan p = plan_for(c, y);
    LT_PARALLEL_FOR(c, y->count * 8)
    for (int t = 0; t < c->threads; t++) {
        void *dx_row = buffer_of(c, &p, dtype, t, 0), *dy_row = buffer_of(c, &p, dtype, t, 1);
        void *y_row = buffer_of(c, &p, dtype, t, 2);
        for (int64_t r = p.rows * t / c->threads; r < p.rows * (t + 1) / c->threads; r++) {
            void *row = take_row(dx, &p, r, dx_row);
            row_backward(dtype, row, take_row(c->d_out[0], &p, r, dy_row),
                         take_row(y, &p, r, y_row), p.n, as_log, lt__adds(c, 0));
            give_row(dx, &p, r, row);
        }
    }
    return LT_OK;
}

static lt_status softmax_forward(lt_call *c) { return run_forward(c, false); }
static lt_status softmax_backward(lt_call *c) { return run_backward(c, false); }
static lt_status log_softmax_forward(lt_call *c) { return run_forward(c, true); }
static lt_status log_softmax_backward(lt_call *c) { return run_backward(c, true); }

const lt_op lt__op_softmax = {
    .sig = "softmax(x; axis=-1)",
    .doc = "y = exp(x) / sum(exp(x)) along an axis of x; y has the shape of x.",
    .cast = LT_CAST_F32,
    .save = LT_SAVE_OUT(0),
    .shape = shape,
    .scratch = scratch,
    .fwd = softmax_forward,
    .bwd = softmax_backward,
};

const lt_op lt__op_log_softmax = {
    .sig = "log_softmax(x; axis=-1)",
    .doc = "y = x - log(sum(exp(x))) along an axis of x; y has the shape of x.",
    .cast = LT_CAST_F32,
    .save = LT_SAVE_OUT(0),
    .shape = shape,
    .scratch = scratch,
    .fwd = log_softmax_forward,
    .bwd = log_softmax_backward,
};

/* ==== cross_entropy =========================================================================== */

enum { X, LABELS };

static lt_status cross_entropy_shape(lt_call *c)
{
    const lt_tensor *x = c->in[X], *labels = c->in[LABELS];
    LT_TRY(lt__same_float(c, 1));
    if (x->ndim < 1)
        return lt_fail(LT_EINVAL, "x must have at least 1 axis (..., classes), but has none");
    LT_TRY(lt__require_integers(c, LABELS));
    LT_TRY(
        lt__require_dims(c, LABELS, x->ndim - 1, x->dims, "the shape of x without its last axis"));
    LT_TRY(lt__number_in(c, 0, 0, 1));
    int64_t kept[2] = {labels->count, 2};
    lt__spec(c, 0, (lt_dtype)x->dtype, 0, NULL);
    lt__spec(c, 1, x->dtype == LT_F64 ? LT_F64 : LT_F32, 2, kept);
    return LT_OK;
}

static size_t cross_entropy_scratch(const lt_call *c, bool backward)
{
    return backward ? 0 : (size_t)(c->in[LABELS]->count / ROWS + 1) * sizeof(double);
}

/* The loss of row r. Writes its largest element and 1 / sum exp(x - largest) to the extra
 * output. */
static double row_loss(const lt_call *c, int64_t r, int64_t classes)
{
    lt_dtype dtype = (lt_dtype)c->in[X]->dtype;
    double label_smoothing = lt__number(c, 0), offset;
    row_sums sums = sum_row(dtype, lt__address(c->in[X], r * classes), classes);
    LT_FLOATS(dtype, T,
        const T *x = lt__address(c->in[X], r * classes);
        T *kept = lt__address(c->out[1], 2 * r);
        kept[0] = (T)sums.largest;
        kept[1] = (T)(1 / sums.exps);
        offset = x[lt__integer(c->in[LABELS], r)] - sums.largest;
    );
    return lt__row_loss(sums.exps, sums.offsets, offset, label_smoothing, classes);
}

static lt_status cross_entropy_forward(lt_call *c)
{
    const lt_tensor *x = c->in[X], *labels = c->in[LABELS];
    int64_t rows = labels->count, classes = x->dims[x->ndim - 1], blocks = (rows + ROWS - 1) / ROWS;
    double *sums = c->scratch, loss = 0;
    for (int64_t r = 0; r < rows; r++) {
        int64_t label = lt__integer(labels, r);
        if (label < 0 || label >= classes)
            return lt_fail(LT_EDATA, LT_BAD_LABEL_TEXT, (lt_ll)r + 1, (lt_ll)label, (lt_ll)classes);
    }
    LT_PARALLEL_FOR(c, x->count * 8)
    for (int64_t b = 0; b < blocks; b++) {
        sums[b] = 0;
        for (int64_t r = b * ROWS; r < lt__min(rows, (b + 1) * ROWS); r++)
            sums[b] += row_loss(c, r, classes);
    }
    for (int64_t b = 0; b < blocks; b++)
        loss += sums[b] / (double)rows;
    LT_FLOATS(x->dtype, T, *(T *)c->out[0]->data = (T)loss;);
    return LT_OK;
}

/* dx (+)= dloss / rows (p - q), with p the probabilities and q the smoothed labels. */
static lt_status cross_entropy_backward(lt_call *c)
{
    const lt_tensor *x = c->in[X], *labels = c->in[LABELS];
    lt_dtype dtype = (lt_dtype)x->dtype;
    lt_tensor *dx = c->d_in[X];
    int64_t rows = labels->count, classes = x->dims[x->ndim - 1];
    double label_smoothing = lt__number(c, 0);
    LT_PARALLEL_FOR(c, x->count * 8)
    for (int64_t r = 0; r < rows; r++) {
        LT_FLOATS(dtype, T,
            const T *kept = lt__address(c->out[1], 2 * r);
            double g = *(const T *)c->d_out[0]->data / (double)rows;
            lt_row_gradient of = lt__row_gradient(g, kept[1], label_smoothing, classes);
            T *d = lt__address(dx, r * classes);
            exp_row(dtype, d, lt__address(x, r * classes), classes, kept[0], of.factor, of.shift,
                    lt__adds(c, X));
            d[lt__integer(labels, r)] -= (T)of.hit;
        );
    }
    return LT_OK;
}

const lt_op lt__op_cross_entropy = {
    .sig = "cross_entropy(x, labels; label_smoothing=0.0)",
    .doc = "Mean over rows of x (..., classes) of -sum(q log softmax(x)), with q = (1 - "
           "label_smoothing) onehot(labels) + label_smoothing / classes and labels (...) counted "
           "from 0; 0 if there are no rows.",
    .cast = LT_CAST_F32,
    .n_aux = 1,
    .save = LT_SAVE_IN(X) | LT_SAVE_IN(LABELS) | LT_SAVE_OUT(1),
    .shape = cross_entropy_shape,
    .scratch = cross_entropy_scratch,
    .fwd = cross_entropy_forward,
    .bwd = cross_entropy_backward,
};
