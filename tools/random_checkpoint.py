#!/usr/bin/env python3
"""Write a random FLUX.2 [klein] or [dev] checkpoint at its real size, in the published form.

    python tools/random_checkpoint.py OUT --model 4b                   # 16 GB: klein 4B, Qwen3-4B, VAE, tokenizer
    python tools/random_checkpoint.py OUT --model 9b --blocks 2,2      # fewer blocks: double, single
    python tools/random_checkpoint.py OUT --model tiny --check         # the sizes of tools/goldens, and how large activations are
    python tools/random_checkpoint.py OUT --model 4b --format fp8 nvfp4 --encoder fp8mixed     # 27 GB: and quantized files
    python tools/random_checkpoint.py OUT --model 9b --format fp8 --encoder fp8 --quantized-only       # 18 GB instead of 53
    python tools/random_checkpoint.py OUT --model dev --blocks 2,4     # 45 GB: all of [dev] is 100
    python tools/random_checkpoint.py OUT --model dev --format fp8 --encoder fp8 --quantized-only      # 54 GB
    python tools/random_checkpoint.py OUT --model dev --format fp8 nvfp4 --encoder fp8 --lengths       # only says how long the files are

The folder has the diffusers layout with bf16 weights; kiln and diffusers both open it. Nothing in it was trained. It serves to compare two
engines (tools/compare_diffusers.py) and to time them at the real sizes, not to generate useful images.

The requested quantized files lie next to the component folders and have the same weights:

    flux-2-klein-4b-fp8.safetensors      the transformer as Black Forest Labs publish it: their names and order of tensors, the
    flux-2-klein-4b-nvfp4.safetensors    quantized layers named in the header, their input_scale measured in a run of the bf16
                                         model by the real pipeline, without any head room
    qwen_3_4b_fp8mixed.safetensors       the text encoder as ComfyUI has it: a comfy_quant tensor for every quantized layer, and
                                         no input_scale, because its activations are never quantized
    flux2_dev_fp8mixed.safetensors       [dev] as Comfy-Org publish it, with the attention of double blocks in bf16
    flux2-dev-nvfp4.safetensors          and as Black Forest Labs do, with the text half of that attention in bf16
    mistral_3_small_flux2_fp8.safetensors    the 30 layers of its text encoder that it reads, without final norm; the published
                                         file is longer, because it has the tokenizer too

Layers that a published file keeps in bf16 stay bf16 here, and a transformer of the real size is as long as the published file, to the byte.
In `fp8mixed` the hash of a layer's name makes it FP8, NVFP4 or bf16, in the proportions of the published qwen_3_8b_fp8mixed. `kiln --model
OUT` still means the bf16 model; the script prints the command that takes the quantized files. With --quantized-only a component that is
written quantized is not written in bf16: its folder has only the config, and only that command works.

The text encoder of [dev] is the language model of Mistral Small 3 under the names of published folders, without vision tower and output
head. It has one layer more than are read, and not ten. Measuring the inputs of all of [dev] takes a GPU with 110 GB. `--input-scales
formula` uses the scales that the gains below imply, 0.9 to 3 times the measured ones.

Names and shapes come from the diffusers and transformers classes, built without memory. Each tensor has its own generator, seeded by its
name, on the GPU if there is one, so only machines of one kind make the same files. Values are scaled so that every component matters in the
result, and an error anywhere shows: activations, modulations and gates are of order one, attention looks at a few tokens and not at the
mean of all, and the image fills its range.
"""

import argparse
import functools
import gc
import gzip
import itertools
import json
import math
import os
import re
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from goldens.dev_pipeline import LanguageModel
from goldens.files import ROOT, fnv1a
from goldens.model import GUIDANCE_TRANSFORMER, MISTRAL_ENCODER, SCHEDULER, TEXT_ENCODER, TRANSFORMER, VAE
from goldens.text import CHAT_TEMPLATE, MISTRAL_ROLES, MISTRAL_TEMPLATE, tiny_mistral_json, tokenizer_json
from goldens.tokens_mistral import indented_json
from goldens.values import rms
from single_files import DTYPES, FORMATS, PUBLISHED, QUANTIZABLE, encoder_weights, single_file, transformer_weights
from transformers import MistralConfig, Qwen3Config, Qwen3ForCausalLM

