/* test_libs.c - where the backend searches for NVIDIA's libraries, and its errors when one is
 * missing, too old or not the expected library.
 */
#include "tests/lt_test.h"

#ifdef LT_WITH_CUDNN
#include <sys/stat.h>

#include "tests/cuda/cuda_test.h"

static const char *const names[] = {"cudnnGetVersion", "cudnnCreate"};
enum { NAMES = 2 };
static const char *const no_names[] = {"cudnnGetVersion", "cudnnFly"};

/* ==== Folders ================================================================================= */

static char folder[64];

static void begin(void)
{
    static const char *const variables[] = {"LUATRAIN_CUDA_LIBS", "CUDA_HOME", "VIRTUAL_ENV",
                                            "PATH", "HOME"};
    strcpy(folder, "/tmp/lt-cuda-XXXXXX");
    if (!mkdtemp(folder))
        FAIL("cannot make a folder in /tmp");
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
        unsetenv(variables[i]);
}

static void end(void)
{
    char command[128];
    snprintf(command, sizeof command, "/bin/rm -r %s", folder);
    CHECK_EQ(system(command), 0);
}

/* Makes folder/below, and its parents. */
static const char *make_folder(const char *below, char path[PATH_MAX])
{
    int at = snprintf(path, PATH_MAX, "%s/", folder);
    for (; *below; below++) {
        path[at] = 0;
        if (*below == '/')
            mkdir(path, 0700);
        path[at++] = *below;
    }
    path[at] = 0;
    if (mkdir(path, 0700) != 0)
        FAIL("%s: cannot make the folder", path);
    return path;
}

/* Links the stand-in for cuDNN into folder/below, under a name that no other library has. */
static void put_library(const char *below)
{
    char path[PATH_MAX], file[PATH_MAX + 32], from[PATH_MAX];
    make_folder(below, path);
    snprintf(file, sizeof file, "%s/libltnone.so.3", path);
    if (symlink(beside("libs/libcudnn.so.9", from), file) != 0)
        FAIL("%s: cannot make the link", file);
}

static void *find_library(const char *const *which, char text[512])
{
    void (*functions[NAMES])(void);
    text[0] = 0;
    return lt__cuda_open("libltnone.so.3", "none:cudnn", "Nothing 3.1", which, functions, NAMES,
                         text, 512);
}

/* Checks that the library in folder/below is found once the variable is folder/value. */
static void check_found_by(const char *variable, const char *below, const char *value)
{
    char text[512], at[PATH_MAX + 64];
    begin();
    put_library(below);
    CHECK(!find_library(names, text));
    snprintf(at, sizeof at, "%s%s", folder, value);
    setenv(variable, at, 1);
    if (!find_library(names, text))
        FAIL("%s", text);
    CHECK_STR(text, "");
    end();
}

/* ==== Found =================================================================================== */

TEST(found_in_luatrain_cuda_libs) { check_found_by("LUATRAIN_CUDA_LIBS", "own", "/own"); }
TEST(found_in_lib64_of_the_toolkit) { check_found_by("CUDA_HOME", "lib64", ""); }
TEST(found_in_lib_of_the_toolkit) { check_found_by("CUDA_HOME", "lib", ""); }
TEST(found_in_a_virtual_environment)
{
    check_found_by("VIRTUAL_ENV", "lib/python3.99/site-packages/nvidia/cudnn/lib", "");
}
TEST(found_in_the_python_packages_of_the_user)
{
    check_found_by("HOME", ".local/lib/python3.8/site-packages/nvidia/cudnn/lib", "");
}

TEST(found_in_the_last_of_several_folders)
{
    char text[512], list[PATH_MAX];
    begin();
    put_library("last");
    snprintf(list, sizeof list, "/nowhere::%s/first:%s/last", folder, folder);
    setenv("LUATRAIN_CUDA_LIBS", list, 1);
    if (!find_library(names, text))
        FAIL("%s", text);
    end();
}

/* Checks that the library is found in the packages of the first python3 in $PATH. link: that
 * python3 is a link into another folder. */
static void check_found_by_python(bool link)
{
    char text[512], path[PATH_MAX], file[PATH_MAX + 16], other[PATH_MAX + 16];
    begin();
    put_library("real/lib/python3.11/dist-packages/nvidia/none/lib");
    snprintf(file, sizeof file, "%s/python3", make_folder("real/bin", path));
    FILE *f = fopen(file, "w");
    CHECK(f != NULL && chmod(file, 0700) == 0);
    fclose(f);
    snprintf(other, sizeof other, "%s/python3", make_folder("elsewhere/bin", path));
    CHECK_EQ(symlink(file, other), 0);
    *strrchr(link ? other : file, '/') = 0;
    setenv("PATH", link ? other : file, 1);
    if (!find_library(names, text))
        FAIL("%s", text);
    setenv("PATH", "/nowhere", 1);
    CHECK(!find_library(names, text));
    end();
}

TEST(found_in_the_packages_of_python3) { check_found_by_python(false); }
TEST(found_in_the_packages_of_a_linked_python3) { check_found_by_python(true); }

/* ==== Not found =============================================================================== */

TEST(a_missing_library)
{
    char text[512];
    begin();
    CHECK(!find_library(names, text));
    CHECK_STR(
        text,
        "libltnone.so.3 was not found in the loader's path, $LUATRAIN_CUDA_LIBS, "
        "$CUDA_HOME, /usr/local/cuda or Python's nvidia packages; install Nothing 3.1 or later");
    end();
}

TEST(a_library_without_a_function)
{
    char text[512], want[256];
    begin();
    put_library("own");
    setenv("LUATRAIN_CUDA_LIBS", strcat(strcpy(want, folder), "/own"), 1);
    CHECK(!find_library(no_names, text));
    snprintf(want, sizeof want,
             "%s/own/libltnone.so.3 has no cudnnFly; install Nothing 3.1 or "
             "later",
             folder);
    CHECK_STR(text, want);
    end();
}

TEST(a_file_that_is_not_a_library)
{
    char text[512], path[PATH_MAX], file[PATH_MAX + 32], want[PATH_MAX + 96];
    begin();
    make_folder("own", path);
    snprintf(file, sizeof file, "%s/libltnone.so.3", path);
    FILE *f = fopen(file, "w");
    fputs("no library", f);
    fclose(f);
    setenv("LUATRAIN_CUDA_LIBS", path, 1);
    CHECK(!find_library(names, text));
    snprintf(want, sizeof want, "%s cannot be loaded: ", file);
    if (strncmp(text, want, strlen(want)) != 0)
        FAIL("%s", text);
    end();
}

TEST(a_cudnn_that_is_too_old)
{
    char text[512];
    lt_cudnn_table table;
    stand_in *library = open_stand_in("libcudnn.so.9");
    library->version = 90701;
    CHECK_EQ(lt__cudnn_open_library(&table, text, sizeof text), -1);
    CHECK_STR(text, "cuDNN is version 9.7.1, but luatrain requires 9.8.0 or later");
    library->version = LT_CUDNN_OLDEST;
    CHECK_EQ(lt__cudnn_open_library(&table, text, sizeof text), 0);
}
#else
TEST(libraries) { SKIP("cuDNN's headers are not installed"); }
#endif
