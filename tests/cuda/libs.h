/* libs.h - opens the plugin for emulated CUDA devices and the stand-ins for NVIDIA's libraries. */
#ifndef TESTS_CUDA_LIBS_H
#define TESTS_CUDA_LIBS_H

#include <dlfcn.h>
#include <libgen.h>
#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

#ifdef LT_WITH_CUDNN
#include "ops/cuda/libraries.h"
#endif
#include "tests/cuda/shim.h"
#include "tests/cuda/stand_in.h"
#include "tests/cuda/stand_in_nccl.h"
#include "tests/lt_test.h"

/* The path of a file in the folder tests/cuda of the build, in the caller's buffer. The test
 * program is in that folder or in one beside it. */
static inline char *beside(const char *name, char path[PATH_MAX])
{
    char program[PATH_MAX] = "";
    if (readlink("/proc/self/exe", program, sizeof program - 1) < 0)
        FAIL("/proc/self/exe is missing");
    if (snprintf(path, PATH_MAX, "%s/../cuda/%s", dirname(program), name) >= PATH_MAX)
        FAIL("the path is too long");
    return path;
}

/* A function or variable of a library in that folder. */
static inline void *symbol_of(const char *library, const char *name)
{
    char path[PATH_MAX];
    void *opened = dlopen(beside(library, path), RTLD_NOW | RTLD_LOCAL);
    void *at = opened ? dlsym(opened, name) : NULL;
    if (!at)
        FAIL("%s", dlerror());
    return at;
}

/* A function of the plugin that is declared in shim.h. */
#define SHIM(name) ((__typeof__(&(name)))symbol_of("libluatrain-cuda.so", #name))

static inline int64_t counted(int what) { return SHIM(shim_count)(what); }

/* Opens a stand-in and resets its state: one engine, all counters 0. From now on the backend
 * searches the stand-ins' folder first. */
static inline stand_in *open_stand_in(const char *soname)
{
    char path[PATH_MAX], file[64];
    setenv("LUATRAIN_CUDA_LIBS", beside("libs", path), 1);
    snprintf(file, sizeof file, "libs/%s", soname);
    stand_in *state = symbol_of(file, "stand_in_state");
    *state = (stand_in){.engines = {{{.number = 1, .note = -1}}}};
    return state;
}

/* The same for NCCL. Each call stays in progress for two polls. */
static inline stand_in_nccl *open_nccl(void)
{
    char path[PATH_MAX];
    setenv("LUATRAIN_CUDA_LIBS", beside("libs", path), 1);
    stand_in_nccl *state = symbol_of("libs/libnccl.so.2", "stand_in_nccl_state");
    *state = (stand_in_nccl){.slow = 2};
    return state;
}

/* Backends opened from now on find the stand-ins for cuDNN and cuBLASLt, or neither library. */
static inline void use_libraries(bool yes)
{
    setenv("SHIM_HIDES", yes ? "" : "cuDNN cuBLASLt", 1);
#ifdef LT_WITH_CUDNN
    open_stand_in(LT_CUBLASLT_SONAME);
    open_stand_in("libcudnn.so.9");
#endif
}

#endif
