"""Exactness: check that the losses of micro-batches add up to the loss of the batch."""
