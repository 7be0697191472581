"""Starts servers, makes the same images on the command line, and runs the tests of a client.

A request is a dict with the fields of OpenAI's images API. `images` and `mask` are names of files in tests/clients/images. The server and
the command line are the same program, so the pixels of a request and of its command are equal.
"""

import hashlib
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
KILN = Path(os.environ.get("KILN") or ROOT / "target/debug/kiln").resolve()
CACHE = ROOT / "target/clients"
IMAGES = ROOT / "tests/clients/images"

# One model and one arithmetic everywhere, whatever this machine has.
ENGINE = ["--model", "builtin", "--backend", "cpu", "--threads", "1"]

# The key of the server that has one.
KEY = "sk-kiln-tests-5f0c"

SHAPES = "a green heart on the left and a blue star on the right on a yellow background"
STAR = "a large red star on a blue background"
SIZE = "96x64"

# Clients talk to this machine, whatever proxy it has.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"

# Pillow's names of formats.
FORMATS = {"png": "PNG", "jpeg": "JPEG", "webp": "WEBP"}


class Skipped(Exception):
    """The client has no way to test this."""


def environment():
    """Variables for kiln: none that choose a model, a server or a folder of the user."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KILN_", "XDG_", "HF_"))}
    return {**kept, "HOME": str(CACHE)}


class Server:
    """A server on a free port. It starts at once, and a `with` statement waits until it is ready, or at least until it listens."""

    def __init__(self, *flags, waits=True):
        self.waits = waits
        self.lines = []
        self.address = None
        self.announced = threading.Event()
        command = [KILN, "serve", "--listen", "127.0.0.1:0", "--socket", "none", *ENGINE, *flags]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment()
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stderr:
            text = line.decode(errors="replace")
            self.lines.append(text)
            found = re.search(r"listening on (http://[0-9.]+:[0-9]+)", text)
            if found and self.address is None:
                self.address = found[1]
                self.announced.set()
        self.announced.set()

    def _wait(self):
        end = time.monotonic() + 60
        if not self.announced.wait(60) or self.address is None:
            raise RuntimeError(f"the server did not start:\n{''.join(self.lines)}")
        while self.waits and self.status("/ready") != 200:
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError(f"the server did not become ready:\n{''.join(self.lines)}")
            time.sleep(0.05)

    def status(self, path):
        """The status of the answer to a GET request, or None if there is no answer."""
        try:
            with urllib.request.urlopen(self.address + path, timeout=10) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def wait_for_queue(self, waiting):
        """Waits until an image is made and this many images wait."""
        request = urllib.request.Request(self.address + "/kiln/status", headers={"Authorization": f"Bearer {KEY}"})
        end = time.monotonic() + 20
        while True:
            with urllib.request.urlopen(request, timeout=10) as answer:
                queue = json.load(answer)["queue"]
            if queue["waiting"] == waiting and queue["predicted_ms"] > 0:
                return
            assert time.monotonic() < end, f"the queue does not come to {waiting} images: {queue}"
            time.sleep(0.02)

    @property
    def url(self):
        """The base URL for SDKs."""
        return self.address + "/v1"

    def terminate(self):
        """Asks the server to end."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self):
        """Waits until the server has ended, and returns its exit code."""
        code = self.process.wait(40)
        self.reader.join(5)
        return code

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def __enter__(self):
        try:
            self._wait()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind, *_):
        # A test may have ended the server, and has then seen its exit code.
        if self.process.returncode is not None:
            return
        ended = self.process.poll()
        start = time.monotonic()
        try:
            if ended is None:
                self.terminate()
            code = self.wait()
        finally:
            self.kill()
        seconds = time.monotonic() - start
        if ended is not None or code != 143 or (kind is None and seconds > 5):
            when = "early" if ended is not None else f"{seconds:.1f} s after SIGTERM"
            raise RuntimeError(f"the server ended {when} with exit code {code}:\n{''.join(self.lines[-40:])}")


def main_server():
    """A server without a key. Its adapter `overflow` makes values that are not finite, which is an error of the server."""
    return Server("--adapters", adapters())


def busy_server():
    """A server with a key, and room for one waiting image."""
    keys = CACHE / "keys"
    keys.write_text(f"tests:{KEY}\n")
    keys.chmod(0o600)
    return Server("--api-key-file", keys, "--max-waiting", "1")


# A request that takes long enough for others to come, about two seconds.
SLOW = {"prompt": STAR, "extra_body": {"seed": 7, "steps": 16}}


def check_slow(data):
    check(data, prompt=STAR, seed=7, steps=16)


