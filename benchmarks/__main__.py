"""``python -m benchmarks``: one entry point to every measurement.

Each name is a module of this package with ``main(arguments)``; only the one that was asked for is imported.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence

from hybridspec.errors import HybridspecError

COMMANDS = {
    "plain": "plain decoding of the embedded target: ours, transformers' generate, static cache, compiled step",
    "speculative": "speculative decoding of the embedded pair: ours, the economize package, deep copy and re-forward",
    "rollback": "verify pass, commits and memory of every rollback mode, at real models' layer dimensions",
    "growth": "how step, verify pass and rollback grow with context, K, layers and hidden size",
    "embedded-pair": "a sweep of K over the embedded workloads, with the loop's efficiency",
    "draft-length": "draft-length rules against the best fixed K, on a stream that changes",
    "tuner-oracle": "the tuner's answers against an exhaustive grid",
    "gpu": "step, verify pass, rollback, loop and kernels on one GPU, random weights at real dimensions",
    "peers": "make the environment of the peers beforehand (plain and speculative make it when it is missing)",
    "table": "results/README.md from the JSON files beside it",
}
USAGE = "usage: python -m benchmarks NAME [options]    (python -m benchmarks NAME --help tells the options)"
EXAMPLE = "example: python -m benchmarks speculative --workload json --prompts 2 --k 4 --save"


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join([USAGE, "", *lines, "", EXAMPLE])


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] in (["-h"], ["--help"]):
        print(overview())
        return 0
    if not arguments or arguments[0] not in COMMANDS:
        wrong = f"no benchmark is called {arguments[0]!r}" if arguments else "which benchmark?"
        close = difflib.get_close_matches(arguments[0], COMMANDS, 1) if arguments else []
        print(f"{overview()}\n\n{wrong}{f'; did you mean {close[0]}?' if close else ''}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"benchmarks.{arguments[0].replace('-', '_')}")
    try:
        return module.main(arguments[1:]) or 0
    except HybridspecError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted before anything was measured", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
