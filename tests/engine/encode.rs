//! Encoded image files: correct, small, and independent of the number of threads.

use common::photo_like::{KINDS, photo_like};
use common::sandbox::{Png, QUICK, Sandbox};
use kiln::image::{Format, Image, Threads};
use kiln::internals::reference::DecodedReference;
use std::fs;
use std::io::{BufRead, BufReader, Cursor};
use std::path::Path;

const FORMATS: [Format; 3] = [Format::Png, Format::Jpeg { quality: 90 }, Format::WebP];

fn jpeg_pixels(bytes: &[u8]) -> Vec<u8> {
    DecodedReference::from_bytes(bytes, Path::new("x.jpg")).unwrap().image().pixels.clone()
}

/// Peak signal-to-noise ratio in dB.
fn psnr(a: &[u8], b: &[u8]) -> f64 {
    assert_eq!(a.len(), b.len());
    let squares: f64 = a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
    10.0 * (255.0 * 255.0 * a.len() as f64 / squares.max(1e-9)).log10()
}

#[test]
fn the_number_of_threads_changes_no_byte() {
    let text = [("prompt", "a fox".to_owned())];
    for image in [photo_like("portrait", 301, 203), photo_like("text", 640, 480)] {
        for format in FORMATS {
            let one = image.encode(format, &text, Threads::One).unwrap();
            for threads in [1, 2, 3, 8] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let many = pool.install(|| image.encode(format, &text, Threads::All).unwrap());
                assert!(one == many, "{format:?} on {threads} threads");
            }
        }
    }
}

#[test]
fn pngs_of_every_size_and_kind_read_back() {
    for kind in KINDS {
        for (width, height) in [(1, 1), (1, 300), (2, 2), (300, 1), (97, 131), (17_000, 3)] {
            let image = photo_like(kind, width, height);
            assert!(Png::decode(&image.encode_png(&[]).unwrap()).pixels == image.pixels, "{kind} {width}x{height}");
        }
    }
    let mut state = 1u32;
    let noise = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    });
    let image = Image { width: 200, height: 300, pixels: noise.take(3 * 200 * 300).collect() };
    let bytes = image.encode_png(&[]).unwrap();
    assert!(Png::decode(&bytes).pixels == image.pixels);
    assert!((bytes.len() as u64) < Format::Png.max_bytes(200, 300), "{}", bytes.len());
}

/// Compares sizes with libpng 1.6.39 at its default level, 6, with all filters (`tools/check_encoding.py`).
#[test]
fn pngs_of_photographs_are_as_small_as_those_of_libpng() {
    for (kind, libpng) in LIBPNG {
        let bytes = photo_like(kind, 512, 512).encode_png(&[]).unwrap().len();
        let ratio = bytes as f64 / libpng as f64;
        assert!(ratio <= 1.08, "{kind}: {bytes} bytes, {ratio:.3} of libpng's");
    }
}

/// Sizes of libpng's files of 512x512 pixels, in bytes.
const LIBPNG: [(&str, usize); 4] = [("noise", 219_837), ("portrait", 276_105), ("gradient", 170_983), ("text", 294_990)];

/// IDAT chunks of at most about 64 KiB form one zlib stream, so a reader that knows nothing of strips sees no strips.
#[test]
fn strips_are_chunks_of_one_stream() {
    let image = photo_like("noise", 512, 300);
    let bytes = image.encode_png(&[]).unwrap();
    let (mut at, mut stream, mut chunks) = (8, Vec::new(), 0);
    while at < bytes.len() {
        let length = u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        if &bytes[at + 4..at + 8] == b"IDAT" {
            assert!(length <= 64 << 10, "{length}");
            stream.extend_from_slice(&bytes[at + 8..at + 8 + length]);
            chunks += 1;
        }
        at += 12 + length;
    }
    // 512 pixels are 1537 bytes per row, 32 rows per strip, and the stream's checksum is a chunk.
    assert_eq!(chunks, 300usize.div_ceil(32) + 1);
    let mut rows = Vec::new();
    std::io::Read::read_to_end(&mut flate2::read::ZlibDecoder::new(&stream[..]), &mut rows).unwrap();
    assert_eq!(rows.len(), 300 * 1537);
}

