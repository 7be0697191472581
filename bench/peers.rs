//! The GPU ops as a C library, so that `bench/peers` can time them against PyTorch's in one process.
//!
//! They run through the program's own backend and launch code, in the GPU's primary context (as PyTorch does), on the caller's
//! stream and the caller's memory. A call only queues work: it can be timed with events and captured in a graph.
//!
//! A call names an op and passes a list of tensors and a list of numbers, in the order that [`CALLS`] states. Weights have the
//! layout of the backend's own copy: a convolution weight is `[out, 3 * 3 * in]`, an upsampling one `[out, 2 * 2 * 2 * 2 * in]`
//! in phase form, the input channel running fastest. An e4m3 or e2m1 tensor has a factor. The weight of a linear layer may have a
//! separate scale tensor: row scales that replace the factor in e4m3, block scales in e2m1 (NVFP4).
#![allow(unsafe_code)] // a C interface

#[path = "peer_vae.rs"]
mod peer_vae;

pub use peer_vae::PeerVae;

use kiln::error::{Error, Result};
use kiln::internals::backend::cuda::{Cuda, GemmOperands, KernelChoice, Tile};
use kiln::internals::backend::{
    Backend, Conv, Fp8Accumulate, GatedGemm, Gemm, GroupNorm, KvSegment, LatentStats, Linear, Modulated, Op, Projection, QkNorm,
    Rope, RopeStyle, Sampling, Seam, Shortcut, Softmax,
};
use kiln::internals::tensor::{DType, Region, Scale, Scaling, Tensor, nvfp4};
use std::collections::HashMap;
use std::f32::consts::LOG2_E;
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

/// Incremented whenever a change breaks old callers.
const VERSION: u64 = 4;

/// A matrix in the caller's memory. An address of zero means "not there".
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PeerTensor {
    /// Device address of the first element.
    pub address: u64,
    /// Number of rows.
    pub rows: u64,
    /// Elements in a row.
    pub cols: u64,
    /// Elements from one row to the next.
    pub stride: u64,
    /// 0 f32, 1 bf16, 2 f16, 3 u8, 4 e4m3, 5 e2m1.
    pub dtype: u32,
    /// The factor of e4m3 and e2m1 elements; not used for other types.
    pub scale: f32,
}

/// Ops on one stream of one GPU.
pub struct Handle {
    cuda: Cuda,
    /// Launches of each kernel when the caller last asked for them.
    launched: HashMap<&'static str, u64>,
}

/// The arguments of an op.
struct Call {
    op: &'static str,
    /// The tensor names; those in brackets are optional.
    tensors: &'static [&'static str],
    /// Whether the tensor list repeats, once for each stream.
    repeats: bool,
    numbers: &'static [&'static str],
}

