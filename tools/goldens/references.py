"""tests/fixtures/references* and layouts.safetensors: reference images.

Pillow and the image processor of the diffusers FLUX.2 [klein] pipeline define the right pixels.

tests/fixtures/references/
    Small PNG, JPEG and WebP files of many kinds.

tests/fixtures/references.json
    lanczos   sizes before and after, and the FNV-1a 64 of the resized RGB bytes
    prepared  sizes, and the FNV-1a 64 of the pixels and f32 values that the VAE gets
    images    the files above: upright size, and for PNG and WebP the FNV-1a 64 of the RGB bytes

tests/fixtures/references.safetensors
    lanczos.<index>   U8 [height, width, 3]   the resized bytes of the first cases
    image.<file>      U8 [height, width, 1 or 3]   the pixels of each JPEG, 1 for gray

tests/fixtures/layouts.safetensors
    jpeg.<image>.<layout>     U8 [length]   a JPEG of that sampling and order of scans
    png.<image>               U8 [length]   the pixels of these, as a PNG

Sources of `lanczos` and `prepared`. Byte i of an image with seed s is the top byte of
splitmix64's output for the state s + (i + 1) * GAMMA; for an odd seed only its top bit
counts and the byte is 0 or 255, which makes the filter overshoot.

One expectation is not Pillow's: 16-bit gray keeps the upper byte, as Pillow does with 16-bit color, while Pillow's
conversion of gray to RGB clips at 255.
"""

import io
import json
import struct
import tempfile
import zlib
from pathlib import Path

import numpy as np
import safetensors.numpy
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from diffusers.utils import load_image
from PIL import Image

from goldens import jpeg_layouts
from goldens.files import FIXTURES, Files, checksum
from goldens.values import splitmix_bytes


def hashed_image(seed, width, height):
    """The RGB image that the tests make from this seed."""
    top = splitmix_bytes(seed, width * height * 3).astype(np.uint8)
    if seed % 2:
        top = np.where(top >= 128, np.uint8(255), np.uint8(0))
    return Image.fromarray(top.reshape(height, width, 3))


# --- Resizing -----------------------------------------------------------------

# The first five are stored whole. Then the extremes: one pixel, one pass only, no pass.
LANCZOS = [
    ((37, 29), (16, 16)), ((40, 30), (39, 29)), ((9, 7), (31, 23)), ((64, 5), (20, 5)), ((5, 64), (5, 20)),
    ((1, 1), (7, 5)), ((7, 5), (1, 1)), ((1, 50), (3, 20)), ((50, 1), (20, 3)), ((33, 33), (33, 33)),
    ((2, 2), (1, 1)), ((2, 3), (3, 2)), ((300, 200), (299, 199)), ((512, 16), (16, 512)), ((400, 50), (71, 9)),
]  # fmt: skip


def lanczos_cases():
    sizes = list(LANCZOS)
    step = 12345
    while len(sizes) < 50:
        sides = []
        for limit in (150, 150, 120, 120):
            step = (step * 1103515245 + 12345) % 2**31
            sides.append(1 + (step >> 8) % limit)
        a, b = sides[:2], sides[2:]
        # Two of three shrink, the only direction in which the pipeline resizes.
        if len(sizes) % 3:
            a, b = [max(p) for p in zip(a, b)], [min(p) for p in zip(a, b)]
        sizes.append((tuple(a), tuple(b)))
    cases, tensors = [], {}
    for seed, (before, after) in enumerate(sizes):
        out = np.asarray(hashed_image(seed, *before).resize(after, Image.Resampling.LANCZOS))
        cases.append({"seed": seed, "from": before, "to": after, "pixels": checksum(out.tobytes())})
        if seed < 5:
            tensors[f"lanczos.{seed}"] = np.ascontiguousarray(out)
    return cases, tensors


# --- Preparing ----------------------------------------------------------------

PREPARED = [(605, 807), (1500, 1000), (1025, 1024), (1024, 1024), (64, 512), (79, 95), (3000, 380), (700, 2100)]


def prepare(image):
    """Repeats the steps of Flux2KleinPipeline.__call__ on one image: pixels and values, rows of RGB."""
    processor = Flux2ImageProcessor(vae_scale_factor=16)
    processor.check_image_input(image)
    if image.width * image.height > 1024 * 1024:
        image = processor._resize_to_target_area(image, 1024 * 1024)
    resized = image.size
    width, height = image.width // 16 * 16, image.height // 16 * 16
    values = processor.preprocess(image, height=height, width=width, resize_mode="crop")
    values = np.ascontiguousarray(values[0].permute(1, 2, 0).numpy())
    pixels = np.rint((values + 1) / 2 * 255).astype(np.uint8)
    return resized, pixels, values


