/* test_split_group.c - parts of a job of threads or processes: their collectives give the same bits
 * as those of a whole group, and work at the same time as those of other groups. */
#include "tests/dist/collectives.h"
#include "tests/dist/split.h"

/* ==== Collectives ============================================================================= */

/* Adds up elements, and updates the digest of all sums. */
static lt_status add_up(lt_group *g, lt_status (*add)(void *ud, const lt_sum *sum), int64_t count,
                        lt_dtype dtype, uint64_t *bits)
{
    adder a = adder_of(g, add, false);
    lt_status status = check_sum(&a, count, dtype, dtype);
    digest_bytes(bits, &a.bits, sizeof a.bits);
    return status;
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
    digest_bytes(bits, x, LARGE * sizeof *x);
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
    return add_up(t->group, add_in_group, 1009, LT_F32, &t->bits);
}

static lt_status use_background(lt_group *g, uint64_t *bits)
{
    task t = {.group = g};
    for (int i = 0; i < 3; i++)
        LT_TRY(lt_group_start(g, sum_in_background, &t));
    lt_status status = add_up(g, add_on_side, 77, LT_F32, bits), later = lt_group_wait(g);
    digest_bytes(bits, &t.bits, sizeof t.bits);
    return status == LT_OK ? later : status;
}

/* All collectives. bits: a digest of the sums, which depend only on the ranks in the group. */
static lt_status use_group(lt_group *g, uint64_t *bits)
{
    static const double numbers[] = {1, 2};
    adder a = adder_of(g, add_in_group, false);
    LT_TRY(check_sums(&a));
    digest_bytes(bits, &a.bits, sizeof a.bits);
    LT_TRY(add_up(g, add_on_side, 1009, LT_F32, bits));
    LT_TRY(add_up(g, add_on_side, 70001, LT_F64, bits));
    LT_TRY(pass_around(g));
    LT_TRY(lt_group_compare(g, "a text", "equal"));
    LT_TRY(lt_group_compare_numbers(g, "numbers", numbers, 2, 0));
    LT_TRY(use_background(g, bits));
    LT_TRY(sum_in_shared_memory(g, bits));
    bool is_tree = lt__group_add_as_tree(g) == LT_OK; /* depends on the nodes */
    digest_bytes(bits, &is_tree, sizeof is_tree);
    return add_up(g, add_in_group, LARGE, LT_F32, bits);
}

static lt_status use_whole(rank *r) { return use_group(r->group, &r->result->bits); }

static lt_status use_part(rank *r, lt_group *part)
{
    int index = 0, size = 0;
    for (int i = 0; i < r->size; i++) {
        bool is_here = r->job->colors[i] == r->job->colors[r->rank];
        index += i < r->rank && is_here;
        size += is_here;
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
    LT_TRY(in_part(r));
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
    for (int i = 0; i < N_LAYOUTS; i += test_stride(3)) {
        const layout *l = &layouts[i];
        job j = job_of_parts(l->nodes, l->colors, use_part, 30);
        j.body = split_and_use;
        check_job(&j, results);
        for (int part = 0; part < 3 && l->alone[part]; part++) {
            check_job(&(job){.nodes = l->alone[part], .body = use_whole, .timeout = 30}, alone);
            for (size_t r = 0; r < strlen(l->nodes); r++)
                if (l->colors[r] == '0' + part && results[r].bits != alone[0].bits)
                    FAIL("nodes %s, parts %s: rank %zu has other bits than a whole group", l->nodes,
                         l->colors, r);
        }
    }
}

/* ==== At the same time ======================================================================== */

/* In the job and two of its parts. */
static lt_status sum_at_the_same_time(rank *r)
{
    lt_group *groups[MOST_GROUPS] = {r->group};
    LT_TRY(split(r, &groups[1]));
    LT_TRY(lt__group_split(r->group, r->rank % 3, &groups[2]));
    lt_status status = sum_beside(groups, 3);
    lt_group_close(groups[2]);
    lt_group_close(groups[1]);
    return status;
}

TEST(groups_work_at_the_same_time)
{
    result results[MOST];
    for (int i = 0; i < N_LAYOUTS; i += test_stride(3)) {
        job j = job_of_parts(layouts[i].nodes, layouts[i].colors, NULL, 30);
        j.body = sum_at_the_same_time;
        check_job(&j, results);
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
        LT_TRY(add_up(part, add_in_group, LARGE, LT_F32, &bits));
        if (round % 3)
            lt_group_close(part);
        LT_TRY(sum_in_shared_memory(r->group, &bits));
        LT_TRY(round % 3 ? LT_OK : add_up(part, add_in_group, 1009, LT_F32, &bits));
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

TEST(a_job_can_be_split_again_but_a_part_cannot)
{
    static const char *const nodes[] = {"ttt", "000"};
    result results[MOST];
    for (int i = 0; i < 2; i++) {
        check_job(&(job){.nodes = nodes[i], .body = split_often, .timeout = 30}, results);
        job j = job_of_parts(nodes[i], "010", split_a_part, 30);
        check_job(&j, results);
    }
}
