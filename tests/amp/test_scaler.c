/* The loss scale: at which step each policy changes it, and by how much. */
#include "amp/amp.h"
#include "tests/lt_test.h"

enum { END = 1000, OVERFLOW = 500 };

/* n steps whose unscaled gradients have this exponent. OVERFLOW + e: some are not finite, and the
 * finite ones have exponent e. NONE: all are zero. */
enum { NONE = -400 };
typedef struct part {
    int n, exponent;
} part;
typedef struct move {
    int step, k;
} move; /* k is the exponent after this step */

static int scaled(const lt_scaler *s, int exponent)
{
    return exponent == NONE ? LT_NO_EXPONENT : exponent + s->k;
}

/* Runs the parts up to one with n = 0. Expects exactly these moves, up to one with step 0. */
static void expect(lt_scaler *s, const part *parts, const move *moves)
{
    for (; parts->n > 0; parts++)
        for (int i = 0; i < parts->n; i++) {
            int before = s->k;
            bool finite = parts->exponent < OVERFLOW / 2;
            int exponent = finite ? parts->exponent : parts->exponent - OVERFLOW;
            bool applied = lt_scaler_update(s, scaled(s, exponent), finite);
            CHECK_EQ(applied, finite);
            if (s->k == before)
                continue;
            if (s->steps != moves->step || s->k != moves->k)
                FAIL("step %lld changes k to %d, expected step %d, %d", (long long)s->steps, s->k,
                     moves->step, moves->k);
            moves++;
        }
    CHECK_EQ(moves->step, 0);
}

TEST(a_static_scale_does_not_change)
{
    lt_scaler s = lt_scaler_init(LT_SCALE_STATIC, 8, 0);
    expect(&s, (part[]){{3000, -20}, {5, OVERFLOW + 3}, {1, -20}, {2, OVERFLOW + 30}, {0}},
           (move[]){{0}});
    CHECK_EQ(s.k, 8);
    CHECK_EQ(s.steps, 3008);
    CHECK_EQ(s.skipped, 7);
    CHECK_EQ(s.in_a_row, 2);
}

TEST(a_dynamic_scale_changes_as_in_pytorch)
{
    lt_scaler s = lt_scaler_init(LT_SCALE_DYNAMIC, 16, 0);
    expect(&s,
           (part[]){{1999, -30},
                    {1, OVERFLOW + 9},
                    {1999, 10},
                    {2, -30},
                    {2, OVERFLOW - 9},
                    {4000, NONE},
                    {0}},
           (move[]){{2000, 15}, {4000, 16}, {4002, 15}, {4003, 14}, {6003, 15}, {8003, 16}, {0}});
    CHECK_EQ(s.skipped, 3);
    CHECK_EQ(s.in_a_row, 0);
    s = lt_scaler_init(LT_SCALE_DYNAMIC, 0, 3);
    expect(&s, (part[]){{9, 0}, {1, OVERFLOW}, {5, 0}, {0}},
           (move[]){{3, 1}, {6, 2}, {9, 3}, {10, 2}, {13, 3}, {0}});
}

TEST(a_scale_stays_within_its_limits)
{
    lt_scaler s = lt_scaler_init(LT_SCALE_DYNAMIC, 100, 1);
    CHECK_EQ(s.k, LT_SCALE_MAX);
    expect(&s, (part[]){{5, -60}, {0}}, (move[]){{0}});
    s = lt_scaler_init(LT_SCALE_STATIC, -100, 0);
    CHECK_EQ(s.k, LT_SCALE_MIN);
    for (lt_scale_policy policy = LT_SCALE_ADAPTIVE; policy <= LT_SCALE_DYNAMIC; policy++) {
        s = lt_scaler_init(policy, 0, 0);
        for (int i = 0; i < 100; i++)
            CHECK(!lt_scaler_update(&s, LT_NO_EXPONENT, false));
        CHECK_EQ(s.k, LT_SCALE_MIN);
        CHECK_EQ(s.in_a_row, 100);
        CHECK(lt_scaler_update(&s, -20, true));
        CHECK_EQ(s.in_a_row, 0);
        CHECK_EQ(s.skipped, 100);
    }
    s = lt_scaler_init(LT_SCALE_ADAPTIVE, 23, 0);
    expect(&s, (part[]){{5000, -60}, {5000, NONE}, {0}}, (move[]){{10, 24}, {0}});
}

/* 2^-8 times 2^16 leaves 7 bits of headroom, of which 2 are reserved. The scale first grows by half
 * of the others, then by 1 each time, after 20, 20 and 40 steps. */
