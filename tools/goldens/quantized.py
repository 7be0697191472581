"""tests/fixtures/quantized.*: the tiny model of klein with FP8 and NVFP4 weights.

The pipeline is diffusers'; the quantized layers follow ComfyUI's arithmetic, described below. tools/quantized.py, which the
other tools share, computes codes, scales and expanded weights. This module computes the products.

Models. A layer is a tensor of the original (BFL) layout, so that q, k and v of a double block are one tensor with one scale. The
linear layers of the double and single blocks are quantized, in `mixed` also the text encoder's. Everything else is bf16.

    model         transformer   activations                      text encoder
    fp8           file fp8      FP8, static scale                bf16
    nvfp4         file nvfp4    NVFP4, static tensor scale,      bf16
                                block scales of each call
    nvfp4_w4a16   file nvfp4    plain                            bf16
    mixed         file fp8      FP8, static scale; plain in      file fp8mixed: FP8, NVFP4
                                the text encoder                 or bf16, layer by layer

tests/fixtures/quantized.safetensors, F32 where not said otherwise. For <run> =
<model>.<case>.wide and <model>.<case>.quantized, with the cases of goldens.json:
    <run>.prompt_embeds  [32, 384]            every 16th of the 512 rows; only of mixed, and
                                              only in `wide`: both runs have the same
    <run>.velocity       [ceil(N / 3), 128]   step 0: tokens 0, 3, 6, ...
    <run>.latents        [ceil(N / 3), 128]   after the last step: the same tokens
    <run>.image      U16 [ceil(H / 7), W, 3]  round(65535 * v): pixel rows 0, 7, 14, ...
`wide` is the model with expanded weights, all in fp32: no weight is rounded to bf16 and no activation is quantized. `quantized`
is in fp32 too, except for the activations that the model quantizes. nvfp4_w4a16 has no such run, and its `wide` equals nvfp4's.
    linear.<file>.<layer>  [8, ceil(rows / 16)]  columns 0, 16, 32, ... of the product of one
                                              layer of fp8 or nvfp4 with the input below,
                                              which it quantizes; not rounded to bf16

tests/fixtures/quantized.json, scales as the bits of an f32:
    models    the files of each model, and whether it quantizes activations
    layers    for each file its linear layers: the format, the tensor scale (`weight_scale`
              of FP8, `weight_scale_2` of NVFP4) and, in the transformers, `input_scale`
    samples   for some of these layers the shape of `weight` and the FNV-1a 64 of the bytes of
              `weight` and, if NVFP4, of `weight_scale`, both as in the file; for layers in
              `linear` also of the codes of the input, [8, K] or [8, K / 2], and of its block
              scales, in the tiles of a weight of 8 rows
    cases     <model>.<case> with the bf16 errors over what is stored:
                  wide.<stage>, quantized.<stage>  the model as ComfyUI runs it in bf16,
                      against `wide` and against `quantized`
                  expanded.<stage>  the model with expanded weights, rounded to bf16, and
                      plain activations, against `wide`: how ComfyUI runs it if the GPU
                      has no product for the format. For nvfp4_w4a16 that is wide.<stage>.

Formulas. All in f32 unless a rounding is named; e4m3 and e2m1 round to nearest, ties to
even. Weights are read from the bytes of the file, as a program would.

    FP8      weight_scale s    amax(w) / 448 * 4^h
             code              e4m3(clamp(w / s, -448, 448))
             expanded weight   code * s, rounded to the compute dtype
             input_scale t     amax(x) / 448 * 4^h
             product           qx = e4m3(clamp(x / t, -448, 448)),
                               y = sum(qx * code) * (t * s), rounded to the compute dtype
    NVFP4    weight_scale_2 g  amax(w) / 2688 * 4^h
             block scale b     e4m3(min(amax(16 values of a row) / 6 / g, 448))
             code              e2m1(clamp(w / (g * b), -6, 6)), 0 where g * b = 0
             expanded weight   code * (g * b), rounded to the compute dtype
             input_scale t     amax(x) / 2688 * 4^h
             product           qx and bx of x like codes and b of w, with t for g,
                               y = sum((qx * bx) * (code * b)) * (t * g), rounded likewise

The sums are in f64, rounded to f32. h is fnv1a(name of the scale tensor) mod 3, with the name <layer>.weight_scale,
<layer>.weight_scale_2 or <layer>.input_scale. All tiny weights of one fan-in have the same maximum, so without h the scale of
another layer would be right nearly everywhere. Head room costs neither format anything. fnv1a(layer) mod 3 is the format of an
encoder layer: 0 FP8, 1 NVFP4, 2 bf16. amax(x) is the largest magnitude of a layer's input in the fp32 runs of all cases of
goldens.json, rounded to bf16. An NVFP4 byte holds two codes, with the even column in the high nibble. Block scales are stored in
tiles of 128 rows x 4 blocks, with zeros where a tile is not full. With T tiles side by side, the scale of row r and block c is
at (integer divisions)

    ((r / 128) * T + c / 4) * 512 + (r mod 32) * 16 + (r mod 128) / 32 * 4 + c mod 4.

Input of `linear`. (2k - 255) / 256 * 16^(row - 4), exact in bf16, with k for the name
"linear.<layer>", shape [8, K]: the first rows come near to or fall below the smallest code,
the last ones are beyond the largest, and some values are ties. Compare row by row.

The limits of `quantized`. A code that flips makes others flip in later layers. Another order of a sum therefore moves this run
as far as bf16 does, or as another input scale, or none, and --check allows 1.25 bf16 errors. The precise comparisons are `wide`,
for everything that is read from a file, and `linear`, for the quantization of activations. The error against `wide` shows
whether a pipeline quantizes its activations at all: it is then several times the error of expanded weights.

The report ends with deliberate mistakes and how far they move an output, in units of its bf16 error with exact times. A pipeline
run or, where marked, only `linear` notices each.
"""

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from unittest import mock

