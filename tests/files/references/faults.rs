//! Damaged, hostile and unsupported files: each is refused with a specific message, and none panics or takes long.

use super::{Chunk, decode, fixture, fixtures, jpeg_claiming, layouts, png, png_header, refusal};
use common::cost::allocated_by;
use common::random::{Random, cases, long, one_in};
use kiln::edit::Mask;
use kiln::image::Image;
use kiln::internals::reference::{AREA_CAP, DecodedReference};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

#[test]
fn a_file_cut_anywhere_is_refused() {
    let mut cuts = 0;
    for name in [
        "baseline_420.jpg",
        "progressive_420.jpg",
        "restarts.jpg",
        "cmyk.jpg",
        "palette.png",
        "interlaced.png",
        "lossless.webp",
        "lossy.webp",
        "lossy_alpha.webp",
    ] {
        let whole = fixture(name);
        decode(&whole).unwrap_or_else(|error| panic!("{name} is whole: {error}"));
        for length in 0..whole.len() {
            assert!(decode(&whole[..length]).is_err(), "{name} cut to {length} of {} bytes", whole.len());
        }
        cuts += whole.len();
    }
    assert!(cuts >= 1000, "{cuts}");
}

#[test]
fn an_end_mark_does_not_make_half_an_image_whole() {
    for name in ["baseline_420.jpg", "baseline_444.jpg", "grey.jpg", "restarts.jpg", "cmyk.jpg", "progressive_420.jpg"] {
        let whole = fixture(name);
        decode(&whole).unwrap();
        for length in one_in(16, name, 2..whole.len() - 2) {
            let cut = [&whole[..length], &[0xFF, 0xD9]].concat();
            assert!(decode(&cut).is_err(), "{name} cut to {length} of {} bytes", whole.len());
        }
    }
}

#[test]
fn every_byte_of_a_png_is_covered_by_a_checksum() {
    let whole = fixture("palette_transparent.png");
    for at in 0..whole.len() {
        let mut bad = whole.clone();
        bad[at] ^= 0x10;
        assert!(decode(&bad).is_err(), "byte {at}");
    }
    let mut bad = whole;
    let at = bad.windows(4).position(|w| w == b"tRNS").unwrap() + 5;
    bad[at] ^= 1;
    assert_eq!(refusal(&bad), "damaged image (x): the checksum of its chunk `tRNS` is wrong");
}

/// A PNG with the right checksum of every complete chunk.
fn with_right_checksums(mut bytes: Vec<u8>) -> Vec<u8> {
    let mut at = 8;
    while let Some(length) = bytes.get(at..at + 4) {
        let end = at + 8 + u32::from_be_bytes(length.try_into().unwrap()) as usize;
        let Some(body) = bytes.get(at + 4..end) else { break };
        let mut crc = flate2::Crc::new();
        crc.update(body);
        let Some(place) = bytes.get_mut(end..end + 4) else { break };
        place.copy_from_slice(&crc.sum().to_be_bytes());
        at = end + 4;
    }
    bytes
}

/// Changes, removes, doubles or swaps a few bytes.
fn mutated(original: &[u8], random: &mut Random) -> Vec<u8> {
    let mut out = original.to_vec();
    let mut draw = |limit: usize| random.below(limit.max(1));
    for _ in 0..1 + draw(6) {
        let at = draw(out.len());
        match draw(8) {
            0 => out[at] = 0xFF,
            1 => out[at] = 0,
            2 => out[at] = out[at].wrapping_add(1),
            3 => out[at] ^= 1 << draw(8),
            4 => drop(out.drain(at..(at + 1 + draw(8)).min(out.len()))),
            5 => drop(
                out.splice(at..at, original[at.min(original.len())..].iter().copied().take(1 + draw(16)).collect::<Vec<_>>()),
            ),
            6 => {
                let to = draw(out.len());
                out.swap(at, to);
            }
            _ => out[at] = draw(256) as u8,
        }
        if out.is_empty() {
            break;
        }
    }
    out
}

