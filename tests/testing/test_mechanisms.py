"""The contract checks fail where they should."""

from itertools import count

import pytest
import torch

from otpdag import mechanisms as m
from otpdag.errors import ModelError
from otpdag.mechanisms.base import Noise
from otpdag.spaces import Discrete, Real
from otpdag.testing import MECHANISM_CHECKS, check_mechanism
from tests.mechanisms.own import Chances, LabelledChances, Skewed

FAMILY = m.Family("x", (("a", Discrete(2)),))
NUMBERS = count()  # of classes, whose names are registered once


def broken(**methods):
    """A normal node with some methods replaced."""
    return m.register(type("Broken" + "".join(name.title() for name in sorted(methods)), (m.Normal,), methods))()


def wrong_density(self, params, value, parents, mask=None):
    return m.Normal.log_prob(self, params, value, parents, mask) + 0.1


def wrong_shape_density(self, params, value, parents, mask=None):
    wider = {**params, "scale": 1.2 * params["scale"]}
    return m.Normal.log_prob(self, wider, value, parents, mask)


def no_mask(self, params, value, parents, mask=None):
    return m.Normal.log_prob(self, params, value, parents)


def detached(self, params, parents, noise):
    return m.Normal.forward(self, {**params, "scale": params["scale"].detach()}, parents, noise)


def halved_gradient(self, params, parents, noise):
    value = m.Normal.forward(self, params, parents, noise)
    return 0.5 * value + 0.5 * value.detach()


def narrow(self, params, parents, noise):
    return m.Normal.forward(self, params, parents, noise).squeeze(-1)


def doubled_abduction(self, params, value, parents, uniform):
    return 2 * m.Normal.abduct(self, params, value, parents, uniform)


def mixed_replicas(self, params, parents, noise):
    mixed = {name: value.mean(0, keepdim=True) for name, value in params.items()}
    return m.Normal.forward(self, mixed, parents, noise).expand(*noise.shape)


def lost_start(self, value, parents, weight):
    return {name: value + 3 for name, value in m.Normal.start(self, value, parents, weight).items()}


def shapeless_start(self, value, parents, weight):
    return {name: value[0] for name, value in m.Normal.start(self, value, parents, weight).items()}


def shifted_mean(self, params, parents):
    return m.Normal.mean(self, params, parents) + 1


def forgetful_units(self, params):
    return {name: value + 1 for name, value in params.items()}


def keeps_labels(self, params, nodes, order):
    return dict(params)


def keeps_sign(self, params, nodes, sign):
    return dict(params)


def loses_a_parameter(self, params, nodes, sign):
    return {"loc": params["loc"] * sign}


def shortened_axes(self):
    return {"loc": (m.Axis(), m.Axis())}


def unknown_axes(self):
    return {"level": (m.Axis(),)}


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"log_prob": wrong_density}, "exp\\(log_prob\\) integrates to one within"),
        ({"log_prob": wrong_shape_density}, "draws do not follow log_prob"),
        ({"log_prob": no_mask}, "log_prob of a missing value is not zero"),
        ({"forward": detached}, "forward has no gradient in 'scale'|relaxed has no gradient in 'scale'"),
        ({"forward": halved_gradient}, "the gradient of .* finite differences say"),
        ({"forward": narrow}, r"forward gave the shape \(2, 300\), expected \(2, 300, 1\)"),
        ({"abduct": doubled_abduction}, r"forward\(abduct\(value\)\) is another value"),
        ({"forward": mixed_replicas}, r"forward\(abduct\(value\)\) is another value"),
        ({"start": lost_start}, "start loses .* of log-likelihood"),
        ({"start": shapeless_start}, "start gave 'loc' the shape"),
        ({"mean": shifted_mean}, "standard errors from the mean of the draws"),
        ({"relabelled": keeps_labels}, "log_prob differs after relabelling a"),
        ({"turned": keeps_sign}, "log_prob differs after turning x"),
        ({"turned": loses_a_parameter}, "turning x changed the names or shapes of parameters"),
        ({"axes": shortened_axes}, r"axes of 'loc' give \(1, 1\), not \(2, 1\)"),
        ({"axes": unknown_axes}, "axes names 'level', which is no parameter"),
        ({"remove_units": forgetful_units}, r"natural\(raw\('loc'\)\) is another value"),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else None,
)
def test_broken_promises_are_found(methods, message, monkeypatch):
    monkeypatch.setattr("otpdag.mechanisms.base._REGISTRY", {})
    with pytest.raises(AssertionError, match=message):
        check_mechanism(broken(**methods), FAMILY)


