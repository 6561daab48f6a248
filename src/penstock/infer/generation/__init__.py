"""Generate: the tokens of a language model, with several requests in flight over its lanes."""
