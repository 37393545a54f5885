/* emu.c - an emulated accelerator for tests. Its memory is a reserved range of addresses that only
 * its own functions can access, while they run; any other access ends the process with SIGSEGV. Its
 * kernels are the reference kernels of the host's ops. They widen f16 and bf16 as the host does, so
 * results have the bits of a CPU with lt_config.reference. Like a GPU it has no f64, except for
 * casts, the total of add_squares and the statistics of ddc_step.
 *
 * Work in its stream runs at once. But copies to memory of alloc_host(), and uploads from there,
 * run as late as possible: when the host waits for them or calls stream_wait(). So a download()
 * copies what the device memory contains at that time, not at the time of the call. Until then
 * the target is filled with NaNs. If two uploads or downloads use the same host memory and the
 * first is still pending, the process aborts. The emulator counts waits, for each thread
 * separately.
 *
 * The environment variable EMU selects what is missing: no-driver, no-device, no-pow (a kernel) or
 * no-memory (of alloc_host()).
 */
#include <math.h>

#include "core/pool.h"
#include "tests/device/emu_comm.h"
#include "tests/device/emu_stream.h"

/* ==== Memory kernels ========================================================================== */

/* A copy to the host takes the current contents. It is deferred if the target is memory of
 * alloc_host(), else the host waits for it. */
static lt_status emu_copy(lt_device *device, void *dst, const void *src, size_t bytes)
{
    emu *e = emu_of(device);
    pthread_mutex_lock(&e->lock);
    bool to_host = !is_on_device(e, dst) && is_on_device(e, src),
         is_deferred = is_block(e, dst, bytes);
    void *to = to_host && is_deferred ? malloc(bytes + 1) : dst;
    e->queued++;
    allow(e, PROT_READ | PROT_WRITE);
    lt_status result = e->cpu->copy(e->cpu, to, src, bytes);
    allow(e, PROT_NONE);
    if (to_host && is_deferred)
        add_pending(e, STREAM, e->queued, dst, to, bytes);
    else if (to_host)
        wait_until(e, end_of_stream(e));
    pthread_mutex_unlock(&e->lock);
    return result;
}

static lt_status emu_convert(lt_device *device, void *dst, lt_dtype dst_dtype, const void *src,
                             lt_dtype src_dtype, size_t n)
{
    emu *e = emu_of(device);
    WITH_MEMORY(e, e->cpu->convert(e->cpu, dst, dst_dtype, src, src_dtype, n));
}

static lt_status emu_look_up(lt_device *device, void *dst, const uint8_t *src, const void *values,
                             size_t each, int64_t n, int64_t channels)
{
    emu *e = emu_of(device);
    WITH_MEMORY(e, e->cpu->look_up(e->cpu, dst, src, values, each, n, channels));
}

static lt_status emu_fill(lt_device *device, void *dst, lt_dtype dtype, size_t n, double value)
{
    emu *e = emu_of(device);
    WITH_MEMORY(e, e->cpu->fill(e->cpu, dst, dtype, n, value));
}

static lt_status emu_add(lt_device *device, void *dst, const void *src, lt_dtype dtype, size_t n)
{
    emu *e = emu_of(device);
    WITH_MEMORY(e, e->cpu->add(e->cpu, dst, src, dtype, n));
}

static void emu_close(lt_device *device)
{
    emu *e = emu_of(device);
    wait_for_all(e);
    munmap(e->start, MEMORY);
    e->cpu->close(e->cpu);
    pthread_mutex_destroy(&e->lock);
    free(e);
}

/* ==== Kernels ================================================================================= */

/* One of the arrays of tensors of a call. f16 and bf16 tensors are replaced by f32 copies in host
 * memory. */
typedef struct list {
    lt_tensor **at;
    int n;
    uint64_t read, write; /* bit i: the kernel reads, or writes, tensor i */
    lt_tensor *half[LT_MAX_LIST], wide[LT_MAX_LIST];
} list;

static bool is_half(const lt_tensor *x) { return x && lt__is_half((lt_dtype)x->dtype); }

static void widen(list *l)
{
    for (int i = 0; i < l->n; i++) {
        lt_tensor *x = l->at[i], *w = &l->wide[i];
        l->half[i] = is_half(x) ? x : NULL;
        if (!l->half[i])
            continue;
        *w = *x;
        w->dtype = LT_F32;
        if (!(w->data = malloc((size_t)(x->count + 1) * sizeof(float))))
            abort();
        if (l->read >> i & 1)
            lt_convert(w->data, LT_F32, x->data, (lt_dtype)x->dtype, (size_t)x->count);
        l->at[i] = w;
    }
}

