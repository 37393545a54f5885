/* lenet.c - a program built only against the installed library: trains LeNet from ops and saves it.
 *
 *     lenet [bf16] OUT.safetensors [IMAGES LABELS]   IDX files; without them, synthetic images
 *
 * It succeeds if the loss falls by half and the file has the same weights when it is read back.
 */
#include <luatrain/luatrain.h>
#include <stdio.h>

#include "lenet.h"

enum { STEPS = 60, BATCH = 32 };

static lt_status read_images(lt_ctx *ctx, int argc, char **argv, lt_tensor **images,
                             lt_tensor **labels)
{
    if (argc != 4)
        return lenet_synthetic(ctx, STEPS * BATCH, 12, images, labels);
    *images = lt_idx_read(ctx, argv[2]);
    *labels = *images ? lt_idx_read(ctx, argv[3]) : NULL;
    return *labels ? LT_OK : lt_errcode();
}

/* The mean loss of the first and of the last ten steps of one pass. */
static lt_status train(lenet *net, lt_batches *batches, double *first, double *last)
{
    *first = *last = 0;
    for (int step = 0; step < STEPS; step++) {
        lt_tensor *x, *y;
        double loss = 0;
        LT_TRY(lt_batches_next(batches, &x, &y));
        lt_status status = lenet_step(net, x, y, &loss);
        lt_release(x);
        lt_release(y);
        LT_TRY(status);
        *first += step < 10 ? loss / 10 : 0;
        *last += step >= STEPS - 10 ? loss / 10 : 0;
    }
    return LT_OK;
}

static lt_status compare(lenet *net, lt_file *file)
{
    for (int i = 0; i < LENET_PARAMS; i++) {
        int entry = lt_file_find(file, lenet_names[i]);
        if (entry < 0)
            return lt_fail(LT_EFILE, "%s is not in the file", lenet_names[i]);
        lt_tensor *w = lt_file_read(file, entry);
        if (!w)
            return lt_errcode();
        size_t bytes = (size_t)lt_count(net->w[i]) * lt_dtype_bytes(lt_tensor_dtype(net->w[i]));
        bool same = lt_count(w) == lt_count(net->w[i]) &&
                    memcmp(lt_data(w), lt_data(net->w[i]), bytes) == 0;
        lt_release(w);
        if (!same)
            return lt_fail(LT_EFILE, "%s came back with other values", lenet_names[i]);
    }
    return LT_OK;
}

static lt_status save_and_compare(lenet *net, const char *path)
{
    LT_TRY(lt_file_save(path, LENET_PARAMS, lenet_names, net->w, 0, NULL));
    lt_file *file = lt_file_open(net->ctx, path);
    if (!file)
        return lt_errcode();
    lt_status status = compare(net, file);
    lt_file_close(file);
    return status;
}

int main(int argc, char **argv)
{
    lenet net = {0};
    lt_tensor *images = NULL, *labels = NULL;
    lt_batches *batches = NULL;
    double first, last;
    bool half = argc > 1 && strcmp(argv[1], "bf16") == 0; /* in mixed precision */
    argc -= half;
    argv += half;
    if (argc != 2 && argc != 4) {
        fprintf(stderr, "usage: lenet [bf16] OUT.safetensors [IMAGES LABELS]\n");
        return 2;
    }
    lt_ctx *ctx = lt_open(&(lt_config){.seed = 1});
    if (ctx && half)
        lt_set_autocast(ctx, LT_BF16);
    lt_status status = ctx ? read_images(ctx, argc, argv, &images, &labels) : lt_errcode();
    if (status != LT_OK)
        goto done;
    if (!(batches = lenet_batches(ctx, images, labels, BATCH))) {
        status = lt_errcode();
        goto done;
    }
    if ((status = lenet_open(&net, ctx, lt_dim(images, 1))) != LT_OK ||
        (status = train(&net, batches, &first, &last)) != LT_OK)
        goto done;
    printf("loss %.3f, after %d steps %.3f\n", first, STEPS, last);
    if (last < first / 2)
        status = save_and_compare(&net, argv[1]);
    else
        status = lt_fail(LT_ENUMERIC, "the loss does not fall");
done:
    if (status != LT_OK)
        fprintf(stderr, "lenet: %s\n", lt_errmsg());
    lenet_close(&net);
    lt_batches_free(batches);
    lt_release(images);
    lt_release(labels);
    lt_ctx_free(ctx);
    return lt_exit_code(status);
}
