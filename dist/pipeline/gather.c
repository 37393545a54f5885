/* gather.c - reads the tensors of all stages of a pipeline: their digest, and their file. */
#include <stdio.h>
#include <string.h>

#include "dist/pipeline/internal.h"

/* ==== The digest ============================================================================== */

/* Passes data from one stage to another. */
static lt_status pass_on(lt_pipeline *p, int from, int to, void *data, size_t bytes)
{
    int own = p->schedule.stage;
    if (from == to || (own != from && own != to))
        return LT_OK;
    return own == from ? lt_group_send(p->group, lt__stage_rank(p, to), data, bytes)
                       : lt_group_receive(p->group, lt__stage_rank(p, from), data, bytes);
}

/* The state of the digest is passed from stage to stage, in the order of the tensors. */
lt_status lt_pipeline_sha256(lt_pipeline *p, lt_params *params, char hex[65])
{
    lt_sha256 s;
    int at = 0;
    lt_sha256_begin(&s);
    for (int buffers = 0; buffers < 2; buffers++)
        for (int i = 0; i < lt_params_count(params); i++) {
            const lt_span *span = lt_params_span(params, i);
            int next = lt__sender_of(span->value);
            if (span->buffer != buffers)
                continue;
            LT_TRY(pass_on(p, at, next, &s, sizeof s));
            at = next;
            if (at == p->schedule.stage)
                LT_TRY(lt__sha256_add_tensor(&s, span->value));
        }
    if (at == p->schedule.stage)
        lt_sha256_end(&s, hex);
    for (int to = 0; to < p->schedule.stages; to++)
        LT_TRY(pass_on(p, at, to, hex, 65));
    return LT_OK;
}

/* ==== The file ================================================================================ */

/* Receives a tensor of another stage. New. */
static lt_tensor *receive(lt_pipeline *p, lt_tensor *x)
{
    lt_tensor *y =
        lt__tensor_new(p->ctx, p->ctx->devices[0], (lt_dtype)x->dtype, x->ndim, x->dims, true);
    size_t bytes = lt__tensor_bytes(x);
    if (y && bytes > 0 &&
        lt_group_receive(p->group, lt__stage_rank(p, lt__sender_of(x)), y->data, bytes) != LT_OK) {
        lt_release(y);
        return NULL;
    }
    return y;
}

/* How far rank 0 is. It receives all tensors, even if the file fails. */
typedef struct progress {
    lt_pipeline *pipeline;
    int received;
} progress;

static lt_tensor *receive_next(void *ud, lt_tensor *x)
{
    progress *at = ud;
    lt_tensor *y = receive(at->pipeline, x);
    at->received += y != NULL;
    return y;
}

static lt_status write_file(lt_pipeline *p, const char *path, int n, const char *const *names,
                            lt_tensor *const *tensors, int n_meta, const char *const *meta)
{
    progress at = {.pipeline = p};
    lt_status status = lt__file_save_with(path, n, names, tensors, n_meta, meta, receive_next, &at);
    if (status == LT_OK)
        return LT_OK;
    char text[1024];
    int remote = 0;
    strncpy(text, lt_errmsg(), sizeof text - 1);
    text[sizeof text - 1] = '\0';
    for (int i = 0; i < n && !lt__group_has_failed(p->group); i++) {
        bool is_left = tensors[i]->meta && remote++ >= at.received;
        lt_tensor *y = is_left ? receive(p, tensors[i]) : NULL;
        if (is_left && !y && !lt__group_has_failed(p->group))
            lt_group_fail(p->group); /* the sender waits for it */
        lt_release(y);
    }
    return lt_fail(status, "%s", text);
}

static lt_status send_own(lt_pipeline *p, int n, lt_tensor *const *tensors)
{
    for (int i = 0; i < n; i++) {
        size_t bytes = lt__tensor_bytes(tensors[i]);
        if (lt__sender_of(tensors[i]) != p->schedule.stage || bytes == 0)
            continue;
        lt_tensor *here = lt__on_host(tensors[i]);
        if (!here)
            return lt_errcode();
        lt_status status = lt_group_send(p->group, lt__stage_rank(p, 0), here->data, bytes);
        lt_release(here);
        LT_TRY(status);
    }
    return LT_OK;
}

static lt_status save(lt_pipeline *p, const char *path, int n, const char *const *names,
                      lt_tensor *const *tensors, int n_meta, const char *const *meta)
{
    if (p->replica > 0)
        return LT_OK;
    return p->schedule.stage == 0 ? write_file(p, path, n, names, tensors, n_meta, meta)
                                  : send_own(p, n, tensors);
}

lt_status lt_pipeline_save(lt_pipeline *p, const char *path, int n, const char *const *names,
                           lt_tensor *const *tensors, int n_meta, const char *const *meta)
{
    char text[1024];
    lt_status status = save(p, path, n, names, tensors, n_meta, meta);
    bool is_root = lt_group_rank(p->group) == 0;
    if (lt__group_has_failed(p->group) || (status != LT_OK && !is_root))
        return status;
    snprintf(text, sizeof text, "%s", lt_errmsg());
    lt_status others = lt_group_barrier(p->group, "the end of a save");
    if (status == LT_OK && is_root)
        return LT_OK; /* the file is complete, even if another rank has failed since */
    LT_TRY(others);
    return status == LT_OK ? LT_OK : lt_fail(status, "%s", text);
}
