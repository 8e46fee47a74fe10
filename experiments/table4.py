"""Table 4: quality of reconstructions by VQ-VAE and by ours."""

from functools import partial

from experiments.registry import Run, experiment
from experiments.representations import page, write

PAPER = {
    ("cifar10", "VQ-VAE"): "8 x 8 | 0.70 | 23.14 | 0.35 | 77.3 | 69.8",
    ("cifar10", "OTP-DAG"): "8 x 8 | 0.80 | 25.40 | 0.23 | 56.5 | 498.6",
    ("mnist", "VQ-VAE"): "8 x 8 | 0.98 | 33.37 | 0.02 | 4.8 | 47.2",
    ("mnist", "OTP-DAG"): "8 x 8 | 0.98 | 33.62 | 0.01 | 3.3 | 474.6",
    ("svhn", "VQ-VAE"): "8 x 8 | 0.88 | 26.94 | 0.17 | 38.5 | 114.6",
    ("svhn", "OTP-DAG"): "8 x 8 | 0.94 | 32.56 | 0.08 | 25.2 | 462.8",
    ("celeba", "VQ-VAE"): "16 x 16 | 0.82 | 27.48 | 0.19 | 19.4 | 48.9",
    ("celeba", "OTP-DAG"): "16 x 16 | 0.88 | 29.77 | 0.11 | 13.1 | 487.5",
}


TITLE = "Table 4: VQ-VAE and ours"


@experiment(
    "table4",
    "Reconstructions from discrete codes: VQ-VAE and ours",
    resumable=True,
    page=partial(page, "table4", TITLE, PAPER),
)
def table4(run: Run) -> None:
    """Fit both to every data set and write what they rebuild."""
    write(run, "table4", TITLE, ("vq_vae", "vq_vae_ema", "vq_ema_revived", "fsq", "ours", "paper"), PAPER)
