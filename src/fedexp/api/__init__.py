"""The Python interface; users take its names from `fedexp` itself, whose `__all__` lists those that
stay."""
