"""The colors of the built-in model's latents, for fast previews: the key `preview` of its kiln.json.

    python preview.py --kiln target/release/kiln           # writes them to models/builtin/kiln.json
    python preview.py --kiln target/release/kiln --check   # fails if that file has others

kiln draws images of the training world and records their latents. Least squares give, for each color, the sum of the 32 channels and a bias
that is closest to the mean of 8x8 pixels. What is beyond black or white and belongs there is no error, because a preview is clamped. Needs
Python alone.
"""
import argparse
import itertools
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

FILE = pathlib.Path(__file__).resolve().parents[2] / "models/builtin/kiln.json"
COLORS = "red orange yellow green cyan blue purple pink brown black white gray".split()
SHAPES = "circle square triangle star heart ring cross hexagon".split()
PLACES = ["", " in the center", " on the left", " in the top right", " at the bottom"]
BACKGROUNDS = ["a plain {}", "a {} gradient", "a striped {}"]
CHANNELS, SCALE = 32, 8
# Keeps the factors of channels that hardly matter near zero.
RIDGE = 1e-3
# How often the pixels that are clamped are left out anew.
ROUNDS = 8
# A clamped color is right if the pixel's is at least this far in its direction; 1 is black or white.
WRONG = 0.9


def prompts(count):
    """Prompts in which every color is a shape's and a background's equally often."""
    for i in range(count):
        color, other = COLORS[i % 12], COLORS[(i * 5 + i // 12 + 4) % 12]
        shape, place = SHAPES[(i * 3 + i // 8) % 8], PLACES[i % 5]
        yield f"a large {color} {shape}{place} on {BACKGROUNDS[i % 3].format(other)} background"


def tensors(path):
    """The f32 tensors of a safetensors file."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    found = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            begin, end = (8 + size + at for at in entry["data_offsets"])
            found[name] = (entry["shape"], memoryview(data[begin:end]).cast("f"))
    return found


def pixels(dump):
    """The channels of each latent pixel and a one, and the mean color of its 8x8 pixels."""
    found = tensors(dump)
    (_, height, width), image = found["image"]
    (_, packed), latents = found[f"latents.{max(int(name[8:]) for name in found if name.startswith('latents.'))}"]
    rows, cols = height // SCALE, width // SCALE
    for y, x in itertools.product(range(rows), range(cols)):
        token, corner = y // 2 * (cols // 2) + x // 2, 2 * (y % 2) + x % 2
        channels = [latents[token * packed + 4 * c + corner] for c in range(CHANNELS)]
        at = (y * width + x) * SCALE
        mean = lambda k: sum(sum(image[(k * height + dy) * width + at:][:SCALE]) for dy in range(SCALE)) / SCALE ** 2
        yield channels + [1.0], [mean(k) for k in range(3)]


def solve(matrix, right):
    """Solves a symmetric positive system for several right sides, by elimination."""
    n = len(matrix)
    rows = [matrix[i][:] + right[i][:] for i in range(n)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [v / rows[i][i] for v in rows[i]]
        for r in range(n):
            if r != i and rows[r][i] != 0.0:
                factor = rows[r][i]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i])]
    return [row[n:] for row in rows]


def samples(kiln, count):
    """Pixels to fit, and pixels of other images to measure."""
    fitted, held = [], []
    with tempfile.TemporaryDirectory() as folder:
        dump = pathlib.Path(folder) / "dump.safetensors"
        for i, prompt in enumerate(prompts(count)):
            arguments = ["--model", FILE.parent, "--seed", str(1000 + i), "--precision", "f32", "-o", f"{folder}/image.png"]
            subprocess.run([kiln, prompt, *arguments, "--dump", dump, "--force", "--quiet"], check=True, stdout=subprocess.DEVNULL)
            (held if i % 6 == 5 else fitted).extend(pixels(dump))
    return fitted, held


def add(sums, x, value, sign=1.0):
    """Adds a sample of one color to the sums of products of its channels."""
    squares, products = sums
    for r, v in enumerate(x):
        v *= sign
        squares[r] = [a + v * b for a, b in zip(squares[r], x)]
        products[r] += v * value


def fit(samples):
    """A column of factors for each color."""
    size = CHANNELS + 1
    columns = []
    for k in range(3):
        everything = [[0.0] * size for _ in range(size)], [0.0] * size
        for x, y in samples:
            add(everything, x, y[k])
        column = None
        for _ in range(ROUNDS):
            sums, used = ([row[:] for row in everything[0]], everything[1][:]), len(samples)
            for x, y in samples if column else []:
                found = sum(v * w for v, w in zip(x, column))
                if abs(found) >= 1.0 and found * y[k] >= WRONG:
                    add(sums, x, y[k], -1.0)
                    used -= 1
            for r in range(CHANNELS):
                sums[0][r][r] += RIDGE * used
            new = [row[0] for row in solve(sums[0], [[v] for v in sums[1]])]
            # Half of the way, because what is clamped changes with it.
            column = [(a + b) / 2 for a, b in zip(new, column)] if column else new
        columns.append(column)
    return [[round(v, 4) + 0.0 for v in row] for row in zip(*columns)]


def rms(pairs):
    pairs = list(pairs)
    return 127.5 * (sum((a - b) ** 2 for got, want in pairs for a, b in zip(got, want)) / 3 / len(pairs)) ** 0.5


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--kiln", required=True)
    p.add_argument("--images", type=int, default=90)
    p.add_argument("--check", action="store_true")
    a = p.parse_args()
    fitted, held = samples(a.kiln, a.images)
    table = fit(fitted)
    clamp = lambda v: min(1.0, max(-1.0, v))
    color = lambda x: [clamp(sum(v * row[k] for v, row in zip(x, table))) for k in range(3)]
    print(f"images that were not fitted: {rms((color(x), y) for x, y in held):.1f} levels RMS; gray {rms(([0.0] * 3, y) for _, y in held):.1f}")
    old = FILE.read_text(encoding="utf-8")
    new = json.dumps(dict(json.loads(old), preview=table), indent=2)
    if a.check:
        sys.exit("models/builtin/kiln.json has other colors" if new != old else None)
    FILE.write_text(new, encoding="utf-8")