import quantized as formulas
import torch
from quantized import E2M1, amax, e2m1, e4m3, fp8_scale, from_blocks, from_e2m1, from_fp8, from_nvfp4, nvfp4_scale
from quantized import stored_blocks, swizzle, tile_offsets, to_blocks, to_fp8, to_nvfp4, unpack, unswizzle

from goldens.files import checksum, fnv1a, package_versions
from goldens.klein import CASES
from goldens.lora import bfl_places, text_places
from goldens.model import TEXT_ENCODER, build_components, to_bf16
from goldens.pipeline import run_case
from goldens.values import ERROR_KINDS, PACKAGES, Golden, as_arrays, error_report, hashed, relative_l2, rms, to_u16

FP8, NVFP4, BF16 = "float8_e4m3fn", "nvfp4", "bf16"


@dataclass(frozen=True)
class Model:
    name: str
    transformer: str
    text_encoder: str | None
    quantizes_activations: bool
    cases: tuple[str, ...]


MODELS = (
    Model("fp8", "fp8", None, True, ("square", "odd")),
    Model("nvfp4", "nvfp4", None, True, ("square",)),
    Model("nvfp4_w4a16", "nvfp4", None, False, ("square",)),
    Model("mixed", "fp8", "fp8mixed", True, ("square",)),
)

TRANSFORMER_SAMPLES = (
    "double_blocks.0.img_attn.qkv", "double_blocks.0.txt_attn.proj", "double_blocks.1.img_mlp.0", "double_blocks.1.txt_mlp.2",
    "single_blocks.0.linear1", "single_blocks.1.linear2",
)  # fmt: skip
ENCODER_SAMPLES = (
    "model.layers.4.mlp.down_proj", "model.layers.6.self_attn.k_proj", "model.layers.7.self_attn.q_proj",
    "model.layers.7.self_attn.v_proj", "model.layers.7.mlp.up_proj", "model.layers.18.mlp.gate_proj",
)  # fmt: skip
SAMPLES = dict(fp8=TRANSFORMER_SAMPLES, nvfp4=TRANSFORMER_SAMPLES, fp8mixed=ENCODER_SAMPLES)

# --- Number formats ---------------------------------------------------------


def bytes_of(tensor):
    return tensor.view(torch.uint8).numpy().tobytes()


