//! How a tensor stores its values. Each format has a row in a table and a file with everything specific to the format: a new
//! format is a file and a line of `formats!`. Scales that elements are multiplied by are separate.

mod e4m3;
mod e5m2;
mod minifloat;
pub mod nvfp4;
mod plain;

pub use e4m3::{E4M3_MAX, E4M3_NAN, e4m3, to_e4m3};
pub use e5m2::{e5m2, to_e5m2};
pub use nvfp4::{E2M1_MAX, e2m1, e2m1_pair, to_e2m1};
pub use plain::{decode_bf16, encode_bf16};

/// Values converted at a time. They stay in the first-level cache. A multiple of every [`Format::block`].
const CHUNK: usize = 512;

/// The facts about the elements of a format.
#[derive(Debug)]
pub struct Format {
    /// The name in messages about tensors.
    pub name: &'static str,
    /// The name that users type, also used in JSON.
    pub label: &'static str,
    /// The name in messages about files.
    pub title: &'static str,
    /// The dtype of the elements in a safetensors file. The elements may be packed in it.
    pub stored_as: &'static str,
    /// The name that ComfyUI gives the format where a file declares the formats of layers; empty if it has none.
    pub declared: &'static str,
    /// Consecutive elements of a row that belong together: they share a scale or bytes. A power of two.
    pub block: usize,
    /// Bytes of a block, without separately stored scales.
    pub block_bytes: usize,
    /// The separately stored scales.
    pub scales: ScaleKind,
    /// Whether this is a format of quantized weights.
    pub is_quantized: bool,
    /// Whether such weights are expanded at load, because no GEMM takes them.
    pub is_expanded: bool,
    /// How to quantize to this format. `None` if weights in it are only read.
    pub target: Option<Target>,
    /// Whether results can be stored in it, or only weights.
    pub holds_results: bool,
    /// Stored bits of the mantissa: how coarsely results are rounded. `None` for types that are practically exact.
    pub mantissa: Option<i32>,
    /// The largest magnitude of a value if the tensor scale is one.
    pub largest: f32,
    /// The smallest magnitude that is beyond the range of the elements, if activations may reach it.
    pub saturates_at: Option<f32>,
    /// The code of NaN without its sign, if there is exactly one.
    pub nan: Option<u8>,
    /// Decodes whole blocks, without separately stored scales.
    pub decode: fn(&[u8], &mut [f32]),
    /// Rounds values to nearest even and stores them in whole blocks.
    pub encode: fn(&[f32], &mut [u8]),
}

/// How weights are quantized to a format.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Help text for the format of a file.
    pub file_help: &'static str,
    /// Help text for the format of weights quantized at load.
    pub load_help: &'static str,
    /// The uncalibrated input scales: for inputs after norms and attention, and for inputs after SwiGLU. `None` if inputs stay
    /// plain.
    pub input_scales: Option<[Scale; 2]>,
}

/// The separately stored scales that elements of a format may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleKind {
    /// None.
    None,
    /// One for the whole tensor, or one per row. Without scales the elements are the values.
    TensorOrRows,
    /// One per block and one for the whole tensor.
    Blocks,
}

