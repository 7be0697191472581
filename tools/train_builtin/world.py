"""The world of the built-in model: scenes, their images, their captions, and edits of them.

A scene is a background and 0..3 objects. A caption fixes the image almost completely: only a small jitter in position, size,
rotation and tint is free. That lets a very small model be exact in four steps.

Held out from training, by rule:
  * held_out_pair(color, shape): a quarter of the 96 (color, shape) pairs never occur in training;
  * held_out_wording(index): every fifth sentence template of each list is never used in training.
"""
import math
import random
from dataclasses import dataclass, field, replace

import numpy as np
import torch

SIZE = 256
SHAPES = ["circle", "square", "triangle", "star", "heart", "ring", "cross", "hexagon"]
MOON = "moon"     # the built-in model cannot draw it; lora.py teaches it
COLORS = ["red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink", "brown", "black", "white", "gray"]
RGB = {
    "red": (214, 40, 40), "orange": (245, 134, 20), "yellow": (250, 215, 45), "green": (46, 158, 68),
    "cyan": (60, 205, 215), "blue": (40, 80, 205), "purple": (128, 50, 170), "pink": (245, 150, 190),
    "brown": (120, 72, 36), "black": (24, 24, 28), "white": (246, 246, 246), "gray": (140, 142, 146),
}
# Colors never put next to each other in one scene (object against background, or stripes).
TOO_CLOSE = {frozenset(p) for p in [("brown", "black"), ("brown", "orange"), ("white", "gray"), ("yellow", "orange"),
                                    ("blue", "purple"), ("red", "orange"), ("red", "brown"), ("white", "pink")]}
SIZES = ["small", "medium", "large"]
RADIUS = {0: (30, 42, 58), 1: (30, 42, 58), 2: (28, 37, 48), 3: (26, 33, 41)}   # by number of objects
ANCHOR = {0: (62, 128, 194), 1: (62, 128, 194), 2: (58, 128, 198), 3: (54, 128, 202)}
# place -> (column, row) of a 3x3 grid
PLACES = {"left": (0, 1), "right": (2, 1), "top": (1, 0), "bottom": (1, 2), "center": (1, 1),
          "top left": (0, 0), "top right": (2, 0), "bottom left": (0, 2), "bottom right": (2, 2)}
BG_KINDS = ["plain", "gradient", "stripes"]
DIRECTIONS = ["vertical", "horizontal", "diagonal"]  # gradients use the first two


