"""Training processes: start, watch and restart them."""
