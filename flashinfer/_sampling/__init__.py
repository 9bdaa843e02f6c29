"""What the functions of :mod:`flashinfer.sampling` share."""
