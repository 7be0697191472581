"""tests/fixtures/builtin.*: the built-in model, models/builtin, run by diffusers.

One prompt and one edit of a reference image, with kiln's weights. Run again when these change.

The reference runs in fp64 here, rounded to F32 when stored: on images as flat as these the group
norms of PyTorch lose three digits in fp32, and kiln would be held to their errors.

tests/fixtures/builtin.safetensors, F32 where not said otherwise:
    noise                  [N, 128]    the initial noise of all cases, token order
    <case>.token_ids   I32 [T]         the input of the text encoder
    <case>.prompt_embeds   [T/8, 384]  every 8th of the rows
    <case>.latents         [N, 128]    after the last step, still normalized
    <case>.image       U16 [H/8, W/8, 3]  every 8th pixel of every 8th row, round(65535 * v)

tests/fixtures/builtin.json:
    versions, weights (the CRC-32 of each safetensors file), and the cases: prompt, size,
    steps, the reference image if there is one, and the distance of the pipeline in bf16
    from fp64.

A reference image is a disc on a plain background: pixel (y, x) has the disc's color
where (x - cx)^2 + (y - cy)^2 <= r^2.
"""

import functools
import json
import zlib
from types import SimpleNamespace

import numpy as np
import PIL.Image
import torch
from diffusers import Flux2KleinPipeline

from goldens.files import ROOT, package_versions
from goldens.model import to_bf16
from goldens.pipeline import run_pipeline
from goldens.values import PACKAGES, Recording, to_u16

FOLDER = ROOT / "models" / "builtin"
SEED = 7
DISC = dict(width=256, height=256, cx=128, cy=128, r=58, color=[214, 40, 40], background=[40, 80, 205])
CASES = (
    dict(name="prompt", prompt="a large red star on a blue background", reference=None),
    dict(name="edit", prompt="make the circle green", reference=DISC),
)


@functools.cache
def defaults():
    """kiln.json: the settings in which this model differs from klein's defaults."""
    return json.loads((FOLDER / "kiln.json").read_text(encoding="utf-8"))


def disc(reference):
    y, x = np.mgrid[: reference["height"], : reference["width"]]
    inside = (x - reference["cx"]) ** 2 + (y - reference["cy"]) ** 2 <= reference["r"] ** 2
    pixels = np.where(inside[..., None], reference["color"], reference["background"]).astype(np.uint8)
    return PIL.Image.fromarray(pixels)


def noise():
    """The noise of all cases and precisions."""
    own = defaults()
    shape = (1, 128, own["height"] // 16, own["width"] // 16)
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(SEED))


def run_case(pipe, case, exact_time=False):
    """Every output of one case, at full size and precision."""
    own = defaults()
    run = run_pipeline(
        pipe,
        SimpleNamespace(**case, seed=SEED, width=own["width"], height=own["height"], steps=own["steps"]),
        exact_time,
        image=None if case["reference"] is None else [disc(case["reference"])],
        guidance_scale=own["guidance"],
        max_sequence_length=own["max_text_tokens"],
        text_encoder_out_layers=tuple(own["text_layers"]),
        latents=noise(),
    )
    floats = {name: getattr(run, name).float() for name in ("noise", "prompt_embeds", "latents", "image")}
    return floats | dict(token_ids=run.token_ids)


def outputs(run):
    return {name: run[name] for name in ("prompt_embeds", "latents", "image")}


def stored(run):
    return dict(
        token_ids=run["token_ids"].to(torch.int32),
        prompt_embeds=run["prompt_embeds"][::8],
        latents=run["latents"],
        image=to_u16(run["image"][::8, ::8]),
    )


def compute():
    own, recording = defaults(), Recording()
    pipe = Flux2KleinPipeline.from_pretrained(FOLDER, dtype=torch.float64)
    pipe.set_progress_bar_config(disable=True)
    exact = [run_case(pipe, case) for case in CASES]
    to_bf16(dict(transformer=pipe.transformer, vae=pipe.vae, text_encoder=pipe.text_encoder))
    recording.tensors["noise"] = np.ascontiguousarray(exact[0]["noise"].numpy())
    for case, fp64 in zip(CASES, exact):
        bf16 = [run_case(pipe, case, exact_time) for exact_time in (False, True)]
        assert torch.equal(fp64["noise"], exact[0]["noise"])
        assert all(torch.isfinite(value).all() for value in fp64.values()), case["name"]
        shape = {key: own[key] for key in ("width", "height", "steps")}
        recording.add(case | shape, stored(fp64), outputs(fp64), *map(outputs, bf16))
    files = sorted(FOLDER.rglob("*.safetensors"))
    summary = dict(
        versions=package_versions(*PACKAGES, "pillow"),
        weights={path.relative_to(FOLDER).as_posix(): f"{zlib.crc32(path.read_bytes()):08x}" for path in files},
        cases=recording.cases,
    )
    return recording.golden("builtin", summary)
