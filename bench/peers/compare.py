"""Compares kiln's kernels with PyTorch's, row by row."""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import peers
from peers import rows, rows_fp8, rows_mixed, session, timing
from peers.library import Kiln
from peers.report import FLOOR, FLOOR_BYTES, HEAD, below, line, speed, summary
from peers.rows import Case, Operands, Scaled, bare
from peers.session import gpu_state
from peers.tiles import tile_line, tile_summary, time_tiles
from peers.timing import Side, beat, burst, sets_of, sustained

ROWS = rows.ROWS + rows_fp8.ROWS + rows_mixed.ROWS
# Relative error allowed where a case states no error of its arithmetic, by the type of the result.
TOLERANCE = {torch.bfloat16: 5e-3, torch.float32: 1e-5, torch.uint8: 1e-3}
# Relative error of rounding to bf16, for values spread over a binade.
BF16_ROUNDING = 1.66e-3
# A worker that is silent for this long hangs; one that exits with this status has lost the device.
PATIENCE_S, DEVICE_LOST = 90, 70


# ------------------------------------------------------------------------------------------------------------------------- rows


def errors(found: tuple, expected: tuple) -> list:
    """For each result, the norm of the difference over the norm of the expected values. NaN if the result has one."""
    pairs = [(f.double().reshape(e.shape), e.double()) for f, e in zip(found, expected)]
    return [float((f - e).norm() / e.norm()) for f, e in pairs]


def limits(case: Case, expected: tuple) -> list:
    """For each result, twice the sum of the error of its arithmetic and of one rounding to bf16 or f32. An e4m3 result gets the
    limit of bf16 before it is rounded; otherwise rounding to e4m3 would hide all other errors."""
    if case.arithmetic is None:
        return [TOLERANCE[case.outputs[0].dtype]] * len(expected)
    rounded = [out.store(e) if isinstance(out, Scaled) else e.to(out.dtype) for out, e in zip(case.outputs, expected)]
    bf16 = 2 * math.hypot(BF16_ROUNDING, case.arithmetic)
    return [
        math.hypot(error, bf16) if isinstance(out, Scaled) else 2 * math.hypot(error, case.arithmetic)
        for out, error in zip(case.outputs, errors(rounded, expected))
    ]


def blank(out) -> None:
    """Fills an output with NaN, or with a number if its type has no NaN, so that unwritten elements show."""
    if isinstance(out, Scaled):
        out.codes.view(torch.uint8).fill_(0x7F)
    else:
        out.fill_(float("nan") if out.is_floating_point() else 77)


def check(case: Case, kiln: Kiln) -> dict:
    """Compares kiln's results, in every way it computes them, and the peer's with the reference; returns the largest errors."""
    expected = case.reference()
    within = limits(case, expected)
    theirs = max(errors(case.peer(), expected))
    # The peer has to be right as well, because a comparison with another function would be worth nothing. NaN is never small.
    found, right = {}, theirs <= max(case.peer_tolerance, *within)
    for name, each in {"kiln": case, **ours_of(case)}.items():
        if each is not case:
            if each.in_place or each.reference is not case.reference:
                expected = each.reference()
            within = limits(each, expected)
        if not each.in_place:
            for out in each.outputs:
                blank(out)
        kiln.call(each)()
        of_outputs = errors(each.outputs, expected)
        found[name] = max(of_outputs, key=lambda e: math.inf if math.isnan(e) else e)
        right = right and all(error <= limit for error, limit in zip(of_outputs, within))
        beat()
    return {"error": found.pop("kiln"), "peer_error": theirs, "right": right, "errors": found}


def ours_of(case: Case) -> dict:
    """A case's further ways to compute its result with kiln's ops."""
    return {name: other for name, other in case.others.items() if isinstance(other, Case)}


