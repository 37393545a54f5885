/* agree.c - compares, in each step, what must be the same on all ranks; see reducer.h.
 *
 * The record of a step has one digest per rank. If two digests differ, the ranks compare the same
 * things as text to find the difference. All ranks see the same record, so they all compare, each
 * on the rank's own thread. The record also counts writes to parameters. Different counts are not
 * an error in themselves, because a rank may have restored what it changed. The ranks then compare
 * the values.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/hash.h"
#include "dist/reducer.h"

enum { LINE = 256 };

void lt__agree_record_frozen(lt_reducer *r)
{
    for (int i = 0; i < r->plan.n_items; i++)
        r->plan.items[i].frozen = !lt_requires_grad(r->plan.items[i].x);
    r->frozen_recorded = true;
}

static uint32_t add(uint32_t digest, uint32_t word)
{
    return lt__fnv32(digest, &word, sizeof word);
}

static uint32_t digest_of(lt_reducer *r)
{
    uint32_t digest = add(lt_settings_digest(r->ctx), r->data);
    digest = add(digest, (uint32_t)r->rows);
    for (int i = 0; i < r->plan.n_items; i++)
        digest = add(digest, r->plan.items[i].frozen);
    return digest;
}

static uint32_t version_of(const lt_tensor *x)
{
    return atomic_load_explicit(&x->storage->version, memory_order_relaxed);
}

/* Tensor i of the running statistics: the mean, then the variance, of each batch norm in turn. */
static lt_tensor *running(const lt_reducer *r, int i)
{
    const lt_bn_layer *layer = &r->record.bn_layers.list[i / 2];
    return i % 2 ? layer->running_var : layer->running_mean;
}

/* The number of writes to the parameter arenas and to running statistics since the last call. */
static uint32_t count_writes(lt_reducer *r)
{
    uint32_t count = 0, bn = 0;
    for (int i = 0; i < 2 * r->record.bn_layers.n; i++)
        bn += version_of(running(r, i));
    count += bn - r->bn_written;
    r->bn_written = bn;
    for (int arena = 0, i = 0; i < r->plan.n_items; i++) {
        const lt_bucket_item *it = &r->plan.items[i];
        if (it->arena != arena)
            continue;
        uint32_t now = version_of(it->x);
        count += now - r->written[arena];
        r->written[arena++] = now;
    }
    return count;
}

void lt__agree_write(lt_reducer *r, uint32_t *agree, uint32_t *writes)
{
    if (!r->frozen_recorded)
        lt__agree_record_frozen(r);
    *agree = digest_of(r);
    *writes = count_writes(r);
}

/* ==== Comparing as text ======================================================================= */

/* Room for `lines` lines and a terminating NUL. New; release it with free(). NULL with
 * LT_ENOMEM. */
static char *new_text(int lines) { return lt__calloc((size_t)lines + 1, LINE, "for a comparison"); }

/* Prints "parameter 3 (f32 64x3x3x1)". Returns its length, at most half of a line. */
static int print_parameter(char *to, const lt_reducer *r, int i)
{
    char shape[96];
    return snprintf(to, LINE / 2, "parameter %d (%s)", i + 1,
                    lt_describe(r->plan.items[i].x, shape, sizeof shape));
}

static lt_status compare_step(lt_reducer *r)
{
    char what[40], *text = new_text(r->plan.n_items + 2), *at = text;
    if (!text)
        return LT_ENOMEM;
    snprintf(what, sizeof what, "step %lld", (long long)lt_step(r->ctx) + 1);
    at += snprintf(at, LINE, "a batch of %lld rows\n", (long long)r->rows);
    at += snprintf(at, LINE, "training data with digest %08x\n", (unsigned)r->data);
    for (int i = 0; i < r->plan.n_items; i++) {
        at += print_parameter(at, r, i);
        at += snprintf(at, LINE / 2, ": %s\n", r->plan.items[i].frozen ? "frozen" : "trained");
    }
    lt_status status = lt_group_compare(r->group, what, text);
    free(text);
    return status;
}

lt_status lt_group_compare_settings(lt_group *group, lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, LT_EINVAL);
    char *text = lt_settings_text(ctx);
    if (!text)
        return LT_ENOMEM;
    lt_status status = lt_group_compare(group, "the last optimizer step", text);
    free(text);
    return status;
}

lt_status lt__agree_find_difference(lt_reducer *r)
{
    LT_TRY(lt_group_compare_settings(r->group, r->ctx));
    LT_TRY(compare_step(r));
    return lt_fail(
        LT_EDESYNC,
        "the ranks disagree: their optimizers did not have the same settings (lr, momentum, ...) "
        "in all steps");
}

/* Appends the first digits of the digest of the values of x, and ends the line. */
static lt_status print_values(char **to, lt_tensor *x)
{
    lt_sha256 sha;
    char hex[65];
    lt_sha256_begin(&sha);
    LT_TRY(lt__sha256_add_tensor(&sha, x));
    lt_sha256_end(&sha, hex);
    *to += snprintf(*to, LINE / 2, ": %.16s\n", hex);
    return LT_OK;
}

lt_status lt__agree_compare_weights(lt_reducer *r)
{
    int n_running = 2 * r->record.bn_layers.n;
    char what[80], *text = new_text(r->plan.n_items + n_running), *at = text;
    lt_status status = text ? LT_OK : LT_ENOMEM;
    for (int i = 0; i < r->plan.n_items && status == LT_OK; i++) {
        at += print_parameter(at, r, i);
        status = print_values(&at, r->plan.items[i].x);
    }
    for (int i = 0; i < n_running && status == LT_OK; i++) {
        at += snprintf(at, LINE / 2, "running %s of batch norm %d", i % 2 ? "var" : "mean",
                       i / 2 + 1);
        status = print_values(&at, running(r, i));
    }
    snprintf(what, sizeof what, "the weights at step %lld, which some ranks have changed",
             (long long)lt_step(r->ctx) + 1);
    if (status == LT_OK)
        status = lt_group_compare(r->group, what, text);
    free(text);
    return status;
}