/// Defines the dtypes, each with its table row.
macro_rules! formats {
    ($($(#[$doc:meta])* $name:ident = $row:path,)+) => {
        /// The dtype: element type of a tensor. Lists use this order. Plain types come last, so that layers are named after their
        /// quantized type.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum DType {
            $($(#[$doc])* $name,)+
        }

        impl DType {
            /// All dtypes.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// The facts about the elements.
            pub const fn format(self) -> &'static Format {
                match self {
                    $(Self::$name => &$row,)+
                }
            }
        }
    };
}

formats! {
    /// FP8 with four exponent and three mantissa bits: no infinities, at most 448 (OCP E4M3, which PyTorch calls
    /// `float8_e4m3fn`).
    E4m3 = e4m3::FORMAT,
    /// FP4 with two exponent bits and one mantissa bit, at most 6 (OCP E2M1). Two elements share a byte: the even column is in
    /// the high nibble, as in the files of ComfyUI and BFL.
    E2m1 = nvfp4::FORMAT,
    /// FP8 with five exponent and two mantissa bits (OCP E5M2); weights only.
    E5m2 = e5m2::FORMAT,
    /// bfloat16.
    Bf16 = plain::BF16,
    /// IEEE half precision; weights only.
    F16 = plain::F16,
    /// IEEE single precision.
    F32 = plain::F32,
    /// Pixel values of a finished image, 0 to 255.
    U8 = plain::U8,
}

impl DType {
    /// Bits of one element, without scales.
    pub const fn bits(self) -> usize {
        8 * self.format().block_bytes / self.format().block
    }

    /// Bytes of consecutive elements that fill whole bytes or blocks.
    pub const fn bytes(self, elements: usize) -> usize {
        let Format { block, block_bytes, .. } = self.format();
        // Blocks are powers of two, and a shift is faster than a division. The incomplete block is counted separately: the bytes
        // of all elements may fit where the product with the block's bytes does not.
        let shift = block.trailing_zeros();
        (elements >> shift) * *block_bytes + (((elements & (*block - 1)) * *block_bytes) >> shift)
    }

    /// The number of elements in this many bytes.
    pub const fn elements(self, bytes: usize) -> usize {
        bytes * self.format().block / self.format().block_bytes
    }

    /// Alignment of an element in bytes.
    pub const fn align(self) -> usize {
        self.bits().div_ceil(8)
    }

    /// Whether this is a format of quantized weights.
    pub const fn is_quantized(self) -> bool {
        self.format().is_quantized
    }

    /// The name in messages.
    pub const fn name(self) -> &'static str {
        self.format().name
    }

    /// The name that users type.
    pub const fn label(self) -> &'static str {
        self.format().label
    }

    /// The formats of quantized weights.
    pub fn quantized() -> impl Iterator<Item = Self> {
        Self::ALL.iter().copied().filter(|dtype| dtype.is_quantized())
    }

    /// The formats that weights are quantized to, and how.
    pub fn targets() -> impl Iterator<Item = (Self, Target)> {
        Self::ALL.iter().filter_map(|dtype| Some((*dtype, dtype.format().target?)))
    }

    /// The element type that a safetensors dtype stands for if the file declares nothing else.
    pub fn stored_as(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.format().stored_as == name)
    }

    /// The plain element type that a safetensors dtype stands for.
    pub fn plain_stored_as(name: &str) -> Option<Self> {
        Self::stored_as(name).filter(|dtype| !dtype.is_quantized())
    }

    /// The types that weights may have, as in "A, B or C". Types whose names differ only in brackets are listed once.
    pub fn weight_types() -> String {
        let mut names: Vec<&str> = Vec::new();
        let plain = Self::ALL.iter().copied().filter(|dtype| Self::plain_stored_as(dtype.format().title) == Some(*dtype));
        for dtype in plain.chain(Self::quantized()) {
            let name = dtype.format().title.split(" (").next().unwrap_or_default();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let last = names.pop().unwrap_or_default();
        format!("{} or {last}", names.join(", "))
    }

    /// The scale with which a tensor, or one of its rows, with this largest magnitude just fits. `None` if it is not finite. In
    /// NVFP4 the block with this value gets the largest block scale.
    ///
    /// Zero is not a scale. Weights that are all zero, or so small that the quotient underflows, get a scale of one: with any
    /// scale that is not tiny, their codes are zero.
    pub fn scale_for(self, largest: f32) -> Option<Scale> {
        let scale = largest / self.format().largest;
        if scale == 0.0 { Some(Scale::ONE) } else { Scale::new(scale) }
    }

    /// Whether none of these elements is NaN, for formats with a single NaN code. Without an early exit the loop is vectorized.
    pub fn has_no_nan(self, codes: &[u8]) -> bool {
        self.format().nan.is_none_or(|nan| codes.iter().fold(true, |finite, code| finite & (code & nan != nan)))
    }

    /// Whether an element has the largest magnitude of this format of one byte per element. A quantizer's scale gives it to the largest
    /// value. Without an early exit the loop is vectorized.
    pub fn has_largest(self, codes: &[u8]) -> bool {
        let mut largest = [0];
        self.encode(&[self.format().largest], &mut largest);
        codes.iter().fold(false, |found, code| found | (code & 0x7f == largest[0]))
    }

    /// Decodes stored elements, without their scales. The elements are little-endian, as safetensors stores them, and need no
    /// alignment.
    ///
    /// # Panics
    /// If the number of elements differs from the number of values.
    pub fn decode(self, bytes: &[u8], to: &mut [f32]) {
        assert_eq!(bytes.len(), self.bytes(to.len()), "{self:?} of {} values", to.len());
        (self.format().decode)(bytes, to);
    }

    /// Rounds values to the nearest value of this type, ties to even, and stores them.
    ///
    /// # Panics
    /// As [`DType::decode`] does.
    pub fn encode(self, values: &[f32], to: &mut [u8]) {
        assert_eq!(to.len(), self.bytes(values.len()), "{self:?} of {} values", values.len());
        (self.format().encode)(values, to);
    }

    /// Rounds stored elements to another type.
    ///
    /// # Panics
    /// As [`DType::decode`] does.
    pub fn convert(self, bytes: &[u8], other: Self, to: &mut [u8]) {
        if self == other {
            return to.copy_from_slice(bytes);
        }
        let mut values = [0.0; CHUNK];
        for (bytes, to) in bytes.chunks(self.bytes(CHUNK)).zip(to.chunks_mut(other.bytes(CHUNK))) {
            let values = &mut values[..self.elements(bytes.len())];
            self.decode(bytes, values);
            other.encode(values, to);
        }
    }

    /// All values of stored elements.
    ///
    /// # Panics
    /// As [`DType::decode`] does.
    pub fn decoded(self, bytes: &[u8]) -> Vec<f32> {
        let mut values = vec![0.0; self.elements(bytes.len())];
        self.decode(bytes, &mut values);
        values
    }

    /// Encodes values as stored elements.
    ///
    /// # Panics
    /// As [`DType::decode`] does.
    pub fn encoded(self, values: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes(values.len())];
        self.encode(values, &mut bytes);
        bytes
    }
}

