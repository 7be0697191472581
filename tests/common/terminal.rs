//! A terminal: what a program writes to it, and what it then shows. The program runs in a real pseudoterminal; the screen is computed.

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::process::{Child, Command};

/// Variables that say what a terminal can do, or that nothing may be drawn.
const VARIABLES: [&str; 13] = [
    "TERM",
    "NO_COLOR",
    "CI",
    "TMUX",
    "STY",
    "ZELLIJ",
    "KITTY_WINDOW_ID",
    "TERM_PROGRAM",
    "KONSOLE_VERSION",
    "LC_TERMINAL",
    "COLORTERM",
    "KILN_SHOW",
    "CLICOLOR_FORCE",
];

/// A program whose standard error is a pseudoterminal.
pub struct Session {
    pub child: Child,
    master: File,
    /// All bytes so far.
    pub bytes: Vec<u8>,
}

impl Session {
    /// Starts a program in a terminal of this size with these variables, spelled `NAME=VALUE`. With `both`, standard output is the
    /// terminal, too.
    pub fn start(mut command: Command, (columns, rows): (u16, u16), variables: &str, both: bool) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        tcsetwinsize(&master, Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let slave = OpenOptions::new().read(true).write(true).open(OsStr::from_bytes(name.as_bytes())).unwrap();
        for name in VARIABLES {
            command.env_remove(name);
        }
        command.envs(variables.split_whitespace().map(|pair| pair.split_once('=').unwrap()));
        if both {
            command.stdout(slave.try_clone().unwrap());
        }
        command.stderr(slave);
        let child = command.spawn().unwrap();
        // The terminal ends when nobody has it open, so the command must not.
        drop(command);
        Self { child, master: File::from(master), bytes: Vec::new() }
    }

    /// Reads until a text appears; false if the program ends before.
    pub fn read_until(&mut self, text: &str) -> bool {
        let mut buffer = [0; 4096];
        loop {
            if self.bytes.windows(text.len()).any(|window| window == text.as_bytes()) {
                return true;
            }
            // The end is an error, EIO.
            match self.master.read(&mut buffer) {
                Ok(count) if count > 0 => self.bytes.extend_from_slice(&buffer[..count]),
                _ => return false,
            }
        }
    }

    /// Reads to the end, and returns the exit code.
    pub fn finish(&mut self) -> Option<i32> {
        assert!(!self.read_until("\0"), "a terminal gets no NUL");
        self.child.wait().unwrap().code()
    }
}

/// One character with the colors of its halves, as the parameters of their sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    pub text: char,
    pub foreground: Option<Vec<u8>>,
    pub background: Option<Vec<u8>>,
}

/// An image that was placed at a cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    pub row: usize,
    pub column: usize,
    /// The keys of the sequence.
    pub keys: String,
    pub png: Vec<u8>,
}

/// The screen that a terminal shows after some bytes, with all that was scrolled out of it.
pub struct Display {
    columns: usize,
    rows: usize,
    pub lines: Vec<Vec<Cell>>,
    /// Row and column of the cursor.
    pub cursor: (usize, usize),
    saved: (usize, usize),
    foreground: Option<Vec<u8>>,
    background: Option<Vec<u8>>,
    /// Images by number; those of iTerm2 have the numbers from 2^32 on.
    pub images: BTreeMap<u64, Placed>,
    /// A kitty image of which chunks are to come.
    unfinished: Option<(String, String)>,
    /// How many images were placed.
    pub placed: usize,
}

impl Display {
    pub fn new(columns: usize, rows: usize) -> Self {
        Self {
            columns,
            rows,
            lines: vec![Vec::new()],
            cursor: (0, 0),
            saved: (0, 0),
            foreground: None,
            background: None,
            images: BTreeMap::new(),
            unfinished: None,
            placed: 0,
        }
    }

    /// The screen after these bytes.
    pub fn after(columns: usize, rows: usize, bytes: &[u8]) -> Self {
        let mut display = Self::new(columns, rows);
        display.write(std::str::from_utf8(bytes).unwrap());
        display
    }

    /// The lines as text, without spaces at their ends.
    pub fn text(&self) -> Vec<String> {
        let shown = |cell: &Cell| if cell.text == '\0' { ' ' } else { cell.text };
        self.lines.iter().map(|line| line.iter().map(shown).collect::<String>().trim_end().to_owned()).collect()
    }

    /// Writes text as a program does: the system's terminal driver begins a new line at its start. Fails at sequences that a program
    /// must not use, such as those that hide the cursor.
    pub fn write(&mut self, text: &str) {
        let mut rest = text.replace("\r\n", "\n");
        while !rest.is_empty() {
            rest = self.step(&rest).to_owned();
        }
    }

