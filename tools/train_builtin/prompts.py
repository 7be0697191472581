"""Writes the scenes that the score draws and judges: `prompts.json` and `renders.png` in `tests/fixtures/builtin`, and for the example
adapter `moons.json` and `moons.png`.

    python prompts.py

200 prompts of color-shape pairs and wordings that training never shows, 105 edits in wordings that training never uses, and a few scenes
with their images, which the score's own renderer must match. Seeds are fixed: the same files every time.
"""
import json
import os
import random

import numpy as np
import torch
from PIL import Image

import world

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(HERE, "..", "..", "tests", "fixtures", "builtin")
PROMPTS = [(1, 80), (2, 80), (3, 40)]      # objects, how many
EDITS_EACH = 15
RENDERS, COLUMNS = 12, 4
MOONS = [(1, 20), (2, 14), (3, 6)]         # for lora.py


def scene(s):
    number = lambda v: round(v, 5) + 0.0      # no -0.0
    return {"background": vars(s.bg),
            "objects": [{k: number(v) if isinstance(v, float) else v for k, v in vars(o).items()} for o in s.objs]}


def prompts(rng):
    for n, count in PROMPTS:
        for _ in range(count):
            s = world.sample_scene(rng, n, held=True, jitter=0.0)
            yield {"text": world.caption(s, rng, held=True), **scene(s)}


def moons(rng):
    for n, count in MOONS:
        for _ in range(count):
            s = world.moon_scene(rng, n, held=True, jitter=0.0)
            yield {"text": world.caption(s, rng, held=True), **scene(s)}


def edits(rng):
    for kind in world.EDITS1 + world.EDITS2:
        for _ in range(EDITS_EACH):
            while True:
                _, refs, target, say = world.sample_edit(rng, kind, refs=2 if kind in world.EDITS2 else 1, held=None,
                                                         held_wording=True)
                # Several shapes have no held-out wording for this kind.
                if kind != "combine" or len(refs[0].objs) == 1:
                    break
            # The changed or new object in the target, or the removed one in the first reference.
            here, there = (refs[0], target) if kind == "remove" else (target, refs[0])
            changed = [i for i, o in enumerate(here.objs) if o not in there.objs]
            assert len(changed) == (0 if kind in ("background", "combine") else 1), kind
            yield {"text": say(), "kind": kind, "object": changed[0] if changed else None,
                   "references": [scene(r) for r in refs], "target": scene(target)}


def renders(rng):
    """Every shape, color, kind and direction of background, with jitter."""
    while True:
        scenes = [world.sample_scene(rng, 1 + i % 3, held=None) for i in range(RENDERS)]
        objects = [o for s in scenes for o in s.objs]
        if ({o.shape for o in objects} == set(world.SHAPES) and {o.color for o in objects} == set(world.COLORS)
                and len({(s.bg.kind, s.bg.direction) for s in scenes}) == 6):
            return scenes


def write(name, parts):
    line = lambda entry: "  " + json.dumps(entry)
    with open(os.path.join(OUT, name), "w") as f:
        f.write("{\n" + ",\n".join(f' "{name}": [\n' + ",\n".join(map(line, entries)) + "\n ]"
                                   for name, entries in parts.items()) + "\n}\n")


def draw(name, scenes):
    """All scenes in one image, side by side."""
    img = ((world.render_scenes(scenes) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    rows = [np.concatenate(img[i:i + COLUMNS], 1) for i in range(0, len(scenes), COLUMNS)]
    Image.fromarray(np.concatenate(rows, 0)).save(os.path.join(OUT, name), optimize=True)


def main():
    torch.set_num_threads(1)
    os.makedirs(OUT, exist_ok=True)
    scenes = renders(random.Random(3))
    write("prompts.json", {"prompts": prompts(random.Random(1)), "edits": edits(random.Random(2)),
                           "renders": (scene(s) for s in scenes)})
    draw("renders.png", scenes)
    rng = random.Random(4)
    scenes = [world.moon_scene(rng, 1 + i % 2) for i in range(4)]
    write("moons.json", {"prompts": moons(rng), "edits": [], "renders": (scene(s) for s in scenes)})
    draw("moons.png", scenes)


if __name__ == "__main__":
    main()
