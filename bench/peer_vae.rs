//! The VAE in the C library: a whole decoder and encoder, so that `bench/vae.py` can time them alongside diffusers' VAE. The
//! caller passes the addresses of weights and working memory, aligned to 1024 bytes.

use super::{Handle, Message, PeerTensor, guarded, wrong};
use kiln::error::Result;
use kiln::internals::backend::{Backend, DryRun, GemmFormats};
use kiln::internals::checkpoint::Weights;
use kiln::internals::component::Component;
use kiln::internals::config::{ConfigFile, VaeConfig};
use kiln::internals::model::{Loader, Vae};
use kiln::internals::sequence::{Grid, PATCH};
use kiln::internals::tensor::{ALIGN, Arena, Precision, Region, Tensor};
use std::ffi::{CStr, c_char};
use std::path::Path;
use std::ptr::null_mut;

/// A VAE's files, and its weights once they are loaded.
pub struct PeerVae {
    weights: Weights,
    config: VaeConfig,
    tiling: bool,
    vae: Vae,
    weight_bytes: u64,
}

/// Places the weights from `address` on, on a backend or in a dry run. Also returns the weight bytes.
fn place(
    be: &mut dyn Backend,
    weights: &Weights,
    config: &VaeConfig,
    tiling: bool,
    address: u64,
    dry: bool,
) -> Result<(Vae, u64)> {
    let (mut region, mut ignore) = (Arena::starting_at(Region::Weights, address), |_| ());
    let loader = Loader::new(be, &mut region, Some(weights), Precision::Bf16, &mut ignore);
    let mut loader = if dry { loader.shapes_only() } else { loader };
    let vae = Vae::load(&mut loader, config, true)?.with_tiling(tiling);
    Ok((vae, region.peak() - address))
}

impl PeerVae {
    fn open(folder: &Path, tiling: bool) -> Result<Self> {
        let weights = Weights::open(Component::Vae, folder)?;
        let config = VaeConfig::detect(&weights, Some(&ConfigFile::read(&folder.join("config.json"))?))?;
        let (vae, weight_bytes) = place(&mut DryRun::new(GemmFormats::NONE), &weights, &config, tiling, 0, true)?;
        Ok(Self { weights, config, tiling, vae, weight_bytes })
    }

    /// Decodes tokens to an image, or encodes an image to tokens. Returns the bytes of working memory.
    fn run(&self, be: &mut dyn Backend, encode: bool, out: Tensor, x: Tensor, size: [u64; 2], at: u64) -> Result<u64> {
        let mut ws = Arena::starting_at(Region::Arena, at);
        let [width, height] = size.map(|side| side as usize / PATCH);
        let grid = Grid { width, height };
        match encode {
            true => self.vae.encode(be, &mut ws, out, x, grid)?,
            false => self.vae.decode(be, &mut ws, out, x, grid)?,
        }
        Ok(ws.peak() - at)
    }
}

/// Opens a VAE folder as diffusers writes it. On failure the function returns null and writes a message.
///
/// # Safety
/// `folder` ends in a zero; `error` has room for `error_len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_peers_vae_open(
    folder: *const c_char,
    tiling: u32,
    error: *mut c_char,
    error_len: usize,
) -> *mut PeerVae {
    let body = || {
        // SAFETY: the caller vouches for the string.
        let folder = unsafe { CStr::from_ptr(folder) }.to_str().map_err(|e| wrong(e.to_string()))?;
        Ok(Box::into_raw(Box::new(PeerVae::open(Path::new(folder), tiling != 0)?)))
    };
    guarded(Message { text: error, len: error_len }, body).unwrap_or(null_mut())
}

/// Closes a VAE. Null is allowed. All work that uses its weights must be done.
///
/// # Safety
/// The VAE came from [`kiln_peers_vae_open`] and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_peers_vae_close(vae: *mut PeerVae) {
    if !vae.is_null() {
        // SAFETY: from `Box::into_raw`, and closed once.
        drop(unsafe { Box::from_raw(vae) });
    }
}

/// Returns the bytes of the weights.
///
/// # Safety
/// The VAE came from [`kiln_peers_vae_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_peers_vae_weight_bytes(vae: *const PeerVae) -> u64 {
    // SAFETY: the caller vouches for it.
    unsafe { vae.as_ref() }.map_or(0, |vae| vae.weight_bytes)
}

/// Uploads the weights to device memory at `address`. Returns 0, or 1 with a message.
///
/// # Safety
/// The VAE and the handle came from their functions and are used by one thread. The address has room for the weights, and `error`
/// has room for `error_len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_peers_vae_load(
    vae: *mut PeerVae,
    handle: *mut Handle,
    address: u64,
    error: *mut c_char,
    error_len: usize,
) -> i32 {
    let body = || {
        // SAFETY: the caller vouches for both.
        let (Some(vae), Some(handle)) = (unsafe { vae.as_mut() }, unsafe { handle.as_mut() }) else {
            return Err(wrong("no VAE, or no GPU".into()));
        };
        if !address.is_multiple_of(ALIGN) {
            return Err(wrong(format!("{address:#x} is not aligned")));
        }
        (vae.vae, _) = place(&mut handle.cuda, &vae.weights, &vae.config, vae.tiling, address, false)?;
        handle.cuda.synchronize()
    };
    i32::from(guarded(Message { text: error, len: error_len }, body).is_none())
}

/// Queues a whole decoder (`x` are normalized tokens `[tokens, 128]`, `out` is an image `[pixels, 3]`) or encoder (the reverse),
/// both f32, with working memory at `workspace`. Without a handle the ops are only checked. Returns the bytes of working memory,
/// or 0 with a message.
///
/// # Safety
/// As for [`kiln_peers_vae_load`], which the caller has called if there is a handle. The tensors are in device memory that stays
/// allocated until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_peers_vae_run(
    vae: *const PeerVae,
    handle: *mut Handle,
    encode: u32,
    tensors: *const [PeerTensor; 2],
    width: u64,
    height: u64,
    workspace: u64,
    error: *mut c_char,
    error_len: usize,
) -> u64 {
    let body = || {
        // SAFETY: the caller vouches for all of them.
        let (Some(vae), Some(tensors)) = (unsafe { vae.as_ref() }, unsafe { tensors.as_ref() }) else {
            return Err(wrong("no VAE, or no tensors".into()));
        };
        let [out, x] = tensors;
        let (Some(out), Some(x)) = (out.tensor()?, x.tensor()?) else { return Err(wrong("a tensor is missing".into())) };
        if !workspace.is_multiple_of(ALIGN) {
            return Err(wrong(format!("{workspace:#x} is not aligned")));
        }
        // SAFETY: null, or from `kiln_peers_open` and used by one thread.
        match unsafe { handle.as_mut() } {
            Some(handle) => vae.run(&mut handle.cuda, encode != 0, out, x, [width, height], workspace),
            None => vae.run(&mut DryRun::new(GemmFormats::NONE), encode != 0, out, x, [width, height], workspace),
        }
    };
    guarded(Message { text: error, len: error_len }, body).unwrap_or(0)
}
