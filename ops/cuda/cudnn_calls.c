/* cudnn_calls.c - turns calls of conv2d into tasks for cuDNN.
 *
 * A task writes its result into the gradient, or into scratch if the gradient's dtype differs from
 * the factors' (f32 gradients for f16 or bf16 inputs). Scratch contains the plan's workspace, the
 * result, and the result converted to the gradient's dtype.
 */
#include <string.h>

#include "ops/cuda/cudnn.h"
#include "ops/window.h"

enum { X, W, B };                       /* inputs of conv2d */
enum { STRIDE, PAD, DILATION, GROUPS }; /* options of conv2d */

typedef struct part { /* the task for one result of a call */
    lt_cudnn_task task;
    void *operand[LT_CUDNN_OPERANDS];
    int result;                          /* index of the result among the operands */
    lt_tensor *to;                       /* the tensor for the result */
    bool staged, add;                    /* the result goes through scratch; it is added to `to` */
    size_t workspace, bytes, cast_bytes; /* sizes of the three parts of scratch */
} part;

/* ==== Describing a part ======================================================================= */

static void images(const lt_tensor *x, const lt_tensor *y, lt_cudnn_task *task)
{
    task->n = x->dims[0];
    task->in = x->dims[3];
    task->out = y->dims[3];
    for (int i = 0; i < 2; i++) {
        task->size[i] = x->dims[1 + i];
        task->out_size[i] = y->dims[1 + i];
    }
}

/* Sets operand i of p. Returns false if an input does not have the dtype of the task. */
static bool put(part *p, int i, const lt_tensor *x)
{
    p->operand[i] = x->data;
    if (((uintptr_t)x->data & 15) != 0)
        p->task.aligned = 0;
    return i == p->result || x->dtype == p->task.dtype;
}

/* Decides where the result goes, and plans the task. */
static lt_status place(lt_cudnn *d, const lt_call *c, part *p)
{
    p->staged = p->to->dtype != p->task.dtype;
    p->task.add = p->add && !p->staged;
    if (p->staged)
        p->bytes = (size_t)p->to->count * lt__cuda_dtype_bytes((lt_dtype)p->task.dtype);
    if (p->staged && p->add)
        p->cast_bytes = (size_t)p->to->count * lt__cuda_dtype_bytes((lt_dtype)p->to->dtype);
    return lt__cudnn_plan(d, c->ctx, &p->task, &p->workspace);
}

static size_t scratch_of(const part *p)
{
    return lt__cuda_padded(p->workspace) + lt__cuda_padded(p->bytes) + p->cast_bytes;
}

/* Runs a part that place() has planned. */
static lt_status run_task(lt_cudnn *d, const lt_cuda_env *env, lt_call *c, part *p)
{
    lt_dtype have = (lt_dtype)p->task.dtype, want = (lt_dtype)p->to->dtype;
    char *result = (char *)c->scratch + lt__cuda_padded(p->workspace);
    char *cast = result + lt__cuda_padded(p->bytes);
    size_t n = (size_t)p->to->count;
    if (p->staged)
        p->operand[p->result] = result;
    LT_TRY(lt__cudnn_run(d, c->ctx, &p->task, p->operand, c->scratch));
    if (!p->staged)
        return LT_OK;
    if (!p->add)
        return env->device->convert(env->device, p->to->data, want, result, have, n);
    LT_TRY(env->device->convert(env->device, cast, want, result, have, n));
    return env->device->add(env->device, p->to->data, cast, want, n);
}

/* ==== conv2d ================================================================================== */

/* Describes the forward pass, or the gradient of input i. */
static lt_status conv_part(lt_cudnn *d, const lt_call *c, bool backward, int i, part *p)
{
    const lt_tensor *x = c->in[X] ? c->in[X] : c->d_in[X], *w = c->in[W] ? c->in[W] : c->d_in[W];
    const lt_tensor *y = backward ? c->d_out[0] : c->out[0];
    const lt_tensor *bias = !backward && c->n_in > B ? c->in[B] : NULL;
    lt_cudnn_task *task = &p->task;
    bool fits = true;
    memset(p, 0, sizeof *p);
    task->kind = !backward ? LT_CUDNN_CONV : i == X ? LT_CUDNN_CONV_DATA : LT_CUDNN_CONV_WEIGHTS;
    task->dtype = y->dtype;
    task->aligned = 1;
    task->bias = bias != NULL;
    task->groups = c->opt[GROUPS].i[0];
    images(x, y, task);
    lt__pair_of(c, STRIDE, task->stride);
    lt__pair_of(c, PAD, task->pad);
    lt__pair_of(c, DILATION, task->dilation);
    task->kernel[0] = w->dims[1];
    task->kernel[1] = w->dims[2];
    p->result = !backward ? LT_CUDNN_Y : i == X ? LT_CUDNN_X : LT_CUDNN_W;
    p->to = backward ? c->d_in[i] : c->out[0];
    p->add = backward && (c->add >> i & 1);
    fits = put(p, LT_CUDNN_X, p->result == LT_CUDNN_X ? p->to : x) && fits;
    fits = put(p, LT_CUDNN_W, p->result == LT_CUDNN_W ? p->to : w) && fits;
    fits = put(p, LT_CUDNN_Y, y) && fits;
    if (bias)
        fits = put(p, LT_CUDNN_B, bias) && fits;
    return fits ? place(d, c, p) : LT_EUNSUPPORTED;
}

size_t lt__cudnn_conv2d_scratch(lt_cudnn *d, const lt_call *c, bool backward)
{
    size_t most = 0;
    for (int i = X; i <= (backward ? W : X); i++) {
        if (backward && !c->d_in[i])
            continue;
        part p;
        lt_status status = conv_part(d, c, backward, i, &p);
        most = lt__cuda_scratch(most, status, scratch_of(&p));
    }
    return most;
}

lt_status lt__cudnn_conv2d_fwd(lt_cudnn *d, lt_call *c)
{
    part p;
    LT_TRY(conv_part(d, c, false, 0, &p));
    return run_task(d, lt__cudnn_env(d), c, &p);
}

lt_status lt__cudnn_conv2d_grad(lt_cudnn *d, lt_call *c, int i)
{
    part p;
    LT_TRY(conv_part(d, c, true, i, &p));
    return run_task(d, lt__cudnn_env(d), c, &p);
}
