"""The compared rows: one per op and size of FLUX.2 [klein], with PyTorch's way to do the same.

A row makes operand sets. Each names kiln's op with its tensors and numbers (in the order `peers.rs` states), a `peer` that does the same
with PyTorch, and a `reference` in f64 (convolutions in f32) that both results are compared with. `rows_fp8.py` has the rows of FP8,
`rows_mixed.py` those with quantized weights and bf16 inputs.
"""

import inspect
import math
from dataclasses import dataclass, field
from typing import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BF16, F32 = torch.bfloat16, torch.float32
EPS = 1e-6
HEAD_DIM = 128
# Relative error of a sum of products when one factor of each was rounded to bf16.
BF16_ACTIVATIONS = 1.66e-3
# Factors of e4m3 results: SwiGLU of normal values, up to about 30, and modulated norms.
HIDDEN_SCALE, NORMED_SCALE = 0.1, 0.02
# A larger tensor does not stay in the cache, so a second read comes from memory.
CACHE = 60_000_000


@dataclass
class Scaled:
    """e4m3 elements and their common factor."""

    codes: torch.Tensor
    scale: float

    def double(self):
        return self.codes.float().double() * self.scale

    def round(self, multiples):
        """Rounds these multiples of the factor to the same format."""
        return Scaled(multiples.clamp_(-448, 448).to(self.codes.dtype), self.scale)

    def store(self, values):
        """Stores these values in the same format."""
        return self.round(values.float() / self.scale)


def store(out, values):
    """Stores these values in the format of a result."""
    return out.store(values) if isinstance(out, Scaled) else values


def bare(t):
    """A tensor without its factor."""
    return t.codes if isinstance(t, Scaled) else t


@dataclass
class Case:
    """One operand set."""

    op: str
    tensors: list
    numbers: list
    outputs: list  # the tensors that are written
    peer: Callable[[], tuple]
    reference: Callable[[], tuple]
    others: dict = field(default_factory=dict)  # by name: more ways to do the same, or the GEMM alone; cases are kiln's ops
    in_place: bool = False  # outputs are read, too
    bytes: int = 0  # what has to be read and written; 0: every operand once, outputs that are read twice
    flops: int = 0  # 0: bound by memory
    accumulate: str = "auto"  # how e4m3 GEMMs accumulate: auto, exact, fast
    arithmetic: float | None = None  # relative error of the arithmetic before the result is rounded; None: see TOLERANCE
    peer_tolerance: float = 3e-2  # of the peer, which may round in between

    def __post_init__(self):
        if not self.bytes:
            updated = self.outputs if self.in_place else []
            self.bytes = sum(size_of(t) for t in self.tensors + updated if t is not None)

    def own_results(self) -> tuple:
        """Tensors and outputs with copies of those updated in place, so that each side has a result of its own."""
        if not self.in_place:
            return self.tensors, self.outputs
        own = {id(out): out.clone() for out in self.outputs}
        return [own.get(id(t), t) for t in self.tensors], list(own.values())


@dataclass
class Row:
    name: str
    shape: str
    make: Callable[["Operands"], Case]
    format: str = "bf16"  # of weight and input


def row(shape, name=None):
    """Turns a function that makes a case from operands and sizes into one that makes a row from sizes. `shape` and `name` are texts with
    the sizes, or functions of the sizes. Without a name the row takes the function's name."""

    def decorate(case):
        sizes_of = inspect.signature(case)

        def make(*args, **kwargs) -> Row:
            sizes = sizes_of.bind(None, *args, **kwargs)
            sizes.apply_defaults()
            text = lambda of: of(*sizes.args[1:]) if callable(of) else of.format(**sizes.arguments)
            return Row(text(name or case.__name__), text(shape), lambda m: case(m, *args, **kwargs))

        return make

    return decorate


def many(streams: tuple) -> str:
    return "+".join(map(str, streams))


