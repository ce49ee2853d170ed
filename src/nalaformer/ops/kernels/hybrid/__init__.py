"""Compute hybrid attention: an exact branch, a linear branch, their merge, and one step of decoding."""
