"""What does not fit is refused, with a message that says why."""

import pytest
import torch

from otpdag import mechanisms as m
from otpdag.errors import ModelError
from otpdag.mechanisms.base import abducted, can_abduct
from otpdag.mechanisms.parameters import Parameter
from otpdag.spaces import Discrete, Positive, Real, Simplex, Unit

REAL = (("r", Real(1)),)
TOPICS = (("t", Simplex(2)),)
MANY = tuple((f"d{i}", Discrete(12)) for i in range(4))
LINEAR = torch.nn.Linear(1, 1)
ROWS = {"r": torch.zeros(1, 4, 1)}


def drop_axis(parents):
    return parents["r"][..., 0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: m.Normal(0), "dim must be a whole number of at least 1; got 0"),
        (lambda: m.Gamma(-1), "dim must be a whole number of at least 1; got -1"),
        (lambda: m.Beta(0), "dim must be a whole number of at least 1; got 0"),
        (lambda: m.Poisson(0), "dim must be a whole number of at least 1; got 0"),
        (lambda: m.Dirichlet(0), "dim must be a whole number of at least 1; got 0"),
        (lambda: m.Categorical(0), "size must be a whole number of at least 1; got 0"),
        (lambda: m.Multinomial(1), "categories must be a whole number of at least 2; got 1"),
        (lambda: m.Multinomial(3, total=-2), "total must be a whole number of at least 0; got -2"),
        (lambda: m.Poisson(rate=1.0, log_rate=0.0), "give `log_rate` or `rate`, not both"),
        (lambda: m.Poisson(rate=0.0), "`rate` must be above zero; got 0.0"),
        (lambda: m.NegativeBinomial(rate=m.start(-1.0)), "`rate` must be above zero; got -1.0"),
        (lambda: m.Deterministic(3), "`function` must be callable; got 3"),
        (lambda: m.Decoder(print), "`module` must be a torch.nn.Module; got <built-in function print>"),
        (lambda: m.Decoder(LINEAR, Unit(1), noise_scale=1.0), r"`noise_scale` needs real values; got .* Unit\(dim=1\)"),
    ],
)
def test_arguments(build, message):
    with pytest.raises(ModelError, match=message):
        build()


@pytest.mark.parametrize(
    ("mechanism", "family", "message"),
    [
        (m.Normal(scale=-1.0), m.Family("x"), "parameter 'scale' of node 'x' must be a number above zero; got -1.0"),
        (m.Normal(loc=float("nan")), m.Family("x"), "'loc' of node 'x' must be a finite number; got nan"),
        (m.StudentT(df=1.0), m.Family("x"), "'df' of node 'x' must be a number above 1; got 1.0"),
        (m.Normal(loc=[1.0, 2.0]), m.Family("x"), r"'loc' of node 'x' must have a shape that broadcasts to \(1, 1\)"),
        (
            m.Categorical(2, probs=[0.5, 0.6]),
            m.Family("x"),
            "'probs' of node 'x' must be non-negative numbers that sum to one",
        ),
        (
            m.Categorical(2, logits=[0.5, 0.6]),
            m.Family("x"),
            "'logits' cannot be given; with these parents the parameter is 'probs'",
        ),
        (
            m.Categorical(2, probs=[0.5, 0.5]),
            m.Family("x", REAL),
            "node 'x': 'probs' cannot be given; with these parents the parameter is 'logits'",
        ),
        (m.Dirichlet(3), m.Family("x", REAL), "node 'x': Dirichlet takes discrete parents only; 'r' are numeric"),
        (m.Multinomial(2, topics=[[0.5, 0.5]]), m.Family("x"), "'topics' cannot be given; .* the parameter is 'probs'"),
        (
            m.Multinomial(2, probs=[0.5, 0.5]),
            m.Family("x", TOPICS),
            "'probs' cannot be given; .* the parameter is 'topics'",
        ),
        (m.Multinomial(2, total="n"), m.Family("x"), "`total` must be a number or a parent that holds one; got 'n'"),
        (
            m.Multinomial(2, total="n"),
            m.Family("x", (("n", Discrete(2)),)),
            "`total` must be a number or a parent that holds one; got 'n'",
        ),
        (m.Given(), m.Family("x", hidden=True), "'x' is Given, so it must be .* without parents; it is hidden"),
        (m.Given(), m.Family("x", REAL), "'x' is Given, so it must be .* without parents; it has parents"),
        (m.Deterministic(len), m.Family("x"), "node 'x' is Deterministic and needs at least one parent"),
        (m.Decoder(LINEAR), m.Family("x"), "node 'x' is a Decoder and needs at least one parent"),
        (m.Normal(), m.Family("x", MANY), "a table over its discrete parents needs 20736 rows; at most 20000"),
    ],
)
def test_settings_and_parents(mechanism, family, message):
    with pytest.raises(ModelError, match=message):
        mechanism.setup(family)


