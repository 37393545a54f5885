/* schema.c - parses signatures and options, and keeps the list of ops of a context.
 *
 * The signature is the only description of an op's arguments: dispatch, the Lua binding, the
 * documentation and messages all use the lt_schema that is parsed from it here.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "autograd/tape.h"
#include "core/hash.h"
#include "core/locale.h"

/* ==== Signatures ============================================================================== */

static void skip_blanks(const char **p) { *p += strspn(*p, " "); }

static bool take(const char **p, const char *token)
{
    skip_blanks(p);
    size_t n = strlen(token);
    if (strncmp(*p, token, n) != 0)
        return false;
    *p += n;
    return true;
}

static bool is_in_names(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

/* Reads a name of letters, digits and underscores into name[capacity]. False if it is empty or too
 * long. */
static bool take_name(const char **p, char *name, size_t capacity)
{
    skip_blanks(p);
    size_t n = 0;
    while (is_in_names((*p)[n]))
        n++;
    if (n == 0 || n >= capacity)
        return false;
    memcpy(name, *p, n);
    name[n] = 0;
    *p += n;
    return true;
}

static bool is_position(const char *name)
{
    static const char *const names[] = {"axis", "axes", "first", "last"};
    for (int i = 0; i < 4; i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return false;
}

/* Parses a number that takes up all of [p, p + n). */
static bool read_number(const char *p, size_t n, double *value)
{
    char text[40], *end;
    if (n == 0 || n >= sizeof text)
        return false;
    memcpy(text, p, n);
    text[n] = 0;
    lt_locale l = lt__enter_c_locale();
    *value = strtod(text, &end);
    lt__leave_c_locale(l);
    return *end == 0;
}

static bool read_integer(const char *p, size_t n, int64_t *value)
{
    char text[24], *end;
    if (n == 0 || n >= sizeof text)
        return false;
    memcpy(text, p, n);
    text[n] = 0;
    errno = 0;
    *value = strtoll(text, &end, 10);
    return *end == 0 && errno == 0;
}

static size_t token_length(const char *p) { return strcspn(p, " ,)"); }

enum { MAX_WORDS = 8, WORD_BYTES = 16 };

/* Parses "none|relu|relu6". Returns the number of words, or 0 if it is malformed. */
static int take_words(const char **p, char words[MAX_WORDS][WORD_BYTES])
{
    int n = 0;
    do
        if (n == MAX_WORDS || !take_name(p, words[n++], WORD_BYTES))
            return 0;
    while (take(p, "|"));
    return n;
}

/* Parses the text after the name of option k: "=1", "=kernel", "#", "?" or nothing. */
static bool read_default(const char **p, lt_schema *s, int k)
{
    lt_opt *v = &s->opt[k].value;
    char word[16];
    s->opt[k].same_as = -1;
    v->kind = strcmp(s->opt[k].name, "dtype") == 0 ? LT_KIND_DTYPE : LT_KIND_INTS;
    if (take(p, "#")) {
        v->kind = LT_KIND_NUMBER;
        return true;
    }
    if (take(p, "?")) {
        s->opt[k].optional = true;
        return true;
    }
    if (!take(p, "="))
        return true;
    skip_blanks(p);
    size_t n = token_length(*p);
    if (memchr(*p, '|', n)) {
        char words[MAX_WORDS][WORD_BYTES];
        v->kind = LT_KIND_WORD;
        v->n = 1;
        s->opt[k].words = *p;
        return take_words(p, words) > 0;
    }
    if (n < sizeof word) {
        memcpy(word, *p, n);
        word[n] = 0;
        s->opt[k].same_as = (int8_t)lt_schema_index(s, word); /* finds only options before k */
        if (s->opt[k].same_as >= 0) {
            *p += n;
            return true;
        }
        if (strcmp(word, "true") == 0 || strcmp(word, "false") == 0) {
            v->kind = LT_KIND_BOOL;
            v->i[0] = word[0] == 't';
        } else if (lt_dtype_find(word) >= 0) {
            v->kind = LT_KIND_DTYPE;
            v->i[0] = lt_dtype_find(word);
        } else if (read_integer(*p, n, &v->i[0])) {
            v->kind = LT_KIND_INTS;
        } else if (read_number(*p, n, &v->f)) {
            v->kind = LT_KIND_NUMBER;
        } else {
            return false;
        }
    }
    v->n = 1;
    *p += n;
    return true;
}

static bool read_inputs(const char **p, lt_schema *s)
{
    for (;;) {
        if (s->n_in == LT_MAX_IN || s->variadic ||
            !take_name(p, s->in[s->n_in].name, sizeof s->in[0].name))
            return false;
        if (take(p, "..."))
            s->variadic = true;
        if (take(p, "?"))
            s->in[s->n_in].optional = true;
        else
            s->min_in = s->n_in + 1;
        s->n_in++;
        if (!take(p, ","))
            return true;
    }
}

static bool read_options(const char **p, lt_schema *s)
{
    for (;;) {
        if (s->n_opt == LT_MAX_OPT || !take_name(p, s->opt[s->n_opt].name, sizeof s->opt[0].name))
            return false;
        s->opt[s->n_opt].position = is_position(s->opt[s->n_opt].name);
        if (!read_default(p, s, s->n_opt))
            return false;
        s->n_opt++;
        if (!take(p, ","))
            return true;
    }
}

lt_status lt_schema_parse(const char *signature, lt_schema *s)
{
    const char *p = signature;
    memset(s, 0, sizeof *s);
    bool ok = take_name(&p, s->name, sizeof s->name) && take(&p, "(") && read_inputs(&p, s);
    if (ok && take(&p, ";"))
        ok = read_options(&p, s);
    ok = ok && take(&p, ")") && *p == 0;
    if (!ok)
        return lt_fail(LT_EINVAL, "cannot parse signature '%s' at '%.20s'", signature, p);
    return LT_OK;
}

/* ==== Options of a call ======================================================================= */

int lt_schema_index(const lt_schema *s, const char *option)
{
    int k = s->n_opt;
    while (k-- > 0 && strcmp(s->opt[k].name, option) != 0)
        ;
    return k;
}

int lt_schema_find(const lt_schema *s, const char *option)
{
    const char *names[LT_MAX_OPT];
    int k = lt_schema_index(s, option);
    if (k >= 0)
        return k;
    for (int i = 0; i < s->n_opt; i++)
        names[i] = s->opt[i].name;
    int near = lt_nearest(option, names, s->n_opt);
    if (near >= 0)
        lt_fail(LT_EINVAL, "%s: unknown option '%s' (did you mean '%s'?)", s->name, option,
                names[near]);
    else if (s->n_opt == 0)
        lt_fail(LT_EINVAL, "%s: unknown option '%s' (it has no options)", s->name, option);
    else {
        char list[128] = "";
        for (int i = 0; i < s->n_opt; i++)
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? ", " : "",
                     names[i]);
        lt_fail(LT_EINVAL, "%s: unknown option '%s' (it has %s)", s->name, option, list);
    }
    return -1;
}

int lt_schema_word(const lt_schema *s, int k, const char *word)
{
    char words[MAX_WORDS][WORD_BYTES], list[MAX_WORDS * (WORD_BYTES + 4)] = "";
    const char *names[MAX_WORDS], *p = s->opt[k].words;
    int n = take_words(&p, words);
    for (int i = 0; i < n; i++) {
        if (strcmp(words[i], word) == 0)
            return i;
        names[i] = words[i];
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s",
                 i == 0       ? ""
                 : i == n - 1 ? " or "
                              : ", ",
                 words[i]);
    }
    int near = lt_nearest(word, names, n);
    lt_fail(LT_EINVAL,
            near >= 0 ? "%s: option '%s' must be %s, but is '%s' (did you mean '%s'?)"
                      : "%s: option '%s' must be %s, but is '%s'",
            s->name, s->opt[k].name, list, word, near >= 0 ? names[near] : NULL);
    return -1;
}

