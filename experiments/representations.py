"""What Tables 4 and 5 and the figures of images share: data, fits that can be resumed, measurements and sheets."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from baselines.discrete import DiscreteAutoencoder
from baselines.sq_vae import SQVAE
from baselines.vq_vae import VQVAE, VQVAEEMA
from experiments.image_features import Judge, train_judge
from experiments.image_quality import code_perplexity, feature_distance, frechet_distance, psnr, ssim
from experiments.image_sets import ImageSet, load_images
from experiments.paper_codebook import PaperCodebook
from experiments.registry import Page, Run, Scale
from otpdag.cli.console import say
from otpdag.errors import DataError
from otpdag.estimators import VectorQuantizedAutoencoder
from otpdag.files import replacing

Bytes = NDArray[np.uint8]

DATASETS = {"cifar10": "CIFAR10", "mnist": "MNIST", "svhn": "SVHN", "celeba": "CelebA"}
SUBSTITUTES = (
    "LPIPS and rFID need weights that are not part of this project. In their place stand two quantities with names of "
    "their own, from the features of a small classifier of the data set's own labels, trained in this run: the "
    "*feature distance* (LPIPS's form with unit weights) and the *Fréchet distance of features* between rebuilt "
    "and original images. They compare within a data set of one run, and with no figure elsewhere."
)


EARLY = (
    " **A quick run stops long before any method has converged**: it shows that everything works and what an early "
    "stage looks like, and does not stand for the paper's setting."
)
SHORTER = (
    " A run of hours has a part of the images, a fifth of the paper's epochs and networks of half its width: methods "
    "compare with each other at equal effort, and not with the paper's figures."
)
NOTES = {Scale.QUICK: EARLY, Scale.HOURS: SHORTER, Scale.PAPER: ""}
DIFFERENCES = {
    "table4": (
        "All methods have the same networks, images, epochs and learning rate. The paper's lead over VQ-VAE is mostly "
        "that of a codebook that is in use: with k-means as its start and idle codewords revived, the moving averages "
        "of vector-quantize-pytorch use theirs as well, and they and FSQ are the peers to compare with. MNIST has a "
        "black border here, whose equal patches take codewords from others (decision 0050). *OTP-DAG as the paper has "
        "it* is the published practice by our code, at a constant rate: a step has 128 transport problems, so that it "
        "takes eight to sixteen times as long as VQ-VAE, and it has been run on two data sets. After 376 batches, at "
        "the quick size, most of its codewords are still idle. At that of hours it has 381 and 420 in use by CIFAR10 "
        "and MNIST, as perplexities, eleven and twenty-four times VQ-VAE's; MNIST it rebuilds better than VQ-VAE, "
        "CIFAR10 worse, where the paper has it ahead."
    ),
    "table5": (
        "The paper's SQ-VAE rebuilds better than its OTP-DAG. SQ-VAE anneals its temperature over the run: after a "
        "part of the paper's epochs few of its codewords are in use, so that its rows say how far it has come and not "
        "where it ends. *OTP-DAG as the paper has it*, the published practice by our code, has been run on CIFAR10 and "
        "MNIST."
    ),
}


@dataclass(frozen=True)
class Size:
    """How much is done: images, epochs, codes and channels of the networks; ``None`` takes all images."""

    train: int | None
    test: int | None
    epochs: int
    judge_epochs: int
    prior_epochs: int
    datasets: tuple[str, ...] = tuple(DATASETS)
    codes: int = 512
    dim: int = 64
    width: int = 128
    batch: int = 32

    @classmethod
    def of(cls, scale: Scale) -> "Size":
        return {Scale.QUICK: QUICK, Scale.HOURS: HOURS, Scale.PAPER: PAPER}[scale]


PAPER = Size(train=None, test=None, epochs=100, judge_epochs=10, prior_epochs=50)
HOURS = Size(train=10_000, test=2000, epochs=20, judge_epochs=10, prior_epochs=10, width=64)
QUICK = Size(
    train=1500, test=300, epochs=8, judge_epochs=10, prior_epochs=6, datasets=("cifar10", "mnist", "svhn"), width=64
)


class Autoencoder(Protocol):
    """What every method gives: codes (n, positions) of images, and images of codes."""

    def encode(self, X: Bytes) -> NDArray[np.int64]: ...

    def decode(self, codes: NDArray[np.int64]) -> np.ndarray: ...

    def reconstruct(self, X: Bytes) -> np.ndarray: ...


@dataclass(frozen=True)
class Entry:
    """A method: its name in tables, how it is trained, with a file to keep unfinished work in, and what it needs."""

    title: str
    fit: Callable[[Bytes, Size, int, Path], Autoencoder]
    needs: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether what it needs besides the library is installed."""
        return self.needs is None or find_spec(self.needs) is not None


