#!/usr/bin/env python3
"""Measures `kiln serve` next to `kiln run` on one machine: what HTTP adds to an image, and whether a long mixed load leaks or changes a byte.

    python3 bench/serve.py [--kiln PROGRAM] [--sizes 512x512 1024x1024] [--rounds N] [--json FILE] -- ARGUMENTS
    python3 bench/serve.py --load SECONDS [--adapter FILE] [--json FILE] -- ARGUMENTS

ARGUMENTS name the model, as for `kiln run`. Both programs hold the model at the same time, so the GPU needs room for it twice.

Latency: the programs generate each image by turns, every other round backwards, each round with a new prompt and seed. `kiln run` is timed
from the line to its answer, at which the file is written; `kiln serve` from the request to the last byte of the PNG, on a connection that
stays open, with `Accept: image/png`. With rest: half a second of rest before each image. Without rest: as many rounds at once. The files of
both programs are compared, byte by byte. The difference of the medians is what HTTP adds.

Load: six clients send requests of different sizes, with references, masks, adapters and streams, and one in eight leaves early. `kiln run`
has made all images before, and each answer is compared with its file. Every two seconds the script reads the server's metrics and memory.
The load fails if an answer differs or is no image, if the memory of the device or of the process grows from the second third of the time
to the last by more than noise, or if images are left in the queue at the end.

Needs Python alone. Exits 1 if a comparison fails.
"""

import argparse
import base64
import hashlib
import http.client
import json
import os
import pathlib
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib

import steps
from turns import REST_S, quartiles, requests

# How much more memory the last third of a load may take than the second: fragments of the allocator, and images in flight.
HOST_NOISE = 64 << 20
DEVICE_NOISE = 16 << 20

CLIENTS = 6

LATENCY_SIZES = ("512x512", "1024x1024")
LOAD_SIZES = ("256x256", "512x512", "512x768", "768x512", "1024x1024", "1024x512", "832x832")


