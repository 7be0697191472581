"""Compares kiln's GPU kernels with PyTorch's (cuBLAS, cuDNN, SDPA) in one process, on one stream, taking turns.

    cargo build --release --example kiln_peers
    python3 bench/peers [--check] [--rows REGEX] [--quick] [--json FILE]
    python3 bench/peers --tiles [--rows REGEX] [--json FILE]

Needs a GPU and PyTorch; with --dry neither runs, and only the shapes of all rows are checked. With --tiles, every tile of kiln's GEMM
kernels is timed at the shapes of GEMMs with quantized weights instead. The protocol is in bench/README.md.

Rows run in a process of their own, which is started again behind a row that hangs or breaks the device.

Exits 1 when a memory-bound row that moves 32 MB or more runs at less than 0.80 of the speed of a copy of as many bytes, when
a result is wrong (--check), or when a row fails.
"""

import pathlib
import sys

# The formulas of quantized weights and the random VAE are in the tools.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
