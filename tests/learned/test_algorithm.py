"""Terms of a step of Algorithm 1, against an outside solver; and what sampled and abducted noise leave of a scale."""

import numpy as np
import ot
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.divergences import Wasserstein
from otpdag.learned.algorithm import Family, Step
from otpdag.noise import Streams
from otpdag.settings import Weights


def test_families_have_masses_on_both_sides_and_lie_side_by_side():
    rng = np.random.default_rng(0)
    pushed, made = rng.normal(size=(3, 6, 2)), rng.normal(size=(3, 4, 2))
    mass = rng.dirichlet(np.ones(4), 3)
    cost = torch.tensor([0.5], dtype=torch.float64)
    families = [Family(torch.from_numpy(pushed), torch.from_numpy(made), None, torch.from_numpy(mass), share=0.5)]
    step = Step(cost, families, kl=lambda: torch.tensor(2.0))
    terms = step.terms(Weights(eta=0.1, eps=3.0), Wasserstein(workers=1), Streams([0]))
    expected = [ot.emd2(np.full(6, 1 / 6), own, ot.dist(x, y)) for x, y, own in zip(pushed, made, mass, strict=True)]
    assert terms.divergence.item() == pytest.approx(0.1 * 0.5 * np.mean(expected))
    assert terms.entropic.item() == pytest.approx(6.0)
    assert terms.total.shape == (1,)


@pytest.mark.filterwarnings("ignore::otpdag.errors.ConvergenceWarning")
@pytest.mark.parametrize("scope", ["joint", "local"])
def test_sampled_noise_shrinks_a_scale_and_abducted_noise_does_not(scope):
    """The paper's practice and its theory on one graph: noise that is sampled only adds cost."""
    rng = np.random.default_rng(5)
    hidden = rng.normal(size=400)
    table = {"a": 1 + 2 * hidden + rng.normal(size=400), "b": hidden + rng.normal(size=400)}
    scales = {}
    for noise in ("sampled", "abducted"):
        graph = otp.Graph([("f", "a"), ("f", "b")], hidden=["f"])
        model = otp.Model(graph, {"f": m.Normal(loc=0.0, scale=1.0), "a": m.Normal(), "b": m.Normal()})
        method = otp.paper(noise=noise, scope=scope, steps=120, batch_size=32, learning_rate=0.03)
        otp.fit(model, table, method=method, restarts=1, progress=False, seed=1)
        scales[noise] = float(np.mean([model.params()[node]["scale"] for node in "ab"]))
    assert scales["sampled"] < 0.5
    assert scales["abducted"] > 0.7
