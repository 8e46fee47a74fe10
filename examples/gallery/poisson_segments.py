"""Segments of a series of counts.

A hidden Markov model with four Poisson rates cuts a series into its stretches. The rates are learned, and so is how
long a state lasts.
"""

import numpy as np

from otpdag import plots
from otpdag.estimators import HiddenMarkovModel

rng, true_rates = np.random.default_rng(3), np.array([15, 35, 55, 85])
moves = rng.random(300) < 0.15
states = np.cumsum(moves * rng.integers(1, 4, 300)) % 4
counts = rng.poisson(true_rates[states])
hmm = HiddenMarkovModel(4, emission="poisson", random_state=0).fit(counts)
rates = hmm.lambdas_[:, 0]
print("true rates ", true_rates)
print("found rates", np.sort(rates).round(1))

predicted = hmm.predict(counts)
by_rate = np.argsort(np.argsort(rates))
print(f"steps in the right state: {(by_rate[predicted] == states).mean():.1%}")
figure = plots.plot_segments(counts, predicted, levels=rates)
