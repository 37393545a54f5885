/* stand_in_cudnn.c - a libcudnn.so.9 that computes on the CPU, in plain loops over host memory. It
 * has the part of the graph API that ops/cuda/cudnn*.c call and is at least as strict as cuDNN: it
 * rejects attributes that are unknown, missing, inconsistent or of the wrong type. A plan reads the
 * descriptors that it was built from when it runs, so AddressSanitizer finds one that was destroyed
 * too early.
 */
#include "tests/cuda/stand_in_cudnn.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

stand_in stand_in_state = {.engines = {{{.number = 1, .note = -1}}}};

/* Each engine has tile size 3, and a split-k that is its number, which tells the engines apart. */
enum { KNOBS = 2 };

/* ==== Attributes ============================================================================== */

#define DESC CUDNN_TYPE_BACKEND_DESCRIPTOR
/* clang-format off */
#define CONV_RULES(type, prefix, x, w, y, result)                                                  \
    {CONV_TYPE(type), CONV_ATTR(prefix, CONV_DESC), DESC, 1, 1},                                   \
    {CONV_TYPE(type), CONV_ATTR(prefix, x), DESC, 1, 1},                                           \
    {CONV_TYPE(type), CONV_ATTR(prefix, w), DESC, 1, 1},                                           \
    {CONV_TYPE(type), CONV_ATTR(prefix, y), DESC, 1, 1},                                           \
    {CONV_TYPE(type), CONV_ATTR(prefix, ALPHA), CUDNN_TYPE_FLOAT, 1, 1},                           \
    {CONV_TYPE(type), CONV_ATTR(prefix, BETA), CUDNN_TYPE_FLOAT, 1, 1},
/* clang-format on */

/* Descriptor, attribute, type, minimum and maximum number of values; 0: it is optional. */
static const struct rule {
    int of, name, type, min, max;
} rules[] = {
#define TENSOR CUDNN_BACKEND_TENSOR_DESCRIPTOR
    {TENSOR, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, 1},
    {TENSOR, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, 4},
    {TENSOR, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, 4},
    {TENSOR, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, 1},
    {TENSOR, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, 1},
    {TENSOR, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 0, 1},
#define CONVOLUTION CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR
    {CONVOLUTION, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, 1},
    {CONVOLUTION, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, 1},
    {CONVOLUTION, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, 1, 1},
    {CONVOLUTION, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, 2, 2},
    {CONVOLUTION, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, 2, 2},
    {CONVOLUTION, CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, 2, 2},
    {CONVOLUTION, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, 2, 2},
#define POINTWISE CUDNN_BACKEND_POINTWISE_DESCRIPTOR
    {POINTWISE, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, 1},
    {POINTWISE, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, 1},
#define POINT_OP CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR
    {POINT_OP, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, DESC, 1, 1},
    {POINT_OP, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, DESC, 1, 1},
    {POINT_OP, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, DESC, 1, 1},
    {POINT_OP, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, DESC, 1, 1},
#define GRAPH CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR
    {GRAPH, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 0, 1},
    {GRAPH, CUDNN_ATTR_OPERATIONGRAPH_OPS, DESC, 1, 2},
#define HEURISTICS CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR
    {HEURISTICS, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, DESC, 1, 1},
    {HEURISTICS, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, 1},
    {HEURISTICS, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, DESC, 0, 1},
#define ENGINE CUDNN_BACKEND_ENGINE_DESCRIPTOR
    {ENGINE, CUDNN_ATTR_ENGINE_OPERATION_GRAPH, DESC, 1, 1},
    {ENGINE, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, 1},
    {ENGINE, CUDNN_ATTR_ENGINE_DEVICEPROP, DESC, 0, 1},
#define KNOB CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR
    {KNOB, CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1, 1},
    {KNOB, CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, 1, 1},
#define CONFIG CUDNN_BACKEND_ENGINECFG_DESCRIPTOR
    {CONFIG, CUDNN_ATTR_ENGINECFG_ENGINE, DESC, 1, 1},
    {CONFIG, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, DESC, 0, 8},
#define PLAN CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR
    {PLAN, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 0, 1},
    {PLAN, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, DESC, 0, 1},
    {PLAN, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, DESC, 1, 1},
#define PACK CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR
    {PACK, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, 1, 8},
    {PACK, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, 1, 8},
    {PACK, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, 1},
#define DEVICE CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR
    {DEVICE, CUDNN_ATTR_DEVICEPROP_DEVICE_ID, CUDNN_TYPE_INT32, 0, 1},
    {DEVICE, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, 0, 1 << 16},
    CONV_OPS(CONV_RULES)};
enum { RULES = sizeof rules / sizeof *rules };

