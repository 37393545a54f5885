/* test_file_faults.c - tensor files when system calls fail: a failed save leaves the old file.
 *
 * The system functions that the library calls for files are defined here, in place of those of the
 * C library, so that each can be made to fail.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "tests/core/files.h"

/* ==== System calls that can fail ============================================================== */

typedef enum call { NO_CALL, PREAD, WRITE, FSYNC, CLOSE, RENAME } call;

static struct {
    call call;      /* which call fails ... */
    int n, error;   /* ... the n-th time, with which errno; 0: pread returns end of file */
    bool interrupt; /* every other call before CLOSE fails with EINTR */
    size_t most;    /* maximum bytes per pread or write; 0: no limit */
    int seen, calls;
} fault;

static bool fails(call made)
{
    bool now = fault.call == made && ++fault.seen == fault.n;
    if (now)
        errno = fault.error;
    if (!now && fault.interrupt && made <= FSYNC && ++fault.calls % 2) {
        errno = EINTR;
        return true;
    }
    return now;
}

ssize_t pread(int fd, void *to, size_t bytes, off_t offset)
{
    if (fails(PREAD))
        return errno ? -1 : 0;
    if (fault.most && bytes > fault.most)
        bytes = fault.most;
    return syscall(SYS_pread64, fd, to, bytes, offset);
}

ssize_t write(int fd, const void *from, size_t bytes)
{
    if (fails(WRITE))
        return -1;
    if (fault.most && bytes > fault.most)
        bytes = fault.most;
    return syscall(SYS_write, fd, from, bytes);
}

int fsync(int fd) { return fails(FSYNC) ? -1 : (int)syscall(SYS_fsync, fd); }

int close(int fd)
{
    int result = (int)syscall(SYS_close, fd);
    return fails(CLOSE) ? -1 : result;
}

