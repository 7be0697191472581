#!/usr/bin/env python3
"""Check a file of `kiln quantize` against its original weights, and read it as other programs do.

    kiln quantize FOLDER OUT --to nvfp4
    python tools/check_quantized_file.py FOLDER/transformer OUT/transformer/flux-2-klein-4b-nvfp4.safetensors
    python tools/check_quantized_file.py FOLDER/text_encoder OUT/text_encoder/qwen_3_4b_nvfp4.safetensors

The original is a safetensors file or a folder of them, with names of diffusers and transformers or of single files.

    formulas   Every tensor is computed again by tools/quantized.py and compared byte by byte: codes, scales, and bf16 tensors.
               Either all quantized layers have an input_scale or none, and it is a power of two.
    ComfyUI    The loader's rules decide which layers are quantized, and how (convert_old_quants in comfy/utils.py, the mixed
               precision layers of comfy/ops.py). Weights are expanded as in comfy-kitchen's CUDA kernels, which are written here
               a second time. No weight may be further from the original than rounding allows.
    diffusers  Its quantizer for files of Black Forest Labs reads FP8 with row scales, and NVFP4 in the order of ModelOpt: the even
               column in the low nibble, block scales row by row. `--layout diffusers` writes such files; they have scales but no
               settings for ComfyUI. For these files diffusers' weights have to be right to the bit, and the ComfyUI part is left
               out. Files for ComfyUI, and those that Black Forest Labs publish of FLUX.2 [klein], have one scale and the other
               order, so diffusers 0.42 does not read them unmodified: it refuses FP8 and loads NVFP4 as other numbers. Their
               scales and codes are put into its order first, and diffusers has to make the right weights of them; its result for
               the unmodified file is printed. It has no loader for text encoders in these formats, and its loaders for ModelOpt
               and torchao need files that these wrote.

Exits 1 when something is wrong. On a GPU, or with 16 cores, klein 4B takes a few minutes.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from quantized import fp8_scale, nvfp4_scale, pack, to_blocks, to_fp8
from single_files import FORMATS, SETTINGS, Weight, layer_settings, transformer_weights

# The tensors of a layer in each format, and the dtype of its elements.
LAYER_TENSORS = {
    "float8_e4m3fn": (torch.float8_e4m3fn, {"weight", "weight_scale", "input_scale"}),
    "nvfp4": (torch.uint8, {"weight", "weight_scale", "weight_scale_2", "input_scale"}),
}
# ComfyUI's text encoders have no output head.
UNUSED = "lm_head.weight"
HEAD_DIM = 128


class Wrong(Exception):
    pass


def expect(condition, what):
    if not condition:
        raise Wrong(what)


# --- Files ------------------------------------------------------------------


class Tensors:
    """The tensors of a file, or of all files in a folder."""

    def __init__(self, path):
        paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        expect(paths, f"{path} holds no safetensors files")
        self.files = [safe_open(path, "pt") for path in paths]
        self.places = {name: file for file in self.files for name in file.keys()}

    def __getitem__(self, name):
        expect(name in self.places, f"there is no {name}")
        return self.places[name].get_tensor(name)

    get_tensor = __getitem__

    def keys(self):
        return self.places.keys()

    def metadata(self):
        return self.files[0].metadata()

    def shapes(self):
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self.places.items()}


def is_transformer(names):
    return any(name.startswith(("double_blocks.", "transformer_blocks.")) for name in names)


def single_file_weights(shapes, formats):
    """The weights of a single file, each with the original tensors that it consists of."""
    if any(name.startswith("transformer_blocks.") for name in shapes):
        weights = transformer_weights(shapes, (), "bf16")
        sources = {weight.name: weight for weight in weights}
    else:
        sources = {name: Weight(name, {name: shape}, "bf16") for name, shape in shapes.items() if name != UNUSED}
    return {name: Weight(name, weight.sources, formats.get(weight.layer, "bf16")) for name, weight in sources.items()}


def original_values(weight, original, device):
    """The values of a weight in bf16, the type of single files."""
    if len(weight.sources) == 1 and weight.name in weight.sources:
        return original[weight.name].to(device, torch.bfloat16)
    return weight.stack(lambda name, _: original[name].to(device, torch.bfloat16))


def settings_by_scales(quantized):
    """The formats of a diffusers file's layers, which follow from its scales."""
    layers = [name.removesuffix(".weight_scale") for name in quantized.places if name.endswith(".weight_scale")]
    formats = {layer: "nvfp4" if f"{layer}.weight_scale_2" in quantized.places else "fp8" for layer in layers}
    return {layer: {"format": FORMATS[format]} for layer, format in formats.items()}


