"""Files in the documented layouts of other projects, made here: read correctly, refused in one line if damaged."""

from __future__ import annotations

import importlib.resources
import json
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedjax_async import cli
from fedjax_async.data import federate, from_torch, load, open_folder
from fedjax_async.data.characters import codes, text_of
from fedjax_async.data.formats import FORMATS
from fedjax_async.data.looks import DataWarning
from tests.data.small_mnist import image_bytes
from tests.told import refusal, warned

RNG = np.random.default_rng(0)
MARK = "\ufeff".encode()  # the byte order mark


def owners(data):
    """The training labels of each natural client."""
    return [data.y[data.groups == owner].tolist() for owner in range(data.groups.max() + 1)]


def refused(spec, message):
    said = refusal(load, spec)
    assert message in said, said


# --- LEAF -------------------------------------------------------------------------------------------


def leaf_file(path, users, **changes):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"users": list(users), "num_samples": [len(own["y"]) for own in users.values()], "user_data": users}
    path.write_text(json.dumps(content | changes))


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


def test_leafs_texts_and_vectors(tmp_path):
    text = "The king is dead, long live the king! Now is the winter of our discontent made glorious summer."
    leaf_file(tmp_path / "s.json", {"HAMLET": {"x": [text[i : i + 80] for i in (0, 1)], "y": [text[80], text[81]]}})
    plays = load(f"leaf:task=shakespeare,path={tmp_path}")
    assert text_of(plays.x[1]) == text[1:81] and plays.y.tolist() == codes(text[80:82]).tolist()
    assert len(plays.test_x) == 0 and plays.num_classes == 82
    leaf_file(tmp_path / "t.json", {"ann": {"x": [["1", "Mon", "NO_QUERY", "ann", "so happy!"]], "y": [1]}})
    tweets = load(f"leaf:task=sent140,path={tmp_path / 't.json'}")
    assert text_of(tweets.x[0]) == "so happy!" and tweets.x.shape == (1, 140) and tweets.num_classes == 2
    leaf_file(tmp_path / "v.json", {"0": {"x": [[1.5, -2.0]], "y": [4.0]}})
    vectors = load(f"leaf:task=vectors,path={tmp_path / 'v.json'}")
    assert vectors.x.tolist() == [[1.5, -2.0]] and vectors.y.tolist() == [4] and vectors.y.dtype == np.int32


PIXELS = [0.5] * 784
GOOD = {"u": {"x": [PIXELS], "y": [3]}}


def of_one(x, y):
    return json.dumps({"user_data": {"u": {"x": x, "y": y}}})


def of_good(**changes):
    return json.dumps({"user_data": GOOD} | changes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"users": [', "must be a JSON file (JSONDecodeError"),
        ("[" * 100_000, "must be a JSON file (RecursionError"),
        (b"\x80\x04\x95", "must be a JSON file (UnicodeDecodeError"),
        ("[]", "user_data = 'a NoneType': must be an object with the users' names"),
        (of_good(users=["v"]), "users = 'others than the 1 of user_data'"),
        (of_good(user_data={"['a']": GOOD["u"]}, users=[["a"]]), "users = 'others than the 1 of user_data'"),
        (of_good(num_samples=[2]), "examples of u = 1: must be 2 (num_samples)"),
        (of_good(num_samples=[]), "num_samples = '0 numbers': must be a list of 1, one number"),
        (of_good(num_samples=3), "num_samples = 'a int': must be a list of 1, one number"),
        (of_good(user_data={"u": [1]}), "u = 'a list': must be an object with x and y"),
        (of_one([PIXELS], [62]), "u, y[0] = 62.0: must be a whole number from"),
        (of_one([PIXELS], [1, 2]), "u = '1 x and 2 y': must be as many x as y"),
        (of_one([[1.5] * 784], [3]), "u, x = 'a value outside'"),
        (of_one([[0.5], [1, 2]], [3, 3]), "u, x = 'object[0]': must be a list of eq"),
        (of_one([[float("nan")] * 784], [3]), "u, x[0, 0] = nan: must be finite"),
    ],
)
def test_damaged_files_of_leaf(tmp_path, content, message):
    file = tmp_path / "all.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(f"leaf:path={file}", message)


