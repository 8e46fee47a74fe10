"""Regressions that start mechanisms, beside plain solutions of the same equations."""

import numpy as np
import pytest
import torch
from scipy import optimize

from otpdag.mechanisms import regression as r

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
    table, slopes = r.least_squares(config, values, target, weight, offset)
    root = weight.sqrt().unsqueeze(-1)
    design = torch.cat([config, values], 1)
    plain = np.linalg.lstsq((root * design).numpy(), (root * (target - offset)).numpy(), rcond=None)[0]
    np.testing.assert_allclose(torch.cat([table, slopes]), plain, atol=2e-4)  # but for the ridges
    assert r.TABLE_RIDGE == 1e-4
    only_table, none = r.least_squares(config, None, target, weight, offset)
    assert none.shape == (0, 2)
    counts = (config * weight.unsqueeze(-1)).sum(0)
    means = (config * weight.unsqueeze(-1)).T @ (target - offset) / counts.unsqueeze(-1)
    np.testing.assert_allclose(only_table, means, atol=2e-4)
    no_table, only_slopes = r.least_squares(None, values, target, weight, offset)
    assert no_table.shape == (0, 2)
    plain = np.linalg.lstsq((root * values).numpy(), (root * (target - offset)).numpy(), rcond=None)[0]
    np.testing.assert_allclose(only_slopes, plain, atol=1e-5)


def test_ridges_are_those_of_the_definition():
    """The table is pulled to the mean by 1e-4 rows' worth in all, the slopes to zero by 1e-6 of all weight."""
    config, values, weight, _, eta = problem(rows=12)
    column, w = eta[:, :1], weight.unsqueeze(-1)
    table, slopes = r._solve_shared(config, values, column, w)
    total, mean = weight.sum(), (w * column).sum() / weight.sum()
    design = torch.cat([config, values], 1)
    ridge = torch.cat([torch.full((3,), 1e-4 / 3), torch.full((2,), 1e-6)]).double() * total
    gram = design.T @ (w * design) + torch.diag(ridge)
    plain = torch.linalg.solve(gram, design.T @ (w * (column - mean)))
    torch.testing.assert_close(slopes, plain[3:], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(table, plain[:3] + mean, rtol=1e-7, atol=1e-9)
    empty = torch.cat([config, torch.zeros(12, 1).double()], 1)
    table, _ = r._solve_shared(empty, values, column, w)
    assert torch.isfinite(table).all()


@pytest.mark.parametrize(
    ("fit", "draw", "score"),
    [
        (r.log_count, lambda eta: GENERATOR.poisson(np.exp(eta)), lambda y, eta: y - np.exp(eta)),
        (
            r.log_positive,
            lambda eta: GENERATOR.gamma(4.0, np.exp(eta) / 4.0),
            lambda y, eta: y / np.exp(eta) - 1,
        ),
        (
            r.logit,
            lambda eta: GENERATOR.uniform(size=eta.shape) < 1 / (1 + np.exp(-eta)),
            lambda y, eta: y - 1 / (1 + np.exp(-eta)),
        ),
    ],
    ids=["counts", "positive", "binary"],
)
def test_generalised_linear_models_solve_their_score_equations(fit, draw, score):
    config, values, weight, offset, eta = problem()
    target = torch.as_tensor(np.asarray(draw(eta.numpy()), dtype=float))
    table, slopes = fit(config, values, target, weight, offset)
    found = torch.cat([table, slopes]).numpy()
    design, w = torch.cat([config, values], 1).numpy(), weight.numpy()

    def equations(beta, d):
        return design.T @ (w * score(target[:, d].numpy(), offset[:, d].numpy() + design @ beta)) / w.sum()

    for d in range(2):
        plain = optimize.root(equations, found[:, d], args=(d,), tol=1e-12)
        assert plain.success
        np.testing.assert_allclose(found[:, d], plain.x, atol=1e-3)  # but for the ridges
    apart, _ = fit(config, values, target[:, :1], weight, offset[:, :1])  # columns do not see one another
    torch.testing.assert_close(apart, table[:, :1], rtol=1e-6, atol=1e-8)
    by_column = fit(config, values, target, weight.unsqueeze(-1) * torch.tensor([[1.0, 1.0]]).double(), offset)
    torch.testing.assert_close(by_column[0], table)


def test_predictions_are_bounded_where_a_class_is_never_seen():
    config, values, weight, offset, eta = problem()
    target = torch.where(config[:, :1] > 0, 0.0, torch.ones_like(eta))
    for fit in (r.logit, r.log_count):
        table, slopes = fit(config, values, target, weight, offset)
        assert torch.isfinite(table).all()
        assert torch.isfinite(slopes).all()
        assert (table[0] < table[1:].amin(0) - 3).all()


def test_a_multinomial_logit_solves_its_score_equations():
    config, values, weight, _, _ = problem(dim=3)
    eta = 0.5 * torch.as_tensor(GENERATOR.normal(size=(len(values), 3)))
    counts = torch.as_tensor(GENERATOR.multinomial(6, torch.softmax(eta, -1).numpy())).double()
    offset = torch.zeros(len(values), 3).double()
    table, slopes = r.softmax(config, values, counts, weight, offset, steps=400)
    probs = torch.softmax(config @ table + values @ slopes, -1)
    gap = weight.unsqueeze(-1) * (counts - counts.sum(-1, keepdim=True) * probs)
    design = torch.cat([config, values], 1)
    np.testing.assert_allclose(design.T @ gap / counts.sum(), 0.0, atol=2e-4)
    for part in (table, slopes):
        np.testing.assert_allclose(part.mean(-1), 0.0, atol=1e-12)
    # a row's counts count as often as they are many, and a step is twice the gap of shares over the bound
    once = r.softmax(config, values, counts, weight, offset, steps=1)
    size = counts.sum(-1, keepdim=True)
    step = r._solve_shared(config, values, 2 * (counts / size - 1 / 3), weight.unsqueeze(-1) * size)
    for found, plain in zip(once, step, strict=True):
        torch.testing.assert_close(found, plain - plain.mean(-1, keepdim=True))
    known = torch.as_tensor(GENERATOR.normal(size=(len(values), 3)))
    moved = r.softmax(None, values, counts, weight, known, steps=1)
    shares = torch.softmax(known, -1)
    step = r._solve_shared(config[:, :0], values, 2 * (counts / size - shares), weight.unsqueeze(-1) * size)
    torch.testing.assert_close(moved[1], step[1] - step[1].mean(-1, keepdim=True))