def steeper(self, params, parent):
    return m.Normal.slopes(self, params, parent).abs()


def uneven(self, params, parents, like=None):
    """Right where the mechanism asks for a value's own, wrong where others ask for all."""
    own = like is None or bool(like.sum(-1).all())
    return m.StayOrMove.log_probs(self, params, parents) - (0.0 if own else 0.1)


def swapped(self):
    """A chain's table whose first axis is said to be the node's own."""
    return {"probs": (m.Axis.of_values("x", self.space), m.Axis.of_categories(self.family.discrete))}


@pytest.mark.parametrize(
    ("base", "methods", "parent", "message"),
    [
        (m.Normal, {"slopes": steeper}, Real(), "slopes of 'a' do not turn with it"),
        (m.StayOrMove, {"log_probs": uneven}, Discrete(2), "log_probs are not those of log_prob"),
        (m.Categorical, {"axes": swapped}, Discrete(2), "log_prob differs after relabelling x"),
    ],
    ids=["slopes", "log_probs", "axes"],
)
def test_broken_promises_to_children_and_parents_are_found(base, methods, parent, message, monkeypatch):
    monkeypatch.setattr("otpdag.mechanisms.base._REGISTRY", {})
    kind = m.register(type("Broken", (base,), methods))
    with pytest.raises(AssertionError, match=message):
        check_mechanism(kind(), m.Family("x", (("a", parent),)))


@pytest.mark.parametrize("kind", [Chances, LabelledChances, Skewed])
def test_mechanisms_that_follow_or_say_nothing_pass(kind, monkeypatch):
    monkeypatch.setattr("otpdag.mechanisms.base._REGISTRY", {kind.__name__: kind})
    if kind is Skewed:
        monkeypatch.setattr(kind, "start", lambda self, value, parents, weight: {})
    check_mechanism(kind(), m.Family("x"))


def test_the_message_names_the_mechanism_and_its_parents():
    with pytest.raises(AssertionError, match=r"BrokenForward \(parents a: Discrete\(size=2\)\): "):
        check_mechanism(type("BrokenForward", (m.Normal,), {"forward": narrow})(), FAMILY)


class Uniform(m.Mechanism):
    """The least that a third party has to write."""

    @property
    def space(self):
        return Real(1)

    @property
    def noise(self):
        return Noise(1, "uniform")

    def forward(self, params, parents, noise):
        return noise


def test_the_least_mechanism_passes(monkeypatch):
    monkeypatch.setattr("otpdag.mechanisms.base._REGISTRY", {})
    with pytest.raises(ModelError, match="unknown mechanism 'Uniform'"):
        check_mechanism(Uniform(), m.Family("x"))
    m.register(Uniform)
    check_mechanism(Uniform(), m.Family("x"))


def test_all_checks_are_listed():
    from otpdag.testing import mechanisms

    found = {
        value for name, value in vars(mechanisms).items() if name.startswith("check_") and name != "check_mechanism"
    }
    assert found == set(MECHANISM_CHECKS)


def test_it_draws_nothing_from_global_randomness():
    before = torch.get_rng_state()
    check_mechanism(m.Beta(), FAMILY, rows=50)
    assert torch.equal(before, torch.get_rng_state())


# -- closed-form updates ----------------------------------------------------------------------------------------------


def with_own_density(base, **methods):
    """A mechanism whose density, features and updates stand in one class, as the contract asks."""
    own = {name: getattr(base, name) for name in ("log_prob", "features", "coefficients", "fitted")}
    return m.register(type(f"Own{base.__name__}{next(NUMBERS)}", (base,), {**own, **methods}))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda self, params, sums: dict(params), "fitted comes to rest where 'log_rate' could still"),
        (
            lambda self, params, sums: {
                "log_rate": params["log_rate"]
                + 0.5 * (m.Poisson.fitted(self, params, sums)["log_rate"] - 0.3)
                - 0.5 * params["log_rate"]
            },
            "fitted (comes to rest|makes the rows less likely)",
        ),
    ],
)
def test_updates_that_rest_elsewhere_than_at_the_maximum_are_noticed(wrong, message):
    lazy = with_own_density(m.Poisson, fitted=wrong)
    with pytest.raises(AssertionError, match=message):
        check_mechanism(lazy(), FAMILY)
    check_mechanism(with_own_density(m.Poisson)(), FAMILY)
