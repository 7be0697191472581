"""Compares the GPU kernels of two builds of kiln in one process, on one stream and the same operands, taking turns.

    cargo build --release --example kiln_peers      # in each of two working trees
    python3 bench/builds.py OLD.so NEW.so [--rows REGEX] [--pairs N] [--json FILE]

Needs a GPU and PyTorch. Rows and protocol come from bench/peers (bursts, alternating forwards and backwards). Results of both builds
are compared to the bit.

Exits 1 when a result differs, when a row fails, when a row that takes 50 us or more is slower by more than 1 %, when any row is slower
by more than 3 %, or when the geometric mean of all rows is below 0.998 of the old speed.
"""

import argparse
import statistics
import sys

import torch

from peers import session
from peers.compare import ROWS, title
from peers.library import Kiln
from peers.rows import Operands, bare
from peers.timing import Side, burst, sets_of
from turns import quartiles, ratio

LONG_ROW_S, LONG_ROW_LOSS, ANY_ROW_LOSS, LEAST_MEAN = 50e-6, 0.01, 0.03, 0.998


def results(case, queue, before: list) -> list:
    """A build's outputs, computed from the same contents."""
    for out, contents in zip(case.outputs, before):
        bare(out).copy_(contents)
    queue()
    torch.cuda.current_stream().synchronize()
    return [bare(out).clone() for out in case.outputs]


def same_bits(a, b) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def loss(record: dict) -> float:
    """The share of its time by which the row became slower."""
    return 1 / record["speed"] - 1


def too_slow(record: dict) -> bool:
    return loss(record) > (LONG_ROW_LOSS if record["old_s"] >= LONG_ROW_S else ANY_ROW_LOSS)


def compare(row, old: Kiln, new: Kiln, stream, args) -> dict:
    """The record of a row: both builds' times, the new build's speed over the old one's, and whether the results are equal."""
    operands = Operands("cuda")
    cases = [row.make(operands)]
    before = [bare(out).clone() for out in cases[0].outputs]
    found = [results(cases[0], build.call(cases[0]), before) for build in (old, new)]
    record = {"row": row.name, "shape": row.shape, "same": all(map(same_bits, *found))}
    sets = sets_of(cases[0].bytes, args.cold)
    cases += [row.make(operands) for _ in range(sets - 1)]
    sides = [Side(name, [build.call(case) for case in cases], stream, True) for name, build in (("old", old), ("new", new))]
    times = {"old": [], "new": []}
    # A row that looks slower is timed again, twice as long, because noise alone can look like one percent.
    for pairs in (args.pairs, 2 * args.pairs):
        for side, values in burst(sides, pairs).items():
            times[side.name] += values
        record |= {"times_s": times, "old_s": statistics.median(times["old"]), "speed": ratio(times["old"], times["new"])}
        if not too_slow(record):
            break
    return record


def line(record: dict) -> str:
    text = f"{record['row']:<21}{record['shape']:<38}|"
    for name in ("old", "new"):
        low, median, high = (f"{t * 1e6:.1f}" for t in quartiles(record["times_s"][name]))
        text += f"{median:>10} {low + '..' + high:>17} "
    text += f"| {record['speed']:.4f} {'same' if record['same'] else 'OTHER RESULTS'}"
    return text + (" SLOWER" if too_slow(record) else "")


def arguments() -> argparse.Namespace:
    parser = session.parser(__doc__, library=False)
    parser.add_argument("old", help="libkiln_peers.so of the old build")
    parser.add_argument("new", help="libkiln_peers.so of the new build")
    return session.checked(parser, parser.parse_args(), ROWS, title)


def main() -> int:
    args = arguments()
    old, new = Kiln(args.old), Kiln(args.new)
    torch.manual_seed(1)
    args.cold = session.cold_bytes()
    session.show({"device": torch.cuda.get_device_name(0)} | session.gpu_state())
    print(f"{'row':<21}{'shape':<38}|{'old us':>10} {'quartiles':>17} {'new us':>10} {'quartiles':>17} | speed, new over old")
    records, failed = [], []
    with session.opened(old, new) as stream, session.records(args.json) as write:
        for row in args.rows:
            try:
                records.append(compare(row, old, new, stream, args))
            except RuntimeError as error:
                failed.append(f"{row.name} {row.shape}: {error}")
                print(f"{row.name:<21}{row.shape:<38}| FAILED: {str(error).splitlines()[0]}", flush=True)
                continue
            print(line(records[-1]), flush=True)
            write(records[-1])
            session.free(stream)
    slow = [r for r in records if too_slow(r)]
    other = [r for r in records if not r["same"]]
    mean = statistics.geometric_mean(r["speed"] for r in records) if records else 0.0
    print(f"{len(records)} rows, geometric mean {mean:.4f} of the old speed; {len(slow)} slower, {len(other)} with other results, "
          f"{len(failed)} failed")
    return 1 if slow or other or failed or mean < LEAST_MEAN else 0


if __name__ == "__main__":
    sys.exit(main())
