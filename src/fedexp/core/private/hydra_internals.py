"""Hydra's parser of flags, which its public interface does not have."""

from hydra._internal.utils import get_args_parser as get_args_parser
