"""Whole networks, found by name in the registries that their users know: backbones in timm, language models in transformers.

Nothing is imported here: each part needs packages that users of the others may not have.
"""
