"""Blocks of rows: pieces alike are one, and how rows are cut into blocks changes nothing."""

import numpy as np
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.likelihood.elimination import EliminationOptions, lay_out, log_evidence, moved, total_evidence
from otpdag.structure import Structure
from tests.likelihood.elimination.worlds import gappy, make_world, mixed_nodes


def test_equal_pieces_of_different_rows_are_one():
    graph = otp.Graph([("a", "b"), ("b", "c"), ("c", "d"), ("d", "e")])
    structure = Structure.bind(graph, {n: m.Bernoulli() for n in "abcde"})
    rows = 400
    rng = np.random.default_rng(0)
    values = {n: torch.eye(2).double()[torch.as_tensor(rng.integers(2, size=rows))].unsqueeze(0) for n in "abcde"}
    batch = gappy(structure, values, rng, 0.0)
    batch.mask["b"][0, ::2] = False  # b unknown: a and c tell of it, whatever e shows or lacks
    batch.mask["e"][0, ::3] = False
    layout = lay_out(structure, batch)
    assert layout.pieces == 200
    assert layout.distinct == 4


def test_blocks_of_rows_change_nothing():
    rng = np.random.default_rng(0)
    nodes, edges = mixed_nodes()
    structure, naturals, batch = make_world(nodes, edges, rng, rows=200, gaps=0.2)
    whole = moved(naturals, lay_out(structure, batch))
    parts = moved(naturals, lay_out(structure, batch, EliminationOptions(memory=2**16)))
    assert len(parts.blocks) > len(whole.blocks)
    torch.testing.assert_close(log_evidence(naturals, parts), log_evidence(naturals, whole))
    torch.testing.assert_close(total_evidence(naturals, parts), total_evidence(naturals, whole))
