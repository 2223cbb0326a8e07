"""Makes the two tokenizers of the built-in model; both spell any word.

`clip_tokenizer`: `CLIPTokenizer`, byte-level BPE with all 256 byte symbols, with and without the end-of-word mark, and
merges learned from the captions. `t5_tokenizer`: `T5Tokenizer`, unigram with every printable character of the European
scripts and the captions' words.
"""

import json
import math
from collections import Counter

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTokenizer, T5Tokenizer

from tools.captions import BACKGROUNDS, OBJECTS, TEMPLATES, article

LENGTH = 32
"""Tokens of a prompt, padded."""

OTHER_WORDS = (
    "the photo picture image drawing of a an with and on in at under over next to near sks person man "
    "woman child girl boy animal dog cat bird fish toy thing object food drink fruit vegetable plant "
    "flower tree vehicle dinosaur parrot unicorn horse bear monster house red orange yellow green blue "
    "purple pink brown black white grey big small old new happy style water sand sky sun moon star floor "
    "table "
)


def sentences() -> list[str]:
    """Every full caption once, and other common words."""
    names = [name for thing in OBJECTS for name in (thing.name, *thing.kinds)]
    found = [
        template.format(object=article(name), background=phrase)
        for template in TEMPLATES
        for name in names
        for phrase in BACKGROUNDS.values()
    ]
    return [*found, *[OTHER_WORDS] * 10]


def clip_tokenizer() -> CLIPTokenizer:
    """The pooled encoder's tokenizer; ids: 256 bytes, 256 bytes that end a word, merges, start, end."""
    end = "</w>"
    learner = Tokenizer(models.BPE(end_of_word_suffix=end))
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=alphabet, end_of_word_suffix=end, min_frequency=5, show_progress=False
    )
    learner.train_from_iterator(sentences(), trainer)
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    symbols = [*alphabet, *[letter + end for letter in alphabet]]
    symbols += [first + second for first, second in merges if first + second not in symbols]
    symbols += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {symbol: number for number, symbol in enumerate(dict.fromkeys(symbols))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=LENGTH)


def t5_tokenizer() -> T5Tokenizer:
    """The sequence encoder's tokenizer; ids 0, 1, 2 are `<pad>`, `</s>`, `<unk>`; no extra ids."""
    counts = Counter(word for sentence in sentences() for word in sentence.split())
    total = sum(counts.values())
    ranges = (range(0x21, 0x250), range(0x370, 0x530), range(0x2010, 0x2028), range(0x20A0, 0x20C0))
    letters = [chr(code) for codes in ranges for code in codes if chr(code).isprintable() and not chr(code).isspace()]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -6.0)]
    pieces += [(f"▁{word}", math.log(count / total)) for word, count in counts.most_common()]
    pieces += [(letter, -10.0) for letter in letters]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=LENGTH)
