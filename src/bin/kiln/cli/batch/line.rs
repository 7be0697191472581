//! One line of `kiln run`: a prompt, or a JSON object with a prompt and settings of its own.

use super::super::args::{LoraArg, PaddingArg, ShapeArgs};
use super::super::request::{ImageRequest, check_nul};
use kiln::error::{Error, Result};
use kiln::text::shown;
use kiln::{Conventions, Grid, Noise, NoiseKind, Padding, PreparedReference, SequencePlan, Sigmas, check_length};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::path::PathBuf;

/// The most bytes of a line. Two prompts of the largest size fit, even if every byte of them is escaped.
pub const MAX_LINE_BYTES: usize = 1 << 20;

/// What a line asks for; what it leaves open is decided by flags, and then by the model.
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Line {
    pub prompt: String,
    pub size: Option<String>,
    pub width: Option<usize>,
    pub height: Option<usize>,
    pub steps: Option<usize>,
    pub seed: Option<u64>,
    pub guidance: Option<f32>,
    pub negative: Option<String>,
    #[serde(default)]
    pub references: Vec<PathBuf>,
    pub lora: Option<Vec<LoraArg>>,
    pub output: Option<PathBuf>,
    /// Of flags alone.
    #[serde(skip)]
    pub sigmas: Option<Sigmas>,
    #[serde(skip)]
    pub padding: Option<PaddingArg>,
}

impl Line {
    /// Reads a line without its newline; `None` if it is empty.
    pub fn parse(bytes: &[u8]) -> Result<Option<Self>> {
        let text = std::str::from_utf8(bytes).map_err(|error| {
            let what = format!("the line is not valid UTF-8 at byte {}", error.valid_up_to());
            Error::usage(what, "save the file as UTF-8")
        })?;
        if text.trim().is_empty() {
            return Ok(None);
        }
        if !text.trim_start().starts_with('{') {
            return Ok(Some(Self { prompt: text.into(), ..Self::default() }));
        }
        let hint = "a line that begins with { is JSON; `kiln run --help` lists its fields";
        let mut line: Self = serde_json::from_str(text).map_err(|error| {
            // A line is all there is, so its number would only confuse.
            let what = error.to_string().replace(" at line 1 column", " at column");
            Error::usage(format!("the line is not what was expected: {what}"), hint)
        })?;
        line.split_size()?;
        line.check_numbers()?;
        Ok(Some(line))
    }

    /// Replaces `size` by width and height.
    fn split_size(&mut self) -> Result<()> {
        let Some(size) = self.size.take() else { return Ok(()) };
        if self.width.is_some() || self.height.is_some() {
            return Err(Error::usage("`size` is given beside `width` or `height`", "leave out one of them"));
        }
        let sides = size.split_once('x').and_then(|(width, height)| Some((width.parse().ok()?, height.parse().ok()?)));
        let (width, height) =
            sides.ok_or_else(|| Error::usage(format!("`size` is \"{}\"", shown(&size)), "write \"1024x768\""))?;
        (self.width, self.height) = (Some(width), Some(height));
        Ok(())
    }

    /// The limits of the flags of the same names.
    fn check_numbers(&self) -> Result<()> {
        if self.steps.is_some_and(|steps| !(1..=1000).contains(&steps)) {
            return Err(Error::usage("`steps` is out of range", "expected a whole number from 1 to 1000"));
        }
        if self.guidance.is_some_and(|scale| !(0.0..=100.0).contains(&scale)) {
            return Err(Error::usage("`guidance` is out of range", "expected a number from 0 to 100"));
        }
        Ok(())
    }

    /// Fills in what flags say.
    pub fn with_defaults(mut self, shape: &ShapeArgs, negative: Option<&str>, lora: &[LoraArg]) -> Self {
        // A size is one decision: a line with one side is not completed by the other side of a flag.
        if self.width.is_none() && self.height.is_none() {
            (self.width, self.height) = (shape.width, shape.height);
        }
        self.steps = self.steps.or(shape.steps);
        // A line with a number of steps wants even ones.
        self.sigmas = shape.sigmas.clone().filter(|_| self.steps.is_none());
        self.padding = shape.padding;
        self.guidance = self.guidance.or(shape.guidance);
        self.negative = self.negative.or_else(|| negative.map(String::from));
        if self.references.is_empty() {
            self.references.clone_from(&shape.reference);
        }
        // An empty list is a decision, too.
        self.lora.get_or_insert_with(|| lora.to_vec());
        self
    }

