/* plugin.c - finds and opens the MPI plugin for runs with several processes. */
#include <stdlib.h>

#include "core/plugin.h"
#include "dist/group.h"

/* How many processes mpirun or srun has started together, or 1 without them. */
static int started(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
    int max = 1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        int n = value ? atoi(value) : 1;
        max = n > max ? n : max;
    }
    return max;
}

bool lt_mpi_is_launched(void) { return started() > 1; }

static lt_status find_plugin(char file[LT_PLUGIN_PATH])
{
    if (lt__plugin_find("mpi", file))
        return LT_OK;
    return lt_fail(
        LT_EENV,
        "libluatrain-mpi.so is missing, but MPI ranks require it; build luatrain where mpicc is "
        "installed");
}

lt_status lt_mpi_check(void)
{
    char file[LT_PLUGIN_PATH];
    return find_plugin(file);
}

lt_status lt__net_open(lt_net *net)
{
    char file[LT_PLUGIN_PATH], text[256];
    lt_net_open_fn open_net;
    LT_TRY(find_plugin(file));
    LT_TRY(lt__plugin_open(file, "lt_net_open", &open_net));
    if (open_net(LT_VERSION, net, text, sizeof text) != 0)
        return lt_fail(LT_EENV, "%s", text);
    if (net->size != started())
        return lt_fail(LT_EENV,
                       "%d processes were started, but %s sees %d; srun requires --mpi=pmix",
                       started(), net->name, net->size);
    return LT_OK;
}
