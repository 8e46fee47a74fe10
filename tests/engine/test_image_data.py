"""Images: how they are read, and where their networks start."""

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward import EncoderMap
from otpdag.data import Images
from otpdag.engine import Adam, Method
from otpdag.engine.image_data import ImageData, initial_theta
from otpdag.errors import ModelError
from otpdag.objective import Encoded
from otpdag.problem import split_point
from otpdag.settings import Objective
from otpdag.spaces import Real

PIXELS = np.arange(2 * 3 * 2 * 2).reshape(2, 3, 2, 2)


def linear(inputs, outputs, seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(inputs, outputs)


def model(decoder=None):
    graph = otp.Graph([("latent", "image")], hidden=["latent"])
    decoder = m.Decoder(decoder or linear(2, 12, 0), Real(12))
    return otp.Model(graph, {"latent": m.Normal(2, loc=0.0, scale=1.0), "image": decoder})


@pytest.mark.parametrize("pixels", [PIXELS, torch.from_numpy(PIXELS), PIXELS.astype(np.uint8), PIXELS.tolist()])
def test_images_are_flattened_channels_first_in_single_precision(pixels):
    rows = Images(pixels).rows
    assert rows.dtype == torch.float32
    np.testing.assert_array_equal(rows, PIXELS.reshape(2, 12))


def test_a_point_is_the_networks_as_they_are():
    decoder, encoder = linear(2, 12, 1), linear(12, 2, 2)
    data = ImageData.of(model(decoder), Images(PIXELS))
    method = Method("encoded", Objective(), Encoded(EncoderMap(encoder, 2, (12,))), Adam(steps=1))
    layout = data.lay_out(method, 0)
    problem = data.problem(layout, method, 0)
    points = data.starts(layout, problem, 0, range(2))
    theta, phi = split_point(points[:1], problem.shapes)
    rows = Images(PIXELS).rows
    torch.testing.assert_close(problem.encoded.backward.latents(phi, rows[None])[0], encoder(rows).detach())
    parameters = torch.cat([value.flatten() for value in theta.values()]).sort().values
    own = torch.cat([value.detach().flatten() for value in decoder.parameters()]).sort().values
    torch.testing.assert_close(parameters, own)
    assert torch.equal(points[0], points[1])  # no more starts than one


def test_what_the_user_gave_is_where_others_start():
    graph = otp.Graph([("z", "image")], hidden=["z"])
    decoder = m.Decoder(linear(3, 12, 0), Real(12))
    given = otp.Model(graph, {"z": m.Categorical(3, probs=otp.start([[0.2, 0.3, 0.5]])), "image": decoder})
    theta = initial_theta(given.structure, seed=0)
    assert {value.dtype for value in theta.values()} == {torch.float32}
    probs = given.structure.naturals(theta)["z"]["probs"]
    np.testing.assert_allclose(probs.flatten(), [0.2, 0.3, 0.5], rtol=1e-5)
    plain = otp.Model(graph, {"z": m.Categorical(3), "image": decoder})
    even = plain.structure.naturals(initial_theta(plain.structure, seed=0))["z"]["probs"]
    np.testing.assert_allclose(even.flatten(), 1 / 3, rtol=1e-5)


def test_images_need_an_encoder_and_one_node():
    data = ImageData.of(model(), Images(PIXELS))
    with pytest.raises(ModelError, match=r"images need a Method whose evaluation is Encoded\(...\).*got method='auto'"):
        data.named("auto")
    with pytest.raises(ModelError, match="images are evaluated by Encoded; got ClosedForm"):
        data.check(otp.entropic())
    two = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    with pytest.raises(ModelError, match="images belong to one observed node; the graph has 2"):
        ImageData.of(two, Images(PIXELS))
