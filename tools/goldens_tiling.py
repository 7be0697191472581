#!/usr/bin/env python3
"""Rebuild (or check) tests/fixtures/tiling.*: the VAE with diffusers' tiling enabled.

Same tiny VAE, weights and conventions as tools/goldens.py, which holds all that is
shared; read its description first. Its tiles are TILE pixels wide here.

    python tools/goldens_tiling.py            # write the fixtures
    python tools/goldens_tiling.py --check    # recompute and compare, exit 1 on mismatch

tests/fixtures/tiling.safetensors, from the fp32 run:
    <case>.image    U16 [H, W, 3]  the decoded tokens: round(65535 * v), v in [0, 1]
    <case>.tokens   F32 [N, 128]   the encoded image: mean latents, patchified, normalised

tests/fixtures/tiling.json: the side of a tile, the cases and the bf16 errors.

Inputs. With k as in goldens.py for the name "<case>.tokens", shape [N, 128], the tokens
to decode are (2k - 255) / 128; with k for "<case>.image", the image to encode is blocks
of 8x8 pixels of one colour each, as in goldens_modes.py, 2 * (k / 255) - 1.

The report ends with deliberate mistakes and how far they move the results: the fixtures
must notice each of them.
"""

import sys
from dataclasses import asdict, dataclass
from unittest import mock

import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline
from goldens import (
    PACKAGES,
    VAE,
    Fixture,
    as_arrays,
    error_report,
    fill,
    hash_bytes,
    package_versions,
    relative_l2,
    rms,
    run_tool,
    to_u16,
)

TILE = 64
# Far above what the order of sums may move a result by.
NOTICED = 1e-3


@dataclass(frozen=True)
class Case:
    name: str
    width: int
    height: int


CASES = (
    # Three columns of tiles and two rows, of several sizes.
    Case("several", 144, 80),
    # The last column has nothing but what the one before has as well; the image is as high as a tile, and has two rows of them.
    Case("narrow", 112, 64),
    # As large as a tile: there are none.
    Case("one", 64, 64),
)


# --- The VAE ----------------------------------------------------------------


def tokens_of(case):
    shape = (case.height // 16) * (case.width // 16), 128
    k = hash_bytes(f"{case.name}.tokens", shape[0] * shape[1]).reshape(shape)
    return torch.from_numpy((2 * k - 255) / 128).float()


def pixels_of(case):
    rows, columns = case.height // 8, case.width // 8
    blocks = hash_bytes(f"{case.name}.image", rows * columns * 3).reshape(rows, columns, 3)
    k = torch.from_numpy(blocks.repeat(8, axis=0).repeat(8, axis=1)).float()
    return (2 * (k / 255) - 1).permute(2, 0, 1).unsqueeze(0)


def statistics(vae):
    """Mean and deviation of the latents, as the pipeline computes them."""
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    return mean, torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)


@torch.no_grad()
def run(vae, case):
    mean, deviation = statistics(vae)
    grid = case.height // 16, case.width // 16
    tokens = tokens_of(case).to(vae.dtype).T.reshape(1, 128, *grid)
    z = Flux2KleinPipeline._unpatchify_latents(tokens * deviation + mean)
    image = vae.decode(z).sample[0].permute(1, 2, 0).float()
    z = Flux2KleinPipeline._patchify_latents(vae.encode(pixels_of(case).to(vae.dtype)).latent_dist.mode())
    encoded = ((z - mean) / deviation)[0].flatten(1).T.float()
    return dict(image=(image / 2 + 0.5).clamp(0, 1), tokens=encoded)


def run_all(vae):
    return {case.name: run(vae, case) for case in CASES}


# --- Mistakes ---------------------------------------------------------------


def copying(blend):
    """What is blended into does not change, so that neighbours find it as it was decoded."""
    return lambda _self, a, b, extent: blend(_self, a, b.clone(), extent)


def mistakes():
    kind = AutoencoderKLFlux2
    down, right = kind.blend_v, kind.blend_h
    later = lambda blend: lambda self, a, b, extent: blend(self, a, b, extent // 2)
    none = lambda _self, _a, b, _extent: b
    return {
        "no tiles": dict(_decode=untiled(kind._decode), _encode=untiled(kind._encode)),
        "nothing is blended": dict(blend_v=none, blend_h=none),
        "neighbours are not blended": dict(blend_v=copying(down), blend_h=copying(right)),
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
    """Run everything. Returns the tensors, the summary and a printable report."""
    vae = fill(AutoencoderKLFlux2(**VAE, sample_size=TILE))
    vae.enable_tiling()
    exact = run_all(vae)
    moves = sensitivity(vae, exact)
    rounded = run_all(vae.to(torch.bfloat16))
    errors = {name: error_report(rounded[name], outputs) for name, outputs in exact.items()}
    tensors = {}
    for name, outputs in exact.items():
        assert outputs["image"].std() > 0.02, f"{name}: the image is nearly constant"
        tensors.update(as_arrays(name, outputs | dict(image=to_u16(outputs["image"]))))
    cases = [asdict(case) | dict(bf16_relative_l2=errors[case.name]) for case in CASES]
    summary = dict(versions=package_versions(PACKAGES), tile=TILE, cases=cases)
    report = ["case       output     rms     bf16"]
    for name, outputs in exact.items():
        report += [f"{name:<10} {key:<8} {rms(value):6.3f}  {errors[name][key]:.2e}" for key, value in outputs.items()]
    report += [f"{name:<34} {' '.join(f'{key} {move:.2e}' for key, move in by.items())}" for name, by in moves.items()]
    return tensors, summary, "\n".join(report)


def main():
    return run_tool("Rebuild or check the fixtures of the tiled VAE.", Fixture.named("tiling"), compute, {})


if __name__ == "__main__":
    sys.exit(main())
