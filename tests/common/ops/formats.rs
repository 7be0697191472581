//! The 8-bit and 4-bit formats as their specifications define them, in f64 and by search: the nearest of all values, ties to the even code,
//! out of range to the largest. Nothing here is shared with the backends.

use kiln::internals::tensor::{Bytes, DType, Nvfp4Layout, Scale, Scales, SliceScaling, Stored, WeightSlice};
use std::sync::{Arc, LazyLock};

/// Columns that share a scale in NVFP4.
pub const BLOCK: usize = 16;
/// An e4m3 code of NaN. It marks bytes that are not written yet or must not be read.
pub const NAN: u8 = 0x7f;

/// A floating-point format: the magnitudes of its codes in order, without infinities and NaN, and the sign bit.
pub struct Codes {
    magnitudes: Vec<f64>,
    sign: u8,
}

impl Codes {
    fn new(exponent: u32, mantissa: u32, count: u32) -> Self {
        let bias = (1 << (exponent - 1)) - 1;
        let magnitude = |code: u32| {
            let (power, fraction) = ((code >> mantissa) as i32, f64::from(code % (1 << mantissa)) / f64::from(1 << mantissa));
            if power == 0 { fraction * 2f64.powi(1 - bias) } else { (1.0 + fraction) * 2f64.powi(power - bias) }
        };
        Self { magnitudes: (0..count).map(magnitude).collect(), sign: 1 << (exponent + mantissa) }
    }

    /// The codes of this element type.
    pub fn of(dtype: DType) -> &'static Self {
        // E4M3's finite codes end before its only NaN, E5M2's before infinity.
        static E4M3: LazyLock<Codes> = LazyLock::new(|| Codes::new(4, 3, 0x7f));
        static E5M2: LazyLock<Codes> = LazyLock::new(|| Codes::new(5, 2, 0x7c));
        static E2M1: LazyLock<Codes> = LazyLock::new(|| Codes::new(2, 1, 8));
        match dtype {
            DType::E4m3 => &E4M3,
            DType::E5m2 => &E5M2,
            DType::E2m1 => &E2M1,
            _ => panic!("{dtype:?} has no codes"),
        }
    }

    /// The largest value.
    pub fn largest(&self) -> f64 {
        self.magnitudes[self.magnitudes.len() - 1]
    }

    pub fn decode(&self, code: u8) -> f64 {
        let magnitude = self.magnitudes.get(usize::from(code % self.sign)).copied().unwrap_or(f64::NAN);
        if code & self.sign == 0 { magnitude } else { -magnitude }
    }

    pub fn encode(&self, value: f64) -> u8 {
        let (all, magnitude) = (&self.magnitudes, value.abs());
        let above = all.partition_point(|m| *m < magnitude).min(all.len() - 1);
        let below = above.saturating_sub(1);
        let (down, up) = (magnitude - all[below], all[above] - magnitude);
        let code = if down < up || (down == up && below % 2 == 0) { below } else { above };
        code as u8 | if value.is_sign_negative() { self.sign } else { 0 }
    }
}

/// The factor of the elements of an NVFP4 block: the product of both scales in f32.
pub fn unit(tensor: f32, scale: u8) -> f32 {
    tensor * Codes::of(DType::E4m3).decode(scale) as f32
}

/// Quantized rows: the code of every element, and the block scales in row-major order, if there are any.
pub struct Quantized {
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
}

/// Values as a format stores them. Rows have whole blocks, so their length does not matter.
pub fn quantize(values: impl Iterator<Item = f64>, format: Stored) -> Quantized {
    let codes = Codes::of(format.dtype);
    match format.scales {
        Scales::Unscaled => Quantized { codes: values.map(|v| codes.encode(v)).collect(), scales: Vec::new() },
        Scales::Tensor(scale) => {
            let scale = f64::from(scale.get());
            Quantized { codes: values.map(|v| codes.encode(v / scale)).collect(), scales: Vec::new() }
        }
        Scales::Blocks16(tensor) => {
            let mut all = Quantized { codes: Vec::new(), scales: Vec::new() };
            for block in values.collect::<Vec<_>>().chunks(BLOCK) {
                let scale = block_scale(block.iter().fold(0.0, |most, v| v.abs().max(most)), tensor);
                let unit = f64::from(unit(tensor.get(), scale));
                all.codes.extend(block.iter().map(|v| if unit == 0.0 { 0 } else { codes.encode(v / unit) }));
                all.scales.push(scale);
            }
            all
        }
        Scales::Rows => panic!("only files have scales for each row"),
    }
}

/// The scale of a block, by which its largest element becomes six.
pub fn block_scale(largest: f64, tensor: Scale) -> u8 {
    Codes::of(DType::E4m3).encode(largest / 6.0 / f64::from(tensor.get()))
}

/// The values of quantized elements. A product with a scale is rounded to f32, as in the backends.
pub fn dequantize(from: &Quantized, format: Stored) -> Vec<f32> {
    let codes = Codes::of(format.dtype);
    let value = |i: usize, scale: f32| codes.decode(from.codes[i]) as f32 * scale;
    match format.scales {
        Scales::Unscaled => (0..from.codes.len()).map(|i| value(i, 1.0)).collect(),
        Scales::Tensor(scale) => (0..from.codes.len()).map(|i| value(i, scale.get())).collect(),
        Scales::Blocks16(tensor) => (0..from.codes.len()).map(|i| value(i, unit(tensor.get(), from.scales[i / BLOCK]))).collect(),
        Scales::Rows => panic!("only files have scales for each row"),
    }
}

