"""The machine of this process: tools, targets, trusted owners and the workspace."""
