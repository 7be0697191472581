"""The rows of `peers.py` with e4m3 inputs or results: W8A8 GEMMs, ops that store e4m3, attention with e4m3 queries and keys.

The peer of a W8A8 GEMM is `torch._scaled_mm` with fast accumulation (`torch`) and without (`slow`); kiln accumulates `fast`, and
`exact` beside it. Both multiply the same codes by the same scales, and references take the codes as they are: what quantisation
costs is not measured here.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from peer_rows import (
    BF16, BLOCK_GEMMS, ENCODER_GEMMS, EPS, F32, HEAD_DIM, Case, Row, Scaled, attention_f64, gemm_f64, rms, rotate, swiglu
)

E4M3 = torch.float8_e4m3fn
# Standard normal values reach the largest code but rarely saturate. No power of two, so that a factor that is left out shows.
INPUT_SCALE, WEIGHT_SCALE = 0.0131, 0.0127
# Of results of a SwiGLU of normal values, which are up to about 30, and of modulated norms and attention.
HIDDEN_SCALE, NORMED_SCALE, ATTENDED_SCALE = 0.1, 0.02, 0.005
# The factor of queries and of keys: their product is log2(e) / sqrt(head_dim), so that scores are exponents of two.
HEAD_SCALE = math.sqrt(math.log2(math.e) / math.sqrt(HEAD_DIM))
# Relative error of attention from rounding probabilities to bf16 and scores to thirteen places, by a simulation of both.
ATTENTION_ERROR = 1.7e-3
# How far PyTorch's attention may be off, whose queries and keys are not rounded to e4m3: that moves scores by 0.026 sqrt(2) of their
# size, which is one (base e) here, and results by as much.
ATTENTION_PEER = 6e-2


def fast_sums(inner: int) -> float:
    """Relative error of sums that the tensor cores keep thirteen places of, over all of K: a random walk, 0.0025 at 12288."""
    return 0.0025 * math.sqrt(inner / 12_288)


def codes(m, rows: int, cols: int, scale: float, spread: float = 1.0) -> Scaled:
    values = m.normal(rows, cols, F32, spread / scale)
    return Scaled(values.clamp_(-448, 448).to(E4M3), scale)


def weight(m, rows: int, cols: int) -> Scaled:
    spread = cols**-0.5
    return codes(m, rows, cols, WEIGHT_SCALE * spread, spread)


def results(m, rows: int, cols: int, scale: float) -> Scaled:
    return Scaled(m.empty(rows, cols, E4M3), scale)


class Product:
    """PyTorch's x W^T in bf16; `row_scales` replace the scale of the weight."""

    def __init__(self, m, x: Scaled, w: Scaled, row_scales=None):
        self.operands = x.codes, w.codes.t()
        if row_scales is None:
            scales = [torch.full((), t.scale, device=m.device, dtype=F32) for t in (x, w)]
        else:  # it takes them for both operands or for none
            scales = [torch.full((x.codes.shape[0], 1), x.scale, device=m.device, dtype=F32), row_scales.view(1, -1)]
        self.scales = dict(zip(("scale_a", "scale_b"), scales))

    def __call__(self, fast: bool = True):
        return torch._scaled_mm(*self.operands, **self.scales, out_dtype=BF16, use_fast_accum=fast)


def both(case: Case, inner: int, own: dict | None = None) -> Case:
    """The case with fast accumulation, and with exact accumulation beside it."""
    case.accumulate, case.arithmetic = "fast", fast_sums(inner)
    case.others = {"exact": replace(case, accumulate="exact", arithmetic=0.0, others={}, **(own or {})), **case.others}
    return case


# ----------------------------------------------------------------------------------------------------------------------- W8A8


