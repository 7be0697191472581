#!/usr/bin/env python3
"""Compare kiln with the arithmetic of FP8 and NVFP4 models, written out in PyTorch, on one checkpoint.

    python tools/random_checkpoint.py FOLDER --model 4b --format fp8 --encoder fp8 fp8mixed --quantized-only
    python tools/compare_quantized.py FOLDER --kiln target/release/kiln --out RESULTS --references 1 \\
        --transformer FOLDER/flux-2-klein-4b-fp8.safetensors \\
        --text-encoder FOLDER/qwen_3_4b_fp8.safetensors FOLDER/qwen_3_4b_fp8mixed.safetensors

For NVFP4, `--format nvfp4 --encoder nvfp4` makes FOLDER/flux-2-klein-4b-nvfp4.safetensors and FOLDER/qwen_3_4b_nvfp4.safetensors. For
FLUX.2 [dev], `--model dev --format fp8 --encoder fp8` makes FOLDER/flux2_dev_fp8mixed.safetensors and
FOLDER/mistral_3_small_flux2_fp8.safetensors; --guidance and --padding mean the same as in tools/compare_diffusers.py. Three programs
run the transformer in every case of tools/compare_diffusers.py, from the same noise and the same prompt embeddings:

    wide    diffusers in fp32 with the weights decoded from codes and scales, and with plain inputs
    torch   FP8: ComfyUI's arithmetic. Inputs are clamped and rounded to e4m3 with the file's input_scale. The product of the codes
            by torch._scaled_mm without fast accumulation is stored in bf16. Everything else is diffusers in bf16, except for times
            and latents, which ComfyUI has in fp32
            NVFP4: weights expanded to bf16 and plain inputs, all in bf16. For --nvfp4-math fp8 it is the arithmetic of FP8 with
            weights re-encoded as e4m3, and inputs in the range of the file's input_scale
    kiln    FP8: with its defaults, and with --attention bf16 under every --fp8-accumulate
            NVFP4: with --nvfp4-math bf16; and with --nvfp4-math fp8 and the arguments of FP8

On the CPU `torch` sums exactly. The errors of `torch` and of kiln are relative L2 distances from `wide`: of velocity and latents of
each step, and of the decoded image. With quantized inputs kiln's error is at most 1.1 times `torch`'s with --attention bf16 and 1.2
times with its defaults, everywhere. It is also at least half of it, because expanded weights and plain inputs would be much closer to
`wide`. With plain inputs it is at most 1.2 times `torch`'s, the rule of tools/compare_diffusers.py. kiln computes the prompt
embeddings of all runs with the first text encoder, so that its error has no part in this.

Text encoders have quantized weights and plain inputs. kiln's prompt embeddings with each file are compared with transformers in fp32,
by the rule of tools/compare_diffusers.py: an error of at most 1.2 times the error of transformers in bf16 with weights expanded as in
ComfyUI, with one rounding.

Exits 1 when a rule is broken. Needs the packages of tools/compare_diffusers.py, and klein models must be distilled.
"""

import functools
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from compare_diffusers import ALLOWED, PARTS, Case, arguments, begin, build_model, denoised, finish, free, is_dev, is_narrow
from compare_diffusers import load_model, make_pipeline, parse, run_diffusers, run_kiln, versions, with_velocities
from goldens.model import to_bf16
from goldens.quantized import Fp8Layer, Nvfp4Layer, QuantizedLinear, quantize_activations
from goldens.values import relative_l2, rms
from quantized import E2M1_MAX, nvfp4_to_fp8, to_fp8
from random_lora import put_beside
from safetensors import safe_open
from single_files import declared_formats, encoder_weights, transformer_weights

# Below this share of PyTorch's error, inputs cannot have been quantized: with plain inputs it is a fifth on the tiny model.
QUANTIZED = 0.5


