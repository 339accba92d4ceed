"""Install what only some commands need: ``python3 scripts/extras.py site browser``.

The names are those of the optional dependencies in pyproject.toml. The environment is made first
if it is missing; like scripts/environment.py this runs on any Python, and keeps a torch.
"""

import sys

import environment


def main(groups):
    """Install what the ``groups`` lack."""
    environment.main([])
    found = environment.Environment()
    wanted = [name for group in groups for name in environment.dependencies(group)]
    missing = found.missing(wanted)
    if missing:
        print(environment.download(missing), flush=True)
        found.pip(*wanted, "--constraint", str(found.constraints))


if __name__ == "__main__":
    main(sys.argv[1:])
