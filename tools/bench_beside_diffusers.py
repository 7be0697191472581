#!/usr/bin/env python3
"""Time kiln beside the real diffusers pipeline on one checkpoint, taking turns, prompt to PNG.

    python tools/random_checkpoint.py FOLDER --model 4b
    python tools/bench_beside_diffusers.py FOLDER --kiln target/release/kiln --out RESULTS --sizes 512,1024
    target/release/kiln bench --from RESULTS/kiln-1024x1024-burst.json --beside RESULTS/diffusers-1024x1024-burst.json --svg beside.svg

Three engines: kiln, which serves images on request (`kiln bench --on-request`); diffusers' Flux2KleinPipeline, for [dev] its Flux2Pipeline with
prompts padded on the left, in bf16 as it is (`eager`); and the same with transformer and VAE decoder under torch.compile (`compiled`). The VAE has channels last, and cuDNN chooses its
algorithms by measuring. Every image has a new prompt and seed, the same for all engines of a round, and ends as a PNG in memory: kiln's
own encoder there, Pillow's with its defaults here, so tables also have times without the PNG. Nothing is waited for inside an image:
the stages of diffusers are told by CUDA events around the text encoder and the decoder.

Burst: rounds of one image for each engine, every other round backwards, with a rest before each image. Sustained: each engine without
rest for --sustained seconds in two halves and opposite order, of each of which the first third does not count. Ratios are medians of the
ratios of neighbours in burst, and ratios of medians in sustained; above one kiln is faster.

Needs a GPU, and what tools/requirements.txt pins. With --dry neither is asked for much: small sizes on the CPU, few rounds, no compiling;
figures of it mean nothing. Writes two JSON files for each size and way, which `kiln bench --svg` draws.
"""

import argparse
import contextlib
import copy
import io
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))

from compare_diffusers import GUIDANCE, PARTS, device_name, is_dev, load_pipeline, make_pipeline, sizes, to_bf16, versions  # noqa: E402
from peer_timing import quartiles, ratio  # noqa: E402

MODE = "max-autotune-no-cudagraphs"
# Before each image of a burst, so that the clock of the GPU is high again.
REST_S = 0.5
STAGES = ("encode", "denoise", "decode", "png")


def requests():
    """A new seed and a new prompt for every image."""
    subjects = ("a red fox", "an old lighthouse", "a glass teapot", "two sailing boats", "a street musician")
    places = ("in the snow", "at dusk", "on a wooden table", "under a starry sky", "in the rain", "in a quiet street", "at the sea")
    for number in itertools.count(1):
        yield number, f"{subjects[number % len(subjects)]} {places[number % len(places)]}, number {number}"


class Kiln:
    """The program, which generates an image for each line that it reads."""

    name = "kiln"

    def __init__(self, args, width, height):
        command = [args.kiln.resolve(), "bench", "--on-request", "--quiet", "--model", args.checkpoint, "--backend", args.device]
        command += ["--width", width, "--height", height, "--steps", args.steps, *args.kiln_args.split()]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.process = subprocess.Popen([str(part) for part in command], **pipes)
        self.report = self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"kiln ended with {self.process.wait()}")
        return json.loads(line)

    def image(self, seed, prompt):
        start = time.perf_counter()
        self.process.stdin.write(f"{seed} {prompt}\n")
        self.process.stdin.flush()
        times = self.answer()
        return {stage: times[stage] for stage in STAGES} | dict(total=time.perf_counter() - start)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Marks:
    """Moments of a stream, or of the host where there is no GPU."""

    def __init__(self, device):
        self.device, self.all = device, []

    def set(self):
        if self.device == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self.all.append(mark)

    def between(self, first, second):
        a, b = self.all[first], self.all[second]
        return a.elapsed_time(b) / 1e3 if self.device == "cuda" else b - a


@contextlib.contextmanager
def marked(owner, name, marks):
    """A method with marks before and after its call."""
    method = getattr(owner, name)

    def call(*args, **kwargs):
        marks.set()
        result = method(*args, **kwargs)
        marks.set()
        return result

    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name)


class Diffusers:
    """The pipeline, as it is or with its largest parts compiled."""

    def __init__(self, args, width, height, pipe, name):
        self.args, self.size, self.pipe, self.name = args, (width, height), pipe, name
        self.guidance = GUIDANCE if is_dev(args.checkpoint) else 1.0

    def image(self, seed, prompt):
        width, height = self.size
        marks = Marks(self.args.device)
        start = time.perf_counter()
        with marked(self.pipe, "encode_prompt", marks), marked(self.pipe.vae, "decode", marks):
            generator = torch.Generator(self.args.device).manual_seed(seed)
            image = self.pipe(
                prompt=prompt,
                width=width,
                height=height,
                num_inference_steps=self.args.steps,
                guidance_scale=self.guidance,
                generator=generator,
                output_type="pil",
            ).images[0]
        decoded = time.perf_counter()
        image.save(io.BytesIO(), "PNG")
        end = time.perf_counter()
        # The pixels were read back, so that all marks have been reached.
        encode, denoise, decode = (marks.between(i, i + 1) for i in range(3))
        return dict(encode=encode, denoise=denoise, decode=decode, png=end - decoded, total=end - start)

    def close(self):
        pass