@dataclass(frozen=True)
class Variant:
    """Arguments of kiln, and the limit of its error over PyTorch's."""

    arguments: tuple
    most: float
    quantizes: bool = True  # inputs

    @property
    def least(self):
        return QUANTIZED if self.quantizes else 0.0


PLAIN_HEADS = ("--attention", "bf16")
FP8_VARIANTS = {
    "default": Variant((), 1.2),
    "bf16": Variant(PLAIN_HEADS, 1.1),
    "bf16-exact": Variant((*PLAIN_HEADS, "--fp8-accumulate", "exact"), 1.1),
    "bf16-fast": Variant((*PLAIN_HEADS, "--fp8-accumulate", "fast"), 1.1),
}
# By the transformer's format. NVFP4 variants are named by the type of the product, then like the FP8 variants.
VARIANTS = dict(
    fp8=FP8_VARIANTS,
    nvfp4={"bf16": Variant(("--nvfp4-math", "bf16"), ALLOWED, quantizes=False)}
    | {f"fp8-{name}": Variant(("--nvfp4-math", "fp8", *v.arguments), v.most) for name, v in FP8_VARIANTS.items()},
)

# --- Models with the weights of a single file -------------------------------


@dataclass(frozen=True)
class TensorCoreLayer(Fp8Layer):
    """An FP8 layer whose product the GPU's tensor cores compute."""

    def product(self, x):
        codes = to_fp8(x, self.input_scale).contiguous()
        scales = self.input_scale, self.weight_scale
        return torch._scaled_mm(codes, self.weight.mT, *scales, out_dtype=torch.bfloat16, use_fast_accum=False)


@dataclass(frozen=True)
class ReencodedLayer(Nvfp4Layer):
    """An NVFP4 layer that is re-encoded and multiplied as FP8."""

    @functools.cached_property
    def in_fp8(self):
        codes, scale = nvfp4_to_fp8(self.weight, self.weight_scale, self.weight_scale_2)
        # The largest e4m3 number stands for the largest block scale times the largest code.
        return fp8_layer(self.weight.device)(codes, scale, E2M1_MAX * self.input_scale)

    def product(self, x):
        return self.in_fp8.product(x)


def fp8_layer(device):
    return TensorCoreLayer if torch.device(device).type == "cuda" else Fp8Layer


def weights_of(part, model):
    """The weights of a model in a single file, all in bf16."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return transformer_weights(shapes, (), "bf16") if part == "transformer" else encoder_weights(shapes, ["bf16"])


def load_single_file(folder, part, path, device):
    """The model of a component in fp32 with a single file's weights. Codes stay codes, expanded or multiplied in every call."""
    kinds = dict(fp8=fp8_layer(device), nvfp4=ReencodedLayer)
    model = build_model(folder, part, device, is_narrow(folder, part))
    state = model.state_dict()
    with safe_open(path, "pt", device=device) as file, torch.no_grad():
        formats, unread = declared_formats(file), set(file.keys())
        for weight in weights_of(part, model):
            if weight.layer not in formats:
                for name, tensor in weight.unstack(file.get_tensor(weight.name)).items():
                    state[name].copy_(tensor)
                unread.remove(weight.name)
                continue
            kind = kinds[formats[weight.layer]]
            names = {field.name: f"{weight.layer}.{field.name}" for field in fields(kind)}
            layer = kind(**{field: file.get_tensor(name) if name in unread else None for field, name in names.items()})
            unread -= {*names.values(), f"{weight.layer}.comfy_quant"}
            first = 0
            for name, (rows, *_) in weight.sources.items():
                model.set_submodule(name.removesuffix(".weight"), QuantizedLinear(layer, slice(first, first + rows)))
                first += rows
    assert not unread, f"{path}: nothing takes {sorted(unread)}"
    return model


