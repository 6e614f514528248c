"""Former names of the options of groups: they stay accepted, and runs that bear them are still
found."""

from functools import cache

from fedexp.core.errors import say

FORMER = {"partition": {"shards": "equal_shards"}}  # group -> former name of an option -> its name


def current(group: str, option: str) -> str:
    """Return the name of an option that may be given by a former one."""
    return FORMER.get(group, {}).get(option, option)


def names(group: str, option: str) -> list[str]:
    """Return the name of an option and its former ones; `option` may be any of them."""
    name = current(group, option)
    return [name, *(old for old, new in FORMER.get(group, {}).items() if new == name)]


@cache
def notice(group: str, option: str) -> None:
    """Say, once in a process, that an option has another name."""
    say(
        f"{group}={option}: has become {group}={current(group, option)}; the old name is still"
        " accepted"
    )
