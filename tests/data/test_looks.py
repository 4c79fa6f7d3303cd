"""Data that look as if a step of their preparation was forgotten: a run warns, once for each thing."""

from __future__ import annotations

import warnings
from dataclasses import replace

import flax.linen as nn
import numpy as np
import pytest

from fedjax_async import Settings, named, registry
from fedjax_async.config import prepare
from fedjax_async.config.resolving import settings_from
from fedjax_async.data import Dataset, Identity, decode, fashion_mnist_6k, federate, from_arrays, load
from fedjax_async.data.looks import DataWarning, warn_of_looks
from fedjax_async.models import from_flax

RNG = np.random.default_rng(0)
Y = np.arange(60) % 3
IMAGES = RNG.random((60, 8, 9, 1)).astype(np.float32)


def said(x=IMAGES, y=Y, test_y=Y, **fields):
    """What is said about data of one client, without their name."""
    data = from_arrays([(x, y)], (x, test_y))._replace(**fields)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_looks(data)
    assert all(issubclass(one.category, DataWarning) for one in found)
    lines = [str(one.message) for one in found]
    assert all(line.startswith("data own: ") and "\n" not in line for line in lines)
    return [line.removeprefix("data own: ") for line in lines]


def test_good_data_are_not_remarked_on():
    standardised = 3 * RNG.standard_normal((60, 8, 9, 3)).astype(np.float32)
    counts = np.rint(100 * RNG.random((60, 64))).astype(np.float32)
    tokens = RNG.integers(0, 82, (60, 80)).astype(np.uint8)
    for x in (IMAGES, (255 * IMAGES).astype(np.uint8), standardised, counts, tokens, 16 * IMAGES, 300 * IMAGES[:, 0]):
        assert said(x) == []
    for data in (federate(fashion_mnist_6k(), "iid", 10), load("population").deal(5, 0)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_of_looks(data)


def test_pixels_that_are_not_scaled():
    whole = np.rint(255 * IMAGES)
    vectors = whole.reshape(60, -1)[:, :64]
    for x, advice in (
        (255 * IMAGES, ", or set normalise='training'"),
        (whole.astype(np.int32), ", or pass them as uint8"),
        (vectors, ", or set normalise='training'"),
        (vectors.astype(np.uint8), ""),
        (vectors.astype(np.int64), ""),
    ):
        (line,) = said(x)
        assert line == (
            f"the inputs are numbers from {x.min():g} to {x.max():g}, like pixels that are not scaled: "
            f"divide them by 255{advice}"
        )
    raw = (255 * IMAGES).astype(np.uint8)
    assert said(raw, decode=decode.as_is)[0].startswith("uint8 images come to the model as numbers up to 255: give")
    assert said(raw, decode=decode.as_is, streamed=True) != []  # seen without reading a value
    assert said(255 * IMAGES, streamed=True) == []
    assert said(255 * IMAGES, decode=lambda x: x / 255) == []  # a decoder of one's own


def test_channels_first():
    (line,) = said(RNG.random((60, 3, 32, 32)))
    assert line == (
        "rows of shape [3, 32, 32] look like images with the channels first; the models take them last: "
        "np.moveaxis(x, 1, -1)"
    )
    assert len(said(np.zeros((60, 1, 28, 28), np.uint8))) == 1
    assert said(RNG.random((60, 3, 32, 3))) == said(RNG.random((60, 3, 4, 5))) == []


ONES = (
    "^data own: labels are from 1 to 3, but the first class is 0: the model has 4 outputs, and no example of class 0; "
    "pass y - 1 if the classes are numbered from 1$"
)


def test_labels_that_begin_at_one():
    y = (Y + 1).astype(np.uint8)
    dataset = Dataset("own", IMAGES, y, IMAGES, y)
    with pytest.warns(DataWarning, match=ONES):
        federate(dataset, "iid", 3)
    with pytest.warns(DataWarning, match=ONES):
        federate(Dataset("own", IMAGES, y), "iid", 3, test_fraction=0.1)
    with pytest.warns(DataWarning, match=ONES):
        from_arrays([(IMAGES, y)] * 2, (IMAGES, y))
    # no warning: the classes are counted elsewhere; there is a 0; in sequences 0 is padding; targets are no labels
    federate(dataset._replace(num_classes=5), "iid", 3)
    from_arrays([(IMAGES, y)], (IMAGES, y), num_classes=4)
    from_arrays([(IMAGES, y)], (IMAGES, Y))
    sequences = np.stack([y, y], axis=1)
    from_arrays([(IMAGES, sequences)], (IMAGES, sequences))
    from_arrays([(IMAGES, y / 2)], (IMAGES, y / 2))


def test_test_labels_that_no_client_trains():
    (line,) = said(y=np.minimum(Y, 1))
    assert line == "20 of 60 test examples have a label that no client trains (2): no run can learn it"
    (line,) = said(y=np.minimum(Y, 1), test_y=np.arange(60) % 10)
    assert "48 of 60 test examples" in line and "(2, 3, 4, 5, 6, ...)" in line
    order, size = np.flatnonzero(Y != 2).astype(np.int32), np.int32([40])
    assert len(said(order=order, size=size)) == 1  # rows that no client owns do not count
    assert len(said(order=Identity((60,)))) == 0
    assert len(said(y=np.minimum(Y, 1).astype(np.uint64))) == 1
    assert said(y=Y.astype(np.float32), test_y=Y + 0.5) == []


def test_a_run_says_it_and_normalised_inputs_are_fine():
    dataset = named("own", Dataset("own", 255 * IMAGES, Y, 255 * IMAGES, Y))
    for method in ("fedasync", "pushcen"):
        run = Settings(method=method, dataset=dataset, model="logistic", clients=4, updates=2, partition="iid")
        registry.forget()
        with pytest.warns(DataWarning, match="^data own: the inputs are numbers from"):
            prepare(run)
        prepare(replace(run, normalise="training"))


ADVICE = {
    "channels": "rows of shape [3, 12, 12] look like images with the channels first: pass np.moveaxis(x, 1, -1)",
    "one-hot": "these are one-hot rows: pass y.argmax(axis=1)",
    "truths": "these are truth values: pass y.astype(int)",
    "floats": "these are labels as floats: pass y.astype(int)",
}


class Convolution(nn.Module):
    @nn.compact
    def __call__(self, x):
        if x.shape[1] < 5:
            raise TypeError("too few pixels")
        return nn.Dense(3)(nn.Conv(3, (5, 5), padding="VALID")(x).reshape(len(x), -1))


@pytest.mark.filterwarnings("ignore::fedjax_async.data.looks.DataWarning")
@pytest.mark.parametrize("what", ADVICE)
def test_a_model_that_does_not_fit_tells_what_the_data_are(what):
    x = RNG.random((60, 3, 12, 12) if what == "channels" else (60, 12, 12, 3)).astype(np.float32)
    y = {"one-hot": np.eye(3)[Y], "truths": Y == 1, "floats": Y.astype(np.float32)}.get(what, Y)
    made = [from_flax(Convolution(), input_shape=(12, 12, 3))] if what == "channels" else []
    for model in ("lenet5", Convolution(), *made):
        settings = {"model": named("net", model) if not isinstance(model, str) else model, "updates": 2}
        with pytest.raises(ValueError) as error:
            prepare(settings_from(None, settings | {"data": named("own", from_arrays([(x, y)] * 3, (x, y)))}))
        assert ADVICE[what] in str(error.value) and "\n" not in str(error.value)
