/* test_filter.c - bucket filters: tails that return as sums, buckets that are resent. */
#include "tests/dist/trainer.h"

/* Number i in the tail of a rank's bucket. Small enough for bf16 to hold the sums of five ranks. */
static float number_of(const trainer *r, int bucket, int i)
{
    return (float)((r->rank * 7 + bucket * 3 + i + (int)lt_step(r->ctx)) % 50);
}

static int tail_of(const trainer *r) { return r->plan->filter->tail; }

static void pack_numbers(void *ud, lt_packet *packet)
{
    const trainer *r = ud;
    for (int i = 0; i < tail_of(r); i++)
        packet->tail[i] = number_of(r, packet->bucket, i);
}

static bool check_numbers(void *ud, const lt_packet *packet)
{
    const trainer *r = ud;
    for (int i = 0; i < tail_of(r); i++) {
        float sum = 0;
        for (int k = 0; k < r->plan->ranks; k++)
            sum += number_of(&(trainer){.rank = k, .ctx = r->ctx}, packet->bucket, i);
        if (packet->tail[i] != sum)
            FAIL("rank %d, bucket %d, number %d is %g, not %g", r->rank, packet->bucket, i,
                 (double)packet->tail[i], (double)sum);
    }
    return false;
}

/* Checks that the ranks end with the same bits as without a filter. */
static void check_unchanged(plan p, const lt_bucket_filter *filter)
{
    static trained with[MOST_TRAINERS], without[MOST_TRAINERS];
    p.filter = NULL;
    train_all(&p, without);
    p.filter = filter;
    check_train_all(&p, with);
    for (int i = 0; i < p.ranks; i++) {
        CHECK(memcmp(with[i].w, without[0].w, sizeof with[i].w) == 0);
        CHECK(memcmp(with[i].buckets, without[0].buckets, sizeof with[i].buckets) == 0);
    }
}

TEST(the_tails_of_all_ranks_are_summed_with_the_buckets)
{
    static const lt_dtype wires[] = {LT_F32, LT_F16, LT_BF16};
    lt_bucket_filter filter = {.pack = pack_numbers, .unpack = check_numbers};
    for (int tail = 0; tail <= LT_MAX_TAIL; tail = tail * 11 + 1)
        for (int n = 2; n <= MOST_TRAINERS; n++) {
            plan p = usual;
            p.ranks = n;
            p.rare = true;
            filter.tail = tail < 100 ? tail : LT_MAX_TAIL;
            check_unchanged(p, &filter);
            p.dtype = LT_F32;
            for (int w = 0; w < 3; w++) {
                p.config.wire = wires[w];
                check_unchanged(p, &filter);
            }
        }
}

/* Gradients are multiplied by shares, but tails are not, even if a rank's share is 0. */
TEST(tails_are_not_weighted_by_shares)
{
    lt_bucket_filter filter = {.pack = pack_numbers, .unpack = check_numbers, .tail = 5};
    plan p = usual;
    p.ranks = 5;
    p.poisons = true;
    set_rows(&p, 13, 3, 1, 5, 2);
    check_unchanged(p, &filter);
    p.dtype = LT_F32;
    p.config.wire = LT_F16;
    check_unchanged(p, &filter);
}

/* ==== Statistics ============================================================================== */

/* Each step has two backwards. The statistics of the last one count: it sees the sum of both. */
static double expected(const trainer *r, const lt_tensor *x)
{
    return (double)(10 * (STEPS - lt_step(r->ctx)) + 2 * r->rank + (x == r->w[W1]));
}

static lt_grad_stats measure(void *ud, lt_tensor *x, lt_tensor *grad)
{
    trainer *r = ud;
    int i = 0;
    CHECK_EQ(lt_count(grad), lt_count(x));
    while (r->w[i] != x)
        i++;
    int left = r->plan->micro_batches - 1 - r->measured[i]++ % r->plan->micro_batches;
    return (lt_grad_stats){expected(r, x) + left, 1 + left};
}

