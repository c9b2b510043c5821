"""Decodes prompts one way, as asked on standard input, in whatever environment it was started with.

    python -m benchmarks.decoder_process --way naive --target FOLDER --draft FOLDER --threads 1

One JSON object a line: ``{"prompt": [ids], "new_tokens": 48, "k": 4}`` in; tokens and times, or ``{"error": ...}``,
out. The first line out tells the versions. It waits between requests, so several workers can take turns.
"""

import argparse
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    # The one who asks decides what Ctrl-C means, and closes standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whatever a library prints must not come between the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(content: dict) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    try:
        import torch

        from benchmarks.decoders import decoder_class
        from benchmarks.machine import versions

        torch.set_num_threads(arguments.threads)
        way = decoder_class(arguments.way)(arguments.target, arguments.draft)
    except Exception as error:
        reply(failure(error))
        return
    reply({"versions": versions(("torch", "transformers", "hybridspec", "economize"))})
    for line in sys.stdin:
        try:
            reply(dataclasses.asdict(way.decode(**json.loads(line))))
        except Exception as error:
            reply(failure(error))


def failure(error: Exception) -> dict:
    text = " ".join(str(error).split())
    return {"error": f"{type(error).__name__}: {text[:300]}"}


if __name__ == "__main__":
    main()
