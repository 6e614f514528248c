"""The pages of algorithms, made from docstrings and yaml files."""

from .algorithms import algorithm_page, algorithms
from .text import ROOT

__all__ = ["ROOT", "algorithm_page", "algorithms"]
