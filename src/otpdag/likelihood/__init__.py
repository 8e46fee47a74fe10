r"""The likelihood: :math:`-\epsilon \log \sum` over what is unseen, by moments, states, chains, graphs, documents."""
