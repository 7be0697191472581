"""Puts kiln's server under load and under attack, and ends it in the middle of its work.

    load.py               # the checks, in about a minute; with KILN_TEST_LONG=1 at most eight, and with a new seed
    load.py --probe PORT  # asks for /health until standard input ends, and prints how long answers took; --fresh PORT connects each time

KILN names the program, and KILN_TEST_SEED repeats the random choices of a run. The built-in model computes on one thread of the CPU.
A bound on time is a limit of the server plus what the machine may add: other programs use it as well.
"""

import asyncio
import base64
import bisect
import collections
import http.client
import itertools
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path

KILN = Path(os.environ.get("KILN") or Path(__file__).resolve().parents[2] / "target/debug/kiln").resolve()
LONG = os.environ.get("KILN_TEST_LONG") == "1"
MIB = 1 << 20

# Limits that the server documents: connections, bytes of a body, predicted seconds, and seconds.
PER_ADDRESS, BODY_BYTES, UPLOADED_BYTES, WAITING_SECONDS = 32, 64 * MIB, 512 * MIB, 120
HEADER_TIME, BODY_TIME, ANSWER_TIME, DRAIN_SECONDS, DRAIN_TIME = 5, 30, 30, 25, 30

# --max-waiting of the server, and the length of the load. 200 clients are more than twice as many as may wait.
WAITING, SECONDS = (80, 60) if LONG else (24, 10)

# How long a thread may wait for a core while other programs use all of them: a few of their time slices.
NOISE = 0.25

# An image that takes a tenth of a second, and one with many short steps, which takes seconds.
QUICK = {"prompt": "a large red star on a blue background", "size": "64x64", "steps": 1}
ENDLESS = {"size": "256x256", "steps": 64}

# A body that no server takes.
TOO_LARGE = bytes(BODY_BYTES + 1)

# Processes that were started.
PROCESSES = []


class Cut(Exception):
    """The server closed a connection before the end of an answer."""


