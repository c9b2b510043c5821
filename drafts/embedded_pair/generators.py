"""Seeded generators of two corpus domains: log files in five common formats, and word problems with worked answers.

The order of the draws is part of the corpus: another order gives other documents under the same keys, and then the
workloads that were cut from the held-out part are no longer held out.
"""

import datetime
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass


def _words(text: str) -> list[str]:
    return text.split()


NOUNS = _words(
    "alpha beta gamma delta api auth billing cache cart catalog checkout config data email events export feed files "
    "gateway graph image index invoice jobs ledger mail media metrics notify order payment photo pricing profile proxy "
    "queue report search session shipping sync tasks token user video web worker"
)
USERS = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi")
SECONDS_BETWEEN_LINES = (0, 1, 1, 2, 3, 5, 8)
MILLISECONDS = (1, 2, 3, 4, 7, 12, 18, 25, 40, 120)
STATUS_CODES = (200, 200, 200, 200, 201, 204, 304, 404, 500)

PEOPLE = _words(
    "Anna Ben Carla David Emma Felix Grace Henry Iris Jack Kate Leo Maria Noah Olga Paul Rosa Sam Tina Victor"
)
THINGS = _words("apples books coins marbles pencils stickers cookies cards shells stamps eggs oranges bottles tickets")


@dataclass
class System:
    """What stays the same within one log file; only ``process`` moves on."""

    services: list[str]
    hosts: list[str]
    addresses: list[str]
    users: list[str]
    process: int


@dataclass(frozen=True)
class Event:
    moment: datetime.datetime
    service: str
    milliseconds: int
    status: int


def _access_line(rng: random.Random, system: System, event: Event) -> str:
    address, user = rng.choice(system.addresses), rng.choice(["-", *system.users])
    request = f"{rng.choice(('GET', 'GET', 'GET', 'POST', 'PUT'))} /api/v1/{event.service}/{rng.randrange(1, 500)}"
    return (
        f'{address} - {user} [{event.moment:%d/%b/%Y:%H:%M:%S} +0000] "{request} HTTP/1.1" {event.status} '
        f'{rng.randrange(100, 5000)} "-" "Mozilla/5.0 (X11; Linux x86_64)"'
    )


def _json_line(rng: random.Random, system: System, event: Event) -> str:
    messages = ("request completed", "request completed", "cache miss", "retrying request", "connection closed")
    return json.dumps(
        {
            "timestamp": f"{event.moment:%Y-%m-%dT%H:%M:%SZ}",
            "level": rng.choice(("INFO", "INFO", "INFO", "WARN", "ERROR")),
            "service": event.service,
            "host": rng.choice(system.hosts),
            "message": rng.choice(messages),
            "status": event.status,
            "duration_ms": event.milliseconds,
        }
    )


def _system_line(rng: random.Random, system: System, event: Event) -> str:
    user, service, process = system.users[0], event.service, system.process
    source, destination = system.addresses[1], system.addresses[2]
    messages = (
        f"sshd[{process}]: Accepted publickey for {user} from {system.addresses[0]} port "
        f"{rng.randrange(30000, 60000)} ssh2",
        f"systemd[1]: Started {service}.service - {service.title()} Service.",
        f"systemd[1]: Stopping {service}.service - {service.title()} Service...",
        f"CRON[{process}]: pam_unix(cron:session): session opened for user root(uid=0) by (uid=0)",
        f"kernel: [UFW BLOCK] IN=eth0 OUT= SRC={source} DST={destination} LEN=60 TTL=52 PROTO=TCP "
        f"SPT={rng.randrange(1024, 60000)} DPT=22",
    )
    line = f"{event.moment:%b %d %H:%M:%S} {system.hosts[0]} {rng.choice(messages)}"
    system.process += rng.randrange(3)
    return line


def _application_line(rng: random.Random, system: System, event: Event) -> str:
    service, milliseconds = event.service, event.milliseconds
    head = f"{event.moment:%Y-%m-%d %H:%M:%S},{rng.randrange(1000):03d}"
    messages = (
        f"INFO  [{service}.worker] Processed job {rng.randrange(10000)} in {milliseconds} ms",
        f"INFO  [{service}.http] {rng.choice(('GET', 'POST'))} /v1/{service} -> {event.status} ({milliseconds} ms)",
        f"WARN  [{service}.pool] Connection pool exhausted, waiting ({milliseconds} ms)",
        f"ERROR [{service}.worker] Job {rng.randrange(10000)} failed: TimeoutError: timed out after {milliseconds} s",
        f"DEBUG [{service}.cache] hit ratio 0.{rng.randrange(50, 99)} size={rng.randrange(100, 900)}",
    )
    return f"{head} {rng.choice(messages)}"


def _cluster_line(rng: random.Random, system: System, event: Event) -> str:
    head = f"{event.moment:%Y-%m-%dT%H:%M:%S}Z {rng.choice(('I', 'I', 'W'))} pod/{event.service}-{system.hosts[0]}"
    messages = (
        "Pulled container image successfully",
        f"Created container {event.service}",
        f"Started container {event.service}",
        "Readiness probe succeeded",
        f"Liveness probe failed: HTTP probe failed with statuscode: {event.status}",
        f"Scaled up replica set to {rng.randrange(1, 9)}",
    )
    return f"{head} {rng.choice(messages)}"


