// Declares kernels and their shared memory. Only these macros, the instruction wrappers in this folder and what CUDA C++ has built in tie
// the kernels to nvcc: tests/emulated has a second body for each and runs the same sources on the CPU.
#pragma once

// Every entry point takes one struct by value. The remaining arguments go to __launch_bounds__: the threads of a CTA and, where the
// compiler would otherwise spill to raise occupancy, the number of resident CTAs per SM that is enough.
#define KL_ENTRY(name, Params, ...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name(const __grid_constant__ Params p)

// An entry point of a template: a CTA has the threads and the bytes of dynamic shared memory that Config computes, which the host computes
// from the row of kernels.def.
#define KL_TILE_ENTRY(name, Params, Config, ctas_per_sm) KL_ENTRY(name, Params, Config::kThreads, ctas_per_sm)

// A variable in static shared memory, inside a function: KL_SHARED(float, sums, [4]), or with empty bounds for a single value.
#define KL_SHARED(type, name, bounds) __shared__ type name bounds
#define KL_SHARED_ALIGNED(alignment, type, name, bounds) __shared__ alignas(alignment) type name bounds

// Declares `dynamic_shared`, the bytes of the CTA's dynamic shared memory. The compiler may assume this alignment.
#define KL_DYNAMIC_SHARED(alignment) extern __shared__ __align__(alignment) unsigned char dynamic_shared[]
