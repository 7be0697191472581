"""The formulas of quantized weights and activations, FP8 and NVFP4, as in ComfyUI and the files of Black Forest Labs.

FP8: codes in e4m3 and one f32 scale for the tensor. NVFP4: codes in e2m1, an e4m3 scale for every block of 16 neighbors in a
row, and one f32 scale for the tensor. A value is its code times its scales, so a scale is the largest magnitude over the largest
code.

All arithmetic is in f32, and e4m3 and e2m1 round to nearest, ties to even. Codes in e4m3 and block scales are float8_e4m3fn
tensors, which `.float()` decodes; codes in e2m1 are bytes. Everything works on any device. Functions that make codes also work
on `meta` tensors, which have shapes and dtypes but no values.
"""

import torch

E4M3_MAX = 448.0
E2M1_MAX = 6.0
BLOCK = 16

# The values of the codes 0 to 15. The sign is the highest bit, and 8 is -0.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([E2M1, -E2M1])

# --- Scales -----------------------------------------------------------------


def amax(x):
    """The largest magnitude."""
    return x.float().abs().amax()


def divide(x, number):
    """x / number with one rounding. On a GPU, dividing by a plain number multiplies by its rounded reciprocal."""
    return x / x.new_tensor(number)


def fp8_scale(largest):
    """The scale of an e4m3 tensor whose largest magnitude is `largest`."""
    return divide(largest, E4M3_MAX)


def nvfp4_scale(largest):
    """The NVFP4 tensor scale: the block with the largest value gets the largest block scale."""
    return divide(largest, E4M3_MAX * E2M1_MAX)


# --- Numbers ----------------------------------------------------------------


def e4m3(x):
    """x rounded to the nearest code. It saturates, while a plain cast gives NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e2m1(x):
    """x rounded to the nearest code, one to a byte. It saturates."""
    size = x.abs()
    code = torch.signbit(x).to(torch.uint8) * 8
    # A code begins halfway from the code below, and an even code includes its lower end.
    for number, start in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), 1):
        code += size >= start if number % 2 == 0 else size > start
    return code


def from_e2m1(codes):
    return E2M1.to(codes.device)[codes.long()]


# --- Bytes of NVFP4 ---------------------------------------------------------


def pack(codes):
    """Packs two codes to a byte, the even column in the high nibble."""
    return codes[:, 0::2] << 4 | codes[:, 1::2]


def unpack(packed):
    return torch.stack([packed >> 4, packed & 15], dim=2).flatten(1)


def tile_offsets(rows, columns, device=None):
    """Where block scale (row, column) is stored: in tiles of 128 rows by 4 columns, which run along the columns first.

    The tensor cores of Blackwell read this order. A tile is 32 groups of 16 bytes; group i has the four scales of each of the
    rows i, i + 32, i + 64 and i + 96.
    """
    r, c = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)[None, :]
    tiles = -(-columns // 4)
    return (r // 128 * tiles + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


def swizzle(block_scales):
    """Block scales [rows, K / 16] in tiles. The result is padded with zeros to whole tiles in both dimensions."""
    rows, columns = block_scales.shape
    padded = (-(-rows // 128) * 128, -(-columns // 4) * 4)
    stored = torch.zeros(padded, dtype=torch.uint8, device=block_scales.device)
    stored.view(-1)[tile_offsets(rows, columns, stored.device)] = block_scales.view(torch.uint8)
    return stored.view(torch.float8_e4m3fn)


def unswizzle(stored, rows, columns):
    """Block scales [rows, columns] read from their tiles."""
    return stored.view(torch.uint8).flatten()[tile_offsets(rows, columns, stored.device)].view(torch.float8_e4m3fn)


# --- Tensors ----------------------------------------------------------------


def to_fp8(x, scale):
    """The codes of x, given its scale."""
    return e4m3(x.float() / scale)


def from_fp8(codes, scale):
    """The values in f32, for one rounding to the compute dtype."""
    return codes.float() * scale


def to_blocks(x, scale):
    """NVFP4 codes [rows, K] of x and its block scales [rows, K / 16], given its tensor scale."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    block_scales = e4m3(divide(blocks.abs().amax(dim=2), E2M1_MAX) / scale)
    steps = (scale * block_scales.float())[:, :, None]
    # A block whose scale rounds to zero is all zeros.
    codes = torch.where(steps == 0, 0, e2m1(blocks / steps))
    return codes.flatten(1), block_scales


def from_blocks(codes, steps):
    """The values of NVFP4 codes [rows, K], given the value of one in each block, [rows, K / 16]."""
    return from_e2m1(codes) * steps.repeat_interleave(BLOCK, dim=1)


def to_nvfp4(x, scale):
    """x [rows, K] in file form, given its tensor scale: packed codes [rows, K / 2], and block scales in tiles."""
    codes, block_scales = to_blocks(x, scale)
    return pack(codes), swizzle(block_scales)


def stored_blocks(packed, stored_scales):
    """The codes and block scales of a file's tensors, in the form of `to_blocks`."""
    rows, pairs = packed.shape
    return unpack(packed), unswizzle(stored_scales, rows, pairs * 2 // BLOCK)


def from_nvfp4(packed, stored_scales, scale):
    """The values in f32, for one rounding to the compute dtype."""
    codes, block_scales = stored_blocks(packed, stored_scales)
    return from_blocks(codes, scale * block_scales.float())


def nvfp4_to_fp8(packed, stored_scales, scale):
    """The e4m3 codes and their scale that are closest to NVFP4 values if the scale may only change by a power of two.

    The products of codes and block scales are rounded. The power is the largest that keeps them from saturating, so that the
    fewest products fall below the normal numbers.
    """
    codes, block_scales = stored_blocks(packed, stored_scales)
    largest = E2M1_MAX * amax(block_scales)
    power = torch.exp2(torch.floor(torch.log2(E4M3_MAX / largest)))
    return e4m3(from_blocks(codes, power * block_scales.float())), scale / power
