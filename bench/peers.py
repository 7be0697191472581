"""Compares kiln's GPU kernels with PyTorch's (cuBLAS, cuDNN, SDPA) in one process, on one stream, taking turns.

    cargo build --release --example kiln_peers
    python3 bench/peers.py [--check] [--rows REGEX] [--quick] [--json FILE]

Needs a GPU and PyTorch; with --dry neither runs, and only the shapes of all rows are checked. The protocol is in bench/README.md.

Exits 1 when a memory-bound row that moves 32 MB or more runs at less than 0.80 of the speed of a copy of as many bytes, when
a result is wrong (--check), or when a row fails.
"""

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import math
import pathlib
import re
import statistics
import subprocess
import sys
import time

import torch

from peer_rows import ROWS, Operands

LIBRARY = pathlib.Path(__file__).resolve().parent.parent / "target/release/examples/libkiln_peers.so"
FLOOR, FLOOR_BYTES = 0.80, 32_000_000
FEWEST_PAIRS, FEWEST_SETS, MOST_SETS = 15, 3, 160
# Between samples, so that they run at high clocks.
PAUSE_S = 0.03
# A call that takes longer is a sample by itself. Shorter ones are captured in a CUDA graph that goes through all sets, as often as it
# takes for its start not to count.
SLOW_S, SAMPLE_S = 0.005, 0.0005
# Clock ticks for which the GPU is kept busy before a sample, so that all its work is queued when it starts.
HEAD_START = 400_000
# Relative error allowed, by the type of the result. The peer may round in between.
TOLERANCE = {torch.bfloat16: 5e-3, torch.float32: 1e-5, torch.uint8: 1e-3}
PEER_TOLERANCE = 3e-2


# ------------------------------------------------------------------------------------------------------------------ the library


class PeerTensor(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("cols", ctypes.c_uint64),
        ("stride", ctypes.c_uint64),
        ("dtype", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    ]


ABI = 2 << 32 | ctypes.sizeof(PeerTensor)
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}


class Kiln:
    """The ops of bench/peers.rs. Before `open` they are only checked."""

    def __init__(self, path: str):
        self.library = ctypes.CDLL(str(path))
        self.library.kiln_peers_abi.restype = ctypes.c_uint64
        found = self.library.kiln_peers_abi()
        if found != ABI:
            raise SystemExit(f"error: {path} speaks {found:#x}, this script {ABI:#x}: build it again")
        text, size, u64 = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64
        self.library.kiln_peers_open.argtypes = [ctypes.c_uint32, u64, text, size]
        self.library.kiln_peers_open.restype = ctypes.c_void_p
        self.library.kiln_peers_close.argtypes = [ctypes.c_void_p]
        self.library.kiln_peers_close.restype = None
        lists = [ctypes.POINTER(PeerTensor), size, ctypes.POINTER(ctypes.c_double), size]
        self.library.kiln_peers_run.argtypes = [ctypes.c_void_p, text, *lists, text, size]
        self.library.kiln_peers_run.restype = ctypes.c_int32
        self.error = ctypes.create_string_buffer(4096)
        self.handle = None
        self.invented = {}

    def open(self, device: int, stream: int) -> None:
        self.handle = self.library.kiln_peers_open(device, stream, self.error, len(self.error))
        if not self.handle:
            raise SystemExit(f"error: {self.error.value.decode()}")

    def close(self) -> None:
        self.library.kiln_peers_close(self.handle)
        self.handle = None

    def address(self, tensor) -> int:
        if not tensor.is_meta:
            return tensor.data_ptr()
        # Shapes without memory: a place far from all others for each storage.
        storage = tensor.untyped_storage()._cdata
        base = self.invented.setdefault(storage, (len(self.invented) + 1) << 40)
        return base + tensor.storage_offset() * tensor.element_size()

    def describe(self, tensor) -> PeerTensor:
        if tensor is None:
            return PeerTensor()
        rows, cols = tensor.shape
        assert tensor.stride(1) == 1 or cols == 1, "columns have gaps"
        return PeerTensor(self.address(tensor), rows, cols, tensor.stride(0), DTYPES[tensor.dtype], 0)

    def call(self, case):
        """A function that queues the case's op."""
        name, tensors = case.op.encode(), (PeerTensor * len(case.tensors))(*map(self.describe, case.tensors))
        numbers = (ctypes.c_double * len(case.numbers))(*case.numbers)
        run, handle, error = self.library.kiln_peers_run, self.handle, self.error
        arguments = (handle, name, tensors, len(tensors), numbers, len(numbers), error, len(error))

        def queue():
            if run(*arguments):
                raise RuntimeError(f"kiln: {error.value.decode()}")

        return queue


