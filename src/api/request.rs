//! A request with checked values.

use super::fields::{Fields, Given};
use super::{ApiError, ApiResult, Part};
use crate::edit::{Aspect, EditOptions, FEATHER, InitReference, MASK_CROP, Sides, Strength};
use crate::image::Format;
use crate::noise::NoiseKind;
use crate::progress::PreviewKind;
use crate::sequence::Pixels;
use crate::tensor::Precision;
use crate::tokenizer::check_length;
use serde_json::Value;

/// The most images of a request.
pub const MAX_COUNT: u32 = 10;

/// The most images to edit or combine.
pub const MAX_IMAGES: usize = 10;

/// The most steps. Whoever wants more has a machine of their own.
pub const MAX_STEPS: usize = 64;

/// The largest guidance scale.
const MAX_GUIDANCE: f32 = 30.0;

/// The most adapters.
const MAX_ADAPTERS: usize = 8;

/// The largest magnitude of an adapter's scale.
const MAX_SCALE: f32 = 1000.0;

/// Fields that are checked for their type, and have no effect.
const WITHOUT_EFFECT: [&str; 4] = ["style", "moderation", "input_fidelity", "complexity"];

/// Fields that would change the image, and that kiln cannot honor.
const UNSUPPORTED: [&str; 3] = ["markup", "frame_count", "svg"];

/// Which of OpenAI's routes a request came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// `/v1/images/generations`.
    Generations,
    /// `/v1/images/edits`.
    Edits,
}

/// How images are handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// In the answer, in base64.
    Base64,
    /// By a URL.
    Url,
}

/// An adapter by its name on the server. It is never a path.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterChoice {
    /// The name.
    pub name: String,
    /// The scale.
    pub scale: f32,
}

/// The file of an image that came with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upload {
    /// The field that it came in, such as `image[1]`.
    pub place: String,
    /// The file.
    pub bytes: Vec<u8>,
}

/// A request for images.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The route.
    pub route: Route,
    /// The prompt.
    pub prompt: String,
    /// The negative prompt.
    pub negative: Option<String>,
    /// The model's name, as the client gave it.
    pub model: Option<String>,
    /// How many images.
    pub count: u32,
    /// The seed of the first image; random if absent.
    pub seed: Option<u64>,
    /// Denoising steps.
    pub steps: Option<usize>,
    /// The guidance scale.
    pub guidance: Option<f32>,
    /// Width and height; absent ones follow from images and model.
    pub size: (Option<usize>, Option<usize>),
    /// The shape, instead of a size.
    pub aspect: Option<Aspect>,
    /// Images to edit or combine, in order.
    pub images: Vec<Upload>,
    /// The image to start from.
    pub init: Option<Upload>,
    /// The mask.
    pub mask: Option<Upload>,
    /// What is done with the image to start from.
    pub edit: EditOptions,
    /// Adapters.
    pub adapters: Vec<AdapterChoice>,
    /// The precision that the client expects.
    pub precision: Option<Precision>,
    /// The noise generator.
    pub noise: Option<NoiseKind>,
    /// The file format, if the client chose one.
    pub format: Option<Format>,
    /// The quality of JPEGs.
    pub jpeg_quality: u8,
    /// How images are handed over.
    pub delivery: Delivery,
    /// Whether the answer is a stream of events.
    pub stream: bool,
    /// How many previews the stream has.
    pub partial_images: u8,
    /// How previews are made, if the client chose a way.
    pub preview: Option<PreviewKind>,
    /// Whether the stream has events of progress.
    pub progress: bool,
    /// What the client calls the quality. It has no effect, and the answer repeats it.
    pub quality: String,
    /// For whom the client asks. It is a key for fair shares, and is never logged.
    pub user: Option<String>,
    /// Fields that are not known.
    pub ignored: Vec<String>,
}

impl Request {
    /// Reads a JSON body.
    pub fn of_json(route: Route, body: &[u8]) -> ApiResult<Self> {
        Self::of_fields(route, Fields::of_json(body)?)
    }