def test_users_of_leaf_without_examples_are_left_out(tmp_path):
    texts = {"x": ["a" * 80], "y": ["b"]}
    tweets = {"x": [["1", "Mon", "NO_QUERY", "ann", "so happy!"]], "y": [1]}
    vectors = {"x": [[1.5]], "y": [4]}
    for task, own in {"femnist": GOOD["u"], "vectors": vectors, "shakespeare": texts, "sent140": tweets}.items():
        for part in ("train", "test"):
            users = {"none": {"x": [], "y": []}, "one": own, "last": {"x": [], "y": []}}
            leaf_file(tmp_path / task / part / "a.json", users)
        dataset = load(f"leaf:task={task},path={tmp_path / task}")
        assert len(dataset.x) == len(dataset.test_x) == 1
        assert dataset.groups.tolist() == dataset.test_groups.tolist() == [0]
    leaf_file(tmp_path / "all.json", {"none": {"x": [], "y": []}})
    refused(f"leaf:path={tmp_path / 'all.json'}", "'no examples': must be at least one client with training examples")
    leaf_file(tmp_path / "half.json", {"half": {"x": [], "y": [3]}})
    refused(f"leaf:path={tmp_path / 'half.json'}", "half, x = ")


def test_files_of_windows_are_read_by_every_format(tmp_path):
    """With a byte order mark, which spreadsheets and Windows editors write, and its line ends."""
    leaf_file(tmp_path / "a.json", {"a": {"x": [[1.5]], "y": [4]}})
    (tmp_path / "a.json").write_bytes(MARK + (tmp_path / "a.json").read_bytes())
    assert load(f"leaf:task=vectors,path={tmp_path / 'a.json'}").y.tolist() == [4]
    pq.write_table(images_table([0, 1, 2, 1], list("abcd"))[0], tmp_path / "all.parquet")
    for name, content in {
        "a.csv": "example,partition\r\n3,1\r\n0,1\r\n2,0\r\n",
        "b.csv": "example, partition\n3, 1\n\n0, 1\n2, 0\n",
        "c.csv": ' partition , example \n 1 , "3"\n1,0\n0,2\n',
        "d.json": json.dumps({"1": [0, 3], "0": [2]}),
    }.items():
        (tmp_path / name).write_bytes(MARK + content.encode())
        found = load(f"flower:path={tmp_path / 'all.parquet'},partitions={tmp_path / name}")
        assert [sorted(own) for own in owners(found)] == [[2], [0, 1]]
    for sign, separator in {";": "semicolons", "\t": "tabs"}.items():
        (tmp_path / "s.csv").write_text(f"example{sign}partition\n0{sign}1\n")
        said = f"must be a CSV file (Error: separated by {separator}, but must be by commas, with a point in decimals)"
        refused(f"flower:path={tmp_path / 'all.parquet'},partitions={tmp_path / 's.csv'}", said)


def test_a_path_with_a_comma_is_quoted(tmp_path):
    file = tmp_path / "a, b.parquet"
    pq.write_table(images_table([0, 1, 2, 1], list("abcd"))[0], file)
    for quote in "\"'":
        assert load(f"parquet:path={quote}{file}{quote},client=writer").groups.tolist() == [0, 1, 2, 3]
    refused(f"parquet:path={file},client=writer", f'; a value that has a comma is quoted: path="{file}"')


def test_missing_files_and_names_are_told(tmp_path):
    refused(f"leaf:path={tmp_path}", "must be a folder with LEAF's *.json files")
    refused(f"leaf:path={tmp_path},task=celeba", "task = 'celeba': unknown")
    for name in FORMATS:
        refused(f"{name}:path={tmp_path / 'absent'}", "must be a file or folder that exists")


# --- TFF --------------------------------------------------------------------------------------------


