/* map.cu - the host code of map.h: traversals of the elements of tensors. */
#include "ops/cuda/map.h"

static void dense(int64_t *step, int n, int ndim, const int64_t *dims)
{
    int64_t stride = 1;
    for (int i = 1; i <= n; i++) {
        int64_t own = i <= ndim ? dims[ndim - i] : 1;
        step[n - i] = own == 1 ? 0 : stride;
        stride *= own;
    }
}

void lt__walk_over(lt_walk *w, int ndim, const int64_t *dims)
{
    w->count = 1;
    w->ndim = ndim;
    for (int i = 0; i < ndim; i++) {
        w->dims[i] = dims[i];
        w->count *= dims[i];
    }
    for (int k = 0; k < LT_OPERANDS; k++)
        dense(w->step[k], ndim, ndim, dims);
}

void lt__walk_stretch(lt_walk *w, int k, int ndim, const int64_t *dims)
{
    dense(w->step[k], w->ndim, ndim, dims);
}

/* Whether axis i of w continues axis `last` of m in all operands. */
static bool continues(const lt_walk *w, int i, const lt_walk *m, int last, int n)
{
    for (int k = 0; k < n; k++)
        if (w->step[k][i] != m->step[k][last] * m->dims[last])
            return false;
    return true;
}

void lt__walk_merge(lt_walk *w, int n)
{
    lt_walk m = {};
    m.count = w->count;
    m.small = w->count < (int64_t)1 << 31;
    for (int i = w->ndim - 1; i >= 0; i--) {
        if (w->dims[i] == 1)
            continue;
        if (m.ndim > 0 && continues(w, i, &m, m.ndim - 1, n)) {
            m.dims[m.ndim - 1] *= w->dims[i];
            continue;
        }
        m.dims[m.ndim] = w->dims[i];
        for (int k = 0; k < n; k++)
            m.step[k][m.ndim] = w->step[k][i];
        m.ndim++;
    }
    if (m.ndim == 0) {
        m.ndim = 1;
        m.dims[0] = m.step[0][0] = 1;
    }
    *w = m;
}

void lt__walk_inputs(lt_walk *w, const lt_tensor *z, int n, const lt_tensor *const *in)
{
    lt__walk_over(w, z->ndim, z->dims);
    for (int k = 0; k < n; k++)
        if (in[k]->count != z->count)
            lt__walk_stretch(w, k + 1, in[k]->ndim, in[k]->dims);
    lt__walk_merge(w, n + 1);
}
