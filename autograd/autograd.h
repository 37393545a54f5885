/* autograd.h - the door of autograd: what an op is, how one is called, the tape, backward,
 * hooks, parameters.
 *
 * An op is a constant lt_op: a signature text, a shape rule, kernels. A context registers ops by
 * name. There is one way to run one, lt_apply(): check the arguments, apply the shape rule, make
 * the outputs, run the kernel, record a node. Backward walks the nodes in reverse order of
 * recording. Gradients of gradients are out of scope: backward itself is not recorded.
 */
#ifndef LUATRAIN_AUTOGRAD_H
#define LUATRAIN_AUTOGRAD_H

#include "core/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ==== Signatures and options ================================================================== */

/* "conv2d(x, w, b?; stride=1, pad=0, dilation=1, groups=1)"
 *
 * Inputs come before the semicolon: `b?` may be left out, `x...` stands for one or more tensors.
 * Options follow. The default's form gives an option its kind:
 *   stride=1        integers: one, or a list of them, such as a value per axis
 *   eps=1e-5        a number (its default has a point, an exponent, or is inf or -inf)
 *   lr#             a number, must be given
 *   train=false     true or false
 *   act=none|relu   one of these words; the first is the default
 *   dtype=f32       a dtype
 *   stride=kernel   integers that default to the option before it of that name
 *   kernel          integers, must be given;  axis? integers, may be left out
 *
 * Options named axis, axes, first and last are positions: C counts them from 0, Lua from 1;
 * negatives count from the end in both. */
enum { LT_MAX_IN = 6, LT_MAX_OUT = 4, LT_MAX_OPT = 8, LT_MAX_LIST = 64 };

typedef enum lt_kind { LT_INTS, LT_NUMBER, LT_BOOL, LT_DTYPE, LT_WORD } lt_kind;

typedef struct lt_opt {          /* one option of one call */
    uint8_t kind;                /* lt_kind */
    uint8_t n;                   /* values held; 0: not given and without a default */
    union {
        int64_t i[LT_MAX_DIMS];  /* LT_INTS; others use i[0]: a truth, an lt_dtype, the index of
                                  * a word */
        double f;                /* LT_NUMBER */
    };
} lt_opt;

typedef struct lt_schema {
    char name[24];
    int n_in, min_in;            /* inputs in the signature; how many must be there */
    bool variadic;               /* the last input stands for one or more */
    int n_opt;
    struct { char name[16]; bool optional; } in[LT_MAX_IN];
    struct {
        char name[16];
        bool optional, position; /* may be left out without a default; is a position */
        int8_t same_as;          /* index of the option that gives the default, or -1 */
        lt_opt value;            /* kind, and the default */
        const char *words;       /* LT_WORD: where the signature lists them. Borrowed */
    } opt[LT_MAX_OPT];
} lt_schema;

/* LT_EINVAL with the place when the signature is malformed. The schema borrows from it. */
LT_MUST lt_status lt_schema_parse(const char *signature, lt_schema *schema);
/* Index of the option, or -1 with "unknown option 'strides' (did you mean 'stride'?)". */
LT_API int lt_schema_find(const lt_schema *schema, const char *option);
/* Index of a word that option k, an LT_WORD, may be; or -1 with "option 'act' wants none, relu or
 * relu6, not 'rellu' (did you mean 'relu'?)". */
LT_API int lt_schema_word(const lt_schema *schema, int k, const char *word);
/* opts[0..n_opt) = "stride=2 pad=1,1 train=true" over the defaults; text may be NULL. LT_EINVAL
 * for an unknown option, a malformed value or a missing one. */
LT_MUST lt_status lt_opts_parse(const lt_schema *schema, const char *text, lt_opt *opts);
/* The two halves of that, for bindings: all as not given; then, when all given ones are set, the
 * defaults. */
LT_API void lt_opts_clear(const lt_schema *schema, lt_opt *opts);
LT_MUST lt_status lt_opts_complete(const lt_schema *schema, lt_opt *opts);

/* ==== What an op is =========================================================================== */

typedef struct lt_op lt_op;
typedef struct lt_def lt_def;
typedef struct lt_call lt_call;

typedef struct lt_spec {         /* an output before it has memory */
    lt_dtype dtype;
    int ndim;
    int64_t dims[LT_MAX_DIMS];
    int view; /* 1 + index of the input that it is a view of; 0: memory of its own */
    int64_t offset;              /* of such a view, in elements */
} lt_spec;

