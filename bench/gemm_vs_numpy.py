"""Compares kiln's linear layer with numpy's f32 GEMM on the same cores in the same run.

    python bench/gemm_vs_numpy.py [--pairs N] [--threads N] [--json FILE]

kiln multiplies bf16 activations by bf16 weights and rounds the result to bf16; numpy multiplies f32 by f32. The two take
turns, one GEMM each, so that whatever else the machine does hits both alike. Exits 1 when kiln runs at less than
0.8 times numpy's speed (median of the ratios of neighboring runs).
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

FLOOR = 0.8
ROWS, INNER, COLS = 1536, 3072, 3072
FLOPS = 2 * ROWS * INNER * COLS
# A thread pool spins for a while after its work. Without a pause, one side's spinning would cost the other a core.
PAUSE_S = 0.1


def bench_binary() -> str:
    """Builds the kernel bench and returns the path of its executable."""
    command = ["cargo", "bench", "--bench", "kernels", "--no-run", "--message-format=json"]
    root = pathlib.Path(__file__).resolve().parent.parent
    lines = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    built = (json.loads(line) for line in lines if line.startswith("{"))
    paths = [m["executable"] for m in built if m.get("target", {}).get("name") == "kernels" and m.get("executable")]
    return paths[-1]


def cpu_model() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


class Kiln:
    """The bench binary, which times one GEMM for every line it reads."""

    def __init__(self, binary: str, threads: int):
        command = [binary, "--serve", "linear", "--threads", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        word, flops = self.process.stdout.readline().split()
        assert word == "ready" and float(flops) == FLOPS, "the bench's `linear` row has another shape"

    def seconds(self) -> float:
        self.process.stdin.write("\n")
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=21, help="GEMMs each, at least 15 (default 21)")
    parser.add_argument("--threads", type=int, default=2, help="threads for both (default 2)")
    parser.add_argument("--json", metavar="FILE", help="write every time as one JSON line per pair")
    args = parser.parse_args()
    if args.pairs < 15:
        parser.error("fewer than 15 pairs say nothing")

    # Read once, when numpy's library is loaded.
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(args.threads)
    import numpy

    rng = numpy.random.default_rng(1)
    x = rng.uniform(-1, 1, (ROWS, INNER)).astype(numpy.float32)
    w = rng.uniform(-1, 1, (COLS, INNER)).astype(numpy.float32)
    out = numpy.empty((ROWS, COLS), numpy.float32)

    def numpy_seconds() -> float:
        start = time.perf_counter()
        numpy.matmul(x, w.T, out=out)  # the weight is stored [out, in], as a checkpoint stores it
        return time.perf_counter() - start

    kiln = Kiln(bench_binary(), args.threads)
    for _ in range(3):
        numpy_seconds()
        kiln.seconds()
    pairs = []
    for _ in range(args.pairs):
        time.sleep(PAUSE_S)
        a = numpy_seconds()
        time.sleep(PAUSE_S)
        pairs.append((a, kiln.seconds()))
    kiln.close()

    medians = [statistics.median(column) for column in zip(*pairs)]
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"{cpu_model()}, {args.threads} threads, {args.pairs} alternating pairs, {ROWS}x{INNER} by {INNER}x{COLS}")
    for name, median in zip((f"numpy {numpy.__version__} f32", "kiln bf16"), medians):
        print(f"{name:<18} | {median * 1e3:7.1f} ms | {FLOPS / median / 1e9:6.1f} GFLOP/s")
    print(f"kiln / numpy speed | {ratio:.2f} (at least {FLOOR} wanted)")
    if args.json:
        lines = (json.dumps({"numpy_s": a, "kiln_s": b, "threads": args.threads}) for a, b in pairs)
        pathlib.Path(args.json).write_text("".join(line + "\n" for line in lines))
    return 0 if ratio >= FLOOR else 1


if __name__ == "__main__":
    sys.exit(main())
