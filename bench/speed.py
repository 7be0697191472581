#!/usr/bin/env python3
"""Compares the speed of two builds of kiln: steps and whole images of a model in each of its formats, taking turns on one GPU.

    python3 bench/speed.py CHECKPOINT OLD NEW [--sizes 512x512 1024x1024] [--rounds N] [--sustained S] [--json FILE]

OLD and NEW are kiln programs. CHECKPOINT is a folder that `tools/random_checkpoint.py` wrote, with the formats to compare:

    python tools/random_checkpoint.py CHECKPOINT --model 4b --format bf16 fp8 nvfp4 --encoder bf16 fp8 nvfp4

Both builds hold the model in GPU memory at the same time. They generate an image for each request by turns, every other round backwards,
each with a new prompt and seed. With rest: half a second of rest before each image, so that the GPU's clock is high. Without rest: as many
images as fill --sustained seconds, after a stretch as long that does not count. A step is the median of an image's steps but the first,
which waits for work queued before it. An image lasts from the request to the answer, with its PNG. Speed is the median of the ratios of
neighbors; above one NEW is faster.

Needs Python alone. Exits 1 when a program fails.
"""

import argparse
import json
import pathlib
import statistics
import sys

from steps import of_checkpoint, shape
from turns import REST_S, Kiln, burst, quartiles, ratio, requests

WARM_UP = 3

# The times of an image that are compared.
FIGURES = {
    "step": lambda image: statistics.median(image["steps"][1:] or image["steps"]),
    "image": lambda image: image["total"],
}


def measure(engines, args, asked) -> dict:
    """The images of both builds, with rest and without."""
    burst(engines, WARM_UP, 0.0, asked)
    rested = burst(engines, args.rounds, args.rest, asked)
    # The clock falls until it meets the power limit.
    pair_s = sum(statistics.median(image["total"] for image in images) for images in rested.values())
    rounds = max(3, round(args.sustained / pair_s))
    burst(engines, rounds, 0.0, asked)
    return {"with rest": rested, "without rest": burst(engines, rounds, 0.0, asked)}


def row(shape, label, figure, found) -> str:
    """A line of the table: both builds' median times and their ratio, with rest and without."""
    text = f"{shape:<12}{label:<18}{figure:<7}"
    for images in found.values():
        old, new = ([FIGURES[figure](image) for image in images[side]] for side in ("old", "new"))
        low, high = quartiles([a / b for a, b in zip(old, new)])[::2]
        text += f"| {1e3 * statistics.median(old):>9.3f} {1e3 * statistics.median(new):>9.3f} {ratio(old, new):>7.4f}"
        text += f" {f'{low:.4f}..{high:.4f}':>16} {len(old):>4} "
    return text.rstrip()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=pathlib.Path, metavar="CHECKPOINT", help="a model in the formats to compare")
    parser.add_argument("old", metavar="OLD", help="the program to compare with")
    parser.add_argument("new", metavar="NEW", help="the program to measure")
    parser.add_argument("--sizes", nargs="+", default=["512x512", "1024x1024"], metavar="SIZE", help="default: 512x512 1024x1024")
    parser.add_argument("--formats", nargs="+", metavar="FORMAT", help="some of the checkpoint's formats: bf16, fp8, nvfp4 (default: all)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps of an image (default 4)")
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="images of each build with rest (default 12)")
    parser.add_argument("--rest", type=float, default=REST_S, metavar="S", help=f"rest before each of them (default {REST_S})")
    parser.add_argument("--sustained", type=float, default=8.0, metavar="S", help="seconds of images without rest (default 8)")
    parser.add_argument("--backend", default="cuda", help="where both compute (default cuda)")
    parser.add_argument("--json", metavar="FILE", help="write the times of every image, one JSON object a line")
    args = parser.parse_args()
    args.sizes = [shape(text, args.steps) for text in args.sizes]
    args.configurations = of_checkpoint(args.checkpoint, "kiln")
    if args.formats:
        args.configurations = [c for c in args.configurations if c.label.split(",")[0] in args.formats]
    if not args.configurations or min(args.rounds, args.steps) < 1:
        parser.error("there is nothing to measure")
    return args


def main() -> int:
    args, asked = arguments(), requests()
    out = open(args.json, "w") if args.json else None
    columns = f"{'old ms':>9} {'new ms':>9} {'speed':>7} {'quartiles':>16} {'n':>4}"
    print(f"{'':<37}| {'with rest':<50}| without rest\n{'size':<12}{'format':<18}{'':<7}| {columns} | {columns}", flush=True)
    for size in args.sizes:
        for config in args.configurations:
            flags = ["--width", size.width, "--height", size.height, "--steps", size.steps, "--backend", args.backend]
            engines = []
            try:
                for name, program in (("old", args.old), ("new", args.new)):
                    engines.append(Kiln(name, program, [*config.arguments, *flags]))
                found = measure(engines, args, asked)
            finally:
                for engine in engines:
                    engine.close()
            for figure in FIGURES:
                print(row(size.name, config.label, figure, found), flush=True)
            if out:
                print(json.dumps({"size": size.name, "format": config.label} | found), file=out, flush=True)
    if out:
        out.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
