/* Parsing of op signatures and option texts. */
#include "autograd/autograd.h"
#include "tests/lt_test.h"

static lt_schema s;

TEST(signature)
{
    CHECK_OK(lt_schema_parse("conv(x, w, b?; kernel, stride=kernel, pad=0, eps=1e-5, train=false, "
                             "axis?, lr#)",
                             &s));
    CHECK_STR(s.name, "conv");
    CHECK_EQ(s.n_in, 3);
    CHECK_EQ(s.min_in, 2);
    CHECK(s.in[2].optional && !s.variadic);
    CHECK_EQ(s.n_opt, 7);
    CHECK_EQ(s.opt[1].same_as, 0);
    CHECK_EQ(s.opt[2].value.kind, LT_KIND_INTS);
    CHECK_EQ(s.opt[3].value.kind, LT_KIND_NUMBER);
    CHECK_NEAR(s.opt[3].value.f, 1e-5, 0);
    CHECK_EQ(s.opt[4].value.kind, LT_KIND_BOOL);
    CHECK(s.opt[5].position && s.opt[5].optional);
    CHECK_EQ(s.opt[6].value.kind, LT_KIND_NUMBER);
    CHECK_EQ(s.opt[6].value.n, 0);
    CHECK_OK(lt_schema_parse("cat(x...; axis, dtype=f32, low=-inf)", &s));
    CHECK(s.variadic);
    CHECK_EQ(s.opt[1].value.kind, LT_KIND_DTYPE);
    CHECK_NEAR(s.opt[2].value.f, -INFINITY, 0);
    CHECK_OK(lt_schema_parse("norm(x; train=false, act=none|relu|relu6, axis?)", &s));
    CHECK_EQ(s.opt[1].value.kind, LT_KIND_WORD);
    CHECK_EQ(s.opt[1].value.n, 1);
    CHECK_EQ(s.opt[1].value.i[0], 0);
    CHECK_STR(s.opt[2].name, "axis");
}

TEST(malformed_signatures)
{
    static const char *const bad[] = {"",
                                      "f",
                                      "f(",
                                      "f()",
                                      "f(x",
                                      "f(x;)",
                                      "f(x; a=)",
                                      "f(x; a=b)",
                                      "f(x; a=b|)",
                                      "f(x; a=|b)",
                                      "f(x; a=b|c-d)",
                                      "f(x; a=b|averyveryverylongword)",
                                      "f(x; a=a|b|c|d|e|f|g|h|i)",
                                      "f(x,)",
                                      "f(x) y",
                                      "f(x..., y)",
                                      "f(x; a=1.5.2)",
                                      "f(averyveryverylongname)"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_FAILS(lt_schema_parse(bad[i], &s), LT_EINVAL, "cannot parse signature");
}

TEST(options)
{
    lt_opt o[LT_MAX_OPT];
    CHECK_OK(lt_schema_parse("pool(x; kernel, stride=kernel, pad=0, eps=1e-5, train=false, "
                             "dtype=f32, axis?)",
                             &s));
    CHECK_OK(lt_opts_parse(&s, "kernel=3,2  train=true eps=2 dtype=bf16", o));
    CHECK_EQ(o[0].n, 2);
    CHECK_EQ(o[1].n, 2);
    CHECK_EQ(o[1].i[1], 2);
    CHECK_EQ(o[2].i[0], 0);
    CHECK_NEAR(o[3].f, 2, 0);
    CHECK_EQ(o[4].i[0], 1);
    CHECK_EQ(o[5].i[0], LT_BF16);
    CHECK_EQ(o[6].n, 0);
    CHECK_FAILS(lt_opts_parse(&s, "", o), LT_EINVAL, "pool: option 'kernel' is missing");
    CHECK_FAILS(lt_opts_parse(&s, "kernel=2 strides=1", o), LT_EINVAL,
                "unknown option 'strides' (did you mean 'stride'?)");
    CHECK_FAILS(lt_opts_parse(&s, "kernel=2 volume=1", o), LT_EINVAL,
                "it has kernel, stride, pad, eps, train, dtype, axis");
    CHECK_FAILS(lt_opts_parse(&s, "kernel=a", o), LT_EINVAL,
                "option 'kernel' must be integers such as 2 or 2,1, but is 'a'");
    CHECK_FAILS(lt_opts_parse(&s, "kernel=2, train=true", o), LT_EINVAL, "must be integers");
    CHECK_FAILS(lt_opts_parse(&s, "kernel=1,2,3,4,5,6,7,8,9", o), LT_EINVAL, "must be integers");
    CHECK_FAILS(lt_opts_parse(&s, "kernel=2 train=yes", o), LT_EINVAL,
                "must be true or false, but is 'yes'");
    CHECK_FAILS(lt_opts_parse(&s, "kernel=2 eps=x", o), LT_EINVAL, "must be a number");
    CHECK_FAILS(lt_opts_parse(&s, "kernel=2 dtype=f99", o), LT_EINVAL,
                "must be a dtype such as f32");
    CHECK_FAILS(lt_opts_parse(&s, "kernel", o), LT_EINVAL, "options must look like");
}

TEST(words)
{
    lt_opt o[LT_MAX_OPT];
    CHECK_OK(lt_schema_parse("norm(x; act=none|relu|relu6, mode=up|down)", &s));
    CHECK_OK(lt_opts_parse(&s, "mode=down", o));
    CHECK_EQ(o[0].i[0], 0);
    CHECK_EQ(o[1].i[0], 1);
    CHECK_OK(lt_opts_parse(&s, "act=relu6 mode=up", o));
    CHECK_EQ(o[0].i[0], 2);
    CHECK_EQ(o[0].n, 1);
    CHECK_EQ(o[1].i[0], 0);
    CHECK_EQ(lt_schema_word(&s, 0, "relu"), 1);
    CHECK_FAILS(
        lt_opts_parse(&s, "act=rellu", o), LT_EINVAL,
        "norm: option 'act' must be none, relu or relu6, but is 'rellu' (did you mean 'relu'?)");
    CHECK_FAILS(lt_opts_parse(&s, "mode=sideways", o), LT_EINVAL,
                "norm: option 'mode' must be up or down, but is 'sideways'");
    CHECK_FAILS(lt_opts_parse(&s, "act=", o), LT_EINVAL, "must be none, relu or relu6, but is ''");
    CHECK_FAILS(lt_opts_parse(&s, "act=none|relu", o), LT_EINVAL, "but is 'none|relu'");
}
