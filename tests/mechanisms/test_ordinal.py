"""Ordered categories beside statsmodels' OrderedModel; gaps, hidden parents, files, and how a table chooses them."""

import numpy as np
import pandas as pd
import pytest
import torch
from statsmodels.miscmodels.ordinal_model import OrderedModel

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.cli.model_file import parse_model_file
from otpdag.errors import ModelError
from otpdag.spaces import Discrete, Real
from otpdag.testing import check_mechanism

ROWS = 400
PARENTS = {"year": m.Normal(), "z": m.Categorical(2), "u": m.Normal()}


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(8)
    year, z, u = rng.normal(1990, 10, ROWS), rng.integers(0, 2, ROWS), rng.normal(size=ROWS)
    line = 0.08 * (year - 1990) + 0.7 * z - 0.5 * u + rng.logistic(size=ROWS)
    mood = 1 + np.digitize(line, [-2, -0.5, 0.3, 1.7])
    return pd.DataFrame(
        {"year": year, "z": z, "u": u, "mood": mood, "w": np.digitize(line + rng.normal(size=ROWS), [0, 2])}
    )


def fitted(rows, mechanism):
    graph = otp.Graph([(name, "mood") for name in PARENTS])
    return otp.fit(otp.Model(graph, {**PARENTS, "mood": mechanism}), rows[[*PARENTS, "mood"]])


@pytest.mark.parametrize("link", ["logit", "probit"])
def test_estimates_and_errors_are_those_of_statsmodels(table, link):
    own = fitted(table, m.Ordinal(5, link=link, terms="year + C(z) + u")).standard_errors().query("node == 'mood'")
    near = table.assign(year=table["year"] - 1990)
    other = OrderedModel(near["mood"], near[list(PARENTS)], distr=link).fit(method="bfgs", disp=0, gtol=1e-8)
    slopes = own.query("parameter == 'weight'")
    np.testing.assert_allclose(slopes["estimate"], other.params[:3], rtol=1e-4)
    np.testing.assert_allclose(slopes["std_error"], other.bse[:3], rtol=1e-4)
    cuts = other.model.transform_threshold_params(other.params)[1:-1] + 1990 * other.params.iloc[0]
    np.testing.assert_allclose(own.query("parameter == 'thresholds'")["estimate"], cuts, rtol=1e-4)
    assert list(own["at"])[:2] == ["mood=1", "mood=2"]


def test_a_table_of_parents_shifts_as_its_terms_do(table):
    plain, terms = (fitted(table, m.Ordinal(5, terms=one)).model for one in (None, "year + C(z) + u"))
    shift = plain.params()["mood"]["shift"]
    assert shift.sum() == pytest.approx(0.0, abs=1e-9)
    assert shift[1] - shift[0] == pytest.approx(terms.params()["mood"]["weight"][1], rel=1e-4)


def test_gaps_files_and_probabilities(table, tmp_path):
    rng = np.random.default_rng(3)
    whole, gaps = (fitted(rows, m.Ordinal(5)) for rows in (table, table.mask(rng.random(table.shape) < 0.15)))
    both = [one.standard_errors().query("node == 'mood'") for one in (whole, gaps)]
    assert (np.abs(both[0]["estimate"] - both[1]["estimate"]) < 3 * both[1]["std_error"]).all()
    whole.model.save(tmp_path / "model.otp")
    rows = table[list(PARENTS)]
    shares = [one.predict_proba(rows, "mood").to_numpy() for one in (whole.model, otp.load(tmp_path / "model.otp"))]
    np.testing.assert_array_equal(*shares)
    np.testing.assert_allclose(shares[0].mean(0), table["mood"].value_counts(normalize=True).sort_index(), atol=0.02)


def test_alone_it_is_the_frequencies(table):
    model = otp.fit(otp.Model(otp.Graph([], nodes=["mood"]), {"mood": m.Ordinal(5)}), table[["mood"]]).model
    cuts = model.params()["mood"]["thresholds"]
    shares = table["mood"].value_counts(normalize=True).sort_index()
    np.testing.assert_allclose(1 / (1 + np.exp(-cuts)), shares.cumsum()[:-1], rtol=1e-4)


def test_items_of_a_hidden_trait(table):
    graph = otp.Graph([("t", "mood"), ("t", "w")], hidden=["t"])
    result = otp.fit(otp.Model(graph, {"t": m.Normal(), "mood": m.Ordinal(5), "w": m.Ordinal(3)}), table[["mood", "w"]])
    assert result.model.params()["mood"]["weight"][0] > 0.5
    assert result.model.params()["w"]["weight"][0] > 0.5


@pytest.mark.parametrize("link", ["logit", "probit"])
def test_the_contract_holds(link):
    check_mechanism(m.Ordinal(4, link=link), m.Family("x", (("u", Real()), ("z", Discrete(2)))))


def test_probabilities_far_out_keep_their_digits():
    node = m.Ordinal(3, thresholds=[0.0, 1.0], weight=1.0, link="probit").setup(m.Family("x", (("u", Real()),)))
    told = node.log_probs(node.natural({}), {"u": torch.tensor([[[-30.0], [30.0]]]).double()})
    assert torch.isfinite(told).all()
    torch.testing.assert_close(told.exp().sum(-1), torch.ones(1, 2).double())


def test_a_table_chooses_it_where_there_is_an_order(table):
    ordered = table.assign(
        w=pd.Categorical(table["w"].map({0: "low", 1: "mid", 2: "top"}), ["low", "mid", "top"], ordered=True)
    )
    with pytest.warns(otp.ColumnTypeWarning, match="on a scale"):
        model = otp.Model.from_frame(otp.Graph([("u", "mood"), ("u", "w"), ("z", "u")]), ordered)
    kinds = {node: type(one).__name__ for node, one in model.mechanisms.items()}
    assert kinds == {"u": "Normal", "mood": "Ordinal", "w": "Ordinal", "z": "Categorical"}
    with pytest.warns(otp.ColumnTypeWarning, match="on a scale"):
        alone = otp.Model.from_frame(otp.Graph([("mood", "u")]), table)
    assert type(alone.mechanisms["mood"]) is m.Categorical
    file = parse_model_file("{edges: [[u, mood]], nodes: {mood: {type: Ordinal, link: probit}}}")
    assert file.build(table).mechanisms["mood"].size == 5


def test_what_cannot_be_is_refused():
    with pytest.raises(ModelError, match="at least 2"):
        m.Ordinal(1)
    with pytest.raises(ModelError, match="probit"):
        m.Ordinal(3, link="log")
    with pytest.raises(ModelError, match="larger than the one before"):
        otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Ordinal(3, thresholds=[1.0, 0.0])})
