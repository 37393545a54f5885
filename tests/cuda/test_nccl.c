/* test_nccl.c - gradient sums between CUDA devices by NCCL. The devices are emulated, NCCL is a
 * stand-in, and ranks are threads. test_ranks.c tests dist with it. */
#include <pthread.h>
#include <stdatomic.h>

#include "ops/cuda/nccl.h"
#include "tests/cuda/reference.h"
#if __has_include(<nccl.h>)
#include <nccl.h>
#define HAVE_NCCL_H
#endif

#ifdef LT_WITH_CUDNN
enum { MAX_RANKS = 4, COUNT = 1237, GUARDED = COUNT + 2, TAIL = 77 };

/* ==== The header ============================================================================== */

TEST(declarations_match_nccl_h)
{
#ifdef HAVE_NCCL_H
    CHECK_EQ(sizeof(ncclUniqueId), sizeof(lt_nccl_id));
    CHECK_EQ(LT_NCCL_SUCCESS, ncclSuccess);
    CHECK_EQ(LT_NCCL_IN_PROGRESS, ncclInProgress);
    CHECK_EQ(LT_NCCL_F16, ncclFloat16);
    CHECK_EQ(LT_NCCL_F32, ncclFloat32);
    CHECK_EQ(LT_NCCL_F64, ncclFloat64);
    CHECK_EQ(LT_NCCL_BF16, ncclBfloat16);
    CHECK_EQ(LT_NCCL_SUM, ncclSum);
    CHECK_EQ(sizeof(ncclRedOp_t), sizeof(int));
    const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
    CHECK_EQ(theirs.magic, (unsigned)LT_NCCL_MAGIC);
    CHECK_EQ(theirs.blocking, INT_MIN);
#define SAME_PLACE(ours, name)                                                                     \
    CHECK_EQ(offsetof(lt_nccl_config, ours), offsetof(ncclConfig_t, name))
    SAME_PLACE(size, size);
    SAME_PLACE(magic, magic);
    SAME_PLACE(version, version);
    SAME_PLACE(blocking, blocking);
    SAME_PLACE(cga_cluster_size, cgaClusterSize);
    SAME_PLACE(min_ctas, minCTAs);
    SAME_PLACE(max_ctas, maxCTAs);
    SAME_PLACE(net_name, netName);
    SAME_PLACE(split_share, splitShare);
    /* Our declarations have pointers and ints for NCCL's handles and enums. */
#define SAME_CALL(name, ...)                                                                       \
    CHECK((__builtin_types_compatible_p(__typeof__(name), ncclResult_t(__VA_ARGS__))))
    SAME_CALL(ncclGetVersion, int *);
    SAME_CALL(ncclGetUniqueId, ncclUniqueId *);
    SAME_CALL(ncclCommInitRankConfig, ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *);
    SAME_CALL(ncclCommGetAsyncError, ncclComm_t, ncclResult_t *);
    SAME_CALL(ncclCommFinalize, ncclComm_t);
    SAME_CALL(ncclCommDestroy, ncclComm_t);
    SAME_CALL(ncclCommAbort, ncclComm_t);
    SAME_CALL(ncclGroupStart, void);
    SAME_CALL(ncclGroupEnd, void);
    SAME_CALL(ncclAllReduce, const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
              cudaStream_t);
#else
    SKIP("nccl.h is not installed");
#endif
}

/* ==== The library ============================================================================= */

