"""The command line."""

from .app import build_app, main, run_app

__all__ = ["build_app", "main", "run_app"]
