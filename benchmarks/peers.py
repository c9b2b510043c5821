"""Makes the environment of the peers, so that a measurement need not."""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import command, peer_environment


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.options("peers", __doc__, "--peers /tmp/peers")
    parser.add_argument("--peers", type=Path, default=peer_environment.default_folder(), help="folder (%(default)s)")
    chosen = parser.parse_args(arguments)
    try:
        print(peer_environment.make(chosen.peers))
    except peer_environment.EnvironmentNotMade as error:
        print(error, file=sys.stderr)
        return 1
    return 0
