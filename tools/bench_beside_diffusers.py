#!/usr/bin/env python3
"""Time kiln and the diffusers pipeline on one checkpoint, alternating, prompt to PNG.

    python tools/random_checkpoint.py FOLDER --model 4b
    python tools/bench_beside_diffusers.py FOLDER --kiln target/release/kiln --out RESULTS --sizes 512,1024
    target/release/kiln bench --from RESULTS/kiln-1024x1024-burst.json --compare RESULTS/diffusers-1024x1024-burst.json --svg beside.svg

There are three engines. kiln serves images on request (`kiln bench --on-request`). `eager` is diffusers' Flux2KleinPipeline in bf16, for
[dev] its Flux2Pipeline with prompts padded on the left. `compiled` is that pipeline with transformer and VAE decoder under torch.compile.
The VAE has channels last, and cuDNN chooses its algorithms by measuring. Every image has a new prompt and seed, the same for all engines of
a round, and ends as a PNG in memory. kiln uses its own encoder, diffusers Pillow's with its defaults, so tables also have times without the
PNG. Nothing waits inside an image: CUDA events around the text encoder and the decoder mark diffusers' stages.

Burst: rounds of one image for each engine, every other round backwards, with a rest before each image. Sustained: each engine without rest
for --sustained seconds, in two halves and opposite order; the first third of each half does not count. Ratios are medians of the ratios of
neighbors in burst, and ratios of medians in sustained. Above one kiln is faster.

With --transformer-only diffusers encodes a prompt first, and its text encoder leaves the GPU, because two programs with all of [dev] do not
fit on one. Only denoising is compared, and with `--kiln-args --low-memory` kiln keeps only what denoising needs on the GPU. If the folder
has no text encoder in bf16, diffusers gets random embeddings. --kiln-args can be given several times. Each stands for a program that
alternates with diffusers, one after the other:

    python tools/bench_beside_diffusers.py FOLDER --kiln target/release/kiln --out RESULTS --sizes 1024 --transformer-only \\
        --kiln-args=--low-memory --kiln-args "--transformer FOLDER/flux2_dev_fp8mixed.safetensors"

Needs a GPU and the packages in tools/requirements.txt. --dry needs little of either: it uses small sizes on the CPU, few rounds and no
compiling, and its figures mean nothing. Writes two JSON files for each size and way, which `kiln bench --svg` draws.
"""

import argparse
import contextlib
import copy
import io
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))

from compare_diffusers import GUIDANCE, PARTS, device_name, free, is_dev, load_pipeline, make_pipeline  # noqa: E402
from compare_diffusers import median_ms, sizes, to_bf16, versions  # noqa: E402
from turns import REST_S, Kiln, burst, quartiles, ratio, requests  # noqa: E402

MODE = "max-autotune-no-cudagraphs"
STAGES = ("encode", "denoise", "decode", "png")


def serve(args, more, width, height, steps):
    """kiln with additional arguments."""
    size = "--width", width, "--height", height, "--steps", steps
    arguments = "--model", args.checkpoint, "--backend", args.device, *size, *more.split()
    return Kiln("kiln", args.kiln.resolve(), arguments)


class Marks:
    """Points in time on a stream, or on the host if there is no GPU."""

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
        if self.device != "cuda":
            return b - a
        b.synchronize()
        return a.elapsed_time(b) / 1e3


@contextlib.contextmanager
def marked(owner, name, marks):
    """A method that marks the time before and after its call."""
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
    """The pipeline, eager or with its largest parts compiled."""

    def __init__(self, args, width, height, pipe, name):
        self.args, self.size, self.pipe, self.name = args, (width, height), pipe, name
        self.steps = None  # set before every measurement
        self.guidance = GUIDANCE if is_dev(args.checkpoint) else 1.0

    def call(self, seed, **more):
        width, height = self.size
        return self.pipe(
            width=width,
            height=height,
            num_inference_steps=self.steps,
            guidance_scale=self.guidance,
            generator=torch.Generator(self.args.device).manual_seed(seed),
            **more,
        ).images

    def image(self, seed, prompt):
        marks = Marks(self.args.device)
        start = time.perf_counter()
        with marked(self.pipe, "encode_prompt", marks), marked(self.pipe.vae, "decode", marks):
            image = self.call(seed, prompt=prompt, output_type="pil")[0]
        decoded = time.perf_counter()
        image.save(io.BytesIO(), "PNG")
        end = time.perf_counter()
        encode, denoise, decode = (marks.between(i, i + 1) for i in range(3))
        return dict(encode=encode, denoise=denoise, decode=decode, png=end - decoded, total=end - start)


