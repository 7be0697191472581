//! Uploads of weights through pinned staging buffers: one is filled while others are copied. Copies have their own stream and run
//! concurrently with kernels. [`Staging::before`] and [`Staging::after`] state which side waits for the other.
#![allow(unsafe_code)]

use super::super::{Role, up_conv};
use super::driver::{Driver, Event, Rows, Stream};
use super::params::{NO_CODE, dtype_code};
use crate::error::{Error, Result};
use crate::tensor::formats::E4M3_NAN;
use crate::tensor::{DType, Scales, SliceScaling, Tensor, WeightSlice, nvfp4, quantize};
use rayon::prelude::*;
use std::ptr::NonNull;
use std::rc::Rc;

/// Bytes of a staging buffer: large enough for copies at full speed, but small because pinning memory takes time.
const BUFFER: usize = 16 << 20;
/// Staging buffers. With this many, the copies of all full buffers take longer than filling the next, even if the threads that fill it have
/// to be woken.
const BUFFERS: usize = 4;
/// Elements that one thread converts at a time.
const GRAIN: usize = 32 << 10;

/// The staging buffers, and the stream on which they are copied in order.
pub struct Staging {
    // Dropped first: the drop waits until the device has copied everything.
    stream: CopyStream,
    /// Buffers are filled in rotation and pinned at their first use.
    buffers: Vec<Buffer>,
    next: usize,
    /// Recorded where copies and kernels have to wait for each other.
    order: EventGuard,
    /// Whether copies were queued since the last [`Staging::before`].
    pending: bool,
    driver: Rc<dyn Driver>,
}

/// A pinned buffer that the device copies from.
pub struct Buffer {
    memory: Pinned,
    /// Recorded behind the buffer's last copy.
    free: EventGuard,
    driver: Rc<dyn Driver>,
}

/// A stream for copies.
pub struct CopyStream(Rc<dyn Driver>, pub Stream);

impl CopyStream {
    pub fn new(driver: &Rc<dyn Driver>) -> Result<Self> {
        Ok(Self(driver.clone(), driver.stream()?))
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        // The device may still be reading the buffers. Whether it succeeds no longer matters.
        let _ = self.0.synchronize(self.1);
        self.0.destroy_stream(self.1);
    }
}

/// Pinned memory.
struct Pinned(Rc<dyn Driver>, NonNull<u8>, usize);

impl Pinned {
    fn new(driver: &Rc<dyn Driver>, len: usize) -> Result<Self> {
        Ok(Self(driver.clone(), driver.allocate_pinned(len)?, len))
    }

    /// The first `len` bytes. The device must have finished the last copy from them.
    fn bytes(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= self.2);
        // SAFETY: the driver allocated at least `len` bytes, and nothing else on the host refers to them.
        unsafe { std::slice::from_raw_parts_mut(self.1.as_ptr(), len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.0.free_pinned(self.1);
    }
}

/// An event.
pub struct EventGuard(Rc<dyn Driver>, pub Event);

impl EventGuard {
    pub fn new(driver: &Rc<dyn Driver>) -> Result<Self> {
        Ok(Self(driver.clone(), driver.event()?))
    }
}

impl Drop for EventGuard {
    fn drop(&mut self) {
        self.0.destroy_event(self.1);
    }
}

impl Buffer {
    pub fn new(driver: &Rc<dyn Driver>, len: usize) -> Result<Self> {
        let free = EventGuard::new(driver)?;
        Ok(Self { memory: Pinned::new(driver, len)?, free, driver: driver.clone() })
    }

    pub fn len(&self) -> usize {
        self.memory.2
    }

    /// Waits until the device has finished the buffer's last copy.
    pub fn wait(&self) -> Result<()> {
        self.driver.synchronize_event(self.free.1)
    }

    /// Queues a copy of `len` bytes that `fill` writes. The buffer's last copy must have finished.
    pub fn queue(&mut self, stream: Stream, to: Rows, len: usize, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        let Self { memory, free, driver } = self;
        let bytes = memory.bytes(len);
        fill(bytes);
        let queued = driver.copy_in(stream, to, bytes).and_then(|()| driver.record_event(free.1, stream));
        if queued.is_err() {
            // Without the event, kiln cannot tell when the buffer is free again.
            let _ = driver.synchronize(stream);
        }
        queued
    }
}

impl Staging {
    pub fn new(driver: Rc<dyn Driver>) -> Result<Self> {
        Ok(Self {
            stream: CopyStream::new(&driver)?,
            buffers: Vec::with_capacity(BUFFERS),
            next: 0,
            order: EventGuard::new(&driver)?,
            pending: false,
            driver,
        })
    }

