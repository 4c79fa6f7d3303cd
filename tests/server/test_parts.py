"""Server parts by name: against NumPy over 50 arrivals, against AsyncCurve's options, in runs; and refused parts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import Settings, register, server
from fedjax_async.base import factories, registry
from fedjax_async.config import method, plan_groups, prepare
from fedjax_async.config.paths import changed, value_of, values_of
from fedjax_async.config.settings import as_dict, fields_of
from fedjax_async.geometry import MANIFOLDS, geodesic
from fedjax_async.server import PARTS, SERVERS, with_parts
from fedjax_async.types import Facts
from tests.geometry.textbook import surgery
from tests.refusals import refusals
from tests.server import made_up, textbook
from tests.server.made_up import CLIENTS, flat, random_uploads, start_params


def arrivals_of(spec, uploads):
    return made_up.uploading(spec.partition(":")[0].partition("+")[0], made_up.stacked(uploads))


def path_of(spec, uploads):
    rule, arrivals = method(spec).rule.make(), arrivals_of(spec, uploads)
    path, weights = jax.jit(lambda: made_up.receive_all(rule, start_params(), arrivals)[1:])()
    return flat(path), np.asarray(weights)


# --- NumPy ------------------------------------------------------------------------------------------


class Book(textbook.Rule):
    """A rule of uniform mean directions with every part; a part whose option is left out does nothing."""

    staleness, corrected, limit, lowest, length = "polynomial", False, None, 1.0, 1
    of_changes, of_steps, sigma, every = 0.0, 0.0, 2.0, 1  # momenta of both kinds; the average

    def begin(self, x, uploads):
        self.begins, self.tau, self.models = self.sigma * sum(u.closes for u in uploads), 0, []
        self.counts, self.moved, self.stepped = np.zeros(CLIENTS), 0.0, 0.0

    def direction(self, x, u):
        return surgery(u.delta, x - u.start) if self.corrected else super().direction(x, u)

    def taken(self, x, t):
        self.counts[t.client] += 1
        share = 1.0 if self.limit is None else min(self.limit, self.counts.sum() / (CLIENTS * self.counts[t.client]))
        self.moved = self.of_changes * self.moved + share * t.direction
        return t.scale * self.moved

    def close(self, x, waiting):
        eta = self.server_lr * (1 + (self.lowest - 1) * (self.tau % self.length) / max(self.length - 1, 1))
        self.stepped = self.of_steps * self.stepped + eta * np.mean(waiting, axis=0)
        if self.tau >= self.begins and self.tau % self.every == 0:
            self.models.append(x + self.stepped)
        self.tau += 1
        return x + self.stepped

    def shown(self, x):
        return np.mean(self.models, axis=0) if self.models else x


BOOKS = {
    "fedbuff:server_lr=0.7+swa:start=0.3": {"server_lr": 0.7, "sigma": 0.3},
    "fedbuff:server_lr=0.2+correction+dominance:limit=1.5+cyclic:length=4+momentum:beta=0.5+swa:start=0.2,every=3": {
        "server_lr": 0.2, "corrected": True, "limit": 1.5, "lowest": 0.2, "length": 4, "of_steps": 0.5,
        "sigma": 0.2, "every": 3,
    },
    "fedasync+cyclic:lowest=0.3,length=5+momentum:beta=0.4": {
        "server_lr": 0.6, "towards": True, "lowest": 0.3, "length": 5, "of_steps": 0.4,
    },
    "fedasync:mixing=0.2+dominance+momentum:beta=0.4,of=changes": {
        "server_lr": 0.2, "towards": True, "limit": 1.0, "of_changes": 0.4,
    },
    "orthofl+dominance+swa:start=0.5": {"server_lr": 0.6, "towards": True, "limit": 1.0, "sigma": 0.5},
}  # fmt: skip


@pytest.mark.float64
@pytest.mark.parametrize("spec", BOOKS)
def test_fifty_arrivals_are_those_of_numpy(spec):
    uploads = random_uploads(11)
    have, _ = path_of(spec, uploads)
    want, _ = textbook.play(flat(start_params()), uploads, Book(**BOOKS[spec]))
    np.testing.assert_allclose(have, want, rtol=1e-10, atol=1e-12)
    assert len(uploads) == 50 and sum(u.closes for u in uploads) > 15


# --- identities -------------------------------------------------------------------------------------

PLAIN = "asynccurve:warm=off,correction=fedasync,swa=1,dominance=false"
SAME = {  # the others are those of NumPy above, and the options in ``test_rules.py``
    "correction": (
        "fedbuff:server_lr=1,staleness=constant+correction:by=orthodyn,switch=share,fraction=0.3",
        "orthodyn:switch=share,fraction=0.3",
    ),
    "geodesic": (
        f"{PLAIN},lowest=1,step=line,server_lr=1+geodesic:size=0.4",
        f"{PLAIN},lowest=1,step=geodesic,server_lr=0.4",
    ),
    "none": ("fedbuff+correction:by=asgd+cyclic:lowest=1+momentum:beta=0+swa:start=1", "fedbuff"),
}


@pytest.mark.slow_cases("geodesic")
@pytest.mark.float64
@pytest.mark.parametrize(("spec", "option"), SAME.values(), ids=SAME)
def test_a_part_is_the_option_of_rules_that_have_one_and_may_do_nothing(spec, option):
    uploads = [u._replace(closes=True) for u in random_uploads(12, 20)]
    (have, weights), (want, same) = path_of(spec, uploads), path_of(option, uploads)
    np.testing.assert_allclose(have, want, rtol=1e-12 if option == "fedbuff" else 1e-10, atol=1e-12)
    if option == "fedbuff":
        np.testing.assert_allclose(weights, same, rtol=1e-12)


@pytest.mark.float64
def test_parts_of_the_step_get_the_step_at_its_own_rate():
    """FADAS cuts the rates of stale steps: momentum adds up the cut steps, and the geodesic leads to where they end."""
    uploads = [u._replace(closes=True) for u in random_uploads(16, 20)]
    plain, weights = path_of("fadas:server_lr=0.05", uploads)
    start = flat(start_params())
    at, moved, want = start, np.zeros_like(start), []
    for step, weight in zip(np.diff([start, *plain], axis=0), weights, strict=True):
        moved = 0.5 * moved + step if weight else moved
        at = at + moved if weight else at
        want.append(at)
    have, _ = path_of("fadas:server_lr=0.05+momentum:beta=0.5", uploads)
    np.testing.assert_allclose(have, want, rtol=1e-10)
    half, _ = path_of("fadas:server_lr=0.05+geodesic:size=0.5", uploads)
    np.testing.assert_allclose(
        half[0], geodesic(MANIFOLDS["lorentz"](), jnp.asarray(start), jnp.asarray(plain[0]), 0.5), rtol=1e-10
    )


# --- by name ----------------------------------------------------------------------------------------


BASE = {"model": "logistic", "clients": 4, "steps": 1, "updates": 12, "eval_updates": 4, "delay": "exponential"}


def test_options_of_parts_have_paths_and_a_sweep_over_them_shares_a_program():
    base = Settings(method="fedbuff+swa:start=0.3+dominance", timing="buffer:size=3", **BASE)
    grid = {"method.swa.start": 0.6, "method.dominance.limit": 2.0, "method.server_lr": 0.5}
    settings = [base, *(Settings(**changed(fields_of(base), {path: value})) for path, value in grid.items())]
    assert [str(one.method) for one in settings[1:]] == [
        "fedbuff+swa:start=0.6+dominance",
        "fedbuff+swa:start=0.3+dominance:limit=2.0",
        "fedbuff:server_lr=0.5+swa:start=0.3+dominance",
    ]
    assert len(plan_groups(settings)) == 1
    given = settings[-1]
    assert value_of(given, "method.swa.start") == 0.3 and value_of(given, "method.swa.every") is None
    left = values_of(given, ["method", "method.server_lr", "method.swa.start"])
    assert left == {"method": "fedbuff+swa+dominance", "method.server_lr": 0.5, "method.swa.start": 0.3}


def test_a_part_replaces_the_option_that_is_switched_off():
    off = "asynccurve:swa=1,lowest=1,dominance=false"
    for spec in ("fedavgm:momentum=0+momentum", f"{off}+swa+cyclic+dominance"):
        prepare(Settings(**BASE | {"method": spec}))


@pytest.mark.usefixtures("nothing_stays_registered")
def test_a_part_of_the_users_own_has_a_fingerprint():
    @register("part", "shorter")
    def shorter(*, by: float = 0.5):
        """Every step times a number."""
        return server.Part(step=optax.scale(by))

    have, want = (path_of(spec, random_uploads(15, 9))[0] for spec in ("asgd+shorter:by=0.25", "asgd:server_lr=0.25"))
    np.testing.assert_allclose(have, want, rtol=1e-6)
    saved = as_dict(Settings(method="asgd+shorter:by=0.25", **BASE))
    assert saved["own"] == {"method": {"+shorter": registry.ADDED["part"]["shorter"].fingerprint}}


def test_every_part_says_what_it_does_and_may_be_made_without_options():
    for name, factory in PARTS.items():
        part = factory()
        assert factories.summary(factory).endswith(".") and sum(place is not None for place in part) == 1, name


test_what_makes_no_sense_is_refused_with_its_reason = refusals(
    ("fedbuff+swaa", "part = 'swaa': unknown; did you mean 'swa'?"),
    ("fedbuff+swa:begin=1", "part = 'swa:begin=1': swa has no option 'begin'"),
    ("fedbuff+swa+swa", "part = 'swa': must be given once"),
    ("fedbuff+dominance:limit=0", "dominance = 0: must be"),
    ("fedbuff+momentum:beta=1", "beta = 1: must be"),
    ("fedbuff+momentum:of=time", "of = 'time': must be"),
    ("fedbuff+geodesic:size=2", "size = 2: must be"),
    ("fedbuff+swa:start=2", "start = 2"),
    ("fedasync+correction", "method = 'fedasync+correction': correction: must be left out: the rule changes"),
    ("orthofl+correction", "correction: must be left out: the rule changes"),
    ("orthograd+correction", "correction: must be left out: the rule changes"),
    ("feddyn+correction", "correction: must be left out: the rule changes"),
    ("area+correction", "correction: must be left out: area takes the client's start plus its delta"),
    ("quafl+correction", "correction: must be left out: quafl takes"),
    ("orthofl_no_average+correction", "correction: must be left out: orthofl_no_average takes"),
    ("ca2fl+momentum", "left out: ca2fl takes its step by itself"),
    ("feddyn+cyclic", "left out: feddyn takes its step by itself"),
    ("orthofl_no_average+geodesic", "left out: orthofl_no_average takes its step by itself"),
    ("asynccurve+dominance", "has it by its option dominance (dominance=false switches"),
    ("asynccurve+swa", "has it by its option swa (swa=1 switches"),
    ("fedavgm+momentum", "has it by its option momentum (momentum=0 switches"),
    ("swift+swa", "part = 'swa': must be left out: swift runs without a server"),
    by=lambda spec: prepare(Settings(**BASE | {"method": spec})),
)


def taken_by(name):
    """The parts that a rule takes; of the others it says why not."""
    taken = []
    for part in PARTS:
        try:
            with_parts(SERVERS[name], {part: PARTS[part]()})()
            taken.append(part)
        except ValueError as error:
            assert "left out: " in str(error)
    return taken


OF_EACH_FILE = {factory.__module__: name for name, factory in SERVERS.items()}.values()


@pytest.mark.parametrize("name", SERVERS)
def test_a_rule_takes_a_part_or_says_why_not_and_keeps_the_types_of_its_state(name):
    parts = taken_by(name)
    assert {"geodesic", "dominance", "swa"} & {*parts}
    if name in OF_EACH_FILE:
        rule = with_parts(SERVERS[name], {part: PARTS[part]() for part in parts})()
        arrival = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], arrivals_of(name, random_uploads(0, 1))))
        before = jax.eval_shape(rule.init, start_params(), Facts(CLIENTS, False, 9, 5))
        after = jax.eval_shape(made_up.received(rule), *before, arrival)[:2]
        before, after = (jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) for state in (before, after))
        assert after == before


def test_a_rule_that_cannot_take_a_part_is_refused_before_it_is_built():
    def bare(*, server_lr: float = 1.0):
        return server.rule(optimizer=optax.sgd(server_lr))

    with pytest.raises(ValueError, match=r"parts = 'dominance': must be swa alone: bare has no guard rails"):
        with_parts(bare, {"dominance": PARTS["dominance"]()})
    assert with_parts(bare, {"swa": PARTS["swa"]()})(server_lr=0.5).close is not None
    direct = server.transforms.transformed
    steps = server.Transform(lambda params: (), None, steps=(optax.trace(0.5),))
    with pytest.raises(ValueError, match=r"left out: a rule that is not made by server\.rule"):
        direct(steps, (), jnp.zeros(2), None)


@pytest.mark.float64
def test_rules_that_know_the_number_of_clients_count_them_in_every_room():
    """The dominance penalty also gets N in the rules that ``server.rule`` does not make."""
    uploads = [u._replace(closes=True) for u in random_uploads(14, 20)]
    _, want = path_of("asgd+dominance", uploads)
    for name in ("ca2fl", "feddyn", "orthofl_no_average"):
        np.testing.assert_allclose(path_of(f"{name}+dominance", uploads)[1], want, err_msg=name)
    assert np.sum((want > 0) & (want < 1)) > 0
