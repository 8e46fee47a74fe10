"""Nodes: what people write in a regression, beside the programs that they write it in.

``ratio`` is what each case limits, ``limit`` stands beside it.
"""

import re
import warnings
from functools import partial

import numpy as np
import pandas as pd
import statsmodels.api as sm
import statsmodels.formula.api as smf
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import OneHotEncoder
from statsmodels.gam.api import BSplines, GLMGam
from statsmodels.miscmodels.ordinal_model import OrderedModel

import otpdag as otp
from benchmarks import tables_with_gaps
from benchmarks.harness import Case, Record, Settings, streams, timed
from benchmarks.oracles.regression_gaps import coefficients
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
EXACT = {"price": "normal", "demand": "normal", "calls": "count", "paid": "logit"}
GAP_SETS, SPLITS = 6, 4  # for each repeat: over five data sets the ratio of errors wanders by 0.15
GROUPS, GROUPED_SETS = 60, 80  # for each repeat: of 400 data sets a coverage has a standard error of 0.015
TRUTH = {("loc", ""): 1.0, ("weight", "x"): 0.5, ("weight", "u"): 0.8, ("scale", ""): 0.7}
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
    return pd.DataFrame({"estimate": other.params, "std_error": share * other.bse}).rename(index=_as_ours)


def _as_ours(name: str) -> str:
    """What a formula of ours calls a coefficient of patsy's."""
    return "" if name == "Intercept" else re.sub(r"C\((\w+)\)\[T\.(\w+)\]", r"\1=\2", name)


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
    mixed = max(_mixed(streams(settings.seed, "mixed", repeat).data) for repeat in range(settings.repeats))
    return {
        "ratio": max(worst, mixed),
        "mixed": mixed,
        "limit": 1e-4,
        "seconds": seconds[0],
        "seconds_peer": seconds[1],
    }


# -- groups ------------------------------------------------------------------------------------------------------------


def grouped_rows(rng: np.random.Generator) -> pd.DataFrame:
    """Rows of groups with random intercepts."""
    school = np.repeat(np.arange(GROUPS), rng.integers(2, 12, GROUPS))
    x, intercept = rng.normal(size=len(school)), rng.normal(size=GROUPS)[school]
    line = [TRUTH["loc", ""], TRUTH["weight", "x"], TRUTH["weight", "u"]] @ np.stack([np.ones_like(x), x, intercept])
    noise = TRUTH["scale", ""] * rng.normal(size=len(x))
    return pd.DataFrame({"x": x, "y": line + noise, "school": school})


def _fit_groups(table: pd.DataFrame) -> otp.FitResult:
    nodes = {"x": m.Normal(), "u": m.Normal(group="school"), "y": m.Normal()}
    return otp.fit(otp.Model(otp.Graph([("x", "y"), ("u", "y")], hidden=["u"]), nodes), table)


def _mixed(rng: np.random.Generator) -> float:
    """The largest difference from statsmodels' MixedLM: estimates in standard errors, errors relatively."""
    table = grouped_rows(rng)
    ours = _fit_groups(table).standard_errors().query("node == 'y' and at != 'u' and parameter != 'scale'")
    other = smf.mixedlm("y ~ x", table, groups="school").fit(reml=False, gtol=1e-8)
    errors = other.bse_fe.to_numpy()
    moved = np.abs(ours["estimate"].to_numpy() - other.fe_params.to_numpy()) / errors
    return float(max(moved.max(), np.abs(ours["std_error"].to_numpy() / errors - 1).max()))


def groups(settings: Settings) -> Record:
    """The coverage of 90 % intervals of a random intercept's model, by curvature."""
    held = []
    for repeat in range(settings.repeats * GROUPED_SETS):
        result = _fit_groups(grouped_rows(streams(settings.seed, "groups", repeat).data))
        own = result.standard_errors(level=0.9).query("node == 'y'").set_index(["parameter", "at"])
        held.append([own["lower"][key] <= value <= own["upper"][key] for key, value in TRUTH.items()])
    each = dict(zip(("loc", "slope", "group_scale", "scale"), np.mean(held, 0).tolist(), strict=True))
    share = float(np.mean(held))
    return {"ratio": abs(share - 0.9) / 0.03, "coverage": share, **each, "limit": 1.0}


