/* params.h - parameters, and the flat arenas that hold them. Part of the door of autograd. */
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

/* A pending parameter, or buffer (state without a gradient): it has a shape and an initialiser but
 * no memory yet. New. */
LT_API lt_tensor *lt_param_new(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims,
                               lt_init init);
LT_API lt_tensor *lt_buffer_new(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims,
                                lt_init init);
/* Changes the dtype of a pending parameter or buffer. LT_EINVAL once it has memory. */
LT_MUST lt_status lt_param_set_dtype(lt_tensor *x, lt_dtype dtype);
LT_API bool lt_is_param(const lt_tensor *x);
LT_API bool lt_is_buffer(const lt_tensor *x);
/* The half copy of a placed f32 parameter: its values in dtype (f16 or bf16), for ops to read.
 * Gradients of results computed from it are added to the parameter's own gradient, in f32. This
 * call refreshes the values, for the whole arena at once, if an optimizer, an op or lt_copy() has
 * written the parameters since, but not after writes through lt_data(). Borrowed until the
 * parameter ends or its half copy in the other dtype is requested. NULL with LT_EINVAL or
 * LT_ENOMEM. */
LT_API lt_tensor *lt_half(lt_tensor *param, lt_dtype dtype);

/* A tree of parameters. lt_params_place() allocates memory: per dtype one segment, which is a flat
 * arena of values and one of gradients; buffers have a segment of values only. Parameters added
 * later open further segments. Offsets are 64-byte aligned, padding is zero, memory never moves. */
typedef struct lt_params lt_params;

typedef struct lt_span {
    const char *name; /* the first of its names; borrowed */
    lt_tensor *value; /* borrowed */
    int segment;
    int64_t offset, count; /* elements in the segment */
    bool buffer, frozen;
    int aliases; /* number of further names of the same tensor */
} lt_span;

LT_API lt_params *lt_params_new(lt_ctx *ctx);  /* new */
LT_API void lt_params_free(lt_params *params); /* tensors live on if they have other owners */
/* Adds a pending or placed parameter or buffer under a name; x is kept. Adding the same tensor
 * again makes an alias. LT_EINVAL for a duplicate name, or a tensor that is neither. */
LT_MUST lt_status lt_params_add(lt_params *params, const char *name, lt_tensor *x);
/* Gives all pending ones memory and initial values, which depend on the seed, the number of the
 * tree in this context and the name only. */
LT_MUST lt_status lt_params_place(lt_params *params);
LT_API int lt_params_count(const lt_params *params); /* of spans, aliases excluded */
LT_API const lt_span *lt_params_span(const lt_params *params,
                                     int i); /* borrowed; in layout order */
LT_API const lt_span *lt_params_find(const lt_params *params,
                                     const char *name); /* NULL if not found; borrowed */
/* Name i of all names including aliases, and its tensor; false past the end. Borrowed. */
LT_API bool lt_params_name(const lt_params *params, int i, const char **name, lt_tensor **x);
/* A frozen span gets no gradient, update or weight decay, and is not sent. Not for buffers. */
LT_MUST lt_status lt_params_freeze(lt_params *params, int span, bool frozen);
/* SHA-256 over parameters, then buffers, in layout order without padding. */
LT_MUST lt_status lt_params_sha256(lt_params *params, char hex[65]);

#ifdef __cplusplus
}
#endif
#endif
