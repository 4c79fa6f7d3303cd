"""fedjax_async: a vectorised simulator of asynchronous federated learning in JAX."""

from fedjax_async.engine import METHODS, Method, Settings, simulate
from fedjax_async.results.sweeps import sweep
from fedjax_async.types import (
    Arrival,
    ClientAlgorithm,
    ClientData,
    FederatedData,
    Message,
    Model,
    Run,
    Schedule,
    ServerAlgorithm,
)

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Arrival",
    "ClientAlgorithm",
    "ClientData",
    "FederatedData",
    "Message",
    "Method",
    "Model",
    "Run",
    "Schedule",
    "ServerAlgorithm",
    "Settings",
    "__version__",
    "simulate",
    "sweep",
]
