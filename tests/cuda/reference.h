/* reference.h - runs a call of an op twice, with the reference kernels on the CPU and with those of
 * the CUDA backend on the CPU emulation, and compares the results.
 *
 * The backend is the libluatrain-cuda.so beside the test program.
 */
#ifndef TESTS_CUDA_REFERENCE_H
#define TESTS_CUDA_REFERENCE_H

#include "autograd/tape.h"
#include "ops/backend/plugin.h"
#include "tests/cuda/libs.h"

typedef struct machine {
    lt_ctx *ctx;
    lt_accelerator cuda;
    uint64_t digest;      /* of all values compared since the test set it to 0 */
    int64_t kernel_waits; /* waits inside kernels since the test set it to 0 */
    /* called if a kernel of the device fails; its results are not compared then. NULL: the test
     * fails */
    void (*on_failure)(lt_status status);
} machine;

static const lt_host host_table = {lt_fail, lt_log};

extern int lt_accelerator_open(const char *version, const lt_host *host,
                               const lt_accelerator_config *config, lt_accelerator *accelerator,
                               char *text, size_t bytes);
extern void lt_accelerator_libraries(char *text, size_t bytes);

/* Close the result's device with its function close(). */
static inline lt_accelerator open_accelerator(const lt_accelerator_config *config)
{
    char text[256] = "";
    lt_accelerator cuda;
    if (SHIM(lt_accelerator_open)(LT_VERSION, &host_table, config, &cuda, text, sizeof text) != 0)
        FAIL("%s", text);
    return cuda;
}

/* Resets and opens an emulated device, with the stand-ins for NVIDIA's libraries or with our own
 * kernels only, in a context with reference kernels. Free m.ctx with lt_ctx_free(). */
static inline machine machine_as(bool libraries, const lt_accelerator_config *config)
{
    machine m = {.ctx = lt_open(&(lt_config){.reference = true, .threads = 1})};
    use_libraries(libraries);
    unsetenv("SHIM_OPS");
    SHIM(shim_reset)();
    m.cuda = open_accelerator(config);
    m.ctx->devices[1] = m.cuda.device;
    return m;
}

static inline machine machine_with(bool libraries)
{
    return machine_as(libraries, &(lt_accelerator_config){0});
}

static inline machine machine_open(void) { return machine_with(false); }

/* A test with a machine *m. */
#define TEST_CUDA(title)                                                                           \
    static void on_cuda_##title(machine *m);                                                       \
    TEST(title)                                                                                    \
    {                                                                                              \
        machine m = machine_open();                                                                \
        on_cuda_##title(&m);                                                                       \
        lt_ctx_free(m.ctx);                                                                        \
    }                                                                                              \
    static void on_cuda_##title(machine *m)

/* Whether streams run nothing until the host waits: see shim_set_schedule(). */
static inline bool is_lazy(void) { return !getenv("SHIM"); }

/* ==== References ============================================================================== */

/* A tensor on the CPU, and one with the same values on the device. */
typedef struct mirror {
    lt_tensor *host;  /* or NULL */
    lt_tensor tensor; /* on the device */
    lt_storage storage;
    void *block;  /* the device memory */
    size_t bytes; /* of the block; the tensor starts `shift` elements into it */
} mirror;

static inline void must(lt_status status)
{
    if (status != LT_OK)
        FAIL("%s", lt_errmsg());
}

static inline void get(machine *m, void *to, const void *from, size_t bytes)
{
    must(m->cuda.device->copy(m->cuda.device, to, from, bytes));
    must(m->cuda.device->sync(m->cuda.device));
}

/* Takes host. shift: elements before the tensor in its block, to misalign it. */
static inline mirror mirror_of(machine *m, lt_tensor *host, int shift)
{
    size_t size = lt_dtype_bytes(host->dtype);
    lt_device *device = m->cuda.device;
    mirror t = {.host = host, .tensor = *host};
    t.bytes = ((size_t)host->count + (size_t)shift) * size;
    t.block = device->alloc(device, t.bytes);
    CHECK(t.block != NULL);
    t.storage = (lt_storage){.ctx = m->ctx, .device = device, .data = t.block, .bytes = t.bytes};
    t.tensor.data = (char *)t.block + (size_t)shift * size;
    if (host->count > 0)
        must(device->copy(device, t.tensor.data, host->data, (size_t)host->count * size));
    return t;
}

