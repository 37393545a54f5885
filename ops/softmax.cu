/* softmax.cu - the CUDA side of softmax.c.
 *
 * Each row is processed by a few threads (cuda/rows.h). They read it three times: for the largest
 * element, for the sums and for the results. Unless rows are very long, all reads but the first
 * come from the caches. Sums are in double.
 *
 * cross_entropy checks its labels in a separate kernel (lt__cuda_check_ids). A row whose label is
 * out of range gets a NaN loss and a gradient of NaNs.
 */
#include "ops/cuda/rows.h"
#include "ops/loss.h"

struct largest {
    typedef float Acc;
    static __device__ float start() { return -INFINITY; }
    static __device__ float join(float a, float b) { return b > a ? b : a; }
};

/* The largest element of a row. */
template <class E> __device__ float largest_of(const lt_row_plan &p, const lt_row &r, const E *x)
{
    float a = largest::start();
    for (int64_t i = r.lane; r.valid && i < p.n; i += p.lanes)
        a = largest::join(a, lt__value(x[r.first + i * p.stride]));
    return lt__join_row<largest>(p, a);
}

/* The sums of exp(x - max) and of x - max over a row. */
template <class E>
__device__ lt_two exps_of(const lt_row_plan &p, const lt_row &r, const E *x, float max)
{
    lt_two sums = lt_two_sums::start();
    for (int64_t i = r.lane; r.valid && i < p.n; i += p.lanes) {
        float offset = lt__value(x[r.first + i * p.stride]) - max;
        sums.a += (double)lt__exp_f32(offset);
        sums.b += (double)offset;
    }
    return lt__join_row<lt_two_sums>(p, sums);
}

/* ==== softmax and log_softmax ================================================================= */

static lt_row_plan rows_along(const lt_call *c, const lt_tensor *x)
{
    int axis = (int)c->opt[0].i[0];
    int64_t stride = 1;
    axis += axis < 0 ? x->ndim : 0;
    for (int i = axis + 1; i < x->ndim; i++)
        stride *= x->dims[i];
    int64_t n = x->dims[axis];
    return lt__rows_over(n * stride > 0 ? x->count / (n * stride) : 0, n, stride);
}

template <class E, bool AS_LOG>
LT_KERNEL forward_kernel(const __grid_constant__ lt_row_plan p, E *y, const E *x)
{
    lt_row r = lt__row_of(p);
    float max = largest_of(p, r, x);
    double total = exps_of(p, r, x, max).a;
    float factor = (float)(AS_LOG ? log(total) : 1 / total);
    for (int64_t i = r.lane; r.valid && i < p.n; i += p.lanes) {
        int64_t at = r.first + i * p.stride;
        float v = lt__value(x[at]);
        y[at] = lt_element<E>::of(AS_LOG ? LT_LOG_SOFTMAX(v, max, factor)
                                         : lt__exp_f32(v - max) * factor);
    }
}

template <class E, bool AS_LOG>
LT_KERNEL backward_kernel(const __grid_constant__ lt_row_plan p, E *dx, const E *dy, const E *y,
                          bool add)
{
    lt_row r = lt__row_of(p);
    lt_two sums = lt_two_sums::start();
    for (int64_t i = r.lane; r.valid && i < p.n; i += p.lanes) {
        int64_t at = r.first + i * p.stride;
        sums.a += (double)(AS_LOG ? lt__value(dy[at]) : lt__value(dy[at]) * lt__value(y[at]));
    }
    float sum = (float)lt__join_row<lt_two_sums>(p, sums).a;
    for (int64_t i = r.lane; r.valid && i < p.n; i += p.lanes) {
        int64_t at = r.first + i * p.stride;
        float g = lt__value(dy[at]), v = lt__value(y[at]);
        float d = AS_LOG ? LT_LOG_SOFTMAX_BACK(g, lt__exp_f32(v), sum) : LT_SOFTMAX_BACK(g, v, sum);
        dx[at] = lt_element<E>::of(add ? lt__value(dx[at]) + d : d);
    }
}

template <class E, bool AS_LOG> static lt_status forward(lt_call *c)
{
    lt_row_plan p = rows_along(c, c->in[0]);
    return lt__launch(lt__cuda(c->ctx), lt__row_blocks(&p), forward_kernel<E, AS_LOG>, p,
                      (E *)c->out[0]->data, (const E *)c->in[0]->data);
}

template <class E, bool AS_LOG> static lt_status backward(lt_call *c)
{
    lt_row_plan p = rows_along(c, c->out[0]);
    return lt__launch(lt__cuda(c->ctx), lt__row_blocks(&p), backward_kernel<E, AS_LOG>, p,
                      (E *)c->d_in[0]->data, (const E *)c->d_out[0]->data,
                      (const E *)c->out[0]->data, lt__adds(c, 0));
}

LT_CUDA_CALL(softmax_fwd, FLOATS, c->in[0], forward<E, false>(c))
LT_CUDA_CALL(softmax_bwd, FLOATS, c->out[0], backward<E, false>(c))
LT_CUDA_CALL(log_softmax_fwd, FLOATS, c->in[0], forward<E, true>(c))
LT_CUDA_CALL(log_softmax_bwd, FLOATS, c->out[0], backward<E, true>(c))

/* ==== cross_entropy =========================================================================== */

enum { X_IN, LABELS };

typedef struct label_numbers {
    const void *at;
    int64_t dtype;
    double label_smoothing;
} label_numbers;

