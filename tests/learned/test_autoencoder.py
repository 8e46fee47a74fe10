"""Auto-encoders of linear networks, whose losses are written out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward import EncoderMap, QuantizedMap
from otpdag.data import Images
from otpdag.divergences import Energy, SlicedWasserstein
from otpdag.engine import Adam, Method
from otpdag.engine.data_kind import ImageData
from otpdag.errors import ModelError
from otpdag.estimators import VectorQuantizedAutoencoder, WassersteinAutoencoder
from otpdag.learned.autoencoder import _mixture, _transport, autoencoder_problem, rebuilding_cost
from otpdag.learned.image_networks import (
    dense_decoder,
    dense_encoder,
    image_decoder,
    image_encoder,
    seeded,
    started_from_data,
)
from otpdag.mechanisms.base import Noise
from otpdag.noise import Streams
from otpdag.objective import Codewords, Encoded
from otpdag.problem import split_point
from otpdag.settings import Objective, PushForward
from otpdag.spaces import Real

ROWS = np.random.default_rng(0).normal(1.0, 2.0, (30, 6)).astype(np.float32)


def linear(inputs, outputs, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Linear(inputs, outputs)


def made(objective, batch_size=100):
    encoder, decoder = linear(6, 2, 0), linear(2, 6, 1)
    graph = otp.Graph([("latent", "image")], hidden=["latent"])
    mechanisms = {"latent": m.Normal(2, loc=0.0, scale=1.0), "image": m.Decoder(decoder, Real(6))}
    data = ImageData.of(otp.Model(graph, mechanisms), Images(ROWS))
    method = Method("own", objective, Encoded(EncoderMap(encoder, 2, (6,)), batch_size=batch_size), Adam(steps=1))
    layout = data.lay_out(method, 0)
    problem = data.problem(layout, method, 0)
    return problem, data.starts(layout, problem, 0, [0]), encoder, decoder


def rebuilt(encoder, decoder):
    with torch.no_grad():
        return decoder(encoder(torch.from_numpy(ROWS))).numpy()


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_reconstruction_is_the_squared_error_in_units_of_the_variance(weight):
    problem, point, encoder, decoder = made(Objective(reconstruction=weight))
    expected = ((rebuilt(encoder, decoder) - ROWS) ** 2).mean() / ROWS.std(ddof=1) ** 2
    terms = problem.sampled(point, Streams([0]), 0.5)
    assert terms.total.item() == pytest.approx(weight * expected, rel=1e-4)
    assert terms.divergence.item() == 0.0


def test_latents_are_held_to_draws_of_the_prior():
    problem, point, encoder, _ = made(Objective(push_forward=PushForward(0.7, Energy())))
    drawn = Streams([4]).draw(Noise(2, "normal"), 30, torch.zeros(1))
    latents = encoder(torch.from_numpy(ROWS)).detach().unsqueeze(0)
    found = problem.sampled(point, Streams([4]), 0.0).divergence.item()
    assert found == pytest.approx(0.7 * Energy()(latents, drawn).item(), rel=1e-4)


def test_a_minibatch_is_some_of_the_images():
    problem, point, encoder, decoder = made(Objective(), batch_size=5)
    assert problem.rows == 30
    rows = Streams([9]).rows(30, 5)[0]
    errors = ((rebuilt(encoder, decoder) - ROWS) ** 2).mean(1) / ROWS.std(ddof=1) ** 2
    assert problem.sampled(point, Streams([9]), 0.0).total.item() == pytest.approx(errors[rows].mean(), rel=1e-4)


def test_images_that_are_all_alike_are_not_divided_by_zero():
    encoded = Encoded(EncoderMap(linear(6, 2, 0), 2, (6,)))
    problem, *_ = made(Objective())
    flat = autoencoder_problem(problem.structure, torch.ones(1, 4, 6), problem.shapes, Objective(), encoded, 0)
    assert flat.spread == 1.0


@pytest.mark.parametrize(("noise", "over"), [("image", (-1,)), ("shared", (-2, -1))])
def test_a_noise_scale_at_its_maximum_costs_what_the_best_normal_density_does(noise, over):
    rows = torch.rand(1, 5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rebuilt = rows + torch.linspace(0.05, 0.5, 5, dtype=torch.float64)[:, None] * torch.ones(40).double()
    scale = (rebuilt - rows).square().mean(over, keepdim=True).sqrt()
    per_pixel = -torch.distributions.Normal(rebuilt, scale).log_prob(rows).mean()
    one_grey_level = -torch.distributions.Normal(rows, 1 / 255).log_prob(rows + 1 / 255).mean()
    cost = rebuilding_cost(rebuilt, rows, 1.0, noise=noise)
    assert cost.item() == pytest.approx((per_pixel - one_grey_level).item(), abs=0.01)
    assert rebuilding_cost(rows, rows, 1.0, noise=noise).item() == 0.0


def test_one_noise_scale_weighs_all_pixels_alike_and_own_ones_do_not():
    rows, rebuilt = torch.zeros(1, 2, 4).double(), torch.tensor([[[0.1] * 4, [0.4] * 4]]).double().requires_grad_(True)
    pulls = {}
    for noise in ("fixed", "shared", "image"):
        (slope,) = torch.autograd.grad(rebuilding_cost(rebuilt, rows, 1.0, noise=noise), rebuilt)
        pulls[noise] = slope[0, :, 0]
    for noise in ("fixed", "shared"):
        assert (pulls[noise][1] / pulls[noise][0]).item() == pytest.approx(4.0)  # as far as they are off
    assert pulls["image"][1] < 0.3 * pulls["image"][0]  # what is far off is given up


def test_an_unknown_noise_scale_is_refused():
    with pytest.raises(ModelError, match="noise must be one of"):
        Encoded(EncoderMap(torch.nn.Linear(6, 2), 2, (6,)), noise="own")


# -- codewords --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def codebook():
    pixels = np.random.default_rng(6).random((24, 8, 8)).astype(np.float32)
    settings = {"n_codes": 4, "n_epochs": 2, "batch_size": 24}
    result = VectorQuantizedAutoencoder(**settings).fit(pixels).result_
    return result.problem, result.restarts[0].point.unsqueeze(0)


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_weights_of_codewords_are_held_to_even_ones(codebook):
    problem, point = codebook
    code, _ = problem.chain
    weights = problem.naturals(point)[code]["weights"][0].detach().double().numpy()
    expected = problem.codewords.eta_r * (weights * np.log(weights * 4)).sum()
    terms = problem.sampled(point, Streams([0]), 1.0)
    assert terms.entropic.item() == pytest.approx(expected, abs=1e-5)
    assert problem.pace.span == (problem.codewords.warm_up, 1.0)


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_after_the_warm_up_codewords_are_placed_and_latents_quantised(codebook):
    problem, point = codebook
    warm = replace(problem, quantizes=False)
    assert warm.pace.span == (0.0, problem.codewords.warm_up)
    terms = warm.sampled(point, Streams([0]), 0.0)
    assert terms.total.item() == terms.reconstruction.item()
    moved = warm.refine(point)
    assert moved.problem.quantizes
    assert moved.what == "quantised"
    assert problem.refine(point) is None
    # codewords stand among the latents: nearer to them than their mean is
    _, latent = problem.chain
    placed = problem.naturals(moved.point)[latent]["mean"][0]
    with torch.no_grad():
        latents = problem.backward.latents(split_point(point, problem.shapes)[1], problem.images).reshape(
            -1, problem.backward.dim
        )
    nearest = torch.cdist(latents, placed).amin(-1).square().mean()
    assert nearest < (latents - latents.mean(0)).square().sum(-1).mean()


def quantising(*, by_position, codewords):
    """Two positions of three codewords behind rows of six numbers, all parameters random."""
    backward = QuantizedMap(EncoderMap(linear(6, 4, 0), 4, (6,)), positions=2, size=3, dim=2, by_position=by_position)
    graph = otp.Graph([("c", "z"), ("z", "q"), ("q", "x")], hidden=["c", "z", "q"])
    shared = {"mean": m.tie("codebook"), "scale": m.tie("spread")}
    mechanisms = {"c": m.Codes(3, 2), "z": m.Codebook(3, 2, **shared), "q": m.Quantized(3, 2, **shared)}
    mechanisms |= {"x": m.Decoder(linear(4, 6, 1), Real(6))}
    data = ImageData.of(otp.Model(graph, mechanisms), Images(ROWS))
    objective = Objective(push_forward=PushForward(0.7, Energy()))
    method = Method("own", objective, Encoded(backward, batch_size=100, codewords=codewords), Adam(steps=1))
    problem = data.problem(data.lay_out(method, 0), method, 0)
    generator = torch.Generator().manual_seed(3)
    size = sum(int(np.prod(shape)) for shape in problem.shapes.values())
    return problem, 0.5 * torch.randn(1, size, generator=generator)


def by_hand(problem, point):
    """Latents (positions, n, D), codewords and scales (K, D), weights (positions, K), potentials (problems, K)."""
    theta, phi = split_point(point, problem.shapes)
    naturals = problem.structure.naturals(theta)
    latents = problem.backward.latents(phi, problem.images)[0].unflatten(-1, (2, 2)).transpose(0, 1)
    return latents, naturals["z"]["mean"][0], naturals["z"]["scale"][0], naturals["c"]["weights"][0], phi


@pytest.mark.parametrize("by_position", [True, False])
def test_the_transport_moves_codewords_by_all_and_latents_by_a_share_of_its_gradient(by_position):
    problem, point = quantising(by_position=by_position, codewords=Codewords(pull=0.25))
    latents, means, scales, weights, phi = (
        value if isinstance(value, dict) else value.detach() for value in by_hand(problem, point)
    )
    potentials = 30.0 * phi["phi.potential"][0].detach()
    unit = scales.square().mean()
    distance = ((latents[:, :, None] - means) / scales).square() * unit  # (positions, n, K, D)
    costs = distance.mean(-1)
    problems = 2 if by_position else 1
    target = weights if by_position else weights.mean(0, keepdim=True)
    sent = (costs.reshape(problems, -1, 3) - potentials[:, None]).argmin(-1)
    least = (costs.reshape(problems, -1, 3) - potentials[:, None]).amin(-1)
    expected = ((target * potentials).sum(-1) + least.mean(-1)).mean()

    leaves = latents.clone().requires_grad_(), means.clone().requires_grad_()
    naturals = {"c": {"weights": weights[None]}, "z": {"mean": leaves[1][None], "scale": scales[None]}}
    value = _transport(problem, phi, leaves[0], costs, naturals)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    to_latents, to_means = torch.autograd.grad(value, leaves)
    points = latents.reshape(-1, 2)
    own = sent.flatten()
    pull = 2 * unit / scales[own].square() * (points - means[own]) / points.numel()
    torch.testing.assert_close(to_latents.reshape(-1, 2), 0.25 * pull)
    torch.testing.assert_close(to_means, -torch.zeros_like(means).index_add(0, own, pull))


def test_the_mixture_teaches_the_covariances_alone():
    problem, point = quantising(by_position=True, codewords=Codewords())
    latents, means, scales, weights, _ = (
        value.detach().clone().requires_grad_() if torch.is_tensor(value) else value
        for value in by_hand(problem, point)
    )
    naturals = {"c": {"weights": weights[None]}, "z": {"mean": means[None], "scale": scales[None]}}
    value = _mixture(problem, naturals, latents, Streams([5]))
    streams = Streams([5])
    uniform = streams.draw(Noise(2, "uniform"), 30, torch.zeros(1))[0]
    normal = streams.draw(Noise(4, "normal"), 30, torch.zeros(1))[0].unflatten(-1, (2, 2))
    codes = (uniform[..., None] > weights.detach().cumsum(-1)).sum(-1)  # (n, positions)
    drawn = (means[codes] + scales[codes] * normal).transpose(0, 1)
    assert value.item() == pytest.approx(Energy()(latents, drawn).mean().item(), rel=1e-5)
    alone = torch.autograd.grad(value, (latents, means, weights, scales), allow_unused=True)
    assert [gradient is None for gradient in alone] == [True, True, True, False]


def test_the_terms_of_codewords_are_weighed_and_latents_are_decoded_as_their_codewords():
    problem, point = quantising(by_position=False, codewords=Codewords(mixture=0.2, eta_r=0.5, warm_up=0.0))
    assert problem.quantizes
    latents, means, scales, weights, phi = by_hand(problem, point)
    costs = (((latents[:, :, None] - means) / scales).square() * scales.square().mean()).mean(-1)
    naturals = {"c": {"weights": weights[None]}, "z": {"mean": means[None], "scale": scales[None]}}
    gap = 0.7 * _transport(problem, phi, latents, costs, naturals).item()
    gap += 0.2 * _mixture(problem, naturals, latents, Streams([2])).item()
    terms = problem.sampled(point, Streams([2]), 0.3)
    assert terms.divergence.item() == pytest.approx(gap, rel=1e-4)
    assert terms.entropic.item() == pytest.approx(0.5 * (weights * (3 * weights).log()).sum().item(), rel=1e-4)
    quantised = means[costs.argmin(-1)].transpose(0, 1).flatten(1)
    theta = problem.structure.naturals(split_point(point, problem.shapes)[0])
    rebuilt = problem.structure.mechanisms["x"].forward(theta["x"], {"q": quantised[None]}, torch.zeros(1, 30, 6))
    expected = (rebuilt - torch.from_numpy(ROWS)).square().mean() / torch.from_numpy(ROWS).var()
    assert terms.reconstruction.item() == pytest.approx(expected.item(), rel=1e-4)
    doubled = replace(problem, objective=replace(problem.objective, reconstruction=2.0))
    assert doubled.sampled(point, Streams([2]), 0.3).reconstruction.item() == pytest.approx(
        2 * expected.item(), rel=1e-4
    )
    warming = replace(doubled, quantizes=False).sampled(point, Streams([2]), 0.0).reconstruction
    once = replace(problem, quantizes=False).sampled(point, Streams([2]), 0.0).reconstruction
    assert warming.item() == pytest.approx(2 * once.item(), rel=1e-6)


@pytest.mark.parametrize(("warm_up", "begins"), [(0.0, True), (0.1, False)])
def test_codewords_are_placed_at_once_where_there_is_no_warm_up(warm_up, begins):
    problem, point = quantising(by_position=True, codewords=Codewords(warm_up=warm_up))
    assert problem.quantizes is begins
    begun = problem.begun(point)
    assert torch.equal(begun, point) is not begins
    assert torch.equal(problem.with_codewords_placed(point), begun) is begins
    latents, means, scales, _, _ = by_hand(problem, problem.with_codewords_placed(point))
    nearest = (latents.reshape(-1, 1, 2) - means).square().sum(-1)
    left = (latents.reshape(-1, 2) - means[nearest.argmin(-1)]).square().mean()
    torch.testing.assert_close(scales, left.sqrt().expand(3, 2), rtol=1e-4, atol=0)


def test_codewords_and_maps_that_quantise_go_together():
    plain = EncoderMap(linear(6, 2, 0), 2, (6,))
    quantised = QuantizedMap(plain, positions=1, size=4, dim=2)
    message = "codewords need a backward map that quantises, and such a map needs codewords"
    with pytest.raises(ModelError, match=message):
        Encoded(plain, codewords=Codewords())
    with pytest.raises(ModelError, match=message):
        Encoded(quantised)
    problem, *_ = made(Objective())
    with pytest.raises(ModelError, match="codewords are moved by the push-forward term: give the objective one"):
        autoencoder_problem(
            problem.structure, problem.images, problem.shapes, Objective(), Encoded(quantised, codewords=Codewords()), 0
        )


# -- the default networks in the units of the data --------------------------------------------------------------------


def networks(width=8):
    return seeded(lambda: image_encoder(1, 4, width), 0), seeded(lambda: image_decoder(1, 4, width), 1)


def test_latents_have_variance_one_and_decoded_images_the_mean_of_the_data():
    images = 0.2 + 0.1 * torch.rand(30, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    encoder, decoder = started_from_data(*networks(), images)
    with torch.no_grad():
        latents = encoder(images)
        assert torch.allclose(latents.mean((0, 2, 3)), torch.zeros(4), atol=1e-4)
        assert abs(latents.std() - 1.0) < 1e-3
        assert torch.allclose(decoder(latents).mean(), images.mean(), atol=1e-4)


def test_images_without_contrast_leave_networks_as_they_are():
    images = torch.zeros(3, 1, 16, 16)
    encoder = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 4, 4))
    before = encoder[0].weight.clone()
    started_from_data(encoder, networks()[1], images)
    assert torch.equal(encoder[0].weight, before)


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_images_through_fit_give_what_the_estimator_gives():
    rows = np.random.default_rng(0).normal(size=(90, 5)) @ np.random.default_rng(1).normal(size=(5, 5))
    estimator = WassersteinAutoencoder(2, hidden=(8,), n_epochs=5, batch_size=32, random_state=7).fit(rows)
    decoder = m.Decoder(seeded(lambda: dense_decoder(2, 5, (8,)), 8), Real(5))
    graph = otp.Graph([("latent", "image")], hidden=["latent"])
    model = otp.Model(graph, {"latent": m.Normal(2, loc=0.0, scale=1.0), "image": decoder})
    backward = EncoderMap(seeded(lambda: dense_encoder(5, 2, (8,)), 7), 2, (5,))
    method = Method(
        "encoded",
        Objective(push_forward=PushForward(0.1, SlicedWasserstein())),
        Encoded(backward, batch_size=32),
        Adam(steps=15, learning_rate=1e-3, averaging=0.0),
    )
    result = otp.fit(model, otp.Images(rows), method=method, seed=7)
    assert result.loss == estimator.result_.loss
    assert [one["loss"] for one in result.history] == [one["loss"] for one in estimator.result_.history]
    latents = backward.latents(model.fitted.phi, torch.as_tensor(rows, dtype=torch.float32).unsqueeze(0))[0]
    np.testing.assert_array_equal(latents.detach(), estimator.transform(rows))
