"""Pictures as codes.

Handwritten digits of 8 by 8 pixels become four codes each, out of thirty-two, by a small auto-encoder whose codebook is
learned by transport, so that no codeword lies idle. Above the digits, below what their codes say.
"""

import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

from otpdag.estimators import VectorQuantizedAutoencoder

images = (load_digits().images / 16).astype(np.float32)[:600]
coder = VectorQuantizedAutoencoder(
    32, code_dim=8, width=32, n_epochs=60, batch_size=50, learning_rate=3e-3, random_state=0
).fit(images)
codes = coder.encode(images)
rebuilt = coder.decode(codes)
share = 1 - np.square(rebuilt - images).mean() / images.var()
print(f"codes of an image: {codes.shape[1]}; codewords in use: {len(np.unique(codes))} of 32")
print(f"variance of the pixels that the codes explain: {share:.0%}")

figure = Figure(figsize=(7, 1.9), layout="constrained")
axes = figure.subplots(2, 10)
for k in range(10):
    for row, picture in enumerate((images[k], rebuilt[k])):
        axes[row, k].imshow(picture, cmap="Greys", vmin=0, vmax=1)
        axes[row, k].set_axis_off()
