"""Parameters of directed graphical models from incomplete data, by optimal transport."""

import sys
import warnings
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from otpdag import backward as backward
    from otpdag import costs as costs
    from otpdag import datasets as datasets
    from otpdag import divergences as divergences
    from otpdag import engine as engine
    from otpdag import estimators as estimators
    from otpdag import interop as interop
    from otpdag import mechanisms as mechanisms
    from otpdag import metrics as metrics
    from otpdag import objective as objective
    from otpdag import plots as plots
    from otpdag import schedules as schedules
    from otpdag import tables as tables
    from otpdag.choice import Selection as Selection
    from otpdag.choice import compare as compare
    from otpdag.choice import select as select
    from otpdag.data import Documents as Documents
    from otpdag.data import Images as Images
    from otpdag.data import Partitioned as Partitioned
    from otpdag.data import Sequences as Sequences
    from otpdag.engine import FitResult as FitResult
    from otpdag.engine import Method as Method
    from otpdag.engine import RobustOptions as RobustOptions
    from otpdag.engine import SearchSchedule as SearchSchedule
    from otpdag.engine import entropic as entropic
    from otpdag.engine import fit as fit
    from otpdag.engine import paper as paper
    from otpdag.engine import transport as transport
    from otpdag.errors import ApproximationWarning as ApproximationWarning
    from otpdag.errors import ColumnTypeWarning as ColumnTypeWarning
    from otpdag.errors import ConvergenceWarning as ConvergenceWarning
    from otpdag.errors import DataError as DataError
    from otpdag.errors import GraphError as GraphError
    from otpdag.errors import ModelError as ModelError
    from otpdag.errors import NotFittedError as NotFittedError
    from otpdag.errors import OtpdagError as OtpdagError
    from otpdag.graph import Graph as Graph
    from otpdag.graph import Lag as Lag
    from otpdag.graph import lag as lag
    from otpdag.mechanisms.parameters import between as between
    from otpdag.mechanisms.parameters import pseudo_counts as pseudo_counts
    from otpdag.mechanisms.parameters import ridge as ridge
    from otpdag.mechanisms.parameters import start as start
    from otpdag.mechanisms.parameters import tie as tie
    from otpdag.model import Model as Model
    from otpdag.model import load as load
    from otpdag.model.streaming import impute_to as impute_to
    from otpdag.model.streaming import posterior_to as posterior_to
    from otpdag.model.streaming import score_to as score_to

__version__ = "0.1.0"

_PARTS = ["backward", "costs", "divergences", "engine", "mechanisms", "objective", "schedules", "tables"]
_COMPANY = ["datasets", "estimators", "interop", "metrics", "plots"]
# names by the modules that define them, each imported when it is first asked for
_HOMES = {
    "errors": [
        "ApproximationWarning",
        "ColumnTypeWarning",
        "ConvergenceWarning",
        "DataError",
        "GraphError",
        "ModelError",
        "NotFittedError",
        "OtpdagError",
    ],
    "graph": ["Graph", "Lag", "lag"],
    "mechanisms.parameters": ["between", "pseudo_counts", "ridge", "start", "tie"],
    "data": ["Documents", "Images", "Partitioned", "Sequences"],
    "model": ["Model", "load"],
    "model.streaming": ["impute_to", "posterior_to", "score_to"],
    "engine": ["FitResult", "Method", "RobustOptions", "SearchSchedule", "entropic", "fit", "paper", "transport"],
    "choice": ["Selection", "compare", "select"],
}

__all__ = sorted([*_PARTS, *_COMPANY, *(one for names in _HOMES.values() for one in names)])

_DEPRECATED = {"neighbours": "interop", "Course": "SearchSchedule"}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is first used: torch and its like take seconds, which ``--help`` need not."""
    if name in _DEPRECATED:
        new = _DEPRECATED[name]
        warnings.warn(f"otpdag.{name} is now otpdag.{new}", DeprecationWarning, stacklevel=2)
        return getattr(import_module("otpdag"), new)
    if name not in __all__:
        raise AttributeError(f"module 'otpdag' has no attribute {name!r}{_where(name)}")
    if name in (*_PARTS, *_COMPANY):
        return import_module(f"otpdag.{name}")
    home = next(home for home, names in _HOMES.items() if name in names)
    value = getattr(import_module(f"otpdag.{home}"), name)
    for one, names in _HOMES.items():  # what is there already is not looked up again
        held = vars(sys.modules.get(f"otpdag.{one}", sys))
        globals().update({name: held[name] for name in names if name in held})
    return value


def _where(name: str) -> str:
    """A hint at the module that has what a user looked for in the package itself: ``otpdag.mechanisms.Normal``."""
    if name.startswith("_"):
        return ""
    searched = ("mechanisms", "divergences", "costs", *_COMPANY)
    modules = {one: import_module(f"otpdag.{one}") for one in searched}
    home = next((one for one, module in modules.items() if name in getattr(module, "__all__", vars(module))), None)
    if home is not None:
        return f"; it is otpdag.{home}.{name}"
    near = get_close_matches(name, __all__, n=1)
    return f"; is it {near[0]!r}?" if near else ""


def __dir__() -> list[str]:
    return __all__
