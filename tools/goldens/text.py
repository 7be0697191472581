"""The tokenizers of both models, Qwen's and Mistral's: their files, special tokens and chat templates. Needs no package."""

import json

FLAGS = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
BYTE_LEVEL = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Up to three numerals together.
MISTRAL_PATTERN = SPLIT_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

# Qwen3's added tokens in the order of their ids. The tokenizer also matches the second group in the text, but it lacks the
# "special" flag.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
PLAIN_ADDED_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip

# Mistral's special tokens have the ids from 0 to 999.
MISTRAL_NAMED = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
MISTRAL_TOKENS = (*MISTRAL_NAMED, *(f"<SPECIAL_{i}>" for i in range(len(MISTRAL_NAMED), 1000)))
MISTRAL_ROLES = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")

# Qwen3's template for one user message with thinking disabled.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% endif %}"
    "{% endif %}"
)

# Mistral's template for a system text and one user message.
MISTRAL_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% set name = 'SYSTEM_PROMPT' if message['role'] == 'system' else 'INST' %}"
    "{{ '[' + name + ']' }}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
    "{{ '[/' + name + ']' }}"
    "{% endfor %}"
)

# Prompts that are hard to split. Each fixture has more prompts between the two lists.
SPACES = ["\n", "\n\n\n", " ", "  \n  \n", " \r\n\t x"]
SCRIPTS = [
    "e\u0301 \u00e9 \u1100\u1161\u11a8 \u212b \ufb01",
    "\u0301\u0302 a\u0328\u0301",
    "\0\x01\x1b[2J\x7f\u0085",
    "\u202eabc\u202c \u2028\u2029 \ufeff\u00a0\u3000",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f",
    "\U000e0041\U0010ffff\ufffd\ue000",
    "\u0646\u0645\u0627 \u05e9\u05dc\u05d5\u05dd \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0928\u092e\u0938\u094d\u0924\u0947",
]


def byte_alphabet():
    """GPT-2's printable character for each byte, in byte order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def tokenizer_content():
    """The content of the tiny tokenizer.json: Qwen's pipeline around a BPE model without merges."""
    split = dict(type="Split", pattern=dict(Regex=SPLIT_PATTERN), behavior="Isolated", invert=False)
    added = [(token, True) for token in SPECIAL_TOKENS] + [(token, False) for token in PLAIN_ADDED_TOKENS]
    return dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=[dict(id=256 + i, content=token, **FLAGS, special=special) for i, (token, special) in enumerate(added)],
        normalizer=dict(type="NFC"),
        pre_tokenizer=dict(type="Sequence", pretokenizers=[split, BYTE_LEVEL]),
        post_processor=BYTE_LEVEL,
        decoder=BYTE_LEVEL,
        model=dict(
            type="BPE", dropout=None, unk_token=None, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False,
            byte_fallback=False, ignore_merges=False, vocab={char: byte for byte, char in enumerate(byte_alphabet())}, merges=[],
        ),
    )  # fmt: skip


def tokenizer_json():
    return json.dumps(tokenizer_content(), ensure_ascii=False, separators=(",", ":")) + "\n"


def mistral_content(tokens, merges=()):
    """Qwen's tokenizer with Mistral's special tokens, then these tokens, and no normalizer."""
    content = tokenizer_content()
    content["added_tokens"] = [dict(id=i, content=token, **FLAGS, special=True) for i, token in enumerate(MISTRAL_TOKENS)]
    content["normalizer"] = None
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = dict(Regex=MISTRAL_PATTERN)
    vocabulary = {token: i for i, token in enumerate([*MISTRAL_TOKENS, *tokens])}
    content["model"] |= dict(vocab=vocabulary, merges=list(merges), ignore_merges=True)
    return content


def tiny_mistral_json():
    return json.dumps(mistral_content(byte_alphabet()))
