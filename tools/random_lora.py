#!/usr/bin/env python3
"""Write a LoRA with random factors for every linear layer of the blocks of a model's transformer, in the spelling of diffusers.

    python tools/random_lora.py FOLDER adapter.safetensors --rank 32
    python tools/compare_diffusers.py FOLDER --lora adapter.safetensors:0.8 ...
    python tools/compare_quantised.py FOLDER --lora adapter.safetensors:0.8 ...

FOLDER is what random_checkpoint.py writes; only its config is read. What the adapter adds is about SIZE times as large as the weights there. The comparisons
take the functions below: the reference has the adapter added to its weights in fp32, or beside quantised ones.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SIZE = 0.3


def block_layers(model):
    """Names and shapes of the linear layers of all blocks."""
    shapes = {name.removesuffix(".weight"): tuple(t.shape) for name, t in model.state_dict().items()}
    return {name: shape for name, shape in shapes.items() if "transformer_blocks" in name and len(shape) == 2}


def split_scale(text):
    """The file and the strength of FILE:SCALE."""
    path, _, scale = text.rpartition(":")
    return Path(path), float(scale)


def factors_of(text, device):
    """Factors [rank, in] and [out, rank] by layer in fp32, the second with the strength."""
    path, strength = split_scale(text)
    tensors = load_file(path, device=str(device))
    names = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    pair = lambda name: (tensors[f"{name}.lora_A.weight"].float(), strength * tensors[f"{name}.lora_B.weight"].float())
    return {name.removeprefix("transformer."): pair(name) for name in names}


@torch.no_grad()
def add_lora(transformer, text):
    """Adds an adapter to weights of fp32, as diffusers' `fuse_lora` does."""
    for name, (down, up) in factors_of(text, next(transformer.parameters()).device).items():
        transformer.get_submodule(name).weight += up @ down


class Beside(torch.nn.Module):
    """A layer with the product of its adapter beside it, in the type of its input, as PEFT computes it."""

    def __init__(self, layer, down, up):
        super().__init__()
        self.layer, self.down, self.up = layer, down, up

    def forward(self, x):
        return self.layer(x) + x @ self.down.to(x.dtype).mT @ self.up.to(x.dtype).mT


def put_beside(transformer, text, device):
    """Puts an adapter beside the layers of a model."""
    for name, (down, up) in factors_of(text, device).items():
        transformer.set_submodule(name, Beside(transformer.get_submodule(name), down, up))


def main():
    parser = argparse.ArgumentParser(description="Write a random LoRA.")
    parser.add_argument("checkpoint", type=Path, help="model folder in the diffusers layout")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--seed", type=int, default=27)
    args = parser.parse_args()
    from compare_diffusers import build_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(args.seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device=device)
    tensors = {}
    for name, (rows, cols) in block_layers(build_model(args.checkpoint, "transformer", "meta")).items():
        # The weights of random_checkpoint.py have a deviation of about one by the root of the columns.
        down, up = draw(args.rank, cols) * cols**-0.5, draw(rows, args.rank) * (SIZE * args.rank**-0.5)
        tensors[f"transformer.{name}.lora_A.weight"] = down.bfloat16().cpu()
        tensors[f"transformer.{name}.lora_B.weight"] = up.bfloat16().cpu()
    save_file(tensors, args.out)
    print(f"{args.out}: {len(tensors) // 2} layers of rank {args.rank}")


if __name__ == "__main__":
    main()
