"""Text to token ids: WordPiece with a BERT-type vocabulary; the reader of 20 Newsgroups in the letters-only variant.

Source: Wu et al., "Google's neural machine translation system" (2016), section 4.1, in the form of BERT's
uncased models (Devlin et al., 2019).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from fedjax_async.base.check import require, whole
from fedjax_async.data.arrays import Arrays

LONGEST = 100  # characters of a word; longer words become [UNK]
CHINESE = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)

Tokenizer = Callable[[str], list[int]]


def read_vocabulary(content: bytes) -> dict[str, int]:
    """Token -> id from a ``vocab.txt``: one token per line, the id is the line's number from 0."""
    try:
        tokens = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"vocabulary = '{len(content)} bytes': must be text in UTF-8 (byte {error.start})") from error
    tokens = [token.removesuffix("\r") for token in (tokens[:-1] if tokens[-1] == "" else tokens)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    for special in ("[PAD]", "[UNK]", "[CLS]", "[SEP]"):
        require(special in vocabulary, "vocabulary", f"{len(vocabulary)} tokens", f"one with {special}")
    require(vocabulary["[PAD]"] == 0, "[PAD]", vocabulary["[PAD]"], "0, the id that models treat as padding")
    return vocabulary


def wordpiece(vocabulary: dict[str, int]) -> Tokenizer:
    """``tokenize(text) -> ids``: the text is lower-cased, accents are removed, no [CLS], [SEP] or padding is added.

    Each word is cut from the left into the longest pieces in the vocabulary; pieces after the first have the form
    ``##piece``. A word that cannot be cut in this way, or has more than 100 characters, becomes [UNK].

    >>> ids = read_vocabulary(b"[PAD]\\n[UNK]\\n[CLS]\\n[SEP]\\nun\\n##able\\n##a\\n!\\n")
    >>> wordpiece(ids)("Unable, UNÁ! table")
    [4, 5, 1, 4, 6, 7, 1]
    """
    known: dict[str, list[int]] = {}  # a cache: most words of a large text occur many times
    unknown = [vocabulary["[UNK]"]]

    def pieces(word: str) -> list[int]:
        if len(word) > LONGEST:
            return unknown
        ids, at = [], 0
        while at < len(word):
            prefix = "##" if at else ""
            end = next((n for n in range(len(word), at, -1) if prefix + word[at:n] in vocabulary), None)
            if end is None:
                return unknown
            ids.append(vocabulary[prefix + word[at:end]])
            at = end
        return ids

    def tokenize(text: str) -> list[int]:
        ids: list[int] = []
        for word in words(text):
            if word not in known:
                known[word] = pieces(word)
            ids += known[word]
        return ids

    return tokenize


def words(text: str) -> Iterator[str]:
    """Words and single punctuation marks of a text, in lower case, without accents and control characters."""
    if not text.isascii():
        text = unicodedata.normalize("NFD", "".join(map(_spaced, text)))
        # character by character: lower() of a whole word turns a sigma at its end into another letter
        text = "".join(c.lower() for c in text if unicodedata.category(c) != "Mn")
    if not text.isprintable():
        text = "".join(c for c in text if not _is_control(c))
    for chunk in text.lower().split():
        if chunk.isalnum():
            yield chunk
        else:
            yield from "".join(f" {c} " if _is_mark(c) else c for c in chunk).split()


def encode(tokenize: Tokenizer, texts: Sequence[str], vocabulary: dict[str, int], length: int) -> np.ndarray:
    """Token ids [CLS] ... [SEP] of each text, cut to ``length`` and padded with 0: int32 [M, length]."""
    whole("length", length, 2)
    rows = np.zeros((len(texts), length), np.int32)
    for row, text in zip(rows, texts):
        ids = [vocabulary["[CLS]"], *tokenize(text)[: length - 2], vocabulary["[SEP]"]]
        row[: len(ids)] = ids
    return rows


def shortened(rows: np.ndarray, length: int) -> np.ndarray:
    """Rows of :func:`encode`, shortened to what it returns for the smaller ``length``: int32 [M, length].

    >>> shortened(np.array([[2, 7, 8, 9, 3], [2, 7, 3, 0, 0]]), 4).tolist()
    [[2, 7, 8, 3], [2, 7, 3, 0]]
    """
    whole("max_length", length, 3, rows.shape[1])
    short = np.array(rows[:, :length], np.int32)
    cut = rows[:, length - 1] != 0  # longer texts: [SEP] moves to the last position
    ends = rows[np.arange(len(rows)), (rows != 0).sum(axis=1) - 1]
    short[cut, -1] = ends[cut]
    return short


def _spaced(character: str) -> str:
    """A Chinese character with a space on either side, any other unchanged."""
    code = ord(character)
    return f" {character} " if any(low <= code <= high for low, high in CHINESE) else character


def _is_mark(character: str) -> bool:
    """Whether a character is punctuation; every ASCII symbol counts."""
    signs = character.isascii() and character.isprintable() and not character.isalnum()
    return signs or unicodedata.category(character).startswith("P")


def _is_control(character: str) -> bool:
    """Whether a character is a control, format, private or replacement character, other than white space."""
    control = unicodedata.category(character) in ("Cc", "Cf", "Co") and character not in "\t\n\r"
    return control or character == "\ufffd"


GROUPS = (
    "alt.atheism",
    "comp.graphics",
    "comp.os.ms-windows.misc",
    "comp.sys.ibm.pc.hardware",
    "comp.sys.mac.hardware",
    "comp.windows.x",
    "misc.forsale",
    "rec.autos",
    "rec.motorcycles",
    "rec.sport.baseball",
    "rec.sport.hockey",
    "sci.crypt",
    "sci.electronics",
    "sci.med",
    "sci.space",
    "soc.religion.christian",
    "talk.politics.guns",
    "talk.politics.mideast",
    "talk.politics.misc",
    "talk.religion.misc",
)
LENGTH = 512  # the tokens kept of a document: BERT-type encoders have 512 positions


def from_tables(files: Mapping[str, bytes]) -> Arrays:
    """Token ids uint16 [M, 512] and labels int32 [M] from the two tables and a ``vocab.txt``."""
    vocabulary = read_vocabulary(files["vocab.txt"])
    require(len(vocabulary) <= 2**16, "vocabulary", f"{len(vocabulary)} tokens", "at most 65,536 tokens")
    tokenize = wordpiece(vocabulary)
    arrays = []
    for name in ("20newsgroups-train.tab", "20newsgroups-test.tab"):
        labels, texts = read_table(files[name])
        arrays += [encode(tokenize, texts, vocabulary, LENGTH).astype(np.uint16), labels]
    return Arrays(*arrays)


def read_table(content: bytes) -> tuple[np.ndarray, list[str]]:
    """Labels int32 [M] and documents of an Orange table: three header lines, then lines ``group<TAB>text``."""
    rows = content.decode("utf-8").split("\n")[3:]
    pairs = [row.removesuffix("\r").split("\t") for row in rows if row.strip()]
    good = all(len(pair) == 2 and pair[0] in GROUPS for pair in pairs)
    require(good and len(pairs) > 0, "table", f"{len(pairs)} rows", "rows of a newsgroup, a tab and a text")
    return np.array([GROUPS.index(group) for group, _ in pairs], np.int32), [text for _, text in pairs]
