"""``python -m hybridspec`` is the ``hybridspec`` command."""

from hybridspec.cli.app import main

if __name__ == "__main__":
    main()
