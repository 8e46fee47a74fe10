"""Column types: what `Model.from_frame` takes columns of real tables for, beside labels by hand.

``ratio`` is the share of columns that are decided otherwise than by hand, or decided otherwise once a tenth of the
cells is empty, in any of the data sets (each is another random tenth).
"""

from collections.abc import Callable

import pandas as pd

from benchmarks.harness import Case, Record, Settings, Skip, streams
from otpdag.data import column_type

CATEGORY, COUNT, NUMBER = "category", "count", "number"
EMPTIED = 0.1

LABELS: dict[str, dict[str, str]] = {
    # codes of answers and kinds are categories, ages, incomes and measurements numbers, "how many" near zero counts
    "statsmodels.anes96": {
        "popul": NUMBER,
        "TVnews": CATEGORY,
        "selfLR": CATEGORY,
        "ClinLR": CATEGORY,
        "PID": CATEGORY,
        "age": NUMBER,
        "educ": CATEGORY,
        "income": NUMBER,
        "vote": CATEGORY,
        "logpopul": NUMBER,
    },
    "statsmodels.fair": {
        "rate_marriage": CATEGORY,
        "age": NUMBER,
        "yrs_married": NUMBER,
        "religious": CATEGORY,
        "educ": NUMBER,
        "occupation": CATEGORY,
        "occupation_husb": CATEGORY,
        "affairs": NUMBER,
    },
    "statsmodels.ccard": {"AVGEXP": NUMBER, "AGE": NUMBER, "INCOME": NUMBER, "OWNRENT": CATEGORY},
    "statsmodels.cpunish": {"INCOME": NUMBER, "PERPOVERTY": NUMBER, "SOUTH": CATEGORY},
    "statsmodels.macrodata": {"year": NUMBER, "quarter": CATEGORY, "realgdp": NUMBER, "infl": NUMBER},
    "statsmodels.modechoice": {
        "mode": CATEGORY,
        "choice": CATEGORY,
        "ttme": NUMBER,
        "invc": NUMBER,
        "invt": NUMBER,
        "hinc": NUMBER,
    },
    "statsmodels.nile": {"volume": NUMBER},
    "statsmodels.randhie": {"mdvis": COUNT, "lncoins": NUMBER, "idp": CATEGORY, "lpi": NUMBER, "disea": NUMBER},
    "statsmodels.spector": {"GPA": NUMBER, "TUCE": NUMBER, "PSI": CATEGORY, "GRADE": CATEGORY},
    "statsmodels.stackloss": {"STACKLOSS": NUMBER, "ACIDCONC": NUMBER},
    "statsmodels.sunspots": {"SUNACTIVITY": NUMBER},
    "statsmodels.fertility": {"2000": NUMBER},
    "sklearn.iris": {"sepal length (cm)": NUMBER, "petal width (cm)": NUMBER, "target": CATEGORY},
    "sklearn.breast_cancer": {"mean radius": NUMBER, "mean concavity": NUMBER, "target": CATEGORY},
    "sklearn.wine": {"magnesium": NUMBER, "proline": NUMBER, "hue": NUMBER, "target": CATEGORY},
    "sklearn.diabetes": {"age": NUMBER, "sex": CATEGORY, "s1": NUMBER, "s4": NUMBER},
}
"""What a careful reader of the tables' descriptions would take the columns for; 63 of them."""


def types(settings: Settings) -> Record:
    """Decide all columns, and again with a tenth of the cells empty."""
    wrong, changed, columns = [], [], 0
    for source, labels in LABELS.items():
        frame = table(source)
        for name, label in labels.items():
            columns += 1
            decided = column_type(frame[name]).kind
            if decided != label:
                wrong.append(f"{source} {name}: {decided}, not {label}")
            if any(column_type(_emptied(frame[name], settings, repeat)).kind != decided for repeat in _sets(settings)):
                changed.append(f"{source} {name}")
    return {
        "ratio": len({*(line.split(":")[0] for line in wrong), *changed}) / columns,
        "ours": len(wrong),
        "oracle": 0,
        "columns": columns,
        "wrong": wrong,
        "changed": changed,
        "seconds": 0.0,
        "oracle_seconds": 0.0,
    }


def table(source: str) -> pd.DataFrame:
    """A table that ships with a library."""
    library, _, name = source.partition(".")
    return _LIBRARIES[library](name)


def _statsmodels(name: str) -> pd.DataFrame:
    try:
        from statsmodels import datasets
    except ImportError:
        raise Skip("needs statsmodels, whose tables are read") from None
    data = getattr(datasets, name).load_pandas().data
    return data.to_frame() if isinstance(data, pd.Series) else data


def _sklearn(name: str) -> pd.DataFrame:
    from sklearn import datasets

    options = {"scaled": False} if name == "diabetes" else {}
    frame: pd.DataFrame = getattr(datasets, f"load_{name}")(as_frame=True, **options).frame
    return frame


_LIBRARIES: dict[str, Callable[[str], pd.DataFrame]] = {"statsmodels": _statsmodels, "sklearn": _sklearn}


def _sets(settings: Settings) -> range:
    return range(settings.repeats)


def _emptied(column: pd.Series, settings: Settings, repeat: int) -> pd.Series:
    """The column without a random tenth of its cells."""
    missing = streams(settings.seed, f"types {column.name}", repeat).missing
    return column.mask(missing.random(len(column)) < EMPTIED)


CASES: dict[str, Case] = {"types": types}
