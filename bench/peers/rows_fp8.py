"""The rows with e4m3 inputs or results: W8A8 GEMMs, ops that store e4m3, attention with e4m3 queries and keys.

The peer of a W8A8 GEMM is `torch._scaled_mm` with fast accumulation (`torch`) and without (`slow`). kiln accumulates `fast`, and also
`exact`. Both sides multiply the same codes by the same scales, and the references decode these codes, so the rows do not measure the
cost of quantization.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from peers import rows as bf16
from peers.rows import BF16, BLOCK_GEMMS, ENCODER_GEMMS, EPS, F32, HEAD_DIM, HIDDEN_SCALE
from peers.rows import Case, Operands, Row, Scaled, attention_f64, gemm_f64, many, rms, rotate, row, store, swiglu

E4M3 = torch.float8_e4m3fn
# Standard normal values reach the largest code but rarely saturate. Not powers of two, so that a missing factor shows.
INPUT_SCALE, WEIGHT_SCALE = 0.0131, 0.0127
# The factor of attention's results.
ATTENDED_SCALE = 0.005
# The factor of queries and of keys: their product is log2(e) / sqrt(head_dim), so that scores are exponents of two.
HEAD_SCALE = math.sqrt(math.log2(math.e) / math.sqrt(HEAD_DIM))
# Relative error of attention from rounding probabilities to bf16 and scores to thirteen places, by a simulation of both.
ATTENTION_ERROR = 1.7e-3
# How far PyTorch's attention may be off. It does not round queries and keys to e4m3, which moves scores by 0.026 sqrt(2) of their
# size, here one (base e), and results by as much.
ATTENTION_PEER = 6e-2


def fast_sums(inner: int) -> float:
    """Relative error of sums over all of K of which tensor cores keep thirteen places: a random walk, 0.0025 at 12288."""
    return 0.0025 * math.sqrt(inner / 12_288)


class Product:
    """PyTorch's x W^T in bf16. `row_scales` replace the weight's scale."""

    def __init__(self, m, x: Scaled, w: Scaled, row_scales=None):
        self.operands, self.inner = (x.codes, w.codes.t()), x.codes.shape[1]
        if row_scales is None:
            scales = [torch.full((), t.scale, device=m.device, dtype=F32) for t in (x, w)]
        else:  # it takes them for both operands or for none
            scales = [torch.full((x.codes.shape[0], 1), x.scale, device=m.device, dtype=F32), row_scales.view(1, -1)]
        self.scales = dict(zip(("scale_a", "scale_b"), scales))

    def __call__(self, fast: bool = True):
        return torch._scaled_mm(*self.operands, **self.scales, out_dtype=BF16, use_fast_accum=fast)


class Fp8Operands(Operands):
    """Operands of a bf16 row. Inputs and weights of its GEMMs, and some results, are in e4m3."""

    def __init__(self, operands: Operands):
        self.device, self.generator, self.products = operands.device, operands.generator, []

    def codes(self, rows: int, cols: int, scale: float, spread: float = 1.0) -> Scaled:
        values = self.normal(rows, cols, F32, spread / scale)
        return Scaled(values.clamp_(-448, 448).to(E4M3), scale)

    def input(self, rows: int, cols: int) -> Scaled:
        return self.codes(rows, cols, INPUT_SCALE)

    def weight(self, rows: int, cols: int) -> Scaled:
        spread = cols**-0.5
        return self.codes(rows, cols, WEIGHT_SCALE * spread, spread)

    def result(self, rows: int, cols: int, scale: float) -> Scaled:
        return Scaled(self.empty(rows, cols, E4M3), scale)

    def product(self, x: Scaled, w: Scaled, row_scales=None) -> Product:
        self.products.append(Product(self, x, w, row_scales))
        return self.products[-1]


# ----------------------------------------------------------------------------------------------------------------------- W8A8


def w8a8(row: Row) -> Row:
    """A row with e4m3 inputs and weights: with fast accumulation, and also with exact accumulation."""

    def make(m):
        operands = Fp8Operands(m)
        case = row.make(operands)
        product = operands.products[0]
        if case.op == "linear":
            case.others["slow"] = lambda: (product(fast=False),)
        tensors, outputs = case.own_results()
        exact = replace(case, accumulate="exact", arithmetic=0.0, others={})
        others, arithmetic = {"exact": exact, **case.others}, fast_sums(product.inner)
        return replace(case, tensors=tensors, outputs=outputs, accumulate="fast", arithmetic=arithmetic, others=others)

    size, comma, more = row.shape.partition(",")
    return Row(row.name, f"{size} W8A8{comma}{more}", make, "W8A8")


@row("{rows}x{cols}x{inner}, row scales", "linear")
def linear_by_row(m, rows: int, cols: int, inner: int):
    x, w, out = m.input(rows, inner), m.weight(cols, inner), m.empty(rows, cols)
    row_scales = m.normal(cols, 1, F32, 0.2).exp_().mul_(w.scale)
    w.scale = 1.0
    product = m.product(x, w, row_scales)
    reference = lambda: (gemm_f64(x, w) * row_scales.double().view(1, -1),)
    tensors, flops = [out, x, w, row_scales, None], 2 * rows * cols * inner
    return Case("linear", tensors, [], [out], lambda: (product(),), reference, flops=flops)


def qkv(streams: tuple, inner: int, heads: int, mlp: int = 0) -> Row:
    """Queries, keys and hidden values in e4m3, values in bf16."""
    width = heads * HEAD_DIM
    sizes = [width, width, width, 2 * mlp]

    def make(m):
        tensors, outputs, parts = [], [], []
        for rows in streams:
            x, w, table = m.input(rows, inner), m.weight(sum(sizes), inner), m.rope_table(rows)
            norm_q, norm_k = m.vector(HEAD_DIM, 1.0), m.vector(HEAD_DIM, 1.0)
            q, k, v = m.result(rows, width, 1.0), m.result(rows, width, 1.0), m.empty(rows, width)
            # A slice of a wider buffer that also holds the attention's result, as in a single block.
            hidden = Scaled(m.empty(rows, width + mlp, E4M3)[:, width:], HIDDEN_SCALE) if mlp else None
            tensors += [x, w, None, norm_q, norm_k, table, q, k, v, hidden]
            outputs += [q, k, v] + ([hidden] if mlp else [])
            parts.append((x, w, norm_q, norm_k, table, m.product(x, w)))

        def finish(y, norm_q, norm_k, table):
            """The epilogue of the product, in its type."""
            q, k, v, hidden = y.split(sizes, -1)
            cos, sin = table.to(y.dtype).chunk(2, -1)
            normed = lambda t, w: rms(t.unflatten(-1, (-1, HEAD_DIM)), w.to(y.dtype).view(-1)) * HEAD_SCALE
            heads_of = lambda t, w: rotate(normed(t, w), cos, sin, False).flatten(1)
            return [heads_of(q, norm_q), heads_of(k, norm_k), v] + ([swiglu(hidden)] if mlp else [])

        def reference():
            each = (finish(gemm_f64(x, w), norm_q, norm_k, table) for x, w, norm_q, norm_k, table, _ in parts)
            return tuple(result for stream in each for result in stream)

        def peer():
            each = (finish(product(), norm_q, norm_k, table) for *_, norm_q, norm_k, table, product in parts)
            found = [result for stream in each for result in stream]
            return tuple(map(store, outputs, found))

        others = {"product": lambda: tuple(product() for *_, product in parts)}
        numbers, flops = [EPS, 0, HEAD_SCALE, HEAD_SCALE], 2 * sum(streams) * sum(sizes) * inner
        return Case("qkv", tensors, numbers, outputs, peer, reference, others, flops=flops)

    name = "qkv_mlp" if mlp else "qkv_norm_rope"
    return Row(name, f"{many(streams)}x{sum(sizes)}x{inner}", make)


def to_e4m3(row: Row) -> Row:
    """A row with its result in e4m3."""
    return Row(row.name, f"{row.shape} to e4m3", lambda m: replace(row.make(Fp8Operands(m)), arithmetic=0.0), "e4m3")


# ----------------------------------------------------------------------------------------------------------------- attention


def attention(tokens: int, heads: int) -> Row:
    """Attention as in the transformer: normalized queries and keys, scores exponents of two, the result in e4m3. Its peers are kiln's
    ops with a bf16 result (`to bf16`) and in bf16 throughout (`bf16`), and PyTorch's attention in bf16."""
    width = heads * HEAD_DIM

    def make(m):
        def heads_of():
            values = m.normal(tokens, width, F32).unflatten(-1, (-1, HEAD_DIM))
            return (rms(values, torch.ones_like(values[0, 0])) * HEAD_SCALE).flatten(1)

        wide = heads_of(), heads_of()
        plain_q, plain_k = (t.to(BF16) for t in wide)
        q, k = (Scaled(t.to(E4M3), 1.0) for t in wide)
        v, out, plain_out = m.normal(tokens, width), Scaled(m.empty(tokens, width, E4M3), ATTENDED_SCALE), m.empty(tokens, width)
        batch = lambda t: t.unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1).unsqueeze(0)
        operands, scale = (batch(plain_q), batch(plain_k), batch(v)), math.log(2)
        peer = lambda: (F.scaled_dot_product_attention(*operands, scale=scale).squeeze(0).transpose(0, 1),)
        in_f64 = lambda q, k: lambda: (attention_f64(q, k, v, heads, HEAD_DIM, scale),)
        # A score is at most the product of two lengths. Rounding to e4m3 increases a length by at most a sixteenth.
        bound = 1.02 * HEAD_DIM**0.5
        numbers = lambda bound: [HEAD_DIM, 0, scale, bound]
        reference = in_f64(q.codes.to(BF16), k.codes.to(BF16))  # exactly, their factor is one
        case = Case("attention", [out, q, k, v], numbers(bound * (1 + 2**-4) ** 2), [out], peer, reference)
        case.flops, case.arithmetic, case.peer_tolerance = 4 * tokens * tokens * width, ATTENTION_ERROR, ATTENTION_PEER
        to_bf16 = replace(case, tensors=[plain_out, q, k, v], outputs=[plain_out])
        plain, in_bf16 = [plain_out, plain_q, plain_k, v], in_f64(plain_q, plain_k)
        bf16 = replace(to_bf16, tensors=plain, numbers=numbers(bound), reference=in_bf16)
        case.others = {"to bf16": to_bf16, "bf16": bf16}
        return case

    return Row("attention", f"{tokens} tokens, {heads} heads, e4m3 q and k", make, "e4m3")


