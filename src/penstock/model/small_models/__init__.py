"""Small models: transformers architectures by name, with small random weights."""
