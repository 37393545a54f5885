/* test_ring.c - collectives over a network: sums against a sum in f64, the same bits on all
 * members, members that call another collective, are missing or lost. */
#include <pthread.h>

#include "dist/ring.h"
#include "tests/dist/fake_net.h"
#include "tests/dist/sums.h"
#include "tests/lt_test.h"

enum { MOST = 7 };

/* ==== Members ================================================================================= */

typedef struct one { /* a member of the ring; its index is the network's rank */
    lt_ring ring;
    lt_net net;
    lt_status status;
    char text[256];
    void *ud;
    lt_status (*body)(struct one *m);
    pthread_t thread;
} one;

static lt_status nothing_known(void *ud, const lt_ring *ring, int rank, const char *what)
{
    (void)ud, (void)ring, (void)rank, (void)what;
    return LT_OK;
}

static void *run_one(void *ud)
{
    one *m = ud;
    m->status = m->body(m);
    snprintf(m->text, sizeof m->text, "%s", m->status == LT_OK ? "" : lt_errmsg());
    return NULL;
}

/* Runs body on n members, each with its element of ud[]. The results are in members. */
static void on_members(int n, one *members, lt_status (*body)(one *m), void *ud, size_t ud_bytes)
{
    static const int ranks[MOST] = {0, 1, 2, 3, 4, 5, 6};
    fake_hub *hub = fake_hub_new();
    for (int i = 0; i < n; i++) {
        one *m = &members[i];
        *m = (one){.net = fake_net_new(hub, i, n, ranks),
                   .body = body,
                   .ud = (char *)ud + (size_t)i * ud_bytes};
        m->ring = (lt_ring){.net = &m->net,
                            .rank = ranks,
                            .index = i,
                            .size = n,
                            .timeout = 30,
                            .check = nothing_known};
        CHECK_OK(lt__ring_open(&m->ring));
    }
    for (int i = 0; i < n; i++)
        pthread_create(&members[i].thread, NULL, run_one, &members[i]);
    for (int i = 0; i < n; i++)
        pthread_join(members[i].thread, NULL);
    for (int i = 0; i < n; i++) {
        lt__ring_close(&members[i].ring);
        members[i].net.close(members[i].net.self);
    }
    fake_hub_free(hub);
}

/* ==== Sums ==================================================================================== */

static lt_status add_up(one *m)
{
    lt_sum *sum = m->ud;
    lt_coll_sig sig = lt__coll_sig_of_sum(sum);
    LT_TRY(lt__ring_match(&m->ring, &sig));
    return lt__ring_allreduce(&m->ring, sum);
}

static void check_sum(int n, int64_t count, lt_dtype dtype, lt_dtype wire)
{
    one members[MOST];
    lt_sum sums[MOST];
    size_t bytes = (size_t)count * lt_dtype_bytes(dtype);
    double *want = calloc((size_t)count + 1, sizeof *want);
    double *size = calloc((size_t)count + 1, sizeof *size);
    double *x = malloc((size_t)count * sizeof *x + 1);
    for (int k = 0; k < n; k++) {
        char *data = malloc(bytes + 1), *half = malloc(bytes + 1);
        elements_of(k, count, dtype, data, x);
        if (wire != dtype) { /* it holds the same values as the wire */
            lt_convert(half, wire, data, dtype, (size_t)count);
            lt_convert(data, dtype, half, wire, (size_t)count);
        }
        lt_convert(x, LT_F64, data, dtype, (size_t)count);
        for (int64_t i = 0; i < count; i++) {
            want[i] += x[i];
            size[i] += fabs(x[i]);
        }
        data[bytes] = 42;
        free(half);
        sums[k] = (lt_sum){"numbers", data, count, dtype, wire, 1};
    }
    on_members(n, members, add_up, sums, sizeof *sums);
    lt_convert(x, LT_F64, sums[0].data, dtype, (size_t)count);
    for (int64_t i = 0; i < count; i++) {
        double most = dtype == LT_I64 ? 0 : n * size[i] * roundoff(wire);
        if (!(fabs(x[i] - want[i]) <= most))
            FAIL("%d members, %lld %s as %s: element %lld is %g, not %g", n, (long long)count,
                 lt_dtype_name(dtype), lt_dtype_name(wire), (long long)i, x[i], want[i]);
    }
    for (int k = 0; k < n; k++) {
        CHECK_STR(members[k].text, "");
        CHECK_EQ(((char *)sums[k].data)[bytes], 42);
        if (memcmp(sums[k].data, sums[0].data, bytes) != 0)
            FAIL("%d members, %lld %s as %s: the bits of 0 and %d differ", n, (long long)count,
                 lt_dtype_name(dtype), lt_dtype_name(wire), k);
    }
    for (int k = 0; k < n; k++)
        free(sums[k].data);
    free(want);
    free(size);
    free(x);
}

