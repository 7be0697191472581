//! Finds the files of a model: a folder, a repository in the Hugging Face cache, or single files. Nothing is downloaded.

mod cache;
mod embedded;
mod parts;

pub use cache::Environment;
pub use embedded::Embedded;

use crate::config::Conventions;
use crate::error::{Error, Result};
use crate::files;
use crate::names::PerPart;
use cache::NoSnapshot;
use parts::{Sought, complain, folder_of_weights, single_file};
use std::path::{Path, PathBuf};

/// The name of the model that is part of the program.
pub const BUILT_IN: &str = "builtin";

/// The name of the random model that the program makes itself.
pub const TINY: &str = "tiny";

/// Side of the random model's pictures, which are not worth waiting for.
const TINY_SIDE: usize = 256;

/// Repositories looked for in the cache when no model is named, best first.
pub const KNOWN_REPOSITORIES: [&str; 5] = [
    "black-forest-labs/FLUX.2-klein-4B",
    "black-forest-labs/FLUX.2-klein-9B",
    "black-forest-labs/FLUX.2-klein-base-4B",
    "black-forest-labs/FLUX.2-klein-base-9B",
    "black-forest-labs/FLUX.2-klein-9b-kv",
];

const EXPECTED: &str = "expected transformer/, text_encoder/, vae/ and tokenizer/tokenizer.json there, \
    or give --transformer, --text-encoder and --vae";

/// What was asked for.
#[derive(Clone, Debug, Default)]
pub struct LocateRequest {
    /// A folder, a repository id, or the name of a model that needs no files.
    pub model: Option<PathBuf>,
    /// Replaces parts of the model: a file, or a folder of shards, for each.
    pub parts: PerPart<Option<PathBuf>>,
    /// Replaces its tokenizer: a `tokenizer.json`, or the folder that holds one.
    pub tokenizer: Option<PathBuf>,
    /// What the process knows about models.
    pub environment: Environment,
}

/// Where a model's files are.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelFiles {
    /// A safetensors file, or a folder of them, for each part.
    pub parts: PerPart<PathBuf>,
    /// A `tokenizer.json`; without one, the tokenizer that comes with the program fits.
    pub tokenizer: Option<PathBuf>,
    /// The pipeline's `model_index.json`, if the transformer is the one it describes.
    pub index: Option<PathBuf>,
    /// The folder's `kiln.json`, likewise; klein's conventions where there is none.
    pub conventions: Conventions,
    /// What the model is called in messages: the folder, the repository id, or the transformer's file.
    pub origin: String,
}

impl ModelFiles {
    /// The `config.json` beside a part's weights, if there is one. One that is no file is still one: reading it says so.
    pub fn config_of(weights: &Path) -> Option<PathBuf> {
        Some(weights.join("config.json")).filter(|config| files::is_there(config))
    }

    /// The configuration of the scheduler that belongs to the transformer, if that is part of a diffusers folder that has one.
    pub fn scheduler(&self) -> Option<PathBuf> {
        let transformer = &self.parts.transformer;
        let folder = transformer.parent().filter(|_| transformer.ends_with("transformer"))?;
        Some(folder.join("scheduler/scheduler_config.json")).filter(|config| files::is_there(config))
    }
}

/// What was found.
#[derive(Clone, Debug, PartialEq)]
pub enum Found {
    /// A model on disk.
    Files(Box<ModelFiles>),
    /// The one that is part of the program.
    BuiltIn(Embedded),
    /// The random one, which the program makes itself.
    Tiny,
}

impl Found {
    /// How its pictures are made.
    pub fn conventions(&self) -> Result<Conventions> {
        match self {
            Self::Files(files) => Ok(files.conventions.clone()),
            Self::BuiltIn(model) => model.conventions(),
            Self::Tiny => Ok(Conventions { width: TINY_SIDE, height: TINY_SIDE, ..Conventions::klein() }),
        }
    }

    /// The model that needs no files, by its name. None if there is no such name.
    fn named(name: &Path, environment: &Environment) -> Result<Option<Self>> {
        if !needs_no_files(name) {
            return Ok(None);
        }
        if name == Path::new(TINY) {
            return Ok(Some(Self::Tiny));
        }
        environment.built_in.map(Self::BuiltIn).map(Some).ok_or_else(|| {
            let hint = "build it with the feature `builtin`, or name the folder models/builtin of its sources";
            no_model(name, "this program was built without its model", Some(hint.into()))
        })
    }
}

