"""A distribution over all codes of an image, which depend on each other: what it takes to make new images."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, pad, scaled_dot_product_attention

from otpdag.engine import Adam, Method, fit
from otpdag.errors import ConvergenceWarning, DataError, ModelError, check_count
from otpdag.estimators._contract import ModelEstimator, RandomState, seed_of
from otpdag.estimators.vector_quantized import Codes, checked_codes
from otpdag.graph import Graph
from otpdag.learned.algorithm import Drawn
from otpdag.mechanisms.base import Mechanism, Noise, Params, Parents
from otpdag.mechanisms.parameters import Parameter
from otpdag.model import Model
from otpdag.numerics import at_work
from otpdag.settings import Objective
from otpdag.spaces import Count, Space

CODES = "codes"
ROWS_AT_ONCE = 256  # bounds memory; changes no result


@dataclass(eq=False, repr=False)
class CodePrior(ModelEstimator):
    r"""What codes go together: an autoregressive transformer over the codes of a discrete auto-encoder.

    .. math:: p(c) = \prod_m p(c_m \mid c_1, \dots, c_{m-1})

    It is the graph of one observed node with the mechanism :class:`CodeSequence`, fitted by :func:`otpdag.fit` to
    greatest likelihood on minibatches. The paper uses an Image Transformer in this place.

    Args:
        n_codes: Number of values of a code.
        columns: Codes in a row of the grid, whose rows a vector holds one after another; if left out, the root of the
            number of positions where that is whole, else all of them.
        layers: Layers of the transformer.
        width: Length of its feature vectors.
        heads: Attention heads, a divisor of the width.
        n_epochs: How often every vector of codes is seen.
        batch_size: Vectors in a step.
        learning_rate: Of Adam; falls to zero along a cosine.
        random_state: Seed or generator; None is another each time.
        device: ``"cpu"`` or ``"cuda"``.

    Attributes:
        model_: The fitted :class:`otpdag.Model`.
        result_: The :class:`otpdag.FitResult`.

    >>> rng = np.random.default_rng(0)
    >>> first = rng.integers(0, 3, (400, 1))
    >>> prior = CodePrior(3, layers=1, width=16, n_epochs=20, learning_rate=0.01)
    >>> _ = prior.fit((first + np.arange(4)) % 3)  # 0120, 1201 or 2012
    >>> bool((np.diff(prior.sample(50, seed=1)) % 3 == 1).mean() > 0.95)
    True
    """

    fit_call = "fit(codes)"

    n_codes: int = 512
    _: KW_ONLY
    columns: int | None = None
    layers: int = 3
    width: int = 96
    heads: int = 4
    n_epochs: int = 10
    batch_size: int = 32
    learning_rate: float = 2e-3
    random_state: RandomState = 0
    device: str = "cpu"

    def fit(self, codes: ArrayLike, y: Any = None) -> Self:
        """Learn the distribution of vectors of codes.

        Args:
            codes: Integer codes (n, positions).
            y: Ignored.
        """
        held = checked_codes(codes, self.n_codes)
        self._check_counts("n_epochs", "batch_size")
        self.model_ = self._model(held.shape[1])
        steps = self.n_epochs * math.ceil(len(held) / self.batch_size)
        adam = Adam(steps=steps, learning_rate=self.learning_rate, averaging=0.1)
        method = Method("likelihood", Objective(), Drawn(noise="marginal", batch_size=self.batch_size), adam)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            self.result_ = fit(
                self.model_,
                {CODES: held},
                method=method,
                restarts=1,
                seed=seed_of(self.random_state),
                device=self.device,
            )
        return self

    def sample(self, n: int = 1, *, seed: int = 0, temperature: float = 1.0) -> Codes:
        """Draw vectors of codes.

        Args:
            n: How many.
            seed: Determines the draws.
            temperature: Below one favours likely codes, above one rare ones.

        Returns:
            Integer codes (n, positions).
        """
        mechanism, params = self._network
        if n < 1:
            raise DataError(f"`n` must be at least 1; got {n}")
        if not temperature > 0:
            raise DataError(f"`temperature` must be above 0; got {temperature}")
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(n, mechanism.positions, generator=generator, dtype=torch.float64)
        with at_work(min(n, ROWS_AT_ONCE) * mechanism.width):
            drawn = [mechanism.draw(params, rows, temperature) for rows in uniform.split(ROWS_AT_ONCE)]
        return np.asarray(torch.cat(drawn).numpy(), dtype=np.int64)

    def log_prob(self, codes: ArrayLike) -> NDArray[np.float64]:
        """Log-probability of each vector of codes, in nats."""
        mechanism, params = self._network
        held = torch.as_tensor(checked_codes(codes, self.n_codes, mechanism.positions))
        with torch.no_grad(), at_work(min(held.numel(), ROWS_AT_ONCE * held.shape[1]) * mechanism.n_codes):
            parts = [mechanism.row_log_prob(params, rows) for rows in held.split(ROWS_AT_ONCE)]
        return np.asarray(torch.cat(parts).double().numpy())

    def score(self, codes: ArrayLike, y: Any = None) -> float:
        """Mean log-probability of a single code, in nats; minus the entropy rate at best."""
        held = checked_codes(codes, self.n_codes)
        return float(self.log_prob(held).mean() / held.shape[1])

    def _model(self, positions: int) -> Model:
        side = math.isqrt(positions)
        columns = self.columns or (side if side**2 == positions else positions)
        mechanism = CodeSequence(
            positions, self.n_codes, columns=columns, layers=self.layers, width=self.width, heads=self.heads
        )
        return Model(Graph([], nodes=[CODES]), {CODES: mechanism})

    @property
    def _network(self) -> tuple[CodeSequence, Mapping[str, Tensor]]:
        mechanism = cast(CodeSequence, self._fitted.structure.mechanisms[CODES])
        return mechanism, of_replica(self.model_.fitted.naturals[CODES], 0)


class CodeSequence(Mechanism):
    r"""A vector of codes, each of which depends on all before it, by a small causal transformer.

    .. math:: p(c) = \prod_m p(c_m \mid c_1, \dots, c_{m-1}), \quad
              c_m = F^{-1}(u_m \mid c_1, \dots, c_{m-1}), \quad u_m \sim U(0, 1)

    Every position has logits of its own that the network adds to; they start at the frequencies in the data, so that
    before any training the codes are independent and have the right marginals. The network computes in single
    precision.

    Args:
        positions: Number of codes in a vector.
        n_codes: Number of values of a code.
        columns: Codes in a row of the grid; a position then sees the code above it at once, and does not have to learn
            where that stands. As many as positions for codes in a line.
        layers: Layers of the transformer.
        width: Length of its feature vectors.
        heads: Attention heads, a divisor of the width.
    """

    def __init__(
        self,
        positions: int,
        n_codes: int,
        *,
        columns: int | None = None,
        layers: int = 3,
        width: int = 96,
        heads: int = 4,
    ) -> None:
        self.columns = positions if columns is None else columns
        sizes = {"positions": positions, "columns": self.columns, "layers": layers, "heads": heads}
        for name, value in sizes.items():
            check_count(name, value)
        check_count("n_codes", n_codes, least=2)
        if width < 1 or width % heads:
            raise ModelError(f"`width` must be a multiple of the {heads} heads; got {width}")
        self.positions, self.n_codes = positions, n_codes
        self.layers, self.width, self.heads = layers, width, heads

    def on_setup(self) -> None:
        """Refuse parents."""
        if self.family.parents:
            raise ModelError(f"node {self.family.node!r} is {type(self).__name__} and has no parents")

    @property
    def space(self) -> Space:
        """Codes as numbers 0, 1, ..., one for each position."""
        return Count(self.positions)

    @property
    def noise(self) -> Noise:
        """A uniform number for each position."""
        return Noise(self.positions, "uniform")

    def parameters(self) -> dict[str, Parameter]:
        """The network's parameters, those of all layers stacked."""
        d, deep = self.width, self.layers
        narrow = 1 / math.sqrt(d)
        into_stream = narrow / math.sqrt(2 * deep)  # so that the sum over layers is of order one
        return {
            "frequency": Parameter((self.positions, self.n_codes)),
            "left": Parameter((self.n_codes, d), init_scale=narrow),
            "above": Parameter((self.n_codes, d), init_scale=narrow),
            "position": Parameter((self.positions, d), init_scale=narrow),
            "norm_attention": Parameter((deep, 2, d)),
            "query_key_value": Parameter((deep, d, 3 * d), init_scale=narrow),
            "attended": Parameter((deep, d, d), init_scale=into_stream),
            "norm_hidden": Parameter((deep, 2, d)),
            "hidden": Parameter((deep, d, 4 * d), init_scale=narrow),
            "hidden_bias": Parameter((deep, 4 * d)),
            "back": Parameter((deep, 4 * d, d), init_scale=into_stream / 2),
            "norm_last": Parameter((2, d)),
            "logits": Parameter((d, self.n_codes), init_scale=0.1 * narrow),
        }

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """Logits at the frequencies of each position, smoothed by those of all positions."""
        codes = value.long()
        seen = torch.zeros(self.positions, self.n_codes, dtype=torch.float64, device=value.device)
        seen.scatter_add_(1, codes.T, weight.double().expand_as(codes.T))
        overall = seen.sum(0) + 1.0
        smoothed = seen + overall / overall.sum() * math.sqrt(self.n_codes)
        return {"frequency": torch.log(smoothed / smoothed.sum(-1, keepdim=True))}

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Sum of the log-probabilities of all codes."""
        if mask is not None and not bool(mask.all()):
            raise DataError(f"node {self.family.node!r} is a CodeSequence: its codes must not be missing")
        replicas = max(len(value), len(params["logits"]))
        by_replica = [
            self.row_log_prob(of_replica(params, r), value[min(r, len(value) - 1)].long()) for r in range(replicas)
        ]
        return torch.stack(by_replica).to(value)

    def row_log_prob(self, params: Params, codes: Tensor) -> Tensor:
        """Log-probabilities (n,) of vectors of codes (n, positions), by the parameters of one replica."""
        logits = self._logits(params, codes)
        return torch.log_softmax(logits, -1).gather(-1, codes.unsqueeze(-1)).squeeze(-1).sum(-1)

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """Codes drawn one after another."""
        replicas = max(len(noise), len(params["logits"]))
        by_replica = [self.draw(of_replica(params, r), noise[min(r, len(noise) - 1)]) for r in range(replicas)]
        return torch.stack(by_replica).to(noise)

    def draw(self, params: Params, uniform: Tensor, temperature: float = 1.0) -> Tensor:
        """Codes (n, positions) from uniform numbers of that shape; what was attended to is kept, not computed again."""
        rows = len(uniform)
        kept = torch.empty(
            self.layers, 2, rows, self.heads, self.positions, self.width // self.heads, device=uniform.device
        )
        codes = torch.zeros(rows, self.positions, dtype=torch.long, device=uniform.device)
        with torch.no_grad():
            for at in range(self.positions):
                logits = self._logits(params, codes, at, kept)[:, 0] / temperature
                cumulative = torch.softmax(logits.double(), -1).cumsum(-1)
                drawn = (cumulative < uniform[:, at : at + 1]).sum(-1)
                codes[:, at] = drawn.clamp(max=self.n_codes - 1)
        return codes

    # -- the network -----------------------------------------------------------------------------------------------

    def _logits(self, params: Params, codes: Tensor, at: int | None = None, kept: Tensor | None = None) -> Tensor:
        """Logits of every code (n, positions, n_codes), each from those before it.

        Of the position ``at`` alone, (n, 1, n_codes), what the layers made of those before it is in ``kept``.
        """
        places = slice(None) if at is None else slice(at, at + 1)
        # nothing is left of the first code, or above the first row
        padded = pad(codes, (self.columns, 0), value=self.n_codes)
        left, above = padded[:, self.columns - 1 : -1][:, places], padded[:, : -self.columns][:, places]
        tables = {name: pad(params[name], (0, 0, 0, 1)) for name in ("left", "above")}
        stream = tables["left"][left] + tables["above"][above] + params["position"][places]
        for layer in range(self.layers):
            made = _normed(stream, params["norm_attention"][layer]) @ params["query_key_value"][layer]
            query, key, value = made.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            if at is not None and kept is not None:
                kept[layer, 0, :, :, at], kept[layer, 1, :, :, at] = key[:, :, 0], value[:, :, 0]
                key, value = kept[layer, :, :, :, : at + 1]
            attended = scaled_dot_product_attention(query, key, value, is_causal=at is None)
            stream = stream + attended.transpose(1, 2).flatten(2) @ params["attended"][layer]
            hidden = _normed(stream, params["norm_hidden"][layer]) @ params["hidden"][layer]
            stream = stream + gelu(hidden + params["hidden_bias"][layer]) @ params["back"][layer]
        return _normed(stream, params["norm_last"]) @ params["logits"] + params["frequency"][places]


def of_replica(params: Params, replica: int) -> dict[str, Tensor]:
    """One replica's parameters, in single precision."""
    return {name: value[min(replica, len(value) - 1)].float() for name, value in params.items()}


def _normed(stream: Tensor, gain_and_shift: Tensor) -> Tensor:
    return layer_norm(stream, stream.shape[-1:], 1 + gain_and_shift[0], gain_and_shift[1])