#[test]
fn jpegs_read_back_as_well_as_their_quality_says() {
    for (kind, width, height) in
        [("portrait", 96, 64), ("noise", 129, 75), ("text", 71, 203), ("gradient", 64, 64), ("flat", 88, 66)]
    {
        let image = photo_like(kind, width, height);
        let mut last = (0, 0.0);
        for (quality, least) in [(10, 20.0), (50, 25.0), (75, 28.0), (95, 36.0), (100, 45.0)] {
            let bytes = image.encode(Format::Jpeg { quality }, &[], Threads::All).unwrap();
            let ratio = psnr(&jpeg_pixels(&bytes), &image.pixels);
            assert!(ratio > least && ratio > last.1, "{kind} at {quality}: {ratio:.1} dB, {:.1} before", last.1);
            assert!(bytes.len() > last.0, "{kind} at {quality}: {} bytes, {} before", bytes.len(), last.0);
            last = (bytes.len(), ratio);
        }
    }
    // Extreme values of every coefficient: black and white pixels, alternating and at random.
    for pixel in [
        |x: usize, y: usize| (x + y).is_multiple_of(2),
        |x: usize, _| x.is_multiple_of(2),
        |x, y| (x * x + 7 * y * y + x * y * 13) % 11 < 5,
    ] {
        let pixels = (0..80 * 80).flat_map(|i| [if pixel(i % 80, i / 80) { 255 } else { 0 }; 3]).collect();
        let image = Image { width: 80, height: 80, pixels };
        let bytes = image.encode(Format::Jpeg { quality: 100 }, &[], Threads::All).unwrap();
        assert!(psnr(&jpeg_pixels(&bytes), &image.pixels) > 45.0);
        assert!((bytes.len() as u64) < Format::Jpeg { quality: 100 }.max_bytes(80, 80));
    }
}

/// A prompt that looks like XMP stays text in the metadata, and does not rotate the image.
#[test]
fn text_is_not_taken_for_properties() {
    let image = photo_like("gradient", 96, 64);
    let text = [("prompt", "<x tiff:Orientation=\"6\"/> <tiff:Orientation>6</tiff:Orientation> tiff:Orientation>6".to_owned())];
    let bytes = image.encode(Format::Jpeg { quality: 95 }, &text, Threads::All).unwrap();
    assert!(bytes.windows(13).any(|part| part == b"<kiln:prompt>"));
    let read = DecodedReference::from_bytes(&bytes, Path::new("x.jpg")).unwrap();
    assert_eq!((read.image().width, read.image().height), (96, 64));
}

#[test]
fn the_format_is_that_of_the_flag_or_of_the_name() {
    let sandbox = Sandbox::new();
    let kind = |name: &str| {
        let bytes = fs::read(sandbox.path(name)).unwrap();
        match &bytes[..4] {
            b"\x89PNG" => "png",
            [0xFF, 0xD8, 0xFF, 0xE0] => "jpeg",
            b"RIFF" => "webp",
            other => panic!("{other:?}"),
        }
    };
    for (flags, name, format) in [
        (&[][..], "x-7.png", "png"),
        (&["--format", "jpeg"], "x-7.jpg", "jpeg"),
        (&["-o", "a.JPEG", "--quality", "50"], "a.JPEG", "jpeg"),
        (&["-o", "a", "--format", "webp"], "a", "webp"),
    ] {
        let run = sandbox.quick(&[&["x", "-q", "--seed", "7"], flags].concat());
        assert_eq!((run.text(), kind(name)), (&*format!("{name}\n"), format), "{flags:?}");
    }
    // All files have the same metadata but for the quality, and both lossless ones the same pixels. In tests/cli is what XML escapes, and
    // what is Exif.
    for name in ["x-7.jpg", "a"] {
        let bytes = fs::read(sandbox.path(name)).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        let all = Png::read(&sandbox.path("x-7.png")).text;
        for (key, value) in all.iter().filter(|(key, _)| !["kiln", "parameters"].contains(&key.as_str())) {
            assert!(text.contains(&format!("<kiln:{key}>{value}</kiln:{key}>")), "{name} has no {key}");
        }
    }
    let webp = fs::read(sandbox.path("a")).unwrap();
    let mut decoder = image_webp::WebPDecoder::new(Cursor::new(webp)).unwrap();
    let mut pixels = vec![0; decoder.output_buffer_size().unwrap()];
    decoder.read_image(&mut pixels).unwrap();
    assert!(pixels == Png::read(&sandbox.path("x-7.png")).pixels);
    assert!(psnr(&jpeg_pixels(&fs::read(sandbox.path("x-7.jpg")).unwrap()), &pixels) > 30.0);
    assert!(fs::metadata(sandbox.path("a.JPEG")).unwrap().len() < fs::metadata(sandbox.path("x-7.jpg")).unwrap().len());
    // On standard output the flag decides the format.
    let stdout = sandbox.quick(&["x", "-q", "--seed", "7", "-o", "-", "--format", "jpeg"]).stdout;
    assert!(stdout == fs::read(sandbox.path("x-7.jpg")).unwrap());
}

