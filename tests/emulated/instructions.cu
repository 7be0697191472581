// Kernels that try emulator instructions whose results no product kernel shows by itself. instructions.rs compares what they store with
// loops.
#include <abi.h>
#include <common/e4m3.cuh>
#include <common/nvfp4.cuh>
#include <ptx/sm90.cuh>

constexpr uint32_t kThreads = 64, kCtas = 2;
// Shared memory: an mbarrier, then a box at an address where every swizzle begins.
constexpr uint32_t kBoxOffset = 1024;

struct CopyParams {
  KlTensorMap map;
  uint64_t from, out;
  int32_t x, y, z;
  uint32_t bytes;
};

struct ExchangeParams {
  uint64_t out;
};

struct ConvertParams {
  uint64_t values, by_instruction, in_software, decoded, count;
};

KL_DYNAMIC_SHARED(1024);

uint32_t open_barrier(uint32_t arrivals) {
  const uint32_t barrier = shared_address(dynamic_shared);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, arrivals);
    fence_mbarrier_init();
  }
  __syncthreads();
  return barrier;
}

// Stores the box in the order of shared memory, chunk by chunk.
void store_box(uint32_t barrier, uint64_t out, uint32_t bytes) {
  mbarrier_wait(barrier, 0);
  const uint32_t box = shared_address(dynamic_shared) + kBoxOffset;
  for (uint32_t at = threadIdx.x * 16; at < bytes; at += kThreads * 16) {
    *reinterpret_cast<float4*>(out + at) = load_shared(box + at);
  }
}

KL_ENTRY(load_3d, CopyParams, kThreads) {
  const uint32_t barrier = open_barrier(1);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, p.bytes);
    tma_load_3d(barrier + kBoxOffset, &p.map, p.x, p.y, p.z, barrier);
  }
  store_box(barrier, p.out, p.bytes);
}

// The last CTA of a cluster loads for all CTAs.
KL_ENTRY(load_3d_multicast, CopyParams, kThreads) {
  const uint32_t barrier = open_barrier(1), rank = cluster_rank();
  if (threadIdx.x == 0) mbarrier_arrive_expect_tx(barrier, p.bytes);
  cluster_sync();
  if (rank == kCtas - 1 && threadIdx.x == 0) {
    tma_load_3d_multicast(barrier + kBoxOffset, &p.map, p.x, p.y, p.z, barrier, (1 << kCtas) - 1);
  }
  store_box(barrier, p.out + rank * p.bytes, p.bytes);
  cluster_sync();
}

KL_ENTRY(load_bulk, CopyParams, kThreads) {
  const uint32_t barrier = open_barrier(1);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, p.bytes);
    bulk_load(barrier + kBoxOffset, reinterpret_cast<const void*>(p.from), p.bytes, barrier);
  }
  store_box(barrier, p.out, p.bytes);
}

// Each thread sends its index and rank to the same place in the other CTA, and adds a value that it reads from there.
KL_ENTRY(exchange, ExchangeParams, kThreads) {
  KL_SHARED(uint16_t, squares, [kThreads]);
  const uint32_t rank = cluster_rank(), peer = kCtas - 1 - rank, thread = threadIdx.x;
  const uint32_t barrier = open_barrier(1), to = barrier + kBoxOffset + thread * 16;
  if (thread == 0) mbarrier_arrive_expect_tx(barrier, kThreads * 16);
  squares[thread] = static_cast<uint16_t>(thread * thread + rank);
  cluster_sync();
  store_remote_async(to, make_float4(thread, rank, 0.5f, -1.0f), barrier, peer);
  const uint16_t square = load_remote(&squares[thread], peer);
  mbarrier_wait(barrier, 0);
  float4 received = load_shared(to);
  received.z += square;
  reinterpret_cast<float4*>(p.out)[rank * kThreads + thread] = received;
  cluster_sync();
}

// Converts values to e4m3 codes, by the instruction (two per thread) and in software, and converts codes to values.
KL_ENTRY(convert_e4m3, ConvertParams, kThreads) {
  const float* values = reinterpret_cast<const float*>(p.values);
  for (uint32_t i = threadIdx.x; i < p.count; i += kThreads) {
    const uint32_t pair = cvt_e4m3x2(values[i], -values[i]);
    reinterpret_cast<uint16_t*>(p.by_instruction)[i] = static_cast<uint16_t>(pair);
    reinterpret_cast<uint8_t*>(p.in_software)[i] = static_cast<uint8_t>(encode_e4m3(values[i]));
  }
  for (uint32_t code = threadIdx.x; code < 256; code += kThreads) reinterpret_cast<float*>(p.decoded)[code] = decode_e4m3(code);
}

// Converts values to e2m1 codes, two per byte, and converts codes to values.
KL_ENTRY(convert_e2m1, ConvertParams, kThreads) {
  const float* values = reinterpret_cast<const float*>(p.values);
  for (uint32_t i = threadIdx.x; i < p.count; i += kThreads) {
    reinterpret_cast<uint8_t*>(p.by_instruction)[i] = static_cast<uint8_t>(cvt_e2m1x2(values[i], -values[i]));
    reinterpret_cast<uint8_t*>(p.in_software)[i] = static_cast<uint8_t>(encode_e2m1(values[i]));
  }
  for (uint32_t code = threadIdx.x; code < 16; code += kThreads) reinterpret_cast<float*>(p.decoded)[code] = decode_e2m1(code);
}

// In round r the predicate is true only for thread r, and in the last round for none.
KL_ENTRY(any_thread, ExchangeParams, kThreads) {
  for (uint32_t round = 0; round <= kThreads; round++) {
    const int any = __syncthreads_or(threadIdx.x == round);
    reinterpret_cast<uint32_t*>(p.out)[round * kThreads + threadIdx.x] = any != 0;
  }
}

// None of these kernels ends. The emulator sees memory accesses of the first and barriers of the second, but nothing of the third.
KL_ENTRY(endless_accesses, ExchangeParams, kThreads) {
  for (volatile uint32_t* word = reinterpret_cast<uint32_t*>(p.out);; *word = *word + 1) {
  }
}

KL_ENTRY(endless_yields, ExchangeParams, kThreads) {
  for (;;) __syncthreads();
}

KL_ENTRY(endless_registers, ExchangeParams, kThreads) {
  for (uint32_t i = 0;; i++) asm volatile("" : "+r"(i));
}
