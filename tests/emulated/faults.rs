//! Breaks every rule that the emulator checks: a kernel of `faults.cu` or `faults_sm90.cu` keeps its rule or breaks it, as its parameter
//! says.

use kiln_emulator::{DeviceMemory, Launch, TensorMap, entry, finish, launch, tensor_map};

/// How many seeds a kernel that keeps its rule must pass, and within how many a kernel that breaks it must show each of its errors.
const SOUND_SEEDS: u64 = 10;
const FAULTY_SEEDS: u64 = 40;

/// As in `faults.cuh`: the size of the kernels' allocation, and the index of its only word that is not zero.
const DATA_BYTES: u64 = 64 << 10;
const SET_WORD: u64 = 64;

const SHAPE: Launch = Launch { grid: [2, 1, 1], threads: 256, shared: 48 << 10, cluster: 2, overlap: 1, capability: 90 };

/// A rule, and a way to break it.
struct Fault {
    kernel: &'static str,
    /// The value of `faulty`, from 1 on.
    value: u32,
    /// Threads per CTA.
    threads: u32,
    /// Texts that errors contain. The order of events may decide which one appears.
    errors: &'static [&'static str],
}

const fn fault(kernel: &'static str, errors: &'static [&'static str]) -> Fault {
    variant(kernel, 1, errors)
}

const fn variant(kernel: &'static str, value: u32, errors: &'static [&'static str]) -> Fault {
    Fault { kernel, value, threads: SHAPE.threads, errors }
}

const FAULTS: &[Fault] = &[
    fault("misaligned_load", &["which is not aligned to 4 bytes"]),
    fault("misaligned_ldmatrix", &["ldmatrix at shared memory +0x"]),
    fault("misaligned_cp_async", &["which is not aligned to 16 bytes"]),
    fault("misaligned_atomic", &["atomicAdd at 0x"]),
    fault("beyond_dynamic_shared", &["a store of 1 bytes at shared memory +0xc400, beyond the CTA's +0x400 to +0xc400"]),
    fault("beyond_a_variable", &["beyond the variable before it"]),
    fault("never_written", &["a load reads shared memory +0x400, which was never written"]),
    fault("shared_of_another_cta", &["a store at shared memory of another CTA"]),
    fault("address_of_a_register", &["is no address in the CTA's shared memory"]),
    fault("too_much_shared", &["49152 bytes of dynamic and 204800 of static shared memory; at most 232448 are possible"]),
    fault(
        "race_of_load_and_store",
        &[
            "race: a load reads shared memory +0x400, which warp 0 of the CTA of rank",
            "race: a store writes shared memory +0x400, which warp 1 of the CTA of rank",
        ],
    ),
    fault("race_of_stores", &["which warp 0 of the CTA of rank", "which warp 1 of the CTA of rank"]),
    fault("load_before_cp_async_wait", &["while an asynchronous operation writes it"]),
    fault("store_before_cp_async_wait", &["a store writes shared memory", "while an asynchronous operation writes it"]),
    fault("exit_before_cp_async_wait", &["the CTA ends while an asynchronous operation writes its shared memory"]),
    fault("load_outside_of_allocations", &["a load of 4 bytes reads global memory that is not allocated"]),
    fault("store_outside_of_allocations", &["a store of 4 bytes writes global memory that is not allocated"]),
    fault("cp_async_outside_of_allocations", &["cp.async of 16 bytes reads global memory that is not allocated"]),
    fault("parameter_written", &["a store writes kernel parameters or constants"]),
    fault("store_during_previous_kernel", &["a store writes global memory before wait_for_previous_kernel"]),
    fault("flag_not_reset", &["ld.acquire reads 7 from a flag", "it was not reset"]),
    fault("flag_that_nobody_sets", &["spins on global memory at 0x"]),
    fault("store_not_released", &["race: loads global memory that warp 0 of CTA"]),
    fault(
        "different_collectives",
        &["__ballot_sync with mask 0xffffffff, while lanes", "__syncwarp with mask 0xffffffff, while lanes"],
    ),
    fault("missing_lane", &["__syncwarp, for lanes 0x80000000"]),
    fault(
        "lane_has_exited",
        &["exits, while other lanes of its warp wait for it in __syncwarp", "but lanes 0x80000000 have exited"],
    ),
    fault("mask_without_the_lane", &["__ballot_sync with mask 0xfffffffe, which does not name the calling lane"]),
    fault("shuffle_from_outside_of_the_mask", &["shuffles from lane 16, which mask 0x0000ffff does not name"]),
    fault(
        "barrier_with_other_count",
        &[
            "barrier 1 for 128 threads, at which others have arrived for 256",
            "barrier 1 for 256 threads, at which others have arrived for 128",
        ],
    ),
    fault("barrier_that_does_not_exist", &["barrier 16; there are 16"]),
    fault("barrier_with_two_arrivals", &["arrives twice at barrier 1 before it completes"]),
    fault("barrier_with_parts_of_warps", &["barrier 1 completes with lanes 0x0000ffff of warp 0; whole warps must arrive"]),
    fault("barrier_without_a_warp", &["barrier 1, where 224 of 256 threads have arrived, and 32 have exited"]),
    Fault {
        threads: 128,
        ..fault("barrier_of_a_larger_cta", &["barrier 1 for 256 threads; the CTA has 128, and a barrier counts whole warps"])
    },
    fault("mbarrier_not_initialized", &["mbarrier.arrive: there is no initialized mbarrier at +0x400"]),
    fault("mbarrier_not_fenced", &["bulk copy: mbarrier +0x400 was initialized without fence_mbarrier_init"]),
    fault(
        "mbarrier_of_a_peer_not_announced",
        &["there is no initialized mbarrier at", "was initialized, but no cluster barrier says so"],
    ),
    fault("mbarrier_without_arrivals", &["mbarrier.init +0x400 with 0 arrivals"]),
    fault("mbarrier_misaligned", &["mbarrier.init at shared memory +0x404, which is not aligned to 8 bytes"]),
    fault("mbarrier_initialized_twice", &["there is an mbarrier at +0x400 already"]),
    fault("mbarrier_with_too_many_arrivals", &["has had all 1 arrivals of phase 0; 16 bytes are missing"]),
    fault("mbarrier_with_bytes_that_never_come", &["mbarrier +0x400, phase parity 0: 0 of 1 arrivals and 16 bytes are missing"]),
    fault("mbarrier_with_too_many_bytes", &["expects 1048576 bytes; it can count 1048575"]),
    fault("mbarrier_parity", &["the parity is 2"]),
    fault("tma_destination", &["which is not aligned to 128 bytes"]),
    fault("tma_beyond_shared", &["of 1024 bytes at shared memory +0xc380, beyond the CTA's"]),
    fault("tma_rank", &["TMA load: the tensor map has rank 2"]),
    fault("tma_map_misaligned", &["TMA load: the tensor map is not aligned to 64 bytes"]),
    fault("tma_to_a_rank_that_does_not_exist", &["rank 2 of a cluster of 2 CTAs"]),
    fault("bulk_size", &["bulk copy of 24 bytes from"]),
    fault("bulk_load_outside_of_allocations", &["bulk copy of 1024 bytes reads global memory that is not allocated"]),
    fault(
        "load_before_tma_load",
        &["while an asynchronous operation writes it", "which an asynchronous copy wrote, without a barrier"],
    ),
    fault("tma_load_onto_another", &["which a TMA load of CTA", "which an asynchronous copy wrote, without a barrier"]),
    fault("tma_store_not_fenced", &["wrote without fence_proxy_async"]),
    fault("tma_store_not_waited_for", &["has not waited until its TMA stores have read shared memory"]),
    fault("store_during_tma_store", &["while an asynchronous operation reads it", "which a TMA store read, without a barrier"]),
    fault("rank_that_does_not_exist", &["rank 2 of a cluster of 2 CTAs"]),
    fault("load_from_a_cta_that_has_ended", &["the CTA of rank 1 has ended; its shared memory is gone"]),
    fault(
        "store_to_a_cta_that_ends",
        &["the CTA ends while an asynchronous operation writes its shared memory", "the CTA of rank 1 has ended"],
    ),
    fault(
        "arrival_at_a_cta_that_ends",
        &["the CTA ends without having waited for other CTAs of the cluster", "the CTA of rank 1 has ended"],
    ),
    fault("cluster_barrier_with_two_arrivals", &["by a thread that has not waited since its last arrival"]),
    fault("cluster_barrier_without_arrival", &["barrier.cluster.wait by a thread that has not arrived"]),
    fault(
        "more_registers_than_there_are",
        &["setmaxnreg.inc 256: the warp has 248 registers per thread, and 0 are free in the CTA"],
    ),
    fault(
        "registers_of_a_warpgroup_differ",
        &[
            "setmaxnreg 240, but another warp of the warpgroup has asked for 232",
            "setmaxnreg 232, but another warp of the warpgroup has asked for 240",
        ],
    ),
    fault("registers_increased_to_less", &["setmaxnreg.inc 24 of a warp that has 248"]),
    fault("registers_in_other_units", &["setmaxnreg 100: a multiple of 8 from 24 to 256 is allowed"]),
    variant("accumulator_used_in_flight", 1, &["an accumulator is read while a wgmma on it is in flight"]),
    variant("accumulator_used_in_flight", 2, &["an accumulator is written while a wgmma on it is in flight"]),
    variant("accumulator_used_in_flight", 3, &["accumulator 4 was written while a wgmma on it was in flight"]),
    variant("register_of_a_written_in_flight", 1, &["a register of A is written while a wgmma that reads it is in flight"]),
    variant("register_of_a_written_in_flight", 2, &["registers of A were written while a wgmma that reads them was in flight"]),
    fault("wgmma_not_fenced", &["wgmma on registers that the thread could access, without wgmma_fence before it"]),
    fault(
        "wgmma_of_registers_not_fenced",
        &["wgmma with A in registers that the thread could access, without wgmma_fence before it"],
    ),
    fault("wgmma_of_another_width_in_flight", &["wgmma with 32 columns on accumulators of one with 64 that is in flight"]),
    fault("wgmma_of_unfenced_stores", &["wrote without fence_proxy_async"]),
    fault("wgmma_not_waited_for", &["has not waited for its wgmma"]),
    fault("wgmma_without_a_warp", &["MMA 0 of warpgroup 0, which 96 of 128 threads have issued"]),
    fault("wgmma_with_other_operands", &["wgmma with other operands than the rest of the warpgroup"]),
    fault("wgmma_on_other_accumulators", &["wgmma on other accumulators than the rest of the warpgroup"]),
    fault("operand_written_in_flight", &["while an asynchronous operation reads it", "which a wgmma read, without a barrier"]),
    Fault { threads: 160, ..fault("wgmma_of_a_part_of_a_warpgroup", &["wgmma by warp 4, which is in no whole warpgroup"]) },
    variant("wgmma_descriptor_of_b", 1, &["has swizzle mode 0, not 128 bytes (1)"]),
    variant("wgmma_descriptor_of_b", 2, &["has unused bits"]),
    variant("wgmma_descriptor_of_b", 3, &["has a base offset"]),
    variant("wgmma_descriptor_of_b", 4, &["has a stride of 1040 bytes, which is not a number of rows"]),
    variant("wgmma_descriptor_of_b", 5, &["and crosses a row"]),
    variant("wgmma_descriptor_of_b", 6, &["has a leading offset of 0 bytes, not 16"]),
    variant("wgmma_descriptor_of_rows_of_k", 1, &["within a row"]),
    variant("wgmma_descriptor_of_rows_of_k", 2, &["the descriptor of B has a leading offset of 2064 bytes"]),
    variant("wgmma_descriptor_of_rows_of_k", 3, &["which is not where the swizzle begins"]),
    variant("wgmma_descriptor_of_rows_of_k", 4, &["has a stride of 1040 bytes; the swizzle repeats every 1024"]),
];

/// The device memory that the kernels work on.
struct Device {
    memory: DeviceMemory,
    data: u64,
}

impl Device {
    fn new() -> Self {
        let memory = DeviceMemory::default();
        let data = memory.allocate(DATA_BYTES).unwrap();
        Self { memory, data }
    }

    /// Runs a kernel after another one that it may overlap with.
    fn run(&self, kernel: &str, faulty: u32, shape: &Launch, seed: u64) -> Result<(), String> {
        self.memory.fill(self.data, 0, DATA_BYTES)?;
        self.memory.write(self.data + 4 * SET_WORD, &7_u32.to_ne_bytes())?;
        let entry = entry("faults", kernel).or_else(|| entry("faults_sm90", kernel));
        let entry = entry.unwrap_or_else(|| panic!("no kernel is called {kernel}"));
        let (size, pitch, tile) = ([64, 64, 1], [128, 0], [64, 8, 1]);
        let map = tensor_map(&TensorMap { address: self.data, element_bytes: 2, rank: 2, size, pitch, tile, swizzle: 128 })?;
        let words = map.into_iter().chain([self.data, faulty.into()]);
        let mut params: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        params.resize(entry.param_bytes as usize, 0);
        launch(entry, shape, &params, seed)?;
        finish()
    }

    /// Describes what is wrong with the emulator's reports on a rule.
    fn check(&self, fault: &Fault) -> Option<String> {
        let Fault { kernel, value, threads, errors } = *fault;
        let shape = Launch { threads, ..SHAPE };
        if let Some((seed, error)) = (0..SOUND_SEEDS).find_map(|seed| Some((seed, self.run(kernel, 0, &shape, seed).err()?))) {
            return Some(format!("{kernel} keeps the rule, but with seed {seed}: {error}"));
        }
        let mut unseen: Vec<&str> = errors.to_vec();
        for seed in 0..FAULTY_SEEDS {
            let Err(error) = self.run(kernel, value, &shape, seed) else { continue };
            if !errors.iter().any(|text| error.contains(text)) || !error.contains(kernel) {
                return Some(format!("{kernel} {value}, with seed {seed}, ends with another error: {error}"));
            }
            println!("seed {seed}: {error}");
            unseen.retain(|text| !error.contains(text));
            if unseen.is_empty() {
                return None;
            }
        }
        Some(format!("{kernel} {value} never ends with {unseen:?}"))
    }
}

#[test]
fn every_rule_is_enforced() {
    needs_emulator!();
    let device = Device::new();
    let wrong: Vec<String> = FAULTS.iter().filter_map(|fault| device.check(fault)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // Every kernel is in the table.
    let sources = [include_str!("faults.cu"), include_str!("faults_sm90.cu")];
    let kernels = sources.iter().flat_map(|text| text.lines()).filter_map(|line| line.strip_prefix("KL_FAULT("));
    for kernel in kernels.filter_map(|rest| rest.split(')').next()) {
        assert!(FAULTS.iter().any(|fault| fault.kernel == kernel), "{kernel} is not in the table");
    }
}

/// Launches that the CUDA driver refuses, or that the emulator cannot run.
#[test]
fn a_launch_that_is_not_possible_is_refused() {
    needs_emulator!();
    let device = Device::new();
    let kernel = "misaligned_load";
    let shapes = [
        (Launch { grid: [2, 0, 1], ..SHAPE }, "a grid of 2 x 0 x 1"),
        (Launch { threads: 0, ..SHAPE }, "0 threads"),
        (Launch { threads: 40, ..SHAPE }, "40 threads; its launch bounds allow 256, in whole warps"),
        (Launch { threads: 288, ..SHAPE }, "288 threads; its launch bounds allow 256"),
        (Launch { grid: [3, 1, 1], ..SHAPE }, "a grid of 3 in clusters of 2"),
        (Launch { grid: [16, 1, 1], cluster: 16, ..SHAPE }, "more than 64 warps in a cluster"),
        (Launch { shared: 232_449, ..SHAPE }, "232449 bytes of dynamic shared memory; at most 232448 are possible"),
    ];
    for (shape, message) in &shapes {
        let error = device.run(kernel, 0, shape, 0).unwrap_err();
        assert!(error.contains(&format!("{kernel}: launched with {message}")), "{error}");
        device.run(kernel, 0, &SHAPE, 0).unwrap();
    }
}
