"""Tables of any kind and library, in memory and in files."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch, Schema, as_frame, column_type, encode, known_table
from otpdag.data.columns import cell_names, column_title
from otpdag.data.parts import table_bytes
from otpdag.data.reading import read_table
from otpdag.errors import DataError, ModelError
from otpdag.graph import Graph
from otpdag.spaces import Discrete, Image, Real, Space


def schema_of(data: Any = None, **spaces: Space) -> Schema:
    return Schema.of(spaces, Graph([], nodes=list(spaces)), data)


def read(data: Any, partial: bool = False, **spaces: Space) -> Batch:
    return encode(data, schema_of(data, **spaces), hidden=(), partial=partial)


def test_frozen_arrays_can_be_read() -> None:
    array = np.ones((4, 2))
    array.flags.writeable = False
    assert read(array, x=Real(2)).rows == 4


def test_tables_of_all_kinds_agree() -> None:
    spaces = {"a": Discrete(2), "v": Real(2)}
    array = np.array([[0, 1.5, 2.5], [1, np.nan, 0.5], [np.nan, 1.0, 1.0]])
    tables = [
        array,
        torch.tensor(array, requires_grad=True),
        array.astype(object),
        pd.DataFrame(array, columns=["a", "v.0", "v.1"]),
        {"a": array[:, 0], "v": array[:, 1:]},
        {"a": torch.tensor(array[:, :1]), "v": torch.tensor(array[:, 1:])},
        {"a": [0, 1, None], "v.0": [1.5, None, 1.0], "v.1": (2.5, 0.5, 1.0), "unused": ["x"]},
        {"a": pd.Series([0, 1, None], index=[7, 8, 9]), "v": array[:, 1:].tolist()},
    ]
    first = read(tables[0], **spaces)
    for table in tables[1:]:
        other = read(table, **spaces)
        for node in spaces:
            assert torch.equal(first.values[node], other.values[node])
            assert torch.equal(first.mask[node], other.mask[node])


def test_one_dimensional_array_for_one_cell() -> None:
    assert read(np.arange(3.0), x=Real()).values["x"].tolist() == [[[0], [1], [2]]]


def test_images_are_flattened() -> None:
    pixels = np.random.default_rng(0).random((5, 3, 4, 2))
    batch = read({"image": pixels}, image=Image(3, 4, 2))
    assert np.array_equal(batch.values["image"][0], pixels.reshape(5, -1))


def test_partial_tables() -> None:
    spaces = {"a": Discrete(2), "v": Real(2), "x": Real()}
    batch = read({"a": "yes", "v.1": [2.0]}, partial=True, **spaces)
    assert batch.rows == 1
    assert batch.mask["v"].tolist() == [[[False, True]]]
    assert batch.mask["x"].tolist() == [[[False]]]
    assert batch.values["v"].tolist() == [[[0.0, 2.0]]]
    table = pd.DataFrame({"a": [None, None], "v.0": [np.nan, np.nan]})
    assert not any(mask.any() for mask in read(table, partial=True, **spaces).mask.values())


def test_partial_table_without_a_known_column() -> None:
    assert read(pd.DataFrame({"other": [1, 2, 3]}), partial=True, x=Real()).rows == 3


def test_missing_column() -> None:
    table = pd.DataFrame({"a": [1, 2], "v.0": [1, 2]})
    with pytest.raises(DataError, match=r"^column 'x' is missing; the table has the columns 'a', 'v.0'\. If"):
        read(table, x=Real())
    with pytest.raises(DataError, match=r"column 'v.1' of node 'v' is missing; .* If 'v' is never seen, make it"):
        read(table, v=Real(2))
    with pytest.raises(DataError, match=r"column 'x' is missing; the table has the columns 'a'"):
        read({"a": [1, 2]}, x=Real())


@pytest.mark.parametrize("name", ["load", "load.1"])
def test_hidden_node_with_a_column(name: str) -> None:
    graph = Graph([("load", "x")], hidden=["load"])
    schema = Schema.of({"load": Real(2), "x": Real()}, graph)
    message = f"node 'load' is hidden, but the table has a column '{name}'; drop the column or take the node out"
    for table in (pd.DataFrame({name: [1, 2], "x": [1, 2]}), {name: [1, 2], "x": [1, 2]}):
        with pytest.raises(DataError, match=message):
            encode(table, schema, hidden=graph.hidden)


def test_duplicate_columns() -> None:
    table = pd.DataFrame([[1, 2, 3], [4, 5, 6]], columns=["x", "x", "y"])
    with pytest.raises(DataError, match=r"column 'x' must be there once; the table has several of that name"):
        read(table, x=Real())
    assert read(table, y=Real()).rows == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.ones((3, 3)), r"data must have 2 columns \('x', 'y'\); got shape \(3, 3\)"),
        (np.ones(3), r"data must have 2 columns \('x', 'y'\); got shape \(3,\)"),
        ([[1, 2], [3, 4]], r"data must be a DataFrame, a mapping .* torch array; got list$"),
        ("table.csv", r"data must be a DataFrame.*; got str; read a file with pandas"),
        ({"x": [1, 2], "y": [1, 2, 3]}, r"data must have the same number of rows .*; got \{'x': 2, 'y': 3\}"),
        ({"x": np.ones((2, 2)), "y": [1, 2]}, r"data\['x'\] must have shape \(rows, 1\).*; got \(2, 2\)"),
    ],
)
def test_bad_tables(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        encode(data, schema_of(x=Real(), y=Real()), hidden=())


def test_a_node_of_several_cells_has_numbered_columns():
    assert cell_names("x", Real().cells) == ("x",)
    assert cell_names("k", Discrete(5).cells) == ("k",)
    assert cell_names("x", Real(3).cells) == ("x.0", "x.1", "x.2")


def test_messages_name_the_column_and_its_node_where_that_is_another():
    assert column_title("x", "x") == "column 'x'"
    assert column_title("x", "x.1") == "column 'x.1' of node 'x'"


CHAIN = otp.Graph([("k", "x")])
COLUMNS = {"k": ["a", "b", None, "b", "a", "b"], "x": [1.5, 2.5, 0.5, None, 2.25, 1.0]}


@pytest.mark.parametrize("library", ["polars", "pyarrow"])
def test_tables_of_other_libraries_give_the_same_fit(library: str) -> None:
    module = pytest.importorskip(library)
    table = module.DataFrame(COLUMNS) if library == "polars" else module.table(COLUMNS)
    pd.testing.assert_frame_equal(as_frame(table), pd.DataFrame(COLUMNS), check_dtype=False)
    models = [otp.Model.from_frame(CHAIN, data) for data in (table, pd.DataFrame(COLUMNS))]
    otp.fit(models[0], table)
    otp.fit(models[1], pd.DataFrame(COLUMNS))
    for name in ("loc", "scale"):
        np.testing.assert_allclose(models[0].params()["x"][name], models[1].params()["x"][name])
    assert models[0].impute(table).notna().all(axis=None)
    assert models[0].score(table, kind="likelihood") == models[1].score(pd.DataFrame(COLUMNS), kind="likelihood")


def test_lazy_tables_are_refused() -> None:
    polars = pytest.importorskip("polars")
    with pytest.raises(DataError, match=r"a lazy LazyFrame: collect\(\) or compute\(\) it first"):
        known_table(polars.LazyFrame(COLUMNS))


def test_a_dictionary_makes_a_model_and_bad_ones_are_refused() -> None:
    assert otp.Model.from_frame(CHAIN, COLUMNS).spaces["k"].width == 2
    with pytest.raises(DataError, match="data must be a dictionary of columns of one length"):
        otp.Model.from_frame(CHAIN, {"k": ["a"], "x": [1.0, 2.0]})
    with pytest.raises(DataError, match="data must be a DataFrame or a dictionary of columns; got int"):
        otp.Model.from_frame(CHAIN, 3)
    with pytest.raises(ModelError, match=r"graph must be an otp.Graph, and comes before the data; got DataFrame"):
        otp.Model.from_frame(pd.DataFrame(COLUMNS), CHAIN)


def test_columns_of_one_name_are_refused() -> None:
    doubled = pd.DataFrame([[0, 1.0, 2.0], [1, 2.0, 3.0]], columns=["k", "x", "x"])
    with pytest.raises(DataError, match="column 'x' must be there once; the table has several of that name"):
        otp.Model.from_frame(CHAIN, doubled)
    model = otp.Model(CHAIN, {"k": m.Categorical(2), "x": m.Normal()})
    with pytest.raises(DataError, match="column 'x' must be there once; the table has several of that name"):
        otp.fit(model, doubled)
    model.set_params({"k": {"probs": [0.5, 0.5]}, "x": {"loc": [0.0, 1.0], "scale": [1.0, 1.0]}})
    for use in (model.distance, model.impute, model.check):
        with pytest.raises(DataError, match="column 'x' must be there once"):
            use(doubled)


def test_read_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    table.to_csv(tmp_path / "table.csv", index=False)
    pd.testing.assert_frame_equal(read_table(str(tmp_path / "table.csv")), table)
    with pytest.raises(DataError, match=r"path must end in \.csv, \.tsv, .*; got 'table.xls'"):
        read_table("table.xls")
    with pytest.raises(DataError, match=r"path must be a file that exists; got 'nowhere.csv'"):
        read_table("nowhere.csv")
    (tmp_path / "doubled.csv").write_text("a,b,a\n1,2,3\n")
    with pytest.raises(DataError, match=r"doubled.csv' must have each column once; found 'a' twice"):
        read_table(tmp_path / "doubled.csv")
    (tmp_path / "table.parquet").write_bytes(b"")
    for name in ("pyarrow", "fastparquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=r"table.parquet' needs the package pyarrow: pip install pyarrow"):
        read_table(tmp_path / "table.parquet")


def test_read_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    table = pd.DataFrame({"a": [1, 2]})
    table.to_parquet(tmp_path / "table.parquet")
    pd.testing.assert_frame_equal(read_table(tmp_path / "table.parquet"), table)


def test_the_bytes_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    path = tmp_path / "table.csv"
    path.write_bytes(table_bytes(table, path))
    assert path.read_text() == "a,b\n1,x\n2,y\n"
    assert read_table(path).equals(table)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "fastparquet", None)
    with pytest.raises(DataError, match="needs the package pyarrow"):
        table_bytes(table, tmp_path / "table.parquet")


# -- files of all kinds ------------------------------------------------------------------------------------------------


def written(folder: Path, name: str, text: str, encoding: str = "utf-8") -> Path:
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize(
    ("name", "text", "encoding", "expected", "told"),
    [
        (
            "a.csv",
            "x;y\n1,5;a\n2,25;b\n",
            "utf-8",
            {"x": [1.5, 2.25], "y": ["a", "b"]},
            ["semicolons", "decimal commas"],
        ),
        ("a.csv", "x\ty\n1.5\ta\n", "utf-8", {"x": [1.5], "y": ["a"]}, ["tabs"]),
        ("a.txt", "x|y\n1|2\n", "utf-8", {"x": [1], "y": [2]}, ["bars"]),
        ("a.dat", "x   y\n1   2\n3 4\n", "utf-8", {"x": [1, 3], "y": [2, 4]}, ["blanks"]),
        ("a.csv", "ort,x\nKöln,1\n", "cp1252", {"ort": ["Köln"], "x": [1]}, ["cp1252"]),
        ("a.csv", "ort,x\nKöln,1\n", "utf-8-sig", {"ort": ["Köln"], "x": [1]}, []),
        ("a.csv", "ort;x\nKöln;1\n", "utf-16", {"ort": ["Köln"], "x": [1]}, ["semicolons", "utf-16"]),
        (
            "a.csv",
            "plz,x\n01067,1\n80331,2\n",
            "utf-8",
            {"plz": ["01067", "80331"], "x": [1, 2]},
            ["kept as text: 'plz'"],
        ),
        ("a.csv", 'x,y\n"1,234",5\n"12,345",6\n', "utf-8", {"x": [1234, 12345], "y": [5, 6]}, ["grouped by ','"]),
        ("a.csv", 'x,y\n"1,5",5\n"12,25",6\n', "utf-8", {"x": [1.5, 12.25], "y": [5, 6]}, ["decimal commas"]),
        ("a.csv", "x;y\n1.234,5;1\n2.000,25;2\n", "utf-8", {"x": [1234.5, 2000.25], "y": [1, 2]}, ["grouped by '.'"]),
        ("a.csv", "# made by hand\n# today\nx,y\n1,2\n", "utf-8", {"x": [1], "y": [2]}, ["2 lines before"]),
        ("a.csv", "sep=;\nx;y\n1;2\n", "utf-8", {"x": [1], "y": [2]}, ["semicolons", "1 lines before"]),
        ("a.csv", "x,y\n1,\n,2\n", "utf-8", {"x": [1, None], "y": [None, 2]}, []),
    ],
)
def test_texts_are_recognised_and_it_is_said(tmp_path, name, text, encoding, expected, told):
    table = read_table(written(tmp_path, name, text, encoding))
    pd.testing.assert_frame_equal(table, pd.DataFrame(expected), check_dtype=False)
    said = ", ".join(table.attrs["read_as"])
    assert all(one in said for one in told)
    assert bool(said) == bool(told)


def test_what_is_given_counts(tmp_path):
    path = written(tmp_path, "a.csv", "x;y\n1,500;2\n2,250;3\n")
    assert read_table(path)["x"].tolist() == [1.5, 2.25]
    assert read_table(path, decimal=".")["x"].tolist() == [1500, 2250]
    assert read_table(path, separator=",").columns.tolist() == ["x;y"]
    with pytest.raises(DataError, match="decimal must be"):
        read_table(path, decimal=";")


def test_files_of_other_programs(tmp_path):
    table = pd.DataFrame({"x": [1.5, 2.5, None], "sex": pd.Categorical(["f", "m", "f"])})
    table.to_stata(tmp_path / "a.dta", write_index=False)
    assert read_table(tmp_path / "a.dta")["sex"].tolist() == ["f", "m", "f"]
    pytest.importorskip("openpyxl")
    with pd.ExcelWriter(tmp_path / "a.xlsx") as writer:
        table.to_excel(writer, sheet_name="answers", index=False)
        table.to_excel(writer, sheet_name="notes", index=False)
    excel = read_table(tmp_path / "a.xlsx")
    assert excel["x"].isna().tolist() == [False, False, True]
    assert excel.attrs["read_as"] == ["the sheet 'answers' of several ('notes' left out)"]
    pyreadstat = pytest.importorskip("pyreadstat")
    codes = pd.DataFrame({"x": [1.5, 2.5, 3.5], "agree": [1.0, 3.0, 2.0]})
    labels = {"agree": {1.0: "no", 2.0: "perhaps", 3.0: "yes"}}
    pyreadstat.write_sav(codes, str(tmp_path / "a.sav"), variable_value_labels=labels)
    assert read_table(tmp_path / "a.sav")["agree"].tolist() == ["no", "yes", "perhaps"]


def test_damaged_files_of_other_programs_are_refused_by_an_error_of_ours(tmp_path):
    pytest.importorskip("openpyxl")
    pyreadstat = pytest.importorskip("pyreadstat")
    table = pd.DataFrame({"x": np.arange(20.0), "k": list("abcd") * 5})
    table.to_stata(tmp_path / "a.dta")
    table.to_excel(tmp_path / "a.xlsx")
    table.to_parquet(tmp_path / "a.parquet")
    pyreadstat.write_sav(table, str(tmp_path / "a.sav"))
    pyreadstat.write_por(table, str(tmp_path / "a.por"))
    pyreadstat.write_xport(table, str(tmp_path / "a.xpt"))
    rng = np.random.default_rng(5)
    refused = 0
    for path in sorted(tmp_path.iterdir()):
        content = np.frombuffer(path.read_bytes(), np.uint8)
        for cut in (0, 1, 50, len(content) // 2):
            path.write_bytes(content[:cut].tobytes())
            with pytest.raises(DataError, match=re.escape(f"{path}: cannot be read as a table: ")):
                read_table(path)
        for _ in range(6):
            changed = content.copy()
            changed[rng.integers(0, min(300, len(content)), 5)] = rng.integers(0, 256, 5)
            path.write_bytes(changed.tobytes())
            try:
                read_table(path)
            except DataError:
                refused += 1
    assert refused > 6


def test_names_that_a_sheet_has_twice_are_refused(tmp_path):
    pytest.importorskip("openpyxl")
    pd.DataFrame([[1, 2, 3]], columns=["x", "y", "x"]).to_excel(tmp_path / "a.xlsx", index=False)
    with pytest.raises(DataError, match="must have each column once; found 'x' twice"):
        read_table(tmp_path / "a.xlsx")
    for path in (None, 5, b"a.csv"):
        with pytest.raises(DataError, match="path must be the path of a file; got"):
            read_table(path)
    with pytest.raises(DataError, match="separator must be text; got 5"):
        read_table(tmp_path / "a.xlsx", separator=5)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("answer", np.tile([1, 2, 3, 4, 5], 20), "answers on a scale"),
        ("plz", np.random.default_rng(0).integers(10_000, 99_999, 200), "codes or ids"),
        ("person_id", np.random.default_rng(1).integers(1000, 9_999_999, 200), "codes or ids"),
        ("area", np.exp(np.random.default_rng(2).normal(5, 1.2, 300)), "LogNormal"),
        ("population", np.exp(np.random.default_rng(3).normal(9, 1.5, 300)).round(), "LogNormal"),
        ("villages", np.floor(np.exp(np.random.default_rng(4).normal(3, 1.5, 300))), "log1p"),
        ("survival", np.random.default_rng(5).exponential(size=300), "normal column would have 1[0-9]% below zero"),
    ],
)
def test_doubtful_columns_name_the_alternative(name, values, words):
    assert re.search(words, column_type(pd.Series(values, name=name)).doubt)


def test_amounts_far_from_zero_or_even_between_two_ends_are_not_doubted():
    rng = np.random.default_rng(6)
    for values in (rng.normal(50, 5, 300), rng.uniform(0, 100, 300), rng.poisson(50, 300), rng.chisquare(8, 300)):
        assert not column_type(pd.Series(values, name="amount")).doubt


@pytest.mark.parametrize("ending", [".csv", ".txt", ".xlsx"])
def test_titles_above_a_header_are_left_out_and_that_is_said(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"heights{ending}"
    table = pd.DataFrame({"name": ["a", "b", "c"], "height": [1.5, 2.5, 3.0]})
    if ending == ".xlsx":
        with pd.ExcelWriter(path) as writer:
            table.to_excel(writer, index=False, startrow=3)
            writer.sheets["Sheet1"]["A1"] = "A survey, 2021"
    else:
        text = table.to_csv(index=False, sep=";" if ending == ".txt" else ",")
        path.write_text(f"A survey of 2021\n\n\n{text}")
    found = read_table(path)
    pd.testing.assert_frame_equal(found, table)
    assert found.attrs["read_as"][-1] == "3 lines before the header left out"


def test_a_text_of_one_column_has_no_titles(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("x\n1\n2\n")
    assert read_table(tmp_path / "one.csv")["x"].tolist() == [1, 2]


def test_rows_with_more_cells_than_the_header_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "money.csv"
    path.write_text("item,price\na,$1,200\nb,$30\n")
    with pytest.raises(DataError, match="a row has 3 cells, the header 2: quote cells that hold ','"):
        read_table(path)
    path.write_text("x,y\n1,2,\n3,4,\n")
    with pytest.raises(DataError, match="a row has 3 cells, the header 2: a row ends in ','"):
        read_table(path)
    path.write_text("x,y\nfirst,1,2\nsecond,3,4\n")  # R leaves the title of row names out
    found = read_table(path)
    assert found["y"].tolist() == [2, 4]
    assert found.attrs["read_as"] == ["first cells that have no title taken for names of rows"]
