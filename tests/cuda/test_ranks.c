/* test_ranks.c - ranks that train together, each on a CUDA device that the CPU plays: their buckets
 * are brought over by the group's thread while the rank goes on.
 */
#include <lauxlib.h>
#include <pthread.h>

#include "dist/dist.h"
#include "lua/luatrain.h"
#include "tests/cuda/libs.h"
#include "tests/device/emu.h"

enum { RANKS = 2, TEXT = 1 << 13 };

typedef struct rank {
    int number;
    const char *options, *fault;
    bool blocking;
    lt_group *group;
    pthread_t thread;
    char text[TEXT];
} rank;

static lt_status call(rank *r, lua_State *L)
{
    char code[512];
    lt_reducer_config small = {.first_bucket = 64, .bucket = 64, .blocking = r->blocking};
    LT_TRY(lt_lua_join(L, r->group, &small));
    if (luaL_loadfile(L, "tests/device/late.lua") != LUA_OK)
        FAIL("%s", lua_tostring(L, -1));
    LT_TRY(lt_lua_call(L, 0, 1));
    lua_getfield(L, -1, "loop");
    snprintf(code, sizeof code, "return {rank = %d, %s}", r->number, r->options);
    if (luaL_dostring(L, code))
        FAIL("%s", lua_tostring(L, -1));
    LT_TRY(lt_lua_call(L, 1, 1));
    snprintf(r->text, sizeof r->text, "%s", lua_tostring(L, -1));
    return LT_OK;
}

static void *run(void *ud)
{
    rank *r = ud;
    lt_ctx *ctx = lt_open(&(lt_config){.device = "cuda", .threads = 1, .poison = true,
                                       .fault = r->fault});
    lua_State *L = ctx ? lt_lua_new(ctx) : NULL;
    if (!L || call(r, L) != LT_OK) {
        snprintf(r->text, sizeof r->text, "%s", lt_errmsg());
        lt_group_fail(r->group);
    }
    if (L)
        lt_lua_close(L);
    lt_ctx_free(ctx);
    lt_group_close(r->group);
    return NULL;
}

static void run_all(const char *options, const char *fault, bool blocking, rank *ranks)
{
    lt_group *group[RANKS];
    use_libraries(false);
    use_plugins("");
    CHECK_OK(lt_local_open(RANKS, &(lt_group_config){.timeout = 60}, group));
    for (int i = 0; i < RANKS; i++) {
        ranks[i] = (rank){.number = i, .options = options, .fault = fault, .blocking = blocking,
                          .group = group[i]};
        CHECK_EQ(pthread_create(&ranks[i].thread, NULL, run, &ranks[i]), 0);
    }
    for (int i = 0; i < RANKS; i++)
        pthread_join(ranks[i].thread, NULL);
}

/* Ranks have the same weights, and the same to say of the scale, though their batches differ, and
 * also when no bucket comes before backward is over. */
static void check_loop(const char *options, const char *fault, const char *part)
{
    static rank ranks[2 * RANKS];
    run_all(options, fault, false, ranks);
    run_all(options, fault, true, ranks + RANKS);
    for (int i = 0; i < 2 * RANKS; i++) {
        if (!strstr(ranks[i].text, part))
            FAIL("%s: rank %d: no '%s' in\n%s", options, i % RANKS, part, ranks[i].text);
        CHECK_STR(ranks[i].text, ranks[0].text);
    }
}

TEST(loops)
{
    check_loop("amp = 'off'", NULL, "done");
    check_loop("amp = 'bf16', accumulate = 2, rare = true", NULL, "done");
    check_loop("policy = 'dynamic'", "inf:rank=1:step=3:param=5.b", " skipped=0x1p+0");
}
