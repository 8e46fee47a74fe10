"""Steps of sequences by Algorithm 1: what is drawn, judged and compared, beside the densities written out."""

import numpy as np
import pytest
import torch
from torch.distributions import Normal

import otpdag as otp
from experiments.small_models import poisson_chain
from otpdag import mechanisms as m
from otpdag.backward import amortized_maps
from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.engine import Adam
from otpdag.learned.sampled import DrawnSteps
from otpdag.noise import Streams
from otpdag.objective import Drawn
from otpdag.settings import Objective, PushForward
from tests.dynamic_models import known_state_space

LENGTHS, SHARED = (9, 4, 1), 3


def problem_of(drawn, objective):
    """A state-space model with a slope of 0.85, its sequences with gaps, and a map with random parameters."""
    rng, rows = np.random.default_rng(0), sum(LENGTHS)
    x = torch.as_tensor(rng.normal(size=(1, rows, 1)))
    seen = torch.as_tensor(rng.random((1, rows, 1)) < 0.8)
    batch = SequenceBatch(Batch({"x": x}, {"x": seen}, torch.ones(1, rows).double()), torch.tensor(LENGTHS))
    model = known_state_space()
    (backward,) = amortized_maps(model.structure, batch.steps, (4,))
    phi = backward.init(1, torch.Generator().manual_seed(1))
    theta = model.structure.raw(model.fitted.naturals)
    problem = DrawnSteps(model.structure, batch, {}, backward, objective, drawn)
    rows = torch.randint(rows, (min(drawn.batch_size, rows),), generator=torch.Generator().manual_seed(SHARED))
    return problem, theta, phi, rows


@pytest.mark.parametrize("noise", ["marginal", "sampled"])
def test_draws_are_judged_by_the_model_and_compared_by_the_shares_of_first_and_later_steps(noise):
    objective = Objective(eps=0.6, push_forward=None if noise == "marginal" else PushForward(1.0))
    problem, theta, phi, rows = problem_of(Drawn(noise=noise), objective)
    (step,) = problem.steps(theta, phi, Streams([1], shared=SHARED), 0.0)
    later, first = sorted(step.families, key=lambda family: -family.pushed.shape[-1])
    is_first = problem.batch.times[rows] == 0
    assert first.share == pytest.approx(is_first.double().mean().item())
    assert later.share == pytest.approx(1 - first.share)
    torch.testing.assert_close(later.pushed[..., 1], later.made[..., 1])
    assert not torch.equal(later.pushed[..., 0], later.made[..., 0])
    z = torch.zeros(len(rows)).double()
    z[is_first], z[~is_first] = first.pushed[0, :, 0], later.pushed[0, :, 0]
    log_p = torch.zeros_like(z)
    log_p[is_first] = Normal(0.0, 1.0).log_prob(z[is_first])
    log_p[~is_first] = Normal(0.85 * later.pushed[0, :, 1], 1.0).log_prob(z[~is_first])
    own = problem.batch.steps.take(rows)
    row = problem.backward.code(own.values, own.mask)
    loc, log_scale = problem.backward.outputs(phi, "z", row, {})[0].chunk(2, -1)
    log_q = Normal(loc[:, 0], log_scale[:, 0].exp()).log_prob(z)
    assert step.kl().item() == pytest.approx((log_q - log_p).mean().item())
    if noise == "marginal":
        params = {name: float(value.squeeze()) for name, value in problem.structure.naturals(theta)["x"].items()}
        log_x = Normal(params["loc"] + params["weight"] * z, params["scale"]).log_prob(own.values["x"][0, :, 0])
        assert step.cost.item() == pytest.approx(-(log_x * own.mask["x"][0, :, 0]).mean().item())


def test_streams_decide_and_replicas_see_the_same_steps():
    problem, theta, phi, _ = problem_of(Drawn(batch_size=5), Objective())
    one, same, other = (
        next(iter(problem.steps(theta, phi, Streams([1], shared=shared), 0.0))).cost for shared in (3, 3, 4)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    both = next(iter(problem.steps(theta, phi, Streams([1, 1], shared=3), 0.0))).cost
    torch.testing.assert_close(both, one.expand(2))


def chain(size=4):
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.StayOrMove(size), "x": m.Poisson()})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_abducted_noise_finds_rates_and_how_long_states_last():
    counts, _, truth = poisson_chain(60, 50, np.random.default_rng(5))
    model = chain()
    otp.fit(model, {"x": counts}, method=otp.transport("backward", steps=600), seed=0)
    params = model.params()
    np.testing.assert_allclose(np.exp(params["x"]["log_rate"]), np.exp(truth["x"]["log_rate"]), rtol=0.05)
    assert float(params["z"]["stay"]) == pytest.approx(float(truth["z"]["stay"]), abs=0.06)


def test_a_fit_by_steps_depends_on_its_seed_alone():
    counts, _, _ = poisson_chain(10, 100, np.random.default_rng(0))
    found = []
    for _ in range(2):
        model = chain()
        with pytest.warns(otp.ConvergenceWarning):
            result = otp.fit(model, counts, method=otp.paper(steps=5), seed=3, restarts=2)
        assert {"reconstruction", "divergence"} <= set(result.history[-1])
        found.append(model.params()["x"]["log_rate"])
    np.testing.assert_array_equal(*found)


def test_what_is_not_fitted_by_steps_is_refused():
    hard = otp.Method("hard", Objective(), Drawn(noise="marginal"), Adam())
    with pytest.raises(otp.ModelError, match="need eps above 0 and no push-forward term"):
        otp.fit(chain(), np.ones((2, 5)), method=hard, seed=0)
    with pytest.raises(otp.ModelError, match="backward must build one"):
        otp.fit(chain(), np.ones((2, 5)), method=otp.paper(backward=lambda *_: ()), seed=0)
    with pytest.raises(otp.ModelError, match="backward must be"):
        Drawn(backward="forward")
