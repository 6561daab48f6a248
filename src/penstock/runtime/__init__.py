"""Do: run the lanes of a lowered schedule over threads or processes, and measure them."""
