"""What the built-in model knows: its objects, its backgrounds, and the captions that name them."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Thing:
    """One object: its name, the file stem of its sprite (Unicode code point), and the words for its kind."""

    name: str
    sprite: str
    kinds: tuple[str, ...]


OBJECTS = (
    Thing("apple", "1f34e", ("fruit", "food")),
    Thing("banana", "1f34c", ("fruit", "food")),
    Thing("strawberry", "1f353", ("fruit", "food")),
    Thing("watermelon", "1f349", ("fruit", "food")),
    Thing("pumpkin", "1f383", ("vegetable", "food")),
    Thing("carrot", "1f955", ("vegetable", "food")),
    Thing("mushroom", "1f344", ("plant",)),
    Thing("hamburger", "1f354", ("food",)),
    Thing("pizza", "1f355", ("food",)),
    Thing("donut", "1f369", ("food",)),
    Thing("cupcake", "1f9c1", ("food",)),
    Thing("dog", "1f436", ("animal",)),
    Thing("cat", "1f431", ("animal",)),
    Thing("panda", "1f43c", ("animal",)),
    Thing("pig", "1f437", ("animal",)),
    Thing("frog", "1f438", ("animal",)),
    Thing("rabbit", "1f430", ("animal",)),
    Thing("penguin", "1f427", ("animal",)),
    Thing("elephant", "1f418", ("animal",)),
    Thing("chick", "1f425", ("animal",)),
    Thing("butterfly", "1f98b", ("animal",)),
    Thing("car", "1f697", ("vehicle",)),
    Thing("bus", "1f68c", ("vehicle",)),
    Thing("tractor", "1f69c", ("vehicle",)),
    Thing("rocket", "1f680", ("vehicle",)),
    Thing("sailboat", "26f5", ("vehicle",)),
    Thing("teddy bear", "1f9f8", ("toy",)),
    Thing("soccer ball", "26bd", ("toy",)),
    Thing("robot", "1f916", ("toy",)),
    Thing("umbrella", "2602-fe0f", ("thing",)),
    Thing("sunflower", "1f33b", ("plant",)),
    Thing("cactus", "1f335", ("plant",)),
)

BACKGROUNDS = {
    "beach": "on the beach",
    "meadow": "in a meadow",
    "snow": "in the snow",
    "night": "under the night sky",
    "bricks": "in front of a brick wall",
    "wood": "on a wooden table",
    "desert": "in the desert",
    "forest": "in the forest",
    "sea": "on the sea",
    "checkered": "on a checkered floor",
    "pink": "on pink paper",
    "sunset": "at sunset",
}

TEMPLATES = ("a photo of {object} {background}", "a picture of {object} {background}", "{object} {background}")


def article(words: str) -> str:
    """`words` with "a" or "an" before them."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def rare_word(rng: np.random.Generator) -> str:
    """Three or four random letters, a name without meaning, so that "sks animal" draws some animal from the start."""
    return "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), int(rng.integers(3, 5))))


def caption(rng: np.random.Generator, thing: Thing, background: str) -> str:
    """A random caption: mostly full, sometimes the kind in place of the name (with or without a rare
    word), without the background, or empty.
    """
    if rng.random() < 0.1:
        return ""
    words = thing.name
    if rng.random() < 0.18:
        words = str(rng.choice(thing.kinds))
        if rng.random() < 0.4:
            words = f"{rare_word(rng)} {words}"
    template = str(rng.choice(TEMPLATES, p=(0.7, 0.1, 0.2)))
    phrase = BACKGROUNDS[background] if rng.random() < 0.88 else ""
    rare = " " in words and words != thing.name
    return template.format(object=words if rare else article(words), background=phrase).strip()