TEST(sums_equal_those_in_f64_and_each_other)
{
    for (int n = 1; n <= MOST; n++)
        for (size_t t = 0; t < N_SUM_TYPES; t++) {
            const int64_t counts[] = {0, 1, n - 1, n, n + 1, 1009, 8192, 30011};
            for (size_t k = 0; k < sizeof counts / sizeof *counts; k++)
                check_sum(n, counts[k], sum_types[t].dtype, sum_types[t].wire);
        }
}

TEST(large_sums_go_in_many_chunks)
{
    check_sum(2, 1000003, LT_F32, LT_F32);
    check_sum(3, 2000003, LT_F32, LT_BF16);
    check_sum(5, 700001, LT_F64, LT_F64);
}

TEST(values_beyond_f16_become_inf_on_all_members)
{
    enum { N = 40000 };
    static float x[3][N];
    one members[3];
    lt_sum sums[3];
    for (int k = 0; k < 3; k++) {
        x[k][0] = x[k][N - 1] = 40000;
        x[k][1] = 1;
        sums[k] = (lt_sum){"x", x[k], N, LT_F32, LT_F16, 1};
    }
    on_members(3, members, add_up, sums, sizeof *sums);
    for (int k = 0; k < 3; k++)
        CHECK(isinf(x[k][0]) && isinf(x[k][N - 1]) && x[k][1] == 3 && x[k][2] == 0);
}

/* ==== Other collectives ======================================================================= */

static lt_status pass_around(one *m)
{
    enum { N = 700001 };
    char *data = calloc(1, N);
    lt_ring *r = &m->ring;
    lt_status status = LT_OK;
    for (int root = 0; root < r->size && status == LT_OK; root++) {
        memset(data, r->index == root ? root + 1 : 0, N);
        status = lt__ring_broadcast(r, "a word", data, N, root);
        if (status == LT_OK && (data[0] != root + 1 || data[N - 1] != root + 1))
            status = lt_fail(LT_EINVAL, "member %d has %d from %d", r->index, data[0], root);
    }
    if (status == LT_OK && r->index == 0)
        status = lt__ring_send(r, r->size - 1, data, N);
    if (status == LT_OK && r->index == r->size - 1)
        status = lt__ring_receive(r, 0, data, N);
    free(data);
    return status;
}

TEST(broadcasts_and_messages_arrive)
{
    one members[MOST];
    for (int n = 2; n <= MOST; n++) {
        on_members(n, members, pass_around, NULL, 0);
        for (int k = 0; k < n; k++)
            CHECK_STR(members[k].text, "");
    }
}

/* Member 0 detects no difference and waits for the others, hence the short timeout. */
static lt_status add_up_briefly(one *m)
{
    m->ring.timeout = 0.3;
    return add_up(m);
}

TEST(a_different_collective_is_detected)
{
    one members[3];
    lt_sum sums[3];
    double x[3][2] = {{0}};
    for (int k = 0; k < 3; k++)
        sums[k] = (lt_sum){"x", x[k], 1 + (k == 1), LT_F64, LT_F64, 1};
    on_members(3, members, add_up_briefly, sums, sizeof *sums);
    CHECK_EQ(members[1].status, LT_EDESYNC);
    CHECK_STR(members[1].text,
              "the ranks disagree: rank 0 is in the allreduce of x (1 f64), rank 1 in the "
              "allreduce of x (2 f64)");
    CHECK_STR(members[2].text,
              "the ranks disagree: rank 1 is in the allreduce of x (2 f64), rank 2 in the "
              "allreduce of x (1 f64)");
}

static lt_status member_is_missing(one *m)
{
    m->ring.timeout = 0.3;
    return m->ring.index == 1 ? LT_OK : add_up(m);
}

static lt_status member_is_lost(one *m)
{
    fake *f = m->net.self;
    if (m->ring.index == 1)
        atomic_store(&f->hub->ended[1], true);
    return m->ring.index == 1 ? LT_OK : add_up(m);
}

/* The first of two members misses the other in a sum and fails with this text. */
static void check_failure_text(lt_status (*body)(one *m), const char *text)
{
    one members[2];
    double x[2] = {0};
    lt_sum sums[2] = {{"x", &x[0], 1, LT_F64, LT_F64, 1}, {"x", &x[1], 1, LT_F64, LT_F64, 1}};
    on_members(2, members, body, sums, sizeof *sums);
    CHECK_EQ(members[0].status, LT_EPEER);
    CHECK_STR(members[0].text, text);
}

TEST(a_missing_or_lost_member_is_named)
{
    check_failure_text(member_is_missing, "rank 1 did not reach x within 0.3 s");
    check_failure_text(member_is_lost, "rank 1 was lost while rank 0 was waiting for it in x");
}
