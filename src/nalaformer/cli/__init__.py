"""The command line."""

from .app import build_app, main

__all__ = ["build_app", "main"]
