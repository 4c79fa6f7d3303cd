"""Values that another part of the run would ignore: refused with the name of the field."""

from __future__ import annotations

import jax.numpy as jnp
import optax
import pytest

from fedjax_async import Method, Settings, Spec, local, models, server, types
from fedjax_async.base.method import LOCAL
from fedjax_async.config import prepare
from fedjax_async.config.resolving import settings_from, settings_in_comparison
from fedjax_async.config.settings import as_dict
from fedjax_async.types import Model

SMALL = {"model": "logistic", "clients": 5, "steps": 1, "batch_size": 8, "eval_examples": 40, "updates": 10}
RULE = server.fedbuff()


def mean_loss(outputs, y):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()


def linear(loss=optax.softmax_cross_entropy_with_integer_labels):
    def apply(params, x, key=None):
        return x.reshape(x.shape[0], -1) @ params["w"]

    return Model(lambda key: {"w": jnp.zeros((784, 10))}, apply, loss)


def client_of(model):
    ready = models.decoded(model, lambda x: x.astype(jnp.float32) / 255)
    return local.local_training(ready, optimizer=optax.sgd(0.1), batch_size=8)


def only_lr(model, *, lr):
    return local.local_training(model, optimizer=optax.sgd(lr))


FIELDS = [
    *[("proximal", value) for value in (-1, -1e-9, float("nan"), float("inf"), "0.1", True, None, [0.1])],
    *[("lr", value) for value in (0, -0.1, float("nan"), float("inf"), "0.1", True, None)],
    *[("optimizer", value) for value in (3, None, True)], *[("timing", value) for value in (3, ("every",))],
    *[("compress", value) for value in (3, True)], *[("feedback", value) for value in (3, "nope", True)],
    *[("client", value) for value in (3, "sgd")],
    *[("client", Spec(local.local_training, **{name: 0})) for name in (*LOCAL[2:4], "scale")],
    *[("plain_sgd", value) for value in ("no", 1, None)], *[("rule", value) for value in (3, None, "fedavg")],
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_every_field_of_a_method_is_checked(field, value):
    made = Method(**{"rule": RULE, "timing": "buffer:size=5", field: value})
    with pytest.raises(ValueError, match=rf"^method\.{field} = "):
        prepare(Settings(**SMALL, method=made))


def own_client(**settings):
    return {"client": client_of(linear()), **settings}


def lacking(field, proximal=0.2, **settings):
    """A factory that takes a rate and nothing else, beside another setting."""
    return {"method": Method(RULE, proximal=proximal, client=only_lr), **settings}, rf"^{field} = .*client"


REFUSED = [
    *[({field: value}, rf"^{field} = .*: must be True or False") for field in ("remat", "per_client")
      for value in ("no", "", 1, None)],
    # a timing beside the method's own
    *[({"method": "fedbuff@buffer:size=5", "timing": timing},
       r"^timing = .*: must be left out: the method brings its own, buffer:size=5$")
      for timing in ("every", "window:length=3", lambda scenario: None)],
    # a client object, or a factory, beside what it ignores
    (own_client(optimizer="adam", method="scaffold"), "^optimizer = .*client"),
    (own_client(compute="bfloat16"), "^compute = 'bfloat16': must be float32 or float64: the client algorithm"),
    (own_client(method="fedprox"), "^proximal = .*client"),
    (own_client(method="fedbuff:proximal=0.3"), "^proximal = .*client"),
    (own_client(method=Method(RULE, proximal=0.1)), "^proximal = .*client"),
    (own_client(method=Method(RULE, client=Spec(server.feddyn_client, alpha=0.5))),
     r"^method = .*: must leave out the option alpha: the client algorithm"),
    lacking("proximal"),
    # a loss that is a mean
    ({"model": linear(), "client": client_of(linear(mean_loss))},
     r"^client\.step.*shape of model\.loss = \[\]: must be \[8\]: one loss"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_would_be_ignored_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        prepare(Settings(**SMALL | settings))


def fair(*, gain: types.Traced = 0.5):
    return server.fedasync(mixing=0.1 + gain)


@pytest.mark.parametrize("method", [
    Method(RULE, proximal=jnp.float32(0.1), timing="buffer:size=5"),
    Spec(server.fedasync, mixing=0.3), Method(server.fedasync), Method(Spec(fair, gain=0)),
    Method(RULE, client=only_lr),
])  # fmt: skip
def test_what_a_method_may_hold_passes(method):
    prepare(Settings(**SMALL, lr=0.3, method=method))


def test_even_the_usual_value_is_refused_where_it_was_given():
    with pytest.raises(ValueError, match=r"^lr = 0\.01: must be left out"):
        settings_from(None, {**SMALL, **own_client(), "lr": 0.01})
    assert as_dict(settings_from(None, {**SMALL, **own_client()}))["lr"] is None


@pytest.mark.parametrize("option", ["correct", "scale"])
def test_a_correction_is_a_function(option):
    with pytest.raises(ValueError, match=f"^{option} = 3: must be "):
        local.local_training(linear(), optimizer=optax.sgd(0.1), **{option: 3})


def test_a_comparison_gives_its_timing_to_the_methods_without_one():
    methods = ("fedbuff", "fedbuff@buffer:size=5")
    given = [settings_in_comparison(Settings(**SMALL, timing="buffer:size=2"), method, methods) for method in methods]
    assert [one.timing for one in given] == ["buffer:size=2", None]
    assert [int(prepare(one).schedule.closes.sum()) for one in given] == [5, 2]
