//! The messages of a run in addition to results and errors: notes, warnings, the headline, and the details of `--verbose`.

use super::device::SelectedBackend;
use super::formats::{format_lines, words};
use super::settings::Settings;
use crate::terminal::Terminal;
use kiln::device::Fp8Accumulate;
use kiln::locate::Found;
use kiln::progress::Progress;
use kiln::text::{amount, grouped, shown};
use kiln::{Expansion, Formats, GeneratedImage, Guidance, ModelDefaults, Noise, Nvfp4Math, OpenModel, Variant, unknown_words};

/// The number of unknown words that a note lists.
const NAMED_WORDS: usize = 5;

/// Prints a note if kiln chose one of its own models, or if the model is untrained and its noise would look like a fault.
pub fn announce_model(found: &Found, named: bool, terminal: &Terminal) {
    let what = match (found, named) {
        (Found::BuiltIn(_), false) => {
            "no FLUX.2 model was found, so kiln's own small model draws this; it knows shapes and colors, as in \
             \"a large red star on a blue background\""
        }
        (Found::Tiny, true) => "the tiny model is random and untrained, so the image is noise",
        (Found::Tiny, false) => "no FLUX.2 model was found; this is a tiny untrained random model, so the image is noise",
        _ => return,
    };
    terminal.say(&format!("note: {what}; for FLUX.2 weights use --model or KILN_MODEL"));
}

/// Lists the words of the prompt that are not in the model's training vocabulary, if its files state one. The model generates an
/// image anyway, and without the note the user could not tell why it does not match the prompt.
pub fn unknown_words_note(prompt: &str, found: &Found, defaults: &ModelDefaults) -> Option<String> {
    let ModelDefaults { name, words: Some(words), draws, .. } = defaults else { return None };
    let unknown = unknown_words(prompt, words);
    if unknown.is_empty() {
        return None;
    }
    let named: Vec<String> = unknown.iter().take(NAMED_WORDS).map(|word| format!("\"{}\"", shown(word))).collect();
    let mut note = format!("note: {} does not know {}", name.as_deref().unwrap_or("this model"), named.join(", "));
    if unknown.len() > NAMED_WORDS {
        note += &format!(" and {} more", unknown.len() - NAMED_WORDS);
    }
    note += &draws.as_ref().map_or(String::new(), |draws| format!("; it draws {draws}"));
    note += if matches!(found, Found::BuiltIn(_)) { ", see kiln --help" } else { "" };
    Some(note)
}

/// The note that a backend without a suitable GEMM holds quantized weights in another format, so they take more memory than the files
/// suggest.
pub fn expansion_note(formats: &Formats, gpu: bool) -> Option<String> {
    let Expansion { stored, held, stored_bytes, held_bytes } = formats.expansion()?;
    let (stored, held, place) = (words(stored).join(" and "), words(held).join(" and "), if gpu { "GPU" } else { "CPU" });
    let (now, before) = (amount(held_bytes), amount(stored_bytes));
    Some(format!("note: {stored} weights are expanded to {held} on the {place}: {now} instead of {before}"))
}

/// Warns if the requested accumulation is not used.
pub fn warn_of_accumulation(asked: Fp8Accumulate, formats: &Formats, terminal: &Terminal) {
    let why = match formats.accumulate {
        _ if asked == Fp8Accumulate::Auto => return,
        None => "the CPU sums in f32",
        Some(_) if !formats.accumulates_fp8() => "no layer of this model is multiplied in FP8 here",
        Some(has) if has != asked => "on this GPU all sums are exact",
        Some(_) => return,
    };
    terminal.warn(&format!("--fp8-accumulate is ignored: {why}"));
}

/// Warns if the requested NVFP4 math makes no difference.
pub fn warn_of_nvfp4_math(asked: Nvfp4Math, formats: &Formats, terminal: &Terminal) {
    if asked != Nvfp4Math::Auto && formats.nvfp4_math().is_none() {
        terminal.warn("--nvfp4-math is ignored: no layer of this model has NVFP4 weights and an input scale");
    }
}

