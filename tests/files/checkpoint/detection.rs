//! Configurations detected from weights and compared with config files. Also compares the tiny model with the reference's.

use super::{Described, described, message, shard, zeros};
use common::scratch::Scratch;
use kiln::error::Result;
use kiln::internals::backend::GemmFormats;
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::checkpoint::Weights;
use kiln::internals::component::Component;
use kiln::internals::component::PerComponent;
use kiln::internals::config::{
    ConfigFile, Configs, ModelDefaults, TextConfig, TransformerConfig, VaeConfig, Variant, check_scheduler, supported,
};
use kiln::internals::model::{text_manifest, transformer_manifest, vae_manifest};
use kiln::internals::names::{Layout, TensorSpec, file_tensors};
use kiln::internals::noise::NoiseKind;
use kiln::internals::pipeline::{Engine, Job, LoadOptions, Noise, ReferenceInput, estimate};
use kiln::internals::sequence::{Grid, Pixels};
use kiln::internals::tensor::{DType, Precision};
use kiln::internals::tiny;
use kiln::internals::tokenizer::Padding;
use kiln::progress::Silent;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

fn detect_text(weights: &Weights, config: Option<&ConfigFile>) -> Result<TextConfig> {
    TextConfig::detect(weights, config, &ModelDefaults::klein())
}

#[test]
fn a_written_model_is_detected_as_what_it_is() {
    for layout in [Layout::Diffusers, Layout::Bfl] {
        let scratch = Scratch::new();
        tiny::write_to(scratch.path(), layout, DType::Bf16, &Default::default()).unwrap();
        let diffusers = layout == Layout::Diffusers;
        let place = |folder: &str, file: &str| scratch.path().join(if diffusers { folder } else { file });
        let open = |part, folder: &str, file: &str| Weights::open(part, &place(folder, file)).unwrap();
        let config = |folder: &str| scratch.path().join(folder).join("config.json");
        let given = |path: &Path| path.is_file().then(|| ConfigFile::read(path).unwrap());

        let weights = open(Component::Transformer, "transformer", "flux-2-klein-tiny.safetensors");
        let found = TransformerConfig::detect(&weights, given(&config("transformer")).as_ref()).unwrap();
        assert_eq!(found, Configs::TINY.transformer);
        assert!(weights.check(&transformer_manifest(&found)).unwrap().is_empty());
        let weights = open(Component::TextEncoder, "text_encoder", "qwen.safetensors");
        let found = detect_text(&weights, given(&config("text_encoder")).as_ref()).unwrap();
        assert_eq!(found, Configs::TINY.text_encoder);
        assert!(weights.check(&text_manifest(&found)).unwrap().is_empty());
        let weights = open(Component::Vae, "vae", "ae.safetensors");
        let found = VaeConfig::detect(&weights, given(&config("vae")).as_ref()).unwrap();
        assert_eq!(found, Configs::TINY.vae);
        assert!(weights.check(&vae_manifest(&found)).unwrap().is_empty());
    }
}

#[test]
fn real_sizes_are_detected_from_shapes_alone() {
    // Headers of the real models; the data is never read.
    let header = |part: Component, manifest: &[TensorSpec]| {
        let tensors: Vec<Described> = manifest
            .iter()
            .flat_map(|spec| file_tensors(part, Layout::Diffusers, spec))
            .map(|spec| (spec.name, "BF16", spec.shape))
            .collect();
        Weights::from_shards(part, vec![shard(zeros(&tensors)).unwrap()]).unwrap()
    };
    let config = VaeConfig { decoder: [96, 192, 384, 384], ..Configs::KLEIN_4B.vae };
    assert_eq!(VaeConfig::detect(&header(Component::Vae, &vae_manifest(&config)), None).unwrap(), config);
    let config = TransformerConfig { guidance_embed: true, double_blocks: 1, single_blocks: 3, ..Configs::TINY.transformer };
    let weights = header(Component::Transformer, &transformer_manifest(&config));
    assert_eq!(TransformerConfig::detect(&weights, None).unwrap(), config);
}

