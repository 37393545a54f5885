/* test_pipeline_job.c - what a pipeline does besides adding up gradients: clipping, values for all
 * ranks, passes without gradients, digests and files; and how it ends when something fails.
 * test_pipeline_replicas.c tests replicas. */
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#include "core/tensor.h"
#include "tests/dist/pipe_net.h"

/* ==== Clipping ================================================================================ */

typedef struct clipped {
    double norms[STEPS]; /* of the gradients, before clipping */
    double w[LAYERS][WIDTH * WIDTH];
} clipped;

static const double MOST_NORM = 0.03;

/* A step with clipping. *norm is not set unless the step is applied. */
static lt_status take_clipped_step(lt_optim *o, double *norm)
{
    lt_opt opts[LT_MAX_OPT];
    lt_tensor *squares;
    lt_step_status step_status;
    LT_TRY(lt_opts_parse(&lt_optim_def(o)->schema, "lr=0.1 momentum=0.9", opts));
    LT_TRY(lt_optim_step_clipped(o, (const lt_opt *const[]){opts}, 1, MOST_NORM, &squares,
                                 &step_status));
    double value;
    lt_status status = lt_item(squares, 0, &value);
    lt_release(squares);
    if (status == LT_OK && step_status == LT_APPLIED)
        *norm = sqrt(value);
    return status;
}

static void store_weights(const net *n, clipped *to)
{
    for (int i = 0; i < LAYERS; i++)
        if (!lt_is_meta(n->w[i]))
            memcpy(to->w[i], lt_data(n->w[i]), sizeof to->w[i]);
}

static void clip_alone(const plan *p, clipped *to)
{
    net n;
    CHECK_OK(make_net(&n, LT_F64));
    CHECK_OK(lt_params_place(n.params));
    lt_optim *o = lt_optim_new(n.ctx, "momentum_step", n.w, LAYERS);
    CHECK(o != NULL);
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < p->micro; i++)
            CHECK_OK(learn(&n, p, i, number_of(p, 0, step, i)));
        CHECK_OK(take_clipped_step(o, &to->norms[step]));
    }
    store_weights(&n, to);
    lt_optim_free(o);
    destroy_net(&n);
}

static lt_status take_steps(member *m, lt_optim *o, clipped *to)
{
    for (int step = 0; step < STEPS; step++)
        for (int i = 0; i < m->plan->micro; i++) {
            LT_TRY(micro_batch(m, i, number_of(m->plan, 0, step, i)));
            LT_TRY(take_clipped_step(o, &to->norms[step]));
        }
    store_weights(&m->net, to);
    return LT_OK;
}

/* ud: the results of all ranks. */
static lt_status clip_in_stages(member *m)
{
    clipped *to = (clipped *)m->ud + m->rank;
    lt_optim *o = lt_optim_new(m->net.ctx, "momentum_step", m->net.w, LAYERS);
    lt_status status = o ? take_steps(m, o, to) : lt_errcode();
    lt_optim_free(o);
    return status;
}

static void check_near(double got, double want)
{
    if (!(fabs(got - want) <= 1e-12 * fabs(want)))
        FAIL("%.17g is not %.17g", got, want);
}

/* Checks the results of a stage. Returns how many layers it has. */
static int check_clipped(const clipped *got, const clipped *want)
{
    int n = 0;
    for (int step = 0; step < STEPS; step++)
        check_near(got->norms[step], want->norms[step]);
    for (int i = 0; i < LAYERS; i++)
        if (got->w[i][0] != 0) {
            for (int k = 0; k < WIDTH * WIDTH; k++)
                check_near(got->w[i][k], want->w[i][k]);
            n++;
        }
    return n;
}

/* The norm of the gradients of all stages, whose squares are added up in another order than in one
 * context. */
TEST(gradients_are_clipped_by_the_norm_of_all_stages)
{
    for (int k = 0; k < 12; k++) {
        plan p = mixed_plan(k, LT_F64);
        clipped want, got[MOST_RANKS] = {{{0}, {{0}}}};
        member members[MOST_RANKS];
        int n = 0;
        clip_alone(&p, &want);
        for (int step = 0; step < STEPS; step++)
            CHECK(want.norms[step] > 2 * MOST_NORM);
        check_run(&p, p.stages, clip_in_stages, got, members);
        for (int i = 0; i < p.stages; i++)
            n += check_clipped(&got[i], &want);
        CHECK_EQ(n, LAYERS);
    }
}

