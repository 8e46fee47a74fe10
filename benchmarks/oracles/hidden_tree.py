"""Exact expectation-maximisation for a tree of hidden nodes with observed children, by messages up and down."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from otpdag.datasets import DiscreteNetwork

_FLOOR = 1e-300


@dataclass(frozen=True)
class Beliefs:
    """What the rows tell of hidden nodes, and the log-likelihood of each row.

    Attributes:
        single: Posteriors of each hidden node, (rows, states).
        pairs: Posteriors summed over rows of each hidden node with its parent, (parent's states, own).
        log_evidence: Of each row.
    """

    single: dict[str, np.ndarray]
    pairs: dict[str, np.ndarray]
    log_evidence: np.ndarray


def hidden_tree_em(
    start: DiscreteNetwork, frame: pd.DataFrame, tolerance: float = 1e-10, steps: int = 3000
) -> tuple[DiscreteNetwork, list[float]]:
    """The maximum near ``start``, and the mean log-likelihood of a row before each step.

    Nodes without a column are hidden; each node has at most one parent, which is hidden; the columns are complete.
    """
    tables, history = dict(start.tables), [-np.inf]
    for _ in range(steps):
        beliefs_now = beliefs(DiscreteNetwork(start.states, start.parents, tables), frame)
        history.append(float(beliefs_now.log_evidence.mean()))
        if history[-1] - history[-2] < tolerance:
            break
        tables = _maximise(start, frame, beliefs_now)
    return DiscreteNetwork(start.states, start.parents, tables), history[1:]


def beliefs(tree: DiscreteNetwork, frame: pd.DataFrame) -> Beliefs:
    """Sum-product: messages from the leaves to the root, then back."""
    order = [node for node in tree.graph.order if node not in frame]
    below = {node: np.ones((len(frame), len(tree.states[node]))) for node in order}
    for leaf in frame:
        below[tree.parents[leaf][0]] *= tree.tables[leaf][:, frame[leaf].to_numpy()].T
    log_evidence = np.zeros(len(frame))
    message: dict[str, np.ndarray] = {}
    for node in reversed(order):
        total = below[node].sum(axis=1, keepdims=True)
        below[node] /= total
        log_evidence += np.log(total[:, 0])
        if tree.parents[node]:
            message[node] = below[node] @ tree.tables[node].T
            below[tree.parents[node][0]] *= message[node]
    single, pairs = {}, {}
    for node in order:
        if not tree.parents[node]:
            joint = tree.tables[node] * below[node]
            evidence = joint.sum(axis=1)
            log_evidence += np.log(evidence)
            single[node] = joint / evidence[:, None]
            continue
        above = single[tree.parents[node][0]] / np.maximum(message[node], _FLOOR)
        pairs[node] = tree.tables[node] * (above.T @ below[node])
        single[node] = (above @ tree.tables[node]) * below[node]
    return Beliefs(single, pairs, log_evidence)


def _maximise(tree: DiscreteNetwork, frame: pd.DataFrame, beliefs_now: Beliefs) -> dict[str, np.ndarray]:
    counts: dict[str, np.ndarray] = {}
    for node in tree.nodes:
        if node in frame:
            indicators = np.eye(len(tree.states[node]))[frame[node].to_numpy()]
            counts[node] = beliefs_now.single[tree.parents[node][0]].T @ indicators
        else:
            counts[node] = beliefs_now.pairs[node] if tree.parents[node] else beliefs_now.single[node].sum(axis=0)
    return {node: count / count.sum(axis=-1, keepdims=True) for node, count in counts.items()}
