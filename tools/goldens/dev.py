"""tests/fixtures/dev.*: FLUX.2 [dev], with Mistral and embedded guidance.

The classes are Flux2Pipeline, Flux2Transformer2DModel with a guidance embedding, AutoencoderKLFlux2,
Mistral3ForConditionalGeneration and PixtralProcessor.

Names of the encoder's weights. The language model's tensors are hashed as `model.` and
the rest (model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight), whatever a
file or a class calls them. The vision tower and the output head have no influence.

Tokenizer. Ids 0..999 are Mistral's special tokens, byte b is 1000 + b; no merges.

Padding, `padding` of a case. To 512 ids with id 11, which the attention does not see:
    left         pads first; their attention output is 0, as in torch's SDPA, so that all
                 pad rows are the same vector, whatever the prompt
    right        pads last; they see the prompt, and every row is another
    left-zeros   as left, and right-zeros as right, but pad rows are set to zero
Row i has the text position i in every mode.

tests/fixtures/dev.safetensors, for each case, F32 from the fp32 run where not said otherwise:
    <case>.token_ids      I32 [512]        the input of the text encoder
    <case>.prompt_embeds      [32, 384]    every 16th of the 512 rows
    <case>.prompt_rows        [3, 384]     the first real row, the last real row and a pad
                                           row, `rows` of the case; [2, 384] without pads
    <case>.sigmas             [steps + 1]  the last is 0
    <case>.noise_head         [64]         start of the initial noise, token order
    <case>.velocity           [N, 128]     the input of the scheduler in step 0
    <case>.latents            [N, 128]     after the last step, still normalized
    <case>.image          U16 [H, W, 3]    round(65535 * v), v in [0, 1]
    <case>.reference.1.tokens [n, 128]     as in modes.py
    Only what `kept` of the case names. A case that does not keep prompt_embeds and
    prompt_rows shares them with the case `embeds`.
and
    residual.left             [5, 3, 128]  the residual stream of case left after `layers`
    residual.right            [5, 3, 128]  layers, in the rows `rows`; of case right
    time.vectors              [4, 256]     the sum of time and guidance embedding, before
                                           the silu, for each of `time`

tests/fixtures/dev_turbo.safetensors:
    An adapter of rank 4, bf16, in the layout of fal's FLUX.2-dev-Turbo as made for ComfyUI: names
    of BFL behind `diffusion_model.`, and for the attention of double blocks names of
    diffusers behind `transformer.`, both in one file. Values as in lora.py.

tests/fixtures/dev.json:
    versions, config, weights   as in goldens.json
    cases      the pipeline calls with their bf16 errors; `exact_time` has exact guidance,
               too, which the pipeline rounds to bf16 like times. The pipeline gets `sigmas`,
               and its scheduler shifts them once more. An adapter is merged into the fp32
               weights.
    residual   `layers` and `rows` of residual.left and residual.right
    time       sigma and guidance, null for none, and the timestep that the sinusoid gets
    images     the reference image, as in modes.json
    adapter    the tensors of dev_turbo.safetensors
    mistakes   the effect of a single mistake on all 512 rows of the embeddings of case
               left, relative L2, to five decimals

The mistakes are made in a second implementation of ids, encoder, taps and padding, in numpy and f64. Without a mistake it agrees
with transformers to 2e-6. KNOWN has values that were computed independently, with transformers 4.57.3 and 5.22.2. Every run must
match them.
"""

import copy
import re
import tempfile
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace

import numpy as np
import safetensors.torch
import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from transformers import Mistral3Config, Mistral3ForConditionalGeneration
from transformers.utils import logging as transformers_logging

from goldens.dev_pipeline import padded_pipeline, recorded_mask, side_of
from goldens.files import FIXTURES, package_versions
from goldens.lora import AGREE, DOUBLE, Writer, bfl_places, merge, rows
from goldens.model import GUIDANCE_TRANSFORMER, SCHEDULER, VAE, fill, stored_tensors, to_bf16, weight_summary
from goldens.model import MISTRAL_ENCODER as TEXT_ENCODER
from goldens.modes import image_summary, reference_image
from goldens.pipeline import Run, run_pipeline
from goldens.text import MISTRAL_TOKENS, tiny_mistral_json
from goldens.values import PACKAGES, Recording, as_arrays, error_report, relative_l2, rms