/* ==== Values for all ranks ==================================================================== */

enum { MICRO = 6 };

/* The losses of the micro-batches, in one context. */
static void find_losses(const plan *p, double losses[MICRO])
{
    net n;
    CHECK_OK(make_net(&n, p->dtype));
    CHECK_OK(lt_params_place(n.params));
    for (int i = 0; i < MICRO; i++) {
        lt_tensor *loss = forward(&n, p->form, (uint64_t)i, 0);
        CHECK(loss != NULL);
        CHECK_OK(lt_item(loss, 0, &losses[i]));
    }
    destroy_net(&n);
}

/* ud: the losses. Fetches each loss before the backward passes of this micro-batch and others. */
static lt_status fetch_losses(member *m)
{
    const double *losses = m->ud;
    for (int i = 0; i < MICRO; i++) {
        lt_tensor *loss = forward(&m->net, m->plan->form, (uint64_t)i, (uint64_t)m->rank + 1);
        double value;
        if (!loss)
            return lt_errcode();
        if (i % 2)
            LT_TRY(lt_backward(loss, NULL));
        lt_tensor *here = lt_fetch(loss);
        if (!here)
            return lt_errcode();
        lt_status status = lt_item(here, 0, &value);
        lt_release(here);
        LT_TRY(status);
        if (value != losses[i])
            FAIL("rank %d: loss %d is %.17g, not %.17g", m->rank, i, value, losses[i]);
        if (i % 2 == 0)
            LT_TRY(lt_backward(loss, NULL));
    }
    CHECK_EQ(lt_pipeline_forwards(m->pipeline), MICRO);
    return lt_pipeline_drain(m->pipeline);
}

/* In f32 and f64. */
TEST(all_ranks_can_fetch_a_loss_while_passes_are_in_flight)
{
    for (int k = 0; k < 18; k++) {
        plan p = mixed_plan(k, k < 9 ? LT_F32 : LT_F64);
        p.stages = 2 + k % 3;
        p.micro = MICRO;
        p.lag = k % 4;
        double losses[MICRO];
        member members[MOST_RANKS];
        find_losses(&p, losses);
        check_run(&p, p.stages, fetch_losses, losses, members);
    }
}

/* ==== Passes without gradients ================================================================ */

enum { PASSES = 24, MOST_AHEAD = 4 }; /* as MAX_UNREAD in messages.c */

/* ud: the number of passes that stage 1 has begun. It is slow, so stage 0 runs ahead. */
static lt_status evaluate(member *m)
{
    atomic_int *begun = m->ud;
    int ahead, most = 0;
    lt_grad_off(m->net.ctx);
    for (int i = 0; i < PASSES; i++) {
        if (m->rank == 1) {
            pause_ms(i < 3 ? 100 : 2);
            atomic_fetch_add(begun, 1);
        }
        if (!forward(&m->net, DEEP, (uint64_t)i, 0))
            return lt_errcode();
        ahead = i + 1 - atomic_load(begun);
        most = ahead > most ? ahead : most;
    }
    lt_grad_on(m->net.ctx);
    CHECK_EQ(lt_pipeline_forwards(m->pipeline), 0);
    if (m->rank == 0)
        CHECK_EQ(most, MOST_AHEAD);
    return LT_OK;
}

TEST(a_sender_waits_for_a_slow_reader)
{
    atomic_int begun = 0;
    member members[MOST_RANKS];
    check_run(&(plan){.stages = 2, .micro = 1}, 2, evaluate, &begun, members);
}