def check_formats():
    """Checks the formats with numbers known from their definition."""
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        if code & 127 != 127:  # NaN
            value = torch.tensor([-value if code & 128 else value])
            assert torch.equal(torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).float(), value)
            assert bytes_of(e4m3(value)) == bytes([code])
    # The largest value, saturated values, both zeros, ties, and the ends of the subnormal range.
    values = [448, 449, 464, 1e6, -464, 0.0, -0.0, 1.0625, 1.1875, 1.3125, 248, 432, 2**-10, 3 * 2**-10, 15 * 2**-10]
    expected = "7e 7e 7e 7e fe 00 80 38 3a 3a 78 7e 00 02 08"
    assert bytes_of(e4m3(torch.tensor(values))) == bytes.fromhex(expected)
    sizes = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 1e9])
    rounded = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 6.0])
    assert torch.equal(from_e2m1(e2m1(sizes)), rounded) and torch.equal(from_e2m1(e2m1(-sizes)), -rounded)
    assert e2m1(torch.tensor([0.0, -0.0])).tolist() == [0, 8] and e2m1(E2M1).tolist() == [*range(16)]
    assert unpack(torch.tensor([[0xFD]], dtype=torch.uint8)).tolist() == [[15, 13]]
    offsets = tile_offsets(256, 64)
    places = {(0, 1): 1, (32, 0): 4, (64, 0): 8, (96, 3): 15, (1, 0): 16, (127, 3): 511, (0, 4): 512, (128, 0): 8192}
    assert all(offsets[place] == offset for place, offset in places.items())
    # One block at the tensor scale, one of zeros and one whose scale underflows to zero.
    codes, scales = to_blocks(torch.tensor([[6.0] * 16 + [0.0] * 16 + [-1e-6] * 16]), torch.tensor(6.0 / 2688))
    assert codes.tolist() == [[7] * 16 + [0] * 32] and bytes_of(scales) == bytes([0x7E, 0, 0])
    # Padding: 130 rows of 5 blocks are two by two tiles.
    scales = torch.arange(650).remainder(251).to(torch.uint8).reshape(130, 5).view(torch.float8_e4m3fn)
    stored = swizzle(scales)
    assert stored.shape == (256, 8) and bytes_of(unswizzle(stored, 130, 5)) == bytes_of(scales)
    assert bytes_of(stored).count(0) == 2048 - 650 + bytes_of(scales).count(0)


# --- Layers of a file -------------------------------------------------------


def head_room(name):
    """The factor of the scale tensor `name`: 1, 4 or 16."""
    return 4.0 ** (fnv1a(name.encode()) % 3)


def input_scale_for(layer, input_amax, scale_of):
    """The input scale of a layer; None if its activations are never quantized."""
    return None if input_amax is None else scale_of(input_amax) * head_room(f"{layer}.input_scale")


@dataclass(frozen=True)
class Fp8Layer:
    """An FP8 layer as the file holds it, and its product."""

    scale_of = staticmethod(fp8_scale)
    weight: torch.Tensor  # e4m3, [rows, K]
    weight_scale: torch.Tensor
    input_scale: torch.Tensor | None

    @classmethod
    def of(cls, name, values, input_amax):
        scale = fp8_scale(amax(values)) * head_room(f"{name}.weight_scale")
        return cls(to_fp8(values, scale), scale, input_scale_for(name, input_amax, fp8_scale))

    def expanded(self):
        return from_fp8(self.weight, self.weight_scale)

    def product(self, x):
        inputs = to_fp8(x, self.input_scale)
        return scaled_product(inputs, self.weight, self.input_scale * self.weight_scale)

    def scales(self):
        return dict(weight_scale=self.weight_scale, input_scale=self.input_scale)

    def sample(self):
        return dict(weight_shape=list(self.weight.shape), weight_fnv1a=checksum(bytes_of(self.weight)))

    def input_sample(self, x):
        return dict(input_fnv1a=checksum(bytes_of(to_fp8(x, self.input_scale))))


