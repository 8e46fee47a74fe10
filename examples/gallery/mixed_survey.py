"""A survey of mixed kinds.

The American national election study of 1996 (from statsmodels): codes, ages, incomes. Who is near which party, and what
follows for the vote? Education is an answer on a scale, other types are chosen by column, and the picture holds data
against model.
"""

import statsmodels.api as sm

import otpdag as otp
from otpdag import mechanisms as m
from otpdag import plots

table = sm.datasets.anes96.load_pandas().data
columns = ["age", "educ", "income", "PID", "selfLR", "vote"]
edges = [("age", "educ"), ("educ", "income"), ("selfLR", "PID"), ("income", "PID"), ("PID", "vote"), ("selfLR", "vote")]
scales = {"educ": m.Ordinal(7), "selfLR": m.Categorical(7)}
model = otp.Model.from_frame(otp.Graph(edges), table[columns], mechanisms=scales)
result = otp.fit(model, table[columns], seed=0)
print(result.status)

votes = {party: model.sample(20_000, seed=1, do={"PID": party})["vote"].astype(float).mean() for party in (0, 3, 6)}
for party, share in votes.items():
    print(f"party {party} (0: strong Democrat, 6: strong Republican): {share:.0%} vote for Dole")
figure = plots.plot_fit(result, table[columns])
