"""Names of columns."""

from otpdag.data.reading import cell_names, column_title
from otpdag.spaces import Discrete, Real


def test_a_node_of_several_cells_has_numbered_columns():
    assert cell_names("x", Real()) == ("x",)
    assert cell_names("k", Discrete(5)) == ("k",)
    assert cell_names("x", Real(3)) == ("x.0", "x.1", "x.2")


def test_messages_name_the_column_and_its_node_where_that_is_another():
    assert column_title("x", "x") == "column 'x'"
    assert column_title("x", "x.1") == "column 'x.1' of node 'x'"
