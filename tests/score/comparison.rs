//! Compares the score in FP8 and in NVFP4 with the score in bf16.

use crate::calibration::{block_linears, layer_name, values};
use crate::engine::{Format, Model, files_of, model_folder};
use crate::fixture;
use crate::full::{Score, Source, limit};
use crate::quantized::{FORMATS, QuantizedFiles, content, open};
use crate::report::{COLUMNS, Share, line};
use crate::settings::number;
use common::quantized::{Change, Content};
use common::random::{long, seed};
use common::relative_l2;
use kiln::internals::backend::GemmFormats;
use kiln::internals::pipeline::{LoadOptions, OpenModel};
use kiln::internals::tensor::nvfp4::BLOCK;
use kiln::internals::tensor::{DType, Nvfp4Layout, Scales, SliceScaling, Stored};
use kiln::locate::Found;
use std::collections::{BTreeMap, BTreeSet};

/// How many points each column may differ from the bf16 column.
type Leeway = [f64; 6];

const FP8: Leeway = [1.0, 1.0, 1.0, 1.0, 3.0, 3.0];
const NVFP4: Leeway = [2.0, 2.0, 2.0, 2.0, 5.0, 5.0];
/// The leeway of NVFP4 inputs.
const W4A4: Leeway = [3.0, 3.0, 3.0, 3.0, 6.0, 6.0];

/// The columns of each set of seeds.
type Columns = Vec<[Share; 6]>;

/// The means of the columns, in per cent.
fn means(columns: &Columns) -> [f64; 6] {
    std::array::from_fn(|i| columns.iter().map(|shares| shares[i].percent()).sum::<f64>() / columns.len() as f64)
}

/// The columns whose means differ by more than the leeway.
fn apart(bf16: &Columns, quantized: &Columns, leeway: Leeway) -> Vec<&'static str> {
    let (a, b) = (means(bf16), means(quantized));
    // A share is a quotient of integers, so a small allowance for rounding does not spoil the comparison.
    let close = |i: &usize| (a[*i] - b[*i]).abs() <= leeway[*i] + 1e-9;
    // NaN is not close.
    (0..6).filter(|i| !close(i)).map(|i| COLUMNS[i]).collect()
}

/// The columns of a model for some sets of seeds.
fn columns(name: &str, model: Model, limits: (usize, usize), sets: u64) -> (Columns, Model) {
    let (fixture, mut source) = (fixture(), Source::model(model));
    println!("{}", source.what());
    let columns: Columns = (0..sets)
        .map(|set| {
            let columns = Score::of(&mut source, &fixture, limits, set).columns();
            println!("{name:<12} seeds {set}: {}", line(&columns));
            columns
        })
        .collect();
    println!("{name:<12} means:   {}", means(&columns).map(|mean| format!("{mean:.2}")).join("  "));
    let Source::Model(model, _) = source else { unreachable!() };
    (columns, *model)
}

/// Scores these formats and bf16 with `KILN_SCORE_SEEDS` sets of seeds, three by default.
fn score_like_bf16(formats: &[Format], leeway: Leeway) {
    let (sets, limits) = (number("KILN_SCORE_SEEDS", 3), (limit(), limit()));
    println!("{}", COLUMNS.join("  "));
    let (bf16, _) = columns("bf16", Model::of_score(Format::BF16), limits, sets);
    let mut far = Vec::new();
    for format in formats {
        let (quantized, model) = columns(format.name, Model::of_score(*format), limits, sets);
        println!("{} activations did not fit into FP8", model.saturated);
        far.extend(apart(&bf16, &quantized, leeway).iter().map(|column| format!("{} {column}", format.name)));
    }
    assert!(far.is_empty(), "further apart than they may be: {}", far.join(", "));
}

#[test]
#[ignore = "half an hour on two cores; this is the score in FP8 against that in bf16"]
fn fp8_scores_like_bf16() {
    score_like_bf16(&[Format::FP8], FP8);
}

#[test]
#[ignore = "most of an hour on two cores; this is the score in NVFP4 against that in bf16"]
fn nvfp4_scores_like_bf16() {
    score_like_bf16(&[Format::NVFP4, Format::NVFP4_AS_FP8], NVFP4);
}

#[test]
#[ignore = "half an hour on two cores; this is the score of --quantize fp8 against that in bf16"]
fn fp8_at_load_scores_like_bf16() {
    score_like_bf16(&[Format::FP8_AT_LOAD], FP8);
}

#[test]
#[ignore = "half an hour on two cores; this is the score of --quantize nvfp4 against that in bf16"]
fn nvfp4_at_load_scores_like_bf16() {
    score_like_bf16(&[Format::NVFP4_AT_LOAD], NVFP4);
}

#[test]
#[ignore = "most of an hour on two cores; this is the score of NVFP4 weights by NVFP4 inputs against that in bf16"]
fn w4a4_scores_like_bf16() {
    score_like_bf16(&[Format::W4A4, Format::W4A4_AT_LOAD], W4A4);
}

