#!/usr/bin/env python3
"""Check that other decoders read the files of `cargo bench --bench encode -- --write FOLDER`, and compare their sizes.

    pip install -r tools/requirements.txt
    cargo bench --bench encode -- --runs 1 --sides 512,1024 --write FOLDER
    python tools/check_encoding.py FOLDER

PNG is read by libpng itself (through ctypes) and by Pillow, JPEG and WebP by Pillow. Exits with 1 if pixels of a lossless file differ, a
JPEG is below 35 dB, or the PNG of a photo-like image is more than 1.08 times as large as libpng's at its default level, 6, with all
filters. `flat` is not photo-like and is only reported.
"""

import argparse
import ctypes
import ctypes.util
import io
import sys
from pathlib import Path

import numpy as np
from PIL import Image

LIMIT = 1.08


class PngImage(ctypes.Structure):
    """`png_image` of libpng's simplified API."""

    _fields_ = [
        ("opaque", ctypes.c_void_p),
        ("version", ctypes.c_uint32),
        ("width", ctypes.c_uint32),
        ("height", ctypes.c_uint32),
        ("format", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("colormap_entries", ctypes.c_uint32),
        ("warning_or_error", ctypes.c_uint32),
        ("message", ctypes.c_char * 64),
    ]


class Libpng:
    """The system's libpng 1.6."""

    RGB = 2

    def __init__(self):
        name = ctypes.util.find_library("png16")
        if name is None:
            sys.exit("no libpng 1.6 here: install libpng16-16 or the like")
        self.library = ctypes.CDLL(name)
        # Without types ctypes would truncate pointers to 32 bits.
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.library.png_image_write_to_memory.argtypes = [
            ctypes.POINTER(PngImage), pointer, ctypes.POINTER(size), ctypes.c_int, pointer, ctypes.c_int32, pointer,
        ]
        self.library.png_image_begin_read_from_memory.argtypes = [ctypes.POINTER(PngImage), pointer, size]
        self.library.png_image_finish_read.argtypes = [
            ctypes.POINTER(PngImage), pointer, pointer, ctypes.c_int32, pointer,
        ]

    def size(self, pixels, side):
        """Bytes of libpng's file of these pixels."""
        image = PngImage(version=1, width=side, height=side, format=self.RGB)
        size = ctypes.c_size_t(0)
        if not self.library.png_image_write_to_memory(image, None, size, 0, pixels, 0, None):
            sys.exit(f"libpng: {image.message.decode()}")
        return size.value

    def pixels(self, file, side):
        """Pixels of a file, or libpng's message. A warning counts as well."""
        image = PngImage(version=1)
        pixels = ctypes.create_string_buffer(3 * side * side)
        begun = self.library.png_image_begin_read_from_memory(image, file, len(file))
        if begun and (image.width, image.height) == (side, side):
            image.format = self.RGB
            if self.library.png_image_finish_read(image, None, pixels, 0, None) and not image.warning_or_error:
                return pixels.raw
        return image.message.decode() or "another size"


def read(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    libpng = Libpng()
    faults = []
    sources = sorted(folder.glob("*.rgb"))
    if not sources:
        sys.exit(f"no .rgb files in {folder}")
    for source in sources:
        raw = source.read_bytes()
        side = int(source.stem.rsplit("-", 1)[1])
        right = np.frombuffer(raw, np.uint8).reshape(side, side, 3)
        png = source.with_suffix(".png")
        reread = libpng.pixels(png.read_bytes(), side)
        if reread != raw:
            faults.append(f"{png.name}: libpng reads {reread if isinstance(reread, str) else 'other pixels'}")
        for lossless in [png, source.with_suffix(".webp")]:
            if not np.array_equal(read(lossless), right):
                faults.append(f"{lossless.name}: Pillow reads other pixels")
        error = read(source.with_suffix(".jpg")).astype(float) - right
        psnr = 10 * np.log10(255**2 / max(np.mean(error**2), 1e-9))
        if psnr < 35:
            faults.append(f"{source.stem}.jpg: {psnr:.1f} dB")
        peers = {}
        for name, options in [("PNG", {"compress_level": 6}), ("WEBP", {"lossless": True}), ("JPEG", {"quality": 95, "subsampling": 0, "optimize": True})]:
            file = io.BytesIO()
            Image.fromarray(right).save(file, name, **options)
            peers[name] = file.tell()
        ours, theirs = png.stat().st_size, libpng.size(raw, side)
        if ours > LIMIT * theirs and not source.stem.startswith("flat"):
            faults.append(f"{png.name}: {ours} bytes are {ours / theirs:.3f} times {theirs} of libpng")
        webp, jpeg = (source.with_suffix(suffix).stat().st_size for suffix in (".webp", ".jpg"))
        print(
            f"{source.stem:<14} png {ours:>8} libpng {theirs:>8} ratio {ours / theirs:.3f} Pillow {peers['PNG']:>8} | "
            f"webp {webp:>8} libwebp {peers['WEBP']:>8} | jpg {jpeg:>8} {psnr:.1f} dB libjpeg {peers['JPEG']:>8}"
        )
    for fault in faults:
        print(f"FAIL {fault}")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
