"""Linear normal numbers are integrated out in closed form, against the multivariate normal of scipy."""

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from otpdag import mechanisms as m
from otpdag.backward.elimination import lay_out, log_evidence, total_evidence
from tests.backward.elimination.worlds import linear_moments, make_world, random_edges, with_leaves


def linear_world(seed, **kwargs):
    rng = np.random.default_rng(seed)
    names = list("abcdefgh")
    vectors = [m.Normal, m.Normal, lambda: m.Normal(2), lambda: m.MultivariateNormal(3)]
    nodes = {name: vectors[rng.integers(4)]() for name in names}
    hidden = ("b", "d") if seed % 2 else ()
    return make_world(nodes, random_edges(rng, names, 0.4), rng, hidden=hidden, **kwargs)


def normal_evidence(structure, naturals, batch, replica):
    mean, covariance, at = linear_moments(structure, naturals, replica)
    rows = []
    for row in range(batch.rows):
        seen = [
            i
            for n, s in at.items()
            if n in batch.mask
            for i, known in zip(range(s.start, s.stop), batch.mask[n][0, row], strict=True)
            if known
        ]
        values = np.concatenate([batch.values[n][0, row] for n in at if n in batch.mask] or [[]])
        known = np.concatenate([batch.mask[n][0, row] for n in at if n in batch.mask] or [[]]).astype(bool)
        part = np.ix_(seen, seen)
        rows.append(multivariate_normal.logpdf(values[known], mean[seen], covariance[part]) if seen else 0.0)
    return np.array(rows)


@pytest.mark.parametrize("seed", range(8))
def test_linear_normal_graphs_with_any_gaps_are_multivariate_normal(seed):
    structure, naturals, batch = linear_world(seed, replicas=2)
    found = log_evidence(naturals, lay_out(structure, batch))
    for replica in range(2):
        truth = normal_evidence(structure, naturals, batch, replica)
        np.testing.assert_allclose(found[replica], truth, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_gradients_of_linear_normal_graphs_are_those_of_finite_differences(seed):
    structure, naturals, batch = linear_world(seed)
    layout = lay_out(structure, batch)
    leaves, ours = with_leaves(naturals)
    total_evidence(ours, layout).sum().backward()
    step = 1e-5
    for node, params in naturals.items():
        for name, value in params.items():
            if name == "covariance":
                continue  # single entries of a symmetric matrix have no derivative
            for index in np.ndindex(*value.shape):
                ends = []
                for sign in (1, -1):
                    shifted = value.clone()
                    shifted[index] += sign * step
                    ends.append(float(total_evidence({**naturals, node: {**params, name: shifted}}, layout)))
                slope = (ends[0] - ends[1]) / (2 * step)
                assert float(leaves[node, name].grad[index]) == pytest.approx(slope, rel=1e-4, abs=1e-4), (node, name)
