//! `kiln completions` and `kiln man`: shell completions and man pages, generated from the same definition as `--help`.

use super::args::{Cli, CompletionsArgs, ManArgs};
use super::stdout::{STDOUT, print};
use clap::CommandFactory;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};
use kiln::error::{Error, Result};
use std::io::{self, Write};

/// Writes the completion script of a shell to `out`.
pub fn completions(args: &CompletionsArgs, out: &mut dyn Write) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "kiln", &mut script);
    print(out, &script)
}

/// Writes the man page of `kiln`, or of one of its commands, to `out`.
pub fn man(args: &ManArgs, out: &mut dyn Write) -> Result<()> {
    let mut kiln = Cli::command().disable_help_subcommand(true);
    // Only a built command knows the full names of its subcommands.
    kiln.build();
    let command = match &args.command {
        Some(name) => {
            let (outer, inner) = name.split_once('-').map_or((name.as_str(), None), |(outer, inner)| (outer, Some(inner)));
            let found = kiln.find_subcommand(outer).and_then(|outer| match inner {
                Some(inner) => outer.find_subcommand(inner),
                None => Some(outer),
            });
            found.cloned().ok_or_else(|| Error::usage("there is no such command", "see --help"))?
        }
        None => kiln,
    };
    let page = page(command).map_err(|source| Error::Write { path: STDOUT.into(), source })?;
    print(out, &page)
}

/// Renders a man page. This is `Man::render` except for the text after the options: clap_mangen would fill examples into a
/// paragraph and call the section EXTRA.
fn page(command: clap::Command) -> io::Result<Vec<u8>> {
    let closing = command.get_after_long_help().map(ToString::to_string);
    let commands = command.has_subcommands();
    // A subcommand has no version of its own.
    let man = Man::new(command).source(concat!("kiln ", env!("CARGO_PKG_VERSION")));
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if commands {
        man.render_subcommands_section(&mut page)?;
    }
    if let Some(text) = closing {
        preformatted(&text).to_writer(&mut page)?;
    }
    Ok(page)
}

/// The closing text of `--help` with its line breaks kept. A heading, which is an unindented line that ends with a colon, begins a
/// section.
fn preformatted(text: &str) -> Roff {
    let mut roff = Roff::default();
    roff.control("nf", []);
    for line in text.lines() {
        match line.strip_suffix(':').filter(|heading| !heading.starts_with(' ')) {
            Some(heading) => {
                roff.control("SH", [heading.to_uppercase().as_str()]);
            }
            None => {
                roff.text([roman(line)]);
            }
        }
    }
    roff.control("fi", []);
    roff
}
