//! Safetensors headers, and quantized layers in them.

use crate::{Reader, check_file_error};
use common::cost::peak_of;
use kiln::error::Result;
use kiln::internals::checkpoint::{Shard, Weights};
use kiln::internals::component::Component;
use kiln::internals::names::TensorSpec;
use kiln::internals::tensor::{Bytes, DType, Scales};
use safetensors::SafeTensors;
use safetensors::tensor::serialize;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The most data that is made up for a header.
const MOST_DATA: u64 = 256 << 10;

/// Makes the bytes of a file. An input that begins with `{` is a header up to the first line feed, and then data, which is repeated to the
/// length that the header describes. Any other input is the whole file. Tensors without offsets follow each other in the order of their
/// names, so that another shape or type is all that changes.
pub(crate) fn file(data: &[u8]) -> Vec<u8> {
    if !data.starts_with(b"{") {
        return data.to_vec();
    }
    let mut rest = Reader(data);
    let header = rest.line();
    let (header, length) = laid_out(header).unwrap_or((header.into(), None));
    let length = length.filter(|length| *length <= MOST_DATA).map_or(rest.0.len(), |length| length as usize);
    [&(header.len() as u64).to_le_bytes()[..], &header, &rest.repeated(length)].concat()
}

/// A header with offsets for all tensors, and the largest offset. It is the same text if it has them.
fn laid_out(text: &[u8]) -> Option<(Cow<'_, [u8]>, Option<u64>)> {
    let mut header: BTreeMap<String, Value> = serde_json::from_slice(text).ok()?;
    let (mut end, mut changed) = (0, false);
    for entry in header.values_mut().filter_map(Value::as_object_mut) {
        if let Some(offsets) = entry.get("data_offsets") {
            end = end.max(offsets.get(1).and_then(Value::as_u64).unwrap_or(0));
        } else if let Some(bytes) = bytes(entry) {
            let next = end.checked_add(bytes)?;
            entry.insert("data_offsets".into(), vec![end, next].into());
            (end, changed) = (next, true);
        }
    }
    let text = if changed { serde_json::to_vec(&header).ok()?.into() } else { text.into() };
    Some((text, Some(end)))
}

/// The bytes of a tensor.
fn bytes(entry: &Map<String, Value>) -> Option<u64> {
    let bits = match entry.get("dtype")?.as_str()? {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "F16" | "BF16" | "I16" | "U16" => 16,
        "F32" | "I32" | "U32" => 32,
        "F64" | "I64" | "U64" | "C64" => 64,
        _ => 8,
    };
    let sides = entry.get("shape")?.as_array()?.iter().map(Value::as_u64);
    let bits = sides.into_iter().try_fold(bits, |bits: u64, side| bits.checked_mul(side?))?;
    Some(bits.div_ceil(8))
}

pub(crate) fn open(file: Vec<u8>) -> Result<Shard> {
    Shard::from_bytes("x.safetensors", Bytes::new(Arc::new(file)))
}