void lt_opts_clear(const lt_schema *s, lt_opt *opts)
{
    for (int i = 0; i < s->n_opt; i++) {
        opts[i].kind = s->opt[i].value.kind;
        opts[i].n = 0;
    }
}

/* Sets options that are not given to their defaults. Returns the first one without a default, or
 * -1. */
static int set_defaults(const lt_schema *s, lt_opt *opts)
{
    for (int i = 0; i < s->n_opt; i++) {
        if (opts[i].n > 0 || s->opt[i].optional)
            continue;
        if (s->opt[i].same_as >= 0)
            opts[i] = opts[s->opt[i].same_as];
        else if (s->opt[i].value.n > 0)
            opts[i] = s->opt[i].value;
        else
            return i;
    }
    return -1;
}

lt_status lt_opts_complete(const lt_schema *s, lt_opt *opts)
{
    int i = set_defaults(s, opts);
    return i < 0 ? LT_OK
                 : lt_fail(LT_EINVAL, "%s: option '%s' is missing", s->name, s->opt[i].name);
}

static bool read_value(const char *p, size_t n, lt_opt *opt)
{
    char word[8];
    switch (opt->kind) {
    case LT_KIND_NUMBER: opt->n = 1; return read_number(p, n, &opt->f);
    case LT_KIND_BOOL:
        opt->n = 1;
        opt->i[0] = n == 4 && strncmp(p, "true", n) == 0;
        return opt->i[0] || (n == 5 && strncmp(p, "false", n) == 0);
    case LT_KIND_DTYPE:
        if (n >= sizeof word)
            return false;
        memcpy(word, p, n);
        word[n] = 0;
        opt->n = 1;
        opt->i[0] = lt_dtype_find(word);
        return opt->i[0] >= 0;
    default:
        for (opt->n = 0; opt->n < LT_MAX_DIMS;) {
            size_t one = strcspn(p, ", ");
            if (one > n || !read_integer(p, one, &opt->i[opt->n++]))
                return false;
            if (one == n)
                return true;
            p += one + 1;
            n -= one + 1;
        }
        return false;
    }
}

