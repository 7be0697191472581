//! Sizes: checked arithmetic against 128-bit integers, and the cost of the largest headers.

use common::cost::{allocated_by, time_of};
use common::random::{Random, cases, long};
use kiln::error::{Error, Result};
use kiln::internals::checkpoint::{Shard, Weights};
use kiln::internals::component::Component;
use kiln::internals::tensor::{ALIGN, Arena, Bytes, DType, Region, Scale, Scales, Stored};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

fn open(bytes: Vec<u8>) -> Result<Shard> {
    Shard::from_bytes("x.safetensors", Bytes::new(Arc::new(bytes)))
}

/// A file with a header and no data.
fn file(header: &str) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()
}

/// The expected error for the only tensor of a file without data, by 128-bit arithmetic.
fn verdict(shape: &[u64], bits: u64, [begin, end]: [u64; 2], header: usize) -> &'static str {
    // A product of many dimensions overflows even 128 bits, so it stops beyond 64.
    let fits = |value: &u128| *value <= u128::from(u64::MAX);
    let bits = shape.iter().try_fold(1u128, |n, &dim| Some(n * u128::from(dim)).filter(fits)).map(|n| n * u128::from(bits));
    let Some(bits) = bits.filter(fits) else { return "overflows" };
    if bits % 8 != 0 {
        return "does not fill whole bytes";
    }
    if end < begin {
        return "run backwards";
    }
    if u128::from(end - begin) != bits / 8 {
        return " bytes, data_offsets ";
    }
    if begin > 0 {
        return "belong to no tensor";
    }
    let described = 8 + header as u128 + u128::from(end);
    if !fits(&described) {
        return "more than any file can have";
    }
    if end > 0 { "truncated file" } else { "" }
}

#[test]
fn tensor_sizes_equal_128_bit_arithmetic() {
    let wrapped = AtomicUsize::new(0);
    cases("shapes", 100_000, 1_000_000, |random| {
        let types = [("U8", 8), ("BF16", 16), ("F32", 32), ("F64", 64), ("F4", 4), ("F6_E3M2", 6)];
        let (dtype, bits) = types[random.below(types.len())];
        // Many products are just below or just above 2^64.
        let mut left = 64;
        let shape: Vec<u64> = (0..random.below(5))
            .map(|_| {
                let power = random.below(left + 1);
                left -= power;
                near(random, power)
            })
            .collect();
        let product = shape.iter().fold(1u64, |n, &dim| n.wrapping_mul(dim));
        let length = product.wrapping_mul(bits) / 8;
        let begin = if random.below(8) == 0 { random.size() } else { 0 };
        let end = if random.below(8) == 0 { random.size() } else { begin.wrapping_add(length) };
        let header = format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}}}"#);
        let want = verdict(&shape, bits, [begin, end], header.len());
        if want == "overflows" && end == begin.wrapping_add(product.wrapping_mul(bits) / 8) {
            wrapped.fetch_add(1, Ordering::Relaxed);
        }
        match open(file(&header)) {
            Ok(_) => assert_eq!(want, "", "{header}"),
            Err(error) => assert!(!want.is_empty() && error.to_string().contains(want), "{header}: {error}, not {want}"),
        }
    });
    // The control: wrapping arithmetic would accept these shapes.
    assert!(wrapped.into_inner() > 1000);
}

/// A power of two, or one less or more.
fn near(random: &mut Random, power: usize) -> u64 {
    let exact = 1u128 << power;
    u64::try_from(exact + random.below(3) as u128 - 1).unwrap_or(u64::MAX)
}

#[test]
fn arena_offsets_equal_128_bit_arithmetic() {
    let refused = AtomicUsize::new(0);
    let most = u128::from(u64::MAX);
    let plain = [DType::F32, DType::Bf16, DType::F16].map(Stored::plain);
    let rows = Stored { dtype: DType::E4m3, scales: Scales::Rows };
    let formats = [&plain[..], &[Stored::fp8(Scale::ONE), rows, Stored::nvfp4(Scale::ONE)]].concat();
    cases("allocations", 100_000, 1_000_000, |random| {
        let mut arena = Arena::new(Region::Arena);
        let (mut top, mut peak) = (0u128, 0u128);
        for _ in 0..6 {
            let [rows, cols] = [(); 2].map(|()| {
                let power = random.below(40);
                near(random, power) as usize
            });
            let format = formats[random.below(formats.len())];
            // NVFP4 rows consist of whole blocks.
            let cols = if format.dtype == DType::E2m1 { 16 * cols } else { cols };
            let bits = rows as u128 * cols as u128 * format.dtype.bits() as u128;
            let scales = match format.scales {
                Scales::Unscaled | Scales::Tensor(_) => 0,
                Scales::Rows => 4 * rows as u128,
                Scales::Blocks16(_) => 512 * rows.div_ceil(128) as u128 * cols.div_ceil(64) as u128,
            };
            // Elements and then scales are allocated. 64-bit arithmetic also counts the bits.
            let ends = [bits.div_ceil(8), scales].map(|bytes| {
                let end = (top + bytes).next_multiple_of(u128::from(ALIGN));
                let fits = bits <= most && end <= most;
                (top, peak) = if fits { (end, peak.max(end)) } else { (top, peak) };
                fits
            });
            match arena.alloc_stored(rows, cols, format) {
                Ok(tensor) => {
                    assert_eq!(
                        (u128::from(tensor.extent().end - tensor.offset), tensor.rows, tensor.cols),
                        (bits.div_ceil(8), rows, cols)
                    );
                    assert_eq!(u128::from(tensor.scale_extent().end - tensor.scale_extent().start), scales);
                    assert!(ends == [true; 2], "{ends:?}");
                }
                Err(error) => {
                    assert!(matches!(error, Error::Memory { .. }) && ends != [true; 2], "{error} {ends:?}");
                    refused.fetch_add(1, Ordering::Relaxed);
                }
            }
            assert_eq!((u128::from(arena.mark()), u128::from(arena.peak())), (top, peak));
        }
    });
    // The control: wrapping arithmetic would give these wrong places.
    assert!(refused.into_inner() > 1000);
}

