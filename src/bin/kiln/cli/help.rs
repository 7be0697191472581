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
      Writes heart-1.png to heart-4.png, with four consecutive seeds.

  kiln \"a red fox in the snow\" --model ~/models/FLUX.2-klein-4B
  kiln \"a red fox in the snow\" --model black-forest-labs/FLUX.2-klein-9B
      FLUX.2 [klein] by its folder, or by its name in the Hugging Face cache.

  kiln \"a fox\" --transformer klein.safetensors --text-encoder qwen.safetensors --vae ae.safetensors
      FLUX.2 [klein] by the files of its parts.

  kiln \"a red fox in the snow\" --lora watercolor.safetensors:0.8 --lora owner/repository
      With LoRA or LoKr adapters, by file or by name in the Hugging Face cache. `kiln lora inspect`
      prints what is in one.

  kiln \"the cat of image 1 on the sofa of image 2\" --reference cat.jpg --reference sofa.png
      Combines several images.

  kiln --prompt-file prompt.txt --width 1360 --height 768
  fortune | kiln --prompt-file -
      The prompt from a file, or from another program.

  kiln show star.png
  kiln replay star.png --seed 8 --count 4
      `show` prints how an image was made. `replay` makes it again, or variations of it.

  kiln plan --width 2048 --height 2048
  kiln bench --width 1024 --height 1024
  kiln doctor --model ~/models/FLUX.2-klein-4B
      `plan` prints the FLOPs and memory of an image, and `bench` its time, stage by stage. `doctor`
      prints what kiln finds on this machine, and whether a model's files are sound.

  kiln \"a yellow ring\" --json | jq .seed
      One JSON object per image on standard output. Everything else goes to standard error.

  kiln -- \"--a prompt that begins with dashes\"
  kiln generate \"tiny\"
      `--` ends the options. If the first argument is the name of a command, kiln runs that command.
      A prompt that is spelled like a command needs `generate`.

Models:
  kiln uses the model that --model names, else the model that the variable KILN_MODEL names. Without
  these, kiln takes the first FLUX.2 [klein] or [dev] in the Hugging Face cache (HF_HUB_CACHE,
  HF_HOME), else its own model, called `builtin`. kiln never downloads anything.

  `builtin` is a small trained model of klein's architecture. It draws one to three shapes, small or
  large, at named places, in 256x256 pixels. The shapes are circle, square, triangle, star, heart,
  ring, cross and hexagon. The colors are red, orange, yellow, green, cyan, blue, purple, pink,
  brown, black, white and gray. Backgrounds are plain, gradient or striped. An example:
      \"a large red star at the left and a small blue circle at the right on a yellow background\"

  `builtin` also edits such images: \"make the star green\", \"remove the circle\", \"change the
  background to blue\". Anything else is beyond it.

  `tiny` is random, not trained. Its images are noise, and only show that everything works. A kiln
  that was built without `builtin` falls back on `tiny`.

Exit codes:
  0 is success. 1 is a failed check, a failed line of `kiln run`, or a replay that differs. 2 is
  wrong usage, and 3 a bad input file. 4 is not enough memory, 5 is output not written. 6 is no
  usable GPU or a GPU fault, and 7 a numeric fault. 70 is a bug in kiln. 130 and 143 are a stop by
  a signal.";

#[cfg(test)]
mod tests {
    use super::super::completions::{definition, pages};
    use super::{EXAMPLE, EXAMPLES};
    use clap::builder::StyledStr;
    use common::english::long_sentences;

    /// The most characters of the line that `-h` shows for a command or flag.
    const LINE: usize = 72;

    /// What is wrong with the help of a command, flag or value.
    fn faults(what: &str, short: Option<&StyledStr>, long: Option<&StyledStr>) -> Vec<String> {
        let short = short.map(ToString::to_string).unwrap_or_default();
        // A default in brackets is no part of the sentence.
        let line = short.split(" [default").next().unwrap_or_default();
        let mut found = Vec::new();
        if line.is_empty() || line.chars().count() > LINE || line.ends_with('.') || line.contains('\n') {
            found.push(format!("{what}: `{line}` is not one line of at most {LINE} characters without a full stop"));
        }
        for paragraph in long.map(ToString::to_string).unwrap_or_default().split("\n\n") {
            found.extend(long_sentences(paragraph).into_iter().map(|(words, text)| format!("{what}: {words} words: {text}")));
        }
        found
    }

    #[test]
    fn help_is_a_line_and_then_short_sentences() {
        let mut kiln = definition().disable_help_subcommand(true);
        kiln.build();
        let (mut found, mut flags) = (Vec::new(), 0);
        for (name, command) in std::iter::once((String::new(), &kiln)).chain(pages(&kiln)) {
            found.extend(faults(&format!("kiln {name}"), command.get_about(), command.get_long_about()));
            for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
                flags += 1;
                let what = format!("kiln {name} {}", arg.get_id());
                found.extend(faults(&what, arg.get_help(), arg.get_long_help()));
            }
            let after = [command.get_after_help(), command.get_after_long_help()].into_iter().flatten().map(ToString::to_string);
            for paragraph in after.flat_map(|text| text.split("\n\n").map(str::to_owned).collect::<Vec<_>>()) {
                let sentences = long_sentences(&paragraph);
                found.extend(sentences.into_iter().map(|(words, text)| format!("kiln {name}, after: {words} words: {text}")));
            }
        }
        assert!(flags > 100, "only {flags} flags were looked at");
        assert!(found.is_empty(), "{} texts are hard to read:\n{}", found.len(), found.join("\n"));
        assert!([EXAMPLE, EXAMPLES].iter().all(|text| text.lines().all(|line| line.chars().count() <= 100)));
    }
}
