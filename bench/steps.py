"""Compares denoising steps of several configurations of kiln, taking turns: models, formats, flags, or builds.

    python3 bench/steps.py [--kiln PROGRAM] bf16='--model DIR' fp8='--model DIR --transformer FILE' 'qk bf16=--model DIR --attention bf16'
                           [--shapes 1024x1024 512x512 1024x1024+1 2048x2048+4:8] [--rounds N] [--json FILE]
    python3 bench/steps.py [--kiln PROGRAM] --checkpoint DIR

A configuration is a label and arguments of `kiln bench`; `PROGRAM::ARGUMENTS` runs another program than --kiln. --checkpoint makes one for
every format that the folder has, as `tools/random_checkpoint.py DIR --format bf16 fp8 nvfp4 --encoder bf16 fp8 nvfp4` writes it:
transformer and text encoder in bf16, in FP8, and in NVFP4 with either --nvfp4-math. A shape is WIDTHxHEIGHT, +N for N reference images of
the same size, :N for another number of steps. The others are compared with the first configuration. A failure is reported and the rest
goes on. bench/README.md describes how times are taken.

Exits 1 when a run fails.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import random
import re
import shlex
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib

# The first steps of an image, which count as a burst: as many as klein takes.
BURST_STEPS = 4
# Seconds of denoising an image before its steps count as sustained.
SETTLED_S = 1.5


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    width: int
    height: int
    references: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Configuration:
    label: str
    program: str
    arguments: tuple


def shape(text: str, steps: int) -> Shape:
    found = re.fullmatch(r"(\d+)x(\d+)(?:\+(\d+))?(?::(\d+))?", text)
    if not found:
        raise SystemExit(f"error: `{text}` is no WIDTHxHEIGHT[+REFERENCES][:STEPS]")
    width, height, references, own = (int(part) if part else None for part in found.groups())
    return Shape(text, width, height, references or 0, own or steps)


def configuration(text: str, program: str) -> Configuration:
    label, equals, arguments = text.partition("=")
    if not equals or not label:
        raise SystemExit(f"error: `{text}` is no LABEL=ARGUMENTS")
    own, separator, rest = arguments.partition("::")
    return Configuration(label, own if separator else program, tuple(shlex.split(rest if separator else arguments)))


def of_checkpoint(folder: pathlib.Path, program: str) -> list:
    """The configurations of a folder's model, in each format that it has."""
    found = []
    if any((folder / "transformer").glob("*.safetensors")) and any((folder / "text_encoder").glob("*.safetensors")):
        found.append(Configuration("bf16", program, ("--model", str(folder))))
    for format, ways in (("fp8", {"fp8": ()}), ("nvfp4", {f"nvfp4, {m} math": ("--nvfp4-math", m) for m in ("bf16", "fp8")})):
        transformers = sorted(folder.glob(f"flux-2-klein*-{format}.safetensors"))
        encoders = sorted(folder.glob(f"qwen_3_*_{format}.safetensors"))
        if not transformers and not encoders:
            continue
        if len(transformers) != 1 or len(encoders) != 1:
            raise SystemExit(f"error: {folder} has {len(transformers)} transformers and {len(encoders)} text encoders in {format}")
        variant = "base" if "-base-" in transformers[0].name else "distilled"  # which the file does not tell
        files = "--transformer", str(transformers[0]), "--variant", variant, "--text-encoder", str(encoders[0])
        found += [Configuration(label, program, ("--model", str(folder), *files, *more)) for label, more in ways.items()]
    if not found:
        raise SystemExit(f"error: {folder} has no model in bf16, FP8 or NVFP4")
    return found


def image(path: pathlib.Path, width: int, height: int) -> None:
    """Writes a PNG of smooth colors with some noise."""
    dice = random.Random(1)
    png(path, width, height, lambda x, y: ((x * 255) // width, (y * 255) // height, dice.randrange(256)))


def png(path: pathlib.Path, width: int, height: int, color) -> None:
    """Writes a PNG from a function of column and row."""
    row = lambda y: b"\0" + b"".join(bytes(color(x, y)) for x in range(width))
    chunk = lambda kind, body: struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(map(row, range(height))), 1)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))


def command(config: Configuration, shape: Shape, folder: pathlib.Path, args) -> list:
    """The command of a run. It is quiet, so that stderr holds only errors and notes."""
    flags = ["--width", str(shape.width), "--height", str(shape.height), "--steps", str(shape.steps), "--runs", str(args.runs)]
    for i in range(shape.references):
        reference = folder / f"{shape.width}x{shape.height}-{i}.png"
        if not reference.exists():
            image(reference, shape.width, shape.height)
        flags += ["--reference", str(reference)]
    return [config.program, "bench", "--json", "-q", *config.arguments, *flags]


def settled(steps: list) -> list:
    """The steps of an image that begin after the clock had time to fall. A short image has none."""
    begun = itertools.accumulate(steps, initial=0.0)
    return [seconds for seconds, at in zip(steps, begun) if at >= SETTLED_S]


