/* plugin.c - finds the MPI plugin when the process was started as one of several. MPI is not made
 * to be unloaded: the plugin stays.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dist/group.h"

#define PLUGIN "libluatrain-mpi.so"

/* How many processes were started together, as mpirun or srun says: 1 if nobody does. */
static int started(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
    int most = 1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        int n = value ? atoi(value) : 1;
        most = n > most ? n : most;
    }
    return most;
}

bool lt_cluster_is_here(void) { return started() > 1; }

/* The folder of the file that this code is in: the library, or a program that contains it. */
static const char *own_folder(char path[PATH_MAX])
{
    Dl_info info;
    if (!dladdr((const void *)(uintptr_t)&own_folder, &info) || !realpath(info.dli_fname, path))
        return NULL;
    return dirname(path);
}

/* Where it was built, and where it is installed: beside the library, or beside the program. */
static lt_status find(char file[PATH_MAX + 64])
{
    static const char *const places[] = {"%s/" PLUGIN, "%s/luatrain/" PLUGIN,
                                         "%s/../lib/luatrain/" PLUGIN};
    char path[PATH_MAX];
    const char *folder = own_folder(path);
    for (size_t i = 0; folder && i < sizeof places / sizeof *places; i++) {
        snprintf(file, PATH_MAX + 64, places[i], folder);
        if (access(file, F_OK) == 0)
            return LT_OK;
    }
    return lt_fail(LT_EENV, "luatrain has no " PLUGIN ", without which ranks cannot be processes; "
                   "build it where there is mpicc");
}

lt_status lt_cluster_check(void)
{
    char file[PATH_MAX + 64];
    return find(file);
}

lt_status lt__plugin_open(lt_wire *wire)
{
    char file[PATH_MAX + 64], text[256];
    LT_TRY(find(file));
    void *plugin = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!plugin)
        return lt_fail(LT_EENV, "the MPI plugin cannot be loaded: %s", dlerror());
    void *symbol = dlsym(plugin, "lt_wire_open");
    lt_wire_open_fn open_wire;
    memcpy(&open_wire, &symbol, sizeof open_wire); /* the C way from an object to a function */
    if (!symbol)
        return lt_fail(LT_EENV, "the MPI plugin is not one of luatrain");
    if (open_wire(LT_VERSION, wire, text, sizeof text) != 0)
        return lt_fail(LT_EENV, "%s", text);
    if (wire->size != started())
        return lt_fail(LT_EENV, "%d processes were started, but %s sees %d; srun wants --mpi=pmix",
                       started(), wire->name, wire->size);
    return LT_OK;
}