def linear(rows: int, cols: int, inner: int, by_row: bool = False) -> Row:
    def make(m):
        x, w, out = codes(m, rows, inner, INPUT_SCALE), weight(m, cols, inner), m.empty(rows, cols)
        row_scales = None
        if by_row:
            row_scales = m.normal(cols, 1, F32, 0.2).exp_().mul_(w.scale)
            w.scale = 1.0
        product = Product(m, x, w, row_scales)
        factor = row_scales.double().view(1, -1) if by_row else 1.0
        reference, others = lambda: (gemm_f64(x, w) * factor,), {"slow": lambda: (product(fast=False),)}
        tensors, flops = [out, x, w, row_scales, None], 2 * rows * cols * inner
        return both(Case("linear", tensors, [], [out], lambda: (product(),), reference, others, flops=flops), inner)

    return Row("linear", f"{rows}x{cols}x{inner} W8A8" + (", row scales" if by_row else ""), make, "W8A8")


def linear_swiglu(rows: int, cols: int, inner: int) -> Row:
    def make(m):
        x, w, out = codes(m, rows, inner, INPUT_SCALE), weight(m, 2 * cols, inner), results(m, rows, cols, HIDDEN_SCALE)
        product = Product(m, x, w)
        peer, reference = lambda: (out.store(swiglu(product())),), lambda: (swiglu(gemm_f64(x, w)),)
        tensors, others = [out, x, w, None, None], {"product": lambda: (product(),)}
        case = Case("linear_swiglu", tensors, [], [out], peer, reference, others, flops=4 * rows * cols * inner)
        return both(case, inner)

    return Row("linear_swiglu", f"{rows}x2*{cols}x{inner} W8A8", make, "W8A8")


def linear_gate_residual(rows: int, cols: int, inner: int) -> Row:
    def make(m):
        x, w = codes(m, rows, inner, INPUT_SCALE), weight(m, cols, inner)
        into, gate = m.normal(rows, cols), m.normal(1, cols, scale=0.2)
        product, theirs, own = Product(m, x, w), into.clone(), into.clone()
        peer = lambda: (theirs.addcmul_(gate, product()),)
        add = lambda into: lambda: (into.double() + gate.double() * gemm_f64(x, w),)
        tensors, others = lambda into: [into, x, w, None, None, gate], {"product": lambda: (product(),)}
        flops = 2 * rows * cols * inner
        case = Case("linear_gate_residual", tensors(into), [], [into], peer, add(into), others, in_place=True, flops=flops)
        return both(case, inner, {"tensors": tensors(own), "outputs": [own], "reference": add(own)})

    return Row("linear_gate_residual", f"{rows}x{cols}x{inner} W8A8", make, "W8A8")


def qkv(streams: tuple, inner: int, heads: int, mlp: int = 0) -> Row:
    """Queries, keys and hidden values in e4m3, values in bf16."""
    width = heads * HEAD_DIM
    sizes = [width, width, width, 2 * mlp]

    def make(m):
        tensors, outputs, parts = [], [], []
        for rows in streams:
            x, w, table = codes(m, rows, inner, INPUT_SCALE), weight(m, sum(sizes), inner), m.rope_table(rows)
            norm_q, norm_k = m.vector(HEAD_DIM, 1.0), m.vector(HEAD_DIM, 1.0)
            q, k, v = results(m, rows, width, 1.0), results(m, rows, width, 1.0), m.empty(rows, width)
            # A slice of a wider buffer that also takes the attention's result, as in a single block.
            hidden = Scaled(m.empty(rows, width + mlp, E4M3)[:, width:], HIDDEN_SCALE) if mlp else None
            tensors += [x, w, None, norm_q, norm_k, table, q, k, v, hidden]
            outputs += [q, k, v] + ([hidden] if mlp else [])
            parts.append((x, w, norm_q, norm_k, table, Product(m, x, w)))

        def finish(y, norm_q, norm_k, table):
            """What follows the product, in its type."""
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
            return tuple(out.store(f) if isinstance(out, Scaled) else f for f, out in zip(found, outputs))

        others = {"product": lambda: tuple(product() for *_, product in parts)}
        numbers, flops = [EPS, 0, HEAD_SCALE, HEAD_SCALE], 2 * sum(streams) * sum(sizes) * inner
        return both(Case("qkv", tensors, numbers, outputs, peer, reference, others, flops=flops), inner)

    name = "qkv_mlp" if mlp else "qkv_norm_rope"
    return Row(name, "+".join(map(str, streams)) + f"x{sum(sizes)}x{inner} W8A8", make, "W8A8")