def terms_gaps(settings: Settings) -> Record:
    """The error of coefficients with a fifth of all cells empty, over that of complete rows.

    Both are taken against a fit of twenty times as many rows, in standard errors of the complete fit; ``std_error`` is
    that of the ratio over data sets. ``least`` is what the information in rows with such gaps allows: the root mean
    square of standard errors over complete ones. ``exact`` is the ratio of maximum likelihood by a quadrature of its
    own, ``same_sets`` that of our fits, both on the first data sets.
    """
    complete, gaps, bound, exact = [], [], [], []
    for repeat in range(GAP_SETS * settings.repeats):
        draws = streams(settings.seed, "terms_gaps", repeat)
        both = regression_rows(draws.data, 21 * ROWS)
        table, many = both.iloc[:ROWS], both.iloc[ROWS:]
        emptied = table.mask(draws.missing.random(table.shape) < MISSING)
        own: list[list[float]] = [[], [], [], []]
        for node, kind in EXACT.items():
            truth, full = _peer(many, node)["estimate"], _peer(table, node)
            found = _coefficients(_fit(emptied, node), node).loc[truth.index]
            far = [full["estimate"] - truth, found["estimate"] - truth, found["std_error"]]
            if repeat < settings.repeats:
                other = coefficients(emptied[[*_parents(node), node]], node, FORMULAS[node], kind)
                far.append(other.rename(_as_ours) - truth)
            for errors, one in zip(own, far, strict=False):
                errors += list((one / full["std_error"]) ** 2)
        for errors, squares in zip((complete, gaps, bound, exact), own, strict=True):
            errors += [float(np.mean(squares))] if squares else []
    squares = np.array([complete, gaps])
    ratios = [np.sqrt(np.divide(*np.delete(squares, at, 1).mean(1)[::-1])) for at in range(squares.shape[1])]
    few = len(exact)
    return {
        "ratio": float(np.sqrt(np.mean(gaps) / np.mean(complete))),
        "std_error": float(np.sqrt((len(ratios) - 1) * np.var(ratios))),  # by the jackknife
        "least": float(np.sqrt(np.mean(bound))),
        "exact": float(np.sqrt(np.mean(exact) / np.mean(complete[:few]))),
        "same_sets": float(np.sqrt(np.mean(gaps[:few]) / np.mean(complete[:few]))),
        "limit": 1.3,
    }


# -- curves ------------------------------------------------------------------------------------------------------------

CURVES = [lambda x: np.sin(2 * x), lambda x: 0.4 * x, lambda x: np.exp(-3 * x**2), lambda x: np.tanh(3 * x)]
CURVED = {"normal": m.Normal, "poisson": m.Poisson, "logit": m.Bernoulli}


