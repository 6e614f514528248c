"""Analyse the models that finished runs have saved: `fedexp analyse <run directory> <kind>`."""