def h5_file(path, clients):
    import h5py

    with h5py.File(path, "w") as file:
        for client, features in clients.items():
            for name, values in features.items():
                file.create_dataset(f"examples/{client}/{name}", data=values)
    return path


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
    whole = good.read_bytes()
    for name, content in {"cut.h5": whole[: len(whole) // 2], "foreign.h5": b"\x80\x04\x95 pickled"}.items():
        (tmp_path / name).write_bytes(content)
        refused(f"tff:path={tmp_path / name}", "must be an HDF5 file of TFF (")
    refused(f"tff:path={good},x=image", "a = \"no data set 'image'\": must be one of label, pixels")
    refused(f"tff:path={h5_file(tmp_path / 'b.h5', {'a': {'pixels': [0.5], 'label': [1, 2]}})}", "'1 pixels, 2 label'")
    with h5py.File(tmp_path / "links.h5", "w") as file:
        file["examples/a"] = h5py.ExternalLink("good.h5", "/examples/a")
    refused(f"tff:path={tmp_path / 'links.h5'}", "'a is a link': must be contents of the file itself")
    with h5py.File(tmp_path / "bomb.h5", "w") as file:
        file.create_dataset("examples/a/pixels", shape=(10**9, 28, 28), dtype="f4", chunks=(1, 28, 28))
        file.create_dataset("examples/a/label", data=[1])
    refused(f"tff:path={tmp_path / 'bomb.h5'}", "a, pixels = '3136000000000 bytes': must be at most")
    with h5py.File(tmp_path / "none.h5", "w"):
        pass
    refused(f"tff:path={tmp_path / 'none.h5'}", "\"no group 'examples'\"")


# --- Parquet and Hugging Face -----------------------------------------------------------------------


def images_table(labels, clients, names=None):
    """A table as ``datasets`` writes it: images as structs of bytes and path, class names in the schema."""
    pixels = RNG.integers(0, 256, (len(labels), 6, 5, 3), dtype=np.uint8)
    structs = [{"bytes": image_bytes(one), "path": None} for one in pixels]
    image = pa.array(structs, pa.struct({"bytes": pa.binary(), "path": "string"}))
    columns = {"label": pa.array(labels, pa.int64()), "writer": clients, "unread": [None] * len(labels)}
    table = pa.table({"image": image} | columns)
    features = {"label": {"names": names or ["a", "b", "c"], "_type": "ClassLabel"}}
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})}), pixels


def test_parquet_of_images_with_owners_and_a_test_file(tmp_path):
    train, pixels = images_table([0, 1, 1], ["ann", "bob", "ann"])
    test, _ = images_table([1], ["bob"])
    for name, table in {"train-00000": train, "test-00000": test}.items():
        pq.write_table(table, tmp_path / f"{name}.parquet")
    dataset = load(f"parquet:path={tmp_path},client=writer")
    assert owners(dataset) == [[0, 1], [1]] and dataset.test_groups.tolist() == [1] and dataset.num_classes == 3
    np.testing.assert_array_equal(dataset.x[[0, 2, 1]], pixels)
    dealt = load(f"parquet:path={tmp_path}")
    assert dealt.groups is None and dealt.y.tolist() == [0, 1, 1]


def test_parquet_of_numbers_texts_and_class_names(tmp_path):
    table = pa.table({"a": [1, 2, 3], "b": [0.5, 1.5, 2.5], "kind": ["x", "y", "x"], "text": ["one", "two", "three"],
                      "grid": [[[1, 2], [3, 4]]] * 3, "price": [0.1, 0.2, 0.3], "who": [7, 7, 2]})  # fmt: skip
    file = tmp_path / "t.parquet"
    pq.write_table(table, file)
    numbers = load(f"parquet:path={file},x=a+b,y=kind,client=who")
    assert numbers.x.tolist() == [[1, 0.5], [2, 1.5], [3, 2.5]] and owners(numbers) == [[0, 1], [0]]
    assert numbers.num_classes == 2 and load(f"parquet:path={file},x=grid,y=price").x.shape == (3, 2, 2)
    texts = load(f"parquet:path={file},x=text,y=kind,length=4")
    assert [text_of(row) for row in texts.x] == ["one", "two", "thre"]
    plays = load(f"parquet:path={file},x=text,y=none,client=who,length=4")
    assert "".join(map(text_of, plays.y[plays.groups == 0])) == "one\ntwo\n" and plays.num_classes == 82
    refused(f"parquet:path={file},x=size,y=kind", "column = 'size': must be one of a, b, kind")
    refused(f"parquet:path={file},x=a,y=a", "columns = ['a', 'a']: must be different columns")
    refused(f"parquet:path={file},x=a+text,y=kind", "text = 'no numbers': must be numbers")
    pq.write_table(pa.table({"image": [1, None], "label": [0, 1]}), file)
    refused(f"parquet:path={file}", "image[1] = None: must be a value")
    pq.write_table(pa.table({"image": [[1], [1, 2]], "label": [0, 1]}), file)
    refused(f"parquet:path={file}", "image = 'lists of 1 to 2': must be lists of one length")
    pq.write_table(pa.table({"image": [image_bytes(np.full((8, 8), 300, np.uint16), mode="I;16")], "label": [0]}), file)
    refused(f"parquet:path={file}", "image[0] = 'mode I;16': must be an image of 8 bits a channel")
    pq.write_table(pa.table({"image": [b"no image"], "label": [0]}), file)
    refused(f"parquet:path={file}", "image[0]: must be an image (cannot identify")
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"PAR1 and nothing else", b""):
        file.write_bytes(content)
        refused(f"parquet:path={file}", "must be a Parquet file (")


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


