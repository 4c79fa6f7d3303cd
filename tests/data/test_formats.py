"""Files in the documented layouts of other projects, made here: read correctly, refused in one line if damaged."""

from __future__ import annotations

import importlib.resources
import json
import struct
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedjax_async import cli
from fedjax_async.data import DATASETS, federate, load, open_folder
from fedjax_async.data.characters import codes, text_of
from fedjax_async.data.formats import FORMATS
from fedjax_async.data.looks import DataWarning
from tests.data.layouts import MARK, RNG, h5_file, images_table, leaf_file, owners, read, refused, saved, saved_splits
from tests.data.small_mnist import image_bytes
from tests.refusals import refusals
from tests.told import warned


def test_leafs_femnist_keeps_writers_and_their_tests(tmp_path):
    def writer(labels):
        return {"x": [[label / 100] * 783 + [1.0] for label in labels], "y": labels}

    leaf_file(tmp_path / "train" / "a.json", {"w1": writer([3, 61]), "w0": writer([5])})
    leaf_file(tmp_path / "train" / "b.json", {"w2": writer([0, 1, 2])})
    leaf_file(tmp_path / "test" / "a.json", {"w2": writer([7]), "stranger": writer([8])})
    dataset = load(f"leaf:path={tmp_path}")
    assert owners(dataset) == [[3, 61], [5], [0, 1, 2]] and dataset.test_groups.tolist() == [2, 3]
    assert dataset.x.shape == (6, 28, 28, 1) and dataset.num_classes == 62
    assert dataset.x[0, 0, 0, 0] == round(255 * 0.03)
    data = federate(dataset, "natural")
    assert data.test_size.tolist() == [0, 0, 1] and len(data.test_x) == 2
    assert data.client_names == ("w1", "w0", "w2")


PIXELS, NOTHING = [0.5] * 784, {"x": [], "y": []}
TEXT = "The king is dead, long live the king! Now is the winter of our discontent made glorious summer."
TASKS = {  # what a user has, and the input and the number of classes that come of it
    "femnist": ({"x": [PIXELS], "y": [3]}, lambda x: (x / 255).ravel().round(2).tolist(), PIXELS, 62),
    "shakespeare": ({"x": [TEXT[1:81]], "y": [TEXT[81]]}, text_of, TEXT[1:81], 82),
    "sent140": ({"x": [["1", "Mon", "NO_QUERY", "ann", "so happy!"]], "y": [1]}, text_of, "so happy!", 2),
    "vectors": ({"x": [[1.5, -2.0]], "y": [4.0]}, np.ndarray.tolist, [1.5, -2.0], None),
}


@pytest.mark.parametrize("task", TASKS)
def test_leafs_tasks_without_the_users_that_have_no_examples(tmp_path, task):
    own, shown, wanted, classes = TASKS[task]
    leaf_file(tmp_path / "train" / "a.json", {"none": NOTHING, "one": own, "last": NOTHING})
    assert len(load(f"leaf:task={task},path={tmp_path / 'train'}").test_x) == 0
    leaf_file(tmp_path / "test" / "a.json", {"none": NOTHING, "one": own})
    found = load(f"leaf:task={task},path={tmp_path}")
    assert len(found.x) == len(found.test_x) == 1 and found.groups.tolist() == found.test_groups.tolist() == [0]
    assert shown(found.x[0]) == wanted and found.num_classes == classes and found.y.dtype == np.int32
    assert found.y.tolist() == (codes(TEXT[81]).tolist() if task == "shakespeare" else own["y"])
    assert task != "sent140" or found.x.shape == (1, 140)


def of_good(**changes):
    return json.dumps({"user_data": {"u": TASKS["femnist"][0]}} | changes)


def of_one(x, y):
    return of_good(user_data={"u": {"x": x, "y": y}})