static void narrow(list *l, bool done)
{
    for (int i = 0; i < l->n; i++) {
        lt_tensor *x = l->half[i];
        if (!x)
            continue;
        if (done && (l->write >> i & 1))
            lt_convert(x->data, (lt_dtype)x->dtype, l->wide[i].data, LT_F32, (size_t)x->count);
        free(l->wide[i].data);
        l->at[i] = x;
    }
}

static lt_status run_wide(lt_call *c, bool backward)
{
    const lt_op *op = c->op;
    int n_out = lt_op_outputs(op), n_all = n_out + op->n_aux;
    list *l = calloc(4, sizeof *l);
    if (!l)
        abort();
    l[0] = (list){.at = c->in, .n = c->n_in, .read = ~0ull, .write = op->in_place};
    l[1] = (list){
        .at = c->out, .n = n_all, .read = backward ? ~0ull : 0, .write = backward ? 0 : ~0ull};
    l[2] = (list){.at = c->d_out, .n = backward ? n_out : 0, .read = ~0ull};
    l[3] = (list){.at = c->d_in, .n = backward ? c->n_in : 0, .read = c->add, .write = ~0ull};
    for (int i = 0; i < 4; i++)
        widen(&l[i]);
    void *given = c->scratch;
    size_t bytes = op->scratch ? op->scratch(c, backward) : 0;
    c->scratch = aligned_alloc(64, (bytes + 64) & ~(size_t)63);
    lt_status status = backward ? op->bwd(c) : op->fwd(c);
    free(c->scratch);
    c->scratch = given;
    for (int i = 0; i < 4; i++)
        narrow(&l[i], status == LT_OK);
    free(l);
    return status;
}

static bool has(lt_tensor *const *x, int n, lt_dtype dtype)
{
    for (int i = 0; i < n; i++)
        if (x[i] && x[i]->dtype == dtype)
            return true;
    return false;
}

static bool is_f64(const lt_call *c, bool backward)
{
    int n_out = lt_op_outputs(c->op), n_all = n_out + c->op->n_aux;
    return has(c->in, c->n_in, LT_F64) || has(c->out, n_all, LT_F64) ||
           (backward && (has(c->d_out, n_out, LT_F64) || has(c->d_in, c->n_in, LT_F64)));
}

static bool are_on_device(const emu *e, lt_tensor *const *x, int n)
{
    for (int i = 0; i < n; i++)
        if (x[i] && !(x[i]->storage->device == &e->base && is_on_device(e, x[i]->data)))
            return false;
    return true;
}

/* Checks what accelerator kernels may rely on, in addition to CPU kernels. */
static lt_status check(const emu *e, const lt_call *c, bool backward)
{
    int n_out = lt_op_outputs(c->op);
    bool halves = backward && is_half(c->d_out[0]);
    if (!are_on_device(e, c->in, c->n_in) || !are_on_device(e, c->out, n_out + c->op->n_aux) ||
        (backward && !(are_on_device(e, c->d_out, n_out) && are_on_device(e, c->d_in, c->n_in))) ||
        (c->scratch && !is_on_device(e, c->scratch)))
        return e->host->fail(LT_EINVAL, "a tensor of the call is not on %s", e->name);
    if (halves && strcmp(c->schema->name, "matmul") == 0 && has(c->d_in, c->n_in, LT_F32))
        return e->host->fail(LT_EINVAL, "matmul has no f32 gradients of f16 or bf16 here");
    return LT_OK;
}

/* Only in-place ops can be skipped, so a skipped call has no outputs to fill. */
static lt_status run_open(lt_call *c, bool backward)
{
    if (c->skip && *c->skip)
        return LT_OK;
    return !c->op->any_dtype ? run_wide(c, backward) : backward ? c->op->bwd(c) : c->op->fwd(c);
}

static lt_status run(lt_call *c, bool backward)
{
    emu *e = emu_of(c->device);
    const char *name = c->schema->name;
    LT_TRY(check(e, c, backward));
    bool allows_f64 = strcmp(name, "add_squares") == 0 || strcmp(name, "ddc_step") == 0 ||
                      strcmp(name, "cast") == 0;
    if (is_f64(c, backward) && !allows_f64)
        return e->host->fail(LT_EUNSUPPORTED,
                             "%s does not compute in f64; copy the tensors "
                             "to the CPU with x:to('cpu')",
                             e->name);
    WITH_MEMORY(e, run_open(c, backward));
}