/// Sizes that no published model has, and that satisfy every constraint.
fn unusual() -> Configs {
    let transformer = TransformerConfig {
        hidden: 384,
        heads: 3,
        double_blocks: 1,
        single_blocks: 3,
        context: 480,
        ..Configs::TINY.transformer
    };
    let text_encoder = TextConfig {
        hidden: 160,
        layers: 4,
        heads: 3,
        kv_heads: 1,
        intermediate: 224,
        vocab: 300,
        text_layers: [1, 2, 4],
        max_tokens: 48,
        ..Configs::TINY.text_encoder
    };
    let vae = VaeConfig { encoder: [32, 96, 64, 32], decoder: [96, 32, 64, 64], ..Configs::TINY.vae };
    Configs { transformer, text_encoder, vae }
}

fn hashed(configs: &Configs) -> PerComponent<Weights> {
    PerComponent::from_fn(|part| tiny::weights_of(part, &configs.manifest(part), DType::Bf16).unwrap())
}

#[test]
fn any_sizes_that_keep_the_rules_are_run() {
    let defaults = ModelDefaults::parse(
        Path::new("kiln.json"),
        br#"{"name": "odd", "text_layers": [1, 2, 4], "max_text_tokens": 48, "width": 80, "height": 64, "steps": 2}"#,
    )
    .unwrap();
    let model = common::opened(hashed(&unusual()), Variant::Distilled, defaults.clone());
    assert_eq!((&model.configs, model.name.as_str()), (&unusual(), "odd"));
    let job = Job {
        prompt: "a fox".into(),
        size: Pixels::new(defaults.width, defaults.height).unwrap(),
        start: None,
        steps: defaults.steps(model.variant),
        sigmas: None,
        padding: Padding::Right,
        negative: String::new(),
        references: vec![ReferenceInput { grid: Grid { width: 4, height: 5 }, pixels: vec![0.5; 4 * 5 * 256 * 3].into() }],
        guidance: 1.0,
        seeds: vec![1],
        noise: Noise::Drawn(NoiseKind::HOPPER),
        record: true,
        adapters: None,
    };
    let options = LoadOptions { precision: Precision::F32, references: true, ..LoadOptions::DEFAULT };
    let planned = estimate(model.estimate_request(options, GemmFormats::ALL), &job).unwrap();
    assert_eq!((planned.text_tokens, planned.canvas_tokens, planned.reference_tokens), (48, 20, vec![20]));
    let cpu = Cpu::new(0, Arc::default()).unwrap();
    let mut engine = Engine::load(Box::new(cpu), model, options, &Silent).unwrap();
    let mut outputs = Vec::new();
    engine
        .generate(&job, &Silent, &mut |output| {
            outputs.push(output);
            Ok(())
        })
        .unwrap();
    let record = outputs[0].record.as_ref().unwrap();
    assert_eq!((record.token_ids.len(), record.prompt_embeds.len()), (48, 48 * 480));
    assert_eq!((outputs[0].image.width, outputs[0].image.height), (80, 64));
}

