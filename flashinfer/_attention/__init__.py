"""What the families of attention share."""
