/* nvidia.c - opens NVIDIA's libraries and owns their handles. */
#include "ops/cuda/nvidia.h"

#include <stdlib.h>

#ifdef LT_WITH_CUDNN
#include "ops/cuda/cublas.h"
#include "ops/cuda/cudnn.h"
#endif

typedef struct library {
    const char *name, *work; /* what the library computes, for the warning */
    bool there, warned;
    char why[512]; /* why it is not there */
} library;

struct lt_nvidia {
    const lt_cuda_env *env;
    library cudnn, cublas, nccl;
    lt_nccl_table nccl_table;
    int nccl_version;
#ifdef LT_WITH_CUDNN
    lt_cudnn_table cudnn_table;
    lt_cublaslt_table cublas_table;
    lt_cudnn *of_cudnn; /* NULL until the first use */
    lt_cublas *of_cublas;
    char *plans;
#endif
};

static void warn(lt_nvidia *n, library *l, lt_ctx *ctx)
{
    if (!l->warned)
        n->env->host->log(ctx, LT_LOG_WARN, "%s computes %s without %s, which is slow: %s",
                          n->env->device->name, l->work, l->name, l->why);
    l->warned = true;
}

#ifdef LT_WITH_CUDNN
static lt_cudnn *cudnn_of(lt_nvidia *n, lt_ctx *ctx)
{
    const lt_cudnn_config config = {
        .deterministic = n->env->deterministic, .tf32 = n->env->tf32, .plans = n->plans};
    library *l = &n->cudnn;
    if (!n->of_cudnn && l->there)
        n->of_cudnn = lt__cudnn_new(&n->cudnn_table, n->env, &config, l->why, sizeof l->why);
    l->there = n->of_cudnn != NULL;
    if (!l->there)
        warn(n, l, ctx);
    return n->of_cudnn;
}

static lt_cublas *cublas_of(lt_nvidia *n, lt_ctx *ctx)
{
    const lt_cublas_config config = {.tf32 = n->env->tf32};
    library *l = &n->cublas;
    if (!n->of_cublas && l->there)
        n->of_cublas = lt__cublas_new(&n->cublas_table, n->env, &config, l->why, sizeof l->why);
    l->there = n->of_cublas != NULL;
    if (!l->there)
        warn(n, l, ctx);
    return n->of_cublas;
}

static bool find_libraries(lt_nvidia *n)
{
    const char *plans = getenv("LUATRAIN_PLANS");
    library *dnn = &n->cudnn, *blas = &n->cublas;
    blas->there = lt__cublaslt_open(&n->cublas_table, blas->why, sizeof blas->why) == 0;
    dnn->there = lt__cudnn_open_library(&n->cudnn_table, dnn->why, sizeof dnn->why) == 0;
    n->plans = plans && *plans ? strdup(plans) : NULL;
    return n->plans || !plans || !*plans;
}

static void close_libraries(lt_nvidia *n)
{
    lt__cudnn_free(n->of_cudnn);
    lt__cublas_free(n->of_cublas);
    free(n->plans);
}

#define WITH_CUDNN(call, otherwise)                                                                \
    lt_cudnn *d = cudnn_of(n, c->ctx);                                                             \
    return d ? (call) : (otherwise)
#define WITH_CUBLAS(call, otherwise)                                                               \
    lt_cublas *d = cublas_of(n, c->ctx);                                                           \
    return d ? (call) : (otherwise)
#else
static bool find_libraries(lt_nvidia *n)
{
    snprintf(n->cudnn.why, sizeof n->cudnn.why, "its headers were missing when luatrain was built");
    memcpy(n->cublas.why, n->cudnn.why, sizeof n->cublas.why);
    return true;
}

static void close_libraries(lt_nvidia *n) { (void)n; }

#define WITH_CUDNN(call, otherwise)                                                                \
    warn(n, &n->cudnn, c->ctx);                                                                    \
    return otherwise
#define WITH_CUBLAS(call, otherwise)                                                               \
    warn(n, &n->cublas, c->ctx);                                                                   \
    return otherwise
