/* test_stages.c - a net whose ops run on several stages of a pipeline: forward and backward pass
 * have the bits of one context. The stages run one after the other in this thread: the messages
 * between them wait in a list. */
#include <stdlib.h>
#include <string.h>

#include "amp/amp.h"
#include "autograd/stages.h"
#include "core/tensor.h"
#include "tests/autograd/train.h"

enum { STAGES = 3, ROWS = 6, WIDTH = 5, CLASSES = 3, MOST = 32 };

typedef struct letter { /* values, or their gradient on the way back */
    int from, to;
    bool is_grad, requires_grad, taken;
    size_t bytes;
    char data[4096];
} letter;

typedef struct post {
    letter letters[MOST];
    int n;
} post;

typedef struct sent { /* values that this stage has sent, whose gradient is expected */
    lt_tensor *x;
    int to;
} sent;

typedef struct net { /* all, or a stage of it */
    lt_ctx *ctx;
    lt_params *params;
    lt_tensor *w[STAGES], *scale, *shift, *mean, *var;
    post *post;
    int own;
    sent sent[MOST];
    lt_tensor *received[MOST];
    int to[MOST], n_sent, n_received;
    lt_tensor *loss; /* noted by lt_backward() */
    lt_tensor *made[MOST];
    int n_made;
} net;

/* ==== Messages ================================================================================ */

static void put(post *p, int from, int to, bool is_grad, bool requires_grad, lt_tensor *x)
{
    letter *l = &p->letters[p->n++];
    *l = (letter){.from = from, .to = to, .is_grad = is_grad, .requires_grad = requires_grad};
    l->bytes = (size_t)lt_count(x) * lt_dtype_bytes(lt_tensor_dtype(x));
    CHECK(p->n <= MOST && l->bytes <= sizeof l->data);
    CHECK_OK(lt_read(x, l->data));
}

static void take(post *p, int from, int to, bool is_grad, bool requires_grad, lt_tensor *x)
{
    for (int i = 0; i < p->n; i++) {
        letter *l = &p->letters[i];
        if (l->taken || l->from != from || l->to != to || l->is_grad != is_grad)
            continue;
        CHECK_EQ(l->requires_grad, requires_grad);
        CHECK_EQ(l->bytes, (size_t)lt_count(x) * lt_dtype_bytes(lt_tensor_dtype(x)));
        CHECK_OK(lt_write(x, l->data));
        l->taken = true;
        return;
    }
    FAIL("stage %d expects a message of stage %d, but there is none", to, from);
}

static int stage_of(void *ud, const char *name, const lt_tensor *x)
{
    (void)ud, (void)x;
    return name[strlen(name) - 1] - '0';
}

static lt_status send(void *ud, lt_tensor *x, int to, bool requires_grad, bool returns)
{
    net *n = ud;
    put(n->post, n->own, to, false, requires_grad, x);
    if (returns) {
        lt_tensor *root = lt__tensor_with_history(x);
        CHECK(root != NULL);
        n->sent[n->n_sent++] = (sent){root, to};
    }
    return LT_OK;
}

static lt_status expect(void *ud, lt_tensor *x, int from)
{
    net *n = ud;
    n->sent[n->n_sent++] = (sent){lt_retain(x), from};
    return LT_OK;
}

static lt_status receive(void *ud, lt_tensor *x, int from, int returns_to)
{
    net *n = ud;
    take(n->post, from, n->own, false, returns_to >= 0, x);
    n->to[n->n_received] = returns_to;
    n->received[n->n_received++] = lt_retain(x);
    return LT_OK;
}

static lt_status return_grad(void *ud, lt_tensor *x, lt_tensor *grad)
{
    net *n = ud;
    int i = 0;
    while (n->received[i] != x)
        i++;
    put(n->post, n->own, n->to[i], true, false, grad);
    return LT_OK;
}

static lt_status note_backward(void *ud, lt_tensor *loss, lt_tensor *grad)
{
    net *n = ud;
    CHECK(grad == NULL);
    if (!lt_is_meta(loss))
        n->loss = lt__tensor_with_history(loss);
    return LT_OK;
}

/* ==== The net ================================================================================= */

/* Notes x, which destroy() releases. */
static lt_tensor *noted(net *n, lt_tensor *x)
{
    CHECK(x != NULL && n->n_made < MOST);
    return n->made[n->n_made++] = x;
}

/* own: the stage, or -1 for all in one. */
static net make(post *p, int own, int frozen)
{
    net n = {.ctx = lt_open(&(lt_config){.seed = 5, .poison = true}), .post = p, .own = own};
    n.params = lt_params_new(n.ctx);
    n.w[0] = member(n.params, n.ctx, "w.0", false, 2, WIDTH, 0.7);
    n.w[1] = member(n.params, n.ctx, "w.1", false, 2, WIDTH, 0.7);
    n.w[2] = member(n.params, n.ctx, "w.2", false, 2, WIDTH, 0.7);
    n.scale = member(n.params, n.ctx, "scale.1", false, 1, WIDTH, 1);
    n.shift = member(n.params, n.ctx, "shift.1", false, 1, WIDTH, 0);
    n.mean = member(n.params, n.ctx, "mean.1", true, 1, WIDTH, 0);
    n.var = member(n.params, n.ctx, "var.1", true, 1, WIDTH, 1);
    if (frozen >= 0)
        CHECK_OK(lt_set_requires_grad(n.w[frozen], false));
    return n;
}

