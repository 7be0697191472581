"""Configurations, the three models, latents, token ids, sampling, weight files."""
import math
import os
import random

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
import numpy as np
import torch
from safetensors.torch import load_file, save_file

import world
from tokenizer import Tok

TEXT_LEN, TAPS, STEPS = 64, (1, 2, 4), 4
VOCAB = 704       # the tokenizer has 692 tokens
TRANSFORMER = dict(patch_size=1, in_channels=128, num_layers=1, num_single_layers=4, attention_head_dim=128,
                   num_attention_heads=2, joint_attention_dim=3 * 128, timestep_guidance_channels=256, mlp_ratio=3.0,
                   axes_dims_rope=(32, 32, 32, 32), rope_theta=2000, eps=1e-6, guidance_embeds=False)
ENCODER = dict(vocab_size=VOCAB, hidden_size=128, num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=1,
               head_dim=128, intermediate_size=256, max_position_embeddings=2048, rms_norm_eps=1e-6,
               tie_word_embeddings=True, attention_bias=False)
VAE = dict(block_out_channels=(32, 32, 64, 96), decoder_block_out_channels=(64, 64, 64, 64), latent_channels=32,
           norm_num_groups=32, layers_per_block=2, sample_size=256)


def make_vae():
    from diffusers import AutoencoderKLFlux2
    return AutoencoderKLFlux2(**VAE)


def make_encoder():
    from transformers import Qwen3Config, Qwen3ForCausalLM
    tok = Tok()
    ids = dict(pad_token_id=tok.pad, bos_token_id=None, eos_token_id=tok.t.token_to_id("<|im_end|>"))
    cfg = Qwen3Config(**ENCODER, **ids, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})
    m = Qwen3ForCausalLM(cfg)
    m.config._attn_implementation = "sdpa"
    return m


def make_transformer():
    from diffusers import Flux2Transformer2DModel
    m = Flux2Transformer2DModel(**TRANSFORMER)
    for name, p in m.named_parameters():
        if p.ndim == 2:
            if "modulation" in name or "norm_out" in name or name.startswith("proj_out"):
                torch.nn.init.zeros_(p)
            else:
                torch.nn.init.xavier_uniform_(p)
    return m


