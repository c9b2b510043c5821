"""How many examples Hypothesis tries: a short reproducible run by default, a long random search on request.

``pytest --hypothesis-profile=search`` looks for new counterexamples.
"""

from hypothesis import HealthCheck, settings

SEARCH_FACTOR = 20


def register() -> None:
    options = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("fixed", derandomize=True, **options)
    settings.register_profile("search", print_blob=True, **options)
    settings.load_profile("fixed")


def examples(count: int) -> settings:
    """Decorator for a test that tries ``count`` examples in the default run."""
    searching = settings.get_current_profile_name() == "search"
    return settings(max_examples=count * SEARCH_FACTOR if searching else count)
