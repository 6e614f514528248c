"""Signals that ask the command to stop: noted while modules are imported, KeyboardInterrupt from
then on.

An exception that a signal raises within an import is swallowed by some libraries, and leaves half a
module behind that ends in a RecursionError.
"""

import signal

_noted: list[int] = []  # signals that have come while they were held


def hold() -> None:
    """Note signals only from now on, until `release`."""
    _noted.clear()
    for number in RAISING:
        # a shell lets `&` ignore Ctrl+C
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _note)


def release() -> None:
    """Raise KeyboardInterrupt for what was noted; from now on signals raise it by themselves.

    In a process that never held them, such as that of a job of a launcher, this does nothing.
    """
    for number, handler in RAISING.items():
        if signal.getsignal(number) is _note:
            signal.signal(number, handler)
    if _noted:
        _noted.clear()
        raise KeyboardInterrupt


def _note(number: int, frame: object) -> None:
    _noted.append(number)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


# Slurm's preemption, `kill`; Ctrl+C
RAISING = {signal.SIGTERM: _interrupt, signal.SIGINT: signal.default_int_handler}
