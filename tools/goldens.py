#!/usr/bin/env python3
"""Rebuild (or check) the reference fixtures under tests/fixtures.

The fixtures are the outputs of the diffusers FLUX.2 [klein] pipeline on a model
small enough to run on a CPU in seconds: the real classes, with a few narrow
layers, a byte-level tokenizer and weights made by an integer hash of the tensor
name. Nothing is downloaded and nothing is random but the seeded initial noise.
tools/goldens_modes.py does the same for references, negative prompts, the KV
model and the other modes, on the same model.

    pip install -r tools/requirements.txt
    python tools/goldens.py            # write the fixtures
    python tools/goldens.py --check    # recompute and compare, exit 1 on mismatch

Written files:

models/tiny/tokenizer.json
    The tiny tokenizer: id = byte value for 0..255, then Qwen's 26 added tokens.

tests/fixtures/goldens.safetensors, for each case:
    <case>.token_ids      I32 [512]         what the text encoder is given
    <case>.prompt_embeds  F32 [32, 384]     every 16th of the 512 rows
    <case>.noise_head     F32 [64]          start of the initial noise, token order
    <case>.velocity       F32 [N, 128]      what the scheduler is given in step 0
    <case>.latents        F32 [N, 128]      after the last step, still normalised
    <case>.image          U16 [H, W, 3]     round(65535 * v), v in [0, 1]
    All come from the fp32 run; N is the number of 16x16 pixel patches, row-major.

tests/fixtures/goldens.json:
    package versions, the model configuration, the cases, samples of the hashed
    weights, and for each case how far the same pipeline in bf16 is from fp32
    (relative L2), which is the yardstick for an engine that computes in bf16: once
    as the pipeline is, and once with the time embedding given the exact timestep,
    which the pipeline rounds to bf16 (a much larger error than all others).

Weights. With h = FNV-1a 64 of the tensor's name in UTF-8 and i the flat index,
k is the top byte of splitmix64's output for the state h + (i + 1) * GAMMA, and

    rank >= 2                      (2k - 255) / 256 * 2^-e, where e is the smallest
                                   integer >= 0 with 4^(e+1) >= fan-in, and fan-in
                                   the product of all dimensions but the first
    rank 1, *.weight, *.running_var    1 + ((k & 127) - 64) / 128; twice that for the
                                       transformer's query and key norms
    rank 1, anything else              (2k - 255) / 256 / 8

so that activations keep a size of order one, attention is sharp enough that a wrong
position shows, and every weight is exact in bf16.
"""

import argparse
import importlib.metadata
import itertools
import json
import math
import re
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from diffusers.utils import logging as diffusers_logging
from fixtures import ROOT, fnv1a
from transformers import Qwen2TokenizerFast, Qwen3Config, Qwen3ForCausalLM

TOKENIZER = ROOT / "models" / "tiny" / "tokenizer.json"

PACKAGES = ("accelerate", "diffusers", "numpy", "safetensors", "tokenizers", "torch", "transformers")

# --- The tiny model ---------------------------------------------------------

TRANSFORMER = dict(
    patch_size=1,
    in_channels=128,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=128,
    num_attention_heads=2,
    joint_attention_dim=384,
    timestep_guidance_channels=256,
    mlp_ratio=3.0,
    axes_dims_rope=[32, 32, 32, 32],
    rope_theta=2000,
    eps=1e-6,
    guidance_embeds=False,
)

TEXT_ENCODER = dict(
    vocab_size=320,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=28,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
    attention_bias=False,
    tie_word_embeddings=True,
)

# Whatever is not named here keeps the class default, which is the FLUX.2 value.
VAE = dict(
    block_out_channels=[32, 64, 64, 64],
    layers_per_block=2,
    latent_channels=32,
    norm_num_groups=32,
)

SCHEDULER = dict(
    num_train_timesteps=1000,
    shift=3.0,
    use_dynamic_shifting=True,
    time_shift_type="exponential",
    base_shift=0.5,
    max_shift=1.15,
)


@dataclass(frozen=True)
class Case:
    name: str
    prompt: str
    width: int
    height: int
    steps: int
    seed: int
    distilled: bool
    guidance: float


