"""models/mistral/ranks.gz: the vocabulary of Mistral Small 3, by rank.

The text encoder of FLUX.2 [dev] reads these tokens. They are the first 130,072 of the file
`tekken_240911.json` in mistral-common 1.13.0 (Apache-2.0); the other ids, 0 to 999, are
special tokens, whose names src/tokenizer/mistral.rs has. A merge has the rank of its result, so the file needs no
table of merges.

    pip install --no-deps mistral-common==1.13.0
    python tools/goldens ranks                  # write the file
    python tools/goldens ranks --wheel FILE     # with the downloaded package

models/mistral/ranks.gz, unpacked: per token, in the order of ranks, one byte with the token's length, and its
bytes. The ranks from 0 to 255 are the single bytes in order.
"""

import base64
import gzip
import hashlib
import json
import sys
import zipfile
from importlib.metadata import version
from importlib.resources import files

from goldens.files import ROOT, Files, fnv1a

TARGET = ROOT / "models" / "mistral" / "ranks.gz"

PACKAGE = "mistral-common"
VERSION = "1.13.0"
SOURCE = "data/tekken_240911.json"

# The ids of the text encoder, less its special tokens.
COUNT = 131072 - 1000
SHA256 = "65e8dd42ec4e22317d1336ddadfc8fd5f432fb61c763bf00b95d60aa443d459f"
FNV1A = 0x2C6C6AAB01A53198


def source(wheel):
    """The JSON of the vocabulary, from a downloaded wheel or the installed package."""
    if wheel:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(f"mistral_common/{SOURCE}")
    if version(PACKAGE) != VERSION:
        sys.exit(f"{PACKAGE} {version(PACKAGE)} is installed, this needs {VERSION}")
    return (files("mistral_common") / SOURCE).read_bytes()


def ranks(text):
    """The tokens in the file's form, after checking that they are the expected ones."""
    tokens = json.loads(text)["vocab"][:COUNT]
    out = bytearray()
    for rank, token in enumerate(tokens):
        data = base64.b64decode(token["token_bytes"], validate=True)
        if token["rank"] != rank or not 1 <= len(data) <= 255 or (rank < 256 and data != bytes([rank])):
            sys.exit(f"token {rank} is not as expected: {token}")
        out.append(len(data))
        out += data
    found = (len(tokens), hashlib.sha256(out).hexdigest(), fnv1a(out))
    if found != (COUNT, SHA256, FNV1A):
        sys.exit(f"another vocabulary: {found[0]} tokens, SHA-256 {found[1]}, FNV-1a {found[2]:016x}")
    return bytes(out)


def compute(wheel=None):
    return Files(contents={TARGET: gzip.compress(ranks(source(wheel)), compresslevel=9, mtime=0)}, limit=2_000_000)
