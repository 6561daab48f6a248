"""Callbacks: observers that are notified of events in a training and record them."""
