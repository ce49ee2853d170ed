"""Whole networks, registered where their users look: backbones in timm, language models in transformers.

This package imports none of them, since each needs packages that users of the others may not have.
"""
