"""Parameters as a table: every number has the name that its mechanism gives its place."""

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.tables import estimates
from tests.mechanisms.own import Chances, LabelledChances


def places(model, node, name):
    table = estimates(model)
    return table[(table["node"] == node) & (table["parameter"] == name)]["at"].tolist()


def test_a_users_parameter_has_the_labels_that_its_mechanism_names():
    frame = {"z": ["wet", "dry", "wet", "dry"], "x": [1.0, 2.0, 3.0, 4.0]}
    for kind, expected in ((LabelledChances, ["dry", "wet"]), (Chances, ["0", "1"])):
        model = otp.Model(otp.Graph([("z", "x")]), {"z": kind(2), "x": m.Normal()})
        otp.fit(model, frame, restarts=1)
        assert places(model, "z", "chances") == expected
        assert places(model, "x", "loc") == ["z=dry", "z=wet"]


def test_a_scale_that_coordinates_share_is_named_by_configuration():
    model = otp.Model(otp.Graph([("k", "x")]), {"k": m.Categorical(2), "x": m.Normal(2, isotropic=True)})
    model.set_params({"k": {"probs": [0.5, 0.5]}, "x": {"loc": [[1, 2], [3, 4]], "scale": [1.0, 2.0]}})
    assert places(model, "x", "scale") == ["k=0", "k=1"]
    assert places(model, "x", "loc") == ["k=0, x.0", "k=0, x.1", "k=1, x.0", "k=1, x.1"]


def test_degrees_of_freedom_and_covariances_are_named_by_coordinate():
    graph = otp.Graph([("k", "x"), ("k", "y")])
    model = otp.Model(graph, {"k": m.Categorical(2), "x": m.StudentT(2), "y": m.MultivariateNormal(2)})
    eye = [[1.0, 0.0], [0.0, 1.0]]
    model.set_params(
        {
            "k": {"probs": [0.5, 0.5]},
            "x": {"loc": [[1, 2], [3, 4]], "scale": [[1, 1], [1, 1]], "df": [3.0, 4.0]},
            "y": {"loc": [[1, 2], [3, 4]], "covariance": [eye, eye]},
        }
    )
    assert places(model, "x", "df") == ["x.0", "x.1"]
    assert places(model, "y", "covariance")[:3] == ["k=0, y.0, y.0", "k=0, y.0, y.1", "k=0, y.1, y.0"]
