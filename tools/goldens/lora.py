"""tests/fixtures/lora.*: adapters, LoRA and LoKr, in every spelling, on the tiny model of klein.

Each case is a pipeline call with one or two adapter files, prompts of 64 tokens
and one step. It is computed in two independent ways:

    merged      this script computes every product s * B A, or Kronecker product, in f64 and
                adds it to the weights; then the plain pipeline runs
    reference   the file is written, and another program reads it:
                diffusers     Flux2KleinPipeline.load_lora_weights, which injects
                              PEFT's layers; set_adapters for scales
                fused         as `diffusers`, then fuse_lora
                peft          peft.PeftModel.from_pretrained, on the transformer, or
                              on transformers' text encoder
                none          no other program reads it correctly: `why` says so

The two must agree to 2e-5. The fixture stores the reference's output, or else the merged one's.

tests/fixtures/lora.safetensors, F32 from the fp32 run:
    <case>.velocity       [16, 128]   the input of the scheduler
    <case>.prompt_embeds  [16, 384]   every 4th of the 64 rows; only of cases that
                                      change the text encoder

tests/fixtures/lora.json:
    versions   of the packages
    files      name, metadata, the text of an adapter_config.json next to the file, and
               all tensors: "BF16 2x256", or "F32 =1.5", the value of an alpha
    cases      files with scales, and the errors of the merged model in bf16 with exact
               timesteps

Values of a factor. They follow the weights' rule, by the tensor's name in the file: of unit gain, and exact in bf16 and in f16. A delta is
therefore about as large as the weight it changes, so that any mistake shows.
"""

import copy
import functools
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import peft
import safetensors.torch
import torch
from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel
from single_files import SWAPPED, transformer_tables

from goldens.files import package_versions
from goldens.model import TRANSFORMER, build_components, tensor_values, to_bf16
from goldens.pipeline import Case, make_pipeline, run_pipeline
from goldens.values import PACKAGES, Recording, error_report, relative_l2, rms

HIDDEN = TRANSFORMER["attention_head_dim"] * TRANSFORMER["num_attention_heads"]
DOUBLE, SINGLE = range(TRANSFORMER["num_layers"]), range(TRANSFORMER["num_single_layers"])
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
AGREE = 2e-5

# --- Layers -----------------------------------------------------------------
#
# A place is a list of (weight, first row, end): the rows of an adapter's product are
# added to these rows of the diffusers model, in this order.


def rows(name, *ranges):
    return [(f"{name}.weight", *r) for r in ranges or [(0, None)]]


@functools.cache
def bfl_places(**changes):
    """The places of all linear layers by BFL name, of the tiny transformer or one with other settings."""
    h, places = HIDDEN, {}
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in Flux2Transformer2DModel(**TRANSFORMER | changes).state_dict().items()}
    for name, sources in transformer_tables(shapes).items():
        if len(shapes[sources[0]]) == 2:
            # BFL stores (shift, scale), diffusers (scale, shift).
            halves = [(h, 2 * h), (0, h)] if name == SWAPPED else [(0, None)]
            places[name.removesuffix(".weight")] = [(source, *half) for source in sources for half in halves]
    return places


def diffusers_places():
    """The places by diffusers name, in which only the single blocks are fused, and nothing is swapped."""
    weights = sorted({name for place in bfl_places().values() for name, _, _ in place})
    return {name.removesuffix(".weight"): [(name, 0, None)] for name in weights}


def text_places(layers):
    names = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    return {f"model.layers.{n}.{name}": rows(f"model.layers.{n}.{name}") for n in layers for name in names}


def split_places():
    """Queries, keys, values and MLP of the fused layers one by one, as OneTrainer numbers them; other layers keep their places."""
    h, places = HIDDEN, {}
    for name, place in bfl_places().items():
        if name.endswith(".qkv"):
            places.update({f"{name}.{i}": [row] for i, row in enumerate(place)})
        elif name.endswith(".linear1"):
            cuts = [(0, h), (h, 2 * h), (2 * h, 3 * h), (3 * h, None)]
            places.update({f"{name}.{i}": [(place[0][0], *cut)] for i, cut in enumerate(cuts)})
        elif "_blocks." in name:
            places[name] = place
    return places


