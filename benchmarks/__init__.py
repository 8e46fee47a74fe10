"""Accuracy and speed side by side with trusted estimators: ``python -m benchmarks``."""
