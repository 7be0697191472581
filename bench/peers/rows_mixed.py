"""The rows with quantized weights and bf16 inputs: W8A16 (e4m3) and W4A16 (NVFP4) GEMMs.

Each is a row of `rows.py` with quantized weights. PyTorch (`torch`) and kiln's own bf16 GEMM (`bf16`) get weights that were expanded
to bf16 beforehand. All sides take turns. Tensor scales are powers of two, so that bf16 holds the expanded weights exactly and one
reference is right for all sides.
"""

import math
from dataclasses import dataclass, replace

import torch
from quantized import E2M1_MAX, E4M3_MAX, from_nvfp4, to_fp8, to_nvfp4

from peers import rows
from peers.rows import BF16, ENCODER_GEMMS, F32, Operands, Row, Scaled

# The largest code stands for at least this many standard deviations of a weight; larger values saturate.
RANGE = 5.5


@dataclass
class Nvfp4(Scaled):
    """e2m1 elements, two to a byte, with a block scale for every sixteen in a row and a tensor scale."""

    block_scales: torch.Tensor  # e4m3, in tiles

    def double(self):
        return from_nvfp4(self.codes, self.block_scales, self.scale).double()


def to_w8(values, deviation: float) -> Scaled:
    scale = 2.0 ** math.ceil(math.log2(RANGE * deviation / E4M3_MAX))
    return Scaled(to_fp8(values, scale), scale)


def to_w4(values, deviation: float) -> Nvfp4:
    scale = 2.0 ** math.ceil(math.log2(RANGE * deviation / (E4M3_MAX * E2M1_MAX)))
    codes, block_scales = to_nvfp4(values, scale)
    return Nvfp4(codes, scale, block_scales)


QUANTIZE = {"W8A16": to_w8, "W4A16": to_w4}


class Expanding(Operands):
    """Operands of a bf16 row. Its weights are the expansions of quantized weights."""

    def __init__(self, operands: Operands, format: str):
        self.device, self.generator, self.format = operands.device, operands.generator, format
        self.quantized = []

    def weight(self, rows: int, cols: int):
        deviation = cols**-0.5
        stored = QUANTIZE[self.format](self.normal(rows, cols, F32, deviation), deviation)
        expanded = stored.double().to(BF16)
        self.quantized.append((expanded, stored))
        return expanded

    def replaced(self, tensors: list) -> list:
        """The tensors of an op with quantized weights instead of their expansions. Block scales follow their weight."""
        found = list(tensors)
        for i, tensor in enumerate(tensors):
            for expanded, stored in self.quantized:
                if tensor is expanded:
                    found[i] = stored
                    if isinstance(stored, Nvfp4):
                        found[i + 1] = stored.block_scales
        return found


def mixed(row: Row, format: str) -> Row:
    """A bf16 row with quantized weights. The bf16 row itself is one of its peers."""

    def make(m):
        operands = Expanding(m, format)
        bf16 = replace(row.make(operands), arithmetic=0.0)
        tensors, outputs = bf16.own_results()
        others = {"bf16": replace(bf16, others={})} | {name: way for name, way in bf16.others.items() if name == "product"}
        # With zero, `bytes` is computed again.
        return replace(bf16, tensors=operands.replaced(tensors), outputs=outputs, others=others, bytes=0)

    return Row(row.name, f"{row.shape} {format}", make, format)


# -------------------------------------------------------------------------------------------------------------------- sizes

# Layers of the text encoder.
ENCODER = [
    *(rows.linear(*shape) for shape in ENCODER_GEMMS),
    rows.qkv((512,), 2560, 32, 8, half_split=True),
    rows.linear_swiglu(512, 9728, 2560),
    rows.linear_gate_residual(512, 2560, 9728, gated=False),
]
# Single blocks of both models: both layers, the first with all epilogues; and a few hundred rows of the smaller model, as in its text
# stream and in small images.
BLOCKS = [
    *((4608, cols, inner) for cols, inner in ((27_648, 3072), (3072, 12_288), (36_864, 4096), (4096, 16_384))),
    *((512, cols, inner) for cols, inner in ((27_648, 3072), (3072, 12_288))),
]
SINGLE_BLOCKS = [
    *(rows.linear(*shape) for shape in BLOCKS),
    rows.qkv((4608,), 3072, 24, 24, mlp=9216),
    rows.qkv((4608,), 4096, 32, 32, mlp=12_288),
    rows.linear_gate_residual(4608, 3072, 12_288),
    rows.linear_gate_residual(4608, 4096, 16_384),
]

ROWS = [
    *(mixed(row, "W8A16") for row in ENCODER),
    *(mixed(row, "W4A16") for row in ENCODER + SINGLE_BLOCKS),
]
