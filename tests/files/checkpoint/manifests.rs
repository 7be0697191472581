//! Manifests of the real models: counts, bytes, and the exact sizes of the published files.

use common::header::{Described, header_of};
use kiln::inspect::KNOWN;
use kiln::internals::component::Component;
use kiln::internals::config::{Configs, TransformerConfig, VaeConfig};
use kiln::internals::model::{text_manifest, transformer_manifest, vae_manifest};
use kiln::internals::names::{Layout, TensorSpec, file_tensors};

fn elements(specs: &[TensorSpec]) -> u64 {
    specs.iter().map(|spec| spec.shape.iter().product::<usize>() as u64).sum()
}

fn in_layout(part: Component, layout: Layout, specs: &[TensorSpec]) -> Vec<TensorSpec> {
    specs.iter().flat_map(|spec| file_tensors(part, layout, spec)).collect()
}

/// The reference writer's header is compact, in order of name, and padded to a multiple of 8.
#[test]
fn plain_files_have_the_published_sizes_to_the_byte() {
    let mut compared = 0;
    for file in KNOWN.iter().filter(|file| file.bytes.is_some()) {
        let Some(tensors) = file.tensors().filter(|all| all.values().all(|(dtype, _)| *dtype == "BF16")) else { continue };
        let tensors: Vec<Described> = tensors.into_iter().map(|(name, (dtype, shape))| (name, dtype, shape)).collect();
        let (header, data) = header_of(&tensors, "");
        let header = header.replace(' ', "").len().next_multiple_of(8);
        assert_eq!(Some((8 + header + data) as u64), file.bytes, "{}", file.name);
        compared += 1;
    }
    assert_eq!(compared, 5);
}

#[test]
fn layouts_hold_the_same_elements() {
    for (config, original, diffusers, bytes) in
        [(Configs::KLEIN_4B.transformer, 149, 169, 7_751_089_152u64), (Configs::KLEIN_9B.transformer, 201, 233, 18_157_162_496)]
    {
        let manifest = transformer_manifest(&config);
        assert_eq!(2 * elements(&manifest), bytes);
        let renamed = in_layout(Component::Transformer, Layout::Diffusers, &manifest);
        assert_eq!((renamed.len(), elements(&renamed)), (diffusers, elements(&manifest)));
        assert_eq!(in_layout(Component::Transformer, Layout::Bfl, &manifest).len(), original);
    }
    for (config, layers, embedding) in [
        (Configs::KLEIN_4B.text_encoder, 5_450_264_064u64, 777_912_320),
        (Configs::KLEIN_9B.text_encoder, 10_419_107_328, 1_244_659_712),
    ] {
        let used = text_manifest(&config);
        assert_eq!(used.len(), 1 + 27 * 8);
        assert_eq!((2 * elements(&used[..1]), 2 * elements(&used[1..])), (embedding, layers));
    }
}

#[test]
fn autoencoders_match_the_published_counts() {
    let full = vae_manifest(&Configs::KLEIN_4B.vae);
    // The 251st is a counter that nothing reads.
    assert_eq!(full.len(), 250);
    assert_eq!(elements(&full), 84_046_371);
    let small = VaeConfig { decoder: [96, 192, 384, 384], ..Configs::KLEIN_4B.vae };
    assert_eq!(elements(&vae_manifest(&small)), 62_373_347);
    for (config, expected) in [(Configs::KLEIN_4B.vae, 49_620_259), (small, 27_947_235)] {
        let is_decoder = |spec: &TensorSpec| spec.name.starts_with("decoder.") || spec.name.starts_with("post_quant_conv.");
        let decoder: Vec<TensorSpec> = vae_manifest(&config).into_iter().filter(is_decoder).collect();
        assert_eq!(elements(&decoder), expected);
    }
    let original = in_layout(Component::Vae, Layout::Bfl, &full);
    assert_eq!((original.len(), elements(&original)), (250, elements(&full)));
    let attention = original.iter().find(|spec| spec.name == "decoder.mid.attn_1.proj_out.weight").unwrap();
    assert_eq!(attention.shape, [512, 512, 1, 1]);
    let shortcuts: Vec<&str> = original.iter().map(|s| s.name.as_str()).filter(|n| n.ends_with("nin_shortcut.weight")).collect();
    assert_eq!(
        shortcuts,
        [
            "encoder.down.1.block.0.nin_shortcut.weight",
            "encoder.down.2.block.0.nin_shortcut.weight",
            "decoder.up.1.block.0.nin_shortcut.weight",
            "decoder.up.0.block.0.nin_shortcut.weight",
        ]
    );
}

#[test]
fn tensors_are_listed_in_the_order_in_which_missing_ones_are_named() {
    let config = TransformerConfig { guidance_embed: true, ..Configs::TINY.transformer };
    let transformer = transformer_manifest(&config);
    let vae = vae_manifest(&Configs::TINY.vae);
    let names = |specs: &[TensorSpec]| specs.iter().map(|spec| spec.name.clone()).collect::<Vec<_>>().join(" ");
    assert_eq!(
        names(&transformer[..12]),
        "img_in.weight txt_in.weight time_in.in_layer.weight time_in.out_layer.weight double_stream_modulation_img.lin.weight \
         double_stream_modulation_txt.lin.weight single_stream_modulation.lin.weight final_layer.adaLN_modulation.1.weight \
         final_layer.linear.weight guidance_in.in_layer.weight guidance_in.out_layer.weight double_blocks.0.img_attn.qkv.weight"
    );
    assert_eq!(
        names(&transformer[transformer.len() - 4..]),
        "single_blocks.1.linear1.weight single_blocks.1.linear2.weight single_blocks.1.norm.query_norm.scale \
         single_blocks.1.norm.key_norm.scale"
    );
    let place = |name: &str| vae.iter().position(|spec| spec.name == name).unwrap();
    let flow = [
        "encoder.conv_in.weight",
        "encoder.down_blocks.0.resnets.0.norm1.weight",
        "encoder.mid_block.attentions.0.group_norm.weight",
        "encoder.mid_block.attentions.0.to_q.weight",
        "encoder.conv_out.bias",
        "quant_conv.weight",
        "post_quant_conv.weight",
        "decoder.conv_in.weight",
        "decoder.mid_block.resnets.1.conv2.bias",
        "decoder.up_blocks.0.resnets.0.norm1.weight",
        "decoder.conv_norm_out.weight",
        "decoder.conv_out.bias",
        "bn.running_mean",
        "bn.running_var",
    ];
    assert!(flow.map(place).is_sorted(), "{:?}", flow.map(place));
}
