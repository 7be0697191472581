//! Properties of a model that no tensor and no `config.json` holds: which text encoder layers give the prompt embeddings, the length
//! of padded prompts, and the default settings of generation. FLUX.2 \[klein\] fixes these by convention. Another model states them
//! in a `kiln.json` next to its `model_index.json`, where a missing key means klein's value.

use super::{ConfigFile, PreviewTable, TEXT_TOKENS, Variant};
use crate::error::{Error, Result};
use crate::reference::AREA_CAP;
use crate::sequence::Pixels;
use crate::text::shown_text;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Every key of a `kiln.json`.
const KEYS: &str =
    "name, variant, text_layers, max_text_tokens, width, height, steps, guidance, max_reference_pixels, words, draws, preview";

/// Longest display name, in characters. The name shares a line with other text.
const MAX_NAME: usize = 64;

/// Longest description of what the model draws, in characters.
const MAX_DRAWS: usize = 256;

/// Allowed lengths of a padded prompt. The chat template alone takes a dozen tokens, so fewer than 16 leave no room for a prompt;
/// four times klein's length bounds the work.
const ALLOWED_TEXT_TOKENS: std::ops::RangeInclusive<usize> = 16..=2048;

/// Allowed areas of a reference image, from the smallest image to four times klein's limit.
const REFERENCE_PIXELS: std::ops::RangeInclusive<usize> = 64 * 64..=4 * AREA_CAP;

/// A model's defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelDefaults {
    /// The `kiln.json` that the defaults were read from, if there is one.
    pub path: Option<PathBuf>,
    /// The model's display name.
    pub name: Option<String>,
    /// How the model was trained. If this is missing, kiln detects it from the files and their names.
    pub variant: Option<Variant>,
    /// The prompt embeddings are the text encoder's residual stream after each of these numbers of layers. `None` means the family's
    /// layers.
    pub text_layers: Option<[usize; 3]>,
    /// Number of tokens of a padded prompt.
    pub max_text_tokens: usize,
    /// Default width of an image.
    pub width: usize,
    /// Default height of an image.
    pub height: usize,
    /// Reference images with more pixels are shrunk to this number.
    pub max_reference_pixels: usize,
    /// Default number of steps of `variant`, if it differs from klein's.
    pub steps: Option<usize>,
    /// Default guidance scale of `variant`, if it differs from klein's.
    pub guidance: Option<f32>,
    /// All words of the training prompts, in lower case with spaces between. If this is missing, kiln reports no word as unknown.
    pub words: Option<String>,
    /// A line for display that says what the model draws.
    pub draws: Option<String>,
    /// The colors of latents, for previews. If this is missing, kiln takes FLUX.2's for a VAE with the widths of FLUX.2's encoder.
    pub preview: Option<PreviewTable>,
}

/// The guidance scale of an image.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guidance {
    /// The scale for display; `None` for a variant that uses no guidance.
    pub chosen: Option<f32>,
    /// The scale for models that take it as an input. A variant that uses no guidance gets the scale it was trained with.
    pub scale: f32,
    /// Whether a scale was requested that the variant does not use.
    pub ignored: bool,
}

impl ModelDefaults {
    /// The defaults of FLUX.2 klein.
    pub const fn klein() -> Self {
        Self {
            path: None,
            name: None,
            variant: None,
            text_layers: None,
            max_text_tokens: TEXT_TOKENS,
            width: 1024,
            height: 1024,
            max_reference_pixels: AREA_CAP,
            steps: None,
            guidance: None,
            words: None,
            draws: None,
            preview: None,
        }
    }

    /// Reads a `kiln.json`.
    pub fn read(path: &Path) -> Result<Self> {
        Self::of(&ConfigFile::read(path)?).map_err(with_keys)
    }

    /// Parses the content of a `kiln.json`; `path` is where it came from, for messages.
    pub fn parse(path: &Path, text: &[u8]) -> Result<Self> {
        Self::of(&ConfigFile::parse(path, text)?).map_err(with_keys)
    }

