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

static char folder[64], text[1536]; /* text: what the last search has written */

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

#define TEST_IN_FOLDER(title) TEST_BETWEEN(title, begin(), end())

/* The text with each @ replaced by the folder. Borrowed until the next call but two. */
static const char *in(const char *with)
{
    static char buffers[3][PATH_MAX];
    static int next;
    char *start = buffers[next++ % 3], *to = start;
    for (; *with && to < start + PATH_MAX - sizeof folder; with++)
        to += *with == '@' ? sprintf(to, "%s", folder) : sprintf(to, "%c", *with);
    return start;
}

/* Makes a folder, such as "@/own/lib", and its parents. */
static void make_folder(const char *name)
{
    char path[PATH_MAX];
    strcpy(path, in(name));
    for (char *slash = path + strlen(folder) + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = 0;
        mkdir(path, 0700);
    }
    if (mkdir(path, 0700) != 0)
        FAIL("%s: cannot make the folder", path);
}

static void link_to(const char *target, const char *name)
{
    if (symlink(target, name) != 0)
        FAIL("%s: cannot make the link", name);
}

static void write_file(const char *name, const char *content)
{
    FILE *file = fopen(in(name), "w");
    CHECK(file != NULL);
    fputs(content, file);
    fclose(file);
}

/* Runs a command of the shell. $PATH is not set. */
static void run(const char *command)
{
    if (system(command) != 0)
        FAIL("%s", command);
}

/* Makes a folder with the stand-in for cuDNN, under a name that no other library has. */
static void put_library(const char *name)
{
    char from[PATH_MAX], file[128];
    make_folder(name);
    snprintf(file, sizeof file, "%s/libltnone.so.3", name);
    link_to(beside("libs/libcudnn.so.9", from), in(file));
}

static void search_in(const char *folders) { setenv("LUATRAIN_CUDA_LIBS", in(folders), 1); }

static bool is_too_old(const char *file, const void *table, char *why, size_t bytes)
{
    void (*const *functions)(void) = table;
    CHECK(file[0] == '/' && functions[0] && functions[1]);
    snprintf(why, bytes, "is version 3.0");
    return false;
}

/* will_do: as in lt_library. */
static bool search(const char *const *which, __typeof__(&is_too_old) will_do)
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

static void check_found(void)
{
    if (!search(names, NULL))
        FAIL("%s", text);
}

static void check_missing(const char *const *which, const char *message)
{
    CHECK(!search(which, NULL));
    CHECK_STR(text, in(message));
}

/* ==== Found =================================================================================== */

