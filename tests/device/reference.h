/* reference.h - runs the cases of ops/cases.txt on an emulated accelerator and with the reference
 * kernels of the CPU, and compares the results. */
#ifndef TESTS_DEVICE_REFERENCE_H
#define TESTS_DEVICE_REFERENCE_H

#include "tests/device/emu.h"
#include "tests/ops/run.h"

/* Whether the accelerator's result `got` equals or is near enough to the CPU's. */
typedef bool (*same_fn)(const block *got, const block *want);

static inline void compare(const op_case *c, const values *v, lt_ctx *ctx[2], lt_dtype dtype,
                           same_fn same)
{
    result r[2];
    bool ok[2];
    for (int i = 0; i < 2; i++)
        ok[i] = run_case(ctx[i], c, v, dtype, &r[i]);
    for (int part = 0; part < FOUND && ok[0] && ok[1]; part++) {
        char name[32];
        if (exists(c, part) && !same(&r[0].part[part], &r[1].part[part]))
            fault(c, "in %s: %s differs", lt_dtype_name(dtype), part_name(c, part, name));
    }
    for (int i = 0; i < 2; i++)
        free_result(&r[i]);
}

static inline void walk_case(const op_case *c, lt_ctx *ctx[2], lt_dtype dtype, same_fn same)
{
    values v = {.same_input = false};
    result plain;
    bool floats = false;
    for (int i = 0; i < c->n_in; i++) {
        v.part[IN + i] = make_input(c, i);
        if (v.part[IN + i].dtype != LT_F64)
            continue;
        block_round(&v.part[IN + i], dtype);
        v.part[IN + i].dtype = LT_F64;
        floats = true;
    }
    compare(c, &v, ctx, dtype, same);
    if (!has_note(c, "forward") && floats && run_case(ctx[1], c, &v, dtype, &plain)) {
        make_dy(c, &plain, &v);
        compare(c, &v, ctx, dtype, same);
        v.made = true;
        compare(c, &v, ctx, dtype, same);
        free_result(&plain);
    }
    free_values(&v);
}

/* Compares all cases of an op, in each dtype, between ctx[0] and ctx[1]. Takes both contexts. */
static inline void walk_cases(const char *op, lt_ctx *ctx[2], same_fn same)
{
#ifdef __SANITIZE_ADDRESS__ /* ten times slower, so only f16, which has the longest vectors */
    static const lt_dtype dtypes[] = {LT_F16};
#else
    static const lt_dtype dtypes[] = {LT_F32, LT_F16, LT_BF16};
#endif
    const int n_dtypes = sizeof dtypes / sizeof *dtypes;
    int n, seen = 0;
    const op_case *cases = all_cases(&n);
    faults = 0;
    for (int i = 0; i < n; i++) {
        const op_case *c = &cases[i];
        if (strcmp(c->op, op) != 0)
            continue;
        for (int k = 0; k < (has_note(c, "f32+f64") ? 1 : n_dtypes); k++)
            walk_case(c, ctx, dtypes[k], same);
        seen++;
    }
    lt_ctx_free(ctx[0]);
    lt_ctx_free(ctx[1]);
    CHECK_EQ(faults, 0);
    CHECK(seen > 0);
}

#endif
