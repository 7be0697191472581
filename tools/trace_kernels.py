#!/usr/bin/env python3
"""List the kernels of a trace by stage: launches, time and share of each, and the time in which none ran.

    target/release/kiln bench --model FOLDER --runs 2 --trace trace.json
    python3 tools/trace_kernels.py trace.json

One table for each stage of the last image. Kernels of a trace run one by one, without overlap and CUDA graphs. Their times add up to
the stage's, which is a little longer than without a trace.
"""

import argparse
import gzip
import json
import sys
from collections import defaultdict

STAGES = ("encoding text", "encoding references", "denoising", "decoding")


def read(path):
    """The spans of a trace in order of their start: the host's, and the GPUs'."""
    with (gzip.open if path.endswith(".gz") else open)(path, "rt") as file:
        spans = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    spans.sort(key=lambda span: span["ts"])
    return [span for span in spans if span["pid"] == 1], [span for span in spans if span["pid"] != 1]


def end(span):
    return span["ts"] + span["dur"]


def table(stage, kernels):
    """Prints the kernels of a stage."""
    times = defaultdict(list)
    for kernel in kernels:
        times[kernel["name"]].append(kernel["dur"])
    busy, whole = sum(kernel["dur"] for kernel in kernels), end(kernels[-1]) - kernels[0]["ts"]
    print(f"\n{stage['name']}: {len(kernels)} launches in {whole / 1e3:.3f} ms")
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1])):
        print(f"{name:<40}{len(each):>6}{sum(each) / 1e3:>10.3f} ms{100 * sum(each) / whole:>8.2f} %")
    print(f"{'no kernel':<46}{(whole - busy) / 1e3:>10.3f} ms{100 * (whole - busy) / whole:>8.2f} %")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="a file of --trace, which may be gzipped")
    host, kernels = read(parser.parse_args().trace)
    if not kernels:
        sys.exit("no kernels: the trace is of a CPU")
    for name in STAGES:
        stage = next((span for span in reversed(host) if span["name"] == name), None)
        # A kernel belongs to the stage in which it began. The device is at most a little behind the host there.
        inside = [kernel for kernel in kernels if stage and stage["ts"] <= kernel["ts"] < end(stage)]
        if inside:
            table(stage, inside)
    return 0


if __name__ == "__main__":
    sys.exit(main())
