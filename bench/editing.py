#!/usr/bin/env python3
"""Measures what an edit costs: images with an init image, a mask and references next to images without, taking turns on one GPU.

    python3 bench/editing.py [--kiln PROGRAM] [--size 1024x1024] [--rounds N] [--sustained S] [--json FILE] -- ARGUMENTS

ARGUMENTS name the model, as for `kiln bench`. Each row is a program of its own that holds the model, so the GPU needs room for six of them.
They generate an image for each request by turns, every other round backwards, each with a new prompt and seed. The init image, the mask and
the reference are as large as the image; the mask covers a circle of a quarter of the area. All are decoded before; `cargo bench --bench
edit` times what happens then. With rest: half a second of rest before each image. Without rest: as many images as fill --sustained seconds,
after a stretch as long that does not count. The table has medians, and the median ratio to the image of the same round that the last column
names.

Needs Python alone. Exits 1 when a program fails.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile

import steps
from turns import REST_S, Kiln, burst, quartiles, ratio, requests

WARM_UP = 2

# What is measured: a name, its flags, and what it is compared with.
ROWS = (
    ("text", (), None),
    ("init", ("--init", "INIT", "--strength", "1"), "text"),
    ("mask", ("--init", "INIT", "--mask", "MASK"), "text"),
    ("mask, kept", ("--init", "INIT", "--mask", "MASK", "--keep"), "text"),
    ("reference", ("--reference", "INIT"), None),
    ("init as reference", ("--init", "INIT", "--mask", "MASK", "--init-reference", "on"), "reference"),
)

FIGURES = {"denoising": lambda image: image["denoise"], "image": lambda image: image["total"]}


def mask(path: pathlib.Path, width: int, height: int) -> None:
    """Writes a white circle of a quarter of the area on black."""
    area = width * height / 4 / 3.14159
    inside = lambda x, y: (x - width / 2) ** 2 + (y - height / 2) ** 2 < area
    steps.png(path, width, height, lambda x, y: (255, 255, 255) if inside(x, y) else (0, 0, 0))


def measure(engines, args, asked) -> dict:
    """The images of all rows, with rest and without."""
    burst(engines, WARM_UP, 0.0, asked)
    rested = burst(engines, args.rounds, REST_S, asked)
    round_s = sum(statistics.median(image["total"] for image in images) for images in rested.values())
    rounds = max(3, round(args.sustained / round_s))
    burst(engines, rounds, 0.0, asked)
    return {"with rest": rested, "without rest": burst(engines, rounds, 0.0, asked)}


def table(found: dict, figure: str) -> list:
    """A line for each row: the median, its ratio, and the quartiles of the ratio, with rest and without."""
    lines = [f"{figure:<20}" + "".join(f"| {when + ', ms':>18} {'ratio':>7} {'quartiles':>16} {'n':>4} " for when in found) + "| to"]
    for name, _, base in ROWS:
        text = f"{name:<20}"
        for images in found.values():
            own = [FIGURES[figure](image) for image in images[name]]
            text += f"| {1e3 * statistics.median(own):>18.3f} "
            if base:
                other = [FIGURES[figure](image) for image in images[base]]
                low, _, high = quartiles([a / b for a, b in zip(own, other)])
                text += f"{ratio(own, other):>7.4f} {f'{low:.4f}..{high:.4f}':>16} {len(own):>4} "
            else:
                text += f"{'':>29} "
        lines.append(f"{text}| {base or ''}".rstrip())
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENTS", help="which model, as for `kiln bench`")
    parser.add_argument("--kiln", default="kiln", help="the program (default: kiln)")
    parser.add_argument("--size", default="1024x1024", metavar="SIZE", help="default: 1024x1024")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps of an image (default 4)")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="images of each row with rest (default 15)")
    parser.add_argument("--sustained", type=float, default=15.0, metavar="S", help="seconds of images without rest (default 15)")
    parser.add_argument("--json", metavar="FILE", help="write the times of every image")
    args = parser.parse_args()
    args.size = steps.shape(args.size, args.steps)
    if min(args.rounds, args.steps) < 1:
        parser.error("there is nothing to measure")
    return args


def main() -> int:
    args, engines = arguments(), []
    size = args.size
    with tempfile.TemporaryDirectory() as folder:
        files = {"INIT": pathlib.Path(folder) / "init.png", "MASK": pathlib.Path(folder) / "mask.png"}
        steps.image(files["INIT"], size.width, size.height)
        mask(files["MASK"], size.width, size.height)
        flags = ["--width", size.width, "--height", size.height, "--steps", size.steps, *args.arguments]
        try:
            for name, own, _ in ROWS:
                engines.append(Kiln(name, args.kiln, [*flags, *(files.get(flag, flag) for flag in own)]))
            found = measure(engines, args, requests())
        finally:
            for engine in engines:
                engine.close()
    print(f"{size.name}, {size.steps} steps")
    for figure in FIGURES:
        print("\n".join(table(found, figure)), flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"size": size.name, "steps": size.steps} | found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
