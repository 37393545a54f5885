/* loss.c - mean squared error. (cross_entropy is in softmax.c.) */
#include "ops/loss.h"

enum { X, Y };
enum { BLOCK = 4096, LANES = 16 }; /* elements of a block, and partial sums of a block */

static lt_status shape(lt_call *c)
{
    const lt_tensor *x = c->in[X];
    LT_TRY(lt__same_float(c, 2));
    LT_TRY(lt__require_dims(c, Y, x->ndim, x->dims, "the shape of x"));
    lt__spec(c, 0, (lt_dtype)x->dtype, 0, NULL);
    return LT_OK;
}

static size_t scratch(const lt_call *c, bool backward)
{
    return backward ? 0 : (size_t)(c->in[X]->count / BLOCK + 1) * sizeof(double);
}

/* The sum of (x - y)^2 over elements [first, first + n). */
LT_SIMD static double block_sum(const lt_call *c, int64_t first, int64_t n)
{
    double sum = 0;
    double lane[LANES] = {0};
    int64_t whole = n / LANES * LANES;
    LT_FLOATS(c->in[X]->dtype, T,
        const T *restrict x = (const T *)c->in[X]->data + first;
        const T *restrict y = (const T *)c->in[Y]->data + first;
        for (int64_t i = 0; i < whole; i += LANES)
            for (int l = 0; l < LANES; l++) {
                double d = x[i + l] - y[i + l];
                lane[l] += d * d;
            }
        for (int64_t i = whole; i < n; i++) {
            double d = x[i] - y[i];
            sum += d * d;
        }
    );
    for (int l = 0; l < LANES; l++)
        sum += lane[l];
    return sum;
}

static lt_status forward(lt_call *c)
{
    int64_t n = c->in[X]->count, blocks = (n + BLOCK - 1) / BLOCK;
    double *sums = c->scratch, loss = 0;
    LT_PARALLEL_FOR(c, n)
    for (int64_t b = 0; b < blocks; b++)
        sums[b] = block_sum(c, b * BLOCK, n - b * BLOCK < BLOCK ? n - b * BLOCK : BLOCK);
    for (int64_t b = 0; b < blocks; b++)
        loss += sums[b];
    if (n > 0)
        loss /= (double)n;
    LT_FLOATS(c->in[X]->dtype, T, *(T *)c->out[0]->data = (T)loss;);
    return LT_OK;
}

/* dx (+)= 2 g (x - y) / n;  dy (+)= -dx */
static lt_status backward(lt_call *c)
{
    int64_t n = c->in[X]->count;
    LT_FLOATS(c->in[X]->dtype, T,
        const T *x = c->in[X]->data;
        const T *y = c->in[Y]->data;
        T *dx = lt__data(c->d_in[X]);
        T *dy = lt__data(c->d_in[Y]);
        T factor = (T)lt__mse_factor(*(const T *)c->d_out[0]->data, n);
        LT_PARALLEL_FOR(c, n)
        for (int64_t i = 0; i < n; i++) {
            T d = factor * (x[i] - y[i]);
            if (dx)
                LT_PUT(lt__adds(c, X), dx[i], d);
            if (dy)
                LT_PUT(lt__adds(c, Y), dy[i], -d);
        }
    );
    return LT_OK;
}

const lt_op lt__op_mse_loss = {
    .sig = "mse_loss(x, y)",
    .doc = "Mean of (x - y)^2 over all elements of x and y, which have the same shape; 0 if they "
           "are empty.",
    .cast = LT_CAST_F32,
    .save = LT_SAVE_IN(X) | LT_SAVE_IN(Y),
    .shape = shape,
    .scratch = scratch,
    .fwd = forward,
    .bwd = backward,
};
