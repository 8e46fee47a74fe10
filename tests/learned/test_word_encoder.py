"""The reader of words, against its recurrence written out."""

import torch

from otpdag.learned.paper_topics import PREFIX, WordEncoder


def test_probabilities_are_those_of_the_recurrence():
    encoder = WordEncoder(words=6, topics=3, hidden=4, seed=1)
    phi = encoder.init()
    held = {name.removeprefix(PREFIX): value[0] for name, value in phi.items()}
    words = torch.tensor([[0, 5, 2]])
    state, cell = torch.zeros(4), torch.zeros(4)
    for place, word in enumerate(words[0]):
        gates = held["recur.weight_ih_l0"] @ held["read.weight"][word] + held["recur.bias_ih_l0"]
        gates = gates + held["recur.weight_hh_l0"] @ state + held["recur.bias_hh_l0"]
        enter, forget, new, leave = gates.chunk(4)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
        state = torch.sigmoid(leave) * torch.tanh(cell)
        expected = torch.log_softmax(held["head.weight"] @ state + held["head.bias"], -1)
        torch.testing.assert_close(encoder.log_probs(phi, words)[0, place], expected)


def test_the_seed_decides_where_it_starts():
    one, same, other = (WordEncoder(6, 3, 4, seed).init() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one[PREFIX + "head.weight"], other[PREFIX + "head.weight"])
