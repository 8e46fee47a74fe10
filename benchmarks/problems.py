"""The models of the benchmarks: how data are drawn, how a model is declared, and what counts as its error.

Truth, oracles and fitted models all give parameters in the layout of ``Model.params()``, so that one function
per problem picks the groups of parameters that are compared.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

import otpdag as otp
from benchmarks import oracles
from experiments import small_models
from experiments.metrics import match_signs, matched_errors
from otpdag import mechanisms as m
from otpdag.datasets import Truth

Groups = dict[str, np.ndarray]


@dataclass(frozen=True)
class Problem:
    """One model with a known truth.

    Attributes:
        name: Its name; the data derive from it.
        rows: How many rows a data set has.
        draw: Draws a data set and its truth from a number of rows and a generator.
        model: Declares the model, unfitted.
        oracle: Estimates the parameters from a data set, by a trusted method, with a seed. It sees the truth,
            for the numbers of states and as one of its starts.
        error: The error of the estimated parameters, given the true ones first.
    """

    name: str
    rows: int
    draw: Callable[[int, np.random.Generator], tuple[pd.DataFrame, Truth]] = field(repr=False)
    model: Callable[[], "otp.Model"] = field(repr=False)
    oracle: Callable[[pd.DataFrame, Truth, int], Truth] = field(repr=False)
    error: Callable[[Truth, Truth], float] = field(repr=False)


def factor_model() -> "otp.Model":
    return one_factor(["x1", "x2", "x3", "x4"])


def one_factor(indicators: list[str]) -> "otp.Model":
    graph = otp.Graph([("f", name) for name in indicators], hidden=["f"])
    return otp.Model(graph, {"f": m.Normal(loc=0.0, scale=1.0)} | {name: m.Normal() for name in indicators})


def factor_groups(params: Truth) -> Groups:
    indicators = [name for name in params if name != "f"]
    return {
        "loading": np.array([float(np.squeeze(params[name]["weight"])) for name in indicators]),
        "scale": np.array([float(np.squeeze(params[name]["scale"])) for name in indicators]),
    }


def factor_error(truth: Truth, estimate: Truth) -> float:
    true, estimated = factor_groups(truth), factor_groups(estimate)
    sign = match_signs([true["loading"]], [estimated["loading"]])[0]
    loading = np.abs(true["loading"] - sign * estimated["loading"]).mean()
    return float((loading + np.abs(true["scale"] - estimated["scale"]).mean()) / 2)


def mixture_model() -> "otp.Model":
    graph = otp.Graph([("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(3), "x": m.Normal(dim=2)})


def mixture_groups(params: Truth) -> Groups:
    return {"weight": params["z"]["probs"], "mean": params["x"]["loc"], "scale": params["x"]["scale"]}


def mixture_error(truth: Truth, estimate: Truth) -> float:
    return _mean(matched_errors(mixture_groups(truth), mixture_groups(estimate)))


def latent_class_model() -> "otp.Model":
    children = ["x1", "x2", "x3", "x4"]
    graph = otp.Graph([("z", name) for name in children], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(2)} | {name: m.Categorical(3) for name in children})


def latent_class_groups(params: Truth) -> Groups:
    tables = [params[name]["probs"] for name in params if name != "z"]
    return {"weight": params["z"]["probs"], "table": np.stack(tables, axis=1)}


def latent_class_error(truth: Truth, estimate: Truth) -> float:
    return _mean(matched_errors(latent_class_groups(truth), latent_class_groups(estimate)))


def mixed_dag_model() -> "otp.Model":
    graph = otp.Graph([("h", "x1"), ("h", "x2"), ("x1", "x2"), ("h", "x3")], hidden=["h"])
    nodes = {"h": m.Categorical(3), "x1": m.Normal(), "x2": m.Poisson(), "x3": m.Categorical(3)}
    return otp.Model(graph, nodes)


def mixed_dag_groups(params: Truth) -> Groups:
    return {
        "weight": params["h"]["probs"],
        "mean": params["x1"]["loc"],
        "scale": params["x1"]["scale"],
        "log_rate": params["x2"]["log_rate"],
        "slope": params["x2"]["weight"],
        "table": params["x3"]["probs"],
    }


def mixed_dag_error(truth: Truth, estimate: Truth) -> float:
    return _mean(matched_errors(mixed_dag_groups(truth), mixed_dag_groups(estimate), shared=["slope"]))


def _mean(errors: dict[str, float]) -> float:
    return float(np.mean(list(errors.values())))


FACTOR = Problem("factor", 5000, small_models.factor, factor_model, oracles.factor_analysis, factor_error)
MIXTURE = Problem("mixture", 2000, small_models.mixture, mixture_model, oracles.gaussian_mixture_em, mixture_error)
LATENT_CLASS = Problem(
    "latent_class",
    5000,
    small_models.latent_class,
    latent_class_model,
    oracles.latent_class_em,
    latent_class_error,
)
MIXED_DAG = Problem("mixed_dag", 5000, small_models.mixed_dag, mixed_dag_model, oracles.mixed_dag_ml, mixed_dag_error)
PROBLEMS = (FACTOR, MIXTURE, LATENT_CLASS, MIXED_DAG)
