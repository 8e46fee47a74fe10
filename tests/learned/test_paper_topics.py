"""The paper's own way to topics: parts of its loss that are known."""

import numpy as np
import pytest
import torch
from scipy import sparse, special

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.divergences import Energy
from otpdag.engine import Layout
from otpdag.learned.paper_topics import DocumentEncoder, _softmax_gaussian, paper_topics_problem, paper_topics_start
from otpdag.noise import Streams
from otpdag.objective import PaperTopics
from otpdag.settings import Objective, PushForward

COUNTS = sparse.csr_array(np.random.default_rng(0).poisson(1.5, (40, 5)) + np.eye(5, dtype=int)[np.arange(40) % 5])


def made(eta=0.0, settings=None, topics=3, counts=COUNTS, seed=0):
    graph = otp.Graph([("shares", "words")], hidden=["shares"])
    structure = otp.Model(graph, {"shares": m.Dirichlet(topics), "words": m.Multinomial(counts.shape[1])}).structure
    settings = settings or PaperTopics(hidden=4, batch_size=100)
    theta = paper_topics_start(structure, settings, seed)
    layout = Layout.of(structure, {key: value for key, value in theta.items() if key.startswith("phi.")})
    push = PushForward(eta, Energy()) if eta else None
    objective = Objective(push_forward=push)
    problem = paper_topics_problem(structure, counts, layout.shapes, objective, settings, seed)
    return problem, layout, theta


def test_words_of_documents_come_in_random_order_where_they_are_read():
    settings = PaperTopics(hidden=4, batch_size=100, reads="words")
    problem, _, _ = made(settings=settings)
    assert problem.rows == 40
    assert made()[0].words is None
    for words, counts in zip(problem.words, COUNTS.toarray(), strict=True):
        np.testing.assert_array_equal(np.bincount(words[words >= 0], minlength=5), counts)
    assert any(words.tolist() != sorted(words.tolist()) for words in problem.words)
    other, _, _ = made(settings=settings, seed=1)
    assert any(one.tolist() != two.tolist() for one, two in zip(problem.words, other.words, strict=True))


def test_topics_that_are_alike_rebuild_words_by_their_frequencies():
    """Whatever the assignments are: the mean of -log softmax(log p + Gumbel noise) at each word."""
    problem, layout, theta = made()
    logits = np.array([0.5, -1.0, 0.0, 1.0, 0.3])
    theta["words.topics"] = torch.as_tensor(np.tile(logits, (1, 3, 1))).float()
    point = layout.pack(theta)
    found = np.mean([problem.sampled(point, Streams([seed]), 0.0).total.item() for seed in range(150)])
    rng = np.random.default_rng(1)
    noisy = logits - np.log(np.exp(logits).sum()) + rng.gumbel(size=(200_000, 5))
    costs = -(noisy - np.log(np.exp(noisy).sum(1, keepdims=True))).mean(0)
    frequency = (COUNTS.toarray() / COUNTS.toarray().sum(1, keepdims=True)).mean(0)
    assert found == pytest.approx(float(frequency @ costs), rel=0.02)


def test_the_push_forward_term_compares_drawn_topics_with_the_prior():
    problem, layout, theta = made(eta=0.5)
    twice, _, _ = made(eta=1.0)
    point = layout.pack(theta)
    one, two = (other.sampled(point, Streams([3], shared=1), 0.0) for other in (problem, twice))
    assert one.divergence.item() > 0
    assert two.divergence.item() == pytest.approx(2 * one.divergence.item(), rel=1e-5)
    assert two.reconstruction.item() == one.reconstruction.item()
    assert made()[0].sampled(point, Streams([3]), 0.0).divergence.item() == 0.0


def test_draws_of_the_prior_have_the_moments_of_the_laplace_approximation():
    alpha = torch.tensor([0.8, 2.0, 5.0])
    drawn = _softmax_gaussian(torch.log(alpha), torch.Generator().manual_seed(0), 40_000)
    inverse = 1 / alpha.double().numpy()
    mean = np.log(alpha.double().numpy()) - np.log(alpha.double().numpy()).mean()
    variance = inverse * (1 - 2 / 3) + inverse.sum() / 9
    np.testing.assert_allclose(drawn.mean(0), mean, atol=0.02)
    np.testing.assert_allclose(drawn.var(0), variance, rtol=0.03)


@pytest.mark.parametrize("reads", ["counts", "words"])
@pytest.mark.parametrize("drawn", [False, True])
def test_streams_decide_and_every_parameter_of_the_loss_has_a_gradient(drawn, reads):
    problem, layout, theta = made(0.1, PaperTopics(drawn=drawn, hidden=4, batch_size=10, reads=reads))
    point = layout.pack(theta).requires_grad_(True)
    first, same, other = (problem.sampled(point, Streams([seed]), 0.0).total for seed in (1, 1, 2))
    assert first.item() == same.item() != other.item()
    (gradient,) = torch.autograd.grad(first, point)
    assert torch.isfinite(gradient).all()
    parts, at = {}, 0
    for key, shape in layout.shapes.items():
        parts[key] = gradient[0, at : at + int(np.prod(shape))]
        at += int(np.prod(shape))
    assert float(parts["words.topics"].abs().max()) > 0
    assert all(float(part.abs().max()) > 0 for key, part in parts.items() if "head.bias" not in key)


