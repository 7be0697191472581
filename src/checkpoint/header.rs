//! Validates the header of a safetensors file before anything else looks at it.
//!
//! A weight file comes from the network and is mapped into memory, so nothing in its header is trusted: lengths are bounded first,
//! all arithmetic is checked, names are unique, and the tensors must tile the data region exactly. The ranges of a header that
//! passes can be sliced without further checks.

// Lengths here are untrusted, so every sum, product and conversion of one is checked, even where it looks safe.
#![deny(clippy::arithmetic_side_effects, clippy::cast_possible_truncation)]

use super::foreign::{self, FOREIGN};
use crate::error::{Error, Result};
use crate::text::{grouped, shown};
use serde::Deserialize;
use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::path::Path;

/// The maximum size of a header in bytes. The largest FLUX.2 header known has 85 kB; the format itself would allow 100 MB.
pub const MAX_HEADER: u64 = 4 << 20;
/// The maximum number of tensors in one file, and of strings in its metadata.
pub const MAX_TENSORS: usize = 4096;
/// The maximum length of a tensor name in bytes.
pub const MAX_NAME: usize = 256;
/// The maximum number of dimensions of a tensor.
const MAX_RANK: usize = 8;
/// Bytes of the little-endian length in front of the header.
const LENGTH: usize = size_of::<u64>();

const INVALID: &str = "invalid safetensors header";

/// A dtype that a safetensors header may name.
#[derive(Debug, PartialEq, Eq)]
pub struct StoredDtype {
    /// The name that the header spells.
    pub name: &'static str,
    /// Bits of one element.
    pub bits: u64,
}

const fn dtype(name: &'static str, bits: u64) -> StoredDtype {
    StoredDtype { name, bits }
}

static STORED_DTYPES: [StoredDtype; 22] = [
    dtype("BOOL", 8),
    dtype("F4", 4),
    dtype("F6_E2M3", 6),
    dtype("F6_E3M2", 6),
    dtype("U8", 8),
    dtype("I8", 8),
    dtype("F8_E5M2", 8),
    dtype("F8_E4M3", 8),
    dtype("F8_E8M0", 8),
    dtype("F8_E4M3FNUZ", 8),
    dtype("F8_E5M2FNUZ", 8),
    dtype("I16", 16),
    dtype("U16", 16),
    dtype("F16", 16),
    dtype("BF16", 16),
    dtype("I32", 32),
    dtype("U32", 32),
    dtype("F32", 32),
    dtype("C64", 64),
    dtype("F64", 64),
    dtype("I64", 64),
    dtype("U64", 64),
];

/// One tensor of a file.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The tensor's dtype.
    pub dtype: &'static StoredDtype,
    /// The tensor's dimensions; empty for a scalar.
    pub shape: Vec<usize>,
    /// The tensor's byte range in the file.
    pub range: Range<usize>,
}

/// A header that is consistent with itself and with the file's length.
#[derive(Clone, Debug)]
pub struct Header {
    /// Tensors by name.
    pub tensors: BTreeMap<String, Entry>,
    /// The file's metadata: a free-form map of strings.
    pub metadata: BTreeMap<String, String>,
}

