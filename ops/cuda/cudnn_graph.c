/* cudnn_graph.c - builds the graph descriptors of a task. */
#include "ops/cuda/cudnn_plan.h"

enum { X = LT_CUDNN_X, W, Y, B };
enum { BETWEEN = 100 }; /* id of the intermediate tensor; operands have their own ids */

/* ==== Descriptors ============================================================================= */

lt_desc lt__desc_new(lt_cudnn *d, lt_desc_list *list, cudnnBackendDescriptorType_t type)
{
    lt_desc made = NULL;
    if (d->status == CUDNN_STATUS_SUCCESS && list->n == LT_MAX_MADE)
        d->status = CUDNN_STATUS_INTERNAL_ERROR;
    if (d->status == CUDNN_STATUS_SUCCESS)
        d->status = d->t.cudnnBackendCreateDescriptor(type, &made);
    if (d->status == CUDNN_STATUS_SUCCESS)
        list->at[list->n++] = made;
    return made;
}

void lt__desc_truncate(lt_cudnn *d, lt_desc_list *list, int left)
{
    while (list->n > left)
        if (list->at[--list->n])
            d->t.cudnnBackendDestroyDescriptor(list->at[list->n]);
}

void lt__desc_set(lt_cudnn *d, lt_desc to, lt_attribute name, cudnnBackendAttributeType_t type,
                  int64_t n, const void *values)
{
    if (d->status == CUDNN_STATUS_SUCCESS)
        d->status = d->t.cudnnBackendSetAttribute(to, name, type, n, values);
}

