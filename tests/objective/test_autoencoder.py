"""Auto-encoders of linear networks, whose losses are written out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward.encoder import EncoderMap
from otpdag.backward.quantized import QuantizedMap
from otpdag.data import Images
from otpdag.divergences import Energy
from otpdag.engine import Adam
from otpdag.engine.kinds.image_data import ImageData
from otpdag.engine.method import Method
from otpdag.errors import ModelError
from otpdag.estimators import VectorQuantizedAutoencoder
from otpdag.mechanisms.base import Noise
from otpdag.objective import Objective, PushForward, Streams
from otpdag.objective.autoencoder import Codewords, Encoded, autoencoder_problem, rebuilding_cost
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


def test_with_noise_of_its_own_an_image_costs_what_its_best_normal_density_does():
    rows = torch.rand(1, 5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rebuilt = rows + torch.linspace(0.05, 0.5, 5, dtype=torch.float64)[:, None] * torch.ones(40).double()
    scale = (rebuilt - rows).square().mean(-1, keepdim=True).sqrt()
    per_pixel = -torch.distributions.Normal(rebuilt, scale).log_prob(rows).mean()
    one_grey_level = -torch.distributions.Normal(rows, 1 / 255).log_prob(rows + 1 / 255).mean()
    found = rebuilding_cost(rebuilt, rows, 1.0, own_noise=True)
    assert found.item() == pytest.approx((per_pixel - one_grey_level).item(), abs=0.01)
    assert rebuilding_cost(rows, rows, 1.0, own_noise=True).item() == 0.0


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
    assert problem.span == (problem.codewords.warm_up, 1.0)


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_after_the_warm_up_codewords_are_placed_and_latents_quantised(codebook):
    problem, point = codebook
    warm = replace(problem, quantizes=False)
    assert warm.span == (0.0, problem.codewords.warm_up)
    terms = warm.sampled(point, Streams([0]), 0.0)
    assert terms.total.item() == terms.reconstruction.item()
    moved = warm.moved(point)
    assert moved.problem.quantizes
    assert moved.what == "quantised"
    assert problem.moved(point) is None
    # codewords stand among the latents: nearer to them than their mean is
    _, latent = problem.chain
    placed = problem.naturals(moved.point)[latent]["mean"][0]
    with torch.no_grad():
        latents = problem.backward.latents(problem.parts(point)[1], problem.images).reshape(-1, problem.backward.dim)
    nearest = torch.cdist(latents, placed).amin(-1).square().mean()
    assert nearest < (latents - latents.mean(0)).square().sum(-1).mean()


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
