"""Runs a client in another language next to two servers, and compares what it received with the command line.

    with_servers.py NAME COMMAND...

The command finds the addresses in MAIN and BUSY, the key of the busy server in KEY, and the input images in IMAGES. It writes images to the
folder OUT. Each line of OUT/requests.jsonl names a file there and the request that it answers, as in {"file": "a.png", "prompt": "a star",
"seed": 7}.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import harness


def compare(name, folder):
    """Compares the files of a folder, and returns how many are wrong."""
    requests = (folder / "requests.jsonl").read_text().splitlines()
    wrong = 0
    for request in map(json.loads, requests):
        file = request.pop("file")
        try:
            harness.check((folder / file).read_bytes(), **request)
        except Exception as error:
            wrong += 1
            print(f"{name}: {file}: FAILED: {error!r}\n    request: {request}")
    print(f"{name}: compared {len(requests)} images with the command line, {wrong} differ", flush=True)
    return wrong if requests else 1


def main():
    name, *command = sys.argv[1:]
    with tempfile.TemporaryDirectory() as out:
        main, busy = harness.main_server(), harness.busy_server()
        with main, busy:
            client = {"MAIN": main.address, "BUSY": busy.address, "KEY": harness.KEY, "IMAGES": str(harness.IMAGES), "OUT": out}
            code = subprocess.run(command, env={**os.environ, **client}, timeout=240).returncode
        return 1 if compare(name, Path(out)) or code else 0


if __name__ == "__main__":
    sys.exit(main())