/// Checks the rule itself: at the limit, and one verdict beyond it.
#[test]
fn a_column_may_differ_by_so_many_points() {
    // How many of a thousand verdicts are right, in three sets.
    let sets = |right: [[usize; 6]; 3]| -> Columns { right.map(|set| set.map(|right| Share { right, of: 1000 })).to_vec() };
    let plain = sets([[970, 980, 990, 1000, 880, 1000]; 3]);
    assert!(apart(&plain, &plain, FP8).is_empty());
    // Only the means count, and they may be higher or lower than in bf16.
    let most = [[940, 990, 1000, 970, 850, 970], [970, 990, 1000, 1000, 880, 970], [970, 990, 1000, 1000, 820, 970]];
    assert!(apart(&plain, &sets(most), FP8).is_empty());
    for (leeway, points) in [(FP8, [1, 3]), (NVFP4, [2, 5])] {
        for column in 0..6 {
            for more in [false, true] {
                let (mut a, mut b) = ([[900; 6]; 3], [[900; 6]; 3]);
                a.iter_mut().for_each(|set| set[column] -= 10 * points[usize::from(column >= 4)]);
                assert!(apart(&sets(a), &sets(b), leeway).is_empty());
                b[1][column] += 1;
                let (a, b) = if more { (sets(b), sets(a)) } else { (sets(a), sets(b)) };
                assert_eq!(apart(&a, &b, leeway), [COLUMNS[column]]);
            }
        }
    }
}

/// The controls: these faults spoil the image of a prompt, and the rule notices. Without the fault the same image passes.
#[test]
fn faults_break_the_rule() {
    // The two octaves of head room are used up, and four more are missing.
    let saturating: Change = |layer, _| layer.input_scale = layer.input_scale.map(|scale| scale / 64.0);
    let swapped: Change = |layer, _| layer.codes.iter_mut().for_each(|byte| *byte = byte.rotate_left(4));
    let (bf16, _) = columns("bf16", Model::of_score(Format::BF16), (1, 0), 1);
    let faults = [
        (Format::FP8, DType::E4m3, FP8, saturating),
        (Format::NVFP4, DType::E2m1, NVFP4, swapped),
        (Format::NVFP4_AS_FP8, DType::E2m1, NVFP4, saturating),
    ];
    // Each fault takes two images, so a short run tests one fault, which its seed chooses.
    let drawn = seed(true) as usize % faults.len();
    for (_, (format, weights, leeway, fault)) in faults.into_iter().enumerate().filter(|(index, _)| long() || *index == drawn) {
        let name = format.name;
        let (right, sound) = columns(name, Model::of_score(format), (1, 0), 1);
        let (wrong, faulty) = columns("fault", Model::quantized(format, &content(weights).changed(fault)), (1, 0), 1);
        println!("{} activations did not fit into FP8, {} with the fault", sound.saturated, faulty.saturated);
        assert_eq!((sound.saturated > 0, faulty.saturated > 0), (false, name != "nvfp4"), "{name}");
        assert!(apart(&bf16, &right, leeway).is_empty(), "{name}: {bf16:?} {right:?}");
        assert!(!apart(&bf16, &wrong, leeway).is_empty(), "{name}: {bf16:?} {wrong:?}");
    }
}

/// The change of a weight that rounding to a format may cause.
struct Rounding {
    /// The relative error of all values, from and to.
    errors: [f64; 2],
    /// How far each value may be off.
    allowed: Vec<f64>,
}

impl Rounding {
    /// Errors are evenly distributed over the distance of two numbers.
    fn of(format: DType, values: &[f32]) -> Self {
        let squares = |values: &[f32]| values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
        let largest = |values: &[f32]| values.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
        let scale = largest(values) / format.format().largest;
        let off = |value: &f32, part: f32, least: f32| f64::from((value.abs() * part).max(least)) * (1.0 + 1e-6);
        match format {
            // Three bits of mantissa: the distance is an eighth of a number at the lower end of an octave and a sixteenth at the
            // upper end. Below the normal numbers it is 2^-9 times the scale.
            DType::E4m3 => Self {
                errors: [16.0, 8.0].map(|parts| 1.0 / parts / 12.0_f64.sqrt()),
                allowed: values.iter().map(|value| off(value, 1.0 / 16.0, scale / 1024.0)).collect(),
            },
            // One bit of mantissa: the distance is a half to a quarter of a number, and below the normal numbers half of the
            // block's unit. The unit is a sixth of the block's largest value, rounded to e4m3. The error of that largest value
            // comes only from the unit; the lower limit leaves it out.
            _ => {
                let unit = |block: &[f32]| (largest(block) / 6.0 * (1.0 + 1.0 / 16.0)).max(largest(block) / 6.0 + scale / 1024.0);
                let blocks = || values.chunks_exact(BLOCK);
                let others = squares(values) - blocks().map(|block| f64::from(largest(block)).powi(2)).sum::<f64>();
                let below = blocks().map(|block| BLOCK as f64 * f64::from(unit(block)).powi(2)).sum::<f64>();
                let relative = |squares_of_distances: f64| (squares_of_distances / 12.0 / squares(values)).sqrt();
                Self {
                    errors: [relative(others / 16.0), relative((squares(values) + below) / 4.0)],
                    allowed: blocks().flat_map(|block| block.iter().map(|value| off(value, 0.25, unit(block) / 4.0))).collect(),
                }
            }
        }
    }
}