/* One run of a kernel. Forward reads in and writes out. Backward reads what was saved and d_out,
 * and writes d_in where it is not NULL: over what is there, or added to it when its bit in `add`
 * is set. */
struct lt_call {
    lt_ctx *ctx;
    struct lt_device *device;    /* where all its tensors are; that of tensor.h */
    const lt_op *op;
    const lt_schema *schema;     /* names, for messages */
    const lt_opt *opt;           /* by position in the signature */
    int n_in;                    /* inputs of the call; absent optional ones are NULL */
    lt_tensor **in;              /* backward: NULL unless saved */
    lt_tensor **out;             /* op->n_out + op->n_aux; backward: NULL unless saved */
    lt_tensor **d_out;           /* op->n_out; NULL: no gradient came, take it as zero */
    lt_tensor **d_in;            /* n_in; NULL: not wanted */
    uint64_t add;                /* bit i: add to d_in[i] */
    uint64_t leaves;             /* backward, bit i: d_in[i] is a leaf's gradient */
    uint32_t save, same_grad;    /* the op's; its shape rule may clear bits for this call */
    lt_spec *spec;               /* shape rule only: one for each of out */
    bool draws;                  /* set by a shape rule whose kernel will use stream */
    void *scratch;               /* scratch() bytes of the device, 64-byte aligned */
    double *sums;                /* op->sums() of them, or NULL: see there */
    bool summed;
    int64_t n_sums;
    int threads;
    uint64_t stream;             /* of random numbers: step << 32 | number of this drawing call in
                                  * its pass, recorded or not. Calls with gradients off have numbers
                                  * of their own and bit 63 set: they shift nothing */
    int64_t first_row;           /* global index of row 0 of the batch */
    const int32_t *skip;         /* of an op in place, on an accelerator: in its memory, or NULL.
                                  * Where it is not 0 when the kernel runs, that changes nothing */
    const double *factor;        /* of an update, in the device's memory: gradients are multiplied
                                  * by it; NULL: by 1 */
};

typedef lt_status (*lt_kernel)(lt_call *call);

/* What is found in numbers such as gradients, all together. */
typedef struct lt_grad_stats {
    double largest;      /* magnitude of those that are finite; 0: there are none */
    int64_t not_finite;
} lt_grad_stats;

/* What an accelerator knows of a step before the host does; in its memory. */
typedef struct lt_step_check {
    int32_t skip;        /* not 0: the step changes nothing */
    int32_t padding;
    double loss;         /* the first that is not finite; 0: there is none */
    lt_grad_stats grads; /* in gradients, when they were checked; something not finite sets skip */
    double factor, norm; /* of gradients that are clipped: of the call; and their norm, if it is not
                          * finite, which sets skip. 0: it is, or nobody has asked */
} lt_step_check;

#define LT_NO_SCRATCH SIZE_MAX

/* What an accelerator has for an op. Its kernels take halves as they are. They return when the work
 * is in the device's stream. All that lt_op says of backward holds for them too: grad_in_place, and
 * what `add` asks for. */
typedef struct lt_kernels {
    /* Bytes of its memory; LT_NO_SCRATCH: it has failed, and set this thread's message. NULL: 0. */
    size_t (*scratch)(const lt_call *call, bool backward);
    lt_kernel fwd, bwd; /* NULL: none. LT_EUNSUPPORTED: not for this dtype or these options */
    bool f32_grads; /* bwd may be given an f32 d_in where the input is a half: the gradient of a
                     * parameter that was read through its half copy. Else each d_in has the dtype
                     * of its input, and is converted behind bwd */
} lt_kernels;

/* What backward may read: inputs, outputs, extra outputs. */
#define LT_SAVE_IN(i)  (1u << (i))
#define LT_SAVE_OUT(i) (1u << (8 + (i)))  /* extra outputs follow the outputs in this count */

typedef enum lt_cast_policy {    /* under autocast an op ... */
    LT_CAST_ANY,                 /* takes what comes */
    LT_CAST_HALF,                /* runs in half precision */
    LT_CAST_F32,                 /* runs in f32 */
    LT_CAST_WIDEST               /* brings its inputs to the widest of their types */
} lt_cast_policy;

