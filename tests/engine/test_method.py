"""Methods: what goes together, and what the named ones are."""

import pytest
import torch

import otpdag as otp
from otpdag.backward.encoder import EncoderMap
from otpdag.divergences import MMD, Energy, Wasserstein
from otpdag.divergences.whitened import WhitenedFeatures
from otpdag.engine import EM, LBFGS, Adam, Method
from otpdag.engine.method import misfit
from otpdag.errors import ModelError
from otpdag.objective import ClosedForm, Direct, Drawn, Objective, PushForward
from otpdag.objective.autoencoder import Encoded
from otpdag.objective.paper_topics import PaperTopics
from otpdag.objective.topics import TopicSweeps

ENCODED = Encoded(EncoderMap(torch.nn.Linear(3, 1), 1, (3,)))
OPTIMISERS = {"LBFGS": LBFGS(), "Adam": Adam(), "EM": EM()}


@pytest.mark.parametrize(
    ("evaluation", "wanted"),
    [(ClosedForm(), "LBFGS"), (Drawn(), "Adam"), (ENCODED, "Adam"), (TopicSweeps(), "EM"), (PaperTopics(), "Adam")],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
def test_each_evaluation_has_one_optimiser(evaluation, wanted):
    for name, optimiser in OPTIMISERS.items():
        if name == wanted:
            assert Method("own", Objective(eps=1.0), evaluation, optimiser).optimiser is optimiser
            continue
        with pytest.raises(
            ModelError, match=f"what is {type(evaluation).__name__} is minimised by {wanted}; got {name}"
        ):
            Method("own", Objective(eps=1.0), evaluation, optimiser)


def test_an_objective_of_draws_alone_has_no_closed_form():
    push = Objective(reconstruction=0.0, push_forward=PushForward())
    with pytest.raises(ModelError, match="the objective has no term in closed form"):
        Method("own", push)
    assert Method("own", push, Drawn(), Adam()).objective is push
    assert Method("own", Objective(reconstruction=0.0, direct=Direct())).objective.direct == Direct()


def test_entropic_is_maximum_likelihood_unless_told_otherwise():
    assert otp.entropic() == Method("entropic", Objective(eps=1.0), ClosedForm(), LBFGS(steps=400))
    assert otp.entropic().objective.is_likelihood
    held = otp.entropic(eps=0.5, eta=2.0, reference="uniform", steps=7)
    assert held.objective == Objective(eps=0.5, push_forward=PushForward(2.0, Energy()))
    assert held.evaluation.reference == "uniform"
    assert held.steps == 7
    assert otp.entropic(eta=2.0, divergence=MMD()).objective.push_forward.divergence == MMD()


def test_transport_goes_either_way():
    direct = otp.transport(refinements=2)
    assert direct.objective == Objective(reconstruction=0.0, direct=Direct(1.0, WhitenedFeatures(), refinements=2))
    assert (direct.evaluation, direct.optimiser) == (ClosedForm(), LBFGS(steps=400))
    backward = otp.transport("backward", batch_size=64, learning_rate=0.1, hidden_layers=(4,))
    assert backward.objective == Objective(push_forward=PushForward(1.0, Energy()))
    assert backward.evaluation == Drawn(noise="abducted", batch_size=64, hidden_layers=(4,))
    assert backward.optimiser == Adam(steps=3000, learning_rate=0.1)
    with pytest.raises(ModelError, match="route must be 'direct' or 'backward'; got 'forward'"):
        otp.transport("forward")


def test_paper_samples_noise_and_alternates():
    method = otp.paper(eta=0.3, scope="local", steps=9)
    assert method.objective == Objective(push_forward=PushForward(0.3, Wasserstein()))
    assert method.evaluation == Drawn(noise="sampled", scope="local", batch_size=128, hidden_layers=(32,))
    assert method.optimiser == Adam(steps=9, learning_rate=0.02, alternating=True)


@pytest.mark.parametrize(("given", "reference"), [(True, "uniform"), (False, "model")])
def test_misfit_leaves_given_weights_out(given, reference):
    method = misfit(given_weights=given)
    assert method.objective.eps == 0.75
    assert method.evaluation == ClosedForm(reference=reference)


@pytest.mark.parametrize("method", [otp.entropic(), otp.transport("backward"), otp.paper()], ids=lambda one: one.name)
def test_other_steps_change_nothing_else(method):
    other = method.with_steps(13)
    assert other.steps == other.optimiser.steps == 13
    assert other != method
    assert other.with_steps(method.steps) == method
