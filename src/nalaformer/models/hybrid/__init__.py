"""Pretrained decoders with hybrid attention in place of their own, loaded and run by transformers.

Importing this package registers them, so that AutoConfig and AutoModelForCausalLM load their folders.
"""

from .config import HybridConfig
from .model import HybridForCausalLM

__all__ = ["HybridConfig", "HybridForCausalLM"]
