"""The figure of generated faces: codes drawn from a transformer, and decoded.

Beside them are images from codes drawn position by position, which is what the model says without that prior, and
reconstructions of real images, which is the best that the codes allow.
"""

import numpy as np
import pandas as pd

from experiments.code_prior import CodePrior
from experiments.image_features import train_judge
from experiments.image_quality import frechet_distance
from experiments.registry import Run, experiment
from experiments.representations import DATASETS, Size, as_bytes, device, draw_sheet, fit, images_of
from otpdag.cli.console import say

ROWS, COLUMNS = 4, 10
JUDGED = 300


@experiment("figure-generated", "Faces made from codes that a transformer draws", resumable=True)
def figure_generated(run: Run) -> None:
    """Fit the auto-encoder, then the prior over its codes; draw, decode and judge."""
    size = Size.of(run.scale)
    images = images_of("celeba", size, run.scale)
    fitted = fit(run, images, "ours", size)
    codes, held = (np.asarray(fitted.encode(part)) for part in (images.train, images.test))
    say(f"prior over {codes.shape[1]} codes, {size.prior_epochs} epochs")
    prior = CodePrior(size.codes, n_epochs=size.prior_epochs, random_state=run.seed, device=device()).fit(codes)
    drawn = {
        "from the prior": prior.sample(JUDGED, seed=run.seed),
        "each position\nby itself": independent(codes, JUDGED, run.seed),
        "rebuilt\ntest images": held[:JUDGED],
    }
    made = {name: as_bytes(np.asarray(fitted.decode(given))) for name, given in drawn.items()}
    title = f"{DATASETS['celeba']}, {len(images.train):,} images"
    run.write("figure_generated.png", draw(made, title), dpi=130)
    judge = train_judge(images.train, images.train_labels, epochs=size.judge_epochs, seed=run.seed)
    target = judge.features(images.test)
    table = pd.DataFrame(
        {
            "images": [name.replace("\n", " ") for name in made],
            "frechet_features": [frechet_distance(judge.features(image), target) for image in made.values()],
            "nats_per_code": [-prior.score(held), independent_entropy(codes, held, size.codes), np.nan],
        }
    )
    run.write("figure_generated.csv", table, float_format="%.6g")
    text = as_markdown(table, len(images.test))
    run.write("figure_generated.md", text)
    print(text)


def independent(codes: np.ndarray, rows: int, seed: int) -> np.ndarray:
    """Codes with the right frequencies at each position and no dependence between positions."""
    rng = np.random.default_rng([seed, 4])
    return np.stack([rng.choice(column, rows) for column in codes.T], 1)


def independent_entropy(codes: np.ndarray, held: np.ndarray, n_codes: int) -> float:
    """Cross-entropy of held-out codes under the frequencies of each position, with one added to every count."""
    total = 0.0
    for column, fresh in zip(codes.T, held.T, strict=True):
        counts = np.bincount(column, minlength=n_codes) + 1.0
        total -= np.log(counts[fresh] / counts.sum()).mean()
    return total / codes.shape[1]


def draw(made: dict[str, np.ndarray], title: str):
    """Four rows from the prior, one of each of the others."""
    first, *others = made
    rows = [(first if not row else "", made[first][row * COLUMNS : (row + 1) * COLUMNS]) for row in range(ROWS)]
    return draw_sheet([*rows, *((name, made[name][:COLUMNS]) for name in others)], title)


def as_markdown(table: pd.DataFrame, test: int) -> str:
    """How far the images are from real ones, and how well codes are predicted."""
    lines = [
        "# Generated images",
        "",
        f"Fréchet distance of features of a small classifier trained in this run (not FID) between {JUDGED} images and "
        f"{test} test images; and the cross-entropy of a single code of the test images.",
        "",
        "| images | Fréchet distance of features ↓ | nats a code ↓ |",
        "|---|---:|---:|",
    ]
    for row in table.itertuples():
        nats = "" if np.isnan(row.nats_per_code) else f"{row.nats_per_code:.3f}"
        lines.append(f"| {row.images} | {row.frechet_features:.1f} | {nats} |")
    return "\n".join(lines) + "\n"