    /// Reads the parts of a form, in their order.
    pub fn of_form(route: Route, parts: Vec<(String, Part)>) -> ApiResult<Self> {
        Self::of_fields(route, Fields::of_form(parts)?)
    }

    fn of_fields(route: Route, mut all: Fields) -> ApiResult<Self> {
        let fields = &mut all;
        let prompt = fields.text(&["prompt"])?.ok_or_else(|| ApiError::new("invalid_value", "prompt", "there is no prompt"))?;
        check_text("prompt", &prompt)?;
        let negative = fields.text(&["negative_prompt", "negative"])?;
        negative.iter().try_for_each(|text| check_text("negative_prompt", text))?;
        let model = fields.text(&["model"])?;
        let size = size(fields)?;
        let aspect = fields.parsed(&["aspect", "aspect_ratio"])?;
        if aspect.is_some() && size != (None, None) {
            return Err(ApiError::new("invalid_value", "aspect", "a size is there as well, which has a shape"));
        }
        let mut images = fields.images(&["image", "images", "ref_images", "reference_image"], MAX_IMAGES)?;
        let (mut init, mask) = (fields.image(&["init"])?, fields.image(&["mask", "mask_image"])?);
        if route == Route::Edits && images.is_empty() && init.is_none() {
            return Err(ApiError::new("invalid_value", "image", "there is no image to edit"));
        }
        let mut edit = edit(fields, size)?;
        if let (None, Some(name)) = (&init, about_init(&mask, &edit)) {
            if route == Route::Generations {
                return Err(ApiError::new("invalid_value", name, "this is about an image to start from, and there is no `init`"));
            }
            init = Some(images.remove(0));
            // With a mask, OpenAI's model sees the image as well.
            if mask.is_some() && edit.init_reference == InitReference::Auto {
                edit.init_reference = InitReference::On;
            }
        }
        if aspect.is_some() && init.is_some() {
            return Err(ApiError::new("invalid_value", "aspect", "the image to start from has a shape; `size` crops it"));
        }
        for name in UNSUPPORTED {
            if fields.take(&[name])?.is_some() {
                return Err(ApiError::new("unsupported_parameter", name, "kiln cannot honor this field"));
            }
        }
        for name in WITHOUT_EFFECT {
            fields.text(&[name])?;
        }
        fields.choice(&["background"], &[("auto", ()), ("opaque", ())])?;
        let (user, other) = (fields.text(&["safety_identifier"])?, fields.text(&["user"])?);
        let delivery = delivery(fields, model.as_deref())?;
        let (format, jpeg_quality) = format(fields)?;
        let request = Self {
            route,
            prompt,
            negative,
            count: fields.whole(&["n"], 1..=MAX_COUNT)?.unwrap_or(1),
            seed: seed(fields)?,
            steps: fields.whole(&["steps", "num_inference_steps", "step"], 1..=MAX_STEPS)?,
            guidance: fields.number(&["guidance", "guidance_scale", "true_cfg_scale", "cfg_scale"], 0.0..=MAX_GUIDANCE)?,
            size,
            aspect,
            images,
            init,
            mask,
            edit,
            adapters: fields.list(&["lora", "loras"], MAX_ADAPTERS, "adapters", adapter)?,
            precision: fields.choice(&["precision"], &[("bf16", Precision::Bf16), ("f32", Precision::F32)])?,
            noise: fields.parsed(&["noise_kind"])?,
            format,
            jpeg_quality,
            delivery,
            stream: fields.truth(&["stream"])?.unwrap_or(false),
            partial_images: fields.whole(&["partial_images"], 0..=3)?.unwrap_or(0),
            preview: fields.choice(&["preview"], &[("fast", PreviewKind::Fast), ("full", PreviewKind::Full)])?,
            progress: fields.truth(&["progress"])?.unwrap_or(false),
            quality: fields.text(&["quality"])?.unwrap_or_else(|| "auto".into()),
            user: user.or(other),
            model,
            ignored: Vec::new(),
        };
        let needless = [(request.partial_images > 0, "partial_images"), (request.progress, "progress")];
        if let Some((_, name)) = needless.into_iter().find(|(given, _)| *given && !request.stream) {
            return Err(ApiError::new("invalid_value", name, "only a stream has these events; set `stream`"));
        }
        Ok(Self { ignored: all.rest(), ..request })
    }

