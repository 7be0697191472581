//! The kernel table from `kernels/kernels.def`, and the one function that launches kernels.
#![allow(unsafe_code)]

use super::abi;
use super::arch::Arch;
use super::driver::{Driver, Function, Launch, MapSpec, Module, Stream};
use super::timeline::Timeline;
use crate::error::{Error, Result};
use crate::trace;
use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::path::PathBuf;
use std::rc::Rc;

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
include!(concat!(env!("OUT_DIR"), "/table.rs"));

/// A parameter struct of `abi.h`.
///
/// # Safety
/// Every byte of a value is initialized: the struct states its padding.
pub unsafe trait Params: Copy {}

/// A kernel's row in the table.
struct Row {
    symbol: &'static str,
    file: &'static str,
    arch: Arch,
    params: usize,
    threads: u32,
    shared: u32,
    cluster: Option<u32>,
    tile: [u32; 2],
}

impl Kernel {
    const fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }

    /// The name of its entry point.
    pub const fn symbol(self) -> &'static str {
        self.row().symbol
    }

    /// The file in `kernels/entry/` that has the kernel, without its extension.
    pub const fn file(self) -> &'static str {
        self.row().file
    }

    /// The CTAs of a cluster.
    pub fn cluster(self) -> u32 {
        self.row().cluster.unwrap_or(1)
    }

    /// Bytes of dynamic shared memory of a CTA.
    pub(super) const fn shared(self) -> u32 {
        self.row().shared
    }

    /// Rows and columns of the tile that a CTA computes. Zero for kernels that are not instantiated from a tile template.
    pub(super) const fn tile(self) -> [u32; 2] {
        self.row().tile
    }

    /// The GPUs that the kernel is for.
    pub const fn arch(self) -> Arch {
        self.row().arch
    }

    /// Whether the kernel was written without a GPU to run it on. It may be chosen after a self-test on this GPU has passed.
    pub const fn is_gated(self) -> bool {
        self.arch().is_gated()
    }
}

