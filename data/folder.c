/* folder.c - a source of image files: path/CLASS/NAME.jpg.
 *
 * The names are listed once and sorted. So the indices of images and classes depend only on the
 * names. The order in which the system lists a directory differs between machines, and so would the
 * shuffle. All names are stored back to back in one block, since there may be a million of them.
 */
#define _GNU_SOURCE /* qsort_r */
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "core/hash.h"
#include "data/source.h"

typedef struct entry { /* an image or a class */
    size_t name;       /* offset in names */
    int64_t class;
} entry;

typedef struct list {
    entry *items;
    int64_t n;
    size_t capacity;
} list;

typedef struct folder {
    lt_source base;
    bool sized; /* all images must have the size of the source */
    char *path;
    list classes, images;
    char *names;
    size_t bytes, capacity;
} folder;

/* ==== Names =================================================================================== */

static lt_status add(folder *f, list *to, const char *name, int64_t class)
{
    size_t length = strlen(name) + 1;
    LT_TRY(LT_RESERVE(to->items, to->n + 1, &to->capacity, "for names of images"));
    LT_TRY(LT_RESERVE(f->names, f->bytes + length, &f->capacity, "for names of images"));
    to->items[to->n++] = (entry){f->bytes, class};
    memcpy(f->names + f->bytes, name, length);
    f->bytes += length;
    return LT_OK;
}

static int compare(const void *a, const void *b, void *names)
{
    return strcmp((char *)names + ((const entry *)a)->name,
                  (char *)names + ((const entry *)b)->name);
}

static void sort(const folder *f, entry *first, int64_t n)
{
    qsort_r(first, (size_t)n, sizeof *first, compare, f->names);
}

static lt_status join(char path[PATH_MAX], const char *outer, const char *name)
{
    if (snprintf(path, PATH_MAX, "%s/%s", outer, name) >= PATH_MAX)
        return lt_fail(LT_EDATA, "the path %s/%s is too long", LT_SHORT_PATH(outer),
                       LT_SHORT_PATH(name));
    return LT_OK;
}

static lt_status image_path(const folder *f, const entry *image, char path[PATH_MAX])
{
    char class[PATH_MAX];
    LT_TRY(join(class, f->path, f->names + f->classes.items[image->class].name));
    return join(path, class, f->names + image->name);
}

/* ==== Listing ================================================================================= */

static bool is_image(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot && (strcasecmp(dot, ".jpg") == 0 || strcasecmp(dot, ".jpeg") == 0 ||
                   strcasecmp(dot, ".png") == 0);
}

/* Kinds of directory entries that are left out. The files are the usual formats of images. */
enum { FOLDER, LINK, FIFO, SOCKET, DEVICE, FILE_KINDS };
static const char *const kind_names[] = {
    "folder",     "broken link", "FIFO",       "socket",    "device",    ".jpg file",
    ".jpeg file", ".png file",   ".webp file", ".bmp file", ".gif file", ".tif file",
    ".tiff file", ".jfif file",  ".jpe file",  ".jp2 file", ".jxl file", ".avif file",
    ".heic file", ".heif file",  ".ppm file",  ".pgm file", ".pbm file", ".pnm file",
    ".tga file",  ".svg file",   ".npy file",  "other file"};
enum { KINDS = sizeof kind_names / sizeof *kind_names };

typedef struct left_out {
    int64_t n, of[KINDS], class; /* class: of the first one; -1 if it is not in a class */
    char first[NAME_MAX + 1];    /* first in byte order */
    int kind;                    /* its kind */
    int error;                   /* why the link cannot be followed */
} left_out;

/* Sets *kind to the file type of an entry, or of its target if it is a link: S_IFREG, S_IFDIR and
 * so on. 0 for a broken link, with the reason in *error. A link that cannot be followed for another
 * reason fails with LT_EDATA if the entry is wanted; otherwise it counts as broken. */
static lt_status find_kind(DIR *dir, const char *path, const struct dirent *e, bool wanted,
                           mode_t *kind, int *error)
{
    struct stat s;
    *kind = DTTOIF(e->d_type);
    if (e->d_type != DT_LNK && e->d_type != DT_UNKNOWN)
        return LT_OK;
    *error = fstatat(dirfd(dir), e->d_name, &s, 0) == 0 ? 0 : errno;
    if (*error && wanted && *error != ENOENT && *error != ELOOP && *error != ENOTDIR)
        return lt_fail(LT_EDATA, "cannot open %s/%s: %s", LT_SHORT_PATH(path),
                       LT_SHORT_PATH(e->d_name), strerror(*error));
    *kind = *error ? 0 : s.st_mode & S_IFMT;
    return LT_OK;
}

