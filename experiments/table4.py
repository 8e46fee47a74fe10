"""Table 4: quality of reconstructions by VQ-VAE and by ours."""

from experiments.representations import Size, as_markdown, compare
from otpdag.cli.registry import Run, experiment

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


@experiment("table4", "Reconstructions from discrete codes: VQ-VAE and ours", resumable=True)
def table4(run: Run) -> None:
    """Fit both to every data set and write what they rebuild."""
    size = Size.of(run.quick)
    found = compare(run, ("vq_vae", "vq_vae_ema", "vq_ema_revived", "ours"), size)
    found.to_csv(run.folder / "table4.csv", index=False, float_format="%.6g")
    text = as_markdown("Table 4: VQ-VAE and ours", found, size, PAPER)
    (run.folder / "table4.md").write_text(text)
    print(text)