    /// The file format.
    pub fn format(&self) -> Format {
        self.format.unwrap_or(Format::Png)
    }
}

/// Checks a prompt's length and characters.
fn check_text(name: &str, text: &str) -> ApiResult<()> {
    check_length(text.len()).map_err(|error| ApiError::of(&error, Some(name)))?;
    match text.find('\0') {
        Some(at) => Err(ApiError::new("invalid_value", name, format!("there is a NUL character at byte {at}"))),
        None => Ok(()),
    }
}

/// The size: `auto`, `1024x768`, or width and height.
fn size(fields: &mut Fields) -> ApiResult<(Option<usize>, Option<usize>)> {
    let sides = (fields.whole(&["width"], 1..=usize::MAX)?, fields.whole(&["height"], 1..=usize::MAX)?);
    let text = fields.text(&["size"])?.filter(|text| text != "auto");
    let (size, name) = match (sides, text) {
        (sides, None) => (sides, if sides.0.is_some() { "width" } else { "height" }),
        ((None, None), Some(text)) => {
            let number = |text: &str| text.parse::<usize>().ok();
            let pair = text.split_once('x').and_then(|(width, height)| number(width).zip(number(height)));
            let (width, height) =
                pair.ok_or_else(|| ApiError::new("invalid_value", "size", "expected `auto`, or a size as in 1024x768"))?;
            ((Some(width), Some(height)), "size")
        }
        (_, Some(_)) => return Err(ApiError::new("invalid_value", "size", "`width` or `height` is there as well")),
    };
    // A side alone is checked as a square's.
    let (width, height) = (size.0.or(size.1), size.1.or(size.0));
    if let Some((width, height)) = width.zip(height) {
        Pixels::new(width, height).map_err(|error| ApiError::of(&error, Some(name)))?;
    }
    Ok(size)
}

/// The field that is about an image to start from, if there is one.
fn about_init(mask: &Option<Upload>, edit: &EditOptions) -> Option<&'static str> {
    let EditOptions { strength, feather, mask_crop, extend, init_reference, size: _ } = edit;
    let given = [
        (mask.is_some(), "mask"),
        (strength.is_some(), "strength"),
        (extend.is_some(), "extend"),
        (feather.is_some(), "feather"),
        (mask_crop.is_some(), "mask_crop"),
        (*init_reference == InitReference::On, "init_reference"),
    ];
    given.into_iter().find(|(given, _)| *given).map(|(_, name)| name)
}

/// What is done with the image to start from.
fn edit(fields: &mut Fields, size: (Option<usize>, Option<usize>)) -> ApiResult<EditOptions> {
    let feather = fields.whole(&["feather"], FEATHER)?;
    let mask_crop = fields.whole(&["mask_crop"], MASK_CROP)?;
    let when = [("auto", InitReference::Auto), ("on", InitReference::On), ("off", InitReference::Off)];
    let init_reference = fields.choice(&["init_reference"], &when)?.unwrap_or_default();
    Ok(EditOptions {
        strength: fields.parsed::<Strength>(&["strength"])?,
        feather,
        mask_crop,
        extend: fields.parsed::<Sides>(&["extend"])?,
        init_reference,
        size,
    })
}