CASES = (
    Case("square", "a red fox in the snow", 128, 128, 4, 0, True, 1.0),
    # Not square, text outside ASCII, and a seed that does not fit in 32 bits.
    Case("odd", 'Ünïcode é — 你好 🦀 "sign"', 208, 144, 2, 12345678901, True, 1.0),
    # The undistilled model: two passes per step, the second on the empty prompt.
    Case("base", "two lamps", 80, 96, 3, 7, False, 4.0),
)

# --- Tokenizer --------------------------------------------------------------

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Qwen3's added tokens in the order of their ids. The second group is matched in
# the text just the same but does not carry the "special" flag.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
PLAIN_ADDED_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip

# What Qwen3's template yields for one user message with thinking disabled.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% endif %}"
    "{% endif %}"
)


def byte_alphabet():
    """GPT-2's printable character for each byte, in byte order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet, spare = [], 0x100
    for byte in range(256):
        if byte in printable:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(spare))
            spare += 1
    return alphabet


def tokenizer_json():
    """The tokenizer file: Qwen's pipeline around a BPE model without merges."""
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    split = dict(type="Split", pattern=dict(Regex=SPLIT_PATTERN), behavior="Isolated", invert=False)
    added = [(token, True) for token in SPECIAL_TOKENS] + [(token, False) for token in PLAIN_ADDED_TOKENS]
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    content = dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=[
            dict(id=256 + i, content=token, **flags, special=special) for i, (token, special) in enumerate(added)
        ],
        normalizer=dict(type="NFC"),
        pre_tokenizer=dict(type="Sequence", pretokenizers=[split, byte_level]),
        post_processor=byte_level,
        decoder=byte_level,
        model=dict(
            type="BPE",
            dropout=None,
            unk_token=None,
            continuing_subword_prefix="",
            end_of_word_suffix="",
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=False,
            vocab={char: byte for byte, char in enumerate(byte_alphabet())},
            merges=[],
        ),
    )
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n"


