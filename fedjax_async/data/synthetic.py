"""The logistic ``synthetic(alpha, beta)`` family."""

from __future__ import annotations

import numpy as np

from fedjax_async.check import non_negative, positive, whole
from fedjax_async.data import decode
from fedjax_async.data.dataset import Dataset


def synthetic(
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    clients: int = 30,
    features: int = 60,
    classes: int = 10,
    mean_log_size: float = 4.0,
    std_log_size: float = 2.0,
    least_size: int = 50,
    same_model: bool = False,
    seed: int = 0,
) -> Dataset:
    """Logistic synthetic(alpha, beta): 60 features, 10 classes, lognormal client sizes, natural clients.

    Client k labels its inputs by y = argmax(W_k x + b_k), with the entries of W_k, b_k ~ N(u_k, 1) and
    u_k ~ N(0, ``alpha``); with ``same_model`` all clients have the same W and b. Its inputs are x ~ N(v_k, S),
    S diagonal with S_jj = j^-1.2, the entries of v_k ~ N(B_k, 1), B_k ~ N(0, ``beta``): beta sets how far the
    clients' inputs lie apart. alpha and beta are variances, as in the paper. Size: ``least_size`` +
    lognormal(``mean_log_size``, ``std_log_size``) training examples, and a ninth of that for the test set.
    x float32 [M, features], y int32.

    Beware: by the published definition u_k shifts the scores of all classes alike, so ``alpha`` moves the models
    but no label. It is kept for comparison; what makes tasks differ is that every client draws its own W_k.

    Source: Shamir, Srebro and Zhang (2014); Li et al., FedProx (2020), section 5.1.
    """
    for field, value in {"alpha": alpha, "beta": beta, "std_log_size": std_log_size}.items():
        non_negative(field, value)
    positive("mean_log_size", mean_log_size)
    whole("clients", clients, 1)
    whole("features", features, 1)
    whole("classes", classes, 2)
    whole("least_size", least_size, 1)
    rng = np.random.default_rng(seed)
    sizes = rng.lognormal(mean_log_size, std_log_size, clients).astype(np.int64) + least_size
    deviation = np.arange(1, features + 1) ** -0.6  # square root of S_jj
    model_mean = rng.normal(0, np.sqrt(alpha), clients)
    input_mean = rng.normal(0, np.sqrt(beta), clients)
    train: list[tuple[np.ndarray, np.ndarray]] = []
    test: list[tuple[np.ndarray, np.ndarray]] = []
    for k in range(clients):
        if k == 0 or not same_model:
            weights = rng.normal(model_mean[k], 1, (features, classes))
            bias = rng.normal(model_mean[k], 1, classes)
        centre = rng.normal(input_mean[k], 1, features)
        extra = -(-int(sizes[k]) // 9)
        x = centre + deviation * rng.standard_normal((sizes[k] + extra, features))
        y = np.argmax(x @ weights + bias, axis=1).astype(np.int32)
        train.append((x[extra:].astype(np.float32), y[extra:]))
        test.append((x[:extra].astype(np.float32), y[:extra]))
    (x, y), (test_x, test_y) = (tuple(map(np.concatenate, zip(*pool))) for pool in (train, test))
    groups = np.repeat(np.arange(clients, dtype=np.int32), sizes)
    return Dataset("synthetic", x, y, test_x, test_y, decode.as_is, num_classes=classes, groups=groups)
