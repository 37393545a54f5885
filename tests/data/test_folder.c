/* test_folder.c - images in folders: which entries are listed, in which order, and which messages
 * the others cause.
 *
 * Where only names matter, the files are empty: reading one fails with a message that starts with
 * its path.
 */
#define _GNU_SOURCE /* nftw */
#include <ftw.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/fsuid.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "data/source.h"
#include "tests/lt_test.h"

static char root[] = "/tmp/luatrain-folder-XXXXXX";
static lt_ctx *ctx;
static lt_sample_buffers buffers; /* for all tests, like the image that was read last */
static lt_image image;
static int64_t label;

static int remove_one(const char *path, const struct stat *s, int type, struct FTW *place)
{
    (void)s, (void)type, (void)place;
    return remove(path);
}

static void remove_all(void) { nftw(root, remove_one, 8, FTW_DEPTH | FTW_PHYS); }

__attribute__((constructor)) static void make_root(void)
{
    ctx = mkdtemp(root) ? lt_ctx_new(NULL) : NULL;
}

__attribute__((destructor)) static void remove_root(void)
{
    remove_all();
    lt_ctx_free(ctx);
    lt__sample_buffers_free(&buffers);
}

static const char *in_root(const char *name)
{
    static char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", root, name);
    return path;
}

static void make_folder(const char *name) { CHECK_EQ(mkdir(in_root(name), 0700), 0); }

static void empty_root(void)
{
    remove_all();
    make_folder("");
}

/* Creates a copy of `from`, a file in tests/data, or an empty file if it is NULL. */
static void make_file(const char *name, const char *from)
{
    char source[64], bytes[4096];
    size_t n = 0;
    if (from) {
        snprintf(source, sizeof source, "tests/data/%s", from);
        FILE *in = fopen(source, "rb");
        CHECK(in != NULL);
        n = fread(bytes, 1, sizeof bytes, in);
        fclose(in);
        CHECK(n > 0 && n < sizeof bytes);
    }
    FILE *out = fopen(in_root(name), "wb");
    CHECK(out && fwrite(bytes, 1, n, out) == n && fclose(out) == 0);
}

static lt_source *open_root(void)
{
    lt_source *s = lt_source_folder(ctx, root, 8, 8, 3);
    if (!s)
        FAIL("%s", lt_errmsg());
    return s;
}

static void check_refused(int64_t size, const char *text)
{
    CHECK_NULL(lt_source_folder(ctx, root, size, size, 3), LT_EDATA, text);
    CHECK_MSG(root);
}

TEST(names_are_sorted_byte_by_byte)
{
    static const char *const files[] = {"B/b.jpg",        "B/Z.PNG",   "B/a10.jpeg", "B/a9.JPG",
                                        "B/\xc3\xa9.jpg", "a b/1.png", "A/x.y.Jpeg"};
    static const char *const order[] = {"A/x.y.Jpeg", "B/Z.PNG",        "B/a10.jpeg", "B/a9.JPG",
                                        "B/b.jpg",    "B/\xc3\xa9.jpg", "a b/1.png"};
    static const char *const classes[] = {"A", "B", "a b"};
    int64_t shape[3];
    empty_root();
    for (int i = 0; i < 3; i++)
        make_folder(classes[2 - i]);
    for (int i = 0; i < 7; i++)
        make_file(files[i], NULL);
    lt_source *s = open_root();
    CHECK_EQ(lt_source_count(s), 7);
    CHECK_EQ(lt_source_classes(s), 3);
    for (int i = 0; i < 3; i++)
        CHECK_STR(lt_source_class_name(s, i), classes[i]);
    CHECK(lt_source_class_name(s, 3) == NULL && lt_source_class_name(s, -1) == NULL);
    lt_source_shape(s, shape);
    CHECK(shape[0] == 8 && shape[1] == 8 && shape[2] == 3);
    for (int i = 0; i < 7; i++) {
        char text[PATH_MAX + 64];
        snprintf(text, sizeof text, "%s: cannot decode: the file is empty", in_root(order[i]));
        CHECK_FAILS(s->read(s, i, &buffers, &image, &label), LT_EDATA, "");
        CHECK_STR(lt_errmsg(), text);
    }
    lt_source_release(s);
}

