"""Analyses of finished runs, from the models kept in their directories: `fedexp analyse <run
directory> <kind>`."""
