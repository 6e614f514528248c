"""The parts of the pages that are made from docstrings, yaml files, committed tables and
declarations."""

from .algorithms import algorithm_index, algorithm_page, algorithms
from .metrics import command_line, functions, metric_options
from .papers import paper_methods, paper_settings, paper_tables, suspects
from .text import ROOT

__all__ = ["DIRECTIVES", "ROOT", "algorithm_page", "algorithms"]

DIRECTIVES = {
    "algorithm-index": algorithm_index,
    "paper-tables": paper_tables,
    "paper-settings": paper_settings,
    "paper-methods": paper_methods,
    "paper-suspects": suspects,
    "functions": functions,
    "metric-options": metric_options,
    "command-line": command_line,
}