struct lt_op {
    const char *sig;
    const char *doc;             /* one sentence with the formula */
    lt_cast_policy cast;
    uint8_t n_out;               /* tensors given back; 0 means 1, unless in_place */
    uint8_t n_aux;               /* further outputs, seen by backward and `after` only */
    uint8_t in_place;            /* bit i: writes input i. Such an op gives nothing back and is
                                  * never recorded */
    bool whole_params;           /* an update op that wants a parameter at a time, and all of it */
    bool any_dtype; /* kernels take f16 and bf16 as they are; else they get f32 copies */
    bool fast_bf16; /* the fast kernels take bf16 as it is, and f32 beside it: parameters, and the
                     * gradients of half copies (lt_half). Where they hand over, the reference gets
                     * f32 copies */
    uint32_t save;               /* LT_SAVE_* */
    uint32_t
        same_grad; /* bit i: the gradient of input i is d_out[0] itself where the counts agree */
    uint8_t grad_in_place;       /* bit i, of one input: backward may be given d_in[i] in the memory
                                  * of d_out[0], when nobody else will read that. The kernel writes
                                  * an element once it has read that place, after all other d_in */
    lt_status (*shape)(lt_call *call);                   /* checks in and opt, fills spec */
    size_t (*scratch)(const lt_call *call, bool backward); /* may be NULL */
    /* How many numbers of its kernel a call wants summed over all ranks, the first of them a count;
     * NULL: none ever. Where there are other ranks, see lt_set_allreduce(), the kernel runs twice:
     * first it fills call->sums, then it goes on with the sums, and call->summed set. Elsewhere
     * call->sums is NULL, and what it has itself is all. */
    int64_t (*sums)(const lt_call *call, bool backward);
    lt_kernel fwd, bwd; /* the plain reference; bwd NULL: not differentiable; views need no fwd */
    lt_kernel fast_fwd,
        fast_bwd; /* fast CPU path or NULL; LT_EUNSUPPORTED hands over to the reference */
    lt_status (*after)(lt_call *call); /* once a recorded or unrecorded forward is done, or NULL */
};

struct lt_def {                  /* an op as one context knows it */
    const lt_op *op;
    lt_schema schema;
    lt_opt defaults[LT_MAX_OPT]; /* valid when no option must be given */
    bool must_give;              /* some option has no default */
    int id;                      /* order of registration */
};

/* How many tensors it gives back; those of n_aux follow them in lt_call.out. */
static inline int lt_op_outputs(const lt_op *op) { return op->n_out ? op->n_out : !op->in_place; }
/* op is kept by address. LT_EINVAL: malformed signature, or the name is taken. */
LT_MUST lt_status lt_op_register(lt_ctx *ctx, const lt_op *op);
/* By name. NULL with LT_EINVAL and a suggestion. Borrowed. */
LT_API const lt_def *lt_op_find(lt_ctx *ctx, const char *name);
/* By order of registration; NULL past the end. Borrowed. */
LT_API const lt_def *lt_op_at(lt_ctx *ctx, int i);
/* Looks at a loss of one element, on an accelerator and in its stream: one that is not finite goes
 * into *check, unless there is one, and sets skip. */
typedef lt_status (*lt_check_loss_fn)(lt_tensor *loss, lt_step_check *check);
/* In the stream, too: check->factor = what brings a norm down to `most`, 1 if it is not beyond.
 * The norm squared is what is in the tensor, f64; one that is not finite sets skip. */
typedef lt_status (*lt_clip_fn)(lt_tensor *squares, double most, lt_step_check *check);
/* What the accelerator of ctx has for the first n ops that were registered. Borrowed while ops
 * run. */
LT_API void lt_set_kernels(lt_ctx *ctx, const lt_kernels *kernels, int n,
                           lt_check_loss_fn check_loss, lt_clip_fn clip);

/* ==== Running ops ============================================================================= */

/* out[0..n_out) = def(in[0..n_in)); new. opts NULL means all defaults; else n_opt complete
 * options. Absent optional inputs are NULL or past the end. On failure nothing is made. */
LT_MUST lt_status lt_apply(lt_ctx *ctx, const lt_def *def, lt_tensor *const *in, int n_in,
                           const lt_opt *opts, lt_tensor **out);
/* By name and option text, for ops that give back one tensor; the inputs end with NULL. New.
 * NULL on failure.
 *     lt_tensor *y = lt_run(ctx, "conv2d", "stride=2 pad=1", x, w, b, NULL); */
LT_API lt_tensor *lt_run(lt_ctx *ctx, const char *op, const char *options, ...)
    __attribute__((sentinel));
/* The same with the inputs in an array. */
LT_API lt_tensor *lt_runv(lt_ctx *ctx, const char *op, const char *options, lt_tensor *const *in,
                          int n_in);

