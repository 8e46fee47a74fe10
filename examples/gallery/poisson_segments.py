"""Segments of a series of counts.

A hidden Markov model with four Poisson rates cuts a series into its stretches. The rates are learned, and so is how
long a state lasts.
"""

import numpy as np

from otpdag import plots
from otpdag.datasets import poisson_chain
from otpdag.estimators import HiddenMarkovModel

counts, states, truth = poisson_chain(1, 300, np.random.default_rng(3))
hmm = HiddenMarkovModel(4, emission="poisson", random_state=0).fit(counts[0])
rates = hmm.lambdas_[:, 0]
print("true rates ", np.exp(truth["x"]["log_rate"]).round(1))
print("found rates", np.sort(rates).round(1))

predicted = hmm.predict(counts[0])
by_rate = np.argsort(np.argsort(rates))
print(f"steps in the right state: {(by_rate[predicted] == states[0]).mean():.1%}")
figure = plots.plot_segments(counts[0], predicted, levels=rates)
