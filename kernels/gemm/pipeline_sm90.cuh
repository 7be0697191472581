// The position of a producer or consumer in a TMA pipeline.
#pragma once

#include <ptx/sm90.cuh>

// The stage of a ring of kStages stages in shared memory that comes next, and the phase parity of its mbarriers. Each side keeps its
// own: the producer waits for `empty` and fills, consumers wait for `full` and release.
template <int kStages>
struct PipelineState {
  uint32_t stage = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ uint32_t previous() const { return (stage == 0 ? kStages : stage) - 1; }
};