/* While the count of off is above that of on, ops are not recorded. */
LT_API void lt_grad_off(lt_ctx *ctx);
LT_API void lt_grad_on(lt_ctx *ctx);
LT_API bool lt_grad_enabled(const lt_ctx *ctx);

/* ==== The tape and backward =================================================================== */

/* Makes x (a float tensor that no recorded op made) a leaf that collects a gradient, or stops
 * it. */
LT_MUST lt_status lt_set_requires_grad(lt_tensor *x, bool on);
/* True for leaves that collect and for all that was computed from them. */
LT_API bool lt_requires_grad(const lt_tensor *x);
/* The gradient of a leaf, or NULL when none has come since lt_zero_grad. Borrowed. */
LT_API lt_tensor *lt_grad(lt_tensor *x);
/* Forgets the gradient: the next one is written, not added. lt_grad() is the leaf's own memory,
 * which the next backward writes again. */
LT_API void lt_zero_grad(lt_tensor *x);
/* x's values without its history. A view. New. */
LT_API lt_tensor *lt_detach(lt_tensor *x);

/* Adds d loss / d leaf to the gradient of every leaf that loss was computed from. grad is the
 * gradient of the loss, NULL for 1 (the loss must then hold one element). Frees saved tensors as
 * it walks: a second backward through the same nodes is LT_EINVAL. A loss of one element that is
 * not finite is LT_ENUMERIC; on an accelerator as said of lt_synchronize(). */
LT_MUST lt_status lt_backward(lt_tensor *loss, lt_tensor *grad);

/* An accelerator is not waited for: it decides itself whether a step is to be applied, and the host
 * hears of it late, before it begins the next backward at the latest, when it waits for what the
 * accelerator had done before the last optimizer step. Until then
 *   a loss that is not finite, or a norm of gradients that were clipped, has not failed yet. Then
 *     the next backward does, or whoever asks, and weights, slots and running statistics are as
 *     they were before it. The gradients that a loss has left are to be forgotten: until
 *     lt_zero_grad() is called, steps change nothing;
 *   the outcome of an optimizer step is LT_PENDING.
 * Steps, skips and bits are those of decisions at once. While ops are timed, traced or hooked, a
 * loss is waited for.
 *
 * Waits until nothing is unknown. LT_ENUMERIC for such a number, once; else LT_OK, or what has gone
 * wrong on the accelerator. Where there is none it does nothing. */
LT_MUST lt_status lt_synchronize(lt_ctx *ctx);
/* The same for who cannot fail: that is left to the next one who can. */
LT_API void lt_synchronize_quiet(lt_ctx *ctx);

/* A tape is what belongs to one pass over one part of the batch: its nodes, its place in the
 * global batch, the count of its random calls. A context starts with one; pipelines use several. */
typedef struct lt_tape lt_tape;
LT_API lt_tape *lt_tape_new(lt_ctx *ctx);  /* new */
LT_API void lt_tape_free(lt_tape *tape);   /* its nodes go with it */
/* Records on tape from now on; NULL: the context's own. Returns the one before. Borrowed. */
LT_API lt_tape *lt_tape_use(lt_ctx *ctx, lt_tape *tape);
LT_API lt_tape *lt_tape_current(lt_ctx *ctx);
/* What runs from now on is a pass over rows of the global batch from first_row on: random calls are
 * counted from the first again, so that a batch in micro-batches draws what a whole one does. An
 * optimizer step goes back to row 0. A step that begins by it draws the same, whatever ran before.
 * */
LT_API void lt_tape_set_first_row(lt_tape *tape, int64_t first_row);
LT_API int lt_tape_nodes(const lt_tape *tape);
/* Number i of the tensors that are kept for the backward of the op that made x; NULL past the last
 * one, or when x has no history. Borrowed. */
LT_API lt_tensor *lt_saved(const lt_tensor *x, int i);

/* ==== Hooks =================================================================================== */

/* Called once per backward for leaf x when its last contribution of this backward is in grad; a
 * failure ends the backward. In order of registration. Hooks see ops unrecorded. They may change
 * grad; one that forgets it, by lt_zero_grad(), fails where other ranks count on it. A hook may
 * release x, which lives until all its hooks are done. A hook that is registered while hooks of x
 * run is first called in the next backward. Hooks must not go backward, nor free the tape. */
typedef lt_status (*lt_grad_hook)(void *ud, lt_tensor *x, lt_tensor *grad);
/* ud is taken: free (may be NULL) is called with it when the leaf goes, or at once on failure. A
 * hook stays as long as its leaf. LT_EINVAL for the result of an op, and for the 1001st hook. */
