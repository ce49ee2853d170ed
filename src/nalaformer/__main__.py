"""Run the command line as `python -m nalaformer`; torchrun -m uses this module too."""

from .cli import main

main()