@dataclass(frozen=True)
class Part:
    """What a fit leaves behind: test images rebuilt, their codes, and how long it took."""

    rebuilt: Bytes
    codes: NDArray[np.int64]
    seconds: float


def images_of(name: str, size: Size, scale: Scale) -> ImageSet:
    """A data set at 32 x 32 or 64 x 64 pixels: at the paper's size all that is published, if that is at hand."""
    images = None
    if scale is Scale.PAPER:
        try:
            images = load_images(name, train=size.train, test=size.test, source="published")
        except DataError as error:
            say(f"{error}. The prepared file is used instead.")
    if images is None:
        images = load_images(name, train=size.train, test=size.test, source="prepared")
    return images.padded(32) if max(images.shape[:2]) < 32 else images


def part(run: Run, images: ImageSet, method: str, size: Size) -> Part:
    """The fit of one method to one data set, taken from the folder if the run is resumed and it is there."""
    path = checkpoint(run, images, method).with_suffix(".npz")
    if run.has(path):
        with np.load(path) as held:
            return Part(held["rebuilt"], held["codes"], float(held["seconds"]))
    began = time.process_time()
    fitted = fit(run, images, method, size)
    seconds = time.process_time() - began
    made = Part(as_bytes(fitted.reconstruct(images.test)), np.asarray(fitted.encode(images.test)), seconds)
    with replacing(path) as file:
        np.savez_compressed(file, rebuilt=made.rebuilt, codes=made.codes.astype(np.int16), seconds=seconds)
    checkpoint(run, images, method).unlink(missing_ok=True)
    return made


def fit(run: Run, images: ImageSet, method: str, size: Size) -> Autoencoder:
    """Train one method on one data set; a resumed run goes on from the last epoch that was finished."""
    chosen = METHODS[method]
    say(f"{chosen.title} on {DATASETS[images.name]}: {len(images.train):,} images, {size.epochs} epochs")
    unfinished = checkpoint(run, images, method)
    unfinished.parent.mkdir(exist_ok=True)
    if not run.has(unfinished):
        unfinished.unlink(missing_ok=True)
    return chosen.fit(images.train, size, run.seed, unfinished)


def checkpoint(run: Run, images: ImageSet, method: str) -> Path:
    """Where a fit keeps its last epoch."""
    return run.folder / "parts" / f"{images.name}-{method}-{run.scale}-{run.seed}.checkpoint"


def as_bytes(images: np.ndarray) -> Bytes:
    """Images from 0 to 255 in bytes: what was rebuilt has the range of what was fitted."""
    return np.asarray(np.clip(images, 0, 255).round(), dtype=np.uint8)


def _ours(images: Bytes, size: Size, seed: int, checkpoint: Path) -> Autoencoder:
    settings = {"width": size.width, "n_epochs": size.epochs, "batch_size": size.batch, "random_state": seed}
    model = VectorQuantizedAutoencoder(size.codes, size.dim, **settings, device=device())
    return model.fit(images, checkpoint=checkpoint)


