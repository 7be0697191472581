// Four kernels with one bug each, for the four tools of compute-sanitizer. A tool that does not report its bug has not worked.
// tools/gpu_bundle compiles the kernels and `gpu planted` launches one. kiln itself does not use them.
#include <stdint.h>

struct Planted {
  uint64_t data, out;  // kCount values each; nobody has written to data
};

constexpr int kCount = 64;

#define PLANTED(tool) extern "C" __global__ void __launch_bounds__(kCount) planted_##tool(const __grid_constant__ Planted p)

// Writes one value too many.
PLANTED(memcheck) { reinterpret_cast<uint32_t*>(p.out)[threadIdx.x + 1] = threadIdx.x; }

// Reads what a thread of the other warp writes, without waiting for it.
PLANTED(racecheck) {
  __shared__ uint32_t shared[kCount];
  shared[threadIdx.x] = threadIdx.x;
  reinterpret_cast<uint32_t*>(p.out)[threadIdx.x] = shared[kCount - 1 - threadIdx.x];
}

// Uses memory that was never written.
PLANTED(initcheck) { reinterpret_cast<uint32_t*>(p.out)[threadIdx.x] = reinterpret_cast<const uint32_t*>(p.data)[threadIdx.x]; }

// Waits in a branch that some threads do not take.
PLANTED(synccheck) {
  __shared__ uint32_t shared[kCount];
  shared[threadIdx.x] = threadIdx.x;
  if (threadIdx.x < kCount - 16) {
    shared[threadIdx.x] += 1;
    __syncthreads();
  }
  reinterpret_cast<uint32_t*>(p.out)[threadIdx.x] = shared[threadIdx.x];
}
