"""Places of the fixtures, writing and comparing them, and a hash. Needs no package."""

import gzip
import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"


def fnv1a(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = ((h ^ byte) * 0x100000001B3) & (2**64 - 1)
    return h


def checksum(data):
    """FNV-1a 64, as 16 hexadecimal digits."""
    return f"{fnv1a(data):016x}"


def package_versions(*packages):
    return {package: importlib.metadata.version(package) for package in packages}


def unpacked(path, data):
    """A file's content, unpacked, because versions of zlib compress differently."""
    return gzip.decompress(data) if path.suffix == ".gz" else data


@dataclass(kw_only=True)
class Files:
    """Files with the same content on every machine."""

    contents: dict  # bytes by path
    report: str = ""
    limit: int = 1_000_000  # bytes of all files together

    def problems(self):
        """Differences from the files on disk, as a list of sentences."""
        same = (path.exists() and unpacked(path, path.read_bytes()) == unpacked(path, data) for path, data in self.contents.items())
        return [f"{path.name} differs" for path, equal in zip(self.contents, same) if not equal]

    def write(self):
        for path, data in self.contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            print(f"{len(data):>8} bytes  {path.relative_to(ROOT)}")
        assert sum(map(len, self.contents.values())) < self.limit, f"the files should stay below {self.limit} bytes"


def token_file(name, ids, prompts, long, **about):
    """The fixture `name` of token ids: a line for each prompt with its ids, for long prompts with their number and hash.

    A long prompt is a piece repeated up to 32,768 bytes, the longest prompt.
    """
    cases = [dict(prompt=prompt, ids=found) for prompt, found in prompts]
    for piece in long:
        times = 32768 // len(piece.encode())
        found = ids(piece * times)
        digest = checksum(b"".join(i.to_bytes(4, "little") for i in found))
        cases.append(dict(piece=piece, times=times, count=len(found), fnv=digest))
    text = json.dumps(about)[:-1] + ', "cases": [\n' + ",\n".join(map(json.dumps, cases)) + "\n]}\n"
    return Files(contents={FIXTURES / f"{name}.json": text.encode()})
