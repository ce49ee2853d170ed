"""Code that Triton compiles; the type checker leaves it alone."""
