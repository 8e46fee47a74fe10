"""Random small graphs, mechanisms and gaps: every fit runs, and what it gives has the right shape."""

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.errors import ModelError

FAMILIES = {
    "normal": lambda: m.Normal(),
    "vector": lambda: m.Normal(2),
    "category": lambda: m.Categorical(3),
    "count": lambda: m.Poisson(),
    "positive": lambda: m.Gamma(),
    "share": lambda: m.Beta(),
    "heavy": lambda: m.StudentT(),
}
LOCAL = otp.paper(steps=2, batch_size=12, hidden_layers=(3,), scope="local")
METHODS = {
    "entropic": otp.entropic(steps=2, sums=otp.backward.SumSizes(grid=16, prior_draws=32)),
    "transport": otp.transport(steps=2, points=64),
    "paper": otp.paper(steps=2, batch_size=12, hidden_layers=(3,)),
    "abducted": otp.transport("backward", steps=2, batch_size=12, hidden_layers=(3,)),
    "local": replace(LOCAL, objective=replace(LOCAL.objective, eps=0.5)),
}
QUICK = otp.SearchSchedule(short_rows=30, short_steps=2, finalists=2, finalist_steps=1)
PROFILE = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, print_blob=False)


@st.composite
def problems(draw):
    """A model of two to five nodes, at least one observed, and a table with gaps."""
    size = draw(st.integers(2, 5))
    names = [f"n{i}" for i in range(size)]
    edges = [(names[i], names[j]) for j in range(size) for i in range(j) if draw(st.booleans())]
    hidden = [name for name in names[:-1] if draw(st.integers(0, 3)) == 0]
    # hidden counts and shares are allowed, hidden vectors need three or more draws to be worth it
    kinds = {name: draw(st.sampled_from(sorted(FAMILIES))) for name in names}
    kinds |= {name: draw(st.sampled_from(["normal", "category", "positive"])) for name in hidden}
    model = otp.Model(otp.Graph(edges, nodes=names, hidden=hidden), {n: FAMILIES[k]() for n, k in kinds.items()})
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    rows, columns = 24, {}
    for name in model.graph.observed:
        kind = kinds[name]
        if kind == "vector":
            columns |= {f"{name}.0": rng.normal(size=rows), f"{name}.1": rng.normal(size=rows)}
            continue
        columns[name] = {
            "normal": lambda: rng.normal(100, 20, rows),
            "category": lambda: np.r_[0, 1, 2, rng.integers(0, 3, rows - 3)],
            "count": lambda: rng.poisson(3.0, rows),
            "positive": lambda: rng.gamma(2.0, size=rows),
            "share": lambda: rng.beta(2.0, 2.0, rows),
            "heavy": lambda: rng.standard_t(3, rows),
        }[kind]()
    table = pd.DataFrame(columns).astype(float)
    gaps = rng.random(table.shape) < draw(st.sampled_from([0.0, 0.2, 0.5]))
    gaps[:4] = False
    return model, table.mask(gaps)


def check(model, table, method):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otp.ConvergenceWarning)
        try:
            result = otp.fit(model, table, method=method, restarts=2, course=QUICK)
        except ModelError as error:
            if "joint states" in str(error):  # several counts with children are too much to enumerate
                return
            raise
    assert np.isfinite(result.loss)
    for node, found in model.params().items():
        for name, value in found.items():
            assert np.isfinite(value).all(), (node, name)
    sample = model.sample(5, seed=0)
    assert len(sample) == 5
    assert not sample.isna().to_numpy().any()
    filled = model.impute(table, draws=3)
    assert filled.shape == table.shape
    assert not filled.isna().to_numpy().any()
    seen = table.notna().to_numpy()
    np.testing.assert_array_equal(filled[table.columns].to_numpy(dtype=float)[seen], table.to_numpy()[seen])
    if model.graph.hidden:
        posterior = model.posterior(table, draws=2)
        assert len(posterior) == 2 * len(table)
        assert not posterior.isna().to_numpy().any()
        for node in model.graph.hidden:
            if model.spaces[node].is_discrete and model.graph.observed_descendants(node):
                probabilities = model.predict_proba(table, node).to_numpy()
                np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-9)
    assert np.isfinite(model.score(table, kind="likelihood"))
    assert np.isfinite(model.distance(table))


@settings(PROFILE, max_examples=8)
@given(problems())
def test_entropic_fits(problem):
    check(*problem, METHODS["entropic"])


@pytest.mark.slow
@settings(PROFILE, max_examples=8)
@given(problems())
def test_direct_transport_fits(problem):
    check(*problem, METHODS["transport"])


@settings(PROFILE, max_examples=12)
@given(problems(), st.sampled_from(["paper", "abducted", "local"]))
def test_sampled_fits(problem, method):
    check(*problem, METHODS[method])
