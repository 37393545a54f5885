/* test_cublas.c - compares linear and matmul by cuBLASLt with the reference kernels in f64, over
 * random shapes. The library is a stand-in that computes on the CPU, so this tests the products
 * that the backend describes, not cuBLASLt.
 */
#include "tests/lt_test.h"

#ifdef LT_WITH_CUDNN
#include "ops/cuda/cublas.h"
#include "tests/cuda/cuda_test.h"

enum { X, Y, W = 1, B };
enum { CASES = 120 };

/* ==== A context with cuBLASLt ================================================================= */

static stand_in *library;
static lt_cuda_env env;
static lt_ctx *ctx;
static lt_cublas *blas;
static int with_dw;      /* number of gradients of b that the product for w computed */
static char notes[2048]; /* what was logged as a warning */

static void note(void *ud, lt_log_level level, const char *line)
{
    (void)ud;
    if (level == LT_LOG_WARN && strlen(notes) + strlen(line) < sizeof notes)
        strcat(notes, line);
}

static void begin(const lt_cublas_config *config)
{
    char text[512];
    lt_cublaslt_table table;
    library = open_stand_in(LT_CUBLASLT_SONAME);
    library->engines[0][0].workspace = 100;
    ctx = lt_open(&(lt_config){.reference = true, .poison = true, .threads = 1});
    lt_set_log(ctx, note, NULL);
    notes[0] = 0;
    env = (lt_cuda_env){.host = &test_host, .device = ctx->devices[0], .stream = test_stream};
    with_dw = 0;
    if (lt__cublaslt_open(&table, text, sizeof text) != 0 ||
        !(blas = lt__cublas_new(&table, &env, config, text, sizeof text)))
        FAIL("%s", text);
}

static void end(void)
{
    lt__cublas_free(blas);
    lt_ctx_free(ctx);
    CHECK_EQ(library->live, 0);
}

#define TEST_CUBLAS(title) TEST_BETWEEN(title, begin(&(lt_cublas_config){.tf32 = true}), end())

/* ==== A case ================================================================================== */

/* Makes the output and random gradients for most inputs: that of w in grad_dtype, usually that of b
 * too. */
static void complete(problem *p, lt_dtype dtype, lt_dtype grad_dtype, uint64_t *seed)
{
    make_output(p, seed);
    for (int i = 0; i < p->n_in; i++)
        if (p->in[i] && draw(seed, 8))
            p->d_in[i] = random_tensor(ctx,
                                       i == X                         ? dtype
                                       : i == B && draw(seed, 8) == 0 ? LT_F32
                                                                      : grad_dtype,
                                       p->in[i]->ndim, p->in[i]->dims, seed);
    p->add = (uint64_t)draw(seed, 8);
}

static bool is_linear(const problem *p) { return p->n_in == INPUTS; }

/* Computes the gradients of x and w, and maybe the gradient of b. */
static lt_status linear_bwd(lt_call *c)
{
    bool summed = false;
    for (int i = X; i <= W; i++)
        if (c->d_in[i])
            LT_TRY(lt__cublas_linear_grad(blas, c, i, &summed));
    with_dw += summed;
    return LT_OK;
}

static lt_status matmul_bwd(lt_call *c)
{
    for (int i = X; i <= Y; i++)
        if (c->d_in[i])
            LT_TRY(lt__cublas_matmul_grad(blas, c, i));
    return LT_OK;
}

static lt_status forward(problem *p)
{
    const bool linear = is_linear(p);
    lt_call c = call_of(p);
    give_scratch(&c,
                 (linear ? lt__cublas_linear_scratch : lt__cublas_matmul_scratch)(blas, &c, false));
    lt_status status = (linear ? lt__cublas_linear_fwd : lt__cublas_matmul_fwd)(blas, &c);
    free(c.scratch);
    return status;
}

static lt_status backward(problem *p)
{
    const bool linear = is_linear(p);
    lt_call c = call_of(p);
    give_scratch(&c,
                 (linear ? lt__cublas_linear_scratch : lt__cublas_matmul_scratch)(blas, &c, true));
    lt_status status = (linear ? linear_bwd : matmul_bwd)(&c);
    free(c.scratch);
    return status;
}

/* Returns the gradients that the library has computed, bit i for input i. */
static uint32_t run(problem *p)
{
    const int before = with_dw;
    CHECK_OK(forward(p));
    CHECK_OK(backward(p));
    return 1 << X | 1 << W | (with_dw > before) << B;
}

