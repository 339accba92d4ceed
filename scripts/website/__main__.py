"""Build the site: ``python -m scripts.website [--serve]``; what comes out is in build/site."""

from __future__ import annotations

import argparse
import functools
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from distlab.course.catalogue import root

try:
    from .build import build
except ModuleNotFoundError as missing:
    sys.exit(f"site: {missing.name} is not installed: call make site, which installs it")

OUT = root() / "build" / "site"
PORT = 8000


def serve(folder: Path, port: int) -> None:
    """Show the built site on this machine until Ctrl-C."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=folder)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        raise ValueError(f"port {port} can't be used ({error}): choose one with --port") from None
    with server:
        print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def main(arguments: list[str] | None = None) -> int:
    """0: built without a warning."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.website", description="Build the site."
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--serve", action="store_true", help="and show it on this machine")
    parser.add_argument("--port", type=int, default=PORT)
    options = parser.parse_args(arguments)
    try:
        status = build(options.out)
        if status == 0:
            print(f"The site is built: open {options.out / 'index.html'}", flush=True)
            if options.serve:
                serve(options.out, options.port)
    except ValueError as error:  # a link to nothing, a port that is taken
        print(f"site: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
