"""Analyse the models that finished runs have saved: `fedexp-papers analyse <run> <kind>`."""
