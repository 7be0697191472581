"""Runs diffusers' pipelines and records every stage."""

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline
from transformers import Qwen2TokenizerFast

from goldens.model import SCHEDULER
from goldens.text import CHAT_TEMPLATE, tokenizer_json
from goldens.values import rms, to_u16


@dataclass(frozen=True)
class Case:
    name: str
    prompt: str
    width: int
    height: int
    steps: int
    seed: int
    distilled: bool
    guidance: float


# --- Tokenizer --------------------------------------------------------------


def qwen_tokenizer(content):
    """The tokenizer class of the reference pipeline, with a tokenizer.json."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_bytes(content)
        return Qwen2TokenizerFast(
            tokenizer_file=str(path), eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
        )


def chat_text(tokenizer, prompt):
    """The prompt in the chat template."""
    messages = [dict(role="user", content=prompt)]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)


def tiny_tokenizer():
    tokenizer = qwen_tokenizer(tokenizer_json().encode())
    text = chat_text(tokenizer, "é")
    expected = "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert text == expected, text
    # Bytes are their own ids, so the expected ids can be written down by hand.
    ids = [257, *b"user\n\xc3\xa9", 258, 10, 257, *b"assistant\n", 280, 10, 10, 281, 10, 10]
    assert tokenizer(text)["input_ids"] == ids
    return tokenizer


# --- Running the reference --------------------------------------------------


class Run:
    """The outputs of a pipeline call that the pipeline does not return; tensors without the batch dimension."""

    TENSORS = ("token_ids", "prompt_embeds", "noise", "input_ids", "inputs", "velocities", "latents", "image")

    def __init__(self, pipe, exact_time):
        self.token_ids = self.noise = self.latents = self.prompt_embeds = self.decoded = self.image = None
        # The image tokens in step 0, in the order the transformer gets them: ids [S, 4], and the tokens [S, 128].
        self.input_ids = self.inputs = None
        self.velocities, self.steps = [], []  # for each step: the scheduler's input, and the latents after it
        self.pipe = pipe
        self.scheduler_step = pipe.scheduler.step
        # A comparison may pass embeddings instead of a prompt.
        encoder = [pipe.text_encoder] if pipe.text_encoder is not None else []
        self.handles = [each.register_forward_pre_hook(self.on_text_encoder, with_kwargs=True) for each in encoder]
        self.handles += [
            pipe.transformer.register_forward_pre_hook(self.on_transformer, with_kwargs=True),
            pipe.vae.decoder.register_forward_hook(self.on_decoder),
        ]
        pipe.scheduler.step = self.on_scheduler_step
        if exact_time:
            embed = pipe.transformer.time_guidance_embed
            # The sinusoid is computed for the time and, if guidance is embedded, then for the guidance.
            self.sinusoids = itertools.cycle(["time"] if embed.guidance_embedder is None else ["time", "guidance"])
            self.handles.append(embed.time_proj.register_forward_pre_hook(self.on_sinusoid))

    def close(self):
        for handle in self.handles:
            handle.remove()
        self.pipe.scheduler.step = self.scheduler_step

    def on_text_encoder(self, _module, _args, kwargs):
        # The first call is for the prompt; a second one is for the empty prompt.
        if self.token_ids is None:
            self.token_ids = kwargs["input_ids"][0].clone()

    def on_transformer(self, _module, _args, kwargs):
        if self.inputs is None:
            self.input_ids, self.inputs = kwargs["img_ids"][0].clone(), kwargs["hidden_states"][0].clone()

    def on_sinusoid(self, _module, args):
        guided = self.pipe.transformer.time_guidance_embed.guidance_embedder is not None
        if not guided and not args[0].any():
            return None  # the reference tokens of the KV model, always at time 0
        if next(self.sinusoids) == "guidance":
            return (1000 * torch.tensor([self.pipe.guidance_scale], device=args[0].device),)
        scheduler = self.pipe.scheduler
        return (scheduler.timesteps[scheduler.step_index or scheduler.begin_index or 0].reshape(1),)

    def on_scheduler_step(self, model_output, timestep, sample, **kwargs):
        if self.noise is None:
            self.noise = sample[0].clone()
        self.velocities.append(model_output[0].clone())
        return self.scheduler_step(model_output, timestep, sample, **kwargs)

    def on_step_end(self, _pipe, _step, _timestep, tensors):
        self.prompt_embeds, self.latents = tensors["prompt_embeds"][0].clone(), tensors["latents"][0].clone()
        self.steps.append(self.latents)
        return {}

    def on_decoder(self, _module, _args, output):
        self.decoded = output[0].clone()

    @property
    def velocity(self):
        return self.velocities[0]

    def reference_tokens(self, number):
        """The tokens of a reference image. Images are numbered from 1."""
        return self.inputs[self.input_ids[:, 0] == 10 * number]

    def outputs(self):
        """The outputs whose errors are reported."""
        return {name: getattr(self, name) for name in ("prompt_embeds", "velocity", "latents", "image")}

    def tensors(self):
        """The tensors that most fixtures keep."""
        return dict(
            token_ids=self.token_ids.to(torch.int32),
            prompt_embeds=self.prompt_embeds[::16],
            noise_head=self.noise.flatten()[:64],
            velocity=self.velocity,
            latents=self.latents,
            image=to_u16(self.image),
        )

    def check_shapes(self, case, rows):
        tokens = (case.width // 16) * (case.height // 16)
        assert self.token_ids.shape == (rows,)
        assert self.prompt_embeds.shape == (rows, self.pipe.transformer.config.joint_attention_dim)
        assert self.noise.shape == self.latents.shape == (tokens, 128)
        assert self.velocities.shape == (case.steps, tokens, 128)
        assert self.inputs.shape == (len(self.input_ids), 128) and self.input_ids.shape[1] == 4
        assert self.image.shape == (case.height, case.width, 3)

    def check_sanity(self, case, errors):
        for name in self.TENSORS:
            assert torch.isfinite(getattr(self, name)).all(), f"{case.name}: {name} is not finite"
        assert 0.1 < rms(self.velocity) < 10, f"{case.name}: velocity rms {rms(self.velocity)}"
        assert self.image.std() > 0.02, f"{case.name}: the image is nearly constant"
        for name, error in errors.items():
            assert 1e-4 < error < 0.3, f"{case.name}: implausible bf16 error {error} of {name}"


def record(pipe, exact_time, **arguments):
    """Runs a pipeline. Returns the recorded run, and the image."""
    run = Run(pipe, exact_time)
    names = ["latents", "prompt_embeds"]
    try:
        images = pipe(callback_on_step_end=run.on_step_end, callback_on_step_end_tensor_inputs=names, **arguments).images
    finally:
        run.close()
    return run, images[0]


def run_pipeline(pipe, case, exact_time=False, **arguments):
    run, returned = record(
        pipe,
        exact_time,
        prompt=case.prompt,
        width=case.width,
        height=case.height,
        num_inference_steps=case.steps,
        generator=torch.Generator("cpu").manual_seed(case.seed),
        output_type="np",
        **arguments,
    )
    run.velocities = torch.stack(run.velocities)
    # Computed in the dtype of the decoder, like the pipeline: in bf16 the sum is rounded.
    run.image = (run.decoded * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 0).float()
    # A deliberate mistake may give NaN.
    same = np.array_equal(run.image.numpy(), returned, equal_nan=True)
    assert same, "the pipeline maps the decoded image to [0, 1] differently"
    run.check_shapes(case, arguments.get("max_sequence_length", 512))
    return run


def make_pipeline(components, distilled, kind=Flux2KleinPipeline):
    scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULER)
    pipe = kind(**components, scheduler=scheduler, tokenizer=tiny_tokenizer(), is_distilled=distilled)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run_case(components, case, exact_time=False):
    return run_pipeline(make_pipeline(components, case.distilled), case, exact_time, guidance_scale=case.guidance)
