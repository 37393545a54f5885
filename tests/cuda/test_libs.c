/* test_libs.c - where the backend searches for NVIDIA's libraries, and which files it skips: those
 * that are too old, are for another CUDA, or are not the expected library.
 */
#define _GNU_SOURCE
#include "tests/lt_test.h"

#ifdef LT_WITH_CUDNN
#include <link.h>
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

static bool is_too_old(const char *file, const void *table, char *why, size_t bytes)
{
    void (*const *functions)(void) = table;
    CHECK(file[0] == '/' && functions[0] && functions[1]);
    snprintf(why, bytes, "is version 3.0");
    return false;
}

/* will_do: as in lt_library. */
static bool search(const char *const *which, __typeof__(&is_too_old) will_do, char text[512])
{
    const lt_library library = {.soname = "libltnone.so.3",
                                .packages = "none:cudnn",
                                .what = "Nothing 3.1 or later",
                                .names = which,
                                .n = NAMES,
                                .will_do = will_do};
    void (*functions[NAMES])(void);
    text[0] = 0;
    return lt__cuda_open(&library, functions, text, 512) == 0;
}

static bool find_library(const char *const *which, char text[512])
{
    return search(which, NULL, text);
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
    snprintf(at, sizeof at, "%s/%s/libltnone.so.3", folder, below);
    CHECK_STR(text, at);
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

/* More files than the search remembers are of no use. */
TEST(found_in_the_last_of_many_folders)
{
    enum { FOLDERS = 40 };
    char text[512], path[PATH_MAX], list[FOLDERS * 64] = "";
    begin();
    for (int i = 0; i < FOLDERS; i++) {
        char name[16], file[PATH_MAX + 32];
        snprintf(name, sizeof name, "%d", i);
        snprintf(file, sizeof file, "%s/libltnone.so.3", make_folder(name, path));
        fclose(fopen(file, "w"));
        strcat(strcat(list, path), ":");
    }
    put_library("last");
    strcat(strcat(list, folder), "/last");
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

/* Two folders have the same file, which is tried once. */
TEST(a_library_that_is_too_old)
{
    char text[512], list[PATH_MAX], want[PATH_MAX];
    begin();
    put_library("own");
    put_library("same");
    snprintf(list, sizeof list, "%s/own:%s/same", folder, folder);
    setenv("LUATRAIN_CUDA_LIBS", list, 1);
    CHECK(!search(names, is_too_old, text));
    snprintf(want, sizeof want,
             "%s/own/libltnone.so.3 is version 3.0; install Nothing 3.1 or later", folder);
    CHECK_STR(text, want);
    end();
}

/* ==== Skipped ================================================================================= */

/* Copies a stand-in to folder/below. Returns the state of the copy, which stays loaded, so that the
 * backend finds it as the test has set it. */
static stand_in *copy_stand_in(const char *below, const char *soname)
{
    char from[PATH_MAX], path[PATH_MAX], command[3 * PATH_MAX];
    make_folder(below, path);
    beside("libs", from);
    snprintf(command, sizeof command, "/bin/cp %s/%s %s", from, soname, path);
    CHECK_EQ(system(command), 0);
    snprintf(command, sizeof command, "%s/%s", path, soname);
    void *library = dlopen(command, RTLD_NOW | RTLD_LOCAL);
    stand_in *state = library ? dlsym(library, "stand_in_state") : NULL;
    if (!state)
        FAIL("%s", dlerror());
    return state;
}

/* Writes a file with this text to folder/below. */
static void write_file(const char *below, const char *text)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, below);
    FILE *file = fopen(path, "w");
    fprintf(file, "any bytes%c%s, others", 0, text);
    fclose(file);
}

/* Makes the backend search these folders below `folder`. */
static void search_in(const char *first, const char *second)
{
    char list[2 * PATH_MAX];
    snprintf(list, sizeof list, "%s/%s:%s/%s", folder, first, folder, second);
    setenv("LUATRAIN_CUDA_LIBS", list, 1);
}

/* Checks that cuDNN is found in folder/new, and why the cuDNN in folder/old is skipped. */
static void check_new_cudnn(const char *why)
{
    char text[1024], want[PATH_MAX + 512];
    lt_cudnn_table table;
    if (lt__cudnn_open_library(&table, text, sizeof text) != 0)
        FAIL("%s", text);
    snprintf(want, sizeof want, "%s/new/libcudnn.so.9 (skipped: %s/old/libcudnn.so.9 %s)", folder,
             folder, why);
    CHECK_STR(text, want);
    CHECK_EQ(table.cudnnGetVersion(), CUDNN_VERSION);
}