PROMPT = "a red fox in the snow"

# --- Sizes ------------------------------------------------------------------

QWEN3 = TEXT_ENCODER | dict(vocab_size=151936, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8)
REAL_VAE = VAE | dict(block_out_channels=[128, 256, 512, 512])

MODELS = {
    "tiny": dict(transformer=TRANSFORMER, text_encoder=TEXT_ENCODER, vae=VAE),
    "4b": dict(
        transformer=TRANSFORMER | dict(num_layers=5, num_single_layers=20, num_attention_heads=24, joint_attention_dim=7680),
        text_encoder=QWEN3 | dict(hidden_size=2560, intermediate_size=9728),
        vae=REAL_VAE,
    ),
    "9b": dict(
        transformer=TRANSFORMER | dict(num_layers=8, num_single_layers=24, num_attention_heads=32, joint_attention_dim=12288),
        text_encoder=QWEN3 | dict(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False),
        vae=REAL_VAE,
    ),
    "tiny-dev": dict(transformer=GUIDANCE_TRANSFORMER, text_encoder=MISTRAL_ENCODER, vae=VAE),
    "dev": dict(
        transformer=GUIDANCE_TRANSFORMER
        | dict(num_layers=8, num_single_layers=48, num_attention_heads=48, joint_attention_dim=15360),
        # The published encoder has 40 layers.
        text_encoder=MISTRAL_ENCODER
        | dict(vocab_size=131072, hidden_size=5120, intermediate_size=32768, num_attention_heads=32, num_key_value_heads=8),
        vae=REAL_VAE,
    ),
}
# Layers of the text encoder that are read. The reference's output after its last layer has gone through a norm.
LAYERS_READ = {"tiny": 27, "4b": 27, "9b": 27, "tiny-dev": 30, "dev": 30}

# Config entries in addition to the settings above: the class and library.
HEADS = dict(
    transformer=dict(_class_name="Flux2Transformer2DModel", out_channels=None),
    text_encoder=dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_act="silu", dtype="bfloat16"),
    vae=dict(_class_name="AutoencoderKLFlux2", batch_norm_eps=1e-4),
)
INDEX = dict(
    _class_name="Flux2KleinPipeline",
    is_distilled=True,
    scheduler=["diffusers", "FlowMatchEulerDiscreteScheduler"],
    text_encoder=["transformers", "Qwen3ForCausalLM"],
    tokenizer=["transformers", "Qwen2TokenizerFast"],
    transformer=["diffusers", "Flux2Transformer2DModel"],
    vae=["diffusers", "AutoencoderKLFlux2"],
)
DEV_INDEX = {name: value for name, value in INDEX.items() if name != "is_distilled"} | dict(
    _class_name="Flux2Pipeline",
    text_encoder=["transformers", "Mistral3ForConditionalGeneration"],
    tokenizer=["transformers", "PixtralProcessor"],
)
TOKENIZER_CONFIG = dict(
    tokenizer_class="Qwen2Tokenizer", add_prefix_space=False, bos_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>",
    unk_token=None, padding_side="right", model_max_length=131072, clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE,
)  # fmt: skip

# Without the padding side, which the library sets by default.
DEV_TOKENIZER_CONFIG = dict(
    MISTRAL_ROLES, tokenizer_class="LlamaTokenizerFast", model_max_length=131072, clean_up_tokenization_spaces=False
)

# Stem of the weight files and bytes of the largest, as in the libraries that save real models.
FILES = dict(
    transformer=("diffusion_pytorch_model", 10_000_000_000),
    text_encoder=("model", 5_000_000_000),
    vae=("diffusion_pytorch_model", 10_000_000_000),
)


def is_dev(model):
    return model in ("tiny-dev", "dev")


def configs_of(args):
    configs = {part: dict(config) for part, config in MODELS[args.model].items()}
    if args.blocks:
        configs["transformer"].update(num_layers=args.blocks[0], num_single_layers=args.blocks[1])
    if args.encoder_layers:
        configs["text_encoder"].update(num_hidden_layers=args.encoder_layers)
    return configs