impl Header {
    /// Reads and checks the header of `file`. `path` is for messages only.
    pub fn parse(path: &Path, file: &[u8]) -> Result<Self> {
        let data_start = header_end(path, file)?;
        let invalid = |detail: String| Error::bad_file(path, INVALID, detail);
        // The copy is on purpose: another process may write to a mapped file, and a `str` must stay valid UTF-8.
        let json = file[LENGTH..data_start].to_vec();
        let json = String::from_utf8(json).map_err(|e| invalid(format!("not UTF-8: {e}")))?;

        let mut raw = Raw::default();
        let mut reader = serde_json::Deserializer::from_str(&json);
        let parsed = RawSeed(&mut raw).deserialize(&mut reader).and_then(|()| reader.end());
        if let Err(error) = parsed {
            return Err(invalid(match &raw.current {
                Some(name) => format!("tensor `{}`: {error}", shown(name)),
                None => error.to_string(),
            }));
        }

        let mut extents = Vec::with_capacity(raw.tensors.len());
        for (name, tensor) in &raw.tensors {
            let checked = tensor.check().map_err(|what| invalid(format!("tensor `{name}`: {what}")))?;
            extents.push((tensor.data_offsets, name.as_str(), checked));
        }
        extents.sort_by(|a, b| (a.0, a.1).cmp(&(b.0, b.1)));
        check_tiling(&extents).map_err(invalid)?;

        // Offsets are contiguous, so the last end is the length of the data.
        let data = extents.last().map_or(0, |(offsets, ..)| offsets[1]);
        let in_file = |offset: u64| {
            let place = usize::try_from(offset).ok().and_then(|offset| data_start.checked_add(offset));
            place.ok_or_else(|| invalid(format!("describes {} bytes of data, more than any file can have", grouped(data))))
        };
        let (have, described) = (file.len(), in_file(data)?);
        if have < described {
            return Err(truncated(path, have, described, ""));
        }
        if have > described {
            return Err(invalid(format!("{} bytes follow the last tensor", grouped(have.abs_diff(described) as u64))));
        }

        let mut tensors = BTreeMap::new();
        for ([begin, end], name, (dtype, shape)) in extents {
            let range = in_file(begin)?..in_file(end)?;
            tensors.insert(name.to_owned(), Entry { dtype, shape, range });
        }
        Ok(Self { tensors, metadata: raw.metadata.unwrap_or_default() })
    }
}

/// The end of the header, if the file begins with a safetensors header and holds all of it.
fn header_end(path: &Path, file: &[u8]) -> Result<usize> {
    if file.is_empty() {
        return Err(Error::bad_file(path, FOREIGN, "it is empty").with_hint("download the file again"));
    }
    let Some((length, rest)) = file.split_first_chunk::<LENGTH>() else {
        return Err(foreign::format(path, file).unwrap_or_else(|| truncated(path, file.len(), LENGTH, "at least ")));
    };
    let length = u64::from_le_bytes(*length);
    let opening = rest.first();
    // Other formats are considered only if this cannot be a safetensors file: one with a 640-byte header begins like a pickle.
    let implausible = length > MAX_HEADER || opening.is_some_and(|&byte| byte != b'{');
    if let Some(error) = implausible.then(|| foreign::format(path, file)).flatten() {
        return Err(error);
    }
    let end = usize::try_from(length).ok().and_then(|length| length.checked_add(LENGTH)).filter(|_| length <= MAX_HEADER);
    let Some(end) = end else {
        let detail = format!("header is {} bytes, limit {}", grouped(length), grouped(MAX_HEADER));
        return Err(Error::bad_file(path, INVALID, detail));
    };
    if length < 2 {
        return Err(Error::bad_file(path, INVALID, format!("header is {length} bytes, the shortest possible has 2")));
    }
    if opening.is_some_and(|&byte| byte != b'{') {
        return Err(Error::bad_file(path, INVALID, "does not begin with `{`"));
    }
    if file.len() < end {
        return Err(truncated(path, file.len(), end, "at least "));
    }
    Ok(end)
}

fn truncated(path: &Path, have: usize, described: usize, qualifier: &str) -> Error {
    let missing = grouped(described.abs_diff(have) as u64);
    let (have, described) = (grouped(have as u64), grouped(described as u64));
    let detail = format!("has {have} bytes, its header describes {qualifier}{described}");
    Error::bad_file(path, "truncated file", detail).with_hint(format!("download again; {qualifier}{missing} bytes are missing"))
}

