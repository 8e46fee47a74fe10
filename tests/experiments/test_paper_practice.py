"""The paper's own ways to a Poisson chain and to codewords: what short fits find."""

import numpy as np
from scipy.optimize import minimize_scalar

from experiments.paper_chain import fit_paper, least_cost
from experiments.paper_codebook import PaperCodebook
from otpdag.costs import SquaredEuclidean


def cheapest(counts):
    """The rate at the least expected smooth L1 between counts and draws of their own, by quadrature."""
    normal, weights = np.polynomial.hermite_e.hermegauss(41)

    def cost(rate):
        apart = np.abs(counts[:, None] - rate - normal * np.sqrt(rate))
        return (np.where(apart < 1, apart**2 / 2, apart - 0.5) @ weights).mean()

    return minimize_scalar(cost, bounds=(counts.mean() - 3, counts.mean() + 3), method="bounded").x


def test_the_papers_chain_ends_where_its_printed_cost_is_least_half_a_count_below_the_truth():
    rng = np.random.default_rng(3)
    rates = np.array([12.0, 80.0])  # so far apart that a count tells its state
    states = np.cumsum(rng.random((100, 40)) < 0.2, axis=1) % 2
    counts = rng.poisson(rates[states])
    found, stay = fit_paper(counts, states=2, starts=2, seed=0)
    of_states = [counts[states == state] for state in range(2)]
    least = np.array([cheapest(own) for own in of_states])
    assert (np.abs(found - least) < [0.1, 0.3]).all()  # steps of 0.05 in logarithms, averaged
    np.testing.assert_allclose(least, [own.mean() - 7 / 12 for own in of_states], atol=0.05)
    np.testing.assert_allclose(least_cost(rates), rates - 7 / 12, atol=0.03)  # of the whole population
    np.testing.assert_allclose(least_cost(rates, SquaredEuclidean()), rates - 1 / 2, atol=0.03)
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