def keep_latents_wide(pipe):
    """Rounds latents to a model's dtype only when the model takes them. Prompt embeddings may be in fp32 as well."""

    def round_inputs(transformer, _args, kwargs):
        names = ("hidden_states", "encoder_hidden_states")
        return (), kwargs | {name: kwargs[name].to(transformer.dtype) for name in names}

    pipe.transformer.register_forward_pre_hook(round_inputs, with_kwargs=True)
    pipe.transformer.register_forward_hook(lambda _transformer, _args, outputs: (outputs[0].float(),))
    pipe.vae.post_quant_conv.register_forward_pre_hook(lambda conv, args: (args[0].to(conv.weight.dtype),))


# --- Text encoders ----------------------------------------------------------


def run_encoders(args, models, said):
    """Prompt embeddings of each text encoder in fp32 and in bf16. Returns them, and a pipeline with the last encoder."""
    embeds = {}
    for path in args.text_encoder:
        encoder = load_single_file(args.checkpoint, "text_encoder", path, args.device)
        pipe = make_pipeline(args.checkpoint, models | dict(text_encoder=encoder), args.padding)
        with torch.no_grad():
            exact = pipe.encode_prompt(args.prompt)[0][0].float().cpu()
            to_bf16(dict(text_encoder=encoder))
            embeds[path] = exact, pipe.encode_prompt(args.prompt)[0][0].float().cpu()
        said(f"transformers {path.name}")
    return embeds, pipe


def compare_encoders(embeds, kiln):
    rows = []
    for path, (exact, rounded) in embeds.items():
        row = row_of(path.name, "prompt_embeds", "encoder", exact, rounded, kiln[path])
        rows.append(row | judged(row["ratio"], 0.0, ALLOWED))
    return rows


# --- Comparison -------------------------------------------------------------


def row_of(case, stage, variant, wide, theirs, own):
    """The errors of a PyTorch result and of a kiln result."""
    assert own.shape == wide.shape, f"{stage}: {own.shape}, not {wide.shape}"
    errors = [relative_l2(result, wide) for result in (theirs, own)]
    return dict(case=case, stage=stage, variant=variant, rms=rms(wide), torch=errors[0], kiln=errors[1], ratio=errors[1] / errors[0])


def judged(ratio, least, most):
    # NaN is not within any limits.
    return dict(least=least, most=most, ok=least <= ratio <= most)


def compare(case, wide, theirs, dumps, variants):
    """Rows of the table for one case: kiln's dumps by variant against PyTorch's results with quantized and plain inputs."""
    rows = []
    for name, dump in dumps.items():
        kiln, variant = with_velocities(dump, wide["sigmas"]), variants[name]
        for stage in denoised(case):
            row = row_of(case.name, stage, name, wide[stage], theirs[variant.quantizes][stage], kiln[stage])
            rows.append(row | judged(row["ratio"], variant.least, variant.most))
    return rows


def print_rows(rows):
    """A line for every case, stage and PyTorch error, with kiln's error and ratio for each variant compared with it."""
    lines = {}
    for row in rows:
        lines.setdefault((row["case"], row["stage"], row["torch"]), {})[row["variant"]] = row
    variants = dict.fromkeys(row["variant"] for row in rows)
    titles = "  ".join(f"{variant:<15}" for variant in variants)
    print(f"\n{'case':<32} {'stage':<13} {'rms':>7}  {'torch':<8}  {titles}".rstrip())
    for (case, stage, theirs), found in lines.items():
        first, *_ = found.values()
        columns = "  ".join(f"{cell_of(found[variant]) if variant in found else '':<15}" for variant in variants)
        print(f"{case:<32} {stage:<13} {first['rms']:7.3f}  {theirs:.2e}  {columns}".rstrip())


def cell_of(row):
    return f"{row['kiln']:.2e} {row['ratio']:.3f}{'' if row['ok'] else '!'}"


