"""Compressed uploads in runs: bytes are those of the recorded uploads; what is private stays; settings."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_async import Method, Settings, simulate
from fedjax_async.compress import COMPRESSORS, Compressor, Dense, bits, identity, most_bits, qsgd, topk
from fedjax_async.config import execute, prepare
from fedjax_async.config.grid import expand
from fedjax_async.config.paths import value_of
from fedjax_async.config.resolving import resolved, with_objects
from fedjax_async.engine import run_waves
from fedjax_async.engine.storage import RestoringClient
from fedjax_async.local import FEEDBACKS
from fedjax_async.server import METHODS, asgd, asynfl
from tests.engine.problem import MODEL, carrying, client, data
from tests.refusals import refusals

SMALL = {"model": "logistic", "clients": 5, "steps": 2, "delay": "exponential", "updates": 12}


def test_bytes_are_the_recorded_ones_and_the_clock_knows_the_longest():
    settings = Settings(**SMALL, method="fedasync", compress="topk:ratio=0.05", eval_updates=1, network="link:up=1e3")
    experiment = prepare(settings)
    run = execute(experiment)
    for name, column in (("bytes_up", "upload_bytes"), ("values_bytes_up", "upload_values_bytes")):
        total = np.concatenate([[0], np.cumsum(run.updates[column])])
        np.testing.assert_array_equal(run.evaluations[name], total)
    assert (run.updates["upload_values_bytes"] == experiment.traffic.values).all()
    assert run.updates["upload_bytes"].max() <= experiment.traffic.up < experiment.traffic.down
    assert len(set(run.updates["upload_bytes"])) > 1, "sizes must depend on what is sent"
    # over the same link an uncompressed upload takes longer, in proportion to its bytes
    plain = prepare(Settings(**SMALL, method="fedasync", network="link:up=1e3"))
    slower = plain.schedule.upload_time[:5] - experiment.schedule.upload_time[:5]
    np.testing.assert_allclose(slower, (plain.traffic.up - experiment.traffic.up) / 1e3, rtol=1e-9)
    assert plain.traffic.values is None


def test_further_copies_and_uploads_never_applied_are_traffic():
    with_faults = {"faults": "duplicate:probability=0.5+late:probability=0.3,factor=9", "timeout": 2.0, "late": "drop"}
    settings = Settings(**SMALL, method="fedasync", compress="topk:ratio=0.05", **with_faults)
    experiment = prepare(settings)
    run, s = execute(experiment), experiment.schedule
    size = np.full(len(s.client), experiment.traffic.up)
    size[s.job] = run.updates["upload_bytes"]
    outcome = run_waves(experiment.components, s, experiment.params, experiment.key, experiment.points)
    size[outcome.in_vain] = -(-outcome.in_vain_records["bits"].astype(np.int64) // 8)  # trained, but dropped
    assert len(outcome.in_vain) > 0
    here = s.upload_time <= run.evaluations["time"][-1]
    assert s.copies[here].sum() > 0 and here.sum() > len(s.job)
    assert run.evaluations["bytes_up"][-1] == (size * (1 + s.copies))[here].sum()


def test_a_client_object_is_wrapped_too_and_what_is_private_is_not_sent():
    given = {"data": data(), "compress": "sign", "method": Method(asgd()), "updates": 8, "batch_size": 4}
    run = simulate(**given, model=MODEL, client=carrying(client()))
    assert run.settings["compress"] == "sign" and run.settings["feedback"] == "off"
    assert (run.updates["upload_values_bytes"] == np.ceil(59 / 8)).all()
    given["model"] = MODEL._replace(private=lambda path: path[0] == "output")
    run = simulate(**given, lr=0.1)
    assert (run.updates["upload_values_bytes"] == np.ceil(35 / 8)).all()
    first = prepare(Settings(updates=8, batch_size=4, compress="sign"), **{
        name: given[name] for name in ("data", "model", "method")
    }).params  # fmt: skip
    np.testing.assert_array_equal(run.params["output"]["kernel"], first["output"]["kernel"])
    assert np.abs(run.params["hidden"]["kernel"] - first["hidden"]["kernel"]).max() > 1


def test_wrappers_keep_what_is_recorded():
    one = FEEDBACKS["ef"](client(), topk())
    assert RestoringClient(one, "float32")({}).info is one.info
    assert FEEDBACKS["off"](one, topk()).info(FEEDBACKS["off"](one, topk()).init(MODEL.init(jax.random.key(0))))


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({"method": "fedbuff@buffer:size=3"}, (None, None, None)),
        ({"method": "asynfl"}, (None, None, None)),
        ({"method": "fedbuff@buffer:size=3", "compress": "topk"}, ("topk", "ef", "whole")),
        *[({"method": "fedbuff@buffer:size=3", "compress": name}, (name, "off", "whole"))
          for name in ("qsgd", "sign", "randk")],
        *[({"method": "fedbuff@buffer:size=3", "compress": name}, (name, "ef", "whole"))
          for name in ("qsgd:scaled=true", "randk:unbiased=false", "topk_qsgd", "scaled_sign")],
        ({"method": "asynflc_ef", "compress": "qsgd:levels=127"}, ("qsgd:levels=127", "ef", "whole")),
        ({"method": "asynflc"}, ("scaled_sign", "off", "whole")),
        ({"method": "asynflc", "compress": "qsgd:levels=1"}, ("qsgd:levels=1", "off", "whole")),
        ({"method": "asynflc_ef"}, ("topk:ratio=0.1", "ef", "whole")),
        ({"method": "asynflc_ef:server_lr=2@participation", "feedback": "ef21", "compress_per": "layer",
          "delay": "rpi"},
         ("topk:ratio=0.1", "ef21", "layer")),
    ],
)  # fmt: skip
def test_what_a_method_does_to_uploads_unless_told(given, want):
    settings = resolved(Settings(**SMALL | given))
    assert (settings.compress, settings.feedback, settings.compress_per) == want
    assert resolved(settings) == settings
    assert prepare(Settings(**SMALL | given)).settings == settings


def test_asynfl_has_one_rule():
    assert {METHODS[name].rule for name in ("asynfl", "asynflc", "asynflc_ef")} == {asynfl}


def test_options_of_the_compressor_may_be_swept():
    points = expand(Settings(updates=9, method="asynflc_ef"), {"compress.ratio": [0.03, 0.06]})
    assert [point.settings.compress for point in points] == ["topk:ratio=0.03", "topk:ratio=0.06"]
    assert value_of(points[0].settings, "compress.ratio") == 0.03
    with pytest.raises(ValueError, match="compress = None: must be given, to set its option ratio"):
        expand(Settings(updates=9, method="fedbuff"), {"compress.ratio": [0.1]})


@pytest.mark.filterwarnings("ignore:.*the loss may diverge")
@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_has_a_longest_message(name):
    traffic = prepare(Settings(**SMALL, compress=name, compress_per="layer")).traffic
    assert 0 < traffic.values <= 31400 and traffic.up <= 31400 + 40


def test_the_longest_message_of_a_compressor_that_treats_short_vectors_in_another_way():
    """Its payloads of a bias and of a kernel differ in kind; the size of one depends on a number in it."""
    short, others = identity(), qsgd(levels=127)

    def of(payload):
        return short if isinstance(payload, Dense) else others

    mixed = Compressor(
        lambda key, x: (short if len(x) < 100 else others).compress(key, x),
        lambda payload: of(payload).decompress(payload),
        bits,
        feedback=False,
    )
    experiment = prepare(with_objects(Settings(**SMALL, compress_per="tensor"), compress=mixed))
    leaves, key = jax.tree.leaves(experiment.params), jax.random.key(0)
    assert {len(leaf.ravel()) < 100 for leaf in leaves} == {True, False}
    longest = most_bits(tuple(mixed.compress(key, 0 * leaf.ravel()) for leaf in leaves))
    assert experiment.traffic.up == longest / 8


test_what_does_not_fit_is_refused_before_anything_compiles = refusals(
    ({"feedback": "ef"}, "^feedback = 'ef': must be left out without compress"),
    ({"compress_per": "layer", "method": "asynfl"}, "^compress_per = 'layer': must be left out without compress"),
    ({"compress": "top_k"}, "^compress = 'top_k': unknown; did you mean 'topk'"),
    ({"compress": "topk:ratio=2"}, "^compress = 'topk:ratio=2': ratio = 2: must be a number above 0"),
    ({"compress": "topk:share=0.1"}, "^compress = 'topk:share=0.1': topk has no option 'share'"),
    ({"compress": "topk", "feedback": "ef22"}, "^feedback = 'ef22': must be one of off, ef, ef21"),
    ({"compress": "topk", "compress_per": "layers"}, "^compress_per = 'layers': must be one of layer"),
    ({"compress": 3}, "^compress = 3: must be a text"),
    ({"method": "asynfl:num_clients=4"}, "num_clients"),
    by=lambda given: prepare(Settings(**SMALL | given)),
)
