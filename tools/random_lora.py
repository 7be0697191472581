#!/usr/bin/env python3
"""Write a LoRA with random factors for every linear layer of the blocks of a model's transformer, in the spelling of diffusers.

    python tools/random_lora.py FOLDER adapter.safetensors --rank 32
    python tools/random_lora.py FOLDER turbo.safetensors --turbo         # FLUX.2 [dev]: layers, names and rank of fal's Turbo for ComfyUI
    python tools/compare_diffusers.py FOLDER --lora adapter.safetensors:0.8 ...
    python tools/compare_quantized.py FOLDER --lora adapter.safetensors:0.8 ...

FOLDER is written by random_checkpoint.py; only its config is read. The adapter's delta is about SIZE times as large as the weights of
random_checkpoint.py. The comparisons use the functions below: the reference adds the adapter to its weights in fp32, or computes it
alongside quantized ones.

The published file of FLUX.2-dev-Turbo has 170 layers of rank 256 under two prefixes: names of Black Forest Labs behind `diffusion_model.`,
and for the attention of double blocks names of diffusers behind `transformer.`. MLPs of double blocks and the last modulation are not in
it. At the real size --turbo writes a file of the same length, 2,760,814,880 bytes.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from single_files import BLOCKS, GUIDANCE, OUTSIDE, SWAPPED, transformer_tables

SIZE = 0.3
TURBO_RANK = 256


def block_layers(model):
    """Names and shapes of the linear layers of all blocks."""
    shapes = {name.removesuffix(".weight"): tuple(t.shape) for name, t in model.state_dict().items()}
    return {name: shape for name, shape in shapes.items() if "transformer_blocks" in name and len(shape) == 2}


def turbo_layers(model):
    """Shapes of the layers of the Turbo file, by their names there."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert any("guidance_embedder" in name for name in shapes), "only FLUX.2 [dev] has a guidance embedding"
    layers = {}
    for name, sources in transformer_tables(shapes).items():
        if name.startswith("double_blocks."):
            ours = {f"transformer.{source}": source for source in sources if ".attn." in source}
        else:
            ours = {f"diffusion_model.{name}": sources[0]} if name != SWAPPED else {}
        layers |= {layer.removesuffix(".weight"): shapes[source] for layer, source in ours.items() if len(shapes[source]) == 2}
    return layers


def diffusers_name(layer):
    """The diffusers name of an adapter's layer, from its name in the file. Supports only the Black Forest Labs names of Turbo."""
    name = layer.removeprefix("diffusion_model.")
    if name == layer:
        return layer.removeprefix("transformer.")
    prefix, number, rest = ["", "", name] if "blocks." not in name else name.split(".", 2)
    tables = {"": OUTSIDE | GUIDANCE} | {single: table for single, _, table in BLOCKS}
    (source,) = tables[prefix][f"{rest}.weight"]
    block = next((f"{diffusers}.{number}." for single, diffusers, _ in BLOCKS if single == prefix), "")
    return block + source.removesuffix(".weight")


def split_scale(text):
    """The file and the strength in FILE:SCALE."""
    path, _, scale = text.rpartition(":")
    return Path(path), float(scale)


def factors_of(text, device):
    """Factors [rank, in] and [out, rank] by layer in fp32, the second with the strength."""
    path, strength = split_scale(text)
    tensors = load_file(path, device=str(device))
    names = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    pair = lambda name: (tensors[f"{name}.lora_A.weight"].float(), strength * tensors[f"{name}.lora_B.weight"].float())
    return {diffusers_name(name): pair(name) for name in names}


@torch.no_grad()
def add_lora(transformer, text):
    """Adds an adapter to weights of fp32, as diffusers' `fuse_lora` does."""
    for name, (down, up) in factors_of(text, next(transformer.parameters()).device).items():
        transformer.get_submodule(name).weight += up @ down


class Beside(torch.nn.Module):
    """A layer with its adapter's product added, in the type of its input, as PEFT computes it."""

    def __init__(self, layer, down, up):
        super().__init__()
        self.layer, self.down, self.up = layer, down, up

    def forward(self, x):
        return self.layer(x) + x @ self.down.to(x.dtype).mT @ self.up.to(x.dtype).mT


def put_beside(transformer, text, device):
    """Adds adapter products to the layers of a model, without changing weights."""
    for name, (down, up) in factors_of(text, device).items():
        transformer.set_submodule(name, Beside(transformer.get_submodule(name), down, up))


def main():
    parser = argparse.ArgumentParser(description="Write a random LoRA.")
    parser.add_argument("checkpoint", type=Path, help="model folder in the diffusers layout")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--rank", type=int, help=f"[default: 32; {TURBO_RANK} with --turbo]")
    parser.add_argument("--turbo", action="store_true", help="the layers and names of FLUX.2-dev-Turbo, for folders of FLUX.2 [dev]")
    parser.add_argument("--seed", type=int, default=27)
    args = parser.parse_args()
    from compare_diffusers import build_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(args.seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device=device)
    tensors = {}
    model = build_model(args.checkpoint, "transformer", "meta")
    layers = turbo_layers(model) if args.turbo else {f"transformer.{name}": shape for name, shape in block_layers(model).items()}
    rank = args.rank or (TURBO_RANK if args.turbo else 32)
    for name, (rows, cols) in layers.items():
        # The weights of random_checkpoint.py have a deviation of about one over the root of the columns.
        down, up = draw(rank, cols) * cols**-0.5, draw(rows, rank) * (SIZE * rank**-0.5)
        tensors[f"{name}.lora_A.weight"] = down.bfloat16().cpu()
        tensors[f"{name}.lora_B.weight"] = up.bfloat16().cpu()
    save_file(tensors, args.out)
    print(f"{args.out}: {len(layers)} layers of rank {rank}")


if __name__ == "__main__":
    main()