def held_out_pair(color, shape):
    """True for the quarter of (color, shape) pairs that training never shows. Names or indices."""
    c = color if isinstance(color, int) else COLORS.index(color)
    s = shape if isinstance(shape, int) else shape_index(shape)
    return (c + s + s // 4) % 4 == 0


def shape_index(shape):
    """The number of a shape of the model or of the example adapter."""
    return (SHAPES + [MOON]).index(shape)


def held_out_wording(index):
    """True for the fifth of sentence templates (by position in their list) that training never uses."""
    return index % 5 == 4


@dataclass
class Obj:
    shape: str
    color: str
    size: str
    place: str
    cx: float = 0.0
    cy: float = 0.0
    r: float = 0.0
    rot: float = 0.0
    tint: float = 0.0


@dataclass
class Background:
    kind: str
    color: str
    color2: str = ""
    direction: str = "vertical"


@dataclass
class Scene:
    bg: Background
    objs: list = field(default_factory=list)


# ---------------------------------------------------------------- sampling scenes

def clash(a, b):
    return a == b or frozenset((a, b)) in TOO_CLOSE


def bg_colors(bg):
    return [bg.color] + ([bg.color2] if bg.kind != "plain" else [])


def hidden(color, bg):
    """True if an object of that color would not stand out on the background."""
    if any(clash(color, b) for b in bg_colors(bg)):
        return True
    if bg.kind != "gradient":
        return False
    a, b, c = (np.array(RGB[k], float) for k in (bg.color, bg.color2, color))
    t = np.clip(np.dot(c - a, b - a) / np.dot(b - a, b - a), 0, 1)
    return float(np.linalg.norm(a + t * (b - a) - c)) < 95


def sample_bg(rng, avoid=(), kind=None):
    kind = kind or rng.choices(BG_KINDS, (0.6, 0.2, 0.2))[0]
    while True:
        a, b = rng.sample(COLORS, 2)
        if kind != "plain" and clash(a, b):
            continue
        d = rng.choice(DIRECTIONS if kind == "stripes" else DIRECTIONS[:2])
        bg = Background(kind, a, b if kind != "plain" else "", d if kind != "plain" else "vertical")
        if any(hidden(c, bg) for c in avoid):
            if rng.random() < 0.01:
                kind = "plain"
            continue
        return bg


def place_object(o, n, rng, jitter=1.0):
    o.r = RADIUS[n][SIZES.index(o.size)] * (1 + jitter * rng.uniform(-0.03, 0.03))
    col, row = PLACES[o.place]
    lo, hi = o.r * 1.08 + 6, SIZE - o.r * 1.08 - 6
    o.cx = min(max(ANCHOR[n][col] + jitter * rng.uniform(-3, 3), lo), hi)
    o.cy = min(max(ANCHOR[n][row] + jitter * rng.uniform(-3, 3), lo), hi)
    o.rot = jitter * rng.uniform(-0.04, 0.04)
    o.tint = jitter * rng.uniform(-0.02, 0.02)
    return o


def apart(a, b):
    return math.hypot(a.cx - b.cx, a.cy - b.cy) >= 1.06 * (a.r + b.r) + 3


def pick_pair(rng, held):
    """held: None any pair, False training pairs only, True held-out pairs only."""
    while True:
        c, s = rng.choice(COLORS), rng.choice(SHAPES)
        if held is None or held_out_pair(c, s) == held:
            return c, s


def sample_scene(rng, n=None, held=False, jitter=1.0, distinct_shapes=False, bg_kind=None):
    n = rng.choices((0, 1, 2, 3), (0.02, 0.34, 0.37, 0.27))[0] if n is None else n
    while True:
        bg = sample_bg(rng, kind=bg_kind)
        objs, ok = [], True
        layout = None
        if n == 2 and rng.random() < 0.4:    # the layouts of relations
            layout = ["left", "right"] if rng.random() < 0.5 else ["top", "bottom"]
        for i in range(n):
            for _ in range(30):
                c, s = pick_pair(rng, held)
                if hidden(c, bg) or any(o.color == c and o.shape == s for o in objs):
                    continue
                if any(o.color == c for o in objs) or (distinct_shapes and any(o.shape == s for o in objs)):
                    continue
                if layout:
                    p = layout[i]
                elif n == 1 and rng.random() < 0.35:
                    p = "center"
                else:
                    p = rng.choice(list(PLACES))
                o = place_object(Obj(s, c, rng.choice(SIZES), p), n, rng, jitter)
                if all(apart(o, q) for q in objs) and all(q.place != p for q in objs):
                    objs.append(o)
                    break
            else:
                ok = False
                break
        if ok:
            return Scene(bg, objs)


def with_moon(scene, rng, held=False):
    """The scene with a moon in place of one of its objects; None if there is no color for it."""
    i = rng.randrange(len(scene.objs))
    others = {o.color for o in scene.objs} - {scene.objs[i].color}
    fits = [c for c in COLORS if held_out_pair(c, MOON) == held and c not in others and not hidden(c, scene.bg)]
    if not fits:
        return None
    scene.objs[i].shape, scene.objs[i].color = MOON, rng.choice(fits)
    return scene


def moon_scene(rng, n=None, held=False, jitter=1.0):
    while True:
        n_objects = rng.choices((1, 2, 3), (0.6, 0.3, 0.1))[0] if n is None else n
        scene = with_moon(sample_scene(rng, n_objects, held=held, jitter=jitter), rng, held)
        if scene is not None:
            return scene


# ---------------------------------------------------------------- wording

PLACE_WORDS = {
    "left": ["on the left", "at the left", "on the left side", "to the left"],
    "right": ["on the right", "at the right", "on the right side", "to the right"],
    "top": ["at the top", "in the top center", "near the top", "up top"],
    "bottom": ["at the bottom", "in the bottom center", "near the bottom", "down at the bottom"],
    "center": ["in the center", "in the middle", "at the center", "in the centre"],
    "top left": ["at the top left", "in the top left corner", "in the upper left corner", "in the upper left"],
    "top right": ["at the top right", "in the top right corner", "in the upper right corner", "in the upper right"],
    "bottom left": ["at the bottom left", "in the bottom left corner", "in the lower left corner", "in the lower left"],
    "bottom right": ["at the bottom right", "in the bottom right corner", "in the lower right corner",
                     "in the lower right"],
}
BIG, LITTLE = ["large", "big", "large"], ["small", "little", "small"]


def grey(c, rng):
    return "grey" if c == "gray" and rng.random() < 0.4 else c


def article(words):
    return ("an " if words[0] in "aeiou" else "a ") + words


def noun(o, rng, art=True):
    size = {"small": rng.choice(LITTLE), "large": rng.choice(BIG), "medium": ""}[o.size]
    color = grey(o.color, rng)
    # Separated now and then: color and shape are two concepts, not one word for each pair.
    w = f"{size} {o.shape} in {color}" if rng.random() < 0.12 else f"{size} {color} {o.shape}"
    return article(w.strip()) if art else w.strip()


def where(o, rng):
    return rng.choice(PLACE_WORDS[o.place])


def bg_words(bg, rng, art=True):
    a, b = grey(bg.color, rng), grey(bg.color2, rng)
    if bg.kind == "plain":
        w = rng.choice([f"{a} background", f"{a} background", f"plain {a} background", f"solid {a} background"])
    elif bg.kind == "gradient":
        e1, e2 = (("top", "bottom") if bg.direction == "vertical" else ("left", "right"))
        w = rng.choice([f"gradient background from {a} at the {e1} to {b} at the {e2}",
                        f"background fading from {a} at the {e1} to {b} at the {e2}",
                        f"{a} to {b} {bg.direction} gradient background"])
    else:
        w = rng.choice([f"background of {bg.direction} {a} and {b} stripes",
                        f"background with {bg.direction} {a} and {b} stripes",
                        f"{bg.direction} {a} and {b} striped background"])
    return article(w) if art else w


# {a} objects with article, {p} places, {b} background with article. A template of list n has n objects.
WORDINGS = {
    0: ["{b}", "just {b}", "an empty {b_}", "only {b}", "nothing but {b}"],
    1: ["{a1} {p1} on {b}", "{a1} {p1}, {b}", "a picture of {a1} {p1} on {b}", "{a1} on {b}, {p1}",
        "{b} with {a1} {p1}", "on {b}, {a1} {p1}", "there is {a1} {p1} on {b}", "draw {a1} {p1} on {b}",
        "an image of {a1} {p1} against {b}", "{p1} there is {a1}, on {b}", "{a1} {p1} against {b}",
        "{a1} placed {p1} on {b}", "{p1}, {a1} on {b}", "show {a1} {p1} over {b}", "{b} and {a1} {p1}",
        "please draw {a1} {p1} on {b}", "a single {n1} {p1} on {b}", "one {n1} {p1}, {b}", "{a1} sits {p1} on {b}",
        "a simple drawing of {a1} {p1} on {b}",
        "a drawing of {a1} {p1} on {b}", "a simple picture of {a1} {p1}, {b}", "{a1} {p1} in front of {b}",
        "{a1} is {p1} on {b}", "{a1} {p1} and {b}", "{p1} {a1} on {b}", "{b}; {a1} {p1}", "just {a1} {p1} on {b}",
        "a simple image: {a1} {p1} on {b}", "a drawing with {a1} {p1} on {b}"],
    2: ["{a1} {p1} and {a2} {p2} on {b}", "{a1} {p1}, {a2} {p2}, {b}", "on {b}, {a1} {p1} and {a2} {p2}",
        "a picture of {a1} {p1} and {a2} {p2} on {b}", "{b} with {a1} {p1} and {a2} {p2}",
        "{p1} {a1} and {p2} {a2}, on {b}", "there is {a1} {p1} and {a2} {p2} on {b}",
        "draw {a1} {p1} and {a2} {p2} on {b}", "{a1} {p1} with {a2} {p2} on {b}",
        "{b}, {a1} {p1} and {a2} {p2}", "{a1} {p1} and {a2} {p2} against {b}",
        "two shapes on {b}: {a1} {p1} and {a2} {p2}", "{p1}, {a1}; {p2}, {a2}; {b}",
        "show {a1} {p1} and {a2} {p2} over {b}", "an image with {a1} {p1}, and {a2} {p2}, on {b}",
        "{a1} {p1} plus {a2} {p2} on {b}", "{a1} is {p1} and {a2} is {p2} on {b}",
        "please draw {a1} {p1} and {a2} {p2}, {b}", "{a1} sits {p1} and {a2} {p2} on {b}",
        "a simple drawing of {a1} {p1} and {a2} {p2} on {b}",
        "a drawing of {a1} {p1} and {a2} {p2} on {b}", "a simple picture of {a1} {p1} and {a2} {p2}, {b}",
        "{a1} {p1}, and {a2} {p2}, {b}", "{b} with {a1} {p1}, {a2} {p2}", "{a1} {p1} and then {a2} {p2} on {b}",
        "{p1} {a1}, {p2} {a2}, {b}", "{a1} {p1}; {a2} {p2}; {b}", "just {a1} {p1} and {a2} {p2} on {b}",
        "{b} and {a1} {p1} and {a2} {p2}", "a drawing with {a1} {p1} and {a2} {p2} on {b}"],
    3: ["{a1} {p1}, {a2} {p2} and {a3} {p3} on {b}", "{a1} {p1}, {a2} {p2}, {a3} {p3}, {b}",
        "on {b}, {a1} {p1}, {a2} {p2} and {a3} {p3}", "a picture of {a1} {p1}, {a2} {p2} and {a3} {p3} on {b}",
        "{b} with {a1} {p1}, {a2} {p2} and {a3} {p3}", "three shapes on {b}: {a1} {p1}, {a2} {p2} and {a3} {p3}",
        "there is {a1} {p1}, {a2} {p2} and {a3} {p3} on {b}", "draw {a1} {p1}, {a2} {p2} and {a3} {p3} on {b}",
        "{a1} {p1} and {a2} {p2} and {a3} {p3} on {b}", "{b}, {a1} {p1}, {a2} {p2}, {a3} {p3}",
        "{a1} {p1} with {a2} {p2} and {a3} {p3} on {b}", "{p1} {a1}, {p2} {a2} and {p3} {a3}, on {b}",
        "{a1} {p1}, {a2} {p2}, and {a3} {p3} against {b}", "{p1}, {a1}; {p2}, {a2}; {p3}, {a3}; {b}",
        "show {a1} {p1}, {a2} {p2} and {a3} {p3} over {b}",
        "a drawing of {a1} {p1}, {a2} {p2} and {a3} {p3} on {b}",
        "a simple picture of {a1} {p1}, {a2} {p2}, {a3} {p3}, {b}", "{b} with {a1} {p1}, {a2} {p2}, {a3} {p3}",
        "{a1} {p1}; {a2} {p2}; {a3} {p3}; {b}", "{a1} {p1}, {a2} {p2} plus {a3} {p3} on {b}"],
    # relations: two objects, left/right or top/bottom, and no place named
    "horizontal": ["{a1} to the left of {a2} on {b}", "{a2} to the right of {a1} on {b}", "{a1} left of {a2}, {b}",
                   "on {b}, {a1} to the left of {a2}", "{b} with {a2} right of {a1}",
        "{a2} right of {a1} on {b}", "{b} and {a1} left of {a2}", "a picture of {a1} to the left of {a2} on {b}",
        "{a1} is to the left of {a2} on {b}", "a drawing of {a2} to the right of {a1} on {b}",
        "{b} with {a1} to the left of {a2}", "on {b}, {a2} right of {a1}", "draw {a2} to the right of {a1} on {b}",
        "there is {a1} left of {a2}, {b}", "{b}, {a2} to the right of {a1}"],
    "vertical": ["{a1} above {a2} on {b}", "{a2} below {a1} on {b}", "{a1} over {a2}, {b}",
                 "on {b}, {a1} above {a2}", "{b} with {a2} under {a1}",
        "{a2} under {a1} on {b}", "{b} and {a1} above {a2}", "a picture of {a1} above {a2} on {b}",
        "{a1} is above {a2} on {b}", "a drawing of {a2} below {a1} on {b}", "{b} with {a1} over {a2}",
        "on {b}, {a2} under {a1}", "draw {a2} below {a1} on {b}", "there is {a1} above {a2}, {b}", "{b}, {a2} below {a1}"],
    # one object in the center, and no place named
    "center": ["{a1} on {b}", "{a1}, {b}", "a picture of {a1} on {b}", "{b} with {a1}", "draw {a1} on {b}",
        "a drawing of {a1} on {b}", "{b} and {a1}", "there is {a1} on {b}", "on {b}, {a1}",
        "a simple picture of {a1} on {b}", "{a1} against {b}", "please draw {a1} on {b}", "an image of {a1}, {b}",
        "show {a1} over {b}", "a simple drawing of {a1}, {b}"],
    # edits
    "recolor": ["make the {s1} {c}", "change the {s1} to {c}", "recolor the {s1} {c}", "turn the {n1} {c}",
                 "paint the {s1} {c}", "make the {n1} {c}", "change the color of the {s1} to {c}",
                 "the {s1} should be {c}", "color the {s1} {c}", "make the {s1} of image 1 {c}",
        "the {n1} should be painted {c}", "i want the {s1} in {c}", "give the {s1} the color {c}", "let the {s1} be {c}",
        "paint the {n1} {c}", "set the color of the {s1} to {c}", "turn the {s1} {c}", "use {c} for the {s1}",
        "paint the {s1} of image 1 {c}", "change the {s1} in image 1 to {c}"],
    "background": ["change the background to {b}", "put it on {b}", "make it {b}",
                   "change the background of image 1 to {b}", "replace the background with {b}",
                   "set the background to {b}", "use {b}", "give it {b}", "same shapes on {b}",
                   "the same picture on {b}",
        "i want {b}", "put the shapes on {b}", "let it be on {b}", "change it to {b}", "put image 1 on {b}",
        "turn the background into {b}", "the same image with {b}", "paint {b} behind it", "it should be on {b}",
        "the shapes on {b}"],
    "bgplain": ["make the background {c}", "change the background to {c}", "change the background of image 1 to {c}",
                "the background should be {c}", "turn the background {c}", "paint the background {c}",
                "set the background to {c}", "color the background {c}", "recolor the background {c}",
                "make the background of image 1 {c}",
        "use {c} for the background", "i want the background in {c}", "give it the background color {c}",
        "let the background be {c}", "set the color of the background to {c}", "the background of image 1 should be {c}",
        "put {c} behind it", "paint {c} behind the shapes", "change the color of the background to {c}",
        "turn the background of image 1 {c}"],
    "remove": ["remove the {s1}", "delete the {s1}", "erase the {s1}", "take away the {n1}", "get rid of the {s1}",
               "remove the {n1}", "without the {s1}", "remove the {s1} from image 1", "delete the {n1}",
               "take the {s1} out",
        "take out the {s1}", "the picture should be rid of the {s1}", "clear out the {s1}", "i want it without the {n1}",
        "clear the {s1} away", "delete the {s1} of image 1", "no more {s1}", "erase the {n1} from image 1",
        "get the {n1} out of it", "i want the {s1} out"],
    "reshape": ["turn the {s1} into {t}", "change the {s1} to {t}", "replace the {s1} with {t}",
                "make the {s1} {t}", "swap the {s1} for {t}",
        "put {t} in place of the {s1}", "the {s1} should be {t}", "swap {t} in for the {s1}",
        "i want {t} and not the {s1}", "turn the {n1} into {t}", "let the {s1} be {t}",
        "replace the {n1} of image 1 with {t}", "make {t} out of the {s1}", "exchange the {s1} for {t}",
        "change the {n1} into {t}"],
    "add": ["add {a1} {p1}", "put {a1} {p1}", "add {a1} {p1} to image 1", "draw {a1} {p1} as well",
            "insert {a1} {p1}",
        "place {a1} {p1}", "there should be {a1} {p1} too", "i want {a1} {p1} as well", "insert into image 1 {a1} {p1}",
        "place {a1} {p1} as well", "draw {a1} {p1}", "also put {a1} {p1}", "with {a1} {p1} too", "add to it {a1} {p1}",
        "put in {a1} {p1}"],
    "combine": ["put the {s1} of image 1 on the background of image 2",
                "put the shape of image 1 on the background of image 2",
                "the {s1} from image 1 on the background from image 2",
                "place the shape from image 1 on the background of image 2",
                "combine the {s1} of image 1 with the background of image 2",
                "move the {s1} of image 1 onto the background of image 2", "use the background of image 2 for image 1",
                "change the background of image 1 to the background of image 2",
                "put the {n1} of image 1 on the background of image 2",
                "replace the background of image 1 with that of image 2",
        "the shapes of image 1 on the background from image 2", "combine image 1 with the background of image 2",
        "use the background of image 2 behind the {s1} of image 1", "image 1 with the background of image 2",
        "put image 1 on the background from image 2"],
    "colorlike": ["make the {s1} of image 1 the color of the {s2} of image 2",
                   "give the {s1} of image 1 the color of the {s2} in image 2",
                   "color the {s1} of image 1 like the {s2} of image 2",
                   "paint the {s1} in image 1 with the color of the {s2} in image 2",
                   "the {s1} of image 1 in the color of the {s2} of image 2",
        "the {s1} of image 1 should be like the {s2} of image 2",
        "use the color of the {s2} of image 2 for the {s1} of image 1",
        "let the {s1} of image 1 be in the color of the {s2} in image 2",
        "paint the {s1} of image 1 like the {s2} in image 2",
        "color the {s1} of image 1 with the color of the {s2} of image 2",
        "take the color of the {s2} of image 2 for the {s1} of image 1",
        "the {s1} should have the color of the {s2} of image 2",
        "turn the {s1} of image 1 into the color of the {s2} of image 2",
        "paint the {s1} with the color of the {s2} from image 2",
        "make the {s1} of image 1 like the {s2} of image 2 in color"],
}


POLITE = ["please ", "now ", "can you ", "could you please ", "i want you to ", "then ", "ok, ", "hey, ", "next, "]   # edits


def pick_wording(key, rng, held=False):
    """held: False training wordings, True held-out wordings, None any."""
    w = WORDINGS[key]
    idx = [i for i in range(len(w)) if held is None or held_out_wording(i) == held]
    return w[rng.choice(idx)]


def fill(template, rng, objs=(), bg=None, polite=0.0, **extra):
    d = dict(extra)
    for i, o in enumerate(objs, 1):
        d[f"a{i}"], d[f"n{i}"], d[f"p{i}"], d[f"s{i}"] = noun(o, rng), noun(o, rng, False), where(o, rng), o.shape
    if bg is not None:
        d["b"], d["b_"] = bg_words(bg, rng), bg_words(bg, rng, False)
    text = template.format(**d)
    if rng.random() < polite:
        text = rng.choice(POLITE) + text
    style = rng.random()
    if style < 0.25:
        text = text[0].upper() + text[1:] + ("." if rng.random() < 0.6 else "")
    elif style < 0.32:
        text += "."
    return text


def caption(scene, rng, held=False):
    objs = list(scene.objs)
    n = len(objs)
    key = n
    if n == 2:
        places = {o.place for o in objs}
        if rng.random() < 0.4 and places in ({"left", "right"}, {"top", "bottom"}):
            key = "horizontal" if "left" in places else "vertical"
            objs.sort(key=lambda o: o.place not in ("left", "top"))
            return fill(pick_wording(key, rng, held), rng, objs, scene.bg)
    if n == 1 and objs[0].place == "center" and rng.random() < 0.6:
        key = "center"
    rng.shuffle(objs)
    return fill(pick_wording(key, rng, held), rng, objs, scene.bg)


# ---------------------------------------------------------------- edits

EDITS1 = ["recolor", "background", "remove", "reshape", "add"]
EDITS2 = ["combine", "colorlike"]


def sample_edit(rng, kind=None, refs=1, held=False, jitter=1.0, held_wording=False):
    """Returns (kind, [reference scenes], target scene, instruction maker)."""
    kind = kind or (rng.choices(EDITS1, (0.25, 0.15, 0.2, 0.2, 0.2))[0] if refs == 1
                    else rng.choices(EDITS2, (0.6, 0.4))[0])
    W = lambda key: pick_wording(key, rng, held_wording)
    say = lambda *args, **kw: fill(*args, polite=0.0 if held_wording else 0.12, **kw)
    ok_pair = lambda c, s: held is None or held_out_pair(c, s) == held
    while True:
        n = rng.choices((1, 2, 3), (0.45, 0.35, 0.2))[0]
        if kind == "remove":
            n = rng.choice((2, 2, 3))
        if kind == "add":
            n = rng.choice((1, 1, 2))
        if kind == "combine":
            n = 1 if rng.random() < 0.7 else 2
        src = sample_scene(rng, n, held, jitter, distinct_shapes=True)
        i = rng.randrange(n)
        o = src.objs[i]
        others = [q for q in src.objs if q is not o]
        if kind == "recolor":
            cs = [c for c in COLORS if c != o.color and ok_pair(c, o.shape)
                  and not hidden(c, src.bg) and all(q.color != c for q in others)]
            if not cs:
                continue
            c = rng.choice(cs)
            new = replace(o, color=c)
            dst = Scene(src.bg, [new if q is o else q for q in src.objs])
            return kind, [src], dst, lambda: say(W(kind), rng, [o], c=grey(c, rng))
        if kind == "background":
            bg = sample_bg(rng, [q.color for q in src.objs])
            if bg == src.bg:
                continue
            dst = Scene(bg, src.objs)
            if bg.kind == "plain":
                return kind, [src], dst, lambda: (say(W("bgplain"), rng, [], c=grey(bg.color, rng))
                                                  if rng.random() < 0.6 else say(W(kind), rng, [], bg))
            return kind, [src], dst, lambda: say(W(kind), rng, [], bg)
        if kind == "remove":
            return kind, [src], Scene(src.bg, others), lambda: say(W(kind), rng, [o])
        if kind == "reshape":
            ss = [s for s in SHAPES if s != o.shape and ok_pair(o.color, s) and all(q.shape != s for q in others)]
            if not ss:
                continue
            s = rng.choice(ss)
            dst = Scene(src.bg, [replace(o, shape=s) if q is o else q for q in src.objs])
            return kind, [src], dst, lambda: say(W(kind), rng, [o], t=article(s))
        if kind == "add":
            for _ in range(20):
                c, s = pick_pair(rng, held)
                new = place_object(Obj(s, c, rng.choice(SIZES), rng.choice(list(PLACES))), n + 1, rng, jitter)
                if (not hidden(c, src.bg) and all(q.color != c and q.shape != s for q in src.objs)
                        and all(apart(new, q) for q in src.objs)):
                    return kind, [src], Scene(src.bg, src.objs + [new]), lambda: say(W(kind), rng, [new])
            continue
        if kind == "combine":
            other = sample_scene(rng, rng.choices((0, 1, 2), (0.5, 0.35, 0.15))[0], held, jitter)
            if any(hidden(q.color, other.bg) for q in src.objs):
                continue
            dst = Scene(other.bg, src.objs)
            if n == 1:
                return kind, [src, other], dst, lambda: say(W(kind), rng, [o])
            return kind, [src, other], dst, lambda: rng.choice([
                "use the background of image 2 for image 1", "put the shapes of image 1 on the background of image 2",
                "change the background of image 1 to the background of image 2"])
        if kind == "colorlike":
            other = sample_scene(rng, rng.choice((1, 2)), held, jitter, distinct_shapes=True)
            q2 = rng.choice(other.objs)
            c = q2.color
            if (c == o.color or not ok_pair(c, o.shape) or hidden(c, src.bg)
                    or any(q.color == c for q in others)):
                continue
            dst = Scene(src.bg, [replace(o, color=c) if q is o else q for q in src.objs])
            return kind, [src, other], dst, lambda: say(W(kind), rng, [o, q2])
        raise ValueError(kind)


# ---------------------------------------------------------------- images

OBJ_F, BG_F = 9, 8


def describe(scenes):
    """Scenes -> (objects [B,3,9], backgrounds [B,8]) float32 arrays for render()."""
    ob = np.zeros((len(scenes), 3, OBJ_F), np.float32)
    bg = np.zeros((len(scenes), BG_F), np.float32)
    ob[:, :, 3] = 1.0
    for i, s in enumerate(scenes):
        for j, o in enumerate(s.objs):
            rgb = [min(max(v / 255 * (1 + o.tint), 0), 1) for v in RGB[o.color]]
            ob[i, j] = [shape_index(o.shape) + 1, o.cx, o.cy, o.r, o.rot, *rgb, 1]
        b = s.bg
        bg[i] = [BG_KINDS.index(b.kind), DIRECTIONS.index(b.direction), *[v / 255 for v in RGB[b.color]],
                 *[v / 255 for v in RGB[b.color2 or b.color]]]
    return ob, bg


def _box(x, y, hx, hy):
    qx, qy = x.abs() - hx, y.abs() - hy
    return (qx.clamp(min=0) ** 2 + qy.clamp(min=0) ** 2).sqrt() + torch.maximum(qx, qy).clamp(max=0)


def _sdf(shape, x, y):
    """Signed distance in units of the object's radius; x right, y up."""
    r = (x * x + y * y + 1e-12).sqrt()
    d = r - 0.92                                                                   # circle
    d = torch.where(shape == 2, _box(x, y, 0.82, 0.82), d)                         # square
    k, h = math.sqrt(3.0), 0.98                                                    # triangle
    tx, ty = x.abs() - h, y + 0.2 + h / k
    m = tx + k * ty > 0
    ux, uy = torch.where(m, (tx - k * ty) / 2, tx), torch.where(m, (-k * tx - ty) / 2, ty)
    ux = ux - ux.clamp(-2 * h, 0)
    d = torch.where(shape == 3, -(ux * ux + uy * uy + 1e-12).sqrt() * torch.sign(uy), d)
    R, rf = 1.1, 0.46                                                              # star
    c1, s1 = 0.809016994375, -0.587785252292
    px, py = x.abs(), y + 0.05
    t = 2 * (c1 * px + s1 * py).clamp(min=0)
    px, py = px - t * c1, py - t * s1
    t = 2 * (-c1 * px + s1 * py).clamp(min=0)
    px, py = (px + t * c1).abs(), py - t * s1 - R
    bx, by = rf * -s1, rf * c1 - 1
    hh = ((px * bx + py * by) / (bx * bx + by * by)).clamp(0, R)
    qx, qy = px - bx * hh, py - by * hh
    d = torch.where(shape == 4, (qx * qx + qy * qy + 1e-12).sqrt() * torch.sign(py * bx - px * by), d)
    z = 1.72                                                                       # heart
    hx, hy = x.abs() / z, y / z + 0.56
    up = ((hx - 0.25) ** 2 + (hy - 0.75) ** 2 + 1e-12).sqrt() - math.sqrt(2) / 4
    w = 0.5 * (hx + hy).clamp(min=0)
    lo = torch.minimum(hx ** 2 + (hy - 1) ** 2, (hx - w) ** 2 + (hy - w) ** 2)
    d = torch.where(shape == 5, torch.where(hx + hy > 1, up, (lo + 1e-12).sqrt() * torch.sign(hx - hy)) * z, d)
    d = torch.where(shape == 6, (r - 0.72).abs() - 0.22, d)                        # ring
    d = torch.where(shape == 7, torch.minimum(_box(x, y, 0.95, 0.32), _box(x, y, 0.32, 0.95)), d)  # cross
    kx, ky, kz, a = -0.866025404, 0.5, 0.577350269, 0.86                           # hexagon
    ex, ey = x.abs(), y.abs()
    t = 2 * (kx * ex + ky * ey).clamp(max=0)
    ex, ey = ex - t * kx, ey - t * ky
    ex, ey = ex - ex.clamp(-kz * a, kz * a), ey - a
    d = torch.where(shape == 8, (ex * ex + ey * ey + 1e-12).sqrt() * torch.sign(ey), d)
    bite = ((x - 0.58) ** 2 + y * y + 1e-12).sqrt() - 0.74                         # moon
    return torch.where(shape == 9, torch.maximum(((x - 0.12) ** 2 + y * y + 1e-12).sqrt() - 0.92, -bite), d)


def layer(o, size=SIZE):
    """One object per image, o [B,9] -> its coverage, its shadow's factor, its light, and height, each [B,size,size]."""
    g = torch.arange(size, device=o.device, dtype=torch.float32) + 0.5
    X, Y = g.view(1, 1, size), g.view(1, size, 1)
    col = lambda i: o[:, i].view(-1, 1, 1)
    shape, r, on = col(0), col(3), col(8)
    cs, sn = torch.cos(col(4)), torch.sin(col(4))

    def dist(dx, dy):
        px, py = (X - col(1) - dx) / r, (col(2) + dy - Y) / r
        return _sdf(shape, cs * px + sn * py, -sn * px + cs * py) * r, px, py

    ds, _, _ = dist(2.0, 3.5)
    shade = 1 - 0.20 * on * ((4.5 - ds) / 9).clamp(0, 1) ** 2
    d, px, py = dist(0.0, 0.0)
    alpha = on * (0.5 - d).clamp(0, 1)
    light = 1 + 0.07 * (0.8 * py - 0.5 * px).clamp(-1, 1) - 0.06 * (1 + d / 3).clamp(0, 1)
    return alpha, shade, light, (0.02 * py).expand_as(alpha)


def render(ob, bg, size=SIZE, layer=layer):
    """ob [B,3,9], bg [B,8] -> images [B,3,size,size] in [-1,1]; anti-aliased, lightly shaded."""
    g = torch.arange(size, device=ob.device, dtype=torch.float32) + 0.5
    X, Y = g.view(1, 1, size), g.view(1, size, 1)
    kind, dirn = bg[:, 0].view(-1, 1, 1), bg[:, 1].view(-1, 1, 1)
    grad = torch.where(dirn == 0, Y, X).expand(-1, size, size) / size
    # vertical stripes vary along x, horizontal along y, diagonal along (x+y)/sqrt 2; period 64 px
    u = torch.where(dirn == 0, X.expand(1, size, size), torch.where(dirn == 1, Y.expand(1, size, size), (X + Y) * 0.70710678))
    tri = ((u / 64) % 1.0 - 0.5).abs() - 0.25                                   # >0: the first color
    stripe = (0.5 - tri * 64).clamp(0, 1)
    mix = torch.where(kind == 1, grad, torch.where(kind == 2, stripe, torch.zeros_like(grad)))[:, None]
    rgb = lambda t, i: t[:, i:i + 3, None, None]
    img = torch.lerp(rgb(bg, 2), rgb(bg, 5), mix)
    for j in range(3):
        alpha, shade, light, lift = (t[:, None] for t in layer(ob[:, j].contiguous()))
        img = torch.lerp(img * shade, (rgb(ob[:, j], 5) * light + lift).clamp(0, 1), alpha)
    return img.clamp(0, 1) * 2 - 1


def render_scenes(scenes, device="cpu"):
    ob, bg = describe(scenes)
    return render(torch.from_numpy(ob).to(device), torch.from_numpy(bg).to(device))


def to_png(img, path):
    """[3,H,W] in [-1,1] -> PNG file, without any imaging library."""
    import struct
    import zlib
    a = ((img.detach().float().cpu().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    h, w, _ = a.shape
    raw = b"".join(b"\0" + a[y].tobytes() for y in range(h))
    chunk = lambda t, d: struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d))
    with open(path, "wb") as f:
        f.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, 8, 2, 0, 0, 0))
                + chunk(b"IDAT", zlib.compress(raw, 6)) + chunk(b"IEND", b""))


def grid(imgs, cols):
    """[N,3,H,W] -> one [3,..,..] image with thin white gaps."""
    n, _, h, w = imgs.shape
    rows = (n + cols - 1) // cols
    out = torch.ones(3, rows * (h + 4), cols * (w + 4))
    for i in range(n):
        y, x = (i // cols) * (h + 4), (i % cols) * (w + 4)
        out[:, y:y + h, x:x + w] = imgs[i].detach().float().cpu()
    return out


if __name__ == "__main__":
    import sys
    torch.set_num_threads(1)
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    scenes = [sample_scene(rng, held=None) for _ in range(24)]
    for s in scenes[:8]:
        print(caption(s, rng))
    to_png(grid(render_scenes(scenes), 6), sys.argv[1] if len(sys.argv) > 1 else "world.png")