LT_MUST lt_status lt_on_grad(lt_tensor *x, lt_grad_hook hook, void *ud, void (*free)(void *ud));

/* For tests: param is what LUATRAIN_FAULT=inf:rank=0:step=7:param=NAME names, and its gradient of
 * that step gets an inf, if this is that rank. In a context with such a fault lt_optim_step() wants
 * this to have been called. */
LT_API void lt_grad_fault(lt_tensor *param, int rank);

/* What becomes of the gradients that an optimizer finds. */
typedef enum lt_step_status {
    LT_APPLIED,
    LT_SKIPPED, /* a step that changes nothing, running statistics neither */
    LT_ACCUMULATING, /* no step yet: more of the batch is to come */
    LT_PENDING /* the one or the other of the first two, the accelerator knows: see lt_synchronize()
                */
} lt_step_status;

typedef struct lt_external_memory { /* memory of someone else; deleter(ud, data) frees it */
    void *data;
    void (*deleter)(void *ud, void *data);
    void *ud;
} lt_external_memory;

/* What amp and dist fill: one occupant per slot, called with its ud; NULL functions are skipped. */
typedef struct lt_grad_slots {
    void *ud;
    /* Uses are counted, no gradient has come. */
    lt_status (*begin)(void *ud, lt_ctx *ctx, lt_tensor *loss);
    lt_grad_hook ready;          /* after the leaf's own hooks */
    /* Backward is done, or has failed: status, which may be replaced. Follows each begin. */
    lt_status (*end)(void *ud, lt_ctx *ctx, lt_status status);
    /* Before an optimizer step reads gradients. */
    lt_status (*update)(void *ud, lt_ctx *ctx, lt_step_status *step_status);
    /* Before anybody else reads or forgets one, but in backward: waits for who writes to them. */
    void (*synchronize)(void *ud);
    /* Zeros for an arena of gradients, which may outlive what is in the slots. False, or NULL: the
     * context's own memory is taken. */
    bool (*alloc_arena)(void *ud, size_t bytes, lt_external_memory *memory);
} lt_grad_slots;
LT_API void lt_set_grad_slots(lt_ctx *ctx,
                              const lt_grad_slots *slots); /* copied; NULL empties them */

/* For those who fill them. Where a placed parameter's gradient lies: elements from `offset` on of
 * an arena, which is made if need be, and whose padding is zero. Behind its end are LT_GRAD_ROOM
 * bytes more, for whoever sends the gradients to send something with them. */
enum { LT_GRAD_ROOM = 2048 };
typedef struct lt_grad_place {
    void *arena;
    lt_dtype dtype;
    int64_t offset, end;         /* end: of the arena */
} lt_grad_place;
LT_MUST lt_status lt_grad_find(lt_tensor *param, lt_grad_place *place);
/* How many nodes may still add to x's gradient in the running backward. */
LT_API int lt_grad_uses(const lt_tensor *x);
/* A gradient is in x's place, whoever has written it. more: this step has added to it, here or
 * elsewhere. Not within backward. */
LT_MUST lt_status lt_grad_set(lt_tensor *x, bool more);

/* Who scales gradients up while they go backward, so that they fit f16: amp. From the hooks of a
 * leaf on they are true. Called with its ud; all are there. */
typedef struct lt_scaling {
    void *ud;
    /* Multiplies the gradient that a backward begins with. */
    lt_status (*seed)(void *ud, lt_tensor *grad);
    /* This backward is going to add to the gradient of leaf x that earlier ones have left. */
    lt_grad_hook join;
    /* x's last contribution of this backward is in grad. Before the leaf's own hooks. */
    lt_grad_hook complete;
    /* That leaf has hooks of its own, which were called: grad is what they have left. */
    lt_grad_hook changed;
    /* By lt_grad_set() x has a gradient to which this step has added: grad, which is true, and
     * which the check to come is about as well. It may be complete already, as above. */
    lt_grad_hook given;
    /* Before an optimizer step reads gradients, and after lt_grad_slots.update: LT_APPLIED may
     * become LT_SKIPPED. Not when more of the batch is to come. It may become LT_PENDING, when what
     * was found is on its way into lt_step_check_of(). */
    lt_status (*decide)(void *ud, lt_step_status *step_status);
    /* What was pending: what was found. Returns whether the step was applied. NULL: it was none,
     * as its loss was not finite. By then another one may be in use. */
    bool (*resolve)(void *ud, const lt_grad_stats *stats);
    /* Why the loss is not finite, so that backward fails: a sentence, or "". Borrowed until the
     * next call. */
    const char *(*explain)(void *ud, lt_tensor *loss);
} lt_scaling;
/* Copied; NULL: gradients are not scaled. LT_EINVAL within backward and in a dry run. An
 * optimizer's step with gradients that another one has scaled, who has not been asked, is too. */
