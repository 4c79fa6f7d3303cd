"""A short sequential PyTorch loop, as a careful researcher would write it by hand: one client after the other.

No framework, no DataLoader: tensors are indexed, gradients come from autograd, and parameters are
updated in place. The models have the same layers and sizes as those of the package.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Lenet5(nn.Module):
    """Classic LeNet-5 with ReLU and max-pooling, 61,706 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.dense = nn.Sequential(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, 1, 28, 28] -> [B, 10]``."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return self.dense(x.flatten(1))


class Cnn(nn.Module):
    """conv3x3x32, conv3x3x64, max-pool, dropout, dense 128, dropout, dense 10; 1,626,442 parameters on 32x32x3."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3)
        self.dense1, self.dense2 = nn.Linear(12544, 128), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, 3, 32, 32] -> [B, 10]``."""
        x = functional.max_pool2d(functional.relu(self.conv2(functional.relu(self.conv1(x)))), 2)
        x = functional.dropout(x.flatten(1), 0.25)
        return self.dense2(functional.dropout(functional.relu(self.dense1(x)), 0.5))


class Block(nn.Module):
    """ResNet's basic block: two 3 x 3 convolutions with BatchNorm beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, C, H, W] -> [B, C', H / stride, W / stride]``."""
        out = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(out + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 for 32 x 32 x 3, 11,173,962 parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for after, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(before, after, stride), Block(after, after, 1)]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def vgg11() -> nn.Module:
    """VGG-11 with BatchNorm for 32 x 32 x 3, 9,231,114 parameters."""
    layers: list[nn.Module] = []
    before = 3
    for after, pooled in ((64, 1), (128, 1), (256, 0), (256, 1), (512, 0), (512, 1), (512, 0), (512, 1)):
        layers += [nn.Conv2d(before, after, 3, 1, 1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if pooled else []
        before = after
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


MODELS = {
    "logistic": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)),
    "lenet5": Lenet5,
    "cnn": Cnn,
    "vgg11": vgg11,
    "resnet18": resnet18,
}


class Loop:
    """FedAsync, one local training after the other."""

    def __init__(self, model: str, x: np.ndarray, y: np.ndarray, shards: list[np.ndarray], batch: int, steps: int):
        torch.manual_seed(0)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.x = (torch.from_numpy(x).to(device).float() / 255.0 - 0.5).permute(0, 3, 1, 2).contiguous()
        self.y = torch.from_numpy(y).to(device).long()
        self.shards = [torch.from_numpy(np.asarray(shard, np.int64)).to(device) for shard in shards]
        self.model, self.batch, self.steps = MODELS[model]().to(device), batch, steps
        self.params = list(self.model.parameters())
        self.server = [p.detach().clone() for p in self.params]

    def parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(p.numel() for p in self.params)

    def update(self, client: int, lr: float = 0.01, mixing: float = 0.6) -> None:
        """Train one client from the server's model and mix the result in."""
        with torch.no_grad():
            for p, s in zip(self.params, self.server, strict=True):
                p.copy_(s)
        shard, done = self.shards[client], 0
        while done < self.steps:
            order = shard[torch.randperm(len(shard), device=shard.device)]
            for rows in order.split(self.batch)[: self.steps - done]:
                loss = functional.cross_entropy(self.model(self.x[rows]), self.y[rows])
                gradients = torch.autograd.grad(loss, self.params)
                with torch.no_grad():
                    for p, g in zip(self.params, gradients, strict=True):
                        p.sub_(g, alpha=lr)
                done += 1
        with torch.no_grad():
            for p, s in zip(self.params, self.server, strict=True):
                s.lerp_(p, mixing)

    def run(self, clients: np.ndarray) -> None:
        """One update for each listed client."""
        for client in clients:
            self.update(int(client))
        if self.x.is_cuda:
            torch.cuda.synchronize()