/* The tensor on the device, or NULL. The mirror must not move after this. */
static inline lt_tensor *on_device(mirror *t)
{
    t->tensor.storage = &t->storage;
    return t->host ? &t->tensor : NULL;
}

static inline void mirror_free(machine *m, mirror *t)
{
    if (t->host)
        m->cuda.device->free(m->cuda.device, t->block, t->bytes);
    lt_release(t->host);
    t->host = NULL;
}

/* A pseudo-random value between -3 and 3. Some are 1.5 or 0 or, if special, not finite. */
static inline double value_at(uint32_t seed, int64_t i, bool special)
{
    uint32_t x = (uint32_t)i * 0x9e3779b1u + seed * 0x85ebca6bu;
    x = (x ^ x >> 16) * 0x7feb352d;
    x = (x ^ x >> 15) * 0x846ca68b;
    x ^= x >> 16;
    if (x % 23 == 0)
        return x % 2 ? 0 : 1.5;
    if (special && x % 19 == 0)
        return x % 3 == 0 ? NAN : x % 3 == 1 ? INFINITY : -INFINITY;
    return ((double)(x >> 8) / (1 << 24) - 0.5) * 6;
}

static inline lt_tensor *values(machine *m, lt_dtype dtype, int ndim, const int64_t *dims,
                                uint32_t seed, bool special)
{
    lt_tensor *x = lt_tensor_new(m->ctx, dtype, ndim, dims);
    CHECK(x != NULL);
    bool is_float = lt__is_float(dtype);
    for (int64_t i = 0; i < x->count; i++) {
        double v = value_at(seed, i, special && is_float);
        if (!is_float && dtype != LT_U8)
            v = isfinite(v) ? v * 5 : 0;
        lt_convert((char *)x->data + (size_t)i * lt_dtype_bytes(dtype), dtype, &v, LT_F64, 1);
    }
    return x;
}

/* ==== Comparing =============================================================================== */

/* The distance from y to its neighbours in dtype. */
static inline double spacing(lt_dtype dtype, double y)
{
    int digits = dtype == LT_F32 ? 24 : dtype == LT_F16 ? 11 : dtype == LT_BF16 ? 8 : 53;
    int least = dtype == LT_F16 ? -24 : dtype == LT_F64 ? -1074 : -149, exponent;
    frexp(y, &exponent);
    return ldexp(1, exponent - digits > least ? exponent - digits : least);
}

static inline double largest_of(const lt_tensor *x)
{
    double largest = 0, value;
    for (int64_t i = 0; i < x->count; i++) {
        lt_convert(&value, LT_F64, (char *)x->data + (size_t)i * lt_dtype_bytes((lt_dtype)x->dtype),
                   (lt_dtype)x->dtype, 1);
        largest = isfinite(value) && fabs(value) > largest ? fabs(value) : largest;
    }
    return largest;
}

/* Adds values to the digest, by FNV-1a. All NaNs count as equal. */
static inline void digest(machine *m, const char *data, int64_t count, lt_dtype dtype)
{
    size_t size = lt_dtype_bytes(dtype);
    for (int64_t i = 0; i < count; i++) {
        double value;
        uint64_t bits = 0;
        lt_convert(&value, LT_F64, data + (size_t)i * size, dtype, 1);
        if (!isnan(value))
            memcpy(&bits, data + (size_t)i * size, size);
        m->digest = (m->digest ^ bits ^ (uint64_t)isnan(value) << 63) * 0x100000001b3;
        m->digest ^= m->digest >> 29;
    }
}

/* Copies the tensor from the device. New, by malloc. */
static inline char *fetch(machine *m, const mirror *t)
{
    size_t bytes = (size_t)t->host->count * lt_dtype_bytes((lt_dtype)t->host->dtype);
    char *got = malloc(bytes + 1);
    get(m, got, t->tensor.data, bytes);
    return got;
}

/* An absolute tolerance: spacings * spacing(LT_F32, max(largest, least)) + by, where largest is the
 * largest finite magnitude in the tensor. It is added to the tolerance in spacings of each
 * element. If spacings is 0, it is just by. */