# ----------------------------------------------------------------------------------------------------------------- producers


def layer_norm(streams: tuple, cols: int) -> Row:
    """The peer is PyTorch's norm and a conversion of its result."""

    def make(m):
        tensors, outputs, weights = [], [], []
        for rows in streams:
            out, x = results(m, rows, cols, NORMED_SCALE), m.normal(rows, cols)
            shift, scale = m.normal(1, cols), m.normal(1, cols, scale=0.2)
            tensors += [out, x, shift, scale]
            outputs.append(out)
            # The factor of the result is in weight and bias already.
            weights.append((x, ((1 + scale) / NORMED_SCALE).view(-1), (shift / NORMED_SCALE).view(-1)))
        xs, shifts, scales = tensors[1::4], tensors[2::4], tensors[3::4]

        def reference():
            normed = [F.layer_norm(x.double(), (cols,), eps=EPS) for x in xs]
            return tuple((1 + a.double()) * n + b.double() for n, a, b in zip(normed, scales, shifts))

        def peer():
            normed = (F.layer_norm(x, (cols,), w, b, EPS) for x, w, b in weights)
            return tuple(Scaled(n.clamp_(-448, 448).to(E4M3), NORMED_SCALE) for n in normed)

        return Case("layer_norm_modulate", tensors, [EPS], outputs, peer, reference, arithmetic=0.0)

    return Row("layer_norm_modulate", "+".join(map(str, streams)) + f"x{cols} to e4m3", make, "e4m3")


# ----------------------------------------------------------------------------------------------------------------- attention


def attention(tokens: int, heads: int) -> Row:
    """As in the transformer: queries and keys normalised, scores exponents of two, the result in e4m3. Beside it the same with a
    result in bf16 (`to bf16`), kiln's attention in bf16 (`bf16`), and PyTorch's in bf16."""
    width = heads * HEAD_DIM

    def make(m):
        def heads_of():
            values = m.normal(tokens, width, F32).unflatten(-1, (-1, HEAD_DIM))
            return (rms(values, torch.ones_like(values[0, 0])) * HEAD_SCALE).flatten(1)

        wide = heads_of(), heads_of()
        plain_q, plain_k = (t.to(BF16) for t in wide)
        q, k = (Scaled(t.to(E4M3), 1.0) for t in wide)
        v, out, plain_out = m.normal(tokens, width), results(m, tokens, width, ATTENDED_SCALE), m.empty(tokens, width)
        batch = lambda t: t.unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1).unsqueeze(0)
        operands, scale = (batch(plain_q), batch(plain_k), batch(v)), math.log(2)
        peer = lambda: (F.scaled_dot_product_attention(*operands, scale=scale).squeeze(0).transpose(0, 1),)
        in_f64 = lambda q, k: lambda: (attention_f64(q, k, v, heads, HEAD_DIM, scale),)
        # A score is at most the product of two lengths. Rounding to e4m3 makes a length longer by at most a sixteenth.
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
# 2048x2048 and at as many tokens as there may be.
ROWS = [
    *(linear(*shape) for shape in BLOCK_GEMMS + ENCODER_GEMMS),
    linear(4608, 27_648, 3072, by_row=True),
    linear(4608, 3072, 12_288, by_row=True),
    qkv((4608,), 3072, 24, mlp=9216),
    qkv((4608,), 4096, 32, mlp=12_288),
    qkv((16_896,), 3072, 24, mlp=9216),
    qkv((512, 4096), 3072, 24),
    linear_swiglu(4096, 9216, 3072),
    linear_gate_residual(4608, 3072, 12_288),
    linear_gate_residual(4608, 4096, 16_384),
    linear_gate_residual(4096, 3072, 9216),
    layer_norm((4608,), 3072),
    layer_norm((4608,), 4096),
    layer_norm((512, 4096), 3072),
    layer_norm((16_896,), 3072),
    *(attention(tokens, 24) for tokens in (1536, 4608, 8704, 16_896, 52_000)),
    attention(4608, 32),
]