class Denoiser(Diffusers):
    """The pipeline without text encoder and decoder. All its images have the same prompt."""

    def image(self, seed, _prompt):
        marks = Marks(self.args.device)
        start = time.perf_counter()
        with marked(self.pipe, "encode_prompt", marks):
            self.call(seed, prompt_embeds=self.args.prompt_embeds, output_type="latent")
        marks.set()
        denoise = marks.between(1, 2)
        return dict.fromkeys(STAGES, 0.0) | dict(denoise=denoise, total=time.perf_counter() - start)


def has_weights(folder, part):
    return any((folder / part).glob("*.safetensors"))


def encode_first(args, pipe):
    """The embeddings of a prompt, whose encoding is timed; afterwards the text encoder leaves the GPU. Without an encoder, random ones."""
    if pipe.text_encoder is None:
        return torch.randn(1, 512, pipe.transformer.config.joint_attention_dim, device=args.device, dtype=torch.bfloat16)
    _, prompt = next(requests())
    embeds, _ = pipe.encode_prompt(prompt)
    encode = median_ms(args.device, 3, lambda: pipe.encode_prompt(prompt))
    print(f"diffusers encodes a prompt in {encode:.1f} ms", flush=True)
    pipe.text_encoder = None
    free(args.device)
    return embeds


def compiled(args, pipe):
    """The pipeline's models with transformer and decoder compiled; `pipe` does not change."""
    transformer = torch.compile(pipe.transformer, mode=args.compile, dynamic=False)
    if args.transformer_only:
        return make_pipeline(args.checkpoint, dict(text_encoder=None, transformer=transformer, vae=pipe.vae))
    vae = copy.copy(pipe.vae)
    # A copied module shares the original's dict of submodules until it gets its own.
    vae._modules = dict(pipe.vae._modules)
    vae.decoder = torch.compile(pipe.vae.decoder, mode=args.compile, dynamic=False)
    return make_pipeline(args.checkpoint, dict(text_encoder=pipe.text_encoder, transformer=transformer, vae=vae))