/* In f32, up to 16 products are added one after the other. */
static void check(problem *p) { check_problem(p, run, is_linear(p) ? 1 : 17); }

/* ==== linear ================================================================================== */

static problem draw_linear(lt_dtype dtype, lt_dtype grad_dtype, uint64_t *seed)
{
    problem p = {.ctx = ctx, .def = lt_op_find(ctx, "linear"), .n_in = INPUTS};
    int64_t x[4] = {1 + draw(seed, 5), 1 + draw(seed, 3), 1 + draw(seed, 3), 1 + draw(seed, 20)};
    int64_t w[2] = {1 + draw(seed, 20), x[3]};
    int first = (int)draw(seed, 4); /* leading axes that are omitted */
    p.in[X] = random_tensor(ctx, dtype, 4 - first, x + first, seed);
    p.in[W] = random_tensor(ctx, dtype, 2, w, seed);
    if (draw(seed, 3))
        p.in[B] = random_tensor(ctx, dtype, 1, w, seed);
    complete(&p, dtype, grad_dtype, seed);
    return p;
}

static void walk_linear(lt_dtype dtype, lt_dtype grad_dtype)
{
    uint64_t seed = 41 + dtype;
    begin(&(lt_cublas_config){.tf32 = true});
    for (int i = 0; i < CASES; i++) {
        problem p = draw_linear(dtype, grad_dtype, &seed);
        check(&p);
        free_problem(&p);
    }
    /* db is computed with dw unless it is added to, which is so in half of the cases */
    CHECK(grad_dtype != dtype ? with_dw == 0 : with_dw > CASES / 10);
    end();
}

TEST(linear_f32) { walk_linear(LT_F32, LT_F32); }
TEST(linear_f16) { walk_linear(LT_F16, LT_F16); }
TEST(linear_bf16) { walk_linear(LT_BF16, LT_BF16); }
TEST(linear_f16_with_f32_gradients) { walk_linear(LT_F16, LT_F32); }
TEST(linear_bf16_with_f32_gradients) { walk_linear(LT_BF16, LT_F32); }

/* If the library cannot compute db in the epilogue of dw, dw is computed without. */
TEST_CUBLAS(linear_without_the_bias_gradient_epilogue)
{
    uint64_t seed = 51;
    library->unsupported = CUBLASLT_EPILOGUE_BGRADB;
    for (int i = 0; i < CASES / 4; i++) {
        problem p = draw_linear(LT_F16, LT_F16, &seed);
        check(&p);
        free_problem(&p);
    }
    CHECK_EQ(with_dw, 0);
}

/* A bias and its gradient may be rows of a longer tensor, and so have less than the alignment that
 * cuBLASLt requires. */
TEST_CUBLAS(a_misaligned_bias)
{
    static const int64_t dims[] = {3, 4}, w_dims[] = {5, 4}, longer[] = {6};
    uint64_t seed = 55;
    problem p = {.ctx = ctx, .def = lt_op_find(ctx, "linear"), .n_in = INPUTS};
    p.in[X] = random_tensor(ctx, LT_F32, 2, dims, &seed);
    p.in[W] = random_tensor(ctx, LT_F32, 2, w_dims, &seed);
    lt_tensor *b = random_tensor(ctx, LT_F32, 1, longer, &seed);
    lt_tensor *db = random_tensor(ctx, LT_F32, 1, longer, &seed);
    p.in[B] = lt_rows(b, 1, 5);
    complete(&p, LT_F32, LT_F32, &seed);
    for (int i = X; i <= B; i++) {
        lt_release(p.d_in[i]);
        p.d_in[i] = NULL;
    }
    p.d_in[W] = random_tensor(ctx, LT_F32, 2, w_dims, &seed);
    p.d_in[B] = lt_rows(db, 1, 5);
    p.add = 0;
    CHECK_EQ(forward(&p), LT_EUNSUPPORTED);
    CHECK_EQ(library->run, 0);
    CHECK_OK(backward(&p));
    CHECK_EQ(library->run, 1);
    CHECK_EQ(with_dw, 0);
    free_problem(&p);
    lt_release(b);
    lt_release(db);
}

/* ==== matmul ================================================================================== */

