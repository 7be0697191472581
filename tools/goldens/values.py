"""Hashed values, errors, and fixtures of tensors that rounding may move."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import safetensors.numpy
import torch

from goldens.files import FIXTURES, Files, fnv1a

GAMMA = 0x9E3779B97F4A7C15
ERROR_KINDS = ("bf16_relative_l2", "bf16_exact_time_relative_l2")
PACKAGES = ("accelerate", "diffusers", "numpy", "safetensors", "tokenizers", "torch", "transformers")

# --- Hashed values ----------------------------------------------------------


def splitmix_bytes(state, count):
    """The top byte of each of the first outputs of splitmix64."""
    z = np.uint64(state) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(56)).astype(np.int64)


def hash_bytes(name, *shape):
    """One byte, 0..255, for each flat index of the tensor called `name`."""
    return splitmix_bytes(fnv1a(name.encode()), math.prod(shape)).reshape(shape)


def hashed(name, *shape):
    """Values in -1..1, exact in bf16."""
    return torch.from_numpy((2 * hash_bytes(name, *shape) - 255) / 256).float()


def hashed_blocks(name, width, height, side=8):
    """The bytes of an image of square blocks, each of one color."""
    blocks = hash_bytes(name, -(-height // side), -(-width // side), 3)
    return np.ascontiguousarray(blocks.repeat(side, axis=0).repeat(side, axis=1)[:height, :width])


# --- Errors -----------------------------------------------------------------


def relative_l2(value, reference):
    value, reference = value.double(), reference.double()
    return ((value - reference).norm() / reference.norm()).item()


def rms(tensor):
    return tensor.double().square().mean().sqrt().item()


def error_report(outputs, references):
    """Relative L2 error of each output, to seven digits."""
    return {name: float(f"{relative_l2(outputs[name], reference):.6e}") for name, reference in references.items()}


# --- Fixtures ---------------------------------------------------------------


def to_u16(image):
    return (image.double() * 65535).round().to(torch.uint16)


def as_arrays(prefix, tensors):
    return {f"{prefix}.{name}": np.ascontiguousarray(t.numpy()) for name, t in tensors.items()}


@dataclass(kw_only=True)
class Golden(Files):
    """The tensors `name`.safetensors and a summary `name`.json, in addition to files with the same content everywhere."""

    name: str
    tensors: dict
    summary: dict
    contents: dict = None
    # The tensors of a stored summary that depend on the order of sums, and how far they may move.
    noise: Callable = lambda _summary: {}

    def __post_init__(self):
        self.contents = self.contents or {}
        self.paths = FIXTURES / f"{self.name}.safetensors", FIXTURES / f"{self.name}.json"

    def write(self):
        text = json.dumps(self.summary, ensure_ascii=False, indent=1) + "\n"
        self.contents |= dict(zip(self.paths, (safetensors.numpy.save(self.tensors), text.encode())))
        super().write()

    def problems(self):
        tensors, summary = self.paths
        stored = json.loads(summary.read_text(encoding="utf-8"))
        found = super().problems()
        found += compare_tensors(safetensors.numpy.load_file(tensors), self.tensors, self.noise(stored))
        return found + compare_summaries(stored, json.loads(json.dumps(self.summary)), summary.name)


class Recording:
    """Collects the tensors, cases and report of a fixture."""

    def __init__(self):
        self.tensors, self.cases = {}, []
        self.lines = [f"{'case':<20} {'output':<25} {'rms':>7}  {'bf16':<8}  bf16 with exact times"]

    def add(self, case, kept, outputs, *runs, kinds=ERROR_KINDS):
        """Adds a case: its kept tensors, all outputs of its exact run, and the outputs of its bf16 runs. Returns the errors."""
        errors = [error_report(run, outputs) for run in runs]
        self.tensors.update(as_arrays(case["name"], kept))
        self.cases.append(case | dict(zip(kinds, errors)))
        for name, tensor in outputs.items():
            columns = "  ".join(f"{error[name]:.2e}" for error in errors)
            self.lines.append(f"{case['name']:<20} {name:<25} {rms(tensor):7.3f}  {columns}")
        return errors

    def golden(self, name, summary, report=(), **more):
        return Golden(name=name, tensors=self.tensors, summary=summary, report="\n".join([*self.lines, *report]), **more)


def compare_tensors(stored, tensors, noise):
    problems = []
    if stored.keys() != tensors.keys():
        problems.append(f"tensors differ: {sorted(stored.keys() ^ tensors.keys())}")
    for name in sorted(stored.keys() & tensors.keys()):
        old, new = stored[name], tensors[name]
        if old.shape != new.shape or old.dtype != new.dtype:
            problems.append(f"{name}: {new.dtype}{new.shape}, stored {old.dtype}{old.shape}")
            continue
        if name in noise:
            error = relative_l2(torch.from_numpy(new), torch.from_numpy(old))
            if error > noise[name]:
                problems.append(f"{name}: relative L2 {error:.3g}, allowed {noise[name]:.3g}")
            continue
        worst = np.abs(new.astype(np.float64) - old.astype(np.float64)).max()
        if old.dtype == np.float32:
            allowed = 1e-5 * max(1.0, np.abs(old).max())
        else:
            # Ids are exact; a pixel may fall on the other side of a rounding boundary.
            allowed = 1 if old.dtype == np.uint16 else 0
        if worst > allowed:
            problems.append(f"{name}: differs by {worst:.3g}, allowed {allowed:.3g}")
    return problems


def take_errors(summary):
    """Remove the bf16 errors from a summary and return them as {"case: kind of name": error}."""
    errors = {}
    for value in summary.values():
        parts = value if isinstance(value, list) else [value]
        for part in (part for part in parts if isinstance(part, dict)):
            for kind in ERROR_KINDS:
                for name, error in part.pop(kind, {}).items():
                    errors[f"{part['name']}: {kind} of {name}"] = error
    return errors


def compare_summaries(old, new, label):
    old_errors, new_errors = take_errors(old), take_errors(new)
    problems = [f"{key} differs in {label}" for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    # These errors measure rounding noise, which depends on the processor's bf16 kernels. Only their size is a property of the model.
    for name in sorted(old_errors.keys() | new_errors.keys()):
        was, now = old_errors.get(name, 0.0), new_errors.get(name, 0.0)
        if not math.isclose(now, was, rel_tol=0.25):
            problems.append(f"{name} is {now:.2e}, stored {was:.2e}")
    return problems
