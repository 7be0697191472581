"""The tiny models: configurations and weights. The package's docstring describes how weights are made."""

import math
import re

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from transformers import Qwen3Config, Qwen3ForCausalLM

from goldens.values import hash_bytes

TRANSFORMER = dict(
    patch_size=1, in_channels=128, num_layers=2, num_single_layers=2, attention_head_dim=128, num_attention_heads=2,
    joint_attention_dim=384, timestep_guidance_channels=256, mlp_ratio=3.0, axes_dims_rope=[32, 32, 32, 32], rope_theta=2000,
    eps=1e-6, guidance_embeds=False,
)  # fmt: skip
GUIDANCE_TRANSFORMER = TRANSFORMER | dict(guidance_embeds=True)

TEXT_ENCODER = dict(
    vocab_size=320, hidden_size=128, intermediate_size=384, num_hidden_layers=28, num_attention_heads=4, num_key_value_heads=2,
    head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_parameters=dict(rope_type="default", rope_theta=1e6),
    attention_bias=False, tie_word_embeddings=True,
)  # fmt: skip
# One layer after the last tap; otherwise the tapped state would be the normed last one.
MISTRAL_ENCODER = dict(
    vocab_size=1280, hidden_size=128, intermediate_size=384, num_hidden_layers=31, num_attention_heads=8, num_key_value_heads=2,
    head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_parameters=dict(rope_type="default", rope_theta=1e9),
    sliding_window=None, tie_word_embeddings=False,
)  # fmt: skip
# Every setting not named here keeps the class default, which is the FLUX.2 value.
VAE = dict(block_out_channels=[32, 64, 64, 64], layers_per_block=2, latent_channels=32, norm_num_groups=32)
SCHEDULER = dict(
    num_train_timesteps=1000, shift=3.0, use_dynamic_shifting=True, time_shift_type="exponential", base_shift=0.5, max_shift=1.15
)

# --- Weights ----------------------------------------------------------------

QK_NORM = re.compile(r"\.norm_(added_)?[qk]\.weight$")


def tensor_values(name, shape):
    k = hash_bytes(name, *shape)
    if len(shape) >= 2:
        # Close to unit gain: the values have variance 4^-e / 3.
        fan_in, e = math.prod(shape[1:]), 0
        while 4 * 4**e < fan_in:
            e += 1
        values = (2 * k - 255) / 256 * 2.0**-e
    elif name.endswith((".weight", ".running_var")):
        values = 1 + ((k & 127) - 64) / 128
        if QK_NORM.search(name):
            values = 2 * values  # sharp attention, so that a wrong position or order shows in the output
    else:
        values = (2 * k - 255) / 256 / 8
    values = torch.from_numpy(values)
    assert torch.equal(values.to(torch.bfloat16).double(), values), f"{name} is not exact in bf16"
    return values.float()


def stored_tensors(model):
    """The tensors in a checkpoint of `model`: no tied copies, no counters."""
    tied = getattr(model, "_tied_weights_keys", None) or {}
    return {name: t for name, t in model.state_dict().items() if name not in tied and t.is_floating_point()}


def fill(model):
    with torch.no_grad():
        for name, tensor in stored_tensors(model).items():
            tensor.copy_(tensor_values(name, tuple(tensor.shape)))
    return model.eval()


def build_components():
    # `fill` overwrites all initial weights of the constructors.
    encoder = fill(Qwen3ForCausalLM(Qwen3Config(**TEXT_ENCODER)))
    assert encoder.lm_head.weight is encoder.model.embed_tokens.weight, "the output head should be tied"
    models = dict(transformer=Flux2Transformer2DModel(**TRANSFORMER), vae=AutoencoderKLFlux2(**VAE))
    return {part: fill(model) for part, model in models.items()} | dict(text_encoder=encoder)


def to_bf16(components):
    """Converts the models in place to the result of loading a checkpoint in bf16."""
    for model in components.values():
        # Module.to also rounds the rotary frequencies, which are a computed buffer and
        # not a weight; a model loaded with from_pretrained has them in fp32.
        rotary = {module: module.inv_freq.clone() for module in model.modules() if hasattr(module, "inv_freq")}
        model.to(torch.bfloat16)
        for module, inv_freq in rotary.items():
            module.inv_freq = inv_freq


def weight_summary(components, names_by_part):
    """Values of some tensors, read back from the models that are run."""

    def sample(name, tensor):
        flat = tensor.double().flatten()
        return dict(name=name, shape=list(tensor.shape), first=flat[:8].tolist(), sum=flat.sum().item())

    summary = {}
    for part, names in names_by_part.items():
        tensors = stored_tensors(components[part])
        samples = [sample(name, tensors[name]) for name in names]
        summary[part] = dict(tensors=len(tensors), parameters=sum(t.numel() for t in tensors.values()), samples=samples)
    return summary


def latent_statistics(vae):
    """Mean and deviation of the latents, as the pipeline computes them."""
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    return mean, torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
