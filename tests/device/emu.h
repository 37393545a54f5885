/* emu.h - for tests on the emulated accelerator: contexts on it and on the CPU, whose results have
 * the same bits. */
#ifndef TESTS_DEVICE_EMU_H
#define TESTS_DEVICE_EMU_H

#include <libgen.h>
#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

#include "ops/ops.h"
#include "tests/lt_test.h"

/* The folder of the emulator is the one that plugins are looked for in. */
static inline void use_emu(void)
{
    char path[PATH_MAX + 8];
    ssize_t n = readlink("/proc/self/exe", path, PATH_MAX - 1);
    path[n > 0 ? n : 0] = '\0';
    strcat(dirname(path), "/emu");
    setenv("LUATRAIN_PLUGINS", path, 1);
}

/* On the emulator, where fresh memory holds NaNs. New. */
static inline lt_ctx *open_emu(void)
{
    use_emu();
    lt_ctx *ctx = lt_open(&(lt_config){.device = "cuda", .threads = 1, .poison = true});
    if (!ctx)
        FAIL("%s", lt_errmsg());
    return ctx;
}

/* Its twin on the CPU. New. */
static inline lt_ctx *open_twin(void)
{
    lt_ctx *ctx = lt_open(&(lt_config){.threads = 1, .poison = true, .reference = true});
    if (!ctx)
        FAIL("%s", lt_errmsg());
    return ctx;
}

#endif