/* An older one is skipped. If the real NCCL is installed, it is found after that. */
TEST(versions)
{
    static const struct {
        int version;
        const char *text;
    } old[] = {{21703, "/libs/libnccl.so.2 is version 2.17.3"},
               {2804, "/libs/libnccl.so.2 is version 2.8.4"}};
    char text[1024], path[PATH_MAX];
    lt_nccl_table table;
    int version = 0;
    stand_in_nccl *library = open_nccl();
    for (int i = 0; i < 2; i++) {
        library->version = old[i].version;
        (void)lt__nccl_open_library(&table, &version, text, sizeof text);
        if (!strstr(text, old[i].text))
            FAIL("%s", text);
        CHECK(version == 0 || version >= LT_NCCL_OLDEST);
    }
    library->version = LT_NCCL_OLDEST;
    CHECK_EQ(lt__nccl_open_library(&table, &version, text, sizeof text), 0);
    CHECK_EQ(version, LT_NCCL_OLDEST);
    CHECK_STR(text, beside("libs/libnccl.so.2", path));
}

TEST(a_library_that_is_not_nccl)
{
    char text[1024], folder[] = "/tmp/lt-nccl-XXXXXX", file[64], from[PATH_MAX], want[160];
    lt_nccl_table table;
    int version;
    CHECK(mkdtemp(folder));
    snprintf(file, sizeof file, "%s/libnccl.so.2", folder);
    CHECK_EQ(symlink(beside("libs/libcudnn.so.9", from), file), 0);
    setenv("LUATRAIN_CUDA_LIBS", folder, 1);
    (void)lt__nccl_open_library(&table, &version, text, sizeof text);
    snprintf(want, sizeof want, "%s has no ncclGetVersion", file);
    if (!strstr(text, want))
        FAIL("%s", text);
    remove(file);
    rmdir(folder);
}

TEST(the_accelerator_name_includes_the_nccl_version)
{
    char name[LT_COMM_NAME_BYTES], library[LT_COMM_NAME_BYTES];
    open_nccl();
    machine m = machine_with(true);
    CHECK(strstr(m.cuda.name, "cuDNN "));
    CHECK(strstr(m.cuda.name, ", NCCL 2.28.9, CUDA 13.0)"));
    must(m.cuda.device->comm_calls->identify(m.cuda.device, name, library));
    CHECK_STR(library, "NCCL 2.28.9");
    lt_ctx_free(m.ctx);
    setenv("SHIM_HIDES", "NCCL", 1);
    lt_accelerator cuda = open_accelerator(&(lt_accelerator_config){.index = 0});
    setenv("SHIM_HIDES", "", 1);
    CHECK(!strstr(cuda.name, "NCCL"));
    CHECK_EQ(cuda.device->comm_calls->identify(cuda.device, name, library), LT_EENV);
    CHECK_STR(lt_errmsg(), "a test hides NCCL");
    CHECK_STR(name, "GPU-00000000000000000000000000000000");
    cuda.device->close(cuda.device);
}

/* ==== Ranks =================================================================================== */

typedef struct job {
    int ranks;
    lt_dtype dtype, wire;
    int exponent; /* of the wire scale */
    int shift;    /* elements before the bucket, to misalign it */
    char id[LT_COMM_ID_BYTES];
} job;

typedef struct rank {
    const job *job;
    int number;
    lt_accelerator cuda;
    pthread_t thread;
    void *there, *on_wire; /* on the device, until the communicator is closed; or NULL */
    lt_status status;
    char text[256];
} rank;

static rank ranks[MAX_RANKS];

static bool ends_early;
static atomic_bool a_rank_failed;

/* Polls until the operation completes; gives up after five seconds or, if ends_early is set, when a
 * rank has failed. */
static lt_status wait_for(lt_device_comm *p)
{
    bool done = false;
    double until = lt__seconds() + 5;
    while (lt__seconds() < until && !(ends_early && a_rank_failed)) {
        LT_TRY(p->calls->poll(p, &done));
        if (done)
            return LT_OK;
        usleep(50);
    }
    return LT_EPEER;
}

static double share_of(int r) { return (r + 1) * 0.25; }
static double value_of(int r, int64_t i) { return (double)((i * 31 + r * 7) % 97 - 48) / 16; }