    fn step<'a>(&mut self, text: &'a str) -> &'a str {
        if let Some(after) = text.strip_prefix("\x1b[") {
            let end = after.find(|c: char| c.is_ascii_alphabetic()).expect("a whole sequence");
            self.control(&after[..end], &after[end..=end]);
            return &after[end + 1..];
        }
        if let Some(after) = text.strip_prefix("\x1b_G") {
            let (command, after) = after.split_once("\x1b\\").unwrap();
            let (keys, chunk) = command.split_once(';').unwrap_or((command, ""));
            self.kitty(keys, chunk);
            return after;
        }
        if let Some(after) = text.strip_prefix("\x1b]1337;File=") {
            let (command, after) = after.split_once('\x07').unwrap();
            let (keys, file) = command.split_once(':').unwrap();
            let number = (1 << 32) + self.placed as u64;
            self.place(number, keys, file);
            // The cursor moves somewhere.
            self.cursor.1 += 5;
            return after;
        }
        if let Some(after) = text.strip_prefix("\x1b7") {
            self.saved = self.cursor;
            return after;
        }
        if let Some(after) = text.strip_prefix("\x1b8") {
            self.cursor = self.saved;
            return after;
        }
        let first = text.chars().next().unwrap();
        match first {
            '\n' => self.line_feed(),
            '\r' => self.cursor.1 = 0,
            _ => self.print(first),
        }
        &text[first.len_utf8()..]
    }

    fn line_feed(&mut self) {
        self.cursor = (self.cursor.0 + 1, 0);
        if self.cursor.0 == self.lines.len() {
            self.lines.push(Vec::new());
        }
    }

    fn print(&mut self, text: char) {
        assert!(!text.is_control(), "{text:?}");
        if self.cursor.1 == self.columns {
            self.line_feed();
        }
        let line = &mut self.lines[self.cursor.0];
        if line.len() <= self.cursor.1 {
            line.resize(self.cursor.1 + 1, Cell::default());
        }
        line[self.cursor.1] = Cell { text, foreground: self.foreground.clone(), background: self.background.clone() };
        self.cursor.1 += 1;
    }

    fn control(&mut self, parameters: &str, command: &str) {
        let number = || if parameters.is_empty() { 1 } else { parameters.parse::<usize>().unwrap() };
        let top = self.lines.len().saturating_sub(self.rows);
        match (parameters, command) {
            (_, "A") => self.cursor.0 = self.cursor.0.saturating_sub(number()).max(top),
            (_, "B") => self.cursor.0 = (self.cursor.0 + number()).min(self.lines.len() - 1),
            ("" | "0", "J") => {
                let (row, column) = self.cursor;
                self.lines[row].truncate(column);
                self.lines[row + 1..].iter_mut().for_each(Vec::clear);
                // A terminal with kitty's images removes them only when it is told to.
                self.images.retain(|&number, image| number < 1 << 32 || image.row < row);
            }
            ("2", "K") => self.lines[self.cursor.0].clear(),
            ("" | "0", "K") => self.lines[self.cursor.0].truncate(self.cursor.1),
            (_, "m") => self.colors(parameters),
            _ => panic!("a sequence that changes more than cells: {parameters:?} {command:?}"),
        }
    }

    fn colors(&mut self, parameters: &str) {
        let numbers: Vec<u8> = parameters.split(';').map(|number| number.parse().unwrap()).collect();
        let mut numbers = &numbers[..];
        while let [first, rest @ ..] = numbers {
            numbers = rest;
            match first {
                0 => (self.foreground, self.background) = (None, None),
                38 | 48 => {
                    let (color, after) = rest.split_at(if rest[0] == 2 { 4 } else { 2 });
                    *(if *first == 38 { &mut self.foreground } else { &mut self.background }) = Some(color[1..].to_vec());
                    numbers = after;
                }
                _ => panic!("{parameters}"),
            }
        }
    }

    fn kitty(&mut self, keys: &str, chunk: &str) {
        assert!(keys.split(',').any(|key| key == "q=2"), "the terminal would answer: {keys}");
        assert!(chunk.len() <= 4096, "{}", chunk.len());
        let value = |name: &str| keys.split(',').find_map(|key| key.strip_prefix(name)?.strip_prefix('=').map(str::to_owned));
        if value("a").as_deref() == Some("d") {
            assert_eq!(value("d").as_deref(), Some("I"));
            self.images.remove(&value("i").unwrap().parse().unwrap());
            return;
        }
        let (first, file) = match self.unfinished.take() {
            Some((first, file)) => (first, file + chunk),
            None => (keys.to_owned(), chunk.to_owned()),
        };
        if value("m").as_deref() == Some("1") {
            self.unfinished = Some((first, file));
            return;
        }
        let id = first.split(',').find_map(|key| key.strip_prefix("i=")).unwrap().parse().unwrap();
        assert!(first.contains("p=1") && first.contains("C=1"), "{first}");
        self.place(id, &first, &file);
    }

    fn place(&mut self, number: u64, keys: &str, file: &str) {
        let (row, column) = self.cursor;
        self.images.retain(|_, image| (image.row, image.column) != self.cursor);
        self.images.insert(number, Placed { row, column, keys: keys.to_owned(), png: base64(file) });
        self.placed += 1;
    }
}

/// Decodes base64.
fn base64(text: &str) -> Vec<u8> {
    let value = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => panic!("{c} is no digit"),
    };
    let mut bytes = Vec::new();
    for group in text.as_bytes().chunks(4) {
        let digits: Vec<u32> = group.iter().filter(|&&c| c != b'=').map(|&c| u32::from(value(c))).collect();
        let bits = (0..4).fold(0, |bits, i| bits << 6 | digits.get(i).copied().unwrap_or(0));
        bytes.extend(&bits.to_be_bytes()[1..digits.len()]);
    }
    bytes
}
