import itertools

import numpy as np
import pytest

from otpdag.datasets import DiscreteNetwork
from otpdag.errors import GraphError


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
