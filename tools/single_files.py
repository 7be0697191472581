"""The published quantized single files: their tensors, names and order.

The transformer has the form that Black Forest Labs publish: their own names, the quantized layers listed in the header's metadata, and an
input_scale for each of them. The FP8 file of [dev] is Comfy-Org's, in the same form. The text encoder has ComfyUI's form: names of
transformers, a comfy_quant tensor for each quantized layer, and no input_scale, because its activations are never quantized.
"""

import itertools
import json
import re
from dataclasses import dataclass

import torch
from goldens.files import fnv1a
from quantized import amax, fp8_scale, nvfp4_scale, to_fp8, to_nvfp4

# Names of dtypes, in the order in which the safetensors library puts tensors into a file: the widest first.
DTYPES = {
    torch.int64: "I64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}

# The tensor with the settings of a layer, in files for ComfyUI.
SETTINGS = "comfy_quant"
# The formats' names in files.
FORMATS = dict(fp8="float8_e4m3fn", nvfp4="nvfp4")
TENSOR_SCALES = dict(fp8=fp8_scale, nvfp4=nvfp4_scale)

# Layers of blocks that the published transformers keep in bf16: some of the first double block's attention, and in [dev] the attention of
# all double blocks, or its text half.
PROJ, QKV = r"double_blocks\.0\.\w+_attn\.proj", r"double_blocks\.0\.\w+_attn\.qkv"
ATTENTION, TEXT_ATTENTION = r"double_blocks\.\d+\.\w+_attn\.(qkv|proj)", r"double_blocks\.\d+\.txt_attn\.(qkv|proj)"

# Bytes of the published transformers, and patterns of the layers that they keep in bf16.
PUBLISHED = {
    ("4b", "distilled", "fp8"): (4_070_624_520, ()),
    ("4b", "distilled", "nvfp4"): (2_460_413_488, ()),
    ("4b", "base", "fp8"): (4_089_498_488, (PROJ,)),
    ("4b", "base", "nvfp4"): (2_487_544_776, (PROJ,)),
    ("9b", "distilled", "fp8"): (9_433_061_528, ()),
    ("9b", "distilled", "nvfp4"): (5_760_960_048, (QKV,)),
    ("9b", "base", "fp8"): (9_567_278_472, (QKV, PROJ)),
    ("9b", "base", "nvfp4"): (5_809_193_808, (QKV, PROJ)),
    ("dev", "dev", "fp8"): (35_455_599_592, (ATTENTION,)),
    ("dev", "dev", "nvfp4"): (21_035_602_376, (TEXT_ATTENTION,)),
}

# Tensors of the transformer by their names in the published single files, with the diffusers tensors whose rows they stack.
OUTSIDE = {
    "img_in.weight": ["x_embedder.weight"],
    "txt_in.weight": ["context_embedder.weight"],
    "time_in.in_layer.weight": ["time_guidance_embed.timestep_embedder.linear_1.weight"],
    "time_in.out_layer.weight": ["time_guidance_embed.timestep_embedder.linear_2.weight"],
    "double_stream_modulation_img.lin.weight": ["double_stream_modulation_img.linear.weight"],
    "double_stream_modulation_txt.lin.weight": ["double_stream_modulation_txt.linear.weight"],
    "single_stream_modulation.lin.weight": ["single_stream_modulation.linear.weight"],
    "final_layer.adaLN_modulation.1.weight": ["norm_out.linear.weight"],
    "final_layer.linear.weight": ["proj_out.weight"],
}
# Only in [dev].
GUIDANCE = {
    "guidance_in.in_layer.weight": ["time_guidance_embed.guidance_embedder.linear_1.weight"],
    "guidance_in.out_layer.weight": ["time_guidance_embed.guidance_embedder.linear_2.weight"],
}
DOUBLE_BLOCK = {
    "img_attn.qkv.weight": ["attn.to_q.weight", "attn.to_k.weight", "attn.to_v.weight"],
    "img_attn.norm.query_norm.scale": ["attn.norm_q.weight"],
    "img_attn.norm.key_norm.scale": ["attn.norm_k.weight"],
    "img_attn.proj.weight": ["attn.to_out.0.weight"],
    "img_mlp.0.weight": ["ff.linear_in.weight"],
    "img_mlp.2.weight": ["ff.linear_out.weight"],
    "txt_attn.qkv.weight": ["attn.add_q_proj.weight", "attn.add_k_proj.weight", "attn.add_v_proj.weight"],
    "txt_attn.norm.query_norm.scale": ["attn.norm_added_q.weight"],
    "txt_attn.norm.key_norm.scale": ["attn.norm_added_k.weight"],
    "txt_attn.proj.weight": ["attn.to_add_out.weight"],
    "txt_mlp.0.weight": ["ff_context.linear_in.weight"],
    "txt_mlp.2.weight": ["ff_context.linear_out.weight"],
}
SINGLE_BLOCK = {
    "linear1.weight": ["attn.to_qkv_mlp_proj.weight"],
    "linear2.weight": ["attn.to_out.weight"],
    "norm.query_norm.scale": ["attn.norm_q.weight"],
    "norm.key_norm.scale": ["attn.norm_k.weight"],
}
BLOCKS = (
    ("double_blocks", "transformer_blocks", DOUBLE_BLOCK),
    ("single_blocks", "single_transformer_blocks", SINGLE_BLOCK),
)
# The rows are (shift, scale) in single files and (scale, shift) in diffusers.
SWAPPED = "final_layer.adaLN_modulation.1.weight"
# The weights that some published file quantizes.
QUANTIZABLE = re.compile(r"(double|single)_blocks\..*\.weight$")


@dataclass(frozen=True)
class Weight:
    """A weight of a single file, with the tensors of the component's folder that it consists of."""

    name: str
    sources: dict  # name to shape
    format: str  # bf16, fp8 or nvfp4

    @property
    def layer(self):
        return self.name.removesuffix(".weight")

    @property
    def shape(self):
        first, *_ = self.sources.values()
        return (sum(shape[0] for shape in self.sources.values()), *first[1:])

    def stack(self, source):
        """The weight from its sources, which `source` returns by name and shape."""
        pieces = [source(name, shape) for name, shape in self.sources.items()]
        return torch.cat(pieces[0].chunk(2)[::-1] if self.name == SWAPPED else pieces)

    def unstack(self, values):
        """The sources by name, from the weight: the reverse of `stack`."""
        pieces = [torch.cat(values.chunk(2)[::-1])] if self.name == SWAPPED else values.split([s[0] for s in self.sources.values()])
        return dict(zip(self.sources, pieces))

    def tensors(self, values, input_amax):
        """The file's tensors of this weight. A layer of the text encoder has no `input_amax`, but a tensor that marks it."""
        if self.format == "bf16":
            return {self.name: values}
        scale_of = TENSOR_SCALES[self.format]
        scale = scale_of(amax(values))
        if self.format == "fp8":
            stored = dict(weight=to_fp8(values, scale), weight_scale=scale)
        else:
            packed, block_scales = to_nvfp4(values, scale)
            stored = dict(weight=packed, weight_scale=block_scales, weight_scale_2=scale)
        if input_amax is not None:
            stored["input_scale"] = scale_of(input_amax)
        else:
            mark = json.dumps({"format": FORMATS[self.format]}).encode()
            stored[SETTINGS] = torch.tensor(list(mark), dtype=torch.uint8)
        return {f"{self.layer}.{name}": tensor for name, tensor in stored.items()}


def transformer_tables(shapes):
    """Names of all tensors in single files, each with its diffusers names, for a transformer whose diffusers tensors have these shapes."""
    names = OUTSIDE | (GUIDANCE if any("guidance_embedder" in name for name in shapes) else {})
    for single, diffusers, block in BLOCKS:
        for n in sorted({name.split(".")[1] for name in shapes if name.startswith(f"{diffusers}.")}, key=int):
            for name, sources in block.items():
                names[f"{single}.{n}.{name}"] = [f"{diffusers}.{n}.{source}" for source in sources]
    assert sorted(itertools.chain(*names.values())) == sorted(shapes), "diffusers has other tensors than the tables"
    return names


def transformer_weights(shapes, kept, format):
    """The weights of a transformer whose diffusers tensors have these shapes. `kept` are patterns of layers that stay in bf16."""

    def format_of(name):
        wide = any(re.fullmatch(pattern, name.removesuffix(".weight")) for pattern in kept)
        return format if QUANTIZABLE.match(name) and not wide else "bf16"

    tables = transformer_tables(shapes)
    return [Weight(name, {source: shapes[source] for source in tables[name]}, format_of(name)) for name in tables]


# The prefix of Mistral's language model in its component's folder, which single files lack; and the number of layers in single files, which
# are the layers that [dev] reads.
LANGUAGE_MODEL, MISTRAL_LAYERS = "language_model.", 30


def is_read_of_mistral(name):
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return int(layer[1]) < MISTRAL_LAYERS if layer else name != "model.norm.weight"


def encoder_weights(shapes, formats):
    """The weights of a text encoder with tensors of these shapes. The hash of a name chooses its format."""
    # ComfyUI's files have no output head, even if it is not tied.
    names = {name.removeprefix(LANGUAGE_MODEL): name for name in shapes if name != "lm_head.weight"}
    if LANGUAGE_MODEL + "model.norm.weight" in shapes:
        names = {name: source for name, source in names.items() if is_read_of_mistral(name)}
    dealt = {name: formats[fnv1a(name.encode()) % len(formats)] for name in names if name.endswith("_proj.weight")}
    return [Weight(name, {source: shapes[source]}, dealt.get(name, "bf16")) for name, source in names.items()]


def single_file(weights, input_amax):
    """A single file's tensors in order, and its metadata. A text encoder has neither metadata nor an `input_amax`."""
    tensors = []
    for weight in weights:
        # Without values, only for names, shapes and dtypes.
        found = weight.tensors(torch.empty(weight.shape, dtype=torch.bfloat16, device="meta"), input_amax.get(weight.layer))
        tensors += [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()]
    order = list(DTYPES)
    tensors.sort(key=lambda tensor: (order.index(tensor[2]), tensor[0]))
    if not input_amax:
        return tensors, None
    layers = {weight.layer: {"format": FORMATS[weight.format]} for weight in weights if weight.format != "bf16"}
    return tensors, {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


def layer_settings(file):
    """The settings of the quantized layers of an open single file, from the header or from tensors next to the layers."""
    metadata = (file.metadata() or {}).get("_quantization_metadata")
    if metadata:
        return json.loads(metadata)["layers"]
    marks = [name for name in file.keys() if name.endswith(f".{SETTINGS}")]
    return {name.removesuffix(f".{SETTINGS}"): json.loads(bytes(file.get_tensor(name).tolist())) for name in marks}


def declared_formats(file):
    """The formats of the quantized layers of an open single file."""
    names = {name: format for format, name in FORMATS.items()}
    return {layer: names[declared["format"]] for layer, declared in layer_settings(file).items()}