def prepared_cases():
    cases = []
    for seed, size in enumerate(PREPARED):
        resized, pixels, values = prepare(hashed_image(seed, *size))
        cases.append({
            "seed": seed,
            "original": size,
            "resized": resized if resized != size else None,
            "size": [pixels.shape[1], pixels.shape[0]],
            "pixels": checksum(pixels.tobytes()),
            "values": checksum(values.astype("<f4").tobytes()),
        })
    return cases


# --- Files --------------------------------------------------------------------

WIDTH, HEIGHT = 67, 72  # neither fills whole blocks of 16 x 16


def soft_image(channels):
    """A soft image with a few edges: float 0..1, [height, width, channels]."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH] / 64.0
    planes = [0.5 + 0.4 * np.sin((c + 2) * x + 3 * y + c) * np.cos((4 - c) * y - c * x) for c in range(channels)]
    out = np.stack(planes, axis=-1)
    out[20:40, 10:30] = 1 - out[20:40, 10:30]
    out[50:60, 40:60] = 0.9
    return out


def eight_bit(channels):
    return (soft_image(channels) * 255).astype(np.uint8)


def sixteen_bit(channels):
    """The soft image with a lower byte that rounding would not lose."""
    upper = eight_bit(channels).astype(np.uint16)
    return upper << 8 | 255 - upper


def saved(image, kind, **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


ADAM7 = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]


def written_png(samples, color, interlaced=False, extra=()):
    """A PNG of a kind that Pillow does not write. `samples` is uint8 or uint16, [height, width, channels]."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    def rows(part):
        """Each row as its difference from the one above (filter 2), byte by byte."""
        part = part.astype(part.dtype.newbyteorder(">")).reshape(part.shape[0], -1).view(np.uint8)
        above = np.vstack([np.zeros_like(part[:1]), part[:-1]])
        return b"".join(b"\2" + row.tobytes() for row in part - above)

    height, width = samples.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, samples.itemsize * 8, color, 0, 0, int(interlaced))
    passes = [samples[y::dy, x::dx] for x, y, dx, dy in ADAM7] if interlaced else [samples]
    data = zlib.compress(b"".join(rows(part) for part in passes), 9)
    chunks = [(b"IHDR", header), *extra, (b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(name, data) for name, data in chunks)


def with_orientation(value):
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


def jpeg_files():
    rgb, gray = Image.fromarray(eight_bit(3)), Image.fromarray(eight_bit(1)[..., 0])
    cmyk = saved(Image.fromarray(eight_bit(4), "CMYK"), "JPEG", quality=90)
    adobe = cmyk.index(b"Adobe")
    files = {
        "baseline_444": saved(rgb, "JPEG", quality=92, subsampling="4:4:4"),
        "baseline_422": saved(rgb, "JPEG", quality=92, subsampling="4:2:2"),
        "baseline_420": saved(rgb, "JPEG", quality=92, subsampling="4:2:0"),
        "progressive_420": saved(rgb, "JPEG", quality=85, progressive=True, subsampling="4:2:0"),
        "progressive_444": saved(rgb, "JPEG", quality=85, progressive=True, subsampling="4:4:4"),
        "restarts": saved(gray, "JPEG", quality=85, restart_marker_blocks=3),
        "rgb": saved(rgb, "JPEG", quality=85, keep_rgb=True),
        "grey": saved(gray, "JPEG", quality=90),
        "cmyk": cmyk,
        # This data, declared as luma, chroma and black: odd colors, but a valid file.
        "ycck": cmyk[: adobe + 11] + b"\x02" + cmyk[adobe + 12 :],
        "xmp_orientation_8": saved(gray, "JPEG", quality=90, xmp=b'<x:xmpmeta tiff:Orientation="8"/>'),
    }
    for value in range(1, 9):
        files[f"orientation_{value}"] = saved(gray, "JPEG", quality=90, exif=with_orientation(value))
    return {f"{name}.jpg": data for name, data in files.items()}


def png_files():
    rgb, gray = Image.fromarray(eight_bit(3)), Image.fromarray(eight_bit(1)[..., 0])
    palette = rgb.quantize(200)
    files = {
        "rgb": saved(rgb, "PNG"),
        "rgba": saved(Image.fromarray(eight_bit(4), "RGBA"), "PNG"),
        "grey_1": saved(gray.convert("1"), "PNG"),
        "grey_2": saved(gray.point(lambda v: v >> 6), "PNG", bits=2),
        "grey_4": saved(gray.point(lambda v: v >> 4), "PNG", bits=4),
        "grey_8": saved(gray, "PNG"),
        "grey_16": written_png(sixteen_bit(1), 0),
        "grey_alpha_8": saved(Image.fromarray(eight_bit(2), "LA"), "PNG"),
        "grey_alpha_16": written_png(sixteen_bit(2), 4),
        "palette": saved(palette, "PNG"),
        "palette_transparent": saved(palette, "PNG", transparency=bytes(range(200))),
        "palette_4": saved(rgb.quantize(11), "PNG", bits=4),
        "rgb_16": written_png(sixteen_bit(3), 2),
        "rgba_16": written_png(sixteen_bit(4), 6),
        "rgb_transparent": saved(rgb, "PNG", transparency=(20, 30, 40)),
        "interlaced": written_png(eight_bit(3), 2, interlaced=True),
        "interlaced_grey_16": written_png(sixteen_bit(1), 0, interlaced=True),
        "animated": saved(rgb, "PNG", save_all=True, append_images=[rgb.rotate(180)]),
        "orientation_6": saved(rgb, "PNG", exif=with_orientation(6)),
        "orientation_late": written_png(eight_bit(3), 2)[:-12],
        "xmp_orientation_3": written_png(
            eight_bit(3), 2, extra=[(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0<tiff:Orientation>3</tiff:Orientation>")]
        ),
    }
    # Metadata may also follow the image data.
    exif = b"eXIf" + with_orientation(7).tobytes().removeprefix(b"Exif\0\0")
    files["orientation_late"] += struct.pack(">I", len(exif) - 4) + exif + struct.pack(">I", zlib.crc32(exif))
    files["orientation_late"] += struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
    return {f"{name}.png": data for name, data in files.items()}


def webp_files():
    rgb, rgba = Image.fromarray(eight_bit(3)), Image.fromarray(eight_bit(4), "RGBA")
    files = {
        "lossless": saved(rgb, "WEBP", lossless=True),
        "lossless_alpha": saved(rgba, "WEBP", lossless=True, exact=True),
        "lossless_palette": saved(rgb.quantize(11).convert("RGB"), "WEBP", lossless=True),
        "lossy": saved(rgb, "WEBP", quality=80),
        "lossy_coarse": saved(rgb, "WEBP", quality=5, method=6),
        "lossy_alpha": saved(rgba, "WEBP", quality=90),
        "orientation_6": saved(rgb, "WEBP", lossless=True, exif=with_orientation(6)),
    }
    return {f"{name}.webp": data for name, data in files.items()}


def image_cases():
    cases, tensors, files = [], {}, {**jpeg_files(), **png_files(), **webp_files()}
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            path = Path(folder) / name
            path.write_bytes(data)
            pixels = np.asarray(load_image(str(path)))
            if name.endswith("grey_16.png"):
                pixels = np.repeat(eight_bit(1), 3, axis=-1)
            case = {"file": name, "size": [pixels.shape[1], pixels.shape[0]]}
            if not name.endswith(".jpg"):
                case["pixels"] = checksum(pixels.tobytes())
            else:
                is_gray = (pixels[..., :1] == pixels).all()
                tensors[f"image.{name}"] = np.ascontiguousarray(pixels[..., :1] if is_gray else pixels)
            cases.append(case)
    return cases, tensors, files


def layout_tensors():
    """The JPEGs of jpeg_layouts and their pixels, which are the same in every layout of an image."""
    tensors, pixels = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layout.jpg"
        for name, files in jpeg_layouts.layouts().items():
            for layout, data in files.items():
                path.write_bytes(data)
                found = np.asarray(load_image(str(path)))
                known = pixels.setdefault(name.partition(".")[0], found)
                assert (known == found).all(), f"{name}, {layout}: another image"
                tensors[f"jpeg.{name}.{layout}"] = np.frombuffer(data, np.uint8)
    for name, found in pixels.items():
        image = Image.fromarray(found[..., 0] if (found[..., :1] == found).all() else found)
        tensors[f"png.{name}"] = np.frombuffer(saved(image, "PNG", optimize=True), np.uint8)
    return tensors


def compute():
    lanczos, lanczos_tensors = lanczos_cases()
    images, image_tensors, files = image_cases()
    summary = {"lanczos": lanczos, "prepared": prepared_cases(), "images": images}
    # One case a line: the file stays short and a change shows.
    sections = (f'  "{name}": [\n    ' + ",\n    ".join(map(json.dumps, cases)) + "\n  ]" for name, cases in summary.items())
    contents = {
        "references.json": ("{\n" + ",\n".join(sections) + "\n}\n").encode(),
        "references.safetensors": safetensors.numpy.save({**lanczos_tensors, **image_tensors}),
        "layouts.safetensors": safetensors.numpy.save(layout_tensors()),
        **{f"references/{name}": data for name, data in files.items()},
    }
    return Files(contents={FIXTURES / name: data for name, data in contents.items()})
