/* settings.c - the settings of optimizer steps: checks them, and provides them as a digest, which
 * ranks compare in every step, and as text, which they compare when their digests differ.
 *
 * The settings of a step stay here until the first step after the next call of
 * lt_settings_digest(), so that a rank can still print them when it learns that another rank has
 * different ones.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "autograd/ranges.h"
#include "core/hash.h"
#include "core/locale.h"

/* LT_EINVAL unless the options of a group are complete and leave `step` unset. */
static lt_status check_group(const lt_optim *o, const lt_opt *options, int group)
{
    const lt_schema *s = &o->def->schema;
    if (!options)
        return lt_fail(LT_EINVAL, "%s: the options of group %d are NULL", s->name, group);
    for (int k = 0; k < s->n_opt; k++)
        if (options[k].n == 0 && !s->opt[k].optional)
            return lt_fail(LT_EINVAL,
                           "%s: option '%s' of group %d is not set; fill the options of each group "
                           "with lt_opts_parse()",
                           s->name, s->opt[k].name, group);
    if (o->step >= 0 && options[o->step].n > 0)
        return lt_fail(LT_EINVAL,
                       "%s: option 'step' must not be set: the optimizer counts the steps of each "
                       "parameter; see lt_optim_set_steps()",
                       s->name);
    return LT_OK;
}

lt_status lt__check_settings(const lt_optim *o, const lt_opt *const *options, int n_groups)
{
    for (int i = 0; i < o->n_items; i++)
        if (o->items[i].group >= n_groups)
            return lt_fail(LT_EINVAL,
                           "a parameter is in group %d, but options were given for %d groups",
                           o->items[i].group, n_groups);
    for (int group = 0; group < n_groups; group++)
        LT_TRY(check_group(o, options[group], group));
    return LT_OK;
}

/* The bits of a number, rounded to f32: on another CPU, libm may compute lr with a different last
 * bit. */
static uint32_t bits_of(double number)
{
    float rounded = (float)number;
    uint32_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    return bits;
}

static void add(struct lt_autograd *ag, uint32_t word)
{
    ag->settings = lt__fnv32(ag->settings, &word, sizeof word);
}

static void add_to_digest(struct lt_autograd *ag, const lt_step_settings *noted)
{
    add(ag, noted->optim);
    add(ag, (uint32_t)noted->group);
    add(ag, bits_of(noted->clip));
    for (int k = 0; k < noted->def->schema.n_opt; k++) {
        const lt_opt *opt = &noted->opt[k];
        add(ag, opt->n);
        if (opt->kind == LT_KIND_NUMBER)
            add(ag, bits_of(opt->f));
        for (int i = 0; i < opt->n && opt->kind != LT_KIND_NUMBER; i++)
            add(ag, (uint32_t)opt->i[i]);
    }
}

lt_status lt__record_settings(struct lt_autograd *ag, uint32_t optim, const lt_def *def,
                              const lt_opt *const *options, int n_groups, double clip)
{
    if (!lt__step_has_ranks(ag)) /* no other rank compares them */
        return LT_OK;
    if (ag->noted_read)
        ag->n_noted = 0;
    ag->noted_read = false;
    LT_TRY(LT_RESERVE(ag->noted, ag->n_noted + n_groups, &ag->noted_capacity,
                      "for the settings of an optimizer"));
    for (int group = 0; group < n_groups; group++) {
        lt_step_settings *noted = &ag->noted[ag->n_noted++];
        *noted = (lt_step_settings){.optim = optim, .def = def, .group = group, .clip = clip};
        memcpy(noted->opt, options[group], (size_t)def->schema.n_opt * sizeof *noted->opt);
        add_to_digest(ag, noted);
    }
    return LT_OK;
}

uint32_t lt_settings_digest(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, 0);
    struct lt_autograd *ag = ctx->slots.autograd;
    if (!ag)
        return 0;
    ag->noted_read = true;
    return ag->settings;
}

/* ==== As text ================================================================================= */

enum { LINE = 96 };

static int print_value(char *to, size_t size, const lt_opt *opt)
{
    if (opt->n == 0)
        return snprintf(to, size, "nothing");
    if (opt->kind == LT_KIND_NUMBER)
        return lt__format(to, size, "%.9g", opt->f);
    if (opt->kind == LT_KIND_BOOL)
        return snprintf(to, size, opt->i[0] ? "true" : "false");
    return snprintf(to, size, "%lld", (long long)opt->i[0]);
}

/* "optimizer 1, group 2: ". */
static int print_owner(char *to, size_t size, const lt_step_settings *noted)
{
    if (noted->group == 0)
        return snprintf(to, size, "optimizer %u: ", (unsigned)noted->optim);
    return snprintf(to, size, "optimizer %u, group %d: ", (unsigned)noted->optim, noted->group + 1);
}

char *lt_settings_text(const lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, NULL);
    const struct lt_autograd *ag = ctx->slots.autograd;
    int n = ag ? ag->n_noted : 0;
    size_t size = (size_t)n * (LT_MAX_OPT + 1) * LINE + 1;
    char *text = lt__calloc(size, 1, "for the settings of an optimizer"), *at = text;
    for (int i = 0; text && i < n; i++) {
        const lt_step_settings *noted = &ag->noted[i];
        const lt_schema *schema = &noted->def->schema;
        for (int k = 0; k < schema->n_opt; k++) {
            at += print_owner(at, LINE, noted);
            at += snprintf(at, LINE, "%s = ", schema->opt[k].name);
            at += print_value(at, LINE, &noted->opt[k]);
            at += snprintf(at, LINE, "\n");
        }
        if (noted->group == 0)
            at += lt__format(at, LINE, "optimizer %u: clip = %.9g\n", (unsigned)noted->optim,
                             noted->clip);
    }
    return text;
}
