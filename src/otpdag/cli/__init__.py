"""The command line: ``otpdag fit`` and the commands that use a fitted model."""

from otpdag.cli.app import app, main

__all__ = ["app", "main"]
