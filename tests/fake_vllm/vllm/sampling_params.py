class RequestOutputKind:
    CUMULATIVE = 0


class SamplingParams:
    def __init__(self, **options):
        self.max_tokens = options["max_tokens"]