    /// Queues a copy of `len` bytes that `fill` writes.
    fn copy(&mut self, to: u64, len: usize, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        let _span = crate::trace::span("fill a staging buffer and queue its copy");
        if self.buffers.len() == self.next {
            self.buffers.push(Buffer::new(&self.driver, BUFFER)?);
        }
        let buffer = &mut self.buffers[self.next];
        buffer.wait()?;
        self.pending = true;
        let rows = Rows { address: to, pitch: len as u64, width: len as u64 };
        let queued = buffer.queue(self.stream.1, rows, len, fill);
        self.next = (self.next + 1) % BUFFERS;
        queued
    }

    /// Queues copies of all these bytes.
    fn copy_all(&mut self, to: u64, from: &[u8]) -> Result<()> {
        let mut pieces = from.chunks(BUFFER).enumerate();
        pieces.try_for_each(|(i, piece)| self.copy(to + (i * BUFFER) as u64, piece.len(), |out| out.copy_from_slice(piece)))
    }

    /// Queues copies of a tensor's row or block scales to address `to`, for `rows` rows from row `first` on.
    fn copy_scales(&mut self, to: u64, tensor: Tensor, first: usize, rows: usize, from: &[u8]) -> Result<()> {
        let refused = |what: String| Err(Error::Op { op: "upload", what });
        let at = match tensor.stored().scales {
            Scales::Unscaled | Scales::Tensor(_) => return Ok(()),
            Scales::Rows => 4 * first,
            Scales::Blocks16(_) if !first.is_multiple_of(nvfp4::TILE_ROWS) => {
                return refused(format!("a part does not begin at a tile of the block scales of {tensor:?}"));
            }
            Scales::Blocks16(_) if nvfp4::largest_scale(from, rows, tensor.cols) >= E4M3_NAN => {
                return refused(format!("{tensor:?} has block scales that are negative or NaN"));
            }
            Scales::Blocks16(_) => nvfp4::scale_offset(first, 0, nvfp4::tiles_along(tensor.cols)),
        };
        self.copy_all(to + at as u64, from)
    }

    /// Queues the upload of a weight to address `to`, and of its row or block scales to address `scales`. Quantized parts in the format of
    /// `tensor` are copied unmodified, others are converted or quantized to it. `check_stop` may end the upload between two copies.
    pub fn upload(
        &mut self,
        (to, scales): (u64, u64),
        tensor: Tensor,
        role: Role,
        parts: &[WeightSlice],
        check_stop: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let wrong = |what: &str| Error::Op { op: "upload", what: format!("{role:?} parts do not {what} {tensor:?}") };
        let (pitch, mut at) = (tensor.dtype.bytes(tensor.cols), 0);
        let stored = tensor.stored();
        if dtype_code(tensor.dtype) == NO_CODE {
            return Err(Error::Op { op: "upload", what: format!("there are no kernels for {tensor:?}") });
        }
        if pitch == 0 {
            return Err(wrong("fit"));
        }
        for part in parts {
            let part = &match role {
                Role::UpConv => up_conv::folded(part, tensor.dtype).ok_or_else(|| wrong("fit"))?,
                Role::Linear | Role::Conv | Role::Vector => part.clone(),
            };
            if part.cols() != tensor.cols || at + part.rows > tensor.rows || !part.is_complete() {
                return Err(wrong("fit"));
            }
            let copied = tensor.dtype.is_quantized() && part.stored() == stored;
            let encoded = quantize::encodes(part, stored);
            if !copied && !encoded && !part.converts_to(stored) {
                return Err(wrong("have the format of"));
            }
            // A copy takes whole rows. Rows that are quantized together are copied in whole scale tiles.
            let unit = if encoded { nvfp4::TILE_ROWS } else { 1 };
            let step = BUFFER / pitch / unit * unit;
            if step == 0 {
                return Err(wrong("have rows short enough for"));
            }
            // Both cases are cheap for parts in tensor layout.
            let part = &if copied { part.in_tensor_layout() } else { part.clone() };
            // Quantizing rows also makes their scales, which are copied at the end.
            let scale_bytes = |rows: usize| quantize::scale_bytes(rows, tensor.cols, stored.scales);
            let mut made = vec![0; if encoded { scale_bytes(part.rows) } else { 0 }];
            for first in (0..part.rows).step_by(step) {
                check_stop()?;
                let (count, mut finite) = (step.min(part.rows - first), true);
                self.copy(to + ((at + first) * pitch) as u64, count * pitch, |out| {
                    if copied {
                        finite = copy_codes(tensor.dtype, out, &part.bytes[first * pitch..(first + count) * pitch]);
                        return;
                    }
                    if encoded {
                        let own = &mut made[scale_bytes(first)..scale_bytes(first + count)];
                        finite = quantize::encode(part, first..first + count, stored, out, own);
                        return;
                    }
                    let rows = out.par_chunks_exact_mut(pitch).with_min_len(GRAIN.div_ceil(tensor.cols)).enumerate();
                    finite = rows.all(|(row, out)| {
                        part.convert(first + row, stored, out);
                        if role == Role::Conv {
                            out.copy_from_slice(&channels_last(out, tensor.dtype.align()));
                        }
                        tensor.dtype.has_no_nan(out)
                    });
                })?;
                if !finite {
                    let what = if encoded { "is quantized from values that are not finite" } else { "contains NaN" };
                    return Err(Error::Op { op: "upload", what: format!("{tensor:?} {what}") });
                }
            }
            match &part.scaling {
                SliceScaling::Rows(from) | SliceScaling::Blocks16 { scales: from, .. } if copied => {
                    self.copy_scales(scales, tensor, at, part.rows, from)?;
                }
                _ => self.copy_scales(scales, tensor, at, part.rows, &made)?,
            }
            at += part.rows;
        }
        if at == tensor.rows { Ok(()) } else { Err(wrong("fill")) }
    }

