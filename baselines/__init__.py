"""Peers that experiments and benchmarks compare with, behind one interface: ``fit(data, ...) -> Estimate``."""