    fn of(file: &ConfigFile) -> Result<Self> {
        if let Some(key) = file.keys().find(|key| KEYS.split(", ").all(|known| known != *key)) {
            let key: String = key.chars().take(MAX_NAME).collect();
            return Err(Error::bad_file(file.path(), "invalid configuration", format!("unknown key `{}`", key.escape_debug())));
        }
        let klein = Self::klein();
        let within = |key: &str, range: std::ops::RangeInclusive<usize>| {
            let need = format!("a whole number from {} to {}", range.start(), range.end());
            file.take(key, &need, |value| whole(value).filter(|n| range.contains(n)))
        };
        let line = |key: &str, longest: usize| {
            file.take(key, "a short text in one line", |value| {
                let text = value.as_str()?;
                let plain = !text.is_empty() && text.chars().count() <= longest && text == shown_text(text);
                plain.then(|| text.to_owned())
            })
        };
        let layers = file.take("text_layers", "three whole numbers above 0, ascending", |value| {
            let list: [usize; 3] = value.as_array()?.iter().map(whole).collect::<Option<Vec<_>>>()?.try_into().ok()?;
            (list[0] > 0 && list[0] < list[1] && list[1] < list[2]).then_some(list)
        })?;
        let side = |key: &str| {
            // A side is valid if a square with it is. Every image checks whether width, height and prompt fit together.
            file.take(key, "a multiple of 16, at least 64", |value| whole(value).filter(|&n| Pixels::new(n, n).is_ok()))
        };
        Ok(Self {
            path: Some(file.path().into()),
            name: line("name", MAX_NAME)?,
            variant: file.take("variant", "distilled, base, kv or dev", |value| value.as_str()?.parse().ok())?,
            text_layers: layers,
            max_text_tokens: within("max_text_tokens", ALLOWED_TEXT_TOKENS)?.unwrap_or(klein.max_text_tokens),
            width: side("width")?.unwrap_or(klein.width),
            height: side("height")?.unwrap_or(klein.height),
            max_reference_pixels: within("max_reference_pixels", REFERENCE_PIXELS)?.unwrap_or(klein.max_reference_pixels),
            steps: within("steps", 1..=1000)?,
            guidance: file.take("guidance", "a number from 0 to 100", |value| {
                value.as_f64().filter(|scale| (0.0..=100.0).contains(scale)).map(|scale| scale as f32)
            })?,
            words: file.take("words", "words in lower case with spaces between", |value| {
                let words = value.as_str().filter(|words| words.to_lowercase() == **words)?;
                let plain = words.split_whitespace().next().is_some() && !words.contains(char::is_control);
                plain.then(|| words.into())
            })?,
            draws: line("draws", MAX_DRAWS)?,
            preview: file.take("preview", "33 rows of three numbers", PreviewTable::of_json)?,
        })
    }

    /// The default number of steps. The file's value applies only to the variant that the file names.
    pub fn steps(&self, variant: Variant) -> usize {
        self.steps.filter(|_| self.is_for(variant)).unwrap_or(variant.spec().steps)
    }

    /// The default guidance scale.
    pub fn guidance(&self, variant: Variant) -> f32 {
        self.guidance.filter(|_| self.is_for(variant)).unwrap_or(variant.spec().guidance)
    }

    /// The guidance scale of an image: the requested one or else the default. A variant that uses no guidance gets none.
    pub fn guide(&self, variant: Variant, asked: Option<f32>) -> Guidance {
        let own = self.guidance(variant);
        let chosen = variant.spec().guided_by.map(|_| asked.unwrap_or(own));
        Guidance { chosen, scale: chosen.unwrap_or(own), ignored: asked.is_some() && chosen.is_none() }
    }

    fn is_for(&self, variant: Variant) -> bool {
        self.variant.is_none_or(|own| own == variant)
    }

