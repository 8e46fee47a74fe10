"""What an objective is made of."""

import pytest

from otpdag.costs import Euclidean
from otpdag.divergences import Sinkhorn, SlicedWasserstein
from otpdag.errors import ModelError
from otpdag.objective import Drawn
from otpdag.schedules import Linear
from otpdag.settings import ClosedForm, Direct, Objective, PushForward, Weights, value_at


def test_weights_follow_their_schedules():
    objective = Objective(reconstruction=2.0, eps=Linear(1.0, 0.0), push_forward=PushForward(Linear(0.0, 4.0)))
    assert objective.at(0.0) == Weights(2.0, eta=0.0, eps=1.0)
    assert objective.at(0.25) == Weights(2.0, eta=1.0, eps=0.75)
    assert objective.at(1.0) == Weights(2.0, eta=4.0, eps=0.0)
    assert Objective(eps=0.5).at(0.3) == Weights(1.0, eta=0.0, eps=0.5)
    assert value_at(Drawn(temperature=Linear(1.0, 0.5)).temperature, 0.5) == 0.75


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Objective(reconstruction=-1.0), "reconstruction must be a number of at least 0; got -1.0"),
        (lambda: Objective(reconstruction=0.0), "the objective has no term"),
        (lambda: Direct(points=0), "points must be a whole number of at least 1; got 0"),
        (lambda: Direct(SlicedWasserstein(), costs={"x": "0/1"}), "costs are of Wasserstein or Sinkhorn"),
        (lambda: Direct(unmatched=1.5), "unmatched must be a share of at least 0 and below 1, or .auto.; got 1.5"),
        (lambda: Direct(Sinkhorn(unbalanced=1.0), unmatched=0.1), "unmatched and an unbalanced divergence both leave"),
        (lambda: ClosedForm(reference="even"), "reference must be one of 'model', 'uniform'; got 'even'"),
        (lambda: Drawn(noise="none"), "noise must be one of 'sampled', 'abducted', 'marginal'; got 'none'"),
        (lambda: Drawn(scope="all"), "scope must be one of 'joint', 'local'; got 'all'"),
        (lambda: Drawn(batch_size=0), "batch_size must be a whole number of at least 1; got 0"),
        (lambda: Drawn(costs={"x": "squared"}), "must be an AbstractCost or a function of two points; got 'squared'"),
        (
            lambda: Drawn(noise="marginal", costs={"x": Euclidean()}),
            "with noise='marginal' the cost of a node is its log-likelihood: leave costs out",
        ),
        (lambda: Drawn(backward=3), "backward must be a function that builds maps; got 3"),
    ],
)
def test_settings_that_mean_nothing_are_refused(build, message):
    with pytest.raises(ModelError, match=message):
        build()


def test_one_term_is_enough():
    for terms in ({"push_forward": PushForward()}, {"direct": Direct()}):
        assert Objective(reconstruction=0.0, **terms).at(1.0).reconstruction == 0.0


@pytest.mark.parametrize("terms", [{"reconstruction": 1.0}, {"reconstruction": 0.0, "push_forward": PushForward()}])
def test_the_direct_term_stands_alone(terms):
    with pytest.raises(ModelError, match="the direct term stands alone"):
        Objective(direct=Direct(), **terms)
