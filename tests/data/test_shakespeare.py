"""Plays, roles and windows, on made-up plays in the layout of the real ones; a run on them equals the oracle's."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_async import simulate
from fedjax_async.data import check_data, federate, load
from fedjax_async.data.arrays import array_hash, write_cache
from fedjax_async.data.characters import LETTERS, codes, text_of, windows
from fedjax_async.data.published import SOURCES
from fedjax_async.data.shakespeare import LENGTH, from_plays, kept_roles, roles_of
from fedjax_async.home import arrays_folder

SPEECH = "The quality of mercy is not strain'd,\nIt droppeth as the gentle rain from heaven\nUpon the place beneath."
PLAY = f"""THE PLAY

PERSONS REPRESENTED.

PORTIA.
A lady of the list of persons, who says nothing here.

ACT I.

SCENE I. Venice. A street.

[Enter PORTIA
and others.]

PORTIA.
{SPEECH}

[She turns.]

It is twice blest. [Aside] So.

SHYLOCK
Ay.

FIRST CLOWN.

{SPEECH}

SONG.

Tell me where is fancy bred.

SCENE II.

Who speaks here has no name.

PORTIA.
{SPEECH}
"""
MIXED = """Act 1.

Scene I. Elsinore.

Ham.
To be, or not to be,--that is the question:--
Whether 'tis nobler in the mind to suffer.

ALL.
O!

1 Clown.
Is she to be buried?

Ros. and Guil.
Speak.

Ham.
Words, words, words.
"""


def test_roles_and_their_speeches():
    portia, shylock, clown = roles_of("merchant", PLAY)
    said = SPEECH.replace("\n", " ")
    assert portia.speeches == [f"{said} It is twice blest. So.", said]
    assert portia.text == "\n".join(portia.speeches) + "\n"
    assert (shylock.name, shylock.speeches, clown.name, clown.speeches) == ("SHYLOCK", ["Ay."], "FIRST CLOWN", [said])
    assert [role.name for role in roles_of("hamlet", MIXED)] == ["HAM", "ALL", "1 CLOWN", "ROS. AND GUIL"]
    assert roles_of("hamlet", MIXED)[0].speeches[1] == "Words, words, words."
    for text in ("no act", "ACT I.\n\nnobody speaks\nhere."):
        with pytest.raises(ValueError, match=r"^play = '\d+ characters': must be a play, with"):
            roles_of("play", text)


def test_every_character_of_a_role_is_the_target_of_one_position():
    text = "\n".join("abc def" * n for n in range(1, 9)) + "\n"
    cut = windows(text, 7)
    assert "".join(map(text_of, cut[:, 1:])) == text and text_of(cut[0, :1]) == "\n"
    np.testing.assert_array_equal(cut[1:, 0], cut[:-1, -1])
    assert codes(LETTERS).tolist() == list(range(2, 82)) and windows("", 7).shape == (0, 8)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The data set ``shakespeare`` with one play; one role has two windows and another five."""
    files = {"play_gut.txt": PLAY.encode()}
    arrays = from_plays(files)
    published = SOURCES["shakespeare"]._replace(
        files={},
        arrays={f: array_hash(a) for f, a in arrays.present().items()},
        examples=(len(arrays.x), len(arrays.test_x)),
    )
    monkeypatch.setitem(SOURCES, "shakespeare", published)
    write_cache(arrays, arrays_folder("shakespeare", published.version, tmp_path))
    return tmp_path


def test_the_last_fifth_of_each_role_is_its_test_part(small):
    kept = kept_roles({"play_gut.txt": PLAY.encode()})
    # SHYLOCK says too little
    assert [(role.name, len(cut)) for role, cut in kept] == [("PORTIA", 3), ("FIRST CLOWN", 2)]
    dataset = load("shakespeare", small)
    data = check_data(federate(dataset, "natural"))
    assert data.size.tolist() == [2, 1] and data.test_size.tolist() == [1, 1] and data.num_classes == 82
    assert data.x.shape == (3, LENGTH) and data.y.dtype == np.int32
    for (role, cut), start in zip(kept, (0, 2)):
        np.testing.assert_array_equal(data.x[start], cut[0, :-1], role.name)
    np.testing.assert_array_equal(data.test_y[0], kept[0][1][-1, 1:])
    both = federate(dataset, "natural", 1)
    assert both.size.tolist() == [3] and both.test_order.tolist() == [0, 1]
    assert federate(dataset, "iid", 2).test_order is None
    one = federate(load("shakespeare:roles=1", small), "natural")
    assert (one.size.tolist(), one.test_size.tolist()) == ([2], [1])
    with pytest.raises(ValueError, match="roles = 3: must be a whole number from 1 to 2"):
        load("shakespeare:roles=3", small)


@pytest.mark.slow
def test_a_run_equals_the_oracle_and_scores_each_role(small, monkeypatch):
    monkeypatch.setenv("FEDJAX_ASYNC_DATA", str(small))
    options = {"model": "char_gru:hidden=4,embedding=2", "steps": 1, "batch_size": 2, "updates": 3, "eval_updates": 3}
    runs = [
        simulate(dataset="shakespeare", clients=2, per_client=True, metrics="label_accuracy", engine=engine, **options)
        for engine in ("waves", "reference")
    ]
    for column in ("loss", "accuracy", "label_accuracy", "client_accuracy", "client_loss"):
        np.testing.assert_allclose(*(run.evaluations[column] for run in runs), rtol=1e-5, err_msg=column)
    assert runs[0].per_client["accuracy"].shape == (2, 2)
    with pytest.raises(ValueError, match=r"shape of model outputs = \['B', 82\]: must be \[B, 80, 82\], since shakesp"):
        simulate(dataset="shakespeare", clients=2, **options | {"model": "char_gru:hidden=4,last=true"})
