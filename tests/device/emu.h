/* emu.h - helpers for tests on an emulated accelerator: contexts on it and on the CPU. */
#ifndef TESTS_DEVICE_EMU_H
#define TESTS_DEVICE_EMU_H

#include <libgen.h>
#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

#include "ops/ops.h"
#include "tests/lt_test.h"

/* From now on plugins are searched for in the folder of this test program, or in a subfolder such
 * as "/emu". */
static inline void use_plugins(const char *below)
{
    char path[PATH_MAX + 8];
    ssize_t n = readlink("/proc/self/exe", path, PATH_MAX - 1);
    path[n > 0 ? n : 0] = '\0';
    strcat(dirname(path), below);
    setenv("LUATRAIN_PLUGINS", path, 1);
}

static inline void use_emu(void) { use_plugins("/emu"); }

/* A context on the accelerator of these plugins; new memory is filled with NaNs. New. */
static inline lt_ctx *open_device(void)
{
    lt_ctx *ctx = lt_open(&(lt_config){.device = "cuda", .threads = 1, .poison = true});
    if (!ctx)
        FAIL("%s", lt_errmsg());
    return ctx;
}

/* A context on the emulator. New. */
static inline lt_ctx *open_emu(void)
{
    use_emu();
    return open_device();
}

/* A context with the reference kernels of the CPU. New. */
static inline lt_ctx *open_reference(void)
{
    lt_ctx *ctx = lt_open(&(lt_config){.threads = 1, .poison = true, .reference = true});
    if (!ctx)
        FAIL("%s", lt_errmsg());
    return ctx;
}

/* Makes a temporary folder. remove_folder() removes it with its contents. */
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
