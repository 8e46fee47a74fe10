"""CSV files: untouched cells keep their bytes, and rows that do not fit their header are refused."""

import random

import pandas as pd
import pytest
from typer.testing import CliRunner

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.cli import app
from otpdag.cli.command_files import with_cells
from otpdag.errors import DataError


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.otp"
    made = otp.Model(otp.Graph([("k", "x"), ("k", "n")]), {"k": m.Categorical(2), "x": m.Normal(), "n": m.Poisson()})
    numbers = {"loc": [0.0, 9.0], "scale": [1.0, 1.0]}
    made.set_params({"k": {"probs": [0.4, 0.6]}, "x": numbers, "n": {"log_rate": [0.0, 2.0]}})
    made.save(path)
    return path


def test_impute_changes_nothing_but_missing_cells(model, tmp_path):
    text = (
        '\ufeffid,k,x,big,"a, note",n,rate,none\r\n'
        '00712,1,1.10,9007199254740993,"say ""hi""",3,1.50,NA\r\n'
        "\r\n"
        '00007,,8.9,9007199254740995,"two\r\nlines",,2.0,null\r\n'
        "1e3,0, 0.50 ,1,plain,0007,3,\r\n"
        "5,1\r\n"
    )
    data, out = tmp_path / "data.csv", tmp_path / "filled.csv"
    data.write_bytes(text.encode())
    result = run("impute", model, data, "--out", out)
    assert result.exit_code == 0, result.output
    assert "filled 4 cells" in result.stderr
    lines = out.read_bytes().decode().split("\r\n")
    before = text.split("\r\n")
    assert [lines[i] for i in (0, 1, 2, 5)] == [before[i] for i in (0, 1, 2, 5)]
    assert lines[3].startswith('00007,1,8.9,9007199254740995,"two')
    assert lines[4].startswith('lines",')
    assert lines[4].endswith(",2.0,null")
    assert int(lines[4].split(",")[1]) >= 0
    short = lines[6].split(",")
    assert short[:2] == ["5", "1"]
    assert float(short[2]) == pytest.approx(9.0, abs=0.5)
    assert len(lines) == len(before)


def test_impute_of_a_complete_table_is_the_same_file(model, tmp_path):
    data = tmp_path / "data.csv"
    data.write_text("k,x,n,id\n1,1.10,3,00712\n0,2,1,NA")
    assert run("impute", model, data).stdout == data.read_text()


def test_text_and_table_agree_on_random_files(tmp_path):
    chance, path = random.Random(0), tmp_path / "data.csv"
    cells = ["1", "", "NA", '"a,b"', '"a""b"', '"x\ny"', " 2 ", 'a"b', "é", '""']
    for _ in range(60):
        columns = chance.randint(2, 4)
        rows = [[chance.choice(cells) for _ in range(columns)] for _ in range(chance.randint(1, 6))]
        end = chance.choice(["\n", "\r\n"])
        lines = [",".join("abcd"[:columns]), *(",".join(row) for row in rows)]
        text = end.join(lines) + chance.choice(["", end])
        path.write_bytes(text.encode())
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
        assert with_cells(path, table, {}) == text
        path.write_bytes(with_cells(path, table, {(0, 1): 'n"ew'}).encode())
        table.iloc[0, 1] = 'n"ew'
        pd.testing.assert_frame_equal(pd.read_csv(path, dtype=str, keep_default_na=False), table)


def test_a_comma_at_the_end_of_every_row_is_refused(model, tmp_path):
    data, file = tmp_path / "data.csv", tmp_path / "model.yaml"
    data.write_text("k,x,n\n1,1.5,3,\n0,2.5,1,\n1,2.0,4,\n")
    file.write_text("edges: [[k, x], [k, n]]")
    message = "a row has 4 cells, the header 3: a row ends in ','"
    uses = [(command, model, data) for command in ("score", "impute", "check")]
    for arguments in (*uses, ("fit", file, data, "--out", tmp_path / "run")):
        result = run(*arguments)
        assert result.exit_code == 2
        assert message in result.stderr
    data.write_text("k,x,n\n0,1.5,3,\n1,2.5,1,\n2,2.0,4,\n")  # numbered rows look like pandas' own index
    assert message in run("score", model, data).stderr
    data.write_text("k,x\n1,1.5,3\n0,2.5,1\n")
    assert "a row has 3 cells, the header 2: name every column" in run("score", model, data).stderr


@pytest.mark.parametrize("command", ["score", "impute", "check"])
def test_another_separator_is_recognised_and_said(model, tmp_path, command):
    data = tmp_path / "data.csv"
    data.write_text("k;x;n\n1;1,5;3\n0;2,5;1\n")
    result = run(command, model, data)
    assert result.exit_code == 0, result.output
    assert f"{data} is read with cells between semicolons, decimal commas" in result.stderr
    wrong = ("--separator", ",") if command != "score" else ()
    if wrong:
        result = run(command, model, data, *wrong)
        assert result.exit_code == 2
        assert "a row has 2 cells, the header 1: name every column" in result.stderr


def test_text_that_does_not_match_its_table_is_refused(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="as text it has 1 rows of 2 columns, as a table 2 of 2"):
        with_cells(path, pd.DataFrame({"a": [1, 2], "b": [1, 2]}), {})


def test_a_number_of_many_digits_is_refused(model, tmp_path):
    data = tmp_path / "data.csv"
    data.write_text(f"k,x,n\n1,1.5,3\n0,2.5,{'9' * 400}\n")
    result = run("score", model, data)
    assert result.exit_code == 2
    assert "column 'n' must hold finite numbers; found a whole number of too many digits" in result.stderr


@pytest.mark.parametrize("cell", ['"1,5"', "5%", "2024-03-01", "1_000"])
def test_one_bad_cell_is_told_by_its_place(model, tmp_path, cell):
    """pandas reads all cells of such a column as text: the first of them is not the one to blame."""
    data, file = tmp_path / "data.csv", tmp_path / "model.yaml"
    data.write_text("k,x,n\n" + "1,1.5,3\n0,2.5,1\n" * 10 + f"1,{cell},2\n" + "1,1.5,3\n" * 5)
    file.write_text("{edges: [[k, x], [k, n]], nodes: {x: Normal}}")
    message = f"column 'x' must hold numbers; found {cell.strip(chr(34))!r} in row 20"
    uses = [(command, model, data) for command in ("score", "impute", "check")]
    for arguments in (*uses, ("fit", file, data, "--out", tmp_path / "run")):
        result = run(*arguments)
        assert result.exit_code == 2
        assert message in result.stderr
