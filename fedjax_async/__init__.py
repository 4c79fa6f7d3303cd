"""fedjax_async: a vectorised simulator of asynchronous federated learning in JAX."""

from typing import TYPE_CHECKING

from fedjax_async import lazy

if TYPE_CHECKING:
    # fmt: off
    from fedjax_async.compiled import keep_compiled as keep_compiled
    from fedjax_async.config.methods import METHODS as METHODS
    from fedjax_async.config.own import named as named
    from fedjax_async.config.plugins import register as register
    from fedjax_async.config.settings import Settings as Settings
    from fedjax_async.fingerprints import fingerprint as fingerprint
    from fedjax_async.method import Method as Method
    from fedjax_async.models.metrics import Metric as Metric
    from fedjax_async.results.simulation import (compare as compare, resume as resume, simulate as simulate)
    from fedjax_async.results.sweeps import sweep as sweep
    from fedjax_async.spec import Spec as Spec
    from fedjax_async.types import (Arrival as Arrival, ClientAlgorithm as ClientAlgorithm, ClientData as ClientData,
        DataParts as DataParts, Evaluation as Evaluation, Facts as Facts, FederatedData as FederatedData, Info as Info,
        Message as Message, Model as Model, Probe as Probe, Request as Request, Run as Run, Schedule as Schedule,
        ServerAlgorithm as ServerAlgorithm, Stop as Stop)

__version__ = "0.1.0"

__getattr__, __dir__ = lazy.attach(__name__)
