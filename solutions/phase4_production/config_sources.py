"""Where a configuration comes from: a YAML file, and the command line on top of it."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .trainer_config import FIELDS, Config, ConfigError, nearest


def check_names(names: Sequence[str], where: str, others: Sequence[str] = ()) -> None:
    """ConfigError for the first name that is no field. The user could also have meant ``others``.
    """
    for name in names:
        if name not in FIELDS:
            hint = nearest(name, [*FIELDS, *others])
            raise ConfigError(f"{where}: there is no field {name!r}{hint}")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The fields that a YAML file sets."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration {path}") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must consist of lines `field: value`")
    check_names([*map(str, content)], str(path))
    return content


def read_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Fields from ``--field value`` or ``--field=value``; a field alone is ``true``."""
    import yaml

    found: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"expected --field value, got {word!r}")
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        check_names([name], "command line", ("config", "dry-run"))
        if not equals:
            text = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text  # the field's type is compared with it
        kind = typing.get_type_hints(Config)[name]
        found[name] = text if kind is str else value
    return found


def make_config(path: str | Path | None, arguments: Sequence[str] = ()) -> Config:
    """The defaults, changed by the file, and then by the command line."""
    fields: Mapping[str, Any] = {} if path is None else read_yaml(path)
    return Config(**{**fields, **read_arguments(arguments)})


def parse(arguments: Sequence[str]) -> tuple[Config, bool]:
    """The configuration, and whether the user wants only the plan."""
    rest = list(arguments)
    dry_run = "--dry-run" in rest
    if dry_run:
        rest.remove("--dry-run")
    path = None
    for word in [w for w in rest if w.partition("=")[0] == "--config"]:
        index = rest.index(word)
        _, equals, path = rest.pop(index).partition("=")
        if not equals:
            if index == len(rest):
                raise ConfigError("--config needs the name of a file")
            path = rest.pop(index)
    return make_config(path, rest), dry_run


def describe_fields() -> str:
    """All fields with their types and defaults, for ``--help``."""
    kinds = typing.get_type_hints(Config)
    lines = []
    for name, field in FIELDS.items():
        kind = str(kinds[name]).replace("typing.Literal", "")
        kind = kinds[name].__name__ if isinstance(kinds[name], type) else kind
        lines.append(f"  --{name.replace('_', '-'):26}{field.default!s:24}{kind}")
    return "\n".join(lines)
