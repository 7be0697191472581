"""What previews add to denoising, and what the identity of the weights adds to the first image.

    python3 bench/previews.py [--kiln PROGRAM] [--rounds N] [--steps 4 20] [--json FILE] -- [FLAGS OF KILN]

Runs take turns: without previews, with fast ones and with full ones, written to a file. A run makes several images, and the first two do
not count. A first image is a process, with full metadata and with basic metadata, which has no identity of the weights. Medians count.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

IMAGES = 7
KINDS = {"none": [], "fast": ["--preview=preview.png"], "full": ["--preview=preview.png", "--preview-kind", "full"]}
DETAILS = ("full", "basic")


def run(kiln, folder, flags):
    command = [kiln, "a fox", "--seed", "5", "-o", "image.png", "--force", "--json", "--quiet", *flags]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True).stdout


def denoising(kiln, folder, steps, flags):
    """Seconds of denoising each image but the first two."""
    lines = run(kiln, folder, ["--count", str(IMAGES), "--steps", str(steps), *flags]).splitlines()
    return [json.loads(line)["seconds"]["denoise"] for line in lines][2:]


def in_turns(names, rounds, measure):
    """Measurements by name. Every other round goes the other way."""
    found = {name: [] for name in names}
    for index in range(rounds):
        for name in list(names)[:: 1 if index % 2 else -1]:
            found[name] += measure(name)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kiln", default="target/release/kiln", help="the program [default: target/release/kiln]")
    parser.add_argument("--rounds", type=int, default=5, help="how often each takes its turn [default: 5]")
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 20], help="steps of an image [default: 4 20]")
    parser.add_argument("--json", type=pathlib.Path, help="write all times to this file")
    parser.add_argument("flags", nargs="*", help="flags of kiln, behind --")
    args = parser.parse_args()
    kiln, everything = str(pathlib.Path(args.kiln).resolve()), {}
    with tempfile.TemporaryDirectory() as folder:
        for steps in args.steps:
            found = in_turns(KINDS, args.rounds, lambda kind: denoising(kiln, folder, steps, [*KINDS[kind], *args.flags]))
            everything[f"{steps} steps"] = found
            middle = {kind: 1e3 * statistics.median(times) for kind, times in found.items()}
            fast, full = ((middle[kind] - middle["none"]) for kind in ("fast", "full"))
            print(f"{steps} steps: {middle['none']:.2f} ms; fast previews {fast / steps:+.3f} ms a step, full ones {full:+.2f} ms an image")

        def first_image(detail):
            start = time.perf_counter()
            run(kiln, folder, ["--metadata", detail, *args.flags])
            return [time.perf_counter() - start]

        found = everything["first image"] = in_turns(DETAILS, 3 * args.rounds, first_image)
        full, basic = (1e3 * statistics.median(found[detail]) for detail in DETAILS)
        print(f"first image: {basic:.1f} ms, with the identity of the weights {full - basic:+.1f} ms")
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
