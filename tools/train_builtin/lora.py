"""Trains the example adapter: a LoRA with which the built-in model draws a ninth shape, the moon.

    python lora.py --out ../../models/lora/moon.safetensors

Training changes only the low-rank factors of the transformer's linear layers, by rectified flow, as train.py trains the model. Scenes with
and without a moon are mixed, so that the other shapes do not change. Two CPU cores are enough. The file has diffusers' and PEFT's spelling.
At the end the model is scored with and without the adapter, on moon colors and wordings that training never shows (`world.held_out_pair`,
`world.held_out_wording`).
"""
import argparse
import json
import math
import os
import random
import time

import torch
from safetensors.torch import load_file, save_file

import common as C
import evaluate
import train
import world
from tokenizer import Tok

MODEL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "models", "builtin")
CAPTIONS = 4      # wordings of a scene


class Adapted(torch.nn.Module):
    """A linear layer with low-rank factors. The second is zero at first, so training starts with the unmodified model."""

    def __init__(self, base, rank):
        super().__init__()
        self.base, self.strength = base, 1.0
        self.down = torch.nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        beside = torch.nn.functional.linear(torch.nn.functional.linear(x, self.down), self.up)
        return self.base(x) + self.strength * beside


def adapt(transformer, rank):
    """Adds factors to the layers of the blocks and to the text's input layer. Returns them by the layers' names."""
    transformer.requires_grad_(False)
    linear = [(n, m) for n, m in transformer.named_modules() if isinstance(m, torch.nn.Linear)]
    adapted = {}
    for name, module in linear:
        if name == "context_embedder" or (name.split(".")[0].endswith("transformer_blocks")):
            parent, _, leaf = name.rpartition(".")
            adapted[name] = Adapted(module, rank)
            setattr(transformer.get_submodule(parent) if parent else transformer, leaf, adapted[name])
    return adapted


class Pool:
    """Scenes, encoded once. Each use draws new noise and one of the scene's wordings."""

    def __init__(self, flow, vae, scenes, rng):
        texts = [world.caption(s, rng) for s in scenes for _ in range(CAPTIONS)]
        ids, lengths = (torch.from_numpy(t).long() for t in Tok()(texts))
        objects, backgrounds = (torch.from_numpy(t) for t in world.describe(scenes))
        with torch.no_grad():
            self.text = torch.cat([flow.text(i, n) for i, n in zip(ids.split(64), lengths.split(64))])
            self.text = self.text.view(len(scenes), CAPTIONS, *self.text.shape[1:])
            parts = zip(objects.split(16), backgrounds.split(16))
            self.tokens = torch.cat([C.to_tokens(vae, world.render(o, b)) for o, b in parts])
        self.weight = train.token_weights(objects[:, None])

    def batch(self, n):
        i = torch.randint(0, len(self.tokens), (n,))
        return self.tokens[i], self.text[i, torch.randint(0, CAPTIONS, (n,))], self.weight[i]


def score(flow, vae, scenes, texts):
    """Percentage of moons (or of all objects in scenes without moons) with right color, shape and place, and of right backgrounds."""
    generator, images = torch.Generator().manual_seed(5), []
    for i in range(0, len(texts), 16):
        ids, lengths = (torch.from_numpy(t).long() for t in Tok()(texts[i:i + 16]))
        noise = torch.randn(len(lengths), 256, 128, generator=generator)
        images.append(C.to_images(vae, C.sample(flow, ids, lengths, noise=noise)).clamp(-1, 1))
    images, objects, backgrounds = torch.cat(images), [], []
    for image, scene in zip(images, scenes):
        seen, background = evaluate.score_scene(image, scene, "cpu")
        moons = [o.shape == world.MOON for o in scene.objs]
        objects += [s for s, moon in zip(seen, moons) if moon or not any(moons)]
        backgrounds.append(background)
    per_cent = lambda of: 100 * sum(of) / len(of)
    return images, [per_cent([o[k] for o in objects]) for k in range(3)] + [per_cent(backgrounds)]


def report(flow, vae, adapted, n, folder):
    """Prints the score with and without the adapter, and saves images of moons."""
    rng = random.Random(11)
    moons = [world.moon_scene(rng, 1 if i % 5 < 2 else 2 if i % 5 < 4 else 3, held=True, jitter=0.0) for i in range(n)]
    others = [world.sample_scene(rng, 1 if i % 5 < 2 else 2 if i % 5 < 4 else 3, held=True, jitter=0.0) for i in range(n)]
    for name, scenes in (("moons", moons), ("other shapes", others)):
        texts = [world.caption(s, rng, held=True) for s in scenes]
        shown = []
        for strength in (0.0, 1.0):
            for module in adapted.values():
                module.strength = strength
            images, (colors, shapes, places, backgrounds) = score(flow, vae, scenes, texts)
            shown.append(images[:16])
            print(f"{name}, {n} prompts, {'with' if strength else 'without'} the adapter: colors {colors:.1f} shapes {shapes:.1f} "
                  f"places {places:.1f} backgrounds {backgrounds:.1f}", flush=True)
        if folder:
            file = os.path.join(folder, name.replace(" ", "_") + ".png")
            world.to_png(world.grid(torch.cat(shown), 8), file)


