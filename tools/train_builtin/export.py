"""Writes EMA weights as a diffusers-layout model folder in bf16.

    python export.py --weights WORK/ema --out MODEL_FOLDER [--check]
"""
import argparse
import json
import os
import shutil

import torch

import common as C
import tokenizer
import words


def export(weights, out):
    from diffusers import FlowMatchEulerDiscreteScheduler
    vae, flow = C.load_models(weights)
    stats = vae.bn.running_mean.clone(), vae.bn.running_var.clone()
    for name, m in (("vae", vae), ("transformer", flow.transformer), ("text_encoder", flow.text_encoder)):
        m = m.to(torch.bfloat16)
        if name == "vae":      # the statistics stay fp32
            m.bn.float()
            m.bn.running_mean.copy_(stats[0]), m.bn.running_var.copy_(stats[1])
        m.save_pretrained(os.path.join(out, name), safe_serialization=True) if name != "text_encoder" else m.save_pretrained(
            os.path.join(out, name))
    FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0, use_dynamic_shifting=True, base_shift=0.5,
                                    max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096,
                                    time_shift_type="exponential").save_pretrained(os.path.join(out, "scheduler"))
    if os.path.realpath(out) != os.path.realpath(os.path.dirname(tokenizer.FOLDER)):
        shutil.copytree(tokenizer.FOLDER, os.path.join(out, "tokenizer"), dirs_exist_ok=True)
    json.dump({"_class_name": "Flux2KleinPipeline", "_diffusers_version": "0.42.1", "is_distilled": True,
               "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
               "text_encoder": ["transformers", "Qwen3ForCausalLM"], "tokenizer": ["transformers", "Qwen2TokenizerFast"],
               "transformer": ["diffusers", "Flux2Transformer2DModel"], "vae": ["diffusers", "AutoencoderKLFlux2"]},
              open(os.path.join(out, "model_index.json"), "w"), indent=2)
    json.dump({"name": "builtin", "variant": "distilled", "text_layers": list(C.TAPS), "max_text_tokens": C.TEXT_LEN,
               "width": 256, "height": 256, "steps": C.STEPS, "guidance": 1.0, "max_reference_pixels": 256 * 256,
               "words": " ".join(words.words()), "draws": words.DRAWS},
              open(os.path.join(out, "kiln.json"), "w"), indent=2)
    total = sum(os.path.getsize(os.path.join(d, f)) for d, _, fs in os.walk(out) for f in fs)
    big = max((os.path.getsize(os.path.join(d, f)), f) for d, _, fs in os.walk(out) for f in fs)
    print(f"{out}: {total / 1e6:.2f} MB, largest file {big[1]} {big[0] / 2 ** 20:.2f} MiB")


def check(out):
    from diffusers import Flux2KleinPipeline
    pipe = Flux2KleinPipeline.from_pretrained(out, torch_dtype=torch.float32)
    k = dict(height=256, width=256, num_inference_steps=C.STEPS, max_sequence_length=C.TEXT_LEN,
             text_encoder_out_layers=C.TAPS, generator=torch.Generator().manual_seed(0))
    img = pipe(prompt="a large red star on a blue background", **k).images[0]
    img.save(os.path.join(out, "..", "check_prompt.png"))
    pipe(image=[img], prompt="make the star green", **k).images[0].save(os.path.join(out, "..", "check_edit.png"))
    print("Flux2KleinPipeline runs: check_prompt.png and check_edit.png are next to the folder")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--weights", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--check", action="store_true")
    a = p.parse_args()
    export(a.weights, a.out)
    if a.check:
        torch.set_num_threads(1)
        check(a.out)
