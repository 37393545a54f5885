/* test_split_group.c - parts of a job of threads or processes: their collectives give the same bits
 * as those of a whole group, and work at the same time as those of other groups. */
#include "tests/dist/split.h"
#include "tests/dist/sums.h"

enum { WORDS = 100003, LARGE = 70001, TURNS = 25 };

/* ==== Collectives ============================================================================= */

static void digest(uint64_t *bits, const void *data, size_t bytes)
{
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++)
        *bits = (*bits ^ at[i]) * 1099511628211u;
}

typedef lt_status allreduce_fn(lt_group *group, const lt_sum *sum);

/* Sums values that depend on the rank in the group. Compares with the sum in f64. */
static lt_status check_sum(lt_group *g, allreduce_fn *fn, int64_t count, int type, uint64_t *bits)
{
    lt_dtype dtype = sum_types[type].dtype, wire = sum_types[type].wire;
    int n = lt_group_size(g);
    size_t elements = (size_t)count + 1;
    void *data = malloc(elements * sizeof(double));
    double *x = malloc(elements * sizeof *x), *want = calloc(elements, sizeof *want);
    double scale = dtype == LT_I64 ? 1 : 1.0 / 3;
    for (int who = 0; who < n; who++) {
        elements_of(who, count, dtype, data, x);
        for (int64_t i = 0; i < count; i++)
            want[i] += scale * x[i];
    }
    elements_of(lt_group_rank(g), count, dtype, data, x);
    lt_status status = fn(g, &(lt_sum){"numbers", data, count, dtype, wire, scale});
    lt_convert(x, LT_F64, data, dtype, (size_t)count);
    double most = dtype == LT_I64 ? 0 : n * (n + 2) * (roundoff(wire) + roundoff(dtype));
    for (int64_t i = 0; i < count && status == LT_OK; i++)
        if (!(fabs(x[i] - want[i]) <= most))
            status = lt_fail(LT_EINVAL, "%lld %s as %s: element %lld is %g, not %g",
                             (long long)count, lt_dtype_name(dtype), lt_dtype_name(wire),
                             (long long)i, x[i], want[i]);
    digest(bits, data, (size_t)count * lt_dtype_bytes(dtype));
    free(data);
    free(x);
    free(want);
    return status;
}

static lt_status check_sums(lt_group *g, uint64_t *bits)
{
    static const int64_t counts[] = {0, 1, 5, 1009, LARGE}; /* LARGE does not fit in staging */
    for (int type = 0; type < (int)N_SUM_TYPES; type++)
        for (size_t k = 0; k < sizeof counts / sizeof *counts; k++)
            LT_TRY(check_sum(g, lt_group_allreduce, counts[k], type, bits));
    LT_TRY(check_sum(g, lt_group_allreduce_side, 1009, 0, bits));
    return check_sum(g, lt_group_allreduce_side, LARGE, 3, bits);
}

/* Broadcasts from each rank, and sends a message around. */
static lt_status pass_around(lt_group *g)
{
    int own = lt_group_rank(g), n = lt_group_size(g), wrong = 0;
    int *data = calloc(WORDS, sizeof *data);
    size_t bytes = WORDS * sizeof *data;
    lt_status status = LT_OK;
    for (int root = 0; root < n && status == LT_OK; root++) {
        data[0] = data[WORDS - 1] = own == root ? 77 + root : 0;
        status = lt_group_broadcast(g, "words", data, bytes, root);
        wrong += data[0] != 77 + root || data[WORDS - 1] != 77 + root;
    }
    if (status == LT_OK)
        status = lt_group_barrier(g, "here");
    data[0] = data[WORDS - 1] = own == 0 ? 5 : 0;
    if (status == LT_OK && own > 0)
        status = lt_group_receive(g, own - 1, data, bytes);
    if (status == LT_OK && own < n - 1)
        status = lt_group_send(g, own + 1, data, bytes);
    wrong += data[0] != 5 || data[WORDS - 1] != 5;
    free(data);
    return status != LT_OK || wrong == 0 ? status : lt_fail(LT_EINVAL, "%d wrong words", wrong);
}

/* Sums in memory that the ranks of a node share, if they have any. */
static lt_status sum_in_shared_memory(lt_group *g, uint64_t *bits)
{
    lt_external_memory memory;
    bool is_shared = lt__group_alloc_shared(g, LARGE * sizeof(float), &memory);
    float *x = is_shared ? memory.data : calloc(LARGE, sizeof *x);
    for (int i = 0; i < LARGE; i++)
        x[i] = (float)value_of(lt_group_rank(g), i);
    lt_sum sum = {"numbers", x, LARGE, LT_F32, LT_F32, 1};
    lt_status status = lt_group_allreduce(g, &sum);
    digest(bits, x, LARGE * sizeof *x);
    if (is_shared)
        memory.deleter(memory.ud, x);
    else
        free(x);
    return status;
}

