"""A short PyTorch loop of PushCen-ADFL, one compute event after the other, as a careful researcher would write it.

It follows a plan of this package: the same events, inboxes and coefficients. Messages stay encoded, as a table and one
byte per weight, and are kept until their last receiver has read them. The nearest centroid is found by bisection, not
by a matrix of distances.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

Message = list[tuple[torch.Tensor, torch.Tensor] | torch.Tensor]


class LeNet(nn.Module):
    """conv 5x5x32, pool, conv 5x5x64, pool, dense 120, 84, 10: 256,830 parameters on 32 x 32 x 3."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 5), nn.Conv2d(32, 64, 5)
        self.dense = nn.Sequential(nn.Linear(1600, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, 3, 32, 32] -> [B, 10]``."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return self.dense(x.flatten(1))


def cluster(x: torch.Tensor, start: torch.Tensor, most: int = 3, tolerance: float = 0.05) -> tuple[Any, Any]:
    """``(table [K], label [D])``: centroids of ``x`` [D], from ``start`` [K - 1]; zero first, the others ascending."""
    others, before = start.sort().values, 0.0
    for iteration in range(most):
        table, zero = torch.cat([others, others.new_zeros(1)]).sort().values, int((others < 0).sum())
        label = torch.bucketize(x, (table[1:] + table[:-1]) / 2)
        loss = float(torch.dist(x, table[label])) ** 2
        count = torch.bincount(label, minlength=len(table))
        mean = torch.where(count > 0, torch.bincount(label, x, len(table)) / count.clamp(min=1), table).to(x.dtype)
        others = torch.cat([mean[:zero], mean[zero + 1 :]])
        if iteration > 0 and abs(before - loss) <= tolerance * before:
            break
        before = loss
    table = torch.cat([others, others.new_zeros(1)]).sort().values
    label = torch.bucketize(x, (table[1:] + table[:-1]) / 2)
    slot = torch.where(label == zero, 0, label + (label < zero).long())
    return torch.cat([others.new_zeros(1), others]), slot.to(torch.uint8)


class Node:
    """A node: its model, its optimiser and its table of centroids."""

    def __init__(self, start: dict[str, Any], lr: float) -> None:
        self.model = LeNet()
        self.model.load_state_dict(start)
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.Adam(self.params, lr)
        self.dictionary: list[Any] = [None] * len(self.params)
        self.sent: Message = []


class Loop:
    """PushCen-ADFL, executed along the events of a plan."""

    def __init__(self, data: Any, schedule: Any, *, k: int, batch: int, lr: float = 1e-3, weight: float = 0.1) -> None:
        torch.manual_seed(0)
        self.x = (torch.from_numpy(data.x).float() / 255.0 - 0.5).permute(0, 3, 1, 2).contiguous()
        self.y = torch.from_numpy(data.y).long()
        self.shards = [torch.from_numpy(data.order[a : a + n].astype(np.int64)) for a, n in zip(data.offset, data.size)]
        self.schedule, self.k, self.batch, self.lr, self.weight = schedule, k, batch, lr, weight
        self.start = LeNet().state_dict()

    def parameters(self) -> int:
        """Number of parameters of a model."""
        return sum(p.numel() for p in self.start.values())

    def encode(self, node: Node) -> Message:
        """The tables and labels of the weights, and the biases unchanged."""
        message: Message = []
        for param, known in zip(node.params, node.dictionary, strict=True):
            flat = param.detach().flatten()
            if param.ndim < 2:
                message.append(flat.clone())
                continue
            start = flat[torch.randint(len(flat), (self.k - 1,))] if known is None else known[1:]
            message.append(cluster(flat, start))
        return message

    def mix(self, node: Node, inbox: list[tuple[Message, float]]) -> None:
        """Replace a node's model and tables by weighted means over its inbox."""
        own = 1.0 - sum(weight for _, weight in inbox)
        for i, param in enumerate(node.params):
            flat = param.detach().view(-1).mul_(own)
            tables = 0.0
            for message, weight in inbox:
                part = message[i]
                values = part if isinstance(part, torch.Tensor) else part[0][part[1].long()]
                flat.add_(values, alpha=weight)
                tables = tables if isinstance(part, torch.Tensor) else tables + weight * part[0]
            if inbox and param.ndim > 1:
                known = node.dictionary[i]
                node.dictionary[i] = tables / (1 - own) if known is None else own * known + tables

    def event(self, node: Node, client: int, steps: int, inbox: list[tuple[Message, float]]) -> Message:
        """One event: mix, train, encode."""
        self.mix(node, inbox)
        anchors, masks = [], []
        for part, known, param in zip(self.encode(node), node.dictionary, node.params, strict=True):
            if isinstance(part, torch.Tensor):
                anchors.append(None)
                masks.append(None)
                continue
            label = part[1].long()
            anchors.append((part[0] if known is None else known)[label].view(param.shape))
            masks.append((part[0] != 0)[label].view(param.shape))
        shard, done = self.shards[client], 0
        while done < steps:
            with torch.no_grad():
                for param, mask in zip(node.params, masks, strict=True):
                    if mask is not None:
                        param.mul_(mask)
            for rows in shard[torch.randperm(len(shard))].split(self.batch)[: steps - done]:
                loss = functional.cross_entropy(node.model(self.x[rows]), self.y[rows])
                for param, slope in zip(node.params, torch.autograd.grad(loss, node.params), strict=True):
                    param.grad = slope
                with torch.no_grad():
                    for param, anchor in zip(node.params, anchors, strict=True):
                        if anchor is not None:
                            param.grad.add_(param - anchor, alpha=2 * self.weight)
                node.optimizer.step()
                done += 1
        return self.encode(node)

    def run(self) -> None:
        """Run all events of the plan, in order."""
        s = self.schedule
        nodes = [Node(self.start, self.lr) for _ in range(s.num_clients)]
        readers = np.bincount(s.source, minlength=len(s.client))
        messages: dict[int, Message] = {}
        for e, client in enumerate(s.client.tolist()):
            entries = range(s.inbox_bounds[e], s.inbox_bounds[e + 1])
            inbox = [(messages[s.source[d]], float(s.weight[d])) for d in entries]
            for d in entries:
                readers[s.source[d]] -= 1
                if not readers[s.source[d]]:
                    del messages[s.source[d]]
            sent = self.event(nodes[client], client, int(s.local_steps[e]), inbox)
            if readers[e]:
                messages[e] = sent
