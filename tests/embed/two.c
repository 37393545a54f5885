/* two.c - a program built only against the installed library, with two contexts in one process: one
 * trains LeNet from ops in C, the other a model written in Lua.
 *
 *     two MODEL.lua
 *
 * Each is trained alone, then both in turn, then each in its own thread. The losses must have
 * the same bits each time: the contexts do not affect each other.
 */
#include <luatrain/luatrain.h>
#include <pthread.h>
#include <stdio.h>

#include "lenet.h"

enum { STEPS = 8, BATCH = 8, SIDE = 12 };

typedef struct trainer {
    uint64_t seed;
    const char *model; /* the script of a model in Lua; NULL: LeNet in C */
    lt_ctx *ctx;
    lt_tensor *images, *labels;
    lt_batches *batches;
    lenet net;
    lua_State *L; /* on its stack: a function (x, y) that trains and returns the loss */
    double loss[STEPS];
    lt_status status;
} trainer;

static lt_status open_trainer(trainer *t)
{
    t->ctx = lt_open(&(lt_config){.seed = t->seed, .threads = 2});
    if (!t->ctx)
        return lt_errcode();
    LT_TRY(lenet_synthetic(t->ctx, STEPS * BATCH, SIDE, &t->images, &t->labels));
    t->batches = lenet_batches(t->ctx, t->images, t->labels, BATCH);
    if (!t->batches)
        return lt_errcode();
    if (!t->model)
        return lenet_open(&t->net, t->ctx, SIDE);
    t->L = lt_lua_new(t->ctx);
    return t->L ? lt_lua_dofile(t->L, t->model, 0, NULL) : lt_errcode();
}

static lt_status lua_step(lua_State *L, lt_tensor *x, lt_tensor *y, double *loss)
{
    lt_tensor *result;
    LT_TRY(lt_lua_run(L, (lt_tensor *[]){x, y}, 2, &result, 1));
    lt_status status = lt_item(result, 0, loss);
    lt_release(result);
    return status;
}

static lt_status step_trainer(trainer *t, int i)
{
    lt_tensor *x, *y;
    LT_TRY(lt_batches_next(t->batches, &x, &y));
    lt_status status = t->model ? lua_step(t->L, x, y, &t->loss[i])
                                : lenet_step(&t->net, x, y, &t->loss[i]);
    lt_release(x);
    lt_release(y);
    return status;
}

/* Keeps the settings and the losses. */
static void close_trainer(trainer *t)
{
    lt_lua_close(t->L);
    lenet_close(&t->net);
    lt_batches_free(t->batches);
    lt_release(t->images);
    lt_release(t->labels);
    lt_ctx_free(t->ctx);
    t->L = NULL;
    t->batches = NULL;
    t->images = t->labels = NULL;
    t->ctx = NULL;
}

/* Error messages are per thread, so the failing thread prints them. */
static void note(trainer *t, lt_status status)
{
    if (status != LT_OK && t->status == LT_OK) {
        t->status = status;
        fprintf(stderr, "two: seed %llu: %s\n", (unsigned long long)t->seed, lt_errmsg());
    }
}

static void *train_alone(void *ud)
{
    trainer *t = ud;
    note(t, open_trainer(t));
    for (int i = 0; i < STEPS && t->status == LT_OK; i++)
        note(t, step_trainer(t, i));
    close_trainer(t);
    return NULL;
}

static void train_in_turn(trainer *a, trainer *b)
{
    note(a, open_trainer(a));
    note(b, open_trainer(b));
    for (int i = 0; i < STEPS && a->status == LT_OK && b->status == LT_OK; i++) {
        note(a, step_trainer(a, i));
        note(b, step_trainer(b, i));
    }
    close_trainer(a);
    close_trainer(b);
}

static void train_in_threads(trainer *a, trainer *b)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, train_alone, a) != 0)
        note(a, lt_fail(LT_ENOMEM, "no thread to be had"));
    train_alone(b);
    if (a->status == LT_OK)
        pthread_join(thread, NULL);
}

static bool same(const char *how, const trainer *want, const trainer *got)
{
    if (got->status == LT_OK && memcmp(want->loss, got->loss, sizeof want->loss) == 0)
        return true;
    fprintf(stderr, "two: seed %llu trained %s: step %d has loss %.9g, alone it was %.9g\n",
            (unsigned long long)want->seed, how, STEPS, got->loss[STEPS - 1],
            want->loss[STEPS - 1]);
    return false;
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: two MODEL.lua\n");
        return 2;
    }
    trainer c = {.seed = 1}, lua = {.seed = 2, .model = argv[1]},
            other = {.seed = 3, .model = argv[1]};
    trainer c_turn = c, lua_turn = lua, c_thread = c, lua_thread = lua;
    train_alone(&c);
    train_alone(&lua);
    train_alone(&other);
    train_in_turn(&c_turn, &lua_turn);
    train_in_threads(&c_thread, &lua_thread);
    bool good = c.status == LT_OK && lua.status == LT_OK && other.status == LT_OK;
    good = same("in turn", &c, &c_turn) && same("in turn", &lua, &lua_turn) && good;
    good = same("in threads", &c, &c_thread) && same("in threads", &lua, &lua_thread) && good;
    if (good && lua.loss[STEPS - 1] == other.loss[STEPS - 1]) {
        fprintf(stderr, "two: seeds 2 and 3 give the same loss\n");
        good = false;
    }
    printf("losses after %d steps: %.6f in C, %.6f in Lua\n", STEPS, c.loss[STEPS - 1],
           lua.loss[STEPS - 1]);
    return !good;
}