TEST(an_adaptive_scale_grows_into_its_headroom)
{
    lt_scaler s = lt_scaler_init(LT_SCALE_ADAPTIVE, 16, 0);
    expect(&s, (part[]){{9000, -8}, {0}},
           (move[]){{20, 18}, {40, 19}, {60, 20}, {80, 21}, {120, 22}, {0}});
    CHECK_EQ(s.interval, 80);
    CHECK_EQ(s.skipped, 0);
    /* 26 bits of headroom, then 14, then 8, after which the growth is slow. */
    s = lt_scaler_init(LT_SCALE_ADAPTIVE, -10, 0);
    expect(&s, (part[]){{200, -1}, {0}},
           (move[]){{10, 2}, {20, 8}, {40, 11}, {60, 12}, {80, 13}, {100, 14}, {140, 15}, {0}});
    /* All gradients are zero: they may be 2^-25 or less. */
    s = lt_scaler_init(LT_SCALE_ADAPTIVE, -14, 0);
    expect(&s, (part[]){{100, NONE}, {0}}, (move[]){{10, 5}, {20, 24}, {0}});
    s = lt_scaler_init(LT_SCALE_ADAPTIVE, 12, 0); /* the longest interval is 2000 */
    s.interval = 1999;
    expect(&s, (part[]){{4000, 0}, {0}}, (move[]){{1999, 13}, {3999, 14}, {0}});
    CHECK_EQ(s.interval, 2000);
}

TEST(a_step_without_headroom_restarts_the_interval)
{
    lt_scaler s = lt_scaler_init(LT_SCALE_ADAPTIVE, 10, 0);
    expect(&s, (part[]){{19, 0}, {1, 4}, {20, 0}, {10, 0}, {1, NONE}, {29, 0}, {0}},
           (move[]){{40, 11}, {60, 12}, {80, 13}, {0}});
}

/* The smallest headroom of the steps counts: 12 bits, but 6 in one step, so the scale grows by 2.
 * */
TEST(growth_depends_on_the_least_headroom)
{
    lt_scaler s = lt_scaler_init(LT_SCALE_ADAPTIVE, 0, 0);
    expect(&s, (part[]){{5, 3}, {1, 9}, {14, 3}, {10, 3}, {0}}, (move[]){{20, 2}, {30, 6}, {0}});
}

TEST(an_adaptive_scale_shrinks_by_the_excess)
{
    /* The finite gradients reach 2^4 * 2^16, which is 5 bits too many. */
    lt_scaler s = lt_scaler_init(LT_SCALE_ADAPTIVE, 16, 0);
    expect(&s, (part[]){{1, OVERFLOW + 4}, {0}}, (move[]){{1, 11}, {0}});
    CHECK_NEAR(s.mean, 5, 0);
    /* The size of the overflow is unknown: the scale shrinks by 1, 2, 4, 8 and 16. After a finite
     * step it shrinks by 1 again. */
    s = lt_scaler_init(LT_SCALE_ADAPTIVE, 24, 0);
    expect(&s, (part[]){{5, OVERFLOW - 60}, {1, -8}, {1, OVERFLOW - 60}, {0}},
           (move[]){{1, 23}, {2, 21}, {3, 17}, {4, 9}, {5, -7}, {7, -8}, {0}});
}

/* If an overflow follows a growth, the interval gets longer, so overflows become rare. An overflow
 * long after the last growth resets it. */
TEST(an_overflow_not_caused_by_growth_resets_the_interval)
{
    lt_scaler s = lt_scaler_init(LT_SCALE_ADAPTIVE, 19, 0);
    expect(&s, (part[]){{20, -7}, {0}}, (move[]){{20, 20}, {0}});
    CHECK_EQ(s.interval, 40);
    CHECK(!lt_scaler_update(&s, 12, false));
    CHECK_EQ(s.interval, 80);
    CHECK_EQ(s.k, 19);
    expect(&s, (part[]){{80, -7}, {0}}, (move[]){{101, 20}, {0}});
    CHECK_EQ(s.interval, 160);
    for (int i = 0; i < 159; i++)
        CHECK(lt_scaler_update(&s, 14, true));
    CHECK(!lt_scaler_update(&s, 12, false));
    CHECK_EQ(s.interval, 20);
    s.interval = 1999;
    s.since = 0;
    CHECK(!lt_scaler_update(&s, 12, false));
    CHECK_EQ(s.interval, 2000);
}

/* A row whose gradients are 2^30 times larger than all others costs a few steps, and the scale soon
 * recovers. */
TEST(an_adaptive_scale_recovers_from_an_outlier)
{
    lt_scaler s = lt_scaler_init(LT_SCALE_ADAPTIVE, 16, 0);
    for (int step = 0; step < 5; step++)
        CHECK(lt_scaler_update(&s, scaled(&s, -10), true));
    CHECK(!lt_scaler_update(&s, 15, false));
    for (int row = 0; s.k + 20 > 15; row++)
        CHECK(row < 5 && !lt_scaler_update(&s, 15, false));
    for (int step = 0; step < 60; step++)
        CHECK(lt_scaler_update(&s, scaled(&s, -10), true));
    CHECK(s.k >= 16);
}

/* Gradients grow by a bit in two steps, from 2^-8 to 2^8: no step is skipped, because the scale
 * shrinks in advance. It grows again after they fall. */