    /// Makes later work on `stream` wait for all copies so far. The host does not wait.
    pub fn before(&mut self, stream: Stream) -> Result<()> {
        if self.pending {
            self.driver.record_event(self.order.1, self.stream.1)?;
            self.driver.wait_event(stream, self.order.1)?;
            self.pending = false;
        }
        Ok(())
    }

    /// Makes later copies wait for everything queued on `stream` so far. The host does not wait.
    pub fn after(&self, stream: Stream) -> Result<()> {
        self.driver.record_event(self.order.1, stream)?;
        self.driver.wait_event(self.stream.1, self.order.1)
    }

    /// Waits until all copies have ended.
    pub fn synchronize(&self) -> Result<()> {
        self.driver.synchronize(self.stream.1)
    }
}

/// Copies the codes of quantized elements. False if one of them is NaN.
fn copy_codes(dtype: DType, to: &mut [u8], from: &[u8]) -> bool {
    to.par_chunks_mut(GRAIN).zip(from.par_chunks(GRAIN)).all(|(to, from)| {
        to.copy_from_slice(from);
        dtype.has_no_nan(from)
    })
}

/// One 3x3 filter with its channels last: the channels of a tap become adjacent, like the channels of a pixel.
fn channels_last(row: &[u8], size: usize) -> Vec<u8> {
    let channels = row.len() / size / 9;
    let mut out = Vec::with_capacity(row.len());
    for tap in 0..9 {
        (0..channels).for_each(|c| out.extend_from_slice(&row[(c * 9 + tap) * size..][..size]));
    }
    out
}

/// Encodes values for a tensor whose elements stand for `scale` times their value.
pub fn encode(values: &[f32], dtype: DType, scale: f32, bytes: &mut [u8]) {
    let store = |to: &mut [u8], from: &[f32]| match scale {
        1.0 => dtype.encode(from, to),
        _ => dtype.encode(&from.iter().map(|v| v / scale).collect::<Vec<_>>(), to),
    };
    // A few values, such as the embeddings of a prompt's tokens, take less time than waking the threads of the pool. The pool may also be
    // busy with noise that nothing needs yet.
    if values.len() <= 8 * GRAIN {
        return store(bytes, values);
    }
    bytes.par_chunks_mut(dtype.bytes(GRAIN)).zip(values.par_chunks(GRAIN)).for_each(|(to, from)| store(to, from));
}

/// Decodes stored values to f32: `scale` times the value of each element.
pub fn decode(bytes: &[u8], dtype: DType, scale: f32, to: &mut [f32]) {
    let pieces = to.par_chunks_mut(GRAIN).zip(bytes.par_chunks(dtype.bytes(GRAIN)));
    pieces.for_each(|(to, from)| {
        dtype.decode(from, to);
        to.iter_mut().filter(|_| scale != 1.0).for_each(|v| *v *= scale);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_the_way_there_and_back() {
        let encoded = |values: &[f32], dtype: DType, scale: f32| {
            let mut bytes = vec![0; dtype.bytes(values.len())];
            encode(values, dtype, scale, &mut bytes);
            bytes
        };
        let values: Vec<f32> = (0..70_001).map(|i| (i % 255) as f32 / 2.0).collect();
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            let mut back = vec![0.0; values.len()];
            decode(&encoded(&values, dtype, 1.0), dtype, 1.0, &mut back);
            assert_eq!(back, values, "{dtype:?}");
        }
        // Multiples of the scale that e4m3 can store.
        let values: Vec<f32> = (0..70_001).map(|i| (i % 17) as f32 * -0.75).collect();
        let mut back = vec![0.0; values.len()];
        decode(&encoded(&values, DType::E4m3, 0.75), DType::E4m3, 0.75, &mut back);
        assert_eq!(back, values);
    }

    #[test]
    fn filters_are_stored_channels_last() {
        // The filter has two channels of nine taps, each of two bytes.
        let row: Vec<u8> = (0..36).collect();
        let out = channels_last(&row, 2);
        assert_eq!(out[..8], [0, 1, 18, 19, 2, 3, 20, 21]);
        assert_eq!(out[32..], [16, 17, 34, 35]);
    }
}
