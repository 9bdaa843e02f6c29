"""What the functions of the delta rule share."""
