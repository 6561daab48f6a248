"""Feeding: send batches from any loader to the lanes, ahead of the steps that use them."""
