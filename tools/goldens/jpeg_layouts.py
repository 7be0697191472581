"""JPEG files of every layout: a small encoder for layouts that Pillow does not write.

`encode` makes a file of given coefficients with any sampling factors, any order and split of scans, sequential or
progressive, restart marks and color markers. Codes follow ITU T.81; every scan gets its own Huffman tables.

`layouts` makes the files behind tests/fixtures/layouts.safetensors.
"""

import heapq
import struct
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

ZIGZAG = sorted(range(64), key=lambda i: (i // 8 + i % 8, (i // 8 if (i // 8 + i % 8) % 2 else i % 8)))


@dataclass
class Component:
    id: int
    h: int
    v: int
    # Quantizers and quantized coefficients, both in coded order: [64], [rows, columns, 64] with whole MCUs.
    quantizers: np.ndarray
    blocks: np.ndarray


@dataclass
class Layout:
    """How to write a file. A scan is components (by index), first and last coefficient, high and low bit."""

    scans: list
    progressive: bool = False
    sof: int | None = None
    restart: int = 0
    app: list = field(default_factory=list)  # (marker, data)
    wide_quantizers: bool = False
    end_run: int = 0x7FFF  # the longest run of blocks without coefficients


JFIF = (0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0")


def adobe(transform):
    return (0xEE, b"Adobe\0\x64\0\0\0\0" + bytes([transform]))


def planned(size, components):
    """Largest factors, and for each component the blocks it needs and the blocks of whole MCUs."""
    most = max(c.h for c in components), max(c.v for c in components)
    mcus = [-(-side // (8 * m)) for side, m in zip(size, most)]
    needed = [tuple(-(-(-(-side * f // m)) // 8) for side, f, m in zip(size, (c.h, c.v), most)) for c in components]
    return most, mcus, needed, [(mcus[0] * c.h, mcus[1] * c.v) for c in components]


# --- Codes --------------------------------------------------------------------


def lengths(counts):
    """Lengths of Huffman codes, at most 16, with room for the all-ones code, which is forbidden."""
    while True:
        heap = [(n, i, [s]) for i, (s, n) in enumerate(sorted(counts.items()))] + [(0, 999, [None])]
        depth = Counter()
        heapq.heapify(heap)
        while len(heap) > 1:
            (n, i, a), (m, _, b) = heapq.heappop(heap), heapq.heappop(heap)
            for symbol in a + b:
                depth[symbol] += 1
            heapq.heappush(heap, (n + m, i, a + b))
        if max(depth.values()) <= 16:
            break
        counts = {s: n // 2 + 1 for s, n in counts.items()}
    # The symbol with the all-ones code must be the longest, and the last.
    longest = max(depth.values())
    other = next(s for s in depth if depth[s] == longest)
    depth[other], depth[None] = depth[None], longest
    del depth[None]
    return dict(depth)


def table(counts):
    """A table's codes as {symbol: (code, length)}, and its bytes in a file."""
    size = lengths(counts)
    order = sorted(size, key=lambda s: (size[s], s))
    codes, code, last = {}, 0, 0
    for symbol in order:
        code <<= size[symbol] - last
        last = size[symbol]
        codes[symbol] = code, last
        code += 1
    per_length = Counter(size.values())
    return codes, bytes(per_length[n] for n in range(1, 17)) + bytes(order)


def number(value):
    """A value as its bits; a negative value is stored minus one."""
    length = int(abs(value)).bit_length()
    return (value if value >= 0 else value + (1 << length) - 1), length


class Items:
    """The contents of a scan: table symbols, bits, and restart marks."""

    def __init__(self, limit):
        self.items, self.ends, self.pending, self.limit = [], 0, [], limit

    def symbol(self, table, symbol):
        self.items.append((table, symbol))

    def bits(self, value, length):
        self.items.append((None, (value, length)))

    def flush(self, table):
        """Writes how many blocks ended, and the delayed corrections."""
        if self.ends:
            length = self.ends.bit_length() - 1
            self.symbol(table, length << 4)
            self.bits(self.ends - (1 << length), length)
        for bit in self.pending:
            self.bits(bit, 1)
        self.ends, self.pending = 0, []

    def data(self):
        """Tables {key: bytes} and the coded data."""
        keys = {key for key, _ in self.items if key and key != "restart"}
        tables = {key: table(Counter(s for k, s in self.items if k == key)) for key in keys}
        out, acc, count = bytearray(), 0, 0
        for key, what in [*self.items, ("restart", None)]:
            if key == "restart":
                acc, count = acc << -count % 8 | (1 << -count % 8) - 1, count + -count % 8
            else:
                value, length = what if key is None else tables[key][0][what]
                acc, count = acc << length | value, count + length
            while count >= 8:
                count -= 8
                byte = acc >> count & 255
                out += b"\xff\0" if byte == 255 else bytes([byte])
            acc &= (1 << count) - 1
            if what is not None and key == "restart":
                out += bytes([255, 0xD0 + what % 8])
        return {key: raw for key, (_, raw) in tables.items()}, bytes(out)


def code_block(items, block, part, carried, first, last, high, low, progressive):
    """One block of a scan."""
    dc, ac = ("dc", part), ("ac", part)
    if first == 0:
        value = int(block[0]) >> low
        if high:
            items.bits(value & 1, 1)
        else:
            difference, carried[part] = value - carried[part], value
            bits, length = number(difference)
            items.symbol(dc, length)
            items.bits(bits, length)
        first = 1
    if last == 0:
        return
    run, corrections = 0, []
    sizes = [abs(int(v)) >> low for v in block]
    new = [k for k in range(first, last + 1) if (sizes[k] == 1 if high else sizes[k])]
    for k in range(first, last + 1):
        size = sizes[k]
        if size == 0:
            run += 1
            continue
        while run > 15 and new and k <= new[-1]:
            items.flush(ac)
            items.symbol(ac, 0xF0)
            run -= 16
            for bit in corrections:
                items.bits(bit, 1)
            corrections = []
        if high and size > 1:
            corrections.append(size & 1)
            continue
        items.flush(ac)
        bits, length = (int(block[k] > 0), 1) if high else number(size if block[k] > 0 else -size)
        items.symbol(ac, run << 4 | length)
        items.bits(bits, length)
        for bit in corrections:
            items.bits(bit, 1)
        run, corrections = 0, []
    if run or corrections:
        items.ends += 1
        items.pending += corrections
        if not progressive or items.ends >= items.limit:
            items.flush(ac)


def code_scan(size, components, layout, scan):
    parts, first, last, high, low = scan
    _, mcus, needed, _ = planned(size, components)
    items, carried = Items(layout.end_run), Counter()
    alone = len(parts) == 1
    across, down = needed[parts[0]] if alone else mcus
    for mcu in range(across * down):
        if layout.restart and mcu and mcu % layout.restart == 0:
            items.flush(("ac", parts[0]))
            items.items.append(("restart", mcu // layout.restart - 1))
            carried = Counter()
        y, x = divmod(mcu, across)
        for part in parts:
            h, v = (1, 1) if alone else (components[part].h, components[part].v)
            for by in range(v):
                for bx in range(h):
                    block = components[part].blocks[y * v + by, x * h + bx]
                    code_block(items, block, part, carried, first, last, high, low, layout.progressive)
    items.flush(("ac", parts[0]))
    return items.data()


def segment(marker, data):
    return struct.pack(">BBH", 255, marker, len(data) + 2) + data


def encode(size, components, layout):
    """The file in pieces: the part before the scans, each scan with its tables, the end mark."""
    pieces = [b"\xff\xd8" + b"".join(segment(*app) for app in layout.app)]
    for index, c in enumerate(components):
        kind = ">64H" if layout.wide_quantizers else ">64B"
        head = bytes([index | (16 if layout.wide_quantizers else 0)])
        pieces[0] += segment(0xDB, head + struct.pack(kind, *map(int, c.quantizers)))
    frame = struct.pack(">BHHB", 8, size[1], size[0], len(components))
    frame += b"".join(bytes([c.id, c.h << 4 | c.v, i]) for i, c in enumerate(components))
    pieces[0] += segment(layout.sof or (0xC2 if layout.progressive else 0xC0), frame)
    if layout.restart:
        pieces[0] += segment(0xDD, struct.pack(">H", layout.restart))
    for scan in layout.scans:
        tables, data = code_scan(size, components, layout, scan)
        head = bytes([len(scan[0])]) + b"".join(bytes([components[p].id, p << 4 | p]) for p in scan[0])
        head += bytes([scan[1], scan[2], scan[3] << 4 | scan[4]])
        codes = b"".join(segment(0xC4, bytes([16 * (k == "ac") + p]) + raw) for (k, p), raw in sorted(tables.items()))
        pieces.append(codes + segment(0xDA, head) + data)
    return [*pieces, b"\xff\xd9"]


# --- Coefficients -------------------------------------------------------------

COSINE = np.array([[np.cos((2 * x + 1) * k * np.pi / 16) / (2 if k else 8**0.5) for x in range(8)] for k in range(8)])


def coefficients(plane, quantizers, blocks):
    """Quantized coefficients of samples 0..255, with repeated edges up to `blocks` across and down."""
    plane = np.pad(plane, ((0, blocks[1] * 8 - plane.shape[0]), (0, blocks[0] * 8 - plane.shape[1])), mode="edge")
    tiles = plane.reshape(blocks[1], 8, blocks[0], 8).transpose(0, 2, 1, 3) - 128.0
    values = (COSINE @ tiles @ COSINE.T).reshape(*tiles.shape[:2], 64)[..., ZIGZAG]
    return np.rint(values / quantizers).astype(int)


# --- The fixtures -------------------------------------------------------------

SIZE = 65, 67  # one and three samples beyond whole blocks

YCC, RGB = (1, 2, 3), (82, 71, 66)

# Name: ids, sampling factors (across, down) of each component, markers. The part of a name after the dot makes no
# difference to the pixels.
IMAGES = {
    "444": (YCC, "11 11 11", [JFIF]),
    "422": (YCC, "21 11 11", [JFIF]),
    "440": (YCC, "12 11 11", [JFIF]),
    "420": (YCC, "22 11 11", [JFIF]),
    "411": (YCC, "41 11 11", [JFIF]),
    "tall_411": (YCC, "14 11 11", [JFIF]),
    "410": (YCC, "42 11 11", [JFIF]),
    "tall_410": (YCC, "24 11 11", [JFIF]),
    "sixteenth": (YCC, "44 11 22", [JFIF]),
    "third": (YCC, "31 11 11", [JFIF]),
    "sixth": (YCC, "32 11 31", [JFIF]),
    "tall_third": (YCC, "13 11 11", [JFIF]),
    "ninth": (YCC, "33 11 13", [JFIF]),
    "same_factors": (YCC, "21 21 21", [JFIF]),
    "half_of_four": (YCC, "42 21 22", [JFIF]),
    "dense_chroma": (YCC, "11 22 22", [JFIF]),
    "dense_cb": (YCC, "11 22 11", [JFIF]),
    "dense_across": (YCC, "12 21 11", [JFIF]),
    "unlike_chroma": (YCC, "22 21 12", [JFIF]),
    "unlike_halves": (YCC, "41 21 11", [JFIF]),
    "grey": ((1,), "11", [JFIF]),
    "grey.22": ((1,), "22", [JFIF]),
    "grey.41": ((9,), "41", []),
    "rgb": (YCC, "11 11 11", [adobe(0)]),
    "rgb.ids": (RGB, "11 11 11", []),
    "rgb_subsampled": (RGB, "22 21 11", [adobe(0)]),
    "422.adobe": (RGB, "21 11 11", [adobe(1)]),
    "440.jfif_and_adobe": (RGB, "12 11 11", [JFIF, adobe(0)]),
    "420.other_ids": ((0, 1, 2), "22 11 11", []),
    "cmyk": ((1, 2, 3, 4), "11 11 11 11", []),
    "cmyk_adobe": ((67, 77, 89, 75), "21 11 11 21", [adobe(0)]),
    "ycck": ((1, 2, 3, 4), "22 11 11 22", [adobe(2)]),
}


def layouts_of(parts, fits):
    """Layouts for `parts` components; `fits` if one MCU may hold all of them."""
    every, each = tuple(range(parts)), [(part,) for part in range(parts)]
    first = [each[0], every[1:]]
    together = [every] if fits else each

    def whole(scans):
        return [(scan, 0, 63, 0, 0) for scan in scans]

    def bands(*ranges):
        return [(part, *r) for r in ranges for part in each]

    # Nearly libjpeg's default.
    successive = [(scan, 0, 0, 0, 1) for scan in together] + [(each[0], 1, 5, 0, 2)]
    successive += [(part, 1, 63, 0, 1) for part in each[1:]] + [(each[0], 6, 63, 0, 2), (each[0], 1, 63, 2, 1)]
    successive += [(scan, 0, 0, 1, 0) for scan in together] + bands((1, 63, 1, 0))
    deep = [(scan, 0, 0, 0, 3) for scan in each] + bands((1, 20, 0, 3), (21, 63, 0, 1), (1, 20, 3, 2))
    deep += [(scan, 0, 0, high, high - 1) for high in (3, 2, 1) for scan in together]
    deep += bands((1, 20, 2, 1), (1, 63, 1, 0))
    found = {
        "apart": Layout(whole(reversed(each))),
        "successive": Layout(successive, progressive=True),
        "restarts_apart": Layout(whole(each), restart=4, sof=0xC1),
        "spectral": Layout(bands((0, 0, 0, 0), (1, 2, 0, 0), (3, 63, 0, 0)), progressive=True),
        "deep": Layout(deep, progressive=True, restart=7, end_run=5),
    }
    if fits and parts > 1:
        found["together"] = Layout(whole(together))
        found["restarts"] = Layout(whole(together), restart=2, wide_quantizers=True)
    if parts == 3:
        found["luma_first"] = Layout(whole(first), restart=3)
    return found


# All layouts are tried on these images, and the most different layouts on the others.
THOROUGH = {"420", "440", "unlike_chroma", "grey.22", "ycck"}
OTHERS = ("together", "apart", "luma_first", "successive")


def image_components(ids, factors):
    """Soft waves with edges, a different one for each component."""
    components = [Component(i, int(f[0]), int(f[1]), None, None) for i, f in zip(ids, factors.split())]
    most, _, _, padded = planned(SIZE, components)
    for index, (c, blocks) in enumerate(zip(components, padded)):
        across, down = -(-SIZE[0] * c.h // most[0]), -(-SIZE[1] * c.v // most[1])
        y, x = np.mgrid[0:down, 0:across] * 5 / down
        plane = 128 + (90 - 40 * bool(index)) * np.sin((index + 1) * x / 2 + y) * np.cos((3 - index) / 3 * y)
        plane[down // 4 : down // 2, across // 5 : across // 2] = 230 - 60 * index
        corner = plane[down * 2 // 3 :, across * 2 // 3 :]
        corner += 30 * np.sin(np.indices(corner.shape).sum(axis=0) * 2)
        c.quantizers = np.array([min(12 + index + k * 5, 255) for k in range(64)])
        c.blocks = coefficients(np.clip(plane, 0, 255), c.quantizers, blocks)
    return components


def layouts():
    """Every image, as {name: {layout: file}}."""
    found = {}
    for name, (ids, factors, app) in IMAGES.items():
        components = image_components(ids, factors)
        fits = sum(c.h * c.v for c in components) <= 10
        chosen = layouts_of(len(components), fits)
        for layout in chosen.values():
            layout.app = app
        found[name] = {
            key: b"".join(encode(SIZE, components, layout))
            for key, layout in chosen.items()
            if name in THOROUGH or key in OTHERS
        }
    return found