def flux1_places():
    """Single blocks under FLUX.1's layer names in diffusers."""
    h, places = HIDDEN, {}
    for n in SINGLE:
        block, fused = f"single_transformer_blocks.{n}", f"single_transformer_blocks.{n}.attn.to_qkv_mlp_proj"
        for i, name in enumerate(("attn.to_q", "attn.to_k", "attn.to_v")):
            places[f"{block}.{name}"] = rows(fused, (i * h, (i + 1) * h))
        places[f"{block}.proj_mlp"] = rows(fused, (3 * h, None))
        places[f"{block}.proj_out"] = rows(f"{block}.attn.to_out")
    return places


def blocks(places):
    return {name: place for name, place in places.items() if "blocks." in name}


# --- Files ------------------------------------------------------------------


@dataclass
class AdapterFile:
    """A file's tensors and their meaning: `terms` are (part, place, scale, factors) of every layer."""

    name: str
    tensors: dict
    terms: list
    metadata: dict
    config: str | None = None

    def write(self, folder):
        path = Path(folder) / f"{self.name}.safetensors"
        safetensors.torch.save_file(self.tensors, path, metadata=self.metadata or None)
        return path

    def summary(self):
        tensors = {}
        for name, tensor in sorted(self.tensors.items()):
            shape = "x".join(map(str, tensor.shape)) if tensor.ndim else f"={tensor.item()}"
            tensors[name] = f"{DTYPES[tensor.dtype]} {shape}"
        return dict(name=self.name, metadata=self.metadata, config=self.config, tensors=tensors)