#[test]
fn mutated_files_neither_panic_nor_take_long() {
    /// The most bytes that decoding a file may allocate in total.
    const ALLOCATED: usize = 8 << 20;
    const LIMIT: Duration = Duration::from_millis(100);
    let mut originals: Vec<Vec<u8>> = [
        "baseline_420.jpg",
        "baseline_422.jpg",
        "progressive_420.jpg",
        "progressive_444.jpg",
        "grey.jpg",
        "cmyk.jpg",
        "ycck.jpg",
        "restarts.jpg",
        "orientation_6.jpg",
        "palette_4.png",
        "grey_16.png",
        "grey_alpha_8.png",
        "rgba_16.png",
        "grey_1.png",
        "interlaced_grey_16.png",
        "palette_transparent.png",
        "animated.png",
        "orientation_late.png",
    ]
    .map(fixture)
    .into();
    originals.extend(
        ["420.apart", "unlike_chroma.deep", "440.restarts", "ycck.spectral", "dense_cb.luma_first", "ninth.successive"]
            .map(|name| layouts::layout(name).jpeg),
    );
    let (accepted, damaged) = (AtomicUsize::new(0), AtomicUsize::new(0));
    cases("mutated images", 5_000, 1_000_000, |random| {
        let original = &originals[random.below(originals.len())];
        let bytes = mutated(original, random);
        // Without correct checksums, nearly all files would be refused by a checksum.
        let right = bytes.starts_with(b"\x89PNG") && random.below(8) > 0;
        let bytes = if right { with_right_checksums(bytes) } else { bytes };
        let (result, allocated) = allocated_by(|| decode(&bytes));
        assert!(allocated <= ALLOCATED, "{allocated} bytes");
        // For an otherwise idle machine, where a slow file is slow every time.
        let time = || {
            let start = Instant::now();
            drop(decode(&bytes));
            start.elapsed()
        };
        assert!(!long() || (0..4).any(|_| time() <= LIMIT), "more than {LIMIT:?}");
        match result {
            Ok(_) => {
                accepted.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => {
                assert!(!error.to_string().contains("the decoder gave up"), "a decoder panics: {error}");
                assert_eq!(error.exit_code(), 3, "{error}");
                damaged.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    // Both outcomes occur.
    let (accepted, damaged) = (accepted.into_inner(), damaged.into_inner());
    let count = accepted + damaged;
    assert!(accepted > count / 50 && damaged > count / 5, "{accepted} accepted, {damaged} refused");
}

/// Behind the headers, whose sizes decide how much is allocated.
#[test]
fn mutated_webp_files_do_not_panic() {
    const HEADERS: usize = 40;
    let originals = ["lossless.webp", "lossless_alpha.webp", "lossy.webp", "lossy_coarse.webp", "lossy_alpha.webp"].map(fixture);
    let refused = AtomicUsize::new(0);
    cases("mutated WebP images", 600, 200_000, |random| {
        let original = &originals[random.below(originals.len())];
        let mut bytes = original.clone();
        for _ in 0..1 + random.below(4) {
            let at = HEADERS + random.below(bytes.len() - HEADERS);
            bytes[at] ^= 1 << random.below(8);
        }
        let (outcomes, allocated) = allocated_by(|| (decode(&bytes), Mask::from_bytes(&bytes, Path::new("x"))));
        // A few bits can stand for a code with a table of thousands of entries.
        assert!(allocated <= 32 << 20, "{allocated} bytes");
        if let Err(error) = outcomes.0 {
            assert!(error.exit_code() == 3 && !error.to_string().contains("gave up"), "{error}");
            refused.fetch_add(1, Ordering::Relaxed);
        }
    });
    assert!(refused.into_inner() > 0);
}

#[test]
fn webp_files_that_make_no_sense_are_named() {
    let chunk = |name: &[u8; 4], data: &[u8]| [name, &(data.len() as u32).to_le_bytes()[..], data].concat();
    let riff = |chunks: &[Vec<u8>]| {
        let body = chunks.concat();
        [b"RIFF", &(4 + body.len() as u32).to_le_bytes()[..], b"WEBP", &body].concat()
    };
    let lossless = |width: u32, height: u32, length: usize| {
        let bits = ((width - 1) | ((height - 1) << 14)).to_le_bytes();
        chunk(b"VP8L", &[&[0x2F][..], &bits, &vec![0; length]].concat())
    };
    let lossy = |width: u16, height: u16| {
        let [w, h] = [width, height].map(u16::to_le_bytes);
        chunk(b"VP8 ", &[0x10, 0, 0, 0x9D, 0x01, 0x2A, w[0], w[1], h[0], h[1]])
    };
    let canvas = |flags: u8, width: u32, height: u32| {
        let [w, h] = [width - 1, height - 1].map(u32::to_le_bytes);
        chunk(b"VP8X", &[flags, 0, 0, 0, w[0], w[1], w[2], h[0], h[1], h[2]])
    };
    let moving = "content is an animated WebP, and only still images are read";
    let cases: [(&str, Vec<u8>, &str); 12] = [
        ("no image", riff(&[]), "it has no image data"),
        ("only metadata", riff(&[chunk(b"EXIF", b"II*\0")]), "it has no image data"),
        ("two images", riff(&[lossless(64, 64, 1), lossy(64, 64)]), "it has two images"),
        ("animated", riff(&[canvas(2, 64, 64), lossless(64, 64, 9)]), moving),
        ("frames", riff(&[chunk(b"ANMF", &[0; 24])]), moving),
        ("sizes differ", riff(&[canvas(0, 64, 65), lossless(64, 64, 1)]), "its headers disagree about its size"),
        (
            "a bomb",
            riff(&[lossless(9_000, 9_000, 100)]),
            "its header says 9000x9000 pixels, its 105 bytes of image data cannot hold them",
        ),
        (
            "a lossy bomb",
            riff(&[lossy(9_000, 9_000)]),
            "its header says 9000x9000 pixels, its 10 bytes of image data cannot hold them",
        ),
        ("too large", riff(&[lossless(16_384, 16_384, 100)]), "16384x16384 = 268 MP, limit 100 MP"),
        ("nothing wide", riff(&[lossy(0, 64)]), "its header says 0x64 pixels"),
        ("no signature", riff(&[chunk(b"VP8L", &[0; 9])]), "its lossless image data has no signature"),
        ("a chunk beyond the end", riff(&[b"VP8L\xFF\xFF\xFF\xFF".to_vec()]), "a chunk ends early"),
    ];
    for (what, bytes, detail) in cases {
        let (message, allocated) = allocated_by(|| refusal(&bytes));
        assert!(message.contains(detail), "{what}: {message}");
        assert!(allocated <= 1 << 20, "{what}: {allocated} bytes");
    }
}

#[test]
fn what_is_not_an_image_is_named() {
    let folder = std::env::temp_dir().join(format!("kiln-references-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let cases: [(&str, &[u8], &str); 4] = [
        ("me.png", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "content is HEIC, not PNG"),
        ("me.jpg", b"GIF89a", "content is GIF, not JPEG"),
        ("me.jpeg", b"a note, saved under a wrong name", "content is text, not JPEG"),
        ("me", b"", "the file is empty"),
    ];
    for (name, bytes, detail) in cases {
        let path = folder.join(name);
        std::fs::File::create(&path).unwrap().write_all(bytes).unwrap();
        let error = DecodedReference::open(&path).unwrap_err();
        assert_eq!(error.to_string(), format!("cannot read image ({}): {detail}", path.display()));
        assert_eq!((error.exit_code(), error.hint().as_deref()), (3, Some("convert to PNG, JPEG or WebP")));
    }
    let error = DecodedReference::open(&folder).unwrap_err();
    // A folder cannot be converted, so there is no hint.
    assert!(error.to_string().ends_with("it is a folder") && error.hint().is_none(), "{error}");
    let error = DecodedReference::open(&folder.join("none.png")).unwrap_err();
    assert!(error.to_string().starts_with("cannot read ("), "{error}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[cfg(unix)]
#[test]
fn special_files_do_not_block() {
    let error = DecodedReference::open(Path::new("/dev/zero")).unwrap_err();
    assert_eq!(error.to_string(), "cannot read image (/dev/zero): it is not a regular file");
}

#[test]
fn sizes_the_model_does_not_take_are_refused_by_name() {
    let limits = "sides must be at least 64 and the ratio at most 8:1";
    for (width, height) in [(1, 1), (1, 8000), (8000, 1), (63, 63), (63, 64), (64, 63), (8192, 16), (64, 513), (513, 64)] {
        let image = Image { width, height, pixels: vec![0; width * height * 3] };
        let message = refusal(&image.encode_png(&[]).unwrap());
        assert_eq!(message, format!("image too small or too narrow (x): {width}x{height}; {limits}"));
    }
    for (width, height) in [(64, 64), (64, 512), (512, 64), (65, 66)] {
        let image = Image { width, height, pixels: vec![9; width * height * 3] };
        let prepared = decode(&image.encode_png(&[]).unwrap()).unwrap().prepare(AREA_CAP);
        assert_eq!((prepared.width, prepared.height), (width / 16 * 16, height / 16 * 16));
    }
    let jpeg = fixture("grey.jpg");
    assert!(refusal(&jpeg_claiming(&jpeg, 63, 72)).starts_with("image too small or too narrow (x): 63x72; "));
    assert!(refusal(&jpeg_claiming(&jpeg, 67, 0)).starts_with("damaged image (x): "));
}

#[test]
fn rare_kinds_and_broken_structure_are_named() {
    let jpeg = fixture("baseline_444.jpg");
    let frame = jpeg.windows(2).position(|w| w == [0xFF, 0xC0]).unwrap();
    let changed = |at: usize, to: u8| {
        let mut out = jpeg.clone();
        out[at] = to;
        refusal(&out)
    };
    assert!(changed(frame + 1, 0xC9).starts_with("cannot read image (x): content is a rare kind of JPEG"));
    assert_eq!(changed(frame + 4, 12), "cannot read image (x): content is a JPEG of 12 bits a sample, not 8");
    assert!(changed(frame + 11, 0x51).ends_with("impossible sampling factors"));
    let frame_segment = &jpeg[frame..frame + 19];
    let twice = [&jpeg[..frame], frame_segment, &jpeg[frame..]].concat();
    assert_eq!(refusal(&twice), "damaged image (x): it has two headers");
    assert_eq!(refusal(&[&jpeg[..frame], &[0xFF, 0xD9]].concat()), "damaged image (x): it has no image data");

    let fields = png_header(64, 64);
    let [header, data, note, end]: [Chunk<'_>; 4] = [(b"IHDR", &fields), (b"IDAT", b"xx"), (b"noTe", b""), (b"IEND", b"")];
    for (chunks, message) in [
        (&[data, end][..], "it does not begin with a header"),
        (&[header, data, note, data, end], "its image data is interrupted"),
        (&[header, (b"NoTe", b""), data, end], "its chunk `NoTe` is unknown"),
        (&[(b"IHDR", b"short"), data, end], "its header has the wrong length"),
        (&[header, header, data, end], "it has two headers"),
        (&[header, data], "the file ends after 47 bytes, before the image does"),
        (&[header, end], "its header says 64x64 pixels, its 0 bytes of image data cannot hold them"),
    ] {
        assert_eq!(refusal(&png(chunks)), format!("damaged image (x): {message}"));
    }
    // A transfer in text mode changes line ends, which the signature shows.
    let text_mode = [b"\x89PNG\n\x1A\n", &png(&[header, data, end])[8..]].concat();
    assert_eq!(refusal(&text_mode), "damaged image (x): its signature was altered on the way");
}

#[test]
fn fixtures_are_all_tried() {
    // Every fixture is used by a test.
    let listed = std::fs::read_to_string(fixtures().join("references.json")).unwrap();
    for entry in std::fs::read_dir(fixtures().join("references")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(listed.contains(&format!("\"{name}\"")), "{name}");
    }
}

#[test]
#[should_panic(expected = "planted")]
fn a_panic_in_one_case_of_many_is_noticed() {
    // The control of the mutations above. It prints nothing, because that would look like a failure.
    // One case in 500: the chance that none of 20,000 is hit is 4e-18, for any seed.
    cases("planted", 20_000, 20_000, |random| {
        if random.below(500) == 0 {
            std::panic::resume_unwind(Box::new("planted"));
        }
    });
}
