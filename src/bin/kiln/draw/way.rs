//! The way to draw images, chosen from the environment alone.

use super::area::Screen;
use std::fmt;
use std::io::{IsTerminal, stderr, stdout};

/// The smallest terminal on which an image shows anything.
const LEAST: (usize, usize) = (20, 8);

/// The first version of Konsole that shows images as kitty does.
const KONSOLE: u32 = 220_400;

/// A way to draw images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Kitty's graphics protocol.
    Kitty {
        /// Whether tmux has to pass it on.
        wrapped: bool,
    },
    /// iTerm2's inline images.
    Iterm2,
    /// Characters whose halves are pixels.
    Blocks(Colors),
}

/// The colors of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colors {
    /// 24 bits.
    True,
    /// A cube of 6 x 6 x 6 colors.
    Cube,
}

/// A way that a user asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamedWay {
    /// `kitty`
    Kitty,
    /// `iterm2`
    Iterm2,
    /// `blocks`
    Blocks,
}

/// Why nothing is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoWay {
    /// Nothing but errors may be printed.
    Quiet,
    /// The stream is a file or a pipe.
    NotATerminal,
    /// `TERM` is unset or `dumb`.
    Dumb,
    /// `NO_COLOR` is set.
    NoColor,
    /// `CI` is set.
    Ci,
    /// The terminal does not tell its size, or has too few columns or rows.
    Small,
    /// The work ends before anyone could look.
    Soon,
    /// No variable says what the terminal can show.
    Unknown,
}

impl fmt::Display for NoWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Quiet => f.write_str("nothing but errors is printed"),
            Self::NotATerminal => f.write_str("standard error is not a terminal"),
            Self::Dumb => f.write_str("TERM is not set, or `dumb`"),
            Self::NoColor => f.write_str("NO_COLOR is set"),
            Self::Ci => f.write_str("CI is set"),
            Self::Small => write!(f, "the terminal has fewer than {} columns or {} rows", LEAST.0, LEAST.1),
            Self::Soon => f.write_str("the image is done in less than a second"),
            Self::Unknown => f.write_str("neither COLORTERM nor TERM names a terminal with enough colors"),
        }
    }
}

/// The facts that decide.
pub struct Facts<'a> {
    /// Whether the stream is a terminal.
    pub is_terminal: bool,
    /// Its size.
    pub screen: Option<Screen>,
    /// Whether only errors may be printed.
    pub quiet: bool,
    /// Whether the work takes less than a second.
    pub soon: bool,
    /// The environment.
    pub variable: &'a dyn Fn(&str) -> Option<String>,
}

impl Facts<'_> {
    /// The facts about standard error.
    pub fn of_stderr(quiet: bool) -> Self {
        let variable = &|name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        Self { is_terminal: stderr().is_terminal(), screen: Screen::of_stderr(), quiet, soon: false, variable }
    }

    /// The facts about standard output.
    pub fn of_stdout() -> Self {
        Self { is_terminal: stdout().is_terminal(), screen: Screen::of_stdout(), ..Self::of_stderr(false) }
    }

    /// The value of a variable, or an empty text.
    fn get(&self, name: &str) -> String {
        (self.variable)(name).unwrap_or_default()
    }

    /// Whether a variable has a value.
    fn has(&self, name: &str) -> bool {
        !self.get(name).is_empty()
    }

    /// The colors that variables name.
    fn colors(&self) -> Option<Colors> {
        match self.get("COLORTERM").as_str() {
            "truecolor" | "24bit" => Some(Colors::True),
            _ => self.get("TERM").contains("256color").then_some(Colors::Cube),
        }
    }

    /// Whether the program runs in tmux.
    fn in_tmux(&self) -> bool {
        self.has("TMUX") || self.get("TERM").starts_with("tmux")
    }
}

