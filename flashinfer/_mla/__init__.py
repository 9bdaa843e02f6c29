"""What the wrappers of multi-head latent attention are made of."""