class Layers:
    """The quantized layers of a file, and the program whose layout it has."""

    def __init__(self, quantized):
        self.settings = layer_settings(quantized)
        self.for_diffusers = not self.settings
        self.settings = self.settings or settings_by_scales(quantized)

    def formats(self):
        names = {name: format for format, name in FORMATS.items()}
        for layer, settings in self.settings.items():
            expect(settings.get("format") in names, f"{layer} has the format {settings.get('format')!r}")
            expect(set(settings) == {"format"}, f"{layer} has other settings than its format")
        return {layer: names[settings["format"]] for layer, settings in self.settings.items()}


def same_bytes(a, b):
    equal = a.dtype == b.dtype and a.shape == b.shape
    return equal and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


# --- By the formulas --------------------------------------------------------


def tensors_for_diffusers(weight, values):
    """The tensors of a weight in a file for diffusers, without input_scale."""
    if weight.format == "bf16":
        return {weight.name: values}
    largest = values.float().abs()
    if weight.format == "fp8":
        largest = largest.amax(dim=1)
        # For zeros any scale but zero is right.
        scale = torch.where(largest == 0, 1.0, fp8_scale(largest))
        stored = dict(weight=to_fp8(values, scale[:, None]), weight_scale=scale)
    else:
        scale = nvfp4_scale(largest.amax())
        codes, block_scales = to_blocks(values, scale)
        # Packed for ComfyUI, with exchanged nibbles.
        packed = pack(codes)
        stored = dict(weight=packed << 4 | packed >> 4, weight_scale=block_scales, weight_scale_2=scale)
    return {f"{weight.layer}.{name}": tensor for name, tensor in stored.items()}


def check_formulas(weights, original, quantized, layers, device):
    left = set(quantized.places)
    for weight in weights.values():
        values = original_values(weight, original, device)
        tensors = tensors_for_diffusers(weight, values) if layers.for_diffusers else weight.tensors(values, None)
        tensors.pop(f"{weight.layer}.{SETTINGS}", None)
        for name, tensor in tensors.items():
            expect(name in left, f"{name} is missing")
            expect(same_bytes(quantized[name].to(device), tensor), f"{name} is not what the formulas give")
            left.remove(name)
    scales = {name: quantized[name] for name in left if name.endswith(".input_scale")}
    for name, scale in scales.items():
        mantissa, _ = torch.frexp(scale)
        power = scale.dtype == torch.float32 and scale.shape == () and mantissa == 0.5
        expect(power, f"{name} is {scale}, which is no power of two in f32")
    known = {weight.layer for weight in weights.values() if weight.format != "bf16"}
    measured = {name.removesuffix(".input_scale") for name in scales}
    expect(measured in (set(), known), f"{len(measured)} of {len(known)} layers have an input_scale")
    left -= set(scales) | {f"{layer}.{SETTINGS}" for layer in known}
    expect(not left, f"no layer has {sorted(left)[:3]}")
    return f"{len(known)} of {len(weights)} weights quantized, {len(measured)} with input_scale, all bytes as computed"


# --- As ComfyUI reads it ----------------------------------------------------


