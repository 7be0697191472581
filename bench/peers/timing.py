"""Times kernels in bursts and sustained, with alternating sides. The protocol is in bench/README.md."""

import itertools
import math
import pathlib
import time

import torch

FEWEST_PAIRS, FEWEST_SETS, MOST_SETS = 15, 3, 160
# Pause between samples, so that each runs at a high clock.
PAUSE_S = 0.03
# A call that takes longer is a sample by itself. Shorter calls are captured in a CUDA graph that goes through all sets, often enough
# for its launch not to matter.
SLOW_S, SAMPLE_S = 0.005, 0.0005
# Clock ticks that keep the GPU busy before a sample, so that the whole sample is queued when it starts.
HEAD_START = 400_000
# A file that is touched after every measurement. It shows the supervisor that the worker does not hang.
heartbeat: pathlib.Path | None = None


def beat() -> None:
    if heartbeat:
        heartbeat.touch()


def sets_of(total: int, cold: int) -> int:
    """How many operand sets of `total` bytes make `cold` bytes."""
    return min(MOST_SETS, max(FEWEST_SETS, math.ceil(cold / total)))


class Side:
    """One way to do a row's work: a call for each operand set."""

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
        beat()

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
    """Runs every side once per round for each time it is listed, with pauses, forwards and backwards alternately."""
    times = {side: [] for side in order}
    for i in range(pairs):
        for side in order if i % 2 == 0 else reversed(order):
            time.sleep(PAUSE_S)
            times[side].append(side.sample())
        beat()
    return times


def sustained(sides: list, seconds: float, per_call: dict) -> dict:
    """Runs every side without a pause for half the time, then again in the opposite order. The first third of each stretch does not
    count, because the clock falls until it meets the power limit."""
    times = {side.name: [] for side in sides}
    for side in sides + sides[::-1]:
        # An event about every 10 ms; the host stays a few of them ahead of the GPU.
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
        beat()
    return times