/* A random matmul. Leading axes are equal, missing on one side, or broadcast on either. */
static problem draw_matmul(lt_dtype dtype, uint64_t *seed)
{
    problem p = {.ctx = ctx, .def = lt_op_find(ctx, "matmul"), .n_in = 2};
    int64_t dims[2][4], k = 1 + draw(seed, 9), kind = draw(seed, 5);
    for (int i = 0; i < 2; i++) {
        int64_t lead = 1 + draw(seed, 4);
        dims[X][i] = kind == 1 || (kind == 4 && draw(seed, 2)) ? 1 : lead;
        dims[Y][i] = kind == 2 || (kind == 4 && draw(seed, 2)) ? 1 : lead;
    }
    dims[X][2] = 1 + draw(seed, 9);
    dims[X][3] = dims[Y][2] = k;
    dims[Y][3] = 1 + draw(seed, 9);
    for (int i = X; i <= Y; i++) {
        int first = kind == 0 ? 2 : (int)draw(seed, 3);
        if (kind == 3) /* equal on both sides */
            first = 0;
        p.in[i] = random_tensor(ctx, dtype, 4 - first, dims[i] + first, seed);
    }
    complete(&p, dtype, dtype, seed);
    return p;
}

static void walk_matmul(lt_dtype dtype)
{
    uint64_t seed = 61 + dtype;
    begin(&(lt_cublas_config){.tf32 = false});
    for (int i = 0; i < CASES; i++) {
        problem p = draw_matmul(dtype, &seed);
        check(&p);
        free_problem(&p);
    }
    end();
}

TEST(matmul_f32) { walk_matmul(LT_F32); }
TEST(matmul_f16) { walk_matmul(LT_F16); }
TEST(matmul_bf16) { walk_matmul(LT_BF16); }

/* Batched matrices, and a matrix that is broadcast on one side, need only one product. */
TEST_CUBLAS(a_batch_is_one_product)
{
    static const int64_t dims[][2][3] = {
        {{3, 4, 5}, {3, 5, 2}}, {{1, 4, 5}, {3, 5, 2}}, {{3, 4, 5}, {1, 5, 2}}};
    uint64_t seed = 71;
    for (int i = 0; i < 3; i++) {
        problem p = {.ctx = ctx, .def = lt_op_find(ctx, "matmul"), .n_in = 2};
        p.in[X] = random_tensor(ctx, LT_F16, 3, dims[i][X], &seed);
        p.in[Y] = random_tensor(ctx, LT_F16, 3, dims[i][Y], &seed);
        complete(&p, LT_F16, LT_F16, &seed);
        for (int k = X; k <= Y; k++)
            if (!p.d_in[k])
                p.d_in[k] = random_tensor(ctx, LT_F16, 3, dims[i][k], &seed);
        library->run = 0;
        CHECK_OK(forward(&p));
        CHECK_EQ(library->run, 1);
        if (i != 1) { /* the gradient of a broadcast x is a sum of products */
            CHECK_OK(backward(&p));
            CHECK_EQ(library->run, 3);
        }
        free_problem(&p);
    }
}

/* ==== Empty products, and products that the library does not run ============================== */

TEST_CUBLAS(without_elements_or_terms)
{
    static const int64_t dims[][2][3] = {{{0, 4, 5}, {0, 5, 2}}, {{3, 0, 5}, {3, 5, 2}},
                                         {{3, 4, 0}, {3, 0, 2}}, {{3, 4, 5}, {3, 5, 0}},
                                         {{1, 4, 5}, {0, 5, 2}}, {{0, 4, 5}, {1, 5, 2}}};
    static const lt_dtype dtypes[] = {LT_F32, LT_BF16};
    uint64_t seed = 81;
    for (size_t i = 0; i < 2 * sizeof dims / sizeof *dims; i++) {
        const lt_dtype dtype = dtypes[i % 2];
        problem p = {.ctx = ctx, .def = lt_op_find(ctx, "matmul"), .n_in = 2};
        p.in[X] = random_tensor(ctx, dtype, 3, dims[i / 2][X], &seed);
        p.in[Y] = random_tensor(ctx, dtype, 3, dims[i / 2][Y], &seed);
        complete(&p, dtype, dtype, &seed);
        check(&p);
        free_problem(&p);
    }
}

