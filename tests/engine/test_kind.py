"""Kinds of data: the user's own, and those that estimators fit, through the one ``otp.fit``."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from scipy import sparse

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward import EncoderMap
from otpdag.datasets import bars
from otpdag.engine import Adam, DataKind, Layout, Method
from otpdag.errors import DataError, ModelError
from otpdag.estimators import LatentDirichletAllocation
from otpdag.model import Model
from otpdag.objective import Encoded
from otpdag.problem import LossTerms, Units
from otpdag.settings import Objective
from otpdag.spaces import Real

# -- a kind of the user's own: a histogram ----------------------------------------------------------------------------


@dataclass(frozen=True)
class BinProblem(Units):
    """Minus the log-likelihood of a normal distribution of which only counts in bins are known."""

    structure: otp.Model
    shapes: dict
    edges: torch.Tensor
    counts: torch.Tensor

    @property
    def rows(self):
        return int(self.counts.sum())

    def loss(self, point):
        naturals = self.naturals(point)["x"]
        loc, scale = naturals["loc"].reshape(-1, 1), naturals["scale"].reshape(-1, 1)
        below = torch.special.ndtr((self.edges - loc) / scale)
        chances = torch.diff(below, dim=-1).clamp(min=1e-12)
        cost = -(self.counts * torch.log(chances)).sum(-1) / self.counts.sum()
        return LossTerms.of(cost, reconstruction=cost)

    @property
    def weight(self):
        return self.counts.unsqueeze(0)

    def reweighted(self, factors):
        return replace(self, counts=self.counts * factors)


@dataclass(frozen=True)
class Histogram(DataKind):
    """Counts of a number in bins."""

    honours: ClassVar[frozenset[str]] = frozenset()

    model: Model
    edges: np.ndarray
    counts: np.ndarray

    @property
    def rows(self):
        return int(self.counts.sum())

    def named(self, name):
        if name not in ("auto", "likelihood"):
            raise ModelError(f"a histogram has its likelihood; got {name!r}")
        return otp.entropic()

    def lay_out(self, method, seed):
        return Layout.of(self.model.structure)

    def problem(self, layout, method, seed):
        edges, counts = (torch.as_tensor(one, dtype=torch.float64) for one in (self.edges, self.counts))
        return BinProblem(layout.structure, layout.shapes, edges, counts)

    def starts(self, layout, problem, seed, numbers, units=None):
        generator = torch.Generator().manual_seed(seed)
        size = sum(int(np.prod(shape)) for shape in layout.shapes.values())
        return 0.1 * torch.randn(len(numbers), size, generator=generator, dtype=torch.float64)


def histogram(rows=4000):
    drawn = np.random.default_rng(3).normal(1.5, 0.7, rows)
    counts, edges = np.histogram(drawn, bins=np.linspace(-2, 5, 15))
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    return Histogram(model, edges, counts), drawn


def test_a_kind_of_the_users_own_is_fitted():
    data, drawn = histogram()
    seen = []
    result = otp.fit(data.model, data, restarts=3, callbacks=[lambda record: seen.append(record["loss"])])
    params = data.model.params()["x"]
    assert float(params["loc"]) == pytest.approx(drawn.mean(), abs=0.01)
    assert float(params["scale"]) == pytest.approx(drawn.std(), abs=0.01)
    assert result.status.converged
    assert result.rows_used == data.rows
    assert result.method == otp.entropic()
    assert len(result.restarts) == 3
    assert seen == [record["loss"] for record in result.history]


def test_the_engine_serves_such_a_kind_in_all_else(tmp_path):
    data, drawn = histogram()
    whole = otp.fit(data.model, data, seed=1)
    other, _ = histogram()
    path = tmp_path / "run.checkpoint"
    with pytest.warns(otp.ConvergenceWarning, match="a callback stopped the fit after 2 steps"):
        otp.fit(other.model, other, seed=1, checkpoint=path, callbacks=[lambda record: record["step"] == 1])
    resumed = otp.fit(other.model, other, seed=1, checkpoint=path)
    assert resumed.loss == whole.loss
    np.testing.assert_array_equal(other.model.params()["x"]["loc"], data.model.params()["x"]["loc"])
    table = whole.intervals(draws=60, seed=0)
    loc = table.xs(("x", "loc")).iloc[0]
    assert loc["lower"] < drawn.mean() < loc["upper"]
    np.testing.assert_allclose(loc["upper"] - loc["lower"], 2 * 1.645 * 0.7 / np.sqrt(len(drawn)), rtol=0.35)


def test_what_such_a_kind_cannot_honour_is_refused():
    data, _ = histogram()
    for arguments, message in (
        ({"weights": np.ones(14)}, r"weights is not for such data \(Histogram\)"),
        ({"robust": True}, r"robust is not for such data \(Histogram\)"),
        ({"method": "paper"}, "a histogram has its likelihood; got 'paper'"),
    ):
        with pytest.raises(ModelError, match=message):
            otp.fit(data.model, data, **arguments)
    with pytest.raises(DataError, match="data were adapted to another model than the one that is fitted"):
        otp.fit(histogram()[0].model, data)


def test_a_kind_that_promises_robustness_must_have_it():
    class Bold(Histogram):
        honours: ClassVar[frozenset[str]] = frozenset({"robust"})

    data, _ = histogram()
    bold = Bold(data.model, data.edges, data.counts)
    with pytest.raises(ModelError, match="BinProblem has no loss of single rows"):
        otp.fit(bold.model, bold, robust=True)


# -- documents --------------------------------------------------------------------------------------------------------


def topic_model(topics, words):
    graph = otp.Graph([("shares", "words")], hidden=["shares"])
    return otp.Model(graph, {"shares": m.Dirichlet(topics), "words": m.Multinomial(words)})


@pytest.mark.parametrize("name", ["likelihood", "pairs", "paper"])
@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_documents_through_fit_give_what_the_estimator_gives(name):
    counts = bars(6, 200, 40, seed=1).counts
    steps = {"likelihood": 30, "pairs": 40, "paper": 1}[name]
    estimator = LatentDirichletAllocation(6, method=name, max_iter=steps, n_init=2, random_state=4).fit(counts)
    model = topic_model(6, counts.shape[1])
    if name == "paper":  # whose passes over all documents are steps of fifty each, of encoder and topics in turn
        steps *= 2 * 200 // 50
    options = {"method": name, "steps": steps, "restarts": 2, "seed": estimator.result_.seed}
    result = otp.fit(model, otp.Documents(counts), **options)
    topics, alpha = model.params()["words"]["topics"], model.params()["shares"]["concentration"].ravel()
    ours, theirs = np.argsort(topics[:, 0]), np.argsort(estimator.components_[:, 0])
    if name != "paper":  # whose topics the estimator orders by their shares of the documents
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_allclose(topics[ours], estimator.components_[theirs], rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(alpha[ours], estimator.alpha_[theirs], rtol=1e-6)
    assert result.rows_used == 200


def test_a_sparse_matrix_is_documents_and_auto_is_entropic():
    counts = bars(6, 120, 40, seed=1).counts
    models = [topic_model(6, counts.shape[1]) for _ in range(2)]
    first = otp.fit(models[0], sparse.csr_array(counts), seed=2)
    second = otp.fit(models[1], otp.Documents(counts.toarray()), seed=2, method="likelihood")
    assert first.method == second.method
    assert len(first.restarts) == 6
    assert first.loss == second.loss
    np.testing.assert_array_equal(models[0].params()["words"]["topics"], models[1].params()["words"]["topics"])


def test_documents_without_words_say_nothing():
    counts = bars(6, 120, 40, seed=1).counts
    empty = sparse.vstack([sparse.csr_array((3, counts.shape[1])), counts]).tocsr()
    models = [topic_model(6, counts.shape[1]) for _ in range(2)]
    results = [otp.fit(model, otp.Documents(data), seed=2) for model, data in zip(models, (counts, empty), strict=True)]
    assert [result.rows_used for result in results] == [120, 120]
    assert results[0].loss == results[1].loss


def test_documents_that_do_not_fit_are_refused():
    counts = bars(6, 30, 40, seed=1).counts
    with pytest.raises(DataError, match="the model has 4 words; the documents have 9 columns"):
        otp.fit(topic_model(3, 4), otp.Documents(counts))
    with pytest.raises(DataError, match="at least as many documents with words as topics, 40; got 30"):
        otp.fit(topic_model(40, 9), otp.Documents(counts))
    with pytest.raises(DataError, match="counts of words must be finite and at least 0"):
        otp.Documents([[1.0, -1.0]])
    with pytest.raises(DataError, match="counts of words must be finite and at least 0"):
        otp.Documents([[1.0, np.nan]])
    with pytest.raises(DataError, match="documents must be a matrix"):
        otp.Documents([1.0, 2.0])
    other = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal()})
    with pytest.raises(ModelError, match="documents are fitted by the graph shares -> words"):
        otp.fit(other, otp.Documents(counts))


# -- images -----------------------------------------------------------------------------------------------------------


def test_images_that_do_not_fit_are_refused():
    graph = otp.Graph([("latent", "image")], hidden=["latent"])
    model = otp.Model(graph, {"latent": m.Normal(2), "image": m.Decoder(torch.nn.Linear(2, 5), Real(5))})
    method = Method("encoded", Objective(), Encoded(EncoderMap(torch.nn.Linear(5, 2), 2, (5,))), Adam(steps=2))
    with pytest.raises(DataError, match="the model's images have 5 numbers; got 4"):
        otp.fit(model, otp.Images(np.zeros((6, 4))), method=method)
    with pytest.raises(DataError, match="images must be finite; got NaN or infinity"):
        otp.Images(np.full((6, 5), np.nan))
    with pytest.raises(DataError, match=r"images must have shape \(n, ...\) with at least 2 of them"):
        otp.Images(np.zeros((1, 5)))