static lt_status forward(lt_call *c) { return run(c, false); }
static lt_status backward(lt_call *c) { return run(c, true); }

static bool always(const lt_call *c, int i)
{
    (void)c, (void)i;
    return true;
}

static size_t scratch(const lt_call *c, bool is_backward)
{
    return c->op->scratch ? c->op->scratch(c, is_backward) : 0;
}

/* x[i] = by * from[i]. Returns from[i]. */
static double rescale_one(lt_tensor *x, const lt_tensor *from, int64_t i, double by)
{
    lt_dtype to_dtype = (lt_dtype)x->dtype, dtype = (lt_dtype)from->dtype;
    double was, is;
    lt_convert(&was, LT_F64, (const char *)from->data + (size_t)i * lt_dtype_bytes(dtype), dtype,
               1);
    is = was * by;
    lt_convert((char *)x->data + (size_t)i * lt_dtype_bytes(to_dtype), to_dtype, &is, LT_F64, 1);
    return was;
}

/* Makes *row a row of one part. Borrowed. */
static lt_grad_stats *only_part(lt_grad_row *row)
{
    row->parts = 1;
    row->by = 1;
    row->part[0] = (lt_grad_stats){0};
    return &row->part[0];
}

static lt_status rescale_all(lt_tensor *x, const lt_tensor *from, double by, lt_grad_row *row)
{
    lt_grad_row ignored;
    lt_grad_stats *stats = only_part(row ? row : &ignored);
    for (int64_t i = 0; i < x->count; i++) {
        double was = rescale_one(x, from, i, by), size = was < 0 ? -was : was;
        if (!(size <= 1.7e308))
            stats->not_finite++;
        else if (size > stats->largest)
            stats->largest = size;
    }
    return LT_OK;
}

static lt_status rescale(lt_tensor *x, const lt_tensor *from, double by, lt_grad_row *row)
{
    emu *e = emu_of(x->storage->device);
    if (row && !is_on_device(e, row))
        abort();
    WITH_MEMORY(e, rescale_all(x, from, by, row));
}

static lt_status measure_all(const lt_tensor *x, double by, lt_grad_row *row)
{
    lt_grad_stats *stats = only_part(row);
    for (int64_t i = 0; i < x->count; i++) {
        size_t at = (size_t)i * lt_dtype_bytes((lt_dtype)x->dtype);
        double value;
        lt_convert(&value, LT_F64, (const char *)x->data + at, (lt_dtype)x->dtype, 1);
        if (isfinite(value))
            stats->largest = fmax(stats->largest, fabs(value) * by);
        else
            stats->not_finite++;
    }
    return LT_OK;
}

static lt_status measure(const lt_tensor *x, double by, lt_grad_row *row)
{
    emu *e = emu_of(x->storage->device);
    if (!is_on_device(e, row))
        abort();
    WITH_MEMORY(e, measure_all(x, by, row));
}

static lt_status join_all(const lt_grad_row *rows, int n, lt_grad_stats *stats)
{
    for (int i = 0; i < n; i++)
        stats[i] = rows[i].parts > 0 ? rows[i].part[0] : (lt_grad_stats){0};
    return LT_OK;
}

static lt_status join(lt_device *device, const lt_grad_row *rows, int n, lt_grad_stats *stats)
{
    emu *e = emu_of(device);
    WITH_MEMORY(e, join_all(rows, n, stats));
}

/* ==== Step checks ============================================================================= */

static lt_grad_stats sum_of(const lt_grad_stats *rows, int n)
{
    lt_grad_stats sum = {0};
    for (int i = 0; i < n; i++) {
        sum.largest = fmax(sum.largest, rows[i].largest);
        sum.not_finite += rows[i].not_finite;
    }
    return sum;
}

static lt_status check_all_grads(const lt_grad_stats *rows, int n, lt_step_check *check)
{
    check->grads = sum_of(rows, n);
    check->skip |= check->grads.not_finite > 0;
    return LT_OK;
}

static lt_status check_grads(lt_device *device, const lt_grad_stats *rows, int n,
                             lt_step_check *check)
{
    emu *e = emu_of(device);
    WITH_MEMORY(e, check_all_grads(rows, n, check));
}

