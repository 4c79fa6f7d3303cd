"""Values that another part of the run would ignore: refused with the name of the field."""

from __future__ import annotations

import jax.numpy as jnp
import optax
import pytest
from flax import linen

from fedjax_async import Method, Settings, compare, local, models, server, simulate
from fedjax_async.config import prepare
from fedjax_async.config.resolving import settings_from
from fedjax_async.config.settings import as_dict
from fedjax_async.models import from_flax
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
    *[("optimizer", value) for value in (3, None, True)],
    *[("timing", value) for value in (3, None, ("every",))],
    *[("hyper", value) for value in (3, {"a": float("nan")}, {"a": "x"}, {"a": None}, {"a": True}, {1: 1.0})],
    *[("compress", value) for value in (3, True)],
    *[("feedback", value) for value in (3, "nope", True)],
    *[("client", value) for value in (3, "sgd", None)],
    *[("client_options", value) for value in (3, ["a"], (("batch_size", 0),), (("proximal", -1),), ((1, 2),))],
    *[("plain_sgd", value) for value in ("no", 1, None)],
    *[("server", value) for value in (3, None, "fedavg")],
]


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_every_field_of_a_method_is_checked(field, value):
    made = Method(**{"server": RULE, "timing": "buffer:size=5", field: value})
    with pytest.raises(ValueError, match=rf"^method\.{field} = "):
        prepare(Settings(**SMALL, method=made))


def test_options_of_a_methods_own_client_must_exist():
    with pytest.raises(ValueError, match=r"^option of method\.client = 'alpha': unknown"):
        prepare(Settings(**SMALL, method=Method(RULE, client_options=(("alpha", 1.0),))))
    good = Method(RULE, proximal=jnp.float32(0.1), timing="buffer:size=5")
    prepare(Settings(**SMALL, method=Method(lambda hyper: RULE, hyper={"a": jnp.zeros(())})))
    prepare(Settings(**SMALL, method=good))


@pytest.mark.parametrize("field", ["remat", "per_client"])
@pytest.mark.parametrize("value", ["no", "", 1, None])
def test_a_truth_value_is_no_text(field, value):
    with pytest.raises(ValueError, match=rf"^{field} = .*: must be True or False"):
        Settings(**SMALL, **{field: value})


# --- a timing beside a method's own ---------------------------------------------------------------


@pytest.mark.parametrize("timing", ["every", "window:length=3", lambda scenario: None])
def test_a_timing_beside_the_methods_own_is_refused(timing):
    with pytest.raises(ValueError, match=r"^timing = .*: must be left out: the method brings its own, buffer:size=5$"):
        prepare(Settings(**SMALL, method="fedbuff@buffer:size=5", timing=timing))


def test_a_comparison_gives_its_timing_to_the_methods_without_one():
    settings = Settings(**SMALL, timing="buffer:size=2")
    runs = compare(["fedbuff", "fedbuff@buffer:size=5"], settings, progress=False)
    closed = {method: (run.settings["timing"], run.counters["server_steps"]) for method, (run,) in runs.items()}
    assert closed == {"fedbuff": ("buffer:size=2", 5), "fedbuff@buffer:size=5": (None, 2)}


# --- a client of one's own with settings that it ignores -------------------------------------------------

ASKED = [
    ("lr", {"lr": 0.5}),
    ("optimizer", {"optimizer": "adam"}),
    ("decay", {"decay": "cosine"}),
    ("remat", {"remat": True}),
    ("optimizer", {"optimizer": "adam", "method": "scaffold"}),
    ("proximal", {"method": "fedprox"}),
    ("proximal", {"method": "fedbuff:proximal=0.3"}),
    ("proximal", {"method": Method(RULE, proximal=0.1)}),
]


@pytest.mark.parametrize(("field", "settings"), ASKED)
def test_a_client_object_beside_what_it_ignores_is_refused(field, settings):
    with pytest.raises(ValueError, match=rf"^{field} = .*client"):
        prepare(Settings(**{**SMALL, **settings}, client=client_of(linear())))


@pytest.mark.parametrize(("field", "settings"), [one for one in ASKED if one[0] not in ("lr", "remat")])
def test_a_factory_that_lacks_an_option_is_not_given_it(field, settings):
    method = settings.get("method", Method(RULE, client=only_lr))
    proximal = method.proximal if isinstance(method, Method) else 0.2
    method = Method(RULE, proximal=proximal, client=only_lr)
    with pytest.raises(ValueError, match=rf"^{field} = .*client"):
        prepare(Settings(**{**SMALL, **settings, "method": method}))
    prepare(Settings(**SMALL, lr=0.3, method=Method(RULE, client=only_lr)))


def test_a_client_object_beside_options_of_the_methods_own_client_is_refused():
    feddyn = server.METHODS["feddyn"].client
    method = Method(RULE, client=feddyn, client_options=(("alpha", 0.5),))
    with pytest.raises(ValueError, match=r"^method = .*: must leave out the option alpha: the client algorithm"):
        prepare(Settings(**SMALL, method=method, client=client_of(linear())))


def test_even_the_usual_value_is_refused_where_it_was_given():
    with pytest.raises(ValueError, match=r"^lr = 0\.01: must be left out"):
        settings_from(None, {**SMALL, "client": client_of(linear()), "lr": 0.01})
    assert as_dict(settings_from(None, {**SMALL, "client": client_of(linear())}))["lr"] is None


# --- a loss that is a mean --------------------------------------------------------------------------


def test_the_mean_of_a_batch_is_no_loss():
    with pytest.raises(ValueError, match=r"^model\.loss returned float32\[\]: must return a number per example"):
        simulate(**{**SMALL, "model": linear(mean_loss)})
    with pytest.raises(ValueError, match=r"^client\.step.*shape of model\.loss = \[\]: must be \[8\]: one loss"):
        prepare(Settings(**{**SMALL, "model": linear()}, client=client_of(linear(mean_loss))))


def test_the_mean_of_a_batch_is_no_loss_of_a_flax_module_either():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(10)(x.reshape(x.shape[0], -1))

    with pytest.raises(ValueError, match=r"^model\.loss returned float32\[\]"):
        prepare(Settings(**{**SMALL, "model": from_flax(Net(), input_shape=(28, 28, 1), loss=mean_loss)}))


def test_a_correction_is_a_function():
    for option in ("correct", "scale"):
        with pytest.raises(ValueError, match=f"^{option} = 3: must be "):
            local.local_training(linear(), optimizer=optax.sgd(0.1), **{option: 3})


def test_a_replaced_function_of_a_rule_is_named():
    rule = server.fedasync()
    made = Method(rule._replace(receive=lambda state, memory, arrival: (state, memory, None)))
    with pytest.raises(ValueError, match=r"^rule.receive = '.*lambda.*': must be replaced together with given"):
        prepare(Settings(**SMALL, method=made))
