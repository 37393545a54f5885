/* test_device.c - the CUDA backend as an lt_device: opening, memory, copies, conversions, and when
 * the host waits. */
#include "core/locale.h"
#include "tests/cuda/reference.h"
#include "tests/device/emu.h"

static const lt_dtype all[] = {LT_F32, LT_F64, LT_F16, LT_BF16, LT_I64, LT_I32, LT_U8};

/* ==== Opening ================================================================================= */

TEST(a_library_of_another_version)
{
    char text[256];
    lt_accelerator cuda;
    const lt_accelerator_config config = {.index = 0};
    CHECK_EQ(SHIM(lt_accelerator_open)("0.0.9", &host_table, &config, &cuda, text, sizeof text),
             -1);
    CHECK_STR(text, "libluatrain-cuda.so is from luatrain " LT_VERSION
                    ", but this is luatrain 0.0.9; use both from the same build");
}

TEST(any_device_means_the_one_of_the_local_rank)
{
    for (int rank = 0; rank < 6; rank++) {
        static const char *const names[] = {"cuda:0", "cuda:1", "cuda:2", "cuda:3"};
        machine m =
            machine_as(false, &(lt_accelerator_config){.index = LT_ANY_DEVICE, .local_rank = rank});
        CHECK_STR(m.cuda.device->name, names[rank % 4]);
        lt_ctx_free(m.ctx);
    }
}

/* Each function of a device sets the thread's current CUDA device itself. */
TEST(two_devices_in_one_thread)
{
    machine each[] = {machine_open(), machine_as(false, &(lt_accelerator_config){.index = 1})};
    float *from[2], *to[2];
    void *block[2];
    uint64_t mark[2];
    for (int i = 0; i < 2; i++) {
        lt_device *d = each[i].cuda.device;
        block[i] = d->alloc(d, 8000);
        from[i] = d->alloc_host(d, 8000);
        to[i] = d->alloc_host(d, 8000);
        CHECK(block[i] && from[i] && to[i]);
    }
    for (int step = 0; step < 8; step++)
        for (int i = 0; i < 2; i++) {
            lt_device *d = each[i].cuda.device;
            from[i][0] = 0;
            from[i][1] = 5;
            switch (step) {
            case 0: must(d->fill(d, block[i], LT_F32, 1000, 2 + i)); break;
            case 1: must(d->add(d, block[i], block[i], LT_F32, 1000)); break;
            case 2: mark[i] = d->mark(d); break;
            case 3: must(d->upload(d, block[i], from[i], 8, mark[i], &mark[i])); break;
            case 4: must(d->stream_wait(d, mark[i])); break;
            case 5: must(d->add(d, block[i], block[i], LT_F32, 1000)); break;
            case 6: must(d->download(d, to[i], block[i], 4000, d->mark(d), &mark[i])); break;
            default: must(d->wait(d, mark[i]));
            }
        }
    for (int i = 0; i < 2; i++) {
        lt_device *d = each[i].cuda.device;
        CHECK(to[i][0] == 0 && to[i][1] == 10 && to[i][2] == 8 + 4 * (float)i);
        d->free(d, block[i], 8000);
        d->free_host(d, from[i]);
        d->free_host(d, to[i]);
        lt_ctx_free(each[i].ctx);
    }
}

TEST_CUDA(device_name)
{
    const char *start = "shim (without cuDNN", *end = strstr(m->cuda.name, ", CUDA 13.0)");
    CHECK(strncmp(m->cuda.name, start, strlen(start)) == 0); /* NCCL may be installed */
    CHECK(end && strlen(end) == strlen(", CUDA 13.0)"));
    CHECK(strcmp(m->cuda.device->name, "cuda:0") == 0);
    CHECK(!m->cuda.device->is_host);
}

/* ==== Memory ================================================================================== */

TEST_CUDA(copies_in_any_direction)
{
    lt_device *d = m->cuda.device;
    char from[1000], to[1000], *a = d->alloc(d, 1000), *b = d->alloc(d, 1000);
    CHECK(a && b && (uintptr_t)a % 64 == 0);
    for (int i = 0; i < 1000; i++)
        from[i] = (char)(i * 7);
    memset(to, 0, sizeof to);
    must(d->copy(d, a, from, 1000));
    must(d->sync(d));
    memset(from, 1, 10);
    must(d->copy(d, b + 1, a, 999));
    must(d->copy(d, to + 3, b + 1, 997)); /* synchronous, as `to` is pageable */
    for (int i = 0; i < 997; i++)
        CHECK_EQ(to[i + 3], (char)(i * 7));
    must(d->copy(d, to, from, 5)); /* both on the host */
    CHECK_EQ(to[4], 1);
    must(d->copy(d, a, from, 0));
    d->free(d, a, 1000);
    d->free(d, b, 1000);
    CHECK(d->alloc(d, (size_t)1 << 40) == NULL);
}

