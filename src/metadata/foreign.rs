//! Recognizes which program made an image, and finds the prompt and the seed in what it stored.

use super::parameters::Parameters;
use super::{ImageMetadata, StoredText};
use serde::de::{Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::fmt;

/// Limit on JSON of other programs, in bytes.
const MAX_JSON: usize = 256 << 10;

/// Limit on the nodes of a workflow.
const MAX_NODES: usize = 1000;

/// How many links of a workflow are followed from a sampler to a prompt.
const MAX_LINKS: usize = 16;

/// A program that makes images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// This one.
    Kiln,
    /// AUTOMATIC1111's web UI, or one of the many programs that write its form.
    A1111,
    /// stable-diffusion.cpp.
    StableDiffusionCpp,
    /// ComfyUI.
    ComfyUi,
    /// InvokeAI.
    InvokeAi,
    /// mflux.
    Mflux,
}

impl Program {
    /// The display name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kiln => "kiln",
            Self::A1111 => "AUTOMATIC1111's web UI",
            Self::StableDiffusionCpp => "stable-diffusion.cpp",
            Self::ComfyUi => "ComfyUI",
            Self::InvokeAi => "InvokeAI",
            Self::Mflux => "mflux",
        }
    }
}

/// Which program made an image, and from what, as far as the file tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Maker {
    /// The program.
    pub program: Program,
    /// The prompt.
    pub prompt: Option<String>,
    /// The negative prompt.
    pub negative: Option<String>,
    /// The seed.
    pub seed: Option<String>,
}

impl Maker {
    /// Recognizes what a program stored.
    pub fn of(text: &StoredText<'_>) -> Option<Self> {
        let own = || {
            let is_own = text.get(ImageMetadata::KEY).is_some() || text.get("version").is_some_and(|of| of.starts_with("kiln "));
            let value = |key| text.get(key).map(str::to_owned);
            let (prompt, negative, seed) = (value("prompt"), value("negative"), value("seed"));
            is_own.then_some(Self { program: Program::Kiln, prompt, negative, seed })
        };
        let json = |key: &str| text.get(key).filter(|text| text.len() <= MAX_JSON && text.trim_start().starts_with('{'));
        let comfy = || {
            // WebP has the object behind a name, in an entry of Exif.
            let behind = text.get("Model").and_then(|text| text.strip_prefix("prompt:"));
            let text = json("prompt").or(behind).filter(|text| text.contains("\"class_type\""))?;
            Some(Self::of_workflow(&serde_json::from_str::<Nodes>(text).unwrap_or_default()))
        };
        let invoke = || json("invokeai_metadata").map(|text| Self::of_object(Program::InvokeAi, text));
        let mflux = || {
            let text = json("UserComment").filter(|text| text.contains("\"mflux_version\""))?;
            Some(Self::of_object(Program::Mflux, text))
        };
        let parameters = || text.get(ImageMetadata::PARAMETERS).and_then(Self::of_parameters);
        own().or_else(comfy).or_else(invoke).or_else(mflux).or_else(parameters)
    }

    /// Reads the text `parameters`.
    fn of_parameters(text: &str) -> Option<Self> {
        let read = Parameters::of(text);
        let program = match read.get("Version") {
            Some(version) if version.starts_with("stable-diffusion.cpp") => Program::StableDiffusionCpp,
            Some(version) if version.starts_with("kiln ") => Program::Kiln,
            _ if read.settings.is_empty() => return None,
            _ => Program::A1111,
        };
        let seed = read.get("Seed").map(str::to_owned);
        let negative = Some(read.negative).filter(|negative| !negative.is_empty());
        Some(Self { program, prompt: Some(read.prompt), negative, seed })
    }

    /// Reads an object whose fields are the settings.
    fn of_object(program: Program, text: &str) -> Self {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Settings {
            #[serde(alias = "positive_prompt")]
            prompt: Value,
            negative_prompt: Value,
            seed: Value,
        }
        let Settings { prompt, negative_prompt, seed } = serde_json::from_str(text).unwrap_or_default();
        Self { program, prompt: prompt.text(), negative: negative_prompt.text(), seed: seed.number() }
    }

