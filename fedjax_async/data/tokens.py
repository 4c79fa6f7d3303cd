"""Texts of your own as token ids for encoders of BERT's type: :func:`tokenize`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_async.base.check import path, require, whole
from fedjax_async.base.home import PRETRAINED_VERSIONS, require_pretrained, resolve_data_dir
from fedjax_async.base.inputs import reading
from fedjax_async.data.archive import read_files
from fedjax_async.data.arrays import file_hash
from fedjax_async.data.checking import type_name
from fedjax_async.data.published import PRETRAINED
from fedjax_async.data.text import encode, read_vocabulary, wordpiece

VOCABULARY = "vocab.txt"
SHORTEST = 3  # tokens of a row: [CLS], one of the text, [SEP]


def tokenize(
    texts: Sequence[str],
    length: int = 128,
    *,
    vocabulary: str | os.PathLike[str] = "minilm",
    data_dir: str | os.PathLike[str] | None = None,
) -> np.ndarray:
    """Token ids of texts, int32 [M, length], as ``minilm_lora`` reads them: [CLS], WordPiece ids, [SEP], zeros.

    Texts are lower-cased, accents are removed, and each word is cut from the left into the longest pieces that the
    vocabulary has (see ``data.text``). Longer texts are cut to ``length - 2`` tokens.

    Args:
      texts: M strings.
      length: tokens of a row, at least 3 (MiniLM reads at most 512).
      vocabulary: a pretrained model that is fetched, ``"minilm"``, or the path of a ``vocab.txt``: one token per line,
        [PAD] first, with [UNK], [CLS] and [SEP]. ``"minilm"`` has the 30,522 tokens of BERT's uncased models.
      data_dir: the folder of fetched models, as for ``data.fetch``.

    Raises ``ValueError`` for a vocabulary that is missing or of another form and for texts that are no strings.

    >>> import tempfile
    >>> file = tempfile.NamedTemporaryFile("w", suffix=".txt")
    >>> _ = file.write("[PAD]\\n[UNK]\\n[CLS]\\n[SEP]\\ngood\\nun\\n##usual\\n"), file.flush()
    >>> tokenize(["Unusual, good!", "good"], 6, vocabulary=file.name).tolist()
    [[2, 5, 6, 1, 4, 3], [2, 4, 3, 0, 0, 0]]
    """
    whole("length", length, SHORTEST)
    listed = isinstance(texts, Sequence) and not isinstance(texts, (str, bytes))
    require(listed, "texts", type_name(texts), "a list of strings")
    for i, text in enumerate(texts):
        require(isinstance(text, str), f"texts[{i}]", type_name(text), "a string")
    known = read_vocabulary(_content(vocabulary, data_dir))
    return encode(wordpiece(known), texts, known, length)


def _content(vocabulary: str | os.PathLike[str], data_dir: str | os.PathLike[str] | None) -> bytes:
    """The ``vocab.txt`` of a fetched model, with its hash checked, or that at a path."""
    if vocabulary in PRETRAINED_VERSIONS:
        folder = require_pretrained(str(vocabulary), resolve_data_dir(data_dir))
        expected = PRETRAINED[str(vocabulary)].files[VOCABULARY]
        content = read_files(folder, (VOCABULARY,))[VOCABULARY]
        reading(folder / VOCABULARY)
        found = file_hash(content, "sha256")
        require(found == expected, f"{vocabulary}: {VOCABULARY} in {folder}", found, f"{expected}; fetch it again")
        return content
    file = path("vocabulary", vocabulary)
    if not file.is_file():
        names = ", ".join(PRETRAINED_VERSIONS)
        raise ValueError(f"vocabulary = {str(vocabulary)!r}: must be {names}, or a file with one token per line")
    return Path(reading(file)).read_bytes()
