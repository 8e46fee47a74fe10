"""The backward map of documents as sequences of words: an LSTM gives each word a distribution over topics."""

from __future__ import annotations

from torch import Tensor, log_softmax, nn
from torch.func import functional_call

from otpdag.image_networks import seeded
from otpdag.structure import Theta

__all__ = ["WordEncoder"]

PREFIX = "phi.encoder."


class WordEncoder:
    """An LSTM over the words of a document (Appendix C.1 of the paper).

    Args:
        words: Size of the vocabulary.
        topics: Number of topics.
        hidden: Units of the LSTM.
        seed: Of its parameters as they start.
    """

    def __init__(self, words: int, topics: int, hidden: int, seed: int) -> None:
        self.module = seeded(lambda: _Reader(words, topics, hidden), seed)

    def init(self) -> dict[str, Tensor]:
        """The network's own parameters, with a replica axis of one."""
        return {PREFIX + name: value.detach().unsqueeze(0) for name, value in self.module.named_parameters()}

    def log_probs(self, phi: Theta, words: Tensor) -> Tensor:
        """Log-probabilities of the topics of each word (documents, words, K)."""
        weights = {name.removeprefix(PREFIX): value[0] for name, value in phi.items()}
        read: Tensor = functional_call(self.module, weights, (words,))
        return read


class _Reader(nn.Module):
    def __init__(self, words: int, topics: int, hidden: int) -> None:
        super().__init__()
        self.read = nn.Embedding(words, hidden)  # a linear layer of one-hot words
        self.recur = nn.LSTM(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, topics)

    def forward(self, words: Tensor) -> Tensor:
        return log_softmax(self.head(self.recur(self.read(words))[0]), -1)
