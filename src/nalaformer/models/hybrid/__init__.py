"""Pretrained decoders with hybrid attention in place of theirs, as transformers loads and runs them.

Nothing is imported here: the parts enter transformers' tables as those are imported (see nalaformer/__init__.py).
"""