def png(width, height, claimed=None):
    """A PNG image, whose header may claim another size."""
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = b"".join(b"\0" + b"".join(bytes((x * 255 // width, y * 255 // height, 99)) for x in range(width)) for y in range(height))
    header = struct.pack(">IIBBBBB", *(claimed or (width, height)), 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@dataclass
class Request:
    """A request, and how its answer may look."""

    body: bytes = b""
    path: str = "/v1/images/generations"
    content: str = "application/json"
    host: str = "localhost"
    # The length in the header, if the body has another.
    length: int = None
    is_chunked: bool = False
    statuses: tuple = (200, 429, 503)
    images: int = 1
    format: str = "png"
    is_stream: bool = False
    # After how many seconds the client leaves.
    leaves: float = None

    def head(self, port):
        length = len(self.body) if self.length is None else self.length
        length = "Transfer-Encoding: chunked" if self.is_chunked else f"Content-Length: {length}"
        return f"POST {self.path} HTTP/1.1\r\nHost: {self.host}:{port}\r\nContent-Type: {self.content}\r\n{length}\r\n\r\n".encode()


def generation(**fields):
    """A request for images."""
    known = {"images": fields.get("n", 1), "format": fields.get("output_format", "png"), "is_stream": "stream" in fields}
    return Request(json.dumps({**QUICK, **fields}).encode(), **known)


def stream(**fields):
    """A request for images as a stream with progress."""
    return generation(stream=True, progress=True, **fields)


def edit(image, is_chunked=False, **fields):
    """A request to edit an image, as a form."""
    part = lambda name, value, more="": f'--x\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"
    texts = b"".join(part(name, str(value).encode()) for name, value in {**QUICK, **fields}.items())
    body = texts + part("image[]", image, '; filename="upload"') + b"--x--\r\n"
    known = {"images": fields.get("n", 1), "is_stream": "stream" in fields}
    return Request(body, "/v1/images/edits", "multipart/form-data; boundary=x", is_chunked=is_chunked, **known)


def bad_requests():
    """Requests with mistakes."""
    fields = [{"n": 0}, {"size": "1000x1000"}, {"background": "transparent"}, {"prompt": 7}, {"images": ["AAAA"]}, {"steps": 65}]
    fields += [{"images": ["http://127.0.0.1/x.png"]}, {"images": [{"file_id": "x"}]}, {"guidance": 1e999}]
    yield from (replace(generation(), body=json.dumps({**QUICK, **each}).encode(), statuses=(400,)) for each in fields)
    yield from (Request(body, path, statuses=(400,)) for body in (b"{", b"[]", b"\xff") for path in (Request.path, "/v1/images/edits"))
    yield replace(edit(png(64, 64)[:200]), statuses=(400,))
    yield replace(generation(model="other"), statuses=(404,))
    yield Request(b"x=1", content="text/plain", statuses=(415,))
    yield Request(b"{}", host="evil.example", statuses=(403,))
    yield Request(b"{}", path="/v1/images/variations", statuses=(404,))
    yield Request(b"{}", path="/v1/models", statuses=(405,))


@dataclass
class Record:
    """How a request ended."""

    request: Request = None
    status: int = 0
    headers: dict = field(default_factory=dict)
    body: bytes = b""
    # The events of a stream, each with the time at which it came.
    events: list = field(default_factory=list)
    start: float = 0.0
    seconds: float = 0.0
    # What happened to the connection, if the answer has no end.
    fault: str = None

    def progress(self):
        return [(at, event) for at, event in self.events if event["type"] == "kiln.progress"]

    def wait(self):
        """When the wait for the first image began, how long it was predicted to take and took, if the stream told all."""
        (first, queued), (then, now) = (self.progress() + [(0, {"phase": "none"})] * 2)[:2]
        return (first, queued["eta_ms"] / 1000, then - first) if queued["phase"] == "queued" and now["phase"] != "none" else None


class Connection:
    """A connection of a client."""

    def __init__(self, port, sock):
        self.port, self.sock, self.bytes, self.loop = port, sock, bytearray(), asyncio.get_running_loop()

    @classmethod
    async def open(cls, server, address="127.0.0.11", path=None, **options):
        """Connects from an address, or to the Unix socket at a path. Options are those of sockets and TCP."""
        sock = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
        try:
            sock.setblocking(False)
            for name, value in options.items():
                sock.setsockopt(socket.IPPROTO_TCP if name[:3] == "TCP" else socket.SOL_SOCKET, getattr(socket, name), value)
            if path is None:
                sock.bind((address, 0))
            await asyncio.get_running_loop().sock_connect(sock, str(path) if path else ("127.0.0.1", server.port))
        except BaseException:
            sock.close()
            raise
        return cls(server.port, sock)

    def close(self, resets=False):
        if resets:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    async def send(self, data):
        await self.loop.sock_sendall(self.sock, data)

    async def drip(self, data, pause=0.3):
        """Sends a byte at a time, as long as the server takes them."""
        try:
            for byte in data:
                await self.send(bytes([byte]))
                await asyncio.sleep(pause)
        except OSError:
            pass

    async def take(self, count):
        while len(self.bytes) < count:
            data = await self.loop.sock_recv(self.sock, 1 << 18)
            if not data:
                raise Cut("the server closed the connection")
            self.bytes += data
        taken = bytes(self.bytes[:count])
        del self.bytes[:count]
        return taken

    async def line(self, end=b"\r\n"):
        while (found := self.bytes.find(end)) < 0:
            self.bytes[:0] = await self.take(len(self.bytes) + 1)
        return (await self.take(found + len(end)))[:found]

    async def rest(self):
        """All bytes until the server closes the connection."""
        found = bytearray(self.bytes)
        try:
            while data := await self.loop.sock_recv(self.sock, 1 << 18):
                found += data
        except OSError:
            pass
        return bytes(found)

    async def ask(self, request):
        """Sends a request."""
        head = request.head(self.port)
        if not request.is_chunked:
            # One segment, unless the copy would be large.
            small = request.body[:MIB]
            await self.send(head + small)
            await self.send(memoryview(request.body)[len(small) :])
        else:
            await self.send(head)
            for start in range(0, len(request.body), 5000):
                piece = request.body[start : start + 5000]
                await self.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            await self.send(b"0\r\n\r\n")

    async def read(self, record, until=None):
        """Reads an answer. `until` may end a stream at an event."""
        head = (await self.line(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        record.status = int(head[0].split()[1])
        record.headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in head[1:])}
        if "content-length" in record.headers:
            record.body = await self.take(int(record.headers["content-length"]))
            return
        frames = b""
        while size := int(await self.line(), 16):
            frames += (await self.take(size + 2))[:-2]
            while b"\n\n" in frames:
                frame, frames = frames.split(b"\n\n", 1)
                if b"data: " in frame:
                    record.events.append((time.monotonic(), json.loads(frame.split(b"data: ", 1)[1])))
                    if until and until(record.events[-1][1]):
                        return
        await self.take(2)
        record.fault = "the stream ended within a frame" if frames else None

    async def exchange(self, request, until=None):
        """Sends a request and reads its answer, which may come while the request is still sent."""
        record = Record(request, start=time.monotonic())
        sending = asyncio.ensure_future(self.ask(request))
        try:
            await asyncio.wait_for(self.read(record, until), request.leaves or 200)
        except asyncio.TimeoutError:
            record.fault = "left" if request.leaves else "no answer"
        except (OSError, Cut) as error:
            record.fault = f"{type(error).__name__}: {error}"
        record.seconds = time.monotonic() - record.start
        # An answer that came early is also the end of the connection for whoever still sends.
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        return record

    async def get(self, path):
        """The status and the body of a GET request."""
        record = Record()
        await self.send(f"GET {path} HTTP/1.1\r\nHost: localhost:{self.port}\r\n\r\n".encode())
        await asyncio.wait_for(self.read(record), 30)
        return record.status, record.body

    async def metrics(self):
        text = (await self.get("/metrics"))[1].decode()
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
        return collections.defaultdict(float, {name: float(value) for name, value in rows})


async def begin(server, request, until=None, address="127.0.0.30"):
    """Sends a request on a connection of its own, and reads a stream up to an event. Returns the connection and the record so far."""
    connection = await Connection.open(server, address)
    if until is None:
        await connection.ask(request)
        return connection, Record(request)
    return connection, await connection.exchange(request, until)


class Server:
    """A server in a process of its own."""

    def __init__(self, folder, *flags, port=0):
        self.log, self.port = folder / f"{len(PROCESSES)}.log", None
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KILN_", "XDG_", "HF_"))}
        command = [folder / "kiln", "serve", "--listen", f"127.0.0.1:{port}", "--model", "builtin", "--backend", "cpu", "--threads", "1"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*command, *flags], stdin=subprocess.DEVNULL, stderr=log, env={**kept, "HOME": str(folder)})
        PROCESSES.append(self.process)
        self.of_process = Path(f"/proc/{self.process.pid}")

    async def ready(self):
        """Waits until the model is loaded."""
        end = time.monotonic() + 60
        while time.monotonic() < end and self.process.poll() is None:
            if found := re.search(rb"listening on http://127.0.0.1:(\d+)", self.log.read_bytes()):
                self.port = int(found[1])
                connection = await Connection.open(self)
                status, _ = await connection.get("/ready")
                connection.close()
                if status == 200:
                    return self
            await asyncio.sleep(0.05)
        raise RuntimeError(f"the server did not become ready:\n{self.log.read_text()}")

    async def wait(self, seconds):
        """The exit code as a shell shows it; None if the server goes on."""
        end = time.monotonic() + seconds
        while (code := self.process.poll()) is None and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return 128 - code if code is not None and code < 0 else code

    def memory(self, name="VmRSS"):
        """MiB of resident memory, now or at its peak, `VmHWM`."""
        return int(re.search(rf"{name}:\s+(\d+)", (self.of_process / "status").read_text())[1]) / 1024

    def forget_peak(self):
        (self.of_process / "clear_refs").write_text("5")
        return self.memory()

    def files(self):
        return len(os.listdir(self.of_process / "fd"))

    async def files_after(self, most):
        """How many files are open, as soon as they are not too many, or after a second."""
        end = time.monotonic() + 1
        while (count := self.files()) > most and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return count

    def computed(self):
        """Seconds that the thread of the engine has run, and has waited for a core. No other thread runs as much."""
        found = [(task / "schedstat").read_text().split() for task in (self.of_process / "task").iterdir()]
        return max((int(ran) / 1e9, int(waited) / 1e9) for ran, waited, _ in found)

    def processor_time(self):
        """Seconds that all threads have run."""
        found = (self.of_process / "stat").read_text().rsplit(")", 1)[1].split()
        return (int(found[11]) + int(found[12])) / os.sysconf("SC_CLK_TCK")


def probe(port, is_fresh):
    """Asks for /health, and sleeps for a moment each time. How late the sleep ends is what the machine adds to a wait."""
    connection, found = http.client.HTTPConnection("127.0.0.1", port, source_address=("127.0.0.10", 0)), []
    while not select.select([sys.stdin], [], [], 0)[0]:
        if is_fresh:
            connection.close()
        times = [time.monotonic()]
        time.sleep(0.02)
        times.append(time.monotonic())
        connection.request("GET", "/health")
        is_fine = connection.getresponse().read() == b'{"status":"ok"}'
        found.append((times[1] - times[0] - 0.02, time.monotonic() - times[1] if is_fine else 1e9))
    print(json.dumps(found))


def start_probe(server, kind):
    """Starts a probe in a process of its own. Returns what ends it, and returns how late it was and how late answers were."""
    process = subprocess.Popen([sys.executable, __file__, kind, str(server.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    PROCESSES.append(process)
    return lambda: list(zip(*json.loads(process.communicate(b"")[0])))


# Judges.


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def fault_of_error(error):
    """What is wrong with the object of an error: it has four members, and tells nothing of the server's files and code."""
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        return f"the error is {error}"
    told = re.search(r"/(tmp|home|root|usr|proc)/|\.rs\b|0x[0-9a-f]{6}|panick", json.dumps(error))
    return f"the error tells of {told[0]}" if told else None


def fault_of_image(data, kind):
    begin, end = {"png": (b"\x89PNG", b"IEND\xaeB`\x82"), "jpeg": (b"\xff\xd8", b"\xff\xd9"), "webp": (b"RIFF", b"")}[kind]
    data = base64.b64decode(data)
    return None if data.startswith(begin) and data.endswith(end) and len(data) > 100 else f"the {kind} file is damaged"


def fault_of(record):
    """What is wrong with the end of a request, or None."""
    request, status = record.request, record.status
    if record.fault:
        return None if request.leaves and record.fault == "left" else record.fault
    if status not in request.statuses or "x-request-id" not in record.headers:
        return f"status {status}, {record.headers}, {record.body[:200]}"
    if status in (429, 503) and not 1 <= int(record.headers.get("retry-after", 0)) <= 60:
        return f"status {status} with Retry-After {record.headers.get('retry-after')}"
    if status != 200 or not request.is_stream:
        try:
            answer = json.loads(record.body)
        except ValueError:
            return f"status {status} without JSON: {record.body[:100]}"
        if status != 200:
            return fault_of_error(answer.get("error"))
        data = answer.get("data", [])
    else:
        events = [event for _, event in record.events]
        data = [event for event in events if event["type"].endswith((".completed", "error"))]
        if not data or events[-1] is not data[-1]:
            return f"the stream ended with {events[-1:]}"
        if "error" in data[-1]:
            return fault_of_error(data[-1]["error"]) if 503 in request.statuses else f"the stream ended with {data[-1]}"
    if len(data) != request.images:
        return f"{len(data)} images instead of {request.images}"
    return next(filter(None, (fault_of_image(image["b64_json"], request.format) for image in data)), None)


def within_two(waits):
    """The share of predictions within a factor of two, and how many were judged. A prediction and a wait that are both shorter than a
    quarter of a second are left out: that is what scheduling alone may add, and nobody plans with it."""
    judged = [(predicted, real) for predicted, real in waits if max(predicted, real) > 0.25]
    good = sum(predicted <= 2 * real and real <= 2 * predicted for predicted, real in judged)
    return good / max(1, len(judged)), len(judged)


def growth(samples):
    """How much the median of the last third is above the median of the first."""
    third = max(1, len(samples) // 3)
    return statistics.median(samples[-third:]) - statistics.median(samples[:third])


def is_slower(idle, busy, factor):
    """Whether times are longer by a factor. Idle times differ among themselves as well, and that much is allowed on top."""
    middle = statistics.median(idle)
    return statistics.median(busy) > factor * middle + percentile(idle, 0.9) - middle


def wrong_lives(lives, least, most):
    """Connections that the server closed too early, too late or never."""
    return [seconds for seconds in lives if seconds is None or not least <= seconds <= most]


class Checks:
    """Results of checks, and figures for the table."""

    def __init__(self):
        self.failed, self.count, self.figures = [], 0, []

    def that(self, what, is_fine, detail=""):
        self.count += 1
        self.failed += [] if is_fine else [what]
        print(f"load: {'ok' if is_fine else 'FAILED'}: {what}: {detail}"[:1000], flush=True)

    def at_most(self, what, value, limit):
        self.that(what, value <= limit, f"{value:.3f}, limit {limit:.3f}")

    def figure(self, name, *values):
        self.figures.append((name, ", ".join(f"{value:.3f}" if isinstance(value, float) else str(value) for value in values)))


def controls(checks):
    """Judges accept what is right, and refuse what is wrong."""
    image, good, streamed = base64.b64encode(png(64, 64)).decode(), generation(), stream()
    error = {"error": {"message": "m", "type": "t", "param": None, "code": "queue_full"}}
    told = {"error": {**error["error"], "message": "cannot read /tmp/x"}}
    headers, soon = {"x-request-id": "r"}, {"x-request-id": "r", "retry-after": "1"}
    body = json.dumps({"data": [{"b64_json": image}]}).encode()
    done, now = (0.0, {"type": "image_generation.completed", "b64_json": image}), (0.0, {"type": "kiln.progress"})
    refused = lambda status, error, headers=soon, request=good: Record(request, status, headers, json.dumps(error).encode())
    right = [Record(good, 200, headers, body), refused(429, error), Record(streamed, 200, headers, events=[now, done])]
    right += [Record(Request(leaves=1.0), fault="left"), Record(streamed, 200, headers, events=[(0.0, {"type": "error", **error})])]
    wrong = [refused(500, error), refused(400, error), refused(429, error, headers), refused(429, error, {**soon, "retry-after": "61"})]
    wrong += [refused(503, {"detail": "x"}), refused(429, told), refused(503, error, request=Request(statuses=(400,)))]
    wrong += [Record(good, fault="Cut"), Record(good, fault="left"), Record(good, 200, {}, body), Record(good, 200, headers, body[:-9])]
    wrong += [Record(good, 200, headers, b'{"data":[]}'), Record(good, 200, headers, body.replace(image[-80:].encode(), b""))]
    wrong += [Record(streamed, 200, headers, events=events) for events in ([], [now], [done, now], [done, done])]
    fine = [not fault_of(record) for record in right] + [within_two([(1, 1.9), (2, 1.1), (0.0, 0.2)]) == (1.0, 2), growth([50] * 9) == 0]
    fine += [not is_slower([1, 1, 1], [1.1] * 3, 1.2), not wrong_lives([5.0, 5.9], 4.9, 6)]
    found = [fault_of(record) for record in wrong] + [within_two([(1, 3), (3, 1)] + [(1, 1)] * 8)[0] < 0.9, growth([50, 60, 150]) > 64]
    found += [is_slower([1, 1, 1], [1.3] * 3, 1.2)] + [wrong_lives([life], 4.9, 6) for life in (None, 1.0, 9.0)]
    checks.that("judges accept what is right", all(fine), fine)
    checks.that("judges refuse what is wrong", all(found), f"{len(found)} controls" if all(found) else found)


# Load.


def draw(rng, image, bad):
    """A random request. One in ten is wrong, one in a hundred too large, and one in twenty is left by its client."""
    dice = rng.random()
    if dice < 0.11:
        return Request(TOO_LARGE, statuses=(413,)) if dice < 0.01 else rng.choice(bad)
    size = rng.choice(["64x64", "64x64", "96x64", "64x128"])
    fields = {"size": size, "steps": rng.choice([1, 1, 2]), "n": rng.choice([1] * 8 + [2, 3])}
    fields |= {"seed": rng.getrandbits(53)} if dice < 0.5 else {}
    shown = {**fields, "output_format": rng.choice(["png", "jpeg", "webp"])}
    edits = lambda **_: edit(image, rng.random() < 0.5, **fields)
    streamed = lambda **_: edit(image, rng.random() < 0.5, stream="true", progress="true", **fields)
    request = rng.choice([edits, streamed, generation, stream, stream, stream])(**shown)
    request.leaves = rng.uniform(0.001, 4) if rng.random() < 0.056 else None
    return request


async def client(server, address, rng, requests, until, records):
    """Sends one request after the other."""
    connection = None
    while time.monotonic() < until:
        try:
            connection = connection or await Connection.open(server, address)
            records.append(await connection.exchange(draw(rng, *requests)))
        except OSError as error:
            records.append(Record(Request(), fault=f"no connection: {error}"))
        record = records[-1]
        if connection and (record.fault or record.headers.get("connection") == "close" or rng.random() < 0.3):
            connection.close(resets=rng.random() < 0.5)
            connection = None
        if record.status in (429, 503):
            # Polite clients wait as long as Retry-After says. Less patient ones keep the queue full.
            await asyncio.sleep(rng.uniform(0.5, 1) * min(2, int(record.headers.get("retry-after", 1))))
    if connection:
        connection.close()


class Watch:
    """Samples of the queue, of the memory and of the engine's thread."""

    def __init__(self, server):
        self.at, self.queue, self.predicted, self.memory, self.computed, self.is_over = [], [], [], [], [], False
        self.task = asyncio.ensure_future(self.sample(server))

    async def sample(self, server):
        connection = await Connection.open(server)
        try:
            while not self.is_over:
                metrics = await connection.metrics()
                self.at.append(time.monotonic())
                self.queue.append(metrics["kiln_queue_length"])
                self.predicted.append(metrics["kiln_queue_predicted_seconds"])
                self.memory.append(server.memory())
                self.computed.append(server.computed())
                await asyncio.sleep(0.1)
        finally:
            connection.close()

    async def stop(self):
        """Ends the sampling. Returns why it has ended already, if it has."""
        self.is_over = True
        return (await asyncio.gather(self.task, return_exceptions=True))[0]

    def ran(self, start, end):
        """Seconds that the engine has run between two moments, and has waited for a core."""
        low, high = (min(max(1, bisect.bisect_left(self.at, at)), len(self.at) - 1) for at in (start, end))
        share = lambda i, at: (at - self.at[i - 1]) / (self.at[i] - self.at[i - 1])
        value = lambda i, at, k: self.computed[i - 1][k] + share(i, at) * (self.computed[i][k] - self.computed[i - 1][k])
        return [value(high, end, k) - value(low, start, k) for k in (0, 1)]

    def of_image(self, at):
        """Seconds that the server predicts for an image at a moment: the mean of all that wait, and of half of the one that runs."""
        samples = zip(self.at, self.queue, self.predicted)
        near = sorted((abs(own - at), predicted / (queue + 0.5)) for own, queue, predicted in samples if queue > 4)
        return statistics.mean(seconds for _, seconds in near[:7])

    def slowdown(self, start, end):
        """How much longer the engine took than it ran, because other programs had its core."""
        ran, waited = self.ran(start, end)
        return (ran + waited) / max(ran, 0.01)


async def times(servers, is_over):
    """How long quick requests take, in turns at each server, without the time in which its engine waited for a core. Also how long each
    server has computed for one of them, on all its threads. The speed of a machine varies, but in turns it is the same for all."""
    connections = [await Connection.open(server, "127.0.0.12") for server in servers]
    found, starts = [[] for _ in servers], [server.processor_time() for server in servers]
    while not is_over(len(found[0])):
        for server, connection, times in zip(servers, connections, found):
            _, before = server.computed()
            record = await connection.exchange(replace(generation(), statuses=(200,)))
            if fault := fault_of(record):
                raise RuntimeError(f"a quick request failed: {fault}")
            times.append(record.seconds - (server.computed()[1] - before))
    for connection in connections:
        connection.close()
    return found, [(server.processor_time() - start) / len(found[0]) for server, start in zip(servers, starts)]


async def settled(server, connections=1, seconds=1.0):
    """Waits until the queue is empty and no more than these connections are open. Returns the metrics and how long it took."""
    watcher, start = await Connection.open(server), time.monotonic()
    while True:
        metrics, took = await watcher.metrics(), time.monotonic() - start
        if (metrics["kiln_queue_length"] == 0 and metrics["kiln_connections"] <= connections) or took > seconds:
            watcher.close()
            return metrics, took
        await asyncio.sleep(0.005)


async def made(server):
    """How many images had their turn."""
    connection = await Connection.open(server)
    metrics = await connection.metrics()
    connection.close()
    return metrics["kiln_queue_seconds_count"]


async def load(server, checks, rng, other):
    """Two hundred clients of eight addresses want more than the server can do. Nobody uses the other one."""
    watch = Watch(server)
    await times([server, other], lambda done: done >= 12)
    files = server.files()
    probes = start_probe(server, "--probe")
    records, start, images = [], time.monotonic(), await made(server)
    requests = png(64, 64), list(bad_requests())
    own = lambda: random.Random(rng.getrandbits(64))
    clients = [client(server, f"127.0.0.{2 + i % 8}", own(), requests, start + SECONDS, records) for i in range(200)]
    await asyncio.gather(*clients)
    end, images = time.monotonic(), await made(server) - images
    lost = await watch.stop()
    late, health = probes()
    metrics, _ = await settled(server, 99)
    faults = collections.Counter(filter(None, map(fault_of, records)))
    statuses = collections.Counter(record.fault or record.status for record in records)
    checks.that("each request is answered, or refused with the time to wait", not faults and not lost, faults or dict(statuses))
    checks.that("the load is more than the server takes", statuses[429] > 50 and statuses[200] > 20, dict(statuses))
    loaded = [i for i, at in enumerate(watch.at) if at >= start]
    queue, predicted, memory = ([values[i] for i in loaded] for values in (watch.queue, watch.predicted, watch.memory))
    checks.that("the queue is full, and never too long", 0.8 * WAITING <= max(queue) <= WAITING, f"{max(queue):.0f} of {WAITING} images")
    each = watch.ran(start, end)[0] / images
    # The server knows how fast it was so far. Nobody knows how much of the machine other programs will take, so waits and predictions
    # are compared in seconds in which the engine computes.
    waits = [wait for wait in map(Record.wait, records) if wait]
    computed = [(predicted * each / watch.of_image(at), watch.ran(at, at + real)[0]) for at, predicted, real in waits]
    share, count = within_two(computed)
    told = [f"{predicted:.2f} {real:.2f}" for predicted, real in computed if not within_two([(predicted, real)])[0] and real > 0.25]
    is_fine = share >= 0.9 and count >= 10
    checks.that("nine of ten predicted waits are right within a factor of two", is_fine, f"{share:.3f} of {count}: {told}")
    known, real = statistics.mean(watch.of_image(at) for at, *_ in waits), (end - start) / images
    told = f"{known:.3f} s predicted for an image, {real:.3f} s on average"
    checks.that("images are predicted right within a factor of two", known <= 2 * real and real <= 2 * known, told)
    # Others may overtake an image until it has waited for 1.8 times what was predicted, which is at most a full queue.
    done = [record for record in records if record.status == 200 and not record.fault]
    spent = [watch.ran(record.start, record.start + record.seconds)[0] for record in done]
    checks.at_most("p99 of accepted requests is twice a full queue", percentile(spent, 0.99), 2 * (WAITING + 3) * each)
    checks.at_most("memory does not grow under load, in MiB", growth(memory), 64)
    # An answer takes two wake-ups: the server's and the client's. The machine may add its own p99 to each.
    checks.at_most("p99 of /health in seconds", percentile(health, 0.99), 0.05 + 2 * percentile(late, 0.99))
    now = await server.files_after(files)
    is_fine = metrics["kiln_queue_length"] == 0 and now <= files
    checks.that("nothing is left of the load", is_fine, f"{now} files instead of {files}")
    checks.that("no image failed", metrics['kiln_images_total{result="failed"}'] == 0, metrics['kiln_images_total{result="failed"}'])
    # A program may disturb a measurement, but not three in a row.
    for _ in range(3):
        (now, idle), _ = await times([server, other], lambda done: done >= 15)
        if is_fine := not is_slower(idle, now, 1.05):
            break
    told = f"{statistics.median(now):.3f} s, and {statistics.median(idle):.3f} s without load before"
    checks.that("requests after the load are as fast as without", is_fine, told)
    checks.figure("requests by status", dict(sorted(statuses.items(), key=str)))
    p50_p99 = lambda values: [percentile(values, share) for share in (0.5, 0.99)]
    checks.figure("images, seconds of the engine for each, and slowdown by other programs", images, each, watch.slowdown(start, end))
    checks.figure("seconds of accepted requests, p50 and p99", *p50_p99([record.seconds for record in done]))
    checks.figure("seconds of waits, p50 and p99", *p50_p99([real for *_, real in waits]))
    plain, _ = within_two([wait[1:] for wait in waits])
    checks.figure("predictions within a factor of two: in computing seconds, of how many, in seconds", share, count, plain)
    checks.figure("p99 of accepted requests in full queues", percentile(spent, 0.99) / each / (WAITING + 3))
    checks.figure("longest queue, largest predicted seconds", max(queue), max(predicted))
    checks.figure("resident MiB, and growth from the first to the last third", statistics.median(memory), growth(memory))
    checks.figure("seconds of /health and of late wake-ups, p50 and p99", *p50_p99(health), *p50_p99(late))


async def bounds(server, checks, rng):
    """The queue and a client's share of it have an end, in images and in predicted seconds."""
    is_running = lambda event: event.get("phase") == "denoise"
    held = [(await begin(server, stream(**ENDLESS), is_running))[0]]

    async def fill(address):
        """Sends requests of ten images and then of one, until each is refused. Returns how many images wait, and the refusals."""
        waiting, refusals = 0, []
        for n in (10, 1):
            while True:
                connection, record = await begin(server, stream(n=n), lambda event: True, address)
                if record.status != 200:
                    connection.close()
                    refusals.append(fault_of(record) or json.loads(record.body)["error"]["code"])
                    break
                held.append(connection)
                waiting += n
        return waiting, refusals

    async def leave():
        while held:
            held.pop().close()
        metrics, took = await settled(server, 99)
        checks.that("all who leave the queue leave room", metrics["kiln_queue_length"] == 0 and took < 1, f"{took:.3f} s")

    first = await fill("127.0.0.31")
    checks.that("one client has half of the queue", first == (WAITING // 2, ["client_limit"] * 2), first)
    second = await fill("127.0.0.32")
    checks.that("the queue is full when it is full", second == (WAITING // 2, ["queue_full"] * 2), second)
    await leave()
    # The first request comes to an empty queue, which takes anything.
    watcher, seconds, status = await Connection.open(server), [], 200
    while status == 200 and len(seconds) < 20:
        connection, record = await begin(server, stream(n=3, **ENDLESS), lambda event: True, f"127.0.0.{40 + len(seconds)}")
        held.append(connection)
        status = record.status
        seconds.append((await watcher.metrics())["kiln_queue_predicted_seconds"])
    watcher.close()
    limit = max(seconds[0], WAITING_SECONDS + seconds[0] / 3)
    is_fine = status == 429 and b"queue_full" in record.body and not fault_of(record) and max(seconds) <= limit
    checks.that("predicted seconds have an end", is_fine, f"{seconds}, limit {limit:.1f}")
    await leave()


async def silent(server, address, count, begin=b"", drip=b""):
    """Opens connections that say nothing, or not enough. Returns how long the server keeps each, counted from before the connection and
    from its being there, or nothing if the server does not close it."""

    async def one():
        start = time.monotonic()
        connection = await Connection.open(server, address)
        there = time.monotonic()
        if begin.startswith(b"next"):
            await connection.get("/health")
            start = there = time.monotonic()
        sending = asyncio.ensure_future(connection.drip(drip))
        try:
            await connection.send(begin.removeprefix(b"next "))
            await asyncio.wait_for(connection.rest(), HEADER_TIME + 4)
        except asyncio.TimeoutError:
            return None, None
        except OSError:
            pass
        finally:
            sending.cancel()
            connection.close()
        return time.monotonic() - start, time.monotonic() - there

    return await asyncio.gather(*(one() for _ in range(count)))


async def slow(server, checks, rng, other):
    """Clients that say nothing, or too slowly, are closed in time, and delay nobody. They do not know of the other server."""
    half = f"GET /health HTTP/1.1\r\nHost: localhost:{server.port}\r\nX-Half: ".encode()

    async def attack():
        """All kinds at once. Normal requests go on meanwhile, and new clients connect."""
        kinds = [("127.0.0.20", 500), ("127.0.0.21", PER_ADDRESS, b"", half * 9), ("127.0.0.22", PER_ADDRESS, half)]
        kinds += [("127.0.0.23", PER_ADDRESS, b"next " + half), ("127.0.0.24", PER_ADDRESS, b"next G", half[1:] * 9)]
        probes = start_probe(server, "--fresh")
        attacks = asyncio.gather(*(silent(server, *kind) for kind in kinds))
        found, computed = await times([server, other], lambda done: attacks.done())
        return found, computed, await attacks, probes()

    # Another program may disturb a measurement, but not three in a row.
    for _ in range(3):
        (during, idle), computed, lives, (late, health) = await attack()
        limit = 0.05 + 2 * percentile(late, 0.99)
        is_fine = not is_slower(idle, during, 1.2) and computed[0] <= 1.2 * computed[1] and percentile(health, 0.99) <= limit
        if is_fine:
            break
    pairs = ((statistics.median(during), statistics.median(idle)), computed)
    told = ", computed ".join(f"{busy:.3f} s instead of {usual:.3f}" for busy, usual in pairs)
    told += f"; p99 of new clients {percentile(health, 0.99):.3f}, limit {limit:.3f}"
    checks.that("slow clients do not delay others", is_fine, told)
    checks.at_most("each new client is answered", max(health), 1)
    silents = sorted(lives[0], key=lambda life: life[1] or 1e9)
    admitted, refused = silents[-PER_ADDRESS:], silents[:-PER_ADDRESS]
    is_fine = not wrong_lives([life for _, life in refused], 0, 1)
    checks.that("an address has 32 connections at most", is_fine, f"{len(refused)} refused after at most {refused[-1][1]:.3f} s")
    kinds = ["silent", "dripping", "half a header", "half a second header", "dripping a second header"]
    for kind, group in zip(kinds, [admitted, *lives[1:]]):
        begun, there = zip(*group)
        # The server's clock starts between the two.
        is_fine = not wrong_lives(begun, HEADER_TIME, HEADER_TIME + 9) and not wrong_lives(there, 0, HEADER_TIME + 1)
        told = f"{len(group)} closed after {min(begun, key=lambda x: x or 0)} to {max(there, key=lambda x: x or 1e9)} s"
        checks.that(f"clients have five seconds for a header: {kind}", is_fine, told)
    checks.figure("quick requests in seconds: idle, among slow clients", statistics.median(idle), statistics.median(during))
    found = [percentile(health, share) for share in (0.5, 0.99, 1)]
    checks.figure("/health of new clients among slow ones in seconds, p50, p99 and longest", *found)


async def patience(server, checks, rng):
    """Clients that stop in the middle of a body, or of taking an answer, are closed after half a minute. Runs next to the other checks."""
    form = replace(edit(bytes(3 * MIB)), length=4 * MIB)
    bodies = [replace(generation(), length=1000), replace(generation(), length=1000, body=b"{"), form, replace(form, body=form.body[:-MIB])]
    drips = [b"", b" " * 400, b"", b""]
    limits = [BODY_TIME, BODY_TIME, BODY_TIME + 3, BODY_TIME + 2]

    async def half(body, drip):
        connection = await Connection.open(server, "127.0.0.25")
        begin = time.monotonic()
        await connection.ask(body)
        sent, sending, record = time.monotonic(), asyncio.ensure_future(connection.drip(drip, 0.1)), Record(body)
        try:
            await asyncio.wait_for(connection.read(record), BODY_TIME + 9)
            ended = time.monotonic()
            await asyncio.wait_for(connection.rest(), 2)
        except (asyncio.TimeoutError, OSError, Cut) as error:
            ended, record.fault = 0.0, repr(error)
        sending.cancel()
        connection.close()
        return ended - begin, ended - sent, record

    async def late(pause):
        """Asks for more than buffers take, and reads nothing for a while. Returns how many answers came."""
        # Small segments keep the server's buffer small.
        connection = await Connection.open(server, "127.0.0.26", SO_RCVBUF=4096, TCP_MAXSEG=536)
        await connection.send(f"GET /metrics HTTP/1.1\r\nHost: localhost:{server.port}\r\n\r\n".encode() * 200)
        await asyncio.sleep(pause)
        try:
            for count in range(200):
                await asyncio.wait_for(connection.read(Record()), 5)
            return 200, "all"
        except (asyncio.TimeoutError, OSError, Cut) as error:
            return count, repr(error)
        finally:
            connection.close()

    halves = asyncio.gather(*map(half, bodies, drips))
    halves, soon, never = await asyncio.gather(halves, late(ANSWER_TIME - 5), late(ANSWER_TIME + 2))
    for (life, silence, record), limit in zip(halves, limits):
        is_told = record.status == 408 and b"body_timeout" in record.body and not record.fault
        is_in_time = not wrong_lives([life], limit, limit + 9) and not wrong_lives([silence], 0, limit + 1)
        told = f"{life:.3f} s, status {record.status}, {record.fault}"
        checks.that(f"half a body is refused after {limit} s", is_told and is_in_time, told)
    checks.that("answers may be taken late", soon[0] == 200, soon)
    checks.that("answers that nobody takes are given up", never[0] < 200 and "Timeout" not in never[1], never)


async def gone(server, checks, rng):
    """Clients that leave at any stage cost nothing: their images leave the queue, and the next one begins within a step."""
    is_event = lambda **wanted: lambda event: all(event.get(name) == value for name, value in wanted.items())
    watcher = await Connection.open(server)
    await settled(server, 2)

    async def leave(what, request, until):
        """A client leaves at an event of its stream, and the next client's image begins."""
        counter = 'kiln_canceled_total{when="running"}'
        # The image of the last client may still end.
        while (metrics := await watcher.metrics())["kiln_queue_predicted_seconds"] > 0:
            await asyncio.sleep(0.05)
        before = metrics[counter]
        if until:
            connection, record = await begin(server, request, until)
        else:
            (connection, _), record = await begin(server, request), Record()
            await asyncio.sleep(1)
        steps = [(event["index"], at) for at, event in record.progress() if event["phase"] == "denoise"]
        longest = max([b - a for (i, a), (j, b) in itertools.pairwise(steps) if i == j], default=NOISE)
        start = time.monotonic()
        connection.close(resets=rng.random() < 0.5)
        follower, record = await begin(server, stream(), is_event(phase="encode"), "127.0.0.33")
        took = time.monotonic() - start
        metrics = await watcher.metrics()
        follower.close()
        canceled = metrics[counter] - before
        checks.at_most(f"who leaves {what} makes room within a step", took, longest + NOISE)
        checks.that(f"who leaves {what} is counted", canceled == 1 and metrics["kiln_queue_length"] == 0, canceled)
        await settled(server, 2)

    await leave("while an image is made", stream(**ENDLESS), is_event(phase="denoise", done=6))
    partial = is_event(type="image_generation.partial_image")
    await leave("after a partial image", stream(size="256x256", steps=32, partial_images=3), partial)
    await leave("before the second of ten images", stream(size="256x256", steps=9, n=10), is_event(index=1, done=3))
    await leave("without a stream", generation(**ENDLESS, n=10), None)

    runner, _ = await begin(server, stream(**ENDLESS), is_event(phase="denoise"))
    canceled = (await watcher.metrics())['kiln_canceled_total{when="waiting"}']
    waiter, _ = await begin(server, generation(n=10), address="127.0.0.34")
    while (waiting := (await watcher.metrics())["kiln_queue_length"]) < 10:
        await asyncio.sleep(0.01)
    waiter.close()
    metrics, took = await settled(server, 3)
    checks.at_most("who leaves the queue is gone within 0.1 s", took, 0.1 + NOISE)
    checks.that("who leaves the queue is counted", metrics['kiln_canceled_total{when="waiting"}'] == canceled + 1, waiting)
    sender, _ = await begin(server, replace(edit(bytes(2 * MIB)), length=3 * MIB), address="127.0.0.34")
    while (held := (await watcher.metrics())['kiln_host_bytes{kind="uploads"}']) < 2 * MIB:
        await asyncio.sleep(0.01)
    sender.close()
    metrics, took = await settled(server, 3)
    left = metrics['kiln_host_bytes{kind="uploads"}']
    checks.that("who leaves while sending holds no memory", left == 0 and took < 0.1 + NOISE, f"{held:.0f} and {left:.0f} bytes")
    runner.close()

    # Any request, at any moment.
    await settled(server, 2)
    image, lefts, files = png(64, 64), 0, await server.files_after(0)
    failed = (await watcher.metrics())['kiln_images_total{result="failed"}']

    async def one(number):
        nonlocal lefts
        fields = {"size": rng.choice(["64x64", "128x128"]), "steps": rng.choice([1, 8]), "n": rng.choice([1, 3])}
        request = rng.choice([edit(image, True, **fields), generation(**fields), stream(partial_images=3, **fields)])
        connection = await Connection.open(server, f"127.0.0.{50 + number % 8}")
        record = await connection.exchange(replace(request, leaves=rng.uniform(0.001, 1)))
        lefts += record.fault == "left"
        connection.close(resets=rng.random() < 0.5)
        return fault_of(record)

    count = 200 if LONG else 20
    faults = [fault for start in range(0, count, 10) for fault in await asyncio.gather(*map(one, range(start, start + 10)))]
    checks.that("clients leave at random moments", not any(faults) and lefts > count / 2, f"{lefts} of {count} left, {set(faults)}")
    metrics, took = await settled(server, 2)
    checks.at_most("random leavers are gone", took, 0.1 + NOISE)
    is_same = metrics["kiln_connections"] <= 2 and metrics['kiln_images_total{result="failed"}'] == failed
    now = await server.files_after(files)
    checks.that("random leavers leave nothing", is_same and now <= files, f"{now} files instead of {files}")
    start = time.monotonic()
    follower, record = await begin(server, stream(), is_event(phase="encode"))
    checks.at_most("the next image begins", time.monotonic() - start, NOISE)
    follower.close()
    watcher.close()
    await settled(server)


async def bombs(server, checks, rng):
    """Bodies and images that claim to be large, or are."""
    before = server.forget_peak()
    connection = await Connection.open(server)
    record = await connection.exchange(Request(length=10 << 30, statuses=(413,)))
    checks.that("10 GB are refused before they are sent", not fault_of(record) and record.seconds < NOISE, f"{record.seconds:.3f} s")
    checks.that("the connection ends with the refusal", await asyncio.wait_for(connection.rest(), 2) == b"", "closed")
    connection.close()
    connection = await Connection.open(server)
    await connection.send(Request(is_chunked=True).head(server.port))
    reading, beyond = asyncio.ensure_future(connection.read(record := Record(Request(statuses=(413,))))), 0
    start = time.monotonic()
    for _ in range(BODY_BYTES // MIB):
        await connection.send(b"%x\r\n%b\r\n" % (MIB, bytes(MIB)))
    # The server may have to catch up. Then it has to say no with what exceeds the limit.
    while beyond < MIB and not (await asyncio.wait([reading], timeout=1))[0]:
        await asyncio.gather(connection.send(b"2000\r\n" + bytes(0x2000) + b"\r\n"), return_exceptions=True)
        beyond += 0x2000
    await asyncio.gather(reading, return_exceptions=True)
    peak, took = server.memory("VmHWM"), time.monotonic() - start
    connection.close()
    is_fine = not fault_of(record) and 0 < beyond <= 0x10000
    checks.that("a body without an end is refused at its limit", is_fine, f"{beyond} bytes beyond it, {took:.1f} s")
    checks.at_most("a body takes its length in memory, in MiB", peak - before, BODY_BYTES / MIB + 32)
    for claimed in ((60000, 60000), (0xFFFFFFFF, 1), (0, 0)):
        before = server.forget_peak()
        connection = await Connection.open(server)
        record = await connection.exchange(replace(edit(png(16, 16, claimed)), statuses=(400,)))
        connection.close()
        grown = server.memory("VmHWM") - before
        is_fine = not fault_of(record) and record.seconds < 0.1 + NOISE and grown < 16
        checks.that(f"an image that claims {claimed} pixels is refused", is_fine, f"{record.seconds:.3f} s, {grown:.1f} MiB, {record.body}")
    metrics, _ = await settled(server)
    checks.that("nothing of it is held", metrics['kiln_host_bytes{kind="uploads"}'] == 0, metrics['kiln_host_bytes{kind="uploads"}'])
    checks.figure("MiB that a body without an end takes", peak - before)


async def drain(server, requests, seconds):
    """SIGTERM while requests wait, in this order. Returns their records, and what is wrong."""
    watcher, asked, wrong = await Connection.open(server), [], []
    for number, request in enumerate(requests):
        connection = await Connection.open(server, "127.0.0.60")
        asked.append(asyncio.ensure_future(connection.exchange(request)))
        end = time.monotonic() + 1
        while (await watcher.metrics())["kiln_queue_length"] < number and time.monotonic() < end:
            await asyncio.sleep(0.005)
    half, body = await Connection.open(server), generation()
    await half.send(body.head(server.port) + body.body[:9])
    while (await watcher.metrics())['kiln_host_bytes{kind="uploads"}'] < 9:
        await asyncio.sleep(0.005)
    start = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(NOISE)
    try:
        (await Connection.open(server)).close()
        wrong.append("a new connection was let in")
    except ConnectionRefusedError:
        pass
    await half.send(body.body[9:])
    await half.read(record := Record(body))
    records = [*await asyncio.gather(*asked), record]
    code, took = await server.wait(seconds + 2), time.monotonic() - start
    wrong += [f"exit code {code}"] if code != 143 else []
    wrong += [f"the end took {took:.1f} s"] if took > seconds else []
    for record in records:
        text = record.body + b"".join(json.dumps(event).encode() for _, event in record.events[-1:])
        is_refused = record.status == 503 or b'"type": "error"' in text
        wrong += filter(None, [fault_of(record), "refused for another reason" if is_refused and b"shutting_down" not in text else None])
        record.status = 503 if is_refused else record.status
    return records, wrong, took


async def terminate(server, checks, rng):
    """SIGTERM with ten requests in the queue: what is soon done is made, and the rest is refused. Ends the server."""
    soon = [generation(size="256x256", steps=12), *(generation() for _ in range(6)), stream()]
    # An image for which there is no time, but which may wait: its steps follow from what the server predicts for a few.
    watcher, runner = await Connection.open(server), (await begin(server, stream(**ENDLESS), lambda event: True))[0]
    before = (await watcher.metrics())["kiln_queue_predicted_seconds"]
    connection, _ = await begin(server, stream(size="1024x1024", steps=4), lambda event: True)
    few = (await watcher.metrics())["kiln_queue_predicted_seconds"] - before
    for each in (connection, runner, watcher):
        each.close()
    await settled(server)
    late = [stream(size="1024x1024", steps=max(4, min(64, int(4 * 2.2 * DRAIN_SECONDS / few)))), stream(**ENDLESS)]
    records, wrong, took = await drain(server, soon + late, DRAIN_TIME)
    statuses = [record.status for record in records]
    checks.that("SIGTERM leaves no request without an answer", not wrong, wrong or f"{took:.1f} s")
    # What the two were told of the queue says how long the first of them was predicted to take.
    first, second = (record.progress()[0][1]["eta_ms"] / 1000 for record in records[8:10])
    has_no_time = second - first > DRAIN_SECONDS
    is_fine = has_no_time and statuses == [200] * 8 + [503] * 3
    checks.that("accepted images are made if there is time", is_fine, f"{statuses}, {second - first:.1f} s for the ninth")


async def rounds(folder, checks, rng):
    """SIGTERM with more work than there is time, and again and again at random moments."""
    server = await Server(folder, *FLAGS).ready()
    records, wrong, took = await drain(server, [generation(size="256x256", steps=16) for _ in range(20)], DRAIN_TIME)
    statuses = [record.status for record in records]
    is_fine = not wrong and statuses.count(200) > 1 and statuses.count(503) > 1
    checks.that("the end takes no longer than it may", is_fine, f"{took:.1f} s, {statuses}, {wrong}")
    for number in range(12):
        server = await Server(folder, *FLAGS).ready()
        steps = lambda: rng.choice([1, 8, 32])
        requests = [rng.choice([generation, stream])(size="128x128", steps=steps()) for _ in range(rng.randrange(1, 20))]
        records, wrong, took = await drain(server, requests, DRAIN_TIME)
        told = wrong or f"{took:.1f} s, {dict(collections.Counter(record.status for record in records))}"
        checks.that(f"SIGTERM, round {number}", not wrong, told)


async def kill(server, folder, checks):
    """SIGKILL, another server at the same place, and SIGTERM twice. Ends the server."""
    place = folder / "socket"
    clients = [await begin(server, stream(**ENDLESS), lambda event: event.get("phase") == "denoise"), await begin(server, generation())]
    server.process.kill()
    rests = [await asyncio.wait_for(connection.rest(), 5) for connection, _ in clients]
    code, start = await server.wait(5), time.monotonic()
    checks.that("SIGKILL leaves a socket file", code == 137 and place.is_socket() and rests[1] == b"", code)
    server = await Server(folder, "--socket", str(place), port=server.port).ready()
    checks.figure("seconds from SIGKILL until the next server is ready", time.monotonic() - start)
    for name, path in (("address", None), ("socket", place)):
        connection = await Connection.open(server, path=path)
        record = await connection.exchange(replace(generation(), statuses=(200,)))
        checks.that(f"the next server answers at the same {name}", not fault_of(record), fault_of(record) or "")
        connection.close()
    connection, _ = await begin(server, stream(**ENDLESS), lambda event: event.get("phase") == "denoise")
    server.process.send_signal(signal.SIGTERM)
    goes_on = await server.wait(2 * NOISE) is None
    server.process.send_signal(signal.SIGTERM)
    start = time.monotonic()
    code, took = await server.wait(5), time.monotonic() - start
    checks.that("the second SIGTERM ends at once", goes_on and code == 143 and took < NOISE, f"exit code {code}, {took:.3f} s")
    connection.close()


async def uploads(server, checks, rng):
    """Many large bodies at once: they share a limit on memory, which is free again after them."""
    body, kept = Request(bytes(60 * MIB), length=61 * MIB, statuses=(429,)), []
    for _ in range(2):
        before, watcher = server.forget_peak(), await Connection.open(server)
        await watcher.metrics()
        connections = [await Connection.open(server, "127.0.0.70") for _ in range(12)]
        asks = [asyncio.ensure_future(connection.exchange(body)) for connection in connections]
        done, _ = await asyncio.wait(asks, timeout=6)
        held = (await watcher.metrics())['kiln_host_bytes{kind="uploads"}']
        faults = [fault_of(ask.result()) for ask in done]
        told = f"{len(done)} of 12 refused, {held / MIB:.0f} MiB held, {faults}"
        checks.that("bodies share a limit", len(done) == 4 and not any(faults) and held <= UPLOADED_BYTES, told)
        for ask, connection in zip(asks, connections):
            ask.cancel()
            connection.close()
        await asyncio.gather(*asks, return_exceptions=True)
        # Each body may take as much more as one alone.
        grown = server.memory("VmHWM") - before
        checks.at_most("bodies take their length in memory, in MiB", grown, UPLOADED_BYTES / MIB + 8 * 32)
        await settled(server, 2)
        watcher.close()
        kept.append(server.memory())
    # The allocator may keep some of it, but not more each time.
    checks.at_most("memory is given back, in MiB", kept[1] - kept[0], 32)
    checks.figure("MiB that bodies of 480 MiB take, and that are resident after them", grown, kept[1])


async def deaf(server, checks, rng):
    """Clients that ask for ten images and take none of the answer."""
    watcher = await Connection.open(server)
    done = 'kiln_images_total{result="done"}'
    shown = {"size": "256x256", "steps": 2, "n": 10}
    for what, request in (("JSON", generation(**shown)), ("a stream", stream(partial_images=3, preview="full", **shown))):
        target = (await watcher.metrics())[done] + 10
        connection = await Connection.open(server, "127.0.0.71", SO_RCVBUF=4096, TCP_MAXSEG=536)
        await connection.ask(request)
        # Buffers take a part. If they are full before the last image, the client is late already.
        while (metrics := await watcher.metrics())[done] < target and metrics["kiln_connections"] == 2:
            await asyncio.sleep(0.05)
        start = time.monotonic()
        while (metrics := await watcher.metrics())["kiln_connections"] == 2 and time.monotonic() < start + ANSWER_TIME + 5:
            await asyncio.sleep(0.05)
        made, took = 10 - target + metrics[done], time.monotonic() - start
        is_fine = took <= ANSWER_TIME + 1 + NOISE and metrics["kiln_connections"] == 1 and metrics["kiln_queue_length"] == 0
        checks.that(f"{what} that nobody takes is given up", is_fine, f"{took:.1f} s after {made:.0f} of 10 images")
        connection.close()
    watcher.close()


FLAGS = ["--socket", "none", "--max-waiting", str(WAITING)]


async def run(folder, checks, rng):
    """All checks."""
    servers = [Server(folder, *FLAGS), Server(folder, "--socket", str(folder / "socket"))]
    server, other = [await server.ready() for server in servers]

    async def phase(check, *arguments):
        start = time.monotonic()
        try:
            await asyncio.wait_for(check(*arguments), 400 if LONG else 90)
        except Exception:
            checks.that(check.__name__, False, traceback.format_exc()[-900:])
        print(f"load: {check.__name__}: {time.monotonic() - start:.1f} s", flush=True)

    patient = asyncio.ensure_future(phase(patience, server, checks, rng))
    await phase(load, server, checks, rng, other)
    await phase(slow, server, checks, rng, other)
    await phase(bounds, server, checks, rng)
    await patient
    for check in [gone, bombs] + [uploads, deaf] * LONG:
        await phase(check, server, checks, rng)
    is_quiet = not re.search(rb"panick|event=failure", server.log.read_bytes())
    checks.that("nothing went wrong inside", is_quiet and server.process.poll() is None, server.log)
    await phase(terminate, server, checks, rng)
    await phase(kill, other, folder, checks)
    if LONG:
        await phase(rounds, folder, checks, rng)


def main():
    if sys.argv[1:2] in (["--probe"], ["--fresh"]):
        return probe(int(sys.argv[2]), sys.argv[1] == "--fresh")
    seed = int(os.environ.get("KILN_TEST_SEED") or (random.SystemRandom().getrandbits(32) if LONG else 1))
    print(f"load: {'long' if LONG else 'short'}, KILN_TEST_SEED={seed}", flush=True)
    checks, start = Checks(), time.monotonic()
    controls(checks)
    with tempfile.TemporaryDirectory() as folder:
        # Another build may replace the program at any moment.
        shutil.copy2(KILN, Path(folder) / "kiln")
        try:
            asyncio.run(run(Path(folder), checks, random.Random(seed)))
        finally:
            for process in PROCESSES:
                process.kill()
                process.wait()
            if checks.failed:
                print(f"load: the end of the first server's log:\n{(Path(folder) / '0.log').read_text()[-1500:]}")
    width = max(len(name) for name, _ in checks.figures)
    print("\n".join(f"load: {name:{width}}  {value}" for name, value in checks.figures))
    print(f"load: {checks.count} checks in {time.monotonic() - start:.0f} s, {len(checks.failed)} failed: {checks.failed}")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
