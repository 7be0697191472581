"""The words in the built-in model's prompts, for its kiln.json.

    python words.py           # writes them to models/builtin/kiln.json
    python words.py --check   # fails if that file has others

All wordings count, including those held out from training: they consist of words that the score also uses.
"""
import json
import pathlib
import random
import re
import sys

import world as W

FILE = pathlib.Path(__file__).resolve().parents[2] / "models/builtin/kiln.json"
DRAWS = ("one to three circles, squares, triangles, stars, hearts, rings, crosses or hexagons in twelve colors "
         "on plain, gradient or striped backgrounds")


def sentences():
    """Every sentence the world can make, piece by piece. Random choices are drawn often enough to cover all."""
    for templates in W.WORDINGS.values():
        yield from (re.sub(r"\{\w+\}", " ", template) for template in templates)
    yield from W.POLITE
    for places in W.PLACE_WORDS.values():
        yield from places
    rng = random.Random(0)
    for color in W.COLORS:
        for _ in range(200):
            for shape in W.SHAPES:
                yield W.noun(W.Obj(shape, color, rng.choice(W.SIZES), "left"), rng)
            for kind in W.BG_KINDS:
                yield W.bg_words(W.Background(kind, color, rng.choice(W.COLORS), rng.choice(W.DIRECTIONS)), rng)


def words():
    return sorted({word for text in sentences() for word in re.findall(r"[^\W_]+", text.lower())})


if __name__ == "__main__":
    old = FILE.read_text(encoding="utf-8")
    new = json.dumps(dict(json.loads(old), words=" ".join(words()), draws=DRAWS), indent=2)
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if new == old else f"{FILE} has other words")
    FILE.write_text(new, encoding="utf-8")