def saved(folder, table, *, as_file=False, state=None):
    """A folder as ``Dataset.save_to_disk`` writes it."""
    folder.mkdir(parents=True)
    name = "data-00000-of-00001.arrow"
    with (pa.ipc.new_file if as_file else pa.ipc.new_stream)(str(folder / name), table.schema) as writer:
        writer.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps(state or {"_data_files": [{"filename": name}], "_fingerprint": "0"}))
    return folder


def test_folders_of_hugging_face(tmp_path):
    train, pixels = images_table([0, 2], ["ann", "bob"])
    test, _ = images_table([1], ["ann"])
    saved(tmp_path / "both" / "train", train)
    saved(tmp_path / "both" / "test", test, as_file=True)
    (tmp_path / "both" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    dataset = load(f"hugging_face:path={tmp_path / 'both'},client=writer")
    np.testing.assert_array_equal(dataset.x, pixels)
    assert owners(dataset) == [[0], [2]] and dataset.test_groups.tolist() == [0] and dataset.num_classes == 3
    one = saved(tmp_path / "one", train)
    assert len(load(f"hugging_face:path={one}").test_x) == 0
    refused(f"hugging_face:path={tmp_path}", "must be a folder that save_to_disk wrote, with a state.json")
    refused(f"hugging_face:path={tmp_path / 'both'},train=all", "split = 'all': must be one of those")
    state = {"_data_files": [{"filename": "../one/data-00000-of-00001.arrow"}]}
    outside = saved(tmp_path / "outside", train, state=state)
    refused(f"hugging_face:path={outside}", "must be a name within the folder that exists")
    file = one / "data-00000-of-00001.arrow"
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"\x80\x04\x95 pickled", struct.pack("<iI", -1, 2**31 - 1)):
        file.write_bytes(content)
        refused(f"hugging_face:path={one}", "must be an Arrow file (")


# --- Flower -----------------------------------------------------------------------------------------