/* Passes without gradients while those of an unfinished step are in flight. */
static lt_status evaluate_within(member *m)
{
    for (int i = 0; i < m->plan->micro; i++) {
        LT_TRY(micro_batch(m, i, (uint64_t)i));
        lt_grad_off(m->net.ctx);
        for (int k = 0; k < 7; k++)
            if (!forward(&m->net, m->plan->form, (uint64_t)(100 + k), (uint64_t)m->rank + 1))
                return lt_errcode();
        lt_grad_on(m->net.ctx);
        release_made(&m->net);
    }
    for (int i = 0; i < m->plan->micro; i++)
        LT_TRY(micro_batch(m, i, (uint64_t)(m->plan->micro + i)));
    for (int i = 0; i < LAYERS; i++)
        if (!lt_is_meta(m->net.w[i]))
            digest(lt_grad(m->net.w[i]), m->grads[i]); /* drains */
    return LT_OK;
}

TEST(passes_without_gradients_change_nothing)
{
    for (int k = 0; k < 12; k++) {
        plan p = mixed_plan(k, LT_F32);
        p.stages = 2 + k % 3;
        p.micro = 3;
        p.lag = k % 4;
        p.shares = false;
        check_against_one(&p, evaluate_within);
    }
}

/* ==== Digests and files ======================================================================= */

static const char *const names[LAYERS] = {"w0", "w1", "w2", "w3"};
static const char *const meta[] = {"step", "7"};

typedef struct saved {
    const char *path;
    lt_status status[MOST_RANKS];
    char hex[MOST_RANKS][65], text[256]; /* text: the message of rank 0 */
} saved;

static lt_status save(member *m)
{
    saved *s = m->ud;
    s->status[m->rank] = lt_pipeline_save(m->pipeline, s->path, LAYERS, names, m->net.w, 1, meta);
    if (m->rank == 0 && s->status[0] != LT_OK)
        snprintf(s->text, sizeof s->text, "%s", lt_errmsg());
    return lt_pipeline_sha256(m->pipeline, m->net.params, s->hex[m->rank]);
}

static size_t read_file(const char *path, char *to, size_t most)
{
    FILE *f = fopen(path, "rb");
    CHECK(f != NULL);
    size_t n = fread(to, 1, most, f);
    fclose(f);
    return n;
}

static void save_alone(const char *path, char hex[65])
{
    net n;
    CHECK_OK(make_net(&n, LT_F32));
    CHECK_OK(lt_params_place(n.params));
    CHECK_OK(lt_file_save(path, LAYERS, names, n.w, 1, meta));
    CHECK_OK(lt_params_sha256(n.params, hex));
    destroy_net(&n);
}

TEST(a_file_of_all_stages_is_that_of_one_context)
{
    char one[64], other[64], hex[65], a[4096], b[4096];
    snprintf(one, sizeof one, "/tmp/lt_pipeline_%d.one", (int)getpid());
    snprintf(other, sizeof other, "/tmp/lt_pipeline_%d.all", (int)getpid());
    save_alone(one, hex);
    for (int stages = 1; stages <= LAYERS; stages++)
        for (int replicas = 1; replicas <= 2; replicas++) {
            saved s = {.path = other};
            member members[MOST_RANKS];
            check_run(&(plan){.stages = stages, .micro = 1}, stages * replicas, save, &s, members);
            for (int i = 0; i < stages * replicas; i++) {
                CHECK_EQ(s.status[i], LT_OK);
                CHECK_STR(s.hex[i], hex);
            }
            size_t n = read_file(one, a, sizeof a);
            CHECK(n > LAYERS * WIDTH * WIDTH * sizeof(float) && n < sizeof a);
            CHECK_EQ(read_file(other, b, sizeof b), n);
            CHECK(memcmp(a, b, n) == 0);
            remove(other);
        }
    remove(one);
}

TEST(a_file_that_cannot_be_written)
{
    saved s = {.path = "/nowhere/file"};
    member members[MOST_RANKS];
    check_run(&(plan){.stages = 3, .micro = 1, .timeout = 20}, 3, save, &s, members);
    CHECK_EQ(s.status[0], LT_EFILE);
    CHECK(strstr(s.text, "/nowhere/file") != NULL);
    CHECK(s.status[1] == LT_OK && s.status[2] == LT_OK);
    for (int i = 0; i < 3; i++)
        CHECK_STR(s.hex[i], s.hex[0]);
    CHECK_EQ(strlen(s.hex[0]), 64);
}