TEST(found_by_a_variable)
{
    static const struct {
        const char *variable, *value, *folder; /* the library is in this folder */
    } cases[] = {
        {"LUATRAIN_CUDA_LIBS", "@/own", "@/own"},
        {"CUDA_HOME", "@", "@/lib64"},
        {"CUDA_HOME", "@", "@/lib"},
        {"VIRTUAL_ENV", "@", "@/lib/python3.99/site-packages/nvidia/cudnn/lib"},
        {"HOME", "@", "@/.local/lib/python3.8/site-packages/nvidia/cudnn/lib"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char file[128];
        begin();
        put_library(cases[i].folder);
        CHECK(!search(names, NULL));
        setenv(cases[i].variable, in(cases[i].value), 1);
        check_found();
        snprintf(file, sizeof file, "%s/libltnone.so.3", cases[i].folder);
        CHECK_STR(text, in(file));
        end();
    }
}

TEST_IN_FOLDER(found_in_the_last_of_several_folders)
{
    put_library("@/last");
    search_in("/nowhere::@/first:@/last");
    check_found();
}

/* More files than the search remembers are of no use. */
TEST_IN_FOLDER(found_in_the_last_of_many_folders)
{
    char list[1024] = "";
    for (int i = 0; i < 40; i++) {
        char name[32];
        snprintf(name, sizeof name, "@/%d", i);
        make_folder(name);
        strcat(strcat(list, name), ":");
        strcat(name, "/libltnone.so.3");
        write_file(name, "");
    }
    put_library("@/last");
    search_in(strcat(list, "@/last"));
    check_found();
}

/* Checks that the library is found in the packages of the first python3 in $PATH, which may be a
 * link into another folder. */
static void check_found_by_python(const char *path)
{
    put_library("@/real/lib/python3.11/dist-packages/nvidia/none/lib");
    make_folder("@/real/bin");
    write_file("@/real/bin/python3", "");
    CHECK_EQ(chmod(in("@/real/bin/python3"), 0700), 0);
    make_folder("@/elsewhere/bin");
    link_to(in("@/real/bin/python3"), in("@/elsewhere/bin/python3"));
    setenv("PATH", in(path), 1);
    check_found();
    setenv("PATH", "/nowhere", 1);
    CHECK(!search(names, NULL));
}

TEST_IN_FOLDER(found_in_the_packages_of_python3) { check_found_by_python("@/real/bin"); }
TEST_IN_FOLDER(found_in_the_packages_of_a_linked_python3)
{
    check_found_by_python("@/elsewhere/bin");
}

/* ==== Not found =============================================================================== */

TEST_IN_FOLDER(a_missing_library)
{
    check_missing(names,
                  "libltnone.so.3 was not found in the loader's path, $LUATRAIN_CUDA_LIBS, "
                  "$CUDA_HOME, /usr/local/cuda or Python's nvidia packages; install Nothing 3.1 or "
                  "later");
}

TEST_IN_FOLDER(a_library_without_a_function)
{
    put_library("@/own");
    search_in("@/own");
    check_missing(no_names, "@/own/libltnone.so.3 has no cudnnFly; install Nothing 3.1 or later");
}

TEST_IN_FOLDER(a_file_that_is_not_a_library)
{
    make_folder("@/own");
    write_file("@/own/libltnone.so.3", "no library");
    search_in("@/own");
    CHECK(!search(names, NULL));
    if (strstr(text, in("@/own/libltnone.so.3 cannot be loaded: ")) != text)
        FAIL("%s", text);
}

/* Two folders have the same file, which is tried once. */
TEST_IN_FOLDER(a_library_that_is_too_old)
{
    put_library("@/own");
    put_library("@/same");
    search_in("@/own:@/same");
    CHECK(!search(names, is_too_old));
    CHECK_STR(text, in("@/own/libltnone.so.3 is version 3.0; install Nothing 3.1 or later"));
}

/* ==== Skipped ================================================================================= */

/* Copies a stand-in to a new folder. Returns the state of the copy, which stays loaded, so that the
 * backend finds it as the test has set it. */
static stand_in *copy_stand_in(const char *name, const char *soname)
{
    char from[PATH_MAX], command[3 * PATH_MAX], file[64];
    make_folder(name);
    snprintf(file, sizeof file, "%s/%s", name, soname);
    snprintf(command, sizeof command, "/bin/cp %s/%s %s", beside("libs", from), soname, in(file));
    run(command);
    void *library = dlopen(in(file), RTLD_NOW | RTLD_LOCAL);
    stand_in *state = library ? dlsym(library, "stand_in_state") : NULL;
    if (!state)
        FAIL("%s", dlerror());
    return state;
}

/* Copies the stand-in for cuDNN to "@/old" and "@/new", which the backend searches. Returns the
 * state of the old one. */
static stand_in *two_cudnns(void)
{
    stand_in *old = copy_stand_in("@/old", "libcudnn.so.9");
    copy_stand_in("@/new", "libcudnn.so.9");
    search_in("@/old:@/new");
    return old;
}

/* Writes a file that contains this text to a folder of cuDNN. */
static void write_part(const char *name, const char *content)
{
    FILE *file = fopen(in(name), "w");
    fprintf(file, "any bytes%c%s, others", 0, content);
    fclose(file);
}

static lt_cudnn_table open_cudnn(void)
{
    lt_cudnn_table table;
    if (lt__cudnn_open_library(&table, text, sizeof text) != 0)
        FAIL("%s", text);
    return table;
}

/* Checks that cuDNN is found in "@/new", and why the one in "@/old" is skipped. */
static void check_new_cudnn(const char *why)
{
    char want[256];
    lt_cudnn_table table = open_cudnn();
    snprintf(want, sizeof want, "@/new/libcudnn.so.9 (skipped: @/old/libcudnn.so.9 %s)", why);
    CHECK_STR(text, in(want));
    CHECK_EQ(table.cudnnGetVersion(), CUDNN_VERSION);
}

TEST_IN_FOLDER(a_cudnn_that_is_too_old)
{
    stand_in *old = two_cudnns();
    old->version = 90701;
    check_new_cudnn("is version 9.7.1");
    old->version = LT_CUDNN_OLDEST;
    CHECK_EQ(open_cudnn().cudnnGetVersion(), LT_CUDNN_OLDEST);
}

TEST_IN_FOLDER(a_cudnn_for_another_cuda)
{
    char why[32];
    two_cudnns()->cuda = CUBLAS_VER_MAJOR - 1;
    snprintf(why, sizeof why, "is for CUDA %d", CUBLAS_VER_MAJOR - 1);
    check_new_cudnn(why);
}

/* The files of a cuDNN tell its version. Calling one of its functions would load more of it. */
TEST_IN_FOLDER(a_cudnn_whose_files_tell_that_it_is_too_old)
{
    char blas[64], why[32];
    stand_in *old = two_cudnns();
    write_part("@/old/libcudnn_graph.so.9", "cudnn_version_9_1_0_70_e0");
    check_new_cudnn("is version 9.1.0");
    write_part("@/old/libcudnn_graph.so.9", "cudnn_version_9_19_0_56");
    snprintf(blas, sizeof blas, "libcublasLt.so.%d", CUBLAS_VER_MAJOR - 1);
    write_part("@/old/libcudnn_engines_precompiled.so.9", blas);
    write_part("@/new/libcudnn_engines_precompiled.so.9", "libcublasLt.so.%d"); /* not known */
    snprintf(why, sizeof why, "is for CUDA %d", CUBLAS_VER_MAJOR - 1);
    check_new_cudnn(why);
    CHECK_EQ(old->versions, 0);
}

/* The functions of such a cuDNN end the process. */
TEST_IN_FOLDER(a_cudnn_without_its_other_files)
{
    stand_in *old = two_cudnns();
    FILE *file = fopen(in("@/old/libcudnn.so.9"), "a");
    fprintf(file, "libcudnn_graph.so.9");
    fclose(file);
    check_new_cudnn("lacks libcudnn_graph.so.9");
    CHECK_EQ(old->versions, 0);
}

/* A folder with a link to one of its files. */
TEST_IN_FOLDER(a_link_to_a_cudnn)
{
    stand_in *old = copy_stand_in("@/real", "libcudnn.so.9");
    copy_stand_in("@/new", "libcudnn.so.9");
    make_folder("@/old");
    link_to(in("@/real/libcudnn.so.9"), in("@/old/libcudnn.so.9"));
    write_part("@/real/libcudnn_graph.so.9", "cudnn_version_9_1_0_70_e0");
    search_in("@/old:@/new");
    check_new_cudnn("is version 9.1.0");
    CHECK_EQ(old->versions, 0);
}

TEST_IN_FOLDER(a_cublaslt_that_is_too_old)
{
    lt_cublaslt_table table;
    copy_stand_in("@/old", LT_CUBLASLT_SONAME)->version = 120900;
    copy_stand_in("@/new", LT_CUBLASLT_SONAME);
    search_in("@/old:@/new");
    CHECK_EQ(lt__cublaslt_open(&table, text, sizeof text), 0);
    CHECK_STR(text, in("@/new/" LT_CUBLASLT_SONAME " (skipped: @/old/" LT_CUBLASLT_SONAME
                       " is version 12.9.0)"));
}

/* ==== The search path of the loader ===========================================================
 *
 * Each of these tests runs in a process of its own, with an old and a new cuDNN in the folders of
 * LD_LIBRARY_PATH.
 */

/* Makes a folder with a cuDNN of two files. version: of the same length as "9_19_0_56". */
static void put_cudnn(const char *name, const char *version)
{
    char from[PATH_MAX], command[3 * PATH_MAX];
    copy_stand_in(name, "libcudnn.so.9");
    snprintf(command, sizeof command,
             "/bin/cp %s/* %s && /bin/sed -i s/cudnn_version_9_19_0_56/cudnn_version_%s/ %s/*",
             beside("parts", from), in(name), version, in(name));
    run(command);
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
    put_cudnn("@/old", old_version);
    put_cudnn("@/new", "9_19_0_56");
    CHECK(readlink("/proc/self/exe", program, sizeof program - 1) > 0);
    snprintf(command, sizeof command, "%s %s %s",
             in("LT_TEST_FOLDER=@ LD_LIBRARY_PATH=@/old:@/new"), program, test);
    run(command);
    end();
    return false;
}

/* Checks which file has, or gets, the soname in this process. */
static void check_path(const char *soname)
{
    struct link_map *map;
    char want[64];
    void *library = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
    CHECK(library && dlinfo(library, RTLD_DI_LINKMAP, &map) == 0);
    snprintf(want, sizeof want, "@/new/%s", soname);
    CHECK_STR(map->l_name, in(want));
}

/* The loader would find the parts of the old cuDNN first. */
TEST(an_old_cudnn_in_the_path_of_the_loader)
{
    if (!is_own_process("an_old_cudnn_in_the_path_of_the_loader", "9_07_1_01"))
        return;
    lt_cudnn_table table = open_cudnn();
    CHECK_STR(text, in("@/new/libcudnn.so.9 (skipped: @/old/libcudnn.so.9 is version 9.7.1)"));
    check_path("libcudnn_graph.so.9");
    lt__cudnn_load_parts(&table);
    check_path("libcudnn_heuristic.so.9");
}

/* Checks that the backend uses the cuDNN of which the program has loaded a file. */
static void check_loaded(const char *test, const char *loaded)
{
    if (!is_own_process(test, "9_18_0_00"))
        return;
    CHECK(dlopen(in(loaded), RTLD_NOW | RTLD_LOCAL));
    search_in("@/new");
    open_cudnn();
    CHECK_STR(text, in("@/old/libcudnn.so.9 (skipped: @/new/libcudnn.so.9 cannot be used beside "
                       "another cuDNN, which is loaded already)"));
}

/* The program, or another library in it, may use a cuDNN of its own. */
TEST(a_cudnn_that_is_loaded_already)
{
    check_loaded("a_cudnn_that_is_loaded_already", "@/old/libcudnn_graph.so.9");
}

/* It would load our other files by their sonames later. */
TEST(a_cudnn_that_is_not_used_yet)
{
    check_loaded("a_cudnn_that_is_not_used_yet", "@/old/libcudnn.so.9");
}
#else
TEST(libraries) { SKIP("cuDNN's headers are not installed"); }
#endif