TEST_CUBLAS(unsupported_products)
{
    uint64_t seed = 91;
    const int64_t x[2] = {3, 0}, w[2] = {2, 0};
    problem p = draw_linear(LT_F32, LT_F32, &seed), exact = exact_problem(&p);
    CHECK_EQ(forward(&exact), LT_EUNSUPPORTED);
    CHECK_EQ(backward(&exact), LT_EUNSUPPORTED);
    CHECK_EQ(library->queries[0], 0);
    library->engines[0][0].fails = true;
    CHECK_EQ(forward(&p), LT_EUNSUPPORTED);
    CHECK_EQ(forward(&p), LT_EUNSUPPORTED);
    CHECK_EQ(library->queries[0], 1); /* the result is cached */
    CHECK_EQ(library->run, 0);
    free_problem(&p);
    free_problem(&exact);
    p = (problem){.ctx = ctx, .def = lt_op_find(ctx, "linear"), .n_in = INPUTS};
    p.in[X] = random_tensor(ctx, LT_F32, 2, x, &seed);
    p.in[W] = random_tensor(ctx, LT_F32, 2, w, &seed);
    p.in[B] = random_tensor(ctx, LT_F32, 1, w, &seed);
    complete(&p, LT_F32, LT_F32, &seed);
    CHECK_EQ(forward(&p), LT_EUNSUPPORTED);
    free_problem(&p);
}

/* ==== Refusals ================================================================================ */

/* All statuses but success and "out of memory". */
static const cublasStatus_t refusals[] = {
    CUBLAS_STATUS_NOT_INITIALIZED, CUBLAS_STATUS_INVALID_VALUE,    CUBLAS_STATUS_ARCH_MISMATCH,
    CUBLAS_STATUS_MAPPING_ERROR,   CUBLAS_STATUS_EXECUTION_FAILED, CUBLAS_STATUS_INTERNAL_ERROR,
    CUBLAS_STATUS_NOT_SUPPORTED,   CUBLAS_STATUS_LICENSE_ERROR};
enum { REFUSALS = sizeof refusals / sizeof *refusals };

TEST(products_without_an_algorithm)
{
    uint64_t seed = 94;
    for (int i = 0; i < REFUSALS; i++) {
        begin(&(lt_cublas_config){.tf32 = true});
        problem p = draw_linear(LT_F32, LT_F32, &seed);
        library->fail_query = (int)refusals[i];
        CHECK_EQ(forward(&p), LT_EUNSUPPORTED);
        CHECK_EQ(forward(&p), LT_EUNSUPPORTED); /* the result is cached */
        CHECK_EQ(library->queries[0], 1);
        CHECK_EQ(library->run, 0);
        bool usual = refusals[i] == CUBLAS_STATUS_INVALID_VALUE ||
                     refusals[i] == CUBLAS_STATUS_NOT_SUPPORTED;
        CHECK_EQ(notes[0] != 0, !usual);
        free_problem(&p);
        end();
    }
}

/* The next proposal runs that needs no more workspace than the first, and is used from then on. */
TEST(an_algorithm_that_is_refused)
{
    uint64_t seed = 95;
    for (int i = 0; i < REFUSALS; i++) {
        begin(&(lt_cublas_config){.tf32 = true});
        problem p = draw_linear(LT_F32, LT_F32, &seed);
        library->engines[0][1] = (stand_in_engine){.number = 2, .workspace = 101}; /* too large */
        library->engines[0][2] = (stand_in_engine){.number = 3, .workspace = 50};
        library->fail_run = (int)refusals[i];
        for (int k = 1; k <= 2; k++) {
            CHECK_OK(forward(&p));
            CHECK_EQ(library->run, k);
        }
        CHECK(strstr(notes, ": cuBLASLt 13.1.0 refuses a product of "));
        CHECK(strstr(notes, " in f32: status "));
        notes[0] = 0;
        library->fail_run = (int)refusals[i]; /* the last proposal */
        CHECK_EQ(forward(&p), LT_EUNSUPPORTED);
        CHECK_EQ(forward(&p), LT_EUNSUPPORTED);
        CHECK_EQ(library->run, 2);
        CHECK_STR(notes, ""); /* one warning is enough */
        free_problem(&p);
        end();
    }
}

/* After these, a part of the result may be written. */
static bool may_have_run(cublasStatus_t status)
{
    return status == CUBLAS_STATUS_MAPPING_ERROR || status == CUBLAS_STATUS_EXECUTION_FAILED ||
           status == CUBLAS_STATUS_INTERNAL_ERROR;
}

