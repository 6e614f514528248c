"""Ways in which users write overrides, turned into the one that Hydra and the groups know."""

from collections.abc import Sequence
from pathlib import Path

from fedexp.config.options import PRESETS, conf_directory, known_keys, list_groups, list_options
from fedexp.core.errors import ConfigError

ALIASES = {"partition": {"dirichlet": "lda"}}  # group -> name in the literature -> option


def normalise(overrides: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Return the overrides with options of groups in their own spelling (algorithm=FedNTD is
    fedntd), aliases in place of other names of an option, and quotes around letters that Hydra's
    grammar lacks (hydra.run.dir=grün).

    folders: the directories with groups, the user's own first."""
    groups = [*list_groups(list(folders)), *PRESETS]
    return [normalised(text, groups, folders) for text in overrides]


def normalised(override: str, groups: Sequence[str], folders: Sequence[Path]) -> str:
    """Return one override in the spelling that Hydra knows; what is not understood stays as it
    is."""
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
    """Return the option that a name stands for: itself, an alias, or the same letters in another
    case."""
    if name in options:
        return name
    if alias := ALIASES.get(group, {}).get(name.lower()):
        return alias
    same = [option for option in options if option.lower() == name.lower()]
    return same[0] if len(same) == 1 else name


def check_values(overrides: Sequence[str], folders: Sequence[Path]) -> None:
    """Raise ConfigError for a directory or an option that is left empty, as a shell variable
    without a value leaves it, for what every run has and is taken out, and for `seeds=1`."""
    groups = list_groups([conf_directory()])
    for override in overrides:
        key, equals, value = override.partition("=")
        name = key.lstrip("~+")
        removed = key.startswith("~")
        if name in ("hydra.run.dir", "hydra.sweep.dir") and equals and not value.strip("'\""):
            raise ConfigError(f"{override}: must be a directory")
        if name in groups and (removed or (equals and not value)):
            options = ", ".join(list_options(name, list(folders)))
            raise ConfigError(f"{override}: every run has one; options: {options}")
        if removed and known_keys(conf_directory(), []).get(name) == []:
            raise ConfigError(
                f"{override}: every run has it; leave it out for its default, or set it with"
                f" {name}=<value>"
            )
        if name == "seeds" and not removed and not value.startswith(("{", "$")):
            command = f"fedexp --multirun seed={value}" if "," in value else f"seed={value}"
            raise ConfigError(
                f"{override}: say {command}; seeds.partition, seeds.sampling and seeds.training"
                " set one of its uses each"
            )


def quoted(text: str) -> str:
    """Quote a text for Hydra's grammar; interpolations in it stay interpolations."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.single).with_quotes()
