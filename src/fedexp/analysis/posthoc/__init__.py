"""Analyse finished runs by means of the models saved in their directories: `fedexp analyse <run
directory> <kind>`."""