impl Way {
    /// The best way that there is, by the first sign that applies.
    pub fn best(facts: &Facts<'_>) -> Result<Self, NoWay> {
        Self::refuse(facts)?;
        let (term, program) = (facts.get("TERM"), facts.get("TERM_PROGRAM"));
        let enough = |screen: Screen| screen.columns >= LEAST.0 && screen.rows >= LEAST.1;
        let none = [
            (term.is_empty() || term == "dumb", NoWay::Dumb),
            (facts.has("NO_COLOR"), NoWay::NoColor),
            (facts.has("CI"), NoWay::Ci),
            (!facts.screen.is_some_and(enough), NoWay::Small),
            (facts.soon, NoWay::Soon),
        ];
        if let Some((_, why)) = none.into_iter().find(|(applies, _)| *applies) {
            return Err(why);
        }
        // A multiplexer shows what it understands itself. It knows 256 colors whatever the outer terminal has, which is unknown here.
        if ["TMUX", "STY", "ZELLIJ"].iter().any(|name| facts.has(name)) || term.starts_with("tmux") || term.starts_with("screen")
        {
            return Ok(Self::Blocks(facts.colors().unwrap_or(Colors::Cube)));
        }
        let konsole = facts.get("KONSOLE_VERSION").parse().is_ok_and(|version: u32| version >= KONSOLE);
        if facts.has("KITTY_WINDOW_ID") || ["xterm-kitty", "xterm-ghostty"].contains(&&*term) || program == "ghostty" || konsole {
            return Ok(Self::Kitty { wrapped: false });
        }
        if ["iTerm.app", "WezTerm", "mintty"].contains(&&*program) || facts.get("LC_TERMINAL") == "iTerm2" {
            return Ok(Self::Iterm2);
        }
        facts.colors().map(Self::Blocks).ok_or(NoWay::Unknown)
    }

    /// The way that a user asked for, whatever the terminal seems to be.
    pub fn named(name: NamedWay, facts: &Facts<'_>) -> Result<Self, NoWay> {
        Self::refuse(facts)?;
        Ok(match name {
            NamedWay::Kitty => Self::Kitty { wrapped: facts.in_tmux() },
            NamedWay::Iterm2 => Self::Iterm2,
            NamedWay::Blocks => Self::Blocks(facts.colors().unwrap_or(Colors::True)),
        })
    }