@dataclass(frozen=True)
class Nvfp4Layer:
    """An NVFP4 layer as the file holds it, and its product."""

    scale_of = staticmethod(nvfp4_scale)
    weight: torch.Tensor  # bytes, [rows, K / 2]
    weight_scale: torch.Tensor  # e4m3, in tiles
    weight_scale_2: torch.Tensor
    input_scale: torch.Tensor | None

    @classmethod
    def of(cls, name, values, input_amax):
        scale = nvfp4_scale(amax(values)) * head_room(f"{name}.weight_scale_2")
        return cls(*to_nvfp4(values, scale), scale, input_scale_for(name, input_amax, nvfp4_scale))

    def expanded(self):
        return from_nvfp4(self.weight, self.weight_scale, self.weight_scale_2)

    def product(self, x):
        inputs = block_products(*to_blocks(x, self.input_scale))
        weights = block_products(*stored_blocks(self.weight, self.weight_scale))
        return scaled_product(inputs, weights, self.input_scale * self.weight_scale_2)

    def scales(self):
        return dict(weight_scale_2=self.weight_scale_2, input_scale=self.input_scale)

    def sample(self):
        return dict(
            weight_shape=list(self.weight.shape),
            weight_fnv1a=checksum(bytes_of(self.weight)),
            weight_scale_fnv1a=checksum(bytes_of(self.weight_scale)),
        )

    def input_sample(self, x):
        packed, block_scales = to_nvfp4(x, self.input_scale)
        return dict(input_fnv1a=checksum(bytes_of(packed)), input_block_scale_fnv1a=checksum(bytes_of(block_scales)))


def block_products(codes, block_scales):
    """Codes times block scales, without the tensor scale. Exact in f32, and even in bf16: six significant bits."""
    return from_blocks(codes, block_scales.float())


def scaled_product(inputs, weights, alpha):
    return (inputs.double() @ weights.double().mT).float() * alpha


def f32_bits(value):
    return f"0x{value.float().view(torch.int32).item() & 0xFFFFFFFF:08x}"


def transformer_layers():
    """The quantized layers, and the diffusers modules that hold their rows."""
    blocks = {name: place for name, place in bfl_places().items() if "_blocks." in name}
    return {name: [weight.removesuffix(".weight") for weight, _, _ in place] for name, place in blocks.items()}


ENCODER_GROUPS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
ENCODER_PARTS = (*ENCODER_GROUPS[0], "self_attn.o_proj", *ENCODER_GROUPS[1], "mlp.down_proj")


def encoder_layers():
    return {name: [name] for name in text_places(range(TEXT_ENCODER["num_hidden_layers"]))}


# The part of the model that a file holds, its linear layers and their formats.
FILES = dict(
    fp8=("transformer", transformer_layers(), lambda _layer: FP8),
    nvfp4=("transformer", transformer_layers(), lambda _layer: NVFP4),
    fp8mixed=("text_encoder", encoder_layers(), lambda layer: (FP8, NVFP4, BF16)[fnv1a(layer.encode()) % 3]),
)


def build_file(components, name, input_amax):
    """The quantized layers of a file; None for a layer that stays bf16."""
    part, layers, format_of = FILES[name]
    built = {}
    for layer, modules in layers.items():
        values = torch.cat([components[part].get_submodule(module).weight.detach() for module in modules])
        kind = {FP8: Fp8Layer, NVFP4: Nvfp4Layer, BF16: None}[format_of(layer)]
        built[layer] = kind and kind.of(layer, values, input_amax.get(layer))
    return built


def check_mixture(file):
    """Checks that layers a program may fuse differ in format, and that each kind of layer takes each format where it matters."""
    formats = {layer: stored and type(stored) for layer, stored in file.items()}
    for parts in ENCODER_GROUPS:
        groups = [[formats[f"model.layers.{n}.{part}"] for part in parts] for n in range(9)]
        assert any(len({*group}) == len(parts) for group in groups), f"{parts} are never all different"
    for part in ENCODER_PARTS:
        found = {formats[f"model.layers.{n}.{part}"] for n in range(27)}
        assert len(found) == 3, f"{part} does not take every format"


# --- Running the reference --------------------------------------------------


class QuantizedLinear(torch.nn.Module):
    """Replaces a linear layer by rows of a layer of the file."""

    def __init__(self, layer, rows):
        super().__init__()
        self.layer, self.rows, self.quantizes_activations = layer, rows, False

    def forward(self, x):
        if self.quantizes_activations and self.layer.input_scale is not None:
            return self.layer.product(x.flatten(0, -2))[:, self.rows].to(x.dtype).unflatten(0, x.shape[:-1])
        return torch.nn.functional.linear(x, self.layer.expanded()[self.rows].to(x.dtype))


