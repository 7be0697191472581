//! The closing texts of the help: examples, models, exit codes.

/// The end of `kiln -h`.
pub(super) const EXAMPLE: &str = "Example: kiln \"a large red star on a blue background\" --seed 7 -o star.png";

/// The end of `kiln --help`. Lines are at most 100 columns wide, because clap would wrap longer ones.
pub(super) const EXAMPLES: &str = "\
Examples:
  kiln \"a large red star on a blue background\"
      Writes a-large-red-star-on-a-blue-background-SEED.png to the current folder and prints that
      name. No model is needed: kiln has a small one of its own (see Models).

  kiln \"a large red star on a blue background\" --seed 7 -o star.png
      The same picture every time. An existing star.png is kept unless --force is given.

  kiln \"make the star green\" --reference star.png -o green.png
      Edits a picture.

  kiln \"a small pink heart at the top left on a black background\" --count 4 -o heart.png
      heart-1.png to heart-4.png, with four consecutive seeds.

  kiln \"a red fox in the snow\" --model ~/models/FLUX.2-klein-4B
  kiln \"a red fox in the snow\" --model black-forest-labs/FLUX.2-klein-9B
  kiln \"a fox\" --transformer klein.safetensors --text-encoder qwen.safetensors --vae ae.safetensors
      FLUX.2 [klein] by its folder, by its name in the Hugging Face cache, or by its files.

  kiln \"a red fox in the snow\" --lora watercolour.safetensors:0.8 --lora owner/repository
      With LoRA or LoKr adapters, by file or by name in the Hugging Face cache. `kiln lora inspect`
      tells what is in one.

  kiln \"the cat of image 1 on the sofa of image 2\" --reference cat.jpg --reference sofa.png
      Combines several pictures.

  kiln --prompt-file prompt.txt --width 1360 --height 768
  fortune | kiln --prompt-file -
      The prompt from a file, or from another program.

  kiln plan --width 2048 --height 2048
  kiln bench --width 1024 --height 1024
  kiln doctor --model ~/models/FLUX.2-klein-4B
      What such a picture would take, in FLOPs and memory; how long it takes, stage by stage; what kiln
      finds on this machine, and whether a model's files are sound.

  kiln \"a yellow ring\" --json | jq .seed
      One JSON object per picture on standard output. Everything else goes to standard error.

  kiln -- \"--a prompt that begins with dashes\"
  kiln generate \"tiny\"
      `--` ends the options. A first argument that names a command is that command, so a prompt that
      is spelled like one needs `generate`.

Models:
  kiln uses what --model names, else what the variable KILN_MODEL names, else the first FLUX.2
  [klein] in the Hugging Face cache (HF_HUB_CACHE, HF_HOME), else its own, called `builtin`. Nothing
  is ever downloaded.

  `builtin` is a small trained model of klein's architecture. It draws one to three shapes (circle,
  square, triangle, star, heart, ring, cross, hexagon), small or large, in twelve colours (red,
  orange, yellow, green, cyan, blue, purple, pink, brown, black, white, gray), at named places on
  plain, gradient or striped backgrounds, in 256x256 pixels:
      \"a large red star at the left and a small blue circle at the right on a yellow background\"
  and edits such pictures: \"make the star green\", \"remove the circle\", \"change the background to
  blue\". Anything else is beyond it.

  `tiny` is random, not trained: its pictures are noise, and only show that everything works. A kiln
  that was built without `builtin` falls back on it.

Exit codes:
  0 done, 1 a check or a line of `kiln run` that failed, 2 wrong usage, 3 a bad input file, 4 not enough memory,
  5 output not written, 6 no usable GPU or a fault of it, 7 a numeric fault, 70 a bug in kiln, 130 and
  143 stopped by a signal";