/* Values of dtype `from` on both sides of every limit of range and rounding. New. */
static lt_tensor *special_values(machine *m, lt_dtype from)
{
    static const char list[] =
        "0 -0.0 1 -1 0.5 2.5 -2.5 255 256 255.5 -0.9 65504 65519.9 65520 1e30 -1e30 "
        "0x1p-24 0x1p-25 0x1.8p-25 0x1p-14 0x1.ffcp-15 0x1p-126 0x1p-133 0x1p-134 "
        "0x1p-149 0x1p-150 0x1.000001p0 0x1.004p0 0x1.0040001p0 0x1.01p0 "
        "0x1.0100000000001p0 0x1.03p0 2147483647 2147483648.0 -2147483649.0 0x1p53 "
        "0x1p62 0x1p63 -0x1p63 0x1.fep62 1e300 inf -inf nan 3.4028235e38 3.39e38 100000 "
        "4097 16777217 9007199254740993.0";
    enum { N = 50 };
    const char *at = list;
    lt_locale locale = lt__enter_c_locale(); /* for strtod() */
    lt_tensor *x = lt_tensor_new(m->ctx, from, 1, (int64_t[]){3 * N});
    for (int i = 0; i < N; i++) {
        double v = strtod(at, (char **)&at), each[] = {v, -v, 3 * v};
        for (int k = 0; k < 3; k++)
            lt_convert((char *)x->data + (size_t)(k * N + i) * lt_dtype_bytes(from), from, &each[k],
                       LT_F64, 1);
    }
    lt__leave_c_locale(locale);
    for (int64_t i = 0; from == LT_I64 && i < 9; i++) /* not representable in double */
        ((int64_t *)x->data)[i] = (((int64_t)1 << (24 + 4 * i)) + 1) * (i % 2 ? -1 : 1);
    return x;
}

TEST_CUDA(conversions_of_all_pairs)
{
    lt_device *d = m->cuda.device;
    for (int i = 0; i < COUNT(all); i++)
        for (int j = 0; j < COUNT(all); j++) {
            char what[64];
            lt_tensor *x = special_values(m, all[i]);
            lt_tensor *y = lt_tensor_new(m->ctx, all[j], 1, x->dims);
            lt_convert(y->data, all[j], x->data, all[i], (size_t)x->count);
            mirror from = mirror_of(m, x, 1), to = mirror_of(m, y, 3);
            must(d->fill(d, to.tensor.data, all[j], (size_t)y->count, 77));
            must(d->convert(d, to.tensor.data, all[j], from.tensor.data, all[i], (size_t)x->count));
            snprintf(what, sizeof what, "%s to %s", lt_dtype_name(all[i]), lt_dtype_name(all[j]));
            compare(m, what, &to, 0);
            mirror_free(m, &from);
            mirror_free(m, &to);
        }
}

TEST_CUDA(fills)
{
    static const double list[] = {0, -0.0, 1, -3, 1e6, 0.1, NAN, INFINITY, 300};
    lt_device *d = m->cuda.device, *cpu = m->ctx->devices[0];
    for (int i = 0; i < COUNT(all); i++)
        for (int k = 0; k < COUNT(list); k++) {
            lt_tensor *x = lt_tensor_new(m->ctx, all[i], 1, (int64_t[]){301});
            must(cpu->fill(cpu, x->data, all[i], 301, list[k]));
            mirror t = mirror_of(m, x, 1);
            must(d->fill(d, t.tensor.data, all[i], 301, 55));
            must(d->fill(d, t.tensor.data, all[i], 301, list[k]));
            must(d->fill(d, t.tensor.data, all[i], 0, 5));
            compare(m, lt_dtype_name(all[i]), &t, 0);
            mirror_free(m, &t);
        }
}

TEST_CUDA(additions_of_gradients)
{
    lt_device *d = m->cuda.device, *cpu = m->ctx->devices[0];
    for (int i = 0; i < 4; i++)
        for (int shift = 0; shift < 2; shift++) {
            lt_tensor *x = values(m, all[i], 1, (int64_t[]){1001}, 3, true);
            lt_tensor *y = values(m, all[i], 1, (int64_t[]){1001}, 4, true);
            mirror to = mirror_of(m, x, shift), from = mirror_of(m, y, 0);
            must(d->add(d, to.tensor.data, from.tensor.data, all[i], 1001));
            must(cpu->add(cpu, x->data, y->data, all[i], 1001));
            compare(m, lt_dtype_name(all[i]), &to, 0);
            mirror_free(m, &to);
            mirror_free(m, &from);
        }
    CHECK(d->add(d, NULL, NULL, LT_I32, 4) == LT_EINVAL);
    CHECK(strcmp(lt_errmsg(), "gradients must have a float dtype, but got i32") == 0);
}

