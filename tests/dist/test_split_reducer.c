/* test_split_reducer.c - a reducer over a part of a job, of threads or of processes, gives the same
 * bits as one over a whole group of that size. */
#include <sys/wait.h>
#include <unistd.h>

#include "dist/group.h"
#include "tests/dist/fake_net.h"
#include "tests/dist/trainer.h"

enum { RANKS = 5 };

typedef struct member { /* a rank of a job */
    rank rank;          /* and of its part */
    const char *parts; /* "01011": the part of each rank of the job; NULL for a job that is whole */
    lt_group *job;
} member;

/* Trains in the rank's part of the job. */
static void train_part(member *m)
{
    rank *r = &m->rank;
    r->group = m->job;
    if (m->parts)
        r->result->status = lt__group_split(m->job, m->parts[lt_group_rank(m->job)], &r->group);
    if (r->result->status != LT_OK) {
        snprintf(r->result->text, sizeof r->result->text, "%s", lt_errmsg());
    } else {
        r->rank = lt_group_rank(r->group);
        run_rank(r); /* closes r->group */
    }
    if (m->parts)
        lt_group_close(m->job);
}

static void *run_member(void *ud)
{
    train_part(ud);
    return NULL;
}

static void train_threads(int n, const char *parts, const plan *plans, result *results)
{
    lt_group *group[RANKS];
    member m[RANKS];
    CHECK_OK(lt_local_open(n, &(lt_group_config){.timeout = 30}, group));
    for (int i = 0; i < n; i++) {
        m[i] = (member){
            {.plan = &plans[parts ? parts[i] - '0' : 0], .result = &results[i]}, parts, group[i]};
        pthread_create(&m[i].rank.thread, NULL, run_member, &m[i]);
    }
    for (int i = 0; i < n; i++)
        pthread_join(m[i].rank.thread, NULL);
}

static void train_process(int i, fake_hub *hub, const char *nodes, member *m)
{
    int node_of[RANKS], n = (int)strlen(nodes);
    for (int k = 0; k < n; k++)
        node_of[k] = nodes[k] - '0';
    lt_net net = fake_net_new(hub, i, n, node_of);
    m->rank.result->status = lt__mpi_open_over(&net, &(lt_group_config){.timeout = 30}, &m->job);
    if (m->rank.result->status == LT_OK)
        train_part(m);
    _exit(0);
}

static void train_processes(const char *nodes, const char *parts, const plan *plans,
                            result *results)
{
    int n = (int)strlen(nodes);
    size_t bytes = RANKS * sizeof *results;
    fake_hub *hub = fake_hub_new();
    result *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    fflush(stdout);
    for (int i = 0; i < n; i++)
        if (fork() == 0) {
            member m = {
                {.plan = &plans[parts ? parts[i] - '0' : 0], .result = &shared[i]}, parts, NULL};
            shared[i].status = LT_EINVAL; /* until it is done */
            train_process(i, hub, nodes, &m);
        }
    while (wait(NULL) > 0)
        ;
    memcpy(results, shared, bytes);
    munmap(shared, bytes);
    fake_hub_free(hub);
}

/* Threads if nodes is NULL. */
static void train_job(int n, const char *nodes, const char *parts, const plan *plans,
                      result *results)
{
    memset(results, 0, RANKS * sizeof *results);
    if (nodes)
        train_processes(nodes, parts, plans, results);
    else
        train_threads(n, parts, plans, results);
    for (int i = 0; i < n; i++)
        if (results[i].status != LT_OK)
            FAIL("nodes %s, rank %d: %s", nodes ? nodes : "none", i, results[i].text);
}

static void check_equal(const result *x, const result *want)
{
    CHECK(memcmp(x->w, want->w, sizeof x->w) == 0);
    CHECK(memcmp(x->loss, want->loss, sizeof x->loss) == 0);
    CHECK(memcmp(x->mean, want->mean, sizeof x->mean) == 0);
    CHECK(memcmp(x->var, want->var, sizeof x->var) == 0);
}

/* Trains two nets, each in its part of a job, and both in jobs of their own. nodes: of the job and
 * of each part. */
static void compare_with_whole(const char *const nodes[3], const plan *like)
{
    static const char parts[] = "01011";
    static result both[RANKS], alone[RANKS];
    plan plans[2] = {*like, *like};
    plans[0].ranks = 2;
    plans[1].ranks = 3;
    memcpy(plans[1].rows, (int[STEPS]){7, 12, 6, 13, 9}, sizeof plans[1].rows);
    train_job(RANKS, nodes[0], parts, plans, both);
    for (int part = 0; part < 2; part++) {
        train_job(plans[part].ranks, nodes[part + 1], NULL, &plans[part], alone);
        for (int i = 0, k = 0; i < RANKS; i++)
            if (parts[i] == '0' + part)
                check_equal(&both[i], &alone[k++]);
    }
}

TEST(a_reducer_of_a_part_gives_the_same_bits)
{
    static const char *const nodes[][3] = {
        {NULL, NULL, NULL}, {"00000", "00", "000"}, {"00111", "01", "011"}, {"01220", "02", "120"}};
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
    static result results[RANKS];
    plan plans[2] = {usual, usual};
    plans[0].ranks = 2;
    plans[1].ranks = 3;
    plans[1].odd = ODD_CLIP;
    train_threads(RANKS, "01011", plans, results);
    CHECK_STR(results[3].text, "the ranks disagree: the last optimizer step: rank 1 has "
                               "'optimizer 1: clip = 10000', rank 3 has 'optimizer 1: clip = "
                               "1000'");
    plans[1].odd = EVEN;
    plans[0].fault = plans[1].fault = "leave:rank=3:step=3";
    train_threads(RANKS, "01011", plans, results);
    CHECK_EQ(results[3].status, LT_EDONE);
    CHECK_STR(results[3].text, "rank 3 leaves in step 3 (fault leave)");
    CHECK(strstr(results[1].text, "rank 3 exited while rank "));
    plans[0].fault = plans[1].fault = "leave:rank=5:step=3";
    train_threads(RANKS, "01011", plans, results);
    CHECK(strstr(results[0].text, "the fault's rank 5 is out of range 0 to 4"));
}
