// Like faults.cu, for sm_90 instructions: mbarriers, TMA, clusters, registers and wgmma.
#include <faults.cuh>

// Shared memory: an mbarrier, a box, wgmma operands.
constexpr uint32_t kBoxOffset = 1024, kBoxBytes = 1024, kAOffset = 8192, kBOffset = 16384, kOperandBytes = 8192;
constexpr uint32_t kOnes = 0x3f803f80;  // two bf16 values

inline uint32_t barrier_address() { return shared_address(dynamic_shared); }
inline uint32_t box_address() { return barrier_address() + kBoxOffset; }

// Initializes the mbarrier of each CTA for one arrival.
inline uint32_t open_barrier() {
  if (threadIdx.x == 0) {
    mbarrier_init(barrier_address(), 1);
    fence_mbarrier_init();
  }
  cluster_sync();
  return barrier_address();
}

// -------------------------------------------------------------------------------------------------------------------- mbarriers

KL_FAULT(mbarrier_not_initialized) {
  if (threadIdx.x != 0) return;
  if (!p.faulty) mbarrier_init(barrier_address(), 1);
  mbarrier_arrive(barrier_address());
}

KL_FAULT(mbarrier_not_fenced) {
  if (threadIdx.x != 0) return;
  mbarrier_init(barrier_address(), 1);
  if (!p.faulty) fence_mbarrier_init();
  mbarrier_arrive_expect_tx(barrier_address(), 16);
  bulk_load(box_address(), reinterpret_cast<const void*>(p.data), 16, barrier_address());
  mbarrier_wait(barrier_address(), 0);
}

KL_FAULT(mbarrier_of_a_peer_not_announced) {
  if (threadIdx.x == 0) {
    mbarrier_init(barrier_address(), 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (!p.faulty) cluster_sync();
  if (threadIdx.x == 0) mbarrier_arrive_remote(barrier_address(), 1 - cluster_rank());
  cluster_sync();
}

KL_FAULT(mbarrier_without_arrivals) {
  if (threadIdx.x == 0) mbarrier_init(barrier_address(), 1 - p.faulty);
}

KL_FAULT(mbarrier_misaligned) {
  if (threadIdx.x == 0) mbarrier_init(barrier_address() + 4 * p.faulty, 1);
}

KL_FAULT(mbarrier_initialized_twice) {
  if (threadIdx.x != 0) return;
  mbarrier_init(barrier_address(), 1);
  mbarrier_init(barrier_address() + (p.faulty ? 0 : 8), 1);
}

KL_FAULT(mbarrier_with_too_many_arrivals) {
  const uint32_t barrier = open_barrier();
  if (threadIdx.x != 0) return;
  mbarrier_arrive_expect_tx(barrier, 16);
  if (p.faulty) mbarrier_arrive(barrier);
  bulk_load(box_address(), reinterpret_cast<const void*>(p.data), 16, barrier);
  mbarrier_wait(barrier, 0);
}

KL_FAULT(mbarrier_with_bytes_that_never_come) {
  const uint32_t barrier = open_barrier();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, kBoxBytes + 16 * p.faulty);
    tma_load_2d(box_address(), &p.map, 0, 0, barrier);
  }
  mbarrier_wait(barrier, 0);
}

KL_FAULT(mbarrier_with_too_many_bytes) {
  const uint32_t barrier = open_barrier();
  if (threadIdx.x == 0) mbarrier_arrive_expect_tx(barrier, p.faulty << 20);
  mbarrier_wait(barrier, 0);
}

KL_FAULT(mbarrier_parity) {
  const uint32_t barrier = open_barrier();
  if (threadIdx.x == 0) mbarrier_arrive(barrier);
  mbarrier_wait(barrier, 2 * p.faulty);
}

// -------------------------------------------------------------------------------------------------------------------------- TMA

// Loads a box in the way under test.
template <class Load>
void load_box(Load load) {
  const uint32_t barrier = open_barrier();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, kBoxBytes);
    load(barrier);
  }
  mbarrier_wait(barrier, 0);
}

KL_FAULT(tma_destination) {
  load_box([&](uint32_t barrier) { tma_load_2d(box_address() + 64 * p.faulty, &p.map, 0, 0, barrier); });
}

KL_FAULT(tma_beyond_shared) {
  load_box([&](uint32_t barrier) { tma_load_2d(p.faulty ? barrier + kSharedBytes - 128 : box_address(), &p.map, 0, 0, barrier); });
}

