"""Starting values from complete rows, and how settings take part in them."""

import pytest
import torch
from scipy import stats

from otpdag import mechanisms as m
from otpdag.spaces import Discrete, Real, Simplex
from otpdag.testing import Case

ROWS = 5_000
MIXED = (("a", Discrete(2)), ("r", Real(1)))


def recover(mechanism, family, truth):
    """Draw rows at the true natural parameters and start from them."""
    case = Case.build(mechanism, family, replicas=1, rows=ROWS)
    params = {name: torch.tensor(value, dtype=torch.float64)[None] for name, value in truth.items()}
    value = case.mechanism.forward(params, case.parents, case.noise(1, ROWS))[0]
    parents = {name: parent[0] for name, parent in case.parents.items()}
    return case.mechanism, case.mechanism.start(value, parents, torch.ones(ROWS, dtype=torch.float64))


SLOPE = {"weight": [[0.6]]}
TRUTH = {
    "Normal": (m.Normal(), {"loc": [[1.0], [-3.0]], "scale": [[0.5], [2.0]], **SLOPE}, 0.1),
    "LogNormal": (m.LogNormal(), {"loc": [[1.0], [-3.0]], "scale": [[0.5], [2.0]], **SLOPE}, 0.1),
    "StudentT": (m.StudentT(), {"loc": [[1.0], [-3.0]], "scale": [[0.5], [2.0]], "df": [[3.0]], **SLOPE}, 0.2),
    "Gamma": (m.Gamma(), {"log_mean": [[1.0], [-3.0]], "shape": [[0.5], [4.0]], **SLOPE}, 0.2),
    "Beta": (m.Beta(), {"logit_mean": [[1.0], [-1.0]], "concentration": [[2.0], [6.0]], **SLOPE}, 0.4),
    "Poisson": (m.Poisson(), {"log_rate": [[1.0], [3.0]], **SLOPE}, 0.05),
    "NegativeBinomial": (
        m.NegativeBinomial(),
        {"log_rate": [[1.0], [3.0]], "dispersion": [[1.0], [3.0]], **SLOPE},
        0.4,
    ),
    "Exponential": (m.Exponential(), {"log_mean": [[1.0], [-3.0]], **SLOPE}, 0.1),
    "Weibull": (m.Weibull(), {"log_scale": [[1.0], [-3.0]], "shape": [[0.8], [2.0]], **SLOPE}, 0.2),
    "Ordinal": (m.Ordinal(4), {"thresholds": [-1.5, 0.5, 1.5], "shift": [[0.4], [-0.4]], **SLOPE}, 0.2),
    "Ordinal-probit": (
        m.Ordinal(4, link="probit"),
        {"thresholds": [-1.5, 0.5, 1.5], "shift": [[0.4], [-0.4]], **SLOPE},
        0.1,
    ),
    "Bernoulli": (m.Bernoulli(), {"logits": [[0.5, -0.5], [-1.0, 1.0]], "weight": [[0.6, -0.6]]}, 0.1),
    "Multinomial": (
        m.Multinomial(3, total=10),
        {"logits": [[0.5, 0.0, -0.5], [-1.0, 0.0, 1.0]], "weight": [[0.6, 0.0, -0.6]]},
        0.05,
    ),
}


@pytest.mark.parametrize("name", TRUTH)
def test_start_finds_the_parameters(name):
    mechanism, truth, tolerance = TRUTH[name]
    _, found = recover(mechanism, m.Family("x", MIXED), truth)
    for key, value in truth.items():
        error = (found[key] - torch.tensor(value, dtype=torch.float64)).abs().max()
        assert error < tolerance, key


@pytest.mark.parametrize("df", [1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 25.0, 50.0])
def test_start_finds_degrees_of_freedom_from_nearly_cauchy_to_nearly_normal(df):
    at = (torch.arange(20_000).double() + 0.5) / 20_000
    noise = torch.as_tensor(stats.t.ppf(at, df)).unsqueeze(-1)  # a sample without any chance in it
    node = m.StudentT().setup(m.Family("x"))
    assert node._best_df(noise.square(), torch.ones(20_000).double()).tolist() == [[df]]
    # rows without weight do not count
    weight = torch.cat([torch.ones(20_000), torch.zeros(20_000)]).double()
    spoilt = torch.cat([noise, torch.full_like(noise, 1e6)])
    assert node._best_df(spoilt.square(), weight).tolist() == [[df]]


def test_start_finds_concentrations():
    truth = [[0.2, 1.0, 3.0], [4.0, 2.0, 1.0]]
    _, found = recover(m.Dirichlet(3), m.Family("x", MIXED[:1]), {"concentration": truth})
    ratio = found["concentration"] / torch.tensor(truth, dtype=torch.float64)
    assert (ratio.log().abs() < 0.15).all()


def test_start_finds_topics():
    truth = [[0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]]
    _, found = recover(m.Multinomial(4, total=30), m.Family("x", (("t", Simplex(2)),)), {"topics": truth})
    assert (found["topics"] - torch.tensor(truth, dtype=torch.float64)).abs().max() < 0.03


