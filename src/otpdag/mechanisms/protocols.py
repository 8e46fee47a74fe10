"""What a mechanism may offer besides its contract, each in a class of its own: a mechanism that has the methods is one.

Whoever needs one of them asks with ``isinstance``. Some depend on the parents or on what is given, too; the functions
below ask for both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from otpdag.divergences.whitened import Kernel
from otpdag.mechanisms.base import Mechanism, Noise, Params, Parents
from otpdag.mechanisms.predictor import configurations


@runtime_checkable
class ExponentialFamily(Protocol):
    r"""A log-density that is a product of features of the value and coefficients of the parameters.

    With one row of coefficients for each configuration of the discrete parents,
    :math:`\log p(x \mid c) = \mathrm{features}(x) \cdot \eta_c`, any number of weighted values is read through the
    features' sums: they are all that the M-step needs.
    """

    def features(self, value: Tensor, mask: Tensor) -> Tensor | None:
        """Features (n, F) of values (n, width); cells that ``mask`` (n, cells) does not keep add nothing.

        None where these parents, or these gaps, allow none.
        """

    def coefficients(self, params: Params) -> Tensor:
        r"""The coefficients :math:`\eta` (R, C, F) of :meth:`features`, for each configuration."""

    def fitted(self, params: Params, sums: Tensor) -> dict[str, Tensor]:
        """The likeliest natural parameters for weighted sums of features (R, C, F) in each configuration.

        What is given stays, and what no row tells stays as it is in ``params``.
        """


@runtime_checkable
class ClosedForm(Protocol):
    """A mechanism whose M-step may have a closed form, whatever its parents are."""

    @property
    def has_closed_form(self) -> bool:
        """Whether it has: nothing is given or tied."""


@runtime_checkable
class Regressed(Protocol):
    """A mechanism whose M-step is a regression on its numeric parents."""

    def regressed(
        self, params: Params, moments: Tensor, shift: Tensor, unit: Tensor, least: float = ...
    ) -> dict[str, Tensor]:
        """The likeliest natural parameters for second moments of each coordinate with the numeric parents.

        Args:
            params: Where all parameters are (1 or R, ...); what no row tells stays.
            moments: Sums of products of (value, numeric parents, 1) in each configuration, coordinate by coordinate
                (R, C, dim, P + 2, P + 2).
            shift: What was subtracted from value and parents before (dim, P + 1).
            unit: What values were divided by then (dim,); parents are not.
            least: A share of the column's spread, below which no scale falls.
        """


@runtime_checkable
class LinearNormal(Protocol):
    """A node that may be linear in its numeric parents and in its noise, which is normal."""

    @property
    def is_linear(self) -> bool:
        """Whether it is: a network predicts anything."""

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """The noise, an affine function of value and numeric parents."""


@runtime_checkable
class Abducible(Protocol):
    """A mechanism that finds the noise that made a value."""

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """The noise that made ``value``: ``u = psi^-1(x; parents)``.

        For counts and categories a whole interval of noise gives the same value; ``uniform`` (R, ...,
        noise.dim) picks a point in it (randomised probability integral transform).
        """


@runtime_checkable
class Relaxed(Protocol):
    """A mechanism with draws that are differentiable in parameters and parents, though its values are not."""

    def relaxed(self, params: Params, parents: Parents, noise: Tensor, temperature: float) -> Tensor:
        """A draw from noise (R, ..., dim)."""


@runtime_checkable
class RelaxedNoise(Protocol):
    """A mechanism whose relaxed draws come from other noise than its values."""

    @property
    def relaxed_noise(self) -> Noise:
        """Its prior."""


@runtime_checkable
class Turning(Protocol):
    """A mechanism that follows other signs of hidden numbers, which nothing in the data tells."""

    def turned(self, params: Params, nodes: Collection[str], sign: Tensor) -> dict[str, Tensor] | None:
        """Parameters of the same mechanism once the coordinates of each of ``nodes`` are multiplied by ``sign``.

        Args:
            params: Natural parameters (R, ...).
            nodes: The node itself, some of its parents, or both, all of them real vectors of one width.
            sign: One or minus one for each coordinate, (width,).

        Returns:
            All parameters, or None if the mechanism cannot follow; then signs stay as they are.
        """


@runtime_checkable
class Sloped(Protocol):
    """A mechanism that says which way it rises."""

    def slopes(self, params: Params, parent: str) -> Tensor | None:
        """How steeply the node rises with each coordinate of a numeric parent, (R, width); None if it has no slope."""


@runtime_checkable
class KernelMeans(Protocol):
    """A mechanism with closed-form means of Gaussian kernels of its coordinates."""

    def kernel_means(self, params: Params, parents: Parents, kernels: Sequence[Kernel]) -> list[Tensor] | None:
        """The means of each coordinate's kernels (R, ..., J_c), where they exist."""