/* value rounded to dtype, as on the device. */
static double rounded(double value, lt_dtype dtype)
{
    union {
        double d;
        float f;
        uint16_t h[4];
    } bits = {0};
    double out;
    if (dtype == LT_F64)
        return value;
    float narrow = (float)value;
    lt_convert(&bits, dtype, &narrow, LT_F32, 1);
    lt_convert(&out, LT_F64, &bits, dtype, 1);
    return out;
}

/* Each rank has zeros in a different range of the bucket. */
static bool is_zero(int r, int64_t i) { return i >= 100 * r && i < 100 * r + 50; }

static double expected_sum(const job *j, int64_t i)
{
    lt_dtype on_wire = j->dtype == LT_F32 ? j->wire : j->dtype;
    double part[MAX_RANKS];
    for (int r = 0; r < j->ranks; r++) {
        double own = is_zero(r, i) ? 0 : value_of(r, i) * ldexp(share_of(r), j->exponent);
        part[r] = rounded(own, on_wire);
    }
    for (int by = 1; by < j->ranks; by *= 2)
        for (int r = 0; r + by < j->ranks; r += 2 * by)
            part[r] = rounded(part[r] + part[r + by], on_wire);
    return ldexp(part[0], -j->exponent);
}

static void check_bucket(const rank *r, lt_dtype dtype, const void *here)
{
    for (int64_t i = 0; i < COUNT; i++) {
        double value, want = expected_sum(r->job, i);
        lt_convert(&value, LT_F64, (const char *)here + (size_t)(i + 1) * lt_dtype_bytes(dtype),
                   dtype, 1);
        if (value != want)
            FAIL("rank %d of %d, %s by %s: element %lld must be %a, but is %a", r->number,
                 r->job->ranks, lt_dtype_name(dtype), lt_dtype_name(r->job->wire), (long long)i,
                 want, value);
    }
}

/* Like value_of(), with an infinity, a NaN and a known largest value. */
static double special(int r, int64_t i)
{
    return i == 500 ? INFINITY : i == 501 + r ? NAN : i == 99 ? -1000 - r : value_of(r, i);
}

/* Prepares a bucket and checks its statistics and tail, then sums it over the ranks. only_prepare:
 * the bucket has special() values and is not summed. */
static lt_status prepare_and_sum(rank *r, lt_device_comm *p, void *there, void *on_wire,
                                 bool only_prepare)
{
    const job *j = r->job;
    lt_bucket_range zero = {100 * r->number, 50};
    lt_device *d = r->cuda.device;
    lt_device_sum s = {
        there, COUNT, j->dtype, j->wire, on_wire, ldexp(share_of(r->number), j->exponent), TAIL};
    LT_TRY(p->calls->prepare(p, there, COUNT, j->dtype, &zero, 1, true, d->mark(d)));
    LT_TRY(wait_for(p));
    CHECK_EQ(p->not_finite, only_prepare ? 2 : 0);
    if (only_prepare)
        CHECK_NEAR(p->largest, rounded(1000 + r->number, j->dtype), 0);
    for (int i = 0; i < TAIL; i++)
        p->tail[i] = (float)(i + r->number);
    if (only_prepare)
        return LT_OK;
    LT_TRY(p->calls->allreduce(p, &s));
    LT_TRY(wait_for(p));
    for (int i = 0; i < TAIL; i++)
        CHECK_NEAR(p->tail[i], j->ranks * i + j->ranks * (j->ranks - 1) / 2, 0);
    if (on_wire)
        LT_TRY(p->calls->unpack(p, &s, ldexp(1, -j->exponent)));
    return wait_for(p);
}

/* Fills a bucket, and the guard elements before and after it with 777. */
static void fill(const rank *r, lt_dtype dtype, char *here, double (*value)(int r, int64_t i))
{
    for (int64_t i = -1; i <= COUNT; i++) {
        double v = i < 0 || i == COUNT ? 777 : value(r->number, i);
        lt_convert(here + (size_t)(i + 1) * lt_dtype_bytes(dtype), dtype, &v, LT_F64, 1);
    }
}