def written_config(part, config, model):
    """The content of the component's config.json."""
    if part != "text_encoder" or not is_dev(model):
        return HEADS[part] | config
    # A vision-language model's configuration contains its language model's.
    inner = dict(model_type="mistral", hidden_act="silu") | config
    outer = dict(architectures=["Mistral3ForConditionalGeneration"], model_type="mistral3", dtype="bfloat16")
    return outer | dict(tie_word_embeddings=False, text_config=inner)


def build(part, config):
    if part == "text_encoder":
        # Only Qwen's configuration has this key.
        return Qwen3ForCausalLM(Qwen3Config(**config)) if "attention_bias" in config else LanguageModel(MistralConfig(**config))
    return (Flux2Transformer2DModel if part == "transformer" else AutoencoderKLFlux2)(**config)


def tensors_of(part, config):
    """Name, shape and dtype of every tensor in a published file of the component."""
    with torch.device("meta"):
        state = build(part, config).state_dict()
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    dtypes = {name: torch.bfloat16 if t.is_floating_point() else t.dtype for name, t in state.items()}
    return [(name, tuple(t.shape), dtypes[name]) for name, t in state.items() if name not in tied]


def shapes_of(part, args):
    return {name: shape for name, shape, _ in tensors_of(part, configs_of(args)[part])}


# --- Values -----------------------------------------------------------------

# Silu of a normal variable has size 0.6. The next projection makes up for the loss with this gain.
SILU = 1 / 0.6
# Shifts and scales stay below the signal, or all tokens become one; gates let a block's whole output pass.
SHIFT, SCALE, GATE = 0.3 * SILU, 0.3 * SILU, SILU

# Gain of a projection: the size of its output for an input of size one. The first matching pattern counts, otherwise the gain is 1. Several
# numbers apply to as many equal slices of the rows.
GAINS = [
    # The sinusoid has size 0.7.
    (r"transformer\.time_guidance_embed\..*linear_1", [1.4]),
    (r"transformer\.time_guidance_embed\..*linear_2", [SILU]),
    (r"transformer\.double_stream_modulation", [SHIFT, SCALE, GATE] * 2),
    (r"transformer\.single_stream_modulation", [SHIFT, SCALE, GATE]),
    (r"transformer\.norm_out\.linear", [SCALE, SHIFT]),
    # Text features have grown in the layers of their encoder.
    (r"transformer\.context_embedder", [0.3]),
    (r"transformer\..*\.(to_out|to_add_out|linear_out)\b", [SILU]),
    # Mistral has no qk-norms: with these gains, scores have a deviation of two.
    (r"text_encoder\.language_model\..*\.[qk]_proj", [1.4]),
    # The residual stream grows with the root of the number of layers. The encoder has more layers.
    (r"text_encoder\..*\.o_proj", [0.7]),
    (r"text_encoder\..*\.down_proj", [0.7 * SILU]),
    (r"vae\..*\.attentions\.0\.to_[qk]", [1.6]),
    (r"vae\..*coder\.conv_in", [1.5]),
    # Most pixels should lie within -1..1.
    (r"vae\.decoder\.conv_out", [0.4 * SILU]),
    (r"vae\..*\.(conv1|conv2|conv_out)\b", [SILU]),
]

# Mean of vectors that are factors. Large query and key norms make attention sharp. With thousands of keys it would otherwise be close to
# the mean of all values, and wrong positions would not show.
FACTORS = [
    (r"transformer\..*\.norm_(added_)?[qk]\.weight", 1.7),
    (r"text_encoder\..*\.[qk]_norm\.weight", 1.4),
    (r"\.(weight|running_var)$", 1.0),
]


def first_match(table, name):
    return next((value for pattern, value in table if re.search(pattern, name)), None)


def values(name, shape, device):
    """The tensor `name` (with its component in front), in bf16."""
    generator = torch.Generator(device).manual_seed(fnv1a(name.encode()) >> 1)
    tensor = torch.empty(shape, device=device).normal_(generator=generator)
    factor = first_match(FACTORS, name)
    if len(shape) == 1 and factor is not None:
        # Never near zero, which would hide the tensor that it multiplies.
        tensor.clamp_(-3, 3).mul_(0.2).add_(1).mul_(factor)
    elif len(shape) == 1:
        tensor.mul_(0.2)
    elif not name.endswith("embed_tokens.weight"):
        gains = first_match(GAINS, name) or [1.0]
        for rows, gain in zip(tensor.chunk(len(gains)), gains):
            rows.mul_(gain / math.sqrt(math.prod(shape[1:])))
    return tensor.to(torch.bfloat16)