KL_FAULT(tma_rank) {
  load_box([&](uint32_t barrier) {
    if (p.faulty) {
      tma_load_3d(box_address(), &p.map, 0, 0, 0, barrier);
    } else {
      tma_load_2d(box_address(), &p.map, 0, 0, barrier);
    }
  });
}

KL_FAULT(tma_map_misaligned) {
  load_box([&](uint32_t barrier) {
    const auto* map = reinterpret_cast<const KlTensorMap*>(reinterpret_cast<uint64_t>(&p.map) + 16 * p.faulty);
    tma_load_2d(box_address(), map, 0, 0, barrier);
  });
}

KL_FAULT(tma_to_a_rank_that_does_not_exist) {
  load_box([&](uint32_t barrier) {
    tma_load_2d_multicast(box_address(), &p.map, 0, 0, barrier, 1 << (p.faulty ? 2 : cluster_rank()));
  });
}

KL_FAULT(bulk_size) {
  const uint32_t barrier = open_barrier();
  const uint32_t bytes = 32 - 8 * p.faulty;
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, bytes);
    bulk_load(box_address(), reinterpret_cast<const void*>(p.data), bytes, barrier);
  }
  mbarrier_wait(barrier, 0);
}

KL_FAULT(bulk_load_outside_of_allocations) {
  load_box([&](uint32_t barrier) {
    bulk_load(box_address(), reinterpret_cast<const void*>(p.data + kDataBytes - kBoxBytes + 16 * p.faulty), kBoxBytes, barrier);
  });
}

KL_FAULT(load_before_tma_load) {
  const uint32_t barrier = open_barrier();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, kBoxBytes);
    tma_load_2d(box_address(), &p.map, 0, 0, barrier);
  }
  __syncthreads();
  if (!p.faulty) mbarrier_wait(barrier, 0);
  if (threadIdx.x == 0) load_shared(box_address());
  mbarrier_wait(barrier, 0);
}

KL_FAULT(tma_load_onto_another) {
  const uint32_t barrier = open_barrier();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, 2 * kBoxBytes);
    tma_load_2d(box_address(), &p.map, 0, 0, barrier);
  }
  __syncthreads();
  if (threadIdx.x == 0) tma_load_2d(box_address() + (p.faulty ? 128 : kBoxBytes), &p.map, 0, 8, barrier);
  mbarrier_wait(barrier, 0);
}

// Writes a box. True for the warp that wrote it.
inline bool write_box(bool fence = true) {
  if (threadIdx.x >= kLanes) return false;
  for (uint32_t at = threadIdx.x * 4; at < kBoxBytes; at += kLanes * 4) store_shared(box_address() + at, 0);
  if (fence) fence_proxy_async();
  __syncwarp();
  wait_for_previous_kernel();
  return true;
}

KL_FAULT(tma_store_not_fenced) {
  if (!write_box(!p.faulty) || threadIdx.x != 0) return;
  tma_store_2d(&p.map, box_address(), 0, 0);
  tma_store_wait<0>();
}

KL_FAULT(tma_store_not_waited_for) {
  if (!write_box() || threadIdx.x != 0) return;
  tma_store_2d(&p.map, box_address(), 0, 0);
  if (!p.faulty) tma_store_wait<0>();
}

KL_FAULT(store_during_tma_store) {
  if (!write_box()) return;
  if (threadIdx.x == 0) tma_store_2d(&p.map, box_address(), 0, 0);
  __syncwarp();
  if (threadIdx.x != 0) return;
  if (!p.faulty) tma_store_wait<0>();
  store_shared(box_address(), 1);
  tma_store_wait<0>();
}

// --------------------------------------------------------------------------------------------------------------------- clusters

KL_FAULT(rank_that_does_not_exist) {
  KL_SHARED(uint16_t, value, );
  if (threadIdx.x == 0) value = 0;
  cluster_sync();
  load_remote(&value, 1 + p.faulty);
  cluster_sync();
}

KL_FAULT(load_from_a_cta_that_has_ended) {
  KL_SHARED(uint16_t, value, );
  if (threadIdx.x == 0) value = 0;
  cluster_sync();
  if (cluster_rank() == 0) load_remote(&value, 1);
  if (!p.faulty) cluster_sync();
}

KL_FAULT(store_to_a_cta_that_ends) {
  const uint32_t barrier = open_barrier();
  if (threadIdx.x != 0) return;
  if (cluster_rank() == 0) {
    store_remote_async(box_address(), make_float4(0, 0, 0, 0), barrier, 1);
  } else {
    mbarrier_arrive_expect_tx(barrier, 16);
    if (!p.faulty) mbarrier_wait(barrier, 0);
  }
}

