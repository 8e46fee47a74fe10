"""Forward and backward over random potentials, against sums over all paths."""

import itertools

import numpy as np
import pytest
import torch

from otpdag.likelihood.chain_layout import Block, Chain, States
from otpdag.likelihood.chain_messages import marginals_by_steps
from otpdag.likelihood.chain_potentials import Linear

LENGTHS, SIZE, KINDS = (4, 4, 2), 3, 5


def laid_out(varying, lag=1):
    sizes = tuple(sum(length > step for length in LENGTHS) for step in range(4))
    rng = np.random.default_rng(0)
    kinds = torch.as_tensor(rng.integers(0, KINDS, sum(sizes)))
    block = Block(kinds, torch.arange(sum(sizes)), sizes, torch.arange(3))
    eye = torch.eye(SIZE).double()
    states = States(("z",), SIZE, {"z": eye}, {"z[-1]": eye}, None, torch.ones(SIZE, dtype=torch.bool))
    chain = Chain(states, {}, {}, torch.zeros(KINDS, dtype=torch.long), (block,), lag, varying)
    rows = KINDS if varying else lag + 1
    generator = torch.Generator().manual_seed(1)
    unary, pair = (
        torch.rand(2, *shape, generator=generator, dtype=torch.float64) + 0.1
        for shape in ((SIZE, KINDS), (rows, SIZE, SIZE))
    )
    log_unit = torch.randn(2, KINDS, generator=generator, dtype=torch.float64)
    return block, chain, Linear(unary, log_unit, pair)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("varying", "lag"), [(False, 1), (False, 2), (True, 1)])
def test_a_block_has_the_probabilities_of_all_its_paths(varying, lag, weighted):
    block, chain, potential = laid_out(varying, lag)
    weight = torch.tensor([[1.0, 2.0, 0.5], [0.0, 1.5, 3.0]]).double() if weighted else None
    found = marginals_by_steps(block, potential, chain, weight)
    starts = np.cumsum([0, *block.sizes])
    pairs = np.zeros(potential.pair.shape)
    for replica, (number, length) in itertools.product(range(2), enumerate(LENGTHS)):
        columns = [starts[step] + number for step in range(length)]
        kinds = [int(block.kinds[column]) for column in columns]
        rows = [kinds[step] if varying else min(step, lag) for step in range(length)]
        unary, pair = potential.unary[replica].numpy(), potential.pair[replica].numpy()
        paths = list(itertools.product(range(SIZE), repeat=length))
        mass = np.array(
            [
                np.prod([unary[state, kind] for state, kind in zip(path, kinds, strict=True)])
                * np.prod([pair[rows[t], path[t - 1], path[t]] for t in range(1, length)])
                for path in paths
            ]
        )
        expected = np.log(mass.sum()) + potential.log_unit[replica, kinds].sum().item()
        assert found.log_scale[replica, columns].sum().item() == pytest.approx(expected)
        share = mass / mass.sum()
        for t, column in enumerate(columns):
            state = [share[[path[t] == k for path in paths]].sum() for k in range(SIZE)]
            np.testing.assert_allclose(found.state[replica, :, column], state)
            if t:
                for path, own in zip(paths, share, strict=True):
                    factor = 1.0 if weight is None else weight[replica, number].item()
                    pairs[replica, rows[t], path[t - 1], path[t]] += factor * own
    np.testing.assert_allclose(found.pair, pairs, atol=1e-12)
