"""Compute the modules around attention: depth-wise convolution, norms, scaled residual, cross-entropy."""
