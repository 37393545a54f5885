/* shim.h - what runtime.cpp (memory, streams), devices.cpp (the machine) and block.cpp (blocks of
 * threads) declare for each other. */
#ifndef TESTS_CUDA_SHIM_SHIM_H
#define TESTS_CUDA_SHIM_SHIM_H

#include "cuda_runtime.h"
#include "tests/cuda/shim.h"

/* Runs `thread` once for each thread of the grid. Device memory must be open. In block.cpp. */
void shim_run_grid(dim3 grid, dim3 block, const std::function<void()> &thread);
int shim_device(void);             /* the device of the host thread. In devices.cpp. */
const char *shim_fault_text(void); /* text of the recorded fault, or "" */

#endif
