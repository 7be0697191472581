"""Programs that take turns generating images, and the statistics of their times. Needs neither a GPU library nor packages."""

import itertools
import json
import statistics
import subprocess
import sys
import time

# Rest before each image of a burst, so that the GPU's clock is high again.
REST_S = 0.5


def requests():
    """A new seed and a new prompt for every image."""
    subjects = ("a red fox", "an old lighthouse", "a glass teapot", "two sailing boats", "a street musician")
    places = ("in the snow", "at dusk", "on a wooden table", "under a starry sky", "in the rain", "in a quiet street", "at the sea")
    for number in itertools.count(1):
        yield number, f"{subjects[number % len(subjects)]} {places[number % len(places)]}, number {number}"


class Kiln:
    """A kiln program that generates an image for each line it reads (`kiln bench --on-request`)."""

    def __init__(self, name, program, arguments):
        self.name = name
        command = [program, "bench", "--on-request", "--quiet", *arguments]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.process = subprocess.Popen([str(part) for part in command], **pipes)
        self.report = self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended with {self.process.wait()}")
        return json.loads(line)

    def image(self, seed, prompt):
        """Times of the stages and of the steps, and the time from request to answer."""
        start = time.perf_counter()
        self.process.stdin.write(f"{seed} {prompt}\n")
        self.process.stdin.flush()
        return self.answer() | dict(total=time.perf_counter() - start)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def burst(engines, rounds, rest, asked):
    """One image for each engine and round, every other round backwards."""
    times = {engine.name: [] for engine in engines}
    for i in range(rounds):
        request = next(asked)
        for engine in engines if i % 2 == 0 else reversed(engines):
            time.sleep(rest)
            times[engine.name].append(engine.image(*request))
    return times


def quartiles(values: list) -> tuple:
    """First quartile, median, third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def ratio(above: list, below: list) -> float:
    """Median of the ratios of neighbors. Sides with different numbers of times have no neighbors."""
    if len(above) != len(below):
        return statistics.median(above) / statistics.median(below)
    return statistics.median(a / b for a, b in zip(above, below))
