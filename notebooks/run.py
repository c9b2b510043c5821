"""Runs the notebooks and writes their outputs in place, without what is particular to a machine or a moment.

    python notebooks/run.py                        all four in the full setting, one after the other
    python notebooks/run.py 03_state_rollback      one of them
    python notebooks/run.py --fast                 tiny settings: does everything run? Nothing is written.

Ctrl-C ends the notebook that runs; those that were finished keep their new outputs. Timings want a quiet machine.
"""

import argparse
import base64
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from PIL import Image

import hybridspec

HERE = Path(__file__).resolve().parent
PACKAGE = Path(hybridspec.__file__).resolve().parent
SETTING = "HYBRIDSPEC_NOTEBOOKS"
#: Seconds that one cell may take.
LIMIT = 1800

#: Codes of terminals, which tracebacks come with.
COLOUR = re.compile(r"\x1b\[[0-9;]*m")

Progress = Callable[[str], None]


class NotebookError(Exception):
    """A cell failed; says which and how."""


def notebooks() -> dict[str, Path]:
    """Name to file, in order."""
    return {path.stem: path for path in sorted(HERE.glob("*.ipynb"))}


def run(path: Path, fast: bool, progress: Progress = lambda _: None) -> NotebookNode:
    """The notebook with fresh outputs; the file is only read.

    Raises:
        NotebookError: a cell raised, took too long, or wrote a warning or a path of this machine; names it.
    """
    notebook = nbformat.read(path, as_version=4)
    code = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]

    def began(cell: NotebookNode, cell_index: int) -> None:
        progress(f"{path.stem}: cell {code.index(cell_index) + 1} of {len(code)}")

    client = NotebookClient(
        notebook,
        timeout=LIMIT,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_execute=began,
        store_widget_state=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
    )
    environment = {
        **os.environ,
        SETTING: "fast" if fast else "full",
        # tqdm, on import, without ipywidgets. Nothing here shows its bars.
        "PYTHONWARNINGS": "ignore:IProgress not found",
    }
    try:
        client.execute(env=environment)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        message = COLOUR.sub("", str(error))
        raise NotebookError(f"{describe(path, notebook)}\n{message}") from error
    clean(notebook)
    for number, index in enumerate(code, 1):
        problem = unwanted(notebook.cells[index])
        if problem:
            raise NotebookError(f"{path.name}, code cell {number}: {problem}")
    return notebook


def describe(path: Path, notebook: NotebookNode) -> str:
    """Which cell was the last to begin."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    ran = [number for number, cell in enumerate(code, 1) if cell.execution_count is not None]
    failed = [
        number for number, cell in enumerate(code, 1) if any(o.output_type == "error" for o in cell.get("outputs", ()))
    ]
    number = failed[0] if failed else (ran or [1])[-1]
    first = next((line for line in code[number - 1].source.splitlines() if line.strip()), "")
    return f"{path.name}, code cell {number} of {len(code)} ({first.strip()}):"


def clean(notebook: NotebookNode) -> None:
    """Leaves what tells about the subject: no times of execution, no version of this kernel, no folders."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", ()):
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
            if "text" in output:
                output.text = without_folders(output.text)
            for kind, content in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output.data[kind] = without_folders(content)
                elif kind == "image/png":
                    output.data[kind] = smaller(content)


def smaller(png: str) -> str:
    """A figure, in base64, with a palette: a third of the bytes, and the eye sees no difference."""
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(png))) as image:
        image.convert("RGB").quantize(128).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def without_folders(text: str) -> str:
    """Folders of this machine by what they are (the repository, the temporary folder, the home), and no addresses of
    objects.
    """
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    temporary = re.escape(tempfile.gettempdir()) + r"/[A-Za-z_-]*[A-Za-z0-9_]{8}(?=/|\b)"
    text = re.sub(temporary, "work", text)
    for folder, name in ((PACKAGE, PACKAGE.name), (f"{HERE.parent}{os.sep}", ""), (Path.home(), "~")):
        text = text.replace(str(folder), name)
    return text


#: How paths of somebody's machine begin.
MACHINE_PATH = re.compile(r"(?<![\w.~/:-])/(?:root|home|Users|tmp|private|work|opt|usr|mnt)/[\w./-]*")


def unwanted(cell: NotebookNode) -> str | None:
    """What no reader should meet in a cell's outputs."""
    for output in cell.get("outputs", ()):
        if output.output_type == "error":
            return f"{output.ename}: {output.evalue}"
        if output.output_type == "stream" and output.name == "stderr":
            return f"wrote to standard error: {output.text.strip()}"
        texts = [output.get("text", ""), *(v for k, v in output.get("data", {}).items() if k.startswith("text/"))]
        for text in texts:
            found = MACHINE_PATH.search(text)
            if found:
                return f"shows a path of this machine: {found[0]}"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks to run, by number or name; default: all")
    parser.add_argument("--fast", action="store_true", help="tiny settings, and nothing is written")
    parser.add_argument("--out", type=Path, help="write into this folder instead of in place (with --fast, too)")
    arguments = parser.parse_args(argv)
    known, names = notebooks(), [stem(name) for name in arguments.names]
    unknown = [n for n in names if not any(name.startswith(n) for name in known)]
    if unknown:
        parser.error(f"no notebook {unknown[0]!r}: choose {', '.join(known)}")
    for name, path in known.items():
        if names and not name.startswith(tuple(names)):
            continue
        begun = time.monotonic()
        try:
            notebook = run(path, arguments.fast, lambda text, since=begun: tell(text, since))
        except NotebookError as error:
            print(error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"\n{name}: interrupted, its file is as it was.", file=sys.stderr)
            return 130
        folder = arguments.out or (None if arguments.fast else HERE)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f"{name}.ipynb.partial"
            nbformat.write(notebook, partial)
            partial.replace(folder / f"{name}.ipynb")
        print(f"{name}: done in {time.monotonic() - begun:.0f} s" + (f", written to {folder.name}/" if folder else ""))
    return 0


def stem(name: str) -> str:
    return Path(name).name.removesuffix(".ipynb")


def tell(text: str, since: float) -> None:
    print(f"{text}, {time.monotonic() - since:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
