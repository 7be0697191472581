"""Builds the small tokenizer (byte-level BPE, Qwen's pre-split and special tokens) into models/builtin/tokenizer.

The result is committed, because weights depend on it. Run it again only before training from scratch: it replaces the tokenizer of
the shipped model.
"""
import json
import os
import random
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import world

TOOLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.append(TOOLS)
from goldens.text import PLAIN_ADDED_TOKENS, SPECIAL_TOKENS, SPLIT_PATTERN

FOLDER = os.path.join(TOOLS, "..", "models", "builtin", "tokenizer")
PREFIX, SUFFIX = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TEMPLATE = ("{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
            "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
            "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
            "{%- endif %}")
VOCAB = 1024      # at most; the text needs fewer


def build():
    rng = random.Random(1234)
    text = []
    for _ in range(20000):
        text.append(world.caption(world.sample_scene(rng), rng))
        text.append(world.sample_edit(rng, refs=rng.choice((1, 2)))[3]())
    for words in world.WORDINGS.values():          # every word of every template, held out or not
        for w in words:
            plain = "".join(part.split("}")[-1] for part in w.split("{"))
            text += [plain, plain.strip()[:1].upper() + plain.strip()[1:]] * 50
    text += ["user\n", "assistant\n", "\n\n", "\n"] * 200
    text += [" ".join(world.COLORS + world.SHAPES + world.SIZES + ["grey", "color", "colour", "centre", "center"])] * 200
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated", False),
                                                 pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL_TOKENS) - len(PLAIN_ADDED_TOKENS), special_tokens=[], min_frequency=3, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tok.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN_ADDED_TOKENS])
    os.makedirs(FOLDER, exist_ok=True)
    tok.save(os.path.join(FOLDER, "tokenizer.json"))
    j = json.load(open(os.path.join(FOLDER, "tokenizer.json"), encoding="utf-8"))
    json.dump(j["model"]["vocab"], open(os.path.join(FOLDER, "vocab.json"), "w", encoding="utf-8"), ensure_ascii=False)
    merges = [" ".join(m) if isinstance(m, list) else m for m in j["model"]["merges"]]
    open(os.path.join(FOLDER, "merges.txt"), "w", encoding="utf-8").write("#version: 0.2\n" + "\n".join(merges) + "\n")
    added = {str(a["id"]): {k: a[k] for k in ("content", "lstrip", "normalized", "rstrip", "single_word", "special")}
             for a in j["added_tokens"]}
    cfg = {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False, "added_tokens_decoder": added,
           "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None,
           "additional_special_tokens": SPECIAL_TOKENS[1:], "padding_side": "right", "model_max_length": 64,
           "clean_up_tokenization_spaces": False, "errors": "replace", "split_special_tokens": False,
           "chat_template": TEMPLATE}
    json.dump(cfg, open(os.path.join(FOLDER, "tokenizer_config.json"), "w"), indent=1)
    json.dump({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": SPECIAL_TOKENS[1:]},
              open(os.path.join(FOLDER, "special_tokens_map.json"), "w"), indent=1)
    return tok


class Tok:
    """ids [n, length] (padded right), real lengths."""

    def __init__(self, length=64):
        self.t = Tokenizer.from_file(os.path.join(FOLDER, "tokenizer.json"))
        self.length = length
        self.pad = self.t.token_to_id("<|endoftext|>")

    def __call__(self, prompts):
        import numpy as np
        out = np.full((len(prompts), self.length), self.pad, np.int32)
        n = np.zeros(len(prompts), np.int32)
        for i, p in enumerate(prompts):
            ids = self.t.encode(PREFIX + p + SUFFIX).ids[:self.length]
            out[i, :len(ids)], n[i] = ids, len(ids)
        return out, n


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] != "check":
        tok = build()
        print("vocabulary", tok.get_vocab_size())
    t, rng, longest = Tok(), random.Random(5), 0
    for _ in range(5000):
        for held in (False, True):
            _, n = t([world.caption(world.sample_scene(rng, held=None), rng, held),
                      world.sample_edit(rng, refs=rng.choice((1, 2)), held=None, held_wording=held)[3]()])
            longest = max(longest, int(n.max()))
    print("longest caption with its template:", longest, "tokens; empty:", int(t([""])[1][0]))