    /// Reads a workflow: the first sampler's seed, and the prompts that lead to it.
    fn of_workflow(nodes: &Nodes) -> Self {
        let inputs = || nodes.0.values().map(|node| &node.inputs);
        let seed_of = |inputs: &Inputs| {
            [&inputs.seed, &inputs.noise_seed].into_iter().find_map(|value| match value {
                Value::Link(id) => nodes.0.get(id).and_then(|node| node.inputs.value.number()),
                value => value.number(),
            })
        };
        let link = |of: fn(&Inputs) -> &Value| inputs().find_map(|inputs| of(inputs).link());
        let encoder = || inputs().find_map(|inputs| inputs.text.text());
        let positive = link(|inputs| &inputs.positive).or_else(|| link(|inputs| &inputs.conditioning));
        Self {
            program: Program::ComfyUi,
            prompt: positive.and_then(|id| nodes.prompt(id)).or_else(encoder),
            negative: link(|inputs| &inputs.negative).and_then(|id| nodes.prompt(id)).filter(|text| !text.is_empty()),
            seed: inputs().find_map(seed_of),
        }
    }
}

/// The nodes of a workflow by their names.
#[derive(Default)]
struct Nodes(BTreeMap<String, Node>);

/// A node of a workflow.
#[derive(Deserialize)]
struct Node {
    #[serde(default)]
    inputs: Inputs,
}

/// The inputs of a node that lead to prompts and seeds.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Inputs {
    text: Value,
    value: Value,
    seed: Value,
    noise_seed: Value,
    positive: Value,
    negative: Value,
    conditioning: Value,
}

impl Nodes {
    /// The prompt of the node with this name, or of a node that leads to it.
    fn prompt<'a>(&'a self, mut id: &'a str) -> Option<String> {
        for _ in 0..MAX_LINKS {
            let inputs = &self.0.get(id)?.inputs;
            let Inputs { text, value, positive, conditioning, .. } = inputs;
            if let Some(text) = text.text().or_else(|| value.text()) {
                return Some(text);
            }
            id = [text, conditioning, positive].into_iter().find_map(Value::link)?;
        }
        None
    }
}

impl<'de> Deserialize<'de> for Nodes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;

        impl<'de> Visitor<'de> for Map {
            type Value = Nodes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX_NODES} nodes")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Nodes, A::Error> {
                let mut nodes = BTreeMap::new();
                while let Some((id, node)) = entries.next_entry()? {
                    if nodes.len() == MAX_NODES {
                        return Err(A::Error::invalid_length(MAX_NODES + 1, &self));
                    }
                    nodes.insert(id, node);
                }
                Ok(Nodes(nodes))
            }
        }

        deserializer.deserialize_map(Map)
    }
}

/// A value of any type, as far as it matters.
#[derive(Default)]
enum Value {
    Text(String),
    Number(String),
    /// An output of another node: the node's name, in a list with the output's number.
    Link(String),
    #[default]
    Other,
}

impl Value {
    fn text(&self) -> Option<String> {
        if let Self::Text(text) = self { Some(text.clone()) } else { None }
    }

    fn number(&self) -> Option<String> {
        if let Self::Number(number) = self { Some(number.clone()) } else { None }
    }

    fn link(&self) -> Option<&str> {
        if let Self::Link(id) = self { Some(id) } else { None }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;

        impl<'de> Visitor<'de> for Any {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }

            fn visit_str<E>(self, text: &str) -> Result<Value, E> {
                Ok(Value::Text(text.into()))
            }

            fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
                Ok(Value::Number(number.to_string()))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
                Ok(Value::Number(number.to_string()))
            }

            fn visit_f64<E>(self, _: f64) -> Result<Value, E> {
                Ok(Value::Other)
            }

            fn visit_bool<E>(self, _: bool) -> Result<Value, E> {
                Ok(Value::Other)
            }

            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Other)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
                let first = items.next_element::<Value>()?;
                while items.next_element::<IgnoredAny>()?.is_some() {}
                Ok(match first {
                    Some(Value::Text(id) | Value::Number(id)) => Value::Link(id),
                    _ => Value::Other,
                })
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
                while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Value::Other)
            }
        }

        deserializer.deserialize_any(Any)
    }
}