/// A positive, finite factor. It is compared by its bits, so that descriptors with a scale can be compared and hashed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Scale(u32);

impl Scale {
    /// The factor one.
    pub const ONE: Self = Self(0x3f80_0000);

    /// A factor, or `None` if the value is not positive and finite.
    pub fn new(value: f32) -> Option<Self> {
        (value.is_finite() && value > 0.0).then(|| Self(value.to_bits()))
    }

    /// The scale that a file may have for a whole weight or an input, or why it cannot have this one. Products of any element, block
    /// scale and scale are finite, and so is the product of two such values. The limits are far from the scales of trained models: a
    /// scale beyond them is damaged.
    pub fn stored(value: f32) -> Result<Self, &'static str> {
        match Self::new(value) {
            None => Err("a scale is positive and finite"),
            Some(_) if value > 1e7 => Err("too large for a scale"),
            Some(_) if value < 1e-15 => Err("too small for a scale"),
            Some(scale) => Ok(scale),
        }
    }

    /// Two to this power.
    ///
    /// # Panics
    /// If the power is below the normal numbers of f32.
    pub const fn power_of_two(exponent: i8) -> Self {
        assert!(exponent >= -126);
        Self(((exponent as i32 + 127) as u32) << 23)
    }

    /// The value of the scale.
    pub fn get(self) -> f32 {
        f32::from_bits(self.0)
    }
}

impl std::fmt::Debug for Scale {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.get())
    }
}

/// The scales of a format, without their location. A value is a decoded element times its scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scales {
    /// None.
    Unscaled,
    /// One for the whole tensor.
    Tensor(Scale),
    /// One f32 for each row.
    Rows,
    /// One e4m3 for every sixteen columns of a row, and one f32 for the whole tensor: NVFP4.
    Blocks16(Scale),
}

/// How values are stored: the element type and the scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stored {
    /// Element type.
    pub dtype: DType,
    /// The scales of the elements.
    pub scales: Scales,
}

impl Stored {
    /// Elements that are the values themselves.
    pub const fn plain(dtype: DType) -> Self {
        Self { dtype, scales: Scales::Unscaled }
    }

    /// Quantized elements with one tensor scale, and with block scales if the format has them.
    pub const fn scaled(dtype: DType, scale: Scale) -> Self {
        let scales = match dtype.format().scales {
            ScaleKind::None => Scales::Unscaled,
            ScaleKind::TensorOrRows => Scales::Tensor(scale),
            ScaleKind::Blocks => Scales::Blocks16(scale),
        };
        Self { dtype, scales }
    }