# --------------------------------------------------------------------------------------------------------------------- timing


class Side:
    """One way of doing a row's work: a call for each operand set."""

    def __init__(self, name: str, calls: list, stream, graphs: bool):
        self.name, self.graph = name, None
        for call in calls:  # compiles, plans, allocates
            call()
        stream.synchronize()
        start = time.perf_counter()
        for call in calls[:FEWEST_SETS]:
            call()
        stream.synchronize()
        each = (time.perf_counter() - start) / FEWEST_SETS
        slow = each > SLOW_S
        self.turn = itertools.cycle(calls)
        self.count = 1 if slow else len(calls) * math.ceil(SAMPLE_S / (each * len(calls)))
        if graphs and not slow:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self.queue()
            self.graph = graph
            self.graph.replay()
            stream.synchronize()

    def queue(self) -> None:
        """Queues `count` calls."""
        if self.graph is not None:
            self.graph.replay()
        else:
            for _ in range(self.count):
                next(self.turn)()

    def sample(self) -> float:
        """Seconds of a call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START)
        start.record()
        self.queue()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / self.count


def burst(order: list, pairs: int) -> dict:
    """Every side once a round for each time it is named, with pauses, forwards and backwards in turn."""
    times = {side: [] for side in order}
    for i in range(pairs):
        for side in order if i % 2 == 0 else reversed(order):
            time.sleep(PAUSE_S)
            times[side].append(side.sample())
    return times


def sustained(sides: list, seconds: float, per_call: dict) -> dict:
    """Every side without a pause for half the time, then again in the opposite order. The first third of each stretch does not
    count: the clock falls until the power limit is met."""
    times = {side.name: [] for side in sides}
    for side in sides + sides[::-1]:
        # Events about every 10 ms, a few of them ahead of the GPU.
        repeats = max(1, round(0.01 / (per_call[side] * side.count)))
        marks = [torch.cuda.Event(enable_timing=True)]
        marks[0].record()
        end = time.perf_counter() + seconds / 2
        while time.perf_counter() < end or len(marks) < 4:
            for _ in range(repeats):
                side.queue()
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
            marks[max(0, len(marks) - 4)].synchronize()
        marks[-1].synchronize()
        stretch = [a.elapsed_time(b) / 1e3 / (repeats * side.count) for a, b in itertools.pairwise(marks)]
        times[side.name] += stretch[len(stretch) // 3 :]
    return times


def quartiles(values: list) -> tuple:
    """First quartile, median, third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def ratio(above: list, below: list) -> float:
    """Of neighbours: the median of the ratios. Sides with unequal numbers of times have no neighbours."""
    if len(above) != len(below):
        return statistics.median(above) / statistics.median(below)
    return statistics.median(a / b for a, b in zip(above, below))


# ------------------------------------------------------------------------------------------------------------------------- rows


def largest_error(found: tuple, expected: tuple) -> float:
    """Of several results: the norm of the difference over the norm of what was expected. NaN if there is one."""
    pairs = [(f.double().reshape(e.shape), e.double()) for f, e in zip(found, expected)]
    return float(torch.stack([(f - e).norm() / e.norm() for f, e in pairs]).max())


def check(case, queue) -> tuple:
    """Largest relative errors of kiln's and the peer's results, and whether they are small enough."""
    expected = case.reference()
    if not case.in_place:
        for out in case.outputs:  # what is not written shows
            out.fill_(float("nan") if out.is_floating_point() else 77)
    theirs = largest_error(case.peer(), expected)
    queue()
    ours = largest_error(case.outputs, expected)
    # A comparison with something else would be worth nothing, so the peer has to be right as well. NaN is never small.
    return ours, theirs, ours <= TOLERANCE[case.outputs[0].dtype] and theirs <= PEER_TOLERANCE