/// Looks for a model: what was asked for, then `KILN_MODEL`, then the cache, then what the program has itself.
pub fn locate(request: &LocateRequest) -> Result<Found> {
    for path in request.parts.values().chain([&request.tokenizer]).flatten() {
        if let Some(why) = files::absence(path) {
            return Err(no_model(path, &why, None));
        }
    }
    let environment = &request.environment;
    let some = request.tokenizer.is_some() || request.parts.values().any(Option::is_some);
    let all = request.parts.values().all(Option::is_some);
    // A variable names a model for when none is named, and three parts are one.
    let fallback = environment.kiln_model.as_deref().filter(|name| !(all && needs_no_files(name)));
    let base = match request.model.as_deref().or(fallback) {
        Some(name) => match Found::named(name, environment)? {
            Some(_) if some => {
                let what = format!("the model `{}` has no parts to replace", name.display());
                return Err(Error::usage(what, "name a model folder with --model"));
            }
            Some(found) => return Ok(found),
            None => Folder::named(name, environment)?,
        },
        None if all => Folder::default(),
        None => match known_repository(request)? {
            Some(folder) => folder,
            None if !some => return Ok(environment.built_in.map_or(Found::Tiny, Found::BuiltIn)),
            None => Folder::default(),
        },
    };
    assemble(request, base).map(Box::new).map(Found::Files)
}

fn needs_no_files(name: &Path) -> bool {
    [TINY, BUILT_IN].iter().any(|own| name == Path::new(own))
}

/// The first repository in the cache that is complete, together with the parts that are given otherwise. One that was begun and
/// not finished is an error where none is complete: whoever downloaded it means to use it, and not some other model.
fn known_repository(request: &LocateRequest) -> Result<Option<Folder>> {
    let mut unfinished = None;
    for id in KNOWN_REPOSITORIES {
        let what = match cache::snapshot(&request.environment, id) {
            Ok(snapshot) => {
                let mut folder = Folder::read(&snapshot, id);
                let given = folder.clone();
                folder.replace(request);
                match folder.complaint() {
                    None => return Ok(Some(given)),
                    Some((what, _)) => what,
                }
            }
            Err(NoSnapshot::Absent(_)) => continue,
            Err(NoSnapshot::Begun(what)) => what,
            Err(NoSnapshot::NoCache(folder, why)) => {
                let hint = "name a model with --model, or another cache with HF_HUB_CACHE".into();
                return Err(no_model(&folder, &format!("{}: {why}", cache::NO_CACHE), Some(hint)));
            }
        };
        unfinished.get_or_insert((id, what));
    }
    let Some((id, what)) = unfinished else { return Ok(None) };
    let mut hint = format!("finish the download, for example with `hf download {id}`");
    // A model of our own has no parts, so it is no advice to whoever gave some.
    if request.parts.values().all(Option::is_none) {
        let own = if request.environment.built_in.is_some() { BUILT_IN } else { TINY };
        hint.push_str(&format!("; --model {own} is kiln's own small model"));
    }
    Err(no_model(Path::new(id), &format!("it is in the Hugging Face cache, but not whole: {what}"), Some(hint)))
}

/// Puts overrides over what a folder has, and fails if a part is still missing.
fn assemble(request: &LocateRequest, base: Folder) -> Result<ModelFiles> {
    let own_transformer = request.parts.transformer.is_some();
    let mut folder = base.clone();
    folder.replace(request);
    let tokenizer = match &request.tokenizer {
        Some(path) if path.is_dir() => {
            let file = path.join("tokenizer.json");
            if !files::is_there(&file) {
                return Err(no_model(path, "the folder holds no tokenizer.json", None));
            }
            Some(file)
        }
        given => given.clone().or(folder.tokenizer.clone()),
    };
    let Ok(parts) = PerPart::try_from_fn(|part| folder.parts[part].path().ok_or(())) else {
        let (what, hint) = folder.complaint().unwrap_or_default();
        return Err(no_model(base.path.as_deref().unwrap_or(Path::new("--model")), &what, Some(hint)));
    };
    let origin = if own_transformer { parts.transformer.display().to_string() } else { base.origin };
    let index = base.index.filter(|_| !own_transformer);
    let conventions = base.conventions.filter(|_| !own_transformer);
    let conventions = conventions.map_or(Ok(Conventions::klein()), |path| Conventions::read(&path))?;
    Ok(ModelFiles { parts, tokenizer, index, conventions, origin })
}

