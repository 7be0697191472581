//! Decides what a request leaves open: steps, guidance, and everything else that depends on the model. This is the one place that
//! turns flags into a [`Job`], for `generate`, `bench` and `plan` alike.

use super::request::ImageRequest;
use crate::config::{Conventions, Guidance, Variant};
use crate::noise::NoiseKind;
use crate::pipeline::{Job, Noise, ReferenceInput};
use crate::reference::PreparedReference;
use crate::tensor::Precision;

/// What settings depend on beside the request.
pub struct ModelProfile<'a> {
    /// Display name.
    pub name: &'a str,
    pub variant: Variant,
    pub conventions: &'a Conventions,
    pub precision: Precision,
}

/// How the images of a request are generated.
pub struct Settings {
    /// What the engine is asked for.
    pub job: Job,
    /// The model's display name.
    pub model: String,
    pub variant: Variant,
    pub precision: Precision,
    pub guidance: Guidance,
    /// Whether classifier-free guidance runs each step twice.
    pub guided: bool,
    /// The negative prompt, if one was given.
    pub negative: Option<String>,
    /// Where the noise comes from, by the names of the flags that ask for it.
    pub noise_flags: Vec<(&'static str, String)>,
    /// What became of each reference image on its way to the model.
    pub references: Vec<String>,
}

impl Settings {
    /// Takes what was asked for, and the model's own where nothing was.
    pub fn resolve(request: ImageRequest, model: &ModelProfile<'_>) -> Self {
        let guidance = model.conventions.guide(model.variant, request.guidance);
        let references = request.references.iter().map(describe_reference).collect();
        let noise_flags = noise_flags(&request.noise);
        let input = |reference: &PreparedReference| ReferenceInput { grid: reference.grid(), pixels: reference.values() };
        let job = Job {
            prompt: request.prompt,
            size: request.size,
            steps: request.steps.unwrap_or(model.conventions.steps(model.variant)),
            negative: request.negative.clone().unwrap_or_default(),
            references: request.references.iter().map(input).collect(),
            guidance: guidance.scale,
            seeds: request.seeds,
            noise: request.noise,
            record: request.record,
        };
        Self {
            job,
            model: model.name.into(),
            variant: model.variant,
            precision: model.precision,
            guidance,
            guided: model.variant.guides(guidance.scale),
            negative: request.negative,
            noise_flags,
            references,
        }
    }

    /// Prompts that are encoded: with classifier-free guidance the negative one, too.
    pub fn prompts(&self) -> usize {
        1 + usize::from(self.guided)
    }

    /// Width and height, for display.
    pub fn size(&self) -> String {
        format!("{}x{}", self.job.size.width(), self.job.size.height())
    }
}

/// The file of a reference image, its sizes on the way to the model, and its tokens.
fn describe_reference(reference: &PreparedReference) -> String {
    let mut sizes = vec![reference.original];
    sizes.extend(reference.resized);
    sizes.push((reference.width, reference.height));
    sizes.dedup();
    let sizes: Vec<String> = sizes.iter().map(|(w, h)| format!("{w}x{h}")).collect();
    format!("{}, {}, {} tokens", reference.origin.display(), sizes.join(" -> "), reference.grid().tokens())
}

/// The flags that ask for this noise, and their values.
fn noise_flags(noise: &Noise) -> Vec<(&'static str, String)> {
    match noise {
        Noise::Given(_) => vec![("noise-kind", "file".into())],
        Noise::Drawn(kind) => {
            let mut list = vec![("noise-kind", kind.to_string())];
            if let NoiseKind::TorchCuda { sms, threads } = kind {
                list.extend([("noise-sms", sms.to_string()), ("noise-threads", threads.to_string())]);
            }
            list
        }
    }
}