KL_FAULT(arrival_at_a_cta_that_ends) {
  const uint32_t barrier = open_barrier();
  if (threadIdx.x != 0) return;
  if (cluster_rank() == 0) {
    mbarrier_arrive_remote(barrier, 1);
  } else if (!p.faulty) {
    mbarrier_wait(barrier, 0);
  }
}

KL_FAULT(cluster_barrier_with_two_arrivals) {
  cluster_arrive();
  if (p.faulty) cluster_arrive();
  cluster_wait();
}

KL_FAULT(cluster_barrier_without_arrival) {
  if (!p.faulty) cluster_arrive();
  cluster_wait();
}

// -------------------------------------------------------------------------------------------------------------------- registers

KL_FAULT(more_registers_than_there_are) {
  if (threadIdx.x < kWarpgroup) {
    setmaxnreg_inc<256>();
  } else if (!p.faulty) {
    setmaxnreg_dec<240>();
  }
}

KL_FAULT(registers_of_a_warpgroup_differ) {
  if (p.faulty && threadIdx.x < kLanes) {
    setmaxnreg_dec<240>();
  } else {
    setmaxnreg_dec<232>();
  }
}

KL_FAULT(registers_increased_to_less) {
  if (p.faulty) {
    setmaxnreg_inc<24>();
  } else {
    setmaxnreg_dec<24>();
  }
}

KL_FAULT(registers_in_other_units) {
  if (p.faulty) {
    setmaxnreg_dec<100>();
  } else {
    setmaxnreg_dec<104>();
  }
}

// ------------------------------------------------------------------------------------------------------------------------ wgmma

// Writes both operands. True for the warpgroup that multiplies.
inline bool write_operands(bool fence = true) {
  for (uint32_t at = threadIdx.x * 4; at < kOperandBytes; at += blockDim.x * 4) {
    store_shared(barrier_address() + kAOffset + at, kOnes), store_shared(barrier_address() + kBOffset + at, kOnes);
  }
  if (fence) fence_proxy_async();
  __syncthreads();
  return threadIdx.x < kWarpgroup;
}

inline uint64_t descriptor_a() { return wgmma_descriptor(barrier_address() + kAOffset); }
inline uint64_t descriptor_b() { return wgmma_descriptor(barrier_address() + kBOffset); }

inline void wait_for_wgmma() {
  wgmma_commit();
  wgmma_wait<0>();
}

KL_FAULT(accumulator_used_in_flight) {
  if (!write_operands()) return;
  float acc[32];
  wgmma_fence();
  wgmma<64>(acc, descriptor_a(), descriptor_b(), 0);
  if (!p.faulty) wait_for_wgmma();
  volatile float* element = &acc[5];
  if (p.faulty < 2) *element;
  if (p.faulty == 0 || p.faulty == 2) *element = 0.0f;
  // Writes to registers by other instructions show when the MMA has been waited for.
  const uint32_t a[4] = {};
  if (p.faulty == 0 || p.faulty == 3) mma(*reinterpret_cast<float(*)[4]>(&acc[4]), a, 0, 0);
  wait_for_wgmma();
}

KL_FAULT(register_of_a_written_in_flight) {
  if (!write_operands()) return;
  float acc[64] = {};
  uint32_t a[4] = {};
  const uint64_t b = wgmma_descriptor_mn_major(barrier_address() + kBOffset, 2048);
  wgmma_fence();
  wgmma_rs(acc, a, b);
  if (!p.faulty) wait_for_wgmma();
  volatile uint32_t* element = &a[3];
  if (p.faulty < 2) *element = 1;
  if (p.faulty != 1) ldmatrix_x4(a, barrier_address() + kBOffset);
  wait_for_wgmma();
}

KL_FAULT(wgmma_not_fenced) {
  if (!write_operands()) return;
  float acc[32];
  if (!p.faulty) wgmma_fence();
  wgmma<64>(acc, descriptor_a(), descriptor_b(), 0);
  wait_for_wgmma();
}