class Flow(torch.nn.Module):
    """Text encoder and transformer, trained together."""

    def __init__(self):
        super().__init__()
        self.transformer = make_transformer()
        self.text_encoder = make_encoder()

    def text(self, ids, lengths):
        """The tapped hidden states, [B,64,384]. It is transformers' Qwen3 (`check_text` compares them), written out so that it
        compiles into one graph with the transformer."""
        m = self.text_encoder.model
        b, n = ids.shape
        at = torch.arange(n, device=ids.device)
        mask = (at[None, :] <= at[:, None])[None] & (at[None, None, :] < lengths[:, None, None])
        x = m.embed_tokens(ids)
        heads, keys, dim = ENCODER["num_attention_heads"], ENCODER["num_key_value_heads"], ENCODER["head_dim"]
        turn = at[:, None].float() * (1e6 ** (-torch.arange(0, dim, 2, device=ids.device).float() / dim))[None]
        cos, sin = torch.cat([turn.cos()] * 2, -1), torch.cat([turn.sin()] * 2, -1)
        rotate = lambda v: v.float() * cos + torch.cat([-v[..., dim // 2:], v[..., :dim // 2]], -1).float() * sin
        taps = [x]
        for layer in m.layers[:max(TAPS)]:
            a = layer.self_attn
            h = layer.input_layernorm(x)
            q = rotate(a.q_norm(a.q_proj(h).view(b, n, heads, dim)).transpose(1, 2)).to(x.dtype)
            k = rotate(a.k_norm(a.k_proj(h).view(b, n, keys, dim)).transpose(1, 2)).to(x.dtype)
            v = a.v_proj(h).view(b, n, keys, dim).transpose(1, 2).to(x.dtype)
            k, v = (t.repeat_interleave(heads // keys, 1) for t in (k, v))
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
            x = x + a.o_proj(o.transpose(1, 2).reshape(b, n, heads * dim))
            h = layer.post_attention_layernorm(x)
            x = x + layer.mlp.down_proj(torch.nn.functional.silu(layer.mlp.gate_proj(h)) * layer.mlp.up_proj(h))
            taps.append(x)
        return torch.cat([taps[k] for k in TAPS], -1)

    def check_text(self, ids, lengths):
        """Largest difference between `text` and transformers' own forward pass."""
        mask = (torch.arange(ids.shape[1], device=ids.device)[None] < lengths[:, None]).long()
        out = self.text_encoder.model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
        return (torch.cat([out.hidden_states[k] for k in TAPS], -1) - self.text(ids, lengths)).abs().max().item()

    def velocity(self, x, refs, ctx, t):
        """x [B,256,128], refs list of [B,256,128], t [B] in 0..1."""
        n = x.shape[1]
        return self.transformer(hidden_states=torch.cat([x, *refs], 1) if refs else x, encoder_hidden_states=ctx,
                                timestep=t, img_ids=image_ids(n, len(refs), x.device),
                                txt_ids=text_ids(ctx.shape[1], x.device), return_dict=False)[0][:, :n]


def image_ids(n, refs, device):
    at, side = torch.arange(n, device=device), math.isqrt(n)
    zero = torch.zeros_like(at)
    return torch.cat([torch.stack([zero + 10 * j, at // side, at % side, zero], 1) for j in range(refs + 1)])


def text_ids(n, device):
    at = torch.arange(n, device=device)
    zero = torch.zeros_like(at)
    return torch.stack([zero, zero, zero, at], 1)


def schedule(n=STEPS, tokens=256, device="cpu"):
    m200, m10 = 0.00016927 * tokens + 0.45666666, 8.73809524e-05 * tokens + 1.89833333
    a = (m200 - m10) / 190
    mu = a * n + m200 - 200 * a
    s = torch.linspace(1, 1 / n, n, dtype=torch.float64)
    sig = math.exp(mu) / (math.exp(mu) + (1 / s - 1))
    return torch.cat([sig, torch.zeros(1, dtype=torch.float64)]).float().to(device)


def patchify(z):
    b, c, h, w = z.shape
    return z.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, c * 4, h // 2, w // 2)


def unpatchify(p):
    b, c, h, w = p.shape
    return p.reshape(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c // 4, h * 2, w * 2)


@torch.no_grad()
def to_tokens(vae, img, chunk=128, encode=None):
    """Images -> normalized tokens [B,256,128] in bf16 on a GPU, fp32 on a CPU."""
    dt = next(vae.parameters()).dtype
    out = []
    for part in img.split(chunk):
        m = (encode or vae._encode)(part.to(dt, memory_format=torch.channels_last)).float()[:, :32]
        p = patchify(m.contiguous())
        p = (p - vae.bn.running_mean.float().view(1, -1, 1, 1)) / (vae.bn.running_var.float().view(1, -1, 1, 1) + 1e-4).sqrt()
        out.append(p.flatten(2).transpose(1, 2).to(dt))
    return torch.cat(out)


@torch.no_grad()
def to_images(vae, tok, chunk=64):
    dt = next(vae.parameters()).dtype
    s = math.isqrt(tok.shape[1])
    out = []
    for part in tok.float().split(chunk):
        p = part.transpose(1, 2).reshape(part.shape[0], 128, s, s)
        p = p * (vae.bn.running_var.float().view(1, -1, 1, 1) + 1e-4).sqrt() + vae.bn.running_mean.float().view(1, -1, 1, 1)
        out.append(vae.decode(unpatchify(p).to(dt)).sample.float())
    return torch.cat(out)


@torch.no_grad()
def sample(flow, ids, lengths, refs=(), steps=STEPS, noise=None, sig=None, velocity=None, null=None, guidance=1.0):
    ctx = flow.text(ids, lengths)
    n = ids.shape[0]
    sig = schedule(steps, device=ids.device) if sig is None else sig
    x = torch.randn(n, 256, 128, device=ids.device) if noise is None else noise
    velocity = velocity or flow.velocity
    un = flow.text(null[0].expand(n, -1), null[1].expand(n)) if guidance != 1.0 else None
    for i in range(len(sig) - 1):
        t = sig[i].expand(n)
        v = velocity(x, list(refs), ctx, t).float()
        if un is not None:
            u = velocity(x, list(refs), un, t).float()
            v = u + guidance * (v - u)
        x = x + (sig[i + 1] - sig[i]) * v
    return x


# ---------------------------------------------------------------- weight files (EMA weights, bf16)

def shipped(sd):
    """The shipped dtypes: bf16, but batch-norm statistics and counters untouched."""
    return {k: (v.detach().clone().contiguous().cpu() if k.startswith("bn.") or not v.is_floating_point()
                else v.detach().to(torch.bfloat16).contiguous().cpu()) for k, v in sd.items() if k != "lm_head.weight"}


def save_part(folder, name, sd):
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, name + ".safetensors")
    save_file(shipped(sd), path + ".tmp", metadata={"format": "pt"})
    os.replace(path + ".tmp", path)


def load_part(folder, name, module):
    """Loads a module from a work folder's EMA weights, or from a model folder in export.py's form."""
    files = (name + ".safetensors", f"{name}/diffusion_pytorch_model.safetensors", f"{name}/model.safetensors")
    path = next((p for p in (os.path.join(folder, f) for f in files) if os.path.exists(p)), None)
    if path is None:
        return False
    sd = {k: v.float() if v.is_floating_point() else v for k, v in load_file(path).items()}
    missing, unexpected = module.load_state_dict(sd, strict=False)
    missing = [k for k in missing if k != "lm_head.weight"]
    assert not missing and not unexpected, (name, missing[:3], unexpected[:3])
    return True


def load_models(folder):
    """The VAE, and text encoder with transformer, with the weights of a folder."""
    vae, flow = make_vae().eval(), Flow().eval()
    for name, module in (("vae", vae), ("transformer", flow.transformer), ("text_encoder", flow.text_encoder)):
        assert load_part(folder, name, module), f"no {name} in {folder}"
    return vae, flow


def null_prompt(device):
    ids, n = Tok()([""])
    return torch.from_numpy(ids).long().to(device), torch.from_numpy(n).long().to(device)


# ---------------------------------------------------------------- batches of descriptions (made by CPU workers)

class Batches(torch.utils.data.IterableDataset):
    """Yields (ids [B,K,64], lengths [B,K], objects [B,1+refs,3,9], backgrounds [B,1+refs,8])."""

    def __init__(self, refs, batch, seed, captions=2):
        self.refs, self.batch, self.seed, self.captions = refs, batch, seed, captions

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self.seed}/{self.refs}/{info.id if info else 0}")
        tok = Tok()
        torch.set_num_threads(1)
        while True:
            texts, scenes = [], []
            for _ in range(self.batch):
                if self.refs == 0:
                    s = world.sample_scene(rng)
                    scenes.append(s)
                    texts += [world.caption(s, rng) for _ in range(self.captions)]
                else:
                    _, rf, dst, say = world.sample_edit(rng, refs=self.refs)
                    scenes += [dst, *rf]
                    texts += [say() for _ in range(self.captions)]
            ids, n = tok(texts)
            ob, bg = world.describe(scenes)
            k, r = self.captions, self.refs + 1
            yield (torch.from_numpy(ids.astype(np.int16)).view(-1, k, TEXT_LEN), torch.from_numpy(n.astype(np.int16)).view(-1, k),
                   torch.from_numpy(ob).view(-1, r, 3, world.OBJ_F), torch.from_numpy(bg).view(-1, r, world.BG_F))


def loader(refs, batch, seed, workers, captions=2):
    ds = Batches(refs, batch, seed, captions)
    return iter(torch.utils.data.DataLoader(ds, batch_size=None, num_workers=workers, pin_memory=torch.cuda.is_available(),
                                            prefetch_factor=3 if workers else None))
