"""Discrete networks, and the format in which they are published."""

import itertools

import numpy as np
import pytest

from otpdag.datasets import DiscreteNetwork, parse_bif, read_bif
from otpdag.errors import DataError, GraphError

TWO = "variable a { type discrete [ 2 ] { no, yes }; } variable b { type discrete [ 3 ] { x, y, z }; }"
ROOT = "probability ( a ) { table 0.25, 0.75; }"

NETWORKS = {"alarm": (37, 46), "asia": (8, 8), "cancer": (5, 4), "earthquake": (5, 4), "sachs": (11, 17)}


def test_rows_by_parent_state_in_any_order():
    network = parse_bif(f"{TWO} {ROOT} probability ( b | a ) {{ (yes) 0.1, 0.2, 0.7; (no) 0.5, 0.5, 0.0; }}")
    assert network.states == {"a": ("no", "yes"), "b": ("x", "y", "z")}
    assert network.parents == {"a": (), "b": ("a",)}
    np.testing.assert_allclose(network.tables["a"], [0.25, 0.75])
    np.testing.assert_allclose(network.tables["b"], [[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]])


def test_one_table_for_all_has_the_nodes_own_state_slowest():
    network = parse_bif(f"{TWO} {ROOT} probability ( b | a ) {{ table 0.5, 0.1, 0.5, 0.2, 0.0, 0.7; }}")
    np.testing.assert_allclose(network.tables["b"], [[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]])


def test_default_fills_the_rows_that_are_not_given():
    network = parse_bif(f"{TWO} {ROOT} probability ( b | a ) {{ (no) 0.5, 0.5, 0.0; default 0.2, 0.2, 0.6; }}")
    np.testing.assert_allclose(network.tables["b"], [[0.5, 0.5, 0.0], [0.2, 0.2, 0.6]])


def test_comments_properties_quotes_and_odd_names():
    network = parse_bif("""
        network "a b" { property author someone; }
        // a comment
        variable "x 1" { type discrete [ 2 ] { <5, 12+ }; property weight 3; } /* more
        of it */
        probability ( "x 1" ) { property note; table 1e-1 9.0E-1; }
    """)
    assert network.states == {"x 1": ("<5", "12+")}
    np.testing.assert_allclose(network.tables["x 1"], [0.1, 0.9])


def test_rounded_rows_are_scaled_to_sum_to_one():
    network = parse_bif(f"{TWO} {ROOT} probability ( b ) {{ table 0.3333, 0.3333, 0.3333; }}")
    assert network.tables["b"].sum() == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "expected `network`, `variable` or `probability`; got `nonsense`"),
        ("variable a { type discrete [ 2 ] { no, yes };", "the text ends inside a block"),
        ("variable a ( )", r"expected `network`, .*; got `variable a \( \)`"),
        ("variable a { }", "variable 'a' has no `type`"),
        ("variable a { type continuous; }", "must be of type `discrete"),
        ("variable a { type discrete [ 3 ] { no, yes }; }", "declares 3 different states; got 2"),
        (TWO + ROOT, "variable 'b' has no `probability` block"),
        ("probability ( q ) { table 1; }", "names 'q', which no `variable` block declares"),
        (TWO + "probability ( a ) { table 0.5, 0.2, 0.3; }", "the table of 'a' needs 2 numbers here; got 3"),
        (TWO + "probability ( a ) { table 0.5, many; }", "must hold numbers; got `0.5 many`"),
        (TWO + "probability ( a ) { table 0.5, 0.4; }", "must be given, hold no number below 0, and sum to 1"),
        (
            TWO + "probability ( b | a ) { (no) 0.5, 0.5, 0.0; }",
            "every row of the table of 'b' must be given",
        ),
        (TWO + "probability ( b | a ) { (no, x) 0.5, 0.5, 0; }", "must name 1 parent states"),
        (
            TWO + "probability ( b | a ) { (maybe) 0.5, 0.5, 0; }",
            "names state 'maybe', which 'a' does not have",
        ),
    ],
)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(DataError, match=message):
        parse_bif(text)


def test_read_bif_names_the_file(tmp_path):
    path = tmp_path / "broken.bif"
    path.write_text("nonsense")
    with pytest.raises(DataError, match=r"broken\.bif: expected `network`"):
        read_bif(path)


