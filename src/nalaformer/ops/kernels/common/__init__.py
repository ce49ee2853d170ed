"""What all kernels share: tiles, products, feature maps and fast mathematics in `compiled`; launches and operators here."""