static lt_status zero_leftover_if(emu *e, lt_tensor *x, const lt_grad_stats *leftover,
                                  const lt_grad_stats *rows, int n)
{
    if (leftover->not_finite == 0 || sum_of(rows, n).not_finite > 0)
        return LT_OK;
    return e->cpu->fill(e->cpu, x->data, (lt_dtype)x->dtype, (size_t)x->count, 0);
}

static lt_status zero_leftover(lt_tensor *x, const lt_grad_stats *leftover,
                               const lt_grad_stats *rows, int n)
{
    emu *e = emu_of(x->storage->device);
    WITH_MEMORY(e, zero_leftover_if(e, x, leftover, rows, n));
}

static lt_status check_one(const lt_tensor *loss, lt_step_check *check)
{
    double value;
    lt_convert(&value, LT_F64, loss->data, (lt_dtype)loss->dtype, 1);
    if (isfinite(value) || check->loss != 0)
        return LT_OK;
    check->loss = value;
    check->skip = 1;
    return LT_OK;
}

static lt_status check_loss(lt_tensor *loss, lt_step_check *check)
{
    emu *e = emu_of(loss->storage->device);
    WITH_MEMORY(e, check_one(loss, check));
}

static lt_status clip_one(const double *squares, double most, lt_step_check *check)
{
    double norm = sqrt(*squares);
    check->factor = norm > most ? most / norm : 1;
    if (isfinite(norm))
        return LT_OK;
    check->norm = norm;
    check->skip = 1;
    return LT_OK;
}

static lt_status clip(lt_tensor *squares, double most, lt_step_check *check)
{
    emu *e = emu_of(squares->storage->device);
    WITH_MEMORY(e, clip_one(squares->data, most, check));
}

/* ==== Opening ================================================================================= */

static emu *emu_new(const lt_host *host, int index)
{
    emu *e = calloc(1, sizeof *e);
    lt_device *cpu = lt__cpu_device_new(1);
    void *start = mmap(NULL, MEMORY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!e || !cpu || start == MAP_FAILED)
        abort();
    (void)madvise(start, MEMORY, MADV_HUGEPAGE); /* mprotect() takes time for each page */
    e->base = (lt_device){.name = e->name,
                          .alloc = emu_alloc,
                          .free = emu_free,
                          .copy = emu_copy,
                          .convert = emu_convert,
                          .fill = emu_fill,
                          .add = emu_add,
                          .look_up = emu_look_up,
                          .sync = emu_sync,
                          .close = emu_close,
                          .mark = emu_mark,
                          .wait = emu_wait,
                          .alloc_host = emu_alloc_host,
                          .free_host = emu_free_host,
                          .upload = emu_upload,
                          .download = emu_download,
                          .stream_wait = emu_stream_wait,
                          .comm_calls = &comm_calls};
    pthread_mutex_init(&e->lock, NULL);
    e->cpu = cpu;
    e->host = host;
    e->start = start;
    snprintf(e->name, sizeof e->name, "cuda:%d", index);
    return e;
}

LT_API int lt_accelerator_open(const char *version, const lt_host *host,
                               const lt_accelerator_config *config, lt_accelerator *a, char *text,
                               size_t bytes)
{
    enum { DEVICES = 4 };
    if (!lt__same_version(version, text, bytes))
        return -1;
    if (lacks("no-driver") || lacks("no-device")) {
        snprintf(text, bytes, "there is no NVIDIA %s", getenv("EMU") + 3);
        return LT_NO_ACCELERATOR;
    }
    int index = config->index >= 0 ? config->index : config->local_rank % DEVICES;
    if (index >= DEVICES) {
        snprintf(text, bytes, "there are only %d devices, cuda:0 to cuda:%d", DEVICES, DEVICES - 1);
        return -1;
    }
    a->device = &emu_new(host, index)->base;
    a->rescale = rescale;
    a->measure = measure;
    a->join = join;
    a->check_grads = check_grads;
    a->zero_leftover = zero_leftover;
    a->check_loss = check_loss;
    a->clip = clip;
    for (int id = 0; id < LT_OPS; id++)
        a->op[id] =
            (lt_kernels){.scratch = scratch,
                         .fwd = forward,
                         .bwd = backward,
                         .f32_grad = id == LT_OP_conv2d || id == LT_OP_linear ? always : NULL};
    if (lacks("no-pow"))
        a->op[LT_OP_pow] = (lt_kernels){0};
    snprintf(a->name, sizeof a->name, "emulator (reference kernels)");
    return 0;
}
