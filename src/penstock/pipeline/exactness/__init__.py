"""Exactness: do the losses of micro-batches add up to the loss of the batch?"""
