//! Hostile and damaged headers: each is a typed error that names the fault, and none causes a panic.

use super::{described, message, raw, shard, zeros};
use kiln::error::Error;
use std::path::Path;

/// One U8 tensor with the given shape and offsets.
fn tensor(name: &str, shape: &str, offsets: &str) -> String {
    format!(r#""{name}":{{"dtype":"U8","shape":{shape},"data_offsets":{offsets}}}"#)
}

/// A number below a million in the format of messages.
fn grouped(number: usize) -> String {
    match (number / 1000, number % 1000) {
        (0, rest) => rest.to_string(),
        (thousands, rest) => format!("{thousands},{rest:03}"),
    }
}

#[test]
fn directed_attacks_are_refused_by_name() {
    let one = |text: &str| raw(&format!("{{{text}}}"), 16);
    let (a, huge) = (tensor("a", "[16]", "[0,16]"), "2305843009213693951");
    let mut eight = Vec::new();
    for i in 0..8u64 {
        let size: u64 = (1 << 61) - 1;
        // The offsets stay below 2^64; their sum with the header length does not.
        eight.push(tensor(&format!("t{i}"), &format!("[{huge}]"), &format!("[{},{}]", i * size, (i + 1) * size)));
    }
    let length = |n: u64| [&n.to_le_bytes()[..], br#"{"a":1}"#].concat();
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("eight times 2^61-1", raw(&format!("{{{}}}", eight.join(",")), 64), "more than any file can have"),
        (
            "one of 2^61-1",
            one(&tensor("a", &format!("[{huge}]"), &format!("[0,{huge}]"))),
            "its header describes 2,305,843,009,213,694,048",
        ),
        ("duplicate", one(&format!("{a},{a}")), "tensor `a` is there twice"),
        ("duplicate after unescape", one(&format!("{a},{}", a.replace("\"a\"", r#""\u0061""#))), "tensor `a` is there twice"),
        ("duplicate field", one(&a.replace("\"shape\"", "\"shape\":[16],\"shape\"")), "tensor `a`: duplicate field `shape`"),
        ("overlap", one(&format!("{a},{}", tensor("b", "[16]", "[8,24]"))), "tensor `a` [0,16) overlaps `b` [8,24)"),
        ("inside another", one(&format!("{a},{}", tensor("b", "[4]", "[4,8]"))), "tensor `a` [0,16) overlaps `b` [4,8)"),
        ("same place", one(&format!("{a},{}", tensor("b", "[16]", "[0,16]"))), "tensor `a` [0,16) overlaps `b` [0,16)"),
        ("hole", one(&tensor("a", "[8]", "[8,16]")), "8 bytes before tensor `a` [8,16) belong to no tensor"),
        ("trailing bytes", one(&tensor("a", "[12]", "[0,12]")), "4 bytes follow the last tensor"),
        ("no tensor but data", one(""), "16 bytes follow the last tensor"),
        ("backwards", one(&tensor("a", "[16]", "[16,0]")), "tensor `a`: data_offsets [16,0] run backwards"),
        ("too short for its shape", one(&tensor("a", "[17]", "[0,16]")), "needs 17 bytes, data_offsets [0,16] give 16"),
        ("product wraps to 4", one(&tensor("a", "[4294967296,4294967297]", "[0,4]")), "tensor `a`: shape"),
        ("product wraps to 0", one(&tensor("a", "[4294967296,4294967296]", "[0,0]")), "of U8 overflows"),
        ("bits overflow", one(&a.replace("U8", "F64").replace("[16]", "[1152921504606846976]")), "of F64 overflows"),
        ("rank 9", one(&tensor("a", "[1,1,1,1,1,1,1,1,16]", "[0,16]")), "tensor `a`: more than 8 dimensions"),
        ("F4, odd count", one(&a.replace("U8", "F4").replace("[16]", "[31]")), "does not fill whole bytes"),
        ("unknown type", one(&a.replace("U8", "F128")), "tensor `a`: unknown dtype `F128`"),
        ("type in lower case", one(&a.replace("U8", "u8")), "tensor `a`: unknown dtype `u8`"),
        ("negative", one(&tensor("a", "[-16]", "[0,16]")), "tensor `a`: invalid value: integer `-16`"),
        ("fraction", one(&tensor("a", "[16.0]", "[0,16]")), "tensor `a`: invalid type: floating point"),
        ("beyond doubles", one(&tensor("a", "[1e309]", "[0,16]")), "tensor `a`: number out of range"),
        ("beyond 64 bits", one(&tensor("a", "[18446744073709551616]", "[0,16]")), "tensor `a`: invalid type"),
        ("one offset", one(&tensor("a", "[16]", "[0]")), "tensor `a`: invalid length 1"),
        ("three offsets", one(&tensor("a", "[16]", "[0,16,32]")), "tensor `a`: "),
        ("shape missing", one(r#""a":{"dtype":"U8","data_offsets":[0,16]}"#), "tensor `a`: missing field `shape`"),
        ("unknown field", one(&a.replace("\"shape\"", "\"x\":1,\"shape\"")), "tensor `a`: unknown field `x`"),
        ("not an object", one(r#""a":7"#), "tensor `a`: invalid type"),
        ("list instead of object", raw("[]", 0), "does not begin with `{`"),
        ("not JSON", raw("{]", 0), "invalid safetensors header"),
        ("text after the object", raw("{} {}", 0), "trailing characters"),
        ("depth 128", one(&format!(r#""a":{}"#, "[".repeat(128))), "tensor `a`: invalid type: sequence"),
        ("depth 1,000,000", one(&format!(r#""a":{}"#, r#"{"dtype":"#.repeat(100_000))), "tensor `a`: invalid type: map"),
        ("NUL in a name", one(&a.replace("\"a\"", r#""a\u0000b""#)), r"the name `a\0b` has control characters"),
        ("escape in a name", one(&a.replace("\"a\"", r#""\u001b[2J""#)), r"the name `\u{1b}[2J` has control characters"),
        ("lone surrogate", one(&a.replace("\"a\"", r#""\ud800""#)), "invalid safetensors header"),
        ("long name", one(&tensor(&"n".repeat(257), "[16]", "[0,16]")), "has 257 bytes, limit 256"),
        ("not UTF-8", [&8u64.to_le_bytes()[..], b"{\"\xff\xfe\":1}"].concat(), "not UTF-8"),
        ("metadata not strings", one(&format!(r#""__metadata__":{{"x":1}},{a}"#)), "expected a string"),
        ("metadata not an object", one(&format!(r#""__metadata__":7,{a}"#)), "expected an object"),
        ("metadata key twice", one(&format!(r#""__metadata__":{{"x":"1","x":"2"}},{a}"#)), "`x` is there twice"),
        ("metadata twice", one(&format!(r#""__metadata__":{{}},"__metadata__":{{}},{a}"#)), "`__metadata__` is there twice"),
        ("length 0", length(0), "header is 0 bytes"),
        ("length 2^63", length(1 << 63), "header is 9,223,372,036,854,775,808 bytes, limit 4,194,304"),
        ("length 2^64-1", length(u64::MAX), "header is 18,446,744,073,709,551,615 bytes, limit 4,194,304"),
        ("length over the limit", length((4 << 20) + 1), "header is 4,194,305 bytes, limit 4,194,304"),
        ("length 1", length(1), "header is 1 bytes, the shortest possible has 2"),
        ("length 7", length(7), "tensor `a`: invalid type: integer `1`"),
        ("length cuts the text", length(5), "tensor `a`: EOF while parsing"),
        ("length past the end", length(8), "has 15 bytes, its header describes at least 16"),
        ("another magic", raw("GGUF", 0), "does not begin with `{`"),
        ("byte order mark", raw("\u{feff}{}", 0), "does not begin with `{`"),
        ("space before the object", raw(" {}", 0), "does not begin with `{`"),
        ("UTF-16", raw("{\0\"\0}\0", 0), "key must be a string"),
        ("NUL after the object", raw("{}\0\0", 0), "trailing characters"),
        ("comma at the end", one(&format!("{a},")), "trailing comma"),
        ("control character in the text", one(&a.replace("\"a\"", "\"a\u{1}\"")), "control character"),
        ("NEL in a name", one(&a.replace("\"a\"", r#""a\u0085b""#)), r"the name `a\u{85}b` has control characters"),
        ("rank 0, wrong length", one(&tensor("a", "[]", "[0,16]")), "shape [] of U8 needs 1 bytes, data_offsets [0,16] give 16"),
        ("zero dimension, wrong length", one(&tensor("a", "[16,0]", "[0,16]")), "shape [16, 0] of U8 needs 0 bytes"),
        ("zero after an overflow", one(&tensor("a", "[4294967296,4294967296,0]", "[0,0]")), "of U8 overflows"),
        ("rank 1,000", one(&tensor("a", &format!("[{}1]", "1,".repeat(999)), "[0,1]")), "tensor `a`: more than 8 dimensions"),
        ("F6, not whole bytes", one(&a.replace("U8", "F6_E2M3").replace("[16]", "[3]")), "does not fill whole bytes"),
        ("type empty", one(&a.replace("U8", "")), "tensor `a`: unknown dtype ``"),
        ("type a number", one(&a.replace("\"U8\"", "8")), "tensor `a`: invalid type: integer `8`, expected a string"),
        ("type missing", one(r#""a":{"shape":[16],"data_offsets":[0,16]}"#), "tensor `a`: missing field `dtype`"),
        ("shape a number", one(&tensor("a", "16", "[0,16]")), "tensor `a`: invalid type: integer `16`, expected a sequence"),
        ("shape of strings", one(&tensor("a", "[\"16\"]", "[0,16]")), "tensor `a`: invalid type: string \"16\", expected u64"),
        ("shape null", one(&tensor("a", "null", "[0,16]")), "tensor `a`: invalid type: null"),
        ("shape not a number", one(&tensor("a", "[NaN]", "[0,16]")), "tensor `a`: expected value"),
        ("offsets missing", one(r#""a":{"dtype":"U8","shape":[16]}"#), "tensor `a`: missing field `data_offsets`"),
        ("offset negative", one(&tensor("a", "[16]", "[-16,0]")), "tensor `a`: invalid value: integer `-16`"),
        ("offset a fraction", one(&tensor("a", "[16]", "[0,16.5]")), "tensor `a`: invalid type: floating point `16.5`"),
        ("offsets past the end", one(&tensor("a", "[16]", "[100,116]")), "100 bytes before tensor `a` [100,116)"),
        ("not enough data", one(&tensor("a", "[17]", "[0,17]")), "its header describes 80"),
        (
            "all of 64 bits",
            one(&tensor("a", "[18446744073709551615]", "[0,18446744073709551615]").replace("U8", "F4")),
            "of F4 overflows",
        ),
        ("nothing inside another", one(&format!("{a},{}", tensor("b", "[0]", "[8,8]"))), "`a` [0,16) overlaps `b` [8,8)"),
        ("nothing past the end", one(&format!("{a},{}", tensor("b", "[0]", "[20,20]"))), "4 bytes before tensor `b` [20,20)"),
        ("metadata null", one(&format!(r#""__metadata__":null,{a}"#)), "expected an object"),
        ("metadata nested", one(&format!(r#""__metadata__":{{"x":{{}}}},{a}"#)), "invalid type: map, expected a string"),
    ];
    assert!(cases.len() >= 60, "{}", cases.len());
    for (what, bytes, expected) in cases {
        let error = shard(bytes).expect_err(what);
        assert!(error.to_string().contains(expected), "{what}: {error}");
        let Error::BadFile { path, what: kind, .. } = &error else { panic!("{what}: {error}") };
        let truncated = expected.contains("its header describes");
        assert_eq!(*kind, if truncated { "truncated file" } else { "invalid safetensors header" }, "{what}");
        assert_eq!(path, Path::new("x.safetensors"), "{what}");
    }
}

#[test]
fn the_number_of_tensors_is_limited() {
    let many = |count: usize| (0..count).map(|i| described(&format!("t{i}"), "U8", &[0])).collect::<Vec<_>>();
    assert!(shard(zeros(&many(4096))).is_ok());
    let error = shard(zeros(&many(4097))).unwrap_err();
    assert!(error.to_string().contains("more than 4096 tensors"), "{error}");
}

#[test]
fn odd_but_valid_headers_are_read() {
    let tensors = [
        described("scalar", "F32", &[]),
        described("nothing", "F32", &[0, 3]),
        described("wide", "U8", &[1, 1, 1, 1, 1, 1, 1, 3]),
        described("\u{e9}", "F8_E4M3", &[5]),
    ];
    let read = shard(zeros(&tensors)).unwrap();
    assert_eq!(read.tensors().count(), 4);
    assert_eq!(read.bytes("scalar").unwrap().len(), 4);
    assert!(read.entry("nothing").unwrap().range.is_empty());
    assert_eq!(read.entry("\u{e9}").unwrap().dtype.name, "F8_E4M3");
    // Writers pad with spaces; one with a header of 640 bytes begins like a pickle.
    let padded = raw(&format!("{{{}}}{}", tensor("a", "[1]", "[0,1]"), " ".repeat(640 - 53)), 1);
    assert_eq!(padded[..2], [0x80, 0x02]);
    assert!(shard(padded).is_ok());
    let packed = raw(r#"{"__metadata__":{"k":"v"},"a":{"dtype":"F4","shape":[3,2],"data_offsets":[0,3]}}"#, 3);
    assert_eq!(shard(packed).unwrap().metadata()["k"], "v");
    assert!(shard(raw("{}", 0)).is_ok());
}

#[test]
fn a_file_cut_anywhere_is_called_truncated() {
    let whole = zeros(&[described("a", "F32", &[2000]), described("b", "BF16", &[50])]);
    let total = whole.len();
    assert!(shard(whole.clone()).is_ok());
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    assert!(total > 8000, "{total}");
    for cut in 1..total {
        let error = shard(whole[..cut].to_vec()).unwrap_err();
        let (described, qualifier) = match cut {
            0..8 => (8, "at least "),
            _ if cut < 8 + header => (8 + header, "at least "),
            _ => (total, ""),
        };
        let [have, described, missing] = [cut, described, described - cut].map(grouped);
        assert_eq!(
            message(&error),
            format!(
                "truncated file (x.safetensors): has {have} bytes, its header describes {qualifier}{described} / \
                 download again; {qualifier}{missing} bytes are missing"
            )
        );
    }
}

#[test]
fn other_formats_are_named() {
    let lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 7751105712\n";
    let cases: [(&[u8], &str); 8] = [
        (b"", "not a safetensors file (x.safetensors): it is empty / download the file again"),
        (lfs.as_bytes(), "not a safetensors file (x.safetensors): it is a 135-byte Git LFS pointer / run git lfs pull"),
        (b"<!DOCTYPE html><html>...", "not a safetensors file (x.safetensors): it is a web page / the server sent a page"),
        (b"\n <HTML lang=en>", "not a safetensors file (x.safetensors): it is a web page"),
        (b"PK\x03\x04\x00\x00\x08\x08\x00\x00", "unsupported weight format (x.safetensors): a zip archive"),
        (b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}", "unsupported weight format (x.safetensors): Python pickle"),
        (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P", "which can run code and is never loaded / use a .safetensors file"),
        (b"GGUF\x03\x00\x00\x00\x00\x00", "unsupported weight format (x.safetensors): GGUF / use a .safetensors file"),
    ];
    for (bytes, expected) in cases {
        let error = message(&shard(bytes.to_vec()).unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
}
