"""Compares kiln's GPU kernels with PyTorch's (cuBLAS, cuDNN, SDPA) in one process, on one stream, taking turns.

    cargo build --release --example kiln_peers
    python3 bench/peers [--check] [--rows REGEX] [--quick] [--json FILE]
    python3 bench/peers --tiles [--rows REGEX] [--json FILE]

Needs a GPU and PyTorch. With --dry it needs neither and only checks the shapes of all rows. With --tiles it times every tile of
kiln's GEMM kernels at the shapes of GEMMs with quantized weights instead. The protocol is in bench/README.md.

Rows run in a worker process, which is restarted after a row that hangs or breaks the device.

Exits 1 when a memory-bound row that moves 32 MB or more runs at less than 0.80 of the speed of a copy of as many bytes, when
a result is wrong (--check), or when a row fails.
"""

import pathlib
import sys

# The tools folder has the formulas of quantized weights and the random VAE.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