def measure(config: Configuration, shape: Shape, folder: pathlib.Path, args) -> dict:
    """One run: kiln's report, and the steps of its warm images."""
    record = {"label": config.label, "shape": shape.name, "arguments": config.arguments}
    try:
        done = subprocess.run(command(config, shape, folder, args), capture_output=True, text=True, timeout=args.timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return record | {"failed": str(error)}
    if done.returncode != 0:
        message = next((each for each in done.stderr.splitlines() if each.startswith("error")), done.stderr.strip()[-300:])
        return record | {"failed": message or f"status {done.returncode}"}
    try:
        report = json.loads(done.stdout)
        images = [warm["steps"] for warm in report["warm_s"]]
    except (ValueError, KeyError) as error:
        return record | {"failed": f"its report cannot be read: {error!r}"}
    record |= {"report": report, "notes": done.stderr.strip()}
    # An image's first step waits for work queued before it.
    return record | {
        "burst_s": [seconds for steps in images for seconds in steps[1:BURST_STEPS]] or images[0],
        "sustained_s": [seconds for steps in images for seconds in settled(steps)],
    }


def line(record: dict) -> str:
    text = f"{record['shape']:<18} {record['label']:<16}"
    if "failed" in record:
        return f"{text} FAILED: {record['failed']}"
    for key in ("burst_s", "sustained_s"):
        text += f" {1e3 * statistics.median(record[key]):>9.3f}" if record[key] else f" {'-':>9}"
    warm, memory = record["report"]["warm_s"], record["report"]["memory"].get("measured")
    text += f" {statistics.median(image['total'] for image in warm):>9.3f}"
    text += f" {memory / 1e9:>7.2f}" if memory else f" {'-':>7}"
    text += f"  {record['report']['saturated']} values saturated" if record["report"].get("saturated") else ""
    return text + (f"  ({record['notes']})" if record["notes"] else "")


def medians(records: list, shape: str, label: str, key: str) -> list:
    """The median step of each round, None for a round that has none."""
    of = [r for r in records if r["shape"] == shape and r["label"] == label]
    return [statistics.median(r[key]) if r.get(key) else None for r in of]


def summary(records: list, shapes: list, labels: list) -> list:
    """For each shape and configuration: the median of its rounds, its speed over the first configuration's in the same round, and the most
    memory of a round."""
    lines = [f"{'median step, ms':<18} {'':<16} {'burst':>9} {'speed':>7} {'sustained':>9} {'speed':>7} {'GB':>7}"]
    for shape in shapes:
        for label in labels:
            text, known = f"{shape:<18} {label:<16}", False
            for key in ("burst_s", "sustained_s"):
                own, first = medians(records, shape, label, key), medians(records, shape, labels[0], key)
                found = [seconds for seconds in own if seconds]
                ratios = [b / a for a, b in zip(own, first) if a and b]
                text += f" {1e3 * statistics.median(found):>9.3f}" if found else f" {'-':>9}"
                text += f" {statistics.median(ratios):>7.3f}" if ratios else f" {'-':>7}"
                known = known or bool(found)
            reports = [r["report"] for r in records if (r["shape"], r["label"]) == (shape, label) and "report" in r]
            memory = [measured for report in reports if (measured := report["memory"].get("measured"))]
            text += f" {max(memory) / 1e9:>7.2f}" if memory else f" {'-':>7}"
            lines.append(text if known else f"{shape:<18} {label:<16} FAILED")
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configurations", nargs="*", metavar="LABEL=ARGUMENTS")
    parser.add_argument("--checkpoint", type=pathlib.Path, metavar="DIR", help="a model in several formats, each a configuration")
    parser.add_argument("--kiln", default="kiln", help="the program (default: kiln)")
    parser.add_argument("--shapes", nargs="+", default=["1024x1024"], metavar="SHAPE", help="default: 1024x1024")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each configuration and shape (default 3)")
    parser.add_argument("--steps", type=int, default=50, help="steps of an image (default 50)")
    parser.add_argument("--runs", type=int, default=2, help="warm images of a run (default 2)")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds that a run may take (default 300)")
    parser.add_argument("--json", metavar="FILE", help="write every run, one JSON object a line")
    args = parser.parse_args()
    made = of_checkpoint(args.checkpoint, args.kiln) if args.checkpoint else []
    args.configurations = made + [configuration(text, args.kiln) for text in args.configurations]
    if not args.configurations:
        parser.error("there is no configuration, and no --checkpoint")
    args.shapes = [shape(text, args.steps) for text in args.shapes]
    if min(args.rounds, args.steps, args.runs) < 1:
        parser.error("--rounds, --steps and --runs are 1 or more")
    if len({config.label for config in args.configurations}) < len(args.configurations):
        parser.error("labels differ from each other")
    return args


def main() -> int:
    args, records = arguments(), []
    print(f"{'shape':<18} {'configuration':<16} {'burst ms':>9} {'sust. ms':>9} {'total s':>9} {'GB':>7}", flush=True)
    out = open(args.json, "w") if args.json else None
    with tempfile.TemporaryDirectory() as folder:
        # Each round has every shape, so that all have a figure before the second round begins. Every other round goes backwards.
        for i in range(args.rounds):
            for each in args.shapes:
                for config in args.configurations if i % 2 == 0 else reversed(args.configurations):
                    start = time.perf_counter()
                    record = measure(config, each, pathlib.Path(folder), args)
                    records.append(record | {"round": i, "took_s": time.perf_counter() - start})
                    print(line(record), flush=True)
                    if out:
                        print(json.dumps(records[-1]), file=out, flush=True)
    if out:
        out.close()
    names = [each.name for each in args.shapes], [config.label for config in args.configurations]
    print("\n".join(summary(records, *names)))
    failed = sum("failed" in record for record in records)
    print(f"{len(records)} runs, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
