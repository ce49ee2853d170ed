"""What surrounds attention: depth-wise convolution, layer norm, scaled residual."""
