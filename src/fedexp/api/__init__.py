"""The Python interface. Import its names from `fedexp`, whose `__all__` lists the stable ones."""
