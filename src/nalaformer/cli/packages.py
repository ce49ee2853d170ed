"""Packages that a command needs, asked for before its work and not after it."""

from importlib import import_module


def need(*packages: str) -> None:
    """ModuleNotFoundError now, which `main` answers with what to install."""
    for package in packages:
        import_module(package)
