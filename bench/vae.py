"""Compares kiln's VAE with diffusers' in one process, on one stream, taking turns, on random weights of klein's sizes.

    cargo build --release --example kiln_peers
    python3 bench/vae.py [--rows REGEX] [--quick] [--compile MODE] [--json FILE]
    python3 bench/vae.py --check [--rows REGEX] [--json FILE]

Times decoding and encoding at several sizes, also with the small decoder; diffusers runs compiled and eager, in bf16, with channels
last. With --check nothing is timed: the errors of kiln and of diffusers in bf16, both against diffusers in fp32, are compared. Needs a
GPU, PyTorch and diffusers; with --dry it needs neither GPU nor time, and only shapes are checked. The protocol is in bench/README.md.

Exits 1 when a row fails, and with --check when an error is above 1.2 times diffusers' error in bf16.
"""

import argparse
import contextlib
import functools
import os
import pathlib
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline

from peers import session
from peers.library import Kiln, KilnVae
from peers.timing import FEWEST_SETS, Side, burst, sustained
from turns import quartiles, ratio

from goldens.model import latent_statistics  # isort: skip
from random_checkpoint import HEADS, REAL_VAE, write_json, write_weights  # isort: skip

# Channels of the levels, finest first: klein's VAE, and the VAE with the small decoder.
CONFIGS = {"klein": REAL_VAE, "small": REAL_VAE | dict(decoder_block_out_channels=[96, 192, 384, 384])}
ALLOWED = 1.2
MODES = ("max-autotune-no-cudagraphs", "default", "none")


@dataclass(frozen=True)
class Row:
    encode: bool
    width: int
    height: int
    vae: str = "klein"
    tiling: bool = False

    @property
    def name(self) -> str:
        what = ("encode" if self.encode else "decode") + (" tiled" if self.tiling else "")
        return what + ("" if self.vae == "klein" else f", {self.vae} decoder")

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"

    @property
    def tokens(self) -> int:
        return self.width * self.height // 256


TIMED = [
    *(Row(False, side, side) for side in (256, 512, 1024, 2048)),
    Row(True, 1024, 1024),
    Row(False, 1024, 1024, "small"),
]
CHECKED = [
    *(Row(encode, *size) for encode in (False, True) for size in ((1024, 1024), (1360, 768), (144, 208))),
    Row(False, 2048, 2048),
    # More than 2^31 elements, in a buffer and in a product of attention.
    Row(False, 4096, 2304),
    Row(False, 1024, 1024, "small"),
    Row(False, 144, 208, "small"),
    Row(False, 2048, 1152, tiling=True),
    Row(False, 1360, 768, tiling=True),
    Row(True, 1360, 768, tiling=True),
]


# ---------------------------------------------------------------------------------------------------------------------- the VAE


def write_vae(folder: pathlib.Path, config: dict, device: str) -> None:
    """Writes a folder as diffusers does, with random weights that keep activations at a usual size."""
    write_json(folder / "config.json", HEADS["vae"] | config)
    with ThreadPoolExecutor(8 if device == "cuda" else os.cpu_count()) as pool:
        write_weights(folder, "vae", config, device, pool)