static label_numbers labels_of(const lt_call *c)
{
    label_numbers l = {c->in[LABELS]->data, c->in[LABELS]->dtype, lt__number(c, 0)};
    return l;
}

/* kept (rows, 2): the largest element of each row, and 1 / sum exp(x - largest). */
template <class E>
LT_KERNEL loss_kernel(const __grid_constant__ lt_row_plan p, const E *x, const label_numbers labels,
                      float *kept, double *losses)
{
    lt_row r = lt__row_of(p);
    float max = largest_of(p, r, x);
    lt_two sums = exps_of(p, r, x, max);
    if (!r.valid || r.lane > 0)
        return;
    int64_t label = lt__id(labels.at, (int)labels.dtype, r.index);
    bool is_class = label >= 0 && label < p.n;
    double offset = is_class ? (double)lt__value(x[r.first + label]) - (double)max : NAN;
    kept[2 * r.index] = max;
    kept[2 * r.index + 1] = is_class ? (float)(1 / sums.a) : NAN;
    losses[r.index] = lt__row_loss(sums.a, sums.b, offset, labels.label_smoothing, p.n);
    if (!is_class) /* with label_smoothing=1 the loss would not depend on the label */
        losses[r.index] = NAN;
}

/* dloss: the gradient of the mean loss. */
template <class E>
LT_KERNEL loss_back_kernel(const __grid_constant__ lt_row_plan p, E *dx, const E *x,
                           const label_numbers labels, const float *kept, const E *dloss, bool add)
{
    lt_row r = lt__row_of(p);
    if (!r.valid)
        return;
    double g = (double)lt__value(*dloss) / (double)p.outer;
    lt_row_gradient of = lt__row_gradient(g, kept[2 * r.index + 1], labels.label_smoothing, p.n);
    float max = kept[2 * r.index], factor = (float)of.factor, shift = (float)of.shift;
    int64_t label = lt__id(labels.at, (int)labels.dtype, r.index);
    for (int64_t i = r.lane; i < p.n; i += p.lanes) {
        int64_t at = r.first + i;
        float d = lt__exp_f32(lt__value(x[at]) - max) * factor + shift;
        d = add ? lt__value(dx[at]) + d : d;
        dx[at] = lt_element<E>::of(i == label ? d - (float)of.hit : d);
    }
}

static lt_row_plan rows_of(const lt_call *c)
{
    const lt_tensor *x = c->in[X_IN];
    return lt__rows_over(c->in[LABELS]->count, x->dims[x->ndim - 1], 1);
}

static size_t losses_bytes(const lt_call *c)
{
    return lt__aligned((size_t)c->in[LABELS]->count * sizeof(double));
}

/* Layout of the scratch: the losses of all rows, then the scratch of the reduction or of the label
 * check, which run one after the other. */
static size_t loss_scratch(const lt_call *c, bool backward)
{
    lt_reduction_plan plan = lt__plan_all(c->in[LABELS]->count, sizeof(double));
    size_t sums = lt__reduction_scratch(&plan, sizeof(double));
    size_t ids = lt__cuda_ids_scratch(c->in[LABELS]);
    return backward ? 0 : losses_bytes(c) + (sums > ids ? sums : ids);
}

template <class E> static lt_status loss_forward(lt_call *c)
{
    lt_cuda *cuda = lt__cuda(c->ctx);
    lt_row_plan p = rows_of(c);
    lt_reduction_plan plan = lt__plan_all(c->in[LABELS]->count, sizeof(double));
    double *losses = (double *)c->scratch;
    char *rest = (char *)c->scratch + losses_bytes(c);
    lt_reduction_end end = {c->out[0]->data, c->out[0]->dtype, false, false,
                            p.outer > 0 ? (double)p.outer : 1};
    LT_TRY(lt__cuda_check_ids(cuda, c->in[LABELS], p.n, LT_BAD_LABEL, rest));
    LT_TRY(lt__launch(cuda, lt__row_blocks(&p), loss_kernel<E>, p, (const E *)c->in[X_IN]->data,
                      labels_of(c), (float *)c->out[1]->data, losses));
    return lt__reduce<lt_sum_reduction<double>>(cuda, &plan, losses, end, rest);
}

template <class E> static lt_status loss_backward(lt_call *c)
{
    lt_row_plan p = rows_of(c);
    return lt__launch(lt__cuda(c->ctx), lt__row_blocks(&p), loss_back_kernel<E>, p,
                      (E *)c->d_in[X_IN]->data, (const E *)c->in[X_IN]->data, labels_of(c),
                      (const float *)c->out[1]->data, (const E *)c->d_out[0]->data,
                      lt__adds(c, X_IN));
}

LT_CUDA_CALL(cross_entropy_fwd, FLOATS, c->in[X_IN], loss_forward<E>(c))
LT_CUDA_CALL(cross_entropy_bwd, FLOATS, c->in[X_IN], loss_backward<E>(c))

void lt__cuda_softmax(lt_kernels *op)
{
    lt__set_kernels(&op[LT_OP_softmax], NULL, softmax_fwd, softmax_bwd);
    lt__set_kernels(&op[LT_OP_log_softmax], NULL, log_softmax_fwd, log_softmax_bwd);
    lt__set_kernels(&op[LT_OP_cross_entropy], loss_scratch, cross_entropy_fwd, cross_entropy_bwd);
}
