"""Keep: recomputing and offloading of the saved values of a stage."""