/* ==== Rescaling =============================================================================== */

/* Joins the parts of a row on the device, checks the statistics, and frees the row. */
static void check_joined(machine *m, lt_grad_row *row, lt_grad_stats want)
{
    lt_device *d = m->cuda.device;
    lt_grad_stats got, *there = d->alloc(d, sizeof *there);
    must(m->cuda.join(d, row, 1, there));
    must(d->copy(d, &got, there, sizeof got));
    d->free(d, there, sizeof *there);
    d->free(d, row, sizeof *row);
    CHECK(got.largest == want.largest);
    CHECK_EQ(got.not_finite, want.not_finite);
}

/* Rescales a tensor to one of another dtype, or in place if the dtypes are equal. */
static void check_rescale(machine *m, lt_dtype dtype, lt_dtype to_dtype, int64_t n, double by)
{
    mirror from = mirror_of(m, values(m, dtype, 1, &n, 11, true), 1);
    mirror to = mirror_of(m, values(m, to_dtype, 1, &n, 12, false), 1);
    mirror *x = dtype == to_dtype ? &from : &to;
    lt_grad_row *row = m->cuda.device->alloc(m->cuda.device, sizeof *row);
    lt_grad_stats want = {0};
    x->tensor.ctx = m->ctx;
    must(m->cuda.rescale(on_device(x), on_device(&from), by, row));
    must(lt_copy(x->host, from.host));
    must(lt_rescale(x->host, by, &want));
    compare(m, lt_dtype_name(dtype), x, 0);
    if (x == &from) {
        must(m->cuda.rescale(on_device(x), on_device(x), by, NULL));
        must(lt_rescale(x->host, by, NULL));
        compare(m, lt_dtype_name(dtype), x, 0);
    }
    check_joined(m, row, want);
    mirror_free(m, &from);
    mirror_free(m, &to);
}

static void check_measure(machine *m, lt_dtype dtype, int64_t n, double by)
{
    lt_device *d = m->cuda.device;
    lt_tensor *x = values(m, dtype, 1, &n, 11, true);
    mirror t = mirror_of(m, x, 1);
    lt_grad_row *row = d->alloc(d, sizeof *row);
    lt_grad_stats want = lt_grad_stats_of(x);
    t.tensor.ctx = m->ctx;
    must(m->cuda.measure(on_device(&t), by, row));
    compare(m, lt_dtype_name(dtype), &t, 0);
    want.largest *= by;
    check_joined(m, row, want);
    mirror_free(m, &t);
}

TEST_CUDA(rescaling)
{
    static const int64_t counts[] = {0, 1, 33, 5001, 600000};
    static const double factors[] = {1, 0x1p16, 0x1p-20, 0x1p-140, 0x1p-160, 0x1p100};
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < COUNT(counts); k++)
            for (int f = 0; f < COUNT(factors); f++)
                if (counts[k] < 10000 || f == 1) {
                    check_rescale(m, all[i], all[i], counts[k], factors[f]);
                    check_measure(m, all[i], counts[k], factors[f]);
                    if (all[i] == LT_F16 || all[i] == LT_BF16)
                        check_rescale(m, all[i], LT_F32, counts[k], factors[f]);
                }
}

/* ==== Waiting ================================================================================= */

TEST_CUDA(kernels_run_asynchronously)
{
    lt_tensor *x = values(m, LT_F32, 1, (int64_t[]){1000}, 1, false);
    lt_tensor *y = values(m, LT_F32, 1, (int64_t[]){1000}, 2, false);
    mirror tx = mirror_of(m, x, 0), ty = mirror_of(m, y, 0);
    lt_tensor *in[] = {on_device(&tx)}, *outs[] = {on_device(&ty)};
    lt_call call = {.ctx = m->ctx, .n_in = 1, .in = in, .out = outs};
    int64_t waits = counted(SHIM_WAITS), launches = counted(SHIM_LAUNCHES);
    for (int i = 0; i < 10; i++)
        must(m->cuda.op[LT_OP_relu].fwd(&call));
    CHECK_EQ(counted(SHIM_WAITS), waits);
    CHECK_EQ(counted(SHIM_LAUNCHES), launches); /* none has run yet */
    must(m->cuda.device->sync(m->cuda.device));
    CHECK_EQ(counted(SHIM_WAITS), waits + 1);
    CHECK_EQ(counted(SHIM_LAUNCHES), launches + 10);
    mirror_free(m, &tx);
    mirror_free(m, &ty);
}

