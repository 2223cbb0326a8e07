"""Makes the tokenizers of the built-in models; all spell any word.

    python -m tools.make_tokenizers --model flux --build build [--start src/blockskip/builtin/flux]

`clip_tokenizer`: `CLIPTokenizer`, byte-level BPE with all 256 byte symbols, with and without the end-of-word mark, and
merges learned from the captions. `t5_tokenizer`: `T5Tokenizer`, unigram with every printable character of the European
scripts and the captions' words. `gemma_tokenizer`: `GemmaTokenizer`, BPE with bytes to fall back to.

With `--start` FLUX's tokenizers go on from those of a saved pipeline: old tokens keep their ids, words that are new in
the captions come after them. Learning merges breaks ties at random: what a training began with must be kept, so files
that are there are left alone.
"""

import argparse
import json
import math
import string
from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import CLIPTokenizer, GemmaTokenizer, T5Tokenizer

from tools.captions import BACKGROUNDS, OBJECTS, STYLES, article

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
    """Every full caption once, sizes and positions, and other common words."""
    names = [name for thing in OBJECTS for name in (thing.name, *thing.kinds)]
    found = [
        template.format(object=article(name), background=phrase)
        for style in STYLES.values()
        for template in style.templates
        for name in names
        for phrase in BACKGROUNDS.values()
    ]
    places = [
        f"a photo of {article(f'{size} {name}')} {position}"
        for name in names
        for size in ("small", "large")
        for position in ("on the left", "on the right")
    ]
    return [*found, *places, *[OTHER_WORDS] * 10]


def clip_tokenizer(old: CLIPTokenizer | None = None) -> CLIPTokenizer:
    """The pooled encoder's tokenizer; ids: 256 bytes, 256 bytes that end a word, merges, start, end, later merges."""
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
    specials = ["<|startoftext|>", "<|endoftext|>"]
    if old is not None:
        symbols = sorted(old.get_vocab(), key=old.get_vocab().get)
        known = [tuple(pair) for pair in json.loads(old.backend_tokenizer.to_str())["model"]["merges"]]
        merges, specials = [*known, *[pair for pair in merges if pair not in set(known)]], []
    symbols += [first + second for first, second in merges if first + second not in symbols]
    symbols += specials
    vocabulary = {symbol: number for number, symbol in enumerate(dict.fromkeys(symbols))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=LENGTH)


def t5_tokenizer(old: T5Tokenizer | None = None) -> T5Tokenizer:
    """The sequence encoder's tokenizer; ids 0, 1, 2 are `<pad>`, `</s>`, `<unk>`; no extra ids."""
    counts = Counter(word for sentence in sentences() for word in sentence.split())
    total = sum(counts.values())
    words = [(f"▁{word}", math.log(count / total)) for word, count in counts.most_common()]
    if old is not None:
        pieces = [(piece, score) for piece, score in json.loads(old.backend_tokenizer.to_str())["model"]["vocab"]]
        known = {piece for piece, _ in pieces}
        pieces += [(piece, score) for piece, score in words if piece not in known]
    else:
        ranges = (range(0x21, 0x250), range(0x370, 0x530), range(0x2010, 0x2028), range(0x20A0, 0x20C0))
        letters = [chr(code) for codes in ranges for code in codes if chr(code).isprintable() and chr(code) != " "]
        pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -6.0), *words]
        pieces += [(letter, -10.0) for letter in letters]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=LENGTH)


def gemma_tokenizer() -> GemmaTokenizer:
    """SANA's tokenizer; ids: five special tokens, 256 bytes, printable ASCII and "▁" for the space, merges."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    letters = [letter for letter in string.printable if not letter.isspace()]
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=[*letters, "▁"], min_frequency=5, show_progress=False
    )
    learner.train_from_iterator(sentences(), trainer)
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    tokens += [first + second for first, second in merges]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    return GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True, model_max_length=LENGTH)


def make_tokenizers(model: str, folder: Path, start: Path | None = None) -> None:
    """Writes the tokenizers of `flux` or `sana` into `folder`, unless they are there."""
    if (folder / "tokenizer").exists():
        return
    if model == "sana":
        source = start / "tokenizer" if start else None
        made = {"tokenizer": GemmaTokenizer.from_pretrained(source) if source else gemma_tokenizer()}
    else:
        old, old_2 = None, None
        if start:
            old = CLIPTokenizer.from_pretrained(start / "tokenizer")
            old_2 = T5Tokenizer.from_pretrained(start / "tokenizer_2")
        made = {"tokenizer_2": t5_tokenizer(old_2), "tokenizer": clip_tokenizer(old)}
    for name, tokenizer in made.items():
        tokenizer.save_pretrained(folder / name)


def main() -> None:
    """Makes the tokenizers of one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("flux", "sana"), default="flux")
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--start", type=Path, help="folder of a saved pipeline whose tokenizers to go on from")
    arguments = parser.parse_args()
    make_tokenizers(arguments.model, arguments.build / arguments.model, arguments.start)


if __name__ == "__main__":
    main()