static size_t type_bytes(int type)
{
    switch (type) {
    case CUDNN_TYPE_CHAR: return 1;
    case CUDNN_TYPE_BOOLEAN: return sizeof(bool);
    case CUDNN_TYPE_INT64: return sizeof(int64_t);
    case CUDNN_TYPE_FRACTION: return sizeof(cudnnFraction_t);
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: return sizeof(void *);
    default: return sizeof(int32_t); /* floats and enums */
    }
}

cudnnStatus_t refuse(cudnnStatus_t status, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(stand_in_state.error, sizeof stand_in_state.error, fmt, args);
    va_end(args);
    return status;
}

const attribute *find(const descriptor *d, int name)
{
    for (const attribute *a = d->attributes; a; a = a->next)
        if (a->name == name)
            return a;
    return NULL;
}

const void *values(const descriptor *d, int name)
{
    const attribute *a = find(d, name);
    return a ? a->values : NULL;
}

int64_t integer(const descriptor *d, int name) { return *(const int64_t *)values(d, name); }

int word(const descriptor *d, int name)
{
    const int32_t *value = values(d, name);
    return value ? *value : -1;
}

const descriptor *linked(const descriptor *d, int name)
{
    const descriptor *const *value = values(d, name);
    return value ? *value : NULL;
}

/* Returns from the calling function if the test has this call refused. */
#define BEGIN()                                                                                    \
    do {                                                                                           \
        const cudnnStatus_t begin_ = (cudnnStatus_t)stand_in_call(&stand_in_state, false);         \
        if (begin_ != CUDNN_STATUS_SUCCESS)                                                        \
            return refuse(begin_, "failure set by the test");                                      \
    } while (0)

/* ==== Descriptors ============================================================================= */

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t *made)
{
    BEGIN();
    descriptor *d = calloc(1, sizeof *d);
    if (!d)
        return CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED;
    d->type = (int)type;
    *made = d;
    stand_in_state.live++;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t desc)
{
    descriptor *d = desc;
    if (!d)
        return refuse(CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "cannot destroy a NULL descriptor");
    for (attribute *a; (a = d->attributes);) {
        d->attributes = a->next;
        free(a->values);
        free(a);
    }
    free(d);
    stand_in_state.live--;
    return (cudnnStatus_t)stand_in_call(&stand_in_state, false);
}

/* Stores an attribute that cudnnBackendSetAttribute() has checked. */
static cudnnStatus_t put(descriptor *d, int name, int type, int64_t n, const void *from)
{
    attribute *a = calloc(1, sizeof *a);
    if (!a || !(a->values = malloc((size_t)n * type_bytes(type) + 1)))
        abort();
    memcpy(a->values, from, (size_t)n * type_bytes(type));
    ((char *)a->values)[(size_t)n * type_bytes(type)] = 0;
    *a = (attribute){.name = name, .n = n, .values = a->values, .next = d->attributes};
    d->attributes = a;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t desc,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t n,
                                       const void *from)
{
    descriptor *d = desc;
    const struct rule *r = rules;
    BEGIN();
    while (r < rules + RULES && !(r->of == d->type && r->name == (int)name))
        r++;
    if (r == rules + RULES)
        return refuse(CUDNN_STATUS_NOT_SUPPORTED, "descriptor type %d has no attribute %d", d->type,
                      name);
    if (d->final || find(d, name))
        return refuse(CUDNN_STATUS_BAD_PARAM, "attribute %d is set already", name);
    if (r->type != (int)type)
        return refuse(CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE, "attribute %d is not of type %d", name,
                      type);
    if (n < r->min || n > r->max || n < 1 || !from)
        return refuse(CUDNN_STATUS_BAD_PARAM_SIZE_INSUFFICIENT, "attribute %d has %lld values",
                      name, (long long)n);
    for (int64_t i = 0; i < n && type == CUDNN_TYPE_BACKEND_DESCRIPTOR; i++)
        if (!((descriptor *const *)from)[i] || !((descriptor *const *)from)[i]->final)
            return refuse(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED,
                          "attribute %d refers to a descriptor that is not finalized", name);
    return put(d, name, type, n, from);
}

/* ==== Engines ================================================================================= */

/* Searches the engines of all modes; NULL if there is no such number. */
static const stand_in_engine *engine_of(int64_t number)
{
    for (int i = 0; i < STAND_IN_MODES * STAND_IN_ENGINES; i++) {
        const stand_in_engine *e =
            &stand_in_state.engines[i / STAND_IN_ENGINES][i % STAND_IN_ENGINES];
        if (e->number == number && number > 0)
            return e;
    }
    return NULL;
}

