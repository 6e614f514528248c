"""Delay the handling of SIGINT and SIGTERM until all modules are imported.

Some libraries catch the exception that a signal raises while they are imported. The half-imported
module then causes a RecursionError. So signals are only recorded during imports, and
KeyboardInterrupt is raised afterwards.
"""

import signal

_noted: list[int] = []  # signals received since `hold` was called


def hold() -> None:
    """Record signals instead of raising KeyboardInterrupt, until `release` is called."""
    _noted.clear()
    for number in RAISING:
        # shells make a command started with `&` ignore Ctrl+C; it should keep ignoring it
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _note)


def release() -> None:
    """Raise KeyboardInterrupt if a signal was recorded. Later signals raise it immediately.

    This does nothing in a process that never called `hold`, such as a process of a launcher.
    """
    for number, handler in RAISING.items():
        if signal.getsignal(number) is _note:
            signal.signal(number, handler)
    raise_received()


def raise_received() -> None:
    """Raise KeyboardInterrupt if a signal was recorded. Later signals are handled as before."""
    if _noted:
        _noted.clear()
        raise KeyboardInterrupt


def _note(number: int, frame: object) -> None:
    _noted.append(number)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


# SIGTERM comes from `kill` and from Slurm's preemption, SIGINT from Ctrl+C
RAISING = {signal.SIGTERM: _interrupt, signal.SIGINT: signal.default_int_handler}
