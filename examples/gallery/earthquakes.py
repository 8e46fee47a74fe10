"""Regimes of earthquakes.

Earthquakes of magnitude 7 and above, world-wide, by year from 1900 to 2006: quiet, usual and busy stretches, found by a
hidden Markov model with three Poisson rates. The counts come from the folder that `OTPDAG_DATA` names.
"""

import os
from pathlib import Path

import numpy as np
import pandas as pd

from otpdag import plots
from otpdag.estimators import HiddenMarkovModel

series = pd.read_csv(Path(os.environ["OTPDAG_DATA"]) / "counts" / "earthquakes.csv")
hmm = HiddenMarkovModel(3, emission="poisson", random_state=0).fit(series["count"].to_numpy(dtype=float))
rates = hmm.lambdas_[:, 0]
states = hmm.predict(series["count"].to_numpy(dtype=float))
for state in np.argsort(rates):
    print(f"{rates[state]:5.1f} earthquakes a year, in {int((states == state).sum())} years")
figure = plots.plot_segments(series["count"], states, times=series["year"], levels=rates)