def test_a_start_has_even_shares_and_the_encoder_of_the_problem():
    problem, _, theta = made(seed=4)
    for name, value in problem.encoder.named_parameters():
        assert torch.equal(theta[f"phi.encoder.{name}"][0], value)
    naturals = problem.structure.naturals({k: v for k, v in theta.items() if not k.startswith("phi.")})
    concentration = naturals["shares"]["concentration"].flatten()
    torch.testing.assert_close(concentration, concentration[:1].expand(3))
    assert 0.05 < float(theta["words.topics"].std()) < 0.2


@pytest.mark.parametrize("drawn", [False, True])
def test_documents_are_rebuilt_from_one_draw_of_their_topics(drawn):
    """A relaxed draw of a document's topics, then relaxed noise of the words, both at the temperature."""
    problem, layout, theta = made(settings=PaperTopics(drawn=drawn, temperature=0.6, hidden=4, batch_size=7))
    found = problem.sampled(layout.pack(theta), Streams([5]), 0.0)
    streams = Streams([5])
    counts = COUNTS.toarray()[streams.rows(40, 7)[0].numpy()]
    with torch.no_grad():
        logits = problem.encoder(torch.from_numpy(counts).float()).double().numpy()
    generator, gamma = streams.generators[0], theta["words.topics"][0].double().numpy()
    uniform = torch.rand((7, 3), generator=generator).double().numpy()
    topics = special.softmax((special.log_softmax(logits, -1) - np.log(-np.log(uniform))) / 0.6, -1)
    if drawn:
        inverse = np.exp(-gamma)
        variance = inverse * (1 - 2 / 5) + inverse.sum(1, keepdims=True) / 25
        noise = torch.randn(3, 5, generator=generator).double().numpy()
        gamma = gamma - gamma.mean(1, keepdims=True) + np.sqrt(variance) * noise
    uniform = torch.rand((7, 5), generator=generator).double().numpy().clip(1e-9, 1 - 1e-7)
    line = special.log_softmax((special.log_softmax(topics @ gamma, -1) - np.log(-np.log(uniform))) / 0.6, -1)
    costs = -(counts * line).sum(1) / counts.sum(1)
    assert found.reconstruction.item() == pytest.approx(costs.mean(), rel=1e-4)
    assert found.total.item() == found.reconstruction.item()


def test_topics_start_a_tenth_of_a_standard_normal_variable_apart():
    _, _, theta = made(seed=4)
    expected = 0.1 * torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(theta["words.topics"], expected)


def test_logits_are_those_of_the_mean_state_of_the_recurrence():
    """The reader of words, written out; a shorter document is not read behind its end."""
    torch.manual_seed(1)
    encoder = DocumentEncoder(6, 3, PaperTopics(hidden=4, reads="words"))
    held = dict(encoder.named_parameters())
    logits = []
    for document in ([0, 5, 2], [1, 1]):
        state, cell, states = torch.zeros(4), torch.zeros(4), []
        for word in document:
            gates = held["recur.weight_ih_l0"] @ (held["embed.weight"][:, word] + held["embed.bias"])
            gates = gates + held["recur.bias_ih_l0"] + held["recur.weight_hh_l0"] @ state + held["recur.bias_hh_l0"]
            enter, forget, new, leave = gates.chunk(4)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
            state = torch.sigmoid(leave) * torch.tanh(cell)
            states.append(state)
        mean = torch.stack(states).mean(0)
        logits.append(held["head.weight"] @ torch.log1p(mean.exp()) + held["head.bias"])
    expected = torch.stack(logits)
    expected = (expected - expected.mean(0)) / (expected.var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(encoder(torch.tensor([[0, 5, 2], [1, 1, -1]])), expected, rtol=1e-4, atol=1e-5)


def test_counts_are_read_as_shares():
    torch.manual_seed(1)
    encoder = DocumentEncoder(5, 3, PaperTopics(hidden=4))
    counts = torch.from_numpy(COUNTS.toarray()).float()
    torch.testing.assert_close(encoder(3 * counts), encoder(counts))


def test_an_encoder_reads_counts_or_words():
    with pytest.raises(otp.ModelError, match="reads must be one of 'counts', 'words'"):
        PaperTopics(reads="letters")


@pytest.mark.parametrize("drawn", [False, True])
def test_starts_that_run_together_are_those_that_run_apart(drawn):
    problem, layout, theta = made(0.1, PaperTopics(drawn=drawn, hidden=4, batch_size=10))
    _, _, other = made(seed=3)
    points = [layout.pack(one) for one in (theta, other)]
    apart = [problem.sampled(one, Streams([seed]), 0.0).total for one, seed in zip(points, (1, 2), strict=True)]
    together = problem.sampled(torch.cat(points), Streams([1, 2]), 0.0).total
    torch.testing.assert_close(together, torch.cat(apart))
