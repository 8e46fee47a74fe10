"""Topics on bars.

Documents are drawn from ten topics, each a row or a column of a grid of words. Latent Dirichlet allocation finds them
again from counts alone.
"""

import numpy as np
from matplotlib.figure import Figure

from otpdag.datasets import bars
from otpdag.estimators import LatentDirichletAllocation

documents = bars(10, 500, 100, seed=0)
lda = LatentDirichletAllocation(10, random_state=0).fit(documents.counts)

distance = np.abs(documents.topics[:, None] - lda.components_[None]).sum(-1) / 2
print(f"total variation from each true topic to the nearest one found: at most {distance.min(1).max():.3f}")

figure = Figure(figsize=(7, 3), layout="constrained")
for ax, topic in zip(figure.subplots(2, 5).flat, lda.components_, strict=True):
    ax.imshow(topic.reshape(documents.side, documents.side), cmap="Blues", vmin=0)
    ax.set_xticks([])
    ax.set_yticks([])