static void place(net *n)
{
    const lt_stage_hooks stages = {.ud = n,
                                   .own = n->own,
                                   .stages = STAGES,
                                   .stage_of = stage_of,
                                   .send = send,
                                   .receive = receive,
                                   .expect = expect,
                                   .return_grad = return_grad};
    const lt_step_part schedule = {.ud = n, .backward = note_backward};
    if (n->own >= 0) {
        CHECK_OK(lt_set_stage_hooks(n->ctx, &stages));
        CHECK_OK(lt_set_part(n->ctx, LT_PART_SCHEDULE, &schedule));
    }
    CHECK_OK(lt_params_place(n->params));
}

static void destroy(net *n)
{
    for (int i = 0; i < n->n_received; i++)
        lt_release(n->received[i]);
    for (int i = 0; i < n->n_sent; i++)
        lt_release(n->sent[i].x);
    for (int i = 0; i < n->n_made; i++)
        lt_release(n->made[i]);
    lt_release(n->loss);
    lt_params_free(n->params);
    lt_ctx_free(n->ctx);
}

/* The loss: three linear layers, with batch norm and dropout in the second. residual: the first
 * result is added to the third one. */
static lt_tensor *forward(net *n, bool residual)
{
    lt_ctx *c = n->ctx;
    lt_tensor *x = noted(n, lt_tensor_new(c, LT_F32, 2, (int64_t[]){ROWS, WIDTH}));
    lt_tensor *y = noted(n, lt_tensor_new(c, LT_I64, 1, (int64_t[]){ROWS}));
    CHECK_OK(lt_fill_normal(x, LT_RNG_USER, 1, 0, 0, 1));
    for (int64_t i = 0; i < ROWS; i++)
        ((int64_t *)lt_data(y))[i] = i % CLASSES;
    x = noted(n, lt_run(c, "add", NULL, x, x, NULL)); /* of data alone: on all ranks */
    CHECK(!lt_is_meta(x));
    lt_tensor *a = noted(n, lt_run(c, "linear", NULL, x, n->w[0], NULL));
    a = x = noted(n, lt_run(c, "relu", NULL, a, NULL));
    x = noted(n, lt_run(c, "linear", NULL, x, n->w[1], NULL));
    x = noted(n,
              lt_run(c, "batch_norm", "train=true", x, n->scale, n->shift, n->mean, n->var, NULL));
    x = noted(n, lt_run(c, "dropout", "p=0.3 train=true", x, NULL));
    x = noted(n, lt_run(c, "linear", NULL, x, n->w[2], NULL));
    x = noted(n, lt_run(c, "dropout", "p=0.3 train=true", x, NULL));
    if (residual)
        x = noted(n, lt_run(c, "add", NULL, x, a, NULL));
    return noted(n, lt_run(c, "cross_entropy", NULL, x, y, NULL));
}

/* Backward from the loss and from the values that were sent, the last ones first: in one context,
 * later ops come first, too. */
static void backward(net *n)
{
    lt_tensor *roots[MOST], *grads[MOST];
    int k = 0;
    if (n->loss) {
        roots[k] = n->loss;
        grads[k++] = NULL;
    }
    for (int i = n->n_sent - 1; i >= 0; i--) {
        lt_tensor *x = n->sent[i].x;
        roots[k] = x;
        grads[k] = lt_tensor_new(n->ctx, lt_tensor_dtype(x), lt_ndim(x), lt_dims(x));
        take(n->post, n->sent[i].to, n->own, true, false, grads[k++]);
    }
    CHECK_OK(lt_backward_from(n->ctx, roots, grads, k, NULL));
    for (int i = 0; i < k; i++)
        lt_release(grads[i]);
}

static void check_equal(lt_tensor *a, lt_tensor *b)
{
    size_t bytes = (size_t)lt_count(a) * lt_dtype_bytes(lt_tensor_dtype(a));
    char *x = malloc(bytes + 1), *y = malloc(bytes + 1);
    CHECK_OK(lt_read(a, x));
    CHECK_OK(lt_read(b, y));
    CHECK(memcmp(x, y, bytes) == 0);
    free(x);
    free(y);
}

