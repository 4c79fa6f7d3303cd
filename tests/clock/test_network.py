import math

import numpy as np
import pytest

from fedjax_async.base import registry
from fedjax_async.base.notices import RunWarning
from fedjax_async.clock import NETWORKS, Network, Until, bind_delays, plan
from fedjax_async.peers import plan_peers
from tests.clock.textbook import make, same
from tests.refusals import refusals
from tests.told import refusal


def network(spec, num_clients=10, seed=0):
    return registry.spec("network", NETWORKS, spec).make()(num_clients, seed)


def plain(timing="every", delays="lognormal", **options):
    sizes = {"num_clients": 5, "local_steps": 3, "bytes_down": 600, "bytes_up": 90}
    return make(timing, delays, 40, **sizes, **options)


def test_a_link_is_latency_and_bytes_each_way():
    model = network("link:down=100,up=10,latency=0.5")
    np.testing.assert_allclose(model.seconds([0, 9], [0, 3], 600, 90), 0.5 + 6 + 0.5 + 9)
    np.testing.assert_allclose(network("link:latency=0.5").seconds(0, 0, 600, 90), 1.0)
    np.testing.assert_allclose(network("link:up=10").seconds(0, 0, 600, 90), 9)


def test_the_network_comes_on_top_of_the_delays():
    spec = "link:down=100,up=10,latency=0.5,jitter=0.4,heterogeneity=0.7"
    for timing in ("every", "window:length=2", "cohort:size=3", "every:concurrency=2"):
        s = plain(timing, network=spec)
        who, which = s.client, s.number
        expected = bind_delays("lognormal", 5, 0).durations(who, which, 3, 600, 90)
        expected = expected + network(spec, 5).seconds(who, which, 600, 90)
        np.testing.assert_allclose(s.upload_time - s.dispatch_time, expected, rtol=1e-9)


@pytest.mark.parametrize("spec", ["link", "link:jitter=0.4,heterogeneity=1,shared=true"])
def test_a_link_without_rates_and_latency_has_no_effect_and_says_so(spec):
    with pytest.warns(RunWarning, match="network: a link without down, up and latency has no effect"):
        instant = plain(network=spec)
    same(plain(), instant)


def test_a_heterogeneity_of_latencies_alone_has_no_effect_and_says_so():
    with pytest.warns(RunWarning, match="network: heterogeneity = 0.5 has no effect without down and up"):
        differing = plain(network="link:latency=1,heterogeneity=0.5")
    same(plain(network="link:latency=1"), differing)


@pytest.mark.parametrize(("option", "sigma", "clients", "numbers"), [
    ("heterogeneity", 0.5, np.arange(20_000), np.zeros(20_000, int)),  # drawn once a client
    ("jitter", 0.3, np.repeat(np.arange(500), 40), np.tile(np.arange(40), 500)),  # drawn once a message
])  # fmt: skip
def test_links_differ_and_messages_jitter_by_factors_of_mean_one_down_and_up_apart(option, sigma, clients, numbers):
    spec, count, few = f"link:down=1,up=1,{option}={sigma}", clients.max() + 1, clients < 10
    model = network(spec, count)
    down, up = model.seconds(clients, numbers, 1, 0), model.seconds(clients, numbers, 0, 1)
    for seconds in (down, up):
        assert abs(seconds.mean() - 1) < 4 * math.sqrt(math.expm1(sigma**2) / 20_000)
        assert abs(np.log(seconds).std() - sigma) < 0.033 * sigma
    assert abs(np.corrcoef(down, up)[0, 1]) < 0.03
    assert (model.seconds(clients, numbers + 1, 1, 0) == down).all() == (option == "heterogeneity")
    np.testing.assert_array_equal(model.seconds(clients[::-1], numbers[::-1], 1, 0)[::-1], down)
    np.testing.assert_array_equal(network(spec, 10).seconds(clients[few], numbers[few], 1, 0), down[few])
    assert (network(spec, count, seed=1).seconds(clients, numbers, 1, 0) != down).all()


def test_a_table_gives_each_client_its_link(tmp_path):
    path = tmp_path / "links.csv"
    path.write_text("latency,client,up,down\n0.5,1,10,100\n0,0,1,2\n9,7,1,1\n")
    with pytest.warns(RunWarning, match="the lines of 1 further client are not used"):
        seconds = network(f"csv:path={path}", 2).seconds([0, 1], 0, 600, 90)
    np.testing.assert_allclose(seconds, [300 + 90, 0.5 + 6 + 0.5 + 9])
    path.write_text("client,down,up,latency,jitter\n0,1,1,0,0\n1,1,1,0,0.5\n")
    seconds = network(f"csv:path={path}", 2).seconds(np.repeat([0, 1], 50), np.tile(np.arange(50), 2), 1, 0)
    np.testing.assert_allclose(seconds[:50], 1, rtol=1e-12)
    assert len(set(seconds[50:])) == 50


test_bad_settings_are_value_errors = refusals(
    ("link:down=0", "down = 0"), ("link:up=-1", "up = -1"), ("link:down=fast", "down = 'fast'"),
    ("link:latency=-1", "latency = -1"), ("link:jitter=nan", "jitter = nan"),
    ("link:heterogeneity=-0.1", "heterogeneity = -0.1"), ("lnk", "did you mean 'link'"),
    ("csv:path=nowhere.csv", "path = 'nowhere.csv'"), ("csv", "needs the option path"),
    by=lambda spec: plain(network=spec),
)  # fmt: skip


def test_links_between_nodes_come_from_a_table(tmp_path):
    path = tmp_path / "links.csv"
    path.write_text("source,target,rate,latency\n0,1,100,0.5\n1,2,50,0\n")
    both, directed = (network(f"edges:path={path},{option}=true", 3) for option in ("shared", "directed"))
    occupied, travelling = both.between(np.array([0, 1, 2]), np.array([1, 0, 1]), np.zeros(3), 200)
    np.testing.assert_array_equal([occupied, travelling], [[2, 2, 4], [0.5, 0.5, 0]])
    assert both.shared and not directed.shared
    for model, sender, receiver in ((both, 0, 2), (directed, 1, 0)):
        said = refusal(model.between, np.array([sender]), np.array([receiver]), np.zeros(1), 1)
        assert f"links.csv: no line for messages from node {sender} to node {receiver}" in said
    assert "network = 'edges': must be one with a link to the server" in refusal(plain, network=f"edges:path={path}")


WORLD = {"num_clients": 3, "local_steps": 1, "until": Until(updates=6)}


def test_messages_that_take_no_number_of_seconds_are_refused():
    """Negative ones made jobs shorter."""
    for seconds in (-0.3, math.nan, math.inf):
        wrong = Network(3, lambda clients, *_, seconds=seconds: np.full(np.shape(clients), seconds))
        with pytest.raises(ValueError, match=r"^network: the seconds of the messages of every job must be a finite"):
            plan("every", "constant", network=lambda nodes, seed, wrong=wrong: wrong, **WORLD)


def test_nodes_need_two_times_of_each_message():
    wrong = Network(3, np.zeros, lambda senders, *_: np.ones(len(senders)))
    with pytest.raises(ValueError, match=r"^network's between = 'ndarray': must be two arrays"):
        plan_peers("mean", "constant", topology="ring", network=lambda nodes, seed: wrong, **WORLD)
