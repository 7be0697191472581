"""tests/fixtures/modes.*: the modes beyond text to image, on the tiny model of klein.

tests/fixtures/modes.safetensors, F32 from the fp32 run where not said otherwise:
    <case>.velocity                [N, 128]   the input of the scheduler in step 0,
                                              with the guidance of `base_negative` applied
    <case>.latents                 [N, 128]   after the last step, still normalized
    <case>.image               U16 [H, W, 3]  round(65535 * v), v in [0, 1]
    <case>.reference.<j>.tokens    [n, 128]   reference j = 1, 2, ... as the transformer
                                              gets it: mean latents, patchified, normalized
    kv.velocity_cached             [N, 128]   the velocity of step 1, the first that runs
                                              on the cached keys and values
    base_negative.negative_prompt_embeds  [32, 384]  every 16th of the 512 rows
    guidance_embed.velocity.<i>    [N, 128]   the transformer's output for guidance[i]
    encode.mean                    [32, H/8, W/8]  mean of the posterior of one image, as
                                              the encoder gives it: not patchified or normalized

tests/fixtures/modes.json:
    cases            the pipeline calls; `references` are indices into `images`, in order
    images           the size of each test image, its first 9 pixels and the FNV-1a 64 of its
                     bytes, as rows of interleaved RGB
    guidance_embed   the direct call of a transformer with a guidance embedding
    encode           the encoded image
    layout           token counts and FNV-1a 64 of the ids of a large request
    config, weights  of the two models that differ from goldens.json
    and the bf16 errors, as in goldens.json.

Test images. Blocks of 8x8 pixels with the colors of the weights' hash: with k as in
the package for the name "image.<index>", pixel (y, x), channel c has the value
k[((y / 8) * ceil(width / 8) + x / 8) * 3 + c], a byte; integer divisions.

Direct inputs of `guidance_embed`. (2k - 255) / 256 with k for the name
"guidance.features", shape [512, 384], and "guidance.noise", shape [N, 128].

Ids of `layout`. The position ids (t, h, w, l) as little-endian int32, token after
token, in the order given to the transformer: `image` only the image tokens, `all`
with the text tokens in front.

The report ends with deliberate mistakes and how far they move a velocity, in units of its bf16 error with exact times. The
fixtures must notice each of them.
"""

import contextlib
import functools
import itertools
from dataclasses import asdict, dataclass, replace
from unittest import mock

import numpy as np
import PIL.Image
import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinKVPipeline, Flux2KleinPipeline, Flux2Transformer2DModel
from diffusers.models.transformers import transformer_flux2
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor

from goldens.files import checksum, package_versions
from goldens.model import GUIDANCE_TRANSFORMER, TRANSFORMER, VAE, build_components, fill, to_bf16, weight_summary
from goldens.pipeline import Case, make_pipeline, run_pipeline
from goldens.values import PACKAGES, Recording, hashed, hashed_blocks, relative_l2, to_u16

# As in the released small decoder, the encoder is unchanged, the first decoder layer identifies it, and its groups have three
# channels.
SMALL_DECODER_VAE = VAE | dict(decoder_block_out_channels=[32, 64, 96, 96])


@dataclass(frozen=True)
class ModeCase(Case):
    references: tuple[int, ...] = ()
    negative: str | None = None
    kv: bool = False
    small_decoder: bool = False


CASES = (
    ModeCase("references", "the fox in a red car", 96, 128, 2, 3, True, 1.0, references=(0, 1)),
    ModeCase("base_negative", "two lamps", 80, 96, 2, 11, False, 3.5, references=(2,), negative="blurry, 低质量"),
    ModeCase("kv", "the fox beside a lake", 80, 64, 4, 5, True, 1.0, references=(1, 0), kv=True),
    ModeCase("small_decoder", "a green door", 64, 80, 1, 9, True, 1.0, small_decoder=True),
)

# Width and height. The first is not a multiple of 16: it is cropped to 112x96, from (3, 2).
IMAGES = ((119, 101), (80, 144), (80, 64))

GUIDANCE = dict(name="guidance_embed", width=64, height=80, time=0.7, guidance=[4.0, 2.5])
ENCODE = dict(name="encode", image=2)
# The first is cropped, the second resized and cropped.
LAYOUT = dict(width=1024, height=1024, references=[[605, 807], [1500, 1000]])

