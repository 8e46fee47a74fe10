"""Nodes: what people write in a regression, beside the programs that they write it in.

``ratio`` is what each case limits, ``limit`` stands beside it.
"""

import re
from functools import partial

import numpy as np
import pandas as pd
import statsmodels.api as sm
import statsmodels.formula.api as smf
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import OneHotEncoder

import otpdag as otp
from benchmarks import tables_with_gaps
from benchmarks.harness import Case, Record, Settings, streams, timed
from otpdag import mechanisms as m

Floats = NDArray[np.float64]

ROWS, MISSING = 600, 0.2
FORMULAS = {
    "price": "load * C(season) + C(town)",
    "demand": "load + I(load ** 2) + C(season) * C(town)",
    "calls": "load * C(season)",
    "paid": "load + C(season) + C(town)",
}
KINDS = {"price": m.Normal, "demand": m.Normal, "calls": m.Poisson, "paid": m.Bernoulli}
PEERS = {"price": smf.ols, "demand": smf.ols, "calls": smf.poisson, "paid": smf.logit}
ITEMS = ["selfLR", "ClinLR", "DoleLR", "PID"]


# -- terms -------------------------------------------------------------------------------------------------------------


def regression_rows(rng: np.random.Generator, rows: int = ROWS) -> pd.DataFrame:
    """A number and two categories, and four nodes that depend on them in four ways."""
    load, season, town = rng.normal(2.0, 1.0, rows), rng.integers(0, 3, rows), rng.integers(0, 2, rows)
    effects, slopes = rng.normal(0, 0.6, 3)[season], rng.normal(0.4, 0.3, 3)[season]
    line = effects + slopes * load
    columns = {
        "load": load,
        "season": np.array(["dry", "mild", "wet"])[season],
        "town": np.array(["north", "south"])[town],
        "price": 1 + line + 0.5 * town + rng.normal(size=rows),
        "demand": load - 0.3 * load**2 + effects * (1 + town) + 0.7 * rng.normal(size=rows),
        "calls": rng.poisson(np.exp(0.5 * line)),
        "paid": (rng.random(rows) < 1 / (1 + np.exp(0.5 - line + 0.4 * town))).astype(int),
    }
    return pd.DataFrame(columns)


def _parents(node: str) -> list[str]:
    return [name for name in ("load", "season", "town") if name in FORMULAS[node]]


def _fit(table: pd.DataFrame, node: str) -> otp.FitResult:
    known = {"load": m.Normal(), "season": m.Categorical(3), "town": m.Categorical(2)}
    parents = _parents(node)
    graph = otp.Graph([(parent, node) for parent in parents])
    nodes = {**{parent: known[parent] for parent in parents}, node: KINDS[node](terms=FORMULAS[node])}
    return otp.fit(otp.Model(graph, nodes), table[[*parents, node]])


def _coefficients(result: otp.FitResult, node: str) -> pd.DataFrame:
    """Intercept and slopes with their standard errors, by what a formula calls them."""
    own = result.standard_errors().query("node == @node and parameter != 'scale' and std_error == std_error")
    return own.set_index(own["at"].str.replace(r"(, )?\b1$", "", regex=True))[["estimate", "std_error"]]


def _peer(table: pd.DataFrame, node: str) -> pd.DataFrame:
    given = {} if PEERS[node] is smf.ols else {"disp": 0, "tol": 1e-10}
    other = PEERS[node](f"{node} ~ {FORMULAS[node]}", table).fit(**given)
    # least squares divides by what rows are left, the likelihood by all
    share = np.sqrt(other.df_resid / len(table)) if PEERS[node] is smf.ols else 1.0
    names = [re.sub(r"C\((\w+)\)\[T\.(\w+)\]", r"\1=\2", name) for name in other.params.index]
    names = ["" if name == "Intercept" else name for name in names]
    return pd.DataFrame({"estimate": other.params.to_numpy(), "std_error": share * other.bse.to_numpy()}, index=names)


