"""FedAsync in PyTorch as an expert would write it for one accelerator: all clients side by side, in one compiled call.

With constant delays every client is trained once in a wave, from the model that the server had after its last upload.
``torch.func`` vectorises the gradients over the clients and ``torch.compile`` compiles a wave with its server steps.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch_loop import MODELS


class Waves:
    """Waves of one local training for each client, and its upload applied.

    ``shards``: rows of each client, [N, S].
    """

    def __init__(
        self,
        model: str,
        x: np.ndarray,
        y: np.ndarray,
        shards: np.ndarray,
        batch: int,
        steps: int,
        compiled: bool = True,
    ) -> None:
        torch.manual_seed(0)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.x = (torch.from_numpy(x).to(device).float() / 255.0 - 0.5).permute(0, 3, 1, 2).contiguous()
        self.y = torch.from_numpy(y).to(device).long()
        self.shards = torch.from_numpy(shards.astype(np.int64)).to(device)
        net = MODELS[model]().to(device)
        self.server = {name: p.detach().clone() for name, p in net.named_parameters()}
        clients = len(shards)
        self.starts = {name: p.expand(clients, *p.shape).clone() for name, p in self.server.items()}

        def loss(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(functional_call(net, params, (x,)), y)

        gradients = vmap(grad(loss))

        def wave(server: dict[str, torch.Tensor], starts: dict[str, torch.Tensor], rows: torch.Tensor) -> tuple:
            trained = starts
            for k in range(steps):
                change = gradients(trained, self.x[rows[:, k]], self.y[rows[:, k]])
                trained = {name: w - 0.01 * change[name] for name, w in trained.items()}
            after = []
            for client in range(clients):
                server = {name: torch.lerp(w, trained[name][client], 0.6) for name, w in server.items()}
                after.append(server)
            return server, {name: torch.stack([one[name] for one in after]) for name in server}

        self.wave = torch.compile(wave) if compiled else wave
        self.batch, self.steps = batch, steps

    def _rows(self) -> torch.Tensor:
        """The minibatches of a wave, without replacement within an epoch, int64[N, K, B]."""
        clients, size = self.shards.shape
        epochs = -(-self.steps // (size // self.batch))
        chosen = []
        for _ in range(epochs):
            order = torch.rand(clients, size, device=self.shards.device).argsort(1)
            whole = self.shards.gather(1, order)[:, : size // self.batch * self.batch]
            chosen.append(whole.reshape(clients, -1, self.batch))
        return torch.cat(chosen, 1)[:, : self.steps]

    def run(self, waves: int) -> int:
        """Run some waves; returns the number of client updates."""
        with torch.no_grad():
            for _ in range(waves):
                self.server, self.starts = self.wave(self.server, self.starts, self._rows())
        if self.x.is_cuda:
            torch.cuda.synchronize()
        return waves * len(self.shards)
