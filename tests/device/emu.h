/* emu.h - helpers for tests on an emulated CUDA device: contexts on it and on the CPU. */
#ifndef TESTS_DEVICE_EMU_H
#define TESTS_DEVICE_EMU_H

#include <lauxlib.h>
#include <stdlib.h>

#include "lua/luatrain.h"
#include "ops/ops.h"
#include "tests/cuda/libs.h"

/* From now on the accelerators are emulated CUDA devices with CUDA kernels. */
static inline void use_shim(void)
{
    char path[PATH_MAX];
    setenv("LUATRAIN_PLUGINS", beside("", path), 1);
    setenv("LUATRAIN_CUDA_LIBS", beside("libs", path), 1);
    unsetenv("SHIM_OPS");
}

/* From now on they have the reference kernels of the CPU instead: see shim/reference.cpp. */
static inline void use_emu(void)
{
    use_shim();
    setenv("SHIM_OPS", "reference", 1);
}

/* A context on an emulated device; new memory is filled with NaNs. New. */
static inline lt_ctx *open_device(void)
{
    lt_ctx *ctx = lt_open(&(lt_config){.device = "cuda", .threads = 1, .poison = true});
    if (!ctx)
        FAIL("%s", lt_errmsg());
    return ctx;
}

/* A context on one with CUDA kernels, with or without the stand-ins for NVIDIA's libraries. New. */
static inline lt_ctx *open_shim(bool libraries)
{
    use_libraries(libraries);
    use_shim();
    return open_device();
}

/* The same with reference kernels. New. */
static inline lt_ctx *open_emu(void)
{
    use_emu();
    return open_device();
}

/* A test with such a context, *ctx. */
#define TEST_EMU(title)                                                                            \
    static void on_emu_##title(lt_ctx *ctx);                                                       \
    TEST(title)                                                                                    \
    {                                                                                              \
        lt_ctx *ctx = open_emu();                                                                  \
        on_emu_##title(ctx);                                                                       \
        lt_ctx_free(ctx);                                                                          \
    }                                                                                              \
    static void on_emu_##title(lt_ctx *ctx)

/* A context with the reference kernels of the CPU. New. */
static inline lt_ctx *open_reference(void)
{
    lt_ctx *ctx = lt_open(&(lt_config){.threads = 1, .poison = true, .reference = true});
    if (!ctx)
        FAIL("%s", lt_errmsg());
    return ctx;
}

/* A Lua state for ctx with a chunk, as its value -1. */
static inline lua_State *load_script(lt_ctx *ctx, const char *script)
{
    lua_State *L = ctx ? lt_lua_new(ctx) : NULL;
    if (!L || luaL_loadstring(L, script) != LUA_OK)
        FAIL("%s", L ? lua_tostring(L, -1) : lt_errmsg());
    return L;
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
    if (rmdir(path) != 0) /* it is not empty */
        CHECK_EQ(system(command), 0);
}

#endif
