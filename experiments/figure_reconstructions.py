"""The figure of reconstructions: originals, VQ-VAE, SQ-VAE and ours, one below the other."""

import numpy as np
import pandas as pd

from experiments.image_quality import psnr, ssim
from experiments.registry import Run, experiment
from experiments.representations import DATASETS, METHODS, Size, draw_sheet, images_of, part

SHOWN = 12
ROWS = ("vq_vae", "sq_vae", "ours")


@experiment("figure-reconstructions", "Images rebuilt from discrete codes, side by side", resumable=True)
def figure_reconstructions(run: Run) -> None:
    """Draw a sheet for each data set; with ``--resume``, from the fits that Tables 4 and 5 left in the folder."""
    size = Size.of(run.scale)
    measured = []
    for name in size.datasets:
        images = images_of(name, size, run.scale)
        chosen = np.random.default_rng([run.seed, 3]).permutation(len(images.test))[:SHOWN]
        rows = [("original", images.test[chosen])]
        for method in ROWS:
            rebuilt = part(run, images, method, size).rebuilt[chosen]
            rows.append((METHODS[method].title, rebuilt))
            for row, one, other in zip(chosen, rebuilt, images.test[chosen], strict=True):
                quality = {"psnr": psnr(one[None], other[None]), "ssim": ssim(one[None], other[None])}
                measured.append({"dataset": name, "method": method, "test_image": row} | quality)
        title = f"{DATASETS[name]}: test images after {size.epochs} epochs on {len(images.train):,}"
        run.write(f"figure_reconstructions_{name}.png", draw_sheet(rows, title), dpi=130)
    table = pd.DataFrame(measured)
    run.write("figure_reconstructions.csv", table, float_format="%.6g")
    text = as_markdown(table)
    run.write("figure_reconstructions.md", text)
    print(text)


def as_markdown(table: pd.DataFrame) -> str:
    """Mean quality of the images that are shown."""
    lines = [
        f"# Reconstructions: the {SHOWN} test images of each sheet",
        "",
        "| data set | method | PSNR ↑ | SSIM ↑ |",
        "|---|---|---:|---:|",
    ]
    for (name, method), part_of in table.groupby(["dataset", "method"], sort=False):
        mean = part_of[["psnr", "ssim"]].mean()
        lines.append(f"| {DATASETS[name]} | {METHODS[method].title} | {mean['psnr']:.2f} | {mean['ssim']:.3f} |")
    return "\n".join(lines) + "\n"