typedef struct slack {
    double spacings;
    double least;
    double by;
} slack;

/* Checks that each element on the device differs from that on the host by at most `spacings`
 * spacings plus the slack. With 0 and no slack, the bits must be equal; any NaN equals any NaN. */
static inline void compare_within(machine *m, const char *what, mirror *t, int spacings, slack s)
{
    lt_dtype dtype = (lt_dtype)t->host->dtype;
    size_t size = lt_dtype_bytes(dtype);
    char *got = fetch(m, t);
    double by = s.by;
    if (s.spacings > 0)
        by += s.spacings * spacing(LT_F32, fmax(largest_of(t->host), s.least));
    digest(m, got, t->host->count, dtype);
    for (int64_t i = 0; i < t->host->count; i++) {
        const char *a = got + (size_t)i * size, *b = (char *)t->host->data + (size_t)i * size;
        double x, y;
        if (memcmp(a, b, size) == 0)
            continue;
        lt_convert(&x, LT_F64, a, dtype, 1);
        lt_convert(&y, LT_F64, b, dtype, 1);
        if ((isnan(x) && isnan(y)) || fabs(x - y) <= spacings * spacing(dtype, y) + by)
            continue;
        free(got);
        FAIL("%s[%lld] must be %.17g, but is %.17g", what, (long long)i, y, x);
    }
    free(got);
}

static inline void compare(machine *m, const char *what, mirror *t, int spacings)
{
    compare_within(m, what, t, spacings, (slack){0});
}

/* ==== Calls =================================================================================== */

typedef struct spec { /* of a call to test */
    const char *op, *options;
    lt_dtype dtype;     /* of inputs without a dtype of their own */
    const char *shapes; /* of the inputs: "33x7, u8:7, -"; "-" is a scalar */
    int spacings;
    bool special;
    int shift;
    slack slack;
    double offset, apart; /* offset + k * apart is added to column k of the first input */
    uint32_t positive;    /* bit i: all values of input i are positive */
    int ids;              /* if not 0, integers are between 0 and ids - 1 */
    int64_t first_row;
    uint64_t stream;
    double grad_offset; /* added to the output's gradient */
    bool f32_grads;     /* gradients of the inputs are f32, whatever their dtype */
} spec;

/* Parses one shape and moves *text past it. */
static inline void read_shape(const char **text, lt_dtype *dtype, int *ndim, int64_t *dims)
{
    const char *at = *text + strspn(*text, " ");
    char name[8];
    int used = 0;
    if (sscanf(at, "%7[a-z0-9]:%n", name, &used) == 1 && used > 0) {
        *dtype = (lt_dtype)lt_dtype_find(name);
        at += used;
    }
    *ndim = 0;
    for (at += *at == '-'; *at >= '0' && *at <= '9'; at += *at == 'x')
        dims[(*ndim)++] = strtoll(at, (char **)&at, 10);
    *text = *at == ',' ? at + 1 : at;
}

typedef struct mirrored_call {
    mirror in[LT_MAX_LIST], out[LT_MAX_OUT], d_out, d_in[LT_MAX_LIST];
    int n_in, n_out;
} mirrored_call;

/* The arrays of a call on one device. */
typedef struct side {
    lt_tensor *in[LT_MAX_LIST], *out[LT_MAX_OUT], *d_out[LT_MAX_OUT], *d_in[LT_MAX_LIST];
} side;

static inline void get_side(mirrored_call *t, bool device, side *s)
{
    memset(s, 0, sizeof *s);
    for (int i = 0; i < t->n_in; i++) {
        s->in[i] = device ? on_device(&t->in[i]) : t->in[i].host;
        s->d_in[i] = device ? on_device(&t->d_in[i]) : t->d_in[i].host;
    }
    for (int k = 0; k < t->n_out; k++)
        s->out[k] = device ? on_device(&t->out[k]) : t->out[k].host;
    s->d_out[0] = device ? on_device(&t->d_out) : t->d_out.host;
}

static inline bool has_run(machine *m, lt_status status)
{
    if (status != LT_OK && !m->on_failure)
        FAIL("%s", lt_errmsg());
    if (status != LT_OK)
        m->on_failure(status);
    return status == LT_OK;
}

/* Runs the device's kernel with the scratch memory that it requests. Returns whether it
 * succeeds. */
