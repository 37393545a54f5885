/* libs.h - NVIDIA's libraries as the tests have them: stand-ins beside the test's program. */
#ifndef TESTS_CUDA_LIBS_H
#define TESTS_CUDA_LIBS_H

#include <dlfcn.h>
#include <libgen.h>
#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/cuda/stand_in.h"
#include "tests/cuda/stand_in_nccl.h"
#include "tests/lt_test.h"

/* A file beside the test's own program, in a buffer of the caller. */
static inline char *beside(const char *name, char path[PATH_MAX])
{
    char program[PATH_MAX] = "";
    if (readlink("/proc/self/exe", program, sizeof program - 1) < 0)
        FAIL("there is no /proc/self/exe");
    if (snprintf(path, PATH_MAX, "%s/%s", dirname(program), name) >= PATH_MAX)
        FAIL("the path is too long");
    return path;
}

/* What a stand-in beside the program is told, and says: one engine, nothing done yet. Libraries are
 * looked for there first from now on. */
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

/* Likewise, of the stand-in for NCCL: each call is in progress for a while. */
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

/* From now on a backend that opens finds both, or finds them too old. */
static inline void use_libraries(bool yes)
{
#ifdef LT_WITH_CUDNN
    open_stand_in("libcublasLt.so.13")->version = yes ? 0 : 1;
    open_stand_in("libcudnn.so.9")->version = yes ? 0 : 1;
#else
    (void)yes; /* it has been built without */
#endif
}

#endif
