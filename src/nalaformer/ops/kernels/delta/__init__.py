"""The delta rules: what is sequential in them, and the inverse that joins the tokens of a piece."""
