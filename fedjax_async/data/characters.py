"""Text as codes of characters: 0 is padding, 1 an unknown character, 2 to 81 the 80 characters of LEAF."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedjax_async.base.check import whole

PADDING, UNKNOWN = 0, 1
# in the order of LEAF (Caldas et al. 2018)
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
VOCABULARY = ("padding", "unknown", *LETTERS)  # of the codes 0, 1, ...

_CODES = np.full(128, UNKNOWN, np.uint8)
_CODES[[ord(letter) for letter in LETTERS]] = np.arange(2, len(VOCABULARY))


def codes(text: str) -> np.ndarray:
    """The code of each character: uint8 [n].

    >>> codes("a-Z~é").tolist()
    [55, 11, 52, 1, 1]
    """
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return np.where(points < len(_CODES), _CODES[np.minimum(points, len(_CODES) - 1)], UNKNOWN).astype(np.uint8)


def text_of(row: Sequence[int] | np.ndarray) -> str:
    """The text of a row of codes: unknown characters become U+FFFD, padding is left out.

    >>> text_of(codes("To be, or not"))
    'To be, or not'
    """
    return "".join("\ufffd" if code == UNKNOWN else VOCABULARY[code] for code in row if code != PADDING)


def rows(texts: Sequence[str], length: int) -> np.ndarray:
    """One row of codes per text, cut to ``length`` and padded: uint8 [M, length].

    >>> rows(["abc", "abcdef"], 4).tolist()
    [[55, 56, 57, 0], [55, 56, 57, 58]]
    """
    whole("length", length)
    found = np.zeros((len(texts), length), np.uint8)
    for row, text in zip(found, texts):
        own = codes(text[:length])
        row[: len(own)] = own
    return found


def windows(text: str, length: int) -> np.ndarray:
    """A text cut for next-character prediction: uint8 [M, length + 1], the inputs row[:-1] and the targets row[1:].

    A line break is put before the text, so that each of its characters is the target of exactly one position. The last
    row is padded.

    >>> [text_of(row) for row in windows("abcdefg", 3)]
    ['\\nabc', 'cdef', 'fg']
    """
    whole("length", length)
    stream = codes("\n" + text)
    count = max(0, -(-(len(stream) - 1) // length))
    padded = np.zeros(count * length + 1, np.uint8)
    padded[: len(stream)] = stream[: len(padded)]
    return padded[np.arange(count)[:, None] * length + np.arange(length + 1)]