/// How to write the name of an option: as a flag, or as a field of a line.
pub type Spell = fn(&str) -> String;

/// An option as a flag.
pub fn flag(name: &str) -> String {
    format!("--{name}")
}

/// An option as a field of a line of JSON.
pub fn field(name: &str) -> String {
    format!("`{name}`")
}

/// Lists given settings that have no effect with this model.
pub fn ignored_settings(settings: &Settings, spell: Spell) -> Vec<String> {
    let mut ignored = ignored_guidance(settings.guidance, settings.variant, spell);
    let (negative, guidance) = (spell("negative"), spell("guidance"));
    ignored.extend(match (&settings.negative, settings.guidance.chosen) {
        (Some(_), None) => Some(format!("{negative} is ignored: this is a {} model, only base models take it", settings.variant)),
        (Some(_), Some(scale)) if !settings.guided => {
            Some(format!("{negative} is ignored: it works through a {guidance} above 1, which is {scale} here"))
        }
        _ => None,
    });
    ignored
}

/// Warns of a guidance scale for a model that does not use one.
pub fn ignored_guidance(guidance: Guidance, variant: Variant, spell: Spell) -> Vec<String> {
    let ignored = || format!("{} is ignored: this is a {variant} model, only base models and dev take it", spell("guidance"));
    guidance.ignored.then(ignored).into_iter().collect()
}

/// Prints what is about to be generated, with which model and on which backend, and warns of flags that have no effect.
pub fn announce_run(
    settings: &Settings,
    found: &Found,
    model: &OpenModel,
    backend: &SelectedBackend,
    formats: &Formats,
    terminal: &Terminal,
) {
    let headline = headline(settings);
    let mut details = details(settings, found, model, backend);
    details.extend(format_lines(formats).iter().map(|line| format!("formats {line}")));
    ignored_settings(settings, flag).iter().for_each(|warning| terminal.warn(warning));
    let ModelDefaults { width, height, .. } = model.defaults;
    let size = settings.job.size;
    let is_whole = settings.edit.as_ref().is_none_or(|edit| !edit.is_cropped());
    if matches!(found, Found::BuiltIn(_)) && is_whole && (size.width(), size.height()) != (width, height) {
        terminal.say(&format!("note: {} was trained on {width}x{height} images; other sizes may look wrong", settings.model));
    }
    terminal.say(&headline);
    settings.edit.iter().flat_map(|edit| edit.notes(&settings.job)).for_each(|note| terminal.say(&note));
    details.iter().for_each(|line| terminal.detail(line));
}

/// The line printed before any work. It has the seed, which is recorded nowhere else if the run is interrupted.
fn headline(settings: &Settings) -> String {
    let steps = if settings.job.steps == 1 { "1 step".into() } else { format!("{} steps", settings.job.steps) };
    let seeds = match &*settings.job.seeds {
        _ if matches!(settings.job.noise, Noise::Given(_)) => "noise from a file".into(),
        [first, .., last] => format!("seeds {first} to {last}"),
        [first] => format!("seed {first}"),
        [] => String::new(),
    };
    let (width, height) = settings.size();
    format!("{}, {width}x{height}, {steps}, {seeds}", settings.model)
}

/// The lines of `--verbose`.
fn details(settings: &Settings, found: &Found, model: &OpenModel, backend: &SelectedBackend) -> Vec<String> {
    let origin = match found {
        Found::Files(files) => &files.origin,
        Found::BuiltIn(_) => "part of this program",
        Found::Tiny => "made by this program",
    };
    let guidance = settings.guidance.chosen.map_or("none".into(), |scale| scale.to_string());
    let noise: Vec<String> = settings.noise.flags().map(|(key, value)| format!("{key} {value}")).collect();
    let mut lines = vec![
        format!("model {origin}"),
        format!("variant {}, guidance {guidance}, precision {}", settings.variant, settings.precision.name()),
        format!("backend {}, {}", backend.name, backend.machine),
        noise.join(", "),
    ];
    if matches!(found, Found::Files(_)) {
        lines.extend(model.files_in_use().iter().map(|(part, files)| format!("{part} {files}")));
    }
    lines.extend(settings.references.iter().enumerate().map(|(j, reference)| format!("reference {}: {reference}", j + 1)));
    lines
}

