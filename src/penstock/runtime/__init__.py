"""Runtime: run the lanes of a lowered schedule in threads or processes, and measure them."""