TEST(a_cudnn_that_is_too_old)
{
    char text[1024];
    lt_cudnn_table table;
    begin();
    stand_in *old = copy_stand_in("old", "libcudnn.so.9");
    copy_stand_in("new", "libcudnn.so.9");
    search_in("old", "new");
    old->version = 90701;
    check_new_cudnn("is version 9.7.1");
    old->version = LT_CUDNN_OLDEST;
    CHECK_EQ(lt__cudnn_open_library(&table, text, sizeof text), 0);
    CHECK_EQ(table.cudnnGetVersion(), LT_CUDNN_OLDEST);
    end();
}

TEST(a_cudnn_for_another_cuda)
{
    begin();
    copy_stand_in("old", "libcudnn.so.9")->cuda = CUBLAS_VER_MAJOR - 1;
    copy_stand_in("new", "libcudnn.so.9");
    search_in("old", "new");
    char why[32];
    snprintf(why, sizeof why, "is for CUDA %d", CUBLAS_VER_MAJOR - 1);
    check_new_cudnn(why);
    end();
}

/* The files of a cuDNN tell its version. Calling one of its functions would load more of it. */
TEST(a_cudnn_whose_files_tell_that_it_is_too_old)
{
    char text[64], why[32];
    begin();
    stand_in *old = copy_stand_in("old", "libcudnn.so.9");
    copy_stand_in("new", "libcudnn.so.9");
    search_in("old", "new");
    write_file("old/libcudnn_graph.so.9", "cudnn_version_9_1_0_70_e0");
    check_new_cudnn("is version 9.1.0");
    write_file("old/libcudnn_graph.so.9", "cudnn_version_9_19_0_56");
    snprintf(text, sizeof text, "libcublasLt.so.%d", CUBLAS_VER_MAJOR - 1);
    write_file("old/libcudnn_engines_precompiled.so.9", text);
    write_file("new/libcudnn_engines_precompiled.so.9", "libcublasLt.so.%d"); /* not known */
    snprintf(why, sizeof why, "is for CUDA %d", CUBLAS_VER_MAJOR - 1);
    check_new_cudnn(why);
    CHECK_EQ(old->versions, 0);
    end();
}

/* The functions of such a cuDNN end the process. */
TEST(a_cudnn_without_its_other_files)
{
    char path[PATH_MAX];
    begin();
    stand_in *old = copy_stand_in("old", "libcudnn.so.9");
    copy_stand_in("new", "libcudnn.so.9");
    search_in("old", "new");
    snprintf(path, sizeof path, "%s/old/libcudnn.so.9", folder);
    FILE *file = fopen(path, "a");
    fprintf(file, "libcudnn_graph.so.9");
    fclose(file);
    check_new_cudnn("lacks libcudnn_graph.so.9");
    CHECK_EQ(old->versions, 0);
    end();
}

/* A folder with a link to one of its files. */
TEST(a_link_to_a_cudnn)
{
    char path[PATH_MAX], file[PATH_MAX + 32], target[PATH_MAX];
    begin();
    stand_in *old = copy_stand_in("real", "libcudnn.so.9");
    copy_stand_in("new", "libcudnn.so.9");
    snprintf(file, sizeof file, "%s/libcudnn.so.9", make_folder("old", path));
    snprintf(target, sizeof target, "%s/real/libcudnn.so.9", folder);
    CHECK_EQ(symlink(target, file), 0);
    write_file("real/libcudnn_graph.so.9", "cudnn_version_9_1_0_70_e0");
    search_in("old", "new");
    check_new_cudnn("is version 9.1.0");
    CHECK_EQ(old->versions, 0);
    end();
}

TEST(a_cublaslt_that_is_too_old)
{
    char text[1024], want[PATH_MAX + 512];
    lt_cublaslt_table table;
    begin();
    copy_stand_in("old", LT_CUBLASLT_SONAME)->version = 120900;
    copy_stand_in("new", LT_CUBLASLT_SONAME);
    search_in("old", "new");
    CHECK_EQ(lt__cublaslt_open(&table, text, sizeof text), 0);
    snprintf(want, sizeof want,
             "%s/new/" LT_CUBLASLT_SONAME " (skipped: %s/old/" LT_CUBLASLT_SONAME
             " is version 12.9.0)",
             folder, folder);
    CHECK_STR(text, want);
    end();
}