/// Text that does not fit into a JPEG is refused before anything is computed.
#[test]
fn a_prompt_that_a_jpeg_cannot_hold_is_refused() {
    let sandbox = Sandbox::new();
    let prompt = "<".repeat(20_000);
    fs::write(sandbox.path("prompt.txt"), &prompt).unwrap();
    let run = sandbox.run(["--prompt-file", "prompt.txt", "-o", "x.jpg"].iter().chain(&QUICK));
    assert_eq!((run.code, sandbox.names()), (Some(2), vec!["prompt.txt".into()]), "{}", run.stderr);
    assert!(run.stderr.contains("error: the prompts are too long for the metadata of a JPEG: 16"), "{}", run.stderr);
    assert!(
        run.stderr.ends_with("hint: shorten them, store less metadata, or write a PNG or WebP\n")
            && !run.stderr.contains("denoising")
    );
}

/// Images written in parallel with the next image equal images written alone.
#[test]
fn the_count_and_the_threads_change_no_byte() {
    let sandbox = Sandbox::new();
    let run = sandbox.quick(&["x", "-q", "--seed", "7", "--count", "3", "-o", "many.png"]);
    assert_eq!(run.text(), "many-1.png\nmany-2.png\nmany-3.png\n");
    sandbox.quick(&["x", "-q", "--seed", "7", "--count", "2", "-o", "few.png", "--threads", "1"]);
    sandbox.quick(&["x", "-q", "--seed", "8", "-o", "alone.png"]);
    let bytes = |name: &str| fs::read(sandbox.path(name)).unwrap();
    assert!(bytes("many-1.png") == bytes("few-1.png"));
    assert!(bytes("many-2.png") == bytes("few-2.png"));
    assert!(bytes("many-2.png") == bytes("alone.png"));
}

/// An image that cannot be written ends the run. Only the images before it stay.
#[test]
fn a_failed_write_stops_the_run() {
    // An image that another thread writes, and the last image.
    for (last, count) in [(3, "4"), (3, "3")] {
        let sandbox = Sandbox::new();
        let args = ["x", "-q", "--seed", "7", "--count", count, "-o", "out.png"];
        let mut child = sandbox.command(args.iter().chain(&QUICK)).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "out-1.png");
        // The second image is being computed now. The file of a later image appears.
        fs::write(sandbox.path(&format!("out-{last}.png")), "mine").unwrap();
        let rest: Vec<String> = lines.map_while(Result::ok).collect();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(5), "{stderr}");
        assert!(stderr.starts_with(&format!("error: output exists (out-{last}.png); not overwritten\n")), "{stderr}");
        let names: Vec<String> = (1..=last).map(|index| format!("out-{index}.png")).collect();
        assert_eq!(rest, names[1..last - 1]);
        assert_eq!(sandbox.names(), names);
        assert_eq!(fs::read(sandbox.path(&names[last - 1])).unwrap(), b"mine");
        names[..last - 1].iter().for_each(|name| assert_eq!(Png::read(&sandbox.path(name)).width, 64));
    }
}
