"""The paper's own ways to a Poisson chain and to codewords: what short fits find."""

import numpy as np

from experiments.paper_chain import fit_paper
from experiments.paper_codebook import PaperCodebook


def test_the_papers_chain_tells_two_rates_apart():
    rng = np.random.default_rng(3)
    rates = np.array([6.0, 40.0])
    states = np.cumsum(rng.random((100, 40)) < 0.2, axis=1) % 2
    found, stay = fit_paper(rng.poisson(rates[states]), states=2, starts=2, seed=0)
    np.testing.assert_allclose(found, rates, atol=1.0)  # rates come out low: noise of their size only adds cost
    assert 0.6 < stay < 1.0


def test_codewords_of_the_paper_have_weights_and_scales_and_send_images_to_codes():
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
    fitted = PaperCodebook(5, 3, width=8, n_epochs=2, batch_size=8, random_state=0).fit(images)
    assert not fitted.failed
    codes = fitted.encode(images)
    assert codes.shape == (40, 4)
    assert codes.max() < 5
    moved = {name: float((fitted.parameters[name] ** 2).sum()) for name in ("log_scale", "logits")}
    assert min(moved.values()) > 0  # both begin at zero
    assert fitted.reconstruct(images).shape == images.shape
