/* emu_counts.h - the emulator's counters of waits. */
#ifndef TESTS_DEVICE_EMU_COUNTS_H
#define TESTS_DEVICE_EMU_COUNTS_H

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

/* Counters of the calling thread. EMU_WAITS: waits for work that no one had waited for before.
 * EMU_DRAINS: those of them that emptied the stream, so that the device is idle afterwards. */
enum { EMU_WAITS, EMU_DRAINS, EMU_COUNTS };
typedef long emu_count_fn(int what);

/* The counter function of the loaded plugin, or NULL if that is not the emulator. */
static inline emu_count_fn *emu_counter(void)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/libluatrain-cuda.so", getenv("LUATRAIN_PLUGINS"));
    void *plugin = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    return plugin ? (emu_count_fn *)dlsym(plugin, "emu_count") : NULL;
}

#endif
