"""What can be found wrong before any rank is started, in one line: configuration, data, ports.

    python -m solutions.phase4_production.preflight --config FILE --field value …

Reads the environment of ``launch_training.sh``. Imports no torch: it takes a tenth of a second.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .trainer_config import Config, ConfigError, parse


def check_data(config: Config) -> None:
    """ConfigError if the folders of images are missing."""
    if config.data == "synthetic":
        return
    for split in ("train", "val"):
        folder = Path(config.data) / split
        if not folder.is_dir():
            raise ConfigError(f"there is no data folder {folder}: CLASS/IMAGE.png go in there")


def check_port(port: int, host: str, what: str) -> None:
    """ConfigError if nobody could listen on ``port`` here."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{what} {port} can't be used: {error.strerror}") from None


def check(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """All of it; ConfigError says what is wrong."""
    config, _ = parse(arguments)
    check_data(config)
    first_node = environ.get("NODE_RANK", "0") == "0"
    if first_node and config.metrics_port:
        check_port(config.metrics_port, config.metrics_host, "metrics_port")
    if first_node and environ.get("MASTER_PORT"):
        check_port(int(environ["MASTER_PORT"]), "", "MASTER_PORT")


def main() -> None:
    """Exit status 2 and one line if a run would not begin."""
    try:
        check(sys.argv[1:], os.environ)
    except ValueError as error:
        print(f"launch_training: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