def compiled(args, pipe):
    """The same models with transformer and decoder compiled; `pipe` stays as it is."""
    vae = copy.copy(pipe.vae)
    # A copy of a module has the parts of the original, and not yet a list of its own of them.
    vae._modules = dict(pipe.vae._modules)
    vae.decoder = torch.compile(pipe.vae.decoder, mode=args.compile, dynamic=False)
    transformer = torch.compile(pipe.transformer, mode=args.compile, dynamic=False)
    return make_pipeline(args.checkpoint, dict(text_encoder=pipe.text_encoder, transformer=transformer, vae=vae))


def burst(engines, rounds, rest, asked):
    """One image for each engine and round."""
    times = {engine.name: [] for engine in engines}
    for i in range(rounds):
        request = next(asked)
        for engine in engines if i % 2 == 0 else reversed(engines):
            time.sleep(rest)
            times[engine.name].append(engine.image(*request))
    return times


def sustained(engines, seconds, asked):
    """Image after image, without the first third of each stretch: the clock falls until the power limit is met."""
    times = {engine.name: [] for engine in engines}
    for engine in engines + engines[::-1]:
        stretch, end = [], time.perf_counter() + seconds / 2
        while time.perf_counter() < end or len(stretch) < 3:
            stretch.append(engine.image(*next(asked)))
        times[engine.name] += stretch[len(stretch) // 3 :]
    return times


def table(size, way, times):
    """Lines with quartiles of the total, the ratio to kiln with and without the PNG, and medians of the stages."""
    of = lambda engine, *stages: [image["total"] - sum(image[stage] for stage in stages) for image in times[engine]]
    lines = []
    for engine, images in times.items():
        low, middle, high = (1e3 * value for value in quartiles(of(engine)))
        ratios = ratio(of(engine), of("kiln")), ratio(of(engine, "png"), of("kiln", "png"))
        stages = "".join(f"{1e3 * statistics.median(image[stage] for image in images):>9.1f}" for stage in STAGES)
        text = f"{size:<12}{way:<10}{engine:<28}{middle:>9.1f} ({low:.1f} to {high:.1f})"
        lines.append(f"{text:<80}{ratios[0]:>8.3f}{ratios[1]:>8.3f}{stages}{len(images):>5}")
    return lines


def save(args, width, height, way, report, times):
    """What `kiln bench --from` and `--beside` read."""
    stem = f"{width}x{height}-{way}.json"
    (args.out / f"kiln-{stem}").write_text(json.dumps(report | dict(warm_s=times["kiln"])) + "\n")
    others = [dict(name=name, images_s=images) for name, images in times.items() if name != "kiln"]
    about = dict(machine=device_name(args.device), width=width, height=height, steps=args.steps, versions=versions())
    (args.out / f"diffusers-{stem}").write_text(json.dumps(dict(kind="beside", way=way, **about, engines=others)) + "\n")


def measure(args, pipe, width, height):
    """All ways for one size."""
    release = versions()["diffusers"]
    engines = [Kiln(args, width, height), Diffusers(args, width, height, pipe, f"diffusers {release}")]
    if args.compile != "none":
        engines.append(Diffusers(args, width, height, compiled(args, pipe), f"diffusers {release}, compiled"))
    asked, size = requests(), f"{width}x{height}"
    try:
        for engine in engines:
            for _ in range(args.warm_up):  # compiles, plans, allocates
                engine.image(*next(asked))
            print(f"{size}: {engine.name} is warm", flush=True)
        ways = dict(burst=lambda: burst(engines, args.rounds, args.rest, asked))
        if args.sustained > 0:
            ways["sustained"] = lambda: sustained(engines, args.sustained, asked)
        lines = []
        for way, run in ways.items():
            times = run()
            save(args, width, height, way, engines[0].report, times)
            lines += table(size, way, times)
        return lines
    finally:
        for engine in engines:
            engine.close()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="model folder in the diffusers layout")
    parser.add_argument("--kiln", type=Path, required=True, help="the program")
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON files")
    parser.add_argument("--sizes", type=sizes, help="pixels: 512,768x1024 (default 512,1024; with --dry 64)")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, help="images of each engine in burst (default 15; with --dry 3)")
    parser.add_argument("--sustained", type=float, metavar="S", help="seconds of each engine (default 20, 0: none; with --dry 1)")
    parser.add_argument("--compile", help=f"mode of torch.compile, or none (default {MODE}; with --dry none)")
    parser.add_argument("--kiln-args", default="", metavar="ARGS", help="more arguments for kiln")
    parser.add_argument("--dry", action="store_true", help="a small run on the CPU, to see that everything works")
    args = parser.parse_args()
    defaults = dict(sizes=sizes("64"), rounds=3, sustained=1.0, compile="none") if args.dry else {}
    defaults = dict(sizes=sizes("512,1024"), rounds=15, sustained=20.0, compile=MODE) | defaults
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.device, args.rest, args.warm_up = ("cpu", 0.0, 1) if args.dry else ("cuda", REST_S, 3)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --dry needs none")
    if args.rounds < 1 or args.steps < 1:
        parser.error("--rounds and --steps are 1 or more")
    return args


@torch.no_grad()
def main():
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.benchmark = True
    pipe = load_pipeline(args.checkpoint, args.device)
    to_bf16({part: getattr(pipe, part) for part in PARTS})
    pipe.vae.to(memory_format=torch.channels_last)
    print(f"{device_name(args.device)}, {versions()}", flush=True)
    lines = [line for width, height in args.sizes for line in measure(args, pipe, width, height)]
    head = f"{'':<12}{'':<10}{'ms, prompt to PNG':<28}{'median':>9} (quartiles)"
    print(f"\n{head:<80}{'x kiln':>8}{'no png':>8}{''.join(f'{stage:>9}' for stage in STAGES)}{'n':>5}")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
