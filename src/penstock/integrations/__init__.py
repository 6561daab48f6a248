"""Integrations: the training loops of other libraries on a pipeline; each file needs the library that it names."""