TEST(other_files_and_folders_are_ignored)
{
    empty_root();
    make_folder("cat");
    make_folder("cat/deeper");
    make_folder("cat/folder.jpg");
    make_folder(".git");
    make_file("README.txt", NULL);
    make_file("top.jpg", NULL);
    make_file(".git/a.jpg", NULL);
    make_file("cat/.hidden.jpg", NULL);
    make_file("cat/notes.txt", NULL);
    make_file("cat/jpg", NULL);
    make_file("cat/a.jpg.gz", NULL);
    make_file("cat/deeper/b.jpg", NULL);
    make_file("cat/c.jpg", NULL);
    lt_source *s = open_root();
    CHECK_EQ(lt_source_count(s), 1);
    CHECK_EQ(lt_source_classes(s), 1);
    lt_source_release(s);
}

TEST(links_are_followed)
{
    empty_root();
    make_folder("cat");
    make_file("cat/a.jpg", NULL);
    CHECK_EQ(symlink("cat", in_root("dog")), 0);
    CHECK_EQ(symlink("a.jpg", in_root("cat/b.jpg")), 0);
    lt_source *s = open_root();
    CHECK_EQ(lt_source_count(s), 4);
    CHECK_STR(lt_source_class_name(s, 1), "dog");
    lt_source_release(s);
}

static char warning[1024]; /* the last one */
static int warnings;       /* number of warnings */

static void keep_warning(void *ud, lt_log_level level, const char *line)
{
    (void)ud;
    CHECK_EQ(level, LT_LOG_WARN);
    snprintf(warning, sizeof warning, "%s", line);
    warnings++;
}

static void make_socket(const char *name)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(strlen(in_root(name)) < sizeof address.sun_path);
    strcpy(address.sun_path, in_root(name));
    CHECK_EQ(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    close(fd);
}

#define ARE_IMAGES "; images are files CLASS/NAME that end in .jpg, .jpeg or .png"

/* Opening the FIFO would block forever. */
TEST(entries_that_are_not_files_are_skipped_and_counted)
{
    char text[256];
    empty_root();
    make_folder("cat");
    make_file("cat/a.jpg", NULL);
    CHECK_EQ(symlink("cat/a.jpg", in_root("a")), 0); /* not a class: not counted */
    CHECK_EQ(symlink("gone.jpg", in_root("cat/b.jpg")), 0);
    CHECK_EQ(symlink("../cat", in_root("cat/c.jpg")), 0);
    CHECK_EQ(symlink("/dev/null", in_root("cat/d.jpg")), 0);
    CHECK_EQ(symlink("f.jpg", in_root("cat/f.jpg")), 0);
    CHECK_EQ(symlink("a.jpg/x", in_root("cat/g.jpg")), 0);
    CHECK_EQ(mkfifo(in_root("cat/e.jpg"), 0600), 0);
    make_socket("cat/h.jpg");
    make_folder("cat/i.jpg");
    lt_set_log(ctx, keep_warning, NULL);
    lt_source *s = open_root();
    CHECK_EQ(lt_source_count(s), 1);
    CHECK_EQ(lt_source_classes(s), 1);
    CHECK_EQ(warnings, 1);
    snprintf(
        text, sizeof text,
        "%s: 8 entries are left out: 2 folders, 3 broken links, 1 FIFO, 1 socket, 1 device; the "
        "first is cat/b.jpg (No such file or directory)" ARE_IMAGES,
        root);
    CHECK_STR(warning, text);
    lt_source_release(s);
    CHECK_EQ(unlink(in_root("cat/e.jpg")), 0);
    CHECK_EQ(symlink("loop", in_root("loop")), 0); /* could have been a class: counted */
    lt_source_release(open_root());
    snprintf(
        text, sizeof text,
        "%s: 8 entries are left out: 2 folders, 4 broken links, 1 socket, 1 device; the first is "
        "loop (Too many levels of symbolic links)" ARE_IMAGES,
        root);
    CHECK_STR(warning, text);
    CHECK_EQ(warnings, 2);
    lt_set_log(ctx, NULL, NULL);
}

TEST(files_that_are_left_out_are_counted_by_kind)
{
    static const char *const files[] = {
        "top.png",   "README.txt", "cat/a.jpg",   "cat/3.WebP",     "dog/4.webp",  "dog/5.jfif",
        "dog/b.png", "cat/no_end", "cat/.hidden", "cat/nest/c.jpg", "cat/d.jpg.gz"};
    char text[512];
    empty_root();
    make_folder("cat");
    make_folder("dog");
    make_folder("cat/nest");
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        make_file(files[i], NULL);
    warnings = 0;
    lt_set_log(ctx, keep_warning, NULL);
    lt_source *s = open_root();
    CHECK_EQ(lt_source_count(s), 2);
    snprintf(text, sizeof text,
             "%s: 7 entries are left out: 1 folder, 1 .png file, 2 .webp files, 1 .jfif file, 2 "
             "other files; the first is top.png" ARE_IMAGES,
             root);
    CHECK_STR(warning, text);
    CHECK_EQ(warnings, 1);
    lt_source_release(s);
    lt_set_log(ctx, NULL, NULL);
}