# --- Files ------------------------------------------------------------------


def write_json(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def byte_size(shape, dtype):
    return math.prod(shape) * dtype.itemsize


def split(tensors, limit):
    """Consecutive tensors, in shards of at most `limit` bytes."""
    shards, used = [[]], 0
    for tensor in tensors:
        size = byte_size(*tensor[1:])
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += size
    return shards


def header_of(tensors, metadata):
    """The bytes of a safetensors file before its data, each tensor's start in the file, and the end of the last one."""
    header, starts, offset = {"__metadata__": metadata} if metadata else {}, {}, 0
    for name, shape, dtype in tensors:
        end = offset + byte_size(shape, dtype)
        header[name] = dict(dtype=DTYPES[dtype], shape=shape, data_offsets=[offset, end])
        starts[name], offset = offset, end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    head = len(head).to_bytes(8, "little") + head
    return head, {name: len(head) + start for name, start in starts.items()}, len(head) + offset


def write_all(file, data, offset):
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def queue_file(path, tensors, metadata, jobs, pool):
    """Queues a safetensors file, whose tensors the jobs make. Returns the open file, and what must finish before it is closed."""
    head, starts, size = header_of(tensors, metadata)
    declared = {name: (tuple(shape), dtype) for name, shape, dtype in tensors}
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    write_all(file, head, 0)
    os.truncate(file, size)

    def write(job):
        for name, tensor in job().items():
            assert (tuple(tensor.shape), tensor.dtype) == declared[name], name
            data = tensor.cpu().reshape(-1).view(torch.uint8).numpy()
            write_all(file, memoryview(data), starts[name])

    return file, [pool.submit(write, job) for job in jobs]


def finish_file(file, writes):
    for write in writes:
        write.result()
    os.close(file)


def stored(part, device, name, shape, dtype):
    """A tensor as the component's folder has it."""
    # The only tensor that is not float counts batches, and nobody reads it.
    return {name: values(f"{part}.{name}", shape, device) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)}


def values_of(part, config, device):
    """Names and tensors of the component's folder, whether or not it was written."""
    for name, shape, dtype in tensors_of(part, config):
        yield from stored(part, device, name, shape, dtype).items()


def write_weights(folder, part, config, device, pool):
    """Writes a component's weights. Returns the number of tensors and of bytes."""
    tensors = tensors_of(part, config)
    stem, limit = FILES[part]
    shards = split(tensors, limit)
    total = sum(byte_size(*tensor[1:]) for tensor in tensors)
    weight_map, queued = {}, []
    for number, shard in enumerate(shards, 1):
        suffix = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        path = folder / f"{stem}{suffix}.safetensors"
        weight_map.update({name: path.name for name, *_ in shard})
        jobs = [functools.partial(stored, part, device, *tensor) for tensor in shard]
        queued.append(queue_file(path, shard, {"format": "pt"}, jobs, pool))
    for file, writes in queued:
        finish_file(file, writes)
    if len(shards) > 1:
        index = dict(metadata=dict(total_size=total), weight_map=dict(sorted(weight_map.items())))
        write_json(folder / f"{stem}.safetensors.index.json", index)
    return len(tensors), total


def tokenizer_of(model):
    """The bytes of the model's tokenizer.json."""
    tiny = {"tiny": tokenizer_json, "tiny-dev": tiny_mistral_json, "dev": indented_json}
    packed = ROOT / "models" / "qwen3" / "tokenizer.json.gz"
    return tiny[model]().encode() if model in tiny else gzip.decompress(packed.read_bytes())


def report(what, tensors, size, started):
    print(f"{what:<36} {tensors:>4} tensors  {size:>14,} bytes  {time.monotonic() - started:5.1f} s", flush=True)


