"""Export: the capture path through torch.export, which cuts between any two operations."""
