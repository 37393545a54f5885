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
    char version[24]; /* "" if no library was found */
    char found[1536]; /* the file in use, or the reason why there is no library */
} library;

struct lt_nvidia {
    const lt_cuda_env *env;
    library cudnn, cublas, nccl;
    lt_nccl_table nccl_table;
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
                          n->env->device->name, l->work, l->name, l->found);
    l->warned = true;
}

#ifdef LT_WITH_CUDNN
static lt_cudnn *cudnn_of(lt_nvidia *n, lt_ctx *ctx)
{
    const lt_cudnn_config config = {
        .deterministic = n->env->deterministic, .tf32 = n->env->tf32, .plans = n->plans};
    library *l = &n->cudnn;
    if (!n->of_cudnn && l->there)
        n->of_cudnn = lt__cudnn_new(&n->cudnn_table, n->env, &config, l->found, sizeof l->found);
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
        n->of_cublas = lt__cublas_new(&n->cublas_table, n->env, &config, l->found, sizeof l->found);
    l->there = n->of_cublas != NULL;
    if (!l->there)
        warn(n, l, ctx);
    return n->of_cublas;
}

static bool find_libraries(lt_nvidia *n)
{
    const char *plans = getenv("LUATRAIN_PLANS");
    library *dnn = &n->cudnn, *blas = &n->cublas;
    blas->there = lt__cublaslt_open(&n->cublas_table, blas->found, sizeof blas->found) == 0;
    dnn->there = lt__cudnn_open_library(&n->cudnn_table, dnn->found, sizeof dnn->found) == 0;
    if (blas->there)
        lt__version_text(n->cublas_table.cublasLtGetVersion(), blas->version);
    if (dnn->there)
        lt__version_text(n->cudnn_table.cudnnGetVersion(), dnn->version);
    n->plans = plans && *plans ? strdup(plans) : NULL;
    return n->plans || !plans || !*plans;
}

static void close_libraries(lt_nvidia *n)
{
    lt__cudnn_free(n->of_cudnn);
    lt__cublas_free(n->of_cublas);
    free(n->plans);
}

/* Defines lt__nvidia_NAME(), which forwards a call of an op to the library, or returns `otherwise`
 * without it. */
#define CALL(type, name, library, otherwise, parameters, ...)                                      \
    type lt__nvidia_##name parameters                                                              \
    {                                                                                              \
        lt_##library *d = library##_of(n, c->ctx);                                                 \
        return d ? lt__##library##_##name(d, __VA_ARGS__) : otherwise;                             \
    }
#else
static bool find_libraries(lt_nvidia *n)
{
    static const char why[] = "its headers were missing when luatrain was built";
    memcpy(n->cudnn.found, why, sizeof why);
    memcpy(n->cublas.found, why, sizeof why);
    return true;
}

static void close_libraries(lt_nvidia *n) { (void)n; }

static void ignore(const void *first, ...) { (void)first; }

#define CALL(type, name, library, otherwise, parameters, ...)                                      \
    type lt__nvidia_##name parameters                                                              \
    {                                                                                              \
        ignore(__VA_ARGS__);                                                                       \
        warn(n, &n->library, c->ctx);                                                              \
        return otherwise;                                                                          \
    }
#endif

/* ==== Creation and release ==================================================================== */

lt_nvidia *lt__nvidia_new(const lt_cuda_env *env)
{
    int version;
    lt_nvidia *n = calloc(1, sizeof *n);
    if (!n)
        return NULL;
    n->env = env;
    n->cudnn = (library){.name = "cuDNN", .work = "convolutions"};
    n->cublas = (library){.name = "cuBLASLt", .work = "matrix products"};
    n->nccl = (library){.name = "NCCL"};
    n->nccl.there =
        lt__nccl_open_library(&n->nccl_table, &version, n->nccl.found, sizeof n->nccl.found) == 0;
    if (n->nccl.there)
        lt__nccl_version_text(version, n->nccl.version);
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

const char *lt__nvidia_version(const lt_nvidia *n, char text[72])
{
    const library *dnn = &n->cudnn, *nccl = &n->nccl;
    snprintf(text, 72, "%s%s%s%s", dnn->version[0] ? "cuDNN " : "without cuDNN", dnn->version,
             nccl->version[0] ? ", NCCL " : "", nccl->version);
    return text;
}

void lt__nvidia_report(const lt_nvidia *n, char *text, size_t bytes)
{
    const library *const all[] = {&n->cudnn, &n->cublas, &n->nccl};
    size_t at = 0;
    for (int i = 0; i < 3 && at < bytes; i++)
        at += (size_t)snprintf(text + at, bytes - at, "%s %s: %s\n", all[i]->name,
                               all[i]->there ? all[i]->version : "is not used", all[i]->found);
}

const lt_nccl_table *lt__nvidia_nccl(const lt_nvidia *n, const char **text)
{
    *text = n->nccl.there ? n->nccl.version : n->nccl.found;
    return n->nccl.there ? &n->nccl_table : NULL;
}

/* ==== Calls =================================================================================== */

CALL(size_t, conv2d_scratch, cudnn, 0, (lt_nvidia * n, const lt_call *c, bool backward), c,
     backward)
CALL(lt_status, conv2d_fwd, cudnn, LT_EUNSUPPORTED, (lt_nvidia * n, lt_call *c), c)
CALL(lt_status, conv2d_grad, cudnn, LT_EUNSUPPORTED, (lt_nvidia * n, lt_call *c, int i), c, i)
CALL(bool, conv2d_computes, cudnn, false, (lt_nvidia * n, const lt_call *c, int i), c, i)
CALL(size_t, linear_scratch, cublas, 0, (lt_nvidia * n, const lt_call *c, bool backward), c,
     backward)
CALL(lt_status, linear_fwd, cublas, LT_EUNSUPPORTED, (lt_nvidia * n, lt_call *c), c)
CALL(lt_status, linear_grad, cublas, LT_EUNSUPPORTED,
     (lt_nvidia * n, lt_call *c, int i, bool *summed), c, i, summed)
CALL(size_t, matmul_scratch, cublas, 0, (lt_nvidia * n, const lt_call *c, bool backward), c,
     backward)
CALL(lt_status, matmul_fwd, cublas, LT_EUNSUPPORTED, (lt_nvidia * n, lt_call *c), c)
CALL(lt_status, matmul_grad, cublas, LT_EUNSUPPORTED, (lt_nvidia * n, lt_call *c, int i), c, i)
