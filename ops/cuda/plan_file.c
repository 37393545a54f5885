/* plan_file.c - reads and writes the plan file.
 *
 *     luatrain plans 1
 *     cuDNN 91900, CUDA 13000, NVIDIA H200, sm_90, 132 SMs, driver 13000      the stamp
 *     KEY \t VALUE                                                            one line per entry
 *     end b8f2c5d1e0a39477                                FNV-1a of all bytes before this line
 */
#define _GNU_SOURCE
#include "ops/cuda/plan_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/hash.h"

#define HEAD "luatrain plans 1\n"
enum { LARGEST = 16 << 20, END = 21 }; /* maximum bytes of a file; bytes of its last line */

typedef struct entry {
    char *key, *value;
} entry;

struct lt_plan_file {
    char *path, *stamp;
    entry *at;
    int n, capacity;
    bool changed;
};

static void end_line(char line[END + 1], const char *text, size_t bytes)
{
    snprintf(line, END + 1, "end %016" PRIx64 "\n", lt__fnv64(LT_FNV64_START, text, bytes));
}

/* ==== Entries ================================================================================= */

static entry *find_entry(const lt_plan_file *plans, const char *key)
{
    for (int i = 0; i < plans->n; i++)
        if (strcmp(plans->at[i].key, key) == 0)
            return &plans->at[i];
    return NULL;
}

const char *lt__plan_file_find(const lt_plan_file *plans, const char *key)
{
    const entry *e = find_entry(plans, key);
    return e ? e->value : NULL;
}

static bool append(lt_plan_file *plans, const char *key, size_t key_bytes, const char *value,
                   size_t value_bytes)
{
    if (plans->n == plans->capacity) {
        int capacity = plans->capacity ? 2 * plans->capacity : 64;
        entry *at = realloc(plans->at, (size_t)capacity * sizeof *at);
        if (!at)
            return false;
        plans->at = at;
        plans->capacity = capacity;
    }
    entry e = {strndup(key, key_bytes), strndup(value, value_bytes)};
    if (!e.key || !e.value) {
        free(e.key);
        free(e.value);
        return false;
    }
    plans->at[plans->n++] = e;
    return true;
}

bool lt__plan_file_put(lt_plan_file *plans, const char *key, const char *value)
{
    entry *e = find_entry(plans, key);
    if (e && strcmp(e->value, value) == 0)
        return true;
    plans->changed = true;
    if (!e)
        return append(plans, key, strlen(key), value, strlen(value));
    char *copy = strdup(value);
    if (!copy)
        return false;
    free(e->value);
    e->value = copy;
    return true;
}

static void forget(lt_plan_file *plans)
{
    for (int i = 0; i < plans->n; i++) {
        free(plans->at[i].key);
        free(plans->at[i].value);
    }
    plans->n = 0;
}

void lt__plan_file_free(lt_plan_file *plans)
{
    if (!plans)
        return;
    forget(plans);
    free(plans->at);
    free(plans->path);
    free(plans->stamp);
    free(plans);
}

/* ==== Reading ================================================================================= */

/* Returns the content of a file with a NUL appended, or NULL with errno set. New. */
static char *read_all(const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "rb");
    struct stat about;
    char *text = NULL;
    if (!file)
        return NULL;
    if (fstat(fileno(file), &about) != 0 || !S_ISREG(about.st_mode) || about.st_size > LARGEST)
        errno = EINVAL;
    else if ((text = malloc((size_t)about.st_size + 1))) {
        *bytes = fread(text, 1, (size_t)about.st_size, file);
        text[*bytes] = 0;
    }
    fclose(file);
    return text;
}

/* Takes all entries of the file. Returns NULL on success, a message if the file is invalid, or ""
 * if out of memory. */
