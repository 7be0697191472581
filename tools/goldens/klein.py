"""tests/fixtures/goldens.*: text to image of FLUX.2 [klein].

models/tiny/tokenizer.json
    The tiny tokenizer: id = byte value for 0..255, then Qwen's 26 added tokens.

tests/fixtures/goldens.safetensors, for each case:
    <case>.token_ids      I32 [512]         the input of the text encoder
    <case>.prompt_embeds  F32 [32, 384]     every 16th of the 512 rows
    <case>.noise_head     F32 [64]          start of the initial noise, token order
    <case>.velocity       F32 [N, 128]      the input of the scheduler in step 0
    <case>.latents        F32 [N, 128]      after the last step, still normalized
    <case>.image          U16 [H, W, 3]     round(65535 * v), v in [0, 1]
    All come from the fp32 run; N is the number of 16x16 pixel patches, row-major.

tests/fixtures/goldens.json:
    package versions, the model configuration, the cases with their bf16 errors, and samples of the hashed weights.
"""

from dataclasses import asdict

import torch

from goldens.files import ROOT, package_versions
from goldens.model import SCHEDULER, TEXT_ENCODER, TRANSFORMER, VAE, build_components, to_bf16, weight_summary
from goldens.pipeline import Case, run_case
from goldens.text import tokenizer_json
from goldens.values import PACKAGES, Recording

TOKENIZER = ROOT / "models" / "tiny" / "tokenizer.json"

CASES = (
    Case("square", "a red fox in the snow", 128, 128, 4, 0, True, 1.0),
    # Not square, text outside ASCII, and a seed that does not fit in 32 bits.
    Case("odd", 'Ünïcode é — 你好 🦀 "sign"', 208, 144, 2, 12345678901, True, 1.0),
    # The undistilled model: two passes per step, the second on the empty prompt.
    Case("base", "two lamps", 80, 96, 3, 7, False, 4.0),
)

WEIGHT_SAMPLES = dict(
    transformer=(
        "x_embedder.weight", "time_guidance_embed.timestep_embedder.linear_1.weight",
        "transformer_blocks.1.attn.norm_added_k.weight", "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight",
        "norm_out.linear.weight",
    ),
    text_encoder=("model.embed_tokens.weight", "model.layers.0.self_attn.q_norm.weight", "model.layers.26.mlp.down_proj.weight"),
    vae=(
        "bn.running_mean", "bn.running_var", "decoder.conv_in.weight", "decoder.mid_block.attentions.0.to_q.weight",
        "decoder.up_blocks.2.resnets.0.norm1.bias", "post_quant_conv.weight",
    ),
)  # fmt: skip


def check_noise():
    """Checks the two facts about torch's CPU generator on which the cases rely."""

    def draw(seed, dtype):
        return torch.randn(1, 128, 5, 6, generator=torch.Generator("cpu").manual_seed(seed), dtype=dtype)

    for seed in (case.seed for case in CASES):
        fp32 = draw(seed, torch.float32)
        assert torch.equal(fp32, draw(seed & 0xFFFFFFFF, torch.float32)), "the seed is more than its low 32 bits"
        assert torch.equal(fp32.to(torch.bfloat16), draw(seed, torch.bfloat16)), "bf16 noise is not rounded fp32"


def compute():
    check_noise()
    components, recording = build_components(), Recording()
    weights = weight_summary(components, WEIGHT_SAMPLES)
    exact = [run_case(components, case) for case in CASES]
    to_bf16(components)
    for case, fp32 in zip(CASES, exact):
        bf16 = [run_case(components, case, exact_time) for exact_time in (False, True)]
        assert all(torch.equal(run.noise, fp32.noise.to(torch.bfloat16)) for run in bf16)
        errors = recording.add(asdict(case), fp32.tensors(), fp32.outputs(), *(run.outputs() for run in bf16))
        fp32.check_sanity(case, errors[0])
    summary = dict(
        versions=package_versions(*PACKAGES),
        config=dict(transformer=TRANSFORMER, text_encoder=TEXT_ENCODER, vae=VAE, scheduler=SCHEDULER),
        cases=recording.cases,
        weights=weights,
    )
    return recording.golden("goldens", summary, contents={TOKENIZER: tokenizer_json().encode()})