class Writer:
    def __init__(self, name, dtype=torch.bfloat16, part="transformer", model=None):
        self.file = AdapterFile(name, {}, [], {})
        self.dtype, self.part = dtype, part
        model = build_once()[part] if model is None else model
        self.shapes = {key: tuple(t.shape) for key, t in model.state_dict().items()}

    def shape(self, place):
        """Rows and columns of a place."""
        height = sum((end or self.shapes[name][0]) - start for name, start, end in place)
        return height, self.shapes[place[0][0]][1]

    def factor(self, key, *shape):
        self.file.tensors[key] = tensor_values(key, shape).to(self.dtype)
        return self.file.tensors[key].double()

    def alpha(self, key, value):
        self.file.tensors[key] = torch.tensor(value, dtype=torch.float32)

    def lora(self, layer, place, rank, endings=(".lora_A.weight", ".lora_B.weight"), alpha=None, scale=None):
        height, width = self.shape(place)
        down = self.factor(layer + endings[0], rank, width)
        up = self.factor(layer + endings[1], height, rank)
        if alpha is not None:
            self.alpha(layer + ".alpha", alpha)
            scale = alpha / rank
        self.file.terms.append((self.part, place, 1.0 if scale is None else scale, up @ down))

    def lokr(self, layer, place, split, ranks=(None, None), alpha=None):
        """LyCORIS, modules/lokr.py: kron(w1, w2), each whole or a product. The scale is alpha / rank (w2's rank if both are products), and
        1 if both are whole. `split` is the shape of w1."""
        (height, width), (i, j) = self.shape(place), split
        assert height % i == 0 and width % j == 0, layer
        values = []
        for name, (m, n), rank in (("w1", split, ranks[0]), ("w2", (height // i, width // j), ranks[1])):
            if rank is None:
                values.append(self.factor(f"{layer}.lokr_{name}", m, n))
            else:
                values.append(
                    self.factor(f"{layer}.lokr_{name}_a", m, rank) @ self.factor(f"{layer}.lokr_{name}_b", rank, n)
                )
        rank, scale = ranks[1] or ranks[0], 1.0
        if alpha is not None:
            self.alpha(layer + ".alpha", alpha)
            scale = alpha / rank if rank else 1.0
        self.file.terms.append((self.part, place, scale, torch.kron(*values)))


KOHYA = (".lora_down.weight", ".lora_up.weight")


@functools.cache
def build_once():
    """The components, which no caller changes."""
    return build_components()


def fresh():
    return copy.deepcopy(build_once())


def lora_file(name, places, rank, spell=lambda layer: layer, dtype=torch.bfloat16, alpha=None, endings=None, part="transformer"):
    writer = Writer(name, dtype, part)
    for layer, place in places.items():
        writer.lora(spell(layer), place, rank, endings or (".lora_A.weight", ".lora_B.weight"), alpha)
    return writer.file


def flat(prefix):
    return lambda layer: prefix + layer.replace(".", "_")


def dotted(prefix):
    return lambda layer: prefix + layer


def saved_by_diffusers(name, rslora):
    """A file that diffusers itself writes, with PEFT's settings in its metadata. Alpha is not the rank, and some layers differ in both."""
    places = diffusers_places()
    own_rank = {f"transformer_blocks.{n}.attn.to_k": 3 for n in DOUBLE}
    own_alpha = {f"single_transformer_blocks.{n}.attn.to_out": 5 for n in SINGLE}
    settings = peft.LoraConfig(
        r=2, lora_alpha=1, rank_pattern=own_rank, alpha_pattern=own_alpha, use_rslora=rslora, target_modules=sorted(places)
    )
    writer = Writer(name)
    for layer, place in places.items():
        rank, alpha = own_rank.get(layer, 2), own_alpha.get(layer, 1)
        writer.lora(f"transformer.{layer}", place, rank, scale=alpha / (rank**0.5 if rslora else rank))
    with tempfile.TemporaryDirectory() as folder:
        Flux2KleinPipeline.save_lora_weights(
            folder,
            transformer_lora_layers={key.removeprefix("transformer."): t for key, t in writer.file.tensors.items()},
            transformer_lora_adapter_metadata=settings.to_dict(),
        )
        with safetensors.safe_open(Path(folder) / "pytorch_lora_weights.safetensors", "pt") as saved:
            assert set(saved.keys()) == set(writer.file.tensors), "diffusers names tensors differently"
            writer.file.metadata = saved.metadata()
    # The order comes from a set.
    settings = json.loads(writer.file.metadata["lora_adapter_metadata"])
    settings["transformer.target_modules"].sort()
    writer.file.metadata["lora_adapter_metadata"] = json.dumps(settings, indent=2, sort_keys=True)
    return writer.file


def saved_by_peft(name, places, part, prefix, rank, alpha):
    """A folder that PEFT itself writes: adapter_model.safetensors, with its settings."""
    writer = Writer(name, torch.float32, part)
    for layer, place in places.items():
        writer.lora(f"{prefix}{layer}", place, rank, scale=alpha / rank)
    settings = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=sorted(places))
    with tempfile.TemporaryDirectory() as folder:
        peft.get_peft_model(fresh()[part], settings).save_pretrained(folder)
        with safetensors.safe_open(Path(folder) / "adapter_model.safetensors", "pt") as saved:
            assert set(saved.keys()) == set(writer.file.tensors), "PEFT names tensors differently"
            writer.file.metadata = saved.metadata()
        config = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    # The order comes from a set.
    config["target_modules"] = sorted(config["target_modules"])
    writer.file.config = json.dumps(config, sort_keys=True)
    return writer.file


def lokr_file(name, layers, spell, alpha=None):
    """`layers` has (shape of w1, ranks) by BFL name."""
    writer = Writer(name, torch.float16)
    for layer, (split, ranks) in layers.items():
        writer.lokr(spell(layer), bfl_places()[layer], split, ranks, alpha)
    return writer.file


LOKR = {
    "double_blocks.0.img_attn.qkv": (4, 8),
    "double_blocks.1.txt_attn.proj": (16, 2),
    "double_blocks.1.img_mlp.0": (2, 2),
    "single_blocks.0.linear1": (9, 4),
    "single_blocks.1.linear2": (8, 8),
}


def lokr_layers(ranks, split=None):
    return {layer: (split or own, ranks) for layer, own in LOKR.items()}


def build_files():
    bfl, diffusers = bfl_places(), diffusers_places()
    swapped = "final_layer.adaLN_modulation.1"
    files = [
        lora_file("diffusers", diffusers, 2, dotted("transformer.")),
        saved_by_diffusers("diffusers_settings", rslora=False),
        saved_by_diffusers("diffusers_rslora", rslora=True),
        saved_by_peft("peft_folder", diffusers, "transformer", "base_model.model.", 3, 2),
        lora_file("bare", diffusers, 1, dtype=torch.float16),
        lora_file("named", diffusers, 2, endings=(".lora_A.my_style.weight", ".lora_B.my_style.weight")),
        lora_file("kohya", blocks(bfl), 4, flat("lora_unet_"), torch.float32, 1.5, KOHYA),
        lora_file("bfl", {k: p for k, p in bfl.items() if k != swapped}, 2, dotted("diffusion_model.")),
        lora_file("bfl_all", bfl, 2, dotted("diffusion_model."), torch.float32),
        lora_file("bfl_peft", {k: p for k, p in bfl.items() if k != swapped}, 2, dotted("base_model.model.")),
        lora_file("comfy", diffusers, 2, dotted("diffusion_model."), torch.float16),
        lora_file("onetrainer", split_places(), 2, dotted("transformer."), torch.bfloat16, 1.0, KOHYA),
        lora_file("onetrainer_flat", blocks(diffusers), 2, flat("lora_transformer_"), torch.float16, 1.0, KOHYA),
        lora_file("underscored", blocks(bfl), 2, lambda k: "diffusion_model." + k.replace("_attn.", "_attn_").replace("_mlp.", "_mlp_")),
        lora_file("sformer", blocks(diffusers), 2, lambda k: "diffusion_model." + k.removeprefix("tran"), torch.float32),
        lora_file("flux1_names", flux1_places(), 2, dotted("transformer.")),
        lora_file("old", blocks(diffusers), 2, endings=("_lora.down.weight", "_lora.up.weight")),
        lora_file("older", blocks(diffusers), 2, endings=(".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight")),
        # Whole factors: alpha has no effect, and trainers write this value.
        lokr_file("lokr", lokr_layers((None, None), (4, 4)), dotted("diffusion_model."), 9999999999.0),
        lokr_file("lokr_w2", lokr_layers((None, 2), (4, 4)), dotted("diffusion_model."), 1.0),
        lokr_file("lokr_both", lokr_layers((1, 3)), dotted("diffusion_model."), 2.0),
        lokr_file("lokr_w1", lokr_layers((2, None)), flat("lora_unet_"), 1.0),
        lora_file("text", text_places((0, 9, 26)), 2, dotted("text_encoder."), part="text_encoder"),
        saved_by_peft("text_folder", text_places((4, 17)), "text_encoder", "base_model.model.", 2, 3),
    ]
    return {file.name: file for file in files}


# --- Cases ------------------------------------------------------------------


@dataclass(frozen=True)
class LoraCase(Case):
    files: tuple[tuple[str, float], ...] = ()
    reference: str = "diffusers"
    why: str = ""


def case(name, files, reference="diffusers", why=""):
    return LoraCase(name, "a red fox in the snow", 64, 64, 1, 3, True, 1.0, tuple(files), reference, why)


def of(name, reference="diffusers", why=""):
    return case(name, [(name, 1.0)], reference, why)


SPLIT = "diffusers does not know the numbers of OneTrainer's split layers"
CASES = (
    of("diffusers"),
    of("diffusers_settings"),
    of("diffusers_rslora"),
    of("peft_folder", "peft"),
    of("bare", "none", "diffusers asks for `transformer.` in front"),
    of("named", "none", "a name between is PEFT's own, in no file of diffusers"),
    of("kohya"),
    of("bfl"),
    of("bfl_all", "none", "diffusers does not swap the halves of the last modulation"),
    of("bfl_peft"),
    of("comfy", "none", "diffusers takes only the blocks of such a file"),
    of("onetrainer", "none", SPLIT),
    of("onetrainer_flat", "none", "diffusers skips what does not begin with `lora_unet_`"),
    of("underscored", "none", "a broken conversion, which diffusers refuses"),
    of("sformer"),
    of("flux1_names", "none", "FLUX.1's names of layers, which FLUX.2 has under others"),
    of("old", "none", "endings of older tools"),
    of("older", "none", "endings of older tools"),
    of("lokr"),
    of("lokr_w2"),
    of("lokr_both", "none", "diffusers asks for the same shape of w1 in all layers"),
    of("lokr_w1", "none", "diffusers knows no LoKr of kohya's names"),
    of("text", "none", "diffusers has no adapters of FLUX.2's text encoder"),
    of("text_folder", "peft"),
    case("scaled", [("bfl", 0.35)]),
    case("fused", [("diffusers", -0.6)], "fused"),
    case("two", [("diffusers", 0.8), ("kohya", -0.5)]),
    case("three", [("bfl_all", 0.5), ("lokr_both", 0.25), ("text", 0.75)], "none", "three kinds at once"),
)


def merge(components, files, case):
    """Adds every term to its rows, in f64."""
    with torch.no_grad():
        sums = {}
        for name, strength in case.files:
            for part, place, scale, delta in files[name].terms:
                at = 0
                for weight, start, end in place:
                    full = sums.setdefault((part, weight), components[part].get_parameter(weight).double().clone())
                    end = end or len(full)
                    full[start:end] += strength * scale * delta[at : at + end - start]
                    at += end - start
                assert at == len(delta), f"{name}: {place}"
        for (part, weight), full in sums.items():
            components[part].get_parameter(weight).copy_(full)
    return components


def run(components_or_pipe, case, exact_time=False):
    pipe = components_or_pipe
    if isinstance(pipe, dict):
        pipe = make_pipeline(pipe, case.distilled)
    outputs = run_pipeline(pipe, case, exact_time, guidance_scale=case.guidance, max_sequence_length=64).outputs()
    return {name: outputs[name] for name in ("prompt_embeds", "velocity")}


def run_reference(files, case, folder):
    """Runs the case in the reference program, or returns None."""
    if case.reference == "none":
        return None
    components = fresh()
    if case.reference == "peft":
        ((name, strength),) = case.files
        (part,) = {part for part, _, _, _ in files[name].terms}
        home = Path(folder) / f"{name}.peft"
        home.mkdir()
        files[name].write(home).rename(home / "adapter_model.safetensors")
        (home / "adapter_config.json").write_text(files[name].config, encoding="utf-8")
        assert strength == 1.0
        wrapped = peft.PeftModel.from_pretrained(components[part], home)
        components[part] = wrapped.base_model.model.eval()
        return run(components, case)
    pipe = make_pipeline(components, case.distilled)
    names, strengths = zip(*case.files)
    for name in names:
        pipe.load_lora_weights(files[name].write(folder), adapter_name=name)
    pipe.set_adapters(list(names), list(strengths))
    if case.reference == "fused":
        pipe.set_adapters(list(names), [1.0] * len(names))
        pipe.fuse_lora(lora_scale=strengths[0], adapter_names=list(names))
        pipe.unload_lora_weights()
    return run(pipe, case)


def compute():
    files = build_files()
    plain = run(fresh(), CASES[0])
    recording, report = Recording(), ["", "case                 reference  moves     agree"]
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            merged = run(merge(fresh(), files, case), case)
            theirs = run_reference(files, case, folder)
            agree = {} if theirs is None else error_report(theirs, merged)
            for name, error in agree.items():
                assert error < AGREE, f"{case.name}: {case.reference} differs from the merged model: {name} by {error}"
            outputs = theirs or merged
            text = any(part == "text_encoder" for name, _ in case.files for part, _, _, _ in files[name].terms)
            assert text != torch.equal(outputs["prompt_embeds"], plain["prompt_embeds"]), case.name
            moved = relative_l2(outputs["velocity"], plain["velocity"])
            assert 0.05 < moved < 10 and 0.05 < rms(outputs["velocity"]) < 10, f"{case.name}: {moved}"
            rounded = merge(fresh(), files, case)
            to_bf16(rounded)
            kept = dict(velocity=outputs["velocity"]) | (dict(prompt_embeds=outputs["prompt_embeds"][::4]) if text else {})
            recording.add(asdict(case), kept, merged, run(rounded, case, exact_time=True), kinds=["bf16_exact_time_relative_l2"])
            report.append(f"{case.name:<20} {case.reference:<9}  {moved:.1e}   {agree.get('velocity', '-')}")
            print(report[-1], file=sys.stderr, flush=True)
    summary = dict(
        versions=package_versions(*PACKAGES, "peft"),
        files=[file.summary() for file in files.values()],
        cases=recording.cases,
    )
    return recording.golden("lora", summary, report)
