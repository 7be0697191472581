"""tests/fixtures/editing.*: image to image and masked edits, on the tiny models of klein and [dev].

tests/fixtures/editing.safetensors, F32 from the fp32 run where not said otherwise:
    <case>.init            [N, 128]     the init image as the pipeline encodes it: mean latents, patchified, normalized; not in
                                        `img2img` and `inpaint_kv`, which have the image of `inpaint`
    <case>.start           [N, 128]     where denoising starts, unless it is pure noise
    <case>.latents.<i>     [N, 128]     after step i = 1, 2, ...
    <case>.image       U16 [H, W, 3]    round(65535 * v), v in [0, 1]; before anything is pasted
    <case>.mask        U8  [N]          1 for tokens that are repainted, row by row

tests/fixtures/editing.json:
    cases            the pipeline calls; `image` and `references` are indices of test images, as in modes.py, with their sizes
    schedules        for each number of steps and of tokens the sigmas of runs with a strength of whole steps, FNV-1a 64 of their bytes
    resized          for each size the FNV-1a 64 of an image of 1 and of 3 channels, resized by Pillow with BILINEAR
    composites       FNV-1a 64 of Pillow's Image.composite
    and the bf16 errors, as in goldens.json.

`inpaint*` are Flux2KleinInpaintPipeline. It always has the init image as its first reference. `img2img` is the same pipeline with a mask
that covers everything and the reference taken out. KV and [dev] have no such pipeline: there a callback restores the tokens that are
kept after each step of the usual one.

The mask of a case has the value 1 for token i where byte i of the hash of "mask.<case>" is below 128.
"""

from dataclasses import asdict, dataclass

import numpy as np
import PIL.Image
import torch
from diffusers import Flux2KleinInpaintPipeline, Flux2KleinKVPipeline, FlowMatchEulerDiscreteScheduler

from goldens import dev
from goldens.dev_pipeline import padded_pipeline
from goldens.files import checksum, package_versions
from goldens.model import SCHEDULER, build_components, to_bf16
from goldens.modes import kept_processors
from goldens.pipeline import Run, make_pipeline
from goldens.text import tiny_mistral_json
from goldens.values import PACKAGES, Recording, hash_bytes, hashed_blocks, to_u16

PROMPT = "the fox in a red car"


@dataclass(frozen=True)
class EditCase:
    name: str
    kind: str  # inpaint, img2img, kv or dev
    width: int
    height: int
    steps: int
    strength: float
    seed: int
    guidance: float
    image: int
    distilled: bool = True
    # Index, width and height.
    reference: tuple[int, int, int] | None = None
    # Whether the init image is the first reference.
    is_reference: bool = True
    prompt: str = PROMPT


CASES = (
    EditCase("inpaint", "inpaint", 128, 96, 4, 1.0, 3, 1.0, 0),
    EditCase("inpaint_partial", "inpaint", 80, 96, 4, 0.5, 12345678901, 1.0, 2),
    EditCase("inpaint_reference", "inpaint", 96, 80, 2, 1.0, 5, 1.0, 1, reference=(3, 64, 112)),
    EditCase("inpaint_base", "inpaint", 80, 64, 6, 2 / 3, 7, 3.5, 4, distilled=False),
    EditCase("img2img", "img2img", 128, 96, 4, 0.75, 3, 1.0, 0, is_reference=False),
    EditCase("inpaint_kv", "kv", 128, 96, 4, 1.0, 3, 1.0, 0),
    EditCase("inpaint_dev", "dev", 96, 64, 3, 1.0, 11, 4.0, 2),
)


def pixels(index, width, height):
    return hashed_blocks(f"image.{index}", width, height).astype(np.uint8)


def test_image(index, width, height):
    return PIL.Image.fromarray(pixels(index, width, height))


def repainted(case):
    """The tokens that are repainted."""
    count = case.width // 16 * (case.height // 16)
    return hash_bytes(f"mask.{case.name}", count) < (256 if case.kind == "img2img" else 128)


