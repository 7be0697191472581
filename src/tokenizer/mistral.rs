//! The vocabulary of Mistral Small 3, the text encoder of FLUX.2 [dev]: the built-in list of ranks, and the comparison of a
//! model's own files with it.
//!
//! FLUX.2 [dev] comes with a `tokenizer.json` or, in ComfyUI's files, with Mistral's own JSON as a tensor. Both describe the same
//! vocabulary, but disagree about how text is split into words. The image model was trained with the former. So a file with the
//! built-in vocabulary is not used itself, and its rules for words do not count.

use super::NOT_USABLE;
use super::file::{Few, MAX_TOKENS};
use super::ranks::RankList;
use super::special::{SPECIALS, name_of};
use crate::error::Error;
use crate::text::shown;
use flate2::read::GzDecoder;
use std::borrow::Cow;
use std::io::Read;
use std::path::Path;
use tokenizers::models::bpe::Vocab;

/// The hint for a vocabulary that differs from FLUX.2 [dev]'s.
const HINT: &str = "use the tokenizer that came with FLUX.2 [dev], or none: it is built in";

/// The tokens except the special ones, in rank order, each after a length byte; gzipped.
static RANKS: &[u8] = include_bytes!("../../models/mistral/ranks.gz");

/// The built-in list of ranks.
pub fn shipped() -> std::io::Result<Vec<u8>> {
    let mut list = Vec::with_capacity(1 << 20);
    GzDecoder::new(RANKS).read_to_end(&mut list)?;
    Ok(list)
}

/// Whether a `tokenizer.json`'s vocabulary, which has as many tokens and every id once, matches the built-in one.
pub fn is_shipped(vocab: &Vocab, ours: RankList<'_>) -> bool {
    let letters = letters();
    let printable = |token: &[u8]| token.iter().map(|byte| letters[*byte as usize]).collect::<String>();
    let mut names = (0..SPECIALS).map(name_of).chain(ours.map(|token| printable(token).into())).zip(0..);
    names.all(|(name, id)| vocab.get(&*name) == Some(&id))
}

/// The error for a vocabulary that has as many tokens as the built-in one, but different tokens.
pub fn other_vocabulary(origin: &Path) -> Error {
    Error::bad_file(origin, NOT_USABLE, "its vocabulary is not FLUX.2 [dev]'s").with_hint(HINT)
}

/// The letters for the bytes in a `tokenizer.json`, as in GPT-2: printable Latin-1 characters stand for themselves, the other
/// bytes get letters from U+0100 on.
pub fn letters() -> [char; 256] {
    let mut next = '\u{100}'..;
    std::array::from_fn(|byte| match byte as u8 {
        byte @ (b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) => byte.into(),
        _ => next.next().unwrap_or_default(),
    })
}

/// Mistral's own vocabulary format. kiln does not read its word pattern, because no image model was trained with it.
#[derive(serde::Deserialize)]
struct Tekken<'a> {
    config: TekkenConfig,
    #[serde(borrow)]
    vocab: Few<TekkenToken<'a>, MAX_TOKENS>,
}

/// The vocabulary size of the model. The file may have more tokens.
#[derive(serde::Deserialize)]
struct TekkenConfig {
    default_vocab_size: usize,
    default_num_special_tokens: usize,
}

#[derive(serde::Deserialize)]
struct TekkenToken<'a> {
    rank: usize,
    #[serde(borrow)]
    token_bytes: Cow<'a, str>,
}

/// Reads the list of ranks in an untrusted `tekken.json`. It accepts only ranks in order, and the list is no longer than the
/// file.
pub fn tekken_ranks(json: &[u8]) -> tokenizers::Result<Vec<u8>> {
    let Tekken { config, vocab } = serde_json::from_slice(json)?;
    let specials = config.default_num_special_tokens;
    if specials != SPECIALS {
        return Err(format!("it has {specials} special tokens, kiln knows {SPECIALS}").into());
    }
    let count = config.default_vocab_size.saturating_sub(SPECIALS);
    if count > MAX_TOKENS {
        return Err(format!("its vocabulary has {count} tokens, the limit is {MAX_TOKENS}").into());
    }
    if count > vocab.count {
        return Err(format!("its vocabulary has {count} tokens, and it lists {}", vocab.count).into());
    }
    let mut list = Vec::new();
    for (at, token) in vocab.first.into_iter().take(count).enumerate() {
        if token.rank != at {
            return Err(format!("its token {at} has the rank {}", token.rank).into());
        }
        let start = list.len();
        list.push(0);
        decode_base64(&token.token_bytes, &mut list)
            .ok_or_else(|| format!("its token {at} is `{}`, which is not base64", shown(&token.token_bytes)))?;
        let length = list.len() - start - 1;
        list[start] = u8::try_from(length).map_err(|_| format!("its token {at} has {length} bytes, the limit is 255"))?;
    }
    Ok(list)
}

