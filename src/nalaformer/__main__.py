"""`python -m nalaformer`, which is what torchrun -m starts."""

from .cli import main

main()
