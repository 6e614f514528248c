"""Code that uses undocumented interfaces of other libraries, and the reasons for using them.

Tested with hydra-core 1.3.8, omegaconf 2.3.1 and torch 2.15. Each library has a separate module, so
that code that needs one library does not import the others.
"""