LT_MUST lt_status lt_set_scaling(lt_ctx *ctx, const lt_scaling *scaling);
/* On the accelerator of ctx, for its stream; NULL before the first backward there. Borrowed. */
LT_API lt_step_check *lt_step_check_of(lt_ctx *ctx);
/* Whether x has a gradient, and the one with this ud has scaled what is in it. */
LT_API bool lt_grad_scaled_by(const lt_tensor *x, const void *ud);
/* Whether an optimizer has this parameter. */
LT_API bool lt_has_optim(const lt_tensor *x);

/* The cast policy's slot: may replace in[i] (new references then, recorded like any op). */
typedef lt_status (*lt_cast_fn)(void *ud, const lt_def *def, lt_tensor **in, int n_in);
LT_API void lt_set_cast(lt_ctx *ctx, lt_cast_fn fn, void *ud);
/* What is in it, NULL when nothing is. */
LT_API lt_cast_fn lt_get_cast(const lt_ctx *ctx, void **ud);

/* numbers[0..n) = their sums over all ranks, for ops in training whose result depends on the whole
 * batch; dist has one. numbers[0] counts rows. In backward the others are sums of the gradient of a
 * rank's own loss, so each rank's are weighted as its loss is. NULL: there are no other ranks. */
typedef lt_status (*lt_allreduce_fn)(void *ud, double *numbers, int64_t n, bool backward);
LT_API void lt_set_allreduce(lt_ctx *ctx, lt_allreduce_fn fn, void *ud);

/* What a kernel took: called after each with its call and seconds, for tables of where the time
 * goes; NULL: no longer. Meanwhile each kernel of an accelerator is waited for. */
typedef void (*lt_timer_fn)(void *ud, const lt_call *call, bool backward, double seconds);
LT_API void lt_set_timer(lt_ctx *ctx, lt_timer_fn fn, void *ud);

/* Who looks at what ops make: called after each kernel of a recorded or unrecorded op, and of its
 * backward, with its call and where it comes from, as below. It may change nothing. While there is
 * one, no gradient is written over another. NULL: nobody. */
typedef void (*lt_op_hook_fn)(void *ud, const lt_call *call, bool backward, const char *where);
LT_API void lt_set_op_hook(lt_ctx *ctx, lt_op_hook_fn fn, void *ud);
/* The same after the fact, for the ops that loss was computed from, in their order, before a
 * backward has come by. The call has what is kept for backward, and outputs that can be made of it
 * once more; what is neither is NULL. */
LT_API void lt_replay_ops(lt_tensor *loss, lt_op_hook_fn fn, void *ud);
/* For such a one: the kernel once more, with f32 in the place of halves. *value: element `index` of
 * what it gives for out[i], or backward for d_in[i], without what that was added to.
 * LT_EUNSUPPORTED where other ranks would have to take part, and for ops in place. */
LT_MUST lt_status lt_recompute_f32(const lt_call *call, bool backward, int i, int64_t index,
                                double *value);

/* A dry run: a pass that is gone through once more, to be looked at, before what belongs to the
 * training. It draws the random numbers that the next pass draws, and until it ends nothing comes
 * of what is computed: backward calls nobody's hooks, what is in lt_grad_slots neither, it forgets
 * the gradient of a leaf as soon as that is complete, and takes any loss; gradients that were there
 * stay as they are; lt_bn_stats_add() and lt_zero_grad() do nothing; this rank is the only one. An
 * optimizer's step or norm, backward through what was recorded before, and another dry run are
 * LT_EINVAL. Meanwhile scaling is in the place of the one there was, or none if it is NULL: of its
 * functions only seed and complete are called, if they are there. So is op_hook. */
LT_MUST lt_status lt_dry_run_begin(lt_ctx *ctx, const lt_scaling *scaling, lt_op_hook_fn op_hook,
                                     void *ud);
/* What was recorded is freed. */
LT_API void lt_dry_run_end(lt_ctx *ctx);

/* Who calls: fills where with "train.lua:9: net.4 " or "". Kept in nodes, put before messages of
 * backward. */