/* Rank 1 has no part in the file, and fails when it sees it. */
static lt_status save_or_fail(member *m)
{
    saved *s = m->ud;
    if (m->rank == 0)
        return s->status[0] =
                   lt_pipeline_save(m->pipeline, s->path, LAYERS, names, m->net.w, 1, meta);
    for (int i = 0; i < 20000 && access(s->path, F_OK) != 0; i++)
        usleep(1000);
    lt_fail(LT_EDATA, "rank 1 has bad data");
    lt_group_fail(m->group);
    return LT_EDATA;
}

TEST(a_complete_file_is_saved_even_if_another_rank_fails)
{
    char path[64], a[4096];
    snprintf(path, sizeof path, "/tmp/lt_pipeline_%d.fails", (int)getpid());
    saved s = {.path = path};
    member members[MOST_RANKS];
    run(&(plan){.stages = 1, .micro = 1, .timeout = 20}, 2, save_or_fail, &s, members);
    CHECK_EQ(s.status[0], LT_OK);
    CHECK_EQ(members[1].status, LT_EDATA);
    CHECK(read_file(path, a, sizeof a) > LAYERS * WIDTH * WIDTH * sizeof(float));
    remove(path);
}

/* ==== Ends ==================================================================================== */

/* The last stage does not use the result of the first layer. ud: the number of micro-batches. */
static lt_status run_other_program(member *m)
{
    net_form form = m->rank == 0 ? WIDE : DEEP;
    for (int i = 0; i < *(int *)m->ud; i++) {
        lt_tensor *loss = forward(&m->net, form, (uint64_t)i, 0);
        LT_TRY(loss ? lt_backward(loss, NULL) : lt_errcode());
    }
    return lt_pipeline_drain(m->pipeline);
}

/* Whether a rank fails because another one runs another program, or because that has ended. */
static bool has_noticed(const member *m)
{
    return (m->status == LT_EDESYNC && strstr(m->text, "run different programs")) ||
           (m->status == LT_EPEER && strstr(m->text, "stage"));
}

TEST(stages_that_run_different_programs)
{
    for (int micro = 1; micro <= 4; micro++)
        for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++) {
            member members[MOST_RANKS];
            double began = lt__seconds();
            run(&(plan){.stages = 2, .micro = micro, .kind = kind, .timeout = 3}, 2,
                run_other_program, &micro, members);
            CHECK(has_noticed(&members[0]));
            CHECK(micro == 1 || has_noticed(&members[1]));
            CHECK(lt__seconds() - began < 30);
        }
}

/* ud: the number of micro-batches before the end of the program, which has no optimizer step. */
static lt_status stop_early(member *m)
{
    int n = *(int *)m->ud;
    for (int i = 0; i < n; i++)
        LT_TRY(micro_batch(m, i, (uint64_t)i));
    LT_TRY(lt_scope_push(m->net.ctx));
    lt_status status = forward(&m->net, m->plan->form, (uint64_t)n, 0) ? LT_OK : lt_errcode();
    lt_pipeline_pop_scope(m->pipeline);
    lt_pipeline_free(m->pipeline); /* the forward pass is not complete */
    m->pipeline = NULL;
    return status;
}

TEST(a_pipeline_may_be_freed_with_passes_in_flight)
{
    for (int n = 0; n <= 6; n++)
        for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++) {
            plan p = {.stages = 3,
                      .micro = 8,
                      .lag = n % 3,
                      .kind = kind,
                      .form = n % 2 == 1 ? WIDE : DEEP};
            member members[MOST_RANKS];
            check_run(&p, 3, stop_early, &n, members);
        }
}

/* A second pipeline in the same group gets no messages of the first one. */
static lt_status open_again(member *m)
{
    int n = 3;
    m->ud = &n;
    LT_TRY(stop_early(m));
    release_made(&m->net);
    destroy_net(&m->net);
    LT_TRY(make_net(&m->net, m->plan->dtype));
    LT_TRY(open_pipeline(m));
    return train(m);
}

TEST(a_group_may_have_one_pipeline_after_another)
{
    plan p = {.stages = 3, .micro = 4, .kind = LT_ZERO_BUBBLE, .form = WIDE};
    check_against_one(&p, open_again);
}
