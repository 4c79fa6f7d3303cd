"""Modules as a user of PyTorch writes them, and the twin of one in flax."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from flax import linen
from torch import nn


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.output = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        return self.output(F.relu(self.fc2(F.relu(self.fc1(x)))))


class Twin(linen.Module):
    """LeNet in flax."""

    @linen.compact
    def __call__(self, x):
        for name, features, padding in (("conv1", 6, 2), ("conv2", 16, 0)):
            x = linen.relu(linen.Conv(features, (5, 5), padding=padding, name=name)(x))
            x = linen.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for name, features in (("fc1", 120), ("fc2", 84)):
            x = linen.relu(linen.Dense(features, name=name)(x))
        return linen.Dense(10, name="output")(x)


class MLP(nn.Sequential):
    """BatchNorm and dropout."""

    def __init__(self, features=4, classes=3, rate=0.0):
        layers = [nn.Linear(features, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(rate)]
        super().__init__(*layers, nn.Linear(8, classes))


class Small(nn.Module):
    """BatchNorm of images, with a momentum of its own."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3, momentum=0.3)
        self.output = nn.Linear(3, 3)

    def forward(self, x):
        return self.output(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class Residual(nn.Module):
    """Changes in place, groups, strides and a gate."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, groups=2, stride=2), nn.BatchNorm2d(4, affine=False)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1), nn.Sigmoid())
        self.short, self.output = nn.Conv2d(4, 4, 1, stride=2), nn.Linear(4, 3)

    def forward(self, x):
        x = nn.ReLU(inplace=True)(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(x))
        y = y * self.gate(y)
        y += self.short(x)
        return self.output(nn.ReLU6(inplace=True)(y).mean([2, 3]))


class Orders(nn.Module):
    """A pool before ReLU, an average pool, and a convolution that is used twice."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 6, 2)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        y = self.conv2(x)
        x = F.max_pool2d(y, 2) - F.avg_pool2d(F.relu(y), 2) + F.max_pool2d(F.relu(y), 2, stride=2)
        return F.max_pool2d(self.conv3(x), 2, stride=1).amax((2, 3))


class Many(nn.Module):
    """Many operations one after the other."""

    def __init__(self):
        super().__init__()
        self.conv, self.group, self.layer = nn.Conv2d(3, 4, 3, padding="same"), nn.GroupNorm(2, 4), nn.LayerNorm(6)
        self.own, self.slope = nn.InstanceNorm2d(4, affine=True), nn.PReLU()

    def forward(self, x):
        x = nn.ELU()(nn.LeakyReLU(inplace=True)(nn.Hardswish()(self.group(F.gelu(self.conv(x))))))
        y = F.adaptive_avg_pool2d(F.max_pool2d(self.slope(self.own(x)), 3, 2, 1), 3).flatten(1)
        x = F.pad(F.avg_pool2d(F.dropout2d(x, 0.0, self.training), 2), (1, 0, 2, 1))[:, :, 1:-1, ::2]
        x = (x + 1) * torch.tensor(2.0)
        batch, channels, height, width = x.shape
        x = x.reshape(batch, channels * height * width)
        first, second = x.chunk(2, 1)
        x = torch.stack([x, torch.cat([second, first], 1)]).mean(0)
        x = F.normalize(x) + torch.softmax(x, -1) + x.std(1, keepdim=True) + x.max(dim=1)[0][:, None]
        x = x[:, :6] - torch.einsum("bi,bj->bij", x[:, :3], x[:, 1:4]).sum((1, 2))[:, None]
        return self.layer(x + torch.where(y[:, :6] > 0, y[:, :6] ** 2, torch.zeros(6)).clamp(-1, 1))


class Patches(nn.Module):
    """A vision transformer of one layer, with parameters of its own; a branch of other pools and joined channels."""

    def __init__(self):
        super().__init__()
        self.first, self.places = (
            nn.Parameter(torch.ones(1, 1, 8)),
            nn.Parameter(torch.linspace(-1, 1, 40).view(1, 5, 8)),
        )
        self.cut, self.deep = nn.Conv2d(3, 8, 4, stride=4), nn.Conv2d(3, 3, 3, groups=3, bias=False)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True)
        self.output = nn.Linear(8 + 24, 3)

    def forward(self, x):
        y = torch.cat([self.deep(x), F.silu(x[:, :, 1:-1, 1:-1])], 1)
        y = F.avg_pool2d(F.max_pool2d(y, 3, 2, ceil_mode=True), 2, 1, 1, count_include_pad=False)
        y = F.adaptive_max_pool2d(y, 2).flatten(1)
        x = self.cut(x).flatten(2).transpose(1, 2)
        x = self.layer(torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places)
        return self.output(torch.cat([x[:, 0], y], 1))


class Text(nn.Module):
    """A transformer on whole numbers, with a table and a fixed output layer that are not trained."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        self.register_buffer("positions", torch.linspace(-1, 1, 40).reshape(5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(8, 3)
        self.output.weight.requires_grad_(False)

    def forward(self, x):
        seen = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.output(self.encoder(self.embedding(x) + self.positions, mask=seen, is_causal=True).mean(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.conv = nn.MultiheadAttention(8, 2, batch_first=True), nn.Conv1d(8, 4, 3, stride=2)

    def forward(self, x):
        x = self.attention(x, x, x)[0].transpose(1, 2)
        return F.avg_pool1d(self.conv(x), 2).squeeze(-1)


class Sequence(nn.Sequential):
    """Sequences [L, C], turned to [C, L]."""

    def __init__(self):
        super().__init__(nn.Conv1d(2, 4, 3), nn.MaxPool1d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))


class Corners(nn.Module):
    """What a careless translation gets wrong in silence: corners of gradients, types, and positions that see none."""

    def __init__(self):
        super().__init__()
        self.first, self.output = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.first(x)
        flat = x[:, :1].expand(-1, 3).std(1, keepdim=True) + (0 * x).std() + (0 * x).norm()
        q = x[:, None, :, None]
        below = F.scaled_dot_product_attention(q, q, q, attn_mask=torch.full((4, 4), True).tril(-1))
        whole = (x.detach().abs() * 50).to(torch.uint8) * x
        picked = x.reshape(-1, 2, 2).gather(1, whole.new_zeros(len(x), 1, 1, dtype=torch.int64)).flatten(1)
        return self.output(below[:, 0, :, 0] + whole + picked + flat)


class Tied(nn.Module):
    """One matrix under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))
