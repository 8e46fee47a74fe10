"""Linear models whose structural equations can be done by hand."""

import otpdag as otp
from otpdag import mechanisms as m


def structural() -> otp.Model:
    graph = otp.Graph([("z", "t"), ("z", "y"), ("t", "y")])
    model = otp.Model(graph, {node: m.Normal() for node in graph.nodes})
    return model.set_params(
        {
            "z": {"loc": 0.0, "scale": 1.0},
            "t": {"loc": 1.0, "weight": 2.0, "scale": 0.5},
            "y": {"loc": 0.0, "weight": [-1.0, 3.0], "scale": 2.0},
        }
    )
