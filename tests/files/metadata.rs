//! What image files say about how they were made: files of other programs, and files that were made to do harm.

use common::cost::{peak_of, time_of};
use flate2::Compression;
use flate2::write::ZlibEncoder;
use kiln::image::{Format, Image, Threads};
use kiln::metadata::{Detail, ImageMetadata, Maker, Program, StoredText};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

/// The limits of all that is done for the text of a file.
const MEMORY: isize = 1 << 20;
const TIME: Duration = Duration::from_millis(50);

fn image() -> Image {
    Image { width: 64, height: 64, pixels: (0..64 * 64 * 3).map(|i| (i % 251) as u8).collect() }
}

/// A chunk of a PNG.
fn chunk(name: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let mut crc = flate2::Crc::new();
    crc.update(name);
    crc.update(data);
    [&(data.len() as u32).to_be_bytes()[..], name, data, &crc.sum().to_be_bytes()].concat()
}

/// A PNG with these chunks behind its header.
fn png(chunks: &[(&[u8; 4], Vec<u8>)]) -> Vec<u8> {
    /// Signature and header.
    const START: usize = 8 + 25;
    let plain = image().encode_png(&[]).unwrap();
    let mut file = plain[..START].to_vec();
    chunks.iter().for_each(|(name, data)| file.extend(chunk(name, data)));
    file.extend(&plain[START..]);
    file
}

fn text_chunk(key: &str, text: &str) -> (&'static [u8; 4], Vec<u8>) {
    (b"tEXt", [key.as_bytes(), b"\0", text.as_bytes()].concat())
}

fn compressed(text: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

/// The chunks of a WebP with XMP or Exif.
fn webp(name: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let plain = image().encode(Format::WebP, &[], Threads::One).unwrap();
    let mut file = [&plain[..], name, &(data.len() as u32).to_le_bytes(), data].concat();
    file.resize(file.len().next_multiple_of(2), 0);
    let length = (file.len() as u32 - 8).to_le_bytes();
    file[4..8].copy_from_slice(&length);
    file
}

#[test]
fn programs_are_recognized_by_what_they_store() {
    let own = |prompt: &str, negative: Option<&str>, seed: &str, program| Maker {
        program,
        prompt: Some(prompt.into()),
        negative: negative.map(String::from),
        seed: Some(seed.into()),
    };
    let a1111 = own("a red fox, (snow:1.2), café 狐\nsecond line", Some("blurry, bad"), "1234567890123", Program::A1111);
    let comfy = own("a red fox, café", Some("blurry"), "8566257", Program::ComfyUi);
    for (name, want) in [
        ("a1111.png", Some(a1111.clone())),
        ("a1111.jpg", Some(a1111.clone())),
        ("a1111.webp", Some(a1111)),
        ("sd_cpp.png", Some(own("a red fox, café 狐", Some("blurry"), "42", Program::StableDiffusionCpp))),
        ("comfy.png", Some(comfy.clone())),
        ("comfy.webp", Some(comfy)),
        ("comfy_custom.png", Some(own("a red fox", None, "77", Program::ComfyUi))),
        ("invoke.png", Some(own("a red fox", Some("blurry"), "4242", Program::InvokeAi))),
        ("mflux.png", Some(own("a red fox", None, "7", Program::Mflux))),
        ("none.png", None),
    ] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/foreign").join(name);
        let bytes = fs::read(&path).unwrap();
        let text = StoredText::of_file(&bytes, &path).unwrap();
        assert_eq!(Maker::of(&text), want, "{name}: {text:?}");
        assert_eq!((text.notes(), text.metadata()), (&[][..], None), "{name}");
    }
}

/// What kiln stores reads back from every format.
#[test]
fn own_metadata_reads_back() {
    let metadata = ImageMetadata {
        prompt: "a sign \"cold\" <b>&\nNegative prompt: none\u{7} 狐".into(),
        seed: Some(u64::MAX),
        model: "klein".into(),
        negative: Some("blurry".into()),
        steps: 4,
        size: [64, 64],
        version: "kiln 0.1.0".into(),
        ..ImageMetadata::default()
    };
    for detail in [Detail::Full, Detail::Basic, Detail::None] {
        let stored = metadata.text(detail);
        for format in [Format::Png, Format::Jpeg { quality: 90 }, Format::WebP] {
            let bytes = image().encode(format, &stored, Threads::One).unwrap();
            let text = StoredText::of_file(&bytes, Path::new("x")).unwrap();
            // XML cannot hold the bell, but JSON escapes it.
            let bell = |text: &str| if format == Format::Png { text.to_owned() } else { text.replace('\u{7}', "\u{fffd}") };
            for (key, value) in &stored {
                let want = if *key == "parameters" { value.clone() } else { bell(value) };
                assert_eq!(text.get(key), Some(&*want), "{key} {format:?}");
            }
            assert_eq!((text.iter().count(), text.notes()), (stored.len(), &[][..]));
            assert_eq!(text.metadata(), (detail == Detail::Full).then(|| Ok(metadata.clone())));
            let maker = Maker::of(&text);
            assert_eq!(maker.is_some(), detail != Detail::None);
            if let Some(Maker { program, prompt, negative, seed }) = maker {
                assert_eq!((program, prompt), (Program::Kiln, Some(bell(&metadata.prompt))));
                assert_eq!((negative.as_deref(), seed), (Some("blurry"), Some(u64::MAX.to_string())));
            }
        }
    }
}

