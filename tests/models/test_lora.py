"""Low-rank adapters of any model: the start, the formula, what is trained, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_async import simulate
from fedjax_async.models import from_flax, lora, make


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dense(3)(nn.relu(x))


KEY = jax.random.key(0)
PLAIN = make("lenet5", num_classes=10, input_shape=(28, 28, 1))


@pytest.fixture(scope="module")
def base():
    return jax.jit(PLAIN.init)(KEY)


def test_the_start_is_the_base_and_the_change_is_a_product_of_two_small_matrices(base):
    x = jax.random.normal(KEY, (3, 28, 28, 1))
    model = lora(PLAIN, base, rank=2, alpha=6.0, weights="fc*/kernel,conv1/kernel", trained="output/*")
    params = jax.jit(model.init)(jax.random.key(1))
    apply, plain = jax.jit(model.apply), jax.jit(PLAIN.apply)
    np.testing.assert_allclose(apply(params, x), plain(base, x), rtol=1e-6)
    assert set(params["a"]) == {"conv1/kernel", "fc1/kernel", "fc2/kernel"} and set(params["full"]) == {
        "output/kernel", "output/bias"}  # fmt: skip
    moved = jax.tree.map(lambda leaf: leaf + 0.1, params)
    by_hand = jax.tree.map(np.array, base)
    for name in params["a"]:
        layer = by_hand[name.split("/")[0]]
        change = 3.0 * np.asarray(moved["a"][name]) @ np.asarray(moved["b"][name])
        layer["kernel"] = layer["kernel"] + change.reshape(layer["kernel"].shape)
    by_hand["output"] = {name: leaf + np.float32(0.1) for name, leaf in by_hand["output"].items()}
    np.testing.assert_allclose(apply(moved, x), plain(by_hand, x), rtol=1e-4, atol=1e-5)


def test_running_statistics_go_on_as_those_of_the_model():
    plain = from_flax(Normalised(), input_shape=(5,))
    base = jax.jit(plain.init)(KEY)
    model = lora(plain, base, rank=1)
    params = jax.jit(model.init)(KEY)
    x = jax.random.normal(KEY, (4, 5))
    outputs, changed = jax.jit(model.train)(params, x, KEY, jnp.ones(4))
    want, after = jax.jit(plain.train)(base, x, KEY, jnp.ones(4))
    np.testing.assert_allclose(outputs, want, rtol=1e-5, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, changed["batch_stats"], after["batch_stats"])
    jax.tree.map(np.testing.assert_array_equal, changed["params"], params["params"])


def test_what_stays_with_a_client_stays_there_in_the_adapted_model():
    plain = from_flax(
        Normalised(), input_shape=(5,), private=lambda path: path[0] == "batch_stats" or "Dense_1" in path
    )
    base = plain.init(KEY)
    stays = lora(plain, base, rank=1, trained="Dense_1/bias").private
    paths = [
        ("params", "b", "Dense_1/kernel"),
        ("params", "full", "Dense_1/bias"),
        ("batch_stats", "BatchNorm_0", "mean"),
    ]
    assert [stays(path) for path in [*paths, ("params", "a", "Dense_0/kernel")]] == [True, True, True, False]
    head = from_flax(nn.Dense(3), input_shape=(5,), private=lambda path: path == ("bias",))
    assert lora(head, head.init(KEY), rank=1).private is None  # the bias is a part of the constant base


def test_a_run_trains_and_sends_the_adapters_alone():
    plain = make("mlp", num_classes=10, input_shape=(28, 28, 1))
    base = jax.jit(plain.init)(KEY)
    model = lora(plain, base, rank=2, alpha=2.0)
    run = simulate(method="asgd", model=model, clients=4, updates=12, lr=0.05, steps=5, engine="reference")
    numbers = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, KEY)))
    assert run.evaluations["bytes_up"][-1] == 12 * 4 * numbers
    assert numbers < sum(leaf.size for leaf in jax.tree.leaves(base)) / 10
    assert run.evaluations["loss"][-1] < run.evaluations["loss"][0]


@pytest.mark.parametrize(("change", "message"), [
    ({"rank": 0}, "rank = 0"), ({"alpha": 0.0}, "alpha = 0.0"),
    ({"weights": "fc9/kernel"}, "weights = 'fc9/kernel': must be paths of the model .*fc1/kernel"),
    ({"trained": "fc9/*"}, r"trained = 'fc9/\*': must be paths of the model"),
    ({"weights": "fc1/*"}, r"weights = \['fc1/bias'\]: must be of weights with two axes or more"),
])  # fmt: skip
def test_wrong_options_are_refused(base, change, message):
    with pytest.raises(ValueError, match=message):
        lora(PLAIN, base, **change)
