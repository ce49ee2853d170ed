"""Compute the delta rules: their sequential part, and the inverse that joins the tokens of a chunk."""
