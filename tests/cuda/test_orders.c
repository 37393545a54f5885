/* test_orders.c - runs the small cases of ops/cases.txt on the emulated CUDA device in three orders
 * of threads, with aligned and with misaligned tensors. A missing barrier or an unaligned load
 * would change a bit or fail. No kernel may wait for the device. test_cases.c checks the values. */
#include "ops/list.h"
#include "tests/cuda/reference.h"
#include "tests/ops/cases.h"

/* Appends the shape of input i: "2x3", "i64:5" or "-". Kernels of an op with to_floats get no
 * integers. */
static void add_shape(const lt_op *op, const op_case *c, int i, char *text, size_t capacity)
{
    size_t used = strlen(text);
    const char *kind = c->in[i].kind;
    used += (size_t)snprintf(text + used, capacity - used, "%s", i > 0 ? ", " : "");
    if (!is_float_kind(kind) && !op->to_floats)
        used += (size_t)snprintf(text + used, capacity - used,
                                 "%s:", lt_dtype_name(dtype_of_kind(kind)));
    for (int k = 0; k < c->in[i].ndim; k++)
        used += (size_t)snprintf(text + used, capacity - used, "%s%lld", k > 0 ? "x" : "",
                                 (long long)c->in[i].dims[k]);
    snprintf(text + used, capacity - used, "%s", c->in[i].ndim == 0 ? "-" : "");
}

/* The call of a case. Its results may differ from the reference by any number. */
static void check_case(machine *m, const lt_op *op, const op_case *c, lt_dtype dtype)
{
    char shapes[200] = "";
    spec s = {.op = c->op, .options = c->options, .dtype = dtype, .shapes = shapes};
    s.slack.by = INFINITY;
    for (int i = 0; i < c->n_in; i++) {
        const char *kind = c->in[i].kind;
        add_shape(op, c, i, shapes, sizeof shapes);
        if (!is_float_kind(kind))
            s.ids = strncmp(kind, "ids", 3) == 0 ? atoi(kind + 3) : 2;
        if (strcmp(kind, "positive") == 0)
            s.positive |= 1u << i;
    }
    check(m, s);
}

static void walk_op(const char *op)
{
    int n;
    const op_case *cases = all_cases(&n);
    machine m = machine_open();
    const lt_def *def = lt_op_find(m.ctx, op);
    for (int i = 0; i < n; i++)
        if (strcmp(cases[i].op, op) == 0 && !is_large(&cases[i]) && m.cuda.op[def->id].fwd)
            check_case(&m, def->op, &cases[i], floats[i % 3]);
    CHECK_EQ(m.kernel_waits, 0);
    lt_ctx_free(m.ctx);
}

#define X(name)                                                                                    \
    TEST(name) { walk_op(#name); }
LT_OP_LIST(X)
#undef X