def in_background(call):
    """Starts a call, and returns a function that waits for its result."""
    results = []

    def work():
        try:
            results.append((call(), None))
        except Exception as error:
            results.append((None, error))

    thread = threading.Thread(target=work)
    thread.start()

    def wait():
        thread.join()
        value, error = results[0]
        if error:
            raise error
        return value

    return wait


def adapters():
    """A folder with the adapter `overflow`: the example adapter with large numbers, which overflow in the transformer."""
    folder = CACHE / "adapters"
    folder.mkdir(parents=True, exist_ok=True)
    data = bytearray((ROOT / "models/lora/moon.safetensors").read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    # 1e17 in bf16.
    data[start:] = b"\xb2\x5b" * ((len(data) - start) // 2)
    (folder / "overflow.safetensors").write_bytes(data)
    return folder


def command(prompt, seed, size="auto", images=(), mask=None, output_format="png", steps=None):
    """The command line of a request, without its output."""
    flags = [prompt, "--seed", str(seed), "--format", output_format, *ENGINE]
    if size != "auto":
        width, height = size.split("x")
        flags += ["--width", width, "--height", height]
    if steps is not None:
        flags += ["--steps", str(steps)]
    images = [str(IMAGES / name) for name in images]
    if mask is not None:
        flags += ["--init", images.pop(0), "--mask", str(IMAGES / mask), "--init-reference", "on"]
    for image in images:
        flags += ["--reference", image]
    return flags


def fingerprint():
    """Identifies the program and the input images."""
    digest = hashlib.sha256()
    for path in [KILN, *sorted(IMAGES.iterdir())]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


_folder = None


def expected(is_stored=True, **request):
    """The file that the command line makes of a request. Files are stored for the same program and the same input images."""
    global _folder
    if _folder is None:
        _folder = CACHE / "expected" / fingerprint()
        _folder.mkdir(parents=True, exist_ok=True)
    flags = command(**request)
    stored = _folder / hashlib.sha256("\0".join(flags).encode()).hexdigest()[:24]
    if is_stored and stored.exists():
        return stored.read_bytes()
    made = subprocess.run([KILN, *flags, "--quiet", "-o", "-"], stdout=subprocess.PIPE, env=environment(), check=True).stdout
    if is_stored:
        partial = stored.with_suffix(f".{os.getpid()}")
        partial.write_bytes(made)
        partial.replace(stored)
    return made


def decoded(data):
    """The pixels of a file and its format."""
    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB"), image.format


def check(data, is_stored=True, **request):
    """Compares a file that a client received with what the command line makes of the same request."""
    got, kind = decoded(data)
    want, _ = decoded(expected(is_stored, **request))
    wanted_kind = FORMATS[request.get("output_format", "png")]
    assert kind == wanted_kind, f"the file is {kind} instead of {wanted_kind}"
    assert got.size == want.size, f"the image is {got.size} instead of {want.size}"
    wrong = sum(a != b for a, b in zip(got.getdata(), want.getdata()))
    assert wrong == 0, f"{wrong} of {got.size[0] * got.size[1]} pixels differ from the command line's"


def check_preview(data, size):
    """Checks that an image of a stream shows the whole image, perhaps at a smaller scale."""
    got, _ = decoded(data)
    width, height = (int(side) for side in size.split("x"))
    assert got.size[0] * height == got.size[1] * width, f"a preview of {size} is {got.size}"
    assert len(set(got.getdata())) > 1, "the preview has one color"


def check_usage(usage, images=1, edits=False):
    """Checks token counts, given as a dict."""
    assert usage["output_tokens"] > 0 and usage["output_tokens"] % images == 0, usage
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], usage
    details = usage["input_tokens_details"]
    assert details["text_tokens"] > 0 and (details["image_tokens"] > 0) == edits, usage
    assert details["text_tokens"] + details["image_tokens"] == usage["input_tokens"], usage


def equal(got, want):
    assert got == want, f"{got!r} instead of {want!r}"


def run(name, module):
    """Runs the functions of a module that begin with `test_`, in order, or those that the command line names. Returns the exit code."""
    tests = [(key, value) for key, value in vars(module).items() if key.startswith("test_") and inspect.isfunction(value)]
    chosen = sys.argv[1:]
    failed = 0
    for key, test in tests:
        if chosen and key not in chosen:
            continue
        start = time.monotonic()
        try:
            test()
            result = "ok"
        except Skipped as why:
            result = f"not possible: {why}"
        except Exception:
            traceback.print_exc(file=sys.stdout)
            result, failed = "FAILED", failed + 1
        print(f"{name}: {key.removeprefix('test_').replace('_', ' ')}: {result}, {time.monotonic() - start:.1f} s", flush=True)
    return 1 if failed else 0