#endif

/* ==== Creation and release ==================================================================== */

lt_nvidia *lt__nvidia_new(const lt_cuda_env *env)
{
    lt_nvidia *n = calloc(1, sizeof *n);
    if (!n)
        return NULL;
    n->env = env;
    n->cudnn = (library){.name = "cuDNN", .work = "convolutions"};
    n->cublas = (library){.name = "cuBLASLt", .work = "matrix products"};
    n->nccl.there = lt__nccl_open_library(&n->nccl_table, &n->nccl_version, n->nccl.why,
                                          sizeof n->nccl.why) == 0;
    if (find_libraries(n))
        return n;
    lt__nvidia_free(n);
    return NULL;
}

void lt__nvidia_free(lt_nvidia *n)
{
    if (n)
        close_libraries(n);
    free(n);
}

const char *lt__nvidia_version(const lt_nvidia *n, char text[48])
{
    int at = snprintf(text, 48, "without cuDNN"), v = n->nccl_version;
#ifdef LT_WITH_CUDNN
    size_t d = n->cudnn.there ? n->cudnn_table.cudnnGetVersion() : 0;
    if (d > 0)
        at = snprintf(text, 48, "cuDNN %zu.%zu.%zu", d / 10000, d / 100 % 100, d % 100);
#endif
    if (v > 0)
        snprintf(text + at, 48 - (size_t)at, ", NCCL %d.%d.%d", v / 10000, v / 100 % 100, v % 100);
    return text;
}

const lt_nccl_table *lt__nvidia_nccl(const lt_nvidia *n, const char **why)
{
    *why = n->nccl.why;
    return n->nccl.there ? &n->nccl_table : NULL;
}

/* ==== Calls =================================================================================== */

size_t lt__nvidia_conv2d_scratch(lt_nvidia *n, const lt_call *c, bool backward)
{
    (void)backward;
    WITH_CUDNN(lt__cudnn_conv2d_scratch(d, c, backward), 0);
}

lt_status lt__nvidia_conv2d_fwd(lt_nvidia *n, lt_call *c)
{
    WITH_CUDNN(lt__cudnn_conv2d_fwd(d, c), LT_EUNSUPPORTED);
}

lt_status lt__nvidia_conv2d_grad(lt_nvidia *n, lt_call *c, int i)
{
    (void)i;
    WITH_CUDNN(lt__cudnn_conv2d_grad(d, c, i), LT_EUNSUPPORTED);
}

bool lt__nvidia_conv2d_computes(lt_nvidia *n, const lt_call *c, int i)
{
    (void)i;
    WITH_CUDNN(lt__cudnn_conv2d_computes(d, c, i), false);
}

size_t lt__nvidia_linear_scratch(lt_nvidia *n, const lt_call *c, bool backward)
{
    (void)backward;
    WITH_CUBLAS(lt__cublas_linear_scratch(d, c, backward), 0);
}

lt_status lt__nvidia_linear_fwd(lt_nvidia *n, lt_call *c)
{
    WITH_CUBLAS(lt__cublas_linear_fwd(d, c), LT_EUNSUPPORTED);
}

lt_status lt__nvidia_linear_bwd(lt_nvidia *n, lt_call *c)
{
    WITH_CUBLAS(lt__cublas_linear_bwd(d, c), LT_EUNSUPPORTED);
}

size_t lt__nvidia_matmul_scratch(lt_nvidia *n, const lt_call *c, bool backward)
{
    (void)backward;
    WITH_CUBLAS(lt__cublas_matmul_scratch(d, c, backward), 0);
}

lt_status lt__nvidia_matmul_fwd(lt_nvidia *n, lt_call *c)
{
    WITH_CUBLAS(lt__cublas_matmul_fwd(d, c), LT_EUNSUPPORTED);
}

lt_status lt__nvidia_matmul_bwd(lt_nvidia *n, lt_call *c)
{
    WITH_CUBLAS(lt__cublas_matmul_bwd(d, c), LT_EUNSUPPORTED);
}
