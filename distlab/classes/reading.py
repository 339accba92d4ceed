"""Read TOML key by key: each mistake is one line with the file, the key and what is allowed."""

from __future__ import annotations

import datetime
import difflib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from ..host.toml import tomllib

LARGEST = 1 << 20  # bytes of a file of rules


class Table:
    """One table of a TOML file; ``name`` is how messages call it."""

    def __init__(self, path: Path, name: str, values: dict[str, Any]) -> None:
        self.path, self.name, self.values = path, name, values

    def known(self, *names: str, what: str = "key") -> None:
        """Raise ValueError for a key that is none of these."""
        for key in self.values:
            if key not in names:
                listed = f": there are {', '.join(names)}" if len(names) < 12 else ""
                self.wrong(key, f"there is no such {what}{listed}", names, key)

    def wrong(self, key: str, text: str, names: Iterable[str] = (), given: str = "") -> NoReturn:
        """Raise ValueError, which offers the name nearest to the one ``given``."""
        near = difflib.get_close_matches(given, sorted(names), n=1, cutoff=0.5) if given else []
        guess = f"; did you mean {near[0]!r}?" if near else ""
        where = f"[{self.name}] {key}" if self.name else key
        raise ValueError(f"{self.path.name}: {where}: {text}{guess}")

    def table(self, key: str) -> Table:
        """A table in this one; an empty one where the file has none."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            self.wrong(key, f"expected a table, got {value!r}")
        return Table(self.path, f"{self.name}.{key}" if self.name else key, value)

    def text(self, key: str, default: str) -> str:
        """A text in one line."""
        value = self.values.get(key, default)
        if not isinstance(value, str) or not (value.isprintable()):
            self.wrong(key, f"expected a text in quotes, got {value!r}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts, each of them once."""
        value = self.values.get(key, [])
        good = isinstance(value, list) and all(isinstance(v, str) and v.strip() for v in value)
        if not good:
            self.wrong(key, f'expected a list of texts such as ["a", "b"], got {value!r}')
        twice = [v for v in value if value.count(v) > 1]
        if twice:
            self.wrong(key, f"{twice[0]!r} stands there twice")
        return tuple(value)

    def numbers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers, sorted."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(type(v) is int for v in value):
            self.wrong(key, f"expected a list of whole numbers such as [1, 2], got {value!r}")
        return tuple(sorted(set(value)))

    def number(
        self,
        key: str,
        default: float,
        *,
        least: float = -math.inf,
        most: float = math.inf,
        whole: bool = False,
    ) -> float:
        """A number within the limits."""
        value = self.values.get(key, default)
        kinds = (int,) if whole else (int, float)
        if type(value) not in kinds or not least <= value <= most or math.isinf(value):
            kind = "a whole number" if whole else "a number"
            upto = f" and at most {most:g}" if most < math.inf else ""
            self.wrong(key, f"expected {kind} of at least {least:g}{upto}, got {value!r}")
        return value

    def flag(self, key: str) -> bool:
        """true or false; false where the file says nothing."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            self.wrong(key, f"expected true or false, got {value!r}")
        return value

    def choice(self, key: str, words: tuple[str, ...]) -> str:
        """One of the words; the first word where the file says nothing."""
        value = self.values.get(key, words[0])
        if value not in words:
            self.wrong(key, f"expected one of {', '.join(words)}, got {value!r}", words, str(value))
        return value

    def date(self, key: str, zone: datetime.tzinfo) -> datetime.datetime | None:
        """A date and time. Without an offset it is in ``zone``; without a time it
        is the end of the day."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, str):
            self.wrong(key, f"a date stands without quotes: {key} = {value}")
        if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
            value = datetime.datetime.combine(value, datetime.time(23, 59, 59))
        if not isinstance(value, datetime.datetime):
            self.wrong(key, f"expected a date such as 2026-03-16 20:00:00, got {value!r}")
        return value if value.tzinfo else value.replace(tzinfo=zone)


def read_toml(path: Path) -> Table:
    """The file's outermost table; ValueError if it can't be read."""
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"{path}: more than {LARGEST >> 20} MB, this is no file of rules")
        return Table(path, "", tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8: save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no TOML: {error}") from None