def scales_in_rows(tiled, weight):
    """The block scales of an NVFP4 weight, row by row. The file has them in tiles of 128 rows by four blocks, with the rows r,
    r + 32, r + 64 and r + 96 side by side."""
    rows, pairs = weight.shape
    down, along = -(-rows // 128), -(-pairs // 8 // 4)
    expect(tiled.numel() == down * along * 512, f"{tiled.numel()} block scales of a weight of {rows} rows and {2 * pairs} columns")
    tiles = tiled.view(torch.uint8).view(down, along, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(128 * down, 4 * along)
    return tiles[:rows, : pairs // 8].contiguous().view(torch.float8_e4m3fn)


def expanded(layer, layers, quantized, device):
    """The weight of a layer in bf16, and how far each value may be from the original, relative to the unit of its elements."""
    kind = layers.settings[layer]["format"]
    dtype, known = LAYER_TENSORS[kind]
    names = {name.rsplit(".", 1)[1] for name in quantized.places if name.rsplit(".", 1)[0] == layer} - {SETTINGS}
    needed = known - {"input_scale"}
    expect(needed <= names <= known, f"{layer} has the tensors {sorted(names)}")
    weight = quantized[f"{layer}.weight"].to(device)
    expect(weight.dtype == dtype, f"{layer}.weight is {weight.dtype}")
    for name in names & {"weight_scale_2", "input_scale"} | ({"weight_scale"} if kind == "float8_e4m3fn" else set()):
        scale = quantized[f"{layer}.{name}"]
        numbers = len(weight) if layers.for_diffusers and name == "weight_scale" else 1
        right = scale.numel() == numbers and scale.dtype == torch.float32 and (scale > 0).all()
        expect(right, f"{layer}.{name} is not {numbers} positive numbers in f32")
    if kind == "float8_e4m3fn":
        scale = quantized[f"{layer}.weight_scale"].to(device)
        scale = scale[:, None] if layers.for_diffusers else scale
        elements = weight.float()
        # Half the distance of two neighbors, which is 2^-3 times the power of two below, or 2^-9 for subnormal numbers.
        _, exponent = torch.frexp(elements)
        return (elements * scale).bfloat16(), torch.exp2(exponent.clamp(min=-5) - 5.0) * scale
    scales = quantized[f"{layer}.weight_scale"].to(device)
    scales = scales if layers.for_diffusers else scales_in_rows(scales, weight)
    unit = (quantized[f"{layer}.weight_scale_2"].to(device) * scales.float()).repeat_interleave(16, dim=1)
    magnitudes = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.float32, device=device) / 2
    pairs = [weight & 15, weight >> 4] if layers.for_diffusers else [weight >> 4, weight & 15]
    codes = torch.stack(pairs, dim=-1).flatten(1).int()
    elements = torch.where(codes > 7, -1.0, 1.0) * magnitudes[codes & 7]
    # Half the distance again: a quarter up to 2, a half up to 4, one above. A block whose scale rounds to zero is lost.
    distance = torch.where(elements.abs() < 2, 0.25, torch.where(elements.abs() < 4, 0.5, 1.0))
    lost = 6 * 2.0**-10 * quantized[f"{layer}.weight_scale_2"].to(device)
    return (elements * unit).bfloat16(), torch.where(unit == 0, lost, distance * unit)


def check_values(weights, original, quantized, layers, device):
    """Compares the values of all weights with the original."""
    errors = []
    for name, weight in weights.items():
        values = original_values(weight, original, device)
        if weight.layer not in layers.settings:
            # A plain cast, because only floats of 16 or 32 bits keep their values.
            stored = quantized[name]
            expect(stored.dtype in (torch.bfloat16, torch.float32), f"{name} is {stored.dtype} and has no settings")
            expect(torch.equal(stored.to(device, torch.bfloat16), values), f"{name} differs")
            continue
        found, allowed = expanded(weight.layer, layers, quantized, device)
        expect(found.shape == values.shape, f"{name} has the shape {tuple(found.shape)}")
        found, values = found.float(), values.float()
        error = (found - values).abs()
        # Rounding to bf16 adds an error, and so do the divisions in f32.
        beyond = (error > allowed * (1 + 2.0**-20) + found.abs() * 2.0**-8).sum().item()
        expect(beyond == 0, f"{beyond} values of {name} are further from the original than rounding allows")
        errors.append((error.square().sum() / values.square().sum()).sqrt().item())
    unknown = set(layers.settings) - {weight.layer for weight in weights.values()}
    expect(not unknown, f"settings of {sorted(unknown)[:3]}, which the model does not have")
    return f"{len(errors)} layers, relative errors {min(errors):.4f} to {max(errors):.4f}"


# --- As diffusers reads it --------------------------------------------------


def diffusers_config(original, shapes):
    """The configuration next to the original. Without one, the configuration follows from the shapes."""
    path = original / "config.json"
    if path.is_file():
        return json.loads(path.read_text())
    blocks = [{name.split(".")[1] for name in shapes if name.startswith(f"{kind}_blocks.")} for kind in ("double", "single")]
    hidden, channels = shapes["img_in.weight"]
    return dict(
        _class_name="Flux2Transformer2DModel",
        attention_head_dim=HEAD_DIM,
        num_attention_heads=hidden // HEAD_DIM,
        in_channels=channels,
        joint_attention_dim=shapes["txt_in.weight"][1],
        num_layers=len(blocks[0]),
        num_single_layers=len(blocks[1]),
        mlp_ratio=shapes["double_blocks.0.img_mlp.2.weight"][1] / hidden,
        guidance_embeds="guidance_in.in_layer.weight" in shapes,
    )


def in_diffusers_order(quantized, layers):
    """The tensors of a file for ComfyUI, with scales and codes in diffusers' order."""
    tensors = {name: quantized[name] for name in quantized.places}
    for layer, settings in layers.settings.items():
        weight, scale = (tensors[f"{layer}.{name}"] for name in ("weight", "weight_scale"))
        if settings["format"] == "float8_e4m3fn":
            tensors[f"{layer}.weight_scale"] = scale.expand(len(weight)).clone()
            continue
        tensors[f"{layer}.weight"] = weight << 4 | weight >> 4
        tensors[f"{layer}.weight_scale"] = scales_in_rows(scale, weight)
        # diffusers requires an input_scale, though the weights do not depend on it.
        tensors.setdefault(f"{layer}.input_scale", torch.ones(()))
    return tensors


def right_in_diffusers(tensors, quantized, layers, config, device):
    """How many quantized layers diffusers reads to the bit from these tensors."""
    from diffusers import BFLQuantizationConfig, Flux2Transformer2DModel

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        quantization = BFLQuantizationConfig(compute_dtype=torch.bfloat16)
        model = Flux2Transformer2DModel.from_single_file(
            tensors, config=folder, quantization_config=quantization, torch_dtype=torch.bfloat16
        )
    found = model.hf_quantizer._dequantize(model).state_dict()
    right = 0
    for weight in transformer_weights({name: tuple(tensor.shape) for name, tensor in found.items()}, (), "bf16"):
        is_quantized = weight.layer in layers.settings
        if is_quantized:
            values, _ = expanded(weight.layer, layers, quantized, device)
        else:
            values = quantized[weight.name].bfloat16()
        same = all(torch.equal(found[source].cpu(), piece) for source, piece in weight.unstack(values.cpu()).items())
        expect(same or is_quantized, f"{weight.name}, which is plain, is another weight in diffusers")
        right += same and is_quantized
    return right


def check_diffusers(quantized, layers, config, device):
    right = right_in_diffusers(in_diffusers_order(quantized, layers), quantized, layers, config, device)
    number = len(layers.settings)
    expect(right == number, f"{number - right} of {number} layers are other weights in diffusers")
    return f"{number} layers, put into its order, are the same weights"


def as_it_is(quantized, layers, config, device):
    """diffusers' result for the unmodified file."""
    tensors, number = {name: quantized[name] for name in quantized.places}, len(layers.settings)
    try:
        right = right_in_diffusers(tensors, quantized, layers, config, device)
    except (RuntimeError, ValueError, IndexError) as error:
        verdict = f"refused ({type(error).__name__}: {str(error).splitlines()[0][:100]})"
        expect(not layers.for_diffusers, verdict)
        return verdict
    verdict = f"{right} of {number} layers are the same weights"
    expect(right == number or not layers.for_diffusers, verdict)
    return verdict


# --- The program ------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description="Check a file of kiln quantize.")
    parser.add_argument("original", type=Path, help="the original weights: a safetensors file, or a folder of them")
    parser.add_argument("quantized", type=Path, help="the file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-diffusers", action="store_true", help="do not read the file with diffusers")
    args = parser.parse_args()
    original, quantized = Tensors(args.original), Tensors(args.quantized)
    shapes = original.shapes()
    layers = Layers(quantized)
    weights = single_file_weights(shapes, layers.formats())
    checks = dict(formulas=lambda: check_formulas(weights, original, quantized, layers, args.device))
    if layers.for_diffusers:
        checks["ComfyUI"] = lambda: "left out: the file is laid out for diffusers"
    # Values are computed like the kernels of the program that the file is for.
    name = "values" if layers.for_diffusers else "ComfyUI"
    checks[name] = lambda: check_values(weights, original, quantized, layers, args.device)
    if is_transformer(shapes) and not args.no_diffusers:
        import diffusers

        config = diffusers_config(args.original, shapes)
        if not layers.for_diffusers:
            checks["diffusers"] = lambda: check_diffusers(quantized, layers, config, args.device)
        checks[f"diffusers {diffusers.__version__}, the file as it is"] = lambda: as_it_is(quantized, layers, config, args.device)
    failed = False
    for name, check in checks.items():
        started = time.monotonic()
        try:
            verdict = check()
        except Wrong as error:
            failed, verdict = True, f"WRONG: {error}"
        print(f"{name}: {verdict} ({time.monotonic() - started:.1f} s)", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
