"""The GPU ops as Python calls them: the C interface of `peers.rs`."""

import ctypes
import pathlib

import torch

from peers.rows import Case, Scaled
from peers.rows_mixed import Nvfp4

LIBRARY = pathlib.Path(__file__).resolve().parents[2] / "target/release/examples/libkiln_peers.so"


class PeerTensor(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("cols", ctypes.c_uint64),
        ("stride", ctypes.c_uint64),
        ("dtype", ctypes.c_uint32),
        ("scale", ctypes.c_float),
    ]


ABI = 4 << 32 | ctypes.sizeof(PeerTensor)
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3, torch.float8_e4m3fn: 4}
E2M1 = 5
ACCUMULATE = {"auto": 0, "exact": 1, "fast": 2}


class Kiln:
    """The ops of bench/peers.rs. Until `open` they only check their operands."""

    def __init__(self, path: str):
        self.library = ctypes.CDLL(str(path))
        self.library.kiln_peers_abi.restype = ctypes.c_uint64
        found = self.library.kiln_peers_abi()
        if found != ABI:
            raise SystemExit(f"error: {path} speaks {found:#x}, this program {ABI:#x}: build it again")
        handle, text, size, u64 = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64
        lists = [ctypes.POINTER(PeerTensor), size, ctypes.POINTER(ctypes.c_double), size]
        for name, arguments, result in (
            ("open", [ctypes.c_uint32, u64, text, size], handle),
            ("close", [handle], None),
            ("run", [handle, text, *lists, text, size], ctypes.c_int32),
            ("choose", [handle, ctypes.c_uint32, text, text, size], ctypes.c_int32),
            ("tiles", [text, size], None),
            ("kernels", [handle, text, size], None),
            ("vae_open", [text, ctypes.c_uint32, text, size], handle),
            ("vae_close", [handle], None),
            ("vae_weight_bytes", [handle], u64),
            ("vae_load", [handle, handle, u64, text, size], ctypes.c_int32),
            ("vae_run", [handle, handle, ctypes.c_uint32, ctypes.POINTER(PeerTensor), u64, u64, u64, text, size], u64),
        ):
            function = getattr(self.library, f"kiln_peers_{name}")
            function.argtypes, function.restype = arguments, result
        self.text = ctypes.create_string_buffer(1 << 16)
        self.handle = None
        self.invented = {}

    def open(self, device: int, stream: int) -> None:
        self.handle = self.library.kiln_peers_open(device, stream, self.text, len(self.text))
        if not self.handle:
            raise SystemExit(f"error: {self.text.value.decode()}")

    def expect(self, found):
        """Returns `found`, or raises an error with the library's message."""
        if not found:
            raise RuntimeError(f"kiln: {self.text.value.decode()}")
        return found

    def close(self) -> None:
        self.library.kiln_peers_close(self.handle)
        self.handle = None

    def tiles(self) -> list:
        """The tiles that a case can choose: name, kernel, and how it accumulates (auto where there is only one way)."""
        self.library.kiln_peers_tiles(self.text, len(self.text))
        return [tuple(each.split()) for each in self.text.value.decode().splitlines()]

    def kernels(self) -> list:
        """The kernels launched since the last call."""
        self.text.value = b""
        self.library.kiln_peers_kernels(self.handle, self.text, len(self.text))
        return self.text.value.decode().splitlines()

    def address(self, tensor) -> int:
        if not tensor.is_meta:
            return tensor.data_ptr()
        # Shapes without memory: each storage gets an address far from all others.
        storage = tensor.untyped_storage()._cdata
        base = self.invented.setdefault(storage, (len(self.invented) + 1) << 40)
        return base + tensor.storage_offset() * tensor.element_size()

    def describe(self, tensor) -> PeerTensor:
        if tensor is None:
            return PeerTensor()
        scale, dtype, packed = 1.0, None, 1
        if isinstance(tensor, Nvfp4):
            dtype, packed = E2M1, 2
        if isinstance(tensor, Scaled):
            tensor, scale = tensor.codes, tensor.scale
        rows, cols = tensor.shape
        assert tensor.stride(1) == 1 or cols == 1, "columns have gaps"
        dtype = DTYPES[tensor.dtype] if dtype is None else dtype
        return PeerTensor(self.address(tensor), rows, packed * cols, packed * tensor.stride(0), dtype, scale)

    def call(self, case: Case, tile: str | None = None):
        """A function that queues the case's op, on `tile` if one is named."""
        name, tensors = case.op.encode(), (PeerTensor * len(case.tensors))(*map(self.describe, case.tensors))
        numbers = (ctypes.c_double * len(case.numbers))(*case.numbers)
        choose, run, handle, text = self.library.kiln_peers_choose, self.library.kiln_peers_run, self.handle, self.text
        choice = (handle, ACCUMULATE[case.accumulate], tile and tile.encode(), text, len(text))
        arguments = (handle, name, tensors, len(tensors), numbers, len(numbers), text, len(text))

        def queue():
            if choose(*choice) or run(*arguments):
                raise RuntimeError(f"kiln: {text.value.decode()}")

        return queue


class KilnVae:
    """The whole VAE of a folder, on the stream of an open `Kiln`. If that is not open, the VAE only checks its ops."""

    ALIGN = 1024

    def __init__(self, kiln: Kiln, folder: pathlib.Path, tiling: bool = False):
        self.kiln, library, text = kiln, kiln.library, kiln.text
        self.vae = kiln.expect(library.kiln_peers_vae_open(str(folder).encode(), int(tiling), text, len(text)))
        self.workspace = None
        if kiln.handle:
            self.weights = self.memory(library.kiln_peers_vae_weight_bytes(self.vae))
            kiln.expect(not library.kiln_peers_vae_load(self.vae, kiln.handle, self.aligned(self.weights), text, len(text)))

    def close(self) -> None:
        self.kiln.library.kiln_peers_vae_close(self.vae)
        self.vae = self.weights = self.workspace = None

    def memory(self, size: int):
        return torch.empty(size + self.ALIGN, dtype=torch.uint8, device="cuda")

    def aligned(self, memory) -> int:
        return -(-memory.data_ptr() // self.ALIGN) * self.ALIGN

    def run(self, handle, encode: bool, out, x, size: tuple, at: int) -> int:
        """Queues the work. Returns the bytes of working memory."""
        tensors = (PeerTensor * 2)(self.kiln.describe(out), self.kiln.describe(x))
        text = self.kiln.text
        run = self.kiln.library.kiln_peers_vae_run
        return self.kiln.expect(run(self.vae, handle, int(encode), tensors, *size, at, text, len(text)))

    def bytes(self, encode: bool, out, x, size: tuple) -> int:
        """Bytes of working memory in addition to the operands, by a dry run."""
        return self.run(None, encode, out, x, size, 0)

    def call(self, encode: bool, out, x, size: tuple):
        """A function that decodes tokens [tokens, 128] to an image [pixels, 3], or encodes in reverse; both are f32."""
        need = self.bytes(encode, out, x, size)
        if self.workspace is None or self.workspace.numel() < need + self.ALIGN:
            self.workspace = None  # freed first
            self.workspace = self.memory(need)
        at = self.aligned(self.workspace)
        # A larger workspace may replace this one. Work queued on it keeps it alive until then.
        return lambda memory=self.workspace: self.run(self.kiln.handle, encode, out, x, size, at)