def sustained(engines, seconds, asked):
    """Image after image. The first third of each stretch does not count: the clock falls until it meets the power limit."""
    times = {engine.name: [] for engine in engines}
    for engine in engines + engines[::-1]:
        stretch, end = [], time.perf_counter() + seconds / 2
        while time.perf_counter() < end or len(stretch) < 3:
            stretch.append(engine.image(*next(asked)))
        times[engine.name] += stretch[len(stretch) // 3 :]
    return times


def table(size, way, times, compared):
    """Lines with quartiles of the compared times, the ratio to kiln with and without the PNG, and medians of the stages."""
    png = "png" if compared == "total" else None
    of = lambda engine, less=None: [image[compared] - (image[less] if less else 0) for image in times[engine]]
    lines = []
    for engine, images in times.items():
        low, middle, high = (1e3 * value for value in quartiles(of(engine)))
        ratios = ratio(of(engine), of("kiln")), ratio(of(engine, png), of("kiln", png))
        stages = "".join(f"{1e3 * statistics.median(image[stage] for image in images):>9.1f}" for stage in STAGES)
        text = f"{size:<12}{way:<10}{engine:<28}{middle:>9.1f} ({low:.1f} to {high:.1f})"
        lines.append(f"{text:<80}{ratios[0]:>8.3f}{ratios[1]:>8.3f}{stages}{len(images):>5}")
    return lines


def save(args, stem, way, report, times):
    """Writes the files that `kiln bench --from` and `--compare` read."""
    stem = f"{stem}-{way}.json"
    (args.out / f"kiln-{stem}").write_text(json.dumps(report | dict(warm_s=times["kiln"])) + "\n")
    others = [dict(name=name, images_s=images) for name, images in times.items() if name != "kiln"]
    about = dict(machine=device_name(args.device), versions=versions()) | {key: report[key] for key in ("width", "height", "steps")}
    (args.out / f"diffusers-{stem}").write_text(json.dumps(dict(kind="beside", way=way, **about, engines=others)) + "\n")


def measure(args, pipe, width, height):
    """Measures one size in all ways, for each of kiln's arguments and each number of steps."""
    release, kind = versions()["diffusers"], Denoiser if args.transformer_only else Diffusers
    others = [kind(args, width, height, pipe, f"diffusers {release}")]
    if args.compile != "none":
        others.append(kind(args, width, height, compiled(args, pipe), f"diffusers {release}, compiled"))
    lines = []
    for number, more in enumerate(args.kiln_args, 1):
        for steps in args.steps:
            numbered = f"-{number}" if len(args.kiln_args) > 1 else ""
            numbered += f"-{steps}-steps" if len(args.steps) > 1 else ""
            lines.append(f"{steps} steps{f', kiln {more}' if more else ''}")
            lines += take_turns(args, [serve(args, more, width, height, steps), *others], steps, f"{width}x{height}", numbered)
    return lines


def take_turns(args, engines, steps, size, numbered):
    """Runs kiln, the first of these engines, and the others in all ways."""
    asked = requests()
    for engine in engines[1:]:
        engine.steps = steps
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
            save(args, f"{size}{numbered}", way, engines[0].report, times)
            lines += table(size, way, times, "denoise" if args.transformer_only else "total")
            print("\n".join(lines[-len(times) :]), flush=True)
        return lines
    finally:
        engines[0].close()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="model folder in the diffusers layout")
    parser.add_argument("--kiln", type=Path, required=True, help="the program")
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON files")
    parser.add_argument("--sizes", type=sizes, help="pixels: 512,768x1024 (default 512,1024; with --dry 64)")
    parser.add_argument("--steps", type=int, nargs="+", default=[4], help="steps of an image; several numbers are measured in turn")
    parser.add_argument("--rest", type=float, metavar="S", help=f"seconds before each image of a burst (default {REST_S}; with --dry none)")
    parser.add_argument("--rounds", type=int, help="images of each engine in burst (default 15; with --dry 3)")
    parser.add_argument("--warm-up", type=int, metavar="N", help="images of each engine before (default 3; with --dry 1)")
    parser.add_argument("--sustained", type=float, metavar="S", help="seconds of each engine (default 20, 0: none; with --dry 1)")
    parser.add_argument("--compile", help=f"mode of torch.compile, or none (default {MODE}; with --dry none)")
    parser.add_argument("--kiln-args", action="append", metavar="ARGS", help="more arguments for kiln; given again: for another kiln")
    only = "the text encoder of diffusers does not stay on the GPU, and only denoising is compared"
    parser.add_argument("--transformer-only", action="store_true", help=only)
    parser.add_argument("--dry", action="store_true", help="a small run on the CPU, to see that everything works")
    args = parser.parse_args()
    defaults = dict(sizes=sizes("64"), rounds=3, rest=0.0, warm_up=1, sustained=1.0, compile="none") if args.dry else {}
    defaults = dict(sizes=sizes("512,1024"), rounds=15, rest=REST_S, warm_up=3, sustained=20.0, compile=MODE) | defaults
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.kiln_args = args.kiln_args or [""]
    args.device = "cpu" if args.dry else "cuda"
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --dry needs none")
    if args.rounds < 1 or min(args.steps) < 1:
        parser.error("--rounds and --steps are 1 or more")
    return args


@torch.no_grad()
def main():
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.benchmark = True
    parts = [part for part in PARTS if not args.transformer_only or part != "text_encoder" or has_weights(args.checkpoint, part)]
    pipe = load_pipeline(args.checkpoint, args.device, parts=parts)
    to_bf16({part: getattr(pipe, part) for part in parts})
    pipe.vae.to(memory_format=torch.channels_last)
    print(f"{device_name(args.device)}, {versions()}", flush=True)
    args.prompt_embeds = encode_first(args, pipe) if args.transformer_only else None
    lines = [line for width, height in args.sizes for line in measure(args, pipe, width, height)]
    what = "ms, denoising" if args.transformer_only else "ms, prompt to PNG"
    head = f"{'':<12}{'':<10}{what:<28}{'median':>9} (quartiles)"
    print(f"\n{head:<80}{'x kiln':>8}{'no png':>8}{''.join(f'{stage:>9}' for stage in STAGES)}{'n':>5}")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