    /// Fails if the text encoder is not deep enough. `have` is the number of layers in its files. `whole` is the number of layers of
    /// the complete encoder, if known: files may leave out unused layers. The very last layer cannot be a text layer, because in
    /// training its output has passed the final norm.
    pub(super) fn check_depth(&self, have: usize, whole: Option<usize>) -> Result<()> {
        let (Some(path), Some([.., last])) = (&self.path, self.text_layers) else { return Ok(()) };
        let detail = if last > have {
            format!("`text_layers` ends with {last}, the text encoder's files have {have} layers")
        } else if let Some(whole) = whole.filter(|whole| last >= *whole) {
            format!("`text_layers` ends with {last}, which has to be less than the text encoder's {whole} layers")
        } else {
            return Ok(());
        };
        Err(with_keys(Error::bad_file(path, "configuration does not fit the weights", detail)))
    }
}

fn whole(value: &Value) -> Option<usize> {
    usize::try_from(value.as_u64()?).ok()
}

fn with_keys(error: Error) -> Error {
    error.with_hint(format!("kiln.json may say {KEYS}; what it leaves out is as in klein"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ModelDefaults> {
        ModelDefaults::parse(Path::new("m/kiln.json"), text.as_bytes())
    }

    #[test]
    fn missing_keys_default_to_klein() {
        let path = Some(PathBuf::from("m/kiln.json"));
        assert_eq!(parse("{}").unwrap(), ModelDefaults { path: path.clone(), ..ModelDefaults::klein() });
        assert_eq!(parse(r#"{"steps": null, "width": null}"#).unwrap(), parse("{}").unwrap());
        let found = parse(r#"{"height": 512, "guidance": 2}"#).unwrap();
        assert_eq!((found.width, found.height, found.steps(Variant::Base)), (1024, 512, 50));
        assert_eq!((found.guidance(Variant::Base), found.guidance(Variant::Kv)), (2.0, 2.0));
        let all = r#"{"name": "shapes", "variant": "base", "text_layers": [1, 2, 4], "max_text_tokens": 64, "width": 256,
            "height": 320, "steps": 7, "guidance": 2.5, "max_reference_pixels": 65536, "words": "a red star", "draws": "stars"}"#;
        let want = ModelDefaults {
            path,
            name: Some("shapes".into()),
            variant: Some(Variant::Base),
            text_layers: Some([1, 2, 4]),
            max_text_tokens: 64,
            width: 256,
            height: 320,
            max_reference_pixels: 65536,
            steps: Some(7),
            guidance: Some(2.5),
            words: Some("a red star".into()),
            draws: Some("stars".into()),
            preview: None,
        };
        let found = parse(all).unwrap();
        assert_eq!(found, want);
        assert_eq!((found.steps(Variant::Base), found.guidance(Variant::Base)), (7, 2.5));
        // The file's values do not apply to another variant.
        assert_eq!((found.steps(Variant::Distilled), found.guidance(Variant::Distilled)), (4, 1.0));
        let guide = |variant, asked| {
            let Guidance { chosen, scale, ignored } = found.guide(variant, asked);
            (chosen, scale, ignored)
        };
        assert_eq!(guide(Variant::Base, None), (Some(2.5), 2.5, false));
        assert_eq!(guide(Variant::Base, Some(0.5)), (Some(0.5), 0.5, false));
        assert_eq!(guide(Variant::Distilled, Some(7.0)), (None, 1.0, true));
        assert_eq!(guide(Variant::Kv, None), (None, 1.0, false));
    }

    #[test]
    fn invalid_values_are_reported_by_key() {
        for (text, detail) in [
            ("", "EOF while parsing"),
            ("[]", "not an object"),
            ("{", "EOF while parsing"),
            ("\u{feff}{}", "expected value"),
            (r#"{"stpes": 4}"#, "unknown key `stpes`"),
            (r#"{"\u001b[2J": 4}"#, r"unknown key `\u{1b}[2J`"),
            (r#"{"name": ""}"#, "`name` is \"\", needed is a short text in one line"),
            (r#"{"name": 7}"#, "`name` is 7, needed is"),
            (r#"{"name": "a\nb"}"#, "`name` is"),
            (r#"{"variant": "turbo"}"#, "`variant` is \"turbo\", needed is distilled, base, kv or dev"),
            (r#"{"text_layers": [1, 2]}"#, "`text_layers` is [1,2], needed is three whole numbers above 0, ascending"),
            (r#"{"text_layers": [1, 2, 3, 4]}"#, "`text_layers` is"),
            (r#"{"text_layers": [2, 2, 4]}"#, "`text_layers` is"),
            (r#"{"text_layers": [4, 2, 1]}"#, "`text_layers` is"),
            (r#"{"text_layers": [0, 2, 4]}"#, "`text_layers` is"),
            (r#"{"text_layers": [1, 2.5, 4]}"#, "`text_layers` is"),
            (r#"{"text_layers": [-1, 2, 4]}"#, "`text_layers` is"),
            (r#"{"text_layers": 4}"#, "`text_layers` is 4"),
            (r#"{"max_text_tokens": 0}"#, "`max_text_tokens` is 0, needed is a whole number from 16 to 2048"),
            (r#"{"max_text_tokens": 100000}"#, "`max_text_tokens` is"),
            (r#"{"width": 250}"#, "`width` is 250, needed is a multiple of 16, at least 64"),
            (r#"{"width": 48}"#, "`width` is 48"),
            (r#"{"height": 18446744073709551615}"#, "`height` is"),
            (r#"{"height": "256"}"#, "`height` is \"256\""),
            (r#"{"steps": 0}"#, "`steps` is 0, needed is a whole number from 1 to 1000"),
            (r#"{"steps": 1e9}"#, "`steps` is"),
            (r#"{"guidance": -1}"#, "`guidance` is -1, needed is a number from 0 to 100"),
            (r#"{"guidance": 1e30}"#, "`guidance` is"),
            (r#"{"words": ["a", "star"]}"#, "`words` is [\"a\",\"star\"], needed is words in lower case with spaces between"),
            (r#"{"words": " "}"#, "`words` is"),
            (r#"{"words": "a Star"}"#, "`words` is"),
            (r#"{"draws": "a\u202eb"}"#, "`draws` is"),
            (r#"{"preview": [[1, 2, 3]]}"#, "`preview` is [[1,2,3]], needed is 33 rows of three numbers"),
            (r#"{"draws": ["stars"]}"#, "`draws` is [\"stars\"], needed is a short text in one line"),
            (r#"{"max_reference_pixels": 100}"#, "`max_reference_pixels` is 100, needed is a whole number from 4096 to"),
        ] {
            let error = parse(text).unwrap_err();
            let message = error.to_string();
            assert!(message.contains(" (m/kiln.json): ") && message.contains(detail), "{text}: {message}");
            assert_eq!(error.exit_code(), 3);
            if text.starts_with('{') && text.len() > 1 {
                assert!(error.hint().unwrap().starts_with("kiln.json may say name, variant, text_layers"), "{text}");
            }
        }
    }

    #[test]
    fn no_key_may_be_there_twice() {
        for (text, detail) in [
            (r#"{"steps": 4, "width": 64, "steps": 5}"#, "`steps` is there twice at line 1 column 33"),
            (r#"{"steps": 4, "\u0073teps": 4}"#, "`steps` is there twice at line 1 column 25"),
            (r#"{"name": {"a": [{"b": 1, "b": 1}]}}"#, "`b` is there twice at line 1 column 28"),
        ] {
            assert_eq!(parse(text).unwrap_err().to_string(), format!("invalid configuration (m/kiln.json): {detail}"));
        }
    }

    #[test]
    fn the_final_layer_cannot_be_tapped() {
        let found = parse(r#"{"text_layers": [1, 2, 4]}"#).unwrap();
        // Layers in the files, layers of the whole encoder, and whether kiln accepts the file.
        for (have, whole, fine) in
            [(5, Some(5), true), (4, None, true), (4, Some(5), true), (4, Some(4), false), (3, None, false), (3, Some(36), false)]
        {
            assert_eq!(found.check_depth(have, whole).is_ok(), fine, "{have} {whole:?}");
        }
        let error = found.check_depth(4, Some(4)).unwrap_err().to_string();
        assert!(
            error.contains("(m/kiln.json): `text_layers` ends with 4, which has to be less than the text encoder's 4 layers"),
            "{error}"
        );
        // Without a `kiln.json` a missing layer is reported later, as a missing tensor.
        assert!(ModelDefaults::klein().check_depth(3, None).is_ok());
    }
}
