/* emu.h - for tests on an accelerator that the CPU plays: contexts on it and on the CPU. */
#ifndef TESTS_DEVICE_EMU_H
#define TESTS_DEVICE_EMU_H

#include <libgen.h>
#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

#include "ops/ops.h"
#include "tests/lt_test.h"

/* Plugins are looked for in the folder of this test, or in one below it. */
static inline void use_plugins(const char *below)
{
    char path[PATH_MAX + 8];
    ssize_t n = readlink("/proc/self/exe", path, PATH_MAX - 1);
    path[n > 0 ? n : 0] = '\0';
    strcat(dirname(path), below);
    setenv("LUATRAIN_PLUGINS", path, 1);
}

static inline void use_emu(void) { use_plugins("/emu"); }

/* On the accelerator of these plugins, where fresh memory holds NaNs. New. */
static inline lt_ctx *open_device(void)
{
    lt_ctx *ctx = lt_open(&(lt_config){.device = "cuda", .threads = 1, .poison = true});
    if (!ctx)
        FAIL("%s", lt_errmsg());
    return ctx;
}

/* On the emulator. New. */
static inline lt_ctx *open_emu(void)
{
    use_emu();
    return open_device();
}

/* Its reference on the CPU. New. */
static inline lt_ctx *open_reference(void)
{
    lt_ctx *ctx = lt_open(&(lt_config){.threads = 1, .poison = true, .reference = true});
    if (!ctx)
        FAIL("%s", lt_errmsg());
    return ctx;
}

/* A new folder; what is in it goes by remove_folder(). */
static inline void make_folder(char path[32])
{
    strcpy(path, "/tmp/lt_device_XXXXXX");
    CHECK(mkdtemp(path));
    setenv("LUATRAIN_QUIET", "1", 1);
}

static inline void remove_folder(const char *path)
{
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", path);
    CHECK_EQ(system(command), 0);
}

#endif