    /// A hash of everything but the name of the file, and of what `more` adds. It is the same on every machine.
    fn hash(&self, seed: Option<u64>, more: &str) -> u64 {
        let references: Vec<_> = self.references.iter().map(|path| path.to_string_lossy()).collect();
        let Self { prompt, width, height, steps, guidance, negative, .. } = self;
        // As a value its numbers and texts cannot run into each other.
        let mut content = serde_json::json!([prompt, width, height, steps, guidance, negative, references, seed, more]);
        // Lines without adapters have the names that they had before there were any.
        if let (Some(list), Some(lora)) = (content.as_array_mut(), self.lora.as_ref().filter(|lora| !lora.is_empty())) {
            list.extend(lora.iter().map(|lora| serde_json::json!([lora.file.to_string_lossy(), lora.scale])));
        }
        let more = [self.sigmas.as_ref().map(Sigmas::to_string), self.padding.map(|padding| Padding::from(padding).to_string())];
        if let Some(list) = content.as_array_mut() {
            list.extend(more.into_iter().flatten().map(serde_json::Value::from));
        }
        let digest = Sha256::digest(content.to_string());
        digest.iter().take(8).fold(0, |hash, byte| hash << 8 | u64::from(*byte))
    }

    /// The seed: the given one, or one of 32 bits that is made from the rest.
    pub fn seed(&self) -> u64 {
        self.seed.unwrap_or_else(|| self.hash(None, "") >> 32)
    }

    /// What tells this picture from others: a hash of the line, its seed and the model.
    pub fn id(&self, model: &str) -> String {
        format!("{:016x}", self.hash(Some(self.seed()), model))
    }