class Operands:
    """Makes tensors of random values. On the `meta` device they only have shapes."""

    def __init__(self, device: str, seed: int = 1):
        self.device = device
        self.generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(self, rows: int, cols: int, dtype=BF16, scale: float = 1.0, mean: float = 0.0):
        values = torch.randn(rows, cols, device=self.device, dtype=F32, generator=self.generator)
        return values.mul_(scale).add_(mean).to(dtype)

    def vector(self, cols: int, mean: float = 0.0):
        return self.normal(1, cols, F32, 0.2, mean)

    def empty(self, rows: int, cols: int, dtype=BF16):
        return torch.empty(rows, cols, device=self.device, dtype=dtype)

    def weight(self, rows: int, cols: int):
        return self.normal(rows, cols, scale=cols**-0.5)

    def input(self, rows: int, cols: int):
        """The input of a GEMM."""
        return self.normal(rows, cols)

    def result(self, rows: int, cols: int, _scale: float):
        """A result that FP8 stores in e4m3, with a factor."""
        return self.empty(rows, cols)

    def product(self, x, w):
        """PyTorch's x W^T."""
        return lambda: F.linear(x, w)

    def rope_table(self, rows: int):
        angles = self.normal(rows, HEAD_DIM // 2, F32, 3.0)
        return torch.cat([angles.cos(), angles.sin()], 1)


def size_of(t) -> int:
    return bare(t).numel() * bare(t).element_size()


# ------------------------------------------------------------------------------------------------------------- bound by memory


@row(lambda rows, cols, to: f"{rows}x{cols}" + (" to f32" if to == F32 else ""))
def copy(m, rows: int, cols: int, to=BF16):
    x, out, theirs = m.normal(rows, cols), m.empty(rows, cols, to), m.empty(rows, cols, to)
    return Case("copy", [out, x], [], [out], lambda: (theirs.copy_(x),), lambda: (x.double(),))


@row("{rows}x{cols}")
def silu(m, rows: int, cols: int):
    x, out = m.normal(rows, cols), m.empty(rows, cols)
    return Case("silu", [out, x], [], [out], lambda: (F.silu(x),), lambda: (F.silu(x.double()),))


def rms(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


@row("{rows}x{cols}")
def rms_norm(m, rows: int, cols: int):
    x, out, weight = m.normal(rows, cols), m.empty(rows, cols), m.vector(cols, 1.0)
    theirs = weight.view(-1).to(BF16)  # PyTorch's fused kernel wants one type
    peer = lambda: (F.rms_norm(x, (cols,), theirs, EPS),)
    return Case("rms_norm", [out, x, weight], [EPS], [out], peer, lambda: (rms(x.double(), weight.double()),))


@row(lambda streams, cols: f"{many(streams)}x{cols}", "layer_norm_modulate")
def layer_norm(m, streams: tuple, cols: int):
    """The peer's norm gets scale and shift as weight and bias: one kernel, PyTorch's fastest. For e4m3 it converts its result."""
    tensors, outputs, weights = [], [], []
    for rows in streams:
        out, x = m.result(rows, cols, NORMED_SCALE), m.normal(rows, cols)
        shift, scale = m.normal(1, cols), m.normal(1, cols, scale=0.2)
        tensors += [out, x, shift, scale]
        outputs.append(out)
        # Weight and bias already contain the result's factor.
        factor = out.scale if isinstance(out, Scaled) else 1.0
        weights.append((x, ((1 + scale) / factor).view(-1), (shift / factor).view(-1)))
    xs, shifts, scales = tensors[1::4], tensors[2::4], tensors[3::4]

    def reference():
        normed = [F.layer_norm(x.double(), (cols,), eps=EPS) for x in xs]
        return tuple((1 + a.double()) * n + b.double() for n, a, b in zip(normed, scales, shifts))

    def peer():
        normed = (F.layer_norm(x, (cols,), w, b, EPS) for x, w, b in weights)
        return tuple(out.round(n) if isinstance(out, Scaled) else n for n, out in zip(normed, outputs))

    return Case("layer_norm_modulate", tensors, [EPS], outputs, peer, reference)


@row(lambda side, channels, given: f"{side}x{side}, {channels}" + (", stats given" if given else ""))
def group_norm(m, side: int, channels: int, given: bool):
    """With `given` the convolution before has computed the statistics, and the peer gets scale and shift. Otherwise they come first, so x
    is read twice if no cache holds it. The peer's image has channels first, which is faster for it."""
    groups = 32
    x, out = m.normal(side * side, channels, mean=0.3), m.empty(side * side, channels)
    weight, bias = m.vector(channels, 1.0), m.vector(channels)
    var, mean = torch.var_mean(x.view(-1, groups, channels // groups).float(), (0, 2), correction=0)
    stats = torch.stack([mean, var], 1) if given else None
    per_channel = lambda v: v.repeat_interleave(channels // groups).view(1, -1)
    scale = weight * (per_channel(var) + EPS).rsqrt()
    shift = bias - per_channel(mean) * scale
    if given:
        a, b = scale.to(BF16), shift.to(BF16)
        peer = lambda: (F.silu(torch.addcmul(b, x, a), inplace=True),)
    else:
        image = x.view(1, side, side, channels).permute(0, 3, 1, 2).contiguous()
        w, b = weight.view(-1).to(BF16), bias.view(-1).to(BF16)
        peer = lambda: (F.silu(F.group_norm(image, groups, w, b, EPS), inplace=True).permute(0, 2, 3, 1),)
    reference = lambda: (F.silu(x.double() * scale.double() + shift.double()),)
    tensors = [out, x, weight, bias, stats]
    twice = size_of(x) if not given and size_of(x) > CACHE else 0
    moved = sum(size_of(t) for t in tensors if t is not None) + twice
    return Case("group_norm", tensors, [groups, EPS, 1], [out], peer, reference, bytes=moved)


@row(lambda width, height, channels: f"{width * height}x{4 * channels}")
def patchify(m, width: int, height: int, channels: int):
    x, out = m.normal(4 * width * height, channels), m.empty(width * height, 4 * channels)
    mean, var = m.vector(4 * channels), m.vector(4 * channels, 2.0)
    patches = x.view(height, 2, width, 2, channels).permute(0, 2, 4, 1, 3)

    def result(patches, mean, var, to):
        return (((patches.reshape(width * height, -1) - mean) / (var + EPS).sqrt()).to(to),)

    peer = lambda: result(patches, mean, var, BF16)
    reference = lambda: result(patches.double(), mean.double(), var.double(), torch.float64)
    return Case("patchify", [out, x, mean, var], [EPS, width], [out], peer, reference)


@row(lambda width, height, channels: f"{width * height}x{4 * channels}")
def unpatchify(m, width: int, height: int, channels: int):
    x, out = m.normal(width * height, 4 * channels, F32), m.empty(4 * width * height, channels)
    mean, var = m.vector(4 * channels), m.vector(4 * channels, 2.0)

    def result(x, mean, var, to):
        patches = (x * (var + EPS).sqrt() + mean).to(to).view(height, width, channels, 2, 2)
        return (patches.permute(0, 3, 1, 4, 2).reshape(-1, channels),)

    peer = lambda: result(x, mean, var, BF16)
    reference = lambda: result(x.double(), mean.double(), var.double(), torch.float64)
    return Case("unpatchify", [out, x, mean, var], [EPS, width], [out], peer, reference)


@row("{rows}x{cols}")
def euler(m, rows: int, cols: int):
    latents, velocity, dt = m.normal(rows, cols, F32), m.normal(rows, cols, F32), -0.25
    theirs = latents.clone()
    peer = lambda: (theirs.add_(velocity, alpha=dt),)
    reference = lambda: (latents.double() + dt * velocity.double(),)
    return Case("euler", [latents, velocity], [dt], [latents], peer, reference, in_place=True)


@row("{rows}x{cols}")
def guidance(m, rows: int, cols: int):
    out, cond, uncond, scale = m.empty(rows, cols, F32), m.normal(rows, cols, F32), m.normal(rows, cols, F32), 4.0
    peer = lambda: (torch.lerp(uncond, cond, scale),)
    reference = lambda: (torch.lerp(uncond.double(), cond.double(), scale),)
    return Case("guidance", [out, cond, uncond], [scale], [out], peer, reference)


@row(lambda rows, cols, dtype: f"{rows}x{cols}" + (" f32" if dtype == F32 else ""))
def non_finite(m, rows: int, cols: int, dtype):
    x, count = m.normal(rows, cols, dtype), m.empty(1, 1, F32)
    x[rows // 2, 0], x[rows - 1, cols - 1], x[0, cols // 2] = float("nan"), float("inf"), float("-inf")
    result = lambda: ((~torch.isfinite(x)).sum().view(1, 1),)
    return Case("non_finite", [count, x], [], [count], result, result)


@row(lambda rows, cols, dtype: f"{rows}x{cols}" + (" f32" if dtype == F32 else ""))
def largest_magnitude(m, rows: int, cols: int, dtype):
    x, largest = m.normal(rows, cols, dtype), m.normal(1, 1, F32).abs_()
    result = lambda: (torch.maximum(largest, x.abs().amax().float().view(1, 1)),)
    return Case("largest_magnitude", [largest, x], [], [largest], result, result, in_place=True)


@row("{side}x{side}x3")
def pixels(m, side: int):
    x, out = m.normal(side * side, 3, F32, 0.6), m.empty(side * side, 3, torch.uint8)
    result = lambda: (((x * 0.5 + 0.5).clamp_(0, 1) * 255).round_().to(torch.uint8),)
    return Case("pixels", [out, x], [], [out], result, result)


# --------------------------------------------------------------------------------------------------------------- compute-bound


def gemm_f64(x, w):
    return x.double() @ w.double().T


@row("{rows}x{cols}x{inner}")
def linear(m, rows: int, cols: int, inner: int):
    x, w, out = m.input(rows, inner), m.weight(cols, inner), m.empty(rows, cols)
    product, flops = m.product(x, w), 2 * rows * cols * inner
    return Case("linear", [out, x, w, None, None], [], [out], lambda: (product(),), lambda: (gemm_f64(x, w),), flops=flops)


def swiglu(y):
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


@row("{rows}x2*{cols}x{inner}")
def linear_swiglu(m, rows: int, cols: int, inner: int):
    x, w, out = m.input(rows, inner), m.weight(2 * cols, inner), m.result(rows, cols, HIDDEN_SCALE)
    product = m.product(x, w)
    peer, reference = lambda: (store(out, swiglu(product())),), lambda: (swiglu(gemm_f64(x, w)),)
    others = {"product": lambda: (product(),)}
    return Case("linear_swiglu", [out, x, w, None, None], [], [out], peer, reference, others, flops=4 * rows * cols * inner)


@row("{rows}x{cols}x{inner}")
def linear_gate_residual(m, rows: int, cols: int, inner: int, gated: bool = True):
    """A linear layer with a gated residual. The text encoder's layers have no gate."""
    x, w, into = m.input(rows, inner), m.weight(cols, inner), m.normal(rows, cols)
    gate = m.normal(1, cols, scale=0.2) if gated else None
    product, theirs = m.product(x, w), into.clone()
    if gated:
        peer = lambda: (theirs.addcmul_(gate, product()),)
        reference = lambda: (into.double() + gate.double() * gemm_f64(x, w),)
    else:
        peer, reference = lambda: (theirs.add_(product()),), lambda: (into.double() + gemm_f64(x, w),)
    tensors, flops = [into, x, w, None, None, gate], 2 * rows * cols * inner
    others = {"product": lambda: (product(),)}
    return Case("linear_gate_residual", tensors, [], [into], peer, reference, others, in_place=True, flops=flops)


def rotate(x, cos, sin, half_split: bool):
    """RoPE of x [rows, heads, head_dim] by the angles of each row. Pairs are halves of a head, or neighbors."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = x.chunk(2, -1) if half_split else (x[..., 0::2], x[..., 1::2])
    rotated = a * cos - b * sin, a * sin + b * cos
    return torch.cat(rotated, -1) if half_split else torch.stack(rotated, -1).flatten(-2)


@torch.compile(dynamic=False)
def finish(y, norm_q, norm_k, table, sizes):
    """The epilogue of a single block's first GEMM: qk-norm, RoPE and SwiGLU."""
    cos, sin = table.chunk(2, -1)
    q, k, v, hidden = y.float().split(sizes, -1)
    heads = lambda t, weight: rotate(rms(t.unflatten(-1, (-1, HEAD_DIM)), weight.view(-1)), cos, sin, False).flatten(1).to(BF16)
    return heads(q, norm_q), heads(k, norm_k), v.to(BF16), swiglu(hidden).to(BF16)


def qkv(streams: tuple, inner: int, heads: int, kv_heads: int, mlp: int = 0, half_split: bool = False) -> Row:
    q_cols, kv_cols = heads * HEAD_DIM, kv_heads * HEAD_DIM
    sizes = [q_cols, kv_cols, kv_cols, 2 * mlp]

    def make(m):
        tensors, outputs, parts = [], [], []
        for rows in streams:
            x, w, table = m.normal(rows, inner), m.weight(sum(sizes), inner), m.rope_table(rows)
            norm_q, norm_k = m.vector(HEAD_DIM, 1.0), m.vector(HEAD_DIM, 1.0)
            q, k, v = m.empty(rows, q_cols), m.empty(rows, kv_cols), m.empty(rows, kv_cols)
            # A slice of a wider buffer that also holds the attention's result, as in a single block.
            hidden = m.empty(rows, q_cols + mlp)[:, q_cols:] if mlp else None
            tensors += [x, w, None, norm_q, norm_k, table, q, k, v, hidden]
            outputs += [q, k, v] + ([hidden] if mlp else [])
            parts.append((x, w, norm_q, norm_k, table))

        def split(y, norm_rope_q, norm_rope_k):
            q, k, v, hidden = y.split(sizes, -1)
            heads_of = lambda t: t.unflatten(-1, (-1, HEAD_DIM))
            return [norm_rope_q(heads_of(q)), norm_rope_k(heads_of(k)), v] + ([swiglu(hidden)] if mlp else [])

        def reference():
            results = []
            for x, w, norm_q, norm_k, table in parts:
                cos, sin = table.double().chunk(2, -1)
                norm_rope = lambda weight: lambda h: rotate(rms(h, weight.double().view(-1)), cos, sin, half_split).flatten(1)
                results += split(gemm_f64(x, w), norm_rope(norm_q), norm_rope(norm_k))
            return tuple(results)

        theirs = []
        for x, w, norm_q, norm_k, table in parts:
            # Types as models use them: complex numbers for neighbors, bf16 cosines and sines for halves.
            angles = table.to(BF16).chunk(2, -1) if half_split else torch.complex(*table.chunk(2, -1)).unsqueeze(1)
            theirs.append((x, w, norm_q.view(-1).to(BF16), norm_k.view(-1).to(BF16), angles))

        def norm_rope(weight, angles):
            def apply(h):
                h = F.rms_norm(h, (HEAD_DIM,), weight, EPS)
                if half_split:
                    return rotate(h, *angles, True).flatten(1)
                rotated = torch.view_as_complex(h.float().unflatten(-1, (-1, 2))) * angles
                return torch.view_as_real(rotated).flatten(1).to(BF16)

            return apply

        def peer():
            results = []
            for x, w, norm_q, norm_k, angles in theirs:
                results += split(F.linear(x, w), norm_rope(norm_q, angles), norm_rope(norm_k, angles))
            return tuple(results)

        # The GEMM alone, and with the epilogue in one kernel that torch.compile generates from plain arithmetic.
        others = {"product": lambda: tuple(F.linear(x, w) for x, w, *_ in theirs)}
        if mlp:
            others["compiled"] = lambda: tuple(finish(F.linear(x, w), q, k, table, sizes) for x, w, q, k, table in parts)
        flops = 2 * sum(streams) * sum(sizes) * inner
        return Case("qkv", tensors, [EPS, int(half_split), 1.0, 1.0], outputs, peer, reference, others, flops=flops)

    name = "qkv_mlp" if mlp else "qkv_norm_rope"
    return Row(name, f"{many(streams)}x{sum(sizes)}x{inner}", make)


def attention_f64(q, k, v, heads: int, head_dim: int, scale: float, causal: bool = False):
    results, tokens = [], q.shape[0]
    heads_per_key = q.shape[1] // k.shape[1]
    for head in range(heads):  # one by one, some rows at a time: all scores together are too large
        own, shared = (slice(i * head_dim, (i + 1) * head_dim) for i in (head, head // heads_per_key))
        parts = []
        for first in range(0, tokens, 8192):
            scores = gemm_f64(q[first : first + 8192, own], k[:, shared]) * scale
            if causal:
                scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(first + 1), float("-inf"))
            parts.append(scores.softmax(-1) @ v[:, shared].double())
        results.append(torch.cat(parts))
    return torch.cat(results, 1)


def attention(
    tokens: int, heads: int, kv_heads: int, head_dim: int = HEAD_DIM, causal: bool = False, keys: int = 0, bounded: bool = False
) -> Row:
    """`bounded`: queries and keys are normalized and scores are exponents of two, as in the transformer. kiln's op gets this bound."""
    keys = keys or tokens

    def make(m):
        def heads_of(rows, count, by):
            values = m.normal(rows, count * head_dim)
            if not bounded:
                return values
            each = values.float().unflatten(-1, (-1, head_dim))
            return (rms(each, torch.ones_like(each[0, 0])) * by).flatten(1).to(values.dtype)

        usual = head_dim**-0.5
        scale = math.log(2) if bounded else usual
        q, out = heads_of(tokens, heads, usual / scale), m.empty(tokens, heads * head_dim)
        k, v = heads_of(keys, kv_heads, 1.0), m.normal(keys, kv_heads * head_dim)
        batch = lambda t: t.unflatten(-1, (-1, head_dim)).transpose(0, 1).unsqueeze(0)
        operands = batch(q), batch(k), batch(v)
        gqa = heads != kv_heads

        def peer():
            result = F.scaled_dot_product_attention(*operands, is_causal=causal, scale=scale, enable_gqa=gqa)
            return (result.squeeze(0).transpose(0, 1),)

        def flash():
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return peer()

        reference = lambda: (attention_f64(q, k, v, heads, head_dim, scale, causal),)
        flops = 4 * tokens * keys * heads * head_dim
        others = {"flash": flash} if head_dim <= 256 and keys == tokens else {}  # the largest it takes, and its idea of a mask
        bound = 1.02 * head_dim**0.5 if bounded else float("inf")
        return Case("attention", [out, q, k, v], [head_dim, int(causal), scale, bound], [out], peer, reference, others, flops=flops)

    of = f"{heads}" if heads == kv_heads else f"{heads}:{kv_heads}"
    shape = f"{tokens} tokens, {of} heads of {head_dim}"
    if keys != tokens:
        shape += f", {keys} keys"
    if not bounded and not causal and head_dim == HEAD_DIM:
        shape += ", any scores"
    return Row("attention_causal" if causal else "attention", shape, make)


def phase_form(filters):
    """Filters [to, 3, 3, channels] behind a nearest-neighbor upsampling by two as four 2x2 filters, one for each parity of the
    output's row and column: [to, row parity, column parity, 2, 2, channels], as a matrix."""
    summed = (((0,), (1, 2)), ((0, 1), (2,)))
    rows = torch.stack([torch.stack([filters[:, taps].float().sum(1) for taps in of], 1) for of in summed], 1)
    both = torch.stack([torch.stack([rows[:, :, :, taps].sum(3) for taps in of], 3) for of in summed], 2)
    return both.to(filters.dtype).reshape(len(filters), -1)


def conv(side: int, channels: int, to: int, sampling: str = "same", more: bool = False) -> Row:
    """`more` adds a residual and computes the statistics of the next norm, which the peer leaves to that norm. PyTorch adds the bias in a
    separate kernel, so its convolution without bias is a peer too. Upsampling rows also have a convolution of an image that was upsampled
    before. These are the harder peers."""
    out_side = {"same": side, "up": 2 * side, "down": side // 2}[sampling]

    def make(m):
        x, out = m.normal(side * side, channels), m.empty(out_side * out_side, to)
        w, bias = m.weight(to, 9 * channels), m.vector(to)
        residual = m.normal(out_side * out_side, to) if more else None
        stats = m.empty(32, 2, F32) if more else None
        # PyTorch's view of this memory: channels last.
        image = x.view(1, side, side, channels).permute(0, 3, 1, 2)
        filters = w.view(to, 3, 3, channels).permute(0, 3, 1, 2)
        beside = residual.view(1, out_side, out_side, to).permute(0, 3, 1, 2) if more else None
        short = bias.view(-1).to(BF16)

        def result(image, filters, bias, beside):
            if sampling == "up":
                image = F.interpolate(image, scale_factor=2, mode="nearest")
            if sampling == "down":
                y = F.conv2d(F.pad(image, (0, 1, 0, 1)), filters, bias, stride=2)
            else:
                y = F.conv2d(image, filters, bias, padding=1)
            return (y if beside is None else y + beside).permute(0, 2, 3, 1)

        def reference():
            y = result(image.float(), filters.float(), bias.view(-1), beside.float() if more else None)
            y = y.reshape(-1, to)
            if not more:
                return (y,)
            var, mean = torch.var_mean(y.view(-1, 32, to // 32), (0, 2), correction=0)
            return (y, torch.stack([mean, var], 1))

        peer = lambda: (result(image, filters, short, beside),)
        numbers = [side, side, {"same": 0, "up": 1, "down": 2}[sampling]]
        # Behind an upsampling four of nine taps are left, which are rounded after they are summed.
        flops = 2 * out_side * out_side * to * (4 if sampling == "up" else 9) * channels
        ours = phase_form(w.view(to, 3, 3, channels)) if sampling == "up" else w
        outputs = [out] + ([stats] if more else [])
        tensors = [out, x, ours, bias, residual, stats, None, None, None]
        others = {}
        if sampling == "up" and not more:
            large = F.interpolate(image, scale_factor=2, mode="nearest")
            others["convolution"] = lambda: (F.conv2d(large, filters, short, padding=1),)
        if sampling == "same" and not more:
            others["without bias"] = lambda: (F.conv2d(image, filters, padding=1),)
        return Case("conv", tensors, numbers, outputs, peer, reference, others, flops=flops)

    change = {"same": "", "up": ", up", "down": ", down"}[sampling] + (", residual, stats" if more else "")
    return Row("conv", f"{side}x{side}, {channels} to {to}{change}", make)


@row("{side}x{side}, {channels} to {to}")
def norm_conv(m, side: int, channels: int, to: int):
    """The decoder's last layers: group norm with given statistics, SiLU and a convolution into f32."""
    x, out = m.normal(side * side, channels), m.empty(side * side, to, F32)
    gain, shift, bias, w = m.vector(channels, 1.0), m.vector(channels), m.vector(to), m.weight(to, 9 * channels)
    if m.device == "meta":
        stats = m.empty(32, 2, F32)
    else:
        var, mean = torch.var_mean(x.float().view(-1, 32, channels // 32), (0, 2), correction=0)
        stats = torch.stack([mean, var], 1)
    image = x.view(1, side, side, channels).permute(0, 3, 1, 2)
    filters = w.view(to, 3, 3, channels).permute(0, 3, 1, 2)

    def result(image, filters, *vectors):
        gain, shift, bias = (v.view(-1).to(image.dtype) for v in vectors)
        y = F.conv2d(F.silu(F.group_norm(image, 32, gain, shift, EPS)), filters, bias, padding=1)
        return (y.permute(0, 2, 3, 1).reshape(-1, to),)

    peer = lambda: result(image, filters, gain, shift, bias)
    reference = lambda: result(image.float(), filters.float(), gain, shift, bias)
    tensors = [out, x, gain, shift, stats, w, bias]
    # Activations are rounded to bf16 on their way to the tensor cores.
    flops = 2 * side * side * to * 9 * channels
    return Case("norm_conv", tensors, [32, EPS, side, side], [out], peer, reference, flops=flops, arithmetic=BF16_ACTIVATIONS)


# ------------------------------------------------------------------------------------------------------------------------ sizes

# Attention of the transformer at 1024x1024, with one and four references, at 2048x2048 and at the most tokens there may be; with a running
# maximum; and of the text encoder.
ATTENTION = [
    *(attention(tokens, 24, 24, bounded=True) for tokens in (4608, 8704, 16_896, 20_992, 52_000)),
    *(attention(tokens, 32, 32, bounded=True) for tokens in (4608, 52_000)),
    *(attention(tokens, 24, 24) for tokens in (4608, 16_896)),
    *(attention(512, 32, 8, causal=True, keys=keys) for keys in (512, 26)),
]

# GEMMs of double and single blocks of both models, of the text encoder, and of single blocks at 2048x2048, with a reference, and with the
# most tokens there may be.
BLOCK_GEMMS = [
    *((4096, cols, inner) for cols, inner in ((9216, 3072), (18_432, 3072), (3072, 9216), (3072, 3072))),
    *((rows, cols, inner) for rows in (4608, 16_896, 20_992, 52_000) for cols, inner in ((27_648, 3072), (3072, 12_288))),
    *((4608, cols, inner) for cols, inner in ((36_864, 4096), (4096, 16_384))),
]
ENCODER_GEMMS = [(512, cols, inner) for cols, inner in ((6144, 2560), (19_456, 2560), (2560, 4096), (2560, 9728))]

# Convolutions of the VAE: decoder levels at 1024x1024, the coarsest level also at 256x256 and 512x512 and the finest at 2048x2048; between
# levels; the encoder's first layer and its input; and the small decoder's finest level.
CONVOLUTIONS = [
    *(conv(side, 512, 512) for side in (32, 64, 128, 256, 512)),
    conv(512, 512, 256),
    *(conv(side, 256, 256) for side in (512, 1024)),
    conv(1024, 256, 128),
    *(conv(side, 128, 128) for side in (1024, 2048)),
    conv(256, 512, 512, more=True),
    conv(1024, 128, 128, more=True),
    conv(1024, 96, 96),
    conv(128, 512, 512, "up"),
    conv(512, 256, 256, "up"),
    conv(1024, 128, 128, "down"),
    conv(1024, 3, 128),
]

# Side and channels of the VAE's levels.
GROUP_NORMS = ((128, 512), (256, 512), (512, 256), (1024, 256), (1024, 128))

# 512 tokens of the prompt; 4096 of an image of 1024x1024, 16384 of 2048x2048. klein 4B is 3072 wide with 24 heads, 9B 4096 with
# 32; Qwen3-4B is 2560 wide with 32 heads that share 8.
ROWS = [
    copy(4608, 3072),
    copy(4608, 3072, F32),
    copy(16_896, 3072),
    *(silu(rows, 3072) for rows in (4608, 16_896)),
    *(rms_norm(rows, cols) for rows, cols in ((512, 2560), (4608, 3072), (4608, 4096), (16_896, 3072))),
    *(layer_norm(streams, cols) for streams in ((4608,), (512, 4096)) for cols in (3072, 4096)),
    *(layer_norm(streams, 3072) for streams in ((16_896,), (512, 16_384))),
    *(group_norm(*size, given) for given in (True, False) for size in GROUP_NORMS),
    patchify(64, 64, 32),
    unpatchify(64, 64, 32),
    euler(4096, 128),
    guidance(4096, 128),
    non_finite(4096, 128, F32),
    non_finite(4608, 3072, BF16),
    largest_magnitude(4608, 3072, BF16),
    pixels(1024),
    pixels(2048),
    linear(1, 18_432, 3072),
    linear(4608, 3072, 3072),
    *(linear(*shape) for shape in BLOCK_GEMMS + ENCODER_GEMMS),
    linear_swiglu(4096, 9216, 3072),
    linear_swiglu(512, 9728, 2560),
    linear_gate_residual(4608, 3072, 12_288),
    linear_gate_residual(4608, 4096, 16_384),
    linear_gate_residual(512, 2560, 9728, gated=False),
    qkv((512, 4096), 3072, 24, 24),
    qkv((512,), 2560, 32, 8, half_split=True),
    qkv((4608,), 3072, 24, 24, mlp=9216),
    qkv((4608,), 4096, 32, 32, mlp=12_288),
    *ATTENTION,
    *(attention(16_384, 1, 1, head_dim=width) for width in (512, 384)),
    *CONVOLUTIONS,
    norm_conv(1024, 128, 3),
]
