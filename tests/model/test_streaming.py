"""Filled cells, posteriors and log-likelihoods block by block are those of the whole table."""

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.errors import DataError, ModelError

pq = pytest.importorskip("pyarrow.parquet")


def table(rows=300):
    rng = np.random.default_rng(0)
    z = rng.integers(0, 2, rows)
    frame = pd.DataFrame({"x": rng.normal(4.0 * z), "y": rng.normal(-4.0 * z), "k": np.where(z == 1, "one", "zero")})
    frame = frame.mask(rng.random(frame.shape) < 0.1)
    return frame.assign(id=np.arange(rows), comment=[None] * 200 + ["late"] * (rows - 200))


@pytest.fixture(scope="module")
def model():
    graph = otp.Graph([("z", "x"), ("z", "y"), ("z", "k")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal(), "y": m.Normal(), "k": m.Categorical(2)})
    otp.fit(model, table(), restarts=2)
    return model


@pytest.fixture
def path(tmp_path):
    table().to_parquet(tmp_path / "table.parquet")
    return tmp_path / "table.parquet"


def test_one_block_is_filled_as_the_model_fills_it(model, path, tmp_path):
    cells = otp.impute_to(model, path, tmp_path / "out.parquet", seed=3)
    ours, theirs = pd.read_parquet(tmp_path / "out.parquet"), model.impute(table(), seed=3)
    pd.testing.assert_frame_equal(ours[["x", "y", "k"]], theirs[["x", "y", "k"]], check_dtype=False)
    assert cells == int(table()[["x", "y", "k"]].isna().to_numpy().sum())


def test_blocks_keep_what_is_seen_and_other_columns(model, path, tmp_path):
    otp.impute_to(model, otp.Partitioned(path, block_rows=70), tmp_path / "out.parquet", draws=20)
    ours, given = pd.read_parquet(tmp_path / "out.parquet"), table()
    assert list(ours.columns) == list(given.columns)
    assert (ours["id"] == given["id"]).all()
    assert ours["comment"].isna().tolist() == given["comment"].isna().tolist()
    assert not ours[["x", "y", "k"]].isna().any(axis=None)
    seen = given["x"].notna()
    assert (ours["x"][seen] == given["x"][seen]).all()


def test_columns_of_no_node_are_carried_through_as_they_are(model, tmp_path):
    """Numbers that a float cannot hold, gaps in whole numbers, and text that only later blocks have."""
    names = pd.array(np.arange(300) + 2**60 + 1, dtype="Int64")
    given = table().assign(id=names)
    given.loc[203, "id"] = pd.NA
    given.to_parquet(tmp_path / "table.parquet")
    for rows in (70, 1000):
        otp.impute_to(model, otp.Partitioned(tmp_path / "table.parquet", block_rows=rows), tmp_path / "out.parquet")
        before, after = (pq.read_table(tmp_path / name) for name in ("table.parquet", "out.parquet"))
        assert before.schema.types == after.schema.types
        assert [before[name].equals(after[name]) for name in ("id", "comment")] == [True, True]


@pytest.mark.parametrize(("gaps", "kind"), [(False, "int64"), (True, "double")])
def test_whole_numbers_with_gaps_are_filled_with_fractions(gaps, kind, tmp_path):
    rng = np.random.default_rng(1)
    state = rng.integers(0, 2, 200)
    given = pd.DataFrame({"n": rng.poisson(3 + 9 * state), "k": state}).astype("Int64")
    given.loc[150:160, "k"] = pd.NA
    if gaps:
        given.loc[150:170, "n"] = pd.NA
    model = otp.Model(otp.Graph([("k", "n")]), {"k": m.Categorical(2), "n": m.Poisson()})
    otp.fit(model, given)
    given.to_parquet(tmp_path / "table.parquet")
    otp.impute_to(model, otp.Partitioned(tmp_path / "table.parquet", block_rows=100), tmp_path / "out.parquet")
    out = pq.read_table(tmp_path / "out.parquet")
    assert [str(out.schema.field(name).type) for name in ("n", "k")] == [kind, "int64"]
    assert out["n"].null_count == out["k"].null_count == 0
    assert out["n"].to_pandas()[:150].tolist() == given["n"][:150].tolist()


def test_errors_count_rows_of_the_table(model, tmp_path):
    table().assign(k=table()["k"].where(table().index != 205, "two")).to_parquet(tmp_path / "table.parquet")
    parts = otp.Partitioned(tmp_path / "table.parquet", block_rows=70)
    with pytest.raises(DataError, match=r"'two'.*counted from row 140 of the table"):
        otp.impute_to(model, parts, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("work", [otp.impute_to, otp.posterior_to])
def test_no_draws_are_refused(work, model, path, tmp_path):
    with pytest.raises(ModelError, match="draws must be"):
        work(model, path, tmp_path / "out.parquet", draws=0)


def test_posteriors_of_blocks_count_rows_over_the_table(model, path, tmp_path):
    rows = otp.posterior_to(model, otp.Partitioned(path, block_rows=70), tmp_path / "out.parquet", draws=50)
    drawn = pd.read_parquet(tmp_path / "out.parquet")
    assert rows == 300
    assert drawn["row"].tolist() == np.repeat(np.arange(300), 50).tolist()
    share = drawn.groupby("row")["z"].mean().to_numpy()
    assert np.abs(share - model.predict_proba(table(), "z")[1].to_numpy()).max() < 0.3
    assert np.abs(share - model.predict_proba(table(), "z")[1].to_numpy()).mean() < 0.02


def test_log_likelihoods_have_the_mean_of_the_score(model, path, tmp_path):
    mean = otp.score_to(model, otp.Partitioned(path, block_rows=70), tmp_path / "out.parquet")
    assert mean == pytest.approx(model.score(table(), kind="likelihood"), rel=1e-12)
    assert pd.read_parquet(tmp_path / "out.parquet")["log_likelihood"].mean() == pytest.approx(mean, rel=1e-12)


def test_what_cannot_be_read_leaves_no_file(model, path, tmp_path):
    table().drop(columns="y").to_parquet(path)
    with pytest.raises(DataError, match="lacks the column 'y'"):
        otp.impute_to(model, path, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


def test_sequences_and_dask_frames_have_other_ways(model, path, tmp_path):
    dynamic = otp.Model(otp.Graph([otp.lag("x", "x")]), {"x": m.Normal()})
    with pytest.raises(ModelError, match="depend on each other"):
        otp.impute_to(dynamic, path, tmp_path / "out.parquet")
    dd = pytest.importorskip("dask.dataframe")
    with pytest.raises(DataError, match=r"map_partitions"):
        otp.score_to(model, dd.from_pandas(table(), npartitions=2), tmp_path / "out.parquet")
