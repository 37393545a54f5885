/* shim.h - between the two halves of the shim: memory and streams, and blocks of threads. */
#ifndef TESTS_CUDA_SHIM_SHIM_H
#define TESTS_CUDA_SHIM_SHIM_H

#include "cuda_runtime.h"
#include "tests/cuda/shim.h"

/* Runs a kernel, with device memory open. block.cpp. */
void shim_run_grid(dim3 grid, dim3 block, const std::function<void()> &thread);

#endif