typedef void (*lt_where_fn)(void *ud, char *where, size_t bytes);
LT_API void lt_set_where(lt_ctx *ctx, lt_where_fn fn, void *ud);
/* What it says now. */
enum { LT_WHERE_BYTES = 200 };
LT_API void lt_where(lt_ctx *ctx, char where[LT_WHERE_BYTES]);

/* ==== Statistics of a step ==================================================================== */

/* Batch norm gives the mean and (biased) variance of its shard; the running values move once a
 * step, from all shards weighted by count. Adds one shard's statistics for the running buffers,
 * which are kept; mean and var are copied. Shards of the same buffers are merged by Chan's formula
 * in the order they come. */
LT_MUST lt_status lt_bn_stats_add(lt_ctx *ctx, lt_tensor *running_mean, lt_tensor *running_var,
                               lt_tensor *mean, lt_tensor *var, int64_t count, double momentum);
/* Moves the running values and forgets the shards. An optimizer step does it; for others this fails
 * as lt_synchronize() does. */
LT_MUST lt_status lt_bn_stats_commit(lt_ctx *ctx);
/* The same for whoever wants to look, as module:eval() and saving do; but shards that a backward
 * has come by wait until an optimizer or lt_zero_grad() ends their step: looking changes
 * nothing. */
LT_MUST lt_status lt_bn_stats_synchronize(lt_ctx *ctx);
LT_API int lt_bn_stats_pending(const lt_ctx *ctx);
/* Number i of the statistics that wait, merged; false past the last. Borrowed until they change. */
typedef struct lt_bn_stats {
    lt_tensor *running_mean, *running_var, *mean, *var;
    int64_t count;
    double momentum;
} lt_bn_stats;
LT_API bool lt_bn_stats_at(const lt_ctx *ctx, int i, lt_bn_stats *stats);
/* Forgets those that wait: before others are added in their place. */
LT_API void lt_bn_stats_clear(lt_ctx *ctx);

/* ==== Parameters ============================================================================== */

typedef enum lt_init_kind { LT_INIT_CONSTANT, LT_INIT_UNIFORM, LT_INIT_NORMAL } lt_init_kind;
typedef struct lt_init {
    lt_init_kind kind;
    double a, b;
} lt_init; /* value | low, high | mean, deviation */

/* A parameter, or a buffer (state without a gradient), that has a shape and an initialiser but
 * no memory yet. New. */
LT_API lt_tensor *lt_param_new(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims,
                               lt_init init);
LT_API lt_tensor *lt_buffer_new(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims,
                                lt_init init);
/* Another dtype for a pending one. LT_EINVAL once it has memory. */
LT_MUST lt_status lt_param_set_dtype(lt_tensor *x, lt_dtype dtype);
LT_API bool lt_is_param(const lt_tensor *x);
LT_API bool lt_is_buffer(const lt_tensor *x);
/* A placed f32 parameter's values in dtype (f16 or bf16), for ops to read. What is computed from it
 * has its gradient added to the parameter's own, in f32. The values are brought up to date by this
 * call, those of the whole arena at once, when an optimizer, an op or lt_copy() has written the
 * parameters since; what was written through lt_data() is not seen. Borrowed: until the parameter
 * ends, or its half copy in the other dtype is asked for. NULL with LT_EINVAL or LT_ENOMEM. */
LT_API lt_tensor *lt_half(lt_tensor *param, lt_dtype dtype);

/* A tree of parameters. Memory comes once, at lt_params_place(): a segment with one flat arena
 * of values and one of gradients per dtype; a buffer's segment has values only. Parameters added
 * later open further segments. Offsets are 64-byte aligned, padding is zero, nothing moves
 * afterwards. */
typedef struct lt_params lt_params;

typedef struct lt_span {
    const char *name;            /* the first of its names */
    lt_tensor *value;            /* borrowed */
    int segment;
    int64_t offset, count;       /* elements in the segment */
    bool buffer, frozen;
    int aliases;                 /* further names of the same tensor */
} lt_span;

LT_API lt_params *lt_params_new(lt_ctx *ctx); /* new */
LT_API void lt_params_free(lt_params *params); /* the tensors live on with their other owners */
/* Adds a pending or placed parameter or buffer under a name; kept. The same tensor again is an
 * alias. LT_EINVAL for a name given twice or a tensor that is neither. */
LT_MUST lt_status lt_params_add(lt_params *params, const char *name, lt_tensor *x);
/* Gives all pending ones memory and initial values, a function of (seed, number of the tree in
 * this context, name). */
