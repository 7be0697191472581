"""Images with the text that other programs store: tests/fixtures/foreign.

Each file is made as the program makes it, with the packages that the program calls:

- AUTOMATIC1111's web UI, modules/images.py: PNG text `parameters`; piexif's user comment in JPEG and WebP.
- stable-diffusion.cpp: the same text, as UTF-8 in a tEXt chunk.
- ComfyUI, nodes.py and comfy_extras: PNG texts `prompt` and `workflow`; Exif's Model and Make in WebP.
- InvokeAI: PNG text `invokeai_metadata`.
- mflux: piexif's user comment, an object without the bytes that name an encoding.
"""

import io
import json

import piexif
import piexif.helper
from PIL import Image, PngImagePlugin

from goldens.files import FIXTURES, Files

PARAMETERS = """a red fox, (snow:1.2), café 狐
second line
Negative prompt: blurry, bad
Steps: 20, Sampler: DPM++ 2M, CFG scale: 7, Seed: 1234567890123, Size: 64x64, Model hash: abcdef0123, Model: some model, \
Lora hashes: "a: 1, b: 2", Version: v1.10.1"""

CPP = """a red fox, café 狐
Negative prompt: blurry
Steps: 4, CFG scale: 1.000000, Guidance: 3.500000, Eta: 0.000000, Seed: 42, Size: 64x64, Model: flux-2-klein-4b.safetensors, \
RNG: cuda, Sampler: euler, Version: stable-diffusion.cpp"""

# A graph with KSampler.
SAMPLER = {
    "3": {
        "class_type": "KSampler",
        "inputs": {"seed": 8566257, "steps": 20, "cfg": 8.0, "model": ["4", 0], "positive": ["6", 0], "negative": ["7", 0]},
    },
    "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "some.safetensors"}},
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a red fox, café", "clip": ["4", 1]}},
    "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "blurry", "clip": ["4", 1]}},
}

# A graph as FLUX.2's templates have it: noise, guidance and prompt are nodes of their own.
CUSTOM = {
    "10": {"class_type": "RandomNoise", "inputs": {"noise_seed": ["12", 0]}},
    "11": {"class_type": "CLIPTextEncode", "inputs": {"text": "not this one", "clip": ["38", 0]}},
    "12": {"class_type": "PrimitiveInt", "inputs": {"value": 77}},
    "13": {"class_type": "SamplerCustomAdvanced", "inputs": {"noise": ["10", 0], "guider": ["22", 0]}},
    "22": {"class_type": "BasicGuider", "inputs": {"model": ["37", 0], "conditioning": ["26", 0]}},
    "26": {"class_type": "FluxGuidance", "inputs": {"guidance": 3.5, "conditioning": ["27", 0]}},
    "27": {"class_type": "CLIPTextEncode", "inputs": {"text": ["28", 0], "clip": ["38", 0]}},
    "28": {"class_type": "PrimitiveStringMultiline", "inputs": {"value": "a red fox"}},
}

INVOKE = {"app_version": "6.9.0", "positive_prompt": "a red fox", "negative_prompt": "blurry", "seed": 4242, "loras": [{"x": 0.5}]}
MFLUX = {"mflux_version": "0.12.0", "seed": 7, "steps": 4, "prompt": "a red fox", "negative_prompt": None, "lora_paths": None}


def image():
    """An image without text. Its size is the least that kiln reads."""
    return Image.linear_gradient("L").resize((64, 64)).convert("RGB")


def saved(kind, **options):
    file = io.BytesIO()
    image().save(file, kind, **options)
    return file.getvalue()


def png(**texts):
    info = PngImagePlugin.PngInfo()
    for key, text in texts.items():
        info.add_text(key, text)
    return saved("PNG", pnginfo=info)


def with_comment(kind, comment):
    """A file that piexif gave a user comment."""
    exif = piexif.dump({"Exif": {piexif.ExifIFD.UserComment: comment}})
    if kind == "PNG":
        return saved(kind, exif=exif)
    file = io.BytesIO()
    piexif.insert(exif, saved(kind), file)
    return file.getvalue()


def cpp():
    info = PngImagePlugin.PngInfo()
    info.add(b"tEXt", b"parameters\0" + CPP.encode())
    return saved("PNG", pnginfo=info)


def comfy_webp():
    exif = image().getexif()
    exif[0x0110] = "prompt:" + json.dumps(SAMPLER)
    exif[0x010F] = "workflow:" + json.dumps({"nodes": []})
    return saved("WEBP", exif=exif, lossless=True)


def compute():
    comment = piexif.helper.UserComment.dump(PARAMETERS, encoding="unicode")
    workflow = json.dumps({"nodes": [], "links": []})
    files = {
        "a1111.png": png(parameters=PARAMETERS),
        "a1111.jpg": with_comment("JPEG", comment),
        "a1111.webp": with_comment("WEBP", comment),
        "sd_cpp.png": cpp(),
        "comfy.png": png(prompt=json.dumps(SAMPLER), workflow=workflow),
        "comfy_custom.png": png(prompt=json.dumps(CUSTOM), workflow=workflow),
        "comfy.webp": comfy_webp(),
        "invoke.png": png(invokeai_metadata=json.dumps(INVOKE), invokeai_graph="{}"),
        "mflux.png": with_comment("PNG", json.dumps(MFLUX).encode()),
        "none.png": saved("PNG"),
    }
    return Files(contents={FIXTURES / "foreign" / name: data for name, data in files.items()}, limit=40_000)
