/* test_split_reducer.c - a reducer over a part of a job, of threads or of processes, gives the same
 * bits as one over a whole group of that size. */
#include "tests/dist/jobs.h"
#include "tests/dist/trainer.h"

enum { RANKS = 5 };
static const char of_five[] = "01011"; /* the parts of a job of five ranks */

static const plan *plans; /* of each part; set before the ranks start, like the following */
static const char *parts; /* the part of each rank of the job; NULL for a whole job */
static trained *shared;   /* (RANKS) the results */

/* Trains in the rank's part of the job. */
static lt_status train_part(rank *r)
{
    trained *to = &shared[r->rank];
    trainer t = {.plan = &plans[parts ? parts[r->rank] - '0' : 0], .result = to};
    if (parts) {
        LT_TRY(lt__group_split(r->group, parts[r->rank], &t.group));
    } else {
        t.group = r->group;
        r->group = NULL;
    }
    t.rank = lt_group_rank(t.group);
    run_trainer(&t); /* closes t.group */
    return to->status == LT_OK ? LT_OK : lt_fail(to->status, "%s", to->text);
}

/* Trains on all ranks of a job; see jobs.h. */
static void train_job(const char *nodes, const char *with_parts, const plan *with_plans,
                      result results[MOST], trained to[RANKS])
{
    size_t bytes = RANKS * sizeof *shared;
    plans = with_plans;
    parts = with_parts;
    shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    on_ranks(&(job){.nodes = nodes, .body = train_part, .timeout = 30}, results);
    memcpy(to, shared, bytes);
    munmap(shared, bytes);
}

static void check_train_job(const char *nodes, const char *with_parts, const plan *with_plans,
                            trained to[RANKS])
{
    result results[MOST];
    train_job(nodes, with_parts, with_plans, results, to);
    for (int i = 0; i < (int)strlen(nodes); i++)
        if (results[i].status != LT_OK)
            FAIL("nodes %s, rank %d: %s", nodes, i, results[i].text);
}

static void check_equal(const trained *x, const trained *want)
{
    CHECK(memcmp(x->w, want->w, sizeof x->w) == 0);
    CHECK(memcmp(x->loss, want->loss, sizeof x->loss) == 0);
    CHECK(memcmp(x->mean, want->mean, sizeof x->mean) == 0);
    CHECK(memcmp(x->var, want->var, sizeof x->var) == 0);
}

/* Two plans like this one, for the two parts of a job. */
static void plan_parts(const plan *like, plan both[2])
{
    both[0] = both[1] = *like;
    both[0].ranks = 2;
    both[1].ranks = 3;
    set_rows(&both[1], 7, 12, 6, 13, 9);
}

/* Trains two nets, each in its part of a job, and both in jobs of their own. nodes: of the job and
 * of each part. */
static void compare_with_whole(const char *const nodes[3], const plan *like)
{
    static trained both[RANKS], alone[RANKS];
    plan of_parts[2];
    plan_parts(like, of_parts);
    check_train_job(nodes[0], of_five, of_parts, both);
    for (int part = 0; part < 2; part++) {
        check_train_job(nodes[part + 1], NULL, &of_parts[part], alone);
        for (int i = 0, k = 0; i < RANKS; i++)
            if (of_five[i] == '0' + part)
                check_equal(&both[i], &alone[k++]);
    }
}

TEST(a_reducer_of_a_part_gives_the_same_bits)
{
    static const char *const nodes[][3] = {{"ttttt", "tt", "ttt"},
                                           {"00000", "00", "000"},
                                           {"00111", "01", "011"},
                                           {"01220", "02", "120"}};
    for (int i = 0; i < 4; i++) {
        plan p = usual;
        p.sync = true; /* with side sums */
        compare_with_whole(nodes[i], &p);
        p.sync = false;
        p.norm = true;
        p.dtype = LT_F32;
        p.config.wire = LT_BF16;
        compare_with_whole(nodes[i], &p);
    }
}

TEST(faults_and_messages_are_about_ranks_of_the_job)
{
    static trained to[RANKS];
    result results[MOST];
    plan both[2];
    plan_parts(&usual, both);
    both[1].odd = ODD_CLIP;
    train_job("ttttt", of_five, both, results, to);
    CHECK_STR(results[3].text, "the ranks disagree: the last optimizer step: rank 1 has "
                               "'optimizer 1: clip = 10000', rank 3 has 'optimizer 1: clip = "
                               "1000'");
    both[1].odd = EVEN;
    both[0].fault = both[1].fault = "leave:rank=3:step=3";
    train_job("ttttt", of_five, both, results, to);
    CHECK_EQ(results[3].status, LT_EDONE);
    CHECK_STR(results[3].text, "rank 3 leaves in step 3 (fault leave)");
    CHECK(strstr(results[1].text, "rank 3 exited while rank "));
    both[0].fault = both[1].fault = "leave:rank=5:step=3";
    train_job("ttttt", of_five, both, results, to);
    CHECK(strstr(results[0].text, "the fault's rank 5 is out of range 0 to 4"));
}