LT_MUST lt_status lt_params_place(lt_params *params);
LT_API int lt_params_count(const lt_params *params); /* spans; an alias is none */
LT_API const lt_span *lt_params_span(const lt_params *params,
                                     int i); /* borrowed; in layout order */
LT_API const lt_span *lt_params_find(const lt_params *params,
                                     const char *name); /* NULL if there is none */
/* Name i of all names including aliases, and its tensor; false past the end. Borrowed. */
LT_API bool lt_params_name(const lt_params *params, int i, const char **name, lt_tensor **x);
/* A frozen span gets no gradient, no update, no decay, and is not sent. Not for buffers. */
LT_MUST lt_status lt_params_freeze(lt_params *params, int span, bool frozen);
/* SHA-256 over parameters, then buffers, in layout order without padding. */
LT_MUST lt_status lt_params_sha256(lt_params *params, char hex[65]);

/* ==== Optimizers ============================================================================== */

/* An update op "sgd(w, g, v; lr, ...)" run over the flat arenas: the inputs after w and g are
 * the optimizer's slots, zero at first, in the layout of the parameters. */
typedef struct lt_optim lt_optim;

/* Over n placed parameters, each in group 0. New. LT_EINVAL for one that is no parameter or
 * comes twice. */
LT_API lt_optim *lt_optim_new(lt_ctx *ctx, const char *update_op, lt_tensor *const *params, int n);
LT_API void lt_optim_free(lt_optim *optim);
LT_MUST lt_status lt_optim_set_group(lt_optim *optim, lt_tensor *param, int group);
/* One step: options[g] for group g, with as many as there are groups. Parameters without a
 * gradient are not touched; LT_EINVAL when none has one and no backward has run since the last
 * step of this optimizer, unless all are frozen. Commits pending statistics, or drops them in a
 * step that is skipped; forgets the gradients; counts the step in the context, but not while more
 * of the batch is to come. outcome may be NULL. */
LT_MUST lt_status lt_optim_step(lt_optim *optim, const lt_opt *const *options, int n_groups,
                                lt_step_status *step_status);
/* The same with gradients that are multiplied by most / norm where their norm, which is that of
 * lt_optim_grad_norm(), is beyond `most`; 0: as they are. *squares: the norm squared, f64, of no
 * axes, where the gradients are; new; may be NULL. LT_ENUMERIC when it is not finite; on an
 * accelerator, where nobody waits for it, as said of lt_synchronize(). */
LT_MUST lt_status lt_optim_step_clipped(lt_optim *optim, const lt_opt *const *options,
                                        int n_groups, double most, lt_tensor **squares,
                                        lt_step_status *step_status);
/* What became of its last step, which may be waited for: never LT_PENDING. LT_ACCUMULATING before
 * the first one. */
LT_API lt_step_status lt_optim_step_status(lt_optim *optim);
/* The 2-norm of the gradients that the next step would use, all in one, added up in double in a
 * fixed order; 0 if it would use none. LT_ENUMERIC when it is not finite. */
LT_MUST lt_status lt_optim_grad_norm(lt_optim *optim, double *norm);
/* A number made of all steps and norms in ctx so far, each by its optimizer, in their order. */
LT_API uint32_t lt_steps_digest(const lt_ctx *ctx);
/* A number made of the settings of all these steps: options and clips, rounded to f32. They count
 * while lt_set_grad_slots() has set an update. */
LT_API uint32_t lt_settings_digest(lt_ctx *ctx);
/* The settings of the steps since the call of lt_settings_digest() before the last, one on a line:
 * "optimizer 1: lr = 0.1". New; for free(). NULL with LT_ENOMEM. */
LT_API char *lt_settings_text(const lt_ctx *ctx);
/* Brings together the gradients that the next step will use, as the step itself would do it.
 * *outcome: what will become of the step; never LT_PENDING. */
LT_MUST lt_status lt_optim_complete(lt_optim *optim, lt_step_status *step_status);
/* Slot k of a parameter, with the parameter's dims. A view. New. NULL past the end or for a
 * parameter it does not hold. */
LT_API lt_tensor *lt_optim_slot(lt_optim *optim, int k, lt_tensor *param);
/* Slot k's name in the signature; NULL past the end. Borrowed. */
LT_API const char *lt_optim_slot_name(const lt_optim *optim, int k);
LT_API const lt_def *lt_optim_def(const lt_optim *optim);

#ifdef __cplusplus
}
#endif
#endif