// The accumulators are in flight, but the thread could have changed its own part of A.
KL_FAULT(wgmma_of_registers_not_fenced) {
  if (!write_operands()) return;
  float acc[2][64] = {};
  const uint32_t a[4] = {};
  const uint64_t b = wgmma_descriptor_mn_major(barrier_address() + kBOffset, 2048);
  wgmma_fence();
  wgmma_rs(acc[0], a, b);
  wgmma_commit();
  wgmma_rs(acc[1], a, b);
  wgmma_commit();
  wgmma_wait<1>();
  if (!p.faulty) wgmma_fence();
  wgmma_rs(acc[1], a, b);
  wait_for_wgmma();
}

KL_FAULT(wgmma_of_another_width_in_flight) {
  if (!write_operands()) return;
  float acc[32];
  wgmma_fence();
  wgmma<64>(acc, descriptor_a(), descriptor_b(), 0);
  if (!p.faulty) {
    wait_for_wgmma();
    wgmma_fence();
  }
  wgmma<32>(*reinterpret_cast<float(*)[16]>(&acc), descriptor_a(), descriptor_b(), 0);
  wait_for_wgmma();
}

KL_FAULT(wgmma_of_unfenced_stores) {
  if (!write_operands(!p.faulty)) return;
  float acc[32];
  wgmma_fence();
  wgmma<64>(acc, descriptor_a(), descriptor_b(), 0);
  wait_for_wgmma();
}

KL_FAULT(wgmma_not_waited_for) {
  if (!write_operands()) return;
  float acc[32];
  wgmma_fence();
  wgmma<64>(acc, descriptor_a(), descriptor_b(), 0);
  wgmma_commit();
  if (!p.faulty) wgmma_wait<0>();
}

KL_FAULT(wgmma_without_a_warp) {
  if (!write_operands() || (p.faulty && threadIdx.x < kLanes)) return;
  float acc[32];
  wgmma_fence();
  wgmma<64>(acc, descriptor_a(), descriptor_b(), 0);
  wait_for_wgmma();
}

// If faulty, only the last warp of a CTA of five warps issues the MMA.
KL_FAULT(wgmma_of_a_part_of_a_warpgroup) {
  if (write_operands() == (p.faulty != 0)) return;
  float acc[32];
  wgmma_fence();
  wgmma<64>(acc, descriptor_a(), descriptor_b(), 0);
  wait_for_wgmma();
}

KL_FAULT(wgmma_with_other_operands) {
  if (!write_operands()) return;
  float acc[32];
  wgmma_fence();
  wgmma<64>(acc, descriptor_a() + (p.faulty && threadIdx.x < kLanes ? 2 : 0), descriptor_b(), 0);
  wait_for_wgmma();
}

KL_FAULT(wgmma_on_other_accumulators) {
  if (!write_operands()) return;
  float acc[2][32];
  wgmma_fence();
  wgmma<64>(acc[0], descriptor_a(), descriptor_b(), 0);
  wgmma<64>(acc[p.faulty && threadIdx.x < kLanes ? 0 : 1], descriptor_a(), descriptor_b(), 0);
  wait_for_wgmma();
}

KL_FAULT(operand_written_in_flight) {
  if (!write_operands()) return;
  float acc[32];
  wgmma_fence();
  wgmma<64>(acc, descriptor_a(), descriptor_b(), 0);
  if (!p.faulty) wait_for_wgmma();
  warpgroup_sync(1);
  if (threadIdx.x == 0) store_shared(barrier_address() + kBOffset, 1);
  wait_for_wgmma();
}

// The bits in which each wrong descriptor differs from a right one.
KL_FAULT(wgmma_descriptor_of_b) {
  if (!write_operands()) return;
  const uint64_t differences[] = {0,        uint64_t{1} << 62, uint64_t{1} << 52, uint64_t{1} << 49, uint64_t{1} << 32,
                                  112 >> 4, uint64_t{1} << 16};
  float acc[32];
  wgmma_fence();
  wgmma<64>(acc, descriptor_a(), descriptor_b() ^ differences[p.faulty], 0);
  wait_for_wgmma();
}

// An operand whose rows are K. It starts within a row, or it or its second slab does not begin where the swizzle does.
KL_FAULT(wgmma_descriptor_of_rows_of_k) {
  if (!write_operands()) return;
  const uint64_t differences[] = {0, 32 >> 4, uint64_t{16 >> 4} << 16, 128 >> 4, uint64_t{1} << 32};
  float acc[64] = {};
  const uint32_t a[4] = {};
  wgmma_fence();
  wgmma_rs(acc, a, wgmma_descriptor_mn_major(barrier_address() + kBOffset, 2048) ^ differences[p.faulty]);
  wait_for_wgmma();
}