@pytest.mark.parametrize(
    ("mechanism", "family", "parents", "message"),
    [
        (m.Given(), m.Family("x"), {}, "node 'x' is Given: its values must be given, they cannot be drawn"),
        (m.Multinomial(2), m.Family("x"), {}, "node 'x': sampling a Multinomial needs `total`, its number of draws"),
        (m.Deterministic(drop_axis), m.Family("x", REAL), ROWS, r"its function must return .*, 1\); got \(1, 4\)"),
        (m.Deterministic(len), m.Family("x", REAL), ROWS, r"node 'x': its function must return a tensor .* got int"),
        (m.Decoder(LINEAR, Real(2)), m.Family("x", REAL), ROWS, r"module must map \(4, 1\) to \(4, 2\); got \(4, 1\)"),
    ],
)
def test_forward(mechanism, family, parents, message):
    bound = mechanism.setup(family)
    params = {name: torch.full((1, *p.shape), 0.5) for name, p in bound.declared().items()}
    with pytest.raises(ModelError, match=message):
        bound.forward(params, parents, torch.zeros(1, 4, bound.noise.dim))


def test_what_is_not_offered_says_so():
    plain = m.Decoder(torch.nn.Linear(1, 1)).setup(m.Family("x", REAL))
    value = torch.zeros(1, 2, 1)
    assert not plain.has_density
    assert not can_abduct(plain)
    with pytest.raises(ModelError, match="node 'x': a Decoder without `noise_scale` has no density"):
        plain.log_prob({}, value, {"r": value})
    with pytest.raises(ModelError, match="node 'x': a Decoder without `noise_scale` has no noise to recover"):
        plain.abduct({}, value, {"r": value}, value)
    function = m.Deterministic(len).setup(m.Family("x", REAL))
    assert not function.has_density
    assert not can_abduct(function)
    with pytest.raises(ModelError, match="node 'x': Deterministic has no density; use method='auto'"):
        function.log_prob({}, value, {"r": value})
    with pytest.raises(NotImplementedError, match="Deterministic cannot recover its noise"):
        abducted(function, {}, value, {"r": value}, value)


def test_a_mechanism_outside_a_model_has_no_family():
    with pytest.raises(ModelError, match="Normal belongs to no model yet"):
        _ = m.Normal().family


def test_an_intercept_needs_its_slope_once_units_are_known():
    bound = m.Normal().setup(m.Family("x", REAL))
    rows = torch.arange(10.0).reshape(10, 1)
    scaled = bound.scaled_to(rows, {"r": rows}, torch.ones(10))
    with pytest.raises(ModelError, match="node 'x': 'loc' cannot be set without 'weight'"):
        scaled.raw({"loc": torch.zeros(1, 1, 1)})


def test_a_parameter_without_a_value_has_no_constant():
    with pytest.raises(TypeError, match="parameter 'loc' of node 'x' has no given value"):
        Parameter((1,)).constant("x", "loc")


def test_given_has_no_density_of_its_own():
    bound = m.Given(Positive(2)).setup(m.Family("x"))
    assert bound.is_given
    assert bound.log_prob({}, torch.ones(1, 3, 2), {}).tolist() == [[0.0, 0.0, 0.0]]