def terms(settings: Settings) -> Record:
    """The largest difference from statsmodels on complete rows: estimates in standard errors, errors relatively."""
    worst, seconds = 0.0, [0.0, 0.0]
    for repeat in range(settings.repeats):
        table = regression_rows(streams(settings.seed, "terms", repeat).data)
        for node in FORMULAS:
            ours, own = timed(partial(_fit, table, node))
            theirs, other = timed(partial(_peer, table, node))
            found = _coefficients(ours, node).loc[theirs.index]
            moved = ((found["estimate"] - theirs["estimate"]) / theirs["std_error"]).abs().max()
            errors = (found["std_error"] / theirs["std_error"] - 1).abs().max()
            worst, seconds = max(worst, float(moved), float(errors)), [seconds[0] + own, seconds[1] + other]
    return {"ratio": worst, "limit": 1e-4, "seconds": seconds[0], "seconds_peer": seconds[1]}


def terms_gaps(settings: Settings) -> Record:
    """The error of coefficients with a fifth of all cells empty, over that of complete rows.

    Both are taken against a fit of twenty times as many rows, in standard errors of the complete fit.
    """
    complete, gaps = [], []
    for repeat in range(settings.repeats):
        draws = streams(settings.seed, "terms_gaps", repeat)
        both = regression_rows(draws.data, 21 * ROWS)
        table, many = both.iloc[:ROWS], both.iloc[ROWS:]
        emptied = table.mask(draws.missing.random(table.shape) < MISSING)
        for node in FORMULAS:
            truth, full, partly = (_coefficients(_fit(one, node), node) for one in (many, table, emptied))
            for found, errors in ((full, complete), (partly, gaps)):
                errors += list(((found["estimate"] - truth["estimate"]) / full["std_error"]) ** 2)
    ours, oracle = (float(np.sqrt(np.mean(errors))) for errors in (gaps, complete))
    return {"ratio": ours / oracle, "ours": ours, "oracle": oracle, "limit": 1.3}


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(settings: Settings) -> Record:
    """Held-out log loss of a vote given four items of seven levels, over that of ridge logistic regression.

    The node is written as the note on its table says.
    """
    data = sm.datasets.anes96.load_pandas().data[[*ITEMS, "vote"]].astype(int)
    graph, items = otp.Graph([(item, "vote") for item in ITEMS]), {item: m.Categorical(7) for item in ITEMS}
    losses: dict[str, list[float]] = {"ours": [], "oracle": [], "table": []}
    for repeat in range(settings.repeats):
        order = streams(settings.seed, "tables", repeat).data.permutation(len(data))
        train, test = data.iloc[order[:660]], data.iloc[order[660:]]
        plain = otp.fit(otp.Model(graph, {**items, "vote": m.Bernoulli()}), train)
        [said] = [found[1] for note in plain.notes if (found := re.search(r"terms='([^']+)'", note))]
        better = otp.fit(otp.Model(graph, {**items, "vote": m.Bernoulli(terms=said)}), train)
        one_hot = OneHotEncoder(categories=[sorted(data[item].unique()) for item in ITEMS]).fit(data[ITEMS])
        ridge = LogisticRegression(max_iter=2000).fit(one_hot.transform(train[ITEMS]), train["vote"])
        shares = {
            "ours": better.model.predict_proba(test[ITEMS], "vote").to_numpy()[:, 1],
            "oracle": ridge.predict_proba(one_hot.transform(test[ITEMS]))[:, 1],
            "table": plain.model.predict_proba(test[ITEMS], "vote").to_numpy()[:, 1],
        }
        for name, share in shares.items():
            losses[name].append(log_loss(test["vote"], share))
    ours, oracle, table = (float(np.mean(losses[name])) for name in ("ours", "oracle", "table"))
    return {"ratio": ours / oracle, "ours": ours, "oracle": oracle, "table": table, "limit": 1.0}


CASES: dict[str, Case] = {"terms": terms, "terms_gaps": terms_gaps, "tables": tables, **tables_with_gaps.CASES}
