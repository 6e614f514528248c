"""Convert overrides to the spelling that Hydra and the config groups expect."""

from collections.abc import Sequence
from pathlib import Path

from fedexp.config.options import PRESETS, conf_directory, known_keys, list_groups, list_options
from fedexp.core.errors import ConfigError

ALIASES = {"partition": {"dirichlet": "lda"}}  # group -> name in the literature -> option


def normalise(overrides: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Return the overrides in the spelling that Hydra and the config groups expect.

    Options get the case of their file names (algorithm=FedNTD becomes fedntd), aliases are replaced
    with option names, and values with characters that Hydra's grammar does not allow are quoted
    (hydra.run.dir=grün).

    folders: the directories with config groups, the user's first.
    """
    groups = [*list_groups(list(folders)), *PRESETS]
    return [normalised(text, groups, folders) for text in overrides]


def normalised(override: str, groups: Sequence[str], folders: Sequence[Path]) -> str:
    """Return one override in Hydra's spelling. An unknown name is not changed."""
    key, equals, value = override.partition("=")
    if not equals:
        return override
    group = key.lstrip("+")
    if group in groups:
        options = list_options(group, list(folders))
        value = ",".join(option_of(name, group, options) for name in value.split(","))
    if not value.isascii() and not value.startswith(("'", '"', "[", "{")):
        value = ",".join(piece if piece.isascii() else quoted(piece) for piece in value.split(","))
    return f"{key}={value}"


def option_of(name: str, group: str, options: Sequence[str]) -> str:
    """Return the option that a name refers to.

    A name may be an alias or use another case than the option. An unknown name is returned
    unchanged.
    """
    if name in options:
        return name
    if alias := ALIASES.get(group, {}).get(name.lower()):
        return alias
    same = [option for option in options if option.lower() == name.lower()]
    return same[0] if len(same) == 1 else name


def check_values(overrides: Sequence[str], folders: Sequence[Path]) -> None:
    """Raise ConfigError for invalid values that Hydra would accept or report unclearly.

    The checked cases are: an empty value for hydra.run.dir, hydra.sweep.dir or a config group (for
    example, from an empty shell variable), the removal of a key that every run has, and `seeds=1`.
    """
    groups = list_groups([conf_directory()])
    for override in overrides:
        key, equals, value = override.partition("=")
        name = key.lstrip("~+")
        removed = key.startswith("~")
        if name in ("hydra.run.dir", "hydra.sweep.dir") and equals and not value.strip("'\""):
            raise ConfigError(f"{override}: must name a directory")
        if name in groups and (removed or (equals and not value)):
            options = ", ".join(list_options(name, list(folders)))
            raise ConfigError(f"{override}: must select an option of the group; options: {options}")
        if removed and known_keys(conf_directory(), []).get(name) == []:
            raise ConfigError(
                f"{override}: cannot be removed; leave it out to use the default, or set it with"
                f" {name}=<value>"
            )
        if name == "seeds" and not removed and not value.startswith(("{", "$")):
            command = f"fedexp --multirun seed={value}" if "," in value else f"seed={value}"
            raise ConfigError(
                f"{override}: cannot be set as a whole; use {command}, or set seeds.partition,"
                " seeds.sampling and seeds.training"
            )


def quoted(text: str) -> str:
    """Quote a text for Hydra's grammar. Interpolations in the text are still resolved."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.single).with_quotes()
