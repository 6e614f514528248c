"""Delay signals that stop the command until all modules are imported.

Some libraries catch an exception that a signal raises during their import. The half-imported module
then causes a RecursionError. So signals are only recorded during imports, and raise
KeyboardInterrupt after them.
"""

import signal

_noted: list[int] = []  # signals received while they were held


def hold() -> None:
    """Record signals, without raising, until `release` is called."""
    _noted.clear()
    for number in RAISING:
        # for commands started with `&`, a shell makes the process ignore Ctrl+C
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _note)


def release() -> None:
    """Raise KeyboardInterrupt if a signal was recorded. Later signals raise it immediately.

    In a process that never called `hold`, such as a launcher's job, this does nothing.
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


# SIGTERM comes from `kill` and from Slurm's preemption, SIGINT from Ctrl+C
RAISING = {signal.SIGTERM: _interrupt, signal.SIGINT: signal.default_int_handler}