def run(args):
    cases, said = begin(args)
    variants = VARIANTS[args.format]
    # kiln runs first, so that it does not share a GPU with the others.
    dumps, reports, kiln_embeds = {}, {}, {}
    # Files of klein do not state their variant.
    variant_of = [] if is_dev(args.checkpoint) else ["--variant", "distilled"]
    files = ["--transformer", args.transformer, *variant_of, "--text-encoder"]
    for case in cases:
        dumps[case.name], reports[case.name] = {}, {}
        for variant in args.variants:
            more = variants[variant].arguments
            dump, report = run_kiln(args, case, f"kiln-{variant}", [*files, args.text_encoder[0], *more])
            dumps[case.name][variant], reports[case.name][variant] = dump, report
            said(f"kiln {case.name} {variant}: {report['saturated']} inputs saturated")
    small = Case("prompt", 64, 64, 1)
    for path in args.text_encoder:
        kiln_embeds[path] = run_kiln(args, small, f"kiln-{path.stem}", [*files, path])[0]["prompt_embeds"]
        said(f"kiln {path.name}")

    models = dict(
        transformer=load_single_file(args.checkpoint, "transformer", args.transformer, args.device),
        vae=load_model(args.checkpoint, "vae", args.device),
    )
    if args.lora:
        put_beside(models["transformer"], args.lora, args.device)
    said(f"transformer and VAE loaded, {versions()}")
    embeds, pipe = run_encoders(args, models, said)
    keep_latents_wide(pipe)
    given = kiln_embeds[args.text_encoder[0]][None].to(args.device)

    def run_transformer(case, quantizes):
        quantize_activations(pipe.transformer, quantizes)
        return run_diffusers(pipe, args, case, exact_time=True, prompt_embeds=given)

    wide, theirs = {}, {case.name: {} for case in cases}
    for case in cases:
        wide[case.name] = run_transformer(case, False)
        said(f"wide {case.name}")
    to_bf16({part: getattr(pipe, part) for part in PARTS})
    free(args.device)
    for case in cases:
        for quantizes in sorted({variants[variant].quantizes for variant in args.variants}):
            theirs[case.name][quantizes] = run_transformer(case, quantizes)
            said(f"torch {case.name}, inputs {'quantized' if quantizes else 'in bf16'}")

    rows = compare_encoders(embeds, kiln_embeds)
    for case in cases:
        rows += compare(case, wide[case.name], theirs[case.name], dumps[case.name], variants)
    print_rows(rows)
    broken = [
        f"{row['case']}, {row['variant']}: the error of {row['stage']} is {row['ratio']:.3f} times PyTorch's"
        for row in rows
        if not row["ok"]
    ]
    # All runs have the same prompt and text encoder, so the embeddings must agree.
    for case, runs in dumps.items():
        for variant, dump in runs.items():
            if not torch.equal(dump["prompt_embeds"], kiln_embeds[args.text_encoder[0]]):
                broken.append(f"{case}, {variant}: kiln's prompt embeddings differ from its other runs")
    return finish(args, dict(rows=rows, kiln=reports, broken=broken))


def format_of(path):
    """The format of a transformer's quantized layers."""
    with safe_open(path, "pt") as file:
        (format,) = {*declared_formats(file).values()}
    return format


def main():
    parser = arguments("Compare kiln with the arithmetic of FP8 and NVFP4 models on one checkpoint.")
    parser.add_argument("--transformer", type=Path, required=True, metavar="FILE", help="the transformer in FP8 or NVFP4")
    parser.add_argument("--text-encoder", type=Path, nargs="+", required=True, metavar="FILE", help="quantized text encoders")
    names = "; ".join(f"{format}: {', '.join(variants)}" for format, variants in VARIANTS.items())
    parser.add_argument("--variants", nargs="+", metavar="NAME", help=f"kiln's variants [default: all]. {names}")
    args = parse(parser)
    args.format = format_of(args.transformer)
    args.variants = args.variants or [*VARIANTS[args.format]]
    if unknown := [name for name in args.variants if name not in VARIANTS[args.format]]:
        parser.error(f"{args.transformer.name} is in {args.format}, which has no variant {', '.join(unknown)}")
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
