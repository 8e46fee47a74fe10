"""pyAgrum's expectation-maximisation for a discrete network with gaps and hidden nodes."""

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from otpdag.datasets import DiscreteNetwork


@dataclass(frozen=True)
class AgrumRun:
    """Tables at the end, the expected log-likelihood of all completed rows after each step, and processor seconds."""

    tables: dict[str, np.ndarray]
    history: list[float]
    seconds: float


def agrum_em(
    network: DiscreteNetwork,
    frame: pd.DataFrame,
    start: Mapping[str, np.ndarray],
    *,
    tolerance: float = 1e-6,
    steps: int | None = None,
    prior: float = 1e-3,
) -> AgrumRun:
    """Run EM by one thread from given tables; to pyAgrum's own tolerance, or for so many steps at most.

    Without a prior pyAgrum refuses tables that lack a configuration of parents.
    """
    import pyagrum

    net = pyagrum.BayesNet()
    for node in network.nodes:
        net.add(pyagrum.LabelizedVariable(node, node, [str(code) for code in range(len(network.states[node]))]))
    for node in network.nodes:
        for parent in network.parents[node]:
            net.addArc(parent, node)
    for node, table in start.items():
        net.cpt(node).fillWith(_in_order(table, _ours(network, node), list(net.cpt(node).names)[::-1]).ravel().tolist())
    columns = {node: frame[node] if node in frame else pd.Series(np.nan, index=frame.index) for node in network.nodes}
    text = pd.DataFrame(columns).map(lambda code: "?" if np.isnan(code) else str(int(code)))
    learner = pyagrum.BNLearner(text, net, ["?"])
    learner.setNumberOfThreads(1)
    learner.useSmoothingPrior(prior)
    learner.useEM(tolerance, 0.0)
    learner.EMsetVerbosity(True)
    if steps is not None:
        learner.EMsetMaxIter(steps)
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="\\s*the learnParameters's EM algorithm has completed prematurely")
        learned = learner.learnParameters(net)
    seconds = time.process_time() - begin
    tables = {
        node: _in_order(learned.cpt(node).toarray(), list(learned.cpt(node).names)[::-1], _ours(network, node))
        for node in network.nodes
    }
    return AgrumRun(tables, [-value for value in learner.EMHistory()], seconds)


def _ours(network: DiscreteNetwork, node: str) -> list[str]:
    return [*network.parents[node], node]


def _in_order(table: np.ndarray, names: list[str], wanted: list[str]) -> np.ndarray:
    return np.transpose(table, [names.index(name) for name in wanted])
