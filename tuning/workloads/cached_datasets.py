"""Rows of data sets that the ``datasets`` library holds on this machine. Nothing is downloaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridspec.errors import InputError
from hybridspec.tuning.workloads.rows import Row


def dataset_rows(source: str, split: str | None = None, subset: str | None = None) -> Iterator[Row]:
    """Rows of a data set in the local cache (``owner/name``), or of a folder, which ``save_to_disk`` wrote or which
    holds data files.

    Args:
        split: ``train``, ``test[:100]`` and so on; needed only if there are several.
        subset: what the library calls the configuration, or name, of a data set.

    Raises:
        InputError: the library is not installed, or there is no such data set, subset or split here.
    """
    try:
        import datasets
    except ImportError as error:
        what = (
            "reading this folder"
            if Path(source).exists()
            else "there is no such file or folder; a data set of that name"
        )
        raise InputError(f"{source}: {what} needs the datasets library: pip install 'hybridspec[datasets]'") from error
    with _offline(datasets):
        loaded = _load(datasets, source, split, subset)
    if isinstance(loaded, dict):
        if len(loaded) > 1:
            first = next(iter(loaded))
            raise InputError(f"{source}: has the splits {', '.join(loaded)}. Choose one: {source}:split={first}")
        loaded = next(iter(loaded.values()))
    for number, fields in enumerate(loaded, 1):
        yield Row(number, f"row {number}", fields)


def _load(datasets: object, source: str, split: str | None, subset: str | None) -> object:
    folder = Path(source)
    saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
    try:
        if not saved:
            return datasets.load_dataset(str(source), subset, split=split)
        loaded = datasets.load_from_disk(str(source))
    except ConnectionError as error:
        raise InputError(
            f"{source}: no such data set in the local cache ({datasets.config.HF_DATASETS_CACHE}), and nothing is "
            "downloaded. Load it once with the datasets library where there is a network, or give a file or folder."
        ) from error
    except Exception as error:
        # The library raises many kinds, some of them bare ValueErrors with the answer in their text.
        raise InputError(f"{source}: the datasets library cannot load this: {error}") from error
    if split is None:
        return loaded
    if not isinstance(loaded, dict) or split not in loaded:
        there = ", ".join(loaded) if isinstance(loaded, dict) else "only one, without a name"
        raise InputError(f"{source}: no split {split!r}; it has {there}")
    return loaded[split]


@contextmanager
def _offline(datasets: object) -> Iterator[None]:
    """Both libraries read their environment variables at import, which may be long past."""
    import huggingface_hub.constants as hub

    places = [(hub, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE")]
    before = [getattr(module, name) for module, name in places]
    verbosity, bars = datasets.logging.get_verbosity(), datasets.is_progress_bar_enabled()
    datasets.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    for module, name in places:
        setattr(module, name, True)
    try:
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()
