"""The ``hybridspec`` command: one module per subcommand; heavy imports wait until a command runs."""
