/* broadcast.c - the gradients of inputs that broadcast: lt__put_grad() of loops.h. */
#include "ops/cpu/loops.h"

/* Bytes of x's elements in the dtype to compute in, padded so that the next part is aligned. */
static size_t wide_bytes(const lt_tensor *x)
{
    return lt__aligned((size_t)x->count * lt_dtype_bytes(lt__widened((lt_dtype)x->dtype)));
}

/* d (+)= z, summed over the stretched axes; in f32 if d is half. */
static void put_sum(const lt_call *c, lt_tensor *d, lt_array z, bool add, char *scratch)
{
    lt_array sum = lt__array(d);
    if (lt__is_half(sum.dtype)) {
        sum.dtype = LT_F32;
        sum.data = scratch;
        scratch += wide_bytes(d);
        if (add)
            lt_convert(sum.data, LT_F32, d->data, (lt_dtype)d->dtype, (size_t)d->count);
    }
    lt__sum_to(c, sum, z, add, scratch);
    if (sum.data != d->data)
        lt_convert(d->data, (lt_dtype)d->dtype, sum.data, LT_F32, (size_t)d->count);
}

void lt__put_grad(const lt_call *c, int i, lt_map *m)
{
    lt_tensor *d = c->d_in[i];
    bool stretched = d->count != m->z.count, add = lt__adds(c, i);
    m->add = !stretched && add;
    m->z.data = stretched ? c->scratch : d->data;
    m->z.dtype = stretched ? lt__widened(m->dtype) : (lt_dtype)d->dtype;
    lt__map(c, m);
    if (stretched)
        put_sum(c, d, m->z, add, (char *)c->scratch + wide_bytes(c->d_out[0]));
}

size_t lt__grad_scratch(const lt_call *c, bool backward)
{
    size_t max = 0;
    for (int i = 0; backward && i < c->n_in; i++) {
        const lt_tensor *d = c->d_in[i], *dz = c->d_out[0];
        if (!d || d->count == dz->count)
            continue;
        size_t need = wide_bytes(dz) + wide_bytes(d) + lt__sum_to_scratch(d, dz);
        max = need > max ? need : max;
    }
    return max;
}
