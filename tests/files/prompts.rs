//! The tokenizer through its public interface: ids equal the reference's, and no file or prompt makes it panic, run long or take much
//! memory.
//!
//! `tools/goldens tokens` writes `tests/fixtures/tokens.json`.

use common::cost::{allocated_by, peak_of, time_of};
use common::fnv::fnv1a;
use common::random::{Random, cases, long};
use flate2::read::GzDecoder;
use kiln::internals::tiny;
use kiln::internals::tokenizer::{MAX_PROMPT_BYTES, Tokenizer};
use serde::Deserialize;
use std::io::Read;
use std::path::Path;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

/// The number of ids that a text encoder reads.
const LENGTH: usize = 512;

static QWEN3: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::qwen3().unwrap());
static TINY: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::from_json(tiny::TOKENIZER, Path::new("tiny")).unwrap());

#[derive(Deserialize)]
struct Recorded {
    tokenizer: Source,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Source {
    bytes: usize,
    fnv: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Case {
    Short { prompt: String, ids: Vec<u32> },
    Long { piece: String, times: usize, count: usize, fnv: String },
}

fn recorded() -> Recorded {
    serde_json::from_str(include_str!("../fixtures/tokens.json")).unwrap()
}

/// The shipped file.
fn unpacked() -> Vec<u8> {
    let mut json = Vec::new();
    GzDecoder::new(&include_bytes!("../../models/qwen3/tokenizer.json.gz")[..]).read_to_end(&mut json).unwrap();
    json
}

fn fnv(bytes: impl IntoIterator<Item = u8>) -> String {
    format!("{:016x}", fnv1a(bytes))
}

#[test]
fn the_shipped_tokenizer_is_the_recorded_one() {
    let (json, want) = (unpacked(), recorded().tokenizer);
    assert_eq!((json.len(), fnv(json)), (want.bytes, want.fnv));
}

#[test]
fn prompts_give_the_ids_of_the_reference() {
    let cases = recorded().cases;
    assert!(cases.len() >= 50, "{}", cases.len());
    check_cases(&QWEN3, cases, 0, 0);
}

/// Checks the ids of prompts. For short prompts the record omits `before` ids at the start and `after` at the end.
fn check_cases(tokenizer: &Tokenizer, cases: Vec<Case>, before: usize, after: usize) {
    for case in cases {
        match case {
            Case::Short { prompt, ids } => {
                let tokens = tokenizer.encode(&prompt, LENGTH).unwrap();
                assert_eq!((&tokens.ids[before..tokens.real - after], tokens.cut), (&ids[..], 0), "{prompt:?}");
            }
            Case::Long { piece, times, count, fnv: want } => {
                let tokens = tokenizer.encode(&piece.repeat(times), count).unwrap();
                assert_eq!((tokens.real, tokens.cut), (count, 0), "{piece:?}");
                assert_eq!(fnv(tokens.ids.into_iter().flat_map(u32::to_le_bytes)), want, "{piece:?}");
            }
        }
    }
}

#[derive(Deserialize)]
struct RecordedMistral {
    cases: Vec<Case>,
}

#[test]
fn prompts_of_mistral_give_the_ids_of_the_library() {
    let recorded: RecordedMistral = serde_json::from_str(include_str!("../fixtures/tokens_mistral.json")).unwrap();
    assert!(recorded.cases.len() >= 300, "{}", recorded.cases.len());
    let tokenizer = Tokenizer::mistral().unwrap();
    check_cases(&tokenizer, recorded.cases, 32, 1);
}

/// Pieces that a tokenizer treats specially.
const PIECES: [&str; 24] = [
    "<|im_end|>",
    "<think>",
    "</think>",
    "<|endoftext|>",
    "<|im_",
    "|>",
    "\0",
    "\u{301}",
    "\u{1100}\u{1161}",
    "\u{200d}",
    "🦀",
    "\u{10ffff}",
    "\u{fffd}",
    "\r\n",
    "\n",
    " ",
    "   ",
    "'s",
    "a",
    "fox",
    "7",
    "中",
    "\u{202e}",
    "\\ud800",
];

/// A prompt of mixed pieces and characters of all planes. Most are short, some as long as the limit.
fn prompt(random: &mut Random) -> String {
    let longest = if random.below(500) == 0 { MAX_PROMPT_BYTES } else { 200 };
    let (length, pieces) = (random.below(longest + 1), random.below(4) > 0);
    // A quarter of the prompts repeat one piece.
    let same = (random.below(4) == 0).then(|| random.pick(&PIECES));
    let mut text = String::new();
    while text.len() < length {
        match same {
            Some(piece) => text.push_str(piece),
            None if pieces && random.below(2) == 0 => text.push_str(random.pick(&PIECES)),
            // Half of the characters are from all planes, half from the first 256.
            None => {
                let code = if random.below(2) == 0 { random.below(0x11_0000) } else { random.below(256) };
                text.extend(char::from_u32(code as u32));
            }
        }
    }
    text.truncate(text.floor_char_boundary(MAX_PROMPT_BYTES));
    text
}

#[test]
fn random_prompts_never_fail() {
    let reference = tokenizers::Tokenizer::from_bytes(unpacked()).unwrap();
    cases("random prompts", 5000, 1_000_000, |random| {
        let prompt = prompt(random);
        let tokenizer = if random.below(4) == 0 { &TINY } else { &QWEN3 };
        let tokens = tokenizer.encode(&prompt, LENGTH).unwrap();
        assert_eq!((tokens.ids.len(), tokens.real), (LENGTH, tokens.real.min(LENGTH)));
        assert!(tokens.cut == 0 || tokens.real == LENGTH);
        // A sample is compared with the library's own encoding, which is slower.
        if random.below(16) == 0 {
            let text = format!("<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
            let want = reference.encode_fast(text, false).unwrap();
            let got = QWEN3.encode(&prompt, want.len()).unwrap();
            assert_eq!((&got.ids[..], got.cut), (want.get_ids(), 0));
        }
    });
}

/// A `tokenizer.json` of a few tokens with every section that a file can have.
const SMALL: &str = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{"id":7,"content":"<|endoftext|>",
"single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},{"id":8,"content":"<think>",
"single_word":false,"lstrip":false,"rstrip":false,"normalized":true,"special":false}],"normalizer":{"type":"NFC"},
"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},"behavior":"Isolated",
"invert":false},{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false,"use_regex":false}]},"post_processor":null,
"decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true},"model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":"",
"end_of_word_suffix":"","fuse_unk":false,"byte_fallback":false,"ignore_merges":false,
"vocab":{"a":0,"b":1,"c":2,"ab":3,"abc":4,"Ċ":5,"u":6},"merges":[["a","b"],["ab","c"]]}}"#;

