"""Table 5: quality of reconstructions by SQ-VAE and by ours."""

from functools import partial

from experiments.registry import Run, experiment
from experiments.representations import page, write

PAPER = {
    ("cifar10", "SQ-VAE"): "8 x 8 | 0.80 | 26.11 | 0.23 | 55.4 | 434.8",
    ("cifar10", "OTP-DAG"): "8 x 8 | 0.80 | 25.40 | 0.23 | 56.5 | 498.6",
    ("mnist", "SQ-VAE"): "8 x 8 | 0.99 | 36.25 | 0.01 | 3.2 | 301.8",
    ("mnist", "OTP-DAG"): "8 x 8 | 0.98 | 33.62 | 0.01 | 3.3 | 474.6",
    ("svhn", "SQ-VAE"): "8 x 8 | 0.96 | 35.35 | 0.06 | 24.8 | 389.8",
    ("svhn", "OTP-DAG"): "8 x 8 | 0.94 | 32.56 | 0.08 | 25.2 | 462.8",
    ("celeba", "SQ-VAE"): "16 x 16 | 0.88 | 31.05 | 0.12 | 14.8 | 427.8",
    ("celeba", "OTP-DAG"): "16 x 16 | 0.88 | 29.77 | 0.11 | 13.1 | 487.5",
}


TITLE = "Table 5: SQ-VAE and ours"


@experiment(
    "table5",
    "Reconstructions from discrete codes: SQ-VAE and ours",
    resumable=True,
    page=partial(page, "table5", TITLE, PAPER),
)
def table5(run: Run) -> None:
    """Fit both to every data set and write what they rebuild."""
    write(run, "table5", TITLE, ("sq_vae", "ours", "paper"), PAPER)