static void check_stages(int frozen, lt_dtype amp)
{
    static post p;
    p.n = 0;
    net whole = make(NULL, -1, frozen), part[STAGES];
    place(&whole);
    lt_set_autocast(whole.ctx, amp);
    CHECK_OK(lt_scope_push(whole.ctx));
    lt_tensor *loss = forward(&whole, true);
    CHECK(loss != NULL);
    double expected, value;
    CHECK_OK(lt_item(loss, 0, &expected));
    CHECK_OK(lt_backward(loss, NULL));
    lt_scope *scopes[STAGES];
    for (int i = 0; i < STAGES; i++) {
        part[i] = make(&p, i, frozen);
        place(&part[i]);
        lt_set_autocast(part[i].ctx, amp);
        for (int k = 0; k < STAGES; k++)
            CHECK_EQ(lt_is_meta(part[i].w[k]), k != i);
        CHECK_OK(lt_scope_push(part[i].ctx));
        lt_tensor *own = forward(&part[i], true);
        CHECK(own != NULL);
        CHECK_EQ(lt_is_meta(own), i < STAGES - 1);
        CHECK_OK(lt_backward(own, NULL));
        if (i == STAGES - 1) {
            CHECK_OK(lt_item(own, 0, &value));
            CHECK_NEAR(value, expected, 0);
        } else {
            CHECK_FAILS(lt_item(own, 0, &value), LT_EINVAL, "only stage 2 of the pipeline has");
        }
        scopes[i] = lt__scope_take(part[i].ctx);
    }
    for (int i = STAGES - 1; i >= 0; i--) {
        backward(&part[i]);
        lt__scope_end(part[i].ctx, scopes[i]);
        lt_tensor *own = part[i].w[i];
        CHECK_EQ(lt_grad(own) != NULL, i != frozen);
        if (i != frozen)
            check_equal(lt_grad(own), lt_grad(whole.w[i]));
    }
    check_equal(lt_grad(part[1].scale), lt_grad(whole.scale));
    check_equal(lt_grad(part[1].shift), lt_grad(whole.shift));
    CHECK_OK(lt_bn_stats_commit(part[1].ctx));
    CHECK_OK(lt_bn_stats_commit(whole.ctx));
    check_equal(part[1].mean, whole.mean);
    check_equal(part[1].var, whole.var);
    for (int i = 0; i < p.n; i++)
        CHECK(p.letters[i].taken);
    lt_scope_pop(whole.ctx);
    destroy(&whole);
    for (int i = 0; i < STAGES; i++)
        destroy(&part[i]);
}

TEST(three_stages_have_the_bits_of_one_context) { check_stages(-1, LT_F32); }

/* A stage behind frozen ones returns no gradient. */
TEST(frozen_parameters)
{
    for (int i = 0; i < STAGES; i++)
        check_stages(i, LT_F32);
}

TEST(half_precision)
{
    check_stages(-1, LT_BF16);
    check_stages(-1, LT_F16);
}

/* Evaluation: values are sent, but no gradient is expected. */
TEST(without_gradients)
{
    static post p;
    p.n = 0;
    net part[STAGES];
    for (int i = 0; i < STAGES; i++) {
        part[i] = make(&p, i, -1);
        place(&part[i]);
        lt_grad_off(part[i].ctx);
        CHECK_OK(lt_scope_push(part[i].ctx));
        lt_tensor *loss = forward(&part[i], true);
        CHECK(loss != NULL && !lt_requires_grad(loss));
        lt_scope_pop(part[i].ctx);
        CHECK_EQ(part[i].n_sent, 0);
    }
    CHECK_EQ(p.n, 3); /* to stage 1; to stage 2, the result of stage 0 and that of stage 1 */
    for (int i = 0; i < STAGES; i++)
        destroy(&part[i]);
}

TEST(views_of_a_remote_tensor_are_remote)
{
    net n = make(NULL, 0, -1);
    place(&n);
    CHECK_OK(lt_scope_push(n.ctx));
    lt_tensor *rows = noted(&n, lt_rows(n.w[2], 1, 2));
    lt_tensor *flat = noted(&n, lt_view(n.w[2], 1, (int64_t[]){25}));
    CHECK(lt_is_meta(rows) && lt_dim(rows, 0) == 2 && lt_dim(rows, 1) == WIDTH);
    CHECK(lt_is_meta(flat) && lt_count(flat) == 25);
    CHECK(lt_data(rows) == NULL);
    lt_tensor *own = noted(&n, lt_detach(n.w[0]));
    CHECK(!lt_is_meta(own));
    CHECK(lt_run(n.ctx, "add", NULL, own, flat, NULL) == NULL); /* the shape rule runs */
    CHECK_MSG("add: ");
    lt_scope_pop(n.ctx);
    destroy(&n);
}

TEST(stages_are_used_in_their_order)
{
    static post p;
    p.n = 0;
    net n = make(&p, 0, -1);
    place(&n);
    CHECK_OK(lt_scope_push(n.ctx));
    lt_tensor *x = noted(&n, lt_tensor_new(n.ctx, LT_F32, 2, (int64_t[]){ROWS, WIDTH}));
    CHECK_OK(lt_fill(x, 1));
    lt_tensor *y = noted(&n, lt_run(n.ctx, "linear", NULL, x, n.w[2], NULL));
    CHECK_NULL(lt_run(n.ctx, "linear", NULL, y, n.w[1], NULL), LT_EUSAGE,
               "linear: a parameter belongs to stage 1 of the pipeline, but another input "
               "belongs to stage 2");
    lt_scope_pop(n.ctx);
    destroy(&n);
}