static lt_status work(rank *r, lt_device_comm *p)
{
    const job *j = r->job;
    size_t each = lt_dtype_bytes(j->dtype), bytes = GUARDED * each;
    size_t shift = (size_t)j->shift * each;
    lt_device *d = r->cuda.device;
    static _Thread_local char here[GUARDED * 8];
    char *there = r->there = d->alloc(d, bytes + shift);
    void *on_wire = r->on_wire = j->wire == j->dtype ? NULL : d->alloc(d, COUNT * 2);
    char *bucket = there + shift + each;
    double edge;
    fill(r, j->dtype, here, special);
    must(d->copy(d, there + shift, here, bytes));
    lt_status status = prepare_and_sum(r, p, bucket, on_wire, true);
    fill(r, j->dtype, here, value_of);
    must(d->copy(d, there + shift, here, bytes));
    if (status == LT_OK)
        status = prepare_and_sum(r, p, bucket, on_wire, false);
    if (status == LT_OK) {
        must(d->copy(d, here, there + shift, bytes));
        must(d->sync(d));
        check_bucket(r, j->dtype, here);
        for (int i = 0; i < GUARDED; i += GUARDED - 1) {
            lt_convert(&edge, LT_F64, here + (size_t)i * each, j->dtype, 1);
            CHECK_NEAR(edge, rounded(777, j->dtype), 0);
        }
    }
    return status;
}

static void *run(void *ud)
{
    rank *r = ud;
    lt_device *d = r->cuda.device;
    lt_device_comm *p = NULL;
    r->status = d->comm_calls->open(d, r->job->id, r->number, r->job->ranks, &p);
    if (r->status == LT_OK)
        r->status = wait_for(p);
    if (r->status == LT_OK)
        r->status = work(r, p);
    if (r->status == LT_OK)
        r->status = p->calls->finalize(p);
    if (r->status == LT_OK)
        r->status = wait_for(p);
    snprintf(r->text, sizeof r->text, "%s", r->status == LT_OK ? "" : lt_errmsg());
    if (r->status != LT_OK)
        a_rank_failed = true;
    if (p)
        p->calls->close(p);
    if (r->there)
        d->free(d, r->there, (size_t)(GUARDED + r->job->shift) * lt_dtype_bytes(r->job->dtype));
    if (r->on_wire)
        d->free(d, r->on_wire, COUNT * 2);
    return NULL;
}

/* Runs a job whose rank i has device cuda:i. */
static void run_all(job *j)
{
    use_libraries(false);
    SHIM(shim_reset)();
    a_rank_failed = false;
    for (int i = 0; i < j->ranks; i++)
        ranks[i] = (rank){
            .job = j, .number = i, .cuda = open_accelerator(&(lt_accelerator_config){.index = i})};
    lt_device *first = ranks[0].cuda.device;
    must(first->comm_calls->make_id(first, j->id));
    for (int i = 0; i < j->ranks; i++)
        CHECK_EQ(pthread_create(&ranks[i].thread, NULL, run, &ranks[i]), 0);
    for (int i = 0; i < j->ranks; i++)
        pthread_join(ranks[i].thread, NULL);
    for (int i = 0; i < j->ranks; i++)
        ranks[i].cuda.device->close(ranks[i].cuda.device);
}

TEST(devices_have_distinct_names)
{
    char name[2][LT_COMM_NAME_BYTES], library[LT_COMM_NAME_BYTES];
    open_nccl();
    for (int i = 0; i < 2; i++) {
        lt_accelerator cuda = open_accelerator(&(lt_accelerator_config){.index = i});
        must(cuda.device->comm_calls->identify(cuda.device, name[i], library));
        cuda.device->close(cuda.device);
    }
    CHECK_STR(name[0], "GPU-00000000000000000000000000000000");
    CHECK_STR(name[1], "GPU-01000000000000000000000000000000");
}

