/* kernel.c - the helpers of kernel.h: options and shape rules. */
#include <stdio.h>

#include "ops/kernel.h"

/* ==== Options ================================================================================= */

lt_status lt__int(const lt_call *c, int k, int64_t low, int64_t *value)
{
    if (c->opt[k].n != 1)
        return lt_fail(LT_EINVAL, "%s must be one integer, but got %d", c->schema->opt[k].name,
                       c->opt[k].n);
    *value = c->opt[k].i[0];
    if (*value < low)
        return lt_fail(LT_EINVAL, "%s must be at least %lld, but is %lld", c->schema->opt[k].name,
                       (lt_ll)low, (lt_ll)*value);
    return LT_OK;
}

lt_status lt__pair(const lt_call *c, int k, int64_t low, int64_t value[2])
{
    int n = c->opt[k].n;
    if (n != 1 && n != 2)
        return lt_fail(LT_EINVAL, "%s must be one integer or two (height, width), but got %d",
                       c->schema->opt[k].name, n);
    for (int i = 0; i < 2; i++) {
        value[i] = c->opt[k].i[n == 2 ? i : 0];
        if (value[i] < low)
            return lt_fail(LT_EINVAL, "%s must be at least %lld, but is %lld",
                           c->schema->opt[k].name, (lt_ll)low, (lt_ll)value[i]);
    }
    return LT_OK;
}

static lt_status one_axis(const lt_call *c, int k, int64_t given, int ndim, int *axis)
{
    int64_t a = given < 0 ? given + ndim : given;
    if (a < 0 || a >= ndim)
        return lt_fail(
            LT_EINVAL, "%s %lld is out of range for the %d axes of x (%s)", c->schema->opt[k].name,
            (lt_ll)(given < 0 ? given : (int64_t)((uint64_t)given + 1)), ndim, LT_TEXT(c->in[0]));
    *axis = (int)a;
    return LT_OK;
}

lt_status lt__axis(const lt_call *c, int k, int ndim, int *axis)
{
    if (c->opt[k].n != 1)
        return lt_fail(LT_EINVAL, "%s must be one axis, but got %d", c->schema->opt[k].name,
                       c->opt[k].n);
    return one_axis(c, k, c->opt[k].i[0], ndim, axis);
}

lt_status lt__axes(const lt_call *c, int k, int ndim, uint32_t *mask)
{
    int axis = 0;
    *mask = 0;
    if (c->opt[k].n == 0)
        *mask = (1u << ndim) - 1;
    for (int i = 0; i < c->opt[k].n; i++) {
        LT_TRY(one_axis(c, k, c->opt[k].i[i], ndim, &axis));
        if (*mask >> axis & 1)
            return lt_fail(LT_EINVAL, "%s contains axis %d twice", c->schema->opt[k].name,
                           axis + 1);
        *mask |= 1u << axis;
    }
    return LT_OK;
}

lt_status lt__number_in(const lt_call *c, int k, double low, double high)
{
    double value = lt__number(c, k);
    if (value >= low && value <= high)
        return LT_OK;
    if (high < INFINITY)
        return lt_fail(LT_EINVAL, "%s must be a number from %g to %g, but is %g",
                       c->schema->opt[k].name, low, high, value);
    return lt_fail(LT_EINVAL, "%s must be at least %g, but is %g", c->schema->opt[k].name, low,
                   value);
}

/* ==== Shape rules ============================================================================= */

void lt__spec(lt_call *c, int out, lt_dtype dtype, int ndim, const int64_t *dims)
{
    lt_spec *s = &c->spec[out];
    s->dtype = dtype;
    s->ndim = ndim;
    for (int i = 0; i < ndim; i++)
        s->dims[i] = dims[i];
    s->view = 0;
    s->offset = 0;
}

void lt__spec_like(lt_call *c, int out, const lt_tensor *x)
{
    lt__spec(c, out, x->dtype, x->ndim, x->dims);
}