typedef struct task {
    lt_group *group;
    uint64_t bits;
} task;

static lt_status sum_in_background(void *ud)
{
    task *t = ud;
    return check_sum(t->group, lt_group_allreduce, 1009, 0, &t->bits);
}

static lt_status use_background(lt_group *g, uint64_t *bits)
{
    task t = {.group = g};
    for (int i = 0; i < 3; i++)
        LT_TRY(lt_group_start(g, sum_in_background, &t));
    lt_status status = check_sum(g, lt_group_allreduce_side, 77, 0, bits), later = lt_group_wait(g);
    digest(bits, &t.bits, sizeof t.bits);
    return status == LT_OK ? later : status;
}

/* All collectives. bits: a digest of the sums, which depend only on the ranks in the group. */
static lt_status use_group(lt_group *g, uint64_t *bits)
{
    static const double numbers[] = {1, 2};
    LT_TRY(check_sums(g, bits));
    LT_TRY(pass_around(g));
    LT_TRY(lt_group_compare(g, "a text", "equal"));
    LT_TRY(lt_group_compare_numbers(g, "numbers", numbers, 2, 0));
    LT_TRY(use_background(g, bits));
    LT_TRY(sum_in_shared_memory(g, bits));
    bool is_tree = lt__group_add_as_tree(g) == LT_OK; /* depends on the nodes */
    digest(bits, &is_tree, sizeof is_tree);
    return check_sum(g, lt_group_allreduce, LARGE, 0, bits);
}

static lt_status use_whole(rank *r) { return use_group(r->group, &r->result->bits); }

static lt_status use_part(rank *r, lt_group *part)
{
    int index = 0, size = 0;
    for (int i = 0; i < r->size; i++) {
        index += i < r->rank && colors[i] == colors[r->rank];
        size += colors[i] == colors[r->rank];
    }
    if (lt_group_rank(part) != index || lt_group_size(part) != size ||
        lt__group_rank_in_job(part, index) != r->rank || lt__group_size_of_job(part) != r->size ||
        lt__group_mail(part) != lt__group_mail(r->group) ||
        lt_group_local_rank(part) != lt_group_local_rank(r->group) ||
        lt_group_cpus(part) != lt_group_cpus(r->group))
        return lt_fail(LT_EINVAL, "rank %d is rank %d of %d", r->rank, lt_group_rank(part),
                       lt_group_size(part));
    return use_group(part, &r->result->bits);
}

static lt_status split_and_use(rank *r)
{
    LT_TRY(in_part(r, use_part));
    return lt_group_barrier(r->group, "the job still works");
}

static const layout layouts[] = {{"tttt", "0101", {"tt", "tt"}},
                                 {"tttttt", "020021", {"ttt", "t", "tt"}},
                                 {"t", "0", {"t"}},
                                 {"0000", "0101", {"00", "00"}},
                                 {"0011", "0011", {"00", "00"}},
                                 {"0011", "0101", {"01", "01"}},
                                 {"0001", "0110", {"01", "00"}},
                                 {"0122", "0110", {"02", "12"}},
                                 {"0123", "1010", {"13", "02"}},
                                 {"001112", "001211", {"00", "112", "1"}},
                                 {"011122", "010101", {"012", "112"}},
                                 {"0101", "0000", {"0101"}}};
enum { N_LAYOUTS = sizeof layouts / sizeof *layouts };

TEST(parts_give_the_same_bits_as_whole_groups)
{
    result results[MOST], alone[MOST];
    for (int i = 0; i < N_LAYOUTS; i++) {
        const layout *l = &layouts[i];
        colors = l->colors;
        run(&(job){.nodes = l->nodes, .body = split_and_use, .timeout = 30}, results);
        for (size_t r = 0; r < strlen(l->nodes); r++)
            CHECK_STR(results[r].text, "");
        for (int part = 0; part < 3 && l->alone[part]; part++) {
            run(&(job){.nodes = l->alone[part], .body = use_whole, .timeout = 30}, alone);
            CHECK_STR(alone[0].text, "");
            for (size_t r = 0; r < strlen(l->nodes); r++)
                if (colors[r] == '0' + part && results[r].bits != alone[0].bits)
                    FAIL("nodes %s, parts %s: rank %zu has other bits than a whole group", l->nodes,
                         colors, r);
        }
    }
}

/* ==== At the same time ======================================================================== */

typedef struct turns { /* sums of one group in its background */
    lt_group *group;
    atomic_int *turn; /* its k-th sum waits for turn k */
    int rank;         /* in the job */
} turns;