/// JSON that would take much memory, in each place where JSON is read.
fn hostile_json() -> Vec<(String, String)> {
    let nodes: String = (0..9_000).map(|i| format!("\"{i}\":{{\"class_type\":\"x\"}},")).collect();
    let inputs: String = (0..14_000).map(|i| format!("\"i{i}\":[{i},0],")).collect();
    let deep = "[".repeat(200_000);
    vec![
        ("kiln".into(), format!("{{\"references\":[{}\"\"]}}", "\"\",".repeat(150_000))),
        ("kiln".into(), format!("{{\"lora\":{deep}}}")),
        ("kiln".into(), "{\"seed\":1,\"seed\":2}".into()),
        ("kiln".into(), "{\"surprise\":1}".into()),
        ("prompt".into(), format!("{{{nodes}\"x\":{{}}}}")),
        ("prompt".into(), format!("{{\"1\":{{\"class_type\":\"x\",\"inputs\":{{{inputs}\"x\":1}}}}}}")),
        ("prompt".into(), format!("{{\"1\":{{\"class_type\":\"x\",\"inputs\":{{\"text\":{deep}}}}}}}")),
        ("prompt".into(), r#"{"1":{"class_type":"x","inputs":{"positive":["1",0],"text":["1",0]}}}"#.into()),
        ("invokeai_metadata".into(), format!("{{\"positive_prompt\":{deep}}}")),
        ("parameters".into(), format!("x\n{}", "a: 1,".repeat(100_000))),
        ("parameters".into(), format!("x\n{}", "a:\"".repeat(150_000))),
        ("parameters".into(), "\nNegative prompt:".repeat(30_000)),
    ]
}

#[test]
fn hostile_text_costs_little_and_is_left_out_by_name() {
    let large = "x".repeat(10 << 20);
    let properties = " kiln:a=''".repeat(1 << 20);
    let entities = format!("<kiln:prompt>{}</kiln:prompt>", "&amp;".repeat(100_000));
    let mut comment = [&b"MM\0*\0\0\0\x08\0\x01\x87\x69\0\x04\0\0\0\x01\0\0\0\x1a"[..], &[0; 4], &[0xFF; 2], &[0; 4]].concat();
    comment.resize(12 * 65_536 + 64, 0);
    let itxt = |key: &str, kind: [u8; 2], text: &[u8]| [key.as_bytes(), b"\0", &kind, b"\0\0", text].concat();
    let bomb = compressed(large.as_bytes());
    let mut files: Vec<(&str, Vec<u8>, &str)> = vec![
        ("bomb", png(&[(b"zTXt", [b"prompt\0\0", &bomb[..]].concat())]), "`prompt` is left out"),
        ("second bomb", png(&[(b"iTXt", itxt("prompt", [1, 0], &bomb))]), "`prompt` is left out"),
        ("cut", png(&[(b"zTXt", [b"prompt\0\0", &bomb[..20]].concat())]), "`prompt` is damaged"),
        ("long", png(&[text_chunk("prompt", &large)]), "`prompt` is left out"),
        ("long XMP", png(&[(b"iTXt", itxt("XML:com.adobe.xmp", [0, 0], large.as_bytes()))]), "`XMP` is left out"),
        ("long XMP in WebP", webp(b"XMP ", large.as_bytes()), "`XMP` is left out"),
        ("wrong XMP", webp(b"XMP ", b"<kiln:a>\xFF"), "XMP is damaged"),
        ("properties", webp(b"XMP ", &properties.as_bytes()[..500_000]), "there are more than 100 texts"),
        ("entities", webp(b"XMP ", entities.as_bytes()), ""),
        ("entries", webp(b"EXIF", &comment), ""),
        ("wrong Exif", webp(b"EXIF", b"nonsense"), "Exif is damaged"),
        ("no key", png(&[(b"tEXt", b"prompt".to_vec())]), "a tEXt chunk is damaged"),
        ("empty key", png(&[(b"tEXt", b"\0prompt".to_vec())]), "a tEXt chunk is damaged"),
        ("long key", png(&[text_chunk(&"k".repeat(80), "x")]), "a tEXt chunk is damaged"),
        ("short iTXt", png(&[(b"iTXt", b"prompt\0\0\0x".to_vec())]), "an iTXt chunk is damaged"),
        ("twice", png(&[text_chunk("prompt", "first"), text_chunk("prompt", "second")]), "`prompt` is there twice"),
        ("many", png(&vec![text_chunk("a", ""); 50_000]), "there are more than 100 texts"),
    ];
    let keys: Vec<_> = (0..1000).map(|i| text_chunk(&format!("k{i}"), &"x".repeat(10_000))).collect();
    files.push(("many keys", png(&keys), "` is left out: all text together may have 512 KiB"));
    files.extend(hostile_json().iter().map(|(key, json)| ("JSON", png(&[text_chunk(key, json)]), "")));
    for (what, file, note) in &files {
        let read = || {
            let text = StoredText::of_file(file, Path::new("x.png")).unwrap();
            let maker = Maker::of(&text);
            (text.notes().to_vec(), text.metadata(), maker, text.get("prompt").map(str::len))
        };
        let ((notes, metadata, maker, prompt), memory) = peak_of(read);
        assert!(memory < MEMORY, "{what}: {memory} bytes");
        assert!(
            note.is_empty() == notes.is_empty() && notes.iter().any(|found| found.contains(note)) != note.is_empty(),
            "{what}: {notes:?}"
        );
        assert!(notes.len() <= 20, "{what}: {} notes", notes.len());
        assert!(!matches!(metadata, Some(Ok(_))), "{what}");
        let time = time_of(|| drop(std::hint::black_box(read())));
        println!("{what}: {memory} bytes, {time:?}, {maker:?}");
        assert!(time < TIME, "{what}: {time:?}");
        if *what == "twice" {
            assert_eq!(prompt, Some("first".len()));
        }
    }
}
