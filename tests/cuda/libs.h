/* libs.h - opens the stand-ins for NVIDIA's libraries, which are beside the test program. */
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
#include "tests/cuda/stand_in.h"
#include "tests/cuda/stand_in_nccl.h"
#include "tests/lt_test.h"

/* The path of a file beside the test program, in the caller's buffer. */
static inline char *beside(const char *name, char path[PATH_MAX])
{
    char program[PATH_MAX] = "";
    if (readlink("/proc/self/exe", program, sizeof program - 1) < 0)
        FAIL("/proc/self/exe is missing");
    if (snprintf(path, PATH_MAX, "%s/%s", dirname(program), name) >= PATH_MAX)
        FAIL("the path is too long");
    return path;
}

/* Opens a stand-in and resets its state: one engine, all counters 0. From now on the backend
 * searches the stand-ins' folder first. */
static inline stand_in *open_stand_in(const char *soname)
{
    char path[PATH_MAX];
    setenv("LUATRAIN_CUDA_LIBS", beside("libs", path), 1);
    void *library = dlopen(strcat(strcat(path, "/"), soname), RTLD_NOW | RTLD_LOCAL);
    stand_in *state = library ? dlsym(library, "stand_in_state") : NULL;
    if (!state)
        FAIL("%s", dlerror());
    *state = (stand_in){.engines = {{{.number = 1, .note = -1}}}};
    return state;
}

/* The same for NCCL. Each call stays in progress for two polls. */
static inline stand_in_nccl *open_nccl(void)
{
    char path[PATH_MAX];
    setenv("LUATRAIN_CUDA_LIBS", beside("libs", path), 1);
    void *library = dlopen(strcat(path, "/libnccl.so.2"), RTLD_NOW | RTLD_LOCAL);
    stand_in_nccl *state = library ? dlsym(library, "stand_in_nccl_state") : NULL;
    if (!state)
        FAIL("%s", dlerror());
    *state = (stand_in_nccl){.slow = 2};
    return state;
}

/* Backends opened from now on find the stand-ins for cuDNN and cuBLASLt, or neither library. */
static inline void use_libraries(bool yes)
{
#ifdef LT_WITH_CUDNN
    open_stand_in(LT_CUBLASLT_SONAME);
    open_stand_in("libcudnn.so.9");
    setenv("SHIM_HIDES", yes ? "" : "cuDNN cuBLASLt", 1);
#else
    (void)yes; /* built without them */
#endif
}

#endif