TEST_CUDA(an_asynchronous_error_has_a_message)
{
    lt_tensor *x = values(m, LT_F32, 1, (int64_t[]){10}, 1, false);
    mirror t = mirror_of(m, x, 0);
    lt_tensor *in[] = {on_device(&t)}, far = t.tensor, *outs[] = {&far};
    lt_call call = {.ctx = m->ctx, .n_in = 1, .in = in, .out = outs};
    far.data = (char *)far.data + 4; /* its last element is outside the block */
    must(m->cuda.op[LT_OP_relu].fwd(&call));
    CHECK(m->cuda.device->sync(m->cuda.device) == LT_EENV);
    static const char start[] = "cuda:0: a kernel or copy wrote outside the block of 40 bytes";
    CHECK(strncmp(lt_errmsg(), start, strlen(start)) == 0);
    mirror_free(m, &t);
}

/* After a kernel fails, every call returns that error, and not "out of memory". The device can be
 * closed, and opened again after a reset. */
TEST(errors_are_sticky)
{
    static const char why[] = "cuda:0: an illegal memory access was encountered";
    machine m = machine_open();
    lt_device *d = m.cuda.device;
    lt_tensor *x = values(&m, LT_F32, 1, (int64_t[]){10}, 1, false);
    mirror t = mirror_of(&m, x, 0);
    lt_tensor *in[] = {on_device(&t)}, *outs[] = {on_device(&t)};
    lt_call call = {.ctx = m.ctx, .n_in = 1, .in = in, .out = outs};
    void *pinned = lt__host_alloc(d, 1000), *block = lt__device_alloc(m.ctx, d, 1000);
    CHECK(pinned && block);
    SHIM(shim_fault)("an illegal memory access was %s", "encountered");
    CHECK(!lt__device_alloc(m.ctx, d, 100000));
    CHECK_EQ(lt_errcode(), LT_EENV);
    CHECK_STR(lt_errmsg(), why);
    CHECK(!lt__host_alloc(d, 1000));
    CHECK_STR(lt_errmsg(), why);
    CHECK_FAILS(m.cuda.op[LT_OP_relu].fwd(&call), LT_EENV, why);
    CHECK_FAILS(d->copy(d, pinned, block, 1000), LT_EENV, why);
    CHECK_FAILS(d->upload(d, block, pinned, 1000, d->mark(d), NULL), LT_EENV, why);
    CHECK_FAILS(d->wait(d, d->mark(d)), LT_EENV, why);
    CHECK_FAILS(d->sync(d), LT_EENV, why);
    d->free_host(d, pinned);
    lt__device_free(m.ctx, d, block, 1000);
    mirror_free(&m, &t);
    lt_ctx_free(m.ctx);
    use_shim();
    CHECK(!lt_open(&(lt_config){.device = "cuda:0"}));
    CHECK_MSG("device cuda:0: cuda:0 cannot be used: an illegal memory access was encountered");
    SHIM(shim_reset)();
    lt_ctx_free(open_device());
}

/* Freeing memory waits for queued work that uses it. */
TEST_CUDA(memory_is_freed_after_its_last_use)
{
    lt_device *d = m->cuda.device;
    void *block = d->alloc(d, 4000), *pinned = d->alloc_host(d, 4000);
    int64_t launches = counted(SHIM_LAUNCHES);
    must(d->fill(d, block, LT_F32, 1000, 1));
    CHECK_EQ(counted(SHIM_LAUNCHES), launches);
    d->free(d, block, 4000);
    CHECK_EQ(counted(SHIM_LAUNCHES), launches + 1);
    block = d->alloc(d, 4000);
    must(d->fill(d, block, LT_F32, 1000, 1));
    must(d->copy(d, pinned, block, 4000));
    d->free_host(d, pinned);
    CHECK_EQ(counted(SHIM_LAUNCHES), launches + 2);
    must(d->fill(d, block, LT_F32, 1000, 1));
    d->close(d);
    CHECK_EQ(counted(SHIM_LAUNCHES), launches + 3);
    m->ctx->devices[1] = NULL;
}

TEST_CUDA(dtypes_without_kernels)
{
    lt_tensor *x = values(m, LT_F64, 1, (int64_t[]){10}, 1, false);
    mirror t = mirror_of(m, x, 0);
    lt_tensor *in[] = {on_device(&t), on_device(&t)}, *outs[] = {on_device(&t)};
    lt_call call = {.ctx = m->ctx, .n_in = 2, .in = in, .out = outs};
    CHECK(m->cuda.op[LT_OP_add].fwd(&call) == LT_EUNSUPPORTED);
    CHECK(strcmp(lt_errmsg(), "cuda:0 does not support f64 for this op; cast to f32, or compute "
                              "on the CPU") == 0);
    mirror_free(m, &t);
}