const fn call(op: &'static str, tensors: &'static [&'static str], numbers: &'static [&'static str]) -> Call {
    Call { op, tensors, repeats: false, numbers }
}

const fn streams(op: &'static str, tensors: &'static [&'static str], numbers: &'static [&'static str]) -> Call {
    Call { op, tensors, repeats: true, numbers }
}

const CALLS: &[Call] = &[
    call("copy", &["out", "x"], &[]),
    call("silu", &["out", "x"], &[]),
    call("rms_norm", &["out", "x", "weight"], &["eps"]),
    streams("layer_norm_modulate", &["out", "x", "shift", "scale"], &["eps"]),
    // Scales of an e4m3 weight are f32 row scales that replace the tensor's factor. Scales of an e2m1 weight are e4m3 block
    // scales, in tiles.
    streams("linear", &["out", "x", "weight", "[scales]", "[bias]"], &[]),
    streams("linear_swiglu", &["out", "x", "weight", "[scales]", "[bias]"], &[]),
    streams("linear_gate_residual", &["into", "x", "weight", "[scales]", "[bias]", "[gate]"], &[]),
    // Style 0 rotates neighboring elements, style 1 rotates elements of the two halves of a head.
    streams(
        "qkv",
        &["x", "weight", "[scales]", "norm q", "norm k", "rope table", "[q]", "k", "v", "[mlp]"],
        &["eps", "style", "q_scale", "k_scale"],
    ),
    // The first pair is out and q, the following pairs are KV segments.
    streams("attention", &["out or k", "q or v"], &["head_dim", "causal", "scale", "bound"]),
    // Sampling 0 keeps the size, 1 doubles it, 2 halves it.
    call(
        "conv",
        &["out", "x", "weight", "bias", "[residual]", "[stats]", "[shortcut]", "[its weight]", "[its bias]"],
        &["width", "height", "sampling"],
    ),
    call("norm_conv", &["out", "x", "gain", "shift", "[stats]", "weight", "bias"], &["groups", "eps", "width", "height"]),
    call("group_norm", &["out", "x", "weight", "bias", "[stats]"], &["groups", "eps", "silu"]),
    call("patchify", &["out", "x", "mean", "var"], &["eps", "width"]),
    call("unpatchify", &["out", "x", "mean", "var"], &["eps", "width"]),
    call("euler", &["latents", "velocity"], &["dt"]),
    call("guidance", &["out", "cond", "uncond"], &["scale"]),
    // Channels above zero: the overlap of two tiles side by side, with pixels of this many channels. Otherwise the tiles are
    // stacked.
    call("blend", &["into", "from"], &["channels"]),
    call("non_finite", &["count", "x"], &[]),
    call("largest_magnitude", &["largest", "x"], &[]),
    call("pixels", &["out", "x"], &[]),
];

fn wrong(what: String) -> Error {
    Error::Op { op: "peers", what }
}

impl PeerTensor {
    fn tensor(&self) -> Result<Option<Tensor>> {
        if self.address == 0 {
            return Ok(None);
        }
        let dtype = match self.dtype {
            0 => DType::F32,
            1 => DType::Bf16,
            2 => DType::F16,
            3 => DType::U8,
            4 => DType::E4m3,
            5 => DType::E2m1,
            other => return Err(wrong(format!("no element type has the number {other}"))),
        };
        let [rows, cols, stride] = [self.rows, self.cols, self.stride].map(|n| n as usize);
        let scaling = match (dtype.is_quantized(), Scale::new(self.scale)) {
            (true, Some(scale)) => Scaling::Tensor(scale),
            (true, None) => return Err(wrong(format!("{} cannot be the factor of an {} tensor", self.scale, dtype.name()))),
            (false, _) => Scaling::Unscaled,
        };
        Ok(Some(Tensor { region: Region::Arena, dtype, offset: self.address, rows, cols, stride, scaling }))
    }
}

/// The weight of a linear layer, with row or block scales if it has any.
fn weight(weight: Tensor, scales: Option<Tensor>) -> Result<Tensor> {
    let weight = Tensor { region: Region::Weights, ..weight };
    let Some(scales) = scales else { return Ok(weight) };
    let contiguous = scales.stride == scales.cols || scales.rows == 1;
    let scaling = match (weight.dtype, scales.dtype, weight.scaling) {
        (DType::E4m3, DType::F32, _) if (scales.rows, scales.cols) == (weight.rows, 1) => Some(Scaling::Rows(scales.offset)),
        (DType::E2m1, DType::E4m3, Scaling::Tensor(tensor)) if scales.len() == nvfp4::scale_bytes(weight.rows, weight.cols) => {
            Some(Scaling::Blocks16 { scales: scales.offset, tensor })
        }
        _ => None,
    };
    match scaling.filter(|_| contiguous) {
        Some(scaling) => Ok(Tensor { scaling, ..weight }),
        None => Err(wrong(format!("{scales:?} are no scales of {weight:?}"))),
    }
}

/// Builds an op from its name and operands, and passes it to `then`.
fn with_op<R>(name: &str, tensors: &[PeerTensor], numbers: &[f64], then: impl FnOnce(Op<'_>) -> Result<R>) -> Result<R> {
    let call = CALLS.iter().find(|c| c.op == name).ok_or_else(|| wrong(format!("no op is called `{name}`")))?;
    let width = call.tensors.len();
    let whole = tensors.len() == width || (call.repeats && tensors.len() > width && tensors.len().is_multiple_of(width));
    if !whole || numbers.len() != call.numbers.len() {
        let found = format!("{} tensors and {} numbers", tensors.len(), numbers.len());
        return Err(wrong(format!("{name} takes {:?} and {:?}, not {found}", call.tensors, call.numbers)));
    }
    let tensors = tensors.iter().map(PeerTensor::tensor).collect::<Result<Vec<_>>>()?;
    for (i, tensor) in tensors.iter().enumerate() {
        let role = call.tensors[i % width];
        if tensor.is_none() && !role.starts_with('[') {
            return Err(wrong(format!("{name} needs `{role}`")));
        }
    }
    // Every tensor that is not in brackets must be present.
    let there = |t: Option<Tensor>| t.ok_or_else(|| wrong(format!("{name} lacks a tensor")));
    let t = |i: usize| there(tensors[i]);
    let per_stream = || tensors.chunks_exact(width);
    // The scales follow the weight. The layer's input has the format that its producer stored.
    let layers = |x: usize, at: usize, bias: Option<usize>| {
        let layer = |s: &[Option<Tensor>]| {
            let linear = Linear::new(weight(there(s[at])?, s[at + 1])?, bias.and_then(|i| s[i]));
            Ok(Linear { input: there(s[x])?.stored(), ..linear })
        };
        per_stream().map(layer).collect::<Result<Vec<_>>>()
    };
    let float = |i: usize| numbers[i] as f32;
    let size = |i: usize| numbers[i] as usize;
    match name {
        "copy" => then(Op::Copy { out: t(0)?, x: t(1)? }),
        "silu" => then(Op::Silu { out: t(0)?, x: t(1)? }),
        "rms_norm" => then(Op::RmsNorm { out: t(0)?, x: t(1)?, weight: t(2)?, eps: float(0) }),
        "layer_norm_modulate" => {
            let stream = |s: &[Option<Tensor>]| {
                Ok(Modulated { out: there(s[0])?, x: there(s[1])?, shift: there(s[2])?, scale: there(s[3])? })
            };
            let streams = per_stream().map(stream).collect::<Result<Vec<_>>>()?;
            then(Op::LayerNormModulate { streams: &streams, eps: float(0) })
        }
        "linear" | "linear_swiglu" => {
            let layers = layers(1, 2, Some(4))?;
            let stream = |(s, w): (&[Option<Tensor>], _)| Ok(Gemm { out: there(s[0])?, x: there(s[1])?, w });
            let gemms = per_stream().zip(&layers).map(stream).collect::<Result<Vec<_>>>()?;
            then(if name == "linear" { Op::Linear(&gemms) } else { Op::LinearSwiglu(&gemms) })
        }
        "linear_gate_residual" => {
            let layers = layers(1, 2, Some(4))?;
            let stream = |(s, w): (&[Option<Tensor>], _)| Ok(GatedGemm { into: there(s[0])?, x: there(s[1])?, w, gate: s[5] });
            let gemms = per_stream().zip(&layers).map(stream).collect::<Result<Vec<_>>>()?;
            then(Op::LinearGateResidual(&gemms))
        }
        "qkv" => {
            let layers = layers(0, 1, None)?;
            let style = if size(1) == 0 { RopeStyle::Interleaved } else { RopeStyle::HalfSplit };
            let stream = |(s, w): (&[Option<Tensor>], _)| {
                let norm = QkNorm { q: there(s[3])?, k: there(s[4])?, eps: float(0) };
                let rope = Rope { table: there(s[5])?, style };
                let (k, v, norm) = (there(s[7])?, there(s[8])?, Some(norm));
                let (q_scale, k_scale) = (float(2), float(3));
                Ok(Projection { x: there(s[0])?, w, norm, q_scale, k_scale, rope, q: s[6], k, v, mlp: s[9] })
            };
            let projections = per_stream().zip(&layers).map(stream).collect::<Result<Vec<_>>>()?;
            then(Op::Qkv(&projections))
        }
        "attention" => {
            let run = |s: &[Option<Tensor>]| Ok(KvSegment { k: there(s[0])?, v: there(s[1])? });
            let kv = per_stream().skip(1).map(run).collect::<Result<Vec<_>>>()?;
            let (causal, scale, bound) = (size(1) != 0, float(2), float(3));
            // A scale of ln 2 means softmax to base 2.
            let base2 = (scale * LOG2_E - 1.0).abs() <= f32::EPSILON;
            let softmax = if base2 { Softmax::Base2 { bound: bound * LOG2_E } } else { Softmax::Natural { scale } };
            then(Op::Attention { out: &[t(0)?], q: t(1)?, kv: &kv, head_dim: size(0), causal, softmax })
        }
        "conv" => {
            let sampling = match size(2) {
                0 => Sampling::Same,
                1 => Sampling::Up,
                _ => Sampling::Down,
            };
            let w = Conv { weight: t(2)?, bias: t(3)? };
            let (width, height, residual, stats) = (size(0), size(1), tensors[4], tensors[5]);
            let beside = tensors[6].map(|x| Ok((x, Linear::new(t(7)?, tensors[8])))).transpose()?;
            let shortcut = beside.as_ref().map(|(x, w)| Shortcut { x: *x, w });
            then(Op::Conv { out: t(0)?, x: t(1)?, w: &w, width, height, sampling, residual, shortcut, stats })
        }
        "group_norm" => {
            let norm = GroupNorm { weight: t(2)?, bias: t(3)?, groups: size(0), eps: float(1) };
            then(Op::GroupNorm { out: t(0)?, x: t(1)?, norm: &norm, stats: tensors[4], silu: size(2) != 0 })
        }
        "norm_conv" => {
            let norm = GroupNorm { weight: t(2)?, bias: t(3)?, groups: size(0), eps: float(1) };
            let (w, width, height) = (Conv { weight: t(5)?, bias: t(6)? }, size(2), size(3));
            then(Op::NormConv { out: t(0)?, x: t(1)?, norm: &norm, stats: tensors[4], w: &w, width, height })
        }
        "patchify" | "unpatchify" => {
            let stats = LatentStats { mean: t(2)?, var: t(3)?, eps: float(0) };
            let (out, x, stats, width) = (t(0)?, t(1)?, &stats, size(1));
            then(if name == "patchify" { Op::Patchify { out, x, stats, width } } else { Op::Unpatchify { out, x, stats, width } })
        }
        "euler" => then(Op::Euler { latents: t(0)?, velocity: t(1)?, dt: float(0) }),
        "guidance" => then(Op::Guidance { out: t(0)?, cond: t(1)?, uncond: t(2)?, scale: float(0) }),
        "blend" => {
            let seam = if size(0) == 0 { Seam::Top } else { Seam::Left { channels: size(0) } };
            then(Op::Blend { into: t(0)?, from: t(1)?, seam })
        }
        "non_finite" => then(Op::NonFinite { count: t(0)?, x: t(1)? }),
        "largest_magnitude" => then(Op::LargestMagnitude { largest: t(0)?, x: t(1)? }),
        "pixels" => then(Op::Pixels { out: t(0)?, x: t(1)? }),
        other => Err(wrong(format!("`{other}` is listed but not implemented"))),
    }
}

// --------------------------------------------------------------------------------------------------------------- C interface

/// The buffer of an error message or an answer: `len` bytes, including the terminating zero.
struct Message {
    text: *mut c_char,
    len: usize,
}

impl Message {
    /// Writes as much of the text as fits.
    fn write(self, text: &str) {
        if self.text.is_null() || self.len == 0 {
            return;
        }
        let bytes = &text.as_bytes()[..text.len().min(self.len - 1)];
        // SAFETY: the caller of every function here vouches for `len` bytes at `text`.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.text.cast(), bytes.len());
            *self.text.add(bytes.len()) = 0;
        }
    }
}

/// Runs `body`. An error or a panic becomes a message and `None`: neither may unwind into C.
fn guarded<R>(message: Message, body: impl FnOnce() -> Result<R>) -> Option<R> {
    let what = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(result)) => return Some(result),
        Ok(Err(error)) => error.to_string(),
        Err(panic) => match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
            (Some(text), _) => format!("panic: {text}"),
            (_, Some(text)) => format!("panic: {text}"),
            _ => "panic".into(),
        },
    };
    message.write(&what);
    None
}

/// The interface that a caller must match: the version in the upper half, the size of a [`PeerTensor`] in the lower.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_peers_abi() -> u64 {
    VERSION << 32 | size_of::<PeerTensor>() as u64
}

