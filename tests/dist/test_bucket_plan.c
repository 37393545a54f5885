/* Which parameters share a bucket, and who owns the padding after them. */
#include "dist/bucket_plan.h"
#include "ops/ops.h"
#include "tests/lt_test.h"

enum { PARAMS = 5, EACH = 10 }; /* f64, so 48 bytes of padding follow each */

static void with_params(void (*fn)(lt_tensor **x))
{
    static const char *const names[PARAMS] = {"a", "b", "c", "d", "e"};
    lt_ctx *ctx = lt_open(NULL);
    lt_params *params = lt_params_new(ctx);
    lt_tensor *x[PARAMS];
    int64_t dim = EACH;
    for (int i = 0; i < PARAMS; i++) {
        x[i] = lt_param_new(ctx, LT_F64, 1, &dim, (lt_init){LT_INIT_CONSTANT, 0, 0});
        CHECK_OK(lt_params_add(params, names[i], x[i]));
    }
    CHECK_OK(lt_params_place(params));
    fn(x);
    for (int i = 0; i < PARAMS; i++)
        lt_release(x[i]);
    lt_params_free(params);
    lt_ctx_free(ctx);
}

static lt_bucket_plan plan_of(lt_tensor **x, const char *members)
{
    lt_bucket_plan plan = {0};
    for (const char *m = members; *m; m++)
        CHECK_OK(lt__bucket_plan_add(&plan, x[*m - 'a']));
    CHECK_OK(lt__bucket_plan_cut(&plan, 1, 1)); /* one bucket per parameter */
    CHECK_EQ(plan.n_buckets, plan.n_items);
    return plan;
}

static void check_all(lt_tensor **x)
{
    lt_bucket_plan all = plan_of(x, "cabed");
    CHECK(all.items[0].x == x[0] && all.items[4].x == x[4]);
    CHECK_EQ(all.buckets[0].first, 4);
    for (int end = 1; end <= PARAMS; end++)
        CHECK(lt__bucket_plan_owns_after(&all, end, LT_MAX_TAIL));
    CHECK_EQ(lt__bucket_plan_span(&all, 1, 3), 26);
    CHECK_EQ(lt__bucket_plan_arena_end(&all, 0), 74);
    CHECK(lt__bucket_plan_find(&all, x[3]) == &all.items[3]);
    lt__bucket_plan_free(&all);
}

static void check_some(lt_tensor **x)
{
    lt_bucket_plan some = plan_of(x, "acd");
    CHECK(lt__bucket_plan_find(&some, x[1]) == NULL);
    CHECK(!lt__bucket_plan_owns_after(&some, 1, 7)); /* b follows */
    CHECK(lt__bucket_plan_owns_after(&some, 1, 0));
    CHECK(lt__bucket_plan_owns_after(&some, 2, 16));  /* the padding of d */
    CHECK(!lt__bucket_plan_owns_after(&some, 2, 17)); /* then e follows */
    CHECK(!lt__bucket_plan_owns_after(&some, 3, 7));
    lt__bucket_plan_free(&some);
}

TEST(the_plan_owns_the_padding_of_all_parameters) { with_params(check_all); }
TEST(a_partial_plan_does_not_own_all_padding) { with_params(check_some); }
