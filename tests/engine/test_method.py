"""Methods: what goes together, what the named ones are, and what a flat point means."""

from dataclasses import replace

import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward import EncoderMap
from otpdag.divergences import MMD, Energy, Wasserstein
from otpdag.engine import EM, Adam, Deterministic, Layout, Method
from otpdag.errors import ModelError
from otpdag.objective import Drawn, Encoded, PaperTopics, TopicSweeps
from otpdag.schedules import Constant
from otpdag.settings import ClosedForm, Direct, Objective, PushForward
from otpdag.structure import unpack

# -- methods: what goes together, and what the named ones are ---------------------------------------------------------


ENCODED = Encoded(EncoderMap(torch.nn.Linear(3, 1), 1, (3,)))
OPTIMISERS = {"Deterministic": Deterministic(), "Adam": Adam(), "EM": EM()}


@pytest.mark.parametrize(
    ("evaluation", "wanted"),
    [
        (ClosedForm(), "Deterministic"),
        (Drawn(), "Adam"),
        (ENCODED, "Adam"),
        (TopicSweeps(), "EM"),
        (PaperTopics(), "Adam"),
    ],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
def test_an_optimiser_must_serve_the_evaluation(evaluation, wanted):
    objective = Objective() if wanted == "Adam" else Objective(eps=1.0)
    for name, optimiser in OPTIMISERS.items():
        if name == wanted or (wanted, name) == ("Deterministic", "EM"):
            assert Method("own", objective, evaluation, optimiser).optimiser is optimiser
            continue
        with pytest.raises(
            ModelError, match=f"what is {type(evaluation).__name__} is minimised by {wanted}; got {name}"
        ):
            Method("own", objective, evaluation, optimiser)


DIRECT = Objective(reconstruction=0.0, direct=Direct())


@pytest.mark.parametrize(
    ("objective", "evaluation", "message"),
    [
        (Objective(eps=0.3), TopicSweeps(), "sweeps over documents minimise .*eps=1.0.*; got .*eps=0.3"),
        (Objective(7.0, 1.0), TopicSweeps(), "and no other; got Objective.reconstruction=7.0"),
        (Objective(eps=1.0), TopicSweeps(pairs=True), "sweeps over documents minimise .*direct=Direct"),
        (DIRECT, TopicSweeps(), "sweeps over documents minimise"),
        (Objective(eps=3.0), ENCODED, "what is Encoded has no entropic and no direct term: leave eps and direct out"),
        (DIRECT, ENCODED, "what is Encoded has no entropic and no direct term"),
        (Objective(eps=0.1), PaperTopics(), "what is PaperTopics has no entropic and no direct term"),
        (replace(DIRECT, eps=0.2), ClosedForm(), "belong to the reconstruction: where that counts nothing, leave eps"),
        (DIRECT, ClosedForm(reference="uniform"), "belong to the reconstruction"),
    ],
)
def test_terms_that_an_evaluation_does_not_have_are_refused(objective, evaluation, message):
    optimiser = {TopicSweeps: EM(), ClosedForm: Deterministic()}.get(type(evaluation), Adam())
    with pytest.raises(ModelError, match=message):
        Method("own", objective, evaluation, optimiser)


def test_a_method_of_which_only_the_name_is_said_is_maximum_likelihood():
    assert replace(otp.engine.method.likelihood(), name="own", optimiser=Deterministic()) == Method("own")


@pytest.mark.parametrize("setting", [{"batch_size": 1}, {"learning_rate": 9.0}, {"hidden_layers": (1,)}])
def test_the_direct_route_has_no_settings_of_the_other(setting):
    with pytest.raises(ModelError, match="batch_size, learning_rate and hidden_layers are of the route 'backward'"):
        otp.transport(**setting)


def test_an_objective_of_draws_alone_has_no_closed_form():
    push = Objective(reconstruction=0.0, push_forward=PushForward())
    with pytest.raises(ModelError, match="the objective has no term in closed form"):
        Method("own", push)
    assert Method("own", push, Drawn(), Adam()).objective is push
    assert Method("own", Objective(reconstruction=0.0, direct=Direct())).objective.direct == Direct()


def test_entropic_is_maximum_likelihood_unless_told_otherwise():
    assert otp.entropic() == Method("entropic", Objective(eps=1.0), ClosedForm(), Deterministic(steps=400))
    held = otp.entropic(eps=0.5, eta=2.0, reference="uniform", steps=7)
    assert held.objective == Objective(eps=0.5, push_forward=PushForward(2.0, Energy()))
    assert held.evaluation.reference == "uniform"
    assert held.steps == 7
    assert otp.entropic(eta=2.0, divergence=MMD()).objective.push_forward.divergence == MMD()


def test_transport_goes_either_way():
    direct = otp.transport(points=64)
    assert direct.objective == Objective(reconstruction=0.0, direct=Direct(points=64))
    assert (direct.evaluation, direct.optimiser) == (ClosedForm(), Deterministic(steps=400, tolerance=1e-7))
    backward = otp.transport("backward", batch_size=64, learning_rate=0.1, hidden_layers=(4,))
    assert backward.objective == Objective(push_forward=PushForward(1.0, Energy()))
    assert backward.evaluation == Drawn(noise="abducted", batch_size=64, hidden_layers=(4,))
    assert backward.optimiser == Adam(steps=3000, learning_rate=0.1)
    with pytest.raises(ModelError, match="divergence, costs, unmatched and points are of the route 'direct'"):
        otp.transport("backward", points=3)
    with pytest.raises(ModelError, match="route must be 'direct' or 'backward'; got 'forward'"):
        otp.transport("forward")


def test_paper_samples_noise_and_alternates():
    method = otp.paper(eta=0.3, scope="local", steps=9)
    assert method.objective == Objective(push_forward=PushForward(0.3, Wasserstein()))
    assert method.evaluation == Drawn(noise="sampled", scope="local", batch_size=128)
    assert method.optimiser == Adam(steps=9, learning_rate=Constant(1e-3), alternating=True)
    assert otp.paper(noise="abducted").evaluation == Drawn(noise="abducted", batch_size=128)


@pytest.mark.parametrize("method", [otp.entropic(), otp.transport("backward"), otp.paper()], ids=lambda one: one.name)
def test_other_steps_change_nothing_else(method):
    other = method.with_steps(13)
    assert other.steps == other.optimiser.steps == 13
    assert other != method
    assert other.with_steps(method.steps) == method


# -- what a flat point means ------------------------------------------------------------------------------------------


MODEL = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(3), "x": m.Normal(2)})