def copies(total: int, sets: int) -> list:
    """Copies that read and write `total` bytes together."""
    pairs = []
    for _ in range(sets):
        source = torch.randn(max(1, total // 8), device="cuda")
        pairs.append((torch.empty_like(source), source))
    return [lambda to=to, source=source: to.copy_(source) for to, source in pairs]


def keeping(peers: list) -> list:
    """The peers' calls. Results are kept until the next round, so that their memory is as cold as ours."""
    results = [None] * len(peers)

    def call(i):
        results[i] = peers[i]()

    return [lambda i=i: call(i) for i in range(len(peers))]


class Trial:
    """A row with its operands and sides, ready to be timed."""

    def __init__(self, row, kiln: Kiln, stream, args):
        operands = Operands("cuda")
        self.cases = [row.make(operands)]
        first = self.cases[0]
        self.record = {"row": row.name, "shape": row.shape, "bytes": first.bytes, "flops": first.flops}
        self.sides = []
        if args.check:
            self.record["error"], self.record["peer_error"], self.record["right"] = check(first, kiln.call(first))
        if args.check_only:
            return
        # Together more than the L2 holds twice, so that each finds its operands gone.
        sets = sets_of(first.bytes, args)
        self.cases += [row.make(operands) for _ in range(sets - 1)]
        self.sides = [
            Side("kiln", [kiln.call(case) for case in self.cases], stream, args.graphs),
            Side("torch", keeping([case.peer for case in self.cases]), stream, args.graphs),
        ]
        for name in first.others:
            self.sides.append(Side(name, keeping([case.others[name] for case in self.cases]), stream, args.graphs))
        self.record |= {"sets": sets, "calls": {s.name: s.count for s in self.sides}, "others": list(first.others)}


def sets_of(total: int, args) -> int:
    return min(MOST_SETS, max(FEWEST_SETS, math.ceil(args.cold / total)))


def sizes_of(rows: list) -> list:
    """Rows bound by memory that move as much as each other (to three digits) are one list; all others are alone."""
    lists = {}
    for i, row in enumerate(rows):
        case = row.make(Operands("meta"))
        lists.setdefault(("compute", i) if case.flops else f"{case.bytes:.3g}", []).append(row)
    return list(lists.values())


def failure(row, error) -> dict:
    return {"row": row.name, "shape": row.shape, "failed": str(error)}


def run_size(rows: list, kiln: Kiln, stream, args) -> list:
    """The records of rows that have one ceiling."""
    trials, records = [], []
    for row in rows:
        try:
            trials.append(Trial(row, kiln, stream, args))
            records.append(trials[-1].record)
        except RuntimeError as error:  # out of memory, a refused operand, a fault on the device
            records.append(failure(row, error))
    if args.check_only or not trials:
        return records
    copied, first = [], trials[0].record
    large = first["bytes"] >= FLOOR_BYTES
    if not first["flops"]:
        moves = copies(first["bytes"], first["sets"])
        copied.append(Side("copy", moves, stream, args.graphs))
        if args.graphs and large:  # a graph may copy in another way than a stream; the faster one is the ceiling
            copied.append(Side("copy without graph", moves, stream, False))
    # A copy between any two rows: it is the same for all, and known better the more of them there are.
    times = burst([side for trial in trials for side in trial.sides + copied], args.pairs)
    medians = {side: statistics.median(values) for side, values in times.items()}
    ceiling = min(copied, key=medians.get, default=None)
    state = gpu_state()
    for trial in trials:
        sides = trial.sides + copied
        trial.record |= {"burst_s": {s.name: times[s] for s in sides}, "after_burst": state}
        trial.record |= {"ceiling": ceiling and ceiling.name, "ceiling_s": ceiling and medians[ceiling]}
        # A row bound by its launch has nothing to sustain.
        if args.sustain > 0 and (first["flops"] or large):
            lasting = trial.sides + ([ceiling] if ceiling else [])
            trial.record["sustained_s"] = sustained(lasting, args.sustain, medians)
            trial.record["after_sustained"] = gpu_state()
    return records


HEAD = (
    f"{'row':<21}{'shape':<38}|{'kiln us':>10} {'quartiles':>17} {'torch us':>10} {'quartiles':>17} {'x torch':>7} "
    f"|{'kiln':>6} {'torch':>6}        {'of copy':>7} | sustained: kiln us, torch us, x torch, of copy | other us, x other | errors"
)


def line(record: dict) -> str:
    """A row for display. `x torch` is kiln's speed over PyTorch's, `of copy` its speed over the copy's."""
    text = f"{record['row']:<21}{record['shape']:<38}|"
    if "burst_s" in record:
        times = record["burst_s"]
        for side in ("kiln", "torch"):
            low, median, high = (f"{t * 1e6:.1f}" for t in quartiles(times[side]))
            text += f"{median:>10} {low + '..' + high:>17} "
        amount, unit = (record["flops"], "TFLOP/s") if record["flops"] else (record["bytes"], "TB/s")
        rates = [amount / statistics.median(times[side]) / 1e12 for side in ("kiln", "torch")]
        digits = 1 if record["flops"] else 2
        text += f"{ratio(times['torch'], times['kiln']):>7.{3 if record['flops'] else 2}f} |"
        text += f"{rates[0]:>6.{digits}f} {rates[1]:>6.{digits}f} {unit:<7}{share(record):>7} |"
    if "sustained_s" in record:
        times = record["sustained_s"]
        ours, theirs = (statistics.median(times[side]) for side in ("kiln", "torch"))
        text += f" {ours * 1e6:.1f} {theirs * 1e6:.1f} {theirs / ours:.{3 if record['flops'] else 2}f}"
        if record["ceiling"]:
            text += f" {statistics.median(times[record['ceiling']]) / ours:.2f}"
    for name in record.get("others", []):
        for times in (record["burst_s"], record.get("sustained_s")):
            if times:
                text += f" | {name} {statistics.median(times[name]) * 1e6:.1f} {ratio(times[name], times['kiln']):.3f}"
    if "error" in record:
        text += f" | {record['error']:.1e} {record['peer_error']:.1e}" + ("" if record["right"] else " WRONG")
    if below(record):
        text += " SLOW"
    return text


def speed(record: dict) -> float:
    return record["ceiling_s"] / statistics.median(record["burst_s"]["kiln"])


def share(record: dict) -> str:
    return f"{speed(record):.2f}" if record["ceiling"] else ""


def below(record: dict) -> bool:
    limited = record.get("ceiling") and record["bytes"] >= FLOOR_BYTES
    return bool(limited) and not speed(record) >= FLOOR


# ------------------------------------------------------------------------------------------------------------------------- main


def gemm_summary(records: list) -> str:
    """The geometric mean over plain GEMMs: they are one kernel family, and no single row is all of it."""
    text, count = [], 0
    for key in ("burst_s", "sustained_s"):
        rows = [r for r in records if r["row"] == "linear" and key in r and not r["shape"].startswith("1x")]
        ratios = {r["shape"]: ratio(r[key]["torch"], r[key]["kiln"]) for r in rows}
        if len(ratios) > 1:
            count, least = len(ratios), min(ratios, key=ratios.get)
            text.append(f"{key[:-2]} {statistics.geometric_mean(ratios.values()):.3f}, least {ratios[least]:.3f} ({least})")
    return f"products, x torch, geometric mean of {count}: " + "; ".join(text) if text else ""


def gpu_state() -> dict:
    fields = ["driver_version", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active"]
    query = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return dict(zip(fields, map(str.strip, answer.splitlines()[0].split(","))))
    except (OSError, IndexError, subprocess.SubprocessError) as error:
        return {"nvidia-smi": str(error)}


def dry(rows: list, kiln: Kiln) -> int:
    """Operands without memory: the library checks how ours fit each other, PyTorch how its own do."""
    for row in rows:
        case = row.make(Operands("meta"))
        kiln.call(case)()
        expected = [tuple(e.shape) for e in case.reference()]
        for name, found in (("kiln", case.outputs), ("torch", case.peer())):
            counts = [math.prod(shape) for shape in expected]
            assert [f.numel() for f in found] == counts[: len(found)], f"{row.name}: {name} has other sizes than {expected}"
        work = f"{case.flops / 1e9:.1f} GFLOP" if case.flops else f"{case.bytes / 1e6:.1f} MB"
        print(f"{row.name:<21}{row.shape:<38}| {work:>14} | {len(case.tensors)} tensors")
    print(f"{len(rows)} rows fit")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default=LIBRARY, help="libkiln_peers.so (default: what cargo builds in release)")
    parser.add_argument("--rows", metavar="REGEX", default="", help="rows whose `name shape` matches")
    parser.add_argument("--pairs", type=int, default=21, help=f"rounds of a row, at least {FEWEST_PAIRS} (default 21)")
    parser.add_argument("--sustain", type=float, default=2.0, metavar="S", help="seconds of each side without pause (default 2)")
    parser.add_argument("--quick", action="store_true", help=f"{FEWEST_PAIRS} rounds, nothing sustained")
    parser.add_argument("--check", action="store_true", help="compare results with a reference as well")
    parser.add_argument("--check-only", action="store_true", help="compare results and time nothing")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="queue call by call; small rows time the host")
    parser.add_argument("--dry", action="store_true", help="check the shapes of all rows; needs no GPU")
    parser.add_argument("--json", metavar="FILE", help="write every time, one JSON object a row")
    args = parser.parse_args()
    if args.quick:
        args.pairs, args.sustain = FEWEST_PAIRS, 0.0
    args.check |= args.check_only
    return checked(parser, args)


def checked(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with the rows that --rows names, which bench/builds.py has as well."""
    if args.pairs < FEWEST_PAIRS:
        parser.error(f"fewer than {FEWEST_PAIRS} pairs say nothing")
    args.rows = [row for row in ROWS if re.search(args.rows, f"{row.name} {row.shape}")]
    if not args.rows:
        parser.error("no row has such a name")
    return args


def main() -> int:
    args = arguments()
    kiln = Kiln(args.library)
    if args.dry:
        return dry(args.rows, kiln)

    torch.backends.cudnn.benchmark = True
    for place in (torch.backends.cuda.matmul, torch.backends.cudnn):  # only references are f32
        place.allow_tf32 = False
    torch.manual_seed(1)
    device = torch.cuda.get_device_properties(0)
    args.cold = 2 * max(getattr(device, "L2_cache_size", 0), 64 << 20)
    about = {"device": device.name, "torch": torch.__version__, "cuda": torch.version.cuda}
    about["cudnn"] = torch.backends.cudnn.version()
    print(", ".join(f"{k} {v}" for k, v in (about | gpu_state()).items()))
    how = "graphs" if args.graphs else "single calls"
    print(f"{args.pairs} rounds of {how}, at least {args.cold >> 20} MiB of operands in turn, {args.sustain} s sustained")
    print(HEAD)

    # Not the default stream, which cannot be captured.
    stream = torch.cuda.Stream()
    slow, bad, done = [], [], []
    with contextlib.ExitStack() as stack:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        stack.enter_context(sdpa_kernel(order, set_priority=True))
        stack.enter_context(torch.cuda.stream(stream))
        stack.enter_context(torch.inference_mode())
        kiln.open(torch.cuda.current_device(), stream.cuda_stream)
        stack.callback(kiln.close)
        out = stack.enter_context(open(args.json, "w")) if args.json else None
        for rows in sizes_of(args.rows):
            try:
                records = run_size(rows, kiln, stream, args)
            except RuntimeError as error:
                records = [failure(row, error) for row in rows]
            for record in records:
                name = f"{record['row']} {record['shape']}"
                if "failed" in record:
                    print(f"{record['row']:<21}{record['shape']:<38}| FAILED: {record['failed'].splitlines()[0]}", flush=True)
                    bad.append(name)
                else:
                    print(line(record), flush=True)
                    done.append(record)
                    slow += [f"{name} ({speed(record):.2f})"] if below(record) else []
                    bad += [name] if not record.get("right", True) else []
                if out:
                    print(json.dumps(about | record), file=out, flush=True)
            gc.collect()  # graphs and tensors of these rows
            torch.cuda.empty_cache()

    if summary := gemm_summary(done):
        print(summary)
    size = FLOOR_BYTES // 1_000_000
    print(f"rule: memory-bound rows of {size} MB or more run at {FLOOR:.2f} of the copy's speed or better (burst)")
    print("below it: " + ("; ".join(slow) or "none") + ". Wrong or failed: " + ("; ".join(bad) or "none"))
    return 1 if slow or bad else 0


if __name__ == "__main__":
    sys.exit(main())
