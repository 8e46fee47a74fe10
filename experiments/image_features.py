"""A small classifier of a data set's own labels, whose features stand in for those of AlexNet and Inception.

LPIPS and FID need weights that are not part of this project and are never downloaded. What is computed here has names
of its own (feature distance, Fréchet distance of features): it ranks reconstructions of one data set in one run, and
its values compare with nothing else.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from otpdag.numerics import at_work


class Classifier(nn.Module):
    """Three convolutions, each of which halves the image, and a layer of 128 features."""

    def __init__(self, channels: int, labels: int) -> None:
        super().__init__()
        widths = (channels, 32, 64, 64)
        self.convolutions = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 4, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU())
            for before, after in pairwise(widths)
        )
        self.last = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * widths[-1], 128), nn.ReLU())
        self.head = nn.Linear(128, labels)

    def layers(self, images: Tensor) -> list[Tensor]:
        """Feature maps of all convolutions; images (n, channels, height, width) from 0 to 1."""
        named, x = [], 2 * images - 1
        for convolution in self.convolutions:
            x = convolution(x)
            named.append(x)
        return named

    def pooled(self, images: Tensor) -> Tensor:
        """Features (n, 128)."""
        return self.last(self.layers(images)[-1])

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the labels."""
        return self.head(self.pooled(images))


@dataclass(frozen=True)
class Judge:
    """A trained classifier, and how often it is right on images that it has not seen."""

    network: Classifier
    accuracy: float

    def features(self, images: np.ndarray) -> np.ndarray:
        """Features (n, 128) of images (n, height, width, channels) in bytes."""
        with torch.no_grad():
            return torch.cat([self.network.pooled(x) for x in as_tensor(images).split(256)]).numpy()


def train_judge(
    images: np.ndarray, labels: np.ndarray, *, epochs: int, seed: int, batch: int = 64, rate: float = 2e-3
) -> Judge:
    """Train on nine tenths of the images, and count how often it is right on the rest."""
    names, targets = np.unique(labels, return_inverse=True)
    order = np.random.default_rng([seed, 1]).permutation(len(images))
    held, kept = np.split(order, [len(order) // 10])
    with torch.random.fork_rng(devices=[]), at_work(1):
        torch.manual_seed(seed)
        network = Classifier(images.shape[-1], len(names))
        _descend(network, images[kept], targets[kept], epochs=epochs, batch=batch, rate=rate, seed=seed)
        network.eval().requires_grad_(False)
        named = torch.cat([network(x).argmax(-1) for x in as_tensor(images[held]).split(256)]).numpy()
    return Judge(network, float((named == targets[held]).mean()))


def _descend(network, images, targets, *, epochs, batch, rate, seed):
    optimiser = torch.optim.Adam(network.parameters(), lr=rate)
    steps = epochs * max(1, len(images) // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    rng = np.random.default_rng([seed, 2])
    labels = torch.as_tensor(targets)
    for _ in range(epochs):
        for rows in np.array_split(rng.permutation(len(images)), max(1, len(images) // batch)):
            optimiser.zero_grad()
            cross_entropy(network(as_tensor(images[rows])), labels[rows]).backward()
            optimiser.step()
            schedule.step()


def as_tensor(images: np.ndarray) -> Tensor:
    """Bytes (n, height, width, channels) as numbers from 0 to 1, channels first."""
    return torch.as_tensor(images).movedim(-1, 1).float() / 255
