"""Chains and trees of unknown linear normal numbers, against dense matrices and the multivariate normal."""

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from otpdag import mechanisms as m
from otpdag.likelihood.elimination import lay_out, log_evidence, posterior_draws, total_evidence
from otpdag.likelihood.elimination import plans as piece_plans
from otpdag.likelihood.elimination.linear_normal import BlockTridiagonal
from tests.likelihood.elimination.worlds import linear_moments, make_world


def banded(rng, blocks, width):
    """A random precision with a band, as a matrix and as its blocks."""
    size = blocks * width
    factor = np.tril(rng.normal(size=(size, size))) + 3 * np.eye(size)
    place = np.arange(size) // width
    factor[(place[:, None] - place[None, :]) > 1] = 0.0
    whole = factor @ factor.T
    split = torch.from_numpy(whole).reshape(blocks, width, blocks, width).transpose(1, 2)
    diagonal = torch.stack([split[k, k] for k in range(blocks)])
    upper = torch.stack([split[k, k + 1] for k in range(blocks - 1)])
    return whole, diagonal[:, None, None, None], upper[:, None, None, None]


@pytest.mark.parametrize(("blocks", "width"), [(2, 1), (7, 1), (5, 3)])
def test_a_chain_of_blocks_is_inverted_like_its_matrix(blocks, width):
    rng = np.random.default_rng(blocks)
    whole, diagonal, upper = banded(rng, blocks, width)
    found, inverse = BlockTridiagonal.of(diagonal, upper), np.linalg.inv(whole)
    assert found.log_determinant.item() == pytest.approx(np.linalg.slogdet(whole)[1])
    vector = rng.normal(size=blocks * width)
    np.testing.assert_allclose(found.times(torch.from_numpy(vector)[None, None, None])[0, 0, 0], inverse @ vector)
    for k in range(blocks):
        at, after = slice(k * width, (k + 1) * width), slice((k + 1) * width, (k + 2) * width)
        np.testing.assert_allclose(found.diagonal[k, 0, 0, 0], inverse[at, at], atol=1e-12)
        if k + 1 < blocks:
            np.testing.assert_allclose(found.upper[k, 0, 0, 0], inverse[at, after], atol=1e-12)
    eye = torch.eye(blocks * width).double()[None]  # noise is linear: its images of unit vectors tell the covariance
    turned = found.noise(eye, (torch.zeros(1, len(eye[0])).long(), torch.zeros(1, len(eye[0])).long()))[0]
    np.testing.assert_allclose(turned.T @ turned, inverse, atol=1e-12)


def chain(rng, hidden, **options):
    """Hidden numbers in a chain with side branches, each with a child that has gaps."""
    names = [f"h{i}" for i in range(hidden)]
    edges = [(names[i - 1 - (i % 7 == 3)], names[i]) for i in range(1, hidden)] + [(h, f"x{h}") for h in names]
    nodes = {name: m.Normal() for name in names} | {f"x{h}": m.Normal() for h in names}
    return make_world(nodes, edges, rng, hidden=tuple(names), **options)


def test_long_chains_have_the_density_of_the_multivariate_normal():
    structure, naturals, batch = chain(np.random.default_rng(0), 40, rows=6, gaps=0.3)
    layout = lay_out(structure, batch)
    assert max(source.group.band for block in layout.blocks for source in block.linear) > 0
    found = log_evidence(naturals, layout)[0]
    mean, covariance, order = linear_moments(structure, naturals)
    for row in range(batch.rows):
        seen = [n for n in order if n in batch.mask and bool(batch.mask[n][0, row, 0])]
        at = [order[n].start for n in seen]
        value = [float(batch.values[n][0, row, 0]) for n in seen]
        truth = multivariate_normal(np.asarray(mean)[at], np.asarray(covariance)[np.ix_(at, at)]).logpdf(value)
        assert found[row].item() == pytest.approx(truth, rel=1e-9)


def slopes(structure, naturals, batch):
    leaves = {n: {k: v.clone().requires_grad_() for k, v in params.items()} for n, params in naturals.items()}
    total_evidence(leaves, lay_out(structure, batch)).sum().backward()
    return {n: {k: v.grad for k, v in params.items()} for n, params in leaves.items()}


def test_long_chains_have_the_gradients_and_draws_of_dense_ones(monkeypatch):
    structure, naturals, batch = chain(np.random.default_rng(1), 30, rows=5, gaps=0.3)
    along = slopes(structure, naturals, batch)
    drawn = posterior_draws(naturals, lay_out(structure, batch), 4000, torch.Generator().manual_seed(0))
    monkeypatch.setattr(piece_plans, "ORDERED_FROM", 10**6)
    dense = lay_out(structure, batch)
    assert all(source.group.band == 0 for block in dense.blocks for source in block.linear)
    torch.testing.assert_close(along, slopes(structure, naturals, batch))
    other = posterior_draws(naturals, dense, 4000, torch.Generator().manual_seed(1))
    for node in ("h0", "h10", "h29"):
        one, two = drawn[node][..., 0], other[node][..., 0]
        assert (one.mean(1) - two.mean(1)).abs().max() < 5 * two.std() / 4000**0.5 * 2**0.5
        assert (one.std(1) / two.std(1) - 1).abs().max() < 0.08