/// What a folder holds of a model.
#[derive(Clone, Debug, Default)]
struct Folder {
    path: Option<PathBuf>,
    origin: String,
    parts: PerPart<Sought>,
    tokenizer: Option<PathBuf>,
    index: Option<PathBuf>,
    conventions: Option<PathBuf>,
}

impl Folder {
    /// A folder by its path, or a repository by its id.
    fn named(name: &Path, environment: &Environment) -> Result<Self> {
        if name.is_dir() {
            return Ok(Self::read(name, &name.display().to_string()));
        }
        if name.exists() {
            let hint = "give a single file as --transformer, with --text-encoder and --vae";
            return Err(no_model(name, "it is a file, not a folder", Some(hint.into())));
        }
        // A link that leads nowhere, or a place that may not be looked at, is not the id of a repository.
        if let Some(why) = files::absence(name).filter(|_| files::is_there(name)) {
            return Err(no_model(name, &why, None));
        }
        match name.to_str().filter(|id| cache::is_repository_id(id)) {
            Some(id) => {
                let snapshot = cache::snapshot(environment, id).map_err(|none| {
                    no_model(
                        name,
                        &none.what(),
                        Some("download it first, for example with `hf download`, or name a folder".into()),
                    )
                })?;
                Ok(Self::read(&snapshot, id))
            }
            None => Err(no_model(name, "the folder does not exist", Some(EXPECTED.into()))),
        }
    }

    /// Looks at a folder in the diffusers layout, at ComfyUI's folder of models, or at one that holds the single files.
    fn read(path: &Path, origin: &str) -> Self {
        let part = |diffusers: &str, comfy: &str, stems: &[&str]| {
            // ComfyUI's folders hold files of many models, so there the file's name decides. Both call one folder `vae`.
            let single = single_file(&path.join(comfy), stems);
            single.or_else(|| folder_of_weights(&path.join(diffusers))).or_else(|| single_file(path, stems))
        };
        // What says how to read the weights is not passed over because it is no file: reading it says what it is.
        let settings = |name: &str| Some(path.join(name)).filter(|file| files::is_there(file));
        // Likewise where the folder is a link that leads nowhere, or no folder.
        let unusable = || settings("tokenizer").filter(|folder| !folder.is_dir()).map(|folder| folder.join("tokenizer.json"));
        let transformer = part("transformer", "diffusion_models", &["flux-2-klein", "flux2-klein"]);
        // The index describes the diffusers folder, not a single file that lies beside it.
        let index = settings("model_index.json").filter(|_| matches!(&transformer, Sought::At(path) if path.is_dir()));
        Self {
            path: Some(path.into()),
            origin: origin.into(),
            parts: PerPart {
                transformer,
                text_encoder: part("text_encoder", "text_encoders", &["qwen"]),
                vae: part("vae", "vae", &["ae", "flux2-vae", "full_encoder_small_decoder"]),
            },
            // One that is there is meant, even if it cannot be read: another would give other pictures without a word.
            tokenizer: settings("tokenizer/tokenizer.json").or_else(unusable).or_else(|| settings("tokenizer.json")),
            index,
            conventions: settings("kiln.json"),
        }
    }

    /// Puts the parts that are given otherwise in their places.
    fn replace(&mut self, request: &LocateRequest) {
        for (part, replacement) in request.parts.iter() {
            if let Some(path) = replacement {
                self.parts[part] = Sought::At(path.clone());
            }
        }
    }

    /// What is wrong with its parts and what to do about it, if not all are there.
    fn complaint(&self) -> Option<(String, String)> {
        complain(&self.parts, self.path.as_deref(), EXPECTED)
    }
}

fn no_model(path: &Path, what: &str, hint: Option<String>) -> Error {
    Error::NoModel { path: path.into(), what: what.into(), hint }
}