    /// The format of weights that are quantized at load. Depending on the format they have row scales, or block scales with this
    /// tensor scale, or none.
    pub const fn by_rows(dtype: DType, tensor: Scale) -> Self {
        match dtype.format().scales {
            ScaleKind::TensorOrRows => Self { dtype, scales: Scales::Rows },
            ScaleKind::None | ScaleKind::Blocks => Self::scaled(dtype, tensor),
        }
    }

    /// e4m3 with one scale.
    pub const fn fp8(scale: Scale) -> Self {
        Self { dtype: DType::E4m3, scales: Scales::Tensor(scale) }
    }

    /// NVFP4: e2m1 with block scales, relative to a tensor scale.
    pub const fn nvfp4(tensor: Scale) -> Self {
        Self { dtype: DType::E2m1, scales: Scales::Blocks16(tensor) }
    }
}

/// The scales of a tensor, with their location in the tensor's memory region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scaling {
    /// None.
    Unscaled,
    /// One for the whole tensor.
    Tensor(Scale),
    /// One f32 for each row, from this byte offset on.
    Rows(u64),
    /// The scales of NVFP4.
    Blocks16 {
        /// Byte offset of the block scales, in tiles as in [`nvfp4::scale_offset`].
        scales: u64,
        /// The factor of the whole tensor.
        tensor: Scale,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn bytes_and_elements_are_counted_in_bits() {
        let types = [DType::F32, DType::Bf16, DType::F16, DType::U8, DType::E4m3, DType::E5m2, DType::E2m1];
        assert_eq!(types.map(|dtype| dtype.bytes(48)), [192, 96, 96, 48, 48, 48, 24]);
        assert_eq!(types.map(|dtype| dtype.elements(48)), [12, 24, 24, 48, 48, 48, 96]);
        assert_eq!(types.map(DType::align), [4, 2, 2, 1, 1, 1, 1]);
    }

    #[test]
    fn types_of_weights_are_listed() {
        assert_eq!(DType::weight_types(), "BF16, F16, F32, FP8 or NVFP4");
    }

    #[test]
    fn a_scale_is_positive_and_finite() {
        for value in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(Scale::new(value), None);
        }
        for value in [f32::from_bits(1), 1.0, f32::MAX] {
            assert_eq!(Scale::new(value).map(Scale::get), Some(value));
        }
        assert_eq!(Scale::new(1.0), Some(Scale::ONE));
        for exponent in -126..=i8::MAX {
            assert_eq!(Scale::power_of_two(exponent).get(), 2f32.powi(i32::from(exponent)));
        }
    }

    #[test]
    fn every_half_precision_number_is_decoded_at_any_address() {
        let halves: Vec<u8> = [0].into_iter().chain((0..=u16::MAX).flat_map(u16::to_le_bytes)).collect();
        type Exact = fn(u16) -> f32;
        let types: [(DType, Exact); 2] =
            [(DType::F16, |bits| f16::from_bits(bits).to_f32()), (DType::Bf16, |bits| bf16::from_bits(bits).to_f32())];
        for (dtype, exact) in types {
            for (value, bits) in dtype.decoded(&halves[1..]).into_iter().zip(0..=u16::MAX) {
                let exact = exact(bits);
                assert!(value.to_bits() == exact.to_bits() || value.is_nan() && exact.is_nan(), "{dtype:?} {bits:04x}");
            }
        }
    }

    #[test]
    fn values_survive_every_type_that_holds_them() {
        // More than one block, but not a whole number of blocks.
        let values: Vec<f32> = (0..3 * CHUNK + 7).map(|i| (i % 256) as f32).collect();
        let types = [DType::F32, DType::Bf16, DType::F16, DType::U8];
        for dtype in types {
            let stored = dtype.encoded(&values);
            assert_eq!(dtype.decoded(&stored), values, "{dtype:?}");
            for other in types {
                let mut converted = vec![0; other.bytes(values.len())];
                dtype.convert(&stored, other, &mut converted);
                assert_eq!(converted, other.encoded(&values), "{dtype:?} to {other:?}");
            }
        }
        assert_eq!(DType::U8.encoded(&[-1.0, 0.5, 1.5, 254.6, 300.0]), [0, 0, 2, 255, 255]);
    }
}