def has_bf16(part, args):
    """Whether the component's folder has its weights."""
    formats = dict(transformer=args.format, text_encoder=args.encoder).get(part, ["bf16"])
    return "bf16" in formats or not args.quantized_only


def write_checkpoint(folder, args, device, pool):
    for part, config in configs_of(args).items():
        started = time.monotonic()
        write_json(folder / part / "config.json", written_config(part, config, args.model))
        if has_bf16(part, args):
            report(part, *write_weights(folder / part, part, config, device, pool), started)
    dev = is_dev(args.model)
    write_json(folder / "model_index.json", DEV_INDEX if dev else INDEX | dict(is_distilled=args.variant == "distilled"))
    write_json(folder / "scheduler" / "scheduler_config.json", dict(_class_name=INDEX["scheduler"][1]) | SCHEDULER)
    write_json(folder / "tokenizer" / "tokenizer_config.json", DEV_TOKENIZER_CONFIG if dev else TOKENIZER_CONFIG)
    if dev:
        (folder / "tokenizer" / "chat_template.jinja").write_text(MISTRAL_TEMPLATE, encoding="utf-8")
    (folder / "tokenizer" / "tokenizer.json").write_bytes(tokenizer_of(args.model))


# --- Quantized files --------------------------------------------------------

# Formats of the text encoder's layers, chosen by the hash of their names.
ENCODERS = dict(
    fp8=["fp8"],
    # In about the proportions of the published qwen_3_8b_fp8mixed: 141 layers in FP8, 85 in NVFP4 and 26 in bf16.
    fp8mixed=["fp8"] * 5 + ["nvfp4"] * 3 + ["bf16"],
    nvfp4=["nvfp4"],
)
ENCODER_STEMS = {"tiny": "qwen_3_tiny", "4b": "qwen_3_4b", "9b": "qwen_3_8b"}
ENCODER_STEMS |= {"tiny-dev": "mistral_3_tiny_flux2", "dev": "mistral_3_small_flux2"}
# Transformer files of [dev]. klein's files are named by variant, size and format.
DEV_FILES = {
    ("tiny-dev", "fp8"): "flux2_tiny_dev_fp8mixed",
    ("tiny-dev", "nvfp4"): "flux2-tiny-dev-nvfp4",
    ("dev", "fp8"): "flux2_dev_fp8mixed",
    ("dev", "nvfp4"): "flux2-dev-nvfp4",
}


def write_single_file(path, part, weights, amax, device, pool):
    """Writes a file, or without a pool only computes its length. Returns the length."""
    started = time.monotonic()
    tensors, metadata = single_file(weights, amax)
    size = header_of(tensors, metadata)[2]

    def make(weight):
        stacked = weight.stack(lambda name, shape: values(f"{part}.{name}", shape, device))
        return weight.tensors(stacked, amax.get(weight.layer))

    if pool:
        jobs = [functools.partial(make, weight) for weight in weights]
        finish_file(*queue_file(path, tensors, metadata, jobs, pool))
        assert path.stat().st_size == size
    report(path.name, len(tensors), size, started)
    return size


def arguments_of(case):
    """The arguments of a pipeline that runs a case."""
    from compare_diffusers import noise_of  # needs more packages

    size = dict(width=case.width, height=case.height)
    return dict(prompt=PROMPT, num_inference_steps=case.steps, latents=noise_of(case), **size)


def calibrate(folder, args, device, weights):
    """The largest input magnitude of every layer that can be quantized, over a run of the bf16 model."""
    from compare_diffusers import Case, build_model, exact_arithmetic, fill, is_narrow, make_pipeline  # needs more packages

    started = time.monotonic()
    exact_arithmetic()
    models = {}
    for part, config in configs_of(args).items():
        models[part] = build_model(folder, part, device, is_narrow(folder, part))
        # Made again, because that is faster than reading them, and the files may not exist.
        fill(models[part], values_of(part, config, device))
    pipe = make_pipeline(folder, models)
    amax = {weight.layer: torch.zeros((), device=device) for weight in weights if QUANTIZABLE.match(weight.name)}

    def record(layer, _module, inputs):
        amax[layer] = torch.maximum(amax[layer], inputs[0].abs().amax())

    for weight in weights:
        for source in weight.sources if weight.layer in amax else ():
            module = pipe.transformer.get_submodule(source.removesuffix(".weight"))
            module.register_forward_pre_hook(functools.partial(record, weight.layer))
    case = Case("calibration", 256, 256, 4)
    pipe(**arguments_of(case), output_type="latent")
    assert all(amax.values()), "a layer was never run"
    print(f"{'inputs of the layers':<36} {len(amax):>4} measured {time.monotonic() - started:29.1f} s", flush=True)
    return amax


