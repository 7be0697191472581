//! Faults in quantized files: each is refused with a message that names the tensor and a hint that says what to do.

use super::message;
use super::written::Written;
use common::ops::formats::tiled;
use kiln::error::Result;
use kiln::internals::checkpoint::Weights;
use kiln::internals::component::Component;
use kiln::internals::config::supported;
use kiln::internals::names::TensorSpec;
use kiln::internals::tensor::Nvfp4Layout;

const LAYER: &str = "double_blocks.0.img_attn.proj";
const FP8: &str = r#"{"format": "float8_e4m3fn"}"#;
const NVFP4: &str = r#"{"format": "nvfp4"}"#;
const SIZE: [usize; 2] = [144, 80];
const DAMAGED: &str = "the file is damaged, or quantized in a nonstandard way; download it again, or use another one";
const ORDER: &str = "if the file stores NVFP4 in another order, name it with --nvfp4-layout";

fn name(suffix: &str) -> String {
    format!("{LAYER}.{suffix}")
}

/// The weight of the layer.
pub fn spec() -> TensorSpec {
    TensorSpec::new(name("weight"), &SIZE)
}

/// A file with one FP8 layer.
pub fn fp8() -> Written {
    let mut file = Written::default();
    file.declare(&[(LAYER, FP8)]);
    file.add(&name("weight"), "F8_E4M3", &SIZE, vec![0x38; SIZE[0] * SIZE[1]]);
    file.scale(&name("weight_scale"), 0.5);
    file.scale(&name("input_scale"), 0.5);
    file
}

/// A file with one NVFP4 layer, whose block scales have padding in both directions.
pub fn nvfp4() -> Written {
    let mut file = Written::default();
    file.declare(&[(LAYER, NVFP4)]);
    let mut scales = vec![0; 256 * 8];
    (0..SIZE[0] * 5).for_each(|i| scales[at(i / 5, i % 5)] = 0x38);
    file.nvfp4(LAYER, SIZE, &vec![0x2a; SIZE[0] * SIZE[1] / 2], &scales, 0.5);
    file.scale(&name("input_scale"), 0.5);
    file
}

/// The byte position of a block's scale.
fn at(row: usize, block: usize) -> usize {
    tiled(row, block, SIZE[1] / 16)
}

/// Runs all checks of the layer.
fn load(weights: &Weights) -> Result<()> {
    weights.weight(&spec())?;
    weights.check(&[spec()])?;
    weights.check_scales(&spec().name)
}

fn refused(file: &Written) -> String {
    message(&file.open(Component::Transformer).and_then(|weights| load(&weights)).unwrap_err())
}

/// Damages a valid file and checks that kiln refuses it with this message and hint.
fn check_hint(file: &Written, change: impl Fn(&mut Written), what: &str, hint: &str) {
    load(&file.open(Component::Transformer).unwrap()).unwrap();
    let mut file = file.clone();
    change(&mut file);
    assert_eq!(refused(&file), format!("{what} / {hint}"));
}

fn check(file: &Written, change: impl Fn(&mut Written), what: &str) {
    check_hint(file, change, what, DAMAGED);
}

/// Replaces a tensor of the layer.
fn replace(file: &mut Written, suffix: &str, element: &'static str, shape: &[usize], bytes: Vec<u8>) {
    *file.tensor(&name(suffix)) = ((name(suffix), element, shape.to_vec()), bytes);
}

fn invalid(detail: &str) -> String {
    format!("invalid quantization (x.safetensors): {detail}")
}

/// The message about a companion tensor of the weight.
fn tensor(suffix: &str, what: &str) -> String {
    invalid(&format!("tensor `{LAYER}.{suffix}` {what}"))
}

fn set(file: &mut Written, suffix: &str, value: f32) {
    file.tensor(&name(suffix)).1 = value.to_le_bytes().to_vec();
}