static void check_sums(lt_dtype dtype, lt_dtype wire, int exponent)
{
    for (int n = 1; n <= MAX_RANKS; n *= 2)
        for (int shift = 0; shift < 2; shift++) {
            job j = {
                .ranks = n, .dtype = dtype, .wire = wire, .exponent = exponent, .shift = shift};
            stand_in_nccl *library = open_nccl();
            run_all(&j);
            for (int i = 0; i < n; i++)
                if (ranks[i].status != LT_OK)
                    FAIL("rank %d of %d: %s", i, n, ranks[i].text);
            CHECK_EQ(library->sums, n);
            CHECK_EQ(library->aborted, 0);
            CHECK_EQ(library->live, 0);
        }
}

TEST(sums_in_f32) { check_sums(LT_F32, LT_F32, 0); }
TEST(sums_in_f64) { check_sums(LT_F64, LT_F64, 0); }
TEST(sums_in_f16) { check_sums(LT_F16, LT_F16, 0); }
TEST(sums_in_bf16) { check_sums(LT_BF16, LT_BF16, 0); }
TEST(sums_of_f32_with_f16_wire)
{
    check_sums(LT_F32, LT_F16, 0);
    check_sums(LT_F32, LT_F16, 9);
}
TEST(sums_of_f32_with_bf16_wire) { check_sums(LT_F32, LT_BF16, 0); }

/* Between the parts of two ranks, a call that waits for all sums of the process would never return:
 * see shim_watch_sums(). */
TEST(a_sum_that_one_rank_has_begun)
{
    char id[LT_COMM_ID_BYTES];
    lt_accelerator cuda[2];
    lt_device_comm *p[2];
    void *data[2];
    stand_in_nccl *library = open_nccl();
    for (int i = 0; i < 2; i++)
        cuda[i] = open_accelerator(&(lt_accelerator_config){.index = i});
    must(cuda[0].device->comm_calls->make_id(cuda[0].device, id));
    for (int i = 0; i < 2; i++) {
        lt_device *d = cuda[i].device;
        must(d->comm_calls->open(d, id, i, 2, &p[i]));
        data[i] = d->alloc(d, 64);
        must(d->fill(d, data[i], LT_F32, 16, 1 + i));
        must(d->sync(d));
    }
    for (int i = 0; i < 2; i++)
        must(wait_for(p[i]));
    SHIM(shim_watch_sums)(&library->unfinished);
    for (int i = 0; i < 2; i++) {
        lt_device_sum s = {data[i], 16, LT_F32, LT_F32, NULL, 1, 0};
        lt_device *other = cuda[1 - i].device;
        must(p[i]->calls->allreduce(p[i], &s));
        void *more = other->alloc(other, 64);
        CHECK_EQ(more == NULL, i == 0);
        if (more)
            other->free(other, more, 64);
        SHIM(shim_reset)();
    }
    SHIM(shim_watch_sums)(NULL);
    for (int i = 0; i < 2; i++) {
        float got[16];
        lt_device *d = cuda[i].device;
        must(wait_for(p[i]));
        must(d->copy(d, got, data[i], sizeof got));
        must(d->sync(d));
        CHECK_NEAR(got[15], 3, 0);
        d->free(d, data[i], 64);
        p[i]->calls->close(p[i]);
        d->close(d);
    }
}

/* ==== Failures ================================================================================ */

TEST(a_sum_that_fails)
{
    job j = {.ranks = 2, .dtype = LT_F32, .wire = LT_F32};
    stand_in_nccl *library = open_nccl();
    library->fail = 1;
    library->rank = 1;
    run_all(&j);
    CHECK_EQ(ranks[1].status, LT_EPEER);
    CHECK_STR(ranks[1].text, "cuda:1: an NCCL call: remote process exited or there was a network "
                             "error: socket closed by 10.0.0.2");
    CHECK_EQ(ranks[0].status, LT_EPEER); /* after the timeout */
    CHECK_EQ(library->aborted, 2);
    CHECK_EQ(library->live, 0);
}