static void pack_measure(void *ud, lt_packet *packet)
{
    const trainer *r = ud;
    double largest = 0;
    for (int i = 0; i < packet->n; i++)
        largest = fmax(largest, expected(r, packet->x[i]));
    CHECK_NEAR(packet->stats.largest, largest, 0);
    CHECK_EQ(packet->stats.not_finite, packet->n);
    packet->tail[0] = packet->stats.largest > 0;
}

static bool check_measures(void *ud, const lt_packet *packet)
{
    const trainer *r = ud;
    int64_t rows = r->plan->rows[lt_step(r->ctx)];
    CHECK_NEAR(packet->tail[0], rows < r->plan->ranks ? rows : r->plan->ranks, 0);
    return false;
}

TEST(gradients_are_measured_when_they_are_complete)
{
    static trained results[MOST_TRAINERS];
    lt_bucket_filter filter = {
        .pack = pack_measure, .unpack = check_measures, .measure = measure, .tail = 1};
    for (int few = 0; few < 2; few++) {
        plan p = usual;
        p.micro_batches = few ? 1 : 2;
        p.filter = &filter;
        if (few)
            set_rows(&p, 2, 3, 1, 2, 3);
        check_train_all(&p, results);
    }
}

/* ==== Half precision on the wire ============================================================== */

/* Overflows f16 in the first two attempts. */
static void pack_too_much(void *ud, lt_packet *packet)
{
    (void)ud;
    packet->exponent = packet->sent == 0 ? 40 : packet->sent == 1 ? 30 : 0;
    packet->tail[0] = 1;
}

static bool want_finite(void *ud, const lt_packet *packet)
{
    const float *x = packet->data;
    const trainer *r = ud;
    CHECK_NEAR(packet->tail[0], r->plan->ranks, 0);
    for (int64_t i = 0; i < packet->count; i++)
        if (!isfinite(x[i]))
            return true;
    CHECK_EQ(packet->sent, 2);
    return false;
}

TEST(a_bucket_that_overflowed_is_resent)
{
    lt_bucket_filter filter = {.pack = pack_too_much, .unpack = want_finite, .tail = 1};
    plan p = usual;
    p.dtype = LT_F32;
    p.config.wire = LT_F16;
    check_unchanged(p, &filter);
}

static void pack_larger(void *ud, lt_packet *packet) { (void)ud, packet->exponent = 8; }
static void pack_smaller(void *ud, lt_packet *packet) { (void)ud, packet->exponent = -20; }

static bool once(void *ud, const lt_packet *packet)
{
    (void)ud, (void)packet;
    return false;
}

/* A factor of 2^8 preserves values that f16 would round to subnormals; a factor of 2^-20 loses
 * them. */
TEST(buckets_may_be_scaled_for_the_wire)
{
    static trained good[MOST_TRAINERS], bad[MOST_TRAINERS], none[MOST_TRAINERS];
    lt_bucket_filter filter = {.pack = pack_larger, .unpack = once};
    plan p = usual;
    p.dtype = LT_F32;
    p.config.wire = LT_F16;
    p.filter = &filter;
    check_against_one(&p, 4e-4);
    train_all(&p, good);
    filter.pack = pack_smaller;
    train_all(&p, bad);
    p.filter = NULL;
    train_all(&p, none);
    CHECK(memcmp(good[0].w, bad[0].w, sizeof good[0].w) != 0);
    CHECK(memcmp(none[0].w, bad[0].w, sizeof none[0].w) != 0);
}

TEST(too_long_a_tail_is_rejected)
{
    lt_group *group[1];
    lt_ctx *ctx = lt_open(NULL);
    CHECK_OK(lt_local_open(1, NULL, group));
    lt_reducer *r = lt_reducer_new(ctx, group[0], NULL);
    CHECK_EQ(lt_reducer_set_filter(r, &(lt_bucket_filter){.tail = 257}), LT_EINVAL);
    CHECK_STR(lt_errmsg(), "a filter can add 0 to 256 numbers to a bucket, not 257");
    lt_reducer_free(r);
    lt_group_close(group[0]);
    lt_ctx_free(ctx);
}
