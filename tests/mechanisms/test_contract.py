"""What every public mechanism promises, whichever it is and whatever its parents are."""

import functools
import inspect

import pytest
import torch

from otpdag import mechanisms as m
from otpdag.errors import ModelError
from otpdag.mechanisms.base import Turning
from otpdag.spaces import Count, Discrete, Image, Real, Simplex
from otpdag.testing import MECHANISM_CHECKS, Case

PUBLIC = [getattr(m, name) for name in m.__all__]
CLASSES = [cls for cls in PUBLIC if inspect.isclass(cls) and issubclass(cls, m.Mechanism)]
CLASSES = [cls for cls in CLASSES if not inspect.isabstract(cls)]

ROWS = 200
PARENTS = {
    "none": (),
    "discrete": (("a", Discrete(3)),),
    "discrete-discrete": (("a", Discrete(3)), ("b", Discrete(2))),
    "real": (("r", Real(1)),),
    "discrete-real": (("a", Discrete(3)), ("r", Real(2))),
}


def linear(family):
    """Build a small network without random numbers, as wide as the parents."""
    width = sum(space.width for _, space in family.parents) or 1
    module = torch.nn.Sequential(torch.nn.Linear(width, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, 0.3)
    return module


def first_parent(parents):
    return next(iter(parents.values()))[..., :1] * 2


def shifted(parents, noise, loc, scale):
    return loc + scale * noise + sum(value[..., :1] for value in parents.values())


# how to build what needs more than sizes
BUILD = {
    "StayOrMove": lambda family: m.StayOrMove(3),
    "Multinomial": lambda family: m.Multinomial(5, total=12),
    "Deterministic": lambda family: m.Deterministic(first_parent),
    "Simulator": lambda family: m.Simulator(
        shifted, {"loc": m.start(0.5), "scale": m.start(1.0)}, bounds={"scale": (0, None)}
    ),
    "Decoder": lambda family: m.Decoder(linear(family), Real(2), noise_scale=m.start(0.5)),
}
VARIANTS = {
    "Normal-dim": (m.Normal(2), "discrete-real"),
    "Normal-isotropic": (m.Normal(2, isotropic=True, floor=0.01), "discrete-real"),
    "Normal-shared": (m.Normal(shared_scale=True), "discrete-real"),
    "Normal-network": (m.Normal(network=(8,)), "discrete-real"),
    "Normal-fixed-weight": (m.Normal(weight=[[0.5], [-1.0]]), "discrete-real"),
    "MultivariateNormal-3": (m.MultivariateNormal(3, floor=1e-4), "discrete-real"),
    "MultivariateNormal-shared": (m.MultivariateNormal(2, shared_covariance=True), "discrete"),
    "LogNormal-dim": (m.LogNormal(2), "discrete"),
    "StudentT-dim": (m.StudentT(2), "real"),
    "StudentT-df": (m.StudentT(df=4.0), "discrete"),
    "Gamma-dim": (m.Gamma(2), "discrete-real"),
    "Gamma-network": (m.Gamma(network=(8,)), "real"),
    "Beta-dim": (m.Beta(2), "discrete-real"),
    "Poisson-dim": (m.Poisson(2), "discrete-real"),
    "NegativeBinomial-dim": (m.NegativeBinomial(2), "discrete"),
    "Categorical-3": (m.Categorical(3), "discrete-real"),
    "StayOrMove-3": (m.StayOrMove(3), "discrete"),
    "Categorical-network": (m.Categorical(3, network=(8,)), "discrete-real"),
    "Multinomial-topics": (m.Multinomial(6, total=15), "simplex"),
    "Multinomial-total": (m.Multinomial(5, total="n"), "discrete-count"),
    "Codes-weights": (m.Codes(3, 2, weights=m.start([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])), "none"),
    "Codebook-codes": (m.Codebook(3, 2), "codes"),
    "Quantized-real": (m.Quantized(4, 2, scale=1.0), "latents"),
    "Decoder-image": (m.Decoder(torch.nn.Linear(1, 8), Image(2, 2, 2), noise_scale=0.2), "real"),
    "Decoder-plain": (m.Decoder(torch.nn.Linear(1, 3), Real(3)), "real"),
}
MORE_PARENTS = {
    "simplex": (("t", Simplex(3)),),
    "discrete-count": (("a", Discrete(3)), ("n", Count(1))),
    "codes": (("c", Count(2)),),
    "latents": (("z", Real(4)),),
}


def build(cls, family):
    if cls.__name__ in BUILD:
        return BUILD[cls.__name__](family)
    needed = [p.name for p in inspect.signature(cls).parameters.values() if p.default is p.empty]
    return cls(**dict.fromkeys(needed, 3))


def cases():
    for cls in CLASSES:
        for name in PARENTS:
            yield f"{cls.__name__}-{name}"
    yield from VARIANTS


@functools.cache
def case(label):
    """Build one case; None where the mechanism refuses these parents, with the message it gives."""
    if label in VARIANTS:
        mechanism, parents = VARIANTS[label]
        return Case.build(mechanism, m.Family("x", {**PARENTS, **MORE_PARENTS}[parents]), rows=ROWS)
    name, _, parents = label.partition("-")
    family = m.Family("x", PARENTS[parents])
    try:
        return Case.build(build(getattr(m, name), family), family, rows=ROWS)
    except ModelError as error:
        return str(error)


LABELS = {label: case(label) for label in cases()}
REFUSED = {label: found for label, found in LABELS.items() if isinstance(found, str)}
SERVED = [label for label in LABELS if label not in REFUSED]


def test_the_list_is_complete():
    assert len(CLASSES) >= 14
    assert all(cls in CLASSES for cls in (m.Normal, m.Gamma, m.Given))


@pytest.mark.parametrize("label", SERVED)
def test_every_promise_is_kept(label):
    for check in MECHANISM_CHECKS:
        check(LABELS[label])


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_mechanism_serves_some_parents(cls):
    assert any(label.partition("-")[0] == cls.__name__ for label in SERVED)


def test_few_parents_are_refused_and_every_refusal_names_the_node():
    picky = {"Codebook", "Codes", "Decoder", "Deterministic", "Dirichlet", "Given", "Quantized", "StayOrMove"}
    assert {label.partition("-")[0] for label in REFUSED} == picky
    assert all("node 'x'" in message for message in REFUSED.values())


# -- who follows other labels and signs --------------------------------------------------------------------------------

KEEPS_LABELS = {"Decoder", "Deterministic", "Simulator", "Normal-network", "Categorical-network"}
TURNS_ROUND = {"MultivariateNormal", "Normal", "StudentT"}


@pytest.mark.parametrize("label", [label for label in SERVED if "discrete" in label or label in VARIANTS])
def test_mechanisms_follow_the_labels_of_their_parents(label):
    one = LABELS[label]
    discrete = [name for name, _ in one.mechanism.family.discrete]
    alike = isinstance(one.mechanism, m.StayOrMove)
    for name in discrete:
        nodes = ["x", name] if alike else [name]
        followed = one.mechanism.relabelled(one.params, nodes, [*range(1, 3), 0] if name == "a" else [1, 0])
        assert (followed is None) == (label in KEEPS_LABELS or label.partition("-")[0] in KEEPS_LABELS)


def turned(mechanism, params, nodes, sign):
    return mechanism.turned(params, nodes, sign) if isinstance(mechanism, Turning) else None


@pytest.mark.parametrize("label", SERVED)
def test_real_nodes_turn_round_and_follow_real_parents(label):
    one = LABELS[label]
    linear = "network" not in label and label.partition("-")[0] not in KEEPS_LABELS | {"Quantized"}
    for name, space in one.mechanism.family.continuous:
        if space.is_unbounded:
            followed = turned(one.mechanism, one.params, [name], -torch.ones(space.width, dtype=torch.float64))
            assert (followed is not None) == linear
    if one.mechanism.space.is_unbounded and not one.mechanism.is_given:
        sign = -torch.ones(one.mechanism.space.width, dtype=torch.float64)
        assert (turned(one.mechanism, one.params, ["x"], sign) is not None) == (
            linear and label.partition("-")[0] in TURNS_ROUND
        )
