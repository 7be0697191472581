//! One line of `kiln run`: a prompt, or a JSON object with a prompt and settings.

use super::super::args::{EditFlags, ImageOptions, LoraArg};
use super::super::report::field;
use super::super::request::{ImageRequest, check_nul};
use kiln::error::{Error, Result};
use kiln::metadata::AdapterMetadata;
use kiln::text::{misspelled, shown};
use kiln::{DecodedReference, ModelDefaults, Noise, NoiseKind, check_length};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The most bytes of a line. Two prompts of the largest size fit, even if every byte of them is escaped.
pub const MAX_LINE_BYTES: usize = 1 << 20;

/// The hint for a line that cannot be read.
const FIELDS: &str = "a line that begins with { is JSON; `kiln run --help` lists its fields";

/// The settings of a line. Flags, then the model, decide what a line leaves open.
#[derive(Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Line {
    pub prompt: String,
    pub size: Option<String>,
    pub seed: Option<u64>,
    pub negative: Option<String>,
    pub lora: Option<Vec<LoraArg>>,
    pub output: Option<PathBuf>,
    /// Options that are flags as well. Their JSON fields are in the same object.
    #[serde(skip)]
    pub options: ImageOptions,
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
        let fields = fields();
        let given: BTreeMap<String, IgnoredAny> = read(text)?;
        if let Some(name) = given.keys().find(|name| !fields.contains(name)) {
            let hint = misspelled(name, fields.iter().map(String::as_str)).map(|meant| format!("did you mean `{meant}`?"));
            let hint = hint.unwrap_or_else(|| FIELDS.into());
            return Err(Error::usage(format!("the line is not what was expected: unknown field `{}`", shown(name)), hint));
        }
        let options = ImageOptions { edit: read(text)?, ..read(text)? };
        let mut line = Self { options, ..read(text)? };
        line.split_size()?;
        line.options.check_sampling(field)?;
        Ok(Some(line))
    }

    /// Replaces `size` by width and height.
    fn split_size(&mut self) -> Result<()> {
        let Some(size) = self.size.take() else { return Ok(()) };
        let ImageOptions { width, height, aspect, megapixels, .. } = &mut self.options;
        if width.is_some() || height.is_some() || aspect.is_some() || megapixels.is_some() {
            return Err(Error::usage("`size` is given together with another size", "leave out one of them"));
        }
        let sides = size.split_once('x').and_then(|(width, height)| Some((width.parse().ok()?, height.parse().ok()?)));
        let sides = sides.ok_or_else(|| Error::usage(format!("`size` is \"{}\"", shown(&size)), "write \"1024x768\""))?;
        (*width, *height) = (Some(sides.0), Some(sides.1));
        Ok(())
    }

    /// Fills in settings that are not given from flags.
    pub fn with_defaults(mut self, options: &ImageOptions, negative: Option<&str>, lora: &[LoraArg]) -> Self {
        self.options = self.options.or(options);
        self.negative = self.negative.or_else(|| negative.map(String::from));
        // An empty list is a decision, too.
        self.lora.get_or_insert_with(|| lora.to_vec());
        self
    }

    /// A hash of everything but the output name, and of `more`. It is the same on every machine.
    fn hash(&self, seed: Option<u64>, more: &str) -> u64 {
        let references: Vec<_> = self.options.references.iter().map(|path| path.to_string_lossy()).collect();
        let Self { prompt, negative, .. } = self;
        let ImageOptions { width, height, steps, guidance, .. } = self.options;
        // JSON separates numbers and texts unambiguously.
        let mut content = serde_json::json!([prompt, width, height, steps, guidance, negative, references, seed, more]);
        // Lines without adapters or newer options keep the names that earlier versions gave them.
        if let Some(list) = content.as_array_mut() {
            let lora = self.lora.iter().flatten();
            list.extend(lora.map(|lora| serde_json::json!([lora.file.to_string_lossy(), lora.scale])));
            list.extend(self.options.content());
        }
        let digest = Sha256::digest(content.to_string());
        digest.iter().take(8).fold(0, |hash, byte| hash << 8 | u64::from(*byte))
    }

    /// The given seed, or one of 32 bits that is made from the rest of the line.
    pub fn seed(&self) -> u64 {
        self.seed.unwrap_or_else(|| self.hash(None, "") >> 32)
    }

    /// Identifies the image: a hash of the line, its seed and the model.
    pub fn id(&self, model: &str) -> String {
        format!("{:016x}", self.hash(Some(self.seed()), model))
    }

    /// Digests of the files whose content decides the image, apart from the model: adapters and references.
    pub fn digests(&self, adapters: &[AdapterMetadata]) -> Result<String> {
        let adapters = adapters.iter().map(|adapter| Ok(adapter.sha256.clone()));
        let EditFlags { init, mask, .. } = &self.options.edit;
        let images = self.options.references.iter().chain(init).chain(mask).map(|path| DecodedReference::digest_of(path));
        adapters.chain(images).map(|digest| Ok(format!(" {}", digest?))).collect()
    }

    /// The request for its image. Reference images are read.
    pub fn request(self, defaults: &ModelDefaults) -> Result<ImageRequest> {
        let seed = self.seed();
        let Self { prompt, negative, options, .. } = self;
        for (text, what) in [(Some(&prompt), "prompt"), (negative.as_ref(), "negative prompt")] {
            if let Some(text) = text {
                check_length(text.len())?;
                check_nul(text, what, None)?;
            }
        }
        let request = ImageRequest::new(options, defaults)?;
        Ok(ImageRequest { prompt, negative, seeds: vec![seed], noise: Noise::Drawn(NoiseKind::HOPPER), ..request })
    }
}

