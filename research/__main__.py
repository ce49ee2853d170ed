"""`python -m research train mqar_small`: the command line of the library, which here knows sequence tasks and their recipes."""

from nalaformer.cli import build_app, run_app

from . import recipes  # noqa: F401  (enters the recipes)

if __name__ == "__main__":
    run_app(build_app, "python -m research")
