"""Tables: which method "auto" is, how many starts there are, and what they look at."""

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine import Adam, Method
from otpdag.engine.kinds.table_data import START_ROWS, TableData, automatic
from otpdag.errors import DataError, ModelError
from otpdag.objective import Objective
from otpdag.objective.paper_topics import PaperTopics
from otpdag.spaces import Real


def model(hidden=None, **observed):
    hidden, observed = hidden or {}, observed or {"x": m.Normal(), "y": m.Normal()}
    graph = otp.Graph([(h, o) for h in hidden for o in observed], nodes=[*hidden, *observed], hidden=list(hidden))
    return otp.Model(graph, {**hidden, **observed})


def table(rows=50, seed=0):
    return pd.DataFrame(np.random.default_rng(seed).normal(size=(rows, 2)), columns=["x", "y"])


def test_auto_is_entropic_where_every_density_is_known():
    assert automatic(model({"z": m.Categorical(3)}).structure) == otp.entropic()
    assert automatic(model().structure) == otp.entropic()


@pytest.mark.parametrize(("nodes", "expected"), [(1, otp.transport()), (2, otp.paper())])
def test_auto_compares_what_has_no_density_unless_states_are_too_many(nodes, expected):
    hidden = {f"z{i}": m.Categorical(70) for i in range(nodes)}
    graph = otp.Graph([(h, "x") for h in hidden], hidden=list(hidden))
    decoder = m.Decoder(torch.nn.Linear(70 * nodes, 2), Real(2))
    assert not otp.Model(graph, {**hidden, "x": decoder}).structure.mechanisms["x"].has_density
    assert automatic(otp.Model(graph, {**hidden, "x": decoder}).structure) == expected


@pytest.mark.parametrize(
    ("hidden", "method", "starts"),
    [
        ({}, otp.entropic(), 1),
        ({"u": m.Normal()}, otp.entropic(), 4),
        ({"z": m.Categorical(2)}, otp.entropic(), 16),
        ({"z": m.Categorical(2)}, otp.paper(), 4),
    ],
)
def test_hidden_categories_are_started_most_often(hidden, method, starts):
    assert TableData.of(model(hidden), table()).restarts(method) == starts


def test_complete_data_start_at_their_moments():
    frame = table(400)
    data = TableData.of(model(), frame)
    layout = data.lay_out(otp.entropic(), 0)
    problem = data.problem(layout, otp.entropic(), 0)
    naturals = problem.naturals(data.starts(layout, problem, 0, [0]))
    for name in "xy":
        assert naturals[name]["loc"].item() == pytest.approx(frame[name].mean(), abs=1e-3)
        assert naturals[name]["scale"].item() == pytest.approx(frame[name].std(ddof=0), rel=1e-3)


def test_of_many_starts_each_looks_at_a_part():
    frame = table(3 * START_ROWS)
    data = TableData.of(model(), frame)
    layout = data.lay_out(otp.entropic(), 0)
    problem = data.problem(layout, otp.entropic(), 0)
    alone, few = data.starts(layout, problem, 0, [0]), data.starts(layout, problem, 0, range(3))
    assert not torch.allclose(alone, few[:1])
    units = torch.arange(100)
    given = problem.naturals(data.starts(layout, problem, 0, [0], units))
    assert given["x"]["loc"].item() == pytest.approx(frame["x"][:100].mean(), abs=1e-3)


def test_too_few_rows_and_other_evaluations_are_refused():
    with pytest.raises(DataError, match="the table has 2 rows; at least 3 are needed for this model"):
        TableData.of(model(), table(2))
    data = TableData.of(model(), table())
    with pytest.raises(ModelError, match="a table is evaluated by ClosedForm or Drawn; got PaperTopics"):
        data.check(Method("own", Objective(), PaperTopics(), Adam()))
    with pytest.raises(ModelError, match="network is for sequences with hidden numbers; this is a table"):
        data.check(otp.entropic(network=False))
    with pytest.raises(ModelError, match="robust='outliers' needs the entropic method; got 'transport'"):
        data.check_robust(otp.transport())