@pytest.mark.parametrize("name", NETWORKS)
def test_published_networks_have_their_published_size(name, data_folder):
    network = read_bif(data_folder / "bif" / f"{name}.bif")
    assert (len(network.nodes), len(network.graph.edges)) == NETWORKS[name]
    for table in network.tables.values():
        np.testing.assert_allclose(table.sum(axis=-1), 1.0)


def test_asia_has_the_marginals_of_its_paper(data_folder):
    # Lauritzen and Spiegelhalter (1988), table 2
    network = read_bif(data_folder / "bif" / "asia.bif")
    found = {node: network.joint([node])[0] for node in ("tub", "lung", "bronc", "either", "xray", "dysp")}
    expected = {"tub": 0.0104, "lung": 0.055, "bronc": 0.45, "either": 0.0648, "xray": 0.1103, "dysp": 0.4360}
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["alarm", "survey"])
def test_tables_agree_with_pgmpy(name, data_folder):
    readwrite = pytest.importorskip("pgmpy.readwrite")
    network = read_bif(data_folder / "bif" / f"{name}.bif")
    peer = readwrite.BIFReader(str(data_folder / "bif" / f"{name}.bif")).get_model()
    assert set(peer.nodes()) == set(network.nodes)
    for node in network.nodes:
        wanted = (*network.parents[node], node)
        cpd = peer.get_cpds(node)
        values = np.transpose(cpd.values, [cpd.variables.index(other) for other in wanted])
        states = np.ix_(*[[cpd.state_names[other].index(s) for s in network.states[other]] for other in wanted])
        np.testing.assert_allclose(values[states], network.tables[node], atol=1e-6)


@pytest.fixture
def sprinkler():
    """Rain and sprinkler wet the grass; the sprinkler has three settings."""
    rng = np.random.default_rng(0)
    return DiscreteNetwork(
        states={"wet": ("no", "yes"), "rain": ("no", "yes"), "sprinkler": ("off", "low", "high")},
        parents={"wet": ("rain", "sprinkler"), "rain": (), "sprinkler": ("rain",)},
        tables={
            "wet": rng.dirichlet(np.ones(2), size=(2, 3)),
            "rain": np.array([0.7, 0.3]),
            "sprinkler": rng.dirichlet(np.ones(3), size=2),
        },
    )


def test_joint_is_the_product_of_the_tables(sprinkler):
    joint = sprinkler.joint(["rain", "sprinkler", "wet"])
    for rain, setting, wet in itertools.product(range(2), range(3), range(2)):
        expected = (
            sprinkler.tables["rain"][rain]
            * sprinkler.tables["sprinkler"][rain, setting]
            * sprinkler.tables["wet"][rain, setting, wet]
        )
        assert joint[rain, setting, wet] == pytest.approx(expected)


def test_joint_of_some_nodes_sums_out_the_others(sprinkler):
    whole = sprinkler.joint(["rain", "sprinkler", "wet"])
    np.testing.assert_allclose(sprinkler.joint(["wet", "rain"]), whole.sum(axis=1).T)


def test_samples_have_the_joint_distribution(sprinkler):
    frame = sprinkler.sample(100_000, np.random.default_rng(1))
    assert list(frame) == ["wet", "rain", "sprinkler"]
    counts = np.zeros((2, 2, 3))
    np.add.at(counts, tuple(frame.to_numpy().T), 1 / len(frame))
    np.testing.assert_allclose(counts, sprinkler.joint(list(frame)), atol=0.006)


def test_the_graph_keeps_the_order_of_the_parents(sprinkler):
    assert sprinkler.graph.parents("wet") == ("rain", "sprinkler")
    assert sprinkler.graph.nodes == sprinkler.nodes


def test_a_table_of_the_wrong_shape_is_refused():
    with pytest.raises(GraphError, match=r"table of 'a' must have shape \(2,\); got \(3,\)"):
        DiscreteNetwork({"a": ("0", "1")}, {"a": ()}, {"a": np.ones(3) / 3})


def test_a_cycle_is_refused():
    table = np.full((2, 2), 0.5)
    with pytest.raises(GraphError, match="cycle"):
        DiscreteNetwork({"a": ("0", "1"), "b": ("0", "1")}, {"a": ("b",), "b": ("a",)}, {"a": table, "b": table})
