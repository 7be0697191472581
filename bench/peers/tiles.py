"""The sweep of --tiles: times every tile of the GEMM kernels at a row's shape, to set the costs in kernels/kernels.def."""

import re
import statistics
from dataclasses import replace

from peers.rows import Operands, bare
from peers.timing import Side, burst, sets_of

# Tiles are compared by time per multiply-accumulate only if there are many. With few, the last wave dominates.
MANY_TILES = 1000


def area(tile: str) -> tuple:
    rows, cols = re.search(r"(\d+)x(\d+)", tile).groups()
    return int(rows), int(cols)


def padded(tile: str, extent: tuple) -> tuple:
    """The tiles that cover a GEMM of these rows, columns and K, and the multiply-accumulates in them."""
    (rows, cols), (m, n, k) = area(tile), extent
    tiles = -(-m // rows) * -(-n // cols)
    return tiles, tiles * rows * cols * k


def extent_of(case) -> tuple:
    """M of all streams together, N and K."""
    x, w = (bare(t) for t in case.tensors[case.op != "qkv" :][:2])
    inner, cols = x.shape[1], w.shape[0]
    return case.flops // (2 * cols * inner), cols, inner


def time_tiles(row, kiln, stream, args) -> dict:
    """Burst times of the row with every tile that can compute it, by accumulation and tile, alternating; `best` is kiln's choice."""
    operands = Operands("cuda")
    cases = [row.make(operands)]
    cases += [row.make(operands) for _ in range(sets_of(cases[0].bytes, args.cold) - 1)]
    sides, chosen = [], {}
    # Only e4m3 products can accumulate in two ways.
    ways = ("fast", "exact") if row.format == "W8A8" else ("auto",)
    best = [("best", None, accumulate) for accumulate in ways]
    for tile, kernel, accumulate in best + [each for each in kiln.tiles() if each[2] in ways]:
        calls = [kiln.call(replace(case, accumulate=accumulate), kernel and tile) for case in cases]
        kiln.kernels()
        calls[0]()
        launched = kiln.kernels()
        if kernel is None:
            chosen[accumulate] = launched
        # If a tile cannot compute the op, kiln chooses another tile.
        if kernel is None or kernel in launched:
            sides.append(Side(f"{accumulate} {tile}", calls, stream, args.graphs))
    times = burst(sides, args.pairs)
    record = {"row": row.name, "shape": row.shape, "format": row.format, "flops": cases[0].flops, "extent": extent_of(cases[0])}
    return record | {"chosen": chosen, "tiles_s": {side.name: values for side, values in times.items()}}


def tile_line(record: dict) -> str:
    """Each tile's time, its rate, and its time over the fastest tile's."""
    medians = {name: statistics.median(values) for name, values in record["tiles_s"].items()}
    lines = [f"{record['row']} {record['shape']}"]
    for accumulate, kernels in record["chosen"].items():
        of_tiles = {name: t for name, t in medians.items() if name.startswith(accumulate)}
        fastest = min(of_tiles.values())
        for name, t in of_tiles.items():
            chosen = " ".join(kernels) if name.endswith(" best") else ""
            text = f"  {name:<28} {t * 1e6:>10.1f} us {record['flops'] / t / 1e12:>7.1f} TFLOP/s {t / fastest:>6.3f} {chosen}"
            lines.append(text.rstrip())
    return "\n".join(lines)


def tile_summary(records: list) -> list:
    """Each tile's time per multiply-accumulate, padding counted, in percent of the least. For kiln's choice, its time over the
    fastest tile's."""
    lines, costs, behind = [], {}, {}
    for record in records:
        medians = {name: statistics.median(values) for name, values in record["tiles_s"].items()}
        here = {}
        for name, t in medians.items():
            accumulate, tile = name.split(" ", 1)
            if tile == "best":
                fastest = min(u for other, u in medians.items() if other.startswith(accumulate))
                behind.setdefault(f"{record['format']} {accumulate}", {})[f"{record['row']} {record['shape']}"] = t / fastest
            else:
                tiles, products = padded(tile, record["extent"])
                if tiles >= MANY_TILES:
                    here[name] = t / products
        for name, cost in here.items():
            costs.setdefault(f"{record['format']} {name}", []).append(cost / min(here.values()))
    for name, values in costs.items():
        spread = f"{100 * min(values):.1f} to {100 * max(values):.1f}"
        lines.append(f"cost of {name:<34} {100 * statistics.median(values):>6.1f} % of the least, {spread} ({len(values)} shapes)")
    for way, by_row in behind.items():
        worst = max(by_row, key=by_row.get)
        mean = statistics.geometric_mean(by_row.values())
        most = f"at most {by_row[worst]:.3f} ({worst})"
        lines.append(f"{way}: kiln's choice takes {mean:.3f} of the fastest tile's time, {most}")
    return lines