int rename(const char *from, const char *to)
{
    return fails(RENAME) ? -1 : (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

/* The number of entries in the folder. */
static int count_files(void)
{
    int n = 0;
    struct dirent *entry;
    DIR *dir = opendir(folder);
    while ((entry = readdir(dir)))
        n += entry->d_name[0] != '.';
    closedir(dir);
    return n;
}

static lt_ctx *calm_context(void)
{
    memset(&fault, 0, sizeof fault);
    return context();
}

#define TEST_FAULTS(title) TEST_WITH(title, lt_ctx *ctx, calm_context(), CLOSE_CTX)

/* ==== Failing calls =========================================================================== */

TEST_FAULTS(paths_that_are_not_files_are_refused)
{
    refuse(ctx, in_folder("missing"), LT_EFILE, "missing: cannot open: No such file or directory");
    refuse(ctx, folder, LT_EFILE, "this is a folder");
    refuse(ctx, "/dev/full", LT_EFILE, "/dev/full: this is not a regular file");
    CHECK_EQ(mkfifo(in_folder("fifo.safetensors"), 0600), 0);
    refuse(ctx, in_folder("fifo.safetensors"), LT_EFILE, "this is not a regular file");
}

/* Opens a file after setting its time to long ago, so that any later write changes the time. */
static lt_file *open_old(lt_ctx *ctx, const char *path)
{
    const struct timespec times[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    CHECK_EQ(utimensat(AT_FDCWD, path, times, 0), 0);
    lt_file *f = lt_file_open(ctx, path);
    CHECK(f != NULL);
    return f;
}

/* The digest was correct when it was verified, but the data changed before they were read. */
TEST_FAULTS(a_file_modified_while_it_is_read)
{
    char bytes[512];
    size_t n = small_file(ctx, bytes, sizeof bytes);
    const char *path = in_folder("small.safetensors");
    lt_file *f = open_old(ctx, path);
    CHECK_OK(lt_file_verify(f));
    lt_tensor *x = lt_file_read(f, 0);
    CHECK(x != NULL);
    bytes[n - 1] ^= 1;
    int fd = open(path, O_WRONLY);
    CHECK_EQ(pwrite(fd, bytes + n - 1, 1, (off_t)n - 1), 1);
    close(fd);
    CHECK_NULL(lt_file_read(f, 2), LT_EFILE,
               "small.safetensors: the file was changed while it was being read");
    CHECK_FAILS(lt_file_read_into(f, 0, x), LT_EFILE,
                "the file was changed while it was being read");
    lt_release(x);
    lt_file_close(f);
}

/* The open file keeps its content. */
TEST_FAULTS(a_file_replaced_or_removed_while_it_is_read)
{
    char bytes[512];
    (void)small_file(ctx, bytes, sizeof bytes);
    lt_file *f = open_old(ctx, in_folder("small.safetensors"));
    (void)small_file(ctx, bytes, sizeof bytes);
    remove(in_folder("small.safetensors"));
    CHECK_OK(lt_file_verify(f));
    lt_tensor *x = lt_file_read(f, 2);
    CHECK(x != NULL);
    lt_release(x);
    lt_file_close(f);
}

TEST_FAULTS(a_file_that_shrinks_while_it_is_read)
{
    char bytes[512];
    size_t n = small_file(ctx, bytes, sizeof bytes);
    const char *path = in_folder("small.safetensors");
    lt_file *f = open_old(ctx, path);
    CHECK_EQ(truncate(path, (off_t)n - 1), 0);
    CHECK_NULL(lt_file_read(f, 0), LT_EFILE,
               "small.safetensors: the file was changed while it was being read");
    CHECK_NULL(lt_file_read(f, 2), LT_EFILE,
               "small.safetensors: the file became shorter while it was being read");
    CHECK_FAILS(lt_file_verify(f), LT_EFILE,
                "small.safetensors: the file became shorter while it was being read");
    fault.call = PREAD;
    fault.n = 1;
    fault.error = EIO;
    CHECK_FAILS(lt_file_verify(f), LT_EFILE, "cannot read: Input/output error");
    lt_file_close(f);
    (void)small_file(ctx, bytes, sizeof bytes);
    for (int k = 1; k <= 2; k++) {
        fault.call = PREAD;
        fault.n = k;
        fault.error = fault.seen = 0;
        refuse(ctx, path, LT_EFILE, "the file became shorter while it was being read");
        fault.error = EIO;
        fault.seen = 0;
        refuse(ctx, path, LT_EFILE, "cannot read: Input/output error");
    }
}

TEST_FAULTS(a_failed_save_leaves_the_old_file)
{
    static const struct {
        call call;
        int n, error;
        const char *text;
    } known[] = {
        {WRITE, 1, ENOSPC, "cannot write: No space left on device"},
        {WRITE, 2, ENOSPC, "cannot write: No space left on device"},
        {WRITE, 3, EDQUOT, "cannot write: Disk quota exceeded"},
        {WRITE, 5, EIO, "cannot write: Input/output error"}, /* of the digest */
        {FSYNC, 1, EIO, "cannot write to the disk: Input/output error"},
        {CLOSE, 1, EIO, "cannot close: Input/output error"},
        {RENAME, 1, EACCES, "cannot replace it: Permission denied"},
    };
    static char before[40000], after[40000];
    lt_tensor *old = counting(ctx, LT_F32, 1, (int64_t[]){7}),
              *new = counting(ctx, LT_F64, 1, (int64_t[]){4000});
    const char *path = in_folder("kept.safetensors");
    CHECK_OK(save_small(path, old));
    size_t n = slurp(path, before, sizeof before);
    int files = count_files();
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        memset(&fault, 0, sizeof fault);
        fault.call = known[i].call;
        fault.n = known[i].n;
        fault.error = known[i].error;
        CHECK_FAILS(save_small(path, new), LT_EFILE, known[i].text);
        CHECK_MSG("kept.safetensors: ");
        CHECK_EQ(fault.seen >= fault.n, 1);
        CHECK_EQ(count_files(), files);
        CHECK_EQ(slurp(path, after, sizeof after), n);
        CHECK_EQ(memcmp(before, after, n), 0);
    }
    memset(&fault, 0, sizeof fault);
    fault.call = FSYNC; /* of the folder: the file is already new, but may not survive a crash */
    fault.n = 2;
    fault.error = EIO;
    CHECK_FAILS(save_small(path, new), LT_EFILE,
                "cannot sync its folder to the disk: Input/output error");
    CHECK_EQ(count_files(), files);
    fault.error = EINVAL; /* this file system cannot sync folders */
    fault.seen = 0;
    CHECK_OK(save_small(path, new));
    RELEASE(old, new);
}

TEST(a_file_is_replaced_completely_or_not_at_all)
{
    static const struct {
        call call;
        int error;
        const char *text;
    } known[] = {
        {WRITE, ENOSPC, "any.svg: cannot write: No space left on device"},
        {FSYNC, EIO, "any.svg: cannot write to the disk: Input/output error"},
        {CLOSE, EIO, "any.svg: cannot close: Input/output error"},
        {RENAME, EACCES, "any.svg: cannot replace it: Permission denied"},
    };
    char text[32];
    const char *path = in_folder("any.svg");
    memset(&fault, 0, sizeof fault);
    CHECK_OK(lt_file_replace(path, "the old one", 11));
    int files = count_files();
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        memset(&fault, 0, sizeof fault);
        fault.call = known[i].call;
        fault.n = 1;
        fault.error = known[i].error;
        CHECK_FAILS(lt_file_replace(path, "new", 3), LT_EFILE, known[i].text);
        CHECK_EQ(count_files(), files);
        CHECK_EQ(slurp(path, text, sizeof text), 11);
        CHECK_EQ(memcmp(text, "the old one", 11), 0);
    }
    memset(&fault, 0, sizeof fault);
    fault.interrupt = true;
    fault.most = 2;
    CHECK_OK(lt_file_replace(path, "new", 3));
    CHECK_EQ(slurp(path, text, sizeof text), 3);
    CHECK_EQ(memcmp(text, "new", 3), 0);
    CHECK_EQ(count_files(), files);
}

TEST_FAULTS(interrupted_and_short_calls_are_continued)
{
    static char plain[40000], slow[40000];
    lt_tensor *x = counting(ctx, LT_F32, 1, (int64_t[]){6001});
    const char *path = in_folder("plain.safetensors"), *other = in_folder("slow.safetensors");
    CHECK_OK(save_small(path, x));
    fault.interrupt = true;
    fault.most = 50; /* less than a digest */
    CHECK_OK(save_small(other, x));
    lt_file *f = lt_file_open(ctx, other);
    CHECK(f != NULL);
    CHECK_OK(lt_file_verify(f));
    lt_tensor *y = lt_file_read(f, 0);
    CHECK(y != NULL);
    CHECK_EQ(memcmp(lt_data(x), lt_data(y), 6001 * 4), 0);
    lt_file_close(f);
    memset(&fault, 0, sizeof fault);
    size_t n = slurp(path, plain, sizeof plain);
    CHECK_EQ(slurp(other, slow, sizeof slow), n);
    CHECK_EQ(memcmp(plain, slow, n), 0);
    RELEASE(x, y);
}

TEST_FAULTS(unwritable_paths_are_refused)
{
    char deep[300];
    lt_tensor *x = counting(ctx, LT_F32, 1, (int64_t[]){7});
    CHECK_FAILS(save_small(in_folder("none/x"), x), LT_EFILE,
                "cannot create a temporary file next to it: No such file or directory");
    spit(in_folder("plain"), "", 0);
    CHECK_FAILS(save_small(in_folder("plain/x"), x), LT_EFILE,
                "cannot create a temporary file next to it: Not a directory");
    CHECK_FAILS(save_small("/proc/x", x), LT_EFILE,
                "/proc/x: cannot create a temporary file next to it: ");
    memset(deep, 'x', sizeof deep);
    deep[sizeof deep - 1] = 0;
    CHECK_FAILS(save_small(deep, x), LT_EFILE,
                "cannot create a temporary file next to it: File name too long");
    mkdir(in_folder("sub"), 0700);
    int files = count_files();
    CHECK_FAILS(save_small(in_folder("sub"), x), LT_EFILE,
                "this is not a regular file; it is not replaced");
    CHECK_EQ(count_files(), files);
    lt_release(x);
}

TEST_FAULTS(another_programs_temporary_file_is_not_touched)
{
    char text[8];
    lt_tensor *x = counting(ctx, LT_F32, 1, (int64_t[]){7});
    spit(in_folder("mine.tmp0"), "theirs", 6);
    CHECK_OK(save_small(in_folder("mine"), x));
    CHECK_EQ(slurp(in_folder("mine.tmp0"), text, sizeof text), 6);
    CHECK_EQ(memcmp(text, "theirs", 6), 0);
    lt_release(x);
}

/* Whichever allocation fails, opening and reading return LT_ENOMEM without a leak. */
TEST(every_allocation_failure_is_handled)
{
    char bytes[512], text[32];
    lt_ctx *writer = calm_context();
    (void)small_file(writer, bytes, sizeof bytes);
    CLOSE_CTX(writer);
    for (int n = 1;; n++) {
        snprintf(text, sizeof text, "alloc:n=%d", n);
        lt_ctx *ctx = lt_ctx_new(&(lt_config){.threads = 1, .fault = text});
        lt_file *f = lt_file_open(ctx, in_folder("small.safetensors"));
        lt_tensor *x = f ? lt_file_read(f, 0) : NULL;
        lt_status code = x ? LT_OK : lt_errcode();
        lt_release(x);
        lt_file_close(f);
        CLOSE_CTX(ctx);
        if (x) {
            CHECK(n > 6);
            return;
        }
        CHECK_EQ(code, LT_ENOMEM);
    }
}

TEST_CTX(only_regular_files_are_replaced)
{
    char pipe[PATH_MAX], file[PATH_MAX], link[PATH_MAX];
    const char *name = "x";
    int64_t two = 2;
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 1, &two, 1);
    strcpy(pipe, in_folder("target.pipe"));
    strcpy(file, in_folder("target.safetensors"));
    strcpy(link, in_folder("link.safetensors"));
    CHECK_EQ(mkfifo(pipe, 0600), 0);
    CHECK_FAILS(lt_file_save(pipe, 1, &name, &x, 0, NULL), LT_EFILE, "it is not replaced");
    struct stat now;
    CHECK_EQ(stat(pipe, &now), 0);
    CHECK(S_ISFIFO(now.st_mode));
    CHECK_OK(lt_file_save(file, 1, &name, &x, 0, NULL));
    CHECK_EQ(chmod(file, 0600), 0);
    CHECK_EQ(symlink("target.safetensors", link), 0);
    CHECK_OK(lt_fill(x, 2));
    CHECK_OK(lt_file_save(link, 1, &name, &x, 0, NULL)); /* follows the link */
    CHECK_EQ(lstat(link, &now), 0);
    CHECK(S_ISLNK(now.st_mode));
    CHECK_EQ(stat(file, &now), 0);
    CHECK_EQ(now.st_mode & 0777, 0600);
    lt_file *f = lt_file_open(ctx, file);
    CHECK(f != NULL);
    lt_tensor *y = lt_file_read(f, 0);
    double value;
    CHECK_OK(lt_item(y, 1, &value));
    CHECK_NEAR(value, 2, 0);
    RELEASE(x, y);
    lt_file_close(f);
}
