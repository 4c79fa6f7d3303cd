"""The server: rules, made of small transforms.

Start with :func:`rule` (``rule.py``): a chain of transforms on each arriving delta (``transforms.py``, with the
staleness weights), an aggregate over the arrivals of a server step (``aggregate.py``) and an optax optimiser.
``averaging.py`` has the simplest rules (FedAvg, FedBuff, FedAsync ...), ``delay_adaptive.py`` cuts the steps of late
deltas, ``port.py`` weights them by their likeness too, ``fedopt.py`` has the adaptive optimisers, ``robust.py`` the
rules that tolerate bad uploads. ``ca2fl.py``, ``mifa.py``, ``area.py``, ``malenia.py``, ``ringleader.py`` and
``fedstaleweight.py`` are rules with a memory of each client, ``orthofl.py`` and ``quafl.py`` send each client weights
of its own, ``adpsgd.py`` holds the models of nodes that average in pairs, ``delay_correction.py`` corrects stale deltas
for the server's drift since their start. ``scaffold.py``, ``feddyn.py``, ``fedmrur.py``, ``floco.py`` (a simplex of
models, with regions of the clients in ``regions.py``) and ``asynccurve.py`` (curves) have client algorithms of their
own. The parts of AsyncCurve also work with other rules: ``steps.py``, ``step_size.py`` (with the dominance penalty) and
``swa.py`` (stochastic weight averaging). ``parts.py`` gives such parts names and adds them to any rule. ``privacy.py``
clips uploads and adds noise around any rule, ``attacks.py`` forges uploads of malicious clients.
``running_statistics.py`` says how all rules treat BatchNorm. ``methods.py`` gives every method its name.
"""

# fmt: off
from fedjax_async.base import lazy
from fedjax_async.server.aggregate import (Aggregate as Aggregate, buffered as buffered,
    check_capacity as check_capacity, mean as mean)
from fedjax_async.server.attacks import (ATTACKS as ATTACKS, Attack as Attack, Attackers as Attackers,
    attacked as attacked, attackers as attackers)
from fedjax_async.server.delay_correction import delay_corrected as delay_corrected
from fedjax_async.server.methods import METHODS as METHODS, SERVERS as SERVERS
from fedjax_async.server.methods import *  # noqa: F403 (every rule by its name)
from fedjax_async.server.parts import PARTS as PARTS, Part as Part, with_parts as with_parts
from fedjax_async.server.privacy import (PRIVACY as PRIVACY, Privacy as Privacy,
    differentially_private as differentially_private)
from fedjax_async.server.rule import (Weighting as Weighting, closed as closed, discount as discount,
    guard_rails as guard_rails, rule as rule)
from fedjax_async.server.running_statistics import rebased as rebased, weights_of as weights_of
from fedjax_async.server.step_size import (cyclic as cyclic, moving_on as moving_on,
    scale_by_dominance as scale_by_dominance, step_size as step_size)
from fedjax_async.server.steps import STEPS as STEPS, stepping as stepping
from fedjax_async.server.swa import averaged as averaged
from fedjax_async.server.transforms import (STALENESS as STALENESS, Transform as Transform, begun as begun,
    chain as chain, clip_by_norm as clip_by_norm, scale_by as scale_by, scale_by_staleness as scale_by_staleness,
    scale_overstale as scale_overstale, staleness_weight as staleness_weight, stateless as stateless,
    towards_client as towards_client)

lazy.set_all(__name__, SERVERS)