def mask_image(case):
    tokens = repainted(case).reshape(case.height // 16, case.width // 16)
    return PIL.Image.fromarray((tokens * 255).astype(np.uint8).repeat(16, 0).repeat(16, 1))


def encoded(vae, image):
    """An image as tokens, by the steps of the pipeline."""
    x = torch.from_numpy(2.0 * (image.astype(np.float32) / np.float32(255)) - 1.0).permute(2, 0, 1)[None].to(vae.dtype)
    z = vae.encode(x).latent_dist.mode()
    z = Flux2KleinInpaintPipeline._patchify_latents(z)
    mean = vae.bn.running_mean.view(1, -1, 1, 1).to(z)
    deviation = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps).to(z)
    return Flux2KleinInpaintPipeline._pack_latents((z - mean) / deviation)[0]


class EditRun(Run):
    """Also keeps where denoising starts, and restores what is kept where the pipeline does not."""

    restore = None

    def on_transformer(self, module, args, kwargs):
        if self.inputs is None:
            ids, inputs = kwargs["img_ids"][0], kwargs["hidden_states"][0]
            self.start = inputs[ids[:, 0] == 0].clone()
        super().on_transformer(module, args, kwargs)

    def on_step_end(self, pipe, step, timestep, tensors):
        if self.restore is None:
            return super().on_step_end(pipe, step, timestep, tensors)
        init, noise, keep = self.restore
        sigma = pipe.scheduler.sigmas[step + 1].to(init)
        latents = tensors["latents"].clone()
        latents[0][keep] = ((1 - sigma) * init + sigma * noise)[keep].to(latents)
        super().on_step_end(pipe, step, timestep, tensors | dict(latents=latents))
        return dict(latents=latents)


def run_edit(klein, dev_models, case, exact_time=False):
    models = dev_models if case.kind == "dev" else klein
    init_image, mask = test_image(case.image, case.width, case.height), mask_image(case)
    keep = torch.from_numpy(~repainted(case))
    seeded = torch.Generator("cpu").manual_seed(case.seed)
    arguments = dict(prompt=case.prompt, num_inference_steps=case.steps, generator=seeded, output_type="np")
    with torch.no_grad():
        init = encoded(models["vae"], np.asarray(init_image))
    if case.kind in ("inpaint", "img2img"):
        pipe = make_pipeline(models, case.distilled, Flux2KleinInpaintPipeline)
        arguments.update(image=init_image, mask_image=mask, strength=case.strength, guidance_scale=case.guidance)
        if case.reference is not None:
            arguments.update(image_reference=test_image(*case.reference))
        if not case.is_reference:
            without_reference(pipe)
    else:
        size = dict(width=case.width, height=case.height)
        if case.kind == "kv":
            pipe = make_pipeline(models, True, Flux2KleinKVPipeline)
        else:
            pipe = padded_pipeline(models, FlowMatchEulerDiscreteScheduler(**SCHEDULER), tiny_mistral_json(), "left")
            size.update(guidance_scale=case.guidance)
        arguments.update(image=[init_image], **size)
    with kept_processors(models["transformer"]):
        run = EditRun(pipe, exact_time)
        if case.kind in ("kv", "dev"):
            rows, columns = case.height // 16, case.width // 16
            again = torch.Generator("cpu").manual_seed(case.seed)
            noise = torch.randn(1, 128, rows, columns, generator=again, dtype=init.dtype)[0].reshape(128, -1).T
            run.restore = init, noise, keep
        try:
            names = ["latents", "prompt_embeds"]
            pipe(callback_on_step_end=run.on_step_end, callback_on_step_end_tensor_inputs=names, **arguments)
        finally:
            run.close()
    run.image = (run.decoded * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 0).float()
    # The encoder adds in another order on a batch of another layout.
    far = (run.steps[-1] - init)[keep].abs().max().item() if keep.any() else 0.0
    assert far < 1e-4 or init.dtype == torch.bfloat16, f"{case.name}: what is kept is {far} from the init image"
    outputs = dict(init=init, start=run.start)
    outputs |= {f"latents.{i}": latents for i, latents in enumerate(run.steps, 1)}
    outputs |= dict(image=run.image)
    for name, tensor in outputs.items():
        assert torch.isfinite(tensor).all(), f"{case.name}: {name} is not finite"
    return outputs


