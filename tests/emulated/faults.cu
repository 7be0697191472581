// One kernel for each rule that the emulator checks in memory, warps and barriers. A kernel keeps its rule unless `faulty` is set.
// faults.rs lists the error that each kernel must end with.
#include <faults.cuh>

// ------------------------------------------------------------------------------------------------------------------ alignment

KL_FAULT(misaligned_load) {
  if (threadIdx.x == 0) *reinterpret_cast<const volatile uint32_t*>(p.data + p.faulty);
}

KL_FAULT(misaligned_ldmatrix) {
  uint32_t r[4];
  ldmatrix_x4(r, shared_address(dynamic_shared) + threadIdx.x * 16 + 8 * p.faulty);
}

KL_FAULT(misaligned_cp_async) {
  cp_async(shared_address(dynamic_shared) + threadIdx.x * 16, reinterpret_cast<const void*>(p.data + 8 * p.faulty), true);
  cp_async_commit();
  cp_async_wait<0>();
}

KL_FAULT(misaligned_atomic) {
  wait_for_previous_kernel();
  atomicAdd(reinterpret_cast<unsigned*>(p.data + 2 * p.faulty), 1);
}

// --------------------------------------------------------------------------------------------------------------- shared memory

KL_FAULT(beyond_dynamic_shared) {
  if (threadIdx.x == 0) dynamic_shared[kSharedBytes - 1 + p.faulty] = 0;
}

KL_FAULT(beyond_a_variable) {
  KL_SHARED(uint32_t, first, [kLanes]);
  KL_SHARED(uint32_t, second, [kLanes]);
  if (threadIdx.x == 0) second[0] = 0, first[kLanes - 1 + p.faulty] = 0;
}

KL_FAULT(never_written) {
  if (threadIdx.x == 0) shared_words()[p.faulty] = 0;
  __syncthreads();
  shared_words()[0];
}

KL_FAULT(shared_of_another_cta) {
  KL_SHARED(uint32_t, word, );
  uint32_t** pointer = reinterpret_cast<uint32_t**>(p.data);
  wait_for_previous_kernel();
  if (cluster_rank() == 0 && threadIdx.x == 0) *pointer = &word;
  cluster_sync();
  if (cluster_rank() == p.faulty && threadIdx.x == 0) **pointer = 0;
  cluster_sync();
}

KL_FAULT(address_of_a_register) {
  uint32_t local = 0;
  shared_address(p.faulty ? static_cast<const void*>(&local) : dynamic_shared);
}

KL_FAULT(too_much_shared) {
  if (p.faulty) {
    KL_SHARED(unsigned char, large, [200 << 10]);
    large[0] = 0;
  }
}

// ------------------------------------------------------------------------------------------------------------------------ races

KL_FAULT(race_of_load_and_store) {
  if (threadIdx.x == kLanes) shared_words()[0] = 0;
  __syncthreads();
  if (threadIdx.x == 0) shared_words()[0] = 1;
  if (!p.faulty) __syncthreads();
  if (threadIdx.x == kLanes) shared_words()[0];
}

KL_FAULT(race_of_stores) {
  if (threadIdx.x == 0) shared_words()[0] = 1;
  if (!p.faulty) __syncthreads();
  if (threadIdx.x == kLanes) shared_words()[0] = 2;
}

KL_FAULT(load_before_cp_async_wait) {
  cp_async(shared_address(dynamic_shared) + threadIdx.x * 16, reinterpret_cast<const void*>(p.data), true);
  cp_async_commit();
  if (!p.faulty) cp_async_wait<0>();
  shared_words()[threadIdx.x * 4];
  cp_async_wait<0>();
}

KL_FAULT(store_before_cp_async_wait) {
  cp_async(shared_address(dynamic_shared) + threadIdx.x * 16, reinterpret_cast<const void*>(p.data), false);
  cp_async_commit();
  if (!p.faulty) cp_async_wait<0>();
  shared_words()[threadIdx.x * 4] = 0;
  cp_async_wait<0>();
}

KL_FAULT(exit_before_cp_async_wait) {
  cp_async(shared_address(dynamic_shared) + threadIdx.x * 16, reinterpret_cast<const void*>(p.data), true);
  cp_async_commit();
  if (!p.faulty) cp_async_wait<0>();
}

