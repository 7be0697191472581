//! Finding a model: folders, overrides, the environment, and the Hugging Face cache.

use super::message;
use common::scratch::Scratch;
use kiln::error::Error;
use kiln::internals::component::PerComponent;
use kiln::internals::config::{ModelDefaults, Variant};
use kiln::internals::tensor::Nvfp4Layout;
use kiln::locate::{Embedded, Environment, Found, LocateRequest, ModelFiles, locate};
use std::path::{Path, PathBuf};

/// An empty stand-in for every file of a diffusers folder.
fn write_model(scratch: &Scratch, folder: &str) -> PathBuf {
    for file in [
        "transformer/diffusion_pytorch_model.safetensors",
        "transformer/config.json",
        "text_encoder/model-00001-of-00002.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
        "tokenizer/tokenizer.json",
        "model_index.json",
    ] {
        scratch.write(&format!("{folder}/{file}"), "");
    }
    scratch.path().join(folder)
}

fn files(request: &LocateRequest) -> ModelFiles {
    match locate(request).unwrap() {
        Found::Files(files) => *files,
        other => panic!("{other:?}"),
    }
}

/// A replacement for the VAE alone.
fn only_vae(path: PathBuf) -> PerComponent<Option<PathBuf>> {
    PerComponent { vae: Some(path), ..PerComponent::default() }
}

fn expected(folder: &Path, origin: &str) -> ModelFiles {
    ModelFiles {
        parts: PerComponent {
            transformer: folder.join("transformer"),
            text_encoder: folder.join("text_encoder"),
            vae: folder.join("vae"),
        },
        tokenizer: Some(folder.join("tokenizer/tokenizer.json")),
        index: Some(folder.join("model_index.json")),
        defaults: ModelDefaults::klein(),
        origin: origin.into(),
        nvfp4_layout: None,
    }
}

#[test]
fn a_folder_is_found_and_its_parts_can_be_replaced() {
    let scratch = Scratch::new();
    let folder = write_model(&scratch, "klein");
    let mut request = LocateRequest { model: Some(folder.clone()), ..LocateRequest::default() };
    let whole = expected(&folder, folder.to_str().unwrap());
    assert_eq!(files(&request), whole);
    assert_eq!(ModelFiles::config_of(&whole.parts.transformer).unwrap(), folder.join("transformer/config.json"));
    assert_eq!(ModelFiles::config_of(&whole.parts.vae), None);
    // KILN_MODEL names the same folder, but the flag takes precedence.
    let environment = Environment { kiln_model: Some(folder.clone()), ..Environment::default() };
    assert_eq!(files(&LocateRequest { environment: environment.clone(), ..LocateRequest::default() }), whole);
    let nowhere = LocateRequest { model: Some("nowhere".into()), environment, ..LocateRequest::default() };
    assert!(locate(&nowhere).is_err());

    let small = scratch.write("small_decoder.safetensors", "");
    request.parts.vae = Some(small.clone());
    assert_eq!(files(&request), ModelFiles { parts: PerComponent { vae: small, ..whole.parts.clone() }, ..whole.clone() });
    request.parts.vae = None;
    // The folder's `model_index.json` does not describe another transformer.
    let own = scratch.write("flux-2-klein-base-4b.safetensors", "");
    request.parts.transformer = Some(own.clone());
    let origin = own.to_str().unwrap().to_owned();
    let parts = PerComponent { transformer: own, ..whole.parts.clone() };
    assert_eq!(files(&request), ModelFiles { parts, index: None, origin, ..whole });
}