class Run:
    """A `kiln run` that answers a line at a time."""

    name = "run"

    def __init__(self, kiln, folder, arguments):
        self.folder = folder
        command = [kiln, "run", "-", "--output", folder, "--quiet", "--force", *arguments]
        self.process = subprocess.Popen([str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.count = 0

    def image(self, request):
        """The seconds from the line to the answer, and the file."""
        self.count += 1
        line = json.dumps(request | {"output": f"{self.count}.png"}) + "\n"
        start = time.perf_counter()
        self.process.stdin.write(line)
        answer = json.loads(self.process.stdout.readline() or "{}")
        seconds = time.perf_counter() - start
        if "path" not in answer:
            sys.exit(f"kiln run answered {answer}")
        return seconds, pathlib.Path(answer["path"]).read_bytes()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Server:
    """A `kiln serve` on a free port."""

    name = "serve"

    def __init__(self, kiln, arguments):
        command = [kiln, "serve", "--listen", "127.0.0.1:0", "--socket", "none", "--quiet", *arguments]
        self.log = tempfile.TemporaryFile("w+")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command[3] = f"127.0.0.1:{self.port}"
        self.process = subprocess.Popen([str(part) for part in command], stderr=self.log)
        self.wait()
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port)

    def wait(self):
        start = time.monotonic()
        while time.monotonic() < start + 300:
            try:
                if self.get("/ready")[0] == 200:
                    return
            except OSError:
                pass
            if self.process.poll() is not None:
                self.log.seek(0)
                sys.exit(f"kiln serve ended with {self.process.returncode}: {self.log.read()}")
            time.sleep(0.1)
        sys.exit("kiln serve is not ready after five minutes")

    def get(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body

    def metrics(self):
        """The value of each metric, by its name and labels."""
        rows = re.findall(r"^([a-z_]+(?:\{[^}]*\})?) ([0-9.e+-]+)$", self.get("/metrics")[1].decode(), re.M)
        return {name: float(value) for name, value in rows}

    def image(self, request):
        """The seconds from the request to the last byte, and the file."""
        body = json.dumps(request)
        start = time.perf_counter()
        self.connection.request("POST", "/v1/images/generations", body, {"Content-Type": "application/json", "Accept": "image/png"})
        answer = self.connection.getresponse()
        file = answer.read()
        seconds = time.perf_counter() - start
        if answer.status != 200:
            sys.exit(f"kiln serve answered {answer.status}: {file[:500]}")
        return seconds, file

    def close(self):
        self.process.terminate()
        return self.process.wait()


def latency(programs, size, rounds, asked):
    """The times of each program, with rest and without, and the number of files that differ."""
    found, differ = {}, 0
    for rest, kind in ((None, "warm-up"), (REST_S, "with rest"), (0.0, "without rest")):
        times = {program.name: [] for program in programs}
        for i in range(2 if rest is None else rounds):
            seed, prompt = next(asked)
            request = {"prompt": prompt, "seed": seed, "width": size.width, "height": size.height}
            files = []
            for program in programs if i % 2 == 0 else reversed(programs):
                time.sleep(rest or 0.0)
                seconds, file = program.image(request)
                times[program.name].append(seconds)
                files.append(file)
            differ += files[0] != files[1]
        if rest is not None:
            found[kind] = times
    return found, differ


def print_latency(size, found, differ):
    for kind, times in found.items():
        run, serve = (sorted(1e3 * value for value in times[name]) for name in ("run", "serve"))
        pairs = [1e3 * (b - a) for a, b in zip(times["run"], times["serve"])]
        low, middle, high = quartiles(pairs)
        print(
            f"{size.name:>11} {kind:<13} run {statistics.median(run):8.3f} ms, serve {statistics.median(serve):8.3f} ms, "
            f"serve - run: medians {statistics.median(serve) - statistics.median(run):+7.3f} ms, "
            f"pairs {middle:+7.3f} ({low:+.3f}..{high:+.3f}) ms, n {len(pairs)}, {differ} files differ",
            flush=True,
        )


def noise_png(path, width, height, seed):
    """Writes smooth colors that depend on a seed."""
    draw = random.Random(seed)
    a, b, c = (draw.uniform(0.01, 0.05) for _ in range(3))
    value = lambda x: int(127 * (1 + x))
    from math import sin

    steps.png(path, width, height, lambda x, y: (value(sin(a * x)), value(sin(b * y)), value(sin(c * (x + y)))))


def mask_png(path, width, height):
    """Writes a PNG whose left half is transparent."""
    row = b"\0" + b"\0\0\0\0" * (width // 2) + b"\xff\xff\xff\xff" * (width - width // 2)
    chunk = lambda kind, data: len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x06\0\0\0"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(row * height)) + chunk(b"IEND", b""))


def cases(folder, adapter, sizes):
    """Requests of all kinds, each as a line of `kiln run` and as fields of the API."""
    images = []
    for number, (width, height) in enumerate(((512, 512), (768, 512), (1024, 1024))):
        images.append(folder / f"reference{number}.png")
        noise_png(images[-1], width, height, number)
    mask = folder / "mask.png"
    mask_png(mask, 512, 512)
    data = lambda path: "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    found = []
    for seed, text in enumerate(sizes, 100):
        shape = steps.shape(text, 4)
        size = {"width": shape.width, "height": shape.height}
        found.append(({"prompt": f"a lighthouse at dusk, {seed}", "seed": seed, **size},) * 2)
        chosen = images[: 1 + seed % 2]
        common = {"prompt": f"make it night, {seed}", "seed": seed, **size}
        line = common | {"references": [str(path) for path in chosen]}
        found.append((line, common | {"images": [data(path) for path in chosen]}))
        if adapter:
            name = adapter.stem
            common = {"prompt": f"a fox in the snow, {seed}", "seed": seed, **size}
            line = common | {"lora": [{"file": str(adapter), "scale": 0.5}]}
            found.append((line, common | {"lora": [{"name": name, "scale": 0.5}]}))
    common = {"prompt": "a stone wall", "seed": 7}
    line = common | {"init": str(images[0]), "mask": str(mask)}
    found.append((line, common | {"init": data(images[0]), "mask": data(mask)}))
    line = common | {"init": str(images[1]), "strength": 0.5}
    found.append((line, common | {"init": data(images[1]), "strength": 0.5}))
    return found


class Client(threading.Thread):
    """Sends requests until the time is over."""

    def __init__(self, number, server, wanted, until):
        super().__init__(daemon=True)
        self.draw, self.server, self.wanted, self.until = random.Random(number), server, wanted, until
        self.counts = {"same": 0, "different": 0, "left": 0, "refused": 0, "failed": 0}
        self.failures = []

    def run(self):
        while time.monotonic() < self.until:
            fields, file = self.draw.choice(self.wanted)
            kind = self.draw.choice(("file", "json", "stream", "leave")) if self.draw.random() < 0.5 else "json"
            try:
                self.counts[self.one(fields, file, kind)] += 1
            except Exception as error:  # a client that dies would look like one that is content
                self.counts["failed"] += 1
                self.failures.append(repr(error)[:300])

    def one(self, fields, file, kind):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        stream = kind == "stream" or kind == "leave" and self.draw.random() < 0.5
        body = fields | ({"stream": True, "partial_images": 2, "preview": self.draw.choice(("fast", "full"))} if stream else {})
        headers = {"Content-Type": "application/json"} | ({"Accept": "image/png"} if kind == "file" else {})
        connection.request("POST", "/v1/images/generations", json.dumps(body), headers)
        if kind == "leave":
            time.sleep(self.draw.uniform(0.0, 0.6))
            connection.close()
            return "left"
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if answer.status == 429 and answer.headers["Retry-After"]:
            time.sleep(0.2)
            return "refused"
        if answer.status != 200:
            self.failures.append(f"{answer.status} {content[:200]}")
            return "failed"
        if kind == "file":
            found = content
        elif stream:
            events = [json.loads(line[6:]) for line in content.decode().splitlines() if line.startswith("data: ")]
            found = base64.b64decode(events[-1].get("b64_json", ""))
        else:
            found = base64.b64decode(json.loads(content)["data"][0]["b64_json"])
        return "same" if hashlib.sha256(found).digest() == file else "different"


def resident(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def device_bytes(pid):
    """What the driver says that a process holds, if it says."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        rows = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.splitlines()
    except OSError:
        return None
    found = [int(row.split(",")[1]) << 20 for row in rows if row.split(",")[0].strip() == str(pid)]
    return found[0] if found else None


def load(args, folder):
    adapter, arguments = args.adapter, args.arguments
    extra = []
    if adapter:
        shutil.copy(adapter, folder / "adapters" / adapter.name)
        adapter, extra = folder / "adapters" / adapter.name, ["--adapters", folder / "adapters"]
    asked = cases(folder, adapter, args.sizes or LOAD_SIZES)
    run = Run(args.kiln, folder / "run", arguments)
    wanted = [(fields, hashlib.sha256(run.image(line)[1]).digest()) for line, fields in asked]
    run.close()
    server = Server(args.kiln, [*arguments, *extra])
    # Every kind once, so that memory has its final size.
    first = Client(0, server, wanted, 0)
    for fields, file in wanted:
        first.counts[first.one(fields, file, "json")] += 1
    before = (resident(server.process.pid), device_bytes(server.process.pid), server.metrics().get('kiln_device_bytes{kind="free"}'))
    start = time.monotonic()
    clients = [Client(number, server, wanted, start + args.load) for number in range(1, CLIENTS + 1)]
    [client.start() for client in clients]
    samples = []
    while any(client.is_alive() for client in clients):
        time.sleep(2)
        metrics = server.metrics()
        free = metrics.get('kiln_device_bytes{kind="free"}')
        samples.append((time.monotonic() - start, resident(server.process.pid), free, metrics["kiln_queue_length"]))
    end = time.monotonic() + 30
    while server.metrics()["kiln_queue_length"] > 0 and time.monotonic() < end:
        time.sleep(0.2)
    time.sleep(2)
    metrics, device = server.metrics(), device_bytes(server.process.pid)
    code = server.close()
    counts = {key: sum(client.counts[key] for client in [first, *clients]) for key in first.counts}
    failures = [failure for client in [first, *clients] for failure in client.failures]
    third = len(samples) // 3
    mean = lambda rows, column: statistics.mean(row[column] for row in rows) if rows else 0.0
    host = mean(samples[2 * third :], 1) - mean(samples[third : 2 * third], 1)
    is_told = all(row[2] is not None for row in samples) and samples
    lost = mean(samples[third : 2 * third], 2) - mean(samples[2 * third :], 2) if is_told else 0.0
    print(f"{args.load} s of mixed load, {CLIENTS} clients, {len(wanted)} kinds of requests: {counts}")
    done = metrics.get('kiln_images_total{result="done"}', 0)
    running, waiting = (metrics.get(f'kiln_canceled_total{{when="{when}"}}', 0) for when in ("running", "waiting"))
    longest = max((row[3] for row in samples), default=0)
    print(
        f"images {done:.0f}, canceled running {running:.0f}, waiting {waiting:.0f}, longest queue {longest:.0f}, "
        f"left in it {metrics['kiln_queue_length']:.0f}"
    )
    print(f"host memory {before[0] >> 20} MiB before, {samples[-1][1] >> 20} MiB at the end, last third - second third {host / 2**20:+.1f} MiB")
    if is_told:
        lowest = min(row[2] for row in samples)
        print(
            f"free device memory {before[2] / 2**20:.0f} MiB before, {samples[-1][2] / 2**20:.0f} MiB at the end, "
            f"lowest {lowest / 2**20:.0f} MiB, lost {lost / 2**20:+.1f} MiB; the process holds {device} bytes, {before[1]} before"
        )
    for failure in failures[:10]:
        print("failure:", failure)
    faults = [
        (counts["different"] > 0, "an answer differs from kiln run's file"),
        (counts["failed"] > 0, "a request failed"),
        (counts["same"] < 20, "too few images to judge"),
        (counts["left"] < 1, "no client left"),
        (host > HOST_NOISE, "host memory grows"),
        (lost > DEVICE_NOISE, "device memory grows"),
        (metrics["kiln_queue_length"] > 0, "images are left in the queue"),
        (code != 143, f"the server ended with {code}"),
    ]
    found = [text for is_fault, text in faults if is_fault]
    print("PASS" if not found else "FAIL: " + "; ".join(found), flush=True)
    return {"counts": counts, "samples": samples, "before": before, "failures": failures[:50], "faults": found}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENTS", help="which model, as for `kiln run`")
    parser.add_argument("--kiln", default="kiln", help="the program (default: kiln)")
    parser.add_argument("--sizes", nargs="+", metavar="SIZE", help="default: 512x512 1024x1024, and seven for a load")
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="images of each size, with rest and without (default 30)")
    parser.add_argument("--load", type=float, metavar="SECONDS", help="a mixed load, instead of latency")
    parser.add_argument("--adapter", type=pathlib.Path, metavar="FILE", help="an adapter for the load")
    parser.add_argument("--json", metavar="FILE", help="write all times")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    args.kiln = os.path.abspath(args.kiln) if os.sep in args.kiln else args.kiln
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "adapters").mkdir()
        if args.load:
            found = load(args, folder)
            is_bad = bool(found["faults"])
        else:
            run, server = Run(args.kiln, folder / "run", args.arguments), Server(args.kiln, args.arguments)
            found, asked, is_bad = {}, requests(), False
            try:
                for text in args.sizes or LATENCY_SIZES:
                    size = steps.shape(text, 4)
                    times, differ = latency((run, server), size, args.rounds, asked)
                    print_latency(size, times, differ)
                    found[size.name], is_bad = times | {"differ": differ}, is_bad or differ > 0
            finally:
                run.close()
                server.close()
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(found) + "\n")
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