def device() -> str:
    """A graphics card if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _baseline(kind: type[DiscreteAutoencoder]) -> Callable[[Bytes, Size, int, Path], Autoencoder]:
    def fit_baseline(images: Bytes, size: Size, seed: int, checkpoint: Path) -> Autoencoder:
        settings = {"width": size.width, "n_epochs": size.epochs, "batch_size": size.batch, "random_state": seed}
        return kind(size.codes, size.dim, **settings).fit(images)

    return fit_baseline


def _of_library(name: str) -> Callable[[Bytes, Size, int, Path], Autoencoder]:
    def fit_quantizer(images: Bytes, size: Size, seed: int, checkpoint: Path) -> Autoencoder:
        from baselines import library_quantizers  # of the extra `bench`

        return _baseline(getattr(library_quantizers, name))(images, size, seed, checkpoint)

    return fit_quantizer


METHODS = {
    "vq_vae": Entry("VQ-VAE", _baseline(VQVAE)),
    "vq_vae_ema": Entry("VQ-VAE, moving averages", _baseline(VQVAEEMA)),
    "vq_ema_revived": Entry(
        "VQ-VAE, k-means and revival", _of_library("RevivedVQEMA"), needs="vector_quantize_pytorch"
    ),
    "fsq": Entry("FSQ", _of_library("FiniteScalar"), needs="vector_quantize_pytorch"),
    "sq_vae": Entry("SQ-VAE", _baseline(SQVAE)),
    "ours": Entry("ours", _ours),
    "paper": Entry("OTP-DAG as the paper has it", _baseline(PaperCodebook)),
}
COLOURS = {
    "vq_vae": "#2f5d9b",
    "vq_vae_ema": "#6f6f6f",
    "vq_ema_revived": "#d1762b",
    "fsq": "#7a5aa6",
    "sq_vae": "#a8434b",
    "ours": "#1f7a46",
    "paper": "#b59a2a",
}


# --- measurements -----------------------------------------------------------------------------------------


def measure(images: ImageSet, made: Part, judge: Judge) -> dict[str, float]:
    """Quality of the reconstructions of the test images, and use of the codes."""
    with torch.no_grad():
        apart = feature_distance(made.rebuilt, images.test, network=judge.network.layers)
    return {
        "ssim": ssim(made.rebuilt, images.test),
        "psnr": psnr(made.rebuilt, images.test),
        "feature_distance": apart,
        "frechet_features": frechet_distance(judge.features(made.rebuilt), judge.features(images.test)),
        "perplexity": code_perplexity(made.codes),
        "seconds": made.seconds,
    }


@cache
def judged_images(name: str, size: Size, scale: Scale, seed: int) -> tuple[ImageSet, Judge]:
    """A data set, and who tells its images apart: the same for all methods."""
    images = images_of(name, size, scale)
    return images, train_judge(images.train, images.train_labels, epochs=size.judge_epochs, seed=seed)


def compare(run: Run, methods: Sequence[str], size: Size) -> pd.DataFrame:
    """One row for each data set and method that can be run here, each a part of the run."""
    here = [method for method in methods if METHODS[method].is_here]
    for method in sorted(set(methods) - set(here)):
        say(f"{METHODS[method].title} is left out: it needs {METHODS[method].needs}, of the extra `bench`.")

    def measured(name: str, method: str) -> pd.DataFrame:
        images, judge = judged_images(name, size, run.scale, run.seed)
        made = part(run, images, method, size)
        side = round(made.codes.shape[1] ** 0.5)
        about = {"dataset": name, "method": method, "latent": f"{side} x {side}", "train": len(images.train)}
        about |= {"test": len(images.test), "source": images.source, "judge_accuracy": judge.accuracy}
        about |= {"epochs": size.epochs, "batch": size.batch, "codes": size.codes, "scale": str(run.scale)}
        return pd.DataFrame([about | measure(images, made, judge)])

    # Tables 4 and 5 may share a folder with each other and with runs of another seed
    return run.together(
        run.parts(
            (f"{name}-{method}-{run.scale}-{run.seed}", partial(measured, name, method))
            for name in size.datasets
            for method in here
        )
    )


def write(run: Run, name: str, title: str, methods: Sequence[str], paper: Mapping[tuple[str, str], str]) -> None:
    """Fit the methods to every data set; write what they rebuild as data and as a table."""
    table = run.joined(compare(run, methods, Size.of(run.scale)), f"{name}.csv", ("dataset", "method"))
    table = table.sort_values("dataset", key=lambda names: names.map(list(DATASETS).index), kind="stable")
    run.write(f"{name}.csv", table, float_format="%.6g")
    text = as_markdown(title, table, paper)
    run.write(f"{name}.md", text)
    print(text)


def page(name: str, title: str, paper: Mapping[tuple[str, str], str], folder: Path) -> Page:
    """The table from the figures of a run, and the picture of it."""
    table = pd.read_csv(folder / f"{name}.csv")
    shows = f"{title}: PSNR, SSIM and perplexity"
    text = f"{DIFFERENCES[name]} {ahead_of_ours(table)}"
    return Page(as_markdown(title, table, paper) + "\n" + text, {shows: draw_figures(table)})


def ahead_of_ours(table: pd.DataFrame) -> str:
    """Which method is above ours on which data set, by PSNR, SSIM or perplexity: nothing else is to be looked for."""
    said = []
    for name, rows in table.groupby("dataset", sort=False):
        figures = rows.set_index("method")
        if "ours" not in figures.index:
            continue
        for figure, digits in (("psnr", 2), ("ssim", 3), ("perplexity", 0)):
            best, ours = figures[figure].idxmax(), figures.loc["ours", figure]
            if best != "ours":
                above = f"{figures.loc[best, figure]:.{digits}f} against {ours:.{digits}f}"
                said.append(
                    f"{DATASETS[str(name)]}, {figure.upper() if digits else figure}: {METHODS[best].title}, {above}"
                )
    if not said:
        return "By PSNR, SSIM and perplexity nothing is above ours on any of these data sets."
    return f"Above ours by PSNR, SSIM or perplexity: {'; '.join(said)}. In all else ours is best."


COLUMNS = {
    "ssim": ("SSIM ↑", "{:.3f}"),
    "psnr": ("PSNR ↑", "{:.2f}"),
    "feature_distance": ("feature distance (not LPIPS) ↓", "{:.3f}"),
    "frechet_features": ("Fréchet distance of features (not rFID) ↓", "{:.1f}"),
    "perplexity": ("perplexity ↑", "{:.1f}"),
    "seconds": ("seconds", "{:.0f}"),
}


def as_markdown(title: str, table: pd.DataFrame, paper: Mapping[tuple[str, str], str]) -> str:
    """The measured table, what stands in for what, and the paper's own figures."""
    sources = "; ".join(
        f"{DATASETS[row.dataset]}: {row.train:,} + {row.test:,} images of {row.source}"
        for row in table.drop_duplicates("dataset").itertuples()
    )
    accuracies = ", ".join(
        f"{DATASETS[row.dataset]} {row.judge_accuracy:.2f}" for row in table.drop_duplicates("dataset").itertuples()
    )
    about = table.iloc[0]
    lines = [
        f"# {title}",
        "",
        f"Measured on test images after {about['epochs']} epochs in batches of {about['batch']}; {about['codes']} "
        f"codes; the same networks, epochs and seed for all methods; seconds are of all cores. {sources}."
        f"{NOTES[Scale(about['scale'])]}",
        "",
        _header(["data set", "method", "latent size", *(name for name, _ in COLUMNS.values())]),
    ]
    for row in table.itertuples():
        cells = [pattern.format(getattr(row, column)) for column, (_, pattern) in COLUMNS.items()]
        names = [DATASETS[row.dataset], METHODS[row.method].title, row.latent]
        lines.append(f"| {' | '.join([*names, *cells])} |")
    lines += [
        "",
        f"{SUBSTITUTES} Share of held-out training images that the classifier names rightly: {accuracies}.",
        "",
        "## As printed in the paper (100 epochs on the complete data sets)",
        "",
        _header(["data set", "method", "latent size", "SSIM ↑", "PSNR ↑", "LPIPS ↓", "rFID ↓", "perplexity ↑"]),
        *(f"| {DATASETS[name]} | {method} | {cells} |" for (name, method), cells in paper.items()),
        "",
    ]
    return "\n".join(lines)