    /// Escape sequences go to terminals only, and not where silence is asked for.
    fn refuse(facts: &Facts<'_>) -> Result<(), NoWay> {
        match (facts.quiet, facts.is_terminal) {
            (true, _) => Err(NoWay::Quiet),
            (false, false) => Err(NoWay::NotATerminal),
            (false, true) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KITTY: Result<Way, NoWay> = Ok(Way::Kitty { wrapped: false });
    const TRUE: Result<Way, NoWay> = Ok(Way::Blocks(Colors::True));
    const CUBE: Result<Way, NoWay> = Ok(Way::Blocks(Colors::Cube));

    /// What is chosen with these variables, spelled `NAME=VALUE`, on a terminal of 80 x 24 cells.
    fn chosen(
        line: &str,
        change: impl FnOnce(&mut Facts<'_>),
        choose: impl FnOnce(&Facts<'_>) -> Result<Way, NoWay>,
    ) -> Result<Way, NoWay> {
        let variable = |name: &str| {
            let mut pairs = line.split_whitespace().filter_map(|pair| pair.split_once('='));
            pairs.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
        };
        let screen = Some(Screen { columns: 80, rows: 24, pixels: None });
        let mut facts = Facts { is_terminal: true, screen, quiet: false, soon: false, variable: &variable };
        change(&mut facts);
        choose(&facts)
    }

    #[test]
    fn every_sign_of_the_environment() {
        for (variables, want) in [
            // Nothing is drawn.
            ("", Err(NoWay::Dumb)),
            ("TERM= COLORTERM=truecolor", Err(NoWay::Dumb)),
            ("TERM=dumb COLORTERM=truecolor KITTY_WINDOW_ID=1", Err(NoWay::Dumb)),
            ("TERM=xterm-kitty NO_COLOR=1", Err(NoWay::NoColor)),
            ("TERM=xterm-kitty NO_COLOR=0", Err(NoWay::NoColor)),
            ("TERM=xterm-kitty NO_COLOR=", KITTY),
            ("TERM=xterm-kitty CI=true", Err(NoWay::Ci)),
            ("TERM=xterm-kitty CI=", KITTY),
            // Multiplexers, whatever is around them.
            ("TERM=xterm-kitty TMUX=default,1,0 COLORTERM=truecolor", TRUE),
            ("TERM=xterm-256color STY=1.pts-0", CUBE),
            ("TERM=xterm-256color ZELLIJ=0 KITTY_WINDOW_ID=1", CUBE),
            ("TERM=tmux-256color TERM_PROGRAM=WezTerm", CUBE),
            ("TERM=tmux-direct COLORTERM=24bit", TRUE),
            ("TERM=screen KITTY_WINDOW_ID=1", CUBE),
            ("TERM=screen.xterm-256color LC_TERMINAL=iTerm2", CUBE),
            ("TERM=xterm-kitty TMUX=", KITTY),
            // Kitty's protocol.
            ("TERM=xterm-kitty", KITTY),
            ("TERM=xterm-ghostty", KITTY),
            ("TERM=xterm KITTY_WINDOW_ID=1", KITTY),
            ("TERM=xterm-256color TERM_PROGRAM=ghostty", KITTY),
            ("TERM=xterm-256color KONSOLE_VERSION=220400", KITTY),
            ("TERM=xterm-256color KONSOLE_VERSION=240801 COLORTERM=truecolor", KITTY),
            ("TERM=xterm-256color KONSOLE_VERSION=220399 COLORTERM=truecolor", TRUE),
            ("TERM=xterm-256color KONSOLE_VERSION=new", CUBE),
            ("TERM=xterm-kitty TERM_PROGRAM=WezTerm", KITTY),
            // iTerm2's protocol.
            ("TERM=xterm-256color TERM_PROGRAM=iTerm.app", Ok(Way::Iterm2)),
            ("TERM=xterm-256color TERM_PROGRAM=WezTerm COLORTERM=truecolor", Ok(Way::Iterm2)),
            ("TERM=xterm TERM_PROGRAM=mintty", Ok(Way::Iterm2)),
            ("TERM=xterm-256color LC_TERMINAL=iTerm2", Ok(Way::Iterm2)),
            ("TERM=xterm-256color LC_TERMINAL=iterm2", CUBE),
            // Colors alone.
            ("TERM=xterm COLORTERM=truecolor", TRUE),
            ("TERM=xterm-256color COLORTERM=24bit", TRUE),
            ("TERM=xterm-256color COLORTERM=yes", CUBE),
            ("TERM=xterm-256color TERM_PROGRAM=Apple_Terminal", CUBE),
            ("TERM=rxvt-unicode-256color", CUBE),
            ("TERM=xterm", Err(NoWay::Unknown)),
            ("TERM=linux", Err(NoWay::Unknown)),
        ] {
            assert_eq!(chosen(variables, |_| {}, Way::best), want, "{variables}");
        }
    }

    #[test]
    fn facts_about_the_stream_come_first() {
        let best = |change: &dyn Fn(&mut Facts<'_>)| chosen("TERM=xterm-kitty", change, Way::best);
        let sized = |columns, rows| best(&|facts| facts.screen = Some(Screen { columns, rows, pixels: None }));
        assert_eq!(sized(20, 8), KITTY);
        assert_eq!((sized(19, 8), sized(20, 7)), (Err(NoWay::Small), Err(NoWay::Small)));
        assert_eq!(best(&|facts| facts.screen = None), Err(NoWay::Small));
        assert_eq!(best(&|facts| facts.is_terminal = false), Err(NoWay::NotATerminal));
        assert_eq!(best(&|facts| facts.quiet = true), Err(NoWay::Quiet));
        assert_eq!(best(&|facts| facts.soon = true), Err(NoWay::Soon));
    }

    #[test]
    fn a_named_way_does_not_look_at_the_terminal() {
        let named = |variables, name| chosen(variables, |facts| facts.soon = true, |facts| Way::named(name, facts));
        for variables in ["", "TERM=dumb CI=1 NO_COLOR=1", "TERM=xterm STY=1"] {
            assert_eq!(named(variables, NamedWay::Kitty), KITTY, "{variables}");
            assert_eq!(named(variables, NamedWay::Iterm2), Ok(Way::Iterm2), "{variables}");
            assert_eq!(named(variables, NamedWay::Blocks), TRUE, "{variables}");
        }
        for variables in ["TERM=tmux-256color", "TERM=screen-256color TMUX=x"] {
            assert_eq!(named(variables, NamedWay::Kitty), Ok(Way::Kitty { wrapped: true }), "{variables}");
            assert_eq!(named(variables, NamedWay::Blocks), CUBE, "{variables}");
        }
        let kitty = |facts: &Facts<'_>| Way::named(NamedWay::Kitty, facts);
        assert_eq!(chosen("", |facts| facts.is_terminal = false, kitty), Err(NoWay::NotATerminal));
        assert_eq!(chosen("", |facts| facts.quiet = true, kitty), Err(NoWay::Quiet));
        assert_eq!(chosen("", |facts| facts.screen = None, kitty), KITTY);
    }

    #[test]
    fn reasons_are_phrases() {
        use NoWay::{Ci, Dumb, NoColor, NotATerminal, Quiet, Small, Soon, Unknown};
        for why in [Quiet, NotATerminal, Dumb, NoColor, Ci, Small, Soon, Unknown] {
            let text = why.to_string();
            assert!(!text.is_empty() && !text.ends_with('.'), "{text}");
        }
        assert_eq!(Small.to_string(), "the terminal has fewer than 20 columns or 8 rows");
    }
}