/// A header of exactly the largest allowed size, padded with spaces.
fn largest(entries: &str) -> Vec<u8> {
    let header = format!("{{{entries}}}");
    assert!(header.len() <= 4 << 20, "{}", header.len());
    file(&format!("{header}{}", " ".repeat((4 << 20) - header.len())))
}

#[test]
fn the_largest_headers_are_cheap() {
    let entry = |name: String| format!(r#""{name}":{{"dtype":"F32","shape":[0,1,1,1,1,1,1,1],"data_offsets":[0,0]}}"#);
    let tensors = |name: &dyn Fn(usize) -> String| (0..4096).map(|i| entry(name(i))).collect::<Vec<_>>().join(",");
    let texts = |count: usize, size: usize| {
        let pairs: Vec<String> = (0..count).map(|i| format!(r#""{i:x}":"{}""#, "x".repeat(size))).collect();
        format!(r#""__metadata__":{{{}}}"#, pairs.join(","))
    };
    for (what, header, accepted) in [
        ("long names", largest(&tensors(&|i| format!("{i:0256}"))), true),
        ("escaped names", largest(&tensors(&|i| format!(r"{}{i:04}", r"\u0061".repeat(150)))), true),
        ("one long text", largest(&format!(r#""__metadata__":{{"x":"{}"}}"#, "x".repeat(4_000_000))), true),
        ("many texts", largest(&texts(4096, 1000)), true),
        ("too many texts", largest(&texts(350_000, 0)), false),
        ("many dimensions", largest(&format!(r#""a":{{"dtype":"U8","shape":[{}1]}}"#, "1,".repeat(2_000_000))), false),
        ("deep", largest(&format!(r#""a":{}"#, "[".repeat(4_000_000))), false),
    ] {
        let bytes = Bytes::new(Arc::new(header));
        let parse = || Shard::from_bytes("x.safetensors", bytes.clone());
        assert_cheap(what, accepted, parse);
    }
}

/// Opens the largest file of a kind, accepted or not, and checks memory and time.
fn assert_cheap<T: std::fmt::Debug>(what: &str, accepted: bool, open: impl Fn() -> Result<T>) {
    let (result, allocated) = allocated_by(&open);
    println!("{what}: {:.1} MiB", allocated as f64 / f64::from(1 << 20));
    assert_eq!(result.is_ok(), accepted, "{what}: {result:?}");
    assert!(allocated <= 32 << 20, "{what}: {allocated} bytes");
    // Usually at most 30 ms, on an otherwise idle machine.
    if long() {
        let time = time_of(|| drop(open()));
        assert!(time <= Duration::from_millis(100), "{what}: {time:?}");
    }
}

#[test]
fn the_largest_declarations_of_layers_are_cheap() {
    let declare = |layers: &str| {
        let text = format!(r#"{{"layers": {{{layers}}}}}"#);
        largest(&format!(r#""__metadata__":{{"_quantization_metadata":{text:?}}}"#))
    };
    let layers = |count: usize, length: usize, settings: &str| {
        let list: Vec<String> = (0..count).map(|i| format!(r#""{i:0length$}": {settings}"#)).collect();
        list.join(",")
    };
    let deep = "[".repeat(3_000_000);
    for (what, header, accepted) in [
        ("many layers", declare(&layers(4096, 500, r#"{"format":"nvfp4"}"#)), true),
        ("too many layers", declare(&layers(200_000, 1, "{}")), false),
        ("a long format", declare(&format!(r#""a": {{"format": "{}"}}"#, "x".repeat(4_000_000))), false),
        ("other settings", declare(&format!(r#""a": {{"format": "nvfp4", "x": [{}1]}}"#, "1,".repeat(1_900_000))), true),
        ("deep settings", declare(&format!(r#""a": {{"x": {deep}}}"#)), false),
    ] {
        let shard = open(header).unwrap();
        let parse = || Weights::from_shards(Component::Transformer, vec![shard.clone()]);
        assert_cheap(what, accepted, parse);
    }
}
