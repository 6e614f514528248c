"""Analyses after a run, from the models that its directory keeps: `fedexp analyse <run directory>
<kind>`."""