def copies(total: int, sets: int) -> list:
    """Copies that read and write `total` bytes in all."""
    pairs = []
    for _ in range(sets):
        source = torch.randn(max(1, total // 8), device="cuda")
        pairs.append((torch.empty_like(source), source))
    return [lambda to=to, source=source: to.copy_(source) for to, source in pairs]


def keeping(peers: list) -> list:
    """The peers' calls. Their results are kept until the next round, so that their memory is as cold as kiln's."""
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
        self.record = identity(row) | {"bytes": first.bytes, "flops": first.flops}
        self.sides = []
        if args.check:
            self.record |= check(first, kiln)
        if args.check_only:
            return
        # All sets together exceed twice the L2, so that each call finds its operands gone from it.
        sets = sets_of(first.bytes, args.cold)
        self.cases += [row.make(operands) for _ in range(sets - 1)]
        kiln.kernels()
        self.sides = [Side("kiln", [kiln.call(case) for case in self.cases], stream, args.graphs)]
        self.record |= {"kernels": kiln.kernels(), "lacking": {}}
        for name in ("torch", *first.others):
            ways = [case.peer if name == "torch" else case.others[name] for case in self.cases]
            calls = [kiln.call(way) for way in ways] if isinstance(ways[0], Case) else keeping(ways)
            try:
                self.sides.append(Side(name, calls, stream, args.graphs))
            except RuntimeError as error:  # the row has its other sides
                self.record["lacking"][name] = str(error)
        others = [side.name for side in self.sides if side.name not in ("kiln", "torch")]
        self.record |= {"sets": sets, "calls": {s.name: s.count for s in self.sides}, "others": others, "ours": list(ours_of(first))}


def sizes_of(rows: list) -> list:
    """Memory-bound rows that move equally many bytes (to three digits) form one list; every other row is a list of its own."""
    lists = {}
    for i, row in enumerate(rows):
        case = row.make(Operands("meta"))
        lists.setdefault(("compute", i) if case.flops else f"{case.bytes:.3g}", []).append(row)
    return list(lists.values())


def identity(row) -> dict:
    return {"row": row.name, "shape": row.shape, "format": row.format}


def failure(row, error) -> dict:
    return identity(row) | {"failed": str(error)}


def run_size(rows: list, kiln: Kiln, stream, args) -> list:
    """The records of rows that share a ceiling."""
    trials, records = [], []
    for row in rows:
        try:
            trials.append(Trial(row, kiln, stream, args))
            records.append(trials[-1].record)
        except Exception as error:  # out of memory, a refused operand, a fault on the device: the other rows may do
            records.append(failure(row, error))
    if args.check_only or not trials:
        return records
    copied, first = [], trials[0].record
    large = first["bytes"] >= FLOOR_BYTES
    if not first["flops"]:
        moves = copies(first["bytes"], first["sets"])
        copied.append(Side("copy", moves, stream, args.graphs))
        if args.graphs and large:  # a graph may copy differently than a stream; the faster copy is the ceiling
            copied.append(Side("copy without graph", moves, stream, False))
    # A copy runs between any two rows. All rows share this ceiling, and more copies make it more accurate.
    times = burst([side for trial in trials for side in trial.sides + copied], args.pairs)
    medians = {side: statistics.median(values) for side, values in times.items()}
    ceiling = min(copied, key=medians.get, default=None)
    state = gpu_state()
    for trial in trials:
        sides = trial.sides + copied
        trial.record |= {"burst_s": {s.name: times[s] for s in sides}, "after_burst": state}
        trial.record |= {"ceiling": ceiling and ceiling.name, "ceiling_s": ceiling and medians[ceiling]}
        # A launch-bound row has nothing to sustain.
        if args.sustain > 0 and (first["flops"] or large):
            lasting = trial.sides + ([ceiling] if ceiling else [])
            trial.record["sustained_s"] = sustained(lasting, args.sustain, medians)
            trial.record["after_sustained"] = gpu_state()
    return records


# ------------------------------------------------------------------------------------------------------------------------- main


def title(row) -> str:
    return f"{row.name} {row.shape}"


def dry(rows: list, kiln: Kiln) -> int:
    """Checks shapes without memory: the library checks kiln's operands, PyTorch its own."""
    for row in rows:
        case = row.make(Operands("meta"))
        for each in (case, *ours_of(case).values()):
            kiln.call(each)()
        expected = [tuple(e.shape) for e in case.reference()]
        for name, found in (("kiln", case.outputs), ("torch", case.peer())):
            counts = [math.prod(shape) for shape in expected]
            assert [bare(f).numel() for f in found] == counts[: len(found)], f"{row.name}: {name} has other sizes than {expected}"
        work = f"{case.flops / 1e9:.1f} GFLOP" if case.flops else f"{case.bytes / 1e6:.1f} MB"
        print(f"{row.name:<21}{row.shape:<38}| {work:>14} | {len(case.tensors)} tensors")
    print(f"{len(rows)} rows fit")
    return 0


def arguments() -> argparse.Namespace:
    parser = session.parser(peers.__doc__)
    parser.add_argument("--check", action="store_true", help="compare results with a reference as well")
    parser.add_argument("--check-only", action="store_true", help="compare results and time nothing")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="queue call by call; small rows time the host")
    parser.add_argument("--tiles", action="store_true", help="time every tile at the shapes of GEMMs with quantized weights instead")
    parser.add_argument("--worker", type=int, metavar="N", help=argparse.SUPPRESS)  # run the rows from the N-th list on
    args = parser.parse_args()
    args.check |= args.check_only
    return session.checked(parser, args, ROWS, title)


def lists_of(args) -> list:
    """The lists of rows that run together, in order."""
    if args.tiles:
        return [[row] for row in args.rows if row.format in ("W8A8", *rows_mixed.QUANTIZE)]
    return sizes_of(args.rows)


def work(args) -> int:
    """Runs the lists of rows, starting with one, and appends their records to a file."""
    records_file = pathlib.Path(args.json)
    timing.heartbeat = records_file
    kiln = Kiln(args.library)
    torch.backends.cudnn.benchmark = True
    session.exact_references()
    torch.manual_seed(1)
    args.cold = session.cold_bytes()
    about = session.about_device()
    session.show(about | gpu_state())
    how = "graphs" if args.graphs else "single calls"
    print(f"{args.pairs} rounds of {how}, at least {args.cold >> 20} MiB of operands in turn, {args.sustain} s sustained")
    print("" if args.tiles else HEAD, flush=True)

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True), session.opened(kiln) as stream, session.records(records_file, "a") as write:
        for i, rows in enumerate(lists_of(args)[args.worker :], args.worker):
            try:
                records = [time_tiles(rows[0], kiln, stream, args)] if args.tiles else run_size(rows, kiln, stream, args)
            except Exception as error:
                records = [failure(row, error) for row in rows]
            for record in records:
                write(about | record | {"list": i})
                print(tile_line(record) if args.tiles and "failed" not in record else line(record), flush=True)
            try:
                session.free(stream)
            except RuntimeError:  # nothing works after a fault on the device; its context cannot be closed either
                os._exit(DEVICE_LOST)
    return 0