ADAPTER = FIXTURES / "dev_turbo.safetensors"
LENGTH, PAD = 512, 11

# --- The tiny model ---------------------------------------------------------

VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=16, image_size=64)

TAPS = (10, 20, 30)

# The schedule of fal's FLUX.2-dev-Turbo.
TURBO = (1.0, 0.6509, 0.4374, 0.2932, 0.1893, 0.1108, 0.0495, 0.00031)

EMBEDS = ("prompt_embeds", "prompt_rows")
RESULTS = ("token_ids", "sigmas", "noise_head", "velocity", "latents")
WITH_IMAGE = (*RESULTS, "image")
ALL = (*EMBEDS, *WITH_IMAGE)


@dataclass(frozen=True)
class DevCase:
    name: str
    prompt: str
    width: int
    height: int
    steps: int
    seed: int
    guidance: float
    padding: str = "left"
    references: tuple[int, ...] = ()
    sigmas: tuple[float, ...] | None = None
    adapter: str | None = None
    embeds: str | None = None
    kept: tuple[str, ...] = ALL

    @property
    def side(self):
        return side_of(self.padding)


FOX = "a red fox in the snow"
# The last bytes and [/INST] lie beyond the 512 ids.
LONG = ", ".join(f"{i} foxes in the snow" for i in range(1, 21))
# Text outside ASCII, an e with a separate accent, a string that is removed, and two that are special tokens.
MIXED = 'Ünïcode é e\u0301 — [IMG]你好 🦀 </s> [INST] "sign"'

LEFT = DevCase("left", FOX, 128, 128, 4, 0, 4.0)
CASES = (
    LEFT,
    replace(LEFT, name="left_guidance", guidance=2.5, embeds="left", kept=RESULTS),
    replace(LEFT, name="right", padding="right"),
    replace(LEFT, name="left_zeros", padding="left-zeros", kept=(*EMBEDS, *RESULTS)),
    replace(LEFT, name="right_zeros", padding="right-zeros", kept=(*EMBEDS, *RESULTS)),
    DevCase("reference", "the fox in a red car", 96, 64, 2, 3, 4.0, references=(2,), kept=(*ALL, "reference.1.tokens")),
    DevCase("turbo", FOX, 80, 64, 8, 5, 2.5, sigmas=TURBO, embeds="left", kept=WITH_IMAGE),
    DevCase("long", LONG, 64, 64, 2, 9, 4.0),
    DevCase("wide", MIXED, 144, 80, 3, 12345678901, 3.5),
    DevCase("turbo_lora", FOX, 80, 64, 8, 5, 2.5, sigmas=TURBO, adapter=ADAPTER.name, embeds="left", kept=WITH_IMAGE),
)

# Compared with KNOWN only.
CHECKED = (
    replace(LEFT, name="right_guidance", padding="right", guidance=2.5),
    replace(LEFT, name="left_guidance_1", guidance=1.0),
    replace(LEFT, name="left_guidance_3.5", guidance=3.5),
)

RESIDUAL_LAYERS = (0, 1, 2, 10, 30)

# Sigma and guidance.
TIMES = ((1.0, 4.0), (1.0, None), (0.95469171, 2.5), (0.5, 0.0))

WEIGHT_SAMPLES = dict(
    transformer=(
        "context_embedder.weight", "time_guidance_embed.timestep_embedder.linear_1.weight",
        "time_guidance_embed.guidance_embedder.linear_1.weight", "time_guidance_embed.guidance_embedder.linear_2.weight",
    ),
    language_model=(
        "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight", "model.layers.29.mlp.down_proj.weight",
        "model.layers.30.post_attention_layernorm.weight", "model.norm.weight",
    ),
)  # fmt: skip


def language_model(encoder):
    """The language model, with the names that are hashed."""
    return torch.nn.ModuleDict(dict(model=encoder.model.language_model))


