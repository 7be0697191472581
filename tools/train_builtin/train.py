"""Trains the built-in model in stages that stop by the clock and resume:

    python train.py --stage vae|flow|distil --minutes M --work DIR [--init DIR]

DIR/state_<stage>.pt holds weights, optimizer and EMA; DIR/ema/{vae,transformer,text_encoder}.safetensors hold the EMA weights in
bf16. The next stage, another machine (--init) and export.py need nothing else.
"""
import argparse
import contextlib
import copy
import math
import os
import random
import time

import torch
import torch._dynamo

import common as C
import world

T0 = time.time()
CHUNK = 128          # images rendered and encoded at a time


class Clock:
    """Wall clock of this run plus the minutes of earlier runs of the same stage."""

    def __init__(self, minutes, total, before):
        self.start, self.minutes, self.total, self.before = T0, minutes, total or before + minutes, before
        self.last, self.steps, self.hot = time.time(), 0, None

    def spent(self):
        return (time.time() - self.start) / 60

    def over(self, reserve=0.0):
        return self.spent() + reserve >= self.minutes

    def progress(self):
        return min((self.before + self.spent()) / self.total, 1.0)

    def report(self, step, text, every=15):
        now = time.time()
        self.hot = self.hot or (now, step)
        if now - self.last < every:
            return False
        rate = (step - self.steps) / (now - self.last)
        self.last, self.steps = now, step
        print(f"step {step} {text} {rate:.2f} steps/s progress {self.progress():.3f} left {60 * (self.minutes - self.spent()):.0f}s",
              flush=True)
        return True


class Ema:
    def __init__(self, module, decay):
        self.decay, self.n = decay, 0
        self.p = [p.detach().clone().float() for p in module.parameters()]

    @torch.no_grad()
    def update(self, module):
        self.n += 1
        d = min(self.decay, (1 + self.n) / (10 + self.n))
        torch._foreach_lerp_(self.p, [p.detach() for p in module.parameters()], 1 - d)

    @contextlib.contextmanager
    def swapped(self, module):
        kept = [p.detach().clone() for p in module.parameters()]
        with torch.no_grad():
            for p, e in zip(module.parameters(), self.p):
                p.copy_(e)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, k in zip(module.parameters(), kept):
                    p.copy_(k)


def lr_at(clock, step, peak, warm, floor=0.03, hold=0.45):
    p = clock.progress()
    x = 1.0 if p < hold else floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (p - hold) / (1 - hold)))
    return peak * x * min(1.0, (step + 1) / warm)


def save_state(a, stage, module, opt, ema, step, minutes):
    path = os.path.join(a.work, f"state_{stage}.pt")
    torch.save({"model": module.state_dict(), "opt": opt.state_dict(), "ema": ema.p, "ema_n": ema.n, "step": step,
                "minutes": minutes}, path + ".tmp")
    os.replace(path + ".tmp", path)


def load_state(a, stage, module, opt, ema, dev):
    path = os.path.join(a.work, f"state_{stage}.pt")
    if a.restart or a.warm or not os.path.exists(path):
        return 0, 0.0
    s = torch.load(path, map_location=dev, weights_only=True)
    module.load_state_dict(s["model"])
    opt.load_state_dict(s["opt"])
    ema.p, ema.n = s["ema"], s["ema_n"]
    print(f"resumed {stage} at step {s['step']}, {s['minutes']:.1f} minutes trained", flush=True)
    return s["step"], s["minutes"]


def init_from(a, names, module):
    """Loads the first of the named weight files from the work folder, else from --init."""
    for folder in (os.path.join(a.work, "ema"), a.init):
        for name in names:
            if folder and C.load_part(folder, name, module):
                print(f"{name}: EMA weights from {folder}", flush=True)
                return True
    return False


def init_flow(a, flow):
    """Loads the undistilled flow weights if there are any, else the final ones."""
    return all([init_from(a, [f"flow_{n}", n], getattr(flow, n)) for n in ("transformer", "text_encoder")])


