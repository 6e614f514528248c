"""The Python interface. Import names from `fedexp`; `fedexp.__all__` lists the stable names."""
