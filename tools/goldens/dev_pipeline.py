"""The reference pipeline of FLUX.2 [dev] for the tools: its text encoder without unused parts, its processor, and padding.

    LanguageModel     Mistral3ForConditionalGeneration without vision tower and output head
    processor         PixtralProcessor with any tokenizer.json
    PaddedPipeline    Flux2Pipeline that pads prompts as kiln does with --padding
"""

import contextlib

import torch
from diffusers import Flux2Pipeline
from tokenizers import Tokenizer
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import MistralModel, PixtralImageProcessorPil, PixtralProcessor, PreTrainedTokenizerFast

from goldens.text import MISTRAL_ROLES, MISTRAL_TEMPLATE

PADDINGS = ("left", "right", "left-zeros", "right-zeros")

# --- Text encoder -----------------------------------------------------------


class LanguageModel(torch.nn.Module):
    """Mistral3ForConditionalGeneration without vision tower and output head, which have no influence. Tensors are named as in files."""

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


def processor(tokenizer_json, side):
    """The processor with a tokenizer.json, which pads on this side."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer_json), padding_side=side, **MISTRAL_ROLES)
    return PixtralProcessor(PixtralImageProcessorPil(), tokenizer, chat_template=MISTRAL_TEMPLATE)


# --- Padding ----------------------------------------------------------------


def side_of(padding):
    return padding.split("-")[0]


@contextlib.contextmanager
def recorded_mask(encoder):
    """Yields a list that receives the masks of all calls of a text encoder."""
    masks = []

    def on_call(_module, _args, kwargs):
        masks.append(kwargs["attention_mask"][0].bool())

    handle = encoder.register_forward_pre_hook(on_call, with_kwargs=True)
    try:
        yield masks
    finally:
        handle.remove()


class PaddedPipeline(Flux2Pipeline):
    """Flux2Pipeline with one of the paddings. Its tokenizer must pad on the same side.

    A row of padding before the prompt sees nothing, and its attention is zero. On a GPU some kernels of PyTorch ensure that, among them the
    plain one. cuDNN's does not, which recent releases prefer.
    """

    padding = "left"

    def encode_prompt(self, *args, **kwargs):
        if self.text_encoder is None:  # the caller passes its output
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