/// Offset of a block's scale among tiled scales. A tile has the scales of 128 rows and 4 blocks (64 columns) in 512 bytes: 32 units of 16
/// bytes, each with the four scales of rows r, r + 32, r + 64 and r + 96.
pub fn tiled(row: usize, block: usize, blocks: usize) -> usize {
    let tile = row / 128 * blocks.div_ceil(4) + block / 4;
    let (row, block) = (row % 128, block % 4);
    512 * tile + 16 * (row % 32) + 4 * (row / 32) + block
}

/// Arranges row-major block scales in tiles. The padding is NaN, because nothing may read it.
pub fn tile(scales: &[u8], blocks: usize) -> Vec<u8> {
    let rows = scales.len() / blocks.max(1);
    let mut all = vec![NAN; rows.div_ceil(128) * blocks.div_ceil(4) * 512];
    scales.iter().enumerate().for_each(|(i, &scale)| all[tiled(i / blocks, i % blocks, blocks)] = scale);
    all
}

/// Packs two elements into a byte, the even one in the high or the low nibble.
pub fn pack(codes: &[u8], high_first: bool) -> Vec<u8> {
    codes.chunks_exact(2).map(|pair| if high_first { pair[0] << 4 | pair[1] } else { pair[1] << 4 | pair[0] }).collect()
}

/// How a file stores a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Filed {
    Plain(DType),
    /// FP8: without a scale, with one per tensor, and with one per row.
    Fp8(DType),
    Fp8Tensor(DType),
    Fp8Rows(DType),
    Nvfp4(Nvfp4Layout),
}

impl Filed {
    /// The name for case names.
    pub fn name(self) -> String {
        match self {
            Self::Plain(dtype) => dtype.name().into(),
            Self::Fp8(dtype) => format!("{} unscaled", dtype.name()),
            Self::Fp8Tensor(dtype) => dtype.name().into(),
            Self::Fp8Rows(dtype) => format!("{} by rows", dtype.name()),
            Self::Nvfp4(Nvfp4Layout::COMFY) => "nvfp4".into(),
            Self::Nvfp4(Nvfp4Layout::MODELOPT) => "nvfp4 of modelopt".into(),
            Self::Nvfp4(_) => "nvfp4 of modelopt's single files".into(),
        }
    }

    /// Rows as the file stores them, after `shift` bytes of something else, and the values they stand for.
    pub fn store(self, values: &[f32], cols: usize, shift: usize) -> (WeightSlice, Vec<f32>) {
        // The scale that maps the largest value to the largest of the format.
        let range = |values: &[f32], dtype| {
            let largest = values.iter().fold(f32::MIN_POSITIVE, |most, v| v.abs().max(most));
            Scale::new(largest / Codes::of(dtype).largest() as f32).unwrap()
        };
        let stored = |values: &[f32], format| {
            let data = quantize(values.iter().copied().map(f64::from), format);
            let values = dequantize(&data, format);
            (data, values)
        };
        let bytes = |data: Vec<u8>| {
            let bytes = Bytes::new(Arc::new([vec![NAN; shift], data].concat()));
            bytes.slice(shift..bytes.len()).unwrap()
        };
        let part = |data, dtype, scaling| WeightSlice { bytes: bytes(data), dtype, rows: values.len() / cols, scaling };
        match self {
            Self::Plain(dtype) => {
                let data = dtype.encoded(values);
                let values = dtype.decoded(&data);
                (part(data, dtype, SliceScaling::Unscaled), values)
            }
            Self::Fp8(dtype) => {
                let (data, values) = stored(values, Stored::plain(dtype));
                (part(data.codes, dtype, SliceScaling::Unscaled), values)
            }
            Self::Fp8Tensor(dtype) => {
                let scale = range(values, dtype);
                let (data, values) = stored(values, Stored { dtype, scales: Scales::Tensor(scale) });
                (part(data.codes, dtype, SliceScaling::Tensor(scale)), values)
            }
            Self::Fp8Rows(dtype) => {
                let (mut codes, mut decoded, mut scales) = (Vec::new(), Vec::new(), Vec::new());
                for row in values.chunks_exact(cols) {
                    let scale = range(row, dtype);
                    let (data, values) = stored(row, Stored { dtype, scales: Scales::Tensor(scale) });
                    decoded.extend(values);
                    codes.extend(data.codes);
                    scales.extend(scale.get().to_le_bytes());
                }
                (part(codes, dtype, SliceScaling::Rows(bytes(scales))), decoded)
            }
            Self::Nvfp4(layout) => {
                let tensor = Scale::new(range(values, DType::E4m3).get() / 6.0).unwrap();
                let (data, values) = stored(values, Stored::nvfp4(tensor));
                let scales = if layout.tiled { tile(&data.scales, cols / BLOCK) } else { data.scales };
                let scaling = SliceScaling::Blocks16 { scales: bytes(scales), tensor, layout };
                (part(pack(&data.codes, layout.high_first), DType::E2m1, scaling), values)
            }
        }
    }
}
