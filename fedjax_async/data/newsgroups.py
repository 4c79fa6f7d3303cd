"""The 20 Newsgroups in the letters-only variant: labels and token ids from tab-separated files."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedjax_async.check import require
from fedjax_async.data.published import Arrays
from fedjax_async.data.wordpiece import encode, read_vocabulary, wordpiece

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
LENGTH = 512  # tokens kept of a document, what BERT-type encoders have positions for


def from_tables(files: Mapping[str, bytes]) -> Arrays:
    """Token ids uint16 [M, 512] and labels from the two tables and a ``vocab.txt``."""
    vocabulary = read_vocabulary(files["vocab.txt"])
    require(len(vocabulary) <= 2**16, "vocabulary", f"{len(vocabulary)} tokens", "at most 65,536 tokens")
    tokenize = wordpiece(vocabulary)
    arrays = []
    for name in ("20newsgroups-train.tab", "20newsgroups-test.tab"):
        labels, texts = read_table(files[name])
        arrays += [encode(tokenize, texts, vocabulary, LENGTH).astype(np.uint16), labels]
    return Arrays(*arrays)


def read_table(content: bytes) -> tuple[np.ndarray, list[str]]:
    """Labels int32 [M] and documents of an Orange table: three header lines, then ``group<TAB>text`` a line."""
    rows = content.decode("utf-8").split("\n")[3:]
    pairs = [row.removesuffix("\r").split("\t") for row in rows if row.strip()]
    good = all(len(pair) == 2 and pair[0] in GROUPS for pair in pairs)
    require(good and len(pairs) > 0, "table", f"{len(pairs)} rows", "rows of a newsgroup, a tab and a text")
    return np.array([GROUPS.index(group) for group, _ in pairs], np.int32), [text for _, text in pairs]
