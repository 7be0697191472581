//! What an image says about how it was made, as flags of `kiln generate`.

use super::find::Searched;
use super::{Given, word};
use kiln::metadata::{AdapterMetadata, ImageMetadata, InitMetadata, NoiseMetadata, QUANTIZED};
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// Extensions of files that hold images, and tensors.
const IMAGES: [&str; 4] = ["png", "jpg", "jpeg", "webp"];
const TENSORS: [&str; 1] = ["safetensors"];

/// Flags that name files with digests. They change the image only if the digest is another one.
pub const FILES: [&str; 5] = ["reference", "init", "mask", "noise", "lora"];

/// The flags of an image.
#[derive(Default)]
pub struct Plan {
    /// The words of the command line.
    pub words: Vec<OsString>,
    /// What is not there, and the flag that names it.
    pub missing: Vec<String>,
    /// Whether a given file is another one than the image was made from.
    pub changed: bool,
}

impl Plan {
    fn flag(&mut self, name: &str, value: impl AsRef<OsStr>) {
        self.words.push(word(name, value.as_ref()));
    }

    fn switch(&mut self, name: &str) {
        self.words.push(format!("--{name}").into());
    }

    /// Adds a file with a digest. `what` describes it.
    fn file(&mut self, name: &str, what: &str, digest: &str, extensions: &[&str], searched: &mut Searched) {
        match searched.find(digest, extensions, None) {
            Some(path) => self.flag(name, path),
            None => self.missing.push(absent(what, digest, name)),
        }
    }

    /// Compares files that were given with digests.
    fn compare(&mut self, given: &Given, name: &str, digests: &[&str], searched: &mut Searched) {
        let paths = given.0.iter().find(|(flag, _)| flag == name).map(|(_, values)| &values[..]).unwrap_or_default();
        let found: Vec<Option<String>> = paths.iter().map(|path| searched.digest(Path::new(path))).collect();
        self.changed |= !digests.iter().map(|digest| Some(*digest)).eq(found.iter().map(Option::as_deref));
    }
}

/// Says that a file is missing.
fn absent(what: &str, digest: &str, flag: &str) -> String {
    let short: String = digest.chars().take(16).collect();
    format!("{what} with the SHA-256 {short}… is not there (--{flag})")
}

/// The flags that make an image again. What `given` flags replace is left out.
pub fn recorded(metadata: &ImageMetadata, given: &Given, searched: &mut Searched) -> Plan {
    // Every field is named here: a new one does not compile until it is thought of.
    let ImageMetadata {
        // The caller gives the prompt and the model, and compares the others.
        prompt: _,
        model: _,
        model_id: _,
        arithmetic: _,
        version: _,
        seed,
        variant,
        steps,
        size: [width, height],
        precision,
        sigmas,
        padding,
        quantized,
        lora,
        lora_mode,
        vae_tiling,
        guidance,
        negative,
        init,
        references,
        noise,
        device,
        quality,
    } = metadata;
    let (mut plan, has) = (Plan::default(), |names: &[&str]| names.iter().any(|name| given.has(name)));

    if !has(&["variant"]) {
        plan.flag("variant", variant);
    }
    if !has(&["steps", "sigmas"]) {
        match sigmas {
            Some(sigmas) => plan.flag("sigmas", sigmas),
            None => plan.flag("steps", steps.to_string()),
        }
    }
    let mut optional = vec![("precision", Some(precision.clone())), ("padding", padding.clone())];
    optional.push(("guidance", guidance.map(|scale| scale.to_string())));
    optional.push(("negative", negative.clone()));
    optional.push(("lora-mode", lora_mode.clone()));
    optional.extend(quantized.iter().filter_map(|(name, value)| {
        let flag = QUANTIZED.into_iter().find(|flag| flag == name)?;
        Some((flag, Some(value.clone())))
    }));
    // A device computes what it can, and the CPU ignores what only tensor cores choose.
    let on_cpu = device.starts_with("cpu");
    optional.push(("backend", on_cpu.then(|| "cpu".into())));
    // The format follows from the name, and only JPEG has a quality.
    let is_own_format = !has(&["output", "format"]);
    optional.push(("quality", quality.filter(|_| is_own_format).map(|quality| quality.to_string())));
    for (name, value) in optional {
        if let Some(value) = value.filter(|_| !given.has(name)) {
            plan.flag(name, value);
        }
    }
    if *vae_tiling && !has(&["vae-tiling"]) {
        plan.switch("vae-tiling");
    }
    plan_noise(&mut plan, *seed, noise, given, searched);
    plan_adapters(&mut plan, lora, given, searched);
    if has(&["reference"]) {
        plan.compare(given, "reference", &references.iter().map(String::as_str).collect::<Vec<_>>(), searched);
    } else {
        for (i, digest) in references.iter().enumerate() {
            plan.file("reference", &format!("reference {}", i + 1), digest, &IMAGES, searched);
        }
    }
    let decides_size = match init {
        // Another init image has its own size and mask.
        Some(init) if has(&["init"]) => {
            plan.compare(given, "init", &[&init.sha256], searched);
            !plan.changed && plan_init(&mut plan, init, given, searched)
        }
        Some(init) => {
            plan.file("init", "the init image", &init.sha256, &IMAGES, searched);
            plan_init(&mut plan, init, given, searched)
        }
        None => {
            plan.changed |= has(&["init"]);
            !plan.changed
        }
    };
    if decides_size && !has(&["aspect", "megapixels"]) {
        // A frame is added to the size that flags give.
        let [left, top, right, bottom] = init.as_ref().map_or([0; 4], frame);
        for (name, side) in [("width", width.saturating_sub(left + right)), ("height", height.saturating_sub(top + bottom))] {
            if !given.has(name) {
                plan.flag(name, side.to_string());
            }
        }
    }
    plan
}

