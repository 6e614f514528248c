"""Uses of other libraries beside their documented interfaces: all of them are here, each with its
reason.

Tried with hydra-core 1.3.8, omegaconf 2.3.1 and torch 2.15. A module for each library, so that what
needs one alone does not import the other.
"""
