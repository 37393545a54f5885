/* update.cu - the CUDA side of update.c. */
#include "ops/cuda/reduction.h"
#include "ops/cuda/update.h"
#include "ops/update.h"

enum { W = LT_UPDATE_W, G = LT_UPDATE_G, SLOT = LT_UPDATE_SLOT, SLOT2 = LT_UPDATE_SLOT2 };

/* ==== Steps =================================================================================== */

typedef float T; /* dtype of the hyperparameters and of each step */

struct sgd_update {
    enum { N = 2, WRITES = 1 << W, SCALED = 1 };
    T lr, weight_decay, scale;
    __device__ void step(T *x) const { LT_SGD_STEP(x[W], x[G]) }
};

static lt_status sgd(lt_call *c)
{
    LT_SGD_NUMBERS(c)
    return lt__update(c, sgd_update{lr, weight_decay, scale});
}

struct momentum_update {
    enum { N = 3, WRITES = 1 << W | 1 << SLOT, SCALED = 1 };
    bool nesterov;
    T lr, momentum, weight_decay, scale;
    __device__ void step(T *x) const { LT_MOMENTUM_STEP(x[W], x[G], x[SLOT]) }
};

static lt_status momentum_step(lt_call *c)
{
    LT_MOMENTUM_NUMBERS(c)
    return lt__update(c, momentum_update{nesterov, lr, momentum, weight_decay, scale});
}

struct adam_update {
    enum { N = 4, WRITES = 1 << W | 1 << SLOT | 1 << SLOT2, SCALED = 1 };
    T scale, keep, coupled, new1, old2, new2, step_size, unbias, eps;
    __device__ void step(T *x) const { LT_ADAM_STEP(x[W], x[G], x[SLOT], x[SLOT2], sqrtf) }
};

static lt_status adam(lt_call *c)
{
    LT_ADAM_NUMBERS(c)
    return lt__update(c,
                      adam_update{scale, keep, coupled, new1, old2, new2, step_size, unbias, eps});
}

/* ==== Sums of squares ========================================================================= */

static void plan_squares(lt_reduction_plan *plan, const lt_tensor *x)
{
    size_t bytes = (size_t)(lt__cuda_at(NULL, x->dtype, 1) - (char *)NULL);
    lt__plan_reduction(plan, 1, &x->count, 1, bytes);
}

static size_t squares_bytes(const lt_tensor *x)
{
    lt_reduction_plan plan;
    plan_squares(&plan, x);
    return lt__reduction_scratch(&plan, sizeof(double));
}

/* *sum (on the device) = the sum of x^2. */
static lt_status sum_squares(const lt_cuda *cuda, const lt_tensor *x, double *sum, void *scratch)
{
    lt_reduction_plan plan;
    lt_reduction_end end = {sum, LT_F64, false, false, 1};
    plan_squares(&plan, x);
    LT_CUDA_FLOATS(cuda, x->dtype, E,
                   return lt__reduce<lt_squares_reduction<E>>(cuda, &plan, x->data, end, scratch);)
}

enum { TOTAL, X_IN };  /* inputs of add_squares */
enum { NUMBERS = 64 }; /* bytes at the start of scratch, for the sums */

template <class E> __global__ void add_to_total(E *total, const double *sum, const int32_t *skip)
{
    if (threadIdx.x == 0 && !(skip && *skip))
        *total = lt_element<E>::of((lt_wide<E>)((double)lt__value(*total) + *sum));
}

static lt_status add_squares(lt_call *c)
{
    lt_cuda *cuda = lt__cuda(c->ctx);
    double *sum = (double *)c->scratch;
    void *total = c->in[TOTAL]->data;
    LT_TRY(sum_squares(cuda, c->in[X_IN], sum, (char *)c->scratch + NUMBERS));
    if (c->in[TOTAL]->dtype == LT_F64)
        return lt__launch(cuda, 1, add_to_total<double>, (double *)total, (const double *)sum,
                          c->skip);
    LT_CUDA_FLOATS(
        cuda, c->in[TOTAL]->dtype, E,
        return lt__launch(cuda, 1, add_to_total<E>, (E *)total, (const double *)sum, c->skip);)
}

static size_t squares_scratch(const lt_call *c, bool backward)
{
    (void)backward;
    return NUMBERS + squares_bytes(c->in[X_IN]);
}

/* ==== lars_step =============================================================================== */

enum { RATIO, NORM_W, NORM_G }; /* doubles in scratch; the norms are squared */

static __global__ void find_ratio(double *number, bool adapt, double trust, double weight_decay,
                                  double eps, double scale, const double *factor)
{
    if (threadIdx.x > 0)
        return;
    double by = factor ? scale * *factor : scale;
    double w = sqrt(number[NORM_W]), g = sqrt(number[NORM_G]) * fabs(by);
    number[RATIO] = adapt ? lt__lars_ratio(w, g, trust, weight_decay, eps) : 1;
}

struct lars_update {
    enum { N = 3, WRITES = 1 << W | 1 << SLOT, SCALED = 1 };
    T lr, momentum, weight_decay, scale;
    const double *ratio;
    __device__ void step(T *x) const { LT_LARS_STEP(x[W], x[G], x[SLOT], (T)*ratio) }
};

static lt_status lars(lt_call *c)
{
    LT_LARS_NUMBERS(c)
    lt_cuda *cuda = lt__cuda(c->ctx);
    double *number = (double *)c->scratch;
    void *rest = (char *)c->scratch + NUMBERS;
    LT_TRY(sum_squares(cuda, c->in[W], number + NORM_W, rest));
    LT_TRY(sum_squares(cuda, c->in[G], number + NORM_G, rest));
    LT_TRY(lt__launch(cuda, 1, find_ratio, number, lt__flag(c, ADAPT), lt__number(c, TRUST),
                      lt__number(c, LARS_WEIGHT_DECAY), lt__number(c, LARS_EPS),
                      lt__number(c, LARS_SCALE), c->factor));
    return lt__update(c, lars_update{lr, momentum, weight_decay, scale, number + RATIO});
}

static size_t lars_scratch(const lt_call *c, bool backward)
{
    (void)backward;
    return NUMBERS + squares_bytes(c->in[W]);
}

void lt__cuda_update(lt_kernels *op)
{
    lt__set_kernels(&op[LT_OP_add_squares], squares_scratch, add_squares, NULL);
    lt__set_kernels(&op[LT_OP_sgd_step], NULL, sgd, NULL);
    lt__set_kernels(&op[LT_OP_momentum_step], NULL, momentum_step, NULL);
    lt__set_kernels(&op[LT_OP_lars_step], lars_scratch, lars, NULL);
    lt__set_kernels(&op[LT_OP_adam_step], NULL, adam, NULL);
}
