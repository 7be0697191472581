#!/usr/bin/env python3
"""Compare kiln with the diffusers pipeline on one checkpoint, stage by stage.

    python tools/random_checkpoint.py FOLDER --model 4b
    python tools/compare_diffusers.py FOLDER --kiln target/release/kiln --out RESULTS --references 2

Every case (each size, and with --references the last size with reference images) runs three ways from the same noise: diffusers in fp32,
with nothing rounded to less; diffusers in bf16; kiln in its default precision. The errors of the last two are relative L2 distances from
the first: of the prompt embeddings, the reference tokens, velocity and latents of each step, and the decoded image. Latents of early steps
are mostly the noise, which has no error; the velocity is the transformer's own output.

The rule of tests/engine/model.rs applies: kiln's error is at most 1.2 times the error of diffusers in bf16. diffusers rounds the timestep
to bf16, which moves the result by more than all other roundings. So it runs once more with exact times, and the smaller error counts.

--lora adds an adapter to the weights in fp32 before they are rounded. kiln reads the adapter's file; with --kiln-args "--lora-mode branch"
it computes the adapter as branches.

model_index.json identifies a folder of FLUX.2 [dev], for which diffusers runs Flux2Pipeline. --guidance is one of its inputs. diffusers
rounds it like times, and keeps it exact where times are exact. --padding sets the side and the values of prompt padding in both programs.
In the fp32 run the weights stay in bf16, as stored, and are widened where they are used. The whole model and its text encoder then need 100
GB of a GPU instead of 200. With --lora they are in fp32 from the start.

Exits 1 when the rule is broken or token ids differ. Also prints diffusers' times in bf16, as `peer_ms`: medians after a warm-up. kiln's
times come from a single cold run and are not a benchmark.

Needs torch, diffusers, transformers, safetensors, Pillow and numpy, and no network. --out receives the references, noise, and kiln's dumps
and images.
"""

import argparse
import gc
import json
import shlex
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
from diffusers.utils import logging as diffusers_logging
from goldens.dev_pipeline import PADDINGS, LanguageModel, padded_pipeline
from goldens.model import to_bf16
from goldens.pipeline import record
from goldens.values import hashed_blocks, relative_l2, rms
from random_lora import add_lora
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Mistral3Config, Qwen2TokenizerFast, Qwen3Config, Qwen3ForCausalLM

ALLOWED = 1.2
PARTS = ("text_encoder", "transformer", "vae")
# The guidance of [dev] that both programs use by default.
GUIDANCE = 4.0


@dataclass(frozen=True)
class Case:
    name: str
    width: int
    height: int
    steps: int
    references: tuple = ()  # files


# --- Inputs -----------------------------------------------------------------