def load_tokenizer():
    tokenizer = Qwen2TokenizerFast(
        tokenizer_file=str(TOKENIZER),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    text = tokenizer.apply_chat_template(
        [dict(role="user", content="é")], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    expected = "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert text == expected, text
    # Bytes are their own ids, so the expected ids can be written down by hand.
    ids = [257, *b"user\n\xc3\xa9", 258, 10, 257, *b"assistant\n", 280, 10, 10, 281, 10, 10]
    assert tokenizer(text)["input_ids"] == ids
    return tokenizer


# --- Weights ----------------------------------------------------------------

GAMMA = 0x9E3779B97F4A7C15


def hash_bytes(name, count):
    """One byte, 0..255, for each flat index of the tensor called `name`."""
    z = np.uint64(fnv1a(name.encode())) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(56)).astype(np.int64)


QK_NORM = re.compile(r"\.norm_(added_)?[qk]\.weight$")


def tensor_values(name, shape):
    k = hash_bytes(name, math.prod(shape))
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
    values = torch.from_numpy(values).reshape(shape)
    assert torch.equal(values.to(torch.bfloat16).double(), values), f"{name} is not exact in bf16"
    return values.float()


def stored_tensors(model):
    """The tensors a checkpoint of `model` holds: no tied copies, no counters."""
    tied = getattr(model, "_tied_weights_keys", None) or {}
    return {name: t for name, t in model.state_dict().items() if name not in tied and t.is_floating_point()}


def fill(model):
    with torch.no_grad():
        for name, tensor in stored_tensors(model).items():
            tensor.copy_(tensor_values(name, tuple(tensor.shape)))
    return model.eval()


def build_components():
    # The initial weights of the constructors are all overwritten.
    components = dict(
        transformer=fill(Flux2Transformer2DModel(**TRANSFORMER)),
        vae=fill(AutoencoderKLFlux2(**VAE)),
        text_encoder=fill(Qwen3ForCausalLM(Qwen3Config(**TEXT_ENCODER))),
    )
    encoder = components["text_encoder"]
    assert encoder.lm_head.weight is encoder.model.embed_tokens.weight, "the output head should be tied"
    return components


def to_bf16(components):
    """Convert the models in place to what loading a checkpoint in bf16 gives."""
    for model in components.values():
        # Module.to also rounds the rotary frequencies, which are a computed buffer and
        # not a weight; a model loaded with from_pretrained has them in fp32.
        rotary = {module: module.inv_freq.clone() for module in model.modules() if hasattr(module, "inv_freq")}
        model.to(torch.bfloat16)
        for module, inv_freq in rotary.items():
            module.inv_freq = inv_freq


WEIGHT_SAMPLES = dict(
    transformer=(
        "x_embedder.weight",
        "time_guidance_embed.timestep_embedder.linear_1.weight",
        "transformer_blocks.1.attn.norm_added_k.weight",
        "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight",
        "norm_out.linear.weight",
    ),
    text_encoder=(
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.26.mlp.down_proj.weight",
    ),
    vae=(
        "bn.running_mean",
        "bn.running_var",
        "decoder.conv_in.weight",
        "decoder.mid_block.attentions.0.to_q.weight",
        "decoder.up_blocks.2.resnets.0.norm1.bias",
        "post_quant_conv.weight",
    ),
)


def weight_summary(components, names_by_part):
    """Values of some tensors, read back from the models that are run."""
    summary = {}
    for part, names in names_by_part.items():
        tensors = stored_tensors(components[part])
        samples = []
        for name in names:
            flat = tensors[name].double().flatten()
            samples.append(
                dict(name=name, shape=list(tensors[name].shape), first=flat[:8].tolist(), sum=flat.sum().item())
            )
        summary[part] = dict(
            tensors=len(tensors), parameters=sum(t.numel() for t in tensors.values()), samples=samples
        )
    return summary


# --- Running the reference --------------------------------------------------


@dataclass
class Run:
    """What one pipeline call did; tensors without the batch dimension."""

    token_ids: torch.Tensor
    prompt_embeds: torch.Tensor
    noise: torch.Tensor
    input_ids: torch.Tensor  # [S, 4] of the image tokens in step 0, in the order the transformer gets them
    inputs: torch.Tensor  # [S, 128], those tokens
    velocities: torch.Tensor  # [steps, N, 128]
    latents: torch.Tensor
    image: torch.Tensor

    @property
    def velocity(self):
        return self.velocities[0]


class Recorder:
    """Keeps the quantities of a pipeline call that the pipeline does not return."""

    def __init__(self, pipe, exact_time):
        self.token_ids = self.noise = self.latents = self.prompt_embeds = self.decoded = None
        self.input_ids = self.inputs = None
        self.velocities = []
        self.pipe = pipe
        self.scheduler_step = pipe.scheduler.step
        self.handles = [
            pipe.text_encoder.register_forward_pre_hook(self.on_text_encoder, with_kwargs=True),
            pipe.transformer.register_forward_pre_hook(self.on_transformer, with_kwargs=True),
            pipe.vae.decoder.register_forward_hook(self.on_decoder),
        ]
        pipe.scheduler.step = self.on_scheduler_step
        if exact_time:
            embed = pipe.transformer.time_guidance_embed
            # The sinusoid is computed for the time and, where guidance is embedded, then for the guidance.
            self.sinusoids = itertools.cycle(["time"] if embed.guidance_embedder is None else ["time", "guidance"])
            self.handles.append(embed.time_proj.register_forward_pre_hook(self.on_sinusoid))

    def close(self):
        for handle in self.handles:
            handle.remove()
        self.pipe.scheduler.step = self.scheduler_step

    def on_text_encoder(self, _module, _args, kwargs):
        # The first call is for the prompt; a second one is for the empty prompt.
        if self.token_ids is None:
            self.token_ids = kwargs["input_ids"][0].clone()

    def on_transformer(self, _module, _args, kwargs):
        if self.inputs is None:
            self.input_ids, self.inputs = kwargs["img_ids"][0].clone(), kwargs["hidden_states"][0].clone()

    def on_sinusoid(self, _module, args):
        guided = self.pipe.transformer.time_guidance_embed.guidance_embedder is not None
        if not guided and not args[0].any():
            return None  # the reference tokens of the KV model, always at time 0
        if next(self.sinusoids) == "guidance":
            return (1000 * torch.tensor([self.pipe.guidance_scale], device=args[0].device),)
        scheduler = self.pipe.scheduler
        return (scheduler.timesteps[scheduler.step_index or 0].reshape(1),)

    def on_scheduler_step(self, model_output, timestep, sample, **kwargs):
        if self.noise is None:
            self.noise = sample[0].clone()
        self.velocities.append(model_output[0].clone())
        return self.scheduler_step(model_output, timestep, sample, **kwargs)

    def on_step_end(self, _pipe, _step, _timestep, tensors):
        self.prompt_embeds, self.latents = tensors["prompt_embeds"][0].clone(), tensors["latents"][0].clone()
        return {}

    def on_decoder(self, _module, _args, output):
        self.decoded = output[0].clone()


def make_pipeline(kind, components, distilled):
    pipe = kind(
        **components,
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        tokenizer=load_tokenizer(),
        is_distilled=distilled,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def record(pipe, exact_time, **arguments):
    """Runs a pipeline. Returns what it did on the way, and the image."""
    recorder = Recorder(pipe, exact_time)
    try:
        returned = pipe(
            output_type="np",
            callback_on_step_end=recorder.on_step_end,
            callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"],
            **arguments,
        ).images[0]
    finally:
        recorder.close()
    return recorder, returned


def run_pipeline(pipe, case, exact_time, **arguments):
    recorder, returned = record(
        pipe,
        exact_time,
        prompt=case.prompt,
        width=case.width,
        height=case.height,
        num_inference_steps=case.steps,
        generator=torch.Generator("cpu").manual_seed(case.seed),
        **arguments,
    )
    # In the dtype of the decoder, like the pipeline: in bf16 the sum is rounded.
    image = (recorder.decoded * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 0).float()
    # A deliberate mistake may give NaN.
    same = np.array_equal(image.numpy(), returned, equal_nan=True)
    assert same, "the pipeline maps the decoded image to [0, 1] differently"
    run = Run(
        token_ids=recorder.token_ids,
        prompt_embeds=recorder.prompt_embeds,
        noise=recorder.noise,
        input_ids=recorder.input_ids,
        inputs=recorder.inputs,
        velocities=torch.stack(recorder.velocities),
        latents=recorder.latents,
        image=image,
    )
    check_shapes(run, case)
    return run


def run_case(components, case, exact_time=False):
    pipe = make_pipeline(Flux2KleinPipeline, components, case.distilled)
    return run_pipeline(pipe, case, exact_time, guidance_scale=case.guidance)


def check_shapes(run, case):
    tokens = (case.width // 16) * (case.height // 16)
    assert run.token_ids.shape == (512,)
    assert run.prompt_embeds.shape == (512, TRANSFORMER["joint_attention_dim"])
    assert run.noise.shape == run.latents.shape == (tokens, 128)
    assert run.velocities.shape == (case.steps, tokens, 128)
    assert run.inputs.shape == (len(run.input_ids), 128) and run.input_ids.shape[1] == 4
    assert run.image.shape == (case.height, case.width, 3)


def check_noise():
    """The two facts about torch's CPU generator that the cases rely on."""

    def draw(seed, dtype):
        return torch.randn(1, 128, 5, 6, generator=torch.Generator("cpu").manual_seed(seed), dtype=dtype)

    for seed in (case.seed for case in CASES):
        fp32 = draw(seed, torch.float32)
        assert torch.equal(fp32, draw(seed & 0xFFFFFFFF, torch.float32)), "the seed is more than its low 32 bits"
        assert torch.equal(fp32.to(torch.bfloat16), draw(seed, torch.bfloat16)), "bf16 noise is not rounded fp32"


def relative_l2(value, reference):
    value, reference = value.double(), reference.double()
    return ((value - reference).norm() / reference.norm()).item()


def check_sanity(case, run, errors):
    for field in fields(Run):
        assert torch.isfinite(getattr(run, field.name)).all(), f"{case.name}: {field.name} is not finite"
    assert 0.1 < rms(run.velocity) < 10, f"{case.name}: velocity rms {rms(run.velocity)}"
    assert run.image.std() > 0.02, f"{case.name}: the image is nearly constant"
    for name, error in errors.items():
        assert 1e-4 < error < 0.3, f"{case.name}: implausible bf16 error {error} of {name}"


def rms(tensor):
    return tensor.double().square().mean().sqrt().item()


# --- Fixtures ---------------------------------------------------------------

ERROR_KINDS = ("bf16_relative_l2", "bf16_exact_time_relative_l2")


@dataclass(frozen=True)
class Fixture:
    """The two files a script writes."""

    tensors: Path
    summary: Path

    @classmethod
    def named(cls, name):
        folder = ROOT / "tests" / "fixtures"
        return cls(folder / f"{name}.safetensors", folder / f"{name}.json")


def to_u16(image):
    return (image.double() * 65535).round().to(torch.uint16)


def as_arrays(prefix, tensors):
    return {f"{prefix}.{name}": np.ascontiguousarray(t.numpy()) for name, t in tensors.items()}


def error_report(outputs, references):
    """Relative L2 error of each output, to seven digits."""
    return {name: float(f"{relative_l2(outputs[name], reference):.6e}") for name, reference in references.items()}


def package_versions(packages):
    return {package: importlib.metadata.version(package) for package in packages}


def case_outputs(run):
    return {name: getattr(run, name) for name in ("prompt_embeds", "velocity", "latents", "image")}


def case_tensors(run):
    return dict(
        token_ids=run.token_ids.to(torch.int32),
        prompt_embeds=run.prompt_embeds[::16],
        noise_head=run.noise.flatten()[:64],
        velocity=run.velocity,
        latents=run.latents,
        image=to_u16(run.image),
    )


def compute():
    """Run everything. Returns the tensors, the summary and a printable table."""
    check_noise()
    components = build_components()
    weights = weight_summary(components, WEIGHT_SAMPLES)
    exact = [run_case(components, case) for case in CASES]
    to_bf16(components)
    rounded = [run_case(components, case) for case in CASES]
    timed = [run_case(components, case, exact_time=True) for case in CASES]

    tensors, cases, table = {}, [], []
    for case, fp32, *bf16 in zip(CASES, exact, rounded, timed):
        assert all(torch.equal(run.noise, fp32.noise.to(torch.bfloat16)) for run in bf16)
        errors = [error_report(case_outputs(run), case_outputs(fp32)) for run in bf16]
        check_sanity(case, fp32, errors[0])
        tensors.update(as_arrays(case.name, case_tensors(fp32)))
        cases.append(asdict(case) | dict(zip(ERROR_KINDS, errors)))
        table.append((case.name, errors[0], fp32))
    summary = dict(
        versions=package_versions(PACKAGES),
        config=dict(transformer=TRANSFORMER, text_encoder=TEXT_ENCODER, vae=VAE, scheduler=SCHEDULER),
        cases=cases,
        weights=weights,
    )
    return tensors, summary, format_table(table)


def format_table(table):
    lines = [
        "        bf16 against fp32, relative L2          | fp32 run",
        "case    embeds    velocity  latents   image     | rms(v)  rms(x)  image mean, std",
    ]
    for name, errors, run in table:
        columns = "  ".join(f"{error:.2e}" for error in errors.values())
        image = f"{run.image.mean().item():.3f}, {run.image.std().item():.3f}"
        lines.append(f"{name:<7} {columns}  | {rms(run.velocity):6.3f}  {rms(run.latents):6.3f}  {image}")
    return "\n".join(lines)


def write(fixture, tensors, summary):
    fixture.tensors.parent.mkdir(parents=True, exist_ok=True)
    fixture.tensors.write_bytes(safetensors.numpy.save(tensors))
    fixture.summary.write_text(json.dumps(summary, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def compare_tensors(stored, tensors, noise):
    problems = []
    if stored.keys() != tensors.keys():
        problems.append(f"tensors differ: {sorted(stored.keys() ^ tensors.keys())}")
    for name in sorted(stored.keys() & tensors.keys()):
        old, new = stored[name], tensors[name]
        if old.shape != new.shape or old.dtype != new.dtype:
            problems.append(f"{name}: {new.dtype}{new.shape}, stored {old.dtype}{old.shape}")
            continue
        if name in noise:
            error = relative_l2(torch.from_numpy(new), torch.from_numpy(old))
            if error > noise[name]:
                problems.append(f"{name}: relative L2 {error:.3g}, allowed {noise[name]:.3g}")
            continue
        worst = np.abs(new.astype(np.float64) - old.astype(np.float64)).max()
        if old.dtype == np.float32:
            allowed = 1e-5 * max(1.0, np.abs(old).max())
        else:
            # Ids are exact; a pixel may fall on the other side of a rounding boundary.
            allowed = 1 if old.dtype == np.uint16 else 0
        if worst > allowed:
            problems.append(f"{name}: differs by {worst:.3g}, allowed {allowed:.3g}")
    return problems


def take_errors(summary):
    """Remove the bf16 errors from a summary and return them as {"case: kind of name": error}."""
    errors = {}
    for value in summary.values():
        for part in value if isinstance(value, list) else [value]:
            for kind in ERROR_KINDS:
                for name, error in part.pop(kind, {}).items():
                    errors[f"{part['name']}: {kind} of {name}"] = error
    return errors


def compare_summaries(old, new, label):
    old_errors, new_errors = take_errors(old), take_errors(new)
    problems = [f"{key} differs in {label}" for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    # These measure rounding noise, which depends on the bf16 kernels of the
    # processor at hand: only their size is a property of the model.
    for name in sorted(old_errors.keys() | new_errors.keys()):
        was, now = old_errors.get(name, 0.0), new_errors.get(name, 0.0)
        if not math.isclose(now, was, rel_tol=0.25):
            problems.append(f"{name} is {now:.2e}, stored {was:.2e}")
    return problems


def compare(fixture, tensors, summary, noise):
    """Differences from the fixtures on disk, as a list of sentences."""
    stored = json.loads(fixture.summary.read_text(encoding="utf-8"))
    computed = json.loads(json.dumps(summary))
    problems = compare_tensors(safetensors.numpy.load_file(fixture.tensors), tensors, noise(stored))
    return problems + compare_summaries(stored, computed, fixture.summary.name)


def as_bytes(content):
    return content.encode() if isinstance(content, str) else content


def compare_files(files):
    return [f"{path.name} differs" for path, content in files.items() if path.read_bytes() != as_bytes(content)]


def write_files(files):
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(as_bytes(content))


def run_tool(description, fixture, compute, files, noise=lambda _summary: {}, limit=1_000_000):
    """The command line of a script that writes `fixture` and the texts or bytes `files`. Returns the exit code.

    `noise` gives, for a stored summary, the tensors that depend on the order of sums, and how far they may move.
    `limit` is for the size of all files together.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="compare with the stored fixtures instead of writing")
    check = parser.parse_args().check

    # The order of floating-point sums must not depend on the number of cores.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # Casting a model with to() warns about modules to keep in fp32; there are none.
    diffusers_logging.set_verbosity_error()
    started = time.monotonic()

    problems = []
    if check:
        problems += compare_files(files)
    else:
        write_files(files)
    tensors, summary, report = compute()
    print(report)
    if check:
        problems += compare(fixture, tensors, summary, noise)
        print("\n".join(problems) if problems else "the fixtures are up to date")
    else:
        write(fixture, tensors, summary)
        sizes = {path: path.stat().st_size for path in (*files, fixture.tensors, fixture.summary)}
        for path, size in sizes.items():
            print(f"{size:>8} bytes  {path.relative_to(ROOT)}")
        assert sum(sizes.values()) < limit, f"the fixtures should stay below {limit} bytes"
    print(f"{time.monotonic() - started:.1f} s")
    return 1 if problems else 0


def main():
    description = "Rebuild or check the fixtures of the tiny reference model."
    return run_tool(description, Fixture.named("goldens"), compute, {TOKENIZER: tokenizer_json()})


if __name__ == "__main__":
    sys.exit(main())
