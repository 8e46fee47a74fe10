"""Spaces: what each says about its values, and a new one that the library has never seen."""

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.divergences import Energy
from otpdag.engine import Adam
from otpdag.errors import ModelError
from otpdag.likelihood import row_posterior
from otpdag.objective import Drawn, Objective, PushForward
from otpdag.spaces import Count, Discrete, Image, Positive, Real, Simplex, Space, Unit, space_from
from otpdag.testing import check_mechanism
from tests.mechanisms.own import PartialCorrelation, TanhNormal

SPACES = [Real(2), Positive(2), Unit(2), Simplex(3), Count(2), Discrete(4), Image(1, 2, 2), PartialCorrelation(2)]
each_space = pytest.mark.parametrize("space", SPACES, ids=repr)


@each_space
def test_examples_and_guesses_are_values(space):
    drawn = space.example((50,), torch.Generator().manual_seed(0))
    assert drawn.shape == (50, space.width)
    assert space.contains(drawn)
    guessed = space.from_scores(np.random.default_rng(0).normal(size=(50, space.width)))
    assert guessed.shape == (50, space.width)
    assert space.contains(torch.from_numpy(guessed))
    assert not space.contains(torch.full((1, space.width), torch.nan))


@each_space
def test_cells_are_encoded_and_decoded(space):
    values = space.example((20,), torch.Generator().manual_seed(1)).numpy()
    cells = space.decode(values)
    assert cells.shape == (20, space.cells)
    assert not space.outside(cells).any()
    np.testing.assert_array_equal(space.encode(cells).numpy(), values)
    cells[3] = np.nan
    assert (space.encode(cells)[3] == 0).all()


@each_space
def test_columns_are_comparable(space):
    values = space.comparable(space.example((200,), torch.Generator().manual_seed(2)).numpy())
    np.testing.assert_allclose(values.mean(0), 0.0, atol=1e-12)
    total = 1.0 if space.is_discrete else space.width
    assert values.var(0).sum() == pytest.approx(total)


@each_space
def test_a_neutral_value_is_soft_or_a_value(space):
    neutral = space.neutral()
    assert neutral.shape == (space.width,)
    if space.is_discrete:
        torch.testing.assert_close(neutral.sum(), torch.ones((), dtype=torch.float64))
    else:
        assert space.contains(neutral)


@each_space
def test_a_space_survives_a_file(space):
    assert space_from(space.spec()) == space


def test_an_unknown_space_is_refused():
    with pytest.raises(ModelError, match=r"a space must be one of .*Real.*; got 'Torus'"):
        space_from({"kind": "Torus"})


@pytest.mark.parametrize(
    ("space", "wrong"),
    [
        (Real(), np.inf),
        (Positive(), 0.0),
        (Unit(), 1.0),
        (Simplex(2), -0.1),
        (Count(), 0.5),
        (Discrete(3), 3.0),
        (PartialCorrelation(), -1.0),
    ],
    ids=repr,
)
def test_numbers_outside_are_found(space, wrong):
    assert space.outside(np.array([[wrong]])).all()


def test_categories_and_counts_are_countable():
    assert {type(space) for space in SPACES if space.is_countable} == {Count, Discrete}


# -- a space that the library has never seen --------------------------------------------------------------------------


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr("otpdag.mechanisms.base._REGISTRY", {"TanhNormal": TanhNormal})


@pytest.mark.parametrize("parents", [(), (("k", Discrete(2)), ("r", Real())), (("c", PartialCorrelation(2)),)], ids=len)
def test_its_mechanism_keeps_every_promise(registered, parents):
    check_mechanism(TanhNormal(), m.Family("x", parents))