#[test]
fn single_scales_are_positive_and_finite() {
    for (file, suffixes) in [(fp8(), &["weight_scale", "input_scale"][..]), (nvfp4(), &["weight_scale_2", "input_scale"])] {
        for suffix in suffixes {
            for (value, shown) in
                [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf"), (0.0, "0"), (-0.0, "-0"), (-2.5, "-2.5")]
            {
                let what = tensor(suffix, &format!("is {shown}, a scale is positive and finite"));
                check(&file, |file| set(file, suffix, value), &what);
            }
            let single = if *suffix == "weight_scale" { "one scale, or one for each of 144 rows" } else { "a single scale" };
            let what = tensor(suffix, &format!("is [2], needed is {single}"));
            check(&file, |file| replace(file, suffix, "F32", &[2], vec![0; 8]), &what);
            check(&file, |file| replace(file, suffix, "I16", &[], vec![1; 2]), &tensor(suffix, "is I16, needed is F32"));
        }
    }
}

#[test]
fn scales_of_rows_are_positive_and_finite() {
    let mut file = fp8();
    let rows: Vec<u8> = 0.5_f32.to_le_bytes().repeat(SIZE[0]);
    replace(&mut file, "weight_scale", "F32", &[SIZE[0], 1], rows);
    for (value, shown) in [(f32::NAN, "NaN"), (0.0, "0"), (-1.0, "-1"), (f32::INFINITY, "inf")] {
        let put =
            |file: &mut Written| file.tensor(&name("weight_scale")).1[4 * 7..][..4].copy_from_slice(&f32::to_le_bytes(value));
        let what = format!("is {shown} in row 7, a scale is positive and finite");
        check(&file, put, &tensor("weight_scale", &what));
    }
    let narrow = |file: &mut Written| replace(file, "weight_scale", "BF16", &[SIZE[0]], vec![1; 288]);
    check(&file, narrow, &tensor("weight_scale", "is BF16, needed is F32"));
}

/// For any scale, either the file is refused, or the largest elements times the largest block scale are finite.
#[test]
fn scales_so_large_that_values_overflow_are_refused() {
    let (mut fp8, mut nvfp4) = (fp8(), nvfp4());
    fp8.tensor(&name("weight")).1.fill(0x7e);
    nvfp4.tensor(&name("weight")).1.fill(0x7f);
    nvfp4.tensor(&name("weight_scale")).1.iter_mut().filter(|scale| **scale != 0).for_each(|scale| *scale = 0x7e);
    let mut rows = fp8.clone();
    replace(&mut rows, "weight_scale", "F32", &[SIZE[0]], 0.5_f32.to_le_bytes().repeat(SIZE[0]));
    for (file, suffix, place) in [(fp8, "weight_scale", ""), (rows, "weight_scale", " in row 0"), (nvfp4, "weight_scale_2", "")] {
        let accepted = |scale: f32| {
            let mut file = file.clone();
            file.tensor(&name(suffix)).1[..4].copy_from_slice(&scale.to_le_bytes());
            let weights = file.open(Component::Transformer).unwrap();
            match load(&weights) {
                Ok(()) => {
                    let (weight, mut row) = (weights.weight(&spec()).unwrap(), vec![0.0; SIZE[1]]);
                    weight.parts[0].decode(0, &mut row);
                    assert!(row.iter().all(|value| value.is_finite() && *value != 0.0), "{suffix} {scale}: {row:?}");
                    true
                }
                Err(error) => {
                    let what = tensor(suffix, &format!("is {scale}{place}, too large for a scale"));
                    assert_eq!(message(&error), format!("{what} / {DAMAGED}"));
                    false
                }
            }
        };
        let powers = (0..128).map(|power| 2_f32.powi(power)).filter(|&scale| accepted(scale)).count();
        assert!(powers > 20, "{suffix}: {powers}");
        assert!([f32::MAX, f32::MAX / 6.0, f32::MAX / 448.0].iter().all(|&scale| !accepted(scale)), "{suffix}");
    }
}

/// Scales with which every value vanishes are refused. A row may be that close to zero, but not all of them.
#[test]
fn scales_so_small_that_values_vanish_are_refused() {
    for (file, suffix) in [(fp8(), "weight_scale"), (fp8(), "input_scale"), (nvfp4(), "weight_scale_2")] {
        let what = tensor(suffix, "is 1e-45, too small for a scale");
        check(&file, |file| set(file, suffix, 1e-45), &what);
        let what = tensor(suffix, "is 1000000000, too large for a scale");
        check(&file, |file| set(file, suffix, 1e9), &what);
    }
    let mut rows = fp8();
    let scales = [0.5_f32, 1e-45].map(f32::to_le_bytes).concat().repeat(SIZE[0] / 2);
    replace(&mut rows, "weight_scale", "F32", &[SIZE[0]], scales);
    let vanishing = |file: &mut Written| file.tensor(&name("weight_scale")).1 = 1e-30_f32.to_le_bytes().repeat(SIZE[0]);
    check(&rows, vanishing, &tensor("weight_scale", "is 1e-30 at most, too small for a scale"));
}

/// A file without declarations whose layer has lost its scale. It is read as FP8 without scales only if nothing contradicts that.
#[test]
fn a_weight_that_has_lost_its_scale_is_refused() {
    let mut file = fp8();
    file.metadata.clear();
    let lost = tensor("weight", "is FP8, but has no tensor with its scale");
    // The layer's input has a scale.
    check(&file, |file| file.remove(&name("weight_scale")), &lost);
    let bare = |file: &mut Written| {
        file.remove(&name("weight_scale"));
        file.remove(&name("input_scale"));
    };
    // Another layer has a scale.
    let mut two = file.clone();
    let other = "double_blocks.0.txt_attn.proj";
    two.add(&format!("{other}.weight"), "F8_E4M3", &SIZE, vec![0x38; SIZE[0] * SIZE[1]]);
    two.scale(&format!("{other}.weight_scale"), 0.5);
    let load_both = |file: &Written| {
        let weights = file.open(Component::Transformer)?;
        weights.weight(&spec())?;
        weights.check_scales(&spec().name)
    };
    load_both(&two).unwrap();
    bare(&mut two);
    assert_eq!(message(&load_both(&two).unwrap_err()), format!("{lost} / {DAMAGED}"));
    // No layer has a scale, and the elements are those of values that were scaled.
    bare(&mut file);
    load(&file.open(Component::Transformer).unwrap()).unwrap();
    for (dtype, largest, shown) in [("F8_E4M3", 0x7e, "448"), ("F8_E4M3", 0xfe, "448"), ("F8_E5M2", 0x7b, "57344")] {
        let scaled = |file: &mut Written| {
            let mut codes = vec![0x38; SIZE[0] * SIZE[1]];
            codes[4711] = largest;
            replace(file, "weight", dtype, &SIZE, codes);
        };
        let what = format!("is FP8 and has elements of {shown}, but no tensor with its scale");
        check(&file, scaled, &tensor("weight", &what));
    }
}

/// Replaces the weight by a BF16 weight.
fn in_bf16(file: &mut Written) {
    replace(file, "weight", "BF16", &SIZE, vec![0; 2 * SIZE[0] * SIZE[1]]);
}

#[test]
fn missing_and_superfluous_scales() {
    let (file, other) = (fp8(), "double_blocks.7.img_attn.proj");
    let plain = |file: &mut Written| {
        file.metadata.clear();
        in_bf16(file);
    };
    let scales = format!("tensor `{LAYER}.weight_scale` scales `{LAYER}.weight`, which is BF16");
    let absent = format!("tensor `{other}.input_scale` scales `{other}.weight`, which is not there");
    let extra = format!("is FP8 (E4M3), but has a scale `{LAYER}.weight_scale_2`");
    check(&file, |file| file.remove(&name("weight_scale")), &tensor("weight", "is FP8, but has no tensor with its scale"));
    check(&file, |file| file.scale(&name("weight_scale_2"), 1.0), &tensor("weight", &extra));
    check(&file, plain, &invalid(&scales));
    check(&file, |file| file.scale(&format!("{other}.input_scale"), 1.0), &invalid(&absent));
    for (suffix, what) in [("weight_scale", "block scales"), ("weight_scale_2", "the scale of the whole")] {
        let what = tensor("weight", &format!("is NVFP4, but has no tensor with {what}"));
        check(&nvfp4(), |file| file.remove(&name(suffix)), &what);
    }
    let mut file = fp8();
    file.scale(&name("scale_weight"), 1.0);
    let twice =
        format!("duplicate tensor (x.safetensors): `{LAYER}.scale_weight` and `{LAYER}.weight_scale` belong to one weight");
    assert_eq!(refused(&file), twice);
}

#[test]
fn declarations_that_do_not_fit() {
    let file = fp8();
    for (text, detail) in [
        ("{", "EOF while parsing an object at line 1 column 1"),
        ("{}", "missing field `layers` at line 1 column 2"),
        (r#"{"layers": 3}"#, "invalid type: integer `3`, expected an object at line 1 column 12"),
        (r#"{"layers": {"x": 3}}"#, "invalid type: integer `3`, expected struct Settings at line 1 column 18"),
        (r#"{"layers": {"x": {}, "x": {}}}"#, "`x` is there twice at line 1 column 29"),
    ] {
        let what = invalid(&format!("metadata `_quantization_metadata`: {detail}"));
        check(&file, |file| file.metadata = vec![("_quantization_metadata".into(), text.into())], &what);
    }
    let layout = "metadata `nvfp4_layout` is `tiled`, an unknown layout";
    check(&file, |file| file.note("nvfp4_layout", "tiled"), &invalid(layout));
    let elsewhere = "layer `double_blocks.9.img_attn.proj` is declared as FP8 (E4M3), but has no weight";
    for (from, to, what) in [
        (LAYER, "double_blocks.9.img_attn.proj", invalid(elsewhere)),
        ("e4m3fn", "e5m2", tensor("weight", "is F8_E4M3, but declared as FP8 (E5M2)")),
        ("float8_e4m3fn", "nvfp4", tensor("weight", "is F8_E4M3, but declared as NVFP4")),
    ] {
        check(&file, |file| file.metadata[0].1 = file.metadata[0].1.replace(from, to), &what);
    }
    let twice = invalid(&format!("layer `{LAYER}` is declared twice, with different settings"));
    for settings in [NVFP4, r#"{"format": "float8_e4m3fn", "full_precision_matrix_mult": true}"#] {
        check(&file, |file| file.settings(LAYER, settings), &twice);
    }
    for (text, detail) in [
        ("fp8", "expected ident at line 1 column 2"),
        ("", "EOF while parsing a value at line 1 column 0"),
        (&" ".repeat(5000), "settings of 5000 bytes, limit 4096"),
    ] {
        let settings = |file: &mut Written| {
            file.metadata.clear();
            file.settings(LAYER, text);
        };
        check(&file, settings, &invalid(&format!("tensor `{LAYER}.comfy_quant`: {detail}")));
    }
    check(&nvfp4(), in_bf16, &tensor("weight", "is BF16, but declared as NVFP4"));
    // A marker makes every layer with a scale an FP8 layer.
    let mut file = fp8();
    file.metadata.clear();
    file.add("scaled_fp8", "F8_E4M3", &[0], []);
    check(&file, in_bf16, &tensor("weight", "is BF16, but declared as FP8 (E4M3)"));
}

#[test]
fn shapes_that_do_not_fit() {
    let other = &format!("this file is incomplete or belongs to another model; kiln runs {}", supported());
    let weight = |rows, bytes| move |file: &mut Written| replace(file, "weight", "U8", &[rows, bytes], vec![0; rows * bytes]);
    // Rows and columns that a quantizer padded.
    for (rows, bytes, got) in [(160, 40, "[160, 80]"), (144, 48, "[144, 96]")] {
        let what = format!("wrong shape (x.safetensors): tensor `{LAYER}.weight` is {got}, this model needs [144, 80]");
        check_hint(&nvfp4(), weight(rows, bytes), &what, other);
    }
    let scales = |element: &'static str, rows: usize, blocks: usize| {
        let bytes = rows * blocks * if element == "F32" { 4 } else { 1 };
        move |file: &mut Written| replace(file, "weight_scale", element, &[rows, blocks], vec![0x38; bytes])
    };
    let fits = "a weight of 144 x 80 has block scales of [256, 8]";
    check(&nvfp4(), scales("F8_E4M3", 144, 8), &tensor("weight_scale", &format!("is [144, 8], {fits}")));
    check(&nvfp4(), scales("F32", 256, 8), &tensor("weight_scale", "is F32, needed is F8_E4M3"));
    let what = tensor("weight_scale", &format!("is [144, 5], {fits}; this is the shape of row-major ones"));
    check_hint(&nvfp4(), scales("F8_E4M3", 144, 5), &what, ORDER);
    // The reverse.
    let mut file = nvfp4();
    scales("F8_E4M3", 144, 5)(&mut file);
    let weights = file.open(Component::Transformer).unwrap().with_nvfp4_layout(Some(Nvfp4Layout::MODELOPT));
    load(&weights).unwrap();
    let weights = nvfp4().open(Component::Transformer).unwrap().with_nvfp4_layout(Some(Nvfp4Layout::MODELOPT));
    let text = message(&load(&weights).unwrap_err());
    let what = "is [256, 8], a weight of 144 x 80 has block scales of [144, 5]; this is the shape of tiled ones";
    assert_eq!(text, format!("{} / {ORDER}", tensor("weight_scale", what)));

    // A model whose layer has an incomplete block.
    let mut file = nvfp4();
    weight(144, 36)(&mut file);
    let odd = file.open(Component::Transformer).unwrap().weight(&TensorSpec::new(name("weight"), &[144, 72])).unwrap_err();
    let what = tensor("weight", "has 72 columns, NVFP4 needs a multiple of 16");
    assert_eq!(message(&odd), format!("{what} / {DAMAGED}"));
    // Only matrices have block scales.
    let mut file = Written::default();
    file.settings("single_blocks.0.norm.query_norm", NVFP4);
    file.add("single_blocks.0.norm.query_norm.weight", "U8", &[128], [0; 128]);
    file.add("single_blocks.0.norm.query_norm.weight_scale", "U8", &[128], [0; 128]);
    file.scale("single_blocks.0.norm.query_norm.weight_scale_2", 1.0);
    let norm = TensorSpec::new("single_blocks.0.norm.query_norm.scale", &[128]);
    let text = message(&file.open(Component::Transformer).unwrap().weight(&norm).unwrap_err());
    assert!(text.contains("tensor `single_blocks.0.norm.query_norm.weight` is NVFP4, but not a matrix"), "{text}");
}

#[test]
fn block_scales_are_checked_one_by_one() {
    let put = |row: usize, block: usize, scale: u8| {
        move |file: &mut Written| file.tensor(&name("weight_scale")).1[at(row, block)] = scale
    };
    for (row, block) in [(0, 0), (31, 4), (97, 2), (127, 3), (143, 4), (128, 0)] {
        let what = |what: &str| tensor("weight_scale", &format!("{what}, at block {block} of row {row}"));
        for (scale, fault) in [(0x7f, "is NaN"), (0xff, "is NaN"), (0xb8, "is negative"), (0x80, "is negative")] {
            check(&nvfp4(), put(row, block, scale), &what(fault));
        }
        check_hint(&nvfp4(), put(row, block, 0x00), &what("is zero over elements that are not"), ORDER);
        // Zero elements, and the largest elements, which a quantizer writes where the scale underflows.
        for code in [0x00, 0x08, 0x88, 0xf7, 0x70] {
            let mut file = nvfp4();
            put(row, block, 0)(&mut file);
            file.tensor(&name("weight")).1[row * 40 + block * 8..][..8].fill(code);
            load(&file.open(Component::Transformer).unwrap()).unwrap();
        }
    }
    for (row, block) in [(0, 5), (127, 7), (144, 0), (255, 7), (200, 3)] {
        let what = format!("is not zero in its padding, at block {block} of row {row}");
        check(&nvfp4(), put(row, block, 1), &tensor("weight_scale", &what));
    }
    // Padding that resembles scales: all of it, and only whole rows. The message names the first one in memory.
    for (first_row, named) in [(0, "block 5 of row 0"), (SIZE[0], "block 0 of row 160")] {
        let fill = |file: &mut Written| {
            let scales = &mut file.tensor(&name("weight_scale")).1;
            let places = (first_row..256).flat_map(|row| (0..8).map(move |block| (row, block)));
            places.filter(|(row, block)| *row >= SIZE[0] || *block >= 5).for_each(|(row, block)| scales[at(row, block)] = 0x38);
        };
        check(&nvfp4(), fill, &tensor("weight_scale", &format!("is not zero in its padding, at {named}")));
    }
    // Row-major scales have no padding. The message names the first fault, whichever thread finds one first.
    let mut file = Written::default();
    let (rows, cols) = (4096, 1024);
    let mut scales = vec![0x38; rows * cols / 16];
    scales[70 * 64 + 5] = 0x7f;
    scales[3000 * 64 + 1] = 0xff;
    file.nvfp4("transformer_blocks.0.attn.to_out.0", [rows, cols], &vec![0x11; rows * cols / 2], &scales, 1.0);
    let text = message(&file.open(Component::Transformer).unwrap().check_scales(&spec().name).unwrap_err());
    assert!(text.contains("is NaN, at block 5 of row 70 /"), "{text}");
}
