"""What sums may cost: what is tried first, what is said where exact sums cost too much."""

import pytest
import torch

from otpdag.errors import ModelError
from otpdag.likelihood.elimination import Budget, lay_out, lay_out_within, log_evidence, told
from otpdag.likelihood.elimination import evidence as budget
from tests.likelihood.elimination.worlds import lattice


def test_a_budget_that_is_too_small_says_what_exact_sums_would_take():
    structure, _, batch = lattice(4, 0.5)
    layout = lay_out_within(structure, batch, Budget(largest_table=8))
    assert layout is not None
    assert layout.beyond is not None
    assert layout.beyond.rows == batch.rows
    assert layout.beyond.table == lay_out(structure, batch).largest_table
    assert "20 of 20 rows" in told(layout)
    assert "belief propagation" in told(layout)
    with pytest.raises(ModelError, match="a table of 32 entries for one row; at most 8 are summed"):
        lay_out_within(structure, batch, Budget(largest_table=8, approximate=False))
    assert "exact" in told(lay_out(structure, batch))


def test_rows_that_need_large_tables_may_be_too_many(monkeypatch):
    structure, naturals, batch = lattice(4, 0.5)
    exact = lay_out(structure, batch)
    assert lay_out_within(structure, batch, Budget(entries=1)).beyond is None  # many small rows are fine
    monkeypatch.setattr(budget, "LARGE_ROW", 100)
    monkeypatch.setattr(budget, "SPLIT_TABLES", (16, 8))
    assert lay_out_within(structure, batch, Budget(entries=exact.elements)).beyond is None
    found = lay_out_within(structure, batch, Budget(entries=exact.elements - 1))
    assert found.beyond.entries > 0
    assert found.largest_table <= 16 < exact.largest_table
    torch.testing.assert_close(log_evidence(naturals, found), log_evidence(naturals, exact), rtol=0, atol=0.02)
