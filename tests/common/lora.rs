//! Adapter files as trainers write them, and malformed ones.

use crate::fnv::fnv1a;
use crate::header::safetensors;
use crate::random::splitmix;
use kiln::internals::tensor::DType;

/// A tensor of a file.
#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// A tensor with these values, in one of the element types of adapters.
    pub fn new(name: &str, dtype: DType, shape: &[usize], values: &[f32]) -> Self {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "{name}");
        let tag = match dtype {
            DType::Bf16 => "BF16",
            DType::F16 => "F16",
            _ => "F32",
        };
        Self { name: name.into(), dtype: tag.into(), shape: shape.to_vec(), bytes: dtype.encoded(values) }
    }

    /// A tensor of hashed values with unit gain, like the tiny model's.
    pub fn hashed(name: &str, dtype: DType, shape: &[usize]) -> Self {
        Self::new(name, dtype, shape, &hashed_values(name, shape))
    }
}

/// The values of the tensor `name`, by the formula in `tools/goldens`.
pub fn hashed_values(name: &str, shape: &[usize]) -> Vec<f32> {
    let fan_in = shape[1..].iter().product::<usize>();
    let e = (0..).find(|e| 4_usize.pow(e + 1) >= fan_in).unwrap();
    let start = fnv1a(name.bytes());
    let value = |i: u64| (2.0 * f32::from((splitmix(start, i) >> 56) as u8) - 255.0) / 256.0 / 2_f32.powi(e as i32);
    (0..shape.iter().product::<usize>() as u64).map(value).collect()
}

/// A file.
#[derive(Clone, Default)]
pub struct File {
    pub tensors: Vec<Tensor>,
    pub metadata: Vec<(String, String)>,
}

impl File {
    pub fn of(tensors: impl IntoIterator<Item = Tensor>) -> Self {
        Self { tensors: tensors.into_iter().collect(), metadata: Vec::new() }
    }

    /// Adds a tensor.
    pub fn with(mut self, tensor: Tensor) -> Self {
        self.tensors.push(tensor);
        self
    }

    pub fn with_metadata(mut self, key: &str, value: &str) -> Self {
        self.metadata.push((key.into(), value.into()));
        self
    }

    /// The header's text.
    pub fn header(&self) -> String {
        let mut entries = Vec::new();
        if !self.metadata.is_empty() {
            let quoted = |text: &str| serde_json::Value::from(text).to_string();
            let pairs: Vec<_> = self.metadata.iter().map(|(k, v)| format!("{}:{}", quoted(k), quoted(v))).collect();
            entries.push(format!("\"__metadata__\":{{{}}}", pairs.join(",")));
        }
        let mut offset = 0;
        for Tensor { name, dtype, shape, bytes } in &self.tensors {
            let end = offset + bytes.len();
            entries.push(format!("{name:?}:{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{offset},{end}]}}"));
            offset = end;
        }
        format!("{{{}}}", entries.join(","))
    }

    pub fn data(&self) -> Vec<u8> {
        self.tensors.iter().flat_map(|tensor| tensor.bytes.clone()).collect()
    }

    pub fn bytes(&self) -> Vec<u8> {
        safetensors(self.header(), &self.data())
    }
}

/// Both LoRA factors of a layer.
pub fn pair(layer: &str, [down, up]: [&str; 2], [rows, cols]: [usize; 2], rank: usize, dtype: DType) -> [Tensor; 2] {
    [
        Tensor::hashed(&format!("{layer}{down}"), dtype, &[rank, cols]),
        Tensor::hashed(&format!("{layer}{up}"), dtype, &[rows, rank]),
    ]
}
