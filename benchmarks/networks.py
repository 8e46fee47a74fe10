"""Problems made of a published discrete network with one node hidden."""

import os
from functools import partial

import numpy as np
import pandas as pd

import otpdag as otp
from benchmarks.harness import Skip
from benchmarks.oracles import network_em
from benchmarks.problems import Problem
from experiments.metrics import hellinger
from experiments.published_files import load_network
from otpdag import mechanisms as m
from otpdag.datasets import DiscreteNetwork, Truth

ROWS = 10_000
STARTS = 2  # pgmpy's EM knows one start only and takes seconds for it; the better likelihood is kept


def network_problem(name: str, hidden: str) -> Problem:
    """The error is the exact Hellinger distance to the true joint distribution of the observed nodes."""
    if not os.environ.get("OTPDAG_DATA"):
        raise Skip("set OTPDAG_DATA")
    network = load_network(name)
    observed = [node for node in network.nodes if node != hidden]
    return Problem(
        name=name,
        rows=ROWS,
        draw=partial(_draw, network, observed),
        model=partial(_model, network, hidden),
        oracle=partial(_oracle, network),
        error=partial(_error, network, observed),
    )


def _draw(
    network: DiscreteNetwork, observed: list[str], rows: int, generator: np.random.Generator
) -> tuple[pd.DataFrame, Truth]:
    return network.sample(rows, generator)[observed], _params(network)


def _model(network: DiscreteNetwork, hidden: str) -> "otp.Model":
    graph = otp.Graph(network.graph.edges, nodes=network.nodes, hidden=[hidden])
    return otp.Model(graph, {node: m.Categorical(len(network.states[node])) for node in network.nodes})


def _oracle(network: DiscreteNetwork, frame: pd.DataFrame, truth: Truth, seed: int) -> Truth:
    return _params(network_em(network, frame, range(seed, seed + STARTS)))


def _error(network: DiscreteNetwork, observed: list[str], truth: Truth, estimate: Truth) -> float:
    true, estimated = (_joint(network, observed, params) for params in (truth, estimate))
    return hellinger(true, estimated)


def _params(network: DiscreteNetwork) -> Truth:
    return {node: {"probs": table} for node, table in network.tables.items()}


def _joint(network: DiscreteNetwork, observed: list[str], params: Truth) -> np.ndarray:
    tables = {node: np.asarray(params[node]["probs"], dtype=float) for node in network.nodes}
    return DiscreteNetwork(network.states, network.parents, tables).joint(observed)
