/* emu_counts.h - what the emulator counts. */
#ifndef TESTS_DEVICE_EMU_COUNTS_H
#define TESTS_DEVICE_EMU_COUNTS_H

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

/* So often has this thread waited for something that it had not waited for before; of these, with
 * nothing behind it in the stream, so that the device has nothing to do. */
enum { EMU_WAITS, EMU_DRAINS, EMU_COUNTS };
typedef long emu_count_fn(int what);

/* In the plugin that is in use. NULL when that is another one. */
static inline emu_count_fn *emu_counter(void)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/libluatrain-cuda.so", getenv("LUATRAIN_PLUGINS"));
    void *plugin = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    return plugin ? (emu_count_fn *)dlsym(plugin, "emu_count") : NULL;
}

#endif
