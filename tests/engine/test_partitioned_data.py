"""Tables in parts: the same estimates as in memory, from Parquet files and Arrow datasets, and what is refused."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine import Adam, Deterministic
from otpdag.engine.data_kind import TableData, size_of
from otpdag.errors import DataError, ModelError

pytest.importorskip("pyarrow")

TIGHT = replace(otp.entropic(), optimiser=Deterministic(tolerance=1e-14))


def mixed_table(rows=3000, seed=0):
    """Text, counts and numbers around a hidden class, with gaps in parents and leaves, and weights."""
    rng = np.random.default_rng(seed)
    z, g = rng.integers(0, 2, rows), rng.integers(0, 3, rows)
    x = rng.normal(np.where(z == 1, 2.0, -2.0))
    frame = pd.DataFrame(
        {
            "place": np.array(["hill", "sea", "town"], dtype=object)[g],
            "visits": rng.poisson(np.where(z == 1, 6.0, 1.5)).astype(float),
            "x": x,
            "y": rng.normal(0.5 * x + g, 1.2),
        }
    )
    for name in frame:
        frame.loc[rng.random(rows) < 0.05, name] = None
    return frame.assign(share=rng.random(rows) + 0.5, note="not a node")


def mixed_model():
    graph = otp.Graph([("z", "visits"), ("z", "x"), ("x", "y"), ("place", "y")], hidden=["z"])
    nodes = {"z": m.Categorical(2), "place": m.Categorical(3), "visits": m.Poisson(), "x": m.Normal(), "y": m.Normal()}
    return otp.Model(graph, nodes)


def difference(one, other):
    ours, theirs = one.params(), other.params()
    return max(np.abs(np.asarray(ours[n][k]) - np.asarray(theirs[n][k])).max() for n in ours for k in ours[n])


def written(frame, folder, files=3, group=400):
    folder.mkdir()
    for number, rows in enumerate(np.array_split(np.arange(len(frame)), files)):
        frame.iloc[rows].to_parquet(folder / f"part-{number}.parquet", row_group_size=group)
    return folder


@pytest.fixture(scope="module")
def table():
    return mixed_table()


@pytest.fixture(scope="module")
def folder(table, tmp_path_factory):
    return written(table, tmp_path_factory.mktemp("parquet") / "table")


@pytest.fixture(scope="module")
def in_memory(table):
    model = mixed_model()
    return otp.fit(model, table, method=TIGHT, weights="share", restarts=2)


@pytest.mark.parametrize("memory", [2**29, 0])
def test_files_are_fitted_as_the_same_table_in_memory(folder, in_memory, memory):
    model = mixed_model()
    parts = otp.Partitioned(folder, block_rows=700, held_rows=1000, memory=memory)
    result = otp.fit(model, parts, method=TIGHT, weights="share", restarts=2)
    assert result.status.converged
    assert result.rows_used == 3000
    assert difference(model, in_memory.model) < 1e-6
    assert result.loss == pytest.approx(in_memory.loss, abs=1e-10)
    assert model.labels("place") == in_memory.model.labels("place") == ("hill", "sea", "town")


def test_a_dataset_a_pattern_and_weights_by_row_are_read_alike(table, folder, in_memory):
    import pyarrow.dataset as pds

    dataset = pds.dataset(sorted(map(str, folder.glob("*.parquet"))))
    kinds = [
        TableData.in_parts(mixed_model(), otp.Partitioned(data, block_rows=1100, held_rows=500), weights=weights)
        for data, weights in [
            (dataset, "share"),
            (str(folder / "*.parquet"), table["share"].to_numpy()),
            (folder, table["share"].reset_index(drop=True).sample(frac=1, random_state=0)),  # by the rows' numbers
            (folder, "share"),
        ]
    ]
    first = kinds[0].parts
    for kind in kinds:
        assert kind.rows == 3000
        for node, value in kind.parts.sample.values.items():
            assert (value == first.sample.values[node]).all()
        assert np.allclose(kind.parts.sample.weight, first.sample.weight, atol=1e-12)
    weights = table["share"] / table["share"].mean()
    parts = [batch.weight[0] for batch in first.parts.each(lambda frame, number: first.reading.batch(frame, number))]
    assert np.allclose(np.concatenate(parts), weights)


def test_the_rows_held_are_those_of_the_table(table, folder):
    kind = TableData.in_parts(mixed_model(), otp.Partitioned(folder, block_rows=640, held_rows=100, seed=3))
    assert kind.batch.rows == 100
    seen = kind.parts.sample.values["y"][0, :, 0][kind.parts.sample.mask["y"][0, :, 0]].numpy()
    assert np.isin(seen, table["y"].dropna()).all()
    assert len(np.unique(seen)) == len(seen)


def test_a_small_dataset_is_an_ordinary_table(folder):
    kind = TableData.in_parts(mixed_model(), folder, weights="share")
    assert isinstance(kind, TableData)
    assert kind.rows == 3000


def test_categories_alone_are_held_as_their_distinct_rows(tmp_path):
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"a": rng.choice(["no", "yes"], 2000), "b": rng.integers(0, 3, 2000)})
    model = otp.Model(otp.Graph([("a", "b")]), {"a": m.Categorical(2), "b": m.Categorical(3)})
    kind = TableData.in_parts(model, otp.Partitioned(written(frame, tmp_path / "t"), block_rows=500, held_rows=100))
    assert isinstance(kind, TableData)
    assert kind.batch.rows == 6
    assert float(kind.batch.weight.sum()) == kind.rows == 2000
    other = otp.Model(model.graph, dict(model.mechanisms))
    otp.fit(model, kind)
    otp.fit(other, frame)
    assert difference(model, other) < 1e-6


def test_the_curvature_of_the_rows_at_hand_makes_few_passes(folder):
    result = otp.fit(mixed_model(), otp.Partitioned(folder, held_rows=1500), restarts=2)
    assert len(result.history) <= 8
    assert [stage.name for stage in result.stages][-2:] == ["best start, part", "best start"]


def test_standard_errors_are_those_of_memory(folder, in_memory):
    result = otp.fit(mixed_model(), small(folder), method=TIGHT, weights="share", restarts=2)
    ours, theirs = (one.standard_errors()["std_error"].to_numpy(dtype=float) for one in (result, in_memory))
    assert np.isfinite(ours).any()
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)


# -- what is refused ---------------------------------------------------------------------------------------------------


def small(folder, **settings):
    return otp.Partitioned(folder, block_rows=700, held_rows=1000, **settings)


def test_a_path_that_does_not_exist():
    with pytest.raises(DataError, match="'nowhere' must be a file, folder or pattern of files that exist"):
        otp.fit(mixed_model(), "nowhere")


def test_other_files_are_refused(tmp_path):
    (tmp_path / "table.csv").write_text("x\n1\n")
    with pytest.raises(DataError, match=r"endings \.parquet.*pd\.read_csv"):
        otp.fit(mixed_model(), tmp_path / "table.csv")
    (tmp_path / "broken.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="not parquet"):
        otp.fit(mixed_model(), tmp_path / "broken.parquet")


def test_a_missing_column(table, tmp_path):
    with pytest.raises(DataError, match="column 'y' is missing; the dataset has the columns"):
        otp.fit(mixed_model(), small(written(table.drop(columns="y"), tmp_path / "t")))


def test_a_column_of_a_hidden_node(table, tmp_path):
    with pytest.raises(DataError, match="node 'z' is hidden, but the dataset has a column 'z'"):
        otp.fit(mixed_model(), small(written(table.assign(z=0), tmp_path / "t")))


def test_an_empty_dataset(table, tmp_path):
    with pytest.raises(DataError, match="at least 2 rows; the dataset has 0"):
        otp.fit(mixed_model(), small(written(table.iloc[:0], tmp_path / "t", files=1)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="must hold files"):
        otp.fit(mixed_model(), tmp_path / "empty")


def test_files_with_other_columns_or_types(table, tmp_path):
    folder = written(table, tmp_path / "t", files=2)
    table.drop(columns="x").to_parquet(folder / "part-9.parquet")
    with pytest.raises(DataError, match=r"part-9\.parquet' lacks 'x'"):
        otp.fit(mixed_model(), small(folder))
    table.assign(x="text").to_parquet(folder / "part-9.parquet")
    with pytest.raises(DataError, match="differ in the type of a column"):
        otp.fit(mixed_model(), small(folder))


def test_text_in_a_column_of_numbers(table, tmp_path):
    with pytest.raises(DataError, match="column 'x' must hold numbers; found 'text' in row 0"):
        otp.fit(mixed_model(), small(written(table.assign(x="text"), tmp_path / "t")))


def test_values_outside_their_space_are_found_in_every_part(table, tmp_path):
    table = table.copy()
    table.loc[2500, "visits"] = -1.0
    with pytest.raises(DataError, match=r"column 'visits' must hold .* in row 400 \(counted from row 2100"):
        otp.fit(mixed_model(), small(written(table, tmp_path / "t")))


def test_a_column_without_a_value(table, tmp_path):
    with pytest.raises(DataError, match="column 'y' must hold at least one value; all 3000 are missing"):
        otp.fit(mixed_model(), small(written(table.assign(y=np.nan), tmp_path / "t")))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("nothing", "weights must name a column"),
        (np.ones(7), "one entry for each of the 3000 rows"),
        ("note", "number"),
    ],
)
def test_weights_that_are_none(folder, weights, message):
    with pytest.raises(DataError, match=message):
        otp.fit(mixed_model(), small(folder), weights=weights)


def test_methods_that_are_no_sum_over_rows(folder):
    with pytest.raises(ModelError, match="compares the rows with the model as a whole"):
        otp.fit(mixed_model(), small(folder), method="transport")


def pair_model():
    return otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})


DRAWN = otp.Method(
    "drawn",
    otp.objective.Objective(eps=1.0),
    otp.objective.Drawn(noise="marginal", batch_size=64, hidden_layers=(8,)),
    Adam(steps=400, learning_rate=0.05),
)
"""Maximum likelihood by minibatches, as far as gaps are drawn."""


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_minibatches_are_of_the_whole_table(tmp_path, weighted):
    rng = np.random.default_rng(3)
    x = np.sort(rng.normal(size=10_000))  # the order of rows must not matter
    table = pd.DataFrame({"x": x, "y": 1.5 * x + rng.normal(size=10_000), "share": np.where(x > 0, 1.5, 0.5)})
    table.to_parquet(tmp_path / "table.parquet")
    weights = "share" if weighted else None
    parts = otp.Partitioned(tmp_path / "table.parquet", block_rows=5000, held_rows=150)
    model = pair_model()
    result = otp.fit(model, parts, method=DRAWN, weights=weights, seed=1, restarts=1)
    mean = np.average(x, weights=table["share"] if weighted else None)
    assert result.rows_used == 10_000
    assert result.method.name == "drawn"
    held = TableData.in_parts(pair_model(), parts, weights=weights).batch
    of_held = float((held.weight * held.values["x"][..., 0]).sum() / held.weight.sum())
    assert abs(of_held - mean) > 0.06  # so that the rows at hand alone would be noticed
    assert abs(model.params()["x"]["loc"].item() - mean) < 0.03
    assert model.params()["y"]["weight"].item() == pytest.approx(1.5, abs=0.04)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_a_run_by_minibatches_goes_on_where_it_was_stopped(folder, tmp_path):
    settings = {"method": "paper", "steps": 60, "seed": 2, "restarts": 2}
    whole = otp.fit(mixed_model(), small(folder), **settings)
    seen = []

    def stop(record):
        seen.append(record)
        return len(seen) == 40

    path = tmp_path / "run.checkpoint"
    otp.fit(mixed_model(), small(folder), **settings, callbacks=[stop], checkpoint=path, checkpoint_seconds=1e-3)
    assert path.exists()
    again = otp.fit(mixed_model(), small(folder), **settings, checkpoint=path)
    assert difference(again.model, whole.model) == 0


def test_rows_are_picked_by_their_numbers(folder, table):
    weights = np.arange(3000) + 1.0
    kind = TableData.in_parts(mixed_model(), small(folder), weights=weights)
    numbers = np.random.default_rng(0).permutation(3000)[:50]
    picked = kind.parts.picked(torch.from_numpy(numbers))
    wanted = table["visits"].to_numpy(dtype=float)[numbers]
    assert np.array_equal(picked.mask["visits"][0, :, 0].numpy(), ~np.isnan(wanted))
    assert np.array_equal(picked.values["visits"][0, :, 0].numpy()[~np.isnan(wanted)], wanted[~np.isnan(wanted)])
    assert np.allclose(picked.weight[0].numpy(), weights[numbers] / weights.mean())


def test_robust_fits_need_rows_at_hand(folder):
    with pytest.raises(ModelError, match="robust='outliers' is not for tables in parts"):
        otp.fit(mixed_model(), small(folder), robust=True)


def test_intervals_say_what_to_do_instead(folder):
    result = otp.fit(mixed_model(), small(folder), restarts=1)
    with pytest.raises(ModelError, match="random part of them in memory"):
        result.intervals()


def test_sequences_are_refused(folder):
    model = otp.Model(otp.Graph([otp.lag("x", "x")]), {"x": m.Normal()})
    with pytest.raises(DataError, match="sequences are fitted in memory"):
        otp.fit(model, folder)


def test_the_size_of_an_object_counts_shared_tensors_once():
    from otpdag.data import Batch

    shared = torch.zeros(1, 100, 1, dtype=torch.float64)
    batch = Batch({"x": shared, "y": shared}, {}, torch.ones(1, 100, dtype=torch.float64))
    assert size_of(batch) == 1600


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (
            "x",
            1e160,
            "'x' must hold numbers of at most 1e.150 in size; found 1e.160 in row 300 .counted from row 1200",
        ),
        ("w", 1e308, "weights must have a mean that a number can hold; their sum over all rows is inf"),
        ("w", 5e-324, "weights must have a mean that a number can hold"),
    ],
)
def test_numbers_that_no_square_can_hold_are_refused_as_in_memory(column, value, message, tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=2000), "w": np.ones(2000)})
    frame.loc[1500 if column == "x" else slice(None), column] = value
    frame.loc[1501, "x"] = np.nan
    frame.to_parquet(tmp_path / "table.parquet")
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    parts = otp.Partitioned(tmp_path / "table.parquet", held_rows=500, block_rows=400)
    with np.errstate(over="ignore"), pytest.raises(otp.DataError, match=message):
        otp.fit(model, parts, weights="w")


def test_robust_fits_of_files_say_what_to_do_instead(tmp_path):
    pd.DataFrame({"x": np.random.default_rng(0).normal(size=2000)}).to_parquet(tmp_path / "table.parquet")
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    parts = otp.Partitioned(tmp_path / "table.parquet", held_rows=500)
    with pytest.raises(otp.ModelError, match="is not for tables in parts: fit a random part of the rows in memory"):
        otp.fit(model, parts, robust=True)


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
@pytest.mark.parametrize(("memory", "early"), [(0, 1), (2**29, 2)])
def test_a_fit_of_parts_that_was_stopped_ends_bit_for_bit_where_it_would_have_ended(tmp_path, memory, early):
    mixed_table(1500).to_parquet(tmp_path / "table.parquet")
    parts = otp.Partitioned(tmp_path / "table.parquet", block_rows=400, held_rows=600, memory=memory)

    def end(**options):
        model = mixed_model()
        return otp.fit(model, parts, restarts=2, weights="share", **options), model.params()

    whole, expected = end()
    path = tmp_path / "run.checkpoint"
    step = (len(whole.history) - 1) // early  # the last one, or one in the middle
    end(checkpoint=path, callbacks=[lambda record: record["step"] + 1 >= step])
    resumed, found = end(checkpoint=path)
    assert resumed.loss == whole.loss
    for node, own in expected.items():
        for name, value in own.items():
            np.testing.assert_array_equal(found[node][name], value)