static inline bool run_on_device(machine *m, const lt_def *def, lt_call *call, bool backward)
{
    lt_device *device = m->cuda.device;
    const lt_kernels *k = &m->cuda.op[def->id];
    size_t bytes = k->scratch ? k->scratch(call, backward) : 0;
    if (bytes == LT_SCRATCH_FAILED)
        return has_run(m, lt_errcode());
    call->scratch = bytes ? device->alloc(device, bytes) : NULL;
    call->scratch_bytes = bytes;
    int64_t before = counted(SHIM_WAITS);
    bool right = has_run(m, (backward ? k->bwd : k->fwd)(call));
    m->kernel_waits += counted(SHIM_WAITS) - before;
    must(device->sync(device));
    if (bytes)
        device->free(device, call->scratch, bytes);
    call->scratch = NULL;
    return right;
}

/* Returns whether the kernel of the device succeeds. */
static inline bool run_both(machine *m, const lt_def *def, mirrored_call *t, lt_call call,
                            bool backward)
{
    side host, device;
    const int32_t *skip = call.skip;
    bool right = true;
    for (int on_cuda = 0; on_cuda < 2; on_cuda++) {
        side *s = on_cuda ? &device : &host;
        get_side(t, on_cuda, s);
        for (int i = 0; backward && i < t->n_in; i++)
            if (!(call.save & LT_SAVE_IN(i)))
                s->in[i] = NULL;
        for (int k = 0; backward && k < t->n_out; k++)
            if (!(call.save & LT_SAVE_OUT(k)))
                s->out[k] = NULL;
        call.in = s->in;
        call.out = s->out;
        call.d_out = backward ? s->d_out : NULL;
        call.d_in = backward ? s->d_in : NULL;
        call.device = m->ctx->devices[on_cuda];
        call.skip = on_cuda ? skip : NULL;
        if (on_cuda)
            right = run_on_device(m, def, &call, backward);
        else
            must(lt__run_kernel(&call, def, backward));
    }
    return right;
}

/* Adds `by` to each element, or to its absolute value if positive. If ids is not 0, maps the
 * elements to integers between 0 and ids - 1. */
static inline void adjust(lt_tensor *x, double by, bool positive, int ids)
{
    size_t size = lt_dtype_bytes((lt_dtype)x->dtype);
    for (int64_t i = 0; i < x->count && (by != 0 || positive || ids > 0); i++) {
        char *at = (char *)x->data + (size_t)i * size;
        double v;
        lt_convert(&v, LT_F64, at, (lt_dtype)x->dtype, 1);
        v = positive ? fabs(v) + by : v + by;
        if (ids > 0)
            v = (double)((uint32_t)i * 0x9e3779b1u >> 8) + fabs(v);
        v = ids > 0 ? fmod(floor(v), ids) : v;
        lt_convert(at, (lt_dtype)x->dtype, &v, LT_F64, 1);
    }
}

/* Adds k * apart to column k of x, which is f32. */
static inline void spread(lt_tensor *x, double apart)
{
    for (int64_t i = 0; i < x->count && apart != 0; i++)
        ((float *)x->data)[i] += (float)(apart * (double)(i % x->dims[x->ndim - 1]));
}

static inline void make_inputs(machine *m, const spec *s, mirrored_call *t)
{
    const char *text = s->shapes;
    while (*text) {
        lt_dtype dtype = s->dtype;
        int ndim, i = t->n_in++;
        int64_t dims[LT_MAX_DIMS];
        read_shape(&text, &dtype, &ndim, dims);
        bool ids = s->ids > 0 && !lt__is_float(dtype);
        lt_tensor *x = values(m, dtype, ndim, dims, 1 + (uint32_t)i, s->special && !ids);
        bool positive = s->positive >> i & 1;
        spread(x, i == 0 ? s->apart : 0);
        adjust(x, i == 0 ? s->offset : positive ? 0.25 : 0, positive, ids ? s->ids : 0);
        t->in[i] = mirror_of(m, x, s->shift * (1 + i));
    }
}

/* Makes gradients for the output and the inputs. Those of the inputs are not zero, so that adding
 * to them differs from overwriting them. */
