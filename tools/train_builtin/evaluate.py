"""A quick sanity score of EMA weights at 4 steps on held-out prompts, and image grids to look at.

    python evaluate.py --weights WORK/ema --out FOLDER [--n 200]

It shares the renderer with training, so it serves as a check during training. It is not the project's score.
"""
import argparse
import os
import random

import torch

import common as C
import world
from tokenizer import Tok

PAL = torch.tensor([world.RGB[c] for c in world.COLORS], dtype=torch.float32) / 127.5 - 1


def masks(shapes, cx, cy, r, rot, dev, stride=2):
    """Hard masks [N, 256/stride, 256/stride] of shapes (indices) at the given places."""
    g = torch.arange(0, world.SIZE, stride, device=dev) + stride / 2
    f = lambda v: torch.as_tensor(v, dtype=torch.float32, device=dev).view(-1, 1, 1)
    px, py = (g.view(1, 1, -1) - f(cx)) / f(r), (f(cy) - g.view(1, -1, 1)) / f(r)
    cs, sn = torch.cos(f(rot)), torch.sin(f(rot))
    return world._sdf(f(shapes) + 1, cs * px + sn * py, -sn * px + cs * py) < 0


def score_scene(img, scene, dev):
    """img [3,256,256] in [-1,1] -> per-object (color ok, shape ok, place ok), background ok."""
    small = torch.nn.functional.avg_pool2d(img[None], 2)[0]
    pix = small.permute(1, 2, 0)
    names = list(dict.fromkeys([o.color for o in scene.objs] + world.bg_colors(scene.bg)))
    near_all = (pix[..., None, :] - PAL.to(dev)).square().sum(-1).argmin(-1)
    near = (pix[..., None, :] - PAL.to(dev)[[world.COLORS.index(c) for c in names]]).square().sum(-1).argmin(-1)
    yy, xx = torch.meshgrid(torch.arange(128, device=dev) * 2 + 1.0, torch.arange(128, device=dev) * 2 + 1.0, indexing="ij")
    out, taken = [], torch.zeros(128, 128, dtype=torch.bool, device=dev)
    for o in scene.objs:
        core = masks([world.shape_index(o.shape)], [o.cx], [o.cy], [o.r * 0.85], [0.0], dev)[0]
        want = world.COLORS.index(o.color)
        col = bool((near_all[core] == want).float().mean() > 0.6) if core.any() else False
        box = ((xx - o.cx).abs() < o.r * 1.2 + 14) & ((yy - o.cy).abs() < o.r * 1.2 + 14)
        m = (near == names.index(o.color)) & box
        taken |= box
        if m.sum() < 30:
            out.append((col, False, False))
            continue
        mx, my = xx[m].mean().item(), yy[m].mean().item()
        ref = masks([world.shape_index(o.shape)], [o.cx], [o.cy], [o.r], [0.0], dev)[0]
        place = ((mx - xx[ref].mean().item()) ** 2 + (my - yy[ref].mean().item()) ** 2) ** 0.5 < 16
        best, arg = -1.0, ""
        for name in world.SHAPES + [o.shape] * (o.shape == world.MOON):
            s = world.shape_index(name)
            base = masks([s], [128.0], [128.0], [o.r], [0.0], dev)[0]
            bx, by = xx[base].mean().item() - 128, yy[base].mean().item() - 128
            area = (m.sum() / base.sum()).sqrt().item()
            v = [(dx, dy, k) for dx in (-2, 0, 2) for dy in (-2, 0, 2) for k in (area * 0.95, area, area * 1.05)]
            cand = masks([s] * len(v), [mx - bx * area + a for a, _, _ in v], [my - by * area + b for _, b, _ in v],
                         [o.r * k for _, _, k in v], [0.0] * len(v), dev)
            iou = ((cand & m).sum((1, 2)) / (cand | m).sum((1, 2)).clamp(min=1)).max().item()
            if iou > best:
                best, arg = iou, name
        out.append((col, arg == o.shape and best > 0.7, place))
    empty = world.render_scenes([world.Scene(scene.bg, [])], dev)[0]
    far = torch.nn.functional.avg_pool2d((img - empty).abs()[None], 2)[0].mean(0)
    bg = bool((far[~taken] < 0.16).float().mean() > 0.95) if (~taken).any() else True
    return out, bg


def t2i_set(n, seed=11, held=True):
    rng = random.Random(seed)
    scenes = [world.sample_scene(rng, 1 if i % 5 < 2 else 2 if i % 5 < 4 else 3, held=held, jitter=0.0) for i in range(n)]
    return scenes, [world.caption(s, rng, held) for s in scenes]


def edit_set(n, seed=12):
    """[(kind, references, target, text)]; unseen pairs only where the kind leaves room, unseen wordings."""
    rng = random.Random(seed)
    out = []
    for i in range(n):
        kind = (world.EDITS1 + world.EDITS2)[i % 7]
        k, refs, dst, say = world.sample_edit(rng, kind, refs=2 if kind in world.EDITS2 else 1, held=None,
                                              jitter=0.0, held_wording=True)
        out.append((k, refs, dst, say()))
    return out


