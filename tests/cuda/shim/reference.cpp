/* reference.cpp - if $SHIM_OPS is "reference", the ops of the emulated devices are the reference
 * kernels of the CPU instead of the CUDA kernels. They run in the stream of the device. They widen
 * f16 and bf16 as the host does, so results have the bits of a CPU with lt_config.reference. As on
 * a GPU there is no f64, except for casts, the total of add_squares and the statistics of ddc_step.
 * Ranks that are threads stand for processes, which may sum by NCCL.
 *
 * An op that $SHIM_HIDES names has no kernels.
 */
#include <memory>
#include <vector>

#include "enter.h"
#include "ops/cuda/cuda.h"
#include "shim.h"

namespace {

/* ==== Calls in the stream ===================================================================== */

/* A tensor of a call. While the kernel runs, a half is replaced by an f32 copy in host memory. */
struct operand {
    lt_tensor tensor;
    void *half; /* or NULL */
    lt_dtype dtype;
    std::vector<float> wide;
};

struct list { /* one of the arrays of tensors of a call */
    std::vector<operand> all;
    std::vector<lt_tensor *> at; /* NULL where there is no tensor */
    uint64_t read, write;        /* bit i: the kernel reads, or writes, tensor i */
};

list copy_of(lt_tensor *const *x, int n, uint64_t read, uint64_t write)
{
    list l = {std::vector<operand>((size_t)n), std::vector<lt_tensor *>((size_t)n), read, write};
    for (size_t i = 0; i < l.at.size(); i++)
        if (x[i]) {
            l.all[i].tensor = *x[i];
            l.at[i] = &l.all[i].tensor;
        }
    return l;
}

/* A copy of a call: the host may reuse its arrays, and free the op's definition, before the kernel
 * runs. */
struct job {
    lt_call call;
    bool backward;
    lt_schema schema;
    std::vector<lt_opt> opt;
    list lists[4];
};

std::shared_ptr<job> make_job(const lt_call *c, bool backward)
{
    int n_out = lt_op_outputs(c->op), n_all = n_out + c->op->n_aux;
    uint64_t all = ~0ull;
    const lt_opt *end = c->opt + c->schema->n_opt;
    std::shared_ptr<job> j(new job{*c, backward, *c->schema, std::vector<lt_opt>(c->opt, end), {}});
    j->lists[0] = copy_of(c->in, c->n_in, all, c->op->in_place);
    j->lists[1] = copy_of(c->out, n_all, backward ? all : 0, backward ? 0 : all);
    j->lists[2] = copy_of(c->d_out, backward ? n_out : 0, all, 0);
    j->lists[3] = copy_of(c->d_in, backward ? c->n_in : 0, c->add, all);
    j->call.schema = &j->schema;
    j->call.opt = j->opt.data();
    j->call.in = j->lists[0].at.data();
    j->call.out = j->lists[1].at.data();
    j->call.d_out = j->lists[2].at.data();
    j->call.d_in = j->lists[3].at.data();
    return j;
}

void widen(operand *o, bool read)
{
    lt_tensor *x = &o->tensor;
    o->dtype = (lt_dtype)x->dtype;
    if (!lt__is_half(o->dtype))
        return;
    o->half = x->data;
    o->wide.resize((size_t)x->count + 1);
    x->data = o->wide.data();
    x->dtype = LT_F32;
    if (read)
        lt_convert(x->data, LT_F32, o->half, o->dtype, (size_t)x->count);
}

void narrow(operand *o, bool write)
{
    if (o->half && write)
        lt_convert(o->half, o->dtype, o->wide.data(), LT_F32, (size_t)o->tensor.count);
}

/* Runs the kernel; device memory is open. Only ops in place can be skipped, so a skipped call has
 * no outputs to fill. */
void run(job *j)
{
    lt_call *c = &j->call;
    const lt_op *op = c->op;
    if (c->skip && *c->skip)
        return;
    for (list &l : j->lists)
        for (size_t i = 0; i < l.at.size() && !op->any_dtype; i++)
            if (l.at[i])
                widen(&l.all[i], l.read >> i & 1);
    c->scratch_bytes = op->scratch ? op->scratch(c, j->backward) : 0;
    std::vector<double> scratch(c->scratch_bytes / sizeof(double) + 8);
    void *start = scratch.data();
    size_t room = scratch.size() * sizeof(double);
    c->scratch = std::align(64, c->scratch_bytes, start, room);
    if ((j->backward ? op->bwd : op->fwd)(c) != LT_OK)
        shim_fault("the reference kernel of %s failed", c->schema->name);
    for (list &l : j->lists)
        for (size_t i = 0; i < l.at.size(); i++)
            if (l.at[i])
                narrow(&l.all[i], l.write >> i & 1);
}

/* ==== Kernels ================================================================================= */

bool has_f64(const job *j)
{
    for (const list &l : j->lists)
        for (const lt_tensor *x : l.at)
            if (x && x->dtype == LT_F64)
                return true;
    return false;
}

bool are_on_device(const job *j)
{
    for (const list &l : j->lists)
        for (const lt_tensor *x : l.at)
            if (x && (x->storage->device != j->call.device ||
                      !shim_owns(x->data, (size_t)x->count * lt_dtype_bytes((lt_dtype)x->dtype))))
                return false;
    return true;
}

/* Checks what the kernels of a device may rely on, in addition to those of the CPU. */
lt_status check(const lt_cuda *cuda, const job *j)
{
    const lt_call *c = &j->call;
    const char *name = c->schema->name;
    if (has_f64(j) && strcmp(name, "add_squares") && strcmp(name, "ddc_step") &&
        strcmp(name, "cast"))
        return lt__no_kernel(cuda, LT_F64);
    if (!are_on_device(j) || (c->scratch && !shim_owns(c->scratch, c->scratch_bytes)))
        return cuda->host->fail(LT_EINVAL, "%s: a tensor is not on %s", name, cuda->name);
    for (int i = 0; i < c->n_in && j->backward && strcmp(name, "matmul") == 0; i++)
        if (c->d_in[i] && c->d_in[i]->dtype != c->d_out[0]->dtype)
            return cuda->host->fail(LT_EINVAL, "matmul computes no gradients of another dtype");
    return LT_OK;
}

lt_status enqueue(lt_call *c, bool backward)
{
    lt_cuda *cuda = lt__cuda(c->ctx);
    std::shared_ptr<job> j = make_job(c, backward);
    LT_TRY(check(cuda, j.get()));
    return lt__cuda_status(cuda, shim_enqueue(cuda->stream, [=] { run(j.get()); }));
}

lt_status forward(lt_call *c) { return enqueue(c, false); }
lt_status backward(lt_call *c) { return enqueue(c, true); }
bool always(const lt_call *, int) { return true; }

size_t scratch(const lt_call *c, bool is_backward)
{
    return c->op->scratch ? c->op->scratch(c, is_backward) : 0;
}

/* The device's own kernel runs thread by thread, which takes long for the NaNs in new memory. */
lt_status fill(lt_device *device, void *dst, lt_dtype dtype, size_t n, double value)
{
    lt_cuda *cuda = (lt_cuda *)device;
    (void)cudaSetDevice(cuda->index);
    return lt__cuda_status(cuda, shim_enqueue(cuda->stream, [=] {
                               char one[8], *to = (char *)dst;
                               const size_t size = lt_dtype_bytes(dtype);
                               lt_convert(one, dtype, &value, LT_F64, 1);
                               for (size_t i = 0; i < n; i++)
                                   memcpy(to + i * size, one, size);
                           }));
}

void use_reference_kernels(lt_accelerator *a)
{
    static const lt_device_comm_calls calls = [] {
        lt_device_comm_calls all = lt__cuda_comm_calls;
        all.thread_hazard = NULL;
        return all;
    }();
    for (int id = 0; id < LT_OPS; id++)
        a->op[id] = lt_kernels{scratch, forward, backward, NULL, NULL};
    a->op[LT_OP_conv2d].f32_grad = a->op[LT_OP_linear].f32_grad = always;
    a->device->comm_calls = &calls;
    a->device->fill = fill;
    snprintf(a->name, sizeof a->name, "emulator (reference kernels)");
}

} // namespace

/* The function of ops/cuda/device.cu, which CMakeLists.txt renames. */
extern "C" int shim_accelerator_open(const char *version, const lt_host *host,
                                     const lt_accelerator_config *config, lt_accelerator *a,
                                     char *text, size_t bytes);

extern "C" LT_API int lt_accelerator_open(const char *version, const lt_host *host,
                                          const lt_accelerator_config *config, lt_accelerator *a,
                                          char *text, size_t bytes)
{
    static const char *const names[] = {
#define X(name) #name,
        LT_OP_LIST(X)
#undef X
    };
    int status = shim_accelerator_open(version, host, config, a, text, bytes);
    if (status == 0 && shim_has_reference_ops())
        use_reference_kernels(a);
    for (int id = 0; id < LT_OPS && status == 0; id++)
        if (shim_hides(names[id]))
            a->op[id] = lt_kernels{};
    return status;
}