/// A tensor's offsets, name, dtype and shape; the last two come from `RawEntry::check`.
type Extent<'a> = ([u64; 2], &'a str, (&'static StoredDtype, Vec<usize>));

/// Checks that extents sorted by offset follow each other without overlap or gap.
fn check_tiling(extents: &[Extent<'_>]) -> Result<(), String> {
    let mut cursor = 0;
    let mut previous: Option<&Extent<'_>> = None;
    for extent in extents {
        let ([begin, end], name, _) = extent;
        if *begin < cursor {
            let ([before, after], other, _) = previous.unwrap_or(extent);
            return Err(format!("tensor `{other}` [{before},{after}) overlaps `{name}` [{begin},{end})"));
        }
        if *begin > cursor {
            return Err(format!(
                "{} bytes before tensor `{name}` [{begin},{end}) belong to no tensor",
                grouped(begin.abs_diff(cursor))
            ));
        }
        cursor = *end;
        previous = Some(extent);
    }
    Ok(())
}

/// A tensor as the header describes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: String,
    #[serde(deserialize_with = "dimensions")]
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl RawEntry {
    /// Checks dtype, shape and length against each other.
    fn check(&self) -> Result<(&'static StoredDtype, Vec<usize>), String> {
        let dtype = STORED_DTYPES.iter().find(|t| t.name == self.dtype);
        let dtype = dtype.ok_or_else(|| format!("unknown dtype `{}`", shown(&self.dtype)))?;
        let too_large = || format!("shape {:?} of {} overflows", self.shape, dtype.name);
        let elements = self.shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim)).ok_or_else(too_large)?;
        let bits = elements.checked_mul(dtype.bits).ok_or_else(too_large)?;
        if !bits.is_multiple_of(8) {
            return Err(format!("shape {:?} of {} does not fill whole bytes", self.shape, dtype.name));
        }
        let shape = self.shape.iter().map(|&dim| usize::try_from(dim)).collect::<Result<_, _>>().map_err(|_| too_large())?;
        let [begin, end] = self.data_offsets;
        let length = end.checked_sub(begin).ok_or_else(|| format!("data_offsets [{begin},{end}] run backwards"))?;
        if length != bits / 8 {
            let need = grouped(bits / 8);
            return Err(format!(
                "shape {:?} of {} needs {need} bytes, data_offsets [{begin},{end}] give {}",
                self.shape,
                dtype.name,
                grouped(length)
            ));
        }
        Ok((dtype, shape))
    }
}

/// Reads a shape, but stops after the maximum number of dimensions: a header has room for millions.
fn dimensions<'de, D: Deserializer<'de>>(reader: D) -> Result<Vec<u64>, D::Error> {
    struct Shape;
    impl<'de> Visitor<'de> for Shape {
        type Value = Vec<u64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a sequence")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
            let mut shape = Vec::new();
            while let Some(dim) = seq.next_element()? {
                if shape.len() == MAX_RANK {
                    return Err(de::Error::custom(format!("more than {MAX_RANK} dimensions")));
                }
                shape.push(dim);
            }
            Ok(shape)
        }
    }
    reader.deserialize_seq(Shape)
}

/// The header as parsed so far. `current` is the tensor being read, for the message if its entry is broken.
#[derive(Default)]
struct Raw {
    tensors: BTreeMap<String, RawEntry>,
    metadata: Option<BTreeMap<String, String>>,
    current: Option<String>,
}

struct RawSeed<'a>(&'a mut Raw);

impl<'de> DeserializeSeed<'de> for RawSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<(), D::Error> {
        reader.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for RawSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let raw = self.0;
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                let UniqueMap(metadata) = map.next_value()?;
                if raw.metadata.replace(metadata).is_some() {
                    return Err(de::Error::custom("`__metadata__` is there twice"));
                }
                continue;
            }
            if name.len() > MAX_NAME {
                return Err(de::Error::custom(format!("the name `{}` has {} bytes, limit {MAX_NAME}", shown(&name), name.len())));
            }
            // Names are printed to terminals, which interpret control characters.
            if name.chars().any(char::is_control) {
                return Err(de::Error::custom(format!("the name `{}` has control characters", shown(&name))));
            }
            if raw.tensors.contains_key(&name) {
                return Err(de::Error::custom(format!("tensor `{name}` is there twice")));
            }
            if raw.tensors.len() == MAX_TENSORS {
                return Err(de::Error::custom(format!("more than {MAX_TENSORS} tensors")));
            }
            raw.current = Some(name.clone());
            let entry = map.next_value()?;
            raw.current = None;
            raw.tensors.insert(name, entry);
        }
        Ok(())
    }
}

/// A JSON object without duplicate keys; in serde's own maps the last one wins. The number of entries is bounded, because a short
/// string takes ten times as many bytes in memory as in the file.
pub(super) struct UniqueMap<V>(pub BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        struct Entries<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
            type Value = UniqueMap<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueMap<V>, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, V>()? {
                    if entries.contains_key(&key) {
                        return Err(de::Error::custom(format!("`{}` is there twice", shown(&key))));
                    }
                    if entries.len() == MAX_TENSORS {
                        return Err(de::Error::custom(format!("more than {MAX_TENSORS} entries")));
                    }
                    entries.insert(key, value);
                }
                Ok(UniqueMap(entries))
            }
        }
        reader.deserialize_map(Entries(PhantomData))
    }
}