/// The end of `kiln run --help`.
pub(super) const RUN_EXAMPLES: &str = "\
Examples:
  kiln run prompts.txt -o pictures
      A picture for each line. Seeds and names follow from the lines, so the same file gives the same
      pictures under the same names.

  kiln run prompts.txt -o pictures --skip-existing
      Continues where a run was stopped.

  echo '{\"prompt\": \"a red star\", \"seed\": 7, \"output\": \"star.png\"}' | kiln run | jq .path
      Settings of its own for a line. Another program may keep the pipe open and wait for each answer.

  {\"prompt\": \"a fox\", \"lora\": [\"ink.safetensors\", {\"file\": \"owner/repository\", \"scale\": 0.5}]}
      A line with adapters of its own, in place of those of --lora. The model is not loaded again.";

/// The end of `kiln lora --help` and `kiln lora inspect --help`.
pub(super) const INSPECT_EXAMPLES: &str = "\
Examples:
  kiln lora inspect watercolour.safetensors
      Layers by kind with their ranks, their spelling, the model they are for, trigger words.

  kiln lora inspect owner/repository --model ~/models/FLUX.2-klein-4B
      An adapter in the Hugging Face cache, and which of its layers a model has.

  kiln lora inspect watercolour.safetensors --json | jq .trigger_words
      Every layer and all metadata, for programs.";

/// The end of `kiln quantize --help`.
pub(super) const QUANTIZE_EXAMPLES: &str = "\
Examples:
  kiln quantize ~/models/FLUX.2-klein-4B ~/models/klein-4b-fp8 --to fp8
      A folder that is a model: transformer and text encoder in FP8, everything else copied.
      kiln \"a red fox\" --model ~/models/klein-4b-fp8 uses it.

  kiln quantize black-forest-labs/FLUX.2-klein-4B klein-4b-nvfp4.safetensors --to nvfp4
  kiln quantize ~/ComfyUI/models qwen-fp8.safetensors --to fp8 --part text-encoder
      One part as a single file, for ComfyUI as well.

  kiln quantize klein.safetensors klein-fp8.safetensors --to fp8 --no-calibration
      A single file without the rest of its model: inputs are scaled by constants.

  kiln quantize ~/models/FLUX.2-klein-4B out --to nvfp4 --keep 'single_blocks.0.*' --keep '*.proj'
      Some layers stay in BF16.";

/// The end of `kiln selftest --help`.
pub(super) const SELFTEST_EXAMPLES: &str = "\
Examples:
  kiln selftest
      One line for each check: ok, FAILED with what is wrong, or not on this GPU. Everything between
      the marks is a block to paste into an issue; it has nothing of yours in it.

  kiln selftest --quick --device 1
      A second, on the second GPU.

  kiln selftest --json | jq '.checks[] | select(.outcome == \"failed\")'
      What failed, for programs.";

/// The end of `kiln bench -h`.
pub(super) const BENCH_EXAMPLE: &str = "Example: kiln bench --width 1024 --height 1024 --runs 10";

/// The end of `kiln bench --help`.
pub(super) const BENCH_EXAMPLES: &str = "\
Examples:
  kiln bench
      The model that `kiln PROMPT` would use, with its own size and steps: one picture cold, five warm.

  kiln bench --model ~/models/FLUX.2-klein-4B --width 1024 --height 1024 --runs 10
  kiln bench \"make it night\" --reference photo.jpg --steps 8
      Everything that decides how long a picture takes is given as for a picture.

  kiln bench --json | jq .warm_s[].total
  kiln bench --json=times.json
      JSON with every single time: on standard output, or in a new file beside the table.

  kiln bench --runs 10 --json=times.json --svg times.svg
  kiln bench --from times.json --svg beside.svg --beside diffusers.json
      A chart of the stages; later, without measuring again, beside that of another engine.

  kiln bench --runs 1 --trace run.json
      What ran when, thread by thread and kernel by kernel, for ui.perfetto.dev.

  kiln bench --model ~/models/FLUX.2-klein-4B --share
      The table, and a block to paste into an issue: card, driver, figures and predictions.

  kiln bench --kernels
  kiln bench --kernels=attention --json=attention.json
      Single ops at klein 4B's shapes: time, rate, share of the ceiling. Needs no model.

Close other programs that use the GPU: they take its time, and what they do to its memory is counted too.";
