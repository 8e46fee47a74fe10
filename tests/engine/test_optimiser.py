"""What optimisers remember, as named tensors."""

from dataclasses import dataclass, field

import torch

from otpdag.engine.optimiser import as_memory, from_memory, under


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
