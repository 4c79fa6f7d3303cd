"""One run of a stack, before it is laid out: what layout, tables, programs and the loop read of it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.engine.components import Components
from fedjax_async.engine.evaluation import EvaluationPoints
from fedjax_async.engine.measures import NOTHING, Measures
from fedjax_async.engine.peer_probes import NodesProbes
from fedjax_async.engine.probes import NO_PROBES, Probes
from fedjax_async.types import Facts, Key, Params


class Member(NamedTuple):
    """One run of a stack: ``stacking.make_member`` makes one, without a server ``peer_run.make_peer_member``."""

    components: Components
    schedule: Any  # Schedule, whose arrivals include the jobs that are trained in vain, or PeerSchedule
    params: Params
    key: Key
    points: EvaluationPoints  # positions count arrivals of ``schedule``; without a server they are the rows
    norm_limit: float
    applied: np.ndarray  # bool[E], which of its arrivals the server applies; the others are trained in vain
    facts: Facts  # what is known of the run before it starts
    probes: Probes = NO_PROBES
    measures: Measures = NOTHING
    # of runs without a server
    nodes_probes: NodesProbes = MappingProxyType({})
    global_tests: str = "never"  # one of ``peer_points.GLOBAL_TESTS``
