"""What a parent adds to a prediction, with its band, beside the covariance that statsmodels finds."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf

import otpdag as otp
from otpdag import mechanisms as m

FORMULA = "x + I(x ** 2) + C(town)"
KINDS = {"poisson": (m.Poisson, smf.poisson), "logit": (m.Bernoulli, smf.logit)}


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(4)
    x, town = rng.normal(1.0, 1.0, 300), rng.integers(0, 2, 300)
    line = 0.3 + 0.5 * x - 0.2 * x**2 + 0.4 * town
    columns = {"poisson": rng.poisson(np.exp(line)), "logit": (rng.random(300) < 1 / (1 + np.exp(-line))).astype(int)}
    return pd.DataFrame({"x": x, "town": np.array(["north", "south"])[town], **columns})


def fitted(table, kind):
    nodes = {"x": m.Normal(), "town": m.Categorical(2), "y": KINDS[kind][0](terms=FORMULA)}
    rows = table[["x", "town", kind]].rename(columns={kind: "y"})
    return otp.fit(otp.Model(otp.Graph([("x", "y"), ("town", "y")]), nodes), rows), rows


@pytest.mark.parametrize("kind", KINDS)
def test_band_is_that_of_the_covariance(table, kind):
    result, rows = fitted(table, kind)
    found = result.term("y", "x", level=0.9, points=21)
    other = KINDS[kind][1](f"y ~ {FORMULA}", rows).fit(disp=0, tol=1e-10)
    at, own = found["x"].to_numpy(), ["x", "I(x ** 2)"]
    design = np.stack([at, at**2], 1) - np.stack([rows["x"], rows["x"] ** 2], 1).mean(0)
    error = np.sqrt(np.einsum("ni,ij,nj->n", design, other.cov_params().loc[own, own], design))
    np.testing.assert_allclose(found["term"], design @ other.params[own], atol=1e-4)
    np.testing.assert_allclose(found["upper"] - found["lower"], 2 * 1.6448536 * error, rtol=1e-3)
    assert at[0] == rows["x"].min()
    assert at[-1] == rows["x"].max()


def test_curve_of_a_spline_covers_the_truth_and_is_drawn():
    rng = np.random.default_rng(5)
    x = rng.uniform(-2, 2, 400)
    rows = pd.DataFrame({"x": x, "y": np.sin(2 * x) + 0.3 * rng.normal(size=400)})
    nodes = {"x": m.Normal(), "y": m.Normal(terms="spline(x, 10)")}
    result = otp.fit(otp.Model(otp.Graph([("x", "y")]), nodes), rows)
    found = result.term("y", "x")
    truth = np.sin(2 * found["x"]) - np.sin(2 * x).mean()
    assert ((found["lower"] < truth) & (truth < found["upper"])).mean() > 0.8
    assert (found["upper"] - found["lower"]).max() < 0.5
    drawn = result.plot("term", "y", "x").axes[0]
    np.testing.assert_allclose(drawn.lines[0].get_ydata(), found["term"])


def test_other_numbers_stand_at_their_means_and_categories_at_the_first():
    rng = np.random.default_rng(6)
    x, w, town = rng.normal(1.0, 1.0, 300), rng.normal(2.0, 1.0, 300), rng.integers(0, 2, 300)
    y = 0.5 * x - 0.3 * x * w + x * town + w + 0.2 * rng.normal(size=300)
    rows = pd.DataFrame({"x": x, "w": w, "town": np.array(["north", "south"])[town], "y": y})
    nodes = {"x": m.Normal(), "w": m.Normal(), "town": m.Categorical(2), "y": m.Normal(terms="x * w + x * C(town)")}
    result = otp.fit(otp.Model(otp.Graph([(one, "y") for one in ("x", "w", "town")]), nodes), rows)
    found, other = result.term("y", "x", points=5), smf.ols("y ~ x * w + x * C(town)", rows).fit()
    slope = other.params["x"] + other.params["x:w"] * w.mean()  # of the north
    np.testing.assert_allclose(found["term"], slope * (found["x"] - x.mean()), atol=1e-4)


def test_what_is_no_numeric_parent_is_refused(table):
    result, _ = fitted(table, "poisson")
    with pytest.raises(otp.ModelError, match=r"parent must be a number that node 'y' reads, of \['x'\]; got 'town'"):
        result.term("y", "town")
    with pytest.raises(otp.ModelError, match=r"result must be an otp\.FitResult; got Model"):
        otp.plots.plot_term(result.model, "y", "x")