/// The seed; -1 and none are random. It may be text, because JavaScript's numbers end at 53 bits.
fn seed(fields: &mut Fields) -> ApiResult<Option<u64>> {
    let Some(field) = fields.take(&["seed"])? else { return Ok(None) };
    match field.long_digits().as_deref() {
        Some("-1") => Ok(None),
        Some(text) if text.parse::<u64>().is_ok() => Ok(text.parse().ok()),
        _ => Err(field.refused(&format!("expected a whole number from 0 to {}, or -1", u64::MAX))),
    }
}

/// How images are handed over. Clients that were made for DALL-E read a URL without asking for one.
fn delivery(fields: &mut Fields, model: Option<&str>) -> ApiResult<Delivery> {
    let usual = if model.is_some_and(|model| model.starts_with("dall-e")) { Delivery::Url } else { Delivery::Base64 };
    Ok(fields.choice(&["response_format"], &[("b64_json", Delivery::Base64), ("url", Delivery::Url)])?.unwrap_or(usual))
}

/// The file format, and the quality of JPEGs. A compression of 100 is a JPEG in which nobody sees artifacts.
fn format(fields: &mut Fields) -> ApiResult<(Option<Format>, u8)> {
    let compression = fields.whole(&["output_compression"], 0..=100_u8)?.filter(|compression| *compression < 100);
    let quality = compression.map_or(Format::DEFAULT_QUALITY, |compression| compression.max(1));
    let kinds = [("png", Format::Png), ("jpeg", Format::Jpeg { quality }), ("webp", Format::WebP)];
    Ok((fields.choice(&["output_format"], &kinds)?, quality))
}

