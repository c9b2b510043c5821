"""One self-contained HTML page: nothing is fetched, nothing runs."""

import base64
import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from hybridspec.tuning.profile import Profile
from hybridspec.tuning.reporting import words
from hybridspec.tuning.reporting.acceptance import acceptance_figure
from hybridspec.tuning.reporting.against import compare_profiles, difference_text
from hybridspec.tuning.reporting.against_plot import against_figure
from hybridspec.tuning.reporting.against_table import COLUMNS, cells
from hybridspec.tuning.reporting.costs import cost_figure
from hybridspec.tuning.reporting.facts import facts
from hybridspec.tuning.reporting.figures import rendered
from hybridspec.tuning.reporting.speedup import speedup_figure

#: Alternative text of each plot, and what draws it.
PLOTS = {
    "Speed-up over draft length, predicted and measured": speedup_figure,
    "Acceptance by position of each draft": acceptance_figure,
    "Cost of a step by draft length": cost_figure,
}


def report_page(profile: Profile) -> str:
    """HTML of a profile: the answers, plots and trials of each workload, environment, models and settings."""
    pictures = {
        name: {
            text: data_uri(draw(profile, [name]))
            for text, draw in PLOTS.items()
            if draw is not cost_figure or row.costs
        }
        for name, row in profile.workloads.items()
    }
    return (
        environment()
        .get_template("report.html")
        .render(profile=profile, pictures=pictures, facts=facts(profile), drafts=profile.drafts)
    )


def against_page(first: dict, second: dict, names: tuple[str, str]) -> str:
    """HTML of two profiles side by side; ``names``: what to call them."""
    comparison = compare_profiles(first, second)
    return (
        environment()
        .get_template("against.html")
        .render(
            comparison=comparison,
            profiles=list(zip(names, (first, second), strict=True)),
            columns=COLUMNS,
            cells=cells,
            names=names,
            difference_text=difference_text,
            picture=data_uri(against_figure(comparison, names)),
        )
    )


def environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "number": words.number,
        "percent": words.percent,
        "rule": words.rule_text,
        "chosen": words.chosen_text,
        "indented": lambda record: json.dumps(record.to_dict(), indent=2, ensure_ascii=False),
    }
    found.globals |= {
        "account": words.account,
        "shares": words.shares,
        "speedup": words.speedup_text,
        "predicted_speedup": words.predicted_speedup,
        "concurrency_rows": words.concurrency_rows,
    }
    return found


def data_uri(figure: Figure) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(rendered(figure, "svg")).decode()