def _header(names: Sequence[str]) -> str:
    return f"| {' | '.join(names)} |\n|---|---|---|{'---:|' * (len(names) - 3)}"


def draw_figures(table: pd.DataFrame) -> Figure:
    """One panel a figure, one line a data set, one dot a method."""
    shown = {"psnr": "PSNR (dB)", "ssim": "SSIM", "perplexity": "perplexity of codes"}
    names = list(table["dataset"].unique())
    figure = Figure(figsize=(10, 1.5 + 0.5 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(shown), sharey=True)
    for panel, (column, label) in zip(panels, shown.items(), strict=True):
        for method, rows in table.groupby("method", sort=False):
            style = {"color": COLOURS[str(method)], "marker": "D" if method == "ours" else "o", "linestyle": ""}
            places = [names.index(name) for name in rows["dataset"]]
            panel.plot(rows[column], places, label=METHODS[str(method)].title, alpha=0.85, **style)
        panel.set(xlabel=label, ylim=(len(names) - 0.5, -0.5))
        panel.grid(color="0.92")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), [DATASETS[name] for name in names])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


# --- sheets of images -------------------------------------------------------------------------------------


def draw_sheet(rows: Sequence[tuple[str, Bytes]], title: str) -> Figure:
    """One row of images (n, height, width, channels) for each entry, its name at the left."""
    strips = [np.concatenate([_framed(image) for image in images], 1) for _, images in rows]
    height, width = strips[0].shape[:2]
    across, margin, head = 9.0, 1.5, 0.45  # inches: images, names, title
    down = len(rows) * (across * height / width + 0.06)
    figure = Figure(figsize=(margin + across + 0.1, head + down))
    wide = margin + across + 0.1
    figure.subplots_adjust(margin / wide, 0.0, 1 - 0.1 / wide, down / (head + down), hspace=0.06 * len(rows) / down)
    figure.suptitle(title, fontsize=11)
    panels = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for panel, (name, _), strip in zip(panels, rows, strips, strict=True):
        panel.imshow(strip.squeeze(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        panel.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=10)
        panel.set_xticks([])
        panel.set_yticks([])
        panel.spines[:].set_visible(False)
    return figure


def _framed(image: Bytes) -> Bytes:
    """A white pixel around an image, so that neighbours do not touch."""
    return np.pad(image, ((1, 1), (1, 1), (0, 0)), constant_values=255)
