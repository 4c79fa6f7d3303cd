"""The server: rules, made of small transforms.

Start with :func:`rule` (``rule.py``): a chain of transforms on each arriving delta (``transforms.py``, with the
staleness weights), an aggregate over the arrivals of a server step (``aggregate.py``) and an optax optimiser.
``averaging.py`` has the simplest rules (FedAvg, FedBuff, FedAsync ...), ``fedopt.py`` the adaptive optimisers,
``robust.py`` the rules that tolerate bad uploads. ``ca2fl.py`` is a rule with a memory of each client, ``orthofl.py``
sends each client weights of its own, ``delay_correction.py`` corrects stale deltas for the server's drift since their
start. ``scaffold.py``, ``feddyn.py``, ``fedmrur.py``, ``floco.py`` (a simplex of models) and ``asynccurve.py`` (curves)
have client algorithms of their own. The parts of AsyncCurve also work with other rules: ``steps.py``, ``step_size.py``
(with the dominance penalty) and ``swa.py`` (stochastic weight averaging). ``parts.py`` gives such parts names and adds
them to any rule.
``privacy.py`` clips uploads and adds noise around any rule, ``attacks.py`` forges uploads of malicious clients.
``running_statistics.py`` says how all rules treat BatchNorm. ``methods.py`` gives every method its name.
"""

from fedjax_async.server.aggregate import Aggregate, buffered, check_capacity, mean
from fedjax_async.server.attacks import ATTACKS, Attack, Attackers, attacked, attackers
from fedjax_async.server.delay_correction import delay_corrected
from fedjax_async.server.methods import *  # noqa: F403 (every rule by its name)
from fedjax_async.server.methods import METHODS, SERVERS, Preset
from fedjax_async.server.parts import PARTS, Part, with_parts
from fedjax_async.server.privacy import PRIVACY, Privacy, differentially_private
from fedjax_async.server.rule import closed, discount, guard_rails, known, rule, with_facts
from fedjax_async.server.running_statistics import rebased, weights_of
from fedjax_async.server.step_size import cyclic, moving_on, scale_by_dominance, step_size
from fedjax_async.server.steps import STEPS, stepping
from fedjax_async.server.swa import averaged
from fedjax_async.server.transforms import (
    STALENESS,
    Transform,
    chain,
    clip_by_norm,
    scale_by,
    scale_by_staleness,
    scale_overstale,
    staleness_weight,
    stateless,
    towards_client,
)

__all__ = [
    "ATTACKS",
    "METHODS",
    "PARTS",
    "PRIVACY",
    "SERVERS",
    "STALENESS",
    "STEPS",
    "Aggregate",
    "Attack",
    "Attackers",
    "Part",
    "Preset",
    "Privacy",
    "Transform",
    "attacked",
    "attackers",
    "averaged",
    "buffered",
    "chain",
    "check_capacity",
    "clip_by_norm",
    "closed",
    "cyclic",
    "delay_corrected",
    "differentially_private",
    "discount",
    "guard_rails",
    "known",
    "mean",
    "moving_on",
    "rebased",
    "rule",
    "scale_by",
    "scale_by_dominance",
    "scale_by_staleness",
    "scale_overstale",
    "staleness_weight",
    "stateless",
    "step_size",
    "stepping",
    "towards_client",
    "weights_of",
    "with_facts",
    "with_parts",
]
__all__ += list(SERVERS)
