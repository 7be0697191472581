"""tests/fixtures/tiling.*: the VAE with diffusers' tiling enabled. Its tiles are TILE pixels wide here.

tests/fixtures/tiling.safetensors, from the fp32 run:
    <case>.image    U16 [H, W, 3]  the decoded tokens: round(65535 * v), v in [0, 1]
    <case>.tokens   F32 [N, 128]   the encoded image: mean latents, patchified, normalized

tests/fixtures/tiling.json: the side of a tile, the cases and the bf16 errors.

Inputs. With k as in the package for the name "<case>.tokens", shape [N, 128], the tokens
to decode are (2k - 255) / 128; with k for "<case>.image", the image to encode is blocks
of 8x8 pixels of one color each, as in modes.py, 2 * (k / 255) - 1.

The report ends with deliberate mistakes and how far they move the results: the fixtures
must notice each of them.
"""

from dataclasses import asdict, dataclass
from unittest import mock

import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline

from goldens.files import package_versions
from goldens.model import VAE, fill, latent_statistics
from goldens.values import PACKAGES, Recording, hashed, hashed_blocks, relative_l2, to_u16

TILE = 64
# Far above the effect of the order of sums.
NOTICED = 1e-3


@dataclass(frozen=True)
class Case:
    name: str
    width: int
    height: int


CASES = (
    # Three columns of tiles and two rows, of several sizes.
    Case("several", 144, 80),
    # The last column lies entirely in the one before; the image is as high as a tile, and has two rows of tiles.
    Case("narrow", 112, 64),
    # As large as a tile, so it is not tiled.
    Case("one", 64, 64),
)


# --- The VAE ----------------------------------------------------------------


def pixels_of(case):
    k = torch.from_numpy(hashed_blocks(f"{case.name}.image", case.width, case.height)).float()
    return (2 * (k / 255) - 1).permute(2, 0, 1).unsqueeze(0)


@torch.no_grad()
def run(vae, case):
    mean, deviation = latent_statistics(vae)
    rows, columns = case.height // 16, case.width // 16
    tokens = (2 * hashed(f"{case.name}.tokens", rows * columns, 128)).to(vae.dtype).T.reshape(1, 128, rows, columns)
    z = Flux2KleinPipeline._unpatchify_latents(tokens * deviation + mean)
    image = vae.decode(z).sample[0].permute(1, 2, 0).float()
    z = Flux2KleinPipeline._patchify_latents(vae.encode(pixels_of(case).to(vae.dtype)).latent_dist.mode())
    encoded = ((z - mean) / deviation)[0].flatten(1).T.float()
    return dict(image=(image / 2 + 0.5).clamp(0, 1), tokens=encoded)


def run_all(vae):
    return {case.name: run(vae, case) for case in CASES}


# --- Mistakes ---------------------------------------------------------------


def copying(blend):
    """Leaves the blended tile unchanged, so that its neighbors blend with it as it was decoded."""
    return lambda _self, a, b, extent: blend(_self, a, b.clone(), extent)


def mistakes():
    kind = AutoencoderKLFlux2
    down, right = kind.blend_v, kind.blend_h
    later = lambda blend: lambda self, a, b, extent: blend(self, a, b, extent // 2)
    none = lambda _self, _a, b, _extent: b
    return {
        "no tiles": dict(_decode=untiled(kind._decode), _encode=untiled(kind._encode)),
        "nothing is blended": dict(blend_v=none, blend_h=none),
        "neighbors are not blended": dict(blend_v=copying(down), blend_h=copying(right)),
        "half of the overlap is blended": dict(blend_v=later(down), blend_h=later(right)),
        "nothing is blended from above": dict(blend_v=none),
        "nothing is blended from the left": dict(blend_h=none),
    }


def untiled(method):
    def call(self, *args, **kwargs):
        with mock.patch.object(self, "use_tiling", False):
            return method(self, *args, **kwargs)

    return call


def sensitivity(vae, exact):
    """How far each mistake moves the results of the first case."""
    moves = {}
    for name, patches in mistakes().items():
        with mock.patch.multiple(AutoencoderKLFlux2, **patches):
            found = run(vae, CASES[0])
        moves[name] = {key: relative_l2(found[key], value) for key, value in exact[CASES[0].name].items()}
        assert min(moves[name].values()) > NOTICED, f"the fixtures do not notice: {name} {moves[name]}"
    return moves


# --- Fixtures ---------------------------------------------------------------


def compute():
    vae, recording = fill(AutoencoderKLFlux2(**VAE, sample_size=TILE)), Recording()
    vae.enable_tiling()
    exact = run_all(vae)
    moves = sensitivity(vae, exact)
    rounded = run_all(vae.to(torch.bfloat16))
    for case in CASES:
        outputs = exact[case.name]
        assert outputs["image"].std() > 0.02, f"{case.name}: the image is nearly constant"
        recording.add(asdict(case), outputs | dict(image=to_u16(outputs["image"])), outputs, rounded[case.name])
    summary = dict(versions=package_versions(*PACKAGES), tile=TILE, cases=recording.cases)
    report = [f"{name:<34} {' '.join(f'{key} {move:.2e}' for key, move in by.items())}" for name, by in moves.items()]
    return recording.golden("tiling", summary, report)
