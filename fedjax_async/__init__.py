"""fedjax_async: a vectorised simulator of asynchronous federated learning in JAX."""

from typing import TYPE_CHECKING

from fedjax_async import lazy

if TYPE_CHECKING:
    from fedjax_async.compiled import keep_compiled
    from fedjax_async.config.methods import METHODS, Method, PeerMethod
    from fedjax_async.config.own import named
    from fedjax_async.config.plugins import register
    from fedjax_async.config.settings import Settings
    from fedjax_async.fingerprints import fingerprint
    from fedjax_async.models.metrics import Metric
    from fedjax_async.results.runs import compare
    from fedjax_async.results.simulation import resume, simulate
    from fedjax_async.results.sweeps import sweep
    from fedjax_async.types import (
        Arrival,
        ClientAlgorithm,
        ClientData,
        DataParts,
        Evaluation,
        Facts,
        FederatedData,
        Info,
        Message,
        Model,
        Probe,
        Request,
        Run,
        Schedule,
        ServerAlgorithm,
        Stop,
    )

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Arrival",
    "ClientAlgorithm",
    "ClientData",
    "DataParts",
    "Evaluation",
    "Facts",
    "FederatedData",
    "Info",
    "Message",
    "Method",
    "Metric",
    "Model",
    "PeerMethod",
    "Probe",
    "Request",
    "Run",
    "Schedule",
    "ServerAlgorithm",
    "Settings",
    "Stop",
    "__version__",
    "compare",
    "fingerprint",
    "keep_compiled",
    "named",
    "register",
    "resume",
    "simulate",
    "sweep",
]

__getattr__, __dir__ = lazy.attach(
    __name__,
    {
        "METHODS": "config.methods",
        "Arrival": "types",
        "ClientAlgorithm": "types",
        "ClientData": "types",
        "Evaluation": "types",
        "Facts": "types",
        "FederatedData": "types",
        "Info": "types",
        "Message": "types",
        "Method": "config.methods",
        "Metric": "models.metrics",
        "Model": "types",
        "DataParts": "types",
        "PeerMethod": "config.methods",
        "Probe": "types",
        "Request": "types",
        "Run": "types",
        "Schedule": "types",
        "ServerAlgorithm": "types",
        "Settings": "config.settings",
        "Stop": "types",
        "fingerprint": "fingerprints",
        "keep_compiled": "compiled",
        "named": "config.own",
        "register": "config.plugins",
        "compare": "results.runs",
        "resume": "results.simulation",
        "simulate": "results.simulation",
        "sweep": "results.sweeps",
    },
)
