"""Trackers display a run, for example in Weights & Biases or in the terminal."""