# The largest magnitude of a layer's inputs by its name, in multiples of the largest of a million normal values. Norms make inputs normal.
# Scales with a deviation of 0.3 and more then widen some channels several times. Values are normal too, and attention gives something
# between one of them and their mean. The product of a normal value and another one's silu is far from normal.
IMPLIED = [(r"qkv|mlp\.0|linear1", 4.0), (r"proj", 1.0), (r"mlp\.2|linear2", 5.0)]
NORMAL = 5.0


def implied(weights):
    """The largest input magnitude of every layer that can be quantized, as the gains imply for normal values."""
    layers = [weight.layer for weight in weights if QUANTIZABLE.match(weight.name)]
    return {layer: torch.tensor(NORMAL * first_match(IMPLIED, layer)) for layer in layers}


def write_transformers(folder, args, device, pool):
    """Writes the transformer in every format. Returns kiln's arguments for each."""
    arguments = {"bf16": []}
    if args.format != ["bf16"]:
        shapes = shapes_of("transformer", args)
        weights = transformer_weights(shapes, (), "bf16")
        amax = implied(weights) if args.input_scales == "formula" else calibrate(folder, args, device, weights)
        # The pipeline is large and has reference cycles.
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    stem = "flux-2-klein-base" if args.variant == "base" else "flux-2-klein"
    for format in [format for format in FORMATS if format in args.format]:
        name = DEV_FILES.get((args.model, format), f"{stem}-{args.model}-{format}")
        path = folder / f"{name}.safetensors"
        # A tiny model keeps the same layers in bf16 as the smallest published one.
        published = {"tiny": "4b", "tiny-dev": "dev"}.get(args.model, args.model)
        size, kept = PUBLISHED[published, args.variant, format]
        found = write_single_file(path, "transformer", transformer_weights(shapes, kept, format), amax, device, pool)
        if published == args.model and not args.blocks:
            assert found == size, f"the published {path.name} has {size:,} bytes"
        # Files of klein do not state their variant.
        arguments[format] = ["--transformer", path] + ([] if is_dev(args.model) else ["--variant", args.variant])
    return [arguments[format] for format in args.format]


def write_encoders(folder, args, device, pool):
    """Writes the text encoder in every format. Returns kiln's arguments for each."""
    arguments = {"bf16": []}
    for format in [format for format in ENCODERS if format in args.encoder]:
        path = folder / f"{ENCODER_STEMS[args.model]}_{format}.safetensors"
        weights = encoder_weights(shapes_of("text_encoder", args), ENCODERS[format])
        write_single_file(path, "text_encoder", weights, {}, device, pool)
        arguments[format] = ["--text-encoder", path]
    return [arguments[format] for format in args.encoder]


def say_lengths(args):
    """Prints the lengths that all files would have."""
    for part, config in configs_of(args).items():
        if has_bf16(part, args):
            tensors = tensors_of(part, config)
            report(part, len(tensors), sum(byte_size(*tensor[1:]) for tensor in tensors), time.monotonic())
    args.input_scales = "formula"
    write_transformers(args.out, args, "cpu", None)
    write_encoders(args.out, args, "cpu", None)


# --- Check ------------------------------------------------------------------

# The modules whose outputs are shown: those that change a residual stream, and every modulation.
SHOWN = re.compile(
    r"(time_guidance_embed|\w+_stream_modulation\w*|x_embedder|context_embedder|norm_out|proj_out"
    r"|(single_)?transformer_blocks\.\d+(\.attn|\.ff|\.ff_context)?|(language_model\.)?model\.layers\.\d+(\.self_attn|\.mlp)?"
    r"|quant_conv|post_quant_conv|.*\.(attentions|resnets)\.\d+|.*\.conv_out)$"
)