def build_encoder():
    config = Mistral3Config(
        text_config=TEXT_ENCODER | dict(model_type="mistral"),
        vision_config=VISION | dict(model_type="pixtral"),
        tie_word_embeddings=False,
    )
    encoder = fill(Mistral3ForConditionalGeneration(config))
    fill(language_model(encoder))
    text = encoder.config.text_config
    assert (text.sliding_window, encoder.config._attn_implementation) == (None, "sdpa")
    return encoder


def build_components():
    return dict(
        transformer=fill(Flux2Transformer2DModel(**GUIDANCE_TRANSFORMER)),
        vae=fill(AutoencoderKLFlux2(**VAE)),
        text_encoder=build_encoder(),
    )


# --- Tokenizer --------------------------------------------------------------

SPECIALS = re.compile("(" + "|".join(map(re.escape, MISTRAL_TOKENS)) + ")")


def ids_of(text):
    """Ids by a second implementation: special tokens, and the bytes of all other text."""
    ids = []
    for part in SPECIALS.split(text):
        ids += [MISTRAL_TOKENS.index(part)] if part in MISTRAL_TOKENS else [1000 + byte for byte in part.encode()]
    return ids


def prompt_text(prompt):
    return f"<s>[SYSTEM_PROMPT]{SYSTEM_MESSAGE}[/SYSTEM_PROMPT][INST]{prompt.replace('[IMG]', '')}[/INST]"


def padded(ids, side, pad=PAD):
    """512 ids, and which of them are not padding."""
    ids = ids[:LENGTH]
    pads, real = [pad] * (LENGTH - len(ids)), np.ones(len(ids), bool)
    none = np.zeros(len(pads), bool)
    if side == "left":
        return np.array(pads + ids), np.concatenate([none, real])
    return np.array(ids + pads), np.concatenate([real, none])


# --- Running the reference --------------------------------------------------


@dataclass
class DevRun:
    run: Run
    real: torch.Tensor  # [512], the rows that are not pads
    sigmas: torch.Tensor
    rows: dict  # the number of the first real row, the last and a pad row

    def outputs(self):
        return self.run.outputs()

    def tensor(self, name):
        if name == "prompt_rows":
            return self.run.prompt_embeds[list(self.rows.values())]
        if name == "sigmas":
            return self.sigmas
        if name == "reference.1.tokens":
            return self.run.reference_tokens(1)
        return self.run.tensors()[name]


def chosen_rows(real, side):
    places = np.flatnonzero(real)
    found = dict(first=int(places[0]), last=int(places[-1]))
    if len(places) < LENGTH:
        found["pad"] = 0 if side == "left" else LENGTH - 1
    return found


def make_pipeline(components, padding):
    return padded_pipeline(components, FlowMatchEulerDiscreteScheduler(**SCHEDULER), tiny_mistral_json(), padding)


def run_case(components, case, exact_time=False):
    """`components` may be a pipeline."""
    pipe = make_pipeline(components, case.padding) if isinstance(components, dict) else components
    arguments = dict(guidance_scale=case.guidance)
    if case.references:
        arguments.update(image=[reference_image(index) for index in case.references])
    if case.sigmas:
        arguments.update(sigmas=list(case.sigmas))
    with recorded_mask(pipe.text_encoder) as masks:
        run = run_pipeline(pipe, case, exact_time, **arguments)
    (real,) = masks
    ids, mask = padded(ids_of(prompt_text(case.prompt)), case.side)
    assert run.token_ids.tolist() == ids.tolist() and real.tolist() == mask.tolist(), case.name
    return DevRun(run, real, pipe.scheduler.sigmas.clone(), chosen_rows(mask, case.side))


def check_pads(case, result):
    """Checks what the padding modes promise about pad rows."""
    pads = result.run.prompt_embeds[~result.real]
    if not len(pads):
        return
    same = bool((pads == pads[0]).all())
    assert same == (case.padding != "right"), f"{case.name}: pad rows are {'' if same else 'not '}all the same"
    assert case.padding.endswith("-zeros") == (not pads.any()), case.name


