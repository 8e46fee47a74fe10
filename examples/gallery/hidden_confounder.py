"""A hidden confounder, and the effect behind it.

Fitness moves both who takes the course and how they do, and nobody measured it; three rough signs of it were written
down, with gaps. By construction the course adds 1.0. Comparing takers with others says much more; the graph with the
hidden node says how the course acts when it is *given*.
"""

import numpy as np
import pandas as pd

import otpdag as otp
from otpdag import mechanisms as m
from otpdag import plots

rng = np.random.default_rng(0)
fit_people = rng.random(3000) < 0.5
course = rng.random(3000) < np.where(fit_people, 0.8, 0.2)
table = pd.DataFrame({f"sign{k}": fit_people * 2.0 + rng.normal(size=3000) for k in range(3)})
table = table.mask(rng.random(table.shape) < 0.2)
table["course"] = np.where(course, "yes", "no")
table["score"] = 1.0 * course + 3.0 * fit_people + rng.normal(size=3000)

signs = [("fitness", f"sign{k}") for k in range(3)]
graph = otp.Graph([*signs, ("fitness", "course"), ("fitness", "score"), ("course", "score")], hidden=["fitness"])
model = otp.Model.from_frame(graph, table, mechanisms={"fitness": m.Categorical(2)})
result = otp.fit(model, table, seed=0)

seen = table.groupby("course")["score"].mean()
done = {value: model.sample(50_000, seed=1, do={"course": value})["score"].mean() for value in ("no", "yes")}
print(f"takers against others: {seen['yes'] - seen['no']:+.2f}")
print(f"course given against not given: {done['yes'] - done['no']:+.2f} (true: +1.00)")
figure = plots.plot_effects(result, "course", "score", ["no", "yes"])