TEST(a_sum_that_never_completes)
{
    job j = {.ranks = 4, .dtype = LT_F32, .wire = LT_F16};
    stand_in_nccl *library = open_nccl();
    library->hang = 1;
    run_all(&j);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(ranks[i].status, LT_EPEER);
    CHECK_EQ(library->aborted, 4);
    CHECK_EQ(library->live, 0);
}

TEST(a_communicator_that_cannot_be_created)
{
    job j = {.ranks = 2, .dtype = LT_F32, .wire = LT_F32};
    stand_in_nccl *library = open_nccl();
    library->refuses = true;
    run_all(&j);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(ranks[i].status, LT_EPEER);
        CHECK(strstr(ranks[i].text, "an NCCL call: invalid usage"));
    }
    CHECK_EQ(library->live, 0);
}
/* Each case is drawn: which call of which rank fails, and with which error. The sums are right, or
 * this rank fails with a message. */
TEST(calls_that_fail)
{
    uint32_t seed = 7;
    int failed = 0;
    ends_early = true;
    for (int i = 0; i < 60; i++) {
        char device[16];
        job j = {.ranks = 2, .dtype = LT_F32, .wire = i % 2 ? LT_F16 : LT_F32};
        stand_in_nccl *library = open_nccl();
        seed = seed * 1664525 + 1013904223;
        library->refuse_rank = (int)(seed >> 8) % 2;
        library->refuse_at = 1 + (int)(seed >> 9) % 30;
        library->refuse_with = 1 + (int)(seed >> 16) % 6; /* ncclUnhandledCudaError and others */
        printf("call %d of rank %d fails with %d\n", library->refuse_at, library->refuse_rank,
               library->refuse_with);
        run_all(&j);
        const rank *r = &ranks[library->refuse_rank];
        snprintf(device, sizeof device, "cuda:%d: ", r->number);
        if (r->status != LT_OK && (r->status != LT_EPEER || !strstr(r->text, device)))
            FAIL("%d, %s", r->status, r->text);
        failed += r->status != LT_OK;
        CHECK_EQ(ranks[1 - r->number].status != LT_OK && r->status == LT_OK, 0);
        CHECK_EQ(library->live, 0);
    }
    ends_early = false;
    CHECK(failed > 20 && failed < 60);
}

/* ==== Closing with a deadline ================================================================= */

static atomic_bool is_closed;

static void close_nccl(void *ud)
{
    lt__nccl_destroy(ud);
    is_closed = true;
}

/* ncclCommAbort() may never return. */
TEST(a_communicator_that_is_not_freed_in_time)
{
    char text[1024], id[LT_NCCL_ID_BYTES];
    int version;
    lt_nccl_table table;
    stand_in_nccl *library = open_nccl();
    lt_device device = {.name = "cuda:0"};
    const lt_cuda_env env = {.host = &host_table, .device = &device};
    lt_nccl n = {.calls = &table, .env = &env};
    CHECK_EQ(lt__nccl_open_library(&table, &version, text, sizeof text), 0);
    for (int i = 0; i < 2; i++) {
        library->stuck = i == 0;
        is_closed = false;
        must(lt__nccl_make_id(&n, id));
        must(lt__nccl_init(&n, id, 0, 1));
        CHECK_EQ(lt__nccl_close(close_nccl, &n, i == 0 ? 0.05 : 5), i > 0);
        CHECK_EQ(is_closed, i > 0);
        library->stuck = false;
        for (int k = 0; k < 5000 && !is_closed; k++)
            usleep(1000);
        CHECK(is_closed);
        CHECK_EQ(library->aborted, i + 1);
        CHECK_EQ(library->live, 0);
    }
}
#else
TEST(nccl) { SKIP("cuDNN's headers are not installed"); }
#endif