TEST(the_warning_names_the_file_type)
{
    static const char *const kinds[] = {"folder", "FIFO", "socket", "device"};
    char text[256];
    lt_set_log(ctx, keep_warning, NULL);
    for (int i = 0; i < 4; i++) {
        empty_root();
        make_folder("cat");
        make_file("cat/a.jpg", NULL);
        if (i == 0)
            make_folder("cat/b.jpg");
        else if (i == 1)
            CHECK_EQ(mkfifo(in_root("cat/b.jpg"), 0600), 0);
        else if (i == 2)
            make_socket("cat/b.jpg");
        else
            CHECK_EQ(symlink("/dev/zero", in_root("cat/b.jpg")), 0);
        lt_source_release(open_root());
        snprintf(text, sizeof text,
                 "%s: 1 entry is left out: 1 %s; the first is cat/b.jpg" ARE_IMAGES, root,
                 kinds[i]);
        CHECK_STR(warning, text);
        CHECK_EQ(unlink(in_root("cat/a.jpg")), 0);
        snprintf(text, sizeof text,
                 "/cat has no images: no .jpg, .jpeg or .png files; 1 entry is left out: 1 %s; the "
                 "first is cat/b.jpg",
                 kinds[i]);
        check_refused(8, text);
    }
    lt_set_log(ctx, NULL, NULL);
}

/* Such files exist, so the user may expect them in the data set: they are not skipped. */
TEST(missing_permission_is_an_error)
{
    uid_t self = geteuid();
    empty_root();
    CHECK_EQ(chmod(root, 0755), 0);
    make_folder("cat");
    make_folder("dog");
    make_folder("secret");
    make_file("cat/a.jpg", "rgb.png");
    make_file("dog/a.jpg", "rgb.png");
    make_file("secret/a.jpg", "rgb.png");
    CHECK_EQ(chmod(in_root("cat"), 0755), 0);
    CHECK_EQ(chmod(in_root("dog"), 0755), 0);
    CHECK_EQ(chmod(in_root("cat/a.jpg"), 0), 0);
    CHECK_EQ(chmod(in_root("secret"), self == 0 ? 0700 : 0), 0);
    setfsuid(self == 0 ? 65534 : self); /* root may read everything */
    check_refused(8, "cannot open ");
    CHECK_MSG("/secret: Permission denied");
    setfsuid(self);
    CHECK_EQ(chmod(in_root("secret"), 0755), 0);
    setfsuid(self == 0 ? 65534 : self);
    lt_source *s = open_root();
    CHECK_EQ(lt_source_count(s), 3);
    CHECK_FAILS(s->read(s, 0, &buffers, &image, &label), LT_EDATA, "cannot open ");
    CHECK_MSG("/cat/a.jpg: Permission denied");
    setfsuid(self);
    lt_source_release(s);
}

TEST(messages_escape_control_characters_in_names)
{
    static const struct {
        const char *name, *shown;
    } cases[] = {{"x\033[31m\n\r\x7f.png", "x?[31m???.png"},
                 {"\xc3\xa9\xc2\x9b\xc2\xa0\xff.png", "\xc3\xa9?\xc2\xa0\xff.png"}};
    for (int i = 0; i < 2; i++) {
        char name[64], text[PATH_MAX + 64];
        empty_root();
        make_folder("cat");
        snprintf(name, sizeof name, "cat/%s", cases[i].name);
        make_file(name, NULL);
        lt_source *s = open_root();
        CHECK_FAILS(s->read(s, 0, &buffers, &image, &label), LT_EDATA, "");
        snprintf(text, sizeof text, "%s/cat/%s: cannot decode: the file is empty", root,
                 cases[i].shown);
        CHECK_STR(lt_errmsg(), text);
        lt_source_release(s);
    }
}

