"""Code that the families of attention share."""