/// The seed and the generator of the noise, or its file.
fn plan_noise(plan: &mut Plan, seed: Option<u64>, noise: &NoiseMetadata, given: &Given, searched: &mut Searched) {
    let NoiseMetadata { kind: _, sms: _, threads: _, sha256 } = noise;
    match sha256 {
        Some(digest) if given.has("noise") => plan.compare(given, "noise", &[digest], searched),
        Some(digest) if !given.has("seed") => plan.file("noise", "the noise", digest, &TENSORS, searched),
        _ if given.has("noise") => plan.changed = true,
        Some(_) => {}
        None => {
            if let Some(seed) = seed.filter(|_| !given.has("seed")) {
                plan.flag("seed", seed.to_string());
            }
            if !given.has("noise-kind") {
                noise.flags().filter(|(name, _)| !given.has(name)).for_each(|(name, value)| plan.flag(name, value));
            }
        }
    }
}

/// The adapters. Their layers need not all fit: they did not when the image was made, either.
fn plan_adapters(plan: &mut Plan, adapters: &[AdapterMetadata], given: &Given, searched: &mut Searched) {
    if given.has("lora") {
        // Scales are part of the flag.
        plan.changed = true;
        return;
    }
    for AdapterMetadata { file, sha256, scale } in adapters {
        match searched.find(sha256, &TENSORS, Some(file)) {
            Some(path) => {
                let mut value = path.into_os_string();
                value.push(format!(":{scale}"));
                plan.flag("lora", value);
            }
            None => plan.missing.push(absent(&format!("the LoRA `{file}`"), sha256, "lora")),
        }
    }
    if !adapters.is_empty() && !given.has("lora-partial") {
        plan.switch("lora-partial");
    }
}

/// What is done with the init image. Returns whether flags decide its size.
fn plan_init(plan: &mut Plan, init: &InitMetadata, given: &Given, searched: &mut Searched) -> bool {
    let InitMetadata { sha256: _, strength, mask_sha256, feather, mask_crop, crop: _, extend, reference, sized } = init;
    match mask_sha256 {
        Some(digest) if given.has("mask") => plan.compare(given, "mask", &[digest], searched),
        Some(digest) => plan.file("mask", "the mask", digest, &IMAGES, searched),
        None => plan.changed |= given.has("mask"),
    }
    let text = |value: Option<usize>| value.map(|value| value.to_string());
    let options = [
        // A frame goes with a whole strength only.
        ("strength", Some(strength.to_string()).filter(|_| !given.has("extend"))),
        ("feather", text(*feather)),
        ("mask-crop", text(*mask_crop)),
        ("extend", extend.clone()),
        ("init-reference", Some(if *reference { "on" } else { "off" }.into())),
    ];
    for (name, value) in options {
        if let Some(value) = value.filter(|_| !given.has(name)) {
            plan.flag(name, value);
        }
    }
    *sized
}

/// Pixels that a frame adds at the left, at the top, at the right and at the bottom.
fn frame(init: &InitMetadata) -> [usize; 4] {
    init.extend.as_ref().and_then(|sides| sides.parse::<kiln::edit::Sides>().ok()).map_or([0; 4], kiln::edit::Sides::values)
}
