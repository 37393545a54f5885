/* ring.c - collectives between nodes; see ring.h.
 *
 * Each collective is made of flows. A flow sends chunks to one rank and receives chunks from one
 * rank. A chunk is sent as soon as the chunks that it depends on have arrived.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "dist/deadline.h"
#include "dist/ring.h"
#include "dist/sum.h"

/* CHUNK: bytes of a chunk in the wire dtype. MPI over TCP uses a rendezvous from 64 KiB on, which
 * halves the rate when both directions are busy, so chunks are smaller. DEPTH: chunks in transit in
 * each direction. */
enum { CHUNK = 48 << 10, DEPTH = 64 };
enum { SMALL = 32 << 10 };                /* sums of at most that many bytes use pairs of members */
static const double SPIN_SECONDS = 30e-6; /* an MPI test takes a few microseconds */
static const double LOST_SECONDS = 0.5;   /* see lost() */
enum { SHORTEST_NS = 1000, LONGEST_NS = 1000 * 1000 }; /* limits of a sleep */

lt_status lt__ring_open(lt_ring *r)
{
    return LT_CALLOC(r->slots, 2 * DEPTH * CHUNK, "for chunks in transit");
}

void lt__ring_close(lt_ring *r) { free(r->slots); }

static int member(const lt_ring *r, int index) { return r->rank[(index + r->size) % r->size]; }

const char *lt__ring_last_seen(const lt_ring *r, int rank)
{
    return r->size > 1 && member(r, r->index - 1) == rank ? r->before : "";
}

/* ==== Waiting ================================================================================= */

typedef struct backoff {
    long ns;            /* length of the next sleep */
    double spins_until; /* time; until then, no sleep */
    lt_deadline deadline;
} backoff;

static backoff new_backoff(const lt_ring *r)
{
    double now = lt__seconds();
    return (backoff){
        SHORTEST_NS, r->spin ? now + SPIN_SECONDS : now, {now + r->timeout + r->grace, now}};
}

/* Called after progress: restarts the timeout, but keeps the length of the sleeps. A running flow
 * needs less frequent tests than one that has just begun, because enough chunks are in transit, and
 * each test takes time from the computing threads. */
static void reset_backoff(const lt_ring *r, backoff *p)
{
    long ns = p->ns;
    *p = new_backoff(r);
    p->ns = ns;
}

static lt_status back_off(lt_ring *r, backoff *p, int rank, const char *what)
{
    double now = lt__seconds();
    if (now < p->spins_until)
        return LT_OK;
    r->missing = rank;
    LT_TRY(r->check(r->ud, r, rank, what));
    if (lt__deadline_is_over(&p->deadline))
        return lt_fail(LT_EPEER, "rank %d did not reach %s within %g s%s", rank, what, r->timeout,
                       lt__ring_last_seen(r, rank));
    nanosleep(&(struct timespec){.tv_nsec = p->ns}, NULL);
    p->ns = LT_MIN(2 * p->ns, LONGEST_NS);
    return LT_OK;
}

lt_status lt__ring_fail_peer(const lt_ring *r, int rank, const char *what)
{
    return lt_fail(LT_EPEER, "rank %d was lost while rank %d was waiting for it in %s%s", rank,
                   r->net->rank, what, lt__ring_last_seen(r, rank));
}

/* The network has lost a rank. Fails with the reason if check() knows it soon: the rank may have
 * failed before, and other ranks may be about to say so. */
static lt_status lost(lt_ring *r, int rank, const char *what)
{
    double until = lt__seconds() + LOST_SECONDS;
    r->missing = rank;
    do {
        LT_TRY(r->check(r->ud, r, rank, what));
        nanosleep(&(struct timespec){.tv_nsec = LONGEST_NS}, NULL);
    } while (lt__seconds() < until);
    return lt__ring_fail_peer(r, rank, what);
}

/* ==== Flows =================================================================================== */

