"""Representations: discrete auto-encoders beside the quantisers people use, Wasserstein ones beside AE and VAE."""

import importlib
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import pairwise
from multiprocessing import get_context

import numpy as np
import torch

from baselines.vae import VAE
from baselines.vq_vae import VQVAE
from benchmarks.harness import Case, Record, Settings, Skip, streams
from experiments.image_quality import code_perplexity, psnr, ssim
from experiments.image_sets import load_images
from otpdag.divergences import MMD
from otpdag.errors import DataError
from otpdag.estimators import VectorQuantizedAutoencoder, WassersteinAutoencoder

TRAIN, TEST = 5000, 500
HELD_BACK = 2000  # images of the split that training images come from: SVHN's other split has another contrast
QUICK_EPOCHS, FULL_EPOCHS = 10, 60
SIZES = {"n_codes": 512, "code_dim": 64, "width": 64, "batch_size": 32}
METHODS = {
    "ours": "otpdag.estimators.VectorQuantizedAutoencoder",
    "vqvae": "baselines.vq_vae.VQVAE",
    "sqvae": "baselines.sq_vae.SQVAE",
    "vq_ema": "baselines.library_quantizers.VQEMA",
    "vq_ema_revived": "baselines.library_quantizers.RevivedVQEMA",
    "fsq": "baselines.library_quantizers.FiniteScalar",
    "revived_as_ours": "baselines.library_quantizers.RevivedVQEMA",
}
OPTIONS = {"revived_as_ours": {"as_ours": True}}  # our start, codewords' length and cost: only the quantiser differs
PEERS = ("vqvae", "sqvae", "vq_ema", "vq_ema_revived", "fsq")
PLAIN = ("vqvae", "sqvae", "vq_ema")  # peers that start from random codewords and revive none
TIMED_STEPS, TIMED_ROUNDS = 12, 5


def method_class(method: str):
    module, _, name = METHODS[method].rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise Skip("vector-quantize-pytorch: run `make bench-setup`") from error


def images(name: str, seed: int):
    """Training images, others of the same split, those of the test split, and the seed of the fit."""
    try:
        held = load_images(name)
    except DataError as error:
        raise Skip(str(error)) from error
    source = streams(seed, f"images_{name}", 0)
    train = source.data.choice(len(held.train), TRAIN, replace=False)
    test = source.data.choice(len(held.test), min(TEST, len(held.test)), replace=False)
    others = source.data.permutation(np.setdiff1d(np.arange(len(held.train)), train))[:HELD_BACK]
    return held.train[train], held.train[others], held.test[test], source.fit % 2**31


def trained(name: str, method: str, seed: int, epochs: int) -> Record:
    """One auto-encoder on one set, on one thread: quality on images that it did not see, and what a step took."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    train, others, test, own = images(name, seed)
    begin = time.process_time()
    fitted = method_class(method)(**SIZES, **OPTIONS.get(method, {}), n_epochs=epochs, random_state=own).fit(train)
    steps = epochs * math.ceil(len(train) / SIZES["batch_size"])
    took = (time.process_time() - begin) / steps
    codes = fitted.encode(test)
    rebuilt, truth = fitted.decode(codes), test.astype(np.float32)
    return {
        "psnr": psnr(rebuilt, truth, peak=255.0),
        "ssim": ssim(rebuilt, truth, peak=255.0),
        "perplexity": code_perplexity(codes, n_codes=SIZES["n_codes"]),
        "perplexity_same_split": code_perplexity(fitted.encode(others), n_codes=SIZES["n_codes"]),
        "cpu_seconds_per_step": took,
    }


@cache
def everything(name: str, seed: int, epochs: int) -> dict[str, Record]:
    """All methods on one set, two at a time: every one has the same processor to itself."""
    images(name, seed)  # skip before any work
    for method in METHODS:
        method_class(method)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        futures = {method: pool.submit(trained, name, method, seed, epochs) for method in METHODS}
        for method, future in futures.items():
            print(name, method, {key: round(value, 4) for key, value in future.result().items()}, flush=True)
        return {method: future.result() for method, future in futures.items()}


def measured(settings: Settings, name: str) -> dict[str, Record]:
    return everything(name, settings.seed, QUICK_EPOCHS if settings.repeats <= 5 else FULL_EPOCHS)


def perplexity(name: str) -> Case:
    """How many of 512 codewords are in use on unseen images."""

    def case(settings: Settings) -> Record:
        results = measured(settings, name)
        ours = results["ours"]["perplexity"]
        return {"ratio": ours, "at_least": 400.0, "ours": ours} | by_method(results, "perplexity")

    return case


def over(name: str, figure: str, peers: tuple[str, ...], at_least: float) -> Case:
    """A figure over that of the best peer."""

    def case(settings: Settings) -> Record:
        results = measured(settings, name)
        ours = results["ours"][figure]
        best = max(results[peer][figure] for peer in peers)
        return {"ratio": ours / best, "at_least": at_least, "ours": ours, "oracle": best} | by_method(results, figure)

    return case


def by_method(results: dict[str, Record], figure: str) -> Record:
    return {f"{figure}_{method}": record[figure] for method, record in results.items()}


class Clock:
    """Notes the processor time whenever it is called."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def __call__(self, *_: object) -> bool:
        self.marks.append(time.process_time())
        return False

    @property
    def gaps(self) -> list[float]:
        return [after - first for first, after in pairwise(self.marks)]


