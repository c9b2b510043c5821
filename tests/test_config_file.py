"""Configuration files: every one that ships, what a file may say, and what a wrong one is told."""

from pathlib import Path

import pytest

from hybridspec.errors import InputError
from hybridspec.specs import LENGTHS, STRATEGIES
from hybridspec.tuning.config_file import ServingOptions, TuneConfig, load_config, tomllib
from hybridspec.tuning.workloads.sources import WorkloadSource, find_workload

FOLDER = Path(__file__).parents[1] / "configs"
SHIPPED = sorted(FOLDER.glob("*.toml"))
FAMILIES = {"embedded", "falcon-h1", "granite-4-h", "jamba", "kimi-linear", "nemotron-h", "qwen3-next", "qwen3.5"}
FAMILIES |= {"qwen3.6", "qwen3.8"}


def load(folder: Path, text: str) -> TuneConfig:
    path = folder / "tune.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def test_every_family_has_a_file() -> None:
    assert all(any(path.name.startswith(family) for path in SHIPPED) for family in FAMILIES)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_files_are_whole(path: Path) -> None:
    config = load_config(path)
    assert config.path == path and config.drafts and config.lengths and config.max_k and config.out
    assert path.read_text(encoding="utf-8").startswith("# ")
    for source in config.workloads:
        workload = find_workload(source)
        assert len(workload.prompts) >= 8
        # The embedded target's markers mean nothing to other tokenizers.
        if config.target is not None:
            assert not any("<|" in p.text for p in workload.prompts), f"{source.source} needs chat = true"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_files_keep_to_what_is_known_to_work(path: Path) -> None:
    config = load_config(path)
    strategies = {draft.partition(":")[0] for draft in config.drafts}
    if config.target is not None:
        # With speculation it corrupts hybrids, and vLLM turns it on by itself.
        assert config.serving.engine_arguments()["enable_prefix_caching"] is False
        assert config.serving.max_num_seqs
    if config.backend == "vllm":
        # It refuses drafts with recurrent layers, and knows no rule but a K for each batch size.
        assert strategies <= {"mtp", "prompt-lookup"} and config.lengths == ("fixed",) and config.serving.concurrency
    if "jamba" in path.name:
        assert config.backend == "torch"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_options_of_drafts_and_rules_in_shipped_files_exist(path: Path) -> None:
    config = load_config(path)
    for registry, specs in ((STRATEGIES, config.drafts), (LENGTHS, config.lengths)):
        for spec in specs:
            name, _, text = spec.partition(":")
            if spec == "fixed":
                continue
            pytest.importorskip(registry.known[name].partition(":")[0])
            found = registry.find(name)
            registry.options(name, text, getattr(found, "create", found))


def test_what_a_file_says_arrives_with_paths_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    config = load(
        tmp_path,
        """
        target = "models/big"
        drafts = ["same-architecture:small", "same-architecture:path=../a", "mtp", "prompt-lookup:longest=3"]
        lengths = ["fixed", 3, "svip:threshold=0.3"]
        max-k = 6
        temperature = 1
        backend = "server"
        dtype = "bfloat16"
        rollback = "slots"
        out = "here/out"
        storage = "study.journal"
        workloads = ["json", "faq.csv:column=q", {source = "here", chat = true}, {source = "owner/name", seed = 1}]
        [serving]
        url = "http://localhost:8000"
        concurrency = [1, 8]
        max_num_seqs = 16
        engine = {block_size = 32}
        """,
    )
    assert config.target == tmp_path / "models/big" and config.out == tmp_path / "here/out"
    parent = tmp_path.parent
    assert config.drafts == (
        f"same-architecture:{tmp_path}/small",
        f"same-architecture:path={parent}/a",
        "mtp",
        "prompt-lookup:longest=3",
    )
    assert config.lengths == ("fixed", "3", "svip:threshold=0.3")
    assert (config.max_k, config.temperature, config.storage) == (6, 1.0, f"{tmp_path}/study.journal")
    assert config.workloads == (
        WorkloadSource("json"),
        WorkloadSource(f"{tmp_path}/faq.csv", column="q"),
        WorkloadSource(f"{tmp_path}/here", chat=True),
        WorkloadSource("owner/name", seed=1),
    )
    assert config.serving.engine_arguments() == {"max_num_seqs": 16, "block_size": 32}
    assert config.serving.url == ("http://localhost:8000",)