LOG_FORMATS: tuple[Callable[[random.Random, System, Event], str], ...] = (
    _access_line,
    _json_line,
    _system_line,
    _application_line,
    _cluster_line,
)


def _system(rng: random.Random) -> System:
    return System(
        services=rng.sample(NOUNS, 4),
        hosts=[f"{rng.choice(NOUNS)}-{rng.randrange(1, 9)}" for _ in range(3)],
        addresses=[f"10.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(1, 255)}" for _ in range(4)],
        users=[rng.choice(USERS) for _ in range(3)],
        process=rng.randrange(300, 30000),
    )


def log_file(rng: random.Random) -> str:
    """18 to 39 lines of one format, from one system, with rising times."""
    make_line = rng.choice(LOG_FORMATS)
    seconds = rng.randrange(1_700_000_000, 1_790_000_000)
    system = _system(rng)
    lines = []
    for _ in range(rng.randrange(18, 40)):
        seconds += rng.choice(SECONDS_BETWEEN_LINES)
        event = Event(
            moment=datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc),
            service=rng.choice(system.services),
            milliseconds=rng.choice(MILLISECONDS),
            status=rng.choice(STATUS_CODES),
        )
        lines.append(make_line(rng, system, event))
    return "\n".join(lines)


def log_files(count: int = 900, seed: int = 7) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(count):
        yield log_file(rng)


@dataclass(frozen=True)
class WordProblem:
    """A question and its answer in the style of GSM8K: steps with ``<<calculations>>``, then ``#### result``."""

    question: str
    steps: tuple[str, ...]
    result: int

    @property
    def answer(self) -> str:
        return "\n".join([*self.steps, f"#### {self.result}"])


@dataclass(frozen=True)
class Numbers:
    """The people, things and three numbers that a problem is made of."""

    first: str
    second: str
    things: str
    x: int
    y: int
    z: int


def _calculation(left: int, operator: str, right: int, unit: str = "") -> str:
    """``3 * 4 = <<3*4=12>>12``; ``unit`` stands in front of the result."""
    result = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[operator]
    return f"{left} {operator} {right} = {unit}<<{left}{operator}{right}={result}>>{result}"


def _boxes(n: Numbers) -> WordProblem:
    return WordProblem(
        f"{n.first} has {n.x} {n.things} and buys {n.y} boxes with {n.z} {n.things} each. "
        f"How many {n.things} does {n.first} have now?",
        (
            f"The boxes hold {_calculation(n.y, '*', n.z)} {n.things}.",
            f"{n.first} has {_calculation(n.x, '+', n.y * n.z)} {n.things} now.",
        ),
        n.x + n.y * n.z,
    )


def _wages(n: Numbers) -> WordProblem:
    return WordProblem(
        f"{n.first} earns ${n.x} a day for {n.y} days and spends ${n.z}. How much money is left?",
        (
            f"{n.first} earns {_calculation(n.x, '*', n.y, '$')}.",
            f"There is {_calculation(n.x * n.y, '-', n.z, '$')} left.",
        ),
        n.x * n.y - n.z,
    )


def _half(n: Numbers) -> WordProblem:
    return WordProblem(
        f"{n.first} has {n.x * 2} {n.things}. {n.second} has half as many. "
        f"How many {n.things} do they have altogether?",
        (
            f"{n.second} has {_calculation(n.x * 2, '/', 2)} {n.things}.",
            f"Together they have {_calculation(n.x * 2, '+', n.x)} {n.things}.",
        ),
        n.x * 3,
    )


def _shop(n: Numbers) -> WordProblem:
    return WordProblem(
        f"A shop sells {n.things} at ${n.y} each. {n.first} buys {n.x} and {n.second} buys {n.z}. "
        "How much do they pay in total?",
        (
            f"They buy {_calculation(n.x, '+', n.z)} {n.things}.",
            f"They pay {_calculation(n.x + n.z, '*', n.y, '$')}.",
        ),
        (n.x + n.z) * n.y,
    )


def _pages(n: Numbers) -> WordProblem:
    tuesday = n.x * n.y
    return WordProblem(
        f"{n.first} reads {n.x} pages on Monday and {n.y} times as many on Tuesday. {n.second} reads {n.z} pages more "
        f"than {n.first} in both days. How many pages does {n.second} read?",
        (
            f"On Tuesday {n.first} reads {_calculation(n.x, '*', n.y)} pages.",
            f"In both days {n.first} reads {_calculation(n.x, '+', tuesday)} pages.",
            f"{n.second} reads {_calculation(n.x + tuesday, '+', n.z)} pages.",
        ),
        n.x + tuesday + n.z,
    )


PROBLEM_KINDS: tuple[Callable[[Numbers], WordProblem], ...] = (_boxes, _wages, _half, _shop, _pages)


def word_problems(count: int = 9000, seed: int = 3) -> Iterator[WordProblem]:
    rng = random.Random(seed)
    for index in range(count):
        first, second = rng.sample(PEOPLE, 2)
        things = rng.choice(THINGS)
        numbers = Numbers(first, second, things, rng.randrange(3, 60), rng.randrange(2, 12), rng.randrange(2, 40))
        yield PROBLEM_KINDS[index % len(PROBLEM_KINDS)](numbers)