def draw_reference(number, size):
    """An image with edges, colors and slopes, equal on every call."""
    width, height = size
    y, x = np.mgrid[:height, :width]
    slope = (x * 255 // width + y * 255 // height)[..., None] // 2
    return PIL.Image.fromarray(((hashed_blocks(f"reference.{number}", width, height, 24) + slope) // 2).astype(np.uint8))


def noise_of(case):
    """Noise as the pipeline takes it, rounded so that all runs start from exactly equal noise."""
    shape = (1, 128, case.height // 16, case.width // 16)
    generator = torch.Generator("cpu").manual_seed(case.width * 10_000 + case.height)
    return torch.randn(shape, generator=generator).bfloat16().float()


def cases_of(args):
    plain = [Case(f"{w}x{h}", w, h, args.steps) for w, h in args.sizes]
    if not args.references:
        return plain
    files = []
    for number in range(args.references):
        size = args.reference_sizes[number % len(args.reference_sizes)]
        files.append(args.out / f"reference-{number + 1}.png")
        draw_reference(number, size).save(files[-1])
    last = plain[-1]
    return [*plain, Case(f"{last.name}+{len(files)}", last.width, last.height, last.steps, tuple(files))]


# --- kiln -------------------------------------------------------------------


def run_kiln(args, case, label="kiln", more=()):
    """Runs kiln once, with additional arguments. Returns its dump, and its seconds by stage."""
    stem = args.out / f"{label}-{case.name}"
    noise, dump = args.out / f"noise-{case.name}.safetensors", stem.with_suffix(".safetensors")
    save_file({"noise": noise_of(case).flatten(2)[0].T.contiguous()}, noise)
    command = [args.kiln.resolve(), "generate", "--model", args.checkpoint, "--backend", args.device, "--json", "--force"]
    command += ["--width", case.width, "--height", case.height, "--steps", case.steps, "--noise", noise]
    command += ["--dump", dump, "--output", stem.with_suffix(".png"), *shlex.split(args.kiln_args), *more]
    command += ["--lora", args.lora] if args.lora else []
    command += ["--guidance", args.guidance, "--padding", args.padding] if is_dev(args.checkpoint) else []
    command += [part for file in case.references for part in ("--reference", file)]
    command += ["--quiet", "--", args.prompt]
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE)
    if done.returncode != 0:
        sys.exit(f"kiln ended with {done.returncode}: {shlex.join(str(part) for part in command)}")
    report = json.loads(done.stdout)
    # The image's full path does not belong into the figures.
    return load_file(dump), report | dict(path=Path(report["path"]).name)


# --- diffusers --------------------------------------------------------------


def index_of(folder):
    return json.loads((folder / "model_index.json").read_text())


def is_dev(folder):
    """Whether a folder has FLUX.2 [dev]."""
    return index_of(folder)["_class_name"] == "Flux2Pipeline"


def exact_arithmetic():
    """Turns off TF32 and timing-based choice of algorithms, so that fp32 means fp32 and a run can be repeated."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    # Casting a model with to() warns about modules to keep in fp32; there are none.
    diffusers_logging.set_verbosity_error()


def stored_tensors(folder, device):
    """Names and tensors of a folder's files, on the device in their stored format."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt", device=device) as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


@torch.no_grad()
def fill(model, tensors):
    """Copies tensors into a model. Every tensor must have a place, and every place a tensor."""
    targets = model.state_dict()
    if getattr(model.config, "tie_word_embeddings", False):
        del targets["lm_head.weight"]
    for name, tensor in tensors:
        targets.pop(name).copy_(tensor)
    assert not targets, f"not in the files: {sorted(targets)}"


class NarrowLinear(torch.nn.Linear):
    """A layer with bf16 weights, widened to its compute type. They are a buffer, because models report their dtype by parameters."""

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype))


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def keep_narrow(model):
    """Keeps the weights of linear layers in their bf16, and everything else in fp32."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            assert module.bias is None
            weight = module.weight.data
            del module.weight
            module.register_buffer("weight", weight)
            module.__class__ = NarrowLinear
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model


def build_model(folder, part, device, narrow=False):
    """The model of a component in fp32, by its config and without the folder's weights. `narrow` keeps the weights in bf16.

    Not with from_pretrained, which makes the models in host memory first, unless `accelerate` is installed.
    """
    with torch.device(device), default_dtype(torch.bfloat16 if narrow else torch.float32):
        if part == "text_encoder" and is_dev(folder):
            model = LanguageModel(Mistral3Config.from_pretrained(folder / part).text_config)
        elif part == "text_encoder":
            model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(folder / part))
        else:
            kind = Flux2Transformer2DModel if part == "transformer" else AutoencoderKLFlux2
            model = kind.from_config(kind.load_config(folder / part))
    model = keep_narrow(model) if narrow else model.float()
    return model.eval().requires_grad_(False)


def load_model(folder, part, device, narrow=False):
    """The model of a component in fp32, with the folder's weights."""
    model = build_model(folder, part, device, narrow)
    fill(model, stored_tensors(folder / part, device))
    return model


def make_pipeline(folder, models, padding="left"):
    """The pipeline of a folder with these models. Only [dev]'s prompts have more than one kind of padding."""
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
    if is_dev(folder):
        return padded_pipeline(models, scheduler, (folder / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"), padding)
    pipe = Flux2KleinPipeline(
        **models,
        scheduler=scheduler,
        tokenizer=Qwen2TokenizerFast.from_pretrained(folder / "tokenizer"),
        is_distilled=index_of(folder).get("is_distilled", False),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def is_narrow(folder, part):
    """Whether weights are widened where they are used: in fp32 [dev]'s weights fit no GPU."""
    return is_dev(folder) and part != "vae"


def load_pipeline(folder, device, padding="left", narrow=True, parts=PARTS):
    """The pipeline in fp32, with some of its components."""
    models = {part: load_model(folder, part, device, narrow and is_narrow(folder, part)) for part in parts}
    return make_pipeline(folder, dict.fromkeys(PARTS) | models, padding)


def request(args, case, prompt_embeds=None):
    """The arguments of a pipeline's call, with the prompt or its embeddings."""
    images = [PIL.Image.open(file) for file in case.references]
    return dict(
        prompt=args.prompt if prompt_embeds is None else None,
        prompt_embeds=prompt_embeds,
        image=images or None,
        width=case.width,
        height=case.height,
        num_inference_steps=case.steps,
        guidance_scale=args.guidance if args.guidance is not None else 1.0,
        latents=noise_of(case),
    )


def run_diffusers(pipe, args, case, exact_time=False, prompt_embeds=None):
    """Runs the pipeline. Returns the tensors of kiln's dump, on the CPU."""
    run, _ = record(pipe, exact_time, **request(args, case, prompt_embeds), output_type="pt")
    outputs = dict(prompt_embeds=run.prompt_embeds)
    if prompt_embeds is None:
        outputs["token_ids"] = run.token_ids
    for number in range(1, len(case.references) + 1):
        outputs[f"reference.{number}.tokens"] = run.reference_tokens(number)
    for step, (velocity, latents) in enumerate(zip(run.velocities, run.steps), 1):
        outputs[f"velocity.{step}"] = velocity
        outputs[f"latents.{step}"] = latents
    outputs.update(image=run.decoded, sigmas=pipe.scheduler.sigmas)
    return {name: tensor.float().cpu() for name, tensor in outputs.items()}


# --- Times ------------------------------------------------------------------


def now(device):
    if device == "cuda":
        torch.cuda.synchronize()
    return 1000 * time.perf_counter()


def median_ms(device, repeats, work):
    times = []
    for _ in range(repeats + 1):
        started = now(device)
        work()
        times.append(now(device) - started)
    return statistics.median(times[1:])


def step_ms(pipe, args, case):
    """Times from the end of a step to the end of the next. The first step of a call does not count."""
    times = []
    for _ in range(args.repeats + 1):
        ends = []

        def on_step_end(_pipe, _step, _timestep, _tensors):
            ends.append(now(args.device))
            return {}

        pipe(**request(args, case), output_type="latent", callback_on_step_end=on_step_end)
        times.append([end - start for start, end in zip(ends, ends[1:])])
    return statistics.median([t for run in times[1:] for t in run]) if case.steps > 1 else None


def peer_times(pipe, args, case):
    latents = torch.randn(1, 32, case.height // 8, case.width // 8, device=args.device, dtype=pipe.vae.dtype)
    with torch.no_grad():
        return dict(
            step=step_ms(pipe, args, case),
            text_encode=median_ms(args.device, args.repeats, lambda: pipe.encode_prompt(args.prompt)),
            vae_decode=median_ms(args.device, args.repeats, lambda: pipe.vae.decode(latents)),
            whole=median_ms(args.device, args.repeats, lambda: pipe(**request(args, case), output_type="pil")),
        )


def compiled_step_ms(pipe, args, case):
    try:
        return step_ms(pipe, args, case)
    except Exception as error:  # any failure of the compiler: the comparison is done, and this an extra
        print(f"{case.name}: torch.compile failed: {error}")
        return None


# --- Comparison -------------------------------------------------------------


def denoised(case):
    """The names of the transformer's outputs, and of the image."""
    return [*(f"{what}.{step}" for step in range(1, case.steps + 1) for what in ("velocity", "latents")), "image"]


def stages(case):
    references = [f"reference.{number}.tokens" for number in range(1, len(case.references) + 1)]
    return ["prompt_embeds", *references, *denoised(case)]


def with_velocities(dump, sigmas):
    """Adds velocities to kiln's dump, which lacks them. Its latents are exact enough to compute them."""
    moves = sigmas.diff().tolist()
    return dump | {f"velocity.{i}": (dump[f"latents.{i}"] - dump[f"latents.{i - 1}"]) / d for i, d in enumerate(moves, 1)}


def compare(case, exact, rounded, timed, kiln):
    """Rows of the table for one case, and whether the token ids agree."""
    rows, kiln = [], with_velocities(kiln, exact["sigmas"])
    for stage in stages(case):
        assert kiln[stage].shape == exact[stage].shape, f"{stage}: {kiln[stage].shape}, not {exact[stage].shape}"
        plain, exact_time, own = (relative_l2(run[stage], exact[stage]) for run in (rounded, timed, kiln))
        ratio = own / min(plain, exact_time)
        row = dict(case=case.name, stage=stage, rms=rms(exact[stage]), bf16=plain, bf16_exact_time=exact_time, kiln=own)
        # NaN is not within any limit.
        rows.append(row | dict(ratio=ratio, ok=ratio <= ALLOWED))
    return rows, torch.equal(kiln["token_ids"].float(), exact["token_ids"])


def free(device):
    """Frees memory, including models with reference cycles."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def device_name(device):
    return torch.cuda.get_device_name() if device == "cuda" else device


def print_rows(rows):
    print("\ncase            stage                  rms     bf16      exact time  kiln      kiln / bf16")
    for row in rows:
        print(
            f"{row['case']:<15} {row['stage']:<20} {row['rms']:7.3f}  {row['bf16']:.2e}  {row['bf16_exact_time']:.2e}"
            f"    {row['kiln']:.2e}  {row['ratio']:.2f}{'' if row['ok'] else '  above ' + str(ALLOWED)}"
        )


def print_times(times):
    print(f"\n{'':<28} text encode      step  vae decode     whole")

    def line(*cells):
        print("{:<14} {:<13} {:>11} {:>9} {:>11} {:>9}".format(*cells))

    for name, (peer, compiled, kiln) in times.items():
        line(name, "peer_ms", *(ms(peer[key]) for key in ("text_encode", "step", "vae_decode", "whole")))
        if compiled is not None:
            line("", "compiled_ms", "", ms(compiled), "", "")
        seconds = kiln["seconds"]
        own = (seconds["encode"], seconds["denoise"] / kiln["steps"], seconds["decode"])
        line("", "kiln_ms, cold", *(ms(1000 * value) for value in own), "")


def ms(value):
    return f"{value:.1f}" if value is not None else "-"


def versions():
    found = {}
    for package in ("diffusers", "transformers", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = sys.modules[package].__version__
    return found


def begin(args):
    """The cases, and a function that reports progress with the time since the start."""
    clock = time.monotonic()

    def said(what):
        print(f"{time.monotonic() - clock:6.1f} s  {what}", flush=True)

    args.out.mkdir(parents=True, exist_ok=True)
    exact_arithmetic()
    return cases_of(args), said


def run(args):
    cases, said = begin(args)
    # kiln runs first, so that it does not share a GPU with diffusers.
    dumps, reports = {}, {}
    for case in cases:
        dumps[case.name], reports[case.name] = run_kiln(args, case)
        said(f"kiln {case.name}: {reports[case.name]['model']}, {reports[case.name]['precision']}")
    # An adapter is added to weights in fp32.
    pipe = load_pipeline(args.checkpoint, args.device, args.padding, narrow=not args.lora)
    if args.lora:
        add_lora(pipe.transformer, args.lora)
    said(f"diffusers loaded, {versions()}")
    exact, rounded, timed, times = {}, {}, {}, {}
    for case in cases:
        exact[case.name] = run_diffusers(pipe, args, case)
        said(f"diffusers fp32 {case.name}")
    to_bf16({part: getattr(pipe, part) for part in PARTS})
    free(args.device)
    for case in cases:
        rounded[case.name] = run_diffusers(pipe, args, case)
        timed[case.name] = run_diffusers(pipe, args, case, exact_time=True)
        said(f"diffusers bf16 {case.name}")

    rows, ids = [], {}
    for name, case in {case.name: case for case in cases}.items():
        found, ids[name] = compare(case, exact[name], rounded[name], timed[name], dumps[name])
        rows += found
    print_rows(rows)
    print(flush=True)

    for case in cases:
        times[case.name] = peer_times(pipe, args, case)
        said(f"timed {case.name}")
    compiled = {}
    if args.compile:
        pipe.transformer.compile(dynamic=False)
        for case in cases:
            compiled[case.name] = compiled_step_ms(pipe, args, case)
            said(f"timed {case.name}, compiled")
    print_times({name: (peer, compiled.get(name), reports[name]) for name, peer in times.items()})

    broken = [f"{row['case']}: {row['stage']} is {row['ratio']:.2f} times off" for row in rows if not row["ok"]]
    broken += [f"{name}: token ids differ" for name, same in ids.items() if not same]
    more = dict(allowed=ALLOWED) | (dict(guidance=args.guidance, padding=args.padding) if is_dev(args.checkpoint) else {})
    return finish(args, more | dict(rows=rows, peer_ms=times, peer_compiled_step_ms=compiled, kiln=reports, broken=broken))


def finish(args, figures):
    """Writes the figures, prints broken rules, and returns the exit code."""
    if args.json:
        about = dict(device=device_name(args.device), versions=versions(), prompt=args.prompt, steps=args.steps)
        args.json.write_text(json.dumps(about | figures, indent=1) + "\n")
    print("\n" + "\n".join(figures["broken"] or ["kiln is as close to fp32 as the rules ask, everywhere"]))
    return 1 if figures["broken"] else 0


def sizes(text):
    """Pixels such as `512,768x1024` as pairs."""
    pairs = []
    for item in text.split(","):
        width, _, height = item.partition("x")
        pairs.append((int(width), int(height or width)))
    return pairs


def arguments(description):
    """The command line that all comparisons of kiln with the pipeline share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("checkpoint", type=Path, help="model folder in the diffusers layout")
    parser.add_argument("--kiln", type=Path, required=True, help="the program")
    parser.add_argument("--out", type=Path, required=True, help="folder for files along the way")
    parser.add_argument("--sizes", type=sizes, default=sizes("512,1024"), help="pixels: 512,768x1024")
    parser.add_argument("--references", type=int, default=0, metavar="N", help="reference images, with the last size")
    # The model gets the first unchanged; the second is scaled down and cropped.
    parser.add_argument("--reference-sizes", type=sizes, default=sizes("1024,1300x1100"), metavar="SIZES")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompt", default="a red fox in the snow, looking at a sign that says \u201cKiln\u201d")
    parser.add_argument("--guidance", type=float, metavar="SCALE", help=f"guidance of FLUX.2 [dev] [default: {GUIDANCE}]")
    parser.add_argument("--padding", choices=PADDINGS, help="padding of prompts of FLUX.2 [dev] [default: left]")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lora", metavar="FILE:SCALE", help="an adapter, as random_lora.py writes it")
    parser.add_argument("--kiln-args", default="", metavar="ARGS", help="more arguments for kiln")
    return parser


def parse(parser):
    """The arguments, with defaults that depend on the model."""
    args = parser.parse_args()
    if is_dev(args.checkpoint):
        args.guidance = GUIDANCE if args.guidance is None else args.guidance
        args.padding = args.padding or PADDINGS[0]
    elif args.guidance is not None or args.padding:
        parser.error("--guidance and --padding are for FLUX.2 [dev]")
    return args


def main():
    parser = arguments("Compare kiln with diffusers on one checkpoint.")
    parser.add_argument("--repeats", type=int, default=3, help="measured calls of each timed part")
    parser.add_argument("--compile", action="store_true", help="also time the transformer under torch.compile")
    return run(parse(parser))


if __name__ == "__main__":
    sys.exit(main())