def install(components, files):
    """Puts the layers of the files into the models."""
    for name, layers in files.items():
        part, modules_of, _ = FILES[name]
        for layer, stored in layers.items():
            if stored is None:
                continue
            first = 0
            for module in modules_of[layer]:
                rows = slice(first, first + components[part].get_submodule(module).out_features)
                components[part].set_submodule(module, QuantizedLinear(stored, rows))
                first = rows.stop


def quantize_activations(model, quantizes):
    """Sets whether a model's quantized layers quantize their inputs, where the file has a scale for them."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.quantizes_activations = quantizes


def run(components, case, quantizes_activations, exact_time=False):
    for part in ("transformer", "text_encoder"):
        quantize_activations(components[part], quantizes_activations)
    return run_case(components, case, exact_time)


def calibrate(components):
    """The largest magnitude of each transformer layer's input, in bf16."""
    largest, handles = {}, []

    def look(_module, args, layer):
        largest[layer] = torch.maximum(largest.get(layer, torch.tensor(0.0)), amax(args[0]))

    for layer, modules in transformer_layers().items():
        module = components["transformer"].get_submodule(modules[0])
        handles.append(module.register_forward_pre_hook(functools.partial(look, layer=layer)))
    for case in CASES:
        run_case(components, case)
    for handle in handles:
        handle.remove()
    return {layer: value.to(torch.bfloat16).float() for layer, value in largest.items()}


def stages(model, run):
    """The stored stages of a run, as floats."""
    embeds = dict(prompt_embeds=run.prompt_embeds[::16]) if model.text_encoder else {}
    return embeds | dict(velocity=run.velocity[::3], latents=run.latents[::3], image=run.image[::7])


def files_of(model, files):
    return {name: files[name] for name in (model.transformer, model.text_encoder) if name}


@dataclass
class Result:
    """Stages of the runs of one model and case, and their bf16 errors for each of ERROR_KINDS."""

    truths: dict
    errors: list


def run_model(base, files, model):
    """The results of a model by case."""
    components = copy.deepcopy(base)
    install(components, files_of(model, files))
    cases = [case for case in CASES if case.name in model.cases]
    kinds = dict(wide=False) | (dict(quantized=True) if model.quantizes_activations else {})

    def run_kind(case, quantizes, exact_time=False):
        return stages(model, run(components, case, quantizes, exact_time))

    truths = {case: {kind: run_kind(case, quantizes) for kind, quantizes in kinds.items()} for case in cases}
    to_bf16(components)
    results = {}
    for case in cases:
        errors = []
        for exact_time in (False, True):
            own = run_kind(case, model.quantizes_activations, exact_time)
            compared = {kind: (own, truth) for kind, truth in truths[case].items()}
            if model.quantizes_activations:
                compared["expanded"] = (run_kind(case, False, exact_time), truths[case]["wide"])
            errors.append(
                {
                    f"{kind}.{stage}": error
                    for kind, (outputs, truth) in compared.items()
                    for stage, error in error_report(outputs, truth).items()
                }
            )
        results[case.name] = Result(truths[case], errors)
    return results


# --- Single layers ----------------------------------------------------------

LINEAR_ROWS = 8


def linear_input(layer, columns):
    """Rows of very different size, exact in bf16. The last rows exceed every input scale, the first underflow."""
    return hashed(f"linear.{layer}", LINEAR_ROWS, columns) * (16.0 ** (torch.arange(LINEAR_ROWS) - 4))[:, None]


def run_linears(layers, names):
    """The products of some layers of a file."""
    products = {}
    for name in names:
        linear = QuantizedLinear(layers[name], slice(None))
        linear.quantizes_activations = True
        products[name] = linear(linear_input(name, layers[name].expanded().shape[1]))
    return products


def row_relative_l2(values, references):
    """The error over all layers, with all reference rows scaled to the same size. Zero rows are left out."""
    pairs = [(values[name], reference, reference.norm(dim=1)) for name, reference in references.items()]
    scaled = [((value / size[:, None])[size > 0], (y / size[:, None])[size > 0]) for value, y, size in pairs]
    return relative_l2(*(torch.cat([pair[i].flatten() for pair in scaled]) for i in range(2)))


