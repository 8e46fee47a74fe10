"""Fits of real tables that used to go on and on."""

import numpy as np
import pytest

import otpdag as otp
from otpdag import mechanisms as m


@pytest.mark.slow
def test_a_table_whose_grids_went_round_in_circles_comes_to_an_end():
    """Scales of an election study with a hidden number: each new grid let the optimiser exploit it."""
    data = pytest.importorskip("statsmodels.api").datasets.anes96.load_pandas().data
    columns = ["selfLR", "ClinLR", "DoleLR", "PID", "vote", "income"]
    table = data.mask(np.random.default_rng(0).random(data.shape) < 0.1)[columns]
    graph = otp.Graph([("u", column) for column in columns], hidden=["u"])
    model = otp.Model.from_frame(graph, table, hidden={"u": m.Normal()})
    result = otp.fit(model, table, seed=0)
    assert result.status.converged
    assert [stage.name for stage in result.stages].count("moved grids") <= 4
    assert result.loss == pytest.approx(10.06, abs=0.02)
    assert model.score(table, kind="likelihood") == pytest.approx(-result.loss, abs=0.01)