    /// The request for its image. Reference images are read.
    pub fn request(self, conventions: &Conventions, vae_tiling: bool) -> Result<ImageRequest> {
        let seed = self.seed();
        let Self { prompt, width, height, steps, sigmas, padding, guidance, negative, references: reference, .. } = self;
        for (text, what) in [(Some(&prompt), "prompt"), (negative.as_ref(), "negative prompt")] {
            if let Some(text) = text {
                check_length(text.len())?;
                check_nul(text, what, None)?;
            }
        }
        let shape = ImageRequest::of_shape(
            &ShapeArgs { reference, width, height, steps, sigmas, guidance, padding, vae_tiling },
            conventions,
        )?;
        let grids: Vec<Grid> = shape.references.iter().map(PreparedReference::grid).collect();
        SequencePlan::new(conventions.max_text_tokens, shape.size.grid(), &grids)?;
        Ok(ImageRequest { prompt, negative, seeds: vec![seed], noise: Noise::Drawn(NoiseKind::HOPPER), ..shape })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Line {
        Line::parse(text.as_bytes()).unwrap().unwrap()
    }

    #[test]
    fn lines_are_prompts_or_objects() {
        assert_eq!(line(" a fox "), Line { prompt: " a fox ".into(), ..Line::default() });
        assert_eq!(line("[1]").prompt, "[1]");
        let full = line(
            r#" {"prompt": "狐\n{", "size": "128x64", "steps": 3, "seed": 18446744073709551615, "guidance": 2.5, "negative": "",
               "references": ["a.png", "b c.jpg"], "lora": ["a:0.5", {"file": "b"}], "output": "x/y.webp"}"#,
        );
        let references = vec!["a.png".into(), "b c.jpg".into()];
        let (width, height) = (Some(128), Some(64));
        let (steps, seed, guidance) = (Some(3), Some(u64::MAX), Some(2.5));
        let (negative, output) = (Some(String::new()), Some("x/y.webp".into()));
        let prompt = "狐\n{".into();
        let lora = Some(vec![LoraArg { file: "a".into(), scale: 0.5 }, LoraArg { file: "b".into(), scale: 1.0 }]);
        assert_eq!(
            full,
            Line {
                prompt,
                size: None,
                width,
                height,
                steps,
                seed,
                guidance,
                negative,
                references,
                lora,
                output,
                ..Line::default()
            }
        );
        for empty in ["", " ", "\t\u{a0}"] {
            assert_eq!(Line::parse(empty.as_bytes()).unwrap(), None);
        }
        for (wrong, why) in [
            (r#"{"prompt": "x", "count": 2}"#, "unknown field `count`"),
            (r#"{"prompt": "x", "prompt": "y"}"#, "duplicate field `prompt`"),
            (r#"{"size": "64x64"}"#, "missing field `prompt`"),
            (r#"{"prompt": "x""#, "EOF"),
            (r#"{"prompt": 7}"#, "invalid type"),
            (r#"{"prompt": "x", "seed": -1}"#, "invalid value"),
            (r#"{"prompt": "x"} y"#, "trailing characters at column"),
            (r#"{"prompt": "x", "size": "64*64"}"#, "`size` is"),
            (r#"{"prompt": "x", "size": "64x64", "width": 64}"#, "beside"),
            (r#"{"prompt": "x", "steps": 0}"#, "`steps`"),
            (r#"{"prompt": "x", "guidance": 101}"#, "`guidance`"),
            (r#"{"prompt": "x", "lora": "a"}"#, "expected a sequence"),
            (r#"{"prompt": "x", "lora": [{"name": "a"}]}"#, "expected \"FILE\", \"FILE:SCALE\" or {\"file\""),
            (r#"{"prompt": "x", "lora": ["a:nan"]}"#, "expected a finite scale"),
        ] {
            let error = Line::parse(wrong.as_bytes()).unwrap_err();
            assert!(error.to_string().contains(why) && error.exit_code() == 2, "{wrong}: {error}");
        }
        assert!(Line::parse(b"a\xff").unwrap_err().to_string().contains("at byte 1"));
    }

    #[test]
    fn names_and_seeds_follow_from_the_content() {
        let plain = line("a fox");
        // These are promises: the files of earlier versions are found again.
        assert_eq!((plain.seed(), plain.id("m").as_str()), (676_682_238, "6929d0ae274b674f"));
        assert!(plain.seed() < 1 << 32);
        let same = line(r#"{"prompt": "a fox", "output": "elsewhere.png"}"#);
        assert_eq!((same.seed(), same.id("m")), (plain.seed(), plain.id("m")));
        let others = [
            r#"{"prompt": "a fox "}"#,
            r#"{"prompt": "a fox", "seed": 7}"#,
            r#"{"prompt": "a fox", "width": 64}"#,
            r#"{"prompt": "a fox", "height": 64}"#,
            r#"{"prompt": "a fox", "steps": 4}"#,
            r#"{"prompt": "a fox", "guidance": 4}"#,
            r#"{"prompt": "a fox", "negative": ""}"#,
            r#"{"prompt": "a fox", "references": ["a fox"]}"#,
            r#"{"prompt": "a fox", "lora": ["a fox"]}"#,
            r#"{"prompt": "a fox", "lora": ["a fox:2"]}"#,
            r#"{"prompt": "a fox", "lora": ["a fox", "a fox"]}"#,
        ];
        let mut ids: Vec<String> = others.iter().map(|text| line(text).id("m")).chain([plain.id("m"), plain.id("n")]).collect();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), others.len() + 2);
        let none = line(r#"{"prompt": "a fox", "lora": []}"#);
        assert_eq!((none.seed(), none.id("m")), (plain.seed(), plain.id("m")), "no adapters, however that is said");
        // The model does not change the seed, so that two of them can be compared.
        let given = Line { seed: Some(plain.seed()), ..line("a fox") };
        assert_eq!(given.id("m"), plain.id("m"));
    }

    #[test]
    fn flags_fill_in_what_a_line_leaves_open() {
        let shape = ShapeArgs {
            reference: vec!["r.png".into()],
            width: Some(64),
            height: Some(96),
            steps: Some(2),
            sigmas: None,
            guidance: None,
            padding: Some(PaddingArg::Left),
            vae_tiling: false,
        };
        let lora = [LoraArg { file: "l".into(), scale: 0.5 }];
        let filled = line("x").with_defaults(&shape, Some("blurry"), &lora);
        assert_eq!((filled.width, filled.height, filled.steps), (Some(64), Some(96), Some(2)));
        assert_eq!((filled.negative.as_deref(), &*filled.references), (Some("blurry"), &["r.png".into()][..]));
        assert_eq!(filled.lora.as_deref(), Some(&lora[..]));
        // Noise levels and padding are part of what names and seeds are made from.
        let sigmas: Option<Sigmas> = Some("turbo".parse().unwrap());
        let shapes = [
            ShapeArgs { padding: None, steps: None, ..shape.clone() },
            ShapeArgs { steps: None, ..shape.clone() },
            ShapeArgs { steps: None, padding: None, sigmas, ..shape.clone() },
        ];
        let [plain, padded, turbo] = shapes.each_ref().map(|shape| line("x").with_defaults(shape, None, &lora));
        assert!(plain.seed() != padded.seed() && plain.seed() != turbo.seed() && turbo.sigmas.is_some());
        assert!(line(r#"{"prompt": "x", "steps": 3}"#).with_defaults(&shapes[2], None, &lora).sigmas.is_none());
        let bare = line(r#"{"prompt": "x", "lora": []}"#).with_defaults(&shape, None, &lora);
        assert_eq!(bare.lora.as_deref(), Some(&[][..]));
        let own = line(r#"{"prompt": "x", "width": 128, "steps": 9, "negative": "", "references": ["o.png"]}"#);
        let own = own.with_defaults(&shape, Some("blurry"), &lora);
        assert_eq!((own.width, own.height, own.steps), (Some(128), None, Some(9)));
        assert_eq!((own.negative.as_deref(), &*own.references), (Some(""), &["o.png".into()][..]));
    }
}