/// Adds a token for every byte to the vocabulary, and shifts the ids of the added tokens.
fn complete(file: &str) -> String {
    let mut file: serde_json::Value = serde_json::from_str(file).unwrap();
    let vocab = file["model"]["vocab"].as_object_mut().unwrap();
    let before = vocab.len();
    let letters: std::collections::BTreeSet<char> = ByteLevel::alphabet().into_iter().collect();
    for letter in letters {
        let next = vocab.len().into();
        vocab.entry(letter.to_string()).or_insert(next);
    }
    let more = vocab.len() - before;
    for token in file["added_tokens"].as_array_mut().unwrap() {
        if let Some(id) = token["id"].as_u64().filter(|id| *id >= before as u64) {
            token["id"] = (id + more as u64).into();
        }
    }
    file.to_string()
}

/// [`SMALL`] with one part of it replaced; the part has to exist.
fn with(part: &str, other: &str) -> String {
    assert!(SMALL.contains(part), "{part}");
    SMALL.replacen(part, other, 1)
}

/// A sequence of normalizers, each of which doubles the text.
fn doubling(times: usize) -> String {
    let list = vec![r#"{"type":"Replace","pattern":{"String":"a"},"content":"aa"}"#; times].join(",");
    format!(r#"{{"type":"Sequence","normalizers":[{list}]}}"#)
}

const NORMALIZER: &str = r#"{"type":"NFC"}"#;

#[test]
fn what_no_known_tokenizer_has_is_refused_by_name() {
    let prepend = format!(r#"{{"type":"Prepend","prepend":"{}"}}"#, "x".repeat(5 << 20));
    let many = |token: &dyn Fn(usize) -> String, count: usize| (0..count).map(token).collect::<Vec<_>>().join(",");
    let added = |i: usize| format!(r#"{{"id":{},"content":"<t{i}>"}}"#, i + 7);
    let limit = 1 << 19;
    let vocab = r#""vocab":{"a":0,"b":1,"c":2,"ab":3,"abc":4,"Ċ":5,"u":6}"#;
    let merges = r#"[["a","b"],["ab","c"]]"#;
    let knows = |what: &str, kind: &str, known: &str| format!("its {what} is `{kind}`, kiln knows {known}");
    let split = |detail: &str| format!("its pre-tokenizer's Split has {detail}, kiln knows Qwen3's and Llama 3's");
    let without = |key: &str, said: &str| format!("`{key}` is {said}, kiln knows models without");
    let table = [
        // Steps that compute.
        (with(NORMALIZER, &doubling(40)), knows("normalizer", "Sequence", "NFC")),
        (with(NORMALIZER, &prepend), knows("normalizer", "Prepend", "NFC")),
        (
            with(NORMALIZER, r#"{"type":"Precompiled","precompiled_charsmap":"/////w=="}"#),
            knows("normalizer", "Precompiled", "NFC"),
        ),
        (with(NORMALIZER, r#"{"type":"NFKC"}"#), knows("normalizer", "NFKC", "NFC")),
        (
            with(
                r#"{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}"#,
                r#"{"type":"Replace","pattern":{"String":"a"},"content":"aa"}"#,
            ),
            knows("decoder", "Replace", "ByteLevel"),
        ),
        (
            with(r#""type":"Sequence","#, r#""type":"Metaspace","#),
            knows("pre-tokenizer", "Metaspace", "ByteLevel, and Split before it"),
        ),
        (with(r#""type":"Split""#, r#""type":"Punctuation""#), knows("pre-tokenizer's first step", "Punctuation", "Split")),
        (
            with(r#"(?i:'s|"#, "(a*)*b|"),
            split(
                r"the pattern `(a*)*b|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`",
            ),
        ),
        (with(r#"{"Regex":"#, r#"{"String":"#), split("a text to split at")),
        (with(r#""pattern":"#, r#""other":"#), split("no pattern")),
        (with("Isolated", "Removed"), split("the behavior `Removed`")),
        (with(r#""invert":false"#, r#""invert":true"#), split("`invert`")),
        (
            with(r#""add_prefix_space":false"#, r#""add_prefix_space":true"#),
            "its pre-tokenizer has `add_prefix_space`, kiln knows ByteLevel without".into(),
        ),
        (
            with(r#""use_regex":false}"#, r#""use_regex":false},{"type":"Digits"}"#),
            "its pre-tokenizer has 3 steps, kiln knows Split and ByteLevel".into(),
        ),
        // Other models, and other settings of BPE.
        (with(r#""type":"BPE""#, r#""type":"Unigram""#), knows("model", "Unigram", "BPE")),
        (with(r#""dropout":null"#, r#""dropout":0.1"#), "`dropout` is 0.1, kiln knows 0".into()),
        (with(r#""unk_token":null"#, r#""unk_token":"u""#), without("unk_token", "`u`")),
        (
            with(r#""continuing_subword_prefix":"""#, r###""continuing_subword_prefix":"##""###),
            without("continuing_subword_prefix", "`##`"),
        ),
        (with(r#""end_of_word_suffix":"""#, r#""end_of_word_suffix":"</w>""#), without("end_of_word_suffix", "`</w>`")),
        (with(r#""fuse_unk":false"#, r#""fuse_unk":true"#), without("fuse_unk", "set")),
        (with(r#""byte_fallback":false"#, r#""byte_fallback":true"#), without("byte_fallback", "set")),
        // Tables that contradict themselves.
        (with(r#""b":1"#, r#""b":0"#), "its token `b` has the id 0, and so has another".into()),
        (with(r#""b":1"#, r#""a":1"#), "its token `a` is there twice".into()),
        (with(r#""u":6"#, r#""u":9"#), "its ids go up to 9, and no token has 6".into()),
        (with(r#""u":6"#, r#""u":524288"#), "its token `u` has the id 524288, the limit is 524288".into()),
        (with(r#""u":6"#, r#""u":4294967296"#), "invalid value: integer `4294967296`, expected u32".into()),
        (with(r#""u":6"#, r#""u":-1"#), "invalid value: integer `-1`, expected u32".into()),
        (with(r#"["ab","c"]"#, r#"["ab","d"]"#), "Token `d` out of vocabulary".into()),
        (with(r#"["ab","c"]"#, r#"["a","c"]"#), "Token `ac` out of vocabulary".into()),
        (with(r#"["ab","c"]"#, r#"["ab"]"#), "a merge is not two tokens".into()),
        (with(r#"["ab","c"]"#, r#""a b c""#), "merge `a b c` is not two tokens".into()),
        (with(r#""u":6"#, &many(&|i| format!("\"t{i}\":{}", i + 6), limit)), "the limit is 524288".into()),
        (
            with(merges, &format!("[{}]", many(&|_| r#""a b""#.into(), limit + 1))),
            "it has 524289 merges, the limit is 524288".into(),
        ),
        (with(vocab, &format!("{vocab},{vocab}")), "its model has two vocabularies".into()),
        (with(vocab, r#""vocab":{}"#), "its token `<|endoftext|>` has the id 7, which should be 0".into()),
        (with(r#""merges":[["a","b"],["ab","c"]]"#, r#""merges":[],"merges":[]"#), "its model has two lists of merges".into()),
        (with(r#","merges":[["a","b"],["ab","c"]]"#, ""), "its model has no `merges`".into()),
        // Added tokens.
        (with(r#""id":8"#, r#""id":4294967295"#), "its token `<think>` has the id 4294967295, which should be 8".into()),
        (with("<think>", "<|endoftext|>"), "it adds the token `<|endoftext|>` twice".into()),
        (with("<think>", ""), "it adds the token `` of 0 bytes, the limit is 128".into()),
        (with("<think>", &"x".repeat(1 << 20)), "of 1048576 bytes, the limit is 128".into()),
        (
            with(r#""single_word":false"#, r#""single_word":true"#),
            "its token `<|endoftext|>` has `single_word`, kiln knows tokens without".into(),
        ),
        (
            with(r#""added_tokens":["#, &format!(r#""added_tokens":[{},"#, many(&added, 1024))),
            "it adds 1026 tokens, the limit is 1024".into(),
        ),
    ];
    for (file, want) in table {
        let file_bytes = file.len() as isize;
        let (result, peak) = peak_of(|| Tokenizer::from_json(file.as_bytes(), Path::new("t.json")));
        let error = result.unwrap_err();
        let message = error.to_string();
        assert!(message.starts_with("not a usable tokenizer (t.json): ") && message.contains(&want), "{message}\n{want}");
        assert_eq!(
            (error.exit_code(), error.hint().as_deref()),
            (3, Some("use the tokenizer.json that came with the text encoder"))
        );
        assert!(peak <= most(file_bytes), "{want}: {peak} bytes for a file of {file_bytes}");
    }
}

/// The memory limit for reading a file of `file_bytes` bytes and encoding a short prompt with it.
fn most(file_bytes: isize) -> isize {
    32 * file_bytes + (2 << 20)
}

/// The control of the memory limit: the library accepts such a file, and exceeds it.
#[test]
fn the_library_would_exceed_the_limit() {
    let file = with(NORMALIZER, &doubling(20));
    let (_, peak) = peak_of(|| {
        let tokenizer = tokenizers::Tokenizer::from_bytes(file.as_bytes()).unwrap();
        tokenizer.encode_fast("a", false).unwrap()
    });
    assert!(peak > most(file.len() as isize), "{peak} bytes for a file of {}", file.len());
}

#[test]
fn known_tokenizers_are_read_in_all_their_spellings() {
    let ids = |file: &str| {
        let tokenizer = Tokenizer::from_json(file.as_bytes(), Path::new("t.json")).unwrap();
        tokenizer.encode("abcab e\u{301}<think>ba<|endoftext|>u", 128).unwrap()
    };
    let small = complete(SMALL);
    let want = ids(&small);
    assert_eq!(want.ids[..want.real].iter().filter(|id| **id == 4).count(), 1, "{want:?}");
    for (part, other) in [
        (r#"["a","b"],["ab","c"]"#, r#""a b","ab c""#),
        (r#""dropout":null"#, r#""dropout":0.0"#),
        // Here the merges lead to every token.
        (r#""ignore_merges":false"#, r#""ignore_merges":true"#),
        // And no token has two digits.
        (r"|\\p{N}| ", r"|\\p{N}{1,3}| "),
        (r#""continuing_subword_prefix":"""#, r#""continuing_subword_prefix":null"#),
        (r#""type":"BPE","dropout":null,"unk_token":null,"#, ""),
        (r#""decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}"#, r#""decoder":null"#),
        (r#""post_processor":null"#, r#""post_processor":{"type":"Anything"},"extra":[1]"#),
    ] {
        assert_eq!(ids(&complete(&with(part, other))), want, "{other}");
    }
    // The library gets the same ids from the same file.
    let reference = tokenizers::Tokenizer::from_bytes(&small).unwrap();
    let text =
        "<|im_start|>user\nabcab e\u{301}<think>ba<|endoftext|>u<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
    assert_eq!(reference.encode_fast(text, false).unwrap().get_ids(), &want.ids[..want.real]);
}

/// The most bytes that encoding a prompt may allocate in total. The library allocates several times for each word.
const ALLOCATED: usize = 96 << 20;
/// The most CPU time for encoding a prompt, on an otherwise idle machine. Nearly all prompts stay below 50 ms. The slowest have a word per
/// character, and digits between spaces make the library's split pattern try every alternative, which takes up to 90 ms. Encoding cannot
/// stop at the token limit, because the result counts the tokens beyond it. A core that other programs share takes twice as long.
const TIME: Duration = Duration::from_millis(240);

/// Encodes named prompts and checks that none costs too much.
fn assert_cheap(tokenizer: &Tokenizer, prompts: impl IntoIterator<Item = (String, String)>) {
    let (mut worst, mut slowest) = (Vec::new(), Vec::new());
    for (what, prompt) in prompts {
        let encode = || drop(tokenizer.encode(&prompt, LENGTH).unwrap());
        worst.push((allocated_by(encode).1, what.clone()));
        if long() {
            slowest.push((time_of(encode), what));
        }
    }
    worst.sort();
    slowest.sort();
    println!("{:?}\n{:.1?}", worst.iter().rev().take(8).collect::<Vec<_>>(), slowest.iter().rev().take(8).collect::<Vec<_>>());
    let (bytes, what) = worst.last().unwrap();
    assert!(*bytes <= ALLOCATED, "{what}: {bytes} bytes");
    assert!(slowest.last().is_none_or(|(time, _)| *time <= TIME), "{slowest:.1?}");
}

/// The worst accepted files: the shortest tokens, and words as long as a prompt.
#[test]
fn no_file_makes_prompts_take_long() {
    let think = r#""id":8,"content":"<think>","#;
    let token = |id: usize, content: &str| with(think, &format!(r#""id":{id},"content":"{content}","#));
    let plain = |file: String| file.replace(r#""normalized":true"#, r#""normalized":false"#);
    let pairs: Vec<String> = (0..12).map(|i| format!(r#""{}":{}"#, "a".repeat(1 << (i + 1)), i + 7)).collect();
    let merges: Vec<String> = (0..12).map(|i| format!(r#"["{0}","{0}"]"#, "a".repeat(1 << i))).collect();
    let splitter = &SMALL[SMALL.find(r#"{"type":"Sequence""#).unwrap()..SMALL.find(r#","post_processor""#).unwrap()];
    let long = with(r#""u":6"#, &format!(r#""u":6,{}"#, pairs.join(",")))
        .replace(r#"["ab","c"]"#, &format!(r#"["ab","c"],{}"#, merges.join(",")))
        .replace(r#""id":7"#, r#""id":19"#)
        .replace(r#""id":8"#, r#""id":20"#);
    let files = [
        ("token a", plain(token(0, "a"))),
        ("token a, normalized", token(0, "a")),
        ("token of a mark", plain(token(8, "\\u0301"))),
        ("token of a mark, normalized", token(8, "\\u0301")),
        ("words of GPT-2", with(splitter, r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false}"#)),
        ("long tokens", long),
    ];
    for (what, file) in files {
        let tokenizer = Tokenizer::from_json(complete(&file).as_bytes(), Path::new("t.json"));
        let tokenizer = tokenizer.unwrap_or_else(|e| panic!("{what}: {e}"));
        let pieces = ["a", "ab", "a ", "\u{301}", " ", "7 ", "<think>"];
        let prompt = |piece: &str| (format!("{what}, {piece:?}"), piece.repeat(MAX_PROMPT_BYTES / piece.len()));
        assert_cheap(&tokenizer, pieces.map(prompt));
    }
}

#[test]
fn loading_costs_no_more_than_in_the_library() {
    let json = unpacked();
    let in_the_library = || drop(tokenizers::Tokenizer::from_bytes(&json).unwrap());
    let here = || drop(Tokenizer::from_json(&json, Path::new("t.json")).unwrap());
    let [ours, theirs] = [allocated_by(here).1, allocated_by(in_the_library).1];
    println!("{ours} bytes, the library {theirs}");
    assert!(ours <= theirs, "{ours} bytes, the library {theirs}");
    // For an otherwise idle machine.
    if long() {
        let [ours, theirs, unpacking] = [time_of(here), time_of(in_the_library), time_of(|| drop(unpacked()))];
        let tiny = time_of(|| drop(Tokenizer::from_json(tiny::TOKENIZER, Path::new("t.json")).unwrap()));
        println!("{ours:.1?}, the library {theirs:.1?}; unpacking {unpacking:.1?}; the tiny model's {tiny:.1?}");
        assert!(ours <= theirs, "{ours:?}, the library {theirs:?}");
    }
}

/// Pieces of `tokenizer.json` for mutations.
const WORDS: [&str; 38] = [
    "null",
    "true",
    "0",
    "-1",
    "4294967295",
    "1e99",
    "\"\"",
    "[]",
    "{}",
    "\"a\"",
    "\"abc\"",
    "[\"a\",\"b\"],",
    "[\"abc\",\"c\"]",
    "\"zz\":9,",
    "\"<0x61>\":9,",
    "\"dropout\":1.0,",
    "\"byte_fallback\":true,",
    "\"unk_token\":\"u\",",
    "\"unk_token\":\"zz\",",
    "\"continuing_subword_prefix\":\"##\",",
    "\"end_of_word_suffix\":\"</w>\",",
    "\"WordLevel\"",
    "\"Unigram\"",
    "\"WordPiece\"",
    "\"Replace\"",
    "\"Metaspace\"",
    "\"Removed\"",
    "\"Sequence\"",
    "\"Precompiled\",\"precompiled_charsmap\":\"/////w==\"",
    "{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},\"content\":\"aaaaaaaa\"},",
    "\"merges\":[\"a b\",\"ab c\"],",
    "\"ab\":3,",
    "{\"id\":9,\"content\":\"ab\"},",
    "\"invert\":true",
    "(a*)*b",
    "(?=",
    "\\u0000",
    "\\ud800",
];

static COMPLETE: LazyLock<String> = LazyLock::new(|| complete(SMALL));

/// A file with a few tokens of JSON replaced, removed or doubled, or with random bytes changed.
fn mutated(random: &mut Random) -> Vec<u8> {
    let mut file = match random.below(64) {
        0 => tiny::TOKENIZER.to_vec(),
        1 => with(NORMALIZER, &doubling(1 + random.below(24))).into_bytes(),
        2..32 => COMPLETE.as_bytes().to_vec(),
        _ => SMALL.as_bytes().to_vec(),
    };
    for _ in 0..random.below(4) {
        // Positions where a value, a name or a list begins or ends.
        let marks: Vec<usize> = (0..file.len()).filter(|&at| b"\",:[]{}".contains(&file[at])).collect();
        let [from, to] = [(); 2].map(|()| marks[random.below(marks.len())]);
        let (from, to) = (from.min(to), from.max(to).min(from.min(to) + 40));
        match random.below(4) {
            0 => drop(file.drain(from..to)),
            1 => drop(file.splice(from..from, file[from..to].to_vec())),
            2 => drop(file.splice(from..to, random.pick(&WORDS).bytes())),
            _ => drop(file.splice(from + 1..from + 1, random.pick(&WORDS).bytes())),
        }
    }
    if random.below(2) == 0 {
        random.mutate(&mut file, &WORDS);
    }
    file
}

#[test]
fn mutated_tokenizer_files_are_isolated() {
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    // The library's panics are expected and caught, and not printed.
    let others = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| match info.location() {
        Some(place) if place.file().contains("/tokenizers-") => drop(PANICS.fetch_add(1, Ordering::Relaxed)),
        _ => others(info),
    }));
    let [loaded, refused] = [const { AtomicUsize::new(0) }; 2];
    cases("mutated tokenizer files", 10_000, 200_000, |random| {
        let file = mutated(random);
        let short = "abcab a\n<think>b <|endoftext|>";
        let (result, peak) = peak_of(|| {
            let tokenizer = Tokenizer::from_json(&file, Path::new("t.json"))?;
            let once = tokenizer.encode(short, LENGTH);
            Ok::<_, kiln::error::Error>((tokenizer, once))
        });
        assert!(peak <= most(file.len() as isize), "{peak} bytes for a file of {}", file.len());
        match result {
            Ok((tokenizer, once)) => {
                loaded.fetch_add(1, Ordering::Relaxed);
                // Encoding is deterministic for any file.
                match (once, tokenizer.encode(short, LENGTH)) {
                    (Ok(once), Ok(again)) => assert_eq!(once, again),
                    (once, again) => assert!(once.is_err() && again.is_err()),
                }
                for prompt in ["", short, &prompt(random)] {
                    if let Err(error) = tokenizer.encode(prompt, LENGTH) {
                        assert_eq!(error.exit_code(), 3, "{error}");
                    }
                }
            }
            Err(error) => {
                refused.fetch_add(1, Ordering::Relaxed);
                assert!(error.to_string().contains("(t.json)") && error.exit_code() == 3, "{error}");
            }
        }
    });
    let [loaded, refused] = [loaded, refused].map(AtomicUsize::into_inner);
    println!("{loaded} loaded, {refused} refused, {PANICS:?} panics caught");
    assert!(loaded > 500 && refused > 500, "{loaded} {refused}");
}

#[test]
fn no_prompt_takes_long() {
    let mut random = Random::new(1);
    let mut texts: Vec<(String, String)> = PIECES.map(|piece| (format!("{piece:?}"), piece.to_owned())).into();
    for piece in ["a ", "a.", " \n", "-", "ab", "1a", "    x", "<|im_start|", "\u{fdfa}", "e\u{301}", "7 ", ".7"] {
        texts.push((format!("{piece:?}"), piece.to_owned()));
    }
    let mut drawn = |what: &str, range: std::ops::Range<usize>| {
        let draw = || char::from_u32((range.start + random.below(range.len())) as u32).unwrap_or('?');
        texts.push((what.into(), std::iter::repeat_with(draw).take(MAX_PROMPT_BYTES).collect()));
    };
    drawn("letters", 0x61..0x7b);
    drawn("ASCII", 0x20..0x7f);
    drawn("marks", 0x300..0x36f);
    drawn("Hangul", 0x1100..0x1200);
    drawn("CJK", 0x4e00..0x9fff);
    drawn("emoji", 0x1f300..0x1f6ff);
    drawn("everything", 0..0x11_0000);
    let prompt = |(what, text): (String, String)| {
        let text = text.repeat(MAX_PROMPT_BYTES / text.len() + 1);
        (what, text[..text.floor_char_boundary(MAX_PROMPT_BYTES)].to_owned())
    };
    assert_cheap(&QWEN3, texts.into_iter().map(prompt));

    // A prompt that is too long is not even copied.
    let too_long = "a".repeat(100 << 20);
    let encode = || assert_eq!(QWEN3.encode(&too_long, LENGTH).unwrap_err().exit_code(), 2);
    let ((), allocated) = allocated_by(encode);
    assert!(allocated <= 1 << 10, "{allocated} bytes");
    assert!(!long() || time_of(encode) <= Duration::from_millis(5));
}

#[cfg(unix)]
#[test]
fn a_tokenizer_file_without_end_is_refused() {
    let error = Tokenizer::open(Path::new("/dev/zero")).unwrap_err();
    assert_eq!(error.to_string(), "cannot read (/dev/zero): it is not a regular file");
    assert_eq!(error.exit_code(), 3);
}
