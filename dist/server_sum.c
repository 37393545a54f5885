/* server_sum.c - the allreduce of a synchronous parameter server; see server_sum.h. */
#include <stdlib.h>

#include "core/tensor.h"
#include "dist/server_sum.h"
#include "dist/sum.h"

typedef struct call { /* an allreduce of this rank */
    lt_group *group;
    const lt_sum *sum;
    char *wire; /* an array in the wire dtype; NULL if that is the dtype of the sum */
    size_t wire_bytes;
} call;

static lt_status send(const call *c, int to, const void *data)
{
    const lt_sum *s = c->sum;
    if (c->wire)
        lt_convert(c->wire, s->wire, data, s->dtype, (size_t)s->count);
    return lt_group_send(c->group, to, c->wire ? c->wire : data, c->wire_bytes);
}

static lt_status receive(const call *c, int from, void *data)
{
    const lt_sum *s = c->sum;
    LT_TRY(lt_group_receive(c->group, from, c->wire ? c->wire : data, c->wire_bytes));
    if (c->wire)
        lt_convert(data, s->dtype, c->wire, s->wire, (size_t)s->count);
    return LT_OK;
}

/* On rank 0. `arrays` is memory for the arrays of the other ranks, `each` bytes for each rank. */
static lt_status serve(const call *c, char *arrays, size_t each)
{
    const lt_sum *s = c->sum;
    lt_summand share[LT_MAX_SUMMANDS] = {{s->data, 1}};
    int n = lt_group_size(c->group);
    for (int rank = 1; rank < n; rank++) {
        share[rank] = (lt_summand){arrays + (size_t)(rank - 1) * each, 1};
        LT_TRY(receive(c, rank, share[rank].data));
    }
    lt__sum_arrays(share, n, s->dtype, s->wire, 0, s->count);
    for (int rank = 1; rank < n; rank++)
        LT_TRY(send(c, rank, s->data));
    return LT_OK;
}

static size_t padded(int64_t count, lt_dtype dtype)
{
    return ((size_t)count * lt_dtype_bytes(dtype) + 63) & ~(size_t)63;
}

lt_status lt__server_sum(lt_server_sum *server, lt_group *group, const lt_sum *s)
{
    bool is_server = lt_group_rank(group) == 0;
    size_t each = padded(s->count, s->dtype);
    size_t arrays = is_server ? (size_t)(lt_group_size(group) - 1) * each : 0;
    size_t wire = s->wire != s->dtype ? padded(s->count, s->wire) : 0;
    LT_TRY(LT_RESERVE(server->memory, arrays + wire, &server->capacity, "for the sums of rank 0"));
    const call c = {group, s, wire > 0 ? server->memory + arrays : NULL,
                    (size_t)s->count * lt_dtype_bytes(s->wire)};
    lt__sum_arrays(&(lt_summand){s->data, s->scale}, 1, s->dtype, s->wire, 0, s->count);
    if (is_server)
        return serve(&c, server->memory, each);
    LT_TRY(send(&c, 0, s->data));
    return receive(&c, 0, s->data);
}

void lt__server_sum_free(lt_server_sum *server) { free(server->memory); }
