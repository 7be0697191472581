//! Headers with random faults, in addition to the directed cases; a reader without checks is the control.

use super::random::{Random, cases};
use super::{message, shard};
use kiln::checkpoint::Shard;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

const TYPES: [&str; 8] = ["U8", "BF16", "F32", "F64", "F4", "F6_E2M3", "C64", "F128"];
const WORDS: [&str; 12] =
    ["0", "1", "-1", "4294967296", "2305843009213693951", "18446744073709551615", "1e99", "[]", "null", "\"", "}", "\\u0000"];

/// A file of a few tensors. Each number may be replaced by a large one, tensors may be doubled, removed or swapped, and in half
/// of the files some random bytes are changed.
fn mutated(random: &mut Random) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut offset = 0;
    for i in 0..random.below(5) {
        let kind = random.below(TYPES.len());
        let shape: Vec<u64> = (0..random.below(4)).map(|_| number(random, 3)).collect();
        let bits = [8, 16, 32, 64, 4, 6, 64, 8][kind];
        let bytes = shape.iter().fold(bits, |product: u64, &dim| product.wrapping_mul(dim)) / 8;
        let begin = if random.below(16) == 0 { random.size() } else { offset };
        let end = if random.below(16) == 0 { random.size() } else { begin.wrapping_add(bytes) };
        offset = end;
        let name = if random.below(16) == 0 { 0 } else { i };
        let dtype = TYPES[kind];
        entries.push(format!(r#""t{name}.weight":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#));
    }
    if random.below(4) == 0 {
        entries.push(r#""__metadata__":{"format":"pt"}"#.into());
    }
    if !entries.is_empty() && random.below(8) == 0 {
        let (from, to) = (random.below(entries.len()), random.below(entries.len()));
        entries.swap(from, to);
    }
    let header = format!("{{{}}}", entries.join(","));
    let length = if random.below(16) == 0 { random.size() } else { header.len() as u64 };
    let data = if random.below(16) == 0 { random.below(64) } else { offset.min(4096) as usize };
    let mut file = [&length.to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat();
    if random.below(2) == 0 {
        random.mutate(&mut file, &WORDS);
    }
    file
}

/// Mostly a small number, sometimes one of any magnitude.
fn number(random: &mut Random, small: usize) -> u64 {
    if random.below(16) == 0 { random.size() } else { random.below(small) as u64 + 1 }
}

/// A reader of a file, which returns the byte ranges of the tensors, or none if it refuses the file.
type Reader = fn(&[u8]) -> Option<Vec<Range<usize>>>;

fn kiln(file: &[u8]) -> Option<Vec<Range<usize>>> {
    match shard(file.to_vec()) {
        Ok(shard) => {
            consistent(&shard);
            Some(shard.tensors().map(|(_, entry)| entry.range.clone()).collect())
        }
        Err(error) => {
            assert!(message(&error).contains("(x.safetensors)"), "{error}");
            None
        }
    }
}

/// Every tensor of an accepted file can be read to its last byte, and its length agrees with its shape.
fn consistent(shard: &Shard) {
    for (name, entry) in shard.tensors() {
        let elements: u128 = entry.shape.iter().map(|&dim| dim as u128).product();
        let bytes = shard.bytes(name).unwrap();
        assert_eq!(bytes.len() as u128 * 8, elements * u128::from(entry.dtype.bits), "{name}");
        std::hint::black_box(bytes.iter().fold(0u8, |sum, byte| sum ^ byte));
    }
}

/// A reader without checks, which trusts every offset.
fn believing(file: &[u8]) -> Option<Vec<Range<usize>>> {
    let length = u64::from_le_bytes(file.get(..8)?.try_into().ok()?) as usize;
    let header: serde_json::Value = serde_json::from_slice(file.get(8..length.checked_add(8)?)?).ok()?;
    let tensors = header.as_object()?.iter().filter(|(name, _)| *name != "__metadata__");
    let offset = |value: &serde_json::Value| Some((value.as_u64()? as usize).wrapping_add(8 + length));
    tensors.map(|(_, entry)| Some(offset(&entry["data_offsets"][0])?..offset(&entry["data_offsets"][1])?)).collect()
}

/// The number of accepted files, of those with a tensor outside of the file, and of those with overlapping tensors.
fn faults(reader: Reader, short: u64, long: u64) -> [usize; 3] {
    let [accepted, outside, shared] = [const { AtomicUsize::new(0) }; 3];
    cases("mutated headers", short, long, |random| {
        let file = mutated(random);
        let Some(mut ranges) = reader(&file) else { return };
        accepted.fetch_add(1, Ordering::Relaxed);
        if ranges.iter().any(|range| file.get(range.clone()).is_none()) {
            outside.fetch_add(1, Ordering::Relaxed);
        }
        ranges.sort_by_key(|range| (range.start, range.end));
        if ranges.windows(2).any(|pair| pair[0].end > pair[1].start) {
            shared.fetch_add(1, Ordering::Relaxed);
        }
    });
    [accepted, outside, shared].map(AtomicUsize::into_inner)
}

#[test]
fn mutated_headers_never_panic_nor_lead_out_of_the_file() {
    let [accepted, outside, shared] = faults(kiln, 200_000, 10_000_000);
    assert_eq!([outside, shared], [0, 0]);
    // Changed data and changed names are still valid files.
    assert!(accepted > 10_000, "{accepted}");
}

#[test]
fn a_reader_without_checks_fails_the_same_test() {
    let [accepted, outside, shared] = faults(believing, 20_000, 20_000);
    assert!(accepted > 1000 && outside > 1000 && shared > 100, "{accepted} {outside} {shared}");
}
