"""What a fitted model says: draws from it, and draws, probabilities and likelihoods given rows or sequences."""