/// Deserializes one type from a line of JSON.
fn read<'de, T: Deserialize<'de>>(text: &'de str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| {
        // The text is always a single line, so serde's line number would only confuse.
        let what = error.to_string().replace(" at line 1 column", " at column");
        Error::usage(format!("the line is not what was expected: {what}"), FIELDS)
    })
}

/// The names of all fields.
pub fn fields() -> Vec<String> {
    let all = [
        serde_json::to_value(Line::default()),
        serde_json::to_value(ImageOptions::default()),
        serde_json::to_value(EditFlags::default()),
    ];
    all.iter().flatten().filter_map(Value::as_object).flat_map(|fields| fields.keys().cloned()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::super::args::PaddingArg;
    use super::*;
    use kiln::Sigmas;
    use std::collections::BTreeSet;

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
        let options = ImageOptions { references, width, height, steps, guidance, ..ImageOptions::default() };
        assert_eq!(full, Line { prompt, size: None, seed, negative, lora, output, options });
        let dev = line(r#"{"prompt": "x", "sigmas": [1, 0.5], "padding": "left-zeros"}"#).options;
        assert_eq!((dev.sigmas.unwrap().to_string().as_str(), dev.padding), ("1,0.5", Some(PaddingArg::LeftZeros)));
        assert_eq!(line(r#"{"prompt": "x", "sigmas": "turbo"}"#).options.sigmas.unwrap().steps(), 8);
        for empty in ["", " ", "\t\u{a0}"] {
            assert_eq!(Line::parse(empty.as_bytes()).unwrap(), None);
        }
        for (wrong, why) in [
            (r#"{"prompt": "x", "count": 2}"#, "unknown field `count`"),
            (r#"{"prompt": "x", "vae_tiling": true}"#, "unknown field `vae_tiling`"),
            (r#"{"prompt": "x", "steps": "2"}"#, "invalid type: string \"2\", expected usize at column 28"),
            (r#"{"prompt": "x", "padding": "top"}"#, "unknown variant `top`, expected one of `left`, `right`"),
            (r#"{"prompt": "x", "sigmas": [0.5, 1]}"#, "noise levels have to fall"),
            (r#"{"prompt": "x", "sigmas": 8}"#, "expected noise levels, as in \"turbo\""),
            (r#"{"prompt": "x", "sigmas": "turbo", "steps": 8}"#, "`sigmas` is given together with `steps`"),
            (r#"{"prompt": "x", "prompt": "y"}"#, "duplicate field `prompt`"),
            (r#"{"size": "64x64"}"#, "missing field `prompt`"),
            (r#"{"prompt": "x""#, "EOF"),
            (r#"{"prompt": 7}"#, "invalid type"),
            (r#"{"prompt": "x", "seed": -1}"#, "invalid value"),
            (r#"{"prompt": "x"} y"#, "trailing characters at column"),
            (r#"{"prompt": "x", "size": "64*64"}"#, "`size` is"),
            (r#"{"prompt": "x", "size": "64x64", "width": 64}"#, "together with"),
            (r#"{"prompt": "x", "steps": 0}"#, "`steps`"),
            (r#"{"prompt": "x", "guidance": 101}"#, "`guidance`"),
            (r#"{"prompt": "x", "lora": "a"}"#, "expected a sequence"),
            (r#"{"prompt": "x", "lora": [{"name": "a"}]}"#, "expected \"FILE\", \"FILE:SCALE\" or {\"file\""),
            (r#"{"prompt": "x", "lora": ["a:nan"]}"#, "expected a scale from -1000 to 1000"),
        ] {
            let error = Line::parse(wrong.as_bytes()).unwrap_err();
            assert!(error.to_string().contains(why) && error.exit_code() == 2, "{wrong}: {error}");
        }
        let hint = |text: &str| Line::parse(text.as_bytes()).unwrap_err().hint().unwrap();
        assert_eq!(hint(r#"{"prompt": "x", "guidence": 2}"#), "did you mean `guidance`?");
        assert_eq!(hint(r#"{"prompt": "x", "count": 2}"#), FIELDS);
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
        let flags = ImageOptions {
            references: vec!["r.png".into()],
            width: Some(64),
            height: Some(96),
            steps: Some(2),
            padding: Some(PaddingArg::Left),
            ..ImageOptions::default()
        };
        let lora = [LoraArg { file: "l".into(), scale: 0.5 }];
        let filled = line("x").with_defaults(&flags, Some("blurry"), &lora);
        assert_eq!(filled.options, flags);
        assert_eq!((filled.negative.as_deref(), filled.lora.as_deref()), (Some("blurry"), Some(&lora[..])));
        // Noise levels and padding are part of what names and seeds are made from.
        let sigmas: Option<Sigmas> = Some("turbo".parse().unwrap());
        let others = [
            ImageOptions { padding: None, steps: None, ..flags.clone() },
            ImageOptions { steps: None, ..flags.clone() },
            ImageOptions { steps: None, padding: None, sigmas, ..flags.clone() },
        ];
        let of = |text: &str, flags| line(text).with_defaults(flags, None, &lora);
        let [plain, padded, turbo] = others.each_ref().map(|flags| of("x", flags));
        assert!(plain.seed() != padded.seed() && plain.seed() != turbo.seed() && turbo.options.sigmas.is_some());
        // However that is said.
        assert_eq!(of(r#"{"prompt": "x", "sigmas": "turbo"}"#, &others[0]).id("m"), turbo.id("m"));
        assert_eq!(of(r#"{"prompt": "x", "padding": "left"}"#, &others[0]).id("m"), padded.id("m"));
        assert!(of(r#"{"prompt": "x", "steps": 3}"#, &others[2]).options.sigmas.is_none());
        assert_eq!(of(r#"{"prompt": "x", "sigmas": [1]}"#, &flags).options.steps, None);
        let bare = of(r#"{"prompt": "x", "lora": []}"#, &flags);
        assert_eq!(bare.lora.as_deref(), Some(&[][..]));
        let own = line(r#"{"prompt": "x", "width": 128, "steps": 9, "negative": "", "references": ["o.png"]}"#);
        let own = own.with_defaults(&flags, Some("blurry"), &lora);
        assert_eq!((own.options.width, own.options.height, own.options.steps), (Some(128), None, Some(9)));
        assert_eq!((own.negative.as_deref(), &*own.options.references), (Some(""), &["o.png".into()][..]));
    }

    #[test]
    fn the_documentation_has_every_field() {
        let page = include_str!("../../../../../docs/cli.md");
        let (_, table) = page.split_once("\n| field | meaning |\n").unwrap();
        let (table, _) = table.split_once("\n\n").unwrap();
        fields().iter().for_each(|name| assert!(table.contains(&format!("`{name}`")), "{name}"));
        assert!(fields().len() > 12);
        let schema: Value = serde_json::from_str(include_str!("../../../../../docs/schema.json")).unwrap();
        let described = schema["$defs"]["line"]["properties"].as_object().unwrap().keys().cloned();
        assert_eq!(described.collect::<BTreeSet<_>>(), fields().into_iter().collect());
    }
}