#[test]
fn a_vocabulary_of_another_size_needs_a_configuration() {
    let text = TextConfig { vocab: 704, ..Configs::TINY.text_encoder };
    let weights = tiny::weights_of(Component::TextEncoder, &text_manifest(&text), DType::Bf16).unwrap();
    let config = ConfigFile::parse(Path::new("config.json"), br#"{"vocab_size": 704}"#).unwrap();
    assert_eq!(detect_text(&weights, Some(&config)).unwrap().vocab, 704);
    // Without a config file, the vocabulary comes from known encoders of this width.
    let known = detect_text(&weights, None).unwrap();
    let error = weights.check(&text_manifest(&known)).unwrap_err();
    assert!(message(&error).contains("`model.embed_tokens.weight` is [704, 128], this model needs [320, 128]"), "{error}");
}

#[test]
fn sizes_that_break_a_rule_are_refused_by_it() {
    let Configs { transformer, text_encoder: text, vae } = unusual();
    let config = |text: &str| ConfigFile::parse(Path::new("config.json"), text.as_bytes()).unwrap();
    let refused = |error: kiln::error::Error, rule: &str| assert!(message(&error).contains(rule), "{rule}: {}", message(&error));

    let narrow = TransformerConfig { hidden: 320, ..transformer.clone() };
    let weights = tiny::weights_of(Component::Transformer, &transformer_manifest(&narrow), DType::Bf16).unwrap();
    refused(TransformerConfig::detect(&weights, None).unwrap_err(), "its width 320 is not a multiple of 128");
    let weights = &hashed(&unusual()).transformer;
    for (json, rule) in [
        (r#"{"guidance_embeds": false, "attention_head_dim": 64}"#, "`attention_head_dim` is 64, needed is 128"),
        (r#"{"guidance_embeds": false, "axes_dims_rope": [64, 32, 32, 32]}"#, "four even numbers with sum 128"),
        (r#"{"guidance_embeds": false, "mlp_ratio": 4}"#, "`mlp_ratio` is 4, needed is 3.0"),
        (r#"{"guidance_embeds": false, "num_attention_heads": 6}"#, "`num_attention_heads` is 6, the weights have 3"),
    ] {
        refused(TransformerConfig::detect(weights, Some(&config(json))).unwrap_err(), rule);
    }

    let uneven = TextConfig { heads: 3, kv_heads: 2, ..text.clone() };
    let weights = tiny::weights_of(Component::TextEncoder, &text_manifest(&uneven), DType::Bf16).unwrap();
    refused(detect_text(&weights, None).unwrap_err(), "3 heads over 2 key heads of 128; query heads have to be a multiple of");
    let weights = &hashed(&unusual()).text_encoder;
    refused(detect_text(weights, Some(&config(r#"{"head_dim": 64}"#))).unwrap_err(), "`head_dim` is 64, needed is 128");
    let deep = ModelDefaults::parse(Path::new("kiln.json"), br#"{"text_layers": [1, 2, 5]}"#).unwrap();
    refused(TextConfig::detect(weights, None, &deep).unwrap_err(), "(kiln.json): `text_layers` ends with 5, the text encoder's");
    let last = ModelDefaults::parse(Path::new("kiln.json"), br#"{"text_layers": [1, 2, 4]}"#).unwrap();
    let whole = config(r#"{"num_hidden_layers": 4}"#);
    refused(TextConfig::detect(weights, Some(&whole), &last).unwrap_err(), "has to be less than the text encoder's 4 layers");

    let odd = VaeConfig { decoder: [32, 48, 64, 64], ..vae };
    let weights = tiny::weights_of(Component::Vae, &vae_manifest(&odd), DType::Bf16).unwrap();
    refused(VaeConfig::detect(&weights, None).unwrap_err(), "48 channels do not form 32 groups");
    let weights = &hashed(&unusual()).vae;
    let groups = config(r#"{"norm_num_groups": 16}"#);
    refused(VaeConfig::detect(weights, Some(&groups)).unwrap_err(), "`norm_num_groups` is 16, needed is 32");
}

/// The tiny model on disk and its weights: transformer, text encoder, VAE.
fn tiny_model() -> (Scratch, [Weights; 3]) {
    let scratch = Scratch::new();
    tiny::write_to(scratch.path(), Layout::Diffusers, DType::Bf16, &Default::default()).unwrap();
    let model = tiny::model(Layout::Diffusers, DType::Bf16).unwrap();
    (scratch, [Component::Transformer, Component::TextEncoder, Component::Vae].map(|part| model.weights(part).unwrap()))
}

/// Changes one key of a config file of `tiny`, and detects with it.
fn changed<T>(tiny: &Scratch, folder: &str, detect: impl Fn(&ConfigFile) -> Result<T>, key: &str, value: Value) -> Result<T> {
    let original = tiny.path().join(folder).join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(original).unwrap()).unwrap();
    match value {
        Value::Null => drop(config.as_object_mut().unwrap().remove(key)),
        value => config[key] = value,
    }
    detect(&ConfigFile::read(&tiny.write("changed/config.json", config.to_string()))?)
}

#[test]
fn config_files_are_compared_and_read() {
    let (scratch, [transformer, text, vae]) = tiny_model();
    let transformer = |key: &str, value: Value| {
        changed(&scratch, "transformer", |p| TransformerConfig::detect(&transformer, Some(p)), key, value)
    };
    let text = |key: &str, value: Value| changed(&scratch, "text_encoder", |p| detect_text(&text, Some(p)), key, value);
    let vae = |key: &str, value: Value| changed(&scratch, "vae", |p| VaeConfig::detect(&vae, Some(p)), key, value);
    let refused = |error: kiln::error::Error, key: &str| {
        let text = message(&error);
        assert!(text.contains(&format!("`{key}` is")) && text.contains("config.json"), "{text}");
    };
    for key in ["num_layers", "num_single_layers", "num_attention_heads", "joint_attention_dim", "in_channels", "mlp_ratio"] {
        refused(transformer(key, 7.into()).unwrap_err(), key);
        assert!(transformer(key, Value::Null).is_ok());
    }
    // The default of this key is that the model embeds the guidance scale.
    refused(transformer("guidance_embeds", Value::Null).unwrap_err(), "guidance_embeds");
    refused(transformer("num_layers", "2".into()).unwrap_err(), "num_layers");
    refused(transformer("num_layers", (-2).into()).unwrap_err(), "num_layers");
    refused(transformer("axes_dims_rope", vec![64, 32, 32, 32].into()).unwrap_err(), "axes_dims_rope");
    refused(transformer("eps", 0.into()).unwrap_err(), "eps");
    assert_eq!(transformer("rope_theta", 10_000.into()).unwrap().rope_theta, 10_000.0);
    assert_eq!(transformer("eps", 1e-5.into()).unwrap().eps, 1e-5);
    assert_eq!(transformer("axes_dims_rope", vec![16, 56, 56, 0].into()).unwrap().rope_axes, [16, 56, 56, 0]);

    for key in
        ["hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size", "num_hidden_layers"]
    {
        refused(text(key, 7.into()).unwrap_err(), key);
    }
    assert_eq!(text("num_hidden_layers", 36.into()).unwrap().layers, 28);
    assert_eq!(text("rope_theta", 5_000_000.into()).unwrap().rope_theta, 5e6);
    assert_eq!(text("rms_norm_eps", 1e-5.into()).unwrap().eps, 1e-5);
    assert!(text("model_type", "mistral".into()).unwrap_err().to_string().starts_with("not a text encoder of FLUX.2"));
    refused(text("rope_scaling", serde_json::json!({"rope_type": "yarn"})).unwrap_err(), "rope_scaling");
    refused(text("attention_bias", true.into()).unwrap_err(), "attention_bias");

    refused(vae("block_out_channels", vec![32, 32, 64, 64].into()).unwrap_err(), "block_out_channels");
    refused(vae("decoder_block_out_channels", vec![96, 192, 384, 384].into()).unwrap_err(), "decoder_block_out_channels");
    refused(vae("latent_channels", 16.into()).unwrap_err(), "latent_channels");
    assert_eq!(vae("batch_norm_eps", 1e-5.into()).unwrap().stats_eps, 1e-5);
}

/// Computation keys of a `config.json` must agree with the engine. These keys do not describe sizes.
#[test]
fn config_files_that_ask_for_another_computation_are_refused() {
    let (scratch, [transformer, text, vae]) = tiny_model();
    let check = |folder: &str, key: &str, value: Value| match folder {
        "transformer" => changed(&scratch, folder, |p| TransformerConfig::detect(&transformer, Some(p)).map(drop), key, value),
        "text_encoder" => changed(&scratch, folder, |p| detect_text(&text, Some(p)).map(drop), key, value),
        _ => changed(&scratch, folder, |p| VaeConfig::detect(&vae, Some(p)).map(drop), key, value),
    };
    let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    for (folder, key, value) in [
        ("transformer", "_class_name", r#""SD3Transformer2DModel""#),
        ("transformer", "_class_name", "7"),
        ("transformer", "timestep_guidance_channels", "320"),
        ("transformer", "eps", "1e300"),
        ("transformer", "eps", "1e-300"),
        ("transformer", "eps", "0"),
        ("transformer", "eps", "-1e-6"),
        ("transformer", "eps", "0.5"),
        ("transformer", "eps", r#""1e-6""#),
        ("transformer", "rope_theta", "0"),
        ("transformer", "rope_theta", "1e300"),
        ("text_encoder", "hidden_act", r#""gelu_new""#),
        ("text_encoder", "use_sliding_window", "true"),
        ("text_encoder", "use_sliding_window", r#""no""#),
        ("text_encoder", "layer_types", r#"["full_attention", "sliding_attention"]"#),
        ("text_encoder", "layer_types", "28"),
        ("text_encoder", "rms_norm_eps", "1e39"),
        ("text_encoder", "rope_theta", "-1"),
        ("text_encoder", "model_type", "5"),
        ("text_encoder", "architectures", r#""LlamaForCausalLM""#),
        ("text_encoder", "partial_rotary_factor", "0.5"),
        ("text_encoder", "rope_parameters", "[1]"),
        ("text_encoder", "rope_parameters", r#"{"type": "yarn"}"#),
        ("text_encoder", "rope_parameters", r#"{"rope_type": 7}"#),
        ("text_encoder", "rope_parameters", r#"{"rope_type": "default", "partial_rotary_factor": 0.5}"#),
        ("text_encoder", "rope_parameters", r#"{"full_attention": {"rope_type": "default"}}"#),
        ("text_encoder", "quantization_config", r#"{"quant_method": "gptq"}"#),
        ("transformer", "quantization_config", r#"{"quant_method": "bitsandbytes"}"#),
        ("vae", "_class_name", r#""AutoencoderKL""#),
        ("vae", "act_fn", r#""relu""#),
        ("vae", "in_channels", "4"),
        ("vae", "out_channels", "4"),
        ("vae", "mid_block_add_attention", "false"),
        ("vae", "use_quant_conv", "false"),
        ("vae", "use_post_quant_conv", "false"),
        ("vae", "patch_size", "[1, 1]"),
        ("vae", "up_block_types", r#"["UpDecoderBlock2D", "AttnUpDecoderBlock2D"]"#),
        ("vae", "batch_norm_eps", "1e300"),
    ] {
        let text = message(&check(folder, key, json(value)).expect_err(key));
        assert!(text.starts_with("unsupported configuration (") && text.contains(&format!("`{key}` is ")), "{key}: {text}");
    }
    let text = message(&check("text_encoder", "architectures", json(r#"["MistralForCausalLM"]"#)).unwrap_err());
    assert!(
        text.starts_with("not a text encoder of FLUX.2") && text.contains(r#"its configuration says "MistralForCausalLM""#),
        "{text}"
    );
    // A number that overflows f64 is invalid.
    let path = scratch.write("changed/config.json", r#"{"eps": 1e999}"#);
    assert!(message(&ConfigFile::read(&path).unwrap_err()).contains("number out of range"));
    // The values of the published files, and values without an effect.
    for (folder, key, value) in [
        ("transformer", "_class_name", r#""Flux2Transformer2DModel""#),
        ("transformer", "eps", "1e-05"),
        ("text_encoder", "architectures", r#"["Qwen3ForCausalLM"]"#),
        ("text_encoder", "architectures", r#"["Qwen3Model"]"#),
        ("text_encoder", "rope_parameters", r#"{"type": "default", "partial_rotary_factor": 1.0}"#),
        ("text_encoder", "rope_parameters", "null"),
        ("text_encoder", "partial_rotary_factor", "1.0"),
        ("text_encoder", "quantization_config", "null"),
        ("text_encoder", "sliding_window", "null"),
        ("text_encoder", "sliding_window", "131072"),
        ("text_encoder", "max_window_layers", "36"),
        ("text_encoder", "use_sliding_window", "false"),
        ("text_encoder", "tie_word_embeddings", "false"),
        ("text_encoder", "layer_types", r#"["full_attention", "full_attention"]"#),
        ("vae", "force_upcast", "true"),
        ("vae", "sample_size", "1024"),
        ("vae", "batch_norm_momentum", "0.1"),
    ] {
        check(folder, key, json(value)).unwrap_or_else(|error| panic!("{key}: {error}"));
    }
}

#[test]
fn another_schedule_is_refused() {
    let scratch = Scratch::new();
    let check = |text: &str| check_scheduler(&ConfigFile::read(&scratch.write("scheduler_config.json", text)).unwrap());
    // The scheduler config that diffusers writes for FLUX.2.
    check(
        r#"{"_class_name": "FlowMatchEulerDiscreteScheduler", "base_image_seq_len": 256, "base_shift": 0.5,
            "invert_sigmas": false, "max_image_seq_len": 4096, "max_shift": 1.15, "num_train_timesteps": 1000, "shift": 3.0,
            "shift_terminal": null, "stochastic_sampling": false, "time_shift_type": "exponential", "use_beta_sigmas": false,
            "use_dynamic_shifting": true, "use_exponential_sigmas": false, "use_karras_sigmas": false}"#,
    )
    .unwrap();
    for (key, value) in [
        ("_class_name", r#""DDIMScheduler""#),
        ("num_train_timesteps", "500"),
        ("use_dynamic_shifting", "false"),
        ("use_dynamic_shifting", r#""yes""#),
        ("time_shift_type", r#""linear""#),
        ("shift_terminal", "0.02"),
        ("use_karras_sigmas", "true"),
        ("use_exponential_sigmas", "true"),
        ("use_beta_sigmas", "true"),
        ("invert_sigmas", "true"),
        ("stochastic_sampling", "true"),
    ] {
        let text = message(&check(&format!(r#"{{"{key}": {value}}}"#)).expect_err(key));
        assert!(text.contains(&format!("`{key}` is {value}, needed is ")), "{text}");
    }
}

#[test]
fn rope_theta_may_be_nested() {
    let weights = tiny::model(Layout::Diffusers, DType::Bf16).unwrap().weights(Component::TextEncoder).unwrap();
    let detect = |path: &Path| detect_text(&weights, Some(&ConfigFile::read(path)?));
    let scratch = Scratch::new();
    let path =
        scratch.write("config.json", r#"{"rope_parameters":{"rope_type":"default","rope_theta":250000.0},"rope_scaling":null}"#);
    assert_eq!(detect(&path).unwrap().rope_theta, 250_000.0);
    let path = scratch.write("config.json", r#"{"rope_parameters":{"rope_type":"yarn","rope_theta":250000.0}}"#);
    assert!(detect(&path).unwrap_err().to_string().contains("`rope_parameters`"));
    // If both keys exist, they have to agree.
    let path = scratch.write("config.json", r#"{"rope_theta":1000000,"rope_parameters":{"rope_theta":1000000.0}}"#);
    assert_eq!(detect(&path).unwrap().rope_theta, 1e6);
    let path = scratch.write("config.json", r#"{"rope_theta":10000,"rope_parameters":{"rope_theta":1000000.0}}"#);
    let text = message(&detect(&path).unwrap_err());
    assert!(text.ends_with("`rope_theta` is 10000, needed is 1000000.0, as in `rope_parameters`"), "{text}");
    let path = scratch.write("config.json", "[1]");
    assert!(message(&detect(&path).unwrap_err()).contains("not an object"));
}

#[test]
fn other_models_are_not_mistaken_for_this_one() {
    let open = |part, tensors: &[Described]| Weights::from_shards(part, vec![shard(zeros(tensors)).unwrap()]).unwrap();
    let predecessor = [
        described("img_in.weight", "BF16", &[3072, 64]),
        described("double_blocks.0.img_mod.lin.weight", "BF16", &[18432, 3072]),
        described("double_blocks.0.img_attn.qkv.weight", "BF16", &[9216, 3072]),
    ];
    let error = TransformerConfig::detect(&open(Component::Transformer, &predecessor), None).unwrap_err();
    assert_eq!(
        message(&error),
        format!(
            "not a FLUX.2 transformer (x.safetensors): it has no `double_stream_modulation_img.lin.weight` / kiln runs {}",
            supported()
        )
    );
    let mistral = [described("model.layers.0.self_attn.q_proj.weight", "BF16", &[128, 128])];
    let error = detect_text(&open(Component::TextEncoder, &mistral), None).unwrap_err();
    assert!(message(&error).starts_with("not a text encoder of FLUX.2"), "{error}");
    let error = VaeConfig::detect(&open(Component::Vae, &mistral), None).unwrap_err();
    assert!(message(&error).starts_with("unknown architecture"), "{error}");
    // Sizes that would overflow later are refused here.
    let absurd = [described("double_stream_modulation_img.lin.weight", "BF16", &[0, 1 << 40])];
    let error = TransformerConfig::detect(&open(Component::Transformer, &absurd), None).unwrap_err();
    assert!(message(&error).contains("its width is 1099511627776"), "{error}");
}

#[test]
fn the_index_of_a_pipeline_tells_the_variant() {
    let scratch = Scratch::new();
    for (text, variant) in [
        (r#"{"_class_name":"Flux2KleinPipeline","is_distilled":true}"#, Variant::Distilled),
        (r#"{"_class_name":"Flux2KleinPipeline","is_distilled":false}"#, Variant::Base),
        (r#"{"_class_name":"Flux2KleinPipeline"}"#, Variant::Base),
        (r#"{"_class_name":"Flux2KleinKVPipeline","is_distilled":true}"#, Variant::Kv),
    ] {
        let path = scratch.write("model_index.json", text);
        // `model_index.json` takes precedence over the name.
        assert_eq!(
            Variant::detect(&Configs::KLEIN_4B.transformer, Some(&ConfigFile::read(&path).unwrap()), &["klein-base"]).unwrap(),
            variant,
            "{text}"
        );
    }
    let path = scratch.write("model_index.json", r#"{"_class_name":"FluxPipeline"}"#);
    let error = Variant::detect(&Configs::KLEIN_4B.transformer, Some(&ConfigFile::read(&path).unwrap()), &["klein"]).unwrap_err();
    assert!(message(&error).ends_with("`_class_name` is \"FluxPipeline\", needed is a pipeline of FLUX.2"), "{error}");
}

/// The reference fills its models by the same rule; these values were read back from them.
#[test]
fn the_tiny_model_is_the_one_the_reference_ran() {
    let goldens: Value = serde_json::from_str(include_str!("../../fixtures/goldens.json")).unwrap();
    let model = tiny::model(Layout::Diffusers, DType::F32).unwrap();
    for (key, part) in
        [("transformer", Component::Transformer), ("text_encoder", Component::TextEncoder), ("vae", Component::Vae)]
    {
        let expected = &goldens["weights"][key];
        let weights = model.weights(part).unwrap();
        let shard = &weights.shards()[0];
        let floats = || shard.tensors().filter(|(_, entry)| entry.dtype.name == "F32");
        assert_eq!(floats().count() as u64, expected["tensors"].as_u64().unwrap());
        let parameters: usize = floats().map(|(_, entry)| entry.shape.iter().product::<usize>()).sum();
        assert_eq!(parameters as u64, expected["parameters"].as_u64().unwrap());
        for sample in expected["samples"].as_array().unwrap() {
            let name = sample["name"].as_str().unwrap();
            let bytes = shard.bytes(name).unwrap();
            let values: Vec<f64> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect();
            let first: Vec<f64> = sample["first"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
            assert_eq!(values[..first.len()], first, "{name}");
            assert_eq!(values.iter().sum::<f64>(), sample["sum"].as_f64().unwrap(), "{name}");
        }
    }
}
