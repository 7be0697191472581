"""What the scripts that record fixtures share and that needs no package: where the repository is, a hash, and files of cases."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def fnv1a(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = ((h ^ byte) * 0x100000001B3) & (2**64 - 1)
    return h


def write_or_check(found, fixture, check):
    """Writes a fixture with a line for each of its cases, or compares it with the stored one. Returns the exit code."""
    lines = [json.dumps(case) for case in found.pop("cases")]
    text = json.dumps(found)[:-1] + ', "cases": [\n' + ",\n".join(lines) + "\n]}\n"
    if not check:
        fixture.write_text(text)
        print(f"{len(text):>8} bytes  {fixture.relative_to(ROOT)}")
        return 0
    same = fixture.read_text() == text
    print("the fixture is up to date" if same else "the fixture differs")
    return 0 if same else 1