/// Opens GPU `device` for work on `stream`. Returns null with a message on failure. The handle belongs to the calling thread.
///
/// # Safety
/// `error` has room for `error_len` bytes; the stream outlives the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_peers_open(device: u32, stream: u64, error: *mut c_char, error_len: usize) -> *mut Handle {
    let open = || {
        let cuda = Cuda::on_external_memory(device as usize, stream)?;
        Ok(Box::into_raw(Box::new(Handle { cuda, launched: HashMap::new() })))
    };
    guarded(Message { text: error, len: error_len }, open).unwrap_or(null_mut())
}

/// Waits for queued work and closes the handle. Null is allowed.
///
/// # Safety
/// The handle came from [`kiln_peers_open`] and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_peers_close(handle: *mut Handle) {
    if !handle.is_null() {
        // SAFETY: from `Box::into_raw`, and closed once.
        let handle = unsafe { Box::from_raw(handle) };
        guarded(Message { text: null_mut(), len: 0 }, || {
            drop(handle);
            Ok(())
        });
    }
}

/// Writes the tiles that a caller can choose for GEMMs, one per line: the tile's name, its kernel, and how it accumulates e4m3
/// products: `exact` or `fast`. `auto` means neither, or that there is only one way.
///
/// # Safety
/// `text` has room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_peers_tiles(text: *mut c_char, len: usize) {
    let line = |tile: &Tile| {
        let accumulate = match (tile.operands, tile.longest_sum) {
            (GemmOperands::Fp8, Some(part)) if part as usize == Fp8Accumulate::EXACT_PART => Fp8Accumulate::Exact,
            (GemmOperands::Fp8, None) => Fp8Accumulate::Fast,
            _ => Fp8Accumulate::Auto,
        };
        format!("{:?} {} {}", tile.kernel, tile.kernel.symbol(), accumulate.name())
    };
    let tiles: Vec<_> = Tile::ALL.iter().map(line).collect();
    Message { text, len }.write(&tiles.join("\n"));
}