def _our_curve(table: pd.DataFrame, kind: str, at: Floats) -> Floats:
    node = CURVED[kind](terms="spline(x, 10)")
    result = otp.fit(otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": node}), table)
    found = result.model.predict(pd.DataFrame({"x": at}), "y") if kind != "logit" else None
    if found is None:
        shares = result.model.predict_proba(pd.DataFrame({"x": at}), "y").to_numpy()
        return np.log(shares[:, 1] / shares[:, 0])
    line = found.to_numpy(dtype=float).ravel()
    return np.log(line) if kind == "poisson" else line


def _their_curve(table: pd.DataFrame, kind: str, at: Floats) -> Floats:
    """Penalised splines of statsmodels, the penalty by generalised cross-validation."""
    families = {"normal": sm.families.Gaussian, "poisson": sm.families.Poisson, "logit": sm.families.Binomial}
    basis, ones = BSplines(table[["x"]].to_numpy(), df=[12], degree=[3]), np.ones((len(table), 1))
    given = {"endog": table["y"].to_numpy(), "exog": ones, "smoother": basis, "family": families[kind]()}
    first = GLMGam(**given, alpha=[1.0])
    first.fit()
    found = GLMGam(**given, alpha=first.select_penweight()[0]).fit()
    return np.asarray(found.params[0] + basis.transform(at[:, None]) @ found.params[1:])


def curves(settings: Settings) -> Record:
    """The error of curves of numbers, counts and shares, over that of statsmodels' generalised additive models."""
    errors: dict[str, list[float]] = {"ours": [], "oracle": []}
    for repeat in range(settings.repeats):
        rng = streams(settings.seed, "curves", repeat).data
        x, curve = rng.normal(size=300), CURVES[repeat % len(CURVES)]
        at = np.sort(x)[10:-10]
        for kind, times in (("normal", 1.0), ("poisson", 1.0), ("logit", 2.0)):
            line = times * curve(x)
            values = {
                "normal": line + 0.5 * rng.normal(size=300),
                "poisson": rng.poisson(np.exp(line)),
                "logit": (rng.random(300) < 1 / (1 + np.exp(-line))).astype(int),
            }
            table = pd.DataFrame({"x": x, "y": values[kind]})
            for name, found in (("ours", _our_curve), ("oracle", _their_curve)):
                errors[name].append(float(np.mean((found(table, kind, at) - times * curve(at)) ** 2)))
    ours, oracle = (float(np.sqrt(np.mean(errors[name]))) for name in ("ours", "oracle"))
    return {"ratio": ours / oracle, "ours": ours, "oracle": oracle, "limit": 1.05}


# -- ordered, censored -------------------------------------------------------------------------------------------------


def ordered(settings: Settings) -> Record:
    """The largest difference from statsmodels' cumulative logit and probit, in standard errors and of these."""
    worst = 0.0
    for repeat in range(settings.repeats):
        rng = streams(settings.seed, "ordered", repeat).data
        table = pd.DataFrame(rng.normal(size=(ROWS, 2)), columns=["x", "u"])
        line = table @ rng.normal(0, 0.7, 2) + rng.logistic(size=ROWS)
        table["y"] = np.digitize(line, np.quantile(line, [0.15, 0.4, 0.7, 0.9]))
        for link in ("logit", "probit"):
            nodes = {"x": m.Normal(), "u": m.Normal(), "y": m.Ordinal(5, link=link)}
            result = otp.fit(otp.Model(otp.Graph([("x", "y"), ("u", "y")]), nodes), table)
            ours = result.standard_errors().query("node == 'y' and parameter == 'weight'")
            other = OrderedModel(table["y"], table[["x", "u"]], distr=link).fit(method="bfgs", disp=0, gtol=1e-8)
            moved = np.abs(ours["estimate"].to_numpy() - other.params[:2].to_numpy()) / other.bse[:2].to_numpy()
            errors = np.abs(ours["std_error"].to_numpy() / other.bse[:2].to_numpy() - 1)
            worst = max(worst, float(moved.max()), float(errors.max()))
    return {"ratio": worst, "limit": 1e-4}


def censored(settings: Settings) -> Record:
    """The error of slopes of right-censored times, over that of lifelines' accelerated failure times."""
    import lifelines  # of the extra `bench`

    errors: dict[str, list[float]] = {"ours": [], "oracle": []}
    for repeat in range(settings.repeats):
        rng = streams(settings.seed, "censored", repeat).data
        table = pd.DataFrame(rng.normal(size=(ROWS, 2)), columns=["x", "u"])
        slopes = rng.normal(0, 0.5, 2)
        line = 1 + table.to_numpy() @ slopes
        noise = {"Weibull": np.log(rng.weibull(1, ROWS)) / 1.5, "LogNormal": 0.8 * rng.normal(size=ROWS)}
        end = np.exp(1.2 + 0.5 * rng.normal(size=ROWS))
        for kind in noise:
            time = np.exp(line + noise[kind])
            rows = table.assign(time=np.minimum(time, end), seen=time <= end)
            ends = table.assign(**{"t.0": rows["time"], "t.1": rows["time"].where(rows["seen"])})
            nodes = {"x": m.Normal(), "u": m.Normal(), "t": getattr(m, kind)(censored=True)}
            found = otp.fit(otp.Model(otp.Graph([("x", "t"), ("u", "t")]), nodes), ends).model.params()["t"]["weight"]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                other = getattr(lifelines, f"{kind}AFTFitter")().fit(rows, "time", "seen").summary["coef"]
            errors["ours"] += list((found - slopes) ** 2)
            errors["oracle"] += list((other.xs(other.index[0][0])[["x", "u"]].to_numpy() - slopes) ** 2)
    ours, oracle = (float(np.sqrt(np.mean(errors[name]))) for name in ("ours", "oracle"))
    return {"ratio": ours / oracle, "ours": ours, "oracle": oracle, "limit": 1.02}


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(settings: Settings, named: bool = False) -> Record:
    """Held-out log loss of a vote given four items of seven levels, over that of ridge logistic regression.

    ``ratio`` is that of the plain table where levels are names; where they are numbers, of the terms that the note on
    the table says. ``table`` and ``terms`` are both, ``std_error`` that of the ratio over random halves.
    """
    data = sm.datasets.anes96.load_pandas().data[[*ITEMS, "vote"]].astype(int)
    if named:
        data[ITEMS] = data[ITEMS].apply(lambda column: column.map("level {}".format))
    graph, items = otp.Graph([(item, "vote") for item in ITEMS]), {item: m.Categorical(7) for item in ITEMS}
    losses: dict[str, list[float]] = {"table": [], "terms": [], "oracle": []}
    for repeat in range(SPLITS * settings.repeats):
        order = streams(settings.seed, "tables", repeat).data.permutation(len(data))
        train, test = data.iloc[order[:660]], data.iloc[order[660:]]
        plain = otp.fit(otp.Model(graph, {**items, "vote": m.Bernoulli()}), train)
        [said] = [found for note in plain.notes if (found := re.search(r"terms='([^']+)'(.*otp.ridge)?", note))]
        node = m.Bernoulli(terms=said[1], weight=otp.ridge(2.0) if said[2] else None)
        written = otp.fit(otp.Model(graph, {**items, "vote": node}), train)
        one_hot = OneHotEncoder(categories=[sorted(data[item].unique()) for item in ITEMS]).fit(data[ITEMS])
        ridge = LogisticRegression(max_iter=2000).fit(one_hot.transform(train[ITEMS]), train["vote"])
        shares = {
            "table": plain.model.predict_proba(test[ITEMS], "vote").to_numpy()[:, 1],
            "terms": written.model.predict_proba(test[ITEMS], "vote").to_numpy()[:, 1],
            "oracle": ridge.predict_proba(one_hot.transform(test[ITEMS]))[:, 1],
        }
        for name, share in shares.items():
            losses[name].append(log_loss(test["vote"], share))
    means = {name: float(np.mean(own)) for name, own in losses.items()}
    ours = "table" if named else "terms"
    left = np.array(losses[ours]) - means[ours] / means["oracle"] * np.array(losses["oracle"])
    std_error = float(left.std() / np.sqrt(len(left)) / means["oracle"])
    return {"ratio": means[ours] / means["oracle"], "std_error": std_error, **means, "limit": 1.0}


CASES: dict[str, Case] = {
    "terms": terms,
    "terms_gaps": terms_gaps,
    "groups": groups,
    "curves": curves,
    "ordered": ordered,
    "censored": censored,
    "tables": tables,
    "tables_named": partial(tables, named=True),
    **tables_with_gaps.CASES,
}