@torch.no_grad()
def report(flow, vae, dev, folder, tag, n=200, steps=C.STEPS, batch=100, guidance=1.0):
    os.makedirs(folder, exist_ok=True)
    flow.eval()
    tok = Tok()
    guided = dict(steps=steps, guidance=guidance, null=C.null_prompt(dev))
    toks = lambda texts: [torch.from_numpy(x).long().to(dev) for x in tok(texts)]
    g = torch.Generator(device=dev).manual_seed(5)
    scenes, texts = t2i_set(n)
    imgs = []
    for i in range(0, n, batch):
        ids, ln = toks(texts[i:i + batch])
        noise = torch.randn(len(ln), 256, 128, generator=g, device=dev)
        imgs.append(C.to_images(vae, C.sample(flow, ids, ln, noise=noise, **guided)).clamp(-1, 1))
    imgs = torch.cat(imgs)
    res = [score_scene(im.float(), s, dev) for im, s in zip(imgs, scenes)]
    per = [o for r, _ in res for o in r]
    pc = lambda v: 100.0 * sum(v) / max(len(v), 1)
    print(f"{tag}: {n} held-out prompts, {steps} steps: colors {pc([o[0] for o in per]):.1f} shapes {pc([o[1] for o in per]):.1f} "
          f"places {pc([o[2] for o in per]):.1f} backgrounds {pc([b for _, b in res]):.1f}", flush=True)
    shown = imgs[:32].float()
    world.to_png(world.grid(shown, 8), os.path.join(folder, f"{tag}_prompts.png"))
    with open(os.path.join(folder, f"{tag}_prompts.txt"), "w") as f:
        f.write("\n".join(texts[:32]) + "\n")

    edits = edit_set(max(n // 2, 1))
    made, kept, rows, lines, byk = [], [], [], [], {}
    for want in (1, 2):
        part = [e for e in edits if len(e[1]) == want]
        for i in range(0, len(part), batch):
            chunk = part[i:i + batch]
            ids, ln = toks([e[3] for e in chunk])
            ref_img = [world.render_scenes([e[1][j] for e in chunk], dev) for j in range(want)]
            refs = [C.to_tokens(vae, r).float() for r in ref_img]
            noise = torch.randn(len(ln), 256, 128, generator=g, device=dev)
            out = C.to_images(vae, C.sample(flow, ids, ln, refs, noise=noise, **guided)).clamp(-1, 1).float()
            goal = world.render_scenes([e[2] for e in chunk], dev)
            trip = C.to_images(vae, C.to_tokens(vae, goal)).clamp(-1, 1).float()
            for b, e in enumerate(chunk):
                ch = ((goal[b] - ref_img[0][b]).abs().sum(0) > 0.08)
                ch = torch.nn.functional.max_pool2d(ch[None].float(), 9, 1, 4)[0] > 0
                err, base = (out[b] - goal[b]).abs().mean(0) * 127.5, (trip[b] - goal[b]).abs().mean(0) * 127.5
                ok = bool((err[ch] < 30).float().mean() > 0.9) if ch.any() else True
                keep = bool(err[~ch].mean() <= base[~ch].mean() + 4) if (~ch).any() else True
                made.append(ok), kept.append(keep)
                byk.setdefault(e[0], []).append(ok)
                if len(rows) < 4 * 16 and (want == 2 or len(rows) < 4 * 12):
                    blank = torch.ones_like(goal[b])
                    rows += [ref_img[0][b], ref_img[1][b] if want == 2 else blank, out[b], goal[b]]
                    lines.append(e[3])
    print(f"{tag}: {len(edits)} edits: change made {pc(made):.1f} rest kept {pc(kept):.1f}; "
          + " ".join(f"{k} {pc(v):.0f}" for k, v in byk.items()), flush=True)
    world.to_png(world.grid(torch.stack([r.cpu() for r in rows]), 8), os.path.join(folder, f"{tag}_edits.png"))
    with open(os.path.join(folder, f"{tag}_edits.txt"), "w") as f:
        f.write("each: image 1, image 2, made, wanted; two edits a row\n" + "\n".join(lines) + "\n")
    flow.train()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--weights", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--n", type=int, default=200)
    p.add_argument("--steps", type=int, default=C.STEPS)
    p.add_argument("--guidance", type=float, default=1.0)
    p.add_argument("--controls", action="store_true", help="score the true renders instead of the model")
    a = p.parse_args()
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1 if dev == "cpu" else 4)
    if a.controls:
        scenes, _ = t2i_set(a.n)
        res = [score_scene(im, s, dev) for im, s in zip(world.render_scenes(scenes, dev), scenes)]
        per = [o for r, _ in res for o in r]
        print("true renders:", [round(100 * sum(o[i] for o in per) / len(per), 1) for i in range(3)],
              round(100 * sum(b for _, b in res) / len(res), 1))
        return
    vae, flow = C.load_models(a.weights)
    report(flow.to(dev), vae.to(dev), dev, a.out, f"eval{a.steps}", a.n, a.steps, guidance=a.guidance)


if __name__ == "__main__":
    main()