def run_residual(components, case):
    """The residual stream after each of RESIDUAL_LAYERS, [5, 3, 128], and the numbers of the rows."""
    ids, real = padded(ids_of(prompt_text(case.prompt)), case.side)
    chosen = chosen_rows(real, case.side)
    with torch.no_grad():
        states = components["text_encoder"](
            input_ids=torch.from_numpy(ids)[None],
            attention_mask=torch.from_numpy(real)[None].long(),
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
    return torch.stack([states[layer][0, list(chosen.values())] for layer in RESIDUAL_LAYERS]), chosen


def run_times(components):
    """Time vectors [4, 256] and their description. A timestep has the pipeline's roundings in fp32."""
    vectors, described = [], []
    for sigma, guidance in TIMES:
        timestep = torch.tensor([sigma]) * 1000 / 1000 * 1000
        with torch.no_grad():
            vector = components["transformer"].time_guidance_embed(
                timestep, None if guidance is None else torch.tensor([guidance]) * 1000
            )
        vectors.append(vector[0])
        described.append(dict(sigma=sigma, guidance=guidance, timestep=timestep.item()))
    return torch.stack(vectors), described


# --- The adapter ------------------------------------------------------------


def turbo_adapter():
    """An adapter of all layers of the Turbo file, under its two prefixes: no MLP of a double block, no last modulation."""
    writer = Writer("dev_turbo", model=Flux2Transformer2DModel(**GUIDANCE_TRANSFORMER))
    for layer, place in bfl_places(guidance_embeds=True).items():
        if not layer.startswith("double_blocks.") and "adaLN" not in layer:
            writer.lora(f"diffusion_model.{layer}", place, 4)
    names = "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"
    for n in DOUBLE:
        for name in names:
            layer = f"transformer_blocks.{n}.attn.{name}"
            writer.lora(f"transformer.{layer}", rows(layer), 4)
    assert len(writer.file.terms) == 10 + 2 * 2 + 8 * 2
    return writer.file


def with_adapter(components, case, adapter):
    if case.adapter is None:
        return components
    return merge(copy.deepcopy(components), {adapter.name: adapter}, SimpleNamespace(files=[(adapter.name, 1.0)]))


def run_loaded(components, case, adapter):
    """Runs the case with the file as diffusers reads it."""
    pipe = make_pipeline(copy.deepcopy(components), case.padding)
    with tempfile.TemporaryDirectory() as folder:
        pipe.load_lora_weights(adapter.write(folder))
    return run_case(pipe, case)


# --- The second implementation ----------------------------------------------


@dataclass(frozen=True)
class Rules:
    """The rules that turn ids into embeddings. A mistake changes one."""

    theta: float = 1e9
    eps: float = 1e-5
    taps: tuple[int, ...] = TAPS
    adjacent: bool = False  # RoPE rotates pairs of neighbors, not of the halves
    modulo: bool = False  # query head h uses key head h mod 2, not h / 4
    scale: float = 128**-0.5
    causal: bool = True
    average_pads: bool = False  # a row that sees nothing gets the mean of all values, not zero
    final_norm: bool = False  # on the last tap
    interleaved: bool = False  # a channel's taps are adjacent
    zero_pads: bool = False
    offset: int = 0  # of positions


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * weight


def rotate(x, rules):
    """`x` is [heads, rows, 128]."""
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(x.shape[1]) + rules.offset, rules.theta ** (-np.arange(half) / half))
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = (x[..., ::2], x[..., 1::2]) if rules.adjacent else (x[..., :half], x[..., half:])
    a, b = a * cos - b * sin, b * cos + a * sin
    return np.stack([a, b], -1).reshape(x.shape) if rules.adjacent else np.concatenate([a, b], -1)


def attend(query, key, value, visible, rules):
    scores = np.where(visible, query @ key.T * rules.scale, -np.inf)
    blind = ~visible.any(-1)
    scores[blind] = 0
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    if not rules.average_pads:
        weights[blind] = 0
    return weights @ value


