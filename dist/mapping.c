/* mapping.c - memory that other processes can map; see mapping.h. There are few mappings, so a
 * linear search is enough.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/tensor.h"
#include "dist/mapping.h"

#define NAME "luatrain"

/* A handle, from the high bits: the number of the mapping, which the process never reuses; its file
 * descriptor; an offset. */
enum { NUMBER_BITS = 12, FD_BITS = 14, OFFSET_BITS = 64 - NUMBER_BITS - FD_BITS };

typedef struct mapping {
    struct mapping *next;
    int pid; /* process id of the owner, or 0 for this process */
    unsigned number;
    int fd; /* descriptor in the owner's process */
    char *data;
    size_t bytes;
} mapping;

struct lt_mappings {
    atomic_int refs;      /* the owner's, and one for each mapping of this process */
    atomic_uint made;     /* number of mappings that this process has made so far */
    pthread_mutex_t lock; /* guards the list */
    mapping *first;
};

lt_mappings *lt__mappings_new(void)
{
    lt_mappings *mappings = lt__calloc(1, sizeof *mappings, "for shared memory");
    if (!mappings)
        return NULL;
    atomic_init(&mappings->refs, 1);
    pthread_mutex_init(&mappings->lock, NULL);
    return mappings;
}

static void release(lt_mappings *mappings)
{
    if (atomic_fetch_sub(&mappings->refs, 1) != 1)
        return;
    pthread_mutex_destroy(&mappings->lock);
    free(mappings);
}

static void close_mapping(mapping *x)
{
    munmap(x->data, x->bytes);
    if (x->pid == 0)
        close(x->fd);
    free(x);
}

/* Unmaps views of other processes' mappings: all if pid is 0, else those of process pid with this
 * descriptor. The caller holds the lock. */
static void drop_views(lt_mappings *mappings, int pid, int fd)
{
    for (mapping **at = &mappings->first, *x; (x = *at);) {
        if (x->pid == 0 || (pid != 0 && (x->pid != pid || x->fd != fd))) {
            at = &x->next;
            continue;
        }
        *at = x->next;
        close_mapping(x);
    }
}

void lt__mappings_free(lt_mappings *mappings)
{
    if (!mappings)
        return;
    pthread_mutex_lock(&mappings->lock);
    drop_views(mappings, 0, 0);
    pthread_mutex_unlock(&mappings->lock);
    release(mappings);
}

static mapping *mapping_over(int fd, size_t bytes)
{
    mapping *x = calloc(1, sizeof *x);
    void *data = x ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (data == MAP_FAILED) {
        free(x);
        return NULL;
    }
    x->fd = fd;
    x->data = data;
    x->bytes = bytes;
    return x;
}

/* ==== Mappings of this process ================================================================ */

/* posix_fallocate() allocates the pages now. If the machine does not have enough, that is an error
 * here and not a signal later. */
void *lt__mapping_new(lt_mappings *mappings, size_t bytes)
{
    int fd = memfd_create(NAME, MFD_CLOEXEC);
    unsigned number = atomic_fetch_add(&mappings->made, 1) + 1;
    mapping *x = NULL;
    if (fd >= 0 && fd < 1 << FD_BITS && bytes > 0 && bytes >> OFFSET_BITS == 0 &&
        number < 1 << NUMBER_BITS && posix_fallocate(fd, 0, (off_t)bytes) == 0)
        x = mapping_over(fd, bytes);
    if (!x) {
        if (fd >= 0)
            close(fd);
        lt_fail(LT_ENOMEM, "cannot allocate %zu bytes of shared memory", bytes);
        return NULL;
    }
    x->number = number;
    atomic_fetch_add(&mappings->refs, 1);
    pthread_mutex_lock(&mappings->lock);
    x->next = mappings->first;
    mappings->first = x;
    pthread_mutex_unlock(&mappings->lock);
    return x->data;
}

/* The link in the list to the mapping of this process that contains the byte. The caller holds the
 * lock. */
static mapping **own(lt_mappings *mappings, const char *data)
{
    mapping **at = &mappings->first;
    while (*at && ((*at)->pid != 0 || data < (*at)->data || data >= (*at)->data + (*at)->bytes))
        at = &(*at)->next;
    return at;
}

void lt__mapping_free(lt_mappings *mappings, void *data)
{
    pthread_mutex_lock(&mappings->lock);
    mapping **at = own(mappings, data), *x = *at;
    *at = x->next;
    pthread_mutex_unlock(&mappings->lock);
    close_mapping(x);
    release(mappings);
}

uint64_t lt__mapping_handle(lt_mappings *mappings, const void *data)
{
    uint64_t place = 0;
    pthread_mutex_lock(&mappings->lock);
    const mapping *x = *own(mappings, data);
    if (x)
        place = (uint64_t)x->number << (FD_BITS + OFFSET_BITS) | (uint64_t)x->fd << OFFSET_BITS |
                (uint64_t)((const char *)data - x->data);
    pthread_mutex_unlock(&mappings->lock);
    return place;
}

/* ==== Mappings of other processes ============================================================= */

/* Opens a memfd of another process. Checks its name, because pid may be another process here if the
 * owner is in another pid namespace. */
static int open_mapping(int pid, int fd)
{
    char path[64], target[64] = "";
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    if (readlink(path, target, sizeof target - 1) < 0)
        return -1;
    if (strncmp(target, "/memfd:" NAME, sizeof "/memfd:" NAME - 1) != 0) {
        errno = ENOENT;
        return -1;
    }
    return open(path, O_RDWR | O_CLOEXEC);
}

static mapping *map_view(int pid, unsigned number, int fd)
{
    struct stat now;
    int here = open_mapping(pid, fd);
    mapping *x = NULL;
    if (here >= 0 && fstat(here, &now) == 0 && now.st_size > 0)
        x = mapping_over(here, (size_t)now.st_size);
    if (!x)
        lt_fail(LT_EENV, "shared memory of process %d cannot be mapped: %s", pid, strerror(errno));
    if (here >= 0)
        close(here);
    if (x) {
        x->pid = pid;
        x->number = number;
        x->fd = fd;
    }
    return x;
}

/* The view of a mapping, made if necessary. The caller holds the lock. */
static mapping *find_view(lt_mappings *mappings, int pid, unsigned number, int fd)
{
    mapping *x = mappings->first;
    while (x && (x->pid != pid || x->number != number))
        x = x->next;
    if (x)
        return x;
    drop_views(mappings, pid, fd); /* a view of an earlier mapping that had this descriptor */
    if ((x = map_view(pid, number, fd))) {
        x->next = mappings->first;
        mappings->first = x;
    }
    return x;
}

void *lt__mapping_find(lt_mappings *mappings, int pid, uint64_t place)
{
    unsigned number = (unsigned)(place >> (FD_BITS + OFFSET_BITS));
    int fd = (int)(place >> OFFSET_BITS & ((1 << FD_BITS) - 1));
    uint64_t offset = place & (((uint64_t)1 << OFFSET_BITS) - 1);
    pthread_mutex_lock(&mappings->lock);
    const mapping *x = find_view(mappings, pid, number, fd);
    pthread_mutex_unlock(&mappings->lock);
    if (x && offset >= x->bytes)
        lt_fail(LT_EENV, "offset %llu is outside the shared memory of process %d",
                (unsigned long long)offset, pid);
    return x && offset < x->bytes ? x->data + offset : NULL;
}