@runtime_checkable
class Buffered(Protocol):
    """A mechanism that keeps what it read off the data, such as units: a file needs it beside the parameters."""

    def buffers(self) -> dict[str, Tensor]:
        """What :meth:`Mechanism.scaled_to` took from the data."""

    def with_buffers(self, buffers: Mapping[str, Tensor]) -> Self:
        """Return a copy with saved :meth:`buffers`."""


def has_closed_form(mechanism: Mechanism) -> bool:
    """Whether the M-step of a mechanism has a closed form, with its parents and with what is given."""
    return isinstance(mechanism, ClosedForm) and mechanism.has_closed_form


def fitted_to_rows(
    mechanism: Mechanism, params: Params, value: Tensor, parents: Parents, weight: Tensor
) -> dict[str, Tensor]:
    """The likeliest natural parameters for weighted rows: values (n, width), weights (R, n).

    >>> import torch
    >>> from otpdag.mechanisms import Categorical, Family
    >>> coin, before = Categorical(2).setup(Family("x")), {"probs": torch.tensor([[[0.5, 0.5]]])}
    >>> fitted_to_rows(coin, before, torch.eye(2), {}, torch.tensor([[300.0, 100.0]]))["probs"]
    tensor([[[0.7499, 0.2501]]])
    """
    features = None
    if isinstance(mechanism, ExponentialFamily):
        features = mechanism.features(value, torch.ones_like(value[:, :1], dtype=torch.bool))
    if not isinstance(mechanism, ExponentialFamily) or features is None:
        raise NotImplementedError(f"{type(mechanism).__name__} has no features with these parents")
    config, share = configurations(mechanism.family, parents), weight.unsqueeze(-1)
    return mechanism.fitted(params, (share if config is None else share * config).mT @ features)


def is_linear(mechanism: Mechanism) -> bool:
    """Whether a node is linear in its numeric parents and its noise, which is normal.

    >>> from otpdag.mechanisms import Family, Normal, Poisson
    >>> [is_linear(one.setup(Family("x"))) for one in (Normal(), Normal(network=(2,)), Poisson())]
    [True, False, False]
    """
    return isinstance(mechanism, LinearNormal) and mechanism.is_linear


def can_abduct(mechanism: Mechanism) -> bool:
    """Whether there is noise, and the mechanism can recover it."""
    return isinstance(mechanism, Abducible) and mechanism.noise.dim > 0


def abducted(mechanism: Mechanism, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
    """The noise that made ``value``, of a mechanism that can recover it; see :class:`Abducible`."""
    if not isinstance(mechanism, Abducible):
        raise NotImplementedError(f"{type(mechanism).__name__} cannot recover its noise")
    return mechanism.abduct(params, value, parents, uniform)


def relaxed_noise(mechanism: Mechanism) -> Noise:
    """The prior of the noise that :func:`relaxed` takes."""
    return mechanism.relaxed_noise if isinstance(mechanism, RelaxedNoise) else mechanism.noise


def relaxed(mechanism: Mechanism, params: Params, parents: Parents, noise: Tensor, temperature: float) -> Tensor:
    """A draw differentiable in parameters and parents, from :func:`relaxed_noise` (R, ..., dim)."""
    if isinstance(mechanism, Relaxed):
        return mechanism.relaxed(params, parents, noise, temperature)
    return mechanism.forward(params, parents, noise)


def buffers_of(mechanism: Mechanism) -> dict[str, Tensor]:
    """What a mechanism read off the data; nothing of one that keeps nothing."""
    return mechanism.buffers() if isinstance(mechanism, Buffered) else {}


def defines_together(mechanism: Mechanism, *methods: str) -> bool:
    """Whether one class defines all of these methods: one that overrides a density alone no longer fits the rest.

    >>> from otpdag.mechanisms import Bernoulli
    >>> defines_together(Bernoulli(), "log_prob", "features")
    True
    """
    owners = [next((one for one in type(mechanism).__mro__ if name in vars(one)), None) for name in methods]
    return owners[0] is not None and all(one is owners[0] for one in owners)
