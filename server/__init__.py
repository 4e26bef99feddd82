"""The server: hypotheses, the strategy that averages them, and the embedded Flower SuperLink."""
