"""Codes, codewords and quantisation, against frequencies, scipy's Mahalanobis distance and hand-made gradients."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis as one_distance

from otpdag import mechanisms as m
from otpdag.errors import ModelError
from otpdag.mechanisms.codebook import copy_gradient, mahalanobis
from otpdag.spaces import Count, Real


def codebook(size=5, dim=3, positions=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    params = {
        "mean": torch.randn(1, size, dim, generator=generator, dtype=torch.float64),
        "scale": 0.5 + torch.rand(1, size, dim, generator=generator, dtype=torch.float64),
    }
    return params, torch.randn(1, 7, positions * dim, generator=generator, dtype=torch.float64)


def test_codes_have_their_positions_weights():
    weights = torch.tensor([[[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]]], dtype=torch.float64)
    codes = m.Codes(3, 2).setup(m.Family("code"))
    uniform = torch.rand(1, 20_000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = codes.forward({"weights": weights}, {}, uniform)[0].long()
    for position in range(2):
        share = torch.bincount(drawn[:, position], minlength=3) / len(drawn)
        assert torch.allclose(share.double(), weights[0, position], atol=0.012)


def test_distances_are_scipys():
    params, latents = codebook(positions=1)
    found = mahalanobis(latents, params["mean"], params["scale"])[0]
    for row, point in enumerate(latents[0].numpy()):
        for k in range(5):
            inverse = np.diag(params["scale"][0, k].numpy() ** -2.0)
            expected = one_distance(point, params["mean"][0, k].numpy(), inverse) ** 2
            assert found[row, k].item() == pytest.approx(expected, rel=1e-9)


def test_a_wide_codeword_wins_over_a_nearer_narrow_one():
    quantized = m.Quantized(2, 1).setup(m.Family("q", (("z", Real(1)),)))
    params = {"mean": torch.tensor([[[0.0], [3.0]]]), "scale": torch.tensor([[[0.1], [5.0]]])}
    assert quantized.codes(params, torch.tensor([[[1.0]]])).item() == 1
    assert quantized.forward(params, {"z": torch.tensor([[[1.0]]])}, torch.zeros(1, 1, 0)).item() == 3.0


def test_quantisation_copies_its_gradient():
    params, latents = codebook()
    quantized = m.Quantized(5, 3).setup(m.Family("q", (("z", Real(6)),)))
    latents.requires_grad_(True)
    value = quantized.relaxed(params, {"z": latents}, torch.zeros(1, 7, 0), 1.0)
    assert torch.allclose(value, quantized.forward(params, {"z": latents}, torch.zeros(1, 7, 0)))
    (gradient,) = torch.autograd.grad((value * 2).sum(), latents)
    assert torch.equal(gradient, torch.full_like(gradient, 2.0))
    assert torch.equal(copy_gradient(latents, value.detach()), latents + (value.detach() - latents))


def test_latents_lie_around_their_codewords():
    params, _ = codebook()
    latent = m.Codebook(5, 3).setup(m.Family("z", (("c", Count(2)),)))
    codes = torch.tensor([4.0, 1.0]).expand(1, 50_000, 2)
    noise = torch.randn(1, 50_000, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = latent.forward(params, {"c": codes}, noise)[0].unflatten(-1, (2, 3))
    assert torch.allclose(drawn.mean(0), params["mean"][0, [4, 1]], atol=0.03)
    assert torch.allclose(drawn.std(0), params["scale"][0, [4, 1]], rtol=0.02)


def test_parents_that_make_no_sense_are_refused():
    with pytest.raises(ModelError, match="needs one parent, whose mechanism is Codes"):
        m.Codebook(4, 2).setup(m.Family("z", (("x", Real(2)),)))
    with pytest.raises(ModelError, match="a multiple of 4"):
        m.Quantized(4, 4).setup(m.Family("q", (("z", Real(6)),)))
    with pytest.raises(ModelError, match="has no parents"):
        m.Codes(4).setup(m.Family("c", (("z", Real(6)),)))
    with pytest.raises(ModelError, match="size must be a whole number of at least 2; got 1"):
        m.Codes(1)


def test_latents_have_the_mean_of_their_codewords():
    params, _ = codebook()
    node = m.Codebook(5, 3).setup(m.Family("z", (("c", Count(2)),)))
    codes = torch.tensor([[[4.0, 1.0], [0.0, 0.0], [3.0, 2.0], [1.0, 4.0], [9.0, -1.0], [2.0, 2.0], [0.0, 4.0]]])
    inside = codes[0].long().clamp(0, 4)
    torch.testing.assert_close(node.mean(params, {"c": codes})[0], params["mean"][0, inside].flatten(-2))


def test_relaxed_codes_are_codes_away_from_the_steps():
    weights = torch.tensor([[[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]]], dtype=torch.float64)
    codes = m.Codes(3, 2).setup(m.Family("code"))
    # relaxed draws are the codes where noise is not near a step of the cumulative weights
    noise = torch.tensor([[[0.05, 0.3], [0.2, 0.65], [0.9, 0.95]]], dtype=torch.float64)
    drawn = codes.forward({"weights": weights}, {}, noise)
    assert drawn.tolist() == [[[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]]
    near = codes.relaxed({"weights": weights}, {}, noise, 0.01)
    torch.testing.assert_close(near, drawn, atol=1e-3, rtol=0)
    soft = codes.relaxed({"weights": weights}, {}, noise, 1.0)
    expected = torch.sigmoid((noise.unsqueeze(-1) - weights.cumsum(-1)[:, None, :, :-1]) / 0.1).sum(-1)
    torch.testing.assert_close(soft, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: m.Codes(1), "size must be a whole number of at least 2; got 1"),
        (lambda: m.Codes(4, 0), "positions must be a whole number of at least 1; got 0"),
        (lambda: m.Codebook(1, 2), "size must be a whole number of at least 2; got 1"),
        (lambda: m.Codebook(4, 0), "dim must be a whole number of at least 1; got 0"),
        (lambda: m.Quantized(4, 0), "dim must be a whole number of at least 1; got 0"),
    ],
)
def test_codebooks_without_choice_or_width_are_refused(make, message):
    with pytest.raises(ModelError, match=message):
        make()
