//! The kernels: one row each in a table, loaded all at once, launched by one function.
#![allow(unsafe_code)]

use super::abi;
use super::driver::{Driver, Function, Launch, Module, Stream};
use crate::error::{Error, Result};
use std::borrow::Cow;
use std::cell::Cell;
use std::path::PathBuf;
use std::rc::Rc;

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// A parameter struct of `abi.h`.
///
/// # Safety
/// Every byte of a value is initialised: the struct states its padding.
pub unsafe trait Params: Copy {}

/// A kernel's row in the table.
struct Row {
    symbol: &'static str,
    file: &'static str,
    threads: u32,
    params: usize,
}

macro_rules! kernels {
    ($($name:ident = $file:literal $symbol:literal ($params:ident) $threads:expr;)*) => {
        /// A kernel.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub enum Kernel { $($name),* }

        impl Kernel {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            const fn row(self) -> Row {
                match self {
                    $(Self::$name => Row { symbol: $symbol, file: $file, threads: $threads, params: size_of::<abi::$params>() }),*
                }
            }
        }
    };
}

kernels! {
    Map = "pointwise" "kl_map" (KlMap) abi::KL_POINTWISE_THREADS;
    Embed = "pointwise" "kl_embed" (KlEmbed) abi::KL_POINTWISE_THREADS;
    Patchify = "pointwise" "kl_patchify" (KlPatch) abi::KL_POINTWISE_THREADS;
    Unpatchify = "pointwise" "kl_unpatchify" (KlPatch) abi::KL_POINTWISE_THREADS;
    Euler = "pointwise" "kl_euler" (KlEuler) abi::KL_POINTWISE_THREADS;
    Guidance = "pointwise" "kl_guidance" (KlGuidance) abi::KL_POINTWISE_THREADS;
    Pixels = "pointwise" "kl_pixels" (KlPixels) abi::KL_POINTWISE_THREADS;
    Count = "pointwise" "kl_count" (KlCount) abi::KL_POINTWISE_THREADS;
    CountFinish = "pointwise" "kl_count_finish" (KlCount) 32;
    RmsNorm = "norm" "kl_rms_norm" (KlRmsNorm) abi::KL_NORM_THREADS;
    LayerNorm = "norm" "kl_layer_norm" (KlLayerNorm) abi::KL_NORM_THREADS;
    HeadNorm = "norm" "kl_head_norm" (KlHeadNorm) abi::KL_NORM_THREADS;
    GroupStats = "norm" "kl_group_stats" (KlGroupStats) abi::KL_GROUP_THREADS;
    GroupStatsFinish = "norm" "kl_group_stats_finish" (KlGroupStats) 32;
    GroupNorm = "norm" "kl_group_norm" (KlGroupNorm) abi::KL_GROUP_THREADS;
    NaiveProduct = "naive" "kl_naive_product" (KlProduct) abi::KL_NAIVE_THREADS;
    NaiveConv = "naive" "kl_naive_conv" (KlConv) abi::KL_NAIVE_THREADS;
    NaiveAttention = "naive" "kl_naive_attention" (KlAttention) abi::KL_ATTENTION_WARPS * 32;
}

macro_rules! params {
    ($($name:ident)*) => {$(
        // SAFETY: the fields of the struct add up to its size, as the assertion beside it in `abi.h` and bindgen's say.
        unsafe impl Params for abi::$name {}
    )*};
}

params! {
    KlMap KlEmbed KlPatch KlEuler KlGuidance KlPixels KlCount KlRmsNorm KlLayerNorm KlHeadNorm KlGroupStats KlGroupNorm
    KlProduct KlConv KlAttention
}

impl Kernel {
    /// Its name in the kernel files.
    pub const fn symbol(self) -> &'static str {
        self.row().symbol
    }

    /// Threads of a block.
    pub const fn threads(self) -> u32 {
        self.row().threads
    }
}

/// The fat binary of a kernel file.
pub type Images<'a> = &'a dyn Fn(&'static str) -> Result<Cow<'static, [u8]>>;

/// The loaded kernels and the stream they run on.
pub struct Kernels {
    driver: Rc<dyn Driver>,
    modules: Vec<Module>,
    functions: Vec<Function>,
    /// Launches of each kernel, by its place in [`Kernel::ALL`].
    launched: Vec<Cell<u64>>,
    stream: Stream,
}

impl Kernels {
    /// Loads every module and finds every kernel, so that one that is missing is found at once and not at step three.
    pub fn load(driver: Rc<dyn Driver>, images: Images<'_>, stream: Stream) -> Result<Self> {
        let mut kernels = Self { driver, modules: Vec::new(), functions: Vec::new(), launched: Vec::new(), stream };
        kernels.launched.resize(Kernel::ALL.len(), Cell::new(0));
        let mut files: Vec<(&str, Module)> = Vec::new();
        for kernel in Kernel::ALL {
            let Row { symbol, file, params, .. } = kernel.row();
            let module = match files.iter().find(|(name, _)| *name == file) {
                Some((_, module)) => *module,
                None => {
                    let module = kernels.driver.load(&images(file)?)?;
                    kernels.modules.push(module);
                    files.push((file, module));
                    module
                }
            };
            kernels.functions.push(kernels.driver.function(module, symbol, params, 0)?);
        }
        Ok(kernels)
    }

    /// Queues a kernel.
    pub fn launch<P: Params>(&self, kernel: Kernel, grid: [u32; 3], params: &P) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        let Row { threads, params: size, .. } = kernel.row();
        assert_eq!(size, size_of::<P>(), "{kernel:?} takes other parameters");
        // SAFETY: `Params` promises that every byte is initialised.
        let bytes = unsafe { std::slice::from_raw_parts(std::ptr::from_ref(params).cast::<u8>(), size) };
        let (function, launched) = (self.functions[kernel as usize], &self.launched[kernel as usize]);
        launched.set(launched.get() + 1);
        let launch = Launch { function, grid, threads, shared: 0, cluster: 1, overlap: false };
        self.driver.launch(self.stream, &launch, bytes).map_err(|error| match error {
            Error::Device { status, .. } => Error::Device { call: kernel.symbol(), status },
            other => other,
        })
    }

    /// How often each kernel was launched, or recorded to be.
    pub fn launched(&self) -> impl Iterator<Item = (Kernel, u64)> {
        Kernel::ALL.iter().copied().zip(self.launched.iter().map(Cell::get))
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        self.modules.drain(..).for_each(|module| self.driver.unload(module));
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
