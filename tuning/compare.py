"""Side by side: draft strategies and draft-length rules on the same prompts, in interleaved rounds."""

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hybridspec.decoding.sampling import Sampling
from hybridspec.tuning.backends.base import Sample
from hybridspec.tuning.configuration import Bench, Configuration
from hybridspec.tuning.measurement import Measurement, measurement_of
from hybridspec.tuning.timed_decoding import PreparedDecoding, PreparedPrompt, measure_round
from hybridspec.tuning.workloads.encoding import encode_prompt
from hybridspec.tuning.workloads.sources import Prompt

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ComparedConfiguration:
    """One configuration on one workload; ``samples``: run by run, for comparisons by prompt."""

    workload: str
    configuration: Configuration
    measurement: Measurement
    samples: tuple[Sample, ...] = ()


def compare_workload(
    bench: Bench,
    name: str,
    prompts: Sequence[Prompt],
    configurations: Sequence[Configuration],
    *,
    max_new_tokens: int,
    repeats: int = 1,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda *_: None,
) -> list[ComparedConfiguration]:
    """Every configuration on every prompt, ``repeats`` times, each round with a plain run to compare with.

    A rule is made once for each configuration and keeps what it learns from prompt to prompt, as in a server. An
    interrupt ends the measurement; what whole rounds have shown until then is returned if there is any.
    """
    options = [bench.options(configuration, max_new_tokens) for configuration in configurations]
    samples: list[list[Sample]] = [[] for _ in configurations]
    order = random.Random(seed)
    rounds = len(prompts) * repeats
    try:
        for number, prompt in enumerate(prompts):
            tokens = encode_prompt(bench.target, prompt)
            with ExitStack() as stack:
                drafts = {c.draft: bench.draft(c.draft) for c in configurations}
                opened = {
                    spec: stack.enter_context(
                        PreparedPrompt(bench.target, draft, prompt.id, tokens, sampling, seed + number)
                    )
                    for spec, draft in [(None, None), *drafts.items()]
                }
                decodings = [
                    PreparedDecoding(opened[c.draft], own) for c, own in zip(configurations, options, strict=True)
                ]
                for repeat in range(repeats):
                    done = number * repeats + repeat
                    progress(f"prompt {number + 1} of {len(prompts)}, round {repeat + 1}", done / rounds)
                    for kept, pair in zip(samples, measure_round(opened[None], decodings, order), strict=True):
                        kept.append(pair.sample)
    except KeyboardInterrupt:
        if not samples[0]:
            raise
        progress("interrupted", 1.0)
        raise ComparisonInterrupted(_summaries(name, configurations, samples)) from None
    return _summaries(name, configurations, samples)


class ComparisonInterrupted(KeyboardInterrupt):
    """Ctrl-C during a comparison, with what was measured until then."""

    def __init__(self, results: list[ComparedConfiguration]) -> None:
        super().__init__()
        self.results = results


def _summaries(
    name: str, configurations: Sequence[Configuration], samples: Sequence[Sequence[Sample]]
) -> list[ComparedConfiguration]:
    return [
        ComparedConfiguration(name, c, measurement_of(kept), tuple(kept))
        for c, kept in zip(configurations, samples, strict=True)
    ]


def comparison_rows(results: Sequence[ComparedConfiguration]) -> list[dict]:
    """One flat dictionary for each result, for JSON and pandas."""
    return [
        {"workload": r.workload, **asdict(r.configuration), "label": r.configuration.label, **asdict(r.measurement)}
        for r in results
    ]


def comparison_frame(results: Sequence[ComparedConfiguration]) -> "pandas.DataFrame":
    """The rows as a frame; acceptance by position and the interval become columns of their own."""
    import pandas

    rows = []
    for row in comparison_rows(results):
        low, high = row.pop("interval")
        positions = {f"acceptance_{i}": a for i, a in enumerate(row.pop("acceptance_by_position"), 1)}
        rows.append({**row, "speedup_low": low, "speedup_high": high, **positions})
    return pandas.DataFrame(rows)


def comparison_plot(results: Sequence[ComparedConfiguration]) -> "Figure":
    """Speed-up of every configuration with its interval, one panel for each workload; the line at 1 is plain
    decoding.
    """
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(r.workload for r in results))
    labels = list(dict.fromkeys(r.configuration.label for r in results))
    columns = min(2, len(workloads))
    lines = -(-len(workloads) // columns)
    figure = Figure(figsize=(7.5 * columns, lines * (1.2 + 0.32 * len(labels))), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for axis, workload in zip(axes.flat, workloads, strict=False):
        for result in (r for r in results if r.workload == workload):
            m, place = result.measurement, labels.index(result.configuration.label)
            axis.barh(place, m.speedup, color="tab:green" if m.interval[0] > 1 else "lightgrey")
            axis.plot(m.interval, [place, place], color="black", linewidth=1.2)
        axis.axvline(1.0, color="tab:red", linewidth=1)
        axis.set_title(workload, loc="left", fontsize=10)
        axis.set_yticks(range(len(labels)), labels, fontsize=8)
        axis.invert_yaxis() if axis is axes.flat[0] else None
    for axis in axes.flat[len(workloads) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("speed-up over plain decoding (black: 90 % interval; green: above 1)")
    return figure
