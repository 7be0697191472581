"""The reference pipeline of FLUX.2 [dev] as the tools run it: its text encoder without what is never used, its processor, and padding.

    LanguageModel     Mistral3ForConditionalGeneration without vision tower and output head
    processor         PixtralProcessor with any tokenizer.json
    PaddedPipeline    Flux2Pipeline that pads prompts as kiln does with --padding
"""

import contextlib
import json

import goldens
import torch
from diffusers import Flux2Pipeline
from tokenizers import Tokenizer
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import MistralModel, PixtralImageProcessorPil, PixtralProcessor, PreTrainedTokenizerFast

# One layer more than the last tap, whose state is therefore not the normed last one.
TINY_TEXT_ENCODER = dict(
    vocab_size=1280,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=31,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_parameters=dict(rope_type="default", rope_theta=1e9),
    sliding_window=None,
    tie_word_embeddings=False,
)

PADDINGS = ("left", "right", "left-zeros", "right-zeros")

# --- Text encoder -----------------------------------------------------------


class LanguageModel(torch.nn.Module):
    """Mistral3ForConditionalGeneration without vision tower and output head, which have no influence. Its tensors are named as in files."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.language_model = torch.nn.ModuleDict(dict(model=MistralModel(config)))

    @property
    def dtype(self):
        return next(self.parameters()).dtype

    @property
    def device(self):
        return next(self.parameters()).device

    def forward(self, **inputs):
        return self.language_model["model"](**inputs)


# --- Tokenizer --------------------------------------------------------------

SPECIAL_TOKENS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
    *(f"<SPECIAL_{i}>" for i in range(20, 1000)),
)  # fmt: skip

NAMED_TOKENS = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")

# What Mistral's template yields for a system text and one user message.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% set name = 'SYSTEM_PROMPT' if message['role'] == 'system' else 'INST' %}"
    "{{ '[' + name + ']' }}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
    "{{ '[/' + name + ']' }}"
    "{% endfor %}"
)


def tiny_tokenizer_json():
    """Qwen's tokenizer with Mistral's tokens, no normaliser, and up to three numerals together."""
    content = json.loads(goldens.tokenizer_json())
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    content["added_tokens"] = [dict(id=i, content=token, **flags) for i, token in enumerate(SPECIAL_TOKENS)]
    content["normalizer"] = None
    split = content["pre_tokenizer"]["pretokenizers"][0]
    split["pattern"] = dict(Regex=goldens.SPLIT_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"))
    assert "{1,3}" in split["pattern"]["Regex"]
    vocabulary = [*SPECIAL_TOKENS, *goldens.byte_alphabet()]
    content["model"] |= dict(vocab={token: i for i, token in enumerate(vocabulary)}, ignore_merges=True)
    return json.dumps(content)


def processor(tokenizer_json, side):
    """The processor with a tokenizer.json, which pads on a side."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json), padding_side=side, **NAMED_TOKENS
    )
    return PixtralProcessor(PixtralImageProcessorPil(), tokenizer, chat_template=CHAT_TEMPLATE)


# --- Padding ----------------------------------------------------------------


def side_of(padding):
    return padding.split("-")[0]


@contextlib.contextmanager
def recorded_mask(encoder):
    """Yields a list that gets the masks that a text encoder is called with."""
    masks = []

    def on_call(_module, _args, kwargs):
        masks.append(kwargs["attention_mask"][0].bool())

    handle = encoder.register_forward_pre_hook(on_call, with_kwargs=True)
    try:
        yield masks
    finally:
        handle.remove()


class PaddedPipeline(Flux2Pipeline):
    """Flux2Pipeline with one of the paddings; its tokenizer has to have the side.

    A row of padding before the prompt sees nothing, and its attention is zero. On a GPU that holds for some kernels of PyTorch, the
    plain one among them, and not for cuDNN's, which recent releases prefer.
    """

    padding = "left"

    def encode_prompt(self, *args, **kwargs):
        if self.text_encoder is None:  # what it makes is given
            return super().encode_prompt(*args, **kwargs)
        plain = side_of(self.padding) == "left" and self.text_encoder.device.type == "cuda"
        kernels = sdpa_kernel(SDPBackend.MATH) if plain else contextlib.nullcontext()
        with recorded_mask(self.text_encoder) as masks, kernels:
            embeds, ids = super().encode_prompt(*args, **kwargs)
        if masks and self.padding.endswith("-zeros"):
            embeds = embeds * masks[0][None, :, None]
        return embeds, ids


def padded_pipeline(models, scheduler, tokenizer_json, padding):
    assert padding in PADDINGS, padding
    pipe = PaddedPipeline(**models, scheduler=scheduler, tokenizer=processor(tokenizer_json, side_of(padding)))
    pipe.padding = padding
    pipe.set_progress_bar_config(disable=True)
    return pipe