/// Writes the kernels launched since the last call, one per line. A launch that is captured in a graph counts when it is
/// captured.
///
/// # Safety
/// The handle came from [`kiln_peers_open`]; `text` has room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_peers_kernels(handle: *mut Handle, text: *mut c_char, len: usize) {
    // SAFETY: from `kiln_peers_open` and used by one thread.
    let Some(handle) = (unsafe { handle.as_mut() }) else { return };
    let launched: HashMap<_, _> = handle.cuda.launches().into_iter().collect();
    let mut names: Vec<&str> =
        launched.iter().filter(|(name, times)| handle.launched.get(*name) != Some(times)).map(|(name, _)| *name).collect();
    names.sort_unstable();
    Message { text, len }.write(&names.join("\n"));
    handle.launched = launched;
}

/// Sets how later calls compute: how e4m3 GEMMs accumulate (0 the program decides, 1 exact, 2 fast), and the tile of GEMMs that
/// have it (null: the fastest). Returns 0, or 1 with a message. Without a handle the choice is only checked.
///
/// # Safety
/// The handle is null or came from [`kiln_peers_open`]; `tile` is null or ends in a zero; `error` has room for `error_len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_peers_choose(
    handle: *mut Handle,
    accumulate: u32,
    tile: *const c_char,
    error: *mut c_char,
    error_len: usize,
) -> i32 {
    let body = || {
        let accumulate = match accumulate {
            0 => Fp8Accumulate::Auto,
            1 => Fp8Accumulate::Exact,
            2 => Fp8Accumulate::Fast,
            other => return Err(wrong(format!("no accumulation has the number {other}"))),
        };
        let choice = if tile.is_null() {
            KernelChoice::Best
        } else {
            // SAFETY: the caller vouches for the string.
            let name = unsafe { CStr::from_ptr(tile) }.to_str().map_err(|e| wrong(e.to_string()))?;
            let found = Tile::ALL.iter().map(|tile| tile.kernel).find(|kernel| format!("{kernel:?}") == name);
            KernelChoice::Only(found.ok_or_else(|| wrong(format!("no tile is called `{name}`")))?)
        };
        // SAFETY: null, or from `kiln_peers_open` and used by one thread.
        if let Some(handle) = unsafe { handle.as_mut() } {
            handle.cuda.set_fp8_accumulate(accumulate);
            handle.cuda.set_choice(choice);
        }
        Ok(())
    };
    i32::from(guarded(Message { text: error, len: error_len }, body).is_none())
}

