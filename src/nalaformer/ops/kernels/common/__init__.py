"""Share code between all kernels: tiles, products, feature maps and fast mathematics in `compiled`; launches and operators."""