static lt_status read_word(const lt_schema *s, int k, const char *p, size_t n, lt_opt *opt)
{
    char word[40];
    snprintf(word, sizeof word, "%.*s", (int)n, p);
    opt->n = 1;
    opt->i[0] = lt_schema_word(s, k, word);
    return opt->i[0] < 0 ? LT_EINVAL : LT_OK;
}

lt_status lt_opts_parse(const lt_schema *s, const char *text, lt_opt *opts)
{
    static const char *const wanted[] = {"integers such as 2 or 2,1", "a number", "true or false",
                                         "a dtype such as f32"};
    lt_opts_clear(s, opts);
    const char *p = text ? text : "";
    for (skip_blanks(&p); *p; skip_blanks(&p)) {
        char name[16];
        if (!take_name(&p, name, sizeof name) || *p != '=')
            return lt_fail(LT_EINVAL,
                           "%s: options must look like \"stride=2 pad=1\", but are \"%s\"", s->name,
                           text);
        int k = lt_schema_find(s, name);
        if (k < 0)
            return LT_EINVAL;
        if (opts[k].n > 0)
            return lt_fail(LT_EINVAL, "%s: option '%s' is given twice", s->name, name);
        size_t n = strcspn(++p, " ");
        if (opts[k].kind == LT_KIND_WORD)
            LT_TRY(read_word(s, k, p, n, &opts[k]));
        else if (!read_value(p, n, &opts[k]))
            return lt_fail(LT_EINVAL, "%s: option '%s' must be %s, but is '%.*s'", s->name, name,
                           wanted[opts[k].kind], (int)n, p);
        p += n;
    }
    return lt_opts_complete(s, opts);
}

/* ==== The ops of a context ==================================================================== */

/* The slot of a name in the hash table; empty if no op has this name. */
static uint16_t *slot_of(struct lt_autograd *ag, const char *name)
{
    enum { SLOTS = sizeof ag->by_name / sizeof *ag->by_name };
    for (uint32_t h = lt__fnv32(LT_FNV32_START, name, strlen(name));; h++) {
        uint16_t *slot = &ag->by_name[h % SLOTS];
        if (*slot == 0 || strcmp(ag->defs[*slot - 1]->schema.name, name) == 0)
            return slot;
    }
}

lt_status lt_op_register(lt_ctx *ctx, const lt_op *op)
{
    LT_NEED_CTX(ctx, LT_EINVAL);
    struct lt_autograd *ag = lt__autograd(ctx);
    lt_schema schema;
    if (!ag)
        return LT_ENOMEM;
    LT_TRY(lt_schema_parse(op->sig, &schema));
    if (!op->doc || !op->shape || (op->in_place && !op->fwd && !op->fast_fwd))
        return lt_fail(LT_EINVAL, "op '%s' must have a doc, a shape rule and kernels", schema.name);
    uint16_t *slot = slot_of(ag, schema.name);
    if (*slot)
        return lt_fail(LT_EINVAL, "op '%s' is already registered", schema.name);
    if (op->n_out + op->n_aux + (op->n_out == 0) > LT_MAX_OUT || ag->n_defs >= 400)
        return lt_fail(LT_EINVAL, "op '%s' has too many outputs, or there are too many ops",
                       schema.name);
    LT_TRY(lt__grow(ctx, &ag->defs, ag->n_defs, &ag->capacity, sizeof *ag->defs));
    lt_def *def = lt__alloc_zero(ctx, sizeof *def);
    if (!def)
        return LT_ENOMEM;
    def->op = op;
    def->schema = schema;
    def->id = ag->n_defs;
    lt_opts_clear(&schema, def->defaults);
    def->must_give = set_defaults(&schema, def->defaults) >= 0;
    ag->defs[ag->n_defs++] = def;
    *slot = (uint16_t)ag->n_defs;
    return LT_OK;
}

const lt_def *lt_op_find(lt_ctx *ctx, const char *name)
{
    LT_NEED_CTX(ctx, NULL);
    struct lt_autograd *ag = lt__autograd(ctx);
    if (!ag)
        return NULL;
    if (!name) {
        lt_fail(LT_EINVAL, "the name of the op is NULL");
        return NULL;
    }
    uint16_t id = *slot_of(ag, name);
    if (id)
        return ag->defs[id - 1];
    const char *names[400];
    for (int i = 0; i < ag->n_defs; i++)
        names[i] = ag->defs[i]->schema.name;
    int near = lt_nearest(name, names, ag->n_defs);
    if (near >= 0)
        lt_fail(LT_EINVAL, "unknown op '%s' (did you mean '%s'?)", name, names[near]);
    else
        lt_fail(LT_EINVAL, "unknown op '%s'", name);
    return NULL;
}

const lt_def *lt_op_at(lt_ctx *ctx, int i)
{
    LT_NEED_CTX(ctx, NULL);
    struct lt_autograd *ag = lt__autograd(ctx);
    return ag && i >= 0 && i < ag->n_defs ? ag->defs[i] : NULL;
}
