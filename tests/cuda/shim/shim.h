/* shim.h - the interface between runtime.cpp (memory, streams) and block.cpp (blocks of threads).
 */
#ifndef TESTS_CUDA_SHIM_SHIM_H
#define TESTS_CUDA_SHIM_SHIM_H

#include "cuda_runtime.h"
#include "tests/cuda/shim.h"

/* Runs `thread` once for each thread of the grid. Device memory must be open. In block.cpp. */
void shim_run_grid(dim3 grid, dim3 block, const std::function<void()> &thread);

#endif