def embeddings(weights, ids, real, rules=Rules()):
    """All 512 rows for padded ids, in f64."""
    heads, kv_heads = TEXT_ENCODER["num_attention_heads"], TEXT_ENCODER["num_key_value_heads"]
    visible = np.broadcast_to(real, (LENGTH, LENGTH))
    if rules.causal:
        visible = visible & np.tri(LENGTH, dtype=bool)
    x = weights["model.embed_tokens.weight"][ids]
    taps = []
    for n in range(max(rules.taps)):
        w = {name: weights[f"model.layers.{n}.{name}.weight"] for name in LAYER}
        normed = rms_norm(x, w["input_layernorm"], rules.eps)
        q, k, v = (
            (normed @ w[f"self_attn.{name}_proj"].T).reshape(LENGTH, -1, TEXT_ENCODER["head_dim"]).swapaxes(0, 1)
            for name in "qkv"
        )
        q, k = rotate(q, rules), rotate(k, rules)
        of = [h % kv_heads if rules.modulo else h // (heads // kv_heads) for h in range(heads)]
        out = np.concatenate([attend(q[h], k[of[h]], v[of[h]], visible, rules) for h in range(heads)], -1)
        x = x + out @ w["self_attn.o_proj"].T
        normed = rms_norm(x, w["post_attention_layernorm"], rules.eps)
        gate, up = normed @ w["mlp.gate_proj"].T, normed @ w["mlp.up_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down_proj"].T
        if n + 1 in rules.taps:
            taps.append(x)
    if rules.final_norm:
        taps[-1] = rms_norm(taps[-1], weights["model.norm.weight"], rules.eps)
    result = np.stack(taps, -1).reshape(LENGTH, -1) if rules.interleaved else np.concatenate(taps, -1)
    return result * real[:, None] if rules.zero_pads else result


LAYER = (
    "input_layernorm", "post_attention_layernorm",
    *(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
)  # fmt: skip


@dataclass(frozen=True)
class Mistake:
    name: str
    what: str
    text: str = prompt_text(FOX)
    side: str = "left"
    pad: int = PAD
    rules: Rules = Rules()
    real_only: bool = False  # pad rows are the correct ones of case left


def mistakes():
    text = prompt_text(FOX)
    system = f"[SYSTEM_PROMPT]{SYSTEM_MESSAGE}[/SYSTEM_PROMPT]"

    def rule(name, what, real_only=False, **changes):
        return Mistake(name, what, rules=Rules(**changes), real_only=real_only)

    def spelled(name, what, old, new):
        assert text.count(old) == 1
        return Mistake(name, what, text.replace(old, new))

    return (
        rule("theta", "RoPE theta 1e6", theta=1e6),
        rule("adjacent", "RoPE rotates pairs of neighbors", adjacent=True),
        rule("eps", "RMS eps 1e-6", eps=1e-6),
        rule("taps_early", "taps after 9, 19, 29 layers", taps=(9, 19, 29)),
        rule("taps_late", "taps after 11, 21, 31 layers", taps=(11, 21, 31)),
        rule("kv_modulo", "key head = query head mod 2", modulo=True),
        rule("scale", "scores scaled by sqrt(hidden / heads)", scale=16**-0.5),
        rule("not_causal", "real rows see all real rows", real_only=True, causal=False),
        rule("not_causal_pads", "the same, and pad rows see them too", causal=False),
        rule("final_norm", "the final norm on the tap after 30 layers, of real rows", real_only=True, final_norm=True),
        rule("final_norm_pads", "the same of all rows", final_norm=True),
        Mistake("pad_id", "pads have id 0", pad=0),
        spelled("no_bos", "no <s>", "<s>", ""),
        spelled("two_bos", "<s> twice", "<s>", "<s><s>"),
        spelled("newline", "a space for the newline of the system text", "\n", " "),
        spelled("space", "a space after [INST]", "[INST]", "[INST] "),
        spelled("no_system", "no system text, nor its two special tokens", system, ""),
        rule("interleaved", "the taps of a channel beside each other", interleaved=True),
        rule("zero_pads", "pad rows zero", zero_pads=True),
        Mistake("right", "pads last, with the rows of pads that are first", side="right", real_only=True),
        Mistake("right_pads", "pads last, with rows of their own: the embeddings of case right", side="right"),
        rule("average_pads", "attention of pads gives the mean of all values", average_pads=True),
        rule("offset", "positions from 318: no mistake, only differences count", offset=318),
    )


def run_mistakes(encoder, embeds):
    """The relative L2 distance of each mistake from `embeds`, after the distance without a mistake."""
    weights = {name: t.double().numpy() for name, t in stored_tensors(language_model(encoder)).items()}

    def error(mistake):
        ids, real = padded(ids_of(mistake.text), mistake.side, mistake.pad)
        made = embeddings(weights, ids, real, mistake.rules)
        if mistake.real_only:
            made[~real] = embeds[0]
        return relative_l2(torch.from_numpy(made), embeds)

    agrees = error(Mistake("none", "nothing"))
    assert agrees < 2e-6, f"the second implementation differs by {agrees}"
    return agrees, [dict(name=one.name, what=one.what, relative_l2=round(error(one), 5)) for one in mistakes()]


# --- Known values -----------------------------------------------------------
#
# The first values of a tensor, or where a list has parts the first values, the last values and the root mean square. Images and
# noise have channels first.

KNOWN_WEIGHTS = {
    "model.embed_tokens.weight": (-0.031738, -0.045410, 0.003418, -0.062988),
    "model.layers.0.input_layernorm.weight": (1.359375, 0.812500, 0.968750, 0.617188),
    "model.layers.0.self_attn.q_proj.weight": (-0.020020, -0.107910, 0.089355, -0.013184),
    "model.layers.29.mlp.down_proj.weight": (0.010986, 0.016846, -0.006104, -0.038818),
    "time_guidance_embed.guidance_embedder.linear_1.weight": (-0.093262, -0.059082, 0.112793, 0.028809),
    "context_embedder.weight": (-0.008545, -0.008057, -0.042236, -0.026611),
}

# After each of RESIDUAL_LAYERS: <s>, the last real row, a pad row on the left, the last pad row on the right.
KNOWN_RESIDUAL = (
    ((0.089355, 0.124512, 0.004395, -0.124512), (-0.089355, 0.000488, -0.114746, -0.045410),
     (0.076660, 0.123535, 0.110840, 0.118652), (0.076660, 0.123535, 0.110840, 0.118652)),
    ((0.058143, 1.196415, -2.268950, -0.868185), (-0.268497, 0.189001, 0.036700, -0.204287),
     (-0.246562, 0.121462, -0.303614, -0.311224), (0.259743, -0.079213, -0.055414, -0.106040)),
    ((1.518851, 1.208517, -2.138311, -0.259513), (-1.058166, 0.618403, -0.186821, -0.910629),
     (0.080768, 0.072032, -0.230657, -0.333227), (-0.713767, 0.328375, -0.025653, -0.603378)),
    ((4.315784, 2.079008, -3.434061, -4.015825), (-0.523485, -0.498739, 2.746416, 6.937346),
     (0.928316, -0.049076, -1.273671, 0.657756), (0.382736, -1.240326, 2.837359, 7.237640)),
    ((8.323700, 14.520549, -6.310470, -6.023460), (4.903442, 6.896461, -6.699054, 4.500747),
     (0.196141, -1.697363, -1.705858, 0.201331), (5.019515, 6.632312, -6.544288, 4.586993)),
)  # fmt: skip

KNOWN_TIMES = (
    ((-0.567719, 1.382522, -0.801822, -0.423686, 0.400247, 0.390371), (), 0.688899),
    ((-0.303693, 0.662173, -0.384726, -0.285374, -0.023012, 0.374404), (), None),
    ((-0.506096, -0.080124, -0.680126, 0.557718, -0.875892, -0.787760), (), None),
)

KNOWN_SIGMAS = (1, 0.95469171, 0.87536889, 0.70070857, 0)
KNOWN_NOISE = (-1.125840, -1.152360, -0.250579, -0.433879)

KNOWN_CASES = {
    "left": dict(
        prompt_embeds=((), (), 2.621267),
        velocity=((-1.952606, -0.437815, -0.112216, 0.810875), (0.648112, 2.371497), 1.392877),
        latents=((0.046099, 0.005443, -1.831352, -1.895795), (-3.226031, -0.170957, -0.453511), 1.565877),
        image=((0.501129, 0.509285, 0.526731), (0.578451, 0.568559, 0.601771), 0.576129),
    ),
    "left_guidance": dict(
        velocity=((-1.996571, -1.970218, 0.985893, 1.589381), (2.380053, -0.496512), 1.287330),
        latents=((1.648469, -0.313173, -0.700561, -3.745868), (-1.305369, -0.567809, 0.832031), 1.618157),
    ),
    "right": dict(
        prompt_embeds=((), (), 3.848063),
        velocity=((-1.683194, -0.263333, -0.328675, 1.357681), (1.694850, 3.097730), 1.424517),
        latents=((-0.393215, -0.351623, -1.021750, -1.996691), (-3.359667, -0.739186, -0.484419), 1.559205),
        image=((0.533371, 0.556358, 0.565512), (), 0.575476),
    ),
    "right_guidance": dict(
        velocity=((-2.336895, -2.136626, -0.491009, 1.497303), (2.499685, -0.037874), 1.289056),
        latents=((0.703525, 0.206467, 0.419592, -3.837613), (-1.676943, -0.664722, 0.629537), 1.585917),
    ),
    "left_zeros": dict(velocity=((-1.379315, 0.039730, 0.287740, 0.966285), (0.708137, 1.929374), 1.397366)),
    "right_zeros": dict(velocity=((-1.490389, 0.053985, -0.540349, 1.299622), (1.413008, 1.096115), 1.400691)),
    "left_guidance_1": dict(velocity=((-2.395041, 0.391513, 0.081588, 1.321059), (), None)),
    "left_guidance_3.5": dict(velocity=((-0.869536, -1.231693, -0.389292, 0.896687), (), None)),
}

KNOWN_MISTAKES = dict(
    theta=0.146, adjacent=0.212, eps=0.00121, taps_early=0.237, kv_modulo=1.31, scale=0.509, not_causal=1.06,
    final_norm=0.545, pad_id=0.591, no_bos=0.999, two_bos=0.304, newline=0.0119, space=0.184, no_system=0.986,
    interleaved=1.42, zero_pads=0.391, right=1.38, average_pads=1.16, offset=0,
)  # fmt: skip


class Known:
    """Compares with the values above; `lines` reports how close they came."""

    def __init__(self):
        self.lines = ["known values                      numbers  largest difference"]

    def hold(self, what, pairs, allowed):
        differences = [abs(computed - known) for computed, known in pairs]
        assert differences and max(differences) <= allowed, f"{what}: differs by {max(differences)}, allowed {allowed}"
        self.lines.append(f"{what:<33} {len(differences):7}  {max(differences):.1e}")

    @staticmethod
    def parts(tensor, first, last, root):
        flat = tensor.double().flatten()
        pairs = list(zip(flat.tolist(), first)) + list(zip(flat[len(flat) - len(last) :].tolist(), last))
        return pairs + ([] if root is None else [(rms(tensor), root)])

    def hold_all(self, components, residual, times, runs, found):
        tensors = stored_tensors(components["transformer"]) | stored_tensors(language_model(components["text_encoder"]))
        exact = 5.01e-7  # half a unit of the last printed digit
        pairs = [self.parts(tensors[name], known, (), None) for name, known in KNOWN_WEIGHTS.items()]
        self.hold("weights", sum(pairs, []), exact)
        for n, (layer, known) in enumerate(zip(RESIDUAL_LAYERS, KNOWN_RESIDUAL)):
            first, last, left, right = known
            pairs = []
            for side, pad in dict(left=left, right=right).items():
                for row, values in zip(residual[side][n], (first, last, pad)):
                    pairs += self.parts(row, values, (), None)
            self.hold(f"residual after {layer} layers", pairs, exact + 1e-5)
        pairs = [self.parts(vector, *known) for vector, known in zip(times, KNOWN_TIMES)]
        self.hold("time vectors", sum(pairs, []), exact + 1e-6)
        left = runs["left"]
        self.hold("sigmas", list(zip(left.sigmas.tolist(), KNOWN_SIGMAS)), 1e-8 + 6e-8)
        self.hold("noise", self.parts(left.run.noise.T, KNOWN_NOISE, (), None), exact + 1e-7)
        for name, outputs in KNOWN_CASES.items():
            for output, known in outputs.items():
                tensor = getattr(runs[name].run, output)
                tensor = tensor.permute(2, 0, 1) if output == "image" else tensor
                self.hold(f"{name}: {output}", self.parts(tensor, *known), exact + 2e-5)
        errors = {one["name"]: one["relative_l2"] for one in found}
        # Mistakes are known to three digits.
        pairs = [(errors[name] / (known or 1), bool(known)) for name, known in KNOWN_MISTAKES.items()]
        self.hold("mistakes, relative", pairs, 0.0051)


# --- Fixtures ---------------------------------------------------------------


def compute():
    transformers_logging.set_verbosity_error()
    components, adapter = build_components(), turbo_adapter()
    parts = components | dict(language_model=language_model(components["text_encoder"]))
    weights = weight_summary(parts, WEIGHT_SAMPLES)
    residual, chosen = {}, {}
    for case in CASES:
        if case.name in ("left", "right"):
            residual[case.name], chosen[case.name] = run_residual(components, case)
    assert relative_l2(residual["left"][:, :2], residual["right"][:, :2]) < 2e-6, "padding changes real rows"
    times, described = run_times(components)

    exact = {case.name: run_case(with_adapter(components, case, adapter), case) for case in (*CASES, *CHECKED)}
    agrees, found = run_mistakes(components["text_encoder"], exact["left"].run.prompt_embeds)
    known = Known()
    known.hold_all(components, residual, times, exact, found)
    loaded = run_loaded(components, CASES[-1], adapter)
    moved = relative_l2(exact["turbo_lora"].run.velocity, exact["turbo"].run.velocity)
    assert moved > 0.05, f"the adapter moves the velocity by {moved}"
    loaded_error = max(error_report(loaded.outputs(), exact["turbo_lora"].outputs()).values())
    assert loaded_error < AGREE, f"diffusers reads the adapter differently, by {loaded_error}"

    recording = Recording()
    for case in CASES:
        fp32 = exact[case.name]
        rounded = copy.deepcopy(with_adapter(components, case, adapter))
        to_bf16(rounded)
        bf16 = [run_case(rounded, case, exact_time) for exact_time in (False, True)]
        assert all(torch.equal(one.run.noise, fp32.run.noise.to(torch.bfloat16)) for one in bf16)
        kept = {name: fp32.tensor(name) for name in case.kept}
        described_case = asdict(case) | dict(real=int(fp32.real.sum()), rows=fp32.rows)
        errors = recording.add(described_case, kept, fp32.outputs(), *(one.outputs() for one in bf16))
        fp32.run.check_sanity(case, errors[1])
        for one in (fp32, *bf16):
            check_pads(case, one)
        if case.embeds:
            assert torch.equal(fp32.run.prompt_embeds, exact[case.embeds].run.prompt_embeds), case.name
    pads = [exact[name].run.prompt_embeds[0] for name in ("left", "wide")]
    assert torch.equal(*pads), "pad rows depend on the prompt"
    recording.tensors.update(as_arrays("residual", residual) | as_arrays("time", dict(vectors=times)))

    summary = dict(
        versions=package_versions(*PACKAGES, "peft", "pillow", "torchvision"),
        config=dict(transformer=GUIDANCE_TRANSFORMER, text_encoder=TEXT_ENCODER, taps=TAPS, vae=VAE, scheduler=SCHEDULER),
        cases=recording.cases,
        residual=dict(layers=RESIDUAL_LAYERS, rows=chosen),
        time=described,
        images=[dict(index=2) | image_summary(2)],
        adapter=adapter.summary(),
        mistakes=found,
        weights=weights,
    )
    report = ["", *known.lines, "", f"the second implementation agrees to {agrees:.1e}"]
    report += [f"the adapter moves the velocity by {moved:.2f}; diffusers reads it to {loaded_error:.1e}"]
    report += ["", "mistake          relative L2 of the embeddings"]
    report += [f"{one['name']:<16} {one['relative_l2']:.5f}  {one['what']}" for one in found]
    file = safetensors.torch.save(adapter.tensors)
    assert len(file) < 300_000
    return recording.golden("dev", summary, report, contents={ADAPTER: file}, limit=1_800_000)
