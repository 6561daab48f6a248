"""Loading: fill the stages of a model from files of weights; a process reads only the tensors of its own stages."""