typedef struct flow {
    const char *what;
    int channel;
    int to, from; /* ranks of the network */
    char *data;   /* (count) of dtype */
    lt_dtype dtype, wire;
    int64_t count; /* elements */
    /* number of parts of data. They are sent in descending order, beginning with `part`, and
     * received beginning with the one before `part` */
    int64_t parts, part;
    int64_t per_part; /* chunks of each part */
    int64_t out, in;  /* number of chunks to send and to receive */
    int64_t lead;     /* chunk i is sent when i - lead + 1 chunks have been received */
    int64_t adds;     /* the first `adds` chunks received are added, the others are written */
    bool in_place;    /* chunks are sent from data, not from a slot */
} flow;

typedef struct piece {
    int64_t first, count;
} piece; /* elements of a chunk */

static int64_t wire_bytes(const flow *f) { return (int64_t)lt_dtype_bytes(f->wire); }

/* The first element of a part. Parts begin at multiples of 64 bytes. */
static int64_t part_begin(const flow *f, int64_t part)
{
    int64_t line = 64 / wire_bytes(f), lines = (f->count + line - 1) / line;
    int64_t at = lines * part / f->parts * line;
    return LT_MIN(at, f->count);
}

static piece piece_at(const flow *f, int64_t i, bool is_in)
{
    int64_t max = CHUNK / wire_bytes(f);
    int64_t part = f->part - i / f->per_part - is_in;
    part = (part % f->parts + f->parts) % f->parts;
    int64_t first = part_begin(f, part) + i % f->per_part * max, end = part_begin(f, part + 1);
    first = LT_MIN(first, end);
    return (piece){first, LT_MIN(end - first, max)};
}

static int64_t chunks_of(int64_t count, lt_dtype wire)
{
    int64_t max = CHUNK / (int64_t)lt_dtype_bytes(wire);
    return (count + max - 1) / max;
}

static char *place(const flow *f, piece p)
{
    return f->data + (size_t)p.first * lt_dtype_bytes(f->dtype);
}

static void convert(void *to, lt_dtype to_dtype, const void *from, lt_dtype from_dtype, int64_t n)
{
    if (to_dtype == from_dtype)
        memcpy(to, from, (size_t)n * lt_dtype_bytes(to_dtype));
    else
        lt_convert(to, to_dtype, from, from_dtype, (size_t)n);
}

static void use(const flow *f, int64_t i, const char *slot)
{
    piece p = piece_at(f, i, true);
    if (i < f->adds)
        lt__sum_add(place(f, p), f->dtype, slot, f->wire, p.count);
    else
        convert(place(f, p), f->dtype, slot, f->wire, p.count);
}

typedef struct window { /* the chunks of one direction; [done, begun) are in transit */
    int64_t begun, done;
    char *slots;
    lt_request request[DEPTH];
} window;

static char *slot_of(const window *w, int64_t i) { return w->slots + i % DEPTH * CHUNK; }

static bool has_room(const window *w, int64_t all)
{
    return w->begun < all && w->begun < w->done + DEPTH;
}

static int start_receive_chunk(const lt_ring *r, const flow *f, window *w)
{
    int64_t i = w->begun++;
    size_t bytes = (size_t)(piece_at(f, i, true).count * wire_bytes(f));
    return r->net->receive(r->net->self, f->from, f->channel, slot_of(w, i), bytes,
                           &w->request[i % DEPTH]);
}

static int start_send_chunk(lt_ring *r, const flow *f, window *w)
{
    int64_t i = w->begun++;
    piece p = piece_at(f, i, false);
    size_t bytes = (size_t)(p.count * wire_bytes(f));
    char *from = f->in_place ? place(f, p) : slot_of(w, i);
    if (!f->in_place)
        convert(from, f->wire, place(f, p), f->dtype, p.count);
    r->bytes += bytes;
    return r->net->send(r->net->self, f->to, f->channel, from, bytes, &w->request[i % DEPTH]);
}

