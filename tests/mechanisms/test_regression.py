"""Regressions that start mechanisms, beside plain solutions of the same equations."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import optimize

from otpdag.mechanisms import generalised_linear as r
from otpdag.mechanisms.predictor import Equations

GENERATOR = np.random.default_rng(1)


def problem(rows=400, dim=2):
    """Three configurations, two numeric parents, weights, and an offset."""
    config = torch.eye(3).double()[GENERATOR.integers(0, 3, rows)]
    values = torch.as_tensor(GENERATOR.normal(size=(rows, 2)))
    weight = torch.as_tensor(GENERATOR.uniform(0.2, 2.0, rows))
    offset = torch.as_tensor(GENERATOR.normal(size=(rows, dim)) * 0.3)
    table = torch.as_tensor(GENERATOR.normal(size=(3, dim)) * 0.5)
    slopes = torch.as_tensor(GENERATOR.normal(size=(2, dim)) * 0.4)
    return config, values, weight, offset, offset + config @ table + values @ slopes


def test_least_squares_are_those_of_the_whole_design():
    config, values, weight, offset, eta = problem()
    target = eta + torch.as_tensor(GENERATOR.normal(size=eta.shape))
    table, slopes = r.least_squares(config, values, target, weight[:, None], offset)
    root = weight.sqrt().unsqueeze(-1)
    design = torch.cat([config, values], 1)
    plain = np.linalg.lstsq((root * design).numpy(), (root * (target - offset)).numpy(), rcond=None)[0]
    np.testing.assert_allclose(torch.cat([table, slopes]), plain, atol=2e-4)  # but for the ridges
    assert Equations.table_ridge == 1e-4
    only_table, none = r.least_squares(config, config[:, :0], target, weight[:, None], offset)
    assert none.shape == (0, 2)
    counts = (config * weight.unsqueeze(-1)).sum(0)
    means = (config * weight.unsqueeze(-1)).T @ (target - offset) / counts.unsqueeze(-1)
    np.testing.assert_allclose(only_table, means, atol=2e-4)
    no_table, only_slopes = r.least_squares(config[:, :0], values, target, weight[:, None], offset)
    assert no_table.shape == (0, 2)
    plain = np.linalg.lstsq((root * values).numpy(), (root * (target - offset)).numpy(), rcond=None)[0]
    np.testing.assert_allclose(only_slopes, plain, atol=1e-5)


def test_ridges_are_those_of_the_definition():
    """The table is pulled to the mean by 1e-4 rows' worth in all, the slopes to zero by 1e-6 of all weight."""
    config, values, weight, _, eta = problem(rows=12)
    column, w = eta[:, :1], weight.unsqueeze(-1)
    table, slopes = Equations(config, values, w).solved(column)
    total, mean = weight.sum(), (w * column).sum() / weight.sum()
    design = torch.cat([config, values], 1)
    ridge = torch.cat([torch.full((3,), 1e-4 / 3), torch.full((2,), 1e-6)]).double() * total
    gram = design.T @ (w * design) + torch.diag(ridge)
    plain = torch.linalg.solve(gram, design.T @ (w * (column - mean)))
    torch.testing.assert_close(slopes, plain[3:], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(table, plain[:3] + mean, rtol=1e-7, atol=1e-9)
    empty = torch.cat([config, torch.zeros(12, 1).double()], 1)
    table, _ = Equations(empty, values, w).solved(column)
    assert torch.isfinite(table).all()


@pytest.mark.parametrize(
    ("fit", "draw", "score"),
    [
        (r.LOG_COUNT.fit, lambda eta: GENERATOR.poisson(np.exp(eta)), lambda y, eta: y - np.exp(eta)),
        (
            r.LOG_POSITIVE.fit,
            lambda eta: GENERATOR.gamma(4.0, np.exp(eta) / 4.0),
            lambda y, eta: y / np.exp(eta) - 1,
        ),
        (
            r.LOGIT.fit,
            lambda eta: GENERATOR.uniform(size=eta.shape) < 1 / (1 + np.exp(-eta)),
            lambda y, eta: y - 1 / (1 + np.exp(-eta)),
        ),
    ],
    ids=["counts", "positive", "binary"],
)
def test_generalised_linear_models_solve_their_score_equations(fit, draw, score):
    config, values, weight, offset, eta = problem()
    target = torch.as_tensor(np.asarray(draw(eta.numpy()), dtype=float))
    table, slopes = fit(config, values, target, weight[:, None], offset)
    found = torch.cat([table, slopes]).numpy()
    design, w = torch.cat([config, values], 1).numpy(), weight.numpy()

    def equations(beta, d):
        return design.T @ (w * score(target[:, d].numpy(), offset[:, d].numpy() + design @ beta)) / w.sum()

    for d in range(2):
        plain = optimize.root(equations, found[:, d], args=(d,), tol=1e-12)
        assert plain.success
        np.testing.assert_allclose(found[:, d], plain.x, atol=1e-3)  # but for the ridges
    apart, _ = fit(config, values, target[:, :1], weight[:, None], offset[:, :1])  # columns do not see one another
    torch.testing.assert_close(apart, table[:, :1], rtol=1e-6, atol=1e-8)
    by_column = fit(config, values, target, weight.unsqueeze(-1) * torch.tensor([[1.0, 1.0]]).double(), offset)
    torch.testing.assert_close(by_column[0], table)


def test_predictions_are_bounded_where_a_class_is_never_seen():
    config, values, weight, offset, eta = problem()
    target = torch.where(config[:, :1] > 0, 0.0, torch.ones_like(eta))
    for fit in (r.LOGIT.fit, r.LOG_COUNT.fit):
        table, slopes = fit(config, values, target, weight[:, None], offset)
        assert torch.isfinite(table).all()
        assert torch.isfinite(slopes).all()
        assert (table[0] < table[1:].amin(0) - 3).all()


def test_a_multinomial_logit_solves_its_score_equations():
    config, values, weight, _, _ = problem(dim=3)
    eta = 0.5 * torch.as_tensor(GENERATOR.normal(size=(len(values), 3)))
    counts = torch.as_tensor(GENERATOR.multinomial(6, torch.softmax(eta, -1).numpy())).double()
    offset = torch.zeros(len(values), 3).double()
    table, slopes = r.softmax(config, values, counts, weight[:, None], offset, steps=400)
    probs = torch.softmax(config @ table + values @ slopes, -1)
    gap = weight.unsqueeze(-1) * (counts - counts.sum(-1, keepdim=True) * probs)
    design = torch.cat([config, values], 1)
    np.testing.assert_allclose(design.T @ gap / counts.sum(), 0.0, atol=2e-4)
    for part in (table, slopes):
        np.testing.assert_allclose(part.mean(-1), 0.0, atol=1e-12)
    # a row's counts count as often as they are many, and a step is twice the gap of shares over the bound
    once = r.softmax(config, values, counts, weight[:, None], offset, steps=1)
    size = counts.sum(-1, keepdim=True)
    step = Equations(config, values, weight.unsqueeze(-1) * size).solved(2 * (counts / size - 1 / 3))
    for found, plain in zip(once, step, strict=True):
        torch.testing.assert_close(found, plain - plain.mean(-1, keepdim=True))
    known = torch.as_tensor(GENERATOR.normal(size=(len(values), 3)))
    moved = r.softmax(config[:, :0], values, counts, weight[:, None], known, steps=1)
    shares = torch.softmax(known, -1)
    step = Equations(config[:, :0], values, weight.unsqueeze(-1) * size).solved(2 * (counts / size - shares))
    torch.testing.assert_close(moved[1], step[1] - step[1].mean(-1, keepdim=True))


@pytest.mark.parametrize("softness", [0.0, 0.1])
def test_rows_alike_are_fitted_as_one(softness):
    """A configuration that differs in the last digits is not merged, and must lead to the same table."""
    generator = torch.Generator().manual_seed(1)
    label = torch.randint(0, 3, (500,), generator=generator)
    config = (1 - softness) * torch.eye(4, dtype=torch.float64)[label] + softness / 4  # no row has the last label
    target = torch.poisson(torch.tensor([[1.0, 9.0], [4.0, 2.0], [20.0, 0.2]], dtype=torch.float64)[label], generator)
    weight, offset = torch.rand(500, generator=generator, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)
    shaken = config + 1e-13 * torch.rand(500, 4, generator=generator, dtype=torch.float64)
    for fit in (r.LOG_COUNT.fit, r.LOG_POSITIVE.fit):
        merged, single = (fit(one, one[:, :0], target, weight[:, None], offset)[0] for one in (config, shaken))
        np.testing.assert_allclose(merged, single, rtol=1e-8, atol=1e-9)
    if not softness:
        mean = torch.stack([(weight[:, None] * target)[label == k].sum(0) / weight[label == k].sum() for k in range(3)])
        np.testing.assert_allclose(
            r.LOG_COUNT.fit(config, config[:, :0], target, weight[:, None], offset)[0][:3].exp(), mean, rtol=1e-2
        )


LINKS = {
    "counts": (r.LOG_COUNT, np.exp, lambda mean: mean, lambda mean: mean),
    "positive": (r.LOG_POSITIVE, np.exp, lambda mean: mean, np.ones_like),
    "binary": (r.LOGIT, lambda eta: 1 / (1 + np.exp(-eta)), *[lambda mean: mean * (1 - mean)] * 2),
}


@pytest.mark.parametrize("given", ["both", "table", "slopes", "merged"])
@pytest.mark.parametrize("steps", [1, 2, 4, 12])
@pytest.mark.parametrize("name", LINKS)
def test_every_step_is_a_weighted_regression_of_the_working_response(name, steps, given):
    link, inverse, slope, precision = LINKS[name]
    rng = np.random.default_rng(steps)
    config, values, weight, offset, eta = (one.numpy() for one in problem(rows=60))
    target = {"counts": rng.poisson(np.exp(eta)), "positive": rng.gamma(4.0, np.exp(eta) / 4)}.get(
        name, rng.uniform(size=eta.shape) < 0.5
    )
    target = np.asarray(target, dtype=float)
    offset = np.zeros((1, 2)) if given == "merged" else offset
    config = config[:, :0] if given == "slopes" else config
    values = values[:, :0] if given in ("table", "merged") else values
    centre = (weight[:, None] * target).sum(0) / weight.sum()
    half = 0.5 * (target + centre)
    eta = np.log(half / (1 - half)) if name == "binary" else np.log(np.maximum(half, 1e-12))

    def solved(response, own):
        columns = [
            Equations(*map(torch.as_tensor, (config, values, own[:, [d]]))).solved(torch.as_tensor(response[:, [d]]))
            for d in range(2)
        ]
        return (np.concatenate([column[side].numpy() for column in columns], 1) for side in (0, 1))

    table, slopes = solved(eta - offset, weight[:, None] * precision(inverse(eta)))
    for _ in range(steps - 1):
        eta = np.clip(offset + config @ table + values @ slopes, -30, 30)
        mean = inverse(eta)
        before = table, slopes
        table, slopes = solved(eta + (target - mean) / slope(mean) - offset, weight[:, None] * precision(mean))
        if all(np.abs(new - old).max(initial=0.0) <= 1e-8 for new, old in zip((table, slopes), before, strict=True)):
            break
    tensors = [torch.as_tensor(one) for one in (config, values, target, weight[:, None], offset)]
    found = replace(link, steps=steps).fit(*tensors)
    np.testing.assert_allclose(found[0], table, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(found[1], slopes, rtol=1e-6, atol=1e-8)
