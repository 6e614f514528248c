"""Views of a run: Weights & Biases, the live display, or none."""