static inline void make_gradients(machine *m, const spec *s, mirrored_call *t)
{
    lt_tensor *y = t->out[0].host;
    lt_tensor *dy = values(m, (lt_dtype)y->dtype, y->ndim, y->dims, 91, false);
    adjust(dy, s->grad_offset, false, 0);
    t->d_out = mirror_of(m, dy, s->shift);
    for (int i = 0; i < t->n_in; i++) {
        lt_tensor *x = t->in[i].host;
        if (!lt__is_float((lt_dtype)x->dtype))
            continue;
        lt_dtype dtype = s->f32_grads ? LT_F32 : (lt_dtype)x->dtype;
        lt_tensor *dx = values(m, dtype, x->ndim, x->dims, 95 + (uint32_t)i, false);
        t->d_in[i] = mirror_of(m, dx, s->shift * 2);
    }
}

static inline void free_gradients(machine *m, mirrored_call *t)
{
    mirror_free(m, &t->d_out);
    for (int i = 0; i < t->n_in; i++)
        mirror_free(m, &t->d_in[i]);
}

static inline void check_backward(machine *m, const spec *s, const lt_def *def, mirrored_call *t,
                                  lt_call call, const char *where)
{
    /* Add to no gradient, to all, to every other one. */
    static const uint64_t adds[] = {0, ~0ull, 0xaaaaaaaaaaaaaaaa};
    for (int k = 0; k < 3; k++) {
        uint64_t add = adds[k];
        char what[700];
        make_gradients(m, s, t);
        call.add = add;
        bool right = run_both(m, def, t, call, true);
        for (int i = 0; i < t->n_in; i++) {
            snprintf(what, sizeof what, "%s: gradient %d%s", where, i,
                     add >> i & 1 ? ", added" : "");
            if (t->d_in[i].host && right)
                compare_within(m, what, &t->d_in[i], s->spacings, s->slack);
        }
        bool fits = t->d_in[0].host && t->d_in[0].host->count == t->d_out.host->count;
        if (!add && fits && (def->op->grad_in_place & 1)) {
            mirror over = t->d_in[0]; /* again, in place of the output's gradient */
            t->d_in[0].tensor.data = t->d_out.tensor.data;
            run_both(m, def, t, call, true);
            snprintf(what, sizeof what, "%s: gradient in place", where);
            compare_within(m, what, &t->d_in[0], s->spacings, s->slack);
            t->d_in[0] = over;
        }
        free_gradients(m, t);
    }
}

static inline uint64_t digest_of_inputs(machine *m, mirrored_call *t)
{
    m->digest = 0;
    for (int i = 0; i < t->n_in; i++) {
        const lt_tensor *x = t->in[i].host;
        char *got = fetch(m, &t->in[i]);
        digest(m, got, x->count, (lt_dtype)x->dtype);
        free(got);
    }
    return m->digest;
}

/* Runs the call on the device with its skip flag set, which must not change any input. */
static inline void check_skipped(machine *m, const lt_def *def, mirrored_call *t, lt_call call,
                                 int32_t *skip, const char *where)
{
    uint64_t kept = m->digest, before = digest_of_inputs(m, t);
    int32_t one = 1;
    side s;
    get_side(t, true, &s);
    call.in = s.in;
    call.device = m->cuda.device;
    call.skip = skip;
    must(call.device->copy(call.device, skip, &one, sizeof one));
    run_on_device(m, def, &call, false);
    if (digest_of_inputs(m, t) != before)
        FAIL("%s: wrote although its skip flag is set", where);
    m->digest = kept;
}