/// A header in what [`file`] makes of the input. The tensors of an accepted file tile its data, they are those that the `safetensors` crate
/// reads, and written by that crate they are read again. Memory is bounded by the length of the file.
pub fn safetensors(data: &[u8]) {
    let file = file(data);
    let (opened, peak) = peak_of(|| open(file.clone()));
    assert!(peak <= (1 << 16) + 64 * file.len() as isize, "{peak} bytes for a file of {}", file.len());
    let shard = match opened {
        Ok(shard) => shard,
        Err(error) => return check_file_error(&error),
    };
    let header = 8 + u64::from_le_bytes(*file.first_chunk().expect("it was accepted")) as usize;
    let mut extents: Vec<(usize, usize)> = Vec::new();
    for (name, entry) in shard.tensors() {
        let bits = entry.shape.iter().fold(entry.dtype.bits as u128, |bits, side| bits * *side as u128);
        assert_eq!(8 * entry.range.len() as u128, bits, "{name}");
        assert_eq!(shard.bytes(name).expect("its range lies in the file")[..], file[entry.range.clone()], "{name}");
        assert!(!name.chars().any(char::is_control), "{name:?}");
        extents.push((entry.range.start, entry.range.end));
    }
    extents.sort_unstable();
    let end = extents.iter().fold(header, |end, extent| {
        assert_eq!(extent.0, end, "tensors overlap, or leave a gap");
        extent.1
    });
    assert_eq!(end, file.len());

    let Ok(reference) = SafeTensors::deserialize(&file) else { return };
    assert_eq!(reference.len(), shard.tensors().count());
    for (name, view) in reference.iter() {
        let entry = shard.entry(name).unwrap_or_else(|| panic!("only the safetensors crate finds `{name}`"));
        assert_eq!((view.shape(), view.data()), (&entry.shape[..], &file[entry.range.clone()]), "{name}");
    }
    let metadata: HashMap<String, String> = shard.metadata().clone().into_iter().collect();
    // Without tensors the crate writes empty metadata as invalid JSON.
    let Ok(written) = serialize(reference.iter(), Some(metadata).filter(|metadata| !metadata.is_empty())) else { return };
    let again = open(written).unwrap_or_else(|error| panic!("written by the safetensors crate it is refused: {error}"));
    assert_eq!(again.metadata(), shard.metadata());
    for (name, entry) in shard.tensors() {
        let other = again.entry(name).expect("it was written");
        assert_eq!((&other.shape, other.dtype), (&entry.shape, entry.dtype), "{name}");
        assert_eq!(again.bytes(name).as_deref(), shard.bytes(name).as_deref(), "{name}");
    }
}

/// Quantized layers, declared by metadata or by tensors, in what [`file`] makes of the input. Every weight that kiln accepts has the rows of
/// its shape and all of its scales, and decodes to numbers.
pub fn quantization(data: &[u8]) {
    let Ok(shard) = open(file(data)) else { return };
    for part in [Component::Transformer, Component::TextEncoder] {
        let weights = match Weights::from_shards(part, vec![shard.clone()]) {
            Ok(weights) => weights,
            Err(error) => {
                check_file_error(&error);
                continue;
            }
        };
        let specs: Vec<TensorSpec> =
            weights.names().filter_map(|name| Some(TensorSpec::new(name, &weights.shape(name)?))).collect();
        if let Err(error) = weights.check(&specs) {
            check_file_error(&error);
        }
        specs.iter().for_each(|spec| check_weight(&weights, spec));
    }
}

fn check_weight(weights: &Weights, spec: &TensorSpec) {
    let weight = match weights.weight(spec).and_then(|weight| weights.check_scales(&spec.name).map(|()| weight)) {
        Ok(weight) => weight,
        Err(error) => return check_file_error(&error),
    };
    if let Some(input) = weight.input {
        let (Scales::Tensor(scale) | Scales::Blocks16(scale)) = input.scales else { panic!("{input:?}") };
        assert!(scale.get() > 0.0 && scale.get().is_finite(), "{}: {input:?}", spec.name);
    }
    let rows: usize = weight.parts.iter().map(|part| part.rows).sum();
    assert_eq!(rows, if spec.shape.len() < 2 { weight.parts.len() } else { spec.shape[0] }, "{}", spec.name);
    for part in &weight.parts {
        assert!(part.is_complete(), "{}: {} bytes for {} rows", spec.name, part.bytes.len(), part.rows);
        let mut row = vec![0.0; part.cols()];
        for index in [0, part.rows / 2, part.rows - 1] {
            part.decode(index, &mut row);
            // Elements of FP8 may be NaN, and of E5M2 infinite.
            let special = |at: usize| match (part.dtype, part.bytes.get(index * row.len() + at)) {
                (DType::E4m3, Some(code)) => code & 0x7f == 0x7f,
                (DType::E5m2, Some(code)) => code & 0x7c == 0x7c,
                _ => false,
            };
            let plain = !part.dtype.is_quantized();
            assert!(
                plain || row.iter().enumerate().all(|(at, value)| value.is_finite() || special(at)),
                "{}: row {index} is not finite",
                spec.name
            );
        }
    }
}
