//! `kiln completions` and `kiln man`: shell completions and man pages, generated from the same definition as `--help`.

use super::stdout::{STDOUT, print};
use super::{Cli, Process, Subcommand};
use clap::builder::PossibleValuesParser;
use clap::{Args, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};
use kiln::error::{Error, Result};
use std::io;
use std::sync::LazyLock;

/// Print a shell completion script
///
/// For bash: kiln completions bash > ~/.local/share/bash-completion/completions/kiln
#[derive(Args, Debug)]
#[command(override_usage = "kiln completions <SHELL>")]
pub struct CompletionsArgs {
    /// Choose the shell that reads the script
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Print the man page of kiln or of one of its commands
///
/// To read it: kiln man | man -l -
#[derive(Args, Debug)]
#[command(override_usage = "kiln man [COMMAND]")]
pub struct ManArgs {
    /// Print the page of this command instead of the page of kiln
    pub command: Option<String>,

    /// List the commands that have a man page
    #[arg(long, conflicts_with = "command")]
    pub list: bool,
}

impl Subcommand for CompletionsArgs {
    fn run(self: Box<Self>, Process { out, .. }: Process<'_>) -> Result<()> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut definition(), "kiln", &mut script);
        print(out, &script)
    }
}

impl Subcommand for ManArgs {
    fn run(self: Box<Self>, Process { out, .. }: Process<'_>) -> Result<()> {
        let mut kiln = Cli::command().disable_help_subcommand(true);
        // Only a built command knows the full names of its subcommands.
        kiln.build();
        if self.list {
            return print(out, format!("{}\n", PAGES.join("\n")).as_bytes());
        }
        let named = self.command.and_then(|name| pages(&kiln).into_iter().find(|(page, _)| *page == name));
        let command = named.map_or(&kiln, |(_, command)| command).clone();
        let page = page(command).map_err(|source| Error::Write { path: STDOUT.into(), source })?;
        print(out, &page)
    }
}

/// The names of all man pages.
static PAGES: LazyLock<Vec<String>> = LazyLock::new(|| pages(&Cli::command()).into_iter().map(|(name, _)| name).collect());

/// The definition of all flags. It restricts the argument of `kiln man` to the names of commands.
pub fn definition() -> clap::Command {
    let names = PossibleValuesParser::new(PAGES.iter().map(String::as_str));
    Cli::command().mut_subcommand("man", |man| man.mut_arg("command", |arg| arg.value_parser(names)))
}

/// Every command with the name of its man page. The page of a nested command is called `parent-child`.
pub fn pages(kiln: &clap::Command) -> Vec<(String, &clap::Command)> {
    let mut pages = Vec::new();
    for outer in kiln.get_subcommands() {
        pages.push((outer.get_name().to_owned(), outer));
        pages.extend(outer.get_subcommands().map(|inner| (format!("{}-{}", outer.get_name(), inner.get_name()), inner)));
    }
    pages
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

/// The closing text of `--help` with its line breaks kept. A heading, which is an unindented line that ends with a colon, begins a section.
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