/// The warning about an image whose pixels all have the same color.
pub fn flat_image_warning(image: &GeneratedImage) -> Option<String> {
    let [red, green, blue] = image.image.flat_color()?;
    Some(format!(
        "the image is one flat color ({red}, {green}, {blue}); unless the prompt asks for that, the model's files may be damaged"
    ))
}

/// The warning about activations that did not fit into FP8.
pub fn saturation_warning(saturated: u64, settings: &Settings) -> Option<String> {
    let what = match saturated {
        0 => return None,
        1 => "1 activation was".into(),
        many => format!("{} activations were", grouped(many)),
    };
    let (why, remedy) = match settings.quantize() {
        Some(_) => ("--quantize does not calibrate its input scales", "a model without it"),
        None => ("the model's input scales are too small for this prompt", "a bf16 model"),
    };
    Some(format!(
        "{what} beyond the range of FP8 and clamped, so the image may be wrong: {why}; {remedy} or --precision f32 has no such limit"
    ))
}

/// Warns of what is remarkable about a finished image.
pub fn warn_of_image(image: &GeneratedImage, settings: &Settings, terminal: &Terminal) {
    let warnings = flat_image_warning(image).into_iter().chain(saturation_warning(image.saturated, settings));
    warnings.for_each(|warning| terminal.warn(&warning));
}

/// Lists the GPU kernels that ran, with `--verbose` only.
pub fn list_kernels(launches: &[(&'static str, u64)], terminal: &Terminal) {
    let kernels: Vec<&str> = launches.iter().map(|(name, _)| *name).collect();
    if !kernels.is_empty() {
        terminal.detail(&format!("kernels {}", kernels.join(" ")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln::internals::backend::Weight;
    use kiln::internals::model::{LayerFormat, PartFormat};
    use kiln::internals::tensor::{Arena, Region};
    use kiln::{DType, LayerRole};

    #[test]
    fn expanded_weights_are_noted_with_both_sizes() {
        let part = |stored, held, bytes: u64| PartFormat { stored, held, stored_bytes: bytes, held_bytes: 2 * bytes };
        let layers = |parts: &[PartFormat]| {
            let id = LayerRole::Linear1.of_block(0);
            let weight = Weight::new(Arena::new(Region::Weights).alloc(1, 1, DType::Bf16).unwrap());
            let layer = LayerFormat { id, weight, parts: parts.into(), input: DType::Bf16, why: None, merged: false };
            Formats { layers: vec![layer], ..Formats::default() }
        };
        let fp8 = part(DType::E4m3, DType::Bf16, 3 << 29);
        let nvfp4 = part(DType::E2m1, DType::Bf16, 1 << 30);
        // Plain parts do not count.
        let plain = part(DType::Bf16, DType::F32, 5 << 30);
        let note = "note: fp8 and nvfp4 weights are expanded to bf16 on the GPU: 5.0 GiB instead of 2.5 GiB";
        assert_eq!(expansion_note(&layers(&[nvfp4, plain, fp8]), true).as_deref(), Some(note));
        let small = part(DType::E5m2, DType::F32, 1 << 20);
        let note = "note: fp8-e5m2 weights are expanded to f32 on the CPU: 2.0 MiB instead of 1.0 MiB";
        assert_eq!(expansion_note(&layers(&[small]), false).as_deref(), Some(note));
        let kept = part(DType::E4m3, DType::E4m3, 1);
        assert_eq!(expansion_note(&layers(&[kept, plain]), true), None);
    }
}
