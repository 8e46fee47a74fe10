"""What hidden nodes say of states, beside products of tables written out."""

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.likelihood.chain_potentials import HiddenNodes, potentials
from otpdag.mechanisms.protocols import fitted_to_rows
from tests.dynamic_models import laid_out, random_poisson_hmm

COUNTS = [np.array([1.0, 7.0, 2.0, 12.0]), np.array([9.0, 2.0])]


def two_hidden_nodes():
    """A category that depends on its past, and one that depends on it in the same step."""
    graph = otp.Graph([otp.lag("z", "z"), ("z", "w"), ("w", "x"), ("z", "x")], hidden=["z", "w"])
    model = otp.Model(graph, {"z": m.Categorical(2), "w": m.Categorical(3), "x": m.Poisson()})
    rng = np.random.default_rng(2)
    return model.set_params(
        {
            "z": {"probs": rng.dirichlet([1, 1], 2)},
            "z[0]": {"probs": rng.dirichlet([1, 1])},
            "w": {"probs": rng.dirichlet([1, 1, 1], 2)},
            "x": {"log_rate": rng.normal(size=(3, 2))},
        }
    )


def test_first_and_later_steps_are_products_of_tables():
    model = two_hidden_nodes()
    chain, params = laid_out(model, COUNTS), model.params()
    begun, joined = HiddenNodes.of(model.structure, chain).log_potentials(model.fitted.naturals)
    z, w = (chain.states.now[node].argmax(-1).numpy() for node in ("z", "w"))
    within = params["w"]["probs"][z, w]
    before = chain.states.before["z[-1]"].argmax(-1).numpy()
    np.testing.assert_allclose(begun[0].exp(), params["z[0]"]["probs"][z] * within)
    np.testing.assert_allclose(joined[0].exp(), params["z"]["probs"][before][:, z] * within)


@pytest.mark.parametrize("model", [two_hidden_nodes(), random_poisson_hmm(), random_poisson_hmm(3, m.StayOrMove(3))])
def test_they_are_those_of_all_steps(model):
    chain, naturals = laid_out(model, COUNTS), model.fitted.naturals
    begun, joined = HiddenNodes.of(model.structure, chain).log_potentials(naturals)
    every = potentials(model.structure, naturals, chain)
    first, later = every.hidden[:, chain.phase == 0], every.hidden[:, chain.phase == 1]
    torch.testing.assert_close(begun.unsqueeze(1).expand_as(first), first)
    whole = later.unsqueeze(2) + every.pair[:, -1:]
    torch.testing.assert_close(joined.unsqueeze(1).expand_as(whole), whole)


@pytest.mark.parametrize("model", [two_hidden_nodes(), random_poisson_hmm()])
def test_tables_have_the_maxima_of_their_mechanisms(model):
    """From expected counts of states, or of pairs of states, as weighted frequencies of all of them."""
    chain, naturals = laid_out(model, COUNTS), model.fitted.naturals
    nodes, rng = HiddenNodes.of(model.structure, chain), np.random.default_rng(4)
    assert set(nodes.tables) == {name for name, *_ in nodes.terms}
    for name, mechanism, at, *_ in nodes.terms:
        every = torch.broadcast_tensors(*(one[..., 0] for one in (at.value, *at.parents.values())))[0].shape
        value, parents = (
            torch.as_tensor(at.value).expand(*every, -1).reshape(1, -1, at.value.shape[-1]),
            {key: one.expand(*every, -1).reshape(1, -1, one.shape[-1]) for key, one in at.parents.items()},
        )
        weight = torch.as_tensor(rng.gamma(1.0, 5.0, (1, value.shape[1])))
        found = nodes.tables[name].maximised(naturals[name], weight)["probs"]
        torch.testing.assert_close(found, fitted_to_rows(mechanism, naturals[name], value[0], parents, weight)["probs"])