# ----------------------------------------------------------------------------------------------------------------------- sizes

# The GEMMs of the BF16 rows; ops of a double and a single block of both models; attention at 512x512, 1024x1024, with a reference, at
# 2048x2048 and with the most tokens there may be.
W8A8 = [
    *(bf16.linear(*shape) for shape in BLOCK_GEMMS + ENCODER_GEMMS),
    linear_by_row(4608, 27_648, 3072),
    linear_by_row(4608, 3072, 12_288),
    qkv((4608,), 3072, 24, mlp=9216),
    qkv((4608,), 4096, 32, mlp=12_288),
    qkv((16_896,), 3072, 24, mlp=9216),
    qkv((512, 4096), 3072, 24),
    bf16.linear_swiglu(4096, 9216, 3072),
    bf16.linear_gate_residual(4608, 3072, 12_288),
    bf16.linear_gate_residual(4608, 4096, 16_384),
    bf16.linear_gate_residual(4096, 3072, 9216),
]
NORMS = [((4608,), 3072), ((4608,), 4096), ((512, 4096), 3072), ((16_896,), 3072)]

ROWS = [
    *map(w8a8, W8A8),
    *(to_e4m3(bf16.layer_norm(streams, cols)) for streams, cols in NORMS),
    *(attention(tokens, 24) for tokens in (1536, 4608, 8704, 16_896, 52_000)),
    attention(4608, 32),
]
