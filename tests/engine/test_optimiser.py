"""What optimisers remember, as named tensors."""

from dataclasses import dataclass, field

import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine import EM, Adam, Deterministic
from otpdag.engine.optimiser import Run, as_memory, from_memory, under
from otpdag.engine.updates import accelerated_updates
from otpdag.problem import LossTerms, Problem


@dataclass
class State:
    """As optimisers have one."""

    point: torch.Tensor
    step: int
    settled: torch.Tensor | None = None
    history: list = field(default_factory=list)


def test_tensors_and_numbers_come_back_and_all_else_is_given():
    state = State(torch.ones(2, 3), 7, history=[torch.zeros(1)])
    memory = as_memory(state)
    assert set(memory) == {"point", "step"}
    again = from_memory(State, {**memory, "other": torch.zeros(1)}, settled=None, history=state.history)
    assert again.step == 7
    assert isinstance(again.step, int)
    assert again.point is state.point
    assert again.history is state.history


def test_what_stands_under_a_prefix():
    memory = {"axes.origin": torch.zeros(1), "axes.axes.x": torch.ones(1), "point": torch.ones(1)}
    assert set(under(memory, "axes.")) == {"origin", "axes.x"}
    assert under(memory, "pair.") == {}


STRUCTURE = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()}).structure
SHAPES = {"x.loc": (1,), "phi.x": (1,)}


@dataclass(frozen=True)
class Bowl(Problem):
    """A bowl whose steepness is a tensor with a gradient of its own, as that of a user's module has."""

    steepness: torch.Tensor
    structure = STRUCTURE
    shapes = SHAPES

    @property
    def rows(self):
        return 10

    def loss(self, point):
        loss = (self.steepness * (point - 1).square()).sum(-1)
        return LossTerms.of(loss, reconstruction=loss)

    def sampled(self, point, streams, progress):
        return self.loss(point)

    def update(self, point):
        return point + 0.5 * self.steepness / self.steepness * (1 - point), self.loss(point)


def run(points):
    return Run(Bowl(torch.tensor([1.0, 3.0]).double().requires_grad_(True)), points, 5, seeds=[0, 1])


RUNS = {
    "Deterministic": Deterministic(steps=5).run,
    "Adam": Adam(steps=5).run,
    "Adam in turn": Adam(steps=5, alternating=True).run,
    "EM": EM(steps=5).run,
    "accelerated": lambda one, watch: accelerated_updates(one, 1e-9, watch),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_told_of_a_leg_has_no_gradients(name):
    """Else the history of a fit would hold every step that was ever evaluated."""
    start = torch.tensor([[3.0, -2.0], [0.0, 5.0]]).double()
    told = []

    def watch(progress):
        told.extend([progress.losses, progress.points, *progress.snapshot().values()])
        return False

    outcome = RUNS[name](run(start), watch)
    told += [outcome.point, outcome.loss, outcome.converged, outcome.failed, *outcome.memory.values()]
    assert len(told) > 10
    assert not [one for one in told if one.requires_grad]
    assert torch.equal(start, torch.tensor([[3.0, -2.0], [0.0, 5.0]]).double())  # it is not worked upon


@pytest.mark.parametrize("name", ["Adam", "Adam in turn", "EM", "accelerated"])
def test_a_start_that_asks_for_gradients_is_only_read(name):
    start = torch.tensor([[3.0, -2.0], [0.0, 5.0]]).double().requires_grad_(True)
    outcome = RUNS[name](run(start), lambda progress: False)
    assert not outcome.point.requires_grad
    plain = RUNS[name](run(start.detach()), lambda progress: False)
    torch.testing.assert_close(outcome.point, plain.point)


@dataclass
class Standing:
    at: torch.Tensor
    seen: list
    step: int = 0


def test_a_state_is_remembered_by_its_tensors_and_whole_numbers():
    memory = as_memory(Standing(torch.ones(2), ["a"], 7))
    assert {name: value.tolist() for name, value in memory.items()} == {"at": [1.0, 1.0], "step": 7}
    assert under({"a.b": torch.ones(1), "c": torch.zeros(1)}, "a.") == {"b": torch.ones(1)}
    assert from_memory(LikeStanding, memory, seen=[]).step == 7


@dataclass
class LikeStanding:
    at: "torch.Tensor"
    seen: "list"
    step: "int" = 0