def test_an_empty_file_leaves_everything_to_the_command(tmp_path: Path) -> None:
    config = load(tmp_path, "")
    assert config == TuneConfig() and config.serving == ServingOptions() and not config.serving.engine_arguments()


def test_flags_override_the_file(tmp_path: Path) -> None:
    config = load(tmp_path, 'max_k = 4\nprompts = 3\nworkloads = ["json"]\ndrafts = ["prompt-lookup"]')
    changed = config.override(max_k=2, prompts=None, workloads=["code:prompts=1"], drafts=[], target=Path("big"))
    assert (changed.max_k, changed.prompts, changed.drafts) == (2, 3, ("prompt-lookup",))
    assert changed.workloads == (WorkloadSource("code", prompts=1),)
    assert changed.target == Path("big") and changed.path == config.path
    with pytest.raises(InputError, match="max_k must be at least 1"):
        config.override(max_k=0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("targt = 'a'", "unknown key 'targt'. Did you mean 'target'?"),
        ("path = 'a'", "unknown key 'path'"),
        ("max_k = '3'", "max_k must be a whole number, not '3'"),
        ("max_k = true", "max_k must be a whole number, not True"),
        ("max_k = 0", "max_k must be at least 1, not 0"),
        ("temperature = inf", "temperature must be a finite number"),
        ("top_p = 2.0", "top_p must lie above 0"),
        ("target = ''", "target is empty"),
        ("target = 3", "target must be a path, not 3"),
        ("target = 'big'", "drafts is missing"),
        ("drafts = 'mtp'", "drafts must be a list, not 'mtp'"),
        ("drafts = ['mtp', 3]", "drafts[1] must be text, not 3"),
        ("drafts = ['same-arch:a']", "unknown draft strategy 'same-arch'. Did you mean 'same-architecture'?"),
        ("lengths = ['svpi']", "Did you mean 'svip'?"),
        ("lengths = [true]", "lengths[0] must be text, not True"),
        ("backend = 'vlm'", "backend is 'vlm': did you mean 'vllm'?"),
        ("backend = 'server'", "serving.url is missing"),
        ("compile = 1", "compile must be true or false"),
        ("compile = true\nbackend = 'vllm'", "compile is for backend torch"),
        ("packed = true\nbackend = 'server'", "packed is for backend torch"),
        ("rollback = 'none'", "choose one of auto, tape, slots, recompute"),
        ("workloads = [3]", "workloads[0] must be a table or text, not 3"),
        ("workloads = ['json:colum=a']", "workloads[0]: workload 'json:colum=a': unknown key 'colum'"),
        ("[[workloads]]\nsource = 'a'\nprompts = 'all'", "workloads[0]: prompts must be a whole number, not 'all'"),
        ("[[workloads]]\nname = 'a'", "workloads[0]: source is missing"),
        ("workloads = ['json', 'json']", "two workloads are called 'json'"),
        ("[serving]\nmax_num_seq = 3", "serving: unknown key 'max_num_seq'. Did you mean 'max_num_seqs'?"),
        ("[serving]\nmax_num_seqs = 0", "serving: max_num_seqs must be at least 1"),
        ("[serving]\nconcurrency = [1, 0]", "concurrency must be at least 1, not 0"),
        ("[serving]\nengine = {max_num_seqs = 3}", "write max_num_seqs in [serving] itself"),
        ("[serving]\nengine = {speculative_config = {}}", "what is to be found"),
        ("serving = 3", "serving must be a table, not 3"),
        ("max_k = ", "not valid TOML"),
    ],
)
def test_wrong_files_name_the_file_and_the_key(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(InputError) as error:
        load(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path / 'tune.toml'}: ")
    assert expected in str(error.value)


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.toml: cannot be read"):
        load_config(tmp_path / "nowhere.toml")
    (tmp_path / "latin.toml").write_bytes(b"out = 'caf\xe9'")
    with pytest.raises(InputError, match=r"latin\.toml: not UTF-8"):
        load_config(tmp_path / "latin.toml")


def test_every_key_that_a_shipped_file_sets_is_read() -> None:
    for path in SHIPPED:
        written = tomllib.loads(path.read_text(encoding="utf-8"))
        config = load_config(path)
        for key in written:
            assert getattr(config, key) or written[key] == "embedded", f"{path.name}: {key}"