def save(adapted, rank, path):
    """Writes one file in diffusers' form, in bf16."""
    tensors = {}
    for name, module in adapted.items():
        for key, value in (("lora_A", module.down), ("lora_B", module.up)):
            tensors[f"transformer.{name}.{key}.weight"] = value.detach().to(torch.bfloat16).contiguous()
    settings = {"transformer.r": rank, "transformer.lora_alpha": rank, "transformer.target_modules": sorted(adapted)}
    metadata = {
        "format": "pt",
        "lora_adapter_metadata": json.dumps(settings, sort_keys=True),
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.title": "Moon for kiln's built-in model",
        "modelspec.architecture": "flux-2/lora",
        "modelspec.trigger_phrase": world.MOON,
    }
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    save_file(tensors, path, metadata=metadata)
    print(f"{path}: {len(adapted)} layers of rank {rank}, {os.path.getsize(path)} bytes", flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True, help="the file to write")
    p.add_argument("--steps", type=int, default=240)
    p.add_argument("--model", default=MODEL)
    p.add_argument("--init", help="an adapter to go on from")
    p.add_argument("--rank", type=int, default=8)
    p.add_argument("--scenes", type=int, default=150, help="scenes with a moon; a third as many without")
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--score", type=int, default=50, help="prompts of each kind that are scored")
    p.add_argument("--images", help="a folder for images of the score")
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    start = time.time()
    torch.manual_seed(a.seed)
    torch.set_num_threads(os.cpu_count() or 1)
    rng = random.Random(a.seed)
    vae, flow = C.load_models(a.model)
    vae.requires_grad_(False)
    adapted = adapt(flow.transformer, a.rank)
    moons = Pool(flow, vae, [world.moon_scene(rng) for _ in range(a.scenes)], rng)
    others = Pool(flow, vae, [world.sample_scene(rng) for _ in range(a.scenes // 3)], rng)
    print(f"{a.scenes + a.scenes // 3} scenes encoded in {time.time() - start:.0f} s", flush=True)

    if a.init:
        kept = load_file(a.init)
        with torch.no_grad():
            for name, module in adapted.items():
                module.down.copy_(kept[f"transformer.{name}.lora_A.weight"]), module.up.copy_(kept[f"transformer.{name}.lora_B.weight"])
    params = [p for module in adapted.values() for p in (module.down, module.up)]
    optimizer = torch.optim.AdamW(params, lr=a.lr, betas=(0.9, 0.99), weight_decay=0.0)
    sigmas = C.schedule()[:C.STEPS]      # only the noise levels that are sampled
    running, said = None, time.time()
    for step in range(a.steps):
        parts = zip(moons.batch(a.batch * 3 // 4), others.batch(a.batch - a.batch * 3 // 4))
        x0, text, weight = (torch.cat(both) for both in parts)
        noise, sigma = torch.randn_like(x0), sigmas[torch.randint(0, C.STEPS, (len(x0),))]
        velocity = flow.velocity(x0 + sigma[:, None, None] * (noise - x0), [], text, sigma)
        loss = ((velocity - (noise - x0)).square() * weight[..., None]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        # Warm-up for 20 steps, then a cosine decay.
        for group in optimizer.param_groups:
            group["lr"] = a.lr * min(1.0, (step + 1) / 20) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / a.steps)))
        optimizer.step()
        running = loss.item() if running is None else running + 0.03 * (loss.item() - running)
        if time.time() - said > 20:
            said = time.time()
            print(f"step {step + 1} loss {running:.4f}, {time.time() - start:.0f} s", flush=True)
    print(f"{a.steps} steps in {time.process_time() / 60:.1f} minutes of a core, {(time.time() - start) / 60:.1f} by the clock", flush=True)
    save(adapted, a.rank, a.out)
    with torch.no_grad():
        # The score uses the saved weights.
        for module in adapted.values():
            module.down.copy_(module.down.bfloat16()), module.up.copy_(module.up.bfloat16())
        report(flow, vae, adapted, a.score, a.images)


if __name__ == "__main__":
    main()