/// Queues an op. Without a handle it only checks that the operands fit each other. Returns 0, or 1 with a message.
///
/// # Safety
/// `op` ends in a zero, `tensors` and `numbers` point at as many values as stated, `error` has room for `error_len` bytes. The
/// addresses point into device memory that stays allocated until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_peers_run(
    handle: *mut Handle,
    op: *const c_char,
    tensors: *const PeerTensor,
    tensor_count: usize,
    numbers: *const f64,
    number_count: usize,
    error: *mut c_char,
    error_len: usize,
) -> i32 {
    let body = || {
        // SAFETY: the caller vouches for the string.
        let name = unsafe { CStr::from_ptr(op) }.to_str().map_err(|e| wrong(e.to_string()))?;
        // SAFETY: the caller vouches for the counts; a list without entries may have no address.
        let tensors = if tensor_count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(tensors, tensor_count) } };
        // SAFETY: as above.
        let numbers = if number_count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(numbers, number_count) } };
        // SAFETY: null, or from `kiln_peers_open` and used by one thread.
        let handle = unsafe { handle.as_mut() };
        with_op(name, tensors, numbers, |op| match handle {
            Some(handle) => handle.cuda.run(op),
            None => op.check(),
        })
    };
    i32::from(guarded(Message { text: error, len: error_len }, body).is_none())
}
