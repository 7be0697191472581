"""Shared by `bench/peers`, `builds.py` and `vae.py`: arguments, the device, and records that are shown and written."""

import argparse
import contextlib
import gc
import json
import re
import subprocess

import torch

from peers.library import LIBRARY
from peers.timing import FEWEST_PAIRS


def parser(description: str, what: str = "name shape", library: bool = True) -> argparse.ArgumentParser:
    """The arguments that all programs share. --rows matches this text of a row."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if library:
        parser.add_argument("--library", default=LIBRARY, help="libkiln_peers.so (default: what cargo builds in release)")
        parser.add_argument("--sustain", type=float, default=2.0, metavar="S", help="seconds of a side without pause (default 2)")
        parser.add_argument("--quick", action="store_true", help=f"{FEWEST_PAIRS} rounds, nothing sustained")
        parser.add_argument("--dry", action="store_true", help="check the shapes of all rows; needs no GPU")
    parser.add_argument("--rows", metavar="REGEX", default="", help=f"rows whose `{what}` matches")
    parser.add_argument("--pairs", type=int, default=21, help=f"rounds of a row, at least {FEWEST_PAIRS} (default 21)")
    parser.add_argument("--json", metavar="FILE", help="write every row, one JSON object a line")
    return parser


def checked(parser: argparse.ArgumentParser, args: argparse.Namespace, rows: list, text) -> argparse.Namespace:
    """The arguments, with the rows whose text matches --rows."""
    if getattr(args, "quick", False):
        args.pairs, args.sustain = FEWEST_PAIRS, 0.0
    if args.pairs < FEWEST_PAIRS:
        parser.error(f"fewer than {FEWEST_PAIRS} pairs say nothing")
    args.rows = [row for row in rows if re.search(args.rows, text(row))]
    if not args.rows:
        parser.error("no row has such a name")
    return args


def gpu_state() -> dict:
    fields = ["driver_version", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active"]
    query = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return dict(zip(fields, map(str.strip, answer.splitlines()[0].split(","))))
    except (OSError, IndexError, subprocess.SubprocessError) as error:
        return {"nvidia-smi": str(error)}


def about_device() -> dict:
    device = torch.cuda.get_device_name(0)
    return {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}


def cold_bytes() -> int:
    """Twice the size of the L2, and at least 128 MiB."""
    return 2 * max(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0), 64 << 20)


def exact_references() -> None:
    """Makes fp32 products exact fp32, without TF32."""
    for place in (torch.backends.cuda.matmul, torch.backends.cudnn):
        place.allow_tf32 = False


def show(pairs: dict) -> None:
    print(", ".join(f"{k} {v}" for k, v in pairs.items()), flush=True)


@contextlib.contextmanager
def opened(*libraries):
    """The libraries on a stream of PyTorch's, on which everything runs. Not the default stream, which cannot be captured."""
    stream = torch.cuda.Stream()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.cuda.stream(stream))
        stack.enter_context(torch.inference_mode())
        for library in libraries:
            library.open(torch.cuda.current_device(), stream.cuda_stream)
            stack.callback(library.close)
        yield stream


@contextlib.contextmanager
def records(path, mode: str = "w"):
    """A function that writes each record as a line of JSON if there is a path."""
    with open(path, mode) if path else contextlib.nullcontext() as out:
        yield lambda record: out and print(json.dumps(record), file=out, flush=True)


def free(stream) -> None:
    """Frees the graphs and tensors of the last rows."""
    gc.collect()
    stream.synchronize()
    torch.cuda.empty_cache()