/// Checks that the error of every layer's weight is the error of rounding.
fn check_errors(format: DType, content: &Content) -> Result<(), String> {
    let (files, plain) = (QuantizedFiles::write(content), open(&files_of(&model_folder())));
    let quantized = open(&files.files);
    for spec in block_linears(&plain).0 {
        let (exact, rounded) = (values(&plain, &spec), values(&quantized, &spec));
        let (error, Rounding { errors: [least, most], allowed }) = (relative_l2(&rounded, &exact), Rounding::of(format, &exact));
        if !(least..=most).contains(&error) {
            return Err(format!("{}: {error:.4} is not within {least:.4} and {most:.4}", spec.name));
        }
        let mut all = exact.iter().zip(&rounded).zip(allowed);
        if let Some(((exact, rounded), _)) = all.find(|((a, b), allowed)| f64::from((*a - *b).abs()) > *allowed) {
            return Err(format!("{}: {rounded} instead of {exact}", spec.name));
        }
    }
    Ok(())
}

#[test]
fn the_files_are_what_they_claim() {
    FORMATS.into_iter().for_each(check_file);
}

/// Checks that the file has the tensors of Black Forest Labs' files, and the model's weights, rounded.
fn check_file(format: DType) {
    let (content, files) = (content(format), files_of(&model_folder()));
    let written = QuantizedFiles::write(content);
    let (plain, quantized) = (open(&files), open(&written.files));
    let (linears, rest) = block_linears(&plain);
    let [mut doubles, mut singles] = [BTreeSet::new(), BTreeSet::new()];
    for name in linears.iter().map(layer_name) {
        let (kind, rest) = name.split_once("_blocks.").unwrap();
        let (_, layer) = rest.split_once('.').unwrap();
        if kind == "double" { &mut doubles } else { &mut singles }.insert(layer.to_owned());
    }
    let streams = ["img", "txt"]
        .into_iter()
        .flat_map(|stream| ["attn.qkv", "attn.proj", "mlp.0", "mlp.2"].map(|layer| format!("{stream}_{layer}")));
    assert_eq!(doubles, streams.collect());
    assert_eq!(singles, ["linear1", "linear2"].map(String::from).into());

    for spec in &linears {
        let weight = quantized.weight(spec).unwrap();
        let [part] = &weight.parts[..] else { panic!("{} has {} parts", spec.name, weight.parts.len()) };
        assert_eq!((part.dtype, part.rows), (format, spec.shape[0]), "{}", spec.name);
        let input =
            weight.input.filter(|input| input.dtype == format).unwrap_or_else(|| panic!("{}: {:?}", spec.name, weight.input));
        let is_largest = |code: &u8| code & 0x7f == 0x7e;
        let (scale, has_largest) = match (&part.scaling, input) {
            (SliceScaling::Tensor(_), Stored { scales: Scales::Tensor(scale), .. }) => (scale, part.bytes.iter().any(is_largest)),
            (SliceScaling::Blocks16 { scales, layout, .. }, Stored { scales: Scales::Blocks16(scale), .. }) => {
                assert_eq!(*layout, Nvfp4Layout::COMFY, "{}", spec.name);
                (scale, part.bytes.iter().any(|pair| pair & 7 == 7 || pair >> 4 & 7 == 7) && scales.iter().any(is_largest))
            }
            other => panic!("{}: {other:?}", spec.name),
        };
        assert_eq!(scale.get().to_bits() & 0x7f_ffff, 0, "{}: {scale:?} is no power of two", spec.name);
        assert!(has_largest, "{}: no weight has the largest code", spec.name);
    }
    for spec in &rest {
        assert!(quantized.weight(spec).unwrap().parts.iter().all(|part| part.dtype == DType::Bf16), "{}", spec.name);
        assert_eq!(values(&quantized, spec), values(&plain, spec), "{}", spec.name);
    }

    let [model, original] = [written.found(), Found::Files(Box::new(files))].map(|found| OpenModel::open(&found, None).unwrap());
    assert_eq!(model.configs, original.configs);
    assert_eq!((model.variant, &model.warnings), (original.variant, &original.warnings));
    let formats = model.formats(LoadOptions::default(), GemmFormats::ALL).unwrap();
    let found: BTreeMap<_, _> =
        formats.layers.iter().filter(|l| l.input == format).map(|l| (l.id.canonical(), &l.parts)).collect();
    assert!(found.values().all(|parts| parts.iter().all(|part| (part.stored, part.held) == (format, format))));
    assert_eq!(found.into_keys().collect::<BTreeSet<_>>(), linears.iter().map(|spec| spec.name.clone()).collect());

    check_errors(format, content).unwrap();
    // The control: a scale that is a tenth too large.
    assert!(check_errors(format, &content.changed(|layer, _| layer.scale *= 1.1)).is_err());
}