static const char *take(lt_plan_file *plans, const char *text, size_t bytes)
{
    char last[END + 1];
    size_t head = strlen(HEAD), stamp = strlen(plans->stamp);
    if (bytes < head + END || strlen(text) != bytes)
        return "is damaged";
    size_t body = bytes - END;
    end_line(last, text, body);
    if (strcmp(text + body, last) != 0)
        return "is damaged";
    if (strncmp(text, HEAD, head) != 0)
        return "is from another version of luatrain";
    if (strncmp(text + head, plans->stamp, stamp) != 0 || text[head + stamp] != '\n')
        return "is for another device, driver or cuDNN version";
    for (const char *line = text + head + stamp + 1; line < text + body;) {
        size_t length = strcspn(line, "\n"), key = strcspn(line, "\t\n");
        if (key == length)
            return "is damaged";
        if (!append(plans, line, key, line + key + 1, length - key - 1))
            return "";
        line += length + 1;
    }
    return NULL;
}

static void check_folder(const char *path, char *note, size_t bytes)
{
    char copy[PATH_MAX];
    int n = snprintf(copy, sizeof copy, "%s", path);
    if (n < PATH_MAX && access(dirname(copy), W_OK) != 0)
        snprintf(note, bytes, "plans cannot be written to %s: %s", path, strerror(errno));
}

lt_plan_file *lt__plan_file_read(const char *path, const char *stamp, char *note, size_t bytes)
{
    lt_plan_file *plans = calloc(1, sizeof *plans);
    size_t size = 0;
    snprintf(note, bytes, "%s", "");
    if (!plans || !(plans->path = strdup(path)) || !(plans->stamp = strdup(stamp))) {
        lt__plan_file_free(plans);
        return NULL;
    }
    char *text = read_all(path, &size);
    if (!text && errno != ENOENT)
        snprintf(note, bytes, "the plans in %s cannot be read: %s", path, strerror(errno));
    const char *wrong = text ? take(plans, text, size) : NULL;
    free(text);
    if (wrong)
        forget(plans);
    if (wrong && !*wrong) {
        lt__plan_file_free(plans);
        return NULL;
    }
    if (wrong)
        snprintf(note, bytes, "%s %s; plans are rebuilt", path, wrong);
    else if (!*note)
        check_folder(path, note, bytes);
    return plans;
}

/* ==== Writing ================================================================================= */

/* Returns the text of the whole file, or NULL if out of memory. New. */
static char *text_of(const lt_plan_file *plans, size_t *bytes)
{
    char *text = NULL, last[END + 1];
    FILE *to = open_memstream(&text, bytes);
    if (!to)
        return NULL;
    fprintf(to, HEAD "%s\n", plans->stamp);
    for (int i = 0; i < plans->n; i++)
        fprintf(to, "%s\t%s\n", plans->at[i].key, plans->at[i].value);
    if (fflush(to) == 0) {
        end_line(last, text, *bytes);
        fputs(last, to);
    }
    if (fclose(to) == 0)
        return text;
    free(text);
    return NULL;
}

static bool write_all(int file, const char *text, size_t bytes)
{
    while (bytes > 0) {
        ssize_t n = write(file, text, bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        text += n;
        bytes -= (size_t)n;
    }
    return true;
}

bool lt__plan_file_write(lt_plan_file *plans, char *note, size_t bytes)
{
    size_t size = 0;
    char *text = NULL, *draft = NULL;
    snprintf(note, bytes, "%s", "");
    if (!plans->changed)
        return true;
    int file = -1;
    if (asprintf(&draft, "%s.XXXXXX", plans->path) < 0)
        draft = NULL;
    bool done = draft && (text = text_of(plans, &size)) && (file = mkstemp(draft)) >= 0 &&
                write_all(file, text, size) && fsync(file) == 0;
    int error = errno;
    if (file >= 0 && close(file) != 0 && done) {
        error = errno;
        done = false;
    }
    if (done && rename(draft, plans->path) != 0) {
        error = errno;
        done = false;
    }
    if (!done && file >= 0)
        unlink(draft);
    if (!done)
        snprintf(note, bytes, "the plans cannot be written to %s: %s", plans->path,
                 strerror(error));
    plans->changed = !done;
    free(text);
    free(draft);
    return done;
}
