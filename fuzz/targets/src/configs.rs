//! Configuration files.

use crate::check_file_error;
use kiln::error::Result;
use kiln::internals::checkpoint::Weights;
use kiln::internals::component::PerComponent;
use kiln::internals::config::{
    ConfigFile, Configs, ModelDefaults, TextConfig, TransformerConfig, VaeConfig, Variant, check_scheduler,
};
use kiln::internals::names::Layout;
use kiln::internals::tensor::DType;
use kiln::internals::tiny;
use kiln::text::shown_line;
use kiln::{Pixels, Sigmas};
use serde_json::json;
use std::path::Path;
use std::sync::LazyLock;

static TINY: LazyLock<PerComponent<Weights>> = LazyLock::new(|| {
    let model = tiny::model(Layout::Diffusers, DType::Bf16).expect("a float type");
    PerComponent::from_fn(|part| model.weights(part).expect("a whole model"))
});

/// A `kiln.json`, a `model_index.json`, a scheduler's configuration, or a part's: the first byte says which, and the rest is the file.
/// What is accepted is within its limits, and a `kiln.json` written from it is read as the same.
pub fn config(data: &[u8]) {
    let Some((kind, text)) = data.split_first() else { return };
    let path = Path::new("config.json");
    if kind % 6 == 0 {
        return match ModelDefaults::parse(path, text) {
            Ok(defaults) => check_defaults(path, &defaults),
            Err(error) => check_file_error(&error),
        };
    }
    let file = match ConfigFile::parse(path, text) {
        Ok(file) => file,
        Err(error) => return check_file_error(&error),
    };
    let result: Result<()> = match kind % 6 {
        1 => Variant::detect(&Configs::TINY.transformer, Some(&file), &["base"]).map(drop),
        2 => check_scheduler(&file),
        3 => TransformerConfig::detect(&TINY.transformer, Some(&file)).map(|found| {
            assert!(found.eps > 0.0 && found.eps <= 0.01 && found.rope_theta >= 1.0, "{found:?}");
            assert_eq!(found.rope_axes.iter().sum::<usize>(), 128);
            assert!(found.rope_axes.iter().all(|axis| axis % 2 == 0), "{found:?}");
            let plain = TransformerConfig { eps: found.eps, ..found };
            let tiny = &Configs::TINY.transformer;
            assert_eq!(
                TransformerConfig { eps: tiny.eps, rope_theta: tiny.rope_theta, rope_axes: tiny.rope_axes, ..plain },
                *tiny
            );
        }),
        4 => TextConfig::detect(&TINY.text_encoder, Some(&file), &ModelDefaults::klein()).map(|found| {
            assert!(found.eps > 0.0 && found.eps <= 0.01 && found.rope_theta >= 1.0, "{found:?}");
            assert_eq!((found.hidden, found.heads), (Configs::TINY.text_encoder.hidden, Configs::TINY.text_encoder.heads));
        }),
        _ => VaeConfig::detect(&TINY.vae, Some(&file)).map(|found| {
            assert!(found.stats_eps > 0.0 && found.tile > 0 && found.tile.is_multiple_of(32), "{found:?}");
        }),
    };
    if let Err(error) = result {
        check_file_error(&error);
    }
}

fn check_defaults(path: &Path, found: &ModelDefaults) {
    assert!(Pixels::new(found.width, found.width).is_ok() && Pixels::new(found.height, found.height).is_ok(), "{found:?}");
    assert!((16..=2048).contains(&found.max_text_tokens), "{found:?}");
    assert!((64 * 64..=4 << 20).contains(&found.max_reference_pixels), "{found:?}");
    assert!(found.steps.is_none_or(|steps| (1..=1000).contains(&steps)), "{found:?}");
    assert!(found.guidance.is_none_or(|scale| (0.0..=100.0).contains(&scale)), "{found:?}");
    for text in [&found.name, &found.draws].into_iter().flatten() {
        assert!(!text.is_empty() && *text == shown_line(text), "{text:?}");
    }
    let text = json!({
        "name": found.name,
        "variant": found.variant.map(|variant| variant.to_string()),
        "text_layers": found.text_layers,
        "max_text_tokens": found.max_text_tokens,
        "width": found.width,
        "height": found.height,
        "steps": found.steps,
        "guidance": found.guidance,
        "max_reference_pixels": found.max_reference_pixels,
        "words": found.words,
        "draws": found.draws,
    });
    let again = ModelDefaults::parse(path, text.to_string().as_bytes());
    assert_eq!(again.unwrap_or_else(|error| panic!("written it is refused: {error}")), *found);
    // The levels of any number of steps that a file may name are a schedule.
    let steps = found.steps.unwrap_or(1);
    let levels: Vec<f64> = (0..steps).map(|step| 1.0 - step as f64 / steps as f64).collect();
    assert_eq!(Sigmas::new(&levels).expect("levels that fall").steps(), steps);
}