WEIGHT_SAMPLES = dict(
    guidance_transformer=[f"time_guidance_embed.guidance_embedder.linear_{i}.weight" for i in (1, 2)],
    small_decoder_vae=(
        "decoder.conv_in.weight", "decoder.up_blocks.2.resnets.0.conv_shortcut.weight",
        "decoder.mid_block.attentions.0.to_q.weight",
    ),
    vae=(
        "encoder.conv_in.weight", "encoder.down_blocks.0.downsamplers.0.conv.weight",
        "encoder.mid_block.attentions.0.to_out.0.bias", "quant_conv.weight",
    ),
)  # fmt: skip


def build_models():
    return build_components() | dict(
        guidance_transformer=fill(Flux2Transformer2DModel(**GUIDANCE_TRANSFORMER)),
        small_decoder_vae=fill(AutoencoderKLFlux2(**SMALL_DECODER_VAE)),
    )


# --- Inputs -----------------------------------------------------------------


def image_pixels(index):
    return hashed_blocks(f"image.{index}", *IMAGES[index]).astype(np.uint8)


def reference_image(index):
    return PIL.Image.fromarray(image_pixels(index))


def image_summary(index):
    pixels = image_pixels(index).tobytes()
    width, height = IMAGES[index]
    return dict(width=width, height=height, first=pixels[:27].hex(), fnv1a=checksum(pixels))


# --- Running the reference --------------------------------------------------


@contextlib.contextmanager
def kept_processors(transformer):
    """Restores the attention processors that the KV pipeline replaces."""
    processors = transformer.attn_processors
    yield
    transformer.set_attn_processor(processors)


def run_mode(models, case, exact_time=False):
    """Run one case. Returns the run and the outputs to record, at full size and precision."""
    components = dict(
        transformer=models["transformer"],
        vae=models["small_decoder_vae" if case.small_decoder else "vae"],
        text_encoder=models["text_encoder"],
    )
    arguments = dict(image=[reference_image(index) for index in case.references] or None)
    if not case.kv:
        arguments.update(guidance_scale=case.guidance)
    with kept_processors(models["transformer"]):
        pipe = make_pipeline(components, case.distilled, Flux2KleinKVPipeline if case.kv else Flux2KleinPipeline)
        if case.negative is not None:
            with torch.no_grad():
                arguments.update(negative_prompt_embeds=pipe.encode_prompt(case.negative)[0])
        run = run_pipeline(pipe, case, exact_time, **arguments)

    outputs = {}
    for number in range(1, len(case.references) + 1):
        outputs[f"reference.{number}.tokens"] = run.reference_tokens(number)
    if case.negative is not None:
        outputs["negative_prompt_embeds"] = arguments["negative_prompt_embeds"][0]
    outputs["velocity"] = run.velocity
    if case.kv:
        outputs["velocity_cached"] = run.velocities[1]
    return run, outputs | dict(latents=run.latents, image=run.image)


