/* update.cu - the CUDA side of update.c. */
#include "ops/cuda/reduction.h"
#include "ops/cuda/update.h"
#include "ops/update.h"

enum { W = LT_UPDATE_W, G = LT_UPDATE_G, SLOT = LT_UPDATE_SLOT, SLOT2 = LT_UPDATE_SLOT2 };

/* ==== Steps =================================================================================== */

typedef float T; /* dtype of the hyperparameters and of each step */

LT_CUDA_UPDATE(sgd, 2, 1 << W, true, LT_SGD_NUMBERS, LT_SGD_STEP(x[W], x[G]))
LT_CUDA_UPDATE(momentum, 3, 1 << W | 1 << SLOT, true, LT_MOMENTUM_NUMBERS,
               LT_MOMENTUM_STEP(x[W], x[G], x[SLOT]))
LT_CUDA_UPDATE(adam, 4, 1 << W | 1 << SLOT | 1 << SLOT2, true, LT_ADAM_NUMBERS,
               LT_ADAM_STEP(x[W], x[G], x[SLOT], x[SLOT2], sqrtf))

static lt_status sgd(lt_call *c) { return lt__update(c, sgd_update::of(c)); }
static lt_status momentum_step(lt_call *c) { return lt__update(c, momentum_update::of(c)); }
static lt_status adam(lt_call *c) { return lt__update(c, adam_update::of(c)); }

/* ==== Sums of squares ========================================================================= */

static size_t squares_bytes(const lt_tensor *x)
{
    lt_reduction_plan plan = lt__plan_all(x->count, lt__cuda_dtype_bytes(x->dtype));
    return lt__reduction_scratch(&plan, sizeof(double));
}

/* *sum (on the device) = the sum of x^2. */
static lt_status sum_squares(const lt_cuda *cuda, const lt_tensor *x, double *sum, void *scratch)
{
    lt_reduction_plan plan = lt__plan_all(x->count, lt__cuda_dtype_bytes(x->dtype));
    lt_reduction_end end = {sum, LT_F64, false, false, 1};
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
    LT_CUDA_ANY_FLOAT(
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

#define LARS_NUMBERS(N) LT_LARS_NUMBERS(N) N(const double *, ratio, (double *)c->scratch + RATIO)
LT_CUDA_UPDATE(lars, 3, 1 << W | 1 << SLOT, true, LARS_NUMBERS,
               LT_LARS_STEP(x[W], x[G], x[SLOT], (T)*ratio))

static lt_status lars(lt_call *c)
{
    lt_cuda *cuda = lt__cuda(c->ctx);
    double *number = (double *)c->scratch;
    void *rest = (char *)c->scratch + NUMBERS;
    LT_TRY(sum_squares(cuda, c->in[W], number + NORM_W, rest));
    LT_TRY(sum_squares(cuda, c->in[G], number + NORM_G, rest));
    LT_TRY(lt__launch(cuda, 1, find_ratio, number, lt__flag(c, ADAPT), lt__number(c, TRUST),
                      lt__number(c, LARS_WEIGHT_DECAY), lt__number(c, LARS_EPS),
                      lt__number(c, LARS_SCALE), c->factor));
    return lt__update(c, lars_update::of(c));
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
