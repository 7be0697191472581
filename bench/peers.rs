//! The GPU ops as a C library, so that `bench/peers.py` can time them beside PyTorch's in one process.
//!
//! They run through the program's own backend and launch code, in the GPU's primary context (as PyTorch does), on the caller's
//! stream and the caller's memory. A call only queues work: it can be timed with events and captured in a graph.
//!
//! A call names an op and has a list of tensors and a list of numbers, in the order that [`CALLS`] states. A weight has the layout of
//! the backend's own copy: that of a convolution is `[out, 3 * 3 * in]`, the input channel running fastest.
#![allow(unsafe_code)] // a C interface

use kiln::backend::cuda::Cuda;
use kiln::backend::{
    Backend, Conv, GatedGemm, Gemm, GroupNorm, KvSegment, LatentStats, Linear, Modulated, Op, Projection, QkNorm, Rope,
    RopeStyle, Sampling, Softmax,
};
use kiln::error::{Error, Result};
use kiln::tensor::{DType, Region, Scaling, Tensor};
use std::f32::consts::LOG2_E;
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

/// Incremented whenever an old caller would break.
const VERSION: u64 = 2;

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
    /// Elements from row to row.
    pub stride: u64,
    /// 0 f32, 1 bf16, 2 f16, 3 u8.
    pub dtype: u32,
    /// Zero.
    pub unused: u32,
}

/// Ops on one stream of one GPU.
pub struct Handle(Cuda);

/// The arguments of an op.
struct Call {
    op: &'static str,
    /// Its tensors; those in brackets are optional.
    tensors: &'static [&'static str],
    /// Whether the list repeats, once for each stream.
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
    streams("linear", &["out", "x", "weight", "[bias]"], &[]),
    streams("linear_swiglu", &["out", "x", "weight", "[bias]"], &[]),
    streams("linear_gate_residual", &["into", "x", "weight", "[bias]", "[gate]"], &[]),
    // Style 0 rotates neighbouring elements, 1 those of the two halves of a head.
    streams("qkv", &["x", "weight", "norm q", "norm k", "rope table", "[q]", "k", "v", "[mlp]"], &["eps", "style"]),
    // The first pair is out and q, those after it are KV segments.
    streams("attention", &["out or k", "q or v"], &["head_dim", "causal", "scale", "bound"]),
    // Sampling 0 keeps the size, 1 doubles it, 2 halves it.
    call("conv", &["out", "x", "weight", "bias", "[residual]", "[stats]"], &["width", "height", "sampling"]),
    call("group_norm", &["out", "x", "weight", "bias", "[stats]"], &["groups", "eps", "silu"]),
    call("patchify", &["out", "x", "mean", "var"], &["eps", "width"]),
    call("unpatchify", &["out", "x", "mean", "var"], &["eps", "width"]),
    call("euler", &["latents", "velocity"], &["dt"]),
    call("guidance", &["out", "cond", "uncond"], &["scale"]),
    call("non_finite", &["count", "x"], &[]),
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
            other => return Err(wrong(format!("no element type has the number {other}"))),
        };
        let [rows, cols, stride] = [self.rows, self.cols, self.stride].map(|n| n as usize);
        let scaling = Scaling::Unscaled;
        Ok(Some(Tensor { region: Region::Arena, dtype, offset: self.address, rows, cols, stride, scaling }))
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
    // All tensors that are not in brackets are present.
    let there = |t: Option<Tensor>| t.ok_or_else(|| wrong(format!("{name} lacks a tensor")));
    let t = |i: usize| there(tensors[i]);
    let per_stream = || tensors.chunks_exact(width);
    let layers = |weight: usize, bias: Option<usize>| {
        let layer = |s: &[Option<Tensor>]| Ok(Linear::new(there(s[weight])?, bias.and_then(|i| s[i])));
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
            let layers = layers(2, Some(3))?;
            let stream = |(s, w): (&[Option<Tensor>], _)| Ok(Gemm { out: there(s[0])?, x: there(s[1])?, w });
            let gemms = per_stream().zip(&layers).map(stream).collect::<Result<Vec<_>>>()?;
            then(if name == "linear" { Op::Linear(&gemms) } else { Op::LinearSwiglu(&gemms) })
        }
        "linear_gate_residual" => {
            let layers = layers(2, Some(3))?;
            let stream = |(s, w): (&[Option<Tensor>], _)| Ok(GatedGemm { into: there(s[0])?, x: there(s[1])?, w, gate: s[4] });
            let gemms = per_stream().zip(&layers).map(stream).collect::<Result<Vec<_>>>()?;
            then(Op::LinearGateResidual(&gemms))
        }
        "qkv" => {
            let layers = layers(1, None)?;
            let style = if size(1) == 0 { RopeStyle::Interleaved } else { RopeStyle::HalfSplit };
            let stream = |(s, w): (&[Option<Tensor>], _)| {
                let norm = QkNorm { q: there(s[2])?, k: there(s[3])?, eps: float(0) };
                let rope = Rope { table: there(s[4])?, style };
                let (k, v, norm) = (there(s[6])?, there(s[7])?, Some(norm));
                Ok(Projection { x: there(s[0])?, w, norm, q_scale: 1.0, k_scale: 1.0, rope, q: s[5], k, v, mlp: s[8] })
            };
            let projections = per_stream().zip(&layers).map(stream).collect::<Result<Vec<_>>>()?;
            then(Op::Qkv(&projections))
        }
        "attention" => {
            let run = |s: &[Option<Tensor>]| Ok(KvSegment { k: there(s[0])?, v: there(s[1])? });
            let kv = per_stream().skip(1).map(run).collect::<Result<Vec<_>>>()?;
            let (causal, scale, bound) = (size(1) != 0, float(2), float(3));
            // A scale of ln 2 stands for the softmax to base 2.
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
            then(Op::Conv { out: t(0)?, x: t(1)?, w: &w, width, height, sampling, residual, stats })
        }
        "group_norm" => {
            let norm = GroupNorm { weight: t(2)?, bias: t(3)?, groups: size(0), eps: float(1) };
            then(Op::GroupNorm { out: t(0)?, x: t(1)?, norm: &norm, stats: tensors[4], silu: size(2) != 0 })
        }
        "patchify" | "unpatchify" => {
            let stats = LatentStats { mean: t(2)?, var: t(3)?, eps: float(0) };
            let (out, x, stats, width) = (t(0)?, t(1)?, &stats, size(1));
            then(if name == "patchify" { Op::Patchify { out, x, stats, width } } else { Op::Unpatchify { out, x, stats, width } })
        }
        "euler" => then(Op::Euler { latents: t(0)?, velocity: t(1)?, dt: float(0) }),
        "guidance" => then(Op::Guidance { out: t(0)?, cond: t(1)?, uncond: t(2)?, scale: float(0) }),
        "non_finite" => then(Op::NonFinite { count: t(0)?, x: t(1)? }),
        "pixels" => then(Op::Pixels { out: t(0)?, x: t(1)? }),
        other => Err(wrong(format!("`{other}` is listed and not made"))),
    }
}

