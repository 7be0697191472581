//! The sentence templates that training never uses: every fifth of each list of `tools/train_builtin/world.py`.

use crate::world::{PALETTE, SHAPES};

/// In a template `{a}` is an object with its article, `{n}` one without, `{p}` a place, `{b}` a background with its article,
/// `{s}` a shape, `{t}` a shape with its article, `{c}` a color.
pub const PROMPTS: [&str; 25] = [
    "{b} with {a} {p}",
    "{p} there is {a}, on {b}",
    "{b} and {a} {p}",
    "a simple drawing of {a} {p} on {b}",
    "{a} {p} and {b}",
    "a drawing with {a} {p} on {b}",
    "{b} with {a} {p} and {a} {p}",
    "{b}, {a} {p} and {a} {p}",
    "an image with {a} {p}, and {a} {p}, on {b}",
    "a simple drawing of {a} {p} and {a} {p} on {b}",
    "{a} {p} and then {a} {p} on {b}",
    "a drawing with {a} {p} and {a} {p} on {b}",
    "{b} with {a} {p}, {a} {p} and {a} {p}",
    "{b}, {a} {p}, {a} {p}, {a} {p}",
    "show {a} {p}, {a} {p} and {a} {p} over {b}",
    "{a} {p}, {a} {p} plus {a} {p} on {b}",
    "{b} with {a} right of {a}",
    "a drawing of {a} to the right of {a} on {b}",
    "{b}, {a} to the right of {a}",
    "{b} with {a} under {a}",
    "a drawing of {a} below {a} on {b}",
    "{b}, {a} below {a}",
    "draw {a} on {b}",
    "a simple picture of {a} on {b}",
    "a simple drawing of {a}, {b}",
];

/// The kind of edit, and a template of it.
pub const EDITS: [(&str, &str); 28] = [
    ("recolor", "paint the {s} {c}"),
    ("recolor", "make the {s} of image 1 {c}"),
    ("recolor", "paint the {n} {c}"),
    ("recolor", "change the {s} in image 1 to {c}"),
    ("background", "replace the background with {b}"),
    ("background", "the same picture on {b}"),
    ("background", "put image 1 on {b}"),
    ("background", "the shapes on {b}"),
    ("background", "turn the background {c}"),
    ("background", "make the background of image 1 {c}"),
    ("background", "set the color of the background to {c}"),
    ("background", "turn the background of image 1 {c}"),
    ("remove", "get rid of the {s}"),
    ("remove", "take the {s} out"),
    ("remove", "clear the {s} away"),
    ("remove", "i want the {s} out"),
    ("reshape", "swap the {s} for {t}"),
    ("reshape", "turn the {n} into {t}"),
    ("reshape", "change the {n} into {t}"),
    ("add", "insert {a} {p}"),
    ("add", "place {a} {p} as well"),
    ("add", "put in {a} {p}"),
    ("combine", "combine the {s} of image 1 with the background of image 2"),
    ("combine", "replace the background of image 1 with that of image 2"),
    ("combine", "put image 1 on the background from image 2"),
    ("colorlike", "the {s} of image 1 in the color of the {s} of image 2"),
    ("colorlike", "color the {s} of image 1 with the color of the {s} of image 2"),
    ("colorlike", "make the {s} of image 1 like the {s} of image 2 in color"),
];

/// Whether words can replace a placeholder.
fn fills(placeholder: char, words: &str) -> bool {
    let list: Vec<&str> = words.split(' ').collect();
    let (has_shape, has_background) = (list.iter().any(|w| SHAPES.contains(w)), list.contains(&"background"));
    let article = |words: &str| words.starts_with("a ") || words.starts_with("an ");
    match placeholder {
        'a' => article(words) && has_shape && !has_background && list.len() <= 5,
        'b' => article(words) && has_background && !has_shape,
        'p' => {
            let place = ["left", "right", "top", "bottom", "center", "centre", "middle"];
            place.iter().any(|p| list.contains(p)) && !has_shape && !has_background && list.len() <= 5
        }
        'n' => !article(words) && has_shape && !has_background && (2..=4).contains(&list.len()),
        's' => SHAPES.contains(&words),
        't' => article(words) && has_shape && list.len() == 2,
        'c' => words == "grey" || PALETTE.iter().any(|(name, _)| *name == words),
        _ => panic!("no placeholder {placeholder}"),
    }
}

/// Whether a text is a template filled in.
pub fn fits(template: &str, text: &str) -> bool {
    let mut start = text.chars();
    let lower: String = start.next().into_iter().flat_map(char::to_lowercase).chain(start).collect();
    rest_fits(template, lower.trim_end_matches('.'))
}

fn rest_fits(template: &str, text: &str) -> bool {
    let Some(at) = template.find('{') else { return template == text };
    let Some(text) = text.strip_prefix(&template[..at]) else { return false };
    let placeholder = template[at + 1..].chars().next().unwrap();
    // A placeholder ends where a word does.
    let ends = (1..=text.len()).filter(|end| text[*end..].chars().next().is_none_or(|c| " ,".contains(c)));
    ends.into_iter().any(|end| fills(placeholder, &text[..end]) && rest_fits(&template[at + 3..], &text[end..]))
}