def own_model(*, hidden):
    graph = otp.Graph([("r", "x"), ("x", "n"), ("r", "y")], nodes=["r", "x", "n", "y"], hidden=["r"] if hidden else [])
    model = otp.Model(graph, {"r": TanhNormal(), "x": TanhNormal(), "n": m.Poisson(), "y": m.Normal()})
    return model.set_params(
        {
            **({} if hidden else {"r": {"loc": 0.0, "scale": 1.0}}),
            "x": {"loc": 0.2, "weight": 0.8, "scale": 0.5},
            "n": {"log_rate": 1.0, "weight": -0.5},
            "y": {"loc": 0.0, "weight": 1.5, "scale": 0.4},
        }
    )


def own_table(model, rows=40):
    table = model.sample(rows, seed=0)[["x", "n", "y"]]
    table.loc[[2, 7], "x"] = np.nan
    return table


@pytest.mark.parametrize("noise", ["marginal", "abducted", "sampled"])
def test_the_sampled_objective_takes_it(noise):
    model = own_model(hidden=True)
    batch = model._encode_partial(own_table(model))
    maps = Drawn(hidden_layers=(4,)).maps(model.structure, batch)
    phi = maps[0].init(2, torch.Generator().manual_seed(0))
    objective = Objective(reconstruction=1.0, eps=0.5, push_forward=PushForward(1.0, Energy()))
    drawn = Drawn(noise=noise, hidden_layers=(4,), batch_size=20)
    method = otp.Method("learned", objective, drawn, Adam(steps=5))
    with pytest.warns(otp.ConvergenceWarning, match="still falling"):
        result = otp.fit(model, own_table(model), method=method, seed=0)
    assert np.isfinite(result.loss)
    row = maps[0].code(batch.values, batch.mask)
    drawn = maps[0].draw(phi, "r", row, batch.values, torch.randn(1, 40, 1, dtype=torch.float64)).value
    assert PartialCorrelation().contains(drawn)


def test_the_closed_form_integrates_it():
    """The likelihood of the observed children is that of a fine grid over the hidden number."""
    model = own_model(hidden=True)
    batch = model._encode_partial(model.sample(6, seed=3)[["x", "n", "y"]])
    log_likelihood = row_posterior.log_likelihood(model.fitted, batch)
    noise = torch.linspace(-7, 7, 4001, dtype=torch.float64)
    values = {node: value.unsqueeze(2) for node, value in batch.values.items()} | {
        "r": torch.tanh(noise)[None, None, :, None]
    }
    total = -0.5 * noise**2 - 0.5 * np.log(2 * np.pi) + np.log(14 / 4000)
    for node in ("x", "n", "y"):
        mechanism, params = model.mechanisms[node], model.fitted.naturals[node]
        total = total + mechanism.log_prob(params, values[node], model.structure.parents(node, values))
    torch.testing.assert_close(log_likelihood, torch.logsumexp(total, -1)[0], rtol=1e-5, atol=1e-5)


def test_a_model_of_it_samples_imputes_scores_and_has_posteriors():
    model = own_model(hidden=True)
    table = own_table(model)
    filled = model.impute(table, draws=20)
    assert filled["x"].abs().max() < 1
    assert model.posterior(table, draws=5)["r"].abs().max() < 1
    assert np.isfinite(model.distance(table))
    assert np.isfinite(model.score(table, kind="likelihood"))
    assert model.sample(5, do={"r": 0.5}, seed=0)["x"].abs().max() < 1


def test_a_model_of_it_is_fitted_where_it_is_observed():
    truth = own_model(hidden=False)
    table = truth.sample(300, seed=1)
    table.loc[:20, "x"] = np.nan
    model = otp.Model(truth.graph, truth.mechanisms)
    otp.fit(model, pd.DataFrame(table), method="likelihood", restarts=1)
    assert model.params()["x"]["weight"] == pytest.approx(0.8, abs=0.3)
    assert model.params()["n"]["weight"] == pytest.approx(-0.5, abs=0.3)


def test_it_is_known_by_its_name():
    assert Space.kinds["PartialCorrelation"] is PartialCorrelation
    assert m.from_spec(m.Given(PartialCorrelation(2)).spec()).space == PartialCorrelation(2)