#[test]
fn defaults_are_those_of_the_folder() {
    let scratch = Scratch::new();
    let folder = write_model(&scratch, "shapes");
    scratch.write("shapes/kiln.json", r#"{"name": "shapes", "variant": "base", "width": 128}"#);
    let mut request = LocateRequest { model: Some(folder.clone()), ..LocateRequest::default() };
    let found = files(&request).defaults;
    assert_eq!((found.name.as_deref(), found.variant, found.width), (Some("shapes"), Some(Variant::Base), 128));
    assert_eq!(locate(&request).unwrap().defaults().unwrap(), found);
    // Defaults belong to the folder's transformer.
    request.parts.transformer = Some(scratch.write("flux-2-klein-4b.safetensors", ""));
    assert_eq!(files(&request).defaults, ModelDefaults::klein());
    request.parts.transformer = None;
    scratch.write("shapes/kiln.json", r#"{"width": 130}"#);
    let text = message(&locate(&request).unwrap_err());
    let path = folder.join("kiln.json");
    assert!(text.starts_with(&format!("unsupported configuration ({}): `width` is 130", path.display())), "{text}");
    assert!(text.contains(" / kiln.json may say name, "), "{text}");
}

#[test]
fn single_files_need_no_folder() {
    let scratch = Scratch::new();
    let parts = PerComponent {
        transformer: scratch.write("flux-2-klein-9b.safetensors", ""),
        text_encoder: scratch.write("qwen_3_8b.safetensors", ""),
        vae: scratch.write("ae.safetensors", ""),
    };
    let vae = parts.vae.clone();
    let tokenizer = scratch.write("tokenizer.json", "{}");
    let request = LocateRequest { parts: parts.clone().map(Some), ..LocateRequest::default() };
    let mut found = ModelFiles {
        origin: parts.transformer.to_str().unwrap().into(),
        parts,
        tokenizer: None,
        index: None,
        defaults: ModelDefaults::klein(),
        nvfp4_layout: None,
    };
    assert_eq!(files(&request), found);
    let ordered = LocateRequest { nvfp4_layout: Some(Nvfp4Layout::MODELOPT), ..request.clone() };
    assert_eq!(files(&ordered), ModelFiles { nvfp4_layout: Some(Nvfp4Layout::MODELOPT), ..found.clone() });
    // The tokenizer may be given as a file or by its folder.
    found.tokenizer = Some(tokenizer.clone());
    for path in [tokenizer, scratch.path().into()] {
        assert_eq!(files(&LocateRequest { tokenizer: Some(path), ..request.clone() }), found);
    }
    // A folder that holds the single files is a model, too.
    found.origin = scratch.path().to_str().unwrap().into();
    assert_eq!(files(&LocateRequest { model: Some(scratch.path().into()), ..LocateRequest::default() }), found);
    // With two candidates, kiln does not guess the transformer.
    scratch.write("flux-2-klein-4b.safetensors", "");
    let error = locate(&LocateRequest { model: Some(scratch.path().into()), ..LocateRequest::default() }).unwrap_err();
    let both = "2 files could be the transformer: flux-2-klein-4b.safetensors, flux-2-klein-9b.safetensors";
    assert!(message(&error).ends_with(&format!("{both} / pick one with --transformer")), "{error}");
    // A flag decides between them.
    let picked = LocateRequest {
        model: Some(scratch.path().into()),
        parts: PerComponent { transformer: Some(scratch.path().join("flux-2-klein-4b.safetensors")), ..PerComponent::default() },
        ..LocateRequest::default()
    };
    assert!(files(&picked).parts.transformer.ends_with("flux-2-klein-4b.safetensors"));
    // One component alone is not a model.
    let error = locate(&LocateRequest { parts: only_vae(vae), ..LocateRequest::default() }).unwrap_err();
    assert!(message(&error).contains("there is no transformer and no text encoder / expected transformer/"), "{error}");
}

#[test]
fn what_is_missing_is_named() {
    let scratch = Scratch::new();
    let folder = write_model(&scratch, "klein");
    std::fs::remove_dir_all(folder.join("vae")).unwrap();
    std::fs::remove_dir_all(folder.join("tokenizer")).unwrap();
    let error = |model: &Path| locate(&LocateRequest { model: Some(model.into()), ..LocateRequest::default() }).unwrap_err();
    let text = message(&error(&folder));
    assert!(text.starts_with(&format!("no model found ({}): there is no vae / ", folder.display())), "{text}");
    assert!(text.contains("--vae"), "{text}");
    let text = message(&error(Path::new("models/klein/x")));
    assert!(text.starts_with("no model found (models/klein/x): the folder does not exist / expected"), "{text}");
    let file = scratch.write("x.safetensors", "");
    assert!(message(&error(&file)).contains("it is a file, not a folder / give a single file as --transformer"));
    let request = LocateRequest { parts: only_vae("missing.safetensors".into()), ..LocateRequest::default() };
    assert!(matches!(locate(&request), Err(Error::NoModel { path, .. }) if path == Path::new("missing.safetensors")));
}

#[test]
fn a_model_without_files_is_the_last_resort() {
    static FILES: [(&str, &[u8]); 1] = [("kiln.json", br#"{"name": "shapes", "height": 96}"#)];
    let model = Embedded { files: &FILES };
    let scratch = Scratch::new();
    let found = |model: Option<&str>, environment: &Environment| {
        locate(&LocateRequest { model: model.map(Into::into), environment: environment.clone(), ..LocateRequest::default() })
    };
    let mut environment = Environment { hf_hub_cache: Some(scratch.path().into()), ..Environment::default() };

    // A program that does not embed the model uses the tiny one.
    assert_eq!(found(None, &environment).unwrap(), Found::Tiny);
    assert_eq!(found(Some("tiny"), &environment).unwrap(), Found::Tiny);
    let text = message(&found(Some("builtin"), &environment).unwrap_err());
    assert!(text.starts_with("no model found (builtin): this program was built without its model / build it with"), "{text}");
    assert_eq!(Found::Tiny.defaults().unwrap(), ModelDefaults { width: 256, height: 256, ..ModelDefaults::klein() });

    environment.built_in = Some(model);
    assert_eq!(found(None, &environment).unwrap(), Found::BuiltIn(model));
    assert_eq!(found(Some("builtin"), &environment).unwrap(), Found::BuiltIn(model));
    assert_eq!(found(Some("tiny"), &environment).unwrap(), Found::Tiny);
    let defaults = found(None, &environment).unwrap().defaults().unwrap();
    assert_eq!((defaults.name.as_deref(), defaults.height), (Some("shapes"), 96));
    assert!(!format!("{model:?}").contains("96"), "content is not shown");

    // The cache takes precedence over the built-in model, and KILN_MODEL over the cache.
    let cached = write_model(&scratch, "models--black-forest-labs--FLUX.2-klein-4B/snapshots/a");
    let Found::Files(files) = found(None, &environment).unwrap() else { panic!() };
    assert_eq!(files.parts.transformer, cached.join("transformer"));
    environment.kiln_model = Some("builtin".into());
    assert_eq!(found(None, &environment).unwrap(), Found::BuiltIn(model));
    environment.kiln_model = Some(write_model(&scratch, "own"));
    let Found::Files(files) = found(None, &environment).unwrap() else { panic!() };
    assert_eq!(files.parts.transformer, scratch.path().join("own/transformer"));
    assert_eq!(found(Some("builtin"), &environment).unwrap(), Found::BuiltIn(model));
}

#[test]
fn a_model_without_files_has_no_parts_to_replace() {
    let scratch = Scratch::new();
    let part = Some(scratch.write("ae.safetensors", ""));
    for name in ["tiny", "builtin"] {
        static FILES: [(&str, &[u8]); 0] = [];
        let built_in = Some(Embedded { files: &FILES });
        let environment = Environment { built_in, ..Environment::default() };
        let parts = PerComponent { vae: part.clone(), ..PerComponent::default() };
        let mut request = LocateRequest { model: Some(name.into()), parts, environment, ..LocateRequest::default() };
        assert_eq!(locate(&request).unwrap_err().exit_code(), 2, "{name}");
        // All three components are a model, which takes precedence over KILN_MODEL.
        request.parts = PerComponent::from_fn(|_| part.clone());
        assert_eq!(locate(&request).unwrap_err().exit_code(), 2, "{name}");
        request.environment.kiln_model = request.model.take();
        assert_eq!(files(&request).origin, part.as_ref().unwrap().to_str().unwrap(), "{name}");
    }
}

#[test]
fn repositories_are_looked_up_in_the_cache() {
    let id = "black-forest-labs/FLUX.2-klein-9B";
    let repository = "models--black-forest-labs--FLUX.2-klein-9B";
    // The four places a cache can be, in order of precedence.
    type Place = fn(PathBuf) -> Environment;
    let places: [(&str, Place); 4] = [
        ("", |p| Environment { hf_hub_cache: Some(p), hf_home: Some("nowhere".into()), ..Environment::default() }),
        ("hub/", |p| Environment { hf_home: Some(p), xdg_cache_home: Some("nowhere".into()), ..Environment::default() }),
        ("huggingface/hub/", |p| Environment { xdg_cache_home: Some(p), home: Some("nowhere".into()), ..Environment::default() }),
        (".cache/huggingface/hub/", |p| Environment { home: Some(p), ..Environment::default() }),
    ];
    for (hub, environment) in places {
        let scratch = Scratch::new();
        let folder = write_model(&scratch, &format!("{hub}{repository}/snapshots/abc123"));
        let environment = environment(scratch.path().into());
        let named = LocateRequest { model: Some(id.into()), environment: environment.clone(), ..LocateRequest::default() };
        // Without a ref the only snapshot is used.
        assert_eq!(files(&named), expected(&folder, id));
        // Without a name the cache is searched for known models.
        let unnamed = LocateRequest { environment, ..LocateRequest::default() };
        assert_eq!(files(&unnamed), expected(&folder, id));

        let newer = write_model(&scratch, &format!("{hub}{repository}/snapshots/def456"));
        assert!(message(&locate(&named).unwrap_err()).contains("several revisions"));
        scratch.write(&format!("{hub}{repository}/refs/main"), "def456\n");
        assert_eq!(files(&named), expected(&newer, id));
        // A ref cannot lead out of the cache, and an invalid one is an error.
        for only in [false, true] {
            if only {
                std::fs::remove_dir_all(&newer).unwrap();
            }
            for (text, what) in [
                ("../../..", "has a reference that names no revision"),
                ("abc\u{1b}[2J", "has a reference that names no revision"),
                ("", "has a reference that names no revision"),
                ("0123", "has a reference that names a revision without files"),
            ] {
                scratch.write(&format!("{hub}{repository}/refs/main"), text);
                for request in [&named, &unnamed] {
                    let text = message(&locate(request).unwrap_err());
                    assert!(text.contains(what) && !text.contains('\u{1b}'), "{text}");
                }
            }
        }
    }
}

#[test]
fn cached_models_are_used_only_when_complete() {
    let scratch = Scratch::new();
    let environment = Environment { hf_hub_cache: Some(scratch.path().into()), ..Environment::default() };
    let request = |model: Option<&str>| LocateRequest {
        model: model.map(PathBuf::from),
        environment: environment.clone(),
        ..LocateRequest::default()
    };
    let text = message(&locate(&request(Some("some/model"))).unwrap_err());
    assert!(text.contains("(some/model): neither a folder nor in the Hugging Face cache ("), "{text}");
    let first = write_model(&scratch, "models--black-forest-labs--FLUX.2-klein-4B/snapshots/a");
    std::fs::remove_dir_all(first.join("vae")).unwrap();
    // A model whose download has begun is not silently replaced by another one.
    let unfinished = |what: &str| {
        let text = message(&locate(&request(None)).unwrap_err());
        let whole =
            format!("no model found (black-forest-labs/FLUX.2-klein-4B): it is in the Hugging Face cache, but not whole: {what}");
        assert!(text.starts_with(&whole), "{text}");
        assert!(
            text.ends_with("`hf download black-forest-labs/FLUX.2-klein-4B`; --model tiny is kiln's own small model"),
            "{text}"
        );
    };
    unfinished("there is no vae / ");
    assert!(message(&locate(&request(Some("black-forest-labs/FLUX.2-klein-4B"))).unwrap_err()).contains("there is no vae"));
    assert_eq!(locate(&request(Some("tiny"))).unwrap(), Found::Tiny);
    // A missing part may be given by a flag.
    let given = scratch.write("ae.safetensors", "");
    let with = LocateRequest { parts: only_vae(given.clone()), ..request(None) };
    assert_eq!((files(&with).parts.transformer, files(&with).parts.vae), (first.join("transformer"), given));
    let second = write_model(&scratch, "models--black-forest-labs--FLUX.2-klein-base-4B/snapshots/b");
    assert_eq!(files(&request(None)).parts.transformer, second.join("transformer"));
    // A link to a file that was never downloaded does not count.
    #[cfg(unix)]
    {
        let weights = second.join("vae/diffusion_pytorch_model.safetensors");
        std::fs::remove_file(&weights).unwrap();
        std::os::unix::fs::symlink("../../../blobs/none", &weights).unwrap();
        unfinished("there is no vae / ");
        std::fs::remove_dir_all(first.parent().unwrap().parent().unwrap()).unwrap();
        let text = message(&locate(&request(None)).unwrap_err());
        let link = "vae/diffusion_pytorch_model.safetensors: it is a link to something that is not there";
        assert!(
            text.contains(&format!(
                "FLUX.2-klein-base-4B): it is in the Hugging Face cache, but not whole: the vae cannot be used: {link}"
            )),
            "{text}"
        );
    }
}

#[test]
fn a_repository_that_was_only_asked_about_is_none() {
    let scratch = Scratch::new();
    let environment = Environment { hf_hub_cache: Some(scratch.path().into()), ..Environment::default() };
    let request = LocateRequest { environment, ..LocateRequest::default() };
    let repository = "models--black-forest-labs--FLUX.2-klein-9B";
    scratch.write(&format!("{repository}/.no_exist/abc/config.json"), "");
    scratch.write(&format!("{repository}/refs/main"), "abc");
    assert_eq!(locate(&request).unwrap(), Found::Tiny);
    // A partial file shows that a download has begun.
    scratch.write(&format!("{repository}/blobs/0123.incomplete"), "");
    let text = message(&locate(&request).unwrap_err());
    assert!(
        text.contains("FLUX.2-klein-9B): it is in the Hugging Face cache, but not whole: the Hugging Face cache has no files"),
        "{text}"
    );
}

/// A missing cache is not an error. An unreadable cache is one, because the model may be in it.
#[cfg(unix)]
#[test]
fn a_cache_that_cannot_be_looked_at_is_not_an_empty_one() {
    use std::os::unix::fs::symlink;
    let repository = "models--black-forest-labs--FLUX.2-klein-4B";
    let file = |path: &Path| std::fs::write(path, "").unwrap();
    let dangling = |path: &Path| symlink("none", path).unwrap();
    // A link to itself fails like an unreadable folder.
    let looped = |path: &Path| symlink(path, path).unwrap();
    type Put<'a> = &'a dyn Fn(&Path);
    let puts: [(Put<'_>, &str); 3] =
        [(&file, "Not a directory"), (&dangling, "it is a link to something that is not there"), (&looped, "symbolic link")];
    for (put, why) in puts {
        for (place, what) in [
            ("home", "the Hugging Face cache cannot be used"),
            ("home/hub", "the Hugging Face cache cannot be used"),
            (&format!("home/hub/{repository}"), "not whole: its folder cannot be used"),
            (&format!("home/hub/{repository}/snapshots"), "not whole: a folder cannot be read"),
            (&format!("home/hub/{repository}/blobs"), "not whole: a folder cannot be read"),
            (&format!("home/hub/{repository}/refs"), "has a reference that cannot be read"),
        ] {
            let scratch = Scratch::new();
            let environment = Environment { hf_home: Some(scratch.path().join("home")), ..Environment::default() };
            let request = LocateRequest { environment, ..LocateRequest::default() };
            assert_eq!(locate(&request).unwrap(), Found::Tiny);
            let path = scratch.path().join(place);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            if place.ends_with("refs") {
                std::fs::create_dir_all(path.parent().unwrap().join("snapshots/a")).unwrap();
            }
            put(&path);
            let error = locate(&request).unwrap_err();
            assert_eq!(error.exit_code(), 3);
            let text = message(&error);
            assert!(text.contains(what) && text.contains(why), "{place}: {text}");
            let named = LocateRequest { model: Some("black-forest-labs/FLUX.2-klein-4B".into()), ..request };
            assert!(message(&locate(&named).unwrap_err()).contains(why), "{place}");
        }
    }
    // A user without a home folder has no cache.
    for home in ["/dev/null", "/nonexistent"] {
        let environment = Environment { home: Some(home.into()), ..Environment::default() };
        assert_eq!(locate(&LocateRequest { environment, ..LocateRequest::default() }).unwrap(), Found::Tiny);
    }
}