/// An adapter: a name, `name:scale`, or an object of both.
fn adapter(value: Given, place: &str) -> ApiResult<AdapterChoice> {
    let refused = |why: &str| ApiError::new("invalid_value", place, why);
    let (name, scale) = match value {
        Given::Json(Value::String(text)) | Given::Text(text) => match text.rsplit_once(':') {
            Some((name, scale)) => (name.to_owned(), scale.parse().map_err(|_| refused("expected a name, or name:scale"))?),
            None => (text, 1.0),
        },
        Given::Json(Value::Object(members)) => {
            let name = members.get("name").and_then(Value::as_str).ok_or_else(|| refused("expected `name`"))?;
            let scale = members
                .get("scale")
                .map_or(Some(1.0), Value::as_f64)
                .ok_or_else(|| refused("expected `scale` to be a number"))?;
            (name.to_owned(), scale as f32)
        }
        _ => return Err(refused("expected a name, name:scale, or an object of name and scale")),
    };
    if !(-MAX_SCALE..=MAX_SCALE).contains(&scale) {
        return Err(refused(&format!("expected a scale from -{MAX_SCALE} to {MAX_SCALE}")));
    }
    if name.is_empty() || name.contains(['/', '\\', '\0']) || name.starts_with('.') {
        return Err(refused("an adapter has a name, and never a path"));
    }
    Ok(AdapterChoice { name, scale })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(body: &Value) -> ApiResult<Request> {
        Request::of_json(Route::Generations, body.to_string().as_bytes())
    }

    fn form(route: Route, parts: &[(&str, &str)], files: &[(&str, &[u8])]) -> ApiResult<Request> {
        let texts = parts.iter().map(|(name, text)| ((*name).into(), Part::Text((*text).into())));
        let files = files.iter().map(|(name, bytes)| ((*name).into(), Part::File(bytes.to_vec())));
        Request::of_form(route, texts.chain(files).collect())
    }

    #[test]
    fn what_openai_clients_send() {
        // Given fields only, as the SDKs send them, and fields that another front end merges into the body.
        let request = read(&json!({"prompt": "a fox", "model": "gpt-image-1", "n": 2, "size": "1024x768", "quality": "high", "user": "u1", "stream": true, "partial_images": 2, "style": null, "free": {"deep": [1]}})).unwrap();
        assert_eq!((request.count, request.size, request.partial_images, request.stream), (2, (Some(1024), Some(768)), 2, true));
        assert_eq!((&*request.quality, request.user.as_deref(), request.delivery), ("high", Some("u1"), Delivery::Base64));
        assert_eq!((request.ignored, request.seed, request.format), (vec!["free".to_owned()], None, None));
        let small = read(&json!({"prompt": "", "model": "dall-e-3", "output_format": "jpeg"})).unwrap();
        assert_eq!((small.delivery, small.format, small.size), (Delivery::Url, Some(Format::Jpeg { quality: 95 }), (None, None)));
        // A form: the prompt last, both names of images, numbers as text.
        let parts = [("n", "1"), ("stream", "false"), ("seed", "18446744073709551615"), ("extra[a]", "1"), ("prompt", "a fox")];
        let files = [("image[]", &b"one"[..]), ("image", b"two"), ("mask", b"three")];
        let edit = form(Route::Edits, &parts, &files).unwrap();
        // A mask is about the first image, which the model also sees.
        let upload = |place: &str, bytes: &[u8]| Upload { place: place.into(), bytes: bytes.into() };
        assert_eq!((edit.init, edit.images), (Some(upload("image[0]", b"one")), vec![upload("image[1]", b"two")]));
        assert_eq!((edit.mask, edit.edit.init_reference), (Some(upload("mask", b"three")), InitReference::On));
        assert_eq!((edit.seed, edit.ignored), (Some(u64::MAX), vec!["extra[a]".to_owned()]));
    }

    #[test]
    fn names_of_other_servers() {
        let request = read(&json!({
            "prompt": "x", "num_inference_steps": 8, "guidance_scale": 3.5, "negative": "y", "seed": -1, "width": 512,
            "ref_images": ["Zm9v"], "images": null, "lora": ["style:0.5", {"name": "ink", "scale": -1}], "strength": 0.25,
            "init": "data:image/png;base64,YmFy", "extend": "256", "noise_kind": "torch-cpu", "output_compression": 0,
            "output_format": "jpeg", "preview": "full",
        }));
        let request = request.unwrap();
        assert_eq!((request.steps, request.guidance, request.negative.as_deref()), (Some(8), Some(3.5), Some("y")));
        assert_eq!(
            (request.seed, request.size, &request.images),
            (None, (Some(512), None), &vec![Upload { place: "ref_images[0]".into(), bytes: b"foo".to_vec() }])
        );
        let names: Vec<(&str, f32)> = request.adapters.iter().map(|adapter| (&*adapter.name, adapter.scale)).collect();
        assert_eq!((names, request.init.unwrap().bytes), (vec![("style", 0.5), ("ink", -1.0)], b"bar".to_vec()));
        assert_eq!((request.edit.strength.map(Strength::share), request.format), (Some(0.25), Some(Format::Jpeg { quality: 1 })));
        assert!(request.edit.extend.is_some() && request.noise == Some(NoiseKind::TorchCpu) && request.ignored.is_empty());
        for image in [
            json!("data:image/png;base64,Zm9v"),
            json!({"image_url": "data:;base64,Zm9v"}),
            json!({"image_url": {"url": "data:x;base64,Zm9v"}}),
        ] {
            assert_eq!(read(&json!({"prompt": "x", "images": [image]})).unwrap().images[0].bytes, b"foo", "{image}");
        }
    }

    #[test]
    fn wrong_values_name_their_field() {
        let wrong = [
            (json!({}), "prompt", "invalid_value"),
            (json!({"prompt": 7}), "prompt", "invalid_value"),
            (json!({"prompt": "x".repeat(32_769)}), "prompt", "invalid_value"),
            (json!({"prompt": "a\0b"}), "prompt", "invalid_value"),
            (json!({"prompt": "x", "n": 0}), "n", "invalid_value"),
            (json!({"prompt": "x", "n": "2"}), "n", "invalid_value"),
            (json!({"prompt": "x", "n": 1.5}), "n", "invalid_value"),
            (json!({"prompt": "x", "n": 11}), "n", "invalid_value"),
            (json!({"prompt": "x", "size": "1000x1000"}), "size", "invalid_value"),
            (json!({"prompt": "x", "size": "large"}), "size", "invalid_value"),
            (json!({"prompt": "x", "size": "64x64", "width": 64}), "size", "invalid_value"),
            (json!({"prompt": "x", "height": 65}), "height", "invalid_value"),
            (json!({"prompt": "x", "aspect": "16:9", "width": 64}), "aspect", "invalid_value"),
            (json!({"prompt": "x", "background": "transparent"}), "background", "unsupported_value"),
            (json!({"prompt": "x", "output_format": "gif"}), "output_format", "unsupported_value"),
            (json!({"prompt": "x", "output_compression": 101}), "output_compression", "invalid_value"),
            (json!({"prompt": "x", "stream": "true"}), "stream", "invalid_value"),
            (json!({"prompt": "x", "partial_images": 1}), "partial_images", "invalid_value"),
            (json!({"prompt": "x", "stream": true, "partial_images": 4}), "partial_images", "invalid_value"),
            (json!({"prompt": "x", "seed": -2}), "seed", "invalid_value"),
            (json!({"prompt": "x", "seed": "x"}), "seed", "invalid_value"),
            (json!({"prompt": "x", "seed": 1e3}), "seed", "invalid_value"),
            (json!({"prompt": "x", "steps": 65}), "steps", "invalid_value"),
            (json!({"prompt": "x", "steps": 4, "step": 4}), "step", "invalid_value"),
            (json!({"prompt": "x", "guidance": 31}), "guidance", "invalid_value"),
            (json!({"prompt": "x", "strength": 0}), "strength", "invalid_value"),
            (json!({"prompt": "x", "strength": 0.5}), "strength", "invalid_value"),
            (json!({"prompt": "x", "mask": "Zm9v"}), "mask", "invalid_value"),
            (json!({"prompt": "x", "init": "Zm9v", "aspect": "1:1"}), "aspect", "invalid_value"),
            (json!({"prompt": "x", "images": ["https://example.com/a.png"]}), "images[0]", "remote_images_not_supported"),
            (json!({"prompt": "x", "images": [{"file_id": "f"}]}), "images[0]", "remote_images_not_supported"),
            (json!({"prompt": "x", "images": ["Zm9v", "file:///etc/passwd"]}), "images[1]", "remote_images_not_supported"),
            (json!({"prompt": "x", "images": ["***"]}), "images[0]", "invalid_image"),
            (json!({"prompt": "x", "images": vec!["Zm9v"; 11]}), "images[10]", "invalid_value"),
            (json!({"prompt": "x", "lora": "../secret"}), "lora[0]", "invalid_value"),
            (json!({"prompt": "x", "lora": ["a:nan"]}), "lora[0]", "invalid_value"),
            (json!({"prompt": "x", "markup": "y"}), "markup", "unsupported_parameter"),
            (json!({"prompt": "x", "style": 7}), "style", "invalid_value"),
        ];
        for (body, param, code) in wrong {
            let error = read(&body).unwrap_err();
            assert_eq!((error.status, error.param.as_deref(), error.code), (400, Some(param), code), "{body}: {error}");
        }
        for body in [&b"{"[..], b"[]", b"7", b"", &[b'['; 100_000], b"\xFF"] {
            let error = Request::of_json(Route::Generations, body).unwrap_err();
            assert_eq!((error.code, error.param), ("invalid_json", None));
        }
        assert_eq!(form(Route::Edits, &[("prompt", "x")], &[]).unwrap_err().param.as_deref(), Some("image"));
        assert_eq!(
            form(Route::Generations, &[("prompt", "x"), ("prompt", "y")], &[]).unwrap_err().param.as_deref(),
            Some("prompt")
        );
        assert_eq!(form(Route::Generations, &[("prompt", "x"); 33], &[]).unwrap_err().code, "invalid_value");
        // Brackets in a text nest nothing.
        assert!(read(&json!({"prompt": "[{\"\\[[".repeat(20)})).is_ok());
    }
}