lt_status lt__dtypes_differ(const lt_call *c, int a, int b)
{
    const char *of_a = lt_dtype_name(c->in[a]->dtype), *name = lt__in_name(c, b);
    return lt_fail(LT_EINVAL, "%s is %s, %s is %s; cast one of them, e.g. %s to %s",
                   lt__in_name(c, a), of_a, name, lt_dtype_name(c->in[b]->dtype), name, of_a);
}

lt_status lt__same_dtype(const lt_call *c, int n)
{
    for (int i = 1; i < n && i < c->n_in; i++)
        if (c->in[i] && c->in[i]->dtype != c->in[0]->dtype)
            return lt__dtypes_differ(c, 0, i);
    return LT_OK;
}

lt_status lt__same_float(const lt_call *c, int n)
{
    if (!lt__is_float(c->in[0]->dtype))
        return lt_fail(LT_EINVAL, "%s must have a float dtype, but is %s; cast it, e.g. to f32",
                       lt__in_name(c, 0), lt_dtype_name(c->in[0]->dtype));
    return lt__same_dtype(c, n);
}

lt_status lt__require_integers(const lt_call *c, int i)
{
    lt_dtype dtype = (lt_dtype)c->in[i]->dtype;
    if (dtype == LT_I64 || dtype == LT_I32 || dtype == LT_U8)
        return LT_OK;
    return lt_fail(
        LT_EINVAL,
        "%s must have an integer dtype (i64, i32 or u8), but is %s; cast it, e.g. to i64",
        lt__in_name(c, i), lt_dtype_name(dtype));
}

lt_status lt__require_ndim(const lt_call *c, int i, int ndim, const char *layout)
{
    if (c->in[i]->ndim == ndim)
        return LT_OK;
    return lt_fail(LT_EINVAL, "%s must have %d axes %s, but has %d (%s)", lt__in_name(c, i), ndim,
                   layout, c->in[i]->ndim, LT_TEXT(c->in[i]));
}

lt_status lt__require_dims(const lt_call *c, int i, int ndim, const int64_t *dims, const char *what)
{
    const lt_tensor *x = c->in[i];
    bool ok = x->ndim == ndim;
    for (int k = 0; ok && k < ndim; k++)
        ok = x->dims[k] == dims[k];
    if (ok)
        return LT_OK;
    char want[96] = "";
    size_t used = 0;
    for (int k = 0; k < ndim && used < sizeof want; k++)
        used += (size_t)snprintf(want + used, sizeof want - used, "%s%lld", k ? "x" : "",
                                 (lt_ll)dims[k]);
    return lt_fail(LT_EINVAL, "%s must have %s (%s), but is %s", lt__in_name(c, i), what,
                   ndim ? want : "one element", LT_TEXT(x));
}

lt_status lt__broadcast(const lt_call *c, int a, int b, int *ndim, int64_t dims[LT_MAX_DIMS])
{
    const lt_tensor *x = c->in[a], *y = c->in[b];
    *ndim = x->ndim > y->ndim ? x->ndim : y->ndim;
    for (int i = 1; i <= *ndim; i++) {
        int64_t dx = i <= x->ndim ? x->dims[x->ndim - i] : 1;
        int64_t dy = i <= y->ndim ? y->dims[y->ndim - i] : 1;
        if (dx != dy && dx != 1 && dy != 1)
            return lt_fail(LT_EINVAL,
                           "%s is %s and %s is %s, which do not broadcast: axis %d from the end "
                           "has %lld and %lld",
                           lt__in_name(c, a), LT_TEXT(x), lt__in_name(c, b), LT_TEXT(y), i,
                           (lt_ll)dx, (lt_ll)dy);
        dims[*ndim - i] = dx == 1 ? dy : dx;
    }
    return LT_OK;
}

lt_status lt__spec_broadcast(lt_call *c, lt_dtype dtype)
{
    int ndim;
    int64_t dims[LT_MAX_DIMS];
    LT_TRY(lt__same_dtype(c, 2));
    LT_TRY(lt__broadcast(c, 0, 1, &ndim, dims));
    lt__spec(c, 0, dtype, ndim, dims);
    return LT_OK;
}
