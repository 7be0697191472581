"""tests/fixtures/tokens_mistral.json: ids of prompts in the format of FLUX.2 [dev].

A `tokenizer.json` is built from models/mistral/ranks.gz, including merges, as the converter of transformers builds the published one.
The library `tokenizers` encodes with it. kiln's own encoder reads neither. Needs only tokenizers of tools/requirements.txt.

tests/fixtures/tokens_mistral.json:
    versions    of the packages
    cases       prompt, its ids without padding and without the template's ids; a long one has
                `piece` and `times`, their number and the FNV-1a 64 of all as little-endian uint32
"""

import gzip
import json
import random

from tokenizers import Tokenizer

from goldens.files import package_versions, token_file
from goldens.ranks import TARGET
from goldens.text import BYTE_LEVEL, MISTRAL_NAMED, SCRIPTS, SPACES, byte_alphabet, mistral_content

SYSTEM = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object relationships, "
    "object\nattribution and actions without speculation."
)

PROMPTS = [
    # Every special token with a name, alone and between words, and some of the others.
    *MISTRAL_NAMED,
    "".join(MISTRAL_NAMED),
    " ".join(reversed(MISTRAL_NAMED)),
    "<SPECIAL_20><SPECIAL_999> <SPECIAL_99>",
    # Text that resembles a token.
    "<SPECIAL_19><SPECIAL_1000><SPECIAL_020><SPECIAL_+20><SPECIAL_><special_20><SPECIAL_ 20>",
    "[inst] [ INST] [INST [[INST]] <<s>> <s [/INST/] [[/INST] [IM[IMG]G] [IMG[IMG]] [IMG_[IMG]END]",
    "<\u200bs> \uff1cs\uff1e <s>\u0301 [",
    # Text for the split pattern.
    *SPACES,
    "it's IT'S I'Ll they'VE 'd' \u017ft '\u017f \u2019s",
    "1234567890 \u0661\u0662\u0663 \u2460\u2461\u2462\u2463 \u00bd 12\u00b2",
    *SCRIPTS,
    "path.\n/next, camelCaseWords HTTPServer",
    # Runs, in which pairs that make the same token overlap.
    *[piece * 61 for piece in ("a", "-", "=", "ab", "xx.", "\u3042", " ", "\t", "\u0e2d", "ha", "\u200b")],
]

# Each of these is repeated.
LONG = [
    "a", " ", "7", "\u0301", "<s>", "[INST", "[", "\U0001f980", "\u4e2d", "x ", "\r\n", " \n", "'s", "\0", "a.", "-",
    "The quick brown fox jumps over 13 lazy dogs. ", "    x", "e\u0301", "abcdefghijklmnopqrstuvwxyz",
]  # fmt: skip

# Pieces that are drawn with a fixed seed: text of all scripts, and runs of repeated characters.
PIECES = [
    "fox", " the", "Snow", "7", "42", "'s", "<s>", "[INST]", "[/", "<SPECIAL_", "]", ">", "\n", "\r\n", " ", "   ", "\t", ".",
    "--", "\u0301", "\u200d", "\u4e2d\u6587", "\u0928\u094d", "\u0e01\u0e34", "\u0645\u064e", "\uac00", "\U0001f980", "aaaa", "\u00df",
]  # fmt: skip
RANDOM = 300


def tokens():
    data, at = gzip.decompress(TARGET.read_bytes()), 0
    found = []
    while at < len(data):
        found.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    return found


def tokenizer_json():
    """The published tokenizer.json, rebuilt."""
    letters = byte_alphabet()
    ranks = {token: rank for rank, token in enumerate(tokens())}

    def text(token):
        return "".join(letters[byte] for byte in token)

    merges = []
    for token in ranks:
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        cuts = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        merges += sorted(cuts, key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
    content = mistral_content(map(text, ranks), ([text(left), text(right)] for left, right in merges))
    byte_level = BYTE_LEVEL | dict(trim_offsets=True)
    content["pre_tokenizer"]["pretokenizers"][1] = byte_level
    content |= dict(post_processor=None, decoder=byte_level | dict(add_prefix_space=True, use_regex=True))
    content["model"] |= dict(continuing_subword_prefix=None, end_of_word_suffix=None)
    return content


def indented_json():
    return json.dumps(tokenizer_json(), indent=2, ensure_ascii=False)


def drawn():
    source = random.Random(1)
    for _ in range(RANDOM):
        text = ""
        for _ in range(source.randrange(1, 16)):
            kind = source.randrange(4)
            if kind == 0:
                text += source.choice(PIECES) * source.choice([1, 1, 1, 2, 7])
            elif kind == 1:
                text += chr(source.randrange(0x20, 0x250))
            else:
                code = source.randrange(0x3000 if kind == 2 else 0x110000)
                text += chr(code) if not 0xD800 <= code < 0xE000 else "?"
        yield text


def compute():
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json()))

    def ids(prompt):
        text = f"<s>[SYSTEM_PROMPT]{SYSTEM}[/SYSTEM_PROMPT][INST]{prompt.replace('[IMG]', '')}[/INST]"
        return tokenizer.encode(text, add_special_tokens=False).ids

    head, cases = ids("")[:-1], []
    for prompt in [*PROMPTS, *drawn()]:
        found = ids(prompt)
        assert found[: len(head)] == head and found[-1] == 4, prompt
        cases.append((prompt, found[len(head) : -1]))
    return token_file("tokens_mistral", ids, cases, LONG, versions=package_versions("tokenizers"))