def test_the_models_parameters_come_first_then_those_of_maps():
    phi = {"phi.b": torch.zeros(1, 4), "phi.a": torch.zeros(1, 2, 5)}
    layout = Layout.of(MODEL.structure, phi)
    assert layout.shapes == {
        "z.probs": (1, 3),
        "x.loc": (3, 2),
        "x.scale": (3, 2),
        "phi.b": (4,),
        "phi.a": (2, 5),
    }
    assert list(layout.shapes)[-2:] == ["phi.b", "phi.a"]
    assert not any(key.startswith("phi.") for key in list(layout.shapes)[:-2])


def test_packing_ignores_the_order_of_names_and_is_undone_by_unpacking():
    layout = Layout.of(MODEL.structure)
    generator = torch.Generator().manual_seed(0)
    theta = {key: torch.randn(2, *shape, generator=generator) for key, shape in layout.shapes.items()}
    point = layout.pack(theta)
    assert point.shape == (2, 3 + 6 + 6)
    assert torch.equal(point, layout.pack(dict(reversed(theta.items()))))
    back = unpack(point, layout.shapes)
    for key, value in theta.items():
        assert torch.equal(back[key], value)


def test_a_parameter_that_is_missing_is_named():
    layout = Layout.of(MODEL.structure)
    with pytest.raises(KeyError, match=r"x\.scale"):
        layout.pack({"z.probs": torch.zeros(1, 1, 3), "x.loc": torch.zeros(1, 3, 2)})


def test_fixed_parameters_are_no_coordinates():
    fixed = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal(scale=1.0)})
    assert Layout.of(fixed.structure).shapes == {"x.loc": (1, 1)}