/* Tests the first chunk in transit. 1 if it is done, 0 if not, -1 if the other rank is lost. */
static int test_first(const lt_ring *r, window *w)
{
    if (w->done == w->begun)
        return 0;
    return r->net->test(r->net->self, &w->request[w->done % DEPTH]);
}

/* Whether received chunk i may be written to its place. It must wait until an earlier chunk has
 * been sent from the same memory. */
static bool is_writable(const flow *f, const window *out, int64_t i)
{
    return !f->in_place || f->adds == 0 || i - f->adds < out->done;
}

static lt_status run_flow(lt_ring *r, const flow *f)
{
    window out = {.slots = r->slots}, in = {.slots = r->slots + DEPTH * CHUNK};
    backoff p = new_backoff(r);
    while (in.done < f->in || out.done < f->out) {
        bool moved = false;
        int received = 0, sent = 0;
        if (has_room(&in, f->in)) {
            received = start_receive_chunk(r, f, &in);
            moved = true;
        }
        if (has_room(&out, f->out) && out.begun < in.done + f->lead) {
            sent = start_send_chunk(r, f, &out);
            moved = true;
        }
        if (received == 0 && is_writable(f, &out, in.done) && (received = test_first(r, &in)) > 0) {
            use(f, in.done, slot_of(&in, in.done));
            in.done++;
        }
        if (sent == 0 && (sent = test_first(r, &out)) > 0)
            out.done++;
        if (received < 0 || sent < 0)
            return lost(r, received < 0 ? f->from : f->to, f->what);
        if (moved || received || sent)
            reset_backoff(r, &p);
        else
            LT_TRY(back_off(r, &p, in.done < f->in ? f->from : f->to, f->what));
    }
    r->missing = r->net->rank;
    return LT_OK;
}

/* ==== Collectives ============================================================================= */

/* A flow of plain bytes, in one part, sent from data. */
static flow plain_flow(const char *what, int channel, void *data, size_t bytes)
{
    return (flow){.what = what,
                  .channel = channel,
                  .data = data,
                  .dtype = LT_U8,
                  .wire = LT_U8,
                  .in_place = true,
                  .count = (int64_t)bytes,
                  .parts = 1,
                  .part = 0,
                  .per_part = chunks_of((int64_t)bytes, LT_U8),
                  .lead = INT64_MAX / 2};
}

typedef struct header { /* a multiple of 64 bytes, so that each header is one part */
    _Alignas(64) lt_coll_sig sig;
    char seen[LT_SEEN_BYTES];
} header;

lt_status lt__ring_match(lt_ring *r, const lt_coll_sig *sig)
{
    int before = member(r, r->index - 1);
    header pair[2] = {{.sig = *sig}};
    memcpy(pair[0].seen, r->seen, sizeof r->seen);
    flow f = {.what = sig->what,
              .channel = r->channel,
              .to = member(r, r->index + 1),
              .from = before,
              .data = (char *)pair,
              .dtype = LT_U8,
              .wire = LT_U8,
              .count = sizeof pair,
              .parts = 2,
              .per_part = 1,
              .out = 1,
              .in = 1,
              .lead = 1};
    LT_TRY(run_flow(r, &f));
    memcpy(r->before, pair[1].seen, sizeof r->before);
    return lt__coll_sigs_match(&pair[1].sig, sig)
               ? LT_OK
               : lt__coll_sigs_fail(&pair[1].sig, before, sig, r->net->rank);
}

/* Sends one chunk to a member, if `to`, and receives one from it, if `from`. */
static lt_status exchange(lt_ring *r, flow f, int with, bool to, bool from)
{
    f.to = f.from = member(r, with);
    f.out = to;
    f.in = from;
    return run_flow(r, &f);
}

/* Recursive doubling. Members beyond the largest power of two first send their values to another
 * member, and receive the result at the end. */
