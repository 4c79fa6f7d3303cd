"""Runs without a server: who sends to whom and when, and what a node does with its inbox and what it sends.

Order of reading:

1. When, :func:`plan_peers` (``planning.py``), NumPy only as in ``clock``: ``topologies.py`` (registry ``TOPOLOGIES``);
   ``exchanges.py`` (registry ``EXCHANGES``) and its parts ``swift.py``, ``kept_mean.py``, ``synchronous.py``,
   ``timelines.py``, ``receivers.py``, ``pushes.py``, ``inboxes.py``, ``exchange_parts.py`` (masses) and
   ``segments.py``; ``schedule.py``: the plan; ``waves.py``: its batches; ``statistics.py`` and ``ergodicity.py``
   describe it, ``checking.py`` finds contradictions in it, ``trace.py`` writes and reads it.
2. What: an algorithm is a ``PeerAlgorithm`` (``types.py``), written for one node; ``engine`` executes the plan with it.
   ``full_mixing.py`` is the plain mixing that Async-DFedAvg, SWIFT, D-PSGD and training alone share, and SGP;
   ``triggering.py`` withholds messages that would say little; ``divshare_fragments.py`` and ``divshare_tensors.py`` cut
   models into fragments, ``pushcen_adfl.py`` sends centroids, ``choco_sgd.py`` compressed differences. Their factories
   take ``stays(path)``: whether a leaf of the params stays with its node.
3. ``methods.py`` joins the two by name.
"""

from typing import TYPE_CHECKING

from fedjax_async.base import lazy

if TYPE_CHECKING:
    # fmt: off
    from fedjax_async.peers.choco_sgd import choco as choco
    from fedjax_async.peers.divshare_fragments import divshare as divshare
    from fedjax_async.peers.divshare_tensors import tensor_fragments as tensor_fragments
    from fedjax_async.peers.ergodicity import Contraction as Contraction, contraction as contraction
    from fedjax_async.peers.exchanges import EXCHANGES as EXCHANGES, Exchange as Exchange
    from fedjax_async.peers.full_mixing import full_models as full_models, osgp as osgp, sgp as sgp
    from fedjax_async.peers.methods import METHODS as METHODS
    from fedjax_async.peers.planning import plan_peers as plan_peers
    from fedjax_async.peers.pushcen_adfl import pushcen as pushcen
    from fedjax_async.peers.schedule import (Delivery as Delivery, PeerScenario as PeerScenario,
        PeerSchedule as PeerSchedule)
    from fedjax_async.peers.statistics import (Masses as Masses, PeerStatistics as PeerStatistics, ages as ages,
        connecting_window as connecting_window, degrees as degrees, masses as masses,
        peer_statistics as peer_statistics)
    from fedjax_async.peers.topologies import (TOPOLOGIES as TOPOLOGIES, Graph as Graph, Topology as Topology,
        TopologyModel as TopologyModel)
    from fedjax_async.peers.trace import (is_peer_schedule as is_peer_schedule,
        load_peer_schedule as load_peer_schedule, save_peer_schedule as save_peer_schedule)
    from fedjax_async.peers.triggering import when_moved as when_moved
    from fedjax_async.peers.waves import peer_runs as peer_runs, peer_slots as peer_slots, peer_waves as peer_waves
    from fedjax_async.types import Event as Event, PeerAlgorithm as PeerAlgorithm

__getattr__, __dir__ = lazy.attach(__name__)
