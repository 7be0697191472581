//! The closing texts of the help: examples, models, exit codes.

/// The end of `kiln -h`.
pub const EXAMPLE: &str = "Example: kiln \"a large red star on a blue background\" --seed 7 -o star.png";

/// The end of `kiln --help`. Lines are at most 100 columns wide, because clap would wrap longer ones.
pub const EXAMPLES: &str = "\
Examples:
  kiln \"a large red star on a blue background\"
      Writes a-large-red-star-on-a-blue-background-SEED.png to the current folder and prints that
      name. No model is needed: kiln has a small one of its own (see Models).

  kiln \"a large red star on a blue background\" --seed 7 -o star.png
      The same image every time. An existing star.png is kept unless --force is given.

  kiln \"make the star green\" --reference star.png -o green.png
      Edits an image.

  kiln \"a small pink heart at the top left on a black background\" --count 4 -o heart.png
      heart-1.png to heart-4.png, with four consecutive seeds.

  kiln \"a red fox in the snow\" --model ~/models/FLUX.2-klein-4B
  kiln \"a red fox in the snow\" --model black-forest-labs/FLUX.2-klein-9B
  kiln \"a fox\" --transformer klein.safetensors --text-encoder qwen.safetensors --vae ae.safetensors
      FLUX.2 [klein] by its folder, by its name in the Hugging Face cache, or by its files.

  kiln \"a red fox in the snow\" --lora watercolor.safetensors:0.8 --lora owner/repository
      With LoRA or LoKr adapters, by file or by name in the Hugging Face cache. `kiln lora inspect`
      prints what is in one.

  kiln \"the cat of image 1 on the sofa of image 2\" --reference cat.jpg --reference sofa.png
      Combines several images.

  kiln --prompt-file prompt.txt --width 1360 --height 768
  fortune | kiln --prompt-file -
      The prompt from a file, or from another program.

  kiln plan --width 2048 --height 2048
  kiln bench --width 1024 --height 1024
  kiln doctor --model ~/models/FLUX.2-klein-4B
      The FLOPs and memory of such an image; its time, stage by stage; what kiln finds on this
      machine, and whether a model's files are sound.

  kiln \"a yellow ring\" --json | jq .seed
      One JSON object per image on standard output. Everything else goes to standard error.

  kiln -- \"--a prompt that begins with dashes\"
  kiln generate \"tiny\"
      `--` ends the options. A first argument that names a command is that command, so a prompt that
      is spelled like one needs `generate`.

Models:
  kiln uses what --model names, else what the variable KILN_MODEL names, else the first FLUX.2
  [klein] in the Hugging Face cache (HF_HUB_CACHE, HF_HOME), else its own model, called `builtin`.
  kiln never downloads anything.

  `builtin` is a small trained model of klein's architecture. It draws one to three shapes (circle,
  square, triangle, star, heart, ring, cross, hexagon), small or large, in twelve colors (red,
  orange, yellow, green, cyan, blue, purple, pink, brown, black, white, gray), at named places on
  plain, gradient or striped backgrounds, in 256x256 pixels:
      \"a large red star at the left and a small blue circle at the right on a yellow background\"
  and edits such images: \"make the star green\", \"remove the circle\", \"change the background to
  blue\". Anything else is beyond it.

  `tiny` is random, not trained. Its images are noise, and only show that everything works. A kiln
  that was built without `builtin` falls back on it.

Exit codes:
  0 done, 1 a failed check or a failed line of `kiln run`, 2 wrong usage, 3 a bad input file,
  4 not enough memory, 5 output not written, 6 no usable GPU or a GPU fault, 7 a numeric fault,
  70 a bug in kiln, 130 and 143 stopped by a signal";
