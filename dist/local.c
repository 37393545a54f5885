/* local.c - the transport of ranks that are threads of one process: always there. Their board is in
 * ordinary memory, and the data of a rank is where its pointer says.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "dist/group.h"
#include "dist/sum.h"
#include "dist/team.h"

typedef struct shared { /* by all ranks of a job */
    atomic_int refs;
    _Alignas(128) char board[];
} shared;

typedef struct local { /* of one rank */
    lt_team team, aside; /* in either lane */
    shared *shared;
} local;

static lt_team *team_of(void *self) { return &((local *)self)->team; }

static lt_status allreduce(void *self, const lt_sum *sum)
{
    return lt__team_allreduce(team_of(self), sum);
}

static lt_status allreduce_aside(void *self, const lt_sum *sum, bool spin)
{
    local *l = self;
    l->aside.spin = spin;
    return lt__team_allreduce(&l->aside, sum);
}

static lt_status broadcast(void *self, const char *what, void *data, size_t bytes, int root)
{
    return lt__team_broadcast(team_of(self), what, data, bytes, root);
}

static lt_status barrier(void *self, const char *what)
{
    lt_wish wish = lt__wish(LT_BARRIER, what, 0);
    return lt__team_agree(team_of(self), &wish);
}

static lt_status send(void *self, int to, const void *data, size_t bytes)
{
    return lt__team_send(team_of(self), to, data, bytes);
}

static lt_status receive(void *self, int from, void *data, size_t bytes)
{
    return lt__team_receive(team_of(self), from, data, bytes);
}

static uint64_t bytes_so_far(const void *self)
{
    const local *l = self;
    return l->team.bytes + l->aside.bytes;
}

static void fail(void *self, lt_status code, const char *text)
{
    lt__team_fail(team_of(self), team_of(self)->rank, code, text);
}

static bool failure(const void *self, int *rank, lt_status *code, char *text, size_t bytes)
{
    return lt__team_failure(&((const local *)self)->team, rank, code, text, bytes);
}

static void at(void *self, const char *where, int64_t step)
{
    lt__team_at(team_of(self), where, step);
}

static bool speaks(void *self, double seconds) { return lt__team_speaks(team_of(self), seconds); }
static void set_spin(void *self, bool spin) { team_of(self)->spin = spin; }

static int cpus(const void *self)
{
    return lt_cpu_count() / ((const local *)self)->team.size;
}

static int local_rank(const void *self) { return ((const local *)self)->team.rank; }

static void release(shared *s)
{
    if (atomic_fetch_sub(&s->refs, 1) == 1)
        free(s);
}

static void leave(void *self)
{
    local *l = self;
    lt__team_leave(&l->team);
    release(l->shared);
    free(l);
}

static const lt_transport transport = {
    .name = "local", .allreduce = allreduce, .allreduce_aside = allreduce_aside,
    .broadcast = broadcast, .barrier = barrier, .send = send, .receive = receive,
    .bytes = bytes_so_far, .fail = fail, .failure = failure, .at = at, .speaks = speaks,
    .set_spin = set_spin, .cpus = cpus, .local_rank = local_rank,
    .close = leave,
};

static shared *shared_new(int size)
{
    size_t bytes = (sizeof(shared) + lt__board_bytes(size) + 127) & ~(size_t)127;
    shared *s = aligned_alloc(128, bytes);
    if (!s)
        return NULL;
    memset(s, 0, bytes);
    atomic_init(&s->refs, 1);
    lt__board_init((lt_board *)s->board, size);
    return s;
}

static lt_group *member(shared *s, int rank, int size, const lt_group_config *config)
{
    local *l = calloc(1, sizeof *l);
    if (!l)
        return NULL;
    atomic_fetch_add(&s->refs, 1);
    l->shared = s;
    l->team = (lt_team){.board = (lt_board *)s->board, .rank = rank, .size = size,
                        .timeout = lt_group_timeout(config)};
    l->aside = l->team;
    l->aside.lane = 1;
    return lt__group_new(&transport, l, rank, size, l->team.timeout);
}

lt_status lt_local_open(int n, const lt_group_config *config, lt_group **group)
{
    static const lt_group_config defaults;
    if (n < 1 || n > LT_MOST_SHARES)
        return lt_fail(LT_EUSAGE, "there can be 1 to %d ranks in a process, not %d",
                       LT_MOST_SHARES, n);
    shared *s = shared_new(n);
    lt_status status = s ? LT_OK : lt_fail(LT_ENOMEM, "out of memory for %d ranks", n);
    int made = 0;
    while (status == LT_OK && made < n) {
        group[made] = member(s, made, n, config ? config : &defaults);
        status = group[made] ? LT_OK : lt_fail(LT_ENOMEM, "out of memory for %d ranks", n);
        made += status == LT_OK;
    }
    while (status != LT_OK && made > 0)
        lt_group_close(group[--made]);
    if (s)
        release(s);
    return status;
}
