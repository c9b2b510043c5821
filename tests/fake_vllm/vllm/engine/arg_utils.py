class EngineArgs:
    def __init__(self, **options):
        self.options = options

    @staticmethod
    def add_cli_args(parser):
        return parser