def without_reference(pipe):
    """Takes the init image out of the references."""
    prepare = pipe.prepare_image_latents

    def prepare_none(*args, **kwargs):
        tokens, ids = prepare(*args, **kwargs)
        return tokens[:, :0], ids[:, :0]

    pipe.prepare_image_latents = prepare_none


# --- Schedules, resizing and composites -----------------------------------------------------------------------


def schedules():
    """The sigmas of diffusers for all strengths of whole steps. Where 50 * 0.56 is above 28, diffusers runs a step more."""
    found = []
    for steps in (1, 2, 4, 8, 28, 50):
        for tokens in (20, 256, 4096, 4300, 4301, 16384):
            scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULER)
            given = np.linspace(1.0, 1 / steps, steps)
            scheduler.set_timesteps(sigmas=given, mu=shift(steps, tokens))
            found.append(dict(steps=steps, tokens=tokens, sigmas=[float(sigma) for sigma in scheduler.sigmas]))
    return found


def shift(steps, tokens):
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    return compute_empirical_mu(image_seq_len=tokens, num_steps=steps)


def sizes():
    """Two hundred pairs of sizes."""
    sides = 1 + hash_bytes("resized", 200, 4) % 96
    return [((int(a), int(b)), (int(c), int(d))) for a, b, c, d in sides]


def resized():
    found = []
    for i, (old, new) in enumerate(sizes()):
        color = hash_bytes(f"resized.{i}", old[1], old[0], 3).astype(np.uint8)
        results = []
        for image in (color[..., 0], color):
            result = PIL.Image.fromarray(np.ascontiguousarray(image)).resize(new, PIL.Image.Resampling.BILINEAR)
            results.append(checksum(np.asarray(result).tobytes()))
        found.append(dict(old=old, new=new, gray=results[0], rgb=results[1]))
    return found


def composites():
    found = []
    for i in range(20):
        width, height = 3 + 7 * i, 90 - 4 * i
        below, above = (hash_bytes(f"composite.{i}.{name}", height, width, 3).astype(np.uint8) for name in ("below", "above"))
        opacity = hash_bytes(f"composite.{i}.opacity", height, width).astype(np.uint8)
        images = [PIL.Image.fromarray(np.ascontiguousarray(values)) for values in (above, below, opacity)]
        found.append(dict(width=width, height=height, fnv1a=checksum(np.asarray(PIL.Image.composite(*images)).tobytes())))
    return found


# --- The fixture ----------------------------------------------------------------------------------------------


def compute():
    klein, dev_models, recording = build_components(), dev.build_components(), Recording()
    exact = [run_edit(klein, dev_models, case) for case in CASES]
    to_bf16(klein)
    to_bf16(dev_models)
    for case, fp32 in zip(CASES, exact):
        bf16 = [run_edit(klein, dev_models, case, exact_time) for exact_time in (False, True)]
        kept = {name: to_u16(tensor) if name == "image" else tensor for name, tensor in fp32.items()}
        if case.kind in ("img2img", "kv"):
            del kept["init"]  # that of `inpaint`
        if case.strength == 1:
            del kept["start"]  # the noise
        kept["mask"] = torch.from_numpy(repainted(case).astype(np.uint8))
        recording.add(asdict(case), kept, fp32, *bf16)
    summary = dict(
        versions=package_versions(*PACKAGES, "pillow"),
        cases=recording.cases,
        schedules=schedules(),
        resized=resized(),
        composites=composites(),
    )
    return recording.golden("editing", summary)