TEST(a_long_path_leaves_room_for_the_reason)
{
    char path[3600], text[256];
    size_t n = 0;
    while (n < 3500)
        n += (size_t)sprintf(path + n, "/%04zu", n);
    CHECK(lt_source_folder(ctx, path, 8, 8, 3) == NULL);
    snprintf(text, sizeof text, "cannot open ...%s: No such file or directory", path + n - 200);
    CHECK_STR(lt_errmsg(), text);
    memset(path, 'a', 300); /* longer names are truncated between characters */
    path[300] = '\0';
    CHECK_EQ(strlen(LT_SHORT_PATH(path)), 203);
    memcpy(path + 99, "\xc3\xa9", 2);
    CHECK_EQ(strlen(LT_SHORT_PATH(path)), 202);
    CHECK(strncmp(LT_SHORT_PATH(path), "...aaa", 6) == 0);
}

TEST(images_are_read_with_their_labels)
{
    empty_root();
    make_folder("x");
    make_folder("y");
    make_file("x/1.png", "rgb.png");
    make_file("y/1.jpg",
              "rgb.png"); /* the format is detected from the content, not from the name */
    lt_tensor *want = lt_image_read(ctx, "tests/data/rgb.png", 3);
    CHECK(want != NULL);
    for (int size = 0; size <= 8; size += 8) {
        lt_source *s = lt_source_folder(ctx, root, size, size, 3);
        CHECK(s != NULL);
        int64_t shape[3];
        lt_source_shape(s, shape);
        CHECK_EQ(shape[0], size ? size : 13);
        CHECK_EQ(shape[1], size ? size : 17);
        CHECK_EQ(s->dtype, LT_U8);
        for (int i = 0; i < 2; i++) {
            CHECK_OK(s->read(s, i, &buffers, &image, &label));
            CHECK_EQ(label, i);
            CHECK(image.h == 13 && image.w == 17 && image.c == 3);
            CHECK_EQ(memcmp(image.pixels, lt_data(want), 13 * 17 * 3), 0);
            CHECK_OK(s->read(s, i, NULL, NULL, &label));
            CHECK_EQ(label, i);
        }
        lt_source_release(s);
    }
    lt_release(want);
}

TEST(without_a_size_all_images_must_match_the_first)
{
    static const uint8_t one_pixel[] = {
        /* a 1x1 PNG */
        137, 80,  78,  71,  13, 10, 26, 10,  0,   0,  0,  13, 73,  72,  68,  82, 0,
        0,   0,   1,   0,   0,  0,  1,  8,   0,   0,  0,  0,  58,  126, 155, 85, 0,
        0,   0,   10,  73,  68, 65, 84, 120, 156, 99, 96, 0,  0,   0,   2,   0,  1,
        72,  175, 164, 113, 0,  0,  0,  0,   73,  69, 78, 68, 174, 66,  96,  130};
    char text[PATH_MAX + 128];
    empty_root();
    make_folder("x");
    make_file("x/1.png", "rgb.png");
    FILE *out = fopen(in_root("x/2.png"), "wb");
    CHECK(out && fwrite(one_pixel, 1, sizeof one_pixel, out) == sizeof one_pixel);
    CHECK_EQ(fclose(out), 0);
    lt_source *s = lt_source_folder(ctx, root, 0, 0, 1);
    CHECK(s != NULL);
    CHECK_OK(s->read(s, 0, &buffers, &image, &label));
    CHECK_FAILS(s->read(s, 1, &buffers, &image, &label), LT_EDATA, "");
    snprintf(text, sizeof text,
             "%s has 1x1 pixels (height x width), but the first image has 13x17; set a size to "
             "which all images are resized",
             in_root("x/2.png"));
    CHECK_STR(lt_errmsg(), text);
    lt_source_release(s);
    make_file("x/0.png", NULL);
    check_refused(0, "0.png: cannot decode: the file is empty");
}

TEST(no_class_and_no_image_are_errors)
{
    empty_root();
    check_refused(8, "has no classes: images must be in one folder per class, as in ");
    make_folder("a");
    make_folder("b");
    make_file("b/1.jpg", NULL);
    check_refused(8, "/a has no images: no .jpg, .jpeg or .png files");
    remove_all();
    check_refused(8, "cannot open ");
    CHECK(lt_source_folder(ctx, "tests/lt_test.h", 8, 8, 3) == NULL);
    CHECK_STR(lt_errmsg(), "cannot open tests/lt_test.h: Not a directory");
}

TEST(arguments_are_checked)
{
    static const int cases[][3] = {{0, 8, 3}, {8, 0, 3},     {-1, -1, 3},  {8, 8, 2},
                                   {8, 8, 0}, {16385, 8, 3}, {8, 16385, 3}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_NULL(lt_source_folder(ctx, root, cases[i][0], cases[i][1], cases[i][2]), LT_EINVAL,
                   "images: height x width must be at most 16384x16384, or 0x0 for the size");
    }
}
