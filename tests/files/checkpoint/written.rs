//! Writes safetensors files tensor by tensor, with quantized layers in them.

use super::{Described, described, shard};
use common::header::{header_of, safetensors};
use kiln::error::Result;
use kiln::internals::checkpoint::{Shard, Weights};
use kiln::internals::component::Component;

/// A file that stores its tensors in the order in which they are added.
#[derive(Clone, Default)]
pub struct Written {
    pub tensors: Vec<(Described, Vec<u8>)>,
    /// Entries of the header's metadata.
    pub metadata: Vec<(String, String)>,
}

impl Written {
    /// Adds a tensor.
    pub fn add(&mut self, name: &str, element: &'static str, shape: &[usize], bytes: impl Into<Vec<u8>>) {
        self.tensors.push((described(name, element, shape), bytes.into()));
    }

    /// Adds a single scale.
    pub fn scale(&mut self, name: &str, value: f32) {
        self.add(name, "F32", &[], value.to_le_bytes());
    }

    /// Adds the settings of a layer as a tensor.
    pub fn settings(&mut self, layer: &str, json: &str) {
        self.add(&format!("{layer}.comfy_quant"), "U8", &[json.len()], json);
    }

    /// Adds an entry of the metadata.
    pub fn note(&mut self, key: &str, value: &str) {
        self.metadata.push((key.into(), value.into()));
    }

    /// Declares layers in the metadata.
    pub fn declare(&mut self, layers: &[(&str, &str)]) {
        let list: Vec<String> = layers.iter().map(|(layer, settings)| format!(r#""{layer}": {settings}"#)).collect();
        self.note("_quantization_metadata", &format!(r#"{{"format_version": "1.0", "layers": {{{}}}}}"#, list.join(", ")));
    }

    /// Adds an NVFP4 weight with its scales.
    pub fn nvfp4(&mut self, layer: &str, [rows, cols]: [usize; 2], codes: &[u8], scales: &[u8], tensor: f32) {
        self.add(&format!("{layer}.weight"), "U8", &[rows, cols / 2], codes);
        let shape = if scales.len() == rows * cols / 16 { [rows, cols / 16] } else { padded([rows, cols / 16]) };
        self.add(&format!("{layer}.weight_scale"), "F8_E4M3", &shape, scales);
        self.scale(&format!("{layer}.weight_scale_2"), tensor);
    }

    /// The tensor with this name, to be changed.
    pub fn tensor(&mut self, name: &str) -> &mut (Described, Vec<u8>) {
        self.tensors.iter_mut().find(|((other, ..), _)| other == name).unwrap()
    }

    /// Removes a tensor.
    pub fn remove(&mut self, name: &str) {
        let before = self.tensors.len();
        self.tensors.retain(|((other, ..), _)| other != name);
        assert_eq!(self.tensors.len() + 1, before, "{name}");
    }

    /// The content of the file.
    pub fn bytes(&self) -> Vec<u8> {
        let notes: Vec<String> = self.metadata.iter().map(|(key, value)| format!("{}:{}", json(key), json(value))).collect();
        let more = if notes.is_empty() { String::new() } else { format!(r#""__metadata__":{{{}}},"#, notes.join(",")) };
        let tensors: Vec<Described> = self.tensors.iter().map(|(tensor, _)| tensor.clone()).collect();
        let (header, data) = header_of(&tensors, &more);
        let mut file = safetensors(&header, &[]);
        self.tensors.iter().for_each(|(_, bytes)| file.extend(bytes));
        assert_eq!(file.len(), 8 + header.len() + data, "a tensor has another size than its shape says");
        file
    }

    pub fn shard(&self) -> Shard {
        shard(self.bytes()).unwrap()
    }

    pub fn open(&self, part: Component) -> Result<Weights> {
        Weights::from_shards(part, vec![self.shard()])
    }
}

fn json(text: &str) -> String {
    serde_json::to_string(text).unwrap()
}

/// The shape of block scales in tiles.
pub fn padded([rows, blocks]: [usize; 2]) -> [usize; 2] {
    [rows.next_multiple_of(128), blocks.next_multiple_of(4)]
}