test_damaged_files_of_leaf = refusals(
    ('{"users": [', "must be a JSON file (JSONDecodeError"),
    ("[" * 100_000, "must be a JSON file (RecursionError"),
    (b"\x80\x04\x95", "must be a JSON file (UnicodeDecodeError"),
    ("[]", "user_data = 'a NoneType': must be an object with the users' names"),
    (of_good(users=["v"]), "users = 'others than the 1 of user_data'"),
    (of_good(user_data={"['a']": TASKS["femnist"][0]}, users=[["a"]]), "users = 'others than the 1 of user_data'"),
    (of_good(num_samples=[2]), "examples of u = 1: must be 2 (num_samples)"),
    (of_good(num_samples=[]), "num_samples = '0 numbers': must be a list of 1, one number"),
    (of_good(num_samples=3), "num_samples = 'a int': must be a list of 1, one number"),
    (of_good(user_data={"u": [1]}), "u = 'a list': must be an object with x and y"),
    (of_one([PIXELS], [62]), "u, y[0] = 62.0: must be a whole number from"),
    (of_one([PIXELS], [1, 2]), "u = '1 x and 2 y': must be as many x as y"),
    (of_one([[1.5] * 784], [3]), "u, x = 'a value outside'"),
    (of_one([[0.5], [1, 2]], [3, 3]), "u, x = 'object[0]': must be a list of eq"),
    (of_one([[float("nan")] * 784], [3]), "u, x[0, 0] = nan: must be finite"),
    (of_one([], []), "'no examples': must be at least one client with training examples"),
    (of_one([], [3]), "u, x = "),
    by=lambda folder, content: read(folder, "leaf:path=HERE/it", content),
    folder=True,
)


def test_missing_files_and_names_are_told(tmp_path):
    refused(f"leaf:path={tmp_path}", "must be a folder with LEAF's *.json files")
    refused(f"leaf:path={tmp_path},task=celeba", "task = 'celeba': unknown")
    for name in FORMATS:
        refused(f"{name}:path={tmp_path / 'absent'}", "must be a file or folder that exists")


def test_tffs_clients_are_kept(tmp_path):
    pixels = RNG.random((3, 28, 28)).astype(np.float32)
    train = {"f1": {"pixels": pixels, "label": [4, 9, 4]}, "f0": {"pixels": pixels[:1], "label": [1]}}
    files = h5_file(tmp_path / "train.h5", train), h5_file(tmp_path / "test.h5", {"f1": train["f0"]})
    dataset = load("tff:path={},test={}".format(*files))
    assert owners(dataset) == [[1], [4, 9, 4]] and dataset.test_groups.tolist() == [1]
    np.testing.assert_array_equal(dataset.x[1:, ..., 0], pixels)
    said = {"LEAR": {"snippets": [b"Howl, howl, howl, howl!", b"No, no, no life!"]}, "FOOL": {"snippets": [b"Ay."]}}
    plays = load(f"tff:path={h5_file(tmp_path / 'plays.h5', said)},x=snippets,y=none,length=10")
    fool, lear = ("".join(map(text_of, plays.y[plays.groups == owner])) for owner in (0, 1))
    assert (fool, lear) == ("Ay.\n", "Howl, howl, howl, howl!\nNo, no, no life!\n") and plays.num_classes == 82