static lt_status recursive_doubling(lt_ring *r, flow f)
{
    int whole = 1, i = r->index;
    while (2 * whole <= r->size)
        whole *= 2;
    int rest = r->size - whole;
    f.lead = f.adds = 1;
    if (i >= whole) {
        LT_TRY(exchange(r, f, i - whole, true, false));
        f.adds = 0;
        return exchange(r, f, i - whole, false, true);
    }
    if (i < rest)
        LT_TRY(exchange(r, f, i + whole, false, true));
    for (int distance = 1; distance < whole; distance *= 2)
        LT_TRY(exchange(r, f, i ^ distance, true, true));
    return i < rest ? exchange(r, f, i + whole, true, false) : LT_OK;
}

static lt_status ring_allreduce(lt_ring *r, flow f)
{
    f.parts = r->size;
    f.part = r->index;
    f.per_part = 1;
    for (int64_t part = 0; part < f.parts; part++) {
        int64_t n = chunks_of(part_begin(&f, part + 1) - part_begin(&f, part), f.wire);
        f.per_part = LT_MAX(n, f.per_part);
    }
    f.to = member(r, r->index + 1);
    f.from = member(r, r->index - 1);
    f.adds = (f.parts - 1) * f.per_part;
    f.out = f.in = 2 * f.adds;
    f.lead = f.per_part;
    f.in_place = f.wire == f.dtype;
    return run_flow(r, &f);
}

lt_status lt__ring_allreduce(lt_ring *r, const lt_sum *sum)
{
    flow f = {.what = sum->what,
              .channel = r->channel,
              .data = sum->data,
              .dtype = sum->dtype,
              .wire = sum->wire,
              .count = sum->count,
              .parts = 1,
              .per_part = 1};
    if (r->size == 1 || sum->count == 0)
        return LT_OK;
    if (!r->tree && sum->count * wire_bytes(&f) > SMALL)
        return ring_allreduce(r, f);
    int64_t max = CHUNK / wire_bytes(&f);
    for (int64_t left = sum->count; left > 0; left -= f.count) {
        f.count = LT_MIN(left, max);
        LT_TRY(recursive_doubling(r, f));
        f.data += (size_t)f.count * lt_dtype_bytes(f.dtype);
    }
    return LT_OK;
}

/* Forwards the chunks along the ring, beginning at the root. */
lt_status lt__ring_broadcast(lt_ring *r, const char *what, void *data, size_t bytes, int root)
{
    int behind = (r->index - root + r->size) % r->size;
    flow f = plain_flow(what, r->channel, data, bytes);
    f.to = member(r, r->index + 1);
    f.from = member(r, r->index - 1);
    f.in = behind > 0 ? f.per_part : 0;
    f.out = behind < r->size - 1 ? f.per_part : 0;
    if (behind > 0)
        f.lead = 0;
    return run_flow(r, &f);
}

/* ==== Point to point ========================================================================== */

static lt_status pass(lt_ring *r, int with, bool sends, void *data, size_t bytes)
{
    flow f = plain_flow(sends ? "a receive" : "a send", r->base + LT_NET_CONTROL, data, bytes);
    f.to = f.from = with;
    f.out = sends ? f.per_part : 0;
    f.in = sends ? 0 : f.per_part;
    return run_flow(r, &f);
}

lt_status lt__ring_send(lt_ring *r, int to, const void *data, size_t bytes)
{
    uint64_t size = bytes;
    LT_TRY(pass(r, to, true, &size, sizeof size));
    return pass(r, to, true, (void *)data, bytes); /* only read */
}

lt_status lt__ring_receive(lt_ring *r, int from, void *data, size_t bytes)
{
    uint64_t size = 0;
    LT_TRY(pass(r, from, false, &size, sizeof size));
    if (size != bytes)
        return lt_fail(LT_EDESYNC,
                       "the ranks disagree: rank %d sends %llu bytes, but rank %d expects %zu",
                       from, (unsigned long long)size, r->net->rank, bytes);
    return pass(r, from, false, data, bytes);
}