/* Our own kernel must not add to a result that cuBLASLt may have added to. */
TEST(a_refused_product_that_is_added)
{
    uint64_t seed = 96;
    for (int i = 0; i < REFUSALS; i++) {
        begin(&(lt_cublas_config){.tf32 = true});
        problem p = draw_matmul(LT_F32, &seed);
        while (!p.d_in[X]) {
            free_problem(&p);
            p = draw_matmul(LT_F32, &seed);
        }
        lt_release(p.d_in[Y]);
        p.d_in[Y] = NULL;
        p.add = 1;
        library->fail_run = (int)refusals[i];
        if (may_have_run(refusals[i]))
            CHECK_FAILS(backward(&p), LT_EENV, "cuBLASLt 13.1.0 failed: status ");
        else
            CHECK_EQ(backward(&p), LT_EUNSUPPORTED);
        free_problem(&p);
        end();
    }
}

/* The gradient of a broadcast x is a sum of three products, the second of which is refused. Our own
 * kernel must not add the first one again. */
TEST(a_product_that_is_refused_after_others_were_added)
{
    static const int64_t dims[2][3] = {{1, 2, 4}, {3, 4, 5}};
    uint64_t seed = 98;
    for (int add = 0; add < 2; add++) {
        begin(&(lt_cublas_config){.tf32 = true});
        problem p = {.ctx = ctx, .def = lt_op_find(ctx, "matmul"), .n_in = 2};
        for (int i = X; i <= Y; i++)
            p.in[i] = random_tensor(ctx, LT_F32, 3, dims[i], &seed);
        complete(&p, LT_F32, LT_F32, &seed);
        for (int i = X; i <= Y; i++)
            lt_release(p.d_in[i]);
        p.d_in[X] = random_tensor(ctx, LT_F32, 3, dims[X], &seed);
        p.d_in[Y] = NULL;
        p.add = (uint64_t)add;
        library->runs_only = true;
        library->refuse_at = 2;
        library->refusals = 1;
        library->refuse_with = CUBLAS_STATUS_NOT_SUPPORTED;
        library->calls = 0;
        if (add)
            CHECK_FAILS(backward(&p), LT_EENV,
                        "cuBLASLt refuses product 2 of 3 after others were added");
        else
            CHECK_EQ(backward(&p), LT_EUNSUPPORTED);
        CHECK_EQ(library->run, 1);
        free_problem(&p);
        end();
    }
}

/* db is not computed then, and dw is computed without its epilogue from then on. */
TEST_CUBLAS(an_epilogue_that_is_refused)
{
    uint64_t seed = 97;
    problem p = draw_linear(LT_F16, LT_F16, &seed);
    while (!p.d_in[W] || !p.d_in[B] || p.d_in[B]->dtype != LT_F16) {
        free_problem(&p);
        p = draw_linear(LT_F16, LT_F16, &seed);
    }
    lt_release(p.d_in[X]);
    p.d_in[X] = NULL;
    p.add = 0;
    library->fail_run = CUBLAS_STATUS_NOT_SUPPORTED;
    CHECK_EQ(backward(&p), LT_EUNSUPPORTED);
    CHECK_OK(backward(&p));
    CHECK_EQ(library->run, 1);
    CHECK_EQ(with_dw, 0);
    free_problem(&p);
}

/* Memory for a plan or a product does not come back by itself, so this is an error. */
TEST_CUBLAS(no_memory_for_a_product)
{
    uint64_t seed = 92;
    static const char text[] = "out of memory in cuBLASLt; try a smaller batch";
    problem p = draw_linear(LT_F32, LT_F32, &seed);
    lt_call c = call_of(&p);
    library->fail_query = CUBLAS_STATUS_ALLOC_FAILED;
    CHECK_EQ(lt__cublas_linear_scratch(blas, &c, false), LT_SCRATCH_FAILED);
    CHECK_MSG(text);
    library->fail_run = CUBLAS_STATUS_ALLOC_FAILED;
    CHECK_FAILS(forward(&p), LT_ENOMEM, text);
    CHECK_OK(forward(&p));
    free_problem(&p);
}

TEST(the_workspace_limit)
{
    uint64_t seed = 93;
    begin(&(lt_cublas_config){.tf32 = true, .workspace = 99});
    problem p = draw_linear(LT_F32, LT_F32, &seed);
    CHECK_EQ(forward(&p), LT_EUNSUPPORTED);
    free_problem(&p);
    end();
}
#else
TEST(cublas) { SKIP("cuBLASLt's headers are not installed"); }
#endif