def test_damaged_and_hostile_files_of_tff(tmp_path):
    import h5py

    good = h5_file(tmp_path / "good.h5", {"a": {"pixels": np.zeros((2, 2, 2)), "label": [1, 2]}})
    for content in (good.read_bytes()[: good.stat().st_size // 2], b"\x80\x04\x95 pickled"):
        (tmp_path / "cut.h5").write_bytes(content)
        refused(f"tff:path={tmp_path / 'cut.h5'}", "must be an HDF5 file of TFF (")
    refused(f"tff:path={good},x=image", "a = \"no data set 'image'\": must be one of label, pixels")
    refused(f"tff:path={h5_file(tmp_path / 'b.h5', {'a': {'pixels': [0.5], 'label': [1, 2]}})}", "'1 pixels, 2 label'")
    refused(f"tff:path={h5_file(tmp_path / 'none.h5', {})}", "\"no group 'examples'\"")
    with h5py.File(tmp_path / "links.h5", "w") as file:
        file["examples/a"] = h5py.ExternalLink("good.h5", "/examples/a")
    refused(f"tff:path={tmp_path / 'links.h5'}", "'a is a link': must be contents of the file itself")
    with h5py.File(tmp_path / "bomb.h5", "w") as file:
        file.create_dataset("examples/a/pixels", shape=(10**9, 28, 28), dtype="f4", chunks=(1, 28, 28))
        file.create_dataset("examples/a/label", data=[1])
    refused(f"tff:path={tmp_path / 'bomb.h5'}", "a, pixels = '3136000000000 bytes': must be at most")


FOUR, _ = images_table([0, 1, 2, 1], list("abcd"))


def test_parquet_of_images_with_owners_and_a_test_file(tmp_path):
    train, pixels = images_table([0, 1, 1], ["ann", "bob", "ann"])
    pq.write_table(train, tmp_path / "train-00000.parquet")
    pq.write_table(images_table([1], ["bob"])[0], tmp_path / "test-00000.parquet")
    dataset = load(f"parquet:path={tmp_path},client=writer")
    assert owners(dataset) == [[0, 1], [1]] and dataset.test_groups.tolist() == [1] and dataset.num_classes == 3
    np.testing.assert_array_equal(dataset.x[[0, 2, 1]], pixels)
    dealt = load(f"parquet:path={tmp_path}")
    assert dealt.groups is None and dealt.y.tolist() == [0, 1, 1]


COLUMNS = {"a": [1, 2, 3], "b": [0.5, 1.5, 2.5], "kind": ["x", "y", "x"], "text": ["one", "two", "three"],
           "grid": [[[1, 2], [3, 4]]] * 3, "price": [0.1, 0.2, 0.3], "who": [7, 7, 2]}  # fmt: skip


def test_parquet_of_numbers_texts_and_class_names(tmp_path):
    numbers = read(tmp_path, "parquet:path=HERE/it,x=a+b,y=kind,client=who", COLUMNS)
    assert numbers.x.tolist() == [[1, 0.5], [2, 1.5], [3, 2.5]] and owners(numbers) == [[0, 1], [0]]
    file = f"parquet:path={tmp_path / 'it'}"
    assert numbers.num_classes == 2 and load(f"{file},x=grid,y=price").x.shape == (3, 2, 2)
    assert [text_of(row) for row in load(f"{file},x=text,y=kind,length=4").x] == ["one", "two", "thre"]
    plays = load(f"{file},x=text,y=none,client=who,length=4")
    assert "".join(map(text_of, plays.y[plays.groups == 0])) == "one\ntwo\n" and plays.num_classes == 82


def test_parquet_files_of_a_folder_called_test_are_not_trained_on(tmp_path):
    """As the Hugging Face hub converts data sets: NAME/train/0000.parquet, NAME/test/0000.parquet."""
    for part, rows in {"train": [[1.0], [2.0]], "test": [[3.0]]}.items():
        (tmp_path / part).mkdir()
        pq.write_table(pa.table({"x": rows, "label": [0] * len(rows)}), tmp_path / part / "0000.parquet")
    for found in (load(f"parquet:path={tmp_path},x=x"), load(f"parquet:path={tmp_path},x=x,test={tmp_path}/test")):
        assert found.x.tolist() == [[1], [2]] and found.test_x.tolist() == [[3]]
    refused(f"parquet:path={tmp_path}/test,x=x,test={tmp_path}/test", "must be files of a training set beside those of")


def test_classes_of_several_files_must_be_the_same(tmp_path):
    for name, label, names in (("one", [0, 1], ["cat", "dog"]), ("two", [0, 1], ["dog", "cat"]), ("text", ["cow"], 0)):
        features = json.dumps({"info": {"features": {"label": {"names": names}}}})
        table = pa.table({"x": [1.0] * len(label), "label": label})
        pq.write_table(table.replace_schema_metadata({"huggingface": features}), tmp_path / f"{name}.parquet")
    both = f"parquet:path={tmp_path}/one.parquet,x=x,test={tmp_path}"
    refused(f"{both}/two.parquet", "classes of a table = ['dog', 'cat']: must be ['cat', 'dog'], as in the first table")
    refused(f"{both}/text.parquet", "label = ['cow']: must be names of the classes in the schema, cat, dog")
    for name, lines in {"names": "x,y\n1,cat\n2,7\n", "numbers": "x,y\n1,7\n"}.items():
        (tmp_path / f"{name}.csv").write_text(lines)
    refused(f"csv:path={tmp_path}/names.csv,test={tmp_path}/numbers.csv,x=x,y=y", "'names in one table and numbers in")


def test_a_real_file_of_a_package():
    """The table of diamonds from pyarrow's own tests."""
    file = f"{importlib.resources.files('pyarrow.tests')}/data/parquet/v0.7.1.parquet"
    diamonds = load(f"parquet:path={file},x=carat+depth+table,y=cut")
    assert diamonds.x.shape == (10, 3) and diamonds.num_classes == 5
    np.testing.assert_array_equal(diamonds.x[0], np.float32([0.23, 61.5, 55.0]))


def test_folders_of_hugging_face(tmp_path):
    train, pixels = images_table([0, 2], ["ann", "bob"])
    both = saved_splits(tmp_path / "both", train=train, test=images_table([1], ["ann"])[0])
    dataset = load(f"hugging_face:path={both},client=writer")
    np.testing.assert_array_equal(dataset.x, pixels)
    assert owners(dataset) == [[0], [2]] and dataset.test_groups.tolist() == [0] and dataset.num_classes == 3
    one = saved(tmp_path / "one", train)
    assert len(load(f"hugging_face:path={one}").test_x) == 0
    refused(f"hugging_face:path={tmp_path}", "must be a folder that save_to_disk wrote, with a state.json")
    refused(f"hugging_face:path={both},train=all", "split = 'all': must be one of those")
    state = {"_data_files": [{"filename": "../one/data-00000-of-00001.arrow"}]}
    outside = saved(tmp_path / "outside", train, state=state)
    refused(f"hugging_face:path={outside}", "must be a name within the folder that exists")
    file = one / "data-00000-of-00001.arrow"
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"\x80\x04\x95 pickled", struct.pack("<iI", -1, 2**31 - 1)):
        file.write_bytes(content)
        refused(f"hugging_face:path={one}", "must be an Arrow file (")


DEALT = "flower:path=HERE/all.parquet,partitions=HERE/p"


def test_partitions_of_flower(tmp_path):
    tables = [images_table([0, 1], ["x", "x"])[0], images_table([2], ["x"])[0]]
    for number in (10, 2):  # in order of numbers, not of names
        saved(tmp_path / "parts" / f"partition_{number}", tables[number == 10])
    assert owners(load(f"flower:path={tmp_path / 'parts'}")) == [[0, 1], [2]]
    (tmp_path / "parts" / "part-2.parquet").write_bytes(b"")
    refused(f"flower:path={tmp_path / 'parts'}", "partition 2 = 'partition_2': must be one file or folder per part")
    saved_splits(tmp_path / "split" / "partition_0", train=tables[0], test=tables[1])
    assert load(f"flower:path={tmp_path / 'split'}").test_groups.tolist() == [0]
    pq.write_table(FOUR, tmp_path / "all.parquet")
    assert owners(read(tmp_path, DEALT + ".json", "[1, 0, 0, 1]")) == [[1, 2], [0, 1]]
    (tmp_path / "p.json").write_text("[1, 0, 1]")
    spec = "flower:partitions=HERE/p.json,path=HERE/it.parquet,x=said,y=none,length=4"
    fool, lear = owners(read(tmp_path, spec, {"said": ["Howl, howl!", "Ay.", "No, no life!"]}))
    assert "".join(map(text_of, fool)) == "Ay.\n" and len(lear) == 7


def test_flowers_test_set_holds_no_training_rows(tmp_path):
    def labelled(*labels):
        return images_table(list(labels), pa.array(["x"] * len(labels), pa.string()))[0]

    whole = saved_splits(tmp_path / "whole", train=labelled(0, 1), test=labelled(2))
    other = saved_splits(tmp_path / "other", train=labelled(0, 0), test=labelled(1, 1, 1))
    alone, empty = saved(tmp_path / "alone", labelled(2, 1)), saved(tmp_path / "empty", labelled())
    (tmp_path / "p.json").write_text("[1, 0]")
    parts = f"flower:path={whole},partitions={tmp_path / 'p.json'}"
    for test, want in (("", [2]), (f",test={whole}", [2]), (f",test={other}", [1, 1, 1]), (f",test={alone}", [2, 1])):
        assert load(parts + test).test_y.tolist() == want
    refused(f"{parts},test={empty}", "empty': must be a data set with examples")
    saved_splits(other, splits=("train", "more"))
    refused(f"{parts},test={other}", "splits = ['train', 'more']: must be one called test, or a single one")
    for root in (whole, alone):  # data-00000-of-00001.arrow ends in a number, too
        refused(f"flower:path={root}", "must be a folder of partitions, or given with partitions=FILE")


SHOPS = """shop{0}height{0}weight{0}kind{0}part
b{0}1{0}0.5{0}cat{0}train
a{0}2{0}1.5{0}dog{0}test
b{0}3{0}2.5{0}dog{0}Train
"""


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_of_a_csv_file_is_found(tmp_path, separator):
    content = MARK + SHOPS.format(separator).encode()
    found = read(tmp_path, "csv:path=HERE/it,x=others,y=kind,client=shop,split=part", content)
    np.testing.assert_array_equal(found.x, np.array([[1, 0.5], [3, 2.5]], np.float32))
    assert found.y.tolist() == [0, 1] and found.class_names == ("cat", "dog") and found.groups.tolist() == [0, 0]
    assert found.test_x.tolist() == [[2.0, 1.5]] and found.test_groups.tolist() == [1]
    assert read(tmp_path, "csv:path=HERE/it,x=x,y=y", "x,y\n1,cat\n2, cat\n3,cat \n").class_names == ("cat",)


def test_owners_that_share_clients_and_test_rows_that_are_not_used_are_said(tmp_path):
    rows = [f"{shop},{k},{k % 2},{part}" for shop in "abc" for k, part in enumerate(["train"] * 6 + ["test"] * 2)]
    found = read(tmp_path, "csv:path=HERE/it,x=x,y=y,client=shop,split=part", "\n".join(["shop,x,y,part", *rows]))
    with pytest.warns(DataWarning, match="its 3 owners are dealt to 2 clients, so no client has a name; clients=3"):
        assert federate(found, "natural", num_clients=2, seed=0).client_names is None
    with pytest.warns(DataWarning, match="its 6 test rows are not used: test_fraction = 0.5 takes each client's test"):
        assert len(federate(found, "natural", seed=0, test_fraction=0.5).test_x) == 9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert federate(found, "natural", seed=0).client_names == ("a", "b", "c")


def test_a_csv_file_of_its_own_may_have_the_test_set(tmp_path):
    train, test = tmp_path / "train.csv", tmp_path / "test.csv"
    train.write_text("a,b,y\n1,2,0\n3,4,1\n")
    test.write_text("y,b,a\n1,6,5\n")
    found = load(f"csv:path={train},test={test},x=a+b,y=y")
    assert found.x.tolist() == [[1, 2], [3, 4]] and found.test_x.tolist() == [[5, 6]] and found.groups is None
    assert load(f"csv:path={train},x=b,y=y").test_x.shape == (0,)
    test.write_text("y,a\n0.5,2.5\n")  # the numbers of the training set happen to be whole
    found, other = (load(f"csv:path={one},test={two},x=a,y=y") for one, two in ((train, test), (test, train)))
    assert [part.dtype.name for part in (found.x, found.y, found.test_x, found.test_y)] == ["float32"] * 4
    assert found.x.tolist() == [1, 3] and found.test_y.tolist() == [0.5] and found.num_classes is None
    assert other.test_x.tolist() == [1, 3] and other.test_y.dtype == np.float32


@pytest.mark.parametrize(
    ("x", "cells", "said"),
    [("t+b", "1700000000,1700000060", "t"), ("t", "1700000000.5,1700000060.5", "t"), ("t+b", "1,2", None)],
)
def test_columns_whose_differences_float32_loses_are_remarked_on(tmp_path, x, cells, said):
    table = "t,b,y\n" + "".join(f"{cell},{i}.5,{i}\n" for i, cell in enumerate(cells.split(",")))
    found, lines = warned(read, tmp_path, f"csv:path=HERE/it,x={x},y=y", table, kind=DataWarning)
    assert found.x.dtype == np.float32 and len(found.x) == 2
    how = "is rounded to float32, which loses its differences (near 1.7e+09, the deviation is 30)"
    assert lines == ([] if said is None else [f"'{tmp_path / 'it'}': {said} {how}: subtract its mean first"])


def test_files_of_windows_are_read_by_every_format(tmp_path):
    """With a byte order mark, which spreadsheets and Windows editors write, and its line ends."""
    leaf_file(tmp_path / "a.json", {"a": {"x": [[1.5]], "y": [4]}})
    assert read(tmp_path, "leaf:task=vectors,path=HERE/a.json", MARK + (tmp_path / "a.json").read_bytes()).y == [4]
    pq.write_table(FOUR, tmp_path / "all.parquet")
    for ending, content in {
        "a.csv": "example,partition\r\n3,1\r\n0,1\r\n2,0\r\n",
        "b.csv": "example, partition\n3, 1\n\n0, 1\n2, 0\n",
        "c.csv": ' partition , example \n 1 , "3"\n1,0\n0,2\n',
        "d.json": json.dumps({"1": [0, 3], "0": [2]}),
    }.items():
        found = read(tmp_path, DEALT + ending, MARK + content.encode())
        assert [sorted(own) for own in owners(found)] == [[2], [0, 1]]


def test_a_path_with_a_comma_is_quoted(tmp_path):
    file = tmp_path / "a, b.parquet"
    pq.write_table(FOUR, file)
    for quote in "\"'":
        assert load(f"parquet:path={quote}{file}{quote},client=writer").groups.tolist() == [0, 1, 2, 3]
    refused(f"parquet:path={file},client=writer", f'; a value that has a comma is quoted: path="{file}"')


DEEP = image_bytes(np.full((8, 8), 300, np.uint16), mode="I;16")
CSV, PARQUET, BY = "csv:path=HERE/it", "parquet:path=HERE/it", ", but must be by commas, with a point in decimals)"


def read_beside_four(folder, spec, content):
    pq.write_table(FOUR, folder / "all.parquet")
    return read(folder, spec, content)


test_files_that_do_not_fit = refusals(
    (CSV + ",x=a,y=y", "a,y\n1,0\n,1\n", "a[1] = None: must be a value: rows without one are not filled in"),
    (CSV + ",x=a,y=y", "a,y\n1,0\n2\n", "must be a CSV file with a header"),
    (CSV + ",x=a,y=y", "a,a,y\n1,2,0\n", "columns = ['a']: must be named differently"),
    (CSV + ",x=a,y=y,split=s", "a,y,s\n1,0,dev\n", "s[0] = 'dev': must be train or test"),
    (CSV + ",x=a,y=y", "a;y\n1;3\n2;2,5\n", "y[1] = '2,5': must be written with a decimal point"),
    (CSV + ",x=a,y=y", "a,y\n1.5,3\n?,2\n3e-1,1\n", "a[1] = '?': must be a number, as most of the column"),
    (CSV + ",x=a,y=y", "a,y\n1,0\n2,?\n3,1\n", "y[1] = '?': must be a number"),
    (CSV + ",x=a,y=y", "a,y\n1,0.5\n2,x\n3,1\n", "y[1] = 'x': must be a number"),
    (CSV + ",x=a,y=why", "a,y\n1,0\n", "column = 'why': must be one of the file's (known: a, y)"),
    (CSV + ",x=a,y=y,separator=x", "a,y\n1,0\n", "separator = 'x': must be one of"),
    (PARQUET + ",x=size,y=kind", COLUMNS, "column = 'size': must be one of a, b, kind"),
    (PARQUET + ",x=a,y=a", COLUMNS, "columns = ['a', 'a']: must be different columns"),
    (PARQUET + ",x=a+text,y=kind", COLUMNS, "text = 'no numbers': must be numbers"),
    (PARQUET, {"image": [1, None], "label": [0, 1]}, "image[1] = None: must be a value"),
    (PARQUET, {"image": [[1], [1, 2]], "label": [0, 1]}, "image = 'lists of 1 to 2': must be lists of one length"),
    (PARQUET, {"image": [DEEP], "label": [0]}, "image[0] = 'mode I;16': must be an image of 8 bits a channel"),
    (PARQUET, {"image": [b"no image"], "label": [0]}, "image[0]: must be an image (cannot identify"),
    (PARQUET, b"PAR1 and nothing else", "must be a Parquet file ("),
    (PARQUET, b"", "must be a Parquet file ("),
    (DEALT + ".json", '{"0": [4]}', "row = 4: must be below 4"),
    (DEALT + ".json", '{"0": [1], "1": [1]}', "row = 1: must be in one partition only"),
    (DEALT + ".json", "[0, 1]", "'2 ids': must be one for each of 4 rows"),
    (DEALT + ".json", '{"0": ["x"]}', "entry 0 = 'x': must be a whole number >= 0"),
    (DEALT + ".csv", b'example,partition\n0,"0"1\n', "p.csv': must be a CSV file (Error: "),
    (DEALT + ".csv", b"example,partition\n0,\xff\n", "p.csv': must be a CSV file (UnicodeDecodeError: "),
    (DEALT + ".csv", b"example,client\n0,1\n", "columns = ['example', 'client']: must be example and partition"),
    (DEALT + ".csv", b"example,partition\n0\n", "entry 0 = None: must be a whole number >= 0"),
    (DEALT + ".csv", "example;partition\n0;1\n", f"must be a CSV file (Error: separated by semicolons{BY}"),
    (DEALT + ".csv", "example\tpartition\n0\t1\n", f"must be a CSV file (Error: separated by tabs{BY}"),
    by=read_beside_four,
    folder=True,
)


def test_data_import_refuses_a_decoder_that_no_run_by_name_could_be_given(tmp_path, capsys, monkeypatch):
    own = load("synthetic:clients=2,mean_log_size=1,std_log_size=0")._replace(decode=lambda x: x)
    monkeypatch.setitem(DATASETS, "mine", lambda: own)
    assert cli.main(["data", "import", "mine", "--test-fraction", "0.5", "--out", str(tmp_path / "out")]) == 2
    assert "dataset = 'mine': must be one whose decoder data.decode has" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_data_import_writes_a_folder_of_clients(tmp_path, capsys):
    train = {"b": {"x": [[1.0, 2.0]] * 2, "y": [0, 1]}, "a": {"x": [[3.0, 4.0]], "y": [2]}}
    leaf_file(tmp_path / "leaf" / "train" / "1.json", train)
    leaf_file(tmp_path / "leaf" / "test" / "1.json", {"a": train["a"]})
    command = ["data", "import", f"leaf:task=vectors,path={tmp_path / 'leaf'}", "--out", str(tmp_path / "out")]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert said.startswith("vectors: 2 clients, 3 examples of float32[2], 3 classes, 1 test examples of each client\n")
    data = open_folder(tmp_path / "out", verify=True)
    assert data.client_names == ["b", "a"]
    assert data.size.tolist() == [2, 1] and data.test_size.tolist() == [0, 1] and data.y.tolist() == [0, 1, 2]
    assert cli.main(command) == 2 and "must be a folder that does not exist yet" in capsys.readouterr().err
    table = tmp_path / "t.parquet"
    pq.write_table(pa.table({"image": [[1.0]] * 8, "label": [0, 1] * 4}), table)
    command = ["data", "import", f"parquet:path={table}", "--out", str(tmp_path / "dealt")]
    assert cli.main(command) == 2 and "partition = None: must be given" in capsys.readouterr().err
    assert cli.main([*command, "--partition", "iid", "--clients", "2", "--test-fraction", "0.25"]) == 0
    assert open_folder(tmp_path / "dealt").test_size.tolist() == [1, 1]