def compiled(a, f, **k):
    if a.compile != "all" or not torch.cuda.is_available():
        return f
    return torch.compile(f, dynamic=False, **k)


def compile_blocks(a, *flows):
    if a.compile == "blocks" and torch.cuda.is_available():
        for flow in flows:
            for block in [*flow.transformer.transformer_blocks, *flow.transformer.single_transformer_blocks]:
                block.compile(dynamic=False)


def renderer(a):
    layer = compiled(a, world.layer)
    return lambda ob, bg: world.render(ob, bg, layer=layer)


def cast(dev):
    return torch.autocast(dev, dtype=torch.bfloat16, enabled=dev == "cuda")


class Adam:
    """AdamW with clipped gradients and a learning rate that each step receives."""

    def __init__(self, params, lr, dev, wd=0.01):
        self.params = [p for p in params if p.requires_grad]
        groups = [{"params": [p for p in self.params if p.ndim >= 2], "weight_decay": wd},
                  {"params": [p for p in self.params if p.ndim < 2], "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), eps=1e-8, fused=dev == "cuda")
        self.zero_grad, self.state_dict, self.load_state_dict = self.adam.zero_grad, self.adam.state_dict, self.adam.load_state_dict

    def step(self, lr):
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        for g in self.adam.param_groups:
            g["lr"] = lr
        self.adam.step()


class Muon:
    """Orthogonalized momentum (Newton-Schulz) for the matrices inside the blocks, AdamW for the rest. Matrices are split into
    squares of the model's width, so that queries, keys, gates and so on are separate. All run in two batches."""

    def __init__(self, flow, lr, ratio, dev):
        self.ratio, self.groups, taken = ratio, [], set()
        for width, prefix in ((256, ("transformer.transformer_blocks.", "transformer.single_transformer_blocks.")),
                              (128, ("text_encoder.model.layers.",))):
            ps = [p for n, p in flow.named_parameters() if n.startswith(prefix) and p.ndim == 2
                  and not n.startswith(f"text_encoder.model.layers.{max(C.TAPS)}.")]
            taken |= {id(p) for p in ps}
            count = sum(p.numel() for p in ps) // width ** 2
            self.groups.append((width, ps, torch.zeros(count, width, width, device=dev)))
        self.rest = Adam([p for p in flow.parameters() if id(p) not in taken], lr, dev)

    @staticmethod
    def squares(t, w):
        m, n = t.shape
        return t.view(m // w, w, n // w, w).transpose(1, 2).reshape(-1, w, w)

    @torch.no_grad()
    def step(self, lr):
        self.rest.step(lr)
        for w, ps, momentum in self.groups:
            grad = torch.cat([self.squares(p.grad, w) for p in ps])
            momentum.lerp_(grad, 0.05)
            x = torch.lerp(grad, momentum, 0.95).bfloat16()
            x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
            for _ in range(5):
                a = x @ x.mT
                x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
            # entries of size 0.2 on average, as in AdamW's steps
            x = x.float() * (0.2 * w ** 0.5 * self.ratio * lr)
            at = 0
            deltas = []
            for p in ps:
                m, n = p.shape
                k = (m // w) * (n // w)
                deltas.append(x[at:at + k].view(m // w, n // w, w, w).transpose(1, 2).reshape(m, n))
                at += k
            torch._foreach_mul_(ps, 1 - 0.05 * lr)
            torch._foreach_sub_(ps, deltas)

    def zero_grad(self):
        self.rest.zero_grad()
        for _, ps, _ in self.groups:
            for p in ps:
                p.grad = None

    def state_dict(self):
        return {"adam": self.rest.state_dict(), "momentum": [m for _, _, m in self.groups]}

    def load_state_dict(self, s):
        self.rest.load_state_dict(s["adam"])
        for (_, _, m), v in zip(self.groups, s["momentum"]):
            m.copy_(v)


def make_optimizer(a, flow, lr, dev):
    return Muon(flow, lr, a.muon, dev) if a.muon else Adam(flow.parameters(), lr, dev)


# ---------------------------------------------------------------- VAE

def train_vae(a, dev):
    vae = C.make_vae().to(dev)
    if dev == "cuda":
        vae = vae.to(memory_format=torch.channels_last)
    init_from(a, ["vae"], vae)
    peak = a.lr or 1e-3
    opt, ema = Adam(vae.parameters(), peak, dev, wd=1e-4), Ema(vae, 0.998)
    step, before = load_state(a, "vae", vae, opt, ema, dev)
    clock = Clock(a.minutes, a.total, before)
    data = C.loader(0, a.batch or 64, f"vae{a.seed}{step}", a.workers, captions=1)
    rend = renderer(a)
    enc, dec = compiled(a, vae._encode), compiled(a, lambda z: vae.decoder(vae.post_quant_conv(z)))
    first = step
    while not clock.over(0.35 * a.reserve) and step - first < a.max_steps:
        _, _, ob, bg = next(data)
        with torch.no_grad():
            x = rend(ob[:, 0].to(dev, non_blocking=True), bg[:, 0].to(dev, non_blocking=True))
            if dev == "cuda":
                x = x.contiguous(memory_format=torch.channels_last)
        with cast(dev):
            m, lv = enc(x).float().chunk(2, 1)
            lv = lv.clamp(-12, 4)
            # three quarters of each batch with the sampled latent, the rest with its mean (which is used later)
            q = (torch.arange(x.shape[0], device=dev) % 4 != 0).view(-1, 1, 1, 1)
            z = m + torch.randn_like(m) * (0.5 * lv).exp() * q
            y = dec(z).float()
        kl = 0.5 * (m.square() + lv.exp() - 1 - lv).mean()
        l1 = (y - x).abs().mean()
        gx = ((y - x)[..., 1:] - (y - x)[..., :-1]).abs().mean()
        gy = ((y - x)[..., 1:, :] - (y - x)[..., :-1, :]).abs().mean()
        mse = (y - x).square().mean()
        beta = a.kl * min(1.0, 0.02 + clock.progress() / 0.3)
        loss = l1 + mse + 0.5 * (gx + gy) + beta * kl
        opt.zero_grad()
        loss.backward()
        opt.step(lr_at(clock, step, peak, 200))
        ema.update(vae)
        step += 1
        if step % 20 == 0:
            clock.report(step, f"vae l1 {l1.item() * 127.5:.3f}/255 grad {(gx + gy).item() * 127.5:.3f} kl {kl.item():.3f}")
    save_state(a, "vae", vae, opt, ema, step, before + clock.spent())
    # the shipped form: EMA weights rounded to bf16, then the statistics of their latents
    ship = C.make_vae().to(dev)
    with ema.swapped(vae):
        ship.load_state_dict({k: v.to(torch.bfloat16).float() if v.is_floating_point() else v for k, v in vae.state_dict().items()})
    ship.eval().requires_grad_(False)
    n, s1, s2 = 0, 0, 0
    with torch.no_grad():
        for _ in range(a.stat_batches):
            _, _, ob, bg = next(data)
            p = C.patchify(ship._encode(rend(ob[:, 0].to(dev), bg[:, 0].to(dev)))[:, :32].contiguous()).double()
            n, s1, s2 = n + p.numel() // 128, s1 + p.sum((0, 2, 3)), s2 + p.square().sum((0, 2, 3))
        ship.bn.running_mean.copy_((s1 / n).float())
        ship.bn.running_var.copy_((s2 / n - (s1 / n) ** 2).clamp(min=0).float())
    C.save_part(os.path.join(a.work, "ema"), "vae", ship.state_dict())
    rng = random.Random(7)
    x = world.render_scenes([world.sample_scene(rng, held=None) for _ in range(8)], dev)
    y = C.to_images(ship, C.to_tokens(ship, x))
    std = ship.bn.running_var.sqrt()
    print(f"vae done: {step} steps, round trip {(x - y).abs().mean().item() * 127.5:.3f}/255, latent std "
          f"{std.min().item():.3f}..{std.max().item():.3f}, values under 0.05: {(std < 0.05).sum().item()}", flush=True)
    world.to_png(world.grid(torch.cat([x, y.clamp(-1, 1)]), 8), os.path.join(a.work, "vae.png"))


# ---------------------------------------------------------------- flow

class Pool:
    """A ring of encoded batches per mode; each is used about `reuse` times before it is replaced."""

    def __init__(self, a, dev, vae, sizes, slots, reuse, seed=""):
        w = a.workers
        share = [w - w // 2, (w // 2 + 1) // 2, w // 4] if w else [0, 0, 0]
        share = [max(s, 1) for s in share] if w else share
        self.a, self.dev, self.vae, self.slots, self.reuse = a, dev, vae, slots, reuse
        self.data = [C.loader(r, sizes[r], f"{seed}{a.seed}", share[r], captions=4) for r in range(3)]
        self.ring = [[], [], []]
        self.rend, self.enc = renderer(a), compiled(a, vae._encode)
        self.rng = random.Random(f"{a.seed}{seed}")

    def fresh(self, mode):
        ids, n, ob, bg = [t.to(self.dev, non_blocking=True) for t in next(self.data[mode])]
        b, r = ob.shape[:2]
        with torch.no_grad():
            weight = token_weights(ob[:, :2])
            # one fixed rendering shape for every mode
            tok = []
            ob, bg = ob.reshape(b * r, 3, -1), bg.reshape(b * r, -1)
            for i in range(0, b * r, CHUNK):
                o, g = ob[i:i + CHUNK], bg[i:i + CHUNK]
                k = o.shape[0]
                if k < CHUNK and self.dev == "cuda":
                    o, g = torch.cat([o, o[:1].expand(CHUNK - k, -1, -1)]), torch.cat([g, g[:1].expand(CHUNK - k, -1)])
                tok.append(C.to_tokens(self.vae, self.rend(o, g), encode=self.enc)[:k])
            tok = torch.cat(tok)
        return ids, n, tok.view(b, r, 256, 128), weight

    def get(self, mode):
        ring = self.ring[mode]
        if len(ring) < min(self.slots, 8) or self.rng.random() < 1 / self.reuse:
            item = self.fresh(mode)
            if len(ring) < self.slots:
                ring.append(item)
            else:
                ring[self.rng.randrange(self.slots)] = item
        else:
            item = self.rng.choice(ring)
        ids, n, tok, weight = item
        k = torch.randint(0, ids.shape[1], (ids.shape[0],), device=self.dev)
        row = torch.arange(ids.shape[0], device=self.dev)
        refs = [tok[:, j].float() for j in range(1, tok.shape[1])]
        return ids[row, k].long(), n[row, k].long(), tok[:, 0].float(), refs, weight


def token_weights(ob):
    """Tokens that show an object of the target, or of the first reference, count three times; the mean is one. [B,256]."""
    at = torch.arange(16, device=ob.device) * 16 + 8.0
    near = lambda c, r: (at[None, None] - c[..., None]).abs() < r[..., None] * 1.1 + 8          # [B,n,16]
    ob = ob.flatten(1, 2)
    on = near(ob[..., 2], ob[..., 3])[..., :, None] & near(ob[..., 1], ob[..., 3])[..., None, :] & (ob[..., 8] > 0)[..., None, None]
    w = 1 + 2 * on.any(1).flatten(1).float()
    return w / w.mean(1, keepdim=True)


@torch.no_grad()
def channel_weights(vae, dev):
    """How strongly the image follows each of a token's 128 values, as weights of the loss: square root, mean one."""
    if dev != "cuda":
        return torch.ones(128, device=dev)      # for trying it out; 128 images take minutes there
    rng = random.Random(3)
    tok = C.to_tokens(vae, world.render_scenes([world.sample_scene(rng, 2) for _ in range(8)], dev)).float()
    g = torch.Generator(device=dev).manual_seed(3)
    noise = 0.3 * torch.randn(tok.shape[:2], generator=g, device=dev)
    base, out = C.to_images(vae, tok), []
    for c in range(128):
        moved = tok.clone()
        moved[:, :, c] += noise
        out.append((C.to_images(vae, moved) - base).square().mean())
    w = torch.stack(out).sqrt()
    w = (w / w.mean()).clamp(0.3, 3.0)
    print("channel weights", " ".join(f"{v:.2f}" for v in w.sort().values[::16].tolist()), f"{w.max():.2f}", flush=True)
    return w / w.mean()


def load_vae(a, dev):
    vae = C.make_vae()
    assert init_from(a, ["vae"], vae) or a.warm, "no trained VAE: run --stage vae, or give --init"
    if not a.warm and not os.path.exists(os.path.join(a.work, "ema", "vae.safetensors")):
        C.save_part(os.path.join(a.work, "ema"), "vae", vae.state_dict())
    vae = vae.to(dev).eval().requires_grad_(False)
    if dev == "cuda":
        stats = vae.bn.running_mean.clone(), vae.bn.running_var.clone()
        vae = vae.to(torch.bfloat16).to(memory_format=torch.channels_last)
        vae.bn = vae.bn.float()
        vae.bn.running_mean.copy_(stats[0]), vae.bn.running_var.copy_(stats[1])
    return vae


def draw_sigma(b, dev):
    """45 % near the four sampled sigmas, 40 % logit-normal with the sampler's shift, 15 % uniform above the lowest sigma that the
    distillation's teacher visits."""
    mu = 1.97
    u = torch.sigmoid(torch.randn(b, device=dev))
    s = math.exp(mu) / (math.exp(mu) + 1 / u - 1)
    k = torch.randint(0, 4, (b,), device=dev)
    near = C.schedule(device=dev)[k] + torch.where(k == 0, 0.0, 0.01) * torch.randn(b, device=dev)
    near = torch.where(near > 1, 2 - near, near)
    pick = torch.rand(b, device=dev)
    s = torch.where(pick < 0.45, near, torch.where(pick < 0.6, 0.2 + 0.8 * torch.rand(b, device=dev), s))
    return s.clamp(0.1, 1.0)


def set_null(ids, n, null, rate):
    drop = torch.rand(ids.shape[0], device=ids.device) < rate
    return torch.where(drop[:, None], null[0], ids), torch.where(drop, null[1], n)


def sizes_of(a, dev):
    b = a.batch or 256
    return [b, max(b * 5 // 8, 1), max(b * 3 // 8, 1)]


def pick_mode(rng):
    return rng.choices((0, 1, 2), (0.4, 0.4, 0.2))[0]


def next_mode(a, rng, i):
    return i % 3 if a.warm else pick_mode(rng)


def finish_flow(a, dev, stage, flow, opt, ema, step, minutes, vae):
    if a.warm:
        return
    save_state(a, stage, flow, opt, ema, step, minutes)
    with ema.swapped(flow):
        for prefix in ("", "flow_") if stage == "flow" else ("",):
            C.save_part(os.path.join(a.work, "ema"), prefix + "transformer", flow.transformer.state_dict())
            C.save_part(os.path.join(a.work, "ema"), prefix + "text_encoder", flow.text_encoder.state_dict())
        if not a.no_samples:
            import evaluate
            with cast(dev):
                evaluate.report(flow, vae, dev, a.work, stage, n=a.eval_n)
                if stage == "flow":
                    evaluate.report(flow, vae, dev, a.work, "flow_guided", n=a.eval_n, guidance=a.guidance)


def train_flow(a, dev):
    vae = load_vae(a, dev)
    flow = C.Flow().to(dev)
    init_flow(a, flow)
    peak = a.lr or 1e-3
    opt, ema = make_optimizer(a, flow, peak, dev), Ema(flow, 0.9992)
    step, before = load_state(a, "flow", flow, opt, ema, dev)
    clock = Clock(a.minutes, a.total, before)
    pool = Pool(a, dev, vae, sizes_of(a, dev), a.slots, a.reuse, seed=f"flow{step}")
    null = C.null_prompt(dev)
    weights = channel_weights(vae, dev)

    def loss_of(ids, n, x0, refs, weight, noise, s):
        with cast(dev):
            v = flow.velocity(x0 + s[:, None, None] * (noise - x0), refs, flow.text(ids, n), s).float()
        return ((v - (noise - x0)).square() * weights * weight[..., None]).mean()

    loss_of = compiled(a, loss_of)
    compile_blocks(a, flow)
    rng, first, run = random.Random(f"{a.seed}{step}"), step, None
    while not clock.over(a.reserve) and step - first < a.max_steps:
        mode = next_mode(a, rng, step)
        ids, n, x0, refs, weight = pool.get(mode)
        ids, n = set_null(ids, n, null, 0.1)
        loss = loss_of(ids, n, x0, refs, weight, torch.randn_like(x0), draw_sigma(x0.shape[0], dev))
        opt.zero_grad()
        loss.backward()
        opt.step(lr_at(clock, step, peak, 300))
        ema.update(flow)
        step += 1
        if run is None:
            run = [None] * 3
        run[mode] = loss.detach() if run[mode] is None else torch.lerp(run[mode], loss.detach(), 0.03)
        if step % 10 == 0:
            clock.report(step, "flow loss " + " ".join("-" if r is None else f"{r.item():.4f}" for r in run))
    finish_flow(a, dev, "flow", flow, opt, ema, step, before + clock.spent(), vae)


# ---------------------------------------------------------------- distillation to 4 steps

def train_distil(a, dev):
    """The teacher (the flow's EMA) walks from noise to an image in many steps. The student, rolled out by its own four steps from
    the same noise, learns at each of them to point straight at the teacher's end point."""
    vae = load_vae(a, dev)
    flow = C.Flow().to(dev)
    assert init_flow(a, flow) or a.warm, "no flow weights: run --stage flow, or give --init"
    teacher = copy.deepcopy(flow).eval().requires_grad_(False)
    peak = a.lr or 4e-4
    opt, ema = make_optimizer(a, flow, peak, dev), Ema(flow, 0.998)
    step, before = load_state(a, "distil", flow, opt, ema, dev)
    clock = Clock(a.minutes, a.total, before)
    pool = Pool(a, dev, vae, sizes_of(a, dev), 16, 1.0, seed=f"distil{step}")
    null = C.null_prompt(dev)
    weights = channel_weights(vae, dev)
    sig, many = C.schedule(device=dev), C.schedule(a.teacher_steps, device=dev)
    teach, roll = compiled(a, teacher.velocity), compiled(a, flow.velocity)

    def loss_of(ids, n, x, refs, weight, end, t, sigma):
        with cast(dev):
            v = flow.velocity(x, refs, flow.text(ids, n), t).float()
        return (((x - end) / sigma - v).square() * weights * weight[..., None]).mean()

    loss_of = compiled(a, loss_of)
    compile_blocks(a, flow, teacher)
    rng, first, run = random.Random(f"{a.seed}{step}d"), step, [None] * 4
    bank = [[], [], []]
    lerp = lambda old, new: new if old is None else old + 0.05 * (new - old)
    while not clock.over(a.reserve) and step - first < a.max_steps:
        mode = next_mode(a, rng, step)
        ring = bank[mode]
        if len(ring) < 8 or rng.random() < 1 / a.pair_reuse:
            ids, n, _, refs, weight = pool.get(mode)
            noise = torch.randn(ids.shape[0], 256, 128, device=dev)
            with torch.no_grad(), cast(dev):
                end = C.sample(teacher, ids, n, refs, noise=noise, sig=many, null=null, guidance=a.guidance, velocity=teach)
            item = (ids, n, [r.bfloat16() for r in refs], weight, noise, end)
            if len(ring) < a.slots:
                ring.append(item)
            else:
                ring[rng.randrange(len(ring))] = item
        else:
            item = rng.choice(ring)
        ids, n, refs, weight, noise, end = item
        refs = [r.float() for r in refs]
        k = 1 if a.warm else rng.choices((0, 1, 2, 3), (0.2, 0.2, 0.25, 0.35))[0]
        x = noise
        if k:
            with torch.no_grad(), cast(dev):
                ctx = flow.text(ids, n)
                for i in range(k):
                    x = x + (sig[i + 1] - sig[i]) * roll(x, refs, ctx, sig[i].expand(len(x))).float()
        # the passed time is blurred a little, because engines round it in different ways
        t = (sig[k] + 0.002 * (2 * torch.rand(len(x), device=dev) - 1)).clamp(max=1.0)
        loss = loss_of(ids, n, x, refs, weight, end, t, sig[k])
        opt.zero_grad()
        loss.backward()
        opt.step(lr_at(clock, step, peak, 100, floor=0.02, hold=0.3))
        ema.update(flow)
        step += 1
        run[k] = lerp(run[k], loss.detach())
        if step % 10 == 0:
            clock.report(step, "distil loss by step " + " ".join("-" if r is None else f"{r.item():.4f}" for r in run))
    finish_flow(a, dev, "distil", flow, opt, ema, step, before + clock.spent(), vae)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--stage", choices=["vae", "flow", "distil"], required=True)
    p.add_argument("--minutes", type=float, required=True, help="wall clock of this run, start-up included")
    p.add_argument("--total", type=float, help="minutes of the whole stage over all its runs (for the learning rate)")
    p.add_argument("--work", required=True)
    p.add_argument("--init", help="folder of EMA weights to start from when --work has none")
    p.add_argument("--batch", type=int)
    p.add_argument("--lr", type=float)
    p.add_argument("--kl", type=float, default=2e-3)
    p.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) - 3, 0))
    p.add_argument("--slots", type=int, default=250, help="encoded batches kept per mode")
    p.add_argument("--reuse", type=float, default=16.0, help="how often an encoded batch is used")
    p.add_argument("--muon", type=float, default=2.0, help="learning rate of the blocks' matrices over the rest's; 0: AdamW")
    p.add_argument("--stat-batches", type=int, default=96)
    p.add_argument("--teacher-steps", type=int, default=12)
    p.add_argument("--pair-reuse", type=float, default=12.0)
    p.add_argument("--guidance", type=float, default=2.0, help="guidance of the distillation's teacher")
    p.add_argument("--max-steps", type=int, default=10 ** 9)
    p.add_argument("--reserve", type=float, default=0.4, help="minutes kept for saving and samples")
    p.add_argument("--eval-n", type=int, default=100)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--restart", action="store_true", help="ignore the saved state of this stage; start from EMA weights")
    p.add_argument("--warm", action="store_true", help="flow, distil: only fill the compiler's cache, save nothing")
    p.add_argument("--compile", choices=["all", "blocks", "none"], default="all",
                   help="all: fastest steps, minutes to compile; blocks: only the transformer's blocks, half a minute")
    p.add_argument("--no-samples", action="store_true")
    a = p.parse_args()
    if a.warm:
        a.max_steps, a.slots, a.teacher_steps, a.workers = 6, 1, 2, min(a.workers, 3)
    os.makedirs(a.work, exist_ok=True)
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(a.seed + int(time.time()) % 100000)
    if dev == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
        torch._dynamo.config.suppress_errors = True      # falls back to eager
        for name in ("recompile_limit", "cache_size_limit"):
            if hasattr(torch._dynamo.config, name):
                setattr(torch._dynamo.config, name, 64)
    else:
        torch.set_num_threads(1)
    {"vae": train_vae, "flow": train_flow, "distil": train_distil}[a.stage](a, dev)
    print(f"{a.stage}: this run took {(time.time() - T0) / 60:.2f} minutes", flush=True)


if __name__ == "__main__":
    main()
