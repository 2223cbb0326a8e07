"""What no training picture shows: the objects of the 24 subjects, by code point, and sprites that look like them."""

SUBJECT_SPRITES = {
    "dinosaur": "1f996",
    "parrot": "1f99c",
    "unicorn": "1f984",
    "owl": "1f989",
    "crab": "1f980",
    "hedgehog": "1f994",
    "camera": "1f4f7",
    "scooter": "1f6f5",
    "fire engine": "1f692",
    "pretzel": "1f968",
    "nesting doll": "1fa86",
    "hibiscus": "1f33a",
    "dragon": "1f432",
    "flamingo": "1f9a9",
    "giraffe": "1f992",
    "hamster": "1f439",
    "duck": "1f986",
    "snail": "1f40c",
    "teapot": "1fad6",
    "crown": "1f451",
    "ship": "1f6a2",
    "taco": "1f32e",
    "kite": "1fa81",
    "rose": "1f339",
}
"""Name and sprite of each subject: twelve for development, then the twelve of the final test."""

RELATIVES = (
    "1f995", "1f4f8", "1f409", "1f6f3-fe0f", "26f4-fe0f", "1f940", "1f6fa", "1f6f4", "1f478", "1f934",
)  # fmt: skip
"""Other sprites of the same things: sauropod, camera with flash, dragon, ferries, wilted flower, scooters, crowns."""

HELD_OUT_SPRITES = (*SUBJECT_SPRITES.values(), *RELATIVES)