static int kind_of(const char *name, mode_t type)
{
    const char *end = strrchr(name, '.');
    if (type != S_IFREG)
        return type == S_IFDIR    ? FOLDER
               : type == 0        ? LINK
               : type == S_IFIFO  ? FIFO
               : type == S_IFSOCK ? SOCKET
                                  : DEVICE;
    for (int i = FILE_KINDS; end && i < KINDS - 1; i++) {
        size_t n = strcspn(kind_names[i], " ");
        if (strncasecmp(end, kind_names[i], n) == 0 && end[n] == '\0')
            return i;
    }
    return KINDS - 1;
}

static void leave_out(left_out *l, int64_t class, const char *name, mode_t type, int error)
{
    int kind = kind_of(name, type);
    l->of[kind]++;
    if (l->n++ > 0 && strcmp(name, l->first) > 0)
        return;
    l->class = class;
    snprintf(l->first, sizeof l->first, "%s", name);
    l->kind = kind;
    l->error = error;
}

/* Writes a sentence about the entries that are left out. There is at least one. */
static const char *describe(const folder *f, const left_out *l, char text[1024])
{
    const char *class = l->class < 0 ? "" : f->names + f->classes.items[l->class].name;
    char first[2 * NAME_MAX + 2];
    int used = snprintf(text, 1024, "%lld entr%s left out:", (long long)l->n,
                        l->n == 1 ? "y is" : "ies are");
    const char *comma = "";
    for (int i = 0; i < KINDS; i++)
        if (l->of[i] > 0) {
            used += snprintf(text + used, (size_t)(1024 - used), "%s %lld %s%s", comma,
                             (long long)l->of[i], kind_names[i], l->of[i] == 1 ? "" : "s");
            comma = ",";
        }
    snprintf(first, sizeof first, "%s%s%s", class, *class ? "/" : "", l->first);
    snprintf(text + used, (size_t)(1024 - used), "; the first is %s%s%s%s", LT_SHORT_PATH(first),
             l->kind == LINK ? " (" : "", l->kind == LINK ? strerror(l->error) : "",
             l->kind == LINK ? ")" : "");
    return text;
}

/* If class < 0, lists the folders in path as classes; images beside them are left out. Otherwise
 * lists the images in path, which belong to this class; everything else is left out. */
static lt_status list_folder(folder *f, const char *path, int64_t class, left_out *l)
{
    int error = 0;
    mode_t kind, wanted = class < 0 ? S_IFDIR : S_IFREG;
    struct dirent *e;
    lt_status status = LT_OK;
    DIR *dir = opendir(path);
    if (!dir)
        return lt_fail(LT_EDATA, "cannot open %s: %s", LT_SHORT_PATH(path), strerror(errno));
    while (status == LT_OK && (errno = 0, e = readdir(dir))) {
        if (e->d_name[0] == '.')
            continue;
        bool image = is_image(e->d_name);
        status = find_kind(dir, path, e, class < 0 || image, &kind, &error);
        if (status == LT_OK && kind == wanted && (class < 0 || image))
            status = add(f, class < 0 ? &f->classes : &f->images, e->d_name, class);
        else if (status == LT_OK && (class >= 0 || kind == 0 || (kind == S_IFREG && image)))
            leave_out(l, class, e->d_name, kind, error);
    }
    if (status == LT_OK && errno)
        status = lt_fail(LT_EDATA, "cannot read %s: %s", LT_SHORT_PATH(path), strerror(errno));
    closedir(dir);
    return status;
}

static lt_status list_class(folder *f, int64_t class, left_out *all)
{
    char path[PATH_MAX], text[1024];
    int64_t first = f->images.n;
    left_out here = {0};
    LT_TRY(join(path, f->path, f->names + f->classes.items[class].name));
    LT_TRY(list_folder(f, path, class, &here));
    if (f->images.n == first)
        return lt_fail(LT_EDATA, "%s has no images: no .jpg, .jpeg or .png files%s%s",
                       LT_SHORT_PATH(path), here.n > 0 ? "; " : "",
                       here.n > 0 ? describe(f, &here, text) : "");
    sort(f, f->images.items + first, f->images.n - first);
    if (all->n == 0) {
        *all = here;
        return LT_OK;
    }
    all->n += here.n;
    for (int i = 0; i < KINDS; i++)
        all->of[i] += here.of[i];
    return LT_OK;
}

