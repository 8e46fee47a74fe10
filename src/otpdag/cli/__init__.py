"""The command line: ``otpdag fit``, ``sample``, ``impute``, ``posterior``, ``score``, ``show`` and ``reproduce``."""

from otpdag.cli.app import app, main

__all__ = ["app", "main"]
