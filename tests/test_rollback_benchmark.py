"""``python -m benchmarks rollback --smoke`` runs families in every mode; its bytes can be counted by hand."""

import json
from pathlib import Path

import pytest
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks import rollback
from hybridspec.runtime import families

K = 6
#: One whose past transformers can copy, and one whose it cannot; the others are slow tests.
FAMILIES = ("SSD", "RG-LRU")


def run(path: Path, *names: str) -> dict:
    families = [word for name in names for word in ("--family", name)]
    rollback.main(["--smoke", "--repeats", "2", "--k", str(K), "--json", str(path), *families])
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return run(tmp_path_factory.mktemp("rollback") / "rollback.json", *FAMILIES)


def test_every_mode_is_measured(result: dict) -> None:
    assert set(result["families"]) == set(FAMILIES)
    assert {rollback.LAYERS[name].copied for name in FAMILIES} == {True, False}
    assert_measured(result)


@pytest.mark.slow
def test_every_family_is_measured(tmp_path: Path) -> None:
    result = run(tmp_path / "rollback.json")
    known = {name for name, layer in rollback.LAYERS.items() if layer.model_type in CONFIG_MAPPING}
    assert set(result["families"]) == known
    assert_measured(result)


def assert_measured(result: dict) -> None:
    for name, family in result["families"].items():
        assert family["mixer"].endswith(rollback.LAYERS[name].mixer)
        modes = rollback.MODES if rollback.LAYERS[name].copied else rollback.MODES[:-1]
        assert tuple(family["modes"]) == modes
        for row in family["modes"].values():
            times = [row[part] for part in ("verify", "full_commit", "partial_commit")]
            assert all(0 < x["quartile_1"] <= x["median_milliseconds"] <= x["quartile_3"] for x in times)
            low, high = row["partial_share"]["interval_90"]
            assert 0 < low <= row["partial_share"]["wall"] <= high
    assert result["machine"]["threads"] == 1
    assert {key: result["settings"][key] for key in ("k", "repeats", "smoke")} == {"k": K, "repeats": 2, "smoke": True}


def test_every_mixer_with_a_tape_is_measured() -> None:
    files = families.modeling_files()
    types = {layer.model_type for layer in rollback.LAYERS.values()}
    if types - set(files):
        pytest.skip(f"this version of transformers has no {', '.join(types - set(files))}")
    measured = {name for key in types for name in files[key].recurrences}
    assert measured == {name for file in files.values() for name in file.recurrences}


def test_bytes_are_one_state_and_the_tape_or_a_state_for_each_token(result: dict) -> None:
    family = result["families"]["SSD"]
    heads, width, state, groups = (
        family["dimensions"][key] for key in ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups")
    )
    plane = 4 * heads * width * state
    channels = heads * width + 2 * groups * state
    assert family["state_bytes"] == plane
    assert family["window_bytes"] == 4 * channels * 4
    assert family["tape_bytes"] == 4 * (K + 1) * heads * (width + state + 1)
    # The committed window keeps the storage of the block that it was cut from.
    windows = 2 * 4 * channels * (4 + K + 1)
    held = {mode: row["bytes"] for mode, row in family["modes"].items()}
    assert held["tape"] == plane + family["tape_bytes"] + windows
    assert held["slots"] == held["tape"] + (K + 1) * plane
    assert held["recompute"] == 2 * (plane + family["window_bytes"])
    assert held["replay"] is None
    assert held["naive"] == held["recompute"]


def test_time_around_the_mixer_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks once at each look: of the five ticks of a pass, three are the model's."""
    model = nn.Sequential(nn.Identity(), nn.Identity())
    around = rollback.Around(model, model[1])
    ticks = iter(range(100))

    def tick() -> tuple[float, float]:
        moment = float(next(ticks))
        return moment, 10 * moment

    monkeypatch.setattr(rollback, "now", tick)
    samples = rollback.Samples()
    with samples.timed(around):
        model(1)
    # Looks: begin 0, model 1, mixer 2, mixer's end 3, model's end 4, end 5.
    assert samples.wall == [5 - (2 - 1) - (4 - 3)]
    assert samples.cpu == [30]


@pytest.mark.parametrize("arguments", [["--k", "0"], ["--repeats", "0"], ["--family", "nothing"]])
def test_bad_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        rollback.main(arguments)
    assert stop.value.code == 2


def test_the_table_names_what_is_above_the_limit(result: dict) -> None:
    result = json.loads(json.dumps(result))
    for family in result["families"].values():
        family["modes"]["tape"]["partial_share"]["wall"] = 0.019
    assert rollback.verdict(result).endswith(": none.")
    result["families"]["SSD"]["modes"]["tape"]["partial_share"]["wall"] = 0.034
    assert rollback.verdict(result).endswith(": SSD 3.4%.")
    assert "SSD 3.4%" in rollback.tables(result)[-1].markdown()
