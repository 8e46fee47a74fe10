"""What a summary says of data and model, and how it shows it."""

import pytest

import otpdag as otp
from otpdag import mechanisms as m
from tests.uncertainty.regression_tables import regression_table


def test_the_facts_are_those_of_the_data():
    table = regression_table()
    graph = otp.Graph([(p, c) for c in ("y", "n", "k") for p in ("a", "b")])
    nodes = {"a": m.Normal(), "b": m.Normal(), "y": m.Normal(), "n": m.Poisson(), "k": m.Categorical(2)}
    result = otp.fit(otp.Model(graph, nodes), table)
    facts = result.summary().facts
    model = result.model
    assert facts["log-likelihood"] == pytest.approx(model.log_likelihood(table))
    assert facts["parameters"] == model.n_parameters == 2 + 2 + 4 + 3 + 3
    assert facts["AIC"] == pytest.approx(model.aic(table))
    assert facts["BIC"] == pytest.approx(model.bic(table))
    text = str(result.summary())
    assert "missing cells: 0" in text
    assert "k.weight[b, 1]" in text
    assert "<table>" in result.summary()._repr_html_()
