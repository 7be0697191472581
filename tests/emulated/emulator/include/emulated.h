// Included before a kernel file is compiled for the emulator. Each kernel file is compiled inside an unnamed namespace, because two files
// may have types of the same name. The headers included here must stay outside of it.
#pragma once

#include <abi.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <ptx/entry.cuh>
#include <ptx/sm80.cuh>
#include <ptx/sm120.cuh>