TEST(an_adaptive_scale_anticipates_growing_gradients)
{
    lt_scaler s = lt_scaler_init(LT_SCALE_ADAPTIVE, 16, 0);
    int lost = 0;
    for (int step = 0; step < 32; step++) {
        int exponent = scaled(&s, -8 + step / 2);
        lost += !lt_scaler_update(&s, exponent, exponent <= 15);
    }
    CHECK_EQ(lost, 0);
    CHECK(s.k <= 15 - 8);
    int low = s.k;
    for (int step = 0; step < 3000; step++)
        CHECK(lt_scaler_update(&s, scaled(&s, -8), true));
    CHECK(s.k > low + 5);
    /* The same under a dynamic scale. */
    s = lt_scaler_init(LT_SCALE_DYNAMIC, 23, 0);
    for (int step = 0; step < 32; step++) {
        int exponent = scaled(&s, -8 + step / 2);
        lost += !lt_scaler_update(&s, exponent, exponent <= 15);
    }
    CHECK_EQ(lost, 15);
}

/* Exponents vary by +-2 around -3: mean -2 (the values are below 2^(e + 1)), standard deviation 2,
 * so the limit is 16 + 2 - 3.09 * 2 = 11.8. */
TEST(the_limit_assumes_a_normal_distribution)
{
    lt_scaler s = lt_scaler_init(LT_SCALE_ADAPTIVE, 5, 0);
    for (int step = 0; step < 100000; step++)
        CHECK(lt_scaler_update(&s, scaled(&s, step % 2 ? -5 : -1), true));
    CHECK_NEAR(s.mean, -2, 0.02);
    CHECK_NEAR(s.variance, 4, 0.1);
    CHECK_EQ(s.k, 11);
    CHECK(lt_scaler_update(&s, 500, true)); /* f32 gradients may be that large */
    CHECK_EQ(s.k, LT_SCALE_MIN);
}

/* The limit is 16 + 8 - 3.09 * 6 = 5.5: there is no growth and no longer interval, whatever the
 * headroom. */
TEST(no_growth_beyond_the_limit)
{
    lt_scaler s = lt_scaler_init(LT_SCALE_ADAPTIVE, 5, 0);
    s.old_mean = s.old_variance = 0.5;
    s.mean = -8;
    s.variance = 36;
    for (int step = 0; step < 25; step++)
        CHECK(lt_scaler_update(&s, scaled(&s, -9), true));
    CHECK_EQ(s.k, 5);
    CHECK_EQ(s.interval, 20);
    CHECK_EQ(s.good, 20);
    s.variance = 0;
    CHECK(lt_scaler_update(&s, scaled(&s, -9), true));
    CHECK_EQ(s.k, 13);
}

/* A copy continues exactly as the original, bit for bit. */
TEST(the_struct_holds_the_whole_state)
{
    lt_scaler s = lt_scaler_init(LT_SCALE_ADAPTIVE, 16, 0), copy = s;
    for (int step = 0; step < 5000; step++) {
        int exponent = scaled(&s, step * 7919 % 13 - 9);
        bool finite = exponent <= 15 && step % 611 != 0;
        if (step % 1000 == 0)
            copy = s;
        lt_scaler_update(&s, exponent, finite);
        lt_scaler_update(&copy, exponent, finite);
        CHECK(memcmp(&s.mean, &copy.mean, sizeof s.mean) == 0);
        CHECK(memcmp(&s.variance, &copy.variance, sizeof s.variance) == 0);
        CHECK(s.k == copy.k && s.interval == copy.interval && s.good == copy.good);
    }
    CHECK(s.skipped > 5);
}

/* States that no history produces. lt_scaler_check() rejects them. */
TEST(invalid_states)
{
    const lt_scaler fine = lt_scaler_init(LT_SCALE_ADAPTIVE, 16, 0);
    lt_scaler s = fine;
    CHECK_OK(lt_scaler_check(&s));
    s.interval = 2001;
    CHECK_FAILS(lt_scaler_check(&s), LT_EINVAL, "'interval' of a scaler is out of range");
    s = lt_scaler_init(LT_SCALE_DYNAMIC, 16, INT32_MAX);
    CHECK_OK(lt_scaler_check(&s));
    s = fine;
    s.steps = INT64_MAX;
    CHECK_FAILS(lt_scaler_check(&s), LT_EINVAL, "'steps' of a scaler is out of range");
    s = fine;
    s.mean = -1e308;
    CHECK_FAILS(lt_scaler_check(&s), LT_EINVAL, "'mean' of a scaler is out of range");
    s = fine;
    s.variance = 1e308;
    CHECK_FAILS(lt_scaler_check(&s), LT_EINVAL, "'variance' of a scaler is out of range");
    s = fine;
    s.mean = LT_NO_EXPONENT; /* the limits of each range */
    s.variance = 1e9;
    s.old_mean = s.old_variance = 0.5;
    for (int i = 0; i < 3000; i++) {
        CHECK(lt_scaler_update(&s, i % 2 ? 15 : -40, true));
        CHECK_OK(lt_scaler_check(&s));
    }
}
