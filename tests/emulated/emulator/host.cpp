// The host interface to launches: the table of kernels, the checks of a launch, the queue.
#include <string.h>

#include <algorithm>

#include "machine.h"

using namespace kl_emu;

static std::vector<Kernel>& kernels() {
  static std::vector<Kernel> table;
  return table;
}

Registration::Registration(const Kernel& kernel, uint32_t max_threads, uint32_t, uint32_t shared) {
  kernels().push_back(kernel);
  kernels().back().max_threads = max_threads, kernels().back().shared = shared;
}

extern "C" int32_t kl_emu_kernel(const char* module, const char* symbol, uint64_t* param_bytes, uint32_t* max_threads) {
  for (size_t i = 0; i < kernels().size(); i++) {
    const Kernel& kernel = kernels()[i];
    if (strcmp(kernel.module, module) == 0 && strcmp(kernel.symbol, symbol) == 0) {
      *param_bytes = kernel.param_bytes, *max_threads = kernel.max_threads;
      return static_cast<int32_t>(i);
    }
  }
  return -1;
}

static std::string refuse(const Kernel& kernel, const KlEmuLaunch& shape) {
  const uint64_t ctas = static_cast<uint64_t>(shape.grid[0]) * shape.grid[1] * shape.grid[2];
  if (ctas == 0 || ctas > UINT32_MAX) return format("a grid of %u x %u x %u", shape.grid[0], shape.grid[1], shape.grid[2]);
  if (shape.threads == 0 || shape.threads % kLanes || shape.threads > kernel.max_threads) {
    return format("%u threads; its launch bounds allow %u, in whole warps", shape.threads, kernel.max_threads);
  }
  if (shape.cluster == 0 || shape.grid[0] % shape.cluster) return format("a grid of %u in clusters of %u", shape.grid[0], shape.cluster);
  if (shape.threads / kLanes * shape.cluster > Clock::kWarps) return format("more than %u warps in a cluster", Clock::kWarps);
  if (kernel.shared != kAnyShared && (shape.threads != kernel.max_threads || shape.shared != kernel.shared)) {
    return format("%u threads and %u bytes of dynamic shared memory; its template computes %u and %u", shape.threads, shape.shared,
                  kernel.max_threads, kernel.shared);
  }
  if (shape.shared > kSharedLimit) return format("%u bytes of dynamic shared memory; at most %u are possible", shape.shared, kSharedLimit);
  return {};
}

extern "C" const char* kl_emu_launch(int32_t index, const KlEmuLaunch* shape, const void* params, uint64_t seed) {
  Machine& m = machine();
  m.error.clear();
  if (index < 0 || static_cast<size_t>(index) >= kernels().size()) return "no such kernel";
  const Kernel& kernel = kernels()[index];
  const std::string refused = refuse(kernel, *shape);
  if (!refused.empty()) {
    m.error = std::string(kernel.symbol) + ": launched with " + refused;
    abandon_all();
    return m.error.c_str();
  }
  Random random;
  random.seed(seed);
  auto launch = std::make_unique<Launch>();
  launch->kernel = &kernel, launch->shape = *shape, launch->seed = seed;
  launch->params_memory = std::make_unique<unsigned char[]>(kernel.param_bytes + kernel.param_alignment);
  void* aligned = launch->params_memory.get();
  aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(aligned) + kernel.param_alignment - 1) & -kernel.param_alignment);
  memcpy(aligned, params, kernel.param_bytes);
  launch->params = aligned;
  launch->ctas = shape->grid[0] * shape->grid[1] * shape->grid[2];
  launch->clusters = launch->ctas / shape->cluster;
  constexpr uint32_t kResidentThreads = 2048;
  const uint32_t fit = std::max(1u, kResidentThreads / (shape->threads * shape->cluster));
  launch->resident_limit = std::min(1 + random.below(4), fit);
  if (!m.queue.empty()) launch->previous = m.queue.back().get();
  if (shape->overlap) launch->start = static_cast<Launch::Start>(random.below(3));
  m.queue.push_back(std::move(launch));
  m.changed = true;
  return run_queue(1) ? nullptr : m.error.c_str();
}

extern "C" const char* kl_emu_finish(void) {
  Machine& m = machine();
  m.error.clear();
  if (!run_queue(0)) return m.error.c_str();
  m.async_time = 1;
  return nullptr;
}
