//! The score in FP8 against that in bf16.

use crate::calibration::{block_linears, layer_name, values};
use crate::common::quantised::{Content, Layer};
use crate::common::relative_l2;
use crate::engine::{Format, Model, files_of, model_folder};
use crate::fixture;
use crate::fp8::{self, Fp8Files, LARGEST};
use crate::full::{Score, Source, limit};
use crate::report::{COLUMNS, Share, line};
use crate::settings::number;
use kiln::backend::GemmFormats;
use kiln::locate::Found;
use kiln::pipeline::{LoadOptions, OpenModel};
use kiln::tensor::{DType, PartScaling, Scales, Stored};
use std::collections::{BTreeMap, BTreeSet};

/// By how many points a column in FP8 may differ from the one in bf16.
const LEEWAY: [f64; 6] = [1.0, 1.0, 1.0, 1.0, 3.0, 3.0];

/// The columns of one set of seeds after the other.
type Columns = Vec<[Share; 6]>;

/// The means of the columns, in per cent.
fn means(columns: &Columns) -> [f64; 6] {
    std::array::from_fn(|i| columns.iter().map(|shares| shares[i].percent()).sum::<f64>() / columns.len() as f64)
}

/// The columns whose means differ by more than they may.
fn apart(bf16: &Columns, fp8: &Columns) -> Vec<&'static str> {
    let (a, b) = (means(bf16), means(fp8));
    // A share is a quotient of whole numbers, so the comparison is not spoilt by rounding if it allows for some.
    let close = |i: &usize| (a[*i] - b[*i]).abs() <= LEEWAY[*i] + 1e-9;
    // What is not a number is not close.
    (0..6).filter(|i| !close(i)).map(|i| COLUMNS[i]).collect()
}

/// The columns of a model for some sets of seeds.
fn columns(name: &str, model: Model, limits: (usize, usize), sets: u64) -> (Columns, Model) {
    let (fixture, mut source) = (fixture(), Source::model(model));
    println!("{}", source.what());
    let columns: Columns = (0..sets)
        .map(|set| {
            let columns = Score::of(&mut source, &fixture, limits, set).columns();
            println!("{name:<5} seeds {set}: {}", line(&columns));
            columns
        })
        .collect();
    println!("{name:<5} means:   {}", means(&columns).map(|mean| format!("{mean:.2}")).join("  "));
    let Source::Model(model, _) = source else { unreachable!() };
    (columns, *model)
}

/// `KILN_SCORE_SEEDS` sets of seeds, three if nothing is said.
#[test]
#[ignore = "half an hour on two cores; this is the score in FP8 against that in bf16"]
fn fp8_scores_like_bf16() {
    let (sets, limits) = (number("KILN_SCORE_SEEDS", 3), (limit(), limit()));
    println!("{}", COLUMNS.join("  "));
    let (bf16, _) = columns("bf16", Model::of_score(Format::Bf16), limits, sets);
    let (fp8, model) = columns("fp8", Model::of_score(Format::Fp8), limits, sets);
    println!("{} activations did not fit into FP8", model.saturated);
    let apart = apart(&bf16, &fp8);
    assert!(apart.is_empty(), "further apart than they may be: {}", apart.join(", "));
}

/// The rule itself: at the limit, and one verdict beyond it.
#[test]
fn a_column_may_differ_by_a_point_and_edits_by_three() {
    // Of a thousand verdicts in three sets, so many are right.
    let sets = |right: [[usize; 6]; 3]| -> Columns { right.map(|set| set.map(|right| Share { right, of: 1000 })).to_vec() };
    let plain = sets([[970, 980, 990, 1000, 880, 1000]; 3]);
    assert!(apart(&plain, &plain).is_empty());
    // Only the means count, and they may be higher or lower.
    let most = [[940, 990, 1000, 970, 850, 970], [970, 990, 1000, 1000, 880, 970], [970, 990, 1000, 1000, 820, 970]];
    assert!(apart(&plain, &sets(most)).is_empty());
    for column in 0..6 {
        for more in [false, true] {
            let (mut a, mut b) = ([[900; 6]; 3], [[900; 6]; 3]);
            let far = if column < 4 { 10 } else { 30 };
            a.iter_mut().for_each(|set| set[column] -= far);
            b[1][column] += 1;
            let (a, b) = if more { (sets(b), sets(a)) } else { (sets(a), sets(b)) };
            assert_eq!(apart(&a, &b), [COLUMNS[column]]);
        }
    }
}