def test_partitions_of_flower(tmp_path):
    tables = [images_table([0, 1], ["x", "x"])[0], images_table([2], ["x"])[0]]
    for number in (10, 2):  # in order of numbers, not of names
        saved(tmp_path / "parts" / f"partition_{number}", tables[number == 10])
    parts = load(f"flower:path={tmp_path / 'parts'}")
    assert owners(parts) == [[0, 1], [2]]
    for split, table in zip(("train", "test"), tables):
        saved(tmp_path / "split" / "partition_0" / split, table)
    (tmp_path / "split" / "partition_0" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert load(f"flower:path={tmp_path / 'split'}").test_groups.tolist() == [0]
    pq.write_table(images_table([0, 1, 2, 1], list("abcd"))[0], tmp_path / "all.parquet")
    (tmp_path / "p.json").write_text("[1, 0, 0, 1]")
    dealt = f"flower:path={tmp_path / 'all.parquet'},partitions={tmp_path / 'p.json'}"
    assert owners(load(dealt)) == [[1, 2], [0, 1]]
    for wrong, message in [
        ({"0": [4]}, "row = 4: must be below 4"),
        ({"0": [1], "1": [1]}, "row = 1: must be in one partition only"),
        ([0, 1], "'2 ids': must be one for each of 4 rows"),
        ({"0": ["x"]}, "entry 0 = 'x': must be a whole number >= 0"),
    ]:
        (tmp_path / "p.json").write_text(json.dumps(wrong))
        refused(dealt, message)
    (tmp_path / "parts" / "part-2.parquet").write_bytes(b"")
    refused(f"flower:path={tmp_path / 'parts'}", "partition 2 = 'partition_2': must be one file or folder per part")


def test_flowers_test_set_holds_no_training_rows(tmp_path):
    whole, other, alone = tmp_path / "whole", tmp_path / "other", tmp_path / "alone"
    for root, (train, test) in ((whole, ([0, 1], [2])), (other, ([0, 0], [1, 1, 1]))):
        for split, labels in (("train", train), ("test", test)):
            saved(root / split, images_table(labels, ["x"] * len(labels))[0])
        (root / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    saved(alone, images_table([2, 1], ["x", "x"])[0])
    saved(tmp_path / "empty", images_table([], pa.array([], pa.string()))[0])
    (tmp_path / "p.json").write_text("[1, 0]")
    parts = f"flower:path={whole},partitions={tmp_path / 'p.json'}"
    for test, want in (("", [2]), (f",test={whole}", [2]), (f",test={other}", [1, 1, 1]), (f",test={alone}", [2, 1])):
        assert load(parts + test).test_y.tolist() == want
    refused(f"{parts},test={tmp_path / 'empty'}", "empty': must be a data set with examples")
    (other / "dataset_dict.json").write_text('{"splits": ["train", "more"]}')
    refused(f"{parts},test={other}", "splits = ['train', 'more']: must be one called test, or a single one")
    for root in (whole, alone):  # data-00000-of-00001.arrow ends in a number, too
        refused(f"flower:path={root}", "must be a folder of partitions, or given with partitions=FILE")


def test_partitions_of_texts_and_damaged_lists_of_partitions(tmp_path):
    pq.write_table(pa.table({"said": ["Howl, howl!", "Ay.", "No, no life!"]}), tmp_path / "said.parquet")
    spec = f"flower:path={tmp_path / 'said.parquet'},x=said,y=none,length=4,partitions="
    (tmp_path / "p.json").write_text("[1, 0, 1]")
    fool, lear = owners(load(spec + str(tmp_path / "p.json")))
    assert "".join(map(text_of, fool)) == "Ay.\n" and len(lear) == 7
    for content, message in [
        (b'example,partition\n0,"0"1\n', "p.csv': must be a CSV file (Error: "),
        (b"example,partition\n0,\xff\n", "p.csv': must be a CSV file (UnicodeDecodeError: "),
        (b"example,client\n0,1\n", "columns = ['example', 'client']: must be example and partition"),
        (b"example,partition\n0\n", "entry 0 = None: must be a whole number >= 0"),
    ]:
        (tmp_path / "p.csv").write_bytes(content)
        refused(spec + str(tmp_path / "p.csv"), message)


# --- PyTorch ----------------------------------------------------------------------------------------


class Subset:
    """As torch.utils.data.Subset: a map-style data set of some items of another."""

    def __init__(self, dataset, indices):
        self.dataset, self.indices = dataset, indices

    def __getitem__(self, index):
        return self.dataset[self.indices[index]]

    def __len__(self):
        return len(self.indices)


ITEMS = [(RNG.random((1, 4, 4)).astype(np.float32), i % 3) for i in range(6)]


def test_map_style_data_sets():
    data = from_torch([Subset(ITEMS, [4, 1]), Subset(ITEMS, [0])], Subset(ITEMS, [5]), channels_first=True)
    np.testing.assert_array_equal(data.x[0, :, :, 0], ITEMS[4][0][0])
    assert data.y.tolist() == [1, 1, 0] and data.size.tolist() == [2, 1] and data.num_classes == 3
    named = [{"img": Image.fromarray(np.full((4, 4), i, np.uint8)), "label": i} for i in range(2)]
    data = from_torch([named], client_tests=[named[:1]], x="img", y="label")
    assert data.x.dtype == np.uint8 and data.test_size.tolist() == [1] and data.decode.__name__ == "unit_images"


@pytest.mark.parametrize(
    ("clients", "options", "message"),
    [
        ([iter(ITEMS)], {}, r"^clients\[0\] = 'list_iterator': must be a map-style data set"),
        ([[]], {}, r"^clients\[0\] = 'no items'"),
        ([ITEMS], {"y": 2}, r"^clients\[0\]\[0\]: 2 is not in it \(known: 0, 1\)"),
        ([[ITEMS[0], (np.zeros(3), 1)]], {}, r"^clients\[0\]\[1\]\[0\] = 'shape \[3\]': must be shape \[1, 4, 4\]"),
        ([[(np.zeros(3), 1)]], {"channels_first": True}, r"^clients\[0\]: shape of x = \[1, 3\]"),
        ([[("text", 1)]], {}, r"^clients\[0\]\[0\]\[0\] = 'str': must be a NumPy, JAX or torch array"),
    ],
)
def test_map_style_data_sets_that_do_not_fit(clients, options, message):
    with pytest.raises(ValueError, match=message):
        from_torch(clients, ITEMS, **options)


# --- the command ------------------------------------------------------------------------------------


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


# --- CSV --------------------------------------------------------------------------------------------

SHOPS = """shop{0}height{0}weight{0}kind{0}part
b{0}1{0}0.5{0}cat{0}train
a{0}2{0}1.5{0}dog{0}test
b{0}3{0}2.5{0}dog{0}Train
"""


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_of_a_csv_file_is_found(tmp_path, separator):
    path = tmp_path / "shops.csv"
    path.write_bytes(MARK + SHOPS.format(separator).encode())
    found = load(f"csv:path={path},x=others,y=kind,client=shop,split=part")
    np.testing.assert_array_equal(found.x, np.array([[1, 0.5], [3, 2.5]], np.float32))
    assert found.y.tolist() == [0, 1] and found.class_names == ("cat", "dog") and found.groups.tolist() == [0, 0]
    assert found.test_x.tolist() == [[2.0, 1.5]] and found.test_groups.tolist() == [1]
    path.write_text("x,y\n1,cat\n2, cat\n3,cat \n")
    assert load(f"csv:path={path},x=x,y=y").class_names == ("cat",)


def test_a_csv_file_of_its_own_may_have_the_test_set(tmp_path):
    train, test = tmp_path / "train.csv", tmp_path / "test.csv"
    train.write_text("a,b,y\n1,2,0\n3,4,1\n")
    test.write_text("y,b,a\n1,6,5\n")
    found = load(f"csv:path={train},test={test},x=a+b,y=y")
    assert found.x.tolist() == [[1, 2], [3, 4]] and found.test_x.tolist() == [[5, 6]] and found.groups is None
    assert load(f"csv:path={train},x=b,y=y").test_x.shape == (0,)
    test.write_text("y,a\n0.5,2.5\n")  # the numbers of the training set happen to be whole
    found = load(f"csv:path={train},test={test},x=a,y=y")
    assert [part.dtype.name for part in (found.x, found.y, found.test_x, found.test_y)] == ["float32"] * 4
    assert found.x.tolist() == [1, 3] and found.test_y.tolist() == [0.5] and found.num_classes is None
    found = load(f"csv:path={test},test={train},x=a,y=y")
    assert found.test_x.tolist() == [1, 3] and found.test_y.dtype == np.float32


@pytest.mark.parametrize(
    ("x", "cells", "said"),
    [("t+b", "1700000000,1700000060", "t"), ("t", "1700000000.5,1700000060.5", "t"), ("t+b", "1,2", None)],
)
def test_columns_whose_differences_float32_loses_are_remarked_on(tmp_path, x, cells, said):
    path = tmp_path / "times.csv"
    path.write_text("t,b,y\n" + "".join(f"{cell},{i}.5,{i}\n" for i, cell in enumerate(cells.split(","))))
    found, lines = warned(load, f"csv:path={path},x={x},y=y", kind=DataWarning)
    assert found.x.dtype == np.float32 and len(found.x) == 2
    start = f"'{path}': {said} is rounded to float32, which loses its differences (near 1.7e+09, the deviation is 30)"
    assert lines == ([] if said is None else [f"{start}: subtract its mean first"])


@pytest.mark.parametrize(("content", "options", "message"), [
    ("a,y\n1,0\n,1\n", "x=a,y=y", "a[1] = None: must be a value: rows without one are not filled in"),
    ("a,y\n1,0\n2\n", "x=a,y=y", "must be a CSV file with a header"),
    ("a,a,y\n1,2,0\n", "x=a,y=y", "columns = ['a']: must be named differently"),
    ("a,y,s\n1,0,dev\n", "x=a,y=y,split=s", "s[0] = 'dev': must be train or test"),
    ("a;y\n1;3\n2;2,5\n", "x=a,y=y", "y[1] = '2,5': must be written with a decimal point"),
    ("a,y\n1,0\n", "x=a,y=why", "column = 'why': must be one of the file's (known: a, y)"),
    ("a,y\n1,0\n", "x=a,y=y,separator=x", "separator = 'x': must be one of"),
])  # fmt: skip
def test_wrong_csv_files_are_refused(tmp_path, content, options, message):
    path = tmp_path / "one.csv"
    path.write_text(content)
    refused(f"csv:path={path},{options}", message)
