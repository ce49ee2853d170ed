"""Pretrained decoders with hybrid attention in place of theirs, as transformers loads and runs them.

Importing this package registers them: AutoConfig and AutoModelForCausalLM then know their folders.
"""

from .config import HybridConfig
from .model import HybridForCausalLM

__all__ = ["HybridConfig", "HybridForCausalLM"]
