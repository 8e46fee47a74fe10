"""Maximum likelihood of a regression with gaps by its own quadrature: numbers on a grid, categories one by one."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import patsy
import torch
from torch import Tensor

NODES, REACH = 161, 6.5  # of the number's grid, in standard deviations either way


@dataclass(frozen=True)
class Completions:
    """All ways to fill the gaps of all rows: the row of each, its parents, the node, and the logarithm of its width."""

    row: Tensor
    parents: pd.DataFrame
    node: Tensor
    is_seen: Tensor
    log_width: Tensor


def completions(table: pd.DataFrame, node: str) -> Completions:
    """Every completion of parents; where the node is empty it stays so."""
    known = table.drop(columns=node)
    rows = known.reset_index(drop=True).assign(row=np.arange(len(table)), log_width=0.0)
    for name in known:
        empty = rows[name].isna()
        if pd.api.types.is_numeric_dtype(known[name]):
            centre, spread = known[name].mean(), known[name].std()
            grid = np.linspace(centre - REACH * spread, centre + REACH * spread, NODES)
            width = np.log(grid[1] - grid[0])
        else:
            grid, width = np.unique(known[name].dropna()), 0.0
        ways = pd.DataFrame({name: grid, "log_width_of": width})
        filled = rows[empty].drop(columns=name).merge(ways, how="cross")
        filled["log_width"] += filled.pop("log_width_of")
        rows = pd.concat([rows[~empty], filled], ignore_index=True)
    value = table[node].to_numpy(dtype=float)[rows["row"]]
    seen, width = torch.as_tensor(~np.isnan(value)), torch.as_tensor(rows["log_width"].to_numpy())
    row = torch.as_tensor(rows["row"].to_numpy())
    return Completions(row, rows[list(known)], torch.as_tensor(np.nan_to_num(value)), seen, width)


def log_density(kind: str, value: Tensor, line: Tensor, log_scale: Tensor) -> Tensor:
    """Of a regression's node at its prediction, up to a constant."""
    if kind == "normal":
        return -0.5 * ((value - line) / log_scale.exp()) ** 2 - log_scale
    return value * line - (torch.exp(line) if kind == "count" else torch.nn.functional.softplus(line))


def coefficients(table: pd.DataFrame, node: str, formula: str, kind: str) -> pd.Series:
    """Those of the largest likelihood of what rows show, by the names that patsy gives them."""
    ways = completions(table, node)
    design = patsy.dmatrix(formula, ways.parents, return_type="dataframe")
    x, rows = torch.as_tensor(design.to_numpy()), len(table)
    unit = x.std(0).where(x.std(0) > 0, torch.ones(()))
    numbers = [torch.as_tensor(own.to_numpy()) for _, own in ways.parents.select_dtypes("number").items()]
    codes = [torch.as_tensor(pd.factorize(own)[0]) for _, own in ways.parents.select_dtypes(exclude="number").items()]
    point = [torch.zeros(x.shape[1] + 1).double()]
    point += [torch.stack([own[ways.log_width == 0].mean(), own[ways.log_width == 0].std().log()]) for own in numbers]
    point += [torch.zeros(int(own.max()) + 1).double() for own in codes]
    point = [part.requires_grad_() for part in point]

    def loss() -> Tensor:
        own, *others = point
        told = log_density(kind, ways.node, x @ (own[:-1] / unit), own[-1])
        joint = torch.where(ways.is_seen, told, 0.0) + ways.log_width
        for value, (centre, log_spread) in zip(numbers, others[: len(numbers)], strict=True):
            joint = joint - 0.5 * ((value - centre) / log_spread.exp()) ** 2 - log_spread
        for code, logits in zip(codes, others[len(numbers) :], strict=True):
            joint = joint + torch.log_softmax(logits, 0)[code]
        top = torch.full((rows,), -torch.inf).double().scatter_reduce(0, ways.row, joint.detach(), "amax")
        total = torch.zeros(rows).double().index_add(0, ways.row, torch.exp(joint - top[ways.row]))
        return -(top + total.log()).sum()

    search = torch.optim.LBFGS(point, max_iter=500, tolerance_grad=1e-6, history_size=30, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        value = loss()
        value.backward()
        return value

    search.step(closure)
    return pd.Series((point[0][:-1] / unit).detach().numpy(), index=design.columns)
