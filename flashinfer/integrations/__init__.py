"""Other libraries run on ours. Each module here is imported on request alone, and imports its library when asked to."""