// --------------------------------------------------------------------------------------------------------------- C interface

/// The buffer of an error message: `len` bytes, including the terminating zero.
struct Message {
    text: *mut c_char,
    len: usize,
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
    if !message.text.is_null() && message.len > 0 {
        let bytes = &what.as_bytes()[..what.len().min(message.len - 1)];
        // SAFETY: the caller of every function here vouches for `len` bytes at `text`.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), message.text.cast(), bytes.len());
            *message.text.add(bytes.len()) = 0;
        }
    }
    None
}

/// What a caller has to agree with: the version in the upper half, the size of a [`PeerTensor`] in the lower.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_peers_abi() -> u64 {
    VERSION << 32 | size_of::<PeerTensor>() as u64
}

/// Opens GPU `device` for work on `stream`. Null, and a message, if that fails. The handle belongs to the calling thread.
///
/// # Safety
/// `error` has room for `error_len` bytes; the stream outlives the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_peers_open(device: u32, stream: u64, error: *mut c_char, error_len: usize) -> *mut Handle {
    let open = || Ok(Box::into_raw(Box::new(Handle(Cuda::borrowing(device as usize, stream)?))));
    guarded(Message { text: error, len: error_len }, open).unwrap_or(null_mut())
}

/// Waits for what was queued, and closes. Null is allowed.
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

/// Queues an op, or without a handle only checks that its operands fit each other. 0, or 1 and a message.
///
/// # Safety
/// `op` ends in a zero, `tensors` and `numbers` point at as many values as stated, `error` has room for `error_len` bytes. The
/// addresses are those of device memory that stays until the work is done.
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
            Some(handle) => handle.0.run(op),
            None => op.check(),
        })
    };
    i32::from(guarded(Message { text: error, len: error_len }, body).is_none())
}
