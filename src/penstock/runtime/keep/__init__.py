"""Keep: what a stage does with saved values: recompute or offload them."""
