"""Errors that can be found before any rank is started, in one line: settings, data, ports.

    python -m solutions.phase4_production.preflight --config FILE --field value …

Reads the environment of ``launch_training.sh``. Imports no torch: it takes a tenth of a second.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .config_sources import parse
from .exit_codes import CRASHED, REFUSED
from .trainer_config import TEXT_MODELS, Config, ConfigError

# settings that launch_training.sh reads: the least and the most
NUMBERS = {
    "NPROC_PER_NODE": (1, 1024),
    "NODE_RANK": (0, 65535),
    "MAX_RESTARTS": (0, 1_000_000),
    "MASTER_PORT": (1, 65535),
}
MAKERS = {".distlab/digits": "digits_folder", ".distlab/text": "text_folder"}


def check_environment(environ: Mapping[str, str]) -> None:
    """ConfigError if the launcher's own settings are no numbers, or impossible ones."""
    for name, (least, most) in NUMBERS.items():
        text = environ.get(name) or str(least)
        if not (text.isdecimal() and least <= int(text) <= most):
            raise ConfigError(f"{name} must be a number from {least} to {most}, not {text!r}")
    nodes = environ.get("NNODES") or "1"
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", nodes):
        raise ConfigError(f"NNODES must be a number of nodes, or LEAST:MOST, not {nodes!r}")
    fewest, _, many = nodes.partition(":")
    if int(many or fewest) < int(fewest):
        raise ConfigError(f"NNODES {nodes}: the least, {fewest}, is above the most, {many}")


def check_data(config: Config) -> None:
    """ConfigError if the folders of data are missing."""
    if config.data == "synthetic":
        return
    for split in ("train", "val"):
        folder = Path(config.data) / split
        if not folder.is_dir():
            hint = f"{'*.txt' if config.model in TEXT_MODELS else 'CLASS/IMAGE.png'} go in there"
            if config.data in MAKERS:
                hint = f"make it with: python -m solutions.phase4_production.{MAKERS[config.data]}"
            raise ConfigError(f"there is no data folder {folder}: {hint}")


def check_folders(config: Config) -> None:
    """ConfigError if checkpoints or logs could not be written: now, not after a thousand steps.

    Makes the folders.
    """
    for name in ("checkpoints", "logs"):
        folder = Path(getattr(config, name))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{name} {folder} can't be made: {error.strerror}") from None
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"{name} {folder} can't be read and written to")


class PortError(ConfigError):
    """A port is in use, perhaps by a process that is about to end."""


def check_port(port: int, host: str, what: str) -> None:
    """PortError if no program could listen on ``port`` here."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise PortError(f"{what} {port} can't be used: {error.strerror}") from None


def check(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """All checks; ConfigError names the first error."""
    check_environment(environ)
    config, dry_run = parse(arguments)
    check_data(config)
    if dry_run:
        return
    check_folders(config)
    first_node = environ.get("NODE_RANK", "0") == "0"
    if first_node and config.metrics_port:
        check_port(config.metrics_port, config.metrics_host, "metrics_port")
    if first_node and environ.get("MASTER_PORT"):
        check_port(int(environ["MASTER_PORT"]), "", "MASTER_PORT")


def main() -> None:
    """One line and exit status REFUSED (CRASHED: may be tried again) if a run would not begin."""
    try:
        check(sys.argv[1:], os.environ)
    except ValueError as error:
        print(f"launch_training: {error}", file=sys.stderr)
        sys.exit(CRASHED if isinstance(error, PortError) else REFUSED)


if __name__ == "__main__":
    main()
