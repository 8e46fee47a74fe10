"""Student-t nodes: their start, one plain step of expectation-maximisation after the other."""

import numpy as np
import pytest
import torch
from scipy import stats

from otpdag import mechanisms as m
from tests.mechanisms.plain import FAMILY, as_parents, line_of, pooled, table


def plain_start(node, value, a, r, weight, df=None):
    """Lange, Little and Taylor (1989), the degrees of freedom on a grid unless they are given."""
    parents, tensor = as_parents(a, r), torch.as_tensor(value)
    params = {
        name: one.numpy()
        for name, one in m.Normal(2).setup(FAMILY).start(tensor, parents, torch.as_tensor(weight)).items()
    }
    mean = np.average(value, axis=0, weights=weight)
    spread = np.sqrt(np.average((value - mean) ** 2, axis=0, weights=weight))
    for _ in range(m.StudentT.start_steps):
        residual = value - line_of({k: torch.as_tensor(v) for k, v in params.items()}, "loc", a, r)
        ratio = (residual / params["scale"][a]) ** 2
        own = df
        if df is None:
            fit = [(weight[:, None] * stats.t(one).logpdf(np.sqrt(ratio))).sum(0) for one in m.StudentT.df_grid]
            own = np.array(m.StudentT.df_grid)[np.argmax(fit, 0)]
        trust = (own + 1) / (own + ratio)
        regressed = node.predictor.start(tensor, parents, torch.as_tensor(weight[:, None] * trust))
        params |= {name: one.numpy() for name, one in regressed.items()}
        residual = value - line_of(regressed, "loc", a, r)
        variance = pooled(trust * residual**2, a, weight)
        params["scale"] = np.maximum(np.sqrt(variance), m.StudentT.smallest_at_start * spread)
    return {**params, "df": np.broadcast_to(own, (2,))}


@pytest.mark.parametrize("df", [None, 4.0])
def test_it_starts_by_steps_of_expectation_maximisation(df):
    rng = np.random.default_rng(0)
    a, r, weight = table(rng)
    value = np.stack([1.0 + a + 0.5 * r + rng.standard_t(2.0, 60), -1.0 + r + 0.3 * rng.standard_t(9.0, 60)], 1)
    node = m.StudentT(2, df=df).setup(FAMILY)
    found = node.start(torch.as_tensor(value), as_parents(a, r), torch.as_tensor(weight))
    expected = plain_start(node, value, a, r, weight, df)
    for name in ("loc", "weight", "scale"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(found["df"][0], expected["df"])
    assert found["df"].shape == (1, 2)


def test_scales_start_above_what_the_data_could_tell_apart():
    a, r, weight = table(np.random.default_rng(1))
    value = torch.as_tensor(2.0 * r).unsqueeze(-1)  # a line without any noise
    found = m.StudentT().setup(FAMILY).start(value, as_parents(a, r), torch.as_tensor(weight))
    spread = np.sqrt(np.cov(2.0 * r, aweights=weight, bias=True))
    np.testing.assert_allclose(found["scale"], m.StudentT.smallest_at_start * spread, rtol=1e-6)


def test_its_mean_is_its_location():
    node = m.StudentT().setup(m.Family("x"))
    params = {"loc": torch.tensor([[[3.0]]]), "scale": torch.tensor([[[2.0]]]), "df": torch.tensor([[[1.5]]])}
    assert node.mean(params, {}).item() == 3.0