/* ==== The search path of the loader ===========================================================
 *
 * Each of these tests runs in a process of its own, with an old and a new cuDNN in the folders of
 * LD_LIBRARY_PATH.
 */

/* Puts a cuDNN of two files into folder/below. version: of the same length as "9_19_0_56". */
static void put_cudnn(const char *below, const char *version)
{
    char from[PATH_MAX], command[3 * PATH_MAX];
    copy_stand_in(below, "libcudnn.so.9");
    snprintf(
        command, sizeof command,
        "/bin/cp %s/* %s/%s && /bin/sed -i s/cudnn_version_9_19_0_56/cudnn_version_%s/ %s/%s/*",
        beside("parts", from), folder, below, version, folder, below);
    CHECK_EQ(system(command), 0);
}

/* Returns true in the process of the test, after setting `folder`. Otherwise makes the folders,
 * runs that process, and returns false. */
static bool is_own_process(const char *test, const char *old_version)
{
    char program[PATH_MAX] = "", command[3 * PATH_MAX];
    const char *given = getenv("LT_TEST_FOLDER");
    if (given) {
        snprintf(folder, sizeof folder, "%s", given);
        return true;
    }
    begin();
    put_cudnn("old", old_version);
    put_cudnn("new", "9_19_0_56");
    CHECK(readlink("/proc/self/exe", program, sizeof program - 1) > 0);
    snprintf(command, sizeof command, "LT_TEST_FOLDER=%s LD_LIBRARY_PATH=%s/old:%s/new %s %s",
             folder, folder, folder, program, test);
    CHECK_EQ(system(command), 0);
    end();
    return false;
}

/* Checks which file has, or gets, the soname in this process. */
static void check_path(const char *soname, const char *below)
{
    struct link_map *map;
    char want[PATH_MAX];
    void *library = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
    CHECK(library && dlinfo(library, RTLD_DI_LINKMAP, &map) == 0);
    snprintf(want, sizeof want, "%s/%s/%s", folder, below, soname);
    CHECK_STR(map->l_name, want);
}

/* The loader would find the parts of the old cuDNN first. */
TEST(an_old_cudnn_in_the_path_of_the_loader)
{
    char text[1024], want[1024];
    lt_cudnn_table table;
    if (!is_own_process("an_old_cudnn_in_the_path_of_the_loader", "9_07_1_01"))
        return;
    CHECK_EQ(lt__cudnn_open_library(&table, text, sizeof text), 0);
    snprintf(want, sizeof want,
             "%s/new/libcudnn.so.9 (skipped: %s/old/libcudnn.so.9 is version 9.7.1)", folder,
             folder);
    CHECK_STR(text, want);
    check_path("libcudnn_graph.so.9", "new");
    lt__cudnn_load_parts(&table);
    check_path("libcudnn_heuristic.so.9", "new");
}

/* Checks that the backend uses the cuDNN of which the program has loaded a file. */
static void check_loaded(const char *test, const char *loaded)
{
    char text[1024], path[PATH_MAX];
    lt_cudnn_table table;
    if (!is_own_process(test, "9_18_0_00"))
        return;
    snprintf(path, sizeof path, "%s/old/%s", folder, loaded);
    CHECK(dlopen(path, RTLD_NOW | RTLD_LOCAL));
    snprintf(path, sizeof path, "%s/new", folder);
    setenv("LUATRAIN_CUDA_LIBS", path, 1);
    CHECK_EQ(lt__cudnn_open_library(&table, text, sizeof text), 0);
    snprintf(path, sizeof path,
             "%s/old/libcudnn.so.9 (skipped: %s/new/libcudnn.so.9 cannot be used beside another "
             "cuDNN, which is loaded already)",
             folder, folder);
    CHECK_STR(text, path);
}

/* The program, or another library in it, may use a cuDNN of its own. */
TEST(a_cudnn_that_is_loaded_already)
{
    check_loaded("a_cudnn_that_is_loaded_already", "libcudnn_graph.so.9");
}

/* It would load our other files by their sonames later. */
TEST(a_cudnn_that_is_not_used_yet)
{
    check_loaded("a_cudnn_that_is_not_used_yet", "libcudnn.so.9");
}
#else
TEST(libraries) { SKIP("cuDNN's headers are not installed"); }
#endif