/// The control: inputs that saturate spoil the image of a prompt, and the rule sees it. The same image without the fault passes.
#[test]
fn saturated_inputs_break_the_rule() {
    // Two octaves of head room are used up, and four more are missing.
    let small = |layer: &mut Layer, _: &[Layer]| layer.input_scale = layer.input_scale.map(|scale| scale / 64.0);
    let limits = (1, 0);
    let (bf16, _) = columns("bf16", Model::of_score(Format::Bf16), limits, 1);
    let (right, sound) = columns("fp8", Model::of_score(Format::Fp8), limits, 1);
    let (wrong, faulty) = columns("fault", Model::fp8(&fp8::content().changed(small)), limits, 1);
    println!("{} activations did not fit into FP8, {} with the fault", sound.saturated, faulty.saturated);
    assert!(sound.saturated == 0 && faulty.saturated > 0);
    assert!(apart(&bf16, &right).is_empty(), "{bf16:?} {right:?}");
    assert!(!apart(&bf16, &wrong).is_empty(), "{bf16:?} {wrong:?}");
}

/// The relative error of every layer's weight, which has to be that of rounding to three bits of mantissa: an even distribution
/// of errors over the distance of two numbers, which is an eighth of a number at the lower end of an octave and a sixteenth of
/// one at the upper end.
fn check_errors(content: &Content) -> Result<(), String> {
    let (files, plain) = (Fp8Files::write(content), fp8::open(&files_of(&model_folder())));
    let quantised = fp8::open(&files.files);
    let (most, least) = (1.0 / 8.0 / 12.0_f64.sqrt(), 1.0 / 16.0 / 12.0_f64.sqrt());
    for spec in block_linears(&plain).0 {
        let (exact, rounded) = (values(&plain, &spec), values(&quantised, &spec));
        let error = relative_l2(&rounded, &exact);
        if !(least..=most).contains(&error) {
            return Err(format!("{}: {error:.4} is not within {least:.4} and {most:.4}", spec.name));
        }
        // No element is further off than half of that distance; below the normal numbers it is 2^-9 times the scale.
        let scale = exact.iter().fold(0.0, |most: f32, value| most.max(value.abs())) / LARGEST;
        let allowed = |value: f32| f64::from((value.abs() / 16.0).max(scale / 1024.0)) * (1.0 + 1e-6);
        let off = |(a, b): (&f32, &f32)| f64::from((a - b).abs()) > allowed(*a);
        if let Some((exact, rounded)) = exact.iter().zip(&rounded).find(|pair| off(*pair)) {
            return Err(format!("{}: {rounded} instead of {exact}", spec.name));
        }
    }
    Ok(())
}

/// The file has what those of Black Forest Labs have, and its weights are the model's, rounded.
#[test]
fn the_fp8_file_is_what_it_claims() {
    let (content, files) = (fp8::content(), files_of(&model_folder()));
    let written = Fp8Files::write(content);
    let (plain, quantised) = (fp8::open(&files), fp8::open(&written.files));
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
        let weight = quantised.weight(spec).unwrap();
        let [part] = &weight.parts[..] else { panic!("{} has {} parts", spec.name, weight.parts.len()) };
        assert_eq!((part.dtype, part.rows), (DType::E4m3, spec.shape[0]), "{}", spec.name);
        assert!(matches!(part.scaling, PartScaling::Tensor(_)), "{}", spec.name);
        let Some(Stored { dtype: DType::E4m3, scales: Scales::Tensor(scale) }) = weight.input else {
            panic!("{}: {:?}", spec.name, weight.input)
        };
        assert_eq!(scale.get().to_bits() & 0x7f_ffff, 0, "{}: {scale:?} is no power of two", spec.name);
        assert!(part.bytes.iter().any(|code| code & 0x7f == 0x7e), "{}: no weight has the largest code", spec.name);
    }
    for spec in &rest {
        assert!(quantised.weight(spec).unwrap().parts.iter().all(|part| part.dtype == DType::Bf16), "{}", spec.name);
        assert_eq!(values(&quantised, spec), values(&plain, spec), "{}", spec.name);
    }

    let [model, original] = [written.found(), Found::Files(Box::new(files))].map(|found| OpenModel::open(&found, None).unwrap());
    assert_eq!(model.configs, original.configs);
    assert_eq!((model.variant, &model.warnings), (original.variant, &original.warnings));
    let formats = model.formats(LoadOptions::default(), GemmFormats::ALL).unwrap();
    let in_fp8: BTreeMap<_, _> = formats.layers.iter().filter(|l| l.input == DType::E4m3).map(|l| (&*l.name, &l.parts)).collect();
    assert!(in_fp8.values().all(|parts| parts.iter().all(|part| (part.stored, part.held) == (DType::E4m3, DType::E4m3))));
    assert_eq!(in_fp8.into_keys().collect::<BTreeSet<_>>(), linears.iter().map(|spec| &*spec.name).collect());

    check_errors(content).unwrap();
    // The control: a scale that is a tenth too large.
    assert!(check_errors(&content.changed(|layer, _| layer.scale *= 1.1)).is_err());
}
