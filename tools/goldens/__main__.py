"""The command: see __init__.py."""

import argparse
import importlib
import sys
import time
from pathlib import Path

# The folder of the package and of the other tools, wherever this was started.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import goldens  # noqa: E402

NAMES = (
    *("klein", "modes", "editing", "lora", "dev", "tiling", "quantized", "builtin", "tokens", "tokens_mistral", "references"),
    "foreign",
)
# Needs a package that the others do not need.
SEPARATE = "ranks"


def reproducible():
    """Makes sums run in the same order on every machine."""
    import torch
    from diffusers.utils import logging

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # Casting a model with to() warns about modules to keep in fp32; there are none.
    logging.set_verbosity_error()


def run(name, args):
    """Writes or checks one fixture. Returns whether it is correct."""
    started = time.monotonic()
    module = importlib.import_module(f"goldens.{name}")
    if "diffusers" in sys.modules:
        reproducible()
    made = module.compute(args.wheel) if name == SEPARATE else module.compute()
    print(made.report, end="\n" if made.report else "")
    problems = made.problems() if args.check else made.write()
    if args.check:
        print("\n".join(problems or [f"{name} is up to date"]))
    print(f"{time.monotonic() - started:.1f} s", flush=True)
    return not problems


def main():
    parser = argparse.ArgumentParser(description=goldens.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to rebuild (default: all but {SEPARATE})")
    parser.add_argument("--check", action="store_true", help="compare with what is stored instead of writing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tokenizer.json of FLUX.2 [dev] to this file instead")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help=f"for {SEPARATE}: the downloaded package")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in (*NAMES, SEPARATE)]:
        parser.error(f"there is no {', '.join(unknown)}")
    if args.json:
        from goldens import tokens_mistral

        args.json.write_text(tokens_mistral.indented_json(), encoding="utf-8")
        return 0
    return 0 if all([run(name, args) for name in args.names or NAMES]) else 1


if __name__ == "__main__":
    sys.exit(main())