def check_order(case, run):
    """Checks that the canvas comes before the references, and after them in the KV model."""
    canvas = [0] * len(run.noise)
    references = []
    for number, index in enumerate(case.references, 1):
        width, height = IMAGES[index]
        references += [10 * number] * ((width // 16) * (height // 16))
    expected = references + canvas if case.kv else canvas + references
    assert run.input_ids[:, 0].tolist() == expected, case.name
    assert torch.equal(run.reference_tokens(0), run.noise), case.name


def run_guidance(models, guidance, exact_time=False):
    """Velocity of the transformer with a guidance embedding; `guidance` may be None."""
    transformer = models["guidance_transformer"]
    columns, rows = GUIDANCE["width"] // 16, GUIDANCE["height"] // 16
    features = hashed("guidance.features", 1, 512, TRANSFORMER["joint_attention_dim"])
    noise = hashed("guidance.noise", 1, rows * columns, 128)
    time = torch.tensor([GUIDANCE["time"]])
    guidance = None if guidance is None else torch.tensor([guidance])
    # The sinusoid is computed for the time and then for the guidance.
    exact = iter([1000 * time] if guidance is None else [1000 * time, 1000 * guidance])
    handle = transformer.time_guidance_embed.time_proj.register_forward_pre_hook(
        lambda _module, _args: (next(exact),) if exact_time else None
    )
    with torch.no_grad():
        velocity = transformer(
            hidden_states=noise.to(transformer.dtype),
            encoder_hidden_states=features.to(transformer.dtype),
            timestep=time,
            guidance=guidance,
            img_ids=Flux2KleinPipeline._prepare_latent_ids(noise.new_zeros(1, 128, rows, columns)),
            txt_ids=Flux2KleinPipeline._prepare_text_ids(features),
            return_dict=False,
        )[0]
    handle.remove()
    return velocity[0]


def run_guidances(models, exact_time=False):
    return {f"velocity.{i}": run_guidance(models, guidance, exact_time) for i, guidance in enumerate(GUIDANCE["guidance"])}


def run_encode(models):
    vae = models["vae"]
    pixels = Flux2ImageProcessor(vae_scale_factor=16).preprocess(reference_image(ENCODE["image"]))
    with torch.no_grad():
        return dict(mean=vae.encode(pixels.to(vae.dtype)).latent_dist.mode()[0])


# --- The layout of a large request ------------------------------------------


class Captured(Exception):
    """Ends a pipeline call after it has prepared the transformer's arguments."""


def layout_ids(models, kind):
    """Text and image ids that the pipeline passes to the transformer, without running any model."""
    sizes = []

    def encode(image, generator):
        height, width = image.shape[-2:]
        sizes.append([width, height])
        return image.new_zeros(1, 128, height // 16, width // 16)

    def forward(_self, *, txt_ids, img_ids, **_kwargs):
        raise Captured(txt_ids[0], img_ids[0])

    components = {name: models[name] for name in ("transformer", "vae", "text_encoder")}
    pipe = make_pipeline(components, True, kind)
    with (
        mock.patch.object(pipe, "_encode_vae_image", encode),
        mock.patch.object(Flux2Transformer2DModel, "forward", forward),
    ):
        try:
            pipe(
                prompt_embeds=torch.zeros(1, 512, TRANSFORMER["joint_attention_dim"]),
                image=[PIL.Image.new("RGB", tuple(size)) for size in LAYOUT["references"]],
                width=LAYOUT["width"],
                height=LAYOUT["height"],
            )
        except Captured as captured:
            return *captured.args, sizes
    raise AssertionError("the pipeline did not call the transformer")


def ids_checksum(ids):
    return checksum(ids.numpy().astype("<i4").tobytes())


def layout_summary(models):
    checksums = {}
    for name, kind in dict(plain=Flux2KleinPipeline, kv=Flux2KleinKVPipeline).items():
        with kept_processors(models["transformer"]):
            text, image, sizes = layout_ids(models, kind)
        checksums[name] = dict(image=ids_checksum(image), all=ids_checksum(torch.cat([text, image])))
    canvas, *references = (int((image[:, 0] == 10 * t).sum()) for t in range(len(sizes) + 1))
    counts = dict(text=len(text), canvas=canvas, references=references, image=len(image))
    assert references == [width // 16 * (height // 16) for width, height in sizes]
    assert (canvas, len(image)) == (4096, 10_002)
    return LAYOUT | dict(prepared=sizes, tokens=counts, ids_fnv1a=checksums)


# --- Deliberate mistakes ----------------------------------------------------


def references_see_all(query, key, value, num_txt, num_ref, kv_cache=None, backend=None, *, right):
    """The KV model's attention without the rule that references only see references."""
    if kv_cache is None:
        return transformer_flux2.dispatch_attention_fn(query, key, value, backend=backend)
    return right(query, key, value, num_txt, num_ref, kv_cache=kv_cache, backend=backend)


def mistakes():
    """(case, description, changed fields of the case, a patch of the reference)."""
    klein, kv, processor, transformer = Flux2KleinPipeline, Flux2KleinKVPipeline, Flux2ImageProcessor, Flux2Transformer2DModel
    ids, patchify, forward = klein._prepare_image_ids, klein._patchify_latents, transformer.forward
    calls = itertools.count()

    def transposed_patchify(latents):
        return patchify(latents.mT).mT

    def corner_crop(_self, image, width, height):
        return image.crop((0, 0, width, height))

    def bgr(image):
        return PIL.Image.merge("RGB", image.split()[::-1])

    def canvas_in_every_second_call(self, *, hidden_states, img_ids, **kwargs):
        if next(calls) % 2 == 1:
            canvas = img_ids[0, :, 0] == 0
            hidden_states, img_ids = hidden_states[:, canvas], img_ids[:, canvas]
        return forward(self, hidden_states=hidden_states, img_ids=img_ids, **kwargs)

    zero_ids = staticmethod(functools.partial(ids, scale=0))
    time_one = functools.partialmethod(forward, ref_fixed_timestep=1.0)  # the time of step 0
    see_all = functools.partial(references_see_all, right=transformer_flux2._flux2_kv_causal_attention)
    patch, no_patch = mock.patch.object, contextlib.nullcontext()
    return (
        ("references", "references at t = 0", {}, patch(klein, "_prepare_image_ids", zero_ids)),
        ("references", "references in the wrong order", dict(references=(1, 0)), no_patch),
        ("references", "second reference missing", dict(references=(0,)), no_patch),
        ("references", "cropped at the corner", {}, patch(processor, "_resize_and_crop", corner_crop)),
        ("references", "blue and red swapped", {}, patch(processor, "convert_to_rgb", staticmethod(bgr))),
        ("references", "patches transposed", {}, patch(klein, "_patchify_latents", staticmethod(transposed_patchify))),
        ("base_negative", "empty negative prompt", dict(negative=None), no_patch),
        ("base_negative", "guidance added to the prompt's", dict(guidance=4.5), no_patch),
        ("base_negative", "reference missing", dict(references=()), no_patch),
        ("base_negative", "... in the negative pass", {}, patch(transformer, "forward", canvas_in_every_second_call)),
        ("kv", "references at t = 0", {}, patch(kv, "_prepare_image_ids", zero_ids)),
        ("kv", "references in the wrong order", dict(references=(0, 1)), no_patch),
        ("kv", "references with the current time", {}, patch(transformer, "forward", time_one)),
        ("kv", "references see all tokens", {}, patch(transformer_flux2, "_flux2_kv_causal_attention", see_all)),
        ("kv", "the plain model", dict(kv=False), no_patch),
    )


def sensitivity(models, outputs):
    """How far each mistake moves a velocity of the fp32 run: (case, mistake, output, relative L2)."""
    moves = []
    for name, what, changes, patch in mistakes():
        case = replace(next(case for case in CASES if case.name == name), **changes)
        with patch:
            run, _ = run_mode(models, case)
        for step, output in enumerate(("velocity", "velocity_cached")):
            if output in outputs[name]:
                moves.append((name, what, output, relative_l2(run.velocities[step], outputs[name][output])))
    for i, guidance in enumerate(GUIDANCE["guidance"]):
        moved = relative_l2(run_guidance(models, None), outputs["guidance_embed"][f"velocity.{i}"])
        moves.append(("guidance_embed", f"guidance {guidance} ignored", f"velocity.{i}", moved))
    return moves


def format_sensitivity(moves, errors):
    lines = ["", "mistake                                           output           moves     bf16 errors"]
    for name, what, output, moved in moves:
        ratio = moved / errors[name][output]
        assert ratio > 3, f"{name}: bf16 tolerances hide the mistake: {what}"
        lines.append(f"{name + ': ' + what:<49} {output:<16} {moved:.2e}  {ratio:.1f}")
    return lines


# --- Fixtures ---------------------------------------------------------------


def run_all(models, exact_time=False):
    """Outputs by case, and the pipeline runs."""
    runs = {case.name: run_mode(models, case, exact_time) for case in CASES}
    outputs = {name: output for name, (_, output) in runs.items()}
    outputs["guidance_embed"] = run_guidances(models, exact_time)
    outputs["encode"] = run_encode(models)
    return outputs, {name: run for name, (run, _) in runs.items()}


def stored(name, tensor):
    if name == "image":
        return to_u16(tensor)
    return tensor[::16] if name == "negative_prompt_embeds" else tensor


def compute():
    models, recording = build_models(), Recording()
    weights = weight_summary(models, WEIGHT_SAMPLES)
    layout = layout_summary(models)
    exact, runs = run_all(models)
    moves = sensitivity(models, exact)
    to_bf16(models)
    bf16 = [run_all(models, exact_time)[0] for exact_time in (False, True)]

    errors = {}
    for part in [asdict(case) for case in CASES] + [GUIDANCE, ENCODE]:
        name = part["name"]
        kept = {key: stored(key, tensor) for key, tensor in exact[name].items()}
        # Errors with rounded times may be of any size, so they are left out.
        _, errors[name] = recording.add(part, kept, exact[name], *(run[name] for run in bf16))
    for case in CASES:
        check_order(case, runs[case.name])
        runs[case.name].check_sanity(case, errors[case.name])
    *cases, guidance, encode = recording.cases
    summary = dict(
        versions=package_versions(*PACKAGES, "pillow"),
        config=dict(guidance_transformer=GUIDANCE_TRANSFORMER, small_decoder_vae=SMALL_DECODER_VAE),
        images=[image_summary(index) for index in range(len(IMAGES))],
        cases=cases,
        guidance_embed=guidance,
        encode=encode,
        layout=layout,
        weights=weights,
    )
    return recording.golden("modes", summary, format_sensitivity(moves, errors))
