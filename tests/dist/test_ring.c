/* test_ring.c - collectives over a network: sums against a sum in f64, the same bits on all
 * members, members that call another collective, are missing or lost. */
#include "dist/sum.h"
#include "tests/dist/collectives.h"
#include "tests/dist/ring_members.h"

/* Runs body on n members, each with its element of ud[]. */
static void on_members(int n, one *members, lt_status (*body)(one *m), void *ud, size_t ud_bytes)
{
    fake_hub *hub = open_members(n, members, body);
    for (int i = 0; i < n; i++)
        members[i].ud = (char *)ud + (size_t)i * ud_bytes;
    run_threads(n, run_one, members, sizeof *members);
    close_members(n, members, hub);
}

/* ==== Sums ==================================================================================== */

/* Sums data that was scaled and rounded to the wire. */
static lt_status add_in_ring(void *ud, const lt_sum *sum)
{
    one *m = ud;
    lt_coll_sig sig = lt__coll_sig_of_sum(sum);
    lt__sum_arrays(&(lt_summand){sum->data, sum->scale}, 1, sum->dtype, sum->wire, 0, sum->count);
    LT_TRY(lt__ring_match(&m->ring, &sig));
    return lt__ring_allreduce(&m->ring, sum);
}

static adder adder_in_ring(one *m)
{
    return (adder){add_in_ring, m, m->ring.index, m->ring.size, false, 0};
}

static lt_status add_all(one *m)
{
    adder a = adder_in_ring(m);
    lt_status status = check_sums(&a);
    m->bits = a.bits;
    return status;
}

/* Sums that go in many chunks. */
static lt_status add_large(one *m)
{
    adder a = adder_in_ring(m);
    LT_TRY(check_sum(&a, 1000003, LT_F32, LT_F32));
    LT_TRY(check_sum(&a, 1400003, LT_F32, LT_BF16));
    lt_status status = check_sum(&a, 500001, LT_F64, LT_F64);
    m->bits = a.bits;
    return status;
}

/* Checks that no member fails, and that all have the same sums. */
static void check_members(int n, lt_status (*body)(one *m))
{
    one members[MOST];
    on_members(n, members, body, NULL, 0);
    for (int k = 0; k < n; k++) {
        CHECK_STR(members[k].text, "");
        if (members[k].bits != members[0].bits)
            FAIL("%d members: the bits of 0 and %d differ", n, k);
    }
}

TEST(sums_equal_those_in_f64_and_each_other)
{
    for (int n = 1; n <= MOST; n += test_stride(3))
        check_members(n, add_all);
    for (int n = 2; n <= 5; n += test_stride(3))
        check_members(n, add_large);
}

static lt_status add_up(one *m) { return add_in_ring(m, m->ud); }

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

static lt_status pass_bytes(one *m)
{
    char *data = calloc(1, WORDS);
    lt_ring *r = &m->ring;
    lt_status status = LT_OK;
    for (int root = 0; root < r->size && status == LT_OK; root++) {
        memset(data, r->index == root ? root + 1 : 0, WORDS);
        status = lt__ring_broadcast(r, "a word", data, WORDS, root);
        if (status == LT_OK && (data[0] != root + 1 || data[WORDS - 1] != root + 1))
            status = lt_fail(LT_EINVAL, "member %d has %d from %d", r->index, data[0], root);
    }
    if (status == LT_OK && r->index == 0)
        status = lt__ring_send(r, r->size - 1, data, WORDS);
    if (status == LT_OK && r->index == r->size - 1)
        status = lt__ring_receive(r, 0, data, WORDS);
    free(data);
    return status;
}

TEST(broadcasts_and_messages_arrive)
{
    for (int n = 2; n <= MOST; n++)
        check_members(n, pass_bytes);
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
