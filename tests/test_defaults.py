"""What is done if nothing is said: a default that changes, changes everybody's estimates, so it is written here."""

import inspect
from importlib import import_module
from pkgutil import iter_modules

import pytest

import otpdag as otp
from otpdag.divergences.kernel import gaussian

DEFAULTS = {
    "divergences.Energy": {"unbiased": True},
    "divergences.MMD": {"kernel": gaussian, "bandwidth": "median", "scales": (1.0,), "unbiased": True},
    "divergences.Sinkhorn": {
        "epsilon": 0.05,
        "relative": True,
        "debiased": True,
        "iterations": 1000,
        "tolerance": 0.001,
    },
    "divergences.SlicedWasserstein": {"projections": 50, "p": 2.0},
    "divergences.Wasserstein": {"p": 1.0, "workers": 2},
    "mechanisms.Beta": {"dim": 1},
    "mechanisms.Categorical": {"size": 2},
    "mechanisms.Gamma": {"dim": 1},
    "mechanisms.LogNormal": {"dim": 1, "shared_scale": False},
    "mechanisms.MultivariateNormal": {"dim": 2, "shared_covariance": False},
    "mechanisms.NegativeBinomial": {"dim": 1},
    "mechanisms.Normal": {"dim": 1, "shared_scale": False, "isotropic": False},
    "mechanisms.Poisson": {"dim": 1},
    "mechanisms.StayOrMove": {"size": 2},
    "mechanisms.StudentT": {"dim": 1, "shared_scale": False},
    "backward.AmortizedMap": {"hidden": (16,)},
    "backward.SumSizes": {
        "states": 4096,
        "grid": 48,
        "prior_draws": 512,
        "count_atoms": 96,
        "largest_table": 8388608,
        "memory": 134217728,
    },
    "objective.ClosedForm": {"reference": "model"},
    "objective.Direct": {"points": None, "states": 256, "steps": 25, "draws": 4, "rounds": 30, "window": 3},
    "objective.Drawn": {
        "noise": "sampled",
        "scope": "joint",
        "temperature": 0.5,
        "batch_size": 256,
    },
    "objective.Objective": {"reconstruction": 1.0, "eps": 0.0},
    "objective.PushForward": {"eta": 1.0},
    "engine.Adam": {"steps": 300, "learning_rate": 0.01, "averaging": 0.25, "alternating": False},
    "engine.SearchSchedule": {
        "short_rows": 600,
        "short_elements": 150000,
        "short_steps": 24,
        "short_share": 0.15,
        "short_moves": 0,
        "halving": True,
        "finalists": 3,
        "finalist_steps": 15,
        "finalist_moves": 0,
        "part_tolerance": 1e-07,
        "moves": 12,
        "small_gain": 1e-05,
        "same_loss": 0.0002,
    },
    "engine.EM": {"steps": 100, "tolerance": 1e-06, "growth": 1.1, "longest": 4.0},
    "engine.Deterministic": {"steps": 400, "tolerance": 1e-09},
    "engine.FitResult.bootstrap": {"draws": 200, "seed": 0, "jobs": 1},
    "engine.FitResult.effect": {"level": 0.95},
    "engine.FitResult.forecast": {"level": 0.95, "draws": 1000, "seed": 0},
    "engine.FitResult.intervals": {"draws": 200, "level": 0.95, "seed": 0, "jobs": 1},
    "engine.FitResult.standard_errors": {"level": 0.95},
    "engine.FitResult.summary": {"level": 0.95, "draws": 200, "seed": 0},
    "engine.RobustOptions": {
        "most_dropped": 0.25,
        "slack": 1.25,
        "chance": 2.0,
        "tails": (0.1, 0.05, 0.02, 0.01, 0.004, 0.001),
        "cap": 0.004,
        "rounds": 8,
        "round_steps": 15,
        "same_weights": 5e-4,
        "concentration": 3,
        "sample": 4000,
    },
    "engine.entropic": {"eps": 1.0, "eta": 0.0, "reference": "model", "steps": 400},
    "engine.fit": {"method": "auto", "seed": 0, "robust": False, "device": "cpu", "checkpoint_seconds": 20.0},
    "engine.paper": {
        "eta": 1.0,
        "eps": 0.0,
        "scope": "joint",
        "temperature": 0.5,
        "steps": 1000,
        "batch_size": 128,
        "learning_rate": 1e-3,
    },
    "engine.transport": {"route": "direct"},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_what_they_are_said_to_be(name):
    made = otp
    for part in name.split("."):
        made = getattr(made, part)
    parameters = inspect.signature(made).parameters
    assert {key: parameters[key].default for key in DEFAULTS[name]} == DEFAULTS[name]


def classes():
    """All classes of the library."""
    found = {}
    for module in iter_modules(otp.__path__, "otpdag."):
        found |= _classes_in(module.name)
    return list(found.values())


def _classes_in(name):
    module = import_module(name)
    own = {f"{name}.{key}": one for key, one in vars(module).items() if inspect.isclass(one) and one.__module__ == name}
    for inner in iter_modules(getattr(module, "__path__", []), f"{name}."):
        own |= _classes_in(inner.name)
    return own


def test_methods_that_are_written_anew_keep_the_defaults_of_the_class_above():
    """Who calls an abstract class must get the same whichever it is."""
    compared = 0
    for cls in classes():
        for name, method in vars(cls).items():
            above = [base for base in cls.__mro__[1:] if name in vars(base) and base.__module__.startswith("otpdag")]
            if name == "__init__" or not inspect.isfunction(method) or not above:
                continue
            expected = inspect.signature(vars(above[-1])[name]).parameters
            for key, parameter in inspect.signature(method).parameters.items():
                if key in expected and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                    assert parameter.default == expected[key].default, f"{cls.__name__}.{name}({key}=)"
                    compared += parameter.default is not inspect.Parameter.empty
    assert compared > 20
