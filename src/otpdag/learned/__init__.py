"""Learned backward maps: Algorithm 1, encoders and quantisers, and the problems that are minimised with them."""