# --- Deliberate mistakes ----------------------------------------------------

LAST_BIT = "the last bit of activations"


@dataclass(frozen=True)
class Mistake:
    model: str
    what: str
    run: str
    # Changes a layer, given its name and all layers of the file.
    change: Callable = lambda _name, layer, _layers: layer
    patch: Callable = contextlib.nullcontext
    stage: str = "velocity"
    noticed: bool = True  # by the pipeline's run


def tensor_scale(layer):
    return "weight_scale" if isinstance(layer, Fp8Layer) else "weight_scale_2"


def with_scale(layer, scale):
    return replace(layer, **{tensor_scale(layer): scale})


def scale_divided(_name, layer, _layers):
    return with_scale(layer, 1 / getattr(layer, tensor_scale(layer)))


def input_scale_divided(_name, layer, _layers):
    """Divides by input_scale in the product instead of multiplying, through the tensor scale; the codes stay right."""
    return with_scale(layer, getattr(layer, tensor_scale(layer)) / layer.input_scale**2)


def other_stream(name, layers):
    return layers[name.replace("img", "txt") if "img" in name else name.replace("txt", "img")]


def tensor_scales_exchanged(name, layer, layers):
    return with_scale(layer, getattr(other_stream(name, layers), tensor_scale(layer)))


def input_scales_exchanged(name, layer, layers):
    return replace(layer, input_scale=other_stream(name, layers).input_scale)


def input_scales_exchanged_in_product(name, layer, layers):
    ratio = other_stream(name, layers).input_scale / layer.input_scale
    return with_scale(layer, getattr(layer, tensor_scale(layer)) * ratio)


def first_scale_of_group(name, layer, layers):
    """The scale of the first layer of the same format among those that a program may fuse."""
    for group in ENCODER_GROUPS:
        for part in group:
            if name.endswith(part):
                parts = (layers[name.removesuffix(part) + other] for other in group)
                first = next(other for other in parts if type(other) is type(layer))
                return with_scale(layer, getattr(first, tensor_scale(layer)))
    return layer


def input_scale_one(_name, layer, _layers):
    return replace(layer, input_scale=torch.tensor(1.0))


def input_scale_one_in_encoder(name, layer, layers):
    return input_scale_one(name, layer, layers) if name in FILES["fp8mixed"][1] else layer


