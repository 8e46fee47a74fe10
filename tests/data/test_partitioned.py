"""Files as one table: which of them count, what their columns are, and what Arrow filters."""

import numpy as np
import pandas as pd
import pytest

from otpdag.data.partitioned import ArrowParts, Partitioned, arrow_dataset
from otpdag.errors import DataError

pa = pytest.importorskip("pyarrow")
pds = pytest.importorskip("pyarrow.dataset")


def table(rows=12):
    rng = np.random.default_rng(0)
    return pd.DataFrame({"x": rng.normal(size=rows), "k": rng.choice(["a", "b"], rows)})


def read(data, block_rows=5):
    frames = list(ArrowParts(arrow_dataset(data), block_rows).each(lambda frame, number: frame))
    return pd.concat(frames, ignore_index=True)


def test_files_that_begin_with_a_dot_or_an_underscore_are_none_of_the_table(tmp_path):
    """As pandas, Spark and Dask have it: logs, and what another process has not finished."""
    table().to_parquet(tmp_path / "part-0.parquet")
    for aside in ("_temporary/part-0.parquet", ".part-1.parquet", "_delta_log/checkpoint.parquet"):
        (tmp_path / aside).parent.mkdir(exist_ok=True)
        table().to_parquet(tmp_path / aside)
    pd.testing.assert_frame_equal(read(tmp_path), table(), check_dtype=False)


def test_folders_may_be_named_by_a_column(tmp_path):
    table().to_parquet(tmp_path / "hive", partition_cols=["k"])
    frame = read(tmp_path / "hive")
    expected = table().sort_values("k", kind="stable", ignore_index=True)
    assert frame["k"].tolist() == expected["k"].tolist()
    np.testing.assert_array_equal(frame["x"], expected["x"])


def test_text_in_one_file_and_categories_in_another_are_text(tmp_path):
    table().to_parquet(tmp_path / "a.parquet")
    table().astype({"k": "category"}).to_parquet(tmp_path / "b.parquet")
    assert read(tmp_path)["k"].tolist() == 2 * table()["k"].tolist()
    table().assign(k=1.5).to_parquet(tmp_path / "c.parquet")
    with pytest.raises(DataError, match="differ in the type of a column"):
        arrow_dataset(tmp_path)


def test_a_dataset_may_be_filtered(tmp_path):
    table().to_parquet(tmp_path / "a.parquet")
    few = pds.dataset(tmp_path / "a.parquet").filter(pds.field("x") < 0)
    expected = table().query("x < 0").reset_index(drop=True)
    pd.testing.assert_frame_equal(read(few), expected, check_dtype=False)


def test_blocks_have_as_many_rows_as_they_should(tmp_path):
    table().to_parquet(tmp_path / "a.parquet")
    sizes = ArrowParts(arrow_dataset(tmp_path / "a.parquet"), 5).each(lambda frame, number: len(frame))
    assert list(sizes) == [5, 5, 2]


@pytest.mark.parametrize(
    ("sizes", "message"), [({"block_rows": 1}, "block_rows must"), ({"memory": -1}, "memory must")]
)
def test_sizes_that_hold_nothing_are_refused(sizes, message):
    with pytest.raises(DataError, match=message):
        Partitioned("table.parquet", **sizes)