@pytest.mark.parametrize("mechanism", [m.Normal(), m.Poisson(), m.Gamma(), m.Beta(), m.StudentT()])
def test_weights_leave_rows_out(mechanism):
    case = Case.build(mechanism, m.Family("x", MIXED), replicas=1, rows=400)
    value, parents = case.draws()[0], {name: parent[0] for name, parent in case.parents.items()}
    weight = (torch.arange(400) < 200).double()
    half = {name: parent[:200] for name, parent in parents.items()}
    found = case.mechanism.start(value, parents, weight)
    wanted = case.mechanism.start(value[:200], half, weight[:200])
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-6, atol=1e-6)


def test_an_empty_configuration_takes_the_overall_values():
    mechanism = m.Normal().setup(m.Family("x", MIXED[:1]))
    value = torch.arange(10.0, dtype=torch.float64)[:, None]
    parents = {"a": torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(10, 2)}
    found = mechanism.start(value, parents, torch.ones(10, dtype=torch.float64))
    torch.testing.assert_close(found["loc"][1], value.mean(0))
    torch.testing.assert_close(found["scale"][1], value.std(0, correction=0))


def test_counts_without_any_event_stay_finite():
    mechanism = m.Poisson().setup(m.Family("x", MIXED[:1]))
    value = torch.tensor([[0.0]] * 50 + [[4.0]] * 50, dtype=torch.float64)
    parents = {"a": torch.eye(2, dtype=torch.float64).repeat_interleave(50, 0)}
    found = mechanism.start(value, parents, torch.ones(100, dtype=torch.float64))["log_rate"]
    assert torch.isfinite(found).all()
    assert found[0] < -2
    assert found[1].exp().item() == pytest.approx(4, rel=1e-2)


def test_the_rest_is_fitted_around_what_is_given():
    truth = {"loc": [[1.0], [-3.0]], "weight": [[0.6]], "scale": [[0.5], [0.5]]}
    _, found = recover(m.Normal(loc=[1.0, -3.0]), m.Family("x", MIXED), truth)
    assert found["weight"].item() == pytest.approx(0.6, abs=0.02)
    assert found["loc"].flatten().tolist() == [1.0, -3.0]
    _, found = recover(m.Normal(weight=0.0), m.Family("x", MIXED), truth)
    assert found["weight"].item() == 0
    assert found["scale"].mean().item() == pytest.approx((0.5**2 + 0.6**2) ** 0.5, abs=0.05)
    _, found = recover(m.Normal(loc=m.start([1.0, -3.0]), weight=0.6), m.Family("x", MIXED), truth)
    assert found["loc"].flatten().tolist() == [1.0, -3.0]


def test_ugly_units_do_not_disturb_the_regression():
    generator = torch.Generator().manual_seed(0)
    category = torch.randint(2, (ROWS,), generator=generator)
    number = 1e4 + 1e3 * torch.randn(ROWS, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(ROWS, 1, generator=generator, dtype=torch.float64)
    value = 500.0 * category[:, None] + 3.0 * number + 100 * noise
    parents = {"a": torch.nn.functional.one_hot(category, 2).double(), "r": number}
    found = m.Normal().setup(m.Family("x", MIXED)).start(value, parents, torch.ones(ROWS, dtype=torch.float64))
    assert found["weight"].item() == pytest.approx(3.0, abs=0.01)
    assert (found["loc"][1] - found["loc"][0]).item() == pytest.approx(500, abs=15)
    assert found["scale"].flatten().tolist() == pytest.approx([100, 100], rel=0.05)


@pytest.mark.parametrize("name", ["Normal", "StudentT"])
def test_unsaid_location_and_scale_of_a_hidden_node_are_fixed(name):
    free = getattr(m, name)().setup(m.Family("x", hidden=True)).declared()
    assert not free["loc"].learned
    assert not free["scale"].learned
    said = getattr(m, name)(loc=m.start(0.0), scale=m.start(1.0)).setup(m.Family("x", hidden=True)).declared()
    assert said["loc"].learned
    assert said["scale"].learned
    with_class = getattr(m, name)().setup(m.Family("x", MIXED[:1], hidden=True)).declared()
    assert with_class["loc"].learned


def test_positive_hidden_nodes_keep_what_shapes_them():
    lognormal = m.LogNormal().setup(m.Family("x", hidden=True)).declared()
    assert not lognormal["loc"].learned
    assert lognormal["scale"].learned
    gamma = m.Gamma().setup(m.Family("x", hidden=True)).declared()
    assert not gamma["log_mean"].learned
    assert gamma["shape"].learned
    assert m.Gamma().setup(m.Family("x")).declared()["log_mean"].learned


@pytest.mark.parametrize(
    ("name", "level"), [("Normal", "loc"), ("StudentT", "loc"), ("LogNormal", "loc"), ("Gamma", "log_mean")]
)
def test_a_hidden_node_has_no_level_of_its_own(name, level):
    def table(hidden, **given):
        node = getattr(m, name)(**given).setup(m.Family("x", MIXED, hidden=hidden))
        raw = {key: torch.full((1, *p.shape), 0.7).double() for key, p in node.declared().items() if p.learned}
        raw[level] = raw[level] + torch.arange(raw[level].shape[1]).double()[:, None]
        return node.natural(raw)[level].flatten()

    assert table(hidden=True).sum().item() == pytest.approx(0)
    assert table(hidden=True).diff().abs().min() > 0.5  # the differences stay
    assert table(hidden=False).sum().item() != pytest.approx(0)
    assert table(hidden=True, **{level: m.start(1.0)}).sum().item() != pytest.approx(0)
