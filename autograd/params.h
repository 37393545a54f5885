/* params.h - parameters, and the flat arenas that store them. Included by autograd.h. */
#ifndef LUATRAIN_PARAMS_H
#define LUATRAIN_PARAMS_H

#include "core/core.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum lt_init_kind { LT_INIT_CONSTANT, LT_INIT_UNIFORM, LT_INIT_NORMAL } lt_init_kind;
typedef struct lt_init {
    lt_init_kind kind;
    double a, b;
} lt_init; /* a: value, low or mean; b: high or deviation */

/* Creates a pending parameter, or a pending buffer (state without a gradient). It has a shape and
 * an initialiser but no memory yet. New. NULL with LT_EINVAL (invalid dims, or not a float dtype)
 * or LT_ENOMEM. */
LT_API lt_tensor *lt_param_new(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims,
                               lt_init init);
LT_API lt_tensor *lt_buffer_new(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims,
                                lt_init init);
/* Changes the dtype of a pending parameter or buffer. LT_EINVAL if it has memory and a different
 * dtype, or if dtype is not a float. */
LT_MUST lt_status lt_param_set_dtype(lt_tensor *x, lt_dtype dtype);
LT_API bool lt_is_param(const lt_tensor *x);
LT_API bool lt_is_buffer(const lt_tensor *x);
/* Returns the half copy of a placed f32 parameter: a tensor with its values in dtype (f16 or bf16),
 * which ops read instead of the parameter. Gradients of results computed from it are added to the
 * parameter's own gradient, in f32. This call refreshes the values of the whole arena if an
 * optimizer, an op or a function such as lt_copy() has written a parameter since the last refresh.
 * Writes through lt_data() are not noticed. Borrowed until the parameter is freed or its half copy
 * in the other dtype is requested. NULL with LT_EINVAL if param is not a placed f32 parameter or
 * dtype is not f16 or bf16, with LT_ENOMEM, or with the device's error. */
LT_API lt_tensor *lt_half(lt_tensor *param, lt_dtype dtype);

/* A tree of parameters. lt_params_place() allocates memory: one segment per dtype. A segment is two
 * flat arenas, for values and for gradients. Buffers have their own segments, which have only
 * values. Parameters added later get further segments. Offsets are 64-byte aligned, padding is
 * zero, and memory never moves. */
typedef struct lt_params lt_params;

typedef struct lt_span {
    const char *name;      /* the first of its names; borrowed */
    lt_tensor *value;      /* borrowed */
    int segment;           /* -1 before lt_params_place() */
    int64_t offset, count; /* elements in the segment */
    bool buffer, frozen;
    int aliases; /* number of further names of the same tensor */
} lt_span;

LT_API lt_params *lt_params_new(lt_ctx *ctx); /* new; NULL with LT_ENOMEM */
/* Frees the tree and releases its parameters. Parameters that have other owners remain. NULL is
 * allowed. */
LT_API void lt_params_free(lt_params *params);
/* Adds a pending or placed parameter or buffer under a name, which is copied; x is kept. Adding the
 * same tensor again makes an alias. LT_EINVAL if the name is used already, or if x is neither a
 * parameter nor a buffer or is from another context; LT_ENOMEM. */
LT_MUST lt_status lt_params_add(lt_params *params, const char *name, lt_tensor *x);
/* Allocates all pending parameters and buffers, and initialises them. The values depend only on the
 * seed, the name, and how many trees of this context were placed since the seed was set. LT_ENOMEM;
 * LT_EINVAL for an invalid initialiser or too many elements. */
LT_MUST lt_status lt_params_place(lt_params *params);
LT_API int lt_params_count(const lt_params *params); /* number of spans, without aliases */
/* Span i, in the order of lt_params_add(). The spans of a segment lie in memory in this order. NULL
 * past the end. Borrowed. */
LT_API const lt_span *lt_params_span(const lt_params *params, int i);
LT_API const lt_span *lt_params_find(const lt_params *params,
                                     const char *name); /* NULL if not found; borrowed */
/* Gets name i of all names, including aliases, and its tensor. Returns false past the end.
 * Borrowed. */
LT_API bool lt_params_name(const lt_params *params, int i, const char **name, lt_tensor **x);
/* A frozen span gets no gradient, update or weight decay, and is not sent to other ranks. LT_EINVAL
 * if the span is a buffer or does not exist. */
LT_MUST lt_status lt_params_freeze(lt_params *params, int span, bool frozen);
/* SHA-256 of the values of all parameters, then of all buffers, without padding, as 64 hex digits
 * and a NUL. LT_EINVAL if some are pending; LT_ENOMEM. */
LT_MUST lt_status lt_params_sha256(lt_params *params, char hex[65]);

#ifdef __cplusplus
}
#endif
#endif
