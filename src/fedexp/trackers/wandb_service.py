"""Bounds of wandb's library and its background process (wandb-core): time, environment, life."""

import contextlib
import netrc
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")


def bounded(function: Callable[[], T], seconds: float) -> T:
    """Return the function's result, or raise its exception, or TimeoutError after `seconds`; its
    thread then stays.

    An attempt of the function to exit the process becomes a RuntimeError.
    """
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(function())
        except Exception as error:
            outcome.set_exception(error)
        except BaseException as error:
            outcome.set_exception(RuntimeError(f"wandb wanted to end the process ({error!r})"))

    Thread(target=work, daemon=True, name="wandb call").start()
    return outcome.result(timeout=seconds)


def logged_in(api_key: str | None, base_url: str) -> bool:
    """Tell whether there are credentials for the server, without asking anybody.

    api_key, base_url: of wandb's settings, which know the environment and the settings files but
    not netrc.
    """
    if api_key or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    places = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for place in places:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            return (
                netrc.netrc(os.path.expanduser(place)).authenticators(urlsplit(base_url).netloc)
                is not None
            )
    return False


def set_environment(folder: Path) -> Callable[[], None]:
    """Make wandb silent and let it put staged tables and logs into `folder`; a user's own places
    stay.

    Returns a function that puts the environment back. Environment variables, because wandb-core
    knows no other way.
    """
    wanted = {
        "WANDB_SILENT": "true",
        "WANDB_DATA_DIR": os.environ.get("WANDB_DATA_DIR", str(folder / "data")),
        "WANDB_CACHE_DIR": os.environ.get("WANDB_CACHE_DIR", str(folder / "cache")),
    }
    # WANDB_SERVICE is set by wandb and would outlive a wandb-core that was killed.
    before = {name: os.environ.get(name) for name in (*wanted, "WANDB_SERVICE")}
    os.environ.update(wanted)

    def restore() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return restore


def end_service(seconds: float) -> None:
    """End wandb-core, by force if it does not end itself within `seconds`."""

    def teardown() -> None:
        import wandb

        wandb.teardown()

    process = _service_process()
    try:
        bounded(teardown, seconds)
    except Exception:
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=seconds)


def _service_process() -> subprocess.Popen[bytes] | None:
    """Return the process of wandb-core; wandb has no public name for it."""
    with contextlib.suppress(Exception):
        from wandb.sdk import wandb_setup

        handle: Any = wandb_setup.singleton()._connection._proc  # type: ignore[union-attr]
        return getattr(handle, "_process", None) or handle._internal_proc  # newer and older wandb
    return None
