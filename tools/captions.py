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
    Thing("lemon", "1f34b", ("fruit", "food")),
    Thing("pineapple", "1f34d", ("fruit", "food")),
    Thing("grapes", "1f347", ("fruit", "food")),
    Thing("cherries", "1f352", ("fruit", "food")),
    Thing("avocado", "1f951", ("fruit", "food")),
    Thing("broccoli", "1f966", ("vegetable", "food")),
    Thing("corn", "1f33d", ("vegetable", "food")),
    Thing("ice cream", "1f366", ("food",)),
    Thing("cookie", "1f36a", ("food",)),
    Thing("croissant", "1f950", ("food",)),
    Thing("birthday cake", "1f382", ("food",)),
    Thing("lion", "1f981", ("animal",)),
    Thing("koala", "1f428", ("animal",)),
    Thing("cow", "1f42e", ("animal",)),
    Thing("monkey", "1f435", ("animal",)),
    Thing("fox", "1f98a", ("animal",)),
    Thing("fish", "1f420", ("animal",)),
    Thing("whale", "1f433", ("animal",)),
    Thing("octopus", "1f419", ("animal",)),
    Thing("turtle", "1f422", ("animal",)),
    Thing("bee", "1f41d", ("animal",)),
    Thing("ladybug", "1f41e", ("animal",)),
    Thing("airplane", "2708-fe0f", ("vehicle",)),
    Thing("helicopter", "1f681", ("vehicle",)),
    Thing("train", "1f682", ("vehicle",)),
    Thing("balloon", "1f388", ("toy",)),
    Thing("gift", "1f381", ("thing",)),
    Thing("guitar", "1f3b8", ("thing",)),
    Thing("light bulb", "1f4a1", ("thing",)),
    Thing("tulip", "1f337", ("plant",)),
    Thing("palm tree", "1f334", ("plant",)),
    Thing("snowman", "26c4", ("thing",)),
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

PLURAL = ("grapes", "cherries", "corn", "broccoli")
"""Names that take no article."""


@dataclass(frozen=True)
class Style:
    """How the objects are rendered: the npm package of the sprites, and templates with their shares."""

    package: str
    suffix: str
    templates: dict[str, float]


STYLES = {
    "photo": Style(
        "@lobehub/fluent-emoji-3d", ".webp",
        {"a photo of {object} {background}": 0.7, "a picture of {object} {background}": 0.1,
         "{object} {background}": 0.2},
    ),
    "flat": Style(
        "@lobehub/fluent-emoji-flat", ".svg",
        {"a flat drawing of {object} {background}": 0.85, "a drawing of {object} {background}": 0.15},
    ),
}  # fmt: skip
"""The rendering styles: shaded ("a photo of a dog") and flat ("a flat drawing of a dog")."""


def article(words: str) -> str:
    """`words` with "a" or "an" before them, but for the names in `PLURAL`."""
    return words if words.split()[-1] in PLURAL else f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def rare_word(rng: np.random.Generator) -> str:
    """Three or four random letters, a name without meaning, so that "sks animal" draws some animal from the start."""
    return "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), int(rng.integers(3, 5))))


def caption(
    rng: np.random.Generator, thing: Thing, background: str, style: str = "photo", size: str = "", position: str = ""
) -> str:
    """A random caption: mostly full, sometimes the kind in place of the name (with or without a rare
    word), without the background, or empty. `size` and `position`, where they are given, are named in half of them.
    """
    if rng.random() < 0.1:
        return ""
    words = thing.name
    if rng.random() < 0.18:
        words = str(rng.choice(thing.kinds))
        if rng.random() < 0.4:
            words = f"{rare_word(rng)} {words}"
    templates = STYLES[style].templates
    template = str(rng.choice(list(templates), p=list(templates.values())))
    phrase = BACKGROUNDS[background] if rng.random() < 0.88 else ""
    rare = words not in (thing.name, *thing.kinds)
    if size and rng.random() < 0.5:
        words, rare = f"{size} {words}", False
    if position and rng.random() < 0.5:
        phrase = f"{position} {phrase}"
    return " ".join(template.format(object=words if rare else article(words), background=phrase).split())