@cache
def step_times(seed: int) -> dict[str, float]:
    """Median processor time of a step: ours before and after codewords are placed, and two peers', taken in turns."""
    train, _, _, own = images("cifar10", seed)
    few = train[: TIMED_STEPS * SIZES["batch_size"]]
    settings = SIZES | {"random_state": own}
    revived = method_class("vq_ema_revived")
    times: dict[str, list[float]] = {"continuous": [], "quantised": [], "vqvae": [], "vq_ema_revived": []}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(TIMED_ROUNDS):
            clock = Clock()
            ours = VectorQuantizedAutoencoder(**settings, n_epochs=2, warm_up=0.5)
            ours.fit(few, callbacks=[clock], progress=False)
            times["continuous"] += clock.gaps[1 : TIMED_STEPS - 1]
            times["quantised"] += clock.gaps[TIMED_STEPS + 1 :]
            for name, peer in (("vqvae", VQVAE), ("vq_ema_revived", revived)):
                clock = Clock()
                peer(**settings, n_epochs=1).fit(few, on_step=clock)
                times[name] += clock.gaps[1:]
    finally:
        torch.set_num_threads(before)
    return {name: float(np.median(taken)) for name, taken in times.items()}


def step_time_over(peer: str) -> Case:
    """Processor time of a training step over a peer's."""

    def case(settings: Settings) -> Record:
        times = step_times(settings.seed)
        ours, theirs = times["quantised"], times[peer]
        return {"ratio": ours / theirs, "limit": 1.3, "ours": ours, "oracle": theirs}

    return case


def transport_share(settings: Settings) -> Record:
    """Share of a step that all of the codebook takes: distances, 64 positions' transport, mixture, gradients."""
    times = step_times(settings.seed)
    share = 1 - times["continuous"] / times["quantised"]
    return {"ratio": share, "limit": 0.3, "ours": times["quantised"], "without": times["continuous"]}


@cache
def wasserstein(seed: int) -> Record:
    """Reconstruction and codes of a Wasserstein auto-encoder, a plain one and a variational one, of equal size."""
    train, _, _, own = images("mnist", seed)
    test = load_images("mnist").test[:2000]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours = WassersteinAutoencoder(8, random_state=own).fit(train, progress=False)
        plain = WassersteinAutoencoder(8, eta=0.0, random_state=own).fit(train, progress=False)
        variational = VAE(8, random_state=own).fit(train)
    finally:
        torch.set_num_threads(before)
    prior = np.random.default_rng(own).normal(size=(len(test), 8))
    return {
        "squared_error": -ours.score(test),
        "plain_squared_error": -plain.score(test),
        "mmd": distance(ours.transform(test), prior),
        "plain_mmd": distance(plain.transform(test), prior),
        "vae_mmd": distance(variational.draw_codes(test), prior),
    }


def distance(codes, prior) -> float:
    return float(MMD()(torch.as_tensor(codes).double().unsqueeze(0), torch.as_tensor(prior).unsqueeze(0))[0])


def wae_reconstruction(settings: Settings) -> Record:
    """Squared error on unseen digits over that of a plain auto-encoder of the same size."""
    record = wasserstein(settings.seed)
    return {"ratio": record["squared_error"] / record["plain_squared_error"], "limit": 1.05} | record


def wae_mmd_over_vae(settings: Settings) -> Record:
    """Distance of the codes of unseen digits from the prior over that of a VAE's drawn codes."""
    record = wasserstein(settings.seed)
    return {"ratio": record["mmd"] / record["vae_mmd"], "limit": 1.0} | record


def quality(name: str) -> dict[str, Case]:
    """Over all peers; over the plain ones; over the best quantiser with our start, to tell what is whose."""
    return {
        f"{name}_perplexity": perplexity(name),
        f"{name}_perplexity_over_vqvae": over(name, "perplexity", ("vqvae",), 3.0),
        f"{name}_perplexity_over_best": over(name, "perplexity", PEERS, 1.0),
        f"{name}_perplexity_same_split_over_best": over(name, "perplexity_same_split", PEERS, 1.0),
        f"{name}_psnr_over_vqvae": over(name, "psnr", ("vqvae",), 1.0),
        f"{name}_psnr_over_plain": over(name, "psnr", PLAIN, 1.0),
        f"{name}_psnr_over_best": over(name, "psnr", PEERS, 1.0),
        f"{name}_psnr_over_quantiser": over(name, "psnr", ("revived_as_ours",), 1.0),
        f"{name}_ssim_over_vqvae": over(name, "ssim", ("vqvae",), 1.0),
        f"{name}_ssim_over_plain": over(name, "ssim", PLAIN, 1.0),
        f"{name}_ssim_over_best": over(name, "ssim", PEERS, 1.0),
    }


CASES: dict[str, Case] = {
    **quality("cifar10"),
    **quality("mnist"),
    **quality("svhn"),
    "step_time_over_vqvae": step_time_over("vqvae"),
    "step_time_over_peer": step_time_over("vq_ema_revived"),
    "transport_share": transport_share,
    "wae_reconstruction": wae_reconstruction,
    "wae_mmd_over_vae": wae_mmd_over_vae,
}