// ---------------------------------------------------------------------------------------------------------------- global memory

KL_FAULT(load_outside_of_allocations) { *reinterpret_cast<const volatile uint32_t*>(p.data + kDataBytes - 4 + 4 * p.faulty); }

KL_FAULT(store_outside_of_allocations) {
  wait_for_previous_kernel();
  *reinterpret_cast<volatile uint32_t*>(p.data - 4 + (p.faulty ? 0 : 4)) = 0;
}

KL_FAULT(cp_async_outside_of_allocations) {
  const uint64_t from = p.data + kDataBytes - 16 + 16 * p.faulty;
  cp_async(shared_address(dynamic_shared) + threadIdx.x * 16, reinterpret_cast<const void*>(from), true);
  cp_async_commit();
  cp_async_wait<0>();
}

KL_FAULT(parameter_written) {
  wait_for_previous_kernel();
  volatile uint32_t* parameter = const_cast<uint32_t*>(&p.faulty);
  if (*parameter) *parameter = 0;
}

KL_FAULT(store_during_previous_kernel) {
  if (!p.faulty) wait_for_previous_kernel();
  *reinterpret_cast<volatile uint32_t*>(p.data) = 0;
}

KL_FAULT(flag_not_reset) { load_acquire(reinterpret_cast<const uint32_t*>(p.data) + (p.faulty ? kSetWord : 0)); }

KL_FAULT(flag_that_nobody_sets) {
  wait_for_previous_kernel();
  uint32_t* flag = reinterpret_cast<uint32_t*>(p.data) + cluster_rank();
  if (!p.faulty && threadIdx.x == kLanes) store_release(flag, 1);
  while (threadIdx.x == 0 && load_acquire(flag) == 0) {
  }
}

KL_FAULT(store_not_released) {
  wait_for_previous_kernel();
  uint32_t* word = reinterpret_cast<uint32_t*>(p.data) + blockIdx.x * 4;
  if (threadIdx.x == 0) __stcg(word, 1u);
  if (!p.faulty) __syncthreads();
  if (threadIdx.x == kLanes) __ldcg(word);
}

// ------------------------------------------------------------------------------------------------------- collectives of a warp

KL_FAULT(different_collectives) {
  if (!p.faulty || threadIdx.x % kLanes < 16) __syncwarp();
  if (!p.faulty || threadIdx.x % kLanes >= 16) __ballot_sync(kAllLanes, 1);
}

KL_FAULT(missing_lane) {
  if (!p.faulty || threadIdx.x % kLanes != 31) __syncwarp();
  __syncthreads();
}

KL_FAULT(lane_has_exited) {
  if (p.faulty && threadIdx.x % kLanes == 31) return;
  __syncwarp();
}

KL_FAULT(mask_without_the_lane) { __ballot_sync(p.faulty ? kAllLanes - 1 : kAllLanes, 1); }

KL_FAULT(shuffle_from_outside_of_the_mask) {
  if (threadIdx.x % kLanes < 16) __shfl_xor_sync(0xffff, threadIdx.x, 8 << p.faulty);
}

// ------------------------------------------------------------------------------------------------------------ barriers of a CTA

KL_FAULT(barrier_with_other_count) {
  if (p.faulty && threadIdx.x >= kWarpgroup) {
    named_barrier_sync(1);
  } else {
    warpgroup_sync(1 + threadIdx.x / kWarpgroup);
  }
}

KL_FAULT(barrier_that_does_not_exist) { named_barrier_sync(15 + p.faulty); }

KL_FAULT(barrier_with_two_arrivals) {
  if (threadIdx.x >= kLanes) {
    named_barrier_sync(1);
  } else {
    named_barrier_arrive(1);
    if (p.faulty) named_barrier_arrive(1);
  }
}

KL_FAULT(barrier_with_parts_of_warps) {
  const bool half = p.faulty ? threadIdx.x % kLanes < 16 : threadIdx.x < kWarpgroup;
  if (half) warpgroup_sync(1);
}

KL_FAULT(barrier_without_a_warp) {
  if (!p.faulty || threadIdx.x >= kLanes) named_barrier_sync(1);
}

// Waits for more threads than the CTA has.
KL_FAULT(barrier_of_a_larger_cta) {
  if (p.faulty) {
    named_barrier_sync(1);
  } else {
    __syncthreads();
  }
}