def supervise(args) -> list:
    """Runs all rows in a worker, with a new worker after a row that hangs or ends it. Returns the records of all rows."""
    with tempfile.TemporaryDirectory() as folder:
        records_file = pathlib.Path(args.json or pathlib.Path(folder) / "records.jsonl")
        records_file.write_text("")
        read = lambda: [json.loads(each) for each in records_file.read_text().splitlines()]
        lists, first = lists_of(args), 0
        while first < len(lists):
            os.utime(records_file)
            package = pathlib.Path(__file__).parent
            command = [sys.executable, package, *sys.argv[1:], "--worker", str(first), "--json", str(records_file)]
            with subprocess.Popen(command) as worker:
                while worker.poll() is None and time.time() - records_file.stat().st_mtime < PATIENCE_S:
                    time.sleep(0.2)
                hangs = worker.poll() is None
                if hangs:
                    worker.kill()
            if worker.returncode == 0:
                break
            done = {record["list"] for record in read()}
            if worker.returncode > 0 and not done and worker.returncode != DEVICE_LOST:
                raise SystemExit(worker.returncode)  # it has said why it cannot start
            if worker.returncode == DEVICE_LOST or max(done, default=-1) >= first:
                first = max(done) + 1
            if worker.returncode == DEVICE_LOST or first >= len(lists):
                continue
            why = f"no sign of life for {PATIENCE_S} s" if hangs else f"the worker ended with {worker.returncode}"
            with records_file.open("a") as out:
                for row in lists[first]:
                    record = failure(row, why)
                    print(line(record), flush=True)
                    print(json.dumps(record | {"list": first}), file=out)
            first += 1
        return read()


def main() -> int:
    args = arguments()
    if args.dry:
        return dry(args.rows, Kiln(args.library))
    if args.worker is not None:
        return work(args)
    records = supervise(args)
    name = lambda r: f"{r['row']} {r['shape']}"
    done = [r for r in records if "failed" not in r]
    bad = [name(r) for r in records if "failed" in r or not r.get("right", True)]
    slow = [f"{name(r)} ({speed(r):.2f})" for r in done if below(r)]
    lacking = [f"{name(r)}: {side}" for r in done for side in r.get("lacking", {})]
    print("\n".join(tile_summary(done) if args.tiles else summary(done)))
    size = FLOOR_BYTES // 1_000_000
    if not args.tiles:
        print(f"rule: memory-bound rows of {size} MB or more run at {FLOOR:.2f} of the copy's speed or better (burst)")
        print("below it: " + ("; ".join(slow) or "none"))
        print("sides that failed: " + ("; ".join(lacking) or "none"))
    print("wrong or failed: " + ("; ".join(bad) or "none"))
    return 1 if slow or bad else 0