def latents_of(vae, tokens, row: Row):
    """The decoder's input in the pipeline."""
    mean, deviation = latent_statistics(vae)
    tokens = tokens.to(vae.dtype).T.reshape(1, -1, row.height // 16, row.width // 16)
    return Flux2KleinPipeline._unpatchify_latents(tokens * deviation + mean)


def image_of(vae, pixels, row: Row):
    """The encoder's input in the pipeline."""
    return pixels.to(vae.dtype).view(1, row.height, row.width, 3).permute(0, 3, 1, 2)


def result(vae, x, row: Row):
    """diffusers' result, in the shape of kiln's."""
    if not row.encode:
        return vae.decode(latents_of(vae, x, row)).sample[0].permute(1, 2, 0).reshape(-1, 3).float()
    mean, deviation = latent_statistics(vae)
    z = Flux2KleinPipeline._patchify_latents(vae.encode(image_of(vae, x, row)).latent_dist.mode())
    return ((z - mean) / deviation)[0].flatten(1).T.float()


def operands(row: Row, device: str, seed: int = 1) -> tuple:
    """Output and input: normalized tokens, and pixels of an image with slopes, edges and some noise."""
    tokens, pixels = (row.tokens, 128), (row.width * row.height, 3)
    if device == "meta":
        x = torch.empty(pixels if row.encode else tokens, device=device)
    else:
        generator = torch.Generator(device).manual_seed(seed)
        noise = functools.partial(torch.randn, generator=generator, device=device)
        if row.encode:
            y, x = torch.meshgrid(*(torch.linspace(0, 9, side, device=device) for side in (row.height, row.width)), indexing="ij")
            colors = torch.stack([(x + y).sin(), (2 * x).cos().sign() * 0.6, (x * y).sin()], -1)
            x = (0.8 * colors + 0.05 * noise(*colors.shape)).clamp(-1, 1).reshape(-1, 3)
        else:
            x = noise(*tokens)
    return torch.empty(tokens if row.encode else pixels, device=device), x


class Models:
    """Each VAE on the GPU, one at a time."""

    def __init__(self, folder: pathlib.Path, kiln: Kiln, device: str):
        self.folder, self.kiln, self.device = folder, kiln, device
        self.close = contextlib.ExitStack()

    def path(self, name: str) -> pathlib.Path:
        path = self.folder / name
        if not path.exists():
            path.mkdir()
            write_vae(path, CONFIGS[name], self.device)
        return path

    def ours(self, name: str, tiling: bool) -> KilnVae:
        vae = KilnVae(self.kiln, self.path(name), tiling)
        self.close.callback(vae.close)
        return vae

    def theirs(self, name: str, dtype, tiling: bool = False):
        vae = AutoencoderKLFlux2.from_pretrained(self.path(name), torch_dtype=dtype).to(self.device)
        if tiling:
            vae.enable_tiling()
        return vae.to(memory_format=torch.channels_last).eval()

    def free(self, stream) -> None:
        self.close.close()
        session.free(stream)


def compiled(vae, mode: str):
    """Compiles decoder and encoder for the sizes of the rows."""
    torch._dynamo.reset()
    options = {} if mode == "default" else {"mode": mode}
    vae.decoder = torch.compile(vae.decoder, dynamic=False, **options)
    vae.encoder = torch.compile(vae.encoder, dynamic=False, **options)
    return vae


# --------------------------------------------------------------------------------------------------------------------- the rows


def time_row(row: Row, models: Models, stream, args) -> dict:
    """Times kiln, compiled diffusers, and eager diffusers."""
    record = {"row": row.name, "size": row.size}
    ours = models.ours(row.vae, row.tiling)
    sets = [operands(row, "cuda", seed) for seed in range(FEWEST_SETS)]
    record["working_bytes"] = ours.bytes(row.encode, *sets[0], (row.width, row.height))
    sides = [Side("kiln", [ours.call(row.encode, out, x, (row.width, row.height)) for out, x in sets], stream, args.graphs)]
    modes = ["eager"] if args.compile == "none" else ["compiled", "eager"]
    for mode in modes:
        vae = models.theirs(row.vae, torch.bfloat16, row.tiling)
        prepare = image_of if row.encode else latents_of
        inputs = [prepare(vae, x, row).contiguous(memory_format=torch.channels_last) for _, x in sets]
        if mode == "compiled":
            vae = compiled(vae, args.compile)
        run = (lambda z, vae=vae: vae.encode(z).latent_dist.mode()) if row.encode else (lambda z, vae=vae: vae.decode(z).sample)
        sides.append(Side(mode, [lambda z=z, run=run: run(z) for z in inputs], stream, False))
    times = burst(sides, args.pairs)
    record["burst_s"] = {side.name: times[side] for side in sides}
    if args.sustain > 0:
        medians = {side: statistics.median(values) for side, values in times.items()}
        record["sustained_s"] = sustained(sides, args.sustain, medians)
    return record


def line(record: dict) -> str:
    text = f"{record['row']:<24}{record['size']:<10}|"
    if "failed" in record:
        return f"{text} FAILED: {record['failed'].splitlines()[0]}"
    return check_line(record, text) if "right" in record else time_line(record, text)


def time_line(record: dict, text: str) -> str:
    for key in ("burst_s", "sustained_s"):
        times = record.get(key, {})
        for name, values in times.items():
            low, median, high = (f"{1e3 * t:.2f}" for t in quartiles(values))
            text += f" {name} {median} ms ({low}..{high})" + ("" if name == "kiln" else f" {ratio(values, times['kiln']):.3f}x") + ";"
        text += " | sustained" if key == "burst_s" and "sustained_s" in record else ""
    return text + f" | {record['working_bytes'] / 2**30:.2f} GiB"


def errors(found, expected) -> tuple:
    """Norm of the difference over the norm of the expected values, and the largest difference over the largest value."""
    difference, expected = found.double() - expected.double(), expected.double()
    return float(difference.norm() / expected.norm()), float(difference.abs().max() / expected.abs().max())


def check_row(row: Row, models: Models) -> dict:
    out, x = operands(row, "cuda")
    exact = result(models.theirs(row.vae, torch.float32, row.tiling), x, row)
    theirs = errors(result(models.theirs(row.vae, torch.bfloat16, row.tiling), x, row), exact)
    out.fill_(float("nan"))  # unwritten elements show
    models.ours(row.vae, row.tiling).call(row.encode, out, x, (row.width, row.height))()
    ours = errors(out, exact)
    ratios = [a / b for a, b in zip(ours, theirs)]
    # NaN is never small.
    record = {"row": row.name, "size": row.size, "error": ours, "peer_error": theirs, "ratios": ratios}
    return record | {"right": all(each <= ALLOWED for each in ratios)}


def check_line(record: dict, text: str) -> str:
    for i, what in enumerate(("rms", "max")):
        text += f" {what} {record['error'][i]:.2e}, diffusers bf16 {record['peer_error'][i]:.2e}, ratio {record['ratios'][i]:.3f} |"
    return text + ("" if record["right"] else " WRONG")


def dry(rows: list, kiln: Kiln) -> int:
    """kiln checks the ops of every row and reports their working memory, diffusers checks the shapes. Nothing is computed."""
    with tempfile.TemporaryDirectory() as folder:
        models = Models(pathlib.Path(folder), kiln, "cpu")
        for row in rows:
            out, x = operands(row, "meta")
            need = models.ours(row.vae, row.tiling).bytes(row.encode, out, x, (row.width, row.height))
            with torch.device("meta"), torch.no_grad():
                vae = AutoencoderKLFlux2(**CONFIGS[row.vae]).eval()
                if row.tiling:
                    vae.enable_tiling()
                found = tuple(result(vae, x, row).shape)
            assert found == tuple(out.shape), f"{row.name} {row.size}: diffusers has {found}, kiln {tuple(out.shape)}"
            print(f"{row.name:<24}{row.size:<10}| {need / 2**30:.3f} GiB of working memory", flush=True)
        models.close.close()
    print(f"{len(rows)} rows fit")
    return 0


def arguments() -> argparse.Namespace:
    parser = session.parser(__doc__, "name size")
    parser.add_argument("--check", action="store_true", help="compare errors with diffusers' in bf16, and time nothing")
    parser.add_argument("--compile", choices=MODES, default=MODES[0], help=f"how diffusers is compiled (default {MODES[0]})")
    parser.add_argument("--graphs", action="store_true", help="capture kiln's short rows in CUDA graphs, unlike the program")
    args = parser.parse_args()
    rows = TIMED + CHECKED if args.dry else CHECKED if args.check else TIMED
    return session.checked(parser, args, list(dict.fromkeys(rows)), lambda row: f"{row.name} {row.size}")


def main() -> int:
    args = arguments()
    kiln = Kiln(args.library)
    if args.dry:
        return dry(args.rows, kiln)
    torch.backends.cudnn.benchmark = not args.check
    session.exact_references()
    about = session.about_device() | {"compile": None if args.check else args.compile}
    session.show(about)
    records = []
    with tempfile.TemporaryDirectory() as folder, session.opened(kiln) as stream, session.records(args.json) as write:
        models = Models(pathlib.Path(folder), kiln, "cuda")
        for row in args.rows:
            try:
                record = check_row(row, models) if args.check else time_row(row, models, stream, args)
            except Exception as error:  # out of memory, a refused operand: the other rows may do
                record = {"row": row.name, "size": row.size, "failed": str(error) or repr(error)}
            stream.synchronize()
            models.free(stream)
            records.append(record)
            print(line(record), flush=True)
            write(about | record)
    bad = [f"{r['row']} {r['size']}" for r in records if "failed" in r or not r.get("right", True)]
    print("wrong or failed: " + ("; ".join(bad) or "none"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
