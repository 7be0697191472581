"""Formats records as lines and summaries, for display."""

import re
import statistics

from peers.rows_mixed import QUANTIZE
from turns import quartiles, ratio

FLOOR, FLOOR_BYTES = 0.80, 32_000_000

HEAD = (
    f"{'row':<21}{'shape':<38}|{'kiln us':>10} {'quartiles':>17} {'torch us':>10} {'quartiles':>17} {'x torch':>7} "
    f"|{'kiln':>6} {'torch':>6}        {'of copy':>7} | sustained: kiln us, torch us, x torch, of copy | other us, x other | errors"
)


def line(record: dict) -> str:
    """A row for display. `x torch` is kiln's speed over PyTorch's, `of copy` its speed over the copy's."""
    text = f"{record['row']:<21}{record['shape']:<38}|"
    if "failed" in record:
        return text + f" FAILED: {(record['failed'].splitlines() or ['no message'])[0]}"
    digits = 3 if record["flops"] else 2
    if "burst_s" in record:
        times, sides = record["burst_s"], [side for side in ("kiln", "torch") if side in record["burst_s"]]
        for side in sides:
            low, median, high = (f"{t * 1e6:.1f}" for t in quartiles(times[side]))
            text += f"{median:>10} {low + '..' + high:>17} "
        amount, unit = (record["flops"], "TFLOP/s") if record["flops"] else (record["bytes"], "TB/s")
        rates = [amount / statistics.median(times[side]) / 1e12 for side in sides]
        text += f"{ratio(times['torch'], times['kiln']):>7.{digits}f} |" if "torch" in times else "   none |"
        text += "".join(f"{rate:>6.{digits - 2}f} " if digits == 3 else f"{rate:>6.2f} " for rate in rates)
        text += f"{unit:<7}{share(record):>7} |"
    if "sustained_s" in record:
        times = record["sustained_s"]
        medians = {side: statistics.median(values) for side, values in times.items()}
        text += f" {medians['kiln'] * 1e6:.1f}"
        if "torch" in medians:
            text += f" {medians['torch'] * 1e6:.1f} {medians['torch'] / medians['kiln']:.{digits}f}"
        if record["ceiling"]:
            text += f" {medians[record['ceiling']] / medians['kiln']:.2f}"
    for name in record.get("others", []):
        for times in (record["burst_s"], record.get("sustained_s")):
            if times:
                text += f" | {name} {statistics.median(times[name]) * 1e6:.1f} {ratio(times[name], times['kiln']):.3f}"
                if name in record["ours"] and "torch" in times:
                    text += f" ({ratio(times['torch'], times[name]):.3f} x torch)"
    text += "".join(f" | {name} LACKING" for name in record.get("lacking", {}))
    text += " | naive" if any("naive" in kernel for kernel in record.get("kernels", [])) else ""
    if "error" in record:
        text += f" | {record['error']:.1e} {record['peer_error']:.1e}"
        text += "".join(f" {name} {error:.1e}" for name, error in record["errors"].items())
        text += "" if record["right"] else " WRONG"
    if below(record):
        text += " SLOW"
    return text


def speed(record: dict) -> float:
    return record["ceiling_s"] / statistics.median(record["burst_s"]["kiln"])


def share(record: dict) -> str:
    return f"{speed(record):.2f}" if record["ceiling"] else ""


def below(record: dict) -> bool:
    limited = record.get("ceiling") and record["bytes"] >= FLOOR_BYTES
    return bool(limited) and not speed(record) >= FLOOR


def gemms(format: str, rows: str = "(?!1x)") -> str:
    """Plain GEMMs with at most one scale. GEMMs of one activation row are left out because they are memory-bound."""
    return rf"linear {format} {rows}(?!.*row scales)"


# Convolutions of 128 channels or more, without upsampling and with it.
CONV, UPSAMPLING = r"conv bf16 (?!.*, 3 to)(?!.*, up)", r"conv bf16 (?!.*, 3 to).*, up"

# Summary groups: a name, a pattern of the rows' name, format and shape, and the sides whose times are divided.
GROUPS = [
    ("bf16 GEMMs, x torch", gemms("bf16"), "torch", "kiln"),
    ("W8A8 GEMMs, fast x torch fast", gemms("W8A8"), "torch", "kiln"),
    ("W8A8 GEMMs, exact x torch fast", gemms("W8A8"), "torch", "exact"),
    ("W8A8 GEMMs, exact x torch slow", gemms("W8A8"), "slow", "exact"),
    ("W8A8 qkv_mlp, fast x torch's product", "qkv_mlp W8A8 ", "product", "kiln"),
    ("W8A8 qkv_mlp, exact x torch's product", "qkv_mlp W8A8 ", "product", "exact"),
    ("W8A8 gate residual, fast x torch's product", "linear_gate_residual W8A8 ", "product", "kiln"),
    ("W8A8 gate residual, exact x torch's product", "linear_gate_residual W8A8 ", "product", "exact"),
    ("attention, e4m3 q and k x kiln's bf16", "attention e4m3 ", "bf16", "kiln"),
    ("W8A16 GEMMs, x torch bf16", gemms("W8A16"), "torch", "kiln"),
    ("W8A16 GEMMs, x kiln's bf16", gemms("W8A16"), "bf16", "kiln"),
    ("W4A16 GEMMs of 4608 rows, x torch bf16", gemms("W4A16", "4608x"), "torch", "kiln"),
    ("W4A16 GEMMs of 4608 rows, x kiln's bf16", gemms("W4A16", "4608x"), "bf16", "kiln"),
    ("W4A16 GEMMs of 512 rows, x torch bf16", gemms("W4A16", "512x"), "torch", "kiln"),
    ("W4A16 GEMMs of 512 rows, x kiln's bf16", gemms("W4A16", "512x"), "bf16", "kiln"),
    ("3x3 convolutions, x torch", CONV, "torch", "kiln"),
    ("upsampling convolutions, x torch", UPSAMPLING, "torch", "kiln"),
    ("upsampling convolutions, x torch's convolution alone", UPSAMPLING, "convolution", "kiln"),
    *((f"{format} fused, x kiln's bf16", rf"(?!linear )\w+ {format} ", "bf16", "kiln") for format in QUANTIZE),
]


def summary(records: list) -> list:
    """For each group its geometric mean and its smallest ratio, because no single row represents it."""
    lines = []
    for name, pattern, above, below_line in GROUPS:
        text, count = [], 0
        for key in ("burst_s", "sustained_s"):
            members = [r for r in records if re.match(pattern, f"{r['row']} {r['format']} {r['shape']}")]
            timed = [r for r in members if above in r.get(key, {}) and below_line in r[key]]
            ratios = {r["shape"]: ratio(r[key][above], r[key][below_line]) for r in timed}
            if ratios:
                count, least = len(ratios), min(ratios, key=ratios.get)
                text.append(f"{key[:-2]} {statistics.geometric_mean(ratios.values()):.3f}, least {ratios[least]:.3f} ({least})")
        if text:
            lines.append(f"{name}, geometric mean of {count}: " + "; ".join(text))
    return lines