/// The fat binary of a kernel file.
pub type Images<'a> = &'a dyn Fn(&'static str) -> Result<Cow<'static, [u8]>>;

/// A file of kernels that this GPU can run.
struct KernelFile {
    /// Borrowed if it is part of the program.
    image: Cow<'static, [u8]>,
    /// Loaded once one of the file's kernels is needed.
    module: Cell<Option<Module>>,
}

/// The kernels of this GPU and the stream they run on. A file is loaded when the first of its kernels is needed. klein in bf16 needs
/// half the files.
pub struct Kernels {
    /// Times the kernels, if a trace was being recorded when they were opened.
    timeline: Option<Timeline>,
    driver: Rc<dyn Driver>,
    /// Kernel files by name, in the order of [`Kernel::ALL`].
    files: Vec<(&'static str, KernelFile)>,
    /// The function of each kernel in [`Kernel::ALL`], once it is needed.
    functions: Vec<Cell<Option<Function>>>,
    maps: RefCell<HashMap<MapSpec, abi::KlTensorMap>>,
    /// How often each kernel was launched, by its place in [`Kernel::ALL`].
    launched: Vec<Cell<u64>>,
    /// Whether gated kernels may be chosen.
    gate_open: bool,
    /// Whether launches only load their kernels.
    preloading: Cell<bool>,
    stream: Stream,
    /// The hash of launches so far, while they are hashed.
    hash: Cell<Option<u64>>,
}

impl Kernels {
    /// Finds the files for this GPU. All files of an architecture are compiled for the same GPUs, so only the first one is loaded to learn
    /// whether this GPU is among them.
    pub fn open(driver: Rc<dyn Driver>, images: Images<'_>, stream: Stream) -> Result<Self> {
        let _span = trace::span("open kernels");
        let capability = driver.device().capability;
        let mut kernels = Self {
            timeline: Timeline::new(driver.clone(), stream),
            driver,
            files: Vec::new(),
            functions: vec![Cell::new(None); Kernel::ALL.len()],
            maps: RefCell::default(),
            launched: vec![Cell::new(0); Kernel::ALL.len()],
            gate_open: false,
            preloading: Cell::new(false),
            stream,
            hash: Cell::default(),
        };
        // Whether this build has the files of an architecture.
        let mut built = HashMap::new();
        for kernel in Kernel::ALL {
            let (name, arch) = (kernel.file(), kernel.arch());
            let is_known = built.get(&arch) == Some(&false) || kernels.files.iter().any(|(file, _)| *file == name);
            if is_known || !arch.runs_on(capability) {
                continue;
            }
            let file = images(name).and_then(|image| {
                let is_first = !built.contains_key(&arch);
                let module = is_first.then(|| load(&*kernels.driver, name, &image)).transpose()?;
                Ok(KernelFile { image, module: Cell::new(module) })
            });
            match file {
                // The file was built for other GPUs only. Every op has a kernel that runs anywhere.
                Err(Error::NoGpu { .. }) if arch != Arch::Portable => _ = built.insert(arch, false),
                file => {
                    kernels.files.push((name, file?));
                    built.insert(arch, true);
                }
            }
        }
        Ok(kernels)
    }

    /// The function of a kernel. Loads the kernel's file if none of its kernels was needed before.
    fn function(&self, kernel: Kernel) -> Result<Function> {
        let found = &self.functions[kernel as usize];
        if let Some(function) = found.get() {
            return Ok(function);
        }
        let &Row { symbol, params, shared, .. } = kernel.row();
        let Some((name, file)) = self.file(kernel) else {
            return Err(Error::Op { op: symbol, what: "this GPU cannot run it".into() });
        };
        let module = match file.module.get() {
            Some(module) => module,
            None => load(&*self.driver, name, &file.image)?,
        };
        file.module.set(Some(module));
        let function = self.driver.function(module, symbol, params, shared)?;
        found.set(Some(function));
        Ok(function)
    }

    /// The file of a kernel, if this GPU can run it.
    fn file(&self, kernel: Kernel) -> Option<(&'static str, &KernelFile)> {
        let &Row { file: name, shared, .. } = kernel.row();
        // Large tiles need GPUs with enough shared memory. Every op has a kernel that runs anywhere.
        let fits = shared <= self.driver.device().shared;
        self.files.iter().find(|(file, _)| fits && *file == name).map(|(file, found)| (*file, found))
    }

    /// A hash of the kernel images for this GPU, which identifies the build. Only self-tests need it, so its megabytes are hashed on
    /// demand.
    pub fn fingerprint(&self) -> u64 {
        self.files.iter().fold(0, |state, (_, file)| hash(state, &file.image))
    }

    /// Whether a kernel may be chosen on this GPU.
    pub fn has(&self, kernel: Kernel) -> bool {
        self.can_run(kernel) && (self.gate_open || !kernel.is_gated())
    }

    /// Whether a kernel can be launched on this GPU.
    pub fn can_run(&self, kernel: Kernel) -> bool {
        self.file(kernel).is_some()
    }

    /// Allows or forbids gated kernels, which their authors never ran on hardware. They are forbidden by default.
    pub fn enable_gated(&mut self, enabled: bool) {
        self.gate_open = enabled;
    }

    /// Sets whether launches only load their kernels from now on.
    pub fn set_preloading(&self, preloading: bool) {
        self.preloading.set(preloading);
    }

    /// Starts hashing launches.
    pub fn begin_hash(&self) {
        self.hash.set(Some(0));
    }

    /// The hash of all launches since [`Self::begin_hash`]: kernels, grids and parameters, in order.
    pub fn end_hash(&self) -> u64 {
        self.hash.take().unwrap_or_default()
    }

    /// Queues a kernel launch.
    pub fn launch<P: Params>(&self, kernel: Kernel, grid: [u32; 3], params: &P) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        let &Row { symbol, params: size, threads, shared, cluster, .. } = kernel.row();
        assert_eq!(size, size_of::<P>(), "{kernel:?} takes other parameters");
        let function = self.function(kernel)?;
        if self.preloading.get() {
            return Ok(());
        }
        // SAFETY: `Params` promises that every byte is initialized.
        let bytes = unsafe { std::slice::from_raw_parts(std::ptr::from_ref(params).cast::<u8>(), size) };
        if let Some(before) = self.hash.get() {
            let sides = grid.map(u64::from).into_iter().fold(kernel as u64, mix);
            self.hash.set(Some(hash(mix(before, sides), bytes)));
        }
        let launched = &self.launched[kernel as usize];
        launched.set(launched.get() + 1);
        // Kernels that overlap cannot be timed one by one.
        let overlap = cluster.is_some() && self.timeline.is_none();
        let launch = Launch { function, grid, threads, shared, cluster: kernel.cluster(), overlap };
        let queue = || {
            self.driver.launch(self.stream, &launch, bytes).map_err(|error| match error {
                Error::Device { status, .. } => Error::Device { call: symbol, status },
                other => other,
            })
        };
        match &self.timeline {
            Some(timeline) => timeline.time(symbol, grid, queue),
            None => queue(),
        }
    }

    /// The times of the kernels, if they are traced.
    pub fn timeline(&self) -> Option<&Timeline> {
        self.timeline.as_ref()
    }

    /// A tensor map, encoded once. It depends only on its description, so the cache never becomes stale. Addresses are fixed, so after one
    /// step the cache holds all maps.
    pub fn tensor_map(&self, spec: MapSpec) -> Result<abi::KlTensorMap> {
        if let Some(map) = self.maps.borrow().get(&spec) {
            return Ok(*map);
        }
        let map = abi::KlTensorMap { opaque: self.driver.tensor_map(&spec)? };
        self.maps.borrow_mut().insert(spec, map);
        Ok(map)
    }

    /// How often each kernel that this GPU can run was launched or captured.
    pub fn launched(&self) -> impl Iterator<Item = (Kernel, u64)> {
        Kernel::ALL.iter().copied().zip(self.launched.iter().map(Cell::get)).filter(|(kernel, _)| self.has(*kernel))
    }
}

/// Loads a file of kernels.
fn load(driver: &dyn Driver, name: &'static str, image: &[u8]) -> Result<Module> {
    let _span = trace::span_of("load module", || name.into());
    driver.load(image)
}

/// Continues a hash with a word.
const fn mix(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

/// Continues a hash with the bytes of an image or of parameters, eight at a time: images have megabytes.
fn hash(seed: u64, image: &[u8]) -> u64 {
    let (words, rest) = image.as_chunks();
    let hash = words.iter().fold(mix(seed, image.len() as u64), |hash, word| mix(hash, u64::from_le_bytes(*word)));
    rest.iter().fold(hash, |hash, byte| mix(hash, u64::from(*byte)))
}

impl Drop for Kernels {
    fn drop(&mut self) {
        self.timeline = None;
        self.files.iter().filter_map(|(_, file)| file.module.get()).for_each(|module| self.driver.unload(module));
    }
}

/// The fat binaries in this program, or in the folder that `KILN_KERNEL_DIR` names.
pub fn built_in(file: &'static str) -> Result<Cow<'static, [u8]>> {
    if let Some(folder) = std::env::var_os("KILN_KERNEL_DIR") {
        let path = PathBuf::from(folder).join(format!("{file}.fatbin"));
        return std::fs::read(&path).map(Cow::Owned).map_err(|e| Error::read(&path, e));
    }
    IMAGES.iter().find(|(name, _)| *name == file).map(|(_, bytes)| Cow::Borrowed(*bytes)).ok_or_else(|| Error::NoGpu {
        what: "this kiln was built without GPU kernels".into(),
        hint: "install CUDA 13 or run tools/get_nvcc, then build kiln again".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_named_after_an_architecture_runs_where_its_instructions_are() {
        let on = |kernel: Kernel| [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)].map(|c| kernel.arch().runs_on(c));
        assert_eq!(on(Kernel::Map), [true; 5]);
        assert_eq!(on(Kernel::SelftestClusterSm90), [false, false, true, false, false]);
        assert_eq!(on(Kernel::GemmFp8Sm89_128x128), [false, true, true, true, true]);
        assert_eq!(on(Kernel::SelftestMmaNvf4), [false, false, false, false, true]);
    }

    #[test]
    fn every_byte_of_an_image_counts() {
        let image: Vec<u8> = (0..19).collect();
        let whole = hash(0, &image);
        for i in 0..image.len() {
            let mut other = image.clone();
            other[i] ^= 1;
            assert_ne!(hash(0, &other), whole, "byte {i}");
        }
        assert_ne!(hash(0, &image[..18]), whole);
        assert_ne!(hash(1, &image), whole);
    }
    #[test]
    fn rows_state_cluster_and_overlap() {
        let [plain, hopper] = [Kernel::Map, Kernel::SelftestClusterSm90].map(|kernel| (kernel.cluster(), kernel.row().cluster));
        assert_eq!([plain, hopper], [(1, None), (2, Some(2))]);
    }

    /// Threads and dynamic shared memory, which rows do not state. The emulator compares both with what templates compute.
    #[test]
    fn threads_and_shared_memory_follow_from_the_row() {
        for (kernel, threads, shared) in [
            (Kernel::Map, abi::KL_POINTWISE_THREADS, 0),
            (Kernel::NormConvNarrow, abi::KL_NARROW_THREADS, abi::KL_NARROW_SHARED),
            (Kernel::GemmBf16Sm90_192x192, 512, abi::KL_SM90_SHARED_LIMIT),
            (Kernel::GemmFp8Sm120_128x128, 384, abi::KL_SM120_SHARED_LIMIT),
            (Kernel::GemmBf16Sm80_128x128, 128, 49_152),
            (Kernel::GemmFp8Sm89_128x128, 256, 98_304),
            (Kernel::AttentionBf16Sm90Causal, 384, abi::KL_SM90_SHARED_LIMIT),
            (Kernel::AttentionBf16Sm80_8warps, 256, 98_304),
            (Kernel::AttentionFp8Sm120MaxFree, 128, 40_960),
            (Kernel::AttentionWideBf16Sm80_32x512, 128, 100_736),
            (Kernel::LayerNormE4m3_6144, 256, 0),
        ] {
            assert_eq!((kernel.row().threads, kernel.shared()), (threads, shared), "{kernel:?}");
        }
    }
}
