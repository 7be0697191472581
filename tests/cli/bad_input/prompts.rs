//! Numbers and prompts.

use super::*;
use std::os::unix::ffi::OsStringExt;

#[test]
fn numbers_that_cannot_be() {
    let sandbox = prepared();
    let sides = |width: &str, height: &str| {
        format!("--width {width} --height {height}: sides must be multiples of 16, at least 64, and within the token limit")
    };
    let invalid = |flag: &str, value: &str, kind: &str, need: &str| {
        row(
            &format!("x -q --{flag} {value}"),
            2,
            format!("invalid value '{value}' for '--{flag} <{kind}>': expected {need}"),
            Help,
        )
    };
    let invalid_levels = |value: &str| {
        let what = "noise levels have to fall, from at most 1 to at least 0.000001, by at least that much each";
        row(&format!("x -q --sigmas {value}"), 2, format!("invalid value '{value}' for '--sigmas <LEVELS>': {what}"), Help)
    };
    let pixels = |value: &str| invalid("width", value, "PIXELS", "a number of pixels, such as 1024");
    let (steps, seed) = ("a whole number from 1 to 1000", "a whole number from 0 to 18446744073709551615");
    check(
        &sandbox,
        &[
            row("x -q --width 0", 2, sides("0", "256"), Is("try --width 64 --height 256")),
            row("x -q --width 1000 --height 1001", 2, sides("1000", "1001"), Is("try --width 992 --height 1008")),
            row("x -q --height 1000000000", 2, sides("256", "1000000000"), Is("try --width 256 --height 16384")),
            // The size in the hint has to be valid.
            row(
                "x -q --width 1000000000 --height 1000000000",
                2,
                sides("1000000000", "1000000000"),
                Is("try --width 3616 --height 3616"),
            ),
            row(
                "x -q --width 4096 --height 4096",
                2,
                "too many tokens: 512 text + 65536 image = 66048, the limit is 52000",
                Is("lower --width and --height"),
            ),
            pixels("-512"),
            pixels("1e9"),
            pixels("NaN"),
            pixels("18446744073709551616"),
            invalid("steps", "0", "N", steps),
            invalid("steps", "1000000", "N", steps),
            invalid("seed", "-1", "N", seed),
            invalid("seed", "18446744073709551616", "N", seed),
            invalid_levels("1e-300"),
            invalid_levels("1,0.5,0.5"),
            row(
                "x -q --seed 18446744073709551615 --count 2",
                2,
                "--count 2 from --seed 18446744073709551615 on goes beyond the largest seed, 18446744073709551615",
                Is("lower --seed or --count"),
            ),
            invalid("guidance", "NaN", "SCALE", "a number from 0 to 100"),
            row(
                "x -q --backend cpu --device 1",
                2,
                "--device is about GPUs, --backend cpu takes none",
                Is("leave out one of them"),
            ),
        ],
    );
}

#[test]
fn prompts_that_are_none() {
    let sandbox = prepared();
    write(&sandbox, "latin.txt", b"a caf\xe9 by the sea");
    write(&sandbox, "long.txt", "x".repeat(40_000));
    let utf16: Vec<u8> = "a fox\r\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    write(&sandbox, "marked.txt", [b"\xff\xfe", &*utf16].concat());
    write(&sandbox, "unmarked.txt", &utf16);
    let nobody = |setup| {
        let (what, hint) = ("standard input is empty, so there is no prompt", "an empty prompt is given as \"\"");
        row("--prompt-file -", 2, what, Is(hint)).within(setup)
    };
    let given = |bytes: &[u8], first: &str, hint| {
        let mut row = row("", 2, first, hint);
        row.args = vec![OsString::from_vec(bytes.to_vec())];
        row
    };
    let save = Is("save it as UTF-8");
    let shorten = Is("shorten it; models read a few hundred tokens at most");
    check(
        &sandbox,
        &[
            given(b"seventeen letters\xff", "prompt is not valid UTF-8 at byte 17", Nothing),
            row("--prompt-file latin.txt", 2, "prompt is not valid UTF-8 at byte 5 (latin.txt)", save),
            row("--prompt-file marked.txt", 2, "prompt is UTF-16, not UTF-8 (marked.txt)", save),
            row("--prompt-file unmarked.txt", 2, "prompt has a NUL character at byte 1 (unmarked.txt)", save),
            nobody("exec 0<&-"),
            nobody("exec 0</dev/null"),
            given(&[b'x'; 32_769], "prompt too long: it has 32769 bytes, the limit is 32768", shorten),
            row("--prompt-file long.txt", 2, "prompt too long (long.txt): the limit is 32768 bytes", shorten),
            row("--prompt-file none.txt", 3, "cannot read (none.txt): No such file or directory (os error 2)", Nothing),
        ],
    );
}