void lt__desc_link(lt_cudnn *d, lt_desc to, lt_attribute name, lt_desc value)
{
    lt__desc_set(d, to, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

void lt__desc_ints(lt_cudnn *d, lt_desc to, lt_attribute name, int64_t n, const int64_t *values)
{
    lt__desc_set(d, to, name, CUDNN_TYPE_INT64, n, values);
}

static void set_type(lt_cudnn *d, lt_desc to, lt_attribute name, cudnnDataType_t value)
{
    lt__desc_set(d, to, name, CUDNN_TYPE_DATA_TYPE, 1, &value);
}

static void set_float(lt_cudnn *d, lt_desc to, lt_attribute name, float value)
{
    lt__desc_set(d, to, name, CUDNN_TYPE_FLOAT, 1, &value);
}

void lt__desc_finalize(lt_cudnn *d, lt_desc made)
{
    if (d->status == CUDNN_STATUS_SUCCESS)
        d->status = d->t.cudnnBackendFinalize(made);
}

int64_t lt__desc_get(lt_cudnn *d, lt_desc from, lt_attribute name, cudnnBackendAttributeType_t type,
                     int64_t n, void *values)
{
    int64_t count = 0;
    if (d->status == CUDNN_STATUS_SUCCESS)
        d->status = d->t.cudnnBackendGetAttribute(from, name, type, n, &count, values);
    return d->status == CUDNN_STATUS_SUCCESS ? count : 0;
}

/* ==== The graph of a task ===================================================================== */

static cudnnDataType_t type_of(const lt_cudnn_task *task)
{
    return task->dtype == LT_F16    ? CUDNN_DATA_HALF
           : task->dtype == LT_BF16 ? CUDNN_DATA_BFLOAT16
                                    : CUDNN_DATA_FLOAT;
}

/* The dims are in cuDNN's order (n, c, h, w); the strides put channels last in memory. */
static lt_desc tensor(lt_cudnn *d, lt_cudnn_plan *p, int64_t number, cudnnDataType_t type,
                      int64_t n, int64_t c, int64_t h, int64_t w)
{
    const lt_cudnn_task *task = &p->task;
    int64_t dims[4] = {n, c, h, w}, strides[4] = {h * w * c, 1, w * c, c};
    int64_t element = type == CUDNN_DATA_FLOAT ? 4 : 2;
    int64_t alignment = task->aligned || number == BETWEEN ? 16 : element;
    bool inside = number == BETWEEN;
    lt_desc t = lt__desc_new(d, &p->made, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    set_type(d, t, CUDNN_ATTR_TENSOR_DATA_TYPE, type);
    lt__desc_ints(d, t, CUDNN_ATTR_TENSOR_DIMENSIONS, 4, dims);
    lt__desc_ints(d, t, CUDNN_ATTR_TENSOR_STRIDES, 4, strides);
    lt__desc_ints(d, t, CUDNN_ATTR_TENSOR_UNIQUE_ID, 1, &number);
    lt__desc_ints(d, t, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 1, &alignment);
    lt__desc_set(d, t, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &inside);
    lt__desc_finalize(d, t);
    return t;
}

static lt_desc tensor_y(lt_cudnn *d, lt_cudnn_plan *p, int64_t number, cudnnDataType_t type)
{
    const lt_cudnn_task *task = &p->task;
    return tensor(d, p, number, type, task->n, task->out, task->out_size[0], task->out_size[1]);
}

static lt_desc convolution(lt_cudnn *d, lt_cudnn_plan *p)
{
    const lt_cudnn_task *task = &p->task;
    const int64_t axes = 2;
    const cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
    lt_desc c = lt__desc_new(d, &p->made, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
    set_type(d, c, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_DATA_FLOAT);
    lt__desc_set(d, c, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode);
    lt__desc_ints(d, c, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, 1, &axes);
    lt__desc_ints(d, c, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, 2, task->pad);
    lt__desc_ints(d, c, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, 2, task->pad);
    lt__desc_ints(d, c, CUDNN_ATTR_CONVOLUTION_DILATIONS, 2, task->dilation);
    lt__desc_ints(d, c, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, 2, task->stride);
    lt__desc_finalize(d, c);
    return c;
}

/* The attribute names of the three kinds of operation. */
static const struct {
    cudnnBackendDescriptorType_t type;
    lt_attribute conv, x, w, y, alpha, beta;
} conv_names[] = {
    [LT_CUDNN_CONV] = {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
                       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA},
    [LT_CUDNN_CONV_DATA] = {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
                            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA},
    [LT_CUDNN_CONV_WEIGHTS] = {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
                               CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                               CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                               CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                               CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
                               CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                               CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA},
};

/* y = from + bias, in f32. */
static lt_desc bias_operation(lt_cudnn *d, lt_cudnn_plan *p, lt_desc from)
{
    const lt_cudnn_task *task = &p->task;
    const cudnnPointwiseMode_t mode = CUDNN_POINTWISE_ADD;
    lt_desc add = lt__desc_new(d, &p->made, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    lt__desc_set(d, add, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set_type(d, add, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_DATA_FLOAT);
    lt__desc_finalize(d, add);
    lt_desc bias = tensor(d, p, B, type_of(task), 1, task->out, 1, 1);
    lt_desc y = tensor_y(d, p, Y, type_of(task));
    lt_desc op = lt__desc_new(d, &p->made, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    lt__desc_link(d, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, add);
    lt__desc_link(d, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, from);
    lt__desc_link(d, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, bias);
    lt__desc_link(d, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    lt__desc_finalize(d, op);
    return op;
}

static int operations(lt_cudnn *d, lt_cudnn_plan *p, lt_desc *ops)
{
    const lt_cudnn_task *task = &p->task;
    lt_desc conv = convolution(d, p);
    lt_desc x = tensor(d, p, X, type_of(task), task->n, task->in, task->size[0], task->size[1]);
    lt_desc w = tensor(d, p, W, type_of(task), task->out, task->in / task->groups, task->kernel[0],
                       task->kernel[1]);
    lt_desc y = task->bias ? tensor_y(d, p, BETWEEN, CUDNN_DATA_FLOAT)
                           : tensor_y(d, p, Y, type_of(task));
    lt_desc op = ops[0] = lt__desc_new(d, &p->made, conv_names[task->kind].type);
    lt__desc_link(d, op, conv_names[task->kind].conv, conv);
    lt__desc_link(d, op, conv_names[task->kind].x, x);
    lt__desc_link(d, op, conv_names[task->kind].w, w);
    lt__desc_link(d, op, conv_names[task->kind].y, y);
    set_float(d, op, conv_names[task->kind].alpha, 1);
    set_float(d, op, conv_names[task->kind].beta, task->add ? 1 : 0);
    lt__desc_finalize(d, op);
    if (task->bias)
        ops[1] = bias_operation(d, p, y);
    return task->bias ? 2 : 1;
}

void lt__cudnn_graph(lt_cudnn *d, lt_cudnn_plan *p)
{
    lt_desc ops[2];
    int n = operations(d, p, ops);
    p->graph = lt__desc_new(d, &p->made, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    if (d->handle)
        lt__desc_set(d, p->graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1,
                     &d->handle);
    lt__desc_set(d, p->graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, n, ops);
    lt__desc_finalize(d, p->graph);
}