def mistakes():
    right_unswizzle, right_forward = unswizzle, QuantizedLinear.forward

    def low_nibble_first(packed):
        return torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)

    def plain_as_swizzled(stored, rows, columns):
        return right_unswizzle(right_unswizzle(stored, rows, columns), rows, columns)

    def swizzled_as_plain(stored, rows, columns):
        return stored.reshape(rows, columns)

    def scale_of_the_moment(self, x):
        if self.quantizes_activations:
            layer = replace(self.layer, input_scale=self.layer.scale_of(amax(x)))
            return layer.product(x.flatten(0, -2))[:, self.rows].unflatten(0, x.shape[:-1])
        return right_forward(self, x)

    def not_quantized(self, x):
        return torch.nn.functional.linear(x, self.layer.expanded()[self.rows])

    def last_bit(self, x):
        signs = torch.tensor([1.0, -1.0]).repeat(x.shape[-1] // 2)
        return right_forward(self, x * (1 + signs * 2.0**-23))

    def function(name, mistaken):
        return functools.partial(mock.patch.object, formulas, name, mistaken)

    def forward(mistaken):
        return functools.partial(mock.patch.object, QuantizedLinear, "forward", mistaken)

    low_first = function("unpack", low_nibble_first)
    unnoticed = dict(run="quantized", noticed=False)
    return (
        Mistake("fp8", "weight_scale divided", "wide", scale_divided),
        Mistake("fp8", "weight_scale of the other stream", "wide", tensor_scales_exchanged),
        Mistake("fp8", "input_scale divided", "quantized", input_scale_divided),
        Mistake("fp8", "input_scale of the other stream", change=input_scales_exchanged, **unnoticed),
        Mistake("fp8", "... in the product only", "quantized", input_scales_exchanged_in_product),
        Mistake("fp8", "input_scale 1", change=input_scale_one, **unnoticed),
        Mistake("fp8", "input scale of the moment", patch=forward(scale_of_the_moment), **unnoticed),
        Mistake("fp8", "activations not quantized", patch=forward(not_quantized), **unnoticed),
        Mistake("fp8", LAST_BIT, patch=forward(last_bit), **unnoticed),
        Mistake("nvfp4_w4a16", "low nibble first", "wide", patch=low_first),
        Mistake("nvfp4_w4a16", "plain scales taken as tiles", "wide", patch=function("unswizzle", plain_as_swizzled)),
        Mistake("nvfp4_w4a16", "tiles taken as plain scales", "wide", patch=function("unswizzle", swizzled_as_plain)),
        Mistake("nvfp4_w4a16", "weight_scale_2 divided", "wide", scale_divided),
        Mistake("nvfp4_w4a16", "weight_scale_2 of the other stream", "wide", tensor_scales_exchanged),
        Mistake("nvfp4", "low nibble first in weights only", "quantized", patch=low_first),
        Mistake("nvfp4", "plain scales taken as tiles", patch=function("unswizzle", plain_as_swizzled), **unnoticed),
        Mistake("nvfp4", "tiles taken as plain scales", patch=function("unswizzle", swizzled_as_plain), **unnoticed),
        Mistake("nvfp4", "input_scale divided", "quantized", input_scale_divided),
        Mistake("nvfp4", "input_scale of the other stream", change=input_scales_exchanged, **unnoticed),
        Mistake("nvfp4", "... in the product only", "quantized", input_scales_exchanged_in_product),
        Mistake("nvfp4", "input_scale 1", change=input_scale_one, **unnoticed),
        Mistake("nvfp4", "input scale of the moment", patch=forward(scale_of_the_moment), **unnoticed),
        Mistake("nvfp4", "activations not quantized", patch=forward(not_quantized), **unnoticed),
        Mistake("nvfp4", LAST_BIT, patch=forward(last_bit), **unnoticed),
        Mistake("mixed", "low nibble first", "wide", patch=low_first, stage="prompt_embeds"),
        Mistake("mixed", "one scale for q, k, v", "wide", first_scale_of_group, stage="prompt_embeds"),
        Mistake("mixed", "encoder's inputs quantized", "quantized", input_scale_one_in_encoder, stage="prompt_embeds"),
    )


def sensitivity(base, files, results, linears):
    """(mistake, how far it moves the stage of its run, that in bf16 errors, and the same for single layers)."""
    moves = []
    for mistake in mistakes():
        model = next(model for model in MODELS if model.name == mistake.model)
        case = next(case for case in CASES if case.name == model.cases[0])
        changed = {
            file: {name: layer and mistake.change(name, layer, layers) for name, layer in layers.items()}
            for file, layers in files_of(model, files).items()
        }
        components = copy.deepcopy(base)
        install(components, changed)
        with mistake.patch():
            # The velocity of step 0 does not depend on the number of steps.
            wrong = stages(model, run(components, replace(case, steps=1), mistake.run == "quantized"))[mistake.stage]
            products = run_linears(changed[model.transformer], TRANSFORMER_SAMPLES)
        result = results[model.name][case.name]
        moved = relative_l2(wrong, result.truths[mistake.run][mistake.stage])
        kind = "expanded" if mistake.run == "wide" and model.quantizes_activations else mistake.run
        unit = result.errors[ERROR_KINDS.index("bf16_exact_time_relative_l2")][f"{kind}.{mistake.stage}"]
        right = linears[model.transformer]
        rounded = {name: y.to(torch.bfloat16).float() for name, y in right.items()}
        single = None
        if (mistake.run, mistake.stage) == ("quantized", "velocity"):
            single = row_relative_l2(products, right) / row_relative_l2(rounded, right)
        moves.append((mistake, moved, moved / unit, single))
    return moves


def format_sensitivity(moves):
    lines = ["", f"{'mistake':<48} run        stage          moves     bf16 errors  of single layers"]
    for mistake, moved, ratio, single in moves:
        # A NaN ratio comes from an output that is NaN.
        seen = not ratio <= 3
        assert seen == mistake.noticed, f"{mistake.model}: {mistake.what}: {ratio:.1f} bf16 errors"
        if mistake.what == LAST_BIT:
            assert ratio < 1.25, f"{mistake.model}: {mistake.what} is more than rounding noise"
            note = "  not a mistake"
        else:
            assert seen or single > 3, f"{mistake.model}: nothing shows: {mistake.what}"
            note = "" if seen else "  only in single layers"
        label = f"{mistake.model}: {mistake.what}"
        columns = f"{moved:<8.2e}  {ratio:<11.1f}" + ("" if single is None else f"  {single:<7.1f}")
        lines.append(f"{label:<48} {mistake.run:<10} {mistake.stage:<14} {columns}{note}".rstrip())
    return lines


# --- Fixtures ---------------------------------------------------------------


def layer_summary(file, layers):
    format_of = FILES[file][2]
    return {
        name: dict(format=format_of(name))
        | {field: f32_bits(value) for field, value in (layer.scales() if layer else {}).items() if value is not None}
        for name, layer in layers.items()
    }


def sample_summary(layers, names):
    summary = {}
    for name in names:
        layer = layers[name]
        summary[name] = layer.sample()
        if layer.input_scale is not None:
            summary[name] |= layer.input_sample(linear_input(name, layer.expanded().shape[1]))
    return summary


def check_result(name, result):
    for kind, truth in result.truths.items():
        for stage, tensor in truth.items():
            assert torch.isfinite(tensor).all(), f"{name}: {stage} of {kind} is not finite"
    assert 0.1 < rms(result.truths["wide"]["velocity"]) < 10, f"{name}: implausible velocity"
    for key, error in result.errors[1].items():
        assert 1e-3 < error < 0.3, f"{name}: implausible bf16 error {error} of {key}"


def stored_stages(truths):
    """The tensors that the fixture stores for the runs of one model and case, by name."""
    tensors = {f"{kind}.{stage}": tensor for kind, truth in truths.items() for stage, tensor in truth.items()}
    embeds = tensors.pop("quantized.prompt_embeds", None)
    assert embeds is None or torch.equal(embeds, tensors["wide.prompt_embeds"]), "the text encoder is not the same"
    return {name: to_u16(tensor) if name.endswith("image") else tensor for name, tensor in tensors.items()}


def compute():
    check_formats()
    base = build_components()
    input_amax = calibrate(base)
    files = {name: build_file(base, name, input_amax) for name in FILES}
    check_mixture(files["fp8mixed"])
    results = {model.name: run_model(base, files, model) for model in MODELS}
    linears = {file: run_linears(files[file], TRANSFORMER_SAMPLES) for file in ("fp8", "nvfp4")}

    tensors, cases = {}, []
    report = [f"{'case':<19} {'error of bf16':<25} bf16      bf16 with exact times"]
    for model in MODELS:
        for case, result in results[model.name].items():
            name = f"{model.name}.{case}"
            check_result(name, result)
            tensors.update(as_arrays(name, stored_stages(result.truths)))
            cases.append(dict(name=name, model=model.name, case=case) | dict(zip(ERROR_KINDS, result.errors)))
            for key, plain in result.errors[0].items():
                report.append(f"{name:<19} {key:<25} {plain:.2e}  {result.errors[1][key]:.2e}")
    for file, products in linears.items():
        columns = {layer: y[:, ::16] for layer, y in products.items()}
        tensors.update(as_arrays(f"linear.{file}", columns))
    summary = dict(
        versions=package_versions(*PACKAGES),
        models=[asdict(model) for model in MODELS],
        layers={file: layer_summary(file, layers) for file, layers in files.items()},
        samples={file: sample_summary(files[file], names) for file, names in SAMPLES.items()},
        cases=cases,
    )
    report += format_sensitivity(sensitivity(base, files, results, linears))
    return Golden(name="quantized", tensors=tensors, summary=summary, report="\n".join(report), noise=noise)


def noise(summary):
    """How far `quantized` may move: a flipped code moves it about as far as bf16 does, see above. Its size must agree."""
    return {
        f"{case['name']}.{key}": 1.25 * error
        for case in summary["cases"]
        for key, error in case["bf16_exact_time_relative_l2"].items()
        if key.startswith("quantized.")
    }