/// Appends the bytes of a base64 text with padding (RFC 4648), or returns `None` if it is not valid base64.
fn decode_base64(text: &str, out: &mut Vec<u8>) -> Option<()> {
    let (groups, rest) = text.as_bytes().as_chunks::<4>();
    for (at, group) in groups.iter().enumerate() {
        let padding = group.iter().rev().take_while(|letter| **letter == b'=').count();
        if padding > 2 || (padding > 0 && at + 1 < groups.len()) {
            return None;
        }
        let mut bits = 0;
        for letter in &group[..4 - padding] {
            bits = bits << 6
                | u32::from(match letter {
                    b'A'..=b'Z' => letter - b'A',
                    b'a'..=b'z' => letter - b'a' + 26,
                    b'0'..=b'9' => letter - b'0' + 52,
                    b'+' => 62,
                    b'/' => 63,
                    _ => return None,
                });
        }
        bits <<= 6 * padding;
        let [_, bytes @ ..] = bits.to_be_bytes();
        let (bytes, left) = bytes.split_at(3 - padding);
        if left.iter().any(|byte| *byte != 0) {
            return None;
        }
        out.extend(bytes);
    }
    rest.is_empty().then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::special::{LONGEST, opens};
    use crate::tokenizer::{Padding, PromptFormat, Tokenizer, Tokens, ranks};
    use serde_json::{Value, json};
    use std::collections::HashMap;
    use std::sync::LazyLock;

    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::mistral().unwrap());

    /// The ids of the template before the prompt. After the prompt comes 4.
    const HEAD: [u32; 32] = [
        1, 17, 4568, 1584, 1420, 26554, 1455, 12738, 2314, 3937, 38340, 1046, 3213, 5628, 37253, 11688, 30557, 1408, 3481, 14608,
        1044, 3481, 1010, 2452, 5604, 1321, 10636, 3816, 67813, 1046, 18, 3,
    ];

    const FOX: &str = "A photorealistic photo of a red fox standing on a mossy rock in a misty forest at dawn, volumetric light, \
        85mm lens";
    const MIST: &str = "a photo of a forest with mist swirling around the tree trunks. The word 'FLUX.2' is painted over it in \
        big, red brush strokes with visible texture";

    const CRAB: &str = "Realistic macro photograph of a hermit crab using a soda can as its shell, partially emerging from the can, \
        captured with sharp detail and natural colors, on a sunlit beach with soft shadows and a shallow depth of field, with \
        blurred ocean waves in the background. The can has the text `BFL Diffusers` on it and it has a color gradient that start \
        with #FF5733 at the top and transitions to #33FF57 at the bottom.";

    /// A list whose only tokens, apart from the special ones, are the single bytes.
    fn bytes_only() -> Vec<u8> {
        (0..=255).flat_map(|byte| [1, byte]).collect()
    }

    /// Encodes to 512 ids, checks the padding and returns the rest.
    fn real_ids(tokenizer: &Tokenizer, prompt: &str) -> Vec<u32> {
        let Tokens { mut ids, real, cut, .. } = tokenizer.encode(prompt, 512).unwrap();
        assert_eq!((ids.len(), cut), (512, 0));
        assert!(ids[real..].iter().all(|id| *id == 11));
        ids.truncate(real);
        ids
    }

    fn fnv1a(ids: &[u32]) -> u64 {
        let bytes = ids.iter().flat_map(|id| id.to_le_bytes());
        bytes.fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
    }

    #[test]
    fn the_system_text() {
        let system = PromptFormat::MISTRAL.before.strip_prefix("<s>[SYSTEM_PROMPT]").unwrap();
        let system = system.strip_suffix("[/SYSTEM_PROMPT][INST]").unwrap();
        assert_eq!((system.len(), system.find('\n'), system.matches('\n').count()), (168, Some(123), 1));
    }

    #[test]
    fn reference_prompts() {
        let cases: [(&str, &[u32]); 15] = [
            ("", &[]),
            ("a cat", &[1097, 7990]),
            ("A cat holding a sign that says hello world", &[1065, 7990, 14234, 1261, 2287, 1455, 8223, 52528, 4304]),
            (
                FOX,
                &[
                    1065, 102244, 1279, 5744, 16649, 1307, 1261, 4804, 94137, 15866, 1408, 1261, 119766, 1121, 9091, 1294, 1261,
                    11692, 1121, 17144, 1513, 54507, 1044, 100989, 4391, 1044, 1032, 1056, 1053, 8383, 20993,
                ],
            ),
            (
                MIST,
                &[
                    1097, 16649, 1307, 1261, 17144, 1454, 11692, 4250, 92523, 3879, 1278, 9917, 1560, 34382, 1046, 1531, 3541,
                    1576, 15869, 82838, 1046, 1050, 1039, 1395, 35902, 2136, 1494, 1294, 6732, 1044, 4804, 31779, 72855, 1454,
                    13874, 26228,
                ],
            ),
            ("\nleading newline", &[1010, 47935, 91924]),
            ("two  spaces\ttab ", &[33078, 1032, 18971, 1009, 8710, 1032]),
            ("McDonald's iPhone eBay NaOH", &[28595, 31609, 1681, 1623, 16742, 1324, 58677, 6978, 16724]),
            ("你好，世界", &[124108, 1625, 29659]),
            ("emoji 🦀🚀 ok", &[1356, 26303, 119685, 1166, 1128, 1240, 1159, 1154, 1128, 5913]),
            // The accent of the second é is a separate character, and stays separate.
            ("Ünïcode é e\u{301}", &[39453, 1110, 7884, 6154, 1782, 1324, 1204, 1129]),
            (
                "#FF5733 to #33FF57, 1024x1024",
                &[
                    1035, 7762, 1053, 1055, 1051, 1051, 1317, 2569, 1051, 1051, 7762, 1053, 1055, 1044, 1032, 1049, 1048, 1050,
                    1052, 1120, 1049, 1048, 1050, 1052,
                ],
            ),
            ("DON'T WE'LL don't we'll", &[1068, 2918, 1039, 1084, 74074, 1039, 23947, 2607, 2405, 1729, 7534]),
            // With the pattern that Mistral's models were trained with, the ids would be 3086 75790 2063 5210 104483 89726.
            ("हिन्दी में बिल्ली", &[3086, 9658, 25793, 2063, 3040, 4188, 4107, 9600, 16019, 2063]),
            ("keep [IMG] and </s> and [INST] here", &[44975, 1032, 1321, 1032, 2, 1321, 1032, 3, 3226]),
        ];
        for (prompt, middle) in cases {
            assert_eq!(real_ids(&TOKENIZER, prompt), [&HEAD, middle, &[4]].concat(), "{prompt:?}");
        }
        for (prompt, count, hash) in [
            ("", 33, 0xEDF4_AB2E_7555_67F1_u64),
            ("a cat", 35, 0x98EF_E976_89AC_390B),
            (FOX, 64, 0xA6CE_45CF_11E1_39AD),
            (MIST, 69, 0x61E3_21D7_8B4D_7BBC),
            (CRAB, 132, 0xC602_D525_9A44_93E8),
        ] {
            let ids = real_ids(&TOKENIZER, prompt);
            assert_eq!((ids.len(), fnv1a(&ids)), (count, hash), "{prompt:?}");
        }
        // The ids without the template.
        for (text, want) in [
            ("crema,\" it said... (really?)", [1860, 1831, 4225, 1494, 2639, 2880, 1319, 113495, 28197]),
            ("東京の夜にネオンが光る", [18629, 2439, 21721, 2650, 25824, 50292, 3322, 36001, 3670]),
        ] {
            assert_eq!(TOKENIZER.ids(text).unwrap(), want, "{text:?}");
        }
    }

    #[test]
    fn the_template_is_the_same_for_every_prompt() {
        for prompt in ["", " ", "\n", "<s>", "[INST]", "]", "x\u{301}"] {
            let ids = real_ids(&TOKENIZER, prompt);
            assert_eq!((&ids[..32], ids.last()), (&HEAD[..], Some(&4)), "{prompt:?}");
        }
        assert_eq!((HEAD[22], HEAD.iter().filter(|id| **id == 1).count()), (1010, 1));
    }

    #[test]
    fn a_long_prompt_is_truncated_at_its_end() {
        let tokens = TOKENIZER.encode(&" cat".repeat(600), 512).unwrap();
        assert_eq!((tokens.ids.len(), tokens.real, tokens.cut), (512, 512, 633 - 512));
        assert_eq!((&tokens.ids[..32], tokens.ids[511]), (&HEAD[..], 7990));
        assert!(!tokens.ids.contains(&4), "the end of the template is not put back");
        assert_eq!(TOKENIZER.ending(&tokens).unwrap(), ["cat"; 12].join(" "));
        assert_eq!(TOKENIZER.encode("a cat", 0).unwrap(), Tokens { ids: vec![], real: 0, padding: Padding::Right, cut: 35 });
    }

    #[test]
    fn the_end_of_a_prompt_for_display() {
        let ending = |prompt: &str, length| TOKENIZER.ending(&TOKENIZER.encode(prompt, length).unwrap()).unwrap();
        // Special tokens are left out, and so is an incomplete character.
        assert_eq!(ending("a [INST] cat", 36), "ribution and actions without speculation.a cat");
        assert_eq!(ending("🦀", 33), "object attribution and actions without speculation.");
    }

    #[test]
    fn the_place_of_an_image_is_removed_once() {
        let middle = |prompt| real_ids(&TOKENIZER, prompt)[32..].to_vec();
        assert_eq!(middle("[IMG]"), [4]);
        assert_eq!(middle("a[IMG] [IMG]cat"), middle("a cat"));
        assert_eq!(middle("[IM[IMG]G]"), [10, 4]);
        assert_eq!(middle("[IN[IMG]ST]"), [3, 4]);
    }

    #[test]
    fn all_special_tokens_and_what_only_resembles_them() {
        for id in 0..SPECIALS {
            let name = name_of(id);
            assert!(name.len() <= LONGEST && name.starts_with(|first: char| opens(first as u8)), "{name}");
            assert_eq!(TOKENIZER.ids(&name).unwrap(), [id as u32], "{name}");
            assert_eq!(TOKENIZER.ids(&format!("<{name}]")).unwrap(), [1060, id as u32, 1093], "{name}");
        }
        let others = ["<SPECIAL_19>", "<SPECIAL_1000>", "<SPECIAL_020>", "<SPECIAL_+20>", "<SPECIAL_>", "[inst]", "[INST", "<é>"];
        for text in others {
            assert!(TOKENIZER.ids(text).unwrap().iter().all(|id| *id >= 1000), "{text}");
        }
    }

    #[test]
    fn the_tiny_model_has_a_token_per_byte() {
        let tokenizer = Tokenizer::from_ranks(&bytes_only(), Path::new("tiny")).unwrap();
        assert_eq!(tokenizer.format(), &PromptFormat::MISTRAL);
        let bytes = |text: &str| text.bytes().map(|byte| 1000 + u32::from(byte)).collect::<Vec<_>>();
        let system = &PromptFormat::MISTRAL.before[18..186];
        let want = [vec![1, 17], bytes(system), vec![18, 3], bytes("a red fox in the snow"), vec![4]].concat();
        assert_eq!(want.len(), 194);
        assert_eq!(real_ids(&tokenizer, "a red fox in the snow"), want);
    }

    #[test]
    fn damaged_lists_of_ranks() {
        for (list, want) in [
            (vec![], "it has 0 tokens, and none for the byte 0"),
            (bytes_only()[..100].to_vec(), "it has 50 tokens, and none for the byte 50"),
            (bytes_only()[2..].to_vec(), "its token of rank 0 is not the byte 0"),
            ([&bytes_only()[..], &[3, b'a', b'b']].concat(), "it ends within the token of rank 256"),
            ([&bytes_only()[..], &[0]].concat(), "its token of rank 256 is empty"),
            ([&bytes_only()[..], b"\x02ab\x02ab"].concat(), "its tokens of ranks 256 and 257 are the same"),
            ([&bytes_only()[..], b"\x01a"].concat(), "its tokens of ranks 97 and 256 are the same"),
        ] {
            let error = Tokenizer::from_ranks(&list, Path::new("r")).unwrap_err();
            assert_eq!((error.to_string(), error.exit_code()), (format!("not a usable tokenizer (r): {want}"), 3));
        }
    }

    #[test]
    fn pairs_that_overlap_are_merged_as_in_the_library() {
        // There are two ways to make `aaa`. The one whose left part has the lower rank comes first, though the other is further left.
        let list = [&bytes_only()[..], b"\x02aa\x02ba\x03aaa"].concat();
        let tokenizer = Tokenizer::from_ranks(&list, Path::new("r")).unwrap();
        let mut file = tokenizer_json(&list);
        file["model"]["ignore_merges"] = false.into();
        let library = Tokenizer::from_json(file.to_string().as_bytes(), Path::new("t.json")).unwrap();
        for text in ["aaaaa", "aaaaaaaab", "baaaa", "baaabaaaaaa", "abaaaaba"] {
            assert_eq!(tokenizer.ids(text).unwrap(), library.ids(text).unwrap(), "{text}");
        }
    }

    /// The `tokenizer.json` of a list of ranks, as transformers converts it.
    fn tokenizer_json(list: &[u8]) -> Value {
        let letters = letters();
        let text = |token: &[u8]| token.iter().map(|byte| letters[*byte as usize]).collect::<String>();
        let ranks: HashMap<&[u8], usize> = RankList(list).enumerate().map(|(rank, token)| (token, rank)).collect();
        let specials: Vec<_> = (0..SPECIALS).map(name_of).collect();
        let mut vocab: serde_json::Map<String, Value> =
            specials.iter().enumerate().map(|(id, name)| (name.to_string(), id.into())).collect();
        let mut merges = Vec::new();
        for (rank, token) in RankList(list).enumerate() {
            vocab.insert(text(token), (SPECIALS + rank).into());
            let cuts = (1..token.len()).map(|at| token.split_at(at));
            let mut cuts: Vec<_> = cuts.filter(|(left, right)| ranks.contains_key(left) && ranks.contains_key(right)).collect();
            cuts.sort_by_key(|(left, _)| ranks[left]);
            merges.extend(cuts.into_iter().map(|(left, right)| json!([text(left), text(right)])));
        }
        let added: Vec<_> =
            specials.iter().enumerate().map(|(id, name)| json!({"id": id, "content": name, "special": true})).collect();
        json!({"added_tokens": added, "normalizer": null, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": ranks::PATTERN}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]}, "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "ignore_merges": true, "vocab": vocab, "merges": merges}})
    }

    /// The `tekken.json` of a list of ranks, with one more token than the model has.
    fn tekken_json(list: &[u8]) -> Value {
        let text = |token: &[u8]| {
            const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
            let group = |bytes: &[u8]| {
                let bits = (0..3).fold(0, |bits, at| bits << 8 | usize::from(bytes.get(at).copied().unwrap_or_default()));
                let letter = |at| if at <= bytes.len() { char::from(LETTERS[bits >> (18 - 6 * at) & 63]) } else { '=' };
                (0..4).map(letter).collect::<String>()
            };
            token.chunks(3).map(group).collect::<String>()
        };
        let tokens = RankList(list).chain([&b"beyond"[..]]);
        let vocab: Vec<_> = tokens.enumerate().map(|(rank, token)| json!({"rank": rank, "token_bytes": text(token)})).collect();
        json!({"config": {"pattern": "(a*)*b", "default_vocab_size": SPECIALS + vocab.len() - 1,
            "default_num_special_tokens": SPECIALS}, "vocab": vocab})
    }

    #[test]
    fn a_vocabulary_of_full_size_is_the_one_that_is_built_in() {
        let origin = Path::new("m/tokenizer.json");
        let mut file = tokenizer_json(&shipped().unwrap());
        assert_eq!(file["model"]["merges"].as_array().unwrap().len(), 269_443);
        // The file's word pattern does not count.
        file["pre_tokenizer"] = json!({"type": "Split", "pattern": {"Regex": "(a*)*b"}});
        let hindi = "हिन्दी में बिल्ली";
        let pretty = serde_json::to_vec_pretty(&file).unwrap();
        let built_in = Tokenizer::from_json(&pretty, origin).unwrap();
        assert_eq!(built_in.ids(hindi).unwrap(), TOKENIZER.ids(hindi).unwrap());
        // Two tokens with swapped ids, and no merges, which do not count either.
        file["model"]["merges"] = json!([]);
        let vocab = &mut file["model"]["vocab"];
        (vocab["Ġcat"], vocab["Ġdog"]) = (vocab["Ġdog"].clone(), vocab["Ġcat"].clone());
        let error = Tokenizer::from_json(file.to_string().as_bytes(), origin).unwrap_err();
        assert_eq!(error.to_string(), "not a usable tokenizer (m/tokenizer.json): its vocabulary is not FLUX.2 [dev]'s");
        assert_eq!((error.exit_code(), error.hint().as_deref()), (3, Some(HINT)));
    }

    #[test]
    fn a_vocabulary_of_another_size_is_used() {
        let list = [&bytes_only()[..], b"\x02 f\x02ox\x04 fox"].concat();
        let want = real_ids(&Tokenizer::from_ranks(&list, Path::new("r")).unwrap(), "a red fox in the snow");
        // ` fox` is one token, and so is the start of ` focusing`.
        assert_eq!((want.len(), want.contains(&1258)), (194 - 3 - 1, true));
        let folder = Tokenizer::from_json(tokenizer_json(&list).to_string().as_bytes(), Path::new("t.json")).unwrap();
        let comfy = Tokenizer::from_tekken(tekken_json(&list).to_string().as_bytes(), Path::new("t")).unwrap();
        for tokenizer in [folder, comfy] {
            assert_eq!(tokenizer.format(), &PromptFormat::MISTRAL);
            assert_eq!(real_ids(&tokenizer, "a red fox in the snow"), want);
        }
        // A special token of the template that is only an ordinary token here would not be found in a text.
        let mut file = tokenizer_json(&list);
        file["added_tokens"][3]["content"] = "<pad2>".into();
        file["added_tokens"][3]["id"] = 1259.into();
        let error = Tokenizer::from_json(file.to_string().as_bytes(), Path::new("t.json")).unwrap_err();
        assert!(
            error.to_string().starts_with("not a known tokenizer (t.json): it adds neither `<|endoftext|>` of Qwen3 nor `<s>`")
        );
    }

    #[test]
    fn mistrals_own_form() {
        let (list, origin) = (shipped().unwrap(), Path::new("e.safetensors"));
        let mut file = tekken_json(&list);
        let built_in = Tokenizer::from_tekken(file.to_string().as_bytes(), origin).unwrap();
        assert_eq!(built_in.ids(FOX).unwrap(), TOKENIZER.ids(FOX).unwrap());
        file["vocab"][6990]["token_bytes"] = "IGRvZ2U=".into();
        let error = Tokenizer::from_tekken(file.to_string().as_bytes(), origin).unwrap_err();
        assert_eq!(error.to_string(), "not a usable tokenizer (e.safetensors): its vocabulary is not FLUX.2 [dev]'s");
        assert_eq!((error.exit_code(), error.hint().as_deref()), (3, Some(HINT)));
    }

    #[test]
    fn damaged_files_of_mistrals_own_form() {
        let small = tekken_json(&bytes_only());
        let changed = |path: &str, value: Value| {
            let mut file = small.clone();
            *file.pointer_mut(path).unwrap() = value;
            file.to_string()
        };
        let long = "QUFB".repeat(86);
        for (file, want) in [
            (String::new(), "EOF while parsing"),
            ("[".repeat(1 << 20), "invalid type: sequence"),
            ("{}".into(), "missing field `config`"),
            (changed("/config/default_num_special_tokens", 1001.into()), "it has 1001 special tokens, kiln knows 1000"),
            (changed("/config/default_vocab_size", 1258.into()), "its vocabulary has 258 tokens, and it lists 257"),
            (changed("/config/default_vocab_size", u64::MAX.into()), "tokens, the limit is 524288"),
            (changed("/config/default_vocab_size", 3.into()), "it has 0 tokens, and none for the byte 0"),
            (changed("/config/default_vocab_size", (-1).into()), "invalid value"),
            (changed("/vocab/7/rank", 8.into()), "its token 7 has the rank 8"),
            (changed("/vocab/7/token_bytes", "".into()), "its token of rank 7 is empty"),
            (changed("/vocab/7/token_bytes", "QQ==".into()), "its token of rank 7 is not the byte 7"),
            (changed("/vocab/7/token_bytes", long.into()), "its token 7 has 258 bytes, the limit is 255"),
            (changed("/vocab/7/token_bytes", "B".into()), "its token 7 is `B`, which is not base64"),
        ] {
            let error = Tokenizer::from_tekken(file.as_bytes(), Path::new("t")).unwrap_err();
            assert!(error.to_string().starts_with("not a usable tokenizer (t): ") && error.to_string().contains(want), "{error}");
        }
        for text in ["QQ=", "Q===", "====", "QQ==QQ==", "QR==", "QUF=", "QQ-_", "Q Q=", "QQ=A", "QUE\n", "é=="] {
            assert_eq!(decode_base64(text, &mut Vec::new()), None, "{text:?}");
        }
        let mut bytes = Vec::new();
        assert_eq!((decode_base64("QUJDRA==", &mut bytes), &bytes[..]), (Some(()), &b"ABCD"[..]));
    }
}