static lt_status list_all(folder *f)
{
    char text[1024];
    left_out l = {0};
    LT_TRY(list_folder(f, f->path, -1, &l));
    if (f->classes.n == 0)
        return lt_fail(LT_EDATA,
                       "%s has no classes: images must be in one folder per class, as in "
                       "%s/CLASS/NAME.jpg",
                       LT_SHORT_PATH(f->path), LT_SHORT_PATH(f->path));
    sort(f, f->classes.items, f->classes.n);
    for (int64_t i = 0; i < f->classes.n; i++)
        LT_TRY(list_class(f, i, &l));
    if (l.n > 0)
        lt_log(f->base.ctx, LT_LOG_WARN,
               "%s: %s; images are files CLASS/NAME that end in .jpg, .jpeg or .png",
               LT_SHORT_PATH(f->path), describe(f, &l, text));
    f->base.count = f->images.n;
    f->base.classes = f->classes.n;
    return LT_OK;
}

/* ==== The source ============================================================================== */

static lt_status read_image(const lt_source *source, int64_t i, lt_sample_buffers *buffers,
                            lt_image *image, int64_t *label)
{
    const folder *f = (const folder *)source;
    const entry *file = &f->images.items[i];
    char path[PATH_MAX];
    size_t n;
    *label = file->class;
    if (!image)
        return LT_OK;
    LT_TRY(image_path(f, file, path));
    LT_TRY(lt__read_file(path, INT_MAX, &buffers->file, &n));
    LT_TRY(lt__image_decode(path, buffers->file.data, n, (int)source->c, buffers, image));
    if (f->sized && (image->h != source->h || image->w != source->w))
        return lt_fail(LT_EDATA,
                       "%s has %lldx%lld pixels (height x width), but the first image has "
                       "%lldx%lld; set a size to which all images are resized",
                       LT_SHORT_PATH(path), (long long)image->h, (long long)image->w,
                       (long long)source->h, (long long)source->w);
    return LT_OK;
}

static lt_status take_size_of_first(folder *f)
{
    lt_sample_buffers buffers = {0};
    lt_image image;
    int64_t label;
    lt_status status = read_image(&f->base, 0, &buffers, &image, &label);
    if (status == LT_OK) {
        f->base.h = image.h;
        f->base.w = image.w;
        f->sized = true;
    }
    lt__sample_buffers_free(&buffers);
    return status;
}

static const char *class_name(const lt_source *source, int64_t i)
{
    const folder *f = (const folder *)source;
    return i >= 0 && i < f->classes.n ? f->names + f->classes.items[i].name : NULL;
}

/* Adds the names of the classes and images in order. They determine the labels. */
static uint32_t digest_labels(const lt_source *source, uint32_t digest)
{
    const folder *f = (const folder *)source;
    for (int64_t i = 0; i < f->images.n; i++) {
        const char *name = f->names + f->images.items[i].name;
        const char *class = class_name(source, f->images.items[i].class);
        digest = lt__fnv32(digest, class, strlen(class) + 1);
        digest = lt__fnv32(digest, name, strlen(name) + 1);
    }
    return digest;
}

static void free_folder(lt_source *source)
{
    folder *f = (folder *)source;
    free(f->images.items);
    free(f->classes.items);
    free(f->names);
    free(f->path);
    lt__source_free(source);
}

lt_source *lt_source_folder(lt_ctx *ctx, const char *path, int64_t height, int64_t width,
                            int channels)
{
    LT_NEED_CTX(ctx, NULL);
    if (height < 0 || width < 0 || height > LT_MAX_SIDE || width > LT_MAX_SIDE ||
        (height == 0) != (width == 0) || (channels != 1 && channels != 3)) {
        lt_fail(LT_EINVAL,
                "images: height x width must be at most %dx%d, or 0x0 for the size of the files, "
                "and channels 1 or 3, but they are %lldx%lld and %d",
                LT_MAX_SIDE, LT_MAX_SIDE, (long long)height, (long long)width, channels);
        return NULL;
    }
    folder *f = lt__source_new(sizeof *f, &(lt_source){.ctx = ctx,
                                                       .h = height,
                                                       .w = width,
                                                       .c = channels,
                                                       .dtype = LT_U8,
                                                       .in_files = true,
                                                       .read = read_image,
                                                       .class_name = class_name,
                                                       .digest_labels = digest_labels,
                                                       .free = free_folder});
    if (!f)
        return NULL;
    if ((f->path = lt__calloc(strlen(path) + 1, 1, "for names of images")))
        strcpy(f->path, path);
    if (!f->path || list_all(f) != LT_OK || (height == 0 && take_size_of_first(f) != LT_OK)) {
        lt_source_release(&f->base);
        return NULL;
    }
    return &f->base;
}