/* A sum in a group, checked: each rank contributes its rank in the job + i + k. */
static lt_status sum_turn(lt_group *g, allreduce_fn *fn, int own, int k, int64_t count)
{
    int n = lt_group_size(g), ranks = 0;
    double *x = malloc((size_t)count * sizeof *x);
    for (int i = 0; i < n; i++)
        ranks += lt__group_rank_in_job(g, i);
    for (int64_t i = 0; i < count; i++)
        x[i] = own + (double)i + k;
    lt_status status = fn(g, &(lt_sum){"numbers", x, count, LT_F64, LT_F64, 1});
    for (int64_t i = 0; i < count && status == LT_OK; i++)
        if (x[i] != ranks + n * ((double)i + k))
            status = lt_fail(LT_EINVAL, "sum %d: element %lld is %g", k, (long long)i, x[i]);
    free(x);
    return status;
}

static lt_status sum_by_turns(void *ud)
{
    turns *t = ud;
    for (int k = 0; k < TURNS; k++) {
        while (atomic_load(t->turn) < k)
            pause_ms(1);
        LT_TRY(sum_turn(t->group, lt_group_allreduce, t->rank, k, k % 3 ? 1000 : 40000));
    }
    return LT_OK;
}

/* The background threads of the job and of two parts and the rank's own thread are in collectives.
 * All background threads wait for side sums of this one. */
static lt_status sum_at_the_same_time(rank *r)
{
    atomic_int turn = 0;
    turns t[3] = {{r->group, &turn, r->rank}, {NULL, &turn, r->rank}, {NULL, &turn, r->rank}};
    LT_TRY(split(r, &t[1].group));
    LT_TRY(lt__group_split(r->group, r->rank % 3, &t[2].group));
    lt_status status = LT_OK;
    for (int i = 0; i < 3 && status == LT_OK; i++)
        status = lt_group_start(t[i].group, sum_by_turns, &t[i]);
    for (int k = 0; k < TURNS && status == LT_OK; k++) {
        for (int i = 0; i < 3 && status == LT_OK; i++)
            status = sum_turn(t[i].group, lt_group_allreduce_side, r->rank, k, 100);
        atomic_fetch_add(&turn, 1);
    }
    atomic_store(&turn, TURNS);
    for (int i = 0; i < 3; i++) {
        lt_status done = lt_group_wait(t[i].group);
        status = status == LT_OK ? done : status;
    }
    lt_group_close(t[2].group);
    lt_group_close(t[1].group);
    return status;
}

TEST(groups_work_at_the_same_time)
{
    result results[MOST];
    for (int i = 0; i < N_LAYOUTS; i++) {
        colors = layouts[i].colors;
        job j = {.nodes = layouts[i].nodes, .body = sum_at_the_same_time, .timeout = 30};
        run(&j, results);
        for (size_t r = 0; r < strlen(j.nodes); r++)
            CHECK_STR(results[r].text, "");
    }
}

/* Their memory is mapped and freed in turn with other shared memory. */
static lt_status split_often(rank *r)
{
    for (int round = 0; round < 20; round++) {
        lt_group *part;
        uint64_t bits = 0;
        LT_TRY(lt__group_split(r->group, (r->rank + round) % 2, &part));
        LT_TRY(sum_in_shared_memory(part, &bits));
        LT_TRY(check_sum(part, lt_group_allreduce, LARGE, 0, &bits));
        if (round % 3)
            lt_group_close(part);
        LT_TRY(sum_in_shared_memory(r->group, &bits));
        LT_TRY(round % 3 ? LT_OK : check_sum(part, lt_group_allreduce, 1009, 0, &bits));
        if (round % 3 == 0)
            lt_group_close(part);
    }
    return LT_OK;
}

static lt_status split_a_part(rank *r, lt_group *part)
{
    lt_group *none = NULL;
    lt_status status = lt__group_split(part, 0, &none);
    double seconds;
    if (lt_group_time_allreduce(part, 10, LT_F32, true, &seconds, 1) != LT_EENV)
        return lt_fail(LT_EINVAL, "a part used MPI_Allreduce");
    LT_TRY(lt_group_time_allreduce(part, 10, LT_F32, false, &seconds, 1));
    LT_TRY(lt_group_leave(part));
    LT_TRY(lt_group_barrier(r->group, "no rank has failed"));
    return status == LT_EUSAGE && !none ? LT_OK : lt_fail(LT_EINVAL, "status %d", status);
}

static lt_status split_twice(rank *r) { return in_part(r, split_a_part); }

TEST(a_job_can_be_split_again_but_a_part_cannot)
{
    static const char *const nodes[] = {"ttt", "000"};
    result results[MOST];
    colors = "010";
    for (int i = 0; i < 2; i++) {
        run(&(job){.nodes = nodes[i], .body = split_often, .timeout = 30}, results);
        for (int r = 0; r < 3; r++)
            CHECK_STR(results[r].text, "");
        run(&(job){.nodes = nodes[i], .body = split_twice, .timeout = 30}, results);
        for (int r = 0; r < 3; r++)
            CHECK_STR(results[r].text, "");
    }
}