/* Checks a call, forward and backward, in the current order of threads. */
static inline void check_call(machine *m, const spec *s, const char *where)
{
    const lt_def *def = lt_op_find(m->ctx, s->op);
    const lt_kernels *kernels = &m->cuda.op[def->id];
    mirrored_call t = {.n_in = 0};
    side host;
    lt_opt opts[LT_MAX_OPT];
    lt_spec specs[LT_MAX_OUT];
    char what[700];
    lt_device *d = m->cuda.device;
    int32_t *skip = d->alloc(d, sizeof *skip);
    must(d->fill(d, skip, LT_I32, 1, 0));
    must(lt_opts_parse(&def->schema, s->options, opts));
    make_inputs(m, s, &t);
    get_side(&t, false, &host);
    lt_call call = {.ctx = m->ctx,
                    .op = def->op,
                    .schema = &def->schema,
                    .opt = opts,
                    .n_in = t.n_in,
                    .in = host.in,
                    .out = host.out,
                    .save = def->op->save,
                    .same_grad = def->op->same_grad,
                    .spec = specs,
                    .first_row = s->first_row,
                    .rng_stream = s->stream,
                    .skip = def->op->in_place && s->shift ? skip : NULL};
    must(def->op->shape(&call));
    t.n_out = (def->op->n_out ? def->op->n_out : !def->op->in_place) + def->op->n_aux;
    for (int k = 0; k < t.n_out; k++) {
        lt_tensor *y = values(m, specs[k].dtype, specs[k].ndim, specs[k].dims, 7, false);
        t.out[k] = mirror_of(m, y, s->shift);
    }
    if (!kernels->fwd)
        FAIL("%s: no kernel", where);
    bool right = run_both(m, def, &t, call, false);
    for (int k = 0; k < t.n_out && right; k++) {
        snprintf(what, sizeof what, "%s: output %d", where, k);
        compare_within(m, what, &t.out[k], s->spacings, s->slack);
    }
    for (int i = 0; i < t.n_in; i++) { /* also the inputs that the op must not write */
        snprintf(what, sizeof what, "%s: input %d", where, i);
        compare(m, what, &t.in[i], def->op->in_place >> i & 1 ? s->spacings : 0);
    }
    if (def->op->in_place)
        check_skipped(m, def, &t, call, skip, where);
    d->free(d, skip, sizeof *skip);
    if (def->op->bwd && lt__is_float((lt_dtype)specs[0].dtype) &&
        lt__is_float((lt_dtype)t.in[def->schema.n_in > 2 ? 1 : 0].host->dtype)) {
        CHECK(kernels->bwd != NULL);
        check_backward(m, s, def, &t, call, where);
    }
    for (int i = 0; i < t.n_in; i++)
        mirror_free(m, &t.in[i]);
    for (int k = 0; k < t.n_out; k++)
        mirror_free(m, &t.out[k]);
}

/* Checks a call in three orders of threads, with aligned and with misaligned tensors. The results
 * must have the same bits each time. With AddressSanitizer, whose thread switches are slow, it
 * checks only one order. */
static inline void check(machine *m, spec s)
{
    static const int orders[] = {0, 1, 5}, shifts[] = {0, 1, 0};
#ifdef __SANITIZE_ADDRESS__
    enum { RUNS = 1 };
#else
    enum { RUNS = 3 };
#endif
    uint64_t before = 0;
    for (int i = 0; i < RUNS; i++) {
        char where[600];
        s.shift = shifts[i];
        snprintf(where, sizeof where, "%.24s [%.100s] %s %s order %d shift %d", s.op,
                 s.options ? s.options : "", s.shapes, lt_dtype_name(s.dtype), orders[i],
                 shifts[i]);
        SHIM(shim_set_order)(orders[i]);
        m->digest = 0;
        check_call(m, &s, where);
        if (i > 0 && m->digest != before)
            FAIL("%s: the bits differ from those of order %d", where, orders[i - 1]);
        before = m->digest;
    }
    SHIM(shim_set_order)(0);
}

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

static const lt_dtype floats[] = {LT_F32, LT_F16, LT_BF16};
static const lt_dtype numerics[] = {LT_F32, LT_F16, LT_BF16, LT_I64, LT_I32, LT_U8};

typedef const char *const sample[3]; /* options, shapes, and the op if it varies */

static inline void check_samples(machine *m, const lt_dtype *dtypes, int n_dtypes, sample *samples,
                                 int n, spec s)
{
    for (int d = 0; d < n_dtypes; d++)
        for (int i = 0; i < n; i++) {
            s.dtype = dtypes[d];
            s.options = samples[i][0];
            s.shapes = samples[i][1];
            s.op = samples[i][2] ? samples[i][2] : s.op;
            check(m, s);
        }
}

/* Checks all samples, in all dtypes of a list. The further arguments are other fields of a spec. */
#define CHECK_ALL(m, dtypes, samples, ...)                                                         \
    check_samples(m, dtypes, COUNT(dtypes), samples, COUNT(samples), (spec){__VA_ARGS__})

#endif
