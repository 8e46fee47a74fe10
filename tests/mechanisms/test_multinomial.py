"""Trees of binomial splits by sums over categories, and topics at given shares beside plain updates."""

import numpy as np
import pytest
import torch
from scipy import special, stats

from otpdag import mechanisms as m
from otpdag.mechanisms.categorical import _fit_topics
from otpdag.mechanisms.parameters import Axis
from otpdag.spaces import Count, Discrete, Real, Simplex

GENERATOR = np.random.default_rng(2)


def halves(leaves):
    """Splits (first, before, end) of the tree, by number: the split before category j has number j - 1."""
    found = {}

    def cut(first, width):
        if width > 1 and first < leaves:
            if first + width // 2 < leaves:
                found[first + width // 2 - 1] = (first, first + width // 2, min(first + width, leaves))
            cut(first, width // 2)
            cut(first + width // 2, width // 2)

    cut(0, 1 << (leaves - 1).bit_length())
    return found


def divided(noise, probs, total):
    """Counts (n, leaves) of draws that are divided at every split by a binomial quantile, wide splits first."""
    leaves = probs.shape[1]
    counts = {(0, leaves): total[:, 0]}
    for number, (first, before, end) in sorted(halves(leaves).items(), key=lambda one: one[1][0] - one[1][2]):
        reach, mass = counts[first, end], probs[:, first:end].sum(-1)
        share = np.where(mass > 0, probs[:, first:before].sum(-1) / np.where(mass > 0, mass, 1.0), 0.0)
        part = stats.binom.ppf(noise[:, number], reach, np.minimum(share, 1)).clip(min=0)
        counts[first, before], counts[before, end] = part, reach - part
    return np.stack([counts[leaf, leaf + 1] for leaf in range(leaves)], -1)


@pytest.mark.parametrize("leaves", [2, 3, 4, 5, 7, 8, 11])
def test_splits_are_sums_to_the_left_and_of_both_sides(leaves):
    values = torch.as_tensor(GENERATOR.uniform(size=(4, leaves)))
    left, both = m.Multinomial(leaves)._sides(values)
    splits = halves(leaves)
    assert sorted(splits) == list(range(leaves - 1))
    for number, (first, before, end) in splits.items():
        torch.testing.assert_close(left[:, number], values[:, first:before].sum(-1))
        torch.testing.assert_close(both[:, number], values[:, first:end].sum(-1))


@pytest.mark.parametrize("leaves", [2, 3, 5, 8])
def test_draws_are_divided_by_binomial_quantiles(leaves):
    probs, noise = GENERATOR.dirichlet(np.ones(leaves), 6), GENERATOR.uniform(size=(6, leaves - 1))
    probs[0, 0], probs[1, -1] = 0.0, 0.0
    probs /= probs.sum(-1, keepdims=True)
    total = GENERATOR.integers(0, 30, (6, 1)).astype(float)
    node = m.Multinomial(leaves, total="n").setup(m.Family("x", (("n", Count(1)),)))
    params = {"probs": torch.ones(1, 1, leaves)}
    node.log_shares = lambda params, parents, like: torch.log(torch.as_tensor(probs)).unsqueeze(0)
    counts = node.forward(params, {"n": torch.as_tensor(total)[None]}, torch.as_tensor(noise)[None])[0]
    np.testing.assert_array_equal(counts.sum(-1), total[:, 0])
    np.testing.assert_array_equal(counts, divided(noise, probs, total))


def test_topics_at_given_shares_are_expectation_maximisation():
    shares = torch.as_tensor(GENERATOR.dirichlet(np.ones(2), 30))
    counts = torch.as_tensor(GENERATOR.poisson(2.0, (30, 5))).double()
    overall = counts.sum(0) / counts.sum()
    theta, n, base = shares.numpy(), counts.numpy(), overall.numpy()
    topics = theta.T @ n + base
    topics /= topics.sum(1, keepdims=True)
    for _ in range(40):
        new = np.zeros_like(topics)
        for row in range(30):
            for word in range(5):
                new[:, word] += n[row, word] * theta[row] * topics[:, word] / (theta[row] @ topics[:, word])
        topics = new + 1e-3 * base
        topics /= topics.sum(1, keepdims=True)
    np.testing.assert_allclose(_fit_topics(shares, counts, overall), topics, rtol=1e-9)


# -- the mechanism ----------------------------------------------------------------------------------------------------

ROWS = 7
FORMS = {
    "probs": (("a", Discrete(2)),),
    "topics": (("t", Simplex(2)),),
    "logits": (("a", Discrete(2)), ("r", Real(1))),
}


def of_form(form, total=9, parents=(), **options):
    """A node of four categories, its parameters, values of its parents, and what one draw of each row is likely to be.

    Natural parameters have two replicas, parents one.
    """
    rng = np.random.default_rng(8)
    node = m.Multinomial(4, total, **options).setup(m.Family("x", (*FORMS[form], *parents)))
    a, r, t = rng.integers(0, 2, ROWS), rng.normal(size=ROWS), rng.dirichlet(np.ones(2), ROWS)
    values = {"a": np.eye(2)[a], "r": r[:, None], "t": t}
    table = rng.dirichlet(np.ones(4), (2, 2))
    logits, slopes = rng.normal(size=(2, 2, 4)), rng.normal(size=(2, 1, 4))
    if form == "probs":
        params, shares = {"probs": table}, table[:, a]
    elif form == "topics":
        params, shares = {"topics": table}, t @ table
    else:
        params = {"logits": logits, "weight": slopes}
        shares = special.softmax(logits[:, a] + r[:, None] * slopes, -1)
    tensors = {name: torch.as_tensor(value) for name, value in params.items()}
    return node, tensors, {name: torch.as_tensor(values[name])[None] for name, _ in FORMS[form]}, shares


@pytest.mark.parametrize("form", FORMS)
def test_the_density_is_that_of_the_categories_that_are_seen(form):
    rng = np.random.default_rng(11)
    node, params, parents, shares = of_form(form)
    assert node.form == form
    value = rng.integers(0, 5, (ROWS, 4)).astype(float)
    mask = rng.random((ROWS, 4)) < 0.6
    mask[0], mask[1], mask[2] = True, [True, False, False, False], False
    whole = node.log_prob(params, torch.as_tensor(value)[None], parents)
    seen = node.log_prob(params, torch.as_tensor(value)[None], parents, torch.as_tensor(mask)[None])
    for replica in range(2):
        for row in range(ROWS):
            own, counts = shares[replica, row], value[row]
            assert whole[replica, row].item() == pytest.approx(stats.multinomial(counts.sum(), own).logpmf(counts))
            kept, expected = mask[row], 0.0
            if kept.any():
                expected = stats.multinomial(counts[kept].sum(), own[kept] / own[kept].sum()).logpmf(counts[kept])
            assert seen[replica, row].item() == pytest.approx(expected, abs=1e-9)


def test_what_is_impossible_counts_as_hardly_possible():
    node = m.Multinomial(2, 3).setup(m.Family("x"))
    params = {"probs": torch.tensor([[[0.0, 1.0]]]).double()}
    value = torch.tensor([[[1.0, 2.0]]]).double()
    expected = np.log(3) + np.log(1e-12)
    assert node.log_prob(params, value, {}).item() == pytest.approx(expected)
    assert node.log_shares(params, {}, value).flatten().tolist() == pytest.approx([np.log(1e-12), 0.0])
    topics = m.Multinomial(2, 3).setup(m.Family("x", (("t", Simplex(2)),)))
    table = {"topics": torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]).double()}
    shares = {"t": torch.tensor([[[0.5, 0.5]]]).double()}
    assert topics.log_prob(table, value, shares).item() == pytest.approx(expected)


@pytest.mark.parametrize("form", FORMS)
def test_draws_gaussian_draws_and_means_are_those_of_each_rows_shares(form):
    rng = np.random.default_rng(11)
    node, params, parents, shares = of_form(form)
    assert (node.noise.dim, node.noise.kind, node.relaxed_noise.dim, node.relaxed_noise.kind) == (
        (3, "uniform", 4, "normal")
    )
    noise, normal = rng.uniform(size=(ROWS, 3)), rng.normal(size=(ROWS, 4))
    drawn = node.forward(params, parents, torch.as_tensor(noise)[None])
    relaxed = node.relaxed(params, parents, torch.as_tensor(normal)[None], 0.5)
    mean = node.mean(params, parents)
    for replica in range(2):
        own = shares[replica]
        np.testing.assert_array_equal(drawn[replica], divided(noise, own, np.full((ROWS, 1), 9.0)))
        np.testing.assert_allclose(mean[replica], 9 * own)
        for row in range(ROWS):
            root = np.diag(np.sqrt(own[row])) - np.outer(own[row], np.sqrt(own[row]))
            np.testing.assert_allclose(root @ root.T, np.diag(own[row]) - np.outer(own[row], own[row]), atol=1e-12)
            np.testing.assert_allclose(relaxed[replica, row], 9 * own[row] + 3 * root @ normal[row])
    assert m.Multinomial(4).setup(m.Family("x")).mean({"probs": torch.ones(1, 1, 4) / 4}, {}) is None


@pytest.mark.parametrize("form", FORMS)
def test_missing_categories_get_what_the_seen_ones_leave(form):
    rng = np.random.default_rng(11)
    node, params, parents, shares = of_form(form)
    noise = rng.uniform(size=(ROWS, 3))
    value = rng.integers(0, 3, (ROWS, 4)).astype(float)
    value[2] = [6.0, 5.0, 1.0, 1.0]  # more than all draws
    mask = rng.random((ROWS, 4)) < 0.5
    mask[0], mask[1], mask[2] = True, False, [True, True, False, False]
    found = node.complete(
        params, torch.as_tensor(value)[None], parents, torch.as_tensor(mask)[None], torch.as_tensor(noise)[None]
    )
    for replica in range(2):
        for row in range(ROWS):
            seen = np.where(mask[row], value[row], 0.0)
            left = 0.0 if mask[row].all() else max(9.0 - seen.sum(), 0.0)
            own = np.where(mask[row], 0.0, shares[replica, row])
            rest = divided(noise[row : row + 1], own[None], np.array([[left]]))[0]
            np.testing.assert_array_equal(found[replica, row], seen + rest)


@pytest.mark.parametrize("form", FORMS)
def test_noise_of_each_split_lies_between_the_distribution_functions_of_its_count(form):
    rng = np.random.default_rng(11)
    node, params, parents, shares = of_form(form)
    value = rng.integers(0, 4, (ROWS, 4)).astype(float)
    value[0] = [0.0, 0.0, 3.0, 2.0]  # no draw reaches the split of the first two
    value[1] = [4.0, 0.0, 0.0, 0.0]
    uniform = rng.uniform(size=(ROWS, 3))
    found = node.abduct(params, torch.as_tensor(value)[None], parents, torch.as_tensor(uniform)[None])
    for replica in range(2):
        for row in range(ROWS):
            for number, (first, before, end) in halves(4).items():
                n, k = value[row, first:end].sum(), value[row, first:before].sum()
                share = shares[replica, row, first:before].sum() / shares[replica, row, first:end].sum()
                low, high = stats.binom(n, share).cdf([k - 1, k]) if n else (0.0, 1.0)
                expected = low + uniform[row, number] * (high - low)
                assert found[replica, row, number].item() == pytest.approx(expected, abs=1e-9)
    again = node.forward(params, parents, found)
    # where the number of draws is that of the node, the noise gives the counts back
    whole = value.sum(-1) == 9
    np.testing.assert_array_equal(again[0, whole], value[whole])


def test_a_parent_may_hold_the_number_of_draws():
    rng = np.random.default_rng(11)
    node, params, parents, shares = of_form("probs", total="n", parents=(("n", Real(1)),))
    assert (node.form, node.predictor.rows) == ("probs", 2)
    parents["n"] = torch.tensor([[[3.6], [-2.0], [0.4], [5.0], [2.5], [7.0], [1.0]]]).double()
    expected = np.array([4.0, 0.0, 0.0, 5.0, 2.0, 7.0, 1.0])
    np.testing.assert_array_equal(node.draws(parents, torch.zeros(1, ROWS, 3))[0, :, 0], expected)
    np.testing.assert_allclose(node.mean(params, parents), expected[:, None] * shares)
    drawn = node.forward(params, parents, torch.as_tensor(rng.uniform(size=(1, ROWS, 3))))
    np.testing.assert_array_equal(drawn.sum(-1), np.stack([expected, expected]))
    fixed = m.Multinomial(3, 6).setup(m.Family("x")).draws({}, torch.zeros(2, 5, 3).double())
    assert (fixed.shape, fixed.item()) == ((1, 1, 1), 6.0)


def test_it_starts_from_weighted_frequencies_with_one_draw_of_all():
    rng = np.random.default_rng(11)
    node, _, parents, _ = of_form("probs")
    value, weight = rng.poisson(2.0, (ROWS, 4)).astype(float), rng.uniform(0.5, 2.0, ROWS)
    given = {name: one[0] for name, one in parents.items()}
    found = node.start(torch.as_tensor(value), given, torch.as_tensor(weight))["probs"]
    a, overall = given["a"].argmax(-1).numpy(), weight @ value + 0.25
    overall /= overall.sum()
    for k in range(2):
        counted = weight[a == k] @ value[a == k] + overall
        np.testing.assert_allclose(found[k], counted / counted.sum())
    node, _, parents, _ = of_form("topics")
    found = node.start(torch.as_tensor(value), {"t": parents["t"][0]}, torch.as_tensor(weight))["topics"]
    counts = torch.as_tensor(weight[:, None] * value)
    torch.testing.assert_close(found, _fit_topics(parents["t"][0], counts, torch.as_tensor(overall)))


def test_parameters_have_the_shapes_axes_and_looks_of_their_form():
    node, params, parents, _ = of_form("probs")
    own = node.own_axis
    assert own.coordinates == (("x", 4),)
    assert node.parameters()["probs"].shape == (2, 4)
    assert node.axes() == {"probs": (Axis(categories=(("a", 2),)), own)}
    assert node.describe(params)["probs"].shape == (2, 2, 4)
    node, params, parents, _ = of_form("topics")
    assert node.parameters()["topics"].shape == (2, 4)
    assert node.axes() == {"topics": (Axis(coordinates=(("t", 2),)), own)}
    torch.testing.assert_close(node.describe(params)["topics"], params["topics"])
    node, params, parents, _ = of_form("logits")
    assert {name: one.shape for name, one in node.parameters().items()} == {"logits": (2, 4), "weight": (1, 4)}
    assert set(node.axes()) == {"logits", "weight"}
    shown = node.describe(params)
    for name in ("logits", "weight"):
        torch.testing.assert_close(shown[name], params[name] - params[name][..., :1])
    torch.testing.assert_close(params["logits"], of_form("logits")[1]["logits"])  # what is shown is a copy
    given = {name: one[0] for name, one in parents.items()}
    node.on_scale(torch.zeros(ROWS, 4).double(), given, torch.ones(ROWS).double())
    units = node.predictor.units
    torch.testing.assert_close(units.in_shift, given["r"].mean(0))
    torch.testing.assert_close(units.in_scale, given["r"].std(0, correction=0))
    assert (units.out_shift.tolist(), units.out_scale.tolist()) == ([0.0] * 4, [1.0] * 4)
    plain, *_ = of_form("probs")
    plain.on_scale(torch.zeros(ROWS, 4).double(), {"a": given["a"]}, torch.ones(ROWS).double())
    assert plain.predictor.units is None
    assert of_form("topics", network=(3,))[0].form == of_form("probs", network=(3,))[0].form == "logits"
