"""pgmpy's expectation-maximisation for a discrete network with hidden nodes."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from otpdag.datasets import DiscreteNetwork


def network_em(network: DiscreteNetwork, frame: pd.DataFrame, seeds: Sequence[int]) -> DiscreteNetwork:
    """Fits the tables of a network from the columns in `frame`; the best likelihood of several starts.

    `network` tells nodes, states and parents only; nodes without a column are hidden.
    """
    runs = [_run(network, frame, seed) for seed in seeds]
    return max(runs, key=lambda fitted: mean_log_likelihood(fitted, frame))


def _run(network: DiscreteNetwork, frame: pd.DataFrame, seed: int) -> DiscreteNetwork:
    from pgmpy.models import DiscreteBayesianNetwork
    from pgmpy.parameter_estimator import DiscreteEM

    hidden = [node for node in network.nodes if node not in frame]
    names = {node: list(range(len(network.states[node]))) for node in network.nodes}
    sizes = {node: len(network.states[node]) for node in hidden}
    model = DiscreteBayesianNetwork(network.graph.edges, latents=set(hidden))
    fitted = DiscreteEM(state_names=names, latent_card=sizes, seed=seed, show_progress=False).fit(model, frame)
    tables = {cpd.variable: _table(network, cpd) for cpd in fitted.parameters_}
    return DiscreteNetwork(network.states, network.parents, tables)


def _table(network: DiscreteNetwork, cpd) -> np.ndarray:
    """The values of a pgmpy table with the axes in our order: parents first, the node's own states last."""
    wanted = (*network.parents[cpd.variable], cpd.variable)
    return np.transpose(cpd.values, [cpd.variables.index(name) for name in wanted])


def mean_log_likelihood(network: DiscreteNetwork, frame: pd.DataFrame) -> float:
    """The mean log-likelihood of the rows, nodes without a column summed out."""
    joint = network.joint(list(frame))
    with np.errstate(divide="ignore"):
        return float(np.log(joint[tuple(frame.to_numpy().T)]).mean())
