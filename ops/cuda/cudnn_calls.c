/* cudnn_calls.c - turns calls of conv2d into tasks for cuDNN. Scratch is the plan's workspace. */
#include <string.h>

#include "ops/cuda/cudnn.h"
#include "ops/window.h"

enum { X, W, B }; /* inputs of conv2d */

typedef struct part { /* the task for one result of a call */
    lt_cudnn_task task;
    void *operand[LT_CUDNN_OPERANDS];
    size_t workspace; /* bytes */
} part;

/* ==== Describing a part ======================================================================= */

static void put_sizes(lt_cudnn_task *task, const lt_conv *v)
{
    task->n = v->n;
    task->in = v->in;
    task->out = v->out;
    task->groups = v->groups;
    for (int i = 0; i < 2; i++) {
        task->size[i] = v->window.in[i];
        task->out_size[i] = v->window.out[i];
        task->kernel[i] = v->window.kernel[i];
        task->stride[i] = v->window.stride[i];
        task->pad[i] = v->window.pad[i];
        task->dilation[i] = v->window.dilation[i];
    }
}

/* Sets operand i of p. Returns false if it does not have the dtype of the task. */
static bool put(part *p, int i, const lt_tensor *x)
{
    p->operand[i] = x->data;
    if (((uintptr_t)x->data & 15) != 0)
        p->task.aligned = 0;
    return x->dtype == p->task.dtype;
}

/* ==== conv2d ================================================================================== */

/* Describes and plans the forward pass, or the gradient of input i. Before the call has a d_in[i],
 * the input itself stands for it. */
static lt_status conv_part(lt_cudnn *d, const lt_call *c, bool backward, int i, part *p)
{
    const lt_tensor *x = c->in[X] ? c->in[X] : c->d_in[X], *w = c->in[W] ? c->in[W] : c->d_in[W];
    const lt_tensor *y = backward ? c->d_out[0] : c->out[0];
    const lt_tensor *to = !backward ? y : c->d_in[i] ? c->d_in[i] : c->in[i];
    const lt_tensor *bias = backward ? NULL : lt__optional(c, c->in, B);
    const lt_conv v = lt__conv_of(c, x, w, y);
    lt_cudnn_task *task = &p->task;
    memset(p, 0, sizeof *p);
    put_sizes(task, &v);
    task->kind = !backward ? LT_CUDNN_CONV : i == X ? LT_CUDNN_CONV_DATA : LT_CUDNN_CONV_WEIGHTS;
    task->dtype = y->dtype;
    task->aligned = 1;
    task->bias = bias != NULL;
    task->add = backward && (c->add >> i & 1);
    if (!put(p, LT_CUDNN_X, backward && i == X ? to : x) ||
        !put(p, LT_CUDNN_W, backward && i == W ? to : w) || !put(p, LT_CUDNN_Y, y) ||
        (bias && !put(p, LT_CUDNN_B, bias)))
        return LT_EUNSUPPORTED;
    return lt__cudnn_plan(d, c->ctx, task, &p->workspace);
}

bool lt__cudnn_conv2d_computes(lt_cudnn *d, const lt_call *c, int i)
{
    part p;
    return conv_part(d, c, true, i, &p) != LT_EUNSUPPORTED;
}

size_t lt__cudnn_conv2d_scratch(lt_cudnn *d, const lt_call *c, bool backward)
{
    size_t max = 0;
    for (int i = X; i <= (backward ? W : X); i++) {
        if (backward && !c->d_in[i])
            continue;
        part p;
        lt_status status = conv_part(d, c, backward, i, &p);
        max = lt__cuda_scratch(max, status, p.workspace);
    }
    return max;
}

/* Runs a part that conv_part() has planned. */
static lt_status run_part(lt_cudnn *d, const lt_call *c, part *p)
{
    if (p->workspace > c->scratch_bytes)
        return LT_EUNSUPPORTED; /* the scratch is for another plan */
    return lt__cudnn_run(d, c->ctx, &p->task, p->operand, c->scratch, p->workspace);
}

lt_status lt__cudnn_conv2d_fwd(lt_cudnn *d, lt_call *c)
{
    part p;
    LT_TRY(conv_part(d, c, false, 0, &p));
    return run_part(d, c, &p);
}

lt_status lt__cudnn_conv2d_grad(lt_cudnn *d, lt_call *c, int i)
{
    part p;
    LT_TRY(conv_part(d, c, true, i, &p));
    return run_part(d, c, &p);
}
