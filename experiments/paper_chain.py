r"""The paper's own way to a Poisson hidden Markov model (Appendix C.2), kept as it is written.

A three-layer perceptron draws each step's state from that step's count alone, by a Gumbel-softmax of temperature 0.1;
the count is rebuilt by :math:`z^\top e^\lambda + u \sqrt{z^\top e^\lambda}` at a smooth L1 cost; the push-forward
term is the exact Wasserstein distance between the sequences of backward probabilities and sequences of the prior, with
the Kullback-Leibler divergence as its ground cost, weighed by 0.1. 50 epochs, learning rate 0.05, best of several
starts by the objective. The prior's sequences are the transition probabilities along simulated paths, which makes the
stay probability learnable; the paper does not say how it does so.
"""

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

ETA, TEMPERATURE, EPOCHS, RATE = 0.1, 0.1, 50, 0.05
BATCH = 50


def fit_paper(counts, *, states: int, starts: int, seed: int) -> tuple[np.ndarray, float]:
    """Rates in rising order and the stay probability, of the start with the lowest objective."""
    ends = [_run(torch.as_tensor(counts, dtype=torch.float32), states, 1000 * seed + start) for start in range(starts)]
    _, log_rate, stay = min(ends, key=lambda end: end[0])
    return np.sort(np.exp(log_rate)), stay


def _run(counts: Tensor, states: int, seed: int) -> tuple[float, np.ndarray, float]:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    centre, spread = counts.mean(), counts.std()
    encoder = torch.nn.Sequential(
        torch.nn.Linear(1, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, states)
    )
    # log-rates spread at random over the data's range
    drawn = counts.flatten()[torch.randint(counts.numel(), (states,), generator=generator)]
    log_rate = torch.log(drawn + 1.0).requires_grad_(True)
    logit_stay = torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.Adam([*encoder.parameters(), log_rate, logit_stay], lr=RATE)
    tail = []
    for epoch in range(EPOCHS):
        for rows in torch.randperm(len(counts), generator=generator).split(BATCH):
            x = counts[rows]
            logits = encoder(((x - centre) / spread).unsqueeze(-1))
            uniform = torch.rand(logits.shape, generator=generator).clamp(1e-9, 1 - 1e-9)
            z = torch.softmax((torch.log_softmax(logits, -1) - torch.log(-torch.log(uniform))) / TEMPERATURE, -1)
            rate = z @ torch.exp(log_rate)
            rebuilt = rate + torch.randn(rate.shape, generator=generator) * rate.clamp(min=1e-6).sqrt()
            cost = torch.nn.functional.smooth_l1_loss(rebuilt, x)
            loss = cost + ETA * _distance(logits, torch.sigmoid(logit_stay), states, generator)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            if epoch >= EPOCHS - 5:
                tail.append(float(loss.detach()))
    end = float(np.mean(tail)) if np.isfinite(tail).all() else np.inf
    return end, log_rate.detach().numpy(), float(torch.sigmoid(logit_stay).detach())


def _distance(logits: Tensor, stay: Tensor, states: int, generator: torch.Generator) -> Tensor:
    """Exact Wasserstein distance between as many sequences of probabilities, with summed KL as ground cost."""
    many, length, _ = logits.shape
    with torch.no_grad():
        path = torch.randint(states, (many,), generator=generator)
        paths = [path]
        for _ in range(length - 1):
            moved = (path + torch.randint(1, states, (many,), generator=generator)) % states
            path = torch.where(torch.rand(many, generator=generator) < stay, path, moved)
            paths.append(path)
        before = torch.nn.functional.one_hot(torch.stack(paths[:-1], 1), states).float()
    prior = before * stay + (1 - before) * (1 - stay) / (states - 1)
    prior = torch.cat([torch.full((many, 1, states), 1 / states), prior], 1).clamp(min=1e-6)
    log_q = torch.log_softmax(logits, -1)
    q = log_q.exp()
    # KL(q || prior) of all pairs of sequences, averaged over steps
    cross = torch.einsum("atk,btk->ab", q, torch.log(prior))
    cost = ((q * log_q).sum((1, 2)).unsqueeze(1) - cross) / length
    left, right = linear_sum_assignment(cost.detach().numpy())
    return cost[left, right].mean()