static cudnnStatus_t end_engine(descriptor *d)
{
    d->number = integer(d, CUDNN_ATTR_ENGINE_GLOBAL_INDEX);
    d->graph = linked(d, CUDNN_ATTR_ENGINE_OPERATION_GRAPH);
    return engine_of(d->number) ? CUDNN_STATUS_SUCCESS
                                : refuse(CUDNN_STATUS_BAD_PARAM_OUT_OF_BOUND, "no engine %lld",
                                         (long long)d->number);
}

static cudnnStatus_t end_config(descriptor *d)
{
    const attribute *knobs = find(d, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES);
    const descriptor *engine = linked(d, CUDNN_ATTR_ENGINECFG_ENGINE);
    const int64_t wanted[KNOBS][2] = {{CUDNN_KNOB_TYPE_TILE_SIZE, 3},
                                      {CUDNN_KNOB_TYPE_SPLIT_K_SLC, engine->number}};
    for (int64_t i = 0; i < KNOBS; i++) {
        const descriptor *knob = knobs && i < knobs->n ? ((descriptor **)knobs->values)[i] : NULL;
        if (!knob || knob->number != wanted[i][0] || knob->value != wanted[i][1])
            return refuse(CUDNN_STATUS_BAD_PARAM, "knob %lld does not belong to the engine",
                          (long long)i);
    }
    d->number = engine->number;
    d->graph = engine->graph;
    return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t end_plan(descriptor *d)
{
    const descriptor *config = linked(d, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
    const bool here = find(d, CUDNN_ATTR_EXECUTION_PLAN_HANDLE) != NULL;
    if (here == (find(d, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP) != NULL))
        return refuse(CUDNN_STATUS_BAD_PARAM, "a plan requires either a handle or a device");
    if (engine_of(config->number)->fails)
        return refuse(CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED, "the engine fails");
    d->number = config->number;
    stand_in_state.built++;
    return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t end(descriptor *d)
{
    switch (d->type) {
    case ENGINE: return end_engine(d);
    case CONFIG: return end_config(d);
    case PLAN: return end_plan(d);
    case KNOB:
        d->number = word(d, CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE);
        d->value = integer(d, CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE);
        return CUDNN_STATUS_SUCCESS;
    case HEURISTICS:
        if (stand_in_state.fail_query) {
            cudnnStatus_t status = (cudnnStatus_t)stand_in_state.fail_query;
            stand_in_state.fail_query = 0;
            return refuse(status, "failure set by the test");
        }
        d->graph = linked(d, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
        return CUDNN_STATUS_SUCCESS;
    case DEVICE:
        return d->attributes ? CUDNN_STATUS_SUCCESS : refuse(CUDNN_STATUS_BAD_PARAM, "no device");
    default: return check(d);
    }
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t desc)
{
    descriptor *d = desc;
    BEGIN();
    if (d->final)
        return refuse(CUDNN_STATUS_BAD_PARAM, "a descriptor of type %d is finalized twice",
                      d->type);
    for (const struct rule *r = rules; r < rules + RULES; r++)
        if (r->of == d->type && r->min > 0 && !find(d, r->name))
            return refuse(CUDNN_STATUS_BAD_PARAM, "a descriptor of type %d has no attribute %d",
                          d->type, r->name);
    cudnnStatus_t status = end(d);
    d->final = status == CUDNN_STATUS_SUCCESS;
    return status;
}

/* ==== Queries ================================================================================= */

/* Fills a descriptor that the caller created to receive a result. */
static void fill(descriptor *d, int64_t number, int64_t value, const descriptor *graph)
{
    d->number = number;
    d->value = value;
    d->graph = graph;
    d->final = true;
}

static int64_t get_configs(const descriptor *d, int64_t capacity, descriptor **configs)
{
    static const cudnnBackendHeurMode_t modes[STAND_IN_MODES] = {
        CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_B, CUDNN_HEUR_MODE_FALLBACK};
    int64_t n = 0;
    for (int mode = 0; mode < STAND_IN_MODES; mode++) {
        if (word(d, CUDNN_ATTR_ENGINEHEUR_MODE) != (int)modes[mode])
            continue;
        stand_in_state.queries[mode]++;
        for (int i = 0; i < STAND_IN_ENGINES && n < capacity; i++)
            if (stand_in_state.engines[mode][i].number > 0)
                fill(configs[n++], stand_in_state.engines[mode][i].number, 0, d->graph);
    }
    return n;
}

static int64_t get_text(const descriptor *d, int64_t capacity, char *text)
{
    const char *json = values(d, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION);
    if (!json)
        json = "{\"deviceName\": \"stand-in\"}";
    if (capacity > 0)
        memcpy(text, json, (size_t)capacity);
    return (int64_t)strlen(json);
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const desc,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t capacity,
                                       int64_t *n, void *to)
{
    const descriptor *d = desc;
    descriptor **made = to;
    const stand_in_engine *engine = engine_of(d->number);
    (void)type;
    BEGIN();
    if (!d->final)
        return refuse(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED,
                      "a descriptor of type %d is not finalized", d->type);
    *n = 1;
    if (d->type == HEURISTICS && name == CUDNN_ATTR_ENGINEHEUR_RESULTS)
        *n = get_configs(d, capacity, made);
    else if (d->type == CONFIG && name == CUDNN_ATTR_ENGINECFG_ENGINE)
        fill(made[0], d->number, 0, d->graph);
    else if (d->type == CONFIG && name == CUDNN_ATTR_ENGINECFG_KNOB_CHOICES && capacity >= KNOBS) {
        fill(made[0], CUDNN_KNOB_TYPE_TILE_SIZE, 3, NULL);
        fill(made[1], CUDNN_KNOB_TYPE_SPLIT_K_SLC, d->number, NULL);
        *n = KNOBS;
    } else if (d->type == KNOB && name == CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE)
        *(cudnnBackendKnobType_t *)to = (cudnnBackendKnobType_t)d->number;
    else if (d->type == KNOB && name == CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE)
        *(int64_t *)to = d->value;
    else if (d->type == ENGINE && name == CUDNN_ATTR_ENGINE_GLOBAL_INDEX)
        *(int64_t *)to = d->number;
    else if (d->type == ENGINE && name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE) {
        *n = engine->note >= 0;
        if (*n > 0)
            *(cudnnBackendNumericalNote_t *)to = (cudnnBackendNumericalNote_t)engine->note;
    } else if (d->type == PLAN && name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)
        *(int64_t *)to = engine->workspace;
    else if (d->type == DEVICE && name == CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION)
        *n = get_text(d, capacity, to);
    else
        return refuse(CUDNN_STATUS_NOT_SUPPORTED, "descriptor type %d has no attribute %d", d->type,
                      name);
    return CUDNN_STATUS_SUCCESS;
}

/* ==== Version, handles, execution ============================================================= */

size_t cudnnGetVersion(void)
{
    stand_in_state.versions++;
    return stand_in_state.version ? (size_t)stand_in_state.version : CUDNN_VERSION;
}

size_t cudnnGetCudartVersion(void)
{
    return stand_in_state.cuda ? (size_t)stand_in_state.cuda * 1000 : CUDART_VERSION;
}

const char *cudnnGetErrorString(cudnnStatus_t status)
{
    return status == CUDNN_STATUS_SUCCESS ? "CUDNN_STATUS_SUCCESS" : "CUDNN_STATUS_REFUSED";
}

void cudnnGetLastErrorString(char *message, size_t bytes)
{
    snprintf(message, bytes, "%s", stand_in_state.error);
}

cudnnStatus_t cudnnCreate(cudnnHandle_t *handle)
{
    BEGIN();
    *handle = calloc(1, sizeof **handle);
    stand_in_state.live++;
    return *handle ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED;
}

cudnnStatus_t cudnnDestroy(cudnnHandle_t handle)
{
    free(handle);
    stand_in_state.live--;
    return (cudnnStatus_t)stand_in_call(&stand_in_state, false);
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream)
{
    BEGIN();
    handle->stream = stream;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t pack)
{
    const descriptor *p = plan, *with = pack;
    const descriptor *config = linked(p, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
    const cudnnHandle_t *of = values(p, CUDNN_ATTR_EXECUTION_PLAN_HANDLE);
    if (!p->final || !with->final || !of || *of != handle)
        return refuse(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED,
                      "the plan or pack is not finalized, or the handle is another one");
    if (!handle->stream)
        return refuse(CUDNN_STATUS_BAD_PARAM,
                      "the handle has the default stream, which the backend never waits for");
    void *workspace = *(void *const *)values(with, CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
    size_t bytes = (size_t)engine_of(p->number)->workspace;
    if (bytes > 0 && !workspace)
        return refuse(CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "no workspace");
    if (bytes > 0)
        memset(workspace, 0xff, bytes);
    cudnnStatus_t status = (cudnnStatus_t)stand_in_call(&stand_in_state, true);
    if (stand_in_state.fail_run)
        status = (cudnnStatus_t)stand_in_state.fail_run;
    stand_in_state.fail_run = 0;
    if (CUDNN_STATUS_CATEGORY(status) >= CUDNN_STATUS_INTERNAL_ERROR)
        run_graph(config->graph, with); /* the result is written, and the call fails after that */
    if (status != CUDNN_STATUS_SUCCESS)
        return refuse(status, "failure set by the test");
    stand_in_state.run++;
    return run_graph(config->graph, with);
}
