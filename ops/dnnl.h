/* dnnl.h - the fast f32 paths that oneDNN gives to the stems of this room. dnnl.c alone includes
 * oneDNN's own header; a build without it has the same names, and LT_EUNSUPPORTED as the answer.
 *
 * All tensors are dense f32, images (n, h, w, c), weights (out, kh, kw, in/groups). LT_EUNSUPPORTED
 * comes before anything is written: oneDNN has no optimised code for these sizes, and the caller
 * goes on with its portable kernel. add: to the result that is there, instead of over it.
 */
#ifndef LT_OPS_DNNL_H
#define LT_OPS_DNNL_H

#include "ops/product.h"
#include "ops/window.h"

typedef struct lt_conv {
    lt_window window;
    int64_t n, in, out, groups; /* images, channels */
} lt_conv;

#ifdef LT_WITH_DNNL
lt_status lt__dnnl_product(const lt_call *c, const lt_product *p, const void *a, const void *b,
                           const void *bias, void *out, bool add);
lt_status lt__dnnl_conv(const lt_call *c, const lt_conv *v, const void *x, const void *w,
                        const void *bias, void *y);
lt_status lt__dnnl_conv_data(const lt_call *c, const lt_conv *v, const void *dy, const void *w,
                             void *dx, bool add);
lt_status lt__dnnl_conv_weights(const lt_call *c, const lt_conv *v, const void *x, const void *dy,
                                void *dw, bool add);
#else
static inline lt_status lt__dnnl_product(const lt_call *c, const lt_product *p, const void *a,
                                         const void *b, const void *bias, void *out, bool add)
{
    (void)c, (void)p, (void)a, (void)b, (void)bias, (void)out, (void)add;
    return LT_EUNSUPPORTED;
}
static inline lt_status lt__dnnl_conv(const lt_call *c, const lt_conv *v, const void *x,
                                      const void *w, const void *bias, void *y)
{
    (void)c, (void)v, (void)x, (void)w, (void)bias, (void)y;
    return LT_EUNSUPPORTED;
}
static inline lt_status lt__dnnl_conv_data(const lt_call *c, const lt_conv *v, const void *dy,
                                           const void *w, void *dx, bool add)
{
    (void)c, (void)v, (void)dy, (void)w, (void)dx, (void)add;
    return LT_EUNSUPPORTED;
}
static inline lt_status lt__dnnl_conv_weights(const lt_call *c, const lt_conv *v, const void *x,
                                              const void *dy, void *dw, bool add)
{
    (void)c, (void)v, (void)x, (void)dy, (void)dw, (void)add;
    return LT_EUNSUPPORTED;
}
#endif

#endif
