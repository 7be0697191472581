//! How a tensor stores its values: the element type, counted in bits, and the scales that decoded elements are multiplied by.

/// The dtype: element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision; weights only.
    F16,
    /// Pixel values of a finished image, 0 to 255.
    U8,
    /// FP8 with four exponent and three mantissa bits: no infinities, at most 448 (OCP E4M3, which PyTorch calls
    /// `float8_e4m3fn`).
    E4m3,
    /// FP8 with five exponent and two mantissa bits (OCP E5M2); weights only.
    E5m2,
    /// FP4 with two exponent bits and one mantissa bit, at most 6 (OCP E2M1). Two elements share a byte: the even column is in
    /// the high nibble, as in the files of ComfyUI and BFL.
    E2m1,
}

impl DType {
    /// Bits of one element.
    pub const fn bits(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::Bf16 | Self::F16 => 16,
            Self::U8 | Self::E4m3 | Self::E5m2 => 8,
            Self::E2m1 => 4,
        }
    }

    /// Bytes of consecutive elements.
    pub const fn bytes(self, elements: usize) -> usize {
        elements * self.bits() / 8
    }

    /// The number of elements in so many bytes.
    pub const fn elements(self, bytes: usize) -> usize {
        bytes * 8 / self.bits()
    }

    /// Alignment of an element in bytes.
    pub const fn align(self) -> usize {
        self.bits().div_ceil(8)
    }

    /// Whether this is a format that weights are quantised to: one with scales beside it.
    pub const fn is_quantised(self) -> bool {
        matches!(self, Self::E4m3 | Self::E5m2 | Self::E2m1)
    }

    /// The name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::U8 => "u8",
            Self::E4m3 => "e4m3",
            Self::E5m2 => "e5m2",
            Self::E2m1 => "e2m1",
        }
    }
}

/// A positive, finite factor. It is compared by its bits, so that descriptors that contain one can be compared and hashed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Scale(u32);

impl Scale {
    /// The factor one.
    pub const ONE: Self = Self(0x3f80_0000);

    /// A factor, or `None` if the value is not positive and finite.
    pub fn new(value: f32) -> Option<Self> {
        (value.is_finite() && value > 0.0).then(|| Self(value.to_bits()))
    }

    /// Two to this power.
    ///
    /// # Panics
    /// If it is below the normal numbers of f32.
    pub const fn power_of_two(exponent: i8) -> Self {
        assert!(exponent >= -126);
        Self(((exponent as i32 + 127) as u32) << 23)
    }

    /// Its value.
    pub fn get(self) -> f32 {
        f32::from_bits(self.0)
    }
}

impl std::fmt::Debug for Scale {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.get())
    }
}

/// Which scales a format has, without their location: a value is a decoded element times its scales.
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
    /// Scales beside the elements.
    pub scales: Scales,
}

impl Stored {
    /// Elements that are the values themselves.
    pub const fn plain(dtype: DType) -> Self {
        Self { dtype, scales: Scales::Unscaled }
    }

    /// e4m3 with one scale.
    pub const fn fp8(scale: Scale) -> Self {
        Self { dtype: DType::E4m3, scales: Scales::Tensor(scale) }
    }

    /// NVFP4: e2m1 with a scale for every block, relative to one of the whole tensor.
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
        /// Byte offset of the block scales, in tiles as [`nvfp4::scale_offset`](super::nvfp4::scale_offset) describes them.
        scales: u64,
        /// The factor of the whole tensor.
        tensor: Scale,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_elements_are_counted_in_bits() {
        let types = [DType::F32, DType::Bf16, DType::F16, DType::U8, DType::E4m3, DType::E5m2, DType::E2m1];
        assert_eq!(types.map(|dtype| dtype.bytes(48)), [192, 96, 96, 48, 48, 48, 24]);
        assert_eq!(types.map(|dtype| dtype.elements(48)), [12, 24, 24, 48, 48, 48, 96]);
        assert_eq!(types.map(DType::align), [4, 2, 2, 1, 1, 1, 1]);
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
}
