"""The queue of ``accelerator.py``: all measurements, in order of worth."""

from __future__ import annotations

import importlib.util

import conv
import throughput
from accelerator_parts import (
    BITS,
    CIFAR10,
    CONSTANT,
    FEMNIST,
    FLOAT32,
    LOGNORMAL,
    NO_GRAPHS,
    ORACLE_METHODS,
    TRACED,
    TUNED,
    Measurement,
    cohorts,
    lowerings,
    memory,
    oracle,
    populations,
    profile,
    rate,
    same_bits,
    swept,
    torch_loop,
    torch_waves,
)

MLP = "mlp:hidden=64"
MODELS = {  # name -> (model, updates with 100 clients, updates with 10)
    "MLP-64": (MLP, 5000, 1000),
    "LeNet-5": ("lenet5", 2000, 500),
    "logistic": ("logistic", 5000, 1000),
    "CNN": ("cnn", 200, 100),
    "VGG-11": ("vgg11", 100, 40),
    "ResNet-18": ("resnet18", 100, 20),
}


def rates(name: str) -> list[Measurement]:
    """A model's client updates a second: 100 and 10 clients, constant and lognormal delays."""
    model, many, few = MODELS[name]
    seconds = 60 if model in throughput.LARGE else 10
    return [
        Measurement(
            f"{name}, FedAsync, {clients} clients, {kind}",
            seconds,
            rate("fedasync", model, clients, updates, delay=delay),
        )
        for clients, updates in ((100, many), (10, few))
        for kind, delay in (("constant", CONSTANT), ("lognormal", LOGNORMAL))
    ]


def beside(name: str) -> list[Measurement]:
    """PyTorch by hand with the same layers, one client after the other; nothing where there is no PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return []
    model = MODELS[name][0].partition(":")[0]
    return [Measurement(f"PyTorch, {name}, one client after the other", 20, torch_loop(model))]


def side_by_side() -> list[Measurement]:
    """PyTorch by hand, all clients at once; compiling LeNet-5 takes minutes."""
    if importlib.util.find_spec("torch") is None:
        return []
    models = {name: MODELS[name][0].partition(":")[0] for name in ("MLP-64", "LeNet-5")}
    return [Measurement(f"PyTorch, {name}, vmap and compile", 20, torch_waves(model)) for name, model in models.items()]


def checks(model: str) -> list[Measurement]:
    """Engine against oracle."""
    return [Measurement(f"oracle, {method}, {model}", 30, oracle(method, model)) for method in ORACLE_METHODS]


def graphs_off() -> list[Measurement]:
    """Rates without CUDA graphs, beside those of :func:`rates`."""
    runs = {"MLP-64": ("fedasync", MLP, 100, 2000), "LeNet-5": ("fedasync", "lenet5", 100, 500)}
    return [
        Measurement(f"{name}, FedAsync, 100 clients, constant, no graphs", 10, rate(*run), NO_GRAPHS)
        for name, run in runs.items()
    ]


def choices() -> list[Measurement]:
    """Rates under another precision, with tuned kernels, in narrow waves, beside those of :func:`rates`."""
    lenet5, cnn, mlp = (("fedasync", *rest) for rest in (("lenet5", 100, 2000), ("cnn", 10, 100), (MLP, 100, 2000)))
    return [
        Measurement("LeNet-5, FedAsync, 100 clients, constant, products in float32", 10, rate(*lenet5), FLOAT32),
        Measurement("LeNet-5, FedAsync, 100 clients, constant, bfloat16", 10, rate(*lenet5, compute="bfloat16")),
        Measurement("CNN, FedAsync, 10 clients, constant, products in float32", 10, rate(*cnn), FLOAT32),
        Measurement("CNN, FedAsync, 10 clients, constant, tuned kernels", 10, rate(*cnn), TUNED),
        *(
            Measurement(f"MLP-64, FedAsync, 100 clients, constant, width {width}", 10, rate(*mlp, max_width=width))
            for width in (8, 32)
        ),
    ]


def rules() -> list[Measurement]:
    """Rates of other rules, of a policy and of nodes."""
    of_three = rate("fedbuff:server_lr=1@buffer:size=3", MLP, 100, 2472, batch_size=128)
    return [
        Measurement("MLP-64, FedBuff of 10", 5, rate("fedbuff@buffer:size=10", MLP, 100, 5000)),
        Measurement("MLP-64, FedBuff of 3, batch 128", 5, of_three),
        Measurement("MLP-64, OrthoFL", 5, rate("orthofl", MLP, 100, 2000)),
        Measurement("MLP-64, SCAFFOLD", 5, rate("scaffold", MLP, 100, 3000)),
    ]


def others() -> list[Measurement]:
    """Runs without a server, and with a policy."""
    oort = rate("fedasync@every:concurrency=20", MLP, 100, 1000, policy="oort")
    return [
        Measurement("MLP-64, 40 nodes, PushCen", 5, rate("pushcen", MLP, 40, 177, delay=LOGNORMAL)),
        Measurement("MLP-64, 40 nodes, Async-DFedAvg", 5, rate("async_dfedavg", MLP, 40, 177, delay=LOGNORMAL)),
        Measurement("MLP-64, policy oort, 20 in flight", 5, oort),
    ]


def jobs() -> list[Measurement]:
    """Synchronous jobs whose times other simulators published."""
    return [
        Measurement("CIFAR-10 of pfl-research, 1,500 rounds of 50 users", 40, cohorts(CIFAR10, 50)),
        Measurement("FEMNIST of FLUTE, 1,500 rounds of 10 users", 40, cohorts(FEMNIST, 50)),
    ]


def sweeps() -> list[Measurement]:
    """Rates of sweeps."""
    sizes = {1: 5, 64: 10, 256: 25, 1024: 80}
    return [Measurement(f"sweep of {n} runs, MLP-64, 10 clients", s, swept(n)) for n, s in sizes.items()]


def measurements() -> list[Measurement]:
    """All measurements, those first that are worth most."""
    equal = [Measurement(f"same bits, {name}", 60, same_bits(name)) for name in BITS]
    large = [one for name in ("ResNet-18", "VGG-11", "CNN", "logistic") for one in (*rates(name), *beside(name))]
    layers = [Measurement(f"lowerings, {layer}, 16 clients", 10, lowerings(layer, 16)) for layer in conv.LAYERS]
    sizes = [Measurement(f"population of {n:,}", 40, populations(n)) for n in (1000, 100_000, 1_000_000)]
    room = [Measurement(f"memory, {name}", 2, memory(model.partition(":")[0])) for name, (model, *_) in MODELS.items()]
    profiles = [
        Measurement("profile, MLP-64, constant", 20, profile(MLP, CONSTANT, 1000), TRACED),
        Measurement("profile, MLP-64, lognormal", 20, profile(MLP, LOGNORMAL, 1000), TRACED),
        Measurement("profile, LeNet-5, constant", 20, profile("lenet5", CONSTANT, 500), TRACED),
    ]
    small = [*rates("MLP-64"), *graphs_off(), *rates("LeNet-5"), *rules(), *beside("MLP-64"), *beside("LeNet-5")]
    first = [*checks("logistic"), *small, *sweeps(), *large, *layers, *equal, *jobs(), *sizes, *others(), *room]
    return [*first, *profiles, *choices(), *checks("lenet5"), *side_by_side()]
