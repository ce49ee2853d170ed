"""Compute linear attention: bidirectional, causal, one step, and features across heads."""
