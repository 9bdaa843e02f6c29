"""Parts of the wrappers of multi-head latent attention."""