def show_sizes(part, name, output):
    """Prints the size of an output, and the share that all tokens or pixels have in common."""
    for tensor in output if isinstance(output, tuple) else [output]:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            spread = (2, 3) if tensor.ndim == 4 else (-2,)
            common = rms(tensor.float().mean(spread)) / rms(tensor)
            print(f"{part}.{name:<48} rms {rms(tensor):7.3f}  in common {common:4.2f}  {tuple(tensor.shape)}")


def check(folder, device, size):
    """Runs one step with the real classes and prints the size of each block's output."""
    from compare_diffusers import Case, draw_reference, exact_arithmetic, load_pipeline  # needs more packages

    exact_arithmetic()
    pipe = load_pipeline(folder, device)
    for part in ("text_encoder", "transformer", "vae"):
        for name, module in getattr(pipe, part).named_modules():
            if SHOWN.match(name):
                module.register_forward_hook(lambda _m, _a, out, part=part, name=name: show_sizes(part, name, out))
    case = Case("check", size, size, 1)
    image = pipe(**arguments_of(case), image=[draw_reference(0, (size, size))], output_type="np").images[0]
    saturated = ((image == 0) | (image == 1)).mean()
    print(f"image: mean {image.mean():.3f}, deviation {image.std():.3f}, {saturated:.1%} of the values saturated")


def block_counts(text):
    double, single = (int(number) for number in text.split(","))
    return double, single


def main():
    parser = argparse.ArgumentParser(description="Write a random FLUX.2 [klein] or [dev] checkpoint.")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--model", choices=MODELS, required=True, help="sizes of the model")
    parser.add_argument("--blocks", type=block_counts, metavar="D,S", help="double and single blocks, instead of all")
    layers = "layers of the text encoder, at least 28, and 31 of dev [default: all 36 of klein; of dev 31 of its 40, the others are not read]"
    parser.add_argument("--encoder-layers", type=int, metavar="N", help=layers)
    parser.add_argument("--format", nargs="+", choices=("bf16", *FORMATS), default=["bf16"], help="of the transformer")
    parser.add_argument("--encoder", nargs="+", choices=("bf16", *ENCODERS), default=["bf16"], help="format of the text encoder")
    parser.add_argument("--quantized-only", action="store_true", help="no weights in bf16 of a part that is written quantized")
    scales = "of layers: measured in a run of the model, or what its gains imply"
    parser.add_argument("--input-scales", choices=("measured", "formula"), default="measured", help=scales)
    parser.add_argument("--variant", choices=("distilled", "base"), help="the published klein model to follow [default: distilled]")
    parser.add_argument("--lengths", action="store_true", help="write nothing, and say how long the files would be")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--check", action="store_true", help="then run a step and print how large activations are")
    parser.add_argument("--check-size", type=int, default=256, metavar="PIXELS", help="width and height of that")
    args = parser.parse_args()
    if args.variant and is_dev(args.model):
        parser.error("--variant is for klein")
    args.variant = args.variant or ("dev" if is_dev(args.model) else "distilled")
    if args.encoder_layers is not None and args.encoder_layers <= LAYERS_READ[args.model]:
        parser.error(f"--encoder-layers must be at least {LAYERS_READ[args.model] + 1}")
    if args.lengths:
        say_lengths(args)
        return 0
    if args.check and not all(has_bf16(part, args) for part in MODELS[args.model]):
        parser.error("--check runs the bf16 model, which --quantized-only leaves out")
    started = time.monotonic()
    # More threads would only wait for the same disk.
    with ThreadPoolExecutor(8 if args.device == "cuda" else os.cpu_count()) as pool:
        write_checkpoint(args.out, args, args.device, pool)
        transformers = write_transformers(args.out, args, args.device, pool)
        encoders = write_encoders(args.out, args, args.device, pool)
    print(f"{args.out}: {time.monotonic() - started:.1f} s")
    for transformer, encoder in itertools.product(transformers, encoders):
        print(shlex.join(["kiln", PROMPT, "--model", *map(str, (args.out, *transformer, *encoder))]))
    if args.check:
        check(args.out, args.device, args.check_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
