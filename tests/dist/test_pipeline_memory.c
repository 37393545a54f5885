/* test_pipeline_memory.c - memory runs out at each allocation in turn, of two stages of a pipeline
 * that open it, train for a step and save their weights. Each time, the calls must fail with a
 * message, and no rank may wait forever. The test also runs under AddressSanitizer, which finds
 * leaks. */
#include <unistd.h>

#include "tests/dist/failing.h"
#include "tests/dist/pipe_net.h"

enum { RANKS = 2, MICRO = 2 };

static lt_status optimize(member *m, lt_optim *o)
{
    lt_opt opts[LT_MAX_OPT];
    LT_TRY(lt_opts_parse(&lt_optim_def(o)->schema, "lr=0.1 momentum=0.9", opts));
    for (int i = 0; i < MICRO; i++) {
        LT_TRY(micro_batch(m, i, (uint64_t)i));
        LT_TRY(lt_optim_step_clipped(o, (const lt_opt *const[]){opts}, 1, 0.1, NULL, NULL));
    }
    return LT_OK;
}

typedef struct outcome {
    char path[64]; /* of a file to write */
    char hex[65];  /* the digest of the weights */
    double loss;
} outcome;

/* ud: an outcome. */
static lt_status take_step(member *m)
{
    static const char *const names[LAYERS] = {"w0", "w1", "w2", "w3"};
    outcome *to = m->ud;
    lt_optim *o = lt_optim_new(m->net.ctx, "momentum_step", m->net.w, LAYERS);
    lt_status status = o ? optimize(m, o) : lt_errcode();
    lt_optim_free(o);
    LT_TRY(status);
    lt_grad_off(m->net.ctx);
    lt_tensor *loss = forward(&m->net, WIDE, 7, 0), *here = loss ? lt_fetch(loss) : NULL;
    lt_grad_on(m->net.ctx);
    status = here ? lt_item(here, 0, &to->loss) : lt_errcode();
    lt_release(here);
    LT_TRY(status);
    LT_TRY(lt_pipeline_sha256(m->pipeline, m->net.params, to->hex));
    return lt_pipeline_save(m->pipeline, to->path, LAYERS, names, m->net.w, 0, NULL);
}

static void *run_stage(void *ud)
{
    run_member(ud);
    return NULL;
}

/* Checks a rank after allocation n has failed, or none if it was not reached. */
static void check_rank(int n, bool was_reached, const member *m, const outcome *wanted)
{
    const outcome *got = m->ud;
    bool ok = m->status == LT_OK || (m->status == LT_ENOMEM && m->text[0]) ||
              (m->status == LT_EPEER && m->text[0] && !strstr(m->text, "got no message"));
    if (!ok || (!was_reached && m->status != LT_OK))
        FAIL("allocation %d, rank %d: '%s': %s", n, m->rank, lt_status_text(m->status), m->text);
    if (m->status != LT_OK || !wanted)
        return;
    CHECK_STR(got->hex, wanted->hex);
    CHECK(got->loss == wanted->loss);
}

/* Trains while allocation n, of both ranks together, fails; 0: none. Returns whether it was
 * reached. wanted: the results of each rank that ends well; may be NULL. */
static bool fail_once(const plan *p, int n, const outcome *wanted, outcome *last)
{
    lt_group *groups[RANKS];
    member m[RANKS];
    outcome to[RANKS];
    CHECK_OK(lt_local_open(RANKS, &(lt_group_config){.timeout = 30}, groups));
    for (int i = 0; i < RANKS; i++) {
        to[i] = (outcome){.loss = 0};
        snprintf(to[i].path, sizeof to[i].path, "/tmp/lt_pipeline_memory_%d", (int)getpid());
        m[i] = (member){.plan = p, .group = groups[i], .rank = i, .body = take_step, .ud = &to[i]};
        CHECK_OK(make_net(&m[i].net, p->dtype));
    }
    fail_at(n);
    run_threads(RANKS, run_stage, m, sizeof *m);
    bool was_reached = end_failing();
    for (int i = 0; i < RANKS; i++) {
        destroy_net(&m[i].net);
        lt_group_close(groups[i]);
    }
    for (int i = 0; i < RANKS; i++)
        check_rank(n, was_reached, &m[i], wanted);
    *last = to[RANKS - 1];
    return was_reached;
}

/* After a failure, the other rank looks for it only every part of a second. Therefore only each
 * ninth allocation fails, except in the long tests. */
static void walk(const plan *p, int first)
{
    int n = first, stride = getenv("LUATRAIN_TEST_SLOW") ? 1 : 9;
    outcome wanted, last;
    alarm(900); /* ends the test if a rank waits forever */
    CHECK(!fail_once(p, 0, NULL, &wanted));
    while (fail_once(p, n, &wanted, &last))
        n += stride;
    alarm(0);
    remove(wanted.path);
    printf("at least %d allocations\n", n - stride);
    CHECK(n > 100);
}

TEST(every_allocation_of_a_split_step_can_fail)
{
    walk(&(plan){.stages = 2, .micro = MICRO, .lag = 1, .kind = LT_ZERO_BUBBLE, .form = WIDE}, 1);
}

TEST(every_allocation_of_a_whole_step_can_fail)
{
    walk(&(plan){.stages = 2, .micro = MICRO, .kind = LT_1F1B, .form = WIDE, .shares = true}, 2);
}
